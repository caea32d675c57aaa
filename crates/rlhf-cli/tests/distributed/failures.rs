//! A rank that is killed, hangs, fails or is stopped ends all ranks within seconds. Each reports the cause in one line, and the run
//! resumes from its last checkpoint to the same bits.

use super::{Ranks, identical, succeeds};
use crate::checkpoint::{signal, wait_until};
use crate::cli::{Ran, Scratch};
use crate::support::Process as _;
use crate::support::free_port;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// Three updates with a checkpoint after each, and an evaluation.
pub(crate) const LINE: &str = "ppo --sft_model_path policy --reward length:target=3 --dataset_name prompts.jsonl --response_length 4 \
                    --train_batch_size 4 --total_episodes 12 --num_sample_generations 0 --num_ppo_epochs 1 \
                    --eval_split_size 2 --eval_steps 3 --save_steps 1 --learning_rate 1e-3 --seed 3";

/// The signal that a rank sends to itself at its collective `count`.
fn fault(rank: usize, count: usize, signal: &str) -> impl Fn(usize, &mut Command) {
    let fault = format!("{rank}:{count}:{signal}");
    move |_, command| {
        command.env("RLHF_FAULT", &fault);
    }
}

/// Panics unless a rank ended with the exit code `code` and one line of error with all of `words`.
#[track_caller]
fn one_line(what: &str, ran: &Ran, code: i32, words: &[&str]) {
    assert_eq!(ran.code, code, "{what}: {}", ran.stderr);
    assert!(ran.stderr.starts_with("error: ") && ran.stderr.lines().count() == 1, "{what}: {}", ran.stderr);
    for word in words {
        assert!(ran.stderr.contains(word), "{what}: no `{word}` in {}", ran.stderr);
    }
    for alien in ["internal", "panicked", "libtorch", "Exception", ".cpp"] {
        assert!(!ran.stderr.contains(alien), "{what}: {}", ran.stderr);
    }
}

#[test]
fn a_rank_that_is_killed_at_any_collective_ends_all_and_the_run_resumes_to_the_same_bits() {
    // From the first collective of the start to those of the last checkpoint.
    let cases = [(1, 1), (0, 18), (1, 35), (0, 60), (1, 85), (0, 110), (1, 135), (0, 160)];
    assert_resumes_after_a_kill(LINE, &cases);
}

#[test]
fn a_rank_that_is_killed_while_collectives_are_in_progress_ends_all_and_the_run_resumes_to_the_same_bits() {
    // Of the first backward pass through two layers, of which the last has stayed: a prefetch (87), three reductions. Where one rank is killed
    // before it starts a collective, the other has started it.
    assert_resumes_after_a_kill(&format!("{LINE} --zero_stage 3"), &[(0, 87), (1, 88), (0, 89), (1, 90)]);
    assert_resumes_after_a_kill(&format!("{LINE} --zero_stage 2"), &[(1, 70), (0, 71)]);
}

/// Kills one of two ranks of the run `line` at a collective, in each of the cases `(rank, count)`, and resumes it.
#[track_caller]
fn assert_resumes_after_a_kill(line: &str, cases: &[(usize, usize)]) {
    let scratch = Scratch::new();
    succeeds(&scratch, 2, &format!("{line} --output_dir whole"));
    let dies = |(rank, count): (usize, usize)| {
        let (out, what) = (format!("out-{rank}-{count}"), format!("rank {rank} is killed at collective {count}"));
        let line = format!("{line} --output_dir {out}");
        let began = Instant::now();
        let ran = Ranks::start(&scratch, 2, &line, fault(rank, count, "KILL")).wait(&what);
        assert!(began.elapsed() < Duration::from_secs(40), "{what}: {:?}", began.elapsed());
        assert!(ran[rank].code == -1 && ran[rank].stderr.is_empty(), "{what}: {}", ran[rank].stderr);
        let dead = format!("rank {rank} ended without an error message (killed?)");
        one_line(&what, &ran[1 - rank], 1, &[&dead]);
        let ran = Ranks::start(&scratch, 2, &format!("{line} --resume_from_checkpoint"), |_, _| ()).wait(&what);
        assert!(ran.iter().all(|ran| ran.code == 0), "{what}: {} {}", ran[0].stderr, ran[1].stderr);
        identical(&scratch, &out, "whole");
    };
    let (first, second) = cases.split_at(cases.len() / 2);
    thread::scope(|scope| {
        scope.spawn(|| first.iter().for_each(|&case| dies(case)));
        second.iter().for_each(|&case| dies(case));
    });
}

#[test]
fn a_rank_that_hangs_is_named_when_the_time_limit_is_over() {
    let scratch = Scratch::new();
    // The last is in a backward pass through divided layers.
    for (rank, count, stage) in [(1, 10, 0), (0, 30, 0), (1, 90, 3)] {
        let what = format!("rank {rank} hangs at collective {count} of stage {stage}");
        let line = format!("{LINE} --output_dir out-{rank}-{stage} --dist_timeout 3 --zero_stage {stage}");
        let began = Instant::now();
        let ran = Ranks::start(&scratch, 3, &line, fault(rank, count, "STOP")).wait_for_others(&what, rank);
        assert!(began.elapsed() < Duration::from_secs(40), "{what}: {:?}", began.elapsed());
        for other in (0..3).filter(|other| *other != rank) {
            one_line(&what, &ran[other], 1, &[&format!("rank {rank} did not respond within dist_timeout = 3 s")]);
        }
    }
}

#[test]
fn a_rank_that_does_not_start_is_named() {
    let scratch = Scratch::new();
    let line = format!("{LINE} --output_dir out --dist_timeout 2");
    let began = Instant::now();
    let ran = Ranks::start_some(&scratch, 3, &[0, 2], &line, |_, _| ()).wait("rank 1 does not start");
    ran.iter().for_each(|ran| one_line("rank 1 does not start", ran, 1, &["rank 1 of 3 did not start within 2 s"]));
    let ran = Ranks::start_some(&scratch, 2, &[1], &line, |_, _| ()).wait("rank 0 does not start");
    one_line("rank 0 does not start", &ran[0], 1, &["rank 1: found no rank 0 at MASTER_ADDR:MASTER_PORT = 127.0.0.1:"]);
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());
    assert!(!scratch.path("out").exists());
}

#[test]
fn a_rank_that_waits_for_another_one_to_start_stops_on_request() {
    let scratch = Scratch::new();
    let began = Instant::now();
    let ranks = Ranks::start_some(&scratch, 2, &[0], &format!("{LINE} --output_dir out"), |_, _| ());
    // As the launcher does some seconds after it has seen that rank 1 was killed.
    std::thread::sleep(Duration::from_secs(2));
    let id = ranks.0[0].id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    let ran = ranks.wait("rank 1 was killed at the start");
    assert_eq!(ran[0].code, 143, "{}", ran[0].stderr);
    assert!(ran[0].stderr.contains("stopped while rank 1 of 2 had not started"), "{}", ran[0].stderr);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

#[test]
fn a_file_that_one_rank_cannot_read_is_an_error_of_all() {
    let scratch = Scratch::new();
    let other = Scratch::new();
    other.write("policy/model.safetensors", "broken");
    other.write("reward/model.safetensors", "broken");
    let commands = [
        "sft --model_name_or_path policy --dataset_name demos.jsonl --max_steps 2",
        "reward --model_name_or_path reward --dataset_name pairs.jsonl --max_steps 2",
        "reward --eval_only --model_name_or_path reward --dataset_name pairs.jsonl",
        "ppo --sft_model_path policy --reward_model_path reward --dataset_name prompts.jsonl --total_episodes 8 \
         --train_batch_size 4",
        // The rank that has divided its model waits for none of the other's passes.
        "sft --model_name_or_path policy --dataset_name demos.jsonl --max_steps 2 --zero_stage 2",
        "ppo --sft_model_path policy --reward_model_path reward --dataset_name prompts.jsonl --total_episodes 8 \
         --train_batch_size 4 --zero_stage 3",
    ];
    for line in commands {
        let began = Instant::now();
        let ran = Ranks::start(&scratch, 2, &format!("{line} --output_dir out"), |rank, command| {
            if rank == 1 {
                command.current_dir(other.path(""));
            }
        })
        .wait(line);
        for ran in &ran {
            one_line(line, ran, 1, &["error: rank 1: ", "/model.safetensors: "]);
        }
        assert!(began.elapsed() < Duration::from_secs(40), "{line}: {:?}", began.elapsed());
        assert!(!scratch.path("out").exists() && !other.path("out").exists(), "{line}");
    }
    // An error of all ranks is reported once, and without a rank.
    scratch.write("policy/model.safetensors", "broken");
    let line = format!("{} --output_dir out", commands[0]);
    let ran = Ranks::start(&scratch, 2, &line, |_, _| ()).wait(&line);
    one_line(&line, &ran[0], 1, &["error: policy/model.safetensors: "]);
    assert_eq!((ran[1].code, ran[1].stderr.as_str()), (1, ""));
}

#[test]
fn ranks_with_other_settings_or_data_than_rank_0_are_refused_before_a_folder_is_made() {
    let scratch = Scratch::new();
    let other = Scratch::new();
    let rows = other.read("prompts.jsonl");
    let mut rows: Vec<&str> = rows.lines().collect();
    rows.reverse();
    other.write("prompts.jsonl", &rows.join("\n"));
    let line = format!("{LINE} --output_dir out");
    let cases = [
        (scratch.path(""), "--gamma 0.9", "error: gamma: all ranks need the same settings and data"),
        (scratch.path(""), "--zero_stage 1", "error: zero_stage: all ranks need the same"),
        (other.path(""), "", "error: dataset_name: all ranks need the same"),
    ];
    for (folder, flags, error) in cases {
        let ran = Ranks::start(&scratch, 2, &line, |rank, command| {
            if rank == 1 {
                command.current_dir(&folder).args(flags.split_whitespace());
            }
        })
        .wait(error);
        assert!(ran[0].code == 2 && ran[0].stderr.starts_with(error), "{}: {}", ran[0].code, ran[0].stderr);
        assert!(ran[0].stderr.contains("on rank 1"), "{}", ran[0].stderr);
        assert_eq!((ran[1].code, ran[1].stderr.as_str()), (2, ""), "{error}");
        assert!(!scratch.path("out/metrics.jsonl").exists() && !other.path("out").exists(), "{error}");
    }
}

#[test]
fn a_score_that_all_ranks_refuse_leaves_the_last_update_of_a_sharded_run() {
    let scratch = Scratch::new();
    // Each rank has two responses of an update of four; the largest number of f32 is 3.4e38.
    let script = "#!/bin/sh\nwhile read -r line; do\n  n=$((n + 1))\n  test $n = 5 && echo 1e39 || echo 0.5\ndone\n";
    scratch.write("reward.sh", script);
    let line = LINE.replace("--reward length:target=3", "--zero_stage 1 --output_dir out");
    let line = line.replace("--save_steps 1", "--save_steps 99").replace("--eval_split_size 2 --eval_steps 3", "");
    let ran = Ranks::start(&scratch, 2, &line, |_, command| {
        command.args(["--reward_command", "sh reward.sh"]);
    })
    .wait("a score is refused");
    assert!(ran[0].code == 1 && ran[0].stderr.contains("expected a finite score, found 1e39"), "{}", ran[0].stderr);
    assert_eq!((ran[1].code, ran[1].stderr.as_str()), (1, ""), "the same error is reported once");
    assert!(scratch.path("out/checkpoint-2").is_dir() && ran[0].stderr.contains("resumes"), "{}", ran[0].stderr);
}

#[test]
fn a_rank_that_is_started_again_before_the_others_have_ended_waits_for_their_next_start() {
    let scratch = Scratch::new();
    succeeds(&scratch, 2, &format!("{LINE} --output_dir whole"));
    let line = format!("{LINE} --output_dir out --resume_from_checkpoint true");
    let port = free_port();
    // The launchers of two machines count their restarts, and start their own rank.
    let start = |rank: usize, restart: usize| {
        let again = |_: usize, command: &mut Command| {
            fault(1, 85, "KILL")(rank, command);
            command.env("TORCHELASTIC_RESTART_COUNT", restart.to_string()).env("MASTER_PORT", port.to_string());
        };
        Ranks::start_some(&scratch, 2, &[rank], &line, again).0.remove(0)
    };
    let first = Ranks(vec![start(0, 0), start(1, 0)]);
    let again = start(1, 1);
    let ran = first.wait("the first start");
    assert_eq!((ran[0].code, ran[1].code), (1, -1), "{}", ran[0].stderr);
    let ran = Ranks(vec![start(0, 1), again]).wait("the second start");
    for ran in &ran {
        assert_eq!(ran.code, 0, "{}", ran.stderr);
    }
    identical(&scratch, "out", "whole");
}

#[test]
fn a_reward_program_that_fails_on_one_rank_ends_all() {
    let scratch = Scratch::new();
    let script =
        "#!/bin/sh\nwhile read -r line; do\n  n=$((n + 1))\n  test \"$OF_RANK$n\" = 15 && exit 7\n  echo 0.5\ndone\n";
    scratch.write("reward.sh", script);
    let line = LINE.replace("--reward length:target=3", "--reward_retries 0 --output_dir out");
    let ran = Ranks::start(&scratch, 2, &line, |rank, command| {
        // A program does not get the variables of the ranks.
        command.env("OF_RANK", rank.to_string()).args(["--reward_command", "sh reward.sh"]);
    })
    .wait("a reward fails");
    let checkpoint = scratch.path("out/checkpoint-1").exists();
    for ran in &ran {
        one_line("a reward fails", ran, 1, &["rank 1: reward `command`: "]);
    }
    assert!(checkpoint && ran[0].stderr.contains("resumes"), "{}", ran[0].stderr);
}

#[test]
fn training_that_diverges_ends_all_ranks_with_the_same_error() {
    let scratch = Scratch::new();
    let sft = "sft --model_name_or_path policy --dataset_name demos.jsonl --max_steps 9 --train_batch_size 4 \
               --learning_rate 1e30 --output_dir sft";
    let ppo = format!("{LINE} --max_skipped_updates 1 --output_dir ppo").replace("1e-3", "1e30");
    for line in [sft, &ppo] {
        let ran = Ranks::start(&scratch, 2, line, |_, _| ()).wait(line);
        assert!(ran[0].code == 1 && ran[0].stderr.lines().last().unwrap().starts_with("error: "), "{}", ran[0].stderr);
        assert!(!ran[0].stderr.contains("rank "), "{}", ran[0].stderr);
        assert_eq!((ran[1].code, ran[1].stderr.as_str()), (1, ""), "{line}");
    }
}

#[test]
fn a_signal_to_one_rank_ends_all_after_the_update_with_a_checkpoint() {
    let scratch = Scratch::new();
    let line = LINE.replace("--total_episodes 12", "--total_episodes 400").replace("--save_steps 1", "--save_steps 99");
    for (rank, name, code) in [(1, "TERM", 143), (0, "INT", 130)] {
        let out = format!("out-{rank}");
        let mut ranks = Ranks::start(&scratch, 2, &format!("{line} --output_dir {out}"), |_, _| ());
        let file = scratch.path(&out).join("metrics.jsonl");
        // The first line is the evaluation before the first update.
        let updates = || std::fs::read_to_string(&file).map_or(0, |text| text.lines().count().saturating_sub(1));
        wait_until(&mut ranks.0[0], || updates() >= 1);
        signal(&ranks.0[rank], name);
        let ran = ranks.wait("a signal");
        assert!(ran.iter().all(|ran| ran.code == code), "{} {}: {}", ran[0].code, ran[1].code, ran[0].stderr);
        let error = ran[0].stderr.lines().last().unwrap();
        assert!(error.starts_with("stopped as requested after update ") && error.ends_with("resumes"), "{error}");
        assert!(scratch.path(&out).join(format!("checkpoint-{}", updates())).is_dir(), "{error}");
        assert!(ran[1].stderr.is_empty(), "{}", ran[1].stderr);
    }
}
