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
    /// Returns a log that writes to the file `path`. The first line creates the file; lines are appended if it exists.
    pub fn at(path: &Path) -> Self {
        Self(Some(Arc::new(Mutex::new(Written { path: Some(path.to_path_buf()), bytes: 0 }))))
    }

    /// Returns a log that writes to standard error, with control characters escaped.
    pub fn standard_error() -> Self {
        Self(Some(Arc::new(Mutex::new(Written { path: None, bytes: 0 }))))
    }

    /// Writes a line. Failures are ignored, such as a full disk or a missing folder: they should not end a run.
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
        // Opened for each line, because the run's folder may have been emptied since the last one.
        if let Ok(mut file) = OpenOptions::new().create(true).append(true).open(path) {
            let _ = file.write_all(&bytes);
        }
    }
}
