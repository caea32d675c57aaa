//! Reference models with their own weights: how they are read, in which dtype they stay in memory, and where they are placed.

use super::trained_options;
use crate::settings::RunConfig;
use rlhf_base::Result;
use rlhf_base::dist::{World, ZeroStage};
use rlhf_base::offload::Offload;
use rlhf_lm::model::{CausalLm, Dtype, ModelOptions, Trains};
use rlhf_lm::optim::settings::Optim;
use std::path::Path;

/// The reference model of a run, by its settings.
#[derive(Clone, Copy)]
pub(super) struct Reference<'a> {
    pub(super) run: &'a RunConfig,
    /// Whether it follows the policy.
    pub(super) is_synced: bool,
    /// The optimizer of the policy.
    pub(super) optim: Optim,
    /// The stage by which the model is divided over the ranks.
    pub(super) stage: ZeroStage,
}

impl Reference<'_> {
    /// Loads the model in `dir` in the same way as the policy, so that the first KL, or the first margins, are 0. `frozen` are the options
    /// of a model that is not trained.
    pub(super) fn load(&self, dir: &Path, frozen: ModelOptions) -> Result<CausalLm> {
        let options = if self.is_synced { trained_options(frozen, false) } else { frozen };
        let mut reference = CausalLm::from_pretrained(dir, options)?;
        reference.merge_adapter();
        if self.optim == Optim::AdamwBf16 {
            // The policy's weights are rounded to bf16 in the same way.
            reference.hold_in_bf16();
        }
        self.hold(&mut reference)?;
        Ok(reference)
    }

    /// Loads a model that follows the policy from a checkpoint. Its weights are averaged in f32, so they are not rounded when they are read
    /// again.
    pub(super) fn load_saved(&self, dir: &Path, frozen: ModelOptions) -> Result<CausalLm> {
        let options = ModelOptions { dtype: Dtype::Float32, ..trained_options(frozen, false) };
        let mut reference = CausalLm::from_pretrained(dir, options)?;
        self.hold(&mut reference)?;
        Ok(reference)
    }

    /// Converts the model to the dtype of the settings.
    fn hold(&self, reference: &mut CausalLm) -> Result<()> {
        if self.is_synced {
            return reference.prepare(Trains::All);
        }
        reference.hold_as_computed();
        Ok(())
    }

    /// Divides the model over the ranks, and places it where the settings keep it between its passes, unless it `stays` in memory.
    pub(super) fn place(&self, reference: &mut CausalLm, world: &World, stays: bool) -> Result<()> {
        reference.shard(world, self.stage);
        let place: Option<Offload> = self.run.models_place().filter(|_| !stays);
        place.map_or(Ok(()), |place| reference.offload(&place, "reference model"))
    }
}
