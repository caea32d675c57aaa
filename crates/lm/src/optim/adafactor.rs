//! Adafactor: a second moment for each row and each column of a matrix in place of one for each weight.

use super::norms::{square, square_along};
use tch::{Kind, Tensor};

/// Added to squares of gradients.
const EPSILON: f64 = 1e-30;
/// Largest root mean square of an update, before the learning rate.
const CLIP_THRESHOLD: f64 = 1.0;
/// The decay rate of step t is `1 - t^DECAY`.
const DECAY: f64 = -0.8;

/// Number of second moments of a parameter of this shape.
pub(super) fn num_moments(shape: &[i64]) -> usize {
    let count = match shape {
        [outer @ .., rows, columns] => outer.iter().product::<i64>() * (rows + columns),
        shape => shape.iter().product(),
    };
    count as usize
}

/// Second moments of one parameter.
#[derive(Debug)]
pub(super) enum Squares {
    /// Means over the columns and over the rows of the last two dimensions: f32, in the shape without the last one, and without the one
    /// before it.
    Factored([Tensor; 2]),
    /// One per number of a vector, f32.
    Whole([Tensor; 1]),
}

impl Squares {
    /// Zeros for the parameter `param`.
    pub(super) fn new(param: &Tensor) -> Self {
        let zeros = |sizes: &[i64]| Tensor::zeros(sizes, (Kind::Float, param.device()));
        let sizes = param.size();
        match sizes.as_slice() {
            [outer @ .., rows, columns] => {
                let column_shape: Vec<i64> = outer.iter().chain([columns]).copied().collect();
                let row_shape: Vec<i64> = outer.iter().chain([rows]).copied().collect();
                Self::Factored([zeros(&row_shape), zeros(&column_shape)])
            }
            shape => Self::Whole([zeros(shape)]),
        }
    }

    /// Takes step number `step`, from 1: changes these moments and the parameter by `grad`, which becomes the update. Only learning rate and
    /// weight decay of `settings` are used.
    ///
    /// Source: Shazeer & Stern 2018, algorithms 4 and 5, with the learning rate of the caller and no first moment: transformers'
    /// `Adafactor` with `scale_parameter=False, relative_step=False`.
    pub(super) fn step(&mut self, param: &Tensor, grad: &Tensor, step: i64, settings: tch_ext::AdamW) {
        let beta2 = 1.0 - (step as f64).powf(DECAY);
        let (mut param, mut update) = (param.shallow_clone(), grad.shallow_clone());
        tch::no_grad(|| {
            match self {
                Self::Factored([rows, columns]) => {
                    // Squares are summed by a norm, which needs no memory for the squared gradient.
                    let mean = |dim: i64| {
                        let size = *update.size().iter().nth_back((-1 - dim) as usize).expect("a matrix has it");
                        square_along(&update, dim) / size as f64 + EPSILON
                    };
                    for (moments, dim) in [(&mut *rows, -1), (&mut *columns, -2)] {
                        let new = &*moments * beta2 + mean(dim) * (1.0 - beta2);
                        moments.copy_(&new);
                    }
                    let row_factors = (&*rows / rows.mean_dim(Some([-1i64].as_slice()), true, Kind::Float)).rsqrt();
                    let _ = update.g_mul_(&row_factors.unsqueeze(-1));
                    let _ = update.g_mul_(&columns.rsqrt().unsqueeze(-2));
                }
                Self::Whole([moments]) => {
                    let new = &*moments * beta2 + (update.square() + EPSILON) * (1.0 - beta2);
                    moments.copy_(&new);
                    let _ = update.g_mul_(&moments.rsqrt());
                }
            }
            let rms = (square(&update) / update.numel().max(1) as f64).sqrt();
            let clipped = (rms / CLIP_THRESHOLD).clamp_min(1.0).reciprocal() * -settings.lr;
            let _ = update.g_mul_(&clipped);
            if settings.weight_decay > 0.0 {
                let _ = param.g_mul_scalar_(1.0 - settings.lr * settings.weight_decay);
            }
            let _ = param.g_add_(&update);
        });
    }
}
