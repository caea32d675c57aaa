//! Statistics of TRL's `step()`.

use super::StepTrainer;
use crate::rl::experience::Experience;
use crate::rl::learner::EpochPlan;
use crate::rl::math::{self, PolicyClip};
use crate::rl::shaping::Targets;
use crate::rl::stats::{StepStats, optimizer_steps};
use rlhf_base::metrics::Metrics;
use std::borrow::Cow;
use tch::{Kind, Tensor};

/// One statistic.
#[derive(Debug, Clone, PartialEq)]
pub enum Stat {
    /// A number.
    Number(f64),
    /// A number per row, or per token of all mini-batches.
    List(Vec<f32>),
    /// A list per row, as long as the row's response.
    Rows(Vec<Vec<f32>>),
}

/// Statistics of one call of [`StepTrainer::step`], by TRL's names; `docs/reference/metrics-of-sft-reward-step.md` defines them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stats(Vec<(Cow<'static, str>, Stat)>);

impl Stats {
    pub(super) fn push(&mut self, name: impl Into<Cow<'static, str>>, number: f64) {
        self.0.push((name.into(), Stat::Number(number)));
    }

    pub(super) fn push_list(&mut self, name: impl Into<Cow<'static, str>>, numbers: Vec<f32>) {
        self.0.push((name.into(), Stat::List(numbers)));
    }

    /// The statistic `name`, if it exists.
    pub fn stat(&self, name: &str) -> Option<&Stat> {
        self.0.iter().find(|(stat_name, _)| stat_name == name).map(|(_, stat)| stat)
    }

    /// The number `name`, if it exists.
    pub fn get(&self, name: &str) -> Option<f64> {
        match self.stat(name) {
            Some(Stat::Number(number)) => Some(*number),
            _ => None,
        }
    }

    /// All statistics, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Stat)> {
        self.0.iter().map(|(name, stat)| (name.as_ref(), stat))
    }

    /// Warning about a KL far below 0.
    pub fn warning(&self) -> Option<String> {
        let kl = self.get("objective/kl").filter(|kl| *kl < LEAST_KL)?;
        Some(format!(
            "objective/kl = {kl}: expected a number above {LEAST_KL}; responses that are drawn otherwise than from the policy's own \
             distribution (temperature, top_k, top_p, min_new_tokens) are a usual reason, and training may fail by it"
        ))
    }

    /// The statistics that are single numbers.
    pub fn numbers(&self) -> Metrics {
        let mut metrics = Metrics::default();
        for (name, stat) in &self.0 {
            if let Stat::Number(number) = stat {
                metrics.push(name.clone(), *number);
            }
        }
        metrics
    }
}

impl<N: Into<Cow<'static, str>>> FromIterator<(N, Stat)> for Stats {
    fn from_iter<I: IntoIterator<Item = (N, Stat)>>(stats: I) -> Self {
        Self(stats.into_iter().map(|(name, stat)| (name.into(), stat)).collect())
    }
}

/// Mean KL of a response, in nats, below which there is a warning.
const LEAST_KL: f64 = -1.0;

/// Inputs of [`StepTrainer::loss`]; tensors are `[rows, slots]` f32, `mask` bool.
#[derive(Debug, Clone, Copy)]
pub struct LossInputs<'a> {
    /// Log-probabilities of the policy that sampled.
    pub old_logprobs: &'a Tensor,
    /// Values before the step.
    pub values: &'a Tensor,
    /// Entropies of the new distributions, for the statistics.
    pub entropy: &'a Tensor,
    /// New values, with gradients.
    pub vpreds: &'a Tensor,
    /// New log-probabilities, with gradients.
    pub logprobs: &'a Tensor,
    /// Slots that count.
    pub mask: &'a Tensor,
    /// Advantages.
    pub advantages: &'a Tensor,
    /// Returns.
    pub returns: &'a Tensor,
}

impl StepTrainer {
    /// Returns the policy and value losses of log-probabilities and values, as scalars with gradients, and their statistics by TRL's names.
    ///
    /// Means over the mask; the value loss is multiplied by `vf_coef`.
    pub fn loss(&self, inputs: &LossInputs<'_>) -> (Tensor, Tensor, Stats) {
        let LossInputs { mask, advantages, returns, .. } = *inputs;
        let number = |x: &Tensor| x.double_value(&[]);
        let range = self.config.cliprange;
        let clip = PolicyClip { low: range, high: range, dual: None };
        let policy = math::policy_loss(inputs.logprobs, inputs.old_logprobs, advantages, mask, clip);
        let value = math::value_loss(inputs.vpreds, inputs.values, returns, mask, self.config.cliprange_value);
        let count = number(&mask.sum(Kind::Double));
        let predicted = inputs.vpreds.detach();
        let part = StepStats {
            tokens: count,
            value_slots: count,
            policy_loss: number(&policy.sum),
            value_loss: number(&value.sum),
            policy_clipped: number(&policy.clipped),
            value_clipped: number(&value.clipped),
            approx_kl: number(&policy.approx_kl),
            policy_kl: number(&policy.policy_kl),
            entropy: number(&math::masked_sum(inputs.entropy, mask)),
            ratios: Vec::try_from(policy.ratio.masked_select(mask)).expect("a vector of f32"),
            value: number(&math::masked_sum(&predicted, mask)),
            value_error: number(&math::masked_sum(&(&predicted - returns).square(), mask)),
            ..StepStats::default()
        };
        let counted = |x: &Tensor| Vec::<f32>::try_from(x.masked_select(mask)).expect("a vector of f32");
        let tokens = [counted(advantages), counted(returns), counted(inputs.values)];
        let loss = PartLoss::new(&part, &tokens, self.config.vf_coef);
        let mut stats = Stats::default();
        PartLoss::NAMES.iter().zip(loss.0).for_each(|(name, number)| stats.push(*name, number));
        let [advantages, ..] = tokens;
        stats.push_list("policy/advantages", advantages);
        stats.push_list("policy/ratio", part.ratios);
        (policy.sum / count, value.sum * (self.config.vf_coef / count), stats)
    }

    /// Loss statistics of optimizer steps by the names of [`StepTrainer::loss`], without the statistics of the responses.
    pub(super) fn loss_stats(
        &self,
        experience: &Experience,
        targets: &Targets,
        orders: &[Vec<usize>],
        parts: &[StepStats],
        plan: &EpochPlan,
    ) -> Stats {
        let all = self.record_step_stats(experience, targets, orders, parts, plan);
        let loss_stats = all.0.into_iter().filter_map(|(name, stat)| {
            let name = name.strip_prefix("ppo/")?;
            let is_loss = PartLoss::NAMES.contains(&name) || name.starts_with("policy/");
            is_loss.then(|| (name.to_string().into(), stat))
        });
        Stats(loss_stats.collect())
    }

    /// All statistics of a step, except times and the learning rate. `orders` are the orders of the epochs, `parts` the result of
    /// [`Learner::optimize`](crate::rl::learner::Learner::optimize).
    pub fn record_step_stats(
        &self,
        experience: &Experience,
        targets: &Targets,
        orders: &[Vec<usize>],
        parts: &[StepStats],
        plan: &EpochPlan,
    ) -> Stats {
        let rows = Rows::new(experience);
        let mut stats = Stats::default();
        stats.push_rollout(experience, targets, &rows);
        let batches = orders
            .iter()
            .flat_map(|order| order.chunks(plan.mini_batch_size))
            .flat_map(|mini_batch| mini_batch.chunks(plan.part_size));
        let values = math::keep(&experience.values, &experience.masks.value);
        let tokens = [&targets.advantages, &targets.returns, &values].map(|x| rows.counted(x));
        stats.push_losses(parts.iter().zip(batches), &tokens, self.config.vf_coef);
        let number = |name: &str| stats.get(name).unwrap_or(f64::NAN);
        let explained = 1.0 - number("ppo/val/error") / number("ppo/returns/var");
        stats.push("ppo/val/var_explained", explained);
        let skipped = optimizer_steps(parts).filter(|parts| parts.iter().any(|part| part.skipped)).count();
        stats.push("ppo/skipped_steps", skipped as f64);
        stats
    }
}

impl Stats {
    /// Statistics of the responses, before anything is trained.
    fn push_rollout(&mut self, e: &Experience, targets: &Targets, rows: &Rows) {
        let kl = rows.counted(&targets.kl);
        let sums: Vec<f32> = kl.iter().map(|row| row.iter().sum()).collect();
        let non_score: Vec<f64> = kl.concat().iter().map(|kl| -targets.kl_coef * f64::from(*kl)).collect();
        let entropies: Vec<f32> = rows.counted(&e.logprobs).iter().map(|row| -row.iter().sum::<f32>()).collect();
        let scores: Vec<f32> = Vec::try_from(&e.scores).expect("a vector of f32");
        self.push("objective/kl", mean(&sums));
        self.push_list("objective/kl_dist", sums);
        self.0.push(("objective/logprobs".into(), Stat::Rows(rows.all(&e.logprobs))));
        let reference =
            e.ref_logprobs.iter().map(|logprobs| ("objective/ref_logprobs".into(), Stat::Rows(rows.all(logprobs))));
        self.0.extend(reference);
        self.push("objective/kl_coef", targets.kl_coef);
        self.push("objective/entropy", mean(&entropies));
        self.push("ppo/mean_non_score_reward", non_score.iter().sum::<f64>() / non_score.len() as f64);
        self.push(MEAN_SCORE, mean(&scores));
        self.push("ppo/std_scores", variance(&scores).sqrt());
        for (name, tokens) in [("queries", &e.prompts), ("responses", &e.responses)] {
            let lens: Vec<f32> = tokens.iter().map(|row| row.len() as f32).collect();
            self.push(format!("tokens/{name}_len_mean"), mean(&lens));
            self.push(format!("tokens/{name}_len_std"), variance(&lens).sqrt());
            self.push_list(format!("tokens/{name}_dist"), lens);
        }
    }

    /// Adds the means of the loss statistics over `parts`. `tokens` are advantages, returns and old values by row.
    fn push_losses<'a>(
        &mut self,
        parts: impl Iterator<Item = (&'a StepStats, &'a [usize])>,
        tokens: &[Vec<Vec<f32>>; 3],
        vf_coef: f64,
    ) {
        let mut losses = Vec::new();
        let mut advantages = Vec::new();
        let mut ratios = Vec::new();
        for (part, rows) in parts {
            let tokens = tokens
                .each_ref()
                .map(|values| rows.iter().flat_map(|&row| values[row].iter().copied()).collect::<Vec<f32>>());
            losses.push(PartLoss::new(part, &tokens, vf_coef));
            let [part_advantages, ..] = tokens;
            advantages.extend(part_advantages);
            ratios.extend_from_slice(&part.ratios);
        }
        for (at, name) in PartLoss::NAMES.iter().enumerate() {
            let sum: f64 = losses.iter().map(|loss| loss.0[at]).sum();
            self.push(format!("ppo/{name}"), sum / losses.len() as f64);
        }
        self.push_list("ppo/policy/advantages", advantages);
        self.push_list("ppo/policy/ratio", ratios);
    }
}

/// The slots of an experience that hold tokens, as lists.
struct Rows {
    lengths: Vec<i64>,
    /// 1 at the tokens that count.
    mask: Vec<Vec<f32>>,
}

impl Rows {
    fn new(e: &Experience) -> Self {
        let mut rows = Self { lengths: e.lengths(), mask: Vec::new() };
        rows.mask = rows.all(&e.masks.response.to_kind(Kind::Float));
        rows
    }

    /// The numbers of all tokens, a list per row.
    fn all(&self, x: &Tensor) -> Vec<Vec<f32>> {
        let numbers: Vec<Vec<f32>> = Vec::try_from(x).expect("rows of f32");
        let cut = |(row, &length): (Vec<f32>, &i64)| row[..length as usize].to_vec();
        numbers.into_iter().zip(&self.lengths).map(cut).collect()
    }

    /// The numbers of the tokens that count, a list per row.
    fn counted(&self, x: &Tensor) -> Vec<Vec<f32>> {
        let kept = |(row, mask): (Vec<f32>, &Vec<f32>)| {
            row.into_iter().zip(mask).filter_map(|(x, &kept)| (kept > 0.0).then_some(x)).collect()
        };
        self.all(x).into_iter().zip(&self.mask).map(kept).collect()
    }
}

/// The metric by which the best model is chosen.
pub(super) const MEAN_SCORE: &str = "ppo/mean_scores";

/// The statistics of the losses of one mini-batch.
struct PartLoss([f64; 15]);

impl PartLoss {
    const NAMES: [&str; 15] = [
        "loss/policy",
        "loss/value",
        "loss/total",
        "policy/entropy",
        "policy/approxkl",
        "policy/policykl",
        "policy/clipfrac",
        "policy/advantages_mean",
        "returns/mean",
        "returns/var",
        "val/vpred",
        "val/error",
        "val/clipfrac",
        "val/mean",
        "val/var",
    ];

    /// From the sums of `part`, and advantages, returns and old values of its tokens.
    fn new(part: &StepStats, [advantages, returns, values]: &[Vec<f32>; 3], vf_coef: f64) -> Self {
        let token_mean = |sum: f64| sum / part.tokens;
        let value_mean = |sum: f64| sum / part.value_slots;
        // A skipped step has losses of 0, as in TRL.
        let loss_scale = if part.skipped { 0.0 } else { 1.0 };
        let policy = loss_scale * token_mean(part.policy_loss);
        let value = loss_scale * value_mean(part.value_loss);
        Self([
            policy,
            value,
            policy + vf_coef * value,
            token_mean(part.entropy),
            token_mean(part.approx_kl),
            token_mean(part.policy_kl),
            token_mean(part.policy_clipped),
            mean(advantages),
            mean(returns),
            variance(returns),
            value_mean(part.value),
            value_mean(part.value_error),
            value_mean(part.value_clipped),
            mean(values),
            variance(values),
        ])
    }
}

pub(super) fn mean(numbers: &[f32]) -> f64 {
    numbers.iter().map(|&x| f64::from(x)).sum::<f64>() / numbers.len() as f64
}

/// The unbiased variance; 0 of a single number.
pub(super) fn variance(numbers: &[f32]) -> f64 {
    let mean = mean(numbers);
    let squares: f64 = numbers.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum();
    squares / (numbers.len() as f64 - 1.0).max(1.0)
}
