//! The command line and the configuration file, as typed: what they say becomes one configuration, resolved nowhere else.
//!
//! The file's values become the defaults of the flags, so a flag wins over the file, and both go through the same parsers.

mod args;
#[cfg(test)]
mod attack;
mod commands;
mod config_file;
mod deepspeed_chat;
mod errors;
pub(crate) mod generate;
mod help;
mod layers;
pub(crate) mod measure;
mod output;
mod pipeline;
#[cfg(test)]
mod testing;
mod trl;
mod yaml;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, FromArgMatches};
use rlhf::flag::Refusals;
use rlhf::settings::{GenerateConfig, LogprobsConfig, MergeConfig, PpoConfig, RewardConfig, ScoreConfig, SftConfig};
use rlhf::train::pipeline::PipelineConfig;
use rlhf::{Error, Result};

use self::args::{matches_of, normalise, not_required, on_line, take_out};
use self::commands::{PIPELINE, rlhf_command};
use self::config_file::{Keys, read_config};
use self::errors::{and_this, one_line};
use self::layers::{Setting, resolve, translated, with_defaults};
use self::trl::Said;

/// A command with its configuration, checked.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant)] // There is one of it in a process.
pub(crate) enum Task {
    Sft(SftConfig),
    Reward(RewardConfig),
    Ppo(PpoConfig),
    Pipeline(PipelineConfig),
    Generate(GenerateConfig),
    Logprobs(LogprobsConfig),
    Score(ScoreConfig),
    Merge(MergeConfig),
}

/// What a command line and its file say.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) task: Task,
    /// Lines for the user, before it begins: what was taken without an effect, and what was left out of a preset.
    pub(crate) notes: Vec<String>,
}

/// Why there is no task.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Help or the version was asked for.
    Help(clap::Error),
    /// The flags that most runs need were asked for.
    ShortHelp(String),
    /// The command line or the file is wrong.
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

/// Reads a command line, program name first, and the file that its `--config` names.
///
/// # Errors
/// [`Stop::Error`] with all that is wrong with both, a line each.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Parsed, Stop> {
    let rlhf = rlhf_command();
    let mut args = normalise(args, &rlhf);
    let mut said = Said::default();
    // The first pass finds `--config`, which may hold what is required, and takes out what cannot be read.
    let lenient = rlhf.clone().mut_subcommands(|command| command.mut_args(|arg| arg.required(false)));
    let matches = loop {
        let error = match lenient.clone().try_get_matches_from(&args) {
            Ok(matches) => break matches,
            Err(error) => error,
        };
        if !take_out(&mut args, &error, &rlhf, &mut said.refusals) {
            // Help and errors are worded for the command as it is.
            let error = rlhf.clone().try_get_matches_from(&args).err().unwrap_or(error);
            return Err(match help::short(&rlhf, &args, &error) {
                Some(text) => Stop::ShortHelp(text),
                None => and_this(said.refusals, error),
            });
        }
    };
    let (name, flags) = matches.subcommand().expect("a command is required");
    let file = flags.get_one::<PathBuf>("config").map(PathBuf::as_path);
    if name == PIPELINE {
        let Some(path) = file else {
            let error = rlhf.clone().try_get_matches_from(&args).expect_err("its file is required");
            return Err(and_this(said.refusals, error));
        };
        let task = pipeline::parse(path, &args, &rlhf, &mut said)?;
        said.refusals.end()?;
        return Ok(Parsed { task: Task::Pipeline(task), notes: said.notes });
    }
    let command = rlhf.find_subcommand(name).expect("clap matched it");
    let mut settings = match file {
        Some(path) => read_config(path, &Keys { top: vec![command], sections: Vec::new() }, &mut said.refusals)?,
        None => Vec::new(),
    };
    let preset = translated(command, flags, file, &mut settings, &mut said);
    settings.retain(|setting| !setting.values.is_empty());
    let without_dir = name == "reward" && measures_only(flags, &settings);
    if without_dir {
        settings.push(Setting { key: "output_dir".into(), line: 0, values: vec![".".into()] });
    }
    let build = |layers: &[&[Setting]], refusals: &mut Refusals| {
        let strict = rlhf.clone().mut_subcommand(name, |command| with_defaults(command, layers));
        let matches = matches_of(&strict, &args, refusals, |command| {
            command.mut_subcommand(name, |command| command.mut_args(not_required))
        })?;
        let (_, flags) = matches.subcommand().expect("clap matched it");
        let mut task = Task::new(name, flags)?;
        if let (Task::Reward(config), true) = (&mut task, without_dir) {
            config.run.output_dir = PathBuf::new();
        }
        Ok(task)
    };
    let on_line = |key: &str| on_line(flags, key);
    let task = resolve(preset, &settings, on_line, build, Task::check, &mut said)?;
    said.refusals.end()?;
    Ok(Parsed { task, notes: said.notes })
}

/// Whether `rlhf reward` is to measure a model alone, and has no folder, which it does not need then.
fn measures_only(flags: &ArgMatches, settings: &[Setting]) -> bool {
    let of_file = |key: &str| settings.iter().find(|setting| setting.key == key);
    let has_dir = flags.contains_id("output_dir") || of_file("output_dir").is_some();
    let of_flag = match flags.value_source("eval_only") {
        Some(ValueSource::CommandLine) => flags.get_one::<bool>("eval_only").copied(),
        _ => None,
    };
    let yes =
        |setting: &Setting| setting.values.iter().any(|value| ["true", "yes", "1"].contains(&&*value.to_lowercase()));
    !has_dir && of_flag.unwrap_or_else(|| of_file("eval_only").is_some_and(yes))
}

impl Task {
    fn new(name: &str, flags: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(match name {
            "sft" => Task::Sft(SftConfig::from_arg_matches(flags)?),
            "reward" => Task::Reward(RewardConfig::from_arg_matches(flags)?),
            "ppo" => Task::Ppo(PpoConfig::from_arg_matches(flags)?),
            "generate" => Task::Generate(GenerateConfig::from_arg_matches(flags)?),
            "logprobs" => Task::Logprobs(LogprobsConfig::from_arg_matches(flags)?),
            "score" => Task::Score(ScoreConfig::from_arg_matches(flags)?),
            _ => Task::Merge(MergeConfig::from_arg_matches(flags)?),
        })
    }

    fn check(&self) -> Result<()> {
        match self {
            Task::Sft(config) => config.check(),
            Task::Reward(config) => config.check(),
            Task::Ppo(config) => config.check(),
            // Its steps were, with their places in the file.
            Task::Pipeline(_) => Ok(()),
            Task::Generate(config) => config.check(),
            Task::Logprobs(config) => config.check(),
            Task::Score(config) => config.check(),
            Task::Merge(_) => Ok(()),
        }
    }
}
