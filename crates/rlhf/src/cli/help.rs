//! The short help of a command, `-h`: one screen of the flags that most runs need, those first without which there is none.

use std::ffi::OsString;
use std::fmt::Write as _;

use clap::Command;
use clap::error::ErrorKind;

/// The flags of a command that are shown: those that it needs, then others.
const SHOWN: [(&str, &[&str], &[&str]); 8] = [
    (
        "sft",
        &["model_name_or_path", "dataset_name", "output_dir"],
        &[
            "num_train_epochs",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "learning_rate",
            "max_length",
            "use_peft",
            "bf16",
            "eval_steps",
            "save_steps",
            "resume_from_checkpoint",
            "seed",
            "config",
        ],
    ),
    (
        "reward",
        &["model_name_or_path", "dataset_name", "output_dir"],
        &[
            "new_reward_head",
            "num_train_epochs",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "learning_rate",
            "max_length",
            "use_peft",
            "bf16",
            "eval_steps",
            "save_steps",
            "resume_from_checkpoint",
            "config",
        ],
    ),
    (
        "ppo",
        &["sft_model_path", "reward_model_path", "dataset_name", "output_dir"],
        &[
            "reward",
            "total_episodes",
            "per_device_train_batch_size",
            "response_length",
            "stop_token",
            "missing_eos_penalty",
            "learning_rate",
            "kl_coef",
            "use_peft",
            "bf16",
            "eval_steps",
            "save_steps",
            "resume_from_checkpoint",
            "config",
        ],
    ),
    ("pipeline", &["config", "output_dir"], &["skip", "resume_from_checkpoint", "overwrite_output_dir"]),
    (
        "generate",
        &["model_name_or_path"],
        &[
            "max_new_tokens",
            "do_sample",
            "temperature",
            "top_p",
            "num_return_sequences",
            "stop_strings",
            "apply_chat_template",
            "dataset_name",
            "output_file",
            "seed",
            "config",
        ],
    ),
    ("logprobs", &["model_name_or_path"], &["temperature", "dataset_name", "output_file", "batch_size", "config"]),
    (
        "score",
        &["model_name_or_path"],
        &["tokenizer_name", "reward", "dataset_name", "output_file", "batch_size", "config"],
    ),
    ("merge", &["model_name_or_path", "output_dir"], &["overwrite_output_dir", "max_shard_size"]),
];

/// What a flag is, in few words.
const WORDS: [(&str, &str); 37] = [
    ("apply_chat_template", "put prompts into the chat template"),
    ("batch_size", "sequences at a time"),
    ("bf16", "compute in bfloat16"),
    ("config", "YAML file of settings, by the flags' names"),
    ("dataset_name", "file, folder or hub name of the rows"),
    ("do_sample", "false: always the likeliest token"),
    ("eval_steps", "evaluate every N updates"),
    ("gradient_accumulation_steps", "passes in one update"),
    ("kl_coef", "weight of the KL penalty"),
    ("learning_rate", "peak learning rate"),
    ("max_length", "tokens of a row, at most"),
    ("max_new_tokens", "tokens of a response, at most"),
    ("max_shard_size", "size of a file of weights, at most"),
    ("missing_eos_penalty", "less score without the stop token"),
    ("model_name_or_path", "folder or hub name of the model"),
    ("new_reward_head", "a model without a score head gets one"),
    ("num_return_sequences", "responses to each prompt"),
    ("num_train_epochs", "passes over the dataset"),
    ("output_dir", "folder for the model and the metrics"),
    ("output_file", "file to write to [standard output]"),
    ("overwrite_output_dir", "replace what the folder holds"),
    ("per_device_train_batch_size", "sequences in one pass"),
    ("response_length", "tokens of a response, at most"),
    ("resume_from_checkpoint", "resume from the newest checkpoint"),
    ("reward", "a rule, program or service: see --help"),
    ("reward_model_path", "reward model, a sequence classifier"),
    ("save_steps", "save a checkpoint every N updates"),
    ("seed", "seed of everything random"),
    ("sft_model_path", "model to train"),
    ("skip", "steps to leave out: sft, reward, ppo"),
    ("stop_strings", "stop with the token that completes it"),
    ("stop_token", "eos: a response ends at its eos"),
    ("temperature", "temperature of the distribution"),
    ("tokenizer_name", "tokenizer of the policy"),
    ("top_p", "sample from this much probability only"),
    ("total_episodes", "responses to train on"),
    ("use_peft", "train low-rank adapters (LoRA)"),
];

/// The short help, where `error` is the help of a command of `rlhf` that `-h` asked for.
pub(super) fn short(rlhf: &Command, args: &[OsString], error: &clap::Error) -> Option<String> {
    let first = args.iter().find(|arg| *arg == "-h" || *arg == "--help")?;
    let command = args.get(1).and_then(|name| rlhf.find_subcommand(name))?;
    (error.kind() == ErrorKind::DisplayHelp && first == "-h").then(|| text(command))
}

fn text(command: &Command) -> String {
    let name = command.get_name();
    let (_, needed, others) = SHOWN.iter().find(|(shown, ..)| *shown == name).expect("every command is shown");
    let words = |flag: &str| WORDS.iter().find(|(word, _)| *word == flag).map_or("", |(_, words)| words);
    let line = |flag: &str| {
        let arg = command.get_arguments().find(|arg| arg.get_id() == flag).expect("it is a flag");
        let alone = arg.is_require_equals_set();
        let value = arg.get_value_names().and_then(|names| names.first()).filter(|_| !alone);
        let default: Vec<&str> = arg.get_default_values().iter().filter_map(|value| value.to_str()).collect();
        let default = match default[..] {
            [one] if !["none", "false"].contains(&one) => format!(" [{one}]"),
            _ => String::new(),
        };
        let head = value.map_or(format!("--{flag}"), |value| format!("--{flag} {value}"));
        format!("  {head:<34} {}{default}\n", words(flag))
    };
    let all = command.get_arguments().filter(|arg| !arg.is_hide_set()).count();
    let about = command.get_about().map_or(String::new(), ToString::to_string);
    let prompts = command.get_positionals().next().map_or("", |_| " [PROMPT]...");
    let mut text = format!("rlhf {name} OPTIONS{prompts}: {about}\n\nNeeded:\n");
    needed.iter().for_each(|flag| text += &line(flag));
    text += "Often used:\n";
    others.iter().for_each(|flag| text += &line(flag));
    let _ = writeln!(text, "\n`rlhf {name} --help` explains all {all} flags.");
    text
}

#[cfg(test)]
mod tests {
    use crate::cli::commands::rlhf_command;
    use crate::cli::testing::parse_words;

    #[test]
    fn the_short_help_of_a_command_is_one_screen_and_begins_with_what_is_needed() {
        for command in rlhf_command().get_subcommands() {
            let name = command.get_name();
            let short = parse_words(&[name, "-h"]).unwrap_err();
            assert!(short.lines().count() <= 24 && short.lines().all(|line| line.chars().count() <= 80), "{short}");
            assert!(short.contains(&format!("`rlhf {name} --help`")), "{short}");
            let long = parse_words(&[name, "--help"]).unwrap_err();
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set() && !arg.is_positional()) {
                let flag = format!("--{}", arg.get_id());
                assert!(long.contains(&flag), "rlhf {name} --help has no {flag}");
                let (needed, _) = short.split_once("Often used:").unwrap();
                assert!(!arg.is_required_set() || needed.contains(&flag), "{short}");
            }
            for line in short.lines().filter(|line| line.starts_with("  --")) {
                let flag = line.split_whitespace().next().unwrap();
                assert!(long.contains(flag) && line.chars().nth(37).is_some_and(|c| c != ' '), "{line}");
            }
        }
    }

    #[test]
    fn help_fits_a_screen_and_shows_underscores_and_what_is_required() {
        let help = parse_words(&["--help"]).unwrap_err();
        assert!(help.lines().count() <= 27, "{help}");
        let help = parse_words(&["ppo", "--help"]).unwrap_err();
        assert!(help.contains("Usage: rlhf ppo [OPTIONS] --sft_model_path <PATH> --dataset_name <PATH>"), "{help}");
        assert!(help.contains("--learning_rate <X>") && help.contains("[default: 3e-6]"), "{help}");
    }
}
