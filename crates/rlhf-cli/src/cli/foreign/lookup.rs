//! Lookups in the table of other systems' names: the flags that commands accept beside their own, hints for errors, and the descriptions
//! for `rlhf schema`.

use clap::{Arg, ArgAction, Command};
use serde_json::{Value, json};

use super::super::flags::is_named;
use super::super::names;
use super::table::{ALIASES, LISTS, MAPS, Row, SWITCHES, System, TABLE, To};

/// The headings of the added flags, which mark them among a command's flags. Of two systems that have a name, the first one has the flag.
const HEADINGS: [(System, &str); 2] =
    [(System::Trl, "TRL and transformers"), (System::DeepSpeedChat, "DeepSpeed-Chat")];

/// Adds the flags of other systems to a command, hidden from its help. Flags that the command has already are its own.
pub(in crate::cli) fn with_flags(mut command: Command) -> Command {
    let is_there = |command: &Command, name: &str| command.get_arguments().any(|arg| is_named(arg, name));
    let command_name = command.get_name().to_string();
    for (system, heading) in HEADINGS {
        for (name, to) in system.flags_of(&command_name) {
            if !is_there(&command, name) {
                command = command.arg(flag(system, name, to).help_heading(heading));
            }
        }
    }
    ALIASES.iter().fold(command, |command, &(alias, name)| {
        if !is_there(&command, name) || is_there(&command, alias) {
            return command;
        }
        // `mut_arg` would move the flag to the end of the list.
        command.mut_args(|arg| if arg.get_id() == name { arg.alias(alias) } else { arg })
    })
}

fn flag(system: System, name: &'static str, to: To) -> Arg {
    let is_list = LISTS.contains(&name);
    let arg = Arg::new(name).long(name).hide(true);
    let arg = arg.action(if is_list { ArgAction::Append } else { ArgAction::Set });
    match (system, to) {
        (System::DeepSpeedChat, to) => {
            let arg = arg.help(match to {
                To::Is(ours) => format!("{ours}, with --preset deepspeed-chat"),
                _ => "with --preset deepspeed-chat".to_string(),
            });
            match (SWITCHES.contains(&name), is_list) {
                (true, _) => arg
                    .num_args(0..=1)
                    .require_equals(true)
                    .default_missing_value("true")
                    .value_parser(["true", "false", "True", "False"]),
                (false, true) => arg.num_args(if matches!(to, To::Is(_)) { 1.. } else { 0.. }),
                (false, false) => arg.num_args(1).allow_negative_numbers(true),
            }
        }
        _ => arg.help("of TRL or transformers").num_args(0..).allow_negative_numbers(true),
    }
}

/// Returns whether [`with_flags`] added the flag, of any system.
pub(super) fn is_foreign(arg: &Arg) -> bool {
    HEADINGS.iter().any(|(_, heading)| arg.get_help_heading() == Some(heading))
}

/// Returns whether [`with_flags`] added the flag as one of TRL or transformers.
pub(in crate::cli) fn is_added(arg: &Arg) -> bool {
    arg.get_help_heading() == Some(HEADINGS[0].1)
}

/// Returns whether the flag, which [`with_flags`] added, is a list in TRL.
#[cfg(test)]
pub(in crate::cli) fn is_list(arg: &Arg) -> bool {
    LISTS.contains(&arg.get_id().as_str())
}

/// Returns whether the value of the flag is a map, or a list of maps.
pub(in crate::cli) fn takes_map(arg: &Arg) -> bool {
    MAPS.iter().any(|name| arg.get_id() == name)
}

/// Returns whether the flag `name` of `command` is one of DeepSpeed-Chat's.
pub(in crate::cli) fn is_of_chat(command: &str, name: &str) -> bool {
    System::DeepSpeedChat.flag(command, name).is_some()
}

/// Returns true if `value` of `warmup_steps` is a share of the updates, which transformers 5 allows.
pub(in crate::cli) fn is_warmup_ratio(value: &str) -> bool {
    value.parse::<f64>().is_ok_and(|share| share > 0.0 && share < 1.0)
}

/// Returns what to use instead of another system's flag `name`, for an error message about one of these `commands`: it calls settings as
/// they do.
pub(in crate::cli) fn hint(name: &str, commands: &[&Command]) -> Option<String> {
    let are_groups = !commands.is_empty() && commands.iter().all(|command| names::has(command.get_name()));
    let hint = TABLE.iter().find_map(|row| in_row(row, name))?;
    Some(if are_groups { names::renamed_in(&hint, name) } else { hint })
}

fn in_row(row: &Row, name: &str) -> Option<String> {
    let system = row.system.name();
    match row.to {
        _ if !row.names.contains(&name) => None,
        To::Write(ours) => Some(format!("`{name}` is {system}'s: here it is {ours}")),
        To::Nothing(why) => Some(format!("`{name}` is {system}'s, and there is none here: {why}")),
        To::Hint(hint) => Some(hint.into()),
        _ => None,
    }
}

/// Describes the names of TRL and transformers that a command accepts beside its own settings, for `rlhf schema`.
pub(in crate::cli) fn described(command: &Command) -> Vec<Value> {
    let added = |name: &str| command.get_arguments().any(|arg| arg.get_id() == name && is_added(arg));
    let described = System::Trl.flags_of(command.get_name()).filter(|(name, _)| added(name)).map(|(name, to)| {
        let (values, why) = match to {
            To::NoEffect(why) => (None, why),
            To::Only(values, why) => (Some(values), why),
            _ => (None, ""),
        };
        let aliases = ALIASES.iter().filter(|(_, flag)| *flag == name).map(|(alias, _)| *alias);
        json!({
            "name": name,
            "aliases": aliases.collect::<Vec<_>>(),
            "list": LISTS.contains(&name),
            "has_effect": !matches!(to, To::NoEffect(_)),
            "values": values,
            "help": why,
        })
    });
    described.collect()
}

/// Describes all rows of the table, for `rlhf schema`.
pub(in crate::cli) fn rows() -> Vec<Value> {
    let described = TABLE.iter().map(|Row { system, commands, names, to }| {
        let (meaning, here, values, why) = meaning(*to);
        let unless = if let To::IsUnless(_, values) = to { json!(values) } else { Value::Null };
        json!({
            "system": system.name(),
            "kind": system.kind(),
            "commands": commands,
            "names": names,
            "meaning": meaning,
            "here": here,
            "values": values,
            "unless": unless,
            "why": why,
        })
    });
    described.collect()
}

/// Returns the kind of a meaning, our settings, the values that are accepted and their reason or condition.
fn meaning(to: To) -> (&'static str, String, Value, &'static str) {
    match to {
        To::Is(ours) | To::IsUnless(ours, _) => ("same", ours.into(), Value::Null, ""),
        To::IsWithFp16(ours) => ("same", ours.into(), Value::Null, "with fp16"),
        To::Words(ours, words) => {
            let values: serde_json::Map<String, Value> =
                words.iter().map(|(word, value)| ((*word).to_string(), json!(value))).collect();
            ("words", ours.into(), values.into(), "")
        }
        To::Pair(ours) => ("same", ours.join(" and "), Value::Null, ""),
        To::Translated(ours) => ("translated", ours.into(), Value::Null, ""),
        To::NoEffect(why) | To::Ignored(why) => ("no_effect", String::new(), Value::Null, why),
        To::Only(values, why) => ("fixed", String::new(), json!(values), why),
        To::Without(values) => ("noted", String::new(), json!(values), ""),
        To::Write(ours) => ("refused", ours.into(), Value::Null, ""),
        To::Nothing(why) => ("refused", String::new(), Value::Null, why),
        To::Hint(hint) => ("hint", String::new(), Value::Null, hint),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::commands::rlhf_command;
    use crate::cli::keys::Keys;
    use crate::cli::testing::{file_error, least, parse_words, ppo_error};

    #[test]
    fn a_name_of_openrlhf_is_refused_with_ours() {
        for (words, expected) in [
            (
                &["--eps_clip", "0.2"][..],
                "unexpected argument '--eps_clip' found; `eps_clip` is OpenRLHF's: here it is cliprange",
            ),
            (
                &["--actor.dual_clip", "3"],
                "unexpected argument '--actor.dual_clip' found; `actor.dual_clip` is OpenRLHF's: here it is",
            ),
            (
                &["--vllm_num_engines", "2"],
                "unexpected argument '--vllm_num_engines' found; `vllm_num_engines` is OpenRLHF's, and there",
            ),
            (
                &["--actor_learning_rate", "1e-6"],
                "actor_learning_rate is a flag of --preset deepspeed-chat only; `actor_learning_rate`",
            ),
        ] {
            let error = ppo_error(words);
            assert!(error.starts_with(expected) && error.lines().count() == 1, "{error}");
        }
        assert!(file_error("lambd: 1\n").ends_with("`lambd` is OpenRLHF's: here it is lam"));
        let words =
            [&least("grpo")[..], &["--n_samples_per_prompt", "4", "--advantage_estimator", "group_norm"]].concat();
        assert!(parse_words(&words).is_ok());
    }

    #[test]
    fn a_name_that_only_begins_like_one_of_openrlhf_is_not_said_to_be_its() {
        for name in ["vllm_dtype", "wandb_entity", "wandb_log_unique_prompts", "ckpt.best", "actor.num_layers"] {
            let rows = TABLE.iter().filter(|row| row.system == System::OpenRlhf);
            assert_eq!(rows.filter_map(|row| in_row(row, name)).count(), 0, "{name}");
        }
        let error = parse_words(&[&least("grpo")[..], &["--wandb_entity", "team"]].concat()).unwrap_err();
        let expected =
            "unexpected argument '--wandb_entity' found; arguments of a tracker are entries of tracker_kwargs";
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn no_name_of_the_table_is_ours_and_what_it_names_is() {
        let rlhf = rlhf_command();
        let keys = |names: &[&str]| Keys {
            top: names.iter().map(|name| rlhf.find_subcommand(name).unwrap()).collect(),
            sections: Vec::new(),
        };
        // Flags of DeepSpeed-Chat, and words that are no names of settings.
        let chat_flags = ["actor_learning_rate", "critic_learning_rate"];
        let others = ["dr_grpo", "group_norm", "accuracy_reward", "adamw_bf16"];
        let trains = ["sft", "reward", "ppo", "grpo"];
        let systems = [
            (System::OpenRlhf, &["ppo"][..]),
            (System::OpenR1, &trains[..]),
            (System::LlamaFactory, &trains[..]),
            (System::Verl, &trains[..]),
        ];
        for (at, (system, commands)) in systems.into_iter().enumerate() {
            let keys = keys(commands);
            for (name, to) in system.names() {
                assert!(chat_flags.contains(&name) || keys.flag(name).is_none_or(is_foreign), "{name} is a flag");
                let To::Write(ours) = to else { continue };
                // The reason that OpenRLHF's has none here is the first hint.
                let in_other = systems[..at].iter().any(|(other, _)| matches!(other.find(name), Some(To::Write(_))));
                assert!(!in_other, "{name} is in two tables");
                let words = ours.split([' ', ',', ';', ':']);
                let words = words.filter(|word| word.contains('_') && word.to_lowercase() == *word);
                for word in words.filter(|word| !others.contains(word) && !word.starts_with("get_")) {
                    assert!(keys.flag(word).is_some(), "{word} is no flag");
                }
            }
        }
    }

    #[test]
    fn settings_that_the_table_names_are_settings_of_a_command() {
        let rlhf = rlhf_command();
        let is_setting = |name: &str| {
            let mut flags = rlhf.get_subcommands().flat_map(Command::get_arguments);
            flags.any(|arg| is_named(arg, name) && !is_foreign(arg))
        };
        let only_there = [super::super::table::DEEPSPEED_FILE, ""];
        for row in &*TABLE {
            let ours = match row.to {
                To::Is(ours) | To::IsUnless(ours, _) | To::IsWithFp16(ours) | To::Words(ours, _) => vec![ours],
                To::Pair(ours) => ours.to_vec(),
                _ => Vec::new(),
            };
            assert!(ours.iter().all(|name| only_there.contains(name) || is_setting(name)), "{row:?}");
            assert!(row.commands.iter().all(|name| rlhf.find_subcommand(name).is_some()), "{row:?}");
        }
        for (system, _) in HEADINGS {
            for command in rlhf.get_subcommands() {
                let mut seen = std::collections::BTreeSet::new();
                for (name, _) in system.flags_of(command.get_name()) {
                    assert!(seen.insert(name), "{}: {name} is in the table twice", command.get_name());
                }
            }
        }
    }

    #[test]
    fn a_name_of_a_recipe_is_refused_with_the_name_of_the_command() {
        let error = |command: &str, words: &[&str]| parse_words(&[&least(command)[..], words].concat()).unwrap_err();
        for (command, words, expected) in [
            (
                "sft",
                &["--cutoff_len", "5"][..],
                "'--cutoff_len' found; `cutoff_len` is LLaMA-Factory's: here it is max_length of",
            ),
            (
                "grpo",
                &["--val_size", "0.1"],
                "'--val_size' found; `val_size` is LLaMA-Factory's: here it is eval_split_size",
            ),
            ("grpo", &["--eps_clip", "0.1"], "'--eps_clip' found; `eps_clip` is OpenRLHF's: here it is epsilon"),
            (
                "grpo",
                &["--data.max_response_length", "9"],
                "`data.max_response_length` is verl's: here it is max_completion_length",
            ),
            (
                "ppo",
                &["--data.max_response_length", "9"],
                "`data.max_response_length` is verl's: here it is response_length",
            ),
        ] {
            let error = error(command, words);
            assert!(error.contains(expected) && error.lines().count() == 1, "{error}");
        }
        let error = parse_words(&[&least("grpo")[..], &["--reward_funcs", "accuracy", "format"]].concat()).unwrap_err();
        let lines: Vec<&str> = error.lines().collect();
        assert!(lines[0].ends_with("; `accuracy` is open-r1's: here it is accuracy_reward"), "{error}");
        assert!(lines[1].starts_with("reward_funcs = format: ") && lines.len() == 2, "{error}");
    }
}
