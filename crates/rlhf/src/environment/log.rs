//! The file with the lines that tools and environments print.

use rlhf_base::safe_text::one_line;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Number of bytes after which further lines are left out: a tool may print without end.
const MAX_LOG: usize = 64 << 20;

/// Writes the lines that tools and environments print; several processes may share it. The default writes nothing.
#[derive(Debug, Clone, Default)]
pub struct Log(Option<Arc<Mutex<Written>>>);

#[derive(Debug)]
struct Written {
    /// The file; `None` for standard error.
    path: Option<PathBuf>,
    /// Number of bytes so far.
    bytes: usize,
}

impl Log {
    /// Returns the log at `path`, which is made with the first line; lines are appended if it exists.
    pub fn at(path: &Path) -> Self {
        Self(Some(Arc::new(Mutex::new(Written { path: Some(path.to_path_buf()), bytes: 0 }))))
    }

    /// Returns the log that is standard error, with control characters escaped.
    pub fn standard_error() -> Self {
        Self(Some(Arc::new(Mutex::new(Written { path: None, bytes: 0 }))))
    }

    /// Writes a line. A log that cannot be written to, such as on a full disk or in a folder that is not there, ends no run.
    pub(crate) fn write(&self, line: &[u8]) {
        let Some(log) = &self.0 else { return };
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.bytes > MAX_LOG {
            return;
        }
        log.bytes += line.len() + 1;
        let mut bytes = match &log.path {
            Some(_) => line.to_vec(),
            None => one_line(&String::from_utf8_lossy(line)).into_owned().into_bytes(),
        };
        bytes.push(b'\n');
        if log.bytes > MAX_LOG {
            bytes.extend(format!("[further lines are left out, after {MAX_LOG} bytes]\n").into_bytes());
        }
        let Some(path) = &log.path else {
            let _ = io::stderr().write_all(&bytes);
            return;
        };
        // Opened anew: the folder of a run may have been emptied since.
        if let Ok(mut file) = OpenOptions::new().create(true).append(true).open(path) {
            let _ = file.write_all(&bytes);
        }
    }
}
