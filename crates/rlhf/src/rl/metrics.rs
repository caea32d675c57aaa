//! The metrics of an update.

use crate::rl::experience::Experience;
use crate::rl::learner::{EpochPlan, Learner};
use crate::rl::math::{self, ImportanceLevel, Objective, PolicyClip};
use crate::rl::shaping::Targets;
use crate::rl::stats::{StepStats, optimizer_steps};
use rlhf_base::metrics::Metrics;
use rlhf_lm::model::ValueModel;
use tch::{Kind, Tensor};

impl Learner {
    /// Adds the metrics of one update under TRL's names: `objective/*` are sums per response, averaged over responses; the
    /// other averages are over tokens, of all mini-batches together. `docs/reference/metrics.md` defines each.
    ///
    /// Metrics of a setting that is off by default appear only where it is on. While the policy is frozen there are no metrics of
    /// its loss.
    pub fn metrics(&self, m: &mut Metrics, e: &Experience, targets: &Targets, steps: &[StepStats], plan: &EpochPlan) {
        self.rollout_metrics(m, e, targets);
        let steps = Steps::of(steps);
        if steps.all.iter().any(|step| step.tokens > 0.0) {
            self.policy_metrics(m, &steps, plan.parts(e.rows()));
        }
        let sampling = steps.all.iter().filter_map(|step| step.sampling);
        if let Some(sampling) = sampling.reduce(|all, part| all.with(&part)) {
            sampling.push_metrics(m);
        }
        let has_critic = !matches!(self.value, ValueModel::None);
        // Where no response counts there is no loss to average.
        if has_critic && steps.all.iter().any(|step| step.value_slots > 0.0) {
            m.push("loss/value_avg", steps.per_value(|s| s.value_loss));
            m.push("val/clipfrac_avg", steps.per_value(|s| s.value_clipped));
        }
        if steps.all.iter().any(|step| step.tokens > 0.0) {
            let ratio = steps.per_token(|s| s.ratio);
            m.push("val/ratio", ratio);
            m.push("val/ratio_var", (steps.per_token(|s| s.ratio_squared) - ratio * ratio).clamp(0.0, f64::INFINITY));
        }
        if has_critic {
            m.push("val/explained_variance", explained_variance(e, targets));
        }
        if matches!(self.value, ValueModel::Model(_)) {
            m.push("val/grad_norm", steps.mean_norm(|s| s.value_grad_norm, |s| s.value_overflowed));
        }
        m.push("val/response_length", mean(&Tensor::from_slice(&e.sampled)));
        m.push("val/skipped_steps", (steps.all_steps - steps.kept.len()) as f64);
        if self.optimizers.scaling.is_some() {
            m.push("policy/overflows", steps.count(|s| s.policy_overflowed) as f64);
            if has_critic {
                m.push("val/overflows", steps.count(|s| s.value_overflowed) as f64);
            }
        }
    }

    /// Adds the metrics of a run without a critic, under the names of TRL's GRPOTrainer and RLOOTrainer. `docs/reference/metrics.md`
    /// defines each.
    pub fn group_metrics(&self, m: &mut Metrics, e: &Experience, targets: &Targets, steps: &[StepStats]) {
        let totals = e.scored_totals();
        let std = math::std(&totals);
        m.push("reward", math::mean(&totals));
        m.push("reward_std", if std.is_nan() { 0.0 } else { std });
        let equal = |std: &f64| std.abs() <= 1e-8;
        let stds = math::group_stds(&totals, &e.groups);
        m.push("frac_reward_zero_std", stds.iter().filter(|std| equal(std)).count() as f64 / totals.len() as f64);
        let all = Steps::of(steps);
        let step_mean = |f: fn(&StepStats) -> f64| {
            all.kept.iter().map(|step| step.iter().map(f).sum::<f64>() / step.len() as f64).sum::<f64>()
                / all.kept.len() as f64
        };
        m.push("loss", step_mean(|s| s.loss));
        m.push("grad_norm", all.mean_norm(|s| s.policy_grad_norm, |s| s.policy_overflowed));
        m.push("entropy", all.per_token(|s| s.entropy));
        if self.entropy_controller.is_some() {
            m.push("entropy_coef", step_mean(|s| s.entropy_coef));
        }
        if e.ref_logprobs.is_some() {
            let tokens = e.masks.response.sum(Kind::Double).double_value(&[]).max(1.0);
            let in_rewards = || targets.kl.sum(Kind::Double).double_value(&[]) / tokens;
            m.push(
                "kl",
                if self.settings.update.loss.kl_in_loss.is_some() { all.per_token(|s| s.ref_kl) } else { in_rewards() },
            );
        }
        self.clip_metrics(m, &all);
    }

    /// Returns the PPO metrics that a GRPO or RLOO run leaves out: it has them by other names, or they say nothing. With the KL in the loss
    /// the rewards are the scores.
    pub(crate) fn repeated_metrics(&self) -> &'static [&'static str] {
        const KL: [&str; 3] = ["loss/kl_avg", "objective/non_score_reward", "objective/rlhf_reward"];
        const ALL: [&str; 4] = [KL[0], KL[1], KL[2], CLIPPED];
        // The share of clipped tokens is also `clip_ratio/region_mean`, where that counts tokens.
        const CLIPPED: &str = "policy/clipfrac_avg";
        let settings = &self.settings.update.loss;
        let clips_tokens =
            settings.importance == ImportanceLevel::Token && matches!(settings.objective, Objective::Clipped(_));
        match (settings.kl_in_loss.is_some(), clips_tokens) {
            (true, true) => &ALL,
            (true, false) => &KL,
            (false, true) => &ALL[3..],
            (false, false) => &[],
        }
    }

    /// Shares of the tokens, or of the responses where ratios are those of whole responses, that are clipped.
    fn clip_metrics(&self, m: &mut Metrics, steps: &Steps<'_>) {
        let settings = &self.settings.update.loss;
        let by_response = settings.importance != ImportanceLevel::Token;
        let share = |f: fn(&StepStats) -> [f64; 2]| {
            if by_response { steps.sum(|s| f(s)[1]) / steps.sum(|s| s.rows) } else { steps.per_token(|s| f(s)[0]) }
        };
        match settings.objective {
            Objective::Clipped(_) => {
                let (low, high) = (share(|s| s.low_clipped), share(|s| s.high_clipped));
                // As in TRL, a part whose responses are all masked is left out of the means of extremes.
                let counting: Vec<&StepStats> = steps.entries().filter(|s| s.low_clipped_min.is_finite()).collect();
                let mean = |f: fn(&StepStats) -> f64| {
                    counting.iter().map(|s| f(s)).sum::<f64>() / counting.len().max(1) as f64
                };
                m.push("clip_ratio/low_mean", low);
                m.push("clip_ratio/low_min", mean(|s| s.low_clipped_min));
                m.push("clip_ratio/high_mean", high);
                m.push("clip_ratio/high_max", mean(|s| s.high_clipped_max));
                m.push("clip_ratio/region_mean", low + high);
            }
            Objective::Cispo { .. } => m.push("cispo_clip_ratio", share(|s| s.high_clipped)),
            Objective::Sapo { .. } | Objective::Vespo { .. } => {}
        }
    }

    /// Metrics of the responses, before anything is trained.
    fn rollout_metrics(&self, m: &mut Metrics, e: &Experience, targets: &Targets) {
        // Masked rows have no KL and no entropy; if all rows are masked there is none to report.
        let rows = e.unmasked_rows();
        let per_row = |x: Tensor| x.sum(Kind::Double).double_value(&[]) / rows.max(1.0);
        let (kl, entropy) = (per_row(targets.kl.shallow_clone()), -per_row(math::keep(&e.logprobs, &e.masks.response)));
        let in_rewards = if self.settings.update.loss.kl_in_loss.is_some() { 0.0 } else { targets.kl_coef };
        let scores = e.total_scores();
        let score = mean(&scores);
        let has_reference = e.ref_logprobs.is_some();
        if has_reference && rows > 0.0 {
            m.push("objective/kl", kl);
        }
        if has_reference {
            m.push("objective/kl_coef", targets.kl_coef);
        }
        if rows > 0.0 {
            m.push("objective/entropy", entropy);
        }
        if has_reference {
            m.push("objective/non_score_reward", -in_rewards * kl);
            m.push("objective/rlhf_reward", score - in_rewards * kl);
        }
        m.push("objective/scores", score);
        m.push("objective/scores_std", if scores.numel() > 1 { scores.std(true).double_value(&[]) } else { 0.0 });
    }

    /// Metrics of the policy's optimizer steps, of which an epoch has `parts_per_epoch` entries.
    fn policy_metrics(&self, m: &mut Metrics, steps: &Steps<'_>, parts_per_epoch: usize) {
        let settings = &self.settings.update;
        m.push("policy/approxkl_avg", steps.per_token(|s| s.approx_kl));
        m.push("policy/clipfrac_avg", steps.per_token(|s| s.policy_clipped));
        if matches!(settings.loss.objective, Objective::Clipped(PolicyClip { dual: Some(_), .. })) {
            m.push("policy/dual_clipfrac_avg", steps.per_token(|s| s.dual_clipped));
        }
        m.push("policy/entropy_avg", steps.per_token(|s| s.entropy));
        if self.entropy_controller.is_some() {
            let sum: f64 = steps.entries().map(|step| step.entropy_coef).sum();
            m.push("policy/entropy_coef", sum / steps.entries().count() as f64);
        }
        m.push("policy/grad_norm", steps.mean_norm(|s| s.policy_grad_norm, |s| s.policy_overflowed));
        if settings.target_kl.is_some() {
            m.push("policy/policykl_avg", steps.per_token(|s| s.policy_kl));
            m.push("policy/epochs", (steps.entries / parts_per_epoch) as f64);
        }
        if settings.ratio_threshold.is_some() {
            m.push("policy/skipped_steps", (steps.kept.len() - steps.taken()) as f64);
        }
        m.push("loss/policy_avg", steps.per_token(|s| s.policy_loss));
        if settings.loss.kl_in_loss.is_some() {
            m.push("loss/kl_avg", steps.per_token(|s| s.ref_kl));
        }
        if self.unsupervised.is_some() {
            let sum: f64 = steps.entries().map(|step| step.unsup_loss).sum();
            m.push("loss/unsup_avg", sum / steps.taken() as f64);
        }
    }
}

/// The optimizer steps of an update whose losses and gradients were finite.
struct Steps<'a> {
    all: &'a [StepStats],
    kept: Vec<&'a [StepStats]>,
    /// Optimizer steps, finite or not.
    all_steps: usize,
    /// Entries, finite or not.
    entries: usize,
}

impl<'a> Steps<'a> {
    fn of(all: &'a [StepStats]) -> Self {
        let finite = |step: &&[StepStats]| step.iter().all(|part| part.not_finite().is_none());
        let kept = optimizer_steps(all).filter(finite).collect();
        Self { all, kept, all_steps: optimizer_steps(all).count(), entries: all.len() }
    }

    fn entries(&self) -> impl Iterator<Item = &StepStats> {
        self.kept.iter().copied().flatten()
    }

    fn sum(&self, f: impl Fn(&StepStats) -> f64) -> f64 {
        self.entries().map(f).sum()
    }

    fn count(&self, f: fn(&StepStats) -> bool) -> usize {
        self.entries().filter(|step| f(step)).count()
    }

    /// Average over tokens; NaN (0 / 0) without a step, and 0 where no token of a step counts.
    fn per_token(&self, f: impl Fn(&StepStats) -> f64) -> f64 {
        let tokens = self.sum(|s| s.tokens);
        if tokens == 0.0 && !self.kept.is_empty() { 0.0 } else { self.sum(f) / tokens }
    }

    /// Average over value slots; NaN without a step.
    fn per_value(&self, f: fn(&StepStats) -> f64) -> f64 {
        self.sum(f) / self.sum(|s| s.value_slots)
    }

    /// Steps that were not skipped for their mean ratio.
    fn taken(&self) -> usize {
        self.kept.iter().filter(|step| !step[0].skipped).count()
    }

    /// Mean of a gradient norm over the steps that were taken.
    fn mean_norm(&self, norm: fn(&StepStats) -> f64, overflowed: fn(&StepStats) -> bool) -> f64 {
        // All entries of a step have its norm.
        let norms: f64 = self.kept.iter().map(|step| norm(&step[step.len() - 1])).sum();
        norms / self.taken().saturating_sub(self.count(overflowed)).max(self.kept.len().min(1)) as f64
    }
}

fn mean(x: &Tensor) -> f64 {
    x.sum(Kind::Double).double_value(&[]) / x.numel() as f64
}

/// 1 - Var(returns - values) / Var(returns) over the value slots: 1 for a perfect value model, 0 for a constant.
fn explained_variance(e: &Experience, targets: &Targets) -> f64 {
    let variance = |x: &Tensor| {
        let counted = x.masked_select(&e.masks.value);
        if counted.numel() > 1 { counted.var(true).double_value(&[]) } else { 0.0 }
    };
    let total = variance(&targets.returns);
    if total > 0.0 { 1.0 - variance(&(&targets.returns - &e.values)) / total } else { 0.0 }
}
