//! Demonstrations for supervised fine-tuning.

use super::chat::{conversation, encode_chat, render_prompt_and_response};
use super::dataset::Dataset;
use super::left_out::LeftOut;
use super::row::{check_whole, expected, field, messages_field, text_field, token_ids};
use rlhf_base::{Error, Result};
use rlhf_lm::tokenizer::Tokenizer;
use serde_json::Value;
use std::ops::Range;

/// The label of a token that is not in the loss.
const NOT_LEARNED: i64 = -100;

/// A text for supervised fine-tuning, and the tokens that enter the loss.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demonstration {
    /// Token ids.
    pub tokens: Vec<i64>,
    /// Number of tokens of the prompt, 0 if there is none. An encoder-decoder reads them in its encoder.
    pub prompt_len: usize,
    /// Index of the first token in the loss; at least 1.
    pub loss_start: usize,
    /// Tokens after `loss_start` that are not in the loss: sorted ranges that neither overlap nor touch.
    pub masked: Vec<Range<usize>>,
}

impl Demonstration {
    /// Returns the number of tokens in the loss.
    pub fn loss_tokens(&self) -> usize {
        let masked: usize = self.masked.iter().map(Range::len).sum();
        self.tokens.len().saturating_sub(self.loss_start + masked)
    }

    /// Truncates the text to `max_length` tokens.
    pub(crate) fn truncate(&mut self, max_length: usize) {
        self.tokens.truncate(max_length);
        let len = self.tokens.len();
        self.prompt_len = self.prompt_len.min(len);
        self.masked.iter_mut().for_each(|range| *range = range.start.min(len)..range.end.min(len));
        self.masked.retain(|range| !range.is_empty());
    }

    /// Truncates prompt and response to `max_length` tokens each, for an encoder-decoder. A truncated prompt keeps `suffix`, the tokens
    /// that the tokenizer puts after every prompt.
    pub(crate) fn truncate_each(&mut self, max_length: usize, suffix: &[i64]) {
        let (prompt, response) = self.tokens.split_at(self.prompt_len);
        let kept = if prompt.ends_with(suffix) && suffix.len() < max_length { suffix.len() } else { 0 };
        let cut = prompt.len().saturating_sub(max_length);
        let first = prompt.len() - kept - cut;
        let tokens = [&prompt[..first], &prompt[prompt.len() - kept..], response].concat();
        self.tokens = tokens;
        self.prompt_len -= cut;
        self.loss_start -= cut;
        self.tokens.truncate(self.prompt_len + max_length);
    }

    /// Masks all tokens outside `ranges`.
    fn mask_others(&mut self, ranges: Vec<Range<usize>>) {
        let mut at = self.loss_start;
        let end = self.tokens.len();
        for range in ranges {
            if range.end <= at {
                continue;
            }
            if range.start > at {
                self.masked.push(at..range.start);
            }
            at = range.end;
        }
        if at < end {
            self.masked.push(at..end);
        }
        // Masked tokens at the start are left out of the range, so that their logits need not be computed.
        if self.masked.first().is_some_and(|first| first.start == self.loss_start && first.end < end) {
            self.loss_start = self.masked.remove(0).end;
        }
    }
}

/// Selects the field of plain texts and the tokens that enter the loss.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DemonstrationOptions {
    /// Computes the loss on the completion only, for rows with a prompt and a completion.
    pub completion_only: bool,
    /// Computes the loss on the assistant's messages only, for conversations.
    pub assistant_only: bool,
    /// Field of texts that are in the loss as a whole.
    pub text_field: String,
    /// Token ids of rows are below this, the vocabulary of the model.
    pub vocab: i64,
}

/// The flag of `rlhf sft` that takes another chat template.
pub(crate) const TEMPLATE_FLAG: &str = "--chat_template_path takes another template";

impl Default for DemonstrationOptions {
    fn default() -> Self {
        Self { completion_only: true, assistant_only: false, text_field: "text".into(), vocab: i64::MAX }
    }
}

impl Dataset {
    /// Returns the demonstrations of all rows: the token ids `input_ids`; else `prompt` and `completion`, or `prompt` and `chosen`; else
    /// `text`; else `messages` or `conversations`; else `chosen`.
    ///
    /// Prompt and completion (or `chosen`) are both strings or both lists of messages. EOS is appended to strings, but an empty text has no
    /// tokens; conversations end as the chat template ends them. With `completion_only` the prompt is not in the loss. With the tokenizer
    /// of an encoder-decoder it never is, and a row has a prompt and a completion, both strings. Token ids are used as they are; a token is
    /// in the loss if its label in `labels` is not -100, or without labels if `assistant_masks` and, with `completion_only`,
    /// `completion_mask` mark it, as in TRL's `SFTTrainer`.
    ///
    /// # Errors
    /// If a row has none of these forms, the tokenizer has no EOS token, or its chat template fails.
    pub fn demonstrations(&self, tokenizer: &Tokenizer, completion_only: bool) -> Result<Vec<Demonstration>> {
        let options = DemonstrationOptions { completion_only, ..DemonstrationOptions::default() };
        self.demonstrations_with(tokenizer, &options)
    }

    /// [`Dataset::demonstrations`] with all options.
    ///
    /// # Errors
    /// The errors of [`Dataset::demonstrations`]; with `assistant_only`, if a row is not a conversation, or its chat template neither marks
    /// the assistant's messages nor separates the turns.
    pub fn demonstrations_with(
        &self,
        tokenizer: &Tokenizer,
        options: &DemonstrationOptions,
    ) -> Result<Vec<Demonstration>> {
        Ok(self.demonstrations_noted(tokenizer, options, TEMPLATE_FLAG)?.0)
    }

    /// [`Dataset::demonstrations_with`] that also returns a message if the chat template leaves out some of the parts to be learned, such
    /// as the reasoning of earlier turns.
    ///
    /// # Errors
    /// The errors of [`Dataset::demonstrations_with`]; if the template writes none of these parts in any row. That message ends with
    /// `other_template`, which says how another template is used.
    pub(crate) fn demonstrations_noted(
        &self,
        tokenizer: &Tokenizer,
        options: &DemonstrationOptions,
        other_template: &str,
    ) -> Result<(Vec<Demonstration>, Option<String>)> {
        let (rows, left_out): (Vec<Demonstration>, Vec<LeftOut>) =
            self.map(|row| read_demonstration(row, tokenizer, options))?.into_iter().unzip();
        let Some(at) = left_out.iter().position(LeftOut::is_some) else { return Ok((rows, None)) };
        let first = left_out[at].first();
        if left_out.iter().all(LeftOut::is_all) {
            let message =
                format!("the chat template writes nothing of what is to be learned, first {first}; {other_template}");
            return Err(self.error(at, message));
        }
        let count = left_out.iter().filter(|row| row.is_some()).count();
        let place = self.rows[at].place;
        let note = format!(
            "{}: the chat template leaves out a part of what is to be learned in {count} of {} rows, first {first} in {place}",
            self.name.display(),
            rows.len()
        );
        Ok((rows, Some(note)))
    }

    /// For every row of token ids that marks learned tokens, by `labels` or a mask, stores the ids before the first learned token as
    /// `prompt_ids`.
    ///
    /// # Errors
    /// If ids or marks are malformed, or the first token is already learned.
    pub(crate) fn with_labelled_prompts(mut self, vocab: i64) -> Result<Self> {
        let prompts = self.map(|row| labelled_prompt(row, vocab))?;
        for (row, ids) in self.rows.iter_mut().zip(prompts) {
            if let (Some(fields), Some(ids)) = (row.value.as_object_mut(), ids) {
                fields.insert("prompt_ids".into(), ids.into());
            }
        }
        Ok(self)
    }
}

fn read_demonstration(
    row: &Value,
    tokenizer: &Tokenizer,
    options: &DemonstrationOptions,
) -> Result<(Demonstration, LeftOut)> {
    if !tokenizer.is_of_encoder_decoder()
        && let Some(tokens) = token_ids(row, "input_ids", options.vocab)?
    {
        return Ok((tokenized(row, tokens, options)?, LeftOut::default()));
    }
    let Encoded { tokens, prompt_len, chat_fields, text } = encode(row, tokenizer, &options.text_field)?;
    // The first token cannot be predicted.
    let loss_start = if options.completion_only || tokenizer.is_of_encoder_decoder() { prompt_len.max(1) } else { 1 };
    let mut demonstration = Demonstration { tokens, prompt_len, loss_start, masked: Vec::new() };
    if options.assistant_only {
        if chat_fields.is_empty() {
            let message = "assistant_only_loss: expected a row with a list of messages, found one without";
            return Err(Error::Run(message.into()));
        }
        let (messages, variables) = conversation(row, &chat_fields)?;
        demonstration.mask_others(tokenizer.assistant_tokens(&messages, &variables)?);
    }
    let mut learned = match chat_fields.as_slice() {
        [] => Vec::new(),
        [_, completion] if options.completion_only => conversation(row, &[*completion])?.0,
        fields => conversation(row, fields)?.0,
    };
    learned.retain(|message| !options.assistant_only || message["role"] == "assistant");
    Ok((demonstration, LeftOut::find(&learned, &text)))
}

/// Returns the demonstration of a row with the token ids `tokens`.
fn tokenized(row: &Value, tokens: Vec<i64>, options: &DemonstrationOptions) -> Result<Demonstration> {
    let learned = learned_tokens(row, &tokens, options)?;
    let mut demonstration = Demonstration { tokens, prompt_len: 0, loss_start: 1, masked: Vec::new() };
    let at = |at: usize| at..at + 1;
    demonstration.mask_others((1..learned.len()).filter(|&place| learned[place]).map(at).collect());
    Ok(demonstration)
}

/// For a row of token ids with marks: returns the ids before the first learned one, or all ids if none is learned. `None` for any other
/// row, or if the row has a separate prompt.
fn labelled_prompt(row: &Value, vocab: i64) -> Result<Option<Vec<i64>>> {
    let has_marks = ["labels", "completion_mask", "assistant_masks"].iter().any(|name| field(row, name).is_some());
    if !has_marks || ["prompt", "prompt_ids"].iter().any(|name| field(row, name).is_some()) {
        return Ok(None);
    }
    let Some(mut tokens) = token_ids(row, "input_ids", vocab)? else { return Ok(None) };
    match learned_tokens(row, &tokens, &DemonstrationOptions::default())?.iter().position(|learned| *learned) {
        Some(0) => {
            let message = "field `input_ids`: expected a prompt, to which a response is sampled, found ids that are learned from the first one on";
            return Err(Error::Run(message.into()));
        }
        Some(first) => tokens.truncate(first),
        None => {}
    }
    Ok(Some(tokens))
}

/// Returns for each of the token ids `tokens` of a row whether it is learned.
fn learned_tokens(row: &Value, tokens: &[i64], options: &DemonstrationOptions) -> Result<Vec<bool>> {
    Ok(match numbers(row, "labels", tokens.len())? {
        Some(labels) => {
            let is_another_id = |at: &usize| labels[*at] != NOT_LEARNED && labels[*at] != tokens[*at];
            if let Some(at) = (0..tokens.len()).find(is_another_id) {
                return Err(Error::Run(format!(
                    "field `labels`: expected -100 or the token id of the same place in `input_ids`, {}, found {} at place {}",
                    tokens[at],
                    labels[at],
                    at + 1
                )));
            }
            labels.iter().map(|label| *label != NOT_LEARNED).collect()
        }
        None => {
            let mut learned = vec![true; tokens.len()];
            let completion = options.completion_only.then_some("completion_mask");
            for name in completion.into_iter().chain(["assistant_masks"]) {
                match numbers(row, name, tokens.len())? {
                    Some(mask) => learned.iter_mut().zip(mask).for_each(|(learned, mark)| *learned &= mark != 0),
                    None if name == "assistant_masks" && options.assistant_only => {
                        let what = "a list of 0 and 1, by which assistant_only_loss selects among `input_ids`";
                        return Err(Error::Run(expected(name, what, row)));
                    }
                    None => {}
                }
            }
            learned
        }
    })
}

/// Returns the whole numbers in the field `name`, one for each of `len` tokens, or `None` if the row has no such field.
fn numbers(row: &Value, name: &str, len: usize) -> Result<Option<Vec<i64>>> {
    let Some(value) = field(row, name) else { return Ok(None) };
    // Masks may consist of booleans.
    let number = |value: &Value| value.as_i64().or_else(|| value.as_bool().map(i64::from));
    let numbers: Option<Vec<i64>> = value.as_array().and_then(|list| list.iter().map(number).collect());
    match numbers {
        Some(numbers) if numbers.len() == len => Ok(Some(numbers)),
        Some(numbers) => Err(Error::Run(format!(
            "field `{name}`: expected as many numbers as `input_ids` has, {len}, found {}",
            numbers.len()
        ))),
        None => Err(Error::Run(expected(name, "a list of whole numbers", row))),
    }
}

/// The tokens of a demonstration.
struct Encoded {
    tokens: Vec<i64>,
    prompt_len: usize,
    /// The fields with the messages of the demonstration, if it is a conversation.
    chat_fields: Vec<&'static str>,
    /// The text of the demonstration, if it is a conversation.
    text: String,
}

fn encode(row: &Value, tokenizer: &Tokenizer, text_name: &str) -> Result<Encoded> {
    let is_whole_text = whole_text(row, text_name).is_some() || field(row, "prompt").is_none();
    // Conversations pass this check: the tokenizer refuses them with its own message.
    if tokenizer.is_of_encoder_decoder() && is_whole_text && messages_field(row).is_none() {
        let what = "a text for the encoder (and `completion`, the response)";
        return Err(Error::Run(expected("prompt", what, row)));
    }
    let encoded = encode_any(row, tokenizer, text_name)?;
    if encoded.prompt_len == 0 && tokenizer.is_of_encoder_decoder() {
        return Err(Error::Run("the prompt is empty: expected at least one token for the encoder".into()));
    }
    Ok(encoded)
}

fn encode_any(row: &Value, tokenizer: &Tokenizer, text_name: &str) -> Result<Encoded> {
    let text = |(tokens, prompt_len)| Encoded { tokens, prompt_len, chat_fields: Vec::new(), text: String::new() };
    let chat = |(text, tokens, prompt_len), chat_fields| Encoded { tokens, prompt_len, chat_fields, text };
    let whole_chat = |name| {
        let (text, tokens) = encode_chat(row, tokenizer, &[name], false)?;
        Ok::<_, Error>(chat((text, tokens, 0), vec![name]))
    };
    let no_form = || {
        let forms = "a string (or `prompt` and `completion` or `chosen`, or `messages`, or token ids: `input_ids`)";
        Error::Run(expected(text_name, forms, row))
    };
    if let Some(value) = whole_text(row, text_name) {
        return match value.as_str().ok_or_else(no_form)? {
            "" => Ok(text((Vec::new(), 0))),
            whole => Ok(text(tokenizer.encode_pair("", whole)?)),
        };
    }
    let Some((name, response)) = response_field(row) else {
        let (name, _) = messages_field(row).ok_or_else(no_form)?;
        return whole_chat(name);
    };
    // A completion needs a prompt; a `chosen` text may contain it.
    let has_prompt = name != "chosen" || field(row, "prompt").is_some();
    match response {
        Value::String(response) => {
            let prompt = if has_prompt { text_field(row, "prompt")? } else { "" };
            if !has_prompt {
                check_whole(row, response)?;
            }
            Ok(text(tokenizer.encode_pair(prompt, response)?))
        }
        Value::Array(_) if has_prompt => {
            Ok(chat(render_prompt_and_response(row, tokenizer, name)?, vec!["prompt", name]))
        }
        Value::Array(_) => whole_chat(name),
        _ => Err(Error::Run(expected(name, "a string or a list of messages", row))),
    }
}

/// Returns the text of a demonstration that is in the field `name`, unless the row has a prompt with a response, which TRL reads first.
fn whole_text<'r>(row: &'r Value, name: &str) -> Option<&'r Value> {
    let is_pair = field(row, "prompt").is_some() && response_field(row).is_some();
    // The field of the text may be a part of the pair.
    let is_part = ["prompt", "completion", "chosen"].contains(&name);
    field(row, name).filter(|_| is_part || !is_pair)
}

/// Returns the response of a demonstration and the name of its field: `completion`, or `chosen` of a preference pair.
fn response_field(row: &Value) -> Option<(&'static str, &Value)> {
    let has_messages = messages_field(row).is_some();
    let completion = field(row, "completion").map(|response| ("completion", response));
    completion.or_else(|| Some(("chosen", field(row, "chosen").filter(|_| !has_messages)?)))
}
