//! `rlhf replay`: the settings of the run with the flags of `rlhf ppo` that change them, and the result.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;

use clap::{Arg, ArgMatches, Command};
use comfy_table::{Table, presets};
use rlhf::dist::{as_ranks, num_ranks};
use rlhf::run::Runtime;
use rlhf::safe_text::one_line;
use rlhf::settings::{PpoConfig, ReplayConfig};
use rlhf::terminal::seven_digits;
use rlhf::train::ppo::{Differing, RecordedUpdate, Replayed};
use rlhf::{Error, Result};
use serde_json::Value;

use super::args::{normalize, on_line, parse_flags};
use super::errors::{Messages, with_refusals};
use super::keys::Keys;
use super::setting::Setting;
use super::{Parsed, Stop, Task, flags, with_settings};

/// The name of the command.
pub(super) const REPLAY: &str = "replay";

/// The command whose settings a replay changes.
const PPO: &str = "ppo";

/// Flags of `rlhf ppo` that a replay does not have: they concern the folder of a run and its uploads, and are not in the run's record.
const RUN_FLAGS: [&str; 4] =
    ["overwrite_output_dir", "resume_from_checkpoint", "resume_with_changed_inputs", "hub_token"];

/// An update to compute again, and the settings for it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ReplayTask {
    replay: ReplayConfig,
    pub(crate) ppo: Box<PpoConfig>,
}

/// Returns the command: its own flags, and those of `rlhf ppo`, hidden.
pub(super) fn command() -> Command {
    let replay = flags::command::<ReplayConfig>(REPLAY);
    let is_replay_flag = |arg: &Arg| replay.get_arguments().any(|flag| flag.get_id() == arg.get_id());
    let ppo = flags::command::<PpoConfig>(PPO);
    let is_run_flag = |arg: &Arg| RUN_FLAGS.contains(&arg.get_id().as_str());
    let settings = ppo.get_arguments().filter(|arg| !is_replay_flag(arg) && !is_run_flag(arg)).cloned();
    let settings: Vec<Arg> = settings.map(|arg| arg.required(false).hide(true)).collect();
    replay.args(settings)
}

/// Parses `rlhf replay RUN --update N FLAGS`, with the settings that the run has recorded.
///
/// # Errors
/// As [`super::parse`]; if the run has no such update.
pub(super) fn parse(args: Vec<OsString>, rlhf: &Command) -> Result<Parsed, Stop> {
    let mut args = normalize(args, rlhf);
    let mut messages = Messages::default();
    parse_flags(rlhf, &mut args, &mut messages.refusals)?;
    let matches = rlhf.clone().try_get_matches_from(&args);
    let matches = matches.map_err(|error| with_refusals(std::mem::take(&mut messages.refusals), error))?;
    let (_, flags) = matches.subcommand().expect("it is replay");
    let replay = flags::read::<ReplayConfig>(flags)?;
    messages.refusals.add(replay.check())?;
    messages.refusals.end()?;
    let recorded = RecordedUpdate::open(&replay.run, replay.update)?;
    recorded.check_ranks(num_ranks())?;
    let ppo = rlhf.find_subcommand(PPO).expect("it is a command");
    let keys = Keys { top: vec![ppo], sections: Vec::new() };
    let (known, unknown): (Vec<_>, Vec<_>) =
        recorded.settings().iter().partition(|(name, _)| keys.flag(name).is_some());
    let settings: Vec<Setting> = known.into_iter().map(|(name, value)| setting(&keys.canonical(name), value)).collect();
    let program = ["rlhf", PPO].map(OsString::from);
    let mut words: Vec<OsString> =
        program.into_iter().chain(ppo.get_arguments().flat_map(|arg| flag_words(arg, flags))).collect();
    let mut messages = Messages::default();
    if !unknown.is_empty() {
        let names: Vec<&str> = unknown.iter().map(|(name, _)| name.as_str()).collect();
        messages.notes.push(format!("settings of the run that this version does not have: {}", names.join(", ")));
    }
    let matches = parse_flags(rlhf, &mut words, &mut messages.refusals)?;
    let (_, flags) = matches.subcommand().expect("it is ppo");
    // Batches have the sizes that the run's ranks gave them.
    let ranks = recorded.ranks();
    let task = as_ranks(ranks, || with_settings(ppo, rlhf, (flags, &words[..]), settings, &mut messages))?;
    let written = messages.refusals.checked()?;
    match task {
        Task::Ppo(ppo) => {
            let task = Task::Replay(ReplayTask { replay, ppo: Box::new(ppo) });
            Ok(Parsed { task, notes: messages.notes, written })
        }
        _ => unreachable!("ppo has PpoConfig"),
    }
}

/// Returns a recorded setting.
fn setting(name: &str, value: &Value) -> Setting {
    let word = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let values = match value {
        Value::Null => Vec::new(),
        Value::Array(values) => values.iter().map(word).collect(),
        value => vec![word(value)],
    };
    Setting::new(name, values)
}

/// Returns the flag `arg` as it is on the command line; no words if it is not.
fn flag_words(arg: &Arg, flags: &ArgMatches) -> Vec<OsString> {
    let id = arg.get_id().as_str();
    let replay_flags = ["output_dir", "help"];
    let written = flags.try_get_raw(id).ok().flatten().filter(|_| on_line(flags, id) && !replay_flags.contains(&id));
    let (Some(values), Some(long)) = (written, arg.get_long()) else { return Vec::new() };
    let values: Vec<OsString> = values.map(OsString::from).collect();
    let joined = |values: &[OsString], between: &str| {
        let mut word = OsString::from(format!("--{long}="));
        for (at, value) in values.iter().enumerate() {
            word.push(if at > 0 { between } else { "" });
            word.push(value);
        }
        word
    };
    match (arg.get_value_delimiter(), &values[..]) {
        (Some(delimiter), values) => vec![joined(values, &delimiter.to_string())],
        (None, [_]) => vec![joined(&values, "")],
        (None, many) => std::iter::once(OsString::from(format!("--{long}"))).chain(many.iter().cloned()).collect(),
    }
}

/// Computes the update again, and prints the comparison with the run.
pub(crate) fn replay(task: &ReplayTask, runtime: &Runtime) -> Result<()> {
    let absolute = |path: &Path| std::path::absolute(path).map_err(Error::io("find", path));
    let mut run = task.replay.run.clone();
    let mut out = task.replay.output_dir();
    let recorded = RecordedUpdate::open(&run, task.replay.update)?;
    // Paths among the settings are relative to the folder that the run was started in.
    let elsewhere =
        recorded.working_dir().filter(|dir| dir.is_dir() && std::env::current_dir().is_ok_and(|here| here != *dir));
    if let Some(dir) = elsewhere {
        run = absolute(&run)?;
        out = absolute(&out)?;
        std::env::set_current_dir(dir).map_err(Error::io("enter the folder", dir))?;
    }
    let world = &runtime.world;
    let recorded = world.agree(RecordedUpdate::open(&run, task.replay.update))?;
    let replayed = recorded.replay(&task.ppo, &out, runtime)?;
    if !world.is_main() {
        return Ok(());
    }
    let update = task.replay.update;
    let numbers = match world.size() {
        1 => replayed.output_dir().join("update.safetensors"),
        _ => replayed.output_dir().join("update-rank-*.safetensors"),
    };
    let folder = replayed.output_dir().display();
    let text = match replayed.verdict() {
        _ if !replayed.changed().is_empty() => changed(&replayed),
        Ok(equal) => format!("update {update}: {equal}\n"),
        Err(differs) => {
            return Err(Error::Run(format!(
                "update {update} {differs}; comparison.json in {folder} lists every difference"
            )));
        }
    };
    let text = format!("{text}every number of the update is in {}\n", one_line(&numbers.display().to_string()));
    io::stdout().write_all(text.as_bytes()).map_err(Error::io("write to", "standard output"))
}

/// The changed settings, and the metrics next to those of the run.
fn changed(replayed: &Replayed) -> String {
    let settings =
        replayed.changed().iter().map(|(name, [then, now])| format!("{name} = {now} (in the run: {then})\n"));
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(["metric", "in the run", "replayed", "change"]);
    let shown = |value: Option<f64>| value.map_or("none".into(), |value| seven_digits(value).to_string());
    for Differing { name, run, replayed } in replayed.metrics() {
        let change = run.zip(*replayed).map(|(run, replayed)| replayed - run);
        table.add_row([name.clone(), shown(*run), shown(*replayed), shown(change)]);
    }
    let lines: String = settings.collect();
    let rounding = replayed.rounding().map_or(String::new(), |rounding| format!("note: {rounding}\n"));
    one_line_each(&format!("{lines}\n{table}\n{rounding}"))
}

/// Makes each line safe to print.
fn one_line_each(text: &str) -> String {
    text.lines().map(|line| format!("{}\n", one_line(line.trim_end()))).collect()
}
