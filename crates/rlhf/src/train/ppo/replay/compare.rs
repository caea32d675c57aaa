//! Comparison of a replayed update with the run: metrics, state, and the tensors of the checkpoint after it.

use crate::metrics::{Metrics, is_clock};
use crate::run::checkpoint::Saved;
use crate::weights::Checkpoint;
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// Parts of the resumable state that an update changes and a replay does too. Prompts are not taken, and no reward is computed.
const STATE: [&str; 5] = ["kl_controller", "scores", "loss_scale", "unsupervised", "num_tokens"];

/// A metric in the run and in its replay; `None` where it is not finite or not there.
#[derive(Debug, Clone, PartialEq)]
pub struct Differing {
    /// Name of the metric.
    pub name: String,
    /// Its value in the run.
    pub run: Option<f64>,
    /// Its value in the replay.
    pub replayed: Option<f64>,
}

/// Metrics of an update in the run and in the replay, without times and evaluations.
#[derive(Debug)]
pub(super) struct ComparedMetrics {
    /// All of them, in the order of the replay.
    pub(super) all: Vec<Differing>,
    /// Names of those that differ.
    pub(super) differing: Vec<String>,
}

/// Compares the metrics of a replay with the run's line.
pub(super) fn metrics(line: &Map<String, Value>, replayed: &Metrics) -> ComparedMetrics {
    let replayed = match json!(replayed) {
        Value::Object(replayed) => replayed,
        _ => Map::new(),
    };
    let is_compared = |name: &&String| !is_clock(name) && (!name.starts_with("eval/") || replayed.contains_key(*name));
    let others = line.keys().filter(|name| !replayed.contains_key(*name));
    let names: Vec<&String> = replayed.keys().chain(others).filter(is_compared).collect();
    let number = |values: &Map<String, Value>, name: &str| values.get(name).and_then(Value::as_f64);
    let all = names.iter().map(|name| Differing {
        name: name.as_str().to_owned(),
        run: number(line, name),
        replayed: number(&replayed, name),
    });
    let differing =
        names.iter().filter(|name| line.get(**name) != replayed.get(**name)).map(|name| name.as_str().to_owned());
    ComparedMetrics { all: all.collect(), differing: differing.collect() }
}

/// Tensors and state after an update, in the run and in the replay.
#[derive(Debug, Default)]
pub(super) struct ComparedState {
    /// Number of tensors in the run's checkpoint.
    pub(super) tensors: usize,
    /// Descriptions of the parts that differ, tensors first.
    pub(super) differing: Vec<String>,
}

/// Compares the `state` and the tensors in `dir` of a replay with the run's checkpoint.
///
/// # Errors
/// If a file cannot be read.
pub(super) fn checkpoint(saved: &Saved, state: &Map<String, Value>, dir: &Path) -> Result<ComparedState> {
    let (theirs, ours) = (Files::of(&saved.dir)?, Files::of(dir)?);
    let mut compared = ComparedState { tensors: theirs.tensors.len(), ..ComparedState::default() };
    for name in theirs.tensors.keys() {
        match ours.read(name)? {
            None => compared.differing.push(format!("tensor `{name}`: not in the replay")),
            Some(ours) => {
                compared.differing.extend(theirs.read(name)?.and_then(|theirs| difference(name, &theirs, &ours)));
            }
        }
    }
    for name in STATE {
        let (then, now) = (saved.part(name).ok(), state.get(name));
        if let (Some(then), Some(now)) = (then, now)
            && then != now
        {
            compared.differing.push(format!("state `{name}`: {now}, and {then} in the run"));
        }
    }
    Ok(compared)
}

/// Describes how two tensors differ, bit by bit.
fn difference(name: &str, theirs: &Tensor, ours: &Tensor) -> Option<String> {
    if theirs.kind() != ours.kind() || theirs.size() != ours.size() {
        let shown = |x: &Tensor| format!("{:?} {:?}", x.kind(), x.size());
        return Some(format!("tensor `{name}`: {}, and {} in the run", shown(ours), shown(theirs)));
    }
    let bits = match theirs.kind() {
        Kind::Double => Kind::Int64,
        Kind::Float => Kind::Int,
        _ => Kind::Int16,
    };
    let differ = theirs.view_dtype(bits).not_equal_tensor(&ours.view_dtype(bits)).sum(Kind::Int64).int64_value(&[]);
    if differ == 0 {
        return None;
    }
    let most = (theirs.to_kind(Kind::Double) - ours.to_kind(Kind::Double)).abs().max().double_value(&[]);
    Some(format!("tensor `{name}`: {differ} of {} numbers differ, by at most {most:e}", theirs.numel()))
}

/// The tensors of a checkpoint's folder by name, with the name of the inner folder and of the optimizer in front.
struct Files {
    files: Vec<Checkpoint>,
    /// File and name in it.
    tensors: BTreeMap<String, (usize, String)>,
}

impl Files {
    fn of(dir: &Path) -> Result<Self> {
        let mut files = Self { files: Vec::new(), tensors: BTreeMap::new() };
        files.add(dir, "")?;
        Ok(files)
    }

    fn add(&mut self, dir: &Path, prefix: &str) -> Result<()> {
        for entry in std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
            let path = entry.map_err(Error::io("read the folder", dir))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                self.add(&path, &format!("{prefix}{name}/"))?;
            } else if name.ends_with(".safetensors") {
                let file = Checkpoint::open_file(&path)?;
                let part = if name == crate::run::checkpoint::OPTIMIZER { "optimizer: " } else { "" };
                let names: Vec<String> = file.names().map(String::from).collect();
                let at = self.files.len();
                self.tensors.extend(names.into_iter().map(|name| (format!("{prefix}{part}{name}"), (at, name))));
                self.files.push(file);
            }
        }
        Ok(())
    }

    fn read(&self, name: &str) -> Result<Option<Tensor>> {
        let Some((file, name)) = self.tensors.get(name) else { return Ok(None) };
        let file = &self.files[*file];
        let kind = file.kind_of(name).unwrap_or(Kind::Float);
        file.read(name, Device::Cpu, kind).map(Some)
    }
}
