//! Groups of responses to one prompt: which of them teach something, and the penalty for long responses.

use crate::rl::math;
use rlhf_base::metrics::Metrics;
use rlhf_base::name_of;
use rlhf_base::schema::{
    ADVANTAGES, MOST_ROWS, REWARDS, Refusals, Settings, at_least_one, defaults, expect, no_effect, refuse, zero_or_more,
};
use rlhf_base::{Error, Result};
use rlhf_lm::generate::{FinishReason, Response};
use serde::{Deserialize, Serialize};

/// Groups that are sampled anew, and the penalty for long responses.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct GroupFilterConfig {
    /// Replace groups whose scores are all equal, from which nothing is learned, by groups of the next prompts (dynamic sampling, DAPO).
    #[setting(alias = "filter_groups", heading = ADVANTAGES, replay = Sampling)]
    pub dynamic_sampling: bool,
    /// Replace groups whose mean score is not between these two numbers, LOW,HIGH (OpenRLHF's dynamic filtering).
    #[setting(heading = ADVANTAGES, delimiter = ',', several, replay = Sampling)]
    pub dynamic_filtering_reward_range: Vec<f64>,
    /// Maximum batches of responses that an update samples for `dynamic_sampling` or `dynamic_filtering_reward_range`; groups that are
    /// still missing then are taken from those that were replaced.
    #[setting(heading = ADVANTAGES, default = 10, replay = Sampling, most = MOST_ROWS)]
    pub max_num_gen_batches: usize,
    /// Last tokens of `response_length` in which a response is penalized, by its length up to `overlong_penalty_factor` (soft overlong
    /// penalty, DAPO).
    #[setting(heading = REWARDS, replay = Changes)]
    pub overlong_buffer_len: Option<usize>,
    /// Penalty of a response of `response_length` tokens, with `overlong_buffer_len`.
    #[setting(heading = REWARDS, default = 1.0, replay = Changes)]
    pub overlong_penalty_factor: f64,
}

impl GroupFilterConfig {
    /// Returns true if groups are sampled anew.
    pub fn filters(&self) -> bool {
        self.dynamic_sampling || !self.dynamic_filtering_reward_range.is_empty()
    }

    /// Checks the settings, for groups of `rows` responses of at most `response_length` tokens.
    pub(crate) fn check(&self, rows: usize, response_length: usize) -> Result<()> {
        let usual: Self = defaults();
        let mut refusals = Refusals::default();
        if self.filters() && rows < 2 {
            let name = if self.dynamic_sampling { "dynamic_sampling" } else { "dynamic_filtering_reward_range" };
            refusals.add(refuse(
                "num_generations",
                format!(" = {rows}: expected at least 2: {name} compares the responses of a group"),
            ))?;
        }
        let range = &self.dynamic_filtering_reward_range;
        if !range.is_empty() {
            let sound = matches!(range[..], [low, high] if low < high);
            let found = range.iter().map(f64::to_string).collect::<Vec<_>>().join(",");
            refusals.add(expect(
                sound,
                name_of!(self.dynamic_filtering_reward_range),
                found,
                "two numbers LOW,HIGH, the first below the second",
            ))?;
        }
        if !self.filters() && self.max_num_gen_batches != usual.max_num_gen_batches {
            let why = "without dynamic_sampling or dynamic_filtering_reward_range";
            refusals.add(no_effect(name_of!(self.max_num_gen_batches), self.max_num_gen_batches, why))?;
        }
        refusals.add(at_least_one(name_of!(self.max_num_gen_batches), self.max_num_gen_batches))?;
        match self.overlong_buffer_len {
            Some(len) => {
                let expected = format!("1 to response_length = {response_length}");
                refusals.add(expect(
                    (1..=response_length).contains(&len),
                    name_of!(self.overlong_buffer_len),
                    len,
                    &expected,
                ))?;
            }
            None if self.overlong_penalty_factor != usual.overlong_penalty_factor => {
                let found = self.overlong_penalty_factor;
                refusals.add(no_effect(
                    name_of!(self.overlong_penalty_factor),
                    found,
                    "without overlong_buffer_len",
                ))?;
            }
            None => {}
        }
        refusals.add(zero_or_more(name_of!(self.overlong_penalty_factor), self.overlong_penalty_factor))?;
        refusals.end()
    }

    /// Returns the penalty for long responses of at most `response_length` tokens, if there is one.
    pub(crate) fn overlong(&self, response_length: usize) -> Option<Overlong> {
        let factor = self.overlong_penalty_factor;
        self.overlong_buffer_len.map(|buffer| Overlong { response_length, buffer, factor })
    }

    /// Returns true if a group with these scores teaches something; NaN is no score.
    pub(crate) fn keeps(&self, scores: &[f64]) -> bool {
        let known: Vec<f64> = scores.iter().copied().filter(|score| !score.is_nan()).collect();
        let differ = known.iter().any(|score| (score - known[0]).abs() > 1e-9);
        let mean = math::mean(&known);
        let within = match self.dynamic_filtering_reward_range[..] {
            [low, high] => low < mean && mean < high,
            _ => true,
        };
        (differ || !self.dynamic_sampling) && within
    }
}

/// The penalty for long responses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Overlong {
    /// Most tokens of a response.
    pub(crate) response_length: usize,
    /// Number of the last of these tokens, in which a response is penalized.
    pub(crate) buffer: usize,
    /// Penalty of a response of `response_length` tokens.
    pub(crate) factor: f64,
}

impl Overlong {
    /// The penalty of a response for its length: 0 up to `response_length` - `buffer` tokens, then growing linearly. Source: Yu et al.
    /// 2025, DAPO, eq. 13.
    pub(crate) fn penalty(&self, response: &Response) -> f64 {
        let over = (response.tokens.len() + self.buffer).saturating_sub(self.response_length) as f64;
        (over / self.buffer as f64).min(1.0) * self.factor
    }
}

/// The run warns after this many groups in a row with equal scores.
const EQUAL_GROUPS: usize = 64;

/// Counts groups from which nothing is learned, to warn once.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EqualGroups {
    in_a_row: usize,
}

impl EqualGroups {
    /// Records the scores of groups of `size` rows; returns a message about update `update`, counted from 1, when too many groups in a row
    /// had equal scores.
    pub(crate) fn observe(&mut self, update: usize, scores: &[f64], size: usize) -> Option<String> {
        let before = self.in_a_row;
        for group in scores.chunks(size.max(1)) {
            let mut known = group.iter().filter(|score| !score.is_nan());
            let first = known.next().copied().unwrap_or(f64::NAN);
            let equal = known.all(|score| (score - first).abs() <= 1e-9);
            self.in_a_row = if equal { self.in_a_row + 1 } else { 0 };
        }
        let crossed = before < EQUAL_GROUPS && self.in_a_row >= EQUAL_GROUPS;
        let score = scores.iter().copied().rfind(|score| !score.is_nan()).unwrap_or(f64::NAN);
        crossed.then(|| {
            format!(
                "update {update}: all responses of each of the last {} prompts have the same score, {score} of late: their advantages are \
                 0, and nothing is learned from them; a reward that tells responses apart, easier or harder prompts, a higher temperature \
                 or more num_generations help",
                self.in_a_row
            )
        })
    }
}

/// The rows whose response did not stop.
pub fn truncated(responses: &[Response]) -> Vec<usize> {
    let rows = responses.iter().enumerate().filter(|(_, response)| response.finish != FinishReason::Stop);
    rows.map(|(row, _)| row).collect()
}

/// Adds the lengths of responses and the share of them that did not stop, as TRL's GRPOTrainer and RLOOTrainer log them.
/// `docs/reference/metrics.md` defines each.
pub fn push_completion_metrics(m: &mut Metrics, responses: &[Response]) {
    for (kind, only_stopped) in [("", false), ("terminated_", true)] {
        let counted = responses.iter().filter(|response| !only_stopped || response.finish == FinishReason::Stop);
        let lengths: Vec<usize> = counted.map(Response::num_sampled).collect();
        let tokens = |length: Option<&usize>| length.map_or(0.0, |&length| length as f64);
        m.push(
            format!("completions/mean_{kind}length"),
            lengths.iter().sum::<usize>() as f64 / lengths.len().max(1) as f64,
        );
        m.push(format!("completions/min_{kind}length"), tokens(lengths.iter().min()));
        m.push(format!("completions/max_{kind}length"), tokens(lengths.iter().max()));
    }
    m.push("completions/clipped_ratio", truncated(responses).len() as f64 / responses.len() as f64);
}

/// Checks that `rows` responses are whole groups of `size`.
///
/// # Errors
/// If a group is cut; the message names the nearest numbers of whole groups.
pub(crate) fn check_whole(name: &str, rows: usize, size: usize) -> Result<()> {
    if rows.is_multiple_of(size) {
        return Ok(());
    }
    let (below, above) = (rows / size * size, rows.next_multiple_of(size));
    let nearest = match below {
        0 => format!("the nearest multiple is {above}"),
        below => format!("the nearest multiples are {below} and {above}"),
    };
    Err(Error::refused(
        name,
        format!(" = {rows} is not a multiple of num_generations = {size}, so a group would be cut; {nearest}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_equal_scores_or_of_means_outside_the_range_are_left_out() {
        let equal = GroupFilterConfig { dynamic_sampling: true, ..defaults() };
        assert!(equal.keeps(&[0.0, 1.0]) && !equal.keeps(&[1.0, 1.0]) && !equal.keeps(&[1.0, f64::NAN]));
        let range = GroupFilterConfig { dynamic_filtering_reward_range: vec![0.2, 0.8], ..defaults() };
        assert!(range.keeps(&[0.0, 1.0]) && range.keeps(&[0.5, 0.5]) && !range.keeps(&[0.0, 0.2]));
        assert!(defaults::<GroupFilterConfig>().keeps(&[1.0, 1.0]));
    }

    #[test]
    fn a_response_is_penalized_by_the_share_of_the_buffer_that_it_fills() {
        let config = GroupFilterConfig { overlong_buffer_len: Some(4), overlong_penalty_factor: 2.0, ..defaults() };
        let response = |len: usize| Response {
            tokens: vec![1; len],
            logprobs: vec![0.0; len],
            finish: FinishReason::Length,
            sets: None,
            inserted: Vec::new(),
        };
        let overlong = config.overlong(10).unwrap();
        assert_eq!([5, 6, 7, 10].map(|len| overlong.penalty(&response(len))), [0.0, 0.0, 0.5, 2.0]);
    }

    #[test]
    fn a_reward_that_is_constant_is_reported_once() {
        let mut groups = EqualGroups::default();
        let mut warnings = 0;
        for update in 1..=100 {
            warnings += usize::from(groups.observe(update, &[1.0, 1.0, 2.0, 2.0], 2).is_some());
        }
        assert_eq!(warnings, 1);
        assert!(groups.observe(101, &[1.0, 2.0], 2).is_none() && groups.in_a_row == 0);
    }

    #[test]
    fn groups_of_equal_scores_are_counted_whichever_of_their_rows_have_none() {
        let none = f64::NAN;
        let mut groups = EqualGroups::default();
        groups.observe(1, &[none, 1.0, 1.0, 1.0, none, 1.0, none, none, none], 3);
        assert_eq!(groups.in_a_row, 3);
        groups.observe(2, &[none, 1.0, 2.0], 3);
        assert_eq!(groups.in_a_row, 0);
    }

    #[test]
    fn a_batch_that_cuts_a_group_names_the_nearest_that_do_not() {
        assert!(check_whole("train_batch_size", 12, 4).is_ok());
        let message = check_whole("train_batch_size", 10, 4).unwrap_err().to_string();
        assert!(message.ends_with("so a group would be cut; the nearest multiples are 8 and 12"), "{message}");
        let message = check_whole("train_batch_size", 2, 4).unwrap_err().to_string();
        assert!(message.ends_with("the nearest multiple is 4"), "{message}");
    }
}
