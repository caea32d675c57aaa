//! Hostile reward programs and services.

use super::folders::Dice;
use super::{Outcomes, cases};
use crate::support::Child;
use rlhf::generate::FinishReason;
use rlhf::reward::{CommandReward, HttpReward, HttpSettings, RetryPolicy, Reward, RewardInput, Rewards, ScoreUse};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// A short timeout, so that silence costs little.
const RETRY: RetryPolicy =
    RetryPolicy { timeout: Duration::from_millis(150), attempts: 1, backoff: Duration::from_millis(1) };

/// Scores three responses; what is scored must be finite.
fn score(reward: impl Reward + 'static) -> rlhf::Result<()> {
    let row = json!({"label": 1});
    let input = |prompt| RewardInput {
        prompt,
        response: " fine\u{1b}[2J",
        prompt_ids: &[5, 6],
        response_ids: &[7, 8],
        finish: FinishReason::Stop,
        row: &row,
        episode: None,
    };
    let batch = ["one", "two\n", "\u{9b}three"].map(input);
    let mut rewards = Rewards::new().with("judge", reward);
    for _ in 0..2 {
        let scored = rewards.score(&batch, ScoreUse::Training)?;
        assert!(scored.totals().iter().all(|score| (*score as f32).is_finite()), "{scored:?}");
    }
    Ok(())
}

const ANSWERS: [&str; 24] = [
    "1",
    "-0.0",
    "{\"score\": 1}",
    "{\"scores\": [1, 2]}",
    "{\"scores\": [1e39, -1e39]}",
    "{\"scores\": []}",
    "{\"score\": 1e999}",
    "{\"score\": 1e300}",
    "NaN",
    "Infinity",
    "null",
    "",
    " ",
    "[[[[",
    "\\033[2J\\033]0;title\\007",
    "\\000\\377\\376",
    "{\"score\": \"1\"}",
    "{\"score\": [1]}",
    "1 2",
    "\\\"",
    "0x10",
    "18446744073709551616",
    "{\"score\": 1, \"score\": 2}",
    "\\342\\200\\256",
];

/// A shell program of pieces.
fn program(dice: &mut Dice) -> String {
    let answer = dice.pick(&ANSWERS).replace('\'', "");
    let begin = dice.pick(&[
        "",
        "printf '\\033[31mloading\\n\\r' >&2; ",
        "echo ready; ",
        "head -c 300000 /dev/zero >&2; ",
        "exec 2>&1; ",
        "sleep 1000 & ",
        "exec 0<&-; ",
    ]);
    let answers = format!("while read -r line; do printf '{answer}\\n'; done");
    let body = dice.pick(&[
        answers.clone(),
        answers.clone(),
        format!("read -r line; printf '{answer}\\n'; exit 3"),
        format!("{answers}; sleep 1000"),
        format!("yes '{}'", answer.replace('\\', "")),
        format!("read -r line; printf '{answer}'; kill -9 $$"),
        "head -c 30000000 /dev/zero".to_string(),
        "head -c 300000 /dev/urandom".to_string(),
        "exit 0".to_string(),
        "( while :; do sleep 1; done ) & wait".to_string(),
        "exec 1>&-; sleep 1000".to_string(),
        "no-such-program-\\033".to_string(),
        "(".to_string(),
    ]);
    format!("{begin}{body}")
}

/// A program that scores the line with the id `n` by 10 n, and errs once or twice: it replies twice, late, in another order, or not at all.
fn erring_program(dice: &mut Dice) -> String {
    let echoes = dice.roll(2) == 0;
    let line = if echoes { "{\\\"score\\\": ${id}0, \\\"id\\\": $id}" } else { "${id}0" };
    let reply = format!("echo \"{line}\"");
    let mut cases = String::new();
    // Without ids, one line too many and one too few within two batches look like none.
    for _ in 0..dice.roll(if echoes { 3 } else { 2 }) {
        let at = 1 + dice.roll(9);
        let sleep = dice.pick(&["", "sleep 0.01; ", "sleep 0.04; "]);
        let error = dice.pick(&[
            format!("{reply}; {sleep}{reply}"),
            format!("{reply}; {sleep}{reply}; {reply}"),
            format!("{sleep}{reply}"),
            format!("kept=\"{line}\""),
            format!("{reply}; echo \"$kept\""),
            format!("{reply}; ({sleep}{reply}) &"),
            "echo".to_string(),
        ]);
        cases += &format!("{at}) {error};; ");
    }
    format!("while read -r l; do id=${{l#*\\\"id\\\":}}; id=${{id%%,*}}; case $id in {cases}*) {reply};; esac; done")
}

#[test]
fn a_program_that_errs_with_its_lines_never_gives_a_response_the_score_of_another() {
    let retry = RetryPolicy { timeout: Duration::from_millis(250), ..RETRY };
    let (mut right, mut refused) = (0, 0);
    for case in 0..cases(100) {
        let line = erring_program(&mut Dice(case));
        let row = json!({});
        let input = |()| RewardInput {
            prompt: "p",
            response: "r",
            prompt_ids: &[1],
            response_ids: &[2],
            finish: FinishReason::Stop,
            row: &row,
            episode: None,
        };
        let batch = [(); 3].map(input);
        let mut reward = CommandReward::new(line.clone(), retry);
        let mut score = || -> rlhf::Result<Vec<f64>> {
            let mut found = Vec::new();
            for _ in 0..3 {
                found.extend(reward.score(&batch)?.iter().map(|score| score.total()));
            }
            reward.finish()?;
            Ok(found)
        };
        match score() {
            Ok(found) => {
                let expected: Vec<f64> = (1..=9).map(|id| 10.0 * f64::from(id)).collect();
                assert_eq!(found, expected, "case {case}: {line}");
                right += 1;
            }
            Err(_) => refused += 1,
        }
    }
    assert!(right > 10 && refused > 10, "{right} right, {refused} refused");
}

/// Bytes in place of an HTTP response.
fn response(dice: &mut Dice) -> Vec<u8> {
    let reward = dice.pick(&ANSWERS);
    let body = dice.pick(&[
        format!("{{\"rewards\": [{reward}, 1, 2]}}"),
        format!("{{\"rewards\": [1, 2, 3], \"extra_logs\": {{\"\\u001b[2J\": {reward}}}}}"),
        "{\"rewards\": [1, 2, 3]}".to_string(),
        "{\"rewards\": [1]}".to_string(),
        format!("{{\"rewards\": {}", "[".repeat(100_000)),
        "\u{1b}[2J".repeat(1000),
        String::new(),
    ]);
    let status = dice.pick(&[
        "200 OK",
        "200 OK",
        "200 OK",
        "204 No",
        "301 Moved",
        "401 \u{1b}[2J",
        "429 Slow",
        "500 Oops",
        "999 x",
        "abc",
        "",
    ]);
    let header = dice.pick(&[
        "Connection: close".to_string(),
        "Location: file:///etc/passwd".to_string(),
        "Retry-After: 18446744073709551616".to_string(),
        "Retry-After: -1".to_string(),
        "Transfer-Encoding: chunked".to_string(),
        "Content-Encoding: gzip".to_string(),
        format!("X: {}", "y".repeat(100_000)),
        "no header".to_string(),
        "Content-Length: 1".to_string(),
    ]);
    let length = dice.pick(&[body.len(), body.len(), body.len(), body.len() + 5, usize::MAX, 0]);
    let mut bytes = match dice.roll(6) {
        0 => format!("HTTP/1.1 {status}\r\n{header}\r\n\r\n{body}").into_bytes(),
        _ => format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{header}\r\n\r\n{body}").into_bytes(),
    };
    if dice.roll(4) == 0 {
        let at = dice.roll(bytes.len());
        bytes[at] = dice.roll(256) as u8;
    }
    bytes
}

#[test]
fn no_reward_program_or_service_makes_the_program_panic_wait_or_take_memory() {
    let found = Child { test: "attack::rewards::child_asks_hostile_rewards", address_space_gib: 6, vars: &[] }.run();
    assert!(found["refused"].as_u64() > found["went_well"].as_u64(), "{found}");
}

#[test]
#[ignore = "a process of its own, started by no_reward_program_or_service_makes_the_program_panic_wait_or_take_memory"]
fn child_asks_hostile_rewards() {
    let before = Child::memory("VmRSS");
    let sound = RetryPolicy { timeout: Duration::from_secs(60), ..RETRY };
    score(CommandReward::new("while read -r line; do echo 1; done", sound)).unwrap();
    let mut outcomes = Outcomes::default();
    for case in 0..cases(60) {
        let line = program(&mut Dice(case));
        let began = Instant::now();
        outcomes.note(&format!("program {case}: {line:?}"), || score(CommandReward::new(line, RETRY)));
        assert!(began.elapsed() < Duration::from_secs(20), "program {case} took {:?}", began.elapsed());
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let count = cases(200);
    std::thread::spawn(move || {
        for (asked, stream) in (0..).zip(listener.incoming()) {
            let mut stream = stream?;
            std::thread::spawn(move || {
                let _ = stream.read(&mut [0; 4096]);
                stream.write_all(&response(&mut Dice(asked)))
            });
        }
        std::io::Result::Ok(())
    });
    for case in 0..count {
        let settings = HttpSettings { retry: RETRY, ..HttpSettings::default() };
        outcomes.note(&format!("service {case}"), || score(HttpReward::new(&url, settings)?));
    }
    let grew = Child::memory("VmHWM").saturating_sub(before);
    assert!(grew < 500 << 20, "memory grew by {grew}");
    Child::reports(&outcomes.report());
}
