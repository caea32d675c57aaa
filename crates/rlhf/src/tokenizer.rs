//! Text to token ids and back, with an explicit end-of-text token; `tokenizer.json` in and out.

use crate::model::{ModelConfig, no_such_file};
use crate::weights::read_json;
use crate::{Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The files that make up a tokenizer; those that are there travel with every model we save.
pub(crate) const FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
];

/// A tokenizer and the tokens that end a text.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    dir: PathBuf,
    files: Vec<(&'static str, Vec<u8>)>,
    eos: Option<i64>,
    pad: Option<i64>,
}

impl Tokenizer {
    /// Reads the tokenizer of a model folder.
    ///
    /// The eos token is what `tokenizer_config.json` or `special_tokens_map.json` says, else the `eos_token_id` of
    /// `config.json`. A pad token is not needed: lengths are explicit everywhere, so pad may also equal eos.
    ///
    /// # Errors
    /// If there is no sound `tokenizer.json`, or a named special token is not in the vocabulary.
    pub fn from_pretrained(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        if !path.is_file() {
            return Err(no_such_file(dir, "tokenizer.json"));
        }
        let mut inner = tokenizers::Tokenizer::from_file(&path)
            .map_err(|e| Error::invalid(&path, format!("not a tokenizer that can be read: {e}")))?;
        // A file may ask for padding or truncation; here both would change what a text means.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| Error::invalid(&path, e.to_string()))?;
        let mut files = Vec::new();
        for name in FILES {
            if dir.join(name).is_file() {
                files.push((name, std::fs::read(dir.join(name)).map_err(Error::io("read", dir.join(name)))?));
            }
        }
        let special = |key: &str| -> Result<Option<i64>> {
            for name in ["tokenizer_config.json", "special_tokens_map.json"] {
                let path = dir.join(name);
                if !path.is_file() {
                    continue;
                }
                // A token is a string, or an object with its `content`.
                let json = read_json(&path)?;
                let value = &json[key];
                if let Some(token) = value.as_str().or_else(|| value["content"].as_str()) {
                    let id = inner.token_to_id(token).ok_or_else(|| {
                        Error::invalid(&path, format!("`{key}`: the token {token:?} is not in tokenizer.json"))
                    })?;
                    return Ok(Some(i64::from(id)));
                }
            }
            Ok(None)
        };
        let (mut eos, mut pad) = (special("eos_token")?, special("pad_token")?);
        if let Some(config) =
            dir.join("config.json").is_file().then(|| read_json(&dir.join("config.json"))).transpose()?
        {
            let first = |value: &Value| value.as_i64().or_else(|| value.get(0)?.as_i64());
            eos = eos.or_else(|| first(&config["eos_token_id"]));
            pad = pad.or_else(|| first(&config["pad_token_id"]));
        }
        Ok(Self { inner, dir: dir.to_path_buf(), files, eos, pad })
    }

    /// Token ids of `text`, with what the tokenizer puts around a text (a begin token, say).
    ///
    /// # Errors
    /// If the tokenizer cannot encode it.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>> {
        let encoding = self.inner.encode_fast(text, true).map_err(|e| self.error(&e.to_string()))?;
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
        let alone = self.encode(prompt)?;
        let whole = self.encode(&format!("{prompt}{completion}"))?;
        let shared = alone.iter().zip(&whole).take_while(|(a, b)| a == b).count();
        Ok((whole, shared))
    }

    /// The text of token ids, without special tokens.
    pub fn decode(&self, ids: &[i64]) -> Result<String> {
        let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
        self.inner.decode(&ids, true).map_err(|e| self.error(&e.to_string()))
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

    /// The text of token ids, special tokens by their names.
    pub(crate) fn decode_with_special(&self, ids: &[i64]) -> Result<String> {
        let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
        self.inner.decode(&ids, false).map_err(|e| self.error(&e.to_string()))
    }

    /// The id of the token that ends a text, if the tokenizer names one.
    pub fn eos(&self) -> Option<i64> {
        self.eos
    }

    /// The id of the pad token, if the tokenizer names one; it is only noted in what we save.
    pub fn pad(&self) -> Option<i64> {
        self.pad
    }

    /// The id of the token that ends a text.
    ///
    /// # Errors
    /// If the tokenizer names none.
    pub fn require_eos(&self) -> Result<i64> {
        self.eos.ok_or_else(|| self.error("expected an `eos_token` in tokenizer_config.json, found none"))
    }

    /// Checks that every id of this tokenizer has a row in `model`'s embedding.
    ///
    /// # Errors
    /// If it does not; `dir` is the model's folder.
    pub fn check_fits(&self, model: &ModelConfig, dir: &Path) -> Result<()> {
        let ids = self.inner.get_vocab(true).into_values().max().map_or(0, |id| i64::from(id) + 1);
        let eos = self.eos.filter(|eos| !(0..model.vocab_size).contains(eos));
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
        if !dir.join("tokenizer.json").is_file() {
            return Ok(());
        }
        let other = Self::from_pretrained(dir)?;
        let (ours, theirs) = (self.inner.get_vocab(true), other.inner.get_vocab(true));
        let differing = ours.iter().filter(|(token, id)| theirs.get(*token) != Some(id)).count();
        if differing == 0 {
            return Ok(());
        }
        Err(Error::invalid(
            dir,
            format!(
                "expected the tokenizer of {}, found one that differs in {differing} of {} tokens: all models of a run \
                 read the same ids",
                self.dir.display(),
                ours.len()
            ),
        ))
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
