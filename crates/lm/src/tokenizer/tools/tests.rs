use super::*;
use std::path::{Path, PathBuf};

/// Turns in the style of ChatML with calls in tags; each fault of other templates replaces a part of it.
const TAGGED: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}\
    {% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n[{{ m.content }}]<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ REASONING }}\
    {{ m.content }}{% for c in m.tool_calls %}{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n{\"name\": \"{{ c.function.name }}\", \
    \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// As Qwen3's template: an empty block of reasoning in the last turn alone.
const EMPTY_LAST: &str = "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}";

/// As Llama 3.1's: one call, which is the whole turn.
const BARE: &str = "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{\"name\": \"{{ m.tool_calls[0].function.name }}\", \"parameters\": \
    {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% endif %}";

fn tagged(reasoning: &str) -> String {
    TAGGED.replace("{{ REASONING }}", reasoning)
}

fn tokenizer(source: &str) -> Tokenizer {
    tokenizer_with(source, &[])
}

/// With further special tokens.
fn tokenizer_with(source: &str, special: &[&str]) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/gpt_neox");
    std::fs::copy(golden.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let special = [&["<|im_start|>"], special].concat();
    let config = json!({"eos_token": "<|im_end|>", "additional_special_tokens": special, "chat_template": source});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let mut tokenizer = Tokenizer::from_pretrained(dir.path()).unwrap();
    tokenizer.dir = PathBuf::from("model");
    tokenizer
}

fn template(source: &str) -> ToolTemplate {
    ToolTemplate::new(&tokenizer(source)).unwrap()
}

fn shown_ids(template: &ToolTemplate, ids: &[i64]) -> String {
    template.renderer.tokenizer.decode_verbatim(ids).unwrap()
}

fn read(template: &ToolTemplate, text: &str, tools: &[Value]) -> Turn {
    let ids = template.renderer.tokenizer.encode_verbatim(text).unwrap();
    template.read_turn(&ids, tools).unwrap()
}

fn weather() -> Value {
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
    let parameters = json!({"type": "object", "properties": properties});
    json!({"type": "function", "function": {"name": "weather", "parameters": parameters}})
}

#[test]
fn tools_a_suffix_begins_after_the_end_of_the_turn_and_ends_with_the_next_header() {
    for (source, wanted) in [
        (tagged(""), "\n<|im_start|>user\n[21]<|im_end|>\n<|im_start|>assistant\n"),
        (tagged(EMPTY_LAST), "\n<|im_start|>user\n[21]<|im_end|>\n<|im_start|>assistant\n"),
        (BARE.into(), "<|tool|>21<|im_end|><|assistant|>"),
    ] {
        let template = template(&source);
        let suffix = template.suffix(&[tool_result("weather", "21")]).unwrap();
        assert_eq!(shown_ids(&template, &suffix), wanted);
    }
    let template = template(&tagged(""));
    let two = template.suffix(&[tool_result("f", "1"), tool_result("g", "2")]).unwrap();
    assert_eq!(
        shown_ids(&template, &two),
        "\n<|im_start|>user\n[1]<|im_end|>\n<|im_start|>user\n[2]<|im_end|>\n<|im_start|>assistant\n"
    );
    let next = template.suffix(&[crate::tokenizer::user_message("And now?")]).unwrap();
    assert_eq!(shown_ids(&template, &next), "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n");
    assert!(template.suffix(&[]).unwrap_err().to_string().contains("at least one message"));
}

#[test]
fn tools_a_prompt_with_history_goes_on_as_the_turns_were_sampled() {
    let template = template(&tagged(EMPTY_LAST));
    assert!(template.writes_turns_apart());
    let mut called = calling("weather", &json!({"city": "Bern"}));
    let user = crate::tokenizer::user_message("Weather?");
    let result = tool_result("weather", "21");
    let prompt = template.prompt_text(&[user.clone(), called.clone(), result.clone()], &[]).unwrap();
    let turn = "<think>\n\n</think>\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call><|im_end|>";
    let start = "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n";
    let suffix = "\n<|im_start|>user\n[21]<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(prompt, format!("{start}{turn}{suffix}"));
    // The ids are those of the first prompt, the turn and the suffix.
    let ids = template.prompt(std::slice::from_ref(&user), &[]).unwrap();
    let sampled = template.renderer.tokenizer.encode_verbatim(turn).unwrap();
    let joined = [ids, sampled, template.suffix(std::slice::from_ref(&result)).unwrap()].concat();
    assert_eq!(joined, template.prompt(&[user.clone(), called.clone(), result.clone()], &[]).unwrap());
    // Reasoning stays.
    called["reasoning_content"] = "so".into();
    let prompt = template.prompt_text(&[user.clone(), called, result], &[weather()]).unwrap();
    assert!(
        prompt.starts_with("<|im_start|>system\n{\"type\"") && prompt.contains("<think>\nso\n</think>"),
        "{prompt}"
    );
    // A beginning of a turn is continued.
    let begun = [user, json!({"role": "assistant", "content": "It is"})];
    let ids = template.continued_prompt(&begun, &[]).unwrap();
    assert_eq!(shown_ids(&template, &ids), format!("{start}<think>\n\n</think>\n\nIt is"));
    let rest = template.renderer.tokenizer.encode_verbatim(" warm.<|im_end|>").unwrap();
    let message = template.read_continued(&ids, &rest, &[]).unwrap().message;
    assert_eq!(message, json!({"role": "assistant", "content": "It is warm."}));
}

#[test]
fn tools_turns_are_read_with_their_reasoning_text_and_calls() {
    let template = template(&tagged(""));
    let call = |days: Value| json!({"type": "function", "function": {"name": "weather", "arguments": {"city": "7", "days": days}}});
    let json = |days: &str| {
        format!(
            "<tool_call>\n{{\"name\": \"weather\", \"arguments\": {{\"city\": \"7\", \"days\": {days}}}}}\n</tool_call>"
        )
    };
    let tools = [weather()];
    // Arguments that are texts are cast by the schema; several calls; reasoning and text beside them.
    let text = format!("<think>\nwhy\n</think>\n\nI look.\n{}\n{}<|im_end|>", json("\"2\""), json("3"));
    let turn = read(&template, &text, &tools);
    let wanted = json!({"role": "assistant", "reasoning_content": "why", "content": "I look.", "tool_calls": [call(2.into()), call(3.into())]});
    assert_eq!((turn.message, turn.malformed), (wanted, None));
    assert_eq!(turn.calls[0].arguments, *json!({"city": "7", "days": 2}).as_object().unwrap());
    assert_eq!(read(&template, &json("\"2\""), &[]).calls[0].arguments["days"], "2");
    // The closing tag is cut off.
    let part = json("2");
    let cut = read(&template, part.trim_end_matches("l>"), &tools);
    assert!(cut.calls.is_empty() && cut.malformed.is_some());
    let cut = read(&template, json("2").trim_end_matches("\n</tool_call>"), &tools);
    assert_eq!(cut.calls.len(), 1);
    // No arguments.
    let bare = read(&template, "<tool_call>{\"name\": \"now\"}</tool_call>", &[]);
    assert_eq!(bare.message["tool_calls"][0]["function"], json!({"name": "now", "arguments": {}}));
    // Text alone, and reasoning that is cut off.
    assert_eq!(read(&template, " Hi. <|im_end|>", &[]).message, json!({"role": "assistant", "content": "Hi."}));
    assert_eq!(
        read(&template, "<think>why", &[]).message,
        json!({"role": "assistant", "reasoning_content": "why", "content": ""})
    );
}

#[test]
fn tools_a_turn_with_a_call_that_cannot_be_read_is_plain_text_with_the_fault() {
    let template = template(&tagged(""));
    for (text, wanted) in [
        (
            "<tool_call>{\"name\": \"f\"}</tool_call><tool_call>{\"name\": </tool_call><|im_end|>",
            "expected JSON, found",
        ),
        ("<tool_call>[1]</tool_call>", "expected a JSON object, found \"[1]\""),
        ("<tool_call>{\"arguments\": {}}</tool_call>", "expected a text as its `name`"),
        ("<tool_call>{\"name\": \"f\"}<|im_end|>", "expected JSON"),
    ] {
        let turn = read(&template, text, &[]);
        assert_eq!(turn.message, json!({"role": "assistant", "content": text.replace("<|im_end|>", "")}));
        let fault = turn.malformed.unwrap();
        assert!(turn.calls.is_empty() && fault.contains(wanted) && fault.lines().count() == 1, "{text}: {fault}");
    }
    // A call that is one, and fails.
    let turn = read(&template, "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>", &[]);
    assert_eq!(turn.calls[0].fault.as_deref(), Some("tool f: expected an object as `arguments`, found \"[1]\""));
}

#[test]
fn tools_a_call_without_tags_is_the_rest_of_the_turn() {
    let template = template(BARE);
    let call = "{\"name\": \"weather\", \"parameters\": {\"days\": \"2\"}}";
    for text in [
        format!("{call}<|im_end|>"),
        format!("<|python_tag|>{call}<|im_end|>"),
        call.into(),
        call[..call.len() - 1].into(),
    ] {
        let turn = read(&template, &text, &[weather()]);
        let function = json!({"name": "weather", "arguments": {"days": 2}});
        let wanted =
            json!({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]});
        assert_eq!(turn.message, wanted, "{text}");
    }
    let turn =
        read(&template, "{\"name\": \"a\", \"parameters\": {}}; {\"name\": \"b\", \"parameters\": {}}<|im_end|>", &[]);
    assert!(turn.malformed.is_some() && turn.calls.is_empty());
}

#[test]
fn tools_arguments_are_cast_as_in_transformers() {
    let cast = |schema: Value, argument: Value| {
        let tools = [json!({"name": "f", "parameters": {"properties": {"x": schema}}})];
        let mut arguments = Map::from_iter([("x".to_string(), argument)]);
        cast::Schemas::new(&tools).cast("f", &mut arguments);
        arguments["x"].clone()
    };
    let schema = |name: &str| json!({"type": name});
    // Computed by `parse_response` of transformers 5.23.
    for (schema, text, value) in [
        (schema("integer"), "7", json!(7)),
        (schema("integer"), " 3.0 ", json!(3)),
        (schema("integer"), "3.5", json!("3.5")),
        (schema("integer"), "1_000", json!(1000)),
        (schema("integer"), "1__0", json!("1__0")),
        (schema("number"), "7", json!(7)),
        (schema("number"), "7.0", json!(7.0)),
        (schema("number"), "1e3", json!(1000)),
        (schema("number"), "nan", json!("nan")),
        (schema("boolean"), "True", json!(true)),
        (schema("boolean"), "0", json!(false)),
        (schema("boolean"), "yes", json!("yes")),
        (schema("null"), "None", json!(null)),
        (schema("object"), "{\"a\": 1}", json!({"a": 1})),
        (schema("array"), "{\"a\": 1}", json!("{\"a\": 1}")),
        (schema("string"), "7", json!("7")),
        (json!({"type": ["string", "integer"]}), "7", json!(7)),
        (json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}), "null", json!(null)),
        (json!({"type": "integer", "nullable": true}), "None", json!(null)),
        (json!({}), "7", json!("7")),
    ] {
        assert_eq!(cast(schema.clone(), text.into()), value, "{schema} {text}");
    }
    assert_eq!(cast(schema("integer"), json!(["1", "a", 2])), json!([1, "a", 2]));
    assert_eq!(cast(schema("string"), json!(7)), json!(7));
}

#[test]
fn tools_templates_that_cannot_hold_a_conversation_with_tools_are_refused_in_one_line() {
    let refused = |source: &str| ToolTemplate::new(&tokenizer(source)).unwrap_err().to_string();
    let plain = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let without_results = TAGGED.replace("[{{ m.content }}]", "");
    let xml = TAGGED.replace("{\"name\"", "<function={{ c.function.name }}>{\"name\"");
    let rewritten = tagged("{% if m.role == 'assistant' %}{% if loop.last %}a{% else %}b{% endif %}{% endif %}");
    let raises = TAGGED.replace("[{{ m.content }}]", "{{ raise_exception('no tools here') }}");
    for (source, wanted) in [
        (plain, "expected a chat template that writes the assistant's tool calls, found one that leaves them out"),
        (&without_results, "expected a chat template that writes the results of tools, found one that leaves them out"),
        (&xml, "a form that is not read"),
        (&rewritten, "found one that writes it otherwise"),
        (&raises, "no tools here"),
    ] {
        let error = refused(&source.replace("{{ REASONING }}", ""));
        assert!(
            error.contains(wanted) && error.contains("tokenizer_config.json") && error.lines().count() == 1,
            "{error}"
        );
    }
}

/// As Qwen3-Coder's and Qwen3.5's.
fn parameters() -> String {
    let mut source = tagged("");
    let start = source.find("{\"name\"").unwrap();
    let call = start..start + source[start..].find("\n</tool_call>").unwrap();
    let written = "<function={{ c.function.name }}>\n{% for name, value in c.function.arguments | items %}<parameter={{ name }}>\n{{ value }}\n\
                   </parameter>\n{% endfor %}</function>";
    source.replace_range(call, written);
    source
}

#[test]
fn tools_calls_may_have_their_parameters_in_tags() {
    let template = template(&parameters());
    let call = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>";
    let turn = read(&template, &format!("I look.\n{call}\n{}<|im_end|>", call.replace("Bern", "75001")), &[weather()]);
    assert_eq!((&turn.message["content"], turn.malformed), (&json!("I look."), None));
    let arguments = turn.calls.iter().map(|call| Value::from(call.arguments.clone())).collect::<Vec<_>>();
    assert_eq!(arguments, [json!({"city": "Bern", "days": 2}), json!({"city": "75001", "days": 2})]);
    // A parameter or a call that is cut off, and what is no call.
    let cut = read(&template, &call[..call.rfind("</parameter>").unwrap()], &[weather()]);
    assert_eq!(Value::from(cut.calls[0].arguments.clone()), json!({"city": "Bern"}));
    for text in
        ["<tool_call>{\"name\": \"weather\"}</tool_call>", "<tool_call><function=>", "<function=weather></function>"]
    {
        assert!(read(&template, text, &[]).calls.is_empty(), "{text}");
    }
    let user = [crate::tokenizer::user_message("Weather?")];
    let (ids, shown) = template.calling_prompt(&user, &[weather()], Some("weather")).unwrap();
    assert!(shown_ids(&template, &ids).ends_with("assistant\n<tool_call>\n<function=weather>"));
    let mut turn = template.turn(template.beginning(&ids).unwrap(), shown, &[]);
    assert_eq!(turn.push("\n<parameter=city>\nBern\n</parameter>\n</function>"), "");
    assert_eq!(Value::from(turn.finish(None).unwrap().1.calls[0].arguments.clone()), json!({"city": "Bern"}));
}

#[test]
fn tools_of_a_turn_that_was_cut_only_the_last_call_may_be_text() {
    let in_tags = template(&parameters());
    let json = template(&tagged(""));
    let parameter = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n";
    let object = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}";
    let broken = &object[..object.len() - 1];
    let close = "</function>\n</tool_call>";
    // The text of the whole calls, their number, and the text of the one that is cut.
    for (template, whole, calls, cut) in [
        (&in_tags, String::new(), 0, format!("{parameter}<parameter=days>\n1")),
        (&in_tags, String::new(), 0, format!("{parameter}<parameter=days>\n1</function>")),
        (&in_tags, String::new(), 0, parameter.into()),
        (&in_tags, String::new(), 0, "<tool_call>\n<function=weather>".into()),
        (&in_tags, format!("{parameter}</function>"), 1, String::new()),
        (&in_tags, format!("{parameter}{close}"), 1, String::new()),
        (&in_tags, format!("{parameter}{close}\n"), 1, parameter.into()),
        (&json, object.into(), 1, String::new()),
        (&json, String::new(), 0, broken.into()),
        (&json, format!("{object}\n</tool_call>\n"), 1, broken.into()),
    ] {
        let mut turn = template.turn(String::new(), 0, &[]);
        let shown = turn.push(&format!("I look.\n{whole}{cut}"));
        let (rest, turn) = turn.finish(None).unwrap();
        assert_eq!((turn.calls.len(), turn.malformed), (calls, None), "{whole}{cut}");
        let content = if cut.is_empty() { "I look.".into() } else { format!("I look.\n{cut}") };
        // As in the stream.
        assert_eq!((shown + &rest, turn.message["content"].as_str()), (content.clone(), Some(&*content)));
    }
}

#[test]
fn tools_a_template_that_describes_calls_and_does_not_write_them_gets_them_as_text() {
    // As SmolLM3's, which has its tools under another name.
    let source = "{% if xml_tools %}<|im_start|>system\nUse <tool_call></tool_call>: {{ xml_tools | tojson }}<|im_end|>\n{% endif %}\
        {% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let template = template(source);
    let messages =
        [crate::tokenizer::user_message("Hi"), calling("now", &json!({"zone": 1})), tool_result("now", "12")];
    let text = template.prompt_text(&messages, &[weather()]).unwrap();
    assert!(text.contains("\"weather\""), "{text}");
    let call = "<|im_start|>assistant\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"zone\": 1}}\n</tool_call><|im_end|>\n<|im_start|>user\n12<|im_end|>";
    assert!(text.contains(call), "{text}");
    let suffix = template.suffix(&[tool_result("now", "12")]).unwrap();
    assert_eq!(shown_ids(&template, &suffix), "\n<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n");
}

#[test]
fn tools_have_the_template_of_that_name_and_a_turn_that_the_prompt_has_begun_is_read_from_there() {
    let mut named = tokenizer("");
    let think = tagged("").replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}");
    let list = json!({"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": think}]});
    named.templates = crate::tokenizer::templates::Templates::read(Path::new("model"), &list).unwrap();
    let template = ToolTemplate::new(&named).unwrap();
    let turn = read(&template, "why\n</think>\n\nHi.<|im_end|>", &[]);
    assert_eq!(turn.message, json!({"role": "assistant", "reasoning_content": "why", "content": "Hi."}));
}

#[test]
fn tools_a_template_is_shared_by_threads() {
    fn check<T: Clone + Send + Sync>() {}
    check::<ToolTemplate>();
}

/// Reads `text` in parts of `size` characters after a `beginning`; returns the text that is shown before its end and then, and the turn.
fn streamed(
    template: &ToolTemplate,
    beginning: &str,
    shown_bytes: usize,
    text: &str,
    size: usize,
) -> (String, String, Turn) {
    let tools = [weather()];
    let chars: Vec<char> = text.chars().collect();
    let mut turn = template.turn(beginning.into(), shown_bytes, &tools);
    let shown = chars.chunks(size).map(|part| turn.push(&part.iter().collect::<String>())).collect();
    let (rest, turn) = turn.finish(template.renderer.tokenizer.eos()).unwrap();
    (shown, rest, turn)
}

#[test]
fn tools_a_turn_shows_its_text_up_to_a_possible_call_as_it_is_sampled_and_its_calls_at_the_end() {
    let tagged = template(&tagged(""));
    let bare = template(BARE);
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"days\": \"2\"}}\n</tool_call>";
    let called = "{\"name\": \"weather\", \"parameters\": {\"days\": \"2\"}}";
    let broken = "<tool_call>{\"name\": </tool_call> or so";
    for (template, text, shown, rest, calls) in [
        (&tagged, "Warm, <b>I</b> think. ".into(), "Warm, <b>I</b> think.", " ", 0),
        (&tagged, format!("I look.\n\n{call}\n{call}"), "I look.", "", 2),
        (&tagged, format!("\n{call}"), "", "", 1),
        (&tagged, format!("One {call} two {call} three"), "One", "\ntwo\nthree", 2),
        (
            &tagged,
            format!("<think>\nIs {call} right?\n</think>\n\n{call}"),
            &format!("<think>\nIs {call} right?\n</think>"),
            "",
            1,
        ),
        (&tagged, format!("Or {broken}"), "Or", &format!(" {broken}"), 0),
        (&tagged, "a < b <tool".into(), "a < b", " <tool", 0),
        (&bare, "Use {} or {\"name\": 1}, a < b".into(), "Use {} or {\"name\": 1}, a < b", "", 0),
        (&bare, format!("So: {called}"), "So:", "", 1),
        (&bare, format!("<|python_tag|>{called}"), "", "", 1),
        (&bare, "{\"name\": \"a\", \"para".into(), "", "{\"name\": \"a\", \"para", 0),
    ] {
        for size in [1, 2, 3, 7, text.len()] {
            let (early, late, turn) = streamed(template, &template.form.opening, 0, &text, size);
            assert_eq!((&*early, &*late, turn.calls.len()), (shown, rest, calls), "{text:?} in parts of {size}");
            let ids = template.renderer.tokenizer.encode_verbatim(&format!("{text}<|im_end|>")).unwrap();
            assert_eq!(turn, template.read_turn(&ids, &[weather()]).unwrap(), "{text:?}");
        }
    }
}

#[test]
fn tools_a_turn_that_the_prompt_has_begun_shows_what_follows() {
    let template = template(&tagged(""));
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>";
    // A block of reasoning, in which nothing is a call; a text; a call.
    let (shown, rest, turn) = streamed(&template, "<think>\n", 0, &format!("{call}?\n</think>\n\n{call}"), 2);
    assert_eq!((shown, rest.as_str(), turn.calls.len()), (format!("{call}?\n</think>"), "", 1));
    let (shown, _, turn) = streamed(&template, "It is ", 0, "warm.", 2);
    assert_eq!((shown.as_str(), &turn.message["content"]), ("warm.", &json!("It is warm.")));
    let (shown, rest, turn) = streamed(&template, &call[..20], 0, &call[20..], 2);
    assert_eq!((shown + &rest, turn.calls.len()), (String::new(), 1));
    // The response may begin within a character of a prompt that is written otherwise.
    let (shown, rest, _) = streamed(&template, "It is é", 1, "!", 1);
    assert_eq!(shown + &rest, "é!");
    // A call that was begun for the model is a part of its text if it cannot be read.
    let (shown, rest, turn) = streamed(&template, &format!("Hi.{}", &call[..20]), 20, "or not", 2);
    assert_eq!((shown + &rest, turn.calls.len()), (format!("{}or not", &call[..20]), 0));
}

#[test]
fn tools_a_prompt_can_end_within_a_call_and_has_further_variables() {
    let user = [crate::tokenizer::user_message("Weather?")];
    let think = tagged("").replace(
        "<|im_start|>assistant\n{% endif %}",
        "<|im_start|>assistant\n{% if enable_thinking != false %}<think>\n{% endif %}{% endif %}",
    );
    for (source, variables, wanted) in [
        (tagged(""), json!({}), "assistant\n<tool_call>\n{\"name\": \"weather\", \"arguments\":"),
        (
            think.clone(),
            json!({}),
            "assistant\n<think>\n\n</think>\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\":",
        ),
        (think, json!({"enable_thinking": false}), "assistant\n<tool_call>\n{\"name\": \"weather\", \"arguments\":"),
        (BARE.into(), json!({}), "<|assistant|>{\"name\": \"weather\", \"parameters\":"),
    ] {
        let template = template(&source).with_variables(variables.as_object().unwrap());
        for name in [Some("weather"), None] {
            let (ids, shown) = template.calling_prompt(&user, &[weather()], name).unwrap();
            let text = shown_ids(&template, &ids);
            let wanted = if name.is_some() { wanted } else { wanted.rsplit_once("weather").unwrap().0 };
            assert!(text.ends_with(wanted), "{text:?}: {wanted:?}");
            let beginning = template.beginning(&ids).unwrap();
            let rest = if name.is_some() { " {}}" } else { "weather\", \"parameters\": {}, \"arguments\": {}}" };
            let rest = if name.is_none() && source == BARE { "weather\", \"parameters\": {}}" } else { rest };
            let mut turn = template.turn(beginning, shown, &[]);
            assert_eq!(turn.push(rest), "");
            let (rest, turn) = turn.finish(None).unwrap();
            assert_eq!((rest.as_str(), turn.calls[0].name.as_str()), ("", "weather"), "{:?}", turn.malformed);
        }
    }
    // A name is a text in JSON.
    let (ids, _) = template(&tagged("")).calling_prompt(&user, &[], Some("a\"b")).unwrap();
    assert!(shown_ids(&template(&tagged("")), &ids).ends_with("{\"name\": \"a\\\"b\", \"arguments\":"));
}

#[test]
fn tools_tags_that_are_special_tokens_are_text_of_a_turn_and_others_are_not() {
    let special = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|other|>"];
    let tokenizer = tokenizer_with(&tagged(""), &special);
    let template = ToolTemplate::new(&tokenizer).unwrap();
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>";
    let ids = tokenizer.encode_verbatim(&format!("<think>why</think>It<|other|> is é. {call}<|im_end|>")).unwrap();
    let prompt = template.prompt(&[crate::tokenizer::user_message("Weather?")], &[]).unwrap();
    let mut texts = template.text_stream(&prompt).unwrap();
    let mut turn = template.turn(template.beginning(&prompt).unwrap(), 0, &[]);
    let shown: String = ids.iter().map(|&id| turn.push(&texts.push(id).unwrap())).collect();
    let (rest, turn) = turn.finish(ids.last().copied()).unwrap();
    assert_eq!((shown.as_str(), rest.as_str(), turn.calls.len()), ("<think>why</think>It is é.", "", 1));
    // Without tools none of them is.
    let mut plain = tokenizer.stream(&prompt);
    let shown: String = ids.iter().map(|&id| plain.push(id).unwrap()).collect();
    assert!(shown.starts_with("whyIt is é. \n{"), "{shown}");
}
