//! Settings of `rlhf distill`.

use std::path::PathBuf;

use serde::Serialize;

use super::check::check_sizes;
use crate::data::settings::{DataConfig, LongPrompts, PromptLengthConfig};
use crate::run::checkpoint::RunSettings;
use crate::run::settings::{EvalConfig, RunConfig};
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{
    BATCHES, Choices, DATA, DIST, Field, LOGGING, LOSS, MODELS, MOST_ROWS, OPTIMIZER, Refusals, SAMPLING, SPEED,
    Settings, above_zero, all, at_least_one, defaults, defaults_with, exclude, no_effect, refuse, steps_or_minus_one,
    zero_to_one,
};
use rlhf_lm::generate::settings::{LogprobsOf, SamplingConfig};
use rlhf_lm::generate::{MIN_TEMPERATURE, Sampling};
use rlhf_lm::model::{Divergence, Dtype, PeftConfig, QuantType, Quantization, QuantizationConfig};
use rlhf_lm::optim::settings::{OptimizerConfig, check_learning};

/// Settings of groups that have another default in this command, TRL's.
const OWN_DEFAULTS: [(&str, &str); 1] = [("max_grad_norm", "1")];

/// Metrics of an evaluation, by TRL's names.
pub(crate) const EVAL_METRICS: [&str; 2] = ["eval_loss", "eval_entropy"];

/// Settings of `rlhf distill`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct DistillConfig {
    /// Causal language model to train, the student: a folder or a hub name.
    #[setting(heading = MODELS, short = "model: folder or hub name")]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Causal language model to learn from, the teacher, which has the student's tokenizer: a folder or a hub name. It is frozen.
    #[setting(heading = MODELS, short = "teacher: folder or hub name")]
    pub teacher_model_name_or_path: PathBuf,
    /// Branch, tag or commit of `teacher_model_name_or_path` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub teacher_model_revision: String,
    /// Dtype of the teacher's weights in memory [default: `dtype`].
    #[setting(heading = MODELS)]
    pub teacher_dtype: Option<Dtype>,
    /// Weights of the teacher in 4 or 8 bits.
    #[setting(flatten)]
    #[serde(flatten)]
    pub teacher_quantization: TeacherQuantizationConfig,
    /// The token that ends a text, in the model and the tokenizer that are saved too, such as <|im_end|> of a chat template [default: the
    /// tokenizer's].
    #[setting(heading = MODELS)]
    pub eos_token: Option<String>,

    /// Datasets of prompts, or of prompts with responses.
    #[setting(flatten)]
    #[serde(flatten)]
    pub data: DataConfig,
    /// Separate dataset for evaluation: a file, a folder or a hub name.
    #[setting(heading = DATA)]
    pub eval_dataset_name: Option<PathBuf>,
    /// Maximum tokens of a prompt with the response of its row, which are truncated at their start; none: those of the models. No effect
    /// where all responses are sampled.
    #[setting(heading = DATA, default = "1024")]
    pub max_length: Option<usize>,
    /// Maximum length of a prompt.
    #[setting(flatten)]
    #[serde(flatten)]
    pub prompt_length: PromptLengthConfig,

    /// Rows per optimizer step, over all ranks [default: `per_device_train_batch_size` times `gradient_accumulation_steps` times the
    /// number of ranks].
    #[setting(heading = BATCHES, most = MOST_ROWS, resume = Sizes)]
    pub train_batch_size: Option<usize>,
    /// Maximum rows of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with
    /// `train_batch_size`].
    #[setting(heading = BATCHES, most = MOST_ROWS, resume = Sizes, short = "sequences per micro-batch")]
    pub per_device_train_batch_size: Option<usize>,
    /// Rows per forward pass in an evaluation.
    #[setting(heading = BATCHES, default = 8, most = MOST_ROWS, resume = Rounding)]
    pub per_device_eval_batch_size: usize,
    /// Micro-batches of each rank per optimizer step.
    #[setting(heading = BATCHES, default = 1, most = MOST_ROWS, resume = Sizes)]
    pub gradient_accumulation_steps: usize,
    /// Epochs over the dataset; no effect if `max_steps` is set.
    #[setting(heading = BATCHES, default = 3.0, resume = Length, short = "passes over the dataset")]
    pub num_train_epochs: f64,
    /// Number of optimizer steps.
    #[setting(heading = BATCHES, parse = steps_or_minus_one, resume = Length)]
    pub max_steps: Option<usize>,
    /// Optimizer steps between two logged lines of metrics.
    #[setting(heading = LOGGING, default = 10)]
    pub logging_steps: usize,
    /// Print and save sampled responses with each logged line of metrics; their score is the teacher's mean log-probability of a token.
    #[setting(heading = LOGGING, resume = Free)]
    pub log_completions: bool,
    /// Number of responses of `log_completions` [default: 5].
    #[setting(heading = LOGGING, resume = Free)]
    pub num_completions_to_print: Option<usize>,

    /// Share of the optimizer steps that are on-policy: the student samples the responses. The others have those of the rows, or of the
    /// teacher with `seq_kd`.
    #[setting(heading = SAMPLING, default = 1.0, short = "share of updates with own responses")]
    pub lmbda: f64,
    /// In steps that are not on-policy, the teacher samples the responses.
    #[setting(heading = SAMPLING, short = "else the teacher's responses")]
    pub seq_kd: bool,
    /// Maximum tokens of a sampled response.
    #[setting(aliases = ["max_new_tokens", "response_length"], heading = SAMPLING, default = 512, short = "maximum tokens of a response")]
    pub max_completion_length: usize,
    /// Temperature of sampling, and of both distributions in the loss.
    #[setting(heading = SAMPLING, default = 1.0, short = "sampling temperature")]
    pub temperature: f64,
    /// Temperature of both distributions in the loss, where it is not that of sampling [default: `temperature`].
    #[setting(heading = LOSS)]
    pub loss_temperature: Option<f64>,
    /// Filters of sampling, and the end of responses.
    #[setting(flatten)]
    #[serde(flatten)]
    pub sampling: SamplingConfig,
    /// Sequences of a rank that are decoded together.
    #[setting(heading = SPEED, default = 64, most = MOST_ROWS, resume = Rounding)]
    pub local_rollout_forward_batch_size: usize,
    /// Gather the whole parameters of a sharded model once for the responses of an update; `false` gathers them layer by layer for each
    /// token, with less memory and more time.
    #[setting(heading = DIST, default = true, resume = Free)]
    pub ds3_gather_for_generation: bool,

    /// The loss.
    #[setting(flatten)]
    #[serde(flatten)]
    pub loss: DistillLossConfig,

    /// Apply no dropout of an adapter (`lora_dropout`). A model's own dropout is applied in no case.
    #[setting(heading = MODELS)]
    pub disable_dropout: bool,
    /// Low-rank adapters (LoRA).
    #[setting(flatten)]
    #[serde(flatten)]
    pub peft: PeftConfig,
    /// Peak learning rate.
    #[setting(heading = OPTIMIZER, default = "1e-6", short = "peak learning rate")]
    pub learning_rate: f64,
    /// The optimizer's other settings.
    #[setting(flatten)]
    #[serde(flatten)]
    pub optimizer: OptimizerConfig,
    /// Evaluation during training, and the best model.
    #[setting(flatten)]
    #[serde(flatten)]
    pub eval: EvalConfig,
    /// Output folder, seed, precision, reports.
    #[setting(flatten)]
    #[serde(flatten)]
    pub run: RunConfig,
}

/// Quantization of the teacher alone. A setting that is not set has the value for the other frozen weights.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct TeacherQuantizationConfig {
    /// Hold the teacher's linear layers in 4 bits [default: `load_in_4bit`, which is for the teacher also without `use_peft`].
    #[setting(heading = MODELS, alone = "true")]
    pub teacher_load_in_4bit: Option<bool>,
    /// The same in 8 bits [default: `load_in_8bit`].
    #[setting(heading = MODELS, alone = "true")]
    pub teacher_load_in_8bit: Option<bool>,
    /// Data type of the teacher's 4 bits [default: `bnb_4bit_quant_type`].
    #[setting(heading = MODELS)]
    pub teacher_bnb_4bit_quant_type: Option<QuantType>,
    /// Quantize the scales of the teacher's 4-bit weights too [default: `use_bnb_nested_quant`].
    #[setting(heading = MODELS, alone = "true")]
    pub teacher_use_bnb_nested_quant: Option<bool>,
}

impl TeacherQuantizationConfig {
    /// Returns the settings of the teacher, in a run with `shared` ones.
    fn for_teacher(&self, shared: &QuantizationConfig) -> QuantizationConfig {
        let is_set = self.is_set();
        let bits = |setting: Option<bool>, shared| setting.unwrap_or(!is_set && shared);
        let load_in_4bit = bits(self.teacher_load_in_4bit, shared.load_in_4bit);
        QuantizationConfig {
            load_in_4bit,
            load_in_8bit: bits(self.teacher_load_in_8bit, shared.load_in_8bit),
            bnb_4bit_quant_type: self.teacher_bnb_4bit_quant_type.unwrap_or(shared.bnb_4bit_quant_type),
            use_bnb_nested_quant: self.teacher_use_bnb_nested_quant.unwrap_or(shared.use_bnb_nested_quant),
        }
    }

    /// Whether a setting gives the teacher's bits: 4, 8 or none.
    fn is_set(&self) -> bool {
        self.teacher_load_in_4bit.is_some() || self.teacher_load_in_8bit.is_some()
    }

    fn check(&self, shared: &QuantizationConfig, use_peft: bool) -> Result<()> {
        let teacher = self.for_teacher(shared);
        let mut refusals = Refusals::default();
        if self.is_set() && teacher.load_in_4bit && teacher.load_in_8bit {
            refusals.add(exclude(
                name_of!(self.teacher_load_in_4bit),
                name_of!(self.teacher_load_in_8bit),
                " = true and teacher_load_in_8bit = true exclude each other: set one of them",
            ))?;
        }
        if !teacher.load_in_4bit {
            let why = "without teacher_load_in_4bit";
            if let Some(quant_type) = self.teacher_bnb_4bit_quant_type {
                refusals.add(no_effect(name_of!(self.teacher_bnb_4bit_quant_type), quant_type.name(), why))?;
            }
            if let Some(nested) = self.teacher_use_bnb_nested_quant {
                refusals.add(no_effect(name_of!(self.teacher_use_bnb_nested_quant), nested, why))?;
            }
        }
        if let Some(name) = shared.named().filter(|_| self.is_set() && !use_peft) {
            let why =
                "without use_peft, as the teacher has settings of its own: a student in 4 or 8 bits trains adapters";
            refusals.add(no_effect(name, true, why))?;
        }
        let mut shared = shared.clone();
        let usual = QuantizationConfig::default();
        if teacher.load_in_4bit && !shared.load_in_4bit {
            // Where the teacher has no setting of its own, it takes the shared one, which then has an effect.
            if self.teacher_bnb_4bit_quant_type.is_none() {
                shared.bnb_4bit_quant_type = usual.bnb_4bit_quant_type;
            }
            if self.teacher_use_bnb_nested_quant.is_none() {
                shared.use_bnb_nested_quant = usual.use_bnb_nested_quant;
            }
        }
        refusals.add(shared.check())?;
        refusals.end()
    }
}

/// The loss of a token, and its parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct DistillLossConfig {
    /// Loss of a token.
    #[setting(heading = LOSS, default = "jsd")]
    pub loss_type: DistillLoss,
    /// Share of the teacher in the mixture of `jsd`: 0 is the KL divergence from teacher to student (forward), 1 that from student to
    /// teacher (reverse), 0.5 the Jensen-Shannon divergence.
    #[setting(heading = LOSS, default = 1.0, short = "0: forward KL, 1: reverse KL")]
    pub beta: f64,
    /// Compare the teacher's likeliest tokens only, this many in each place; 0 compares the whole vocabulary.
    #[setting(heading = LOSS, default = 0)]
    pub loss_top_k: usize,
    /// With `loss_top_k`, all other tokens together are one more outcome; otherwise the probabilities of the `loss_top_k` are scaled to sum
    /// to 1.
    #[setting(heading = LOSS, default = true)]
    pub loss_add_tail: bool,
}

/// A loss of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum DistillLoss {
    /// The generalized Jensen-Shannon divergence of both distributions, over all tokens that could be next.
    Jsd,
    /// Policy gradient: the advantage of a sampled token is the difference of its log-probabilities under teacher and student, an estimate
    /// of the negative reverse KL divergence. Needs lmbda = 1.
    ReverseKlAdvantage,
}

impl DistillLossConfig {
    fn check(&self) -> Result<()> {
        let usual: Self = defaults();
        let mut refusals = Refusals::default();
        refusals.add(zero_to_one("beta", self.beta))?;
        if self.loss_type == DistillLoss::ReverseKlAdvantage {
            let why = "with loss_type = reverse_kl_advantage, which compares the sampled token alone";
            if self.beta != usual.beta {
                refusals.add(no_effect("beta", self.beta, why))?;
            }
            if self.loss_top_k > 0 {
                refusals.add(no_effect("loss_top_k", self.loss_top_k, why))?;
            }
        }
        if self.loss_top_k == 0 && !self.loss_add_tail {
            refusals.add(no_effect("loss_add_tail", false, "without loss_top_k"))?;
        }
        refusals.end()
    }
}

impl RunSettings for DistillConfig {
    fn described(&self) -> Vec<Field> {
        Self::fields()
    }
}

impl DistillConfig {
    /// Creates a configuration with every default, for these models, these rows and this output folder.
    pub fn new(
        model_name_or_path: impl Into<PathBuf>,
        teacher_model_name_or_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        let mut config: Self = defaults_with(&OWN_DEFAULTS);
        config.model_name_or_path = model_name_or_path.into();
        config.teacher_model_name_or_path = teacher_model_name_or_path.into();
        config.data.dataset_name = vec![dataset_name.into()];
        config.run.output_dir = output_dir.into();
        config
    }

    /// Returns the settings of groups that have another default in this command, by name.
    pub fn own_defaults() -> &'static [(&'static str, &'static str)] {
        &OWN_DEFAULTS
    }

    /// Checks every setting that needs no dataset to be checked.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        all([
            self.data.check(self.eval_dataset_name.as_deref()),
            self.max_length.map_or(Ok(()), |most| at_least_one(name_of!(self.max_length), most)),
            self.prompt_length.check(),
            at_least_one(name_of!(self.per_device_eval_batch_size), self.per_device_eval_batch_size),
            at_least_one(name_of!(self.logging_steps), self.logging_steps),
            at_least_one(name_of!(self.max_completion_length), self.max_completion_length),
            at_least_one(name_of!(self.local_rollout_forward_batch_size), self.local_rollout_forward_batch_size),
            self.check_sampling(),
            self.loss.check(),
            self.peft.check(),
            self.teacher_quantization.check(&self.run.quantization, self.peft.use_peft),
            check_learning(self.learning_rate, &self.optimizer, None),
            self.optimizer.check_held(&[self.run.dist.zero_stage], self.run.bf16, self.peft.use_peft),
            self.run.check_save_dtype(self.peft.use_peft),
            self.run.check(&[self.run.dist.zero_stage], &self.eval),
            self.eval.check(self.run.checkpoints.save_steps, &EVAL_METRICS),
            self.plan_for(1).map(drop),
        ])
    }

    /// Checks the settings of responses.
    fn check_sampling(&self) -> Result<()> {
        let mut refusals = Refusals::default();
        refusals.add(zero_to_one("lmbda", self.lmbda))?;
        refusals.add(self.sampling.check())?;
        for (name, temperature) in
            [("temperature", Some(self.temperature)), ("loss_temperature", self.loss_temperature)]
        {
            let Some(temperature) = temperature else { continue };
            refusals.add(above_zero(name, temperature))?;
            if temperature > 0.0 && temperature < MIN_TEMPERATURE {
                refusals.add(refuse(name, format!(" = {temperature}: expected a number from {MIN_TEMPERATURE}")))?;
            }
        }
        if self.seq_kd && self.lmbda == 1.0 {
            let why = "with lmbda = 1, where the student samples all responses; expected lmbda below 1";
            refusals.add(no_effect("seq_kd", true, why))?;
        }
        if self.sampling.logprobs_of == LogprobsOf::Filtered {
            refusals.add(refuse(
                "logprobs_of",
                " = filtered: expected policy: the distributions that are compared are those over the whole vocabulary",
            ))?;
        }
        if self.loss.loss_type == DistillLoss::ReverseKlAdvantage && self.lmbda < 1.0 {
            refusals.add(refuse("lmbda", format!(
                " = {} with loss_type = reverse_kl_advantage: expected 1, as the advantage is that of tokens that the student has \
                 sampled; loss_type = jsd learns from other responses too",
                self.lmbda
            )))?;
        }
        if self.loss.loss_type == DistillLoss::ReverseKlAdvantage
            && let Some(other) = self.loss_temperature.filter(|other| *other != self.temperature)
        {
            refusals.add(refuse("loss_temperature", format!(
                " = {other} with loss_type = reverse_kl_advantage: expected temperature, {}, or none, as the advantage is that of \
                 tokens sampled at it",
                self.temperature
            )))?;
        }
        if self.reads_responses() && self.samples() && self.prompt_length.long_prompts == LongPrompts::TruncateRight {
            refusals.add(refuse(
                "long_prompts",
                " = truncate_right with lmbda between 0 and 1: expected error, drop or truncate_left: what follows a prompt in its row \
                 is its response",
            ))?;
        }
        if !self.samples() {
            self.check_unsampled(&mut refusals)?;
        }
        if let Some(count) = self.num_completions_to_print {
            refusals.add(at_least_one("num_completions_to_print", count))?;
            if !self.log_completions {
                refusals.add(no_effect("num_completions_to_print", count, "without log_completions"))?;
            }
        }
        refusals.end()
    }

    /// Refuses settings of sampled responses where none is sampled.
    fn check_unsampled(&self, refusals: &mut Refusals) -> Result<()> {
        let why = "with lmbda = 0 and without seq_kd: no response is sampled";
        let sampling = &self.sampling;
        if let Some(most) = self.prompt_length.max_prompt_length {
            refusals.add(no_effect("max_prompt_length", most, &format!("{why}; max_length limits rows")))?;
        }
        if self.prompt_length.long_prompts != LongPrompts::Error {
            let value = self.prompt_length.long_prompts.name();
            refusals.add(no_effect("long_prompts", value, &format!("{why}; max_length limits rows")))?;
        }
        if self.log_completions {
            refusals.add(no_effect("log_completions", true, why))?;
        }
        for (name, value) in self.changed_sampling() {
            refusals.add(no_effect(name, value, why))?;
        }
        if !sampling.stop_strings.is_empty() {
            refusals.add(no_effect("stop_strings", format!("{:?}", sampling.stop_strings.join(", ")), why))?;
        }
        Ok(())
    }

    /// Returns the settings, with their values, that make the sampled distribution differ from the whole one at the temperature.
    pub(crate) fn changed_sampling(&self) -> Vec<(&'static str, String)> {
        let usual: SamplingConfig = defaults();
        let sampling = &self.sampling;
        let all = [
            ("top_k", sampling.top_k as f64, usual.top_k as f64),
            ("top_p", sampling.top_p, usual.top_p),
            ("min_p", sampling.min_p, usual.min_p),
            ("repetition_penalty", sampling.repetition_penalty, usual.repetition_penalty),
            ("min_new_tokens", sampling.min_new_tokens as f64, usual.min_new_tokens as f64),
        ];
        all.into_iter()
            .filter(|(_, value, usual)| value != usual)
            .map(|(name, value, _)| (name, value.to_string()))
            .collect()
    }

    /// Whether the student learns the dataset's responses in some steps.
    pub(crate) fn reads_responses(&self) -> bool {
        self.lmbda < 1.0 && !self.seq_kd
    }

    /// Whether responses are sampled in some steps.
    pub(crate) fn samples(&self) -> bool {
        self.lmbda > 0.0 || self.seq_kd
    }

    /// Returns the divergence of the loss.
    pub(crate) fn divergence(&self) -> Divergence {
        let DistillLossConfig { beta, loss_top_k, loss_add_tail, .. } = self.loss;
        let sampled = self.loss.loss_type == DistillLoss::ReverseKlAdvantage;
        Divergence { beta, temperature: self.temperature_of_loss(), top_k: loss_top_k, tail: loss_add_tail, sampled }
    }

    /// Returns the temperature of the distributions in the loss.
    pub(crate) fn temperature_of_loss(&self) -> f64 {
        self.loss_temperature.unwrap_or(self.temperature)
    }

    /// Whether logits of student and teacher, whose vocabularies have these sizes, are compared slice by slice. A loss of sampled tokens
    /// needs no slices if both vocabularies have the same size: each model computes its own log-probabilities.
    pub(crate) fn compares_slices(&self, [student, teacher]: [i64; 2]) -> bool {
        self.loss.loss_type == DistillLoss::Jsd || student != teacher
    }

    /// Returns the format of the teacher's weights; `None` if they stay as they are.
    pub(crate) fn teacher_format(&self) -> Option<Quantization> {
        self.teacher_quantization.for_teacher(&self.run.quantization).quantization()
    }

    /// Returns the dtype of the teacher's weights.
    pub(crate) fn dtype_of_teacher(&self) -> Dtype {
        self.teacher_dtype.unwrap_or(self.run.dtype)
    }

    /// Returns the method of sampling.
    pub(crate) fn sampled_by(&self) -> Sampling {
        let SamplingConfig { top_k, top_p, min_p, .. } = self.sampling;
        Sampling::Random { temperature: self.temperature, top_k, top_p, min_p }
    }
}
