//! What a run is asked to do: one plain type per command, and the sizes that follow from it.
//!
//! A field's name is the flag's name, the configuration file's key and, where TRL has the setting, TRL's name. Its doc
//! comment is its `--help` text. Every default is written once, in the field's `arg` attribute: the constructors take
//! theirs from there.

mod resolve;

use std::fmt::Display;
use std::path::{Path, PathBuf};

use clap::{ArgAction, Args, ValueEnum};
use serde::Serialize;
use serde_json::Value;

use crate::data::Columns;
pub use crate::data::settings::{DataConfig, DataSplit, LongPrompts, PromptLengthConfig, Stage};
use crate::device::{Device, check_threads};
pub use crate::flag::ByteSize;
use crate::flag::{
    BATCHES, CHECKPOINTS, DATA, EVALUATION, LORA, LOSS, MODELS, NONE, OPTIMIZER, PPO, RUN, Refusals, SAMPLING, Setting,
    above_zero, all, at_least_one, defaults, defaults_with, expect, no_effect, optional, required, usage, zero_or_more,
    zero_to_one,
};
pub use crate::generate::settings::{LogprobsOf, SamplingConfig, StopToken};
use crate::generate::{GenerationConfig, Sampling};
pub use crate::model::PeftConfig;
use crate::model::{ClassifierFormat, Dtype, LoraConfig, MOST_RANK, ModelOptions};
pub use crate::optim::loss_scale::{Fp16Config, LossScaleConfig};
use crate::optim::settings::check_learning;
pub use crate::optim::settings::{LrSchedulerType, OptimizerConfig};
use crate::reward::{RewardSources, Rewards, Spec, resolve};
pub use crate::reward::{RewardSourcesConfig, ScoreScalingConfig};
pub use crate::rl::ema::EmaConfig;
pub use crate::rl::kl::KlConfig;
use crate::rl::learner::EpochPlan;
use crate::rl::math::{KlEstimator, PolicyClip, ScorePosition};
pub use crate::rl::settings::{EosInLoss, LossConfig, MaskConfig, WhitenAdvantages};
pub use crate::rl::unsupervised::UnsupervisedConfig;
pub use crate::run::resolved::write_resolved;
pub(crate) use crate::run::settings::EVAL_SCORES;
use crate::run::settings::resume_or_false;
pub use crate::run::settings::{
    CheckpointConfig, EvalConfig, ReportTo, Resume, RunConfig, TensorboardTags, WatchConfig,
};
use crate::tokenizer::Tokenizer;
use crate::weights::brief;
use crate::{Error, Result, hub};

/// What `rlhf ppo` does.
///
/// ```no_run
/// use rlhf::settings::PpoConfig;
/// # fn main() -> rlhf::Result<()> {
/// let mut config = PpoConfig::new("runs/sft", "runs/reward", "prompts.jsonl", "runs/ppo");
/// config.learning_rate = 1e-5;
/// config.run.checkpoints.save_steps = Some(10);
/// config.check()?;
/// println!("{} updates for 1,000 prompts", config.plan(1_000)?.num_total_batches);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct PpoConfig {
    /// Folder or hub name of the model to take the tokenizer from [default: the policy's].
    #[arg(long, help_heading = MODELS, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub model_name_or_path: std::option::Option<PathBuf>,
    /// Folder or hub name of the causal language model that is trained; a frozen copy of it is the KL reference.
    #[arg(long, alias = "model_name", help_heading = MODELS)]
    pub sft_model_path: PathBuf,
    /// Branch, tag or commit of `sft_model_path`, where that is a hub name.
    #[arg(long, help_heading = MODELS, default_value = "main")]
    pub model_revision: String,
    /// Folder or hub name of the reward model, a sequence classifier; one with another tokenizer than the policy reads
    /// decoded text.
    #[arg(
        long, alias = "reward_model", help_heading = MODELS, default_value = NONE, hide_default_value = true,
        value_parser = optional::<PathBuf>
    )]
    pub reward_model_path: std::option::Option<PathBuf>,
    /// The label that is the score, by name or number, or a difference such as POSITIVE-NEGATIVE.
    #[arg(long, help_heading = MODELS, default_value = NONE, hide_default_value = true, value_parser = optional::<String>)]
    pub reward_label: std::option::Option<String>,
    /// Folder or hub name of what the value model starts from [default: the reward model's, where that reads the policy's
    /// tokens, else the policy's with a fresh head].
    #[arg(long, help_heading = MODELS, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub value_model_path: std::option::Option<PathBuf>,
    /// Give a reward or value model that has no score head a fresh, random one.
    #[arg(long, help_heading = MODELS)]
    pub new_reward_head: bool,

    /// Rewards beside, or in place of, the reward model.
    #[command(flatten)]
    #[serde(flatten)]
    pub rewards: RewardSourcesConfig,

    /// Where prompts come from.
    #[command(flatten)]
    #[serde(flatten)]
    pub data: DataConfig,
    /// How long they may be.
    #[command(flatten)]
    #[serde(flatten)]
    pub prompt_length: PromptLengthConfig,
    /// Put a prompt that is a string into the chat template, as what the user says.
    #[arg(long, help_heading = DATA)]
    pub apply_chat_template: bool,

    /// Whose settings and sizes: `trl-ppov2` is TRL 0.9 to 0.11, whose `num_mini_batches` is a factor of an update's size;
    /// `trl-legacy` is the trainer with `step()`, a value head on the policy's trunk and other defaults; `deepspeed-chat` is DeepSpeed-Chat's third step.
    #[arg(long, help_heading = BATCHES, value_enum, default_value = "trl")]
    pub preset: Preset,
    /// An update of its own size, apart from what a step trains on.
    #[command(flatten)]
    #[serde(flatten)]
    pub generation: GenerationBatchesConfig,
    /// Sequences in one forward and backward pass.
    #[arg(long, help_heading = BATCHES, default_value_t = 8)]
    pub per_device_train_batch_size: usize,
    /// An update answers this times `per_device_train_batch_size` prompts.
    #[arg(long, help_heading = BATCHES, default_value_t = 1)]
    pub gradient_accumulation_steps: usize,
    /// Optimizer steps that each PPO epoch takes over an update's answers; must divide their number.
    #[arg(long, help_heading = BATCHES, default_value_t = 1)]
    pub num_mini_batches: usize,
    /// Sequences that the no-gradient passes take at a time.
    #[arg(long, help_heading = BATCHES, default_value_t = 64)]
    pub local_rollout_forward_batch_size: usize,
    /// Answers to train on, rounded up to whole updates [default: `num_train_epochs` times the prompts].
    #[arg(
        long, alias = "steps", help_heading = BATCHES, default_value = NONE, hide_default_value = true,
        value_parser = optional::<usize>
    )]
    pub total_episodes: std::option::Option<usize>,
    /// Passes over the prompts, when `total_episodes` is not set.
    #[arg(long, help_heading = BATCHES, default_value_t = 3.0)]
    pub num_train_epochs: f64,
    /// Show a sample table about this many times in the run, and at its end; 0 for never.
    #[arg(long, help_heading = BATCHES, default_value_t = 10)]
    pub num_sample_generations: usize,

    /// Tokens of an answer, at most.
    #[arg(long, help_heading = SAMPLING, default_value_t = 53)]
    pub response_length: usize,
    /// Cut answers after this token: `eos` is the tokenizer's, or another that its `generation_config.json` names.
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_name = StopToken::NAME, value_parser = optional::<StopToken>)]
    pub stop_token: std::option::Option<StopToken>,
    /// Cut answers after the token with this id.
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<i64>)]
    pub stop_token_id: std::option::Option<i64>,
    /// Temperature of sampling and of every log-probability.
    #[arg(long, help_heading = SAMPLING, default_value_t = 0.7)]
    pub temperature: f64,
    /// What else decides how answers are sampled, and where they end.
    #[command(flatten)]
    #[serde(flatten)]
    pub sampling: SamplingConfig,

    /// Passes over an update's answers.
    #[arg(long, alias = "ppo_epochs", help_heading = PPO, default_value_t = 4)]
    pub num_ppo_epochs: usize,
    /// Subtract this from the score of an answer without its stop token.
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub missing_eos_penalty: std::option::Option<f64>,
    /// Replace the score of an answer without its stop token by `penalty_reward_value`.
    #[arg(long, help_heading = PPO)]
    pub non_eos_penalty: bool,
    /// The score of an answer without its stop token, with `non_eos_penalty`.
    #[arg(long, help_heading = PPO, default_value_t = -1.0)]
    pub penalty_reward_value: f64,
    /// Where the score lands: one slot after the stop token, or on the answer's last token.
    #[arg(long, help_heading = PPO, value_enum, default_value = "after_stop")]
    pub score_position: ScorePosition,
    /// How the KL's weight moves, and where the KL goes.
    #[command(flatten)]
    #[serde(flatten)]
    pub kl: KlConfig,
    /// Scale the rewards of an update to variance 1.
    #[arg(long, help_heading = PPO)]
    pub whiten_rewards: bool,
    /// Shift and scale the advantages to mean 0 and variance 1 over an update's tokens, over those of each mini-batch, or not.
    #[arg(long, help_heading = PPO, value_enum, default_value = "batch")]
    pub whiten_advantages: WhitenAdvantages,
    /// Discount of later rewards.
    #[arg(long, help_heading = PPO, default_value_t = 1.0)]
    pub gamma: f64,
    /// Lambda of generalized advantage estimation.
    #[arg(long, help_heading = PPO, default_value_t = 0.95)]
    pub lam: f64,
    /// Clip the probability ratio to 1 plus or minus this.
    #[arg(long, help_heading = PPO, default_value_t = 0.2)]
    pub cliprange: f64,
    /// Clip the new value to the old one plus or minus this.
    #[arg(long, help_heading = PPO, default_value_t = 0.2)]
    pub cliprange_value: f64,
    /// Weight of the value loss.
    #[arg(long, help_heading = PPO, default_value_t = 0.1)]
    pub vf_coef: f64,
    /// Further terms and limits of the policy's steps.
    #[command(flatten)]
    #[serde(flatten)]
    pub loss: LossConfig,
    /// Clip an answer's whole score, scores of its tokens included, to plus or minus this where it becomes a reward.
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub clip_reward_value: std::option::Option<f64>,
    /// The responses and tokens that are trained on.
    #[command(flatten)]
    #[serde(flatten)]
    pub mask: MaskConfig,
    /// A text's likelihood as a further loss of the policy.
    #[command(flatten)]
    #[serde(flatten)]
    pub unsupervised: UnsupervisedConfig,
    /// A moving average of the policy.
    #[command(flatten)]
    #[serde(flatten)]
    pub ema: EmaConfig,
    /// What the preset `trl-legacy` needs.
    #[command(flatten)]
    #[serde(flatten)]
    pub legacy: LegacyConfig,
    /// Scaling of the scores that are trained on.
    #[command(flatten)]
    #[serde(flatten)]
    pub score_scaling: ScoreScalingConfig,

    /// Low-rank adapters in place of all weights.
    #[command(flatten)]
    #[serde(flatten)]
    pub peft: PeftConfig,
    /// Where the value model's adapters differ.
    #[command(flatten)]
    #[serde(flatten)]
    pub value_peft: ValuePeftConfig,
    /// Peak learning rate.
    #[arg(long, help_heading = OPTIMIZER, default_value = "3e-6")]
    pub learning_rate: f64,
    /// The rest of the optimizer's settings.
    #[command(flatten)]
    #[serde(flatten)]
    pub optimizer: OptimizerConfig,
    /// Where the value model's settings differ.
    #[command(flatten)]
    #[serde(flatten)]
    pub value: ValueConfig,
    /// What the run asserts of its own numbers.
    #[command(flatten)]
    #[serde(flatten)]
    pub watch: WatchConfig,
    /// What belongs to float16 and two models.
    #[command(flatten)]
    #[serde(flatten)]
    pub half: Fp16Config,
    /// What it shows of its answers, and when it ends as a test.
    #[command(flatten)]
    #[serde(flatten)]
    pub trial: TrialConfig,
    /// Prompts to answer in an evaluation, at most: the first of the split.
    #[arg(long, help_heading = EVALUATION, default_value_t = NUM_EVAL_PROMPTS)]
    pub num_eval_prompts: usize,
    /// Evaluation on the way, and the best model.
    #[command(flatten)]
    #[serde(flatten)]
    pub eval: EvalConfig,
    /// Output folder, seed, precision, reports.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunConfig,
}

/// What `rlhf sft` does.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct SftConfig {
    /// Folder or hub name of the causal language model to start from.
    #[arg(long, help_heading = MODELS, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub model_name_or_path: std::option::Option<PathBuf>,
    /// Branch, tag or commit of `model_name_or_path`, where that is a hub name.
    #[arg(long, help_heading = MODELS, default_value = "main")]
    pub model_revision: String,
    /// A `config.json`, or the hub name of a model that has it: start from random weights of this shape instead.
    #[arg(long, help_heading = MODELS, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub config_name: std::option::Option<PathBuf>,
    /// Folder or hub name to take the tokenizer from [default: the model's].
    #[arg(long, help_heading = MODELS, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub tokenizer_name: std::option::Option<PathBuf>,
    /// Chat template to use and to save [default: the tokenizer's].
    #[arg(long, help_heading = MODELS, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub chat_template_path: std::option::Option<PathBuf>,

    /// Where rows come from.
    #[command(flatten)]
    #[serde(flatten)]
    pub data: DataConfig,
    /// A dataset of its own for evaluation.
    #[arg(long, help_heading = DATA, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub eval_dataset_name: std::option::Option<PathBuf>,
    /// Field of a row with a text to learn whole.
    #[arg(long, help_heading = DATA, default_value = "text")]
    pub dataset_text_field: String,
    /// Tokens of a row, at most; longer rows are cut at their end.
    #[arg(long, help_heading = DATA, default_value_t = 1024)]
    pub max_length: usize,
    /// Fill blocks of `max_length` tokens with whole rows; batch sizes count blocks.
    #[arg(long, help_heading = DATA, default_value_t = false)]
    pub packing: bool,

    /// Rows in one forward and backward pass.
    #[arg(long, help_heading = BATCHES, default_value_t = 8)]
    pub per_device_train_batch_size: usize,
    /// Rows in one forward pass of the evaluation.
    #[arg(long, help_heading = BATCHES, default_value_t = 8)]
    pub per_device_eval_batch_size: usize,
    /// Forward and backward passes in one optimizer step.
    #[arg(long, help_heading = BATCHES, default_value_t = 1)]
    pub gradient_accumulation_steps: usize,
    /// Passes over the dataset, when `max_steps` is not set.
    #[arg(long, help_heading = BATCHES, default_value_t = 3.0)]
    pub num_train_epochs: f64,
    /// Optimizer steps to take.
    #[arg(long, help_heading = BATCHES, default_value = NONE, value_parser = steps_or_minus_one)]
    pub max_steps: std::option::Option<usize>,
    /// Optimizer steps between two lines of metrics.
    #[arg(long, help_heading = BATCHES, default_value_t = 10)]
    pub logging_steps: usize,

    /// In rows with a prompt and a completion, learn the completion only.
    #[arg(long, help_heading = LOSS, default_value_t = true)]
    pub completion_only_loss: bool,
    /// In conversations, learn what the assistant says only.
    #[arg(long, help_heading = LOSS, default_value_t = false)]
    pub assistant_only_loss: bool,

    /// Low-rank adapters in place of all weights.
    #[command(flatten)]
    #[serde(flatten)]
    pub peft: PeftConfig,
    /// Peak learning rate.
    #[arg(long, help_heading = OPTIMIZER, default_value = "2e-5")]
    pub learning_rate: f64,
    /// The rest of the optimizer's settings.
    #[command(flatten)]
    #[serde(flatten)]
    pub optimizer: OptimizerConfig,
    /// Evaluation on the way, and the best model.
    #[command(flatten)]
    #[serde(flatten)]
    pub eval: EvalConfig,
    /// Output folder, seed, precision, reports.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunConfig,
}

/// What `rlhf reward` does.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct RewardConfig {
    /// Folder or hub name of the model to start from: a sequence classifier with one label, or a language model that gets a head.
    #[arg(long, help_heading = MODELS)]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path`, where that is a hub name.
    #[arg(long, help_heading = MODELS, default_value = "main")]
    pub model_revision: String,
    /// Give a model that has no score head a fresh, random one.
    #[arg(long, help_heading = MODELS)]
    pub new_reward_head: bool,
    /// Names of the saved tensors: transformers' (`score.weight`) or deepspeed-chat's (`v_head.weight`) [default: those of
    /// the folder that the head is read from].
    #[arg(long, help_heading = MODELS, default_value = NONE, hide_default_value = true, value_name = ClassifierFormat::NAME, value_parser = optional::<ClassifierFormat>)]
    pub reward_format: std::option::Option<ClassifierFormat>,

    /// Where rows come from.
    #[command(flatten)]
    #[serde(flatten)]
    pub data: DataConfig,
    /// A dataset of its own for evaluation.
    #[arg(long, help_heading = DATA, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub eval_dataset_name: std::option::Option<PathBuf>,
    /// With `pair_loss = tokens`, pads that a text may hold before the one that ends it [default: those that it begins with].
    #[arg(long, help_heading = DATA, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub num_padding_at_beginning: std::option::Option<usize>,
    /// Tokens of a row, at most; pairs with a longer side are left out, with a warning that counts them.
    #[arg(long, help_heading = DATA, default_value_t = 1024)]
    pub max_length: usize,

    /// Pairs in one forward and backward pass.
    #[arg(long, help_heading = BATCHES, default_value_t = 8)]
    pub per_device_train_batch_size: usize,
    /// Pairs in one forward pass of the evaluation.
    #[arg(long, help_heading = BATCHES, default_value_t = 8)]
    pub per_device_eval_batch_size: usize,
    /// Forward and backward passes in one optimizer step.
    #[arg(long, help_heading = BATCHES, default_value_t = 1)]
    pub gradient_accumulation_steps: usize,
    /// Passes over the dataset, when `max_steps` is not set.
    #[arg(long, help_heading = BATCHES, default_value_t = 3.0)]
    pub num_train_epochs: f64,
    /// Optimizer steps to take.
    #[arg(long, help_heading = BATCHES, default_value = NONE, value_parser = steps_or_minus_one)]
    pub max_steps: std::option::Option<usize>,
    /// Optimizer steps between two lines of metrics.
    #[arg(long, help_heading = BATCHES, default_value_t = 10)]
    pub logging_steps: usize,

    /// What of a pair is compared: the scores of the two texts, or, as in DeepSpeed-Chat, what is said at every token from
    /// where they part, with pads or without.
    #[arg(long, help_heading = LOSS, value_enum, default_value = "sequence")]
    pub pair_loss: PairLoss,
    /// Weight of a loss that keeps each pair's two scores centred on 0.
    #[arg(long, help_heading = LOSS, default_value = NONE, value_parser = optional::<f64>)]
    pub center_rewards_coefficient: std::option::Option<f64>,

    /// Low-rank adapters in place of all weights.
    #[command(flatten)]
    #[serde(flatten)]
    pub peft: PeftConfig,
    /// Peak learning rate.
    #[arg(long, help_heading = OPTIMIZER, default_value = "1e-4")]
    pub learning_rate: f64,
    /// The rest of the optimizer's settings.
    #[command(flatten)]
    #[serde(flatten)]
    pub optimizer: OptimizerConfig,
    /// Train nothing: write the model's loss, accuracy and margin on the rows that are held out, else on all rows, to standard
    /// output as JSON; output_dir is not needed, and no file is written.
    #[arg(long, help_heading = EVALUATION)]
    pub eval_only: bool,
    /// Evaluation on the way, and the best model.
    #[command(flatten)]
    #[serde(flatten)]
    pub eval: EvalConfig,
    /// Output folder, seed, precision, reports.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunConfig,
}

/// What `rlhf merge` does.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct MergeConfig {
    /// Folder or hub name of the adapter; it names its base.
    #[arg(long, alias = "model", help_heading = MODELS)]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path`, where that is a hub name.
    #[arg(long, help_heading = MODELS, default_value = "main")]
    pub model_revision: String,
    /// Folder for the whole model.
    #[arg(long, help_heading = RUN)]
    pub output_dir: PathBuf,
    /// Replace the run, or the merged model, that `output_dir` holds.
    #[arg(long, help_heading = RUN)]
    #[serde(skip)] // As for a run.
    pub overwrite_output_dir: bool,
    /// Write weights in files of at most this size each, such as 5GB or 500MB.
    #[arg(long, help_heading = RUN, default_value = "50GB", value_name = ByteSize::NAME, value_parser = required::<ByteSize>)]
    pub max_shard_size: ByteSize,
}

/// What `rlhf generate` does.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct GenerateConfig {
    /// Folder or hub name of the causal language model.
    #[arg(long, alias = "model", help_heading = MODELS)]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path`, where that is a hub name.
    #[arg(long, help_heading = MODELS, default_value = "main")]
    pub model_revision: String,

    /// Prompts [default: those of the dataset, else of standard input].
    #[arg(value_name = "PROMPT")]
    pub prompts: Vec<String>,
    /// What standard input holds: `text`, a prompt per line, or `jsonl`, a row per line as in a dataset.
    #[arg(long, help_heading = DATA, default_value = "text", value_name = Format::NAME, value_parser = required::<Format>)]
    pub input_format: Format,
    /// `text` to read, `jsonl` for programs [default: text on a terminal, else jsonl].
    #[arg(long, help_heading = DATA, default_value = NONE, hide_default_value = true, value_name = Format::NAME, value_parser = optional::<Format>)]
    pub output_format: std::option::Option<Format>,
    /// Put a prompt that is a string into the chat template, as what the user says.
    #[arg(long, help_heading = DATA)]
    pub apply_chat_template: bool,

    /// Tokens of an answer, at most [default: the model's `generation_config.json`, else 53].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub max_new_tokens: std::option::Option<usize>,
    /// Tokens of an answer, at least [default: the model's `generation_config.json`, else 0].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub min_new_tokens: std::option::Option<usize>,
    /// Draw the next token; `false` always takes the likeliest [default: the model's `generation_config.json`, else true].
    #[arg(
        long, help_heading = SAMPLING, default_value = NONE, hide_default_value = true, value_parser = optional::<bool>,
        num_args = 0..=1, default_missing_value = "true", require_equals = true
    )]
    pub do_sample: std::option::Option<bool>,
    /// Temperature; 0 always takes the likeliest token [default: the model's `generation_config.json`, else 1].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, hide_default_value = true, value_parser = optional::<f64>)]
    pub temperature: std::option::Option<f64>,
    /// Sample from this many likeliest tokens only; 0 for all [default: the model's `generation_config.json`, else 0].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub top_k: std::option::Option<usize>,
    /// Sample from the fewest likeliest tokens that hold this much probability; 1 for all [default: the model's `generation_config.json`, else 1].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, hide_default_value = true, value_parser = optional::<f64>)]
    pub top_p: std::option::Option<f64>,
    /// Sample from tokens at least this many times as likely as the likeliest; 0 for all [default: the model's `generation_config.json`, else 0].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, hide_default_value = true, value_parser = optional::<f64>)]
    pub min_p: std::option::Option<f64>,
    /// Make tokens of the prompt and the answer less likely to come again; 1 for no penalty [default: the model's `generation_config.json`, else 1].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, hide_default_value = true, value_parser = optional::<f64>)]
    pub repetition_penalty: std::option::Option<f64>,
    /// Answers to each prompt.
    #[arg(long, help_heading = SAMPLING, default_value_t = 1)]
    pub num_return_sequences: usize,
    /// Stop at the token with this id too; several with commas between them, or the flag several times.
    #[arg(long, help_heading = SAMPLING, value_delimiter = ',')]
    pub stop_token_ids: Vec<i64>,
    /// Stop with the token that completes this text; the flag several times for several.
    #[arg(long, help_heading = SAMPLING)]
    pub stop_strings: Vec<String>,
    /// Do not stop at the end-of-sequence tokens of the model and its tokenizer.
    #[arg(long, help_heading = SAMPLING)]
    pub ignore_eos: bool,
    /// Seed of the sampling.
    #[arg(long, help_heading = SAMPLING, default_value_t = 42)]
    pub seed: u64,

    /// Where rows come from and go to.
    #[command(flatten)]
    #[serde(flatten)]
    pub rows: RowsConfig,
}

/// What `rlhf logprobs` does.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct LogprobsConfig {
    /// Folder or hub name of the causal language model.
    #[arg(long, alias = "model", help_heading = MODELS)]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path`, where that is a hub name.
    #[arg(long, help_heading = MODELS, default_value = "main")]
    pub model_revision: String,
    /// Divides the logits; 1 for the model's own distribution.
    #[arg(long, help_heading = MODELS, default_value_t = 1.0)]
    pub temperature: f64,
    /// Where rows come from and go to.
    #[command(flatten)]
    #[serde(flatten)]
    pub rows: RowsConfig,
}

/// What `rlhf score` does.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct ScoreConfig {
    /// Folder or hub name of the reward model, a sequence classifier.
    #[arg(long, alias = "model", help_heading = MODELS, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub model_name_or_path: std::option::Option<PathBuf>,
    /// Branch, tag or commit of `model_name_or_path`, where that is a hub name.
    #[arg(long, help_heading = MODELS, default_value = "main")]
    pub model_revision: String,
    /// The label that is the score, by name or number, or a difference such as POSITIVE-NEGATIVE.
    #[arg(long, help_heading = MODELS, default_value = NONE, hide_default_value = true, value_parser = optional::<String>)]
    pub reward_label: std::option::Option<String>,
    /// Folder or hub name of the policy's tokenizer, by which rewards see prompts and answers [default: the reward model's].
    #[arg(long, help_heading = MODELS, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub tokenizer_name: std::option::Option<PathBuf>,
    /// Rewards beside, or in place of, the reward model.
    #[command(flatten)]
    #[serde(flatten)]
    pub rewards: RewardSourcesConfig,
    /// Where rows come from and go to.
    #[command(flatten)]
    #[serde(flatten)]
    pub rows: RowsConfig,
}

/// Where `generate`, `logprobs` and `score` take rows from, and where they write them.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct RowsConfig {
    /// Dataset to take rows from: a file, a folder or a hub name [default: standard input].
    #[arg(long, help_heading = DATA, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub dataset_name: std::option::Option<PathBuf>,
    /// Split of the dataset, where it is a folder or on the hub.
    #[arg(long, help_heading = DATA, default_value = "test")]
    pub dataset_split: String,
    /// Columns to read as other fields, as FIELD=COLUMN with commas between them, such as prompt=question; FIELD=none leaves
    /// a field out.
    #[arg(long, help_heading = DATA, value_delimiter = ',')]
    pub dataset_columns: Vec<String>,
    /// File to write to [default: standard output].
    #[arg(long, help_heading = DATA, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub output_file: std::option::Option<PathBuf>,
    /// Replace `output_file` if it is there.
    #[arg(long, help_heading = DATA)]
    #[serde(skip)] // Consent to lose a file is given for one run, never by a file that the run left behind.
    pub overwrite_output_file: bool,

    /// Sequences that the model takes at a time; changes memory and speed.
    #[arg(long, help_heading = RUN, default_value_t = 32)]
    pub batch_size: usize,
    /// Dtype that the model is held in and computes in, `auto` for its files'.
    #[arg(long, help_heading = RUN, value_enum, default_value = "auto")]
    pub dtype: Dtype,
    /// Where to compute: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
    #[arg(long, help_heading = RUN, default_value_t = Device::Auto, value_name = Device::NAME, value_parser = required::<Device>)]
    pub device: Device,
    /// Threads for tensor operations [default: one per core].
    #[arg(long, help_heading = RUN, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub num_threads: std::option::Option<usize>,
}

/// What `rlhf pipeline` does, beside what each of its steps does.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct PipelineFlags {
    /// Folder for the steps' folders: 1-sft, 2-reward and 3-ppo.
    #[arg(long, help_heading = RUN)]
    pub output_dir: PathBuf,
    /// Replace the runs that the folders of the steps hold.
    #[arg(long, help_heading = RUN)]
    pub overwrite_output_dir: bool,
    /// Steps to leave out: sft, reward, ppo. What their folders hold is used as it is.
    #[arg(long, help_heading = RUN, value_enum, value_delimiter = ',', num_args = 1.., action = ArgAction::Set)]
    pub skip: Vec<Stage>,
    /// Pass over the steps that are finished, and go on with the one that is not from its newest checkpoint.
    #[arg(
        long, help_heading = CHECKPOINTS, default_value = NONE, hide_default_value = true, value_name = Resume::NAME, value_parser = resume_or_false,
        num_args = 0..=1, default_missing_value = "true"
    )]
    pub resume_from_checkpoint: std::option::Option<Resume>,
    /// Resume also where data or models are not those that a step began with.
    #[arg(long, help_heading = CHECKPOINTS)]
    pub resume_with_changed_inputs: bool,
}

/// Answers per update, where these are not a multiple of what an optimizer step trains on.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct GenerationBatchesConfig {
    /// An update answers this times `generation_batches` prompts, and trains on them in steps of
    /// `per_device_train_batch_size` times `gradient_accumulation_steps` [default: an update is `num_mini_batches` steps].
    #[arg(long, help_heading = BATCHES, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub per_device_generation_batch_size: std::option::Option<usize>,
    /// Batches of that size that are answered before they are trained on.
    #[arg(long, help_heading = BATCHES, default_value_t = 1)]
    pub generation_batches: usize,
}

/// Where the value model's adapters differ from the policy's; what is not set is the policy's.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct ValuePeftConfig {
    /// Whether the value model gets adapters [default: `use_peft`].
    #[arg(long, help_heading = LORA, default_value = NONE, hide_default_value = true, value_parser = optional::<bool>)]
    pub value_use_peft: std::option::Option<bool>,
    /// Their rank [default: `lora_r`].
    #[arg(long, help_heading = LORA, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub value_lora_r: std::option::Option<usize>,
    /// The layers that get one [default: `lora_target_modules`].
    #[arg(long, help_heading = LORA, value_delimiter = ',', num_args = 1..)]
    pub value_lora_target_modules: Vec<String>,
}

/// What a run shows of the answers it trains on, and when it ends as a test.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct TrialConfig {
    /// Show and keep some of the answers that the run trains on.
    #[arg(long, help_heading = BATCHES)]
    pub print_answers: bool,
    /// Updates between two times of that.
    #[arg(long, help_heading = BATCHES, default_value_t = 1)]
    pub print_answers_interval: usize,
    /// End the run after the update that `test_stop_step` counts; rates are those of the whole run.
    #[arg(long, help_heading = BATCHES)]
    pub enable_test_mode: bool,
    /// The last update of a test, counted from 0.
    #[arg(long, help_heading = BATCHES, default_value_t = 0)]
    pub test_stop_step: usize,
}

/// What TRL's trainer with `step()` does otherwise than the later ones; the preset `trl-legacy` sets the first two.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct LegacyConfig {
    /// Say values by a head on the policy's own trunk, in place of a value model: one pass and one optimizer for both.
    #[arg(long, help_heading = MODELS)]
    pub value_head: bool,
    /// Take log-probs of the policy's own distribution, whatever the temperature of sampling.
    #[arg(long, help_heading = SAMPLING)]
    pub raw_logprobs: bool,
    /// Lower layers that stay as they are, and are the reference's too: they are held once.
    #[arg(long, help_heading = MODELS, default_value = NONE, value_parser = optional::<usize>)]
    pub num_shared_layers: std::option::Option<usize>,
    /// With the preset `trl-legacy`, answers of an update [default: 128].
    #[arg(long, help_heading = BATCHES, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub batch_size: std::option::Option<usize>,
    /// With the preset `trl-legacy`, answers whose losses are averaged together; `gradient_accumulation_steps` of these averages
    /// make an optimizer step [default: `batch_size` over that].
    #[arg(long, help_heading = BATCHES, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub mini_batch_size: std::option::Option<usize>,
    /// End an update's epochs at `target_kl`, which is then 1 unless it is set.
    #[arg(long, help_heading = PPO)]
    pub early_stopping: bool,
}

/// Where the value model's optimizer differs from the policy's; what is not set is the policy's.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct ValueConfig {
    /// Updates at the beginning in which the value model learns and the policy does not.
    #[arg(long, help_heading = OPTIMIZER, default_value_t = 0)]
    pub value_warmup_updates: usize,
    /// Peak learning rate of the value model [default: `learning_rate`].
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, hide_default_value = true, value_parser = optional::<f64>)]
    pub value_learning_rate: std::option::Option<f64>,
    /// Its schedule [default: `lr_scheduler_type`].
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, hide_default_value = true, value_name = LrSchedulerType::NAME, value_parser = optional::<LrSchedulerType>)]
    pub value_lr_scheduler_type: std::option::Option<LrSchedulerType>,
    /// Updates in which its learning rate rises [default: those of `warmup_steps` or `warmup_ratio`].
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub value_lr_warmup_steps: std::option::Option<usize>,
    /// Its weight decay [default: `weight_decay`].
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, hide_default_value = true, value_parser = optional::<f64>)]
    pub value_weight_decay: std::option::Option<f64>,
    /// Clip its gradients to this norm; 0 for no clipping [default: `max_grad_norm`].
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, hide_default_value = true, value_parser = optional::<f64>)]
    pub value_max_grad_norm: std::option::Option<f64>,
}

/// Prompts of an evaluation, where nothing else is set.
pub(crate) const NUM_EVAL_PROMPTS: usize = 128;

/// Whose defaults, and whose sizes, the settings have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[value(rename_all = "kebab-case")]
pub enum Preset {
    /// TRL 1: an update answers `per_device_train_batch_size * gradient_accumulation_steps` prompts.
    Trl,
    /// The PPOv2 of TRL 0.9 to 0.11: `num_mini_batches` times as many.
    TrlPpov2,
    /// The PPOTrainer of TRL until 0.11, with `step()`: an update answers `batch_size` prompts.
    TrlLegacy,
    /// DeepSpeed-Chat's third step: its hyper-parameters, and its choices of what counts.
    DeepspeedChat,
}

impl Preset {
    /// The settings that have other defaults with this preset, as a configuration file would say them.
    pub fn settings(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Trl | Self::TrlPpov2 => &[],
            Self::TrlLegacy => &[
                ("value_head", "true"),
                ("raw_logprobs", "true"),
                ("score_position", "last_token"),
                ("adap_kl_ctrl", "true"),
                ("kl_coef", "0.2"),
                ("ratio_threshold", "10"),
                ("learning_rate", "1.41e-5"),
                ("lr_scheduler_type", "constant"),
                ("total_episodes", "20000"),
                ("temperature", "1"),
                ("stop_token", "eos"),
                ("seed", "0"),
            ],
            Self::DeepspeedChat => &[
                ("max_prompt_length", "256"),
                ("long_prompts", "drop"),
                ("per_device_generation_batch_size", "16"),
                ("per_device_train_batch_size", "16"),
                ("num_train_epochs", "1"),
                ("response_length", "256"),
                ("stop_token", "eos"),
                ("temperature", "1"),
                ("num_ppo_epochs", "1"),
                ("kl_coef", "0.1"),
                ("clip_reward_value", "5"),
                ("min_response_length", "2"),
                ("eos_in_loss", "unless_pad"),
                ("last_value_in_loss", "false"),
                ("whiten_advantages", "none"),
                ("vf_coef", "1"),
                ("learning_rate", "9.65e-6"),
                ("value_learning_rate", "5e-6"),
                ("lr_scheduler_type", "cosine"),
                ("warmup_steps", "100"),
                ("adam_beta2", "0.95"),
                ("max_grad_norm", "1"),
            ],
        }
    }
}

/// What a reward model learns of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum PairLoss {
    /// The score at the end of the chosen text is above that at the end of the rejected one.
    Sequence,
    /// So is what is said at every token from the first that differs to the end of the longer text, with the shorter one padded
    /// up to there: DeepSpeed-Chat's.
    Tokens,
    /// The same without padding: where the shorter text has ended, its last score stands.
    TokensUnpadded,
}

/// Why `rlhf ppo` has no flag of this name, where one of the systems that it replaces has.
pub fn refused(flag: &str) -> Option<&'static str> {
    Some(match flag {
        "exp_name" | "task_name" | "tracker_project_name" => "a run is known by its output_dir",
        "tracker_kwargs" | "project_kwargs" => {
            "metrics go to output_dir, and with report_to = tensorboard to event files there"
        }
        "accelerator_kwargs" | "world_size" => "there is one process, and no accelerate beneath it",
        "global_batch_size" | "global_backward_batch_size" | "backward_batch_size" => {
            "it follows from batch_size, mini_batch_size and gradient_accumulation_steps"
        }
        "forward_batch_size" => "it is mini_batch_size under its older name",
        "total_ppo_epochs" => "it follows from steps and batch_size",
        "push_to_hub_if_best_kwargs" | "compare_steps" => {
            "nothing is pushed; metric_for_best_model = objective/scores with save_steps keeps the best model in output_dir/best"
        }
        "remove_unused_columns" => "columns that are not used do no harm, and rewards may read them",
        "dataset_num_proc" => "data is read by one process",
        "optimize_cuda_cache" | "optimize_device_cache" => "memory between the phases is given back in any case",
        "is_encoder_decoder" | "is_peft_model" => "the model's folder and use_peft tell",
        _ => return None,
    })
}

/// How `rlhf generate` reads standard input, and how it writes answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// As a person would write and read them.
    Text,
    /// A JSON object per line.
    Jsonl,
}

/// The sizes of a PPO run, each checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PpoPlan {
    /// Prompts answered in one update: `per_device_train_batch_size * gradient_accumulation_steps`, with the preset
    /// `trl-ppov2` times `num_mini_batches`; or `per_device_generation_batch_size * generation_batches`.
    pub batch_size: usize,
    /// How the rows of an epoch are divided.
    pub epoch: EpochPlan,
    /// Answers asked for; the run trains on `num_total_batches * batch_size`, which may be a few more.
    pub total_episodes: usize,
    /// Updates in the run: `total_episodes / batch_size`, rounded up.
    pub num_total_batches: usize,
    /// Updates between two sample tables; `None` for no tables.
    pub sample_every: Option<usize>,
}

/// The sizes of an SFT or reward model run, each checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainPlan {
    /// Rows in one update: `per_device_train_batch_size * gradient_accumulation_steps`.
    pub batch_size: usize,
    /// Updates in the run: `max_steps`, else `num_train_epochs * rows / batch_size`, rounded up.
    pub num_updates: usize,
}

impl PpoConfig {
    /// A configuration with every default, for these models, prompts and output folder.
    pub fn new(
        sft_model_path: impl Into<PathBuf>,
        reward_model_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        Self::with_preset(Preset::Trl, sft_model_path, reward_model_path, dataset_name, output_dir)
    }

    /// As [`PpoConfig::new`], with the defaults of `preset`.
    pub fn with_preset(
        preset: Preset,
        sft_model_path: impl Into<PathBuf>,
        reward_model_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        let mut config: Self = defaults_with(preset.settings());
        config.preset = preset;
        config.sft_model_path = sft_model_path.into();
        config.reward_model_path = Some(reward_model_path.into());
        config.data.dataset_name = vec![dataset_name.into()];
        config.run.output_dir = output_dir.into();
        config
    }

    /// A configuration with every default and no reward: name one in `rewards`, or bring your own to
    /// [`crate::train::ppo::PpoTrainer::from_config_with`].
    pub fn without_reward(
        sft_model_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        Self { reward_model_path: None, ..Self::new(sft_model_path, "", dataset_name, output_dir) }
    }

    /// Checks every setting that needs no dataset to be checked.
    ///
    /// Errors: [`Error::Usage`], naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        // What follows multiplies some of them.
        check_sizes(self)?;
        all([
            at_least_one("response_length", self.response_length),
            at_least_one("num_ppo_epochs", self.num_ppo_epochs),
            at_least_one("local_rollout_forward_batch_size", self.local_rollout_forward_batch_size),
            self.total_episodes.map_or(Ok(()), |episodes| at_least_one("total_episodes", episodes)),
            above_zero("num_train_epochs", self.num_train_epochs),
            above_zero("temperature", self.temperature),
            above_zero("cliprange", self.cliprange),
            above_zero("cliprange_value", self.cliprange_value),
            zero_or_more("kl_coef", self.kl.kl_coef),
            zero_or_more("vf_coef", self.vf_coef),
            zero_to_one("gamma", self.gamma),
            zero_to_one("lam", self.lam),
            self.missing_eos_penalty.map_or(Ok(()), |penalty| zero_or_more("missing_eos_penalty", penalty)),
            self.check_penalty(),
            self.check_whitening(),
            self.kl.check(),
            self.loss.check(),
            self.check_limits(),
            self.score_scaling.check(),
            self.legacy.check(self),
            self.sampling.check(),
            self.check_sampling(),
            self.value.check(self),
            self.check_stop(),
            check_token_id(self.stop_token_id),
            self.rewards.check(),
            crate::reward::specs(self).and_then(|rewards| self.rewards.check_outside(&rewards)),
            self.data.check(None),
            self.prompt_length.check(),
            self.check_adapters(),
            self.clip_reward_value.map_or(Ok(()), |most| above_zero("clip_reward_value", most)),
            self.mask.check(self.response_length, self.score_position),
            self.unsupervised.check(),
            self.ema.check(),
            self.trial.check(),
            check_learning(self.learning_rate, &self.optimizer, Some(self.value_optimizer().1.lr_scheduler_type)),
            self.watch.check(),
            self.half.check(self.run.fp16),
            self.run.check(),
            at_least_one("num_eval_prompts", self.num_eval_prompts),
            self.eval.check(
                self.run.checkpoints.save_steps,
                &["eval/score", "eval/kl", "eval/response_length", EVAL_SCORES],
            ),
            self.batch_sizes().map(drop),
        ])
    }

    /// Refuses limits of the policy's loss that cannot have an effect with these sizes.
    fn check_limits(&self) -> Result<()> {
        // The preset's own limit is there in any case; sizes that do not go together are refused as such.
        let one_step = self.steps_per_update() == Some(1) && self.preset != Preset::TrlLegacy;
        let limit = |name, found: Option<f64>| {
            let why = "with one optimizer step an update (num_ppo_epochs = 1 and one mini-batch): in the first step every \
                       ratio is 1";
            found.filter(|_| one_step).map_or(Ok(()), |found| no_effect(name, found, why))
        };
        let last = self.num_ppo_epochs == 1;
        all([
            self.loss.target_kl.filter(|_| last).map_or(Ok(()), |kl| {
                no_effect("target_kl", kl, "with num_ppo_epochs = 1: there is no second epoch to leave out")
            }),
            limit("cliprange_high", self.loss.cliprange_high),
            limit("dual_clip", self.loss.dual_clip),
            limit("ratio_threshold", self.loss.ratio_threshold),
        ])
    }

    /// Checks sampling together with lengths, stop tokens and masks.
    fn check_sampling(&self) -> Result<()> {
        let (least, most) = (self.sampling.min_new_tokens, self.response_length);
        let stops = self.stop_token.is_some() || self.stop_token_id.is_some() || !self.sampling.stop_strings.is_empty();
        all([
            expect(least <= most, "min_new_tokens", least, &format!("at most response_length = {most}")),
            if least > 0 && !stops {
                no_effect("min_new_tokens", least, "without stop_token, stop_token_id or stop_strings")
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
            return usage(format!(
                "logprobs_of = filtered with min_response_length = {}: where answers train again, an earlier policy's filters \
                 would count for this one's: expected min_response_length = 0, or logprobs_of = policy",
                self.mask.min_response_length
            ));
        }
        if self.legacy.raw_logprobs && self.temperature != 1.0 {
            return usage(format!(
                "logprobs_of = filtered with raw_logprobs = true and temperature = {}: what was sampled from is filtered at the \
                 temperature: expected temperature = 1, or raw_logprobs = false",
                self.temperature
            ));
        }
        Ok(())
    }

    fn check_penalty(&self) -> Result<()> {
        let value = self.penalty_reward_value;
        all([
            match (self.missing_eos_penalty, self.non_eos_penalty) {
                (Some(penalty), true) => usage(format!(
                    "missing_eos_penalty = {penalty}, which is subtracted from the score, and non_eos_penalty, which replaces \
                     it, exclude each other: set one of them"
                )),
                _ => Ok(()),
            },
            expect(value.is_finite(), "penalty_reward_value", value, "a number"),
            if value != -1.0 && !self.non_eos_penalty {
                no_effect("penalty_reward_value", value, "without non_eos_penalty = true")
            } else {
                Ok(())
            },
        ])
    }

    fn check_whitening(&self) -> Result<()> {
        if self.whiten_advantages == WhitenAdvantages::MiniBatch && self.batches_per_epoch() == Some(1) {
            return usage(
                "whiten_advantages = mini_batch is the same as batch where an epoch is one mini-batch: set one of the two",
            );
        }
        Ok(())
    }

    fn check_stop(&self) -> Result<()> {
        match (self.stop_token, self.stop_token_id) {
            (Some(StopToken::Eos), Some(id)) => {
                usage(format!("stop_token = eos and stop_token_id = {id} exclude each other: set one of them"))
            }
            _ => Ok(()),
        }
    }

    /// The sizes of the run over `num_prompts` prompts, after [`Self::check`].
    ///
    /// Errors: [`Error::Usage`], naming the values that do not go together and the nearest that do.
    pub fn plan(&self, num_prompts: usize) -> Result<PpoPlan> {
        self.check()?;
        let (batch_size, mini_batch_size) = self.batch_sizes()?;
        // As TRL: the fraction of an episode is dropped. The cast saturates.
        let total_episodes = self.total_episodes.unwrap_or((self.num_train_epochs * num_prompts as f64) as usize);
        if total_episodes == 0 {
            return usage(format!(
                "total_episodes = num_train_epochs * prompts = {} * {num_prompts} is less than 1: nothing to train on",
                self.num_train_epochs
            ));
        }
        let product = "num_train_epochs * prompts";
        expect(total_episodes <= MOST_EPISODES, product, total_episodes, &format!("at most {MOST_EPISODES}"))?;
        let num_total_batches = total_episodes.div_ceil(batch_size);
        let frozen = self.value.value_warmup_updates;
        let expected = format!("less than the run's {num_total_batches} updates: else the policy never learns");
        expect(frozen < num_total_batches, "value_warmup_updates", frozen, &expected)?;
        Ok(PpoPlan {
            batch_size,
            epoch: EpochPlan {
                mini_batch_size,
                part_size: self.part_size(mini_batch_size),
                micro_batch_size: match self.preset {
                    Preset::TrlLegacy => self.part_size(mini_batch_size),
                    Preset::Trl | Preset::TrlPpov2 | Preset::DeepspeedChat => {
                        self.per_device_train_batch_size.min(mini_batch_size)
                    }
                },
            },
            total_episodes,
            num_total_batches,
            sample_every: num_total_batches.checked_div(self.num_sample_generations).map(|every| every.max(1)),
        })
    }

    /// The adapter that the value model gets, if it gets one.
    pub fn value_lora(&self) -> Option<LoraConfig> {
        let own = &self.value_peft;
        let mut peft = self.peft.clone();
        peft.use_peft = own.value_use_peft.unwrap_or(peft.use_peft);
        peft.lora_r = own.value_lora_r.unwrap_or(peft.lora_r);
        if !own.value_lora_target_modules.is_empty() {
            peft.lora_target_modules.clone_from(&own.value_lora_target_modules);
        }
        peft.lora()
    }

    /// Optimizer steps of an update; `None` where the sizes do not go together.
    fn steps_per_update(&self) -> Option<usize> {
        let (batch_size, mini_batch_size) = self.batch_sizes().ok()?;
        Some(batch_size.div_ceil(mini_batch_size).saturating_mul(self.num_ppo_epochs))
    }

    /// Batches of an epoch whose losses are averaged together; `None` where the sizes do not go together.
    fn batches_per_epoch(&self) -> Option<usize> {
        let (batch_size, _) = self.batch_sizes().ok()?;
        Some(self.parts_per_epoch(batch_size))
    }

    /// Optimizer steps of one epoch over `rows` answers.
    pub(crate) fn steps_per_epoch(&self, rows: usize) -> usize {
        self.batch_sizes().map_or(1, |(_, mini_batch_size)| rows.div_ceil(mini_batch_size))
    }

    /// Peak learning rate and settings of the value model's optimizer.
    pub fn value_optimizer(&self) -> (f64, OptimizerConfig) {
        let (own, mut optimizer) = (&self.value, self.optimizer.clone());
        optimizer.lr_scheduler_type = own.value_lr_scheduler_type.unwrap_or(optimizer.lr_scheduler_type);
        if let Some(steps) = own.value_lr_warmup_steps {
            (optimizer.warmup_steps, optimizer.warmup_ratio) = (steps, 0.0);
        }
        optimizer.weight_decay = own.value_weight_decay.unwrap_or(optimizer.weight_decay);
        if let Some(norm) = own.value_max_grad_norm {
            optimizer.max_grad_norm = (norm != 0.0).then_some(norm);
        }
        (own.value_learning_rate.unwrap_or(self.learning_rate), optimizer)
    }

    /// Where the policy's ratio is clipped.
    pub fn policy_clip(&self) -> PolicyClip {
        let high = self.loss.cliprange_high.unwrap_or(self.cliprange);
        PolicyClip { low: self.cliprange, high, dual: self.loss.dual_clip }
    }

    /// Checks the adapters of both models.
    fn check_adapters(&self) -> Result<()> {
        let own = &self.value_peft;
        if self.value_lora().is_none() {
            let of_layers = !own.value_lora_target_modules.is_empty();
            if own.value_lora_r.is_some() || of_layers {
                let name = if of_layers { "value_lora_target_modules" } else { "value_lora_r" };
                return usage(format!(
                    "{name} is given, and the value model gets no adapter: set value_use_peft = true"
                ));
            }
            return self.peft.check();
        }
        own.value_lora_r.map_or(Ok(()), |r| at_least_one("value_lora_r", r))?;
        let rank = own.value_lora_r.unwrap_or(1);
        expect(rank <= MOST_RANK, "value_lora_r", rank, &format!("at most {MOST_RANK}"))?;
        // The shape of the policy's is that of the value model's where that has none of its own.
        PeftConfig { use_peft: true, ..self.peft.clone() }.check()
    }

    /// How a token of an answer is sampled.
    pub fn sampling(&self) -> Sampling {
        let SamplingConfig { top_k, top_p, min_p, .. } = self.sampling;
        Sampling::Random { temperature: self.temperature, top_k, top_p, min_p }
    }

    /// Temperature of the distributions whose log-probabilities count.
    pub fn logprob_temperature(&self) -> f64 {
        if self.legacy.raw_logprobs { 1.0 } else { self.temperature }
    }

    /// KL at 1.5 times which an update's epochs end.
    pub fn target_kl(&self) -> Option<f64> {
        self.loss.target_kl.or(self.legacy.early_stopping.then_some(TARGET_KL))
    }

    /// How many averages of losses an epoch over `rows` answers has.
    pub(crate) fn parts_per_epoch(&self, rows: usize) -> usize {
        // An optimizer step is a whole number of parts, so only the last part of an epoch can be smaller.
        self.batch_sizes().map_or(1, |(_, mini_batch_size)| rows.div_ceil(self.part_size(mini_batch_size))).max(1)
    }

    /// Answers of `mini_batch_size`, those of an optimizer step, whose losses are averaged together.
    fn part_size(&self, mini_batch_size: usize) -> usize {
        match self.preset {
            Preset::TrlLegacy => mini_batch_size / self.gradient_accumulation_steps,
            Preset::Trl | Preset::TrlPpov2 | Preset::DeepspeedChat => mini_batch_size,
        }
    }

    /// Answers of an update with the preset `trl-legacy`, and those of an optimizer step.
    fn legacy_batch_sizes(&self) -> Result<(usize, usize)> {
        let (legacy, accumulated) = (&self.legacy, self.gradient_accumulation_steps);
        at_least_one("gradient_accumulation_steps", accumulated)?;
        let all = legacy.batch_size.unwrap_or(LEGACY_BATCH);
        expect((1..=MOST_ROWS).contains(&all), "batch_size", all, &format!("1 to {MOST_ROWS}"))?;
        let part = legacy.mini_batch_size.unwrap_or((all / accumulated).max(1));
        at_least_one("mini_batch_size", part)?;
        let usual: Self = defaults();
        for (name, found, usual, other) in [
            (
                "per_device_train_batch_size",
                self.per_device_train_batch_size,
                usual.per_device_train_batch_size,
                "mini_batch_size is the setting there",
            ),
            ("num_mini_batches", self.num_mini_batches, 1, "it follows from batch_size and mini_batch_size there"),
            (
                "per_device_generation_batch_size",
                self.generation.per_device_generation_batch_size.unwrap_or(0),
                0,
                "an update answers batch_size prompts there",
            ),
            ("generation_batches", self.generation.generation_batches, 1, "an update answers batch_size prompts there"),
        ] {
            if found != usual {
                no_effect(name, found, &format!("with preset = trl-legacy: {other}"))?;
            }
        }
        let step = part.saturating_mul(accumulated);
        if !all.is_multiple_of(step) {
            let below = (1..=all / accumulated).rev().find(|n| *n < part && all.is_multiple_of(n * accumulated));
            let nearest = below.map_or(String::new(), |below| format!("; the next smaller mini_batch_size is {below}"));
            return usage(format!(
                "batch_size = {all} is not a multiple of mini_batch_size * gradient_accumulation_steps = {part} * {accumulated} = \
                 {step}{nearest}"
            ));
        }
        Ok((all, step))
    }

    /// `batch_size` and `mini_batch_size`.
    fn batch_sizes(&self) -> Result<(usize, usize)> {
        if self.preset == Preset::TrlLegacy {
            return self.legacy_batch_sizes();
        }
        let (rows, accumulated) = (self.per_device_train_batch_size, self.gradient_accumulation_steps);
        let (batch_size, parts) = (batch_size(rows, accumulated)?, self.num_mini_batches);
        at_least_one("num_mini_batches", parts)?;
        if let Some(answers) = self.generation.answers()? {
            let message = "per_device_train_batch_size and gradient_accumulation_steps say what a step trains on, where \
                           per_device_generation_batch_size says what is answered";
            expect(parts == 1, "num_mini_batches", parts, &format!("1: {message}"))?;
            let product = "per_device_train_batch_size * gradient_accumulation_steps";
            expect(batch_size <= answers, product, batch_size, &format!("at most the {answers} answers of an update"))?;
            return Ok((answers, batch_size));
        }
        if self.preset == Preset::TrlPpov2 {
            let all = batch_size.saturating_mul(parts);
            let product = "per_device_train_batch_size * gradient_accumulation_steps * num_mini_batches";
            expect(all <= MOST_ROWS, product, all, &format!("at most {MOST_ROWS}"))?;
            return Ok((all, batch_size));
        }
        if !batch_size.is_multiple_of(parts) {
            let below = (1..parts.min(batch_size)).rev().find(|&n| batch_size.is_multiple_of(n));
            let above = (parts + 1..=batch_size).find(|&n| batch_size.is_multiple_of(n));
            let nearest = match (below, above) {
                (Some(below), Some(above)) => format!("the nearest that divide it are {below} and {above}"),
                _ => format!("the nearest that divides it is {batch_size}"),
            };
            return usage(format!(
                "batch size = per_device_train_batch_size * gradient_accumulation_steps = {rows} * {accumulated} = \
                 {batch_size} is not a multiple of num_mini_batches = {parts}; {nearest}"
            ));
        }
        Ok((batch_size, batch_size / parts))
    }
}

impl SftConfig {
    /// A configuration with every default, that goes on from the model in the folder `model_name_or_path`.
    pub fn new(
        model_name_or_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        let mut config: Self = defaults();
        config.model_name_or_path = Some(model_name_or_path.into());
        config.data.dataset_name = vec![dataset_name.into()];
        config.run.output_dir = output_dir.into();
        config
    }

    /// A configuration with every default, that starts from random weights shaped by the `config.json` file
    /// `config_name`, with the tokenizer in the folder `tokenizer_name`.
    pub fn from_scratch(
        config_name: impl Into<PathBuf>,
        tokenizer_name: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        let mut config: Self = defaults();
        config.config_name = Some(config_name.into());
        config.tokenizer_name = Some(tokenizer_name.into());
        config.data.dataset_name = vec![dataset_name.into()];
        config.run.output_dir = output_dir.into();
        config
    }

    /// Checks every setting that needs no dataset to be checked.
    ///
    /// Errors: [`Error::Usage`], naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        let start = match (&self.model_name_or_path, &self.config_name, &self.tokenizer_name) {
            (None, None, _) => usage("set model_name_or_path, or config_name to start from random weights"),
            (Some(model), Some(config), _) => usage(format!(
                "model_name_or_path = {} and config_name = {} exclude each other: set one of them",
                model.display(),
                config.display()
            )),
            (None, Some(config), None) => usage(format!(
                "config_name = {} needs tokenizer_name: a configuration brings no tokenizer",
                config.display()
            )),
            _ => Ok(()),
        };
        all([
            start,
            self.data.check(self.eval_dataset_name.as_deref()),
            at_least_one("max_length", self.max_length),
            at_least_one("per_device_eval_batch_size", self.per_device_eval_batch_size),
            at_least_one("logging_steps", self.logging_steps),
            self.peft.check(),
            check_learning(self.learning_rate, &self.optimizer, None),
            self.run.check(),
            self.eval.check(self.run.checkpoints.save_steps, &["eval_loss"]),
            self.plan_for(1).map(drop),
        ])
    }

    /// The sizes of the run over `num_rows` rows, after [`Self::check`].
    ///
    /// Errors: [`Error::Usage`], naming the setting, its value and what was expected.
    pub fn plan(&self, num_rows: usize) -> Result<TrainPlan> {
        self.check()?;
        self.plan_for(num_rows)
    }

    fn plan_for(&self, num_rows: usize) -> Result<TrainPlan> {
        let batch_size = batch_size(self.per_device_train_batch_size, self.gradient_accumulation_steps)?;
        train_plan(batch_size, self.num_train_epochs, self.max_steps, num_rows)
    }
}

impl RewardConfig {
    /// A configuration with every default, for this model, these pairs and this output folder.
    pub fn new(
        model_name_or_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        let mut config: Self = defaults();
        config.model_name_or_path = model_name_or_path.into();
        config.data.dataset_name = vec![dataset_name.into()];
        config.run.output_dir = output_dir.into();
        config
    }

    /// Checks every setting that needs no dataset to be checked.
    ///
    /// Errors: [`Error::Usage`], naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        all([
            self.data.check(self.eval_dataset_name.as_deref()),
            expect(
                self.eval_only || !self.run.output_dir.as_os_str().is_empty(),
                "output_dir",
                "\"\"",
                "a folder, as only eval_only = true needs none",
            ),
            at_least_one("max_length", self.max_length),
            at_least_one("per_device_eval_batch_size", self.per_device_eval_batch_size),
            at_least_one("logging_steps", self.logging_steps),
            self.center_rewards_coefficient.map_or(Ok(()), |weight| zero_or_more("center_rewards_coefficient", weight)),
            self.peft.check(),
            check_learning(self.learning_rate, &self.optimizer, None),
            self.run.check(),
            self.eval.check(
                self.run.checkpoints.save_steps,
                &["eval_loss", "eval_accuracy", "eval_margin", "eval_mean_reward"],
            ),
            self.plan_for(1).map(drop),
        ])
    }

    /// The sizes of the run over `num_pairs` pairs, after [`Self::check`].
    ///
    /// Errors: [`Error::Usage`], naming the setting, its value and what was expected.
    pub fn plan(&self, num_pairs: usize) -> Result<TrainPlan> {
        self.check()?;
        self.plan_for(num_pairs)
    }

    fn plan_for(&self, num_pairs: usize) -> Result<TrainPlan> {
        let batch_size = batch_size(self.per_device_train_batch_size, self.gradient_accumulation_steps)?;
        train_plan(batch_size, self.num_train_epochs, self.max_steps, num_pairs)
    }
}

impl MergeConfig {
    /// A configuration with every default, for this adapter and this output folder.
    pub fn new(model_name_or_path: impl Into<PathBuf>, output_dir: impl Into<PathBuf>) -> Self {
        let mut config: Self = defaults();
        config.model_name_or_path = model_name_or_path.into();
        config.output_dir = output_dir.into();
        config
    }
}

/// Tokens of a generated text, at most, where nothing else is said.
const NEW_TOKENS: usize = 53;

/// Answers of an update of TRL's trainer with `step()`.
const LEGACY_BATCH: usize = 128;

/// What `early_stopping` aims at unless it is told.
const TARGET_KL: f64 = 1.0;

impl LegacyConfig {
    fn check(&self, config: &PpoConfig) -> Result<()> {
        let legacy = config.preset == Preset::TrlLegacy;
        let of_preset = |name, found: Option<usize>| {
            let why = "without preset = trl-legacy: per_device_train_batch_size, gradient_accumulation_steps and \
                       num_mini_batches are the sizes there";
            found.filter(|_| !legacy).map_or(Ok(()), |found| no_effect(name, found, why))
        };
        // TRL's own default may be written out.
        let unwatched = |kl: &f64| legacy && !self.early_stopping && *kl != TARGET_KL;
        let refuse =
            |when: bool, name, found: &dyn Display, why| if when { no_effect(name, found, why) } else { Ok(()) };
        all([
            of_preset("batch_size", self.batch_size),
            of_preset("mini_batch_size", self.mini_batch_size),
            refuse(
                self.raw_logprobs && config.temperature == 1.0 && !legacy,
                "raw_logprobs",
                &true,
                "with temperature = 1",
            ),
            config.loss.target_kl.filter(unwatched).map_or(Ok(()), |kl| {
                no_effect("target_kl", kl, "with preset = trl-legacy and without early_stopping = true")
            }),
            refuse(
                self.early_stopping && config.num_ppo_epochs == 1,
                "early_stopping",
                &true,
                "with num_ppo_epochs = 1: there is no second epoch to leave out",
            ),
            self.num_shared_layers.filter(|_| config.peft.use_peft).map_or(Ok(()), |layers| {
                let why = "with use_peft = true: beside an adapter all layers are the reference's too";
                no_effect("num_shared_layers", layers, why)
            }),
            self.check_best(config),
            self.check_value_head(config),
        ])
    }

    /// Refuses to choose the best model by scores that move while the policy stays.
    fn check_best(&self, config: &PpoConfig) -> Result<()> {
        let moves = |metric: &&String| ["objective/scores", "objective/rlhf_reward"].contains(&metric.as_str());
        match config.eval.metric_for_best_model.as_ref().filter(moves) {
            Some(metric) if config.score_scaling.use_score_scaling => usage(format!(
                "metric_for_best_model = {metric} with use_score_scaling = true: these scores move with the running deviation \
                 while the policy stays; expected objective/raw_scores, or eval/score with eval_steps"
            )),
            _ => Ok(()),
        }
    }

    fn check_value_head(&self, config: &PpoConfig) -> Result<()> {
        if !self.value_head {
            return Ok(());
        }
        let mut refusals = Refusals::default();
        if config.kl.kl_in_loss && config.kl.kl_estimator == KlEstimator::Full {
            refusals.add(usage(
                "kl_in_loss = true with kl_estimator = full and value_head = true: the KL over the vocabulary as a loss needs a value \
                 model of its own; expected mse, k3 or abs",
            ))?;
        }
        if config.run.fp16 {
            refusals.add(usage(
                "fp16 = true with value_head = true: a scale of losses is of one model; expected bf16 = true",
            ))?;
        }
        let path = config.value_model_path.iter().map(|path| ("value_model_path", path.display().to_string()));
        for (name, found) in path.chain(config.value.given()) {
            refusals.add(usage(format!(
                "{name} = {found} with value_head = true: the head is on the policy's trunk and learns with it; there is no value \
                 model"
            )))?;
        }
        refusals.end()
    }
}

impl ValueConfig {
    /// Whether any of it is set.
    pub(crate) fn differs(&self) -> bool {
        *self != defaults()
    }

    /// What of it is set, and to what.
    fn given(&self) -> Vec<(&'static str, String)> {
        let number = |name, found: Option<f64>| found.map(|found| (name, found.to_string()));
        let updates = self.value_warmup_updates;
        let all = [
            (updates > 0).then(|| ("value_warmup_updates", updates.to_string())),
            number("value_learning_rate", self.value_learning_rate),
            self.value_lr_scheduler_type.map(|schedule| ("value_lr_scheduler_type", schedule.name())),
            self.value_lr_warmup_steps.map(|steps| ("value_lr_warmup_steps", steps.to_string())),
            number("value_weight_decay", self.value_weight_decay),
            number("value_max_grad_norm", self.value_max_grad_norm),
        ];
        all.into_iter().flatten().collect()
    }

    fn check(&self, config: &PpoConfig) -> Result<()> {
        let mut refusals = Refusals::default();
        for (name, found) in [
            ("value_learning_rate", self.value_learning_rate),
            ("value_weight_decay", self.value_weight_decay),
            ("value_max_grad_norm", self.value_max_grad_norm),
        ] {
            refusals.add(found.map_or(Ok(()), |found| zero_or_more(name, found)))?;
        }
        if config.vf_coef == 0.0 {
            for (name, found) in self.given() {
                refusals.add(no_effect(name, found, "with vf_coef = 0: the value model does not learn"))?;
            }
        }
        let (peak, optimizer) = config.value_optimizer();
        let schedule = optimizer.lr_scheduler_type;
        if let Some(steps) = self.value_lr_warmup_steps.filter(|&n| n > 0 && schedule == LrSchedulerType::Constant) {
            let why = "with the value model's schedule constant; constant_with_warmup has a warm-up";
            refusals.add(no_effect("value_lr_warmup_steps", steps, why))?;
        }
        let too_high = |end: &f64| schedule.falls() && *end >= peak;
        if let (Some(_), Some(end)) = (self.value_learning_rate, optimizer.lr_end.filter(too_high)) {
            refusals.add(usage(format!("lr_end = {end}: expected less than value_learning_rate = {peak}")))?;
        }
        refusals.end()
    }
}

impl GenerationBatchesConfig {
    /// Answers of an update, where they have a size of their own.
    fn answers(&self) -> Result<Option<usize>> {
        at_least_one("generation_batches", self.generation_batches)?;
        let Some(size) = self.per_device_generation_batch_size else {
            return match self.generation_batches {
                1 => Ok(None),
                batches => {
                    no_effect("generation_batches", batches, "without per_device_generation_batch_size").map(|()| None)
                }
            };
        };
        at_least_one("per_device_generation_batch_size", size)?;
        let answers = size.saturating_mul(self.generation_batches);
        let product = "per_device_generation_batch_size * generation_batches";
        expect(answers <= MOST_ROWS, product, answers, &format!("at most {MOST_ROWS}"))?;
        Ok(Some(answers))
    }
}

impl TrialConfig {
    fn check(&self) -> Result<()> {
        let interval = self.print_answers_interval;
        all([
            at_least_one("print_answers_interval", interval),
            if !self.print_answers && interval != 1 {
                no_effect("print_answers_interval", interval, "without print_answers = true")
            } else {
                Ok(())
            },
            match (self.enable_test_mode, self.test_stop_step) {
                (false, step @ 1..) => no_effect("test_stop_step", step, "without enable_test_mode = true"),
                _ => Ok(()),
            },
        ])
    }
}

impl GenerateConfig {
    /// A configuration with every default, for this model; set `prompts` or `dataset_name` next.
    pub fn new(model_name_or_path: impl Into<PathBuf>) -> Self {
        let mut config: Self = defaults();
        config.model_name_or_path = model_name_or_path.into();
        config
    }

    /// Whether every token is the likeliest one: no sampling, or a temperature of 0.
    pub fn is_greedy(&self) -> bool {
        self.do_sample == Some(false) || self.temperature == Some(0.0)
    }

    /// How answers are generated: as set, else as `of_model` says, the `generation_config.json` of the model in `dir`, whose
    /// context is of `context` tokens, else by rlhf's defaults. What ends an answer is left to the caller.
    ///
    /// # Errors
    /// If one of the settings is not what it should be.
    pub fn generation(
        &self,
        of_model: &serde_json::Map<String, Value>,
        context: usize,
        dir: &Path,
    ) -> Result<GenerationConfig> {
        let of_model = |name: &str| of_model.get(name).filter(|value| !value.is_null());
        let wrong = |name: &str, what: &str, found: &Value| {
            let found = brief(&found.to_string()).into_owned();
            Error::invalid(dir.join("generation_config.json"), format!("`{name}`: expected {what}, found {found}"))
        };
        let number = |set: Option<f64>, name: &str, usual: f64| match (set, of_model(name)) {
            (Some(set), _) => Ok(set),
            (None, None) => Ok(usual),
            (None, Some(found)) => found.as_f64().ok_or_else(|| wrong(name, f64::EXPECTED, found)),
        };
        let whole = |set: Option<usize>, name: &str, usual: usize| match (set, of_model(name)) {
            (Some(set), _) => Ok(set),
            (None, None) => Ok(usual),
            (None, Some(found)) => {
                let number = found.as_u64().and_then(|number| usize::try_from(number).ok());
                number.ok_or_else(|| wrong(name, usize::EXPECTED, found))
            }
        };
        let do_sample = match (self.do_sample, of_model("do_sample")) {
            (Some(set), _) => set,
            (None, None) => true,
            (None, Some(found)) => found.as_bool().ok_or_else(|| wrong("do_sample", bool::EXPECTED, found))?,
        };
        let mut max_new_tokens = whole(self.max_new_tokens, "max_new_tokens", NEW_TOKENS)?;
        if self.max_new_tokens.is_none() && max_new_tokens >= context {
            // Some models' files say as much as their whole context, which leaves no room for a prompt.
            max_new_tokens = NEW_TOKENS;
        }
        let min_new_tokens = whole(self.min_new_tokens, "min_new_tokens", 0)?;
        let (temperature, top_k) = (number(self.temperature, "temperature", 1.0)?, whole(self.top_k, "top_k", 0)?);
        let (top_p, min_p) = (number(self.top_p, "top_p", 1.0)?, number(self.min_p, "min_p", 0.0)?);
        let repetition_penalty = number(self.repetition_penalty, "repetition_penalty", 1.0)?;
        let resolved = Self {
            do_sample: Some(do_sample),
            max_new_tokens: Some(max_new_tokens),
            min_new_tokens: Some(min_new_tokens),
            temperature: Some(temperature),
            top_p: Some(top_p),
            min_p: Some(min_p),
            repetition_penalty: Some(repetition_penalty),
            ..self.clone()
        };
        resolved.check()?;
        let sampling = match resolved.is_greedy() {
            true => Sampling::Greedy,
            false => Sampling::Random { temperature, top_k, top_p, min_p },
        };
        Ok(GenerationConfig {
            repetition_penalty,
            min_new_tokens,
            samples_per_prompt: self.num_return_sequences,
            seed: self.seed,
            batch_size: self.rows.batch_size,
            ..GenerationConfig::new(sampling, max_new_tokens)
        })
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`], naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        let sources = match (&self.rows.dataset_name, &self.prompts[..]) {
            (Some(dataset), prompts @ [_, ..]) => usage(format!(
                "dataset_name = {} and {} prompts of your own exclude each other: give one of them",
                dataset.display(),
                prompts.len()
            )),
            _ => Ok(()),
        };
        let enough = match (self.min_new_tokens, self.max_new_tokens) {
            (Some(least), Some(most)) => {
                expect(least <= most, "min_new_tokens", least, &format!("at most max_new_tokens = {most}"))
            }
            _ => Ok(()),
        };
        let set = |found: Option<f64>, check: fn(&str, f64) -> Result<()>, name| {
            found.map_or(Ok(()), |found| check(name, found))
        };
        let sequences = self.num_return_sequences;
        let equal = if self.is_greedy() && sequences > 1 {
            usage(format!(
                "num_return_sequences = {sequences} would give equal answers, as the likeliest token is always taken; set \
                 num_return_sequences = 1, or do_sample = true with a temperature above 0"
            ))
        } else {
            Ok(())
        };
        let ids = self
            .stop_token_ids
            .iter()
            .try_for_each(|&id| expect(id >= 0, "stop_token_ids", id, "token ids, 0 or more"));
        all([
            sources,
            self.max_new_tokens.map_or(Ok(()), |most| at_least_one("max_new_tokens", most)),
            enough,
            at_least_one("num_return_sequences", sequences),
            set(self.temperature, zero_or_more, "temperature"),
            set(self.top_p, above_zero, "top_p"),
            set(self.top_p, zero_to_one, "top_p"),
            set(self.min_p, zero_to_one, "min_p"),
            set(self.repetition_penalty, above_zero, "repetition_penalty"),
            equal,
            ids,
            expect(!self.stop_strings.iter().any(String::is_empty), "stop_strings", "\"\"", "some text"),
            self.rows.check(),
        ])
    }
}

impl LogprobsConfig {
    /// A configuration with every default, for this model; set `rows.dataset_name` next.
    pub fn new(model_name_or_path: impl Into<PathBuf>) -> Self {
        let mut config: Self = defaults();
        config.model_name_or_path = model_name_or_path.into();
        config
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`], naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        all([above_zero("temperature", self.temperature), self.rows.check()])
    }
}

impl ScoreConfig {
    /// A configuration with every default, for this model; set `rows.dataset_name` next.
    pub fn new(model_name_or_path: impl Into<PathBuf>) -> Self {
        let mut config: Self = defaults();
        config.model_name_or_path = Some(model_name_or_path.into());
        config
    }

    /// Whether answers are scored as a run scores them, and not whole texts by a model alone.
    pub fn scores_answers(&self) -> bool {
        self.tokenizer_name.is_some() || self.rewards != defaults()
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`], naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        let rewards = crate::reward::specs(self).and_then(|rewards| match rewards[..] {
            [] => usage("no reward: set at least one of model_name_or_path, reward, reward_command and reward_url"),
            _ if self.model_name_or_path.is_none() && self.tokenizer_name.is_none() => {
                usage("tokenizer_name: expected the policy's folder, as rewards see what its tokens say, found none")
            }
            _ => Ok(()),
        });
        all([self.rewards.check(), rewards, self.rows.check()])
    }
}

impl RowsConfig {
    fn check(&self) -> Result<()> {
        all([
            at_least_one("batch_size", self.batch_size),
            Columns::parse(&self.dataset_columns).map(drop),
            check_threads(self.num_threads),
        ])
    }
}

impl Setting for Format {
    const NAME: &'static str = "FORMAT";
    const EXPECTED: &'static str = "text or jsonl";

    fn read(text: &str) -> Option<Self> {
        Self::from_str(text, true).ok()
    }
}

/// TRL writes "not set" as -1 here.
fn steps_or_minus_one(text: &str) -> Result<Option<usize>, String> {
    if text == "-1" { Ok(None) } else { optional(text) }
}

/// The most that a whole number of a configuration may be: beyond use, and sums and products of a few of them are far below
/// what 64 bits hold.
fn most_of(name: &str) -> u64 {
    match name {
        "num_ppo_epochs" => 10_000,
        "per_device_train_batch_size"
        | "per_device_eval_batch_size"
        | "per_device_generation_batch_size"
        | "generation_batches"
        | "gradient_accumulation_steps"
        | "num_mini_batches"
        | "local_rollout_forward_batch_size"
        | "batch_size"
        | "mini_batch_size"
        | "reward_batch_size"
        | "num_return_sequences" => MOST_ROWS as u64,
        "response_length" | "max_new_tokens" | "min_new_tokens" | "max_prompt_length" => MOST_TOKENS,
        "total_episodes" => MOST_EPISODES as u64,
        _ => i32::MAX as u64,
    }
}

/// The most tokens of a response or a prompt: above any model's context.
const MOST_TOKENS: u64 = 1 << 20;

/// The most responses, rows or updates of a run.
const MOST_EPISODES: usize = 1 << 40;

/// Whole numbers of any size that are no counts.
const NO_COUNTS: [&str; 4] = ["seed", "data_split_seed", "stop_token_id", "stop_token_ids"];

/// Refuses counts and sizes that no run can have, before anything is computed from them.
fn check_sizes(config: &impl Serialize) -> Result<()> {
    // A setting that cannot be written, such as a path that is not UTF-8, is refused where it is written.
    let Ok(serde_json::Value::Object(settings)) = serde_json::to_value(config) else { return Ok(()) };
    let mut refusals = Refusals::default();
    for (name, value) in settings.iter().filter(|(name, _)| !NO_COUNTS.contains(&name.as_str())) {
        if let Some(found) = value.as_u64() {
            let most = most_of(name);
            refusals.add(expect(found <= most, name, found, &format!("at most {most}")))?;
        }
    }
    refusals.end()
}

fn check_token_id(id: Option<i64>) -> Result<()> {
    id.map_or(Ok(()), |id| expect(id >= 0, "stop_token_id", id, "a token id, 0 or more"))
}

/// The most rows of an update: far above use, and small enough that a slip of the keyboard does not end in a crash.
const MOST_ROWS: usize = 1 << 20;

fn batch_size(per_device_train_batch_size: usize, gradient_accumulation_steps: usize) -> Result<usize> {
    at_least_one("per_device_train_batch_size", per_device_train_batch_size)?;
    at_least_one("gradient_accumulation_steps", gradient_accumulation_steps)?;
    let rows = per_device_train_batch_size.saturating_mul(gradient_accumulation_steps);
    let product = "per_device_train_batch_size * gradient_accumulation_steps";
    expect(rows <= MOST_ROWS, product, rows, &format!("at most {MOST_ROWS}"))?;
    Ok(rows)
}

fn train_plan(
    batch_size: usize,
    num_train_epochs: f64,
    max_steps: Option<usize>,
    num_rows: usize,
) -> Result<TrainPlan> {
    above_zero("num_train_epochs", num_train_epochs)?;
    if let Some(steps) = max_steps {
        at_least_one("max_steps", steps)?;
    }
    expect(num_rows > 0, "rows of the dataset", num_rows, "at least 1")?;
    // A batch that a pass cannot fill goes on into the next, so only the run's last update may see a row once more.
    let num_updates =
        max_steps.unwrap_or_else(|| (num_train_epochs * num_rows as f64 / batch_size as f64).ceil() as usize);
    let expected = format!("at most {MOST_EPISODES}");
    expect(num_updates <= MOST_EPISODES, "num_train_epochs * rows / batch size", num_updates, &expected)?;
    Ok(TrainPlan { batch_size, num_updates })
}

impl<'a> From<&'a PpoConfig> for RewardSources<'a> {
    fn from(config: &'a PpoConfig) -> Self {
        let (model, label) = (config.reward_model_path.as_deref(), config.reward_label.as_deref());
        Self { model, label, settings: &config.rewards }
    }
}

impl<'a> From<&'a ScoreConfig> for RewardSources<'a> {
    fn from(config: &'a ScoreConfig) -> Self {
        let (model, label) = (config.model_name_or_path.as_deref(), config.reward_label.as_deref());
        Self { model, label, settings: &config.rewards }
    }
}

impl PpoConfig {
    /// Loads the rewards of `specs`, which are those of this configuration, for responses of the tokenizer `policy`.
    ///
    /// # Errors
    /// If one cannot be loaded.
    pub(crate) fn load_rewards(&self, specs: Vec<Spec>, policy: &Tokenizer, options: ModelOptions) -> Result<Rewards> {
        let new_head = self.new_reward_head.then_some(self.run.seed);
        Rewards::load(specs, &self.rewards, new_head, policy, self.local_rollout_forward_batch_size, options)
    }
}

impl ScoreConfig {
    /// Loads the rewards of this configuration, for responses of `tokenizer`.
    ///
    /// # Errors
    /// If one is not written as it should be, or cannot be loaded.
    pub fn load_rewards(&self, tokenizer: &Tokenizer, options: ModelOptions) -> Result<Rewards> {
        let model = self.model_name_or_path.as_ref();
        let model = model.map(|name| hub::model_dir(name, Some(&self.model_revision))).transpose()?;
        let specs = resolve(RewardSources { model: model.as_deref(), ..self.into() })?;
        Rewards::load(specs, &self.rewards, None, tokenizer, self.rows.batch_size, options)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tags_of_tensorboard_need_tensorboard() {
        let mut config = ppo();
        config.run.tensorboard_tags = TensorboardTags::Trl;
        assert!(usage_of(config.check()).contains("without report_to = tensorboard"));
        config.run.report_to = ReportTo::Tensorboard;
        config.check().unwrap();
    }
    fn ppo() -> PpoConfig {
        PpoConfig::new("policy", "judge", "prompts.jsonl", "out")
    }

    #[track_caller]
    fn usage_of<T: std::fmt::Debug>(result: Result<T>) -> String {
        let error = result.unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        error.to_string()
    }

    /// What both trainers inherit from transformers' TrainingArguments; TRL turns bf16 and gradient checkpointing on.
    fn inherited() -> serde_json::Value {
        let scale =
            json!({"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1.0});
        let data = json!({
            "dataset_train_split": "train", "dataset_test_split": "test", "dataset_weights": [], "dataset_config": null,
            "eval_split_size": null, "data_split": null, "data_split_seed": 42, "dataset_columns": [],
        });
        let others = json!({
            "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
            "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0,
            "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": null,
            "warmup_ratio": 0.0, "lr_end": null, "power": 1.0,
            "seed": 42, "bf16": false, "fp16": false, "dtype": "auto", "device": "auto", "max_shard_size": "50GB",
            "gradient_checkpointing": false, "max_tokens_per_micro_batch": null, "report_to": "none", "tensorboard_tags": "plain", "num_threads": null, "disable_tqdm": false,
            "use_peft": false, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": [],
            "use_rslora": false, "save_steps": null, "save_total_limit": null, "eval_steps": null,
            "metric_for_best_model": null, "greater_is_better": null,
        });
        joined([data, others, scale])
    }

    /// The entries of all of them: `json!` itself has no room for so many.
    fn joined<const N: usize>(parts: [serde_json::Value; N]) -> serde_json::Value {
        let entries = parts.into_iter().flat_map(|part| match part {
            serde_json::Value::Object(entries) => entries,
            other => panic!("no object: {other}"),
        });
        entries.collect()
    }

    #[track_caller]
    fn assert_settings(config: &impl Serialize, mut expected: serde_json::Value) {
        let inherited = inherited();
        let found = serde_json::to_value(config).unwrap();
        let expected = expected.as_object_mut().unwrap();
        if expected.contains_key("output_dir") {
            expected.extend(inherited.as_object().unwrap().clone());
        }
        let sorted = |map: &serde_json::Map<String, serde_json::Value>| {
            map.iter().map(|(key, value)| format!("{key}: {value}")).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(sorted(found.as_object().unwrap()), sorted(expected));
    }

    #[test]
    fn defaults_are_those_of_trl_1_11() {
        let rewards = json!({
            "reward": [], "reward_command": null, "reward_url": null, "reward_weights": [], "reward_normalize": [],
            "reward_scale": [], "reward_clip": [], "reward_label_column": "label", "reward_batch_size": 32,
            "reward_concurrency": 4, "reward_timeout": 120.0, "reward_retries": 3,
        });
        assert_settings(
            &ppo(),
            joined([
                json!({
                    "model_name_or_path": null, "sft_model_path": "policy", "model_revision": "main",
                    "reward_model_path": "judge", "reward_label": null,
                    "value_model_path": null, "new_reward_head": false, "dataset_name": "prompts.jsonl",
                    "output_dir": "out", "learning_rate": 3e-6, "num_mini_batches": 1, "total_episodes": null,
                    "local_rollout_forward_batch_size": 64, "num_sample_generations": 10, "response_length": 53,
                    "stop_token": null, "stop_token_id": null, "temperature": 0.7, "missing_eos_penalty": null,
                    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "stop_strings": [],
                    "logprobs_of": "policy",
                    "num_ppo_epochs": 4, "whiten_rewards": false, "kl_coef": 0.05, "kl_estimator": "k1",
                    "cliprange": 0.2, "vf_coef": 0.1, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95,
                    "score_position": "after_stop", "apply_chat_template": false, "num_eval_prompts": 128,
                    "max_prompt_length": null, "long_prompts": "error",
                }),
                json!({
                    "align_overflow": false, "compute_fp32_loss": true,
                    "value_head": false, "raw_logprobs": false, "num_shared_layers": null, "batch_size": null, "mini_batch_size": null, "early_stopping": false,
                    "use_score_scaling": false, "use_score_norm": false, "score_clip": null,
                    "max_skipped_updates": 3, "no_checks": false, "preset": "trl", "non_eos_penalty": false, "penalty_reward_value": -1.0, "whiten_advantages": "batch",
                    "kl_in_loss": false, "adap_kl_ctrl": false, "target": 6.0, "horizon": 10000.0, "kl_coef_end": null,
                    "cliprange_high": null, "dual_clip": null, "entropy_coef": 0.0, "target_kl": null,
                    "ratio_threshold": null, "value_warmup_updates": 0, "value_learning_rate": null,
                    "value_lr_scheduler_type": null, "value_lr_warmup_steps": null, "value_weight_decay": null,
                    "value_max_grad_norm": null,
                }),
                json!({
                    "per_device_generation_batch_size": null, "generation_batches": 1, "clip_reward_value": null,
                    "min_response_length": 0, "eos_in_loss": "always", "last_value_in_loss": true,
                    "unsupervised_dataset_name": null, "unsupervised_dataset_config_name": null, "unsup_coef": 27.8,
                    "enable_ema": false, "ema_beta": 0.992, "value_use_peft": null, "value_lora_r": null,
                    "value_lora_target_modules": [], "print_answers": false, "print_answers_interval": 1,
                    "enable_test_mode": false, "test_stop_step": 0,
                }),
                rewards.clone(),
            ]),
        );
        assert_settings(
            &SftConfig::new("m", "d", "o"),
            json!({
                "model_name_or_path": "m", "model_revision": "main", "config_name": null, "tokenizer_name": null, "dataset_name": "d",
                "eval_dataset_name": null, "output_dir": "o", "per_device_eval_batch_size": 8, "max_steps": null,
                "max_length": 1024, "logging_steps": 10, "completion_only_loss": true, "learning_rate": 2e-5,
                "chat_template_path": null,
                "packing": false, "assistant_only_loss": false, "dataset_text_field": "text",
            }),
        );
        assert_settings(
            &RewardConfig::new("m", "d", "o"),
            json!({
                "model_name_or_path": "m", "model_revision": "main", "new_reward_head": false, "dataset_name": "d", "eval_dataset_name": null,
                "output_dir": "o", "per_device_eval_batch_size": 8, "max_steps": null, "max_length": 1024,
                "logging_steps": 10, "center_rewards_coefficient": null, "learning_rate": 1e-4,
                "pair_loss": "sequence", "reward_format": null, "num_padding_at_beginning": null, "eval_only": false,
            }),
        );
        assert_settings(
            &GenerateConfig::new("m"),
            json!({
                "model_name_or_path": "m", "model_revision": "main", "prompts": [], "input_format": "text", "output_format": null,
                "apply_chat_template": false,
                "max_new_tokens": null, "min_new_tokens": null, "do_sample": null, "temperature": null, "top_k": null,
                "top_p": null, "min_p": null, "repetition_penalty": null, "num_return_sequences": 1,
                "stop_token_ids": [], "stop_strings": [], "ignore_eos": false, "seed": 42, "dataset_name": null, "dataset_split": "test", "dataset_columns": [],
                "output_file": null, "batch_size": 32, "dtype": "auto", "device": "auto", "num_threads": null,
            }),
        );
        assert_settings(
            &LogprobsConfig::new("m"),
            json!({
                "model_name_or_path": "m", "model_revision": "main", "temperature": 1.0, "dataset_name": null, "dataset_split": "test", "dataset_columns": [], "output_file": null,
                "batch_size": 32, "dtype": "auto", "device": "auto", "num_threads": null,
            }),
        );
        assert_settings(
            &ScoreConfig::new("m"),
            joined([
                json!({
                    "model_name_or_path": "m", "model_revision": "main", "reward_label": null, "tokenizer_name": null,
                    "dataset_name": null, "dataset_split": "test", "dataset_columns": [], "output_file": null, "batch_size": 32, "dtype": "auto",
                    "device": "auto", "num_threads": null,
                }),
                rewards,
            ]),
        );
    }

    #[test]
    fn models_are_loaded_in_any_dtype_with_an_adapter_and_without() {
        let (mut sft, mut reward) = (SftConfig::new("m", "d", "o"), RewardConfig::new("m", "d", "o"));
        for dtype in [Dtype::Auto, Dtype::Float32, Dtype::BFloat16, Dtype::Float16] {
            for use_peft in [false, true] {
                (sft.run.dtype, sft.peft.use_peft) = (dtype, use_peft);
                (reward.run.dtype, reward.peft.use_peft) = (dtype, use_peft);
                sft.check().unwrap();
                reward.check().unwrap();
            }
        }
    }

    #[test]
    fn a_ppo_plan_rounds_up_to_whole_updates() {
        let mut config = ppo();
        config.gradient_accumulation_steps = 4;
        config.num_mini_batches = 2;
        config.total_episodes = Some(1000);
        let plan = config.plan(50).unwrap();
        // 8 * 4 = 32 answers an update; 1000 / 32 = 31.25; 32 updates / 10 tables = 3.2.
        assert_eq!(
            plan,
            PpoPlan {
                batch_size: 32,
                epoch: EpochPlan { mini_batch_size: 16, part_size: 16, micro_batch_size: 8 },
                total_episodes: 1000,
                num_total_batches: 32,
                sample_every: Some(3),
            }
        );
    }

    #[test]
    fn epochs_times_prompts_are_the_episodes_when_none_are_given() {
        let mut config = ppo();
        config.num_train_epochs = 2.5;
        let plan = config.plan(101).unwrap();
        assert_eq!((plan.total_episodes, plan.num_total_batches), (252, 32)); // 252.5 is cut; 252 / 8 = 31.5.
        assert_eq!(
            usage_of(config.plan(0)),
            "total_episodes = num_train_epochs * prompts = 2.5 * 0 is less than 1: nothing to train on"
        );
    }

    #[test]
    fn a_micro_batch_is_never_larger_than_a_mini_batch() {
        let mut config = ppo();
        config.num_mini_batches = 4;
        let plan = config.plan(8).unwrap();
        assert_eq!((plan.epoch.mini_batch_size, plan.epoch.micro_batch_size), (2, 2));
    }

    #[test]
    fn tables_come_each_update_at_most_or_never() {
        let mut config = ppo();
        config.total_episodes = Some(24);
        assert_eq!(config.plan(1).unwrap().sample_every, Some(1));
        config.num_sample_generations = 0;
        assert_eq!(config.plan(1).unwrap().sample_every, None);
    }

    #[test]
    fn mini_batches_that_do_not_divide_the_batch_name_the_nearest_that_do() {
        let refused = |rows, accumulated, parts| {
            let mut config = ppo();
            config.per_device_train_batch_size = rows;
            config.gradient_accumulation_steps = accumulated;
            config.num_mini_batches = parts;
            usage_of(config.plan(100))
        };
        assert_eq!(
            refused(8, 3, 5),
            "batch size = per_device_train_batch_size * gradient_accumulation_steps = 8 * 3 = 24 is not a multiple of \
             num_mini_batches = 5; the nearest that divide it are 4 and 6"
        );
        assert_eq!(
            refused(2, 2, 5),
            "batch size = per_device_train_batch_size * gradient_accumulation_steps = 2 * 2 = 4 is not a multiple of \
             num_mini_batches = 5; the nearest that divides it is 4"
        );
    }

    #[test]
    fn with_the_preset_of_ppo_v2_the_batch_includes_the_mini_batches() {
        let mut config = ppo();
        config.preset = Preset::TrlPpov2;
        config.per_device_train_batch_size = 2;
        config.gradient_accumulation_steps = 4;
        config.num_mini_batches = 3;
        config.total_episodes = Some(100);
        let plan = config.plan(50).unwrap();
        // 2 * 4 * 3 = 24 answers an update, in steps of 2 * 4; 100 / 24 = 4.2.
        assert_eq!((plan.batch_size, plan.epoch.mini_batch_size, plan.epoch.micro_batch_size), (24, 8, 2));
        assert_eq!(plan.num_total_batches, 5);
        config.num_mini_batches = 1 << 19;
        assert!(usage_of(config.plan(50)).contains("num_mini_batches = 4194304: expected at most 1048576"));
    }

    #[test]
    fn an_update_with_a_size_of_its_own_is_trained_on_in_steps_of_another() {
        let plan = |generated, batches, trained, accumulated| {
            let mut config = ppo();
            config.generation =
                GenerationBatchesConfig { per_device_generation_batch_size: generated, generation_batches: batches };
            (config.per_device_train_batch_size, config.gradient_accumulation_steps) = (trained, accumulated);
            config.total_episodes = Some(100);
            config.plan(50)
        };
        let sizes = |plan: Result<PpoPlan>| {
            plan.map(|p| (p.batch_size, p.epoch.mini_batch_size, p.epoch.micro_batch_size)).unwrap()
        };
        assert_eq!(sizes(plan(Some(6), 4, 4, 2)), (24, 8, 4));
        assert_eq!(sizes(plan(Some(6), 4, 5, 2)), (24, 10, 5), "the last step of an epoch has 4");
        assert_eq!(plan(Some(6), 4, 4, 2).unwrap().num_total_batches, 5);
        assert_eq!(
            usage_of(plan(Some(4), 1, 8, 1)),
            "per_device_train_batch_size * gradient_accumulation_steps = 8: expected at most the 4 answers of an update"
        );
        assert_eq!(
            usage_of(plan(None, 2, 8, 1)),
            "generation_batches = 2 has no effect without per_device_generation_batch_size"
        );
        assert_eq!(usage_of(plan(Some(0), 2, 8, 1)), "per_device_generation_batch_size = 0: expected at least 1");
        let mut config = PpoConfig::with_preset(Preset::DeepspeedChat, "actor", "critic", "d", "o");
        config.num_mini_batches = 2;
        assert!(usage_of(config.check()).starts_with("num_mini_batches = 2: expected 1: per_device_train_batch_size"));
    }

    #[test]
    fn the_preset_of_deepspeed_chat_has_its_defaults() {
        let config = PpoConfig::with_preset(Preset::DeepspeedChat, "actor", "critic", "d", "o");
        config.check().unwrap();
        assert_eq!((config.kl.kl_coef, config.clip_reward_value, config.mask.min_response_length), (0.1, Some(5.0), 2));
        assert_eq!((config.learning_rate, config.value_optimizer().0), (9.65e-6, 5e-6));
        assert_eq!((config.optimizer.adam_beta1, config.optimizer.adam_beta2), (0.9, 0.95));
        assert_eq!((config.optimizer.max_grad_norm, config.optimizer.warmup_steps), (Some(1.0), 100));
        assert_eq!((config.mask.eos_in_loss, config.whiten_advantages), (EosInLoss::UnlessPad, WhitenAdvantages::None));
        assert_eq!((config.response_length, config.prompt_length.max_prompt_length), (256, Some(256)));
        let plan = config.plan(160).unwrap();
        assert_eq!((plan.batch_size, plan.epoch.mini_batch_size, plan.num_total_batches), (16, 16, 10));
        for preset in [Preset::Trl, Preset::TrlPpov2] {
            assert_eq!(
                PpoConfig {
                    preset: Preset::Trl,
                    ..PpoConfig::with_preset(preset, "policy", "judge", "prompts.jsonl", "out")
                },
                ppo()
            );
        }
    }

    #[test]
    fn settings_of_several_steps_are_taken_wherever_an_update_has_several_and_refused_where_it_has_one() {
        type Change = fn(&mut PpoConfig);
        let changes: [(Change, &str); 4] = [
            (|c| c.loss.dual_clip = Some(3.0), "dual_clip = 3 has no effect with one optimizer step an update"),
            (|c| c.loss.ratio_threshold = Some(10.0), "ratio_threshold = 10 has no effect with one optimizer step"),
            (|c| c.loss.cliprange_high = Some(0.3), "cliprange_high = 0.3 has no effect with one optimizer step"),
            (|c| c.whiten_advantages = WhitenAdvantages::MiniBatch, "whiten_advantages = mini_batch is the same as"),
        ];
        for (change, message) in changes {
            // 16 answers an update by default, one step; of 4 rows each they are four.
            let mut config = PpoConfig::with_preset(Preset::DeepspeedChat, "actor", "critic", "d", "o");
            change(&mut config);
            assert!(usage_of(config.check()).starts_with(message), "{message}");
            config.per_device_train_batch_size = 4;
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
    fn the_preset_of_legacy_refuses_sizes_of_generation_that_it_would_not_use() {
        let refused = |size, batches| {
            let mut config = PpoConfig::with_preset(Preset::TrlLegacy, "policy", "judge", "d", "o");
            config.generation =
                GenerationBatchesConfig { per_device_generation_batch_size: size, generation_batches: batches };
            usage_of(config.check())
        };
        let there = "has no effect with preset = trl-legacy: an update answers batch_size prompts there";
        assert_eq!(refused(Some(4), 1), format!("per_device_generation_batch_size = 4 {there}"));
        assert_eq!(refused(None, 2), format!("generation_batches = 2 {there}"));
    }

    #[test]
    fn an_epoch_over_fewer_answers_has_as_many_parts_as_they_fill() {
        let mut config = PpoConfig::with_preset(Preset::TrlLegacy, "policy", "judge", "d", "o");
        (config.legacy.batch_size, config.legacy.mini_batch_size) = (Some(16), Some(2));
        config.gradient_accumulation_steps = 4;
        // Parts of 2 rows, 4 of them a step: 9 rows are 4 parts and one of a single row, in two steps.
        assert_eq!([16, 9, 8, 1].map(|rows| config.parts_per_epoch(rows)), [8, 5, 4, 1]);
    }

    #[test]
    fn a_value_model_has_adapters_of_its_own_where_they_are_set() {
        let mut config = ppo();
        config.value_peft.value_use_peft = Some(true);
        config.value_peft.value_lora_r = Some(4);
        config.value_peft.value_lora_target_modules = vec!["q_proj".into()];
        config.check().unwrap();
        let lora = config.value_lora().unwrap();
        assert_eq!((config.peft.lora(), lora.r, lora.target_modules), (None, 4, Some(vec!["q_proj".into()])));
        config.value_peft.value_use_peft = None;
        assert!(
            usage_of(config.check()).starts_with("value_lora_target_modules is given, and the value model gets no")
        );
        config.peft.use_peft = true;
        config.check().unwrap();
        assert_eq!((config.peft.lora().unwrap().r, config.value_lora().unwrap().r), (16, 4));
        config.value_peft = ValuePeftConfig { value_use_peft: Some(false), ..ppo().value_peft };
        config.check().unwrap();
        assert!(config.peft.lora().is_some() && config.value_lora().is_none());
    }

    #[test]
    fn settings_without_an_effect_or_against_each_other_are_refused_with_the_reason() {
        type Change = fn(&mut PpoConfig);
        let changes: [(Change, &str); 42] = [
            (
                |c| {
                    c.score_scaling.use_score_scaling = true;
                    c.eval.metric_for_best_model = Some("objective/scores".into());
                    c.run.checkpoints.save_steps = Some(1);
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
            (|c| c.trial.print_answers_interval = 2, "print_answers_interval = 2 has no effect without print_answers"),
            (|c| c.trial.test_stop_step = 3, "test_stop_step = 3 has no effect without enable_test_mode = true"),
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
            (
                |c| (c.num_ppo_epochs, c.num_mini_batches, c.loss.target_kl) = (1, 2, Some(0.1)),
                "target_kl = 0.1 has no effect with num_ppo_epochs = 1",
            ),
            (
                |c| (c.num_ppo_epochs, c.loss.ratio_threshold) = (1, Some(10.0)),
                "ratio_threshold = 10 has no effect with one optimizer step an update (num_ppo_epochs = 1",
            ),
            (
                |c| (c.vf_coef, c.value.value_warmup_updates) = (0.0, 1),
                "value_warmup_updates = 1 has no effect with vf_coef = 0: the value model does not learn",
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
                |c| (c.optimizer.lr_scheduler_type, c.optimizer.lr_end) = (LrSchedulerType::Constant, Some(0.0)),
                "lr_end = 0 has no effect with lr_scheduler_type = constant",
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
    fn a_value_model_has_its_own_settings_where_they_are_set_and_the_policys_elsewhere() {
        let mut config = ppo();
        config.optimizer.warmup_ratio = 0.1;
        config.optimizer.max_grad_norm = Some(1.0);
        config.optimizer.weight_decay = 0.5;
        assert_eq!(config.value_optimizer(), (3e-6, config.optimizer.clone()));
        config.value.value_learning_rate = Some(1e-5);
        config.value.value_lr_scheduler_type = Some(LrSchedulerType::Cosine);
        config.value.value_lr_warmup_steps = Some(3);
        config.value.value_max_grad_norm = Some(0.0);
        config.check().unwrap();
        let (rate, own) = config.value_optimizer();
        assert_eq!((rate, own.warmup_steps, own.warmup_ratio), (1e-5, 3, 0.0));
        assert_eq!((own.lr_scheduler_type, own.max_grad_norm), (LrSchedulerType::Cosine, None));
        assert_eq!(own.weight_decay, 0.5);
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
            (|c| c.per_device_train_batch_size = 0, "per_device_train_batch_size = 0: expected at least 1"),
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
            (|c| c.run.checkpoints.save_steps = Some(0), "save_steps = 0: expected at least 1"),
            (|c| c.eval.eval_steps = Some(0), "eval_steps = 0: expected at least 1"),
            (|c| c.eval.greater_is_better = Some(true), "greater_is_better = true needs metric_for_best_model"),
            (
                |c| c.eval.metric_for_best_model = Some("objective/kl".into()),
                "metric_for_best_model = objective/kl needs eval_steps or save_steps",
            ),
            (
                |c| {
                    c.eval.metric_for_best_model = Some("eval/score".into());
                    c.run.checkpoints.save_steps = Some(5);
                },
                "metric_for_best_model = eval/score needs eval_steps",
            ),
            (
                |c| {
                    c.eval.metric_for_best_model = Some("eval/scores".into());
                    c.eval.eval_steps = Some(5);
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

    #[test]
    fn sft_starts_from_a_model_or_from_a_shape_with_a_tokenizer() {
        SftConfig::new("m", "d", "o").check().unwrap();
        SftConfig::from_scratch("c", "t", "d", "o").check().unwrap();
        let mut config = SftConfig::new("m", "d", "o");
        config.config_name = Some("c".into());
        assert_eq!(
            usage_of(config.check()),
            "model_name_or_path = m and config_name = c exclude each other: set one of them"
        );
        config.model_name_or_path = None;
        assert_eq!(
            usage_of(config.check()),
            "config_name = c needs tokenizer_name: a configuration brings no tokenizer"
        );
        config.config_name = None;
        assert_eq!(usage_of(config.check()), "set model_name_or_path, or config_name to start from random weights");
    }

    #[test]
    fn a_train_plan_rounds_the_passes_up_to_whole_updates() {
        let mut config = RewardConfig::new("m", "d", "o");
        config.gradient_accumulation_steps = 2;
        // 20 pairs, 3 passes, 16 an update: 3.75 updates.
        assert_eq!(config.plan(20).unwrap(), TrainPlan { batch_size: 16, num_updates: 4 });
        config.num_train_epochs = 0.6;
        assert_eq!(config.plan(20).unwrap().num_updates, 1); // 0.75 rounded up.
        config.max_steps = Some(100);
        assert_eq!(config.plan(20).unwrap().num_updates, 100);
        assert_eq!(usage_of(config.plan(0)), "rows of the dataset = 0: expected at least 1");
    }

    #[test]
    fn generation_refuses_two_sources_of_prompts_and_equal_answers() {
        let mut config = GenerateConfig::new("m");
        config.temperature = Some(0.0);
        config.check().unwrap();
        config.num_return_sequences = 2;
        assert!(usage_of(config.check()).starts_with("num_return_sequences = 2 would give equal answers"));
        config.num_return_sequences = 1;
        config.prompts = vec!["a".into(), "b".into()];
        config.rows.dataset_name = Some("d.jsonl".into());
        assert_eq!(
            usage_of(config.check()),
            "dataset_name = d.jsonl and 2 prompts of your own exclude each other: give one of them"
        );
    }

    #[test]
    fn while_the_policy_is_frozen_it_has_no_rate_and_its_schedule_waits() {
        let mut config = PpoConfig::new("policy", "judge", "prompts.jsonl", "out");
        config.learning_rate = 1.0;
        config.value.value_learning_rate = Some(4.0);
        config.value.value_warmup_updates = 2;
        let rates: Vec<_> = (0..4).map(|update| config.learning_rates(update, 4)).collect();
        assert_eq!(rates.iter().map(|r| r.policy).collect::<Vec<_>>(), [None, None, Some(1.0), Some(0.5)]);
        assert_eq!(rates.iter().map(|r| r.value).collect::<Vec<_>>(), [4.0, 3.0, 2.0, 1.0]);
    }
}
