//! Converts rows of other programs' datasets to the fields that are read here: LLaMA-Factory, ms-swift and axolotl.

use serde_json::{Map, Value, json};

/// The fields that may hold messages.
pub(super) const MESSAGES: [&str; 7] =
    ["prompt", "query", "completion", "chosen", "rejected", "messages", "conversations"];

/// Fields of a whole conversation.
const CONVERSATIONS: [&str; 2] = ["messages", "conversations"];

/// Roles of a message whose content is a call, or a list of calls, in JSON.
const CALLS: [&str; 2] = ["function_call", "tool_call"];

/// Converts the messages in `value`, if it is a list of them, from ShareGPT's form: `from` and `value` become `role` and `content`, and the
/// roles `human` and `gpt` become `user` and `assistant`. Anything else stays as it is.
///
/// The fields are renamed as in TRL's `maybe_convert_to_chatml`, which leaves the roles; chat templates know `user` and `assistant`.
pub(super) fn to_roles(value: &mut Value) {
    for fields in value.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        for (name, chat_name) in [("from", "role"), ("value", "content")] {
            if !fields.contains_key(chat_name)
                && let Some(value) = fields.remove(name)
            {
                let value = match (chat_name, value.as_str()) {
                    ("role", Some("human")) => "user".into(),
                    ("role", Some("gpt")) => "assistant".into(),
                    _ => value,
                };
                fields.insert(chat_name.into(), value);
            }
        }
    }
}

/// Converts a row to the fields that are read here.
pub(super) fn read(fields: &mut Map<String, Value>) {
    turns(fields);
    for name in MESSAGES {
        let Some(value) = fields.get_mut(name) else { continue };
        // A single message: LLaMA-Factory and axolotl have the two sides of a pair in this form.
        if ["role", "from"].iter().any(|role| value.get(role).is_some_and(Value::is_string)) {
            *value = Value::from(vec![value.take()]);
        }
        to_roles(value);
        calls(value);
    }
    swift_pair(fields);
    question(fields);
    system(fields);
}

/// Reads ms-swift's `conversation`, a list of objects with one text of the user and one of the assistant, as `conversations`.
fn turns(fields: &mut Map<String, Value>) {
    let said = |turn: &Value, names: [&str; 2]| names.iter().find_map(|name| turn[*name].as_str().map(String::from));
    let pair = |turn: &Value| {
        let user = said(turn, ["human", "user"])?;
        let assistant = said(turn, ["assistant", "gpt"])?;
        Some([json!({"role": "user", "content": user}), json!({"role": "assistant", "content": assistant})])
    };
    let listed = fields.get("conversation").and_then(Value::as_array).filter(|turns| !turns.is_empty());
    let read: Option<Vec<_>> = listed.and_then(|turns| turns.iter().map(pair).collect());
    if let Some(read) = read.filter(|_| !CONVERSATIONS.iter().any(|name| is_set(fields, name))) {
        fields.insert("conversations".into(), read.concat().into());
    }
}

/// Returns the messages before a question that is a text: the row's `system` text, and the pairs of texts in its `history`.
pub(super) fn before_question(row: &Value) -> Vec<Value> {
    let text = |value: &Value| value.as_str().filter(|text| !text.trim().is_empty()).map(String::from);
    let mut messages: Vec<Value> =
        text(&row["system"]).into_iter().map(|text| json!({"role": "system", "content": text})).collect();
    for turn in row["history"].as_array().into_iter().flatten() {
        if let (Some(asked), Some(said)) = (text(&turn[0]), text(&turn[1])) {
            messages.extend([json!({"role": "user", "content": asked}), json!({"role": "assistant", "content": said})]);
        }
    }
    messages
}

/// Returns the end of the error about a row in a format that is not read as it is, with the command that converts it; `None` for any other
/// row.
pub(super) fn hint(row: &Value) -> Option<String> {
    let is_list = |name: &str| row[name].as_array().is_some_and(|list| !list.is_empty());
    let line = |format: &str, fields: &str| {
        format!(
            "; this is {format}: jq -c 'if type == \"array\" then .[] else . end | . + {{{fields}}}' FILE > rows.jsonl"
        )
    };
    if is_list("completions") && is_list("labels") {
        return Some(
            "; this is TRL's format of supervised steps, for models that score steps, which are not trained here"
                .into(),
        );
    }
    if is_list("segments") && row["segments"][0].get("label").is_some() {
        let fields = "text: (.segments | map(.text) | join(\"\"))";
        return Some(line("axolotl's format of segments, whose labels are not read: all are learned by", fields));
    }
    let (question, answer) = match (row["instruction"].is_string(), row["query"].is_string()) {
        (true, _) => ("([.instruction, .input] | map(select(. != null and . != \"\")) | join(\"\\n\"))", "output"),
        (_, true) => (".query", "response"),
        _ => return None,
    };
    if row[answer].as_array().is_some_and(|sides| sides.len() == 2 && sides.iter().all(Value::is_string)) {
        let fields = format!("prompt: {question}, chosen: .{answer}[0], rejected: .{answer}[1]");
        return Some(line("an old format of pairs of LLaMA-Factory", &fields));
    }
    let has_rejected = row["rejected_response"].is_string();
    if !row[answer].is_string() || (!is_list("history") && !has_rejected) {
        return None;
    }
    let message = |role: &str, content: &str| format!("{{role: \"{role}\", content: {content}}}");
    let pairs = format!("((.history // []) | map({}, {}))", message("user", ".[0]"), message("assistant", ".[1]"));
    let system = format!("(if (.system // \"\") == \"\" then [] else [{}] end)", message("system", ".system"));
    let last = format!("[{}, {}]", message("user", question), message("assistant", &format!(".{answer}")));
    Some(line("a conversation in several columns", &format!("messages: ({system} + {pairs} + {last})")))
}

/// Converts messages of the role `function_call` to OpenAI's form: calls in a message of the assistant. Consecutive calls are put into one
/// message.
fn calls(value: &mut Value) {
    let Some(messages) = value.as_array_mut() else { return };
    let is_call = |message: &Value| message["role"].as_str().is_some_and(|role| CALLS.contains(&role));
    if !messages.iter().any(is_call) {
        return;
    }
    let mut read: Vec<Value> = Vec::new();
    let mut follows_calls = false;
    for mut message in std::mem::take(messages) {
        let parsed = is_call(&message).then(|| parse_calls(&message["content"]));
        match parsed {
            Some(Some(calls)) if follows_calls => {
                if let Some(Value::Array(known)) = read.last_mut().and_then(|last| last.get_mut("tool_calls")) {
                    known.extend(calls);
                }
                continue;
            }
            Some(Some(calls)) => {
                message["content"] = "".into();
                message["tool_calls"] = calls.into();
                follows_calls = true;
            }
            _ => follows_calls = false,
        }
        if is_call(&message) {
            message["role"] = "assistant".into();
        }
        read.push(message);
    }
    *messages = read;
}

/// Returns the calls in a content: an object with a `name` or a list of such objects, as a JSON text or as values.
fn parse_calls(content: &Value) -> Option<Vec<Value>> {
    let parsed = match content {
        Value::String(text) => serde_json::from_str(text).ok()?,
        other => other.clone(),
    };
    let list = match parsed {
        Value::Array(list) => list,
        one => vec![one],
    };
    let call = |mut call: Value| {
        call.get("name").filter(|name| name.is_string())?;
        let arguments = call["arguments"].as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
        if let Some(arguments) = arguments.filter(Value::is_object) {
            call["arguments"] = arguments;
        }
        Some(json!({"type": "function", "function": call}))
    };
    list.into_iter().map(call).collect::<Option<Vec<_>>>().filter(|calls| !calls.is_empty())
}

/// Returns the name of the field with the conversation of a row.
fn conversation(fields: &Map<String, Value>) -> Option<&'static str> {
    CONVERSATIONS.into_iter().find(|name| fields.get(*name).is_some_and(|value| ends_with(value, None)))
}

/// Whether `value` is a list of messages whose last one has the `role`, or any role if none is given.
fn ends_with(value: &Value, role: Option<&str>) -> bool {
    let last = value.as_array().and_then(|list| list.last()).and_then(|message| message["role"].as_str());
    last.is_some_and(|last_role| role.is_none_or(|role| role == last_role))
}

fn is_set(fields: &Map<String, Value>, name: &str) -> bool {
    fields.get(name).is_some_and(|value| !value.is_null())
}

/// Reads ms-swift's pair: a conversation whose last message is the chosen one, with `rejected_response` or `rejected_messages`.
fn swift_pair(fields: &mut Map<String, Value>) {
    let Some(name) = conversation(fields) else { return };
    if ["prompt", "chosen", "rejected"].iter().any(|name| is_set(fields, name)) {
        return;
    }
    if let Some(mut rejected) = fields.get("rejected_messages").filter(|other| ends_with(other, None)).cloned() {
        to_roles(&mut rejected);
        let chosen = fields.remove(name).unwrap_or_default();
        fields.extend([("chosen".to_string(), chosen), ("rejected".to_string(), rejected)]);
        return;
    }
    let rejected = fields.get("rejected_response").and_then(Value::as_str).map(String::from);
    if let Some(rejected) = rejected
        && fields.get(name).is_some_and(|messages| ends_with(messages, Some("assistant")))
        && let Some(Value::Array(mut prompt)) = fields.remove(name)
    {
        let chosen = prompt.pop().unwrap_or_default();
        let rejected = json!([{"role": "assistant", "content": rejected}]);
        fields.extend([
            ("prompt".to_string(), prompt.into()),
            ("chosen".to_string(), json!([chosen])),
            ("rejected".to_string(), rejected),
        ]);
    }
}

/// Reads a conversation that ends with a question as a prompt, if the row has separate responses to it.
fn question(fields: &mut Map<String, Value>) {
    let Some(name) = conversation(fields).filter(|_| !is_set(fields, "prompt")) else { return };
    let responds =
        |side: &str| fields.get(side).and_then(|side| side[0]["role"].as_str()).is_some_and(|role| role == "assistant");
    let asks = !ends_with(&fields[name], Some("assistant"));
    if asks && (responds("completion") || (responds("chosen") && responds("rejected"))) {
        let prompt = fields.remove(name).unwrap_or_default();
        fields.insert("prompt".into(), prompt);
    }
}

/// Puts the text in `system` before the messages of the row, if the messages have no system message.
fn system(fields: &mut Map<String, Value>) {
    let Some(text) = fields.get("system").and_then(Value::as_str).filter(|text| !text.trim().is_empty()) else {
        return;
    };
    let message = json!({"role": "system", "content": text});
    let asks = !is_set(fields, "prompt");
    let begins = |value: &Value| {
        value[0]["role"]
            .as_str()
            .is_some_and(|role| !["system", "developer"].contains(&role) && (asks || role != "assistant"))
    };
    let whole: &[&str] = if fields.get("prompt").is_some_and(Value::is_array) {
        &["prompt"]
    } else {
        &["messages", "conversations", "chosen", "rejected", "query"]
    };
    for name in whole {
        if let Some(Value::Array(messages)) = fields.get_mut(*name).filter(|value| begins(value)) {
            messages.insert(0, message.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "callers write values in place")]
    fn reads(row: Value, wanted: Value) {
        let Value::Object(mut fields) = row else { panic!() };
        read(&mut fields);
        assert_eq!(Value::Object(fields), wanted);
    }

    fn user(text: &str) -> Value {
        json!({"role": "user", "content": text})
    }

    fn said(text: &str) -> Value {
        json!({"role": "assistant", "content": text})
    }

    #[test]
    fn a_conversation_beside_two_messages_is_the_prompt_of_a_pair() {
        let from = |name: &str, text: &str| json!({"from": name, "value": text});
        reads(
            json!({"conversations": [from("human", "a")], "chosen": from("gpt", "b"), "rejected": from("gpt", "c")}),
            json!({"prompt": [user("a")], "chosen": [said("b")], "rejected": [said("c")]}),
        );
        reads(
            json!({"messages": [user("a")], "chosen": said("b"), "rejected": [said("c")], "n": 1}),
            json!({"prompt": [user("a")], "chosen": [said("b")], "rejected": [said("c")], "n": 1}),
        );
        // Whole conversations, as in UltraFeedback, stay.
        let whole = json!({"messages": [user("a"), said("b")], "chosen": [user("a"), said("b")], "rejected": [user("a"), said("c")]});
        reads(whole.clone(), whole);
    }

    #[test]
    fn a_rejected_response_beside_a_conversation_makes_a_pair() {
        let pair = |more: Value| {
            let mut row = json!({"prompt": [user("a")], "chosen": [said("b")], "rejected": [said("c")]});
            row.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            row
        };
        let row = json!({"messages": [user("a"), said("b")], "rejected_response": "c"});
        reads(row, pair(json!({"rejected_response": "c"})));
        let other = json!([user("a"), said("c")]);
        reads(
            json!({"messages": [user("a"), said("b")], "rejected_messages": other}),
            json!({"chosen": [user("a"), said("b")], "rejected": other, "rejected_messages": other}),
        );
    }

    #[test]
    fn a_system_text_is_the_first_message_unless_there_is_one() {
        let system = json!({"role": "system", "content": "s"});
        for name in ["messages", "conversations", "prompt"] {
            reads(json!({"system": "s", name: [user("a")]}), json!({"system": "s", name: [system, user("a")]}));
            let whole = json!({"system": "x", name: [system, user("a")]});
            reads(whole.clone(), whole);
        }
        reads(json!({"system": " ", "messages": [user("a")]}), json!({"system": " ", "messages": [user("a")]}));
        reads(json!({"system": "s", "prompt": "a"}), json!({"system": "s", "prompt": "a"}));
        reads(
            json!({"system": "s", "prompt": [user("a")], "chosen": [said("b")]}),
            json!({"system": "s", "prompt": [system, user("a")], "chosen": [said("b")]}),
        );
    }

    #[test]
    fn turns_of_two_texts_are_messages() {
        let turns = json!([{"human": "a", "assistant": "b"}, {"user": "c", "assistant": "d"}]);
        let whole = json!([{"role": "system", "content": "s"}, user("a"), said("b"), user("c"), said("d")]);
        reads(
            json!({"conversation": turns, "system": "s"}),
            json!({"conversation": turns, "system": "s", "conversations": whole}),
        );
        let other = json!({"conversation": [{"human": "a"}]});
        reads(other.clone(), other);
    }

    #[test]
    fn what_is_before_a_question_is_the_system_text_and_the_history() {
        let row = json!({"query": "c", "system": "s", "history": [["a", "b"]]});
        assert_eq!(before_question(&row), [json!({"role": "system", "content": "s"}), user("a"), said("b")]);
        assert!(before_question(&json!({"query": "c", "system": " ", "history": []})).is_empty());
    }

    #[test]
    fn formats_that_are_not_read_are_named_with_the_line_that_converts_them() {
        let found = |row: Value| hint(&row).unwrap_or_default();
        assert!(found(json!({"prompt": "p", "completions": ["a"], "labels": [true]})).contains("supervised steps"));
        let segments = found(json!({"segments": [{"label": true, "text": "a"}]}));
        assert!(segments.contains("labels are not read") && segments.contains(".segments"), "{segments}");
        let pair = found(json!({"instruction": "i", "input": "", "output": ["a", "b"]}));
        assert!(pair.contains("chosen: .output[0], rejected: .output[1]"), "{pair}");
        let alpaca =
            found(json!({"instruction": "i", "input": "x", "output": "o", "system": "s", "history": [["a", "b"]]}));
        assert!(
            ["messages: (", ".system", ".history", ".instruction, .input", ".output"]
                .iter()
                .all(|part| alpaca.contains(part)),
            "{alpaca}"
        );
        let swift = found(json!({"query": "q", "response": "r", "rejected_response": "n"}));
        assert!(swift.contains(".query") && swift.contains(".response"), "{swift}");
        assert!(hint(&json!({"instruction": "i", "output": "o", "history": []})).is_none());
        assert!(hint(&json!({"instruction": "i", "chosen_response": "c", "rejected_response": "r"})).is_none());
    }

    #[test]
    fn turns_of_calls_are_calls_of_the_assistant() {
        let call = |name: &str| json!({"type": "function", "function": {"name": name, "arguments": {"a": 1}}});
        let text = |name: &str| json!({"name": name, "arguments": {"a": 1}}).to_string();
        let calls = |calls: Value| json!({"role": "assistant", "content": "", "tool_calls": calls});
        let seen = json!({"role": "observation", "content": "2"});
        reads(
            json!({"conversations": [
                {"from": "human", "value": "a"}, {"from": "function_call", "value": text("f")}, {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "b"},
            ]}),
            json!({"conversations": [user("a"), calls(json!([call("f")])), seen, said("b")]}),
        );
        reads(
            json!({"messages": [
                user("a"), {"role": "tool_call", "content": text("f")}, {"role": "tool_call", "content": text("g")}, seen,
                {"role": "tool_call", "content": json!([{"name": "h", "arguments": "{\"a\": 1}"}]).to_string()},
            ]}),
            json!({"messages": [user("a"), calls(json!([call("f"), call("g")])), seen, calls(json!([call("h")]))]}),
        );
        // A call that is not JSON is a text of the assistant.
        reads(json!({"messages": [{"role": "function_call", "content": "f(1)"}]}), json!({"messages": [said("f(1)")]}));
    }
}
