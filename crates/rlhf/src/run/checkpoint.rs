//! Checkpoints: everything that a run needs to resume as if it had never stopped, in a folder that appears by one rename.
//!
//! `output_dir/checkpoint-N` is the run after N updates: its models as Hugging Face folders, the optimizers' states beside
//! them, and `trainer_state.json`, which is written last and lists every other file with its size. The folder is written
//! under another name and flushed to the disk before it gets its own, so that a folder with that name is complete. The next run
//! removes what a killed run leaves under other names.
//!
//! | subject | module |
//! |---|---|
//! | when checkpoints are written, and which are kept | this one |
//! | names of folders; folders that are created and removed by one rename | `folders` |
//! | the content of `trainer_state.json` | `state` |
//! | a checkpoint to resume from, a finished run, the record of an update | `saved` |
//! | settings that a later run may change | `changes` |

mod changes;
mod folders;
mod saved;
mod state;

pub(crate) use changes::{Change, EarlierSettings, Length, RunSettings, is_compared_by_content};
pub(super) use changes::{Compared, settings};
pub use folders::has_checkpoint;
pub(crate) use folders::{clear, folders, name_of, newest, numbered, places};
pub(crate) use folders::{commit, commit_among_others};
pub(crate) use saved::{FinishedRun, Saved, UpdateRecord};
pub(crate) use state::{FixedState, PartStates, State, or_default, parts_of, read_parts};

use crate::run::settings::{Interval, RunConfig};
use folders::{remove, sizes};
use rlhf_base::weights::{pretty, write_text};
use rlhf_base::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of the best model.
pub(crate) const BEST: &str = "best";
/// The file with the metric of the best model.
pub(super) const BEST_FILE: &str = "best.json";
/// The state of everything but weights and optimizers.
pub(crate) const STATE: &str = "trainer_state.json";
/// The file next to the model of a run that ended early, with its settings.
pub(crate) const UNFINISHED: &str = "unfinished.json";
/// An optimizer's state, next to the model that it belongs to.
pub(crate) const OPTIMIZER: &str = "optimizer.safetensors";

/// Files in a checkpoint that belong to no model.
pub(crate) const FILES: [&str; 4] = [STATE, UNFINISHED, OPTIMIZER, BEST_FILE];

/// The checkpoints that a run writes.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    dir: PathBuf,
    command: &'static str,
    config: Map<String, Value>,
    num_updates: usize,
    every: Option<Interval>,
    limit: Option<usize>,
    /// The update of the last checkpoint that was written or tried.
    last: Option<usize>,
}

impl Checkpoints {
    /// Returns the checkpoints of the run of `command` with the settings `config`.
    ///
    /// # Errors
    /// If the settings cannot be written to a checkpoint.
    pub(crate) fn new(
        command: &'static str,
        run: &RunConfig,
        config: &impl Serialize,
        num_updates: usize,
    ) -> Result<Self> {
        let dir = run.output_dir.clone();
        let every = run.checkpoints.save_steps;
        let limit = run.checkpoints.save_total_limit;
        Ok(Self { dir, command, config: settings(config)?, num_updates, every, limit, last: None })
    }

    /// Removes incomplete folders of a killed run, and checkpoints beyond `save_total_limit`, when `done` updates are done.
    ///
    /// # Errors
    /// If that cannot be removed.
    pub(crate) fn tidy(&mut self, done: usize) -> Result<()> {
        clear(&self.dir)?;
        self.keep_to_limit(done)
    }

    /// Returns whether a checkpoint is due after `done` updates: by `save_steps`, and after the last update.
    pub(crate) fn is_due(&self, done: usize, epochs: Epochs) -> bool {
        epochs.is_due(self.every, done, self.num_updates)
    }

    /// Returns the newest complete checkpoint of fewer than `done` updates.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub(crate) fn newest_before(&self, done: usize) -> Result<Option<Saved>> {
        let numbers = numbered(&self.dir)?.into_iter().rev().filter(|&number| number < done);
        Ok(numbers.into_iter().find_map(|number| Saved::read(&self.place(number)).ok()))
    }

    /// Removes the checkpoints of more than `done` updates.
    ///
    /// # Errors
    /// If one cannot be removed.
    pub(crate) fn remove_after(&mut self, done: usize) -> Result<()> {
        self.last = None;
        let later = numbered(&self.dir)?.into_iter().filter(|&number| number > done);
        later.into_iter().try_for_each(|number| remove(&self.dir, &name_of(number)))
    }

    /// The settings of the run.
    pub(crate) fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// The folder of the run.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the folder of the checkpoint after `done` updates.
    pub(crate) fn place(&self, done: usize) -> PathBuf {
        self.dir.join(name_of(done))
    }

    /// Returns whether a run that ends after `done` updates should leave a checkpoint: it did an update, it is not finished or checkpoints
    /// are set, and none was written or tried after that update.
    pub(crate) fn is_wanted_at_end(&self, done: usize) -> bool {
        let due = done > 0 && (done < self.num_updates || self.every.is_some());
        due && self.last != Some(done) && Saved::read(&self.place(done)).is_err()
    }

    /// Writes the checkpoint after `done` updates, and then removes old ones beyond `save_total_limit`.
    ///
    /// `write` writes models and optimizers to the folder that it gets; `state` is the state of all other parts, by name.
    ///
    /// # Errors
    /// The error of `write`; if a file or folder cannot be written, renamed or removed. Older checkpoints stay complete.
    pub(crate) fn save(
        &mut self,
        done: usize,
        metrics: Map<String, Value>,
        state: Map<String, Value>,
        write: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        self.last = Some(done);
        commit(&self.dir, &name_of(done), |dir| {
            write(dir)?;
            let mut files = BTreeMap::new();
            sizes(dir, "", &mut files)?;
            let begun = State::new(self.command, done, self.num_updates, self.config.clone());
            let state = State { metrics, state, files, ..begun };
            write_text(&dir.join(STATE), &pretty(&json!(state)))
        })?;
        self.keep_to_limit(done)
    }

    /// Leaves the model of the run in its folder, as `save` writes it. If the run `ended` before its last update, a note is written next to
    /// it, so that the model does not keep the run from starting again there.
    ///
    /// # Errors
    /// The error of `save`; if the note cannot be written or removed.
    pub(crate) fn leave_model(
        &self,
        done: usize,
        ended: &Result<usize>,
        save: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let note = self.dir.join(UNFINISHED);
        let finished = ended.is_ok() && done == self.num_updates;
        if !finished {
            let state = State::new(self.command, done, self.num_updates, self.config.clone());
            write_text(&note, &pretty(&json!(state)))?;
        }
        save()?;
        if finished && note.is_file() {
            fs::remove_file(&note).map_err(Error::io("remove", &note))?;
        }
        Ok(())
    }

    /// Removes the oldest checkpoints of at most `done` updates beyond `save_total_limit`.
    fn keep_to_limit(&self, done: usize) -> Result<()> {
        let Some(limit) = self.limit else { return Ok(()) };
        // Later checkpoints are damaged: the run was resumed from an earlier one.
        let numbers: Vec<usize> = numbered(&self.dir)?.into_iter().filter(|&number| number <= done).collect();
        for number in &numbers[..numbers.len().saturating_sub(limit)] {
            remove(&self.dir, &name_of(*number))?;
        }
        Ok(())
    }
}

/// The epochs of a run, in rows of its data.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Epochs {
    /// Rows that an update takes.
    pub(crate) per_update: usize,
    /// Rows of an epoch.
    pub(crate) len: usize,
}

impl Epochs {
    /// Returns whether something is due after `done` of `total` updates: by `every`, and after the last update; never without `every`.
    pub(crate) fn is_due(self, every: Option<Interval>, done: usize, total: usize) -> bool {
        match every {
            Some(Interval::Updates(every)) => is_due(Some(every), done, total),
            Some(Interval::Epoch) => done == total || done > 0 && self.after(done) > self.after(done - 1),
            None => false,
        }
    }

    /// Returns the number of whole epochs after `done` updates.
    fn after(self, done: usize) -> u128 {
        done as u128 * self.per_update as u128 / self.len.max(1) as u128
    }
}

/// Returns whether `done` is a multiple of `every`, or equal to `total`; never without `every`.
pub(crate) fn is_due(every: Option<usize>, done: usize, total: usize) -> bool {
    every.is_some_and(|every| done.is_multiple_of(every) || done == total)
}

#[cfg(test)]
pub(super) mod tests {
    use super::folders::names;
    use super::*;
    use crate::run::settings::Resume;
    use crate::run::start::Start;
    use rlhf_base::schema::defaults;

    pub(in crate::run) fn run(dir: &Path, limit: Option<usize>, resume: Option<Resume>) -> RunConfig {
        let mut run = RunConfig { output_dir: dir.into(), ..defaults() };
        run.checkpoints.save_steps = Some(2.into());
        run.checkpoints.save_total_limit = limit;
        run.checkpoints.resume_from_checkpoint = resume;
        run
    }

    pub(in crate::run) fn save(dir: &Path, limit: Option<usize>, updates: &[usize]) {
        let run = run(dir, limit, None);
        let mut checkpoints = Checkpoints::new("sft", &run, &json!({"seed": 1, "device": "cpu"}), 20).unwrap();
        for &update in updates {
            let write = |dir: &Path| {
                fs::create_dir(dir.join("value_model")).unwrap();
                write_text(&dir.join("model"), "weights")?;
                write_text(&dir.join("value_model/model"), "more weights")
            };
            checkpoints.save(update, Map::new(), Map::new(), write).unwrap();
        }
    }

    fn sorted(dir: &Path) -> Vec<String> {
        let mut names = names(dir).unwrap();
        names.sort_unstable();
        names
    }

    pub(in crate::run) fn resumed_update(dir: &Path) -> Result<Option<usize>> {
        Ok(Start::find(&run(dir, None, Some(Resume::Latest)))?.from.map(|saved| saved.state.update))
    }

    #[test]
    fn the_limit_keeps_the_newest_checkpoints_and_touches_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["checkpoint-01", "checkpoint-old", "best", "notes"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        save(dir.path(), Some(2), &[2, 4, 10]);
        let expected = ["best", "checkpoint-01", "checkpoint-10", "checkpoint-4", "checkpoint-old", "notes"];
        assert_eq!(sorted(dir.path()), expected);
        assert_eq!(resumed_update(dir.path()).unwrap(), Some(10));
    }

    #[test]
    fn a_damaged_checkpoint_is_skipped_and_named_and_replaced_by_a_later_run() {
        for name in ["model", "value_model/model", STATE] {
            for missing in [true, false] {
                let dir = tempfile::tempdir().unwrap();
                save(dir.path(), None, &[2, 4]);
                let path = dir.path().join("checkpoint-4").join(name);
                if missing {
                    fs::remove_file(&path).unwrap();
                } else {
                    fs::write(&path, "wei").unwrap();
                }
                let start = Start::find(&run(dir.path(), None, Some(Resume::Latest))).unwrap();
                assert_eq!(start.done(), 2, "{name}");
                assert!(start.warnings[0].contains("checkpoint-4"), "{:?}", start.warnings);
                let error = Saved::read(&dir.path().join("checkpoint-4")).unwrap_err().to_string();
                assert!(error.contains("expected") || error.contains("JSON"), "{error}");
                save(dir.path(), Some(2), &[3, 4]);
                assert_eq!(sorted(dir.path()), ["checkpoint-3", "checkpoint-4"]);
                assert_eq!(resumed_update(dir.path()).unwrap(), Some(4));
            }
        }
    }

    #[test]
    fn folders_that_a_killed_run_left_incomplete_are_no_checkpoints_and_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), None, &[2]);
        for name in [".saving-checkpoint-4", ".removing-checkpoint-1", ".removing-best", ".saving-best"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("half"), name).unwrap();
        }
        assert_eq!(resumed_update(dir.path()).unwrap(), Some(2));
        save(dir.path(), None, &[4]);
        // The old best model was renamed, and the new one not yet.
        assert_eq!(sorted(dir.path()), ["best", "checkpoint-2", "checkpoint-4"]);
        assert_eq!(fs::read_to_string(dir.path().join("best/half")).unwrap(), ".removing-best");
    }

    #[test]
    fn a_write_that_fails_leaves_earlier_checkpoints_and_no_folder() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), Some(1), &[2]);
        let run = run(dir.path(), Some(1), None);
        let mut checkpoints = Checkpoints::new("sft", &run, &json!({}), 9).unwrap();
        let full = |dir: &Path| write_text(&dir.join("model"), "wei").and(Err(Error::Run("full".into())));
        assert!(checkpoints.save(4, Map::new(), Map::new(), full).is_err());
        assert_eq!(sorted(dir.path()), ["checkpoint-2"]);
        assert!(!checkpoints.is_wanted_at_end(4), "what failed is not tried again at once");
    }

    #[test]
    fn a_resumed_run_removes_checkpoints_beyond_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), None, &[2, 4, 6, 8]);
        // The last is damaged, so the run resumes from the one before.
        fs::remove_file(dir.path().join("checkpoint-8/model")).unwrap();
        let run = run(dir.path(), Some(2), None);
        Checkpoints::new("sft", &run, &json!({}), 9).unwrap().tidy(6).unwrap();
        assert_eq!(sorted(dir.path()), ["checkpoint-4", "checkpoint-6", "checkpoint-8"]);
    }

    #[test]
    fn an_epoch_ends_with_the_update_that_takes_its_last_row() {
        let due = |per_update, len, every| {
            let epochs = Epochs { per_update, len };
            (0..=10).filter(|&done| epochs.is_due(every, done, 10)).collect::<Vec<_>>()
        };
        let epoch = Some(Interval::Epoch);
        assert_eq!(due(4, 8, epoch), [2, 4, 6, 8, 10]);
        // 10, 20, 30 and 40 rows are within the updates 3, 5, 8 and 10.
        assert_eq!(due(4, 10, epoch), [3, 5, 8, 10]);
        assert_eq!(due(16, 8, epoch), Vec::from_iter(1..=10), "an update of two epochs");
        assert_eq!(due(1, 1000, epoch), [10], "the last update");
        assert_eq!((due(4, 10, Some(Interval::Updates(4))), due(4, 10, None)), (vec![0, 4, 8, 10], vec![]));
    }
}
