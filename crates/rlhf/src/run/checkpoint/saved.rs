//! Runs as read from their files: a checkpoint to resume from, a finished run, and the record of one update.

use super::changes::{Change, EarlierSettings, Length, RunSettings, settings};
use super::folders::{PREFIX, sizes};
use super::state::{PartStates, State};
use super::{BEST, STATE, UNFINISHED};
use crate::data::CursorState;
use crate::run::environment::Environment;
use crate::run::inputs::Inputs;
use crate::run::settings::CheckpointConfig;
use rlhf_base::weights::{pretty, write_text};
use rlhf_base::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A complete checkpoint, from which a run can resume.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Saved {
    /// Its folder.
    pub(crate) dir: PathBuf,
    /// Its `trainer_state.json`.
    pub(crate) state: State,
}

impl Saved {
    /// Reads the state in the folder `dir`, and checks that every file is there with its size.
    ///
    /// # Errors
    /// If it is no checkpoint, or incomplete.
    pub(crate) fn read(dir: &Path) -> Result<Self> {
        Ok(Self { dir: dir.to_path_buf(), state: State::read_complete(dir)? })
    }

    /// Checks that the resumed run keeps its settings; returns warnings about harmless differences. A finished run may be
    /// longer than it was.
    ///
    /// # Errors
    /// If it is another command's, or a setting that changes the result differs: the error names it with both values.
    pub(crate) fn check(&self, command: &str, config: &impl RunSettings) -> Result<Vec<String>> {
        let length = if self.state.is_finished() { Length::MayChange } else { Length::KeptUntilFinished };
        self.settings().check(command, config, length)
    }

    /// The settings of the run. Paths of inputs with digests may differ, because [`Saved::check_inputs`] compares the contents.
    fn settings(&self) -> EarlierSettings<'_> {
        EarlierSettings { inputs: self.part("inputs").ok(), ..self.state.settings(&self.dir) }
    }

    /// Checks that the run reads the same inputs as before, and has as many updates, of `rows` rows of data each; a finished run
    /// may have more. Returns warnings.
    ///
    /// # Errors
    /// If it does not; with `resume_with_changed_inputs` only if it would have fewer updates than are done.
    pub(crate) fn check_inputs(
        &self,
        settings: &CheckpointConfig,
        inputs: &Inputs,
        num_updates: usize,
        rows: usize,
    ) -> Result<Vec<String>> {
        let (done, expected) = (self.state.update, self.state.num_updates);
        let taken = self.parsed::<CursorState>("cursor").ok().map(|cursor| cursor.taken);
        let most = done.saturating_mul(rows);
        if let Some(taken) = taken.filter(|&taken| taken > most) {
            let message = format!("rows taken: expected at most {most} after {done} updates, found {taken}");
            return Err(Error::invalid(self.dir.join(STATE), message));
        }
        let may_change = settings.resume_with_changed_inputs;
        let warnings = changed_inputs(&self.dir, &self.state, inputs, may_change)?;
        let extends = self.state.is_finished() && num_updates > expected;
        if num_updates == expected || extends || (may_change && num_updates >= done) {
            return Ok(warnings);
        }
        let message = if self.state.is_finished() {
            format!("expected a run of at least the {expected} updates that are done, found {num_updates}")
        } else {
            format!("expected a run of {expected} updates, found {num_updates}: the data has changed")
        };
        Err(Error::invalid(&self.dir, message))
    }

    /// Returns warnings if the number of libtorch's threads, or environment variables on which results depend, have changed.
    pub(crate) fn machine_warnings(&self) -> Vec<String> {
        let (then, now) = (self.state.threads, tch::get_num_threads());
        let dir = self.dir.display();
        let threads = (then != now)
            .then(|| format!("{now} threads: it was {then} before {dir}, so that results may differ by rounding"));
        let variables = Environment::of_process().warnings(&self.state.environment, &dir.to_string());
        threads.into_iter().chain(variables).collect()
    }

    /// The state of the parts of the run.
    pub(crate) fn parts(&self) -> PartStates<'_> {
        PartStates::in_file(self.dir.join(STATE), &self.state.state)
    }

    /// Returns the state of the part `name`.
    ///
    /// # Errors
    /// If it has none.
    pub(crate) fn part(&self, name: &str) -> Result<&Value> {
        self.parts().part(name)
    }

    /// Returns the state of the part `name` as a value.
    ///
    /// # Errors
    /// If it has none, or one of another type.
    pub(crate) fn parsed<T: for<'d> Deserialize<'d>>(&self, name: &str) -> Result<T> {
        self.parts().parsed(name)
    }
}

/// A finished run, as a stage of a pipeline that is continued. Its state is next to its model.
#[derive(Debug)]
pub(crate) struct FinishedRun {
    /// Its folder.
    dir: PathBuf,
    state: State,
}

impl FinishedRun {
    /// Returns the run of `command` in the folder `dir`, finished after `updates` updates: with its settings, digests of its inputs, and
    /// the sizes of its models' files.
    ///
    /// # Errors
    /// If a file cannot be read, or the settings cannot be written.
    pub(crate) fn new(
        dir: &Path,
        command: &str,
        updates: usize,
        config: &impl Serialize,
        inputs: &Inputs,
    ) -> Result<Self> {
        let mut files = BTreeMap::new();
        sizes(dir, "", &mut files)?;
        // The user may remove the files that belong to no model.
        let inner =
            |name: &str| name.starts_with(PREFIX) || name.starts_with(BEST) || [STATE, UNFINISHED].contains(&name);
        files.retain(|name, _| !inner(name) && (name.ends_with(".safetensors") || name.ends_with(".json")));
        let mut state = State { files, ..State::new(command, updates, updates, settings(config)?) };
        state.state.insert("inputs".into(), inputs.state());
        Ok(Self { dir: dir.to_path_buf(), state })
    }

    /// Records in the run's folder that it is finished.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn record(&self) -> Result<()> {
        write_text(&self.dir.join(STATE), &pretty(&json!(self.state)))
    }

    /// Reads the record that [`FinishedRun::record`] wrote to the folder `dir`, if there is one.
    ///
    /// # Errors
    /// As [`Saved::read`].
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>> {
        let recorded = dir.join(STATE).is_file();
        recorded.then(|| Ok(Self { dir: dir.to_path_buf(), state: State::read_complete(dir)? })).transpose()
    }

    /// Checks that the run may be skipped because a run with the settings `config` would give the same result, also with the same length.
    /// Returns warnings about harmless differences.
    ///
    /// # Errors
    /// As [`Saved::check`].
    pub(crate) fn check(&self, command: &str, config: &impl RunSettings) -> Result<Vec<String>> {
        let inputs = self.state.state.get("inputs");
        let settings = EarlierSettings { inputs, ..self.state.settings(&self.dir) };
        settings.check(command, config, Length::Kept)
    }

    /// Checks that the run has read the `inputs` as they are now. Returns warnings.
    ///
    /// # Errors
    /// If it has not; never with `resume_with_changed_inputs`.
    pub(crate) fn check_inputs(&self, settings: &CheckpointConfig, inputs: &Inputs) -> Result<Vec<String>> {
        changed_inputs(&self.dir, &self.state, inputs, settings.resume_with_changed_inputs)
    }
}

/// The record of an update in its rollout file: the settings and the state that a replay needs besides the responses and the checkpoint
/// before the update.
#[derive(Debug)]
pub(crate) struct UpdateRecord {
    /// The rollout file.
    pub(crate) path: PathBuf,
    pub(crate) state: State,
}

impl UpdateRecord {
    /// Returns the record of an update, as [`State::record`] returned it, from the file `path`.
    ///
    /// # Errors
    /// If it is no state of a run.
    pub(crate) fn read(path: &Path, record: Value) -> Result<Self> {
        Ok(Self { path: path.to_path_buf(), state: State::of(path, record)? })
    }

    /// Returns the settings of `config` that differ from those of the run.
    ///
    /// # Errors
    /// If the settings cannot be written.
    pub(crate) fn changes(&self, config: &impl Serialize) -> Result<Vec<Change>> {
        self.state.settings(&self.path).changes(config)
    }

    /// The state of the parts of the run.
    pub(crate) fn parts(&self) -> PartStates<'_> {
        PartStates::in_file(self.path.clone(), &self.state.state)
    }
}

/// Returns a warning about `inputs` whose digests differ from those in `state`, the state of the run in the folder `dir`, and about a
/// changed precision of products.
///
/// # Errors
/// If there are such inputs, unless they `may_change`.
fn changed_inputs(dir: &Path, state: &State, inputs: &Inputs, may_change: bool) -> Result<Vec<String>> {
    let mut changed = state.state.get("inputs").map_or(Vec::new(), |began| inputs.changed(began));
    let precision = Environment::of_process().changed_precision(&state.environment);
    changed.extend(precision.into_iter().map(|variable| format!("environment: {variable}")));
    if changed.is_empty() {
        return Ok(Vec::new());
    }
    let changed = format!("inputs have changed since: {}", changed.join("; "));
    if !may_change {
        let hint = "a resumed run keeps what it reads; --resume_with_changed_inputs resumes with what is there now";
        return Err(Error::invalid(dir, format!("{changed}; {hint}")));
    }
    Ok(vec![format!("{}: {changed}: the run resumes with what is there now", dir.display())])
}

#[cfg(test)]
mod tests {
    use super::super::changes::Compared;
    use super::*;
    use crate::run::checkpoint::Checkpoints;
    use crate::run::checkpoint::tests::{run, save};
    use crate::run::start::Start;
    use rlhf_base::weights::read_json;
    use serde_json::Map;

    #[test]
    fn settings_that_change_the_result_must_stay_and_others_may_change() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), None, &[2]);
        let saved = Saved::read(&dir.path().join("checkpoint-2")).unwrap();
        let error = saved.check("sft", &json!({"seed": 2, "device": "cpu"})).unwrap_err().to_string();
        assert!(error.starts_with("seed = 2: expected 1, as in ") && error.contains("checkpoint-2"), "{error}");
        let warnings = saved.check("sft", &json!({"seed": 1, "device": "auto", "save_steps": 7})).unwrap();
        assert!(warnings.iter().any(|warning| warning.starts_with("device = auto: it was cpu")), "{warnings:?}");
        assert!(!warnings.iter().any(|warning| warning.contains("save_steps")), "{warnings:?}");
        let error = saved.check("ppo", &json!({})).unwrap_err().to_string();
        assert!(error.contains("expected a checkpoint of `rlhf ppo`, found one of `rlhf sft`"), "{error}");
    }

    #[test]
    fn a_run_resumes_with_another_number_of_ranks_if_its_batches_stay_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let run = run(dir.path(), None, None);
        let config =
            json!({"train_batch_size": null, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2});
        let mut checkpoints = Checkpoints::new("sft", &run, &config, 9).unwrap();
        checkpoints.save(2, Map::new(), Map::new(), |_| Ok(())).unwrap();
        let mut saved = Saved::read(&checkpoints.place(2)).unwrap();
        let check = |saved: &Saved, ranks, all: Option<usize>, rows: Option<usize>, accumulated| {
            let config = json!({
                "train_batch_size": all, "per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated,
            });
            let settings = saved.state.settings(&saved.dir);
            let compared = Compared::new(&config).unwrap();
            settings.check_with_ranks("sft", &compared, ranks, Length::Kept).map_err(|error| error.to_string())
        };
        // 16 rows on 1 rank.
        assert_eq!(check(&saved, 1, None, Some(8), 2).unwrap(), [""; 0]);
        assert_eq!(check(&saved, 1, None, None, 2).unwrap(), [""; 0]);
        let rounding = |warnings: &[String], start: &str| warnings.len() == 1 && warnings[0].starts_with(start);
        assert!(rounding(
            &check(&saved, 1, Some(16), None, 1).unwrap(),
            "any number of rows per pass: it was 8 before"
        ));
        assert!(rounding(&check(&saved, 4, Some(16), None, 1).unwrap(), "4 ranks: it was 1 rank before"));
        assert!(rounding(&check(&saved, 2, None, Some(8), 1).unwrap(), "2 ranks: it was 1 rank before"));
        let error = check(&saved, 1, None, Some(4), 2).unwrap_err();
        assert!(error.starts_with("per_device_train_batch_size = 4: expected 8, as in "), "{error}");
        let error = check(&saved, 4, None, Some(8), 2).unwrap_err();
        let place = saved.dir.display();
        assert_eq!(
            error,
            format!(
                "64 rows per optimizer step with 4 ranks: expected 16 rows per optimizer step with 1 rank, as in {place}: set \
                 train_batch_size = 16, without gradient_accumulation_steps"
            )
        );
        let error = check(&saved, 1, Some(32), Some(8), 2).unwrap_err();
        assert!(error.starts_with("32 rows per optimizer step with 1 rank: expected 16 rows"), "{error}");
        // A checkpoint of 4 ranks.
        saved.state.ranks = 4;
        assert!(
            check(&saved, 1, None, Some(8), 2)
                .unwrap_err()
                .contains("expected 64 rows per optimizer step with 4 ranks")
        );
        assert!(rounding(&check(&saved, 1, Some(64), Some(8), 1).unwrap(), "1 rank: it was 4 ranks before"));
    }

    #[test]
    fn a_state_with_more_updates_or_rows_than_the_run_has_is_refused_by_name_and_takes_no_memory() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), None, &[2]);
        let place = dir.path().join("checkpoint-2");
        let mut state = read_json(&place.join(STATE)).unwrap();
        state["update"] = 2_147_483_647.into();
        write_text(&place.join(STATE), &pretty(&state)).unwrap();
        let error = Saved::read(&place).unwrap_err().to_string();
        assert!(error.contains(STATE) && error.contains("`update`: expected at most 20"), "{error}");
        (state["update"], state["state"]) = (2.into(), json!({"cursor": {"taken": 1u64 << 40, "rows": [3, 4]}}));
        write_text(&place.join(STATE), &pretty(&state)).unwrap();
        let settings = run(dir.path(), None, None).checkpoints;
        let saved = Saved::read(&place).unwrap();
        let error = saved.check_inputs(&settings, &Inputs::default(), 20, 4).unwrap_err().to_string();
        assert!(error.contains(STATE) && error.contains("rows taken: expected at most 8"), "{error}");
    }

    #[test]
    fn a_finished_run_may_be_longer_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let run = run(dir.path(), None, None);
        let mut checkpoints = Checkpoints::new("sft", &run, &json!({"max_steps": 4}), 4).unwrap();
        for done in [2, 4] {
            checkpoints.save(done, Map::new(), Map::new(), |_| Ok(())).unwrap();
        }
        let saved = |done: usize| Saved::read(&checkpoints.place(done)).unwrap();
        let longer = json!({"max_steps": 6});
        assert!(saved(4).check("sft", &longer).unwrap().is_empty());
        let error = saved(2).check("sft", &longer).unwrap_err().to_string();
        assert!(error.contains("max_steps = 6: expected 4") && error.contains("only a finished run"), "{error}");
        let finished = FinishedRun { dir: dir.path().into(), state: saved(4).state };
        assert!(finished.check("sft", &longer).is_err() && finished.check("sft", &json!({"max_steps": 4})).is_ok());
        let updates = |done, updates| {
            saved(done).check_inputs(&run.checkpoints, &Inputs::default(), updates, 1).map_err(|e| e.to_string())
        };
        assert!(updates(4, 6).is_ok() && updates(4, 4).is_ok() && updates(2, 6).is_err());
        let error = updates(4, 3).unwrap_err();
        assert!(error.contains("expected a run of at least the 4 updates that are done, found 3"), "{error}");
        let start = Start { from: Some(saved(4)), in_place: true, ..Start::default() };
        assert!(start.extends(&longer).unwrap() && !start.extends(&json!({"max_steps": 4})).unwrap());
        assert!(start.finished(6).unwrap().contains("was finished after 4 updates and is extended to 6"));
        assert!(start.finished(4).unwrap().contains("the run is finished, all 4"));
    }
}
