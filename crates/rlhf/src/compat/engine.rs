//! DeepSpeed-Chat's engine: four models, experience from prompts, and a training step from experience, for the caller's loop.
//!
//! This module converts DeepSpeed-Chat's padded tensors and calls [`crate::rl`]. B rows, prompts of P tokens padded on the left,
//! responses of at most A tokens, L = P + A. Column t of `[B, L - 1]` belongs to token t + 1, so a response starts in column P - 1.
//! `docs/migrate/deepspeed-chat-settings.md` lists the differences from DeepSpeed-Chat.

mod state;

use crate::data::{Cursor, Prompt};
use crate::reward::{Rewards, ScoreUse};
use crate::rl::ema::EMA;
use crate::rl::experience::{Experience, Masks};
use crate::rl::kept::KeptResponses;
use crate::rl::learner::Learner;
use crate::rl::math;
use crate::rl::math::{KlEstimator, ScorePosition};
use crate::rl::rollout::{RolloutSettings, experience};
use crate::rl::shaping::targets;
use crate::rl::stats::StepStats;
use crate::run::start::Found;
use crate::settings::{LogprobsOf, PpoConfig, PpoRun};
use crate::train::ppo::{Loaded, Models, PpoParts, VALUE_MODEL};
use rlhf_base::dist::World;
use rlhf_base::name_of;
use rlhf_base::weights::replace_files;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::{GenerationConfig, Response, generate_on};
use rlhf_lm::model::{CausalLm, Param, SequenceClassifier};
use rlhf_lm::optim::LearningRates;
use rlhf_lm::tokenizer::Tokenizer;
use serde_json::json;
use std::ops::Range;
use std::path::Path;
use tch::{Kind, Tensor};

/// Rewards per column, `[B, L - 1]` f32: `-kl_coef * kl` in each column, plus each row's score, clipped to `clip_reward_value`, at the
/// first action that is masked out, or at the last action where none is.
///
/// `prompts` `[B, P]`; `log_probs`, `ref_log_probs` `[B, L - 1]`; `reward_score` `[B]`; `action_mask` `[B, L - 1]`, 1 = counts.
///
/// # Panics
/// If the shapes differ from these.
pub fn compute_rewards(
    prompts: &Tensor,
    log_probs: &Tensor,
    ref_log_probs: &Tensor,
    reward_score: &Tensor,
    action_mask: &Tensor,
    config: &PpoConfig,
) -> Tensor {
    let start = prompts.size()[1] - 1;
    let kl = math::kl(log_probs, ref_log_probs, &log_probs.ones_like().to_kind(Kind::Bool), config.kl.kl_estimator);
    let most = config.clip_reward_value.unwrap_or(f64::INFINITY);
    let scores = reward_score.to_kind(Kind::Float).clamp(-most, most);
    let before = kl.narrow(1, 0, start);
    let response = response_columns(&kl, start);
    let counted = counted(action_mask, start);
    let rewards = math::rewards(&response, &scores, &counted, config.kl.kl_coef, ScorePosition::AfterStop);
    Tensor::cat(&[-config.kl.kl_coef * before, rewards], 1)
}

/// The column after each row's score, `[B]` i64; from there on rewards and values are masked. `prompts` `[B, P]`; `action_mask`
/// `[B, L - 1]`.
///
/// # Panics
/// If the shapes differ from these.
pub fn ends(prompts: &Tensor, action_mask: &Tensor) -> Tensor {
    let start = prompts.size()[1] - 1;
    Tensor::from_slice(&counted(action_mask, start)).to_device(action_mask.device()) + (start + 1)
}

/// Advantages, not whitened, and returns, `[B, A]` f32 each, of `values` and `rewards` `[B, L - 1]` from column `start` on.
///
/// # Panics
/// If the shapes differ from these, or `start` is out of range.
pub fn get_advantages_and_returns(
    values: &Tensor,
    rewards: &Tensor,
    start: i64,
    config: &PpoConfig,
) -> (Tensor, Tensor) {
    let (values, rewards) = (response_columns(values, start), response_columns(rewards, start));
    math::gae(&rewards, &values, &values.ones_like().to_kind(Kind::Bool), config.gamma, config.lam)
}

/// The clipped loss of the actor, a scalar: its mean over `mask`. All tensors are `[B, A]`; `logprobs` carries the gradient.
///
/// # Panics
/// If the shapes differ from these.
pub fn actor_loss_fn(
    logprobs: &Tensor,
    old_logprobs: &Tensor,
    advantages: &Tensor,
    mask: &Tensor,
    config: &PpoConfig,
) -> Tensor {
    let mask = mask.to_kind(Kind::Bool);
    math::policy_loss(logprobs, old_logprobs, advantages, &mask, config.policy_clip()).sum / count(&mask)
}

/// The clipped loss of the critic, a scalar: its mean over `mask`. All tensors are `[B, A]`; `values` carries the gradient.
///
/// # Panics
/// If the shapes differ from these.
pub fn critic_loss_fn(
    values: &Tensor,
    old_values: &Tensor,
    returns: &Tensor,
    mask: &Tensor,
    config: &PpoConfig,
) -> Tensor {
    let mask = mask.to_kind(Kind::Bool);
    math::value_loss(values, old_values, returns, &mask, config.cliprange_value).sum / count(&mask)
}

fn count(mask: &Tensor) -> Tensor {
    mask.sum(Kind::Float).clamp_min(1.0)
}

/// The columns from `start` on.
fn response_columns(x: &Tensor, start: i64) -> Tensor {
    x.narrow(1, start, x.size()[1] - start)
}

/// Number of response tokens of each row that count.
fn counted(action_mask: &Tensor, start: i64) -> Vec<i64> {
    let sums = response_columns(action_mask, start).sum_dim_intlist([1i64].as_slice(), false, Kind::Int64);
    Vec::try_from(sums).expect("a sum per row")
}

/// A batch of responses, evaluated by the four models.
#[derive(Debug)]
pub struct RlhfExperience {
    /// The prompts, padded on the left, `[B, P]` i64.
    pub prompts: Tensor,
    /// Log-probabilities under the actor that sampled, `[B, L - 1]` f32; 0 outside the response.
    pub logprobs: Tensor,
    /// Log-probabilities under the reference model.
    pub ref_logprobs: Tensor,
    /// Values of the states before each token, and after the last that counts, `[B, L - 1]` f32; 0 elsewhere.
    pub value: Tensor,
    /// Score of each response, `[B]` f32, not clipped.
    pub rewards: Tensor,
    /// Prompts and responses, padded on both sides, `[B, L]` i64.
    pub input_ids: Tensor,
    /// 1 at the tokens that count, `[B, L]` i64: not at padding, and not at an eos that is left out of the losses.
    pub attention_mask: Tensor,
}

/// A batch that can be divided into smaller ones.
pub trait Batch: Sized {
    /// Number of rows.
    fn rows(&self) -> usize;
    /// A range of rows.
    ///
    /// # Panics
    /// If it is out of range.
    fn slice(&self, rows: Range<usize>) -> Self;
}

impl Batch for RlhfExperience {
    fn rows(&self) -> usize {
        self.input_ids.size()[0] as usize
    }

    fn slice(&self, rows: Range<usize>) -> Self {
        let slice = |x: &Tensor| x.narrow(0, rows.start as i64, rows.len() as i64);
        Self {
            prompts: slice(&self.prompts),
            logprobs: slice(&self.logprobs),
            ref_logprobs: slice(&self.ref_logprobs),
            value: slice(&self.value),
            rewards: slice(&self.rewards),
            input_ids: slice(&self.input_ids),
            attention_mask: slice(&self.attention_mask),
        }
    }
}

impl Batch for Vec<Vec<i64>> {
    fn rows(&self) -> usize {
        self.len()
    }

    fn slice(&self, rows: Range<usize>) -> Self {
        self[rows].to_vec()
    }
}

/// Collects batches until there are enough to train on, then divides them into smaller ones, in order.
#[derive(Debug)]
pub struct MiniDataset<T> {
    batches: Vec<T>,
    max_size: usize,
    small_batch_size: usize,
}

impl<T: Batch> MiniDataset<T> {
    /// Collects `max_size` batches (DeepSpeed-Chat's `generation_batches`) and returns them in batches of `small_batch_size` rows.
    pub fn new(max_size: usize, small_batch_size: usize) -> Self {
        Self { batches: Vec::new(), max_size: max_size.max(1), small_batch_size: small_batch_size.max(1) }
    }

    /// Adds a batch. When there are enough, returns all collected batches, divided, and is then empty.
    pub fn add(&mut self, batch: T) -> Option<Vec<T>> {
        self.batches.push(batch);
        (self.batches.len() >= self.max_size).then(|| {
            let batches = std::mem::take(&mut self.batches);
            let cut = |batch: &T| -> Vec<T> {
                let starts = (0..batch.rows()).step_by(self.small_batch_size);
                starts.map(|at| batch.slice(at..(at + self.small_batch_size).min(batch.rows()))).collect()
            };
            batches.iter().flat_map(cut).collect()
        })
    }

    /// Drops the collected batches.
    pub fn free(&mut self) {
        self.batches.clear();
    }
}

/// The four models of RLHF, with the optimizers of actor and critic.
#[derive(Debug)]
pub struct RlhfEngine {
    /// The settings of each part.
    run: PpoRun,
    /// Actor and critic with their optimizers, and the actor's moving average, if enabled.
    pub learner: Learner,
    /// The reference model.
    pub reference: CausalLm,
    /// The rewards.
    pub reward: Rewards,
    /// Tokenizer of all models.
    pub tokenizer: Tokenizer,
    /// Each [`RlhfEngine::train_rlhf`] is followed by a [`RlhfEngine::train_unsupervised`], which takes the optimizer step for both;
    /// initially true where `unsupervised_dataset_name` is set.
    pub mixes_texts: bool,
    /// Number of steps of the run, for learning rate schedules that fall; a constant rate needs none.
    pub num_total_iters: Option<usize>,
    responses: Generated,
    steps: Steps,
    data: Data,
}

/// The responses of a [`RlhfEngine`], and which of them are trained on.
#[derive(Debug)]
struct Generated {
    /// End tokens of responses that are in no loss.
    left_out: Vec<i64>,
    kept: KeptResponses,
    /// Prompts of the last responses that were long enough, with their mask.
    last: Option<(Tensor, Tensor)>,
    /// Number of generated batches, which keys the random draws.
    generated: usize,
}

/// The optimizer steps of a [`RlhfEngine`].
#[derive(Debug, Default)]
struct Steps {
    /// Steps taken.
    iterations: usize,
    /// Whether f16 gradients of actor and critic overflowed in the last step.
    overflow: (bool, bool),
    /// Sums of a `train_rlhf` that waits for [`RlhfEngine::train_unsupervised`] to take the step.
    waiting: Option<StepStats>,
}

/// The prompts of a [`RlhfEngine`] that reads them itself.
#[derive(Debug, Default)]
struct Data {
    prompts: Vec<Prompt>,
    cursor: Option<Cursor>,
}

impl RlhfEngine {
    /// Loads the models and prompts that `config` names, as `rlhf ppo` does.
    ///
    /// # Errors
    /// The errors of [`PpoTrainer::from_config`](crate::train::ppo::PpoTrainer::from_config); if a setting has no effect here.
    pub fn from_config(config: &PpoConfig) -> Result<Self> {
        Self::from_config_with(config, Rewards::new())
    }

    /// [`RlhfEngine::from_config`] with the rewards `more` in addition to those that `config` names, which may then name none.
    ///
    /// # Errors
    /// The errors of [`RlhfEngine::from_config`].
    pub fn from_config_with(config: &PpoConfig, more: Rewards) -> Result<Self> {
        let run = PpoRun::new(config)?;
        let world = World::of_process();
        let Loaded { mut parts, cursor, .. } = Loaded::of_run(&run, more, Found::default(), &world)?;
        parts.prepare(&run)?;
        let PpoParts { learner, reference, rewards, tokenizer, prompts, .. } = parts;
        let plan = config.plan_for(prompts.len())?;
        let mut engine = Self::with_learner(learner, needed(reference)?, rewards, tokenizer, run)?;
        let steps = config.num_ppo_epochs * plan.steps_per_epoch();
        (engine.data.prompts, engine.data.cursor) = (prompts, Some(cursor));
        engine.num_total_iters = Some(plan.num_total_batches * steps);
        Ok(engine)
    }

    /// Loads the models that `config` names, without prompts: the caller has them, and `dataset_name` is not read. The rewards are `more`
    /// in addition to those that `config` names, which may then name none.
    ///
    /// # Errors
    /// If a model cannot be loaded; if a setting has no effect here.
    pub fn from_models(config: &PpoConfig, more: Rewards) -> Result<Self> {
        let run = PpoRun::new(config)?;
        let world = World::of_process();
        let Models { learner, reference, rewards, tokenizer, .. } = Models::of_run(&run, more, &world)?;
        Self::with_learner(learner, needed(reference)?, rewards, tokenizer, run)
    }

    /// Creates an engine from loaded models, without prompts.
    ///
    /// # Errors
    /// If a setting is set that the engine does not use, or there is not enough disk space for the offloaded parts.
    pub fn new(
        actor: CausalLm,
        reference: CausalLm,
        critic: SequenceClassifier,
        reward: Rewards,
        tokenizer: Tokenizer,
        config: &PpoConfig,
    ) -> Result<Self> {
        let run = PpoRun::new(config)?;
        let place = config.run.state_place();
        let learner = Learner::with_state_at(actor, critic, run.learner.clone(), place.as_ref())?;
        Self::with_learner(learner, reference, reward, tokenizer, run)
    }

    fn with_learner(
        learner: Learner,
        mut reference: CausalLm,
        reward: Rewards,
        tokenizer: Tokenizer,
        run: PpoRun,
    ) -> Result<Self> {
        let config = &run.config;
        let meaningless = [
            (name_of!(config.kl.adap_kl_ctrl), config.kl.adap_kl_ctrl),
            (name_of!(config.kl.kl_coef_end), config.kl.kl_coef_end.is_some()),
            (name_of!(config.kl.kl_in_loss), config.kl.kl_in_loss),
            ("kl_estimator = full", config.kl.kl_estimator == KlEstimator::Full),
            (name_of!(config.whiten_rewards), config.whiten_rewards),
            ("score_position = last_token", config.score_position == ScorePosition::LastToken),
            (name_of!(config.train_batch_size), config.train_batch_size.is_some()),
            (name_of!(config.loss.target_kl), config.loss.target_kl.is_some()),
            (name_of!(config.loss.ratio_threshold), config.loss.ratio_threshold.is_some()),
            (name_of!(config.legacy.early_stopping), config.legacy.early_stopping),
            (name_of!(config.missing_eos_penalty), config.missing_eos_penalty.is_some()),
            ("logprobs_of = filtered", config.sampling.logprobs_of == LogprobsOf::Filtered),
            (name_of!(config.non_eos_penalty), config.non_eos_penalty),
            (name_of!(config.score_scaling.use_score_scaling), config.score_scaling.use_score_scaling),
            (name_of!(config.score_scaling.score_clip), config.score_scaling.score_clip.is_some()),
            ("advantage_estimator", !run.needs_critic),
            (name_of!(config.advantage.num_generations), config.advantage.num_generations != 1),
            (name_of!(config.groups.dynamic_sampling), config.groups.dynamic_sampling),
            (
                name_of!(config.groups.dynamic_filtering_reward_range),
                !config.groups.dynamic_filtering_reward_range.is_empty(),
            ),
            (name_of!(config.groups.overlong_buffer_len), config.groups.overlong_buffer_len.is_some()),
            (name_of!(config.reward_clip_range), !config.reward_clip_range.is_empty()),
            (name_of!(config.mask.mask_truncated_completions), config.mask.mask_truncated_completions),
            (name_of!(config.sync.sync_ref_model), config.sync.sync_ref_model),
        ];
        if let Some((name, _)) = meaningless.iter().find(|(_, set)| *set) {
            return Err(Error::Usage(format!(
                "{name} has no meaning in RlhfEngine, whose loop is the caller's: leave it out"
            )));
        }
        if config.gradient_accumulation_steps != 1 {
            return Err(Error::refused(
                name_of!(config.gradient_accumulation_steps),
                format!(
                    " = {}: RlhfEngine takes a step at each train_rlhf; give it larger batches, and leave this 1",
                    config.gradient_accumulation_steps
                ),
            ));
        }
        let left_out = config.left_out(&learner.policy, &tokenizer);
        reference.hold_as_computed();
        if let Some(place) = config.run.models_place() {
            reference.offload(&place, "reference model")?;
            reward.offload(&place)?;
        }
        let mut reward = reward;
        reward.set_world(&learner.world);
        Ok(Self {
            learner,
            reference,
            reward,
            mixes_texts: config.unsupervised.unsupervised_dataset_name.is_some(),
            num_total_iters: None,
            responses: Generated {
                left_out,
                kept: KeptResponses::new(config.mask.min_response_length),
                last: None,
                generated: 0,
            },
            steps: Steps::default(),
            data: Data::default(),
            tokenizer,
            run,
        })
    }

    /// The settings: `PpoConfig::with_preset(Preset::DeepspeedChat, ..)`, with any changes.
    pub fn config(&self) -> &PpoConfig {
        &self.run.config
    }

    /// Replaces the settings of the next calls. The settings of models and optimizers stay as they were when the engine was made.
    ///
    /// # Errors
    /// If a setting is out of its range: the earlier settings stay.
    pub fn set_config(&mut self, config: &PpoConfig) -> Result<()> {
        self.run = PpoRun::new(config)?;
        Ok(())
    }

    /// The actor.
    pub fn actor(&self) -> &CausalLm {
        &self.learner.policy
    }

    /// Returns the next prompts of all ranks, `per_device_generation_batch_size` for each, `[B, P]` i64 padded on the left, and their mask,
    /// 1 at tokens; `None` if the engine has no data. The data are reshuffled in each pass.
    pub fn next_prompts(&mut self) -> Option<(Tensor, Tensor)> {
        let config = &self.run.config;
        let rows_per_rank = config.generation.per_device_generation_batch_size.unwrap_or(config.rows_per_pass());
        let rows = self.data.cursor.as_mut()?.take(rows_per_rank * self.learner.world.size());
        let prompts: Vec<&[i64]> = rows.iter().map(|&row| self.data.prompts[row].tokens.as_slice()).collect();
        Some(padded_left(&prompts, self.pad()))
    }

    /// Returns the next `rows` blocks of the texts in `unsupervised_dataset_name`; `None` if it is not set.
    pub fn next_texts(&mut self, rows: usize) -> Option<Vec<Vec<i64>>> {
        let texts = self.learner.unsupervised.as_mut()?;
        Some(texts.take(rows).into_iter().map(<[i64]>::to_vec).collect())
    }

    /// Samples responses to prompts `[B, P]`, whose `mask` `[B, P]` is 1 at tokens, and evaluates them with the four models.
    ///
    /// Responses of fewer than `min_response_length` tokens are dropped; where all are, the last prompts and responses that were
    /// long enough are evaluated again.
    ///
    /// # Errors
    /// If no response is long enough and none ever was; if a reward fails; if a prompt does not fit the models.
    pub fn generate_experience(&mut self, prompts: &Tensor, mask: &Tensor) -> Result<RlhfExperience> {
        let config = &self.run.config;
        let stop_strings = config.stop_strings(&self.tokenizer)?;
        let stop_token_ids = config.stop_tokens(&self.tokenizer)?;
        let step = self.responses.generated as u64;
        let generation = GenerationConfig { stop_token_ids, stop_strings, step, ..self.run.generation.clone() };
        let prompt_ids = unpadded(prompts, mask)?;
        let gathered = self.learner.gathered_policy(config.dist.ds3_gather_for_generation)?;
        let responses = generate_on(&self.learner.world, &self.learner.policy, &prompt_ids, &generation)?;
        drop(gathered);
        self.responses.generated += 1;
        self.experience_of(prompts, mask, responses)
    }

    /// [`RlhfEngine::generate_experience`] with the caller's responses, one per prompt; log-probabilities are computed where a
    /// response does not have one per token.
    ///
    /// # Errors
    /// The same, and if there are not as many responses as prompts.
    pub fn experience_of(
        &mut self,
        prompts: &Tensor,
        mask: &Tensor,
        responses: Vec<Response>,
    ) -> Result<RlhfExperience> {
        let (rows, width) = prompts.size2()?;
        let ids: Vec<&[i64]> = responses.iter().map(|response| response.tokens.as_slice()).collect();
        let prompt_ids = Vec::<i64>::try_from(prompts.reshape([-1]))?;
        self.learner.world.check_same("experience: prompts and responses", &(prompt_ids, ids))?;
        if responses.len() as i64 != rows {
            return Err(Error::Run(format!(
                "experience: expected a response for each of {rows} prompts, found {} responses",
                responses.len()
            )));
        }
        if mask.size() != [rows, width] {
            return Err(Error::Run(format!(
                "experience: mask: expected shape {:?}, found {:?}",
                [rows, width],
                mask.size()
            )));
        }
        let kept = self.responses.kept.keep((0..responses.len()).collect(), responses, &self.responses.left_out)?;
        if !kept.reused {
            self.responses.last = Some((prompts.shallow_clone(), mask.shallow_clone()));
        }
        let Some((prompts, mask)) = &self.responses.last else { unreachable!("reused responses have stored prompts") };
        let rows = Tensor::from_slice(&kept.rows.iter().map(|&row| row as i64).collect::<Vec<_>>());
        let prompts = prompts.index_select(0, &rows);
        let mask = mask.index_select(0, &rows);
        let ragged = unpadded(&prompts, &mask)?;
        let responses = kept.responses;
        let has_logprobs = responses.iter().all(|response| response.logprobs.len() == response.tokens.len());

        let scores = self.scores(&ragged, &responses)?;
        let learner = &self.learner;
        let settings = self.run.rollout(&learner.policy);
        let recompute_logprobs = kept.reused || !has_logprobs || settings.recompute_logprobs;
        let compares_sampling = settings.compares_sampling && !kept.reused;
        let left_out = self.responses.left_out.clone();
        let settings = RolloutSettings { recompute_logprobs, compares_sampling, left_out, ..settings };
        let models = learner.rollout_models(&self.reference);
        let e = experience(models, &ragged, &responses, scores, &settings)?;

        let width = prompts.size()[1];
        let longest = e.lengths().into_iter().max().unwrap_or(0).max(1);
        let columns = |x: &Tensor| {
            let response = x.narrow(1, 0, longest);
            response.constant_pad_nd([width - 1, 0])
        };
        let pad = self.pad();
        let padded = responses.iter().flat_map(|response| {
            let padding = std::iter::repeat_n(pad, longest as usize - response.tokens.len());
            response.tokens.iter().copied().chain(padding)
        });
        let padded = Tensor::from_slice(&padded.collect::<Vec<_>>()).view([-1, longest]);
        let counts = e.masks.loss.narrow(1, 0, longest).to_device(mask.device()).to_kind(Kind::Int64);
        Ok(RlhfExperience {
            input_ids: Tensor::cat(&[&prompts, &padded], 1),
            attention_mask: Tensor::cat(&[mask.to_kind(Kind::Int64), counts], 1),
            logprobs: columns(&e.logprobs),
            ref_logprobs: columns(e.ref_logprobs.as_ref().unwrap_or(&e.logprobs)),
            value: columns(&e.values),
            rewards: e.scores,
            prompts,
        })
    }

    /// Scores of the responses; a last end token that is left out of the losses is not scored.
    fn scores(&mut self, prompts: &[Vec<i64>], responses: &[Response]) -> Result<Tensor> {
        let read: Vec<Response> = responses
            .iter()
            .map(|response| {
                let mut read = response.clone();
                read.tokens.truncate(
                    read.tokens.len()
                        - usize::from(read.tokens.last().is_some_and(|id| self.responses.left_out.contains(id))),
                );
                read
            })
            .collect();
        let asked = prompts.iter().map(|tokens| {
            let text = self.tokenizer.decode(tokens)?;
            Ok(Prompt { tokens: tokens.clone(), row: json!({"prompt": text}), text })
        });
        let asked: Vec<Prompt> = asked.collect::<Result<_>>()?;
        let asked: Vec<&Prompt> = asked.iter().collect();
        let scored = self.reward.score_responses(&self.tokenizer, &asked, &read, ScoreUse::Training)?;
        let totals: Vec<f32> = scored.totals().into_iter().map(|score| score as f32).collect();
        Ok(Tensor::from_slice(&totals).to_device(self.learner.policy.device()))
    }

    /// Takes one optimizer step of actor and critic on a batch of experience; returns their losses, means over the tokens that
    /// count.
    ///
    /// With [`RlhfEngine::mixes_texts`], [`RlhfEngine::train_unsupervised`] takes the step. A step whose losses or gradients are not
    /// finite is skipped.
    ///
    /// # Errors
    /// If shapes do not match, or the tokens of a response are not contiguous; if [`RlhfEngine::train_unsupervised`] was not called
    /// after the last `train_rlhf`; if a schedule needs [`RlhfEngine::num_total_iters`], or all of these steps are taken.
    pub fn train_rlhf(&mut self, experience: &RlhfExperience) -> Result<(f64, f64)> {
        if self.steps.waiting.is_some() {
            let message =
                "train_rlhf: with mixes_texts the last one waits for its train_unsupervised, found none between";
            return Err(Error::Usage(message.into()));
        }
        self.rates()?;
        let e = self.ragged(experience)?;
        self.learner.set_update(self.run.learner.update.clone());
        let targets = targets(&e, self.run.config.kl.kl_coef, &self.run.shaping);
        let rows: Vec<usize> = (0..experience.rows()).collect();
        let stats = self.learner.gradients(&e, &targets, &rows, self.run.config.rows_per_pass(), true);
        let stats = stats.inspect_err(|_| self.learner.zero_grad())?;
        let losses = (stats.policy_loss / stats.tokens, stats.value_loss / stats.value_slots);
        if self.mixes_texts {
            self.steps.waiting = Some(stats);
        } else {
            self.step(stats)?;
        }
        Ok(losses)
    }

    /// Accumulates `unsup_coef` times the gradient of the mean negative log-likelihood of `batch` on top of the gradients of
    /// [`RlhfEngine::train_rlhf`], and takes the step for both; returns that mean.
    ///
    /// # Errors
    /// If no `train_rlhf` preceded it, or [`RlhfEngine::mixes_texts`] is not set; if a text does not fit the actor: then the gradients of
    /// `train_rlhf` are cleared too, and it is called again.
    pub fn train_unsupervised<S: AsRef<[i64]>>(&mut self, batch: &[S], unsup_coef: f64) -> Result<f64> {
        let stats = self.steps.waiting.take().ok_or_else(|| {
            let message =
                "train_unsupervised takes the step of the train_rlhf before it, and none waits: set mixes_texts";
            Error::Usage(message.into())
        })?;
        // Without this, the gradients of some of the texts would remain for the next step.
        let loss = self.learner.learn_texts(batch, unsup_coef).inspect_err(|_| self.learner.zero_grad())?;
        self.step(StepStats { unsup_loss: loss, ..stats })?;
        Ok(loss)
    }

    /// Converts a padded batch to the ragged rows that the learner takes.
    fn ragged(&self, e: &RlhfExperience) -> Result<Experience> {
        check_shapes(e)?;
        let (_, len) = e.input_ids.size2()?;
        let (_, width) = e.prompts.size2()?;
        let start = width - 1;
        let action_mask = e.attention_mask.narrow(1, 1, len - 1);
        let counted = counted(&action_mask, start);
        let device = e.logprobs.device();
        let response = math::response_mask(&counted, len - width, device);
        if response != response_columns(&action_mask, start).to_kind(Kind::Bool).to_device(device) {
            let message = "experience: attention_mask: expected the tokens of a response side by side, found masked ones between them";
            return Err(Error::Run(message.into()));
        }
        let value = math::value_mask(&counted, len - width, ScorePosition::AfterStop, device);
        let response_part = |x: &Tensor, mask: &Tensor| math::keep(&response_columns(x, start), mask);
        let sequences = unpadded(&e.input_ids, &e.attention_mask)?;
        let split = |(tokens, &counted): (Vec<i64>, &i64)| {
            let (prompt, response) = tokens.split_at(tokens.len() - counted as usize);
            (prompt.to_vec(), response.to_vec())
        };
        let (prompts, responses): (Vec<_>, Vec<_>) = sequences.into_iter().zip(&counted).map(split).unzip();
        let value_loss = if self.run.rollout.settings.last_value_in_loss { &value } else { &response }.shallow_clone();
        Ok(Experience {
            groups: (0..prompts.len()).collect(),
            prompts,
            responses,
            value_counts: counted.iter().map(|&n| (n + 1).min(len - width)).collect(),
            logprobs: response_part(&e.logprobs, &value),
            sampling_logprobs: None,
            ref_logprobs: Some(response_part(&e.ref_logprobs, &value)),
            values: response_part(&e.value, &value),
            // The slot after the tokens that count may hold an eos that is in no loss, whose KL is part of the rewards; otherwise
            // both log-probabilities are 0 there.
            sampled: counted.clone(),
            masks: Masks { response: value.shallow_clone(), loss: response, value, value_loss, inserted: None },
            full_kl: None,
            reference: None,
            scores: e.rewards.shallow_clone(),
            unscored: Vec::new(),
            rewards: None,
            baselines: None,
            token_scores: None,
            sets: None,
            counted,
        })
    }

    /// The learning rates of the next step.
    fn rates(&self) -> Result<LearningRates> {
        let schedule = &self.run.schedule;
        let schedules = [&schedule.policy.1, &schedule.value.1];
        let falls = schedules.iter().find(|schedule| schedule.lr_scheduler_type.falls());
        let message = match (self.num_total_iters, falls) {
            (None, Some(schedule)) => format!(
                "lr_scheduler_type = {}: expected the steps of the run in num_total_iters, found none; `constant` needs none",
                schedule.lr_scheduler_type.name()
            ),
            (None, None) if schedules.iter().any(|schedule| schedule.warmup_ratio > 0.0) => {
                "warmup_ratio: expected the steps of the run in num_total_iters, found none; warmup_steps needs none"
                    .into()
            }
            (Some(total), Some(_)) if self.steps.iterations >= total => {
                format!(
                    "num_total_iters = {total} steps are taken, and the learning rate is at its end: raise it for more"
                )
            }
            (total, _) => return Ok(schedule.rates(self.steps.iterations, total.unwrap_or(1))),
        };
        Err(Error::Usage(message))
    }

    fn step(&mut self, mut stats: StepStats) -> Result<()> {
        let rates = self.rates()?;
        self.learner.step(rates, &mut stats)?;
        self.steps.overflow = (stats.policy_overflowed, stats.value_overflowed);
        self.steps.iterations += 1;
        Ok(())
    }

    /// Whether f16 gradients of the actor and of the critic overflowed in the last step, which was then skipped; false in other dtypes.
    pub fn overflow(&self) -> (bool, bool) {
        self.steps.overflow
    }

    /// Steps taken.
    pub fn steps_done(&self) -> usize {
        self.steps.iterations
    }

    /// Sum of the norms of each model's parameters, by the names `actor`, `ref`, `critic` and `reward`; several reward models are summed.
    pub fn model_norms(&self) -> [(&'static str, f64); 4] {
        let sum = |params: &[Param]| params.iter().map(|param| norm(&param.tensor)).sum::<f64>();
        let critic = self.learner.value.model().map_or(0.0, |critic| sum(critic.params()));
        let reward = self.reward.models().map(|model| sum(model.classifier().params())).sum();
        let actor = sum(self.learner.policy.params());
        let reference = sum(self.reference.params());
        [("actor", actor), ("ref", reference), ("critic", critic), (name_of!(self.reward), reward)]
    }

    /// Prompts and responses as text.
    ///
    /// # Errors
    /// If a token cannot be decoded.
    pub fn responses(&self, experience: &RlhfExperience) -> Result<Vec<(String, String)>> {
        let ids = &experience.input_ids;
        let width = experience.prompts.size()[1];
        let all = unpadded(ids, &experience.attention_mask)?;
        let prompt_mask = experience.attention_mask.narrow(1, 0, width);
        let prompts = unpadded(&experience.prompts, &prompt_mask)?;
        let texts = all.iter().zip(&prompts).map(|(all, prompt)| {
            Ok((self.tokenizer.decode(prompt)?, self.tokenizer.decode_after(prompt, &all[prompt.len()..])?))
        });
        texts.collect()
    }

    /// Writes the actor with its tokenizer to `dir`, the critic to `dir/value_model`, and the moving average, if there is one, to
    /// `dir/ema`, as `rlhf ppo` does.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_model(&self, dir: &Path) -> Result<()> {
        self.learner.save_together(|| self.write(dir))
    }

    fn write(&self, dir: &Path) -> Result<()> {
        let eos = self.tokenizer.eos_ids();
        let pad = self.tokenizer.pad();
        let run = &self.run.config.run;
        let most = run.max_shard_size.0;
        let dtype = run.save_dtype;
        let write = |dir: &Path| {
            self.learner.policy.save_pretrained_as(dir, eos, pad, most, dtype)?;
            self.tokenizer.save_pretrained(dir)
        };
        replace_files(dir, write)?;
        if let Some(critic) = self.learner.value.model() {
            replace_files(&dir.join(VALUE_MODEL), |dir| {
                critic.save_pretrained_as(dir, eos, pad, most, dtype)?;
                self.tokenizer.save_pretrained(dir)
            })?;
        }
        let Some(ema) = &self.learner.ema else { return Ok(()) };
        ema.with(&self.learner.policy, |_| replace_files(&dir.join(EMA), write))
    }

    fn pad(&self) -> i64 {
        self.tokenizer.deepspeed_chat_pad(self.learner.policy.config()).or(self.tokenizer.eos()).unwrap_or(0)
    }
}

/// The reference model; the engine needs one.
fn needed(reference: Option<CausalLm>) -> Result<CausalLm> {
    reference.ok_or_else(|| Error::Usage("RlhfEngine: expected a reference model, found none".into()))
}

fn norm(x: &Tensor) -> f64 {
    tch::no_grad(|| x.to_kind(Kind::Float).norm().double_value(&[]))
}

/// Checks the shapes of a batch.
fn check_shapes(e: &RlhfExperience) -> Result<()> {
    let (rows, len) = e.input_ids.size2()?;
    let (_, width) = e.prompts.size2()?;
    for (name, x, expected) in [
        ("prompts", &e.prompts, vec![rows, width]),
        ("attention_mask", &e.attention_mask, vec![rows, len]),
        ("logprobs", &e.logprobs, vec![rows, len - 1]),
        ("ref_logprobs", &e.ref_logprobs, vec![rows, len - 1]),
        ("value", &e.value, vec![rows, len - 1]),
        ("rewards", &e.rewards, vec![rows]),
    ] {
        if x.size() != expected || width >= len {
            return Err(Error::Run(format!("experience: {name}: expected shape {expected:?}, found {:?}", x.size())));
        }
    }
    Ok(())
}

/// Tokens of each row where `mask` is 1.
///
/// # Errors
/// If the shapes differ, or a row has no token.
fn unpadded(ids: &Tensor, mask: &Tensor) -> Result<Vec<Vec<i64>>> {
    if ids.size() != mask.size() {
        return Err(Error::Run(format!("expected a mask of shape {:?}, found {:?}", ids.size(), mask.size())));
    }
    let ids = Vec::<Vec<i64>>::try_from(ids)?;
    let mask = Vec::<Vec<i64>>::try_from(mask.to_kind(Kind::Int64))?;
    let rows = ids.iter().zip(&mask).enumerate().map(|(row, (ids, mask))| {
        let tokens: Vec<i64> = ids.iter().zip(mask).filter(|(_, m)| **m != 0).map(|(id, _)| *id).collect();
        if tokens.is_empty() {
            Err(Error::Run(format!("row {row}: expected a token that counts, found none")))
        } else {
            Ok(tokens)
        }
    });
    rows.collect()
}

/// `rows` padded on the left, `[B, P]` i64, and their mask.
fn padded_left(rows: &[&[i64]], pad: i64) -> (Tensor, Tensor) {
    let width = rows.iter().map(|row| row.len()).max().unwrap_or(0);
    let fill = |padding: i64, value: &dyn Fn(i64) -> i64| {
        let row = |row: &&[i64]| -> Vec<i64> {
            let left = std::iter::repeat_n(padding, width - row.len());
            left.chain(row.iter().map(|&id| value(id))).collect()
        };
        Tensor::from_slice(&rows.iter().flat_map(row).collect::<Vec<i64>>()).view([-1, width as i64])
    };
    (fill(pad, &|id| id), fill(0, &|_| 1))
}
