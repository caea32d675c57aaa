//! The content of `trainer_state.json`, the state of a run after an update beside weights and optimizers.

use super::STATE;
use super::changes::{EarlierSettings, settings};
use crate::run::environment::Environment;
use rlhf_base::dist::num_ranks;
use rlhf_base::weights::read_json;
use rlhf_base::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The content of `trainer_state.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct State {
    /// The version of rlhf that wrote it.
    pub(super) version: String,
    /// The command of the run.
    pub(super) command: String,
    /// Updates done.
    pub(crate) update: usize,
    /// Updates of the whole run.
    pub(crate) num_updates: usize,
    /// Threads that libtorch computed with: sums depend on them.
    pub(crate) threads: i32,
    /// Variables of the environment on which results depend; none in a checkpoint of an earlier version.
    #[serde(default)]
    pub(super) environment: Option<Environment>,
    /// Number of ranks.
    #[serde(default = "one_rank")]
    pub(crate) ranks: usize,
    /// Metrics of the last update that the model card shows.
    pub(crate) metrics: Map<String, Value>,
    /// Resumable state of each part of the run beside weights and optimizers, by the part's name.
    pub(crate) state: Map<String, Value>,
    /// Every setting.
    pub(crate) config: Map<String, Value>,
    /// The working directory of relative paths among them, if it is UTF-8.
    #[serde(default)]
    pub(crate) working_dir: Option<PathBuf>,
    /// Every other file with its size in bytes.
    pub(super) files: BTreeMap<String, u64>,
}

impl State {
    /// Returns the state of the run of `command` after `update` of `num_updates` updates, without that of its parts.
    pub(super) fn new(command: &str, update: usize, num_updates: usize, config: Map<String, Value>) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            command: command.into(),
            update,
            num_updates,
            threads: tch::get_num_threads(),
            environment: Some(Environment::of_process()),
            ranks: num_ranks(),
            metrics: Map::new(),
            state: Map::new(),
            config,
            // JSON has no paths but those in UTF-8.
            working_dir: std::env::current_dir().ok().filter(|dir| dir.to_str().is_some()),
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
    pub(in crate::run) fn read(path: &Path) -> Result<Self> {
        Self::of(path, read_json(path)?)
    }

    /// Returns the state of a run that the file `path` holds as JSON.
    ///
    /// # Errors
    /// As [`State::read`].
    pub(super) fn of(path: &Path, json: Value) -> Result<Self> {
        if json.get("log_history").is_some() && json.get("num_updates").is_none() {
            let message = "a checkpoint of transformers, whose optimizer rlhf does not read: expected one of rlhf; to train its model \
                           further, name the folder as the model to train, without resume_from_checkpoint";
            return Err(Error::invalid(path, message));
        }
        let state: Self = serde_json::from_value(json)
            .map_err(|e| Error::invalid(path, format!("expected the state of a run: {e}")))?;
        let (found, most) = (state.update, state.num_updates);
        if found > most {
            let message = format!("`update`: expected at most {most}, the run's updates, found {found}");
            return Err(Error::invalid(path, message));
        }
        Ok(state)
    }

    /// Reads the state in the folder `dir`, and checks that every file is there with its size.
    ///
    /// # Errors
    /// If it is no checkpoint, or incomplete.
    pub(super) fn read_complete(dir: &Path) -> Result<Self> {
        let path = dir.join(STATE);
        if !path.is_file() {
            let found = if dir.is_dir() { format!("no {STATE} in this folder") } else { "no such folder".into() };
            return Err(Error::invalid(dir, format!("expected a checkpoint of a run, found {found}")));
        }
        let state = Self::read(&path)?;
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
        Ok(state)
    }

    /// Returns whether all updates of the run are done.
    pub(in crate::run) fn is_finished(&self) -> bool {
        self.update == self.num_updates
    }

    /// Returns the value of the setting `name`, null if there is none.
    pub(crate) fn setting(&self, name: &str) -> &Value {
        self.config.get(name).unwrap_or(&Value::Null)
    }

    /// Returns the settings of the run; messages name the folder or the file `place` for them.
    pub(crate) fn settings<'a>(&'a self, place: &'a Path) -> EarlierSettings<'a> {
        EarlierSettings {
            place,
            version: &self.version,
            command: &self.command,
            ranks: self.ranks,
            config: &self.config,
            working_dir: self.working_dir.as_deref(),
            inputs: None,
        }
    }
}

/// Returns the number of ranks of a run whose checkpoint has none.
fn one_rank() -> usize {
    1
}

/// Resumable state of the parts of a run, by the part's name.
#[derive(Debug, Clone)]
pub(crate) struct PartStates<'a> {
    /// The file that has them, as errors name it.
    file: PathBuf,
    states: &'a Map<String, Value>,
}

impl<'a> PartStates<'a> {
    /// Returns the states in the file `file`.
    pub(super) fn in_file(file: PathBuf, states: &'a Map<String, Value>) -> Self {
        Self { file, states }
    }

    /// Returns states that are in no file.
    pub(crate) fn in_memory(states: &'a Map<String, Value>) -> Self {
        Self { file: STATE.into(), states }
    }

    /// Returns the state of the part `name`.
    ///
    /// # Errors
    /// If it has none.
    pub(crate) fn part(&self, name: &str) -> Result<&'a Value> {
        self.states
            .get(name)
            .ok_or_else(|| Error::invalid(&self.file, format!("expected the state of `{name}`, found none")))
    }

    /// Returns the state of the part `name` as a value.
    ///
    /// # Errors
    /// If it has none, or one of another type.
    pub(crate) fn parsed<T: for<'d> Deserialize<'d>>(&self, name: &str) -> Result<T> {
        serde_json::from_value(self.part(name)?.clone())
            .map_err(|e| Error::invalid(&self.file, format!("state of `{name}`: {e}")))
    }
}
