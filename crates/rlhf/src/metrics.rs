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

/// Returns true for metrics that measure time, which differ from run to run.
pub(crate) fn is_clock(name: &str) -> bool {
    ["eps", "step_time"].contains(&name) || name.starts_with("time/") || name.starts_with("tokens_per_second/")
}

/// Serializes to a JSON object. Counts are written as integers, and values that are not finite as null, as JSON has no
/// NaN or infinity.
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

/// Kinds of [`Warning`], the alarms of a run; `docs/guide.md` lists when each is raised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WarningKind {
    /// The KL to the reference has grown by more than 1 nat per token since the first update; once in a run.
    RunawayKl,
    /// The policy's entropy is below 0.05 nats per token while the score is not at its best; once in a run.
    LowEntropy,
    /// Responses have grown by more than 80 % of the difference between their first length and the maximum; once in a run.
    LengthLimit,
    /// At least 100 responses in a row did not end by a stop token though there is one; once in a run.
    NoStop,
    /// Half as many responses end by a stop token as at first; once in a run.
    FewerStops,
    /// Responses to different prompts are the same, or made of the same pairs of tokens; once in a run.
    AlikeResponses,
    /// Most responses of a rollout continue after an eos token, which is no stop token of this run; once in a run.
    IgnoredEos,
    /// All responses of an update were shorter than `min_response_length`, so earlier ones were trained on again.
    ReusedResponses,
    /// Scores do not tell responses apart: all are equal, in the groups of 64 prompts in a row or in 256 responses in a row, those of
    /// one reward have been equal since the start, or their deviation is below 1 % of the first update's; once in a run.
    EqualScores,
    /// No reward gave a response a score; once in a run.
    Unscored,
    /// The critic's values explain less than a constant in 10 updates in a row; once in a run.
    NegativeExplainedVariance,
    /// More than half of the tokens are clipped, in 3 updates in a row; once in a run.
    HighClipShare,
    /// The norm of a gradient is more than 10 times its running median; once in a run.
    GradientLeap,
    /// Optimizer steps of an update were skipped because a loss or a gradient was not finite.
    SkippedSteps,
}

impl WarningKind {
    /// All kinds, in the order of the documentation.
    pub const ALL: [Self; 14] = [
        Self::RunawayKl,
        Self::LowEntropy,
        Self::LengthLimit,
        Self::NoStop,
        Self::FewerStops,
        Self::AlikeResponses,
        Self::IgnoredEos,
        Self::ReusedResponses,
        Self::EqualScores,
        Self::Unscored,
        Self::NegativeExplainedVariance,
        Self::HighClipShare,
        Self::GradientLeap,
        Self::SkippedSteps,
    ];

    /// Returns the name of the alarm, as `on_alarm` and `alarms.jsonl` have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::RunawayKl => "runaway_kl",
            Self::LowEntropy => "low_entropy",
            Self::LengthLimit => "length_limit",
            Self::NoStop => "no_stop",
            Self::FewerStops => "fewer_stops",
            Self::AlikeResponses => "alike_responses",
            Self::IgnoredEos => "ignored_eos",
            Self::ReusedResponses => "reused_responses",
            Self::EqualScores => "equal_scores",
            Self::Unscored => "unscored",
            Self::NegativeExplainedVariance => "negative_explained_variance",
            Self::HighClipShare => "high_clip_share",
            Self::GradientLeap => "gradient_leap",
            Self::SkippedSteps => "skipped_steps",
        }
    }
}

/// A sign in an update that the run goes wrong; it does not stop the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The kind.
    pub kind: WarningKind,
    /// One line of text.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_an_alarm_is_the_same_everywhere() {
        for kind in WarningKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }
}
