//! The scores of a run as the alarms see them: their spread, the best of them, and rewards that are constant.

use rlhf_base::metrics::Metrics;
use serde::{Deserialize, Serialize};

/// Consecutive responses of the same score after which a reward counts as constant; one that is above 0 for 2 % of the responses has
/// so many zeros in a row less than once in 100 times.
const EQUAL_RESPONSES: f64 = 256.0;

/// Share of the first deviation of the scores below which the reward is saturated, and the updates in a row for which it has to be.
const LEAST_SPREAD: f64 = 0.01;
const SATURATED_UPDATES: usize = 5;

/// Largest standard deviation of equal scores, which is rounding, relative to their mean.
const EQUAL_SPREAD: f64 = 1e-6;

/// Scores of the run so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Scores {
    /// Mean and standard deviation in the first update.
    first: Option<[f64; 2]>,
    /// The highest mean of an update.
    best: Option<f64>,
    /// The first deviation above 0.
    spread: Option<f64>,
    /// The largest deviation of an update.
    widest: f64,
    /// Consecutive updates whose deviation is a small part of `spread`.
    saturated: usize,
    /// Consecutive responses of updates without any deviation.
    equal: f64,
    /// Rewards that have not been constant since the start.
    varied: Vec<String>,
    /// Responses that each reward has scored so far, in updates of two and more.
    scored: Vec<(String, f64)>,
}

impl Scores {
    /// Records the scores of an update.
    pub(super) fn observe(&mut self, mean: f64, std: f64, rows: f64) {
        self.first.get_or_insert([mean, std]);
        self.best = Some(self.best.map_or(mean, |best| best.max(mean)));
        self.widest = self.widest.max(std);
        // A single response has no deviation.
        if rows < 2.0 {
            return;
        }
        if std > EQUAL_SPREAD * mean.abs().max(1.0) {
            let spread = *self.spread.get_or_insert(std);
            self.saturated = if std < LEAST_SPREAD * spread { self.saturated + 1 } else { 0 };
            self.equal = 0.0;
        } else {
            self.saturated = if self.spread.is_some() { self.saturated + 1 } else { 0 };
            self.equal += rows;
        }
    }

    /// Returns whether the policy has learned its task: the mean `score` is above the first update's by at least its standard deviation,
    /// and at most half of the largest standard deviation below the best mean. Few responses are left to choose from then.
    ///
    /// The best is compared by the largest deviation: where few of the first responses have a reward of 1 and the others 0, the first
    /// deviation is small, and later means differ by more than it by chance.
    pub(super) fn solved(&self, score: f64) -> bool {
        let risen = self.first.is_some_and(|[mean, std]| score >= mean + std);
        risen && self.best.is_some_and(|best| score >= best - self.widest / 2.0)
    }

    /// Returns whether the scores of the last update had no spread, or a small one.
    pub(super) fn narrow(&self) -> bool {
        self.equal > 0.0 || self.saturated > 0
    }

    /// Describes scores that have had no spread for long; `score` is their latest mean.
    pub(super) fn no_spread(&self, score: f64) -> Option<String> {
        let Self { equal, saturated, .. } = self;
        if *equal >= EQUAL_RESPONSES {
            return Some(format!("the last {equal} responses have the same score in each update, {score} of late"));
        }
        let percent = 100.0 * LEAST_SPREAD;
        (*saturated >= SATURATED_UPDATES).then(|| {
            format!(
                "the scores of the last {saturated} updates deviate by less than {percent} % of the first deviation"
            )
        })
    }

    /// Records the scores of each reward in an update of `rows` responses. If there are several rewards and one of them has given every
    /// response of the run the same score, returns a description.
    pub(super) fn observe_rewards(&mut self, metrics: &Metrics, rows: f64) -> Option<String> {
        let rewards: Vec<(&str, f64)> =
            metrics.iter().filter_map(|(name, std)| Some((name.strip_prefix("objective/scores_std/")?, std))).collect();
        for &(name, std) in &rewards {
            // A reward may give no score to some responses, such as the reward of one environment to responses that played another.
            let scored = rows - metrics.get(&format!("reward/{name}/absent")).unwrap_or(0.0);
            if scored < 2.0 {
                continue;
            }
            match self.scored.iter_mut().find(|(known, _)| known == name) {
                Some((_, responses)) => *responses += scored,
                None => self.scored.push((name.into(), scored)),
            }
            if (std.is_nan() || std.abs() > EQUAL_SPREAD) && !self.varied.iter().any(|varied| varied == name) {
                self.varied.push(name.into());
            }
        }
        if rewards.len() < 2 {
            return None;
        }
        let constant = |name: &str| !self.varied.iter().any(|varied| varied == name);
        let (name, responses) =
            self.scored.iter().find(|(name, responses)| *responses >= EQUAL_RESPONSES && constant(name))?;
        let score = metrics.get(&format!("objective/scores/{name}")).filter(|score| score.is_finite());
        let last_score = score.map_or(String::new(), |score| format!(", {score} of late"));
        Some(format!(
            "the reward `{name}` has given all responses of each update the same score{last_score}, in {responses} responses"
        ))
    }
}
