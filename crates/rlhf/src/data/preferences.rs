//! Preference pairs of completions to one prompt, as TRL's `DPOTrainer` reads them.

use super::chat::conversation;
use super::dataset::Dataset;
use super::row::{check_whole, expected, field, text_field};
use rlhf_base::weights::brief;
use rlhf_base::{Error, Result};
use rlhf_lm::tokenizer::{Tokenizer, shared_prefix};
use serde_json::{Map, Value};

/// A prompt with two completions, one of them preferred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preference {
    /// Token ids of the prompt, without the tokens at its end that become others before a completion.
    pub prompt: Vec<i64>,
    /// Token ids of the preferred completion.
    pub chosen: Vec<i64>,
    /// Token ids of the other completion.
    pub rejected: Vec<i64>,
}

impl Dataset {
    /// Returns the preferences of all rows: `chosen` and `rejected` after `prompt`, or, without a prompt, two texts or conversations that
    /// both begin with the prompt. All are strings, or all are lists of messages. EOS is appended to strings that do not end with it;
    /// conversations end as the chat template ends them. Also returns a message if the end of some prompts is left out.
    ///
    /// The prompt ends where it is no longer the beginning of both texts: tokens may merge across its end, or the chat template may write
    /// something else there.
    ///
    /// # Errors
    /// If a row lacks one of the two, both have no beginning in common, the tokenizer has no EOS token, or its chat template fails.
    pub fn preferences(&self, tokenizer: &Tokenizer) -> Result<(Vec<Preference>, Option<String>)> {
        let preferences = self.map(|row| read_preference(row, tokenizer))?;
        let lost = preferences.iter().position(|(_, lost)| !lost.is_empty());
        let note = lost.map(|at| {
            let count = preferences.iter().filter(|(_, lost)| !lost.is_empty()).count();
            let ids = &preferences[at].1;
            let text = tokenizer.decode_verbatim(ids).unwrap_or_default();
            format!(
                "{}: in {count} of {} rows the end of the prompt is left out, first {} in {}: tokens merge across it, or the chat template writes \
                 a prompt alone differently",
                self.name.display(),
                preferences.len(),
                brief(&format!("{text:?}")),
                self.rows[at].place
            )
        });
        Ok((preferences.into_iter().map(|(preference, _)| preference).collect(), note))
    }
}

/// Returns the preference of a row, and the tokens at the end of its prompt that are left out.
fn read_preference(row: &Value, tokenizer: &Tokenizer) -> Result<(Preference, Vec<i64>)> {
    let is_chat = matches!(field(row, "chosen"), Some(Value::Array(_)));
    let [prompt, chosen, rejected] =
        if is_chat { encode_chats(row, tokenizer)? } else { encode_texts(row, tokenizer)? };
    let len = shared_prefix(&prompt, &chosen).min(shared_prefix(&prompt, &rejected));
    let lost = prompt[len..].to_vec();
    let chosen = chosen[len..].to_vec();
    let rejected = rejected[len..].to_vec();
    Ok((Preference { prompt: prompt[..len].to_vec(), chosen, rejected }, lost))
}

/// Returns the token ids of the prompt alone, and of the prompt with each of the two completions.
fn encode_texts(row: &Value, tokenizer: &Tokenizer) -> Result<[Vec<i64>; 3]> {
    let chosen = text_field(row, "chosen")?;
    let rejected = text_field(row, "rejected")?;
    let (prompt, sides) = if field(row, "prompt").is_some() {
        (text_field(row, "prompt")?.to_string(), [chosen, rejected].map(String::from))
    } else {
        check_whole(row, chosen)?;
        let [chosen, rejected] = [chosen, rejected].map(|text| text.chars().collect::<Vec<char>>());
        let mut len = shared_len(&chosen, &rejected)?;
        // The space before a completion belongs to the completion.
        if chosen.get(len) != rejected.get(len) && len > 0 && chosen[len - 1] == ' ' {
            len -= 1;
        }
        let text = |letters: &[char]| letters.iter().collect::<String>();
        (text(&chosen[..len]), [text(&chosen[len..]), text(&rejected[len..])])
    };
    let eos = tokenizer.token_text(None, tokenizer.require_eos()?)?;
    let [chosen, rejected] = sides.map(|side| {
        let end = if side.ends_with(&eos) { "" } else { eos.as_str() };
        tokenizer.encode(&format!("{prompt}{side}{end}"))
    });
    Ok([tokenizer.encode(&prompt)?, chosen?, rejected?])
}

/// [`encode_texts`] for messages.
fn encode_chats(row: &Value, tokenizer: &Tokenizer) -> Result<[Vec<i64>; 3]> {
    let messages = |name: &str| conversation(row, &[name]);
    let (chosen, variables) = messages("chosen")?;
    let (rejected, _) = messages("rejected")?;
    let (prompt, chosen, rejected) = if field(row, "prompt").is_some() {
        let prompt = match conversation(row, &["prompt"]) {
            Err(_) if row["prompt"].is_string() => conversation(row, &["prompt", "chosen"]).map(|_| Vec::new())?,
            prompt => prompt?.0,
        };
        (prompt, chosen, rejected)
    } else {
        let len = shared_len(&chosen, &rejected)?;
        if len == 0 {
            let what = "messages that begin as those of `rejected`, with a prompt (or `prompt`, its messages)";
            return Err(Error::Run(expected("chosen", what, row)));
        }
        (chosen[..len].to_vec(), chosen[len..].to_vec(), rejected[len..].to_vec())
    };
    let render = |messages: &[Value], opens: bool, variables: &Map<String, Value>| {
        Ok::<_, Error>(tokenizer.encode_chat(messages, opens, variables)?.1)
    };
    let whole = |side: Vec<Value>| render(&[&prompt[..], &side].concat(), false, &variables);
    Ok([render(&prompt, true, &variables)?, whole(chosen)?, whole(rejected)?])
}

/// Returns the length of the common beginning. If one of the two is the beginning of the other, its last element does not count, so that no
/// completion is empty.
fn shared_len<T: PartialEq>(chosen: &[T], rejected: &[T]) -> Result<usize> {
    let shortest = chosen.len().min(rejected.len());
    if shortest == 0 {
        let message =
            "`chosen` and `rejected` without a `prompt`: expected two texts that begin with it, found an empty one";
        return Err(Error::Run(message.into()));
    }
    let same = chosen.iter().zip(rejected).take_while(|(a, b)| a == b).count();
    Ok(same.min(shortest - 1))
}
