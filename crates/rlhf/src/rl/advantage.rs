//! Advantage estimation: how rewards become what the policy learns from.

use super::settings::WhitenAdvantages;
use crate::rl::experience::{Experience, row_index};
use crate::rl::math;
use tch::Tensor;

/// An advantage estimator with its settings.
///
/// Generalized advantage estimation needs a critic. Estimators without one compare the rows of a group
/// ([`Experience::groups`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Advantage {
    /// Generalized advantage estimation. Source: Schulman et al. 2016, eq. 16.
    Gae {
        /// Discount of later rewards.
        gamma: f64,
        /// Weight of later steps: 0 is one-step, 1 is Monte Carlo.
        lam: f64,
    },
}

impl Advantage {
    /// Advantages and returns of `rewards`, `[B, R]` f32 each; neither is whitened.
    pub fn estimate(&self, e: &Experience, rewards: &Tensor) -> (Tensor, Tensor) {
        match *self {
            Self::Gae { gamma, lam } => math::gae(rewards, &e.values, &e.masks.value, gamma, lam),
        }
    }
}

/// Advantages of a whole update as the losses take them: whitened over all its tokens, or only masked where each mini-batch
/// whitens its own.
pub(crate) fn whiten_update(e: &Experience, advantages: &Tensor, how: WhitenAdvantages) -> Tensor {
    match how {
        WhitenAdvantages::Batch => math::whiten(advantages, &e.masks.loss, true),
        WhitenAdvantages::MiniBatch | WhitenAdvantages::None => math::keep(advantages, &e.masks.loss),
    }
}

/// `advantages` whitened over the tokens of `rows` alone; 0 in other rows.
pub(crate) fn whiten_rows(advantages: &Tensor, rows: &[usize], mask: &Tensor) -> Tensor {
    let index = row_index(rows, advantages);
    let theirs = mask.zeros_like().index_copy(0, &index, &mask.index_select(0, &index));
    math::whiten(advantages, &theirs, true)
}
