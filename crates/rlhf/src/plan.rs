//! `rlhf plan`: the memory and the time that a training run will need, before it loads anything.
//!
//! Sizes come from `config.json`, lengths from the tokenizer and the data, rates from a calibration of about a second. No weight is
//! read, and none is allocated. The arithmetic follows the code that it describes; `benchmarks/plan.py` holds it against real runs.

mod generating;
mod members;
mod memory;
mod operations;
mod rates;
mod remedies;
mod rows;
mod stages;
mod table;
mod work;

use crate::reward::Spec;
use crate::settings::{DistillConfig, DpoConfig, GenerateConfig, PpoConfig, RewardConfig, RunConfig, SftConfig};
use crate::train::pipeline::PipelineConfig;
use crate::train::ppo;
use members::Models;
use memory::Job;
use rates::{Passes, Rates};
use rlhf_base::device::{available_gpu_memory, available_memory, load_ahead, memory, use_threads, whole_memory};
use rlhf_base::dist::as_ranks;
use rlhf_base::{Error, Result};
use rlhf_lm::optim::OptimizerConfig;
use rows::{MANY_PROMPTS, Rows};
use serde::{Serialize, Serializer};
use stages::Made;
use tch::Device;

/// A training run to plan.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "a few values per process")]
pub enum PlannedRun {
    /// `rlhf sft`.
    Sft(SftConfig),
    /// `rlhf reward`.
    Reward(RewardConfig),
    /// `rlhf dpo`.
    Dpo(DpoConfig),
    /// `rlhf distill`.
    Distill(DistillConfig),
    /// `rlhf ppo`, `rlhf grpo` and `rlhf rloo`.
    Ppo(PpoConfig),
}

/// The machine that a run is planned for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanOptions {
    /// Number of ranks on each machine.
    pub ranks: usize,
    /// Number of machines.
    pub machines: usize,
    /// Memory in bytes of the machine, which its ranks share, or of each GPU; `None` takes the memory that is available now.
    pub memory: Option<usize>,
    /// Measure the rates of this machine, for the time.
    pub calibrate: bool,
}

/// The plan of a run, for one rank unless a field says otherwise. Sizes are in bytes.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// Name of the command.
    pub command: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Device of the computation: `cpu` or `cuda`.
    pub device: &'static str,
    /// Dtype of the matrix products: `float32`, `bfloat16` or `float16`.
    pub precision: &'static str,
    /// The models of the run.
    pub models: Vec<PlannedModel>,
    /// Memory by phase.
    pub memory: PlannedMemory,
    /// Tokens of a forward and backward pass; `None` if nothing is trained.
    pub micro_batch: Option<PlannedMicroBatch>,
    /// Tokens and operations.
    pub work: PlannedWork,
    /// Seconds; `None` without a calibration.
    pub time: Option<PlannedTime>,
    /// Changes that lower the peak, each planned alone, the most effective first. A change may combine several flags.
    pub remedies: Vec<Remedy>,
    /// Assumptions that the settings or the data do not decide.
    pub notes: Vec<String>,
}

/// The plan of a pipeline. Sizes are in bytes.
#[derive(Debug, Clone, Serialize)]
pub struct PipelinePlan {
    /// The plans of the stages, in their order.
    pub stages: Vec<Plan>,
    /// Bytes of the largest phase of all stages.
    pub peak: usize,
    /// The command of the stage with that phase.
    pub peak_stage: String,
    /// Whether every stage fits.
    pub fits: bool,
    /// Seconds of all stages, if all are known.
    pub seconds: Option<f64>,
}

/// The role of a model in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The model of SFT, of reward training or of generation; the student of distillation.
    Model,
    /// The policy of PPO and DPO.
    Policy,
    /// A separate value model.
    ValueModel,
    /// The model that the policy is compared with.
    ReferenceModel,
    /// The model that a student learns from.
    Teacher,
    /// A model that scores responses.
    RewardModel,
}

impl Role {
    /// The name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Policy => "policy",
            Self::ValueModel => "value model",
            Self::ReferenceModel => "reference model",
            Self::Teacher => "teacher",
            Self::RewardModel => "reward model",
        }
    }
}

impl Serialize for Role {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A model of a planned run.
#[derive(Debug, Clone, Serialize)]
pub struct PlannedModel {
    /// Its role in the run.
    pub role: Role,
    /// Folder or name.
    pub name: String,
    /// Number of parameters, those of an adapter included.
    pub parameters: usize,
    /// Number of trained parameters.
    pub trained: usize,
    /// Bytes of its weights on this rank.
    pub weights: usize,
    /// Bytes of its gradients on this rank.
    pub gradients: usize,
    /// Bytes of its optimizer's moments on this rank.
    pub moments: usize,
}

/// Memory of a planned run.
#[derive(Debug, Clone, Serialize)]
pub struct PlannedMemory {
    /// Bytes that a rank can have; `None` if that is not known.
    pub available: Option<usize>,
    /// Bytes of the largest phase.
    pub peak: usize,
    /// Name of the largest phase.
    pub peak_phase: &'static str,
    /// Whether the peak is at most the available memory.
    pub fits: bool,
    /// The phases, in their order.
    pub phases: Vec<Phase>,
}

/// A phase of an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PhaseKind {
    /// Loading of the models. Each is whole until it is divided over the ranks.
    Loading,
    /// Sampling of the responses.
    Rollout,
    /// Evaluation of the responses by the models.
    Scoring,
    /// Forward and backward passes of a model, and its optimizer step.
    Step(Role),
    /// Passes over the texts that the policy learns in addition to PPO or DPO.
    Texts,
    /// The optimizer step of a model whose optimizer state is in memory only for the step.
    Moments(Role),
    /// Writing a checkpoint.
    Saving,
    /// A batch of `rlhf generate`.
    Generation,
}

impl PhaseKind {
    /// The name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Rollout => "rollout",
            Self::Scoring => "scoring",
            Self::Step(Role::Policy) => "policy step",
            Self::Step(Role::ValueModel) => "value model step",
            Self::Step(_) => "optimizer step",
            Self::Texts => "policy texts",
            Self::Moments(Role::Policy) => "policy moments",
            Self::Moments(Role::ValueModel) => "value model moments",
            Self::Moments(_) => "optimizer moments",
            Self::Saving => "saving",
            Self::Generation => "generation",
        }
    }
}

impl Serialize for PhaseKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Memory of one phase of an update.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Phase {
    /// The phase; its name in JSON.
    #[serde(rename = "name")]
    pub kind: PhaseKind,
    /// The program: libtorch, tokenizer, data.
    pub program: usize,
    /// Weights, with their copies in the dtype of matrix products, and with the weights that sharding gathers.
    pub weights: usize,
    /// Gradients of trained parameters.
    pub gradients: usize,
    /// Moments of the optimizers, and a moving average of the policy.
    pub moments: usize,
    /// Activations, and the tensors in use while a layer is computed.
    pub activations: usize,
    /// Keys and values of the responses that are sampled.
    pub cache: usize,
    /// Logits.
    pub logits: usize,
    /// Sum of the parts.
    pub total: usize,
}

/// Tokens of a forward and backward pass.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PlannedMicroBatch {
    /// Most tokens: `max_tokens_per_micro_batch`, or the default for this memory.
    pub limit: usize,
    /// Most tokens that a pass of this run has: fewer than the limit where its batches are smaller, more where a row is longer.
    pub tokens: usize,
    /// Tokens of the longest row, which no limit divides.
    pub longest_row: usize,
    /// Bytes of activations of a token.
    pub bytes_per_token: usize,
    /// Most tokens whose activations fit besides everything else; `None` if the memory is not known, 0 if nothing fits.
    pub largest: Option<usize>,
}

/// Tokens and operations of a run, of all ranks. An operation is a multiplication or an addition.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct PlannedWork {
    /// Number of updates; of optimizer steps in SFT, reward training, DPO and distillation, of batches in `generate`. `None` if it depends
    /// on data that were not read.
    pub updates: Option<usize>,
    /// Rows of an update.
    pub rows_per_update: usize,
    /// Tokens of the rows of an update. Responses count with the most tokens that they can have.
    pub tokens_per_update: f64,
    /// Operations of an update.
    pub flops_per_update: f64,
    /// Tokens of all updates, if their number is known.
    pub tokens: Option<f64>,
    /// Operations of all updates, if their number is known.
    pub flops: Option<f64>,
}

/// Seconds of a run on this machine.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct PlannedTime {
    /// Operations per second of forward and backward passes; in `generate`, of passes over the prompts.
    pub flops_per_second: f64,
    /// Seconds in which a batch of responses gets its next token; 0 if nothing is sampled.
    pub seconds_per_token: f64,
    /// Seconds of the phases of an update.
    pub rollout: f64,
    /// Evaluation of the responses by the models.
    pub scoring: f64,
    /// Forward and backward passes and optimizer steps.
    pub training: f64,
    /// Seconds of an update.
    pub update: f64,
    /// Seconds of all updates, if their number is known.
    pub total: Option<f64>,
}

/// A change of settings that lowers the peak.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Remedy {
    /// The change, as flags where it is one of settings.
    pub change: String,
    /// Its effect on what is trained; `None` if results differ by rounding at most.
    pub effect: Option<String>,
    /// Bytes of the largest phase with it.
    pub peak: usize,
    /// Bytes that it saves.
    pub saves: usize,
    /// Whether the run fits with it alone.
    pub fits: bool,
}

/// Bytes that a program needs on a GPU besides its tensors: the CUDA context and the workspaces of its libraries.
const CUDA_PROGRAM: usize = 700 << 20;

/// Memory of code and library buffers that a run allocates and a plan does not, in bytes; measured.
const PROGRAM_LATER: usize = 80 << 20;

impl PlannedRun {
    /// The command.
    pub fn command(&self) -> &'static str {
        match self {
            Self::Sft(_) => "sft",
            Self::Reward(_) => "reward",
            Self::Dpo(_) => "dpo",
            Self::Distill(_) => "distill",
            Self::Ppo(config) => config.preset.command(),
        }
    }

    fn run(&self) -> &RunConfig {
        match self {
            Self::Sft(config) => &config.run,
            Self::Reward(config) => &config.run,
            Self::Dpo(config) => &config.run,
            Self::Distill(config) => &config.run,
            Self::Ppo(config) => &config.run,
        }
    }

    fn run_mut(&mut self) -> &mut RunConfig {
        match self {
            Self::Sft(config) => &mut config.run,
            Self::Reward(config) => &mut config.run,
            Self::Dpo(config) => &mut config.run,
            Self::Distill(config) => &mut config.run,
            Self::Ppo(config) => &mut config.run,
        }
    }

    fn optimizer(&self) -> &OptimizerConfig {
        match self {
            Self::Sft(config) => &config.optimizer,
            Self::Reward(config) => &config.optimizer,
            Self::Dpo(config) => &config.optimizer,
            Self::Distill(config) => &config.optimizer,
            Self::Ppo(config) => &config.optimizer,
        }
    }

    fn optimizer_mut(&mut self) -> &mut OptimizerConfig {
        match self {
            Self::Sft(config) => &mut config.optimizer,
            Self::Reward(config) => &mut config.optimizer,
            Self::Dpo(config) => &mut config.optimizer,
            Self::Distill(config) => &mut config.optimizer,
            Self::Ppo(config) => &mut config.optimizer,
        }
    }

    /// Number of rows of an update, of all ranks.
    fn batch_size(&self) -> Result<usize> {
        match self {
            Self::Sft(config) => config.plan_for(MANY_PROMPTS).map(|plan| plan.batch_size),
            Self::Reward(config) => config.plan_for(MANY_PROMPTS).map(|plan| plan.batch_size),
            Self::Dpo(config) => config.plan_for(MANY_PROMPTS).map(|plan| plan.batch_size),
            Self::Distill(config) => config.plan_for(MANY_PROMPTS).map(|plan| plan.batch_size),
            Self::Ppo(config) => config.plan_for(MANY_PROMPTS).map(|plan| plan.batch_size),
        }
    }

    /// Checks every setting, and returns the rewards of the run.
    fn check(&self) -> Result<Vec<Spec>> {
        match self {
            Self::Sft(config) => config.check()?,
            Self::Reward(config) => config.check()?,
            Self::Dpo(config) => config.check()?,
            Self::Distill(config) => config.check()?,
            Self::Ppo(config) => return config.checked(),
        }
        Ok(Vec::new())
    }
}

/// The device that a run is planned for. The GPU need not exist on this machine.
fn device_of(setting: rlhf_base::device::Device) -> Result<Device> {
    use rlhf_base::device::Device as Setting;
    match setting {
        Setting::Cuda(number) => Ok(Device::Cuda(number.unwrap_or(0))),
        other => other.resolve(),
    }
}

/// Plans a run: memory by phase, tokens, operations and time.
///
/// # Errors
/// If a model's configuration, its tokenizer or the data are missing or invalid; if a setting is out of its range.
pub fn plan(run: &PlannedRun, options: &PlanOptions) -> Result<Plan> {
    plan_with(run, options, &[])
}

/// Plans a pipeline: its stages in order. A model that an earlier stage will write is assumed to have the architecture of the model that
/// this stage starts from, in f32.
///
/// # Errors
/// As [`plan`], with the name of the stage.
pub fn pipeline(config: &PipelineConfig, options: &PlanOptions) -> Result<PipelinePlan> {
    stages::plan(config, options)
}

/// Plans a run of `rlhf generate`: the memory of its largest batch, and time.
///
/// # Errors
/// If the model's configuration, its tokenizer or the prompts are missing or invalid; if the prompts are on standard input.
pub fn generation(config: &GenerateConfig, options: &PlanOptions) -> Result<Plan> {
    generating::plan(config, options)
}

/// Makes the checks of settings and model configurations that PPO makes before it loads weights.
fn check_ppo(run: &PlannedRun, rewards: &[Spec], models: &Models) -> Result<()> {
    let PlannedRun::Ppo(config) = run else { return Ok(()) };
    ppo::check_eval_prompts(config)?;
    ppo::check_rewards(config, rewards.iter().map(Spec::name))?;
    ppo::check_reward_models(config, rewards, &config.sft_model_path)?;
    let most = models.policy().num_hidden_layers - 1;
    let shared = config.legacy.num_shared_layers.unwrap_or(0);
    if shared as i64 <= most || config.peft.use_peft {
        Ok(())
    } else {
        Err(Error::refused(
            "num_shared_layers",
            format!(" = {shared}: expected at most {most}, so that at least one layer is trained"),
        ))
    }
}

/// [`plan`], of a run that may start from models that earlier stages will write.
fn plan_with(run: &PlannedRun, options: &PlanOptions, made: &[Made]) -> Result<Plan> {
    as_ranks(options.ranks * options.machines, || {
        let rewards = run.check()?;
        let device = device_of(run.run().device)?;
        let models = Models::find(run, &rewards, made)?;
        check_ppo(run, &rewards, &models)?;
        let rows = Rows::read(run, &models)?;
        let machine = Machine::find(device, options);
        let job = Job::new(run, &models, &rows, machine)?;
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let rates = if options.calibrate && device == Device::Cpu {
            use_threads(run.run().num_threads);
            Some(Rates::measure(&Passes::of(&job)?)?)
        } else {
            None
        };
        let work = work::of(&job);
        let mut notes = rows.notes.clone();
        if device != Device::Cpu {
            notes.push(
                "memory of a GPU is arithmetic; two measured runs took 9 % less and 10 % more. The time is not estimated".into(),
            );
        }
        notes.extend(job.offloaded());
        notes.extend(load_note(&load, processors()).filter(|_| rates.is_some()));
        let memory = job.memory();
        Ok(Plan {
            command: run.command().into(),
            ranks: machine.ranks,
            device: if device == Device::Cpu { "cpu" } else { "cuda" },
            precision: run.run().precision().name(),
            models: job.models(),
            micro_batch: Some(job.micro_batch(&memory)),
            time: rates.map(|rates| work::time(&rates, &work)),
            work: work.planned,
            remedies: remedies::find(run, &models, &rows, &job),
            notes,
            memory,
        })
    })
}

/// Returns a warning if a run of this process needs more memory than is available. Only the memory that does not depend on the data is
/// counted.
/// `None` if the run fits, or if that is not known, for example because a model is still to be downloaded.
pub fn warning(run: &PlannedRun, options: &PlanOptions) -> Option<String> {
    let warning_text = || -> Result<Option<String>> {
        let models = Models::find_local(run, &run.check()?)?;
        let machine = Machine::find(device_of(run.run().device)?, options);
        let rows = Rows::unread(run);
        let memory = Job::new(run, &models, &rows, machine)?.memory();
        let Some(available) = memory.available.filter(|_| !memory.fits) else { return Ok(None) };
        Ok(Some(format!(
            "memory: this run needs at least about {}, in the phase {}, and {} are available: `rlhf plan {} ...` with the same settings \
             shows what would make it fit",
            table::size(memory.peak),
            memory.peak_phase,
            table::size(available),
            run.command(),
        )))
    };
    warning_text().ok().flatten()
}

/// Memory and ranks of a machine.
#[derive(Debug, Clone, Copy)]
struct Machine {
    device: Device,
    /// Number of ranks, of all machines.
    ranks: usize,
    /// Number of ranks over which the rows of an update are divided: all ranks, except in a remedy whose added ranks bring more rows.
    row_ranks: usize,
    /// Bytes that a rank can have.
    available: Option<usize>,
    /// Bytes of a rank by which micro-batches are sized.
    whole: Option<usize>,
    /// Bytes of the program itself.
    program: usize,
}

impl Machine {
    fn find(device: Device, options: &PlanOptions) -> Self {
        let here = options.ranks.max(1);
        let ranks = here * options.machines.max(1);
        match device {
            Device::Cuda(number) => {
                let available = options.memory.or_else(|| available_gpu_memory(number));
                // A run asks CUDA for the memory, if there is a driver. If `nvidia-smi` does not respond, it is not called again.
                load_ahead(rlhf_base::device::Device::Cuda(Some(number)));
                let is_there = available.is_some() || tch_ext::is_cuda_loaded();
                let whole = options.memory.or_else(|| is_there.then(|| memory(device)).flatten());
                Self { device, ranks, row_ranks: ranks, available, whole, program: CUDA_PROGRAM }
            }
            _ => Self {
                device,
                ranks,
                row_ranks: ranks,
                // The memory that this process has counts as available to the run.
                available: options.memory.or_else(|| Some(available_memory()? + resident()?)).map(|bytes| bytes / here),
                whole: options.memory.or_else(whole_memory).map(|bytes| bytes / here),
                program: resident().unwrap_or(0) + PROGRAM_LATER,
            },
        }
    }
}

/// Bytes of memory that this process has.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
    Some(line?.trim().parse::<usize>().ok()? << 10)
}

impl Plan {
    /// The plan as a table, in lines of plain text.
    pub fn table(&self) -> String {
        table::of(self)
    }

    /// The plan as JSON.
    ///
    /// # Errors
    /// None for a plan.
    pub fn json(&self) -> Result<String> {
        serde_json::to_string_pretty(self).map_err(|e| Error::Run(format!("plan: {e}")))
    }
}

impl PipelinePlan {
    /// The plans as tables in plain text, with the largest peak.
    pub fn table(&self) -> String {
        let mut text: String = self.stages.iter().map(|plan| plan.table() + "\n").collect();
        text += &table::of_pipeline(self);
        text
    }

    /// The plan as JSON.
    ///
    /// # Errors
    /// None for a plan.
    pub fn json(&self) -> Result<String> {
        serde_json::to_string_pretty(self).map_err(|e| Error::Run(format!("plan: {e}")))
    }
}

/// Load, as a share of the processors, from which on a measurement is disturbed.
const LOADED: f64 = 0.5;

/// Number of processors of this process.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Returns a note if other programs ran during the measurement. `loadavg` is the text of `/proc/loadavg` from before it.
fn load_note(loadavg: &str, processors: usize) -> Option<String> {
    let load: f64 = loadavg.split_whitespace().next()?.parse().ok()?;
    (load >= LOADED * processors as f64).then(|| {
        format!(
            "other programs use this machine (a load of {load:.1} on {processors} processors): the rate was measured beside them, and the times \
             are too long if they end before the run; plan again without them"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_of_half_of_the_processors_is_a_note_on_measured_times() {
        assert!(
            load_note("2.10 1.0 0.5 3/99 1234", 2).is_some_and(|note| note.contains("a load of 2.1 on 2 processors"))
        );
        assert_eq!((load_note("0.40 9.0 9.0 1/99 1", 2), load_note("", 2)), (None, None));
    }
}
