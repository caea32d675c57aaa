//! The update: epochs of mini-batches, their gradients, and optimizer steps.

use crate::rl::advantage::whiten_rows;
use crate::rl::ema::Ema;
use crate::rl::entropy::{EntropyControl, EntropyController};
use crate::rl::experience::{Experience, LossCounts};
use crate::rl::loss::{LossFactors, LossSettings, MicroBatch, Preview, Sums, selected};
use crate::rl::math::{self, LossAggregation};
use crate::rl::rollout::RolloutModels;
use crate::rl::sampling::SamplingDifference;
use crate::rl::shaping::Targets;
use crate::rl::stats::StepStats;
use crate::rl::trace::{Gradients, Learned, Observed};
use crate::rl::unsupervised::{TextLimits, Unsupervised, learn_texts};
use rlhf_base::dist::{World, ZeroStage};
use rlhf_base::offload::Offload;
use rlhf_base::rng::{Purpose, Stream};
use rlhf_base::{Error, Result};
use rlhf_lm::model::{
    CausalLm, Distributions, Gathered, JointBatch, LogprobOptions, ModelConfig, ModelHead, PretrainedModel,
    SequenceClassifier, Shards, TokenLogprobs, ValueModel,
};
use rlhf_lm::optim::loss_scale::{LossScaleConfig, LossScaleState, LossScaler};
use rlhf_lm::optim::micro_batch::{MicroBatchLimit, micro_batch_tokens, micro_batches};
use rlhf_lm::optim::{LearningRates, Optimizer, OptimizerConfig, SharedGradients};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::mpsc::Sender;
use tch::Tensor;
use tch_ext::to_host;

/// An update's epochs end early above this many times `target_kl`; as in TRL 0.11.
const EARLY_STOP: f64 = 1.5;

/// The name of the learning rates in errors.
const RATES: &str = "rates";

/// Entropies that differ from the threshold by less than this, in nats, and by less than this share of it count as equal to it.
const ENTROPY_ROUNDING: (f64, f64) = (1e-5, 1e-3);

/// Division of an epoch's rows into mini-batches and micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpochPlan {
    /// Rows in one optimizer step; the last one of an epoch may have fewer.
    pub mini_batch_size: usize,
    /// Rows whose losses are averaged together: a whole mini-batch, or parts of it. With several parts the step uses the mean of their
    /// averages (TRL's `step()` with gradient accumulation).
    pub part_size: usize,
    /// Rows in one forward and backward pass, at most; changes memory and speed only.
    pub micro_batch_size: usize,
}

impl EpochPlan {
    /// Number of optimizer steps in an epoch over `rows` rows.
    ///
    /// # Panics
    /// If `mini_batch_size` is 0.
    pub fn steps(&self, rows: usize) -> usize {
        rows.div_ceil(self.mini_batch_size)
    }

    /// Number of parts in an epoch over `rows` rows: an optimizer step is a whole number of parts, so only the last part of an
    /// epoch can be smaller.
    ///
    /// # Panics
    /// If `part_size` is 0.
    pub fn parts(&self, rows: usize) -> usize {
        rows.div_ceil(self.part_size).max(1)
    }

    /// Refuses sizes of 0.
    fn check(&self) -> Result<()> {
        check_size("mini_batch_size", self.mini_batch_size)?;
        check_size("part_size", self.part_size)?;
        check_size("micro_batch_size", self.micro_batch_size)
    }
}

/// The learning rates of an update's optimizer steps.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRates(Vec<LearningRates>);

impl StepRates {
    /// The rates of step `step` of an update, counted from 0; all steps after the last entry have its rates.
    fn at_step(&self, step: usize) -> LearningRates {
        self.0[step.min(self.0.len() - 1)]
    }

    /// The rates of the first step.
    pub fn first(&self) -> LearningRates {
        self.0[0]
    }

    /// Refuses rates below 0 and those that are not finite.
    fn check(&self) -> Result<()> {
        self.0.iter().try_for_each(|rates| rates.checked(RATES).map(drop))
    }

    /// All rates times `factor`.
    pub(crate) fn scaled(self, factor: f64) -> Self {
        let scaled = |rates: LearningRates| LearningRates {
            policy: rates.policy.map(|rate| rate * factor),
            value: rates.value * factor,
        };
        Self(self.0.into_iter().map(scaled).collect())
    }
}

impl From<LearningRates> for StepRates {
    /// The same rates for all steps.
    fn from(rates: LearningRates) -> Self {
        Self(vec![rates])
    }
}

impl FromIterator<LearningRates> for StepRates {
    /// The rates of each step, in order.
    ///
    /// # Panics
    /// If there are none.
    fn from_iter<I: IntoIterator<Item = LearningRates>>(rates: I) -> Self {
        let rates = Vec::from_iter(rates);
        assert!(!rates.is_empty(), "expected the rates of at least one step");
        Self(rates)
    }
}

/// Settings that may change from update to update; [`PpoConfig::update_settings`](crate::settings::PpoConfig::update_settings) resolves
/// them.
#[derive(Debug, Clone, PartialEq)]
pub struct UpdateSettings {
    /// Terms of the losses.
    pub loss: LossSettings,
    /// Whiten the advantages of each mini-batch by itself.
    pub whiten_mini_batches: bool,
    /// End an update's epochs after one whose last mini-batch is more than 1.5 times this away from the policy that sampled, in nats
    /// per token.
    pub target_kl: Option<f64>,
    /// Skip a mini-batch whose mean probability ratio is above this.
    pub ratio_threshold: Option<f64>,
}

/// Settings of a [`Learner`]; [`PpoConfig::learner`](crate::settings::PpoConfig::learner) resolves them. All but `update` stay fixed
/// once the learner is made.
#[derive(Debug, Clone, PartialEq)]
pub struct LearnerSettings {
    /// Losses, whitening and limits of an update.
    pub update: UpdateSettings,
    /// Optimizer of the policy (and of a value head on it).
    pub policy_optimizer: OptimizerConfig,
    /// Optimizer of a separate value model.
    pub value_optimizer: OptimizerConfig,
    /// Recompute activations in the backward pass.
    pub gradient_checkpointing: bool,
    /// Most tokens in one forward and backward pass, or memory of their activations; chosen by the available memory where it is not set.
    pub max_tokens_per_micro_batch: Option<MicroBatchLimit>,
    /// Dynamic loss scaling, for f16.
    pub loss_scale: Option<LossScaleConfig>,
    /// An f16 overflow of one model skips the step of both.
    pub align_overflow: bool,
    /// Decay of a moving average of the policy's weights, if one is maintained.
    pub ema_beta: Option<f64>,
    /// Rule for the coefficient of the entropy bonus, in place of [`LossSettings::entropy_coef`].
    pub entropy_control: Option<EntropyControl>,
    /// Parts of the policy's training that are divided over ranks.
    pub policy_stage: ZeroStage,
    /// Parts of a separate value model's training that are divided over ranks.
    pub value_stage: ZeroStage,
    /// Seed of stochastic rounding, with weights in bf16.
    pub seed: u64,
}

impl LearnerSettings {
    /// Whether a step of the value model is independent of the policy's mini-batch, so that it is taken before the policy's passes.
    /// `ratio_threshold` skips the steps of both by the policy's ratios, and in f16 an overflow of one may skip the step of the other.
    pub(crate) fn steps_apart(&self) -> bool {
        self.update.ratio_threshold.is_none() && self.loss_scale.is_none()
    }
}

/// The models that a pass trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TrainedModels {
    Both,
    Policy,
    Value,
}

impl TrainedModels {
    /// The critic, and the policy if `policy` is set.
    fn with_policy(policy: bool) -> Self {
        if policy { Self::Both } else { Self::Value }
    }

    fn policy(self) -> bool {
        self != Self::Value
    }

    fn value(self) -> bool {
        self != Self::Policy
    }
}

/// The policy and the critic with their optimizers.
///
/// The critic is a separate model with an optimizer of its own, or a head on the policy, trained by the policy's optimizer.
#[derive(Debug)]
pub struct Learner {
    /// The policy.
    pub policy: CausalLm,
    /// The critic.
    pub value: ValueModel,
    /// A moving average of the policy, if the settings ask for one.
    pub ema: Option<Ema>,
    /// Texts that are mixed into the policy's steps.
    pub unsupervised: Option<Unsupervised>,
    /// Return every probability ratio in [`StepStats::ratios`]; off, because reading them from the device takes time.
    pub collect_ratios: bool,
    /// Collect how much of the responses is clipped, in [`StepStats::low_clipped`] and the next three fields.
    pub collect_clips: bool,
    /// Receives each number that is computed, where someone observes an update.
    pub(crate) observer: Option<Sender<Learned>>,
    /// The ranks that train together.
    pub(crate) world: World,
    pub(crate) settings: LearnerSettings,
    pub(crate) optimizers: Optimizers,
    /// The coefficient of the entropy bonus, where it follows a target.
    pub(crate) entropy_controller: Option<EntropyController>,
    /// Most tokens in one forward and backward pass.
    pub(crate) micro_batch_tokens: usize,
}

/// The optimizers of a [`Learner`], and the state that their steps need.
#[derive(Debug)]
pub(crate) struct Optimizers {
    pub(crate) policy: Optimizer,
    /// Optimizer of a separate value model.
    pub(crate) value: Option<Optimizer>,
    /// The memory of the gradients, while the two models are trained one after the other.
    shared_gradients: Option<SharedGradients>,
    /// Loss scales, in f16.
    pub(crate) scaling: Option<Scaling>,
    /// Whether a state is being loaded, or loading one has failed halfway.
    pub(crate) is_half_loaded: bool,
}

impl Learner {
    /// Makes `policy` and `value` trainable, divides them over the ranks of this process by their stages, and creates fresh
    /// optimizers; a value head must be one on this policy.
    pub fn new(policy: CausalLm, value: impl Into<ValueModel>, settings: LearnerSettings) -> Self {
        Self::with_state_at(policy, value, settings, None).expect("a state that stays in memory needs no file")
    }

    /// [`Learner::new`], with optimizer state that is kept at `place` between the steps if there is one; see [`Optimizer::of_model`].
    ///
    /// # Errors
    /// If there is not enough memory or disk space for the optimizer state.
    pub fn with_state_at(
        policy: CausalLm,
        value: impl Into<ValueModel>,
        settings: LearnerSettings,
        place: Option<&Offload>,
    ) -> Result<Self> {
        Self::on_ranks(&World::of_process(), (policy, value.into()), settings, place)
    }

    /// [`Learner::with_state_at`] on the ranks `world` instead of the ranks that this process has joined.
    ///
    /// # Errors
    /// If there is not enough memory or disk space for the optimizer state.
    pub fn on_ranks(
        world: &World,
        (mut policy, mut value): (CausalLm, ValueModel),
        settings: LearnerSettings,
        place: Option<&Offload>,
    ) -> Result<Self> {
        let checkpointing = settings.gradient_checkpointing;
        policy.set_trainable(true);
        policy.set_gradient_checkpointing(checkpointing);
        if let Some(value) = value.model_mut() {
            value.set_trainable(true);
            value.set_gradient_checkpointing(checkpointing);
        }
        let value_bytes = |checkpointing| value.model().map_or(0, |value| value.activation_bytes(checkpointing));
        let activation_bytes = policy.activation_bytes(checkpointing).max(value_bytes(checkpointing));
        let most = settings.max_tokens_per_micro_batch;
        let micro_batch_tokens = micro_batch_tokens(most, policy.device(), policy.params(), activation_bytes);
        policy.shard(world, settings.policy_stage);
        if let Some(value) = value.model_mut() {
            value.shard(world, settings.value_stage);
        }
        let value_optimizer = |value| build_optimizer(value, &settings.value_optimizer, &settings, place);
        let optimizers = Optimizers {
            policy: build_optimizer(&policy, &settings.policy_optimizer, &settings, place)?,
            value: value.model().map(value_optimizer).transpose()?,
            shared_gradients: None,
            scaling: settings.loss_scale.as_ref().map(|config| Scaling::new(&value, config, settings.align_overflow)),
            is_half_loaded: false,
        };
        Ok(Self {
            optimizers,
            ema: settings.ema_beta.map(|beta| Ema::new(&policy, beta)),
            entropy_controller: settings.entropy_control.map(EntropyController::new),
            unsupervised: None,
            collect_ratios: false,
            collect_clips: false,
            observer: None,
            world: world.clone(),
            policy,
            value,
            settings,
            micro_batch_tokens,
        })
    }

    /// Replaces the optimizers by fresh ones with these settings: betas, epsilon, weight decay and `max_grad_norm`; each step is
    /// given its learning rates. A head on the policy is trained by the policy's optimizer. The optimizers' state stays in memory.
    /// Settings out of their range are an error of the first step.
    #[must_use]
    pub fn with_optimizers(mut self, policy: &OptimizerConfig, value: &OptimizerConfig) -> Self {
        let in_memory = "a state that stays in memory needs no file";
        self.optimizers.policy = build_optimizer(&self.policy, policy, &self.settings, None).expect(in_memory);
        let value_optimizer = |model| build_optimizer(model, value, &self.settings, None).expect(in_memory);
        self.optimizers.value = self.value.model().map(value_optimizer);
        (self.settings.policy_optimizer, self.settings.value_optimizer) = (policy.clone(), value.clone());
        self
    }

    /// Refuses settings of the optimizers with which a step would make wrong weights, or weights that are not finite.
    ///
    /// # Errors
    /// [`Error::Usage`], naming the setting.
    pub(crate) fn check_optimizers(&self) -> Result<()> {
        let LearnerSettings { policy_optimizer, value_optimizer, .. } = &self.settings;
        let value = self.optimizers.value.as_ref().map(|_| ("value_optimizer", value_optimizer));
        for (name, optimizer) in [("policy_optimizer", policy_optimizer)].into_iter().chain(value) {
            let named = |e: Error| {
                let lines: Vec<String> = e.refusals().iter().map(ToString::to_string).collect();
                Error::Usage(format!("{name}: {}", lines.join("; ")))
            };
            optimizer.check_steps().map_err(named)?;
        }
        Ok(())
    }

    /// Whether the optimizers' state is in memory during steps only, or on the host.
    pub(crate) fn offloads_state(&self) -> bool {
        self.optimizers.policy.is_offloaded()
    }

    /// The ranks that learn together.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Whether this rank lacks parts of the models or of their optimizers.
    pub(crate) fn is_sharded(&self) -> bool {
        let divided = |shards: &&Shards| shards.stage().is_some_and(ZeroStage::shards_optimizer);
        self.world.size() > 1 && self.shards().iter().any(divided)
    }

    /// Hands rank 0 the parts of models and optimizers that it writes, until it has [finished](Learner::end_serving).
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub(crate) fn serve(&self) -> Result<()> {
        Shards::serve(&self.shards())
    }

    /// Ends [`Learner::serve`] of the other ranks, on rank 0.
    ///
    /// # Errors
    /// The errors of [`Learner::serve`].
    pub(crate) fn end_serving(&self) -> Result<()> {
        Shards::end_serving(&self.shards())
    }

    /// Runs `write`, which writes the models, on rank 0, while the other ranks hand over their parts of them; an error of `write` is
    /// returned on all ranks. Called by all ranks.
    ///
    /// # Errors
    /// The error of `write`; if a rank has ended or does not respond.
    pub(crate) fn save_together(&self, write: impl FnOnce() -> Result<()>) -> Result<()> {
        let written = match (self.is_sharded(), self.world.is_main()) {
            (false, true) => write(),
            (false, false) => Ok(()),
            (true, true) => {
                let written = write();
                self.end_serving()?;
                written
            }
            (true, false) => self.serve(),
        };
        self.world.agree(written)
    }

    /// The division of each model over ranks.
    fn shards(&self) -> Vec<&Shards> {
        std::iter::once(self.policy.shards()).chain(self.value.model().map(SequenceClassifier::shards)).collect()
    }

    /// Current settings.
    pub fn settings(&self) -> &LearnerSettings {
        &self.settings
    }

    /// Replaces the settings of the next updates.
    pub fn set_update(&mut self, update: UpdateSettings) {
        self.settings.update = update;
    }

    /// The policy's whole parameters for the generation of many tokens, if `gathers` and they are divided over ranks
    /// (`ds3_gather_for_generation`).
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub(crate) fn gathered_policy(&self, gathers: bool) -> Result<Option<Gathered<'_>>> {
        gathers.then(|| self.policy.gathered()).transpose()
    }

    /// The policy, the critic, and the reference model if there is one, for the evaluation of responses.
    pub fn rollout_models<'a>(&'a self, reference: impl Into<Option<&'a CausalLm>>) -> RolloutModels<'a> {
        RolloutModels { policy: &self.policy, reference: reference.into(), value: &self.value, world: &self.world }
    }

    /// Number of optimizer steps taken by both models together.
    pub(crate) fn steps(&self) -> i64 {
        self.optimizers.policy.steps() + self.optimizers.value.as_ref().map_or(0, Optimizer::steps)
    }

    /// Trains on one batch of experience: one epoch per entry of `orders`, each a permutation of the rows.
    ///
    /// An epoch is divided into mini-batches of `plan.mini_batch_size` rows, each an optimizer step. A mini-batch goes through
    /// the models in micro-batches; its losses are sums over them, divided by the token count of the whole mini-batch, so the
    /// size of a micro-batch changes memory and speed only. Returns one entry per mini-batch, or per part where
    /// `plan.part_size` is smaller: then a step uses the mean of the parts' losses, each divided by its own token count.
    ///
    /// Each mini-batch takes as many blocks of [`Learner::unsupervised`] as it has rows. A moving average follows each step of
    /// the policy. A mini-batch above `ratio_threshold` is skipped, and an epoch that ends too far from the policy that
    /// sampled, by `target_kl`, is the last. Existing gradients are cleared first. `rates` are the rates of all steps, or of
    /// each step; where the policy's rate is `None` only the value model is trained.
    ///
    /// # Errors
    /// If a row of `orders` is out of range, a size of `plan` is 0, `targets` do not fit `experience`, a rate is below 0 or not
    /// finite, or a setting of an optimizer is out of its range: then nothing has changed. If libtorch refuses a step.
    pub fn optimize(
        &mut self,
        experience: &Experience,
        targets: &Targets,
        orders: &[Vec<usize>],
        rates: impl Into<StepRates>,
        plan: &EpochPlan,
    ) -> Result<Vec<StepStats>> {
        self.optimize_with(experience, targets, orders, rates, plan, |_, _| Ok(()))
    }

    /// [`Learner::optimize`] that calls `after_step` after each optimizer step of the policy, with the policy and the number of
    /// its steps in the run.
    ///
    /// # Errors
    /// The errors of [`Learner::optimize`]; the error of `after_step`. The gradients of the step that failed are cleared.
    pub fn optimize_with(
        &mut self,
        experience: &Experience,
        targets: &Targets,
        orders: &[Vec<usize>],
        rates: impl Into<StepRates>,
        plan: &EpochPlan,
        after_step: impl FnMut(&CausalLm, usize) -> Result<()>,
    ) -> Result<Vec<StepStats>> {
        let rates: StepRates = rates.into();
        plan.check()?;
        check_targets(experience, targets)?;
        orders.iter().try_for_each(|order| check_rows(experience, order))?;
        self.check_optimizers()?;
        rates.check()?;
        // Gradients left from before would be added to those of the first step.
        self.zero_grad();
        let steps = self.epochs(experience, targets, orders, &rates, plan, after_step);
        if steps.is_err() {
            self.zero_grad();
        }
        steps
    }

    fn epochs(
        &mut self,
        experience: &Experience,
        targets: &Targets,
        orders: &[Vec<usize>],
        rates: &StepRates,
        plan: &EpochPlan,
        mut after_step: impl FnMut(&CausalLm, usize) -> Result<()>,
    ) -> Result<Vec<StepStats>> {
        self.observed(|| Learned::Batch(Box::new(Observed::of(experience, targets))));
        let mut batch = Batch { experience, targets, counts: experience.loss_counts(), is_first: true };
        let mut steps = Vec::new();
        let mut done = 0;
        for (epoch, order) in orders.iter().enumerate() {
            for mini_batch in order.chunks(plan.mini_batch_size) {
                let rates = rates.at_step(done);
                done += 1;
                let before = self.optimizers.policy.steps();
                let mut parts = if rates.policy.is_some() && self.trains_apart() {
                    self.train_apart(&batch, mini_batch, rates, plan)?
                } else {
                    self.train_together(&batch, mini_batch, rates, plan)?
                };
                batch.is_first = false;
                parts.iter_mut().rev().skip(1).for_each(|part| part.continues_step = true);
                let entropy_coef = self.entropy_controller.as_ref().map_or(0.0, EntropyController::coef);
                parts.iter_mut().for_each(|part| part.entropy_coef = entropy_coef);
                if self.optimizers.policy.steps() > before {
                    after_step(&self.policy, before as usize + 1)?;
                }
                self.observed(|| Learned::Step { epoch, rates, parts: parts.clone() });
                steps.extend(parts);
            }
            let moved = steps.last().map_or(0.0, |last: &StepStats| last.policy_kl / last.tokens.max(1.0));
            if self.settings.update.target_kl.is_some_and(|target| moved > EARLY_STOP * target) {
                break;
            }
        }
        Ok(steps)
    }

    /// Whether the value model's step comes before the policy's passes, so that gradients of one model are in memory at a time.
    ///
    /// The numbers are the same in either order, as two models share nothing. With an observer the models are trained together: it gets
    /// the losses and gradients of both for a mini-batch at once.
    fn trains_apart(&self) -> bool {
        self.settings.steps_apart() && self.observer.is_none() && self.optimizers.value.is_some()
    }

    /// Trains both models on a mini-batch: the passes of both, then both steps.
    fn train_together(
        &mut self,
        batch: &Batch<'_>,
        mini_batch: &[usize],
        rates: LearningRates,
        plan: &EpochPlan,
    ) -> Result<Vec<StepStats>> {
        self.separate_gradients()?;
        let trains = TrainedModels::with_policy(rates.policy.is_some());
        let mut parts = self.part_gradients(batch, mini_batch, plan, trains)?;
        if self.skips_step(&mut parts) {
            return Ok(parts);
        }
        self.average_over(parts.len(), trains);
        if trains.policy() {
            self.mix_texts(mini_batch.len(), plan.micro_batch_size, &mut parts)?;
        }
        self.step_with_parts(&mut parts, rates, trains)?;
        Ok(parts)
    }

    /// Trains both models on a mini-batch, one after the other, in one memory for gradients.
    ///
    /// The policy is last, because it does not move where a loss or a gradient of either is not finite.
    fn train_apart(
        &mut self,
        batch: &Batch<'_>,
        mini_batch: &[usize],
        rates: LearningRates,
        plan: &EpochPlan,
    ) -> Result<Vec<StepStats>> {
        self.hand_gradients_to(TrainedModels::Value)?;
        let mut value_parts = self.part_gradients(batch, mini_batch, plan, TrainedModels::Value)?;
        self.average_over(value_parts.len(), TrainedModels::Value);
        self.step_with_parts(&mut value_parts, rates, TrainedModels::Value)?;

        self.hand_gradients_to(TrainedModels::Policy)?;
        let parts = self.part_gradients(batch, mini_batch, plan, TrainedModels::Policy)?;
        let mut parts: Vec<_> =
            parts.into_iter().zip(&value_parts).map(|(part, values)| part.with_value_stats(values)).collect();
        self.average_over(parts.len(), TrainedModels::Policy);
        self.mix_texts(mini_batch.len(), plan.micro_batch_size, &mut parts)?;
        self.step_with_parts(&mut parts, rates, TrainedModels::Policy)?;
        Ok(parts)
    }

    /// Accumulates the gradients of all parts of a mini-batch; returns the sums of each part.
    fn part_gradients(
        &self,
        batch: &Batch<'_>,
        mini_batch: &[usize],
        plan: &EpochPlan,
        trains: TrainedModels,
    ) -> Result<Vec<StepStats>> {
        let parts = mini_batch.chunks(plan.part_size);
        parts.map(|part| self.row_gradients(batch, part, plan.micro_batch_size, trains)).collect()
    }

    /// Lends the memory for gradients to one of the models, whose gradients are then zero; the gradients of the other are cleared.
    fn hand_gradients_to(&mut self, trains: TrainedModels) -> Result<()> {
        let Some(value) = &mut self.optimizers.value else { return Ok(()) };
        let policy = &mut self.optimizers.policy;
        if self.optimizers.shared_gradients.is_none() {
            policy.release_gradients()?;
            value.release_gradients()?;
            let models = [policy.gradient_sizes(), value.gradient_sizes()];
            self.optimizers.shared_gradients = Some(SharedGradients::new(self.policy.device(), &models));
        }
        let (previous, next) = if trains.policy() { (value, policy) } else { (policy, value) };
        previous.release_gradients()?;
        let lent = self.optimizers.shared_gradients.as_ref().map(|shared| shared.lend(&next.gradient_sizes()));
        lent.map_or(Ok(()), |grads| next.use_gradients(grads))
    }

    /// Gives each model gradients of its own.
    fn separate_gradients(&mut self) -> Result<()> {
        if self.optimizers.shared_gradients.take().is_some() {
            self.optimizers.policy.release_gradients()?;
            self.optimizers.value.as_mut().map_or(Ok(()), Optimizer::release_gradients)?;
        }
        Ok(())
    }

    /// Computes the losses of one mini-batch and accumulates their gradients; returns its sums.
    ///
    /// Each rank has a part of the mini-batch with about as many tokens. The sums are those of all ranks; the gradients are those of this
    /// rank until [`Learner::step`].
    ///
    /// `mini_batch` are rows of `experience`; at most `micro_batch_size` of them go through the models at a time, and without
    /// `trains_policy` through the value model only.
    ///
    /// # Errors
    /// If a row is out of range or does not fit the models, `micro_batch_size` is 0, or `targets` do not fit `experience`.
    pub fn gradients(
        &self,
        experience: &Experience,
        targets: &Targets,
        mini_batch: &[usize],
        micro_batch_size: usize,
        trains_policy: bool,
    ) -> Result<StepStats> {
        check_size("micro_batch_size", micro_batch_size)?;
        check_targets(experience, targets)?;
        check_rows(experience, mini_batch)?;
        let batch = Batch { experience, targets, counts: experience.loss_counts(), is_first: false };
        self.row_gradients(&batch, mini_batch, micro_batch_size, TrainedModels::with_policy(trains_policy))
    }

    /// [`Learner::gradients`] of the policy alone, where the gradients of both models need not be in memory at once.
    pub(crate) fn policy_gradients(
        &mut self,
        experience: &Experience,
        targets: &Targets,
        mini_batch: &[usize],
        micro_batch_size: usize,
    ) -> Result<StepStats> {
        if !self.trains_apart() {
            return self.gradients(experience, targets, mini_batch, micro_batch_size, true);
        }
        self.hand_gradients_to(TrainedModels::Policy)?;
        let batch = Batch { experience, targets, counts: experience.loss_counts(), is_first: false };
        self.row_gradients(&batch, mini_batch, micro_batch_size, TrainedModels::Policy)
    }

    /// [`Learner::gradients`] of rows of `batch`.
    fn row_gradients(
        &self,
        batch: &Batch<'_>,
        mini_batch: &[usize],
        micro_batch_size: usize,
        trains: TrainedModels,
    ) -> Result<StepStats> {
        let Batch { experience, targets, counts, is_first } = batch;
        let trains_policy = trains.policy();
        let compares = *is_first && trains_policy && experience.sampling_logprobs.is_some();
        let tokens = if trains_policy { counts.tokens(mini_batch) } else { 0.0 };
        let value_slots = counts.values(mini_batch);
        let has_critic = !matches!(self.value, ValueModel::None);
        let whitened = (self.settings.update.whiten_mini_batches && trains_policy)
            .then(|| whiten_rows(&targets.advantages, mini_batch, &experience.whitened_mask(has_critic)));
        let advantages = whitened.as_ref().unwrap_or(&targets.advantages);
        let length = |&row: &usize| experience.sequence_len(row);
        // Rows of a group are side by side, so that their prompt is computed once; the losses are sums over the mini-batch, in any order.
        let mut rows = mini_batch.to_vec();
        if experience.has_groups() {
            rows.sort_by_key(|&row| (experience.groups[row], row));
        }
        let local_rows = self.world.share_by(&rows, length);
        let limits = (micro_batch_size, self.micro_batch_tokens);
        let parts = passes(experience, local_rows, limits, self.shares_first_tokens());
        let factors = LossFactors {
            divisor: self.divisor(batch, mini_batch.len(), tokens),
            entropy_tokens: tokens.max(1.0),
            entropy_coef: self.entropy_coef(),
            value_slots,
            kl_coef: targets.kl_coef,
            scales: self.loss_scales(),
            least_entropy: None,
        };
        let batch = |rows: &[usize]| {
            let batch = MicroBatch::new(experience, targets, advantages, rows, &self.settings.update.loss);
            if compares { batch.comparing_sampling(experience, rows) } else { batch }
        };
        let (previews, factors) = if trains_policy && self.settings.update.loss.needs_preview() {
            self.previews(parts.iter().map(|rows| batch(rows)), factors)?
        } else {
            (Vec::new(), factors)
        };
        let mut sums = Sums::new(self.collect_ratios, self.collect_clips);
        let passes = parts.iter().enumerate().try_for_each(|(at, rows)| {
            let mut batch = batch(rows);
            if let Some(preview) = previews.get(at) {
                batch.take_preview(preview, &self.settings.update.loss, factors.least_entropy);
            }
            let reference = experience.reference.as_ref().map(|reference| (reference, &rows[..]));
            let (now, values) = self.backward(&batch, reference, factors, trains, &mut sums)?;
            self.observed(|| Learned::MicroBatch { rows: rows.to_vec(), now, values, so_far: Box::new(sums.so_far()) });
            Ok(())
        });
        self.world.agree(passes)?;
        let bonus_tokens = if tokens > 0.0 { factors.entropy_tokens } else { 0.0 };
        let rows = mini_batch.len() as f64;
        let sampling = compares.then(SamplingDifference::default);
        let mut stats = StepStats { tokens, rows, value_slots, bonus_tokens, sampling, ..StepStats::default() };
        sums.read_into(&mut stats);
        stats.sum_over(&self.world)?;
        self.observed(|| Learned::Part);
        Ok(stats)
    }

    /// Hands an event to the observer, if there is one.
    fn observed(&self, event: impl FnOnce() -> Learned) {
        if let Some(observer) = &self.observer {
            // Sending fails only if the observer is gone, which then waits for nothing.
            let _ = observer.send(event());
        }
    }

    /// Whether the models compute first tokens that sequences have in common only once: a value head on the policy does not, nor do models
    /// whose rotary angles depend on the length of the text.
    fn shares_first_tokens(&self) -> bool {
        let shares = |config: &ModelConfig| !config.has_length_dependent_rope();
        shares(self.policy.config())
            && match &self.value {
                ValueModel::Head(_) => false,
                ValueModel::Model(value) => shares(value.config()),
                ValueModel::None => true,
            }
    }

    /// Divisor of the sum of the policy's losses over a mini-batch of `rows` rows with `tokens` tokens.
    fn divisor(&self, batch: &Batch<'_>, rows: usize, tokens: f64) -> f64 {
        let all_rows = batch.experience.rows() as f64;
        match self.settings.update.loss.aggregation {
            LossAggregation::Tokens => tokens.max(1.0),
            LossAggregation::Responses | LossAggregation::ResponseSums => rows as f64,
            LossAggregation::Length(most) => (rows * most) as f64,
            LossAggregation::UpdateTokens => batch.counts.all_tokens().max(1.0) * (rows as f64 / all_rows),
        }
    }

    /// Runs passes without gradients over the micro-batches of this rank. Returns them, and the factors with the lowest entropy of the
    /// tokens that the policy's objective trains.
    fn previews(
        &self,
        batches: impl Iterator<Item = MicroBatch>,
        mut factors: LossFactors,
    ) -> Result<(Vec<Preview>, LossFactors)> {
        let settings = &self.settings.update.loss;
        let needs_entropy = settings.top_entropy_quantile < 1.0;
        let mut previews = Vec::new();
        let mut counted = Vec::new();
        let passes = batches.into_iter().try_for_each(|batch| {
            let rows = batch.at(&batch.token_spans);
            let now = tch::no_grad(|| self.policy.logprobs_of(rows, batch.sampled(settings), needs_entropy))?;
            counted.extend(now.entropy.iter().map(|entropy| [entropy.shallow_clone(), batch.counts().shallow_clone()]));
            previews.push(Preview { logprobs: now.logprobs, entropy: now.entropy });
            Ok(())
        });
        self.world.agree(passes)?;
        if needs_entropy {
            // One read for all micro-batches, as each read waits for the device.
            let entropies = if counted.is_empty() { Vec::new() } else { to_host(&selected(&counted)) };
            let mut all = self.world.gather_numbers(&entropies)?.concat();
            let least = least_entropy(&mut all, settings.top_entropy_quantile);
            factors.entropy_tokens = all.iter().filter(|entropy| **entropy >= least).count().max(1) as f64;
            factors.least_entropy = Some(least);
        }
        Ok((previews, factors))
    }

    /// Forward and backward pass of one micro-batch; accumulates gradients. Returns the log-probabilities under the policy, and with an
    /// observer the values.
    ///
    /// `reference`: the reference model's distributions and the rows of the micro-batch in them, where the loss has the KL
    /// over the whole vocabulary.
    fn backward(
        &self,
        batch: &MicroBatch,
        reference: Option<(&Distributions, &[usize])>,
        factors: LossFactors,
        trains: TrainedModels,
        sums: &mut Sums,
    ) -> Result<(Option<TokenLogprobs>, Option<Tensor>)> {
        let settings = &self.settings.update.loss;
        let sampled = batch.sampled(settings);
        let token_spans = &batch.token_spans;
        let value_spans = &batch.value_spans;
        // The value model's sums wait for the policy's, since both losses of a shared trunk need `sums` at once.
        let mut value_sums = Sums::default();
        let policy_loss = |slice, now: &TokenLogprobs| batch.policy_loss(slice, now, settings, factors, sums);
        let mut seen = None;
        let value_loss = |values: &Tensor| {
            seen = self.observer.as_ref().map(|_| values.detach());
            batch.value_loss(values, settings, factors, &mut value_sums)
        };
        let entropy_is_metric = factors.entropy_coef <= 0.0;
        let options = LogprobOptions { entropy: true, entropy_is_metric, kl_to: reference, ..sampled.into() };
        let now = match (&self.value, reference) {
            (ValueModel::Head(_), Some(_)) => {
                return Err(Error::Run("kl_in_loss with kl_estimator = full needs a value model of its own".into()));
            }
            (ValueModel::Head(head), None) => {
                let sequences = &batch.sequences;
                let prompt_lens = Some(&batch.prompt_lens[..]);
                let batch = JointBatch { sequences, token_spans, value_spans, prompt_lens };
                Some(head.backward(&self.policy, batch, options, policy_loss, value_loss)?)
            }
            // Two models share nothing, so the policy's activations are freed before the value model's forward pass.
            (ValueModel::Model(value), _) => {
                let now = if trains.policy() {
                    Some(self.policy.logprobs_backward(batch.at(token_spans), options, policy_loss)?)
                } else {
                    None
                };
                if trains.value() {
                    value.values_backward(batch.at(value_spans), value_loss)?;
                }
                now
            }
            (ValueModel::None, _) => {
                Some(self.policy.logprobs_backward(batch.at(token_spans), options, policy_loss)?)
            }
        };
        sums.add_value_sums(value_sums);
        sums.end_rows(batch.rows());
        if let Some(entropy) = now.as_ref().and_then(|now| now.entropy.as_ref()) {
            sums.add_entropy(batch.entropy_sums(entropy).each_ref());
        }
        Ok((now, seen))
    }

    /// Whether a mini-batch whose `parts` have accumulated their gradients is skipped: the mean ratio of one part is above
    /// `ratio_threshold`. The gradients are then cleared.
    fn skips_step(&mut self, parts: &mut [StepStats]) -> bool {
        let most = self.settings.update.ratio_threshold;
        let far = |part: &StepStats| most.is_some_and(|most| part.ratio > most * part.tokens);
        // An infinite ratio counts as far, even if it makes the loss not finite.
        let finite = |part: &StepStats| {
            part.not_finite().is_none() || (part.ratio == f64::INFINITY && part.value_loss.is_finite())
        };
        // The sums are those of all ranks, so all ranks decide alike.
        let skips = parts.iter().any(far) && parts.iter().all(finite);
        if skips {
            for part in parts.iter_mut() {
                part.skipped = true;
                part.policy_loss = if part.policy_loss.is_finite() { part.policy_loss } else { 0.0 };
            }
            self.zero_grad();
        }
        skips
    }

    /// Divides the gradients accumulated over `parts` parts by their number.
    fn average_over(&mut self, parts: usize, trains: TrainedModels) {
        if parts == 1 {
            return;
        }
        let share = (parts as f64).recip();
        if trains.policy() {
            self.optimizers.policy.scale_grad(share);
        }
        self.optimizers.value.iter_mut().filter(|_| trains.value()).for_each(|optimizer| optimizer.scale_grad(share));
    }

    /// [`Learner::step`] with the gradients of all `parts`; one part that is not finite skips the step.
    fn step_with_parts(&mut self, parts: &mut [StepStats], rates: LearningRates, trains: TrainedModels) -> Result<()> {
        let at = parts.iter().position(|part| part.not_finite().is_some()).unwrap_or(parts.len() - 1);
        let before = self.optimizers.policy.steps();
        self.step_models(trains, rates, &mut parts[at])?;
        self.control_entropy(before, parts);
        let norms = (parts[at].policy_grad_norm, parts[at].value_grad_norm);
        parts.iter_mut().for_each(|part| (part.policy_grad_norm, part.value_grad_norm) = norms);
        Ok(())
    }

    /// The norm of each parameter's gradient, before clipping; the policy's only if it is trained.
    fn gradients_by_name(&self, trains_policy: bool) -> Gradients {
        let [policy_scale, value_scale] = self.loss_scales();
        let norms = |optimizer: &Optimizer, scale: f64| {
            optimizer.grad_norms().into_iter().map(|(name, norm)| (name, norm / scale)).collect()
        };
        Gradients {
            policy: if trains_policy { norms(&self.optimizers.policy, policy_scale) } else { Vec::new() },
            value: self.optimizers.value.as_ref().map_or(Vec::new(), |optimizer| norms(optimizer, value_scale)),
        }
    }

    /// Loss scales of policy and value model.
    fn loss_scales(&self) -> [f64; 2] {
        let Some(scaling) = &self.optimizers.scaling else { return [1.0; 2] };
        // The losses of a shared trunk make one gradient, so they have one scale.
        [&scaling.policy, scaling.value.as_ref().unwrap_or(&scaling.policy)].map(LossScaler::scale)
    }

    /// Takes one optimizer step with the accumulated gradients, clears them, and records their norms in `stats`.
    ///
    /// Where a loss or a norm is not finite, the policy does not move and its optimizer state does not change: see
    /// [`StepStats::not_finite`]; a value model takes its step if its own loss and norm are finite. In f16 a model whose gradients
    /// overflow skips the step, and with `align_overflow` both do.
    ///
    /// # Errors
    /// If a rate is below 0 or not finite, or a setting of an optimizer is out of its range: then nothing has changed. If libtorch refuses
    /// the step.
    pub fn step(&mut self, rates: LearningRates, stats: &mut StepStats) -> Result<()> {
        self.check_optimizers()?;
        let rates = rates.checked(RATES)?;
        let before = self.optimizers.policy.steps();
        self.step_models(TrainedModels::with_policy(rates.policy.is_some()), rates, stats)?;
        self.control_entropy(before, std::slice::from_ref(stats));
        Ok(())
    }

    /// The coefficient of the entropy bonus in the next step.
    fn entropy_coef(&self) -> f64 {
        let constant = self.settings.update.loss.entropy_coef;
        self.entropy_controller.as_ref().map_or(constant, EntropyController::applied)
    }

    /// Gives the entropy of the tokens of `parts` to the controller, if the policy has taken a step; `before` is its number of steps
    /// before.
    fn control_entropy(&mut self, before: i64, parts: &[StepStats]) {
        let sum = |number: fn(&StepStats) -> f64| parts.iter().map(number).sum::<f64>();
        let tokens = sum(|part| part.bonus_tokens);
        if self.optimizers.policy.steps() > before
            && tokens > 0.0
            && let Some(controller) = &mut self.entropy_controller
        {
            controller.observe(sum(|part| part.bonus_entropy) / tokens);
        }
    }

    /// [`Learner::step`] of the models in `trains`.
    fn step_models(&mut self, trains: TrainedModels, rates: LearningRates, stats: &mut StepStats) -> Result<()> {
        let [policy_scale, value_scale] = self.loss_scales();
        if trains.policy() {
            self.optimizers.policy.reduce_gradients(&self.world)?;
            stats.policy_grad_norm = self.optimizers.policy.grad_norm()? / policy_scale;
        }
        if let Some(optimizer) = self.optimizers.value.as_mut().filter(|_| trains.value()) {
            optimizer.reduce_gradients(&self.world)?;
            stats.value_grad_norm = optimizer.grad_norm()? / value_scale;
        }
        self.observed(|| Learned::Gradients(self.gradients_by_name(trains.policy())));
        let align = self.optimizers.scaling.as_ref().is_some_and(|scaling| scaling.align);
        self.optimizers.scaling.iter_mut().for_each(|scaling| scaling.record(trains.policy(), stats));
        let named = |model| move |e: Error| Error::Run(format!("{model}: {e}"));
        let skips_both = align && (stats.policy_overflowed || stats.value_overflowed);
        let moves_policy = trains.policy() && stats.not_finite().is_none() && !stats.policy_overflowed && !skips_both;
        match rates.policy.filter(|_| moves_policy) {
            Some(lr) => {
                self.optimizers.policy.unscale(policy_scale);
                self.optimizers.policy.step_of_norm(lr, stats.policy_grad_norm).map_err(named("policy"))?;
                if let Some(ema) = &mut self.ema {
                    ema.update(&self.policy);
                }
            }
            None => self.optimizers.policy.zero_grad(),
        }
        let moves_value = trains.value() && stats.values_are_finite() && !stats.value_overflowed && !skips_both;
        match &mut self.optimizers.value {
            Some(optimizer) if moves_value => {
                optimizer.unscale(value_scale);
                optimizer.step_of_norm(rates.value, stats.value_grad_norm).map_err(named("value model"))?;
            }
            Some(optimizer) => optimizer.zero_grad(),
            None => {}
        }
        Ok(())
    }

    /// Accumulates the policy's gradient of the next `rows` blocks of text, if there are any; the last of the `parts` gets their loss.
    fn mix_texts(&mut self, rows: usize, most_rows: usize, parts: &mut [StepStats]) -> Result<()> {
        let [scale, _] = self.loss_scales();
        let (Some(texts), Some(stats)) = (&mut self.unsupervised, parts.last_mut()) else { return Ok(()) };
        let coef = texts.coef() * scale;
        let limits = TextLimits { most_rows, most_tokens: self.micro_batch_tokens, world: &self.world };
        stats.unsup_loss = learn_texts(&self.policy, &texts.take(rows), coef, &limits)?;
        Ok(())
    }

    /// Accumulates the policy's gradient of `coef` times the mean negative log-likelihood of the tokens of `texts`, except each
    /// text's first; returns that mean.
    ///
    /// # Errors
    /// If a text does not fit the policy, or none has two tokens.
    pub fn learn_texts<S: AsRef<[i64]>>(&self, texts: &[S], coef: f64) -> Result<f64> {
        let [scale, _] = self.loss_scales();
        let most_rows = texts.len().max(1);
        let most_tokens = self.micro_batch_tokens;
        learn_texts(&self.policy, texts, coef * scale, &TextLimits { most_rows, most_tokens, world: &self.world })
    }

    /// Clears the gradients of both models.
    pub fn zero_grad(&mut self) {
        self.optimizers.policy.zero_grad();
        self.optimizers.value.iter_mut().for_each(Optimizer::zero_grad);
    }
}

/// Returns the lowest entropy among the share `top` of tokens with the highest of `entropies`.
///
/// Tokens with the same history have the same entropy but for rounding, which must not separate them. Where most tokens are certain, the
/// threshold is itself close to 0, so the tolerance is also bounded by a share of it: otherwise every token would pass.
fn least_entropy(entropies: &mut [f64], top: f64) -> f64 {
    let least = math::quantile(entropies, 1.0 - top);
    let (nats, share) = ENTROPY_ROUNDING;
    // Rounded to f32, in which tensors compare it.
    f64::from((least - nats.min(share * least.max(0.0))) as f32)
}

/// The data of an update.
struct Batch<'a> {
    experience: &'a Experience,
    targets: &'a Targets,
    counts: LossCounts,
    /// The policy is still the one that sampled.
    is_first: bool,
}

/// Refuses a size of 0.
fn check_size(name: &str, size: usize) -> Result<()> {
    if size == 0 {
        return Err(Error::Run(format!("{name} = 0: expected at least 1")));
    }
    Ok(())
}

/// Refuses rows that `experience` does not have.
fn check_rows(experience: &Experience, rows: &[usize]) -> Result<()> {
    let all = experience.rows();
    match rows.iter().find(|&&row| row >= all) {
        Some(row) => Err(Error::Run(format!("expected rows of an experience of {all}, found row {row}"))),
        None => Ok(()),
    }
}

/// Refuses targets of other shapes than those of `experience`.
fn check_targets(experience: &Experience, targets: &Targets) -> Result<()> {
    let expected = [experience.rows() as i64, experience.width()];
    for (name, found) in [("advantages", targets.advantages.size()), ("returns", targets.returns.size())] {
        if found != expected {
            return Err(Error::Run(format!("targets: {name}: expected shape {expected:?}, found {found:?}")));
        }
    }
    Ok(())
}

/// Divides `rows` into passes of at most `most_rows` rows that compute at most `most_tokens` tokens each; a row with more tokens is a pass
/// by itself. With `shares`, first tokens that a row has in common with the row before it in the same pass are computed once.
fn passes<'a>(
    e: &Experience,
    rows: &'a [usize],
    (most_rows, most_tokens): (usize, usize),
    shares: bool,
) -> Vec<&'a [usize]> {
    let shared = if shares { e.shared_lens(rows).unwrap_or_default() } else { Vec::new() };
    let shared: HashMap<usize, usize> = rows.iter().copied().zip(shared).collect();
    micro_batches(rows, most_rows, most_tokens, |row| (e.sequence_len(*row), shared.get(row).copied().unwrap_or(0)))
}

fn build_optimizer<H: ModelHead>(
    model: &PretrainedModel<H>,
    config: &OptimizerConfig,
    settings: &LearnerSettings,
    place: Option<&Offload>,
) -> Result<Optimizer> {
    Ok(Optimizer::of_model(model, config, place)?.with_seed(settings.seed))
}

/// The order of an update's rows in each of its epochs, as [`Learner::optimize`] takes them.
pub fn mini_batch_orders(seed: u64, epochs: usize, update: usize, rows: usize) -> Vec<Vec<usize>> {
    let stream = |epoch| Stream::new(seed, Purpose::MiniBatches, update as u64, epoch);
    (0..epochs as u64).map(|epoch| stream(epoch).permutation(rows)).collect()
}

/// The loss scales of both models, in f16.
#[derive(Debug)]
pub(crate) struct Scaling {
    pub(crate) policy: LossScaler,
    /// Loss scale of a separate value model.
    pub(crate) value: Option<LossScaler>,
    /// An overflow of one model skips the step of both.
    align: bool,
}

/// The state of [`Scaling`] in a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ScalingState {
    policy: LossScaleState,
    value: Option<LossScaleState>,
}

impl Scaling {
    fn new(value: &ValueModel, config: &LossScaleConfig, align: bool) -> Self {
        let scaler = || LossScaler::new(config);
        Self { policy: scaler(), value: value.model().map(|_| scaler()), align }
    }

    /// Records overflows of the gradients whose norms are in `stats`; a loss that is not finite is no overflow.
    fn record(&mut self, trains_policy: bool, stats: &mut StepStats) {
        if !(stats.policy_loss.is_finite() && stats.value_loss.is_finite()) {
            return;
        }
        let overflows = |norm: f64| !norm.is_finite();
        // Under `align_overflow`, only the model that overflowed adjusts its scale.
        let policy_overflows = overflows(stats.policy_grad_norm);
        let value_overflows = overflows(stats.value_grad_norm);
        if trains_policy && (policy_overflows || !(self.align && value_overflows)) {
            stats.policy_overflowed = self.policy.overflows_at(stats.policy_grad_norm);
        }
        if let Some(value) = self.value.as_mut().filter(|_| value_overflows || !(self.align && policy_overflows)) {
            stats.value_overflowed = value.overflows_at(stats.value_grad_norm);
        }
        if stats.policy_overflowed {
            stats.policy_grad_norm = 0.0;
        }
        if stats.value_overflowed {
            stats.value_grad_norm = 0.0;
        }
    }

    /// State for a checkpoint.
    pub(crate) fn state(&self) -> ScalingState {
        ScalingState { policy: self.policy.state(), value: self.value.as_ref().map(LossScaler::state) }
    }

    /// Restores the state that [`Scaling::state`] returned.
    ///
    /// # Errors
    /// If a scale is no number above 0.
    pub(crate) fn load_state(&mut self, state: &ScalingState) -> Result<()> {
        self.policy.load_state(&state.policy)?;
        self.value.as_mut().zip(state.value.as_ref()).map_or(Ok(()), |(value, state)| value.load_state(state))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rl::experience::tests::experience;

    #[test]
    fn the_share_of_high_entropies_is_that_of_the_setting_where_most_tokens_are_certain() {
        // Three of four tokens are certain to rounding; half of all tokens are asked for.
        let certain = [1e-7, 2e-7, 3e-7, 4e-7, 5e-7, 6e-7, 0.5, 0.9];
        let count = |entropies: &[f64], top| {
            let least = least_entropy(&mut entropies.to_vec(), top);
            entropies.iter().filter(|entropy| **entropy as f32 >= least as f32).count()
        };
        assert_eq!([0.25, 0.5, 0.75].map(|top| count(&certain, top)), [2, 4, 6]);
        // Without any entropy all are equal.
        assert_eq!(count(&[0.0; 8], 0.5), 8);
        // Equal but for rounding: all four of 0.7 or none.
        let equal = [0.1, 0.2, 0.7, 0.700_000_1, 0.700_000_2, 0.700_000_1];
        assert_eq!(count(&equal, 0.5), 4);
        let small = [1e-6, 2e-6, 0.002, 0.002_000_000_1, 0.002_000_000_2, 0.002_000_000_1];
        assert_eq!(count(&small, 0.5), 4);
    }

    #[test]
    fn a_pass_computes_no_more_tokens_than_it_may() {
        // Two groups of six responses of 3 tokens to prompts of 10 tokens.
        let mut e = experience(&[3; 12], 6, &[0.0; 12]);
        e.prompts = (0..12).map(|row| vec![row / 6; 10]).collect();
        let rows: Vec<usize> = (0..12).collect();
        for most in [13, 16, 20, 25, 28, 31, 40, 56, 100] {
            for shares in [true, false] {
                let parts = passes(&e, &rows, (12, most), shares);
                assert_eq!(parts.concat(), rows);
                for part in parts {
                    let groups = if part[0] / 6 == part[part.len() - 1] / 6 { 1 } else { 2 };
                    let computed = 3 * part.len() + 10 * if shares { groups } else { part.len() };
                    assert!(computed <= most || part.len() == 1, "{part:?} compute {computed} tokens, at most {most}");
                }
            }
        }
        // 28 tokens are a prompt and six responses.
        assert_eq!(passes(&e, &rows, (12, 28), true), [&rows[..6], &rows[6..]]);
        assert_eq!(passes(&e, &rows, (12, 28), false).len(), 6);
        // Each part computes its prompt.
        assert_eq!(passes(&e, &rows[..6], (12, 19), true), [&rows[..2], &rows[2..4], &rows[4..6]]);
        assert_eq!(passes(&e, &rows, (1, 28), true).len(), 12);
    }
}
