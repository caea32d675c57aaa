//! [`PpoConfig`] resolved into the settings of each part: below, nothing sees the whole configuration.

use super::{LogprobsOf, PpoConfig, StopToken, WhitenAdvantages};
use crate::Result;
use crate::generate::{GenerationConfig, StopStrings};
use crate::model::CausalLm;
use crate::optim::{LearningRates, learning_rate};
use crate::rl::advantage::Advantage;
use crate::rl::checks::CheckSettings;
use crate::rl::eos::left_out_of_losses;
use crate::rl::learner::{LearnerSettings, mini_batch_orders};
use crate::rl::loss::LossSettings;
use crate::rl::math::KlEstimator;
use crate::rl::rollout::RolloutSettings;
use crate::rl::shaping::Shaping;
use crate::rng::Purpose;
use crate::tokenizer::Tokenizer;

impl PpoConfig {
    /// How update `update`, counted from 0, samples its responses, which end with one of the tokens `stop`; stop strings come
    /// from a tokenizer ([`PpoConfig::stop_strings`]).
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

    /// The tokens that end a response; empty where none does.
    ///
    /// # Errors
    /// If that is eos, and the tokenizer has none.
    pub fn stop_tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<i64>> {
        match (self.stop_token, self.stop_token_id) {
            (Some(StopToken::Eos), _) => {
                tokenizer.require_eos()?;
                Ok(tokenizer.eos_ids().to_vec())
            }
            (None, id) => Ok(Vec::from_iter(id)),
        }
    }

    /// The texts that end a response, as `tokenizer` makes them of tokens.
    ///
    /// # Errors
    /// If one of them is empty.
    pub fn stop_strings(&self, tokenizer: &Tokenizer) -> Result<Option<StopStrings>> {
        let strings = &self.sampling.stop_strings;
        (!strings.is_empty()).then(|| StopStrings::new(tokenizer, strings.clone())).transpose()
    }

    /// End tokens of responses of `policy` that are in no loss, for [`RolloutSettings::left_out`].
    pub fn left_out(&self, policy: &CausalLm, tokenizer: &Tokenizer) -> Vec<i64> {
        left_out_of_losses(self.mask.eos_in_loss, tokenizer, policy.config())
    }

    /// How the models evaluate the responses of `policy`; [`PpoConfig::left_out`] is to be added.
    pub fn rollout(&self, policy: &CausalLm) -> RolloutSettings {
        let full_kl = self.kl.kl_estimator == KlEstimator::Full;
        let filtered_logprobs = self.sampling.logprobs_of == LogprobsOf::Filtered;
        let temperature = self.logprob_temperature();
        RolloutSettings {
            response_length: self.response_length,
            batch_size: self.local_rollout_forward_batch_size,
            temperature,
            filtered_logprobs,
            // Decoding records log-probabilities over the whole vocabulary, at the temperature of sampling, in one pass per token.
            recompute_logprobs: filtered_logprobs || !policy.is_exact() || temperature != self.temperature,
            score_position: self.score_position,
            last_value_in_loss: self.mask.last_value_in_loss,
            full_kl,
            store_distributions: full_kl && self.kl.kl_in_loss,
            left_out: Vec::new(),
        }
    }

    /// How the sanity checks evaluate responses of `policy`.
    pub fn checks(&self, policy: &CausalLm) -> CheckSettings {
        CheckSettings {
            rollout: RolloutSettings { recompute_logprobs: true, ..self.rollout(policy) },
            shaping: self.shaping(),
            kl_coef: self.kl.kl_coef,
            low_precision: self.run.is_low_precision(),
        }
    }

    /// How rewards and targets are made of an experience.
    pub fn shaping(&self) -> Shaping {
        Shaping {
            kl_estimator: self.kl.kl_estimator,
            kl_in_loss: self.kl.kl_in_loss,
            score_position: self.score_position,
            clip_reward_value: self.clip_reward_value,
            whiten_rewards: self.whiten_rewards,
            advantage: Advantage::Gae { gamma: self.gamma, lam: self.lam },
            whiten_advantages: self.whiten_advantages,
        }
    }

    /// Losses, optimizers and limits of a [`Learner`](crate::rl::learner::Learner).
    pub fn learner(&self) -> LearnerSettings {
        LearnerSettings {
            loss: LossSettings {
                clip: self.policy_clip(),
                cliprange_value: self.cliprange_value,
                vf_coef: self.vf_coef,
                entropy_coef: self.loss.entropy_coef,
                kl_in_loss: self.kl.kl_in_loss.then_some(self.kl.kl_estimator),
                temperature: self.logprob_temperature(),
            },
            whiten_mini_batches: self.whiten_advantages == WhitenAdvantages::MiniBatch,
            target_kl: self.target_kl(),
            ratio_threshold: self.loss.ratio_threshold,
            policy_optimizer: self.optimizer.clone(),
            value_optimizer: self.value_optimizer().1,
            gradient_checkpointing: self.run.gradient_checkpointing,
            max_tokens_per_micro_batch: self.run.max_tokens_per_micro_batch,
            loss_scale: self.run.fp16.then(|| self.run.loss_scale.clone()),
            align_overflow: self.half.align_overflow,
            ema_beta: self.ema.enable_ema.then_some(self.ema.ema_beta),
        }
    }

    /// The order of an update's `rows` rows in each of its epochs.
    pub fn mini_batch_orders(&self, update: usize, rows: usize) -> Vec<Vec<usize>> {
        mini_batch_orders(self.run.seed, self.num_ppo_epochs, update, rows)
    }

    /// Returns the learning rates of update `update` (from 0) of `num_updates`: the policy's schedule covers the updates in which
    /// it is trained.
    pub fn learning_rates(&self, update: usize, num_updates: usize) -> LearningRates {
        let frozen = self.value.value_warmup_updates;
        let of_policy =
            |update| learning_rate(self.learning_rate, &self.optimizer, update, num_updates.saturating_sub(frozen));
        let (peak, optimizer) = self.value_optimizer();
        LearningRates {
            policy: update.checked_sub(frozen).map(of_policy),
            value: learning_rate(peak, &optimizer, update, num_updates),
        }
    }
}
