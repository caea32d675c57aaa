//! CUDA graphs: work of a GPU that is recorded once (PyTorch: captured) and replayed as a whole.

use crate::into_result;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

unsafe extern "C" {
    fn tch_ext_graphs_error() -> *const c_char;
    fn tch_ext_graph_begin(device: c_int, out: *mut *mut c_void) -> *mut c_char;
    fn tch_ext_graph_end(graph: *mut c_void, keep: bool) -> *mut c_char;
    fn tch_ext_graph_replay(graph: *mut c_void) -> *mut c_char;
    fn tch_ext_graph_free(graph: *mut c_void);
}

/// A recording has failed in this process: the next would too.
static FAILED: AtomicBool = AtomicBool::new(false);

/// Whether work can be recorded: CUDA is loaded ([`crate::load_cuda`]), beside libtorch's libraries is the one that `make cuda` builds
/// ([`crate::CUDA_LIBRARY`]), and no recording has failed.
pub fn has_graphs() -> bool {
    graphs_error().is_none() && !FAILED.load(Ordering::Relaxed)
}

/// The reason that the library [`crate::CUDA_LIBRARY`] is not loaded; `None` if it is.
pub fn graphs_error() -> Option<String> {
    if !crate::is_cuda_loaded() {
        return Some("CUDA is not loaded".into());
    }
    // SAFETY: null, or a text that is set before `load_cuda` returns and stays.
    let error = unsafe { tch_ext_graphs_error().as_ref().map(|error| CStr::from_ptr(error)) };
    error.map(|error| error.to_string_lossy().into_owned())
}

/// Work of a GPU that has been recorded.
#[derive(Debug)]
pub struct Graph {
    raw: NonNull<c_void>,
}

/// A graph that is being recorded. If the work panics, the recording ends here.
struct Recording(Option<Graph>);

impl Drop for Recording {
    fn drop(&mut self) {
        let Some(graph) = &self.0 else { return };
        FAILED.store(true, Ordering::Relaxed);
        // SAFETY: the graph is alive, and its recording has not ended.
        let _ = into_result(unsafe { tch_ext_graph_end(graph.raw.as_ptr(), false) });
    }
}

impl Graph {
    /// Records what `work` queues on GPU `device`, without running it, and returns the graph with the result of `work`.
    ///
    /// The work must neither wait for the GPU nor copy between it and the host. It reads and writes the same tensors at each
    /// [`Graph::replay`]. Inputs and outputs must be tensors that were allocated before the recording and that outlive the graph: all graphs of a
    /// GPU share one memory pool, so tensors that the work allocates may be overwritten by the replay of another graph. Synchronizes with the
    /// GPU before it records.
    ///
    /// # Errors
    /// If there are no graphs ([`has_graphs`]), or CUDA cannot record the work. Nothing is recorded in this process then.
    pub fn record<T>(device: usize, work: impl FnOnce() -> T) -> Result<(Self, T), String> {
        if !has_graphs() {
            return Err("CUDA's graphs are not loaded, or could not be recorded before".into());
        }
        let failed = |message: String| {
            FAILED.store(true, Ordering::Relaxed);
            message
        };
        let mut raw = null_mut();
        // SAFETY: the pointer lives until the call returns.
        into_result(unsafe { tch_ext_graph_begin(device as c_int, &raw mut raw) }).map_err(failed)?;
        let raw = NonNull::new(raw).ok_or("CUDA returned no graph")?;
        let mut recording = Recording(Some(Self { raw }));
        let result = work();
        let graph = recording.0.take().ok_or("the recording has ended")?;
        // SAFETY: the graph is alive, and its recording has not ended.
        into_result(unsafe { tch_ext_graph_end(raw.as_ptr(), true) }).map_err(failed)?;
        Ok((graph, result))
    }

    /// Queues the recorded work, without waiting for it.
    ///
    /// # Errors
    /// If CUDA refuses.
    pub fn replay(&self) -> Result<(), String> {
        // SAFETY: the graph is alive and complete.
        into_result(unsafe { tch_ext_graph_replay(self.raw.as_ptr()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: nothing else has it.
        unsafe { tch_ext_graph_free(self.raw.as_ptr()) }
    }
}
