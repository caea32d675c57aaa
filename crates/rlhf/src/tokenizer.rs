//! Text to token ids and back, with explicit end and pad tokens and chat templates; `tokenizer.json` in and out.

mod bounds;
mod chat;
mod rules;

use crate::files;
use crate::model::{AdapterFolder, ModelConfig, no_such_file};
use crate::weights::read_json;
use crate::{Error, Result};
use chat::ChatTemplate;
pub(crate) use chat::user_message;
use rules::{Growth, guarded};
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The files that make up a tokenizer; those that are there travel with every model we save.
pub(crate) const FILES: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    CHAT_TEMPLATE,
];

/// Where a chat template has a file of its own.
const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// What a tokenizer without a tokenizer.json is made of.
const SLOW_FILES: [&str; 4] = ["vocab.json", "vocab.txt", "tokenizer.model", "spiece.model"];

/// The special tokens that have names, which chat templates know them by.
const NAMED_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A tokenizer, the tokens that end a text, and the chat template.
///
/// ```no_run
/// use rlhf::tokenizer::Tokenizer;
/// # fn main() -> rlhf::Result<()> {
/// let tokenizer = Tokenizer::from_pretrained("runs/sft".as_ref())?;
/// let ids = tokenizer.encode("The movie was")?;
/// assert_eq!(tokenizer.decode(&ids)?, "The movie was");
/// println!("eos: {:?}, pad: {:?}", tokenizer.eos(), tokenizer.pad());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Tokenizer {
    /// `None` where the folder has no tokenizer.json and none was asked for.
    inner: Option<tokenizers::Tokenizer>,
    /// What its rules may cost.
    growth: Option<Growth>,
    dir: PathBuf,
    files: Vec<(&'static str, Vec<u8>)>,
    /// The special tokens by name.
    named: Map<String, Value>,
    eos: Vec<i64>,
    pad: Option<i64>,
    template: Option<ChatTemplate>,
}

impl Tokenizer {
    /// Reads the tokenizer of a model folder.
    ///
    /// The eos token is what `tokenizer_config.json` or `special_tokens_map.json` says, else the `eos_token_id` of
    /// `config.json`, else that of `generation_config.json`; the ids of the latter two end a text in any case. The pad
    /// token comes from the same places and is not needed: lengths are explicit everywhere, so pad may also equal eos.
    ///
    /// The folder of an adapter may have no tokenizer: then it is that of its base.
    ///
    /// # Errors
    /// If there is no sound `tokenizer.json`, a named special token is not in the vocabulary, or an id of these files is none.
    pub fn from_pretrained(dir: &Path) -> Result<Self> {
        let dir = &Self::folder(dir)?;
        let path = dir.join("tokenizer.json");
        if path.is_file() {
            return Self::read(dir);
        }
        Err(match SLOW_FILES.iter().find(|name| dir.join(name).is_file()) {
            Some(name) => Error::invalid(
                dir,
                format!(
                    "expected a tokenizer.json, found {name} without one; convert it with transformers: \
                     `AutoTokenizer.from_pretrained(dir, use_fast=True).save_pretrained(new_dir)`"
                ),
            ),
            None => no_such_file(dir, "tokenizer.json"),
        })
    }

    /// As [`Tokenizer::from_pretrained`], also for a folder without a `tokenizer.json`: then text cannot be encoded, ids
    /// have no text, and the end and pad tokens are those of `config.json` and `generation_config.json`.
    ///
    /// # Errors
    /// If what there is, is not sound.
    pub fn of_text_or_ids(dir: &Path) -> Result<Self> {
        Self::read(&Self::folder(dir)?)
    }

    /// Whether text can be encoded and ids decoded.
    pub fn knows_text(&self) -> bool {
        self.inner.is_some()
    }

    fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let (mut inner, mut growth) = (None, None);
        if path.is_file() {
            growth = Some(Growth::read(&path)?);
            let mut found = guarded(|| tokenizers::Tokenizer::from_file(&path))
                .map_err(|e| Error::invalid(&path, format!("not a tokenizer that can be read: {e}")))?;
            // A file may ask for padding or truncation; here both would change what a text means.
            found.with_padding(None);
            found.with_truncation(None).map_err(|e| Error::invalid(&path, e.to_string()))?;
            inner = Some(found);
        }
        let mut files = Vec::new();
        for name in FILES {
            if dir.join(name).is_file() {
                files.push((name, files::read(&dir.join(name))?));
            }
        }
        let json = |name: &str| -> Result<Value> {
            let path = dir.join(name);
            if path.is_file() { read_json(&path) } else { Ok(Value::Null) }
        };
        let mut named = Map::new();
        let mut ids: Vec<(&str, i64)> = Vec::new();
        let tokenizer_config = json("tokenizer_config.json")?;
        let sources = [
            ("tokenizer_config.json", &tokenizer_config),
            ("special_tokens_map.json", &json("special_tokens_map.json")?),
        ];
        for (file, source) in sources.into_iter().filter(|_| inner.is_some()) {
            for key in NAMED_TOKENS {
                // A token is a string, or an object with its `content`.
                let value = &source[key];
                let token = value.as_str().or_else(|| value["content"].as_str());
                let Some(token) = token.filter(|_| !named.contains_key(key)) else { continue };
                named.insert(key.into(), token.into());
                match inner.as_ref().and_then(|inner| inner.token_to_id(token)) {
                    Some(id) => ids.push((key, i64::from(id))),
                    // The others are for templates only.
                    None if !["eos_token", "pad_token"].contains(&key) => {}
                    None => {
                        let message = format!("`{key}`: the token {token:?} is not in tokenizer.json");
                        return Err(Error::invalid(dir.join(file), message));
                    }
                }
            }
        }
        let id_of = |key: &str| ids.iter().find(|(name, _)| *name == key).map(|(_, id)| *id);
        let mut eos = Vec::from_iter(id_of("eos_token"));
        let mut pad = id_of("pad_token");
        for file in ["config.json", "generation_config.json"] {
            let config = json(file)?;
            let ids = |key: &str| -> Result<Vec<i64>> {
                let ids = match &config[key] {
                    Value::Null => Some(Vec::new()),
                    Value::Array(ids) => ids.iter().map(Value::as_i64).collect(),
                    id => id.as_i64().map(|id| vec![id]),
                };
                let message = || format!("`{key}`: expected a token id or a list of them, found {}", config[key]);
                ids.ok_or_else(|| Error::invalid(dir.join(file), message()))
            };
            for id in ids("eos_token_id")? {
                if !eos.contains(&id) {
                    eos.push(id);
                }
            }
            pad = pad.or(ids("pad_token_id")?.first().copied());
        }
        let mut tokenizer = Self { inner, growth, dir: dir.to_path_buf(), files, named, eos, pad, template: None };
        if dir.join(CHAT_TEMPLATE).is_file() {
            tokenizer.use_chat_template(&dir.join(CHAT_TEMPLATE))?;
        } else {
            tokenizer.template = template_of(&tokenizer_config)
                .map(|source| ChatTemplate::new(dir.join("tokenizer_config.json"), source));
        }
        Ok(tokenizer)
    }

    /// Where the tokenizer of the model in `dir` is: there, or, for an adapter without one, beside its base.
    fn folder(dir: &Path) -> Result<PathBuf> {
        match AdapterFolder::find(dir)? {
            Some(adapter) if !dir.join("tokenizer.json").is_file() => adapter.base_dir(),
            _ => Ok(dir.to_path_buf()),
        }
    }

    /// Whether the model in `dir` has a tokenizer.
    ///
    /// # Errors
    /// If it is an adapter whose base is not there.
    pub(crate) fn is_in(dir: &Path) -> Result<bool> {
        Ok(Self::folder(dir)?.join("tokenizer.json").is_file())
    }

    /// Takes the chat template from `file`, which is then saved with the tokenizer.
    ///
    /// # Errors
    /// If it cannot be read or is not UTF-8. Its syntax is looked at when it is first needed.
    pub fn use_chat_template(&mut self, file: &Path) -> Result<()> {
        let bytes = files::read(file)?;
        let source =
            std::str::from_utf8(&bytes).map_err(|_| Error::invalid(file, "expected UTF-8, found other bytes"))?;
        self.template = Some(ChatTemplate::new(file.to_path_buf(), source));
        self.files.retain(|(name, _)| *name != CHAT_TEMPLATE);
        self.files.push((CHAT_TEMPLATE, bytes));
        Ok(())
    }

    /// Whether there is a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Whether there is a chat template, and `other` has none or another.
    pub(crate) fn has_other_chat_template(&self, other: &Self) -> bool {
        let same = |own: &ChatTemplate| other.template.as_ref().is_some_and(|theirs| theirs.is_same(own));
        self.template.as_ref().is_some_and(|own| !same(own))
    }

    /// What a run tells of its tokenizer: the tokens that end a text, the pad token, the chat template.
    pub fn describe(&self) -> String {
        let show = |&id: &i64| {
            let token = u32::try_from(id).ok().and_then(|id| self.inner.as_ref()?.id_to_token(id));
            token.map_or(format!("{id}, which is no token"), |token| format!("{token:?} ({id})"))
        };
        let mut ends = self.eos.iter().map(show);
        let mut eos = ends.next().unwrap_or("none".into());
        for also in ends {
            eos += &format!(", also {also}");
        }
        let pad = match self.pad {
            None if self.eos.is_empty() => "none, not needed".into(),
            None => "none, not needed (saved as eos for transformers)".into(),
            Some(pad) if self.eos() == Some(pad) => "the same".into(),
            Some(pad) => show(&pad),
        };
        let template = self.template.as_ref().map_or("none".into(), |template| template.file().display().to_string());
        format!("eos {eos}; pad: {pad}; chat template: {template}")
    }

    /// The text of a conversation by the chat template, and its token ids; `variables` are further ones for the template.
    ///
    /// With `add_generation_prompt` it ends where the assistant is to answer. No special token is added to the template's.
    ///
    /// # Errors
    /// If there is no template, it is not sound, or it refuses the messages.
    pub fn encode_chat(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<(String, Vec<i64>)> {
        let template = self.require_chat_template()?;
        let variables = self.named.iter().filter(|(name, _)| !variables.contains_key(*name)).chain(variables);
        let variables = variables.map(|(name, value)| (name.clone(), value.clone()));
        let text = template.render(messages, add_generation_prompt, variables)?;
        match self.encode_verbatim(&text)? {
            ids if ids.is_empty() => Err(Error::Run("the chat template makes no text of the messages".into())),
            ids => Ok((text, ids)),
        }
    }

    fn require_chat_template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().ok_or_else(|| {
            Error::Run(format!(
                "a list of messages needs a chat template: expected `chat_template` in tokenizer_config.json, or a \
                 {CHAT_TEMPLATE}, in {}, found neither",
                self.dir.display()
            ))
        })
    }

    /// Which tokens of a conversation, as [`Tokenizer::encode_chat`] encodes it whole, the assistant says: those in the
    /// `{% generation %}` blocks of the chat template; where it has none, those of each turn of the assistant behind what the
    /// template writes to ask for it, up to the turn's end.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_chat`]; if the template has no such blocks, and writes a turn otherwise when others follow it.
    pub fn assistant_tokens(&self, messages: &[Value], variables: &Map<String, Value>) -> Result<Vec<Range<usize>>> {
        let template = self.require_chat_template()?;
        let all = || {
            let named = self.named.iter().filter(|(name, _)| !variables.contains_key(*name));
            named.chain(variables).map(|(name, value)| (name.clone(), value.clone()))
        };
        let (text, spans) = if template.has_marks() {
            template.render_marked(messages, all())?
        } else {
            let text = template.render(messages, false, all())?;
            let mut spans = Vec::new();
            for (at, _) in messages.iter().enumerate().filter(|(_, message)| message["role"] == "assistant") {
                let before = template.render(&messages[..at], true, all())?;
                let after = template.render(&messages[..=at], false, all())?;
                if !after.starts_with(&before) || !text.starts_with(&after) {
                    return Err(Error::Run(format!(
                        "assistant_only_loss: {} has no {{% generation %}} blocks, and its text of message {} is not the \
                         same alone and among the others",
                        template.file().display(),
                        at + 1
                    )));
                }
                spans.push(before.len()..after.len());
            }
            (text, spans)
        };
        let offsets = self.offsets(&text)?;
        let within = |span: &Range<usize>| {
            let begin = offsets.iter().position(|(from, to)| *from < span.end && *to > span.start)?;
            let end = offsets.iter().rposition(|(from, to)| *from < span.end && *to > span.start)?;
            Some(begin..end + 1)
        };
        Ok(spans.iter().filter_map(within).collect())
    }

    /// Where in `text` each of its tokens stands, in bytes, encoded as [`Tokenizer::encode_verbatim`] does.
    fn offsets(&self, text: &str) -> Result<Vec<(usize, usize)>> {
        let Some(inner) = &self.inner else { return Ok(Vec::new()) };
        let encoding = guarded(|| inner.encode(text, false)).map_err(|e| self.error(&e))?;
        Ok(encoding.get_offsets().to_vec())
    }

    /// Token ids of `text`, with what the tokenizer puts around a text (a begin token, say).
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>> {
        self.encode_with(text, true)
    }

    /// Token ids of `text` alone: special tokens are those that stand in it. For text from a chat template.
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode_verbatim(&self, text: &str) -> Result<Vec<i64>> {
        self.encode_with(text, false)
    }

    /// Token ids of `text` that is to be continued: as [`Tokenizer::encode`], less the eos that some tokenizers put behind
    /// every text. An eos that stands in `text` itself stays.
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<i64>> {
        let ids = self.encode(text)?;
        self.without_added_eos(ids, text)
    }

    /// `ids`, which [`Tokenizer::encode`] gave for `text`, less the eos that the tokenizer put behind it.
    fn without_added_eos(&self, mut ids: Vec<i64>, text: &str) -> Result<Vec<i64>> {
        if ids.last().is_some_and(|id| self.eos.contains(id)) {
            let ends = |ids: &[i64]| ids.iter().rev().take_while(|id| self.eos.contains(id)).count();
            let own = ends(&self.encode_verbatim(text)?);
            ids.truncate(ids.len() - ends(&ids).saturating_sub(own));
        }
        Ok(ids)
    }

    /// As [`Tokenizer::encode_open_pair`], less the eos that some tokenizers put behind every text, as
    /// [`Tokenizer::encode_prompt`] leaves it out.
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode_unclosed_pair(&self, prompt: &str, completion: &str) -> Result<(Vec<i64>, usize)> {
        let (whole, border) = self.encode_open_pair(prompt, completion)?;
        let whole = self.without_added_eos(whole, &format!("{prompt}{completion}"))?;
        let border = border.min(whole.len());
        Ok((whole, border))
    }

    fn encode_with(&self, text: &str, add_special_tokens: bool) -> Result<Vec<i64>> {
        let inner = self.inner.as_ref().ok_or_else(|| {
            Error::Run(format!(
                "text needs a tokenizer, and {} has no tokenizer.json; rows of token ids (prompt_ids) need none",
                self.dir.display()
            ))
        })?;
        self.growth.map_or(Ok(()), |growth| growth.check_encode(text.len())).map_err(|e| self.error(&e))?;
        let encoding = guarded(|| inner.encode_fast(text, add_special_tokens)).map_err(|e| self.error(&e))?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
    }

    /// Token ids of a prompt with its completion, eos last, and the place of the first token that the prompt alone does
    /// not have.
    ///
    /// The two are encoded as one text, as TRL does: encoded apart, a SentencePiece tokenizer would put a space between
    /// them. Where the border falls inside a token, that token counts as the completion's.
    ///
    /// # Errors
    /// If the tokenizer cannot encode it, or names no eos token.
    pub fn encode_pair(&self, prompt: &str, completion: &str) -> Result<(Vec<i64>, usize)> {
        let eos = self.require_eos()?;
        let (mut whole, border) = self.encode_open_pair(prompt, completion)?;
        if whole.last() != Some(&eos) {
            whole.push(eos);
        }
        Ok((whole, border))
    }

    /// As [`Tokenizer::encode_pair`], with no eos added: what the tokenizer makes of the text and nothing else.
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode_open_pair(&self, prompt: &str, completion: &str) -> Result<(Vec<i64>, usize)> {
        let alone = self.encode_prompt(prompt)?;
        let whole = self.encode(&format!("{prompt}{completion}"))?;
        let shared = shared_prefix(&alone, &whole);
        Ok((whole, shared))
    }

    /// The text of token ids, without special tokens.
    ///
    /// # Errors
    /// If the tokenizer cannot decode them.
    pub fn decode(&self, ids: &[i64]) -> Result<String> {
        self.decode_with(ids, true)
    }

    /// The text of token ids, special tokens and all.
    ///
    /// # Errors
    /// If the tokenizer cannot decode them.
    pub fn decode_verbatim(&self, ids: &[i64]) -> Result<String> {
        self.decode_with(ids, false)
    }

    fn decode_with(&self, ids: &[i64], skip_special_tokens: bool) -> Result<String> {
        let id = |&id: &i64| {
            u32::try_from(id).map_err(|_| self.error(&format!("expected token ids from 0 to {}, found {id}", u32::MAX)))
        };
        let ids: Vec<u32> = ids.iter().map(id).collect::<Result<_>>()?;
        let Some(inner) = &self.inner else { return Ok(String::new()) };
        let bytes = || ids.iter().filter_map(|&id| inner.id_to_token(id)).map(|token| token.len()).sum();
        self.growth.map_or(Ok(()), |growth| growth.check_decode(bytes)).map_err(|e| self.error(&e))?;
        guarded(|| inner.decode(&ids, skip_special_tokens)).map_err(|e| self.error(&e))
    }

    /// The text that `ids` add to that of `prompt`, without special tokens.
    ///
    /// Decoded by themselves, ids of a SentencePiece tokenizer would lose the space before their first word.
    pub fn decode_after(&self, prompt: &[i64], ids: &[i64]) -> Result<String> {
        let whole = self.decode(&[prompt, ids].concat())?;
        match whole.strip_prefix(&self.decode(prompt)?) {
            Some(text) => Ok(text.to_string()),
            None => self.decode(ids), // The border lies within a character.
        }
    }

    /// The id of the token that is put at the end of a text, if there is one.
    pub fn eos(&self) -> Option<i64> {
        self.eos.first().copied()
    }

    /// The ids of all tokens that end a text, [`Tokenizer::eos`] first.
    pub fn eos_ids(&self) -> &[i64] {
        &self.eos
    }

    /// The id of the pad token, if there is one; it is only noted in what we save.
    pub fn pad(&self) -> Option<i64> {
        self.pad
    }

    /// The id of the token that ends a text.
    ///
    /// # Errors
    /// If the tokenizer names none.
    pub fn require_eos(&self) -> Result<i64> {
        self.eos().ok_or_else(|| self.error("expected an `eos_token` in tokenizer_config.json, found none"))
    }

    /// Checks that every id of this tokenizer has a row in `model`'s embedding.
    ///
    /// # Errors
    /// If it does not; `dir` is the model's folder.
    pub fn check_fits(&self, model: &ModelConfig, dir: &Path) -> Result<()> {
        let ids = self.vocab().into_values().max().map_or(0, |id| i64::from(id) + 1);
        let eos = self.eos().filter(|eos| !(0..model.vocab_size).contains(eos));
        if let Some(eos) = eos {
            let message = format!("eos_token_id: expected an id below vocab_size {}, found {eos}", model.vocab_size);
            return Err(Error::invalid(&self.dir, message));
        }
        if ids <= model.vocab_size {
            return Ok(());
        }
        Err(Error::invalid(
            dir,
            format!(
                "expected a vocabulary of at least {ids}, the tokenizer's in {}, found vocab_size {}",
                self.dir.display(),
                model.vocab_size
            ),
        ))
    }

    /// Checks that the tokenizer in the model folder `dir`, if it has one, gives the same ids as this one.
    ///
    /// # Errors
    /// If it does not: that model would read other words than this one's.
    pub fn check_same(&self, dir: &Path) -> Result<()> {
        if !Self::is_in(dir)? {
            return Ok(());
        }
        let differing = self.difference(&Self::from_pretrained(dir)?);
        if differing == 0 {
            return Ok(());
        }
        Err(Error::invalid(
            dir,
            format!(
                "expected the tokenizer of {}, found one that differs in {differing} tokens: the two models read the same ids",
                self.dir.display(),
            ),
        ))
    }

    fn vocab(&self) -> std::collections::HashMap<String, u32> {
        self.inner.as_ref().map(|inner| inner.get_vocab(true)).unwrap_or_default()
    }

    /// How many of this tokenizer's tokens have another id, or none, in `other`.
    pub(crate) fn difference(&self, other: &Self) -> usize {
        let theirs = other.vocab();
        self.vocab().iter().filter(|(token, id)| theirs.get(*token) != Some(id)).count()
    }

    /// From now on a text of more than `most` tokens is cut to its last ones; what the tokenizer puts around it stays.
    ///
    /// # Errors
    /// If that is more than `most` already.
    pub(crate) fn keep_last(&mut self, most: usize) -> Result<()> {
        let direction = tokenizers::TruncationDirection::Left;
        let truncation = tokenizers::TruncationParams { max_length: most, direction, ..Default::default() };
        let Some(inner) = &mut self.inner else { return Ok(()) };
        let done = inner.with_truncation(Some(truncation)).map(|_| ()).map_err(|e| e.to_string());
        done.map_err(|message| self.error(&message))
    }

    /// Writes the tokenizer's files below `dir`, byte for byte as they were read.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_pretrained(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
        for (name, bytes) in &self.files {
            std::fs::write(dir.join(name), bytes).map_err(Error::io("write", dir.join(name)))?;
        }
        Ok(())
    }

    fn error(&self, message: &str) -> Error {
        Error::invalid(self.dir.join("tokenizer.json"), message)
    }
}

/// The chat template in a tokenizer_config.json: a text, or the one of a list that is named "default".
fn template_of(config: &Value) -> Option<&str> {
    let template = &config["chat_template"];
    let named = || template.as_array()?.iter().find(|one| one["name"] == "default")?["template"].as_str();
    template.as_str().or_else(named)
}

/// How many ids two sequences begin with in common.
pub(crate) fn shared_prefix(a: &[i64], b: &[i64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
