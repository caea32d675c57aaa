//! Counter-based random numbers: each draw is a function of its purpose, never of earlier draws.
//!
//! A stream is keyed by the run's seed, a purpose and two counters (the update, the global row). So batch sizes, the order
//! of work and resuming a run do not change draws, and no generator state has to be saved.

use rand::RngExt;
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use rand_distr::{Distribution, StandardNormal};

/// Purpose of a stream of random numbers; part of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Purpose {
    /// Initial weights; counters: the tensor's index in the model, 0.
    Init = 1,
    /// The order of a dataset; counters: the pass, the index of the dataset.
    DataOrder = 2,
    /// Sampled tokens; counters: the update, the row.
    Sampling = 3,
    /// The order of an update's rows in one PPO epoch; counters: the update, the epoch.
    MiniBatches = 4,
    /// Sampled tokens of the sample tables; counters: the update, the row.
    Samples = 5,
    /// Initial adapters; counters: the layer's index among the layers with adapters, 0.
    Adapter = 6,
    /// Elements dropped by dropout; counters: the update, the row.
    Dropout = 7,
    /// Sampled tokens of evaluations, the same each time; counters: 0, the row.
    Evaluation = 8,
    /// The dataset that a row is drawn from; counters: the rows drawn before it, 0.
    Mixture = 9,
    /// The rows kept for evaluation; counters: 0, 0.
    HeldOut = 10,
    /// The stage's share that a row belongs to, of three; counters: 0, 0.
    DataSplit = 11,
    /// Lengths of responses; counters: the call, 0.
    Lengths = 12,
    /// Rows drawn with replacement, for intervals; counters: the resample, 0.
    Bootstrap = 13,
    /// Stochastic rounding of weights and moments; counters: the optimizer step, the tensor's index in the optimizer.
    Rounding = 14,
    /// Seeds of environments; counters: the update, the group.
    Environments = 15,
    /// Whether an update of distillation is on-policy; counters: the update, 0.
    OnPolicy = 16,
}

/// A stream of random numbers.
#[derive(Debug, Clone)]
pub struct Stream(ChaCha8Rng);

impl Stream {
    /// Creates the stream of `purpose` in the run with `seed`, at the counters `a` and `b` (see [`Purpose`]).
    pub fn new(seed: u64, purpose: Purpose, a: u64, b: u64) -> Self {
        let mut key = [0u8; 32];
        for (slot, word) in key.chunks_exact_mut(8).zip([seed, purpose as u64, a, b]) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        Self(ChaCha8Rng::from_seed(key))
    }

    /// The next number, uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.0.random::<f64>()
    }

    /// `count` numbers from the normal distribution with mean 0 and standard deviation `std`.
    pub fn normals(&mut self, count: usize, std: f64) -> Vec<f32> {
        (0..count).map(|_| (std * Distribution::<f64>::sample(&StandardNormal, &mut self.0)) as f32).collect()
    }

    /// `count` draws that are true with probability `share`.
    pub fn chances(&mut self, count: usize, share: f64) -> impl Iterator<Item = bool> {
        let below = (share * 2f64.powi(32)) as u64;
        (0..count).map(move |_| u64::from(self.0.random::<u32>()) < below)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A permutation of `0..len`, each equally likely (Fisher and Yates).
    pub fn permutation(&mut self, len: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        for i in (1..len).rev() {
            order.swap(i, self.0.random_range(0..=i as u64) as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_depends_on_every_part_of_its_key_and_on_nothing_else() {
        let first = |seed, purpose, a, b| Stream::new(seed, purpose, a, b).uniform();
        let base = first(1, Purpose::Sampling, 2, 3);
        assert_eq!(base, first(1, Purpose::Sampling, 2, 3));
        for other in [
            first(9, Purpose::Sampling, 2, 3),
            first(1, Purpose::DataOrder, 2, 3),
            first(1, Purpose::Sampling, 9, 3),
            first(1, Purpose::Sampling, 2, 9),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn a_permutation_holds_every_index_once_and_moves_them() {
        let order = Stream::new(0, Purpose::DataOrder, 0, 0).permutation(100);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_ne!(order, sorted);
    }

    #[test]
    fn normals_have_the_given_spread() {
        let draws = Stream::new(0, Purpose::Init, 0, 0).normals(100_000, 0.02);
        let mean = draws.iter().map(|&x| f64::from(x)).sum::<f64>() / 1e5;
        let std = (draws.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / 1e5).sqrt();
        assert!(mean.abs() < 3e-4 && (std - 0.02).abs() < 3e-4, "mean {mean}, standard deviation {std}");
    }
}
