//! Memory of tensors that is in a file while it is not used.

use crate::into_result;
use std::ffi::{CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;
use tch::{Device, Tensor};
use torch_sys::C_tensor;

unsafe extern "C" {
    fn tch_ext_file_new(out: *mut *mut c_void, folder: *const c_char, bytes: usize) -> *mut c_char;
    fn tch_ext_file_free(file: *mut c_void);
    fn tch_ext_file_take(file: *const c_void, tensor: *const C_tensor, offset: usize) -> *mut c_char;
    fn tch_ext_file_leave(file: *const c_void, from: usize, bytes: usize) -> *mut c_char;
    fn tch_ext_file_enter(file: *const c_void, from: usize, bytes: usize);
}

/// Places of tensors are multiples of this, as in libtorch's allocator, so that kernels round alike.
const ALIGNMENT: usize = 64;

/// Bytes that are moved before they are written to the disk.
const AT_ONCE: usize = 64 << 20;

/// A file that holds the memory of tensors: mapped into the process, and without a name, so that nothing remains of it when the process
/// ends, however it ends.
///
/// Tensors whose memory it took can be used at any time: pages that have [left](MappedFile::leave) are read again by their use.
#[derive(Debug)]
pub struct MappedFile {
    handle: *mut c_void,
    bytes: usize,
    used: usize,
    /// Place up to which pages have left.
    left: usize,
}

// SAFETY: the handle is a counted reference to a file and its mapping, whose calls may come from any thread.
unsafe impl Send for MappedFile {}
// SAFETY: as above; shared references only advise the operating system.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Bytes of the file that tensors of these sizes need.
    pub fn room_for(bytes: impl IntoIterator<Item = usize>) -> usize {
        bytes.into_iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum()
    }

    /// Creates a file in `folder` with room for `bytes` bytes, all of which are reserved on the disk.
    ///
    /// # Errors
    /// The operating system's: the folder cannot be written, or the disk is full.
    pub fn new(folder: &Path, bytes: usize) -> Result<Self, String> {
        let name = CString::new(folder.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
        let (mut handle, bytes) = (null_mut(), bytes.max(1));
        // SAFETY: a C string and a pointer that live until the call returns.
        into_result(unsafe { tch_ext_file_new(&raw mut handle, name.as_ptr(), bytes) })?;
        Ok(Self { handle, bytes, used: 0, left: 0 })
    }

    /// Moves the memory of `tensor` into the file, where it stays as long as a tensor uses it; all tensors on the same memory follow.
    ///
    /// # Errors
    /// If the tensor is not on the CPU, or the file has no room for it.
    pub fn take(&mut self, tensor: &Tensor) -> Result<(), String> {
        if tensor.device() != Device::Cpu {
            return Err(format!("offload: expected a tensor on the CPU, found {tensor:?}"));
        }
        let bytes = crate::memory::storage_bytes(tensor);
        // SAFETY: both are alive. The shim checks the place, copies the memory there and replaces it in the storage, which then owns a
        // reference to the file.
        into_result(unsafe { tch_ext_file_take(self.handle, tensor.as_ptr(), self.used) })?;
        self.used += bytes.next_multiple_of(ALIGNMENT);
        if self.used - self.left >= AT_ONCE {
            self.leave_from(self.left)?;
            self.left = self.used;
        }
        Ok(())
    }

    /// Writes all pages to the disk and drops them from memory.
    ///
    /// # Errors
    /// If they cannot be written; they then stay in memory.
    pub fn leave(&self) -> Result<(), String> {
        self.leave_from(0)
    }

    fn leave_from(&self, from: usize) -> Result<(), String> {
        // SAFETY: the range is within the file.
        into_result(unsafe { tch_ext_file_leave(self.handle, from, self.bytes.min(self.used) - from) })
    }

    /// Starts to read the pages back.
    pub fn enter(&self) {
        // SAFETY: as in `leave_from`.
        unsafe { tch_ext_file_enter(self.handle, 0, self.bytes.min(self.used)) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: the handle is freed once; tensors hold references of their own.
        unsafe { tch_ext_file_free(self.handle) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn tensors_follow_their_memory_into_the_file_and_outlive_its_handle() {
        let dir = std::env::temp_dir();
        let numbers = Tensor::arange(5000, (Kind::Float, Device::Cpu));
        let (view, expected) = (numbers.narrow(0, 100, 7), numbers.copy());
        let odd = Tensor::from_slice(&[1u8, 2, 3]);
        let bytes = MappedFile::room_for([20_000, 3]);
        assert_eq!(bytes, 20_032 + 64);
        let mut file = MappedFile::new(&dir, bytes).unwrap();
        let before = numbers.data_ptr();
        for tensor in [&numbers, &odd] {
            file.take(tensor).unwrap();
        }
        assert_ne!(numbers.data_ptr(), before);
        assert_eq!(numbers.data_ptr() as usize % ALIGNMENT, 0);
        assert_eq!(odd.data_ptr() as usize - numbers.data_ptr() as usize, 20_032);
        for step in 0..2 {
            file.leave().unwrap();
            file.enter();
            // A store to pages that have left is kept.
            let _ = numbers.shallow_clone().g_add_scalar_(1);
            file.leave().unwrap();
            let expected = &expected + f64::from(step + 1);
            assert_eq!((&numbers, &view), (&expected, &expected.narrow(0, 100, 7)));
            assert_eq!(Vec::<u8>::try_from(&odd).unwrap(), [1, 2, 3]);
        }
        let expected = expected + 2.0;
        drop(file);
        assert_eq!(numbers, expected);
    }

    /// KiB of memory of the mapping that starts at `tensor`.
    fn resident(tensor: &Tensor) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", tensor.data_ptr() as usize);
        let lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let size = lines.filter_map(|line| line.strip_prefix("Rss:")?.trim().strip_suffix(" kB")?.parse().ok()).next();
        size.unwrap_or_else(|| panic!("no mapping at {start}"))
    }

    #[test]
    fn memory_that_has_left_is_not_resident_until_it_is_used() {
        let numbers = Tensor::ones([1 << 20], (Kind::Float, Device::Cpu));
        let mut file = MappedFile::new(&std::env::temp_dir(), MappedFile::room_for([4 << 20])).unwrap();
        file.take(&numbers).unwrap();
        assert!(resident(&numbers) >= 4096);
        file.leave().unwrap();
        assert_eq!(resident(&numbers), 0);
        assert_eq!(numbers.sum(Kind::Double).double_value(&[]), f64::from(1 << 20));
        assert!(resident(&numbers) >= 4096);
    }

    #[test]
    fn zeros_take_no_memory() {
        let zeros = Tensor::zeros([1 << 20], (Kind::Float, Device::Cpu));
        let mut file = MappedFile::new(&std::env::temp_dir(), 4 << 20).unwrap();
        file.take(&zeros).unwrap();
        assert_eq!(resident(&zeros), 0);
    }

    #[test]
    fn a_file_that_the_disk_has_no_room_for_and_a_folder_that_is_none_are_errors() {
        let full = MappedFile::new(&std::env::temp_dir(), 1 << 60).unwrap_err();
        assert!(full.starts_with("reserving its blocks: "), "{full}");
        let none = MappedFile::new(Path::new("/proc/rlhf"), 1).unwrap_err();
        assert!(none.starts_with("creating it: "), "{none}");
    }
}
