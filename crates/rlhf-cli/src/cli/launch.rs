//! `rlhf launch`: starts a command as several ranks of this machine, for those without torchrun or SLURM.

mod progress;
mod ranks;

use std::ffi::OsString;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Command;
use rlhf::device::{Device, count_gpus};
use rlhf::dist::as_ranks;
use rlhf::run::{CONFIG, has_checkpoint};
use rlhf::safe_text::one_line;
use rlhf::schema::Refusals;
use rlhf::settings::{LaunchFlags, Resume, RunConfig};
use rlhf::terminal::{Colour, Stream};
use rlhf::{Error, Result};

pub(crate) use self::ranks::end_with_launcher;
use self::ranks::{End, Ranks, Start, events};
use super::args::{normalize, on_line, parse_flags, split_at_command};
use super::errors::{Messages, script_of_trl};
use super::foreign::{self, LaunchFile};
use super::{Parsed, Stop, Task, flags};

/// The name of the command.
pub(super) const LAUNCH: &str = "launch";

/// The commands that `rlhf launch` starts.
pub(super) const COMMANDS: [&str; 12] =
    ["sft", "reward", "dpo", "distill", "ppo", "grpo", "rloo", "pipeline", "generate", "logprobs", "score", "replay"];

/// The commands among them with settings of sharding and precision.
const TRAINING: [&str; 7] = ["sft", "reward", "dpo", "distill", "ppo", "grpo", "rloo"];

/// A command to start as several ranks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LaunchTask {
    flags: LaunchFlags,
    /// Number of ranks on this machine.
    local_ranks: usize,
    /// Name and arguments of the command.
    command: Vec<OsString>,
    /// The command as each rank will parse it.
    task: Box<Task>,
}

/// Parses `rlhf launch FLAGS COMMAND ARGUMENTS`; the command's own line is parsed too, so that its errors are reported once
/// and not by every rank.
///
/// # Errors
/// As [`super::parse`].
pub(super) fn parse(args: Vec<OsString>, rlhf: &Command) -> Result<Parsed, Stop> {
    let (flags, mut command) = split_at_command(args, &["--help"], &COMMANDS);
    let mut flags = normalize(flags, rlhf);
    let mut messages = Messages::default();
    let matches = parse_flags(rlhf, &mut flags, &mut messages.refusals)?;
    let (_, matches) = matches.subcommand().expect("it is launch");
    let mut flags = flags::read::<LaunchFlags>(matches)?;
    if let Some(path) = flags.config_file.clone() {
        let file = foreign::launch(&path)?;
        file.place(&mut messages.refusals, |name| on_line(matches, name));
        fill(&mut flags, file, |name| on_line(matches, name));
        if command.first().is_some_and(|name| TRAINING.iter().any(|training| name == training)) {
            command.splice(1..1, ["--accelerate_config".into(), path.into_os_string()]);
        }
    }
    messages.refusals.add(flags.check())?;
    messages.refusals.end()?;
    check_command(command.first())?;
    let program = OsString::from("rlhf");
    let ranks = flags.local_ranks().unwrap_or_else(|| count_gpus().max(1)).saturating_mul(flags.nnodes);
    let words = [program].into_iter().chain(command.iter().cloned());
    let Parsed { task, .. } = as_ranks(ranks, || super::parse(words))?;
    let local_ranks = flags.local_ranks().unwrap_or_else(|| match device(&task) {
        Device::Cpu => 1,
        _ => count_gpus().max(1),
    });
    let task = Task::Launch(LaunchTask { flags, local_ranks, command, task: Box::new(task) });
    Ok(Parsed { task, notes: Vec::new(), written: Refusals::default() })
}

/// Sets the flags that are not on the command line as accelerate's file has them.
fn fill(flags: &mut LaunchFlags, file: LaunchFile, is_on_line: impl Fn(&str) -> bool) {
    if !is_on_line("nnodes") {
        flags.nnodes = file.num_machines.unwrap_or(flags.nnodes);
    }
    if !is_on_line("node_rank") {
        flags.node_rank = file.machine_rank.unwrap_or(flags.node_rank);
    }
    if !is_on_line("nproc_per_node") && !is_on_line("num_processes") {
        flags.num_processes = file.num_processes;
    }
    if !is_on_line("master_addr") {
        flags.master_addr = file.main_process_ip.unwrap_or_else(|| flags.master_addr.clone());
    }
    if !is_on_line("master_port") {
        flags.master_port = file.main_process_port.map(usize::from).or(flags.master_port);
    }
}

/// Checks that `word` is a command that can be started as ranks.
fn check_command(word: Option<&OsString>) -> Result<()> {
    let usage = |message: String| Err(Error::Usage(message));
    let commands = COMMANDS.join(", ");
    let Some(word) = word else {
        return usage(format!(
            "launch: expected a command to start after its flags, one of {commands}: rlhf launch --nproc_per_node 2 ppo ..."
        ));
    };
    let name = word.to_string_lossy();
    match name.as_ref() {
        known if COMMANDS.contains(&known) => Ok(()),
        "eval" | "merge" | "convert" | "push" | "report" | "watch" | "plan" | "chat" | "serve" | "session"
        | "doctor" | "schema" => {
            usage(format!("launch: {name} is done by one process: run rlhf {name} without launch"))
        }
        LAUNCH => usage("launch: found launch in it again: expected the command that each rank runs".into()),
        other if Path::new(other).file_name().is_some_and(|name| name == "rlhf") => usage(format!(
            "launch: expected one of {commands}, found `{other}`: each rank runs rlhf itself; leave the program's name out"
        )),
        other => match script_of_trl(other) {
            Some(hint) => usage(format!("launch: {hint}")),
            None => usage(format!("launch: expected one of {commands}, found `{name}`")),
        },
    }
}

/// Starts the ranks and waits for their end. Returns the exit code of the program.
///
/// # Errors
/// If a rank cannot be started or fails and no restart is left: the message names the rank; the exit code is the rank's.
pub(crate) fn launch(config: &LaunchTask) -> Result<u8> {
    let program = std::env::current_exe().map_err(Error::io("find the program", "rlhf"))?;
    let (sender, events) = events().map_err(Error::io("handle signals", "rlhf launch"))?;
    let max_restarts = config.flags.max_restarts;
    let replaced = Replaced::by(&config.task);
    let on_cpu = device(&config.task) == Device::Cpu || count_gpus() == 0;
    for restart in 0.. {
        let mut arguments = config.command.clone();
        if restart > 0 {
            arguments.extend(resume_words(&config.task, &replaced).iter().map(OsString::from));
        }
        let start = Start {
            program: &program,
            arguments: &arguments,
            local_ranks: config.local_ranks,
            first_rank: config.local_ranks * config.flags.node_rank,
            size: config.local_ranks * config.flags.nnodes,
            host: &config.flags.master_addr,
            port: config.flags.port().map_or_else(|| free_port(restart), Ok)?,
            restart,
            max_restarts,
            on_cpu,
        };
        match Ranks::start(&start, &sender)?.wait(&events) {
            End::Done => return Ok(0),
            End::Stopped(code) => return Ok(code),
            End::Failed { message, code, stop_requested }
                if stop_requested || restart >= max_restarts || Error::is_final(code) =>
            {
                return Err(Error::Stopped { message, code });
            }
            End::Failed { message, .. } => {
                let text =
                    format!("{message}; all ranks are started again (restart {} of {max_restarts})", restart + 1);
                let text = Stream::Err.labelled("warning", Colour::Yellow, &one_line(&text));
                let _ = writeln!(io::stderr(), "{text}");
            }
        }
    }
    unreachable!("the last restart returns")
}

/// Finds a free TCP port of this machine for the start number `restart`.
///
/// It is below Linux's ephemeral ports, one of which could be taken before rank 0 listens.
fn free_port(restart: usize) -> Result<u16> {
    const FIRST: usize = 20_000;
    const PORTS: usize = 12_000;
    // Launchers that were started one after the other do not look at the same ports.
    let start = 16 * std::process::id() as usize + restart;
    let mut ports = (0..PORTS).map(|more| (FIRST + (start + more) % PORTS) as u16);
    let free = ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    let hint = "no port from 20000 to 31999 of 127.0.0.1 is free; set --master_port";
    free.ok_or_else(|| Error::Run(hint.into()))
}

/// Returns the words that make a command resume after a restart: a training run continues from the newest checkpoint in its
/// folder. A checkpoint that the command names counts until the run has written one; a run that replaces another starts again until then.
fn resume_words(task: &Task, replaced: &Replaced) -> &'static [&'static str] {
    let needed = match task {
        // The stages have the setting of the pipeline.
        Task::Pipeline(_) => run_configs(task).iter().any(|run| run.checkpoints.resume_from_checkpoint.is_none()),
        _ => run_configs(task).iter().any(|run| match &run.checkpoints.resume_from_checkpoint {
            None => true,
            Some(Resume::Latest) => false,
            Some(Resume::From(_)) => has_checkpoint(&run.output_dir),
        }),
    };
    if needed && replaced.is_gone() { &["--resume_from_checkpoint", "true"] } else { &[] }
}

/// The folder of the run that the command replaces, if there is one, and the identity of its settings before the first start. For a
/// pipeline it is the folder of the first stage: a later stage is not resumed if its models have changed.
struct Replaced(Option<(PathBuf, Identity)>);

/// Inode, time of change in seconds and nanoseconds, and length of a file.
type Identity = (u64, i64, i64, u64);

impl Replaced {
    fn by(task: &Task) -> Self {
        let replacing = run_configs(task).into_iter().next().filter(|run| run.overwrite_output_dir);
        Self(replacing.and_then(|run| Some((run.output_dir.clone(), settings_in(&run.output_dir)?))))
    }

    /// Returns whether the folder has the settings of a newer run, so that its checkpoints are not those of the replaced run.
    fn is_gone(&self) -> bool {
        self.0.as_ref().is_none_or(|(folder, before)| settings_in(folder).is_some_and(|now| now != *before))
    }
}

/// Identifies the settings that a run has written to its folder; `None` without any.
fn settings_in(folder: &Path) -> Option<Identity> {
    let file = std::fs::metadata(folder.join(CONFIG)).ok()?;
    Some((file.ino(), file.mtime(), file.mtime_nsec(), file.len()))
}

/// Returns the settings of the training runs of a command.
fn run_configs(task: &Task) -> Vec<&RunConfig> {
    match task {
        Task::Sft(config) => vec![&config.run],
        Task::Reward(config) if !config.eval_only => vec![&config.run],
        Task::Dpo(config) => vec![&config.run],
        Task::Distill(config) => vec![&config.run],
        Task::Ppo(config) => vec![&config.run],
        Task::Pipeline(config) => {
            let stages = [
                config.sft.as_ref().map(|stage| &stage.run),
                config.reward.as_ref().map(|stage| &stage.run),
                config.ppo.as_ref().map(|stage| &stage.run),
                config.dpo.as_ref().map(|stage| &stage.run),
                config.distill.as_ref().map(|stage| &stage.run),
            ];
            stages.into_iter().flatten().collect()
        }
        _ => Vec::new(),
    }
}

fn device(task: &Task) -> Device {
    match task {
        Task::Reward(config) => config.run.device,
        Task::Generate(config) => config.rows.compute.device,
        Task::Logprobs(config) => config.rows.compute.device,
        Task::Score(config) => config.rows.compute.device,
        Task::Replay(task) => task.ppo.run.device,
        // The stages may be on different devices.
        Task::Pipeline(_) => Device::Auto,
        _ => run_configs(task).first().map_or(Device::Auto, |run| run.device),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::{PPO, parse_words};
    use rlhf::settings::ZeroStage;

    fn launched(flags: &[&str], command: &[&str]) -> LaunchTask {
        match parse_words(&[&["launch"], flags, command].concat()).unwrap() {
            Task::Launch(task) => task,
            task => panic!("not launch: {task:?}"),
        }
    }

    #[test]
    fn the_flags_of_launch_end_at_the_command() {
        let generate = ["generate", "--model_name_or_path", "m", "--device", "cpu", "a prompt", "--", "--x"];
        for flags in [&["--nproc_per_node", "3"][..], &["--nproc-per-node=3"], &["--num_gpus", "3", "--"]] {
            let task = launched(flags, &generate);
            assert_eq!((task.local_ranks, &task.command[..]), (3, &generate.map(OsString::from)[..]));
            assert!(matches!(*task.task, Task::Generate(_)));
        }
        assert_eq!(launched(&[], &generate).local_ranks, 1);
        assert_eq!(
            launched(&["--num_processes", "6", "--num_machines", "2", "--main_process_ip", "n0"], &PPO).local_ranks,
            3
        );
        let two = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "n0", "--nproc_per_node", "4"];
        let two = launched(&two, &PPO);
        assert_eq!((two.flags.port(), two.flags.node_rank, two.flags.master_addr.as_str()), (Some(29500), 1, "n0"));
    }

    #[test]
    fn errors_of_launch_and_of_its_command_are_reported_before_a_rank_starts() {
        let ppo = |flags: &[&'static str]| [&["launch"], flags, &PPO].concat();
        for (words, message) in [
            (ppo(&["--nproc_per_node", "0"]), "nproc_per_node = 0: expected at least 1"),
            (ppo(&["--nproc_per_node", "two"]), "--nproc_per_node <N>': expected a whole number"),
            (ppo(&["--node_rank", "1"]), "node_rank = 1: expected a number below nnodes"),
            (ppo(&["--nnodes", "2"]), "master_addr = 127.0.0.1: expected the address of machine 0"),
            (ppo(&["--master_port", "70000"]), "master_port = 70000: expected a TCP port"),
            (
                ppo(&["--nnodes", "0", "--num_processes", "4", "--nproc_per_node", "4"]),
                "nnodes = 0: expected at least 1",
            ),
            (
                ppo(&["--num_processes", "3", "--nnodes", "2", "--master_addr", "n0"]),
                "num_processes = 3: expected a multiple",
            ),
            (
                ppo(&["--nproc", "2"]),
                "unexpected argument '--nproc' found; tip: a similar argument exists: '--nproc_per_node'",
            ),
            (vec!["launch", "--nproc_per_node", "2"], "launch: expected a command to start after its flags"),
            (vec!["launch", "merge"], "launch: merge is done by one process"),
            (vec!["launch", "launch", "ppo"], "launch: found launch in it again"),
            (vec!["launch", "bin/rlhf", "ppo"], "leave the program's name out"),
            (vec!["launch", "train"], "launch: expected one of sft, reward, dpo, distill, ppo"),
            ([ppo(&[]), vec!["--seed", "x"]].concat(), "invalid value 'x' for '--seed <N>'"),
            (
                vec!["launch", "sft", "--model_name_or_path", "m", "--output_dir", "o"],
                "required arguments were not provided: --dataset_name",
            ),
        ] {
            let error = parse_words(&words).expect_err(message);
            assert!(error.contains(message) && error.lines().count() == 1, "{words:?}: {error}");
        }
        let help = parse_words(&["launch", "--nproc_per_node", "2", "ppo", "--help"]).unwrap_err();
        assert!(help.contains("Usage: rlhf ppo"), "{help}");
    }

    #[test]
    fn a_configuration_of_accelerate_sets_the_ranks_and_the_flags_win() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("acc.yaml");
        let file = path.to_str().unwrap();
        let text = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 8\nnum_machines: 2\n\
                    machine_rank: 1\nmain_process_ip: n0\nmain_process_port: 1234\nmixed_precision: bf16\n\
                    deepspeed_config:\n  zero_stage: 2\n";
        std::fs::write(&path, text).unwrap();
        let task = launched(&["--config_file", file], &PPO);
        let LaunchFlags { nnodes, node_rank, ref master_addr, .. } = task.flags;
        assert_eq!((task.local_ranks, nnodes, node_rank, master_addr.as_str()), (4, 2, 1, "n0"));
        assert_eq!(
            (task.flags.port(), &task.command[1..3]),
            (Some(1234), &["--accelerate_config", file].map(OsString::from)[..])
        );
        let Task::Ppo(config) = *task.task else { panic!() };
        assert_eq!((config.run.dist.zero_stage, config.run.bf16), (ZeroStage::Stage2, true));
        let task =
            launched(&["--config_file", file, "--nproc_per_node", "3", "--nnodes", "1", "--node_rank", "0"], &PPO);
        assert_eq!((task.local_ranks, task.flags.nnodes), (3, 1));
        let generate = ["generate", "--model_name_or_path", "m", "a prompt"];
        assert_eq!(launched(&["--config_file", file], &generate).command, generate.map(OsString::from));
        std::fs::write(&path, "num_processes: many\n").unwrap();
        let error = parse_words(&[&["launch", "--config_file", file], &PPO[..]].concat()).unwrap_err();
        assert_eq!(error, format!("{file}:1: `num_processes`: expected a whole number up to 100000, found `many`"));
        std::fs::write(&path, "num_processes: 2\nmachine_rank: 3\n").unwrap();
        let error = parse_words(&[&["launch", "--config_file", file], &PPO[..]].concat()).unwrap_err();
        assert_eq!(error, format!("{file}:2: machine_rank = 3: expected a number below nnodes"));
        let words = [&["launch", "--config_file", file, "--node_rank", "4"], &PPO[..]].concat();
        assert_eq!(parse_words(&words).unwrap_err(), "node_rank = 4: expected a number below nnodes");
    }

    #[test]
    fn sizes_are_checked_for_the_ranks_that_will_start() {
        let line = ["ppo", "--per_device_train_batch_size", "1", "--num_mini_batches", "4"];
        let words = [&line[..], &PPO[1..]].concat();
        launched(&["--nproc_per_node", "4"], &words);
        let error = parse_words(&[&["launch", "--nproc_per_node", "3"], &words[..]].concat()).unwrap_err();
        assert!(error.contains("* ranks = 1 * 1 * 3 = 3 is not a multiple of num_mini_batches = 4"), "{error}");
    }

    #[test]
    fn a_restarted_training_resumes_from_its_newest_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().to_str().unwrap();
        let words = |more: &[&'static str]| {
            let command = [&PPO[..], &["--output_dir", out], more].concat();
            let task = launched(&[], &command).task;
            resume_words(&task, &Replaced::by(&task))
        };
        let resumes = &["--resume_from_checkpoint", "true"][..];
        let named_checkpoint = ["--resume_from_checkpoint", "other/checkpoint-1"];
        assert_eq!(words(&[]), resumes);
        assert!(words(&["--resume_from_checkpoint"]).is_empty());
        assert!(words(&named_checkpoint).is_empty());
        std::fs::create_dir(dir.path().join("checkpoint-2")).unwrap();
        assert_eq!(words(&named_checkpoint), resumes);
        std::fs::rename(dir.path().join("checkpoint-2"), dir.path().join("checkpoint-2.old")).unwrap();
        assert!(words(&named_checkpoint).is_empty());
        let generate = launched(&[], &["generate", "--model_name_or_path", "m"]);
        assert!(resume_words(&generate.task, &Replaced::by(&generate.task)).is_empty());
    }

    #[test]
    fn a_run_that_replaces_another_one_resumes_when_it_has_written_its_settings() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().to_str().unwrap();
        let task = launched(&[], &[&PPO[..], &["--output_dir", out, "--overwrite_output_dir"]].concat()).task;
        let write = |text: &str| {
            std::fs::write(dir.path().join("new"), text).unwrap();
            std::fs::rename(dir.path().join("new"), dir.path().join(CONFIG)).unwrap();
        };
        let resumes = ["--resume_from_checkpoint", "true"];
        assert_eq!(resume_words(&task, &Replaced::by(&task)), resumes, "there is nothing to replace");
        write("of the old run");
        let replaced = Replaced::by(&task);
        assert!(resume_words(&task, &replaced).is_empty());
        std::fs::remove_file(dir.path().join(CONFIG)).unwrap();
        assert!(resume_words(&task, &replaced).is_empty(), "the new run has not written its settings yet");
        write("of the new run");
        assert_eq!(resume_words(&task, &replaced), resumes);
    }
}
