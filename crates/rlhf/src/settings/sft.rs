//! Settings of `rlhf sft`.

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
    BATCHES, DATA, Field, LOGGING, LOSS, MODELS, MOST_ROWS, OPTIMIZER, Settings, all, at_least_one, defaults,
    defaults_with, exclude, refuse, steps_or_minus_one, usage,
};
use rlhf_lm::model::PeftConfig;
use rlhf_lm::optim::settings::{OptimizerConfig, check_learning};

/// Settings of `rlhf sft`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct SftConfig {
    /// Causal language model to start from: a folder or a hub name.
    #[setting(heading = MODELS, short = "model: folder or hub name")]
    pub model_name_or_path: Option<PathBuf>,
    /// Branch, tag or commit of `model_name_or_path` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Start from random weights instead, of the shape in this `config.json`: a file, or the hub name of a model.
    #[setting(heading = MODELS)]
    pub config_name: Option<PathBuf>,
    /// Tokenizer: a folder or a hub name [default: the model's].
    #[setting(heading = MODELS, short = "the policy's tokenizer")]
    pub tokenizer_name: Option<PathBuf>,
    /// File of a chat template to use and to save [default: the tokenizer's].
    #[setting(heading = MODELS)]
    pub chat_template_path: Option<PathBuf>,
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
    /// Column with a text to train on as a whole.
    #[setting(heading = DATA, default = "text")]
    pub dataset_text_field: String,
    /// Maximum tokens of a row, which is truncated at its end; none: those of the model.
    #[setting(heading = DATA, default = "1024", short = "maximum tokens of a row")]
    pub max_length: Option<usize>,
    /// Pack whole rows into blocks of `max_length` tokens; batch sizes count blocks.
    #[setting(heading = DATA, default = false)]
    pub packing: bool,

    /// Defaults of another system. `trl`: those of this program, with the batch sizes of TRL. `deepspeed-chat`: DeepSpeed-Chat's first
    /// step, whose flags are accepted too.
    #[setting(heading = BATCHES, choices = Preset::of_all_steps(), default = "trl")]
    pub preset: Preset,
    /// Rows per optimizer step, over all ranks [default: `per_device_train_batch_size` times `gradient_accumulation_steps` times the
    /// number of ranks].
    #[setting(heading = BATCHES, resume = Sizes, replay = Changes, most = MOST_ROWS)]
    pub train_batch_size: Option<usize>,
    /// Maximum rows of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with
    /// `train_batch_size`].
    #[setting(heading = BATCHES, resume = Sizes, replay = Changes, most = MOST_ROWS, short = "sequences per micro-batch")]
    pub per_device_train_batch_size: Option<usize>,
    /// Rows per forward pass in an evaluation.
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

    /// In rows with a prompt and a completion, train on the completion only.
    #[setting(heading = LOSS, default = true)]
    pub completion_only_loss: bool,
    /// In conversations, train on the assistant's messages only.
    #[setting(heading = LOSS, default = false)]
    pub assistant_only_loss: bool,

    /// Low-rank adapters (LoRA).
    #[setting(flatten)]
    #[serde(flatten)]
    pub peft: PeftConfig,
    /// Peak learning rate.
    #[setting(heading = OPTIMIZER, default = "2e-5", replay = Changes, short = "peak learning rate")]
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

impl RunSettings for SftConfig {
    fn described(&self) -> Vec<Field> {
        Self::fields()
    }
}

impl SftConfig {
    /// Creates a configuration with every default, which starts from the model in the folder `model_name_or_path`.
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
        let mut config: Self = defaults_with(&preset.sft_settings());
        config.preset = preset;
        config.model_name_or_path = Some(model_name_or_path.into());
        config.data.dataset_name = vec![dataset_name.into()];
        config.run.output_dir = output_dir.into();
        config
    }

    /// Creates a configuration with every default, which starts from random weights shaped by the `config.json` file
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
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        let start = match (&self.model_name_or_path, &self.config_name, &self.tokenizer_name) {
            (None, None, _) => usage("set model_name_or_path, or config_name to start from random weights"),
            (Some(model), Some(config), _) => exclude(
                name_of!(self.model_name_or_path),
                name_of!(self.config_name),
                format!(
                    " = {} and config_name = {} exclude each other: set one of them",
                    model.display(),
                    config.display()
                ),
            ),
            (None, Some(config), None) => refuse(
                name_of!(self.config_name),
                format!(" = {} needs tokenizer_name: a configuration brings no tokenizer", config.display()),
            ),
            _ => Ok(()),
        };
        all([
            start,
            self.data.check(self.eval_dataset_name.as_deref()),
            self.max_length.map_or(Ok(()), |most| at_least_one(name_of!(self.max_length), most)),
            at_least_one(name_of!(self.per_device_eval_batch_size), self.per_device_eval_batch_size),
            at_least_one(name_of!(self.logging_steps), self.logging_steps),
            self.peft.check(),
            self.run.quantization.check_trained(self.peft.use_peft),
            self.run.quantization.check(),
            check_learning(self.learning_rate, &self.optimizer, None),
            self.optimizer.check_held(&[self.run.dist.zero_stage], self.run.bf16, self.peft.use_peft),
            self.run.check_save_dtype(self.peft.use_peft),
            self.run.check(&[self.run.dist.zero_stage], &self.eval),
            self.run.offload.check_models("in sft, which has no frozen model"),
            self.eval.check(self.run.checkpoints.save_steps, &["eval_loss"]),
            self.plan_for(1).map(drop),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::tests::usage_of;

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
}
