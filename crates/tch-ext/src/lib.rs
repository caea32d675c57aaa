//! The parts of libtorch that `rlhf` needs and `tch` lacks. All C++ and all `unsafe` of the project is in this crate.

mod groups;
mod memory;
mod offload;
mod ops;

pub use groups::{Group, Pending, Reduce, Rendezvous, Store};
pub use memory::{FlatMemory, bump_version, clear_grad, set_grad, storage_bytes, storage_id};
pub use offload::MappedFile;
pub use ops::{
    Attention, Cache, LogitsStats, LowRank, NestedScales, Norm, Quantized, adapted_linear, add_product_to_grad,
    attention, attention_step, backward, dequantize, embedding, flash_attention_varlen, has_kernels, linear,
    logits_gradient, logits_sample, logits_stats, norm, product_into, quantized_linear, residual, token_multiple,
};

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use tch::Tensor;
use torch_sys::C_tensor;

unsafe extern "C" {
    fn tch_ext_free(message: *mut c_char);
    fn tch_ext_fused_adamw(
        params: *const *mut C_tensor,
        grads: *const *mut C_tensor,
        exp_avgs: *const *mut C_tensor,
        exp_avg_sqs: *const *mut C_tensor,
        count: usize,
        step: i64,
        lr: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        eps: f64,
    ) -> *mut c_char;
    fn tch_ext_libtorch_folder(out: *mut *mut c_char) -> *mut c_char;
    fn tch_ext_load_cuda() -> *mut c_char;
    fn tch_ext_gpu_memory(number: c_int, free: *mut usize, total: *mut usize) -> *mut c_char;
    fn tch_ext_release_memory();
    fn tch_ext_keep_freed_memory();
    fn tch_ext_map_large_allocations();
    fn tch_ext_exit_at_once(code: c_int) -> !;
    fn tch_ext_spin_count() -> *const c_char;
}

/// Starts the calling program with a bounded `GOMP_SPINCOUNT`, and returns the count in effect.
///
/// libgomp's threads spin at barriers for up to milliseconds before they sleep. This wastes the CPU as soon as another process
/// needs it. libgomp reads the bound before `main`, so the program restarts itself with the variable set, unless the user has
/// set it or `OMP_WAIT_POLICY`. It is enough that `main` calls this function. A shared library must not call it, as linkers
/// reject its hook there. Returns `None` if only `OMP_WAIT_POLICY` is set, or the restart failed.
#[inline]
pub fn bound_spinning() -> Option<u64> {
    // SAFETY: null, or a C string of the environment, which is not modified at the start of `main`.
    let count = unsafe { tch_ext_spin_count().as_ref().map(|count| CStr::from_ptr(count)) }?;
    count.to_str().ok()?.parse().ok()
}

/// Exits the process at once, without destructors or exit handlers. Safe while other threads are still computing.
pub fn exit_at_once(code: i32) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { tch_ext_exit_at_once(code) }
}

/// Ends the process without destructors of libraries, which take a fifth of the time of a short command: libtorch removes each of its
/// operators from its tables. After [`load_cuda`] they run, since CUDA's profilers write at the end; but not beside NCCL's threads, which
/// may still wait for another process.
///
/// No value of the caller is dropped, so it has to flush buffered output before.
#[allow(clippy::exit, reason = "its only purpose; the program calls it at the end of `main`")]
pub fn exit(code: i32) -> ! {
    match LOADED_CUDA.get() {
        Some(_) if !groups::uses_nccl() => std::process::exit(code),
        _ => exit_at_once(code),
    }
}

/// Makes the allocator keep what is freed for what is allocated next, up to 2 GiB of it and but for allocations of 32 MiB or more: pages
/// that are returned to the operating system and taken again have to be cleared each time.
pub fn keep_freed_memory() {
    // SAFETY: takes no arguments, and sets parameters of the allocator.
    unsafe { tch_ext_keep_freed_memory() }
}

/// Makes the allocator return every freed allocation of 1 MiB or more to the operating system at once: less memory, more time. With
/// sharded parameters, whose layers are allocated and freed all the time, the heap would otherwise keep holes.
pub fn map_large_allocations() {
    // SAFETY: takes no arguments, and sets a parameter of the allocator.
    unsafe { tch_ext_map_large_allocations() }
}

/// Returns freed memory that the allocator holds to the operating system.
pub fn release_memory() {
    // SAFETY: takes no arguments, and does not affect memory in use.
    unsafe { tch_ext_release_memory() }
}

/// Settings of one AdamW step, with PyTorch's names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Decoupled weight decay, relative to `lr`.
    pub weight_decay: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
}

/// Updates `params` in place by one AdamW step. `step` counts from 1 and determines the bias correction.
///
/// The four lists have one tensor per parameter, of its shape; all are f32 and on one device. Calls PyTorch's
/// `_fused_adamw_`, which makes one pass over memory. Source: Loshchilov & Hutter 2019, algorithm 2.
///
/// # Errors
/// If the lists differ in length, or a parameter and its gradient or moments in shape, dtype, device or contiguity.
pub fn fused_adamw(
    params: &mut [Tensor],
    grads: &[Tensor],
    exp_avgs: &mut [Tensor],
    exp_avg_sqs: &mut [Tensor],
    step: i64,
    settings: AdamW,
) -> Result<(), String> {
    let count = params.len();
    // libtorch's CPU kernel does not check its arguments: it would read past the end of a short list or a small tensor.
    for (name, companions) in [("grads", grads), ("exp_avgs", &*exp_avgs), ("exp_avg_sqs", &*exp_avg_sqs)] {
        if companions.len() != count {
            return Err(format!("fused_adamw: {count} params, {} {name}", companions.len()));
        }
        for (i, (param, companion)) in params.iter().zip(companions).enumerate() {
            let same = param.size() == companion.size()
                && (param.kind(), param.device()) == (companion.kind(), companion.device())
                && param.is_contiguous()
                && companion.is_contiguous();
            if !same {
                return Err(format!("fused_adamw: params[{i}] is {param:?}, {name}[{i}] is {companion:?}"));
            }
        }
    }
    let pointers = |tensors: &[Tensor]| tensors.iter().map(|t| t.as_ptr().cast_mut()).collect::<Vec<_>>();
    let (p, g, m, v) = (pointers(params), pointers(grads), pointers(exp_avgs), pointers(exp_avg_sqs));
    let AdamW { lr, beta1, beta2, weight_decay, eps } = settings;
    // SAFETY: each vector holds `count` pointers to live tensors that this call borrows. The shim copies the handles,
    // keeps none after it returns, and writes only to `p`, `m` and `v`, which are borrowed mutably.
    let message = unsafe {
        tch_ext_fused_adamw(
            p.as_ptr(),
            g.as_ptr(),
            m.as_ptr(),
            v.as_ptr(),
            count,
            step,
            lr,
            beta1,
            beta2,
            weight_decay,
            eps,
        )
    };
    into_result(message)
}

/// Returns the folder of the libtorch in use, that of `libtorch_cpu.so`.
///
/// # Errors
/// If libtorch is not a library of its own in this process.
pub fn libtorch_folder() -> Result<PathBuf, String> {
    let mut out = std::ptr::null_mut();
    // SAFETY: the pointer lives until the call returns.
    into_result(unsafe { tch_ext_libtorch_folder(&raw mut out) })?;
    Ok(take_text(out).into())
}

/// Result of the first [`load_cuda`].
static LOADED_CUDA: std::sync::OnceLock<Result<(), String>> = std::sync::OnceLock::new();

/// Loads `libtorch_cuda.so` from the folder of the libtorch in use, once per process.
///
/// Must be called before any other query of CUDA, as libtorch caches its availability.
///
/// # Errors
/// The dynamic linker's message, which names the missing library: libtorch's, one of CUDA's, or the driver's.
pub fn load_cuda() -> Result<(), String> {
    LOADED_CUDA
        .get_or_init(|| {
            // SAFETY: the shim takes no arguments. It runs the initializers of the libraries that it loads, libtorch's and
            // CUDA's, which support this (Python loads them this way), and `OnceLock` runs it on one thread.
            into_result(unsafe { tch_ext_load_cuda() })
        })
        .clone()
}

/// Returns the free and the whole memory of the GPU that is `cuda:number`, in bytes, after [`load_cuda`].
///
/// # Errors
/// If CUDA is not loaded, or there is no such GPU.
pub fn gpu_memory(number: usize) -> Result<[usize; 2], String> {
    if LOADED_CUDA.get() != Some(&Ok(())) {
        return Err("CUDA is not loaded".into());
    }
    let number = c_int::try_from(number).map_err(|e| e.to_string())?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: both pointers live until the call returns.
    into_result(unsafe { tch_ext_gpu_memory(number, &raw mut free, &raw mut total) })?;
    Ok([free, total])
}

/// Converts an error message of the shim to a `Result` and frees it; null means success.
fn into_result(message: *mut c_char) -> Result<(), String> {
    if message.is_null() {
        return Ok(());
    }
    Err(take_text(message))
}

/// Copies and frees a string that the shim returned without an error.
fn take_text(text: *mut c_char) -> String {
    // SAFETY: it is a NUL-terminated string from `strdup` or `strndup`, owned by the caller, and is freed once.
    unsafe {
        let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
        tch_ext_free(text);
        copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    /// Compares with algorithm 2 of the paper, computed in f64.
    #[test]
    fn two_steps_of_adamw_follow_the_paper() {
        let settings = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, weight_decay: 0.1, eps: 1e-8 };
        let mut params = vec![Tensor::from_slice(&[1.0f32, -2.0, 0.5])];
        let zeros = || vec![Tensor::zeros([3], (Kind::Float, Device::Cpu))];
        let (mut m, mut v) = (zeros(), zeros());
        let gradients = [[0.3f64, -1.0, 2.0], [-0.2, 0.4, 2.0]];
        let (mut p64, mut m64, mut v64) = ([1.0f64, -2.0, 0.5], [0.0f64; 3], [0.0f64; 3]);
        for (i, gradient) in gradients.iter().enumerate() {
            let step = i as i32 + 1;
            for k in 0..3 {
                let g = gradient[k];
                m64[k] = 0.9 * m64[k] + 0.1 * g;
                v64[k] = 0.999 * v64[k] + 0.001 * g * g;
                let (m_hat, v_hat) = (m64[k] / (1.0 - 0.9f64.powi(step)), v64[k] / (1.0 - 0.999f64.powi(step)));
                p64[k] -= 1e-2 * 0.1 * p64[k];
                p64[k] -= 1e-2 * m_hat / (v_hat.sqrt() + 1e-8);
            }
            let grads = vec![Tensor::from_slice(gradient).to_kind(Kind::Float)];
            let version = params[0].internal_version();
            fused_adamw(&mut params, &grads, &mut m, &mut v, i64::from(step), settings).unwrap();
            assert!(
                params[0].internal_version() > version,
                "the version counter must change, so that cached copies are detected as stale"
            );
        }
        let found = Vec::<f64>::try_from(params[0].to_kind(Kind::Double)).unwrap();
        for (found, expected) in found.iter().zip(p64) {
            assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
        }
    }

    #[test]
    fn a_shape_mismatch_is_an_error_and_not_a_crash() {
        let f = |n| vec![Tensor::zeros([n], (Kind::Float, Device::Cpu))];
        let settings = AdamW { lr: 1.0, beta1: 0.9, beta2: 0.999, weight_decay: 0.0, eps: 1e-8 };
        assert!(fused_adamw(&mut f(3), &f(2), &mut f(3), &mut f(3), 1, settings).is_err());
    }
}
