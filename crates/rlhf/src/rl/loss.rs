//! The losses of one micro-batch: clipped policy objective with KL and entropy terms, clipped value loss.

use crate::model::{Sampled, TokenLogprobs, TokenSet};
use crate::rl::experience::{Experience, from_slots};
use crate::rl::math::{self, KlEstimator, PolicyClip};
use crate::rl::shaping::Targets;
use crate::rl::stats::StepStats;
use std::ops::Range;
use tch::{Kind, Tensor};

/// The terms of both losses and their weights.
#[derive(Debug, Clone, PartialEq)]
pub struct LossSettings {
    /// Bounds on the probability ratio.
    pub clip: PolicyClip,
    /// Bound on the distance of a new value from the old one.
    pub cliprange_value: f64,
    /// Weight of the value loss.
    pub vf_coef: f64,
    /// Entropy bonus coefficient.
    pub entropy_coef: f64,
    /// Estimator of the KL term in the policy loss; `None` without one.
    pub kl_in_loss: Option<KlEstimator>,
    /// Temperature of the distributions whose log-probabilities are taken; that of the rollout.
    pub temperature: f64,
}

/// Divisors and factors of a mini-batch's losses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weights {
    /// Response tokens of the whole mini-batch.
    pub(crate) tokens: f64,
    /// Value slots of the whole mini-batch.
    pub(crate) value_slots: f64,
    /// Weight of the KL in the policy loss.
    pub(crate) kl_coef: f64,
    /// Loss scales of policy and value model; 1 outside f16.
    pub(crate) scales: [f64; 2],
}

/// The rows of a micro-batch as the models take them: ragged, one number per token or value, row after row.
pub(crate) struct MicroBatch {
    pub(crate) sequences: Vec<Vec<i64>>,
    pub(crate) token_spans: Vec<Range<usize>>,
    pub(crate) value_spans: Vec<Range<usize>>,
    sets: Option<Vec<TokenSet>>,
    old_logprobs: Tensor,
    ref_logprobs: Option<Tensor>,
    advantages: Tensor,
    counts: Tensor,
    old_values: Tensor,
    returns: Tensor,
    value_counts: Tensor,
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
        let lengths: Vec<i64> = rows.iter().map(|&row| e.responses[row].len() as i64).collect();
        let of_tokens = |x: &Tensor| from_slots(x, &lengths, rows);
        let value_counts: Vec<i64> = rows.iter().map(|&row| e.value_counts[row]).collect();
        let of_values = |x: &Tensor| from_slots(x, &value_counts, rows);
        Self {
            sequences: rows.iter().map(|&row| e.sequence(row)).collect(),
            token_spans: rows.iter().map(|&row| e.token_span(row)).collect(),
            value_spans: rows.iter().map(|&row| e.value_span(row)).collect(),
            sets: e.sets_of(rows.iter().copied()),
            old_logprobs: of_tokens(&e.logprobs),
            ref_logprobs: settings.kl_in_loss.map(|_| of_tokens(&e.ref_logprobs)),
            advantages: of_tokens(advantages),
            counts: of_tokens(&e.masks.loss),
            old_values: of_values(&e.values),
            returns: of_values(&targets.returns),
            value_counts: of_values(&e.masks.value_loss),
        }
    }

    pub(crate) fn sampled(&self, settings: &LossSettings) -> Sampled<'_> {
        Sampled { temperature: settings.temperature, sets: self.sets.as_deref() }
    }

    /// Loss of the policy over a slice of the tokens, a scalar; its sums go to `sums`.
    ///
    /// The clipped objective, plus `kl_coef` times the KL and minus `entropy_coef` times the entropy where the settings have
    /// these terms, divided by the token count of the mini-batch.
    pub(crate) fn policy_loss(
        &self,
        slice: Range<i64>,
        now: &TokenLogprobs,
        settings: &LossSettings,
        weights: Weights,
        sums: &mut Sums,
    ) -> Tensor {
        let here = |x: &Tensor| x.narrow(0, slice.start, slice.end - slice.start);
        let counts = here(&self.counts);
        let loss = math::policy_loss(
            &now.logprobs,
            &here(&self.old_logprobs),
            &here(&self.advantages),
            &counts,
            settings.clip,
        );
        let kl = settings.kl_in_loss.zip(self.ref_logprobs.as_ref()).map(|(estimator, reference)| {
            let estimate = || math::kl(&now.logprobs, &here(reference), &counts, estimator);
            now.kl.as_ref().map_or_else(estimate, |kl| math::keep(kl, &counts)).sum(Kind::Float)
        });
        let total = match &kl {
            Some(kl) => &loss.sum + kl * weights.kl_coef,
            None => loss.sum.shallow_clone(),
        };
        let total = match now.entropy.as_ref().filter(|_| settings.entropy_coef > 0.0) {
            Some(entropy) => total - math::masked_sum(entropy, &counts) * settings.entropy_coef,
            None => total,
        };
        sums.add_policy(&loss, kl.as_ref(), &counts);
        // With no token that counts there is no gradient.
        total / (weights.tokens.max(1.0) / weights.scales[0])
    }

    /// Loss of the value model over all values, a scalar; its sums go to `sums`.
    pub(crate) fn value_loss(
        &self,
        values: &Tensor,
        settings: &LossSettings,
        weights: Weights,
        sums: &mut Sums,
    ) -> Tensor {
        let mask = &self.value_counts;
        let loss = math::value_loss(values, &self.old_values, &self.returns, mask, settings.cliprange_value);
        let values = values.detach();
        let error = math::masked_sum(&(&values - &self.returns).square(), mask);
        sums.add_value([&loss.sum, &loss.clipped, &math::masked_sum(&values, mask), &error]);
        loss.sum * (settings.vf_coef / weights.value_slots.max(1.0) * weights.scales[1])
    }

    /// Sum of the entropies of the tokens that count, in nats.
    pub(crate) fn entropy_sum(&self, entropy: &Tensor) -> Tensor {
        math::masked_sum(entropy, &self.counts)
    }
}

/// Sums over the slices of a mini-batch; they stay on the device, and are read once.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    policy: Option<Tensor>,
    value: Option<Tensor>,
    entropy: Option<Tensor>,
    /// Probability ratios of the tokens that count, if they are collected.
    ratios: Option<Vec<Tensor>>,
}

impl Sums {
    /// Empty sums; `ratios`: collect every probability ratio too.
    pub(crate) fn new(ratios: bool) -> Self {
        Self { ratios: ratios.then(Vec::new), ..Self::default() }
    }

    fn add_policy(&mut self, loss: &math::PolicyLoss, ref_kl: Option<&Tensor>, counts: &Tensor) {
        let ratio = &loss.ratio;
        let zero = Tensor::zeros([], (Kind::Float, ratio.device()));
        add(
            &mut self.policy,
            &[
                &loss.sum,
                &loss.clipped,
                &loss.dual_clipped,
                &loss.approx_kl,
                &loss.policy_kl,
                &ratio.sum(Kind::Float),
                &ratio.square().sum(Kind::Float),
                ref_kl.unwrap_or(&zero),
            ],
        );
        if let Some(ratios) = &mut self.ratios {
            ratios.push(ratio.masked_select(counts));
        }
    }

    fn add_value(&mut self, terms: [&Tensor; 4]) {
        add(&mut self.value, &terms);
    }

    /// Adds the sums of the values that another collected.
    pub(crate) fn add_values_of(&mut self, other: Self) {
        self.value = match (self.value.take(), other.value) {
            (Some(own), Some(others)) => Some(own + others),
            (own, others) => own.or(others),
        };
    }

    pub(crate) fn add_entropy(&mut self, sum: &Tensor) {
        add(&mut self.entropy, &[sum]);
    }

    /// Reads the sums from the device into `stats`.
    pub(crate) fn read_into(self, stats: &mut StepStats) {
        if let [loss, clipped, dual_clipped, approx_kl, policy_kl, ratio, ratio_squared, ref_kl] =
            numbers(self.policy).as_slice()
        {
            (stats.policy_loss, stats.policy_clipped, stats.dual_clipped) = (*loss, *clipped, *dual_clipped);
            (stats.approx_kl, stats.policy_kl, stats.ref_kl) = (*approx_kl, *policy_kl, *ref_kl);
            (stats.ratio, stats.ratio_squared) = (*ratio, *ratio_squared);
        }
        if let [loss, clipped, value, error] = numbers(self.value).as_slice() {
            (stats.value_loss, stats.value_clipped) = (*loss, *clipped);
            (stats.value, stats.value_error) = (*value, *error);
        }
        stats.entropy = numbers(self.entropy).first().copied().unwrap_or(0.0);
        if let Some(ratios) = self.ratios.filter(|ratios| !ratios.is_empty()) {
            stats.ratios = Vec::try_from(Tensor::cat(&ratios, 0)).expect("a vector of f32");
        }
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

fn numbers(sums: Option<Tensor>) -> Vec<f64> {
    sums.map_or_else(Vec::new, |sums| Vec::try_from(sums).expect("a vector of f64"))
}
