//! The sink of `samples/`: files of responses.

use crate::run::event::{Event, Sample, SampleSource};
use crate::run::output_dir::{SAMPLES, remove_files, samples_update};
use rlhf_base::weights::write_text;
use rlhf_base::{Error, Result};
use std::path::{Path, PathBuf};

/// Writes the responses of samples and evaluations to files in `samples/`, one file per event.
pub(crate) struct SampleFiles {
    dir: PathBuf,
}

impl SampleFiles {
    /// Opens the folder `samples` in `dir`, and removes the files of later updates than `updates`.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub(crate) fn open(dir: &Path, updates: usize) -> Result<Self> {
        let dir = dir.join(SAMPLES);
        if dir.is_dir() {
            remove_files(&dir, |name| samples_update(name).is_some_and(|update| update > updates))?;
        }
        Ok(Self { dir })
    }

    /// Writes the responses of an event that has some.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn receive(&mut self, event: &Event<'_>) -> Result<()> {
        match event {
            Event::Samples { step, episode, source: SampleSource::SamplePrompts, samples } => {
                self.write("update", *step, *episode, samples)
            }
            Event::Samples { step, episode, source: SampleSource::Rollout, samples } => {
                self.write("answers", *step, *episode, samples)
            }
            Event::Evaluation { step, episode, evaluation } => self.write("eval", *step, *episode, &evaluation.samples),
            _ => Ok(()),
        }
    }

    fn write(&self, kind: &str, update: usize, episode: usize, samples: &[Sample]) -> Result<()> {
        std::fs::create_dir_all(&self.dir).map_err(Error::io("create the folder", &self.dir))?;
        let mut lines = String::new();
        for sample in samples {
            let mut row = serde_json::json!({"step": update, "episode": episode});
            let sample = serde_json::to_value(sample).expect("a sample has a JSON form");
            row.as_object_mut().expect("an object").extend(sample.as_object().expect("an object").clone());
            lines.push_str(&format!("{row}\n"));
        }
        write_text(&self.dir.join(format!("{kind}-{update:06}.jsonl")), &lines)
    }
}
