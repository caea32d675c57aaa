//! The rewards that environments give.

use super::{Environment, EnvironmentConfig};
use crate::reward::{Reward, RewardInput, Rewards, Score};
use rlhf_base::Result;

/// Name of the reward of rows whose environment dies, where no environment gives one.
const FAILURE_REWARD: &str = "environment";

/// Returns the reward name for rows whose environment dies before it has told its reward's name.
pub(crate) fn failure_reward_name(environment: &dyn Environment) -> String {
    environment.reward_names().into_iter().next().unwrap_or_else(|| FAILURE_REWARD.into())
}

/// Returns the rewards of an environment that has been started, each with the weight 1.
pub(crate) fn environment_rewards(environment: &dyn Environment, config: &EnvironmentConfig) -> Rewards {
    let mut names = environment.reward_names();
    if names.is_empty() && config.environment_failure_reward.is_some() {
        names.push(failure_reward_name(environment));
    }
    let add = |rewards: Rewards, name: String| {
        rewards.with_about(&name.clone(), EnvironmentReward { name }, "an environment's reward")
    };
    names.into_iter().fold(Rewards::new(), add)
}

/// A reward that environments give.
struct EnvironmentReward {
    /// Name of the reward. Rows whose environment gives a reward of another name have no score.
    name: String,
}

impl Reward for EnvironmentReward {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        let reward = |input: &RewardInput<'_>| {
            let episode = input.episode.filter(|episode| episode.reward_name.as_ref() == Some(&self.name))?;
            episode.reward
        };
        Ok(batch.iter().map(|input| reward(input).into()).collect())
    }
}
