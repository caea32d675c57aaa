//! The turns of a response with tools as views show them: texts, calls and results.

use rlhf_base::safe_text::beginning;
use rlhf_lm::tokenizer::{REASONING, json_text, message_text};
use serde_json::Value;
use std::borrow::Cow;

/// Characters and lines of a call or a result in a table, at most.
const MOST_CHARS: usize = 300;
const MOST_LINES: usize = 5;

/// Kind of a part of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Text of the policy before its answer.
    Reasoning,
    /// Text of the policy.
    Text,
    /// A call of the policy.
    Call,
    /// A result of a call, or another message that the policy did not write.
    Result,
}

/// A part of a turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Part<'a> {
    /// Kind of the part.
    pub kind: Kind,
    /// Name of the tool, for a result.
    pub name: &'a str,
    /// The text; for a call, `name(arguments)`.
    pub text: Cow<'a, str>,
}

/// Returns whether the policy wrote a message.
pub fn is_of_policy(message: &Value) -> bool {
    message["role"] == "assistant"
}

/// Returns the parts of a message, in the order in which templates write them.
pub fn parts(message: &Value) -> Vec<Part<'_>> {
    let said = match &message["content"] {
        Value::String(text) => Cow::Borrowed(text.as_str()),
        content => message_text(content).unwrap_or_default().into(),
    };
    if !is_of_policy(message) {
        let name = message["name"].as_str().or_else(|| message["role"].as_str()).unwrap_or_default();
        return vec![Part { kind: Kind::Result, name, text: said }];
    }
    let reasoning = REASONING.into_iter().find_map(|name| message[name].as_str()).unwrap_or_default();
    let texts =
        [(Kind::Reasoning, reasoning.into()), (Kind::Text, said)].into_iter().filter(|(_, text)| !text.is_empty());
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let calls = calls.map(|call| (Kind::Call, call_text(call).into()));
    texts.chain(calls).map(|(kind, text)| Part { kind, name: "", text }).collect()
}

/// Returns a call as `name(arguments)`.
fn call_text(call: &Value) -> String {
    let function = &call["function"];
    let arguments = match &function["arguments"] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        arguments => json_text(arguments),
    };
    format!("{}({arguments})", function["name"].as_str().unwrap_or_default())
}

/// Returns a part as the lines of a table, `-> name(arguments)` or `<- result`; calls and results are cut.
pub fn line(kind: Kind, text: &str) -> String {
    let sign = match kind {
        Kind::Reasoning => return format!("reasoning: {}", text.trim_end()).replace("\r\n", "\n"),
        Kind::Text => return text.trim_end().replace("\r\n", "\n"),
        Kind::Call => "->",
        Kind::Result => "<-",
    };
    let text = beginning(text.trim_end(), MOST_CHARS);
    let more = text.lines().nth(MOST_LINES).map(|_| "...");
    let lines: Vec<&str> = text.lines().take(MOST_LINES).chain(more).collect();
    format!("{sign} {}", lines.join("\n   "))
}

/// Returns the turns of a response as the lines of a table.
pub fn lines(messages: &[Value]) -> String {
    let lines: Vec<String> = messages.iter().flat_map(parts).map(|part| line(part.kind, &part.text)).collect();
    lines.join("\n")
}

/// Returns the numbers of calls and of failed calls in words: `2 calls, 1 failed`.
pub fn counts(calls: u64, failures: u64) -> String {
    let s = if calls == 1 { "" } else { "s" };
    if failures == 0 { format!("{calls} call{s}") } else { format!("{calls} call{s}, {failures} failed") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A call of `name`.
    fn call(name: &str, arguments: &Value) -> Value {
        json!({"type": "function", "function": {"name": name, "arguments": arguments}})
    }

    #[test]
    fn turns_are_lines_with_calls_and_results() {
        let calls = [call("multiply", &json!({"a": 2, "b": 3.0})), call("now", &Value::Null)];
        let messages = [
            json!({"role": "assistant", "content": "Let me see.\n", "reasoning_content": "a product", "tool_calls": calls}),
            json!({"role": "tool", "name": "multiply", "content": "6"}),
            json!({"role": "tool", "name": "now", "content": "one\r\ntwo\n"}),
            json!({"role": "assistant", "content": [{"type": "text", "text": "It is 6."}]}),
        ];
        assert_eq!(
            lines(&messages),
            "reasoning: a product\nLet me see.\n-> multiply({\"a\": 2, \"b\": 3.0})\n-> now()\n<- 6\n<- one\n   two\nIt is 6."
        );
    }

    #[test]
    fn a_long_result_is_cut_and_messages_of_any_shape_have_lines() {
        let result = json!({"role": "tool", "name": "f", "content": "é".repeat(10_000_000)});
        assert_eq!(lines(&[result]), format!("<- {}...", "é".repeat(MOST_CHARS)));
        let result = json!({"role": "tool", "name": "f", "content": "a\n".repeat(100)});
        assert_eq!(lines(&[result]), format!("<- {}...", "a\n   ".repeat(MOST_LINES)));
        let odd =
            [json!(1), json!({"role": "assistant", "tool_calls": [7, {"function": {"name": 3, "arguments": "x"}}]})];
        assert_eq!(lines(&odd), "<- \n-> ()\n-> (x)");
        assert_eq!(lines(&[json!({"role": "user", "content": "Go on."})]), "<- Go on.");
    }
}
