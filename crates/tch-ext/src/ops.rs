//! Kernels as functions of tensors: attention over packed sequences, norms, linear layers, logits.
//!
//! They replace compositions of libtorch's own operations that pad, copy, or keep more than they need. Where they are
//! differentiable, the gradients of weights are added to the weights' own `grad` tensors, in place: a function of a weight
//! must be the only one that tells autograd of it. As tch's plain methods they panic where tensors do not go together.

use crate::into_result;
use std::ffi::c_char;
use std::ptr::{null, null_mut};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

#[repr(C)]
struct RawAttention {
    heads: i64,
    kv_heads: i64,
    head_dim: i64,
    window: i64,
    scale: f64,
    softcap: f64,
    causal: bool,
    by_head: bool,
}

unsafe extern "C" {
    fn tch_ext_linear(
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        weight: *const C_tensor,
        used: *const C_tensor,
        bias: *const C_tensor,
        used_bias: *const C_tensor,
        transposed: bool,
    ) -> *mut c_char;
    fn tch_ext_embedding(out: *mut *mut C_tensor, table: *const C_tensor, ids: *const C_tensor) -> *mut c_char;
    fn tch_ext_norm(
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        weight: *const C_tensor,
        bias: *const C_tensor,
        eps: f64,
        center: bool,
        offset: f64,
        bf16: bool,
    ) -> *mut c_char;
    fn tch_ext_attention_packed(
        out: *mut *mut C_tensor,
        attention: *const RawAttention,
        inputs: *const *mut C_tensor,
        count: usize,
        cos: *const C_tensor,
        sin: *const C_tensor,
        starts: *const i64,
        rows: usize,
        keys: *const C_tensor,
        values: *const C_tensor,
        capacity: i64,
    ) -> *mut c_char;
    fn tch_ext_attention_step(
        out: *mut *mut C_tensor,
        attention: *const RawAttention,
        inputs: *const *mut C_tensor,
        count: usize,
        cos: *const C_tensor,
        sin: *const C_tensor,
        lens: *const i64,
        rows: usize,
        keys: *const C_tensor,
        values: *const C_tensor,
        capacity: i64,
    ) -> *mut c_char;
    fn tch_ext_logits_stats(
        logprobs: *mut *mut C_tensor,
        lse: *mut *mut C_tensor,
        entropy: *mut *mut C_tensor,
        logits: *const C_tensor,
        inv_temperature: f64,
        targets: *const C_tensor,
    ) -> *mut c_char;
    fn tch_ext_logits_gradient(
        logits: *mut C_tensor,
        inv_temperature: f64,
        targets: *const C_tensor,
        lse: *const C_tensor,
        coefficients: *const C_tensor,
        entropy: *const C_tensor,
        of_entropy: *const C_tensor,
    ) -> *mut c_char;
    fn tch_ext_logits_sample(
        logits: *const C_tensor,
        inv_temperature: f64,
        draws: *const f64,
        tokens: *mut i64,
        logprobs: *mut f32,
        rows: usize,
    ) -> *mut c_char;
    fn tch_ext_residual(
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        a: *const C_tensor,
        b: *const C_tensor,
    ) -> *mut c_char;
    fn tch_ext_product_into(out: *mut C_tensor, a: *const C_tensor, b: *const C_tensor) -> *mut c_char;
    fn tch_ext_add_product(leaf: *const C_tensor, a: *const C_tensor, b: *const C_tensor) -> *mut c_char;
    fn tch_ext_flash_attention_varlen(
        out: *mut *mut C_tensor,
        attention: *const RawAttention,
        q: *const C_tensor,
        k: *const C_tensor,
        v: *const C_tensor,
        starts: *const C_tensor,
        width: i64,
    ) -> *mut c_char;
    fn tch_ext_backward(x: *const C_tensor, grad: *const C_tensor) -> *mut c_char;
}

/// Whether there are kernels for tensors of this dtype on this device.
pub fn has_kernels(kind: Kind, device: Device) -> bool {
    device == Device::Cpu && matches!(kind, Kind::Float | Kind::BFloat16)
}

/// What kind of attention a layer has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Query heads.
    pub heads: i64,
    /// Key and value heads; they divide `heads`.
    pub kv_heads: i64,
    /// Width of a head.
    pub head_dim: i64,
    /// What products of queries and keys are multiplied by.
    pub scale: f64,
    /// Scores `x` become `cap * tanh(x / cap)`.
    pub softcap: Option<f64>,
    /// How many tokens, itself included, a token sees.
    pub window: Option<i64>,
    /// Whether a token sees only those before it, and itself.
    pub causal: bool,
    /// Whether a projection of all three has query, key and value of a head beside one another (GPT-NeoX); else it has all
    /// queries, then all keys, then all values.
    pub by_head: bool,
}

impl Attention {
    fn raw(&self) -> RawAttention {
        RawAttention {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            window: self.window.unwrap_or(0),
            scale: self.scale,
            softcap: self.softcap.unwrap_or(0.0),
            causal: self.causal,
            by_head: self.by_head,
        }
    }
}

/// Keys (turned) and values of earlier tokens, `[rows * capacity, kv_heads * head_dim]` each.
#[derive(Debug)]
pub struct Cache<'a> {
    /// The keys.
    pub keys: &'a mut Tensor,
    /// The values.
    pub values: &'a mut Tensor,
    /// Places of a row.
    pub capacity: i64,
}

/// Attention within each of several sequences that are packed one after another; `[N, heads * head_dim]`.
///
/// `projections` are one tensor `[N, (heads + 2 * kv_heads) * head_dim]` or queries, keys and values; `rotation` holds cosines
/// and sines, `[N, half]` f32 each: dimension i of a head turns with i + half. `starts` says where each sequence begins, and
/// has the end last; tokens behind it are padding, which gets 0. Sums are made in f32. Differentiable in the projections; with a cache, where keys and values are stored
/// at the beginning of the rows, it is not.
///
/// # Panics
/// If the tensors do not go together.
pub fn attention(
    attention: &Attention,
    projections: &[Tensor],
    rotation: Option<&(Tensor, Tensor)>,
    starts: &[i64],
    cache: Option<Cache<'_>>,
) -> Tensor {
    assert!(matches!(projections.len(), 1 | 3), "attention: expected one projection or three");
    let rows = starts.len().checked_sub(1).expect("`starts` has an end");
    assert!(
        starts[0] == 0 && starts.windows(2).all(|pair| pair[0] < pair[1]),
        "attention: expected rows of at least one token, found them to begin at {starts:?}"
    );
    let inputs: Vec<_> = projections.iter().map(|t| t.as_ptr().cast_mut()).collect();
    let (keys, values, capacity) = match cache {
        Some(Cache { keys, values, capacity }) => (keys.as_ptr(), values.as_ptr(), capacity),
        None => (null(), null(), i64::MAX),
    };
    let fits = starts.windows(2).all(|pair| pair[1] - pair[0] <= capacity);
    assert!(fits, "attention: a sequence is longer than the cache's {capacity} places");
    let (cos, sin) = rotation.map_or((null(), null()), |(cos, sin)| (cos.as_ptr(), sin.as_ptr()));
    // SAFETY: the pointers are those of tensors and slices that this call borrows, the cache's mutably; the shim checks all
    // shapes and dtypes against each other before a kernel runs, and the asserts above what it cannot know of `starts`.
    new_tensor(|out| unsafe {
        tch_ext_attention_packed(
            out,
            &attention.raw(),
            inputs.as_ptr(),
            inputs.len(),
            cos,
            sin,
            starts.as_ptr(),
            rows,
            keys,
            values,
            capacity,
        )
    })
}

/// Attention of one more token per row to all of its row in `cache`, where it is stored: `[rows, heads * head_dim]`.
///
/// `projections` and `rotation` are as in [`attention()`], with one token per row; `lens` says how many tokens each row has
/// already. Not differentiable.
///
/// # Panics
/// If the tensors do not go together, or a row is full.
pub fn attention_step(
    attention: &Attention,
    projections: &[Tensor],
    rotation: Option<&(Tensor, Tensor)>,
    lens: &[i64],
    Cache { keys, values, capacity }: Cache<'_>,
) -> Tensor {
    assert!(matches!(projections.len(), 1 | 3), "attention: expected one projection or three");
    let inputs: Vec<_> = projections.iter().map(|t| t.as_ptr().cast_mut()).collect();
    let (cos, sin) = rotation.map_or((null(), null()), |(cos, sin)| (cos.as_ptr(), sin.as_ptr()));
    // SAFETY: as in `attention`; the shim checks that each of `lens` leaves room in its row.
    new_tensor(|out| unsafe {
        tch_ext_attention_step(
            out,
            &attention.raw(),
            inputs.as_ptr(),
            inputs.len(),
            cos,
            sin,
            lens.as_ptr(),
            lens.len(),
            keys.as_ptr(),
            values.as_ptr(),
            capacity,
        )
    })
}

/// libtorch's flash attention within each of several packed sequences, on a GPU that has it: `q` `[N, heads, head_dim]`, `k` and
/// `v` with their own number of heads, all f16 or bf16, to `[N, heads, head_dim]`; differentiable in all three.
///
/// `starts` `[sequences + 1]` i32 says where each sequence begins, and the end of the last; `width` is the longest's length.
/// Soft-caps are not known to it.
///
/// # Panics
/// If the tensors do not go together, or lie on the processor.
pub fn flash_attention_varlen(
    attention: &Attention,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    starts: &Tensor,
    width: i64,
) -> Tensor {
    assert!(attention.softcap.is_none(), "flash attention: no soft-cap");
    let (q, k, v, starts) = (q.as_ptr(), k.as_ptr(), v.as_ptr(), starts.as_ptr());
    // SAFETY: as in `linear`.
    new_tensor(|out| unsafe { tch_ext_flash_attention_varlen(out, &attention.raw(), q, k, v, starts, width) })
}

/// A linear layer `[N, in]` to `[N, out]` in the dtype of `used`, which is `weight` in the dtype of the product; of the bias,
/// too, the leaf and what is used.
///
/// Weights are `[out, in]`, `transposed` ones `[in, out]`. Differentiable in `x` and in the leaves.
///
/// # Panics
/// If the tensors do not go together.
pub fn linear(
    x: &Tensor,
    weight: &Tensor,
    used: &Tensor,
    bias: Option<(&Tensor, &Tensor)>,
    transposed: bool,
) -> Tensor {
    let (bias, used_bias) = bias.map_or((null(), null()), |(leaf, used)| (leaf.as_ptr(), used.as_ptr()));
    // SAFETY: all pointers are those of borrowed tensors; autograd keeps counted references to them, as it does for tch.
    new_tensor(|out| unsafe {
        tch_ext_linear(out, x.as_ptr(), weight.as_ptr(), used.as_ptr(), bias, used_bias, transposed)
    })
}

/// Rows `ids` `[N]` i64 of `table`, in its dtype; differentiable in the table.
///
/// # Panics
/// If an id is outside the table.
pub fn embedding(table: &Tensor, ids: &Tensor) -> Tensor {
    // SAFETY: as in `linear`.
    new_tensor(|out| unsafe { tch_ext_embedding(out, table.as_ptr(), ids.as_ptr()) })
}

/// How a norm is made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// Added to the variance, or to the mean square.
    pub eps: f64,
    /// Whether the mean is taken off first: a layer norm, else an RMS norm.
    pub center: bool,
    /// Added to the weight.
    pub offset: f64,
}

/// The norm over the last dimension of `x`, which is f32, as f32 or bf16 (`kind`); differentiable in all three.
///
/// # Panics
/// If the tensors do not go together.
pub fn norm(norm: Norm, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Tensor {
    assert!(has_kernels(kind, x.device()), "norm: there is no kernel for {kind:?} on {:?}", x.device());
    let bias = bias.map_or(null(), |bias| bias.as_ptr());
    let bf16 = kind == Kind::BFloat16;
    // SAFETY: as in `linear`; the shim checks dtypes and widths.
    new_tensor(|out| unsafe {
        tch_ext_norm(out, x.as_ptr(), weight.as_ptr(), bias, norm.eps, norm.center, norm.offset, bf16)
    })
}

/// What [`logits_stats`] gives, `[rows]` f32 each.
#[derive(Debug)]
pub struct LogitsStats {
    /// Log-probability of the target.
    pub logprobs: Tensor,
    /// Logarithm of the sum of the exponentials.
    pub lse: Tensor,
    /// Entropy in nats.
    pub entropy: Option<Tensor>,
}

/// What rows of `logits` `[rows, vocab]` f32 or bf16, over `temperature`, say of `targets` `[rows]` i64; in one pass over them.
///
/// # Panics
/// If the tensors do not go together, or a target is outside the vocabulary.
pub fn logits_stats(logits: &Tensor, temperature: f64, targets: &Tensor, with_entropy: bool) -> LogitsStats {
    let (mut logprobs, mut lse, mut entropy) = (null_mut(), null_mut(), null_mut());
    let entropy_out = if with_entropy { &raw mut entropy } else { null_mut() };
    // SAFETY: the shim reads two borrowed tensors, whose shapes it checks, and fills in the pointers if it gives no message.
    let message = unsafe {
        tch_ext_logits_stats(
            &raw mut logprobs,
            &raw mut lse,
            entropy_out,
            logits.as_ptr(),
            temperature.recip(),
            targets.as_ptr(),
        )
    };
    expect(into_result(message));
    // SAFETY: each pointer is a fresh tensor of ours.
    unsafe {
        LogitsStats {
            logprobs: Tensor::from_ptr(logprobs),
            lse: Tensor::from_ptr(lse),
            entropy: with_entropy.then(|| Tensor::from_ptr(entropy)),
        }
    }
}

/// Turns logits, in place, into the gradient of sum(`coefficients` * logprobs), as [`logits_stats`] gives these and `lse`.
///
/// `entropy` holds the rows' entropies and the coefficients of a second sum, that of the entropies, which is added.
///
/// # Panics
/// If the tensors do not go together.
pub fn logits_gradient(
    logits: &mut Tensor,
    temperature: f64,
    targets: &Tensor,
    lse: &Tensor,
    coefficients: &Tensor,
    entropy: Option<(&Tensor, &Tensor)>,
) {
    let (entropy, of_entropy) = entropy.map_or((null(), null()), |(value, slope)| (value.as_ptr(), slope.as_ptr()));
    // SAFETY: `logits` is borrowed mutably, the others are read; the shim checks their shapes.
    expect(into_result(unsafe {
        tch_ext_logits_gradient(
            logits.as_mut_ptr(),
            temperature.recip(),
            targets.as_ptr(),
            lse.as_ptr(),
            coefficients.as_ptr(),
            entropy,
            of_entropy,
        )
    }));
}

/// Draws a token per row of `logits` `[rows, vocab]` over `temperature` by the inverse of the cumulative distribution at the
/// row's draw (0 to 1), or takes the likeliest where there are no `draws`; with its log-probability, which is not finite
/// where the logits are not.
///
/// # Panics
/// If there is not one draw per row, or the tensor is not `[rows, vocab]`, contiguous, f32 or bf16.
pub fn logits_sample(logits: &Tensor, temperature: f64, draws: Option<&[f64]>) -> (Vec<i64>, Vec<f32>) {
    let rows = logits.size()[0] as usize;
    assert!(draws.is_none_or(|draws| draws.len() == rows), "logits: expected {rows} draws");
    let (mut tokens, mut logprobs) = (vec![0; rows], vec![0.0; rows]);
    let draws = draws.map_or(null(), <[f64]>::as_ptr);
    // SAFETY: `tokens`, `logprobs` and `draws` have `rows` elements, which the shim checks to be the tensor's rows.
    expect(into_result(unsafe {
        tch_ext_logits_sample(
            logits.as_ptr(),
            temperature.recip(),
            draws,
            tokens.as_mut_ptr(),
            logprobs.as_mut_ptr(),
            rows,
        )
    }));
    (tokens, logprobs)
}

/// Fills `out` with the product of two matrices, by the faster of libtorch's two libraries; not differentiable.
///
/// # Panics
/// If the tensors do not go together.
pub fn product_into(out: &mut Tensor, a: &Tensor, b: &Tensor) {
    // SAFETY: `out` is borrowed mutably, the others are read.
    expect(into_result(unsafe { tch_ext_product_into(out.as_mut_ptr(), a.as_ptr(), b.as_ptr()) }));
}

/// The residual stream `x`, f32, with one or two branches, both f32 or both bf16, added; differentiable in all.
///
/// # Panics
/// If the tensors do not go together.
pub fn residual(x: &Tensor, a: &Tensor, b: Option<&Tensor>) -> Tensor {
    // SAFETY: as in `linear`.
    new_tensor(|out| unsafe { tch_ext_residual(out, x.as_ptr(), a.as_ptr(), b.map_or(null(), |b| b.as_ptr())) })
}

/// Adds the product of `a` and `b` to the gradient of `leaf`, in place.
///
/// # Panics
/// If the shapes do not go together.
pub fn add_product_to_grad(leaf: &Tensor, a: &Tensor, b: &Tensor) {
    // SAFETY: three borrowed tensors; the gradient belongs to the leaf, which autograd may change at any time.
    expect(into_result(unsafe { tch_ext_add_product(leaf.as_ptr(), a.as_ptr(), b.as_ptr()) }));
}

/// Goes back through the graph of `x`, where `grad` is its gradient.
///
/// # Panics
/// If `x` has no graph, or `grad` is not of its shape.
pub fn backward(x: &Tensor, grad: &Tensor) {
    // SAFETY: two borrowed tensors; what autograd keeps of them it counts.
    expect(into_result(unsafe { tch_ext_backward(x.as_ptr(), grad.as_ptr()) }));
}

/// The tensor that `f` makes.
fn new_tensor(f: impl FnOnce(*mut *mut C_tensor) -> *mut c_char) -> Tensor {
    let mut out = null_mut();
    expect(into_result(f(&raw mut out)));
    // SAFETY: without a message `out` is a fresh tensor of ours.
    unsafe { Tensor::from_ptr(out) }
}

fn expect(result: Result<(), String>) {
    if let Err(message) = result {
        panic!("{message}");
    }
}
