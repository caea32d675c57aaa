//! Learning rates, and the order of the rows, from update to update.

use crate::rl::learner::{StepRates, mini_batch_orders};
use rlhf_lm::optim::{LearningRates, OptimizerConfig, learning_rate};

/// Learning rates and orders of rows of a run; [`PpoConfig::schedule`](crate::settings::PpoConfig::schedule) resolves it.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// Peak learning rate of the policy, and the settings of its optimizer.
    pub policy: (f64, OptimizerConfig),
    /// Peak learning rate of the value model, and the settings of its optimizer.
    pub value: (f64, OptimizerConfig),
    /// Updates at the start that train the value model alone.
    pub value_warmup_updates: usize,
    /// Rates follow optimizer steps, and all epochs of an update have the same order, as in TRL's GRPOTrainer and RLOOTrainer.
    pub by_step: bool,
    /// Epochs over the rows of an update.
    pub epochs: usize,
    /// Seed of the orders.
    pub seed: u64,
}

impl Schedule {
    /// Returns the learning rates of update `update` (from 0) of `num_updates`: the policy's schedule covers the updates in which
    /// it is trained.
    pub fn rates(&self, update: usize, num_updates: usize) -> LearningRates {
        let frozen = self.value_warmup_updates;
        let (peak, optimizer) = &self.policy;
        let policy_rate = |update| learning_rate(*peak, optimizer, update, num_updates.saturating_sub(frozen));
        let (value_peak, value_optimizer) = &self.value;
        LearningRates {
            policy: update.checked_sub(frozen).map(policy_rate),
            value: learning_rate(*value_peak, value_optimizer, update, num_updates),
        }
    }

    /// Returns the learning rates of the optimizer steps of update `update` (from 0) of `num_updates`; each epoch has
    /// `steps_per_epoch` steps.
    pub fn step_rates(&self, update: usize, num_updates: usize, steps_per_epoch: usize) -> StepRates {
        if !self.by_step {
            return self.rates(update, num_updates).into();
        }
        let steps = steps_per_epoch * self.epochs;
        (0..steps).map(|step| self.rates(update * steps + step, num_updates * steps)).collect()
    }

    /// Returns the order of an update's `rows` rows in each of its epochs.
    pub fn orders(&self, update: usize, rows: usize) -> Vec<Vec<usize>> {
        if self.by_step {
            // TRL's trainers take the same mini-batches in each iteration.
            return vec![mini_batch_orders(self.seed, 1, update, rows).remove(0); self.epochs];
        }
        mini_batch_orders(self.seed, self.epochs, update, rows)
    }
}
