//! Reward shaping: from scores and log-probabilities to the rewards, advantages and returns of an update.

use super::settings::WhitenAdvantages;
use crate::rl::advantage::{Advantage, whiten_update};
use crate::rl::experience::{Experience, row_index};
use crate::rl::math::{self, KlEstimator, ScorePosition};
use tch::Tensor;

/// Settings that turn an experience into rewards and targets.
#[derive(Debug, Clone, PartialEq)]
pub struct Shaping {
    /// Estimator of the KL to the reference model.
    pub kl_estimator: KlEstimator,
    /// The KL is a term of the policy loss instead of a penalty in the rewards.
    pub kl_in_loss: bool,
    /// Where the score lands.
    pub score_position: ScorePosition,
    /// Bounds on the total score of a response.
    pub reward_clip: Option<[f64; 2]>,
    /// Scale the rewards of an update to variance 1.
    pub whiten_rewards: bool,
    /// Estimator of the advantages.
    pub advantage: Advantage,
    /// Over which tokens advantages are whitened.
    pub whiten_advantages: WhitenAdvantages,
}

/// Rewards and the targets of both losses, `[B, R]` f32.
#[derive(Debug)]
pub struct Targets {
    /// Estimate of KL(policy || reference) per token; 0 without a reference model.
    pub kl: Tensor,
    /// Weight of the KL in this update, in the rewards or in the policy loss.
    pub kl_coef: f64,
    /// -kl_coef * kl, unless the KL is in the loss, plus the scores in their slots; whitened if the settings say so.
    pub rewards: Tensor,
    /// Advantages, as the policy loss takes them.
    pub advantages: Tensor,
    /// Targets of the value model; never whitened.
    pub returns: Tensor,
}

/// Rewards, advantages and returns of an experience whose KL has the weight `kl_coef`.
///
/// [`shape_rewards`], then [`advantages`]: the one path for [`PpoTrainer`](crate::train::ppo::PpoTrainer), TRL's `step()` and
/// DeepSpeed-Chat's engine.
pub fn targets(e: &Experience, kl_coef: f64, shaping: &Shaping) -> Targets {
    let (kl, rewards) = shape_rewards(e, kl_coef, shaping);
    let (advantages, returns) = advantages(e, &rewards, shaping);
    Targets { kl, kl_coef, rewards, advantages, returns }
}

/// Estimate of KL(policy || reference) per token, and rewards: the scores in their slots minus `kl_coef` times the KL, unless
/// the KL is in the loss; whitened if the settings say so. Both are `[B, R]` f32.
pub fn shape_rewards(e: &Experience, kl_coef: f64, shaping: &Shaping) -> (Tensor, Tensor) {
    let kl = match (&e.full_kl, &e.ref_logprobs) {
        (Some(kl), _) => kl.shallow_clone(),
        (None, Some(reference)) => math::kl(&e.logprobs, reference, &e.masks.response, shaping.kl_estimator),
        (None, None) => e.logprobs.zeros_like(),
    };
    let in_rewards = if shaping.kl_in_loss { 0.0 } else { kl_coef };
    let scores = match (shaping.reward_clip, &e.token_scores) {
        // Token scores stay where they are; the score of the response absorbs the difference between the clipped and the whole total.
        (Some(_), Some(_)) => {
            let total = e.total_scores();
            &e.scores + math::within(&total, shaping.reward_clip) - total
        }
        (clip, _) => math::within(&e.scores, clip),
    };
    let scores = match e.unscored.as_slice() {
        [] => scores,
        // A clip range without 0 must not give a score to a response that has none.
        rows => {
            let rows = row_index(rows, &scores);
            scores.index_copy(0, &rows, &e.scores.index_select(0, &rows))
        }
    };
    let mut rewards = math::rewards(&kl, &scores, &e.counted, in_rewards, shaping.score_position);
    if let Some(token_scores) = &e.token_scores {
        rewards += token_scores;
    }
    if shaping.whiten_rewards {
        rewards = math::whiten(&rewards, &e.masks.value, false);
    }
    (kl, rewards)
}

/// Advantages of `rewards`, whitened as the settings say, and returns, never whitened. Both are `[B, R]` f32.
pub fn advantages(e: &Experience, rewards: &Tensor, shaping: &Shaping) -> (Tensor, Tensor) {
    let (advantages, returns) = shaping.advantage.estimate(e, rewards, shaping.reward_clip);
    let mask = e.whitened_mask(shaping.advantage.needs_critic());
    (whiten_update(&advantages, &mask, shaping.whiten_advantages), returns)
}
