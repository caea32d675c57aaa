//! The update: epochs of mini-batches, losses, gradients and optimizer steps.

use crate::model::{CausalLm, Sampled, TokenLogprobs, ValueModel};
use crate::optim::loss_scale::LossScaler;
use crate::optim::micro_batch::{micro_batch_tokens, micro_batches};
use crate::optim::{AdamW, LearningRates};
use crate::rl::ema::Ema;
use crate::rl::math;
use crate::rl::rollout::{Experience, Targets};
use crate::rl::stats::StepStats;
use crate::rl::unsupervised::{Unsupervised, learn_texts};
use crate::rng::{Purpose, Stream};
use crate::settings::{OptimizerConfig, PpoConfig, PpoPlan, WhitenAdvantages};
use crate::{Error, Result};
use serde_json::{Value, json};
use std::ops::Range;
use tch::{Kind, Tensor};

/// An update's epochs end early beyond this many times `target_kl`; as TRL 0.11.
const EARLY_STOP: f64 = 1.5;

/// What learns: the policy, and what says the values, which is a model of its own with an optimizer of its own, or a head on
/// the policy's trunk, whose optimizer is the policy's.
#[derive(Debug)]
pub struct Learner {
    /// The policy.
    pub policy: CausalLm,
    /// The value model.
    pub value: ValueModel,
    /// A moving average of the policy, where the settings ask for one.
    pub ema: Option<Ema>,
    /// Texts that are mixed into the policy's steps.
    pub unsupervised: Option<Unsupervised>,
    pub(crate) policy_optimizer: AdamW,
    /// Of a value model of its own.
    pub(crate) value_optimizer: Option<AdamW>,
    /// What the losses are scaled by, where the models compute in f16.
    pub(crate) scaling: Option<Scaling>,
    /// Most tokens that go through a model at once.
    pub(crate) micro_batch_tokens: usize,
}

impl Learner {
    /// Makes `policy` and `value` trainable, with fresh optimizers; a value head is one on this policy's trunk.
    pub fn new(mut policy: CausalLm, value: impl Into<ValueModel>, config: &PpoConfig) -> Self {
        let mut value = value.into();
        policy.set_trainable(true);
        policy.set_gradient_checkpointing(config.run.gradient_checkpointing);
        if let Some(value) = value.model_mut() {
            value.set_trainable(true);
            value.set_gradient_checkpointing(config.run.gradient_checkpointing);
        }
        let of_value = |on| value.model().map_or(0, |value| value.activation_bytes(on));
        let activation_bytes = |on| policy.activation_bytes(on).max(of_value(on));
        let micro_batch_tokens = micro_batch_tokens(&config.run, policy.device(), policy.params(), activation_bytes);
        let policy_optimizer = AdamW::new(policy.trainable_params(), &config.optimizer);
        let value_optimizer =
            value.model().map(|value| AdamW::new(value.trainable_params(), &config.value_optimizer().1));
        let ema = config.ema.enable_ema.then(|| Ema::new(&policy, config.ema.ema_beta));
        let scaling = config.run.fp16.then(|| Scaling::new(&value, config));
        let unsupervised = None;
        Self { policy, value, ema, unsupervised, policy_optimizer, value_optimizer, scaling, micro_batch_tokens }
    }

    /// Gives the models fresh optimizers of these settings in place of the configuration's: betas, epsilon, weight decay and
    /// `max_grad_norm`; learning rates come with every step. A head on the policy's trunk has the policy's optimizer.
    #[must_use]
    pub fn with_optimizers(mut self, policy: &OptimizerConfig, value: &OptimizerConfig) -> Self {
        self.policy_optimizer = AdamW::new(self.policy.trainable_params(), policy);
        self.value_optimizer = self.value.model().map(|model| AdamW::new(model.trainable_params(), value));
        self
    }

    /// Optimizer steps taken, of all models.
    pub(crate) fn steps(&self) -> i64 {
        self.policy_optimizer.steps() + self.value_optimizer.as_ref().map_or(0, AdamW::steps)
    }

    /// Learns from one batch of experience: one pass per entry of `orders`, a permutation of the rows each.
    ///
    /// A pass is `num_mini_batches` optimizer steps of `mini_batch_size` rows. A mini-batch goes through the models in
    /// micro-batches; its losses are sums over them, divided by the token count of the whole mini-batch, so the size of
    /// a micro-batch changes memory and speed and nothing else. Gives one entry per mini-batch.
    ///
    /// Where the plan's `part_size` is less than that, a step goes by the mean of the losses of its parts, each divided by its own
    /// token count, and there is an entry per part.
    ///
    /// Where there are texts to mix in, each mini-batch takes as many of their blocks as it has rows. Where there is a moving
    /// average, it moves with each step of the policy.
    ///
    /// A mini-batch above `ratio_threshold` is skipped. A pass that ends too far from the policy that sampled, by
    /// `target_kl`, is the last. Where `rates` has none for the policy, only the value model learns.
    ///
    /// # Errors
    /// If libtorch refuses a step.
    pub fn optimise(
        &mut self,
        experience: &Experience,
        targets: &Targets,
        orders: &[Vec<usize>],
        rates: LearningRates,
        plan: &PpoPlan,
        config: &PpoConfig,
    ) -> Result<Vec<StepStats>> {
        let mut steps = Vec::new();
        for order in orders {
            for mini_batch in order.chunks(plan.mini_batch_size) {
                let learns = rates.policy.is_some();
                let parts = mini_batch.chunks(plan.part_size);
                let share = (parts.len() as f64).recip();
                let parts =
                    parts.map(|part| self.gradients(experience, targets, part, plan.micro_batch_size, learns, config));
                let mut parts: Vec<StepStats> = parts.collect::<Result<_>>()?;
                parts.iter_mut().rev().skip(1).for_each(|part| part.goes_on = true);
                if self.takes_step(&mut parts, share, config) {
                    let last = parts.last_mut().expect("a mini-batch has rows");
                    if learns {
                        self.mix_texts(mini_batch.len(), plan.micro_batch_size, last)?;
                    }
                    self.step_of_parts(&mut parts, rates)?;
                }
                steps.extend(parts);
            }
            let moved = steps.last().map_or(0.0, |last: &StepStats| last.policy_kl / last.tokens.max(1.0));
            if config.target_kl().is_some_and(|target| moved > EARLY_STOP * target) {
                break;
            }
        }
        Ok(steps)
    }

    /// Whether a mini-batch whose `parts` have added their gradients is learnt from: not if one is above `ratio_threshold`. Makes
    /// their sum what each having its `share` of the loss gives.
    fn takes_step(&mut self, parts: &mut [StepStats], share: f64, config: &PpoConfig) -> bool {
        let far = |part: &StepStats| config.step.ratio_threshold.is_some_and(|most| part.ratio > most * part.tokens);
        // An infinite ratio is far, whatever the loss is by it.
        let sound = |part: &StepStats| {
            part.not_finite().is_none() || (part.ratio == f64::INFINITY && part.value_loss.is_finite())
        };
        if parts.iter().any(far) && parts.iter().all(sound) {
            for part in parts.iter_mut() {
                part.skipped = true;
                part.policy_loss = if part.policy_loss.is_finite() { part.policy_loss } else { 0.0 };
            }
            self.zero_grad();
            return false;
        }
        if parts.len() > 1 {
            self.policy_optimizer.scale_grad(share);
            self.value_optimizer.iter_mut().for_each(|optimizer| optimizer.scale_grad(share));
        }
        true
    }

    /// [`Learner::step`] by the gradients of all `parts`; one that is not finite keeps the others from being learnt.
    fn step_of_parts(&mut self, parts: &mut [StepStats], rates: LearningRates) -> Result<()> {
        let at = parts.iter().position(|part| part.not_finite().is_some()).unwrap_or(parts.len() - 1);
        self.step(rates, &mut parts[at])?;
        let norms = (parts[at].policy_grad_norm, parts[at].value_grad_norm);
        parts.iter_mut().for_each(|part| (part.policy_grad_norm, part.value_grad_norm) = norms);
        Ok(())
    }

    /// Adds the gradients of the losses of one mini-batch to those that the parameters hold; gives its sums.
    ///
    /// `mini_batch` are rows of `experience`, of which at most `micro_batch_size` go through the models at a time;
    /// without `learns_policy` only through the value model.
    ///
    /// # Errors
    /// If a row does not fit the models.
    pub fn gradients(
        &self,
        experience: &Experience,
        targets: &Targets,
        mini_batch: &[usize],
        micro_batch_size: usize,
        learns_policy: bool,
        config: &PpoConfig,
    ) -> Result<StepStats> {
        let mut stats = StepStats::default();
        let count = |mask: &Tensor| number(&mask.index_select(0, &row_index(mini_batch, mask)).sum(Kind::Double));
        if learns_policy {
            stats.tokens = count(&experience.loss_mask);
        }
        stats.value_slots = count(&experience.value_loss_mask);
        let advantages = match config.whiten_advantages {
            WhitenAdvantages::MiniBatch => whiten_rows(&targets.advantages, mini_batch, &experience.loss_mask),
            WhitenAdvantages::Batch | WhitenAdvantages::None => targets.advantages.shallow_clone(),
        };
        let tokens = |&row: &usize| experience.sequences[row].len();
        for micro_batch in micro_batches(mini_batch, micro_batch_size, self.micro_batch_tokens, tokens) {
            self.accumulate(experience, targets, &advantages, micro_batch, learns_policy, &mut stats, config)?;
        }
        Ok(stats)
    }

    /// What the losses of policy and value model are multiplied by on the way back.
    fn loss_scales(&self) -> [f64; 2] {
        let Some(scaling) = &self.scaling else { return [1.0; 2] };
        // What a trunk's two heads send back is one gradient.
        [&scaling.policy, scaling.value.as_ref().unwrap_or(&scaling.policy)].map(LossScaler::scale)
    }

    /// Takes one optimizer step by the gradients that the parameters hold, clears these, and notes their norms in `stats`.
    ///
    /// Where a loss or a norm is not finite neither model moves, and no optimizer state changes:
    /// [`StepStats::not_finite`] tells. In f16 a model whose gradients overflow stays where it is, and with `align_overflow`
    /// the other too.
    ///
    /// # Errors
    /// If libtorch refuses the step.
    pub fn step(&mut self, rates: LearningRates, stats: &mut StepStats) -> Result<()> {
        let [of_policy, of_value] = self.loss_scales();
        if rates.policy.is_some() {
            stats.policy_grad_norm = self.policy_optimizer.grad_norm() / of_policy;
        }
        stats.value_grad_norm = self.value_optimizer.as_ref().map_or(0.0, AdamW::grad_norm) / of_value;
        let align = self.scaling.as_ref().is_some_and(|scaling| scaling.align);
        self.scaling.iter_mut().for_each(|scaling| scaling.note(rates.policy.is_some(), stats));
        if stats.not_finite().is_some() {
            self.zero_grad();
            return Ok(());
        }
        let named = |model| move |e: Error| Error::Run(format!("{model}: {e}"));
        let both = align && (stats.policy_overflowed || stats.value_overflowed);
        if let Some(lr) = rates.policy.filter(|_| !stats.policy_overflowed && !both) {
            self.policy_optimizer.unscale(of_policy);
            self.policy_optimizer.step_of_norm(lr, stats.policy_grad_norm).map_err(named("policy"))?;
            if let Some(ema) = &mut self.ema {
                ema.update(&self.policy);
            }
        }
        if let Some(optimizer) = self.value_optimizer.as_mut().filter(|_| !stats.value_overflowed && !both) {
            optimizer.unscale(of_value);
            optimizer.step_of_norm(rates.value, stats.value_grad_norm).map_err(named("value model"))?;
        }
        self.zero_grad();
        Ok(())
    }

    /// Adds the gradient of the next `rows` blocks of text, if there are any, to that of the policy.
    fn mix_texts(&mut self, rows: usize, most_rows: usize, stats: &mut StepStats) -> Result<()> {
        let [scale, _] = self.loss_scales();
        let Some(texts) = &mut self.unsupervised else { return Ok(()) };
        let coef = texts.coef() * scale;
        stats.unsup_loss = learn_texts(&self.policy, &texts.take(rows), coef, most_rows, self.micro_batch_tokens)?;
        Ok(())
    }

    /// Adds the gradient of `coef` times the mean negative log-likelihood of the tokens of `texts`, each one's first aside, to
    /// that of the policy; gives that mean.
    ///
    /// # Errors
    /// If a text does not fit the policy, or none has two tokens.
    pub fn learn_texts<S: AsRef<[i64]>>(&self, texts: &[S], coef: f64) -> Result<f64> {
        let [scale, _] = self.loss_scales();
        learn_texts(&self.policy, texts, coef * scale, texts.len().max(1), self.micro_batch_tokens)
    }

    /// Clears the gradients of all models.
    pub fn zero_grad(&mut self) {
        self.policy_optimizer.zero_grad();
        self.value_optimizer.iter_mut().for_each(AdamW::zero_grad);
    }

    /// Adds the gradients of one micro-batch's share of the losses over the mini-batch, and its share of the sums.
    #[expect(clippy::too_many_arguments, reason = "all that a mini-batch knows")]
    fn accumulate(
        &self,
        experience: &Experience,
        targets: &Targets,
        advantages: &Tensor,
        rows: &[usize],
        learns_policy: bool,
        stats: &mut StepStats,
        config: &PpoConfig,
    ) -> Result<()> {
        let sequences: Vec<&Vec<i64>> = rows.iter().map(|&row| &experience.sequences[row]).collect();
        let token_spans: Vec<_> = rows.iter().map(|&row| experience.token_span(row)).collect();
        let value_spans: Vec<_> = rows.iter().map(|&row| experience.value_span(row)).collect();

        let lengths = rows.iter().map(|&row| experience.lengths[row]).collect::<Vec<_>>();
        let mine = |x: &Tensor| packed(x, &lengths, rows);
        let (old, advantages, counts) = (mine(&experience.logprobs), mine(advantages), mine(&experience.loss_mask));
        let reference = config.kl.kl_in_loss.then(|| mine(&experience.ref_logprobs));
        let (clip, [policy_scale, value_scale]) = (config.policy_clip(), self.loss_scales());
        let sets = experience.sets_of(rows.iter().copied());
        let sampled = Sampled { temperature: config.logprob_temperature(), sets: sets.as_deref() };
        let policy_loss = |tokens: Range<i64>, now: &TokenLogprobs| {
            let here = |x: &Tensor| x.narrow(0, tokens.start, tokens.end - tokens.start);
            let counts = here(&counts);
            let loss = math::policy_loss(&now.logprobs, &here(&old), &here(&advantages), &counts, clip);
            stats.policy_loss += number(&loss.sum);
            stats.policy_clipped += number(&loss.clipped);
            stats.dual_clipped += number(&loss.dual_clipped);
            stats.approx_kl += number(&loss.approx_kl);
            stats.policy_kl += number(&loss.policy_kl);
            stats.ratio += number(&loss.ratio.sum(Kind::Float));
            stats.ratio_squared += number(&loss.ratio.square().sum(Kind::Float));
            stats.ratios.extend(numbers(&loss.ratio.masked_select(&counts)));
            let sum = match &reference {
                Some(reference) => {
                    let estimate = || math::kl(&now.logprobs, &here(reference), &counts, config.kl_estimator);
                    let kl = now.kl.as_ref().map_or_else(estimate, |kl| math::keep(kl, &counts)).sum(Kind::Float);
                    stats.ref_kl += number(&kl);
                    loss.sum + kl * targets.kl_coef
                }
                None => loss.sum,
            };
            let sum = match &now.entropy {
                Some(entropy) if config.step.entropy_coef > 0.0 => {
                    sum - math::masked_sum(entropy, &counts) * config.step.entropy_coef
                }
                _ => sum,
            };
            // Where nothing counts, nothing is learnt.
            sum / (stats.tokens.max(1.0) / policy_scale)
        };

        let lengths = rows.iter().map(|&row| experience.value_counts[row]).collect::<Vec<_>>();
        let mine = |x: &Tensor| packed(x, &lengths, rows);
        let (old_values, returns, of_value) =
            (mine(&experience.values), mine(&targets.returns), mine(&experience.value_loss_mask));
        let value_loss = |values: &Tensor| {
            let loss = math::value_loss(values, &old_values, &returns, &of_value, config.cliprange_value);
            stats.value_loss += number(&loss.sum);
            stats.value_clipped += number(&loss.clipped);
            let values = values.detach();
            stats.value += number(&math::masked_sum(&values, &of_value));
            stats.value_error += number(&math::masked_sum(&(&values - &returns).square(), &of_value));
            loss.sum * (config.vf_coef / stats.value_slots.max(1.0) * value_scale)
        };

        let new = match &self.value {
            ValueModel::Head(_) if experience.reference.is_some() => {
                return Err(Error::Run("kl_in_loss with kl_estimator = full needs a value model of its own".into()));
            }
            ValueModel::Head(head) => Some(head.learn(
                &self.policy,
                &sequences,
                &token_spans,
                &value_spans,
                sampled,
                true,
                policy_loss,
                value_loss,
            )?),
            // Two models share nothing, so the policy's activations are gone before the value model's come.
            ValueModel::Model(value) => {
                let policy = &self.policy;
                let new = match (&experience.reference, learns_policy) {
                    (_, false) => None,
                    (Some(reference), true) => {
                        let theirs = (reference, rows);
                        let (spans, loss) = (&token_spans, policy_loss);
                        Some(policy.learn_logprobs_and_kl(&sequences, spans, sampled, true, theirs, loss)?)
                    }
                    (None, true) => {
                        Some(policy.learn_logprobs(&sequences, &token_spans, sampled, true, policy_loss)?)
                    }
                };
                value.learn_values(&sequences, &value_spans, value_loss)?;
                new
            }
        };
        let entropy = new.and_then(|new| new.entropy);
        stats.entropy += entropy.map_or(0.0, |entropy| number(&math::masked_sum(&entropy, &counts)));
        Ok(())
    }
}

/// The loss scales of the two models.
#[derive(Debug)]
pub(crate) struct Scaling {
    pub(crate) policy: LossScaler,
    /// That of a value model of its own.
    pub(crate) value: Option<LossScaler>,
    /// Whether an overflow of one leaves the step of both out.
    pub(crate) align: bool,
}

impl Scaling {
    pub(crate) fn new(value: &ValueModel, config: &PpoConfig) -> Self {
        let scaler = || LossScaler::new(&config.run.loss_scale);
        Self { policy: scaler(), value: value.model().map(|_| scaler()), align: config.half.align_overflow }
    }

    /// Notes overflows of the gradients whose norms `stats` holds; a loss that is not finite is not the scale's doing.
    pub(crate) fn note(&mut self, learns_policy: bool, stats: &mut StepStats) {
        if !(stats.policy_loss.is_finite() && stats.value_loss.is_finite()) {
            return;
        }
        let overflows = |norm: f64| !norm.is_finite();
        // Who only goes along with the other's overflow learns nothing of its own scale.
        let (of_policy, of_value) = (overflows(stats.policy_grad_norm), overflows(stats.value_grad_norm));
        if learns_policy && (of_policy || !(self.align && of_value)) {
            stats.policy_overflowed = self.policy.overflows_at(stats.policy_grad_norm);
        }
        if let Some(value) = self.value.as_mut().filter(|_| of_value || !(self.align && of_policy)) {
            stats.value_overflowed = value.overflows_at(stats.value_grad_norm);
        }
        if stats.policy_overflowed {
            stats.policy_grad_norm = 0.0;
        }
        if stats.value_overflowed {
            stats.value_grad_norm = 0.0;
        }
    }

    pub(crate) fn state(&self) -> Value {
        json!({"policy": self.policy.state(), "value": self.value.as_ref().map(LossScaler::state)})
    }

    pub(crate) fn load_state(&mut self, state: &Value) -> Result<()> {
        self.policy.load_state(&state["policy"])?;
        self.value.as_mut().map_or(Ok(()), |value| value.load_state(&state["value"]))
    }
}

/// The order of an update's `rows` rows in each of its epochs, as [`Learner::optimise`] takes them.
pub fn mini_batch_orders(config: &PpoConfig, update: usize, rows: usize) -> Vec<Vec<usize>> {
    let epochs = 0..config.num_ppo_epochs as u64;
    let stream = |epoch| Stream::new(config.run.seed, Purpose::MiniBatches, update as u64, epoch);
    epochs.map(|epoch| stream(epoch).permutation(rows)).collect()
}

/// The first `counts` slots of `rows` of `x`, row after row: as the models give their numbers.
fn packed(x: &Tensor, counts: &[i64], rows: &[usize]) -> Tensor {
    let slots = math::response_mask(counts, x.size()[1], x.device());
    x.index_select(0, &row_index(rows, x)).masked_select(&slots)
}

/// `x` whitened over the counted slots of `rows` alone; 0 in other rows.
fn whiten_rows(x: &Tensor, rows: &[usize], mask: &Tensor) -> Tensor {
    let index = row_index(rows, x);
    let theirs = mask.zeros_like().index_copy(0, &index, &mask.index_select(0, &index));
    math::whiten(x, &theirs, true)
}

fn row_index(rows: &[usize], like: &Tensor) -> Tensor {
    Tensor::from_slice(&rows.iter().map(|&row| row as i64).collect::<Vec<_>>()).to_device(like.device())
}

fn number(x: &Tensor) -> f64 {
    x.double_value(&[])
}

fn numbers(x: &Tensor) -> Vec<f32> {
    Vec::try_from(x).expect("a vector of f32")
}
