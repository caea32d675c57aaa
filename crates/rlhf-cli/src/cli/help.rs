//! Help: `-h` shows the most used flags of a command on one screen, `--help` all flags, with these first.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt::Write as _;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Command};
use rlhf::schema::HEADINGS;

use super::fields::fields;

/// The flag that names a configuration file.
const CONFIG: &str = "config";

/// Heading of the most used flags.
const COMMON_HEADING: &str = "Common options";

/// The most used flags of each command: those that it needs, then others.
const COMMON: [(&str, &[&str], &[&str]); 26] = [
    (
        "sft",
        &["model_name_or_path", "dataset_name"],
        &[
            "output_dir",
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
        &["model_name_or_path", "dataset_name"],
        &[
            "output_dir",
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
        "dpo",
        &["model_name_or_path", "dataset_name"],
        &[
            "output_dir",
            "beta",
            "loss_type",
            "num_train_epochs",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "learning_rate",
            "max_length",
            "precompute_ref_log_probs",
            "use_peft",
            "bf16",
            "eval_steps",
            "save_steps",
            "resume_from_checkpoint",
            "config",
        ],
    ),
    (
        "distill",
        &["model_name_or_path", "teacher_model_name_or_path", "dataset_name"],
        &[
            "output_dir",
            "beta",
            "lmbda",
            "seq_kd",
            "temperature",
            "max_completion_length",
            "num_train_epochs",
            "per_device_train_batch_size",
            "learning_rate",
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
        &["sft_model_path", "dataset_name"],
        &[
            "output_dir",
            "reward_model_path",
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
    (
        "grpo",
        &["model_name_or_path", "dataset_name"],
        &[
            "output_dir",
            "reward",
            "num_generations",
            "response_length",
            "temperature",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "num_train_epochs",
            "max_steps",
            "learning_rate",
            "kl_coef",
            "use_peft",
            "bf16",
            "save_steps",
            "report_to",
            "config",
        ],
    ),
    (
        "rloo",
        &["model_name_or_path", "dataset_name"],
        &[
            "output_dir",
            "reward",
            "num_generations",
            "response_length",
            "temperature",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "num_train_epochs",
            "max_steps",
            "learning_rate",
            "kl_coef",
            "use_peft",
            "bf16",
            "save_steps",
            "report_to",
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
        &[],
        &["model_name_or_path", "tokenizer_name", "reward", "dataset_name", "output_file", "batch_size", "config"],
    ),
    (
        "eval",
        &["model_name_or_path", "dataset_name", "output_dir"],
        &[
            "compare",
            "compare_column",
            "reward_model_path",
            "reward",
            "judge_command",
            "judge_url",
            "judge_model",
            "max_judgements",
            "num_prompts",
            "max_new_tokens",
            "num_return_sequences",
            "seed",
            "config",
        ],
    ),
    ("merge", &["output_dir"], &["model_name_or_path", "overwrite_output_dir", "max_shard_size", "config"]),
    ("convert", &[], &["output_file", "outtype", "dtype", "max_shard_size", "config"]),
    ("push", &[], &["private", "revision", "commit_message", "config"]),
    ("report", &[], &["output", "overwrite_output_file", "config"]),
    (
        "chat",
        &[],
        &["compare", "system", "tools", "max_new_tokens", "temperature", "top_p", "seed", "device", "config"],
    ),
    ("session", &[], &["socket", "config"]),
    ("serve", &[], &["port", "host", "max_new_tokens", "batch_size", "dtype", "device", "config"]),
    ("replay", &["update"], &["output_dir"]),
    ("watch", &[], &["terminal", "port", "host", "config"]),
    ("doctor", &[], &["json", "offline", "no_self_test", "config"]),
    ("schema", &[], &["config"]),
    ("completions", &[], &["config"]),
    ("plan", &[], &["memory", "nproc_per_node", "nnodes", "json", "calibrate"]),
    (
        "launch",
        &[],
        &["nproc_per_node", "max_restarts", "nnodes", "node_rank", "master_addr", "master_port", "config_file"],
    ),
];

/// Returns the place of a flag in the help of `command`: the most used ones first, then by heading.
pub(super) fn place(command: &str, flag: &str, heading: Option<&str>) -> (usize, usize) {
    let (_, needed, others) = common(command);
    match needed.iter().chain(*others).chain(&["help"]).position(|name| *name == flag) {
        Some(at) => (0, at),
        // Headings of other systems' flags, which are hidden, come last.
        None => {
            let known = |name: &str| HEADINGS.iter().position(|heading| *heading == name).unwrap_or(HEADINGS.len());
            (1, heading.map_or(0, known))
        }
    }
}

/// Orders the flags of a command for `--help`, the most used ones first, and makes every default visible.
pub(super) fn arranged(command: Command) -> Command {
    let name = command.get_name().to_string();
    let mut flags: Vec<_> = command
        .get_arguments()
        .filter(|arg| !arg.is_positional())
        .map(|arg| (place(&name, arg.get_id().as_str(), arg.get_help_heading()), arg.get_id().to_string()))
        .collect();
    flags.sort_by_key(|(place, _)| *place);
    let order: HashMap<String, (usize, bool)> =
        flags.into_iter().enumerate().map(|(order, ((group, _), id))| (id, (order, group == 0))).collect();
    command.mut_args(|arg| match order.get(arg.get_id().as_str()) {
        Some(&(order, is_common)) => {
            let arg = with_visible_default(arg).display_order(order);
            if is_common { arg.help_heading(COMMON_HEADING) } else { arg }
        }
        None => arg,
    })
}

/// Shows the default of a flag, unless its help describes it.
fn with_visible_default(arg: Arg) -> Arg {
    let help = arg.get_help().map_or(String::new(), ToString::to_string);
    let described = help.contains("[default: ");
    let unset = !arg.is_required_set() && arg.get_default_values().is_empty() && arg.get_action().takes_values();
    if unset && !described && !arg.is_hide_set() {
        arg.help(format!("{} [default: none]", help.trim_end_matches('.')))
    } else {
        arg.hide_default_value(described)
    }
}

/// Returns the names of the commands.
pub(super) fn commands() -> impl Iterator<Item = &'static str> {
    COMMON.iter().map(|(name, ..)| *name)
}

/// Returns the most used flags of a command.
pub(super) fn common_flags(command: &str) -> Vec<&'static str> {
    let (_, needed, others) = common(command);
    needed.iter().chain(*others).copied().collect()
}

/// Returns the row of [`COMMON`] of a command.
fn common(command: &str) -> &'static (&'static str, &'static [&'static str], &'static [&'static str]) {
    COMMON.iter().find(|(name, ..)| *name == command).expect("every command has common flags")
}

/// Returns the text of `-h`, if `error` is the help of a command of `rlhf` and the command line has `-h`.
pub(super) fn short(rlhf: &Command, args: &[OsString], error: &clap::Error) -> Option<String> {
    let first = args.iter().find(|arg| *arg == "-h" || *arg == "--help")?;
    let command = args.get(1).and_then(|name| rlhf.find_subcommand(name))?;
    (error.kind() == ErrorKind::DisplayHelp && first == "-h").then(|| text(command))
}

fn text(command: &Command) -> String {
    let name = command.get_name();
    let (_, needed, others) = common(name);
    let fields = fields(name);
    let words = |flag: &str| match flag {
        CONFIG => "YAML file of settings, by flag name",
        _ => fields.iter().find(|field| field.name == flag).map_or("", |field| field.short),
    };
    let line = |flag: &str| {
        let arg = command.get_arguments().find(|arg| arg.get_id() == flag).expect("it is a flag");
        let alone = arg.is_require_equals_set();
        let value = arg.get_value_names().and_then(|names| names.first()).filter(|_| !alone);
        let default: Vec<&str> = arg.get_default_values().iter().filter_map(|value| value.to_str()).collect();
        let default = match default[..] {
            [one] if !["none", "false"].contains(&one) => format!(" [{one}]"),
            _ => String::new(),
        };
        let long = arg.get_long().unwrap_or(flag);
        let head = value.map_or(format!("--{long}"), |value| format!("--{long} {value}"));
        format!("  {head:<34} {}{default}\n", words(flag))
    };
    let all = command.get_arguments().filter(|arg| !arg.is_hide_set()).count();
    let about = command.get_about().map_or(String::new(), ToString::to_string);
    let place = |arg: &Arg| {
        let name = arg.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str());
        format!(" {name}{}", if matches!(arg.get_action(), ArgAction::Append) { "..." } else { "" })
    };
    let optional = |arg: &Arg| {
        let name = arg.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str());
        format!(" [{name}]{}", if matches!(arg.get_action(), ArgAction::Append) { "..." } else { "" })
    };
    let rest = match command.get_positionals().next() {
        Some(arg) if arg.is_required_set() => command.get_positionals().map(place).collect(),
        Some(_) => command.get_positionals().map(optional).collect(),
        None if ["launch", "plan"].contains(&name) => " COMMAND [ARGUMENTS]...".into(),
        None => String::new(),
    };
    let mut text = format!("rlhf {name} OPTIONS{rest}: {about}\n\n");
    text += if needed.is_empty() { "" } else { "Needed:\n" };
    needed.iter().for_each(|flag| text += &line(flag));
    text += "Often used:\n";
    others.iter().for_each(|flag| text += &line(flag));
    let _ = writeln!(text, "\n`rlhf {name} --help` explains all {all} flags.");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::commands::rlhf_command;
    use crate::cli::testing::parse_words;

    #[test]
    fn the_short_help_of_a_command_is_one_screen_and_starts_with_what_is_needed() {
        for command in rlhf_command().get_subcommands() {
            let name = command.get_name();
            let short = parse_words(&[name, "-h"]).unwrap_err();
            assert!(short.lines().count() <= 24 && short.lines().all(|line| line.chars().count() <= 80), "{short}");
            assert!(short.contains(&format!("`rlhf {name} --help`")), "{short}");
            assert_eq!(short.contains("OPTIONS COMMAND"), ["launch", "plan"].contains(&name), "{short}");
            let long = parse_words(&[name, "--help"]).unwrap_err();
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set() && !arg.is_positional()) {
                let flag = format!("--{}", arg.get_long().unwrap());
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
    fn the_help_of_a_command_starts_with_the_flags_of_its_short_help_and_shows_every_default() {
        for command in rlhf_command().get_subcommands() {
            let name = command.get_name();
            let long = parse_words(&[name, "--help"]).unwrap_err();
            let (_, rest) = long.split_once(&format!("{COMMON_HEADING}:\n")).unwrap();
            assert!(!long.contains("\nOptions:"), "{long}");
            let (_, needed, others) = common(name);
            let flag = |line: &&str| line.trim_start().starts_with("--") || line.trim_start().starts_with("-h");
            let first: Vec<&str> = rest.lines().filter(flag).take(needed.len() + others.len()).collect();
            for (line, flag) in first.iter().zip(needed.iter().chain(*others)) {
                let arg = command.get_arguments().find(|arg| arg.get_id() == *flag).unwrap();
                assert!(line.contains(&format!("--{}", arg.get_long().unwrap())), "{line} is not {flag}");
            }
            let headings = rest.lines().filter(|line| !line.starts_with(' ') && line.ends_with(':'));
            let places: Vec<Option<usize>> = headings
                .filter(|line| !line.starts_with("Example"))
                .map(|line| HEADINGS.iter().position(|heading| *heading == line.trim_end_matches(':')))
                .collect();
            assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{name}: {places:?}");
            let shown = command.get_arguments().filter(|arg| !arg.is_hide_set() && !arg.is_positional());
            for arg in shown.filter(|arg| arg.get_id() != "help" && !arg.is_required_set()) {
                let described = arg.get_help().is_some_and(|help| help.to_string().contains("[default: "));
                let shown = !arg.get_default_values().is_empty() && !arg.is_hide_default_value_set();
                assert!(described != shown, "{name}: --{}", arg.get_id());
            }
        }
    }

    #[test]
    fn help_of_a_command_is_a_command_too() {
        for (words, same) in [(&["help"][..], &["--help"][..]), (&["help", "grpo"], &["grpo", "--help"])] {
            assert_eq!(parse_words(words).unwrap_err(), parse_words(same).unwrap_err());
        }
        assert!(parse_words(&["help", "train"]).unwrap_err().starts_with("unrecognized subcommand 'train'"));
    }

    #[test]
    fn help_fits_a_screen_and_shows_underscores_and_what_is_required() {
        let help = parse_words(&["--help"]).unwrap_err();
        assert!(help.lines().count() <= 42, "{help}");
        let help = parse_words(&["ppo", "--help"]).unwrap_err();
        assert!(help.contains("Usage: rlhf ppo [OPTIONS] --sft_model_path <PATH> --dataset_name <PATH>"), "{help}");
        assert!(help.contains("--learning_rate <X>") && help.contains("[default: 3e-6]"), "{help}");
    }
}
