//! Named scalars, in insertion order.

use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The metrics of one update.
///
/// ```
/// use rlhf::metrics::Metrics;
///
/// let mut metrics = Metrics::default();
/// metrics.push("objective/kl", 0.5);
/// assert_eq!(metrics.get("objective/kl"), Some(0.5));
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics(Vec<(Cow<'static, str>, f64)>);

impl Metrics {
    /// Appends a metric.
    pub fn push(&mut self, name: impl Into<Cow<'static, str>>, value: f64) {
        self.0.push((name.into(), value));
    }

    /// Appends the metrics of `other`.
    pub fn extend(&mut self, other: &Metrics) {
        self.0.extend_from_slice(&other.0);
    }

    /// Returns the value of the metric `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, value)| *value)
    }

    /// Applies `change` to all values except counts.
    pub(crate) fn map(&self, change: impl Fn(f64) -> f64) -> Self {
        let changed = |(name, value): &(Cow<'static, str>, f64)| {
            let value = if COUNTS.contains(&name.as_ref()) { *value } else { change(*value) };
            (name.clone(), value)
        };
        Self(self.0.iter().map(changed).collect())
    }

    /// Replaces all values, in order.
    pub(crate) fn set_values(&mut self, values: &[f64]) {
        self.0.iter_mut().zip(values).for_each(|((_, value), new)| *value = *new);
    }

    /// Iterates over names and values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(name, value)| (name.as_ref(), *value))
    }
}

/// Serializes to a JSON object. Counts are written as integers, and values that are not finite as null, as JSON has no
/// NaN or
/// infinity.
impl Serialize for Metrics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            if value.fract() == 0.0 && value.abs() < 1e15 && COUNTS.contains(&name.as_ref()) {
                map.serialize_entry(name, &(*value as i64))?;
            } else {
                map.serialize_entry(name, value)?;
            }
        }
        map.end()
    }
}

/// Metrics that are counts.
const COUNTS: [&str; 9] = [
    "episode",
    "step",
    "val/num_eos_tokens",
    "val/skipped_steps",
    "num_tokens",
    "policy/epochs",
    "policy/skipped_steps",
    "val/dropped_responses",
    "val/reused_responses",
];

/// Kinds of [`Warning`]; `docs/library.md` lists when each is issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WarningKind {
    /// The KL to the reference has grown by more than 1 nat per token since the first update; once in a run.
    RunawayKl,
    /// The policy's entropy is below 0.05 nats per token; once in a run.
    LowEntropy,
    /// At least 100 responses in a row did not end by a stop token though there is one; once in a run.
    NoStop,
    /// Most responses of a rollout continue after an eos token, which is no stop token of this run; once in a run.
    IgnoredEos,
    /// All responses of an update were shorter than `min_response_length`, so earlier ones were trained on again.
    ReusedResponses,
    /// All responses of each of 64 prompts in a row had the same score; once in a run.
    EqualScores,
    /// No reward gave a response a score; once in a run.
    Unscored,
    /// Optimizer steps of an update were skipped because a loss or a gradient was not finite.
    SkippedSteps,
}

/// A sign in an update that the run goes wrong; it does not stop the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The kind.
    pub kind: WarningKind,
    /// One line of text.
    pub message: String,
}
