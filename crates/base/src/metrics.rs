//! Named scalars, in insertion order.

use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The metrics of one update.
///
/// ```
/// use rlhf_base::metrics::Metrics;
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

    /// Returns the value of the metric `name`, if there is one. A run without a critic logs some numbers only by the names of TRL's GRPO
    /// and RLOO trainers, such as `reward`. PPO's names work for them too, such as `objective/scores`.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.exact(name).or_else(|| self.exact(&name_of_groups(name)?))
    }

    fn exact(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(other, _)| other == name).map(|(_, value)| *value)
    }

    /// Removes the metrics `repeated`, and PPO's metrics that are also here by their names in GRPO and RLOO, so that no number is logged
    /// twice.
    pub fn without(mut self, repeated: &[&str]) -> Self {
        let is_repeated = |name: &str| {
            repeated.contains(&name) || name_of_groups(name).is_some_and(|second| self.exact(&second).is_some())
        };
        let kept: Vec<bool> = self.0.iter().map(|(name, _)| !is_repeated(name)).collect();
        let mut kept = kept.into_iter();
        self.0.retain(|_| kept.next().unwrap_or(true));
        self
    }

    /// Applies `change` to all values except counts.
    pub fn map(&self, change: impl Fn(f64) -> f64) -> Self {
        let changed = |(name, value): &(Cow<'static, str>, f64)| {
            let value = if COUNTS.contains(&name.as_ref()) { *value } else { change(*value) };
            (name.clone(), value)
        };
        Self(self.0.iter().map(changed).collect())
    }

    /// Replaces all values, in order.
    pub fn set_values(&mut self, values: &[f64]) {
        self.0.iter_mut().zip(values).for_each(|((_, value), new)| *value = *new);
    }

    /// Iterates over names and values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(name, value)| (name.as_ref(), *value))
    }
}

/// Metrics of PPO, each with the name that TRL's GRPO and RLOO trainers have for the same number.
const GROUP_TRAINER_NAMES: [(&str, &str); 7] = [
    ("objective/scores", "reward"),
    ("objective/scores_std", "reward_std"),
    ("policy/entropy_avg", "entropy"),
    ("policy/entropy_coef", "entropy_coef"),
    ("policy/grad_norm", "grad_norm"),
    ("val/response_length", "completions/mean_length"),
    ("time/update", "step_time"),
];

/// Beginnings of PPO's metrics of one reward, whose name follows. In GRPO and RLOO these metrics begin with `rewards/` and have these ends.
const REWARD_NAMES: [(&str, &str); 2] = [("objective/scores/", "/mean"), ("objective/scores_std/", "/std")];

/// Returns the name that TRL's GRPO and RLOO trainers have for PPO's metric `name`, if they have one.
pub fn name_of_groups(name: &str) -> Option<Cow<'static, str>> {
    let reward_name = |(start, end): &(&str, &str)| Some(format!("rewards/{}{end}", name.strip_prefix(start)?).into());
    let known = GROUP_TRAINER_NAMES.iter().find(|(first, _)| *first == name).map(|(_, second)| Cow::Borrowed(*second));
    known.or_else(|| REWARD_NAMES.iter().find_map(reward_name))
}

/// Returns PPO's name of the metric that TRL's GRPO and RLOO trainers call `name`, if it has one.
pub fn name_of_ppo(name: &str) -> Option<Cow<'static, str>> {
    let reward_name = |(start, end): &(&str, &str)| {
        Some(format!("{start}{}", name.strip_prefix("rewards/")?.strip_suffix(end)?).into())
    };
    let known = GROUP_TRAINER_NAMES.iter().find(|(_, second)| *second == name).map(|(first, _)| Cow::Borrowed(*first));
    known.or_else(|| REWARD_NAMES.iter().find_map(reward_name))
}

/// Returns true for metrics that measure time, which differ from run to run.
pub fn is_clock(name: &str) -> bool {
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

/// Kinds of [`Warning`], the alarms of a run; `docs/guides/alarms.md` lists when each is raised.
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
    /// The log-probabilities of sampling and of training differ by more than rounding; once in a run.
    SamplingMismatch,
    /// The policy has stopped calling its tools, and the score is not at its best; once in a run.
    NoCalls,
    /// More than half of the calls of tools fail, in 5 updates in a row, and not fewer and fewer of them; once in a run.
    FailingCalls,
    /// The environments of more than a tenth of the responses of 3 updates failed; once in a run.
    FailingEnvironments,
    /// More than half of the responses with an environment end in the middle of a turn or with a call that has no result, in 3 updates in a
    /// row; once in a run.
    CutEpisodes,
    /// Optimizer steps of an update were skipped because a loss or a gradient was not finite.
    SkippedSteps,
}

impl WarningKind {
    /// All kinds, in the order of the documentation.
    pub const ALL: [Self; 19] = [
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
        Self::SamplingMismatch,
        Self::NoCalls,
        Self::FailingCalls,
        Self::FailingEnvironments,
        Self::CutEpisodes,
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
            Self::SamplingMismatch => "sampling_mismatch",
            Self::NoCalls => "no_calls",
            Self::FailingCalls => "failing_calls",
            Self::FailingEnvironments => "failing_environments",
            Self::CutEpisodes => "cut_episodes",
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
    fn a_number_of_groups_is_logged_once_and_found_by_both_names() {
        let mut metrics = Metrics::default();
        for (at, name) in
            ["objective/scores", "reward", "objective/scores/f", "rewards/f/mean", "lr", "x"].iter().enumerate()
        {
            metrics.push(*name, at as f64);
        }
        let logged = metrics.clone().without(&["x"]);
        assert_eq!(logged.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["reward", "rewards/f/mean", "lr"]);
        assert_eq!([logged.get("objective/scores"), logged.get("objective/scores/f")], [Some(1.0), Some(3.0)]);
        assert_eq!([logged.get("reward"), logged.get("objective/scores_std/f")], [Some(1.0), None]);
        assert_eq!(metrics.get("objective/scores"), Some(0.0));
        for name in ["objective/scores", "time/update", "objective/scores/a/b", "objective/scores_std/f"] {
            assert_eq!(name_of_ppo(&name_of_groups(name).unwrap()).as_deref(), Some(name));
        }
        assert_eq!([name_of_groups("lr"), name_of_ppo("loss"), name_of_ppo("rewards/f/max")], [None, None, None]);
    }

    #[test]
    fn the_name_of_an_alarm_is_the_same_everywhere() {
        for kind in WarningKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }
}
