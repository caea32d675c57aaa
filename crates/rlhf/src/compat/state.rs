//! The folder with the state of a loop: models, optimizers, and `trainer_state.json` with everything else.

use crate::rl::learner::Learner;
use crate::run::checkpoint::{OPTIMIZER, STATE, commit_among_others, parts_of, read_parts};
use crate::train::ppo::VALUE_MODEL;
use rlhf_base::weights::{pretty, read_json, write_text};
use rlhf_base::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// The state of every loop in its folder, in addition to the state of its `kind`.
#[derive(Debug, Serialize, Deserialize)]
struct LoopState {
    kind: String,
    /// The version of rlhf that wrote it.
    version: String,
    micro_batch_tokens: usize,
}

/// Writes the folder `dir`: the models by `write_models`, the optimizers, and `state` of a loop of this `kind`. The folder appears by
/// one rename; until then an older folder of this name stays whole.
///
/// # Errors
/// If a file cannot be written; if `dir` is no name of a folder, or one that holds something else.
pub(super) fn save(
    learner: &Learner,
    dir: &Path,
    (kind, state): (&str, &impl Serialize),
    write_models: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let name = dir.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| Error::invalid(dir, "expected the name of a folder for the state, found none"))?;
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if dir.exists() && !dir.is_dir() {
        return Err(Error::invalid(dir, "expected a folder for the state, or none yet, found a file"));
    }
    // A checkpoint of a run has a file of this name too, with other content.
    let is_state = || read_json(&dir.join(STATE)).is_ok_and(|state| state["kind"].is_string());
    if std::fs::read_dir(dir).is_ok_and(|mut files| files.next().is_some()) && !is_state() {
        return Err(Error::invalid(dir, "expected a new folder, or one of an earlier save_state, found other files"));
    }
    let micro_batch_tokens = learner.micro_batch_tokens;
    let common = LoopState { kind: kind.into(), version: env!("CARGO_PKG_VERSION").into(), micro_batch_tokens };
    let mut parts = parts_of(&common);
    parts.extend(parts_of(state));
    let state = Value::from(parts);
    learner.save_together(|| {
        std::fs::create_dir_all(parent).map_err(Error::io("create the folder", parent))?;
        commit_among_others(parent, name, |dir| {
            write_models(dir)?;
            learner.optimizers.policy.save(&dir.join(OPTIMIZER))?;
            let value_optimizer = learner.optimizers.value.as_ref();
            value_optimizer.map_or(Ok(()), |optimizer| optimizer.save(&dir.join(VALUE_MODEL).join(OPTIMIZER)))?;
            write_text(&dir.join(STATE), &pretty(&state))
        })
    })
}

/// Reads the state of a loop of this `kind` from the folder `dir`, with the models and optimizers of `learner`. The learner stays half
/// loaded until the caller has restored the rest of the state.
///
/// # Errors
/// If the folder holds no such state, or one that does not fit the models.
pub(super) fn load<S: DeserializeOwned>(learner: &mut Learner, dir: &Path, kind: &str) -> Result<S> {
    let path = dir.join(STATE);
    if !path.is_file() {
        return Err(Error::invalid(dir, format!("expected the folder of a save_state, found no {STATE} in it")));
    }
    let state = read_json(&path)?;
    if state["kind"] != kind {
        let message = format!("`kind`: expected the state of a loop of kind `{kind}`, found {}", state["kind"]);
        return Err(Error::invalid(&path, message));
    }
    let parts = match state {
        Value::Object(parts) => parts,
        _ => Map::new(),
    };
    let invalid = |e: serde_json::Error| Error::invalid(&path, format!("state of the loop: {e}"));
    let common: LoopState = read_parts(&parts).map_err(invalid)?;
    let state = read_parts(&parts).map_err(invalid)?;
    if !dir.join(OPTIMIZER).is_file() {
        return Err(Error::invalid(dir, format!("expected the file {OPTIMIZER}, found none: the state is not whole")));
    }
    learner.optimizers.is_half_loaded = true;
    learner.policy.load_trained(dir)?;
    learner.optimizers.policy.load(&dir.join(OPTIMIZER))?;
    let value_dir = dir.join(VALUE_MODEL);
    if let (Some(value), Some(optimizer)) = (learner.value.model_mut(), &mut learner.optimizers.value) {
        value.load_trained(&value_dir)?;
        optimizer.load(&value_dir.join(OPTIMIZER))?;
    }
    learner.micro_batch_tokens = common.micro_batch_tokens;
    learner.zero_grad();
    Ok(state)
}
