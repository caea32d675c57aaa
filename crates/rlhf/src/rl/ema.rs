//! An exponential moving average of the policy's weights: less noisy than the policy, and often what is deployed.

use rlhf_base::name_of;
use rlhf_base::schema::{OPTIMIZER, Settings, defaults, expect, no_effect};
use rlhf_base::{Error, Result};
use rlhf_lm::model::CausalLm;
use serde::Serialize;
use tch::{Kind, Tensor};

/// The folder of the average, below the policy's.
pub(crate) const EMA: &str = "ema";

/// Settings of the moving average of the policy's weights.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct EmaConfig {
    /// Maintain a moving average of the policy's weights, and save it in the folder `ema`.
    #[setting(heading = OPTIMIZER)]
    pub enable_ema: bool,
    /// Decay of the moving average per optimizer step.
    #[setting(heading = OPTIMIZER, default = 0.992, replay = Changes)]
    pub ema_beta: f64,
}

impl EmaConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let below_one = (0.0..1.0).contains(&self.ema_beta);
        expect(below_one, name_of!(self.ema_beta), self.ema_beta, "a number from 0 to below 1")?;
        let usual: Self = defaults();
        if self.enable_ema || self.ema_beta == usual.ema_beta {
            return Ok(());
        }
        no_effect(name_of!(self.ema_beta), self.ema_beta, "without enable_ema = true")
    }
}

/// The moving average of a policy's trained weights.
///
/// It is held in f32 whatever the policy is held in: in half precision a step of `1 - beta` of a small change is lost to
/// rounding, and the average stands still.
#[derive(Debug)]
pub struct Ema {
    beta: f64,
    /// The averages, in the order of the policy's trained parameters; empty if `is_divided`.
    weights: Vec<Tensor>,
    /// Whether each rank has the average of its part of the policy's parameters, which the policy's shards then hold.
    is_divided: bool,
}

impl Ema {
    /// Creates an average that starts at the weights of `policy`.
    pub fn new(policy: &CausalLm, beta: f64) -> Self {
        if policy.shards().start_average() {
            return Self { beta, weights: Vec::new(), is_divided: true };
        }
        // `copy`: a conversion to the same dtype would share the policy's memory.
        let weights =
            policy.trainable_params().map(|param| param.tensor.detach().to_kind(Kind::Float).copy()).collect();
        Self { beta, weights, is_divided: false }
    }

    /// Updates the average with the weights of `policy`: w <- w + (1 - beta) * (policy's - w).
    pub fn update(&mut self, policy: &CausalLm) {
        if self.is_divided {
            return policy.shards().update_average(self.beta);
        }
        tch::no_grad(|| {
            for (average, param) in self.weights.iter_mut().zip(policy.trainable_params()) {
                let gap = param.tensor.to_kind(Kind::Float) - &*average;
                let _ = average.g_add_(&(gap * (1.0 - self.beta)));
            }
        });
    }

    /// The averages, in the order of the policy's trained parameters; none if the policy's parameters are divided over ranks
    /// (ZeRO stage 3).
    pub fn weights(&self) -> &[Tensor] {
        &self.weights
    }

    /// Calls `f` with the policy at the average's weights, in the dtypes of the policy's weights; the policy then has its own weights
    /// again, bit for bit. Where the policy's parameters are divided over ranks, rank 0 calls this to write the average, while the other
    /// ranks take part in the collectives.
    ///
    /// # Errors
    /// The errors of `f`; if a rank has ended or does not respond.
    pub fn with<T>(&self, policy: &CausalLm, f: impl FnOnce(&CausalLm) -> Result<T>) -> Result<T> {
        let pairs = self.weights.iter().zip(policy.trainable_params());
        let rounded: Vec<Tensor> = pairs.map(|(weight, param)| weight.to_kind(param.tensor.kind())).collect();
        self.at(policy, &rounded, f)
    }

    /// [`Ema::with`] in f32, the dtype of the average, so that a resumed run continues with exactly the same numbers.
    pub(crate) fn with_exact<T>(&self, policy: &CausalLm, f: impl FnOnce(&CausalLm) -> Result<T>) -> Result<T> {
        self.at(policy, &self.weights, f)
    }

    fn at<T>(&self, policy: &CausalLm, weights: &[Tensor], f: impl FnOnce(&CausalLm) -> Result<T>) -> Result<T> {
        if self.is_divided {
            policy.shards().swap_average(true)?;
            let done = f(policy);
            policy.shards().swap_average(true)?;
            return done;
        }
        policy.swap_trained(weights);
        let done = f(policy);
        policy.swap_trained(weights);
        done
    }

    /// Loads the average: `read` puts it into `policy`, which then has its own weights again.
    ///
    /// # Errors
    /// The errors of `read`.
    pub(crate) fn load(&mut self, policy: &mut CausalLm, read: impl FnOnce(&mut CausalLm) -> Result<()>) -> Result<()> {
        let named = |e: Error| Error::Run(format!("{EMA}: {e}"));
        if self.is_divided {
            policy.shards().swap_average(false)?;
            let done = read(policy);
            policy.shards().swap_average(false)?;
            return done.map_err(named);
        }
        policy.swap_trained(&self.weights);
        let done = read(policy);
        policy.swap_trained(&self.weights);
        done.map_err(named)
    }
}
