//! Tokenizers: encode text as token ids and decode it, with explicit eos and pad tokens and chat templates, from `tokenizer.json`.

mod bounds;
mod chat;
mod date;
mod file;
mod messages;
mod python;
mod rules;
mod settings;
mod special;
mod templates;
mod tools;
mod turns;

use crate::model::{AdapterFolder, ModelConfig, is_encoder_decoder_family};
use chat::ChatTemplate;
pub use chat::user_message;
pub use date::{FixedDate, fixed as fixed_date, now as date_now};
pub use messages::{MessageFault, REASONING, check_message, json_text, message_text, without_nulls};
use rlhf_base::files;
use rlhf_base::weights::{no_such_file, read_json};
use rlhf_base::{Error, Result};
use rules::{Growth, guarded};
use serde_json::{Map, Value};
use settings::Settings;
use special::{Described, SpecialTokens};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use templates::Templates;
pub use templates::{FURTHER as FURTHER_TEMPLATES, further_templates, is_further_template};
pub use tools::{ToolCall, ToolTemplate, Turn, TurnStream};
use turns::Turns;

/// The file of a tokenizer that is read.
const JSON: &str = "tokenizer.json";

/// The file of a tokenizer's settings.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// The file of special tokens of a folder that older versions of transformers wrote.
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";

/// The name of the token that ends a text.
const EOS_TOKEN: &str = "eos_token";

/// The files of a tokenizer; the existing ones are saved with every model.
pub const FILES: [&str; 10] = [
    JSON,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    CHAT_TEMPLATE,
];

/// The file of a chat template that is not in `tokenizer_config.json`.
const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// Files of tokenizers without a `tokenizer.json`.
const SLOW_FILES: [&str; 4] = ["vocab.json", "vocab.txt", "tokenizer.model", "spiece.model"];

/// A tokenizer, the tokens that end a text, and the chat template.
///
/// ```no_run
/// use rlhf_lm::tokenizer::Tokenizer;
/// # fn main() -> rlhf_base::Result<()> {
/// let tokenizer = Tokenizer::from_pretrained("runs/sft".as_ref())?;
/// let ids = tokenizer.encode("The movie was")?;
/// assert_eq!(tokenizer.decode(&ids)?, "The movie was");
/// println!("eos: {:?}, pad: {:?}", tokenizer.eos(), tokenizer.pad());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Tokenizer {
    /// `None` if the folder has no tokenizer.json and none is required. Copies share it.
    inner: Option<Arc<tokenizers::Tokenizer>>,
    /// Bounds on the cost of its rules.
    growth: Option<Growth>,
    /// One more than the largest id of all tokens, and of the tokens in tokenizer.json.
    ids: i64,
    file_ids: i64,
    dir: PathBuf,
    files: Vec<(&'static str, Vec<u8>)>,
    /// The token of the padding of tokenizer.json.
    padding: Option<String>,
    /// The tokens that the files beside tokenizer.json name.
    described: Described,
    /// Whether tokenizer.json has all these tokens.
    is_plain: bool,
    /// The settings beside tokenizer.json.
    settings: Settings,
    eos: Vec<i64>,
    pad: Option<i64>,
    templates: Templates,
    /// Variables of the chat template for every conversation.
    variables: Map<String, Value>,
    /// Prompt and response are two texts, as an encoder-decoder reads them.
    apart: bool,
    /// See [`Tokenizer::limited_to`].
    most: Option<usize>,
}

/// Bytes of the smallest part of a text that is encoded before the whole.
const LEAST_PART: usize = 64 << 10;

/// Number of tokens by which a part of a text has to exceed a limit, since the cut may divide a word.
pub const PART_SLACK: usize = 64;

impl Tokenizer {
    /// Loads the tokenizer of a model folder.
    ///
    /// The eos token comes from `tokenizer_config.json` or `special_tokens_map.json`, else it is the first `eos_token_id` of
    /// `generation_config.json`, else of `config.json`. Every such id of `generation_config.json` ends a text, or, if that names none, every
    /// such id of `config.json`. The pad token comes from the same files, or from the padding of `tokenizer.json`, and is not required: lengths are
    /// explicit everywhere, so pad may also equal eos. As in transformers, tokens that `tokenizer_config.json` names and `tokenizer.json` lacks
    /// are added.
    ///
    /// If the folder of an adapter has no tokenizer, loads its base's tokenizer.
    ///
    /// In the folder of an encoder-decoder, [`Tokenizer::set_encoder_decoder`] is set.
    ///
    /// # Errors
    /// If there is no valid `tokenizer.json`, or a token or an id in these files is invalid.
    pub fn from_pretrained(dir: &Path) -> Result<Self> {
        Self::from_folder(dir, None)
    }

    /// As [`Tokenizer::from_pretrained`], with the variables of [`Tokenizer::set_chat_variables`] of this one; if both have the same
    /// `tokenizer.json`, its vocabulary is not read again and takes memory once.
    ///
    /// # Errors
    /// As [`Tokenizer::from_pretrained`].
    pub fn beside(&self, dir: &Path) -> Result<Self> {
        Ok(Self { variables: self.variables.clone(), ..Self::from_folder(dir, Some(self))? })
    }

    fn from_folder(dir: &Path, other: Option<&Self>) -> Result<Self> {
        let dir = &Self::folder(dir)?;
        let path = dir.join("tokenizer.json");
        if path.is_file() {
            return Self::read(dir, other);
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
    /// have no text, and the eos and pad tokens come from `config.json` and `generation_config.json`.
    ///
    /// # Errors
    /// If an existing file is invalid.
    pub fn of_text_or_ids(dir: &Path) -> Result<Self> {
        Self::read(&Self::folder(dir)?, None)
    }

    /// The folder that the tokenizer was read from.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether text can be encoded and ids decoded.
    pub fn knows_text(&self) -> bool {
        self.inner.is_some()
    }

    fn read(dir: &Path, shared: Option<&Self>) -> Result<Self> {
        let mut files = Vec::new();
        for name in FILES {
            if dir.join(name).is_file() {
                files.push((name, files::read(&dir.join(name))?));
            }
        }
        let tokenizer_config = read_if_present(dir, TOKENIZER_CONFIG)?;
        settings::name_class_of_text_part(&mut files, &tokenizer_config, &read_if_present(dir, "config.json")?);
        let mut described = Described::read(dir, &tokenizer_config)?;
        let settings = Settings::read(dir, &tokenizer_config)?;
        let (mut inner, mut growth, mut ids, mut file_ids, mut is_plain) = (None, None, 0, 0, true);
        let mut padding = None;
        if let [(JSON, json), ..] = &files[..] {
            if let Some(other) = shared.filter(|other| other.reads_as(json, &described, &settings)) {
                (inner, growth, padding) = (other.inner.clone(), other.growth, other.padding.clone());
                (ids, file_ids) = (other.ids, other.file_ids);
                if let Some(inner) = &inner {
                    described.complete(settings.defaults, padding.as_deref(), inner);
                }
            } else {
                let path = dir.join(JSON);
                // Bounds are read first: they reject rules that loading would fail on.
                growth = Some(Growth::read(&path, json)?);
                let (mut tokenizer, count, pads_by) =
                    load(&path, settings.applied(dir, json)?.as_deref().unwrap_or(json))?;
                tokenizer.set_encode_special_tokens(settings.split_special_tokens);
                (ids, file_ids) = (count, count);
                padding = pads_by;
                described.complete(settings.defaults, padding.as_deref(), &tokenizer);
                is_plain = described.is_in(&tokenizer);
                if !is_plain {
                    let added = guarded(|| described.add_to(&mut tokenizer));
                    ids = ids.max(added.map_err(|e| Error::invalid(dir.join(TOKENIZER_CONFIG), e))?);
                }
                inner = Some(Arc::new(tokenizer));
            }
        }
        let SpecialTokens { eos, pad, mut apart } = SpecialTokens::read(dir, inner.as_deref(), &described)?;
        // An adapter's kind follows from its base's configuration; a missing base is no error here.
        if !dir.join("config.json").is_file()
            && let Ok(Some(adapter)) = AdapterFolder::find(dir)
            && let Ok(base) = adapter.base_dir()
        {
            apart = generates_from_an_encoder(&read_if_present(&base, "config.json")?);
        }
        Ok(Self {
            inner,
            growth,
            padding,
            described,
            is_plain,
            settings,
            ids,
            file_ids,
            dir: dir.to_path_buf(),
            files,
            eos,
            pad,
            templates: Templates::read(dir, &tokenizer_config)?,
            variables: Map::new(),
            apart,
            most: None,
        })
    }

    /// Whether this tokenizer encodes texts like one made of the `tokenizer.json` `json`, the tokens `described` and these `settings`: neither
    /// has tokens that are not in the file, and texts are not truncated.
    fn reads_as(&self, json: &[u8], described: &Described, settings: &Settings) -> bool {
        let is_whole = |inner: &Arc<tokenizers::Tokenizer>| inner.get_truncation().is_none() && described.is_in(inner);
        self.is_plain
            && self.settings == *settings
            && self.inner.as_ref().is_some_and(is_whole)
            && self.files.iter().any(|(name, bytes)| *name == JSON && bytes == json)
    }

    /// The folder of the tokenizer of the model in `dir`: `dir`, or, for an adapter without one, its base's folder.
    fn folder(dir: &Path) -> Result<PathBuf> {
        match AdapterFolder::find(dir)? {
            Some(adapter) if !dir.join("tokenizer.json").is_file() => adapter.base_dir(),
            _ => Ok(dir.to_path_buf()),
        }
    }

    /// Whether the model in `dir` has a tokenizer.
    ///
    /// # Errors
    /// If it is an adapter whose base is missing.
    pub fn is_in(dir: &Path) -> Result<bool> {
        Ok(Self::folder(dir)?.join("tokenizer.json").is_file())
    }

    /// Sets the chat template to that in `file`, which is then saved with the tokenizer.
    ///
    /// # Errors
    /// If it cannot be read or is not UTF-8. Errors in its syntax are reported on first use.
    pub fn use_chat_template(&mut self, file: &Path) -> Result<()> {
        let (bytes, templates) = Templates::from_file(file)?;
        self.templates = templates;
        self.files.retain(|(name, _)| *name != CHAT_TEMPLATE);
        self.files.push((CHAT_TEMPLATE, bytes));
        Ok(())
    }

    /// Sets variables of the chat template for every conversation, such as `enable_thinking`; a conversation's own variables take
    /// precedence. They are not saved with the tokenizer.
    pub fn set_chat_variables(&mut self, variables: Map<String, Value>) {
        self.variables = variables;
    }

    /// Returns the variables of the chat template for a conversation with these `variables` of its own.
    fn chat_variables(&self, variables: &Map<String, Value>) -> Map<String, Value> {
        let all = self.described.named.iter().chain(&self.variables).chain(variables);
        all.map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    /// Whether there is a chat template for prompts; an encoder-decoder's prompts have none.
    pub fn has_chat_template(&self) -> bool {
        !self.templates.is_empty() && !self.apart
    }

    /// Whether there is a chat template, and `other` has none or a different one.
    pub fn has_other_chat_template(&self, other: &Self) -> bool {
        !self.templates.is_empty() && !self.templates.are_same(&other.templates)
    }

    /// Describes the tokens that end a text, the pad token and the chat template in one line, for the log.
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
        let template = self.templates.describe();
        format!("eos {eos}; pad: {pad}; chat template: {template}")
    }

    /// Renders a conversation by the chat template and returns the text and its token ids; `variables` are further variables
    /// of the template.
    ///
    /// With `add_generation_prompt` the text ends where the assistant's response starts. No special tokens are added to the
    /// template's.
    ///
    /// # Errors
    /// If there is no template, it is invalid, or it rejects the messages.
    pub fn encode_chat(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<(String, Vec<i64>)> {
        let text = self.render_chat(messages, add_generation_prompt, variables)?;
        let ids = self.encode_rendered(&text)?;
        Ok((text, ids))
    }

    /// The text of [`Tokenizer::encode_chat`].
    pub fn render_chat(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String> {
        let variables = self.chat_variables(variables);
        self.chat_template(&variables)?.render(messages, add_generation_prompt, variables)
    }

    /// As [`Tokenizer::encode_chat`], up to the end of the last message's content, which the response continues: transformers'
    /// `continue_final_message`.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_chat`]; if the last message has no text, or the template does not write it as it is.
    pub fn encode_continued_chat(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
    ) -> Result<(String, Vec<i64>)> {
        let text = self.render_continued_chat(messages, variables)?;
        let ids = self.encode_rendered(&text)?;
        Ok((text, ids))
    }

    /// The text of [`Tokenizer::encode_continued_chat`].
    pub fn render_continued_chat(&self, messages: &[Value], variables: &Map<String, Value>) -> Result<String> {
        let variables = self.chat_variables(variables);
        self.chat_template(&variables)?.render_continued(messages, variables)
    }

    /// Returns the template of a conversation with these variables.
    fn chat_template(&self, variables: &Map<String, Value>) -> Result<&ChatTemplate> {
        if self.apart {
            let message = "a list of messages, for an encoder-decoder: expected a text, since no chat template divides its prompt from the response";
            return Err(Error::Run(message.into()));
        }
        self.templates.choose(variables, &self.dir)
    }

    /// Token ids of a text from [`Tokenizer::render_chat`].
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<i64>> {
        match self.encode_verbatim(text)? {
            ids if ids.is_empty() => Err(Error::Run("the chat template makes no text of the messages".into())),
            ids => Ok(ids),
        }
    }

    /// Returns the beginning of `text`, or its end if `keeps_end`, that has more than `most` tokens, if the text is much longer than that;
    /// otherwise the whole text. Encoding takes 144 bytes of memory for each byte of a text, and the part is all that a limit of `most` needs.
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn part_above<'a>(&self, text: &'a str, most: usize, keeps_end: bool) -> Result<&'a str> {
        // Four times the bytes that a token of most texts has.
        let mut bytes = most.saturating_mul(16).max(LEAST_PART);
        while text.len() / 2 > bytes {
            let mut at = if keeps_end { text.len() - bytes } else { bytes };
            while !text.is_char_boundary(at) {
                at -= 1;
            }
            let (start, end) = text.split_at(at);
            let part = if keeps_end { end } else { start };
            if self.encode_whole(part, false)?.len() > most.saturating_add(PART_SLACK) {
                return Ok(part);
            }
            bytes = bytes.saturating_mul(4);
        }
        Ok(text)
    }

    /// A tokenizer for texts of at most `most` tokens, such as a model's context. If a text is far longer, only a beginning with more than `most`
    /// tokens is encoded: enough to refuse the text, or to cut it to its first `most` tokens, without 144 bytes of memory per byte of the text.
    pub fn limited_to(&self, most: usize) -> Self {
        Self { most: Some(most), ..self.clone() }
    }

    /// The part of a text that is encoded; see [`Tokenizer::limited_to`].
    fn within_limit<'a>(&self, text: &'a str) -> Result<&'a str> {
        self.most.map_or(Ok(text), |most| self.part_above(text, most, false))
    }

    /// Spans of the assistant's tokens in a conversation as encoded by [`Tokenizer::encode_chat`]: the tokens in the
    /// `{% generation %}` blocks of the chat template; if it has none, each turn of the assistant from the end of the
    /// template's generation prompt to the end of the turn. A turn that the template leaves out has no span.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_chat`]; if the template has no such blocks and the place of a turn in its text cannot be found.
    pub fn assistant_tokens(&self, messages: &[Value], variables: &Map<String, Value>) -> Result<Vec<Range<usize>>> {
        let variables = self.chat_variables(variables);
        let template = self.chat_template(&variables)?;
        let (text, spans) = if template.has_marks() {
            template.render_marked(messages, variables)?
        } else {
            Turns { template, messages, variables }.find()?
        };
        let offsets = self.offsets(&text)?;
        let within = |span: &Range<usize>| {
            let begin = offsets.iter().position(|(from, to)| *from < span.end && *to > span.start)?;
            let end = offsets.iter().rposition(|(from, to)| *from < span.end && *to > span.start)?;
            Some(begin..end + 1)
        };
        Ok(spans.iter().filter_map(within).collect())
    }

    /// Byte offsets in `text` of each of its tokens, encoded as by [`Tokenizer::encode_verbatim`]. A tokenizer may leave spaces out of
    /// the offsets; a token of nothing else starts where the one before it ends.
    fn offsets(&self, text: &str) -> Result<Vec<(usize, usize)>> {
        let Some(inner) = &self.inner else { return Ok(Vec::new()) };
        let text = self.within_limit(text)?;
        let encoding = guarded(|| inner.encode(text, false)).map_err(|e| self.error(&e))?;
        let mut last = 0;
        let whole = |&(from, to): &(usize, usize)| {
            let from = if from == to { from.min(last) } else { from };
            last = to;
            (from, to)
        };
        Ok(encoding.get_offsets().iter().map(whole).collect())
    }

    /// Token ids of `text`, with the special tokens that the tokenizer adds (a bos token, for example).
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>> {
        self.encode_with(text, true)
    }

    /// Token ids of `text` without added special tokens, for text from a chat template.
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode_verbatim(&self, text: &str) -> Result<Vec<i64>> {
        self.encode_with(text, false)
    }

    /// Sets whether the tokenizer belongs to an encoder-decoder. Prompt and response are then encoded and decoded as two texts: the
    /// prompt keeps the eos that the tokenizer appends, and the response starts as any text does.
    pub fn set_encoder_decoder(&mut self, on: bool) {
        self.apart = on;
    }

    /// Whether prompt and response are two texts; see [`Tokenizer::set_encoder_decoder`].
    pub fn is_of_encoder_decoder(&self) -> bool {
        self.apart
    }

    /// Token ids of two texts as the tokenizer joins a pair, with its special tokens: `[CLS] first [SEP] second [SEP]` for most encoders.
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode_segments(&self, first: &str, second: &str) -> Result<Vec<i64>> {
        let inner = self.require_inner()?;
        let (first, second) = (self.within_limit(first)?, self.within_limit(second)?);
        let len = first.len() + second.len();
        self.growth.map_or(Ok(()), |growth| growth.check_encode(len)).map_err(|e| self.error(&e))?;
        let encoding = guarded(|| inner.encode_fast((first, second), true)).map_err(|e| self.error(&e))?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
    }

    /// Token ids of a prompt: as [`Tokenizer::encode`], without the eos that some tokenizers append to
    /// every text. An eos in `text` itself is kept. The prompt of an encoder-decoder is whole, and keeps the appended eos.
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<i64>> {
        let ids = self.encode(text)?;
        if self.apart { Ok(ids) } else { self.without_added_eos(ids, text) }
    }

    /// The special tokens that the tokenizer puts before and after every prompt.
    ///
    /// # Errors
    /// If the tokenizer cannot encode a text.
    pub fn around_prompts(&self) -> Result<(Vec<i64>, Vec<i64>)> {
        // Encodes a text that is not empty: `</s>` alone could come before texts (OPT) or after them (T5).
        let (text, mut before) = (self.encode_verbatim("a")?, self.encode_prompt("a")?);
        let Some(at) = before.windows(text.len().max(1)).position(|part| part == text) else {
            return Ok(Default::default());
        };
        let after = before.split_off(at + text.len());
        before.truncate(at);
        Ok((before, after))
    }

    /// `ids`, which [`Tokenizer::encode`] returned for `text`, without the eos that the tokenizer appended.
    fn without_added_eos(&self, mut ids: Vec<i64>, text: &str) -> Result<Vec<i64>> {
        if ids.last().is_some_and(|id| self.eos.contains(id)) {
            let ends = |ids: &[i64]| ids.iter().rev().take_while(|id| self.eos.contains(id)).count();
            let in_text = ends(&self.encode_verbatim(text)?);
            ids.truncate(ids.len() - ends(&ids).saturating_sub(in_text));
        }
        Ok(ids)
    }

    /// As [`Tokenizer::encode_open_pair`], without the eos that some tokenizers append to every text, as in
    /// [`Tokenizer::encode_prompt`].
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode_unclosed_pair(&self, prompt: &str, response: &str) -> Result<(Vec<i64>, usize)> {
        let (whole, border) = self.encode_open_pair(prompt, response)?;
        if self.apart {
            let response = self.without_added_eos(whole[border..].to_vec(), response)?;
            return Ok(([&whole[..border], &response].concat(), border));
        }
        let whole = self.without_added_eos(whole, &format!("{prompt}{response}"))?;
        let border = border.min(whole.len());
        Ok((whole, border))
    }

    fn require_inner(&self) -> Result<&tokenizers::Tokenizer> {
        self.inner.as_deref().ok_or_else(|| {
            Error::Run(format!(
                "text needs a tokenizer, and {} has no tokenizer.json; rows of token ids (prompt_ids) need none",
                self.dir.display()
            ))
        })
    }

    fn encode_with(&self, text: &str, add_special_tokens: bool) -> Result<Vec<i64>> {
        self.encode_whole(self.within_limit(text)?, add_special_tokens)
    }

    fn encode_whole(&self, text: &str, add_special_tokens: bool) -> Result<Vec<i64>> {
        let inner = self.require_inner()?;
        self.growth.map_or(Ok(()), |growth| growth.check_encode(text.len())).map_err(|e| self.error(&e))?;
        let encoding = guarded(|| inner.encode_fast(text, add_special_tokens)).map_err(|e| self.error(&e))?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
    }

    /// Token ids of a prompt with its response, eos last, and the index of the first token after the prompt.
    ///
    /// The two are encoded as one text, as in TRL: encoded separately, a SentencePiece tokenizer would put a space between
    /// them. A token that crosses the boundary belongs to the response. For an encoder-decoder they are two texts.
    ///
    /// # Errors
    /// If the tokenizer cannot encode it, or has no eos token.
    pub fn encode_pair(&self, prompt: &str, response: &str) -> Result<(Vec<i64>, usize)> {
        let eos = self.require_eos()?;
        let (mut whole, border) = self.encode_open_pair(prompt, response)?;
        if whole[border..].last() != Some(&eos) {
            whole.push(eos);
        }
        Ok((whole, border))
    }

    /// As [`Tokenizer::encode_pair`], without adding an eos.
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode_open_pair(&self, prompt: &str, response: &str) -> Result<(Vec<i64>, usize)> {
        let alone = self.encode_prompt(prompt)?;
        if self.apart {
            return Ok(([&alone[..], &self.encode(response)?].concat(), alone.len()));
        }
        let whole = self.encode(&format!("{prompt}{response}"))?;
        let shared = shared_prefix(&alone, &whole);
        Ok((whole, shared))
    }

    /// Decodes token ids, without special tokens.
    ///
    /// As in transformers, `clean_up_tokenization_spaces` of `tokenizer_config.json` removes spaces before punctuation, unless the
    /// vocabulary is one of BPE.
    ///
    /// # Errors
    /// If the tokenizer cannot decode them.
    pub fn decode(&self, ids: &[i64]) -> Result<String> {
        Ok(self.cleaned(self.decode_with(ids, true)?))
    }

    /// Decodes token ids, with special tokens.
    ///
    /// # Errors
    /// If the tokenizer cannot decode them.
    pub fn decode_verbatim(&self, ids: &[i64]) -> Result<String> {
        Ok(self.cleaned(self.decode_with(ids, false)?))
    }

    fn cleaned(&self, text: String) -> String {
        match &self.inner {
            Some(inner) => self.settings.cleaned(text, inner),
            None => text,
        }
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

    /// Decodes `ids` as the continuation of `prompt`, without special tokens.
    ///
    /// Decoded separately, ids of a SentencePiece tokenizer would lose the space before their first word. The response of an
    /// encoder-decoder is a text of its own, whatever the prompt.
    pub fn decode_after(&self, prompt: &[i64], ids: &[i64]) -> Result<String> {
        if self.apart {
            return self.decode(ids);
        }
        let whole = self.decode_with(&[prompt, ids].concat(), true)?;
        match whole.strip_prefix(&self.decode_with(prompt, true)?) {
            Some(text) => Ok(self.cleaned(text.to_string())),
            None => self.decode(ids), // The boundary lies within a character.
        }
    }

    /// Decodes each id to the part that it adds to the whole text, without special tokens: joined, the parts are
    /// [`Tokenizer::decode`] of all ids, as long as their bytes are text that is not cleaned up. If several ids encode one character, the last
    /// one gets the whole character, and the others are empty.
    ///
    /// # Errors
    /// If the tokenizer cannot decode them.
    pub fn decode_each(&self, ids: &[i64]) -> Result<Vec<String>> {
        let mut stream = self.stream(&[]);
        let mut parts: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect::<Result<_>>()?;
        if let Some(last) = parts.last_mut() {
            *last += &stream.finish()?;
        }
        Ok(parts)
    }

    /// Starts decoding the continuation of `prompt`, one token at a time.
    pub fn stream(&self, prompt: &[i64]) -> TextStream<'_> {
        let prompt = if self.apart { &[] } else { prompt };
        TextStream { tokenizer: self, ids: prompt.to_vec(), start: 0, shown: prompt.len(), kept: None }
    }

    /// As [`Tokenizer::stream`], but the special tokens `kept` appear in the text by their names.
    fn stream_with(&self, prompt: &[i64], kept: Vec<i64>) -> TextStream<'_> {
        TextStream { kept: Some(kept), ..self.stream(prompt) }
    }

    /// Whether an id is that of a special token, which texts do not show.
    fn is_special(&self, id: i64) -> bool {
        let Some(inner) = &self.inner else { return false };
        let token = u32::try_from(id).ok().and_then(|id| inner.id_to_token(id));
        token.is_some_and(|token| inner.get_added_vocabulary().is_special_token(&token))
    }

    /// Returns the text of one token alone, as it reads after the token `before`; a special token is its name. Bytes that form no
    /// whole character are U+FFFD.
    ///
    /// # Errors
    /// If the tokenizer cannot decode it.
    pub fn token_text(&self, before: Option<i64>, id: i64) -> Result<String> {
        // Decoded separately, an id of a SentencePiece tokenizer would lose its space.
        if let Some(before) = before {
            let (alone, both) = (self.decode_with(&[before], false)?, self.decode_with(&[before, id], false)?);
            // The middle of a character adds nothing to the U+FFFD of its beginning.
            if let Some(text) = both.strip_prefix(&alone).filter(|text| !text.is_empty()) {
                return Ok(text.to_string());
            }
        }
        self.decode_with(&[id], false)
    }

    /// The id of the token that is appended to a text, if there is one.
    pub fn eos(&self) -> Option<i64> {
        self.eos.first().copied()
    }

    /// The ids of all tokens that end a text, [`Tokenizer::eos`] first.
    pub fn eos_ids(&self) -> &[i64] {
        &self.eos
    }

    /// The id of the pad token, if there is one; it is only used in saved configurations.
    pub fn pad(&self) -> Option<i64> {
        self.pad
    }

    /// The id of the token that DeepSpeed-Chat pads texts of `model` with: eos, except for Llama, whose tokenizer keeps its own padding
    /// token; `None` if DeepSpeed-Chat would add a new token, which no text has.
    pub fn deepspeed_chat_pad(&self, model: &ModelConfig) -> Option<i64> {
        let is_llama = model.family.name == "llama";
        if is_llama { self.pad() } else { self.eos().or(self.pad()) }
    }

    /// The id of the token that ends a text.
    ///
    /// # Errors
    /// If there is none.
    pub fn require_eos(&self) -> Result<i64> {
        self.eos().ok_or_else(|| self.error("expected an `eos_token` in tokenizer_config.json, found none"))
    }

    /// Makes `token`, the setting `eos_token`, the token that ends a text, also in the chat template and in the files that are saved. The
    /// tokens that ended a text so far still do.
    ///
    /// # Errors
    /// If the tokenizer does not have it; if a file of its special tokens is no JSON object.
    pub fn set_eos(&mut self, token: &str) -> Result<()> {
        let id = self.inner.as_ref().and_then(|inner| inner.token_to_id(token)).map(i64::from);
        let Some(id) = id else {
            return Err(Error::refused(
                "eos_token",
                format!(
                    " = {token}: expected a token of the tokenizer in {}, which has no such token",
                    self.dir.display()
                ),
            ));
        };
        if self.eos() == Some(id) {
            return Ok(());
        }
        self.eos.retain(|other| *other != id);
        self.eos.insert(0, id);
        self.described.named.insert(EOS_TOKEN.into(), token.into());
        if !self.files.iter().any(|(name, _)| *name == TOKENIZER_CONFIG) {
            self.files.push((TOKENIZER_CONFIG, b"{}".to_vec()));
        }
        let names_tokens = |name: &str| [TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP].contains(&name);
        for (name, bytes) in self.files.iter_mut().filter(|(name, _)| names_tokens(name)) {
            let invalid = |error: serde_json::Error| Error::invalid(self.dir.join(*name), error.to_string());
            let mut settings: Map<String, Value> = serde_json::from_slice(bytes).map_err(invalid)?;
            settings.insert(EOS_TOKEN.into(), token.into());
            *bytes = serde_json::to_vec_pretty(&settings).map_err(invalid)?;
        }
        Ok(())
    }

    /// Checks that every id of this tokenizer has a row in the embedding of `model`, whose folder is `dir`.
    ///
    /// # Errors
    /// If an id has none.
    pub fn check_fits(&self, model: &ModelConfig, dir: &Path) -> Result<()> {
        let eos = self.eos().filter(|eos| !(0..model.vocab_size).contains(eos));
        if let Some(eos) = eos {
            let message = format!("eos_token_id: expected an id below vocab_size {}, found {eos}", model.vocab_size);
            return Err(Error::invalid(&self.dir, message));
        }
        if self.ids <= model.vocab_size {
            return Ok(());
        }
        let added = self.inner.as_ref().filter(|_| self.file_ids <= model.vocab_size);
        if let Some((token, id)) = added.and_then(|inner| self.described.first_from(inner, model.vocab_size)) {
            let message = format!(
                "{token:?} is named by a file beside tokenizer.json, which lacks it, and gets the id {id}: expected ids below vocab_size {} \
                 of {}",
                model.vocab_size,
                dir.display()
            );
            return Err(Error::invalid(&self.dir, message));
        }
        Err(Error::invalid(
            dir,
            format!(
                "expected a vocabulary of at least {}, the tokenizer's in {}, found vocab_size {}",
                self.ids,
                self.dir.display(),
                model.vocab_size
            ),
        ))
    }

    /// Checks that the tokenizer in the model folder `dir`, if there is one, has the same ids as this one.
    ///
    /// # Errors
    /// If it does not: the two models would read the same ids as different texts.
    pub fn check_same(&self, dir: &Path) -> Result<()> {
        if !Self::is_in(dir)? {
            return Ok(());
        }
        let differing = self.difference(&self.beside(dir)?);
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

    /// Number of this tokenizer's tokens that have another id, or none, in `other`.
    pub fn difference(&self, other: &Self) -> usize {
        if let (Some(inner), Some(other_inner)) = (&self.inner, &other.inner)
            && Arc::ptr_eq(inner, other_inner)
        {
            return 0;
        }
        let other_vocab = other.vocab();
        self.vocab().iter().filter(|(token, id)| other_vocab.get(*token) != Some(id)).count()
    }

    /// Number of tokens that were added to this tokenizer's vocabulary and that `other` does not have.
    pub fn added_beyond(&self, other: &Self) -> usize {
        let Some(inner) = &self.inner else { return 0 };
        let (without_added, other_vocab) = (inner.get_vocab(false), other.vocab());
        let is_added = |token: &&String| !without_added.contains_key(*token) && !other_vocab.contains_key(*token);
        self.vocab().keys().filter(is_added).count()
    }

    /// From now on, truncates texts of more than `most` tokens to their last tokens; added special tokens are kept.
    ///
    /// # Errors
    /// If there are more than `most` special tokens.
    pub fn keep_last(&mut self, most: usize) -> Result<()> {
        let direction = tokenizers::TruncationDirection::Left;
        let truncation = tokenizers::TruncationParams { max_length: most, direction, ..Default::default() };
        let Some(inner) = &mut self.inner else { return Ok(()) };
        let done = Arc::make_mut(inner).with_truncation(Some(truncation)).map(|_| ()).map_err(|e| e.to_string());
        done.map_err(|message| self.error(&message))
    }

    /// Writes the tokenizer's files to `dir`, byte for byte as they were read. Only a class name that transformers would misread for the text part
    /// of a model is changed.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_pretrained(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
        for (name, bytes) in &self.files {
            std::fs::write(dir.join(name), bytes).map_err(Error::io("write", dir.join(name)))?;
        }
        self.templates.save(dir)
    }

    fn error(&self, message: &str) -> Error {
        Error::invalid(self.dir.join("tokenizer.json"), message)
    }
}

/// Decodes a response while it is generated: the text that each token adds, in whole characters and without special tokens. It is not
/// cleaned up, since that depends on the text that follows. Made by [`Tokenizer::stream`].
#[derive(Debug, Clone)]
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    /// The prompt and the tokens so far.
    ids: Vec<i64>,
    /// The text of `ids[start..shown]` was returned already, or is the prompt's. It is decoded again, since the text of a token
    /// depends on the one before it.
    start: usize,
    shown: usize,
    /// Special tokens whose names are text; if there is a list, other special tokens are not in `ids`.
    kept: Option<Vec<i64>>,
}

impl TextStream<'_> {
    /// Appends a token. Returns the text that it completes, which is empty while a character is incomplete.
    ///
    /// # Errors
    /// If the tokenizer cannot decode it.
    pub fn push(&mut self, id: i64) -> Result<String> {
        if self.kept.as_ref().is_some_and(|kept| !kept.contains(&id)) && self.tokenizer.is_special(id) {
            return Ok(String::new());
        }
        self.ids.push(id);
        self.next(false)
    }

    /// Returns the text of tokens whose character was never completed: U+FFFD for their bytes.
    ///
    /// # Errors
    /// If the tokenizer cannot decode them.
    pub fn finish(&mut self) -> Result<String> {
        self.next(true)
    }

    fn next(&mut self, ends: bool) -> Result<String> {
        let mut end = self.ids.len();
        if end == self.shown {
            return Ok(String::new());
        }
        let skips = self.kept.is_none();
        let before = self.tokenizer.decode_with(&self.ids[self.start..self.shown], skips)?;
        let mut text = self.tokenizer.decode_with(&self.ids[self.start..], skips)?;
        if text == before {
            // Special tokens only.
            self.shown = end;
            return Ok(String::new());
        }
        if text.ends_with(char::REPLACEMENT_CHARACTER) && !ends {
            // The last bytes may be the first of a character: at most three, which are in the last three tokens.
            let Some(rest) = (end - self.shown).checked_sub(3).filter(|&rest| rest > 0) else {
                return Ok(String::new());
            };
            end = self.shown + rest;
            text = self.tokenizer.decode_with(&self.ids[self.start..end], skips)?;
        }
        // This is all of `before`, unless its last bytes were an incomplete character that is complete now.
        let pairs = before.chars().zip(text.chars());
        let shared: usize = pairs.take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        (self.start, self.shown) = (self.shown, end);
        Ok(text[shared..].to_string())
    }
}

/// Loads the `tokenizer.json` at `path`, whose bytes are `json`, without its padding and truncation, which would change the ids of a
/// text. Also returns one more than its largest id, and the token of the padding.
fn load(path: &Path, json: &[u8]) -> Result<(tokenizers::Tokenizer, i64, Option<String>)> {
    let (mut tokenizer, ids) = guarded(|| file::read(json))
        .map_err(|e| Error::invalid(path, format!("not a tokenizer that can be read: {e}")))?;
    let pad = tokenizer.get_padding().map(|padding| padding.pad_token.clone());
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(|e| Error::invalid(path, e.to_string()))?;
    Ok((tokenizer, ids, pad))
}

/// The JSON file `name` in `dir`; null if there is none.
fn read_if_present(dir: &Path, name: &str) -> Result<Value> {
    let path = dir.join(name);
    if path.is_file() { read_json(&path) } else { Ok(Value::Null) }
}

/// Whether a model with this `config.json` has an encoder that reads the prompt and a decoder that writes the response. A classifier reads one
/// text.
fn generates_from_an_encoder(config: &Value) -> bool {
    let classifies = |name: &Value| name.as_str().is_some_and(|name| name.ends_with("ForSequenceClassification"));
    let architectures = config["architectures"].as_array();
    let is_known = || config["model_type"].as_str().is_some_and(is_encoder_decoder_family);
    config["is_encoder_decoder"].as_bool().unwrap_or_else(is_known)
        && !architectures.is_some_and(|names| names.iter().any(classifies))
}

/// Length of the common prefix of two sequences of ids.
pub fn shared_prefix(a: &[i64], b: &[i64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_before_every_text_are_told_from_those_after_it_though_they_are_the_same_token() {
        let read = |name: &str| {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tokenizers").join(name);
            let tokenizer = Tokenizer::from_pretrained(&dir).unwrap();
            (tokenizer.require_eos().unwrap(), tokenizer)
        };
        let (eos, tokenizer) = read("split");
        assert_eq!(tokenizer.around_prompts().unwrap(), (vec![eos], vec![]));
        let (eos, mut t5) = read("t5");
        t5.set_encoder_decoder(true);
        assert_eq!(t5.around_prompts().unwrap(), (vec![], vec![eos]));
        t5.set_encoder_decoder(false);
        assert_eq!(t5.around_prompts().unwrap(), (vec![], vec![]));
    }
}
