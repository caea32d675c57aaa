//! Errors of a command line or a configuration file, and how they are worded.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};
use rlhf::Error;
use rlhf::schema::Refusals;

use super::help;

/// Reasons for which parsing returns no task.
#[derive(Debug)]
pub(crate) enum Stop {
    /// `--help` or `--version`.
    Help(clap::Error),
    /// `-h`: the most used flags.
    ShortHelp(String),
    /// The command line or the configuration file is wrong.
    Error(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Error(error)
    }
}

impl From<clap::Error> for Stop {
    fn from(error: clap::Error) -> Self {
        match error.kind() {
            ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Stop::Help(error),
            _ => Stop::Error(Error::Usage(one_line(&error))),
        }
    }
}

/// Messages for the user, collected while the settings are read.
#[derive(Debug, Default)]
pub(super) struct Messages {
    pub(super) refusals: Refusals,
    /// Lines to print before the task starts.
    pub(super) notes: Vec<String>,
}

/// Returns all `refusals` with `error` as the last of them.
pub(super) fn with_refusals(mut refusals: Refusals, error: clap::Error) -> Stop {
    let stop = Stop::from(error);
    match stop {
        Stop::Error(Error::Usage(line)) if !refusals.is_empty() => {
            refusals.refuse(line, [""; 0]);
            refusals.end().expect_err("there are some").into()
        }
        other => other,
    }
}

/// Returns the error for the command `name` of the Python package, which this program does not have.
pub(super) fn python_package_command(name: &OsString) -> Option<Error> {
    let instead = match name.to_str()? {
        "demo" => "in a checkout, `make demo` does the same",
        "setup" => "this program was built with its libtorch and needs no set-up",
        _ => return None,
    };
    let name = name.to_string_lossy();
    Some(Error::Usage(format!("unrecognized subcommand '{name}'; it is a command of the Python package: {instead}")))
}

/// Returns what to write in place of `word`, if it is a script of TRL.
pub(super) fn script_of_trl(word: &str) -> Option<String> {
    let name = Path::new(word).file_name()?.to_str()?.strip_suffix(".py")?;
    let scripts = [
        ("ppo", "ppo"),
        ("sft", "sft"),
        ("reward", "reward"),
        ("dpo", "dpo"),
        ("grpo", "grpo"),
        ("rloo", "rloo"),
        ("gkd", "distill"),
        ("distillation", "distill"),
    ];
    let (_, command) = scripts.iter().find(|(script, _)| name.starts_with(script))?;
    Some(format!("{word} is a script of Python: write {command} in its place, with the same flags"))
}

/// Trainers that are not here, by the names of their commands, and the systems that have them: TRL 1.16, or an earlier version.
const NO_TRAINERS: [(&[&str], &str); 2] =
    [(&["cpo", "kto", "online_dpo", "orpo"], "TRL"), (&["bco", "minillm", "nash_md", "prm", "xpo"], "TRL 1.11")];

/// Returns the error for the command `name` of a trainer that is not here, or that is a script.
pub(super) fn no_trainer(name: &OsString) -> Option<Error> {
    let name = name.to_str()?;
    if let Some(hint) = script_of_trl(name) {
        return Some(Error::Usage(format!("unrecognized subcommand '{name}'; {hint}")));
    }
    let plain = name.to_ascii_lowercase().replace('-', "_");
    if ["gkd", "distillation"].contains(&plain.as_str()) {
        return Some(Error::Usage(format!(
            "unrecognized subcommand '{name}'; write distill in its place, with the same flags"
        )));
    }
    let (_, systems) = NO_TRAINERS.iter().find(|(names, _)| names.contains(&plain.as_str()))?;
    let trainer = plain.to_ascii_uppercase().replace('_', " ");
    Some(Error::Usage(format!("unrecognized subcommand '{name}'; there is no {trainer} here: take {systems} for it")))
}

/// Returns what `arg` expects, if it does not accept `value`.
pub(super) fn refusal(arg: &Arg, value: &str) -> Option<String> {
    let probe = Arg::new("value").value_parser(arg.get_value_parser().clone());
    let error = Command::new("probe").no_binary_name(true).arg(probe).try_get_matches_from(["--", value]).err()?;
    Some(match (error.get(ContextKind::ValidValue), std::error::Error::source(&error)) {
        (Some(ContextValue::Strings(names)), _) => format!("expected one of {}", names.join(", ")),
        (_, Some(expected)) => expected.to_string(),
        _ => "expected another value".to_string(),
    })
}

/// Returns the name that `key` is probably a misspelling of: at most one letter in five differs, or `key` is the first words of this
/// name alone.
pub(super) fn nearest<'a>(key: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let names: Vec<&str> = names.collect();
    let distances = names.iter().map(|&name| (strsim::osa_distance(key, name), name));
    let close = distances.filter(|(wrong, _)| *wrong <= (key.len() / 5).max(1)).min();
    let longer = |name: &&&str| name.strip_prefix(key).is_some_and(|rest| rest.starts_with('_'));
    match (close, &names.iter().filter(longer).collect::<Vec<_>>()[..]) {
        (Some((_, name)), _) => Some(name),
        (None, [name]) => Some(name),
        (None, _) => None,
    }
}

/// Returns clap's message and tip on one line, without its usage block, which would list fifty flags.
pub(super) fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.split("\n\nUsage:").next().unwrap_or_default();
    let text = text.split("\n\nFor more information").next().unwrap_or_default();
    let mut line = String::new();
    for part in text.trim_start_matches("error: ").lines().map(str::trim).filter(|part| !part.is_empty()) {
        line += match line.chars().last() {
            None => "",
            Some(':') => " ",
            Some(_) if part.starts_with('[') => " ",
            Some(_) if part.starts_with("--") => ", ",
            Some(_) => "; ",
        };
        line += part;
    }
    if error.kind() == ErrorKind::InvalidSubcommand && !line.contains("tip:") {
        let names: Vec<&str> = help::commands().collect();
        if let [names @ .., last] = &names[..] {
            let _ = write!(line, "; the commands are {} and {last}", names.join(", "));
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::{least, parse_words, ppo_error, with_file};

    #[test]
    fn each_error_of_the_command_line_is_one_line() {
        for (words, message) in [
            (
                &["--learning-rat", "1"][..],
                "unexpected argument '--learning_rat' found; tip: a similar argument exists: '--learning_rate'",
            ),
            (
                &["--kl_estimator", "k2"],
                "invalid value 'k2' for '--kl_estimator <NAME>' [possible values: k1, k3, abs, mse, full]",
            ),
            (&["--seed", "-1"], "invalid value '-1' for '--seed <N>': expected a whole number, 0 or more"),
            (&["--learning_rate", "nan"], "invalid value 'nan' for '--learning_rate <X>': expected a number"),
            (
                &["--stop_token", "7"],
                "invalid value '7' for '--stop_token <TOKEN>': expected eos or none; an id goes to stop_token_id",
            ),
            (
                &["--stop_token", "eos", "--stop_token_id", "0"],
                "stop_token = eos and stop_token_id = 0 exclude each other: set one of them",
            ),
        ] {
            assert_eq!(ppo_error(words), message);
        }
        assert_eq!(
            parse_words(&["reward", "--model_name_or_path", "m"]).unwrap_err(),
            "the following required arguments were not provided: --dataset_name <PATH>..."
        );
        let no_file = parse_words(&["pipeline", "--seeed", "1"]).unwrap_err();
        assert!(no_file.lines().nth(1).is_some_and(|line| line.contains("--config <FILE>")), "{no_file}");
        assert_eq!(
            parse_words(&["train"]).unwrap_err(),
            "unrecognized subcommand 'train'; the commands are sft, reward, dpo, distill, ppo, grpo, rloo, pipeline, generate, logprobs, score, eval, merge, convert, push, report, chat, session, serve, replay, watch, doctor, schema, completions, plan and launch"
        );
    }

    #[test]
    fn a_trainer_of_another_name_is_said_to_be_here() {
        let expected = "unrecognized subcommand 'gkd'; write distill in its place, with the same flags";
        assert_eq!(parse_words(&["gkd", "--config", "gkd.yaml"]).unwrap_err(), expected);
    }

    #[test]
    fn a_trainer_that_is_not_here_is_said_to_be_elsewhere() {
        for (name, trainer, systems) in
            [("kto", "KTO", "TRL"), ("online-dpo", "ONLINE DPO", "TRL"), ("nash-md", "NASH MD", "TRL 1.11")]
        {
            let error = parse_words(&[name, "--config", "kto.yaml"]).unwrap_err();
            let expected = format!("there is no {trainer} here: take {systems} for it");
            assert_eq!(error, format!("unrecognized subcommand '{name}'; {expected}"));
        }
        let error = parse_words(&[&least("dpo")[..], &["--desirable_weight", "2"]].concat()).unwrap_err();
        let expected = "'--desirable_weight' found; it is of KTO, which is not here: take TRL for it";
        assert!(error.ends_with(expected), "{error}");
    }

    #[test]
    fn a_script_of_trl_is_said_to_be_a_command() {
        let error = parse_words(&["launch", "--nproc_per_node", "2", "examples/scripts/ppo/ppo_tldr.py", "--bf16"]);
        let expected = "launch: examples/scripts/ppo/ppo_tldr.py is a script of Python: write ppo in its place, with the same flags";
        assert_eq!(error.unwrap_err(), expected);
        let error = parse_words(&["trl/scripts/grpo.py"]).unwrap_err();
        assert!(error.ends_with("write grpo in its place, with the same flags"), "{error}");
    }

    #[test]
    fn all_errors_of_a_command_line_and_its_file_are_reported_at_once() {
        let words = [
            "ppo",
            "--sft_model_path",
            "s",
            "--learning_rat",
            "1e-5",
            "--seed",
            "-1",
            "--kl_estimator=k2",
            "--gamma",
            "2",
            "--optim",
            "sgd",
            "--zzz",
            "--adap_kl_ctrl",
            "--horizon",
            "0",
            "--output_dir",
        ];
        let text = "lam: x\ncliprang: 0.1\nresponse_length: {a: 1}\nvf_coef: -1\nmax_steps: 7\n";
        let error = with_file(text, &words).unwrap_err();
        let expected = [
            "unexpected argument '--learning_rat' found; tip: a similar argument exists: '--learning_rate'",
            "invalid value '-1' for '--seed <N>': expected a whole number, 0 or more",
            "invalid value 'k2' for '--kl_estimator <NAME>' [possible values: k1, k3, abs, mse, full]",
            "unexpected argument '--zzz' found",
            "invalid value 'sgd' for '--optim <NAME>' [possible values: adamw_torch, adamw_8bit, adafactor, adamw_bf16]",
            "a value is required for '--output_dir <PATH>' but none was supplied",
            "run.yaml:1: `lam`: expected a number, found `x`",
            "run.yaml:2: unknown key `cliprang`; did you mean `cliprange`?",
            "run.yaml:3: `response_length`: expected one value, found a list or a map",
            "the following required arguments were not provided: --dataset_name <PATH>...",
            "run.yaml:4: vf_coef = -1: expected a number of 0 or more",
            "gamma = 2: expected a number from 0 to 1",
            "horizon = 0: expected a number above 0",
            "run.yaml:5: max_steps = 7 has no effect without preset = grpo or rloo: total_episodes is the length of the run",
        ];
        let lines: Vec<&str> = error.lines().collect();
        assert_eq!(lines.len(), expected.len(), "{error}");
        for (line, expected) in lines.iter().zip(expected) {
            assert!(line.starts_with(expected), "{line}\nis not {expected}");
        }
    }

    #[test]
    fn consequences_of_a_refused_flag_are_not_refused_too() {
        assert_eq!(
            ppo_error(&["--adap_kl_ctrl=maybe", "--horizon", "3"]),
            "invalid value 'maybe' for '--adap_kl_ctrl[=<BOOL>]': expected true or false"
        );
        assert_eq!(
            ppo_error(&["--use_pef", "--lora_r", "3"]),
            "unexpected argument '--use_pef' found; tip: a similar argument exists: '--use_peft'"
        );
    }

    #[test]
    fn a_flag_for_an_argument_that_has_none_is_one_error_with_the_usage() {
        for (words, usage) in [
            (&["serve", "--model", "m"][..], "rlhf serve <MODEL>"),
            (&["chat", "--model_name_or_path", "m"], "rlhf chat <MODEL>"),
            (&["convert", "--file", "m.gguf", "out"], "rlhf convert <FILE> [OUTPUT]"),
            (&["push", "--folder", "m", "me/name"], "rlhf push <FOLDER> <NAME>"),
        ] {
            let message =
                format!("unexpected argument '{}' found; tip: this command has no flag for it: {usage}", words[1]);
            assert_eq!(parse_words(words).unwrap_err(), message);
        }
    }

    #[test]
    fn only_a_misspelled_or_shortened_name_gets_a_hint() {
        let names =
            ["learning_rate", "lr_scheduler_type", "num_sample_generations", "seed", "max_length", "max_grad_norm"];
        for (wrong, expected) in [
            ("learning_rat", Some("learning_rate")),
            ("laerning_rate", Some("learning_rate")),
            ("lr_scheduler", Some("lr_scheduler_type")),
            ("sead", Some("seed")),
            ("attn_implementation", None),
            ("num_generations", None),
            ("max", None),
            ("rate", None),
        ] {
            assert_eq!(nearest(wrong, names.into_iter()), expected, "{wrong}");
        }
    }
}
