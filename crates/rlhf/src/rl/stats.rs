//! Sums of an optimizer step, and the metrics of an update.

use crate::metrics::Metrics;
use crate::rl::math;
use crate::rl::rollout::{Experience, Targets};
use crate::settings::PpoConfig;
use tch::{Kind, Tensor};

/// What one optimizer step did. Sums are over the tokens (or value slots) of its mini-batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepStats {
    /// Response tokens of the mini-batch that the policy learnt from; 0 while it is frozen.
    pub tokens: f64,
    /// Value slots of the mini-batch.
    pub value_slots: f64,
    /// Sum of the clipped policy objective, negated; without the KL and the entropy that may be added.
    pub policy_loss: f64,
    /// Sum of the clipped value loss, without `vf_coef`.
    pub value_loss: f64,
    /// Tokens at which the policy's clip was active.
    pub policy_clipped: f64,
    /// Tokens at which the dual clip was active.
    pub dual_clipped: f64,
    /// Slots at which the value's clip was active.
    pub value_clipped: f64,
    /// Sum of (new - old log-probability)^2 / 2.
    pub approx_kl: f64,
    /// Sum of old - new log-probability.
    pub policy_kl: f64,
    /// Sum of the estimates of KL(policy || reference), where they are in the loss.
    pub ref_kl: f64,
    /// Sum of the entropies of the distributions over the vocabulary, in nats.
    pub entropy: f64,
    /// Sum of the probability ratios.
    pub ratio: f64,
    /// Sum of their squares.
    pub ratio_squared: f64,
    /// The ratios themselves, row after row.
    pub ratios: Vec<f32>,
    /// Sum of the new values.
    pub value: f64,
    /// Sum of the squares of their distances from the returns.
    pub value_error: f64,
    /// Norm of the policy's gradient before clipping.
    pub policy_grad_norm: f64,
    /// Norm of the value model's gradient before clipping.
    pub value_grad_norm: f64,
    /// Mean negative log-likelihood of the tokens of the texts that were mixed in, without `unsup_coef`.
    pub unsup_loss: f64,
    /// Whether the mean ratio was above `ratio_threshold`: then nothing was learnt, and the norms are 0.
    pub skipped: bool,
    /// Whether the next entry is of the same optimizer step.
    pub goes_on: bool,
    /// Whether the policy's gradient overflowed f16: then it took no step, the norm is 0, and its loss scale may have fallen.
    pub policy_overflowed: bool,
    /// The same of the value model.
    pub value_overflowed: bool,
}

impl StepStats {
    /// What kept the step from being taken: a loss, or a gradient's norm, that is not finite.
    pub fn not_finite(&self) -> Option<String> {
        let numbers = [
            ("the policy's loss", self.policy_loss),
            ("the norm of the policy's gradient", self.policy_grad_norm),
            ("the value model's loss", self.value_loss),
            ("the norm of the value model's gradient", self.value_grad_norm),
        ];
        let found = numbers.into_iter().find(|(_, number)| !number.is_finite());
        found.map(|(name, number)| format!("{name} is {number}"))
    }
}

/// The entries of each optimizer step.
pub(crate) fn optimizer_steps(parts: &[StepStats]) -> impl Iterator<Item = &[StepStats]> + Clone {
    parts.split_inclusive(|part| !part.goes_on)
}

/// Adds the metrics of one update under TRL's names: `objective/*` are sums per response, averaged over responses; the other
/// averages are over real tokens, of all mini-batches together. `docs/algorithm.md` defines each.
///
/// What belongs to a setting that is off by default is there only where it is on; of a policy that is frozen there is
/// nothing to tell.
pub fn metrics(m: &mut Metrics, experience: &Experience, targets: &Targets, steps: &[StepStats], config: &PpoConfig) {
    let rows = experience.lengths.len() as f64;
    let learns = steps.iter().any(|step| step.tokens > 0.0);
    let all = optimizer_steps(steps).count();
    let sound = |step: &&[StepStats]| step.iter().all(|part| part.not_finite().is_none());
    let (parts, kept) = (steps.len(), optimizer_steps(steps).filter(sound).collect::<Vec<_>>());
    let steps: Vec<&StepStats> = kept.iter().copied().flatten().collect();
    let per_row = |x: &Tensor| x.sum(Kind::Double).double_value(&[]) / rows;
    let sum = |f: fn(&StepStats) -> f64| steps.iter().map(|step| f(step)).sum::<f64>();
    // Without a step there is nothing to average: 0 / 0 is the NaN that says so.
    let (tokens, value_slots) = (sum(|s| s.tokens), sum(|s| s.value_slots));
    let kl = per_row(&targets.kl);
    let scores = experience.total_scores();
    let score = per_row(&scores);
    let in_rewards = if config.kl.kl_in_loss { 0.0 } else { targets.kl_coef };
    let taken = kept.iter().filter(|step| !step[0].skipped).count();
    let overflows = |f: fn(&StepStats) -> bool| steps.iter().filter(|step| f(step)).count();
    let of_policy = overflows(|s| s.policy_overflowed);
    let of_value = overflows(|s| s.value_overflowed);
    let mean_norm = |f: fn(&StepStats) -> f64, overflows: usize| {
        // All parts of a step have its norm.
        let norms: f64 = kept.iter().map(|step| f(&step[step.len() - 1])).sum();
        norms / taken.saturating_sub(overflows).max(kept.len().min(1)) as f64
    };
    let response_tokens = experience.lengths.iter().sum::<i64>() as f64;

    m.push("objective/kl", kl);
    m.push("objective/kl_coef", targets.kl_coef);
    m.push("objective/entropy", -per_row(&math::keep(&experience.logprobs, &experience.response_mask)));
    m.push("objective/non_score_reward", -in_rewards * kl);
    m.push("objective/rlhf_reward", score - in_rewards * kl);
    m.push("objective/scores", score);
    m.push("objective/scores_std", if rows > 1.0 { scores.std(true).double_value(&[]) } else { 0.0 });
    if learns {
        m.push("policy/approxkl_avg", sum(|s| s.approx_kl) / tokens);
        m.push("policy/clipfrac_avg", sum(|s| s.policy_clipped) / tokens);
        if config.step.dual_clip.is_some() {
            m.push("policy/dual_clipfrac_avg", sum(|s| s.dual_clipped) / tokens);
        }
        m.push("policy/entropy_avg", sum(|s| s.entropy) / tokens);
        m.push("policy/grad_norm", mean_norm(|s| s.policy_grad_norm, of_policy));
        if config.target_kl().is_some() {
            m.push("policy/policykl_avg", sum(|s| s.policy_kl) / tokens);
            m.push("policy/epochs", (parts / config.parts_per_epoch(experience.lengths.len())) as f64);
        }
        if config.step.ratio_threshold.is_some() {
            m.push("policy/skipped_steps", (kept.len() - taken) as f64);
        }
        m.push("loss/policy_avg", sum(|s| s.policy_loss) / tokens);
        if config.kl.kl_in_loss {
            m.push("loss/kl_avg", sum(|s| s.ref_kl) / tokens);
        }
        if config.unsupervised.unsupervised_dataset_name.is_some() {
            m.push("loss/unsup_avg", sum(|s| s.unsup_loss) / taken as f64);
        }
    }
    m.push("loss/value_avg", sum(|s| s.value_loss) / value_slots);
    m.push("val/clipfrac_avg", sum(|s| s.value_clipped) / value_slots);
    if learns {
        let ratio = sum(|s| s.ratio) / tokens;
        m.push("val/ratio", ratio);
        m.push("val/ratio_var", (sum(|s| s.ratio_squared) / tokens - ratio * ratio).clamp(0.0, f64::INFINITY));
    }
    m.push("val/explained_variance", explained_variance(experience, targets));
    if !config.legacy.value_head {
        m.push("val/grad_norm", mean_norm(|s| s.value_grad_norm, of_value));
    }
    m.push("val/response_length", response_tokens / rows);
    m.push("val/skipped_steps", (all - kept.len()) as f64);
    if config.run.fp16 {
        m.push("policy/overflows", of_policy as f64);
        m.push("val/overflows", of_value as f64);
    }
}

/// 1 - Var(returns - values) / Var(returns) over the value slots: 1 is a perfect value model, 0 no better than a constant.
fn explained_variance(experience: &Experience, targets: &Targets) -> f64 {
    let variance = |x: &Tensor| {
        let counted = x.masked_select(&experience.value_mask);
        if counted.numel() > 1 { counted.var(true).double_value(&[]) } else { 0.0 }
    };
    let total = variance(&targets.returns);
    if total > 0.0 { 1.0 - variance(&(&targets.returns - &experience.values)) / total } else { 0.0 }
}
