//! Optimizers, gradient clipping, learning-rate schedules.

mod adafactor;
mod blocks;
pub mod loss_scale;
pub mod micro_batch;
mod norms;
mod parts;
mod rounding;
pub mod settings;
mod shared_gradients;
mod state;

pub use settings::{DecayType, LrSchedulerType, Optim, OptimizerConfig};

use crate::model::{ModelHead, Param, PretrainedModel, Shards};
pub use norms::norm;
use parts::Parts;
use rlhf_base::dist::World;
use rlhf_base::offload::{InUse, Offload, Offloaded};
use rlhf_base::weights::{Checkpoint, save_file};
use rlhf_base::{Error, Result};
pub use shared_gradients::{GradientSize, SharedGradients};
pub use state::state_bytes;
use state::{State, Step, Together};
use std::path::Path;
use tch::{Kind, Tensor};

/// The name of the state in errors about lack of room.
const STATE: &str = "optimizer state";

/// Name of the number of steps in a saved state.
const STEPS: &str = "step";

/// The optimizer of one model's parameters; weight decay spares biases and norms (see [`Param::decay`]).
#[derive(Debug)]
pub struct Optimizer {
    config: OptimizerConfig,
    /// Parameters with weight decay, then those without; none if the state is divided.
    params: Vec<Trained>,
    /// The division of the model over ranks, if it is divided and each rank has the whole optimizer state.
    shards: Option<Shards>,
    /// The parts of this rank, in place of `params`, if the state is divided.
    parts: Option<Parts>,
    /// The state, if it is in memory only during steps.
    offloaded: Option<Offloaded>,
    steps: i64,
    /// Seed of random numbers.
    seed: u64,
    /// The ranks over which gradients were summed last.
    world: World,
}

/// A parameter with its state.
#[derive(Debug)]
struct Trained {
    name: String,
    tensor: Tensor,
    decay: bool,
    state: State,
}

impl Optimizer {
    /// Creates an optimizer of `params`, which share memory with the model's.
    pub fn new<'a>(params: impl IntoIterator<Item = &'a Param>, config: &OptimizerConfig) -> Self {
        Self::build(params, config, None).expect("a state that stays in memory needs no file")
    }

    /// [`Optimizer::new`], with a state that is offloaded if there is a place for it.
    fn build<'a>(
        params: impl IntoIterator<Item = &'a Param>,
        config: &OptimizerConfig,
        place: Option<&Offload>,
    ) -> Result<Self> {
        let mut ordered: Vec<&Param> = params.into_iter().collect();
        ordered.sort_by_key(|param| !param.decay);
        let room = |place: &Offload| match ordered.first() {
            Some(first) => {
                let sizes = ordered.iter().flat_map(|param| state::sizes(config.optim, param));
                place.room(STATE, first.tensor.device(), sizes).map(Some)
            }
            None => Ok(None),
        };
        let offloaded = place.map_or(Ok(None), room)?;
        let trained = |param: &&Param| {
            let state = State::new(param, config.optim);
            if let Some(offloaded) = &offloaded {
                offloaded.put(state.tensors().map(|(_, tensor)| tensor))?;
            }
            let tensor = param.tensor.shallow_clone();
            Ok(Trained { name: param.name.clone(), tensor, decay: param.decay, state })
        };
        let params = ordered.iter().map(trained).collect::<Result<_>>()?;
        // The state that was put last is offloaded too.
        offloaded.as_ref().map_or(Ok(()), Offloaded::leave)?;
        Ok(Self {
            config: config.clone(),
            params,
            shards: None,
            parts: None,
            offloaded,
            steps: 0,
            seed: 0,
            world: World::single(),
        })
    }

    /// Sets the seed of the random numbers by which [`Optim::AdamwBf16`] rounds; a step depends on it and on the step's number.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Creates an optimizer of the trained parameters of a model, which may be divided over ranks. With a place to `offload` to, the
    /// state is in memory only during steps; a divided state of a model on a GPU stays in host memory, where the step is computed.
    ///
    /// # Errors
    /// If there is not enough memory or disk space for the optimizer state.
    pub fn of_model<H: ModelHead>(
        model: &PretrainedModel<H>,
        config: &OptimizerConfig,
        offload: Option<&Offload>,
    ) -> Result<Self> {
        let (params, shards) = (model.trainable_params(), model.shards());
        Ok(match shards.stage() {
            None => Self::build(params, config, offload)?,
            Some(stage) if !stage.shards_optimizer() => {
                Self { shards: Some(shards.clone()), ..Self::build(params, config, offload)? }
            }
            Some(_) => {
                let (parts, offloaded) = Parts::new(shards, offload)?;
                Self { parts: Some(parts), offloaded, ..Self::new([], config) }
            }
        })
    }

    /// Whether the state is elsewhere than the parameters, except during steps.
    pub fn is_offloaded(&self) -> bool {
        self.offloaded.is_some() || self.parts.as_ref().is_some_and(Parts::is_on_host)
    }

    /// Brings an offloaded state into memory.
    fn in_use(&self) -> Result<Option<InUse>> {
        self.offloaded.as_ref().map(Offloaded::in_use).transpose()
    }

    /// The division of the model over ranks.
    fn shards(&self) -> Option<&Shards> {
        self.shards.as_ref().or(self.parts.as_ref().map(|parts| &parts.shards))
    }

    /// Takes one step at the learning rate `lr` and clears the gradients; returns their norm before any clipping.
    ///
    /// Gradients are first scaled down to the norm `max_grad_norm`, where it is set, over this model's parameters together.
    ///
    /// # Errors
    /// If the norm is not finite; the parameters are then unchanged.
    pub fn step(&mut self, lr: f64) -> Result<f64> {
        let norm = self.grad_norm()?;
        if !norm.is_finite() {
            self.zero_grad();
            return Err(Error::Run(format!(
                "optimizer step {}: the gradient's norm is {norm}: training diverged; a lower learning_rate and \
                 max_grad_norm = 1 from the start prevent it",
                self.steps + 1
            )));
        }
        self.step_of_norm(lr, norm)?;
        Ok(norm)
    }

    /// Returns the norm of all gradients of this model's parameters together; not finite if one of them is not. After
    /// [`Optimizer::reduce_gradients`] all ranks call it, and get the same number.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub fn grad_norm(&self) -> Result<f64> {
        if let Some(parts) = &self.parts {
            return parts.grad_norm();
        }
        let grads: Vec<Tensor> = self.params.iter().map(Trained::grad).collect();
        // All ranks use rank 0's norm: ranks whose processors round differently would clip equal gradients differently, and drift apart.
        let mut total = [norm(&grads)];
        self.world.broadcast_numbers(&mut total)?;
        Ok(total[0])
    }

    /// Returns the norm of the gradient of each parameter, by name; none where the state is divided over ranks.
    pub fn grad_norms(&self) -> Vec<(String, f64)> {
        self.params.iter().map(|param| (param.name.clone(), norm([&param.grad()]))).collect()
    }

    /// Sums the gradients over all ranks; called once per optimizer step, before the norm. Gradients of a model that is divided
    /// over ranks are in flat memory; gradients of another model are copied there, in one collective per group.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub fn reduce_gradients(&mut self, world: &World) -> Result<()> {
        self.world = world.clone();
        if let Some(shards) = self.shards() {
            return shards.reduce_gradients();
        }
        if world.size() == 1 {
            return Ok(());
        }
        for group in self.params.chunk_by(|a, b| a.decay == b.decay) {
            let grads: Vec<Tensor> = group.iter().map(Trained::grad).collect();
            let flat: Vec<Tensor> = grads.iter().map(|grad| grad.reshape([-1]).to_kind(Kind::Float)).collect();
            let mut flat = Tensor::cat(&flat, 0);
            world.sum(&mut flat)?;
            let mut start = 0;
            for (param, grad) in group.iter().zip(&grads) {
                let sum = flat.narrow(0, start, grad.numel() as i64).view_as(grad);
                start += grad.numel() as i64;
                tch_ext::set_grad(&param.tensor, &sum.to_kind(grad.kind()).copy()).map_err(Error::Run)?;
            }
        }
        Ok(())
    }

    /// Returns the bytes of the state of every parameter, of a state that is not divided.
    #[cfg(test)]
    pub fn state_bytes(&self) -> usize {
        let tensors = self.params.iter().flat_map(|param| param.state.tensors());
        tensors.map(|(_, tensor)| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum()
    }

    /// Returns the sum of the bits of each parameter that this rank holds whole, by name.
    pub fn bit_sums(&self) -> Vec<(String, i64)> {
        let bits = |param: &Tensor| if param.kind() == Kind::Float { Kind::Int } else { Kind::Int16 };
        let sum = |param: &Tensor| param.detach().view_dtype(bits(param)).sum(Kind::Int64).int64_value(&[]);
        match &self.parts {
            Some(parts) => {
                parts.shards.whole_trained().iter().map(|(name, param)| (name.clone(), sum(param))).collect()
            }
            None => self.params.iter().map(|param| (param.name.clone(), sum(&param.tensor))).collect(),
        }
    }

    /// Divides the gradients of this model's parameters by `scale`.
    pub fn unscale(&mut self, scale: f64) {
        if scale != 1.0 {
            self.scale_grad(scale.recip());
        }
    }

    /// Takes a step as [`Optimizer::step`] does, with the gradients' norm `norm`, which the caller has checked to be finite.
    ///
    /// # Errors
    /// If libtorch refuses the step.
    pub fn step_of_norm(&mut self, lr: f64, norm: f64) -> Result<()> {
        if let Some(most) = self.config.max_grad_norm {
            let scale = most / (norm + 1e-6);
            if scale < 1.0 {
                self.scale_grad(scale);
            }
        }
        let state = self.in_use();
        let _state = match &self.parts {
            // A rank that cannot read its part would leave the others waiting in the collectives of the step.
            Some(parts) if self.offloaded.is_some() => parts.shards.world().agree(state)?,
            _ => state?,
        };
        self.steps += 1;
        if let Some(parts) = &mut self.parts {
            parts.step(lr, &self.config, self.steps)?;
            self.zero_grad();
            return Ok(());
        }
        let number = self.steps;
        let failed = |e| Error::Run(format!("optimizer step {number}: {e}"));
        let mut index = 0;
        for group in self.params.chunk_by_mut(|a, b| a.decay == b.decay) {
            let weight_decay = if group[0].decay { self.config.weight_decay } else { 0.0 };
            let settings = self.config.step(lr, weight_decay);
            let mut together = Together::default();
            for param in group {
                let step = Step { number, settings, seed: self.seed, index };
                let grad = param.grad();
                param.state.step(&param.tensor, grad, step, &mut together).map_err(failed)?;
                index += 1;
            }
            together.step(number, settings).map_err(failed)?;
        }
        self.zero_grad();
        Ok(())
    }

    /// Returns the number of steps taken.
    pub fn steps(&self) -> i64 {
        self.steps
    }

    /// Writes the state of every parameter, with AdamW both moments as `NAME.exp_avg` and `NAME.exp_avg_sq`, and the number of
    /// steps to one safetensors file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let _state = self.in_use()?;
        if let Some(parts) = &self.parts {
            return parts.save(path, self.steps);
        }
        let mut tensors = vec![(STEPS.to_string(), Tensor::from_slice(&[self.steps as f64]))];
        for Trained { name, state, .. } in &self.params {
            tensors.extend(state.tensors().map(|(part, tensor)| (format!("{name}.{part}"), tensor.shallow_clone())));
        }
        save_file(path, &tensors)
    }

    /// Loads the state that [`Optimizer::save`] wrote for the same parameters.
    ///
    /// # Errors
    /// If the file cannot be read, or belongs to other parameters.
    pub fn load(&mut self, path: &Path) -> Result<()> {
        let _state = self.in_use()?;
        let file = Checkpoint::open_file(path)?;
        let whole = || 1 + self.params.iter().map(|param| param.state.tensors().count()).sum::<usize>();
        let expected = self.parts.as_ref().map_or_else(whole, Parts::num_saved);
        let found = file.names().count();
        if found != expected {
            return Err(Error::invalid(
                path,
                format!("expected an optimizer's state of {expected} tensors, found {found}"),
            ));
        }
        for Trained { name, state, .. } in &self.params {
            for (part, tensor) in state.tensors() {
                let name = format!("{name}.{part}");
                check_shape(&file, path, &name, &tensor.size())?;
                let saved = file.read_stored(&name, tensor.device())?;
                let (expected, found) = (tensor.kind(), saved.kind());
                if found != expected {
                    let message = format!("tensor `{name}`: expected dtype {expected:?}, found {found:?}");
                    return Err(Error::invalid(path, message));
                }
                tensor.shallow_clone().copy_(&saved);
            }
        }
        if let Some(parts) = &mut self.parts {
            parts.load(&file, path)?;
        }
        self.steps = file.read(STEPS, tch::Device::Cpu, Kind::Double)?.double_value(&[0]) as i64;
        Ok(())
    }

    /// Multiplies the gradients by `factor`.
    pub fn scale_grad(&mut self, factor: f64) {
        if let Some(shards) = self.shards() {
            return shards.scale_gradients(factor);
        }
        for grad in self.params.iter().map(|param| param.tensor.grad()) {
            if grad.defined() {
                let _ = tch::no_grad(|| grad.shallow_clone().g_mul_scalar_(factor));
            }
        }
    }

    /// Clears the gradients without a step.
    pub fn zero_grad(&mut self) {
        if let Some(shards) = self.shards() {
            return shards.zero_gradients();
        }
        for mut grad in self.params.iter().map(|param| param.tensor.grad()).filter(Tensor::defined) {
            // Not `Tensor::zero_grad`, which refuses gradients that are views of a larger tensor.
            let _ = tch::no_grad(|| grad.zero_());
        }
    }

    /// Returns the sizes of the gradients that this rank keeps between passes: one per parameter, or per vector of a model that ranks
    /// train together; none where gradients are sharded.
    pub fn gradient_sizes(&self) -> Vec<GradientSize> {
        match self.shards() {
            Some(shards) => shards.gradient_sizes(),
            None => self.params.iter().map(|param| (param.tensor.numel(), param.tensor.kind())).collect(),
        }
    }

    /// Makes the vectors `grads`, which are zero and of [these sizes](Optimizer::gradient_sizes), the memory of the gradients.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub fn use_gradients(&mut self, grads: Vec<Tensor>) -> Result<()> {
        if let Some(shards) = self.shards() {
            return shards.use_gradients(grads);
        }
        let mut pairs = self.params.iter().zip(grads);
        pairs.try_for_each(|(param, grad)| {
            tch_ext::set_grad(&param.tensor, &grad.view_as(&param.tensor)).map_err(Error::Run)
        })
    }

    /// Frees the gradients. A backward pass allocates new ones.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub fn release_gradients(&mut self) -> Result<()> {
        if let Some(shards) = self.shards() {
            return shards.release_gradients();
        }
        self.params.iter().try_for_each(|param| tch_ext::clear_grad(&param.tensor).map_err(Error::Run))
    }
}

/// Checks that the saved state `file`, which is at `path`, has a tensor `name` of this shape.
fn check_shape(file: &Checkpoint, path: &Path, name: &str, expected: &[i64]) -> Result<()> {
    let found = file.shape(name);
    if found.as_deref() == Some(expected) {
        return Ok(());
    }
    Err(Error::invalid(path, format!("tensor `{name}`: expected {expected:?}, found {found:?}")))
}

impl Trained {
    /// Returns the gradient; 0 where there is none.
    fn grad(&self) -> Tensor {
        let grad = self.tensor.grad();
        if grad.defined() { grad } else { self.tensor.detach().zeros_like() }
    }
}

/// Default final learning rate of the schedule `polynomial`, as in transformers.
const POLYNOMIAL_END: f64 = 1e-7;

/// Number of updates after which `inverse_sqrt` has fallen to 1 / sqrt(2) without a warm-up, as in transformers.
const INVERSE_SQRT_TIMESCALE: usize = 10_000;

/// Returns the learning rate of update `update` (from 0) of `num_updates`, with the peak `peak`.
///
/// Source: transformers' schedules of the same names; `lr_end` is the final rate of `linear` and `cosine` too.
pub fn learning_rate(peak: f64, config: &OptimizerConfig, update: usize, num_updates: usize) -> f64 {
    let schedule = config.lr_scheduler_type;
    if schedule == LrSchedulerType::Constant {
        return peak;
    }
    let warmup = match config.warmup_steps {
        0 => (config.warmup_ratio * num_updates as f64).ceil() as usize,
        steps => steps,
    };
    let end = end_rate(peak, config);
    if update < warmup {
        let start = if schedule == LrSchedulerType::WarmupStableDecay { end } else { 0.0 };
        return start + (peak - start) * (update as f64 / warmup as f64);
    }
    let progress = (update - warmup) as f64 / (num_updates.saturating_sub(warmup)).max(1) as f64;
    let left = match schedule {
        LrSchedulerType::Linear => (1.0 - progress).max(0.0),
        LrSchedulerType::Cosine | LrSchedulerType::CosineWithMinLr => cosine(config, progress.min(1.0)),
        LrSchedulerType::CosineWithRestarts if progress >= 1.0 => 0.0,
        LrSchedulerType::CosineWithRestarts => {
            let cycle = (config.num_cycles.unwrap_or(1.0) * progress) % 1.0;
            0.5 * (1.0 + (std::f64::consts::PI * cycle).cos())
        }
        LrSchedulerType::WarmupStableDecay => {
            let decay_steps = config.num_decay_steps.unwrap_or(0) as f64;
            let over = ((update as f64 + decay_steps - num_updates as f64) / decay_steps.max(1.0)).clamp(0.0, 1.0);
            match config.decay_type {
                DecayType::Cosine => cosine(config, over),
                DecayType::Linear => 1.0 - over,
                DecayType::OneMinusSqrt => 1.0 - over.sqrt(),
            }
        }
        LrSchedulerType::Polynomial => (1.0 - progress).max(0.0).powf(config.power),
        LrSchedulerType::InverseSqrt => {
            let timescale = if warmup == 0 { INVERSE_SQRT_TIMESCALE } else { warmup } as f64;
            (timescale / ((update - warmup) as f64 + timescale)).sqrt()
        }
        LrSchedulerType::Constant | LrSchedulerType::ConstantWithWarmup => 1.0,
    };
    end + (peak - end) * left
}

/// Returns the final learning rate of a schedule with the peak `peak`; 0 if it has none.
fn end_rate(peak: f64, config: &OptimizerConfig) -> f64 {
    match (config.lr_end.or(config.min_lr_rate.map(|rate| rate * peak)), config.lr_scheduler_type) {
        (Some(end), schedule) if schedule.falls() => end,
        (None, LrSchedulerType::Polynomial) => POLYNOMIAL_END.min(peak),
        _ => 0.0,
    }
}

/// Returns the cosine of `num_cycles` cycles at the share `progress` of them: half a cycle falls from 1 to 0.
fn cosine(config: &OptimizerConfig, progress: f64) -> f64 {
    let cycles = config.num_cycles.unwrap_or(0.5);
    0.5 * (1.0 + (std::f64::consts::PI * cycles * 2.0 * progress).cos())
}

/// Learning rates of one PPO update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearningRates {
    /// The policy's; `None` while only the value model is trained.
    pub policy: Option<f64>,
    /// The value model's.
    pub value: f64,
}

impl LearningRates {
    /// Returns the rates; an error starts with `whose`.
    ///
    /// # Errors
    /// If one is below 0 or not finite.
    pub fn checked(self, whose: &str) -> Result<Self> {
        let mut all = self.policy.into_iter().chain([self.value]);
        match all.find(|rate| !(rate.is_finite() && *rate >= 0.0)) {
            Some(rate) => Err(Error::Run(format!("{whose}: expected learning rates from 0, found {rate}"))),
            None => Ok(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> OptimizerConfig {
        rlhf_base::schema::defaults()
    }

    fn param(values: &[f32], decay: bool) -> Param {
        let tensor = Tensor::from_slice(values).set_requires_grad(true);
        Param { name: "w".into(), tensor, decay, embedding: false, fixed: false }
    }

    #[test]
    fn clipping_scales_all_gradients_together_and_reports_the_norm_before() {
        // SGD-like: with beta 0 and a large epsilon, a step is lr * gradient / epsilon.
        let config = OptimizerConfig {
            adam_beta1: 0.0,
            adam_beta2: 0.0,
            adam_epsilon: 1e6,
            max_grad_norm: Some(1.0),
            ..config()
        };
        let params = [param(&[0.0, 0.0], true), param(&[0.0], false)];
        let mut optimizer = Optimizer::new(&params, &config);
        for _ in 0..2 {
            // Gradients 3, 0 and 4: norm 5. Twice, since TRL's legacy trainer clipped the first step only.
            let weights = [Tensor::from_slice(&[3.0f32, 0.0]), Tensor::from_slice(&[4.0f32])];
            let loss = params.iter().zip(&weights).map(|(p, w)| (&p.tensor * w).sum(Kind::Float)).sum::<Tensor>();
            loss.backward();
            assert!((optimizer.step(1e6).unwrap() - 5.0).abs() < 1e-6);
        }
        let found = Tensor::cat(&[&params[0].tensor, &params[1].tensor], 0);
        for (found, expected) in Vec::<f32>::try_from(found).unwrap().into_iter().zip([-1.2, 0.0, -1.6]) {
            assert!((found - expected).abs() < 1e-4, "{found} is not {expected}");
        }
    }

    #[test]
    fn weight_decay_spares_biases_and_norms() {
        let config = OptimizerConfig { weight_decay: 0.1, ..config() };
        let params = [param(&[1.0], true), param(&[1.0], false)];
        Optimizer::new(&params, &config).step(0.5).unwrap(); // no gradient at all: only decay moves a weight
        assert!((params[0].tensor.double_value(&[0]) - 0.95).abs() < 1e-6);
        assert_eq!(params[1].tensor.double_value(&[0]), 1.0);
    }

    #[test]
    fn a_gradient_that_is_not_finite_is_an_error_and_changes_nothing() {
        let params = [param(&[1.0], true)];
        let mut optimizer = Optimizer::new(&params, &config());
        (&params[0].tensor * f64::NAN).sum(Kind::Float).backward();
        assert!(optimizer.step(0.1).unwrap_err().to_string().contains("optimizer step 1"));
        assert_eq!(params[0].tensor.double_value(&[0]), 1.0);
    }

    #[test]
    fn ranks_that_round_a_norm_differently_clip_by_rank_0s() {
        let config = OptimizerConfig { max_grad_norm: Some(1.0), ..config() };
        let norms = rlhf_base::dist::as_two_ranks(|world| {
            let params = [param(&[0.0, 0.0], true)];
            let mut optimizer = Optimizer::new(&params, &config);
            (&params[0].tensor * Tensor::from_slice(&[1.5f32, 2.0])).sum(Kind::Float).backward();
            optimizer.reduce_gradients(&world).unwrap();
            // Stands for another processor's sum: rank 1 alone would compute a norm of 5.1.
            optimizer.scale_grad(if world.is_main() { 1.0 } else { 1.02 });
            optimizer.step(0.1).unwrap()
        });
        assert_eq!(norms, [5.0, 5.0]);
    }

    #[test]
    fn a_saved_state_resumes_to_the_bit_and_is_refused_by_other_parameters() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("optimizer.safetensors");
        let named = |name: &str, values: &[f32], decay| Param { name: name.into(), ..param(values, decay) };
        let fresh = || [named("a.weight", &[1.0, -2.0], true), named("a.bias", &[0.5], false)];
        let learn = |params: &[Param], optimizer: &mut Optimizer, steps: i32| {
            for step in 0..steps {
                params
                    .iter()
                    .map(|p| (&p.tensor * f64::from(step + 1)).sin().sum(Kind::Float))
                    .sum::<Tensor>()
                    .backward();
                optimizer.step(0.1).unwrap();
            }
        };
        let whole = fresh();
        let mut optimizer = Optimizer::new(&whole, &config());
        learn(&whole, &mut optimizer, 3);
        optimizer.save(&path).unwrap();
        let half = fresh();
        for (to, from) in half.iter().zip(&whole) {
            tch::no_grad(|| to.tensor.shallow_clone().copy_(&from.tensor));
        }
        let mut resumed = Optimizer::new(&half, &config());
        resumed.load(&path).unwrap();
        assert_eq!(resumed.steps(), 3);
        learn(&whole, &mut optimizer, 2);
        learn(&half, &mut resumed, 2);
        for (found, expected) in half.iter().zip(&whole) {
            assert_eq!(found.tensor, expected.tensor);
        }
        for others in
            [vec![named("a.weight", &[1.0, -2.0], true)], vec![named("b", &[1.0, 2.0], true), param(&[0.0], false)]]
        {
            assert!(Optimizer::new(&others, &config()).load(&path).unwrap_err().to_string().contains("expected"));
        }
    }

    #[test]
    fn schedules_follow_transformers() {
        let with = |lr_scheduler_type, warmup_steps| OptimizerConfig { lr_scheduler_type, warmup_steps, ..config() };
        let course =
            |config: OptimizerConfig| -> Vec<f64> { (0..4).map(|i| learning_rate(1.0, &config, i, 4)).collect() };
        assert_eq!(course(with(LrSchedulerType::Linear, 0)), [1.0, 0.75, 0.5, 0.25]);
        assert_eq!(course(with(LrSchedulerType::Linear, 2)), [0.0, 0.5, 1.0, 0.5]);
        assert_eq!(course(with(LrSchedulerType::ConstantWithWarmup, 2)), [0.0, 0.5, 1.0, 1.0]);
        assert_eq!(course(with(LrSchedulerType::Constant, 2)), [1.0; 4]);
        for schedule in [LrSchedulerType::Cosine, LrSchedulerType::CosineWithRestarts] {
            for (found, expected) in course(with(schedule, 1)).iter().zip([0.0, 1.0, 0.75, 0.25]) {
                assert!((found - expected).abs() < 1e-12);
            }
        }
        let root = |x: f64| x.sqrt();
        assert_eq!(course(with(LrSchedulerType::InverseSqrt, 1)), [0.0, 1.0, root(0.5), root(1.0 / 3.0)]);
        assert_eq!(course(with(LrSchedulerType::InverseSqrt, 0))[3], root(10_000.0 / 10_003.0));
    }

    #[test]
    fn a_warm_up_of_a_share_is_rounded_up_and_an_end_and_a_power_are_those_of_transformers() {
        // get_polynomial_decay_schedule_with_warmup(lr 1, warmup 1, 5 steps, lr_end .1, power 2): .1 + .9 * (1 - i / 4)^2.
        let polynomial = OptimizerConfig {
            lr_scheduler_type: LrSchedulerType::Polynomial,
            warmup_ratio: 0.15, // of 5 updates .75
            lr_end: Some(0.1),
            power: 2.0,
            ..config()
        };
        // get_cosine_with_min_lr_schedule_with_warmup(lr 1, no warmup, 4 steps, min_lr .1): .1 + .9 * (1 + cos) / 2.
        let cosine = OptimizerConfig { lr_scheduler_type: LrSchedulerType::Cosine, lr_end: Some(0.1), ..config() };
        let linear = OptimizerConfig { lr_end: Some(0.2), ..config() };
        for (config, updates, expected) in [
            (&polynomial, 5, &[0.0, 1.0, 0.60625, 0.325, 0.15625, 0.1][..]),
            (&cosine, 4, &[1.0, 0.868_198_051_533_946_4, 0.55, 0.231_801_948_466_053_6]),
            (&linear, 4, &[1.0, 0.8, 0.6, 0.4]),
        ] {
            for (update, expected) in expected.iter().enumerate() {
                let found = learning_rate(1.0, config, update, updates);
                assert!((found - expected).abs() < 1e-12, "{config:?}, update {update}: {found} is not {expected}");
            }
        }
        // Without an end transformers takes 1e-7.
        let usual = OptimizerConfig { lr_end: None, power: 1.0, warmup_ratio: 0.0, ..polynomial };
        assert!((learning_rate(3e-6, &usual, 2, 4) - (1e-7 + 2.9e-6 / 2.0)).abs() < 1e-18);
    }

    #[test]
    fn cycles_final_shares_and_a_decay_at_the_end_are_those_of_transformers() {
        use LrSchedulerType::{Cosine, CosineWithMinLr, CosineWithRestarts, WarmupStableDecay};
        // transformers 5.23's get_scheduler with the same arguments; a rate of 1, and of 2 in the first.
        let with_schedule =
            |lr_scheduler_type, warmup_steps| OptimizerConfig { lr_scheduler_type, warmup_steps, ..config() };
        let wsd = |warmup_steps| OptimizerConfig {
            num_decay_steps: Some(4),
            ..with_schedule(WarmupStableDecay, warmup_steps)
        };
        let cycles = |num_cycles, config: OptimizerConfig| OptimizerConfig { num_cycles: Some(num_cycles), ..config };
        let least = |config: OptimizerConfig| OptimizerConfig { min_lr_rate: Some(0.1), ..config };
        let decay = |decay_type, config: OptimizerConfig| OptimizerConfig { decay_type, ..config };
        for (peak, config, expected) in [
            (
                2.0,
                OptimizerConfig { lr_end: Some(0.5), ..with_schedule(CosineWithMinLr, 1) },
                &[0.0, 2.0, 1.780_330_085_889_910_5, 1.25, 0.719_669_914_110_089_4][..],
            ),
            (
                1.0,
                least(with_schedule(CosineWithMinLr, 1)),
                &[0.0, 1.0, 0.868_198_051_533_946_4, 0.55, 0.231_801_948_466_053_65],
            ),
            (
                1.0,
                cycles(1.5, least(with_schedule(CosineWithMinLr, 0))),
                &[1.0, 0.231_801_948_466_053_65, 0.55, 0.868_198_051_533_946_5],
            ),
            (
                1.0,
                cycles(1.0, with_schedule(Cosine, 0)),
                &[
                    1.0,
                    0.654_508_497_187_473_7,
                    0.095_491_502_812_526_33,
                    0.095_491_502_812_526_22,
                    0.654_508_497_187_473_6,
                ],
            ),
            (1.0, cycles(2.0, with_schedule(CosineWithRestarts, 1)), &[0.0, 1.0, 0.75, 0.25, 1.0, 0.75, 0.25]),
            (1.0, wsd(2), &[0.0, 0.5, 1.0, 1.0, 1.0, 0.853_553_390_593_273_7, 0.5, 0.146_446_609_406_726_27]),
            (1.0, least(wsd(2)), &[0.1, 0.55, 1.0, 1.0, 1.0, 0.868_198_051_533_946_4, 0.55, 0.231_801_948_466_053_65]),
            (1.0, decay(DecayType::Linear, least(wsd(2))), &[0.1, 0.55, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325]),
            (
                1.0,
                decay(DecayType::OneMinusSqrt, wsd(2)),
                &[0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.292_893_218_813_452_4, 0.133_974_596_215_561_4],
            ),
            (1.0, cycles(1.0, wsd(0)), &[1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.5]),
            // A decay that is longer than what the warm-up leaves of the run.
            (
                1.0,
                decay(DecayType::Linear, OptimizerConfig { num_decay_steps: Some(5), ..wsd(2) }),
                &[0.0, 0.5, 0.8, 0.6, 0.4, 0.2],
            ),
        ] {
            for (update, rate) in expected.iter().enumerate() {
                let found = learning_rate(peak, &config, update, expected.len());
                assert!((found - rate).abs() < 1e-12, "{config:?}, update {update}: {found} is not {rate}");
            }
        }
    }
}
