//! Kills, half writes and failing disks at the n-th call that changes a file of a run.

use super::folders::Dice;
use super::{cases, check_error, is_long};
use crate::checkpoint::assert_same;
use crate::cli::{PPO, Ran, SFT, Scratch, snapshot};
use crate::support::{output, say};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Compiles the library that counts the calls and lets one of them go wrong.
///
/// # Panics
/// Without the C compiler `cc`, which building the crate needs too.
fn library(dir: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/attack/faults.c");
    let library = dir.join("faults.so");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-w", "-o"]).arg(&library).arg(source).arg("-ldl");
    let status = cc.status().unwrap_or_else(|e| panic!("cc: {e}: expected a C compiler, to inject faults"));
    assert!(status.success(), "faults.c does not compile");
    library
}

/// A command with faults, bounded in memory and in time.
struct Faults {
    scratch: Scratch,
    library: PathBuf,
    line: String,
    last: usize,
    /// Part of the path that the files have whose calls count.
    name: &'static str,
}

impl Faults {
    /// The run `line`, which writes to `out`, undisturbed: with it the number of its calls.
    fn new(line: &str, last: usize) -> (Self, u64) {
        let scratch = Scratch::new();
        let library = library(&scratch.path("."));
        let faults = Self { scratch, library, line: line.into(), last, name: "" };
        let output = faults.run("out", 0, "kill", &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let count: u64 = faults.scratch.read("count").trim().parse().unwrap();
        assert!(count > 30, "{count} calls: are they counted?");
        (faults, count)
    }

    fn run(&self, out: &str, at: u64, kind: &str, more: &[&str]) -> Output {
        let run = self.scratch.command(&self.line.replace("--output_dir out", &format!("--output_dir {out}")));
        let mut command = Command::new("timeout");
        // What the program itself takes is 2 GiB of addresses.
        let script = "ulimit -v 12582912; exec env LD_PRELOAD=\"$0\" \"$@\"";
        command.args(["-s", "KILL", "120", "sh", "-c", script]).arg(&self.library);
        command.arg(run.get_program()).args(run.get_args()).args(more);
        command.current_dir(self.scratch.path(".")).stdin(Stdio::null());
        for (name, value) in run.get_envs() {
            command.env(name, value.unwrap());
        }
        let dir = self.scratch.path(out);
        command.env("FAULT_DIR", dir).env("FAULT_AT", at.to_string()).env("FAULT_KIND", kind);
        output(command.env("FAULT_NAME", self.name).env("FAULT_COUNT", self.scratch.path("count")))
    }

    /// Makes the call `at` fail, and resumes: to the same bits as the whole run.
    fn attack(&self, at: u64, kind: &str) {
        let name = format!("{kind} at call {at} of `{}`", self.line);
        let out = format!("{kind}-{at}");
        let output = self.run(&out, at, kind, &[]);
        if matches!(kind, "kill" | "half") {
            assert!(!output.status.success(), "{name}: the run was not killed");
        } else {
            let ran = Ran::from(output);
            let error = ran.stderr.lines().last().unwrap_or_default();
            assert!([0, 1].contains(&ran.code), "{name}: exit code {}: {}", ran.code, ran.stderr);
            if ran.code == 1 {
                assert!(error.starts_with("error: "), "{name}: {}", ran.stderr);
            }
            ran.stderr.lines().for_each(|line| check_error(&name, line));
        }
        let resumed = Ran::from(self.run(&out, 0, kind, &["--resume_from_checkpoint", "true"]));
        assert_eq!(resumed.code, 0, "{name}: it cannot be resumed: {}", resumed.stderr);
        let dir = self.scratch.path(&out);
        assert_same(&dir, &self.scratch.path("out"), self.last);
        let left: Vec<_> = snapshot(&dir).into_keys().filter(|path| is_left_over(path)).collect();
        assert!(left.is_empty(), "{name}: left behind: {left:?}");
        std::fs::remove_dir_all(dir).unwrap();
    }
}

fn is_left_over(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with(".saving") || name.starts_with(".removing") || name.ends_with(".tmp")
}

/// Attacks at calls that are spread over the whole run.
fn attack(line: &str, last: usize, kinds: &[&str], quick: u64) {
    let (faults, count) = Faults::new(line, last);
    let inputs = || ["policy", "reward"].map(|name| snapshot(&faults.scratch.path(name)));
    let before = inputs();
    let mut dice = Dice(count);
    let calls = cases(quick).min(count);
    for kind in kinds {
        for part in 0..calls {
            let (from, to) = (part * count / calls, (part + 1) * count / calls);
            faults.attack(1 + from + dice.roll((to - from) as usize) as u64, kind);
        }
    }
    assert!(inputs() == before, "an input was changed");
    say(&format!("{} faults ({}) among {count} calls", calls * kinds.len() as u64, kinds.join(", ")));
}

/// Two updates, with a checkpoint after each.
fn ppo() -> String {
    format!("{PPO} --num_sample_generations 1 --save_steps 1 --save_total_limit 1")
}

#[test]
fn a_run_killed_at_any_call_that_changes_a_file_ends_in_the_same_bits() {
    attack(&ppo(), 2, &["kill", "half"], 8);
    if is_long() {
        attack(&format!("{SFT} --save_steps 1 --save_total_limit 1"), 2, &["kill", "half"], 8);
    }
}

#[test]
fn a_run_whose_disk_fails_once_reports_it_in_a_line_and_ends_in_the_same_bits() {
    attack(&ppo(), 2, &["ENOSPC", "EIO"], 8);
    if is_long() {
        attack(&format!("{SFT} --save_steps 1 --save_total_limit 1"), 2, &["ENOSPC", "EIO"], 8);
    }
}

#[test]
fn an_update_counts_though_its_line_or_its_rollout_cannot_be_written() {
    let (mut faults, _) = Faults::new(&format!("{} --log_rollouts", ppo()), 2);
    // The first call for `metrics.jsonl` opens it; the first one for `rollouts` makes the folder.
    for (name, at) in [("metrics.jsonl", 2), ("rollouts", 1)] {
        faults.name = name;
        let ran = Ran::from(faults.run("lost", at, "ENOSPC", &[]));
        assert_eq!(ran.code, 1, "{name}: {}", ran.stderr);
        let error = ran.stderr.lines().last().unwrap();
        assert!(
            error.contains(name) && error.ends_with(" ppo --config lost/config.yaml --resume_from_checkpoint true"),
            "{error}"
        );
        assert_eq!(faults.scratch.read("lost/metrics.jsonl").lines().count(), 1, "{name}");
        std::fs::remove_dir_all(faults.scratch.path("lost")).unwrap();
    }
    faults.name = "metrics.jsonl";
    faults.attack(2, "ENOSPC");
}
