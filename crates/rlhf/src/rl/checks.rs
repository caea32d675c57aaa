//! Sanity checks of a PPO run: before it trains, that its passes agree; while it trains, that its numbers are finite.

use crate::rl::experience::to_slots;
use crate::rl::learner::{Learner, UpdateSettings};
use crate::rl::loss::LossSettings;
use crate::rl::math;
use crate::rl::rollout::{RolloutSettings, experience};
use crate::rl::shaping::{Shaping, targets};
use crate::rl::stats::{StepStats, optimizer_steps};
use rlhf_base::{Error, Result};
use rlhf_lm::generate::Response;
use rlhf_lm::model::CausalLm;
use std::fmt::{self, Display};
use tch::{Kind, Tensor};

/// Most prompts in the checks.
pub(crate) const ROWS: usize = 4;

/// Most tokens of a response in the checks: enough to leave the prompt behind, few enough to cost little.
pub(crate) const TOKENS: usize = 32;

/// Distances between log-probabilities that should be equal, each a root mean square over the tokens of a few responses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Checks {
    /// Between the rollout and the pass that training uses: the first ratio is as close to 1 as this is to 0.
    pub ratio: f64,
    /// Between policy and reference.
    pub kl: ReferenceKl,
    /// Between decoding with a cache and one pass over the whole text; `None` where the model's rotary angles depend on the length
    /// of the text, so that the two differ by design.
    pub cached: Option<f64>,
}

/// The distance between policy and reference model at the start of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReferenceKl {
    /// Between models of equal weights.
    Measured(f64),
    /// The models are different, so that their KL is never 0.
    OtherModel,
    /// There is no reference model.
    NoModel,
}

/// Settings of [`Checks::of`], which evaluates its rows as an update does.
#[derive(Debug, Clone)]
pub struct CheckSettings {
    /// Settings of the passes over the rows; with `recompute_logprobs`.
    pub rollout: RolloutSettings,
    /// Settings for rewards and targets.
    pub shaping: Shaping,
    /// Weight of the KL.
    pub kl_coef: f64,
    /// The models compute in bf16 or f16.
    pub low_precision: bool,
}

impl ReferenceKl {
    /// The distance between the models, if their weights are equal.
    pub fn distance(self) -> Option<f64> {
        match self {
            Self::Measured(kl) => Some(kl),
            Self::OtherModel | Self::NoModel => None,
        }
    }
}

impl Checks {
    /// Largest distance of log-probabilities that count as equal: far above the rounding of f32, and above that of bf16 and
    /// f16, which have two or three digits.
    pub fn tolerance(low_precision: bool) -> f64 {
        if low_precision { 0.1 } else { 1e-4 }
    }

    /// Compares every pass of a run over a few responses; `learner` is left as it was, without gradients.
    ///
    /// # Errors
    /// If the rows do not fit the models.
    pub fn of(
        learner: &mut Learner,
        reference: Option<&CausalLm>,
        prompts: &[Vec<i64>],
        responses: &[Response],
        settings: &CheckSettings,
    ) -> Result<Self> {
        let policy = &learner.policy;
        let device = policy.device();
        let scores = Tensor::zeros([prompts.len() as i64], (Kind::Float, device));
        let models = learner.rollout_models(reference);
        let mut experience = experience(models, prompts, responses, scores, &settings.rollout)?;
        let sampled: Vec<f32> = responses.iter().flat_map(|response| response.logprobs.iter().copied()).collect();
        let sampled = Tensor::from_slice(&sampled).to_device(device);
        let sampled = to_slots(&sampled, &experience.lengths(), experience.width());
        let tokens = experience.sampled.iter().sum::<i64>() as f64;
        let distance = |a: &Tensor, b: &Tensor| {
            let difference = math::keep(&(a - b), &experience.masks.response).to_kind(Kind::Double);
            (difference.square().sum(Kind::Double).double_value(&[]) / tokens).sqrt()
        };
        let cached = (!policy.config().has_length_dependent_rope()).then(|| distance(&sampled, &experience.logprobs));
        let kl = match (reference, &experience.ref_logprobs) {
            (Some(reference), Some(logprobs)) => {
                let kl = distance(&experience.logprobs, logprobs);
                // Comparing weights reads all of them, so it is done only where the KL is not 0.
                let equal = kl <= Self::tolerance(settings.low_precision) || same_weights(policy, reference)?;
                if equal { ReferenceKl::Measured(kl) } else { ReferenceKl::OtherModel }
            }
            _ => ReferenceKl::NoModel,
        };
        if policy.is_exact() {
            experience.logprobs = sampled;
        }
        let rows: Vec<usize> = (0..prompts.len()).collect();
        // Every group is one row here, so advantages are 0 where they compare rows; the ratios do not depend on them.
        let targets = targets(&experience, settings.kl_coef, &settings.shaping);
        let update = learner.settings().update.clone();
        let loss = LossSettings { on_policy: false, ..update.loss };
        learner.set_update(UpdateSettings { loss, ..update });
        let stats = learner.policy_gradients(&experience, &targets, &rows, rows.len());
        learner.set_update(update);
        learner.zero_grad();
        let stats = stats?;
        Ok(Self { ratio: (2.0 * stats.approx_kl / stats.tokens.max(1.0)).sqrt(), kl, cached })
    }

    /// Describes the first check that failed.
    pub fn failure(&self, tolerance: f64) -> Option<String> {
        let claims = [
            (
                Some(self.ratio),
                "the first ratio is 1",
                "rollout and training",
                "so the policy would learn the difference",
            ),
            (
                self.kl.distance(),
                "the KL to the reference is 0",
                "policy and reference",
                "though their weights are equal",
            ),
            (
                self.cached,
                "decoding is exact",
                "decoding with a cache and a whole pass",
                "so responses are not the policy's",
            ),
        ];
        let failed = claims
            .into_iter()
            .find(|(distance, ..)| distance.is_some_and(|distance| distance.is_nan() || distance > tolerance));
        failed.map(|(distance, claim, who, so)| {
            let distance = distance.unwrap_or(f64::NAN);
            format!(
                "checks: {claim}: expected log-probs within {tolerance:.0e}, found {who} {distance:.1e} apart, {so}; \
                 --no_checks skips this check"
            )
        })
    }
}

impl Display for Checks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "first ratio 1 within {:.1e}", self.ratio)?;
        match self.kl {
            ReferenceKl::Measured(kl) => write!(f, ", KL to the reference 0 within {kl:.1e}")?,
            ReferenceKl::OtherModel => f.write_str(
                ", KL to the reference not 0: the policy has been trained since, or the reference is another model",
            )?,
            ReferenceKl::NoModel => {}
        }
        match self.cached {
            Some(cached) => write!(f, ", cached and full log-probs equal within {cached:.1e}"),
            None => Ok(()),
        }
    }
}

/// Returns true if two language models have the same weights, and an adapter on the first, if there is one, adds nothing yet.
/// Parameters that are divided over ranks are gathered one unit at a time.
fn same_weights(policy: &CausalLm, reference: &CausalLm) -> Result<bool> {
    let _loaded = reference.loaded()?;
    let mut policy_shards = policy.shards().by_name(false);
    let mut reference_shards = reference.shards().by_name(false);
    for param in policy.params().iter().filter(|param| !param.name.starts_with("v_head.")) {
        let other = reference.params().iter().find(|other| other.name == param.name);
        policy_shards.gather(&param.name)?;
        let same = match other {
            Some(other) => {
                reference_shards.gather(&other.name)?;
                // The reference may hold a matrix in the lower precision that it is computed in.
                let (a, b) = (param.tensor.detach().to_kind(other.tensor.kind()), other.tensor.detach());
                a.size() == b.size() && a.equal(&b)
            }
            // The product of an adapter's matrices is 0 where the second matrix is, and DoRA's magnitudes are then the norms of the weight.
            None => {
                let any = ["lora_A.weight", "lora_magnitude_vector"].iter().any(|end| param.name.ends_with(end));
                any || param.tensor.count_nonzero(None::<i64>).int64_value(&[]) == 0
            }
        };
        if !same {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Counts consecutive updates without a single optimizer step.
#[derive(Debug, Default)]
pub(crate) struct Skips {
    updates: usize,
    /// The first number that was not finite in the present update, the number of steps skipped for such numbers, and the number of all
    /// steps.
    reason: Option<(String, usize, usize)>,
}

impl Skips {
    /// Records the steps of an update.
    pub(crate) fn record(&mut self, steps: &[StepStats]) {
        let steps = optimizer_steps(steps);
        let all = steps.clone().count();
        let reasons: Vec<String> = steps.filter_map(|parts| parts.iter().find_map(StepStats::not_finite)).collect();
        let skipped = reasons.len();
        self.updates = if skipped < all || all == 0 { 0 } else { self.updates + 1 };
        self.reason = reasons.into_iter().next().map(|reason| (reason, skipped, all));
    }

    /// State for a checkpoint.
    pub(crate) fn state(&self) -> usize {
        self.updates
    }

    /// Restores the state that [`Skips::state`] returned.
    pub(crate) fn load_state(&mut self, state: usize) {
        self.updates = state;
    }

    /// Warning about skipped steps after update `update`, counted from 1.
    ///
    /// # Errors
    /// If `most` consecutive updates took no step.
    pub(crate) fn warning(&self, update: usize, most: usize) -> Result<Option<String>> {
        let Some((reason, skipped, steps)) = &self.reason else { return Ok(None) };
        if self.updates < most {
            return Ok(Some(format!("update {update}: {skipped} of {steps} optimizer steps skipped: {reason}")));
        }
        let updates = match self.updates {
            1 => format!("update {update} was skipped"),
            updates => format!("{updates} updates in a row were skipped, update {update} the last"),
        };
        Err(Error::Run(format!(
            "{updates} (max_skipped_updates = {most}): {reason}: training diverged; a lower learning_rate and \
             max_grad_norm = 1 from the start prevent it"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_name_what_failed_and_list_in_one_line_what_held() {
        let good = Checks { ratio: 2.4e-7, kl: ReferenceKl::Measured(0.0), cached: Some(2.4e-6) };
        assert_eq!(good.failure(1e-4), None);
        assert_eq!(
            good.to_string(),
            "first ratio 1 within 2.4e-7, KL to the reference 0 within 0.0e0, cached and full log-probs equal within 2.4e-6"
        );
        for (bad, words) in [
            (
                Checks { ratio: 2e-4, ..good },
                "the first ratio is 1: expected log-probs within 1e-4, found rollout and training 2.0e-4 apart",
            ),
            (Checks { ratio: f64::NAN, ..good }, "the first ratio is 1"),
            (Checks { kl: ReferenceKl::Measured(0.5), ..good }, "the KL to the reference is 0"),
            (Checks { cached: Some(f64::NAN), ..good }, "decoding is exact"),
        ] {
            let failure = bad.failure(1e-4).unwrap();
            assert!(failure.contains(words) && failure.contains("--no_checks"), "{failure}");
            assert_eq!(bad.failure(1.0).is_some(), failure.contains("NaN"));
        }
        let other = Checks { kl: ReferenceKl::OtherModel, cached: None, ..good };
        assert_eq!(other.failure(1e-4), None);
        let words = "KL to the reference not 0: the policy has been trained since, or the reference is another model";
        assert!(other.to_string().ends_with(words), "{other}");
    }

    #[test]
    fn a_run_stops_after_some_updates_without_a_step_in_a_row_and_not_before() {
        let sound = StepStats { tokens: 3.0, ..StepStats::default() };
        let bad = StepStats { value_grad_norm: f64::INFINITY, tokens: 3.0, ..StepStats::default() };
        let (whole, half, none) = ([bad.clone(), bad.clone()], [sound.clone(), bad], [sound.clone(), sound]);
        let mut skips = Skips::default();
        let mut told = |steps: &[StepStats]| {
            skips.record(steps);
            skips.warning(7, 3).map_err(|error| error.to_string())
        };
        assert_eq!(told(&none), Ok(None));
        // Twice in a row, then an update with a step in it; only the third in a row is one too many.
        for steps in [&whole, &whole, &half, &whole, &whole] {
            let warning = told(steps).unwrap().unwrap();
            let count = if steps == &half { 1 } else { 2 };
            let words = format!(
                "update 7: {count} of 2 optimizer steps skipped: the norm of the value model's gradient is inf"
            );
            assert_eq!(warning, words);
        }
        // A resumed run counts on.
        let kept = skips.state();
        let mut skips = Skips::default();
        skips.load_state(kept);
        skips.record(&whole);
        let error = skips.warning(7, 3).unwrap_err().to_string();
        assert!(
            error.starts_with("3 updates in a row were skipped, update 7 the last (max_skipped_updates = 3): "),
            "{error}"
        );
        skips.updates = 0;
        skips.record(&whole);
        assert!(
            skips.warning(1, 1).unwrap_err().to_string().starts_with("update 1 was skipped (max_skipped_updates = 1)")
        );
    }
}
