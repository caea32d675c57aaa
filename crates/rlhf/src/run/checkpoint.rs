//! Checkpoints: everything that a run needs to resume as if it had never stopped, in a folder that appears by one rename.
//!
//! `output_dir/checkpoint-N` is the run after N updates: its models as Hugging Face folders, the optimizers' states beside
//! them, and `trainer_state.json`, which is written last and lists every other file with its size. The folder is written
//! under another name and flushed to the disk before it gets its own, so that a folder with that name is complete. The next run
//! removes what a killed run leaves under other names.

use crate::dist::num_ranks;
use crate::run::inputs::Inputs;
use crate::run::settings::{CheckpointConfig, RunConfig};
use crate::run::sizes::{GlobalSizes, SIZES, ranks_of};
use crate::weights::{pretty, read_json, sync, write_text};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Prefix of a checkpoint's folder; the number of updates follows.
const PREFIX: &str = "checkpoint-";
/// Prefix of a folder's name while it is written.
const WRITING: &str = ".saving-";
/// Prefix of a folder's name while it is removed.
const LEAVING: &str = ".removing-";
/// The folder of the best model.
pub(crate) const BEST: &str = "best";
/// The file with the metric of the best model.
pub(super) const BEST_FILE: &str = "best.json";
/// The state of everything but weights and optimizers.
pub(crate) const STATE: &str = "trainer_state.json";
/// The file beside the model of a run that ended early, with its settings.
pub(crate) const UNFINISHED: &str = "unfinished.json";
/// An optimizer's state, beside the model that it belongs to.
pub(crate) const OPTIMIZER: &str = "optimizer.safetensors";

/// Files in a checkpoint that belong to no model.
pub(crate) const FILES: [&str; 4] = [STATE, UNFINISHED, OPTIMIZER, BEST_FILE];

/// Settings that change no result: a resumed run may change them.
pub(crate) const FREE: [&str; 43] = [
    "output_dir",
    "save_steps",
    "save_total_limit",
    "max_shard_size",
    "report_to",
    "tensorboard_tags",
    "run_name",
    "project",
    "tracker_kwargs",
    "log_model",
    "num_threads", // the resulting number is compared
    "disable_tqdm",
    "no_report",
    "num_sample_generations",
    "eval_steps",
    "num_eval_prompts", // but a best model that was found by other prompts is forgotten
    "print_answers",
    "print_answers_interval",
    "enable_test_mode",
    "test_stop_step",
    "reward_batch_size",
    "reward_concurrency",
    "reward_timeout",
    "reward_retries",
    "no_checks",
    "max_skipped_updates",
    "on_alarm", // a rollback changes the result, but only of the updates after it
    "max_rollbacks",
    "log_rollouts",
    "rollouts_limit",
    "zero_stage",
    "actor_zero_stage",
    "critic_zero_stage",
    "ds3_gather_for_generation",
    "offload",
    "offload_dir",
    "dist_timeout",
    "push_to_hub",
    "hub_model_id",
    "hub_revision",
    "hub_private_repo",
    "hub_strategy",
    "hub_always_push",
];

/// Settings of the length of a run: they may extend a finished run.
pub(crate) const LENGTH: [&str; 3] = ["total_episodes", "num_train_epochs", "max_steps"];

/// Settings on which only the best model depends; the one so far is forgotten where they change.
pub(crate) const OF_BEST: [&str; 2] = ["metric_for_best_model", "greater_is_better"];

/// Settings on which results depend by rounding at most: a resumed run may change them, with a warning.
const ROUNDING: [&str; 5] = [
    "device",
    "gradient_checkpointing",
    "max_tokens_per_micro_batch",
    "local_rollout_forward_batch_size",
    "per_device_eval_batch_size",
];

/// The content of `trainer_state.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct State {
    /// The version of rlhf that wrote it.
    version: String,
    /// The command of the run.
    command: String,
    /// Updates done.
    pub(crate) update: usize,
    /// Updates of the whole run.
    pub(crate) num_updates: usize,
    /// Threads that libtorch computed with: sums depend on them.
    pub(crate) threads: i32,
    /// Number of ranks.
    #[serde(default = "one_rank")]
    pub(crate) ranks: usize,
    /// Metrics of the last update that the model card shows.
    pub(crate) metrics: Map<String, Value>,
    /// Resumable state of each part of the run beside weights and optimizers, by the part's name.
    pub(crate) state: Map<String, Value>,
    /// Every setting.
    pub(crate) config: Map<String, Value>,
    /// The working directory of relative paths among them.
    #[serde(default)]
    pub(crate) working_dir: Option<PathBuf>,
    /// Every other file with its size in bytes.
    files: BTreeMap<String, u64>,
}

impl State {
    /// Returns the state of the run of `command` after `update` of `num_updates` updates, without that of its parts.
    fn new(command: &str, update: usize, num_updates: usize, config: Map<String, Value>) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            command: command.into(),
            update,
            num_updates,
            threads: tch::get_num_threads(),
            ranks: num_ranks(),
            metrics: Map::new(),
            state: Map::new(),
            config,
            working_dir: std::env::current_dir().ok(),
            files: BTreeMap::new(),
        }
    }

    /// Returns the state of the run of `command` before the update that follows `update` of `num_updates`, for the record of that update;
    /// `parts` are the resumable parts in it.
    ///
    /// # Errors
    /// If the settings cannot be written.
    pub(crate) fn record(
        command: &str,
        update: usize,
        num_updates: usize,
        config: &impl Serialize,
        parts: Map<String, Value>,
    ) -> Result<Value> {
        Ok(json!(Self { state: parts, ..Self::new(command, update, num_updates, settings(config)?) }))
    }

    /// The command of the run.
    pub(crate) fn command(&self) -> &str {
        &self.command
    }

    /// Reads the state from a file.
    ///
    /// # Errors
    /// If it is no state of a run, or counts more updates than the run has.
    pub(super) fn read(path: &Path) -> Result<Self> {
        Self::of(path, read_json(path)?)
    }

    /// Returns the state of a run that the file `path` holds as JSON.
    ///
    /// # Errors
    /// As [`State::read`].
    fn of(path: &Path, json: Value) -> Result<Self> {
        let state: Self = serde_json::from_value(json)
            .map_err(|e| Error::invalid(path, format!("expected the state of a run: {e}")))?;
        let (found, most) = (state.update, state.num_updates);
        if found > most {
            let message = format!("`update`: expected at most {most}, the run's updates, found {found}");
            return Err(Error::invalid(path, message));
        }
        Ok(state)
    }
}

/// Returns the number of ranks of a run whose checkpoint has none.
fn one_rank() -> usize {
    1
}

/// A complete checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Saved {
    /// Its folder.
    pub(crate) dir: PathBuf,
    /// Its `trainer_state.json`.
    pub(crate) state: State,
}

/// A setting that differs between two runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Change {
    pub(crate) name: String,
    pub(crate) then: Value,
    pub(crate) now: Value,
}

impl Change {
    /// Returns the value of either run as error messages show it.
    pub(crate) fn shown(&self) -> [String; 2] {
        [shown(&self.then), shown(&self.now)]
    }
}

impl Saved {
    /// Returns the record of an update, as [`State::record`] returned it, from the file `path`.
    ///
    /// # Errors
    /// If it is no state of a run.
    pub(crate) fn of_record(path: &Path, record: Value) -> Result<Self> {
        Ok(Self { dir: path.to_path_buf(), state: State::of(path, record)? })
    }

    /// Returns a state of these resumable parts that is in no file.
    pub(crate) fn of_parts(parts: Map<String, Value>) -> Self {
        Self { dir: PathBuf::new(), state: State { state: parts, ..State::new("", 0, 0, Map::new()) } }
    }

    /// Returns the run in the folder `dir`, of which only the settings `config` are known.
    pub(super) fn of_settings(dir: &Path, command: &str, config: Map<String, Value>) -> Self {
        Self { dir: dir.to_path_buf(), state: State { working_dir: None, ..State::new(command, 0, 0, config) } }
    }

    /// Returns the settings of `config` that differ from those of the run. A setting that only one version has cannot be compared.
    ///
    /// # Errors
    /// If the settings cannot be written.
    pub(crate) fn changes(&self, config: &impl Serialize) -> Result<Vec<Change>> {
        let from = self.state.working_dir.as_deref();
        let change = |(name, now): (String, Value)| {
            let then = self.state.config.get(&name).filter(|then| !is_same(then, &now, from))?.clone();
            Some(Change { name, then, now })
        };
        Ok(settings(config)?.into_iter().filter_map(change).collect())
    }

    /// Reads the state in the folder `dir`, and checks that every file is there with its size.
    ///
    /// # Errors
    /// If it is no checkpoint, or incomplete.
    pub(crate) fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(STATE);
        if !path.is_file() {
            let found = if dir.is_dir() { format!("no {STATE} in this folder") } else { "no such folder".into() };
            return Err(Error::invalid(dir, format!("expected a checkpoint of a run, found {found}")));
        }
        let state = State::read(&path)?;
        for (name, &expected) in &state.files {
            let path = dir.join(name);
            match fs::metadata(&path).map(|file| file.len()) {
                Ok(found) if found == expected => {}
                Ok(found) => {
                    let message = format!("expected {expected} bytes, found {found}: the checkpoint is damaged");
                    return Err(Error::invalid(path, message));
                }
                Err(_) => {
                    let message = format!("expected the file {name}, found none: the checkpoint is not whole");
                    return Err(Error::invalid(dir, message));
                }
            }
        }
        Ok(Self { dir: dir.to_path_buf(), state })
    }

    /// Reads what [`Finished::record`] wrote to the folder `dir`, if it did.
    ///
    /// # Errors
    /// As [`Saved::read`].
    pub(crate) fn finished(dir: &Path) -> Result<Option<Self>> {
        if dir.join(STATE).is_file() { Self::read(dir).map(Some) } else { Ok(None) }
    }

    /// Returns whether all updates of the run are done.
    pub(super) fn is_finished(&self) -> bool {
        self.state.update == self.state.num_updates
    }

    /// Checks that the resumed run keeps its settings; returns warnings about harmless differences. A finished run may be
    /// longer than it was.
    ///
    /// # Errors
    /// If it is another command's, or a setting that changes the result differs: the error names it with both values.
    pub(crate) fn check(&self, command: &str, config: &impl Serialize) -> Result<Vec<String>> {
        self.check_settings(command, &settings(config)?, num_ranks(), self.is_finished())
    }

    /// Checks the settings of a run that is skipped if it is finished, as [`Saved::check`] does: it may not be longer.
    ///
    /// # Errors
    /// As [`Saved::check`].
    pub(crate) fn check_as_it_is(&self, command: &str, config: &impl Serialize) -> Result<Vec<String>> {
        self.check_settings(command, &settings(config)?, num_ranks(), false)
    }

    /// Checks the settings `config` of a run of `ranks` ranks.
    fn check_settings(
        &self,
        command: &str,
        config: &Map<String, Value>,
        ranks: usize,
        may_extend: bool,
    ) -> Result<Vec<String>> {
        let (dir, state) = (self.dir.display(), &self.state);
        if state.command != command {
            let message = format!("expected a checkpoint of `rlhf {command}`, found one of `rlhf {}`", state.command);
            return Err(Error::invalid(&self.dir, message));
        }
        let same_sizes = self.check_sizes(config, ranks)?;
        let mut warnings = Vec::new();
        let mut refused = Vec::new();
        for (name, now) in config {
            // A setting that only one version has cannot be compared.
            let from = state.working_dir.as_deref();
            let Some(then) = state.config.get(name).filter(|then| !is_same(then, now, from)) else { continue };
            let (then, now) = (shown(then), shown(now));
            match name.as_str() {
                name if FREE.contains(&name) || OF_BEST.contains(&name) => {}
                name if same_sizes && SIZES.contains(&name) => {}
                name if may_extend && LENGTH.contains(&name) => {}
                name if ROUNDING.contains(&name) => warnings.push(format!(
                    "{name} = {now}: it was {then} before {dir}, so that results may differ by rounding"
                )),
                name => refused.push((name.to_string(), then, now)),
            }
        }
        if let [(name, then, now), more @ ..] = refused.as_slice() {
            let more: Vec<&str> = more.iter().map(|(name, ..)| name.as_str()).collect();
            let mut more = if more.is_empty() { String::new() } else { format!("; so does {}", more.join(", ")) };
            if LENGTH.contains(&name.as_str()) && !self.is_finished() {
                more.push_str("; only a finished run can be extended");
            }
            return Err(Error::Usage(format!(
                "{name} = {now}: expected {then}, as in {dir}: a resumed run keeps what decides its result{more}"
            )));
        }
        warnings.extend(self.passes_warning(config, ranks));
        let version = env!("CARGO_PKG_VERSION");
        if state.version != version {
            warnings.push(format!("{dir} was written by rlhf {}, and this is {version}", state.version));
        }
        Ok(warnings)
    }

    /// Returns whether the batch sizes over all ranks are those of the checkpoint.
    ///
    /// # Errors
    /// If they are not, and the settings that size a batch are not the same ones, or not for as many ranks.
    fn check_sizes(&self, config: &Map<String, Value>, ranks: usize) -> Result<bool> {
        let state = &self.state;
        let sizes = (GlobalSizes::of(&state.config, state.ranks), GlobalSizes::of(config, ranks));
        let (Some(then), Some(now)) = sizes else { return Ok(false) };
        let has_own = |config: &Map<String, Value>| config.get("train_batch_size").is_some_and(Value::is_u64);
        // Settings of the same kind are compared by name.
        if then == now || (state.ranks == ranks && has_own(&state.config) == has_own(config)) {
            return Ok(then == now);
        }
        let dir = self.dir.display();
        let (expected, found) = (then.describe(state.ranks), now.describe(ranks));
        let fix = then.fix();
        Err(Error::Usage(format!("{found}: expected {expected}, as in {dir}: {fix}")))
    }

    /// Returns a warning if the rows of a pass, or the ranks, are others than before.
    fn passes_warning(&self, config: &Map<String, Value>, ranks: usize) -> Option<String> {
        let (dir, state) = (self.dir.display(), &self.state);
        if state.ranks != ranks {
            let (then, now) = (ranks_of(state.ranks), ranks_of(ranks));
            return Some(format!("{now}: it was {then} before {dir}, so that results may differ by rounding"));
        }
        let rows = |config| GlobalSizes::rows_per_pass(config).map_or("any number of".into(), |rows| rows.to_string());
        let (then, now) = (rows(&state.config), rows(config));
        GlobalSizes::of(&state.config, 1)
            .filter(|_| then != now)
            .map(|_| format!("{now} rows per pass: it was {then} before {dir}, so that results may differ by rounding"))
    }

    /// Returns a warning if libtorch now computes with another number of threads.
    pub(crate) fn threads_warning(&self) -> Option<String> {
        let (then, now) = (self.state.threads, tch::get_num_threads());
        let dir = self.dir.display();
        (then != now)
            .then(|| format!("{now} threads: it was {then} before {dir}, so that results may differ by rounding"))
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
        let taken = self.part("cursor").ok().and_then(|cursor| cursor["taken"].as_u64());
        let most = done.saturating_mul(rows);
        if let Some(taken) = taken.filter(|&taken| taken > most as u64) {
            let message = format!("rows taken: expected at most {most} after {done} updates, found {taken}");
            return Err(Error::invalid(self.dir.join(STATE), message));
        }
        let changed = self.part("inputs").map_or(Vec::new(), |began| inputs.changed(began));
        let mut warnings = Vec::new();
        let may_change = settings.resume_with_changed_inputs;
        if !changed.is_empty() {
            let changed = format!("inputs have changed since: {}", changed.join("; "));
            if !may_change {
                let hint =
                    "a resumed run keeps what it reads; --resume_with_changed_inputs resumes with what is there now";
                return Err(Error::invalid(&self.dir, format!("{changed}; {hint}")));
            }
            warnings.push(format!("{}: {changed}: the run resumes with what is there now", self.dir.display()));
        }
        let extends = self.is_finished() && num_updates > expected;
        if num_updates == expected || extends || (may_change && num_updates >= done) {
            return Ok(warnings);
        }
        let message = match self.is_finished() {
            true => format!("expected a run of at least the {expected} updates that are done, found {num_updates}"),
            false => format!("expected a run of {expected} updates, found {num_updates}: the data has changed"),
        };
        Err(Error::invalid(&self.dir, message))
    }

    /// Returns the value of the setting `name`, null if there is none.
    pub(crate) fn setting(&self, name: &str) -> &Value {
        self.state.config.get(name).unwrap_or(&Value::Null)
    }

    /// Returns the state of the part `name`.
    ///
    /// # Errors
    /// If it has none.
    pub(crate) fn part(&self, name: &str) -> Result<&Value> {
        self.state
            .state
            .get(name)
            .ok_or_else(|| Error::invalid(self.dir.join(STATE), format!("expected the state of `{name}`, found none")))
    }

    /// Returns the state of the part `name` as a value.
    ///
    /// # Errors
    /// If it has none, or one of another type.
    pub(crate) fn parsed<T: for<'a> Deserialize<'a>>(&self, name: &str) -> Result<T> {
        serde_json::from_value(self.part(name)?.clone())
            .map_err(|e| Error::invalid(self.dir.join(STATE), format!("state of `{name}`: {e}")))
    }
}

/// Returns the settings of a run by name.
pub(super) fn settings(config: &impl Serialize) -> Result<Map<String, Value>> {
    match serde_json::to_value(config) {
        Ok(Value::Object(settings)) => Ok(settings),
        Ok(_) => Ok(Map::new()),
        Err(e) => Err(Error::Usage(format!("the settings cannot be written to a checkpoint: {e}"))),
    }
}

/// Returns whether two values of a setting are the same; a path may be written in another way, and relative to another folder
/// than `from`.
fn is_same(then: &Value, now: &Value, from: Option<&Path>) -> bool {
    if let (Value::Array(then), Value::Array(now)) = (then, now) {
        return then.len() == now.len() && then.iter().zip(now).all(|(then, now)| is_same(then, now, from));
    }
    let place = |value: &Value, from: &Path| fs::canonicalize(from.join(value.as_str()?)).ok();
    then == now
        || place(then, from.unwrap_or(Path::new(""))).is_some_and(|then| place(now, Path::new("")) == Some(then))
}

/// Returns a setting as error messages show it.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A finished run, one stage of a pipeline that continues.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Its command.
    pub(crate) command: &'static str,
    /// Its updates.
    pub(crate) updates: usize,
}

impl Finished {
    /// Records in the run's folder `dir` that it is finished, with its settings, digests of its inputs, and the sizes of its
    /// models' files.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub(crate) fn record(&self, dir: &Path, config: &impl Serialize, inputs: &Inputs) -> Result<()> {
        let mut files = BTreeMap::new();
        sizes(dir, "", &mut files)?;
        // The user may remove the files that belong to no model.
        let inner =
            |name: &str| name.starts_with(PREFIX) || name.starts_with(BEST) || [STATE, UNFINISHED].contains(&name);
        files.retain(|name, _| !inner(name) && (name.ends_with(".safetensors") || name.ends_with(".json")));
        let mut state = State { files, ..State::new(self.command, self.updates, self.updates, settings(config)?) };
        state.state.insert("inputs".into(), inputs.state());
        write_text(&dir.join(STATE), &pretty(&json!(state)))
    }
}

/// The checkpoints that a run writes.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    dir: PathBuf,
    command: &'static str,
    config: Map<String, Value>,
    num_updates: usize,
    every: Option<usize>,
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
        let (every, limit) = (run.checkpoints.save_steps, run.checkpoints.save_total_limit);
        Ok(Self { dir, command, config: settings(config)?, num_updates, every, limit, last: None })
    }

    /// Removes what a killed run left incomplete or beyond `save_total_limit`, where `done` updates are done.
    ///
    /// # Errors
    /// If that cannot be removed.
    pub(crate) fn tidy(&mut self, done: usize) -> Result<()> {
        clear(&self.dir)?;
        self.keep_to_limit(done)
    }

    /// Returns whether one is due after `done` updates: every `save_steps` updates, and after the last.
    pub(crate) fn is_due(&self, done: usize) -> bool {
        is_due(self.every, done, self.num_updates)
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

    /// Returns whether a run that ends after `done` updates should leave one: it is not finished, or one is due; it did an update;
    /// and none was written or tried after it.
    pub(crate) fn is_wanted_at_end(&self, done: usize) -> bool {
        let due = done > 0 && (done < self.num_updates || self.is_due(done));
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

    /// Leaves the model of the run in its folder, as `save` writes it. If the run `ended` before its last update, that is noted
    /// beside it: such a model does not keep the run from starting again there.
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
        // Later ones are damaged: the run was resumed from before them.
        let numbers: Vec<usize> = numbered(&self.dir)?.into_iter().filter(|&number| number <= done).collect();
        for number in &numbers[..numbers.len().saturating_sub(limit)] {
            remove(&self.dir, &name_of(*number))?;
        }
        Ok(())
    }
}

/// Returns whether `done` updates are a multiple of `every`, or all of `total`; never without `every`.
pub(crate) fn is_due(every: Option<usize>, done: usize, total: usize) -> bool {
    every.is_some_and(|every| done.is_multiple_of(every) || done == total)
}

/// Creates the folder `dir/name` with what `write` writes to the folder that it gets: all of it, or nothing.
///
/// It is written under another name, flushed to the disk and renamed. An older folder of the name is renamed just before, and
/// removed after.
pub(super) fn commit(dir: &Path, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    clear(dir)?;
    let (beside, place) = (dir.join(format!("{WRITING}{name}")), dir.join(name));
    fs::create_dir(&beside).map_err(Error::io("create the folder", &beside))?;
    if let Err(error) = write(&beside).and_then(|()| sync(&beside)) {
        // The disk may be full.
        let _ = fs::remove_dir_all(&beside);
        return Err(error);
    }
    let old = dir.join(format!("{LEAVING}{name}"));
    if place.exists() {
        fs::rename(&place, &old).map_err(Error::io("rename", &place))?;
    }
    fs::rename(&beside, &place).map_err(Error::io("write", &place))?;
    fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io("write to the disk", dir))?;
    // `clear` finds what is left of it.
    let _ = fs::remove_dir_all(&old);
    Ok(())
}

/// Removes the folder `dir/name`, after a rename, so that no incomplete folder has its name.
fn remove(dir: &Path, name: &str) -> Result<()> {
    let (place, old) = (dir.join(name), dir.join(format!("{LEAVING}{name}")));
    fs::rename(&place, &old).map_err(Error::io("remove", &place))?;
    let _ = fs::remove_dir_all(&old);
    Ok(())
}

/// Removes the folders that a killed run left in `dir` while it wrote or removed them. A best model that was not replaced yet gets
/// its name back.
///
/// # Errors
/// If a folder that was being written cannot be removed.
pub(crate) fn clear(dir: &Path) -> Result<()> {
    for name in names(dir)? {
        let path = dir.join(&name);
        if name.starts_with(WRITING) {
            fs::remove_dir_all(&path).map_err(Error::io("remove", &path))?;
        } else if name.strip_prefix(LEAVING) == Some(BEST) && !dir.join(BEST).exists() {
            fs::rename(&path, dir.join(BEST)).map_err(Error::io("rename", &path))?;
        } else if name.starts_with(LEAVING) {
            // The next save tries again.
            let _ = fs::remove_dir_all(&path);
        }
    }
    Ok(())
}

/// Returns the folders in `dir` that have names of checkpoints or of the best model, whatever is in them.
pub(crate) fn places(dir: &Path) -> Result<Vec<PathBuf>> {
    let best = dir.join(BEST);
    let checkpoints = numbered(dir)?.into_iter().map(|number| dir.join(name_of(number)));
    Ok(checkpoints.chain(best.is_dir().then_some(best)).collect())
}

/// Returns the folders of checkpoints and of the best model in `dir`.
pub(crate) fn folders(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut folders = places(dir)?;
    folders.retain(|folder| !folder.ends_with(BEST) || folder.join(BEST_FILE).is_file());
    Ok(folders)
}

/// Returns the newest checkpoint in `dir`.
pub(crate) fn newest(dir: &Path) -> Option<PathBuf> {
    Some(dir.join(name_of(numbered(dir).ok()?.pop()?)))
}

/// Returns whether there is a checkpoint in `dir`, whole or not.
pub fn has_checkpoint(dir: &Path) -> bool {
    newest(dir).is_some()
}

pub(crate) fn name_of(number: usize) -> String {
    format!("{PREFIX}{number}")
}

/// Returns the numbers of the checkpoints in `dir`, in ascending order.
pub(crate) fn numbered(dir: &Path) -> Result<Vec<usize>> {
    let number = |name: &String| name.strip_prefix(PREFIX)?.parse().ok().filter(|number| name_of(*number) == *name);
    let mut numbers: Vec<usize> = names(dir)?.iter().filter_map(number).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// Returns the names of the folders in `dir`; none if there is no `dir`.
fn names(dir: &Path) -> Result<Vec<String>> {
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(dir).map_err(Error::io("read the folder", dir))?;
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::io("read the folder", dir))?;
        if entry.path().is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(names)
}

/// Adds every file below `dir` with its size to `found`, by its path with the prefix `below`.
fn sizes(dir: &Path, below: &str, found: &mut BTreeMap<String, u64>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
        let entry = entry.map_err(Error::io("read the folder", dir))?;
        let name = format!("{below}{}", entry.file_name().to_string_lossy());
        let meta = fs::metadata(entry.path()).map_err(Error::io("read", entry.path()))?;
        if meta.is_dir() {
            sizes(&entry.path(), &format!("{name}/"), found)?;
        } else {
            found.insert(name, meta.len());
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::flag::defaults;
    use crate::run::settings::Resume;
    use crate::run::start::Start;

    pub(in crate::run) fn run(dir: &Path, limit: Option<usize>, resume: Option<Resume>) -> RunConfig {
        let mut run = RunConfig { output_dir: dir.into(), ..defaults() };
        run.checkpoints.save_steps = Some(2);
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

    pub(in crate::run) fn found(dir: &Path) -> Result<Option<usize>> {
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
        assert_eq!(found(dir.path()).unwrap(), Some(10));
    }

    #[test]
    fn a_damaged_checkpoint_is_skipped_and_named_and_replaced_by_a_later_run() {
        for name in ["model", "value_model/model", STATE] {
            for missing in [true, false] {
                let dir = tempfile::tempdir().unwrap();
                save(dir.path(), None, &[2, 4]);
                let path = dir.path().join("checkpoint-4").join(name);
                match missing {
                    true => fs::remove_file(&path).unwrap(),
                    false => fs::write(&path, "wei").unwrap(),
                }
                let start = Start::find(&run(dir.path(), None, Some(Resume::Latest))).unwrap();
                assert_eq!(start.done(), 2, "{name}");
                assert!(start.warnings[0].contains("checkpoint-4"), "{:?}", start.warnings);
                let error = Saved::read(&dir.path().join("checkpoint-4")).unwrap_err().to_string();
                assert!(error.contains("expected") || error.contains("JSON"), "{error}");
                save(dir.path(), Some(2), &[3, 4]);
                assert_eq!(sorted(dir.path()), ["checkpoint-3", "checkpoint-4"]);
                assert_eq!(found(dir.path()).unwrap(), Some(4));
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
        assert_eq!(found(dir.path()).unwrap(), Some(2));
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
            saved.check_settings("sft", config.as_object().unwrap(), ranks, false).map_err(|error| error.to_string())
        };
        // 16 rows by 1 rank.
        assert_eq!(check(&saved, 1, None, Some(8), 2).unwrap(), [""; 0]);
        assert_eq!(check(&saved, 1, None, None, 2).unwrap(), [""; 0]);
        let rounding = |found: &[String], start: &str| found.len() == 1 && found[0].starts_with(start);
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
        // A checkpoint without a number of ranks is one rank's.
        let path = saved.dir.join(STATE);
        let mut state = read_json(&path).unwrap();
        state.as_object_mut().unwrap().remove("ranks");
        write_text(&path, &pretty(&state)).unwrap();
        assert_eq!(State::read(&path).unwrap().ranks, 1);
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
        assert!(saved(4).check_as_it_is("sft", &longer).is_err());
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

    #[test]
    fn a_path_is_the_same_from_another_working_folder() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("rows.jsonl"), "").unwrap();
        let whole = json!([dir.path().join("rows.jsonl")]);
        assert!(is_same(&json!(["rows.jsonl"]), &whole, Some(dir.path())));
        assert!(!is_same(&json!(["rows.jsonl"]), &whole, None));
        assert!(!is_same(&json!(["rows.jsonl", "x"]), &whole, Some(dir.path())));
    }
}
