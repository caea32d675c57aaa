//! The rewards that environments give.

use super::{Environment, EnvironmentConfig};
use crate::reward::{Reward, RewardInput, Rewards, Score};
use rlhf_base::Result;

/// Name of the reward of rows whose environment dies, where no environment gives one.
const FAILURE_REWARD: &str = "environment";

/// Returns the name of the reward of rows whose environment dies before it has named its own.
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

/// The reward that environments give.
struct EnvironmentReward {
    /// Name of the reward: rows of an environment whose reward has another name have no score.
    name: String,
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
