//! Ranks that are killed or stopped at a moment drawn from a seed, with strangers at their port.

use super::folders::Dice;
use super::{cases, check_error};
use crate::cli::Scratch;
use crate::distributed::failures::LINE;
use crate::distributed::identical;
use crate::launch::{Launched, runs};
use crate::support::{free_port, say};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Connects again and again until `ended`: sends bytes and leaves, waits for a reply, or stays without a word.
fn strangers(port: u16, mut dice: Dice, ended: &AtomicBool) -> usize {
    let (mut waiting, mut met) = (Vec::new(), 0);
    while !ended.load(Ordering::SeqCst) {
        if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
            met += 1;
            let mut bytes: Vec<u8> = (0..dice.roll(300)).map(|_| dice.roll(256) as u8).collect();
            if dice.roll(3) == 0 {
                bytes.splice(..0, *b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
            }
            let _ = stream.write_all(&bytes);
            match dice.roll(3) {
                0 => waiting.push(stream),
                1 => {
                    let _ = stream.set_read_timeout(Some(Duration::from_millis(30)));
                    let _ = stream.read(&mut [0; 64]);
                }
                _ => {}
            }
        }
        thread::sleep(Duration::from_millis(dice.roll(40) as u64));
    }
    met
}

/// Ends the strangers, also where a test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn ranks_that_are_killed_or_stopped_among_strangers_end_in_a_few_lines_and_resume_to_the_same_bits() {
    let scratch = Scratch::new();
    let began = Instant::now();
    let run = |flags: &str, line: &str| scratch.run(&format!("launch --nproc_per_node 2 {flags} {line}"));
    let whole = run("", &format!("{LINE} --output_dir whole"));
    assert_eq!(whole.code, 0, "{}", whole.stderr);
    let length = began.elapsed().as_millis() as usize;
    let (mut cut, mut met) = (0, 0);
    for seed in 0..cases(10) {
        let mut dice = Dice(seed);
        let (rank, kind) = (dice.roll(2), dice.pick(&["none", "KILL", "KILL", "TERM", "INT"]));
        let after = Duration::from_millis(dice.roll(length) as u64);
        let (out, what) = (format!("out-{seed}"), format!("case {seed}: rank {rank}: {kind} after {after:?}"));
        let line = format!("{LINE} --output_dir {out}");
        let (port, ended) = (free_port(), AtomicBool::new(false));
        let (ran, found) = thread::scope(|scope| {
            let ends = Ends(&ended);
            let strangers = scope.spawn(|| strangers(port, Dice(!seed), &ended));
            let mut launched = Launched::start(&scratch, &format!("--nproc_per_node 2 --master_port {port}"), &line);
            let ranks = launched.ranks(2, 0);
            thread::sleep(after);
            if kind != "none" && runs(ranks[rank]) {
                // It may end in between.
                let _ = Command::new("kill").args([&format!("-{kind}"), &ranks[rank].to_string()]).output();
            }
            let began = Instant::now();
            let ran = launched.end(&ranks);
            assert!(began.elapsed() < Duration::from_secs(30), "{what}: {:?}", began.elapsed());
            drop(ends);
            (ran, strangers.join().unwrap())
        });
        met += found;
        let codes: &[i32] = match kind {
            "none" => &[0],
            "KILL" => &[0, 128 + 9],
            _ => &[0, 1, 128 + 2, 128 + 15],
        };
        assert!(codes.contains(&ran.code) && ran.stderr.lines().count() <= 4, "{what}: {}: {}", ran.code, ran.stderr);
        for line in ran.stderr.lines() {
            check_error(&what, line);
        }
        if ran.code != 0 {
            cut += 1;
            let ran = run("", &format!("{line} --resume_from_checkpoint true"));
            assert_eq!(ran.code, 0, "{what}: {}", ran.stderr);
        }
        identical(&scratch, &out, "whole");
        std::fs::remove_dir_all(scratch.path(&out)).unwrap();
    }
    assert!(cut > 0 && met > 0, "{cut} runs were cut, {met} strangers were heard");
    say(&format!("{cut} of {} runs were cut, {met} strangers", cases(10)));
}
