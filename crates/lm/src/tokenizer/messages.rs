//! Messages as chat templates read them: one form for the rows of datasets and for requests over HTTP.
//!
//! A message reaches the template as it is, as in transformers, except where that loses or breaks something: fields that are null (formats
//! with columns have them where another message has a field), but for a `content` that the template compares with none; empty lists of calls;
//! and parts, roles and names of fields that the template does not read, which become those that it reads.

use super::python::python_float;
use serde_json::{Map, Value, json};

/// Names of the field with a message's reasoning.
pub const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Roles of a tool's result, other than `tool`.
const RESULTS: [&str; 3] = ["observation", "tool_response", "function"];

/// A fault of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageFault {
    /// It is no object.
    NoObject,
    /// It has no string `role`.
    Role,
    /// Its `content` is no text.
    Content,
}

/// Checks a message, before any template reads it. Messages of a user, a system or a developer are a text or a list of text parts; those of
/// the assistant may have other fields instead, such as `tool_calls`; those of other roles, such as results of tools, may be anything.
///
/// # Errors
/// The part of it that is wrong.
pub fn check_message(message: &Value) -> Result<(), MessageFault> {
    let fields = message.as_object().ok_or(MessageFault::NoObject)?;
    let role = fields.get("role").and_then(Value::as_str).ok_or(MessageFault::Role)?;
    if !["user", "system", "developer", "assistant"].contains(&role) {
        return Ok(());
    }
    let is_other = |(name, value): (&String, &Value)| {
        let is_empty = value.is_null() || value.as_array().is_some_and(Vec::is_empty);
        !["role", "content", "name"].contains(&name.as_str()) && !is_empty
    };
    let is_right = match fields.get("content") {
        None | Some(Value::Null) => fields.iter().any(is_other),
        Some(content) => message_text(content).is_some(),
    };
    if is_right { Ok(()) } else { Err(MessageFault::Content) }
}

/// Returns a message that [`check_message`] accepts as the template with this `source` reads it.
pub(super) fn normalized(message: &Value, source: &str) -> Value {
    let Some(fields) = message.as_object() else { return message.clone() };
    let role = fields.get("role").and_then(Value::as_str).unwrap_or_default();
    let mut all = Map::new();
    for (name, value) in fields {
        let is_empty = value.is_null() || (name == "tool_calls" && value.as_array().is_some_and(Vec::is_empty));
        let value = match name.as_str() {
            "role" => role_for(role, source).into(),
            "content" if value.is_null() && !compares_with_none(source) => continue,
            "content" => content_for(value, role, source),
            _ if is_empty => continue,
            _ => without_nulls(value),
        };
        all.insert(name.clone(), value);
    }
    if let Some(call) =
        all.get("function_call").filter(|_| !reads(source, "function_call") && reads(source, "tool_calls"))
        && !all.contains_key("tool_calls")
    {
        let calls = json!([{"type": "function", "function": with_parsed_arguments(call)}]);
        all.insert("tool_calls".into(), calls);
    }
    // Under both names that templates read, in transformers' order.
    if let Some(reasoning) = REASONING.into_iter().find_map(|name| all.get(name)).cloned() {
        let mut aliased = Map::from_iter([("thinking".to_string(), reasoning.clone())]);
        aliased.extend(all);
        aliased.insert("reasoning_content".into(), reasoning);
        all = aliased;
    }
    all.into()
}

/// The text of a message's `content`: a string, or a list of text parts, which are joined.
pub fn message_text(content: &Value) -> Option<String> {
    let text = |part: &Value| part["text"].as_str().filter(|_| part["type"] == "text").map(String::from);
    match content {
        Value::String(text) => Some(text.clone()),
        content => content.as_array()?.iter().map(text).collect(),
    }
}

/// Returns a value in JSON as `json.dumps` of Python writes it, except that letters outside of ASCII stay. Unlike the filter `tojson`, it is called
/// outside of a rendering, whose budget it does not take from.
pub fn json_text(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(json_text).collect::<Vec<_>>().join(", ")),
        Value::Object(fields) => {
            let field =
                |(name, value): (&String, &Value)| format!("{}: {}", Value::from(name.as_str()), json_text(value));
            format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(", "))
        }
        Value::Number(number) if number.is_f64() => python_float(number.as_f64().unwrap_or_default()),
        other => other.to_string(),
    }
}

/// Returns `value` without the fields that are null.
pub fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(without_nulls).collect(),
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(_, value)| !value.is_null());
            fields.map(|(name, value)| (name.clone(), without_nulls(value))).collect::<Map<_, _>>().into()
        }
        other => other.clone(),
    }
}

/// Returns the role by which the template knows a result of a tool.
fn role_for<'r>(role: &'r str, source: &str) -> &'r str {
    let is_unknown = RESULTS.contains(&role) && !is_quoted(source, role);
    if is_unknown && is_quoted(source, "tool") { "tool" } else { role }
}

/// Returns a message's content as the template reads it: parts of text as one text, unless the template reads parts; another value, such as the
/// object that a tool returned, as JSON, unless the template tells objects from texts itself.
fn content_for(content: &Value, role: &str, source: &str) -> Value {
    let is_message = ["user", "system", "developer", "assistant"].contains(&role);
    match message_text(content) {
        _ if content.is_null() || content.is_string() => content.clone(),
        // As Llama 3.1's template, which writes whatever a tool returned as JSON.
        _ if !is_message && reads_values(source) => content.clone(),
        Some(_) if reads_parts(source) => without_nulls(content),
        Some(text) => text.into(),
        None => json_text(content).into(),
    }
}

/// Returns a call with its arguments as an object, where they are that object in JSON.
fn with_parsed_arguments(call: &Value) -> Value {
    let mut call = call.clone();
    let parsed = call["arguments"].as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
    if let Some(arguments) = parsed.filter(Value::is_object) {
        call["arguments"] = arguments;
    }
    call
}

/// Whether the template reads contents that are lists of parts, by their type or their text: as Gemma 3's, `item['type'] == 'text'`.
fn reads_parts(source: &str) -> bool {
    is_quoted(source, "text")
}

/// Whether the template asks if a content is an object or a list.
fn reads_values(source: &str) -> bool {
    tests_content(source, &["is mapping", "is iterable", "is sequence"])
}

/// Whether the template compares a content with none, as DeepSeek's does: a missing content is not none there, and the message's calls are not
/// written. transformers removes null from every message.
fn compares_with_none(source: &str) -> bool {
    tests_content(source, &["is none", "is not none", "== none", "!= none", "== None", "!= None"])
}

/// Whether one of these tests of a content is in the template.
fn tests_content(source: &str, tests: &[&str]) -> bool {
    tests.iter().any(|test| {
        let before = |at: usize| source[..at].trim_end().trim_end_matches(['\'', '"', ']']);
        source.match_indices(test).any(|(at, _)| before(at).ends_with("content"))
    })
}

/// Whether the template has the text `name` in quotes.
fn is_quoted(source: &str, name: &str) -> bool {
    [format!("'{name}'"), format!("\"{name}\"")].iter().any(|quoted| source.contains(quoted))
}

/// Whether the template reads the field `name` of something: after a point or in quotes.
fn reads(source: &str, name: &str) -> bool {
    source.match_indices(name).any(|(at, _)| {
        let is_field = source[..at].ends_with(['.', '\'', '"']);
        let next = source[at + name.len()..].chars().next();
        is_field && !next.is_some_and(|c| c.is_alphanumeric() || c == '_')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "callers write values in place")]
    fn is(source: &str, message: Value, wanted: Value) {
        check_message(&message).unwrap();
        assert_eq!(normalized(&message, source), wanted, "{source}");
    }

    #[test]
    fn nulls_are_removed_but_for_a_content_that_the_template_compares_with_none() {
        let call =
            json!([{"id": null, "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": null}}}]);
        let tidy = json!([{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]);
        let message = json!({"role": "assistant", "content": null, "name": null, "tool_calls": call});
        for source in ["{% if message['content'] is none %}", "{% if content is not none %}", "{{ m.content != None }}"]
        {
            is(source, message.clone(), json!({"role": "assistant", "content": null, "tool_calls": tidy}));
        }
        let source = "{{ message.content }}{{ message.tool_calls is none }}";
        is(source, message, json!({"role": "assistant", "tool_calls": tidy}));
        let said = json!({"role": "assistant", "content": "a"});
        for calls in [json!([]), json!(null)] {
            is("", json!({"role": "assistant", "content": "a", "tool_calls": calls}), said.clone());
        }
    }

    #[test]
    fn a_result_that_is_an_object_is_left_to_a_template_that_reads_it_and_is_json_for_others() {
        let result = json!({"role": "tool", "content": {"celsius": 21.5, "sky": null}});
        is("{% if message.content is mapping %}", result.clone(), result.clone());
        is("{% if message['content'] is mapping %}", result.clone(), result.clone());
        let text = json!({"role": "tool", "content": "{\"celsius\": 21.5, \"sky\": null}"});
        is("{% if message.content is string %}", result, text);
        is("", json!({"role": "tool", "content": 5}), json!({"role": "tool", "content": "5"}));
        let parts = json!({"role": "tool", "content": [{"type": "text", "text": "a"}]});
        is("", parts.clone(), json!({"role": "tool", "content": "a"}));
        is("{% if message.content is iterable %}", parts.clone(), parts.clone());
        let with_null = json!({"role": "tool", "content": [{"type": "text", "text": "a", "image": null}]});
        is("{% if part['type'] == 'text' %}", with_null, parts);
    }

    #[test]
    fn fields_and_roles_have_the_names_that_the_template_reads() {
        for name in REASONING {
            let found = normalized(&json!({"role": "assistant", "content": "a", name: "b"}), "");
            assert_eq!((&found["thinking"], &found["reasoning_content"]), (&json!("b"), &json!("b")), "{name}");
        }
        let seen = |role: &str| json!({"role": role, "content": "a"});
        for role in RESULTS {
            is("{% if m.role == 'tool' %}", seen(role), seen("tool"));
            is("{{ m.role }}", seen(role), seen(role));
            is(&format!("{{% if m.role == 'tool' or m.role == '{role}' %}}"), seen(role), seen(role));
        }
        let call = json!({"name": "f", "arguments": "{\"a\": 1}"});
        let found =
            normalized(&json!({"role": "assistant", "content": null, "function_call": call}), "{{ m.tool_calls }}");
        assert_eq!(
            found["tool_calls"],
            json!([{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}])
        );
    }

    #[test]
    fn a_message_without_text_is_one_only_if_it_has_something_else() {
        for (message, fault) in [
            (json!("a"), MessageFault::NoObject),
            (json!({"content": "a"}), MessageFault::Role),
            (json!({"role": "user"}), MessageFault::Content),
            (json!({"role": "user", "content": {"a": 1}}), MessageFault::Content),
            (json!({"role": "assistant", "content": null}), MessageFault::Content),
            (json!({"role": "assistant", "content": null, "tool_calls": []}), MessageFault::Content),
            (json!({"role": "user", "content": [{"type": "image", "url": "x"}]}), MessageFault::Content),
        ] {
            assert_eq!(check_message(&message), Err(fault), "{message}");
        }
        for message in [
            json!({"role": "assistant", "reasoning_content": "a"}),
            json!({"role": "tool", "content": null}),
            json!({"role": "user", "content": []}),
        ] {
            check_message(&message).unwrap();
        }
    }
}
