//! The shape of a model and the description of its family, and the fields of a `config.json` that they are read from.

use super::mixing::{Mixing, MixingNames};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::Path;
use tch::{Kind, Tensor};

/// Maximum of a size: far above any model's, and small enough that products do not overflow.
const MOST: i64 = 1 << 28;

/// Maximum of any other number: far above any model's, and small enough that the ratio of two is an f32.
const LARGEST: f64 = 1e15;

/// Maximum number of experts in all layers together, for the same reason as [`MOST_LAYERS`].
const MOST_EXPERTS: i64 = 100_000;

/// Maximum number of weights of a layer's experts: far above any model's, and small enough that sums do not overflow.
const MOST_STACKED: i64 = 1 << 40;

/// Maximum number of layers, so that a hostile file cannot make building take hours, or memory for lists of its layers.
pub(super) const MOST_LAYERS: i64 = 10_000;

/// The LM head's module in transformers.
const LM_HEAD: &str = "lm_head";

/// End of the names of transformers' classes of sequence classifiers.
const CLASSIFIER: &str = "ForSequenceClassification";

/// The non-linearity of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// The exact GELU.
    Gelu,
    /// The tanh approximation of GELU (`gelu_new`, `gelu_fast`, `gelu_pytorch_tanh`).
    GeluTanh,
    /// x * sigmoid(x) (`silu`, `swish`).
    Silu,
    /// max(x, 0).
    Relu,
}

/// The names of the activations.
const ACTIVATIONS: &str = "gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, silu, swish, relu";

impl Activation {
    /// The non-linearity of `x`.
    pub(super) fn apply(self, x: &Tensor) -> Tensor {
        match self {
            Self::Gelu => x.gelu("none"),
            Self::GeluTanh => x.gelu("tanh"),
            Self::Silu => x.silu(),
            Self::Relu => x.relu(),
        }
    }

    /// The activation of this name in transformers.
    fn named(name: &str) -> Option<Self> {
        match name {
            "gelu" | "gelu_python" => Some(Self::Gelu),
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Some(Self::GeluTanh),
            "silu" | "swish" => Some(Self::Silu),
            "relu" => Some(Self::Relu),
            _ => None,
        }
    }
}

/// Rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of the angles.
    pub theta: f64,
    /// Number of a head's dimensions that are rotated.
    pub dim: i64,
    /// Scaling of the angles for texts longer than the model was pretrained on.
    pub scaling: RopeScaling,
}

/// Scaling of rotary angles for longer texts; named as transformers' `rope_type`.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// All angles are divided by `factor`.
    Linear {
        /// Factor by which texts may be longer.
        factor: f64,
    },
    /// The base grows with the length of a text beyond `original` tokens (NTK).
    ///
    /// The length is that of each sequence. transformers uses the longest of the batch, so its results depend on the batch.
    Dynamic {
        /// Factor by which texts may be longer.
        factor: f64,
        /// The length up to which the base is unchanged.
        original: f64,
    },
    /// Slow angles are divided by `factor`, fast ones kept, those between are blended (Llama 3.1).
    Llama3 {
        /// Factor by which texts may be longer.
        factor: f64,
        /// `original` over this is the wavelength from which angles are divided.
        low_freq_factor: f64,
        /// `original` over this is the wavelength up to which angles are kept.
        high_freq_factor: f64,
        /// The length that the model was pretrained on.
        original: f64,
    },
    /// As `Llama3`, blended linearly over the dimensions of a head, and cosines and sines are multiplied by `attention_factor` (YaRN).
    Yarn {
        /// Factor by which texts may be longer.
        factor: f64,
        /// Number of rotations over `original` tokens from which angles are kept.
        beta_fast: f64,
        /// Number of rotations over `original` tokens up to which angles are divided by `factor`.
        beta_slow: f64,
        /// Whether the range of blended dimensions is rounded to whole dimensions.
        truncate: bool,
        /// Factor of cosines and sines.
        attention_factor: f64,
        /// The length that the model was pretrained on.
        original: f64,
    },
    /// The angles are computed as for whole heads, but only those of the first `angles` pairs are not 0; all are divided by `factor` (Gemma 4).
    Proportional {
        /// Number of angles that are not 0.
        angles: i64,
        /// Divisor of the angles.
        factor: f64,
    },
    /// Each angle is divided by a factor of its own: one of `short` in texts of up to `original` tokens, one of `long` in longer ones
    /// (Phi-3 and Phi-4). Cosines and sines are multiplied by `attention_factor`.
    ///
    /// The length is that of each sequence. transformers uses the longest of the batch, so its results depend on the batch.
    LongRope {
        /// Divisors of the angles in short texts, `dim / 2` numbers.
        short: Vec<f64>,
        /// Divisors of the angles in long texts, `dim / 2` numbers.
        long: Vec<f64>,
        /// Factor of cosines and sines.
        attention_factor: f64,
        /// The longest of the short texts, in tokens.
        original: f64,
    },
}

/// Disentangled attention: scores from contents and relative positions (DeBERTa-v2 and v3). A layer projects the position embeddings with
/// its projections of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelativeAttention {
    /// Number of buckets of distances in each direction: near distances have one each, farther ones share logarithmic buckets. `None`: each
    /// distance up to `longest` has its own row.
    pub buckets: Option<i64>,
    /// The distance that the buckets reach.
    pub longest: i64,
    /// Whether queries attend to the positions of keys (`c2p`).
    pub content_to_position: bool,
    /// Whether the positions of queries attend to keys (`p2c`).
    pub position_to_content: bool,
    /// Whether the position embeddings go through a norm.
    pub norm: bool,
}

impl RelativeAttention {
    /// Number of rows of the table of position embeddings in each direction.
    pub(super) fn span(&self) -> i64 {
        self.buckets.unwrap_or(self.longest)
    }
}

/// The hidden states that the head of an encoder's classifier reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The first token's.
    First,
    /// The mean over all tokens.
    Mean,
}

/// Positions of a layer's norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Before attention and before the MLP, and one at the end of the model.
    Pre,
    /// As `Pre`, and attention and MLP read the same input (GPT-NeoX).
    Parallel,
    /// After each sum; none at the end (BERT, the smaller OPT).
    Post,
    /// As `Pre`, and also after attention and after the MLP, before their sums (Gemma 2 and 3).
    Sandwich,
    /// After attention and MLP, before their sums, and one at the end of the model (OLMo 2).
    Output,
}

/// Kind of norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Layer norm with a bias.
    Layer,
    /// RMS norm.
    Rms,
    /// RMS norm that multiplies by 1 + weight (Gemma).
    RmsPlusOne,
}

/// The gate of an expert that is clamped (gpt-oss): `(up + 1) * gate * sigmoid(alpha * gate)`, where `gate` is at most `limit` and
/// `up` is within `limit` of 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampedGate {
    /// Factor of the gate in its sigmoid.
    pub alpha: f64,
    /// The bound.
    pub limit: f64,
}

/// The experts of a model: each token goes through a few of these MLPs.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// Number of experts in a layer.
    pub count: i64,
    /// Number of experts that each token goes through.
    pub chosen: i64,
    /// Width inside an expert.
    pub intermediate_size: i64,
    /// The scores by which experts are chosen.
    pub scoring: Scoring,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalized: bool,
    /// Width inside an MLP that each token goes through in addition to its experts; `None`: there is none.
    pub shared: Option<i64>,
    /// Whether each layer has experts instead of one MLP.
    pub layers: Vec<bool>,
    /// The gate of gpt-oss's experts.
    pub clamped: Option<ClampedGate>,
}

/// The scores of a token's experts. The largest scores choose the experts and are their weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scoring {
    /// The softmax of the router's results.
    Softmax,
    /// The sigmoid of each of the router's results (LFM2).
    Sigmoid {
        /// Whether each expert has a stored bias that is added to its score for the choice, but not to its weight.
        is_biased: bool,
        /// Factor of the weights.
        scale: f64,
    },
}

/// Growth of the queries with their positions: the query at position p is multiplied by `1 + beta * ln(1 + floor(p / original))`
/// (Ministral 3).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    /// Weight of the logarithm.
    pub beta: f64,
    /// The number of positions before the first growth.
    pub original: f64,
}

impl QueryGrowth {
    /// The factors of the queries at `positions` `[N]` i64: `[N, 1]` f32.
    pub(super) fn factors(self, positions: &Tensor) -> Tensor {
        let steps = (positions.to_kind(Kind::Float) / self.original).floor();
        (steps.log1p() * self.beta + 1.0).unsqueeze(1)
    }
}

/// Sizes of a layer, if they differ between layers, and the source of its keys and values (Gemma 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerShape {
    /// Width of one head.
    pub head_dim: i64,
    /// Number of key and value heads.
    pub kv_heads: i64,
    /// The earlier layer whose keys and values this one uses; `None`: it computes its own.
    pub keys_from: Option<usize>,
    /// Whether values are the projections of the keys.
    pub values_are_keys: bool,
    /// Width inside the MLP.
    pub intermediate_size: i64,
}

/// Inputs of each layer in addition to its hidden states: a per-layer embedding of the token, and a projection of the token's embedding
/// (Gemma 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerInputs {
    /// Width of the input of one layer.
    pub width: i64,
    /// Rows of the table of all layers' embeddings.
    pub vocab_size: i64,
}

/// A learned bias of attention scores by the distance of two tokens (T5).
///
/// Small distances have a bucket each; larger ones share buckets whose width grows with the distance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelativeBias {
    /// Number of buckets; in an encoder, half of them are for later tokens.
    pub buckets: i64,
    /// The distance from which on all share the last bucket.
    pub max_distance: i64,
}

/// The shape of a model, with a value for every field.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// The family.
    pub family: &'static Family,
    /// Rows of the embedding; may exceed the tokenizer's.
    pub vocab_size: i64,
    /// Width of the embedding and of the final hidden states; other than `hidden_size` in some OPT models.
    pub embedding_size: i64,
    /// Width of the residual stream.
    pub hidden_size: i64,
    /// Width inside the MLP.
    pub intermediate_size: i64,
    /// Experts in the place of the MLP; `None`: every layer has one MLP.
    pub experts: Option<Experts>,
    /// Layers with a state in the place of attention; `None`: every layer has attention.
    pub mixing: Option<Mixing>,
    /// Whether each layer is such a layer.
    pub mixes: Vec<bool>,
    /// Number of layers.
    pub num_hidden_layers: i64,
    /// Number of query heads.
    pub num_attention_heads: i64,
    /// Number of key and value heads.
    pub num_key_value_heads: i64,
    /// Width of one head.
    pub head_dim: i64,
    /// The longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Row of the first position in a table of learned ones.
    pub position_offset: i64,
    /// Whether learned positions are added to the embeddings, in families that have a table of them.
    pub learned_positions: bool,
    /// Attention scores from relative positions, in addition to those from content.
    pub relative: Option<RelativeAttention>,
    /// Number of segment types of the embedding; 0: none.
    pub token_types: i64,
    /// Factor of the embeddings.
    pub embedding_scale: f64,
    /// Factor of the results of attention and MLP before they are added to the residual stream (Granite).
    pub branch_scale: f64,
    /// Growth of the queries with their positions.
    pub query_growth: Option<QueryGrowth>,
    /// Kind of the norms.
    pub norm: NormKind,
    /// Whether layer norms have biases.
    pub norm_bias: bool,
    /// Whether the first layer has a norm before attention.
    pub first_norm: bool,
    /// Added to the variance in the norms.
    pub norm_eps: f64,
    /// Positions of the norms.
    pub order: Order,
    /// The MLP's non-linearity.
    pub activation: Activation,
    /// The model's kinds of rotary positions; empty if positions are learned.
    pub ropes: Vec<Rope>,
    /// Index in `ropes` of the rotary positions of each layer; `None`: the layer has none.
    pub layer_ropes: Vec<Option<usize>>,
    /// Bias of the scores of self-attention by distance, the same in all layers of a stack.
    pub relative_bias: Option<RelativeBias>,
    /// Number of layers of the encoder of an encoder-decoder, whose other sizes are those of the decoder; `None`: there is one stack.
    pub encoder_layers: Option<i64>,
    /// The id that the decoder of an encoder-decoder reads before the response.
    pub decoder_start_token_id: Option<i64>,
    /// Whether a token attends only to itself and the tokens before it.
    pub causal: bool,
    /// Number of tokens, itself included, that a token attends to in each layer, in each direction if the model is not causal;
    /// `None`: all.
    pub windows: Vec<Option<i64>>,
    /// The sizes of each layer; empty if all have the model's.
    pub layer_shapes: Vec<LayerShape>,
    /// Inputs of each layer in addition to its hidden states.
    pub layer_inputs: Option<LayerInputs>,
    /// Whether the result of each layer is multiplied by a stored number, which is not trained.
    pub has_layer_scalars: bool,
    /// Whether each query head has a learned score, without a value, that its softmax counts with the scores of the keys (gpt-oss).
    pub has_sinks: bool,
    /// Factor of the products of queries and keys.
    pub attention_scale: f64,
    /// Attention scores `x` become `cap * tanh(x / cap)`.
    pub attention_softcap: Option<f64>,
    /// Logits `x` become `cap * tanh(x / cap)`.
    pub final_softcap: Option<f64>,
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub attention_out_bias: bool,
    /// Whether the query projection has a gate of the attention's output behind the queries of each head.
    pub attention_gate: bool,
    /// Whether the MLP's projections have biases.
    pub mlp_bias: bool,
    /// The hidden states that a two-layer head of a classifier reads.
    pub pooling: Pooling,
    /// Whether the inner layer of such a head has a bias.
    pub head_bias: bool,
    /// Whether the LM head is the embedding.
    pub tie_word_embeddings: bool,
    /// Factor of the final hidden states before the LM head.
    pub lm_head_scale: f64,
    /// Standard deviation of newly initialized weights.
    pub initializer_range: f64,
    /// Whether the initial weights of linear layers shrink with the width of their input, as T5's do.
    pub scale_init_by_width: bool,
    /// Whether the MLPs' output projections are computed in f32 if other products are in f16: T5's results exceed the range of f16.
    pub wide_mlp_out: bool,
    /// Whether the initial weights of projections into the residual stream shrink with the depth.
    pub scale_residual_init: bool,
    /// The ids that end a text; the first is appended to texts.
    pub eos_token_ids: Vec<i64>,
    /// The classes with which transformers loads the folder.
    pub architectures: Vec<String>,
    /// The names of a classifier's labels.
    pub labels: Vec<String>,
}

impl Shape {
    /// Whether a token's rotary angles depend on the length of its text.
    pub fn has_length_dependent_rope(&self) -> bool {
        let depends = |rope: &Rope| matches!(rope.scaling, RopeScaling::Dynamic { .. } | RopeScaling::LongRope { .. });
        self.ropes.iter().any(depends)
    }

    /// The length in tokens at which the rotary angles of a whole text change, including its first tokens, so that a cache has to be filled
    /// again (`longrope`).
    pub fn rope_switch(&self) -> Option<i64> {
        self.ropes.iter().find_map(|rope| match rope.scaling {
            RopeScaling::LongRope { original, .. } => Some(original as i64),
            _ => None,
        })
    }

    /// The base that the families' readers modify: a decoder with biases, layer norms and learned positions.
    pub(super) fn biased(f: &Fields<'_>, vocab_size: i64, hidden_size: i64, heads: i64, layers: i64) -> Result<Self> {
        Ok(Self {
            family: f.family,
            vocab_size,
            embedding_size: hidden_size,
            hidden_size,
            intermediate_size: 0,
            experts: None,
            mixing: None,
            mixes: vec![false; layers as usize],
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: heads,
            head_dim: hidden_size / heads,
            max_position_embeddings: f.size("max_position_embeddings", 2048)? as usize,
            position_offset: 0,
            learned_positions: true,
            relative: None,
            token_types: 0,
            embedding_scale: 1.0,
            branch_scale: 1.0,
            query_growth: None,
            norm: NormKind::Layer,
            norm_bias: true,
            first_norm: true,
            norm_eps: 1e-5,
            order: Order::Pre,
            activation: Activation::Gelu,
            ropes: Vec::new(),
            layer_ropes: vec![None; layers as usize],
            relative_bias: None,
            encoder_layers: None,
            decoder_start_token_id: None,
            causal: true,
            windows: vec![None; layers as usize],
            layer_shapes: Vec::new(),
            layer_inputs: None,
            has_layer_scalars: false,
            has_sinks: false,
            attention_scale: ((hidden_size / heads) as f64).powf(-0.5),
            attention_softcap: None,
            final_softcap: None,
            qkv_bias: true,
            attention_out_bias: true,
            attention_gate: false,
            mlp_bias: true,
            pooling: Pooling::First,
            head_bias: true,
            tie_word_embeddings: false,
            lm_head_scale: 1.0,
            initializer_range: 0.02,
            scale_init_by_width: false,
            wide_mlp_out: false,
            scale_residual_init: false,
            eos_token_ids: Vec::new(),
            architectures: Vec::new(),
            labels: Vec::new(),
        })
    }

    pub(super) fn check(&self, path: &Path) -> Result<()> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        // Llama and its successors have heads of any width; in the others the heads divide the hidden size.
        let free = self.norm != NormKind::Layer;
        if !free && self.head_dim * heads != self.hidden_size {
            let message = format!("hidden size {}: expected a multiple of {heads} attention heads", self.hidden_size);
            return Err(Error::invalid(path, message));
        }
        if heads % kv_heads != 0 {
            let message = format!("{heads} attention heads: expected a multiple of {kv_heads} key-value heads");
            return Err(Error::invalid(path, message));
        }
        if let Some(experts) = &self.experts {
            if experts.chosen > experts.count {
                let message = format!(
                    "`num_experts_per_tok`: expected at most {} experts, found {}",
                    experts.count, experts.chosen
                );
                return Err(Error::invalid(path, message));
            }
            let numel = experts.count.saturating_mul(self.hidden_size).saturating_mul(2 * experts.intermediate_size);
            if numel > MOST_STACKED {
                let message =
                    format!("expected at most {MOST_STACKED} weights in the experts of a layer, found {numel}");
                return Err(Error::invalid(path, message));
            }
            if experts.count.saturating_mul(self.num_hidden_layers) > MOST_EXPERTS {
                let message =
                    format!("expected at most {MOST_EXPERTS} experts in all layers, found {} in each", experts.count);
                return Err(Error::invalid(path, message));
            }
        }
        if self.head_dim == 0 || !self.attention_scale.is_finite() {
            return Err(Error::invalid(path, format!("{heads} attention heads: expected at most the hidden size")));
        }
        Ok(())
    }

    /// Returns the mixer that layer `i` has in place of attention; `None` if it has attention.
    pub fn mixing_of(&self, i: usize) -> Option<&Mixing> {
        self.mixing.as_ref().filter(|_| self.mixes[i])
    }

    /// Number of layers with attention, which have keys and values in a cache.
    pub fn attention_layers(&self) -> i64 {
        self.num_hidden_layers - self.mixes.iter().filter(|mixes| self.mixing.is_some() && **mixes).count() as i64
    }

    /// The sizes of layer `i`.
    pub fn layer_shape(&self, i: usize) -> LayerShape {
        self.layer_shapes.get(i).copied().unwrap_or(LayerShape {
            head_dim: self.head_dim,
            kv_heads: self.num_key_value_heads,
            keys_from: None,
            values_are_keys: false,
            intermediate_size: self.intermediate_size,
        })
    }

    /// Whether a later layer uses the keys and values of layer `i`.
    pub(super) fn is_source_of_keys(&self, i: usize) -> bool {
        self.layer_shapes.iter().any(|layer| layer.keys_from == Some(i))
    }

    /// Widths of the queries and of the keys of a layer, as means over all layers.
    pub(super) fn mean_widths(&self) -> [f64; 2] {
        let layers = 0..self.num_hidden_layers.max(1) as usize;
        let count = layers.len() as f64;
        let mean = |width: &dyn Fn(LayerShape) -> i64| -> f64 {
            if self.layer_shapes.is_empty() {
                return width(self.layer_shape(0)) as f64;
            }
            layers.clone().map(|i| width(self.layer_shape(i)) as f64).sum::<f64>() / count
        };
        [mean(&|layer| layer.head_dim * self.num_attention_heads), mean(&|layer| layer.head_dim * layer.kv_heads)]
    }

    /// The largest width, over the layers, inside the MLPs that a token goes through in a layer.
    pub fn active_width(&self) -> i64 {
        let expert_width = self
            .experts
            .as_ref()
            .map(|experts| experts.chosen * experts.intermediate_size + experts.shared.unwrap_or(0));
        match &self.experts {
            Some(experts) if experts.layers.iter().all(|layer| *layer) => expert_width.unwrap_or(0),
            _ => {
                let layer_widths = self.layer_shapes.iter().map(|layer| layer.intermediate_size);
                layer_widths.max().unwrap_or(self.intermediate_size).max(expert_width.unwrap_or(0))
            }
        }
    }

    /// Width of a token's copies for its experts in a layer, as a mean over the layers; 0 without experts.
    pub(super) fn routed_width(&self) -> f64 {
        let Some(experts) = &self.experts else { return 0.0 };
        let layers = experts.layers.iter().filter(|has_experts| **has_experts).count() as f64;
        layers / self.num_hidden_layers.max(1) as f64 * (experts.chosen * self.hidden_size) as f64
    }

    /// Whether the model has an encoder and a decoder.
    pub fn is_encoder_decoder(&self) -> bool {
        self.encoder_layers.is_some()
    }

    /// The most tokens that a prompt may have before a response of up to `new_tokens` tokens, if all models that read them are limited to
    /// `context` tokens; `None` if none are left for it.
    ///
    /// A decoder reads both in one context. In an encoder-decoder, the limit holds for the prompt in the encoder, and for the start token and
    /// the response in the decoder.
    pub fn max_prompt_len(&self, context: usize, new_tokens: usize) -> Option<usize> {
        let left = context.checked_sub(new_tokens).filter(|&left| left > 0)?;
        Some(if self.is_encoder_decoder() { context } else { left })
    }

    /// The most tokens of a response to a prompt of `prompt_len` tokens, by the rule of [`Shape::max_prompt_len`] in the model's own context;
    /// 0 if there is none.
    pub fn max_new_tokens(&self, prompt_len: usize) -> usize {
        let context = self.max_position_embeddings;
        if !self.is_encoder_decoder() {
            context.saturating_sub(prompt_len)
        } else if prompt_len <= context {
            context.saturating_sub(1)
        } else {
            0
        }
    }

    /// Checks that an encoder-decoder has a token that its decoder starts with.
    pub(super) fn check_start(&self, path: &Path) -> Result<()> {
        let expected = format!("a token id below vocab_size = {}", self.vocab_size);
        let message = match self.decoder_start_token_id {
            _ if !self.is_encoder_decoder() => return Ok(()),
            Some(start) if (0..self.vocab_size).contains(&start) => return Ok(()),
            Some(start) => format!("`decoder_start_token_id`: expected {expected}, found {start}"),
            None => format!("`decoder_start_token_id`: expected {expected}, found none; T5's is its pad token, 0"),
        };
        Err(Error::invalid(path, message))
    }

    /// The shape of the encoder's stack; `None` if there is one stack.
    pub(super) fn encoder_shape(&self) -> Option<Self> {
        let num_hidden_layers = self.encoder_layers?;
        let (windows, layer_ropes) = (vec![None; num_hidden_layers as usize], vec![None; num_hidden_layers as usize]);
        let mixes = vec![false; num_hidden_layers as usize];
        Some(Self {
            num_hidden_layers,
            windows,
            layer_ropes,
            mixes,
            causal: false,
            encoder_layers: None,
            ..self.clone()
        })
    }

    /// Whether the configuration is that of a sequence classifier (a reward or value model).
    pub fn is_sequence_classifier(&self) -> bool {
        self.architectures.iter().any(|name| name.ends_with(CLASSIFIER))
    }
}

/// A family of models, identified by the `model_type` in `config.json`.
#[derive(Debug)]
pub struct Family {
    /// The `model_type`.
    pub name: &'static str,
    /// transformers' class of its language models; `None` for encoders, which are only supported as classifiers.
    pub causal_lm_class: Option<&'static str>,
    /// transformers' class of its classifiers.
    pub classifier_class: &'static str,
    pub(super) shape: fn(&Fields<'_>) -> Result<Shape>,
    /// Names of the tensors.
    pub names: Names,
}

impl Family {
    /// PEFT's name of the task of an adapter.
    pub(super) fn peft_task(&self, classifier: bool) -> &'static str {
        match (classifier, self.names.encoder) {
            (true, _) => "SEQ_CLS",
            (false, Some(_)) => "SEQ_2_SEQ_LM",
            (false, None) => "CAUSAL_LM",
        }
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// Names of a family's tensors, completed by `.weight` and `.bias`. `None`: the family has no such part.
#[derive(Debug)]
pub struct Names {
    /// Prefix of all of the base model's names.
    pub prefix: &'static str,
    pub embed: &'static str,
    /// Learned positions.
    pub positions: Option<&'static str>,
    /// Segment types; every token has type 0 here.
    pub token_types: Option<&'static str>,
    pub embed_norm: Option<&'static str>,
    /// Relative positions, and the norm over them.
    pub relative: Option<[&'static str; 2]>,
    /// Projections from the width of the embeddings to that of the layers and back, if the two differ.
    pub project: Option<[&'static str; 2]>,
    pub layers: &'static str,
    pub input_norm: &'static str,
    pub qkv: Qkv,
    /// Norms of the queries and of the keys.
    pub qk_norm: Option<QkNorm>,
    pub attention_out: &'static str,
    /// Layers with a state in the place of attention.
    pub mixing: Option<MixingNames>,
    /// Scores of the query heads in addition to those of their keys.
    pub sinks: Option<&'static str>,
    pub mlp_norm: &'static str,
    /// Norms of the outputs of attention and MLP.
    pub output_norms: Option<[&'static str; 2]>,
    /// Inputs of each layer in addition to its hidden states.
    pub layer_inputs: Option<LayerInputNames>,
    /// The factor of a layer's result.
    pub layer_scalar: Option<&'static str>,
    pub mlp_in: MlpIn,
    pub mlp_out: &'static str,
    /// Experts in the place of the MLP.
    pub experts: Option<ExpertNames>,
    pub final_norm: &'static str,
    /// Table of the bias by distance, within the first layer.
    pub relative_bias: Option<&'static str>,
    /// Attention of a decoder's layer to the encoder's hidden states.
    pub cross: Option<CrossNames>,
    /// Names of the encoder's stack, which shares the decoder's embedding.
    pub encoder: Option<&'static Names>,
    /// Full name of the LM head's weight in the files of a model; see [`Names::in_peft`].
    pub lm_head: &'static str,
    /// Whether linear weights are stored as `[in, out]` instead of `[out, in]`.
    pub transposed: bool,
    /// Default linear layers of low-rank adapters, as suffixes of their names: PEFT's default.
    pub lora_targets: &'static [&'static str],
    pub head: HeadNames,
    /// Name suffixes of unused tensors in old checkpoints: masks, rotary tables, position numbers.
    pub harmless: &'static [&'static str],
    /// Name prefixes of tensors that do not belong to the language model: images, multi-token prediction.
    pub others: &'static [&'static str],
}

impl HeadNames {
    /// The name of the weight with one row per label.
    pub(super) fn scores(&self) -> String {
        match self {
            Self::Score => "score.weight".into(),
            Self::Dense { out, .. } => format!("{out}.weight"),
        }
    }

    /// The names of the layers before the last one.
    pub(super) fn inner(&self) -> Vec<&'static str> {
        match *self {
            Self::Score => Vec::new(),
            Self::Dense { inner, norm, .. } => [inner].into_iter().chain(norm).collect(),
        }
    }
}

impl Names {
    /// transformers' name, which is also the name in PEFT's files, of the module or tensor with this name in a model's files. The LM
    /// head is `lm_head` in every family: transformers 5 renames GPT-NeoX's `embed_out` when it reads a model.
    pub fn in_peft<'n>(&self, name: &'n str) -> Cow<'n, str> {
        let rest = name.strip_prefix(self.lm_head.trim_end_matches(".weight"));
        match rest.filter(|rest| !self.lm_head.is_empty() && (rest.is_empty() || rest.starts_with('.'))) {
            Some(rest) => format!("{LM_HEAD}{rest}").into(),
            None => name.into(),
        }
    }

    /// PEFT's name of a module that is trained in full; `module` is the end of its name, in a model's files or in PEFT's files.
    pub fn saved_in_peft<'n>(&self, module: &'n str) -> &'n str {
        let selects_head = self.lm_head.trim_end_matches(".weight").ends_with(module);
        if selects_head && !LM_HEAD.ends_with(module) { LM_HEAD } else { module }
    }

    /// Whether the linear layer of this name is quantized when weights are quantized. As in transformers, experts with their router are not,
    /// and neither is the output of T5's MLPs, whose numbers are large.
    pub fn quantizes(&self, layer: &str) -> bool {
        !layer.ends_with(".wo") && !self.experts.as_ref().is_some_and(|experts| experts.routes(layer))
    }
}

/// Names of the inputs of each layer in addition to its hidden states.
#[derive(Debug, Clone, Copy)]
pub struct LayerInputNames {
    /// The table of embeddings, the projection of the model's embeddings, and the norm over it.
    pub table: &'static str,
    pub projection: &'static str,
    pub norm: &'static str,
    /// In a layer: the gate, the projection back, and the norm over its result.
    pub gate: &'static str,
    pub out: &'static str,
    pub out_norm: &'static str,
}

/// Names of a layer's attention to the encoder's hidden states.
#[derive(Debug, Clone, Copy)]
pub struct CrossNames {
    pub norm: &'static str,
    pub qkv: [&'static str; 3],
    pub out: &'static str,
}

/// Projections of queries, keys and values.
#[derive(Debug, Clone, Copy)]
pub enum Qkv {
    Separate([&'static str; 3]),
    /// One product: all queries, all keys, all values.
    Fused(&'static str),
    /// One product: query, key and value of each head in turn.
    FusedByHead(&'static str),
}

/// Norms of queries and keys.
#[derive(Debug, Clone, Copy)]
pub enum QkNorm {
    /// Over each head.
    ByHead([&'static str; 2]),
    /// Over all heads together.
    Whole([&'static str; 2]),
}

/// Input projections of the MLP.
#[derive(Debug, Clone, Copy)]
pub enum MlpIn {
    Up(&'static str),
    /// The activated gate times the up projection.
    Gated([&'static str; 2]),
    /// One product: gate, then up.
    GatedFused(&'static str),
}

/// Names of the tensors of experts.
#[derive(Debug, Clone, Copy)]
pub struct ExpertNames {
    pub router: &'static str,
    /// Prefix of the experts' numbers, or of the tensors with the weights of all experts.
    pub experts: &'static str,
    /// Gate and up projection of an expert. For stacked experts the first name is one tensor with both.
    pub inputs: [&'static str; 2],
    pub out: &'static str,
    /// An MLP in addition to the experts, and the gate of its output.
    pub shared: Option<[&'static str; 2]>,
    /// A bias of each expert that is added to its score for the choice.
    pub bias: Option<&'static str>,
    /// Whether and how one tensor has the weights of all experts.
    pub stacking: Option<Stacking>,
}

/// Weights of all experts in one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stacking {
    /// `[experts, in, out]`, where gate and up projections take turns, with biases in a tensor whose name ends with `_bias`; the router has a bias
    /// too (gpt-oss).
    InOut,
    /// `[experts, out, in]`, the gate and then the up projection, in addition to the layer's MLP (Gemma 4).
    Parallel {
        /// Factors of the router's input, by column, and of the weights, by expert.
        scales: [&'static str; 2],
        /// Norms of the MLP's output, of the experts' input and of their output.
        norms: [&'static str; 3],
    },
}

impl ExpertNames {
    /// Whether the tensor of this name has the weights of all experts of a layer.
    pub fn is_stack(&self, name: &str) -> bool {
        let ends =
            |part: &str| name.strip_suffix(part).is_some_and(|rest| rest.ends_with(&format!("{}.", self.experts)));
        self.stacking.is_some() && [self.inputs[0], self.out].into_iter().any(ends)
    }

    /// Whether layers with experts also have the MLP of other layers, and a router that is a linear layer in transformers too.
    pub fn are_parallel(&self) -> bool {
        matches!(self.stacking, Some(Stacking::Parallel { .. }))
    }

    /// Whether the layer or tensor of this name is part of an MLP, with or without experts, that gets no adapter. This holds in models in
    /// which experts take the place of MLPs.
    pub fn has(&self, layer: &str) -> bool {
        if self.are_parallel() {
            return self.is_stack(layer);
        }
        let module = self.router.split('.').next();
        layer.split('.').any(|part| Some(part) == module)
    }

    /// Whether the linear layer of this name is a router or part of an expert.
    fn routes(&self, layer: &str) -> bool {
        if self.are_parallel() {
            return false;
        }
        let module = layer.rsplit_once('.').map_or("", |(module, _)| module);
        let is_router = layer.strip_suffix(self.router).is_some_and(|rest| rest.ends_with('.'));
        is_router || module.contains(&format!(".{}.", self.experts))
    }
}

/// The head of a family's classifiers.
#[derive(Debug, Clone, Copy)]
pub enum HeadNames {
    /// A linear layer without bias, read at the last token: `score.weight`.
    Score,
    /// Two linear layers: a hidden layer, its activation, a norm if it has a name, then one row per label.
    Dense { inner: &'static str, activation: HeadActivation, norm: Option<&'static str>, out: &'static str },
}

/// The non-linearity of a two-layer head.
#[derive(Debug, Clone, Copy)]
pub enum HeadActivation {
    Tanh,
    Relu,
    Gelu,
}

/// Reads fields of a JSON object; errors name the file and the field.
pub(super) struct Fields<'a> {
    pub(super) path: &'a Path,
    pub(super) raw: &'a Map<String, Value>,
    pub(super) family: &'static Family,
}

impl Fields<'_> {
    pub(super) fn present(&self, name: &str) -> Option<&Value> {
        self.raw.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn wrong(&self, name: &str, expected: &str) -> Error {
        let found = self.raw.get(name).unwrap_or(&Value::Null);
        Error::invalid(self.path, format!("`{name}`: expected {expected}, found {}", brief(found)))
    }

    fn integer(&self, name: &str, least: i64, default: i64) -> Result<i64> {
        let most = if name.ends_with("layers") || name == "n_layer" { MOST_LAYERS } else { MOST };
        match self.present(name) {
            None => Ok(default),
            Some(value) => value
                .as_i64()
                .filter(|n| (least..=most).contains(n))
                .ok_or_else(|| self.wrong(name, &format!("an integer from {least} to {most}"))),
        }
    }

    /// An integer from 1, under the family's name of the field or under the common name.
    pub(super) fn size_as(&self, family_name: &str, common: &str, default: i64) -> Result<i64> {
        self.size(if self.present(family_name).is_some() { family_name } else { common }, default)
    }

    /// An integer from 1.
    pub(super) fn size(&self, name: &str, default: i64) -> Result<i64> {
        self.integer(name, 1, default)
    }

    /// An integer from 0.
    pub(super) fn count(&self, name: &str, default: i64) -> Result<i64> {
        self.integer(name, 0, default)
    }

    pub(super) fn number(&self, name: &str, default: f64) -> Result<f64> {
        let expected = || format!("a number of at most {LARGEST}");
        let number = self.present(name).map_or(Some(default), Value::as_f64);
        number.filter(|x| x.abs() <= LARGEST).ok_or_else(|| self.wrong(name, &expected()))
    }

    /// A number that has no default.
    pub(super) fn required(&self, name: &str) -> Result<f64> {
        if self.present(name).is_none() {
            return Err(self.wrong(name, "a number"));
        }
        self.number(name, 0.0)
    }

    /// A number above 0.
    pub(super) fn positive(&self, name: &str, default: Option<f64>) -> Result<f64> {
        let number = self.present(name).map_or(default, Value::as_f64);
        let expected = || format!("a number above 0, at most {LARGEST}");
        number.filter(|x| (1.0 / LARGEST..=LARGEST).contains(x)).ok_or_else(|| self.wrong(name, &expected()))
    }

    /// Any integer of at most 2^28.
    pub(super) fn whole(&self, name: &str, default: i64) -> Result<i64> {
        self.integer(name, -MOST, default)
    }

    /// A list of names, or names with bars between, in lower case; empty if there is none.
    pub(super) fn names(&self, name: &str) -> Result<Vec<String>> {
        let wrong = || self.wrong(name, "a list of names, or names with `|` between");
        let names = match self.present(name) {
            None => Vec::new(),
            Some(Value::String(text)) => text.split('|').map(str::to_string).collect(),
            Some(Value::Array(names)) => {
                names.iter().map(|name| name.as_str().map(str::to_string).ok_or_else(wrong)).collect::<Result<_>>()?
            }
            Some(_) => return Err(wrong()),
        };
        Ok(names.iter().map(|name| name.trim().to_lowercase()).collect())
    }

    /// A soft cap of logits: a number above 0, `null` for none.
    pub(super) fn cap(&self, name: &str, default: f64) -> Result<Option<f64>> {
        match self.raw.get(name) {
            Some(Value::Null) => Ok(None),
            _ => self.positive(name, Some(default)).map(Some),
        }
    }

    /// A window of attention: an integer from 1, `null` for none.
    pub(super) fn window(&self, name: &str, default: Option<i64>) -> Result<Option<i64>> {
        match self.raw.get(name) {
            Some(Value::Null) => Ok(None),
            None => Ok(default),
            Some(_) => self.size(name, 1).map(Some),
        }
    }

    /// The window of each layer, for the layers selected by `layer_types`, or, without that field, by `default`.
    pub(super) fn windows(
        &self,
        window: Option<i64>,
        layers: i64,
        default: impl Fn(i64) -> bool,
    ) -> Result<Vec<Option<i64>>> {
        let wrong = || {
            let expected = format!("{layers} names, each full_attention or sliding_attention");
            self.wrong("layer_types", &expected)
        };
        let sliding: Vec<bool> = match self.present("layer_types") {
            None => (0..layers).map(default).collect(),
            Some(Value::Array(kinds)) if kinds.len() as i64 == layers => kinds
                .iter()
                .map(|kind| match kind.as_str() {
                    Some("sliding_attention") => Ok(true),
                    Some("full_attention") => Ok(false),
                    _ => Err(wrong()),
                })
                .collect::<Result<_>>()?,
            Some(_) => return Err(wrong()),
        };
        Ok(sliding.into_iter().map(|sliding| window.filter(|_| sliding)).collect())
    }

    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        self.present(name).map_or(Ok(default), |v| v.as_bool().ok_or_else(|| self.wrong(name, "true or false")))
    }

    /// Checks a switch of which only one value is supported.
    pub(super) fn must_be(&self, name: &str, expected: bool) -> Result<()> {
        if self.flag(name, expected)? == expected { Ok(()) } else { Err(self.wrong(name, &format!("{expected}"))) }
    }

    /// As [`Fields::must_be`], for a switch whose default is the other value.
    pub(super) fn must_be_set(&self, name: &str, expected: bool) -> Result<()> {
        if self.flag(name, !expected)? == expected { Ok(()) } else { Err(self.wrong(name, &format!("{expected}"))) }
    }

    /// As [`Fields::must_be`], for a string.
    pub(super) fn must_be_text(&self, name: &str, expected: &str) -> Result<()> {
        match self.present(name).map(Value::as_str) {
            None => Ok(()),
            Some(found) if found == Some(expected) => Ok(()),
            Some(_) => Err(self.wrong(name, expected)),
        }
    }

    pub(super) fn activation(&self, name: &str, default: &str) -> Result<Activation> {
        let activation = self.present(name).map_or(Some(default), Value::as_str);
        activation.and_then(Activation::named).ok_or_else(|| self.wrong(name, &format!("one of {ACTIVATIONS}")))
    }

    /// The activation that T5's `feed_forward_proj` names, or else `default`, and whether a second projection gates it.
    pub(super) fn feed_forward(&self, default: &str) -> Result<(Activation, bool)> {
        let name = "feed_forward_proj";
        let text = self.present(name).map_or(Some(default), Value::as_str);
        let read = text.and_then(|text| match text.strip_prefix("gated-") {
            // As in transformers, where gated-gelu means the approximation.
            Some("gelu") => Some((Activation::GeluTanh, true)),
            Some(gated) => Activation::named(gated).map(|activation| (activation, true)),
            None => Activation::named(text).map(|activation| (activation, false)),
        });
        read.ok_or_else(|| self.wrong(name, &format!("one of {ACTIVATIONS}, or one of them after gated-")))
    }

    /// Whether `architectures` names a sequence classifier.
    pub(super) fn names_classifier(&self) -> bool {
        let names = self.present("architectures").and_then(Value::as_array);
        names.into_iter().flatten().filter_map(Value::as_str).any(|name| name.ends_with(CLASSIFIER))
    }

    pub(super) fn ids(&self, name: &str) -> Result<Vec<i64>> {
        let wrong = || self.wrong(name, "a token id or a list of token ids");
        match self.present(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(|id| id.as_i64().ok_or_else(wrong)).collect(),
            Some(id) => Ok(vec![id.as_i64().ok_or_else(wrong)?]),
        }
    }
}

/// Shortens a JSON value for an error message.
pub(super) fn brief(value: &Value) -> String {
    rlhf_base::weights::brief(&value.to_string()).into_owned()
}
