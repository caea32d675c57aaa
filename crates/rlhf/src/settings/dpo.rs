//! Settings of `rlhf dpo`.

use std::path::PathBuf;

use serde::Serialize;

use super::check::check_sizes;
use crate::data::settings::DataConfig;
use crate::rl::reference::SyncConfig;
use crate::rl::unsupervised::UnsupervisedConfig;
use crate::run::checkpoint::RunSettings;
use crate::run::settings::{EvalConfig, RunConfig};
use rlhf_base::Result;
use rlhf_base::dist::num_ranks;
use rlhf_base::name_of;
use rlhf_base::schema::{
    BATCHES, Choices, DATA, Field, KL, LOGGING, LOSS, MODELS, MOST_ROWS, OPTIMIZER, Refusals, Settings, above_zero,
    all, at_least_one, defaults, defaults_with, expect, no_effect, refuse, steps_or_minus_one, zero_to_one,
};
use rlhf_lm::model::PeftConfig;
use rlhf_lm::optim::settings::{OptimizerConfig, check_learning};

/// Settings of groups that have another default in this command: clipping as TRL has it, and texts that weigh as much as the pairs, where
/// PPO has the coefficient of InstructGPT.
const OWN_DEFAULTS: [(&str, &str); 2] = [("max_grad_norm", "1"), ("unsup_coef", "1")];

/// Metrics of an evaluation, by TRL's names, in the order of `train::dpo::totals::Totals`; those of training are the same without `eval_`.
pub(crate) const EVAL_METRICS: [&str; 11] = [
    "eval_loss",
    "eval_rewards/chosen",
    "eval_rewards/rejected",
    "eval_rewards/accuracies",
    "eval_rewards/margins",
    "eval_logps/chosen",
    "eval_logps/rejected",
    "eval_logits/chosen",
    "eval_logits/rejected",
    "eval_entropy",
    "eval_mean_token_accuracy",
];

/// Settings of `rlhf dpo`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct DpoConfig {
    /// Causal language model to train, the policy: a folder or a hub name. A frozen copy of it is the reference model.
    #[setting(heading = MODELS, short = "model: folder or hub name")]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Another reference model than the policy at its start: a folder or a hub name.
    #[setting(heading = MODELS)]
    pub ref_model_name_or_path: Option<PathBuf>,
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
    /// Maximum tokens of a prompt with a completion, which are truncated as `truncation_mode` says; none: those of the model.
    #[setting(heading = DATA, default = "1024", short = "maximum tokens of a row")]
    pub max_length: Option<usize>,
    /// The end of a text that is kept where it is too long. With `keep_start`, pairs are dropped whose prompt alone has `max_length`
    /// tokens.
    #[setting(heading = DATA, default = "keep_start")]
    pub truncation_mode: TruncationMode,

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

    /// The loss.
    #[setting(flatten)]
    #[serde(flatten)]
    pub loss: DpoLossConfig,
    /// Texts that are mixed in.
    #[setting(flatten)]
    #[serde(flatten)]
    pub unsupervised: UnsupervisedConfig,
    /// Compute the log-probabilities of the reference model for all pairs before training, which then needs no such model in memory.
    #[setting(heading = KL, short = "reference numbers before training")]
    pub precompute_ref_log_probs: bool,
    /// Pairs per forward pass of `precompute_ref_log_probs` [default: `per_device_train_batch_size`, and `per_device_eval_batch_size` for
    /// the rows of evaluations].
    #[setting(heading = KL, resume = Rounding)]
    pub precompute_ref_batch_size: Option<usize>,
    /// A reference model that follows the policy.
    #[setting(flatten)]
    #[serde(flatten)]
    pub sync: SyncConfig,

    /// Apply no dropout, also not that of an adapter (`lora_dropout`), as in TRL. A model's own dropout is applied in no case.
    #[setting(heading = MODELS, default = true)]
    pub disable_dropout: bool,
    /// Low-rank adapters (LoRA).
    #[setting(flatten)]
    #[serde(flatten)]
    pub peft: PeftConfig,
    /// Peak learning rate.
    #[setting(heading = OPTIMIZER, default = "1e-6", replay = Changes, short = "peak learning rate")]
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

/// The loss of pairs, and its parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct DpoLossConfig {
    /// Loss of a pair; several are added with `loss_weights`.
    #[setting(heading = LOSS, default = "sigmoid", several, delimiter = ',', replay = Changes, short = "hinge, ipo, ...: see --help")]
    pub loss_type: Vec<DpoLoss>,
    /// Weights of several losses, a number for each [default: 1].
    #[setting(heading = LOSS, several, delimiter = ',')]
    pub loss_weights: Vec<f64>,
    /// Strength of the reference model: a higher one keeps the policy nearer to it.
    #[setting(heading = LOSS, default = 0.1, short = "nearness to the reference model")]
    pub beta: f64,
    /// Share of the pairs whose order is taken as wrong, in the losses `exo_pair` (above 0, such as 0.001), `robust` (below 0.5, such as
    /// 0.1),
    /// `aot` and `aot_unpaired`.
    #[setting(heading = LOSS, default = 0.0)]
    pub label_smoothing: f64,
    /// Divergence from the reference model, in the losses of the difference between both sides of a pair.
    #[setting(heading = LOSS, default = "reverse_kl")]
    pub f_divergence_type: FDivergence,
    /// The exponent of `f_divergence_type = alpha_divergence`.
    #[setting(heading = LOSS, default = 0.5)]
    pub f_alpha_divergence_coef: f64,
    /// Weigh each pair by the policy's probabilities of its tokens (WPO).
    #[setting(heading = LOSS)]
    pub use_weighting: bool,
    /// Weight of the tokens by which a completion is longer than the other one of its pair (LD-DPO), from 0 to 1 [default: 1].
    #[setting(heading = LOSS)]
    pub ld_alpha: Option<f64>,
    /// Temperature of the loss `discopop`.
    #[setting(heading = LOSS, default = 0.05)]
    pub discopop_tau: f64,
}

/// A loss of a pair, by its name in TRL's `DPOConfig`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum DpoLoss {
    /// The loss of the DPO paper: logistic.
    Sigmoid,
    /// A hinge in place of the logistic function (SLiC).
    Hinge,
    /// Squared distance to a target of the difference per token (IPO).
    Ipo,
    /// Divergence from the smoothed preference (EXO).
    ExoPair,
    /// Absolute likelihoods of both sides (NCA).
    NcaPair,
    /// Unbiased for labels that are wrong with probability `label_smoothing`.
    Robust,
    /// A classifier of the two sides (BCO).
    BcoPair,
    /// Squared distance of both sides to their targets (SPPO).
    SppoHard,
    /// Sorted differences of a micro-batch (AOT).
    Aot,
    /// Sorted sides of a micro-batch (AOT).
    AotUnpaired,
    /// Raises chosen and lowers rejected responses (APO).
    ApoZero,
    /// Lowers both, rejected responses more (APO).
    ApoDown,
    /// A blend of logistic and exponential losses (DiscoPOP).
    Discopop,
    /// The negative log-likelihood per token of chosen responses.
    Sft,
    /// Logistic, of the differences per token.
    SigmoidNorm,
}

impl DpoLoss {
    /// Whether the loss uses an f-divergence, or may be combined with one.
    fn allows_divergence(self) -> bool {
        matches!(
            self,
            Self::Sigmoid
                | Self::SigmoidNorm
                | Self::Hinge
                | Self::Ipo
                | Self::ExoPair
                | Self::Robust
                | Self::Discopop
                | Self::Sft
        )
    }

    /// Whether the loss uses `label_smoothing`.
    fn is_smoothed(self) -> bool {
        matches!(self, Self::ExoPair | Self::Robust | Self::Aot | Self::AotUnpaired)
    }

    /// Whether the loss of a pair depends on the other pairs of the micro-batch: it sorts them, or is one mean over their tokens.
    fn compares_pairs(self) -> bool {
        self.sorts() || self == Self::Sft
    }

    /// Whether the loss sorts the pairs of a micro-batch.
    pub(crate) fn sorts(self) -> bool {
        matches!(self, Self::Aot | Self::AotUnpaired)
    }
}

/// Divergence between policy and reference model (f-DPO).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum FDivergence {
    /// The divergence of DPO.
    ReverseKl,
    /// From the reference model to the policy.
    ForwardKl,
    /// Of Jensen and Shannon.
    JsDivergence,
    /// With the exponent `f_alpha_divergence_coef`.
    AlphaDivergence,
}

/// The end of a text that is kept where it is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum TruncationMode {
    /// Its first tokens.
    KeepStart,
    /// Its last tokens.
    KeepEnd,
}

impl DpoLossConfig {
    fn check(&self) -> Result<()> {
        let usual: Self = defaults();
        let mut refusals = Refusals::default();
        let (types, weights) = (self.loss_type.len(), self.loss_weights.len());
        refusals.add(expect(types > 0, name_of!(self.loss_type), "[]", "at least one loss"))?;
        if weights > 0 && weights != types {
            refusals.add(refuse(
                name_of!(self.loss_weights),
                format!(": expected a number for each of {types} losses, found {weights}"),
            ))?;
        }
        if let Some(weight) = self.loss_weights.iter().find(|weight| !weight.is_finite()) {
            refusals.add(expect(false, name_of!(self.loss_weights), weight, "finite numbers"))?;
        }
        refusals.add(above_zero(name_of!(self.beta), self.beta))?;
        refusals.add(above_zero(name_of!(self.discopop_tau), self.discopop_tau))?;
        refusals.add(self.ld_alpha.map_or(Ok(()), |alpha| zero_to_one(name_of!(self.ld_alpha), alpha)))?;
        refusals.add(self.check_smoothing())?;
        refusals.add(self.check_divergence(&usual))?;
        refusals.add(self.check_weighting())?;
        if self.discopop_tau != usual.discopop_tau && !self.loss_type.contains(&DpoLoss::Discopop) {
            refusals.add(no_effect(name_of!(self.discopop_tau), self.discopop_tau, "without loss_type = discopop"))?;
        }
        refusals.end()
    }

    fn check_smoothing(&self) -> Result<()> {
        let smoothing = self.label_smoothing;
        let has = |loss| self.loss_type.contains(&loss);
        zero_to_one(name_of!(self.label_smoothing), smoothing)?;
        if has(DpoLoss::ExoPair) {
            let above = "a number above 0 and below 1 for loss_type = exo_pair; its paper has 0.001";
            expect(smoothing > 0.0 && smoothing < 1.0, name_of!(self.label_smoothing), smoothing, above)?;
        }
        if has(DpoLoss::Robust) {
            expect(
                smoothing < 0.5,
                name_of!(self.label_smoothing),
                smoothing,
                "a number below 0.5 for loss_type = robust",
            )?;
        }
        Ok(())
    }

    fn check_divergence(&self, usual: &Self) -> Result<()> {
        let is_alpha = self.f_divergence_type == FDivergence::AlphaDivergence;
        if !is_alpha && self.f_alpha_divergence_coef != usual.f_alpha_divergence_coef {
            let why = "without f_divergence_type = alpha_divergence";
            return no_effect(name_of!(self.f_alpha_divergence_coef), self.f_alpha_divergence_coef, why);
        }
        let coef = self.f_alpha_divergence_coef;
        expect(coef.is_finite(), name_of!(self.f_alpha_divergence_coef), coef, "a finite number")?;
        let refused = self.loss_type.iter().find(|loss| !loss.allows_divergence());
        match refused.filter(|_| self.f_divergence_type != FDivergence::ReverseKl) {
            Some(loss) => refuse(
                name_of!(self.f_divergence_type),
                format!(
                    " = {} with loss_type = {}: expected reverse_kl, as other divergences are known up to a constant of the \
                 prompt, which only the difference of both sides cancels",
                    Choices::name(self.f_divergence_type),
                    Choices::name(*loss)
                ),
            ),
            None => Ok(()),
        }
    }

    fn check_weighting(&self) -> Result<()> {
        match self.loss_type.iter().copied().find(|loss| loss.compares_pairs()).filter(|_| self.use_weighting) {
            Some(DpoLoss::Sft) => refuse(
                name_of!(self.use_weighting),
                " = true with loss_type = sft: expected false, as sft is one mean over the tokens of all pairs; TRL fails with it",
            ),
            Some(loss) => refuse(
                name_of!(self.use_weighting),
                format!(
                    " = true with loss_type = {}: expected false, as the loss sorts the pairs, which the weights would no longer fit",
                    Choices::name(loss)
                ),
            ),
            None => Ok(()),
        }
    }

    /// Returns warnings about settings that none of the losses uses.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let ignored = self.label_smoothing != 0.0 && !self.loss_type.iter().any(|loss| loss.is_smoothed());
        ignored
            .then(|| {
                let names: Vec<&str> = self.loss_type.iter().map(|loss| Choices::name(*loss)).collect();
                format!(
                    "label_smoothing = {} has no effect with loss_type = {}, as in TRL: it acts in exo_pair, robust, aot and aot_unpaired",
                    self.label_smoothing,
                    names.join(" ")
                )
            })
            .into_iter()
            .collect()
    }

    /// Returns the losses with their weights.
    pub(crate) fn weighted(&self) -> impl Iterator<Item = (DpoLoss, f64)> {
        let weight = |at: usize| self.loss_weights.get(at).copied().unwrap_or(1.0);
        self.loss_type.iter().enumerate().map(move |(at, loss)| (*loss, weight(at)))
    }
}

impl RunSettings for DpoConfig {
    fn described(&self) -> Vec<Field> {
        Self::fields()
    }

    fn loss_of_micro_batches(&self) -> Option<&'static str> {
        let loss = self.loss.loss_type.iter().copied().find(|loss| loss.compares_pairs());
        loss.map(Choices::name)
    }
}

impl DpoConfig {
    /// Creates a configuration with every default, for this model, these pairs and this output folder.
    pub fn new(
        model_name_or_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        let mut config: Self = defaults_with(&OWN_DEFAULTS);
        config.model_name_or_path = model_name_or_path.into();
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
        let usual: Self = defaults_with(&OWN_DEFAULTS);
        all([
            self.data.check(self.eval_dataset_name.as_deref()),
            self.max_length.map_or(Ok(()), |most| at_least_one(name_of!(self.max_length), most)),
            at_least_one(name_of!(self.per_device_eval_batch_size), self.per_device_eval_batch_size),
            at_least_one(name_of!(self.logging_steps), self.logging_steps),
            self.loss.check(),
            self.unsupervised.check_with_default(usual.unsupervised.unsup_coef),
            self.check_reference(),
            self.check_dropout(),
            self.peft.check(),
            self.run.quantization.check_trained(self.peft.use_peft),
            self.run.quantization.check(),
            check_learning(self.learning_rate, &self.optimizer, None),
            self.optimizer.check_held(&[self.run.dist.zero_stage], self.run.bf16, self.peft.use_peft),
            self.run.check_save_dtype(self.peft.use_peft),
            self.run.check(&[self.run.dist.zero_stage], &self.eval),
            self.eval.check(self.run.checkpoints.save_steps, &EVAL_METRICS),
            self.plan_for(1).map(drop),
        ])
    }

    /// Returns the dropout rate of the adapters' inputs.
    pub(crate) fn adapter_dropout(&self) -> f64 {
        if self.disable_dropout || !self.peft.use_peft { 0.0 } else { self.peft.lora_dropout }
    }

    /// Returns whether the reference model has separate weights, which take memory during training.
    pub(crate) fn keeps_reference(&self) -> bool {
        !self.precompute_ref_log_probs && (self.ref_model_name_or_path.is_some() || !self.peft.use_peft)
    }

    fn check_dropout(&self) -> Result<()> {
        let drops = self.adapter_dropout() > 0.0;
        match self.loss.loss_type.iter().copied().find(|loss| loss.sorts()).filter(|_| drops) {
            Some(loss) => refuse(
                name_of!(self.disable_dropout),
                format!(
                    " = false with loss_type = {}: expected true, as pairs are sorted by the numbers of the policy without dropout",
                    Choices::name(loss)
                ),
            ),
            None => Ok(()),
        }
    }

    /// Checks the settings of the reference model.
    fn check_reference(&self) -> Result<()> {
        let precomputes = self.precompute_ref_log_probs;
        let mut refusals = Refusals::default();
        if let Some(rows) = self.precompute_ref_batch_size {
            refusals.add(at_least_one(name_of!(self.precompute_ref_batch_size), rows))?;
            if !precomputes {
                let why = "without precompute_ref_log_probs = true";
                refusals.add(no_effect(name_of!(self.precompute_ref_batch_size), rows, why))?;
            }
        }
        refusals.add(self.sync.check(false, true))?;
        if self.sync.sync_ref_model && precomputes {
            refusals.add(refuse(name_of!(self.sync.sync_ref_model), " = true with precompute_ref_log_probs = true: expected one of them, as the reference model changes during training",
            ))?;
        }
        if self.sync.sync_ref_model && self.peft.use_peft {
            refusals.add(refuse(name_of!(self.sync.sync_ref_model), " = true with use_peft: expected false, as an adapter has no whole weights to mix; the reference model is the \
                 policy without it",
            ))?;
        }
        if self.sync.sync_ref_model && self.run.dist.zero_stage.shards_parameters() && num_ranks() > 1 {
            refusals.add(refuse(name_of!(self.sync.sync_ref_model), " = true with zero_stage = 3: a reference model that is divided over the ranks is not written to checkpoints; \
                 expected zero_stage = 0, 1 or 2",
            ))?;
        }
        if !self.keeps_reference() {
            let why = "with use_peft or precompute_ref_log_probs, which leave no frozen model";
            refusals.add(self.run.offload.check_models(why))?;
        }
        refusals.end()
    }
}
