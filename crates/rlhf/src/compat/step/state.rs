//! The state from which an interrupted loop continues.

use super::{Counts, StepTrainer};
use crate::compat::state::{load, save};
use crate::reward::Moments;
use crate::rl::kl::KlState;
use crate::run::best::Best;
use rlhf_base::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// The kind of loop that [`StepTrainer::save_state`] writes.
const KIND: &str = "step";

/// The state of a loop besides the weights and the optimizer.
#[derive(Debug, Serialize, Deserialize)]
struct StepState {
    steps: usize,
    passes: u64,
    generations: u64,
    logged: usize,
    kl: KlState,
    /// Running moments of the scores.
    scores: Moments,
    /// The record of the best model, if one is kept.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    best: Value,
}

impl StepTrainer {
    /// Writes the state from which the loop continues to the folder `dir`, by one rename: the policy with its value head, the optimizer,
    /// the weight of the KL, the running moments of the scores, and the counts that random draws depend on. The reference model is not in
    /// it.
    ///
    /// # Errors
    /// If a file cannot be written, or `dir` holds other files.
    pub fn save_state(&self, dir: &Path) -> Result<()> {
        let Counts { steps, passes, generations, logged } = self.counts;
        let state = StepState {
            steps,
            passes,
            generations,
            logged,
            kl: self.kl.state(),
            scores: self.scaling.state(),
            best: self.output.best.as_ref().map_or(Value::Null, Best::state),
        };
        save(&self.learner, dir, (KIND, &state), |dir| self.write_model(dir))
    }

    /// Continues from the state that [`StepTrainer::save_state`] wrote to `dir`. The trainer has the settings, the models and the
    /// reference model that the interrupted one began with; the next step and the next draws are then those that it would have made.
    ///
    /// # Errors
    /// If `dir` has no such state, or the state of other models.
    pub fn load_state(&mut self, dir: &Path) -> Result<()> {
        let state: StepState = load(&mut self.learner, dir, KIND)?;
        let StepState { steps, passes, generations, logged, kl, scores, best } = state;
        self.kl.load_state(kl)?;
        self.scaling.load_state(scores);
        if let Some(record) = &mut self.output.best {
            record.load_state(&best);
        }
        self.counts = Counts { steps, passes, generations, logged };
        self.learner.optimizers.is_half_loaded = false;
        Ok(())
    }

    /// Returns true if a [`StepTrainer::load_state`] has failed after it had begun to change the models.
    pub fn is_half_loaded(&self) -> bool {
        self.learner.optimizers.is_half_loaded
    }

    /// Calls of [`StepTrainer::step`] that were counted so far.
    pub fn steps_done(&self) -> usize {
        self.counts.steps
    }
}
