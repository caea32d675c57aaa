//! `config.json` as transformers 4 and 5 write it, resolved into the [`Shape`] that the decoder needs.

use super::families::{self, FAMILIES, classifier_family};
use super::quantized::{Quantization, is_skipped};
use super::shape::{Family, Fields, MOST_LAYERS, Shape, Stacking, brief};
use rlhf_base::weights::{no_such_file, pretty, read_json, write_text};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::Path;
use tch::Kind;

/// Fields of `config.json` that transformers uses as generation settings if there is no `generation_config.json`.
const GENERATION: [&str; 10] = [
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "min_new_tokens",
    "num_beams",
    "no_repeat_ngram_size",
];

/// `config.json`: the shape of a model, and the content of the file, which is saved with the model.
///
/// The shape is read-only, so that a saved file always describes the weights.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    shape: Shape,
    raw: Map<String, Value>,
    /// Whether the file describes a larger model, and this is its text part.
    is_part: bool,
    /// The `generation_config.json` beside it.
    generation: Map<String, Value>,
}

impl std::ops::Deref for ModelConfig {
    type Target = Shape;

    fn deref(&self) -> &Shape {
        &self.shape
    }
}

/// Names of encoder-decoders whose files do not say that they are encoder-decoders.
const ENCODER_DECODERS: [&str; 9] =
    ["umt5", "longt5", "switch_transformers", "mbart", "pegasus", "marian", "m2m_100", "led", "blenderbot"];

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
        let mut config = Self::read(&path)?;
        if !config.read_generation(dir)? {
            let is_generation =
                |(name, value): &(&String, &Value)| GENERATION.contains(&name.as_str()) && !value.is_null();
            let settings = config.raw.iter().filter(is_generation).map(|(name, value)| (name.clone(), value.clone()));
            config.generation = settings.collect();
        }
        let fields =
            Fields { path: &dir.join("generation_config.json"), raw: &config.generation, family: config.family };
        let start = fields.ids("decoder_start_token_id")?.first().copied();
        config.shape.decoder_start_token_id = config.shape.decoder_start_token_id.or(start);
        config.check_start(&path)?;
        Ok(config)
    }

    /// Reads `dir/generation_config.json`, if it exists. Returns whether it does.
    ///
    /// # Errors
    /// If it is not a JSON object.
    pub fn read_generation(&mut self, dir: &Path) -> Result<bool> {
        let path = dir.join("generation_config.json");
        if path.is_file() {
            let Value::Object(generation) = read_json(&path)? else {
                return Err(Error::invalid(&path, "expected a JSON object"));
            };
            self.generation = generation;
            return Ok(true);
        }
        Ok(false)
    }

    /// The model's default generation settings, from `generation_config.json`, or from `config.json` if there is no such file.
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
        let config = Self::read(path)?;
        config.check_start(path)?;
        Ok(config)
    }

    fn read(path: &Path) -> Result<Self> {
        let Value::Object(raw) = read_json(path)? else {
            return Err(Error::invalid(path, "expected a JSON object"));
        };
        Self::from_json(path, raw)
    }

    /// Reads the content of a configuration file; errors name `path`.
    pub fn from_json(path: &Path, raw: Map<String, Value>) -> Result<Self> {
        let whole = raw.get("model_type").and_then(|name| WHOLES.iter().find(|whole| name == whole.name));
        let is_part = whole.is_some();
        let raw = whole.map(|whole| whole.text_part(path, &raw)).transpose()?.unwrap_or(raw);
        let family = family(path, &raw)?;
        let f = Fields { path, raw: &raw, family };
        let described = f.present("quantization_config").filter(|described| !is_mxfp4(family, described));
        if let Some(Err(expected)) = described.map(Quantization::check_config) {
            return Err(f.wrong("quantization_config", &expected));
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
        Ok(Self { shape, raw, is_part, generation: Map::new() })
    }
}

/// A model for text and images; only its language model is read.
struct Whole {
    /// Its `model_type`.
    name: &'static str,
    /// The `model_type`s that its language model may have; the first is the default.
    texts: &'static [&'static str],
    /// Whether the outer file's field, true by default, says if the head is tied to the embedding; otherwise the text part's field comes first.
    states_ties: bool,
}

const WHOLES: [Whole; 6] = [
    Whole { name: "gemma3", texts: &["gemma3_text"], states_ties: true },
    Whole { name: "gemma4", texts: &["gemma4_text"], states_ties: true },
    // Of Mistral Small 3.1 and 3.2, and of Ministral 3.
    Whole { name: "mistral3", texts: &["mistral", "ministral3"], states_ties: true },
    Whole { name: "qwen3_5", texts: &["qwen3_5_text"], states_ties: false },
    Whole { name: "qwen3_5_moe", texts: &["qwen3_5_moe_text"], states_ties: false },
    Whole { name: "lfm2_vl", texts: &["lfm2", "lfm2_moe"], states_ties: false },
];

/// LFM2's field for a head that is tied to the embedding; it takes precedence over the other families' field.
const LFM2_TIES: &str = "tie_embedding";

/// Fields that the file of a model for text and images may have instead of its text part.
const WHOLE_FIELDS: [&str; 10] = [
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
];

impl Whole {
    /// The configuration of the language model in the file of the whole.
    fn text_part(&self, path: &Path, whole: &Map<String, Value>) -> Result<Map<String, Value>> {
        let Some(Value::Object(text)) = whole.get("text_config") else {
            let found = brief(whole.get("text_config").unwrap_or(&Value::Null));
            return Err(Error::invalid(path, format!("`text_config`: expected an object, found {found}")));
        };
        let mut text = text.clone();
        for key in WHOLE_FIELDS {
            if let Some(value) = whole.get(key).filter(|_| !text.contains_key(key)) {
                text.insert(key.into(), value.clone());
            }
        }
        let ties = "tie_word_embeddings";
        let (whole_ties, text_ties) = (whole.get(ties).cloned(), text.get(ties).cloned());
        // As in transformers 5, where the head belongs to the outer model. A stored head that differs is used in any case.
        let tied =
            if self.states_ties { whole_ties.or(text_ties).or(Some(json!(true))) } else { text_ties.or(whole_ties) };
        text.extend(tied.map(|tied| (ties.to_string(), tied)));
        let found = text.get("model_type").filter(|found| !found.is_null());
        // Files of Gemma 3 may name the whole here.
        let named = found.filter(|found| *found != self.name);
        let Some(name) = self.texts.iter().find(|name| named.is_none_or(|found| found == *name)) else {
            let found = brief(text.get("model_type").unwrap_or(&Value::Null));
            let expected = self.texts.join(" or ");
            return Err(Error::invalid(
                path,
                format!("`text_config`: expected a `model_type` of {expected}, found {found}"),
            ));
        };
        let family = FAMILIES.iter().find(|family| family.name == *name);
        let scores = json!(whole.get("architectures")).to_string().contains("ForSequenceClassification");
        let class = family.and_then(|f| if scores { Some(f.classifier_class) } else { f.causal_lm_class });
        text.insert("model_type".into(), json!(name));
        text.insert("architectures".into(), json!([class]));
        Ok(text)
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

/// Whether weights are quantized in MXFP4, the format of stacked experts; they are unpacked when they are read.
fn is_mxfp4(family: &Family, described: &Value) -> bool {
    let is_stacked = family.names.experts.is_some_and(|experts| experts.stacking == Some(Stacking::InOut));
    is_stacked && described.get("quant_method").is_some_and(|method| method == "mxfp4")
}

/// Whether the family with this `model_type` has an encoder and a decoder.
pub fn is_encoder_decoder_family(model_type: &str) -> bool {
    FAMILIES.iter().any(|family| family.name == model_type && family.names.encoder.is_some())
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

impl ModelConfig {
    /// Checks that the family has language models; the error names `place`.
    pub fn check_causal_lm(&self, place: &Path) -> Result<()> {
        match self.family.causal_lm_class {
            Some(_) => Ok(()),
            None => {
                let message = format!("expected a language model, found `{}`, an encoder", self.family.name);
                Err(Error::invalid(place, message))
            }
        }
    }

    /// Rejects a classifier whose class is code in its folder, such as a head with gates (ArmoRM): its scores would be wrong here.
    pub fn check_classifier_code(&self, dir: &Path) -> Result<()> {
        let known = [Some(self.family.classifier_class), self.family.causal_lm_class];
        let class = self.architectures.iter().find(|name| !known.contains(&Some(name.as_str())));
        let code = self.raw.get("auto_map").and_then(Value::as_object).filter(|map| !map.is_empty());
        let (Some(class), Some(code)) = (class, code) else { return Ok(()) };
        let module = code.values().filter_map(Value::as_str).find_map(|name| Some(name.split_once('.')?.0));
        let file = module.map_or("auto_map".into(), |module| format!("{}.py", brief(&json!(module)).trim_matches('"')));
        let message = format!(
            "`architectures`: expected {}, found {}, a class of the model's own code ({file}), which is never run",
            self.family.classifier_class,
            brief(&json!(class)),
        );
        Err(Error::invalid(dir.join("config.json"), message))
    }

    /// Rejects a reward model of OpenRLHF whose scores are normalized by numbers in its configuration.
    pub fn check_rewards(&self, dir: &Path) -> Result<()> {
        match self.raw.get("normalize_reward") {
            Some(Value::Bool(true)) => {
                let message = "`normalize_reward`: expected false, found true: OpenRLHF's `mean` and `std` of scores are not applied here";
                Err(Error::invalid(dir.join("config.json"), message))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the model, whose folder is `dir`, reads a text from left to right, so that it has a value per token.
    ///
    /// # Errors
    /// If it is an encoder.
    pub fn check_decoder(&self, dir: &Path) -> Result<()> {
        if self.causal {
            return Ok(());
        }
        let message =
            format!("expected a decoder, found `{}`, an encoder: it has no value per token", self.family.name);
        Err(Error::invalid(dir, message))
    }

    /// The configuration of a classifier with the layers of this model, which may be a language model.
    pub fn into_classifier(mut self) -> Self {
        self.shape.family = classifier_family(self.family);
        self
    }

    /// Whether the file describes a larger model, and this is its text part.
    pub fn is_part(&self) -> bool {
        self.is_part
    }

    /// The dtype that the file names for the weights; f32 if it names none.
    pub fn stored_kind(&self) -> Kind {
        match self.raw.get("dtype").or(self.raw.get("torch_dtype")).and_then(Value::as_str) {
            Some("bfloat16") => Kind::BFloat16,
            Some("float16") => Kind::Half,
            _ => Kind::Float,
        }
    }

    /// A model of the same form with one layer of at most about `parameters` parameters, and a vocabulary of `words`; for measurements.
    pub fn reduced(&self, words: i64, parameters: usize) -> Self {
        let mut config = self.clone();
        let shape = &mut config.shape;
        (shape.num_hidden_layers, shape.vocab_size) = (1, words);
        shape.encoder_layers = shape.encoder_layers.map(|_| 1);
        shape.windows.truncate(1);
        // One layer with attention.
        shape.mixing = None;
        shape.layer_shapes.clear();
        (shape.layer_inputs, shape.has_layer_scalars) = (None, false);
        // One MLP as wide as the experts of a token.
        (shape.intermediate_size, shape.experts) = (shape.active_width(), None);
        let size = |shape: &Shape| {
            let queries = (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim;
            (shape.hidden_size as f64) * (2.0 * queries as f64 + 3.0 * shape.intermediate_size as f64)
        };
        let halves = |number: i64| number > 1 && number % 2 == 0;
        while size(shape) > parameters as f64 && halves(shape.num_attention_heads) && halves(shape.intermediate_size) {
            let embedding_is_hidden = shape.embedding_size == shape.hidden_size;
            (shape.hidden_size, shape.intermediate_size) = (shape.hidden_size / 2, shape.intermediate_size / 2);
            shape.embedding_size = if embedding_is_hidden { shape.hidden_size } else { shape.embedding_size };
            shape.num_attention_heads /= 2;
            let groups = shape.num_key_value_heads;
            shape.num_key_value_heads = if halves(groups) { groups / 2 } else { 1 };
        }
        config
    }

    /// The format of the weights, if the file says that they are quantized.
    pub fn quantization(&self) -> Option<Quantization> {
        self.raw.get("quantization_config").and_then(Quantization::of_config)
    }

    /// Describes quantized weights, unless the file that was read already describes them correctly: the linear layers `kept` and `head` are not
    /// quantized, and the layers `quantized` are.
    pub fn describe_quantization(
        &mut self,
        format: Quantization,
        kept: &[String],
        head: Option<&str>,
        quantized: &[&str],
    ) {
        let old = self.raw.get("quantization_config");
        let fits = |old: &Value| {
            // Without a list, transformers leaves the head unquantized by itself.
            let spares_head = |head: &str| old["llm_int8_skip_modules"].is_null() || is_skipped(old, head);
            Quantization::of_config(old) == Some(format)
                && kept.iter().all(|layer| is_skipped(old, layer))
                && head.is_none_or(spares_head)
                && !quantized.iter().any(|layer| is_skipped(old, layer))
        };
        if !old.is_some_and(fits) {
            let head = head.filter(|_| !kept.is_empty());
            let listed: Vec<String> = kept.iter().cloned().chain(head.map(Into::into)).collect();
            self.raw.insert("quantization_config".into(), format.describe(&listed));
        }
    }

    /// Whether the file's description of quantized weights leaves the linear layer of this name unquantized.
    pub fn spares(&self, layer: &str) -> bool {
        self.raw.get("quantization_config").is_some_and(|described| is_skipped(described, layer))
    }

    /// Removes the description of quantized weights, of a model that has none.
    pub fn forget_quantization(&mut self) {
        self.raw.remove("quantization_config");
    }

    /// Ties the LM head to the embedding.
    pub fn tie(&mut self) {
        self.shape.tie_word_embeddings = true;
        if families::states_ties(self.family) && self.raw.contains_key("tie_word_embeddings") {
            self.raw.insert("tie_word_embeddings".into(), json!(true));
            self.raw.remove(LFM2_TIES);
        }
    }

    /// Unties the LM head from the embedding.
    pub fn untie(&mut self) {
        self.shape.tie_word_embeddings = false;
        if families::states_ties(self.family) {
            self.raw.insert("tie_word_embeddings".into(), json!(false));
            self.raw.remove(LFM2_TIES);
        }
    }

    /// Names of the copies of the embedding that are written beside it.
    pub fn embedding_copies(&self) -> &'static [&'static str] {
        families::embedding_copies(&self.shape)
    }

    /// The content of `generation_config.json` for saving; if there was none, a note that the settings come from `config.json`.
    pub fn generation(&self) -> Map<String, Value> {
        if self.generation.is_empty() {
            Map::from_iter([("_from_model_config".into(), true.into())])
        } else {
            self.generation.clone()
        }
    }

    /// The configuration for saving a causal LM with these token ids.
    pub fn for_causal_lm(&self, eos: Option<i64>, pad: Option<i64>) -> Self {
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
    pub fn for_sequence_classifier(&self, labels: &[String], eos: Option<i64>, pad: Option<i64>) -> Self {
        let stored_pad = self.raw.get("pad_token_id").and_then(Value::as_i64);
        let mut config = self.with_tokens(eos, pad.or(stored_pad).or(eos));
        config.shape.architectures = vec![self.family.classifier_class.into()];
        config.shape.labels = labels.to_vec();
        config.raw.insert("architectures".into(), json!(config.architectures));
        let by_number = labels.iter().enumerate().map(|(i, label)| (i.to_string(), json!(label)));
        let by_label = labels.iter().enumerate().map(|(i, label)| (label.clone(), json!(i)));
        config.raw.insert("id2label".into(), Value::Object(by_number.collect()));
        config.raw.insert("label2id".into(), Value::Object(by_label.collect()));
        config
    }

    /// Sets the token that ends a text.
    pub(super) fn set_eos(&mut self, eos: i64) {
        self.shape.eos_token_ids = vec![eos];
        self.raw.insert("eos_token_id".into(), json!(eos));
    }

    fn with_tokens(&self, eos: Option<i64>, pad: Option<i64>) -> Self {
        let mut config = self.clone();
        let pad = families::position_pad(&self.shape).or(pad);
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
    pub fn save(&self, dir: &Path, kind: Kind) -> Result<()> {
        let mut raw = self.raw.clone();
        let name = match kind {
            Kind::BFloat16 => "bfloat16",
            Kind::Half => "float16",
            _ => "float32",
        };
        // A file may have the name of transformers 5, that of transformers 4, or both.
        let old = raw.contains_key("torch_dtype");
        for key in ["dtype", "torch_dtype"] {
            if raw.contains_key(key) || (key == "dtype" && !old) {
                raw.insert(key.into(), json!(name));
            }
        }
        write_text(&dir.join("config.json"), &pretty(&Value::Object(raw)))
    }
}
