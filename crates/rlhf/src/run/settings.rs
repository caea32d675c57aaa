//! Settings of a run: output folder, seed, precision, reports, checkpoints, evaluation.

use std::fmt::{self, Display};
use std::path::PathBuf;

use serde::Serialize;

use crate::run::push::settings::HubConfig;
use crate::run::tracking::TrackingConfig;
use rlhf_base::Result;
use rlhf_base::device::{Device, check_threads};
use rlhf_base::dist::{DistConfig, ZeroStage};
use rlhf_base::name_of;
use rlhf_base::offload::Offload;
use rlhf_base::offload::settings::OffloadConfig;
use rlhf_base::schema::{
    ANY, BATCHES, ByteSize, CHECKPOINTS, EVALUATION, LOGGING, SPEED, Setting, Settings, all, at_least_one, exclude,
    expect, no_effect, optional, refuse,
};
use rlhf_lm::model::{Dtype, Precision, QuantizationConfig};
use rlhf_lm::optim::loss_scale::LossScaleConfig;
use rlhf_lm::optim::micro_batch::MicroBatchLimit;

/// A training run's output folder, seed, precision and reports.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct RunConfig {
    /// Folder for the model, the metrics and the resolved configuration.
    #[setting(heading = CHECKPOINTS, resume = Free, replay = Changes, short = "folder to write to")]
    pub output_dir: PathBuf,
    /// Replace the run in `output_dir`.
    #[setting(heading = CHECKPOINTS, short = "replace an existing output folder")]
    #[serde(skip)] // Consent to lose a run is given for one run, never by the file that the run left behind.
    pub overwrite_output_dir: bool,
    /// Seed of everything random.
    #[setting(heading = BATCHES, default = 42, replay = Sampling, most = ANY, short = "random seed")]
    pub seed: u64,
    /// Compute in bfloat16, with float32 weights in the optimizer (bfloat16 with `adamw_bf16`).
    #[setting(heading = SPEED, short = "compute in bfloat16")]
    pub bf16: bool,
    /// Compute in float16 with dynamic loss scaling, and float32 weights in the optimizer.
    #[setting(heading = SPEED)]
    pub fp16: bool,
    /// The loss scale of `fp16`.
    #[setting(flatten)]
    #[serde(flatten)]
    pub loss_scale: LossScaleConfig,
    /// Dtype to load models in; `auto` is that of their files. Trained weights are converted to float32.
    #[setting(heading = SPEED, default = "auto", short = "dtype of weights and computation")]
    pub dtype: Dtype,
    /// Quantization of frozen weights.
    #[setting(flatten)]
    #[serde(flatten)]
    pub quantization: QuantizationConfig,
    /// Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
    #[setting(heading = SPEED, default = Device::Auto, resume = Rounding, replay = Changes, short = "cpu, cuda, cuda:N or auto")]
    pub device: Device,
    /// Dtype of the weights of the final and the best model; `auto` is that in which they are trained. Checkpoints and adapters do not
    /// depend on it.
    #[setting(heading = CHECKPOINTS, default = "auto", resume = Free)]
    pub save_dtype: Dtype,
    /// Maximum size of each file of saved weights, such as 5GB or 500MB.
    #[setting(heading = CHECKPOINTS, default = "50GB", resume = Free, short = "maximum size of a weights file")]
    pub max_shard_size: ByteSize,
    /// Recompute each layer in the backward pass instead of storing its activations: less memory, more time.
    #[setting(heading = SPEED, resume = Rounding, replay = Changes)]
    pub gradient_checkpointing: bool,
    /// Maximum tokens per forward and backward pass, or the memory of their activations, such as 4GB; does not change the result
    /// [default: by the available memory].
    #[setting(heading = SPEED, resume = Rounding, replay = Changes)]
    pub max_tokens_per_micro_batch: Option<MicroBatchLimit>,
    /// Offloaded parts.
    #[setting(flatten)]
    #[serde(flatten)]
    pub offload: OffloadConfig,
    /// Trackers, besides the files of `output_dir`.
    #[setting(flatten)]
    #[serde(flatten)]
    pub tracking: TrackingConfig,
    /// Number of threads for tensor operations [default: one per core].
    #[setting(heading = SPEED, resume = Free, replay = Changes)]
    pub num_threads: Option<usize>,
    /// Hide the progress bar.
    #[setting(heading = LOGGING, resume = Free)]
    pub disable_tqdm: bool,
    /// Do not write `report.html`, a page that shows the run, at its end.
    #[setting(heading = LOGGING, resume = Free)]
    pub no_report: bool,
    /// Checkpoints and resuming.
    #[setting(flatten)]
    #[serde(flatten)]
    pub checkpoints: CheckpointConfig,
    /// Uploads to the hub.
    #[setting(flatten)]
    #[serde(flatten)]
    pub hub: HubConfig,
    /// Sharding over several ranks.
    #[setting(flatten)]
    #[serde(flatten)]
    pub dist: DistConfig,
}

impl RunConfig {
    /// Returns the precision of the models' computation.
    pub(crate) fn precision(&self) -> Precision {
        match (self.bf16, self.fp16) {
            (true, _) => Precision::Bf16,
            (false, true) => Precision::F16,
            (false, false) => Precision::F32,
        }
    }

    /// Returns whether models compute in less than f32 precision, so that two passes over the same tokens differ by rounding.
    pub(crate) fn is_low_precision(&self) -> bool {
        self.bf16 || self.fp16
    }

    /// Refuses a dtype of saved weights if `only_adapters` are saved.
    pub(crate) fn check_save_dtype(&self, only_adapters: bool) -> Result<()> {
        if self.save_dtype == Dtype::Auto || !only_adapters {
            return Ok(());
        }
        let why =
            "with use_peft = true: adapters are saved in float32, as PEFT trains them; rlhf merge has save_dtype too";
        no_effect(name_of!(self.save_dtype), self.save_dtype.name(), why)
    }

    /// Returns the place of optimizer state between steps; `None` if it stays in memory.
    pub(crate) fn state_place(&self) -> Option<Offload> {
        self.offload.optimizer_place(&self.output_dir)
    }

    /// Returns the place of frozen models between their uses; `None` if they stay in memory.
    pub(crate) fn models_place(&self) -> Option<Offload> {
        self.offload.models_place(&self.output_dir)
    }

    /// Leaves all parts in memory.
    pub(crate) fn keep_in_memory(&mut self) {
        self.offload = rlhf_base::schema::defaults();
    }

    /// Refuses to offload frozen models in a run that shards them.
    fn check_offload(&self, stages: &[ZeroStage]) -> Result<()> {
        let mut all = stages.iter().chain([&self.dist.zero_stage]);
        if self.offload.offloads_models() && all.any(|stage| stage.shards_parameters()) {
            refuse(
                name_of!(self.offload),
                " = models with zero_stage = 3: frozen models are sharded, and each rank has its part of them in memory; expected \
             optimizer alone, or zero_stage = 0, 1 or 2",
            )
        } else {
            Ok(())
        }
    }

    /// Checks every setting of a run whose trained models are sharded by `stages`, and whose best model is set by `eval`.
    pub(crate) fn check(&self, stages: &[ZeroStage], eval: &EvalConfig) -> Result<()> {
        all([
            self.hub.check(eval.metric_for_best_model.as_ref()),
            check_threads(self.num_threads),
            if self.bf16 && self.fp16 {
                exclude(
                    name_of!(self.bf16),
                    name_of!(self.fp16),
                    " = true and fp16 = true exclude each other: set one of them",
                )
            } else {
                Ok(())
            },
            self.loss_scale.check(self.fp16),
            self.tracking.check(),
            self.checkpoints.check(),
            self.dist.check(),
            self.offload.check(),
            self.check_offload(stages),
            match self.max_tokens_per_micro_batch {
                Some(MicroBatchLimit::Tokens(most)) => at_least_one(name_of!(self.max_tokens_per_micro_batch), most),
                Some(MicroBatchLimit::Memory(_)) | None => Ok(()),
            },
        ])
    }
}

/// Checkpoints, and resuming from one.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct CheckpointConfig {
    /// Save a checkpoint every this many updates (optimizer steps in SFT and reward training), or each `epoch`, and after the last. If
    /// unset, only a run that stops early saves one.
    #[setting(heading = CHECKPOINTS, resume = Free, short = "save a checkpoint every N updates")]
    pub save_steps: Option<Interval>,
    /// Number of newest checkpoints to keep [default: all].
    #[setting(heading = CHECKPOINTS, resume = Free)]
    pub save_total_limit: Option<usize>,
    /// Resume from this checkpoint. `true` is the newest complete one in `output_dir`; without one the run starts anew.
    #[setting(heading = CHECKPOINTS, parse = resume_or_false, alone = "true", short = "resume from the newest checkpoint")]
    #[serde(skip)] // A run is resumed on request, not because its settings are used again.
    pub resume_from_checkpoint: Option<Resume>,
    /// Resume even if data or models have changed since the run started.
    #[setting(heading = CHECKPOINTS)]
    #[serde(skip)]
    pub resume_with_changed_inputs: bool,
}

impl CheckpointConfig {
    pub(crate) fn check(&self) -> Result<()> {
        all([
            if self.resume_with_changed_inputs && self.resume_from_checkpoint.is_none() {
                no_effect(name_of!(self.resume_with_changed_inputs), true, "without resume_from_checkpoint")
            } else {
                Ok(())
            },
            self.save_steps.map_or(Ok(()), |steps| steps.check(name_of!(self.save_steps))),
            self.save_total_limit.map_or(Ok(()), |limit| at_least_one(name_of!(self.save_total_limit), limit)),
        ])
    }
}

/// Updates between two checkpoints or evaluations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interval {
    /// This many updates.
    Updates(usize),
    /// From the update that takes the last row of an epoch to the next such update.
    Epoch,
}

impl Interval {
    fn check(self, name: &str) -> Result<()> {
        match self {
            Self::Updates(updates) => at_least_one(name, updates),
            Self::Epoch => Ok(()),
        }
    }
}

impl From<usize> for Interval {
    fn from(updates: usize) -> Self {
        Self::Updates(updates)
    }
}

impl Setting for Interval {
    const NAME: &'static str = "N";
    const EXPECTED: &'static str = "a whole number of updates, or epoch";

    fn read(text: &str) -> Option<Self> {
        if text.eq_ignore_ascii_case("epoch") { Some(Self::Epoch) } else { usize::read(text).map(Self::Updates) }
    }
}

impl Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Updates(updates) => updates.fmt(f),
            Self::Epoch => f.write_str("epoch"),
        }
    }
}

impl Serialize for Interval {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Updates(updates) => updates.serialize(serializer),
            Self::Epoch => serializer.serialize_str("epoch"),
        }
    }
}

/// The checkpoint that a run resumes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest whole checkpoint in the output folder; the start of training where there is none.
    Latest,
    /// The checkpoint in this folder.
    From(PathBuf),
}

impl Setting for Resume {
    const NAME: &'static str = "PATH";
    const EXPECTED: &'static str = "the folder of a checkpoint, or true for the newest";

    fn read(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "true" | "latest" => Some(Self::Latest),
            _ => PathBuf::read(text).map(Self::From),
        }
    }
}

/// Parses a boolean or the path of a checkpoint.
pub(crate) fn resume_or_false(text: &str) -> Result<Option<Resume>, String> {
    if text.eq_ignore_ascii_case("false") { Ok(None) } else { optional(text) }
}

/// Evaluations during training, and the choice of the best model.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct EvalConfig {
    /// Evaluate on the held-out rows every this many updates (optimizer steps in SFT and reward training), or each `epoch`, before the
    /// first, and after the last.
    #[setting(heading = EVALUATION, resume = Free, short = "evaluate every N updates")]
    pub eval_steps: Option<Interval>,
    /// Save the model with the best value of this metric in `output_dir/best`. Compared after each evaluation; without evaluations,
    /// every `save_steps`.
    #[setting(heading = EVALUATION, resume = Best)]
    pub metric_for_best_model: Option<String>,
    /// Whether a greater value of `metric_for_best_model` is better [default: true, but false for a loss or a KL].
    #[setting(heading = EVALUATION, alone = "true", resume = Best)]
    pub greater_is_better: Option<bool>,
}

/// Returns whether a metric of this name is computed by an evaluation.
pub(crate) fn is_eval_metric(name: &str) -> bool {
    name.starts_with("eval/") || name.starts_with("eval_")
}

/// Prefix of the evaluation metrics with one reward's mean score.
pub(crate) const EVAL_SCORES: &str = "eval/scores/";

impl EvalConfig {
    /// Checks every setting; `known` are the metrics of an evaluation, where one that ends with a slash is followed by a
    /// reward's name.
    pub(crate) fn check(&self, save_steps: Option<Interval>, known: &[&str]) -> Result<()> {
        self.eval_steps.map_or(Ok(()), |steps| steps.check(name_of!(self.eval_steps)))?;
        let Some(metric) = &self.metric_for_best_model else {
            return match self.greater_is_better {
                Some(greater) => refuse(
                    name_of!(self.greater_is_better),
                    format!(" = {greater} needs metric_for_best_model: without one there is no best model"),
                ),
                None => Ok(()),
            };
        };
        let needs = |what: &str, why: &str| {
            refuse(name_of!(self.metric_for_best_model), format!(" = {metric} needs {what}: {why}"))
        };
        match (self.eval_steps, save_steps) {
            (None, _) if is_eval_metric(metric) => needs(name_of!(self.eval_steps), "it is not computed otherwise"),
            (None, None) => needs("eval_steps or save_steps", "models are compared at their updates"),
            // Other names are checked after the first update; these could only be checked after the first evaluation.
            _ if is_eval_metric(metric) => {
                let is = |name: &&str| metric == name || name.ends_with('/') && metric.starts_with(name);
                let named = |name: &&str| if name.ends_with('/') { format!("{name}NAME") } else { name.to_string() };
                let names: Vec<String> = known.iter().map(named).collect();
                let expected = match names.as_slice() {
                    [only] => only.clone(),
                    several => format!("one of {}", several.join(", ")),
                };
                expect(known.iter().any(is), name_of!(self.metric_for_best_model), metric, &expected)
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_given_by_its_folder_or_as_the_newest() {
        for (text, expected) in [
            ("true", Some(Resume::Latest)),
            ("Latest", Some(Resume::Latest)),
            ("false", None),
            ("none", None),
            ("runs/ppo/checkpoint-5", Some(Resume::From("runs/ppo/checkpoint-5".into()))),
        ] {
            assert_eq!(resume_or_false(text), Ok(expected), "{text}");
        }
    }
}
