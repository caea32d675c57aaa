//! What a run is asked to do: one plain type per command, and the sizes that follow from it.
//!
//! A field's name is the flag's name, the configuration file's key and, where TRL has the setting, TRL's name. Its doc
//! comment is its `--help` text. Every default is written once, in the field's `arg` attribute: the constructors take
//! theirs from there.

mod resolve;

use std::fmt::Display;
use std::path::{Path, PathBuf};

use clap::builder::PossibleValue;
use clap::{ArgAction, Args, ValueEnum};
use serde::Serialize;
use serde_json::Value;

use crate::data::Columns;
use crate::device::Device;
pub use crate::flag::ByteSize;
use crate::flag::{
    BATCHES, CHECKPOINTS, DATA, EVALUATION, LORA, LOSS, MODELS, NONE, OPTIMIZER, PPO, REWARDS, RUN, Refusals, SAMPLING,
    Setting, above_zero, all, at_least_one, defaults, defaults_with, expect, no_effect, optional, required, usage,
    zero_or_more, zero_to_one,
};
use crate::generate::{GenerationConfig, Sampling};
use crate::model::{ClassifierFormat, Dtype, LoraConfig};
use crate::reward::{LEFT_OUT, Spec, address};
use crate::rl::learner::EpochPlan;
use crate::rl::math::{KlEstimator, PolicyClip, ScorePosition};
use crate::weights::brief;
use crate::{Error, Result};

/// What the shares of a dataset are drawn by, if nothing else is said: another than a run's own seed, so that runs of any seeds
/// have shares without a row in common.
const SPLIT_SEED: u64 = 42;

/// The split that is evaluated on if there is one and no other is named.
pub(crate) const TEST: &str = "test";

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
    pub rewards: RewardsConfig,

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
    /// Weight of the KL penalty per token.
    #[arg(long, alias = "init_kl_coef", help_heading = PPO, default_value_t = 0.05)]
    pub kl_coef: f64,
    /// How the KL is estimated from each sampled token, or measured over the whole vocabulary (`full`).
    #[arg(long, alias = "kl_penalty", help_heading = PPO, value_enum, default_value = "k1")]
    pub kl_estimator: KlEstimator,
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
    pub step: StepConfig,
    /// Which answers, and which of their tokens, count.
    #[command(flatten)]
    #[serde(flatten)]
    pub counts: CountsConfig,
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
    pub rewards: RewardsConfig,
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

/// What scores the answers beside, or in place of, the reward model; the score is the sum.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct RewardsConfig {
    /// A reward, as KIND:ARGUMENT or NAME=KIND:ARGUMENT; the flag several times for several. Kinds: length:target=40,
    /// regex:EXPRESSION, words:FILE, json, exact:COLUMN, numeric:COLUMN, bleu:COLUMN, rouge_l:COLUMN, repetition:n=3,
    /// model:FOLDER, command:LINE, url:ADDRESS.
    #[arg(long, help_heading = REWARDS)]
    #[serde(serialize_with = "rewards_without_queries")]
    pub reward: Vec<String>,
    /// Command line of a program that scores answers: JSON lines in, JSON lines out.
    #[arg(long, help_heading = REWARDS, default_value = NONE, hide_default_value = true, value_parser = optional::<String>)]
    pub reward_command: std::option::Option<String>,
    /// Address of a service that scores answers; RLHF_REWARD_TOKEN in the environment is its token.
    #[arg(long, help_heading = REWARDS, default_value = NONE, hide_default_value = true, value_parser = optional::<String>)]
    #[serde(serialize_with = "address_without_query")]
    pub reward_url: std::option::Option<String>,
    /// Weights in the sum, as NAME=X with commas between them, or X for all [default: 1].
    #[arg(long, help_heading = REWARDS, value_delimiter = ',')]
    pub reward_weights: Vec<String>,
    /// Divide a reward's scores by their running standard deviation, NAME=std, less their running mean before that,
    /// NAME=mean_std.
    #[arg(long, help_heading = REWARDS, value_delimiter = ',')]
    pub reward_normalize: Vec<String>,
    /// Multiply a reward's scores, after that, as NAME=X.
    #[arg(long, help_heading = REWARDS, value_delimiter = ',')]
    pub reward_scale: Vec<String>,
    /// Clip a reward's scores to plus or minus this, after that and before they are weighted, as NAME=X.
    #[arg(long, help_heading = REWARDS, value_delimiter = ',')]
    pub reward_clip: Vec<String>,
    /// Column of the dataset that a service gets as `labels`.
    #[arg(long, help_heading = REWARDS, default_value = "label")]
    pub reward_label_column: String,
    /// Answers in one request to a service.
    #[arg(long, help_heading = REWARDS, default_value_t = 32)]
    pub reward_batch_size: usize,
    /// Requests to a service at a time.
    #[arg(long, help_heading = REWARDS, default_value_t = 4)]
    pub reward_concurrency: usize,
    /// Seconds to wait for the next score of a program, or for a service.
    #[arg(long, help_heading = REWARDS, default_value_t = 120.0)]
    pub reward_timeout: f64,
    /// How often a program that fails is started again, and a service asked again, before the run ends.
    #[arg(long, help_heading = REWARDS, default_value_t = 3)]
    pub reward_retries: usize,
}

/// Where a training run takes its rows from, and which of them it keeps for evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct DataConfig {
    /// JSONL, JSON, CSV or Parquet file of rows, a folder with files per split, or a dataset's name on the hub; or several.
    #[arg(long, alias = "query_dataset", help_heading = DATA, required = true, num_args = 1.., action = ArgAction::Set)]
    #[serde(serialize_with = "one_or_list")]
    pub dataset_name: Vec<PathBuf>,
    /// How often several datasets are drawn from, a number for each [default: every row as often as every other].
    #[arg(long, help_heading = DATA, num_args = 1.., value_delimiter = ',', action = ArgAction::Set)]
    pub dataset_weights: Vec<f64>,
    /// Folder of the dataset to take, where several have the split.
    #[arg(long, help_heading = DATA, default_value = NONE, hide_default_value = true, value_parser = optional::<String>)]
    pub dataset_config: std::option::Option<String>,
    /// Columns to read as other fields, as FIELD=COLUMN with commas between them, such as prompt=question; FIELD=none leaves
    /// a field out.
    #[arg(long, help_heading = DATA, value_delimiter = ',')]
    pub dataset_columns: Vec<String>,
    /// Split of the dataset to train on.
    #[arg(long, help_heading = DATA, default_value = "train")]
    pub dataset_train_split: String,
    /// Split of the dataset to evaluate on; in PPO the sample tables answer its prompts.
    #[arg(long, help_heading = DATA, default_value = TEST)]
    pub dataset_test_split: String,
    /// Without a split to evaluate on, keep so many rows for it, or this share of them if below 1.
    #[arg(long, help_heading = DATA, default_value = NONE, value_parser = optional::<f64>)]
    pub eval_split_size: std::option::Option<f64>,
    /// Train on this command's share of each dataset only: parts for sft, reward and ppo, such as 2,4,4, that have no row in
    /// common.
    #[arg(long, help_heading = DATA, default_value = NONE, value_name = DataSplit::NAME, value_parser = optional::<DataSplit>)]
    pub data_split: std::option::Option<DataSplit>,
    /// Decides which rows are in which share; must be the same for all three.
    #[arg(long, help_heading = DATA, default_value_t = SPLIT_SEED)]
    pub data_split_seed: u64,
}

/// The parts of a dataset that SFT, the reward model and PPO train on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DataSplit {
    parts: [f64; 3],
}

impl DataSplit {
    /// The places of `step`'s share among `rows` rows in a random order: the shares lie one behind another, and hold them all.
    pub fn share(&self, step: Step, rows: usize) -> std::ops::Range<usize> {
        let all: f64 = self.parts.iter().sum();
        let end = |parts: &[f64]| (rows as f64 * (parts.iter().sum::<f64>() / all)).round() as usize;
        let at = step as usize;
        end(&self.parts[..at])..end(&self.parts[..=at])
    }
}

impl std::str::FromStr for DataSplit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Option<Vec<f64>> = text.split(',').map(|part| part.trim().parse().ok()).collect();
        let parts: Option<[f64; 3]> = parts.and_then(|parts| parts.try_into().ok());
        let sound = |parts: &[f64; 3]| {
            let all: f64 = parts.iter().sum();
            parts.iter().all(|&part| part >= 0.0) && all > 0.0 && all.is_finite()
        };
        parts.filter(sound).map(|parts| Self { parts }).ok_or_else(|| format!("expected {}", Self::EXPECTED))
    }
}

impl Display for DataSplit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [sft, reward, ppo] = self.parts;
        write!(f, "{sft},{reward},{ppo}")
    }
}

impl Serialize for DataSplit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One of the three trainings, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Supervised fine-tuning.
    Sft,
    /// The reward model.
    Reward,
    /// PPO.
    Ppo,
}

impl Step {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Sft, Self::Reward, Self::Ppo];

    /// The command that does it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sft => "sft",
            Self::Reward => "reward",
            Self::Ppo => "ppo",
        }
    }
}

impl Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
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
    pub skip: Vec<Step>,
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

/// How many tokens a prompt may have, and what becomes of longer ones.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct PromptLengthConfig {
    /// Tokens of a prompt, at most [default: the models' context less `response_length`].
    #[arg(long, help_heading = DATA, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub max_prompt_length: std::option::Option<usize>,
    /// What becomes of longer prompts: an `error`, or they are dropped, or lose tokens on one side.
    #[arg(long, help_heading = DATA, value_enum, default_value = "error")]
    pub long_prompts: LongPrompts,
}

/// Low-rank adapters (LoRA): whether they are trained in place of all weights, and their shape.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct PeftConfig {
    /// Train low-rank adapters beside frozen weights, which are held in the checkpoint's own dtype.
    #[arg(long, help_heading = LORA)]
    pub use_peft: bool,
    /// Rank of the adapters.
    #[arg(long, help_heading = LORA, default_value_t = 16)]
    pub lora_r: usize,
    /// The adapters' products are scaled by this over `lora_r`.
    #[arg(long, help_heading = LORA, default_value_t = 32)]
    pub lora_alpha: usize,
    /// Dropout in front of the adapters, in SFT and reward training; PPO applies none, as its ratios must begin at 1.
    #[arg(long, help_heading = LORA, default_value_t = 0.05)]
    pub lora_dropout: f64,
    /// Linear layers that get an adapter, by the ends of their names, or `all-linear` [default: the family's].
    #[arg(long, help_heading = LORA, value_delimiter = ',', num_args = 1..)]
    pub lora_target_modules: Vec<String>,
    /// Scale by `lora_alpha` over the square root of `lora_r`.
    #[arg(long, help_heading = LORA)]
    pub use_rslora: bool,
}

/// How the weight of the KL moves, and where the KL goes.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct KlConfig {
    /// Add the KL to the policy's loss, in place of the rewards.
    #[arg(long, help_heading = PPO)]
    pub kl_in_loss: bool,
    /// Adapt the KL's weight after each update, so that the KL of an answer comes near `target`.
    #[arg(long, help_heading = PPO)]
    pub adap_kl_ctrl: bool,
    /// KL of an answer, in nats, that `adap_kl_ctrl` aims at.
    #[arg(long, help_heading = PPO, default_value_t = 6.0)]
    pub target: f64,
    /// Answers over which `adap_kl_ctrl` takes up an error; smaller is faster.
    #[arg(long, help_heading = PPO, default_value_t = 10000.0)]
    pub horizon: f64,
    /// The KL's weight in the last update, reached in a straight line from `kl_coef`.
    #[arg(long, help_heading = PPO, default_value = NONE, hide_default_value = true, value_parser = optional::<f64>)]
    pub kl_coef_end: std::option::Option<f64>,
}

/// Further terms and limits of the policy's steps.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct StepConfig {
    /// Clip the probability ratio to at most 1 plus this [default: `cliprange`].
    #[arg(long, help_heading = PPO, default_value = NONE, hide_default_value = true, value_parser = optional::<f64>)]
    pub cliprange_high: std::option::Option<f64>,
    /// Count a token of negative advantage with a ratio of at most this, above 1; 3 is usual.
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub dual_clip: std::option::Option<f64>,
    /// Weight of the policy's entropy, which its loss is lowered by.
    #[arg(long, help_heading = PPO, default_value_t = 0.0)]
    pub entropy_coef: f64,
    /// End an update's epochs after one whose last mini-batch is 1.5 times this KL per token away from the sampling policy.
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub target_kl: std::option::Option<f64>,
    /// Skip the step of a mini-batch whose mean probability ratio is above this.
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub ratio_threshold: std::option::Option<f64>,
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

/// Which answers, and which of their tokens, count; what an answer's score can do.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct CountsConfig {
    /// Clip an answer's whole score, scores of its tokens included, to plus or minus this where it becomes a reward.
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub clip_reward_value: std::option::Option<f64>,
    /// Leave out answers of fewer tokens that count; where no answer is left, the last ones that were train again.
    #[arg(long, help_heading = PPO, default_value_t = 0)]
    pub min_response_length: usize,
    /// Whether the end-of-sequence token of an answer is in the losses, or gets the score and is in none: `unless_pad` where
    /// DeepSpeed-Chat pads with it: with all models but Llama, and with a Llama whose padding token it is.
    #[arg(long, help_heading = PPO, value_enum, default_value = "always")]
    pub eos_in_loss: EosInLoss,
    /// Train the value of the state after an answer's last token, where the score lands behind it.
    #[arg(long, help_heading = PPO, default_value_t = true)]
    pub last_value_in_loss: bool,
}

/// How PPO's answers are sampled beside their temperature: in training, in evaluations and, but for the filters, in the sample
/// tables, which take the likeliest token.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct SamplingConfig {
    /// Sample from this many likeliest tokens only; 0 for all.
    #[arg(long, help_heading = SAMPLING, default_value_t = 0)]
    pub top_k: usize,
    /// Sample from the fewest likeliest tokens that hold this much probability; 1 for all.
    #[arg(long, help_heading = SAMPLING, default_value_t = 1.0)]
    pub top_p: f64,
    /// Sample from tokens at least this many times as likely as the likeliest; 0 for all.
    #[arg(long, help_heading = SAMPLING, default_value_t = 0.0)]
    pub min_p: f64,
    /// Make tokens of the prompt and the answer less likely to come again; 1 for no penalty.
    #[arg(long, help_heading = SAMPLING, default_value_t = 1.0)]
    pub repetition_penalty: f64,
    /// Tokens of an answer, at least: before that nothing ends it.
    #[arg(long, help_heading = SAMPLING, default_value_t = 0)]
    pub min_new_tokens: usize,
    /// Stop with the token that completes this text; the flag several times for several.
    #[arg(long, help_heading = SAMPLING)]
    pub stop_strings: Vec<String>,
    /// The distribution that log-probabilities are of: the `policy`'s over the whole vocabulary, or the `filtered` one over the
    /// tokens that the filters left when an answer was sampled.
    #[arg(long, help_heading = SAMPLING, value_enum, default_value = "policy")]
    pub logprobs_of: LogprobsOf,
}

/// Over which tokens log-probabilities are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum LogprobsOf {
    /// The whole vocabulary, whatever filters the sampling had.
    Policy,
    /// Those that the filters left when the token was sampled: for the policy that sampled, the one that learns and the reference.
    Filtered,
}

impl SamplingConfig {
    fn check(&self, config: &PpoConfig) -> Result<()> {
        let (least, most) = (self.min_new_tokens, config.response_length);
        let stops = config.stop_token.is_some() || config.stop_token_id.is_some() || !self.stop_strings.is_empty();
        all([
            above_zero("top_p", self.top_p),
            zero_to_one("top_p", self.top_p),
            zero_to_one("min_p", self.min_p),
            above_zero("repetition_penalty", self.repetition_penalty),
            expect(least <= most, "min_new_tokens", least, &format!("at most response_length = {most}")),
            expect(!self.stop_strings.iter().any(String::is_empty), "stop_strings", "\"\"", "some text"),
            if least > 0 && !stops {
                no_effect("min_new_tokens", least, "without stop_token, stop_token_id or stop_strings")
            } else {
                Ok(())
            },
            self.check_logprobs(config),
        ])
    }

    fn check_logprobs(&self, config: &PpoConfig) -> Result<()> {
        let least = self.min_new_tokens;
        if self.logprobs_of == LogprobsOf::Policy {
            return Ok(());
        }
        let filters = self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0 || least > 0;
        if !filters {
            return no_effect("logprobs_of", "filtered", "without top_k, top_p, min_p or min_new_tokens");
        }
        if self.repetition_penalty != 1.0 {
            return usage(format!(
                "logprobs_of = filtered with repetition_penalty = {}: a penalty leaves no token out, it changes what all of \
                 them count, by the text before each: expected 1, or logprobs_of = policy",
                self.repetition_penalty
            ));
        }
        if config.counts.min_response_length > 0 {
            return usage(format!(
                "logprobs_of = filtered with min_response_length = {}: where answers train again, an earlier policy's filters \
                 would count for this one's: expected min_response_length = 0, or logprobs_of = policy",
                config.counts.min_response_length
            ));
        }
        if config.legacy.raw_logprobs && config.temperature != 1.0 {
            return usage(format!(
                "logprobs_of = filtered with raw_logprobs = true and temperature = {}: what was sampled from is filtered at the \
                 temperature: expected temperature = 1, or raw_logprobs = false",
                config.temperature
            ));
        }
        Ok(())
    }
}

/// The mix of a text's likelihood into the policy's steps.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct UnsupervisedConfig {
    /// Dataset of texts that the policy keeps learning to continue: a file, a folder or a hub name.
    #[arg(long, help_heading = DATA, default_value = NONE, hide_default_value = true, value_parser = optional::<PathBuf>)]
    pub unsupervised_dataset_name: std::option::Option<PathBuf>,
    /// Folder of that dataset to take, where several have the split.
    #[arg(long, help_heading = DATA, default_value = NONE, hide_default_value = true, value_parser = optional::<String>)]
    pub unsupervised_dataset_config_name: std::option::Option<String>,
    /// Weight of the texts' loss.
    #[arg(long, help_heading = PPO, default_value_t = 27.8)]
    pub unsup_coef: f64,
}

/// An exponential moving average of the policy's weights.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct EmaConfig {
    /// Keep a moving average of the policy, and save it in `ema`.
    #[arg(long, help_heading = OPTIMIZER)]
    pub enable_ema: bool,
    /// How much of the average stays in each optimizer step.
    #[arg(long, help_heading = OPTIMIZER, default_value_t = 0.992)]
    pub ema_beta: f64,
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
    /// Divide the scores that are trained on by the standard deviation of all that the run has seen.
    #[arg(long, help_heading = REWARDS)]
    pub use_score_scaling: bool,
    /// Subtract the mean of all that the run has seen before that.
    #[arg(long, help_heading = REWARDS)]
    pub use_score_norm: bool,
    /// Clip scores to plus or minus this, after that.
    #[arg(long, help_heading = REWARDS, default_value = NONE, value_parser = optional::<f64>)]
    pub score_clip: std::option::Option<f64>,
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

/// AdamW and the learning rate's course; the learning rate itself is a field of each command, whose default it is.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct OptimizerConfig {
    /// Course of the learning rate after the warm-up.
    #[arg(long, help_heading = OPTIMIZER, value_enum, default_value = "linear")]
    pub lr_scheduler_type: LrSchedulerType,
    /// Updates in which the learning rate rises from 0 to its peak.
    #[arg(long, help_heading = OPTIMIZER, default_value_t = 0)]
    pub warmup_steps: usize,
    /// The same as a share of all updates, rounded up.
    #[arg(long, help_heading = OPTIMIZER, default_value_t = 0.0)]
    pub warmup_ratio: f64,
    /// What the learning rate falls to [default: 0, `polynomial` 1e-7].
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, hide_default_value = true, value_parser = optional::<f64>)]
    pub lr_end: std::option::Option<f64>,
    /// Power of the schedule `polynomial`.
    #[arg(long, help_heading = OPTIMIZER, default_value_t = 1.0)]
    pub power: f64,
    /// Decoupled weight decay.
    #[arg(long, help_heading = OPTIMIZER, default_value_t = 0.0)]
    pub weight_decay: f64,
    /// Decay of AdamW's mean of gradients.
    #[arg(long, help_heading = OPTIMIZER, default_value_t = 0.9)]
    pub adam_beta1: f64,
    /// Decay of AdamW's mean of squared gradients.
    #[arg(long, help_heading = OPTIMIZER, default_value_t = 0.999)]
    pub adam_beta2: f64,
    /// AdamW's epsilon.
    #[arg(long, help_heading = OPTIMIZER, default_value = "1e-8")]
    pub adam_epsilon: f64,
    /// Clip gradients to this norm; none or 0 turns clipping off, 1 is a good choice.
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, value_parser = norm_or_zero)]
    pub max_grad_norm: std::option::Option<f64>,
}

/// What a PPO run asserts of its own numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct WatchConfig {
    /// Stop after this many updates in a row without an optimizer step, all of them skipped since a loss or a gradient was
    /// not finite.
    #[arg(long, help_heading = OPTIMIZER, default_value_t = 3)]
    pub max_skipped_updates: usize,
    /// Begin without the checks of the first ratio, the first KL, and decoding.
    #[arg(long, help_heading = RUN)]
    pub no_checks: bool,
}

/// Where a training run writes, and how it computes.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct RunConfig {
    /// Folder for the model, the metrics and the resolved configuration.
    #[arg(long, help_heading = RUN)]
    pub output_dir: PathBuf,
    /// Replace the run that `output_dir` holds.
    #[arg(long, help_heading = RUN)]
    #[serde(skip)] // Consent to lose a run is given for one run, never by the file that the run left behind.
    pub overwrite_output_dir: bool,
    /// Seed of everything random.
    #[arg(long, help_heading = RUN, default_value_t = 42)]
    pub seed: u64,
    /// Compute in bfloat16; the optimizer keeps float32 weights.
    #[arg(long, help_heading = RUN)]
    pub bf16: bool,
    /// Compute in float16, with a loss scale that finds its own size; the optimizer keeps float32 weights.
    #[arg(long, help_heading = RUN)]
    pub fp16: bool,
    /// How that scale begins and moves.
    #[command(flatten)]
    #[serde(flatten)]
    pub loss_scale: LossScaleConfig,
    /// Dtype that models are loaded in, `auto` for their files'; what is trained goes on in float32.
    #[arg(long, help_heading = RUN, value_enum, default_value = "auto")]
    pub dtype: Dtype,
    /// Where to compute: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
    #[arg(long, help_heading = RUN, default_value_t = Device::Auto, value_name = Device::NAME, value_parser = required::<Device>)]
    pub device: Device,
    /// Write weights in files of at most this size each, such as 5GB or 500MB.
    #[arg(long, help_heading = RUN, default_value = "50GB", value_name = ByteSize::NAME, value_parser = required::<ByteSize>)]
    pub max_shard_size: ByteSize,
    /// Keep only what goes into each layer, and compute the layer again on the way back: less memory, more time.
    #[arg(long, help_heading = RUN)]
    pub gradient_checkpointing: bool,
    /// Most tokens in one forward and backward pass; it changes no result [default: by the memory there is].
    #[arg(long, help_heading = RUN, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub max_tokens_per_micro_batch: std::option::Option<usize>,
    /// Where metrics go besides `metrics.jsonl`.
    #[arg(long, alias = "log_with", help_heading = RUN, value_enum, default_value = "none")]
    pub report_to: ReportTo,
    /// Names of the metrics in TensorBoard: `plain` as in `metrics.jsonl`, `trl` as TRL's trainers write them, such as
    /// `train/objective/kl` and `eval/loss`.
    #[arg(long, help_heading = RUN, value_enum, default_value = "plain")]
    pub tensorboard_tags: TensorboardTags,
    /// Threads for tensor operations [default: one per core].
    #[arg(long, help_heading = RUN, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub num_threads: std::option::Option<usize>,
    /// Show no progress bar.
    #[arg(long, help_heading = RUN)]
    pub disable_tqdm: bool,
    /// What is kept on the way, and what the run goes on from.
    #[command(flatten)]
    #[serde(flatten)]
    pub checkpoints: CheckpointConfig,
}

/// The loss scale of a run that computes in float16, by the names of DeepSpeed's `fp16` settings.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct LossScaleConfig {
    /// With `fp16`, the loss is scaled by 2 to the power of this at first.
    #[arg(long, help_heading = RUN, default_value_t = 16)]
    pub initial_scale_power: usize,
    /// The scale is doubled after this many optimizer steps in a row without an overflow.
    #[arg(long, help_heading = RUN, default_value_t = 1000)]
    pub loss_scale_window: usize,
    /// It is halved from this many-th overflow on, counted since it was last doubled; an overflow leaves its step out in any
    /// case.
    #[arg(long, help_heading = RUN, default_value_t = 2)]
    pub hysteresis: usize,
    /// It does not fall below this.
    #[arg(long, help_heading = RUN, default_value_t = 1.0)]
    pub min_loss_scale: f64,
}

/// The largest power of a loss scale: f32 holds no larger one, with room for a loss.
const MOST_SCALE_POWER: usize = 100;

impl LossScaleConfig {
    /// What the loss is scaled by at first.
    pub fn initial_scale(&self) -> f64 {
        2f64.powi(self.initial_scale_power as i32)
    }

    fn check(&self, fp16: bool) -> Result<()> {
        let usual: Self = defaults();
        let (power, most) = (self.initial_scale_power, self.initial_scale());
        if !fp16 {
            let unused = |name, found: &dyn Display, differs: bool| {
                if differs { no_effect(name, found, "without fp16 = true") } else { Ok(()) }
            };
            let (window, hysteresis, least) = (self.loss_scale_window, self.hysteresis, self.min_loss_scale);
            return all([
                unused("initial_scale_power", &power, power != usual.initial_scale_power),
                unused("loss_scale_window", &window, window != usual.loss_scale_window),
                unused("hysteresis", &hysteresis, hysteresis != usual.hysteresis),
                unused("min_loss_scale", &least, least != usual.min_loss_scale),
            ]);
        }
        let expected = format!("at most {most}, 2 to the power of initial_scale_power");
        all([
            expect(power <= MOST_SCALE_POWER, "initial_scale_power", power, &format!("at most {MOST_SCALE_POWER}")),
            at_least_one("loss_scale_window", self.loss_scale_window),
            at_least_one("hysteresis", self.hysteresis),
            above_zero("min_loss_scale", self.min_loss_scale),
            expect(self.min_loss_scale <= most, "min_loss_scale", self.min_loss_scale, &expected),
        ])
    }
}

/// What PPO's two models do together where they compute in float16.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct Fp16Config {
    /// With `fp16`, where the gradients of policy or value model overflow, neither takes the step.
    #[arg(long, help_heading = RUN)]
    pub align_overflow: bool,
    /// Make every log-probability of logits in float32, those of policy and reference alike; always so, and not to be turned
    /// off.
    #[arg(long, help_heading = RUN, default_value_t = true)]
    pub compute_fp32_loss: bool,
}

impl Fp16Config {
    fn check(&self, fp16: bool) -> Result<()> {
        let expected =
            "true: log-probabilities in fewer bits differ between the passes of a run, and the ratio with them";
        all([
            expect(self.compute_fp32_loss, "compute_fp32_loss", false, expected),
            if self.align_overflow && !fp16 {
                no_effect("align_overflow", true, "without fp16 = true")
            } else {
                Ok(())
            },
        ])
    }
}

/// Checkpoints on the way, and how a run goes on from one.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct CheckpointConfig {
    /// Save a checkpoint every this many updates, and after the last; without it only a run that ends early saves one.
    #[arg(long, help_heading = CHECKPOINTS, default_value = NONE, value_parser = optional::<usize>)]
    pub save_steps: std::option::Option<usize>,
    /// Keep this many checkpoints, the newest [default: all].
    #[arg(long, help_heading = CHECKPOINTS, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub save_total_limit: std::option::Option<usize>,
    /// Go on from this checkpoint; `true` is the newest whole one in `output_dir`, and the beginning where there is none.
    #[arg(
        long, help_heading = CHECKPOINTS, default_value = NONE, hide_default_value = true, value_name = Resume::NAME, value_parser = resume_or_false,
        num_args = 0..=1, default_missing_value = "true"
    )]
    #[serde(skip)] // A run is gone on with when that is asked for, not when its settings are used again.
    pub resume_from_checkpoint: std::option::Option<Resume>,
    /// Resume also where data or models are not those that the run began with.
    #[arg(long, help_heading = CHECKPOINTS)]
    #[serde(skip)]
    pub resume_with_changed_inputs: bool,
}

impl CheckpointConfig {
    fn check(&self) -> Result<()> {
        all([
            if self.resume_with_changed_inputs && self.resume_from_checkpoint.is_none() {
                no_effect("resume_with_changed_inputs", true, "without resume_from_checkpoint")
            } else {
                Ok(())
            },
            self.save_steps.map_or(Ok(()), |steps| at_least_one("save_steps", steps)),
            self.save_total_limit.map_or(Ok(()), |limit| at_least_one("save_total_limit", limit)),
        ])
    }
}

/// What a run goes on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest whole checkpoint in the output folder; the beginning, where there is none.
    Latest,
    /// The checkpoint in this folder.
    From(PathBuf),
}

/// Evaluation on the way, and the best model by what it finds.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct EvalConfig {
    /// Evaluate on the rows that are held out before the first update, every this many updates, and after the last.
    #[arg(long, help_heading = EVALUATION, default_value = NONE, value_parser = optional::<usize>)]
    pub eval_steps: std::option::Option<usize>,
    /// Keep the model at which this metric was best in `output_dir/best`; it is looked at after each evaluation, or else each
    /// `save_steps`.
    #[arg(long, help_heading = EVALUATION, default_value = NONE, value_parser = optional::<String>)]
    pub metric_for_best_model: std::option::Option<String>,
    /// Whether more of that metric is better [default: unless it is a loss or a KL].
    #[arg(
        long, help_heading = EVALUATION, default_value = NONE, hide_default_value = true, value_parser = optional::<bool>,
        num_args = 0..=1, default_missing_value = "true"
    )]
    pub greater_is_better: std::option::Option<bool>,
}

/// Whether a metric of this name comes of an evaluation.
pub(crate) fn is_eval_metric(name: &str) -> bool {
    name.starts_with("eval/") || name.starts_with("eval_")
}

/// Prompts of an evaluation, where nothing else is set.
pub(crate) const NUM_EVAL_PROMPTS: usize = 128;

/// What begins the names of those that are of one reward each.
pub(crate) const EVAL_SCORES: &str = "eval/scores/";

impl EvalConfig {
    /// `known` are the metrics of an evaluation; one that ends with a slash is followed by a reward's name.
    fn check(&self, save_steps: Option<usize>, known: &[&str]) -> Result<()> {
        self.eval_steps.map_or(Ok(()), |steps| at_least_one("eval_steps", steps))?;
        let Some(metric) = &self.metric_for_best_model else {
            return match self.greater_is_better {
                Some(greater) => usage(format!(
                    "greater_is_better = {greater} needs metric_for_best_model: no best model is looked for without one"
                )),
                None => Ok(()),
            };
        };
        let needs =
            |what: &str| usage(format!("metric_for_best_model = {metric} needs {what}: nothing looks at it else"));
        match (self.eval_steps, save_steps) {
            (None, _) if is_eval_metric(metric) => needs("eval_steps"),
            (None, None) => needs("eval_steps or save_steps"),
            // Other names are known when the first update is done; these would be after its first evaluation only.
            _ if is_eval_metric(metric) => {
                let is = |name: &&str| metric == name || name.ends_with('/') && metric.starts_with(name);
                let named = |name: &&str| if name.ends_with('/') { format!("{name}NAME") } else { name.to_string() };
                let names: Vec<String> = known.iter().map(named).collect();
                let expected = match names.as_slice() {
                    [only] => only.clone(),
                    several => format!("one of {}", several.join(", ")),
                };
                expect(known.iter().any(is), "metric_for_best_model", metric, &expected)
            }
            _ => Ok(()),
        }
    }
}

impl WatchConfig {
    fn check(&self) -> Result<()> {
        at_least_one("max_skipped_updates", self.max_skipped_updates)
    }
}

impl RunConfig {
    /// Whether models compute in fewer bits than f32 has, so that two passes over the same tokens differ by rounding.
    pub(crate) fn computes_in_few_bits(&self) -> bool {
        self.bf16 || self.fp16
    }

    fn check(&self) -> Result<()> {
        all([
            check_threads(self.num_threads),
            if self.bf16 && self.fp16 {
                usage("bf16 = true and fp16 = true exclude each other: set one of them")
            } else {
                Ok(())
            },
            self.loss_scale.check(self.fp16),
            match (self.tensorboard_tags, self.report_to) {
                (TensorboardTags::Trl, ReportTo::None) => {
                    no_effect("tensorboard_tags", "trl", "without report_to = tensorboard")
                }
                _ => Ok(()),
            },
            self.checkpoints.check(),
            self.max_tokens_per_micro_batch.map_or(Ok(()), |most| at_least_one("max_tokens_per_micro_batch", most)),
        ])
    }
}

/// What becomes of prompts that are too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum LongPrompts {
    /// The run ends before it begins.
    Error,
    /// They are left out.
    Drop,
    /// Their first tokens go, but for those that the tokenizer puts in front of every text.
    TruncateLeft,
    /// Their last tokens go.
    TruncateRight,
}

/// A stop token that goes by a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum StopToken {
    /// The tokenizer's end-of-sequence token.
    Eos,
}

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

/// When the end-of-sequence token of an answer is in the losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum EosInLoss {
    /// As every token is.
    Always,
    /// Unless DeepSpeed-Chat pads with it, which attends to no padding: it does with all models but Llama, whose tokenizer
    /// keeps its padding token or gets one of its own.
    UnlessPad,
    /// In no case.
    Never,
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

/// Over which tokens advantages are shifted and scaled to mean 0 and variance 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum WhitenAdvantages {
    /// All of an update.
    Batch,
    /// Those of each mini-batch.
    MiniBatch,
    /// Not at all.
    None,
}

/// The learning rate's course after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum LrSchedulerType {
    /// In a straight line to 0.
    Linear,
    /// Half a cosine to 0.
    Cosine,
    /// The same: transformers' cosine that begins anew in each cycle has one.
    CosineWithRestarts,
    /// A power of the share of updates that are left.
    Polynomial,
    /// By one over the square root of the updates, whatever their number.
    InverseSqrt,
    /// The peak throughout, without warm-up.
    Constant,
    /// The peak throughout, after the warm-up.
    ConstantWithWarmup,
}

impl LrSchedulerType {
    /// Whether the rate falls over the updates of the run, to an end.
    pub(crate) fn falls(self) -> bool {
        matches!(self, Self::Linear | Self::Cosine | Self::CosineWithRestarts | Self::Polynomial)
    }

    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())
    }
}

/// Where metrics go besides `metrics.jsonl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum ReportTo {
    /// Nowhere.
    None,
    /// TensorBoard event files in the output folder.
    Tensorboard,
}

/// How metrics are named in TensorBoard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum TensorboardTags {
    /// As in `metrics.jsonl`.
    Plain,
    /// As transformers' callback names what TRL's trainers log: `eval_loss` is `eval/loss`, all else begins with `train/`.
    Trl,
}

impl TensorboardTags {
    /// The tag of the metric `name`.
    pub(crate) fn tag(self, name: &str) -> String {
        match (self, name.strip_prefix("eval_")) {
            (Self::Plain, _) => name.into(),
            (Self::Trl, Some(name)) => format!("eval/{name}"),
            (Self::Trl, None) if name.starts_with("eval/") => name.into(),
            (Self::Trl, None) => format!("train/{name}"),
        }
    }
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
            zero_or_more("kl_coef", self.kl_coef),
            zero_or_more("vf_coef", self.vf_coef),
            zero_to_one("gamma", self.gamma),
            zero_to_one("lam", self.lam),
            self.missing_eos_penalty.map_or(Ok(()), |penalty| zero_or_more("missing_eos_penalty", penalty)),
            self.check_penalty(),
            self.check_whitening(),
            self.kl.check(self),
            self.step.check(self),
            self.legacy.check(self),
            self.sampling.check(self),
            self.value.check(self),
            self.check_stop(),
            check_token_id(self.stop_token_id),
            self.rewards.check(),
            crate::reward::specs(self).and_then(|rewards| self.rewards.check_asked(&rewards)),
            self.data.check(None),
            self.prompt_length.check(),
            self.check_adapters(),
            self.counts.check(self),
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
        let high = self.step.cliprange_high.unwrap_or(self.cliprange);
        PolicyClip { low: self.cliprange, high, dual: self.step.dual_clip }
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
        self.step.target_kl.or(self.legacy.early_stopping.then_some(TARGET_KL))
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

impl RewardsConfig {
    fn check(&self) -> Result<()> {
        let most = format!("at most {MOST_REQUESTS}");
        let seconds = self.reward_timeout;
        let expected = "a number of seconds above 0, at most a week";
        all([
            at_least_one("reward_batch_size", self.reward_batch_size),
            at_least_one("reward_concurrency", self.reward_concurrency),
            expect(self.reward_concurrency <= MOST_REQUESTS, "reward_concurrency", self.reward_concurrency, &most),
            expect(seconds > 0.0 && seconds <= LONGEST_TIMEOUT, "reward_timeout", seconds, expected),
        ])
    }

    /// How a reward is asked matters to those that are asked.
    fn check_asked(&self, rewards: &[Spec]) -> Result<()> {
        let usual: Self = defaults();
        let (service, outside) = (rewards.iter().any(Spec::is_service), rewards.iter().any(Spec::is_outside));
        let why = "without a reward that is a service";
        let unused = |name, found: &dyn Display, differs: bool| {
            if differs && !service { no_effect(name, found, why) } else { Ok(()) }
        };
        let own = "without a reward that is a program or a service";
        let unasked = |name, found: &dyn Display, differs: bool| {
            if differs && !outside { no_effect(name, found, own) } else { Ok(()) }
        };
        let (label, rows, requests) = (&self.reward_label_column, self.reward_batch_size, self.reward_concurrency);
        all([
            unused("reward_label_column", label, *label != usual.reward_label_column),
            unused("reward_batch_size", &rows, rows != usual.reward_batch_size),
            unused("reward_concurrency", &requests, requests != usual.reward_concurrency),
            unasked("reward_timeout", &self.reward_timeout, self.reward_timeout != usual.reward_timeout),
            unasked("reward_retries", &self.reward_retries, self.reward_retries != usual.reward_retries),
        ])
    }
}

impl KlConfig {
    fn check(&self, config: &PpoConfig) -> Result<()> {
        let usual: Self = defaults();
        let of_control = |name, found, usual| {
            if found != usual && !self.adap_kl_ctrl {
                return no_effect(name, found, "without adap_kl_ctrl = true");
            }
            Ok(())
        };
        all([
            above_zero("target", self.target),
            above_zero("horizon", self.horizon),
            self.kl_coef_end.map_or(Ok(()), |end| zero_or_more("kl_coef_end", end)),
            of_control("target", self.target, usual.target),
            of_control("horizon", self.horizon, usual.horizon),
            match self.kl_coef_end {
                Some(end) if self.adap_kl_ctrl => usage(format!(
                    "adap_kl_ctrl = true and kl_coef_end = {end} exclude each other: the KL's weight follows its target or a \
                     schedule"
                )),
                None if self.adap_kl_ctrl && config.kl_coef == 0.0 => {
                    no_effect("adap_kl_ctrl", true, "with kl_coef = 0: the weight is only ever multiplied")
                }
                _ => Ok(()),
            },
            self.check_in_loss(config),
        ])
    }

    fn check_in_loss(&self, config: &PpoConfig) -> Result<()> {
        if !self.kl_in_loss {
            return Ok(());
        }
        if config.kl_coef == 0.0 && self.kl_coef_end.unwrap_or(0.0) == 0.0 {
            return no_effect("kl_in_loss", true, "with kl_coef = 0");
        }
        match config.kl_estimator {
            KlEstimator::K1 => usage(
                "kl_in_loss = true with kl_estimator = k1: the gradient of k1 is 0 on average; expected full or mse, whose \
                 gradient is that of the KL, mse's on average, k3 or abs",
            ),
            KlEstimator::K3 | KlEstimator::Abs | KlEstimator::Mse | KlEstimator::Full => Ok(()),
        }
    }
}

impl StepConfig {
    fn check(&self, config: &PpoConfig) -> Result<()> {
        let above_one = |name, found: Option<f64>| {
            found.map_or(Ok(()), |x| expect(x.is_finite() && x > 1.0, name, x, "a number above 1"))
        };
        // The preset's own limit is there in any case; sizes that do not go together are refused as such.
        let one_step = config.steps_per_update() == Some(1) && config.preset != Preset::TrlLegacy;
        let limit = |name, found: Option<f64>| {
            let why = "with one optimizer step an update (num_ppo_epochs = 1 and one mini-batch): in the first step every \
                       ratio is 1";
            found.filter(|_| one_step).map_or(Ok(()), |found| no_effect(name, found, why))
        };
        let last = config.num_ppo_epochs == 1;
        all([
            self.cliprange_high.map_or(Ok(()), |range| above_zero("cliprange_high", range)),
            zero_or_more("entropy_coef", self.entropy_coef),
            self.target_kl.map_or(Ok(()), |kl| above_zero("target_kl", kl)),
            above_one("dual_clip", self.dual_clip),
            above_one("ratio_threshold", self.ratio_threshold),
            self.target_kl.filter(|_| last).map_or(Ok(()), |kl| {
                no_effect("target_kl", kl, "with num_ppo_epochs = 1: there is no second epoch to leave out")
            }),
            limit("cliprange_high", self.cliprange_high),
            limit("dual_clip", self.dual_clip),
            limit("ratio_threshold", self.ratio_threshold),
        ])
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
                self.use_score_norm && !self.use_score_scaling,
                "use_score_norm",
                &true,
                "without use_score_scaling = true",
            ),
            self.score_clip.map_or(Ok(()), |clip| above_zero("score_clip", clip)),
            refuse(
                self.raw_logprobs && config.temperature == 1.0 && !legacy,
                "raw_logprobs",
                &true,
                "with temperature = 1",
            ),
            config.step.target_kl.filter(unwatched).map_or(Ok(()), |kl| {
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
            Some(metric) if self.use_score_scaling => usage(format!(
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
        if config.kl.kl_in_loss && config.kl_estimator == KlEstimator::Full {
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

impl CountsConfig {
    fn check(&self, config: &PpoConfig) -> Result<()> {
        let most = format!("at most response_length = {}", config.response_length);
        let least = self.min_response_length;
        let ends = config.score_position == ScorePosition::LastToken;
        let eos = self.eos_in_loss.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string());
        all([
            self.clip_reward_value.map_or(Ok(()), |most| above_zero("clip_reward_value", most)),
            expect(least <= config.response_length, "min_response_length", least, &most),
            if !self.last_value_in_loss && ends {
                let why = "with score_position = last_token: there is no value behind it";
                no_effect("last_value_in_loss", false, why)
            } else {
                Ok(())
            },
            if self.eos_in_loss != EosInLoss::Always && ends {
                usage(format!(
                    "score_position = last_token and eos_in_loss = {eos} exclude each other: the score would be that of a token \
                     that may be left out; after_stop gives it to the token behind the last that counts"
                ))
            } else {
                Ok(())
            },
        ])
    }
}

impl UnsupervisedConfig {
    fn check(&self) -> Result<()> {
        let (usual, none): (Self, _) = (defaults(), self.unsupervised_dataset_name.is_none());
        let without = "without unsupervised_dataset_name";
        all([
            above_zero("unsup_coef", self.unsup_coef),
            self.unsupervised_dataset_config_name
                .as_ref()
                .filter(|_| none)
                .map_or(Ok(()), |name| no_effect("unsupervised_dataset_config_name", name, without)),
            if none && self.unsup_coef != usual.unsup_coef {
                no_effect("unsup_coef", self.unsup_coef, without)
            } else {
                Ok(())
            },
        ])
    }
}

impl EmaConfig {
    fn check(&self) -> Result<()> {
        let below_one = (0.0..1.0).contains(&self.ema_beta);
        expect(below_one, "ema_beta", self.ema_beta, "a number from 0 to below 1")?;
        let usual: Self = defaults();
        if self.enable_ema || self.ema_beta == usual.ema_beta {
            return Ok(());
        }
        no_effect("ema_beta", self.ema_beta, "without enable_ema = true")
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

impl PeftConfig {
    /// The adapter that is asked for, if one is.
    pub fn lora(&self) -> Option<LoraConfig> {
        let targets = &self.lora_target_modules;
        self.use_peft.then(|| LoraConfig {
            r: self.lora_r,
            alpha: self.lora_alpha as f64,
            dropout: self.lora_dropout,
            target_modules: (!targets.is_empty()).then(|| targets.clone()),
            use_rslora: self.use_rslora,
        })
    }

    fn check(&self) -> Result<()> {
        if !self.use_peft && *self != defaults() {
            return usage(
                "settings of LoRA are given, and use_peft = false: set --use_peft, else all weights are trained",
            );
        }
        let below_one = (0.0..1.0).contains(&self.lora_dropout);
        all([
            at_least_one("lora_r", self.lora_r),
            expect(self.lora_r <= MOST_RANK, "lora_r", self.lora_r, &format!("at most {MOST_RANK}")),
            at_least_one("lora_alpha", self.lora_alpha),
            expect(below_one, "lora_dropout", self.lora_dropout, "a number from 0 to below 1"),
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

impl DataConfig {
    /// All names, for messages.
    pub fn describe(&self) -> String {
        let names: Vec<String> = self.dataset_name.iter().map(|name| name.display().to_string()).collect();
        names.join(", ")
    }

    /// `own_eval` is a dataset of its own for evaluation.
    fn check(&self, own_eval: Option<&Path>) -> Result<()> {
        let (names, weights) = (self.dataset_name.len(), self.dataset_weights.len());
        let expected = format!("one for each of the datasets, which are {names}");
        let size = self.eval_split_size;
        let sound = |size: f64| size > 0.0 && size.is_finite() && (size < 1.0 || size.fract() == 0.0);
        all([
            expect(names > 0, "datasets", names, "at least 1"),
            expect(weights == 0 || weights == names, "numbers in dataset_weights", weights, &expected),
            self.dataset_weights.iter().try_for_each(|&weight| above_zero("dataset_weights", weight)),
            Columns::parse(&self.dataset_columns).map(drop),
            if self.data_split.is_none() && self.data_split_seed != SPLIT_SEED {
                no_effect("data_split_seed", self.data_split_seed, "without data_split")
            } else {
                Ok(())
            },
            size.map_or(Ok(()), |size| {
                expect(sound(size), "eval_split_size", size, "a share below 1, or a whole number of rows")
            }),
            match (size, own_eval.map(Path::display)) {
                (Some(size), Some(own)) => usage(format!(
                    "eval_split_size = {size} and eval_dataset_name = {own} exclude each other: set one of them"
                )),
                _ => Ok(()),
            },
        ])
    }
}

impl PromptLengthConfig {
    fn check(&self) -> Result<()> {
        self.max_prompt_length.map_or(Ok(()), |most| at_least_one("max_prompt_length", most))
    }
}

/// The address of a service as it is written to files: what comes behind a ? may be secret.
fn without_query(url: &str) -> String {
    match address(url) {
        shown if shown == url => url.to_string(),
        shown => format!("{shown}{LEFT_OUT}"),
    }
}

fn address_without_query<S: serde::Serializer>(url: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
    url.as_deref().map(without_query).serialize(serializer)
}

fn rewards_without_queries<S: serde::Serializer>(rewards: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rewards.iter().map(|written| match written.split_once(':') {
        Some((head, url)) if head == "url" || head.ends_with("=url") => format!("{head}:{}", without_query(url)),
        _ => written.clone(),
    }))
}

/// One dataset is written as its name, several as a list of them.
fn one_or_list<S: serde::Serializer>(names: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    match names {
        [one] => one.serialize(serializer),
        several => several.serialize(serializer),
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

/// Writes every setting of a run to the file `path`, as YAML that `--config` reads back, consent to overwrite left out.
///
/// Errors: [`Error::Io`]; [`Error::Invalid`] if a path among the settings is not UTF-8.
pub fn write_resolved(config: &impl Serialize, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let settings = serde_saphyr::to_string(config)
        .map_err(|error| Error::invalid(path, format!("the configuration cannot be written as YAML: {error}")))?;
    let text = format!("{RESOLVED}{}.\n{settings}", env!("CARGO_PKG_VERSION"));
    crate::weights::write_text(path, &text)
}

/// How a file begins that [`write_resolved`] writes: a person's configuration may have the same name.
pub(crate) const RESOLVED: &str = "# Every setting of this run, as resolved by rlhf ";

// By hand, because `ppo` knows tensors only.
impl ValueEnum for KlEstimator {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::K1, Self::K3, Self::Abs, Self::Mse, Self::Full]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            // TRL 0.11 says so.
            Self::K1 => PossibleValue::new("k1").alias("kl"),
            Self::K3 => PossibleValue::new("k3"),
            Self::Abs => PossibleValue::new("abs"),
            Self::Mse => PossibleValue::new("mse"),
            Self::Full => PossibleValue::new("full"),
        })
    }
}

impl ValueEnum for ScorePosition {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::AfterStop, Self::LastToken]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            Self::AfterStop => "after_stop",
            Self::LastToken => "last_token",
        }))
    }
}

impl Setting for Resume {
    const NAME: &'static str = "PATH";
    const EXPECTED: &'static str = "the folder of a checkpoint, or true for the newest";

    fn read(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "true" | "latest" => Some(Self::Latest),
            _ => (!text.is_empty()).then(|| Self::From(text.into())),
        }
    }
}

impl Setting for StopToken {
    const NAME: &'static str = "TOKEN";
    const EXPECTED: &'static str = "eos or none; an id goes to stop_token_id";

    fn read(text: &str) -> Option<Self> {
        Self::from_str(text, true).ok()
    }
}

impl Setting for LrSchedulerType {
    const NAME: &'static str = "NAME";
    const EXPECTED: &'static str =
        "linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt, constant or constant_with_warmup";

    fn read(text: &str) -> Option<Self> {
        Self::from_str(text, true).ok()
    }
}

impl Setting for DataSplit {
    const NAME: &'static str = "PARTS";
    const EXPECTED: &'static str = "three numbers of 0 or more for sft, reward and ppo, such as 2,4,4";

    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
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

/// A yes-or-no question that also takes a path.
fn resume_or_false(text: &str) -> Result<Option<Resume>, String> {
    if text.eq_ignore_ascii_case("false") { Ok(None) } else { optional(text) }
}

/// A norm of 0 turns clipping off.
fn norm_or_zero(text: &str) -> Result<Option<f64>, String> {
    Ok(optional(text)?.filter(|&norm| norm != 0.0))
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

fn check_threads(threads: Option<usize>) -> Result<()> {
    let Some(threads) = threads else { return Ok(()) };
    // libtorch's threads wait by spinning: with more of them than processors a run all but stands still.
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    let expected = format!("1 to {most}, the processors there are");
    expect((1..=most).contains(&threads), "num_threads", threads, &expected)
}

/// `value_schedule` is that of a value model, which shares what it has no setting of its own for.
fn check_learning(
    learning_rate: f64,
    optimizer: &OptimizerConfig,
    value_schedule: Option<LrSchedulerType>,
) -> Result<()> {
    let below_one = |beta: f64| (0.0..1.0).contains(&beta);
    let (steps, ratio) = (optimizer.warmup_steps, optimizer.warmup_ratio);
    let own = optimizer.lr_scheduler_type;
    let no_schedule = |does: fn(LrSchedulerType) -> bool| !does(own) && !value_schedule.is_some_and(does);
    let with_schedule = |hint: &str| format!("with lr_scheduler_type = {}{hint}", own.name());
    let (beta1, beta2, power) = (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.power);
    let expected = format!("less than learning_rate = {learning_rate}");
    let no_warmup = no_schedule(|schedule| schedule != LrSchedulerType::Constant);
    all([
        zero_or_more("learning_rate", learning_rate),
        zero_or_more("weight_decay", optimizer.weight_decay),
        expect(below_one(beta1), "adam_beta1", beta1, "a number from 0 to below 1"),
        expect(below_one(beta2), "adam_beta2", beta2, "a number from 0 to below 1"),
        above_zero("adam_epsilon", optimizer.adam_epsilon),
        optimizer.max_grad_norm.map_or(Ok(()), |norm| above_zero("max_grad_norm", norm)),
        zero_to_one("warmup_ratio", ratio),
        if steps > 0 && ratio > 0.0 {
            usage(format!("warmup_steps = {steps} and warmup_ratio = {ratio} exclude each other: set one of them"))
        } else {
            Ok(())
        },
        if no_warmup && (steps > 0 || ratio > 0.0) {
            let (name, found) = if steps > 0 { ("warmup_steps", steps as f64) } else { ("warmup_ratio", ratio) };
            no_effect(name, found, &with_schedule("; constant_with_warmup has a warm-up"))
        } else {
            Ok(())
        },
        above_zero("power", power),
        if no_schedule(|schedule| schedule == LrSchedulerType::Polynomial) && power != 1.0 {
            no_effect("power", power, &with_schedule("; polynomial has it"))
        } else {
            Ok(())
        },
        optimizer.lr_end.map_or(Ok(()), |end| zero_or_more("lr_end", end)),
        match optimizer.lr_end {
            Some(end) if no_schedule(LrSchedulerType::falls) => no_effect("lr_end", end, &with_schedule("")),
            Some(end) => expect(!own.falls() || end < learning_rate, "lr_end", end, &expected),
            None => Ok(()),
        },
    ])
}

/// The most requests to a reward service at a time: each has a thread.
const MOST_REQUESTS: usize = 1024;

/// The longest wait for a reward, in seconds.
const LONGEST_TIMEOUT: f64 = 7.0 * 24.0 * 3600.0;

/// The highest rank of an adapter: above any model's width.
const MOST_RANK: usize = 1 << 16;

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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tags_of_tensorboard_are_those_of_the_metrics_or_of_trl() {
        let tags = ["objective/kl", "lr", "eval_loss", "eval/score"].map(|name| TensorboardTags::Trl.tag(name));
        assert_eq!(tags, ["train/objective/kl", "train/lr", "eval/loss", "eval/score"]);
        assert_eq!(TensorboardTags::Plain.tag("eval_loss"), "eval_loss");
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
    fn the_shares_of_a_split_lie_one_behind_another_and_hold_every_row() {
        for text in ["2,4,4", "1,0,0", " 0, 1, 2.5", "0.2,0.4,0.4"] {
            let split = DataSplit::read(text).unwrap();
            assert_eq!(DataSplit::read(&split.to_string()), Some(split));
            for rows in [0, 1, 2, 3, 9, 10, 1001] {
                let [sft, reward, ppo] = Step::ALL.map(|step| split.share(step, rows));
                assert_eq!((sft.start, sft.end, reward.end, ppo.end), (0, reward.start, ppo.start, rows), "{text}");
            }
        }
        let lens = Step::ALL.map(|step| DataSplit::read("2,4,4").unwrap().share(step, 1000).len());
        assert_eq!(lens, [200, 400, 400]);
        for wrong in ["", "2,4", "2,4,4,1", "2,-4,4", "0,0,0", "a,b,c", "1,inf,1", "1,nan,1"] {
            assert_eq!(DataSplit::read(wrong), None, "{wrong}");
        }
        let mut config = ppo();
        config.data.data_split_seed = 1;
        assert_eq!(usage_of(config.check()), "data_split_seed = 1 has no effect without data_split");
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
        assert_eq!(
            (config.kl_coef, config.counts.clip_reward_value, config.counts.min_response_length),
            (0.1, Some(5.0), 2)
        );
        assert_eq!((config.learning_rate, config.value_optimizer().0), (9.65e-6, 5e-6));
        assert_eq!((config.optimizer.adam_beta1, config.optimizer.adam_beta2), (0.9, 0.95));
        assert_eq!((config.optimizer.max_grad_norm, config.optimizer.warmup_steps), (Some(1.0), 100));
        assert_eq!(
            (config.counts.eos_in_loss, config.whiten_advantages),
            (EosInLoss::UnlessPad, WhitenAdvantages::None)
        );
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
            (|c| c.step.dual_clip = Some(3.0), "dual_clip = 3 has no effect with one optimizer step an update"),
            (|c| c.step.ratio_threshold = Some(10.0), "ratio_threshold = 10 has no effect with one optimizer step"),
            (|c| c.step.cliprange_high = Some(0.3), "cliprange_high = 0.3 has no effect with one optimizer step"),
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
                    c.legacy.use_score_scaling = true;
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
            (|c| c.counts.clip_reward_value = Some(0.0), "clip_reward_value = 0: expected a number above 0"),
            (|c| c.counts.min_response_length = 54, "min_response_length = 54: expected at most response_length = 53"),
            (
                |c| (c.score_position, c.counts.last_value_in_loss) = (ScorePosition::LastToken, false),
                "last_value_in_loss = false has no effect with score_position = last_token",
            ),
            (
                |c| (c.score_position, c.counts.eos_in_loss) = (ScorePosition::LastToken, EosInLoss::Never),
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
            (|c| (c.kl.adap_kl_ctrl, c.kl_coef) = (true, 0.0), "adap_kl_ctrl = true has no effect with kl_coef = 0"),
            (|c| c.kl.kl_coef_end = Some(-1.0), "kl_coef_end = -1: expected a number of 0 or more"),
            (|c| (c.kl.kl_in_loss, c.kl_coef) = (true, 0.0), "kl_in_loss = true has no effect with kl_coef = 0"),
            (
                |c| c.kl.kl_in_loss = true,
                "kl_in_loss = true with kl_estimator = k1: the gradient of k1 is 0 on average",
            ),
            (|c| c.step.dual_clip = Some(1.0), "dual_clip = 1: expected a number above 1"),
            (|c| c.step.ratio_threshold = Some(0.9), "ratio_threshold = 0.9: expected a number above 1"),
            (|c| c.step.cliprange_high = Some(0.0), "cliprange_high = 0: expected a number above 0"),
            (|c| c.step.entropy_coef = -0.1, "entropy_coef = -0.1: expected a number of 0 or more"),
            (
                |c| (c.num_ppo_epochs, c.num_mini_batches, c.step.target_kl) = (1, 2, Some(0.1)),
                "target_kl = 0.1 has no effect with num_ppo_epochs = 1",
            ),
            (
                |c| (c.num_ppo_epochs, c.step.ratio_threshold) = (1, Some(10.0)),
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
    fn a_checkpoint_is_named_by_its_folder_or_asked_for_as_the_newest() {
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
}
