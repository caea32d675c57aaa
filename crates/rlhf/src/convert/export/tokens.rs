//! The vocabulary of a model folder in llama.cpp's form.

use super::super::vocabulary::{CONTROL, SPACE, Split, UNKNOWN, UNUSED, USER_DEFINED, signature};
use rlhf_base::weights::read_json;
use rlhf_base::{Error, Result};
use rlhf_lm::gguf::Value as Meta;
use rlhf_lm::model::ModelConfig;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;

/// Gemma 4's special tokens that llama.cpp's converter lets a text contain, so that answers show them.
const VISIBLE: [&str; 7] =
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>"];

/// Types of tokens that only the export distinguishes.
const NORMAL: i64 = 1;
const BYTE: i64 = 6;

/// Whether llama.cpp's converter takes an added token for a special one, though the tokenizer does not.
fn looks_special(text: &str) -> bool {
    let within = |start: &str, end: &str| text.starts_with(start) && text.ends_with(end);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || within("<|", "|>")
        || within("<\u{ff5c}", "\u{ff5c}>")
        || within("<unused", ">")
}

/// The metadata of the tokenizer in the folder `dir`; none if the folder has no tokenizer.
///
/// # Errors
/// If its rules have no name in llama.cpp.
pub(super) fn describe(dir: &Path, model: &ModelConfig) -> Result<Vec<(String, Meta)>> {
    let path = dir.join("tokenizer.json");
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let file = read_json(&path)?;
    let settings_path = dir.join("tokenizer_config.json");
    let settings = if settings_path.is_file() { read_json(&settings_path)? } else { Value::Object(Map::new()) };
    let tokens =
        Tokens { path: &path, file: &file, settings: &settings, is_gemma4: model.family.name == "gemma4_text" };
    let mut all = tokens.vocabulary(model.vocab_size)?;
    all.extend(tokens.special(model));
    let template = dir.join("chat_template.jinja");
    let template = match std::fs::read_to_string(&template) {
        Ok(text) => Some(text),
        Err(_) => settings["chat_template"].as_str().map(str::to_string),
    };
    all.extend(template.map(|text| ("tokenizer.chat_template", Meta::Text(text))));
    Ok(all.into_iter().map(|(key, value)| (key.to_string(), value)).collect())
}

struct Tokens<'a> {
    path: &'a Path,
    file: &'a Value,
    settings: &'a Value,
    is_gemma4: bool,
}

type Entries = Vec<(&'static str, Meta)>;

impl Tokens<'_> {
    fn error(&self, message: &str) -> Error {
        Error::invalid(self.path, message)
    }

    /// The ids of all tokens.
    fn ids(&self) -> HashMap<&str, i64> {
        let vocab = self.file["model"]["vocab"].as_object().into_iter().flatten();
        let vocab = vocab.filter_map(|(text, id)| Some((text.as_str(), id.as_i64()?)));
        vocab.chain(self.added().map(|(text, id, _)| (text, id))).collect()
    }

    /// Added tokens with their ids, and whether they are special.
    fn added(&self) -> impl Iterator<Item = (&str, i64, bool)> {
        let added = self.file["added_tokens"].as_array().into_iter().flatten();
        added.filter_map(|token| {
            Some((token["content"].as_str()?, token["id"].as_i64()?, token["special"].as_bool().unwrap_or(false)))
        })
    }

    /// The merges, first ones first.
    fn merges(&self) -> Result<Vec<[String; 2]>> {
        let wrong = || self.error("`merges`: expected pairs of tokens");
        let merges = self.file["model"]["merges"].as_array().ok_or_else(wrong)?;
        let pair = |merge: &Value| match merge {
            Value::String(text) => text.split_once(' ').map(|(a, b)| [a.to_string(), b.to_string()]),
            Value::Array(pair) => match pair.as_slice() {
                [Value::String(a), Value::String(b)] => Some([a.clone(), b.clone()]),
                _ => None,
            },
            _ => None,
        };
        merges.iter().map(|merge| pair(merge).ok_or_else(wrong)).collect()
    }

    /// The texts and types of the tokens of `rows` rows.
    fn pieces(&self, rows: i64, is_bytes: bool) -> Result<(Vec<String>, Vec<i64>)> {
        let rows = rows.max(0) as usize;
        let mut texts: Vec<String> = (0..rows).map(|id| format!("[PAD{id}]")).collect();
        let mut kinds = vec![UNUSED; rows];
        let mut set = |text: &str, id: i64, kind: i64| -> Result<()> {
            let id = usize::try_from(id).ok().filter(|id| *id < rows);
            let id = id.ok_or_else(|| self.error(&format!("expected ids below the {rows} rows of the embedding")))?;
            texts[id] = text.to_string();
            kinds[id] = kind;
            Ok(())
        };
        for (text, id) in self.file["model"]["vocab"].as_object().into_iter().flatten() {
            let is_byte = !is_bytes && text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
            set(text, id.as_i64().unwrap_or(-1), if is_byte { BYTE } else { NORMAL })?;
        }
        let unknown = self.file["model"]["unk_token"].as_str();
        for (text, id, special) in self.added() {
            let kind = if Some(text) == unknown {
                UNKNOWN
            } else if self.is_gemma4 && VISIBLE.contains(&text) {
                USER_DEFINED
            } else if special || looks_special(text) {
                CONTROL
            } else {
                USER_DEFINED
            };
            // llama.cpp looks for them in the plain text, but for Gemma 4's.
            let plain = if kind == USER_DEFINED && !self.is_gemma4 { text.replace(SPACE, " ") } else { text.into() };
            set(&plain, id, kind)?;
        }
        Ok((texts, kinds))
    }

    fn vocabulary(&self, rows: i64) -> Result<Entries> {
        let model = &self.file["model"];
        if model["type"] != "BPE" {
            return Err(self.error("expected a tokenizer of BPE, whose rules llama.cpp has a name for"));
        }
        let is_bytes = !model["byte_fallback"].as_bool().unwrap_or(false);
        let (texts, kinds) = self.pieces(rows, is_bytes)?;
        let merges = self.merges()?;
        let mut all: Entries = Vec::new();
        let start = |name: &str, pre: &str| {
            vec![
                ("tokenizer.ggml.model", Meta::Text(name.into())),
                ("tokenizer.ggml.pre", Meta::Text(pre.into())),
                ("tokenizer.ggml.tokens", Meta::Texts(texts.clone())),
            ]
        };
        if is_bytes {
            let rules = signature(&self.file["pre_tokenizer"]);
            let name = Split::NAMES.iter().find(|name| {
                Split::of(name).is_some_and(|split| {
                    signature(&split.steps) == rules && split.normalizer.is_null() == self.file["normalizer"].is_null()
                })
            });
            let name = name.ok_or_else(|| {
                self.error("`pre_tokenizer`: expected the rules of GPT-2, Llama 3, Qwen2, Qwen3.5, SmolLM or gpt-oss, which have names in llama.cpp")
            })?;
            all.extend(start("gpt2", name));
            all.push(("tokenizer.ggml.token_type", Meta::Integers(kinds)));
            let merges = merges.iter().map(|[a, b]| format!("{a} {b}")).collect();
            all.push(("tokenizer.ggml.merges", Meta::Texts(merges)));
        } else if self.is_gemma4 {
            // The scores mean nothing beside merges.
            let scores = vec![-1000.0; texts.len()];
            all.push(("tokenizer.ggml.model", Meta::Text("gemma4".into())));
            all.push(("tokenizer.ggml.tokens", Meta::Texts(texts)));
            all.push(("tokenizer.ggml.scores", Meta::Numbers(scores)));
            all.push(("tokenizer.ggml.token_type", Meta::Integers(kinds)));
            let merges = merges.iter().map(|[a, b]| format!("{a} {b}")).collect();
            all.push(("tokenizer.ggml.merges", Meta::Texts(merges)));
            all.push(("tokenizer.ggml.add_space_prefix", Meta::Bool(false)));
        } else {
            // The scores for which SentencePiece makes these merges in this order.
            let mut ranks: HashMap<String, usize> = HashMap::new();
            for (rank, [a, b]) in merges.iter().enumerate() {
                ranks.entry(format!("{a}{b}")).or_insert(rank);
            }
            let last = merges.len();
            let score = |text: &String| -(ranks.get(text).copied().unwrap_or(last) as f32);
            let scores = texts.iter().map(score).collect();
            all.extend(start("llama", "default"));
            all.push(("tokenizer.ggml.scores", Meta::Numbers(scores)));
            all.push(("tokenizer.ggml.token_type", Meta::Integers(kinds)));
            all.push(("tokenizer.ggml.add_space_prefix", Meta::Bool(self.adds_space())));
        }
        Ok(all)
    }

    /// Whether SentencePiece's rules put a space before a text.
    fn adds_space(&self) -> bool {
        let text = self.file["normalizer"].to_string();
        let steps = self.file["pre_tokenizer"].to_string();
        text.contains("\"Prepend\"")
            || steps.contains("\"Metaspace\"")
                && !steps.contains("\"never\"")
                && !steps.contains("\"add_prefix_space\":false")
    }

    /// Special tokens: their ids, and whether bos and eos are put around a text.
    fn special(&self, model: &ModelConfig) -> Entries {
        let ids = self.ids();
        let id = |key: &str| {
            let value = &self.settings[key];
            let text = value.as_str().or(value["content"].as_str());
            text.and_then(|text| ids.get(text).copied())
        };
        let mut all: Entries = Vec::new();
        let mut push = |key: &'static str, id: Option<i64>| all.extend(id.map(|id| (key, Meta::Integer(id))));
        push("tokenizer.ggml.bos_token_id", id("bos_token"));
        let ends = &model.eos_token_ids;
        let eos = id("eos_token").or(ends.first().copied());
        push("tokenizer.ggml.eos_token_id", eos);
        push("tokenizer.ggml.eot_token_id", ends.iter().copied().find(|end| Some(*end) != eos));
        push("tokenizer.ggml.unknown_token_id", id("unk_token"));
        push("tokenizer.ggml.padding_token_id", id("pad_token"));
        let around = self.around();
        for (key, at) in [("tokenizer.ggml.add_bos_token", 0), ("tokenizer.ggml.add_eos_token", 1)] {
            all.push((key, Meta::Bool(around[at])));
        }
        all
    }

    /// Whether the rules put a special token before a text, and after it.
    fn around(&self) -> [bool; 2] {
        let processor = &self.file["post_processor"];
        let steps = processor["processors"].as_array().map_or_else(|| vec![processor], |steps| steps.iter().collect());
        let template = steps.iter().find(|step| step["type"] == "TemplateProcessing");
        let single = template.and_then(|template| template["single"].as_array());
        let Some(single) = single else { return [false; 2] };
        let text = single.iter().position(|part| part.get("Sequence").is_some()).unwrap_or(0);
        [text > 0, text + 1 < single.len()]
    }
}
