//! Warnings about a PPO run that goes wrong while all of its numbers are finite; training continues.

use crate::generate::{FinishReason, Response};
use crate::metrics::Metrics;
use crate::metrics::{Warning, WarningKind};
use serde_json::{Value, json};

/// Growth of the KL to the reference model, in nats per token, above which it counts as runaway. Healthy runs stay below 0.2 (the
/// examples in this repository: at most 0.16); at 1 the policy gives each of its tokens e times the reference's probability.
const MOST_KL_PER_TOKEN: f64 = 1.0;

/// Entropy in nats per token below which the policy has collapsed: its likeliest token then has a probability of about 99 % at
/// each position. Language models that still learn have 1 or more.
const LEAST_ENTROPY: f64 = 0.05;

/// Consecutive responses without a stop token after which there is a warning; a policy that stops one time in twenty has so many
/// in a row once in 170 times.
const UNSTOPPED_RESPONSES: usize = 100;

/// Watches the updates of a run, and warns of each problem once.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Alarms {
    /// Warnings that were given.
    told: Vec<WarningKind>,
    /// KL per token in the first update; above 0 where the reference is another model than the initial policy.
    first_kl: Option<f64>,
    /// Responses since the last one that ended with a stop token.
    unstopped: usize,
}

impl Alarms {
    /// Records the responses that an update (counted from 1) sampled, including those that are too short to train on; returns new
    /// warnings. `stop` are the tokens that end a response, `eos` those that end a text; `may_stop`: something ends a response.
    pub(crate) fn of_responses(
        &mut self,
        update: usize,
        responses: &[Response],
        stop: &[i64],
        eos: &[i64],
        may_stop: bool,
    ) -> Vec<Warning> {
        let mut found = Vec::new();
        // An eos at the very end of a response that is cut there does no harm.
        let continues_after_eos = |response: &&Response| {
            let before_last = response.tokens.split_last().map_or(&[][..], |(_, before)| before);
            before_last.iter().any(|id| eos.contains(id) && !stop.contains(id))
        };
        let (all, ignored) = (responses.len(), responses.iter().filter(continues_after_eos).count());
        if 2 * ignored > all {
            let hint = if stop.is_empty() { "; --stop_token eos ends responses there" } else { "" };
            found.push(self.once(WarningKind::IgnoredEos, || {
                format!(
                    "update {update}: {ignored} of {all} responses continue after an eos token, which is no stop token of this \
                     run: what follows is scored and trained on{hint}"
                )
            }));
        }
        let last_stopped = responses.iter().rposition(|response| response.finish == FinishReason::Stop);
        self.unstopped = last_stopped.map_or(self.unstopped + all, |last| all - 1 - last);
        if may_stop && self.unstopped >= UNSTOPPED_RESPONSES {
            let unstopped = self.unstopped;
            found.push(self.once(WarningKind::NoStop, || {
                format!(
                    "update {update}: none of the last {unstopped} responses ended by a stop token or string: all were cut at \
                     response_length; missing_eos_penalty rewards stopping, a larger response_length leaves room for it"
                )
            }));
        }
        found.into_iter().flatten().collect()
    }

    /// Records the metrics of an update; returns new warnings.
    pub(crate) fn of_metrics(&mut self, update: usize, metrics: &Metrics) -> Vec<Warning> {
        let per_token = |name| Some(metrics.get(name)? / metrics.get("val/response_length")?);
        let mut found = Vec::new();
        if let Some(kl) = per_token("objective/kl") {
            let first = *self.first_kl.get_or_insert(kl);
            if kl - first > MOST_KL_PER_TOKEN {
                // Rounding below 0 is 0.
                let first = first.max(0.0);
                found.push(self.once(WarningKind::RunawayKl, || {
                    format!(
                        "update {update}: the KL to the reference is {kl:.2} nats per token, {first:.2} in the first update: \
                         the policy has left its start; a lower learning_rate, a higher kl_coef or max_grad_norm = 1 \
                         keep it near"
                    )
                }));
            }
        }
        if let Some(entropy) = per_token("objective/entropy").filter(|entropy| *entropy < LEAST_ENTROPY) {
            // No -0.000.
            let entropy = entropy.max(0.0) + 0.0;
            found.push(self.once(WarningKind::LowEntropy, || {
                format!(
                    "update {update}: the policy's entropy is {entropy:.3} nats per token: it gives each prompt one response \
                     and has nothing left to learn from; a lower learning_rate, a higher kl_coef or entropy_coef prevent it"
                )
            }));
        }
        found.into_iter().flatten().collect()
    }

    fn once(&mut self, kind: WarningKind, message: impl FnOnce() -> String) -> Option<Warning> {
        if self.told.contains(&kind) {
            return None;
        }
        self.told.push(kind);
        Some(Warning { kind, message: message() })
    }

    /// State for a checkpoint.
    pub(crate) fn state(&self) -> Value {
        json!({"told": self.told, "first_kl": self.first_kl, "unstopped": self.unstopped})
    }

    /// Restores the state that [`Alarms::state`] returned; anything else is ignored, and a warning may then be given twice.
    pub(crate) fn load_state(&mut self, state: &Value) {
        self.told = serde_json::from_value(state["told"].clone()).unwrap_or_default();
        self.first_kl = state["first_kl"].as_f64();
        self.unstopped = state["unstopped"].as_u64().unwrap_or(0) as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(kl: f64, entropy: f64) -> Metrics {
        let mut metrics = Metrics::default();
        for (name, value) in [("objective/kl", kl), ("objective/entropy", entropy), ("val/response_length", 10.0)] {
            metrics.push(name, value);
        }
        metrics
    }

    fn kinds(warnings: &[Warning]) -> Vec<WarningKind> {
        warnings.iter().map(|warning| warning.kind).collect()
    }

    #[test]
    fn a_runaway_kl_and_an_entropy_near_0_are_reported_once_each_also_over_a_checkpoint() {
        let mut alarms = Alarms::default();
        // 3 nats per token to another reference is where this run begins; as much again is not.
        assert_eq!(alarms.of_metrics(1, &metrics(30.0, 20.0)), []);
        assert_eq!(alarms.of_metrics(2, &metrics(39.0, 0.6)), []);
        let found = alarms.of_metrics(3, &metrics(41.0, 0.4));
        assert_eq!(kinds(&found), [WarningKind::RunawayKl, WarningKind::LowEntropy]);
        let kl = "update 3: the KL to the reference is 4.10 nats per token, 3.00 in the first update: ";
        assert!(found[0].message.starts_with(kl), "{}", found[0].message);
        assert!(found[1].message.starts_with("update 3: the policy's entropy is 0.040 nats per token: "));
        let mut resumed = Alarms::default();
        resumed.load_state(&alarms.state());
        assert_eq!(resumed, alarms);
        assert_eq!(resumed.of_metrics(4, &metrics(400.0, 0.0)), []);
        // Another check reports values that are not a number.
        assert_eq!(Alarms::default().of_metrics(1, &metrics(f64::NAN, f64::NAN)), []);
    }

    fn response(tokens: &[i64], stopped: bool) -> Response {
        let finish = if stopped { FinishReason::Stop } else { FinishReason::Length };
        Response { tokens: tokens.to_vec(), logprobs: vec![0.0; tokens.len()], sets: None, finish }
    }

    #[test]
    fn missing_stops_are_reported_after_a_hundred_responses_in_a_row_and_only_where_something_stops() {
        let (open, stopped) = (vec![response(&[5, 6], false); 60], response(&[5, 9], true));
        let of = |alarms: &mut Alarms, responses: &[Response], stop: &[i64]| {
            kinds(&alarms.of_responses(1, responses, stop, &[9], !stop.is_empty()))
        };
        let mut alarms = Alarms::default();
        assert_eq!(of(&mut alarms, &open, &[9]), []);
        // One that stops, in the middle: 40 behind it and 59 more are 99.
        let mut mixed = open.clone();
        mixed[19] = stopped;
        assert_eq!(of(&mut alarms, &mixed, &[9]), []);
        assert_eq!(of(&mut alarms, &open[..59], &[9]), []);
        assert_eq!(of(&mut alarms, &open[..1], &[9]), [WarningKind::NoStop]);
        assert_eq!(of(&mut alarms, &open, &[9]), []);
        let mut without = Alarms::default();
        for _ in 0..3 {
            assert_eq!(of(&mut without, &open, &[]), []);
        }
    }

    #[test]
    fn an_eos_that_stops_nothing_is_reported_where_most_responses_continue_after_one() {
        let hidden =
            |stop: &[i64], responses: &[Response]| Alarms::default().of_responses(1, responses, stop, &[9, 7], true);
        let (inside, at_end, none) =
            (response(&[5, 9, 6], false), response(&[5, 6, 9], false), response(&[5, 6, 6], false));
        let most = [inside.clone(), inside.clone(), none.clone()];
        let found = hidden(&[], &most);
        assert_eq!(kinds(&found), [WarningKind::IgnoredEos]);
        let words = "update 1: 2 of 3 responses continue after an eos token, which is no stop token of this run";
        assert!(
            found[0].message.starts_with(words) && found[0].message.ends_with("--stop_token eos ends responses there")
        );
        let found = hidden(&[6], &most);
        assert!(kinds(&found) == [WarningKind::IgnoredEos] && found[0].message.ends_with("scored and trained on"));
        assert_eq!(hidden(&[9], &most), []);
        assert_eq!(hidden(&[], &[inside, none.clone()]), [], "half are not most");
        assert_eq!(hidden(&[], &[at_end.clone(), at_end, none]), []);
    }
}
