//! Process groups: torch's c10d, with Gloo on the CPU and NCCL on GPUs.

use crate::{into_result, take_text};
use std::ffi::{CString, c_char, c_int};
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tch::{Kind, Tensor};
use torch_sys::C_tensor;

#[repr(C)]
struct Settings {
    host: *const c_char,
    port: u16,
    serves: bool,
    prefix: *const c_char,
    rank: c_int,
    size: c_int,
    timeout_ms: i64,
    rendezvous_ms: i64,
}

/// The shim's group.
enum RawGroup {}

/// The shim's collective in progress.
enum RawPending {}

type Error = *mut c_char;

/// Whether this process has made a group of NCCL, whose threads do not end before it does.
static USES_NCCL: AtomicBool = AtomicBool::new(false);

pub(crate) fn uses_nccl() -> bool {
    USES_NCCL.load(Ordering::Relaxed)
}

unsafe extern "C" {
    fn tch_ext_group_new(settings: *const Settings, out: *mut *mut RawGroup) -> Error;
    fn tch_ext_group_connect(group: *mut RawGroup, rank: c_int, size: c_int, timeout_ms: i64) -> Error;
    fn tch_ext_group_disconnect(group: *mut RawGroup);
    fn tch_ext_group_nccl(
        group: *mut RawGroup,
        path: *const c_char,
        rank: c_int,
        size: c_int,
        device: c_int,
        timeout_ms: i64,
        out: *mut *mut RawGroup,
    ) -> Error;
    fn tch_ext_group_free(group: *mut RawGroup);
    fn tch_ext_group_all_reduce(g: *mut RawGroup, x: *const C_tensor, max: bool, out: *mut *mut RawPending) -> Error;
    fn tch_ext_group_broadcast(g: *mut RawGroup, x: *const C_tensor, root: i64, out: *mut *mut RawPending) -> Error;
    fn tch_ext_group_all_gather(
        group: *mut RawGroup,
        whole: *const C_tensor,
        part: *const C_tensor,
        out: *mut *mut RawPending,
    ) -> Error;
    fn tch_ext_group_reduce_scatter(
        group: *mut RawGroup,
        part: *const C_tensor,
        whole: *const C_tensor,
        out: *mut *mut RawPending,
    ) -> Error;
    fn tch_ext_group_barrier(group: *mut RawGroup, out: *mut *mut RawPending) -> Error;
    fn tch_ext_pending_wait(pending: *mut RawPending) -> Error;
    fn tch_ext_group_set(group: *mut RawGroup, key: *const c_char, value: *const u8, len: usize) -> Error;
    fn tch_ext_group_set_first(
        group: *mut RawGroup,
        key: *const c_char,
        value: *const c_char,
        out: *mut *mut c_char,
    ) -> Error;
    fn tch_ext_group_get(group: *mut RawGroup, key: *const c_char, timeout_ms: i64, out: *mut *mut c_char) -> Error;
    fn tch_ext_group_has(group: *mut RawGroup, key: *const c_char, out: *mut bool) -> Error;
}

/// Where the ranks of a group meet.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// Host of the store.
    pub host: String,
    /// Port of the store.
    pub port: u16,
    /// Whether this process serves the store; otherwise rank 0 or a launcher does.
    pub serves: bool,
    /// Separates the keys of one start from the keys of another.
    pub prefix: String,
    /// Number of this process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Time limit for reaching the store and for each wait on one of its keys.
    pub patience: Duration,
    /// Time limit of a collective.
    pub timeout: Duration,
}

/// Operation by which a collective combines the ranks' numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// Sum.
    Sum,
    /// Maximum.
    Max,
}

/// The store through which processes find each other and exchange values outside their collectives: it is there before these.
///
/// # Errors
/// All methods return c10d's message if the store cannot be reached.
#[derive(Debug)]
pub struct Store {
    raw: NonNull<RawGroup>,
}

// SAFETY: c10d's store and groups may be used from any thread, one at a time; neither type is `Sync`.
unsafe impl Send for Store {}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: `raw` came from the shim, and is freed once.
        unsafe { tch_ext_group_free(self.raw.as_ptr()) }
    }
}

fn c_text(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| format!("{text:?} has a zero byte"))
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

impl Store {
    /// Serves the store, or connects to it.
    pub fn open(rendezvous: &Rendezvous) -> Result<Self, String> {
        let (host, prefix) = (c_text(&rendezvous.host)?, c_text(&rendezvous.prefix)?);
        let settings = Settings {
            host: host.as_ptr(),
            port: rendezvous.port,
            serves: rendezvous.serves,
            prefix: prefix.as_ptr(),
            rank: rendezvous.rank as c_int,
            size: rendezvous.size as c_int,
            timeout_ms: millis(rendezvous.timeout),
            rendezvous_ms: millis(rendezvous.patience),
        };
        let mut raw = null_mut();
        // SAFETY: all pointers live until the call returns, and the shim copies what it keeps.
        into_result(unsafe { tch_ext_group_new(&raw const settings, &raw mut raw) })?;
        Ok(Self { raw: NonNull::new(raw).ok_or("c10d returned no store")? })
    }

    /// Sets `key` to `text`.
    pub fn set(&self, key: &str, text: &str) -> Result<(), String> {
        let key = c_text(key)?;
        // SAFETY: all pointers live until the call returns.
        into_result(unsafe { tch_ext_group_set(self.raw.as_ptr(), key.as_ptr(), text.as_ptr(), text.len()) })
    }

    /// Sets `key` to `text` unless it has a value, and returns the value that it then has: the same for all processes.
    pub fn set_first(&self, key: &str, text: &str) -> Result<String, String> {
        let (key, text) = (c_text(key)?, c_text(text)?);
        let mut out = null_mut();
        // SAFETY: all pointers live until the call returns.
        into_result(unsafe { tch_ext_group_set_first(self.raw.as_ptr(), key.as_ptr(), text.as_ptr(), &raw mut out) })?;
        Ok(take_text(out))
    }

    /// Returns the value of `key`, as soon as it has one; an error after `patience`.
    pub fn get(&self, key: &str, patience: Duration) -> Result<String, String> {
        let key = c_text(key)?;
        let mut out = null_mut();
        // SAFETY: all pointers live until the call returns.
        into_result(unsafe { tch_ext_group_get(self.raw.as_ptr(), key.as_ptr(), millis(patience), &raw mut out) })?;
        Ok(take_text(out))
    }

    /// Returns whether `key` has a value.
    pub fn has(&self, key: &str) -> Result<bool, String> {
        let key = c_text(key)?;
        let mut has_value = false;
        // SAFETY: all pointers live until the call returns.
        into_result(unsafe { tch_ext_group_has(self.raw.as_ptr(), key.as_ptr(), &raw mut has_value) })?;
        Ok(has_value)
    }
}

/// Processes that compute together. All call the same collectives in the same order, with tensors of the same shapes and dtypes.
///
/// Sizes are checked before a collective starts. An error is c10d's message: another process is gone, or one did not call the
/// collective in time; tensors may then hold anything, and the group cannot be used again.
#[derive(Debug)]
pub struct Group {
    store: Store,
    rank: usize,
    size: usize,
}

/// A collective in progress, which may read and write its tensors until it is waited for. Dropping waits too.
#[derive(Debug)]
#[must_use = "a collective's result is there after `wait`"]
pub struct Pending<'t> {
    raw: *mut RawPending,
    /// Shallow clones, so that the memory stays.
    tensors: Vec<Tensor>,
    borrowed: PhantomData<&'t ()>,
}

// SAFETY: c10d's `Work` may be waited for on any thread, and its last reference dropped there.
unsafe impl Send for Pending<'_> {}

impl Pending<'_> {
    /// The same collective without the borrow of its tensors, to be kept while other work is done. Until it is waited for, the caller
    /// writes to none of its tensors, reads none that it fills, and does not free their memory by [`FlatMemory`](crate::FlatMemory).
    pub fn unborrowed(mut self) -> Pending<'static> {
        let raw = std::mem::replace(&mut self.raw, null_mut());
        Pending { raw, tensors: std::mem::take(&mut self.tensors), borrowed: PhantomData }
    }

    /// Waits for the result: on a GPU, makes the current stream wait for it.
    ///
    /// # Errors
    /// As the collective.
    pub fn wait(mut self) -> Result<(), String> {
        self.finish()
    }

    fn finish(&mut self) -> Result<(), String> {
        let raw = std::mem::replace(&mut self.raw, null_mut());
        if raw.is_null() {
            return Ok(());
        }
        // SAFETY: `raw` came from the shim, which frees it; it is passed once.
        into_result(unsafe { tch_ext_pending_wait(raw) })
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        // The group reports the failure at its next collective.
        let _ = self.finish();
    }
}

impl Group {
    /// Makes a Gloo group of all processes that have opened the store; each collective may take `timeout`.
    ///
    /// # Errors
    /// If a process does not come in time.
    pub fn connect(store: Store, rank: usize, size: usize, timeout: Duration) -> Result<Self, String> {
        // SAFETY: the store is alive, and nothing else uses it during the call.
        into_result(unsafe {
            tch_ext_group_connect(store.raw.as_ptr(), rank as c_int, size as c_int, millis(timeout))
        })?;
        Ok(Self { store, rank, size })
    }

    /// Makes an NCCL group of the same processes for tensors on GPU `device`, by the library at `path` that `make cuda` builds.
    ///
    /// # Errors
    /// If the library cannot be loaded, or a process does not come in time.
    pub fn with_nccl(&self, path: &str, device: usize, timeout: Duration) -> Result<Self, String> {
        let path = c_text(path)?;
        let (group, rank, size) = (self.store.raw.as_ptr(), self.rank as c_int, self.size as c_int);
        let mut raw = null_mut();
        // SAFETY: all pointers live until the call returns; the shim keeps its own reference to the store.
        into_result(unsafe {
            tch_ext_group_nccl(group, path.as_ptr(), rank, size, device as c_int, millis(timeout), &raw mut raw)
        })?;
        let store = Store { raw: NonNull::new(raw).ok_or("c10d returned no group")? };
        USES_NCCL.store(true, Ordering::Relaxed);
        Ok(Self { store, rank: self.rank, size: self.size })
    }

    /// Closes the connections to the other processes, whose collectives with this one then fail; the store stays open.
    pub fn disconnect(&mut self) {
        // SAFETY: the group is alive and borrowed mutably; a collective in progress keeps its own references.
        unsafe { tch_ext_group_disconnect(self.store.raw.as_ptr()) }
    }

    /// The store of the group.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Number of this process, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of processes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Replaces `tensor` by the sum or maximum of all processes' tensors, elementwise; all get the same bits.
    ///
    /// # Errors
    /// As for all collectives of a group.
    pub fn all_reduce<'t>(&self, tensor: &'t mut Tensor, reduce: Reduce) -> Result<Pending<'t>, String> {
        check("all_reduce", tensor)?;
        let max = reduce == Reduce::Max;
        // SAFETY: the group is alive; `Pending` keeps the tensor's memory until the collective is waited for.
        self.start(&[tensor], |out| unsafe {
            tch_ext_group_all_reduce(self.store.raw.as_ptr(), tensor.as_ptr(), max, out)
        })
    }

    /// Replaces `tensor` by the tensor of the process `root`.
    ///
    /// # Errors
    /// As for all collectives of a group.
    pub fn broadcast<'t>(&self, tensor: &'t mut Tensor, root: usize) -> Result<Pending<'t>, String> {
        check("broadcast", tensor)?;
        // SAFETY: as in `all_reduce`.
        self.start(&[tensor], |out| unsafe {
            tch_ext_group_broadcast(self.store.raw.as_ptr(), tensor.as_ptr(), root as i64, out)
        })
    }

    /// Fills `whole` with the parts of all processes, in the order of their ranks.
    ///
    /// # Errors
    /// As for all collectives of a group; if `whole` is not `size` times `part`.
    pub fn all_gather<'t>(&self, whole: &'t mut Tensor, part: &'t Tensor) -> Result<Pending<'t>, String> {
        self.check_parts("all_gather", whole, part)?;
        // SAFETY: as in `all_reduce`.
        self.start(&[whole, part], |out| unsafe {
            tch_ext_group_all_gather(self.store.raw.as_ptr(), whole.as_ptr(), part.as_ptr(), out)
        })
    }

    /// Fills `part` with this process's part of the sum of all processes' `whole`, which is cut into equal parts by rank.
    ///
    /// # Errors
    /// As for all collectives of a group; if `whole` is not `size` times `part`.
    pub fn reduce_scatter<'t>(&self, part: &'t mut Tensor, whole: &'t Tensor) -> Result<Pending<'t>, String> {
        self.check_parts("reduce_scatter", whole, part)?;
        // SAFETY: as in `all_reduce`.
        self.start(&[part, whole], |out| unsafe {
            tch_ext_group_reduce_scatter(self.store.raw.as_ptr(), part.as_ptr(), whole.as_ptr(), out)
        })
    }

    /// Waits for all processes.
    ///
    /// # Errors
    /// As for all collectives of a group.
    pub fn barrier(&self) -> Result<(), String> {
        // SAFETY: the group is alive.
        self.start(&[], |out| unsafe { tch_ext_group_barrier(self.store.raw.as_ptr(), out) })?.wait()
    }

    fn start<'t>(
        &self,
        tensors: &[&Tensor],
        f: impl FnOnce(*mut *mut RawPending) -> Error,
    ) -> Result<Pending<'t>, String> {
        let mut raw = null_mut();
        into_result(f(&raw mut raw))?;
        let clones = tensors.iter().map(|tensor| tensor.shallow_clone()).collect();
        Ok(Pending { raw, tensors: clones, borrowed: PhantomData })
    }

    fn check_parts(&self, name: &str, whole: &Tensor, part: &Tensor) -> Result<(), String> {
        check(name, whole)?;
        check(name, part)?;
        let same = (whole.kind(), whole.device()) == (part.kind(), part.device());
        if same && whole.numel() == part.numel() * self.size {
            return Ok(());
        }
        Err(format!("{name}: expected {} parts of {part:?}, found {whole:?}", self.size))
    }
}

fn check(name: &str, tensor: &Tensor) -> Result<(), String> {
    if tensor.is_contiguous() && tensor.kind() != Kind::Bool {
        return Ok(());
    }
    Err(format!("{name}: expected a contiguous tensor of numbers, found {tensor:?}"))
}
