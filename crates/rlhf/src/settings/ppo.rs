//! Settings of `rlhf ppo`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::presets::Preset;
use crate::Result;
use crate::data::settings::{DataConfig, PromptLengthConfig};
use crate::flag::{
    BATCHES, DATA, EVALUATION, LORA, MODELS, NONE, OPTIMIZER, PPO, SAMPLING, Setting, defaults, defaults_with, optional,
};
use crate::generate::settings::{SamplingConfig, StopToken};
use crate::model::{ModelOptions, PeftConfig};
use crate::optim::loss_scale::Fp16Config;
use crate::optim::settings::{LrSchedulerType, OptimizerConfig};
use crate::reward::{RewardSources, RewardSourcesConfig, Rewards, ScoreScalingConfig, Spec};
use crate::rl::ema::EmaConfig;
use crate::rl::kl::KlConfig;
use crate::rl::math::ScorePosition;
use crate::rl::settings::{LossConfig, MaskConfig, WhitenAdvantages};
use crate::rl::unsupervised::UnsupervisedConfig;
use crate::run::settings::{EvalConfig, RunConfig, WatchConfig};
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

    /// Datasets of prompts.
    #[command(flatten)]
    #[serde(flatten)]
    pub data: DataConfig,
    /// Maximum length of a prompt.
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
    /// Number of responses per update, apart from the optimizer step's.
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
    /// Filters of sampling, and the end of responses.
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
    /// The KL to the reference model.
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
    /// Further terms and limits of the policy's loss.
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
    /// Language-modelling loss on texts, added to the policy's (PPO-ptx).
    #[command(flatten)]
    #[serde(flatten)]
    pub unsupervised: UnsupervisedConfig,
    /// A moving average of the policy.
    #[command(flatten)]
    #[serde(flatten)]
    pub ema: EmaConfig,
    /// Settings of TRL's trainer with `step()`.
    #[command(flatten)]
    #[serde(flatten)]
    pub legacy: LegacyConfig,
    /// Scaling of the scores that are trained on.
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
    /// The rest of the optimizer's settings.
    #[command(flatten)]
    #[serde(flatten)]
    pub optimizer: OptimizerConfig,
    /// Differences of the value model's optimizer.
    #[command(flatten)]
    #[serde(flatten)]
    pub value: ValueConfig,
    /// Checks that the run makes of its own numbers.
    #[command(flatten)]
    #[serde(flatten)]
    pub watch: WatchConfig,
    /// float16 with two models.
    #[command(flatten)]
    #[serde(flatten)]
    pub half: Fp16Config,
    /// Display of responses, and the end of a test.
    #[command(flatten)]
    #[serde(flatten)]
    pub trial: TrialConfig,
    /// Prompts to answer in an evaluation, at most: the first of the split.
    #[arg(long, help_heading = EVALUATION, default_value_t = NUM_EVAL_PROMPTS)]
    pub num_eval_prompts: usize,
    /// Evaluation during training, and the best model.
    #[command(flatten)]
    #[serde(flatten)]
    pub eval: EvalConfig,
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
        let mut config: Self = defaults_with(preset.settings());
        config.preset = preset;
        config.sft_model_path = sft_model_path.into();
        config.reward_model_path = Some(reward_model_path.into());
        config.data.dataset_name = vec![dataset_name.into()];
        config.run.output_dir = output_dir.into();
        config
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
    /// An update answers this times `generation_batches` prompts, and trains on them in steps of
    /// `per_device_train_batch_size` times `gradient_accumulation_steps` [default: an update is `num_mini_batches` steps].
    #[arg(long, help_heading = BATCHES, default_value = NONE, hide_default_value = true, value_parser = optional::<usize>)]
    pub per_device_generation_batch_size: std::option::Option<usize>,
    /// Batches of that size that are answered before they are trained on.
    #[arg(long, help_heading = BATCHES, default_value_t = 1)]
    pub generation_batches: usize,
}

/// Differences of TRL's trainer with `step()` from the later ones; the preset `trl-legacy` sets the first two.
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

/// Differences of the value model's adapters from the policy's; a setting that is not set is the policy's.
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

/// Differences of the value model's optimizer from the policy's; a setting that is not set is the policy's.
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

/// Display of the responses that a run trains on, and its end as a test.
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
