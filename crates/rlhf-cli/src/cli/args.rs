//! The words of the command line: normalized, and parsed by clap as often as it takes to report every error at once.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use rlhf::schema::{Refusals, is_bool};
use rlhf::{Origin, Result};

use super::errors::{Stop, nearest, one_line, refusal, with_refusals};
use super::flags::{NOT_SETTINGS, is_named};
use super::{foreign, help};

/// Replaces dashes in flag names by underscores, and `--flag true` by `--flag=true` where the flag may also stand alone.
///
/// Values, and all words after `--`, are not changed.
pub(super) fn normalize(args: impl IntoIterator<Item = OsString>, rlhf: &Command) -> Vec<OsString> {
    let flags = || rlhf.get_subcommands().flat_map(Command::get_arguments);
    let flag = |name: &str| {
        let with_name = || flags().filter(|a| a.get_long() == Some(name));
        // A name of TRL in one command may be a switch of another.
        let switch = with_name().find(|a| a.is_require_equals_set());
        switch.or_else(|| with_name().next()).or_else(|| flags().find(|a| is_named(a, name)))
    };
    let mut args = args.into_iter().peekable();
    let mut normal = Vec::new();
    while let Some(arg) = args.next() {
        let Some(text) = arg.to_str().and_then(|text| text.strip_prefix("--")) else {
            normal.push(arg);
            continue;
        };
        if text.is_empty() {
            normal.push(arg);
            normal.extend(args);
            break;
        }
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        let name = name.replace('-', "_");
        let follows = value.or_else(|| args.peek().and_then(|next| next.to_str()));
        let is_ratio = name == "warmup_steps" && follows.is_some_and(foreign::is_warmup_ratio);
        let name = if is_ratio { "warmup_ratio".into() } else { name };
        let mut word = OsString::from(format!("--{name}"));
        if let Some(value) = value {
            word.push("=");
            word.push(value);
        } else if let Some(flag) = flag(&name).filter(|flag| flag.is_require_equals_set())
            && let Some(value) = args.next_if(|next| next.to_str().is_some_and(|next| refusal(flag, next).is_none()))
        {
            word.push("=");
            word.push(value);
        }
        normal.push(word);
    }
    normal
}

/// Parses the command line with no required flags, as the configuration file may have them. Flags that cannot be parsed are removed
/// from `args` and refused.
///
/// # Errors
/// Help, or an error that is about no single flag.
pub(super) fn parse_flags(
    rlhf: &Command,
    args: &mut Vec<OsString>,
    refusals: &mut Refusals,
) -> Result<ArgMatches, Stop> {
    let lenient = rlhf.clone().mut_subcommands(|command| command.mut_args(|arg| arg.required(false)));
    loop {
        let error = match lenient.clone().try_get_matches_from(&*args) {
            Ok(matches) => return Ok(matches),
            Err(error) => error,
        };
        if !remove_refused(args, &error, rlhf, refusals) {
            // Help and errors are worded for the command with its requirements.
            let error = rlhf.clone().try_get_matches_from(&*args).err().unwrap_or(error);
            return Err(match help::short(rlhf, args, &error) {
                Some(text) => Stop::ShortHelp(text),
                None => with_refusals(std::mem::take(refusals), error),
            });
        }
    }
}

/// Parses the command line with `command`. Required flags that are missing are refused; then the command that `relaxed` returns parses
/// the line.
pub(super) fn parse_matches(
    command: &Command,
    args: &[OsString],
    refusals: &mut Refusals,
    relaxed: impl Fn(Command) -> Command,
) -> Result<ArgMatches, Stop> {
    let error = match command.clone().try_get_matches_from(args) {
        Ok(matches) => return Ok(matches),
        Err(error) if error.kind() == ErrorKind::MissingRequiredArgument => error,
        Err(error) => return Err(with_refusals(std::mem::take(refusals), error)),
    };
    if let Some(ContextValue::Strings(missing)) = error.get(ContextKind::InvalidArg) {
        let missing = missing.iter().filter(|flag| !refusals.has(flag_name(flag)));
        let missing: Vec<&str> = missing.map(String::as_str).collect();
        if !missing.is_empty() {
            let line = format!("the following required arguments were not provided: {}", missing.join(", "));
            // A positional argument is also refused by its id: the checks of its placeholder value call it so.
            let subcommand = args.get(1).and_then(|name| command.find_subcommand(name));
            let positionals = subcommand.into_iter().flat_map(Command::get_positionals);
            let ids = positionals.filter(|arg| missing.contains(&&*arg.to_string())).map(|arg| arg.get_id().as_str());
            refusals.refuse(line, missing.iter().map(|flag| flag_name(flag)).chain(ids));
        }
    }
    Ok(relaxed(command.clone()).try_get_matches_from(args)?)
}

/// Makes a required flag optional, with "." as its value, or its first choice.
pub(super) fn not_required(arg: Arg) -> Arg {
    if !arg.is_required_set() {
        return arg;
    }
    let first = arg.get_possible_values().first().map_or_else(|| ".".into(), |choice| choice.get_name().to_string());
    arg.required(false).default_value(first)
}

/// Removes the flag that `error` is about, with its values, from the command line and refuses it, so that the next parse finds
/// further errors. Returns `false` if the error is about no flag.
fn remove_refused(args: &mut Vec<OsString>, error: &clap::Error, rlhf: &Command, refusals: &mut Refusals) -> bool {
    let Some(ContextValue::String(shown)) = error.get(ContextKind::InvalidArg) else { return false };
    let Some(command) = args.get(1).and_then(|name| rlhf.find_subcommand(name)) else { return false };
    let name = flag_name(shown);
    let known = command.get_arguments().find(|arg| is_named(arg, name));
    let is_flag = shown.starts_with("--");
    // `Some` if a word of the command line is the flag: true if it holds its value too.
    let as_flag = |word: &OsString| {
        let text = word.to_str()?;
        if !is_flag {
            return (text == shown.as_str()).then_some(true);
        }
        let text = text.strip_prefix("--")?;
        let (head, value) = text.split_once('=').map_or((text, false), |(head, _)| (head, true));
        (head == name || known.is_some_and(|arg| is_named(arg, head))).then_some(value)
    };
    let before = args.len();
    let end = args.iter().position(|word| word == "--").unwrap_or(args.len());
    let mut kept: Vec<OsString> = Vec::new();
    let mut words = args.drain(..).enumerate().peekable();
    while let Some((at, word)) = words.next() {
        // A word without a flag may also be the value of a flag before it.
        let is_candidate =
            at > 1 && at < end && (is_flag || !kept.last().is_some_and(|last| takes_next_word(command, last)));
        let Some(whole) = (if is_candidate { as_flag(&word) } else { None }) else {
            kept.push(word);
            continue;
        };
        let most = known.and_then(Arg::get_num_args).map_or(usize::MAX, |count| count.max_values());
        let most = if whole || known.is_some_and(Arg::is_require_equals_set) { 0 } else { most.max(1) };
        let is_value = |word: &OsString| !word.to_str().is_some_and(|text| text.starts_with("--"));
        for _ in 0..most {
            if words.next_if(|(at, word)| *at < end && is_value(word)).is_none() {
                break;
            }
        }
    }
    drop(words);
    *args = kept;
    if args.len() == before {
        return false;
    }
    let (line, about) = match (error.kind(), is_flag) {
        (ErrorKind::UnknownArgument, true) => unknown_flag(name, rlhf, command),
        _ => (one_line(error), known.map(|arg| arg.get_id().to_string()).into_iter().collect()),
    };
    refusals.refuse(line, about);
    true
}

/// Returns whether `word` is a flag of `command` whose value is the next word.
fn takes_next_word(command: &Command, word: &OsString) -> bool {
    let Some(name) = word.to_str().and_then(|text| text.strip_prefix("--")) else { return false };
    let flag = command.get_arguments().find(|arg| is_named(arg, name));
    flag.is_some_and(|flag| flag.get_action().takes_values() && !flag.is_require_equals_set())
}

/// Returns the line for a flag `name` that `command` does not have, and the arguments that are meant, if one is near.
fn unknown_flag(name: &str, rlhf: &Command, command: &Command) -> (String, Vec<String>) {
    let positionals: Vec<&Arg> = command.get_positionals().collect();
    let is_meant = |arg: &&Arg| arg.get_id() == name || (arg.get_id() == "model" && name == "model_name_or_path");
    if positionals.iter().any(is_meant) {
        // The words after it were taken for its values.
        let shown: Vec<String> = positionals.iter().map(ToString::to_string).collect();
        let usage = format!("rlhf {} {}", command.get_name(), shown.join(" "));
        let line = format!("unexpected argument '--{name}' found; tip: this command has no flag for it: {usage}");
        let ids = positionals.iter().map(|arg| arg.get_id().to_string());
        return (line, ids.chain(shown).collect());
    }
    let is_shown = |arg: &&Arg| !arg.is_hide_set() || NOT_SETTINGS.contains(&arg.get_id().as_str());
    let flags = command.get_arguments().filter(is_shown).filter_map(Arg::get_long);
    let hint = foreign::hint(name, &[command]).or_else(|| elsewhere(name, rlhf, command));
    let near = nearest(name, flags).filter(|_| hint.is_none());
    let tip = match (hint, near) {
        (Some(hint), _) => format!("; {hint}"),
        (None, Some(near)) => format!("; tip: a similar argument exists: '--{near}'"),
        (None, None) => String::new(),
    };
    (format!("unexpected argument '--{name}' found{tip}"), near.map(str::to_string).into_iter().collect())
}

/// Returns a hint where `name` is no flag of `command`, but one that users expect there.
fn elsewhere(name: &str, rlhf: &Command, command: &Command) -> Option<String> {
    let has = |command: &Command, name: &str| command.get_arguments().any(|arg| is_named(arg, name));
    let command_name = command.get_name();
    if (command_name, name) == ("replay", "config") {
        return Some("replay has the settings of the run, which its flags change".into());
    }
    // transformers has a flag `--no_NAME` for each flag that is on by default.
    let is_switch = |arg: &&Arg| arg.get_value_names().is_some_and(|names| names.iter().any(|name| name == "BOOL"));
    let switch = |flag: &&str| command.get_arguments().filter(is_switch).any(|arg| is_named(arg, flag));
    if let Some(flag) = name.strip_prefix("no_").filter(switch) {
        return Some(format!("write --{flag} false"));
    }
    // Commands that read rows can be planned or started as ranks.
    let outer: Vec<&Command> = ["launch", "plan"].iter().filter_map(|outer| rlhf.find_subcommand(outer)).collect();
    let outer: Vec<&str> = outer.into_iter().filter(|outer| has(outer, name)).map(Command::get_name).collect();
    let first = outer.first().filter(|_| has(command, "dataset_name"))?;
    Some(format!(
        "flags of {} come before the command: rlhf {first} --{name} ... {command_name} ...",
        outer.join(" and ")
    ))
}

/// Returns the name of a flag as clap prints it (`--seed <N>`: `seed`), and an argument without a flag as it is (`<MODEL>`).
fn flag_name(shown: &str) -> &str {
    if shown.starts_with('<') {
        return shown;
    }
    let name = shown.trim_start_matches('-');
    name.split([' ', '=', '[', '<']).next().unwrap_or_default()
}

/// Makes errors call the flags of `command` as they are written on the command line `args`, which may be by an alias.
pub(super) fn call_as_written(command: &Command, args: &[OsString], refusals: &mut Refusals) {
    let words = args.iter().take_while(|word| *word != "--").filter_map(|word| word.to_str()?.strip_prefix("--"));
    for name in words.filter_map(|word| word.split('=').next()) {
        if let Some(arg) = command.get_arguments().find(|arg| is_named(arg, name)) {
            refusals.call(arg.get_id().as_str(), name, Origin::Flag);
        }
    }
}

/// Returns whether the flag `name` is on the command line.
pub(super) fn on_line(flags: &ArgMatches, name: &str) -> bool {
    flags.try_contains_id(name).is_ok() && flags.value_source(name) == Some(ValueSource::CommandLine)
}

/// Splits the words of `rlhf NAME FLAGS COMMAND ARGUMENTS` before the command: one of `commands`, or the first word that is neither a flag
/// nor a value. A `--` before it is left out. The word after a flag is its value; after one of the flags `alone`, only if it is yes or no.
pub(super) fn split_at_command(
    mut args: Vec<OsString>,
    alone: &[&str],
    commands: &[&str],
) -> (Vec<OsString>, Vec<OsString>) {
    let mut at = 2;
    while let Some(word) = args.get(at).map(|word| word.to_string_lossy()) {
        if word == "--" {
            let command = args.split_off(at + 1);
            args.pop();
            return (args, command);
        }
        if !word.starts_with('-') {
            break;
        }
        let next = args.get(at + 1).and_then(|next| next.to_str()).unwrap_or_default();
        let has_value = if alone.contains(&&*word) {
            is_bool(next)
        } else {
            word.starts_with("--") && !word.contains('=') && !commands.contains(&next)
        };
        at += if has_value { 2 } else { 1 };
    }
    let command = args.split_off(at.min(args.len()));
    (args, command)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use clap::Command;
    use clap::builder::ValueParser;
    use rlhf::rl::math::ScorePosition;
    use rlhf::settings::{PpoConfig, SftConfig};

    use crate::cli::commands::rlhf_command;
    use crate::cli::testing::{least, parse_words, ppo, ppo_error, with_file};
    use crate::cli::{Task, foreign};

    #[test]
    fn a_flag_name_may_have_dashes_and_values_keep_theirs() {
        assert_eq!(ppo(&["--num-mini-batches", "2", "--kl_coef=0.5"]).num_mini_batches, 2);
        assert_eq!(ppo(&["--score-position=last_token"]).score_position, ScorePosition::LastToken);
        assert_eq!(ppo(&["--value-model-path", "my-value-model"]).value_model_path, Some("my-value-model".into()));
        assert_eq!(ppo(&["--value-model-path=--a-b=c-d"]).value_model_path, Some("--a-b=c-d".into()));
        let task =
            parse_words(&["generate", "--model-name-or-path", "m", "--", "--a-b", "--ignore_eos", "true"]).unwrap();
        let Task::Generate(config) = task else { panic!("{task:?}") };
        assert_eq!(config.prompts, ["--a-b", "--ignore_eos", "true"]);
        assert!(!config.ignore_eos);
    }

    #[test]
    fn a_yes_or_no_flag_stands_alone_or_takes_a_word_in_any_case() {
        for words in [
            &["--whiten_rewards"][..],
            &["--whiten-rewards", "true"],
            &["--whiten_rewards=YES"],
            &["--whiten_rewards", "1"],
        ] {
            assert!(ppo(words).whiten_rewards, "{words:?}");
        }
        for words in [&["--whiten_rewards=False"][..], &["--whiten_rewards", "no"], &["--whiten_rewards", "0"]] {
            assert!(!ppo(words).whiten_rewards, "{words:?}");
        }
        assert_eq!(
            ppo_error(&["--whiten_rewards=maybe"]),
            "invalid value 'maybe' for '--whiten_rewards[=<BOOL>]': expected true or false"
        );
    }

    #[test]
    fn an_alias_of_a_yes_or_no_flag_takes_a_word_too() {
        let words = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"];
        for (value, expected) in [("True", true), ("false", false)] {
            let task = parse_words(&[&["sft"][..], &words, &["--activation_checkpointing", value]].concat()).unwrap();
            let Task::Sft(config) = task else { panic!("{task:?}") };
            assert_eq!(config.run.gradient_checkpointing, expected, "{value}");
        }
    }

    #[test]
    fn a_word_that_belongs_to_no_flag_is_one_error_though_a_value_is_the_same() {
        assert_eq!(ppo_error(&["--learning-rate", "1e-5", "1e-5"]), "unexpected argument '1e-5' found");
        assert_eq!(ppo_error(&["x", "--run_name", "x", "x"]), "unexpected argument 'x' found");
        assert_eq!(ppo_error(&["--whiten_rewards", "x"]), "unexpected argument 'x' found");
    }

    #[test]
    fn a_missing_argument_is_one_error_without_those_of_its_placeholder() {
        assert_eq!(
            parse_words(&["push", "llama"]).unwrap_err(),
            "the following required arguments were not provided: <NAME>"
        );
    }

    #[test]
    fn a_prompt_after_a_yes_or_no_flag_stays_a_prompt() {
        let task = parse_words(&["generate", "--model_name_or_path", "m", "--ignore_eos", "The film was"]).unwrap();
        let Task::Generate(config) = task else { panic!("{task:?}") };
        assert!(config.ignore_eos);
        assert_eq!(config.prompts, ["The film was"]);
    }

    #[test]
    fn a_flag_of_many_values_takes_one_value_so_that_a_prompt_stays_a_prompt() {
        let words =
            ["--stop_token_ids", "1,2", "--stop_token_ids", "3", "--stop_strings", "a,b", "--stop_strings", "c"];
        let task = parse_words(&[&["generate", "--model", "m"], &words[..], &["The film"]].concat()).unwrap();
        let Task::Generate(config) = task else { panic!("{task:?}") };
        assert_eq!((config.responses.stop_token_ids, config.prompts), (vec![1, 2, 3], vec!["The film".to_string()]));
        assert_eq!(config.responses.stop_strings, ["a,b", "c"]);
    }

    #[test]
    fn zero_turns_clipping_off_and_minus_one_steps_are_no_limit_as_in_trl() {
        assert_eq!(ppo(&["--max_grad_norm", "0"]).optimizer.max_grad_norm, None);
        assert_eq!(ppo(&["--max_grad_norm", "1.0"]).optimizer.max_grad_norm, Some(1.0));
        let words = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o", "--max_steps", "-1"];
        let task = parse_words(&[&["sft"][..], &words].concat()).unwrap();
        assert_eq!(task, Task::Sft(SftConfig::new("m", "d", "o")));
    }

    #[test]
    fn lora_targets_are_separate_words_as_in_trl_or_separated_by_commas() {
        for words in [&["q_proj", "v_proj", "--use_peft"][..], &["q_proj,v_proj", "--use_peft"]] {
            let config = ppo(&[&["--lora_target_modules"], words].concat());
            assert_eq!(
                (config.peft.use_peft, config.peft.lora_target_modules),
                (true, vec!["q_proj".into(), "v_proj".into()])
            );
        }
    }

    #[test]
    fn rewards_keep_their_commas_and_their_settings_are_split_at_them() {
        let words = ["--reward", "length:target=40,unit=words", "--reward", "regex:a,b", "--reward_weights"];
        let config = ppo(&[&words[..], &["model=1,length=0.1", "--reward_clip=5"]].concat());
        assert_eq!(config.rewards.reward, ["length:target=40,unit=words", "regex:a,b"]);
        assert_eq!(config.rewards.reward_weights, ["model=1", "length=0.1"]);
        assert_eq!(config.rewards.reward_clip, ["5"]);
        assert!(ppo_error(&["--reward", "rhyme:x"]).starts_with("reward = rhyme...: expected one of model, command"));
    }

    #[test]
    fn several_datasets_are_separate_words_or_a_list() {
        let names = |config: &PpoConfig| {
            config.data.dataset_name.iter().map(|name| name.display().to_string()).collect::<Vec<_>>()
        };
        let rest = ["ppo", "--sft_model_path", "s", "--reward_model_path", "r", "--output_dir", "o"];
        let datasets = ["--dataset_name", "a.jsonl", "b", "--dataset_weights", "0.7", "0.3"];
        let Task::Ppo(config) = parse_words(&[&rest[..], &datasets].concat()).unwrap() else { panic!() };
        assert_eq!((names(&config), config.data.dataset_weights), (vec!["a.jsonl".into(), "b".into()], vec![0.7, 0.3]));
        for (text, expected) in [
            ("dataset_name: [a, b]\ndataset_weights: [1, 2.5]\n", &["a", "b"][..]),
            ("dataset_name: a\ndataset_weights: 3\n", &["a"]),
            ("dataset_name:\n- 'a'\ndataset_weights:\n", &["a"]),
        ] {
            let Task::Ppo(config) = with_file(text, &rest).unwrap() else { panic!() };
            assert_eq!(names(&config), expected, "{text}");
        }
        let no_list = "`: expected a text or a list of texts, found something else";
        for (text, message) in [
            ("dataset_name: {a: 1}\n", format!("run.yaml:1: `dataset_name{no_list}")),
            ("dataset_name: [a, [b]]\n", format!("run.yaml:1: `dataset_name{no_list}")),
            (
                "dataset_name: [a, b]\ndataset_weights: [1, x]\n",
                "run.yaml:2: `dataset_weights`: expected a number, found `x`".into(),
            ),
        ] {
            assert_eq!(with_file(text, &rest).unwrap_err(), message);
        }
        for (words, message) in [
            (
                &["--dataset_weights", "1", "2"][..],
                "numbers in dataset_weights = 2: expected one for each of the datasets, which are 1",
            ),
            (&["--dataset_weights", "0"], "dataset_weights = 0: expected a number above 0"),
            (
                &["--eval_split_size", "1.5"],
                "eval_split_size = 1.5: expected a share below 1, or a whole number of rows",
            ),
            (&["--max_prompt_length", "0"], "max_prompt_length = 0: expected at least 1"),
        ] {
            assert_eq!(ppo_error(words), message);
        }
    }

    #[test]
    fn of_a_repeated_flag_the_last_value_counts_and_a_list_has_all() {
        assert_eq!(ppo(&["--seed", "1", "--seed", "2"]).run.seed, 2);
        let config = ppo(&["--dataset_name", "b", "c", "--dataset_weights", "1,2", "--dataset_weights", "3"]);
        assert_eq!(config.data.dataset_name, ["prompts.jsonl", "b", "c"].map(PathBuf::from));
        assert_eq!(config.data.dataset_weights, [1.0, 2.0, 3.0]);
        let words = [&least("grpo")[..], &["--reward_funcs", "json", "--reward_funcs", "length:9"]].concat();
        let Task::Ppo(config) = parse_words(&words).unwrap() else { panic!() };
        assert_eq!(config.rewards.reward, ["json", "length:9"]);
    }

    #[test]
    fn each_list_flag_of_each_command_has_the_values_of_all_its_places() {
        let rlhf = rlhf_command();
        let mut lists = 0;
        for command in rlhf.get_subcommands() {
            for arg in command.get_arguments().filter(|arg| arg.get_action().takes_values()) {
                let several = arg.get_value_delimiter().is_some()
                    || arg.get_num_args().is_some_and(|count| count.max_values() > 1);
                // Flags of TRL take any number of words, so that all of them are in the error that refuses them.
                let is_list = if foreign::is_added(arg) { foreign::is_list(arg) } else { several };
                let Some(long) = arg.get_long().filter(|_| is_list) else { continue };
                // The values of its own parser are not the same for all.
                let text = arg.clone().required(false).value_parser(ValueParser::os_string());
                let probe = Command::new("probe").no_binary_name(true).args_override_self(true).arg(text);
                let flag = format!("--{long}");
                let matches = probe.try_get_matches_from([flag.as_str(), "1", flag.as_str(), "2"]).unwrap();
                let count = matches.get_raw(arg.get_id().as_str()).unwrap().count();
                assert_eq!(count, 2, "rlhf {} {flag}", command.get_name());
                lists += 1;
            }
        }
        assert!(lists > 60, "{lists}");
    }
}
