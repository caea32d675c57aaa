//! `rlhf chat` through a pipe: messages in, responses out.

mod tools;

use crate::cli::{Ran, Scratch, json_lines};
use crate::support::{PROGRAM, output};
use serde_json::json;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}\
                        {% if add_generation_prompt %}[assistant]{% endif %}";

/// Settings of both commands.
const FLAGS: &str = "--max_new_tokens 6 --temperature 0";

fn chat(scratch: &Scratch, line: &str, input: &str) -> Ran {
    piped(scratch.command(line), input)
}

fn piped(mut line: Command, input: &str) -> Ran {
    let mut child = line.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A chat that ends at an error reads no further.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    Ran::from(child.wait_with_output().unwrap())
}

/// The responses of `rlhf generate` to prompts, texts or lists of messages.
fn generated(scratch: &Scratch, model: &str, flags: &str, prompts: &[serde_json::Value]) -> Vec<String> {
    let rows: String = prompts.iter().map(|prompt| format!("{}\n", json!({"prompt": prompt}))).collect();
    scratch.write("rows.jsonl", &rows);
    let found = scratch.succeeds(&format!("generate --model {model} --dataset_name rows.jsonl {flags}"));
    json_lines(&found).iter().map(|row| row["completion"].as_str().unwrap().to_string()).collect()
}

fn readable(text: &str) -> String {
    text.replace(char::REPLACEMENT_CHARACTER, "")
}

#[test]
fn responses_are_those_of_generate_with_the_history_as_messages() {
    let scratch = Scratch::new();
    scratch.write("policy/chat_template.jinja", TEMPLATE);
    let system = json!({"role": "system", "content": "Be kind."});
    let user = |text: &str| json!({"role": "user", "content": text});
    let first = generated(&scratch, "policy", FLAGS, &[json!([user("Hi")])]).remove(0);
    let response = json!({"role": "assistant", "content": first});
    let second = generated(&scratch, "policy", FLAGS, &[json!([user("Hi"), response, user("ok")])]).remove(0);
    let with_system = generated(&scratch, "policy", FLAGS, &[json!([system, user("Hi")])]).remove(0);
    assert!(first != with_system && !first.contains('\n') && !second.contains('\n'), "{first:?} {with_system:?}");
    let input = "Hi\nok\n\n/reset\nHi\n/reset\n/system Be kind.\nHi\n/reset\n/system\nHi\n";
    let ran = chat(&scratch, &format!("chat policy {FLAGS}"), input);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    assert!(!ran.stdout.contains('\u{1b}'), "{:?}", ran.stdout);
    let wanted = [&first, &second, &first, &with_system, &first].map(|text| readable(text) + "\n");
    assert_eq!(readable(&ran.stdout), wanted.concat());
    let ran = chat(&scratch, &format!("chat policy {FLAGS}"), "Hi\n/quit\nok\n");
    assert_eq!((ran.code, readable(&ran.stdout)), (0, readable(&first) + "\n"));
    let mut line = scratch.command(&format!("chat policy {FLAGS}"));
    line.args(["--system", "Be kind."]).stdin(Stdio::null());
    assert!(output(&mut line).status.success());
}

#[test]
fn sampled_responses_are_those_of_generate_with_the_same_seed() {
    let scratch = Scratch::new();
    let flags = "--max_new_tokens 12 --seed 9 --temperature 0.9 --top_p 0.95";
    let expected = generated(&scratch, "policy", flags, &[json!("The movie")]).remove(0);
    let ran = chat(&scratch, &format!("chat policy {flags}"), "The movie\n");
    assert_eq!(readable(&ran.stdout), readable(&expected) + "\n");
    assert_eq!(ran.stderr, "note: policy has no chat template: it continues the text of the conversation\n");
    // The same message again has its own draws.
    let ran = chat(&scratch, &format!("chat policy {flags}"), "The movie\n/reset\nThe movie\n");
    assert_ne!(readable(&ran.stdout), (readable(&expected) + "\n").repeat(2));
}

#[test]
fn fields_of_a_generation_config_without_effect_are_named_once_before_the_conversation() {
    let scratch = Scratch::new();
    scratch.write(
        "policy/generation_config.json",
        r#"{"do_sample": true, "top_k": 5, "num_beams": 4, "typical_p": 0.5, "temperature": 0.7}"#,
    );
    let note = |names: &str| format!("note: policy/generation_config.json: fields without effect here: {names}");
    for (flags, names) in [("", "num_beams, typical_p"), ("--temperature 0", "num_beams")] {
        let ran = chat(&scratch, &format!("chat policy --max_new_tokens 2 {flags}"), "The movie\nThe movie\n");
        let lines: Vec<&str> = ran.stderr.lines().collect();
        assert_eq!((ran.code, lines.len(), lines[0]), (0, 2, &*note(names)), "{}", ran.stderr);
    }
}

#[test]
fn two_models_respond_one_after_the_other() {
    let scratch = Scratch::new();
    scratch.copy("other", "llama_tied");
    let response = |model: &str| readable(&generated(&scratch, model, FLAGS, &[json!("The movie")]).remove(0));
    let expected = format!("[policy] {}\n[other] {}\n", response("policy"), response("other"));
    let ran = chat(&scratch, &format!("chat policy --compare other {FLAGS}"), "The movie\n");
    assert_eq!((ran.code, readable(&ran.stdout)), (0, expected), "{}", ran.stderr);
    assert_eq!(ran.stderr.lines().count(), 2, "{}", ran.stderr);
}

#[test]
fn lines_that_are_typed_at_once_are_all_carried_out() {
    let scratch = Scratch::new();
    // `script` (util-linux) runs a command in a terminal of its own.
    let command = format!("{PROGRAM} chat policy {FLAGS}");
    let mut line = Command::new("script");
    line.args(["-qec", &command, "/dev/null"])
        .current_dir(scratch.path(""))
        .env("TERM", "xterm")
        .env_remove("NO_COLOR");
    let mut child = line.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut shown = Vec::new();
    while !String::from_utf8_lossy(&shown).contains("> ") {
        let mut byte = [0];
        assert_eq!(output.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&shown));
        shown.extend(byte);
    }
    input.write_all(b"/temperature 1\r/temperature 2\r/temperature 3\r/quit\r").unwrap();
    drop(input);
    output.read_to_end(&mut shown).unwrap();
    let shown = String::from_utf8_lossy(&shown);
    assert!(child.wait().unwrap().success(), "{shown}");
    for temperature in 1..=3 {
        assert!(shown.contains(&format!("mtemperature {temperature}")), "{temperature}: {shown:?}");
    }
}

#[test]
fn a_turn_that_cannot_be_done_is_one_error() {
    let scratch = Scratch::new();
    let line = format!("chat policy {FLAGS}");
    let long = "long ".repeat(100);
    for (input, code, words) in [
        ("/nothing\n", 2, "/nothing: expected a command"),
        ("/temperature warm\n", 2, "/temperature warm: expected a number"),
        ("/temperature -1\n", 2, "temperature = -1"),
        ("/system x\n", 2, "needs a model with a chat template"),
        (long.as_str(), 1, "is 64, response included: send a shorter one"),
    ] {
        let ran = chat(&scratch, &line, input);
        let error = ran.stderr.lines().last().unwrap();
        assert_eq!(
            (ran.code, ran.stdout.as_str(), ran.stderr.lines().count()),
            (code, "", 2),
            "{input}: {}",
            ran.stderr
        );
        assert!(error.starts_with("error: ") && error.contains(words), "{input}: {error}");
    }
    let ran = chat(&scratch, &line, &format!("Hi\n{long}\n"));
    assert!(ran.code == 1 && ran.stderr.contains("/reset starts a new one"), "{}", ran.stderr);
    scratch.refuses("chat policy --system kind", 2, &["system has no effect", "chat template"]);
    // What one of two models cannot take gets no response of the other.
    scratch.copy("other", "llama_tied");
    let mut config: serde_json::Value = serde_json::from_str(&scratch.read("other/config.json")).unwrap();
    config["max_position_embeddings"] = 4.into();
    scratch.write("other/config.json", &config.to_string());
    let ran = chat(&scratch, &format!("{line} --compare other"), "one two three four five\n");
    assert!(ran.code == 1 && ran.stdout.is_empty() && ran.stderr.contains("context of other is 4"), "{}", ran.stderr);
    scratch.refuses("chat nothing", 1, &["nothing"]);
    scratch.refuses("chat policy --temperature -1", 2, &["temperature = -1"]);
    let help = chat(&scratch, &line, "/help\n//x\n");
    assert!(
        help.code == 0 && help.stdout.starts_with("/reset ") && help.stdout.lines().count() >= 8,
        "{}",
        help.stdout
    );
}

#[test]
fn an_encoder_reads_the_conversation_as_one_text_though_there_is_a_chat_template() {
    let scratch = crate::encoder_decoder_training::scratch();
    let expected = readable(&generated(&scratch, "t5", FLAGS, &[json!("The movie")]).remove(0)) + "\n";
    let mut config = crate::support::read_json(&scratch.path("t5/tokenizer_config.json"));
    config["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}".into();
    scratch.write("t5/tokenizer_config.json", &config.to_string());
    let ran = chat(&scratch, &format!("chat t5 {FLAGS}"), "The movie\n");
    let note = "note: t5 reads the conversation as one text, without a chat template\n";
    assert_eq!((ran.code, ran.stderr.as_str(), readable(&ran.stdout)), (0, note, expected));
}
