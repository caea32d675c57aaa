//! `rlhf launch`: its ranks as processes, their output and their end.

use crate::checkpoint::signal;
use crate::cli::{PPO, Ran, Scratch};
use crate::support::{PROGRAM, output};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Far more than any machine needs.
const PATIENCE: Duration = Duration::from_secs(60);

/// `rlhf launch` with a generation that takes minutes, its output in files of the scratch folder.
pub(crate) struct Launched<'a> {
    scratch: &'a Scratch,
    launcher: Child,
}

const LONG: &str = "generate --model_name_or_path policy --dataset_name prompts.jsonl --max_new_tokens 40 \
                    --num_return_sequences 100000 --batch_size 1";

impl<'a> Launched<'a> {
    pub(crate) fn start(scratch: &'a Scratch, flags: &str, command: &str) -> Self {
        let file = |name: &str| Stdio::from(File::create(scratch.path(name)).unwrap());
        let mut launch = scratch.command(&format!("launch {flags} {command}"));
        let launcher = launch.stdout(file("stdout")).stderr(file("stderr")).spawn().unwrap();
        Self { scratch, launcher }
    }

    /// The process ids of `count` ranks in the order of their ranks, once all run the program.
    pub(crate) fn ranks(&mut self, count: usize, restart: usize) -> Vec<u32> {
        let launcher = self.launcher.id();
        let mut found = Vec::new();
        wait_for("all ranks run", || {
            found = children(launcher).into_iter().filter_map(|id| Some((process_rank(id, restart)?, id))).collect();
            found.len() == count
        });
        found.sort_unstable();
        found.into_iter().map(|(_, id)| id).collect()
    }

    /// Waits for the end; no rank of `ranks` is left then.
    pub(crate) fn end(mut self, ranks: &[u32]) -> Ran {
        let mut status = None;
        wait_for("the launcher ends", || {
            status = self.launcher.try_wait().unwrap();
            status.is_some()
        });
        wait_for("all ranks end", || ranks.iter().all(|&id| !runs(id)));
        let ran = std::process::Output { status: status.unwrap(), stdout: Vec::new(), stderr: self.stderr().into() };
        Ran::from(ran)
    }

    fn stderr(&self) -> String {
        self.scratch.read("stderr")
    }
}

pub(crate) fn wait_for(event: &str, mut so_far: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so_far() {
        assert!(start.elapsed() < PATIENCE, "waited a minute until {event}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The child processes of `parent`.
fn children(parent: u32) -> Vec<u32> {
    let ids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    ids.filter(|&id| stat(id).is_some_and(|(state, parent_id)| parent_id == parent && state != "Z")).collect()
}

/// State and parent of a process.
fn stat(id: u32) -> Option<(String, u32)> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    let (_, after) = stat.rsplit_once(") ")?;
    let mut words = after.split(' ');
    Some((words.next()?.to_string(), words.next()?.parse().ok()?))
}

pub(crate) fn runs(id: u32) -> bool {
    stat(id).is_some_and(|(state, _)| state != "Z")
}

/// The rank of a process in this start of all ranks, from its environment.
fn process_rank(id: u32, restart: usize) -> Option<usize> {
    let vars = fs::read(format!("/proc/{id}/environ")).ok()?;
    let vars = String::from_utf8_lossy(&vars).into_owned();
    let var = |name: &str| vars.split('\0').find_map(|var| var.strip_prefix(name)?.strip_prefix('='));
    (var("TORCHELASTIC_RESTART_COUNT") == Some(&restart.to_string())).then(|| var("RANK")?.parse().ok()).flatten()
}

fn kill(id: u32, signal: &str) {
    assert!(Command::new("kill").args([&format!("-{signal}"), &id.to_string()]).status().unwrap().success());
}

#[test]
fn an_error_of_all_ranks_is_one_line_each_and_one_that_names_a_rank() {
    let scratch = Scratch::new();
    let ran =
        scratch.run("launch --nproc_per_node 3 generate --model_name_or_path nowhere --dataset_name prompts.jsonl");
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    let (last, lines) = {
        let mut lines: Vec<&str> = ran.stderr.lines().collect();
        (lines.pop().unwrap(), lines)
    };
    let names_a_rank = (0..3).any(|rank| last == format!("error: rank {rank} exited with code 1"));
    assert!(names_a_rank, "{}", ran.stderr);
    assert!((1..=3).contains(&lines.len()), "{}", ran.stderr);
    for line in lines {
        let text = ["[rank 1] ", "[rank 2] "].iter().find_map(|mark| line.strip_prefix(mark)).unwrap_or(line);
        assert!(text.starts_with("error: nowhere: "), "{}", ran.stderr);
    }
}

#[test]
fn an_error_of_the_command_line_is_reported_once_before_a_rank_starts() {
    let scratch = Scratch::new();
    let line = "launch --nproc_per_node 4 --max_restarts 3 generate --model_name_or_path policy --top_p 7";
    scratch.refuses(line, 2, &["top_p = 7"]);
    scratch.refuses("launch --nproc_per_node 4 merge", 2, &["merge is done by one process"]);
}

#[test]
fn a_rank_that_is_killed_ends_the_others_and_is_named() {
    let scratch = Scratch::new();
    let mut launched = Launched::start(&scratch, "--nproc_per_node 3", LONG);
    let ranks = launched.ranks(3, 0);
    kill(ranks[1], "KILL");
    let ran = launched.end(&ranks);
    assert_eq!(ran.code, 128 + 9, "{}", ran.stderr);
    let last = ran.stderr.lines().last().unwrap();
    assert!(last.starts_with("error: rank 1 was killed by signal 9 (SIGKILL)"), "{}", ran.stderr);
    assert_eq!(ran.stderr.matches("was killed").count(), 1, "{}", ran.stderr);
}

#[test]
fn the_ranks_of_a_launcher_that_is_killed_end_too() {
    let scratch = Scratch::new();
    let mut launched = Launched::start(&scratch, "--nproc_per_node 2", LONG);
    let ranks = launched.ranks(2, 0);
    launched.launcher.kill().unwrap();
    launched.end(&ranks);
}

#[test]
fn a_signal_to_the_launcher_alone_stops_all_ranks() {
    let scratch = Scratch::new();
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let mut launched = Launched::start(&scratch, "--nproc_per_node 2 --max_restarts 2", LONG);
        let ranks = launched.ranks(2, 0);
        signal(&launched.launcher, name);
        let ran = launched.end(&ranks);
        assert_eq!((ran.code, ran.stderr.as_str()), (code, ""));
    }
}

#[test]
fn all_ranks_are_started_again_after_a_failure_as_often_as_allowed() {
    let scratch = Scratch::new();
    let mut launched = Launched::start(&scratch, "--nproc_per_node 2 --max_restarts 1", LONG);
    let first = launched.ranks(2, 0);
    kill(first[0], "KILL");
    let second = launched.ranks(2, 1);
    assert!(!first.iter().any(|&id| runs(id)), "{}", launched.stderr());
    let warning =
        "warning: rank 0 was killed by signal 9 (SIGKILL), as when memory runs out; all ranks are started again";
    assert!(launched.stderr().contains(&format!("{warning} (restart 1 of 1)")), "{}", launched.stderr());
    kill(second[1], "SEGV");
    let ran = launched.end(&second);
    assert_eq!(ran.code, 128 + 11, "{}", ran.stderr);
    assert!(ran.stderr.ends_with("error: rank 1 was killed by signal 11 (SIGSEGV)\n"), "{}", ran.stderr);
}

#[test]
fn ranks_are_not_started_again_after_a_request_to_stop_though_one_of_them_failed() {
    let scratch = Scratch::new();
    let mut launched = Launched::start(&scratch, "--nproc_per_node 2 --max_restarts 2", LONG);
    let ranks = launched.ranks(2, 0);
    kill(ranks[0], "KILL");
    wait_for("rank 0 ends", || !runs(ranks[0]));
    signal(&launched.launcher, "INT");
    let ran = launched.end(&ranks);
    assert_eq!(ran.code, 128 + 9, "{}", ran.stderr);
    assert!(!ran.stderr.contains("started again"), "{}", ran.stderr);
}

#[test]
fn a_run_that_an_alarm_stopped_is_not_started_again() {
    let scratch = Scratch::new();
    let ran = scratch.run(&format!(
        "launch --nproc_per_node 1 --max_restarts 2 {PPO} --total_episodes 48 --learning_rate 0.3 \
         --lr_scheduler_type constant --num_sample_generations 0 --on_alarm runaway_kl=stop"
    ));
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert_eq!(ran.stderr.matches("stopped after update").count(), 1, "{}", ran.stderr);
    assert!(!ran.stderr.contains("started again"), "{}", ran.stderr);
}

#[test]
fn a_reward_program_of_a_rank_is_no_rank() {
    let scratch = Scratch::new();
    let vars = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE RLHF_LAUNCHER";
    scratch.write(
        "reward.sh",
        &format!("for name in {vars}; do printenv $name >> seen; done; while read row; do echo 1; done"),
    );
    let rows = r#"{"prompt": "a", "completion": "b"}"#;
    scratch.write("rows.jsonl", &format!("{rows}\n"));
    let line = "launch --nproc_per_node 1 score --tokenizer_name policy --dataset_name rows.jsonl --reward_command";
    let ran = scratch.run_with(line, &["sh reward.sh"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    assert!(!Path::new(&scratch.path("seen")).exists() || scratch.read("seen").is_empty(), "{}", scratch.read("seen"));
}

/// PPO with 16 updates of two ranks and a checkpoint after each.
fn training(out: &str) -> String {
    format!(
        "{} --output_dir {out} --per_device_train_batch_size 2 --total_episodes 64 --save_steps 1 --num_sample_generations 0",
        PPO.replace(" --output_dir out", "").replace(" --per_device_train_batch_size 4 --total_episodes 8", "")
    )
}

#[test]
fn training_whose_rank_is_killed_is_restarted_and_ends_in_the_bits_of_an_undisturbed_run() {
    let scratch = Scratch::new();
    let line = |out: &str| format!("launch --nproc_per_node 2 --max_restarts 1 {}", training(out));
    let undisturbed = scratch.run(&line("whole"));
    assert_eq!(undisturbed.code, 0, "{}", undisturbed.stderr);
    let killed = output(scratch.command(&line("killed")).env("RLHF_FAULT", "1:200:KILL"));
    let stderr = String::from_utf8_lossy(&killed.stderr);
    assert!(killed.status.success(), "{stderr}");
    for part in [
        "rank 1 ended without an error message",
        "resumes from killed/checkpoint-",
        "warning: rank 1 was killed by signal 9",
    ] {
        assert_eq!(stderr.matches(part).count(), 1, "{part}: {stderr}");
    }
    assert!(!stderr.contains("stopping after this update"), "{stderr}");
    for file in ["model.safetensors", "value_model/model.safetensors"] {
        let bytes = |out: &str| fs::read(scratch.path(out).join(file)).unwrap();
        assert!(bytes("killed") == bytes("whole"), "{file} differs");
    }
}

#[test]
fn rank_0_saves_the_run_though_it_waits_for_a_reward_when_another_rank_dies() {
    let scratch = Scratch::new();
    // Once told to, the program of rank 0 takes longer than the other ranks have after a failure.
    let slow = "test -e slow && grep -qx $PPID slow && ! test -e waits && touch waits && sleep 13";
    scratch.write("reward.sh", &format!("while read row; do {slow}; echo 0.5; done"));
    let line = training("out").replace("--reward_model_path reward", "").replace("--save_steps 1", "--save_steps 9999");
    let line = line.replace("--total_episodes 64", "--total_episodes 40000");
    let file = |name: &str| Stdio::from(File::create(scratch.path(name)).unwrap());
    let mut launch = scratch.command(&format!("launch --nproc_per_node 2 {line}"));
    launch.args(["--reward_command", "exec sh reward.sh"]).stdout(file("stdout")).stderr(file("stderr"));
    let mut launched = Launched { scratch: &scratch, launcher: launch.spawn().unwrap() };
    let ranks = launched.ranks(2, 0);
    let metrics = scratch.path("out/metrics.jsonl");
    wait_for("an update is logged", || fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() > 1));
    scratch.write("slow.new", &format!("{}\n", ranks[0]));
    fs::rename(scratch.path("slow.new"), scratch.path("slow")).unwrap();
    wait_for("rank 0 waits for its reward", || scratch.path("waits").exists());
    kill(ranks[1], "KILL");
    let ran = launched.end(&ranks);
    assert_eq!(ran.code, 128 + 9, "{}", ran.stderr);
    let resume =
        "; to resume: {} launch --nproc_per_node 2 ppo --config out/config.yaml --resume_from_checkpoint true\n";
    assert!(ran.stderr.contains(&resume.replace("{}", PROGRAM)), "{}", ran.stderr);
    assert!(ran.stderr.lines().last().unwrap().starts_with("error: rank 1 was killed by signal 9"), "{}", ran.stderr);
}

#[test]
fn a_run_that_fails_before_it_replaces_another_one_is_started_again_from_its_first_update() {
    let scratch = Scratch::new();
    let line = format!("launch --nproc_per_node 2 --max_restarts 1 {}", training("out"));
    let first = scratch.run(&line);
    assert_eq!(first.code, 0, "{}", first.stderr);
    let trained = || fs::metadata(scratch.path("out").join("model.safetensors")).unwrap().modified().unwrap();
    let before = trained();
    let overwriting = format!("{line} --overwrite_output_dir");
    let ran = output(scratch.command(&overwriting).env("RLHF_FAULT", "1:1:KILL"));
    let stderr = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && stderr.contains("(restart 1 of 1)"), "{stderr}");
    assert!(trained() > before, "the old run was taken for the new one: {stderr}");
}

#[test]
fn a_signal_to_the_launcher_or_to_one_rank_stops_training_after_its_update() {
    let scratch = Scratch::new();
    for (name, code, to_rank, times) in
        [("INT", 130, None, 1), ("TERM", 143, None, 2), ("TERM", 143, Some(1), 1), ("TERM", 143, Some(1), 2)]
    {
        let out = format!("{name}-{}-{times}", to_rank.is_some());
        let command = training(&out).replace("--total_episodes 64", "--total_episodes 40000");
        let command = command.replace("--save_steps 1 ", "");
        let mut launched = Launched::start(&scratch, "--nproc_per_node 2 --max_restarts 2", &command);
        let ranks = launched.ranks(2, 0);
        let metrics = scratch.path(&out).join("metrics.jsonl");
        wait_for("an update is logged", || fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() > 1));
        let id = to_rank.map_or(launched.launcher.id(), |rank| ranks[rank]);
        kill(id, name);
        if times > 1 {
            // The same request again, as `timeout` and SLURM send it to the launcher and to its ranks.
            std::thread::sleep(Duration::from_millis(5));
            let _ = Command::new("kill").args([&format!("-{name}"), &launched.launcher.id().to_string()]).status();
            let _ = Command::new("kill").args([&format!("-{name}"), &id.to_string()]).status();
        }
        let ran = launched.end(&ranks);
        assert_eq!(ran.code, code, "{}", ran.stderr);
        // It is no error.
        assert_eq!(ran.stderr.matches("error: ").count(), 0, "{}", ran.stderr);
        assert_eq!(ran.stderr.matches("stopped as requested after update").count(), 1, "{}", ran.stderr);
        let saved = fs::read_dir(scratch.path(&out)).unwrap().flatten().map(|entry| entry.file_name());
        assert_eq!(saved.filter(|name| name.to_string_lossy().starts_with("checkpoint-")).count(), 1);
    }
}
