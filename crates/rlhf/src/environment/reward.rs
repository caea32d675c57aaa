//! The reward that environments give.

use crate::reward::{Reward, RewardInput, Score};
use rlhf_base::Result;

/// The reward that environments give.
pub(crate) struct EnvironmentReward {
    /// Name of the reward: rows of an environment whose reward has another name have no score.
    pub(crate) name: String,
}

impl Reward for EnvironmentReward {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        let of = |input: &RewardInput<'_>| {
            let episode = input.episode.filter(|episode| episode.reward_name.as_ref() == Some(&self.name))?;
            episode.reward
        };
        Ok(batch.iter().map(|input| of(input).into()).collect())
    }
}
