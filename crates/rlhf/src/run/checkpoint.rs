//! Checkpoints: all that a run needs to go on as if it had never stopped, in a folder that appears by one rename.
//!
//! `output_dir/checkpoint-N` is the run after N updates: its models as Hugging Face folders, the optimizers' states beside
//! them, and `trainer_state.json`, which is written last and lists every other file with its size. The folder is written
//! under another name and brought to the disk before it gets its own, so that one with that name is whole; what a killed run
//! leaves under other names, the next one clears away.

use crate::hub::Commits;
use crate::metrics::Metrics;
use crate::model::is_model;
use crate::run::inputs::Inputs;
use crate::run::settings::{CheckpointConfig, EvalConfig, Resume, RunConfig, is_eval_metric};
use crate::weights::{pretty, read_json, sync, write_text};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What the name of a checkpoint's folder begins with; the number of updates follows.
const PREFIX: &str = "checkpoint-";
/// What a folder's name begins with while it is written.
const WRITING: &str = ".saving-";
/// What a folder's name begins with while it is removed.
const LEAVING: &str = ".removing-";
/// The folder of the best model.
const BEST: &str = "best";
/// What `best` says of itself.
const BEST_FILE: &str = "best.json";
/// The state of everything but weights and optimizers.
const STATE: &str = "trainer_state.json";
/// Beside a model: that its run ended early, and with which settings.
const UNFINISHED: &str = "unfinished.json";
/// An optimizer's state, beside the model that it belongs to.
pub(crate) const OPTIMIZER: &str = "optimizer.safetensors";

/// The files in a checkpoint that are no model's.
pub(crate) const FILES: [&str; 4] = [STATE, UNFINISHED, OPTIMIZER, BEST_FILE];

/// Settings that decide no result: a resumed run may change them.
const FREE: [&str; 21] = [
    "output_dir",
    "save_steps",
    "save_total_limit",
    "max_shard_size",
    "report_to",
    "tensorboard_tags",
    "num_threads", // what it comes to is compared
    "disable_tqdm",
    "num_sample_generations",
    "eval_steps",
    "num_eval_prompts", // but a best model that was found by others is looked for anew
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
];

/// Settings that say how long a run is: a finished one may be extended by them.
const LENGTH: [&str; 3] = ["total_episodes", "num_train_epochs", "max_steps"];

/// Settings of which only the best model depends; it is looked for anew where they change.
const OF_BEST: [&str; 2] = ["metric_for_best_model", "greater_is_better"];

/// Settings on which results depend by rounding at most: a resumed run may change them, and says so.
const ROUNDING: [&str; 4] =
    ["device", "gradient_checkpointing", "max_tokens_per_micro_batch", "local_rollout_forward_batch_size"];

/// What `trainer_state.json` says.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct State {
    /// The version of rlhf that wrote it.
    version: String,
    /// The command whose run this is.
    command: String,
    /// Updates done.
    pub(crate) update: usize,
    /// Updates of the whole run.
    num_updates: usize,
    /// Threads that libtorch computed with: sums depend on them.
    threads: i32,
    /// The metrics of the last update, as far as the model card tells them.
    pub(crate) metrics: Map<String, Value>,
    /// What each part of the run remembers beside weights and optimizers, by the part's name.
    pub(crate) state: Map<String, Value>,
    /// Every setting.
    config: Map<String, Value>,
    /// The folder that relative paths among them are from.
    #[serde(default)]
    working_dir: Option<PathBuf>,
    /// Every other file with its size in bytes.
    files: BTreeMap<String, u64>,
}

impl State {
    /// That of the run of `command` after `update` of `num_updates` updates, without what its parts remember.
    fn new(command: &str, update: usize, num_updates: usize, config: Map<String, Value>) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            command: command.into(),
            update,
            num_updates,
            threads: tch::get_num_threads(),
            metrics: Map::new(),
            state: Map::new(),
            config,
            working_dir: std::env::current_dir().ok(),
            files: BTreeMap::new(),
        }
    }

    /// Reads what [`State::new`] gave, from a file.
    fn read(path: &Path) -> Result<Self> {
        let state: Self = serde_json::from_value(read_json(path)?)
            .map_err(|e| Error::invalid(path, format!("expected the state of a run: {e}")))?;
        let (found, most) = (state.update, state.num_updates);
        if found > most {
            let message = format!("`update`: expected at most {most}, the run's updates, found {found}");
            return Err(Error::invalid(path, message));
        }
        Ok(state)
    }
}

/// A checkpoint that was found whole.
#[derive(Debug)]
pub(crate) struct Saved {
    /// Its folder.
    pub(crate) dir: PathBuf,
    /// What its `trainer_state.json` says.
    pub(crate) state: State,
}

impl Saved {
    /// Reads the state in the folder `dir`, and looks that every file is there in its length.
    ///
    /// # Errors
    /// If it is no checkpoint, or not a whole one.
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

    /// What [`Finished::note`] wrote into the folder `dir`, if it did.
    ///
    /// # Errors
    /// As [`Saved::read`].
    pub(crate) fn finished(dir: &Path) -> Result<Option<Self>> {
        if dir.join(STATE).is_file() { Self::read(dir).map(Some) } else { Ok(None) }
    }

    /// Whether all updates of the run are done.
    fn is_finished(&self) -> bool {
        self.state.update == self.state.num_updates
    }

    /// Checks that the resumed run keeps its settings; returns warnings about harmless differences. A finished run may be
    /// longer than it was.
    ///
    /// # Errors
    /// If it is another command's, or a setting that decides the result differs: the error names it with both values.
    pub(crate) fn check(&self, command: &str, config: &impl Serialize) -> Result<Vec<String>> {
        self.check_settings(command, config, self.is_finished())
    }

    /// [`Saved::check`], for a run that is passed over where it is finished: it may not be longer.
    ///
    /// # Errors
    /// As [`Saved::check`].
    pub(crate) fn check_as_it_is(&self, command: &str, config: &impl Serialize) -> Result<Vec<String>> {
        self.check_settings(command, config, false)
    }

    fn check_settings(&self, command: &str, config: &impl Serialize, may_extend: bool) -> Result<Vec<String>> {
        let (dir, state) = (self.dir.display(), &self.state);
        if state.command != command {
            let message = format!("expected a checkpoint of `rlhf {command}`, found one of `rlhf {}`", state.command);
            return Err(Error::invalid(&self.dir, message));
        }
        let config = settings(config)?;
        let mut warnings = Vec::new();
        let mut refused = Vec::new();
        for (name, now) in &config {
            // A setting that only one version knows cannot be compared.
            let from = state.working_dir.as_deref();
            let Some(then) = state.config.get(name).filter(|then| !is_same(then, now, from)) else { continue };
            let (then, now) = (shown(then), shown(now));
            match name.as_str() {
                name if FREE.contains(&name) || OF_BEST.contains(&name) => {}
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
        let version = env!("CARGO_PKG_VERSION");
        if state.version != version {
            warnings.push(format!("{dir} was written by rlhf {}, and this is {version}", state.version));
        }
        Ok(warnings)
    }

    /// What a person should know of the threads that libtorch now computes with.
    pub(crate) fn threads_warning(&self) -> Option<String> {
        let (then, now) = (self.state.threads, tch::get_num_threads());
        let dir = self.dir.display();
        (then != now)
            .then(|| format!("{now} threads: it was {then} before {dir}, so that results may differ by rounding"))
    }

    /// Checks that the run still reads what it read, and has as many updates as it had, of `rows` rows of data each; a finished
    /// run may have more. Gives what a person should know.
    ///
    /// # Errors
    /// If it has not; but with `resume_with_changed_inputs` only if it would have fewer updates than are done.
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
            warnings.push(format!("{}: {changed}: the run goes on with what is there now", self.dir.display()));
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

    /// What the setting `name` was.
    pub(crate) fn setting(&self, name: &str) -> &Value {
        self.state.config.get(name).unwrap_or(&Value::Null)
    }

    /// What the part `name` remembers.
    ///
    /// # Errors
    /// If it remembers nothing.
    pub(crate) fn part(&self, name: &str) -> Result<&Value> {
        self.state
            .state
            .get(name)
            .ok_or_else(|| Error::invalid(self.dir.join(STATE), format!("expected the state of `{name}`, found none")))
    }

    /// [`Saved::part`] as a value of one's own.
    ///
    /// # Errors
    /// If it remembers nothing, or something else.
    pub(crate) fn parsed<T: for<'a> Deserialize<'a>>(&self, name: &str) -> Result<T> {
        serde_json::from_value(self.part(name)?.clone())
            .map_err(|e| Error::invalid(self.dir.join(STATE), format!("state of `{name}`: {e}")))
    }
}

/// The settings of a run by name.
fn settings(config: &impl Serialize) -> Result<Map<String, Value>> {
    match serde_json::to_value(config) {
        Ok(Value::Object(settings)) => Ok(settings),
        Ok(_) => Ok(Map::new()),
        Err(e) => Err(Error::Usage(format!("the settings cannot be written to a checkpoint: {e}"))),
    }
}

/// Whether a setting is what it was; a path may be written in another way, also from another folder than `from`.
fn is_same(then: &Value, now: &Value, from: Option<&Path>) -> bool {
    if let (Value::Array(then), Value::Array(now)) = (then, now) {
        return then.len() == now.len() && then.iter().zip(now).all(|(then, now)| is_same(then, now, from));
    }
    let place = |value: &Value, from: &Path| fs::canonicalize(from.join(value.as_str()?)).ok();
    then == now
        || place(then, from.unwrap_or(Path::new(""))).is_some_and(|then| place(now, Path::new("")) == Some(then))
}

/// A setting as it stands in an error message.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// How a run begins.
#[derive(Debug, Default)]
pub(crate) struct Start {
    /// What it goes on from.
    pub(crate) from: Option<Saved>,
    /// Whether it goes on in the folder that the checkpoint lies in.
    pub(crate) in_place: bool,
    /// Whether it may replace the run in `output_dir`, which has no checkpoint, and no model but one that it left when it ended
    /// early.
    pub(crate) replaces: bool,
    /// That run, where it left a model.
    pub(crate) again: Option<Saved>,
    /// What a person should know.
    pub(crate) warnings: Vec<String>,
}

impl Start {
    /// Finds what `run.checkpoints.resume_from_checkpoint` asks for; nothing is changed.
    ///
    /// # Errors
    /// If it names no whole checkpoint, or one that newer ones lie beside in `output_dir`; if there are checkpoints in
    /// `output_dir`, the newest is asked for, and none is whole.
    pub(crate) fn find(run: &RunConfig) -> Result<Self> {
        let out = run.output_dir.as_path();
        let asked = match &run.checkpoints.resume_from_checkpoint {
            None => return Ok(Self::default()),
            Some(asked) => asked,
        };
        let numbers = numbered(out)?;
        let Resume::From(dir) = asked else { return Self::newest(out, &numbers) };
        let saved = Saved::read(dir)?;
        let parent = fs::canonicalize(dir).ok().and_then(|dir| dir.parent().map(Path::to_path_buf));
        let in_place = parent.is_some() && parent == fs::canonicalize(out).ok();
        let newer = numbers.iter().rev().filter(|&&number| number > saved.state.update);
        let mut newer = newer.map(|&number| out.join(name_of(number)));
        if let Some(newer) = newer.find(|path| in_place && Saved::read(path).is_ok()) {
            return Err(Error::Usage(format!(
                "resume_from_checkpoint = {}: {} is newer: resume from that one, remove it, or go on in another output_dir",
                dir.display(),
                newer.display()
            )));
        }
        Ok(Self { from: Some(saved), in_place, ..Self::default() })
    }

    /// The newest whole checkpoint in `out`, where there are those of these `numbers`.
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
            Some(error) => Err(Error::Run(format!("no whole checkpoint to go on from: {error}"))),
            // What was killed before its first checkpoint begins again.
            None if !is_model(out) => Ok(Self { replaces: true, ..Self::default() }),
            // So does what ended early and could not write one.
            None if out.join(UNFINISHED).is_file() => {
                let state = State::read(&out.join(UNFINISHED))?;
                let (place, done, all) = (out.display(), state.update, state.num_updates);
                let again = Some(Saved { dir: out.to_path_buf(), state });
                let warnings = vec![format!(
                    "{place}: the run ended after update {done} of {all} without a checkpoint: it begins again"
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
    pub(crate) fn check(&self, command: &str, config: &impl Serialize) -> Result<Vec<String>> {
        match (&self.from, &self.again) {
            (Some(saved), _) => saved.check(command, config),
            (None, Some(saved)) => saved.check_as_it_is(command, config),
            (None, None) => Ok(Vec::new()),
        }
    }

    /// Whether the settings make a finished run longer.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(crate) fn extends(&self, config: &impl Serialize) -> Result<bool> {
        let Some(saved) = self.from.as_ref().filter(|saved| saved.is_finished()) else { return Ok(false) };
        let config = settings(config)?;
        Ok(LENGTH.iter().any(|name| config.get(*name).is_some_and(|now| saved.setting(name) != now)))
    }

    /// Updates that are done already.
    pub(crate) fn done(&self) -> usize {
        self.from.as_ref().map_or(0, |saved| saved.state.update)
    }

    /// What the names of the hub stood for when the run began.
    ///
    /// # Errors
    /// If the checkpoint says what is none.
    pub(crate) fn commits(&self) -> Result<Commits> {
        let saved = self.from.as_ref().filter(|saved| saved.part("commits").is_ok());
        saved.map_or(Ok(Commits::new()), |saved| saved.parsed("commits"))
    }

    /// What the run reads of the folder of another run.
    pub(crate) fn input(&self) -> Option<&Path> {
        self.from.as_ref().filter(|_| !self.in_place).map(|saved| saved.dir.as_path())
    }

    /// What to tell a person of how the run begins.
    pub(crate) fn describe(&self, run: &RunConfig, num_updates: usize) -> Option<String> {
        match (&self.from, &run.checkpoints.resume_from_checkpoint) {
            (Some(saved), _) => {
                Some(format!("goes on from {}, after update {} of {num_updates}", saved.dir.display(), self.done()))
            }
            (None, Some(_)) if !self.in_place => {
                Some(format!("no checkpoint in {}: begins with the first update", run.output_dir.display()))
            }
            (None, _) => None,
        }
    }

    /// The message for a run that was finished: nothing is left to do, or it is extended.
    pub(crate) fn finished(&self, num_updates: usize) -> Option<String> {
        let saved = self.from.as_ref().filter(|saved| saved.is_finished() || saved.state.update == num_updates)?;
        let (dir, done) = (saved.dir.display(), saved.state.update);
        Some(match done == num_updates {
            true => format!("{dir}: the run is finished, all {num_updates} updates are done"),
            false => format!(
                "{dir}: the run was finished after {done} updates and is extended to {num_updates}; learning rates and other \
                 schedules are those of a run of {num_updates} updates from here on"
            ),
        })
    }
}

/// Leaves the model of the run of `command` in its folder `dir`, as `save` writes it. Where it `ended` before the last of
/// `num_updates` updates, that is noted beside it: such a model does not keep the run from beginning again there.
///
/// # Errors
/// Those of `save`; if the note cannot be written or removed.
pub(crate) fn leave_model(
    dir: &Path,
    command: &str,
    config: &impl Serialize,
    (done, num_updates): (usize, usize),
    ended: &Result<usize>,
    save: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let note = dir.join(UNFINISHED);
    let finished = ended.is_ok() && done == num_updates;
    if !finished {
        let state = State::new(command, done, num_updates, settings(config)?);
        write_text(&note, &pretty(&json!(state)))?;
    }
    save()?;
    if finished && note.is_file() {
        fs::remove_file(&note).map_err(Error::io("remove", &note))?;
    }
    Ok(())
}

/// A run that came to its end, as a step of several does that are gone on with.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Its command.
    pub(crate) command: &'static str,
    /// Its updates.
    pub(crate) updates: usize,
}

impl Finished {
    /// Notes in the run's folder `dir` that it is finished, with its settings, digests of what it read, and the sizes of its
    /// models' files.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub(crate) fn note(&self, dir: &Path, config: &impl Serialize, inputs: &Inputs) -> Result<()> {
        let mut files = BTreeMap::new();
        sizes(dir, "", &mut files)?;
        // What is not a model's, a person may remove.
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
    /// The update whose checkpoint was written last, or tried.
    last: Option<usize>,
}

impl Checkpoints {
    /// Those of the run of `command` with the settings `config`, of which `done` updates are done; clears away what a killed run
    /// left half, and what it left beyond `save_total_limit`.
    ///
    /// # Errors
    /// If that cannot be removed.
    pub(crate) fn new(
        command: &'static str,
        run: &RunConfig,
        config: &impl Serialize,
        num_updates: usize,
        done: usize,
    ) -> Result<Self> {
        let dir = run.output_dir.clone();
        clear(&dir)?;
        let (every, limit) = (run.checkpoints.save_steps, run.checkpoints.save_total_limit);
        let checkpoints = Self { dir, command, config: settings(config)?, num_updates, every, limit, last: None };
        checkpoints.keep_to_limit(done)?;
        Ok(checkpoints)
    }

    /// Whether the settings ask for one after `done` updates: every `save_steps` of them, and the last.
    pub(crate) fn is_due(&self, done: usize) -> bool {
        is_due(self.every, done, self.num_updates)
    }

    /// The folder of the run.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where the checkpoint after `done` updates lies.
    pub(crate) fn place(&self, done: usize) -> PathBuf {
        self.dir.join(name_of(done))
    }

    /// Whether a run that ends after `done` updates should leave one: it is not finished, or one is due, there is something to
    /// keep, and none was written or tried at this point.
    pub(crate) fn is_wanted_at_end(&self, done: usize) -> bool {
        let asked = done > 0 && (done < self.num_updates || self.is_due(done));
        asked && self.last != Some(done) && Saved::read(&self.place(done)).is_err()
    }

    /// Writes the checkpoint after `done` updates, and then removes old ones beyond `save_total_limit`.
    ///
    /// `write` puts models and optimizers into the folder that it is given; `state` is that of all other parts, by name.
    ///
    /// # Errors
    /// Those of `write`; if a file or folder cannot be written, renamed or removed. Older checkpoints are whole in any case.
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

    /// Removes the oldest checkpoints of at most `done` updates beyond `save_total_limit`.
    fn keep_to_limit(&self, done: usize) -> Result<()> {
        let Some(limit) = self.limit else { return Ok(()) };
        // Those behind this one are no older state of this run: `Start` passed over them as damaged.
        let numbers: Vec<usize> = numbered(&self.dir)?.into_iter().filter(|&number| number <= done).collect();
        for number in &numbers[..numbers.len().saturating_sub(limit)] {
            remove(&self.dir, &name_of(*number))?;
        }
        Ok(())
    }
}

/// Whether what comes after `every` so many updates, and after the last of `total`, comes after `done` of them.
pub(crate) fn is_due(every: Option<usize>, done: usize, total: usize) -> bool {
    every.is_some_and(|every| done.is_multiple_of(every) || done == total)
}

/// Metrics of which less is better.
const LESS_IS_BETTER: [&str; 10] = [
    "loss",
    "eval_loss",
    "loss/policy_avg",
    "loss/value_avg",
    "loss/kl_avg",
    "loss/unsup_avg",
    "objective/kl",
    "eval/kl",
    "policy/approxkl_avg",
    "policy/policykl_avg",
];

/// The best model of a run so far, by one of its metrics.
#[derive(Debug)]
pub(crate) struct Best {
    metric: String,
    greater: bool,
    /// The metric's best value, and the update that it was found after; that model is written.
    found: Option<(f64, usize)>,
    /// A better one, whose model is not written yet.
    pending: Option<(f64, usize)>,
    /// Whether an update has had the metric.
    told: bool,
}

impl Best {
    /// What `config` asks for.
    pub(crate) fn new(config: &EvalConfig) -> Option<Self> {
        let metric = config.metric_for_best_model.clone()?;
        let greater = config.greater_is_better.unwrap_or(!LESS_IS_BETTER.contains(&metric.as_str()));
        Some(Self { greater, metric, found: None, pending: None, told: false })
    }

    /// Notes that the model is to be written, if `metrics` are better than before and the update after which they were taken,
    /// the `done`th, `looks` at them; `may_lack` says that the metric cannot be there yet. Gives what to warn of.
    ///
    /// From here on [`Best::state`] holds that: an error before [`Best::write`] is done costs no best model.
    ///
    /// # Errors
    /// If no update has had the metric, but for one of an evaluation where nothing looks.
    pub(crate) fn look(
        &mut self,
        metrics: &Metrics,
        done: usize,
        looks: bool,
        may_lack: bool,
    ) -> Result<Option<String>> {
        let Some(value) = metrics.get(&self.metric) else {
            let named = format!("metric_for_best_model = {}", self.metric);
            let missed = !may_lack && (looks || !is_eval_metric(&self.metric));
            if missed && !self.told && self.found.is_none() {
                let known: Vec<&str> = metrics.iter().map(|(name, _)| name).collect();
                let known = known.join(", ");
                return Err(Error::Usage(format!("{named}: expected a metric of the run, one of {known}")));
            }
            let warning = || format!("{named}: update {done} has no such metric, so its model is not looked at");
            return Ok((missed && looks).then(warning));
        };
        self.told = true;
        if looks && self.is_beaten_by(value) {
            self.pending = Some((value, done));
        }
        Ok(None)
    }

    /// Replaces `output_dir/best` by what `write` puts into the folder that it is given, if the model after `done` updates is to
    /// be written; gives its path.
    ///
    /// # Errors
    /// Those of [`Checkpoints::save`]; the model is still to be written then.
    pub(crate) fn write(
        &mut self,
        output_dir: &Path,
        done: usize,
        write: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Option<PathBuf>> {
        let Some(found) = self.pending.filter(|&(_, update)| update == done) else { return Ok(None) };
        let described = self.described(Some(found));
        commit(output_dir, BEST, |dir| {
            write(dir)?;
            write_text(&dir.join(BEST_FILE), &pretty(&described.into()))
        })?;
        (self.found, self.pending) = (Some(found), None);
        Ok(Some(output_dir.join(BEST)))
    }

    /// Whether the metric comes of evaluations.
    pub(crate) fn is_of_evaluations(&self) -> bool {
        is_eval_metric(&self.metric)
    }

    /// Whether `value` is better than what came before; a number that is not finite never is.
    fn is_beaten_by(&self, value: f64) -> bool {
        let better = |best: f64| if self.greater { value > best } else { value < best };
        value.is_finite() && self.found.is_none_or(|(best, _)| better(best))
    }

    fn described(&self, found: Option<(f64, usize)>) -> Map<String, Value> {
        let (value, update) = found.unzip();
        let parts: [(&str, Value); 4] = [
            ("metric", self.metric.as_str().into()),
            ("greater_is_better", self.greater.into()),
            ("value", json!(value)),
            ("update", json!(update)),
        ];
        parts.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
    }

    /// What a checkpoint keeps of it.
    pub(crate) fn state(&self) -> Value {
        let mut state = self.described(self.found);
        state.extend(self.pending.map(|pending| ("pending".into(), json!(pending))));
        state.into()
    }

    /// Takes up what [`Best::state`] gave, unless it was of another metric.
    pub(crate) fn load_state(&mut self, state: &Value) {
        if state["metric"] == self.metric.as_str() && state["greater_is_better"] == self.greater {
            let number = |value: &Value| value.as_u64().map(|update| update as usize);
            self.found = state["value"].as_f64().zip(number(&state["update"]));
            let pending = &state["pending"];
            self.pending = pending[0].as_f64().zip(number(&pending[1]));
        }
    }
}

/// Makes the folder `dir/name` of what `write` puts into the folder it is given: all of it, or nothing.
///
/// It is written beside, brought to the disk and renamed. A folder that has the name is renamed away just before, and removed
/// after.
fn commit(dir: &Path, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    clear(dir)?;
    let (beside, place) = (dir.join(format!("{WRITING}{name}")), dir.join(name));
    fs::create_dir(&beside).map_err(Error::io("create the folder", &beside))?;
    if let Err(error) = write(&beside).and_then(|()| sync(&beside)) {
        // The disk may be full: others need the room.
        let _ = fs::remove_dir_all(&beside);
        return Err(error);
    }
    let old = dir.join(format!("{LEAVING}{name}"));
    if place.exists() {
        fs::rename(&place, &old).map_err(Error::io("rename", &place))?;
    }
    fs::rename(&beside, &place).map_err(Error::io("write", &place))?;
    fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io("write to the disk", dir))?;
    // What is left of it, `clear` finds.
    let _ = fs::remove_dir_all(&old);
    Ok(())
}

/// Removes the folder `dir/name`: first from sight, so that nobody finds half of it.
fn remove(dir: &Path, name: &str) -> Result<()> {
    let (place, old) = (dir.join(name), dir.join(format!("{LEAVING}{name}")));
    fs::rename(&place, &old).map_err(Error::io("remove", &place))?;
    let _ = fs::remove_dir_all(&old);
    Ok(())
}

/// Clears away what a killed run left in `dir`: folders that are half written or half removed. A best model that was to be
/// replaced, and is not, gets its place back.
///
/// # Errors
/// If what is half written cannot be removed.
pub(crate) fn clear(dir: &Path) -> Result<()> {
    for name in names(dir)? {
        let path = dir.join(&name);
        if name.starts_with(WRITING) {
            fs::remove_dir_all(&path).map_err(Error::io("remove", &path))?;
        } else if name.strip_prefix(LEAVING) == Some(BEST) && !dir.join(BEST).exists() {
            fs::rename(&path, dir.join(BEST)).map_err(Error::io("rename", &path))?;
        } else if name.starts_with(LEAVING) {
            // It is in nobody's way: the next save tries again.
            let _ = fs::remove_dir_all(&path);
        }
    }
    Ok(())
}

/// The folders of checkpoints and of the best model in `dir`.
pub(crate) fn folders(dir: &Path) -> Result<Vec<PathBuf>> {
    let best = dir.join(BEST);
    let checkpoints = numbered(dir)?.into_iter().map(|number| dir.join(name_of(number)));
    Ok(checkpoints.chain(best.join(BEST_FILE).is_file().then_some(best)).collect())
}

/// The newest checkpoint in `dir`.
pub(crate) fn newest(dir: &Path) -> Option<PathBuf> {
    Some(dir.join(name_of(numbered(dir).ok()?.pop()?)))
}

fn name_of(number: usize) -> String {
    format!("{PREFIX}{number}")
}

/// The numbers of the checkpoints in `dir`, rising.
fn numbered(dir: &Path) -> Result<Vec<usize>> {
    let number = |name: &String| name.strip_prefix(PREFIX)?.parse().ok().filter(|number| name_of(*number) == *name);
    let mut numbers: Vec<usize> = names(dir)?.iter().filter_map(number).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The names of the folders in `dir`; none where there is no `dir`.
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

/// Adds every file below `dir` with its size to `found`, under its path from where `below` begins.
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
mod tests {
    use super::*;
    use crate::flag::defaults;

    fn run(dir: &Path, limit: Option<usize>, resume: Option<Resume>) -> RunConfig {
        let mut run = RunConfig { output_dir: dir.into(), ..defaults() };
        run.checkpoints.save_steps = Some(2);
        run.checkpoints.save_total_limit = limit;
        run.checkpoints.resume_from_checkpoint = resume;
        run
    }

    fn save(dir: &Path, limit: Option<usize>, updates: &[usize]) {
        let run = run(dir, limit, None);
        let mut checkpoints = Checkpoints::new("sft", &run, &json!({"seed": 1, "device": "cpu"}), 20, 0).unwrap();
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

    fn found(dir: &Path) -> Result<Option<usize>> {
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
    fn what_is_cut_short_is_passed_over_and_named_and_replaced_when_its_turn_comes() {
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
    fn where_no_checkpoint_is_whole_nothing_begins_again_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), None, &[2]);
        fs::remove_file(dir.path().join("checkpoint-2/model")).unwrap();
        let error = found(dir.path()).unwrap_err().to_string();
        assert!(error.contains("no whole checkpoint") && error.contains("the file model"), "{error}");
    }

    #[test]
    fn what_a_killed_run_left_half_is_no_checkpoint_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), None, &[2]);
        for name in [".saving-checkpoint-4", ".removing-checkpoint-1", ".removing-best", ".saving-best"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("half"), name).unwrap();
        }
        assert_eq!(found(dir.path()).unwrap(), Some(2));
        save(dir.path(), None, &[4]);
        // The old best model was out of its place, and the new one not yet in it.
        assert_eq!(sorted(dir.path()), ["best", "checkpoint-2", "checkpoint-4"]);
        assert_eq!(fs::read_to_string(dir.path().join("best/half")).unwrap(), ".removing-best");
    }

    #[test]
    fn a_write_that_fails_leaves_the_checkpoints_before_it_and_nothing_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), Some(1), &[2]);
        let run = run(dir.path(), Some(1), None);
        let mut checkpoints = Checkpoints::new("sft", &run, &json!({}), 9, 0).unwrap();
        let full = |dir: &Path| write_text(&dir.join("model"), "wei").and(Err(Error::Run("full".into())));
        assert!(checkpoints.save(4, Map::new(), Map::new(), full).is_err());
        assert_eq!(sorted(dir.path()), ["checkpoint-2"]);
        assert!(!checkpoints.is_wanted_at_end(4), "what failed is not tried again at once");
    }

    #[test]
    fn settings_that_decide_the_result_must_stay_and_others_may_change() {
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
    fn an_older_checkpoint_is_not_taken_where_a_newer_one_would_be_lost() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        save(dir.path(), None, &[2, 4, 6]);
        let from = || Some(Resume::From(dir.path().join("checkpoint-2")));
        let error = Start::find(&run(dir.path(), None, from())).unwrap_err().to_string();
        assert!(error.contains("checkpoint-6 is newer"), "{error}");
        let start = Start::find(&run(&other.path().join("new"), None, from())).unwrap();
        assert!(start.done() == 2 && !start.in_place && start.input().is_some());
    }

    #[test]
    fn the_best_is_by_its_metric_and_survives_a_checkpoint_unless_the_metric_changes() {
        let config = |metric: &str, greater| EvalConfig {
            metric_for_best_model: Some(metric.into()),
            greater_is_better: greater,
            ..defaults()
        };
        let dir = tempfile::tempdir().unwrap();
        let mut best = Best::new(&config("eval/score", None)).unwrap();
        for (value, better) in [(1.0, true), (1.0, false), (f64::NAN, false), (0.5, false), (2.0, true)] {
            let mut metrics = Metrics::default();
            metrics.push("eval/score", value);
            assert_eq!(best.look(&metrics, 7, true, false).unwrap(), None);
            let written = best.write(dir.path(), 7, |_| Ok(())).unwrap();
            assert_eq!(written.is_some(), better, "{value}");
        }
        for (metric, greater) in [
            ("loss/value_avg", false),
            ("eval/kl", false),
            ("eval_loss", false),
            ("eval/scores/wrinkle", true),
            ("eval/scores/lossless", true),
            ("eval_margin", true),
        ] {
            assert_eq!(Best::new(&config(metric, None)).unwrap().greater, greater, "{metric}");
            assert!(Best::new(&config(metric, Some(true))).unwrap().greater);
        }
        let mut again = Best::new(&config("eval/score", None)).unwrap();
        again.load_state(&best.state());
        assert_eq!(again.found, Some((2.0, 7)));
        let mut other = Best::new(&config("eval/kl", None)).unwrap();
        other.load_state(&best.state());
        assert_eq!(other.found, None);
    }

    #[test]
    fn a_best_model_whose_write_fails_is_still_to_be_written_after_a_resume() {
        let dir = tempfile::tempdir().unwrap();
        let mut config: EvalConfig = defaults();
        config.metric_for_best_model = Some("eval_loss".into());
        let mut best = Best::new(&config).unwrap();
        let at = |value: f64| {
            let mut metrics = Metrics::default();
            metrics.push("eval_loss", value);
            metrics
        };
        best.look(&at(3.0), 1, true, false).unwrap();
        best.write(dir.path(), 1, |_| Ok(())).unwrap();
        let full = |_: &Path| Err(Error::Run("full".into()));
        best.look(&at(2.0), 2, true, false).unwrap();
        assert!(best.write(dir.path(), 2, full).is_err());
        let mut again = Best::new(&config).unwrap();
        again.load_state(&best.state());
        assert!(again.write(dir.path(), 1, |_| Ok(())).unwrap().is_none(), "that is another model");
        assert!(again.write(dir.path(), 2, full).is_err());
        assert!(again.write(dir.path(), 2, |_| Ok(())).unwrap().is_some());
        let told = read_json(&dir.path().join(BEST).join(BEST_FILE)).unwrap();
        assert_eq!(told, json!({"metric": "eval_loss", "greater_is_better": false, "value": 2.0, "update": 2}));
        assert!(again.write(dir.path(), 2, |_| Ok(())).unwrap().is_none(), "it is written once");
        assert_eq!(again.state(), told);
    }

    #[test]
    fn what_a_kill_left_beyond_the_limit_goes_when_the_run_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), None, &[2, 4, 6, 8]);
        // The last is damaged, so the run resumes from the one before.
        fs::remove_file(dir.path().join("checkpoint-8/model")).unwrap();
        let run = run(dir.path(), Some(2), None);
        Checkpoints::new("sft", &run, &json!({}), 9, 6).unwrap();
        assert_eq!(sorted(dir.path()), ["checkpoint-4", "checkpoint-6", "checkpoint-8"]);
    }

    #[test]
    fn a_state_that_counts_more_updates_or_rows_than_the_run_has_is_named_and_takes_no_memory() {
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
        let mut checkpoints = Checkpoints::new("sft", &run, &json!({"max_steps": 4}), 4, 0).unwrap();
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
