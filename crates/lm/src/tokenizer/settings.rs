//! Settings of `tokenizer_config.json` that override the rules of `tokenizer.json`, as in transformers.

use super::special::{Defaults, class_defaults};
use super::{TOKENIZER_CONFIG, read_if_present};
use rlhf_base::{Error, Result};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::path::Path;
use tokenizers::{ModelWrapper, Tokenizer};

/// The settings of a tokenizer that are not in its `tokenizer.json`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Settings {
    rules: Rules,
    /// The special tokens that apply if no file sets them.
    pub(super) defaults: Defaults,
    /// Special tokens in a text are split like any other text.
    pub(super) split_special_tokens: bool,
    /// Decoded text is cleaned up, unless the vocabulary is one of BPE.
    clean_up: bool,
    clean_up_bpe: bool,
}

/// Rules that a class of transformers makes itself.
#[derive(Debug, Clone, PartialEq)]
enum Rules {
    /// None: the rules of `tokenizer.json` apply.
    OfFile,
    /// The fields of BERT's normalizer, and the key that sets one of them, if there is one.
    Bert(Map<String, Value>, Option<&'static str>),
    /// Whether byte-level rules add a space before a text.
    ByteLevel(Option<bool>),
    /// Whether SentencePiece's rules add a space before a text.
    Llama(Option<bool>),
}

/// The rules in a `tokenizer.json` that settings replace.
#[derive(Deserialize, PartialEq, Clone)]
struct FileRules {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
}

/// Name of the setting that puts a space before a text.
const PREFIX: &str = "add_prefix_space";

impl Settings {
    /// Reads the settings in `dir`, whose `tokenizer_config.json` is `config`.
    ///
    /// # Errors
    /// If a file is not JSON, or a setting is malformed.
    pub(super) fn read(dir: &Path, config: &Value) -> Result<Self> {
        let flag = |name: &str| match &config[name] {
            Value::Null => Ok(None),
            Value::Bool(on) => Ok(Some(*on)),
            found => {
                let message = format!("`{name}`: expected true or false, found {found}");
                Err(Error::invalid(dir.join(TOKENIZER_CONFIG), message))
            }
        };
        let model = read_if_present(dir, "config.json")?;
        let name = class(config, &model);
        let rules = match name {
            "BertTokenizer" | "DistilBertTokenizer" => {
                let names = ["do_lower_case", "strip_accents", "tokenize_chinese_chars"];
                let [lower, strip, chinese] = names.map(flag);
                let fields = json!({
                    "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": chinese?.unwrap_or(true),
                    "strip_accents": strip?, "lowercase": lower?.unwrap_or(true),
                });
                let set = names.into_iter().find(|name| !config[*name].is_null());
                Rules::Bert(fields.as_object().cloned().unwrap_or_default(), set)
            }
            "GPT2Tokenizer" | "RobertaTokenizer" | "BartTokenizer" | "GPTNeoXTokenizer" | "Qwen2Tokenizer"
            | "Qwen3_5Tokenizer" => Rules::ByteLevel(flag(PREFIX)?),
            "LlamaTokenizer" => Rules::Llama(flag(PREFIX)?),
            _ => Rules::OfFile,
        };
        Ok(Self {
            rules,
            defaults: class_defaults(name),
            split_special_tokens: flag("split_special_tokens")?.unwrap_or(false),
            clean_up: flag("clean_up_tokenization_spaces")?.unwrap_or(false),
            clean_up_bpe: flag("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")?
                .unwrap_or(false),
        })
    }

    /// The `tokenizer.json` `json` of the folder `dir` with the rules of these settings; `None` if its own are the same.
    ///
    /// # Errors
    /// If a setting contradicts rules that it cannot be applied to.
    pub(super) fn applied(&self, dir: &Path, json: &[u8]) -> Result<Option<Vec<u8>>> {
        if matches!(self.rules, Rules::OfFile | Rules::Llama(None)) {
            return Ok(None);
        }
        // The reader of the whole file reports its errors.
        let Ok(original) = serde_json::from_slice::<FileRules>(json) else { return Ok(None) };
        let mut rules = original.clone();
        self.rules.apply(&mut rules, json).map_err(|message| Error::invalid(dir.join(TOKENIZER_CONFIG), message))?;
        if rules == original {
            return Ok(None);
        }
        let Ok(mut file) = serde_json::from_slice::<Map<String, Value>>(json) else { return Ok(None) };
        file.insert("normalizer".into(), rules.normalizer);
        file.insert("pre_tokenizer".into(), rules.pre_tokenizer);
        Ok(Some(Value::Object(file).to_string().into_bytes()))
    }

    /// `text`, which `inner` decoded, cleaned up if the settings say so: without the spaces before marks of punctuation.
    pub(super) fn cleaned(&self, text: String, inner: &Tokenizer) -> String {
        let is_bpe = || matches!(inner.get_model(), ModelWrapper::BPE(_));
        if !self.clean_up || (is_bpe() && !self.clean_up_bpe) {
            return text;
        }
        let pairs = [" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"];
        pairs.iter().fold(text, |text, pair| text.replace(pair, pair.trim()))
    }
}

impl Rules {
    /// Applies these to the rules of the file `json`.
    fn apply(&self, rules: &mut FileRules, json: &[u8]) -> Result<(), String> {
        match self {
            Self::OfFile | Self::Llama(None) => {}
            Self::Bert(fields, set) => {
                if rules.normalizer["type"] == "BertNormalizer" {
                    rules.normalizer = Value::Object(fields.clone());
                } else if let Some(key) = set {
                    let found = rules.normalizer["type"].as_str().unwrap_or("none");
                    return Err(format!("`{key}`: expected a BertNormalizer in tokenizer.json, found {found:?}"));
                }
            }
            Self::ByteLevel(on) => {
                let is_set = set_prefix(&mut rules.pre_tokenizer, on.unwrap_or(false));
                if !is_set && *on == Some(true) {
                    return Err(format!(
                        "`{PREFIX}`: expected a ByteLevel pre-tokenizer in tokenizer.json, found none"
                    ));
                }
            }
            Self::Llama(Some(on)) => {
                // transformers takes a file with such rules as it is.
                let is_bytes = std::str::from_utf8(json).is_ok_and(|text| text.contains("\"ByteLevel\""));
                let adds_space = adds_prefix(&rules.normalizer) || adds_prefix(&rules.pre_tokenizer);
                if !is_bytes && adds_space != *on {
                    return Err(format!(
                        "`{PREFIX}`: expected {adds_space}, as in the rules of tokenizer.json, found {on}"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The class that transformers 5 reads the files with, without a final `Fast`: that of `config`, a `tokenizer_config.json`, or else that of
/// `model`, a `config.json`, except for families whose class it knows better.
fn class<'a>(config: &'a Value, model: &'a Value) -> &'a str {
    let declared = || config["tokenizer_class"].as_str().or(model["tokenizer_class"].as_str());
    let (usual, is_fixed) = match model["model_type"].as_str().unwrap_or_default() {
        "mistral" | "mistral3" | "ministral3" | "mixtral" | "granite" | "olmo2" | "olmo3" | "phi3" | "modernbert" => {
            ("TokenizersBackend", true)
        }
        "qwen2" => ("Qwen2Tokenizer", true),
        "qwen3" | "qwen3_moe" | "qwen3_next" => ("Qwen2Tokenizer", false),
        "qwen3_5" | "qwen3_5_moe" | "qwen3_5_moe_text" => ("Qwen3_5Tokenizer", true),
        "qwen3_5_text" => ("Qwen3_5Tokenizer", false),
        "bert" | "distilbert" => ("BertTokenizer", false),
        "gpt2" | "opt" => ("GPT2Tokenizer", false),
        "roberta" | "bart" => ("RobertaTokenizer", false),
        "gpt_neox" => ("GPTNeoXTokenizer", false),
        _ => ("TokenizersBackend", false),
    };
    let class = if is_fixed { usual } else { declared().unwrap_or(usual) };
    class.strip_suffix("Fast").unwrap_or(class)
}

/// Names the class of a tokenizer in its `tokenizer_config.json` among `files`, which has `config`, where transformers would take another one for the
/// text part of a model for text and images than for the whole, whose `config.json` is `model`.
pub(super) fn name_class_of_text_part(files: &mut [(&'static str, Vec<u8>)], config: &Value, model: &Value) {
    // transformers corrects the class of `qwen3_5` and not that of its text part; with experts it corrects both.
    let text = json!({ "model_type": "qwen3_5_text" });
    if model["model_type"] != "qwen3_5" || class(config, model) == class(config, &text) {
        return;
    }
    for (_, bytes) in files.iter_mut().filter(|(name, _)| *name == TOKENIZER_CONFIG) {
        if let Ok(mut settings) = serde_json::from_slice::<Map<String, Value>>(bytes) {
            settings.insert("tokenizer_class".into(), class(config, model).into());
            *bytes = Value::Object(settings).to_string().into_bytes();
        }
    }
}

/// Sets whether the byte-level rules in `rule` add a space before a text. Returns whether there are any.
fn set_prefix(rule: &mut Value, on: bool) -> bool {
    if rule["type"] == "ByteLevel" {
        rule[PREFIX] = on.into();
        return true;
    }
    let inner = rule.get_mut("pretokenizers").and_then(Value::as_array_mut);
    // In all of them; `any` would stop after the first.
    inner.into_iter().flatten().filter_map(|rule| set_prefix(rule, on).then_some(())).count() > 0
}

/// Whether SentencePiece's rules in `rule` add a space before a text.
fn adds_prefix(rule: &Value) -> bool {
    match rule["type"].as_str() {
        Some("Prepend") => true,
        Some("Metaspace") => match rule["prepend_scheme"].as_str() {
            Some(scheme) => scheme != "never",
            None => rule[PREFIX].as_bool().unwrap_or(true),
        },
        _ => {
            let parts = ["normalizers", "pretokenizers"].into_iter().filter_map(|name| rule[name].as_array());
            parts.flatten().any(adds_prefix)
        }
    }
}
