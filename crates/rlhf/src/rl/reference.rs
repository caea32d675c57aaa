//! Updates of the reference model towards the policy, as in TR-DPO.

use rlhf_base::name_of;
use rlhf_base::schema::{KL, Refusals, Settings, at_least_one, defaults, expect, no_effect, refuse};
use rlhf_base::{Error, Result};
use rlhf_lm::model::CausalLm;
use serde::Serialize;
use tch::{Kind, Tensor};

/// Updates of the reference model.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct SyncConfig {
    /// Move the reference model towards the policy every `ref_model_sync_steps` optimizer steps.
    #[setting(heading = KL)]
    pub sync_ref_model: bool,
    /// Share of the policy in the updated reference model; 1 replaces it by the policy.
    #[setting(heading = KL, default = 0.6, replay = Changes)]
    pub ref_model_mixup_alpha: f64,
    /// Optimizer steps between two updates of the reference model; responses that `ppo` and `grpo` have sampled already are compared with
    /// the earlier one.
    #[setting(heading = KL, default = 512, replay = Changes)]
    pub ref_model_sync_steps: usize,
}

impl SyncConfig {
    /// Checks the settings. `shared`: the reference model shares the policy's weights instead of being a model of its own; `used`:
    /// the KL to it is used.
    pub(crate) fn check(&self, shared: bool, used: bool) -> Result<()> {
        let usual: Self = defaults();
        let mut refusals = Refusals::default();
        if !self.sync_ref_model {
            let why = "without sync_ref_model = true";
            if self.ref_model_mixup_alpha != usual.ref_model_mixup_alpha {
                refusals.add(no_effect(name_of!(self.ref_model_mixup_alpha), self.ref_model_mixup_alpha, why))?;
            }
            if self.ref_model_sync_steps != usual.ref_model_sync_steps {
                refusals.add(no_effect(name_of!(self.ref_model_sync_steps), self.ref_model_sync_steps, why))?;
            }
            return refusals.end();
        }
        let alpha = self.ref_model_mixup_alpha;
        refusals.add(expect(
            alpha > 0.0 && alpha <= 1.0,
            name_of!(self.ref_model_mixup_alpha),
            alpha,
            "a number above 0, at most 1",
        ))?;
        refusals.add(at_least_one(name_of!(self.ref_model_sync_steps), self.ref_model_sync_steps))?;
        if shared {
            refusals.add(refuse(name_of!(self.sync_ref_model), " = true with use_peft or num_shared_layers: the reference model shares the policy's weights, and cannot \
                 be moved by itself",
            ))?;
        }
        if !used {
            refusals.add(no_effect(
                name_of!(self.sync_ref_model),
                true,
                "with kl_coef = 0: there is no reference model",
            ))?;
        }
        refusals.end()
    }

    /// Returns true if the reference model is updated after `steps` optimizer steps of a run.
    pub fn is_due(&self, steps: usize) -> bool {
        self.sync_ref_model && steps.is_multiple_of(self.ref_model_sync_steps)
    }

    /// Moves `reference` towards `policy`: w <- (1 - alpha) w + alpha policy's. Source: Gorbatovski et al. 2024, eq. 5.
    ///
    /// # Errors
    /// If the models have different parameters; if a rank has ended or does not respond.
    pub fn mix(&self, policy: &CausalLm, reference: &CausalLm) -> Result<()> {
        let alpha = self.ref_model_mixup_alpha;
        let _loaded = reference.loaded()?;
        let mut policy_shards = policy.shards().by_name(false);
        let mut reference_shards = reference.shards().by_name(false);
        for param in reference.params() {
            let source = policy.params().iter().find(|other| other.name == param.name).ok_or_else(|| {
                Error::Run(format!(
                    "sync_ref_model: expected the reference model's parameter {} in the policy, found none",
                    param.name
                ))
            })?;
            policy_shards.gather(&source.name)?;
            reference_shards.gather(&param.name)?;
            tch::no_grad(|| {
                let mixed = param.tensor.to_kind(Kind::Float) * (1.0 - alpha)
                    + source.tensor.detach().to_kind(Kind::Float) * alpha;
                let write = |tensor: &Tensor| tensor.shallow_clone().copy_(&mixed);
                if reference.shards().divides(&param.name) {
                    // A gathered parameter is a copy: each rank writes its own part.
                    let is_this = |name: &str| name == param.name;
                    return reference.shards().read_params(is_this, |_, tensor| {
                        write(tensor);
                        Ok(())
                    });
                }
                write(&param.tensor);
                Ok(())
            })?;
        }
        Ok(())
    }
}
