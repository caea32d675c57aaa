//! The command line and the configuration file: together they become one checked configuration.
//!
//! The file's values become the defaults of the flags, so a flag wins over the file, and both go through the same parsers.

mod args;
#[cfg(test)]
mod attack;
pub(crate) mod chat;
mod commands;
pub(crate) mod completions;
mod config_file;
pub(crate) mod convert;
pub(crate) mod doctor;
mod errors;
pub(crate) mod evaluate;
mod fields;
mod flags;
mod foreign;
pub(crate) mod generate;
pub(crate) mod groups;
mod help;
mod implied;
mod keys;
pub(crate) mod launch;
mod layers;
pub(crate) mod logprobs;
mod names;
mod pipeline;
pub(crate) mod plan;
pub(crate) mod push;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod rows;
pub(crate) mod schema;
pub(crate) mod score;
pub(crate) mod serve;
pub(crate) mod session;
mod setting;
#[cfg(test)]
mod testing;
pub(crate) mod watch;
mod yaml;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use rlhf::Result;
use rlhf::schema::{Refusals, Setting as _};
use rlhf::settings::{
    ChatConfig, CompletionsConfig, ConvertConfig, DistillConfig, DoctorConfig, DpoConfig, EvaluateConfig,
    GenerateConfig, LogprobsConfig, MergeConfig, PpoConfig, PushConfig, ReportConfig, RewardConfig, SchemaConfig,
    ScoreConfig, ServeConfig, SessionConfig, SftConfig, WatchConfig,
};
use rlhf::train::pipeline::PipelineConfig;

use self::args::{call_as_written, normalize, not_required, on_line, parse_flags, parse_matches};
use self::commands::{FOLDER, PIPELINE, rlhf_command};
use self::config_file::read_config;
pub(crate) use self::errors::Stop;
use self::errors::{Messages, with_refusals};
use self::keys::Keys;
use self::launch::{LAUNCH, LaunchTask};
use self::layers::{Translated, name_nulls, resolve, translated};
use self::plan::{PLAN, PlanTask};
use self::replay::{REPLAY, ReplayTask};
use self::setting::{Setting, with_defaults};

/// A command with its checked configuration.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "one value per process")]
pub(crate) enum Task {
    Sft(SftConfig),
    Reward(RewardConfig),
    Dpo(DpoConfig),
    Distill(DistillConfig),
    Ppo(PpoConfig),
    Pipeline(PipelineConfig),
    Generate(GenerateConfig),
    Logprobs(LogprobsConfig),
    Score(ScoreConfig),
    Eval(EvaluateConfig),
    Merge(MergeConfig),
    Convert(ConvertConfig),
    Push(PushConfig),
    Report(ReportConfig),
    Chat(ChatConfig),
    Serve(ServeConfig),
    Session(SessionConfig),
    Watch(WatchConfig),
    Doctor(DoctorConfig),
    Schema(SchemaConfig),
    Completions(CompletionsConfig),
    Replay(ReplayTask),
    Launch(LaunchTask),
    Plan(PlanTask),
}

/// A parsed command line, with its configuration file.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) task: Task,
    /// Lines to print before the task starts: flags without an effect, and values left out of a preset.
    pub(crate) notes: Vec<String>,
    /// The place where each setting was written, and the name it was written under, for errors while the task runs.
    pub(crate) written: Refusals,
}

/// Parses a command line, program name first, and the file that its `--config` names.
///
/// # Errors
/// [`Stop::Error`] with every error of both, a line each; the other variants for help.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Parsed, Stop> {
    let rlhf = rlhf_command();
    let mut args: Vec<OsString> = args.into_iter().collect();
    // `rlhf help ppo` is `rlhf ppo --help`.
    if args.get(1).is_some_and(|name| name == "help") {
        args.remove(1);
        args.push("--help".into());
    }
    if let Some(error) =
        args.get(1).and_then(|name| errors::no_trainer(name).or_else(|| errors::python_package_command(name)))
    {
        return Err(error.into());
    }
    if args.get(1).is_some_and(|name| name == LAUNCH) {
        return launch::parse(args, rlhf);
    }
    if args.get(1).is_some_and(|name| name == PLAN) {
        return plan::parse(args, rlhf);
    }
    if args.get(1).is_some_and(|name| name == REPLAY) {
        return replay::parse(args, rlhf);
    }
    let mut args = normalize(args, rlhf);
    let mut messages = Messages::default();
    let matches = parse_flags(rlhf, &mut args, &mut messages.refusals)?;
    let (name, flags) = matches.subcommand().expect("a command is required");
    let task = if name == PIPELINE {
        let Some(path) = flags.get_one::<PathBuf>("config") else {
            let error = rlhf.clone().try_get_matches_from(&args).expect_err("its file is required");
            return Err(with_refusals(messages.refusals, error));
        };
        Task::Pipeline(pipeline::parse(path, &args, rlhf, &mut messages)?)
    } else {
        single(rlhf, name, flags, &args, &mut messages)?
    };
    let written = messages.refusals.checked()?;
    // A setting of a pipeline may be written again in a section.
    let written = if name == PIPELINE { Refusals::default() } else { written };
    Ok(Parsed { task, notes: messages.notes, written })
}

/// Builds and checks the configuration of the command `name`, any but the pipeline.
fn single(
    rlhf: &Command,
    name: &str,
    flags: &ArgMatches,
    args: &[OsString],
    messages: &mut Messages,
) -> Result<Task, Stop> {
    let command = rlhf.find_subcommand(name).expect("clap matched it");
    let settings = match flags.get_one::<PathBuf>("config") {
        Some(path) => read_config(path, &Keys { top: vec![command], sections: Vec::new() }, &mut messages.refusals)?,
        None => Vec::new(),
    };
    with_settings(command, rlhf, (flags, args), settings, messages)
}

/// Builds and checks the configuration of `command` from `settings` and the flags on the command line, which win.
fn with_settings(
    command: &Command,
    rlhf: &Command,
    (flags, args): (&ArgMatches, &[OsString]),
    mut settings: Vec<Setting>,
    messages: &mut Messages,
) -> Result<Task, Stop> {
    let name = command.get_name();
    call_as_written(command, args, &mut messages.refusals);
    name_nulls(rlhf, &mut settings);
    if names::has(name) {
        names::rename(&mut messages.refusals);
    }
    let Translated { preset, forced } = translated(command, flags, &mut settings, messages);
    // The last occurrence of a flag wins.
    let forced = forced.into_iter().chain(folder(command, flags, &mut messages.refusals));
    let forced = forced.map(|Setting { key, values, .. }| format!("--{key}={}", values.join(",")).into());
    let args: &[OsString] = &args.iter().cloned().chain(forced).collect::<Vec<_>>();
    let command_preset = names::PRESETS.into_iter().find(|preset| preset.command() == name);
    let ppo_defaults = command_preset.map_or(Vec::new(), |preset| groups::without_preset(rlhf, preset));
    settings.retain(|setting| !setting.values.is_empty());
    let without_dir = name == "reward" && needs_no_output_dir(flags, &settings);
    if without_dir {
        settings.push(Setting::new("output_dir", vec![".".into()]));
    }
    let trains_model = implied::add(name, flags, &mut settings, messages);
    let build = |layers: &[&[Setting]], refusals: &mut Refusals| {
        let layers = [&[&ppo_defaults[..]], layers].concat();
        let strict = rlhf.clone().mut_subcommand(name, |command| with_defaults(command, &layers));
        let matches = parse_matches(&strict, args, refusals, |command| {
            command.mut_subcommand(name, |command| command.mut_args(not_required))
        })?;
        let (_, flags) = matches.subcommand().expect("clap matched it");
        let mut task = Task::new(name, flags)?;
        if let Task::Ppo(config) = &mut task
            && trains_model
        {
            groups::use_policy_tokenizer(config);
        }
        if let (Task::Reward(config), true) = (&mut task, without_dir) {
            config.run.output_dir = PathBuf::new();
        }
        Ok(task)
    };
    resolve(preset, &settings, |key| on_line(flags, key), build, Task::check, messages)
}

/// Returns the model that `rlhf merge FOLDER` names.
fn folder(command: &Command, flags: &ArgMatches, refusals: &mut Refusals) -> Option<Setting> {
    let name = flags.try_get_one::<String>(FOLDER).ok().flatten().filter(|_| command.get_name() == "merge")?;
    if on_line(flags, "model_name_or_path") {
        let line = format!("model_name_or_path and the argument {name} are the same setting: give one of them");
        refusals.refuse(line, ["model_name_or_path"]);
        return None;
    }
    Some(Setting::new("model_name_or_path", vec![name.clone()]))
}

/// Returns whether `rlhf reward` only evaluates (`eval_only`) and no `output_dir` is set: it needs none then.
fn needs_no_output_dir(flags: &ArgMatches, settings: &[Setting]) -> bool {
    let in_file = |key: &str| settings.iter().find(|setting| setting.key == key);
    let has_dir = on_line(flags, "output_dir") || in_file("output_dir").is_some();
    let flag_value = match flags.value_source("eval_only") {
        Some(ValueSource::CommandLine) => flags::text(flags, "eval_only").and_then(bool::read),
        _ => None,
    };
    let is_yes =
        |setting: &Setting| setting.values.iter().any(|value| ["true", "yes", "1"].contains(&&*value.to_lowercase()));
    !has_dir && flag_value.unwrap_or_else(|| in_file("eval_only").is_some_and(is_yes))
}

impl Task {
    fn new(name: &str, matches: &ArgMatches) -> Result<Self> {
        Ok(match name {
            "sft" => Task::Sft(flags::read::<SftConfig>(matches)?),
            "reward" => Task::Reward(flags::read::<RewardConfig>(matches)?),
            "dpo" => Task::Dpo(flags::read::<DpoConfig>(matches)?),
            "distill" => Task::Distill(flags::read::<DistillConfig>(matches)?),
            "ppo" | "grpo" | "rloo" => Task::Ppo(flags::read::<PpoConfig>(matches)?),
            "generate" => Task::Generate(flags::read::<GenerateConfig>(matches)?),
            "logprobs" => Task::Logprobs(flags::read::<LogprobsConfig>(matches)?),
            "score" => Task::Score(flags::read::<ScoreConfig>(matches)?),
            "eval" => Task::Eval(flags::read::<EvaluateConfig>(matches)?),
            "convert" => Task::Convert(flags::read::<ConvertConfig>(matches)?),
            "push" => Task::Push(flags::read::<PushConfig>(matches)?),
            "report" => Task::Report(flags::read::<ReportConfig>(matches)?),
            "chat" => Task::Chat(flags::read::<ChatConfig>(matches)?),
            "serve" => Task::Serve(flags::read::<ServeConfig>(matches)?),
            "session" => Task::Session(flags::read::<SessionConfig>(matches)?),
            "watch" => Task::Watch(flags::read::<WatchConfig>(matches)?),
            "schema" => Task::Schema(flags::read::<SchemaConfig>(matches)?),
            "completions" => Task::Completions(flags::read::<CompletionsConfig>(matches)?),
            "doctor" => Task::Doctor(flags::read::<DoctorConfig>(matches)?),
            "merge" => Task::Merge(flags::read::<MergeConfig>(matches)?),
            _ => unreachable!("{name} is parsed elsewhere"),
        })
    }

    fn check(&self) -> Result<()> {
        match self {
            Task::Sft(config) => config.check(),
            Task::Reward(config) => config.check(),
            Task::Dpo(config) => config.check(),
            Task::Distill(config) => config.check(),
            Task::Ppo(config) => config.check(),
            // The stages of a pipeline are checked already, with their lines of the file; so is the command of a launch or a plan.
            Task::Pipeline(_)
            | Task::Merge(_)
            | Task::Launch(_)
            | Task::Plan(_)
            | Task::Replay(_)
            | Task::Doctor(_)
            | Task::Session(_)
            | Task::Schema(_)
            | Task::Completions(_) => Ok(()),
            Task::Generate(config) => config.check(),
            Task::Logprobs(config) => config.check(),
            Task::Score(config) => config.check(),
            Task::Eval(config) => config.check(),
            Task::Convert(config) => config.check(),
            Task::Push(config) => config.check(),
            Task::Report(config) => config.check(),
            Task::Chat(config) => config.check(),
            Task::Serve(config) => config.check(),
            Task::Watch(config) => config.check(),
        }
    }
}

#[cfg(test)]
mod tests {
    use rlhf::settings::MergeConfig;

    use super::Task;
    use super::testing::parse_words;

    #[test]
    fn merge_takes_its_model_as_a_word_too() {
        let expected = Task::Merge(MergeConfig::new("runs/ppo", "out"));
        for words in [
            &["merge", "runs/ppo", "--output_dir", "out"][..],
            &["merge", "--output_dir", "out", "runs/ppo"],
            &["merge", "--model_name_or_path", "runs/ppo", "--output_dir", "out"],
        ] {
            assert_eq!(parse_words(words).unwrap(), expected, "{words:?}");
        }
        let both = parse_words(&["merge", "a", "--model", "b", "--output_dir", "out"]).unwrap_err();
        assert_eq!(both, "model_name_or_path and the argument a are the same setting: give one of them");
        assert!(parse_words(&["merge", "--output_dir", "out"]).unwrap_err().contains("--model_name_or_path <PATH>"));
    }
}
