//! Rewards that are no model of the policy's: programs, services, rules, closures, other chat templates; and PPO with them.

use crate::checkpoint::{signal, wait_until};
use crate::cli::{PPO, PROMPTS, REWARD, Ran, Scratch, json_lines, timeless, with_data};
use crate::launch::{runs, wait_for};
use crate::support::{Child, Tensors, assert_close, golden, init, output, read_json};
use rlhf::generate::FinishReason;
use rlhf::model::ModelOptions;
use rlhf::reward::{
    CommandReward, FnReward, HttpReward, HttpSettings, RetryPolicy, Reward, RewardInput, RewardModel, Rewards, Score,
    ScoreUse, Warn,
};
use rlhf::rl::math::ScorePosition;
use rlhf::settings::PpoConfig;
use rlhf::tokenizer::Tokenizer;
use rlhf::train::ppo::PpoTrainer;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tch::Kind;

/// Responses of two tokens to "prompt 0", "prompt 1", ...
struct Batch {
    prompts: Vec<String>,
    rows: Vec<Value>,
    response: String,
}

impl Batch {
    fn of(count: usize) -> Self {
        Self {
            prompts: (0..count).map(|i| format!("prompt {i}")).collect(),
            rows: (0..count).map(|i| json!({"label": i})).collect(),
            response: " fine".into(),
        }
    }

    fn inputs(&self) -> Vec<RewardInput<'_>> {
        let input = |(prompt, row)| RewardInput {
            prompt,
            response: &self.response,
            prompt_ids: &[5, 6],
            response_ids: &[7, 8],
            finish: FinishReason::Stop,
            row,
            episode: None,
        };
        self.prompts.iter().map(String::as_str).zip(&self.rows).map(input).collect()
    }

    /// The reward's score of each.
    #[track_caller]
    fn scored(&self, reward: &mut impl Reward) -> Vec<Score> {
        reward.score(&self.inputs()).unwrap_or_else(|e| panic!("{e}"))
    }

    #[track_caller]
    fn numbers(&self, reward: &mut impl Reward) -> Vec<f64> {
        self.scored(reward).iter().map(Score::total).collect()
    }

    /// The error of a reward named `judge`, which is one line with all of `words`.
    #[track_caller]
    fn refused(&self, reward: impl Reward + 'static, words: &[&str]) -> String {
        let error =
            Rewards::new().with("judge", reward).score(&self.inputs(), ScoreUse::Training).unwrap_err().to_string();
        assert!(error.starts_with("reward `judge`: ") && error.lines().count() == 1, "{error}");
        for word in words {
            assert!(error.contains(word), "no `{word}` in {error}");
        }
        error
    }
}

/// Tried twice, without long waits.
fn retry(timeout: Duration) -> RetryPolicy {
    RetryPolicy { timeout, attempts: 2, backoff: Duration::from_millis(1) }
}

const LONG: Duration = Duration::from_secs(30);

fn command(line: &str) -> CommandReward {
    CommandReward::new(line, retry(LONG))
}

/// Whether a process with this number, which stands in a file, is dead soon.
fn dies(pid_file: &Path) -> bool {
    let began = Instant::now();
    while lives(pid_file) && began.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(5));
    }
    !lives(pid_file)
}

/// Whether it is alive.
fn lives(pid_file: &Path) -> bool {
    let pid = std::fs::read_to_string(pid_file).unwrap();
    // A dead one whose parent has not waited for its end yet is dead, too.
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.trim()));
    status.is_ok_and(|status| !status.contains("State:\tZ"))
}

// Programs.

#[test]
fn a_program_scores_line_by_line_in_each_of_the_three_forms() {
    let batch = Batch::of(3);
    let mut numbers = command("while read -r line; do echo 1.5; done");
    assert_eq!(batch.numbers(&mut numbers), [1.5; 3]);
    assert_eq!(batch.numbers(&mut numbers), [1.5; 3], "again, without a start");
    let mut objects = command(r#"echo "ready" >&2; while read -r line; do echo '{"score": -2, "why": "so"}'; done"#);
    assert_eq!(batch.numbers(&mut objects), [-2.0; 3]);
    let mut tokens = command(r#"while read -r line; do echo '{"scores": [1, 2.5]}'; done"#);
    assert_eq!(batch.scored(&mut tokens), vec![Score::Tokens(vec![1.0, 2.5]); 3]);
}

#[test]
fn a_program_may_give_a_response_no_score() {
    for answer in ["null", "{\"score\": null}"] {
        let line = format!("read -r l; echo '{answer}'; while read -r line; do echo 2; done");
        assert_eq!(Batch::of(2).scored(&mut command(&line)), [Score::Absent, Score::Response(2.0)], "{answer}");
    }
    let mut both = command("while read -r line; do echo '{\"score\": null, \"scores\": [1, 2]}'; done");
    assert_eq!(Batch::of(1).scored(&mut both), [Score::Tokens(vec![1.0, 2.0])]);
}

#[test]
fn a_program_receives_every_field_of_a_response() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("asked.jsonl");
    let mut batch = Batch::of(2);
    batch.response = "a \"quoted\"\nline".into();
    let line = format!("while read -r line; do printf '%s\\n' \"$line\" >> {}; echo 0; done", file.display());
    batch.numbers(&mut command(&line));
    let asked = json_lines(&std::fs::read_to_string(&file).unwrap());
    let expected = json!({
        "id": 1, "prompt": "prompt 0", "response": "a \"quoted\"\nline", "prompt_ids": [5, 6], "response_ids": [7, 8],
        "finish_reason": "stop", "row": {"label": 0}, "left": 1,
    });
    assert_eq!(Value::Object(asked[0].clone()), expected);
    assert_eq!((&asked[1]["prompt"], &asked[1]["left"], &asked[1]["id"]), (&json!("prompt 1"), &json!(0), &json!(2)));
}

#[test]
fn a_program_that_crashes_is_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("mark");
    let line = format!(
        "if [ -e {0} ]; then while read -r l; do echo 5; done; else touch {0}; read -r l; echo 1; exit 3; fi",
        mark.display()
    );
    assert_eq!(Batch::of(3).numbers(&mut command(&line)), [5.0; 3]);
}

#[test]
fn a_program_that_is_started_again_is_a_warning_once_and_a_metric() {
    let batch = Batch::of(2);
    let found: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = found.clone();
    let warn: Warn = Arc::new(move |message: &str| seen.lock().unwrap().push(message.to_string()));
    let dir = tempfile::tempdir().unwrap();
    // Each second start succeeds.
    let line = format!(
        "echo >> {0}; if [ $(($(wc -l < {0}) % 2)) = 0 ]; then while read -r l; do echo 5; done; \
         else echo no film >&2; exit 3; fi",
        dir.path().join("starts").display()
    );
    let mut rewards = Rewards::new().with("judge", command(&line));
    rewards.warn_by(&warn);
    let retries =
        |rewards: &mut Rewards| rewards.score(&batch.inputs(), ScoreUse::Training).unwrap().components[0].extra.clone();
    assert_eq!(retries(&mut rewards), [("retries".to_string(), 1.0)]);
    assert_eq!(retries(&mut rewards), [], "the program runs");
    let words = "reward `judge`: the program exited after 0 of 2 scores (exit status: 3); its standard error ends with: no film; \
                 tried again (reported once)";
    assert_eq!(*found.lock().unwrap(), [words]);
}

#[test]
fn a_service_that_fails_once_is_a_warning_without_its_secrets() {
    let found: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = found.clone();
    let warn: Warn = Arc::new(move |message: &str| seen.lock().unwrap().push(message.to_string()));
    let service = failing(&[(503, "", ""), (503, "", "")]);
    let mut reward = service.reward(|s| s.retry.attempts = 3);
    reward.warn_by("judge", warn);
    assert_eq!(Batch::of(2).numbers(&mut reward), [1.0; 2]);
    assert_eq!(reward.extra(), [("retries".to_string(), 2.0)]);
    let told = found.lock().unwrap();
    assert!(told.len() == 1 && told[0].contains("HTTP status 503") && !told[0].contains("hidden"), "{told:?}");
}

#[test]
fn a_program_that_keeps_failing_is_one_error_with_its_last_words() {
    let batch = Batch::of(3);
    let crash = "read -r l; echo 1; echo one >&2; echo Traceback: no such film >&2; exit 3";
    batch.refused(
        command(crash),
        &[
            "row 2 of 3 (prompt \"prompt 1\"): the program exited after 1 of 3 scores",
            "exit status: 3",
            "its standard error ends with: one / Traceback: no such film",
            "(tried 2 times)",
        ],
    );
    // There is no use in trying that again.
    let error = batch.refused(command("no-such-program-anywhere"), &["row 1 of 3", "127", "no-such-program-anywhere"]);
    assert!(!error.contains("tried"), "{error}");
    for (answer, words) in [
        ("many words", "found \"many words\""),
        ("{\"score\": NaN}", "found \"{\\\"score\\\": NaN}\""),
        ("{\"score\": \"high\"}", "expected {\"score\": x}, {\"scores\": [x, ...]} or a number"),
        ("{}", "found \"{}\""),
        ("{\"scores\": [1]}", "expected 2 scores, one per token, found 1"),
        ("{\"scores\": [1, null]}", "expected {\"score\": x}"),
        ("1e999", "expected"),
    ] {
        let line = format!("read -r l; echo 1; while read -r l; do echo '{answer}'; done");
        batch.refused(command(&line), &["row 2 of 3 (prompt \"prompt 1\")", words, "tried 2 times"]);
    }
}

#[test]
fn an_extra_score_is_not_taken_for_the_next_rows() {
    let line = "read -r l; echo 1; sleep 0.1; echo 2; while read -r l; do echo 3; done";
    let mut chatty = CommandReward::new(line, RetryPolicy { attempts: 1, ..retry(LONG) });
    assert_eq!(Batch::of(1).numbers(&mut chatty), [1.0]);
    std::thread::sleep(Duration::from_millis(500));
    let words = "expected one line per request on standard output, found an extra line: \"2\"; replies before it may be those of other";
    Batch::of(1).refused(chatty, &[words]);
}

/// A program that answers each line with `answer`, in which `$id` is the line's id.
fn by_id(answer: &str) -> String {
    format!("while read -r l; do id=${{l#*\\\"id\\\":}}; id=${{id%%,*}}; {answer}; done")
}

#[test]
fn a_score_goes_to_the_response_whose_id_it_repeats() {
    let mut echo = command(&by_id("echo \"{\\\"score\\\": ${id}0, \\\"id\\\": $id}\""));
    assert_eq!(Batch::of(3).numbers(&mut echo), [10.0, 20.0, 30.0]);
    assert_eq!(Batch::of(2).numbers(&mut echo), [40.0, 50.0]);
    echo.finish().unwrap();
    // The second and the third line are answered in the other order.
    let line = "{\\\"score\\\": ${id}0, \\\"id\\\": $id}";
    let swapped = by_id(&format!(
        "case $id in 2) kept=\"{line}\";; 3) echo \"{line}\"; echo \"$kept\";; *) echo \"{line}\";; esac"
    ));
    assert_eq!(Batch::of(4).numbers(&mut command(&swapped)), [10.0, 20.0, 30.0, 40.0]);
}

#[test]
fn an_id_that_is_wrong_or_missing_is_an_error_and_shifts_nothing() {
    let one = "echo \"{\\\"score\\\": 1, \\\"id\\\": $id}\"";
    for (answer, words) in [
        (format!("{one}; [ $id = 1 ] && {one}"), "expected one score with \"id\": 1, found two"),
        ("echo '{\"score\": 1, \"id\": 9}'".to_string(), "expected an \"id\" from 1 to 3, found"),
        (
            format!("if [ $id = 2 ]; then echo 1; else {one}; fi"),
            "expected the \"id\" of the request in each score, as in those before",
        ),
        (
            format!("if [ $id = 1 ]; then echo 1; else {one}; fi"),
            "expected the \"id\" of the request in each score or in none",
        ),
    ] {
        let reward = CommandReward::new(by_id(&answer), RetryPolicy { attempts: 1, ..retry(LONG) });
        Batch::of(3).refused(reward, &[words]);
    }
}

#[test]
fn a_score_too_many_is_an_error_also_at_the_end_and_after_it() {
    // Three lines for two: the third comes later than any wait within the batch.
    let line = "n=0; while read -r l; do n=$((n + 1)); echo $n; [ $n = 1 ] && echo $n; [ $n = 2 ] && sleep 0.1; done";
    let late = "read -r l; echo 1; read -r l; echo 2; sleep 0.1; echo 3; while read -r l; do echo 4; done";
    for line in [late, line] {
        let mut reward = command(line);
        match reward.score(&Batch::of(2).inputs()) {
            Ok(_) => {
                let error = reward.finish().unwrap_err().to_string();
                assert!(error.contains("found an extra line") && error.contains("repeats the \"id\""), "{error}");
                // Another start would not mend the scores before it.
                let again = reward.score(&Batch::of(1).inputs()).unwrap_err().to_string();
                assert!(again.contains("found an extra line"), "{again}");
            }
            Err(error) => assert!(error.to_string().contains("found an extra line"), "{error}"),
        }
    }
    let mut polite = command("while read -r l; do echo 1; done; echo scored all");
    assert_eq!(Batch::of(2).numbers(&mut polite), [1.0; 2]);
    polite.finish().unwrap();
    assert_eq!(Batch::of(2).numbers(&mut polite), [1.0; 2], "it starts again");
}

#[test]
fn a_program_that_prints_a_score_twice_ends_rlhf_score_without_a_file() {
    let scratch = Scratch::new();
    let rows: String = (0..6).map(|_| "{\"prompt\": \"a\", \"completion\": \"b\"}\n").collect();
    scratch.write("rows.jsonl", &rows);
    scratch.write(
        "twice.sh",
        "n=0; while read -r l; do n=$((n + 1)); [ $n = 6 ] && sleep 0.2; echo $n; [ $n = 1 ] && echo $n; done",
    );
    let line = "score --tokenizer_name policy --dataset_name rows.jsonl --reward_retries 0 --output_file out.jsonl";
    let ran = scratch.run_with(line, &["--reward_command", "sh twice.sh"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("found an extra line"), "{}", ran.stderr);
    assert!(!scratch.path("out.jsonl").exists());
}

#[test]
fn a_silent_program_is_ended_with_all_that_it_started() {
    let dir = tempfile::tempdir().unwrap();
    let pids = [dir.path().join("shell"), dir.path().join("child")];
    let line = format!(
        "echo $$ > {}; sleep 1000 & echo $! > {}; echo starting >&2; wait",
        pids[0].display(),
        pids[1].display()
    );
    let slow = CommandReward::new(line, RetryPolicy { attempts: 1, ..retry(Duration::from_millis(300)) });
    Batch::of(1).refused(slow, &["row 1 of 1", "no score within 0.3 s", "ends with: starting"]);
    assert!(pids.iter().all(|pid| dies(pid)));
}

#[test]
fn a_program_ends_with_the_reward_whether_it_looks_at_its_input_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    for tail in ["while read -r l; do echo 1; done", "read -r l; echo 1; sleep 1000"] {
        let mut reward = command(&format!("echo $$ > {}; {tail}", pid.display()));
        assert_eq!(Batch::of(1).numbers(&mut reward), [1.0]);
        assert!(lives(&pid));
        drop(reward);
        assert!(dies(&pid), "{tail}");
    }
}

#[test]
fn a_program_that_left_a_child_behind_is_noticed_and_the_child_ends_too() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("child");
    // The child keeps standard output open.
    let line = format!("sleep 1000 & echo $! > {}; read -r l; echo 1", pid.display());
    let mut reward = command(&line);
    assert_eq!(Batch::of(1).numbers(&mut reward), [1.0]);
    assert!(lives(&pid));
    drop(reward);
    assert!(dies(&pid), "after a program that ended by itself");
    let began = Instant::now();
    let error = Batch::of(2).refused(command(&line), &["row 2 of 2", "the program exited after 1 of 2 scores"]);
    assert!(error.contains("exit status: 0") && dies(&pid), "{error}");
    assert!(began.elapsed() < LONG, "its end is not waited for until the time is over");
}

#[test]
fn a_program_that_prints_without_end_takes_no_memory() {
    let found = Child { test: "rewards::child_reads_a_program_without_end", address_space_gib: 6, vars: &[] }.run();
    assert!(found["grew"].as_u64().unwrap() < 200 << 20, "memory grew by more than 200 MiB: {found}");
}

#[test]
#[ignore = "a process of its own, started by a_program_that_prints_without_end_takes_no_memory"]
fn child_reads_a_program_without_end() {
    let before = Child::memory("VmRSS");
    for (line, words) in [
        // A line that is too long, or one that was there before the request.
        ("cat /dev/zero", "expected"),
        ("yes $(head -c 100000 /dev/zero | tr '\\0' 1)", "expected"),
        ("tr '\\0' x < /dev/zero >&2", "no score within 0.5 s; its standard error ends with: xxx"),
        ("yes 1", "found an extra line: \"1\""),
    ] {
        let reward = CommandReward::new(line, RetryPolicy { attempts: 1, ..retry(Duration::from_millis(500)) });
        Batch::of(1).refused(reward, &[words]);
    }
    Child::reports(&json!({"grew": Child::memory("VmHWM").saturating_sub(before)}));
}

#[test]
fn no_pipe_that_is_full_stops_a_large_batch() {
    // 6 MB in, 6 MB out and 1 MB of complaints; a pipe holds 64 KB.
    let mut batch = Batch::of(2000);
    batch.response = "x".repeat(3000);
    let noise = "head -c 1000000 /dev/zero | tr '\\0' '\\n' >&2";
    let line = format!("{noise}; sed -u 's/^.*\"response\":\"\\(x*\\)\".*$/{{\"score\": 2, \"echo\": \"\\1\"}}/'");
    assert_eq!(batch.numbers(&mut command(&line)), vec![2.0; 2000]);
}

#[test]
fn the_programs_of_the_examples_score() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/rewards");
    let mut batch = Batch::of(2);
    batch.response = " It was \"good\"! Really! prompt_ids: none!".into();
    let mut shell = command(&format!("sh {}", examples.join("reward.sh").display()));
    assert_eq!(batch.numbers(&mut shell), [-0.3; 2]);
    batch.response = " the film the film the film the film the film.".into();
    let mut python = command(&format!("python3 {}", examples.join("reward.py").display()));
    // Ends a sentence: 1; 10 words for 20: -0.5; "the", "film" and "film." of 10: 0.3.
    let found = batch.numbers(&mut python);
    assert!(found.iter().all(|score| (score - 0.8).abs() < 1e-12), "{found:?}");
}

// Functions of Python.

/// A module with functions in the form of TRL's.
const FUNCTIONS: &str = r#"
import asyncio, json, sys
print("a module may print")
def asked(prompts, completions, completion_ids, **columns):
    print("and so may a function")
    with open("asked", "a") as file:
        columns = {k: v for k, v in columns.items() if k not in ("trainer_state", "log_extra", "log_metric")}
        file.write(json.dumps([prompts, completions, completion_ids, columns]) + "\n")
    assert sys.stdin.read() == ""
    return [None if answer is None else answer for answer in columns["answer"]]
async def later(completions, **columns):
    await asyncio.sleep(0.001)
    return (len(completions) for _ in completions)
def reads(completions, **columns):
    return [json.loads(text) for text in completions]
def short(completions, **columns):
    return [1.0]
def words(completions, **columns):
    return [0.5, "high"]
def endless(completions, **columns):
    return [0.5, float("inf")]
def single(completions, **columns):
    return 1.0
def forks(completions, **columns):
    import os
    return [50.0 if os.fork() == 0 else 1.0] * len(completions)
def strict(completions, trainer_state):
    return [1.0, 1.0]
def logs(completions, answer, trainer_state, log_extra, log_metric, **columns):
    state = trainer_state
    log_metric("right", 1)
    log_metric("right", 0.5)
    log_extra("found", [text.strip() for text in completions])
    log_extra("few", [1] * 99)
    with open("states", "a") as file:
        file.write(json.dumps([state.global_step, state.max_steps, state.epoch, state.is_world_process_zero]) + "\n")
    return [float(state.global_step) for _ in completions]
def lists_all(prompts, completions, completion_ids, answer, level):
    return [1.0 for _ in completions]
def misspelt(completions, **columns):
    print("this far")
    return helper(completions)
def helper(completions):
    return completion
def unreachable(completions, **columns):
    raise ConnectionError("no route")
def quits(completions, **columns):
    sys.stdout.flush()
    import os
    os._exit(7)
def sleeps(completions, **columns):
    import time
    time.sleep(600)
class Judge:
    def __call__(self, completions, **columns):
        return [2 for _ in completions]
judge = Judge()
number = 3
"#;

/// A folder with the module `mine.rewards` of [`FUNCTIONS`], and two rows with completions.
fn functions() -> Scratch {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("mine")).unwrap();
    scratch.write("mine/rewards.py", FUNCTIONS);
    // A file with the name of a module that the caller itself imports.
    scratch.write("json.py", "raise SystemExit(9)");
    let rows = [
        json!({"prompt": "do", "completion": " this", "answer": 1.5, "level": "easy"}),
        json!({"prompt": "do", "completion": " that", "answer": null}),
    ];
    scratch.write("rows.jsonl", &rows.map(|row| format!("{row}\n")).concat());
    scratch
}

const SCORE: &str = "score --tokenizer_name policy --dataset_name rows.jsonl --reward_retries 0";

/// Runs `rlhf score`; gives its standard output. The lines that the functions print are all of its standard error.
#[track_caller]
fn scores(scratch: &Scratch, line: &str) -> String {
    let ran = scratch.run(line);
    let is_printed = |line: &str| line.ends_with(": a module may print") || line.ends_with(": and so may a function");
    assert!(ran.code == 0 && ran.stderr.lines().all(is_printed), "{line}: {}", ran.stderr);
    ran.stdout
}

#[test]
fn functions_of_python_get_trls_arguments_and_their_output_is_no_score() {
    let scratch = functions();
    let line = format!(
        "{SCORE} --reward python:mine.rewards.asked --reward slow=python:mine.rewards.later \
         --reward python:mine.rewards.judge"
    );
    let rows = json_lines(&scores(&scratch, &line));
    let components: Vec<&Value> = rows.iter().map(|row| &row["components"]).collect();
    assert_eq!(*components[0], json!({"asked": 1.5, "slow": 2.0, "judge": 2.0}));
    assert!(components[1]["asked"].is_null() && components[1]["slow"] == 2.0, "{components:?}");
    let asked: Value = serde_json::from_str(&scratch.read("asked")).unwrap();
    assert_eq!((&asked[0], &asked[1]), (&json!(["do", "do"]), &json!([" this", " that"])));
    assert!(asked[2].as_array().is_some_and(|ids| ids.len() == 2 && ids[0][0].is_u64()), "{asked}");
    // A null where another row has the column; the prompt and the completion have names of their own.
    assert_eq!(asked[3], json!({"answer": [1.5, null], "level": ["easy", null]}));
}

#[test]
fn a_function_of_python_gets_conversations_as_lists_of_messages_in_a_run() {
    let scratch = functions();
    scratch.write("policy/chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    let messages = json!([{"role": "user", "content": "Good?"}]);
    scratch.write("prompts.jsonl", &format!("{}\n", json!({"prompt": messages, "answer": 2})));
    let ran = scratch.run(&format!("{NO_MODEL} --reward python:mine.rewards.asked"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(number(&scratch.metrics("out")[0], "objective/scores/asked"), 2.0);
    let asked = scratch.read("asked");
    let calls: Vec<Value> = asked.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // The responses of an update are one call.
    let call = calls.iter().find(|call| call[0].as_array().unwrap().len() == 4).unwrap();
    assert_eq!(call[0][3], messages);
    let completion = &call[1][3][0];
    assert!(completion["role"] == "assistant" && completion["content"].is_string(), "{completion}");
    assert_eq!(call[3], json!({"answer": [2, 2, 2, 2]}));
    assert!(scratch.read("out/README.md").contains("asked: `python:mine.rewards.asked`"));
}

#[test]
fn a_function_of_python_that_cannot_be_imported_is_one_error_before_a_run() {
    let scratch = functions();
    scratch.write("broken.py", "def f(:\n");
    scratch.write("lacks.py", "import no_such_package\n");
    scratch.write("fails.py", "\nraise ValueError('no\\nfile')\n");
    for (path, words) in [
        ("nowhere.f", &["reward `f`: no module `nowhere` in ", "nor among the packages of "][..]),
        ("mine.others.f", &["no module `mine.others` in "]),
        ("mine.rewards.f", &["the module `mine.rewards` (mine/rewards.py) has no function `f`"]),
        ("mine.rewards.Judge", &["`Judge` of the module `mine.rewards`", "is a class: expected a function"]),
        ("mine.rewards.number", &["is of the type int: expected a function"]),
        ("broken.f", &["cannot import `broken`: SyntaxError: ", "(broken.py:1)"]),
        ("lacks.f", &["cannot import `lacks`: ModuleNotFoundError: ", "no_such_package", "(lacks.py:1, in <module>)"]),
        ("fails.f", &["cannot import `fails`: ValueError: no file (fails.py:2, in <module>)"]),
    ] {
        for line in [SCORE, NO_MODEL] {
            scratch.run(&format!("{line} --reward python:{path}")).is_one_error(path, 1, words);
        }
        assert!(!scratch.path("out/model.safetensors").exists());
    }
    let mut line = scratch.command(&format!("{SCORE} --reward python:mine.rewards.asked"));
    let ran = Ran::from(output(line.env("RLHF_PYTHON", "/no/such/python")));
    let words = ["reward `asked`: /no/such/python cannot be started: ", "name one in RLHF_PYTHON"];
    ran.is_one_error("no Python", 1, &words);
}

#[test]
fn a_function_of_python_that_fails_is_one_error_with_the_place() {
    let scratch = functions();
    let row = "row 2 of 2 (prompt \"do\"): ";
    for (name, words) in [
        ("reads", &["JSONDecodeError: Expecting value", "(mine/rewards.py:15, in "][..]),
        ("short", &["expected 2 scores, one per response, found 1"]),
        ("words", &[row, "expected a number or None, found 'high'"]),
        ("endless", &[row, "expected a finite score, found inf"]),
        ("single", &["expected a list with one score per response, found 1.0"]),
        ("strict", &["TypeError: strict() got an unexpected keyword argument '"]),
        ("quits", &["the program exited after 0 of 2 scores (exit status: 7)"]),
    ] {
        let ran = scratch.run(&format!("{SCORE} --reward python:mine.rewards.{name}"));
        let reward = format!("reward `{name}`: ");
        ran.ends_with_one_error(name, &[&[reward.as_str()], words].concat());
    }
    let began = Instant::now();
    let ran = scratch.run(&format!("{SCORE} --reward python:mine.rewards.sleeps --reward_timeout 10"));
    ran.ends_with_one_error("sleeps", &["no score within 10 s"]);
    assert!(began.elapsed() < Duration::from_secs(60));
}

impl Ran {
    /// Requires exit code 1 and, after what a function has printed, one error with all of `words`.
    #[track_caller]
    fn ends_with_one_error(&self, line: &str, words: &[&str]) {
        assert_eq!(self.code, 1, "{line}: {}", self.stderr);
        let error = self.stderr.lines().last().unwrap_or_default();
        assert!(error.starts_with("error: ") && self.stderr.matches("error: ").count() == 1, "{line}: {}", self.stderr);
        for word in words {
            assert!(error.contains(word), "{line}: no `{word}` in {error}");
        }
    }
}

#[test]
fn the_prints_and_the_traceback_of_a_function_of_python_are_shown_and_its_own_error_is_not_retried() {
    let scratch = functions();
    let line = SCORE.replace(" --reward_retries 0", "");
    let ran = scratch.run(&format!("{line} --reward python:mine.rewards.misspelt"));
    let error = "NameError: name 'completion' is not defined";
    ran.ends_with_one_error("misspelt", &["reward `misspelt`: ", error, "(mine/rewards.py:"]);
    assert!(!ran.stderr.contains("tried"), "{}", ran.stderr);
    for shown in ["a module may print", "this far", "Traceback (most recent call last):", "    return completion"] {
        let count = ran.stderr.lines().filter(|line| line.starts_with("misspelt: ") && line.contains(shown)).count();
        assert_eq!(count, 1, "{shown}: {}", ran.stderr);
    }
    // The program that calls the function is no part of it.
    assert!(!ran.stderr.contains("function.py"), "{}", ran.stderr);
    let ran = scratch.run(&format!("{line} --reward_retries 1 --reward python:mine.rewards.unreachable"));
    ran.ends_with_one_error("unreachable", &["ConnectionError: no route", "(tried 2 times)"]);
}

#[test]
fn a_function_of_python_that_lists_its_arguments_gets_no_others() {
    let rows = json_lines(&scores(&functions(), &format!("{SCORE} --reward python:mine.rewards.lists_all")));
    assert!(rows.iter().all(|row| row["score"] == 1.0), "{rows:?}");
}

#[test]
fn functions_of_python_get_the_state_of_the_run_and_log_metrics_and_columns() {
    let scratch = functions();
    scratch.write("prompts.jsonl", &format!("{}\n", json!({"prompt": "Good?", "answer": 2})));
    scratch.write("policy/chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    let ran = scratch.run(&format!("{NO_MODEL} --reward python:mine.rewards.logs"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    // The prompt is text, and the template is not used.
    assert!(ran.stderr.contains("the prompts are plain text, and the model has a chat template"), "{}", ran.stderr);
    let metrics = scratch.metrics("out");
    assert_eq!(number(&metrics[0], "reward/logs/right"), 0.75);
    assert!(
        ran.stderr.contains("log_extra: expected 4 values of `few`, one per completion, found 99"),
        "{}",
        ran.stderr
    );
    // The state says how far the run is, and with it the score: the updates done.
    let states: Vec<Value> = scratch.read("states").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (update, metrics) in metrics.iter().enumerate() {
        assert_eq!(number(metrics, "objective/scores/logs"), update as f64);
        assert!(states.iter().any(|state| state[0] == update), "{states:?}");
    }
    assert!(states.iter().all(|state| state[1] == metrics.len() && state[3] == true), "{states:?}");
    let folder = fs::read_dir(scratch.path("out/samples")).unwrap();
    let texts: Vec<String> = folder.map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    for row in texts.iter().flat_map(|text| json_lines(text)) {
        assert_eq!(row["extra"], json!({"found": row["response"].as_str().unwrap().trim()}));
    }
    assert!(!texts.is_empty());
}

#[test]
fn a_function_of_python_that_forks_has_the_scores_of_its_own_process() {
    let scratch = functions();
    let rows = json_lines(&scores(&scratch, &format!("{SCORE} --reward python:mine.rewards.forks")));
    assert_eq!(rows.iter().map(|row| &row["score"]).collect::<Vec<_>>(), [1.0, 1.0]);
}

#[test]
fn a_program_may_report_an_error_in_place_of_a_score() {
    let line = "read -r l; echo 1; echo '{\"error\": \"no film\", \"row\": 1}'; cat > /dev/null";
    Batch::of(3).refused(command(line), &["row 2 of 3 (prompt \"prompt 1\"): no film", "(tried 2 times)"]);
}

// Services.

/// A request to the service.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) authorization: Option<String>,
    pub(crate) body: Value,
}

type Answers = dyn Fn(&Asked) -> (u16, String, String) + Send + Sync;

/// A service on this machine; `answer` returns status, further headers and body.
pub(crate) struct Service {
    pub(crate) url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Service {
    pub(crate) fn new(answer: impl Fn(&Asked) -> (u16, String, String) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/score?key=hidden", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (log, answer): (_, Arc<Answers>) = (asked.clone(), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (log, answer) = (log.clone(), answer.clone());
                std::thread::spawn(move || serve(stream?, &log, &*answer));
            }
        });
        Self { url, asked }
    }

    /// Returns a reward per query to each request, which `reward` makes of query and label.
    fn scoring(reward: impl Fn(&str, &Value) -> Value + Send + Sync + 'static) -> Self {
        Self::new(move |asked| {
            let rewards = reward_values(asked, &reward);
            (200, String::new(), json!({"rewards": rewards, "scores": []}).to_string())
        })
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    fn reward(&self, change: impl FnOnce(&mut HttpSettings)) -> HttpReward {
        let mut settings = HttpSettings { retry: retry(LONG), ..HttpSettings::default() };
        change(&mut settings);
        HttpReward::new(&self.url, settings).unwrap()
    }
}

fn reward_values(asked: &Asked, reward: impl Fn(&str, &Value) -> Value) -> Vec<Value> {
    let (queries, labels) = (asked.body["query"].as_array().unwrap(), asked.body["labels"].as_array().unwrap());
    queries.iter().zip(labels).map(|(query, label)| reward(query.as_str().unwrap(), label)).collect()
}

fn serve(stream: TcpStream, log: &Mutex<Vec<Asked>>, answer: &Answers) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut length, mut authorization, mut line) = (0, None, String::new());
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            if line.trim().is_empty() {
                break;
            }
            continue;
        };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().unwrap(),
            "authorization" => authorization = Some(value.to_string()),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let asked = Asked { authorization, body: serde_json::from_slice(&body).unwrap() };
    log.lock().unwrap().push(asked.clone());
    let (status, head, body) = answer(&asked);
    let mut stream = stream;
    write!(stream, "HTTP/1.1 {status} -\r\nConnection: close\r\nContent-Length: {}\r\n{head}\r\n{body}", body.len())
}

#[test]
fn a_service_gets_batches_in_openrlhfs_shape_and_rows_keep_their_order() {
    let service = Service::scoring(|_, label| label.clone());
    let mut reward = service.reward(|s| s.batch_size = 3);
    let expected: Vec<f64> = (0..10).map(f64::from).collect();
    assert_eq!(Batch::of(10).numbers(&mut reward), expected);
    let mut asked = service.asked();
    asked.sort_by_key(|asked| asked.body["labels"][0].as_i64());
    let sizes: Vec<usize> = asked.iter().map(|asked| asked.body["query"].as_array().unwrap().len()).collect();
    assert_eq!(sizes, [3, 3, 3, 1]);
    assert_eq!(asked[3].body, json!({"query": ["prompt 9 fine"], "prompts": ["prompt 9"], "labels": [9]}));
    assert_eq!(asked[0].authorization, None);
    let mut reward = service.reward(|s| s.label_column = "answer".into());
    assert_eq!(Batch::of(1).scored(&mut reward), [Score::Absent], "this service returns the label");
    assert_eq!(service.asked()[0].body["labels"], json!([null]), "a row without the column has no label");
}

#[test]
fn requests_to_a_service_run_at_the_same_time() {
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (n, m) = (now, most.clone());
    let service = Service::new(move |asked| {
        m.fetch_max(n.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        let began = Instant::now();
        // Each waits for a second one, and in vain if there is none.
        while m.load(Ordering::SeqCst) < 2 && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
        n.fetch_sub(1, Ordering::SeqCst);
        (200, String::new(), json!({"rewards": reward_values(asked, |_, label| label.clone())}).to_string())
    });
    let mut reward = service.reward(|s| (s.batch_size, s.concurrency) = (1, 2));
    assert_eq!(Batch::of(6).numbers(&mut reward), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(most.load(Ordering::SeqCst), 2);
}

#[test]
fn numbers_per_token_and_further_logs_of_a_service_are_taken() {
    let service = Service::new(|asked| {
        let rewards = reward_values(asked, |_, _| json!([1, 2]));
        let mean = if rewards.len() == 2 { 1.0 } else { 4.0 };
        let logs = json!({"accuracy": mean, "lengths": [mean, mean + 1.0], "note": "no number"});
        (200, String::new(), json!({"rewards": rewards, "extra_logs": logs}).to_string())
    });
    let mut reward = service.reward(|s| s.batch_size = 2);
    assert_eq!(Batch::of(3).scored(&mut reward), vec![Score::Tokens(vec![1.0, 2.0]); 3]);
    // Two rows of 1 and one of 4; the means of the lists are 1.5 and 4.5.
    assert_eq!(reward.extra(), [("accuracy".to_string(), 2.0), ("lengths".to_string(), 2.5)]);
}

/// A service that sends these HTTP responses, one after another, and then sound ones.
fn failing(answers: &[(u16, &str, &str)]) -> Service {
    let owned = |(status, head, body): &(u16, &str, &str)| (*status, head.to_string(), body.to_string());
    let answers: Mutex<VecDeque<_>> = Mutex::new(answers.iter().map(owned).collect());
    Service::new(move |asked| {
        let sound = || (200, String::new(), json!({"rewards": reward_values(asked, |_, _| json!(1))}).to_string());
        answers.lock().unwrap().pop_front().unwrap_or_else(sound)
    })
}

#[test]
fn passing_failures_are_retried() {
    let batch = Batch::of(2);
    for passing in [
        (500, "", "{}"),
        (429, "Retry-After: 0\r\n", ""),
        (200, "", "Bad Gateway"),
        (200, "", "{\"rewards\": [1]}"),
        (200, "", "{\"rewards\": [1, true]}"),
    ] {
        let service = failing(&[passing]);
        assert_eq!(batch.numbers(&mut service.reward(|_| ())), [1.0; 2], "{passing:?}");
        assert_eq!(service.asked().len(), 2, "{passing:?}");
    }
}

#[test]
fn a_service_that_keeps_failing_is_one_error_that_keeps_its_secrets() {
    let batch = Batch::of(2);
    for (answer, tries, words) in [
        ((503, "", "{}"), 2, &["HTTP status 503", "(tried 2 times)"][..]),
        ((200, "", "secret"), 2, &["expected a JSON object with a list `rewards`, found \"...\""]),
        ((200, "", "{\"rewards\": [1, 2, 3]}"), 2, &["expected 2 scores, one per response, found 3"]),
        ((200, "", "{\"rewards\": [1, \"secret\"]}"), 2, &["row 2 of 2 (prompt \"prompt 1\")", "found \"...\""]),
        ((200, "", "{\"rewards\": [1, [1, 2, 3]]}"), 2, &["row 2 of 2", "expected 2 scores, one per token, found 3"]),
        ((404, "", ""), 1, &["HTTP status 404"]),
        ((401, "", "secret"), 1, &["HTTP status 401", "RLHF_REWARD_TOKEN is not accepted"]),
        ((307, "Location: http://127.0.0.1:1/\r\n", ""), 1, &["HTTP status 307", "not followed"]),
    ] {
        let service = failing(&[answer; 2]);
        let reward = service.reward(|s| s.token = Some("secret".into()));
        let error = batch.refused(reward, words);
        assert!(error.contains("http://127.0.0.1:"), "{error}");
        assert!(!error.contains("secret") && !error.contains("hidden"), "{error}");
        let asked = service.asked();
        assert_eq!(asked.len(), tries, "{error}");
        assert!(asked.iter().all(|asked| asked.authorization.as_deref() == Some("Bearer secret")));
    }
    let service = failing(&[(401, "", "")]);
    batch.refused(service.reward(|_| ()), &["a token goes to the environment variable RLHF_REWARD_TOKEN"]);
    let silent = Service::new(|_| {
        std::thread::sleep(Duration::from_secs(5));
        (200, String::new(), String::new())
    });
    let reward = silent.reward(|s| s.retry = retry(Duration::from_millis(100)));
    batch.refused(reward, &["timed out after 0.1 s", "(tried 2 times)"]);
    let gone = HttpReward::new("http://127.0.0.1:1/", HttpSettings { retry: retry(LONG), ..HttpSettings::default() });
    batch.refused(gone.unwrap(), &["http://127.0.0.1:1/", "(tried 2 times)"]);
    // The row of a later request counts from the first.
    let service = Service::scoring(|_, label| if label == 4 { json!("x") } else { json!(1) });
    Batch::of(6).refused(service.reward(|s| s.batch_size = 2), &["row 5 of 6 (prompt \"prompt 4\")"]);
}

#[test]
fn the_service_of_the_examples_scores_for_those_who_know_its_token() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/rewards/serve.py");
    let mut service = Command::new("python3");
    let mut service =
        service.arg(file).arg("0").env("RLHF_REWARD_TOKEN", "sesame").stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(service.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line}"));
    let reward = |token: &str| {
        let settings = HttpSettings { token: Some(token.into()), retry: retry(LONG), ..HttpSettings::default() };
        HttpReward::new(url, settings).unwrap()
    };
    assert_eq!(Batch::of(3).numbers(&mut reward("sesame")), [0.05; 3]); // " fine", of 100 characters
    Batch::of(1).refused(reward("wheat"), &["HTTP status 401", "not accepted"]);
    service.kill().unwrap();
    service.wait().unwrap();
}

// Models with a chat template of their own.

#[test]
fn a_conversation_is_rendered_by_the_reward_models_own_template() {
    let scratch = Scratch::new();
    scratch.copy("sentiment", "llama_untied_cls");
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}";
    scratch.write("reward/chat_template.jinja", template);
    scratch.write("sentiment/chat_template.jinja", template);
    scratch.write("policy/chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    let policy = Tokenizer::from_pretrained(&scratch.path("policy")).unwrap();
    let messages = json!([{"role": "user", "content": "Good?"}]);
    let rows = [
        json!({"prompt": messages}),
        json!({"prompt": "Good?"}),
        json!({"query": messages}),
        json!({"query": "Good?"}),
    ];
    let prompt_ids = policy.encode("Good?").unwrap();
    let response_ids = policy.encode(" It was.").unwrap();
    for (model, line) in [("reward", "score --model reward"), ("sentiment", "score --model sentiment")] {
        let dir = scratch.path(model);
        let mut reward = RewardModel::from_pretrained(&dir, None, None, &policy, 8, ModelOptions::default()).unwrap();
        // The one has the policy's ids and another template, the other ids of its own.
        assert_eq!(reward.reads_text(), model == "sentiment");
        let input = |row| RewardInput {
            prompt: "Good?",
            response: " It was.",
            prompt_ids: &prompt_ids,
            response_ids: &response_ids,
            finish: FinishReason::Stop,
            row,
            episode: None,
        };
        let inputs: Vec<RewardInput<'_>> = rows.iter().map(input).collect();
        let found: Vec<f64> = reward.score(&inputs).unwrap().iter().map(Score::total).collect();
        let whole = json!({"messages": [messages[0], {"role": "assistant", "content": " It was."}]});
        let text = json!({"text": "Good? It was."});
        scratch.write("rows.jsonl", &format!("{whole}\n{text}\n"));
        let expected = json_lines(&scratch.succeeds(&format!("{line} --dataset_name rows.jsonl")));
        for (found, expected) in found.iter().zip(expected.iter().cycle()) {
            assert!((found - expected["score"].as_f64().unwrap()).abs() < 2e-5, "{model}: {found}, {expected:?}");
        }
        assert!((found[0] - found[1]).abs() > 1e-4, "the template changes the score");
        if model == "reward" {
            // Without a stop the text ends behind the response: nothing closes the message.
            let cut = RewardInput { finish: FinishReason::Length, ..input(&rows[0]) };
            let found = reward.score(&[cut]).unwrap()[0].total();
            let open = json!({"text": "<user>Good?<|endoftext|>\n<assistant> It was."});
            scratch.write("rows.jsonl", &format!("{open}\n"));
            let expected = json_lines(&scratch.succeeds(&format!("{line} --dataset_name rows.jsonl")));
            let expected = expected[0]["score"].as_f64().unwrap();
            assert!((found - expected).abs() < 2e-5, "{found}, {expected}");
        }
    }
    // Of a prompt that was truncated there is no conversation, and the whole one was not used.
    let row = |text: &str| format!("{}\n", json!({"query": [{"role": "user", "content": text}]}));
    scratch.write("chats.jsonl", &[row("Good?"), row("Is it any good, or is it not?")].concat());
    let line = format!("{} --reward model:sentiment --max_prompt_length 12", with_data(NO_MODEL, "chats.jsonl"));
    scratch.refuses(
        &format!("{line} --long_prompts truncate_left"),
        2,
        &["long_prompts = truncate_left: sentiment reads a whole conversation by its own chat template"],
    );
    let ran = scratch.run(&format!("{line} --long_prompts drop"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn a_rounded_model_is_no_reason_to_refuse_prompts_that_were_not_truncated() {
    let scratch = Scratch::new();
    scratch.copy("sentiment", "llama_untied_cls");
    scratch.write("sentiment/chat_template.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}");
    scratch.write("policy/chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    let row = json!({"query": [{"role": "user", "content": "Good?"}]});
    scratch.write("chats.jsonl", &format!("{row}\n"));
    let line = format!("{} --reward model:sentiment --bf16 --optim adamw_bf16", with_data(NO_MODEL, "chats.jsonl"));
    let ran = scratch.run(&format!("{line} --max_prompt_length 12 --long_prompts truncate_left"));
    assert!(ran.stderr.contains("optim = adamw_bf16 rounds weights"), "{}", ran.stderr);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

// PPO.

/// Two updates of 8 responses.
fn config(dir: &Path) -> PpoConfig {
    let prompts = dir.join("prompts.jsonl");
    let rows = PROMPTS.map(|prompt| format!("{}\n", json!({"prompt": prompt, "answer": "a film"})));
    std::fs::write(&prompts, rows.concat()).unwrap();
    let mut config = PpoConfig::without_reward(init("llama_policy"), prompts, dir.join("out"));
    config.model_name_or_path = Some(golden().join("models/gpt_neox"));
    config.response_length = 8;
    config.stop_token_id = Some(192);
    config.temperature = 0.4;
    config.total_episodes = Some(16);
    config.num_sample_generations = 0;
    config.learning_rate = 1e-3;
    config
}

/// The metrics of a run's updates, and the sums of its weights.
fn train(rewards: Rewards, change: impl FnOnce(&mut PpoConfig)) -> (Vec<Map<String, Value>>, Vec<f64>) {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    change(&mut config);
    let mut trainer = PpoTrainer::from_config_with(&config, rewards).unwrap();
    let updates = 0..trainer.plan.num_total_batches;
    let lines: Vec<String> = updates.map(|_| serde_json::to_string(&trainer.update().unwrap()).unwrap()).collect();
    let params = trainer.learner.policy.params().iter().chain(trainer.learner.value.params());
    let sums = params.map(|param| param.tensor.sum(Kind::Double).double_value(&[])).collect();
    (timeless(json_lines(&lines.join("\n"))), sums)
}

fn number(line: &Map<String, Value>, name: &str) -> f64 {
    line[name].as_f64().unwrap_or_else(|| panic!("no number `{name}` in {line:?}"))
}

#[test]
fn ppo_trains_with_a_closure_and_no_reward_model() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    let brevity = FnReward::new(move |batch| {
        let mut seen = log.lock().unwrap();
        seen.extend(
            batch.iter().map(|i| (i.prompt.to_string(), i.row.clone(), i.finish_reason(), i.response_ids.len())),
        );
        Ok(batch.iter().map(|input| -(input.response_ids.len() as f64)).collect())
    });
    let (lines, weights) = train(Rewards::new().with("brevity", brevity), |_| ());
    assert_eq!(lines.len(), 2);
    for line in &lines {
        assert_eq!(number(line, "objective/scores/brevity"), number(line, "objective/scores"));
        assert!((number(line, "objective/scores") + number(line, "val/response_length")).abs() < 1e-6);
        let (reward_std, total_std) =
            (number(line, "objective/scores_std/brevity"), number(line, "objective/scores_std"));
        assert!((reward_std - total_std).abs() < 1e-5, "{reward_std} is not {total_std}");
    }
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 16);
    for (prompt, row, finish, tokens) in seen.iter() {
        assert!(row["prompt"] == prompt.as_str() && row["answer"] == "a film");
        assert!(*finish == "stop" || *tokens == 8);
    }
    let (_, untouched) = train(Rewards::new().with("brevity", FnReward::new(|b| Ok(vec![0.0; b.len()]))), |config| {
        config.learning_rate = 0.0;
    });
    assert_ne!(weights, untouched);
}

#[test]
fn scores_on_the_last_token_are_scores_of_the_response_at_score_position_last_token() {
    let token_sum = |input: &RewardInput<'_>| input.response_ids.iter().map(|&id| id as f64).sum::<f64>() / 100.0;
    let whole = FnReward::new(move |batch| Ok(batch.iter().map(token_sum).collect()));
    let last = FnReward::new(move |batch| {
        let tokens = |input: &RewardInput<'_>| {
            let mut scores = vec![0.0; input.response_ids.len()];
            *scores.last_mut().unwrap() = token_sum(input);
            scores
        };
        Ok(batch.iter().map(tokens).collect())
    });
    let spread = FnReward::new(move |batch| {
        let tokens = |i: &RewardInput<'_>| vec![token_sum(i) / i.response_ids.len() as f64; i.response_ids.len()];
        Ok(batch.iter().map(tokens).collect())
    });
    let at_last_token = |config: &mut PpoConfig| config.score_position = ScorePosition::LastToken;
    let (expected, expected_weights) = train(Rewards::new().with("r", whole), at_last_token);
    let (found, weights) = train(Rewards::new().with("r", last), at_last_token);
    assert_eq!((found, weights), (expected.clone(), expected_weights), "bit for bit");
    let (spread, _) = train(Rewards::new().with("r", spread), at_last_token);
    let sums = |lines: &[Map<String, Value>]| number(&lines[0], "objective/scores");
    assert!((sums(&spread) - sums(&expected)).abs() < 1e-4, "the same sums, elsewhere");
    assert_ne!(spread[0]["loss/value_avg"], expected[0]["loss/value_avg"]);
}

#[test]
fn rewards_of_the_caller_are_added_to_those_of_the_configuration() {
    let model = |config: &mut PpoConfig| config.reward_model_path = Some(init("llama_reward"));
    let (alone, _) = train(Rewards::new(), model);
    let one = Rewards::new().with("one", FnReward::new(|batch| Ok(vec![1.0; batch.len()])));
    let (both, _) = train(one, model);
    assert_eq!(both[0]["objective/scores/model"], alone[0]["objective/scores/model"]);
    let gap = number(&both[0], "objective/scores") - number(&alone[0], "objective/scores");
    assert!((gap - 1.0).abs() < 1e-5, "{gap}");
    assert_eq!(number(&alone[0], "objective/scores/model") as f32, number(&alone[0], "objective/scores") as f32);
}

const NO_MODEL: &str = "ppo --sft_model_path policy --dataset_name prompts.jsonl --output_dir out \
                        --response_length 8 --per_device_train_batch_size 4 --total_episodes 8";

#[test]
fn a_program_and_rules_together_train_from_the_command_line_and_again_from_their_settings() {
    let scratch = Scratch::new();
    scratch.write("score.sh", "while read -r line; do echo 0.25; done");
    let words = [
        "--reward_command",
        "sh score.sh",
        "--reward",
        "short=length:target=4,unit=tokens",
        "--reward",
        "regex:[a-z]",
        "--reward_weights",
        "command=2,short=0.5,regex=-1",
        "--reward_normalize=short=mean_std",
    ];
    let ran = scratch.run_with(NO_MODEL, &words);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    let lines = scratch.metrics("out");
    assert_eq!(lines.len(), 2);
    for line in &lines {
        assert_eq!(
            (number(line, "objective/scores/command"), number(line, "objective/scores_std/command")),
            (0.25, 0.0)
        );
        assert_eq!(number(line, "objective/scores/short"), -1.0, "8 tokens for 4");
        // The normalized score is 0 here, as all have one length.
        let regex = number(line, "objective/scores/regex");
        assert!((number(line, "objective/scores") - (2.0 * 0.25 - regex)).abs() < 1e-6);
        assert!(["command", "short", "regex"].iter().all(|name| number(line, &format!("time/reward/{name}")) >= 0.0));
    }
    // Without a reward model the value model starts as the policy.
    assert!(scratch.read("out/value_model/config.json").contains("GPTNeoXForSequenceClassification"));
    assert!(
        scratch.read("out/README.md").contains("command: a program, weight 2; short: `length:target=4,unit=tokens`")
    );
    scratch.succeeds("ppo --config out/config.yaml --output_dir again");
    assert_eq!(timeless(scratch.metrics("again")), timeless(lines));
}

#[test]
fn a_service_scores_a_run_and_its_token_is_nowhere_but_in_the_request() {
    let scratch = Scratch::new();
    let service = Service::new(|asked| {
        let rewards = reward_values(asked, |query, _| json!(query.len()));
        (200, String::new(), json!({"rewards": rewards, "extra_logs": {"seen": rewards.len()}}).to_string())
    });
    let line = format!("{NO_MODEL} --reward_url {} --reward_batch_size 3 --reward_clip 5", service.url);
    let ran = crate::cli::Ran::from(output(scratch.command(&line).env("RLHF_REWARD_TOKEN", " sesame\n")));
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    let asked = service.asked();
    assert!(!asked.is_empty() && asked.iter().all(|asked| asked.authorization.as_deref() == Some("Bearer sesame")));
    for line in scratch.metrics("out") {
        assert!(number(&line, "objective/scores/url") > 5.0 && number(&line, "objective/scores") == 5.0);
        assert_eq!(number(&line, "reward/url/seen"), (3.0 * 3.0 + 1.0) / 4.0);
    }
    for file in std::fs::read_dir(scratch.path("out")).unwrap() {
        let path = file.unwrap().path();
        let bytes = if path.is_file() { std::fs::read(&path).unwrap() } else { Vec::new() };
        let text = String::from_utf8_lossy(&bytes);
        // The token, and the query of the address.
        assert!(!text.contains("sesame") && !text.contains("key=hidden"), "{}", path.display());
    }
    assert!(scratch.read("out/README.md").contains("url: a service"), "the card is for others' eyes");
    // What is left out of the settings is not taken for the whole.
    let again = "ppo --config out/config.yaml --output_dir again";
    scratch.refuses(again, 2, &["reward_url = http://127.0.0.1", "?", "the part after the ?", "not written to files"]);
    let ran = scratch.run(&format!("{again} --reward_url {}", service.url));
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
}

#[test]
fn a_run_whose_reward_fails_ends_in_one_error_and_saves_what_it_has() {
    let scratch = Scratch::new();
    // Sound for the samples before the run and for the first update, and then no more.
    scratch.write(
        "score.sh",
        "n=0; while read -r l; do n=$((n + 1)); if [ $n -gt 9 ]; then echo nan; else echo 1; fi; done",
    );
    let line = format!("{NO_MODEL} --reward_retries 0");
    let ran = scratch.run_with(&line, &["--reward_command", "sh score.sh"]);
    assert_eq!(ran.code, 1);
    let error = ran.stderr.lines().last().unwrap();
    for words in ["reward `command`: row 1 of", "(prompt \"", "found \"nan\"", "the model as far as it came is in out"]
    {
        assert!(error.contains(words), "no `{words}` in {error}");
    }
    assert!(scratch.path("out/model.safetensors").is_file());
    assert_eq!(scratch.metrics("out").len(), 1);
}

#[test]
fn a_mixture_of_tasks_has_a_reward_for_each_and_no_score_elsewhere() {
    let scratch = Scratch::new();
    let rows = [
        json!({"prompt": "a film", "completion": " is \\boxed{2}", "solution": "2"}),
        json!({"prompt": "a film", "completion": " is this", "answer": "is this"}),
        json!({"prompt": "a film", "completion": " is that", "solution": null}),
    ];
    scratch.write("rows.jsonl", &rows.map(|row| format!("{row}\n")).concat());
    let rewards = "--reward accuracy_reward:optional=true --reward exact:answer,optional=true";
    let scored =
        json_lines(&scratch.succeeds(&format!("score --tokenizer_name policy --dataset_name rows.jsonl {rewards}")));
    let components = |row: &Map<String, Value>| row["components"].clone();
    assert_eq!(components(&scored[0]), json!({"accuracy_reward": 1.0, "exact": null}));
    assert_eq!(components(&scored[1]), json!({"accuracy_reward": null, "exact": 1.0}));
    assert_eq!(
        (components(&scored[2]), &scored[2]["score"]),
        (json!({"accuracy_reward": null, "exact": null}), &json!(null))
    );
    let lines = PROMPTS.map(|prompt| format!("{}\n", json!({"prompt": prompt, "answer": "x"})));
    scratch.write("prompts.jsonl", &[lines.concat(), json!({"prompt": "do", "solution": "1"}).to_string()].concat());
    scratch.refuses_with(
        NO_MODEL,
        &["--reward", "accuracy_reward"],
        1,
        &[
            "line 1: reward `accuracy_reward`: expected a column `solution`",
            "; with optional=true such a row gets no score",
        ],
    );
    let line = format!("{NO_MODEL} {rewards}");
    let ran = scratch.run(&line);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let absent: f64 = ["accuracy_reward", "exact"]
        .iter()
        .flat_map(|name| {
            scratch.metrics("out").into_iter().map(move |line| line.get(&format!("reward/{name}/absent")).cloned())
        })
        .flatten()
        .filter_map(|count| count.as_f64())
        .sum();
    assert_eq!(absent, 8.0, "each of 8 responses has one score");
}

#[test]
fn invalid_rewards_are_refused_before_a_run_starts() {
    let scratch = Scratch::new();
    scratch.refuses(NO_MODEL, 2, &["no reward", "`reward_model_path`, `reward`, `reward_command` and `reward_url`"]);
    for (words, code, expected) in [
        (
            &["--reward", "exact:answer"][..],
            1,
            &["prompts.jsonl: line 1: reward `exact`: ", "`answer`", "found prompt"][..],
        ),
        (
            &["--reward", "accuracy_reward:column=answer,optional=true"],
            1,
            &["reward `accuracy_reward`: expected a row with the column `answer`, found none"],
        ),
        (&["--reward", "exact:answer,optional=1"], 2, &["expected optional=true or optional=false"]),
        (&["--reward", "rhyme"], 2, &["reward = rhyme: expected one of model, command, url, python, length"]),
        (&["--reward", "words:nowhere.txt"], 1, &["nowhere.txt: cannot read"]),
        (&["--reward", "json", "--reward_weights", "model=1"], 2, &["reward_weights = model=1", "there are: json"]),
        (&["--reward_url", "http://me:pass@host/"], 2, &["reward_url = host/", "without a password"]),
        (&["--reward", "model:nowhere"], 1, &["nowhere: ", "no such folder"]),
        (
            &["--reward_model_path", "sentiment-analysis:lvwerra/distilbert-imdb"],
            1,
            &["no such folder", "; give the model alone: --reward_model_path lvwerra/distilbert-imdb"],
        ),
        (
            &["--reward", "json", "--reward_timeout", "0"],
            2,
            &["reward_timeout = 0: expected a number of seconds above 0"],
        ),
        (&["--reward", "json", "--reward_label", "POSITIVE"], 2, &["reward_label = POSITIVE needs reward_model_path"]),
    ] {
        scratch.refuses_with(NO_MODEL, words, code, expected);
    }
    let words = ["--reward", "model:reward", "--output_dir", "reward", "--overwrite_output_dir"];
    scratch.refuses_with(NO_MODEL, &words, 2, &["holds what the run reads"]);
}

#[test]
fn two_reward_models_are_added_each_with_its_own_label_and_weight() {
    let scratch = Scratch::new();
    scratch.copy("sentiment", "distilbert_cls2");
    let words = ["--reward", "mood=model:sentiment#POSITIVE-NEGATIVE", "--reward_weights", "model=0.5,mood=2"];
    let ran = scratch.run_with(PPO, &words);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    for line in scratch.metrics("out") {
        let expected = 0.5 * number(&line, "objective/scores/model") + 2.0 * number(&line, "objective/scores/mood");
        assert!((number(&line, "objective/scores") - expected).abs() < 1e-5);
    }
}

#[test]
fn encoders_of_today_are_rewards_of_a_run_and_read_pairs_of_prompt_and_response() {
    for name in ["deberta_cls1", "modernbert_cls1"] {
        let scratch = Scratch::new();
        scratch.copy("judge", name);
        let index = read_json(&golden().join("models/index.json"));
        let values = Tensors::read(&golden().join("models").join(name).join("golden.safetensors"));
        let pairs = index["models"][name]["pairs"].as_array().unwrap();
        let policy = Tokenizer::from_pretrained(&scratch.path("policy")).unwrap();
        let judge = scratch.path("judge");
        let options = ModelOptions::default();
        let mut model = RewardModel::from_pretrained(&judge, None, None, &policy, 8, options).unwrap();
        model.read_pairs().unwrap();
        let ids: Vec<Vec<i64>> = pairs.iter().map(|pair| policy.encode(pair[0].as_str().unwrap()).unwrap()).collect();
        let row = json!({});
        let inputs: Vec<RewardInput<'_>> = pairs
            .iter()
            .zip(&ids)
            .map(|(pair, ids)| RewardInput {
                prompt: pair[0].as_str().unwrap(),
                response: pair[1].as_str().unwrap(),
                prompt_ids: ids,
                response_ids: &[],
                finish: FinishReason::Stop,
                row: &row,
                episode: None,
            })
            .collect();
        let found: Vec<f32> = model
            .score(&inputs)
            .unwrap()
            .into_iter()
            .map(|score| match score {
                Score::Response(score) => score as f32,
                other => panic!("{other:?}"),
            })
            .collect();
        let expected = values.get("pair.logits").squeeze_dim(1);
        assert_close(name, &tch::Tensor::from_slice(&found), &expected, 2e-5);
        let line = PPO.replace("--reward_model_path reward", "--reward_model_path judge --reward_pair");
        let ran = scratch.run_with(&line, &[]);
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
        assert!(scratch.metrics("out").iter().all(|line| number(line, "objective/scores").is_finite()));
        let line = format!("{REWARD} --model_name_or_path judge --output_dir trained --learning_rate 1e-2");
        scratch.succeeds(&line);
        let losses: Vec<f64> = scratch.metrics("trained").iter().map(|line| number(line, "loss")).collect();
        assert!(losses.iter().all(|loss| loss.is_finite()) && losses[0] != losses[1], "{losses:?}");
        let line = format!(
            "{REWARD} --model_name_or_path judge --output_dir adapter --use_peft --gradient_checkpointing true"
        );
        scratch.succeeds(&line);
        RewardModel::from_pretrained(&scratch.path("adapter"), None, None, &policy, 8, options).unwrap();
    }
    let scratch = Scratch::new();
    scratch.copy("bert", "bert_cls1");
    let refused = "reward_pair = true: expected an encoder with at most one token type";
    scratch.refuses_with(PPO, &["--reward_pair"], 1, &[refused, "a decoder"]);
    let bert = PPO.replace("--reward_model_path reward", "--reward_model_path bert");
    scratch.refuses_with(&bert, &["--reward_pair"], 1, &[refused, "`bert` with 2"]);
    let words = ["--reward", "json", "--reward_pair"];
    scratch.refuses_with(NO_MODEL, &words, 2, &["reward_pair = true has no effect without a reward that is a model"]);
}

#[test]
fn a_signal_ends_the_wait_for_another_attempt_at_once() {
    let scratch = Scratch::new();
    let service = Service::new(|_| (503, "Retry-After: 60\r\n".into(), String::new()));
    let line = PPO.replace("--reward_model_path reward", &format!("--reward_url {}", service.url));
    let mut child = scratch.command(&line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until(&mut child, || !service.asked.lock().unwrap().is_empty());
    let began = Instant::now();
    signal(&child, "INT");
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert!(began.elapsed() < Duration::from_secs(20), "the wait went on");
    assert_eq!(ran.code, 130, "{}", ran.stderr);
    let error = ran.stderr.lines().last().unwrap();
    assert!(
        error.contains("HTTP status 503") && error.contains("not tried again, as the run is asked to end"),
        "{error}"
    );
    assert!(!error.contains("hidden"), "{error}");
}

#[test]
fn a_signal_that_ends_the_program_at_once_ends_reward_programs_and_all_that_they_started() {
    let scratch = Scratch::new();
    scratch.write("slow.sh", "sleep 600 & echo $$ $! > ids; while read row; do sleep 600; done");
    scratch.write("rows.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    let score = "score --tokenizer_name policy --dataset_name rows.jsonl";
    // A run ends at its second signal.
    for (line, signals) in [(score.to_string(), &["TERM"][..]), (NO_MODEL.to_string(), &["INT", "INT"])] {
        let mut run = scratch.command(&line);
        run.args(["--reward_command", "sh slow.sh"]).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = run.spawn().unwrap();
        let ids = || -> Vec<u32> {
            let text = fs::read_to_string(scratch.path("ids")).unwrap_or_default();
            text.split_whitespace().map(|id| id.parse().unwrap()).collect()
        };
        wait_until(&mut child, || ids().len() == 2);
        let programs = ids();
        assert!(programs.iter().all(|&id| runs(id)));
        for (at, name) in signals.iter().enumerate() {
            if at > 0 {
                // Within a second it would be the same request; and signals of one number are not queued.
                std::thread::sleep(Duration::from_millis(1500));
            }
            signal(&child, name);
        }
        let ran = Ran::from(child.wait_with_output().unwrap());
        assert!([130, 143].contains(&ran.code), "{line}: {}: {}", ran.code, ran.stderr);
        wait_for("the programs end", || programs.iter().all(|&id| !runs(id)));
        fs::remove_file(scratch.path("ids")).unwrap();
    }
}
