//! The metadata of a GGUF file as a `config.json`.

mod extras;
mod gemma4;

pub(super) use extras::score_width;

use super::forms::{
    ATTENTION_SCALE, EMBEDDING_SCALE, Form, LOGIT_SCALE, NEXTN, RESIDUAL_SCALE, SHARED_KEYS, listed, numbered,
};
use rlhf_base::Result;
use rlhf_base::safe_text::{beginning, entries};
use rlhf_lm::gguf::{Gguf, Value as Meta};
use serde_json::{Map, Value, json};
use tch::Kind;

/// The tensor with the factors of the rotary angles for longer texts, of Llama 3.1 and later. They are not in the metadata.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Settings of an architecture that are read, or change nothing.
const KNOWN: [&str; 20] = [
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    EPSILON,
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
];

/// Key of the norms' epsilon.
const EPSILON: &str = "attention.layer_norm_rms_epsilon";

/// A model as its file describes it.
#[derive(Debug)]
pub(super) struct Description {
    /// The content of its `config.json`.
    pub(super) config: Map<String, Value>,
    /// The form of its family.
    pub(super) form: &'static Form,
    /// Tensors that become part of the configuration.
    pub(super) unused: Vec<&'static str>,
    /// The number of layers, and of those after them, which predict further tokens.
    layers: [i64; 2],
    /// The first of the layers that share the keys and values of earlier ones.
    first_shared: Option<i64>,
}

impl Description {
    /// Whether the model has no place for this tensor of the file, and computes the same without it: those that predict further tokens, and
    /// projections of keys and values in layers that share those of earlier ones.
    pub(super) fn is_unused(&self, name: &str) -> bool {
        const KEYS: [&str; 3] = ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"];
        let [layers, later] = self.layers;
        let in_layer = numbered("blk.", name).is_some_and(|(layer, rest)| {
            let layer = layer as i64;
            let shares = self.first_shared.is_some_and(|first| (first..layers).contains(&layer));
            (layers..layers + later).contains(&layer) || shares && KEYS.contains(&rest)
        });
        in_layer || self.unused.contains(&name)
    }
}

/// Reads a file's metadata.
///
/// # Errors
/// If a setting is missing, has another type, or is not supported.
pub(super) fn describe(file: &Gguf) -> Result<Description> {
    let architecture = file.text("general.architecture")?.unwrap_or_default();
    let has = |name: &str| matches!(file.metadata().get(&format!("{architecture}.{name}")), Some(Meta::Integer(1..)));
    let form = Form::of_architecture(architecture, has).ok_or_else(|| {
        let (expected, other) = (listed(|form| form.architecture), beginning(architecture, 120));
        file.error(format!("`general.architecture`: expected {expected}, found {other:?}"))
    })?;
    let settings = Settings { file, architecture, form };
    settings.check_known()?;
    let layers = settings.layers()?;
    let heads = settings.size("attention.head_count")?;
    let hidden = settings.size("embedding_length")?;
    let (kv_heads, layer_types) = settings.key_heads(heads)?;
    let head_dim = settings.head_dim(hidden, heads)?;
    let embedding = file.tensors().get("token_embd.weight").map(|entry| entry.shape[0]);
    let vocab = embedding.ok_or_else(|| file.error("expected the tensor `token_embd.weight`, found none"))?;
    let eps = settings.required(EPSILON)?;
    let width = settings.width()?;
    let theta = file.number(&settings.key("rope.freq_base"))?.unwrap_or(10_000.0);
    let (rope_scaling, unused) = match architecture {
        // It says which angles are 0.
        "gemma4" => (None, vec![ROPE_FACTORS]),
        _ => settings.rope_scaling(head_dim, theta)?,
    };
    let mut config = Map::from_iter([
        ("architectures".into(), json!([form.class])),
        ("model_type".into(), json!(form.model_type)),
        ("vocab_size".into(), json!(vocab)),
        ("hidden_size".into(), json!(hidden)),
        ("num_hidden_layers".into(), json!(layers[0])),
        ("num_attention_heads".into(), json!(heads)),
        ("num_key_value_heads".into(), json!(kv_heads)),
        ("head_dim".into(), json!(head_dim)),
        ("max_position_embeddings".into(), json!(settings.size("context_length")?)),
        ("rms_norm_eps".into(), json!(eps)),
        ("tie_word_embeddings".into(), json!(!file.tensors().contains_key("output.weight"))),
        ("torch_dtype".into(), json!("float32")),
    ]);
    config.extend(width.map(|width| ("intermediate_size".to_string(), json!(width))));
    if !form.is_gemma() {
        config.insert("hidden_act".into(), json!("silu"));
    }
    let has = |name: &str| file.tensors().contains_key(name);
    if architecture != "qwen2" {
        config.insert("attention_bias".into(), json!(has("blk.0.attn_q.bias")));
    }
    if ["llama", "granite"].contains(&architecture) && !form.has_experts() {
        config.insert("mlp_bias".into(), json!(has("blk.0.ffn_down.bias")));
    }
    let sizes = extras::Sizes { hidden, heads, head_dim, layers: layers[0] };
    config.extend(match form.model_type {
        "granite" => settings.factors(head_dim)?,
        "lfm2" | "lfm2_moe" => settings.convolutions(eps, layer_types)?,
        "qwen3_5_text" | "qwen3_5_moe_text" | "qwen3_next" => settings.delta(sizes)?,
        "gemma2" | "gemma3_text" => settings.gemma(sizes)?,
        "gemma4_text" => settings.gemma4(sizes)?,
        "gpt_oss" | "olmo3" => settings.windows(layers[0])?,
        _ => Map::new(),
    });
    config.extend(settings.experts()?);
    config.extend(match architecture {
        "gemma4" => settings.proportional(theta)?,
        _ => settings.ropes(theta, rope_scaling, head_dim)?,
    });
    config.extend(settings.special_tokens()?);
    let shared = if architecture == "gemma4" { settings.optional(SHARED_KEYS)? } else { None };
    Ok(Description { config, form, unused, layers, first_shared: shared.map(|shared| layers[0] - shared) })
}

/// The settings of a file's architecture.
struct Settings<'a> {
    file: &'a Gguf,
    architecture: &'a str,
    form: &'static Form,
}

impl Settings<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// Refuses settings that might change what the model computes.
    fn check_known(&self) -> Result<()> {
        let prefix = self.key("");
        let names = self.file.metadata().keys().filter_map(|key| key.strip_prefix(&prefix));
        let is_extra = |name: &str| self.form.keys.contains(&name);
        match names.clone().find(|name| !KNOWN.contains(name) && !is_extra(name)) {
            Some(name) => {
                Err(self.file.error(format!("`{prefix}{}`: this setting is not supported", beginning(name, 120))))
            }
            None if self.form.has_experts() => Ok(()),
            None => match self.optional("expert_count")?.filter(|count| *count > 0) {
                None => Ok(()),
                Some(found) => {
                    let expected = "expected 0, as this architecture is read without experts";
                    Err(self.file.error(format!("`{prefix}expert_count`: {expected}, found {found}")))
                }
            },
        }
    }

    /// An integer from 0 to 2^28; `None` if the key is not set.
    fn optional(&self, name: &str) -> Result<Option<i64>> {
        let key = self.key(name);
        match self.file.integer(&key)? {
            Some(n) if !(0..=1 << 28).contains(&n) => {
                Err(self.file.error(format!("`{key}`: expected an integer from 0 to {}, found {n}", 1 << 28)))
            }
            found => Ok(found),
        }
    }

    /// The number of a key that must be there.
    fn required(&self, name: &str) -> Result<f64> {
        let key = self.key(name);
        self.file.number(&key)?.ok_or_else(|| self.file.error(format!("expected the key `{key}`, found none")))
    }

    /// The width of an MLP, if the file states one: that of the first layer, if layers have numbers of their own.
    fn width(&self) -> Result<Option<i64>> {
        const NAME: &str = "feed_forward_length";
        let key = self.key(NAME);
        if self.architecture == "qwen35moe" && !self.file.metadata().contains_key(&key) {
            return Ok(None);
        }
        match self.file.metadata().get(&key) {
            Some(Meta::Integers(all)) if self.architecture == "gemma4" => match all.first() {
                Some(first @ 1..=0x1000_0000) => Ok(Some(*first)),
                _ => {
                    let (most, found) = (1 << 28, entries(all));
                    Err(self.file.error(format!("`{key}`: expected integers from 1 to {most}, found {found}")))
                }
            },
            _ => Ok(Some(self.size(NAME)?)),
        }
    }

    /// The number of layers, and of those after them.
    fn layers(&self) -> Result<[i64; 2]> {
        let all = self.size("block_count")?;
        // A false count takes no memory.
        let tensors = self.file.tensors().len() as i64;
        if all > tensors {
            let key = self.key("block_count");
            return Err(self
                .file
                .error(format!("`{key}`: expected at most as many as the {tensors} tensors, found {all}")));
        }
        let later = if self.form.keys.contains(&NEXTN) { self.optional(NEXTN)?.unwrap_or(0) } else { 0 };
        if later >= all {
            let message = format!("`{}`: expected fewer than all {all} layers, found {later}", self.key(NEXTN));
            return Err(self.file.error(message));
        }
        Ok([all - later, later])
    }

    fn size(&self, name: &str) -> Result<i64> {
        match self.optional(name)? {
            Some(n @ 1..) => Ok(n),
            Some(n) => Err(self.file.error(format!("`{}`: expected an integer from 1, found {n}", self.key(name)))),
            None => Err(self.file.error(format!("expected the key `{}`, found none", self.key(name)))),
        }
    }

    /// The number of key heads, and the kinds of the layers if the file has a number for each layer: layers without key heads have
    /// convolutions.
    fn key_heads(&self, heads: i64) -> Result<(i64, Option<Value>)> {
        let name = "attention.head_count_kv";
        let key = self.key(name);
        if self.architecture == "gemma4" {
            return Ok((self.local_heads(heads)?, None));
        }
        if !self.architecture.starts_with("lfm2") || !matches!(self.file.metadata().get(&key), Some(Meta::Integers(_)))
        {
            return Ok((self.optional(name)?.unwrap_or(heads), None));
        }
        let all = self.file.integers(&key)?.unwrap_or_default();
        let most = all.iter().copied().max().unwrap_or(0);
        let other = all.iter().find(|n| ![0, most].contains(*n));
        if !(1..=1 << 28).contains(&most) || other.is_some() {
            let found = other.map_or_else(|| entries(all), |other| format!("{other} and {most}"));
            return Err(self
                .file
                .error(format!("`{key}`: expected 0 or one number of heads for each layer, found {found}")));
        }
        let kind = |n: &i64| if *n == 0 { "conv" } else { "full_attention" };
        Ok((most, Some(json!(all.iter().map(kind).collect::<Vec<_>>()))))
    }

    /// Granite's factors, with llama.cpp's values where a file has none.
    fn factors(&self, head_dim: i64) -> Result<Map<String, Value>> {
        let number =
            |name: &str, default: f64| -> Result<f64> { Ok(self.file.number(&self.key(name))?.unwrap_or(default)) };
        Ok(Map::from_iter([
            ("attention_multiplier".into(), json!(number(ATTENTION_SCALE, (head_dim as f64).powf(-0.5))?)),
            ("embedding_multiplier".into(), json!(number(EMBEDDING_SCALE, 1.0)?)),
            ("residual_multiplier".into(), json!(number(RESIDUAL_SCALE, 1.0)?)),
            ("logits_scaling".into(), json!(number(LOGIT_SCALE, 1.0)?)),
        ]))
    }

    /// The width of a head, of layers with windows in Gemma 4; all of it is rotated but in Qwen3.5.
    fn head_dim(&self, hidden: i64, heads: i64) -> Result<i64> {
        if self.architecture == "gemma4" {
            return self.local_width();
        }
        let key = self.optional("attention.key_length")?;
        let is_part = self.is_partly_rotated();
        let rotated = if is_part { None } else { self.optional("rope.dimension_count")? };
        let head_dim = match key.or(rotated) {
            Some(n @ 1..) => n,
            Some(n) => return Err(self.file.error(format!("the width of a head: expected 1 or more, found {n}"))),
            None if hidden % heads == 0 => hidden / heads,
            None => {
                let message =
                    format!("`{}`: expected a multiple of {heads} heads, found {hidden}", self.key("embedding_length"));
                return Err(self.file.error(message));
            }
        };
        for name in ["rope.dimension_count", "attention.value_length"] {
            let differs = |found: &i64| *found != head_dim && !(is_part && name.starts_with("rope."));
            if let Some(found) = self.optional(name)?.filter(differs) {
                let message = format!("`{}`: expected {head_dim}, the width of a head, found {found}", self.key(name));
                return Err(self.file.error(message));
            }
        }
        Ok(head_dim)
    }

    /// Whether the family rotates a part of a head.
    fn is_partly_rotated(&self) -> bool {
        ["qwen35", "qwen35moe", "qwen3next"].contains(&self.architecture)
    }

    /// The scaling of rotary angles, and the tensors that it was read from.
    fn rope_scaling(&self, head_dim: i64, theta: f64) -> Result<(Option<Value>, Vec<&'static str>)> {
        if self.file.tensors().contains_key(ROPE_FACTORS) {
            return Ok((Some(self.llama3(head_dim, theta)?), vec![ROPE_FACTORS]));
        }
        let factor = || self.required("rope.scaling.factor");
        let key = self.key("rope.scaling.type");
        let scaling = match self.file.text(&key)? {
            None | Some("none") => match self.file.number(&self.key("rope.scale_linear"))? {
                Some(factor) if factor != 1.0 => Some(json!({"rope_type": "linear", "factor": factor})),
                _ => None,
            },
            Some("linear") => Some(json!({"rope_type": "linear", "factor": factor()?})),
            Some("yarn") => Some(json!({
                "rope_type": "yarn", "factor": factor()?,
                "original_max_position_embeddings": self.size("rope.scaling.original_context_length")?,
            })),
            Some(other) => {
                let other = Meta::Text(other.into()).brief();
                return Err(self.file.error(format!("`{key}`: expected none, linear or yarn, found {other}")));
            }
        };
        Ok((scaling, Vec::new()))
    }

    /// Llama 3.1's scaling, from the factor of each angle: all known models have the same bands, and differ in the largest factor.
    fn llama3(&self, head_dim: i64, theta: f64) -> Result<Value> {
        const LOW: f64 = 1.0;
        const HIGH: f64 = 4.0;
        let factors = Vec::<f32>::try_from(self.file.read(ROPE_FACTORS, Kind::Float)?.f_view([-1])?)?;
        let largest = factors.iter().copied().fold(1.0, f32::max);
        let expected = |original: f64, at: usize| {
            let frequency = theta.powf(-2.0 * at as f64 / head_dim as f64);
            let turns = original * frequency / std::f64::consts::TAU;
            let fast = ((turns - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
            1.0 / (fast + (1.0 - fast) / f64::from(largest))
        };
        let fits = |original: &f64| {
            let near = |(at, &factor): (usize, &f32)| (f64::from(factor) / expected(*original, at) - 1.0).abs() < 1e-3;
            factors.len() as i64 == head_dim / 2 && factors.iter().enumerate().all(near)
        };
        // Powers of two from 64 to 2^20.
        let original = (6..=20).map(|power| f64::from(1 << power)).find(fits).ok_or_else(|| {
            // The first factors are 1 in every file. The form of numbers that has exponents, so that none is long.
            let found =
                entries(factors.iter().skip_while(|factor| **factor == 1.0).map(|factor| format!("{factor:?}")));
            let expected = format!("expected the {} factors of Llama 3.1's scaling", head_dim / 2);
            self.file.error(format!("tensor `{ROPE_FACTORS}`: {expected}, found {}: {found}", factors.len()))
        })?;
        Ok(json!({
            "rope_type": "llama3", "factor": f64::from(largest), "low_freq_factor": LOW, "high_freq_factor": HIGH,
            "original_max_position_embeddings": original as i64,
        }))
    }

    /// The ids of special tokens. A token that ends a turn ends a text too.
    fn special_tokens(&self) -> Result<Map<String, Value>> {
        let id = |name: &str| self.file.integer(&format!("tokenizer.ggml.{name}_token_id"));
        let mut ends: Vec<i64> = id("eos")?.into_iter().chain(id("eot")?).collect();
        ends.dedup();
        let ends = match ends[..] {
            [] => Value::Null,
            [only] => json!(only),
            _ => json!(ends),
        };
        // Null if there is no token, because without an entry transformers' classes would use their own defaults.
        let (bos, pad) = (json!(id("bos")?), json!(id("padding")?));
        let ids = [("bos_token_id", bos), ("pad_token_id", pad), ("eos_token_id", ends)];
        let ids = Map::from_iter(ids.map(|(name, id)| (name.to_string(), id)));
        Ok(ids)
    }
}
