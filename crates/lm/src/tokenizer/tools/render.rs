//! Conversations with tools as text: by the template as it is, or turn by turn where it writes earlier turns otherwise.

use super::{DUMMY, SENTINELS, calling};
use crate::tokenizer::chat::{ChatTemplate, unused_mark};
use crate::tokenizer::messages::{REASONING, json_text, message_text};
use crate::tokenizer::{Tokenizer, user_message};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Variables that may hold a template's tools: the usual one, and SmolLM3's.
const TOOLS: [&str; 2] = ["tools", "xml_tools"];

/// Tags around a call's JSON in the text of a turn, for a template that only describes them to the model.
pub(super) const TAGS: [&str; 2] = ["<tool_call>", "</tool_call>"];

/// The end of a rendered conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The end of the last message.
    Closed,
    /// The header of the assistant's next turn.
    Prompt,
    /// The end of the last message's content.
    Continued,
}

/// A chat template, and how conversations with tools are written with it.
#[derive(Debug, Clone)]
pub(super) struct Renderer {
    pub(super) tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    /// Whether each turn of the assistant is written as if it were the last one.
    pub(super) by_turns: bool,
    /// Whether calls are written into the content, between [`TAGS`], as the template does not write them itself.
    pub(super) in_content: bool,
    /// The variable with the tools.
    tools: &'static str,
    /// Further variables of the template.
    pub(super) variables: Map<String, Value>,
}

impl Renderer {
    /// Takes the template of `tokenizer` for conversations with tools.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self> {
        let [usual, other] = TOOLS;
        let tool = tool_named(SENTINELS[0]);
        let template = tokenizer.chat_template(&Map::from_iter([(usual.to_string(), json!([tool]))]))?.clone();
        let tokenizer = Arc::new(tokenizer.clone());
        let variables = Map::new();
        let mut renderer = Self { tokenizer, template, by_turns: false, in_content: false, tools: usual, variables };
        let writes = |renderer: &Self| {
            let text = renderer.text(&[user_message(DUMMY)], std::slice::from_ref(&tool), End::Prompt);
            text.is_ok_and(|text| text.contains(SENTINELS[0]))
        };
        if !writes(&renderer) {
            renderer.tools = other;
            if !writes(&renderer) {
                renderer.tools = usual;
            }
        }
        Ok(renderer)
    }

    /// An error of the template's file.
    pub(super) fn invalid(&self, message: &str) -> Error {
        Error::invalid(self.template.file(), message)
    }

    /// Returns the text of a conversation.
    ///
    /// # Errors
    /// If the template rejects it.
    pub(super) fn text(&self, messages: &[Value], tools: &[Value], end: End) -> Result<String> {
        let written: Vec<Value>;
        let messages = if self.in_content {
            written = messages.iter().map(with_calls_as_text).collect();
            &written
        } else {
            messages
        };
        let first = messages.iter().position(is_assistants);
        match first.filter(|first| self.by_turns && *first > 0) {
            Some(first) => self.turn_by_turn(messages, first, tools, end),
            None => self.at_once(messages, tools, end),
        }
    }

    fn at_once(&self, messages: &[Value], tools: &[Value], end: End) -> Result<String> {
        let mut variables = self.variables.clone();
        if !tools.is_empty() {
            variables.insert(self.tools.into(), tools.into());
        }
        let variables = self.tokenizer.chat_variables(&variables);
        match end {
            End::Continued => self.template.render_continued(messages, variables),
            end => self.template.render(messages, end == End::Prompt, variables),
        }
    }

    /// Returns the text of a conversation in which the assistant speaks at `first` for the first time: its beginning, then each turn of the
    /// assistant as the template writes it last, and the messages between them.
    fn turn_by_turn(&self, messages: &[Value], first: usize, tools: &[Value], end: End) -> Result<String> {
        let mut text = self.at_once(&messages[..first], tools, End::Closed)?;
        let mut at = first;
        while at < messages.len() {
            let next = messages[at + 1..].iter().position(is_assistants).map_or(messages.len(), |next| at + 1 + next);
            let is_last = next == messages.len();
            let ends = if is_last { end } else { End::Closed };
            let turn_end = if is_last && next == at + 1 && end == End::Continued { end } else { End::Closed };
            text += &self.turn(&messages[at], turn_end)?;
            if next > at + 1 || ends == End::Prompt {
                text += &self.between(&messages[at], &messages[at + 1..next], ends)?;
            }
            at = next;
        }
        Ok(text)
    }

    /// The text of the assistant's turn `message` after a user's message.
    fn turn(&self, message: &Value, end: End) -> Result<String> {
        let user = user_message(DUMMY);
        let before = self.at_once(std::slice::from_ref(&user), &[], End::Closed)?;
        let all = self.at_once(&[user, message.clone()], &[], end)?;
        all.strip_prefix(&before).map(String::from).ok_or_else(|| self.not_apart())
    }

    /// The text of `messages` after the assistant's turn `said`.
    fn between(&self, said: &Value, messages: &[Value], end: End) -> Result<String> {
        let mark = unused_mark(&[std::slice::from_ref(said), messages].concat());
        let mut said = said.clone();
        if let Some(said) = said.as_object_mut() {
            said.retain(|name, _| !REASONING.contains(&name.as_str()));
            said.insert("content".into(), mark.as_str().into());
        }
        let start = [user_message(DUMMY), said];
        let before = self.at_once(&start, &[], End::Closed)?;
        let all = self.at_once(&[&start, messages].concat(), &[], end)?;
        let (before, all) = (before.rsplit_once(&mark), all.rsplit_once(&mark));
        let between = before.zip(all).and_then(|((_, before), (_, all))| all.strip_prefix(before));
        between.map(String::from).ok_or_else(|| self.not_apart())
    }

    fn not_apart(&self) -> Error {
        self.invalid("expected a chat template that writes turns one after the other, found one that mixes them")
    }
}

fn is_assistants(message: &Value) -> bool {
    message["role"] == "assistant"
}

/// The schema of a tool without parameters.
pub(super) fn tool_named(name: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {}});
    json!({"type": "function", "function": {"name": name, "description": DUMMY, "parameters": parameters}})
}

/// Returns `message` with its calls as text in the content, for a template that writes nothing else.
fn with_calls_as_text(message: &Value) -> Value {
    let Some(calls) = message["tool_calls"].as_array().filter(|calls| !calls.is_empty()) else {
        return message.clone();
    };
    let content = message_text(&message["content"]).unwrap_or_default();
    let calls = calls.iter().map(|call| {
        let function = if call["function"].is_object() { &call["function"] } else { call };
        let (name, arguments) = (json_text(&function["name"]), json_text(&function["arguments"]));
        let [open, close] = TAGS;
        format!("{open}\n{{\"name\": {name}, \"arguments\": {arguments}}}\n{close}")
    });
    let parts: Vec<String> = Some(content).into_iter().filter(|content| !content.is_empty()).chain(calls).collect();
    let mut message = message.clone();
    if let Some(fields) = message.as_object_mut() {
        fields.remove("tool_calls");
        fields.insert("content".into(), parts.join("\n").into());
    }
    message
}

/// The conversation with a call of the sentinels.
pub(super) fn sentinel_call() -> [Value; 2] {
    let [name, key, value, _] = SENTINELS;
    [user_message(DUMMY), calling(name, &json!({key: value}))]
}
