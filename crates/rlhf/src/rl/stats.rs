//! Sums of an optimizer step.

use crate::rl::sampling::SamplingDifference;
use rlhf_base::Result;
use rlhf_base::dist::World;

/// Sums of one optimizer step over the tokens (or value slots) of its mini-batch, of all ranks together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepStats {
    /// Response tokens of the mini-batch in the policy loss; 0 while the policy is frozen.
    pub tokens: f64,
    /// Responses of the mini-batch.
    pub rows: f64,
    /// Loss of the policy with its KL and entropy terms, as its aggregation makes it.
    pub loss: f64,
    /// Tokens below the clip range with a negative advantage; and the sum over responses of their shares of the tokens. Both are 0
    /// unless [`Learner::collect_clips`](super::learner::Learner::collect_clips) is set, as are the next three.
    pub low_clipped: [f64; 2],
    /// Tokens above the clip range with a positive advantage; and the sum over responses of their shares of the tokens.
    pub high_clipped: [f64; 2],
    /// The lowest share of a response's tokens that is clipped below; infinite without a response that counts.
    pub low_clipped_min: f64,
    /// The largest share of a response's tokens that is clipped above.
    pub high_clipped_max: f64,
    /// Value slots of the mini-batch.
    pub value_slots: f64,
    /// Sum of the clipped policy objective, negated; without the KL and entropy terms.
    pub policy_loss: f64,
    /// Sum of the clipped value loss, without `vf_coef`.
    pub value_loss: f64,
    /// Tokens at which the policy clip was active.
    pub policy_clipped: f64,
    /// Tokens at which the dual clip was active.
    pub dual_clipped: f64,
    /// Slots at which the value clip was active.
    pub value_clipped: f64,
    /// Sum of (new - old log-probability)^2 / 2.
    pub approx_kl: f64,
    /// Sum of old - new log-probability.
    pub policy_kl: f64,
    /// Sum of the estimates of KL(policy || reference), where the loss has that term.
    pub ref_kl: f64,
    /// Sum of the entropies of the distributions over the vocabulary, in nats.
    pub entropy: f64,
    /// Sum of the entropies of the tokens over which the entropy bonus is averaged.
    pub bonus_entropy: f64,
    /// Number of tokens over which the entropy bonus is averaged; 0 while the policy is frozen.
    pub bonus_tokens: f64,
    /// Coefficient of the entropy bonus after the step, where it follows a target; else 0.
    pub entropy_coef: f64,
    /// Sum of the probability ratios.
    pub ratio: f64,
    /// Sum of the squared probability ratios.
    pub ratio_squared: f64,
    /// The probability ratios, row after row; empty unless [`Learner::collect_ratios`](super::learner::Learner::collect_ratios) is set.
    pub ratios: Vec<f32>,
    /// Sum of the new values.
    pub value: f64,
    /// Sum of the squared distances of the new values from the returns.
    pub value_error: f64,
    /// Norm of the policy's gradient before clipping.
    pub policy_grad_norm: f64,
    /// Norm of the value model's gradient before clipping.
    pub value_grad_norm: f64,
    /// Mean negative log-likelihood of the tokens of the texts that were mixed in, without `unsup_coef`.
    pub unsup_loss: f64,
    /// The mean ratio was above `ratio_threshold`: no step was taken, and the norms are 0.
    pub skipped: bool,
    /// Differences from the log-probabilities of sampling; only for the first optimizer step of an update, while the policy is still the
    /// one that sampled, and only where the responses have these log-probabilities.
    pub sampling: Option<SamplingDifference>,
    /// The next entry belongs to the same optimizer step.
    pub continues_step: bool,
    /// The policy's gradient overflowed f16: it took no step, its norm is 0, and its loss scale may have fallen.
    pub policy_overflowed: bool,
    /// The value model's gradient overflowed f16.
    pub value_overflowed: bool,
}

/// A sum among the numbers of an optimizer step.
type Sum = fn(&mut StepStats) -> &mut f64;

/// The sums of an optimizer step that are added over ranks, by name.
const SUMS: [(&str, Sum); 19] = [
    ("policy_loss", |s| &mut s.policy_loss),
    ("value_loss", |s| &mut s.value_loss),
    ("policy_clipped", |s| &mut s.policy_clipped),
    ("dual_clipped", |s| &mut s.dual_clipped),
    ("value_clipped", |s| &mut s.value_clipped),
    ("approx_kl", |s| &mut s.approx_kl),
    ("policy_kl", |s| &mut s.policy_kl),
    ("ref_kl", |s| &mut s.ref_kl),
    ("entropy", |s| &mut s.entropy),
    ("bonus_entropy", |s| &mut s.bonus_entropy),
    ("ratio", |s| &mut s.ratio),
    ("ratio_squared", |s| &mut s.ratio_squared),
    ("value", |s| &mut s.value),
    ("value_error", |s| &mut s.value_error),
    ("loss", |s| &mut s.loss),
    ("low_clipped", |s| &mut s.low_clipped[0]),
    ("low_clipped_of_rows", |s| &mut s.low_clipped[1]),
    ("high_clipped", |s| &mut s.high_clipped[0]),
    ("high_clipped_of_rows", |s| &mut s.high_clipped[1]),
];

impl StepStats {
    /// Describes the loss or gradient norm that is not finite, for which the policy's step was not taken.
    pub fn not_finite(&self) -> Option<String> {
        let numbers = [
            ("the policy's loss", self.policy_loss),
            ("the norm of the policy's gradient", self.policy_grad_norm),
            ("the value model's loss", self.value_loss),
            ("the norm of the value model's gradient", self.value_grad_norm),
        ];
        let first = numbers.into_iter().find(|(_, number)| !number.is_finite());
        first.map(|(name, number)| format!("{name} is {number}"))
    }

    /// Whether the value model's loss and the norm of its gradient are finite.
    pub(crate) fn values_are_finite(&self) -> bool {
        self.value_loss.is_finite() && self.value_grad_norm.is_finite()
    }

    /// The sums of the policy's passes together with those of the value model's passes over the same rows.
    pub(crate) fn with_value_stats(self, values: &Self) -> Self {
        Self {
            value_loss: values.value_loss,
            value_clipped: values.value_clipped,
            value: values.value,
            value_error: values.value_error,
            value_grad_norm: values.value_grad_norm,
            ..self
        }
    }

    /// The sum with this name in [`SUMS`].
    ///
    /// # Panics
    /// If there is none.
    pub(crate) fn sum_mut(&mut self, name: &str) -> &mut f64 {
        let sum = SUMS.iter().find(|(known, _)| *known == name);
        sum.unwrap_or_else(|| panic!("{name} is not a sum of an optimizer step")).1(self)
    }

    /// Adds the sums of the other ranks; `tokens` and `value_slots` are global already.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub(crate) fn sum_over(&mut self, world: &World) -> Result<()> {
        let mut numbers = SUMS.map(|(_, sum)| *sum(self));
        world.sum_numbers(&mut numbers)?;
        SUMS.iter().zip(numbers).for_each(|((_, sum), number)| *sum(self) = number);
        if world.size() > 1 {
            self.low_clipped_min = -world.max_number(-self.low_clipped_min)?;
            self.high_clipped_max = world.max_number(self.high_clipped_max)?;
        }
        if let Some(sampling) = &mut self.sampling {
            sampling.sum_over(world)?;
        }
        if world.size() > 1 && world.any(!self.ratios.is_empty())? {
            let ratios: Vec<f64> = self.ratios.iter().map(|&ratio| f64::from(ratio)).collect();
            self.ratios = world.gather_numbers(&ratios)?.concat().into_iter().map(|ratio| ratio as f32).collect();
        }
        Ok(())
    }
}

/// The entries of each optimizer step.
pub(crate) fn optimizer_steps(parts: &[StepStats]) -> impl Iterator<Item = &[StepStats]> + Clone {
    parts.split_inclusive(|part| !part.continues_step)
}
