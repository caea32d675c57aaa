//! Settings of `rlhf ppo`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::presets::Preset;
use crate::Result;
use crate::data::settings::{DataConfig, PromptLengthConfig};
use crate::dist::PpoDistConfig;
use crate::flag::{
    BATCHES, DATA, EVALUATION, LORA, MODELS, NONE, OPTIMIZER, PPO, RUN, SAMPLING, Setting, defaults, defaults_with,
    optional, steps_or_minus_one,
};
use crate::generate::settings::{SamplingConfig, StopToken};
use crate::model::{ModelOptions, PeftConfig};
use crate::optim::loss_scale::Fp16Config;
use crate::optim::settings::{LrSchedulerType, OptimizerConfig};
use crate::reward::{RewardSources, RewardSourcesConfig, Rewards, ScoreScalingConfig, Spec};
use crate::rl::advantage::AdvantageConfig;
use crate::rl::alarms::settings::AlarmConfig;
use crate::rl::ema::EmaConfig;
use crate::rl::groups::GroupFilterConfig;
use crate::rl::kl::KlConfig;
use crate::rl::math::ScorePosition;
use crate::rl::reference::SyncConfig;
use crate::rl::settings::{LossConfig, MaskConfig, WhitenAdvantages};
use crate::rl::unsupervised::UnsupervisedConfig;
use crate::run::settings::{EvalConfig, RunConfig};
use crate::tokenizer::Tokenizer;

/// Default number of prompts of an evaluation.
pub(crate) const NUM_EVAL_PROMPTS: usize = 128;

/// Settings of `rlhf ppo`.
///
/// ```no_run
/// use rlhf::settings::PpoConfig;
/// # fn main() -> rlhf::Result<()> {
/// let mut config = PpoConfig::new("runs/sft", "runs/reward", "prompts.jsonl", "runs/ppo");
/// config.learning_rate = 1e-5;
/// config.run.checkpoints.save_steps = Some(10.into());
/// config.check()?;
/// println!("{} updates for 1,000 prompts", config.plan(1_000)?.num_total_batches);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct PpoConfig {
    /// Model to take the tokenizer from: a folder or a hub name [default: the policy].
    #[arg(long, help_heading = MODELS, default_value = NONE, value_parser = optional::<PathBuf>)]
    pub model_name_or_path: std::option::Option<PathBuf>,
    /// Causal language model to train, the policy: a folder or a hub name. A frozen copy of it is the reference model.
    #[arg(long, alias = "model_name", help_heading = MODELS)]
    pub sft_model_path: PathBuf,
    /// Branch, tag or commit of `sft_model_path` on the hub.
    #[arg(long, help_heading = MODELS, default_value = "main")]
    pub model_revision: String,
    /// Reward model, a sequence classifier: a folder or a hub name. If its tokenizer is not the policy's, it reads decoded text.
    #[arg(
        long, aliases = ["reward_model", "reward_model_name_or_path"], help_heading = MODELS, default_value = NONE,
        value_parser = optional::<PathBuf>
    )]
    pub reward_model_path: std::option::Option<PathBuf>,
    /// Label of the reward model to use as the score, by name or number, or a difference such as POSITIVE-NEGATIVE.
    #[arg(long, help_heading = MODELS, default_value = NONE, value_parser = optional::<String>)]
    pub reward_label: std::option::Option<String>,
    /// Model that the value model starts from: a folder or a hub name [default: the reward model, or if its tokenizer is not the
    /// policy's, the policy with a new head].
    #[arg(long, help_heading = MODELS, default_value = NONE, value_parser = optional::<PathBuf>)]
    pub value_model_path: std::option::Option<PathBuf>,
    /// Add a randomly initialized score head to a reward or value model that has none.
    #[arg(long, help_heading = MODELS)]
    pub new_reward_head: bool,

    /// Rewards besides, or instead of, the reward model.
    #[command(flatten)]
    #[serde(flatten)]
    pub rewards: RewardSourcesConfig,

    /// Datasets of prompts.
    #[command(flatten)]
    #[serde(flatten)]
    pub data: DataConfig,
    /// Maximum length of a prompt.
    #[command(flatten)]
    #[serde(flatten)]
    pub prompt_length: PromptLengthConfig,
    /// Put a prompt that is a string into the chat template, as a user message.
    #[arg(long, help_heading = DATA)]
    pub apply_chat_template: bool,
    /// System message of every conversation that has none.
    #[arg(long, help_heading = DATA, default_value = NONE, value_parser = optional::<String>)]
    pub system_prompt: std::option::Option<String>,

    /// Defaults and batch sizes of another trainer. `trl`: TRL's PPOTrainer today. `trl-ppov2`: TRL 0.9 to 0.11, where
    /// `num_mini_batches` multiplies the size of an update. `trl-legacy`: TRL's older trainer with `step()` and a value head on the
    /// policy. `deepspeed-chat`: DeepSpeed-Chat's third step. `grpo` and `rloo`: TRL's GRPOTrainer and RLOOTrainer, without a value
    /// model.
    #[arg(long, help_heading = BATCHES, value_enum, default_value = "trl")]
    pub preset: Preset,
    /// Number of responses per update, apart from the optimizer step's.
    #[command(flatten)]
    #[serde(flatten)]
    pub generation: GenerationBatchesConfig,
    /// Responses per update, over all ranks [default: `per_device_train_batch_size` times `gradient_accumulation_steps` times the
    /// number of ranks].
    #[arg(long, help_heading = BATCHES, default_value = NONE, value_parser = optional::<usize>)]
    pub train_batch_size: std::option::Option<usize>,
    /// Maximum sequences of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with
    /// `train_batch_size`].
    #[arg(long, help_heading = BATCHES, default_value = NONE, value_parser = optional::<usize>)]
    pub per_device_train_batch_size: std::option::Option<usize>,
    /// Micro-batches of each rank per update: an update samples this times `per_device_train_batch_size` responses per rank.
    #[arg(long, help_heading = BATCHES, default_value_t = 1)]
    pub gradient_accumulation_steps: usize,
    /// Mini-batches per PPO epoch, one optimizer step each; must divide the number of responses of an update.
    #[arg(long, help_heading = BATCHES, default_value_t = 1)]
    pub num_mini_batches: usize,
    /// Sequences of a rank per forward pass without gradients.
    #[arg(long, help_heading = BATCHES, default_value_t = 64)]
    pub local_rollout_forward_batch_size: usize,
    /// Number of responses to train on, rounded up to whole updates [default: `num_train_epochs` times the prompts].
    #[arg(
        long, alias = "steps", help_heading = BATCHES, default_value = NONE,
        value_parser = optional::<usize>
    )]
    pub total_episodes: std::option::Option<usize>,
    /// Epochs over the prompts; no effect if `total_episodes` is set.
    #[arg(long, help_heading = BATCHES, default_value_t = 3.0)]
    pub num_train_epochs: f64,
    /// Approximate number of sample tables to show during the run; one more at its end. 0 for none.
    #[arg(long, help_heading = BATCHES, default_value_t = 10)]
    pub num_sample_generations: usize,

    /// Maximum tokens of a response.
    #[arg(long, alias = "max_completion_length", help_heading = SAMPLING, default_value_t = 53)]
    pub response_length: usize,
    /// Truncate responses after this token: `eos` is the tokenizer's, or another one named in `generation_config.json`.
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_name = StopToken::NAME, value_parser = optional::<StopToken>)]
    pub stop_token: std::option::Option<StopToken>,
    /// Truncate responses after the token with this id.
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<i64>)]
    pub stop_token_id: std::option::Option<i64>,
    /// Temperature of sampling and of all log-probabilities.
    #[arg(long, help_heading = SAMPLING, default_value_t = 0.7)]
    pub temperature: f64,
    /// Filters of sampling, and the end of responses.
    #[command(flatten)]
    #[serde(flatten)]
    pub sampling: SamplingConfig,

    /// PPO epochs: passes over the responses of an update.
    #[arg(long, aliases = ["ppo_epochs", "num_iterations"], help_heading = PPO, default_value_t = 4)]
    pub num_ppo_epochs: usize,
    /// Penalty subtracted from the score of a response without a stop token.
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub missing_eos_penalty: std::option::Option<f64>,
    /// Replace the score of a response without a stop token by `penalty_reward_value`.
    #[arg(long, help_heading = PPO)]
    pub non_eos_penalty: bool,
    /// Score of a response without a stop token, with `non_eos_penalty`.
    #[arg(long, help_heading = PPO, default_value_t = -1.0)]
    pub penalty_reward_value: f64,
    /// Position of the score: the one after the stop token, or the response's last token.
    #[arg(long, help_heading = PPO, value_enum, default_value = "after_stop")]
    pub score_position: ScorePosition,
    /// The KL to the reference model.
    #[command(flatten)]
    #[serde(flatten)]
    pub kl: KlConfig,
    /// Scale the rewards of an update to variance 1.
    #[arg(long, help_heading = PPO)]
    pub whiten_rewards: bool,
    /// Whiten the advantages to mean 0 and variance 1, over the tokens of the whole update or of each mini-batch. With the estimators `gae`,
    /// `reinforce` and `reinforce_baseline`; the others have `scale_rewards` and `normalize_advantages`.
    #[arg(long, help_heading = PPO, value_enum, default_value = "batch")]
    pub whiten_advantages: WhitenAdvantages,
    /// The estimator of the advantages, and groups of responses.
    #[command(flatten)]
    #[serde(flatten)]
    pub advantage: AdvantageConfig,
    /// Groups that are sampled anew, and the penalty for long responses.
    #[command(flatten)]
    #[serde(flatten)]
    pub groups: GroupFilterConfig,
    /// Updates of the reference model.
    #[command(flatten)]
    #[serde(flatten)]
    pub sync: SyncConfig,
    /// Discount factor of the rewards.
    #[arg(long, help_heading = PPO, default_value_t = 1.0)]
    pub gamma: f64,
    /// Lambda of generalized advantage estimation (GAE).
    #[arg(long, help_heading = PPO, default_value_t = 0.95)]
    pub lam: f64,
    /// Clip range of the policy loss: the probability ratio is clipped to 1 plus or minus this.
    #[arg(long, alias = "epsilon", help_heading = PPO, default_value_t = 0.2)]
    pub cliprange: f64,
    /// Clip range of the value loss: the new value is clipped to the old one plus or minus this.
    #[arg(long, help_heading = PPO, default_value_t = 0.2)]
    pub cliprange_value: f64,
    /// Coefficient of the value loss.
    #[arg(long, help_heading = PPO, default_value_t = 0.1)]
    pub vf_coef: f64,
    /// Further terms and limits of the policy's loss.
    #[command(flatten)]
    #[serde(flatten)]
    pub loss: LossConfig,
    /// Clip a response's whole score, scores of its tokens included, to plus or minus this when it becomes a reward.
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub clip_reward_value: std::option::Option<f64>,
    /// Clip a response's whole score to between these two numbers, LOW,HIGH.
    #[arg(long, help_heading = PPO, value_delimiter = ',', num_args = 1.., allow_negative_numbers = true)]
    pub reward_clip_range: Vec<f64>,
    /// The responses and tokens that are trained on.
    #[command(flatten)]
    #[serde(flatten)]
    pub mask: MaskConfig,
    /// Language-modelling loss on texts, added to the policy's (PPO-ptx).
    #[command(flatten)]
    #[serde(flatten)]
    pub unsupervised: UnsupervisedConfig,
    /// A moving average of the policy's weights.
    #[command(flatten)]
    #[serde(flatten)]
    pub ema: EmaConfig,
    /// Settings of TRL's trainer with `step()`.
    #[command(flatten)]
    #[serde(flatten)]
    pub legacy: LegacyConfig,
    /// Scaling of the scores.
    #[command(flatten)]
    #[serde(flatten)]
    pub score_scaling: ScoreScalingConfig,

    /// Low-rank adapters (LoRA).
    #[command(flatten)]
    #[serde(flatten)]
    pub peft: PeftConfig,
    /// Differences of the value model's adapters.
    #[command(flatten)]
    #[serde(flatten)]
    pub value_peft: ValuePeftConfig,
    /// Peak learning rate.
    #[arg(long, help_heading = OPTIMIZER, default_value = "3e-6")]
    pub learning_rate: f64,
    /// The optimizer's other settings.
    #[command(flatten)]
    #[serde(flatten)]
    pub optimizer: OptimizerConfig,
    /// Differences of the value model's optimizer.
    #[command(flatten)]
    #[serde(flatten)]
    pub value: ValueConfig,
    /// Sanity checks and alarms.
    #[command(flatten)]
    #[serde(flatten)]
    pub alarms: AlarmConfig,
    /// float16 with two models.
    #[command(flatten)]
    #[serde(flatten)]
    pub half: Fp16Config,
    /// Display and files of the responses that the run trains on.
    #[command(flatten)]
    #[serde(flatten)]
    pub rollout_log: RolloutLogConfig,
    /// A run that ends early, as a test.
    #[command(flatten)]
    #[serde(flatten)]
    pub test_mode: TestModeConfig,
    /// Maximum prompts in an evaluation: the first of the split.
    #[arg(long, help_heading = EVALUATION, default_value_t = NUM_EVAL_PROMPTS)]
    pub num_eval_prompts: usize,
    /// Evaluation during training, and the best model.
    #[command(flatten)]
    #[serde(flatten)]
    pub eval: EvalConfig,
    /// Sharding of each model over several ranks.
    #[command(flatten)]
    #[serde(flatten)]
    pub dist: PpoDistConfig,
    /// Output folder, seed, precision, reports.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunConfig,
}

impl PpoConfig {
    /// Creates a configuration with every default, for these models, prompts and output folder.
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
        let mut config: Self = defaults_with(&preset.settings());
        config.preset = preset;
        config.sft_model_path = sft_model_path.into();
        config.reward_model_path = Some(reward_model_path.into());
        config.data.dataset_name = vec![dataset_name.into()];
        config.run.output_dir = output_dir.into();
        config
    }

    /// Creates a configuration of GRPO with the defaults of TRL's `GRPOTrainer` and no reward: name one in `rewards`, or pass your own to
    /// [`crate::train::ppo::PpoTrainer::from_config_with`].
    pub fn grpo(
        model_name_or_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        let config = Self::with_preset(Preset::Grpo, model_name_or_path, "", dataset_name, output_dir);
        Self { reward_model_path: None, ..config }
    }

    /// Creates a configuration with every default and no reward: name one in `rewards`, or pass your own to
    /// [`crate::train::ppo::PpoTrainer::from_config_with`].
    pub fn without_reward(
        sft_model_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        Self { reward_model_path: None, ..Self::new(sft_model_path, "", dataset_name, output_dir) }
    }

    /// Loads the rewards of `specs`, which are those of this configuration, for responses of the tokenizer `policy`.
    ///
    /// # Errors
    /// If one cannot be loaded.
    pub(crate) fn load_rewards(&self, specs: Vec<Spec>, policy: &Tokenizer, options: ModelOptions) -> Result<Rewards> {
        let new_head = self.new_reward_head.then_some(self.run.seed);
        Rewards::load(specs, &self.rewards, new_head, policy, self.local_rollout_forward_batch_size, options)
    }
}

impl<'a> From<&'a PpoConfig> for RewardSources<'a> {
    fn from(config: &'a PpoConfig) -> Self {
        let (model, label) = (config.reward_model_path.as_deref(), config.reward_label.as_deref());
        Self { model, label, settings: &config.rewards }
    }
}

/// Number of responses per update, where it is not a multiple of the optimizer step's.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct GenerationBatchesConfig {
    /// Prompts of a rank per generation batch. An update samples this times `generation_batches` responses and trains on mini-batches of
    /// `per_device_train_batch_size` times `gradient_accumulation_steps` [default: an update is `num_mini_batches` mini-batches].
    #[arg(long, help_heading = BATCHES, default_value = NONE, value_parser = optional::<usize>)]
    pub per_device_generation_batch_size: std::option::Option<usize>,
    /// Generation batches per update, with `per_device_generation_batch_size`.
    #[arg(long, help_heading = BATCHES, default_value_t = 1)]
    pub generation_batches: usize,
    /// Responses per update over all ranks, with the presets `grpo` and `rloo` [default: those of an optimizer step].
    #[arg(long, help_heading = BATCHES, default_value = NONE, value_parser = optional::<usize>)]
    pub generation_batch_size: std::option::Option<usize>,
    /// Micro-batches of `per_device_train_batch_size` per update, with the presets `grpo` and `rloo` [default:
    /// `gradient_accumulation_steps`].
    #[arg(long, help_heading = BATCHES, default_value = NONE, value_parser = optional::<usize>)]
    pub steps_per_generation: std::option::Option<usize>,
    /// Optimizer steps, rounded up to whole updates, with the presets `grpo` and `rloo` [default: `num_train_epochs` over the prompts].
    #[arg(long, help_heading = BATCHES, default_value = NONE, value_parser = steps_or_minus_one)]
    pub max_steps: std::option::Option<usize>,
}

/// Differences of TRL's trainer with `step()` from the later ones; the preset `trl-legacy` sets the first two.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct LegacyConfig {
    /// Use a value head on the policy's own trunk instead of a value model: one pass and one optimizer for both.
    #[arg(long, help_heading = MODELS)]
    pub value_head: bool,
    /// Compute log-probabilities of the policy's own distribution, without `temperature`.
    #[arg(long, help_heading = SAMPLING)]
    pub raw_logprobs: bool,
    /// Number of lower layers that are frozen and shared with the reference model, so that memory holds them once.
    #[arg(long, help_heading = MODELS, default_value = NONE, value_parser = optional::<usize>)]
    pub num_shared_layers: std::option::Option<usize>,
    /// Responses per update, with the preset `trl-legacy` [default: 128].
    #[arg(long, help_heading = BATCHES, default_value = NONE, value_parser = optional::<usize>)]
    pub batch_size: std::option::Option<usize>,
    /// Responses per mini-batch, with the preset `trl-legacy`; `gradient_accumulation_steps` mini-batches make an optimizer step
    /// [default: `batch_size` divided by `gradient_accumulation_steps`].
    #[arg(long, help_heading = BATCHES, default_value = NONE, value_parser = optional::<usize>)]
    pub mini_batch_size: std::option::Option<usize>,
    /// Stop an update's epochs at `target_kl`, which is 1 then unless it is set.
    #[arg(long, help_heading = PPO)]
    pub early_stopping: bool,
}

/// Differences of the value model's adapters from the policy's; a setting that is not set is the policy's.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct ValuePeftConfig {
    /// Train LoRA adapters of the value model [default: `use_peft`].
    #[arg(long, help_heading = LORA, default_value = NONE, value_parser = optional::<bool>)]
    pub value_use_peft: std::option::Option<bool>,
    /// Rank of the value model's adapters [default: `lora_r`].
    #[arg(long, help_heading = LORA, default_value = NONE, value_parser = optional::<usize>)]
    pub value_lora_r: std::option::Option<usize>,
    /// Linear layers of the value model that get an adapter [default: `lora_target_modules`].
    #[arg(long, help_heading = LORA, value_delimiter = ',', num_args = 1..)]
    pub value_lora_target_modules: Vec<String>,
    /// Modules of the value model that are trained in full [default: `lora_modules_to_save` without the LM head].
    #[arg(long, help_heading = LORA, value_delimiter = ',', num_args = 1..)]
    pub value_lora_modules_to_save: Vec<String>,
}

/// Differences of the value model's optimizer from the policy's; a setting that is not set is the policy's.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct ValueConfig {
    /// Number of updates at the start that train only the value model.
    #[arg(long, help_heading = OPTIMIZER, default_value_t = 0)]
    pub value_warmup_updates: usize,
    /// Peak learning rate of the value model [default: `learning_rate`].
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, value_parser = optional::<f64>)]
    pub value_learning_rate: std::option::Option<f64>,
    /// Learning-rate schedule of the value model [default: `lr_scheduler_type`].
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, value_name = LrSchedulerType::NAME, value_parser = optional::<LrSchedulerType>)]
    pub value_lr_scheduler_type: std::option::Option<LrSchedulerType>,
    /// Warm-up updates of the value model's learning rate [default: those of `warmup_steps` or `warmup_ratio`].
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, value_parser = optional::<usize>)]
    pub value_lr_warmup_steps: std::option::Option<usize>,
    /// Weight decay of the value model [default: `weight_decay`].
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, value_parser = optional::<f64>)]
    pub value_weight_decay: std::option::Option<f64>,
    /// Maximum norm of the value model's gradients; 0 turns clipping off [default: `max_grad_norm`].
    #[arg(long, help_heading = OPTIMIZER, default_value = NONE, value_parser = optional::<f64>)]
    pub value_max_grad_norm: std::option::Option<f64>,
}

impl ValueConfig {
    /// Returns whether any of these settings is set.
    pub(crate) fn differs(&self) -> bool {
        *self != defaults()
    }

    /// Returns the settings that are set, with their values.
    pub(super) fn given(&self) -> Vec<(&'static str, String)> {
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
}

/// Display and files of the responses that a run trains on.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct RolloutLogConfig {
    /// Print and save some of the responses that the run trains on.
    #[arg(long, help_heading = BATCHES)]
    pub print_answers: bool,
    /// Updates between two prints of `print_answers`.
    #[arg(long, help_heading = BATCHES, default_value_t = 1)]
    pub print_answers_interval: usize,
    /// Write all responses of every update to `output_dir/rollouts`, one Parquet file per update: tokens, scores, log-probabilities,
    /// values and advantages.
    #[arg(long, help_heading = RUN)]
    pub log_rollouts: bool,
    /// Number of newest updates whose rollouts are kept, with `log_rollouts` [default: all].
    #[arg(long, help_heading = RUN, default_value = NONE, value_parser = optional::<usize>)]
    pub rollouts_limit: std::option::Option<usize>,
}

/// A run that ends early, as a test: DeepSpeed-Chat's flags.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct TestModeConfig {
    /// Stop after the update `test_stop_step`; learning rates are those of the whole run.
    #[arg(long, help_heading = BATCHES)]
    pub enable_test_mode: bool,
    /// Last update of `enable_test_mode`, counted from 0.
    #[arg(long, help_heading = BATCHES, default_value_t = 0)]
    pub test_stop_step: usize,
}
