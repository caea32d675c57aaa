//! Settings of `rlhf reward`.

use std::path::PathBuf;

use serde::Serialize;

use super::Preset;
use super::check::check_sizes;
use crate::data::settings::DataConfig;
use crate::run::checkpoint::RunSettings;
use crate::run::settings::{EvalConfig, RunConfig};
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{
    BATCHES, Choices, DATA, EVALUATION, Field, LOGGING, LOSS, MODELS, MOST_ROWS, OPTIMIZER, Settings, all,
    at_least_one, defaults_with, expect, steps_or_minus_one, zero_or_more,
};
use rlhf_lm::model::{ClassifierFormat, PeftConfig};
use rlhf_lm::optim::settings::{OptimizerConfig, check_learning};

/// Settings of `rlhf reward`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct RewardConfig {
    /// Model to start from: a sequence classifier with one label, or a language model that gets a score head; a folder or a hub
    /// name.
    #[setting(heading = MODELS, short = "model: folder or hub name")]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Add a randomly initialized score head to a model that has none.
    #[setting(heading = MODELS, short = "add a score head if there is none")]
    pub new_reward_head: bool,
    /// Names of the saved tensors: transformers' (`score.weight`) or deepspeed-chat's (`v_head.weight`) [default: those of the
    /// model's folder].
    #[setting(heading = MODELS)]
    pub reward_format: Option<ClassifierFormat>,
    /// The token that ends a text, in the model and the tokenizer that are saved too, such as <|im_end|> of a chat template [default: the
    /// tokenizer's].
    #[setting(heading = MODELS)]
    pub eos_token: Option<String>,

    /// Datasets of rows.
    #[setting(flatten)]
    #[serde(flatten)]
    pub data: DataConfig,
    /// Separate dataset for evaluation: a file, a folder or a hub name.
    #[setting(heading = DATA)]
    pub eval_dataset_name: Option<PathBuf>,
    /// With `pair_loss = tokens`, number of padding tokens in a text before the one that ends it [default: those at its start].
    #[setting(heading = DATA)]
    pub num_padding_at_beginning: Option<usize>,
    /// Maximum tokens of a row; none: those of the model. Pairs with a longer side are dropped, with a warning of their number.
    #[setting(heading = DATA, default = "1024", short = "maximum tokens of a row")]
    pub max_length: Option<usize>,

    /// Defaults of another system. `trl`: those of this program, with the batch sizes of TRL. `deepspeed-chat`: DeepSpeed-Chat's second
    /// step, whose flags are accepted too.
    #[setting(heading = BATCHES, choices = Preset::of_all_steps(), default = "trl")]
    pub preset: Preset,
    /// Pairs per optimizer step, over all ranks [default: `per_device_train_batch_size` times `gradient_accumulation_steps` times the
    /// number of ranks].
    #[setting(heading = BATCHES, resume = Sizes, replay = Changes, most = MOST_ROWS)]
    pub train_batch_size: Option<usize>,
    /// Maximum pairs of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with
    /// `train_batch_size`].
    #[setting(heading = BATCHES, resume = Sizes, replay = Changes, most = MOST_ROWS, short = "sequences per micro-batch")]
    pub per_device_train_batch_size: Option<usize>,
    /// Pairs per forward pass in an evaluation.
    #[setting(heading = BATCHES, default = 8, resume = Rounding, most = MOST_ROWS)]
    pub per_device_eval_batch_size: usize,
    /// Micro-batches of each rank per optimizer step.
    #[setting(heading = BATCHES, default = 1, resume = Sizes, replay = Changes, most = MOST_ROWS, short = "micro-batches per update")]
    pub gradient_accumulation_steps: usize,
    /// Epochs over the dataset; no effect if `max_steps` is set.
    #[setting(heading = BATCHES, default = 3.0, resume = Length, short = "passes over the dataset")]
    pub num_train_epochs: f64,
    /// Number of optimizer steps.
    #[setting(heading = BATCHES, parse = steps_or_minus_one, resume = Length, short = "optimizer steps [by epochs]")]
    pub max_steps: Option<usize>,
    /// Optimizer steps between two logged lines of metrics.
    #[setting(heading = LOGGING, default = 10)]
    pub logging_steps: usize,

    /// Scores of a pair to compare: those of the two texts, or, as in DeepSpeed-Chat, those at every token from the first
    /// difference on, with or without padding.
    #[setting(heading = LOSS, default = "sequence")]
    pub pair_loss: PairLoss,
    /// Coefficient of an auxiliary loss that centers the scores of each pair on 0.
    #[setting(heading = LOSS)]
    pub center_rewards_coefficient: Option<f64>,

    /// Low-rank adapters (LoRA).
    #[setting(flatten)]
    #[serde(flatten)]
    pub peft: PeftConfig,
    /// Peak learning rate.
    #[setting(heading = OPTIMIZER, default = "1e-4", replay = Changes, short = "peak learning rate")]
    pub learning_rate: f64,
    /// The optimizer's other settings.
    #[setting(flatten)]
    #[serde(flatten)]
    pub optimizer: OptimizerConfig,
    /// Only evaluate: print loss, accuracy and margin on the held-out rows, or else on all rows, as JSON to standard output. Needs
    /// no `output_dir` and writes no file.
    #[setting(heading = EVALUATION)]
    pub eval_only: bool,
    /// Evaluation during training, and the best model.
    #[setting(flatten)]
    #[serde(flatten)]
    pub eval: EvalConfig,
    /// Output folder, seed, precision, reports.
    #[setting(flatten)]
    #[serde(flatten)]
    pub run: RunConfig,
}

impl RunSettings for RewardConfig {
    fn described(&self) -> Vec<Field> {
        Self::fields()
    }
}

impl RewardConfig {
    /// Creates a configuration with every default, for this model, these pairs and this output folder.
    pub fn new(
        model_name_or_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        Self::with_preset(Preset::Trl, model_name_or_path, dataset_name, output_dir)
    }

    /// As [`Self::new`], with the defaults of `preset`.
    pub fn with_preset(
        preset: Preset,
        model_name_or_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        let mut config: Self = defaults_with(&preset.reward_settings());
        config.preset = preset;
        config.model_name_or_path = model_name_or_path.into();
        config.data.dataset_name = vec![dataset_name.into()];
        config.run.output_dir = output_dir.into();
        config
    }

    /// Checks every setting that needs no dataset to be checked.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        all([
            self.data.check(self.eval_dataset_name.as_deref()),
            expect(
                self.eval_only || !self.run.output_dir.as_os_str().is_empty(),
                name_of!(self.run.output_dir),
                "\"\"",
                "a folder, as only eval_only = true needs none",
            ),
            self.max_length.map_or(Ok(()), |most| at_least_one(name_of!(self.max_length), most)),
            at_least_one(name_of!(self.per_device_eval_batch_size), self.per_device_eval_batch_size),
            at_least_one(name_of!(self.logging_steps), self.logging_steps),
            self.center_rewards_coefficient
                .map_or(Ok(()), |weight| zero_or_more(name_of!(self.center_rewards_coefficient), weight)),
            self.peft.check(),
            self.run.quantization.check_trained(self.peft.use_peft || self.eval_only),
            self.run.quantization.check(),
            check_learning(self.learning_rate, &self.optimizer, None),
            self.optimizer.check_held(&[self.run.dist.zero_stage], self.run.bf16, self.peft.use_peft),
            self.run.check_save_dtype(self.peft.use_peft),
            self.run.check(&[self.run.dist.zero_stage], &self.eval),
            self.run.offload.check_models("in reward training, which has no frozen model"),
            self.eval.check(
                self.run.checkpoints.save_steps,
                &["eval_loss", "eval_accuracy", "eval_margin", "eval_mean_reward"],
            ),
            self.plan_for(1).map(drop),
        ])
    }
}

/// Loss of a pair of texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum PairLoss {
    /// Compares the score at the end of the chosen text with that at the end of the rejected one.
    Sequence,
    /// Compares the scores at every token from the first that differs to the end of the longer text, with the shorter one padded
    /// up to there: DeepSpeed-Chat's loss.
    Tokens,
    /// The same without padding: beyond the end of the shorter text, its last score is used.
    TokensUnpadded,
}
