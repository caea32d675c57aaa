//! Parses command lines and configuration files for tests.

use std::ffi::OsString;

use rlhf::settings::PpoConfig;

use super::{Parsed, Stop, Task, parse};

pub(super) const PPO: [&str; 9] = [
    "ppo",
    "--sft_model_path",
    "policy",
    "--reward_model_path",
    "judge",
    "--dataset_name",
    "prompts.jsonl",
    "--output_dir",
    "out",
];

pub(super) fn parse_words(words: &[&str]) -> Result<Task, String> {
    parsed(words).map(|parsed| parsed.task)
}

pub(super) fn parsed(words: &[&str]) -> Result<Parsed, String> {
    parse(["rlhf"].iter().chain(words).map(OsString::from)).map_err(|stop| match stop {
        Stop::Help(help) => help.to_string(),
        Stop::ShortHelp(text) => text,
        Stop::Error(error) => error.to_string(),
    })
}

#[track_caller]
pub(super) fn ppo(words: &[&str]) -> PpoConfig {
    match parse_words(&[&PPO[..], words].concat()).unwrap() {
        Task::Ppo(config) => config,
        task => panic!("not ppo: {task:?}"),
    }
}

#[track_caller]
pub(super) fn ppo_error(words: &[&str]) -> String {
    parse_words(&[&PPO[..], words].concat()).unwrap_err()
}

/// Parses `words` with a configuration file that holds `text`. In errors its path is replaced by `run.yaml`.
pub(super) fn with_file(text: &str, words: &[&str]) -> Result<Task, String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let path = file.path().to_str().unwrap();
    parse_words(&[words, &["--config", path]].concat()).map_err(|error| error.replace(path, "run.yaml"))
}

#[track_caller]
pub(super) fn file_error(text: &str) -> String {
    with_file(text, &PPO).unwrap_err()
}

/// Returns the shortest valid command line of a command.
pub(super) fn least(command: &str) -> Vec<&str> {
    match command {
        "ppo" => PPO.to_vec(),
        "merge" => vec!["merge", "--model_name_or_path", "m", "--output_dir", "o"],
        "eval" => {
            vec![command, "--model", "m", "--dataset_name", "d", "--reward", "json", "--output_dir", "o"]
        }
        "convert" => vec![command, "a.gguf", "o"],
        "report" | "watch" => vec![command, "run"],
        "replay" => vec![command, "run", "--update", "1"],
        "completions" => vec![command, "bash"],
        "chat" | "serve" => vec![command, "policy"],
        "launch" | "doctor" | "schema" | "session" => vec![command],
        "plan" => [&["plan"], &PPO[..]].concat(),
        "distill" => {
            let teacher = ["--teacher_model_name_or_path", "t"];
            [&[command, "--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"], &teacher[..]].concat()
        }
        "sft" | "reward" | "dpo" | "grpo" | "rloo" => {
            vec![command, "--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
        }
        _ => vec![command, "--model_name_or_path", "m"],
    }
}
