//! The output lines of a program. They are read when they are needed, so that output that still waits in the pipe is noticed.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::{ErrorKind, Read};
use std::process::ChildStdout;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// Maximum length of a line in bytes, far above any real one.
pub(super) const MAX_LINE: usize = 4 << 20;

/// Number of bytes that are read at once.
const CHUNK: usize = 64 << 10;

/// The lines of a program's standard output that are not blank. A line of more than [`MAX_LINE`] bytes is truncated to one byte more,
/// and the rest is skipped. This bounds the memory: output beyond it waits in the pipe.
pub(super) struct Lines {
    stdout: ChildStdout,
    /// Bytes that belong to no line yet.
    read: Vec<u8>,
    /// Number of bytes of `read` without an end of line.
    searched: usize,
    /// Whether the rest of a long line is skipped.
    skips: bool,
    ended: bool,
}

impl Lines {
    pub(super) fn new(stdout: ChildStdout) -> Self {
        Self { stdout, read: Vec::new(), searched: 0, skips: false, ended: false }
    }

    /// Returns the next line.
    ///
    /// # Errors
    /// `Timeout` if there is none within `timeout`, `Disconnected` at the end of the output.
    pub(super) fn next(&mut self, timeout: Duration) -> Result<Vec<u8>, RecvTimeoutError> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(line) = self.take() {
                return Ok(line);
            }
            if self.ended {
                return Err(RecvTimeoutError::Disconnected);
            }
            if !self.is_readable(until.saturating_duration_since(Instant::now())) {
                return Err(RecvTimeoutError::Timeout);
            }
            self.fill();
        }
    }

    /// Returns the waiting output, if there is any: a line, or the beginning of one.
    pub(super) fn waiting(&mut self) -> Option<Vec<u8>> {
        match self.next(Duration::ZERO) {
            Ok(line) => Some(line),
            Err(_) => (!is_blank(&self.read)).then(|| std::mem::take(&mut self.read)),
        }
    }

    /// Returns whether a read would not wait, within `timeout`.
    fn is_readable(&self, timeout: Duration) -> bool {
        let Ok(timeout) = Timespec::try_from(timeout) else { return true };
        let mut polled = [PollFd::new(&self.stdout, PollFlags::IN)];
        match poll(&mut polled, Some(&timeout)) {
            Ok(count) => count > 0,
            // A signal interrupted the wait; the caller asks again if there is time left.
            Err(Errno::INTR) => false,
            Err(_) => true,
        }
    }

    fn fill(&mut self) {
        let before = self.read.len();
        self.read.resize(before + CHUNK, 0);
        let count = match self.stdout.read(&mut self.read[before..]) {
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {
                self.read.truncate(before);
                return;
            }
            Err(_) => 0,
        };
        self.read.truncate(before + count);
        self.ended = count == 0;
    }

    /// Takes the next line out of the bytes that were read.
    fn take(&mut self) -> Option<Vec<u8>> {
        loop {
            let end = self.read[self.searched..].iter().position(|&byte| byte == b'\n').map(|at| self.searched + at);
            let (len, rest) = match end {
                Some(end) => (end, end + 1),
                None if self.ended && !self.read.is_empty() => (self.read.len(), self.read.len()),
                None if self.read.len() > MAX_LINE => (self.read.len(), self.read.len()),
                None => {
                    self.searched = self.read.len();
                    return None;
                }
            };
            let mut line: Vec<u8> = self.read.drain(..rest).take(len.min(MAX_LINE + 1)).collect();
            self.searched = 0;
            let skipped = std::mem::replace(&mut self.skips, end.is_none());
            if !skipped && !is_blank(&line) {
                line.shrink_to_fit();
                return Some(line);
            }
        }
    }
}

fn is_blank(line: &[u8]) -> bool {
    line.iter().all(u8::is_ascii_whitespace)
}
