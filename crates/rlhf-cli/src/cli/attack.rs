//! Malformed command lines and configuration files: each gives a task or short errors, and nothing panics.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use clap::Command;
use rlhf::rng::{Purpose, Stream};

use super::commands::rlhf_command;
use super::errors::Stop;
use super::parse;

/// Number of cases: `quick`, or N times as many with `RLHF_ATTACK=N`.
fn cases(quick: usize) -> usize {
    let times = std::env::var("RLHF_ATTACK").ok().map(|times| times.parse::<usize>().expect("a number"));
    quick * times.unwrap_or(1).max(1)
}

/// Required flags of a command, so that the malformed part is all that is wrong.
fn base(command: &str) -> &'static str {
    match command {
        "sft" => "--model_name_or_path policy --dataset_name demos.jsonl --output_dir out",
        "reward" => "--model_name_or_path policy --new_reward_head --dataset_name pairs.jsonl --output_dir out",
        "dpo" => "--model_name_or_path policy --dataset_name pairs.jsonl --output_dir out",
        "distill" => {
            "--model_name_or_path policy --teacher_model_name_or_path teacher --dataset_name rows.jsonl --output_dir out"
        }
        "ppo" => "--sft_model_path policy --reward_model_path judge --dataset_name prompts.jsonl --output_dir out",
        "generate" | "logprobs" => "--model_name_or_path policy --dataset_name rows.jsonl",
        "score" => "--model_name_or_path judge --dataset_name rows.jsonl",
        "merge" => "--model_name_or_path policy --output_dir out",
        "eval" => "--model_name_or_path policy --dataset_name rows.jsonl --reward json --output_dir out",
        "convert" => "a.gguf out",
        "report" | "watch" => "run",
        "replay" => "run --update 1",
        "chat" | "serve" => "policy",
        _ => "",
    }
}

/// Draws a number below `n`.
fn roll(draw: &mut Stream, n: usize) -> usize {
    ((draw.uniform() * n as f64) as usize).min(n - 1)
}

fn values() -> Vec<OsString> {
    let long = "x".repeat(100_000);
    let mut values: Vec<OsString> = [
        "",
        " ",
        "-1",
        "0",
        "1",
        "1e999",
        "-1e999",
        "nan",
        "inf",
        "1e-320",
        "0.5",
        "true",
        "none",
        "null",
        "auto",
        "=",
        "a=b",
        "a:b",
        ":",
        ",",
        ",,,",
        "1,2,3",
        "#",
        "%s",
        "../..",
        "/dev/zero",
        "/dev/stdin",
        "\u{1b}[2J",
        "a\nerror: b",
        "\u{202e}x",
        "\u{9b}1m",
        "4294967297",
        "9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "99999999999999999999999999",
        "--",
        "-",
        "--seed",
        "http://me:secret@h/?key=secret",
        "url:http://h/?key=secret",
        "uri:http://h/?key=secret",
        "regex:(",
        "length:target=1e999",
        "words:file=/dev/zero",
        "model:",
        "x=model:#",
        "cuda:99999",
        "1,0,0",
        "0,0,0",
        "999999999999,1,1",
        "std",
        "model=std",
    ]
    .map(OsString::from)
    .into();
    values.push(long.into());
    values.push(OsString::from_vec(b"\xff\xfe".to_vec()));
    values
}

/// Parses a command line and checks its errors; returns whether it is a task.
#[track_caller]
fn check(label: &str, args: Vec<OsString>) -> bool {
    match parse([OsString::from("rlhf")].into_iter().chain(args)) {
        Err(Stop::Error(error)) => {
            let text = error.to_string();
            // One line per refused setting.
            assert!(!text.trim().is_empty() && text.lines().count() < 50, "{label}: {text}");
            for line in text.lines() {
                assert!(line.len() < 4000, "{label}: {} bytes: {line}", line.len());
                assert!(!line.contains(char::is_control), "{label}: {line:?}");
                assert!(!line.contains("=secret") && !line.contains(":secret"), "{label}: {line}");
            }
            false
        }
        // A task, or help.
        _ => true,
    }
}

/// Returns a command line with one to four random flags and values.
fn random_line(draw: &mut Stream, rlhf: &Command, values: &[OsString]) -> Vec<OsString> {
    let commands: Vec<_> = rlhf.get_subcommands().collect();
    let chosen = commands[roll(draw, commands.len())];
    let flags: Vec<_> = chosen.get_arguments().filter_map(|flag| flag.get_long()).collect();
    let mut args: Vec<OsString> =
        [chosen.get_name()].into_iter().chain(base(chosen.get_name()).split(' ')).map(Into::into).collect();
    args.retain(|arg| !arg.is_empty());
    for _ in 0..=roll(draw, 3) {
        let flag = flags[roll(draw, flags.len())];
        let value = values[roll(draw, values.len())].clone();
        // Sometimes a mistyped flag or dashes, and both forms of a value.
        let mut word = format!("--{flag}");
        match roll(draw, 8) {
            0 => drop(word.pop()),
            1 => word = word.replace('_', "-"),
            2 => word = flag.to_string(),
            _ => {}
        }
        let mut word = OsString::from(word);
        if roll(draw, 2) == 0 {
            word.push("=");
            word.push(&value);
            args.push(word);
        } else {
            args.extend([word, value]);
        }
    }
    args
}

#[test]
fn malformed_command_lines_give_a_task_or_short_errors() {
    let command = rlhf_command();
    let values = values();
    let (mut tasks, mut refused) = (0, 0);
    for case in 0..cases(1500) {
        let mut draw = Stream::new(case as u64, Purpose::Samples, 0, 0);
        let args = random_line(&mut draw, command, &values);
        // Devices as configuration files are tested elsewhere, and slow.
        if args.iter().any(|arg| arg.to_string_lossy().starts_with("--config")) {
            continue;
        }
        if check(&format!("case {case}: {args:?}").chars().take(500).collect::<String>(), args) {
            tasks += 1;
        } else {
            refused += 1;
        }
    }
    assert!(tasks > 20 && refused > 200, "{tasks} tasks, {refused} refused");
}

/// Pieces of YAML to insert into a file.
const PIECES: [&str; 30] = [
    "\t",
    "- ",
    ": ",
    "\"",
    "'",
    "&a ",
    "*a",
    "!!binary x",
    "!!python/object:os.system [x]",
    "<<: *a",
    "---\n",
    "...\n",
    "{",
    "[",
    "]",
    "\u{1b}[2J",
    "\u{0}",
    "\r",
    "0x10",
    ".nan",
    "1e999",
    "|\n  x\n",
    "? ",
    "%YAML 9.9\n",
    "\u{9b}",
    "null",
    "~",
    "@",
    "`",
    "#",
];

/// Truncates `text`, removes parts of it, and inserts [`PIECES`].
fn damage(draw: &mut Stream, text: &mut String) {
    for _ in 0..=roll(draw, 3) {
        let mut at = roll(draw, text.len());
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        match roll(draw, 4) {
            0 => text.truncate(at.max(1)),
            1 => {
                let end =
                    (at..text.len()).find(|&end| end > at + 3 && text.is_char_boundary(end)).unwrap_or(text.len());
                text.replace_range(at..end, "");
            }
            2 => text.insert_str(at, &PIECES[roll(draw, PIECES.len())].repeat([1, 1, 1, 5000][roll(draw, 4)])),
            _ => text.insert_str(at, PIECES[roll(draw, PIECES.len())]),
        }
        if text.is_empty() {
            text.push('x');
        }
    }
}

#[test]
fn malformed_configuration_files_give_a_task_or_short_errors() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let whole = "# settings\nsft_model_path: policy\nreward_model_path: judge\ndataset_name: [a.jsonl, b.jsonl]\noutput_dir: out\n\
                 learning_rate: 1e-5\nreward: ['length:target=4', \"regex:a\"]\nkl_coef: 0.1\nbf16: true\nstop_token: eos\n";
    let (mut tasks, mut refused) = (0, 0);
    for case in 0..cases(400) {
        let mut draw = Stream::new(case as u64, Purpose::Samples, 1, 0);
        let mut text = whole.to_string();
        damage(&mut draw, &mut text);
        std::fs::write(file.path(), &text).unwrap();
        let args = ["ppo", "--config", file.path().to_str().unwrap()].map(OsString::from).to_vec();
        if check(&format!("case {case}: {:?}", text.chars().take(400).collect::<String>()), args) {
            tasks += 1;
        } else {
            refused += 1;
        }
    }
    assert!(tasks > 20 && refused > 100, "{tasks} tasks, {refused} refused");
}
