//! Settings of `rlhf reward`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::check::check_sizes;
use super::plan::{TrainPlan, batch_size, steps_or_minus_one, train_plan};
use crate::Result;
use crate::data::settings::DataConfig;
use crate::flag::{
    BATCHES, DATA, EVALUATION, LOSS, MODELS, NONE, OPTIMIZER, Setting, all, at_least_one, defaults, expect, optional,
    zero_or_more,
};
use crate::model::{ClassifierFormat, PeftConfig};
use crate::optim::settings::{OptimizerConfig, check_learning};
use crate::run::settings::{EvalConfig, RunConfig};

/// Settings of `rlhf reward`.
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

    /// Datasets of rows.
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

    /// Low-rank adapters (LoRA).
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
    /// Evaluation during training, and the best model.
    #[command(flatten)]
    #[serde(flatten)]
    pub eval: EvalConfig,
    /// Output folder, seed, precision, reports.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunConfig,
}

impl RewardConfig {
    /// Creates a configuration with every default, for this model, these pairs and this output folder.
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

    /// Checks the settings and returns the sizes of the run over `num_pairs` pairs.
    ///
    /// Errors: [`Error::Usage`], naming the setting, its value and what was expected.
    pub fn plan(&self, num_pairs: usize) -> Result<TrainPlan> {
        self.check()?;
        self.plan_for(num_pairs)
    }

    /// Returns the sizes of the run, of settings that are checked already.
    pub(crate) fn plan_for(&self, num_pairs: usize) -> Result<TrainPlan> {
        let batch_size = batch_size(self.per_device_train_batch_size, self.gradient_accumulation_steps)?;
        train_plan(batch_size, self.num_train_epochs, self.max_steps, num_pairs)
    }
}

/// Loss of a pair of texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum PairLoss {
    /// Compares the score at the end of the chosen text with that at the end of the rejected one.
    Sequence,
    /// Compares the scores at every token from the first that differs to the end of the longer text, with the shorter one padded
    /// up to there: DeepSpeed-Chat's loss.
    Tokens,
    /// The same without padding: beyond the end of the shorter text, its last score is used.
    TokensUnpadded,
}
