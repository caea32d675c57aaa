//! Optimizer state and frozen models that are offloaded between the phases that use them.
//!
//! The memory of a tensor on the CPU moves into a file, whose pages are in memory only while they are used. The memory of a tensor on a GPU
//! moves to the host, and back while it is used. The tensors themselves do not change, so the code that computes with them needs no
//! changes.

pub mod settings;

use crate::{Error, Result};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Tensor};
use tch_ext::{FlatMemory, MappedFile};

/// The place to which tensors are offloaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offload {
    dir: PathBuf,
}

/// Tensors that are offloaded together. Clones refer to the same tensors.
#[derive(Debug, Clone)]
pub struct Offloaded(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Name of the tensors in errors.
    name: String,
    place: Place,
    /// Storage ids of the tensors that were put here.
    known: HashSet<usize>,
    /// Number of guards that need the tensors in memory.
    users: usize,
    /// Why the tensors could not be offloaded after a use. The offloaded numbers are then older than that use.
    failed: Option<String>,
}

#[derive(Debug)]
enum Place {
    File(MappedFile),
    Host(Vec<OnHost>),
}

/// Memory on a device, with its copy on the host.
#[derive(Debug)]
struct OnHost {
    device: FlatMemory,
    copy: Tensor,
}

/// A guard that keeps offloaded tensors in memory until it is dropped.
#[derive(Debug)]
#[must_use = "the tensors are offloaded when the guard is dropped"]
pub struct InUse(Offloaded);

impl Offload {
    /// Offloads to files in the folder `dir`, and from a GPU to the host.
    pub fn to(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Returns room for tensors of these sizes in bytes, which are on `device` and are called `name` in errors. For the CPU, all of the
    /// room is reserved on the disk.
    ///
    /// # Errors
    /// If the folder cannot be written, or the disk is full.
    pub fn room(&self, name: &str, device: Device, sizes: impl IntoIterator<Item = usize>) -> Result<Offloaded> {
        let place = if device == Device::Cpu {
            let bytes = MappedFile::room_for(sizes);
            Place::File(file_in(&self.dir, bytes).map_err(|e| {
                let dir = self.dir.display();
                let mib = bytes.div_ceil(1 << 20);
                Error::Run(format!("offload_dir = {dir}: cannot make a file of {mib} MiB for the {name}: {e}"))
            })?)
        } else {
            Place::Host(Vec::new())
        };
        Ok(Offloaded::new(name, place))
    }

    /// Offloads `tensors`. Tensors may share memory. `None` if there are none.
    ///
    /// # Errors
    /// As [`Offload::room`].
    pub fn hold<'t>(&self, name: &str, tensors: impl IntoIterator<Item = &'t Tensor>) -> Result<Option<Offloaded>> {
        let mut known: HashSet<usize> = HashSet::new();
        let is_new = |tensor: &&Tensor| known.insert(tch_ext::storage_id(tensor));
        let tensors: Vec<&Tensor> = tensors.into_iter().filter(is_new).collect();
        let Some(first) = tensors.first() else { return Ok(None) };
        let room = self.room(name, first.device(), tensors.iter().map(|tensor| tch_ext::storage_bytes(tensor)))?;
        room.put(tensors)?;
        room.leave()?;
        Ok(Some(room))
    }
}

/// Creates a file without a name on the file system of the folder `dir`. If the folder does not exist, it is not created: the file is then
/// in its nearest ancestor that exists.
fn file_in(dir: &Path, bytes: usize) -> Result<MappedFile, String> {
    let dir = std::path::absolute(dir).map_err(|e| e.to_string())?;
    let existing = dir.ancestors().find(|dir| dir.exists());
    let existing = existing.unwrap_or(&dir);
    MappedFile::new(existing, bytes).map_err(|e| {
        if existing == dir { e } else { format!("in {}, the nearest folder that exists: {e}", existing.display()) }
    })
}

impl Offloaded {
    fn new(name: &str, place: Place) -> Self {
        let state = State { name: name.into(), place, known: HashSet::new(), users: 0, failed: None };
        Self(Arc::new(Mutex::new(state)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the memory of `tensors` to this place, for good.
    ///
    /// # Errors
    /// If it cannot be moved.
    pub fn put<'t>(&self, tensors: impl IntoIterator<Item = &'t Tensor>) -> Result<()> {
        let mut state = self.lock();
        for tensor in tensors {
            if !state.known.insert(tch_ext::storage_id(tensor)) {
                continue;
            }
            let is_used = state.users > 0;
            match &mut state.place {
                Place::File(file) => file.take(tensor).map_err(Error::Run)?,
                Place::Host(all) => {
                    let mut moved = OnHost::of(tensor)?;
                    if !is_used {
                        moved.leave()?;
                    }
                    all.push(moved);
                }
            }
        }
        Ok(())
    }

    /// Offloads the tensors, unless they are in use.
    ///
    /// # Errors
    /// If they cannot be written; they then stay in memory.
    pub fn leave(&self) -> Result<()> {
        let mut state = self.lock();
        if state.users == 0 { state.leave() } else { Ok(()) }
    }

    /// Brings the tensors into memory until the guard is dropped.
    ///
    /// # Errors
    /// If the device has no memory for them; if they could not be offloaded after their last use.
    pub fn in_use(&self) -> Result<InUse> {
        let mut state = self.lock();
        if let Some(failed) = &state.failed {
            return Err(Error::Run(format!("{} after its last use: {failed}", state.name)));
        }
        if state.users == 0 {
            state.enter()?;
        }
        state.users += 1;
        drop(state);
        Ok(InUse(self.clone()))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.users -= 1;
        if state.users == 0
            && let Err(error) = state.leave()
        {
            // The next use returns this error.
            state.failed = Some(error.to_string());
        }
    }
}

impl State {
    fn enter(&mut self) -> Result<()> {
        match &self.place {
            Place::File(file) => file.enter(),
            Place::Host(all) => all.iter().try_for_each(OnHost::enter)?,
        }
        Ok(())
    }

    fn leave(&mut self) -> Result<()> {
        match &mut self.place {
            Place::File(file) => file.leave().map_err(Error::Run),
            Place::Host(all) => all.iter_mut().try_for_each(OnHost::leave),
        }
    }
}

impl OnHost {
    fn of(tensor: &Tensor) -> Result<Self> {
        let device = FlatMemory::of(tensor).map_err(Error::Run)?;
        let copy = Tensor::f_empty(device.tensor().size(), (device.tensor().kind(), Device::Cpu))?;
        // Pinned memory, if a driver supports it, is copied faster. `pin_memory` is not used because it prints that its argument is
        // deprecated.
        let copy = match tensor.device() {
            device @ Device::Cuda(_) => copy.f_internal_pin_memory(device).unwrap_or(copy),
            _ => copy,
        };
        Ok(Self { device, copy })
    }

    fn enter(&self) -> Result<()> {
        if !self.device.is_allocated() {
            self.device.allocate().map_err(Error::Run)?;
            self.device.tensor().shallow_clone().f_copy_(&self.copy)?;
        }
        Ok(())
    }

    fn leave(&mut self) -> Result<()> {
        if self.device.is_allocated() {
            self.copy.f_copy_(self.device.tensor())?;
            self.device.free();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tch::Kind;

    /// Both places. The one on the host has tensors of the CPU in place of a GPU's.
    fn places(dir: &Path) -> [Offloaded; 2] {
        let file = Offload::to(dir).room("numbers", Device::Cpu, [4000, 4000]).unwrap();
        [file, Offloaded::new("numbers", Place::Host(Vec::new()))]
    }

    #[test]
    fn tensors_have_the_numbers_of_their_last_use_at_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        for place in places(dir.path()) {
            let numbers = Tensor::arange(1000, (Kind::Float, Device::Cpu));
            let (view, other) = (numbers.view([10, 100]), numbers.copy());
            place.put([&numbers, &view, &other]).unwrap();
            for step in 1..4 {
                let outer = place.in_use().unwrap();
                drop(place.in_use().unwrap());
                // The tensors are still in memory, because another use of them is not over.
                let _ = tch::no_grad(|| numbers.shallow_clone().g_add_scalar_(1));
                assert_eq!(view.double_value(&[1, 3]), f64::from(103 + step));
                assert_eq!(other.double_value(&[103]), 103.0);
                drop(outer);
            }
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the file has no name");
        }
    }

    #[test]
    fn memory_of_a_device_is_free_between_its_uses() {
        let place = Offloaded::new("numbers", Place::Host(Vec::new()));
        let numbers = Tensor::ones([8], (Kind::Float, Device::Cpu));
        place.put([&numbers]).unwrap();
        assert_eq!(tch_ext::storage_bytes(&numbers), 0);
        let used = place.in_use().unwrap();
        assert_eq!(numbers.sum(Kind::Float).double_value(&[]), 8.0);
        drop(used);
        assert_eq!(tch_ext::storage_bytes(&numbers), 0);
        let _used = place.in_use().unwrap();
        assert_eq!(numbers.sum(Kind::Float).double_value(&[]), 8.0);
    }

    #[test]
    fn tensors_that_could_not_leave_are_an_error_at_their_next_use() {
        let place = Offloaded::new("optimizer state", Place::Host(Vec::new()));
        place.put([&Tensor::ones([8], (Kind::Float, Device::Cpu))]).unwrap();
        let used = place.in_use().unwrap();
        match &mut place.lock().place {
            Place::Host(all) => all[0].copy = Tensor::ones([3], (Kind::Uint8, Device::Cpu)),
            Place::File(_) => unreachable!("it is the host"),
        }
        place.leave().unwrap();
        drop(used);
        let error = place.in_use().unwrap_err().to_string();
        assert!(error.starts_with("optimizer state after its last use: ") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn a_file_is_on_the_disk_of_a_folder_that_does_not_exist_which_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let _file = Offload::to(dir.path().join("runs/out")).room("numbers", Device::Cpu, [4000]).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_one_line_with_its_setting() {
        let offloaded =
            Offload::to("/proc/rlhf").hold("reference model", [&Tensor::ones([8], (Kind::Float, Device::Cpu))]);
        let error = offloaded.unwrap_err().to_string();
        let expected = "offload_dir = /proc/rlhf: cannot make a file of 1 MiB for the reference model: ";
        assert!(error.starts_with(expected) && !error.contains('\n'), "{error}");
    }
}
