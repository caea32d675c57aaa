//! Tools in `rlhf serve`: the policy `tests/golden/tools_policy` calls `add` before it answers.

use super::{CHAT, Server, joined};
use crate::cli::Scratch;
use crate::support::{golden, read_json};
use rlhf::tokenizer::{Tokenizer, ToolTemplate};
use serde_json::{Value, json};

/// A folder with that policy.
fn scratch() -> Scratch {
    let scratch = crate::tools::scratch();
    std::fs::remove_dir_all(scratch.path("policy")).unwrap();
    std::fs::rename(scratch.path("caller"), scratch.path("policy")).unwrap();
    scratch
}

fn add() -> Value {
    read_json(&golden().join("trl_tools/schemas.json"))["add"].clone()
}

/// A request with the tool `add`, greedy.
fn request(messages: &Value, more: Value) -> Value {
    let mut body = json!({"messages": messages, "tools": [add()], "temperature": 0, "max_tokens": 60});
    let Value::Object(more) = more else { panic!("{more}") };
    body.as_object_mut().unwrap().extend(more);
    body
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// The name and the arguments of each call of a message.
fn calls(message: &Value) -> Vec<(String, Value)> {
    let call = |call: &Value| {
        assert!(call["type"] == "function" && call["id"].as_str().unwrap().starts_with("call_"), "{call}");
        let arguments = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        (call["function"]["name"].as_str().unwrap().to_string(), arguments)
    };
    message["tool_calls"].as_array().into_iter().flatten().map(call).collect()
}

fn called(a: i64, b: i64) -> Vec<(String, Value)> {
    vec![("add".into(), json!({"a": a, "b": b}))]
}

#[test]
fn a_conversation_goes_from_a_call_to_its_result_to_the_answer() {
    let scratch = scratch();
    let server = Server::start(&scratch);
    let first = server.completes(CHAT, request(&json!([user("3+4")]), json!({}))).json();
    let choice = &first["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
    assert_eq!(calls(&choice["message"]), called(3, 4));
    let id = &choice["message"]["tool_calls"][0]["id"];
    let result = json!({"role": "tool", "tool_call_id": id, "content": [{"type": "text", "text": "7"}]});
    let messages = json!([user("3+4"), choice["message"], result]);
    let second = server.completes(CHAT, request(&messages, json!({}))).json();
    let answer = json!({"role": "assistant", "content": "7", "refusal": null});
    assert_eq!((&second["choices"][0]["message"], &second["choices"][0]["finish_reason"]), (&answer, &json!("stop")));
    // The prompt is what was sampled with what training puts after it.
    let template = ToolTemplate::new(&Tokenizer::from_pretrained(&scratch.path("policy")).unwrap()).unwrap();
    let suffix = template.suffix(&[json!({"role": "tool", "name": "add", "content": "7"})]).unwrap().len() as u64;
    let tokens = first["usage"]["total_tokens"].as_u64().unwrap() + suffix;
    assert_eq!(second["usage"]["prompt_tokens"], tokens);
    // A message of the assistant is continued, also within a call.
    for begun in ["<tool_call>\n{\"name\": \"add\", \"arguments\":", "<tool_call>\n"] {
        let messages = json!([user("3+4"), {"role": "assistant", "content": begun}]);
        let found = server.completes(CHAT, request(&messages, json!({"continue_final_message": true}))).json();
        assert_eq!(calls(&found["choices"][0]["message"]), called(3, 4), "{begun}: {found}");
    }
}

#[test]
fn a_stream_has_the_calls_of_the_whole_and_no_content_before_them() {
    let scratch = scratch();
    let server = Server::start(&scratch);
    let body = request(&json!([user("5+2")]), json!({"n": 2, "logprobs": true}));
    let whole = server.completes(CHAT, body.clone()).json();
    let mut streamed = body;
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let chunks = server.completes(CHAT, streamed).chunks();
    let (usage, chunks) = chunks.split_last().unwrap();
    assert_eq!(usage["usage"], whole["usage"]);
    let mut ids = Vec::new();
    for index in [0, 1] {
        let choices = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
        let choices: Vec<&Value> = choices.collect();
        assert_eq!(choices[0]["delta"], json!({"role": "assistant", "content": null, "refusal": null}));
        let message = &whole["choices"][index]["message"];
        assert!(choices.iter().all(|choice| choice["delta"]["content"].is_null()) && message["content"].is_null());
        let deltas: Vec<&Value> = choices.iter().filter_map(|choice| choice["delta"].get("tool_calls")).collect();
        assert!(deltas.len() == 1 && deltas[0][0]["index"] == 0, "{deltas:?}");
        assert_eq!((calls(&json!({"tool_calls": deltas[0]})), calls(message)), (called(5, 2), called(5, 2)));
        assert_eq!(choices.last().unwrap()["finish_reason"], "tool_calls");
        let tokens = |choice: &Value| choice["logprobs"]["content"].as_array().map_or(0, Vec::len);
        let found: usize = choices.iter().map(|choice| tokens(choice)).sum();
        assert_eq!(found, tokens(&whole["choices"][index]));
        assert_eq!(2 * found as u64, whole["usage"]["completion_tokens"].as_u64().unwrap());
        ids.extend([&message["tool_calls"][0]["id"], &deltas[0][0]["id"]]);
    }
    ids.sort_by_key(ToString::to_string);
    ids.dedup();
    assert_eq!(ids.len(), 4, "{ids:?}");
}

#[test]
fn a_call_that_is_cut_or_broken_is_content_in_a_stream_too() {
    let scratch = scratch();
    let server = Server::start(&scratch);
    let drawn = (0..12).map(|seed| json!({"temperature": 1.4, "seed": seed}));
    let mut broken = 0;
    for more in std::iter::once(json!({"max_tokens": 12})).chain(drawn) {
        let mut body = request(&json!([user("3+4")]), more);
        let whole = server.completes(CHAT, body.clone()).json()["choices"][0].clone();
        body["stream"] = true.into();
        let chunks = server.completes(CHAT, body.clone()).chunks();
        let (text, finish) = joined(&chunks, 1).remove(0);
        let content = whole["message"]["content"].as_str().unwrap_or_default();
        // Parts of characters are shown in a stream before others make a character of them.
        let readable = |text: &str| text.replace(char::REPLACEMENT_CHARACTER, "");
        assert_eq!((readable(&text), &finish), (readable(content), &whole["finish_reason"]), "{body}");
        let has_calls = chunks.iter().any(|chunk| chunk["choices"][0]["delta"].get("tool_calls").is_some());
        assert_eq!(has_calls, whole["message"].get("tool_calls").is_some(), "{body}");
        broken += u8::from(!has_calls && content.contains("<tool_call>"));
    }
    assert!(broken > 1);
    let cut = server.completes(CHAT, request(&json!([user("3+4")]), json!({"max_tokens": 12}))).json();
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert!(cut["choices"][0]["message"]["content"].as_str().unwrap().starts_with("<tool_call>\n{\"name\""), "{cut}");
    // A call before a stop string, whose closing tag is not there.
    let more = json!({"stop": ["</tool_call>"]});
    let stopped = server.completes(CHAT, request(&json!([user("3+4")]), more)).json()["choices"][0].clone();
    assert_eq!((calls(&stopped["message"]), &stopped["finish_reason"]), (called(3, 4), &json!("tool_calls")));
}

#[test]
fn a_stream_without_text_and_calls_has_an_empty_content_which_can_be_sent_back() {
    let scratch = scratch();
    let server = Server::start(&scratch);
    let streamed = |more: Value| {
        let mut body = request(&json!([user("3+4")]), more);
        body["stream"] = true.into();
        server.completes(CHAT, body).chunks()
    };
    for more in [json!({"stop": "<tool_call>"}), json!({"stop": "<tool_call>", "logprobs": true})] {
        let chunks = streamed(more);
        let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
        let contents: Vec<&str> = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
        assert_eq!((contents.concat(), contents.is_empty()), (String::new(), false), "{deltas:?}");
    }
    let said = json!({"role": "assistant", "content": ""});
    server.completes(CHAT, request(&json!([user("3+4"), said, user("3+4")]), json!({"max_tokens": 1})));
}

#[test]
fn the_choice_of_tools_decides_where_the_prompt_ends_and_which_tools_it_has() {
    let scratch = scratch();
    let server = Server::start(&scratch);
    let messages = json!([user("3+4")]);
    let complete = |more: Value| server.completes(CHAT, request(&messages, more)).json();
    let prompt = |found: &Value| found["usage"]["prompt_tokens"].as_u64().unwrap();
    let auto = complete(json!({}));
    let mut last = prompt(&auto);
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "add"}})] {
        let found = complete(json!({"tool_choice": choice}));
        assert_eq!(calls(&found["choices"][0]["message"]), called(3, 4), "{found}");
        assert_eq!(found["usage"]["total_tokens"], auto["usage"]["total_tokens"]);
        assert!(prompt(&found) > std::mem::replace(&mut last, prompt(&found)));
        assert_eq!(found["choices"][0]["message"]["content"], Value::Null);
        // It is content if it cannot be read, with its beginning.
        let cut = complete(json!({"tool_choice": choice, "max_tokens": 3}));
        let content = cut["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(content.starts_with("<tool_call>\n{\"name\": \"add\", \""), "{content}");
    }
    let body = json!({"messages": messages, "temperature": 0, "max_tokens": 60});
    let without = server.completes(CHAT, body).json();
    assert_eq!(complete(json!({"tool_choice": "none"}))["choices"], without["choices"]);
    // Variables of the template, and calls of earlier messages without tools.
    let call = json!({"id": "x", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 3, \"b\": 4}"}});
    let told = json!([user("3+4"), {"role": "assistant", "content": null, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "x", "content": "7"}]);
    let found = server.completes(CHAT, json!({"messages": told, "max_tokens": 1})).json();
    let template = ToolTemplate::new(&Tokenizer::from_pretrained(&scratch.path("policy")).unwrap()).unwrap();
    let parsed = json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}]});
    let read = [user("3+4"), parsed, json!({"role": "tool", "content": "7"})];
    assert_eq!(prompt(&found), template.prompt(&read, &[]).unwrap().len() as u64);
}

#[test]
fn several_calls_of_a_turn_are_returned_unless_they_are_to_be_one() {
    let scratch = scratch();
    let server = Server::start(&scratch);
    // Two calls are begun for the model, which was not trained to make them.
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 3, \"b\": 4}}\n</tool_call>";
    let messages = json!([user("3+4"), {"role": "assistant", "content": format!("{call}\n{call}")}]);
    for (more, wanted) in
        [(json!({}), 2), (json!({"parallel_tool_calls": true}), 2), (json!({"parallel_tool_calls": false}), 1)]
    {
        let mut more = more;
        more["max_tokens"] = 1.into();
        let found = server.completes(CHAT, request(&messages, more.clone())).json();
        assert_eq!(calls(&found["choices"][0]["message"]), vec![called(3, 4); wanted].concat(), "{more}: {found}");
        let mut body = request(&messages, more);
        body["stream"] = true.into();
        let chunks = server.completes(CHAT, body).chunks();
        let deltas = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"].get("tool_calls"));
        let indices: Vec<u64> = deltas.map(|delta| delta[0]["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, (0..wanted as u64).collect::<Vec<_>>());
    }
}

#[test]
fn what_cannot_be_done_with_tools_is_one_line_that_names_the_parameter() {
    let scratch = scratch();
    let server = Server::start(&scratch);
    let call = json!({"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}});
    let said = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    let result = json!({"role": "tool", "tool_call_id": "y", "content": "7"});
    let begun = json!([user("a"), {"role": "assistant", "content": "b"}]);
    for (messages, more, param, words) in [
        (
            json!([user("a"), said, result]),
            json!({}),
            "messages[2].tool_call_id",
            "the id of a call in an earlier message",
        ),
        (json!([user("a"), said]), json!({}), "messages", "the results of the calls"),
        (json!([user("a")]), json!({"tools": [{"type": "web_search"}]}), "tools[0].type", "\"function\""),
        (
            json!([user("a")]),
            json!({"tool_choice": {"type": "allowed_tools"}}),
            "tool_choice",
            "`auto`, `none`, `required`",
        ),
        (begun.clone(), json!({"tool_choice": "required"}), "tool_choice", "continues the last message"),
        (
            begun,
            json!({"add_generation_prompt": false, "continue_final_message": false}),
            "add_generation_prompt",
            "true with `tools`",
        ),
        (json!([user("a")]), json!({"functions": [add()["function"]]}), "functions", "use `tools`"),
        (json!([user("a")]), json!({"function_call": {"name": "add"}}), "function_call", "use `tool_choice`"),
        (vec![user("a"); 2049].into(), json!({}), "messages", "at most 2048 with tools, found 2049"),
    ] {
        let mut body = request(&messages, more);
        body["model"] = "policy".into();
        let answer = server.post(CHAT, &body);
        let error = &answer.json()["error"];
        let message = error["message"].as_str().unwrap();
        assert_eq!((answer.status, &error["param"]), (400, &json!(param)), "{error}");
        assert!(message.contains(words) && message.lines().count() == 1, "{error}");
    }
    // A model whose template has no calls.
    scratch.write("policy/chat_template.jinja", super::TEMPLATE);
    let server = Server::start(&scratch);
    let mut body = request(&json!([user("a")]), json!({}));
    body["model"] = "policy".into();
    for _ in 0..2 {
        let answer = server.post(CHAT, &body);
        let message =
            "`tools`: expected a chat template that writes the assistant's tool calls, found one that leaves them out";
        assert_eq!((answer.status, answer.json()["error"]["message"].as_str()), (400, Some(message)));
    }
    body["tool_choice"] = "none".into();
    server.completes(CHAT, body);
}
