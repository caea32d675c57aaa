//! Comparison of a replayed update with the run: metrics, state, and the tensors of the checkpoint after it.
//!
//! A replay on as many ranks as the run is compared bit by bit. On another number of ranks sums are rounded in another order: then numbers,
//! and the moments of the optimizers as whole tensors, may differ by a share of their size. Moments are sums of gradients, so they are
//! compared. Weights are only reported: AdamW turns a gradient that is nothing but rounding into a step of full size.

use crate::rl::sampling::SAMPLING_METRICS;
use crate::run::checkpoint::Saved;
use crate::tool_loop::ENVIRONMENT_METRICS;
use rlhf_base::metrics::{Metrics, is_clock};
use rlhf_base::weights::Checkpoint;
use rlhf_base::{Error, Result};
use rlhf_lm::optim::norm;
use serde_json::{Map, Value, json};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// Parts of the resumable state that an update changes, in the run and in a replay. A replay takes no prompts and computes no reward.
const STATE: [&str; 6] = ["kl_controller", "entropy_controller", "scores", "loss_scale", "unsupervised", "num_tokens"];

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

/// The largest difference that still counts as equal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Bound {
    /// Every bit is equal.
    Bits,
    /// Numbers and moments differ by at most this share of their size.
    Rounding(f64),
}

/// Least size that a number is taken to have in comparisons; for the norm of a tensor, as a share of the typical size of its group's
/// numbers.
const LEAST_SIZE: f64 = 0.01;

impl Bound {
    /// The bound for sums in another order, with products in `low_precision` or in f32.
    pub(super) fn rounding(low_precision: bool) -> Self {
        Self::Rounding(if low_precision { 0.1 } else { 1e-3 })
    }

    /// Returns whether two JSON values are equal but for rounding in their numbers.
    fn holds(self, a: &Value, b: &Value) -> bool {
        let Self::Rounding(most) = self else { return a == b };
        match (a, b) {
            (Value::Number(a), Value::Number(b)) => {
                let a = a.as_f64().unwrap_or(f64::NAN);
                let b = b.as_f64().unwrap_or(f64::NAN);
                a == b || (a - b).abs() <= most * a.abs().max(b.abs()).max(LEAST_SIZE)
            }
            (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.holds(a, b)),
            (Value::Object(a), Value::Object(b)) => {
                a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| self.holds(a, b)))
            }
            _ => a == b,
        }
    }
}

/// Compares the metrics of a replay with the run's line.
pub(super) fn metrics(line: &Map<String, Value>, replayed: &Metrics, bound: Bound) -> ComparedMetrics {
    let replayed = match json!(replayed) {
        Value::Object(replayed) => replayed,
        _ => Map::new(),
    };
    // An environment is not played again, so it gives no metrics.
    let is_from_environment = |name: &str| name.starts_with(ENVIRONMENT_METRICS) || name == "env_failure_frequency";
    let is_missing = |name: &str| name.starts_with("eval/") && !replayed.contains_key(name);
    // Rollout files have the log-probabilities of the update, not those that sampling recorded.
    let is_from_sampling = |name: &str| SAMPLING_METRICS.iter().any(|beginning| name.starts_with(beginning));
    let is_compared =
        |name: &&String| !is_clock(name) && !is_from_environment(name) && !is_from_sampling(name) && !is_missing(name);
    let others = line.keys().filter(|name| !replayed.contains_key(*name));
    let names: Vec<&String> = replayed.keys().chain(others).filter(is_compared).collect();
    let number = |values: &Map<String, Value>, name: &str| values.get(name).and_then(Value::as_f64);
    let all = names.iter().map(|name| Differing {
        name: name.as_str().to_owned(),
        run: number(line, name),
        replayed: number(&replayed, name),
    });
    let is_equal = |name: &str| match (line.get(name), replayed.get(name)) {
        (Some(then), Some(now)) => bound.holds(then, now),
        (then, now) => then == now,
    };
    let differing = names.iter().filter(|name| !is_equal(name)).map(|name| name.as_str().to_owned());
    ComparedMetrics { all: all.collect(), differing: differing.collect() }
}

/// Tensors and state after an update, in the run and in the replay.
#[derive(Debug, Default)]
pub(super) struct ComparedState {
    /// Number of tensors in the run's checkpoint.
    pub(super) tensors: usize,
    /// The largest difference of a tensor, as a share of its norm.
    pub(super) largest: f64,
    /// Descriptions of the parts that differ, tensors first.
    pub(super) differing: Vec<String>,
}

/// Compares the `state` and the tensors in `dir` of a replay with the run's checkpoint.
///
/// # Errors
/// If a file cannot be read.
pub(super) fn checkpoint(saved: &Saved, state: &Map<String, Value>, dir: &Path, bound: Bound) -> Result<ComparedState> {
    let run_files = Files::of(&saved.dir)?;
    let replay_files = Files::of(dir)?;
    let mut compared = ComparedState { tensors: run_files.tensors.len(), ..ComparedState::default() };
    let sizes = if bound == Bound::Bits { BTreeMap::new() } else { run_files.sizes()? };
    for name in run_files.tensors.keys() {
        let then = run_files.read(name)?;
        let now = replay_files.read(name)?;
        let Some(then) = then else { continue };
        let Some(now) = now else {
            compared.differing.push(format!("tensor `{name}`: not in the replay"));
            continue;
        };
        let difference = match bound {
            Bound::Rounding(most) if then.size() == now.size() => {
                let size = sizes.get(&group(name)).copied().unwrap_or(0.0) * (then.numel() as f64).sqrt();
                let change = then.to_kind(Kind::Double) - now.to_kind(Kind::Double);
                let share = norm([&change]) / norm([&then]).max(LEAST_SIZE * size).max(f64::MIN_POSITIVE);
                compared.largest = compared.largest.max(share);
                (name.contains(OPTIMIZER_MARK) && share.partial_cmp(&most).is_none_or(Ordering::is_gt))
                    .then(|| format!("tensor `{name}`: differs by {share:.1e} of its norm"))
            }
            _ => describe_difference(name, &then, &now),
        };
        compared.differing.extend(difference);
    }
    for name in STATE {
        let then = saved.part(name).ok();
        let now = state.get(name);
        if let (Some(then), Some(now)) = (then, now)
            && !bound.holds(then, now)
        {
            compared.differing.push(format!("state `{name}`: {now}, and {then} in the run"));
        }
    }
    Ok(compared)
}

/// The group of a tensor, whose numbers have one typical size: the folder with the file, and the name of the moment.
fn group(name: &str) -> (String, String) {
    let file = name.rsplit_once(OPTIMIZER_MARK).map_or("", |(folder, _)| folder);
    let moment = if name.contains(OPTIMIZER_MARK) { name.rsplit('.').next().unwrap_or_default() } else { "" };
    (file.into(), moment.into())
}

/// Describes how two tensors differ, bit by bit.
fn describe_difference(name: &str, then: &Tensor, now: &Tensor) -> Option<String> {
    if then.kind() != now.kind() || then.size() != now.size() {
        let shown = |x: &Tensor| format!("{:?} {:?}", x.kind(), x.size());
        return Some(format!("tensor `{name}`: {}, and {} in the run", shown(now), shown(then)));
    }
    let bits = match then.kind() {
        Kind::Double => Kind::Int64,
        Kind::Float => Kind::Int,
        // Codes of an optimizer's quantized state.
        Kind::Uint8 => Kind::Uint8,
        _ => Kind::Int16,
    };
    let differ = then.view_dtype(bits).not_equal_tensor(&now.view_dtype(bits)).sum(Kind::Int64).int64_value(&[]);
    if differ == 0 {
        return None;
    }
    let most = (then.to_kind(Kind::Double) - now.to_kind(Kind::Double)).abs().max().double_value(&[]);
    Some(format!("tensor `{name}`: {differ} of {} numbers differ, by at most {most:e}", then.numel()))
}

/// The part of a tensor's name that marks the tensors of an optimizer.
const OPTIMIZER_MARK: &str = "optimizer: ";

/// The tensors of a checkpoint's folder by name: the inner folder, [`OPTIMIZER_MARK`] for an optimizer's state, and the name in the file.
struct Files {
    files: Vec<Checkpoint>,
    /// Index of the file, and the name of the tensor in it.
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
                let part = if name == crate::run::checkpoint::OPTIMIZER { OPTIMIZER_MARK } else { "" };
                let names: Vec<String> = file.names().map(String::from).collect();
                let at = self.files.len();
                self.tensors.extend(names.into_iter().map(|name| (format!("{prefix}{part}{name}"), (at, name))));
                self.files.push(file);
            }
        }
        Ok(())
    }

    /// The typical size of a number, by group.
    fn sizes(&self) -> Result<BTreeMap<(String, String), f64>> {
        let mut sums = BTreeMap::<(String, String), [f64; 2]>::new();
        for name in self.tensors.keys() {
            let Some(x) = self.read(name)? else { continue };
            let [squares, count] = sums.entry(group(name)).or_default();
            *squares += norm([&x]).powi(2);
            *count += x.numel() as f64;
        }
        Ok(sums.into_iter().map(|(group, [squares, count])| (group, (squares / count.max(1.0)).sqrt())).collect())
    }

    fn read(&self, name: &str) -> Result<Option<Tensor>> {
        let Some((file, name)) = self.tensors.get(name) else { return Ok(None) };
        self.files[*file].read_stored(name, Device::Cpu).map(Some)
    }
}
