//! The wording of what is wrong with a command line or a file.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};
use rlhf::Error;
use rlhf::flag::Refusals;

use super::Stop;

/// The refusals, and the `error` behind them.
pub(super) fn and_this(mut refusals: Refusals, error: clap::Error) -> Stop {
    let stop = Stop::from(error);
    match stop {
        Stop::Error(Error::Usage(line)) if !refusals.is_empty() => {
            refusals.refuse(line, [""; 0]);
            refusals.end().expect_err("there are some").into()
        }
        other => other,
    }
}

/// What `arg` expected, if it does not accept `value`.
pub(super) fn refusal(arg: &Arg, value: &str) -> Option<String> {
    let probe = Arg::new("value").value_parser(arg.get_value_parser().clone());
    let error = Command::new("probe").no_binary_name(true).arg(probe).try_get_matches_from(["--", value]).err()?;
    Some(match (error.get(ContextKind::ValidValue), std::error::Error::source(&error)) {
        (Some(ContextValue::Strings(names)), _) => format!("expected one of {}", names.join(", ")),
        (_, Some(expected)) => expected.to_string(),
        _ => "expected another value".to_string(),
    })
}

/// The name that `key` is a slip of: a letter in five is wrong at most, or it is the beginning of this name alone.
pub(super) fn nearest<'a>(key: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let names: Vec<&str> = names.collect();
    let slips = names.iter().map(|&name| (strsim::osa_distance(key, name), name));
    let close = slips.filter(|(wrong, _)| *wrong <= (key.len() / 5).max(1)).min();
    let longer = |name: &&&str| name.strip_prefix(key).is_some_and(|rest| rest.starts_with('_'));
    match (close, &names.iter().filter(longer).collect::<Vec<_>>()[..]) {
        (Some((_, name)), _) => Some(name),
        (None, [name]) => Some(name),
        (None, _) => None,
    }
}

/// clap's message and tip without its usage block, which here would be a list of fifty flags.
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
        line += "; the commands are sft, reward, ppo, pipeline, generate, logprobs, score and merge";
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::{parse_words, ppo_error, with_file};

    #[test]
    fn each_fault_of_the_command_line_is_one_line() {
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
            "the following required arguments were not provided: --dataset_name <PATH>..., --output_dir <PATH>"
        );
        let no_file = parse_words(&["pipeline", "--seeed", "1"]).unwrap_err();
        assert!(no_file.lines().nth(1).is_some_and(|line| line.contains("--config <FILE>")), "{no_file}");
        assert_eq!(
            parse_words(&["train"]).unwrap_err(),
            "unrecognized subcommand 'train'; the commands are sft, reward, ppo, pipeline, generate, logprobs, score and merge"
        );
    }

    #[test]
    fn all_that_is_wrong_with_a_line_and_its_file_is_told_at_once() {
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
            "a value is required for '--output_dir <PATH>' but none was supplied",
            "run.yaml:1: `lam`: expected a number, found `x`",
            "run.yaml:2: unknown key `cliprang`; did you mean `cliprange`?",
            "run.yaml:3: `response_length`: expected one value, found a list or a map",
            "optim = sgd: the optimizer is AdamW with decoupled weight decay, in float32; expected none or adamw_torch",
            "run.yaml:5: max_steps = 7: total_episodes is the length of the run; expected none or -1",
            "the following required arguments were not provided: --dataset_name <PATH>...",
            "vf_coef = -1: expected a number of 0 or more",
            "gamma = 2: expected a number from 0 to 1",
            "horizon = 0: expected a number above 0",
        ];
        let lines: Vec<&str> = error.lines().collect();
        assert_eq!(lines.len(), expected.len(), "{error}");
        for (line, expected) in lines.iter().zip(expected) {
            assert!(line.starts_with(expected), "{line}\nis not {expected}");
        }
    }

    #[test]
    fn what_follows_from_a_refused_flag_is_not_refused_too() {
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
    fn a_hint_is_for_a_slip_of_the_keyboard_or_a_name_cut_short_and_else_there_is_none() {
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
