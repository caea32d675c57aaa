//! The losses of one micro-batch: the policy's objective with KL and entropy terms, the clipped value loss.

use crate::rl::experience::{Experience, RaggedRows};
use crate::rl::math::{self, ImportanceLevel, KlEstimator, LossAggregation, Objective, Ratios};
use crate::rl::sampling::SamplingSums;
use crate::rl::shaping::Targets;
use crate::rl::stats::StepStats;
use rlhf_lm::model::{Sampled, TokenLogprobs};
use std::ops::{Deref, Range};
use tch::{Kind, Tensor};
use tch_ext::to_host;

/// The terms of both losses and their weights.
#[derive(Debug, Clone, PartialEq)]
pub struct LossSettings {
    /// The policy's objective.
    pub objective: Objective,
    /// The unit whose probability ratio is used.
    pub importance: ImportanceLevel,
    /// Reduction of per-token losses to the loss of a mini-batch.
    pub aggregation: LossAggregation,
    /// The old log-probabilities are the current ones without a gradient, so that every ratio is 1: for the only optimizer step
    /// of an update.
    pub on_policy: bool,
    /// Share of the tokens, those of the highest entropy in the mini-batch, that the policy's objective trains; 1 for all.
    pub top_entropy_quantile: f64,
    /// Leave out responses of a negative advantage whose mean KL per token from the old policy to the new is above this.
    pub off_policy_mask_threshold: Option<f64>,
    /// Bound on the distance of a new value from the old one.
    pub cliprange_value: f64,
    /// Weight of the value loss.
    pub vf_coef: f64,
    /// Entropy bonus coefficient, where it is constant.
    pub entropy_coef: f64,
    /// Estimator of the KL term in the policy loss; `None` without one.
    pub kl_in_loss: Option<KlEstimator>,
    /// Multiply the KL term of each token by its probability ratio.
    pub use_bias_correction_kl: bool,
    /// Temperature of the distributions whose log-probabilities are taken; that of the rollout.
    pub temperature: f64,
}

impl LossSettings {
    /// Returns true if the losses need the log-probabilities of whole responses before their backward pass.
    pub(crate) fn needs_preview(&self) -> bool {
        // On the policy that sampled, the ratio of a response is 1, and only its gradient at the KL needs the whole response.
        let corrects_kl = self.use_bias_correction_kl && self.kl_in_loss.is_some();
        let needs_sequences = self.importance != ImportanceLevel::Token && (!self.on_policy || corrects_kl);
        let needs_weights = matches!(self.objective, Objective::Vespo { .. }) && !self.on_policy;
        self.top_entropy_quantile < 1.0 || needs_sequences || needs_weights || self.off_policy_mask_threshold.is_some()
    }
}

/// Divisors and factors of a mini-batch's losses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LossFactors {
    /// Divisor of the sums of the policy's losses.
    pub(crate) divisor: f64,
    /// Number of tokens over which the entropy bonus is averaged.
    pub(crate) entropy_tokens: f64,
    /// Coefficient of the entropy bonus.
    pub(crate) entropy_coef: f64,
    /// Value slots of the whole mini-batch.
    pub(crate) value_slots: f64,
    /// Weight of the KL in the policy loss.
    pub(crate) kl_coef: f64,
    /// Loss scales of policy and value model; 1 outside f16.
    pub(crate) scales: [f64; 2],
    /// Lowest entropy of a token that the policy's objective trains.
    pub(crate) least_entropy: Option<f64>,
}

/// The tokens of a micro-batch under the current policy, computed before its backward pass; `[M]` f32 each.
#[derive(Debug)]
pub(crate) struct Preview {
    pub(crate) logprobs: Tensor,
    pub(crate) entropy: Option<Tensor>,
}

/// The rows of a micro-batch with the numbers of their losses: M tokens and V values, row after row.
pub(crate) struct MicroBatch {
    ragged: RaggedRows,
    /// Log-probabilities under the policy that sampled, `[M]` f32.
    old_logprobs: Tensor,
    /// Log-probabilities that sampling recorded, `[M]` f32; `None` where they are not compared.
    sampling_logprobs: Option<Tensor>,
    /// Log-probabilities under the reference model, `[M]` f32; `None` without a KL in the loss.
    ref_logprobs: Option<Tensor>,
    /// Advantages of the losses, whitened where the settings say, `[M]` f32.
    advantages: Tensor,
    /// Tokens in the policy loss, `[M]` bool.
    counts: Tensor,
    /// Values before the update, `[V]` f32.
    old_values: Tensor,
    /// Targets of the values, `[V]` f32.
    returns: Tensor,
    /// Values in the value loss, `[V]` bool.
    value_counts: Tensor,
    /// The row of each token.
    rows: Rows,
    /// Weight of each token in the sums, `[M]` f32, where the aggregation is by responses.
    token_weights: Option<Tensor>,
    /// Ratios of whole responses; `None` where each token has its own.
    sequence: Option<Sequence>,
    /// Weights of the tokens in the policy's objective, `[M]` f32: 0 at tokens that it does not train; `None` where it trains all.
    objective_weights: Option<Tensor>,
    /// 1 at the tokens in the entropy bonus, 0 at the others, `[M]` f32; `None` where all are in it.
    high_entropy: Option<Tensor>,
}

impl Deref for MicroBatch {
    type Target = RaggedRows;

    fn deref(&self) -> &RaggedRows {
        &self.ragged
    }
}

/// Numbers of the response of each token, `[M]` f32.
struct Sequence {
    /// The probability ratio.
    ratio: Tensor,
    /// Factor of a token's log-probability in the logarithm of the ratio; see [`Ratios::of_sequences`].
    token_factor: Tensor,
    /// Mean of the KL estimates of its tokens; `None` where each token's KL is multiplied by the token's own ratio.
    kl: Option<Tensor>,
}

impl MicroBatch {
    /// Collects `rows`; `advantages` are those of the losses, `[B, R]`.
    pub(crate) fn new(
        e: &Experience,
        targets: &Targets,
        advantages: &Tensor,
        rows: &[usize],
        settings: &LossSettings,
    ) -> Self {
        let slots = e.slots(rows);
        let token_numbers = |x: &Tensor| slots.select_tokens(x);
        let value_numbers = |x: &Tensor| slots.select_values(x);
        let counts = token_numbers(&e.masks.loss);
        let token_rows = Rows::new(slots.token_rows.shallow_clone(), rows.len(), &counts);
        let old_logprobs = token_numbers(&e.logprobs);
        let by_response = matches!(settings.aggregation, LossAggregation::Responses);
        // On the policy that sampled every ratio is 1, but the gradient of a product is that of all its factors.
        let product = settings.on_policy && settings.importance == ImportanceLevel::SequenceProduct;
        let sequence = product.then(|| Sequence {
            ratio: old_logprobs.ones_like(),
            token_factor: token_rows.at_tokens(&token_rows.counts),
            kl: None,
        });
        Self {
            ragged: e.ragged(rows),
            old_logprobs,
            sampling_logprobs: None,
            ref_logprobs: settings.kl_in_loss.and(e.ref_logprobs.as_ref()).map(token_numbers),
            advantages: token_numbers(advantages),
            old_values: value_numbers(&e.values),
            returns: value_numbers(&targets.returns),
            value_counts: value_numbers(&e.masks.value_loss),
            token_weights: by_response.then(|| token_rows.at_tokens(&token_rows.counts.clamp_min(1.0).reciprocal())),
            counts,
            rows: token_rows,
            sequence,
            objective_weights: None,
            high_entropy: None,
        }
    }

    /// Compares the log-probabilities of `rows` with those that sampling recorded.
    pub(crate) fn comparing_sampling(self, e: &Experience, rows: &[usize]) -> Self {
        Self { sampling_logprobs: e.sampling_logprobs.as_ref().map(|x| e.slots(rows).select_tokens(x)), ..self }
    }

    /// The distributions that the losses take log-probabilities of.
    pub(crate) fn sampled(&self, settings: &LossSettings) -> Sampled<'_> {
        self.ragged.sampled(settings.temperature)
    }

    /// Loss of the policy over a slice of the tokens, a scalar; its sums go to `sums`.
    ///
    /// The objective, plus `kl_coef` times the KL and minus `entropy_coef` times the entropy where the settings have these terms,
    /// all divided by the divisor of the aggregation.
    pub(crate) fn policy_loss(
        &self,
        slice: Range<i64>,
        now: &TokenLogprobs,
        settings: &LossSettings,
        factors: LossFactors,
        sums: &mut Sums,
    ) -> Tensor {
        let here = |x: &Tensor| x.narrow(0, slice.start, slice.end - slice.start);
        let counts = here(&self.counts);
        let token_weights = self.token_weights.as_ref().map(here);
        let objective_weights = self.objective_weights.as_ref().map(here);
        let old = if settings.on_policy { now.logprobs.detach() } else { here(&self.old_logprobs) };
        let ratios = Ratios::of_tokens(&now.logprobs, &old, &counts);
        let ratios = match &self.sequence {
            Some(sequence) => ratios.of_sequences(&now.logprobs, &here(&sequence.ratio), &here(&sequence.token_factor)),
            None => ratios,
        };
        let advantages = here(&self.advantages);
        let loss = math::policy_objective(&ratios, &now.logprobs, &advantages, &counts, settings.objective);
        let weighted = |x: &Tensor, weights: Option<&Tensor>| {
            let x = weights.map_or_else(|| x.shallow_clone(), |weights| x * weights);
            math::masked_sum(&token_weights.as_ref().map_or_else(|| x.shallow_clone(), |weights| &x * weights), &counts)
        };
        let objective = match (&objective_weights, &token_weights) {
            (None, None) => loss.sum.shallow_clone(),
            _ => weighted(&loss.per_token, objective_weights.as_ref()),
        };
        let kl = settings.kl_in_loss.zip(self.ref_logprobs.as_ref()).map(|(estimator, reference)| {
            let estimate = || math::kl(&now.logprobs, &here(reference), &counts, estimator);
            let kl = now.kl.as_ref().map_or_else(estimate, |kl| math::keep(kl, &counts));
            if settings.use_bias_correction_kl { self.corrected(kl, &ratios, now, here) } else { kl }
        });
        let total = match &kl {
            Some(kl) if token_weights.is_some() => objective + weighted(kl, None) * factors.kl_coef,
            Some(kl) => objective + kl.sum(Kind::Float) * factors.kl_coef,
            None => objective,
        };
        let total = match now.entropy.as_ref().filter(|_| factors.entropy_coef > 0.0) {
            Some(entropy) => {
                let high = self.high_entropy.as_ref().map(here);
                let entropy = high.map_or_else(|| entropy.shallow_clone(), |high| entropy * high);
                let coef = factors.entropy_coef * (factors.divisor / factors.entropy_tokens);
                total - math::masked_sum(&entropy, &counts) * coef
            }
            None => total,
        };
        if let Some(sampled) = &self.sampling_logprobs {
            sums.sampling.add(&now.logprobs, &here(sampled), &counts);
        }
        sums.add_policy(&loss, kl.map(|kl| kl.sum(Kind::Float)).as_ref(), &counts);
        sums.add_loss(&total, factors.divisor);
        // A sum over no tokens that count has no gradient.
        total / (factors.divisor / factors.scales[0])
    }

    /// KL estimates of a slice times the probability ratios, with the gradients of both. Source: TRL 1.11, `use_bias_correction_kl`.
    fn corrected(&self, kl: Tensor, ratios: &Ratios, now: &TokenLogprobs, here: impl Fn(&Tensor) -> Tensor) -> Tensor {
        let Some(Sequence { ratio, token_factor, kl: Some(mean) }) = &self.sequence else {
            return kl * ratios.log_ratio.exp();
        };
        // The gradient of a response's ratio comes with the mean of its tokens' KL; see [`Ratios::of_sequences`].
        let moved = (math::unit(&now.logprobs) - 1.0) * here(token_factor) * here(mean);
        math::keep(&((kl + moved) * here(ratio)), &here(&self.counts))
    }

    /// Takes ratios of whole responses, and the tokens that are trained, from a pass before the backward pass.
    pub(crate) fn take_preview(&mut self, preview: &Preview, settings: &LossSettings, least_entropy: Option<f64>) {
        let old = if settings.on_policy { &preview.logprobs } else { &self.old_logprobs };
        let log_ratio = math::keep(&(&preview.logprobs - old), &self.counts);
        self.sequence = self.response_ratios(&log_ratio, &preview.logprobs, settings);
        self.high_entropy = self.high_entropy_mask(preview.entropy.as_ref(), least_entropy);
        let high = self.high_entropy.as_ref().map(|high| self.shared_in_responses(high, settings));
        self.objective_weights = match (high, self.near_policy_mask(&log_ratio, settings)) {
            (Some(high), Some(near)) => Some(high * near),
            (high, near) => high.or(near),
        };
    }

    /// Ratios of whole responses, from the `log_ratio` and the current log-probability of each token, both `[M]` f32; `None` where each
    /// token has its own ratio.
    fn response_ratios(&self, log_ratio: &Tensor, logprobs: &Tensor, settings: &LossSettings) -> Option<Sequence> {
        let rows = &self.rows;
        let ones = || rows.counts.ones_like();
        let (log_ratios, token_factor) = match (settings.objective, settings.importance) {
            (Objective::Vespo { .. }, _) => {
                let sums = rows.sums(&log_ratio.clamp(-20.0, 20.0));
                (sums.clamp(1e-8f64.ln(), 20.0), ones())
            }
            (_, ImportanceLevel::Token) => return None,
            (_, ImportanceLevel::Sequence) => (rows.means(log_ratio), ones()),
            (_, ImportanceLevel::SequenceProduct) => (rows.sums(log_ratio), rows.counts.shallow_clone()),
        };
        // VESPO's weights belong to whole responses, while its KL has the ratios of single tokens.
        let weighs = matches!(settings.objective, Objective::Vespo { .. });
        let corrects_kl = settings.importance != ImportanceLevel::Token && !weighs && settings.use_bias_correction_kl;
        let estimator = settings.kl_in_loss.filter(|estimator| corrects_kl && *estimator != KlEstimator::Full);
        let kl = estimator
            .zip(self.ref_logprobs.as_ref())
            .map(|(estimator, reference)| math::kl(logprobs, reference, &self.counts, estimator));
        Some(Sequence {
            ratio: rows.at_tokens(&log_ratios.exp()),
            token_factor: rows.at_tokens(&token_factor),
            kl: kl.map(|kl| rows.at_tokens(&rows.means(&kl))),
        })
    }

    /// 1 at the tokens that count with at least the entropy `least`, else 0, `[M]` f32; `None` without a bound.
    fn high_entropy_mask(&self, entropy: Option<&Tensor>, least: Option<f64>) -> Option<Tensor> {
        let (entropy, least) = entropy.zip(least)?;
        Some(math::keep(&entropy.ge(least).to_kind(Kind::Float), &self.counts))
    }

    /// Weights of the tokens in the objective, `[M]` f32, where only tokens of high entropy are trained.
    fn shared_in_responses(&self, high: &Tensor, settings: &LossSettings) -> Tensor {
        let clips = matches!(settings.objective, Objective::Clipped(_) | Objective::Sapo { .. });
        match settings.importance {
            // The gradient of a response's ratio goes to all its tokens, in proportion to those that are trained.
            ImportanceLevel::Sequence | ImportanceLevel::SequenceProduct if clips => {
                self.rows.at_tokens(&self.rows.means(high))
            }
            _ => high.shallow_clone(),
        }
    }

    /// 0 at the tokens of responses that are too far from the old policy and have a negative advantage, else 1, `[M]` f32; `None` without a
    /// bound on the distance.
    fn near_policy_mask(&self, log_ratio: &Tensor, settings: &LossSettings) -> Option<Tensor> {
        let most = settings.off_policy_mask_threshold?;
        let near = self.rows.at_tokens(&self.rows.means(&-log_ratio)).le(most);
        Some(near.logical_or(&self.advantages.ge(0.0)).to_kind(Kind::Float))
    }

    /// The tokens that count, `[M]` bool.
    pub(crate) fn counts(&self) -> &Tensor {
        &self.counts
    }

    /// The row of each token.
    pub(crate) fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Loss of the value model over all values, a scalar; its sums go to `sums`.
    pub(crate) fn value_loss(
        &self,
        values: &Tensor,
        settings: &LossSettings,
        factors: LossFactors,
        sums: &mut Sums,
    ) -> Tensor {
        let mask = &self.value_counts;
        let loss = math::value_loss(values, &self.old_values, &self.returns, mask, settings.cliprange_value);
        let values = values.detach();
        let error = math::masked_sum(&(&values - &self.returns).square(), mask);
        sums.add_value([&loss.sum, &loss.clipped, &math::masked_sum(&values, mask), &error]);
        loss.sum * (settings.vf_coef / factors.value_slots.max(1.0) * factors.scales[1])
    }

    /// Sums of the entropies of the tokens that count, and of those in the entropy bonus, in nats.
    pub(crate) fn entropy_sums(&self, entropy: &Tensor) -> [Tensor; 2] {
        let all = math::masked_sum(entropy, &self.counts);
        let bonus = match &self.high_entropy {
            Some(high) => math::masked_sum(&(entropy * high), &self.counts),
            None => all.shallow_clone(),
        };
        [all, bonus]
    }
}

/// The row of each token of a micro-batch.
#[derive(Debug)]
pub(crate) struct Rows {
    /// `[M]` i64.
    token_rows: Tensor,
    /// Number of tokens that count in each row, `[rows]` f32.
    counts: Tensor,
}

impl Rows {
    /// `token_rows`: the row of each token, `[M]` i64; `counts`: the tokens that count, `[M]` bool.
    fn new(token_rows: Tensor, rows: usize, counts: &Tensor) -> Self {
        let zeros = Tensor::zeros([rows as i64], (Kind::Float, counts.device()));
        let counts = zeros.index_add(0, &token_rows, &counts.to_kind(Kind::Float));
        Self { token_rows, counts }
    }

    /// The sum of `x` over the tokens of each row, `[M]` to `[rows]`.
    pub(crate) fn sums(&self, x: &Tensor) -> Tensor {
        self.counts.zeros_like().index_add(0, &self.token_rows, x)
    }

    /// The mean of `x` over the tokens of each row that count, `[M]` to `[rows]`; `x` is 0 at the other tokens.
    fn means(&self, x: &Tensor) -> Tensor {
        self.sums(x) / self.counts.clamp_min(1.0)
    }

    /// The number of each token's row, `[rows]` to `[M]`.
    fn at_tokens(&self, x: &Tensor) -> Tensor {
        x.index_select(0, &self.token_rows)
    }
}

/// Names of the sums of [`Sums::policy`], in their order.
const POLICY_SUMS: [&str; 8] =
    ["policy_loss", "policy_clipped", "dual_clipped", "approx_kl", "policy_kl", "ratio", "ratio_squared", "ref_kl"];

/// Names of the sums of [`Sums::value`], in their order.
const VALUE_SUMS: [&str; 4] = ["value_loss", "value_clipped", "value", "value_error"];

/// Writes `numbers` to the sums `names`; writes nothing if there are no numbers.
fn write(stats: &mut StepStats, names: &[&str], numbers: &[f64]) {
    debug_assert!(numbers.is_empty() || numbers.len() == names.len(), "{numbers:?} for {} sums", names.len());
    names.iter().zip(numbers).for_each(|(name, &number)| *stats.sum_mut(name) = number);
}

/// Sums over the slices of a mini-batch; they stay on the device, and are read once.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    /// Sums of [`POLICY_SUMS`].
    policy: Option<Tensor>,
    /// Sums of [`VALUE_SUMS`].
    value: Option<Tensor>,
    /// Sums of [`MicroBatch::entropy_sums`].
    entropy: Option<Tensor>,
    /// Probability ratios of the slices, and which of their tokens count, if they are collected.
    ratios: Option<Vec<[Tensor; 2]>>,
    /// Loss of the policy with all its terms.
    loss: Option<Tensor>,
    /// Tokens below and above the clip range of the slices of a micro-batch, if they are collected.
    clips: Option<Vec<[Tensor; 2]>>,
    /// Differences from the log-probabilities of sampling, where they are compared.
    sampling: SamplingSums,
    /// Sums of [`Sums::end_rows`], and its extremes so far.
    row_clips: Option<Tensor>,
    extremes: Option<[Tensor; 2]>,
}

impl Sums {
    /// Empty sums; `ratios`: collect every probability ratio too; `clips`: collect what is clipped of each response.
    pub(crate) fn new(ratios: bool, clips: bool) -> Self {
        Self { ratios: ratios.then(Vec::new), clips: clips.then(Vec::new), ..Self::default() }
    }

    fn add_loss(&mut self, total: &Tensor, divisor: f64) {
        add(&mut self.loss, &[&(total.detach() / divisor)]);
    }

    /// Ends a micro-batch: adds the share of clipped tokens of each of its responses. With ratios of whole responses all tokens of a
    /// response have the same ratio.
    pub(crate) fn end_rows(&mut self, rows: &Rows) {
        let Some(clips) = self.clips.as_mut().map(std::mem::take).filter(|clips| !clips.is_empty()) else { return };
        let sums = |at: usize| {
            let parts: Vec<&Tensor> = clips.iter().map(|clips| &clips[at]).collect();
            rows.sums(&Tensor::cat(&parts, 0).to_kind(Kind::Float))
        };
        let (low, high) = (sums(0), sums(1));
        let shares = [&low, &high].map(|sums| sums / rows.counts.clamp_min(1.0));
        let one = |x: &Tensor| x.sum(Kind::Float);
        add(&mut self.row_clips, &[&one(&low), &one(&high), &one(&shares[0]), &one(&shares[1])]);
        let empty = rows.counts.eq(0.0);
        let (least, most) = (shares[0].masked_fill(&empty, f64::INFINITY).min(), shares[1].max());
        self.extremes = Some(match self.extremes.take() {
            Some([a, b]) => [a.min_other(&least), b.max_other(&most)],
            None => [least, most],
        });
    }

    fn add_policy(&mut self, loss: &math::PolicyLoss, ref_kl: Option<&Tensor>, counts: &Tensor) {
        let ratio = &loss.ratio;
        let zero = Tensor::zeros([], (Kind::Float, ratio.device()));
        let (ratios, squares) = (ratio.sum(Kind::Float), ratio.square().sum(Kind::Float));
        let terms = [
            &loss.sum,
            &loss.clipped,
            &loss.dual_clipped,
            &loss.approx_kl,
            &loss.policy_kl,
            &ratios,
            &squares,
            ref_kl.unwrap_or(&zero),
        ];
        debug_assert_eq!(terms.len(), POLICY_SUMS.len());
        add(&mut self.policy, &terms);
        if let Some(ratios) = &mut self.ratios {
            ratios.push([ratio.shallow_clone(), counts.shallow_clone()]);
        }
        if let Some(clips) = &mut self.clips {
            clips.push([loss.low_clipped.shallow_clone(), loss.high_clipped.shallow_clone()]);
        }
    }

    fn add_value(&mut self, terms: [&Tensor; VALUE_SUMS.len()]) {
        add(&mut self.value, &terms);
    }

    /// Adds the sums of the values that `other` collected.
    pub(crate) fn add_value_sums(&mut self, other: Self) {
        self.value = match (self.value.take(), other.value) {
            (Some(sum), Some(other)) => Some(sum + other),
            (sum, other) => sum.or(other),
        };
    }

    pub(crate) fn add_entropy(&mut self, [all, bonus]: [&Tensor; 2]) {
        add(&mut self.entropy, &[all, bonus]);
    }

    /// Reads the sums so far from the device.
    pub(crate) fn so_far(&self) -> StepStats {
        let same = |x: &Option<Tensor>| x.as_ref().map(Tensor::shallow_clone);
        let (policy, value, entropy, loss) =
            (same(&self.policy), same(&self.value), same(&self.entropy), same(&self.loss));
        let mut stats = StepStats::default();
        Self { policy, value, entropy, loss, ..Self::default() }.read_into(&mut stats);
        stats
    }

    /// Reads the sums from the device into `stats`, all at once, as each read waits for the device.
    pub(crate) fn read_into(self, stats: &mut StepStats) {
        let extremes = self.extremes.map(|extremes| Tensor::stack(&extremes, 0));
        let ratios = self.ratios.filter(|ratios| !ratios.is_empty()).map(|ratios| selected(&ratios));
        let sampling = self.sampling.joined();
        let [policy, loss, row_clips, extremes, value, entropy, ratios, sampling] =
            read([self.policy, self.loss, self.row_clips, extremes, self.value, self.entropy, ratios, sampling]);
        stats.sampling = stats.sampling.map(|_| SamplingSums::read(&sampling));
        write(stats, &POLICY_SUMS, &policy);
        write(stats, &VALUE_SUMS, &value);
        if let [loss] = loss.as_slice() {
            stats.loss = *loss;
        }
        if let [low, high, low_rows, high_rows] = row_clips.as_slice() {
            (stats.low_clipped, stats.high_clipped) = ([*low, *low_rows], [*high, *high_rows]);
        }
        // A rank without a row that counts has no minimum share: [`StepStats::sum_over`] takes that of the other ranks.
        (stats.low_clipped_min, stats.high_clipped_max) = match extremes.as_slice() {
            [least, most] => (*least, *most),
            _ => (f64::INFINITY, 0.0),
        };
        if let [all, bonus] = entropy.as_slice() {
            (stats.entropy, stats.bonus_entropy) = (*all, *bonus);
        }
        stats.ratios = ratios.into_iter().map(|ratio| ratio as f32).collect();
    }
}

/// Adds scalars to the sums of the same order, in f64.
fn add(sums: &mut Option<Tensor>, terms: &[&Tensor]) {
    tch::no_grad(|| {
        let terms = Tensor::stack(terms, 0).to_kind(Kind::Double);
        *sums = Some(match sums.take() {
            Some(sums) => sums + terms,
            None => terms,
        });
    });
}

/// Reads the numbers of the tensors, each of one dimension, at once; a tensor that is `None` has no numbers.
fn read<const N: usize>(tensors: [Option<Tensor>; N]) -> [Vec<f64>; N] {
    let lens = tensors.each_ref().map(|x| x.as_ref().map_or(0, Tensor::numel));
    let present: Vec<Tensor> = tensors.into_iter().flatten().map(|x| x.to_kind(Kind::Double)).collect();
    let all = if present.is_empty() { Vec::new() } else { to_host(&Tensor::cat(&present, 0)) };
    let mut rest = all.into_iter();
    lens.map(|len| rest.by_ref().take(len).collect())
}

/// The numbers `[M]` of each pair whose mask, `[M]` bool, is true, one after another.
pub(crate) fn selected(pairs: &[[Tensor; 2]]) -> Tensor {
    let all = |at: usize| Tensor::cat(&pairs.iter().map(|pair| &pair[at]).collect::<Vec<_>>(), 0);
    all(0).masked_select(&all(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rl::experience::tests::experience;
    use crate::rl::math::PolicyClip;
    use tch::Device;

    /// Lengths of the rows; the last row is masked.
    const LENGTHS: [i64; 4] = [4, 1, 3, 2];
    const CLIPPED: Objective = Objective::Clipped(PolicyClip { low: 0.1, high: 0.2, dual: None });
    const CISPO: Objective = Objective::Cispo { most: 0.2 };
    const SAPO: Objective = Objective::Sapo { positive: 1.0, negative: 1.05 };
    const VESPO: Objective = Objective::Vespo { positive: [2.0, 3.0], negative: [3.0, 2.0] };
    const KL_COEF: f64 = 0.3;
    const ENTROPY_COEF: f64 = 0.05;

    /// Random numbers of the tokens of a micro-batch, `[M]` f32.
    struct Tokens {
        new: Tensor,
        old: Tensor,
        reference: Tensor,
        advantages: Tensor,
        entropy: Tensor,
    }

    fn tokens() -> Tokens {
        tch::manual_seed(7);
        let total: i64 = LENGTHS.iter().sum();
        let random = |scale: f64| Tensor::randn([total], (Kind::Float, Device::Cpu)) * scale;
        let new = random(0.4) - 2.0;
        let advantages: Vec<f32> = [1.3f32, -0.7, -1.1, 0.4]
            .iter()
            .zip(LENGTHS)
            .flat_map(|(&advantage, length)| vec![advantage; length as usize])
            .collect();
        Tokens {
            old: &new + random(0.3),
            reference: &new + random(0.5),
            entropy: random(1.0) + 3.0,
            advantages: Tensor::from_slice(&advantages),
            new,
        }
    }

    fn settings(objective: Objective, importance: ImportanceLevel, aggregation: LossAggregation) -> LossSettings {
        LossSettings {
            objective,
            importance,
            aggregation,
            on_policy: false,
            top_entropy_quantile: 1.0,
            off_policy_mask_threshold: None,
            cliprange_value: 0.2,
            vf_coef: 0.0,
            entropy_coef: ENTROPY_COEF,
            kl_in_loss: Some(KlEstimator::K3),
            use_bias_correction_kl: true,
            temperature: 1.0,
        }
    }

    /// The loss by its formula, with the gradient of a response's ratio through all of its tokens.
    fn plain(x: &Tokens, new: &Tensor, entropy: &Tensor, settings: &LossSettings, least: Option<f64>) -> Tensor {
        let (mut loss, mut bonus, mut first) = (Tensor::from(0f32), Tensor::from(0f32), 0);
        for length in &LENGTHS[..3] {
            let here = |x: &Tensor| x.narrow(0, first, *length);
            let (new, advantages) = (here(new), here(&x.advantages));
            let old = if settings.on_policy { new.detach() } else { here(&x.old) };
            let log_ratio = &new - &old;
            let log_ratio = match settings.importance {
                ImportanceLevel::Token => log_ratio,
                ImportanceLevel::Sequence => log_ratio.mean(Kind::Float).expand([*length], true),
                ImportanceLevel::SequenceProduct => log_ratio.sum(Kind::Float).expand([*length], true),
            };
            let ratio = log_ratio.exp();
            let is_positive = advantages.double_value(&[0]) > 0.0;
            let objective = match settings.objective {
                Objective::Sapo { positive, negative } => {
                    let t = if is_positive { positive } else { negative };
                    -(t * (&ratio - 1.0)).sigmoid() * (4.0 / t) * &advantages
                }
                Objective::Vespo { positive, negative } => {
                    let [k, lambda] = if is_positive { positive } else { negative };
                    // No sum is near a bound.
                    let w = (&new - &old).detach().sum(Kind::Float).double_value(&[]).exp();
                    -&advantages * &new * (lambda + k * w.ln() - lambda * w).exp()
                }
                Objective::Cispo { most } => -&advantages * &new * ratio.detach().clamp_max(most),
                Objective::Clipped(clip) => {
                    (-&advantages * &ratio).max_other(&(-&advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)))
                }
            };
            let high = here(entropy).detach().ge(least.unwrap_or(f64::NEG_INFINITY)).to_kind(Kind::Float);
            let far = (&old - &new).mean(Kind::Float).double_value(&[]);
            let near = advantages.double_value(&[0]) >= 0.0
                || settings.off_policy_mask_threshold.is_none_or(|threshold| far <= threshold);
            let objective = if near { objective * &high } else { objective * 0.0 };
            let gap = here(&x.reference) - &new;
            let kl = gap.exp() - gap - 1.0;
            let kl = if settings.use_bias_correction_kl { kl * &ratio } else { kl };
            let weight = match settings.aggregation {
                LossAggregation::Responses => 1.0 / *length as f64,
                _ => 1.0,
            };
            loss += (objective + kl * KL_COEF).sum(Kind::Float) * weight;
            bonus += (here(entropy) * high).sum(Kind::Float) * ENTROPY_COEF;
            first += length;
        }
        loss / divisor(settings) - bonus / high_tokens(entropy, least)
    }

    fn divisor(settings: &LossSettings) -> f64 {
        if settings.aggregation == LossAggregation::Tokens { 8.0 } else { 4.0 }
    }

    /// Number of tokens that count and have a high entropy.
    fn high_tokens(entropy: &Tensor, least: Option<f64>) -> f64 {
        let high = entropy.narrow(0, 0, 8).ge(least.unwrap_or(f64::NEG_INFINITY));
        high.sum(Kind::Float).double_value(&[])
    }

    /// The loss of a micro-batch in two slices.
    fn sliced(x: &Tokens, new: &Tensor, entropy: &Tensor, settings: &LossSettings, least: Option<f64>) -> Tensor {
        let mut e = experience(&LENGTHS, 1, &[0.0; 4]);
        let slots = |x: &Tensor| crate::rl::experience::to_slots(x, &LENGTHS, 4);
        (e.logprobs, e.ref_logprobs) = (slots(&x.old), Some(slots(&x.reference)));
        let advantages = slots(&x.advantages);
        let zeros = || e.logprobs.zeros_like();
        let (kl, rewards, returns) = (zeros(), zeros(), zeros());
        e.mask_rows(&[3]);
        let targets = Targets { kl, kl_coef: KL_COEF, rewards, advantages: advantages.shallow_clone(), returns };
        let mut batch = MicroBatch::new(&e, &targets, &advantages, &[0, 1, 2, 3], settings);
        if settings.needs_preview() {
            let preview = Preview { logprobs: new.detach(), entropy: Some(entropy.detach()) };
            batch.take_preview(&preview, settings, least);
        }
        let factors = LossFactors {
            divisor: divisor(settings),
            entropy_tokens: high_tokens(entropy, least),
            entropy_coef: settings.entropy_coef,
            value_slots: 1.0,
            kl_coef: KL_COEF,
            scales: [1.0; 2],
            least_entropy: least,
        };
        let mut sums = Sums::new(false, false);
        let mut loss = |slice: Range<i64>| {
            let here = |x: &Tensor| x.narrow(0, slice.start, slice.end - slice.start);
            let now = TokenLogprobs { logprobs: here(new), entropy: Some(here(entropy)), kl: None, logits: None };
            batch.policy_loss(slice.clone(), &now, settings, factors, &mut sums)
        };
        loss(0..3) + loss(3..10)
    }

    #[track_caller]
    fn assert_same_gradients(name: &str, settings: &LossSettings) {
        let x = tokens();
        let mut counted = to_host(&x.entropy.narrow(0, 0, 8));
        let quantile = settings.top_entropy_quantile;
        let least = (quantile < 1.0).then(|| math::quantile(&mut counted, 1.0 - quantile));
        let gradients = |loss: fn(&Tokens, &Tensor, &Tensor, &LossSettings, Option<f64>) -> Tensor| {
            let leaf = |x: &Tensor| x.copy().set_requires_grad(true);
            let (new, entropy) = (leaf(&x.new), leaf(&x.entropy));
            let loss = loss(&x, &new, &entropy, settings, least);
            loss.backward();
            [loss.detach(), new.grad(), entropy.grad()]
        };
        let (found, expected) = (gradients(sliced), gradients(plain));
        for (part, (found, expected)) in
            ["loss", "log-probabilities", "entropies"].iter().zip(found.iter().zip(&expected))
        {
            let gap = (found - expected).abs().max().double_value(&[]);
            assert!(gap < 2e-6, "{name}: {part}: {found} is not {expected}: {gap:e}");
        }
    }

    #[test]
    fn gradients_of_sequence_ratios_go_to_all_tokens_of_a_response() {
        for importance in [ImportanceLevel::Token, ImportanceLevel::Sequence, ImportanceLevel::SequenceProduct] {
            for objective in [CLIPPED, SAPO, CISPO, VESPO] {
                if objective == VESPO && importance != ImportanceLevel::Token {
                    continue;
                }
                for aggregation in [LossAggregation::Responses, LossAggregation::ResponseSums, LossAggregation::Tokens]
                {
                    let all = settings(objective, importance, aggregation);
                    let name = format!("{importance:?}, {objective:?}, {aggregation:?}");
                    assert_same_gradients(&name, &all);
                    let uncorrected = LossSettings { use_bias_correction_kl: false, ..all.clone() };
                    assert_same_gradients(&format!("{name}, uncorrected"), &uncorrected);
                    assert_same_gradients(
                        &format!("{name}, on policy, uncorrected"),
                        &LossSettings { on_policy: true, ..uncorrected },
                    );
                    assert_same_gradients(
                        &format!("{name}, on policy"),
                        &LossSettings { on_policy: true, ..all.clone() },
                    );
                    assert_same_gradients(
                        &format!("{name}, half of the tokens"),
                        &LossSettings { top_entropy_quantile: 0.5, ..all.clone() },
                    );
                    let masked =
                        LossSettings { off_policy_mask_threshold: Some(0.01), top_entropy_quantile: 0.7, ..all };
                    assert_same_gradients(&format!("{name}, masked"), &masked);
                }
            }
        }
    }

    #[test]
    fn where_advantages_differ_by_token_each_token_has_the_gradient_of_its_own() {
        let lengths = Tensor::from_slice(&[4f32, 4.0, 4.0, 4.0, 1.0, 3.0, 3.0, 3.0, 0.0, 0.0]);
        for (importance, factor) in [
            (ImportanceLevel::Token, lengths.ones_like()),
            (ImportanceLevel::Sequence, lengths.ones_like()),
            (ImportanceLevel::SequenceProduct, lengths.shallow_clone()),
        ] {
            let settings = LossSettings {
                on_policy: true,
                entropy_coef: 0.0,
                kl_in_loss: None,
                ..settings(CLIPPED, importance, LossAggregation::Tokens)
            };
            let mut x = tokens();
            x.advantages = Tensor::from_slice(&[1.0f32, -2.0, 3.0, 0.5, -1.0, 2.0, -0.25, 4.0, 1.0, 1.0]);
            let new = x.new.copy().set_requires_grad(true);
            sliced(&x, &new, &x.entropy, &settings, None).backward();
            // The ratios are 1; the last row is masked.
            let counts = lengths.gt(0.0).to_kind(Kind::Float);
            let gap = (new.grad() + &x.advantages * factor * counts / 8.0).abs().max().double_value(&[]);
            assert!(gap < 1e-6, "{importance:?}: {gap:e}");
        }
    }

    #[test]
    fn a_kl_over_the_vocabulary_needs_no_estimate_before_the_backward_pass() {
        let mut settings = settings(CLIPPED, ImportanceLevel::Sequence, LossAggregation::Tokens);
        settings.kl_in_loss = Some(KlEstimator::Full);
        let x = tokens();
        let mut e = experience(&LENGTHS, 1, &[0.0; 4]);
        let slots = |x: &Tensor| crate::rl::experience::to_slots(x, &LENGTHS, 4);
        (e.logprobs, e.ref_logprobs) = (slots(&x.old), Some(slots(&x.reference)));
        let zeros = || e.logprobs.zeros_like();
        let targets =
            Targets { kl: zeros(), kl_coef: KL_COEF, rewards: zeros(), advantages: zeros(), returns: zeros() };
        let mut batch = MicroBatch::new(&e, &targets, &zeros(), &[0, 1, 2, 3], &settings);
        batch.take_preview(&Preview { logprobs: x.new, entropy: None }, &settings, None);
        assert!(batch.sequence.is_some_and(|sequence| sequence.kl.is_none()));
    }

    #[test]
    fn the_least_share_that_is_clipped_is_that_of_the_rows_that_count() {
        let rows = |counts: &[bool]| Rows::new(Tensor::from_slice(&[0i64, 1]), 2, &Tensor::from_slice(counts));
        let clips = |low: &[bool]| [Tensor::from_slice(low), Tensor::from_slice(&[false, false])];
        let least = |batches: &[(&[bool], &[bool])]| {
            let mut sums = Sums::new(false, true);
            for (counts, low) in batches {
                sums.clips = Some(vec![clips(low)]);
                sums.end_rows(&rows(counts));
            }
            let mut stats = StepStats::default();
            sums.read_into(&mut stats);
            let rank_minimum = stats.low_clipped_min;
            stats.sum_over(&rlhf_base::dist::World::single()).unwrap();
            [rank_minimum, stats.low_clipped_min]
        };
        assert_eq!(least(&[(&[true, false], &[true, false]), (&[true, true], &[true, true])]), [1.0, 1.0]);
        assert_eq!(least(&[(&[true, true], &[true, false])]), [0.0, 0.0]);
        // A rank whose rows are masked, or that has none, leaves the minimum to the others; without any row there is none.
        assert_eq!(least(&[(&[false, false], &[false, false])]), [f64::INFINITY; 2]);
        assert_eq!(least(&[]), [f64::INFINITY; 2]);
    }

    #[test]
    fn one_read_puts_each_sum_where_it_belongs_and_leaves_out_those_that_there_are_not() {
        let scalar = |x: f64| Tensor::from(x as f32);
        let sums = |policy: bool, value: bool| {
            let mut sums = Sums::new(policy, policy);
            // Sums in f64: in f32 the second term would be lost.
            for term in [1.0, 2f64.powi(-30)] {
                if policy {
                    let terms: Vec<Tensor> = (1..9).map(|at| scalar(f64::from(at) * term)).collect();
                    add(&mut sums.policy, &terms.iter().collect::<Vec<_>>());
                    sums.add_loss(&scalar(10.0 * term), 2.0);
                    sums.add_entropy([&scalar(9.0 * term), &scalar(10.0 * term)]);
                }
                if value {
                    sums.add_value([&scalar(20.0 * term), &scalar(21.0), &scalar(22.0), &scalar(23.0)]);
                }
            }
            if policy {
                let counts = Tensor::from_slice(&[true, false, true]);
                let ratios = [[0.5f32, 9.0, f32::INFINITY], [1.25, 9.0, 0.0]];
                sums.ratios = Some(ratios.map(|ratio| [Tensor::from_slice(&ratio), counts.shallow_clone()]).into());
                sums.clips = Some(vec![[Tensor::from_slice(&[true, true]), Tensor::from_slice(&[false, true])]]);
                sums.end_rows(&Rows::new(Tensor::from_slice(&[0i64, 0]), 1, &Tensor::from_slice(&[true, true])));
            }
            let mut stats = StepStats { tokens: 3.0, ..StepStats::default() };
            sums.read_into(&mut stats);
            stats
        };
        let e = 1.0 + 2f64.powi(-30);
        let value_stats = StepStats {
            value_loss: 20.0 * e,
            value_clipped: 42.0,
            value: 44.0,
            value_error: 46.0,
            ..StepStats::default()
        };
        let both_stats = StepStats {
            tokens: 3.0,
            loss: 5.0 * e,
            policy_loss: e,
            policy_clipped: 2.0 * e,
            dual_clipped: 3.0 * e,
            approx_kl: 4.0 * e,
            policy_kl: 5.0 * e,
            ratio: 6.0 * e,
            ratio_squared: 7.0 * e,
            ref_kl: 8.0 * e,
            entropy: 9.0 * e,
            bonus_entropy: 10.0 * e,
            low_clipped: [2.0, 1.0],
            high_clipped: [1.0, 0.5],
            low_clipped_min: 1.0,
            high_clipped_max: 0.5,
            ratios: vec![0.5, f32::INFINITY, 1.25, 0.0],
            ..value_stats
        };
        let none = f64::INFINITY;
        assert_eq!(sums(true, true), both_stats);
        assert_eq!(sums(false, true), StepStats { tokens: 3.0, low_clipped_min: none, ..value_stats });
        assert_eq!(sums(false, false), StepStats { tokens: 3.0, low_clipped_min: none, ..StepStats::default() });
    }
}
