//! The vocabulary of a GGUF file as a `tokenizer.json`.

use rlhf_base::Result;
use rlhf_lm::gguf::{Gguf, Value as Meta};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::HashMap;

/// Types of tokens.
pub(super) const UNKNOWN: i64 = 2;
pub(super) const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;
pub(super) const UNUSED: i64 = 5;

/// Maximum size in bytes of a token that is made by merges: far above SentencePiece's, and small enough to try each of its divisions.
const LONGEST_MERGED: usize = 512;

/// SentencePiece's space.
pub(super) const SPACE: &str = "\u{2581}";

/// The regular expression by which Llama 3 splits a text.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The regular expression by which Qwen2 splits a text.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The regular expression by which Qwen3.5 splits a text: marks are parts of words.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The regular expression by which gpt-oss splits a text: words end where a small letter is followed by a large one.
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// A tokenizer as its file describes it.
#[derive(Debug)]
pub(super) enum Vocabulary {
    /// The content of `tokenizer.json` and of `tokenizer_config.json`.
    Known { tokenizer: Value, settings: Value },
    /// The reason why there is none.
    Unknown(String),
}

impl Vocabulary {
    /// Reads a file's vocabulary for a model with `rows` tokens.
    ///
    /// # Errors
    /// If the metadata contradicts itself.
    pub(super) fn read(file: &Gguf, rows: i64) -> Result<Self> {
        let Some(pieces) = Pieces::read(file, rows)? else {
            return Ok(Self::Unknown("the file has no vocabulary".into()));
        };
        let text = |key: &str| -> Result<String> { Ok(file.text(key)?.unwrap_or_default().to_string()) };
        let (model, pre) = (text("tokenizer.ggml.model")?, text("tokenizer.ggml.pre")?);
        if let Some(twice) = pieces.repeated() {
            return Ok(Self::Unknown(format!("the token {} is there twice", Meta::Text(twice.into()).brief())));
        }
        let tokenizer = match model.as_str() {
            "gpt2" => match Split::of(&pre) {
                Some(split) => pieces.byte_level(file, &split)?,
                None => {
                    let reason = format!("`tokenizer.ggml.pre` = {}: its rules are not known", Meta::Text(pre).brief());
                    return Ok(Self::Unknown(reason));
                }
            },
            "llama" => pieces.sentencepiece(file)?,
            "gemma4" => pieces.gemma4(file)?,
            other => {
                let other = Meta::Text(other.into()).brief();
                return Ok(Self::Unknown(format!("`tokenizer.ggml.model` = {other} is not supported")));
            }
        };
        Ok(Self::Known { tokenizer, settings: pieces.settings(file)? })
    }
}

/// The merges that a file states.
fn stored_merges(file: &Gguf) -> Result<Vec<[&str; 2]>> {
    let merges = file.texts("tokenizer.ggml.merges")?;
    let merges = merges.ok_or_else(|| file.error("expected the key `tokenizer.ggml.merges`, found none"))?;
    let wrong = |merge: &str| {
        let found = Meta::Text(merge.into()).brief();
        file.error(format!("`tokenizer.ggml.merges`: expected two tokens with a space between, found {found}"))
    };
    merges.iter().map(|merge| merge.split_once(' ').map(|(a, b)| [a, b]).ok_or_else(|| wrong(merge))).collect()
}

/// The rules of a byte-level vocabulary before its merges.
pub(super) struct Split {
    /// Normalization.
    pub(super) normalizer: Value,
    /// Steps of the division into words.
    pub(super) steps: Value,
    /// Whether a word that is itself a token becomes that token without merges.
    ignore_merges: bool,
    /// Whether a text starts with the bos token, if the file does not say.
    adds_bos: bool,
}

impl Split {
    /// llama.cpp's names of the rules that are known.
    pub(super) const NAMES: [&str; 6] = ["gpt-2", "llama-bpe", "qwen2", "qwen35", "smollm", "gpt-4o"];

    /// The rules that llama.cpp calls `name`.
    pub(super) fn of(name: &str) -> Option<Self> {
        let bytes = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
        let split = |regex: &str| {
            let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
            json!({"type": "Sequence", "pretokenizers": [split, bytes(false)]})
        };
        let plain = |steps: Value| Self { normalizer: Value::Null, steps, ignore_merges: false, adds_bos: false };
        Some(match name {
            "gpt-2" => plain(bytes(true)),
            "llama-bpe" | "llama3" | "llama-v3" | "lfm2" => {
                Self { ignore_merges: true, adds_bos: true, ..plain(split(LLAMA3)) }
            }
            "gpt-4o" => Self { ignore_merges: true, ..plain(split(GPT4O)) },
            "qwen2" | "deepseek-r1-qwen" => Self { normalizer: json!({"type": "NFC"}), ..plain(split(QWEN2)) },
            "qwen35" => Self { normalizer: json!({"type": "NFC"}), ..plain(split(QWEN35)) },
            "smollm" | "refact" | "starcoder" => {
                let digits = json!({"type": "Digits", "individual_digits": true});
                plain(json!({"type": "Sequence", "pretokenizers": [digits, bytes(true)]}))
            }
            _ => return None,
        })
    }
}

/// The steps by which a `pre_tokenizer` divides a text, without settings that change no token.
pub(super) fn signature(steps: &Value) -> Vec<String> {
    let kind = steps["type"].as_str().unwrap_or_default();
    match kind {
        "Sequence" => steps["pretokenizers"].as_array().into_iter().flatten().flat_map(signature).collect(),
        "Split" => vec![format!("split {} {} {}", steps["pattern"], steps["behavior"], steps["invert"])],
        "Digits" => vec![format!("digits {}", steps["individual_digits"])],
        "ByteLevel" => {
            let prefix = steps["add_prefix_space"].as_bool().unwrap_or(true);
            vec![format!("bytes {prefix} {}", steps["use_regex"].as_bool().unwrap_or(true))]
        }
        other => vec![other.to_string()],
    }
}

/// The tokens of a file.
struct Pieces<'a> {
    texts: Vec<Cow<'a, str>>,
    kinds: Option<&'a [i64]>,
    scores: Option<&'a [f32]>,
}

impl<'a> Pieces<'a> {
    fn read(file: &'a Gguf, rows: i64) -> Result<Option<Self>> {
        let Some(texts) = file.texts("tokenizer.ggml.tokens")? else { return Ok(None) };
        let (kinds, scores) = (file.integers("tokenizer.ggml.token_type")?, file.numbers("tokenizer.ggml.scores")?);
        if texts.len() as i64 > rows {
            let message = format!(
                "`tokenizer.ggml.tokens`: expected at most {rows}, the rows of the embedding, found {}",
                texts.len()
            );
            return Err(file.error(message));
        }
        for (name, len) in [("token_type", kinds.map(<[i64]>::len)), ("scores", scores.map(<[f32]>::len))] {
            if let Some(len) = len.filter(|&len| len != texts.len()) {
                let message =
                    format!("`tokenizer.ggml.{name}`: expected {} elements, one per token, found {len}", texts.len());
                return Err(file.error(message));
            }
        }
        // Files have plain spaces in the added tokens of Gemma that are only spaces.
        let is_spaces = |id: usize, text: &str| {
            kinds.is_some_and(|kinds| kinds[id] == USER_DEFINED) && !text.is_empty() && text.bytes().all(|b| b == b' ')
        };
        let is_sentencepiece = file.text("tokenizer.ggml.model")? == Some("llama");
        let text = |(id, text): (usize, &'a String)| match text.as_str() {
            text if is_sentencepiece && is_spaces(id, text) => Cow::Owned(text.replace(' ', SPACE)),
            text => Cow::Borrowed(text),
        };
        Ok(Some(Self { texts: texts.iter().enumerate().map(text).collect(), kinds, scores }))
    }

    fn kind(&self, id: usize) -> i64 {
        self.kinds.map_or(1, |kinds| kinds[id])
    }

    /// The tokens with their ids; padding of the vocabulary is left out.
    fn used(&self) -> impl Iterator<Item = (usize, &str)> + '_ {
        let texts = self.texts.iter().enumerate();
        texts.filter(|(id, _)| self.kind(*id) != UNUSED).map(|(id, text)| (id, &**text))
    }

    fn ids(&self) -> HashMap<&str, usize> {
        self.used().map(|(id, text)| (text, id)).collect()
    }

    fn repeated(&self) -> Option<&str> {
        let mut seen = std::collections::HashSet::new();
        self.used().find(|(_, text)| !seen.insert(*text)).map(|(_, text)| text)
    }

    /// The token of the key `tokenizer.ggml.{name}_token_id`, if it is set.
    fn special(&self, file: &Gguf, name: &str) -> Result<Option<&str>> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = file.integer(&key)? else { return Ok(None) };
        match usize::try_from(id).ok().and_then(|id| self.texts.get(id)) {
            Some(text) => Ok(Some(&**text)),
            None => {
                let most = self.texts.len();
                Err(file.error(format!("`{key}`: expected a token's id below {most}, found {id}")))
            }
        }
    }

    /// `tokenizer_config.json`.
    fn settings(&self, file: &Gguf) -> Result<Value> {
        let mut settings = Map::from_iter([
            ("tokenizer_class".into(), json!("PreTrainedTokenizerFast")),
            ("clean_up_tokenization_spaces".into(), json!(false)),
        ]);
        for (name, key) in
            [("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")]
        {
            settings.extend(self.special(file, name)?.map(|token| (key.to_string(), json!(token))));
        }
        settings.extend(file.text("tokenizer.chat_template")?.map(|text| ("chat_template".to_string(), json!(text))));
        Ok(Value::Object(settings))
    }

    /// Tokens that are found in a text before it is split.
    fn added(&self) -> Vec<Value> {
        let is_added = |id: usize| [UNKNOWN, CONTROL, USER_DEFINED].contains(&self.kind(id));
        let added = |(id, text): (usize, &str)| {
            json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": self.kind(id) != USER_DEFINED,
            })
        };
        self.used().filter(|(id, _)| is_added(*id)).map(added).collect()
    }

    /// The special tokens around a text: bos and eos if the file adds them, or `adds_bos` if it does not say.
    fn template(&self, file: &Gguf, adds_bos: bool) -> Result<Option<Value>> {
        let adds = |name: &str, default: bool| -> Result<Option<&str>> {
            let adds = file.flag(&format!("tokenizer.ggml.add_{name}_token"))?.unwrap_or(default);
            if adds { self.special(file, name) } else { Ok(None) }
        };
        let (bos, eos) = (adds("bos", adds_bos)?, adds("eos", false)?);
        if bos.is_none() && eos.is_none() {
            return Ok(None);
        }
        let ids = self.ids();
        let token = |token: &str| json!({"SpecialToken": {"id": token, "type_id": 0}});
        let around = |text: &str| {
            let text = json!({"Sequence": {"id": text, "type_id": 0}});
            bos.map(token).into_iter().chain([text]).chain(eos.map(token)).collect::<Vec<_>>()
        };
        let special: Map<String, Value> = [bos, eos]
            .into_iter()
            .flatten()
            .map(|text| (text.to_string(), json!({"id": text, "ids": [ids.get(text)], "tokens": [text]})))
            .collect();
        let pair = [around("A"), around("B")].concat();
        Ok(Some(json!({"type": "TemplateProcessing", "single": around("A"), "pair": pair, "special_tokens": special})))
    }

    /// A byte-level vocabulary, as GPT-2's.
    fn byte_level(&self, file: &Gguf, split: &Split) -> Result<Value> {
        let merges = stored_merges(file)?;
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
        let processor = match self.template(file, split.adds_bos)? {
            Some(template) => json!({"type": "Sequence", "processors": [bytes, template]}),
            None => bytes.clone(),
        };
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": self.added(),
            "normalizer": split.normalizer, "pre_tokenizer": split.steps, "post_processor": processor, "decoder": bytes,
            "model": self.bpe(&merges, &json!({"ignore_merges": split.ignore_merges})),
        }))
    }

    /// Gemma 4's vocabulary: as SentencePiece's, but with merges, and without a space before a text.
    fn gemma4(&self, file: &Gguf) -> Result<Value> {
        let decoders = json!([
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        ]);
        let more = json!({"byte_fallback": true, "fuse_unk": true, "unk_token": self.special(file, "unknown")?});
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": self.added(),
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}, "pre_tokenizer": null,
            "post_processor": self.template(file, true)?, "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self.bpe(&stored_merges(file)?, &more),
        }))
    }

    /// A vocabulary of SentencePiece's BPE, with bytes for unknown characters, as Llama 2's.
    fn sentencepiece(&self, file: &Gguf) -> Result<Value> {
        let scores = self.scores.ok_or_else(|| file.error("expected the key `tokenizer.ggml.scores`, found none"))?;
        let unknown = self.special(file, "unknown")?;
        let prefix = file.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})];
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let more = json!({"byte_fallback": true, "fuse_unk": true, "unk_token": unknown});
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": self.added(),
            "normalizer": {"type": "Sequence", "normalizers": normalizers}, "pre_tokenizer": null,
            "post_processor": self.template(file, true)?, "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self.bpe(&self.merges(scores), &more),
        }))
    }

    /// The merges that SentencePiece's scores imply: each way to make a token of two others, best scores first.
    fn merges(&self, scores: &[f32]) -> Vec<[&str; 2]> {
        let ids = self.ids();
        let mut merges: Vec<(f32, [&str; 2])> = Vec::new();
        for (id, text) in self.used().filter(|(_, text)| text.len() <= LONGEST_MERGED) {
            let parts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
            let known = parts.filter(|(a, b)| ids.contains_key(a) && ids.contains_key(b));
            let mut ways: Vec<[&str; 2]> = known.map(|(a, b)| [a, b]).collect();
            ways.sort_by_key(|[a, b]| (ids[a], ids[b]));
            merges.extend(ways.into_iter().map(|way| (scores[id], way)));
        }
        let len = |[a, b]: &[&str; 2]| (a.chars().count(), b.chars().count());
        merges.sort_by(|(a, first), (b, second)| b.total_cmp(a).then_with(|| len(second).cmp(&len(first))));
        merges.into_iter().map(|(_, way)| way).collect()
    }

    fn bpe(&self, merges: &[[&str; 2]], more: &Value) -> Value {
        let vocab: Map<String, Value> = self.used().map(|(id, text)| (text.to_string(), json!(id))).collect();
        let mut model = json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        });
        for (key, value) in more.as_object().into_iter().flatten() {
            model[key] = value.clone();
        }
        model
    }
}
