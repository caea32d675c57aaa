//! Resolution of [`PpoConfig`] into the settings of each part of a run. The parts do not see the whole configuration.

use super::plan::PpoPlan;
use super::ppo::PpoConfig;
use super::presets::Preset;
use crate::rl::advantage::{
    Advantage, AdvantageEstimator, Aggregation, Baseline, PolicyLambda, ScaleRewards, ScoreBaseline,
};
use crate::rl::checks::CheckSettings;
use crate::rl::eos::left_out_of_losses;
use crate::rl::learner::{LearnerSettings, StepRates, UpdateSettings};
use crate::rl::loss::LossSettings;
use crate::rl::math::{KlEstimator, PolicyClip, ScorePosition};
use crate::rl::rollout::{RolloutPlan, RolloutSettings};
use crate::rl::schedule::Schedule;
use crate::rl::scores::{Penalties, Unstopped};
use crate::rl::settings::WhitenAdvantages;
use crate::rl::shaping::Shaping;
use rlhf_base::Result;
use rlhf_base::dist::ZeroStage;
use rlhf_base::name_of;
use rlhf_base::rng::Purpose;
use rlhf_base::schema::exclude;
use rlhf_lm::generate::settings::{LogprobsOf, SamplingConfig, StopToken};
use rlhf_lm::generate::{GenerationConfig, Sampling, StopStrings};
use rlhf_lm::model::{CausalLm, LoraConfig, is_lm_head};
use rlhf_lm::optim::{LearningRates, OptimizerConfig};
use rlhf_lm::tokenizer::Tokenizer;

/// The token that ends a response.
#[derive(Debug, Clone, Copy)]
pub(super) enum Stop {
    /// None: `response_length` ends it.
    Never,
    /// The tokenizer's.
    Eos,
    /// The one of this id.
    Id(i64),
}

/// Default `target_kl` of `early_stopping`.
pub(crate) const TARGET_KL: f64 = 1.0;

impl PpoConfig {
    /// Returns the generation of update `update`, counted from 0, whose responses end with one of the tokens `stop`. Stop strings
    /// need a tokenizer ([`PpoConfig::stop_strings`]).
    pub fn generation(&self, stop: &[i64], update: usize) -> GenerationConfig {
        GenerationConfig {
            stop_token_ids: stop.to_vec(),
            seed: self.run.seed,
            purpose: Purpose::Sampling,
            step: update as u64,
            batch_size: self.local_rollout_forward_batch_size,
            repetition_penalty: self.sampling.repetition_penalty,
            min_new_tokens: self.sampling.min_new_tokens,
            keep_sets: self.sampling.logprobs_of == LogprobsOf::Filtered,
            ..GenerationConfig::new(self.sampling(), self.response_length)
        }
    }

    /// Returns the token that ends a response, from `stop_token` or `stop_token_id`.
    pub(super) fn stop(&self) -> Result<Stop> {
        match (self.stop_token, self.stop_token_id) {
            (Some(StopToken::Eos), Some(id)) => exclude(
                name_of!(self.stop_token),
                name_of!(self.stop_token_id),
                format!(" = eos and stop_token_id = {id} exclude each other: set one of them"),
            ),
            (Some(StopToken::Eos), None) => Ok(Stop::Eos),
            (None, Some(id)) => Ok(Stop::Id(id)),
            (None, None) => Ok(Stop::Never),
        }
    }

    /// Whether a token or a text ends a response.
    pub(super) fn can_stop(&self) -> bool {
        self.stop_token.is_some() || self.stop_token_id.is_some() || !self.sampling.stop_strings.is_empty()
    }

    /// Returns the tokens that end a response; empty if there are none.
    ///
    /// # Errors
    /// If `stop_token` is eos, and the tokenizer has none.
    pub fn stop_tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<i64>> {
        match self.stop()? {
            Stop::Eos => {
                tokenizer.require_eos()?;
                Ok(tokenizer.eos_ids().to_vec())
            }
            Stop::Id(id) => Ok(vec![id]),
            Stop::Never => Ok(Vec::new()),
        }
    }

    /// Returns the texts that end a response, for the tokens of `tokenizer`.
    ///
    /// # Errors
    /// If one of them is empty.
    pub fn stop_strings(&self, tokenizer: &Tokenizer) -> Result<Option<StopStrings>> {
        let strings = &self.sampling.stop_strings;
        (!strings.is_empty()).then(|| StopStrings::new(tokenizer, strings.clone())).transpose()
    }

    /// Returns the end-of-sequence tokens that the losses leave out, for [`RolloutSettings::left_out`].
    pub fn left_out(&self, policy: &CausalLm, tokenizer: &Tokenizer) -> Vec<i64> {
        left_out_of_losses(self.mask.eos_in_loss, tokenizer, policy.config())
    }

    /// Returns the settings by which the models evaluate responses, without [`PpoConfig::left_out`], which the caller adds.
    pub fn rollout(&self, policy: &CausalLm) -> RolloutSettings {
        self.rollout_plan().of(policy)
    }

    /// Returns the part of [`PpoConfig::rollout`] that does not depend on the policy.
    pub(super) fn rollout_plan(&self) -> RolloutPlan {
        let full_kl = self.kl.kl_estimator == KlEstimator::Full && self.has_reference();
        let filtered_logprobs = self.sampling.logprobs_of == LogprobsOf::Filtered;
        let temperature = self.logprob_temperature();
        let settings = RolloutSettings {
            response_length: self.response_length,
            batch_size: self.local_rollout_forward_batch_size,
            group_size: self.advantage.num_generations,
            temperature,
            filtered_logprobs,
            // Decoding records log-probabilities over the whole vocabulary, at the temperature of sampling, in one pass per token.
            recompute_logprobs: filtered_logprobs || temperature != self.temperature,
            compares_sampling: !filtered_logprobs && temperature == self.temperature,
            score_position: self.score_position(),
            last_value_in_loss: self.mask.last_value_in_loss,
            full_kl,
            store_distributions: self.stores_distributions(),
            left_out: Vec::new(),
        };
        RolloutPlan { settings, recomputes_rounded: !self.ratios_are_one() }
    }

    /// Returns the settings of the sanity checks.
    pub fn checks(&self, policy: &CausalLm) -> CheckSettings {
        self.checks_with(self.rollout(policy), self.shaping())
    }

    /// Returns [`PpoConfig::checks`] with a rollout and a shaping that are already resolved.
    pub(super) fn checks_with(&self, rollout: RolloutSettings, shaping: Shaping) -> CheckSettings {
        CheckSettings {
            rollout: RolloutSettings { recompute_logprobs: true, group_size: 1, ..rollout },
            shaping,
            kl_coef: self.kl.kl_coef,
            low_precision: self.run.is_low_precision(),
        }
    }

    /// Returns the shaping of rewards, and the advantage estimator.
    pub fn shaping(&self) -> Shaping {
        Shaping {
            kl_estimator: self.kl.kl_estimator,
            kl_in_loss: self.kl.kl_in_loss,
            score_position: self.score_position(),
            reward_clip: match self.reward_clip_range[..] {
                [low, high] => Some([low, high]),
                _ => self.clip_reward_value.map(|most| [-most, most]),
            },
            whiten_rewards: self.whiten_rewards,
            advantage: self.advantage(),
            whiten_advantages: self.whitening(),
        }
    }

    /// Returns the penalties of responses that do not stop or are too long.
    pub(crate) fn penalties(&self) -> Penalties {
        let replaced = self.non_eos_penalty.then_some(Unstopped::Replaced(self.penalty_reward_value));
        Penalties {
            unstopped: self.missing_eos_penalty.map(Unstopped::Less).or(replaced),
            overlong: self.groups.overlong(self.response_length),
        }
    }

    /// Returns the advantage estimator with its settings.
    pub fn advantage(&self) -> Advantage {
        let settings = &self.advantage;
        let group = |baseline, scale| Advantage::Group {
            baseline,
            scale,
            normalize: settings.normalize_advantages,
            each_reward: settings.multi_objective_aggregation == Aggregation::NormalizeThenSum,
        };
        let returns = |baseline| Advantage::Returns { gamma: self.gamma, baseline };
        match settings.advantage_estimator {
            AdvantageEstimator::Gae => {
                let by_length = settings.lam_policy_alpha.map(|alpha| PolicyLambda::OfLength { alpha });
                let lam_policy = settings.lam_policy.map(PolicyLambda::Fixed).or(by_length);
                Advantage::Gae { gamma: self.gamma, lam: self.lam, lam_policy }
            }
            AdvantageEstimator::Rloo => group(Baseline::LeaveOneOut, ScaleRewards::None),
            AdvantageEstimator::Grpo => group(Baseline::Mean, settings.scale_rewards),
            AdvantageEstimator::DrGrpo => group(Baseline::Mean, ScaleRewards::None),
            AdvantageEstimator::Reinforce => returns(ScoreBaseline::Zero),
            AdvantageEstimator::ReinforceBaseline => returns(ScoreBaseline::GroupMean),
            AdvantageEstimator::Remax => returns(ScoreBaseline::Greedy),
        }
    }

    /// Returns true if the advantages need a value model.
    pub fn needs_critic(&self) -> bool {
        self.advantage.advantage_estimator.needs_critic()
    }

    /// Returns true if the reference model's distributions are kept for the passes of an update.
    pub(crate) fn stores_distributions(&self) -> bool {
        self.kl.kl_estimator == KlEstimator::Full && self.kl.kl_in_loss && self.has_reference()
    }

    /// Returns true if the loss depends on the entropy, in some step at least.
    pub(crate) fn learns_entropy(&self) -> bool {
        self.loss.entropy_coef > 0.0 || self.loss.entropy_control().is_some()
    }

    /// Returns true if there is a reference model. A run without a value model and without a KL has none.
    pub fn has_reference(&self) -> bool {
        self.needs_critic() || self.kl.kl_coef != 0.0 || self.kl.kl_coef_end.is_some_and(|end| end != 0.0)
    }

    /// Returns over which tokens advantages are whitened: over none with estimators that compare whole responses.
    fn whitening(&self) -> WhitenAdvantages {
        match self.advantage() {
            Advantage::Gae { .. } => self.whiten_advantages,
            Advantage::Returns { baseline, .. } if baseline != ScoreBaseline::Greedy => self.whiten_advantages,
            Advantage::Group { .. } | Advantage::Returns { .. } => WhitenAdvantages::None,
        }
    }

    /// Returns the position of scores: the last token if there is no value model, because no value is read after it.
    fn score_position(&self) -> ScorePosition {
        if self.needs_critic() { self.score_position } else { ScorePosition::LastToken }
    }

    /// Returns true if an update has one optimizer step, whose probability ratios are taken as 1, and the rollout's log-probabilities are
    /// used for metrics only.
    fn ratios_are_one(&self) -> bool {
        // An adaptive coefficient would follow the difference between decoding and the reference model's pass.
        self.is_on_policy() && (!self.has_reference() || (self.kl.kl_in_loss && !self.kl.adap_kl_ctrl))
    }

    /// Returns true if the policy that is trained is the one that sampled: there is one optimizer step per update, and no critic.
    fn is_on_policy(&self) -> bool {
        // The legacy step() takes any number of rows.
        !self.needs_critic()
            && self.preset != Preset::TrlLegacy
            && self.sizes().is_ok_and(|sizes| sizes.steps_per_update(self.num_ppo_epochs) == 1)
    }

    /// Returns the losses and limits of an update.
    pub fn update_settings(&self) -> UpdateSettings {
        UpdateSettings {
            loss: LossSettings {
                objective: self.loss.objective(self.cliprange),
                importance: self.loss.importance_sampling_level,
                aggregation: self.loss.aggregation(self.response_length),
                on_policy: self.is_on_policy(),
                top_entropy_quantile: self.loss.top_entropy_quantile,
                off_policy_mask_threshold: self.loss.off_policy_mask_threshold,
                cliprange_value: self.cliprange_value,
                vf_coef: self.vf_coef,
                entropy_coef: self.loss.entropy_coef,
                kl_in_loss: (self.kl.kl_in_loss && self.has_reference()).then_some(self.kl.kl_estimator),
                use_bias_correction_kl: self.kl.use_bias_correction_kl,
                temperature: self.logprob_temperature(),
            },
            whiten_mini_batches: self.whitening() == WhitenAdvantages::MiniBatch,
            target_kl: self.target_kl(),
            ratio_threshold: self.loss.ratio_threshold,
        }
    }

    /// Returns the losses, optimizers and limits of a [`Learner`](crate::rl::learner::Learner).
    pub fn learner(&self) -> LearnerSettings {
        LearnerSettings {
            update: self.update_settings(),
            policy_optimizer: self.optimizer.clone(),
            value_optimizer: self.value_optimizer().1,
            gradient_checkpointing: self.run.gradient_checkpointing,
            max_tokens_per_micro_batch: self.run.max_tokens_per_micro_batch,
            loss_scale: self.run.fp16.then(|| self.run.loss_scale.clone()),
            align_overflow: self.half.align_overflow,
            ema_beta: self.ema.enable_ema.then_some(self.ema.ema_beta),
            entropy_control: self.loss.entropy_control(),
            policy_stage: self.policy_stage(),
            value_stage: self.value_stage(),
            seed: self.run.seed,
        }
    }

    /// Returns the learning rates and the orders of rows from update to update: with the presets `grpo` and `rloo` the rates follow
    /// optimizer steps, as in TRL's trainers, with the others updates.
    pub fn schedule(&self) -> Schedule {
        Schedule {
            policy: (self.learning_rate, self.optimizer.clone()),
            value: self.value_optimizer(),
            value_warmup_updates: self.value.value_warmup_updates,
            by_step: self.preset.is_of_groups(),
            epochs: self.num_ppo_epochs,
            seed: self.run.seed,
        }
    }

    /// Returns [`Schedule::orders`] of [`PpoConfig::schedule`].
    pub fn mini_batch_orders(&self, update: usize, rows: usize) -> Vec<Vec<usize>> {
        self.schedule().orders(update, rows)
    }

    /// Returns [`Schedule::step_rates`] of [`PpoConfig::schedule`], for update `update` (from 0) of `plan`.
    pub fn step_rates(&self, update: usize, plan: &PpoPlan) -> StepRates {
        self.schedule().step_rates(update, plan.num_total_batches, plan.steps_per_epoch())
    }

    /// Returns [`Schedule::rates`] of [`PpoConfig::schedule`].
    pub fn learning_rates(&self, update: usize, num_updates: usize) -> LearningRates {
        self.schedule().rates(update, num_updates)
    }

    /// Returns the value model's adapter; `None` if it gets none.
    pub fn value_lora(&self) -> Option<LoraConfig> {
        let value_peft = &self.value_peft;
        let mut peft = self.peft.clone();
        peft.use_peft = value_peft.value_use_peft.unwrap_or(peft.use_peft);
        peft.lora_r = value_peft.value_lora_r.unwrap_or(peft.lora_r);
        if !value_peft.value_lora_target_modules.is_empty() {
            peft.lora_target_modules.clone_from(&value_peft.value_lora_target_modules);
        }
        // A value model has no LM head.
        peft.lora_modules_to_save.retain(|module| !is_lm_head(module));
        if !value_peft.value_lora_modules_to_save.is_empty() {
            peft.lora_modules_to_save.clone_from(&value_peft.value_lora_modules_to_save);
        }
        peft.lora()
    }

    /// Returns the peak learning rate and the settings of the value model's optimizer.
    pub fn value_optimizer(&self) -> (f64, OptimizerConfig) {
        let value = &self.value;
        let mut optimizer = self.optimizer.clone();
        optimizer.lr_scheduler_type = value.value_lr_scheduler_type.unwrap_or(optimizer.lr_scheduler_type);
        if let Some(steps) = value.value_lr_warmup_steps {
            optimizer.warmup_steps = steps;
            optimizer.warmup_ratio = 0.0;
        }
        optimizer.weight_decay = value.value_weight_decay.unwrap_or(optimizer.weight_decay);
        if let Some(norm) = value.value_max_grad_norm {
            optimizer.max_grad_norm = (norm != 0.0).then_some(norm);
        }
        (value.value_learning_rate.unwrap_or(self.learning_rate), optimizer)
    }

    /// Returns the sharding of the policy; the reference model is sharded where the policy's parameters are.
    pub fn policy_stage(&self) -> ZeroStage {
        self.dist.actor_zero_stage.unwrap_or(self.run.dist.zero_stage)
    }

    /// Returns the sharding of the value model. A value head has the sharding of its policy.
    pub fn value_stage(&self) -> ZeroStage {
        let stage = if self.legacy.value_head { self.dist.actor_zero_stage } else { self.dist.critic_zero_stage };
        stage.unwrap_or(self.run.dist.zero_stage)
    }

    /// Returns the sharding of frozen models other than the reference model, which have parameters only: stage 3 shards them.
    pub fn frozen_stage(&self) -> ZeroStage {
        self.run.dist.zero_stage
    }

    /// Returns the bounds of the policy's probability ratio in the clipped objective.
    pub fn policy_clip(&self) -> PolicyClip {
        self.loss.clip(self.cliprange)
    }

    /// Returns the sampling of a response's tokens.
    pub fn sampling(&self) -> Sampling {
        let SamplingConfig { top_k, top_p, min_p, .. } = self.sampling;
        Sampling::Random { temperature: self.temperature, top_k, top_p, min_p }
    }

    /// Returns the temperature of log-probabilities.
    pub fn logprob_temperature(&self) -> f64 {
        if self.legacy.raw_logprobs { 1.0 } else { self.temperature }
    }

    /// Returns the target KL. An update's epochs end when the KL exceeds 1.5 times this value.
    pub fn target_kl(&self) -> Option<f64> {
        self.loss.target_kl.or(self.legacy.early_stopping.then_some(TARGET_KL))
    }
}

#[cfg(test)]
mod tests {
    use crate::settings::tests::{ppo, usage_of};
    use crate::settings::{LrSchedulerType, ValuePeftConfig};

    #[test]
    fn a_value_model_trains_the_policys_modules_in_full_without_the_lm_head_or_its_own() {
        let mut config = ppo();
        config.peft.use_peft = true;
        config.peft.lora_modules_to_save = ["embed_tokens", "lm_head", "embed_out"].map(str::to_string).to_vec();
        assert_eq!(config.value_lora().unwrap().modules_to_save, ["embed_tokens"]);
        config.value_peft.value_lora_modules_to_save = vec!["norm".into()];
        config.check().unwrap();
        assert_eq!(config.value_lora().unwrap().modules_to_save, ["norm"]);
    }

    #[test]
    fn a_value_model_has_adapters_of_its_own_where_they_are_set() {
        let mut config = ppo();
        config.value_peft.value_use_peft = Some(true);
        config.value_peft.value_lora_r = Some(4);
        config.value_peft.value_lora_target_modules = vec!["q_proj".into()];
        config.check().unwrap();
        let lora = config.value_lora().unwrap();
        assert_eq!((config.peft.lora(), lora.r, lora.target_modules), (None, 4, Some(vec!["q_proj".into()])));
        config.value_peft.value_use_peft = None;
        assert!(
            usage_of(config.check()).starts_with("value_lora_target_modules is given, and the value model gets no")
        );
        config.peft.use_peft = true;
        config.check().unwrap();
        assert_eq!((config.peft.lora().unwrap().r, config.value_lora().unwrap().r), (16, 4));
        config.value_peft = ValuePeftConfig { value_use_peft: Some(false), ..ppo().value_peft };
        config.check().unwrap();
        assert!(config.peft.lora().is_some() && config.value_lora().is_none());
    }

    #[test]
    fn a_value_model_has_its_own_settings_where_they_are_set_and_the_policys_elsewhere() {
        let mut config = ppo();
        config.optimizer.warmup_ratio = 0.1;
        config.optimizer.max_grad_norm = Some(1.0);
        config.optimizer.weight_decay = 0.5;
        assert_eq!(config.value_optimizer(), (3e-6, config.optimizer.clone()));
        config.value.value_learning_rate = Some(1e-5);
        config.value.value_lr_scheduler_type = Some(LrSchedulerType::Cosine);
        config.value.value_lr_warmup_steps = Some(3);
        config.value.value_max_grad_norm = Some(0.0);
        config.check().unwrap();
        let (rate, optimizer) = config.value_optimizer();
        assert_eq!((rate, optimizer.warmup_steps, optimizer.warmup_ratio), (1e-5, 3, 0.0));
        assert_eq!((optimizer.lr_scheduler_type, optimizer.max_grad_norm), (LrSchedulerType::Cosine, None));
        assert_eq!(optimizer.weight_decay, 0.5);
    }

    #[test]
    fn while_the_policy_is_frozen_it_has_no_rate_and_its_schedule_waits() {
        let mut config = ppo();
        config.learning_rate = 1.0;
        config.value.value_learning_rate = Some(4.0);
        config.value.value_warmup_updates = 2;
        let rates: Vec<_> = (0..4).map(|update| config.learning_rates(update, 4)).collect();
        assert_eq!(rates.iter().map(|r| r.policy).collect::<Vec<_>>(), [None, None, Some(1.0), Some(0.5)]);
        assert_eq!(rates.iter().map(|r| r.value).collect::<Vec<_>>(), [4.0, 3.0, 2.0, 1.0]);
    }
}
