//! Checks of settings against each other, and of the sizes of all numbers.

use std::collections::HashMap;
use std::fmt::Display;

use serde::Serialize;

use super::plan::Sizes;
use super::ppo::{LegacyConfig, PpoConfig, RolloutLogConfig, TestModeConfig, ValueConfig};
use super::presets::Preset;
use super::resolve::TARGET_KL;
use crate::reward::{Spec, specs_or_error};
use crate::rl::advantage::{AdvantageEstimator, Aggregation};
use crate::rl::math::KlEstimator;
use crate::rl::settings::{LossType, WhitenAdvantages};
use crate::run::settings::EVAL_SCORES;
use crate::settings::LongPrompts;
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{
    Choices, MOST, Refusals, Settings, above_zero, all, at_least_one, defaults, defaults_with, exclude, expect,
    no_effect, refuse, usage, zero_or_more, zero_to_one,
};
use rlhf_lm::generate::settings::LogprobsOf;
use rlhf_lm::model::{PeftConfig, Shape};
use rlhf_lm::optim::settings::{LrSchedulerType, check_learning};

/// Refuses counts and sizes that no run can have, before anything is computed from them.
pub(super) fn check_sizes<C: Serialize + Settings>(config: &C) -> Result<()> {
    // A setting that cannot be written, such as a path that is not UTF-8, is refused where it is written.
    let Ok(serde_json::Value::Object(settings)) = serde_json::to_value(config) else { return Ok(()) };
    let most: HashMap<&str, u64> = C::fields().iter().map(|field| (field.name, field.most)).collect();
    let mut refusals = Refusals::default();
    for (name, value) in &settings {
        if let Some(number) = value.as_u64() {
            let most = most.get(name.as_str()).copied().unwrap_or(MOST);
            refusals.add(expect(number <= most, name, number, &format!("at most {most}")))?;
        }
    }
    refusals.end()
}

/// Returns the maximum length of a prompt, in tokens, before as many new ones as a setting allows, by [`Shape::max_prompt_len`]. `whose`
/// follows the `context` in the message.
///
/// # Errors
/// If no token is left for a prompt, or for the decoder's start token.
pub(crate) fn max_prompt_len(
    model: &Shape,
    context: usize,
    (setting, new_tokens): (&str, usize),
    whose: &str,
) -> Result<usize> {
    match model.max_prompt_len(context, new_tokens) {
        Some(longest) => Ok(longest),
        None if model.is_encoder_decoder() => refuse(
            setting,
            format!(
                " = {new_tokens}: expected at most {}, the decoder's limit of {context} tokens{whose} less its start token",
                context.saturating_sub(1)
            ),
        ),
        None => refuse(
            setting,
            format!(" = {new_tokens} leaves no token for a prompt in the context of {context} tokens{whose}"),
        ),
    }
}

impl PpoConfig {
    /// Checks every setting that needs no dataset to be checked.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        self.checked().map(drop)
    }

    /// Checks every setting as [`PpoConfig::check`] does, and returns the rewards, which later parts of the run take from here.
    pub(crate) fn checked(&self) -> Result<Vec<Spec>> {
        // First, because the checks below multiply some of these numbers.
        check_sizes(self)?;
        let sizes = self.sizes();
        let known = sizes.as_ref().ok();
        let (rewards, rewards_check) = specs_or_error(self);
        all([
            at_least_one(name_of!(self.response_length), self.response_length),
            at_least_one(name_of!(self.num_ppo_epochs), self.num_ppo_epochs),
            at_least_one(name_of!(self.local_rollout_forward_batch_size), self.local_rollout_forward_batch_size),
            self.total_episodes.map_or(Ok(()), |episodes| at_least_one(name_of!(self.total_episodes), episodes)),
            above_zero(name_of!(self.num_train_epochs), self.num_train_epochs),
            above_zero(name_of!(self.temperature), self.temperature),
            above_zero(name_of!(self.cliprange), self.cliprange),
            above_zero(name_of!(self.cliprange_value), self.cliprange_value),
            zero_or_more(name_of!(self.kl.kl_coef), self.kl.kl_coef),
            zero_or_more(name_of!(self.vf_coef), self.vf_coef),
            zero_to_one(name_of!(self.gamma), self.gamma),
            zero_to_one(name_of!(self.lam), self.lam),
            self.missing_eos_penalty
                .map_or(Ok(()), |penalty| zero_or_more(name_of!(self.missing_eos_penalty), penalty)),
            self.check_penalty(),
            self.check_whitening(known),
            self.kl.check(!self.needs_critic()),
            self.advantage.check(),
            self.groups.check(self.advantage.num_generations, self.response_length),
            self.sync.check(self.peft.use_peft || self.legacy.num_shared_layers.is_some(), self.has_reference()),
            self.run.quantization.check_trained(self.peft.use_peft),
            self.run.quantization.check(),
            self.check_groups(),
            self.check_one_by_one(),
            self.check_without_critic(),
            self.loss.check(),
            self.check_clip(),
            self.check_limits(known),
            self.score_scaling.check(),
            self.legacy.check(self),
            self.sampling.check(),
            self.check_sampling(),
            self.value.check(self),
            self.stop().map(drop),
            check_token_id(self.stop_token_id),
            self.rewards.check(),
            self.environment.check(),
            self.check_environment(),
            rewards_check.and_then(|()| self.rewards.check_outside(&rewards)),
            self.data.check(self.eval_dataset_name.as_deref()),
            self.prompt_length.check(),
            self.check_adapters(),
            self.clip_reward_value.map_or(Ok(()), |most| above_zero(name_of!(self.clip_reward_value), most)),
            self.mask.check(self.response_length, self.score_position),
            self.unsupervised.check(),
            self.ema.check(),
            self.rollout_log.check(),
            self.test_mode.check(),
            check_learning(self.learning_rate, &self.optimizer, Some(self.value_optimizer().1.lr_scheduler_type)),
            self.check_optimizer(),
            self.check_offload(&rewards),
            self.alarms.check(self.run.checkpoints.save_steps.is_some()),
            self.half.check(self.run.fp16),
            self.run.check(&[self.policy_stage(), self.value_stage()], &self.eval),
            at_least_one(name_of!(self.num_eval_prompts), self.num_eval_prompts),
            self.check_best_metric(),
            sizes.map(drop),
        ])?;
        Ok(rewards)
    }

    /// Refuses settings that do not go with an environment.
    fn check_environment(&self) -> Result<()> {
        if !self.environment.is_used() {
            return Ok(());
        }
        if !self.can_stop() {
            usage(
                "tools and environments without stop_token, stop_token_id or stop_strings: no turn would end; expected stop_token = eos",
            )?;
        }
        let least = self.mask.min_response_length;
        if least > 0 {
            refuse(
                name_of!(self.mask.min_response_length),
                format!(
                    " = {least} with tools or an environment: it can train on responses of an earlier update again, whose \
                 episodes are not kept; expected min_response_length = 0"
                ),
            )?;
        }
        let long = self.prompt_length.long_prompts;
        if matches!(long, LongPrompts::TruncateLeft | LongPrompts::TruncateRight) {
            refuse(
                name_of!(self.prompt_length.long_prompts),
                format!(
                    " = {} with tools or an environment: a prompt with its tools is not cut; expected error or drop",
                    long.name()
                ),
            )?;
        }
        if !self.dist.ds3_gather_for_generation && self.policy_stage().shards_parameters() {
            refuse(
                name_of!(self.dist.ds3_gather_for_generation),
                " = false with tools or an environment: ranks would wait for each other's turns; expected true",
            )?;
        }
        Ok(())
    }

    /// Refuses to offload frozen models alone where there are none.
    fn check_offload(&self, rewards: &[Spec]) -> Result<()> {
        let separate_reference = self.has_reference() && !self.peft.use_peft;
        if separate_reference || rewards.iter().any(|spec| spec.model_path().is_some()) {
            Ok(())
        } else {
            self.run.offload.check_models("without a reference model of its own weights and without a reward model")
        }
    }

    /// Checks the evaluations, and the metric of the best model.
    fn check_best_metric(&self) -> Result<()> {
        let reference_metrics = ["objective/kl", "objective/non_score_reward", "objective/rlhf_reward"];
        let metric = self.eval.metric_for_best_model.as_deref();
        if let Some(metric) = metric.filter(|metric| reference_metrics.contains(metric) && !self.has_reference()) {
            return refuse(
                name_of!(self.eval.metric_for_best_model),
                format!(" = {metric} needs a reference model, and with kl_coef = 0 there is none"),
            );
        }
        let known = ["eval/score", "eval/response_length", EVAL_SCORES];
        let with_kl = ["eval/score", "eval/kl", "eval/response_length", EVAL_SCORES];
        self.eval.check(self.run.checkpoints.save_steps, if self.has_reference() { &with_kl } else { &known })
    }

    /// Refuses settings of the clip that have no effect with the objective, and a `dual_clip` below the clip's upper bound.
    fn check_clip(&self) -> Result<()> {
        let usual: Self = defaults();
        let [low, high, dual] =
            [name_of!(self.cliprange), name_of!(self.loss.cliprange_high), name_of!(self.loss.dual_clip)];
        let range = self.cliprange;
        let mut refusals = Refusals::default();
        match (self.loss.loss_type, self.loss.cliprange_high) {
            (LossType::Sapo | LossType::Vespo, high_value) => {
                let why = "with loss_type = sapo or vespo, which do not clip the ratio";
                if range != usual.cliprange {
                    refusals.add(no_effect(low, range, why))?;
                }
                refusals.add(high_value.map_or(Ok(()), |high_value| no_effect(high, high_value, why)))?;
            }
            (LossType::Cispo, Some(high_value)) if range != usual.cliprange => {
                let why = format!("with loss_type = cispo and {high} = {high_value}, the largest weight");
                refusals.add(no_effect(low, range, &why))?;
            }
            (LossType::Cispo, _) => {}
            (_, high_value) => {
                let name = if high_value.is_some() { high } else { low };
                let above = high_value.unwrap_or(range);
                // A bound of 1 or less is refused by itself.
                if let Some(bound) = self.loss.dual_clip.filter(|bound| *bound > 1.0 && *bound <= 1.0 + above) {
                    let expected = format!(
                        "a number above 1 + {name} = {}: below it, it would bound what the clip leaves",
                        1.0 + above
                    );
                    refusals.add(expect(false, dual, bound, &expected))?;
                }
            }
        }
        refusals.end()
    }

    /// Refuses limits of the policy's loss that cannot have an effect with these sizes.
    fn check_limits(&self, sizes: Option<&Sizes>) -> Result<()> {
        // These presets set a limit in any case. Sizes that do not go together are refused by another check.
        let one_step = sizes.is_some_and(|sizes| sizes.steps_per_update(self.num_ppo_epochs) == 1)
            && !matches!(self.preset, Preset::TrlLegacy | Preset::Grpo | Preset::Rloo);
        let limit = |name, value: Option<f64>| {
            let why = "with one optimizer step per update (num_ppo_epochs = 1 and one mini-batch): in the first step every \
                       ratio is 1";
            value.filter(|_| one_step).map_or(Ok(()), |value| no_effect(name, value, why))
        };
        let last = self.num_ppo_epochs == 1;
        all([
            self.loss.target_kl.filter(|_| last).map_or(Ok(()), |kl| {
                no_effect(
                    name_of!(self.loss.target_kl),
                    kl,
                    "with num_ppo_epochs = 1: there is no second epoch to skip",
                )
            }),
            // The largest weight of CISPO bounds a ratio of 1 too.
            limit(
                name_of!(self.loss.cliprange_high),
                self.loss.cliprange_high.filter(|_| self.loss.loss_type != LossType::Cispo),
            ),
            limit(name_of!(self.loss.dual_clip), self.loss.dual_clip),
            limit(name_of!(self.loss.ratio_threshold), self.loss.ratio_threshold),
            limit(name_of!(self.loss.off_policy_mask_threshold), self.loss.off_policy_mask_threshold),
        ])
    }

    /// Refuses settings that change the whole score of a response, if each reward is compared by itself.
    fn check_one_by_one(&self) -> Result<()> {
        if self.advantage.multi_objective_aggregation != Aggregation::NormalizeThenSum {
            return Ok(());
        }
        let why =
            "with multi_objective_aggregation = normalize_then_sum, which compares each reward as it was returned";
        let listed = |name, value: &[String]| (!value.is_empty()).then(|| (name, value.join(",")));
        let number = |name, value: Option<f64>| value.map(|value| (name, value.to_string()));
        let flag = |name, value: bool| value.then(|| (name, "true".to_string()));
        let range = &self.reward_clip_range;
        let coefs = [
            (name_of!(self.kl.kl_coef), self.kl.kl_coef),
            (name_of!(self.kl.kl_coef_end), self.kl.kl_coef_end.unwrap_or(0.0)),
        ];
        let in_rewards = coefs.into_iter().find(|(_, coef)| !self.kl.kl_in_loss && *coef != 0.0);
        let settings = [
            (!range.is_empty()).then(|| {
                let range: Vec<String> = range.iter().map(f64::to_string).collect();
                (name_of!(self.reward_clip_range), range.join(","))
            }),
            number(name_of!(self.clip_reward_value), self.clip_reward_value),
            number(name_of!(self.missing_eos_penalty), self.missing_eos_penalty),
            flag(name_of!(self.non_eos_penalty), self.non_eos_penalty),
            self.groups
                .overlong_buffer_len
                .map(|length| (name_of!(self.groups.overlong_buffer_len), length.to_string())),
            flag(name_of!(self.score_scaling.use_score_scaling), self.score_scaling.use_score_scaling),
            number(name_of!(self.score_scaling.score_clip), self.score_scaling.score_clip),
            listed(name_of!(self.rewards.reward_normalize), &self.rewards.reward_normalize),
            listed(name_of!(self.rewards.reward_scale), &self.rewards.reward_scale),
            listed(name_of!(self.rewards.reward_clip), &self.rewards.reward_clip),
        ];
        let mut refusals = Refusals::default();
        for (name, value) in settings.into_iter().flatten() {
            refusals.add(no_effect(name, value, why))?;
        }
        if let Some((name, coef)) = in_rewards {
            refusals.add(no_effect(name, coef, &format!("{why}; kl_in_loss = true puts the KL into the loss")))?;
        }
        refusals.end()
    }

    /// Checks groups of responses together with other settings.
    fn check_groups(&self) -> Result<()> {
        let rows = self.advantage.num_generations;
        let least = self.mask.min_response_length;
        let range = &self.reward_clip_range;
        let range_text = range.iter().map(f64::to_string).collect::<Vec<_>>().join(",");
        all([
            if rows > 1 && least > 0 {
                refuse(
                    name_of!(self.mask.min_response_length),
                    format!(
                        " = {least} with num_generations = {rows}: responses that are left out would cut their groups; \
                     expected min_response_length = 0"
                    ),
                )
            } else {
                Ok(())
            },
            match (&range[..], self.clip_reward_value) {
                ([], _) => Ok(()),
                ([_, _], Some(most)) => exclude(
                    name_of!(self.reward_clip_range),
                    name_of!(self.clip_reward_value),
                    format!(" = {range_text} and clip_reward_value = {most} exclude each other: set one of them"),
                ),
                ([low, high], None) if low < high => Ok(()),
                _ => refuse(
                    name_of!(self.reward_clip_range),
                    format!(" = {range_text}: expected two numbers LOW,HIGH, the first below the second"),
                ),
            },
            if self.mask.mask_truncated_completions && !self.can_stop() {
                refuse(
                    name_of!(self.mask.mask_truncated_completions),
                    " = true without stop_token, stop_token_id or stop_strings: no response would stop, and all \
                     would be masked",
                )
            } else {
                Ok(())
            },
        ])
    }

    /// Refuses settings of a value model where the estimator needs none, and others that have no effect without one.
    fn check_without_critic(&self) -> Result<()> {
        if self.needs_critic() {
            return Ok(());
        }
        let usual: Self = defaults();
        let name = self.advantage.advantage_estimator.name();
        let why = format!("with advantage_estimator = {name}: there is no value model");
        let by_returns = matches!(
            self.advantage.advantage_estimator,
            AdvantageEstimator::Reinforce | AdvantageEstimator::ReinforceBaseline | AdvantageEstimator::Remax
        );
        let mut refusals = Refusals::default();
        let path =
            self.value_model_path.iter().map(|path| (name_of!(self.value_model_path), path.display().to_string()));
        let stage = self.dist.critic_zero_stage.map(|stage| (name_of!(self.dist.critic_zero_stage), stage.to_string()));
        let number = |name, value: f64, usual: f64| (value != usual).then(|| (name, value.to_string()));
        let flag = |name, value: bool| value.then(|| (name, "true".to_string()));
        let others = [
            number(name_of!(self.vf_coef), self.vf_coef, usual.vf_coef),
            number(name_of!(self.cliprange_value), self.cliprange_value, usual.cliprange_value),
            number(name_of!(self.lam), self.lam, usual.lam),
            number(name_of!(self.gamma), self.gamma, usual.gamma).filter(|_| !by_returns),
            flag(name_of!(self.legacy.value_head), self.legacy.value_head),
            flag(name_of!(self.whiten_rewards), self.whiten_rewards),
            (!self.mask.last_value_in_loss).then(|| (name_of!(self.mask.last_value_in_loss), "false".to_string())),
            self.value_peft.value_use_peft.map(|value| (name_of!(self.value_peft.value_use_peft), value.to_string())),
        ];
        for (name, value) in path.chain(stage).chain(self.value.set_fields()).chain(others.into_iter().flatten()) {
            refusals.add(no_effect(name, value, &why))?;
        }
        let is_remax = self.advantage.advantage_estimator == AdvantageEstimator::Remax;
        if (!by_returns || is_remax) && self.whiten_advantages == WhitenAdvantages::MiniBatch {
            let local = if is_remax {
                "whose advantages are not whitened"
            } else {
                "which has scale_rewards and normalize_advantages"
            };
            let why = format!("with advantage_estimator = {name}, {local}");
            refusals.add(no_effect(name_of!(self.whiten_advantages), "mini_batch", &why))?;
        }
        refusals.add(self.check_without_reference())?;
        refusals.end()
    }

    /// Refuses settings of the KL in a run without one, except those that the preset sets.
    fn check_without_reference(&self) -> Result<()> {
        if self.has_reference() {
            return Ok(());
        }
        let usual: Self = defaults_with(&self.preset.settings());
        let why = "with kl_coef = 0: there is no reference model";
        let estimator = self.kl.kl_estimator.name();
        all([
            if self.kl.kl_estimator == usual.kl.kl_estimator {
                Ok(())
            } else {
                no_effect(name_of!(self.kl.kl_estimator), estimator, why)
            },
            if self.kl.use_bias_correction_kl && !usual.kl.use_bias_correction_kl {
                no_effect(name_of!(self.kl.use_bias_correction_kl), true, why)
            } else {
                Ok(())
            },
        ])
    }

    /// Checks sampling together with lengths, stop tokens and masks.
    fn check_sampling(&self) -> Result<()> {
        let (least, most) = (self.sampling.min_new_tokens, self.response_length);
        let stops = self.can_stop();
        all([
            expect(
                least <= most,
                name_of!(self.sampling.min_new_tokens),
                least,
                &format!("at most response_length = {most}"),
            ),
            if least > 0 && !stops {
                no_effect(
                    name_of!(self.sampling.min_new_tokens),
                    least,
                    "without stop_token, stop_token_id or stop_strings",
                )
            } else {
                Ok(())
            },
            self.check_filtered_logprobs(),
        ])
    }

    fn check_filtered_logprobs(&self) -> Result<()> {
        if self.sampling.logprobs_of == LogprobsOf::Policy {
            return Ok(());
        }
        if self.mask.min_response_length > 0 {
            return refuse(
                name_of!(self.sampling.logprobs_of),
                format!(
                    " = filtered with min_response_length = {}: where responses are trained on again, the filters of an \
                 earlier policy would be taken for this one's: expected min_response_length = 0, or logprobs_of = policy",
                    self.mask.min_response_length
                ),
            );
        }
        if self.legacy.raw_logprobs && self.temperature != 1.0 {
            return refuse(
                name_of!(self.sampling.logprobs_of),
                format!(
                    " = filtered with raw_logprobs = true and temperature = {}: the sampled distribution is filtered at that \
                 temperature: expected temperature = 1, or raw_logprobs = false",
                    self.temperature
                ),
            );
        }
        Ok(())
    }

    fn check_penalty(&self) -> Result<()> {
        let value = self.penalty_reward_value;
        all([
            match (self.missing_eos_penalty, self.non_eos_penalty) {
                (Some(penalty), true) => exclude(
                    name_of!(self.missing_eos_penalty),
                    name_of!(self.non_eos_penalty),
                    format!(
                        " = {penalty}, which is subtracted from the score, and non_eos_penalty, which replaces \
                     it, exclude each other: set one of them"
                    ),
                ),
                _ => Ok(()),
            },
            expect(value.is_finite(), name_of!(self.penalty_reward_value), value, "a number"),
            if value != -1.0 && !self.non_eos_penalty {
                no_effect(name_of!(self.penalty_reward_value), value, "without non_eos_penalty = true")
            } else {
                Ok(())
            },
        ])
    }

    fn check_whitening(&self, sizes: Option<&Sizes>) -> Result<()> {
        if self.whiten_advantages == WhitenAdvantages::MiniBatch
            && sizes.is_some_and(|sizes| sizes.epoch.parts(sizes.batch_size) == 1)
        {
            return refuse(
                name_of!(self.whiten_advantages),
                " = mini_batch is the same as batch where an epoch is one mini-batch: set one of the two",
            );
        }
        Ok(())
    }

    /// Checks the optimizer, and the dtype of saved weights, against the parameters that both models train.
    fn check_optimizer(&self) -> Result<()> {
        let no_critic_in_full = !self.needs_critic() || self.legacy.value_head || self.value_lora().is_some();
        let stages = [self.policy_stage(), self.value_stage()];
        let only_adapters = self.peft.use_peft && no_critic_in_full;
        all([
            self.optimizer.check_held(&stages, self.run.bf16, only_adapters),
            self.run.check_save_dtype(only_adapters),
        ])
    }

    /// Checks the adapters of both models.
    fn check_adapters(&self) -> Result<()> {
        let local = &self.value_peft;
        if self.value_lora().is_none() {
            let adapter_settings = [
                (name_of!(local.value_lora_target_modules), !local.value_lora_target_modules.is_empty()),
                (name_of!(local.value_lora_modules_to_save), !local.value_lora_modules_to_save.is_empty()),
                (name_of!(local.value_lora_r), local.value_lora_r.is_some()),
            ];
            if let Some((name, _)) = adapter_settings.iter().find(|(_, is_set)| *is_set) {
                return refuse(name, " is given, and the value model gets no adapter: set value_use_peft = true");
            }
            return self.peft.check();
        }
        local.value_lora_r.map_or(Ok(()), |r| at_least_one(name_of!(local.value_lora_r), r))?;
        // Where the value model has no setting of its own, its adapter has the policy's shape.
        PeftConfig { use_peft: true, ..self.peft.clone() }.check()
    }
}

impl LegacyConfig {
    fn check(&self, config: &PpoConfig) -> Result<()> {
        let legacy = config.preset == Preset::TrlLegacy;
        let needs_legacy = |name, value: Option<usize>| {
            let why = "without preset = trl-legacy: per_device_train_batch_size, gradient_accumulation_steps and \
                       num_mini_batches are the sizes there";
            value.filter(|_| !legacy).map_or(Ok(()), |value| no_effect(name, value, why))
        };
        // TRL's own default may be set explicitly.
        let unwatched = |kl: &f64| legacy && !self.early_stopping && *kl != TARGET_KL;
        let no_effect_if =
            |when: bool, name, value: &dyn Display, why| if when { no_effect(name, value, why) } else { Ok(()) };
        all([
            needs_legacy(name_of!(self.batch_size), self.batch_size),
            needs_legacy(name_of!(self.mini_batch_size), self.mini_batch_size),
            no_effect_if(
                self.raw_logprobs && config.temperature == 1.0 && !legacy,
                name_of!(self.raw_logprobs),
                &true,
                "with temperature = 1",
            ),
            config.loss.target_kl.filter(unwatched).map_or(Ok(()), |kl| {
                no_effect(
                    name_of!(config.loss.target_kl),
                    kl,
                    "with preset = trl-legacy and without early_stopping = true",
                )
            }),
            no_effect_if(
                self.early_stopping && config.num_ppo_epochs == 1,
                name_of!(self.early_stopping),
                &true,
                "with num_ppo_epochs = 1: there is no second epoch to skip",
            ),
            self.num_shared_layers.filter(|_| config.peft.use_peft).map_or(Ok(()), |layers| {
                let why = "with use_peft = true: with an adapter the reference model shares all layers";
                no_effect(name_of!(self.num_shared_layers), layers, why)
            }),
            self.check_best(config),
            self.check_value_head(config),
        ])
    }

    /// Refuses to choose the best model by scores that change while the policy does not.
    fn check_best(&self, config: &PpoConfig) -> Result<()> {
        let moves = |metric: &&String| ["objective/scores", "objective/rlhf_reward"].contains(&metric.as_str());
        match config.eval.metric_for_best_model.as_ref().filter(moves) {
            Some(metric) if config.score_scaling.use_score_scaling => refuse(
                name_of!(config.eval.metric_for_best_model),
                format!(
                    " = {metric} with use_score_scaling = true: these scores move with the running deviation \
                 while the policy stays; expected objective/raw_scores, or eval/score with eval_steps"
                ),
            ),
            _ => Ok(()),
        }
    }

    fn check_value_head(&self, config: &PpoConfig) -> Result<()> {
        if !self.value_head {
            return Ok(());
        }
        let mut refusals = Refusals::default();
        if config.kl.kl_in_loss && config.kl.kl_estimator == KlEstimator::Full {
            refusals.add(refuse(name_of!(config.kl.kl_in_loss), " = true with kl_estimator = full and value_head = true: the KL over the vocabulary as a loss needs a value \
                 model of its own; expected mse, k3 or abs",
            ))?;
        }
        if config.run.fp16 {
            refusals.add(refuse(
                name_of!(config.run.fp16),
                " = true with value_head = true: a loss scale belongs to one model; expected bf16 = true",
            ))?;
        }
        let path =
            config.value_model_path.iter().map(|path| (name_of!(config.value_model_path), path.display().to_string()));
        let stage =
            config.dist.critic_zero_stage.map(|stage| (name_of!(config.dist.critic_zero_stage), stage.to_string()));
        for (name, value) in path.chain(stage).chain(config.value.set_fields()) {
            refusals.add(refuse(name, format!(
                " = {value} with value_head = true: the head shares the policy's trunk and is trained with it; there is no \
                 value model"
            )))?;
        }
        refusals.end()
    }
}

impl ValueConfig {
    fn check(&self, config: &PpoConfig) -> Result<()> {
        let mut refusals = Refusals::default();
        for (name, value) in [
            (name_of!(self.value_learning_rate), self.value_learning_rate),
            (name_of!(self.value_weight_decay), self.value_weight_decay),
            (name_of!(self.value_max_grad_norm), self.value_max_grad_norm),
        ] {
            refusals.add(value.map_or(Ok(()), |value| zero_or_more(name, value)))?;
        }
        if config.vf_coef == 0.0 {
            for (name, value) in self.set_fields() {
                refusals.add(no_effect(name, value, "with vf_coef = 0: the value model is not trained"))?;
            }
        }
        let (peak, optimizer) = config.value_optimizer();
        let schedule = optimizer.lr_scheduler_type;
        if let Some(steps) = self.value_lr_warmup_steps.filter(|&n| n > 0 && schedule == LrSchedulerType::Constant) {
            let why = "with the value model's schedule constant; constant_with_warmup has a warm-up";
            refusals.add(no_effect(name_of!(self.value_lr_warmup_steps), steps, why))?;
        }
        let too_high = |end: &f64| schedule.falls() && *end >= peak;
        if let (Some(_), Some(end)) = (self.value_learning_rate, optimizer.lr_end.filter(too_high)) {
            refusals.add(refuse(
                name_of!(optimizer.lr_end),
                format!(" = {end}: expected less than value_learning_rate = {peak}"),
            ))?;
        }
        refusals.end()
    }
}

impl RolloutLogConfig {
    fn check(&self) -> Result<()> {
        let interval = self.print_answers_interval;
        all([
            at_least_one(name_of!(self.print_answers_interval), interval),
            if !self.print_answers && interval != 1 {
                no_effect(name_of!(self.print_answers_interval), interval, "without print_answers = true")
            } else {
                Ok(())
            },
            match self.rollouts_limit {
                Some(limit) if !self.log_rollouts => {
                    no_effect(name_of!(self.rollouts_limit), limit, "without log_rollouts = true")
                }
                limit => limit.map_or(Ok(()), |limit| at_least_one(name_of!(self.rollouts_limit), limit)),
            },
        ])
    }
}

impl TestModeConfig {
    fn check(&self) -> Result<()> {
        match (self.enable_test_mode, self.test_stop_step) {
            (false, step @ 1..) => no_effect(name_of!(self.test_stop_step), step, "without enable_test_mode = true"),
            _ => Ok(()),
        }
    }
}

fn check_token_id(id: Option<i64>) -> Result<()> {
    id.map_or(Ok(()), |id| expect(id >= 0, "stop_token_id", id, "a token id, 0 or more"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rl::math::ScorePosition;
    use crate::settings::tests::{ppo, usage_of};
    use crate::settings::{EosInLoss, Optim, ReportTo, SftConfig, TensorboardTags};
    use rlhf_base::dist::ZeroStage;
    use rlhf_lm::generate::settings::StopToken;
    use rlhf_lm::model::LoraConfig;

    #[test]
    fn tags_of_trl_need_tensorboard_or_a_tracker() {
        let mut config = ppo();
        config.run.tracking.tensorboard_tags = TensorboardTags::Trl;
        assert!(usage_of(config.check()).contains("without report_to = tensorboard"));
        for to in [ReportTo::Tensorboard, ReportTo::Wandb, ReportTo::Command("cat".into())] {
            config.run.tracking.report_to = vec![to];
            config.check().unwrap();
        }
    }

    #[test]
    fn settings_of_several_steps_are_taken_wherever_an_update_has_several_and_refused_where_it_has_one() {
        type Change = fn(&mut PpoConfig);
        let changes: [(Change, &str); 4] = [
            (|c| c.loss.dual_clip = Some(3.0), "dual_clip = 3 has no effect with one optimizer step per update"),
            (|c| c.loss.ratio_threshold = Some(10.0), "ratio_threshold = 10 has no effect with one optimizer step"),
            (|c| c.loss.cliprange_high = Some(0.3), "cliprange_high = 0.3 has no effect with one optimizer step"),
            (|c| c.whiten_advantages = WhitenAdvantages::MiniBatch, "whiten_advantages = mini_batch is the same as"),
        ];
        for (change, message) in changes {
            // 16 responses per update by default, in one step; with 4 rows per step there are four steps.
            let mut config = PpoConfig::with_preset(Preset::DeepspeedChat, "actor", "critic", "d", "o");
            change(&mut config);
            assert!(usage_of(config.check()).starts_with(message), "{message}");
            config.per_device_train_batch_size = Some(4);
            config.check().unwrap();
        }
        let mut legacy = PpoConfig::with_preset(Preset::TrlLegacy, "policy", "judge", "d", "o");
        legacy.whiten_advantages = WhitenAdvantages::MiniBatch;
        assert!(usage_of(legacy.check()).starts_with("whiten_advantages = mini_batch is the same as batch"));
        legacy.legacy.mini_batch_size = Some(32);
        legacy.check().unwrap();
        (legacy.gradient_accumulation_steps, legacy.legacy.mini_batch_size) = (4, Some(32));
        legacy.check().unwrap();
    }

    #[test]
    fn settings_without_an_effect_or_against_each_other_are_refused_with_the_reason() {
        type Change = fn(&mut PpoConfig);
        let changes: [(Change, &str); 54] = [
            (
                |c| {
                    c.score_scaling.use_score_scaling = true;
                    c.eval.metric_for_best_model = Some("objective/scores".into());
                    c.run.checkpoints.save_steps = Some(1.into());
                },
                "metric_for_best_model = objective/scores with use_score_scaling = true: these scores move",
            ),
            (
                |c| c.rewards.reward_label_column = "gold".into(),
                "reward_label_column = gold has no effect without a reward that is a service",
            ),
            (
                |c| c.rewards.reward_batch_size = 9,
                "reward_batch_size = 9 has no effect without a reward that is a service",
            ),
            (
                |c| c.rewards.reward_concurrency = 9,
                "reward_concurrency = 9 has no effect without a reward that is a service",
            ),
            (
                |c| c.rewards.reward_timeout = 9.0,
                "reward_timeout = 9 has no effect without a reward that is a program or a service",
            ),
            (
                |c| (c.rewards.reward_retries, c.rewards.reward) = (9, vec!["json".into()]),
                "reward_retries = 9 has no effect without a reward that is a program or a service",
            ),
            (
                |c| c.penalty_reward_value = -2.0,
                "penalty_reward_value = -2 has no effect without non_eos_penalty = true",
            ),
            (
                |c| (c.non_eos_penalty, c.missing_eos_penalty) = (true, Some(1.0)),
                "missing_eos_penalty = 1, which is subtracted from the score, and non_eos_penalty, which replaces it, exclude",
            ),
            (
                |c| c.whiten_advantages = WhitenAdvantages::MiniBatch,
                "whiten_advantages = mini_batch is the same as batch",
            ),
            (|c| c.clip_reward_value = Some(0.0), "clip_reward_value = 0: expected a number above 0"),
            (|c| c.mask.min_response_length = 54, "min_response_length = 54: expected at most response_length = 53"),
            (
                |c| (c.score_position, c.mask.last_value_in_loss) = (ScorePosition::LastToken, false),
                "last_value_in_loss = false has no effect with score_position = last_token",
            ),
            (
                |c| (c.score_position, c.mask.eos_in_loss) = (ScorePosition::LastToken, EosInLoss::Never),
                "score_position = last_token and eos_in_loss = never exclude each other",
            ),
            (|c| c.unsupervised.unsup_coef = 1.0, "unsup_coef = 1 has no effect without unsupervised_dataset_name"),
            (
                |c| c.unsupervised.unsupervised_dataset_config_name = Some("x".into()),
                "unsupervised_dataset_config_name = x has no effect without unsupervised_dataset_name",
            ),
            (|c| c.ema.ema_beta = 0.9, "ema_beta = 0.9 has no effect without enable_ema = true"),
            (|c| (c.ema.enable_ema, c.ema.ema_beta) = (true, 1.0), "ema_beta = 1: expected a number from 0 to below 1"),
            (|c| c.rollout_log.rollouts_limit = Some(2), "rollouts_limit = 2 has no effect without log_rollouts"),
            (
                |c| c.rollout_log.print_answers_interval = 2,
                "print_answers_interval = 2 has no effect without print_answers",
            ),
            (|c| c.test_mode.test_stop_step = 3, "test_stop_step = 3 has no effect without enable_test_mode = true"),
            (|c| c.kl.target = 3.0, "target = 3 has no effect without adap_kl_ctrl = true"),
            (|c| c.kl.horizon = 3.0, "horizon = 3 has no effect without adap_kl_ctrl = true"),
            (|c| (c.kl.adap_kl_ctrl, c.kl.target) = (true, 0.0), "target = 0: expected a number above 0"),
            (
                |c| (c.kl.adap_kl_ctrl, c.kl.kl_coef_end) = (true, Some(0.1)),
                "adap_kl_ctrl = true and kl_coef_end = 0.1 exclude each other",
            ),
            (|c| (c.kl.adap_kl_ctrl, c.kl.kl_coef) = (true, 0.0), "adap_kl_ctrl = true has no effect with kl_coef = 0"),
            (|c| c.kl.kl_coef_end = Some(-1.0), "kl_coef_end = -1: expected a number of 0 or more"),
            (|c| (c.kl.kl_in_loss, c.kl.kl_coef) = (true, 0.0), "kl_in_loss = true has no effect with kl_coef = 0"),
            (
                |c| c.kl.kl_in_loss = true,
                "kl_in_loss = true with kl_estimator = k1: the gradient of k1 is 0 on average",
            ),
            (|c| c.loss.dual_clip = Some(1.0), "dual_clip = 1: expected a number above 1"),
            (|c| c.loss.ratio_threshold = Some(0.9), "ratio_threshold = 0.9: expected a number above 1"),
            (|c| c.loss.cliprange_high = Some(0.0), "cliprange_high = 0: expected a number above 0"),
            (|c| c.loss.entropy_coef = -0.1, "entropy_coef = -0.1: expected a number of 0 or more"),
            (|c| c.loss.entropy_target = 5.0, "entropy_target = 5 has no effect without use_adaptive_entropy = true"),
            (
                |c| (c.loss.use_adaptive_entropy, c.loss.entropy_coef_min) = (true, 2.0),
                "entropy_coef_min = 2: expected at most entropy_coef_max = 1",
            ),
            (
                |c| (c.num_ppo_epochs, c.num_mini_batches, c.loss.target_kl) = (1, 2, Some(0.1)),
                "target_kl = 0.1 has no effect with num_ppo_epochs = 1",
            ),
            (
                |c| (c.num_ppo_epochs, c.loss.ratio_threshold) = (1, Some(10.0)),
                "ratio_threshold = 10 has no effect with one optimizer step per update (num_ppo_epochs = 1",
            ),
            (
                |c| (c.vf_coef, c.value.value_warmup_updates) = (0.0, 1),
                "value_warmup_updates = 1 has no effect with vf_coef = 0: the value model is not trained",
            ),
            (|c| c.value.value_learning_rate = Some(-1.0), "value_learning_rate = -1: expected a number of 0 or more"),
            (|c| c.value.value_warmup_updates = 4, "value_warmup_updates = 4: expected less than the run's 4 updates"),
            (
                |c| (c.optimizer.warmup_steps, c.optimizer.warmup_ratio) = (2, 0.1),
                "warmup_steps = 2 and warmup_ratio = 0.1 exclude each other",
            ),
            (
                |c| (c.optimizer.lr_scheduler_type, c.optimizer.warmup_steps) = (LrSchedulerType::Constant, 2),
                "warmup_steps = 2 has no effect with lr_scheduler_type = constant; constant_with_warmup has",
            ),
            (|c| c.optimizer.power = 2.0, "power = 2 has no effect with lr_scheduler_type = linear; polynomial has it"),
            (|c| c.optimizer.lr_end = Some(1.0), "lr_end = 1: expected less than learning_rate = 0.000003"),
            (
                |c| c.optimizer.lr_scheduler_type = LrSchedulerType::WarmupStableDecay,
                "lr_scheduler_type = warmup_stable_decay needs num_decay_steps",
            ),
            (
                |c| c.optimizer.num_decay_steps = Some(5),
                "num_decay_steps = 5 has no effect with lr_scheduler_type = linear; warmup_stable_decay has it",
            ),
            (
                |c| c.optimizer.decay_type = crate::settings::DecayType::OneMinusSqrt,
                "decay_type = 1-sqrt has no effect with lr_scheduler_type = linear; warmup_stable_decay has it",
            ),
            (
                |c| c.optimizer.num_cycles = Some(2.0),
                "num_cycles = 2 has no effect with lr_scheduler_type = linear, which has no cosine",
            ),
            (
                |c| (c.optimizer.min_lr_rate, c.optimizer.lr_end) = (Some(0.1), Some(0.0)),
                "min_lr_rate = 0.1 and lr_end exclude each other: set one of them",
            ),
            (|c| c.optimizer.min_lr_rate = Some(1.0), "min_lr_rate = 1: expected a number from 0 to below 1"),
            (
                |c| (c.optimizer.lr_scheduler_type, c.optimizer.lr_end) = (LrSchedulerType::Constant, Some(0.0)),
                "lr_end = 0 has no effect with lr_scheduler_type = constant",
            ),
            (
                |c| (c.optimizer.optim, c.dist.critic_zero_stage) = (Optim::Adafactor, Some(ZeroStage::Stage2)),
                "optim = adafactor and zero_stage = 2 exclude each other: sharded states are those of adamw_torch",
            ),
            (
                |c| c.optimizer.optim = Optim::AdamwBf16,
                "optim = adamw_bf16 needs bf16 = true: its weights are held in the dtype that they are computed in",
            ),
            (
                |c| (c.optimizer.optim, c.run.bf16, c.peft.use_peft) = (Optim::AdamwBf16, true, true),
                "optim = adamw_bf16 has no effect with use_peft = true: adapters are held in float32; adamw_8bit",
            ),
            (
                |c| (c.value.value_learning_rate, c.optimizer.lr_end) = (Some(1e-7), Some(1e-6)),
                "lr_end = 0.000001: expected less than value_learning_rate = 0.0000001",
            ),
        ];
        for (change, message) in changes {
            let mut config = ppo();
            change(&mut config);
            let error = usage_of(config.plan(10));
            assert!(error.starts_with(message), "{error}\nis not {message}");
        }
    }

    #[test]
    fn all_that_is_wrong_is_refused_at_once_a_line_each() {
        let mut config = ppo();
        (config.gamma, config.kl.horizon, config.optimizer.power) = (2.0, 0.0, 3.0);
        (config.stop_token, config.stop_token_id) = (Some(StopToken::Eos), Some(-3));
        config.num_mini_batches = 3;
        let error = usage_of(config.check());
        let lines: Vec<&str> = error.lines().collect();
        let expected = [
            "gamma = 2: expected a number from 0 to 1",
            "horizon = 0: expected a number above 0",
            "stop_token = eos and stop_token_id = -3 exclude each other",
            "power = 3 has no effect with lr_scheduler_type = linear",
            "batch size = per_device_train_batch_size * gradient_accumulation_steps = 8 * 1 = 8 is not a multiple of",
        ];
        assert_eq!(lines.len(), expected.len(), "{error}");
        for (line, expected) in lines.iter().zip(expected) {
            assert!(line.starts_with(expected), "{line}\nis not {expected}");
        }
    }

    #[test]
    fn sizes_beyond_any_run_are_refused_by_name_with_the_most_there_may_be() {
        type Change = fn(&mut PpoConfig);
        let changes: [(Change, &str); 9] = [
            (|c| c.num_ppo_epochs = usize::MAX, "num_ppo_epochs = 18446744073709551615: expected at most 10000"),
            (|c| c.num_mini_batches = usize::MAX, "num_mini_batches = 18446744073709551615: expected at most 1048576"),
            (|c| c.total_episodes = Some(usize::MAX), "total_episodes = 18446744073709551615: expected at most"),
            (|c| c.response_length = usize::MAX, "response_length = 18446744073709551615: expected at most 1048576"),
            (
                |c| c.value.value_warmup_updates = usize::MAX,
                "value_warmup_updates = 18446744073709551615: expected at most 2147483647",
            ),
            (
                |c| c.generation.per_device_generation_batch_size = Some(usize::MAX),
                "per_device_generation_batch_size = 18446744073709551615: expected at most",
            ),
            (|c| c.num_train_epochs = 1e300, "num_train_epochs * prompts = 18446744073709551615: expected at most"),
            (|c| c.peft.lora_alpha = usize::MAX, "lora_alpha = 18446744073709551615: expected at most"),
            (|c| c.run.loss_scale.loss_scale_window = usize::MAX, "loss_scale_window = 18446744073709551615: expected"),
        ];
        for (change, message) in changes {
            let mut config = ppo();
            change(&mut config);
            let error = usage_of(config.plan(10));
            assert!(error.starts_with(message), "{error}\nis not {message}");
        }
        let mut sft = SftConfig::new("m", "d", "o");
        sft.num_train_epochs = 1e300;
        assert!(usage_of(sft.plan(10)).starts_with("num_train_epochs * rows / batch size = 18446744073709551615"));
        let mut config = ppo();
        (config.run.seed, config.stop_token_id) = (u64::MAX, Some(i64::MAX));
        config.check().unwrap();
    }

    #[test]
    fn two_stop_tokens_exclude_each_other() {
        let mut config = ppo();
        config.stop_token = Some(StopToken::Eos);
        config.stop_token_id = Some(50256);
        assert_eq!(
            usage_of(config.check()),
            "stop_token = eos and stop_token_id = 50256 exclude each other: set one of them"
        );
    }

    #[test]
    fn a_missing_eos_penalty_needs_no_stop_token() {
        let mut config = ppo();
        config.missing_eos_penalty = Some(1.0);
        config.check().unwrap(); // It then looks for the tokenizer's end-of-sequence token.
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        type Change = fn(&mut PpoConfig);
        let changes: [(Change, &str); 18] = [
            (|c| c.rewards.reward_batch_size = 0, "reward_batch_size = 0: expected at least 1"),
            (|c| c.rewards.reward_concurrency = 9999, "reward_concurrency = 9999: expected at most 1024"),
            (
                |c| c.rewards.reward_timeout = f64::NAN,
                "reward_timeout = NaN: expected a number of seconds above 0, at most a week",
            ),
            (|c| c.per_device_train_batch_size = Some(0), "per_device_train_batch_size = 0: expected at least 1"),
            (|c| c.gradient_accumulation_steps = 0, "gradient_accumulation_steps = 0: expected at least 1"),
            (|c| c.num_mini_batches = 0, "num_mini_batches = 0: expected at least 1"),
            (|c| c.response_length = 0, "response_length = 0: expected at least 1"),
            (|c| c.total_episodes = Some(0), "total_episodes = 0: expected at least 1"),
            (|c| c.num_train_epochs = f64::INFINITY, "num_train_epochs = inf: expected a number above 0"),
            (|c| c.temperature = 0.0, "temperature = 0: expected a number above 0"),
            (|c| c.gamma = 1.5, "gamma = 1.5: expected a number from 0 to 1"),
            (|c| c.lam = f64::NAN, "lam = NaN: expected a number from 0 to 1"),
            (|c| c.cliprange = 0.0, "cliprange = 0: expected a number above 0"),
            (|c| c.cliprange_value = -0.2, "cliprange_value = -0.2: expected a number above 0"),
            (|c| c.missing_eos_penalty = Some(-1.0), "missing_eos_penalty = -1: expected a number of 0 or more"),
            (|c| c.stop_token_id = Some(-1), "stop_token_id = -1: expected a token id, 0 or more"),
            (|c| c.learning_rate = f64::NAN, "learning_rate = NaN: expected a number of 0 or more"),
            (|c| c.optimizer.adam_beta2 = 1.0, "adam_beta2 = 1: expected a number from 0 to below 1"),
        ];
        for (change, message) in changes {
            let mut config = ppo();
            change(&mut config);
            assert_eq!(usage_of(config.plan(10)), message);
        }
    }

    #[test]
    fn settings_of_lora_without_use_peft_are_refused_and_with_it_checked() {
        type Change = fn(&mut PeftConfig);
        let changes: [(bool, Change, &str); 4] = [
            (false, |c| c.lora_r = 8, "settings of LoRA are given, and use_peft = false"),
            (true, |c| c.lora_r = 0, "lora_r = 0: expected at least 1"),
            (true, |c| c.lora_alpha = 0, "lora_alpha = 0: expected at least 1"),
            (true, |c| c.lora_dropout = 1.0, "lora_dropout = 1: expected a number from 0 to below 1"),
        ];
        for (use_peft, change, message) in changes {
            let mut config = ppo();
            config.peft.use_peft = use_peft;
            change(&mut config.peft);
            let error = usage_of(config.check());
            assert!(error.starts_with(message), "{error}");
        }
        assert_eq!(ppo().peft.lora(), None);
        let mut config = ppo();
        config.peft.use_peft = true;
        assert_eq!(config.peft.lora(), Some(LoraConfig::default()), "the library's defaults are the flags'");
    }

    #[test]
    fn a_best_model_needs_something_that_looks_for_it() {
        type Change = fn(&mut PpoConfig);
        let changes: [(Change, &str); 6] = [
            (|c| c.run.checkpoints.save_steps = Some(0.into()), "save_steps = 0: expected at least 1"),
            (|c| c.eval.eval_steps = Some(0.into()), "eval_steps = 0: expected at least 1"),
            (|c| c.eval.greater_is_better = Some(true), "greater_is_better = true needs metric_for_best_model"),
            (
                |c| c.eval.metric_for_best_model = Some("objective/kl".into()),
                "metric_for_best_model = objective/kl needs eval_steps or save_steps",
            ),
            (
                |c| {
                    c.eval.metric_for_best_model = Some("eval/score".into());
                    c.run.checkpoints.save_steps = Some(5.into());
                },
                "metric_for_best_model = eval/score needs eval_steps",
            ),
            (
                |c| {
                    c.eval.metric_for_best_model = Some("eval/scores".into());
                    c.eval.eval_steps = Some(5.into());
                },
                "metric_for_best_model = eval/scores: expected one of eval/score, eval/kl, eval/response_length, eval/scores/NAME",
            ),
        ];
        for (change, message) in changes {
            let mut config = ppo();
            change(&mut config);
            let error = usage_of(config.check());
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn threads_are_no_more_than_processors() {
        for threads in [0, 100_000] {
            let mut config = ppo();
            config.run.num_threads = Some(threads);
            let message = usage_of(config.check());
            assert!(message.starts_with(&format!("num_threads = {threads}: expected 1 to ")), "{message}");
        }
    }
}
