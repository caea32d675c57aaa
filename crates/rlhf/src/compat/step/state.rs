//! The state from which an interrupted loop continues.

use super::StepTrainer;
use crate::compat::state::{count, load, save};
use rlhf_base::Result;
use serde_json::json;
use std::path::Path;

/// The kind of loop that [`StepTrainer::save_state`] writes.
const KIND: &str = "step";

impl StepTrainer {
    /// Writes the state from which the loop continues to the folder `dir`, by one rename: the policy with its value head, the optimizer,
    /// the weight of the KL, the running moments of the scores, and the counts that random draws depend on. The reference model is not in
    /// it.
    ///
    /// # Errors
    /// If a file cannot be written, or `dir` holds other files.
    pub fn save_state(&self, dir: &Path) -> Result<()> {
        let mut state = json!({
            "kind": KIND,
            "version": env!("CARGO_PKG_VERSION"),
            "steps": self.counts.steps,
            "passes": self.counts.passes,
            "generations": self.counts.generations,
            "logged": self.counts.logged,
            "kl": self.kl.state(),
            "scores": self.scaling.state(),
            "micro_batch_tokens": self.learner.micro_batch_tokens,
        });
        if let Some(best) = &self.output.best {
            state["best"] = best.state();
        }
        save(&self.learner, dir, &state, |dir| self.write_model(dir))
    }

    /// Continues from the state that [`StepTrainer::save_state`] wrote to `dir`. The trainer has the settings, the models and the
    /// reference model that the interrupted one began with; the next step and the next draws are then those that it would have made.
    ///
    /// # Errors
    /// If `dir` has no such state, or the state of other models.
    pub fn load_state(&mut self, dir: &Path) -> Result<()> {
        let state = load(&mut self.learner, dir, KIND)?;
        self.kl.load_state(&state["kl"])?;
        self.scaling.load_state(&state["scores"])?;
        if let Some(best) = &mut self.output.best {
            best.load_state(&state["best"]);
        }
        let number = |name| count(&state, name).unwrap_or(0);
        (self.counts.steps, self.counts.logged) = (number("steps") as usize, number("logged") as usize);
        (self.counts.passes, self.counts.generations) = (number("passes"), number("generations"));
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
