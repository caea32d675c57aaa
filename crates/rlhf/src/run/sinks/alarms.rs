//! The sink of `alarms.jsonl`.

use crate::run::event::Event;
use crate::run::output_dir::ALARMS;
use crate::run::sinks::Reached;
use crate::run::sinks::jsonl::keep_lines;
use rlhf_base::{Error, Result};
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Appends one line per alarm to `alarms.jsonl`, which exists from the first one on; a rollback has a line too, with the name
/// `rollback`.
pub(crate) struct AlarmFile {
    path: PathBuf,
    rollbacks: usize,
}

impl AlarmFile {
    /// Opens `alarms.jsonl` in `dir`, and removes the lines after those that the run has `reached`, and incomplete lines. Lines of
    /// updates that were rolled back before that stay.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub(crate) fn open(dir: &Path, reached: Reached) -> Result<Self> {
        let path = dir.join(ALARMS);
        let place = (reached.rollbacks, reached.updates);
        let number = |line: &Value, name: &str| line[name].as_u64().map(|number| number as usize);
        keep_lines(&path, |line| {
            let step = number(line, "step").filter(|_| reached.updates > 0);
            step.is_some_and(|step| (number(line, "rollbacks").unwrap_or(0), step) <= place)
        })?;
        Ok(Self { path, rollbacks: reached.rollbacks })
    }

    /// Writes an alarm or a rollback, flushed to the disk: there are few.
    ///
    /// # Errors
    /// If the line cannot be written.
    pub(crate) fn receive(&mut self, event: &Event<'_>) -> Result<()> {
        match event {
            Event::Warning { step, warning } => self.write(*step, warning.kind.name(), &warning.message),
            Event::RolledBack { step, message, .. } => {
                self.write(*step, "rollback", message)?;
                self.rollbacks += 1;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn write(&self, step: usize, alarm: &str, message: &str) -> Result<()> {
        let mut line = json!({"step": step, "alarm": alarm, "message": message});
        if self.rollbacks > 0 {
            line["rollbacks"] = self.rollbacks.into();
        }
        let append = || {
            let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
            // One write, so that a kill cannot leave an incomplete line with another line after it.
            file.write_all(format!("{line}\n").as_bytes())?;
            file.sync_data()
        };
        append().map_err(Error::io("write", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_base::metrics::{Warning, WarningKind};

    #[test]
    fn alarms_are_appended_as_lines_and_those_after_a_checkpoint_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let warning = Warning { kind: WarningKind::RunawayKl, message: "update 3: \"far\"\nof it".into() };
        let mut file = AlarmFile::open(dir.path(), Reached::default()).unwrap();
        assert!(!dir.path().join(ALARMS).exists(), "there are none");
        for step in [2, 3, 3] {
            file.receive(&Event::Warning { step, warning: &warning }).unwrap();
        }
        let line = |step: usize| {
            format!("{{\"step\":{step},\"alarm\":\"runaway_kl\",\"message\":\"update 3: \\\"far\\\"\\nof it\"}}\n")
        };
        let lines = || std::fs::read_to_string(dir.path().join(ALARMS)).unwrap();
        assert_eq!(lines(), [line(2), line(3), line(3)].concat());
        let reached = |updates, rollbacks| Reached { updates, recorded: updates, rollbacks };
        let mut file = AlarmFile::open(dir.path(), reached(2, 0)).unwrap();
        assert_eq!(lines(), line(2));
        // Back from update 7 to update 2, and an alarm after update 4.
        file.receive(&Event::RolledBack { step: 7, to: 2, message: "back" }).unwrap();
        let back = "{\"step\":7,\"alarm\":\"rollback\",\"message\":\"back\"}\n";
        file.receive(&Event::Warning { step: 4, warning: &warning }).unwrap();
        let again = line(4).replace('}', ",\"rollbacks\":1}");
        assert_eq!(lines(), [line(2), back.into(), again.clone()].concat());
        for (at, left) in [(reached(4, 1), 3), (reached(3, 1), 2), (reached(6, 0), 1), (reached(1, 0), 0)] {
            AlarmFile::open(dir.path(), at).unwrap();
            assert_eq!(lines(), [line(2), back.into(), again.clone()][..left].concat());
        }
    }
}
