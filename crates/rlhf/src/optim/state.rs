//! The state of one parameter, and its step.

use crate::model::Param;
use tch::Tensor;

/// Ends of the names of both moments in a saved state.
pub(super) const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// An optimizer step of one parameter.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    /// Number of the step, from 1.
    pub(super) number: i64,
    /// Learning rate, betas, epsilon and weight decay.
    pub(super) settings: tch_ext::AdamW,
}

/// The optimizer state of one parameter.
#[derive(Debug)]
pub(super) enum State {
    /// Both moments of AdamW, f32, in the parameter's shape.
    Moments([Tensor; 2]),
}

impl State {
    /// Fresh state of a parameter.
    pub(super) fn new(param: &Param) -> Self {
        let zeros = || param.tensor.detach().zeros_like();
        Self::Moments([zeros(), zeros()])
    }

    /// The tensors of the state, with the ends of their names in a saved state.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        match self {
            Self::Moments(moments) => MOMENTS.into_iter().zip(moments),
        }
    }

    /// Changes the parameter by the gradient, and the state.
    ///
    /// # Errors
    /// If libtorch refuses the step.
    pub(super) fn step(&mut self, param: &Tensor, grad: &Tensor, step: Step) -> Result<(), String> {
        match self {
            Self::Moments([first, second]) => {
                let one = |tensor: &Tensor| [tensor.shallow_clone()];
                let (grads, settings) = (one(grad), step.settings);
                tch_ext::fused_adamw(&mut one(param), &grads, &mut one(first), &mut one(second), step.number, settings)
            }
        }
    }
}
