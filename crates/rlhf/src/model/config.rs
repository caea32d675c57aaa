//! `config.json` as transformers 4 and 5 write it, resolved into the [`Shape`] that the decoder needs.

use super::families::{FAMILIES, Family};
use crate::weights::{no_such_file, pretty, read_json, write_text};
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::Path;
use tch::Kind;

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
    /// Base of the geometric series of the angles.
    pub theta: f64,
    /// Number of a head's dimensions that are rotated.
    pub dim: i64,
    /// Scaling of the angles for texts longer than the model was pretrained on.
    pub scaling: RopeScaling,
}

/// Scaling of rotary angles for longer texts; named as transformers' `rope_type`.
#[derive(Debug, Clone, Copy, PartialEq)]
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
    /// As `Pre`, and after attention and MLP before their sums (Gemma 2).
    Sandwich,
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

/// `config.json`: the shape of a model, and the content of the file, which is saved with the model.
///
/// The shape is read-only, so that a saved file always describes the weights.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    shape: Shape,
    raw: Map<String, Value>,
    /// The `generation_config.json` beside it.
    generation: Map<String, Value>,
}

impl std::ops::Deref for ModelConfig {
    type Target = Shape;

    fn deref(&self) -> &Shape {
        &self.shape
    }
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
    /// Number of segment types of the embedding; 0: none.
    pub token_types: i64,
    /// Factor of the embeddings.
    pub embedding_scale: f64,
    /// Kind of the norms.
    pub norm: NormKind,
    /// Added to the variance in the norms.
    pub norm_eps: f64,
    /// Positions of the norms.
    pub order: Order,
    /// The MLP's non-linearity.
    pub activation: Activation,
    /// Rotary positions; `None` means learned ones.
    pub rope: Option<Rope>,
    /// Whether a token attends only to itself and the tokens before it.
    pub causal: bool,
    /// Number of tokens, itself included, that a token attends to in each layer; `None`: all.
    pub windows: Vec<Option<i64>>,
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
    /// Whether the MLP's projections have biases.
    pub mlp_bias: bool,
    /// Whether the LM head is the embedding.
    pub tie_word_embeddings: bool,
    /// Standard deviation of newly initialized weights.
    pub initializer_range: f64,
    /// Whether the initial weights of projections into the residual stream shrink with the depth.
    pub scale_residual_init: bool,
    /// The ids that end a text; the first is appended to texts.
    pub eos_token_ids: Vec<i64>,
    /// The classes with which transformers loads the folder.
    pub architectures: Vec<String>,
    /// The names of a classifier's labels.
    pub labels: Vec<String>,
}

/// Maximum of a size: far above any model's, and small enough that products do not overflow.
const MOST: i64 = 1 << 28;

/// Maximum of any other number: far above any model's, and small enough that the ratio of two is an f32.
const LARGEST: f64 = 1e15;

/// Names of encoder-decoders whose files do not state it.
const ENCODER_DECODERS: [&str; 12] = [
    "t5",
    "mt5",
    "umt5",
    "longt5",
    "switch_transformers",
    "bart",
    "mbart",
    "pegasus",
    "marian",
    "m2m_100",
    "led",
    "blenderbot",
];

/// Maximum number of layers, so that a hostile file cannot make building take hours.
const MOST_LAYERS: i64 = 10_000;

/// Reads fields of a JSON object; errors name the file and the field.
pub(super) struct Fields<'a> {
    path: &'a Path,
    raw: &'a Map<String, Value>,
    pub(super) family: &'static Family,
}

/// Names of the rotary settings in files of transformers before version 5.
pub(super) struct RopeKeys {
    pub(super) theta: &'static str,
    /// Fraction of a head's dimensions that is rotated.
    pub(super) fraction: &'static str,
    pub(super) default_fraction: f64,
}

impl Fields<'_> {
    fn present(&self, name: &str) -> Option<&Value> {
        self.raw.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn wrong(&self, name: &str, expected: &str) -> Error {
        let found = self.raw.get(name).unwrap_or(&Value::Null);
        Error::invalid(self.path, format!("`{name}`: expected {expected}, found {}", brief(found)))
    }

    fn integer(&self, name: &str, least: i64, default: i64) -> Result<i64> {
        match self.present(name) {
            None => Ok(default),
            Some(value) => value
                .as_i64()
                .filter(|n| (least..=MOST).contains(n))
                .ok_or_else(|| self.wrong(name, &format!("an integer from {least} to {MOST}"))),
        }
    }

    /// An integer from 1 under the family's own name, or the common name.
    pub(super) fn size_as(&self, own: &str, common: &str, default: i64) -> Result<i64> {
        self.size(if self.present(own).is_some() { own } else { common }, default)
    }

    /// Maximum text length in tokens with rotary positions trained on `positions` tokens.
    pub(super) fn longest(positions: i64, rope: &Rope) -> usize {
        match rope.scaling {
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor, .. } => {
                (positions as f64 * factor) as usize
            }
            RopeScaling::Default | RopeScaling::Llama3 { .. } => positions as usize,
        }
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
        let found = self.present(name).map_or(Some(default), Value::as_f64);
        found.filter(|x| x.abs() <= LARGEST).ok_or_else(|| self.wrong(name, &expected()))
    }

    /// A number above 0.
    pub(super) fn positive(&self, name: &str, default: Option<f64>) -> Result<f64> {
        let found = self.present(name).map_or(default, Value::as_f64);
        let expected = || format!("a number above 0, at most {LARGEST}");
        found.filter(|x| (1.0 / LARGEST..=LARGEST).contains(x)).ok_or_else(|| self.wrong(name, &expected()))
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

    /// As [`Fields::must_be`], for a string.
    pub(super) fn must_be_text(&self, name: &str, expected: &str) -> Result<()> {
        match self.present(name).map(Value::as_str) {
            None => Ok(()),
            Some(found) if found == Some(expected) => Ok(()),
            Some(_) => Err(self.wrong(name, expected)),
        }
    }

    pub(super) fn activation(&self, name: &str, default: &str) -> Result<Activation> {
        match self.present(name).map_or(Some(default), Value::as_str) {
            Some("gelu" | "gelu_python") => Ok(Activation::Gelu),
            Some("gelu_new" | "gelu_fast" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
            Some("silu" | "swish") => Ok(Activation::Silu),
            Some("relu") => Ok(Activation::Relu),
            _ => Err(self.wrong(name, "one of gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, silu, swish, relu")),
        }
    }

    /// Rotary settings. transformers 5 stores them in `rope_parameters`, transformers 4 among the other fields and in
    /// `rope_scaling`.
    pub(super) fn rope(&self, head_dim: i64, old: &RopeKeys) -> Result<Rope> {
        let empty = Map::new();
        let nested = |holder: &'static str| match self.present(holder) {
            None => Ok(&empty),
            Some(value) => value.as_object().ok_or_else(|| self.wrong(holder, "an object")),
        };
        let (new, scaling) = (nested("rope_parameters")?, nested("rope_scaling")?);
        if !new.is_empty() && !scaling.is_empty() && new != scaling {
            return Err(self.wrong("rope_scaling", "none beside `rope_parameters`, or the same"));
        }
        let within = |raw| Fields { path: self.path, raw, family: self.family };
        let theta = within(new).number("rope_theta", self.number(old.theta, self.number("rope_theta", 10000.0)?)?)?;
        let fraction = "partial_rotary_factor";
        let old_fraction = self.number(old.fraction, self.number(fraction, old.default_fraction)?)?;
        let fraction = within(new).number(fraction, old_fraction)?;
        let dim = (head_dim as f64 * fraction) as i64;
        if !(dim > 0 && dim % 2 == 0 && dim <= head_dim && theta > 0.0) {
            let message = format!("rotary positions: expected an even share of {head_dim} dimensions, found {dim}");
            return Err(Error::invalid(self.path, message));
        }
        let (holder, object) = if new.is_empty() { ("rope_scaling", scaling) } else { ("rope_parameters", new) };
        let scaling = self.rope_scaling(holder, &within(object))?;
        if matches!(scaling, RopeScaling::Dynamic { .. }) && dim <= 2 {
            let message = format!("dynamic rotary positions: expected more than 2 dimensions, found {dim}");
            return Err(Error::invalid(self.path, message));
        }
        Ok(Rope { theta, dim, scaling })
    }

    fn rope_scaling(&self, holder: &str, f: &Fields<'_>) -> Result<RopeScaling> {
        let kind = f.present("rope_type").or_else(|| f.present("type")).map_or(Some("default"), Value::as_str);
        let factor = || f.positive("factor", None);
        let original = || -> Result<f64> {
            let longest = self.positive("max_position_embeddings", Some(2048.0))?;
            f.positive("original_max_position_embeddings", Some(longest))
        };
        Ok(match kind {
            Some("default") => RopeScaling::Default,
            Some("linear") => RopeScaling::Linear { factor: factor()? },
            Some("dynamic") => RopeScaling::Dynamic {
                factor: factor()?,
                original: self.positive("max_position_embeddings", Some(2048.0))?,
            },
            Some("llama3") => {
                let (low, high) = (f.positive("low_freq_factor", None)?, f.positive("high_freq_factor", None)?);
                if low >= high {
                    return Err(f.wrong("low_freq_factor", &format!("a number below high_freq_factor = {high}")));
                }
                RopeScaling::Llama3 {
                    factor: factor()?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original: original()?,
                }
            }
            _ => return Err(self.wrong(holder, "a rope_type of default, linear, dynamic or llama3")),
        })
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

impl ModelConfig {
    /// Reads `dir/config.json`.
    ///
    /// # Errors
    /// If it is missing, is not JSON, or describes an unsupported model; the message names the field.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        if !path.is_file() {
            return Err(no_such_file(dir, "config.json"));
        }
        let mut config = Self::from_file(&path)?;
        config.read_generation(dir)?;
        Ok(config)
    }

    /// Reads `dir/generation_config.json`, if it exists.
    ///
    /// # Errors
    /// If it is not a JSON object.
    pub(super) fn read_generation(&mut self, dir: &Path) -> Result<()> {
        let path = dir.join("generation_config.json");
        if path.is_file() {
            let Value::Object(generation) = read_json(&path)? else {
                return Err(Error::invalid(&path, "expected a JSON object"));
            };
            self.generation = generation;
        }
        Ok(())
    }

    /// The model's default generation settings, from `generation_config.json`; empty if there is none.
    pub fn generation_settings(&self) -> &Map<String, Value> {
        &self.generation
    }

    /// Replaces the generation settings of `generation_config.json` by `settings`; token ids are kept.
    pub(super) fn set_generation(&mut self, settings: Map<String, Value>) {
        let stays =
            |name: &str| ["bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"].contains(&name);
        self.generation.retain(|name, _| stays(name));
        self.generation.extend(settings);
    }

    /// Reads a configuration file; errors as [`ModelConfig::from_dir`].
    pub fn from_file(path: &Path) -> Result<Self> {
        let Value::Object(raw) = read_json(path)? else {
            return Err(Error::invalid(path, "expected a JSON object"));
        };
        let family = family(path, &raw)?;
        let f = Fields { path, raw: &raw, family };
        if f.present("quantization_config").is_some() {
            return Err(f.wrong("quantization_config", "none: quantised weights are not supported"));
        }
        let mut shape = (family.shape)(&f)?;
        if shape.causal {
            f.must_be("is_causal", true)?;
        }
        shape.initializer_range = f.number("initializer_range", shape.initializer_range)?;
        shape.eos_token_ids = f.ids("eos_token_id")?;
        shape.architectures = f
            .present("architectures")
            .and_then(Value::as_array)
            .map(|names| names.iter().filter_map(|name| Some(name.as_str()?.to_string())).collect())
            .unwrap_or_default();
        // The labels of a language model are not used.
        shape.labels = match labels(&f) {
            Err(error) if shape.is_sequence_classifier() => return Err(error),
            labels => labels.unwrap_or_default(),
        };
        shape.check(path)?;
        Ok(Self { shape, raw, generation: Map::new() })
    }
}

/// Returns the family named by `model_type`.
fn family(path: &Path, raw: &Map<String, Value>) -> Result<&'static Family> {
    let found = raw.get("model_type").unwrap_or(&Value::Null);
    if let Some(family) = FAMILIES.iter().find(|family| found == family.name) {
        return Ok(family);
    }
    let known: Vec<_> = FAMILIES.iter().map(|family| family.name).collect();
    let found = match raw.get("is_encoder_decoder") {
        Some(Value::Bool(true)) => format!("{}, an encoder-decoder, which is not supported yet", brief(found)),
        _ if ENCODER_DECODERS.iter().any(|name| found == name) => {
            format!("{}, an encoder-decoder, which is not supported yet", brief(found))
        }
        _ => brief(found),
    };
    Err(Error::invalid(path, format!("`model_type`: expected one of {}, found {found}", known.join(", "))))
}

/// The names of the labels in order; transformers' default is two labels.
fn labels(f: &Fields<'_>) -> Result<Vec<String>> {
    let Some(names) = f.present("id2label") else {
        let count = f.size("num_labels", 2)?.min(MOST_LAYERS);
        return Ok((0..count).map(|i| format!("LABEL_{i}")).collect());
    };
    let wrong = || f.wrong("id2label", "an object of label names by their number, from \"0\"");
    let names = names.as_object().filter(|names| !names.is_empty()).ok_or_else(wrong)?;
    (0..names.len()).map(|i| Ok(names.get(&i.to_string()).and_then(Value::as_str).ok_or_else(wrong)?.into())).collect()
}

/// Shortens a JSON value for an error message.
fn brief(value: &Value) -> String {
    crate::weights::brief(&value.to_string()).into_owned()
}

impl Shape {
    /// Whether a token's rotary angles depend on the length of its text.
    pub(crate) fn has_length_dependent_rope(&self) -> bool {
        self.rope.is_some_and(|rope| matches!(rope.scaling, RopeScaling::Dynamic { .. }))
    }

    /// The base that the families' readers modify: a decoder with biases, layer norms and learned positions.
    pub(super) fn biased(f: &Fields<'_>, vocab_size: i64, hidden_size: i64, heads: i64, layers: i64) -> Result<Self> {
        if layers > MOST_LAYERS {
            return Err(Error::invalid(f.path, format!("expected at most {MOST_LAYERS} layers, found {layers}")));
        }
        Ok(Self {
            family: f.family,
            vocab_size,
            embedding_size: hidden_size,
            hidden_size,
            intermediate_size: 0,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: heads,
            head_dim: hidden_size / heads,
            max_position_embeddings: f.size("max_position_embeddings", 2048)? as usize,
            position_offset: 0,
            token_types: 0,
            embedding_scale: 1.0,
            norm: NormKind::Layer,
            norm_eps: 1e-5,
            order: Order::Pre,
            activation: Activation::Gelu,
            rope: None,
            causal: true,
            windows: vec![None; layers as usize],
            attention_scale: ((hidden_size / heads) as f64).powf(-0.5),
            attention_softcap: None,
            final_softcap: None,
            qkv_bias: true,
            attention_out_bias: true,
            mlp_bias: true,
            tie_word_embeddings: false,
            initializer_range: 0.02,
            scale_residual_init: false,
            eos_token_ids: Vec::new(),
            architectures: Vec::new(),
            labels: Vec::new(),
        })
    }

    fn check(&self, path: &Path) -> Result<()> {
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
        if self.head_dim == 0 || !self.attention_scale.is_finite() {
            return Err(Error::invalid(path, format!("{heads} attention heads: expected at most the hidden size")));
        }
        Ok(())
    }

    /// Whether the configuration is that of a sequence classifier (a reward or value model).
    pub fn is_sequence_classifier(&self) -> bool {
        self.architectures.iter().any(|name| name.ends_with("ForSequenceClassification"))
    }
}

impl ModelConfig {
    /// Checks that the family has language models; the error names `place`.
    pub(crate) fn check_causal_lm(&self, place: &Path) -> Result<()> {
        match self.family.causal_lm_class {
            Some(_) => Ok(()),
            None => {
                let message = format!("expected a language model, found `{}`, an encoder", self.family.name);
                Err(Error::invalid(place, message))
            }
        }
    }

    /// Unties the LM head from the embedding.
    pub(crate) fn untie(&mut self) {
        self.shape.tie_word_embeddings = false;
        self.raw.insert("tie_word_embeddings".into(), json!(false));
    }

    /// The content of `generation_config.json` for saving; if there was none, a note that all comes from the configuration.
    pub(crate) fn generation(&self) -> Map<String, Value> {
        if self.generation.is_empty() {
            Map::from_iter([("_from_model_config".into(), true.into())])
        } else {
            self.generation.clone()
        }
    }

    /// The configuration for saving a causal LM with these token ids.
    pub(crate) fn for_causal_lm(&self, eos: Option<i64>, pad: Option<i64>) -> Self {
        let mut config = self.with_tokens(eos, pad);
        config.shape.architectures = vec![self.family.causal_lm_class.unwrap_or(self.family.classifier_class).into()];
        config.raw.insert("architectures".into(), json!(config.architectures));
        for key in ["id2label", "label2id", "problem_type"] {
            config.raw.remove(key);
        }
        config
    }

    /// The configuration for saving a classifier. transformers needs a pad id to find the last token, so without one eos is
    /// used.
    pub(crate) fn for_sequence_classifier(&self, labels: &[String], eos: Option<i64>, pad: Option<i64>) -> Self {
        let own = self.raw.get("pad_token_id").and_then(Value::as_i64);
        let mut config = self.with_tokens(eos, pad.or(own).or(eos));
        config.shape.architectures = vec![self.family.classifier_class.into()];
        config.shape.labels = labels.to_vec();
        config.raw.insert("architectures".into(), json!(config.architectures));
        let by_number = labels.iter().enumerate().map(|(i, label)| (i.to_string(), json!(label)));
        let by_label = labels.iter().enumerate().map(|(i, label)| (label.clone(), json!(i)));
        config.raw.insert("id2label".into(), Value::Object(by_number.collect()));
        config.raw.insert("label2id".into(), Value::Object(by_label.collect()));
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
        config
    }

    /// Writes `dir/config.json`: the content that was read with the changed fields, and the dtype of the weights.
    pub(crate) fn save(&self, dir: &Path, kind: Kind) -> Result<()> {
        let mut raw = self.raw.clone();
        let key = if raw.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        let name = match kind {
            Kind::BFloat16 => "bfloat16",
            Kind::Half => "float16",
            _ => "float32",
        };
        raw.insert(key.into(), json!(name));
        write_text(&dir.join("config.json"), &pretty(&Value::Object(raw)))
    }
}
