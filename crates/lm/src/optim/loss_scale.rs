//! Dynamic loss scaling: a factor, adapted during training, keeps small gradients of f16 from rounding to 0.

use rlhf_base::name_of;
use rlhf_base::schema::{SPEED, Settings, above_zero, all, at_least_one, defaults, expect, no_effect};
use rlhf_base::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt::Display;

/// Maximum power of a loss scale: with a larger one a scaled loss can overflow f32.
const MOST_SCALE_POWER: usize = 100;

/// The loss scale of a run that computes in float16, by the names of DeepSpeed's `fp16` settings.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct LossScaleConfig {
    /// Initial loss scale with `fp16`, as a power of 2.
    #[setting(heading = SPEED, default = 16)]
    pub initial_scale_power: usize,
    /// Consecutive optimizer steps without an overflow after which the loss scale is doubled.
    #[setting(heading = SPEED, default = 1000)]
    pub loss_scale_window: usize,
    /// Overflows since the loss scale was last doubled from which on each overflow halves it. Every overflow skips its optimizer
    /// step.
    #[setting(heading = SPEED, default = 2)]
    pub hysteresis: usize,
    /// Smallest loss scale.
    #[setting(heading = SPEED, default = 1.0)]
    pub min_loss_scale: f64,
}

impl LossScaleConfig {
    /// Returns the first loss scale.
    pub fn initial_scale(&self) -> f64 {
        2f64.powi(self.initial_scale_power as i32)
    }

    /// Checks the settings together; they have no effect without `fp16`.
    pub fn check(&self, fp16: bool) -> Result<()> {
        let usual: Self = defaults();
        let (power, most) = (self.initial_scale_power, self.initial_scale());
        if !fp16 {
            let unused = |name, found: &dyn Display, differs: bool| {
                if differs { no_effect(name, found, "without fp16 = true") } else { Ok(()) }
            };
            let (window, hysteresis, least) = (self.loss_scale_window, self.hysteresis, self.min_loss_scale);
            return all([
                unused(name_of!(self.initial_scale_power), &power, power != usual.initial_scale_power),
                unused(name_of!(self.loss_scale_window), &window, window != usual.loss_scale_window),
                unused(name_of!(self.hysteresis), &hysteresis, hysteresis != usual.hysteresis),
                unused(name_of!(self.min_loss_scale), &least, least != usual.min_loss_scale),
            ]);
        }
        let expected = format!("at most {most}, 2 to the power of initial_scale_power");
        all([
            expect(
                power <= MOST_SCALE_POWER,
                name_of!(self.initial_scale_power),
                power,
                &format!("at most {MOST_SCALE_POWER}"),
            ),
            at_least_one(name_of!(self.loss_scale_window), self.loss_scale_window),
            at_least_one(name_of!(self.hysteresis), self.hysteresis),
            above_zero(name_of!(self.min_loss_scale), self.min_loss_scale),
            expect(self.min_loss_scale <= most, name_of!(self.min_loss_scale), self.min_loss_scale, &expected),
        ])
    }
}

/// float16 settings of PPO, which trains two models.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct Fp16Config {
    /// With `fp16`, skip the optimizer step of both policy and value model if the gradients of either overflow.
    #[setting(heading = SPEED, replay = Changes)]
    pub align_overflow: bool,
    /// Compute log-probabilities from float32 logits, for policy and reference model. Always on: `false` is refused.
    #[setting(heading = SPEED, default = true, replay = Changes)]
    pub compute_fp32_loss: bool,
}

impl Fp16Config {
    /// Checks the settings together; they have no effect without `fp16`.
    pub fn check(&self, fp16: bool) -> Result<()> {
        let expected =
            "true: log-probabilities in low precision differ between the passes of a run, and the ratio with them";
        all([
            expect(self.compute_fp32_loss, name_of!(self.compute_fp32_loss), false, expected),
            if self.align_overflow && !fp16 {
                no_effect(name_of!(self.align_overflow), true, "without fp16 = true")
            } else {
                Ok(())
            },
        ])
    }
}

/// The loss scale of one model, with its rules of change.
///
/// Gradients beyond f16 overflow to infinity or NaN. Then the step is skipped, and the scale is halved; after
/// `loss_scale_window` steps without an overflow it is doubled. Source: the rules of DeepSpeed's `fp16` settings of the same names.
#[derive(Debug, Clone, PartialEq)]
pub struct LossScaler {
    config: LossScaleConfig,
    state: LossScaleState,
}

/// The state of a [`LossScaler`] in a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LossScaleState {
    scale: f64,
    /// Overflows until the scale is halved.
    patience: usize,
    /// Steps since the last overflow or doubling.
    steps: usize,
    /// Overflows in all.
    overflows: usize,
}

impl LossScaler {
    /// Creates the scale with its first value, `2^initial_scale_power`.
    pub fn new(config: &LossScaleConfig) -> Self {
        let scale = config.initial_scale();
        let state = LossScaleState { scale, patience: config.hysteresis, steps: 0, overflows: 0 };
        Self { config: config.clone(), state }
    }

    /// Returns the scale.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// Returns the number of overflows since the start of the run, each of which skipped a step.
    pub fn overflows(&self) -> usize {
        self.state.overflows
    }

    /// Records whether the gradient norm at this scale was finite; returns whether the step must be skipped for an overflow.
    ///
    /// At the minimum scale, gradients that are not finite are no overflow: then nothing is recorded, and the result is false.
    pub fn overflows_at(&mut self, norm: f64) -> bool {
        let (config, state) = (&self.config, &mut self.state);
        if norm.is_finite() {
            state.steps += 1;
            if state.steps == config.loss_scale_window {
                *state = LossScaleState { scale: state.scale * 2.0, patience: config.hysteresis, steps: 0, ..*state };
            }
            return false;
        }
        if state.scale <= config.min_loss_scale {
            return false;
        }
        state.overflows += 1;
        state.steps = 0;
        match state.patience {
            0 | 1 => state.scale = (state.scale / 2.0).max(config.min_loss_scale),
            _ => state.patience -= 1,
        }
        true
    }

    /// Returns the state for a checkpoint.
    pub fn state(&self) -> LossScaleState {
        self.state.clone()
    }

    /// Restores the state that [`LossScaler::state`] returned.
    ///
    /// # Errors
    /// If its scale is no number above 0.
    pub fn load_state(&mut self, state: &LossScaleState) -> Result<()> {
        if !(state.scale.is_finite() && state.scale > 0.0) {
            return Err(Error::Run(format!("loss scale: expected a number above 0, found {}", state.scale)));
        }
        self.state = state.clone();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaler(power: usize, window: usize, hysteresis: usize, least: f64) -> LossScaler {
        let config = LossScaleConfig {
            initial_scale_power: power,
            loss_scale_window: window,
            hysteresis,
            min_loss_scale: least,
        };
        LossScaler::new(&config)
    }

    /// The scale after each step, `!` being one that overflows.
    fn course(scaler: &mut LossScaler, steps: &str) -> Vec<f64> {
        let norm = |step| if step == '!' { f64::INFINITY } else { 1.0 };
        let mut noted = |step| {
            let overflowed = scaler.overflows_at(norm(step));
            assert!(overflowed == (step == '!'), "at a scale of {}", scaler.scale());
            scaler.scale()
        };
        steps.chars().map(&mut noted).collect()
    }

    #[test]
    fn a_scale_is_halved_at_the_last_overflow_of_its_patience_and_doubled_after_a_window() {
        // Patience for one overflow: the second halves, the third too, since patience comes back with growth alone.
        assert_eq!(course(&mut scaler(4, 3, 2, 1.0), "!!!"), [16.0, 8.0, 4.0]);
        assert_eq!(course(&mut scaler(4, 3, 1, 1.0), "!!"), [8.0, 4.0]);
        assert_eq!(course(&mut scaler(4, 3, 2, 1.0), "...!!"), [16.0, 16.0, 32.0, 32.0, 16.0]);
        // An overflow restarts the window.
        assert_eq!(course(&mut scaler(4, 3, 1, 1.0), "..!...."), [16.0, 16.0, 8.0, 8.0, 8.0, 16.0, 16.0]);
        // NaN is an overflow too.
        assert!(scaler(4, 3, 1, 1.0).overflows_at(f64::NAN));
    }

    #[test]
    fn at_the_least_scale_gradients_that_are_not_finite_are_no_overflow() {
        let mut scaler = scaler(2, 3, 1, 3.0);
        assert!(scaler.overflows_at(f64::INFINITY));
        assert_eq!((scaler.scale(), scaler.overflows()), (3.0, 1));
        assert!(!scaler.overflows_at(f64::INFINITY));
        assert_eq!((scaler.scale(), scaler.overflows()), (3.0, 1));
    }

    #[test]
    fn a_resumed_scale_continues_as_the_uninterrupted_one() {
        let steps = "..!..!!......!..";
        for cut in 0..steps.len() {
            let mut whole = scaler(10, 4, 2, 1.0);
            course(&mut whole, &steps[..cut]);
            let mut resumed = scaler(10, 4, 2, 1.0);
            let text = serde_json::to_string(&whole.state()).unwrap();
            resumed.load_state(&serde_json::from_str(&text).unwrap()).unwrap();
            assert_eq!(course(&mut whole, &steps[cut..]), course(&mut resumed, &steps[cut..]), "after {cut}");
            assert_eq!(whole, resumed);
        }
        let state = LossScaleState { scale: -1.0, ..scaler(4, 3, 1, 1.0).state() };
        assert!(scaler(4, 3, 1, 1.0).load_state(&state).unwrap_err().to_string().starts_with("loss scale"));
    }
}
