//! Ranks of a distributed run. A run has one rank today; everything that is global goes through [`World`] already.
//!
//! Global means: a count that a loss is divided by, the moments of a whitening, a gradient and its norm, a metric, and a
//! decision that all ranks must take alike (skip a step, end an epoch early, stop the run). With one rank every operation
//! returns its argument.

pub mod launch;
mod settings;

pub use settings::{DistConfig, PpoDistConfig, ZeroStage, num_ranks};

use tch::Tensor;

/// The ranks that train together, and which of them this process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    rank: usize,
    size: usize,
}

impl Default for World {
    fn default() -> Self {
        Self::single()
    }
}

impl World {
    /// One process that trains alone.
    pub fn single() -> Self {
        Self { rank: 0, size: 1 }
    }

    /// Number of this process, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether this rank writes files and prints.
    pub fn is_main(&self) -> bool {
        self.rank == 0
    }

    /// Sum of a tensor over all ranks, on its device.
    pub fn sum(&self, x: Tensor) -> Tensor {
        x
    }

    /// Rows of a tensor of all ranks, in order of rank.
    pub fn gather(&self, x: Tensor) -> Tensor {
        x
    }

    /// Sum of a count over all ranks.
    pub fn count(&self, own: usize) -> usize {
        own
    }

    /// Sums of host numbers over all ranks, elementwise and in place.
    pub fn sum_numbers(&self, _numbers: &mut [f64]) {}

    /// Sums the gradients of `params` over all ranks, in place; called once per optimizer step, before their norm.
    pub fn sum_gradients<'a>(&self, _params: impl IntoIterator<Item = &'a Tensor>) {}

    /// Whether a condition holds on any rank; the same result on every rank.
    pub fn any(&self, condition: bool) -> bool {
        condition
    }

    /// Whether a condition holds on all ranks; the same result on every rank.
    pub fn all(&self, condition: bool) -> bool {
        condition
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_keeps_every_number_and_decision() {
        let world = World::single();
        assert_eq!((world.rank(), world.size(), world.is_main()), (0, 1, true));
        assert_eq!(world.count(7), 7);
        let x = Tensor::from_slice(&[1.0f32, 2.0]);
        assert_eq!(Vec::<f32>::try_from(world.sum(x)).unwrap(), [1.0, 2.0]);
        let mut numbers = [3.0, f64::INFINITY];
        world.sum_numbers(&mut numbers);
        assert_eq!(numbers, [3.0, f64::INFINITY]);
        assert!(world.any(true) && !world.any(false) && world.all(true) && !world.all(false));
    }
}
