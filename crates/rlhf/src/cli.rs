//! The command line and the configuration file, as typed: what they say becomes one configuration, resolved nowhere else.
//!
//! The file's values become the defaults of the flags, so a flag wins over the file, and both go through the same parsers.

#[cfg(test)]
mod attack;
mod deepspeed_chat;
pub(crate) mod generate;
mod help;
pub(crate) mod measure;
mod output;
mod pipeline;
mod trl;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::ValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches, ValueEnum};
use rlhf::flag::{self, Refusals};
use rlhf::settings::{
    GenerateConfig, LogprobsConfig, MergeConfig, PipelineFlags, PpoConfig, Preset, RewardConfig, ScoreConfig, SftConfig,
};
use rlhf::train::pipeline::PipelineConfig;
use rlhf::{Error, Result};
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use trl::Said;

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

/// What `flags` and `settings` are with what other systems' flags come to; gives what the preset says.
fn translated(
    command: &Command,
    flags: &ArgMatches,
    path: Option<&Path>,
    settings: &mut Vec<Setting>,
    said: &mut Said,
) -> Vec<Setting> {
    let preset = if command.get_name() == "ppo" { preset_of(flags, settings) } else { None };
    if command.get_name() == "ppo" {
        deepspeed_chat::translate(preset, flags, settings, &mut said.refusals);
    }
    trl::translate(command, preset, flags, path, settings, said);
    of_preset(preset, settings)
}

/// The configuration that `build` makes of `preset` and of `settings`, which win over it, checked.
///
/// A value of the preset's that is refused because of what the user has set has no meaning in this run: it is left out, and
/// noted. All else that `check` refuses is put with the refusals.
fn resolve<C>(
    mut preset: Vec<Setting>,
    settings: &[Setting],
    on_line: impl Fn(&str) -> bool,
    build: impl Fn(&[&[Setting]], &mut Refusals) -> Result<C, Stop>,
    check: impl Fn(&C) -> Result<()>,
    said: &mut Said,
) -> Result<C, Stop> {
    let is_own = |key: &str| on_line(key) || settings.iter().any(|setting| setting.key == key);
    let mut config = build(&[&preset, settings], &mut said.refusals)?;
    loop {
        let checked = check(&config);
        let of_preset = |line: &str| {
            let mut keys = flag::subjects(line).filter(|key| !is_own(key));
            keys.find_map(|key| preset.iter().position(|setting| setting.key == key))
        };
        let refused = checked.as_ref().err().map_or(&[][..], Error::refusals);
        let Some((line, place)) = refused.iter().find_map(|line| Some((line.clone(), of_preset(line)?))) else {
            said.refusals.add(checked)?;
            return Ok(config);
        };
        let setting = preset.remove(place);
        said.notes.push(format!("`{}` of the preset is left out: {line}", setting.key));
        config = build(&[&preset, settings], &mut Refusals::default())?;
    }
}

/// What the command line says over `command`; what is required and missing is put with the refusals, and is then as
/// `relaxed` makes it.
fn matches_of(
    command: &Command,
    args: &[OsString],
    refusals: &mut Refusals,
    relaxed: impl Fn(Command) -> Command,
) -> Result<ArgMatches, Stop> {
    let error = match command.clone().try_get_matches_from(args) {
        Ok(matches) => return Ok(matches),
        Err(error) if error.kind() == ErrorKind::MissingRequiredArgument => error,
        Err(error) => return Err(and_this(std::mem::take(refusals), error)),
    };
    if let Some(ContextValue::Strings(missing)) = error.get(ContextKind::InvalidArg) {
        let missing = missing.iter().filter(|flag| !refusals.has(flag_name(flag)));
        let missing: Vec<&str> = missing.map(String::as_str).collect();
        if !missing.is_empty() {
            let line = format!("the following required arguments were not provided: {}", missing.join(", "));
            refusals.refuse(line, missing.iter().map(|flag| flag_name(flag)));
        }
    }
    Ok(relaxed(command.clone()).try_get_matches_from(args)?)
}

fn not_required(arg: Arg) -> Arg {
    if arg.is_required_set() { arg.required(false).default_value(".") } else { arg }
}

/// `--seed <N>`: `seed`.
fn flag_name(shown: &str) -> &str {
    let name = shown.trim_start_matches('-');
    name.split([' ', '=', '[', '<']).next().unwrap_or_default()
}

/// The refusals, and the `error` behind them.
fn and_this(mut refusals: Refusals, error: clap::Error) -> Stop {
    let stop = Stop::from(error);
    match stop {
        Stop::Error(Error::Usage(line)) if !refusals.is_empty() => {
            refusals.refuse(line, [""; 0]);
            refusals.end().expect_err("there are some").into()
        }
        other => other,
    }
}

/// Takes the flag, with its values, that `error` is about out of the command line and puts the error with the refusals: what
/// else is wrong is found then too. `false` where there is none.
fn take_out(args: &mut Vec<OsString>, error: &clap::Error, rlhf: &Command, refusals: &mut Refusals) -> bool {
    let Some(ContextValue::String(shown)) = error.get(ContextKind::InvalidArg) else { return false };
    let Some(command) = args.get(1).and_then(|name| rlhf.find_subcommand(name)) else { return false };
    let name = flag_name(shown);
    let known = command.get_arguments().find(|arg| is_named(arg, name));
    let is_flag = shown.starts_with("--");
    // Whether a word of the command line is the flag, and whether its value is in the same word.
    let meant = |word: &OsString| {
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
    let mut kept = Vec::new();
    let mut words = args.drain(..).enumerate().peekable();
    while let Some((at, word)) = words.next() {
        let Some(whole) = (if at > 1 && at < end { meant(&word) } else { None }) else {
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
        (ErrorKind::UnknownArgument, true) => {
            let flags = command.get_arguments().filter(|arg| !arg.is_hide_set()).map(|arg| arg.get_id().as_str());
            let near = nearest(name, flags.chain(NOT_SETTINGS));
            let tip = near.map_or(String::new(), |near| format!("; tip: a similar argument exists: '--{near}'"));
            (format!("unexpected argument '--{name}' found{tip}"), near)
        }
        _ => (one_line(error), known.map(|arg| arg.get_id().as_str())),
    };
    refusals.refuse(line, about);
    true
}

/// Whether `name` is the flag's own or one of its others.
fn is_named(arg: &Arg, name: &str) -> bool {
    arg.get_id() == name
        || arg.get_long() == Some(name)
        || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
}

fn on_line(flags: &ArgMatches, name: &str) -> bool {
    flags.try_contains_id(name).is_ok() && flags.value_source(name) == Some(ValueSource::CommandLine)
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

/// The command whose settings are those of its steps: it needs a file.
const PIPELINE: &str = "pipeline";

fn rlhf_command() -> Command {
    let commands = [
        trl::with_flags(flag::command::<SftConfig>("sft"))
            .about("Fine-tune a language model on texts or demonstrations")
            .after_help(
                "Example:\n\
             \x20 rlhf sft --model_name_or_path pythia-160m --dataset_name demos.jsonl --output_dir runs/sft",
            ),
        trl::with_flags(flag::command::<RewardConfig>("reward"))
            .about("Train a reward model on preference pairs")
            .after_help(
                "Example:\n\
             \x20 rlhf reward --model_name_or_path runs/sft --new_reward_head \\\n\
             \x20     --dataset_name pairs.jsonl --output_dir runs/reward",
            ),
        deepspeed_chat::with_flags(trl::with_flags(flag::command::<PpoConfig>("ppo")))
            .about("Train a language model with PPO against a reward")
            .after_help(
                "Example:\n\
             \x20 rlhf ppo --sft_model_path runs/sft --reward_model_path runs/reward \\\n\
             \x20     --dataset_name prompts.jsonl --output_dir runs/ppo --stop_token eos",
            ),
        flag::command::<PipelineFlags>(PIPELINE)
            .about("Run SFT, the reward model and PPO, one after another")
            .after_help(
                "The file has a section for each step, with that command's settings by their flags' names;\n\
             above them stand those of all. The reward model begins with what SFT left, PPO with what\n\
             both left. One dataset of all, with `prompt`, `chosen` and `rejected`, is split 2,4,4.\n\
             Everything is checked before the first step begins.\n\n\
             \x20 model_name_or_path: pythia-160m\n\
             \x20 dataset_name: comparisons.jsonl\n\
             \x20 output_dir: runs/all\n\
             \x20 sft: {num_train_epochs: 1}\n\
             \x20 reward: {num_train_epochs: 1}\n\
             \x20 ppo: {total_episodes: 4096, stop_token: eos, missing_eos_penalty: 1.0}\n\n\
             Example:\n\
             \x20 rlhf pipeline --config pipeline.yaml --resume_from_checkpoint",
            ),
        trl::with_flags(flag::command::<GenerateConfig>("generate"))
            .about("Answer prompts with a language model")
            .after_help(
                "Rows have `prompt` or `prompt_ids`; JSON lines get `completion`, `completion_ids` and `logprobs`.\n\n\
                 Examples:\n\
                 \x20 rlhf generate --model_name_or_path runs/ppo \"The film was\"\n\
                 \x20 rlhf generate --model_name_or_path runs/ppo --dataset_name prompts.jsonl --do_sample false",
            ),
        trl::with_flags(flag::command::<LogprobsConfig>("logprobs"))
            .about("Log-probabilities of given completions, row by row")
            .after_help(
                "Rows have `prompt` and `completion`, or `prompt_ids` and `completion_ids`; each is written with\n\
                 `completion_ids`, `logprobs` (one per completion token) and `sum_logprobs`. No eos is added.\n\n\
                 Example:\n\
                 \x20 rlhf logprobs --model_name_or_path runs/ppo --dataset_name answers.jsonl",
            ),
        trl::with_flags(flag::command::<ScoreConfig>("score"))
            .about("Scores of a reward model, or of other rewards, row by row")
            .after_help(
                "Rows have `text`, or `prompt` and `completion`, or token ids: `input_ids`, or `prompt_ids` and\n\
             `completion_ids`; each is written with its `score`. No eos is added. Preference pairs, `chosen` and\n\
             `rejected`, get `score_chosen`, `score_rejected` and `score_margin`, and accuracy and mean margin at\n\
             the end; sample files of a run are read as they are. Rewards other than one model score\n\
             a completion to its prompt, and `components` has what each of them says.\n\n\
             Examples:\n\
             \x20 rlhf generate --model runs/ppo --dataset_name prompts.jsonl | rlhf score --model runs/reward\n\
             \x20 rlhf score --tokenizer_name runs/sft --reward length:target=40 --reward_command ./reward.py \\\n\
             \x20     --dataset_name answers.jsonl",
            ),
        flag::command::<MergeConfig>("merge").about("Fold a LoRA adapter into a whole model").after_help(
            "Example:\n\
             \x20 rlhf merge --model_name_or_path runs/ppo --output_dir merged",
        ),
    ];
    let file = Arg::new("config")
        .long("config")
        .value_name("FILE")
        .value_parser(ValueParser::path_buf())
        .help("YAML file of settings, named as the flags are; a flag wins over the file");
    // clap's long form would take a paragraph per flag, its short one for what most runs need too: see `help`.
    let help = Arg::new("help").short('h').long("help").action(ArgAction::HelpShort);
    let help = help.help("Print help: -h of the flags that most runs need, --help of all");
    Command::new("rlhf")
        .version(env!("CARGO_PKG_VERSION"))
        .about("RLHF with PPO for language models: supervised fine-tuning, a reward model, then PPO.")
        .after_help(
            "From a language model to a tuned one; models are Hugging Face folders, data is JSONL or Parquet:\n\
             \x20 rlhf sft --model_name_or_path pythia-160m --dataset_name demos.jsonl --output_dir runs/sft\n\
             \x20 rlhf reward --model_name_or_path runs/sft --new_reward_head \\\n\
             \x20     --dataset_name pairs.jsonl --output_dir runs/reward\n\
             \x20 rlhf ppo --sft_model_path runs/sft --reward_model_path runs/reward \\\n\
             \x20     --dataset_name prompts.jsonl --output_dir runs/ppo --stop_token eos\n\
             \x20 rlhf generate --model_name_or_path runs/ppo \"The film was\"\n\n\
             Runs leave their settings in config.yaml for --config; `rlhf COMMAND --help` explains the flags.",
        )
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .subcommands(commands)
        .mut_subcommands(|command| command.disable_help_flag(true).args([file.clone(), help.clone()]))
        .mut_subcommand(PIPELINE, |command| command.mut_arg("config", |file| file.required(true)))
}

/// Dashes in flag names become underscores, and `--flag true` becomes `--flag=true` where the flag may also stand alone.
/// Values and whatever follows `--` stay as they are.
fn normalise(args: impl IntoIterator<Item = OsString>, rlhf: &Command) -> Vec<OsString> {
    let flag =
        |name: &str| rlhf.get_subcommands().flat_map(Command::get_arguments).find(|a| a.get_long() == Some(name));
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

/// Flags that are no keys of a configuration file.
const NOT_SETTINGS: [&str; 2] = ["config", "help"];

/// One setting of a configuration file; no values stand for `null`.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    pub(crate) key: String,
    pub(crate) line: u64,
    pub(crate) values: Vec<String>,
}

/// The preset that the flags name, or else the file's `settings`.
fn preset_of(flags: &ArgMatches, settings: &[Setting]) -> Option<Preset> {
    let of_flag = || flags.get_one::<Preset>("preset").copied();
    let of_file = || settings.iter().find(|setting| setting.key == "preset")?.values.first();
    match flags.value_source("preset") {
        Some(ValueSource::CommandLine) => of_flag(),
        _ => of_file().and_then(|name| Preset::from_str(name, false).ok()).or_else(of_flag),
    }
}

/// What the preset sets, but for what the file's `settings` set to null.
fn of_preset(preset: Option<Preset>, settings: &[Setting]) -> Vec<Setting> {
    let own = preset.map_or(&[][..], Preset::settings);
    let is_null = |key: &str| settings.iter().any(|setting| setting.key == key && setting.values.is_empty());
    let own = own.iter().filter(|(key, _)| !is_null(key));
    own.map(|&(key, value)| Setting { key: key.into(), line: 0, values: vec![value.into()] }).collect()
}

/// The settings as defaults of the flags, where the later of two wins.
fn with_defaults(command: Command, layers: &[&[Setting]]) -> Command {
    layers.iter().copied().flatten().cloned().fold(command, set_default)
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

fn set_default(command: Command, setting: Setting) -> Command {
    command.mut_arg(setting.key, |arg| arg.required(false).default_values(setting.values))
}

/// The keys that a configuration file may have: the names of flags.
struct Keys<'c> {
    /// The commands whose flags may stand at the top.
    top: Vec<&'c Command>,
    /// Those that may have a section of their own.
    sections: Vec<&'c Command>,
}

impl<'c> Keys<'c> {
    fn section(&self, name: &str) -> Option<&'c Command> {
        self.sections.iter().copied().find(|command| command.get_name() == name)
    }

    /// The commands that a key is looked for in, and its name there: behind the section's and a point.
    fn place<'k>(&self, key: &'k str) -> (Vec<&'c Command>, &'k str) {
        match key.split_once('.') {
            Some((section, name)) => (self.section(section).into_iter().collect(), name),
            None => (self.top.clone(), key),
        }
    }

    fn flag(&self, key: &str) -> Option<&'c Arg> {
        let (commands, name) = self.place(key);
        let mut flags = commands.into_iter().flat_map(Command::get_arguments);
        let other = |arg: &Arg| arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name));
        flags.find(|arg| (arg.get_id() == name || other(arg)) && !NOT_SETTINGS.contains(&name))
    }

    /// Our own name of a key, which may be another system's.
    fn own(&self, key: &str) -> String {
        match (self.flag(key), key.split_once('.')) {
            (None, _) => key.to_string(),
            (Some(arg), None) => arg.get_id().to_string(),
            (Some(arg), Some((section, _))) => format!("{section}.{}", arg.get_id()),
        }
    }

    /// The key most like `key`, if any is like it.
    fn nearest(&self, key: &str) -> Option<&'c str> {
        let (commands, name) = self.place(key);
        let flags = commands.into_iter().flat_map(|command| command.get_arguments()).filter(|arg| !arg.is_hide_set());
        let flags = flags.map(|arg| arg.get_id().as_str()).filter(|name| !NOT_SETTINGS.contains(name));
        let sections = self.sections.iter().map(|command| command.get_name()).filter(|_| !key.contains('.'));
        nearest(name, flags.chain(sections))
    }

    /// What is wrong with a key that is no flag's.
    fn unknown(&self, key: &str) -> String {
        let hint = match (self.nearest(key), &self.place(key).0[..]) {
            (Some(name), _) => format!("did you mean `{name}`?"),
            (None, [command]) => {
                format!("`rlhf {} --help` lists the flags, whose names are the keys", command.get_name())
            }
            (None, _) => "`--help` of each step's command lists its flags, whose names are the keys".into(),
        };
        format!("unknown key `{key}`; {hint}")
    }
}

/// Reads the settings in the YAML file `path`, each one accepted by its flag; what is not is put with the refusals.
///
/// # Errors
/// If the file cannot be read, or is not a map of settings.
fn read_config(path: &Path, keys: &Keys<'_>, refusals: &mut Refusals) -> Result<Vec<Setting>> {
    let text = rlhf::files::read_settings(path)?;
    let place = |line: u64, message: String| format!("{}:{line}: {message}", path.display());
    let mut settings: Vec<Setting> = Vec::new();
    let found = match read_yaml(&text, keys) {
        Ok(found) => found,
        Err((line, message)) => {
            refusals.refuse(place(line, message), [""; 0]);
            return std::mem::take(refusals).end().map(|()| settings);
        }
    };
    for Found { mut setting, fault } in found {
        if let Some(fault) = fault {
            let about = keys.own(&setting.key);
            refusals.refuse(place(setting.line, format!("`{}`: {fault}", setting.key)), about.rsplit('.').take(1));
            continue;
        }
        let Setting { key, line, values } = &setting;
        let own = keys.own(key);
        if settings.iter().any(|earlier| earlier.key == own) {
            refusals.refuse(place(*line, format!("`{key}` is set twice")), [own]);
            continue;
        }
        if keys.section(key).is_none() {
            let Some(arg) = keys.flag(key) else {
                let near = keys.nearest(key).map(str::to_string);
                refusals.refuse(place(*line, keys.unknown(key)), near);
                continue;
            };
            let mut refused = values.iter().filter_map(|value| Some((value, refusal(arg, value)?)));
            if let Some((value, expected)) = refused.next() {
                let line = place(*line, format!("`{key}`: {expected}, found `{value}`"));
                refusals.refuse(line, own.rsplit('.').take(1));
                continue;
            }
        }
        // Another system's name for it.
        setting.key = own;
        settings.push(setting);
    }
    Ok(settings)
}

/// One setting of a document as it stands there, and what is wrong with the form of its value.
struct Found {
    setting: Setting,
    fault: Option<&'static str>,
}

/// The form of a value: it is looked at before it is read, as what is of another form than its reader's ends the reading.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    One,
    Many,
    /// A list or a map with nothing in it.
    Empty,
    Nested,
}

impl<'de> Deserialize<'de> for Form {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Form;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a value")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Form, A::Error> {
                let mut form = Form::Empty;
                while let Some(element) = list.next_element::<Form>()? {
                    form = if element == Form::One && form != Form::Nested { Form::Many } else { Form::Nested };
                }
                Ok(form)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Form, A::Error> {
                let mut form = Form::Empty;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    form = Form::Nested;
                }
                Ok(form)
            }

            fn visit_unit<E>(self) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_none<E>(self) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_str<E>(self, _: &str) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_i128<E>(self, _: i128) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_u128<E>(self, _: u128) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_f64<E>(self, _: f64) -> Result<Form, E> {
                Ok(Form::One)
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

/// What is done with the values of a document.
enum Pass<'a> {
    /// Their forms are noted.
    Forms(&'a mut VecDeque<Form>),
    /// They are read, by their forms.
    Values(&'a mut VecDeque<Form>, &'a mut Vec<Found>),
}

/// Reads the settings of a document or, by its name, of a section in it.
struct Settings<'a, 'p> {
    keys: &'a Keys<'a>,
    section: Option<&'a str>,
    pass: &'a mut Pass<'p>,
    /// The section that is read, and its line.
    reading: &'a mut Option<(String, u64)>,
}

impl<'de> DeserializeSeed<'de> for Settings<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Settings<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("settings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<Spanned<String>>()? {
            let (name, line) = (name.value.replace('-', "_"), name.referenced.line());
            let setting = |key: String, values| Setting { key, line, values };
            if self.section.is_none() && self.keys.section(&name).is_some() {
                *self.reading = Some((name.clone(), line));
                if let Pass::Values(_, found) = self.pass {
                    found.push(Found { setting: setting(name.clone(), Vec::new()), fault: None });
                }
                let Self { keys, .. } = self;
                map.next_value_seed(Settings { keys, section: Some(&name), pass: self.pass, reading: self.reading })?;
                *self.reading = None;
                continue;
            }
            let (forms, found) = match self.pass {
                Pass::Forms(forms) => {
                    forms.push_back(map.next_value()?);
                    continue;
                }
                Pass::Values(forms, found) => (forms, found),
            };
            let key = self.section.map_or(name.clone(), |section| format!("{section}.{name}"));
            let arg = self.keys.flag(&key);
            let mut fault = None;
            let values = match (forms.pop_front(), arg) {
                (_, None) => map.next_value::<IgnoredAny>().map(|_| Vec::new())?,
                (Some(Form::Empty), Some(arg)) if is_list(arg) => map.next_value::<IgnoredAny>().map(|_| Vec::new())?,
                (Some(Form::One), Some(arg)) if !is_list(arg) => {
                    map.next_value::<Option<String>>()?.into_iter().collect()
                }
                (Some(Form::One | Form::Many), Some(arg)) if is_list(arg) => map.next_value::<Texts>()?.0,
                (_, Some(arg)) => {
                    map.next_value::<IgnoredAny>()?;
                    match trl::is_added(arg) {
                        true => vec!["{...}".to_string()],
                        false => {
                            fault = Some(if is_list(arg) { NO_LIST } else { NO_VALUE });
                            Vec::new()
                        }
                    }
                }
            };
            found.push(Found { setting: setting(key, values), fault });
        }
        Ok(())
    }

    // A section with nothing in it.
    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        // An empty scalar is null.
        if text.is_empty() { Ok(()) } else { Err(E::custom(NO_MAP)) }
    }
}

/// The settings of a YAML document in its order, a section before what is in it, or the line and the message of what keeps it
/// from being read. Keys may have dashes.
fn read_yaml(text: &str, keys: &Keys<'_>) -> Result<Vec<Found>, (u64, String)> {
    let (mut forms, mut found) = (VecDeque::new(), Vec::new());
    pass(text, keys, &mut Pass::Forms(&mut forms))?;
    pass(text, keys, &mut Pass::Values(&mut forms, &mut found))?;
    Ok(found)
}

fn pass(text: &str, keys: &Keys<'_>, pass: &mut Pass<'_>) -> Result<(), (u64, String)> {
    // A number's own form is its flag's to judge.
    let any_float = serde_saphyr::NonFiniteFloatPolicy::PassThrough;
    let options = serde_saphyr::options! { with_snippet: false, non_finite_float_policy: any_float };
    let mut reading = None;
    serde_saphyr::with_deserializer_from_str_with_options(text, options, |yaml| {
        yaml.deserialize_map(Settings { keys, section: None, pass, reading: &mut reading })
    })
    .map_err(|error| {
        let line = error.location().map_or(1, |location| location.line());
        // A section that is no map.
        let is_form = |error: &serde_saphyr::Error| {
            let message = error.to_string();
            matches!(error, serde_saphyr::Error::Unexpected { .. })
                || [NO_MAP, "invalid type"].iter().any(|part| message.contains(part))
        };
        match (error, reading) {
            (serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. }, _) => {
                (line, format!("`{key}` is set twice"))
            }
            (error, Some((key, line))) if is_form(&error) => (line, format!("`{key}`: {NO_MAP}")),
            (serde_saphyr::Error::Unexpected { .. }, None) => (line, "expected lines of the form `key: value`".into()),
            (serde_saphyr::Error::MultipleDocuments { .. }, _) => {
                (line, "expected one YAML document, found two".into())
            }
            (error, _) => {
                let message = error.to_string();
                let message = message.split(" at line ").next().unwrap_or_default();
                (line, format!("not valid YAML: {message}"))
            }
        }
    })
}

const NO_MAP: &str = "expected settings of the form `key: value` below it";

const NO_VALUE: &str = "expected one value, found a list or a map";

const NO_LIST: &str = "expected a text or a list of texts, found something else";

/// Whether a flag takes several values.
fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append) || arg.get_num_args().is_some_and(|count| count.max_values() > 1)
}

/// A list of texts; a text alone is a list of one, and null of none.
struct Texts(Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Texts;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text or a list of texts")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Texts, A::Error> {
                let mut texts = Vec::new();
                while let Some(text) = list.next_element()? {
                    texts.push(text);
                }
                Ok(Texts(texts))
            }

            fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Texts, A::Error> {
                Err(A::Error::custom(NO_LIST))
            }

            fn visit_unit<E>(self) -> Result<Texts, E> {
                Ok(Texts(Vec::new()))
            }

            fn visit_none<E>(self) -> Result<Texts, E> {
                Ok(Texts(Vec::new()))
            }

            fn visit_str<E>(self, text: &str) -> Result<Texts, E> {
                Ok(Texts(vec![text.to_string()]))
            }

            fn visit_bool<E>(self, value: bool) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

/// What `arg` expected, if it does not accept `value`.
fn refusal(arg: &Arg, value: &str) -> Option<String> {
    let probe = Arg::new("value").value_parser(arg.get_value_parser().clone());
    let error = Command::new("probe").no_binary_name(true).arg(probe).try_get_matches_from(["--", value]).err()?;
    Some(match (error.get(ContextKind::ValidValue), std::error::Error::source(&error)) {
        (Some(ContextValue::Strings(names)), _) => format!("expected one of {}", names.join(", ")),
        (_, Some(expected)) => expected.to_string(),
        _ => "expected another value".to_string(),
    })
}

/// The name that `key` is a slip of: a letter in five is wrong at most, or it is the beginning of this name alone.
fn nearest<'a>(key: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
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
fn one_line(error: &clap::Error) -> String {
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
    use rlhf::rl::math::{KlEstimator, ScorePosition};
    use rlhf::settings::{
        self, EosInLoss, Format, LongPrompts, LrSchedulerType, ReportTo, StopToken, WhitenAdvantages,
    };

    use super::*;

    const PPO: [&str; 9] = [
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

    fn parse_words(words: &[&str]) -> Result<Task, String> {
        parsed(words).map(|parsed| parsed.task)
    }

    fn parsed(words: &[&str]) -> Result<Parsed, String> {
        parse(["rlhf"].iter().chain(words).map(OsString::from)).map_err(|stop| match stop {
            Stop::Help(help) => help.to_string(),
            Stop::ShortHelp(text) => text,
            Stop::Error(error) => error.to_string(),
        })
    }

    #[track_caller]
    fn ppo(words: &[&str]) -> PpoConfig {
        match parse_words(&[&PPO[..], words].concat()).unwrap() {
            Task::Ppo(config) => config,
            task => panic!("not ppo: {task:?}"),
        }
    }

    #[track_caller]
    fn ppo_error(words: &[&str]) -> String {
        parse_words(&[&PPO[..], words].concat()).unwrap_err()
    }

    /// What the words say together with a configuration file of this text; its path is taken out of error messages.
    fn with_file(text: &str, words: &[&str]) -> Result<Task, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let path = file.path().to_str().unwrap();
        parse_words(&[words, &["--config", path]].concat()).map_err(|error| error.replace(path, "run.yaml"))
    }

    #[track_caller]
    fn file_error(text: &str) -> String {
        with_file(text, &PPO).unwrap_err()
    }

    #[test]
    fn clap_finds_no_fault_with_the_commands() {
        rlhf_command().debug_assert();
    }

    #[test]
    fn the_command_line_is_frozen() {
        let flags = |name: &str| {
            let command = rlhf_command();
            let command = command.find_subcommand(name).unwrap();
            let seen = command.get_arguments().filter(|arg| !arg.is_hide_set());
            seen.map(|arg| arg.get_id().as_str()).collect::<Vec<_>>().join(" ")
        };
        let lora = "use_peft lora_r lora_alpha lora_dropout lora_target_modules use_rslora";
        let optimizer = "learning_rate lr_scheduler_type warmup_steps warmup_ratio lr_end power weight_decay adam_beta1 adam_beta2 \
                         adam_epsilon max_grad_norm";
        let run = "output_dir overwrite_output_dir seed bf16 fp16 initial_scale_power loss_scale_window \
                   hysteresis min_loss_scale dtype device max_shard_size gradient_checkpointing \
                   max_tokens_per_micro_batch report_to tensorboard_tags num_threads disable_tqdm save_steps save_total_limit \
                   resume_from_checkpoint resume_with_changed_inputs config help";
        let data = "dataset_name dataset_weights dataset_config dataset_columns dataset_train_split dataset_test_split eval_split_size data_split \
                    data_split_seed";
        let rows = "dataset_name dataset_split dataset_columns output_file overwrite_output_file batch_size dtype device num_threads config help";
        let rewards = "reward reward_command reward_url reward_weights reward_normalize reward_scale reward_clip \
                       reward_label_column reward_batch_size reward_concurrency reward_timeout reward_retries";
        let eval = "eval_steps metric_for_best_model greater_is_better";
        let steps = "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps \
                     num_train_epochs max_steps logging_steps";
        assert_eq!(
            flags("ppo"),
            format!(
                "model_name_or_path sft_model_path model_revision reward_model_path reward_label value_model_path \
                 new_reward_head {rewards} {data} \
                 max_prompt_length long_prompts \
                 apply_chat_template preset per_device_generation_batch_size generation_batches \
                 per_device_train_batch_size gradient_accumulation_steps num_mini_batches \
                 local_rollout_forward_batch_size total_episodes num_train_epochs num_sample_generations \
                 response_length stop_token stop_token_id temperature top_k top_p min_p repetition_penalty min_new_tokens \
                 stop_strings logprobs_of num_ppo_epochs missing_eos_penalty \
                 non_eos_penalty penalty_reward_value \
                 score_position kl_coef kl_estimator kl_in_loss adap_kl_ctrl target horizon kl_coef_end whiten_rewards \
                 whiten_advantages gamma lam cliprange cliprange_value vf_coef cliprange_high dual_clip entropy_coef \
                 target_kl ratio_threshold clip_reward_value min_response_length eos_in_loss last_value_in_loss \
                 unsupervised_dataset_name unsupervised_dataset_config_name unsup_coef enable_ema ema_beta value_head raw_logprobs num_shared_layers batch_size \
                 mini_batch_size early_stopping use_score_scaling use_score_norm score_clip \
                 {lora} value_use_peft value_lora_r \
                 value_lora_target_modules {optimizer} value_warmup_updates value_learning_rate \
                 value_lr_scheduler_type value_lr_warmup_steps value_weight_decay value_max_grad_norm \
                 max_skipped_updates no_checks align_overflow compute_fp32_loss print_answers print_answers_interval \
                 enable_test_mode test_stop_step num_eval_prompts {eval} {run}"
            )
        );
        assert_eq!(
            flags("sft"),
            format!(
                "model_name_or_path model_revision config_name tokenizer_name chat_template_path {data} eval_dataset_name \
                 dataset_text_field max_length packing {steps} \
                 completion_only_loss assistant_only_loss {lora} {optimizer} {eval} {run}"
            )
        );
        assert_eq!(
            flags("reward"),
            format!(
                "model_name_or_path model_revision new_reward_head reward_format {data} eval_dataset_name \
                 num_padding_at_beginning max_length {steps} pair_loss center_rewards_coefficient {lora} {optimizer} \
                 eval_only {eval} {run}"
            )
        );
        assert_eq!(
            flags("generate"),
            format!(
                "model_name_or_path model_revision prompts input_format output_format apply_chat_template max_new_tokens \
                 min_new_tokens do_sample \
                 temperature top_k top_p min_p repetition_penalty num_return_sequences stop_token_ids stop_strings \
                 ignore_eos seed {rows}"
            )
        );
        assert_eq!(flags("logprobs"), format!("model_name_or_path model_revision temperature {rows}"));
        assert_eq!(
            flags("score"),
            format!("model_name_or_path model_revision reward_label tokenizer_name {rewards} {rows}")
        );
        assert_eq!(
            flags("pipeline"),
            "output_dir overwrite_output_dir skip resume_from_checkpoint resume_with_changed_inputs help config"
        );
        assert_eq!(
            flags("merge"),
            "model_name_or_path model_revision output_dir overwrite_output_dir max_shard_size config help"
        );
    }

    #[test]
    fn every_flag_is_explained_under_a_heading() {
        for command in rlhf_command().get_subcommands() {
            for arg in command.get_arguments() {
                let id = arg.get_id().as_str();
                assert!(arg.get_help().is_some(), "{id}");
                assert_eq!(arg.get_help_heading().is_none(), ["config", "help", "prompts"].contains(&id), "{id}");
            }
        }
    }

    #[test]
    fn the_command_line_has_the_defaults_of_the_constructors() {
        assert_eq!(ppo(&[]), PpoConfig::new("policy", "judge", "prompts.jsonl", "out"));
        let data = ["--dataset_name", "d", "--output_dir", "o"];
        let sft = parse_words(&[&["sft", "--model_name_or_path", "m"], &data[..]].concat()).unwrap();
        assert_eq!(sft, Task::Sft(SftConfig::new("m", "d", "o")));
        let scratch = parse_words(&[&["sft", "--config_name", "c", "--tokenizer_name", "t"], &data[..]].concat());
        assert_eq!(scratch.unwrap(), Task::Sft(SftConfig::from_scratch("c", "t", "d", "o")));
        let reward = parse_words(&[&["reward", "--model_name_or_path", "m"], &data[..]].concat()).unwrap();
        assert_eq!(reward, Task::Reward(RewardConfig::new("m", "d", "o")));
        let generate = parse_words(&["generate", "--model_name_or_path", "m"]).unwrap();
        assert_eq!(generate, Task::Generate(GenerateConfig::new("m")));
        let logprobs = parse_words(&["logprobs", "--model", "m"]).unwrap();
        assert_eq!(logprobs, Task::Logprobs(LogprobsConfig::new("m")));
        let score = parse_words(&["score", "--model=m"]).unwrap();
        assert_eq!(score, Task::Score(ScoreConfig::new("m")));
    }

    #[test]
    fn a_pipeline_has_the_settings_of_all_then_each_steps_own_and_links_what_neither_sets() {
        let pipeline = |text: &str, words: &[&str]| match with_file(text, &[&["pipeline"], words].concat()) {
            Ok(Task::Pipeline(config)) => Ok(config),
            Ok(task) => panic!("{task:?}"),
            Err(error) => Err(error),
        };
        let least = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\n";
        assert_eq!(pipeline(least, &[]).unwrap(), PipelineConfig::new("m", "d", "o"));
        let text = "model-revision: v1\nseed: 7\nnum_train_epochs: 2\nsft:\n  seed: 8\nreward:\n  model_name_or_path: base\n  \
                    dataset_name: pairs\nppo: {reward_model_path: none, reward: [json, 'length:target=3']}\n";
        let config = pipeline(&format!("{least}data_split: 1,1,1\n{text}"), &["--output_dir", "p"]).unwrap();
        let (sft, reward, ppo) = (config.sft.unwrap(), config.reward.unwrap(), config.ppo.unwrap());
        assert_eq!((sft.run.seed, reward.run.seed, ppo.run.seed), (8, 7, 7));
        assert_eq!([sft.num_train_epochs, reward.num_train_epochs, ppo.num_train_epochs], [2.0; 3]);
        assert_eq!((sft.model_revision.as_str(), reward.model_revision.as_str()), ("v1", "main"));
        assert_eq!((reward.model_name_or_path, reward.new_reward_head), ("base".into(), false));
        let split = "1,1,1".parse().ok();
        assert_eq!((sft.data.data_split, reward.data.data_split, ppo.data.data_split), (split, None, split));
        assert_eq!(reward.run.output_dir, PathBuf::from("p/2-reward"));
        assert_eq!((ppo.sft_model_path, ppo.reward_model_path), ("p/1-sft".into(), None));
        assert_eq!(ppo.rewards.reward.len(), 2);
        // `max_steps` is for those that have it, and no refusal of PPO, which has another length.
        let config = pipeline(&format!("{least}max_steps: 3\nlogging_steps: 1\n"), &[]).unwrap();
        assert_eq!((config.sft.unwrap().max_steps, config.reward.unwrap().max_steps), (Some(3), Some(3)));
        let own = pipeline(&format!("{least}ppo: {{max_steps: 3}}\n"), &[]).unwrap_err();
        assert!(own.starts_with("run.yaml:4: ppo: max_steps = 3: total_episodes is the length"), "{own}");
        // What is left out and was never made is not there to begin with.
        let config = pipeline(&format!("{least}{text}"), &["--skip", "sft,reward"]).unwrap();
        assert_eq!((config.sft, config.reward), (None, None));
        let ppo = config.ppo.unwrap();
        assert_eq!((ppo.sft_model_path, ppo.model_revision.as_str()), ("m".into(), "v1"));
        let error = |text: &str| pipeline(text, &[]).unwrap_err();
        for (text, wanted) in [
            ("ppo:\n  kl_coeff: 1\n", "run.yaml:5: unknown key `ppo.kl_coeff`; did you mean `kl_coef`?"),
            ("ppos:\n  kl_coef: 1\n", "run.yaml:4: unknown key `ppos`; did you mean `ppo`?"),
            ("kl_coeff: 1\n", "run.yaml:4: unknown key `kl_coeff`; did you mean `kl_coef`?"),
            ("sft:\n  kl_coef: 1\n", "run.yaml:5: unknown key `sft.kl_coef`; `rlhf sft --help` lists the flags"),
            ("ppo:\n  kl_coef: x\n", "run.yaml:5: `ppo.kl_coef`: expected a number, found `x`"),
            ("ppo:\n  kl_coef: [1]\n", "run.yaml:5: `ppo.kl_coef`: expected one value, found a list or a map"),
            ("ppo:\n  kl_coef: 1\n\n  kl_coef: 2\n", "run.yaml:7: `kl_coef` is set twice"),
            ("ppo: 3\n", "run.yaml:4: `ppo`: expected settings of the form `key: value` below it"),
            ("ppo: [kl_coef]\n", "run.yaml:4: `ppo`: expected settings of the form `key: value` below it"),
            ("ppo:\n  kl_coef: -1\n", "run.yaml:5: ppo: kl_coef = -1: expected a number of 0 or more"),
            ("kl_coef: -1\nppo:\n", "run.yaml:4: ppo: kl_coef = -1: expected a number of 0 or more"),
            (
                "seed: 1\nppo:\n  adap_kl_ctrl: true\n  kl_coef: 0\n",
                "run.yaml:6: ppo: adap_kl_ctrl = true has no effect with kl_coef = 0",
            ),
            ("sft: {output_dir: x}\n", "run.yaml:4: `sft.output_dir`: expected it above the sections"),
            ("resume_from_checkpoint: x\n", "resume_from_checkpoint = x: expected true"),
            ("skip: [sft, reward, ppo]\n", "skip = sft,reward,ppo leaves nothing to do"),
            ("skip: 7\n", "run.yaml:4: `skip`: expected one of sft, reward, ppo, found `7`"),
        ] {
            let found = error(&format!("{least}{text}"));
            assert!(found.starts_with(wanted), "{found}\nis not {wanted}");
        }
        let found = error("output_dir: o\nsft: {model_name_or_path: m, dataset_name: d}\n\nreward:\n");
        assert!(found.starts_with("run.yaml:4: reward: ") && found.contains("--dataset_name"), "{found}");
        let found = pipeline("output_dir: o\ndataset_name: d\nskip: sft\n", &[]).unwrap_err();
        assert!(found.contains("reward: sft is left out, and o/1-sft holds no model"), "{found}");
    }

    #[test]
    fn a_section_of_a_pipeline_takes_another_systems_names_and_they_stand_for_ours() {
        let least = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\n";
        let pipeline = |ppo: &str| match with_file(&format!("{least}ppo:\n  preset: trl-legacy\n{ppo}"), &["pipeline"])
        {
            Ok(Task::Pipeline(config)) => Ok(config.ppo.unwrap()),
            Ok(task) => panic!("{task:?}"),
            Err(error) => Err(error),
        };
        let ppo = pipeline("  init_kl_coef: 0.3\n  steps: 8\n  batch_size: 4\n").unwrap();
        assert_eq!((ppo.kl_coef, ppo.total_episodes, ppo.legacy.batch_size), (0.3, Some(8), Some(4)));
        assert!(ppo.legacy.value_head && ppo.kl.adap_kl_ctrl);
        assert_eq!((ppo.sft_model_path, ppo.reward_model_path), ("o/1-sft".into(), Some("o/2-reward".into())));
        // What a section names is not linked, whichever name it uses.
        let ppo = pipeline("  model_name: x\n  reward_model: y\n  query_dataset: z\n").unwrap();
        assert_eq!((ppo.sft_model_path, ppo.reward_model_path), ("x".into(), Some("y".into())));
        assert_eq!((ppo.data.dataset_name, ppo.data.data_split), (vec!["z".into()], None));
        let twice = pipeline("  kl_coef: 0.1\n  init_kl_coef: 0.2\n").unwrap_err();
        assert!(twice.starts_with("run.yaml:7: `ppo.init_kl_coef` is set twice"), "{twice}");
        let refused = pipeline("  world_size: 2\n").unwrap_err();
        assert!(refused.starts_with("run.yaml:6: ppo: world_size = 2: there is one process"), "{refused}");
    }

    /// The flags that a cell of a table, or a line of text, names: `--flag` in backticks, with a value or without.
    fn flags_in(text: &str) -> impl Iterator<Item = &str> {
        let code = text.split('`').skip(1).step_by(2);
        let words = code.flat_map(str::split_whitespace).filter_map(|word| word.strip_prefix("--"));
        words.map(|word| word.split(['=', ',']).next().unwrap_or_default())
    }

    #[test]
    fn every_flag_that_the_migration_page_names_is_there() {
        let page = include_str!("../../../docs/migration.md");
        let rlhf = rlhf_command();
        let knows = |command: &str, flag: &str| {
            let command = rlhf.find_subcommand(command).unwrap_or_else(|| panic!("no command {command}"));
            let names = |arg: &Arg| {
                arg.get_long() == Some(flag) || arg.get_all_aliases().is_some_and(|all| all.contains(&flag))
            };
            command.get_arguments().any(names)
        };
        let mut checked = 0;
        let mut command = None;
        for line in page.lines() {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let Some(ours) = cells.get(2).filter(|_| line.starts_with('|')) else {
                command = None;
                for flag in flags_in(line) {
                    let known = rlhf.get_subcommands().any(|command| knows(command.get_name(), flag));
                    assert!(known, "no --{flag} in any command: {line}");
                }
                continue;
            };
            match (command, ours.strip_prefix("`rlhf ").and_then(|rest| rest.split([' ', '`']).next())) {
                (None, Some(name)) => command = Some(name),
                (None, None) => {}
                (Some(name), _) => {
                    // Where it is the same, theirs is ours.
                    let theirs = cells[1].split('`').skip(1).step_by(2).filter(|_| *ours == "the same");
                    for flag in theirs {
                        assert!(knows(name, flag), "no --{flag} in `rlhf {name}`: {line}");
                        checked += 1;
                    }
                    for flag in flags_in(ours).chain(flags_in(cells.get(3).unwrap_or(&""))) {
                        assert!(knows(name, flag), "no --{flag} in `rlhf {name}`: {line}");
                        checked += 1;
                    }
                }
            }
        }
        assert!(checked > 150, "only {checked} flags were found in the tables");
        let preset =
            rlhf.find_subcommand("ppo").and_then(|ppo| ppo.get_arguments().find(|arg| arg.get_id() == "preset"));
        for after in page.split("--preset ").skip(1) {
            let name: String = after.chars().take_while(|c| c.is_alphanumeric() || *c == '-').collect();
            assert_eq!(refusal(preset.unwrap(), &name), None, "{name}");
        }
        // The file of its three steps is one.
        let file = page.split("```yaml").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        let Task::Pipeline(chat) = with_file(file, &["pipeline"]).unwrap() else { panic!() };
        let ppo = chat.ppo.unwrap();
        assert_eq!((ppo.preset, ppo.data.data_split, ppo.kl_coef), (Preset::DeepspeedChat, "2,4,4".parse().ok(), 0.1));
        assert_eq!(ppo.sft_model_path, PathBuf::from("runs/chat/1-sft"));
    }

    #[test]
    fn the_example_of_a_pipeline_is_the_demos_three_files() {
        let file = |name: &str| format!("{}/../../examples/sentiment/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
        let single = |name: &str| parse_words(&[name, "--config", &file(name)]).unwrap();
        let Task::Pipeline(found) = parse_words(&["pipeline", "--config", &file("pipeline")]).unwrap() else {
            panic!()
        };
        let (Task::Sft(mut sft), Task::Reward(mut reward), Task::Ppo(mut ppo)) =
            (single("sft"), single("reward"), single("ppo"))
        else {
            panic!()
        };
        let dir = |name: &str| PathBuf::from("runs/sentiment-pipeline").join(name);
        for (run, name) in [(&mut sft.run, "1-sft"), (&mut reward.run, "2-reward"), (&mut ppo.run, "3-ppo")] {
            run.output_dir = dir(name);
        }
        reward.model_name_or_path = dir("1-sft");
        (ppo.sft_model_path, ppo.reward_model_path) = (dir("1-sft"), Some(dir("2-reward")));
        let expected = PipelineConfig {
            output_dir: dir("").parent().unwrap().join("sentiment-pipeline"),
            sft: Some(sft),
            reward: Some(reward),
            ppo: Some(ppo),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn dashes_and_underscores_name_the_same_flag_and_values_keep_theirs() {
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
    fn a_prompt_after_a_yes_or_no_flag_stays_a_prompt() {
        let task = parse_words(&["generate", "--model_name_or_path", "m", "--ignore_eos", "The film was"]).unwrap();
        let Task::Generate(config) = task else { panic!("{task:?}") };
        assert!(config.ignore_eos);
        assert_eq!(config.prompts, ["The film was"]);
    }

    #[test]
    fn a_flag_of_many_values_takes_one_at_a_time_so_that_a_prompt_stays_a_prompt() {
        let words =
            ["--stop_token_ids", "1,2", "--stop_token_ids", "3", "--stop_strings", "a,b", "--stop_strings", "c"];
        let task = parse_words(&[&["generate", "--model", "m"], &words[..], &["The film"]].concat()).unwrap();
        let Task::Generate(config) = task else { panic!("{task:?}") };
        assert_eq!((config.stop_token_ids, config.prompts), (vec![1, 2, 3], vec!["The film".to_string()]));
        assert_eq!(config.stop_strings, ["a,b", "c"]);
    }

    #[test]
    fn none_and_null_unset_what_an_earlier_flag_or_the_file_set() {
        let words = ["--total_episodes", "8", "--total_episodes", "None", "--stop_token", "eos", "--stop_token=null"];
        let config = ppo(&words);
        assert_eq!((config.total_episodes, config.stop_token), (None, None));
        let words = [&PPO[..], &["--stop_token_id", "none"]].concat();
        let Task::Ppo(config) = with_file("stop_token_id: 3\n", &words).unwrap() else { panic!() };
        assert_eq!(config.stop_token_id, None);
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
    fn targets_of_lora_stand_side_by_side_as_trl_takes_them_or_with_commas() {
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
    fn several_datasets_stand_side_by_side_or_in_a_list_and_one_needs_none() {
        let names = |config: &PpoConfig| {
            config.data.dataset_name.iter().map(|name| name.display().to_string()).collect::<Vec<_>>()
        };
        let config = ppo(&["--dataset_name", "a.jsonl", "b", "--dataset_weights", "0.7", "0.3"]);
        assert_eq!((names(&config), config.data.dataset_weights), (vec!["a.jsonl".into(), "b".into()], vec![0.7, 0.3]));
        let rest = ["ppo", "--sft_model_path", "s", "--reward_model_path", "r", "--output_dir", "o"];
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
    fn a_preset_is_behind_the_file_and_the_flags_and_before_the_defaults() {
        let config = ppo(&["--preset", "deepspeed-chat"]);
        assert_eq!(config, PpoConfig::with_preset(Preset::DeepspeedChat, "policy", "judge", "prompts.jsonl", "out"));
        let words = [&PPO[..], &["--temperature", "0.7"]].concat();
        let Task::Ppo(config) = with_file("preset: deepspeed-chat\nkl_coef: 0.05\n", &words).unwrap() else { panic!() };
        assert_eq!((config.kl_coef, config.temperature, config.vf_coef), (0.05, 0.7, 1.0));
        let words = [&PPO[..], &["--preset=trl"]].concat();
        let Task::Ppo(config) = with_file("preset: deepspeed-chat\nvf_coef: 0.5\n", &words).unwrap() else { panic!() };
        assert_eq!((config.preset, config.kl_coef, config.vf_coef), (Preset::Trl, 0.05, 0.5));
    }

    #[test]
    fn flags_of_deepspeed_chat_are_ours_under_other_names_with_its_preset() {
        let chat = |words: &str| {
            let line = "ppo --preset deepspeed-chat --actor_model_name_or_path a --critic_model_name_or_path c --data_path d \
                        --output_dir o";
            parse_words(&line.split_whitespace().chain(words.split_whitespace()).collect::<Vec<_>>())
        };
        let read = |words: &str| match chat(words).unwrap() {
            Task::Ppo(config) => config,
            task => panic!("not ppo: {task:?}"),
        };
        assert_eq!(read(""), PpoConfig::with_preset(Preset::DeepspeedChat, "a", "c", "d", "o"));
        let config = read(
            "--deepspeed --per_device_generation_batch_size 8 --per_device_training_batch_size 4 --generation_batches 2 \
             --ppo_epochs 2 --max_answer_seq_len 64 --max_prompt_seq_len 128 --actor_learning_rate 1e-5 \
             --critic_learning_rate 2e-6 --actor_weight_decay 0.1 --critic_weight_decay 0.2 --num_warmup_steps 7 \
             --num_padding_at_beginning 1 --actor_dropout 0.0 --inference_tp_size 1 --actor_zero_stage 0 --offload false \
             --enable_ema --actor_gradient_checkpointing --enable_tensorboard --compute_fp32_loss --local_rank -1 --seed 1234 \
             --unsupervised_dataset_name texts --unsup_coef 20 --print_answers --enable_test_mode --test_stop_step 3",
        );
        let plan = config.plan(100).unwrap();
        assert_eq!((plan.batch_size, plan.epoch.mini_batch_size, config.num_ppo_epochs), (16, 4, 2));
        assert_eq!((config.response_length, config.prompt_length.max_prompt_length), (64, Some(128)));
        assert_eq!((config.learning_rate, config.value_optimizer().0), (1e-5, 2e-6));
        let decays = |config: &PpoConfig| (config.optimizer.weight_decay, config.value_optimizer().1.weight_decay);
        assert_eq!(decays(&config), (0.1, 0.2));
        // The actor's is the actor's alone, the critic's 0 unless something says another.
        assert_eq!(decays(&read("--actor_weight_decay 0.1")), (0.1, 0.0));
        assert_eq!(decays(&read("--critic_weight_decay 0.2")), (0.0, 0.2));
        assert_eq!(decays(&read("--actor_weight_decay 0.1 --value_weight_decay 0.3")), (0.1, 0.3));
        assert_eq!((config.optimizer.warmup_steps, config.run.gradient_checkpointing), (7, true));
        assert_eq!((config.run.report_to, config.ema.enable_ema, config.run.seed), (ReportTo::Tensorboard, true, 1234));
        assert_eq!((config.peft.use_peft, config.value_lora()), (false, None));
        let window = |words: &str| (read(words).run.fp16, read(words).run.loss_scale.loss_scale_window);
        for (words, expected) in [
            ("--dtype fp16", (true, 100)),
            ("--fp16", (true, 100)),
            ("--fp16 --loss_scale_window 7", (true, 7)),
            ("--dtype fp16 --fp16=false", (false, 1000)),
            ("--bf16", (false, 1000)),
        ] {
            assert_eq!(window(words), expected, "{words}");
        }
        let config = read("--actor_lora_dim 8 --only_optimize_lora --actor_lora_learning_rate 1e-3");
        let lora = config.peft.lora().unwrap();
        assert_eq!((lora.r, lora.alpha, lora.target_modules), (8, 1.0, Some(vec!["decoder.layers.".into()])));
        assert_eq!((config.learning_rate, config.value_lora(), config.value_optimizer().0), (1e-3, None, 5e-6));
        let config = read("--critic_lora_dim 4 --critic_lora_module_name layers. --only_optimize_lora --dtype bf16");
        assert_eq!((config.peft.use_peft, config.value_lora().unwrap().r, config.run.bf16), (false, 4, true));
        assert_eq!((config.value_optimizer().0, config.learning_rate), (5e-4, 9.65e-6));
        for (words, message) in [
            (
                "--enable_hybrid_engine",
                "enable_hybrid_engine = true: generation here has a cache of its own and needs no",
            ),
            (
                "--actor_zero_stage 2",
                "actor_zero_stage = 2: it shards models over DeepSpeed's processes, and this is one",
            ),
            ("--offload", "offload = true: it moves weights between GPU and CPU"),
            ("--actor_dropout 0.1", "actor_dropout = 0.1: no model's own dropout is applied here"),
            ("--actor_lora_dim 8", "actor_lora_dim = 8 without only_optimize_lora = true trains embeddings"),
            ("--critic_lora_dim x", "critic_lora_dim = x: expected a whole number"),
            (
                "--max_answer_seq_len 9 --response_length 8",
                "max_answer_seq_len and response_length say the same: give one",
            ),
        ] {
            let error = chat(words).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
        assert_eq!(
            ppo_error(&["--max_answer_seq_len", "2"]),
            "max_answer_seq_len is a flag of --preset deepspeed-chat; else it is response_length"
        );
        assert_eq!(ppo_error(&["--offload"]), "offload is a flag of --preset deepspeed-chat alone");
        // In a file they are keys, and a flag wins.
        let text = "preset: deepspeed-chat\nactor_model_name_or_path: a\ncritic_model_name_or_path: c\ndata_path: [d, e]\n\
                    ppo_epochs: 3\noffload: false\nmax_answer_seq_len: 9\n";
        let words = ["ppo", "--output_dir", "o", "--max_answer_seq_len", "11"];
        let Task::Ppo(config) = with_file(text, &words).unwrap() else { panic!() };
        assert_eq!((config.num_ppo_epochs, config.response_length, config.data.dataset_name.len()), (3, 11, 2));
    }

    #[test]
    fn the_last_flag_wins() {
        let config = ppo(&["--dataset_name", "a", "b", "--dataset_name", "c"]);
        assert_eq!(config.data.dataset_name, [PathBuf::from("c")]);
        assert_eq!(ppo(&["--seed", "1", "--seed", "2"]).run.seed, 2);
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_the_defaults() {
        let text = "# a run\nsft_model_path: from-file\nlearning-rate: 1e-5\nseed: 7\nbf16: yes\nkl_estimator: k3\n\
                    total_episodes: null\ngamma:\nlam: ~\n";
        let words = ["ppo", "--seed", "8", "--reward_model_path", "r", "--dataset_name", "d", "--output_dir", "o"];
        let Task::Ppo(config) = with_file(text, &words).unwrap() else { panic!() };
        let mut expected = PpoConfig::new("from-file", "r", "d", "o");
        expected.learning_rate = 1e-5;
        expected.run.seed = 8;
        expected.run.bf16 = true;
        expected.kl_estimator = KlEstimator::K3;
        assert_eq!(config, expected);
        let words = [&words[..], &["--bf16=false"]].concat();
        let Task::Ppo(config) = with_file(text, &words).unwrap() else { panic!() };
        assert!(!config.run.bf16);
    }

    #[test]
    fn prompts_given_as_words_replace_those_of_the_file() {
        let text = "model_name_or_path: m\nprompts: [from file, 007]\n";
        let Task::Generate(config) = with_file(text, &["generate"]).unwrap() else { panic!() };
        assert_eq!(config.prompts, ["from file", "007"]);
        let Task::Generate(config) = with_file(text, &["generate", "my own"]).unwrap() else { panic!() };
        assert_eq!(config.prompts, ["my own"]);
    }

    #[test]
    fn an_unknown_key_names_the_file_the_line_and_the_nearest_key() {
        assert_eq!(
            file_error("seed: 1\nlearning_rat: 1\n"),
            "run.yaml:2: unknown key `learning_rat`; did you mean `learning_rate`?"
        );
        assert_eq!(
            file_error("zzz: {a: [1]}\n"),
            "run.yaml:1: unknown key `zzz`; `rlhf ppo --help` lists the flags, whose names are the keys"
        );
        assert!(file_error("config: other.yaml\n").starts_with("run.yaml:1: unknown key `config`"));
    }

    #[test]
    fn each_fault_of_the_file_is_one_line_with_its_place() {
        for (text, message) in [
            ("seed: 1\nseed: 2\n", "run.yaml:2: `seed` is set twice"),
            ("kl-coef: 1\nkl_coef: 2\n", "run.yaml:2: `kl_coef` is set twice"),
            ("\nseed: abc\n", "run.yaml:2: `seed`: expected a whole number, 0 or more, found `abc`"),
            ("kl_coef: .inf\n", "run.yaml:1: `kl_coef`: expected a number, found `.inf`"),
            ("bf16: maybe\n", "run.yaml:1: `bf16`: expected true or false, found `maybe`"),
            ("kl_estimator: k2\n", "run.yaml:1: `kl_estimator`: expected one of k1, k3, abs, mse, full, found `k2`"),
            (
                "value_lr_scheduler_type: step\n",
                "run.yaml:1: `value_lr_scheduler_type`: expected linear, cosine, cosine_with_restarts, polynomial, \
                 inverse_sqrt, constant or constant_with_warmup, found `step`",
            ),
            ("output_dir: ''\n", "run.yaml:1: `output_dir`: expected a path, found ``"),
            ("seed:\n  value: 1\n", "run.yaml:1: `seed`: expected one value, found a list or a map"),
            ("seed: [1]\n", "run.yaml:1: `seed`: expected one value, found a list or a map"),
            ("- seed\n", "run.yaml:1: expected lines of the form `key: value`"),
            ("seed\n", "run.yaml:1: expected lines of the form `key: value`"),
            ("seed: 1\n---\nseed: 2\n", "run.yaml:3: expected one YAML document, found two"),
            ("seed: 1\n bf16: 1\n", "run.yaml:2: not valid YAML: mapping values are not allowed in this context"),
        ] {
            assert_eq!(file_error(text), message);
        }
        let missing = parse_words(&["ppo", "--config", "no/such/run.yaml"]).unwrap_err();
        assert!(missing.starts_with("no/such/run.yaml: cannot read: "), "{missing}");
    }

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

    /// The names of TRL 1.11's configurations and scripts: transformers' arguments, the model's and the dataset's; then what
    /// each trainer has beside them.
    const SHARED: &str = "\
        output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type \
        lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon \
        optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm \
        label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing \
        activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile \
        torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache \
        neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps \
        logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level \
        log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id \
        trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size \
        prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object \
        eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy \
        save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token \
        hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end \
        metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint \
        full_determinism seed data_seed use_cpu accelerator_config parallelism_config dataloader_drop_last \
        dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers \
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order \
        remove_unused_columns label_names train_sampling_strategy length_column_name \
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend \
        ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict \
        resume_from_checkpoint local_rank model_name_or_path model_revision dtype attn_implementation \
        use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters \
        lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit load_in_4bit \
        bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage dataset_name dataset_config \
        dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers datasets streaming \
        test_split_size";
    const OF_PPO: &str = "\
        dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size \
        num_sample_generations response_length stop_token stop_token_id temperature missing_eos_penalty \
        sft_model_path world_size num_total_batches micro_batch_size local_batch_size batch_size \
        local_mini_batch_size mini_batch_size reward_model_path model_adapter_name ref_adapter_name \
        num_ppo_epochs whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam \
        ds3_gather_for_generation";
    const OF_SFT: &str = "\
        model_init_kwargs router_aux_loss_coef trust_remote_code chat_template_path dataset_text_field \
        dataset_kwargs dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing \
        packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss \
        assistant_only_loss loss_type activation_offloading pad_token";
    const OF_REWARD: &str = "\
        model_init_kwargs trust_remote_code chat_template_path disable_dropout dataset_num_proc eos_token \
        max_length pad_to_multiple_of center_rewards_coefficient activation_offloading pad_token";

    /// The fewest words of a command that are one.
    fn least(command: &str) -> Vec<&str> {
        match command {
            "ppo" => PPO.to_vec(),
            "merge" => vec!["merge", "--model_name_or_path", "m", "--output_dir", "o"],
            "sft" | "reward" => vec![command, "--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"],
            _ => vec![command, "--model_name_or_path", "m"],
        }
    }

    #[test]
    fn every_name_of_trl_works_or_is_noted_or_is_refused_with_its_reason() {
        let rlhf = rlhf_command();
        for (name, own) in [("ppo", OF_PPO), ("sft", OF_SFT), ("reward", OF_REWARD)] {
            let command = rlhf.find_subcommand(name).unwrap();
            let keys = Keys { top: vec![command], sections: Vec::new() };
            let (mut works, mut foreign) = (0, 0);
            for flag in SHARED.split_whitespace().chain(own.split_whitespace()) {
                let arg = keys.flag(flag).unwrap_or_else(|| panic!("rlhf {name}: no {flag}"));
                if !trl::is_added(arg) {
                    works += 1;
                    continue;
                }
                foreign += 1;
                let said = |value: &str| parsed(&[&least(name)[..], &[&format!("--{flag}"), value]].concat());
                match said("zzz") {
                    Ok(parsed) => {
                        let [note] = &parsed.notes[..] else { panic!("{flag}: {:?}", parsed.notes) };
                        assert!(note.starts_with(&format!("without effect here: {flag} (")), "{note}");
                        let plain = parse_words(&least(name)).unwrap();
                        assert_eq!(parsed.task, plain, "{flag}");
                    }
                    Err(error) => {
                        assert!(error.starts_with(&format!("{flag} = zzz: ")) && error.lines().count() == 1, "{error}");
                        let fine = error.split(" expected ").nth(1).unwrap().split([' ', ',', ';']).next().unwrap();
                        assert!(said(fine).is_ok(), "{flag} = {fine}");
                    }
                }
            }
            assert!(works > 40 && foreign > 60, "{name}: {works} {foreign}");
        }
    }

    #[test]
    fn documented_lines_of_trls_scripts_run_once_models_and_dataset_are_named() {
        let models = "--sft_model_path policy --reward_model_path judge --dataset_name prompts.jsonl";
        let read = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().filter(|word| *word != "\\").collect();
            let found = parsed(&[&["ppo"], &words[..]].concat()).unwrap_or_else(|error| panic!("{line}: {error}"));
            let Task::Ppo(config) = found.task else { panic!() };
            (config, found.notes)
        };
        let (config, notes) = read(&format!(
            "--learning_rate 3e-6 --num_ppo_epochs 1 --num_mini_batches 1 --output_dir models/minimal/ppo \
             --per_device_train_batch_size 64 --gradient_accumulation_steps 1 --total_episodes 10000 \
             --model_name_or_path EleutherAI/pythia-1b-deduped --non_eos_penalty {models}"
        ));
        assert!(config.non_eos_penalty && notes.is_empty(), "{notes:?}");
        let (config, notes) = read(
            "--output_dir models/minimal/ppo_tldr --learning_rate 3e-6 --per_device_train_batch_size 16 \
             --gradient_accumulation_steps 4 --total_episodes 1000000 --model_name_or_path EleutherAI/pythia-1b-deduped \
             --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
             --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \
             --local_rollout_forward_batch_size 16 --non_eos_penalty --stop_token eos --dataset_name trl-lib/tldr",
        );
        assert_eq!((config.plan(1).unwrap().batch_size, config.stop_token), (64, Some(StopToken::Eos)));
        assert!(notes.is_empty(), "{notes:?}");
        let (config, notes) = read(&format!(
            "{models} --dataset_test_split validation --learning_rate 3e-6 --output_dir out --per_device_train_batch_size 1 \
             --gradient_accumulation_steps 64 --total_episodes 30000 --missing_eos_penalty 1.0 --stop_token eos \
             --response_length 53 --eval_strategy steps --eval_steps 100 --logging_steps 10 --save_strategy no \
             --torch_dtype float32 --attn_implementation flash_attention_2 --trust_remote_code False --run_name tldr \
             --report_to none"
        ));
        assert_eq!((config.eval.eval_steps, config.run.checkpoints.save_steps), (Some(100), None));
        assert_eq!(
            notes,
            [
                "without effect here: run_name (a run is known by its output_dir); logging_steps (each update is logged); \
              attn_implementation (it changes memory and speed only, which are seen to here)"
            ]
        );
    }

    #[test]
    fn strategies_stand_for_their_steps() {
        let steps = |words: &str| {
            let config = ppo(&words.split_whitespace().collect::<Vec<_>>());
            (config.eval.eval_steps, config.run.checkpoints.save_steps)
        };
        assert_eq!(steps("--eval_strategy steps --save_strategy steps"), (Some(10), Some(500)));
        assert_eq!(steps("--evaluation_strategy steps --save_steps 7"), (Some(10), Some(7)));
        assert_eq!(steps("--eval_strategy no --save_strategy no"), (None, None));
        assert_eq!(ppo(&["--use_cpu"]).run.device, rlhf::device::Device::Cpu);
        let sft = ["sft", "--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"];
        let Task::Sft(config) =
            with_file("eval_strategy: steps\nlogging_steps: 3\nsave_strategy: no\nsave_steps: 500\n", &sft).unwrap()
        else {
            panic!()
        };
        assert_eq!((config.eval.eval_steps, config.run.checkpoints.save_steps), (Some(3), None));
        for (words, message) in [
            ("--eval_strategy epoch", "eval_strategy = epoch: expected steps or no; with eval_steps = N it is every N"),
            ("--eval_strategy no --eval_steps 3", "eval_strategy = no and eval_steps exclude each other"),
            ("--save_strategy best", "save_strategy = best needs metric_for_best_model"),
            ("--use_cpu --device cuda", "use_cpu = true and device exclude each other"),
        ] {
            let error = ppo_error(&words.split_whitespace().collect::<Vec<_>>());
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn the_whole_configuration_of_trls_trainer_with_step_is_a_file_for_its_preset() {
        let text = "preset: trl-legacy\noutput_dir: out\nexp_name: ppo\nseed: 0\nlog_with: null\ntask_name: null\nmodel_name: gpt2\n\
                    query_dataset: stanfordnlp/imdb\nreward_model: 'sentiment-analysis:lvwerra/distilbert-imdb'\n\
                    remove_unused_columns: true\ntracker_kwargs: {}\naccelerator_kwargs: {}\nproject_kwargs: {}\n\
                    tracker_project_name: trl\npush_to_hub_if_best_kwargs: {}\nsteps: 20000\nlearning_rate: 1.41e-05\n\
                    adap_kl_ctrl: true\ninit_kl_coef: 0.2\nkl_penalty: kl\ntarget: 6.0\nhorizon: 10000.0\ngamma: 1.0\nlam: 0.95\n\
                    cliprange: 0.2\ncliprange_value: 0.2\nvf_coef: 0.1\nbatch_size: 128\nforward_batch_size: null\n\
                    mini_batch_size: 128\ngradient_accumulation_steps: 1\nworld_size: null\nppo_epochs: 4\nmax_grad_norm: null\n\
                    optimize_cuda_cache: null\noptimize_device_cache: false\nearly_stopping: false\ntarget_kl: 1.0\n\
                    compare_steps: 1\nratio_threshold: 10.0\nuse_score_scaling: false\nuse_score_norm: false\nscore_clip: null\n\
                    whiten_rewards: false\ngradient_checkpointing: false\nis_encoder_decoder: null\nis_peft_model: null\n\
                    backward_batch_size: null\nglobal_backward_batch_size: null\nglobal_batch_size: null\ndataset_num_proc: null\n";
        let Task::Ppo(mut config) = with_file(text, &["ppo"]).unwrap() else { panic!() };
        let expected = PpoConfig::with_preset(
            Preset::TrlLegacy,
            "gpt2",
            "sentiment-analysis:lvwerra/distilbert-imdb",
            "stanfordnlp/imdb",
            "out",
        );
        (config.legacy.batch_size, config.legacy.mini_batch_size, config.step.target_kl) = (None, None, None);
        assert_eq!(config, expected);
        // With values that ask for what is not here: all in one answer, each with its line.
        let text = text
            .replace("world_size: null", "world_size: 8")
            .replace("tracker_kwargs: {}", "tracker_kwargs: {wandb: {a: 1}}");
        let text =
            text.replace("forward_batch_size: null", "forward_batch_size: 4").replace("gamma: 1.0", "gamma: 2.0");
        let text =
            text.replace("is_encoder_decoder: null", "is_encoder_decoder: true").replace("lam: 0.95", "lam: high");
        let error = with_file(&text, &["ppo"]).unwrap_err();
        let expected = [
            "run.yaml:24: `lam`: expected a number, found `high`",
            "run.yaml:32: world_size = 8: there is one process; expected none or 1",
            "run.yaml:29: forward_batch_size = 4: it is mini_batch_size under its older name; expected none",
            "run.yaml:46: is_encoder_decoder = true: models are decoders; expected none or false",
            "gamma = 2: expected a number from 0 to 1",
        ];
        assert_eq!(error.lines().collect::<Vec<_>>(), expected);
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

    #[test]
    fn a_value_of_a_preset_that_a_flag_makes_meaningless_is_left_out() {
        type Look = fn(&PpoConfig) -> bool;
        let cases: [(&str, &str, Look, &str); 12] = [
            ("deepspeed-chat", "--lr_scheduler_type constant", |c| c.optimizer.warmup_steps == 0, "`warmup_steps`"),
            ("deepspeed-chat", "--vf_coef 0", |c| c.value.value_learning_rate.is_none(), "`value_learning_rate`"),
            ("deepspeed-chat", "--stop_token_id 3", |c| c.stop_token.is_none(), "`stop_token`"),
            ("deepspeed-chat", "--warmup_ratio 0.1", |c| c.optimizer.warmup_steps == 0, "`warmup_steps`"),
            ("deepspeed-chat", "--response_length 1", |c| c.counts.min_response_length == 0, "`min_response_length`"),
            (
                "deepspeed-chat",
                "--score_position last_token",
                |c| c.counts.last_value_in_loss && c.counts.eos_in_loss == EosInLoss::Always,
                "`last_value_in_loss`",
            ),
            (
                "deepspeed-chat",
                "--value_head",
                |c| c.legacy.value_head && c.value.value_learning_rate.is_none(),
                "`value_learning_rate`",
            ),
            ("trl-legacy", "--init_kl_coef 0", |c| !c.kl.adap_kl_ctrl && c.kl_coef == 0.0, "`adap_kl_ctrl`"),
            ("trl-legacy", "--kl_coef_end 0.1", |c| !c.kl.adap_kl_ctrl, "`adap_kl_ctrl`"),
            ("trl-legacy", "--stop_token_id 3", |c| c.stop_token.is_none(), "`stop_token`"),
            ("trl-legacy", "--eos_in_loss never", |c| c.score_position == ScorePosition::AfterStop, "`score_position`"),
            ("trl-legacy", "--lr_scheduler_type linear", |c| c.optimizer.warmup_steps == 0, ""),
        ];
        for (preset, words, holds, noted) in cases {
            let words: Vec<&str> = words.split_whitespace().collect();
            let found = parsed(&[&PPO[..], &["--preset", preset], &words].concat())
                .unwrap_or_else(|e| panic!("{words:?}: {e}"));
            let Task::Ppo(config) = found.task else { panic!() };
            assert!(holds(&config), "{words:?}: {config:?}");
            let noted = if noted.is_empty() { String::new() } else { format!("{noted} of the preset is left out: ") };
            assert!(found.notes.first().map_or("", String::as_str).starts_with(&noted), "{words:?}: {:?}", found.notes);
            // What is written of the run is the same run.
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("run.yaml");
            settings::write_resolved(&config, &path).unwrap();
            assert_eq!(parse_words(&["ppo", "--config", path.to_str().unwrap()]).unwrap(), Task::Ppo(config));
        }
        // The user's own are refused as ever, on the line and in a file.
        let own = ["--preset", "deepspeed-chat", "--lr_scheduler_type", "constant", "--warmup_steps", "3"];
        assert!(ppo_error(&own).starts_with("warmup_steps = 3 has no effect with lr_scheduler_type = constant"));
        let error = with_file("preset: trl-legacy\nadap_kl_ctrl: true\nkl_coef: 0\n", &PPO).unwrap_err();
        assert!(error.starts_with("adap_kl_ctrl = true has no effect with kl_coef = 0"), "{error}");
        assert!(
            ppo_error(&["--preset", "trl-legacy", "--warmup_steps", "3"]).starts_with("warmup_steps = 3 has no effect")
        );
        assert!(ppo_error(&["--preset", "trl-legacy", "--fp16"]).starts_with("fp16 = true with value_head = true"));
        // A section of a pipeline is a file too.
        let text = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\nppo: {preset: deepspeed-chat, vf_coef: 0}\n";
        let Task::Pipeline(config) = with_file(text, &["pipeline"]).unwrap() else { panic!() };
        assert_eq!(config.ppo.unwrap().value.value_learning_rate, None);
    }

    #[test]
    fn no_size_is_large_enough_for_more_than_a_usage_error() {
        let mut counted = 0;
        for command in rlhf_command().get_subcommands().filter(|command| command.get_name() != PIPELINE) {
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                let is_number = arg.get_value_names().is_some_and(|names| names.iter().any(|name| name == "N"));
                let (Some(flag), true) = (arg.get_long(), is_number) else { continue };
                let own = format!("--{flag}");
                for value in ["18446744073709551615", "9223372036854775807"] {
                    let words = [&least(command.get_name())[..], &[&own, value]].concat();
                    if let Err(error) = parse_words(&words) {
                        assert!(error.contains(flag), "{words:?}: {error}");
                    } else {
                        assert!(
                            ["seed", "data_split_seed", "stop_token_id", "stop_token_ids", "total_episodes"]
                                .contains(&flag),
                            "{words:?}"
                        );
                    }
                }
                counted += 1;
            }
        }
        assert!(counted > 60, "{counted}");
    }

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

    #[test]
    fn a_resolved_configuration_read_back_is_the_same_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.yaml");
        let reread = |name: &str| parse_words(&[name, "--config", path.to_str().unwrap()]).unwrap();

        settings::write_resolved(&PpoConfig::new("a", "b", "c", "d"), &path).unwrap();
        assert_eq!(reread("ppo"), Task::Ppo(PpoConfig::new("a", "b", "c", "d")));

        let mut ppo = PpoConfig::new("a: b # c", "007", "yes", "~");
        ppo.value_model_path = Some("1.0".into());
        ppo.rewards.reward = ["tags=regex:^<a>, \"b\": 'c' #", "length:40"].map(String::from).into();
        ppo.rewards.reward_command = Some("python3 reward.py --x 'a b'".into());
        ppo.rewards.reward_weights = ["model=0.5", "tags=-1"].map(String::from).into();
        ppo.new_reward_head = true;
        ppo.data.dataset_test_split = "- 'quoted' \"twice\"".into();
        ppo.data.dataset_name.push("007".into());
        ppo.data.dataset_weights = vec![0.7, 1.0 / 3.0];
        ppo.data.eval_split_size = Some(0.05);
        ppo.prompt_length.max_prompt_length = Some(512);
        ppo.prompt_length.long_prompts = LongPrompts::TruncateLeft;
        ppo.total_episodes = Some(1000);
        ppo.num_train_epochs = 1.0 / 3.0;
        ppo.stop_token = Some(StopToken::Eos);
        ppo.missing_eos_penalty = Some(1.0);
        ppo.score_position = ScorePosition::LastToken;
        ppo.kl_estimator = KlEstimator::Mse;
        ppo.preset = Preset::TrlPpov2;
        ppo.num_mini_batches = 2;
        ppo.whiten_advantages = WhitenAdvantages::MiniBatch;
        ppo.kl.kl_in_loss = true;
        ppo.kl.adap_kl_ctrl = true;
        ppo.kl.horizon = 1e5;
        ppo.step.cliprange_high = Some(0.28);
        ppo.step.dual_clip = Some(3.0);
        ppo.step.target_kl = Some(0.1);
        ppo.value.value_learning_rate = Some(1e-5);
        ppo.value.value_lr_scheduler_type = Some(LrSchedulerType::ConstantWithWarmup);
        ppo.value.value_max_grad_norm = Some(0.0);
        ppo.generation.per_device_generation_batch_size = None;
        ppo.unsupervised.unsupervised_dataset_name = Some("texts".into());
        ppo.ema.enable_ema = true;
        ppo.value_peft.value_use_peft = Some(false);
        ppo.peft.use_peft = true;
        ppo.peft.lora_target_modules = vec!["q_proj".into(), "v_proj".into()];
        ppo.learning_rate = 1.41e-5;
        ppo.optimizer.lr_scheduler_type = LrSchedulerType::ConstantWithWarmup;
        ppo.optimizer.max_grad_norm = Some(0.1 + 0.2);
        ppo.optimizer.warmup_ratio = 0.1;
        ppo.run.seed = u64::MAX;
        ppo.run.report_to = ReportTo::Tensorboard;
        ppo.run.num_threads = Some(1);
        settings::write_resolved(&ppo, &path).unwrap();
        assert_eq!(reread("ppo"), Task::Ppo(ppo));

        // With its preset's defaults, and with one of them changed back.
        let mut chat = PpoConfig::with_preset(Preset::DeepspeedChat, "a", "b", "c", "d");
        settings::write_resolved(&chat, &path).unwrap();
        assert_eq!(reread("ppo"), Task::Ppo(chat.clone()));
        (chat.kl_coef, chat.stop_token, chat.prompt_length.max_prompt_length) = (0.05, None, None);
        chat.counts.eos_in_loss = EosInLoss::Never;
        chat.value.value_learning_rate = None;
        settings::write_resolved(&chat, &path).unwrap();
        assert_eq!(reread("ppo"), Task::Ppo(chat));

        let mut sft = SftConfig::from_scratch("c.json", "t", "d", "o");
        sft.completion_only_loss = false;
        sft.max_steps = Some(5);
        settings::write_resolved(&sft, &path).unwrap();
        assert_eq!(reread("sft"), Task::Sft(sft));

        let mut reward = RewardConfig::new("m", "d", "o");
        reward.center_rewards_coefficient = Some(0.01);
        settings::write_resolved(&reward, &path).unwrap();
        assert_eq!(reread("reward"), Task::Reward(reward));

        let mut generate = GenerateConfig::new("m");
        generate.prompts =
            ["two\nlines", "- x", "--do_sample", "none", "", " 007 ", "\u{1F3AC} é\t\"'"].map(String::from).into();
        generate.stop_token_ids = vec![0, 50256];
        generate.stop_strings = ["\n\n", "Human:", "7"].map(String::from).into();
        generate.do_sample = Some(false);
        generate.min_p = Some(0.05);
        generate.output_format = Some(Format::Jsonl);
        settings::write_resolved(&generate, &path).unwrap();
        assert_eq!(reread("generate"), Task::Generate(generate));
    }

    #[test]
    fn consent_to_overwrite_is_never_read_from_a_resolved_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.yaml");
        let mut config = PpoConfig::new("a", "b", "c", "d");
        config.run.overwrite_output_dir = true;
        settings::write_resolved(&config, &path).unwrap();
        let task = parse_words(&["ppo", "--config", path.to_str().unwrap()]).unwrap();
        assert_eq!(task, Task::Ppo(PpoConfig::new("a", "b", "c", "d")));
    }
}
