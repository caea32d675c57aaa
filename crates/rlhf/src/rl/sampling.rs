//! The difference between the log-probabilities that sampling recorded and those of training, which with one engine is rounding.

use rlhf_base::Result;
use rlhf_base::dist::World;
use rlhf_base::metrics::Metrics;
use tch::{Kind, Tensor};
use tch_ext::to_host;

/// Beginnings of the names of the metrics.
pub(crate) const SAMPLING_METRICS: [&str; 2] =
    ["sampling/sampling_logp_difference/", "sampling/importance_sampling_ratio/"];

/// Differences of the log-probabilities of training, before any step of the update, from those that sampling recorded, over the tokens in
/// the policy loss.
///
/// Source: TRL 1.16's `sampling/*` metrics; there the sampler is vLLM.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingDifference {
    /// Tokens that were compared.
    pub tokens: f64,
    /// Sum of the absolute differences, in nats.
    pub difference: f64,
    /// The largest absolute difference.
    pub most: f64,
    /// Sum of the probability ratios, training over sampling.
    pub ratio: f64,
    /// The smallest and the largest ratio.
    pub ratios: [f64; 2],
}

impl Default for SamplingDifference {
    fn default() -> Self {
        Self { tokens: 0.0, difference: 0.0, most: 0.0, ratio: 0.0, ratios: [f64::INFINITY, 0.0] }
    }
}

impl SamplingDifference {
    /// The differences of both.
    pub(crate) fn with(self, other: &Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            difference: self.difference + other.difference,
            most: self.most.max(other.most),
            ratio: self.ratio + other.ratio,
            ratios: [self.ratios[0].min(other.ratios[0]), self.ratios[1].max(other.ratios[1])],
        }
    }

    /// Adds the differences of the other ranks.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub(crate) fn sum_over(&mut self, world: &World) -> Result<()> {
        if world.size() == 1 {
            return Ok(());
        }
        let mut sums = [self.tokens, self.difference, self.ratio];
        world.sum_numbers(&mut sums)?;
        [self.tokens, self.difference, self.ratio] = sums;
        let mut extremes = Tensor::from_slice(&[self.most, -self.ratios[0], self.ratios[1]]);
        world.max(&mut extremes)?;
        let extremes = to_host(&extremes);
        (self.most, self.ratios) = (extremes[0], [-extremes[1], extremes[2]]);
        Ok(())
    }

    /// Adds the metrics, under TRL's names.
    pub(crate) fn push_metrics(&self, m: &mut Metrics) {
        if self.tokens == 0.0 {
            return;
        }
        let [difference, ratio] = SAMPLING_METRICS;
        m.push(format!("{difference}mean"), self.difference / self.tokens);
        m.push(format!("{difference}max"), self.most);
        m.push(format!("{ratio}min"), self.ratios[0]);
        m.push(format!("{ratio}mean"), self.ratio / self.tokens);
        m.push(format!("{ratio}max"), self.ratios[1]);
    }
}

/// [`SamplingDifference`] of micro-batches, on the device.
#[derive(Debug, Default)]
pub(crate) struct SamplingSums {
    /// Tokens, and sums of absolute differences and of ratios, `[3]` f64.
    sums: Option<Tensor>,
    /// The largest difference, the smallest ratio negated, and the largest one, `[3]` f64.
    extremes: Option<Tensor>,
}

impl SamplingSums {
    /// Adds a slice of tokens, `[M]`; those in the bool mask `counts` are compared.
    pub(crate) fn add(&mut self, logprobs: &Tensor, sampled: &Tensor, counts: &Tensor) {
        tch::no_grad(|| {
            let difference = (logprobs.detach() - sampled).to_kind(Kind::Double);
            let ratio = difference.exp();
            let kept = |x: &Tensor| x.masked_fill(&counts.logical_not(), 0.0);
            let sum = |x: &Tensor| kept(x).sum(Kind::Double);
            let most = |x: &Tensor| x.masked_fill(&counts.logical_not(), f64::NEG_INFINITY).max();
            let sums = [&counts.sum(Kind::Double), &sum(&difference.abs()), &sum(&ratio)];
            let sums = Tensor::stack(&sums, 0);
            let extremes = Tensor::stack(&[&kept(&difference.abs()).max(), &most(&-&ratio), &most(&ratio)], 0);
            self.sums = Some(self.sums.take().map_or_else(|| sums.shallow_clone(), |before| before + &sums));
            self.extremes =
                Some(self.extremes.take().map_or_else(|| extremes.shallow_clone(), |before| before.maximum(&extremes)));
        });
    }

    /// All numbers in one tensor, for a read from the device.
    pub(crate) fn joined(self) -> Option<Tensor> {
        Some(Tensor::cat(&[self.sums?, self.extremes?], 0))
    }

    /// The differences from the numbers of [`SamplingSums::joined`]; the default if no token was compared.
    pub(crate) fn read(numbers: &[f64]) -> SamplingDifference {
        match *numbers {
            [tokens, difference, ratio, most, least, largest] if tokens > 0.0 => {
                SamplingDifference { tokens, difference, most, ratio, ratios: [-least, largest] }
            }
            _ => SamplingDifference::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_those_of_the_tokens_that_count_in_any_slices() {
        let logprobs = Tensor::from_slice(&[-1.0f32, -2.0, -3.0, -0.5, -9.0]);
        let sampled = Tensor::from_slice(&[-1.5f32, -2.0, -2.75, -0.5, -1.0]);
        let counts = Tensor::from_slice(&[true, true, true, false, false]);
        let found = |slices: &[(i64, i64)]| {
            let mut sums = SamplingSums::default();
            for &(first, len) in slices {
                let here = |x: &Tensor| x.narrow(0, first, len);
                sums.add(&here(&logprobs), &here(&sampled), &here(&counts));
            }
            SamplingSums::read(&to_host(&sums.joined().unwrap()))
        };
        let whole = found(&[(0, 5)]);
        assert_eq!((whole.tokens, whole.difference, whole.most), (3.0, 0.75, 0.5));
        assert!((whole.ratio - (0.5f64.exp() + 1.0 + (-0.25f64).exp())).abs() < 1e-12);
        assert_eq!(whole.ratios, [(-0.25f64).exp(), 0.5f64.exp()]);
        // The last slice has no token that counts.
        assert_eq!(found(&[(0, 2), (2, 1), (3, 2)]), whole);
        assert_eq!(found(&[(3, 2)]), SamplingDifference::default());
        assert_eq!(whole.with(&SamplingDifference::default()), whole);
        assert_eq!(whole.with(&whole).difference, 1.5);
    }
}
