//! Parts of messages that a chat template leaves out.

use rlhf_base::safe_text::beginning;
use rlhf_lm::tokenizer::{REASONING, message_text};
use serde_json::Value;

/// Parts of the messages that are to be learned, and how many of them a rendered text lacks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LeftOut {
    /// Number of parts: contents, their reasoning, names of calls.
    parts: usize,
    missing: usize,
    /// The first part that is missing, for messages.
    first: String,
}

impl LeftOut {
    /// Looks for all parts of `messages` in `text`. A part that occurs in several messages has to be in the text as often.
    pub(super) fn find(messages: &[Value], text: &str) -> Self {
        let all: Vec<(usize, String)> =
            (1..).zip(messages).flat_map(|(at, m)| parts(m).into_iter().map(move |p| (at, p))).collect();
        let mut left_out = Self { parts: all.len(), ..Self::default() };
        for (place, (at, part)) in all.iter().enumerate() {
            let wanted = 1 + all[..place].iter().filter(|(_, other)| other == part).count();
            if has(text, part, wanted) {
                continue;
            }
            left_out.missing += 1;
            if left_out.first.is_empty() {
                let role = messages[at - 1]["role"].as_str().unwrap_or_default();
                left_out.first = format!("{:?} of message {at} ({role})", beginning(part, 40));
            }
        }
        left_out
    }

    pub(super) fn is_some(&self) -> bool {
        self.missing > 0
    }

    /// Whether nothing of the messages is in the text.
    pub(super) fn is_all(&self) -> bool {
        self.is_some() && self.missing == self.parts
    }

    /// The first part that is missing, with its message.
    pub(super) fn first(&self) -> &str {
        &self.first
    }
}

/// Returns the texts of a message that a template writes without a change, but for spaces around them.
fn parts(message: &Value) -> Vec<String> {
    let content = message_text(&message["content"]).unwrap_or_default();
    let said = content.split("</think>").flat_map(|part| part.split("<think>"));
    let thought = REASONING.iter().find_map(|name| message[name].as_str()).into_iter();
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let names = calls.filter_map(|call| call["function"]["name"].as_str().or(call["name"].as_str()));
    said.chain(thought).chain(names).map(str::trim).filter(|part| !part.is_empty()).map(String::from).collect()
}

/// Whether `part` is at least `wanted` times in `text`, as it is or in JSON.
fn has(text: &str, part: &str, wanted: usize) -> bool {
    let is_in = |part: &str| text.matches(part).take(wanted).count() == wanted;
    is_in(part) || {
        let json = Value::from(part).to_string();
        is_in(&json[1..json.len() - 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn parts_that_are_not_in_the_text_are_counted_with_the_first_one() {
        let said = |text: &str| json!({"role": "assistant", "content": text});
        let messages = [said("<think>\nwhy\n</think>\n\nyes"), said("yes"), said(" ")];
        let found = LeftOut::find(&messages, "<a>yes<a>yes");
        assert!(found.is_some() && !found.is_all());
        assert_eq!((found.parts, found.missing, found.first()), (3, 1, "\"why\" of message 1 (assistant)"));
        assert!(!LeftOut::find(&messages, "<think> why </think> yes, yes").is_some());
        // One of two equal contents.
        assert_eq!(LeftOut::find(&messages, "why yes").first(), "\"yes\" of message 2 (assistant)");
        assert!(LeftOut::find(&messages[..2], "").is_all());
        assert!(!LeftOut::find(&[said("")], "").is_some());
        assert!(!LeftOut::find(&[said("a\n\"b\"")], "[\"a\\n\\\"b\\\"\"]").is_some());
        let call =
            json!({"role": "assistant", "reasoning_content": "so", "tool_calls": [{"function": {"name": "look"}}]});
        assert_eq!(LeftOut::find(std::slice::from_ref(&call), "look").first(), "\"so\" of message 1 (assistant)");
        assert!(!LeftOut::find(&[call], "so look").is_some());
    }
}
