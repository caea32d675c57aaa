//! Reads a turn of the model: reasoning, text and calls.
//!
//! The text is cut into regions as transformers' `parse_response` cuts it with the response templates of trl: whatever is in no tags is content, of
//! which the last piece counts; a region whose end is missing ends with the text.

use super::cast::Schemas;
use super::form::{Calls, Form, PYTHON_TAG, REASONING_TAGS};
use super::parameters;
use super::render::TAGS;
use super::{ToolCall, shown};
use crate::tokenizer::python::is_space;
use serde_json::{Map, Value, json};

/// A part of the turn's text.
pub(super) enum Region<'t> {
    Reasoning(&'t str),
    Content(&'t str),
    Call(Found<'t>),
}

/// Returns the assistant's message in `text`, and its calls.
///
/// # Errors
/// The fault, if a call cannot be read.
pub(super) fn turn(form: &Form, text: &str, tools: &[Value]) -> Result<(Value, Vec<ToolCall>), String> {
    let schemas = Schemas::new(tools);
    let mut message = Map::from_iter([("role".to_string(), json!("assistant"))]);
    let (mut written, mut calls) = (Vec::new(), Vec::new());
    for region in regions(form, text) {
        match region {
            Region::Reasoning(text) => drop(message.insert("reasoning_content".into(), stripped(text).into())),
            Region::Content(text) => drop(message.insert("content".into(), stripped(text).into())),
            Region::Call(Found { name, body, .. }) => {
                let mut function = function(form, name, body)?;
                calls.push(parse_call(&mut function, &schemas)?);
                written.push(json!({"type": "function", "function": function}));
            }
        }
    }
    message.retain(|_, value| value.as_str() != Some(""));
    let content = message.get("content").and_then(Value::as_str).unwrap_or_default();
    let content = without_end(form, content).to_string();
    message.insert("content".into(), content.into());
    if !written.is_empty() {
        message.insert("tool_calls".into(), written.into());
    }
    Ok((message.into(), calls))
}

/// Cuts `text` into its regions.
pub(super) fn regions<'t>(form: &Form, text: &'t str) -> Vec<Region<'t>> {
    let (mut regions, mut rest) = (Vec::new(), text);
    let reads_reasoning = form.calls.tags().is_some();
    while !rest.is_empty() {
        let before = text.len() - rest.len();
        let reasoning = reads_reasoning.then(|| rest.find(REASONING_TAGS[0])).flatten();
        let call = next_call(form, rest);
        let end = rest.find(form.end.as_str()).filter(|_| !form.end.is_empty());
        let starts = [reasoning, call.as_ref().map(|call| call.start), end];
        let Some(start) = starts.iter().flatten().min().copied() else {
            regions.push(Region::Content(rest));
            break;
        };
        if start > 0 {
            regions.push(Region::Content(&rest[..start]));
        }
        if reasoning == Some(start) {
            let (body, after) = split_at(&rest[start + REASONING_TAGS[0].len()..], REASONING_TAGS[1]);
            regions.push(Region::Reasoning(body));
            rest = after;
        } else if let Some(call) = call.filter(|call| call.start == start) {
            rest = call.after;
            regions.push(Region::Call(Found { start: call.start + before, ..call }));
        } else {
            rest = rest[start + form.end.len()..].trim_start_matches(is_space);
        }
    }
    regions
}

/// A call in a text.
pub(super) struct Found<'t> {
    start: usize,
    /// The name, where it is read from the text before the rest.
    name: Option<&'t str>,
    /// The JSON, or the parameters.
    body: &'t str,
    /// Whether the end of the call is there.
    is_closed: bool,
    after: &'t str,
}

/// Returns the start of the last call of a `text` that was cut, if the call is not whole: neither its end nor all of its arguments are there.
pub(super) fn cut_call(form: &Form, text: &str) -> Option<usize> {
    let Some(Region::Call(Found { start, body, is_closed: false, .. })) = regions(form, text).pop() else {
        return None;
    };
    let is_whole = match form.calls {
        Calls::Parameters => parameters::is_whole(body),
        Calls::Tagged(_) | Calls::Bare => serde_json::from_str::<Value>(body).is_ok(),
    };
    (!is_whole).then_some(start)
}

/// Finds the first call in `text`.
fn next_call<'t>(form: &Form, text: &'t str) -> Option<Found<'t>> {
    match &form.calls {
        Calls::Tagged([open, close]) => {
            let start = text.find(open.as_str())?;
            let rest = &text[start + open.len()..];
            let (body, after) = split_at(rest, close);
            Some(Found { start, name: None, body, is_closed: body.len() < rest.len(), after })
        }
        Calls::Parameters => parameters::find(text).map(|call| {
            let (body, after) = split_at(call.rest, TAGS[1]);
            Found { start: call.at, name: Some(call.name), body, is_closed: body.len() < call.rest.len(), after }
        }),
        Calls::Bare => text.match_indices('{').find_map(|(start, _)| {
            let (name, rest) = bare_start(&text[start..], form.arguments).ok()?;
            let (body, after) = bare_body(rest, form);
            let before = text[..start].strip_suffix(PYTHON_TAG).map_or(start, str::len);
            Some(Found { start: before, name: Some(name), body, is_closed: body.len() < rest.len(), after })
        }),
    }
}

/// Splits the start of a bare call, `{"name": "f", "parameters": `, from `text`. Returns the name and the rest.
///
/// # Errors
/// If there is none: whether more text may make one of it.
pub(super) fn bare_start<'t>(text: &'t str, arguments: &str) -> Result<(&'t str, &'t str), bool> {
    let spaces = |text: &'t str| text.trim_start_matches(is_space);
    let rest = literal(spaces(literal(text, "{\"name\":")?), "\"")?;
    let (name, rest) = rest.split_once('"').ok_or(true)?;
    if name.is_empty() {
        return Err(false);
    }
    let rest = literal(literal(spaces(literal(rest, ",")?), "\"")?, arguments)?;
    Ok((name, spaces(literal(rest, "\":")?)))
}

/// Splits `word` from the start of `text`.
///
/// # Errors
/// If it does not start with it: whether more text may make it of it.
pub(super) fn literal<'t>(text: &'t str, word: &str) -> Result<&'t str, bool> {
    text.strip_prefix(word).ok_or(word.starts_with(text))
}

/// Splits the arguments of a bare call from `text`: they end before the brace at the end of the turn. Returns them and the text after the turn.
fn bare_body<'t>(text: &'t str, form: &Form) -> (&'t str, &'t str) {
    let closing = |end: &String| {
        let close = format!("}}{end}");
        text.find(&close).map(|at| (at, at + close.len()))
    };
    let ends = std::iter::once(&form.end).chain(&form.ends).filter(|end| !end.is_empty());
    match ends.filter_map(closing).min() {
        Some((at, after)) => (&text[..at], text[after..].trim_start_matches(is_space)),
        None => {
            // The token that ends the turn is missing; the last brace, which is the call's, may be missing too.
            let body = text.trim_end_matches(is_space);
            let is_whole = serde_json::from_str::<Value>(body).is_ok();
            (body.strip_suffix('}').filter(|_| !is_whole).unwrap_or(text), "")
        }
    }
}

/// Splits `text` at `close`. Returns the text before it, and the text after it and the spaces that follow; all of it if it is missing.
fn split_at<'t>(text: &'t str, close: &str) -> (&'t str, &'t str) {
    text.split_once(close).map_or((text, ""), |(body, after)| (body, after.trim_start_matches(is_space)))
}

pub(super) fn stripped(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// Returns `content` without a token that ends a text.
pub(super) fn without_end<'t>(form: &Form, content: &'t str) -> &'t str {
    form.ends.iter().find_map(|end| content.strip_suffix(end.as_str())).unwrap_or(content)
}

/// Returns the `function` of a call from its JSON.
fn function(form: &Form, name: Option<&str>, text: &str) -> Result<Value, String> {
    if let (Calls::Parameters, Some(name)) = (&form.calls, name) {
        return Ok(json!({"name": name, "arguments": parameters::arguments(text)}));
    }
    let value: Value = serde_json::from_str(text)
        .map_err(|e| format!("a tool call: expected JSON, found {}: {e}", shown(stripped(text))))?;
    let Some(name) = name else {
        return Ok(with_arguments(value, form.arguments));
    };
    Ok(json!({"name": name, "arguments": value}))
}

/// Returns `value` with its arguments under their usual name.
fn with_arguments(mut value: Value, field: &str) -> Value {
    if field != "arguments"
        && let Some(fields) = value.as_object_mut()
        && let Some(arguments) = fields.remove(field)
    {
        fields.insert("arguments".into(), arguments);
    }
    value
}

/// Returns the call of `function`, whose arguments it casts.
///
/// # Errors
/// If it is no object, or has no name.
fn parse_call(function: &mut Value, schemas: &Schemas<'_>) -> Result<ToolCall, String> {
    let text = function.to_string();
    let Some(fields) = function.as_object_mut() else {
        return Err(format!("a tool call: expected a JSON object, found {}", shown(&text)));
    };
    let Some(name) = fields.get("name").and_then(Value::as_str).map(String::from) else {
        return Err(format!("a tool call: expected a text as its `name`, found {}", shown(&text)));
    };
    if fields.get("arguments").is_none_or(Value::is_null) {
        fields.insert("arguments".into(), json!({}));
    }
    let arguments = &mut fields["arguments"];
    let Some(arguments) = arguments.as_object_mut() else {
        let fault = format!("tool {name}: expected an object as `arguments`, found {}", shown(&arguments.to_string()));
        return Ok(ToolCall { name, arguments: Map::new(), fault: Some(fault) });
    };
    schemas.cast(&name, arguments);
    Ok(ToolCall { name, arguments: arguments.clone(), fault: None })
}
