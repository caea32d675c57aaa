//! Sums of a DPO run since its last line of metrics.

use super::super::supervised::Sums;
use crate::settings::{DPO_EVAL_METRICS as EVAL_METRICS, DpoConfig, DpoLoss};
use rlhf_base::metrics::Metrics;
use serde::{Deserialize, Serialize};
use tch::Tensor;
use tch_ext::to_host;

/// Number of numbers that a pass returns for a pair, in this order: log-probabilities of both sides under policy and reference model; those
/// of the chosen side with all tokens counting alike; the pair's weight; sums over the tokens of the mean logits of both sides, of the
/// entropies, and of the chosen tokens that are the likeliest; the loss.
pub(super) const NUMBERS: usize = 11;
/// The place of the loss among them.
pub(super) const LOSS: usize = NUMBERS - 1;

/// The tokens of the micro-batch of a pair, by which sums over tokens become means.
#[derive(Debug, Clone, Copy)]
pub(super) struct MicroBatch {
    /// Number of pairs.
    pub(super) pairs: usize,
    /// Tokens with a log-probability, of chosen and rejected sides.
    pub(super) tokens: [usize; 2],
}

impl MicroBatch {
    /// The factor of a pair's sum over tokens, so that the mean over the pairs is the mean over `tokens` tokens; 0 without tokens.
    pub(super) fn factor(self, tokens: usize) -> f64 {
        if tokens == 0 { 0.0 } else { self.pairs as f64 / tokens as f64 }
    }
}

/// Sums over pairs.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Totals {
    pairs: f64,
    metrics: [f64; EVAL_METRICS.len()],
    grad_norm: f64,
    /// Whether texts are mixed in, and the sum over updates of their loss.
    mixes_texts: bool,
    unsup_loss: f64,
    updates: f64,
    /// Numbers of passes that are not in the sums yet: `[n, NUMBERS]` with the micro-batch of each pair.
    #[serde(skip)]
    unread: Vec<(Tensor, Vec<MicroBatch>, f64)>,
}

impl Totals {
    /// Adds the numbers of a pass, `[n, NUMBERS]`.
    pub(super) fn push_pass(&mut self, numbers: Tensor, micro_batches: Vec<MicroBatch>, beta: f64) {
        self.unread.push((numbers, micro_batches, beta));
    }

    /// Adds the mean loss of the texts that an update mixes in; one rank of several adds it.
    pub(super) fn add_texts(&mut self, loss: f64, adds: bool) {
        self.mixes_texts = true;
        self.unsup_loss += if adds { loss } else { 0.0 };
    }

    /// Adds a pair with these numbers.
    pub(super) fn add(&mut self, numbers: &[f64], micro_batch: MicroBatch, beta: f64) {
        let reward = |side: usize| beta as f32 * (numbers[side] as f32 - numbers[2 + side] as f32);
        let (chosen, rejected) = (reward(0), reward(1));
        let [chosen_tokens, rejected_tokens] = micro_batch.tokens;
        let [all_factor, chosen_factor, rejected_factor] =
            [chosen_tokens + rejected_tokens, chosen_tokens, rejected_tokens].map(|tokens| micro_batch.factor(tokens));
        self.pairs += 1.0;
        let metrics = [
            numbers[LOSS],
            f64::from(chosen),
            f64::from(rejected),
            f64::from(u8::from(chosen > rejected)),
            f64::from(chosen - rejected),
            numbers[0],
            numbers[1],
            numbers[6] * chosen_factor,
            numbers[7] * rejected_factor,
            numbers[8] * all_factor,
            numbers[9] * chosen_factor,
        ];
        self.metrics.iter_mut().zip(metrics).for_each(|(sum, number)| *sum += number);
    }

    /// Reads the numbers that [`Totals::push_pass`] has left on the device: each read waits for all work before it.
    fn read(&mut self) {
        let unread = std::mem::take(&mut self.unread);
        if unread.is_empty() {
            return;
        }
        let all = to_host(&Tensor::cat(&unread.iter().map(|(numbers, ..)| numbers).collect::<Vec<_>>(), 0).view([-1]));
        let pairs = unread.iter().flat_map(|(_, batches, beta)| batches.iter().map(move |batch| (*batch, *beta)));
        for (numbers, (micro_batch, beta)) in all.chunks(NUMBERS).zip(pairs) {
            self.add(numbers, micro_batch, beta);
        }
    }

    /// Adds the means, with `prefix` before their names.
    pub(super) fn push_as(&self, metrics: &mut Metrics, prefix: &'static str) {
        for (name, sum) in EVAL_METRICS.iter().zip(self.metrics) {
            metrics.push(format!("{prefix}{}", name.trim_start_matches("eval_")), sum / self.pairs);
        }
    }
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
        self.push_as(metrics, "");
        if self.mixes_texts {
            metrics.push("loss/unsup_avg", self.unsup_loss / self.updates);
        }
    }

    fn watched(&self) -> Vec<String> {
        let [loss, _, _, accuracy, margin, ..] = self.metrics.map(|sum| sum / self.pairs);
        vec![format!("loss {loss:.3}"), format!("accuracy {accuracy:.2}"), format!("margin {margin:.3}")]
    }

    fn numbers(&mut self) -> Vec<&mut f64> {
        self.read();
        let Self { pairs, metrics, grad_norm, mixes_texts: _, unsup_loss, updates, unread: _ } = self;
        [pairs, grad_norm, unsup_loss, updates].into_iter().chain(metrics).collect()
    }
}

/// Returns whether a loss needs all pairs of a micro-batch at once.
pub(super) fn sorts(config: &DpoConfig) -> bool {
    config.loss.loss_type.iter().copied().any(DpoLoss::sorts)
}
