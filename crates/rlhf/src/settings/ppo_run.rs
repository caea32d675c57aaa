//! A PPO run as its settings describe it: the settings of each part, computed once.

use super::ppo::PpoConfig;
use crate::reward::Spec;
use crate::rl::checks::CheckSettings;
use crate::rl::learner::LearnerSettings;
use crate::rl::rollout::{RolloutPlan, RolloutSettings};
use crate::rl::schedule::Schedule;
use crate::rl::scores::Penalties;
use crate::rl::shaping::Shaping;
use rlhf_base::Result;
use rlhf_lm::generate::GenerationConfig;
use rlhf_lm::model::CausalLm;

/// Checked settings of a PPO run, with those of each of its parts: computed once, before models and data are loaded.
/// [`PpoTrainer`](crate::train::ppo::PpoTrainer), [`StepTrainer`](crate::compat::step::StepTrainer) and
/// [`RlhfEngine`](crate::compat::engine::RlhfEngine) hold one.
///
/// ```
/// use rlhf::settings::{PpoConfig, PpoRun};
/// # fn main() -> rlhf::Result<()> {
/// let run = PpoRun::new(&PpoConfig::new("runs/sft", "runs/reward", "prompts.jsonl", "runs/ppo"))?;
/// assert_eq!(run.schedule().rates(0, 10).policy, Some(3e-6));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct PpoRun {
    /// The settings themselves. Those that a part is computed from are not changed in place.
    pub(crate) config: PpoConfig,
    /// The rewards that the settings name.
    pub(crate) rewards: Vec<Spec>,
    /// Sampling of the responses, without the tokens and texts that end one, which are the tokenizer's.
    pub(crate) generation: GenerationConfig,
    /// Evaluation of the responses by the models.
    pub(crate) rollout: RolloutPlan,
    /// Rewards and advantages.
    pub(crate) shaping: Shaping,
    /// Penalties of responses.
    pub(crate) penalties: Penalties,
    /// Losses, optimizers and limits.
    pub(crate) learner: LearnerSettings,
    /// Learning rates and orders of rows.
    pub(crate) schedule: Schedule,
    /// Whether the advantages need a value model.
    pub(crate) needs_critic: bool,
    /// Whether there is a reference model.
    pub(crate) has_reference: bool,
    /// Whether a setting of the value model's optimizer differs from the policy's, so that its learning rate is a metric.
    pub(crate) has_own_value_rate: bool,
}

impl PpoRun {
    /// Checks every setting that needs no dataset to be checked, and computes the settings of each part.
    ///
    /// # Errors
    /// As [`PpoConfig::check`].
    pub fn new(config: &PpoConfig) -> Result<Self> {
        Ok(Self {
            rewards: config.checked()?,
            generation: config.generation(&[], 0),
            rollout: config.rollout_plan(),
            shaping: config.shaping(),
            penalties: config.penalties(),
            learner: config.learner(),
            schedule: config.schedule(),
            needs_critic: config.needs_critic(),
            has_reference: config.has_reference(),
            has_own_value_rate: config.value.differs(),
            config: config.clone(),
        })
    }

    /// The settings.
    pub fn config(&self) -> &PpoConfig {
        &self.config
    }

    /// Learning rates and orders of rows.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Rewards and advantages.
    pub fn shaping(&self) -> &Shaping {
        &self.shaping
    }

    /// Losses, optimizers and limits.
    pub fn learner(&self) -> &LearnerSettings {
        &self.learner
    }

    /// Returns the settings by which the models evaluate responses, without [`PpoConfig::left_out`], which the caller adds.
    pub fn rollout(&self, policy: &CausalLm) -> RolloutSettings {
        self.rollout.of(policy)
    }

    /// Returns the settings of the sanity checks.
    pub(crate) fn checks(&self, policy: &CausalLm) -> CheckSettings {
        self.config.checks_with(self.rollout(policy), self.shaping.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rl::learner::StepRates;
    use crate::settings::Preset;
    use crate::settings::tests::{ppo, usage_of};

    #[test]
    fn a_run_has_the_rewards_and_the_settings_of_each_part_of_checked_settings() {
        let mut config = ppo();
        config.rewards.reward = vec!["length:target=40".into(), "brief=length:9".into()];
        config.value.value_learning_rate = Some(1e-5);
        (config.clip_reward_value, config.run.seed) = (Some(2.0), 7);
        let run = PpoRun::new(&config).unwrap();
        assert_eq!(run.rewards.iter().map(Spec::name).collect::<Vec<_>>(), ["model", "length", "brief"]);
        assert_eq!((run.config(), run.shaping().reward_clip, run.learner().seed), (&config, Some([-2.0, 2.0]), 7));
        let rates = run.schedule().rates(0, 10);
        assert_eq!((rates.policy, rates.value), (Some(3e-6), 1e-5));
        assert!(run.needs_critic && run.has_reference && run.has_own_value_rate);
        config.rewards.reward.push("rhyme".into());
        config.temperature = 0.0;
        let refused = usage_of(PpoRun::new(&config));
        assert!(refused.contains("temperature = 0") && refused.contains("reward = rhyme"), "{refused}");
    }

    #[test]
    fn rates_follow_optimizer_steps_and_epochs_have_one_order_where_the_preset_is_of_groups() {
        let config = PpoConfig::with_preset(Preset::Trl, "policy", "judge", "prompts.jsonl", "out");
        let ppo = PpoRun::new(&PpoConfig { num_ppo_epochs: 2, learning_rate: 1.0, ..config }).unwrap();
        let mut config = PpoConfig::grpo("policy", "prompts.jsonl", "out");
        (config.num_ppo_epochs, config.learning_rate) = (2, 1.0);
        let groups = PpoRun::new(&config).unwrap();
        let first = |run: &PpoRun, update| run.schedule.step_rates(update, 4, 3).first().policy;
        assert_eq!([0, 1].map(|update| first(&ppo, update)), [Some(1.0), Some(0.75)]);
        assert_eq!([0, 1].map(|update| first(&groups, update)), [Some(1.0), Some(0.75)], "step 6 of 24");
        let rates = |run: &PpoRun| run.schedule.step_rates(1, 4, 3);
        assert_eq!(rates(&ppo), StepRates::from(ppo.schedule.rates(1, 4)));
        assert_ne!(rates(&groups), rates(&ppo), "the rates of its later steps are lower");
        let [ppo_orders, group_orders] = [&ppo, &groups].map(|run| run.schedule.orders(0, 16));
        assert_ne!(ppo_orders[0], ppo_orders[1]);
        assert_eq!(group_orders[0], group_orders[1]);
    }
}
