//! Loads the models of a loop with TRL's `step()`.

use super::{Orders, StepLoop};
use crate::session::failure::Failure;
use crate::session::params::Params;
use crate::session::wire::Reply;
use rlhf::compat::step::{Stats, StepConfig, StepTrainer};
use rlhf::device::{Device, check_threads, use_threads};
use rlhf::hub;
use rlhf::model::{CausalLm, CausalLmWithValueHead, Dtype, LoraConfig, ModelOptions, Precision, QuantizationConfig};
use rlhf::optim::settings::check_learning;
use rlhf::optim::{LrSchedulerType, Optim, OptimizerConfig, learning_rate};
use rlhf::rng::{Purpose, Stream};
use rlhf::schema::{Setting as _, defaults};
use rlhf::settings::refused;
use rlhf::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use tch::{Kind, Tensor};

/// The parameters of `open`, before anything is loaded.
struct Open {
    config: StepConfig,
    reference: Option<PathBuf>,
    tokenizer: Option<PathBuf>,
    adapter: Option<LoraConfig>,
    head: HeadInit,
    schedule: Option<Schedule>,
    options: ModelOptions,
    rows_are_per_rank: bool,
}

/// The start of a value head that the model's folder does not have.
enum HeadInit {
    /// As torch initializes a linear layer.
    Torch,
    /// Weights from a normal distribution of this deviation, and a bias of 0.
    Normal(f64),
}

/// A learning rate that changes from step to step.
struct Schedule {
    settings: OptimizerConfig,
    steps: usize,
}

impl StepLoop {
    /// Reads the parameters and loads the models.
    pub(in crate::session) fn open(params: &Params<'_>, reply: &mut Reply) -> Result<Self, Failure> {
        let open = Open::read(params)?;
        params.finish("open")?;
        let config = open.config.clone();
        let schedule = open.schedule;
        let rows_are_per_rank = open.rows_are_per_rank;
        let rate = Rc::new(Cell::new(config.learning_rate));
        let trainer = load(Open { schedule: None, ..open })?;
        let step_rate = Rc::clone(&rate);
        let peak = config.learning_rate;
        let trainer = match schedule {
            Some(Schedule { settings, steps }) => trainer.with_schedule(move |step| {
                step_rate.set(learning_rate(peak, &settings, step, steps));
                step_rate.get()
            }),
            None => trainer.with_schedule(move |_| step_rate.get()),
        };
        let orders = Orders::default();
        let seed = config.seed;
        let next_orders = Rc::clone(&orders);
        let trainer = trainer.with_order(move |pass, rows| {
            let drawn = || Stream::new(seed, Purpose::MiniBatches, pass, 0).permutation(rows);
            next_orders.borrow_mut().pop_front().unwrap_or_else(drawn)
        });
        let model = trainer.learner.policy.config();
        reply.set("vocab_size", model.vocab_size);
        reply.set("max_position_embeddings", model.max_position_embeddings);
        reply.set("is_encoder_decoder", model.is_encoder_decoder());
        reply.set("is_peft_model", trainer.learner.policy.has_adapter());
        reply.set("eos_token_ids", json!(trainer.tokenizer.eos_ids()));
        reply.set("device", format!("{:?}", trainer.learner.policy.device()).to_lowercase());
        Ok(Self { trainer, rate, orders, rows_are_per_rank, last: Stats::default() })
    }
}

impl Open {
    fn read(params: &Params<'_>) -> Result<Self, Failure> {
        let settings = params.map("config")?.cloned().unwrap_or_default();
        let mut config = read_config(&settings)?;
        if let Some(model) = params.path("model")? {
            config.model_name = model;
        }
        let adapter = params.map("peft_config")?.map(read_adapter).transpose()?;
        config.optimizer = read_optimizer(params.map("optimizer")?)?;
        check(&config, &settings)?;
        let schedule = match params.map("schedule")? {
            Some(values) => Some(read_schedule(values, config.learning_rate)?),
            None => None,
        };
        let rows_are_per_rank = match params.text("rows")?.unwrap_or("all") {
            "all" => false,
            "own" => true,
            other => return Err(Failure::usage("rows", format!("rows: expected all or own, found {other}"))),
        };
        let std = params.number("value_head_std")?;
        let head = std.map_or(HeadInit::Torch, HeadInit::Normal);
        let options = read_options(params, adapter.is_some())?;
        let reference = params.path("ref_model")?;
        let tokenizer = params.path("tokenizer")?;
        Ok(Self { config, reference, tokenizer, adapter, head, schedule, options, rows_are_per_rank })
    }
}

fn load(open: Open) -> Result<StepTrainer, Failure> {
    let Open { config, reference, tokenizer, adapter, head, options, .. } = open;
    let dir = hub::model_dir(&config.model_name, None).map_err(|e| Failure::from(e).for_setting("model"))?;
    let tokenizer_dir = match &tokenizer {
        Some(name) => hub::tokenizer_dir(name, None).map_err(|e| Failure::from(e).for_setting("tokenizer"))?,
        None => dir.clone(),
    };
    let tokenizer = Tokenizer::from_pretrained(&tokenizer_dir)?;
    let mut policy = CausalLm::from_pretrained(&dir, options)?;
    if adapter.is_some() || config.optimizer.optim == Optim::AdamwBf16 {
        policy.prepare(config.optimizer.optim.trains(adapter.is_some()))?;
    }
    if let Some(adapter) = &adapter {
        policy.add_adapter(adapter, config.seed).map_err(|e| Failure::from(e).for_setting("peft_config"))?;
    }
    tokenizer.check_fits(policy.config(), &dir)?;
    let reference = reference.map(|name| load_reference(&name, options)).transpose()?;
    let model = CausalLmWithValueHead::found_in(&dir, policy, config.seed)?;
    if let (HeadInit::Normal(std), true) = (head, model.head().is_fresh()) {
        draw_head(&model, std, config.seed);
    }
    Ok(StepTrainer::new(config, model, reference, tokenizer)?)
}

fn load_reference(name: &Path, options: ModelOptions) -> Result<CausalLm, Failure> {
    let dir = hub::model_dir(name, None).map_err(|e| Failure::from(e).for_setting("ref_model"))?;
    let mut reference = CausalLm::from_pretrained(&dir, ModelOptions { quantization: None, ..options })?;
    reference.merge_adapter();
    Ok(reference)
}

/// Draws the weights of a new head from a normal distribution, and makes its bias 0.
fn draw_head(model: &CausalLmWithValueHead, std: f64, seed: u64) {
    let mut stream = Stream::new(seed, Purpose::Init, 0, 1);
    let mut normal = || {
        let (radius, angle) = ((-2.0 * (1.0 - stream.uniform()).ln()).sqrt(), std::f64::consts::TAU * stream.uniform());
        (std * radius * angle.cos()) as f32
    };
    for param in model.lm().params().iter().filter(|param| param.name.starts_with("v_head.")) {
        let drawn: Vec<f32> = if param.name.ends_with("bias") {
            vec![0.0; param.tensor.numel()]
        } else {
            (0..param.tensor.numel()).map(|_| normal()).collect()
        };
        let drawn = Tensor::from_slice(&drawn).view(param.tensor.size().as_slice());
        tch::no_grad(|| param.tensor.shallow_clone().copy_(&drawn.to_kind(Kind::Float)));
    }
}

/// Reads TRL's settings. Each is first read by itself, so that an error names it.
fn read_config(settings: &Map<String, Value>) -> Result<StepConfig, Failure> {
    for (name, value) in settings {
        let alone = Map::from_iter([(name.clone(), value.clone())]);
        if let Err(error) = serde_json::from_value::<StepConfig>(alone.into()) {
            let unknown = error.to_string().starts_with("unknown field");
            let message = match refused(name).filter(|_| unknown) {
                Some(reason) => format!("{name}: {reason}"),
                None if unknown => format!("{name}: expected a setting of TRL's PPOConfig, found another name"),
                None => format!("{name}: {error}"),
            };
            return Err(Failure::usage(name, message));
        }
    }
    serde_json::from_value(settings.clone().into()).map_err(|error| Failure::usage("config", error.to_string()))
}

/// Checks all settings together. An error is reported for the first setting whose removal leaves no error.
fn check(config: &StepConfig, settings: &Map<String, Value>) -> Result<(), Failure> {
    let Err(error) = config.check() else { return Ok(()) };
    let is_culprit = |name: &&String| {
        let mut others = settings.clone();
        others.remove(*name);
        let others = serde_json::from_value::<StepConfig>(others.into());
        others.is_ok_and(|others| StepConfig { optimizer: config.optimizer.clone(), ..others }.check().is_ok())
    };
    let failure = Failure::from(error);
    Err(match settings.keys().find(is_culprit) {
        Some(name) => failure.for_setting(name),
        None => failure,
    })
}

/// Reads the parameters of an object with `read`, which must read all of them.
fn object<T>(
    name: &str,
    values: &Map<String, Value>,
    read: impl FnOnce(&Params<'_>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let params = Params::new(values, &[]);
    let value = read(&params)?;
    params.finish(name)?;
    Ok(value)
}

/// Reads an adapter, by the names of PEFT's LoraConfig.
fn read_adapter(values: &Map<String, Value>) -> Result<LoraConfig, Failure> {
    object("peft_config", values, |params| {
        let defaults = LoraConfig { r: 8, alpha: 8.0, dropout: 0.0, ..LoraConfig::default() };
        let targets = match values.get("target_modules") {
            Some(Value::String(_)) => params.text("target_modules")?.map(|name| vec![name.to_string()]),
            _ => params.texts("target_modules")?,
        };
        // PPO applies no dropout: its first ratios are 1.
        params.number("lora_dropout")?;
        let layers = params.ids("layers_to_transform")?.unwrap_or_default();
        Ok(LoraConfig {
            r: params.count("r")?.unwrap_or(defaults.r),
            alpha: params.number("lora_alpha")?.unwrap_or(defaults.alpha),
            target_modules: targets,
            use_rslora: params.flag("use_rslora")?.unwrap_or(false),
            use_dora: params.flag("use_dora")?.unwrap_or(false),
            modules_to_save: params.texts("modules_to_save")?.unwrap_or_default(),
            exclude_modules: params.texts("exclude_modules")?.unwrap_or_default(),
            layers_to_transform: layers.into_iter().map(|layer| usize::try_from(layer).unwrap_or(usize::MAX)).collect(),
            rank_pattern: pattern(params, "rank_pattern", |value| value.as_u64().map(|r| r as usize))?,
            alpha_pattern: pattern(params, "alpha_pattern", Value::as_f64)?,
            ..defaults
        })
    })
}

fn pattern<'a, T>(
    params: &Params<'a>,
    name: &'a str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<(String, T)>, Failure> {
    let read = |(layer, value): (&String, &Value)| {
        let number =
            read(value).ok_or_else(|| Failure::usage(name, format!("{name}: `{layer}`: expected a number")))?;
        Ok((layer.clone(), number))
    };
    params.map(name)?.map_or(Ok(Vec::new()), |layers| layers.iter().map(read).collect())
}

/// Reads the optimizer; without settings it is torch's Adam with its defaults.
fn read_optimizer(values: Option<&Map<String, Value>>) -> Result<OptimizerConfig, Failure> {
    let defaults = StepConfig::default().optimizer;
    let Some(values) = values else { return Ok(defaults) };
    object("optimizer", values, |params| {
        let optim = params.choice("optim")?.unwrap_or(defaults.optim);
        Ok(OptimizerConfig {
            optim,
            adam_beta1: params.number("adam_beta1")?.unwrap_or(defaults.adam_beta1),
            adam_beta2: params.number("adam_beta2")?.unwrap_or(defaults.adam_beta2),
            adam_epsilon: params.number("adam_epsilon")?.unwrap_or(defaults.adam_epsilon),
            weight_decay: params.number("weight_decay")?.unwrap_or(defaults.weight_decay),
            ..defaults
        })
    })
}

/// Reads a schedule of the learning rate, by transformers' names.
fn read_schedule(values: &Map<String, Value>, peak: f64) -> Result<Schedule, Failure> {
    object("schedule", values, |params| {
        let defaults = StepConfig::default().optimizer;
        let schedule = params.needed("lr_scheduler_type", Params::choice::<LrSchedulerType>)?;
        let steps = params.count("steps")?;
        if steps.is_none() && schedule.falls() {
            return Err(Failure::usage(
                "steps",
                "steps: expected the number of all steps, for a learning rate that falls, found none",
            ));
        }
        let settings = OptimizerConfig {
            lr_scheduler_type: schedule,
            warmup_steps: params.count("warmup_steps")?.unwrap_or(0),
            num_cycles: params.number("num_cycles")?,
            power: params.number("power")?.unwrap_or(defaults.power),
            lr_end: params.number("lr_end")?,
            num_decay_steps: params.count("num_decay_steps")?,
            ..defaults
        };
        check_learning(peak, &settings, None).map_err(|e| Failure::from(e).for_setting("schedule"))?;
        Ok(Schedule { settings, steps: steps.unwrap_or(1) })
    })
}

/// Reads device, dtype and precision of the models.
fn read_options(params: &Params<'_>, has_adapter: bool) -> Result<ModelOptions, Failure> {
    let threads = params.count("num_threads")?;
    check_threads(threads).map_err(|e| Failure::from(e).for_setting("num_threads"))?;
    use_threads(threads);
    let device = match params.text("device")? {
        Some(name) => Device::read(name).ok_or_else(|| {
            Failure::usage("device", format!("device: expected auto, cpu, cuda or cuda:N, found {name}"))
        })?,
        None => Device::Auto,
    };
    let default_dtype = if has_adapter { Dtype::Auto } else { Dtype::Float32 };
    let dtype = params.choice("dtype")?.unwrap_or(default_dtype);
    let precision = if params.flag("bf16")?.unwrap_or(false) { Precision::Bf16 } else { Precision::F32 };
    let quantization = QuantizationConfig {
        load_in_4bit: params.flag("load_in_4bit")?.unwrap_or(false),
        load_in_8bit: params.flag("load_in_8bit")?.unwrap_or(false),
        ..defaults()
    };
    if let Some(name) = quantization.named().filter(|_| !has_adapter) {
        let message = format!("{name}: expected a peft_config, as quantized weights are not trained");
        return Err(Failure::usage("peft_config", message));
    }
    let quantization = quantization.quantization();
    Ok(ModelOptions { device: device.resolve()?, dtype, precision, quantization })
}
