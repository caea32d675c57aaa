//! Conversations in the fields of a row.

use super::row::{expected, field, prompt_field};
use rlhf_base::{Error, Result};
use rlhf_lm::tokenizer::{Tokenizer, shared_prefix, user_message, without_nulls};
use serde_json::{Map, Value};

/// Renders the messages in `fields` of a row, joined in this order, by the chat template; returns the text and its token ids. With
/// `add_generation_prompt` the text ends where the response starts: after the generation prompt, or, if the last message is the assistant's,
/// within that message, which the response continues.
pub(crate) fn encode_chat(
    row: &Value,
    tokenizer: &Tokenizer,
    fields: &[&str],
    add_generation_prompt: bool,
) -> Result<(String, Vec<i64>)> {
    let text = render(row, tokenizer, fields, add_generation_prompt)?;
    let ids = tokenizer.encode_rendered(&text)?;
    Ok((text, ids))
}

/// The text of [`encode_chat`].
pub(super) fn render(
    row: &Value,
    tokenizer: &Tokenizer,
    fields: &[&str],
    add_generation_prompt: bool,
) -> Result<String> {
    let (messages, variables) = conversation(row, fields)?;
    if add_generation_prompt && messages.last().is_some_and(|message| message["role"] == "assistant") {
        return tokenizer
            .render_continued_chat(&messages, &variables)
            .map_err(|e| Error::Run(format!("field `{}`: {e}", fields[0])));
    }
    tokenizer.render_chat(&messages, add_generation_prompt, &variables)
}

/// Returns the messages in `fields` of a row, joined, and the row's variables for the chat template: `chat_template_kwargs`
/// and `tools`.
pub(super) fn conversation(row: &Value, fields: &[&str]) -> Result<(Vec<Value>, Map<String, Value>)> {
    let mut conversation = Vec::new();
    for name in fields {
        let messages = field(row, name).and_then(Value::as_array).filter(|messages| !messages.is_empty());
        let wrong = || {
            let message = expected(name, "a list of at least one message", row);
            Error::Run(format!("{message}{}", whole_hint(row, fields)))
        };
        join(&mut conversation, messages.ok_or_else(wrong)?);
    }
    let mut variables = match field(row, "chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(variables)) => variables.clone(),
        Some(_) => return Err(Error::Run(expected("chat_template_kwargs", "an object", row))),
    };
    if !variables.contains_key("tools")
        && let Some(tools) = tools(row)?.filter(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty()))
    {
        variables.insert("tools".into(), tools);
    }
    Ok((conversation, variables))
}

/// Returns the prompt of a row as messages; a text is the user's.
///
/// # Errors
/// If the row has only token ids, or messages that are not valid.
pub(crate) fn prompt_messages(row: &Value) -> Result<Vec<Value>> {
    match prompt_field(row) {
        Some((name, Value::Array(_))) => {
            if field(row, "chat_template_kwargs").is_some() {
                return Err(Error::Run(expected(
                    "chat_template_kwargs",
                    "none, with tools and environments: --chat_template_kwargs is for all rows",
                    row,
                )));
            }
            Ok(conversation(row, &[name])?.0)
        }
        Some((_, Value::String(text))) => Ok(vec![user_message(text)]),
        _ => Err(Error::Run(expected("prompt", "a text or a list of messages, for tools and environments", row))),
    }
}

/// Appends `messages` to a conversation. If the conversation ends with the beginning of an assistant's message and `messages` start with an
/// assistant's message, the two are joined into one.
fn join(conversation: &mut Vec<Value>, messages: &[Value]) {
    let is_open =
        |message: Option<&Value>| message.is_some_and(|m| m["role"] == "assistant" && m["content"].is_string());
    let mut rest = messages;
    if is_open(conversation.last())
        && is_open(messages.first())
        && let (Some(Value::Object(last)), [Value::Object(first), others @ ..]) = (conversation.last_mut(), messages)
    {
        let text = |fields: &Map<String, Value>| fields["content"].as_str().unwrap_or_default().to_string();
        let joined = text(last) + &text(first);
        last.extend(first.clone());
        last.insert("content".into(), joined.into());
        rest = others;
    }
    conversation.extend_from_slice(rest);
}

/// Returns the end of the error about a prompt that is a string before a side of a pair in messages, if that side is a whole conversation.
fn whole_hint(row: &Value, fields: &[&str]) -> String {
    let is_whole = |side: &&str| row[*side][0]["role"].as_str().is_some_and(|role| role != "assistant");
    let sides = match fields {
        ["prompt", side @ ("chosen" | "rejected")] => vec![*side],
        ["prompt"] => vec!["chosen", "rejected"],
        _ => Vec::new(),
    };
    match sides.iter().find(|side| row["prompt"].is_string() && is_whole(side)) {
        Some(side) => format!("; if `{side}` is the whole conversation, --dataset_columns prompt=none"),
        None => String::new(),
    }
}

/// Returns the `tools` of a row, a list of objects or that list in JSON, as TRL passes it to the chat template.
fn tools(row: &Value) -> Result<Option<Value>> {
    let parsed = match field(row, "tools") {
        // A blank cell of CSV counts as no tools.
        Some(Value::String(text)) if text.trim().is_empty() => None,
        Some(Value::String(text)) => Some(serde_json::from_str(text).unwrap_or_default()),
        Some(tools) => Some(without_nulls(tools)),
        None => None,
    };
    let is_list = |tools: &Value| tools.as_array().is_some_and(|tools| tools.iter().all(Value::is_object));
    match parsed {
        Some(tools) if !is_list(&tools) => {
            Err(Error::Run(expected("tools", "a list of tools as objects, or that list in JSON", row)))
        }
        tools => Ok(tools),
    }
}

/// Returns the token ids of the messages in `prompt` and `response`, two fields of the row, and the number of tokens of the
/// prompt among them.
pub(super) fn encode_prompt_and_response(
    row: &Value,
    tokenizer: &Tokenizer,
    response: &str,
) -> Result<(Vec<i64>, usize)> {
    let (_, whole, prompt_len) = render_prompt_and_response(row, tokenizer, response)?;
    Ok((whole, prompt_len))
}

/// [`encode_prompt_and_response`], also with the text.
pub(super) fn render_prompt_and_response(
    row: &Value,
    tokenizer: &Tokenizer,
    response: &str,
) -> Result<(String, Vec<i64>, usize)> {
    let prompt = encode_chat(row, tokenizer, &["prompt"], true)?.1;
    let (text, whole) = encode_chat(row, tokenizer, &["prompt", response], false)?;
    let prompt_len = shared_prefix(&prompt, &whole);
    Ok((text, whole, prompt_len))
}

/// Returns `ids` without the whitespace that a chat template may put after the last EOS, such as a newline.
pub(crate) fn cut_after_eos(mut ids: Vec<i64>, tokenizer: &Tokenizer) -> Result<Vec<i64>> {
    if let Some(last) = ids.iter().rposition(|id| tokenizer.eos_ids().contains(id))
        && tokenizer.decode_verbatim(&ids[last + 1..])?.trim().is_empty()
    {
        ids.truncate(last + 1);
    }
    Ok(ids)
}
