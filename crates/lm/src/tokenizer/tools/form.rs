//! The form in which a chat template writes tool calls, found by what it writes.

use super::parameters::{self, FUNCTION, PARAMETER};
use super::render::{End, Renderer, TAGS, sentinel_call, tool_named};
use super::{DUMMY, SENTINELS, shown};
use crate::tokenizer::chat::unused_mark;
use crate::tokenizer::turns::shared_start;
use crate::tokenizer::user_message;
use rlhf_base::Result;
use serde_json::{Value, json};

/// Tags of reasoning.
pub(super) const REASONING_TAGS: [&str; 2] = ["<think>", "</think>"];

/// Tag before a call of Llama 3.1, which its models may write and its template does not.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

/// The form of a turn.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Form {
    pub(super) calls: Calls,
    /// The start of a call: the text before its name, and that between its name and its arguments; `None` where the arguments are first.
    pub(super) start: Option<[String; 2]>,
    /// Name of the field with a call's arguments.
    pub(super) arguments: &'static str,
    /// The text of the token that ends a turn; empty if there is none.
    pub(super) end: String,
    /// The texts of all tokens that end a text, the tokenizer's eos first.
    pub(super) ends: Vec<String>,
    /// The header of the assistant's turn.
    pub(super) header: String,
    /// The beginning of a turn that the generation prompt has after the header, such as `<think>`.
    pub(super) opening: String,
}

/// The place of a call in the text.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Calls {
    /// A JSON object between two tags, as in the templates of Qwen and Hermes.
    Tagged([String; 2]),
    /// A JSON object alone, as in the templates of Llama 3.1 to 3.3.
    Bare,
    /// A function and its parameters in separate tags, between [`TAGS`], as in the templates of Qwen3-Coder, Qwen3.5 and Nemotron 3.
    Parameters,
}

impl Calls {
    /// The tags around a call, if there are any.
    pub(super) fn tags(&self) -> Option<[&str; 2]> {
        match self {
            Self::Tagged([open, close]) => Some([open, close]),
            Self::Bare => None,
            Self::Parameters => Some(TAGS),
        }
    }
}

impl Form {
    /// Finds the form of the template of `renderer`; where the template describes calls to the model but does not write them, sets that they are
    /// written into the content.
    ///
    /// # Errors
    /// If there is none, or it is not known.
    pub(super) fn find(renderer: &mut Renderer) -> Result<Self> {
        let user = [user_message(DUMMY)];
        let (closed, open) = (renderer.text(&user, &[], End::Closed)?, renderer.text(&user, &[], End::Prompt)?);
        let prompt = open.strip_prefix(&closed).unwrap_or_default();
        let (header, opening) = prompt.split_at(prompt.find(REASONING_TAGS[0]).unwrap_or(prompt.len()));
        let mark = unused_mark(&[]);
        let said = [user_message(DUMMY), json!({"role": "assistant", "content": mark})];
        let said = renderer.text(&said, &[], End::Closed)?;
        let Some((_, tail)) = said.rsplit_once(&mark) else {
            return Err(renderer.invalid(
                "expected a chat template that writes the assistant's messages, found one that leaves them out",
            ));
        };
        let tokenizer = &renderer.tokenizer;
        let ends = tokenizer.eos_ids().iter().map(|&id| tokenizer.decode_verbatim(&[id])).collect::<Result<_>>()?;
        let form = |calls: Calls, start: Option<[String; 2]>, arguments: &'static str| {
            let end = tail.trim().to_string();
            Self { calls, start, arguments, end, ends, header: header.into(), opening: opening.into() }
        };
        let called = renderer.text(&sentinel_call(), &[], End::Closed)?;
        if !called.contains(SENTINELS[0]) {
            if !describes_tags(renderer) {
                return Err(renderer.invalid(
                    "expected a chat template that writes the assistant's tool calls, found one that leaves them out",
                ));
            }
            let start = [format!("{}\n{{\"name\": \"", TAGS[0]), "\", \"arguments\":".into()];
            let form = form(Calls::Tagged(TAGS.map(String::from)), Some(start), "arguments");
            renderer.in_content = true;
            return Ok(form);
        }
        let written = &called[shared_start(&called, &said)..];
        let written = written.strip_suffix(tail).unwrap_or(written);
        match calls_in(written) {
            Some((calls, arguments)) => Ok(form(calls.clone(), start_in(written, &calls), arguments)),
            None => Err(renderer.invalid(&format!(
                "expected tool calls as JSON, alone or between two tags such as {}, or as {FUNCTION}NAME>{}NAME>, found {}, a form that is not read",
                TAGS.join(" and "),
                PARAMETER[0],
                shown(written.trim())
            ))),
        }
    }
}

/// Whether the template tells the model to write calls between tags.
fn describes_tags(renderer: &Renderer) -> bool {
    let text = renderer.text(&[user_message(DUMMY)], &[tool_named(SENTINELS[0])], End::Prompt);
    text.is_ok_and(|text| TAGS.iter().chain(&SENTINELS[..1]).all(|part| text.contains(part)))
}

/// Returns the text before the name of the call of the sentinels in `written`, and that between the name and the arguments, if they have this
/// order.
fn start_in(written: &str, calls: &Calls) -> Option<[String; 2]> {
    let [name, key, ..] = SENTINELS;
    let (before, after) = written.split_once(name)?;
    let start = match calls.tags() {
        Some([open, _]) => before.rfind(open)?,
        None => before.rfind('{')?,
    };
    let arguments = if *calls == Calls::Parameters { PARAMETER[0] } else { "{" };
    let between = after[..after.find(key)?].rsplit_once(arguments)?.0.trim_end();
    Some([before[start..].to_string(), between.to_string()])
}

/// Returns the form of the call of the sentinels in `written`, and the name of the field with its arguments, if it is known.
fn calls_in(written: &str) -> Option<(Calls, &'static str)> {
    let [name, key, value, _] = SENTINELS;
    if let Some(call) = parameters::find(written)
        && call.name == name
        && Value::from(parameters::arguments(call.rest)) == json!({key: value})
    {
        return Some((Calls::Parameters, "arguments"));
    }
    let start = written[..written.find(name)?].rfind('{')?;
    let mut values = serde_json::Deserializer::from_str(&written[start..]).into_iter::<Value>();
    let call = values.next()?.ok()?;
    let end = start + values.byte_offset();
    let wanted = |field: &&str| call == json!({"name": name, *field: {key: value}});
    let arguments = ["arguments", "parameters"].into_iter().find(wanted)?;
    // The last word before the call: a template may write an empty block of reasoning before that.
    let open = written[..start].split_whitespace().next_back().unwrap_or_default();
    let close = written[end..].trim();
    let is_tag =
        |tag: &str| !tag.contains(|c: char| c.is_whitespace() || ['{', '}'].contains(&c)) && !tag.ends_with('[');
    match (open, close) {
        ("" | PYTHON_TAG, "") => Some((Calls::Bare, arguments)),
        (open, close) if !open.is_empty() && !close.is_empty() && is_tag(open) && is_tag(close) => {
            Some((Calls::Tagged([open, close].map(String::from)), arguments))
        }
        _ => None,
    }
}
