//! Kernels of our own for GPUs: CUDA C++ that NVRTC compiles when it is first needed, kept in a folder of the user's.
//!
//! The sources are `csrc/gpu/*.cu`. They are used where [`use_gpu_kernels`] was called for a GPU; the functions that they compute
//! ([`crate::logits_stats`], [`crate::norm`], [`crate::rotate`] and others) then take tensors of that GPU. Without them libtorch's own
//! operations compute the same. A test runs the same sources on the processor ([`emulate_gpu_kernels`]).

mod cache;
mod check;

pub use check::{check_gpu_kernels, check_gpu_kernels_in};

use crate::ops::{Norm, expect, kind_number, new_tensor};
use crate::{into_result, is_cuda_loaded};
use cache::{Key, cached};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

unsafe extern "C" {
    fn tch_ext_gpu_source(index: usize) -> *const c_char;
    fn tch_ext_gpu_kernel(index: usize) -> *const c_char;
    fn tch_ext_gpu_versions(device: c_int, nvrtc: *mut c_int, arch: *mut c_int) -> *mut c_char;
    fn tch_ext_gpu_compile(
        source: *const c_char,
        name: *const c_char,
        options: *const *const c_char,
        count: c_int,
        binary: *mut *mut c_char,
        size: *mut usize,
    ) -> *mut c_char;
    fn tch_ext_gpu_free(binary: *mut c_char);
    fn tch_ext_gpu_load(source: *const c_char, binary: *const c_void, device: c_int) -> *mut c_char;
    fn tch_ext_gpu_use(devices: u64) -> *mut c_char;
    fn tch_ext_gpu_has(device: c_int) -> bool;
    fn tch_ext_gpu_emulate(order: c_int);
    fn tch_ext_gpu_limit_blocks(most: i64);
    fn tch_ext_gpu_is_emulated() -> bool;
    fn tch_ext_gpu_launches(index: usize) -> i64;
    fn tch_ext_gpu_grid(count: i64, per_block: i64, blocks: *mut u32, threads: *mut u32);
    fn tch_ext_gated(
        out: *mut *mut C_tensor,
        gate: *const C_tensor,
        up: *const C_tensor,
        activation: i64,
    ) -> *mut c_char;
    fn tch_ext_gated_halves(out: *mut *mut C_tensor, both: *const C_tensor, activation: i64) -> *mut c_char;
    fn tch_ext_sum_norm(
        sum: *mut *mut C_tensor,
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        a: *const C_tensor,
        b: *const C_tensor,
        weight: *const C_tensor,
        bias: *const C_tensor,
        eps: f64,
        center: bool,
        offset: f64,
        dtype: c_int,
    ) -> *mut c_char;
    fn tch_ext_rotate_cached(
        out: *mut *mut C_tensor,
        q: *const C_tensor,
        k: *const C_tensor,
        v: *const C_tensor,
        cos: *const C_tensor,
        sin: *const C_tensor,
        places: *const C_tensor,
        keys: *mut C_tensor,
        values: *mut C_tensor,
    ) -> *mut c_char;
    fn tch_ext_attention_of_step(
        out: *mut *mut C_tensor,
        q: *const C_tensor,
        keys: *const C_tensor,
        values: *const C_tensor,
        lengths: *const C_tensor,
        capacity: i64,
        longest: i64,
        window: i64,
        scale: f64,
    ) -> *mut c_char;
    fn tch_ext_logits_sample_on_device(
        tokens: *mut *mut C_tensor,
        logprobs: *mut *mut C_tensor,
        logits: *const C_tensor,
        inv_temperature: f64,
        draws: *const C_tensor,
    ) -> *mut c_char;
}

/// The beginning of every source.
const COMMON: &str = include_str!("../csrc/gpu/device.cuh");

/// The sources by name.
const SOURCES: [(&str, &str); 8] = [
    ("logits", include_str!("../csrc/gpu/logits.cu")),
    ("sample", include_str!("../csrc/gpu/sample.cu")),
    ("rotary", include_str!("../csrc/gpu/rotary.cu")),
    ("norm", include_str!("../csrc/gpu/norm.cu")),
    ("gated", include_str!("../csrc/gpu/gated.cu")),
    ("attend", include_str!("../csrc/gpu/attend.cu")),
    ("quantized", include_str!("../csrc/gpu/quantized.cu")),
    ("adam", include_str!("../csrc/gpu/adam.cu")),
];

/// Options of the compiler, in addition to the architecture.
const OPTIONS: [&str; 2] = ["--std=c++17", "--diag-suppress=177"];

/// The architecture that the kernels were loaded for, and a bit for each GPU that uses them.
static IN_USE: Mutex<Option<(c_int, u64)>> = Mutex::new(None);

/// Whether kernels compute tensors of this dtype on this device: f32 and bf16 on a GPU for which [`use_gpu_kernels`] was called, and, while
/// they are emulated, on the processor.
pub fn has_gpu_kernels(kind: Kind, device: Device) -> bool {
    let is_there = match device {
        // SAFETY: takes a number, and reads two.
        Device::Cuda(number) => c_int::try_from(number).is_ok_and(|number| unsafe { tch_ext_gpu_has(number) }),
        // SAFETY: takes no arguments, and reads a flag.
        Device::Cpu => unsafe { tch_ext_gpu_is_emulated() },
        _ => false,
    };
    is_there && matches!(kind, Kind::Float | Kind::BFloat16)
}

/// Compiles the kernels for GPU `number`, or takes those that are in `folder`, loads them, and compares what they compute with libtorch's own
/// operations. Later calls for the same GPU do nothing. New binaries are stored in `folder`, if they can be.
///
/// # Errors
/// If CUDA is not loaded, the library of `make cuda` or NVRTC is missing, a source does not compile, or a kernel computes other numbers. The
/// kernels are then not used on this GPU.
pub fn use_gpu_kernels(number: usize, folder: Option<&Path>) -> Result<(), String> {
    if !is_cuda_loaded() {
        return Err("CUDA is not loaded".into());
    }
    let device = c_int::try_from(number).ok().filter(|&number| number < 64).ok_or("no such GPU")?;
    let mut in_use = IN_USE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (mut nvrtc, mut arch) = (0, 0);
    // SAFETY: both pointers live until the call returns.
    into_result(unsafe { tch_ext_gpu_versions(device, &raw mut nvrtc, &raw mut arch) })?;
    let before = match *in_use {
        Some((loaded_arch, devices)) if loaded_arch == arch => devices,
        Some((loaded_arch, _)) => return Err(format!("a GPU of architecture {arch} beside one of {loaded_arch}")),
        None => {
            for (name, source) in SOURCES {
                load(name, &format!("{COMMON}{source}"), (nvrtc, arch, device), folder)?;
            }
            0
        }
    };
    let bit = 1 << device;
    if before & bit != 0 {
        return Ok(());
    }
    // SAFETY: takes a number.
    into_result(unsafe { tch_ext_gpu_use(before | bit) })?;
    *in_use = Some((arch, before | bit));
    // A kernel that is wrong, or fails, may have left the GPU with an error that later work reports.
    let checked = std::panic::catch_unwind(|| check_gpu_kernels(Device::Cuda(number)));
    checked.unwrap_or_else(|_| Err("a kernel could not be started".into())).inspect_err(|_| {
        *in_use = Some((arch, before));
        // SAFETY: takes a number; it does not fail for fewer GPUs.
        let _ = into_result(unsafe { tch_ext_gpu_use(before) });
    })
}

/// Loads the kernels of one source.
fn load(
    name: &str,
    source: &str,
    (nvrtc, arch, device): (c_int, c_int, c_int),
    folder: Option<&Path>,
) -> Result<(), String> {
    let options = [&format!("--gpu-architecture=sm_{arch}"), OPTIONS[0], OPTIONS[1]];
    let key = Key::new(name, source, &format!("NVRTC {nvrtc} {}", options.join(" ")));
    let loaded = |binary: &[u8]| {
        let name = CString::new(name).map_err(|e| e.to_string())?;
        // SAFETY: the name ends with a zero, and the binary is whole: NVRTC made it, and it was stored with its length and a checksum.
        into_result(unsafe { tch_ext_gpu_load(name.as_ptr(), binary.as_ptr().cast(), device) })
    };
    cached(folder, &key, || compile(name, source, &options), loaded)
}

/// Compiles a source by NVRTC.
fn compile(name: &str, source: &str, options: &[&str]) -> Result<Vec<u8>, String> {
    let c_text = |text: &str| CString::new(text).map_err(|e| e.to_string());
    let (text, file) = (c_text(source)?, c_text(&format!("{name}.cu"))?);
    let options: Vec<CString> = options.iter().map(|option| c_text(option)).collect::<Result<_, _>>()?;
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let (count, mut binary, mut size) = (options.len() as c_int, null_mut(), 0);
    // SAFETY: all pointers live until the call returns.
    into_result(unsafe {
        tch_ext_gpu_compile(text.as_ptr(), file.as_ptr(), options.as_ptr(), count, &raw mut binary, &raw mut size)
    })
    .map_err(|message| format!("{name}.cu: {message}"))?;
    // SAFETY: without a message, `binary` has `size` bytes, which this function owns, and is freed once.
    Ok(unsafe {
        let bytes = std::slice::from_raw_parts(binary.cast::<u8>(), size).to_vec();
        tch_ext_gpu_free(binary);
        bytes
    })
}

/// Order in which the processor runs the threads of a block from one barrier to the next, where it emulates kernels. Their numbers do not
/// depend on it, unless a barrier is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadOrder {
    /// Upwards, then downwards, in turn.
    UpAndDown = 1,
    /// Downwards.
    Down = 2,
    /// Another one each time.
    Shuffled = 3,
}

/// Lets the processor run the sources of the GPU's kernels on tensors in the host's memory, slowly, or ends this. For tests, of which one
/// at a time may do so.
pub fn emulate_gpu_kernels(on: bool) {
    emulate(on.then_some(ThreadOrder::UpAndDown));
}

fn emulate(order: Option<ThreadOrder>) {
    // SAFETY: takes the number of an order, or 0.
    unsafe { tch_ext_gpu_emulate(order.map_or(0, |order| order as c_int)) }
}

/// Lets at most so many blocks do the work that is divided over blocks; 0: as many as are good.
fn limit_blocks(most: i64) {
    // SAFETY: takes a number.
    unsafe { tch_ext_gpu_limit_blocks(most) }
}

/// Whether kernels are loaded for a GPU, which then computes by them.
pub fn gpu_kernels_are_loaded() -> bool {
    IN_USE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).is_some_and(|(_, devices)| devices != 0)
}

/// A kernel of [`use_gpu_kernels`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuKernel {
    /// Name of its source.
    pub source: String,
    /// Its name.
    pub name: String,
    /// Number of times that it was started in this process.
    pub starts: i64,
}

/// All kernels, in the order of their sources.
pub fn gpu_kernels() -> Vec<GpuKernel> {
    // SAFETY: null, or a text that is never freed.
    let text = |text: *const c_char| unsafe { text.as_ref().map(|text| CStr::from_ptr(text).to_string_lossy().into()) };
    // SAFETY: takes a number, and returns null or 0 after the last.
    let kernel = |index| unsafe {
        let (source, name) = (text(tch_ext_gpu_source(index))?, text(tch_ext_gpu_kernel(index))?);
        Some(GpuKernel { source, name, starts: tch_ext_gpu_launches(index) })
    };
    (0..).map_while(kernel).collect()
}

/// Blocks and threads of a block for `count` pieces of work, of which a block has `per_block` at once.
pub fn gpu_grid(count: i64, per_block: i64) -> [u32; 2] {
    let (mut blocks, mut threads) = (0, 0);
    // SAFETY: both pointers live until the call returns.
    unsafe { tch_ext_gpu_grid(count, per_block, &raw mut blocks, &raw mut threads) };
    [blocks, threads]
}

/// Activation of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GatedActivation {
    /// x Φ(x).
    Gelu = 0,
    /// Its approximation by tanh.
    GeluTanh = 1,
    /// x σ(x).
    Silu = 2,
    /// max(x, 0).
    Relu = 3,
    /// σ(x).
    Sigmoid = 4,
}

/// Returns activation(`gate`) * `up`, or on a GPU the activation alone, computed in f32 and rounded once. Differentiable in both.
///
/// # Panics
/// If there is no kernel ([`has_gpu_kernels`], [`has_kernels`](crate::has_kernels)), or shapes and dtypes differ.
pub fn gated(gate: &Tensor, up: Option<&Tensor>, activation: GatedActivation) -> Tensor {
    let up = up.map_or(null(), Tensor::as_ptr);
    // SAFETY: as in `linear`.
    new_tensor(|out| unsafe { tch_ext_gated(out, gate.as_ptr(), up, activation as i64) })
}

/// [`gated`] where the halves of each row of `both` `[rows, 2 * width]` are gate and up; returns `[rows, width]`. Differentiable.
///
/// # Panics
/// If there is no kernel ([`has_gpu_kernels`]), or the shape is another.
pub fn gated_halves(both: &Tensor, activation: GatedActivation) -> Tensor {
    // SAFETY: as in `linear`.
    new_tensor(|out| unsafe { tch_ext_gated_halves(out, both.as_ptr(), activation as i64) })
}

/// Adds one or two branches `[rows, width]` of one dtype to the residual stream `x`, f32, and normalizes the sum: returns the sum, f32, and its
/// norm in `kind`, the dtype of the branches or f32, as [`crate::residual`] and [`crate::norm`] do. Differentiable in all.
///
/// # Panics
/// If there is no kernel ([`has_gpu_kernels`]), or shapes, dtypes or devices are incompatible.
pub fn sum_norm(
    norm: Norm,
    x: &Tensor,
    (a, b): (&Tensor, Option<&Tensor>),
    weight: &Tensor,
    bias: Option<&Tensor>,
    kind: Kind,
) -> (Tensor, Tensor) {
    let (mut sum, mut out) = (null_mut(), null_mut());
    let pointer = |x: Option<&Tensor>| x.map_or(null(), Tensor::as_ptr);
    // SAFETY: borrowed tensors; the shim checks dtypes and widths, and sets both pointers unless it returns a message.
    expect(into_result(unsafe {
        tch_ext_sum_norm(
            &raw mut sum,
            &raw mut out,
            x.as_ptr(),
            a.as_ptr(),
            pointer(b),
            weight.as_ptr(),
            pointer(bias),
            norm.eps,
            norm.center,
            norm.offset,
            kind_number(kind),
        )
    }));
    // SAFETY: each pointer is to a new tensor that the caller owns.
    unsafe { (Tensor::from_ptr(sum), Tensor::from_ptr(out)) }
}

/// The caches and places of the new token of each row.
#[derive(Debug)]
pub struct CachePlaces<'a> {
    /// `[rows * capacity, kv_heads * head_dim]`.
    pub keys: &'a mut Tensor,
    /// Likewise.
    pub values: &'a mut Tensor,
    /// The row of both caches that each new token takes, `[rows]` i64.
    pub places: &'a Tensor,
}

/// Rotates queries `[rows, heads, head_dim]` and keys `[rows, kv_heads, head_dim]` of one new token per row, writes the rotated keys and the
/// values to their places in a cache, and returns the rotated queries: [`crate::rotate`] and two copies. Without angles
/// nothing is rotated. Not differentiable.
///
/// # Panics
/// If there is no kernel ([`has_gpu_kernels`]), dtypes differ, a dimension of a head does not follow the one before it in memory, or shapes
/// or devices are incompatible.
pub fn rotate_cached([q, k, v]: [&Tensor; 3], angles: Option<&(Tensor, Tensor)>, cache: CachePlaces<'_>) -> Tensor {
    let (cos, sin) = angles.map_or((null(), null()), |(cos, sin)| (cos.as_ptr(), sin.as_ptr()));
    let CachePlaces { keys, values, places } = cache;
    let (keys, values) = (keys.as_mut_ptr(), values.as_mut_ptr());
    // SAFETY: the caches are borrowed mutably, the others are read; the shim checks their shapes. `places` are those of the cache's own rows.
    new_tensor(|out| unsafe {
        tch_ext_rotate_cached(out, q.as_ptr(), k.as_ptr(), v.as_ptr(), cos, sin, places.as_ptr(), keys, values)
    })
}

/// The keys and values of rows that are decoded, on a GPU.
#[derive(Debug, Clone, Copy)]
pub struct CachedRows<'a> {
    /// `[rows * capacity, kv_heads * head_dim]`.
    pub keys: &'a Tensor,
    /// Likewise.
    pub values: &'a Tensor,
    /// Number of tokens of each row, the new one included, `[rows]` i64.
    pub lengths: &'a Tensor,
    /// Number of places of a row.
    pub capacity: i64,
    /// A number of tokens that no row exceeds.
    pub longest: i64,
}

/// Whether [`attention_of_step`] takes heads of these numbers and of this width.
pub fn takes_attention_of_step(heads: i64, kv_heads: i64, head_dim: i64) -> bool {
    kv_heads > 0
        && heads % kv_heads == 0
        && heads / kv_heads <= 16
        && head_dim % 8 == 0
        && (8..=256).contains(&head_dim)
}

/// Attention of one new token in each row, `q` `[rows, heads, head_dim]`, to the last `window` tokens of its row, or to all; returns the same
/// shape. A row's numbers do not depend on the other rows or on the capacity. Not differentiable.
///
/// # Panics
/// If there is no kernel ([`has_gpu_kernels`], [`takes_attention_of_step`]), or shapes, dtypes or devices are incompatible.
pub fn attention_of_step(q: &Tensor, cache: CachedRows<'_>, window: Option<i64>, scale: f64) -> Tensor {
    let CachedRows { keys, values, lengths, capacity, longest } = cache;
    let (k, v, n) = (keys.as_ptr(), values.as_ptr(), lengths.as_ptr());
    // SAFETY: borrowed tensors; the shim checks their shapes. A length above the capacity is cut to it by `longest`.
    new_tensor(|out| unsafe {
        tch_ext_attention_of_step(out, q.as_ptr(), k, v, n, capacity, longest, window.unwrap_or(0), scale)
    })
}

/// [`crate::logits_sample`] on a GPU, which it does not wait for: `draws` are `[rows]` f64 there; returns tokens, `[rows]` i64, and their
/// log-probabilities, `[rows]` f32.
///
/// # Panics
/// If there is no kernel ([`has_gpu_kernels`]), or shapes, dtypes or devices are incompatible.
pub fn logits_sample_on_device(logits: &Tensor, temperature: f64, draws: Option<&Tensor>) -> (Tensor, Tensor) {
    let (mut tokens, mut logprobs) = (null_mut(), null_mut());
    let draws = draws.map_or(null(), Tensor::as_ptr);
    // SAFETY: borrowed tensors; the shim checks their shapes, and sets both pointers unless it returns a message.
    expect(into_result(unsafe {
        tch_ext_logits_sample_on_device(&raw mut tokens, &raw mut logprobs, logits.as_ptr(), temperature.recip(), draws)
    }));
    // SAFETY: each pointer is to a new tensor that the caller owns.
    unsafe { (Tensor::from_ptr(tokens), Tensor::from_ptr(logprobs)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_source_that_is_there_and_every_source_has_its_kernels() {
        let kernels = gpu_kernels();
        assert_eq!(kernels.len(), 53);
        for GpuKernel { source, name, .. } in &kernels {
            let text = SOURCES.iter().find(|(name, _)| name == source);
            // Its name, or the part before the dtype that a macro appends.
            let stem = name.split("_f32").next().and_then(|name| name.split("_bf16").next()).unwrap();
            assert!(text.is_some_and(|(_, text)| text.contains(stem)), "{name}: not in {source}");
        }
        assert!(SOURCES.iter().all(|(name, _)| kernels.iter().any(|kernel| kernel.source == *name)));
    }

    #[test]
    fn work_is_divided_into_blocks_and_what_no_grid_has_room_for_goes_round() {
        // Blocks of 256 threads; no work starts none.
        assert_eq!([0, 1, 256, 257].map(|count| gpu_grid(count, 256)), [[0, 256], [1, 256], [1, 256], [2, 256]]);
        // A thread has four numbers.
        assert_eq!([1024, 1025].map(|count| gpu_grid(count, 1024)[0]), [1, 2]);
        // More than CUDA's 2^31 - 1 blocks would be needed: 2^20 go on from there.
        assert_eq!(gpu_grid(1 << 45, 256), [1 << 20, 256]);
    }

    #[test]
    fn the_emulation_finds_missing_barriers_and_packs_between_multiples_of_their_size_in_every_order() {
        unsafe extern "C" {
            fn tch_ext_gpu_mistake(which: c_int, order: c_int, out: *mut c_int) -> *mut c_char;
        }
        for order in [ThreadOrder::UpAndDown, ThreadOrder::Down, ThreadOrder::Shuffled] {
            let mut out = vec![0; 64];
            // SAFETY: there are three such kernels, and each writes at most 64 numbers.
            let mut run = |which| into_result(unsafe { tch_ext_gpu_mistake(which, order as c_int, out.as_mut_ptr()) });
            let found = [1, 2].map(|which| run(which).unwrap_err());
            assert!(found[0].contains("a pack of 16 bytes lies between multiples of them"), "{}", found[0]);
            assert!(found[1].contains("have passed other numbers of barriers"), "{}", found[1]);
            run(0).unwrap();
            // The memory of a block begins with ones in all bits.
            assert!(out.contains(&-1), "{order:?}: {out:?}");
        }
    }

    #[test]
    fn without_cuda_there_are_no_kernels_and_the_reason_is_said() {
        assert_eq!(use_gpu_kernels(0, None), Err("CUDA is not loaded".into()));
        assert!(!has_gpu_kernels(Kind::BFloat16, Device::Cuda(0)));
    }
}
