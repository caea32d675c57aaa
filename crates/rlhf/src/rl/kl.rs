//! The KL to the reference model: its settings, and its weight from update to update: fixed, adapted to a target, or on a schedule.

use super::math::KlEstimator;
use rlhf_base::name_of;
use rlhf_base::schema::{
    Choice, Choices, KL, Settings, above_zero, all, defaults, exclude, no_effect, refuse, zero_or_more,
};
use rlhf_base::{Error, Result};
use serde::{Deserialize, Serialize};

/// Bound on the relative error of the KL that changes an adaptive coefficient.
const MOST_ERROR: f64 = 0.2;

/// The KL to the reference model: its weight, its estimator, and where it is applied.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct KlConfig {
    /// Coefficient of the KL penalty per token.
    #[setting(aliases = ["init_kl_coef", "beta"], heading = KL, default = 0.05, replay = Changes, short = "weight of the KL penalty")]
    pub kl_coef: f64,
    /// Estimator of the KL from each sampled token; `full` computes it over the whole vocabulary.
    #[setting(alias = "kl_penalty", heading = KL, default = "k1", replay = Changes)]
    pub kl_estimator: KlEstimator,
    /// Add the KL penalty to the policy's loss instead of the rewards.
    #[setting(heading = KL, replay = Changes)]
    pub kl_in_loss: bool,
    /// Multiply the KL of each token in the loss by its probability ratio, which corrects it for the policy that sampled.
    #[setting(heading = KL, replay = Changes)]
    pub use_bias_correction_kl: bool,
    /// Adapt the KL coefficient after each update, so that the KL per response approaches `target`.
    #[setting(heading = KL, replay = Changes)]
    pub adap_kl_ctrl: bool,
    /// Target KL per response of `adap_kl_ctrl`, in nats.
    #[setting(heading = KL, default = 6.0, replay = Later)]
    pub target: f64,
    /// Horizon of `adap_kl_ctrl` in responses; a smaller one adapts faster.
    #[setting(heading = KL, default = 10000.0, replay = Later)]
    pub horizon: f64,
    /// KL coefficient of the last update; it changes linearly from `kl_coef`.
    #[setting(heading = KL, replay = Changes)]
    pub kl_coef_end: Option<f64>,
}

impl KlConfig {
    /// Checks the settings; `without_critic`: the run has no value model.
    pub(crate) fn check(&self, without_critic: bool) -> Result<()> {
        let usual: Self = defaults();
        let only_adaptive = |name, value, usual| {
            if value != usual && !self.adap_kl_ctrl {
                return no_effect(name, value, "without adap_kl_ctrl = true");
            }
            Ok(())
        };
        all([
            above_zero(name_of!(self.target), self.target),
            above_zero(name_of!(self.horizon), self.horizon),
            self.kl_coef_end.map_or(Ok(()), |end| zero_or_more(name_of!(self.kl_coef_end), end)),
            only_adaptive(name_of!(self.target), self.target, usual.target),
            only_adaptive(name_of!(self.horizon), self.horizon, usual.horizon),
            match self.kl_coef_end {
                Some(end) if self.adap_kl_ctrl => exclude(
                    name_of!(self.adap_kl_ctrl),
                    name_of!(self.kl_coef_end),
                    format!(
                        " = true and kl_coef_end = {end} exclude each other: the KL's weight follows its target or a \
                     schedule"
                    ),
                ),
                None if self.adap_kl_ctrl && self.kl_coef == 0.0 => {
                    no_effect(name_of!(self.adap_kl_ctrl), true, "with kl_coef = 0: it is only multiplied")
                }
                _ => Ok(()),
            },
            self.check_in_loss(without_critic),
        ])
    }

    fn check_in_loss(&self, without_critic: bool) -> Result<()> {
        if !self.kl_in_loss {
            let why = "without kl_in_loss = true";
            return if self.use_bias_correction_kl {
                no_effect(name_of!(self.use_bias_correction_kl), true, why)
            } else {
                Ok(())
            };
        }
        if self.kl_coef == 0.0 && self.kl_coef_end.unwrap_or(0.0) == 0.0 {
            // TRL's GRPOTrainer has this default: no reference model, and no KL anywhere.
            return if without_critic {
                Ok(())
            } else {
                no_effect(name_of!(self.kl_in_loss), true, "with kl_coef = 0")
            };
        }
        match self.kl_estimator {
            KlEstimator::Full if self.use_bias_correction_kl => refuse(
                name_of!(self.use_bias_correction_kl),
                " = true with kl_estimator = full: it corrects an estimate from the sampled token, and the KL over the \
                 vocabulary is none; expected use_bias_correction_kl = false, or k1, k3, mse or abs",
            ),
            // The gradient of a ratio times k1 is that of the KL on average.
            KlEstimator::K1 if self.use_bias_correction_kl => Ok(()),
            KlEstimator::K1 => refuse(
                name_of!(self.kl_in_loss),
                " = true with kl_estimator = k1: the gradient of k1 is 0 on average; expected full or mse, whose \
                 gradient is that of the KL, mse's on average, k3 or abs, or use_bias_correction_kl = true",
            ),
            KlEstimator::K3 | KlEstimator::Abs | KlEstimator::Mse | KlEstimator::Full => Ok(()),
        }
    }
}

// Not derived: `rl::math` depends on tensors only.
impl Choices for KlEstimator {
    const ALL: &'static [(Self, Choice)] = &[
        // TRL 0.11's name.
        (Self::K1, Choice::new("k1").aliases(&["kl"])),
        (Self::K3, Choice::new("k3")),
        (Self::Abs, Choice::new("abs")),
        (Self::Mse, Choice::new("mse")),
        (Self::Full, Choice::new("full")),
    ];
    const EXPECTED: &'static str = "k1, k3, abs, mse or full";
}

/// The coefficient of the KL, which may change after each update.
#[derive(Debug, Clone, PartialEq)]
pub struct KlController {
    coef: f64,
    rule: Rule,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    Fixed,
    /// Raises the coefficient while the KL is above the target, and lowers it below.
    Adaptive {
        target: f64,
        horizon: f64,
    },
    /// Linear from the first coefficient to `end`, the coefficient of the last update.
    Linear {
        end: f64,
        num_updates: usize,
    },
}

/// The state of a [`KlController`] in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KlState {
    /// Weight of the KL.
    kl_coef: f64,
}

impl KlController {
    /// Creates the controller of a run of `num_updates` updates.
    pub fn new(kl: &KlConfig, num_updates: usize) -> Self {
        let rule = match kl.kl_coef_end {
            Some(end) => Rule::Linear { end, num_updates },
            None if kl.adap_kl_ctrl => Rule::Adaptive { target: kl.target, horizon: kl.horizon },
            None => Rule::Fixed,
        };
        Self { coef: kl.kl_coef, rule }
    }

    /// Returns the weight of the KL in update `update`, counted from 0.
    pub fn coef(&self, update: usize) -> f64 {
        match self.rule {
            Rule::Linear { end, num_updates } => {
                let progress = update as f64 / num_updates.saturating_sub(1).max(1) as f64;
                self.coef + (end - self.coef) * progress.min(1.0)
            }
            Rule::Fixed | Rule::Adaptive { .. } => self.coef,
        }
    }

    /// Records an update's `objective/kl`: the mean, over its `responses` responses, of the sums over their tokens, in nats.
    ///
    /// Source: Ziegler et al. 2019, section 2.2; as TRL 0.11.
    pub fn observe(&mut self, kl: f64, responses: usize) {
        if let Rule::Adaptive { target, horizon } = self.rule
            && kl.is_finite()
        {
            let error = (kl / target - 1.0).clamp(-MOST_ERROR, MOST_ERROR);
            self.coef *= 1.0 + error * responses as f64 / horizon;
        }
    }

    /// Returns the state for a checkpoint.
    pub fn state(&self) -> KlState {
        KlState { kl_coef: self.coef }
    }

    /// Restores the state that [`KlController::state`] returned.
    ///
    /// # Errors
    /// If the weight is not finite.
    pub fn load_state(&mut self, state: KlState) -> Result<()> {
        let KlState { kl_coef } = state;
        if !kl_coef.is_finite() {
            return Err(Error::Run(format!(
                "state of the KL controller: expected a number `kl_coef`, found {kl_coef}"
            )));
        }
        self.coef = kl_coef;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adaptive(kl_coef: f64) -> KlController {
        let mut config: KlConfig = defaults();
        config.kl_coef = kl_coef;
        config.adap_kl_ctrl = true;
        KlController::new(&config, 100)
    }

    #[test]
    fn an_adaptive_coefficient_moves_as_that_of_trl_0_11() {
        // TRL 0.11.4 with target 6, horizon 10000 and 256 responses; of the errors -0.5, 1 and 0.05 the first two are clipped.
        let mut controller = adaptive(0.2);
        for (kl, expected) in [(3.0, 0.198976), (12.0, 0.199_994_76), (6.3, 0.200_250_75)] {
            controller.observe(kl, 256);
            assert!((controller.coef(7) - expected).abs() < 1e-8, "{}", controller.coef(7));
        }
        // Its own run of 8 responses, in f32: .2, then .19996801 and .19993602.
        let mut controller = adaptive(0.2);
        for (kl, expected) in [(0.014_923_9, 0.199_968_01), (-0.046_610_4, 0.199_936_02)] {
            controller.observe(kl, 8);
            assert!((controller.coef(1) - expected).abs() < 2e-8, "{}", controller.coef(1));
        }
    }

    #[test]
    fn at_its_target_or_a_kl_that_is_not_finite_the_coefficient_stays() {
        for kl in [6.0, f64::NAN, f64::INFINITY] {
            let mut controller = adaptive(0.2);
            controller.observe(kl, 256);
            assert_eq!(controller.coef(1), 0.2, "{kl}");
        }
    }

    #[test]
    fn a_scheduled_coefficient_has_its_end_in_the_last_update_and_a_fixed_one_never_moves() {
        let mut config: KlConfig = defaults();
        config.kl_coef = 0.2;
        let mut fixed = KlController::new(&config, 5);
        fixed.observe(100.0, 1000);
        assert_eq!(fixed.coef(4), 0.2);
        config.kl_coef_end = Some(0.1);
        let mut linear = KlController::new(&config, 5);
        linear.observe(100.0, 1000);
        for (update, expected) in [0.2, 0.175, 0.15, 0.125, 0.1, 0.1].into_iter().enumerate() {
            assert!((linear.coef(update) - expected).abs() < 1e-15, "{update}: {}", linear.coef(update));
        }
        assert_eq!(KlController::new(&config, 1).coef(0), 0.2);
    }

    #[test]
    fn a_controller_resumes_from_its_state_bit_for_bit() {
        let (mut one, mut other) = (adaptive(0.2), adaptive(0.2));
        for kl in [3.7, 11.1, 6.3] {
            one.observe(kl, 37);
        }
        let text = serde_json::to_string(&one.state()).unwrap();
        other.load_state(serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(other, one);
        let error = other.load_state(KlState { kl_coef: f64::NAN }).unwrap_err().to_string();
        assert!(error.contains("KL controller: expected a number `kl_coef`"), "{error}");
        assert_eq!(other, one);
    }
}
