//! The sink of `metrics.jsonl`.

use crate::run::event::Event;
use crate::run::output_dir::METRICS;
use crate::run::sinks::Reached;
use rlhf_base::weights::write_text;
use rlhf_base::{Error, Result};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Appends one line of metrics per update to `metrics.jsonl`.
pub(crate) struct Jsonl {
    path: PathBuf,
    file: File,
    /// Lines that could not be written, to be tried again before a checkpoint counts on them.
    unwritten: String,
}

impl Jsonl {
    /// Opens `metrics.jsonl` in `dir`. Lines after the update that the run has `reached` are removed, and those that a killed
    /// run left incomplete.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub(crate) fn open(dir: &Path, reached: Reached) -> Result<Self> {
        let path = dir.join(METRICS);
        cut_lines(&path, "step", (reached.updates > 0).then_some(reached.recorded))?;
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io("create", &path))?;
        Ok(Self { path, file, unwritten: String::new() })
    }

    /// Writes the metrics of an update.
    ///
    /// # Errors
    /// If the line cannot be written.
    pub(crate) fn receive(&mut self, event: &Event<'_>) -> Result<()> {
        let Event::Update { metrics, .. } = event else { return Ok(()) };
        let line = serde_json::to_string(metrics).expect("numbers have a JSON form");
        self.unwritten.push_str(&format!("{line}\n"));
        self.write()
    }

    /// Writes the lines that are not written yet.
    fn write(&mut self) -> Result<()> {
        let io = Error::io("write", &self.path);
        let whole = match self.file.metadata() {
            Ok(metadata) => metadata.len(),
            Err(error) => return Err(io(error)),
        };
        // One write, so that a kill cannot leave an incomplete line with another line after it.
        if let Err(error) = self.file.write_all(self.unwritten.as_bytes()) {
            let _ = self.file.set_len(whole);
            return Err(io(error));
        }
        self.unwritten.clear();
        Ok(())
    }

    /// Flushes the file to the disk, before a checkpoint counts on it.
    pub(crate) fn sync(&mut self) -> Result<()> {
        if !self.unwritten.is_empty() {
            self.write()?;
        }
        self.file.sync_data().map_err(Error::io("write to the disk", &self.path))
    }
}

/// Removes the lines of a JSONL file whose number `key` is above `most`, or all lines if there is no `most`, and incomplete lines.
fn cut_lines(path: &Path, key: &str, most: Option<usize>) -> Result<()> {
    keep_lines(path, |line| line[key].as_f64().zip(most).is_some_and(|(number, most)| number <= most as f64))
}

/// Removes all lines of a JSONL file that `kept` does not accept, and incomplete lines, by a rename. A missing file is left as it is.
pub(super) fn keep_lines(path: &Path, kept: impl Fn(&Value) -> bool) -> Result<()> {
    let bytes = match std::fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        read => read.map_err(Error::io("read", path))?,
    };
    let text = String::from_utf8_lossy(&bytes);
    let stays = |line: &&str| line.ends_with('\n') && serde_json::from_str(line).is_ok_and(|line| kept(&line));
    let kept: String = text.split_inclusive('\n').filter(stays).collect();
    if kept.len() == bytes.len() { Ok(()) } else { write_text(path, &kept) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_base::metrics::Metrics;

    #[test]
    fn a_line_that_cannot_be_written_is_tried_again_before_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let mut jsonl = Jsonl::open(dir.path(), Reached::default()).unwrap();
        let mut metrics = Metrics::default();
        metrics.push("step", 1.0);
        let file = std::mem::replace(&mut jsonl.file, OpenOptions::new().append(true).open("/dev/full").unwrap());
        jsonl.receive(&Event::Update { step: 1, metrics: &metrics }).unwrap_err();
        jsonl.sync().unwrap_err();
        jsonl.file = file;
        jsonl.sync().unwrap();
        metrics.push("step", 2.0);
        jsonl.receive(&Event::Update { step: 2, metrics: &metrics }).unwrap();
        assert_eq!(std::fs::read_to_string(&jsonl.path).unwrap().lines().count(), 2);
    }

    #[test]
    fn lines_after_a_step_and_incomplete_lines_are_removed_and_the_rest_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let lines = ["{\"step\": 1, \"x\": 0.10}\n", "{\"step\":2}\n", "{\"step\":3}\n", "{\"step\":4,\"x\":1"];
        for (most, left) in [(Some(9), 3), (Some(2), 2), (Some(0), 0), (None, 0)] {
            std::fs::write(&path, lines.concat()).unwrap();
            cut_lines(&path, "step", most).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), lines[..left].concat());
        }
        cut_lines(&dir.path().join("none"), "step", Some(1)).unwrap();
    }
}
