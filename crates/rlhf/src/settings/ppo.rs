//! Settings of `rlhf ppo`.

use std::path::PathBuf;

use serde::Serialize;

use super::presets::Preset;
use crate::data::settings::{DataConfig, PromptLengthConfig};
use crate::environment::EnvironmentConfig;
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
use crate::run::checkpoint::RunSettings;
use crate::run::settings::{EvalConfig, RunConfig};
use rlhf_base::Result;
use rlhf_base::dist::PpoDistConfig;
use rlhf_base::name_of;
use rlhf_base::schema::{
    ADVANTAGES, ANY_ID, BATCHES, CRITIC, DATA, EVALUATION, Field, LOGGING, LOSS, MODELS, MOST_EPISODES, MOST_ROWS,
    MOST_TOKENS, OPTIMIZER, REWARDS, SAMPLING, SPEED, Settings, defaults, defaults_with, steps_or_minus_one,
};
use rlhf_lm::generate::settings::{SamplingConfig, StopToken};
use rlhf_lm::model::{MOST_RANK, ModelOptions, PeftConfig};
use rlhf_lm::optim::loss_scale::Fp16Config;
use rlhf_lm::optim::settings::{LrSchedulerType, OptimizerConfig};
use rlhf_lm::tokenizer::Tokenizer;

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
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct PpoConfig {
    /// Model to take the tokenizer from: a folder or a hub name [default: the policy].
    #[setting(heading = MODELS, short = "model: folder or hub name")]
    pub model_name_or_path: Option<PathBuf>,
    /// Causal language model to train, the policy: a folder or a hub name. A frozen copy of it is the reference model.
    #[setting(alias = "model_name", heading = MODELS, short = "model to train")]
    pub sft_model_path: PathBuf,
    /// Branch, tag or commit of `sft_model_path` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Reward model, a sequence classifier: a folder or a hub name. If its tokenizer is not the policy's, it reads decoded text.
    #[setting(aliases = ["reward_model", "reward_model_name_or_path"], heading = REWARDS, replay = Scores, short = "reward model, a sequence classifier")]
    pub reward_model_path: Option<PathBuf>,
    /// Label of the reward model to use as the score, by name or number, or a difference such as POSITIVE-NEGATIVE.
    #[setting(heading = REWARDS, replay = Scores)]
    pub reward_label: Option<String>,
    /// Model that the value model starts from: a folder or a hub name [default: the reward model, or if its tokenizer is not the
    /// policy's, the policy with a new head].
    #[setting(heading = CRITIC)]
    pub value_model_path: Option<PathBuf>,
    /// Add a randomly initialized score head to a reward or value model that has none.
    #[setting(heading = MODELS, short = "add a score head if there is none")]
    pub new_reward_head: bool,

    /// Rewards besides, or instead of, the reward model.
    #[setting(flatten)]
    #[serde(flatten)]
    pub rewards: RewardSourcesConfig,

    /// Tools that the policy calls, and environments that it acts in.
    #[setting(flatten)]
    #[serde(flatten)]
    pub environment: EnvironmentConfig,

    /// Datasets of prompts.
    #[setting(flatten)]
    #[serde(flatten)]
    pub data: DataConfig,
    /// Separate dataset of prompts for evaluation: a file, a folder or a hub name.
    #[setting(heading = DATA)]
    pub eval_dataset_name: Option<PathBuf>,
    /// Maximum length of a prompt.
    #[setting(flatten)]
    #[serde(flatten)]
    pub prompt_length: PromptLengthConfig,
    /// Put a prompt that is a string into the chat template, as a user message.
    #[setting(heading = DATA, short = "put text prompts into the chat template")]
    pub apply_chat_template: bool,
    /// System message of every conversation that has none.
    #[setting(heading = DATA)]
    pub system_prompt: Option<String>,

    /// Defaults and batch sizes of another trainer. `trl`: TRL's PPOTrainer today. `trl-ppov2`: TRL 0.9 to 0.11, where
    /// `num_mini_batches` multiplies the size of an update. `trl-legacy`: TRL's older trainer with `step()` and a value head on the
    /// policy. `deepspeed-chat`: DeepSpeed-Chat's third step. `grpo` and `rloo`: TRL's GRPOTrainer and RLOOTrainer, without a value
    /// model.
    #[setting(heading = BATCHES, default = "trl")]
    pub preset: Preset,
    /// Number of responses per update, apart from the optimizer step's.
    #[setting(flatten)]
    #[serde(flatten)]
    pub generation: GenerationBatchesConfig,
    /// Responses per update, over all ranks [default: `per_device_train_batch_size` times `gradient_accumulation_steps` times the
    /// number of ranks].
    #[setting(heading = BATCHES, resume = Sizes, replay = Changes, most = MOST_ROWS)]
    pub train_batch_size: Option<usize>,
    /// Maximum sequences of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with
    /// `train_batch_size`].
    #[setting(heading = BATCHES, resume = Sizes, replay = Changes, most = MOST_ROWS, short = "sequences per micro-batch")]
    pub per_device_train_batch_size: Option<usize>,
    /// Micro-batches of each rank per update: an update samples this times `per_device_train_batch_size` responses per rank.
    #[setting(heading = BATCHES, default = 1, resume = Sizes, replay = Changes, most = MOST_ROWS, short = "micro-batches per update")]
    pub gradient_accumulation_steps: usize,
    /// Mini-batches per PPO epoch, one optimizer step each; must divide the number of responses of an update.
    #[setting(heading = BATCHES, default = 1, resume = Sizes, replay = Changes, most = MOST_ROWS)]
    pub num_mini_batches: usize,
    /// Sequences of a rank per forward pass without gradients.
    #[setting(heading = SPEED, default = 64, resume = Rounding, replay = Changes, most = MOST_ROWS)]
    pub local_rollout_forward_batch_size: usize,
    /// Number of responses to train on, rounded up to whole updates [default: `num_train_epochs` times the prompts].
    #[setting(alias = "steps", heading = BATCHES, resume = Length, most = MOST_EPISODES, short = "responses to train on")]
    pub total_episodes: Option<usize>,
    /// Epochs over the prompts; no effect if `total_episodes` is set.
    #[setting(heading = BATCHES, default = 3.0, resume = Length, short = "passes over the dataset")]
    pub num_train_epochs: f64,
    /// Approximate number of sample tables to show during the run; one more at its end. 0 for none.
    #[setting(heading = LOGGING, default = 10, resume = Free)]
    pub num_sample_generations: usize,

    /// Maximum tokens of a response.
    #[setting(alias = "max_completion_length", heading = SAMPLING, default = 53, replay = Sampling, most = MOST_TOKENS, short = "maximum tokens of a response")]
    pub response_length: usize,
    /// Truncate responses after this token: `eos` is the tokenizer's, or another one named in `generation_config.json`.
    #[setting(heading = SAMPLING, replay = Sampling, short = "eos: cut responses after eos")]
    pub stop_token: Option<StopToken>,
    /// Truncate responses after the token with this id.
    #[setting(heading = SAMPLING, replay = Sampling, most = ANY_ID)]
    pub stop_token_id: Option<i64>,
    /// Temperature of sampling and of all log-probabilities.
    #[setting(heading = SAMPLING, default = 0.7, replay = Sampling, short = "sampling temperature")]
    pub temperature: f64,
    /// Filters of sampling, and the end of responses.
    #[setting(flatten)]
    #[serde(flatten)]
    pub sampling: SamplingConfig,

    /// PPO epochs: passes over the responses of an update.
    #[setting(aliases = ["ppo_epochs", "num_iterations"], heading = BATCHES, default = 4, replay = Changes, most = 10_000)]
    pub num_ppo_epochs: usize,
    /// Penalty subtracted from the score of a response without a stop token.
    #[setting(heading = REWARDS, replay = Changes, short = "score penalty without a stop token")]
    pub missing_eos_penalty: Option<f64>,
    /// Replace the score of a response without a stop token by `penalty_reward_value`.
    #[setting(heading = REWARDS, replay = Changes)]
    pub non_eos_penalty: bool,
    /// Score of a response without a stop token, with `non_eos_penalty`.
    #[setting(heading = REWARDS, default = -1.0, replay = Changes)]
    pub penalty_reward_value: f64,
    /// Position of the score: the one after the stop token, or the response's last token.
    #[setting(heading = REWARDS, default = "after_stop", replay = Changes)]
    pub score_position: ScorePosition,
    /// The KL to the reference model.
    #[setting(flatten)]
    #[serde(flatten)]
    pub kl: KlConfig,
    /// Scale the rewards of an update to variance 1.
    #[setting(heading = REWARDS, replay = Changes)]
    pub whiten_rewards: bool,
    /// Whiten the advantages to mean 0 and variance 1, over the tokens of the whole update or of each mini-batch. With the estimators
    /// `gae`,
    /// `reinforce` and `reinforce_baseline`; the others have `scale_rewards` and `normalize_advantages`.
    #[setting(heading = ADVANTAGES, default = "batch", replay = Changes)]
    pub whiten_advantages: WhitenAdvantages,
    /// The estimator of the advantages, and groups of responses.
    #[setting(flatten)]
    #[serde(flatten)]
    pub advantage: AdvantageConfig,
    /// Groups that are sampled anew, and the penalty for long responses.
    #[setting(flatten)]
    #[serde(flatten)]
    pub groups: GroupFilterConfig,
    /// Updates of the reference model.
    #[setting(flatten)]
    #[serde(flatten)]
    pub sync: SyncConfig,
    /// Discount factor of the rewards.
    #[setting(heading = ADVANTAGES, default = 1.0, replay = Changes)]
    pub gamma: f64,
    /// Lambda of generalized advantage estimation (GAE).
    #[setting(heading = ADVANTAGES, default = 0.95, replay = Changes)]
    pub lam: f64,
    /// Clip range of the policy loss: the probability ratio is clipped to 1 plus or minus this.
    #[setting(alias = "epsilon", heading = LOSS, default = 0.2, replay = Changes)]
    pub cliprange: f64,
    /// Clip range of the value loss: the new value is clipped to the old one plus or minus this.
    #[setting(heading = CRITIC, default = 0.2, replay = Changes)]
    pub cliprange_value: f64,
    /// Coefficient of the value loss.
    #[setting(heading = CRITIC, default = 0.1, replay = Changes)]
    pub vf_coef: f64,
    /// Further terms and limits of the policy's loss.
    #[setting(flatten)]
    #[serde(flatten)]
    pub loss: LossConfig,
    /// Clip a response's whole score, scores of its tokens included, to plus or minus this when it becomes a reward.
    #[setting(heading = REWARDS, replay = Changes)]
    pub clip_reward_value: Option<f64>,
    /// Clip a response's whole score to between these two numbers, LOW,HIGH.
    #[setting(heading = REWARDS, delimiter = ',', several, replay = Changes)]
    pub reward_clip_range: Vec<f64>,
    /// The responses and tokens that are trained on.
    #[setting(flatten)]
    #[serde(flatten)]
    pub mask: MaskConfig,
    /// Language-modelling loss on texts, added to the policy's (PPO-ptx).
    #[setting(flatten)]
    #[serde(flatten)]
    pub unsupervised: UnsupervisedConfig,
    /// A moving average of the policy's weights.
    #[setting(flatten)]
    #[serde(flatten)]
    pub ema: EmaConfig,
    /// Settings of TRL's trainer with `step()`.
    #[setting(flatten)]
    #[serde(flatten)]
    pub legacy: LegacyConfig,
    /// Scaling of the scores.
    #[setting(flatten)]
    #[serde(flatten)]
    pub score_scaling: ScoreScalingConfig,

    /// Low-rank adapters (LoRA).
    #[setting(flatten)]
    #[serde(flatten)]
    pub peft: PeftConfig,
    /// Differences of the value model's adapters.
    #[setting(flatten)]
    #[serde(flatten)]
    pub value_peft: ValuePeftConfig,
    /// Peak learning rate.
    #[setting(heading = OPTIMIZER, default = "3e-6", replay = Changes, short = "peak learning rate")]
    pub learning_rate: f64,
    /// The optimizer's other settings.
    #[setting(flatten)]
    #[serde(flatten)]
    pub optimizer: OptimizerConfig,
    /// Differences of the value model's optimizer.
    #[setting(flatten)]
    #[serde(flatten)]
    pub value: ValueConfig,
    /// Sanity checks and alarms.
    #[setting(flatten)]
    #[serde(flatten)]
    pub alarms: AlarmConfig,
    /// float16 with two models.
    #[setting(flatten)]
    #[serde(flatten)]
    pub half: Fp16Config,
    /// Display and files of the responses that the run trains on.
    #[setting(flatten)]
    #[serde(flatten)]
    pub rollout_log: RolloutLogConfig,
    /// A run that ends early, as a test.
    #[setting(flatten)]
    #[serde(flatten)]
    pub test_mode: TestModeConfig,
    /// Maximum prompts in an evaluation: the first of the split.
    #[setting(heading = EVALUATION, default = NUM_EVAL_PROMPTS, resume = Free)]
    pub num_eval_prompts: usize,
    /// Evaluation during training, and the best model.
    #[setting(flatten)]
    #[serde(flatten)]
    pub eval: EvalConfig,
    /// Sharding of each model over several ranks.
    #[setting(flatten)]
    #[serde(flatten)]
    pub dist: PpoDistConfig,
    /// Output folder, seed, precision, reports.
    #[setting(flatten)]
    #[serde(flatten)]
    pub run: RunConfig,
}

impl RunSettings for PpoConfig {
    fn described(&self) -> Vec<Field> {
        Self::fields()
    }
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

    /// Loads this configuration's rewards, which are `specs`, for responses of the tokenizer `policy`.
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
        Self {
            model: config.reward_model_path.as_deref(),
            revision: None,
            label: config.reward_label.as_deref(),
            settings: &config.rewards,
        }
    }
}

/// Number of responses per update, where it is not a multiple of the optimizer step's.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct GenerationBatchesConfig {
    /// Prompts of a rank per generation batch. An update samples this times `generation_batches` responses and trains on mini-batches of
    /// `per_device_train_batch_size` times `gradient_accumulation_steps` [default: an update is `num_mini_batches` mini-batches].
    #[setting(heading = BATCHES, resume = Sizes, replay = Sampling, most = MOST_ROWS)]
    pub per_device_generation_batch_size: Option<usize>,
    /// Generation batches per update, with `per_device_generation_batch_size`.
    #[setting(heading = BATCHES, default = 1, resume = Sizes, replay = Sampling, most = MOST_ROWS)]
    pub generation_batches: usize,
    /// Responses per update over all ranks, with the presets `grpo` and `rloo` [default: those of an optimizer step].
    #[setting(heading = BATCHES, resume = Sizes, replay = Sampling, most = MOST_ROWS)]
    pub generation_batch_size: Option<usize>,
    /// Micro-batches of `per_device_train_batch_size` per update, with the presets `grpo` and `rloo` [default:
    /// `gradient_accumulation_steps`].
    #[setting(heading = BATCHES, resume = Sizes, replay = Sampling, most = MOST_ROWS)]
    pub steps_per_generation: Option<usize>,
    /// Optimizer steps, rounded up to whole updates, with the presets `grpo` and `rloo` [default: `num_train_epochs` over the prompts].
    #[setting(heading = BATCHES, parse = steps_or_minus_one, resume = Length, short = "optimizer steps [by epochs]")]
    pub max_steps: Option<usize>,
}

/// Differences of TRL's trainer with `step()` from the later ones; the preset `trl-legacy` sets the first two.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct LegacyConfig {
    /// Use a value head on the policy's own trunk instead of a value model: one pass and one optimizer for both.
    #[setting(heading = CRITIC)]
    pub value_head: bool,
    /// Compute log-probabilities of the policy's own distribution, without `temperature`.
    #[setting(heading = SAMPLING, replay = Sampling)]
    pub raw_logprobs: bool,
    /// Number of lower layers that are frozen and shared with the reference model, so that memory holds them once.
    #[setting(heading = MODELS)]
    pub num_shared_layers: Option<usize>,
    /// Responses per update, with the preset `trl-legacy` [default: 128].
    #[setting(heading = BATCHES, resume = Sizes, replay = Changes, most = MOST_ROWS, short = "sequences per forward pass")]
    pub batch_size: Option<usize>,
    /// Responses per mini-batch, with the preset `trl-legacy`; `gradient_accumulation_steps` mini-batches make an optimizer step
    /// [default: `batch_size` divided by `gradient_accumulation_steps`].
    #[setting(heading = BATCHES, resume = Sizes, replay = Changes, most = MOST_ROWS)]
    pub mini_batch_size: Option<usize>,
    /// Stop an update's epochs at `target_kl`, which is 1 then unless it is set.
    #[setting(heading = LOSS, replay = Changes)]
    pub early_stopping: bool,
}

/// Differences of the value model's adapters from the policy's; a setting that is not set is the policy's.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ValuePeftConfig {
    /// Train LoRA adapters of the value model [default: `use_peft`].
    #[setting(heading = CRITIC)]
    pub value_use_peft: Option<bool>,
    /// Rank of the value model's adapters [default: `lora_r`].
    #[setting(heading = CRITIC, most = MOST_RANK)]
    pub value_lora_r: Option<usize>,
    /// Linear layers of the value model that get an adapter [default: `lora_target_modules`].
    #[setting(heading = CRITIC, delimiter = ',', several)]
    pub value_lora_target_modules: Vec<String>,
    /// Modules of the value model that are trained in full [default: `lora_modules_to_save` without the LM head].
    #[setting(heading = CRITIC, delimiter = ',', several)]
    pub value_lora_modules_to_save: Vec<String>,
}

/// Differences of the value model's optimizer from the policy's; a setting that is not set is the policy's.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ValueConfig {
    /// Number of updates at the start that train only the value model.
    #[setting(heading = CRITIC, default = 0, replay = Changes)]
    pub value_warmup_updates: usize,
    /// Peak learning rate of the value model [default: `learning_rate`].
    #[setting(heading = CRITIC, replay = Changes)]
    pub value_learning_rate: Option<f64>,
    /// Learning-rate schedule of the value model [default: `lr_scheduler_type`].
    #[setting(heading = CRITIC, replay = Changes)]
    pub value_lr_scheduler_type: Option<LrSchedulerType>,
    /// Warm-up updates of the value model's learning rate [default: those of `warmup_steps` or `warmup_ratio`].
    #[setting(heading = CRITIC, replay = Changes)]
    pub value_lr_warmup_steps: Option<usize>,
    /// Weight decay of the value model [default: `weight_decay`].
    #[setting(heading = CRITIC, replay = Changes)]
    pub value_weight_decay: Option<f64>,
    /// Maximum norm of the value model's gradients; 0 turns clipping off [default: `max_grad_norm`].
    #[setting(heading = CRITIC, replay = Changes)]
    pub value_max_grad_norm: Option<f64>,
}

impl ValueConfig {
    /// Returns whether any of these settings is set.
    pub(crate) fn differs(&self) -> bool {
        *self != defaults()
    }

    /// Returns the settings that are set, with their values.
    pub(super) fn set_fields(&self) -> Vec<(&'static str, String)> {
        let number = |name, value: Option<f64>| value.map(|value| (name, value.to_string()));
        let updates = self.value_warmup_updates;
        let all = [
            (updates > 0).then(|| (name_of!(self.value_warmup_updates), updates.to_string())),
            number(name_of!(self.value_learning_rate), self.value_learning_rate),
            self.value_lr_scheduler_type
                .map(|schedule| (name_of!(self.value_lr_scheduler_type), schedule.name().into())),
            self.value_lr_warmup_steps.map(|steps| (name_of!(self.value_lr_warmup_steps), steps.to_string())),
            number(name_of!(self.value_weight_decay), self.value_weight_decay),
            number(name_of!(self.value_max_grad_norm), self.value_max_grad_norm),
        ];
        all.into_iter().flatten().collect()
    }
}

/// Display and files of the responses that a run trains on.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct RolloutLogConfig {
    /// Print and save some of the responses that the run trains on.
    #[setting(heading = LOGGING, resume = Free)]
    pub print_answers: bool,
    /// Updates between two prints of `print_answers`.
    #[setting(heading = LOGGING, default = 1, resume = Free)]
    pub print_answers_interval: usize,
    /// Write all responses of every update to `output_dir/rollouts`, one Parquet file per update: tokens, scores, log-probabilities,
    /// values and advantages.
    #[setting(heading = LOGGING, resume = Free)]
    pub log_rollouts: bool,
    /// Number of newest updates whose rollouts are kept, with `log_rollouts` [default: all].
    #[setting(heading = LOGGING, resume = Free)]
    pub rollouts_limit: Option<usize>,
}

/// A run that ends early, as a test: DeepSpeed-Chat's flags.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct TestModeConfig {
    /// Stop after the update `test_stop_step`; learning rates are those of the whole run.
    #[setting(heading = BATCHES, resume = Free)]
    pub enable_test_mode: bool,
    /// Last update of `enable_test_mode`, counted from 0.
    #[setting(heading = BATCHES, default = 0, resume = Free)]
    pub test_stop_step: usize,
}
