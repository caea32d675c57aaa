//! The state of a run, for reward functions that depend on its progress.

use serde::Serialize;

/// The state of a run, in the fields of transformers' `TrainerState` that TRL's reward functions read. A step is an update.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TrainerState {
    /// Number of updates done.
    pub global_step: usize,
    /// Number of updates of the whole run; 0 outside of a run.
    pub max_steps: usize,
    /// Passes over the prompts so far.
    pub epoch: f64,
    /// Passes over the prompts of the whole run.
    pub num_train_epochs: f64,
    /// Tokens of prompts and responses so far.
    pub num_input_tokens_seen: u64,
    /// Responses per update.
    pub train_batch_size: usize,
    /// True on the first rank.
    pub is_world_process_zero: bool,
}
