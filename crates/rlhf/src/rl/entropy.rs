//! The coefficient of the entropy bonus where it follows a target.

use rlhf_base::{Error, Result};
use serde::{Deserialize, Serialize};

/// A rule for the coefficient of the entropy bonus: it rises while the entropy is at most the target, and falls above it.
///
/// Source: TRL 1.11, `use_adaptive_entropy`; He et al. 2025, Skywork-OR1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EntropyControl {
    /// The first coefficient.
    pub coef: f64,
    /// The lowest coefficient.
    pub min: f64,
    /// The largest coefficient.
    pub max: f64,
    /// Change of the coefficient in an optimizer step.
    pub delta: f64,
    /// Entropy per token, in nats, above which there is no bonus.
    pub target: f64,
}

/// The coefficient that follows an [`EntropyControl`]; it changes after each optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct EntropyController {
    rule: EntropyControl,
    coef: f64,
    /// Mean entropy of the tokens of the last optimizer step; `None` before the first one.
    entropy: Option<f64>,
}

/// The state of an [`EntropyController`] in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EntropyState {
    entropy_coef: f64,
    entropy: Option<f64>,
}

impl EntropyController {
    /// Creates the controller of a run.
    pub fn new(rule: EntropyControl) -> Self {
        Self { rule, coef: rule.coef, entropy: None }
    }

    /// Returns the coefficient, whether or not the next step has a bonus.
    pub fn coef(&self) -> f64 {
        self.coef
    }

    /// Returns the coefficient in the loss of the next optimizer step: 0 before the first measurement, and while the entropy is above the
    /// target.
    pub fn applied(&self) -> f64 {
        let is_low = self.entropy.is_some_and(|entropy| entropy <= self.rule.target);
        if is_low { self.coef } else { 0.0 }
    }

    /// Records the mean entropy of the tokens of an optimizer step, in nats.
    pub fn observe(&mut self, entropy: f64) {
        if !entropy.is_finite() {
            return;
        }
        let EntropyControl { min, max, delta, target, .. } = self.rule;
        self.coef = if entropy <= target { (self.coef + delta).min(max) } else { (self.coef - delta).max(min) };
        self.entropy = Some(entropy);
    }

    /// Sets the coefficient of the next step.
    pub(crate) fn set_coef(&mut self, coef: f64) {
        self.coef = coef;
    }

    /// Returns the state for a checkpoint.
    pub fn state(&self) -> EntropyState {
        EntropyState { entropy_coef: self.coef, entropy: self.entropy }
    }

    /// Restores the state that [`EntropyController::state`] returned.
    ///
    /// # Errors
    /// If the coefficient is not finite.
    pub fn load_state(&mut self, state: EntropyState) -> Result<()> {
        let EntropyState { entropy_coef, entropy } = state;
        if !entropy_coef.is_finite() {
            return Err(Error::Run(format!(
                "state of the entropy controller: expected a number `entropy_coef`, found {entropy_coef}"
            )));
        }
        (self.coef, self.entropy) = (entropy_coef, entropy);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn controller() -> EntropyController {
        EntropyController::new(EntropyControl { coef: 0.01, min: 0.0, max: 0.012, delta: 0.005, target: 2.0 })
    }

    #[test]
    fn the_coefficient_moves_as_that_of_trl_and_is_applied_after_a_low_entropy_only() {
        // trl/trainer/grpo_trainer.py:3295-3327 of TRL 1.11 with these arguments.
        let mut controller = controller();
        assert_eq!((controller.coef(), controller.applied()), (0.01, 0.0));
        for (entropy, coef, applied) in [
            (2.5, 0.005, 0.0),
            (2.0, 0.01, 0.01),
            (1.9, 0.012, 0.012),
            (2.1, 0.007, 0.0),
            (3.0, 0.002, 0.0),
            (3.0, 0.0, 0.0),
            (1.0, 0.005, 0.005),
        ] {
            controller.observe(entropy);
            assert!((controller.coef() - coef).abs() < 1e-15, "{entropy}: {}", controller.coef());
            assert!((controller.applied() - applied).abs() < 1e-15, "{entropy}: {}", controller.applied());
        }
        let before = controller.clone();
        controller.observe(f64::NAN);
        assert_eq!(controller, before);
    }

    #[test]
    fn an_entropy_controller_resumes_from_its_state_bit_for_bit() {
        for entropies in [&[][..], &[1.3], &[1.3, 2.7]] {
            let (mut one, mut other) = (controller(), controller());
            entropies.iter().for_each(|&entropy| one.observe(entropy));
            let text = serde_json::to_string(&one.state()).unwrap();
            other.load_state(serde_json::from_str(&text).unwrap()).unwrap();
            assert_eq!(other, one);
        }
        let state = EntropyState { entropy_coef: f64::INFINITY, entropy: None };
        let error = controller().load_state(state).unwrap_err().to_string();
        assert!(error.contains("entropy controller: expected a number `entropy_coef`"), "{error}");
    }
}
