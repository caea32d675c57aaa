//! Sums of a distillation run since its last line of metrics.

use super::super::supervised::Sums;
use rlhf_base::metrics::Metrics;
use rlhf_lm::generate::{FinishReason, Response};
use serde::{Deserialize, Serialize};

/// Metrics of sampled responses, by TRL's names, in the order of [`Totals::completions`]; means over the updates that sample responses.
const COMPLETIONS: [&str; 7] = [
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
];

/// Sums over the tokens of passes: of the loss, of the entropy, and of the student's log-probability minus the teacher's.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PassSums {
    pub(super) loss: f64,
    pub(super) entropy: f64,
    pub(super) log_ratio: f64,
    pub(super) tokens: f64,
}

/// Sums over tokens and updates.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Totals {
    loss: f64,
    entropy: f64,
    tokens: f64,
    /// Sum over tokens that the student has sampled, and their number.
    log_ratio: f64,
    own_tokens: f64,
    /// Updates with the student's responses, and updates with sampled responses.
    on_policy: f64,
    sampled: f64,
    completions: [f64; COMPLETIONS.len()],
    sampling_seconds: f64,
    grad_norm: f64,
    updates: f64,
}

impl Totals {
    /// Adds a rank's passes over its part of an update; `on_policy`: the student has sampled the responses.
    pub(super) fn add_passes(&mut self, sums: &PassSums, on_policy: bool) {
        self.loss += sums.loss;
        self.entropy += sums.entropy;
        self.tokens += sums.tokens;
        if on_policy {
            self.log_ratio += sums.log_ratio;
            self.own_tokens += sums.tokens;
        }
    }

    /// Adds the sampled responses of an update, which took this many seconds; one rank of several adds them.
    pub(super) fn add_responses(&mut self, responses: &[Response], on_policy: bool, seconds: f64) {
        self.sampled += 1.0;
        self.on_policy += f64::from(u8::from(on_policy));
        self.sampling_seconds += seconds;
        let lens: Vec<f64> = responses.iter().map(|response| response.tokens.len() as f64).collect();
        let ended = responses.iter().zip(&lens).filter(|(response, _)| response.finish == FinishReason::Stop);
        let ended: Vec<f64> = ended.map(|(_, len)| *len).collect();
        let clipped = 1.0 - ended.len() as f64 / lens.len().max(1) as f64;
        let [mean, least, most] = spread(&lens);
        let [mean_ended, least_ended, most_ended] = spread(&ended);
        let numbers = [mean, least, most, clipped, mean_ended, least_ended, most_ended];
        self.completions.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
    }
}

/// Mean, minimum and maximum; 0 without any numbers, as in TRL.
fn spread(numbers: &[f64]) -> [f64; 3] {
    if numbers.is_empty() {
        return [0.0; 3];
    }
    let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
    let (least, most) = numbers.iter().fold((f64::INFINITY, 0.0f64), |(a, b), x| (a.min(*x), b.max(*x)));
    [mean, least, most]
}

impl Sums for Totals {
    fn add_step(&mut self, grad_norm: f64) {
        self.grad_norm += grad_norm;
        self.updates += 1.0;
    }

    fn steps(&self, _batch_size: usize) -> (f64, f64) {
        (self.updates, self.grad_norm)
    }

    fn push(&self, metrics: &mut Metrics) {
        // Responses may have no token that both models know.
        if self.tokens > 0.0 {
            metrics.push("loss", self.loss / self.tokens);
            metrics.push("entropy", self.entropy / self.tokens);
        }
        metrics.push("on_policy", self.on_policy / self.updates);
        if self.own_tokens > 0.0 {
            metrics.push("reverse_kl", self.log_ratio / self.own_tokens);
        }
        if self.sampled > 0.0 {
            for (name, sum) in COMPLETIONS.iter().zip(self.completions) {
                metrics.push(*name, sum / self.sampled);
            }
            metrics.push("time/sampling", self.sampling_seconds / self.sampled);
        }
    }

    fn watched(&self) -> Vec<String> {
        (self.tokens > 0.0).then(|| format!("loss {:.4}", self.loss / self.tokens)).into_iter().collect()
    }

    fn numbers(&mut self) -> Vec<&mut f64> {
        let Self {
            loss,
            entropy,
            tokens,
            log_ratio,
            own_tokens,
            on_policy,
            sampled,
            completions,
            sampling_seconds,
            grad_norm,
            updates,
        } = self;
        let ones =
            [loss, entropy, tokens, log_ratio, own_tokens, on_policy, sampled, sampling_seconds, grad_norm, updates];
        ones.into_iter().chain(completions).collect()
    }
}
