//! The start of a run: new, resumed from a checkpoint, or started again.

use crate::run::checkpoint::{
    Compared, EarlierSettings, Length, PartStates, RunSettings, Saved, State, UNFINISHED, name_of, numbered,
};
use crate::run::inputs::date_in;
use crate::run::resolved::{has_updates, resolved_settings};
use crate::run::settings::{Resume, RunConfig};
use rlhf_base::dist::{World, num_ranks};
use rlhf_base::schema::ResumeClass;
use rlhf_base::{Error, Result};
use rlhf_hub::Commits;
use rlhf_lm::model::is_model;
use rlhf_lm::tokenizer::{FixedDate, date_now};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};

/// Start of a run: a checkpoint, or the first update.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Start {
    /// The checkpoint to resume from.
    pub(crate) from: Option<Saved>,
    /// Whether the checkpoint lies in the output folder.
    pub(crate) in_place: bool,
    /// Whether the run may replace the one in `output_dir`: that one has no checkpoint, and no model except that of a run that ended early.
    pub(crate) replaces: bool,
    /// That run, if its settings are known and have to stay.
    pub(crate) again: Option<Again>,
    /// Warnings about damaged or missing checkpoints.
    pub(crate) warnings: Vec<String>,
}

/// External facts that a run looks up at its start and keeps when it resumes. In a new run they are not known yet.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The commits that names of the hub stand for.
    pub(crate) commits: Commits,
    /// The date of chat templates.
    date: Option<String>,
}

impl Found {
    /// Reads the facts from the state `parts` of a run.
    ///
    /// # Errors
    /// If a part has another form.
    pub(crate) fn read(parts: &PartStates<'_>) -> Result<Self> {
        let commits = parts.part("commits").map_or(Ok(Commits::new()), |_| parts.parsed("commits"))?;
        Ok(Self { commits, date: parts.part("inputs").ok().and_then(date_in) })
    }

    /// Gives the tokenizers that are loaded next the date of the run. A new run takes the date of rank 0.
    ///
    /// # Errors
    /// If the date is invalid; if a rank has ended or does not respond.
    pub(crate) fn fix_date(&self, world: &World) -> Result<FixedDate> {
        let date = world.broadcast(self.date.clone().unwrap_or_else(date_now))?;
        FixedDate::new(&date)
    }
}

/// A run that did some updates, has no checkpoint, and starts again with the same settings.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Again {
    /// It left no model, only the `settings` of its `config.yaml` in the folder `dir`.
    Begun { dir: PathBuf, settings: Map<String, Value> },
    /// It ended early, and left a model in the folder `dir`.
    Ended { dir: PathBuf, state: Box<State> },
}

impl Start {
    /// Finds the checkpoint that `resume_from_checkpoint` sets. Changes nothing.
    ///
    /// # Errors
    /// If it names no complete checkpoint, or one beside newer ones in `output_dir`; if it sets the newest one, and no checkpoint
    /// in `output_dir` is complete.
    pub(crate) fn find(run: &RunConfig) -> Result<Self> {
        let out = run.output_dir.as_path();
        let Some(setting) = &run.checkpoints.resume_from_checkpoint else { return Ok(Self::default()) };
        let numbers = numbered(out)?;
        let Resume::From(dir) = setting else {
            let start = Self::newest(out, &numbers)?;
            // With `overwrite_output_dir` the run may have other settings than the one that it replaces.
            let may_differ = |again: &Again| run.overwrite_output_dir && matches!(again, Again::Begun { .. });
            let again = start.again.filter(|again| !may_differ(again));
            return Ok(Self { again, ..start });
        };
        let saved = Saved::read(dir)?;
        let parent = fs::canonicalize(dir).ok().and_then(|dir| dir.parent().map(Path::to_path_buf));
        let in_place = parent.is_some() && parent == fs::canonicalize(out).ok();
        let newer = numbers.iter().rev().filter(|&&number| number > saved.state.update);
        let mut newer = newer.map(|&number| out.join(name_of(number)));
        if let Some(newer) = newer.find(|path| in_place && Saved::read(path).is_ok()) {
            return Err(Error::refused(
                "resume_from_checkpoint",
                format!(
                    " = {}: {} is newer: resume from that one, remove it, or continue in another output_dir",
                    dir.display(),
                    newer.display()
                ),
            ));
        }
        Ok(Self { from: Some(saved), in_place, ..Self::default() })
    }

    /// Finds the newest complete checkpoint in `out`, which has checkpoints of these `numbers`.
    fn newest(out: &Path, numbers: &[usize]) -> Result<Self> {
        let mut warnings = Vec::new();
        let mut first = None;
        for number in numbers.iter().rev() {
            match Saved::read(&out.join(name_of(*number))) {
                Ok(saved) => return Ok(Self { from: Some(saved), in_place: true, warnings, ..Self::default() }),
                Err(error) => {
                    warnings.push(format!("passed over: {error}"));
                    first.get_or_insert(error);
                }
            }
        }
        match first {
            Some(error) => Err(Error::Run(format!("no whole checkpoint to resume from: {error}"))),
            // A run that was killed before its first checkpoint starts again.
            None if !is_model(out) => {
                let settings = resolved_settings(out).and_then(|settings| settings.as_object().cloned());
                let again = settings.map(|settings| Again::Begun { dir: out.to_path_buf(), settings });
                let warning = |_: &_| format!("{}: the run has no checkpoint: it starts again", out.display());
                let warnings = again.iter().map(warning).collect();
                // The settings of a run that ended before its first update need not stay: they may have been the reason for its end.
                let again = again.filter(|_| has_updates(out));
                Ok(Self { replaces: true, again, warnings, ..Self::default() })
            }
            // A run that ended early and could not write a checkpoint starts again too.
            None if out.join(UNFINISHED).is_file() => {
                let state = Box::new(State::read(&out.join(UNFINISHED))?);
                let place = out.display();
                let (done, all) = (state.update, state.num_updates);
                let again = Some(Again::Ended { dir: out.to_path_buf(), state });
                let warnings = vec![format!(
                    "{place}: the run ended after update {done} of {all} without a checkpoint: it starts again"
                )];
                Ok(Self { replaces: true, again, warnings, ..Self::default() })
            }
            None => Ok(Self::default()),
        }
    }

    /// Checks that the run, resumed or started again, keeps its settings; returns warnings about harmless differences.
    ///
    /// # Errors
    /// As [`Saved::check`].
    pub(crate) fn check(&self, command: &str, config: &impl RunSettings) -> Result<Vec<String>> {
        match (&self.from, &self.again) {
            (Some(saved), _) => saved.check(command, config),
            (None, Some(Again::Ended { dir, state })) => {
                let length = if state.is_finished() { Length::Kept } else { Length::KeptUntilFinished };
                state.settings(dir).check(command, config, length)
            }
            (None, Some(Again::Begun { dir, settings })) => {
                let compared = Compared { values: as_resolved(config)?, ..Compared::new(config)? };
                // Batch sizes cannot be compared: the number of ranks is not known.
                let is_known = |(name, _): &(&String, &Value)| compared.resume(name) != ResumeClass::Sizes;
                let settings = settings.iter().filter(is_known).map(|(name, value)| (name.clone(), value.clone()));
                let settings = settings.collect();
                let earlier = EarlierSettings::of_config(dir, command, &settings);
                earlier.check_with_ranks(command, &compared, num_ranks(), Length::Kept)
            }
            (None, None) => Ok(Vec::new()),
        }
    }

    /// Returns whether the settings extend a finished run.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(crate) fn extends(&self, config: &impl RunSettings) -> Result<bool> {
        let Some(saved) = self.from.as_ref().filter(|saved| saved.state.is_finished()) else { return Ok(false) };
        let compared = Compared::new(config)?;
        let is_longer = |(name, now): (&String, &Value)| {
            compared.resume(name) == ResumeClass::Length && saved.state.setting(name) != now
        };
        Ok(compared.values.iter().any(is_longer))
    }

    /// Returns the number of updates done.
    pub(crate) fn done(&self) -> usize {
        self.from.as_ref().map_or(0, |saved| saved.state.update)
    }

    /// Returns the external facts that the run looked up at its start.
    ///
    /// # Errors
    /// If the checkpoint has them in another form.
    pub(crate) fn found(&self) -> Result<Found> {
        self.from.as_ref().map_or(Ok(Found::default()), |saved| Found::read(&saved.parts()))
    }

    /// Returns the folder of the checkpoint, if it belongs to another run.
    pub(crate) fn input(&self) -> Option<&Path> {
        self.from.as_ref().filter(|_| !self.in_place).map(|saved| saved.dir.as_path())
    }

    /// Returns a note about where the run starts.
    pub(crate) fn describe(&self, run: &RunConfig, num_updates: usize) -> Option<String> {
        match (&self.from, &run.checkpoints.resume_from_checkpoint) {
            (Some(saved), _) => {
                Some(format!("resumes from {}, after update {} of {num_updates}", saved.dir.display(), self.done()))
            }
            (None, Some(_)) if !self.in_place && self.warnings.is_empty() => {
                Some(format!("no checkpoint in {}: starts with the first update", run.output_dir.display()))
            }
            (None, _) => None,
        }
    }

    /// Returns a warning if the run was finished before: nothing is left to do, or it is extended.
    pub(crate) fn finished(&self, num_updates: usize) -> Option<String> {
        let saved =
            self.from.as_ref().filter(|saved| saved.state.is_finished() || saved.state.update == num_updates)?;
        let dir = saved.dir.display();
        let done = saved.state.update;
        Some(if done == num_updates {
            format!("{dir}: the run is finished, all {num_updates} updates are done")
        } else {
            format!(
                "{dir}: the run was finished after {done} updates and is extended to {num_updates}; learning rates and other \
             schedules are those of a run of {num_updates} updates from here on"
            )
        })
    }
}

/// Returns the settings `config` as they are read back from a `config.yaml`, where a number may have another type.
///
/// # Errors
/// If they cannot be written as YAML.
fn as_resolved(config: &impl Serialize) -> Result<Map<String, Value>> {
    let error = |reason: String| Error::Run(format!("the settings cannot be written as YAML: {reason}"));
    let text = serde_saphyr::to_string(config).map_err(|e| error(e.to_string()))?;
    serde_saphyr::from_str(&text).map_err(|e| error(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::checkpoint::tests::{resumed_update, run, save};
    use crate::run::resolved::{CONFIG, METRICS, write_resolved};
    use serde_json::json;

    #[test]
    fn a_checkpoint_of_transformers_is_said_to_be_one() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("trainer_state.json"), r#"{"global_step": 5, "log_history": [], "max_steps": 9}"#)
            .unwrap();
        let error = Saved::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains(": a checkpoint of transformers, whose optimizer rlhf does not read"), "{error}");
    }

    #[test]
    fn without_a_complete_checkpoint_no_run_starts_again_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), None, &[2]);
        fs::remove_file(dir.path().join("checkpoint-2/model")).unwrap();
        let error = resumed_update(dir.path()).unwrap_err().to_string();
        assert!(error.contains("no whole checkpoint") && error.contains("the file model"), "{error}");
    }

    #[test]
    fn a_run_without_a_checkpoint_starts_again_with_the_same_settings_only_and_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let then = json!({"learning_rate": 1e-5, "gamma": 1.0, "seed": 1, "save_steps": 5, "output_dir": dir.path()});
        write_resolved(&then, dir.path().join(CONFIG)).unwrap();
        let run = run(dir.path(), None, Some(Resume::Latest));
        let start = Start::find(&run).unwrap();
        assert!(start.replaces && start.from.is_none());
        assert_eq!(start.warnings, [format!("{}: the run has no checkpoint: it starts again", dir.path().display())]);
        // Without an update the settings may differ.
        fs::write(dir.path().join(METRICS), "{\"step\":0.0}\n").unwrap();
        assert!(start.again.is_none() && Start::find(&run).unwrap().again.is_none());
        fs::write(dir.path().join(METRICS), "{\"step\":0.0}\n{\"step\":1}\n").unwrap();
        let start = Start::find(&run).unwrap();
        let check = |config: Value| start.check("ppo", &config).map_err(|error| error.to_string());
        assert_eq!(check(then.clone()), Ok(Vec::new()));
        let mut now = then;
        (now["save_steps"], now["seed"]) = (json!(7), json!(2));
        let error = check(now).unwrap_err();
        assert!(error.starts_with("seed = 2: expected 1, as in "), "{error}");
        // A folder without a run is said to have none on a terminal alone.
        fs::remove_file(dir.path().join(CONFIG)).unwrap();
        let start = Start::find(&run).unwrap();
        assert!(start.replaces && start.again.is_none() && start.warnings.is_empty());
        let note = format!("no checkpoint in {}: starts with the first update", dir.path().display());
        assert_eq!(start.describe(&run, 4), Some(note));
    }

    #[test]
    fn a_run_that_may_be_replaced_may_have_other_settings() {
        let dir = tempfile::tempdir().unwrap();
        write_resolved(&json!({"seed": 1}), dir.path().join(CONFIG)).unwrap();
        fs::write(dir.path().join(METRICS), "{\"step\":1}\n").unwrap();
        let mut run = run(dir.path(), None, Some(Resume::Latest));
        assert!(Start::find(&run).unwrap().check("sft", &json!({"seed": 2})).is_err());
        run.overwrite_output_dir = true;
        assert!(Start::find(&run).unwrap().check("sft", &json!({"seed": 2})).is_ok());
    }

    #[test]
    fn an_older_checkpoint_is_refused_where_a_newer_one_would_be_lost() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        save(dir.path(), None, &[2, 4, 6]);
        let from = || Some(Resume::From(dir.path().join("checkpoint-2")));
        let error = Start::find(&run(dir.path(), None, from())).unwrap_err().to_string();
        assert!(error.contains("checkpoint-6 is newer"), "{error}");
        let start = Start::find(&run(&other.path().join("new"), None, from())).unwrap();
        assert!(start.done() == 2 && !start.in_place && start.input().is_some());
    }
}
