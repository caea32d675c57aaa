//! Parameters and gradients in shared flat memory; copies to a device.

use crate::into_result;
use std::ffi::c_char;
use tch::kind::Element;
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

unsafe extern "C" {
    fn tch_ext_set_grad(param: *const C_tensor, grad: *const C_tensor) -> *mut c_char;
    fn tch_ext_clear_grad(param: *const C_tensor) -> *mut c_char;
    fn tch_ext_resize_storage(tensor: *const C_tensor, bytes: usize) -> *mut c_char;
    fn tch_ext_storage_bytes(tensor: *const C_tensor) -> usize;
    fn tch_ext_bump_version(param: *const C_tensor);
    fn tch_ext_memory_id(tensor: *const C_tensor) -> usize;
    fn tch_ext_memory_of(out: *mut *mut C_tensor, tensor: *const C_tensor) -> *mut c_char;
}

/// `numbers` as a tensor on `device`, `[numbers.len()]`.
///
/// A copy from ordinary memory to a GPU waits until the GPU has done all work before it; one from pinned memory does not.
pub fn on_device<T: Element>(numbers: &[T], device: Device) -> Tensor {
    moved(Tensor::from_slice(numbers), device).expect("the device has memory for it")
}

/// `tensor`, of ordinary memory, on `device`. A copy to a GPU does not wait for it.
///
/// # Errors
/// If the device has no memory for it.
pub fn moved(tensor: Tensor, device: Device) -> Result<Tensor, tch::TchError> {
    match device {
        // Not `pin_memory`, which prints at each call that its argument is deprecated. libtorch holds the pinned memory until the copy
        // is done. Without pinned memory the copy waits.
        Device::Cuda(_) if tensor.numel() > 0 => {
            let kind = tensor.kind();
            tensor.f_internal_pin_memory(device).unwrap_or(tensor).f_to_device_(device, kind, true, false)
        }
        _ => tensor.f_to_device(device),
    }
}

/// The elements of `x`, of any dtype and on any device, one after another.
pub fn to_host(x: &Tensor) -> Vec<f64> {
    Vec::try_from(x.to_kind(Kind::Double).view([-1])).expect("it is a vector of f64")
}

/// Makes `grad` the tensor in which the gradient of the leaf `param` accumulates.
///
/// # Errors
/// If the two differ in shape, dtype or device.
pub fn set_grad(param: &Tensor, grad: &Tensor) -> Result<(), String> {
    if (param.size(), param.kind(), param.device()) != (grad.size(), grad.kind(), grad.device()) {
        return Err(format!("set_grad: param is {param:?}, grad is {grad:?}"));
    }
    // SAFETY: both are alive; the shim copies the handle.
    into_result(unsafe { tch_ext_set_grad(param.as_ptr(), grad.as_ptr()) })
}

/// Removes the gradient of the leaf `param`.
///
/// # Errors
/// If libtorch refuses.
pub fn clear_grad(param: &Tensor) -> Result<(), String> {
    // SAFETY: it is alive.
    into_result(unsafe { tch_ext_clear_grad(param.as_ptr()) })
}

/// Marks `param` as changed, where it was changed through another tensor on the same memory; copies of it in another dtype are
/// then made anew.
pub fn bump_version(param: &Tensor) {
    // SAFETY: it is alive, and a counter is increased.
    unsafe { tch_ext_bump_version(param.as_ptr()) }
}

/// Returns the number of bytes of the memory that `tensor` is in; the tensor may be a part of it.
pub fn storage_bytes(tensor: &Tensor) -> usize {
    // SAFETY: it is alive.
    unsafe { tch_ext_storage_bytes(tensor.as_ptr()) }
}

/// Returns a number that tensors on the same memory have in common, and that no other memory has as long as one of them lives.
pub fn storage_id(tensor: &Tensor) -> usize {
    // SAFETY: it is alive.
    unsafe { tch_ext_memory_id(tensor.as_ptr()) }
}

/// A vector whose memory can be freed and allocated again while tensors that are views of it keep their shapes.
///
/// While it is free, a view must not be read or written: torch's operations fail or read nothing, as with FSDP's freed
/// parameters. The owner frees it only between passes of the model whose parameters are the views.
#[derive(Debug)]
pub struct FlatMemory {
    tensor: Tensor,
    bytes: usize,
}

impl FlatMemory {
    /// Allocates `len` elements with undefined contents.
    pub fn new(len: i64, kind: Kind, device: Device) -> Self {
        let tensor = Tensor::empty([len], (kind, device));
        // SAFETY: it is alive.
        let bytes = unsafe { tch_ext_storage_bytes(tensor.as_ptr()) };
        Self { tensor, bytes }
    }

    /// The memory that `tensor` is in, as bytes.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub fn of(tensor: &Tensor) -> Result<Self, String> {
        let mut out = std::ptr::null_mut();
        // SAFETY: the shim reads a live tensor, and sets the pointer unless it returns a message.
        into_result(unsafe { tch_ext_memory_of(&raw mut out, tensor.as_ptr()) })?;
        // SAFETY: it is a new tensor that the caller owns.
        let tensor = unsafe { Tensor::from_ptr(out) };
        let bytes = storage_bytes(&tensor);
        Ok(Self { tensor, bytes })
    }

    /// The whole vector.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// A view of `len` elements from `start` as a tensor of this shape.
    pub fn view(&self, start: i64, shape: &[i64]) -> Tensor {
        let len: i64 = shape.iter().product();
        self.tensor.narrow(0, start, len).view(shape)
    }

    /// Whether there is memory now.
    pub fn is_allocated(&self) -> bool {
        // SAFETY: it is alive.
        unsafe { tch_ext_storage_bytes(self.tensor.as_ptr()) == self.bytes }
    }

    /// Frees the memory; views keep their shapes.
    pub fn free(&self) {
        // SAFETY: the storage is alive; its memory is replaced by none of zero bytes. No view may be used until it is allocated again.
        let done = into_result(unsafe { tch_ext_resize_storage(self.tensor.as_ptr(), 0) });
        debug_assert!(done.is_ok(), "freeing memory does not fail");
    }

    /// Allocates the memory again, uninitialized.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn allocate(&self) -> Result<(), String> {
        // SAFETY: the storage is alive and gets as many bytes as it had.
        into_result(unsafe { tch_ext_resize_storage(self.tensor.as_ptr(), self.bytes) })
    }
}
