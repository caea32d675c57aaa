//! The content of `trainer_state.json`: the state of a run after an update, except weights and optimizers.

use super::STATE;
use super::changes::{EarlierSettings, settings};
use crate::run::environment::Environment;
use rlhf_base::dist::num_ranks;
use rlhf_base::weights::read_json;
use rlhf_base::{Error, Result};
use rlhf_hub::Commits;
use rlhf_lm::optim::micro_batch::MicroBatchState;
use serde::de::value::MapDeserializer;
use serde::de::{self, DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use serde::{Deserialize, Serialize, forward_to_deserialize_any};
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
    /// Number of threads of libtorch, on which sums depend.
    pub(crate) threads: i32,
    /// Variables of the environment on which results depend.
    pub(super) environment: Environment,
    /// Number of ranks.
    pub(crate) ranks: usize,
    /// Metrics of the last update that the model card shows.
    pub(crate) metrics: Map<String, Value>,
    /// Resumable state of each part of the run except weights and optimizers, by the part's name.
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
    /// Returns the state of the run of `command` after `update` of `num_updates` updates, without the states of its parts.
    pub(super) fn new(command: &str, update: usize, num_updates: usize, config: Map<String, Value>) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            command: command.into(),
            update,
            num_updates,
            threads: tch::get_num_threads(),
            environment: Environment::of_process(),
            ranks: num_ranks(),
            metrics: Map::new(),
            state: Map::new(),
            config,
            // JSON has only paths in UTF-8.
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

/// The part of a run's state that no update changes, the same type for every trainer.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct FixedState {
    /// The size of micro-batches.
    pub(crate) micro_batch: MicroBatchState,
    /// Commits that names on the hub stand for.
    pub(crate) commits: Commits,
    /// Digests of what the run reads.
    pub(crate) inputs: Value,
    /// Result of the sanity checks at the start, which PPO alone has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) checks: Option<String>,
    /// The callbacks that set the updates, if there are some; PPO alone has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) own: Option<String>,
}

/// Returns the parts of a serialized state by name.
pub(crate) fn parts_of(state: &impl Serialize) -> Map<String, Value> {
    match json!(state) {
        Value::Object(parts) => parts,
        _ => Map::new(),
    }
}

/// Reads a state whose fields are some of the `parts`; an error begins with the name of the part.
pub(crate) fn read_parts<'de, T: Deserialize<'de>>(parts: &'de Map<String, Value>) -> serde_json::Result<T> {
    T::deserialize(MapDeserializer::new(parts.iter().map(|(name, value)| (name.as_str(), NamedPart { name, value }))))
}

/// A part of a state, whose errors begin with its name.
#[derive(Clone, Copy)]
struct NamedPart<'a> {
    name: &'a str,
    value: &'a Value,
}

impl<'de> IntoDeserializer<'de, serde_json::Error> for NamedPart<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for NamedPart<'de> {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> serde_json::Result<V::Value> {
        let Self { name, value } = self;
        value.deserialize_any(visitor).map_err(|e| de::Error::custom(format_args!("`{name}`: {e}")))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> serde_json::Result<V::Value> {
        if self.value.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct seq tuple
        tuple_struct map struct enum identifier ignored_any
    }
}

/// Reads an optional part of a state: if it has another form, the default is returned.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(part: D) -> Result<T, D::Error> {
    Ok(serde_json::from_value(Value::deserialize(part)?).unwrap_or_default())
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

    /// Returns the state of the part `name`.
    ///
    /// # Errors
    /// If it has none.
    pub(crate) fn part(&self, name: &str) -> Result<&'a Value> {
        self.states
            .get(name)
            .ok_or_else(|| Error::invalid(&self.file, format!("expected the state of `{name}`, found none")))
    }

    /// Reads the state of a trainer, whose fields are some of the parts.
    ///
    /// # Errors
    /// If a part is missing, or of another type.
    pub(crate) fn read<T: Deserialize<'a>>(&self) -> Result<T> {
        read_parts(self.states).map_err(|e| Error::invalid(&self.file, format!("state of the run: {e}")))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Parts {
        count: usize,
        means: BTreeMap<String, f64>,
        place: Option<[usize; 2]>,
        #[serde(deserialize_with = "or_default")]
        alarms: Vec<String>,
    }

    fn read(parts: Value) -> std::result::Result<Parts, String> {
        let Value::Object(parts) = parts else { unreachable!() };
        read_parts(&parts).map_err(|error| error.to_string())
    }

    #[test]
    fn a_state_is_read_as_it_was_written_beside_the_parts_of_others() {
        let state = Parts {
            count: 3,
            means: BTreeMap::from([("a".into(), 0.1), ("b".into(), -2.5e-300)]),
            place: Some([1, 2]),
            alarms: vec!["x".into()],
        };
        let mut parts = parts_of(&state);
        parts.insert("best".into(), json!({"update": 2}));
        let text = serde_json::to_string(&parts).unwrap();
        assert_eq!(read(serde_json::from_str(&text).unwrap()).unwrap(), state);
        let least = read(json!({"count": 0, "means": {}, "alarms": null})).unwrap();
        assert_eq!(least, Parts { count: 0, means: BTreeMap::new(), place: None, alarms: Vec::new() });
    }

    #[test]
    fn an_error_names_the_part_of_a_state_that_is_missing_or_of_another_form() {
        for (parts, expected) in [
            (json!({"count": 1, "alarms": []}), "missing field `means`"),
            (json!({"count": -1, "means": {}, "alarms": []}), "`count`: invalid value: integer `-1`, expected usize"),
            (json!({"count": 1, "means": {"a": null}, "alarms": []}), "`means`: invalid type: null, expected f64"),
            (json!({"count": 1, "means": {}, "place": [1], "alarms": []}), "`place`: invalid length 1"),
        ] {
            let error = read(parts).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
