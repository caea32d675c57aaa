//! Tools of chat requests in the form of OpenAI's interface, and messages with calls and their results.

use super::error::{ApiError, wrong};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Most tools of a request, as in OpenAI's interface.
const MOST_TOOLS: usize = 128;

/// The tools that the model may call.
#[derive(Debug, PartialEq)]
pub(super) struct Tools {
    /// Their JSON schemas, at least one.
    pub(super) schemas: Vec<Value>,
    pub(super) choice: ToolChoice,
    /// Whether a turn may have several calls.
    pub(super) parallel: bool,
}

/// Whether the model has to call a tool.
#[derive(Debug, PartialEq)]
pub(super) enum ToolChoice {
    /// It may.
    Auto,
    /// It has to call one of them.
    Required,
    /// It has to call this one.
    Function(String),
}

impl Tools {
    /// Reads the parameters `tools`, `tool_choice` and `parallel_tool_calls`. Returns `None` without tools, or if the choice is `none`.
    ///
    /// # Errors
    /// If one of them is invalid, or not supported.
    pub(super) fn read(
        tools: Option<Value>,
        choice: Option<Value>,
        parallel: Option<Value>,
    ) -> Result<Option<Self>, ApiError> {
        let tools = match tools.unwrap_or_else(|| json!([])) {
            Value::Array(tools) if tools.len() <= MOST_TOOLS => tools,
            Value::Array(tools) => {
                let message = format!("`tools`: expected at most {MOST_TOOLS}, found {}", tools.len());
                return Err(ApiError::invalid("tools", message));
            }
            found => return Err(wrong("tools", "a list of tools", &found)),
        };
        let schemas: Vec<Value> =
            tools.into_iter().enumerate().map(|(at, tool)| schema(at, tool)).collect::<Result<_, _>>()?;
        let parallel = match parallel {
            None => true,
            Some(Value::Bool(parallel)) => parallel,
            Some(found) => return Err(wrong("parallel_tool_calls", "true or false", &found)),
        };
        let choice = choice.unwrap_or_else(|| "auto".into());
        let called = choice["function"]["name"].as_str().filter(|_| choice["type"] == "function");
        let wanted = match choice.as_str() {
            Some("none") => return Ok(None),
            Some("auto") => ToolChoice::Auto,
            Some("required") => ToolChoice::Required,
            _ => match called {
                Some(name) => ToolChoice::Function(name.into()),
                None => return Err(wrong("tool_choice", "`auto`, `none`, `required` or a function", &choice)),
            },
        };
        let is_there = |name: &str| schemas.iter().any(|schema| schema["function"]["name"] == name);
        match &wanted {
            ToolChoice::Auto if schemas.is_empty() => Ok(None),
            ToolChoice::Required if schemas.is_empty() => {
                Err(ApiError::invalid("tool_choice", "`tool_choice`: expected `auto` or `none` without `tools`"))
            }
            ToolChoice::Function(name) if !is_there(name) => {
                Err(wrong("tool_choice", "a function of `tools`", &choice))
            }
            _ => Ok(Some(Self { schemas, choice: wanted, parallel })),
        }
    }

    /// Checks that the response is a turn that can be read: a new message, or the rest of one.
    pub(super) fn check_end(&self, is_new: bool, is_continued: bool) -> Result<(), ApiError> {
        if !is_new && self.choice != ToolChoice::Auto {
            let message = "`tool_choice`: expected `auto` or `none`, as the response continues the last message";
            return Err(ApiError::invalid("tool_choice", message));
        }
        if !is_new && !is_continued {
            let message = "`add_generation_prompt`: expected true with `tools`, found false";
            return Err(ApiError::invalid("add_generation_prompt", message));
        }
        Ok(())
    }
}

/// Returns the schema of a tool in the form of templates and training: with parameters, without null fields, and without `strict`, which
/// asks for arguments that are forced to follow the schema.
fn schema(at: usize, mut tool: Value) -> Result<Value, ApiError> {
    let place = |field: &str| format!("tools[{at}]{field}");
    if tool["type"] != "function" {
        return Err(match tool.as_object() {
            Some(fields) => wrong(&place(".type"), "\"function\"", fields.get("type").unwrap_or(&Value::Null)),
            None => wrong(&place(""), "an object with `type` and `function`", &tool),
        });
    }
    let Some(function) = tool.get_mut("function").and_then(Value::as_object_mut) else {
        return Err(wrong(&place(".function"), "an object with a `name`", &tool["function"]));
    };
    function.retain(|name, value| !value.is_null() && name != "strict");
    let name = function.get("name").unwrap_or(&Value::Null);
    if name.as_str().is_none_or(str::is_empty) {
        return Err(wrong(&place(".function.name"), "a string that is not empty", name));
    }
    if let Some(found) = function.get("description").filter(|description| !description.is_string()) {
        return Err(wrong(&place(".function.description"), "a string", found));
    }
    match function.get("parameters") {
        Some(Value::Object(parameters)) if !parameters.is_empty() => {}
        None | Some(Value::Object(_)) => {
            function.insert("parameters".into(), json!({"type": "object", "properties": {}}));
        }
        Some(found) => return Err(wrong(&place(".function.parameters"), "a JSON schema, an object", found)),
    }
    Ok(tool)
}

/// A call that an earlier message has.
struct Call {
    /// Its number among all calls.
    number: usize,
    name: String,
}

/// Returns messages as templates with tools read them, if there are calls or results among them: arguments are objects, each result has the
/// name of its tool, and results are in the order of their calls.
///
/// # Errors
/// If arguments are not JSON, or a result has the id of no earlier call.
pub(super) fn with_parsed_calls(messages: &[Value]) -> Result<Option<Vec<Value>>, ApiError> {
    let message_calls = |message: &Value| message["tool_calls"].as_array().filter(|calls| !calls.is_empty()).cloned();
    if !messages.iter().any(|message| message["role"] == "tool" || message_calls(message).is_some()) {
        return Ok(None);
    }
    let mut known: HashMap<String, Call> = HashMap::new();
    let mut number = 0;
    let mut parsed: Vec<(Option<usize>, Value)> = Vec::with_capacity(messages.len());
    for (at, message) in messages.iter().enumerate() {
        let mut message = message.clone();
        let mut place = None;
        if let Some(calls) = message_calls(&message) {
            let mut written = Vec::with_capacity(calls.len());
            for (index, call) in calls.iter().enumerate() {
                let (id, name, call) = parsed_call(&format!("messages[{at}].tool_calls[{index}]"), call)?;
                if let Some(id) = id {
                    known.insert(id, Call { number, name });
                }
                number += 1;
                written.push(call);
            }
            message["tool_calls"] = written.into();
            if message["content"].is_null() {
                message["content"] = "".into();
            }
        } else if message["role"] == "tool" && !message["tool_call_id"].is_null() {
            let earlier = message["tool_call_id"].as_str().and_then(|id| known.get(id));
            let Some(call) = earlier else {
                let name = format!("messages[{at}].tool_call_id");
                return Err(wrong(&name, "the id of a call in an earlier message", &message["tool_call_id"]));
            };
            place = Some(call.number);
            if !message["name"].is_string() {
                message["name"] = call.name.as_str().into();
            }
        }
        parsed.push((place, message));
    }
    for results in parsed.chunk_by_mut(|(a, _), (b, _)| a.is_some() && b.is_some()) {
        results.sort_by_key(|(number, _)| *number);
    }
    Ok(Some(parsed.into_iter().map(|(_, message)| message).collect()))
}

/// Returns the id of a call, its name, and the call with its arguments parsed.
fn parsed_call(place: &str, call: &Value) -> Result<(Option<String>, String, Value), ApiError> {
    let function = if call["function"].is_object() { &call["function"] } else { call };
    let Some(name) = function["name"].as_str() else {
        return Err(wrong(&format!("{place}.function.name"), "a string", &function["name"]));
    };
    let arguments = match &function["arguments"] {
        Value::Null => json!({}),
        // A call without arguments has an empty text in a stream.
        Value::String(text) if text.trim().is_empty() => json!({}),
        Value::String(text) => serde_json::from_str(text)
            .map_err(|_| wrong(&format!("{place}.function.arguments"), "JSON", &function["arguments"]))?,
        arguments => arguments.clone(),
    };
    let id = match &call["id"] {
        Value::Null => None,
        Value::String(id) => Some(id.clone()),
        found => return Err(wrong(&format!("{place}.id"), "a string", found)),
    };
    let mut parsed = Map::new();
    parsed.extend(id.clone().map(|id| ("id".to_string(), id.into())));
    parsed.insert("type".into(), "function".into());
    parsed.insert("function".into(), json!({"name": name, "arguments": arguments}));
    Ok((id, name.into(), parsed.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}})
    }

    fn read(tools: Value, choice: Value, parallel: Value) -> Result<Option<Tools>, Value> {
        let some = |value: Value| Some(value).filter(|value| !value.is_null());
        Tools::read(some(tools), some(choice), some(parallel)).map_err(|error| error.to_json()["error"].clone())
    }

    #[test]
    fn tools_are_the_schemas_that_templates_get_in_training() {
        let more = json!({"type": "function", "function": {"name": "f", "description": null, "strict": true}});
        let tools = read(json!([more, tool("g")]), json!(null), json!(null)).unwrap().unwrap();
        assert_eq!(tools, Tools { schemas: vec![tool("f"), tool("g")], choice: ToolChoice::Auto, parallel: true });
        let properties = json!({"a": {"type": ["string", "null"], "default": null}});
        let schema = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}});
        assert_eq!(read(json!([schema]), json!("auto"), json!(false)).unwrap().unwrap().schemas, [schema]);
        let named = json!({"type": "function", "function": {"name": "g"}});
        let tools = read(json!([tool("f"), tool("g")]), named, json!(null)).unwrap().unwrap();
        assert_eq!(tools.choice, ToolChoice::Function("g".into()));
        assert_eq!(
            read(json!([tool("f")]), json!("required"), json!(null)).unwrap().unwrap().choice,
            ToolChoice::Required
        );
        for (tools, choice) in
            [(json!([]), json!("auto")), (json!(null), json!(null)), (json!([tool("f")]), json!("none"))]
        {
            assert_eq!(read(tools, choice, json!(true)).unwrap(), None);
        }
    }

    #[test]
    fn tools_that_are_none_are_named() {
        let many = vec![tool("f"); MOST_TOOLS + 1];
        let function = |function: Value| json!([{"type": "function", "function": function}]);
        for (tools, choice, param, words) in [
            (json!({}), json!(null), "tools", "a list of tools, found {}"),
            (many.into(), json!(null), "tools", "at most 128, found 129"),
            (json!(["f"]), json!(null), "tools[0]", "an object with `type` and `function`, found \"f\""),
            (json!([tool("f"), {"type": "custom"}]), json!(null), "tools[1].type", "\"function\", found \"custom\""),
            (json!([{"type": "function"}]), json!(null), "tools[0].function", "found null"),
            (function(json!({"name": ""})), json!(null), "tools[0].function.name", "found \"\""),
            (function(json!({"name": "f", "description": 1})), json!(null), "tools[0].function.description", "found 1"),
            (function(json!({"name": "f", "parameters": []})), json!(null), "tools[0].function.parameters", "found []"),
            (json!([tool("f")]), json!("any"), "tool_choice", "found \"any\""),
            (
                json!([tool("f")]),
                json!({"type": "function", "function": {"name": "g"}}),
                "tool_choice",
                "a function of `tools`",
            ),
            (json!(null), json!("required"), "tool_choice", "without `tools`"),
        ] {
            let error = read(tools, choice, json!(null)).unwrap_err();
            let message = error["message"].as_str().unwrap();
            assert!(error["param"] == param && message.contains(words) && message.lines().count() == 1, "{error}");
        }
        assert_eq!(read(json!([tool("f")]), json!(null), json!("no")).unwrap_err()["param"], "parallel_tool_calls");
    }

    fn call(id: &str, name: &str, arguments: &str) -> Value {
        json!({"id": id, "type": "function", "index": 0, "function": {"name": name, "arguments": arguments, "parsed_arguments": null}})
    }

    fn result(id: &str, content: &str) -> Value {
        json!({"role": "tool", "tool_call_id": id, "content": content})
    }

    #[test]
    fn messages_of_clients_become_those_that_templates_read() {
        let user = json!({"role": "user", "content": "a"});
        assert_eq!(with_parsed_calls(std::slice::from_ref(&user)).unwrap(), None);
        let calls = json!([call("x", "f", "{\"a\": 1}"), call("y", "g", "")]);
        let said = json!({"role": "assistant", "content": null, "tool_calls": calls});
        // Results in the order in which they were there, and an id that is used again.
        let again = json!({"role": "assistant", "content": "b", "tool_calls": [call("x", "h", "[2]")]});
        let messages = [user.clone(), said, result("y", "2"), result("x", "1"), again, result("x", "3")];
        let output = with_parsed_calls(&messages).unwrap().unwrap();
        let parsed = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let named = |id: &str, name: &str, content: &str| json!({"role": "tool", "tool_call_id": id, "content": content, "name": name});
        let calls = json!([parsed("x", "f", json!({"a": 1})), parsed("y", "g", json!({}))]);
        assert_eq!(
            output,
            [
                user,
                json!({"role": "assistant", "content": "", "tool_calls": calls}),
                named("x", "f", "1"),
                named("y", "g", "2"),
                json!({"role": "assistant", "content": "b", "tool_calls": [parsed("x", "h", json!([2]))]}),
                named("x", "h", "3"),
            ]
        );
        // As the rows of a dataset have them.
        let row = [
            json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}),
            json!({"role": "tool", "name": "f", "content": {"b": 2}}),
        ];
        let output = with_parsed_calls(&row).unwrap().unwrap();
        assert_eq!(
            output[0]["tool_calls"],
            json!([{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}])
        );
        assert_eq!(output[1], row[1]);
    }

    #[test]
    fn results_of_no_call_and_calls_that_are_none_are_named() {
        let said = |call: Value| json!({"role": "assistant", "content": null, "tool_calls": [call]});
        for (messages, param, words) in [
            (vec![said(call("x", "f", "{}")), result("z", "1")], "messages[1].tool_call_id", "found \"z\""),
            (vec![result("x", "1"), said(call("x", "f", "{}"))], "messages[0].tool_call_id", "an earlier message"),
            (
                vec![said(call("x", "f", "{"))],
                "messages[0].tool_calls[0].function.arguments",
                "expected JSON, found \"{\"",
            ),
            (vec![said(json!({"id": "x"}))], "messages[0].tool_calls[0].function.name", "found null"),
            (vec![said(json!({"id": 5, "function": {"name": "f"}}))], "messages[0].tool_calls[0].id", "found 5"),
            (vec![said(json!(5))], "messages[0].tool_calls[0].function.name", "found null"),
        ] {
            let error = with_parsed_calls(&messages).unwrap_err().to_json()["error"].clone();
            assert!(error["param"] == param && error["message"].as_str().unwrap().contains(words), "{error}");
        }
    }
}
