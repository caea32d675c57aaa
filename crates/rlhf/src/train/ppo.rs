//! PPO: prompts to responses, to experience, to a better policy; and around again.

use crate::Result;
use crate::config::{PpoConfig, PpoPlan};
use crate::metrics::Metrics;
use crate::model::{CausalLm, SequenceClassifier};
use crate::optim::AdamW;
use crate::ppo;
use crate::rollout::{Experience, Targets, to_slots, value_counts};
use tch::{Kind, Tensor};

/// The two models that learn, with their optimizers.
#[derive(Debug)]
pub struct Learner {
    /// The policy.
    pub policy: CausalLm,
    /// The value model.
    pub value: SequenceClassifier,
    policy_optimizer: AdamW,
    value_optimizer: AdamW,
}

/// What one optimizer step did. Sums are over the tokens (or value slots) of its mini-batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepStats {
    /// Response tokens of the mini-batch.
    pub tokens: f64,
    /// Value slots of the mini-batch.
    pub value_slots: f64,
    /// Sum of the clipped policy objective, negated.
    pub policy_loss: f64,
    /// Sum of the clipped value loss, without `vf_coef`.
    pub value_loss: f64,
    /// Tokens at which the policy's clip was active.
    pub policy_clipped: f64,
    /// Slots at which the value's clip was active.
    pub value_clipped: f64,
    /// Sum of (new - old log-probability)^2 / 2.
    pub approx_kl: f64,
    /// Sum of the entropies of the distributions over the vocabulary, in nats.
    pub entropy: f64,
    /// Sum of the probability ratios.
    pub ratio: f64,
    /// Sum of their squares.
    pub ratio_squared: f64,
    /// Norm of the policy's gradient before clipping.
    pub policy_grad_norm: f64,
    /// Norm of the value model's gradient before clipping.
    pub value_grad_norm: f64,
}

impl Learner {
    /// Makes `policy` and `value` trainable, with fresh optimizers.
    pub fn new(mut policy: CausalLm, mut value: SequenceClassifier, config: &PpoConfig) -> Self {
        policy.set_trainable(true);
        value.set_trainable(true);
        let policy_optimizer = AdamW::new(policy.params(), &config.optimizer);
        let value_optimizer = AdamW::new(value.params(), &config.optimizer);
        Self { policy, value, policy_optimizer, value_optimizer }
    }

    /// Learns from one batch of experience: one pass per entry of `orders`, a permutation of the rows each.
    ///
    /// A pass is `num_mini_batches` optimizer steps of `mini_batch_size` rows. A mini-batch goes through the models in
    /// micro-batches; its losses are sums over them, divided by the token count of the whole mini-batch, so the size of
    /// a micro-batch changes memory and speed and nothing else. Gives one entry per optimizer step.
    ///
    /// # Errors
    /// If a gradient is not finite.
    pub fn optimise(
        &mut self,
        experience: &Experience,
        targets: &Targets,
        orders: &[Vec<usize>],
        lr: f64,
        plan: &PpoPlan,
        config: &PpoConfig,
    ) -> Result<Vec<StepStats>> {
        let mut steps = Vec::new();
        for order in orders {
            for mini_batch in order.chunks(plan.mini_batch_size) {
                let mut stats = StepStats::default();
                for &row in mini_batch {
                    stats.tokens += experience.lengths[row] as f64;
                }
                let counts = value_counts(config, &experience.lengths, experience.width());
                stats.value_slots = mini_batch.iter().map(|&row| counts[row] as f64).sum();
                for micro_batch in mini_batch.chunks(plan.micro_batch_size) {
                    self.accumulate(experience, targets, micro_batch, &mut stats, config)?;
                }
                stats.policy_grad_norm = self.policy_optimizer.step(lr)?;
                stats.value_grad_norm = self.value_optimizer.step(lr)?;
                steps.push(stats);
            }
        }
        Ok(steps)
    }

    /// Adds the gradients of one micro-batch's share of the mini-batch's losses, and its share of the sums.
    fn accumulate(
        &self,
        experience: &Experience,
        targets: &Targets,
        rows: &[usize],
        stats: &mut StepStats,
        config: &PpoConfig,
    ) -> Result<()> {
        let width = experience.width();
        let sequences: Vec<&Vec<i64>> = rows.iter().map(|&row| &experience.sequences[row]).collect();
        let lengths: Vec<i64> = rows.iter().map(|&row| experience.lengths[row]).collect();
        let counts = value_counts(config, &lengths, width);
        let of_rows =
            |spans: Vec<std::ops::Range<usize>>| -> Vec<_> { rows.iter().map(|&r| spans[r].clone()).collect() };
        let index = Tensor::from_slice(&rows.iter().map(|&row| row as i64).collect::<Vec<_>>());
        let index = index.to_device(self.policy.device());
        let slots = |x: &Tensor| x.index_select(0, &index);
        let number = |x: &Tensor| x.double_value(&[]);

        let spans = of_rows(experience.token_spans());
        let new = self.policy.token_logprobs(&sequences, &spans, config.temperature, true)?;
        let policy = ppo::policy_loss(
            &to_slots(&new.logprobs, &lengths, width),
            &slots(&experience.logprobs),
            &slots(&targets.advantages),
            &slots(&experience.response_mask),
            config.cliprange,
        );
        // The two models share nothing, so the policy's activations go before the value model's come.
        // Without a single response token there is nothing to learn, and no graph to go back through.
        if lengths.iter().any(|&len| len > 0) {
            (&policy.sum / stats.tokens).backward();
        }

        let all_counts = value_counts(config, &experience.lengths, width);
        let spans = of_rows(experience.value_spans(&all_counts));
        let values = self.value.values_at(&sequences, &spans)?;
        let value = ppo::value_loss(
            &to_slots(&values, &counts, width),
            &slots(&experience.values),
            &slots(&targets.returns),
            &slots(&experience.value_mask),
            config.cliprange_value,
        );
        (&value.sum * (config.vf_coef / stats.value_slots)).backward();

        stats.policy_loss += number(&policy.sum);
        stats.value_loss += number(&value.sum);
        stats.policy_clipped += number(&policy.clipped);
        stats.value_clipped += number(&value.clipped);
        stats.approx_kl += number(&policy.approx_kl);
        stats.entropy += new.entropy.map_or(0.0, |entropy| number(&entropy.sum(Kind::Float)));
        stats.ratio += number(&policy.ratio.sum(Kind::Float));
        stats.ratio_squared += number(&policy.ratio.square().sum(Kind::Float));
        Ok(())
    }
}

/// The metrics of one update under TRL's names: `objective/*` are sums per response, averaged over responses; the other
/// averages are over real tokens, of all optimizer steps together. `docs/algorithm.md` defines each.
pub fn metrics(experience: &Experience, targets: &Targets, steps: &[StepStats], config: &PpoConfig) -> Metrics {
    let rows = experience.lengths.len() as f64;
    let per_row = |x: &Tensor| x.sum(Kind::Double).double_value(&[]) / rows;
    let sum = |f: fn(&StepStats) -> f64| steps.iter().map(f).sum::<f64>();
    let (tokens, value_slots) = (sum(|s| s.tokens).max(1.0), sum(|s| s.value_slots).max(1.0));
    let kl = per_row(&targets.kl);
    let score = per_row(&experience.scores);
    let ratio = sum(|s| s.ratio) / tokens;
    let mean_norm = |f: fn(&StepStats) -> f64| sum(f) / steps.len().max(1) as f64;
    let response_tokens = experience.lengths.iter().sum::<i64>() as f64;

    let mut m = Metrics::default();
    m.push("objective/kl", kl);
    m.push("objective/entropy", -per_row(&experience.logprobs));
    m.push("objective/non_score_reward", -config.kl_coef * kl);
    m.push("objective/rlhf_reward", score - config.kl_coef * kl);
    m.push("objective/scores", score);
    m.push("objective/scores_std", if rows > 1.0 { experience.scores.std(true).double_value(&[]) } else { 0.0 });
    m.push("policy/approxkl_avg", sum(|s| s.approx_kl) / tokens);
    m.push("policy/clipfrac_avg", sum(|s| s.policy_clipped) / tokens);
    m.push("policy/entropy_avg", sum(|s| s.entropy) / tokens);
    m.push("policy/grad_norm", mean_norm(|s| s.policy_grad_norm));
    m.push("loss/policy_avg", sum(|s| s.policy_loss) / tokens);
    m.push("loss/value_avg", sum(|s| s.value_loss) / value_slots);
    m.push("val/clipfrac_avg", sum(|s| s.value_clipped) / value_slots);
    m.push("val/ratio", ratio);
    m.push("val/ratio_var", (sum(|s| s.ratio_squared) / tokens - ratio * ratio).max(0.0));
    m.push("val/explained_variance", explained_variance(experience, targets));
    m.push("val/grad_norm", mean_norm(|s| s.value_grad_norm));
    m.push("val/response_length", response_tokens / rows);
    m
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
