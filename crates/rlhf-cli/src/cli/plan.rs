//! `rlhf plan`: the memory and time of a command, from its own flags and files.

use std::ffi::OsString;
use std::io::{self, Write};

use clap::Command;
use rlhf::dist::as_ranks;
use rlhf::dist::launch::Launch;
use rlhf::plan::{PlanOptions, PlannedRun};
use rlhf::safe_text::one_line;
use rlhf::settings::PlanFlags;
use rlhf::terminal::{Colour, Stream, wrap};
use rlhf::{Error, Result};

use super::args::{normalize, parse_flags, split_at_command};
use super::errors::Messages;
use super::{Parsed, Stop, Task, flags};

/// The name of the command.
pub(super) const PLAN: &str = "plan";

/// The commands that have a plan.
const COMMANDS: [&str; 9] = ["sft", "reward", "dpo", "distill", "ppo", "grpo", "rloo", "pipeline", "generate"];

/// Flags that stand alone, or have yes or no as their value.
const ALONE: [&str; 3] = ["--json", "--calibrate", "--help"];

/// A command to plan.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PlanTask {
    flags: PlanFlags,
    /// The command as it would run.
    task: Box<Task>,
}

/// Parses `rlhf plan FLAGS COMMAND ARGUMENTS`.
///
/// # Errors
/// As [`super::parse`].
pub(super) fn parse(args: Vec<OsString>, rlhf: &Command) -> Result<Parsed, Stop> {
    let (flags, command) = split_at_command(args, &ALONE, &COMMANDS);
    let mut flags = normalize(flags, rlhf);
    let mut messages = Messages::default();
    let matches = parse_flags(rlhf, &mut flags, &mut messages.refusals)?;
    let (_, matches) = matches.subcommand().expect("it is plan");
    let flags = flags::read::<PlanFlags>(matches)?;
    messages.refusals.add(flags.check())?;
    messages.refusals.end()?;
    check_command(command.first())?;
    let words = [OsString::from("rlhf")].into_iter().chain(command);
    let Parsed { task, notes, written } = as_ranks(flags.nproc_per_node * flags.nnodes, || super::parse(words))?;
    if planned(&task).is_none() && !matches!(task, Task::Pipeline(_) | Task::Generate(_)) {
        return Err(Error::Usage(
            "plan: eval_only = true trains nothing: expected a command that trains a model".into(),
        )
        .into());
    }
    Ok(Parsed { task: Task::Plan(PlanTask { flags, task: Box::new(task) }), notes, written })
}

/// Checks that `word` is a command that has a plan.
fn check_command(word: Option<&OsString>) -> Result<()> {
    let usage = |message: String| Err(Error::Usage(message));
    let commands = COMMANDS.join(", ");
    let Some(word) = word else {
        return usage(format!(
            "plan: expected a command to plan after its flags, one of {commands}: rlhf plan --memory 24GB ppo ..."
        ));
    };
    let name = word.to_string_lossy();
    match name.as_ref() {
        known if COMMANDS.contains(&known) => Ok(()),
        "launch" => {
            usage("plan: found launch: set the ranks before the command: rlhf plan --nproc_per_node 2 ppo ...".into())
        }
        _ => usage(format!("plan: expected one of {commands}, found `{name}`, which has no plan")),
    }
}

/// The training run of a task; `None` if the task is not a training run.
fn planned(task: &Task) -> Option<PlannedRun> {
    match task {
        Task::Sft(config) => Some(PlannedRun::Sft(config.clone())),
        Task::Reward(config) if !config.eval_only => Some(PlannedRun::Reward(config.clone())),
        Task::Dpo(config) => Some(PlannedRun::Dpo(config.clone())),
        Task::Distill(config) => Some(PlannedRun::Distill(config.clone())),
        Task::Ppo(config) => Some(PlannedRun::Ppo(config.clone())),
        _ => None,
    }
}

/// Prints the plan.
///
/// # Errors
/// If a model's configuration, its tokenizer or the data are missing or invalid.
pub(crate) fn plan(task: &PlanTask) -> Result<()> {
    let PlanTask { flags, task } = task;
    let options = PlanOptions {
        ranks: flags.nproc_per_node,
        machines: flags.nnodes,
        memory: flags.memory.map(|size| size.0),
        calibrate: flags.calibrate,
    };
    // On a narrow terminal a line ends after a word.
    let wrapped = |text: String| Stream::Out.width().map_or(text.clone(), |width| wrap(&text, Some(width), 4) + "\n");
    let text = match &**task {
        Task::Pipeline(config) => {
            let plan = rlhf::plan::pipeline(config, &options)?;
            if flags.json { plan.json()? + "\n" } else { wrapped(plan.table()) }
        }
        other => {
            let plan = match (other, planned(other)) {
                (Task::Generate(config), _) => rlhf::plan::generation(config, &options)?,
                (_, Some(run)) => rlhf::plan::plan(&run, &options)?,
                _ => return Err(Error::Usage("plan: expected a command that has a plan".into())),
            };
            if flags.json { plan.json()? + "\n" } else { wrapped(plan.table()) }
        }
    };
    io::stdout().write_all(text.as_bytes()).map_err(Error::io("write to", "standard output"))
}

/// Prints a warning before a run that needs more memory than this machine has.
pub(crate) fn warn(task: &Task) {
    let Some(run) = planned(task) else { return };
    let launch = Launch::from_env().ok().flatten();
    let (ranks, all) = launch.map_or((1, 1), |launch| (launch.local_size.max(1), launch.size.max(1)));
    let options = PlanOptions { ranks, machines: (all / ranks).max(1), memory: None, calibrate: false };
    if let Some(warning) = rlhf::plan::warning(&run, &options) {
        let _ = writeln!(io::stderr(), "{}", Stream::Err.labelled("warning", Colour::Yellow, &one_line(&warning)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::{PPO, parse_words};
    use rlhf::settings::ByteSize;

    #[test]
    fn the_flags_of_plan_end_at_the_command() {
        let parsed = |flags: &[&'static str]| match parse_words(&[&["plan"], flags, &PPO[..]].concat()).unwrap() {
            Task::Plan(PlanTask { flags, task }) if matches!(*task, Task::Ppo(_)) => flags,
            task => panic!("not a plan of ppo: {task:?}"),
        };
        assert_eq!((parsed(&[]).json, parsed(&[]).nproc_per_node, parsed(&[]).calibrate), (false, 1, true));
        let flags = parsed(&["--json", "--memory", "24GB", "--nproc", "2", "--nnodes=3", "--calibrate=false"]);
        assert_eq!((flags.json, flags.memory, flags.calibrate), (true, Some(ByteSize(24_000_000_000)), false));
        assert_eq!((flags.nproc_per_node, flags.nnodes), (2, 3));
        assert_eq!(parsed(&["--memory=1GiB", "--json"]).memory, Some(ByteSize(1 << 30)));
        let flags = parsed(&["--json", "true", "--calibrate", "No"]);
        assert_eq!((flags.json, flags.calibrate), (true, false));
    }

    #[test]
    fn errors_of_plan_and_of_its_command_are_one_line() {
        let ppo = |flags: &[&'static str]| [&["plan"], flags, &PPO[..]].concat();
        for (words, message) in [
            (ppo(&["--memory", "much"]), "--memory <SIZE>': expected a size above 0, such as 5GB"),
            (ppo(&["--memory", "24"]), "memory = 24: expected 1MB or more, with its unit, such as 24GB or 80GiB"),
            (ppo(&["--nproc_per_node", "0"]), "nproc_per_node = 0: expected at least 1"),
            (ppo(&["--memory"]), "a value is required for '--memory <SIZE>' but none was supplied"),
            (vec!["plan"], "plan: expected a command to plan after its flags"),
            (
                [ppo(&[]), vec!["--memory", "3GB"]].concat(),
                "unexpected argument '--memory' found; flags of plan come before the command: rlhf plan --memory ... ppo ...",
            ),
            (
                [&PPO[..], &["--nproc_per_node", "2"]].concat(),
                "found; flags of launch and plan come before the command: rlhf launch --nproc_per_node ... ppo ...",
            ),
            (
                vec!["plan", "score"],
                "plan: expected one of sft, reward, dpo, distill, ppo, grpo, rloo, pipeline, generate, found `score`, which has no plan",
            ),
            (vec!["plan", "launch", "ppo"], "plan: found launch: set the ranks before the command"),
            (vec!["plan", "plan", "ppo"], "found `plan`, which has no plan"),
            ([ppo(&[]), vec!["--seed", "x"]].concat(), "invalid value 'x' for '--seed <N>'"),
            (
                vec!["plan", "reward", "--model_name_or_path", "m", "--dataset_name", "d", "--eval_only"],
                "plan: eval_only = true trains nothing",
            ),
        ] {
            let error = parse_words(&words).expect_err(message);
            assert!(error.contains(message) && error.lines().count() == 1, "{words:?}: {error}");
        }
    }
}
