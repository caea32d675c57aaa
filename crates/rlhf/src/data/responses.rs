//! Prompts with responses to them.

use super::chat::{cut_after_eos, encode_chat, encode_prompt_and_response};
use super::dataset::Dataset;
use super::pairs::is_pair;
use super::prompts::{Prompt, read_prompt};
use super::row::{check_length, check_lengths, expected, field, messages_field, text_field, token_ids};
use rlhf_base::safe_text::beginning;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::FinishReason;
use rlhf_lm::tokenizer::Tokenizer;
use serde_json::Value;
use std::borrow::Cow;

/// A prompt and a response to it, as rewards see them.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptResponse {
    /// The prompt.
    pub prompt: Prompt,
    /// Text of the response, without special tokens.
    pub response: String,
    /// Token ids of the response.
    pub response_ids: Vec<i64>,
    /// Why the response ended.
    pub finish: FinishReason,
}

/// Token ids of a prompt and its completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptCompletion {
    /// Token ids of prompt and completion.
    pub tokens: Vec<i64>,
    /// Number of tokens of the prompt.
    pub prompt_len: usize,
}

impl Dataset {
    /// Returns the token ids of every row's prompt and completion: `prompt_ids` or `prompt`, followed by `completion_ids`; or
    /// `prompt` and `completion`, either strings, which are encoded as one text, or lists of messages. No EOS is appended.
    ///
    /// # Errors
    /// If a row has neither form, has more than `max_length` tokens, or an id is not below `vocab`; if the prompt has no tokens. For an
    /// encoder-decoder, if a prompt has more than `max_length` tokens, or a completion and the decoder's start token.
    pub fn completions(&self, tokenizer: &Tokenizer, vocab: i64, max_length: usize) -> Result<Vec<PromptCompletion>> {
        self.map(|row| {
            let (tokens, prompt_len) = prompt_and_completion(row, tokenizer, vocab, false)?;
            if prompt_len == 0 && !tokens.is_empty() {
                let message =
                    "the completion begins with the first token: expected a prompt of at least one token before it";
                return Err(Error::Run(message.into()));
            }
            if tokenizer.is_of_encoder_decoder() {
                check_lengths(prompt_len, tokens.len() - prompt_len, max_length)?;
            } else {
                check_length(tokens.len(), max_length)?;
            }
            Ok(PromptCompletion { tokens, prompt_len })
        })
    }

    /// Returns every row's prompt and response, as rewards see them. Tokens are as in [`Dataset::completions`], without the
    /// whitespace after the last EOS of a conversation.
    ///
    /// A response counts as stopped, unless its `finish_reason` is `length`, or there is none and its token ids are given and
    /// do not end with EOS.
    ///
    /// # Errors
    /// If a row has no prompt with a completion.
    pub fn responses(&self, tokenizer: &Tokenizer) -> Result<Vec<PromptResponse>> {
        self.map(|row| read_response(row, tokenizer))
    }

    /// Returns a note if the first row has its completion as token ids and as a text that does not belong to these ids: another tokenizer
    /// made them.
    pub fn note_on_ids(&self, tokenizer: &Tokenizer) -> Option<String> {
        let row = self.rows().next()?;
        let text = field(row, "completion")?.as_str()?;
        let ids = token_ids(row, "completion_ids", i64::MAX).ok()??;
        let prompt = token_ids(row, "prompt_ids", i64::MAX).ok()?.unwrap_or_default();
        let decoded = tokenizer.decode_after(&prompt, &ids).ok()?;
        let is_text = |decoded: &str| decoded.trim() == text.trim();
        if !tokenizer.knows_text() || is_text(&decoded) || is_text(&tokenizer.decode_verbatim(&ids).ok()?) {
            return None;
        }
        Some(format!(
            "the `completion_ids` of the first row are {:?} with the tokenizer of {}, and its `completion` is {:?}: another tokenizer made \
             them, and they are taken as they are; rows without `prompt_ids` and `completion_ids` are read as texts",
            beginning(&decoded, 40),
            tokenizer.dir().display(),
            beginning(text, 40)
        ))
    }

    /// Returns the responses of every row that rewards score: one response as in [`Dataset::responses`], or `chosen` and `rejected` of a
    /// preference pair, with EOS appended to strings as in [`Dataset::pairs`].
    ///
    /// # Errors
    /// The errors of [`Dataset::responses`].
    pub fn scored_responses(&self, tokenizer: &Tokenizer) -> Result<Vec<Vec<PromptResponse>>> {
        self.map(|row| {
            if !is_pair(row) {
                let row = divide_conversation(row)?;
                return Ok(vec![read_response(&row, tokenizer)?]);
            }
            let side = |name: &str| -> Result<PromptResponse> {
                let mut side = row.clone();
                side["completion"] = row[name].clone();
                let mut response = read_response(&side, tokenizer)?;
                if row[name].is_string() {
                    append_eos(&mut response.response_ids, tokenizer);
                }
                Ok(response)
            };
            Ok(vec![side("chosen")?, side("rejected")?])
        })
    }
}

/// Divides a row that is a conversation, and has no other form, into its prompt and the assistant's last message; returns any other row as
/// it is.
fn divide_conversation(row: &Value) -> Result<Cow<'_, Value>> {
    let is_other =
        ["completion", "completion_ids", "prompt_ids", "response"].iter().any(|name| field(row, name).is_some());
    let Some((name, value)) = messages_field(row).filter(|_| !is_other) else { return Ok(Cow::Borrowed(row)) };
    let last =
        value.as_array().and_then(|messages| messages.split_last()).filter(|(last, _)| last["role"] == "assistant");
    let (last, prompt) = last.ok_or_else(|| {
        Error::Run(expected(name, "a list of messages that ends with the assistant's, which rewards score,", row))
    })?;
    let mut divided = row.clone();
    if let Some(fields) = divided.as_object_mut() {
        fields.remove("prompt_ids");
        fields.insert("prompt".into(), prompt.to_vec().into());
        fields.insert("completion".into(), vec![last.clone()].into());
    }
    Ok(Cow::Owned(divided))
}

/// Returns the name of the field with the response as text or messages: `completion`, or `response` in the sample files of a
/// run.
pub(super) fn response_field(row: &Value) -> &'static str {
    let is_set = |name: &&str| field(row, name).is_some();
    let others = ["completion", "text", "input_ids"];
    if is_set(&"response") && !others.iter().any(is_set) && messages_field(row).is_none() {
        "response"
    } else {
        "completion"
    }
}

/// Appends EOS to `ids`, if the tokenizer has one and they do not end with it.
pub(super) fn append_eos(ids: &mut Vec<i64>, tokenizer: &Tokenizer) {
    if let Some(eos) = tokenizer.eos().filter(|_| !ids.last().is_some_and(|id| tokenizer.eos_ids().contains(id))) {
        ids.push(eos);
    }
}

/// Returns true if the row is a sample of a run whose response ended with EOS: sample files store responses without it. `tokens` is the
/// number of tokens that the response's text encodes to: if that is the number that the run counted, the response ended with another token
/// or a stop string.
pub(super) fn is_sample_without_eos(row: &Value, tokens: usize) -> bool {
    let lacks_a_token = row["num_tokens"].as_u64().is_none_or(|counted| (tokens as u64) < counted);
    response_field(row) == "response"
        && field(row, "completion_ids").is_none()
        && row["response"].is_string()
        && row["finish_reason"] == "stop"
        && lacks_a_token
}

/// Returns the prompt and response of a row; see [`Dataset::responses`].
fn read_response(row: &Value, tokenizer: &Tokenizer) -> Result<PromptResponse> {
    let (mut tokens, prompt_len) = prompt_and_completion(row, tokenizer, i64::MAX, false)?;
    let has_ids = field(row, "completion_ids").is_some();
    if !has_ids && row[response_field(row)].is_array() {
        tokens = cut_after_eos(tokens, tokenizer)?;
    }
    let mut prompt = read_prompt(row, tokenizer, i64::MAX)?;
    let mut response_ids = tokens.split_off(prompt_len.min(tokens.len()));
    if is_sample_without_eos(row, response_ids.len()) {
        append_eos(&mut response_ids, tokenizer);
    }
    prompt.tokens = tokens;
    let response = tokenizer.decode_after(&prompt.tokens, &response_ids)?;
    let ends_with_eos = response_ids.last().is_some_and(|id| tokenizer.eos_ids().contains(id));
    let finish = match field(row, "finish_reason").and_then(Value::as_str) {
        Some("length") => FinishReason::Length,
        None if has_ids && !ends_with_eos => FinishReason::Length,
        _ => FinishReason::Stop,
    };
    Ok(PromptResponse { prompt, response, response_ids, finish })
}

/// Returns the token ids of a prompt and its completion, and the number of tokens of the prompt. Token ids take precedence over
/// text, as they are exact. With `keep_eos`, an EOS that the tokenizer appends to every text is kept.
pub(super) fn prompt_and_completion(
    row: &Value,
    tokenizer: &Tokenizer,
    vocab: i64,
    keep_eos: bool,
) -> Result<(Vec<i64>, usize)> {
    let prompt = token_ids(row, "prompt_ids", vocab)?;
    let Some(completion) = token_ids(row, "completion_ids", vocab)? else {
        // Token ids and a text cannot be joined: the boundary may fall within a token.
        if prompt.is_some() {
            return Err(Error::Run(expected("completion_ids", "a list of token ids, as `prompt_ids` is", row)));
        }
        let name = response_field(row);
        if let Some(Value::Array(_)) = field(row, name) {
            return encode_prompt_and_response(row, tokenizer, name);
        }
        let prompt = text_field(row, "prompt")?;
        let completion = text_field(row, name)?;
        let encode = if keep_eos { Tokenizer::encode_open_pair } else { Tokenizer::encode_unclosed_pair };
        return encode(tokenizer, prompt, completion);
    };
    let mut tokens = match (prompt, field(row, "prompt")) {
        (Some(prompt), _) => prompt,
        (None, Some(Value::Array(_))) => encode_chat(row, tokenizer, &["prompt"], true)?.1,
        (None, _) => tokenizer.encode_prompt(text_field(row, "prompt")?)?,
    };
    let prompt_len = tokens.len();
    tokens.extend(completion);
    Ok((tokens, prompt_len))
}
