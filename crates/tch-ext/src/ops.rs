//! Kernels as functions of tensors: attention over packed sequences, norms, linear layers, logits.
//!
//! They replace compositions of libtorch operations that pad, copy or save more than they need. Differentiable functions add
//! the gradients of weights to the weights' `grad` tensors in place, so autograd must not see the same use of a weight through
//! another operation. Like the plain methods of tch, they panic if tensors have incompatible shapes, dtypes or devices.

use crate::into_result;
use std::ffi::{c_char, c_int};
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

#[repr(C)]
struct RawQuantized {
    width_out: i64,
    width_in: i64,
    block: i64,
    nested_block: i64,
    codes: *const C_tensor,
    map: *const C_tensor,
    scales: *const C_tensor,
    nested_map: *const C_tensor,
    nested_scales: *const C_tensor,
    offset: f64,
}

unsafe extern "C" {
    fn tch_ext_dequantize(
        out: *mut *mut C_tensor,
        weight: *const RawQuantized,
        dtype: c_int,
        plain: bool,
    ) -> *mut c_char;
    fn tch_ext_quantized_linear(
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        weight: *const RawQuantized,
        bias: *const C_tensor,
        a: *const C_tensor,
        b: *const C_tensor,
        scale: f64,
        dtype: c_int,
    ) -> *mut c_char;
    fn tch_ext_multiplies_quantized(
        out: *mut bool,
        weight: *const RawQuantized,
        rows: i64,
        dtype: c_int,
    ) -> *mut c_char;
    fn tch_ext_linear(
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        weight: *const C_tensor,
        used: *const C_tensor,
        bias: *const C_tensor,
        used_bias: *const C_tensor,
        transposed: bool,
    ) -> *mut c_char;
    fn tch_ext_adapted_linear(
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        used: *const C_tensor,
        used_bias: *const C_tensor,
        transposed: bool,
        a: *const C_tensor,
        b: *const C_tensor,
        scale: f64,
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
        entropy_coefficients: *const C_tensor,
    ) -> *mut c_char;
    fn tch_ext_logits_sample(
        logits: *const C_tensor,
        inv_temperature: f64,
        draws: *const f64,
        tokens: *mut i64,
        logprobs: *mut f32,
        rows: usize,
    ) -> *mut c_char;
    fn tch_ext_rotate(
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        cos: *const C_tensor,
        sin: *const C_tensor,
        parts: i64,
        dtype: c_int,
    ) -> *mut c_char;
    fn tch_ext_residual(
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        a: *const C_tensor,
        b: *const C_tensor,
    ) -> *mut c_char;
    fn tch_ext_onednn_takes_f32() -> bool;
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
    fn tch_ext_orders_sums() -> bool;
    fn tch_ext_select_rows(out: *mut *mut C_tensor, x: *const C_tensor, index: *const C_tensor) -> *mut c_char;
}

/// Returns true if there are kernels for tensors of this dtype on this device: f32 and bf16 on the CPU. False while the CPU emulates a GPU's kernels.
pub fn has_kernels(kind: Kind, device: Device) -> bool {
    device == Device::Cpu && matches!(kind, Kind::Float | Kind::BFloat16) && !crate::has_gpu_kernels(kind, device)
}

/// Number of tokens to whose multiples packed tokens are best padded, for products of this dtype on the CPU: oneDNN takes milliseconds
/// for each new shape, MKL does not.
pub fn token_multiple(kind: Kind) -> usize {
    // SAFETY: takes no arguments, and reads what processor this is.
    let onednn = kind != Kind::Float || unsafe { tch_ext_onednn_takes_f32() };
    if onednn { 128 } else { 16 }
}

/// Configuration of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Number of query heads.
    pub heads: i64,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: i64,
    /// Dimension of a head.
    pub head_dim: i64,
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// Soft-capping of attention scores: `x` becomes `cap * tanh(x / cap)`.
    pub softcap: Option<f64>,
    /// Sliding window: number of tokens that a token attends to, itself included.
    pub window: Option<i64>,
    /// True if a token attends only to itself and earlier tokens.
    pub causal: bool,
    /// Layout of a fused projection. True: query, key and value of each head are adjacent (GPT-NeoX). False: all queries, then
    /// all keys, then all values.
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

/// Key-value cache: rotated keys and values of earlier tokens, `[rows * capacity, kv_heads * head_dim]` each.
#[derive(Debug)]
pub struct Cache<'a> {
    /// The keys.
    pub keys: &'a mut Tensor,
    /// The values.
    pub values: &'a mut Tensor,
    /// Number of tokens per row that fit.
    pub capacity: i64,
}

/// Attention within each of several packed sequences; returns `[N, heads * head_dim]`.
///
/// `projections` is one fused tensor `[N, (heads + 2 * kv_heads) * head_dim]`, or queries, keys and values. `rotation` has the
/// cosines and sines of the rotary embedding, `[N, half]` f32 each; dimension i of a head is rotated with dimension i + half.
/// `starts` has the offset of each sequence and the end of the last; tokens after it are padding, whose output is 0. Sums are
/// f32. Differentiable in the projections, unless there is a cache: then keys and values are stored at the start of its rows.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
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
        "attention: expected sequences of at least one token, found the offsets {starts:?}"
    );
    let inputs: Vec<_> = projections.iter().map(|t| t.as_ptr().cast_mut()).collect();
    let (keys, values, capacity) = match cache {
        Some(Cache { keys, values, capacity }) => (keys.as_ptr(), values.as_ptr(), capacity),
        None => (null(), null(), i64::MAX),
    };
    let fits = starts.windows(2).all(|pair| pair[1] - pair[0] <= capacity);
    assert!(fits, "attention: a sequence is longer than the cache's capacity of {capacity} tokens");
    let (cos, sin) = rotation.map_or((null(), null()), |(cos, sin)| (cos.as_ptr(), sin.as_ptr()));
    // SAFETY: all pointers are to tensors and slices that this call borrows, those of the cache mutably. The shim checks all
    // shapes and dtypes before a kernel runs; the asserts above check `starts`, which it cannot.
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

/// Attention of one new token per row to all tokens of its row in `cache`; appends its key and value there. Returns
/// `[rows, heads * head_dim]`.
///
/// `projections` and `rotation` are as in [`attention()`], with one token per row. `lens` has the number of tokens that each
/// row already holds. Not differentiable.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible, or a row is full.
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
    // SAFETY: as in `attention`; the shim checks that every row has room for one more token.
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

/// libtorch's flash attention within each of several packed sequences, on a GPU that supports it. Differentiable in `q`, `k` and
/// `v`.
///
/// `q` is `[N, heads, head_dim]`; `k` and `v` have their own number of heads; all are f16 or bf16. Returns
/// `[N, heads, head_dim]`. `starts`, `[sequences + 1]` i32, has the offset of each sequence and the end of the last; `width` is
/// the length of the longest. Soft-capping is not supported.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible, or the tensors are on the CPU.
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

/// libtorch's numbers of its attention implementations.
const CHOICE_FLASH: i64 = 1;
const CHOICE_CUDNN: i64 = 3;

/// Whether the GPU of `q`, `[N, heads, head_dim]`, has libtorch's flash attention for such heads.
pub fn has_flash_attention(q: &Tensor, scale: f64) -> bool {
    if !q.device().is_cuda() {
        return false;
    }
    // libtorch has no query for the GPU's support. If it would choose flash attention for one sequence, or cuDNN's, which newer
    // GPUs prefer, flash attention is supported.
    let q = q.unsqueeze(0).transpose(1, 2);
    let choice = Tensor::internal_fused_sdp_choice(&q, &q, &q, None::<&Tensor>, 0.0, true, Some(scale), false);
    [CHOICE_FLASH, CHOICE_CUDNN].contains(&choice)
}

/// A linear layer from `[N, in]` to `[N, out]`, computed in the dtype of `used`. Differentiable in `x` and in the leaves.
///
/// `weight` is the leaf, and `used` the same values in the compute dtype; `bias` is such a pair too. Weights are `[out, in]`, or
/// `[in, out]` if `transposed`.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn linear(
    x: &Tensor,
    weight: &Tensor,
    used: &Tensor,
    bias: Option<(&Tensor, &Tensor)>,
    transposed: bool,
) -> Tensor {
    let (bias, used_bias) = bias.map_or((null(), null()), |(leaf, used)| (leaf.as_ptr(), used.as_ptr()));
    // SAFETY: all pointers are to borrowed tensors; autograd holds counted references to them, as it does for tch.
    new_tensor(|out| unsafe {
        tch_ext_linear(out, x.as_ptr(), weight.as_ptr(), used.as_ptr(), bias, used_bias, transposed)
    })
}

/// Low-rank matrices in addition to the weight of a linear layer, both f32.
#[derive(Debug, Clone, Copy)]
pub struct LowRank<'a> {
    /// `[r, in]`.
    pub a: &'a Tensor,
    /// `[out, r]`.
    pub b: &'a Tensor,
    /// Factor of their product.
    pub scale: f64,
}

/// [`linear`] with a frozen weight, plus `scale (x a^T) b^T`, computed in f32. In bf16 the result of [`linear`] is rounded,
/// and then the sum. Differentiable in `x` and in the leaves `a` and `b`.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn adapted_linear(
    x: &Tensor,
    used: &Tensor,
    bias: Option<&Tensor>,
    transposed: bool,
    adapter: LowRank<'_>,
) -> Tensor {
    let bias = bias.map_or(null(), |bias| bias.as_ptr());
    let LowRank { a, b, scale } = adapter;
    // SAFETY: as in `linear`.
    new_tensor(|out| unsafe {
        tch_ext_adapted_linear(out, x.as_ptr(), used.as_ptr(), bias, transposed, a.as_ptr(), b.as_ptr(), scale)
    })
}

/// A weight `[out, in]` in a format of bitsandbytes; all tensors are contiguous and on one device.
///
/// With a map of four bits, two codes are in a byte, the first in the high bits; the value of a code is its entry in the map times the
/// scale of its block of consecutive values. Without one, it is the code times the scale of its row.
#[derive(Debug, Clone, Copy)]
pub struct Quantized<'a> {
    /// Output and input width.
    pub widths: [i64; 2],
    /// u8, two codes to a byte, or i8 `[out, in]`.
    pub codes: &'a Tensor,
    /// f32 `[16]`; `None` for eight bits.
    pub map: Option<&'a Tensor>,
    /// f32, or with `nested` the u8 codes of the scales.
    pub scales: &'a Tensor,
    /// Number of consecutive values with one scale, a power of two from 32 on; not used for eight bits.
    pub block: i64,
    /// The scales' own quantization.
    pub nested: Option<NestedScales<'a>>,
}

/// Quantized scales: the value of a code is its entry in the map times the scale of its block, plus the offset.
#[derive(Debug, Clone, Copy)]
pub struct NestedScales<'a> {
    /// f32 `[256]`.
    pub map: &'a Tensor,
    /// f32.
    pub scales: &'a Tensor,
    /// Number of consecutive scales with one scale.
    pub block: i64,
    /// Added to each scale.
    pub offset: f32,
}

impl Quantized<'_> {
    fn raw(&self) -> RawQuantized {
        let pointer = |tensor: Option<&Tensor>| tensor.map_or(null(), |tensor| tensor.as_ptr());
        RawQuantized {
            width_out: self.widths[0],
            width_in: self.widths[1],
            block: self.block,
            nested_block: self.nested.map_or(0, |nested| nested.block),
            codes: self.codes.as_ptr(),
            map: pointer(self.map),
            scales: self.scales.as_ptr(),
            nested_map: pointer(self.nested.map(|nested| nested.map)),
            nested_scales: pointer(self.nested.map(|nested| nested.scales)),
            offset: self.nested.map_or(0.0, |nested| f64::from(nested.offset)),
        }
    }
}

/// Returns the values of a quantized weight, `[out, in]`, computed in f32 and rounded to `kind` once. With `plain` they are computed by
/// libtorch's operations alone, with the same result.
///
/// # Panics
/// If the tensors do not fit together.
pub fn dequantize(weight: &Quantized<'_>, kind: Kind, plain: bool) -> Tensor {
    let raw = weight.raw();
    // SAFETY: `raw` has pointers to borrowed tensors, or null; the shim checks their dtypes and sizes.
    new_tensor(|out| unsafe { tch_ext_dequantize(out, &raw const raw, kind_number(kind), plain) })
}

/// libtorch's number of a dtype of products.
pub(crate) fn kind_number(kind: Kind) -> c_int {
    match kind {
        Kind::Float => 6,
        Kind::Half => 5,
        Kind::BFloat16 => 15,
        other => panic!("expected f32, f16 or bf16, found {other:?}"),
    }
}

/// A linear layer from `[N, in]` to `[N, out]` with a quantized weight, computed in `kind`, which is the dtype of `bias` too; with an
/// `adapter`, as [`adapted_linear`]. Differentiable in `x` and in the adapter's leaves; the graph stores no values of the weight.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn quantized_linear(
    x: &Tensor,
    weight: &Quantized<'_>,
    bias: Option<&Tensor>,
    adapter: Option<LowRank<'_>>,
    kind: Kind,
) -> Tensor {
    let raw = weight.raw();
    let bias = bias.map_or(null(), |bias| bias.as_ptr());
    let (a, b) = adapter.map_or((null(), null()), |adapter| (adapter.a.as_ptr(), adapter.b.as_ptr()));
    let scale = adapter.map_or(0.0, |adapter| adapter.scale);
    // SAFETY: as in `dequantize`; autograd holds counted references to the tensors.
    new_tensor(|out| unsafe {
        tch_ext_quantized_linear(out, x.as_ptr(), &raw const raw, bias, a, b, scale, kind_number(kind))
    })
}

/// Whether a GPU's kernel computes [`quantized_linear`] of `rows` rows in `kind` from the codes of `weight`. Otherwise libtorch's operations
/// compute the values of the weight in each call, the same operations each time, without waiting for the GPU.
///
/// # Panics
/// If the dtype is none of products.
pub fn multiplies_quantized(weight: &Quantized<'_>, rows: i64, kind: Kind) -> bool {
    let (raw, mut found) = (weight.raw(), false);
    // SAFETY: as in `dequantize`; both pointers live until the call returns, and no number is read.
    expect(into_result(unsafe {
        tch_ext_multiplies_quantized(&raw mut found, &raw const raw, rows, kind_number(kind))
    }));
    found
}

/// Returns the rows `ids`, `[N]` i64, of `table`, in its dtype. Differentiable in the table.
///
/// # Panics
/// If an id is outside the table.
pub fn embedding(table: &Tensor, ids: &Tensor) -> Tensor {
    // SAFETY: as in `linear`.
    new_tensor(|out| unsafe { tch_ext_embedding(out, table.as_ptr(), ids.as_ptr()) })
}

/// Configuration of a normalization layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// Added to the variance, or to the mean square.
    pub eps: f64,
    /// True for a layer norm, which subtracts the mean; false for an RMS norm.
    pub center: bool,
    /// Added to the weight.
    pub offset: f64,
}

/// Normalizes the last dimension of `x`, f32; returns f32 or bf16 (`kind`). Differentiable in `x`, `weight` and `bias`.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn norm(norm: Norm, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Tensor {
    let there = has_kernels(kind, x.device()) || crate::has_gpu_kernels(kind, x.device());
    assert!(there, "norm: there is no kernel for {kind:?} on {:?}", x.device());
    let bias = bias.map_or(null(), |bias| bias.as_ptr());
    let bf16 = kind == Kind::BFloat16;
    // SAFETY: as in `linear`; the shim checks dtypes and widths.
    new_tensor(|out| unsafe {
        tch_ext_norm(out, x.as_ptr(), weight.as_ptr(), bias, norm.eps, norm.center, norm.offset, bf16)
    })
}

/// The result of [`logits_stats`], `[rows]` f32 each.
#[derive(Debug)]
pub struct LogitsStats {
    /// Log-probability of the target.
    pub logprobs: Tensor,
    /// Log-sum-exp of the logits.
    pub lse: Tensor,
    /// Entropy in nats.
    pub entropy: Option<Tensor>,
}

/// Computes log-probabilities of `targets`, `[rows]` i64, and statistics of `logits / temperature`, in one pass over `logits`,
/// `[rows, vocab]` f32 or bf16.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible, or a target is outside the vocabulary.
pub fn logits_stats(logits: &Tensor, temperature: f64, targets: &Tensor, with_entropy: bool) -> LogitsStats {
    let (mut logprobs, mut lse, mut entropy) = (null_mut(), null_mut(), null_mut());
    let entropy_out = if with_entropy { &raw mut entropy } else { null_mut() };
    // SAFETY: the shim reads two borrowed tensors, checks their shapes, and sets the pointers unless it returns a message.
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
    // SAFETY: each pointer is to a new tensor that the caller owns.
    unsafe {
        LogitsStats {
            logprobs: Tensor::from_ptr(logprobs),
            lse: Tensor::from_ptr(lse),
            entropy: with_entropy.then(|| Tensor::from_ptr(entropy)),
        }
    }
}

/// Replaces logits, in place, by the gradient of sum(`coefficients` * logprobs), with logprobs and `lse` of [`logits_stats`].
///
/// `entropy` has the entropies of the rows and their coefficients; with it, the gradient of sum(coefficients * entropies) is
/// added.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn logits_gradient(
    logits: &mut Tensor,
    temperature: f64,
    targets: &Tensor,
    lse: &Tensor,
    coefficients: &Tensor,
    entropy: Option<(&Tensor, &Tensor)>,
) {
    let (entropy, entropy_coefficients) =
        entropy.map_or((null(), null()), |(value, slope)| (value.as_ptr(), slope.as_ptr()));
    // SAFETY: `logits` is borrowed mutably, the others are read; the shim checks their shapes.
    expect(into_result(unsafe {
        tch_ext_logits_gradient(
            logits.as_mut_ptr(),
            temperature.recip(),
            targets.as_ptr(),
            lse.as_ptr(),
            coefficients.as_ptr(),
            entropy,
            entropy_coefficients,
        )
    }));
}

/// Samples one token per row of `logits / temperature`, `[rows, vocab]`, and returns the tokens with their log-probabilities.
///
/// A token is the inverse of the cumulative distribution at the row's draw, uniform in [0, 1); without `draws`, it is the most
/// likely one. The log-probability is not finite if the row's logits are not.
///
/// # Panics
/// If there is not one draw per row, or the tensor is not `[rows, vocab]`, contiguous, f32 or bf16.
pub fn logits_sample(logits: &Tensor, temperature: f64, draws: Option<&[f64]>) -> (Vec<i64>, Vec<f32>) {
    let rows = logits.size()[0] as usize;
    assert!(draws.is_none_or(|draws| draws.len() == rows), "logits: expected {rows} draws");
    let (mut tokens, mut logprobs) = (vec![0; rows], vec![0.0; rows]);
    let draws = draws.map_or(null(), <[f64]>::as_ptr);
    // SAFETY: `tokens`, `logprobs` and `draws` have `rows` elements; the shim checks that the tensor has that many rows.
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

/// Writes the product of two matrices to `out`, by the faster of libtorch's two libraries, MKL and oneDNN. Not differentiable.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn product_into(out: &mut Tensor, a: &Tensor, b: &Tensor) {
    // SAFETY: `out` is borrowed mutably, the others are read.
    expect(into_result(unsafe { tch_ext_product_into(out.as_mut_ptr(), a.as_ptr(), b.as_ptr()) }));
}

/// Rotates the first dimensions of the first `parts` entries of `x` `[N, heads, entries, head_dim]` by rotary angles, in f32, and returns
/// all entries in `kind`. The angles' cosines and sines are `[N, dim / 2]` f32; dimension `i` is paired with `i + dim / 2`, as in Hugging
/// Face's models. On every device. Differentiable in `x`.
///
/// # Panics
/// If the shapes or devices are incompatible.
pub fn rotate(x: &Tensor, (cos, sin): (&Tensor, &Tensor), parts: i64, kind: Kind) -> Tensor {
    // SAFETY: as in `linear`.
    new_tensor(|out| unsafe { tch_ext_rotate(out, x.as_ptr(), cos.as_ptr(), sin.as_ptr(), parts, kind_number(kind)) })
}

/// Adds one or two branches, both f32 or both bf16, to the residual stream `x`, f32. Differentiable in all.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn residual(x: &Tensor, a: &Tensor, b: Option<&Tensor>) -> Tensor {
    // SAFETY: as in `linear`.
    new_tensor(|out| unsafe { tch_ext_residual(out, x.as_ptr(), a.as_ptr(), b.map_or(null(), |b| b.as_ptr())) })
}

/// Adds the product of `a` and `b` to the gradient of `leaf`, in place.
///
/// # Panics
/// If the shapes are incompatible.
pub fn add_product_to_grad(leaf: &Tensor, a: &Tensor, b: &Tensor) {
    // SAFETY: three borrowed tensors. The gradient is owned by the leaf; autograd may change it at any time.
    expect(into_result(unsafe { tch_ext_add_product(leaf.as_ptr(), a.as_ptr(), b.as_ptr()) }));
}

/// The rows `index`, i64, of `x`; a row may be selected several times. With `RLHF_SUMS=ordered` its gradient on a GPU is summed in a
/// fixed order, and in f32; otherwise, and on a CPU, this is libtorch's `index_select`.
///
/// # Panics
/// If the devices differ, or an index is outside of `x`.
pub fn select_rows(x: &Tensor, index: &Tensor) -> Tensor {
    // SAFETY: takes no arguments, and reads the environment once.
    if x.device().is_cuda() && unsafe { tch_ext_orders_sums() } {
        return select_in_order(x, index);
    }
    x.index_select(0, index)
}

fn select_in_order(x: &Tensor, index: &Tensor) -> Tensor {
    // SAFETY: as in `linear`.
    new_tensor(|out| unsafe { tch_ext_select_rows(out, x.as_ptr(), index.as_ptr()) })
}

/// Runs the backward pass from `x` with the gradient `grad`.
///
/// # Panics
/// If `x` has no graph, or `grad` has another shape.
pub fn backward(x: &Tensor, grad: &Tensor) {
    // SAFETY: two borrowed tensors; autograd holds counted references to them.
    expect(into_result(unsafe { tch_ext_backward(x.as_ptr(), grad.as_ptr()) }));
}

/// Returns the tensor that `f` creates; panics with its message.
pub(crate) fn new_tensor(f: impl FnOnce(*mut *mut C_tensor) -> *mut c_char) -> Tensor {
    let mut out = null_mut();
    expect(into_result(f(&raw mut out)));
    // SAFETY: without a message, `out` is a new tensor that the caller owns.
    unsafe { Tensor::from_ptr(out) }
}

pub(crate) fn expect(result: Result<(), String>) {
    if let Err(message) = result {
        panic!("{message}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_are_selected_several_times_have_the_sum_of_their_gradients() {
        let index = Tensor::from_slice(&[2i64, 0, 2, 2]);
        let slopes = Tensor::from_slice(&[1f32, 10.0, 100.0, 1000.0]).unsqueeze(1) * Tensor::from_slice(&[1f32, -0.5]);
        for kind in [Kind::Float, Kind::BFloat16] {
            let x =
                Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0]).view([3, 2]).to_kind(kind).set_requires_grad(true);
            let rows = select_in_order(&x, &index);
            assert_eq!(rows, x.index_select(0, &index));
            backward(&rows, &slopes.to_kind(kind));
            // 1 + 100 + 1000 = 1101, which bf16 rounds to 1104: at once, not in parts.
            let sum = if kind == Kind::Float { 1101f32 } else { 1104.0 };
            let expected = Tensor::from_slice(&[10.0, -5.0, 0.0, 0.0, sum, -sum / 2.0]).view([3, 2]);
            assert_eq!(x.grad().to_kind(Kind::Float), expected, "{kind:?}");
        }
    }
}
