//! `generate`, `logprobs` and `score` with several ranks write the bytes of one.

use crate::cli::{Ran, Scratch, json_lines};
use crate::support::free_port;
use std::io::Write;
use std::process::{Child, Stdio};

/// Runs `line` as `size` ranks, with `input` on the standard input of rank 0.
fn ranks(scratch: &Scratch, line: &str, size: usize, input: &str) -> Vec<Ran> {
    let port = free_port();
    let start = |rank: usize| {
        let mut command = scratch.command(line);
        if size > 1 {
            let (rank, size, port) = (rank.to_string(), size.to_string(), port.to_string());
            let place = [("RANK", &rank), ("LOCAL_RANK", &rank), ("WORLD_SIZE", &size), ("LOCAL_WORLD_SIZE", &size)];
            command.envs(place).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port);
        }
        let stdin = if rank == 0 { Stdio::piped() } else { Stdio::null() };
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut started: Vec<Child> = (0..size).map(start).collect();
    // Rank 0 may end before it reads.
    let _ = started[0].stdin.take().unwrap().write_all(input.as_bytes());
    started.into_iter().map(|child| Ran::from(child.wait_with_output().unwrap())).collect()
}

/// Checks that `line` prints the same with 1, 2 and 4 ranks, and returns it.
#[track_caller]
fn same(scratch: &Scratch, line: &str, input: &str) -> String {
    let output = |size| {
        let ran = ranks(scratch, line, size, input);
        for (rank, ran) in ran.iter().enumerate() {
            assert_eq!(ran.code, 0, "{line}: rank {rank} of {size}: {}", ran.stderr);
            assert!(
                rank == 0 || (ran.stdout.is_empty() && ran.stderr.is_empty()),
                "{line}: {}{}",
                ran.stdout,
                ran.stderr
            );
        }
        let first = ran.into_iter().next().unwrap();
        (first.stdout, first.stderr)
    };
    let alone = output(1);
    for size in [2, 4] {
        assert_eq!(output(size), alone, "{line}: {size} ranks");
    }
    alone.0
}

#[test]
fn rows_of_several_ranks_are_those_of_one_to_the_bit() {
    let scratch = Scratch::new();
    let prompts = scratch.read("prompts.jsonl");
    // Three rows are one part of two responses each and a smaller one; two parts for four ranks leave two without any.
    for flags in ["--batch_size 2", "--batch_size 6 --num_return_sequences 3", "--batch_size 32"] {
        let line = format!(
            "generate --model policy --dataset_name prompts.jsonl --max_new_tokens 8 --temperature 0.9 {flags}"
        );
        assert!(!same(&scratch, &line, "").is_empty());
    }
    // Standard input is read by rank 0.
    let line = "generate --model policy --input_format jsonl --max_new_tokens 6 --batch_size 1";
    let generated = same(&scratch, line, &prompts);
    assert_eq!(json_lines(&generated).len(), prompts.lines().count());
    assert_eq!(
        json_lines(&same(&scratch, "logprobs --model policy --batch_size 2", &generated)).len(),
        prompts.lines().count()
    );
    same(&scratch, "score --model reward --batch_size 2", &generated);
    same(&scratch, "score --model reward --batch_size 1 --dataset_name pairs.jsonl", "");
    same(&scratch, "score --reward length:4 --tokenizer_name policy --dataset_name demos.jsonl", "");
    // A file is written once.
    let line = "logprobs --model policy --batch_size 1 --dataset_name demos.jsonl --overwrite_output_file --output_file out.jsonl";
    same(&scratch, line, "");
    assert_eq!(json_lines(&scratch.read("out.jsonl")).len(), prompts.lines().count());
}

#[test]
fn an_error_of_one_rank_ends_all_and_merge_runs_once() {
    let scratch = Scratch::new();
    // Rank 0 alone looks at the output file.
    scratch.write("there.jsonl", "");
    let line = "logprobs --model policy --dataset_name demos.jsonl --output_file there.jsonl";
    let ran = ranks(&scratch, line, 2, "");
    ran[0].is_one_error(line, 1, &["there.jsonl: the file exists"]);
    ran[1].is_one_error(line, 1, &["rank 0: there.jsonl: the file exists"]);
    assert_eq!(scratch.read("there.jsonl"), "");
    let line = "merge --model_name_or_path nowhere --output_dir out";
    let ran = ranks(&scratch, line, 2, "");
    assert!(ran[0].code == 1 && ran[0].stderr.contains("nowhere"), "{}", ran[0].stderr);
    assert_eq!((ran[1].code, ran[1].stderr.as_str()), (0, ""));
}
