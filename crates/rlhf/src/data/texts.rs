//! Whole texts, without a boundary between prompt and response.

use super::chat::{cut_after_eos, encode_chat};
use super::dataset::Dataset;
use super::pairs::{Pair, is_pair, read_pair};
use super::responses::{append_eos, is_sample_without_eos, prompt_and_completion, response_field};
use super::row::{check_length, expected, field, messages_field, token_ids};
use rlhf_base::{Error, Result};
use rlhf_lm::tokenizer::Tokenizer;
use serde_json::Value;

impl Dataset {
    /// Returns the token ids of the text of every row: a prompt and its completion as in [`Dataset::completions`], the token ids
    /// `input_ids`, the string `text`, or the conversation `messages` or `conversations`. No EOS is appended. Whitespace after the last EOS
    /// of a conversation is removed, as in [`Dataset::pairs`].
    ///
    /// # Errors
    /// If a row has none of these forms, is empty or has more than `max_length` tokens, or an id is not below `vocab`.
    pub fn texts(&self, tokenizer: &Tokenizer, vocab: i64, max_length: usize) -> Result<Vec<Vec<i64>>> {
        self.map(|row| check_text(read_text(row, tokenizer, vocab)?, max_length))
    }

    /// Returns the texts of every row that a reward model scores: one text as in [`Dataset::texts`], or the two texts of a
    /// preference pair as in [`Dataset::pairs`], the chosen one first.
    ///
    /// # Errors
    /// The errors of [`Dataset::texts`] and [`Dataset::pairs`].
    pub fn scored_texts(
        &self,
        tokenizer: &Tokenizer,
        append_eos: bool,
        vocab: i64,
        max_length: usize,
    ) -> Result<Vec<Vec<Vec<i64>>>> {
        self.map(|row| {
            let texts = if is_pair(row) {
                let Pair { chosen, rejected, .. } = read_pair(row, tokenizer, append_eos)?;
                vec![chosen, rejected]
            } else {
                vec![read_text(row, tokenizer, vocab)?]
            };
            texts.into_iter().map(|text| check_text(text, max_length)).collect()
        })
    }
}

/// Returns the token ids of the text of a row; see [`Dataset::texts`].
fn read_text(row: &Value, tokenizer: &Tokenizer, vocab: i64) -> Result<Vec<i64>> {
    let name = response_field(row);
    if field(row, name).is_some() || field(row, "completion_ids").is_some() {
        let (mut tokens, prompt_len) = prompt_and_completion(row, tokenizer, vocab, true)?;
        if is_sample_without_eos(row, tokens.len() - prompt_len.min(tokens.len())) {
            append_eos(&mut tokens, tokenizer);
        }
        let is_chat = field(row, "completion_ids").is_none() && row[name].is_array();
        return if is_chat { cut_after_eos(tokens, tokenizer) } else { Ok(tokens) };
    }
    if let Some((name, _)) = messages_field(row) {
        return cut_after_eos(encode_chat(row, tokenizer, &[name], false)?.1, tokenizer);
    }
    if let Some(ids) = token_ids(row, "input_ids", vocab)? {
        return Ok(ids);
    }
    let text = field(row, "text").and_then(Value::as_str);
    let forms = "a string (or `messages`, or `prompt` and `completion`, or `chosen` and `rejected`, or token ids: `input_ids`, or \
                 `prompt_ids` and `completion_ids`)";
    tokenizer.encode(text.ok_or_else(|| Error::Run(expected("text", forms, row)))?)
}

fn check_text(tokens: Vec<i64>, max_length: usize) -> Result<Vec<i64>> {
    if tokens.is_empty() {
        return Err(Error::Run("the text is empty: expected at least one token".into()));
    }
    check_length(tokens.len(), max_length)?;
    Ok(tokens)
}
