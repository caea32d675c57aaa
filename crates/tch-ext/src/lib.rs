//! The parts of libtorch that `rlhf` needs and `tch` lacks. All C++ and all `unsafe` of the project is in this crate.

mod gpu;
mod graph;
mod groups;
mod joint;
mod memory;
mod mixing;
mod offload;
mod ops;
mod optim;
mod shared;

pub use gpu::{
    CachePlaces, CachedRows, GatedActivation, GpuKernel, ThreadOrder, attention_of_step, check_gpu_kernels,
    check_gpu_kernels_in, emulate_gpu_kernels, gated, gated_halves, gpu_grid, gpu_kernels, gpu_kernels_are_loaded,
    has_gpu_kernels, logits_sample_on_device, rotate_cached, sum_norm, takes_attention_of_step, use_gpu_kernels,
};
pub use graph::{Graph, graphs_error, has_graphs};
pub use groups::{Group, Pending, Reduce, Rendezvous, Store};
pub use joint::{Joined, adjacent, joint_linear};
pub use memory::{
    FlatMemory, bump_version, clear_grad, moved, on_device, set_grad, storage_bytes, storage_id, to_host,
};
pub use mixing::{
    DeltaSizes, PackedRows, delta_rule, delta_rule_from, delta_step, gated_convolution, silu_convolution,
};
pub use offload::MappedFile;
pub use ops::{
    Attention, Cache, LogitsStats, LowRank, NestedScales, Norm, Quantized, adapted_linear, add_product_to_grad,
    attention, attention_step, backward, dequantize, embedding, flash_attention_varlen, has_flash_attention,
    has_kernels, linear, logits_gradient, logits_sample, logits_stats, multiplies_quantized, norm, product_into,
    quantized_linear, residual, rotate, select_rows, token_multiple,
};
pub use optim::{AdamW, BlockedMoment, adamw_blocked, adamw_rounded, fused_adamw};
pub use shared::{PrefixTree, shared_attention};

/// Name of the library that `make cuda` builds next to libtorch's: NCCL's groups and CUDA's graphs.
pub const CUDA_LIBRARY: &str = "libtch_ext_cuda.so";

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;

unsafe extern "C" {
    fn tch_ext_free(message: *mut c_char);
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

/// Returns the folder of the libtorch in use, which has `libtorch_cpu.so`.
///
/// # Errors
/// If libtorch is not a separate library in this process.
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

/// Whether [`load_cuda`] has succeeded.
pub fn is_cuda_loaded() -> bool {
    LOADED_CUDA.get() == Some(&Ok(()))
}

/// Returns the free and the whole memory of the GPU that is `cuda:number`, in bytes, after [`load_cuda`].
///
/// # Errors
/// If CUDA is not loaded, or there is no such GPU.
pub fn gpu_memory(number: usize) -> Result<[usize; 2], String> {
    if !is_cuda_loaded() {
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
