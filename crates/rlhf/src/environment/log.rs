//! The file with the lines that tools and environments print.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Number of bytes after which further lines are left out: a tool may print without end.
const MAX_LOG: usize = 64 << 20;

/// Writes the lines that tools and environments print; several processes may share it. The default writes nothing.
#[derive(Debug, Clone, Default)]
pub struct Log(Option<Arc<Mutex<LogFile>>>);

#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    written: usize,
}

impl Log {
    /// Returns the log at `path`, which is made with the first line; lines are appended if it exists.
    pub fn at(path: &Path) -> Self {
        Self(Some(Arc::new(Mutex::new(LogFile { path: path.to_path_buf(), written: 0 }))))
    }

    /// Writes a line. A log that cannot be written to, such as on a full disk or in a folder that is not there, ends no run.
    pub(super) fn write(&self, line: &[u8]) {
        let Some(log) = &self.0 else { return };
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.written > MAX_LOG {
            return;
        }
        log.written += line.len() + 1;
        let mut bytes = line.to_vec();
        bytes.push(b'\n');
        if log.written > MAX_LOG {
            bytes.extend(format!("[further lines are left out, after {MAX_LOG} bytes]\n").into_bytes());
        }
        // Opened anew: the folder of a run may have been emptied since.
        if let Ok(mut file) = OpenOptions::new().create(true).append(true).open(&log.path) {
            let _ = file.write_all(&bytes);
        }
    }
}
