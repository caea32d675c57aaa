//! Language models and sequence classifiers: they load and save Hugging Face folders and take ragged sequences, without padding.
//!
//! These modules know nothing of reinforcement learning. A model's own dropout is never applied: PPO compares the probabilities of
//! the same tokens before and after an update, and noise between the two passes would look like a change of the policy. An
//! adapter's dropout is applied in backward passes whose batch has `DropoutRows`.

mod adapter_folder;
mod batch;
mod batches;
mod bias;
mod body;
mod causal_lm;
mod classifier;
mod config;
mod decoder;
mod delta;
mod described;
mod families;
mod gates;
mod joint;
mod kv_cache;
mod layer_inputs;
mod layout;
mod linear;
mod logprobs;
mod lora;
mod lora_config;
mod mixer;
mod mixing;
mod mlp;
mod mxfp4;
mod params;
mod plain_attention;
mod pretrained;
mod quantized;
mod relative;
mod rope;
mod routing;
mod sampled;
mod save;
mod shape;
mod shard;
mod stacked;
mod state;
mod value_head;

pub use adapter_folder::AdapterFolder;
pub use batch::{Batch, JointBatch};
pub use batch::{StopCheck, shared_lens};
pub use batches::{batches, in_batches, joined};
pub use body::Trains;
pub use body::{Gathered, Loaded};
pub use causal_lm::CausalLm;
pub use classifier::{ClassifierFormat, ClassifierHead, SequenceClassifier};
pub use config::ModelConfig;
pub use config::is_encoder_decoder_family;
pub use described::{Activations, Held, Holding, ModelSizes, PassTokens, SourceTokens, TrainedTensor};
pub use kv_cache::{KvCache, positions_for};
pub use logprobs::{Distributions, LmHead, LogitNumbers, LogprobOptions, TokenLogprobs, TopLogprobs};
pub use logprobs::{Divergence, TeacherRows, TokenDivergences};
pub use logprobs::{LogitsUse, logits_chunk};
pub use lora::DropoutRows;
pub use lora_config::{LoraConfig, PeftConfig};
pub use lora_config::{MOST_RANK, is_lm_head};
pub use mixing::{GatedDelta, Mixing};
pub use params::Param;
pub use pretrained::{ModelHead, PretrainedModel};
pub use quantized::dynamic_map;
pub use quantized::{QuantType, Quantization, QuantizationConfig};
pub use sampled::{Sampled, TokenSet};
pub use shape::{
    Activation, ClampedGate, Experts, Family, LayerInputs, LayerShape, NormKind, Order, Pooling, QueryGrowth,
    RelativeAttention, RelativeBias, Rope, RopeScaling, Scoring, Shape,
};
pub use shard::Shards;
pub use shard::TrainedPart;
pub use value_head::{CausalLmWithValueHead, ValueHead, ValueHeadInit, ValueModel};

use params::Source;
use rlhf_base::schema::Choices;
use std::path::Path;
use std::sync::OnceLock;
use tch::{Device, Kind};

/// The subfolder of an adapter's folder that holds its base, if no other folder does.
pub const BASE_MODEL: &str = "base_model";

/// Whether `dir` holds a model or an adapter.
pub fn is_model(dir: &Path) -> bool {
    ["config.json", "adapter_config.json"].iter().any(|name| dir.join(name).is_file())
}

/// Precision of a model's computation. Results are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// The dtype that most of the weights are held in.
    #[default]
    Held,
    /// f32 throughout.
    F32,
    /// bf16 matrix products and attention; f32 residual stream, norms, log-probabilities and weights.
    Bf16,
    /// As `Bf16`, in f16: more mantissa bits and a smaller range, so training needs a [`crate::optim::loss_scale::LossScaler`].
    F16,
}

impl Precision {
    /// The dtype of the products of a model whose weights are held as `held`.
    pub fn kind(self, held: Kind) -> Kind {
        match self {
            Precision::Held => held,
            Precision::F32 => Kind::Float,
            Precision::Bf16 => Kind::BFloat16,
            Precision::F16 => Kind::Half,
        }
    }

    /// The name of the dtype of products; `held`, which no run has, if that is the dtype of the weights.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Held => "held",
            Precision::F32 => "float32",
            Precision::Bf16 => "bfloat16",
            Precision::F16 => "float16",
        }
    }
}

/// The dtype that a model's weights are read and held in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, Choices)]
#[serde(rename_all = "lowercase")]
#[choice(rename_all = "lowercase")]
pub enum Dtype {
    /// Each tensor as its file has it.
    Auto,
    /// f32, which trained weights need.
    #[default]
    Float32,
    /// bf16.
    #[choice(alias = "bf16")]
    BFloat16,
    /// f16.
    #[choice(alias = "fp16")]
    Float16,
}

impl Dtype {
    /// Returns the weights' dtype of this kind; f32 for kinds that weights do not have.
    pub fn of(kind: Kind) -> Self {
        match kind {
            Kind::BFloat16 => Dtype::BFloat16,
            Kind::Half => Dtype::Float16,
            _ => Dtype::Float32,
        }
    }

    /// Its name as a setting.
    pub fn name(self) -> &'static str {
        Choices::name(self)
    }

    /// The dtype of all tensors; `None`: each tensor has its own.
    pub fn kind(self) -> Option<Kind> {
        match self {
            Dtype::Auto => None,
            Dtype::Float32 => Some(Kind::Float),
            Dtype::BFloat16 => Some(Kind::BFloat16),
            Dtype::Float16 => Some(Kind::Half),
        }
    }
}

/// Device, dtype and precision of a model in memory.
#[derive(Debug, Clone, Copy)]
pub struct ModelOptions {
    /// The device of the weights.
    pub device: Device,
    /// The dtype that the weights are held in.
    pub dtype: Dtype,
    /// The precision of computation; `Held` is the dtype of most of the weights' bytes.
    pub precision: Precision,
    /// The format that the weights of linear layers are quantized to, after they are read as `dtype`; such a model is trained by an
    /// adapter only. Weights that are quantized in their files stay so in any case.
    pub quantization: Option<Quantization>,
}

impl ModelOptions {
    /// The dtype that most of the bytes of `source` are held in, and the dtype of products.
    fn kinds(self, source: Source<'_>) -> (Kind, Kind) {
        let most_common = || match source {
            Source::Fresh(_) => Kind::Float,
            Source::Shapes(kind) => kind,
            Source::Checkpoint(checkpoint) => checkpoint.kind(),
            Source::Shared(params) => params.first().map_or(Kind::Float, |param| param.tensor.kind()),
        };
        let kind = self.dtype.kind().unwrap_or_else(most_common);
        (kind, self.precision.kind(kind))
    }
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self { device: Device::Cpu, dtype: Dtype::Float32, precision: Precision::Held, quantization: None }
    }
}

/// Whether `RLHF_KERNELS=plain` in the environment restricts computation to libtorch's own operations.
fn plain() -> bool {
    static PLAIN: OnceLock<bool> = OnceLock::new();
    *PLAIN.get_or_init(|| std::env::var_os("RLHF_KERNELS").is_some_and(|value| value == "plain"))
}

/// Whether `device` is a GPU, or the processor in the place of one, in a test of the kernels for GPUs.
fn on_gpu(device: Device) -> bool {
    device.is_cuda() || tch_ext::has_gpu_kernels(Kind::Float, device)
}

/// Whether the kernels of tch-ext compute tensors of this dtype on this device.
pub fn uses_kernels(kind: Kind, device: Device) -> bool {
    !plain() && tch_ext::has_kernels(kind, device)
}
