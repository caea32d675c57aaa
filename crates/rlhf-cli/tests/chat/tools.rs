//! Tools and environments in `rlhf chat`: the policy `tests/golden/tools_policy` calls `add` before it answers.

use super::chat;
use crate::cli::Ran;
use crate::support::{PROGRAM, golden};
use crate::tools::scratch;
use rustix::process::{Pid, Signal, kill_process};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CHAT: &str = "chat caller --temperature 0 --max_new_tokens 60";

/// A program whose episodes end with the first call.
const ONCE: &str = r#"
import json, sys

schema = json.loads(sys.argv[1])
for line in sys.stdin:
    asked = json.loads(line)
    if "open" in asked:
        reply = {"prompt": asked["row"].get("prompt"), "tools": [schema]}
    elif "close" in asked:
        reply = {"reward": 0.5}
    else:
        reply = {"results": [{"content": "done"}], "done": True}
    print(json.dumps({"id": asked["id"], **reply}), flush=True)
"#;

#[track_caller]
fn is(ran: &Ran, stdout: &str) {
    assert_eq!((ran.code, ran.stdout.as_str()), (0, stdout), "{}", ran.stderr);
}

#[test]
fn a_message_is_answered_after_calls_that_are_shown_with_their_results() {
    let scratch = scratch();
    let tools = format!("{CHAT} --tools helpers.add");
    let ran = chat(&scratch, &tools, "3+4\n\n/reset\n5+2\n");
    is(&ran, "-> add({\"a\": 3, \"b\": 4})\n<- 7\n7\n-> add({\"a\": 5, \"b\": 2})\n<- 7\n7\n");
    assert_eq!(ran.stderr, "");
    is(
        &chat(&scratch, &format!("{tools} --compare caller"), "3+4\n"),
        &"[caller] -> add({\"a\": 3, \"b\": 4})\n<- 7\n7\n".repeat(2),
    );
    let cut = chat(&scratch, &format!("{tools} --tool_output_limit 1 --max_tool_calling_iterations 1"), "9+9\n");
    assert!(
        cut.stdout.starts_with("-> add({\"a\": 9, \"b\": 9})\n<- 1\n[... 1 more bytes were cut]\n"),
        "{}",
        cut.stdout
    );
    // The second turn is a call that cannot be read, of which the model learns.
    let drawn = |how: &str| {
        let line = format!("chat caller --tools helpers.add --malformed_calls {how} --temperature 1.3 --seed 4");
        chat(&scratch, &line, "3+4\n").stdout
    };
    let (text, error) = (drawn("text"), drawn("error"));
    assert!(!text.contains("<- ") && text.starts_with("<tool_call>"), "{text}");
    let lines: Vec<&str> = error.lines().collect();
    assert!(
        error.starts_with(&text) && lines.iter().any(|line| line.starts_with("<- {'error': 'a tool call: ")),
        "{error}"
    );
}

#[test]
fn an_environment_says_its_prompt_and_gives_its_reward_at_the_end_of_each_conversation() {
    let scratch = scratch();
    let line = format!("{CHAT} --environment_factory helpers.Sum --environment_row");
    let ran = chat(&scratch, &format!("{line} {{\"answer\":\"7\"}}"), "3+4\n/reset\n5+4\n/reset\n");
    is(&ran, "-> add({\"a\": 3, \"b\": 4})\n<- 7\n7\nreward: 1\n-> add({\"a\": 5, \"b\": 4})\n<- 9\n9\nreward: 0\n");
    assert_eq!(ran.stderr, "added 3 4\nadded 5 4\n");
    scratch.write("once.py", ONCE);
    let schemas: serde_json::Value = crate::support::read_json(&golden().join("trl_tools/schemas.json"));
    let program = format!("command:python3 once.py '{}'", schemas["add"]);
    let once = |input: &str, row: &str| {
        let mut line = scratch.command(CHAT);
        line.args(["--environment_factory", &program, "--environment_row", row]);
        super::piped(line, input)
    };
    // An empty line sends the text of the environment alone; the episode has one turn.
    let ran = once("\n", r#"{"prompt": "3+4"}"#);
    is(&ran, "3+4\n-> add({\"a\": 3, \"b\": 4})\n<- done\nreward: 0.5\n");
    let ran = once("3+\n", r#"{"prompt": "4"}"#);
    is(&ran, "4\n-> add({\"a\": 3, \"b\": 4})\n<- done\nreward: 0.5\n");
    let ran = once("3+4\nAnd now?\n", "{}");
    assert_eq!((ran.code, ran.stdout.as_str()), (1, "-> add({\"a\": 3, \"b\": 4})\n<- done\nreward: 0.5\n"));
    assert!(ran.stderr.contains("the episode has ended: /reset starts a new conversation"), "{}", ran.stderr);
    // A conversation without a message has no reward.
    is(&once("/reset\n", "{}"), "");
}

#[test]
fn what_a_conversation_cannot_have_is_one_error() {
    let scratch = scratch();
    scratch.copy("plain", "gpt_neox");
    let with = |words: &str| format!("chat caller {words}");
    for (words, code, expected) in [
        ("--tools nowhere.add", 1, &["no module `nowhere`"][..]),
        ("--tools add", 2, &["tools = add: expected the module and the name of a function"]),
        ("--tools helpers.add --max_environments 3", 2, &["unexpected argument '--max_environments'"]),
        (
            "--tools helpers.add --environment_failure_reward 0",
            2,
            &["unexpected argument '--environment_failure_reward'"],
        ),
        ("--environment_row {}", 2, &["environment_row has no effect without `environment_factory`"]),
        (
            "--environment_factory helpers.Sum --environment_row 3",
            2,
            &["environment_row: expected JSON", "found one value"],
        ),
        ("--max_tool_calling_iterations 3", 2, &["max_tool_calling_iterations = 3 has no effect"]),
    ] {
        scratch.refuses(&with(words), code, expected);
    }
    let ran = chat(&scratch, "chat caller --environment_factory helpers.Sum", "");
    let error = ran.stderr.lines().last().unwrap();
    assert!(
        ran.code == 1 && error.starts_with("error: the conversation of caller: ") && error.contains("'answer'"),
        "{error}"
    );
    let ran = chat(&scratch, "chat plain --tools helpers.add", "");
    assert!(ran.code == 1 && ran.stderr.contains("a list of messages needs a chat template"), "{}", ran.stderr);
    let ran = chat(&scratch, &format!("{CHAT} --tools helpers.dies"), "3+4\n");
    assert_eq!((ran.code, ran.stdout.as_str()), (1, "-> add({\"a\": 3, \"b\": 4})\n"));
    assert!(
        ran.stderr.contains("the conversation of caller: ") && ran.stderr.contains("exit status: 3"),
        "{}",
        ran.stderr
    );
    // The context is full after a call.
    scratch.edit_config("caller", "max_position_embeddings", 160);
    let ran = chat(&scratch, &format!("{CHAT} --tools helpers.add"), "3+4\n");
    assert!(
        ran.code == 1 && ran.stderr.contains("the context of caller is 160: /reset starts a new one"),
        "{}",
        ran.stderr
    );
    assert_eq!(ran.stdout, "-> add({\"a\": 3, \"b\": 4})\n<- 7\n");
}

#[test]
fn a_model_that_cannot_go_on_leaves_the_other_ones_response_and_reward() {
    let scratch = scratch();
    std::fs::create_dir(scratch.path("small")).unwrap();
    for file in std::fs::read_dir(scratch.path("caller")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), scratch.path("small").join(file.file_name())).unwrap();
    }
    // Its context is full after a call.
    scratch.edit_config("small", "max_position_embeddings", 160);
    let both = "chat small --compare caller --temperature 0 --max_new_tokens 60";
    let sum = "--environment_factory helpers.Sum --environment_row {\"answer\":\"7\"}";
    let ran = chat(&scratch, &format!("{both} {sum}"), "3+4\n");
    let call = "-> add({\"a\": 3, \"b\": 4})\n";
    assert_eq!((ran.code, ran.stdout), (1, format!("[small] {call}<- 7\n[caller] {call}<- 7\n7\n")));
    assert!(ran.stderr.contains("the context of small is 160: /reset starts a new one"), "{}", ran.stderr);
    // The program of the tools ends with the first call.
    let ran = chat(&scratch, &format!("{CHAT} --compare caller --tools helpers.dies"), "3+4\n");
    assert_eq!((ran.code, ran.stdout), (1, format!("[caller] {call}").repeat(2)));
    assert_eq!(ran.stderr.matches("error: ").count(), 1, "{}", ran.stderr);
}

#[test]
fn the_programs_of_tools_end_with_a_chat_that_a_signal_ends() {
    let scratch = scratch();
    let sleeps =
        "import os, time\n        open(\"pid\", \"w\").write(f\"{os.getpid()}\\n\"); time.sleep(60)\n        reply";
    scratch.write("sleeps.py", &ONCE.replace("reply = {\"results\"", &format!("{sleeps} = {{\"results\"")));
    let schemas: serde_json::Value = crate::support::read_json(&golden().join("trl_tools/schemas.json"));
    let mut line = scratch.command(CHAT);
    line.args(["--environment_factory", &format!("command:python3 sleeps.py '{}'", schemas["add"])]);
    let mut child = line.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"3+4\n").unwrap();
    let wait = |seconds: u64, is_so: &dyn Fn() -> bool| {
        let until = Instant::now() + Duration::from_secs(seconds);
        while !is_so() {
            assert!(Instant::now() < until, "it takes longer than {seconds} s");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let pid = || std::fs::read_to_string(scratch.path("pid")).unwrap_or_default();
    wait(60, &|| pid().ends_with('\n'));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    // It may be left as a zombie where nobody collects it.
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", pid().trim())).unwrap_or_default();
    wait(5, &|| stat().is_empty() || stat().contains(") Z"));
}

#[test]
fn a_terminal_shows_the_beginning_of_long_results_and_says_when_an_episode_has_ended() {
    let scratch = scratch();
    scratch.write("once.py", &ONCE.replace("\"content\": \"done\"", "\"content\": \"a\\x1b[2J\" * 900"));
    std::fs::copy(golden().join("trl_tools/schemas.json"), scratch.path("schemas.json")).unwrap();
    let program = "command:python3 once.py \"$(python3 -c 'import json; print(json.dumps(json.load(open(\"schemas.json\"))[\"add\"]))')\"";
    scratch.write("chat.yaml", &format!("environment_factory: [{}]\n", serde_json::Value::from(program)));
    let in_terminal = |config: &str, input: &str| {
        let command = format!("{PROGRAM} {CHAT} --config {config}");
        let mut line = Command::new("script");
        line.args(["-qec", &command, "/dev/null"])
            .current_dir(scratch.path(""))
            .env("TERM", "xterm")
            .env_remove("NO_COLOR");
        super::piped(line, input)
    };
    let ran = in_terminal("chat.yaml", "3+4\r/quit\r");
    let shown = ran.stdout;
    assert_eq!(ran.code, 0, "{shown:?}");
    for wanted in [
        "\u{1b}[2m-> add({\"a\": 3, \"b\": 4})\u{1b}[0m",
        "\u{1b}[2m<- a\\u{1b}[2Ja",
        "...\u{1b}[0m",
        "reward: 0.5",
        "(the episode has ended: ",
    ] {
        assert!(shown.contains(wanted), "{wanted}: {shown:?}");
    }
    assert!(shown.matches("[2Ja").count() < 70, "{shown:?}");
    // The reward is that of the conversation before.
    scratch.write("sum.yaml", "environment_factory: [helpers.Sum]\nenvironment_row: {answer: '7'}\n");
    let shown = in_terminal("sum.yaml", "3+4\r/reset\r/quit\r").stdout;
    let at = |text: &str| shown.find(text).unwrap_or_else(|| panic!("{text}: {shown:?}"));
    assert!(at("reward: 1") < at("a new conversation"), "{shown:?}");
}
