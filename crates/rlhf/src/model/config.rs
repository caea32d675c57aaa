//! `config.json` as transformers 4 and 5 write it, resolved into what the decoder needs: nothing left to interpret.

use crate::weights::{pretty, read_json, write_text};
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::Path;

/// A family of decoder models: what differs between them is data and the names of their tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// GPT-2 (`gpt2`): learned positions, tied head, weights stored as `[in, out]`.
    Gpt2,
    /// GPT-NeoX and Pythia (`gpt_neox`): partial rotary positions, parallel residual, fused QKV.
    GptNeox,
    /// Llama 1 and 2, and what shares their form (`llama`): rotary positions, RMS norm, gated MLP, grouped KV heads.
    Llama,
}

impl Family {
    const ALL: [(&'static str, Family); 3] =
        [("gpt2", Family::Gpt2), ("gpt_neox", Family::GptNeox), ("llama", Family::Llama)];

    /// The class name stem of transformers: `GPT2`, `GPTNeoX`, `Llama`.
    fn class(self) -> &'static str {
        match self {
            Family::Gpt2 => "GPT2",
            Family::GptNeox => "GPTNeoX",
            Family::Llama => "Llama",
        }
    }

    /// `GPT2LMHeadModel` is the one name that breaks the pattern.
    fn causal_lm_class(self) -> String {
        let suffix = if self == Family::Gpt2 { "LMHeadModel" } else { "ForCausalLM" };
        format!("{}{suffix}", self.class())
    }
}

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

/// Rotary position embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// The base of the angles' geometric series.
    pub theta: f64,
    /// How many of a head's dimensions turn.
    pub dim: i64,
}

/// `config.json`: the shape of a model, and the file as it was read, which goes along when the model is saved.
///
/// The shape can be read through this type and not changed: a saved file would no longer say what the weights are.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    shape: Shape,
    raw: Map<String, Value>,
}

impl std::ops::Deref for ModelConfig {
    type Target = Shape;

    fn deref(&self) -> &Shape {
        &self.shape
    }
}

/// The shape of a decoder, resolved: every field has its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// The family.
    pub family: Family,
    /// Rows of the embedding; may exceed the tokenizer's.
    pub vocab_size: i64,
    /// Width of the residual stream.
    pub hidden_size: i64,
    /// Width inside the MLP.
    pub intermediate_size: i64,
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
    /// Added to the variance in the norms.
    pub norm_eps: f64,
    /// The MLP's non-linearity.
    pub activation: Activation,
    /// Rotary positions; `None` means learned ones.
    pub rope: Option<Rope>,
    /// Whether attention and MLP read the same input (GPT-NeoX) or follow one another.
    pub parallel_residual: bool,
    /// Whether the attention's projections have biases.
    pub attention_bias: bool,
    /// Whether the MLP's projections have biases.
    pub mlp_bias: bool,
    /// Whether the LM head is the embedding.
    pub tie_word_embeddings: bool,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
    /// The ids that end a text, first the one to append.
    pub eos_token_ids: Vec<i64>,
    /// The classes transformers should load the folder with.
    pub architectures: Vec<String>,
    /// The number of labels, where this is a classifier.
    pub num_labels: usize,
}

/// Far above any model's sizes, and small enough that their products do not overflow.
const MOST: i64 = 1 << 28;

/// The most layers; a hostile file could otherwise keep us building for hours.
const MOST_LAYERS: i64 = 10_000;

/// Reads fields of a JSON object; errors name the file and the field.
struct Fields<'a> {
    path: &'a Path,
    raw: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn present(&self, name: &str) -> Option<&Value> {
        self.raw.get(name).filter(|value| !value.is_null())
    }

    fn wrong(&self, name: &str, expected: &str) -> Error {
        let found = self.raw.get(name).unwrap_or(&Value::Null);
        Error::invalid(self.path, format!("`{name}`: expected {expected}, found {found}"))
    }

    fn size(&self, name: &str, default: Option<i64>) -> Result<i64> {
        match (self.present(name), default) {
            (None, Some(default)) => Ok(default),
            (value, _) => value
                .and_then(Value::as_i64)
                .filter(|n| (1..=MOST).contains(n))
                .ok_or_else(|| self.wrong(name, &format!("an integer from 1 to {MOST}"))),
        }
    }

    fn number(&self, name: &str, default: f64) -> Result<f64> {
        self.present(name).map_or(Ok(default), |v| v.as_f64().ok_or_else(|| self.wrong(name, "a number")))
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool> {
        self.present(name).map_or(Ok(default), |v| v.as_bool().ok_or_else(|| self.wrong(name, "true or false")))
    }

    /// A switch that this decoder knows in one position only.
    fn must_be(&self, name: &str, expected: bool) -> Result<()> {
        if self.flag(name, expected)? == expected { Ok(()) } else { Err(self.wrong(name, &format!("{expected}"))) }
    }

    fn activation(&self, name: &str, default: &str) -> Result<Activation> {
        match self.present(name).map_or(Some(default), Value::as_str) {
            Some("gelu") => Ok(Activation::Gelu),
            Some("gelu_new" | "gelu_fast" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
            Some("silu" | "swish") => Ok(Activation::Silu),
            Some("relu") => Ok(Activation::Relu),
            _ => Err(self.wrong(name, "one of gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, silu, swish, relu")),
        }
    }

    /// Rotary settings: transformers 5 keeps them in `rope_parameters`, transformers 4 beside the other fields.
    fn rope(&self, head_dim: i64, old_theta: &str, old_fraction: Option<&str>, fraction_default: f64) -> Result<Rope> {
        let empty = Map::new();
        let nested = match self.present("rope_parameters") {
            None => &empty,
            Some(value) => value.as_object().ok_or_else(|| self.wrong("rope_parameters", "an object"))?,
        };
        for (holder, object) in [
            ("rope_parameters", Some(nested)),
            ("rope_scaling", self.present("rope_scaling").and_then(Value::as_object)),
        ] {
            let kind = object.and_then(|o| o.get("rope_type").or_else(|| o.get("type"))).and_then(Value::as_str);
            if kind.is_some_and(|kind| kind != "default") {
                return Err(self.wrong(holder, "the rope type `default` (others are not supported yet)"));
            }
        }
        let nested = Fields { path: self.path, raw: nested };
        let theta = nested.number("rope_theta", self.number(old_theta, self.number("rope_theta", 10000.0)?)?)?;
        let old_fraction = old_fraction.map_or(Ok(fraction_default), |name| self.number(name, fraction_default))?;
        let fraction = nested.number("partial_rotary_factor", self.number("partial_rotary_factor", old_fraction)?)?;
        let dim = (head_dim as f64 * fraction) as i64;
        if !(dim > 0 && dim % 2 == 0 && dim <= head_dim && theta > 0.0) {
            let message = format!("rotary positions: expected an even share of {head_dim} dimensions, found {dim}");
            return Err(Error::invalid(self.path, message));
        }
        Ok(Rope { theta, dim })
    }

    fn ids(&self, name: &str) -> Result<Vec<i64>> {
        let wrong = || self.wrong(name, "a token id or a list of token ids");
        match self.present(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(|id| id.as_i64().ok_or_else(wrong)).collect(),
            Some(id) => Ok(vec![id.as_i64().ok_or_else(wrong)?]),
        }
    }
}

/// The error for a model folder without one of its files; names of the hub get a hint.
pub(crate) fn no_such_file(dir: &Path, name: &str) -> Error {
    let found = match dir {
        dir if dir.is_dir() => "none in this folder",
        dir if dir.exists() => "a file in place of the folder",
        _ => "no such folder (nor is it the name of a model on the hub, as in `EleutherAI/pythia-160m`)",
    };
    Error::invalid(dir, format!("expected a model folder with a {name}, found {found}"))
}

impl ModelConfig {
    /// Reads `dir/config.json`.
    ///
    /// # Errors
    /// If it is not there, is not JSON, or describes what this decoder does not know; the message names the field.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        if !path.is_file() {
            return Err(no_such_file(dir, "config.json"));
        }
        Self::from_file(&path)
    }

    /// Reads a configuration file; errors as [`ModelConfig::from_dir`].
    pub fn from_file(path: &Path) -> Result<Self> {
        let Value::Object(raw) = read_json(path)? else {
            return Err(Error::invalid(path, "expected a JSON object"));
        };
        let f = Fields { path, raw: &raw };
        let known = Family::ALL.map(|(name, _)| name).join(", ");
        let family = f
            .present("model_type")
            .and_then(Value::as_str)
            .and_then(|found| Family::ALL.iter().find(|(name, _)| *name == found))
            .map(|(_, family)| *family)
            .ok_or_else(|| f.wrong("model_type", &format!("one of {known}")))?;
        let mut shape = match family {
            Family::Gpt2 => Shape::gpt2(&f)?,
            Family::GptNeox => Shape::gpt_neox(&f)?,
            Family::Llama => Shape::llama(&f)?,
        };
        shape.initializer_range = f.number("initializer_range", 0.02)?;
        shape.eos_token_ids = f.ids("eos_token_id")?;
        shape.architectures = f
            .present("architectures")
            .and_then(Value::as_array)
            .map(|names| names.iter().filter_map(|name| Some(name.as_str()?.to_string())).collect())
            .unwrap_or_default();
        shape.num_labels = f.present("id2label").and_then(Value::as_object).map_or(2, Map::len);
        shape.check(path)?;
        Ok(Self { shape, raw })
    }
}

impl Shape {
    fn gpt2(f: &Fields<'_>) -> Result<Self> {
        f.must_be("scale_attn_weights", true)?;
        f.must_be("scale_attn_by_inverse_layer_idx", false)?;
        f.must_be("add_cross_attention", false)?;
        let hidden_size = f.size("n_embd", Some(768))?;
        let heads = f.size("n_head", Some(12))?;
        Ok(Self {
            intermediate_size: f.size("n_inner", Some(4 * hidden_size))?,
            num_hidden_layers: f.size("n_layer", Some(12))?,
            max_position_embeddings: f.size("n_positions", Some(1024))? as usize,
            norm_eps: f.number("layer_norm_epsilon", 1e-5)?,
            activation: f.activation("activation_function", "gelu_new")?,
            tie_word_embeddings: f.flag("tie_word_embeddings", true)?,
            attention_bias: true,
            mlp_bias: true,
            ..Self::base(Family::Gpt2, f.size("vocab_size", Some(50257))?, hidden_size, heads)
        })
    }

    fn gpt_neox(f: &Fields<'_>) -> Result<Self> {
        let hidden_size = f.size("hidden_size", Some(6144))?;
        let heads = f.size("num_attention_heads", Some(64))?;
        Ok(Self {
            intermediate_size: f.size("intermediate_size", Some(24576))?,
            num_hidden_layers: f.size("num_hidden_layers", Some(44))?,
            max_position_embeddings: f.size("max_position_embeddings", Some(2048))? as usize,
            norm_eps: f.number("layer_norm_eps", 1e-5)?,
            activation: f.activation("hidden_act", "gelu")?,
            rope: Some(f.rope(hidden_size / heads, "rotary_emb_base", Some("rotary_pct"), 0.25)?),
            parallel_residual: f.flag("use_parallel_residual", true)?,
            tie_word_embeddings: f.flag("tie_word_embeddings", false)?,
            attention_bias: f.flag("attention_bias", true)?,
            mlp_bias: true,
            ..Self::base(Family::GptNeox, f.size("vocab_size", Some(50432))?, hidden_size, heads)
        })
    }

    fn llama(f: &Fields<'_>) -> Result<Self> {
        let hidden_size = f.size("hidden_size", Some(4096))?;
        let heads = f.size("num_attention_heads", Some(32))?;
        let head_dim = f.size("head_dim", Some(hidden_size / heads))?;
        Ok(Self {
            intermediate_size: f.size("intermediate_size", Some(11008))?,
            num_hidden_layers: f.size("num_hidden_layers", Some(32))?,
            num_key_value_heads: f.size("num_key_value_heads", Some(heads))?,
            head_dim,
            max_position_embeddings: f.size("max_position_embeddings", Some(2048))? as usize,
            norm_eps: f.number("rms_norm_eps", 1e-6)?,
            activation: f.activation("hidden_act", "silu")?,
            rope: Some(f.rope(head_dim, "rope_theta", None, 1.0)?),
            tie_word_embeddings: f.flag("tie_word_embeddings", false)?,
            attention_bias: f.flag("attention_bias", false)?,
            mlp_bias: f.flag("mlp_bias", false)?,
            ..Self::base(Family::Llama, f.size("vocab_size", Some(32000))?, hidden_size, heads)
        })
    }

    /// What the families' readers fill in further.
    fn base(family: Family, vocab_size: i64, hidden_size: i64, heads: i64) -> Self {
        Self {
            family,
            vocab_size,
            hidden_size,
            intermediate_size: 0,
            num_hidden_layers: 0,
            num_attention_heads: heads,
            num_key_value_heads: heads,
            head_dim: hidden_size / heads,
            max_position_embeddings: 0,
            norm_eps: 0.0,
            activation: Activation::Gelu,
            rope: None,
            parallel_residual: false,
            attention_bias: false,
            mlp_bias: false,
            tie_word_embeddings: false,
            initializer_range: 0.02,
            eos_token_ids: Vec::new(),
            architectures: Vec::new(),
            num_labels: 2,
        }
    }

    fn check(&self, path: &Path) -> Result<()> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if self.num_hidden_layers > MOST_LAYERS {
            let message = format!("expected at most {MOST_LAYERS} layers, found {}", self.num_hidden_layers);
            return Err(Error::invalid(path, message));
        }
        if self.family != Family::Llama && self.head_dim * heads != self.hidden_size {
            let message = format!("hidden size {}: expected a multiple of {heads} attention heads", self.hidden_size);
            return Err(Error::invalid(path, message));
        }
        if heads % kv_heads != 0 {
            let message = format!("{heads} attention heads: expected a multiple of {kv_heads} key-value heads");
            return Err(Error::invalid(path, message));
        }
        Ok(())
    }

    /// Whether the folder says it holds a sequence classifier (a reward or value model).
    pub fn is_sequence_classifier(&self) -> bool {
        self.architectures.iter().any(|name| name.ends_with("ForSequenceClassification"))
    }
}

impl ModelConfig {
    /// The configuration for saving a causal LM with these token ids.
    pub(crate) fn for_causal_lm(&self, eos: Option<i64>, pad: Option<i64>) -> Self {
        let mut config = self.with_tokens(eos, pad);
        config.shape.architectures = vec![self.family.causal_lm_class()];
        config.raw.insert("architectures".into(), json!(config.architectures));
        for key in ["id2label", "label2id", "problem_type"] {
            config.raw.remove(key);
        }
        config
    }

    /// The configuration for saving a classifier with one label: transformers needs a pad id to find the last token, so
    /// where there is none it is eos.
    pub(crate) fn for_sequence_classifier(&self, eos: Option<i64>, pad: Option<i64>) -> Self {
        let own = self.raw.get("pad_token_id").and_then(Value::as_i64);
        let mut config = self.with_tokens(eos, pad.or(own).or(eos));
        config.shape.architectures = vec![format!("{}ForSequenceClassification", self.family.class())];
        config.shape.num_labels = 1;
        config.raw.insert("architectures".into(), json!(config.architectures));
        config.raw.insert("id2label".into(), json!({"0": "LABEL_0"}));
        config.raw.insert("label2id".into(), json!({"LABEL_0": 0}));
        config
    }

    fn with_tokens(&self, eos: Option<i64>, pad: Option<i64>) -> Self {
        let mut config = self.clone();
        if let (Some(eos), true) = (eos, self.eos_token_ids.is_empty()) {
            config.shape.eos_token_ids = vec![eos];
            config.raw.insert("eos_token_id".into(), json!(eos));
        }
        if let Some(pad) = pad {
            config.raw.insert("pad_token_id".into(), json!(pad));
        }
        // What we write is f32, whatever was read.
        let dtype = if config.raw.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        config.raw.insert(dtype.into(), json!("float32"));
        config
    }

    /// Writes `dir/config.json`: what was read, with the fields that changed.
    pub(crate) fn save(&self, dir: &Path) -> Result<()> {
        write_text(&dir.join("config.json"), &pretty(&Value::Object(self.raw.clone())))
    }
}
