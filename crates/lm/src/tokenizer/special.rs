//! Special tokens: those that a tokenizer's files name, and the tokens that these files add to its `tokenizer.json`.

use super::{SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, generates_from_an_encoder, read_if_present};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;
use tokenizers::{AddedToken, Tokenizer};

/// The file of added tokens of such a folder.
const ADDED_TOKENS: &str = "added_tokens.json";

/// Names of special tokens, which chat templates use.
const NAMES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Special tokens by name that apply if no file sets them; `None`: the class has no such token.
pub(super) type Defaults = &'static [(&'static str, Option<&'static str>)];

/// Returns the special tokens that a class of transformers has by default.
pub(super) fn class_defaults(class: &str) -> Defaults {
    const END: Option<&str> = Some("<|endoftext|>");
    match class {
        "Qwen2Tokenizer" | "Qwen3_5Tokenizer" => {
            &[("unk_token", END), ("bos_token", None), ("eos_token", END), ("pad_token", END)]
        }
        "GPT2Tokenizer" => &[("unk_token", END), ("bos_token", END), ("eos_token", END), ("pad_token", None)],
        "GPTNeoXTokenizer" => {
            &[("unk_token", END), ("bos_token", END), ("eos_token", END), ("pad_token", Some("<|padding|>"))]
        }
        "LlamaTokenizer" => &[("unk_token", Some("<unk>")), ("bos_token", Some("<s>")), ("eos_token", Some("</s>"))],
        "GemmaTokenizer" => &[
            ("unk_token", Some("<unk>")),
            ("bos_token", Some("<bos>")),
            ("eos_token", Some("<eos>")),
            ("pad_token", Some("<pad>")),
            ("mask_token", Some("<mask>")),
        ],
        "T5Tokenizer" => &[("eos_token", Some("</s>")), ("unk_token", Some("<unk>")), ("pad_token", Some("<pad>"))],
        "BertTokenizer" | "DistilBertTokenizer" => &[
            ("unk_token", Some("[UNK]")),
            ("sep_token", Some("[SEP]")),
            ("pad_token", Some("[PAD]")),
            ("cls_token", Some("[CLS]")),
            ("mask_token", Some("[MASK]")),
        ],
        "RobertaTokenizer" | "BartTokenizer" => &[
            ("bos_token", Some("<s>")),
            ("eos_token", Some("</s>")),
            ("sep_token", Some("</s>")),
            ("cls_token", Some("<s>")),
            ("unk_token", Some("<unk>")),
            ("pad_token", Some("<pad>")),
            ("mask_token", Some("<mask>")),
        ],
        _ => &[],
    }
}

/// Name of the list of further special tokens, and its older name.
const LIST: &str = "extra_special_tokens";
const OLDER_LIST: &str = "additional_special_tokens";

/// Name of the map of tokens of a model by their names.
const OF_MODEL: &str = "model_specific_special_tokens";

/// The tokens that the files beside a `tokenizer.json` name.
#[derive(Debug, Clone, Default)]
pub(super) struct Described {
    /// The special tokens by name.
    pub(super) named: Map<String, Value>,
    /// Tokens of `added_tokens_decoder`, by their ids: they replace those of tokenizer.json.
    listed: Vec<AddedToken>,
    /// Further tokens, which are added if tokenizer.json does not have them as added tokens.
    further: Vec<AddedToken>,
    /// The names among [`NAMES`] that the files set, null included.
    set: Vec<&'static str>,
}

impl Described {
    /// Reads the files in `dir`, whose `tokenizer_config.json` is `config`, as transformers does: the older files count where
    /// `tokenizer_config.json` has no `added_tokens_decoder`.
    ///
    /// # Errors
    /// If a file is not JSON, or a token in it is malformed.
    pub(super) fn read(dir: &Path, config: &Value) -> Result<Self> {
        let mut settings = config.as_object().cloned().unwrap_or_default();
        if is_empty(settings.get(LIST))
            && let Some(list) = settings.remove(OLDER_LIST)
        {
            settings.insert(LIST.into(), list);
        }
        let mut described = Self::default();
        let older = match config["added_tokens_decoder"].as_object() {
            Some(tokens) => {
                described.listed = listed(tokens).ok_or_else(|| {
                    let message = "`added_tokens_decoder`: expected objects with a `content`, found something else";
                    Error::invalid(dir.join(TOKENIZER_CONFIG), message)
                })?;
                Value::Null
            }
            None => {
                merge(&mut settings, &read_if_present(dir, SPECIAL_TOKENS_MAP)?);
                read_if_present(dir, ADDED_TOKENS)?
            }
        };
        if !settings.contains_key(LIST)
            && let Some(list) = settings.remove(OLDER_LIST)
        {
            settings.insert(LIST.into(), list);
        }
        let (named, mut further) = named_in(&settings);
        described.further = older_tokens(&older, &further);
        described.further.append(&mut further);
        let set = NAMES.into_iter().filter(|name| settings.contains_key(*name)).collect();
        Ok(Self { named, set, ..described })
    }

    /// Fills in tokens that the files do not set, as transformers does: the `defaults` of the class that `inner` has, and as the pad token the
    /// token of tokenizer.json's padding.
    pub(super) fn complete(&mut self, defaults: Defaults, padding: Option<&str>, inner: &Tokenizer) {
        let is_known = |token: &str| inner.token_to_id(token).is_some();
        for &(name, token) in defaults.iter().filter(|(name, _)| !self.set.contains(name)) {
            if let Some(token) = token.filter(|token| is_known(token)) {
                self.named.insert(name.into(), token.into());
            }
        }
        let sets_pad = self.set.contains(&"pad_token") || defaults.iter().any(|(name, _)| *name == "pad_token");
        if let Some(token) = padding.filter(|_| !sets_pad) {
            self.further.push(AddedToken::from(token.to_string(), true));
            self.named.insert("pad_token".into(), token.into());
        }
    }

    /// Whether `inner` has all tokens, so that adding them changes nothing.
    pub(super) fn is_in(&self, inner: &Tokenizer) -> bool {
        let added = inner.get_added_vocabulary();
        let is_same = |token: &AddedToken| {
            let id = added.get_vocab().get(&token.content);
            id.is_some_and(|id| added.get_added_tokens_decoder().get(id) == Some(token))
        };
        self.listed.iter().all(is_same) && self.missing_from(inner).next().is_none()
    }

    /// The further tokens that are no added tokens of `inner` yet.
    fn missing_from<'t>(&'t self, inner: &'t Tokenizer) -> impl Iterator<Item = &'t AddedToken> {
        let known = inner.get_added_vocabulary().get_vocab();
        self.further.iter().filter(|token| !token.content.is_empty() && !known.contains_key(&token.content))
    }

    /// Returns the first token whose id in `inner` is not below `count`, with its id.
    pub(super) fn first_from(&self, inner: &Tokenizer, count: i64) -> Option<(&str, i64)> {
        let mut tokens = self.listed.iter().chain(&self.further).map(|token| token.content.as_str());
        tokens.find_map(|token| Some((token, i64::from(inner.token_to_id(token)?))).filter(|(_, id)| *id >= count))
    }

    /// Adds the tokens to `inner`. Returns one more than the largest id among them.
    pub(super) fn add_to(&self, inner: &mut Tokenizer) -> tokenizers::Result<i64> {
        inner.add_tokens(self.listed.iter().cloned())?;
        // All in one call, since each call builds the search for added tokens again.
        let missing: Vec<AddedToken> = self.missing_from(inner).cloned().collect();
        inner.add_tokens(missing)?;
        let ids = self.listed.iter().chain(&self.further).filter_map(|token| inner.token_to_id(&token.content));
        Ok(ids.max().map_or(0, |id| i64::from(id) + 1))
    }

    /// The id of the token with this name.
    fn id(&self, inner: &Tokenizer, name: &str) -> Option<i64> {
        inner.token_to_id(self.named.get(name)?.as_str()?).map(i64::from)
    }
}

/// Whether a list of tokens is missing, null or empty.
fn is_empty(list: Option<&Value>) -> bool {
    match list {
        None | Some(Value::Null) => true,
        Some(Value::Array(tokens)) => tokens.is_empty(),
        Some(Value::Object(tokens)) => tokens.is_empty(),
        Some(_) => false,
    }
}

/// The tokens of an `added_tokens_decoder` by their ids, if all are objects with a `content`.
fn listed(tokens: &Map<String, Value>) -> Option<Vec<AddedToken>> {
    let mut tokens: Vec<(i64, &Value)> =
        tokens.iter().map(|(id, token)| (id.parse().unwrap_or(i64::MAX), token)).collect();
    tokens.sort_by_key(|(id, _)| *id);
    tokens.into_iter().map(|(_, token)| token.is_object().then(|| parse_token(token))?).collect()
}

/// Replaces the settings of `tokenizer_config.json` by those of `special_tokens_map.json`, whose objects are special tokens.
fn merge(settings: &mut Map<String, Value>, map: &Value) {
    for (key, value) in map.as_object().into_iter().flatten() {
        let mut value = value.clone();
        match (&mut value, settings.get_mut(key)) {
            (Value::Array(tokens), Some(Value::Array(known))) if key == LIST => {
                tokens.retain(|token| !known.contains(token));
                known.append(tokens);
                continue;
            }
            (Value::Object(token), _) if key != LIST => drop(token.insert("special".into(), true.into())),
            _ => {}
        }
        settings.insert(key.clone(), value);
    }
}

/// The special tokens by name, and all tokens that `settings` name, in the order in which transformers adds them.
fn named_in(settings: &Map<String, Value>) -> (Map<String, Value>, Vec<AddedToken>) {
    let (mut named, mut tokens) = (Map::new(), Vec::new());
    for key in NAMES {
        if let Some(token) = settings.get(key).and_then(parse_token) {
            named.insert(key.into(), token.content.clone().into());
            tokens.push(token.special(true));
        }
    }
    // Tokens of a model by their names, such as image_token. transformers skips the map of them if other such tokens are texts under keys of
    // their own.
    let is_model_token = |key: &str| key.ends_with("_token") && !NAMES.contains(&key);
    let mut model_tokens: Vec<(&String, &Value)> = settings.iter().filter(|(key, _)| is_model_token(key)).collect();
    model_tokens.extend(settings.get(LIST).and_then(Value::as_object).into_iter().flatten());
    if !model_tokens.iter().any(|(key, value)| value.is_string() || !settings.contains_key(*key)) {
        model_tokens.extend(settings.get(OF_MODEL).and_then(Value::as_object).into_iter().flatten());
    }
    // Tokens with a name are special, whatever their objects say.
    for (name, token) in model_tokens.into_iter().filter_map(|(name, token)| Some((name, parse_token(token)?))) {
        named.insert(name.clone(), token.content.clone().into());
        tokens.push(token.special(true));
    }
    let list = settings.get(LIST).and_then(Value::as_array).into_iter().flatten();
    tokens.extend(list.filter_map(parse_token));
    (named, tokens)
}

/// The tokens of an `added_tokens.json`; those that are in `special` are special.
fn older_tokens(tokens: &Value, special: &[AddedToken]) -> Vec<AddedToken> {
    let mut tokens: Vec<(&String, i64)> =
        tokens.as_object().into_iter().flatten().filter_map(|(token, id)| Some((token, id.as_i64()?))).collect();
    tokens.sort_by_key(|(_, id)| *id);
    let is_special = |token: &String| special.iter().any(|special| special.content == *token);
    tokens.into_iter().map(|(token, _)| AddedToken::from(token.clone(), is_special(token))).collect()
}

/// The token that a text (always special) or an object with a `content` describes.
fn parse_token(value: &Value) -> Option<AddedToken> {
    if let Value::String(text) = value {
        return Some(AddedToken::from(text.clone(), true));
    }
    let flag = |name: &str| value[name].as_bool();
    let (content, special) = (value["content"].as_str()?, flag("special").unwrap_or(false));
    let token = AddedToken::from(content.to_string(), special)
        .single_word(flag("single_word").unwrap_or(false))
        .lstrip(flag("lstrip").unwrap_or(false))
        .rstrip(flag("rstrip").unwrap_or(false))
        .normalized(flag("normalized").unwrap_or(!special));
    Some(token)
}

/// The special tokens of a model folder by their ids.
pub(super) struct SpecialTokens {
    pub(super) eos: Vec<i64>,
    pub(super) pad: Option<i64>,
    pub(super) apart: bool,
}

impl SpecialTokens {
    /// Reads the configurations in `dir`, after the names of `described`.
    ///
    /// # Errors
    /// If an id in a file is invalid.
    pub(super) fn read(dir: &Path, inner: Option<&Tokenizer>, described: &Described) -> Result<Self> {
        let id = |name| inner.and_then(|inner| described.id(inner, name));
        let mut special = Self { eos: id("eos_token").into_iter().collect(), pad: id("pad_token"), apart: false };
        let mut has_ends = false;
        // The ends of the first one that names any, as in transformers.
        for file in ["generation_config.json", "config.json"] {
            let config = read_if_present(dir, file)?;
            special.apart |= generates_from_an_encoder(&config);
            has_ends |=
                special.add_ids(&config, has_ends).map_err(|message| Error::invalid(dir.join(file), message))?;
        }
        Ok(special)
    }

    /// Adds the ids that `config` names: its eos ids end a text unless another file `has_ends`, its pad id counts if none is known. Returns
    /// whether it names eos ids.
    fn add_ids(&mut self, config: &Value, has_ends: bool) -> Result<bool, String> {
        let ids = |key: &str| -> Result<Vec<i64>, String> {
            let ids = match &config[key] {
                Value::Null => Some(Vec::new()),
                Value::Array(ids) => ids.iter().map(Value::as_i64).collect(),
                id => id.as_i64().map(|id| vec![id]),
            };
            ids.ok_or_else(|| format!("`{key}`: expected a token id or a list of them, found {}", config[key]))
        };
        let ends = ids("eos_token_id")?;
        for &id in ends.iter().filter(|_| !has_ends) {
            if !self.eos.contains(&id) {
                self.eos.push(id);
            }
        }
        self.pad = self.pad.or(ids("pad_token_id")?.first().copied());
        Ok(!ends.is_empty())
    }
}
