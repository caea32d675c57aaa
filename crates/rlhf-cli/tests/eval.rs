//! `rlhf eval`: responses, judges, both orders, what a cut leaves, what is refused; and the recipe of docs/guides/tldr.md at toy size.

use crate::checkpoint::copy_dir;
use crate::cli::{PROMPTS, Ran, Scratch, json_lines};
use crate::rewards::Service;
use crate::support::output;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Map, Value, json};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Two models of one tokenizer, and prompts with a response of a column.
fn scratch() -> Scratch {
    let scratch = Scratch::new();
    scratch.copy("other", "gpt_neox");
    scratch.edit_tensors("other", |tensors| {
        for (name, tensor) in tensors.iter_mut().filter(|(name, _)| name.ends_with("weight")) {
            if name.contains("dense") {
                *tensor = &*tensor * 3.0;
            }
        }
    });
    let row = |(at, prompt): (usize, &str)| {
        format!("{}\n", json!({"prompt": prompt, "completion": " and then some", "id": at}))
    };
    scratch.write("prompts.jsonl", &PROMPTS.into_iter().enumerate().map(row).collect::<String>());
    scratch
}

const EVAL: &str = "eval --model policy --dataset_name prompts.jsonl --output_dir out --max_new_tokens 8";
const PAIRS: &str =
    "eval --model policy --compare other --dataset_name prompts.jsonl --output_dir out --max_new_tokens 8";

#[track_caller]
fn evaluates(scratch: &Scratch, line: &str, words: &[&str]) -> Value {
    let ran = scratch.run_with(line, words);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{line}");
    summary(scratch, &ran)
}

/// The summary on standard output, which `summary.json` has too.
#[track_caller]
fn summary(scratch: &Scratch, ran: &Ran) -> Value {
    let printed: Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}", ran.stderr));
    let written: Value = serde_json::from_str(&scratch.read("out/summary.json")).unwrap();
    assert_eq!(printed, written);
    printed
}

/// Continues an evaluation whose judge was mended, which is a warning.
#[track_caller]
fn continues(scratch: &Scratch, line: &str) -> Value {
    let ran = scratch.run_with(line, &JUDGE);
    let warning = "warning: out: inputs of the judge have changed: reward judge_command = judge.py: judge.py has changed; earlier verdicts are \
                   kept, and the summary counts them (all are judged again with overwrite_output_dir = true)\n";
    assert_eq!((ran.code, ran.stderr.as_str()), (0, warning), "{line}");
    summary(scratch, &ran)
}

fn rows(scratch: &Scratch) -> Vec<Map<String, Value>> {
    json_lines(&scratch.read("out/results.jsonl"))
}

/// A judge in shell and Python, which appends a line to `calls` for each pair.
fn write_judge(scratch: &Scratch, verdict: &str) {
    let program = format!(
        "import json, sys, time\nfor line in sys.stdin:\n    pair = json.loads(line)\n    a, b = pair['response_a'], pair['response_b']\n    \
         open('calls', 'a').write(pair['prompt'] + '\\n')\n    {verdict}\n    sys.stdout.flush()\n"
    );
    scratch.write("judge.py", &program);
}

const LONGER: &str = "print(json.dumps({'winner': 'a' if len(a) > len(b) else 'b' if len(b) > len(a) else 'tie'}))";
const JUDGE: [&str; 2] = ["--judge_command", "python3 judge.py"];

fn calls(scratch: &Scratch) -> usize {
    std::fs::read_to_string(scratch.path("calls")).map_or(0, |text| text.lines().count())
}

// Rewards as judges.

#[test]
fn a_reward_model_judges_the_responses_of_generate_by_the_scores_of_score() {
    let scratch = scratch();
    let found = evaluates(&scratch, &format!("{PAIRS} --reward_model_path reward"), &[]);
    let rows = rows(&scratch);
    assert_eq!(rows.len(), PROMPTS.len());
    let mut scores = Vec::new();
    for (model, side) in [("policy", "a"), ("other", "b")] {
        let generate = format!("generate --model {model} --dataset_name prompts.jsonl --max_new_tokens 8");
        scratch.succeeds(&format!("{generate} --output_file {model}.jsonl"));
        let scored = json_lines(&scratch.succeeds(&format!("score --model reward --dataset_name {model}.jsonl")));
        for (row, expected) in rows.iter().zip(&scored) {
            assert_eq!(
                (&row[&format!("response_{side}")], &row["prompt"]),
                (&expected["completion"], &expected["prompt"])
            );
            let gap = row[&format!("score_{side}")].as_f64().unwrap() - expected["score"].as_f64().unwrap();
            assert!(gap.abs() < 2e-5, "{row:?} {expected:?}");
            let text = expected["completion"].as_str().unwrap();
            assert_eq!(row[&format!("length_{side}")], text.chars().count());
        }
        scores.push(scored.iter().map(|row| row["score"].as_f64().unwrap()).collect::<Vec<_>>());
    }
    let wins = scores[0].iter().zip(&scores[1]).filter(|(a, b)| a > b).count();
    assert!(wins > 0 && wins < 8, "{wins}: the two models are too alike to test with");
    assert_eq!((&found["wins"], &found["losses"], &found["ties"]), (&json!(wins), &json!(8 - wins), &json!(0)));
    assert_eq!((&found["win_rate"], &found["no_verdict"]), (&json!(wins as f64 / 8.0), &json!(0)));
    let mean = scores[0].iter().sum::<f64>() / 8.0;
    assert!((found["a"]["mean_score"].as_f64().unwrap() - mean).abs() < 2e-5);
    assert_eq!(found["judge"], "model: `reward`");
    // The settings that it leaves repeat it.
    scratch.succeeds("eval --config out/config.yaml --output_dir again");
    assert_eq!(scratch.read("again/results.jsonl"), scratch.read("out/results.jsonl"));
}

#[test]
fn models_that_are_sampled_with_different_settings_are_a_warning_that_flags_for_both_end() {
    let scratch = scratch();
    scratch.write(
        "other/generation_config.json",
        &json!({"do_sample": true, "top_k": 0, "max_new_tokens": 5, "temperature": 0.5}).to_string(),
    );
    let line = PAIRS.replace(" --max_new_tokens 8", "") + " --reward_model_path reward --num_prompts 2";
    let ran = scratch.run(&line);
    let words = "warning: policy and other are sampled with different settings, those of their generation_config.json: \
                 --max_new_tokens 53 and 5, --temperature 1.0 and 0.5; a comparison needs the same: set --max_new_tokens and the others\n";
    assert_eq!((ran.code, ran.stderr.as_str()), (0, words));
    let state: Value = serde_json::from_str(&scratch.read("out/evaluation.json")).unwrap();
    let sampled = |side: usize, name: &str| state["sampling"][side]["settings"][name].clone();
    assert_eq!((sampled(0, "max_new_tokens"), sampled(1, "temperature")), (json!(53), json!(0.5)));
    let same = format!("{line} --overwrite_output_dir --max_new_tokens 8 --temperature 1");
    evaluates(&scratch, &same, &[]);
}

#[test]
fn a_model_ties_with_itself_and_a_column_is_scored_as_a_whole_response() {
    let scratch = scratch();
    let line = format!("{EVAL} --compare policy --reward_model_path reward");
    let found = evaluates(&scratch, &line, &[]);
    assert_eq!(
        (&found["ties"], &found["win_rate"], &found["length_controlled_win_rate"]),
        (&json!(8), &json!(0.5), &json!(0.5))
    );
    let line = format!(
        "{EVAL} --overwrite_output_dir --compare_column completion --reward_model_path reward --num_return_sequences 2"
    );
    let found = evaluates(&scratch, &line, &[]);
    let rows = rows(&scratch);
    assert_eq!(
        (rows.len(), &found["b"]["name"], &found["responses_per_prompt"]),
        (16, &json!("column completion"), &json!(2))
    );
    // With eos behind it, as `rlhf reward` reads one.
    let pairs: String = PROMPTS
        .map(|prompt| format!("{}\n", json!({"prompt": prompt, "chosen": " and then some", "rejected": " x"})))
        .concat();
    scratch.write("whole.jsonl", &pairs);
    let ran = scratch.run("score --model reward --dataset_name whole.jsonl");
    for (row, expected) in rows.chunks(2).zip(json_lines(&ran.stdout)) {
        let gap = row[0]["score_b"].as_f64().unwrap() - expected["score_chosen"].as_f64().unwrap();
        assert!(gap.abs() < 2e-5 && row[0]["score_b"] == row[1]["score_b"], "{row:?} {expected:?}");
        assert_eq!(row[1]["response_b"], " and then some");
    }
}

#[test]
fn a_model_of_another_tokenizer_is_scored_by_its_text() {
    let scratch = scratch();
    scratch.copy("llama", "llama_tied");
    let line = format!("{EVAL} --compare llama --reward length:target=40,unit=chars --reward_model_path reward");
    evaluates(&scratch, &line, &[]);
    let rows = rows(&scratch);
    for row in &rows {
        assert!(row["score_a"].is_f64() && row["score_b"].is_f64() && row["winner"].is_string(), "{row:?}");
    }
    let generated = scratch.succeeds("generate --model llama --dataset_name prompts.jsonl --max_new_tokens 8");
    for (row, expected) in rows.iter().zip(json_lines(&generated)) {
        assert_eq!(row["response_b"], expected["completion"]);
    }
}

#[test]
fn one_model_and_a_rule_give_the_share_right_and_pass_at_k() {
    let scratch = scratch();
    let found = evaluates(&scratch, &format!("{EVAL} --num_return_sequences 4"), &["--reward", "regex:(?i)[aeiou]s"]);
    let rows = rows(&scratch);
    assert_eq!(rows.len(), 32);
    let right: Vec<usize> =
        rows.chunks(4).map(|rows| rows.iter().filter(|row| row["score_a"] == json!(1.0)).count()).collect();
    let all: usize = right.iter().sum();
    assert!(all > 0 && all < 32, "{right:?}");
    // 1 - C(4 - c, 2) / C(4, 2)
    let pass_at_2 = right.iter().map(|&c| 1.0 - [6.0, 3.0, 1.0, 0.0, 0.0][c] / 6.0).sum::<f64>() / 8.0;
    let pass_at_4 = right.iter().filter(|&&c| c > 0).count() as f64 / 8.0;
    let expected = [("1", all as f64 / 32.0), ("2", pass_at_2), ("4", pass_at_4)];
    for (k, expected) in expected {
        let pass = found["a"]["pass_at_k"][k].as_f64().unwrap();
        assert!((pass - expected).abs() < 1e-12, "pass@{k} = {pass}, expected {expected}");
    }
    assert_eq!(found["a"]["share_right"], found["a"]["mean_score"]);
    assert!(found.get("win_rate").is_none() && found.get("b").is_none() && rows[0].get("response_b").is_none());
}

// Judges of pairs.

#[test]
fn a_program_judges_both_orders_and_its_verdicts_are_of_models_and_not_of_places() {
    let scratch = scratch();
    write_judge(&scratch, LONGER);
    let found = evaluates(&scratch, PAIRS, &JUDGE);
    let rows = rows(&scratch);
    let mut counts = [0; 3];
    for row in &rows {
        let (a, b) = (row["length_a"].as_u64(), row["length_b"].as_u64());
        let (at, winner) = if a > b {
            (0, "a")
        } else if a < b {
            (2, "b")
        } else {
            (1, "tie")
        };
        counts[at] += 1;
        assert_eq!(row["winner"], winner, "{row:?}");
        if row["response_a"] != row["response_b"] {
            assert_eq!(row["verdicts"], json!([winner, winner]));
        }
    }
    assert_eq!([&found["wins"], &found["ties"], &found["losses"]], counts.map(|count| json!(count)).each_ref());
    let differ = rows.iter().filter(|row| row["response_a"] != row["response_b"]).count();
    assert_eq!((calls(&scratch), &found["inconsistent"]), (2 * differ, &json!(0)));
    // It knows nothing but the place.
    write_judge(&scratch, "print('a')");
    let found = evaluates(&scratch, &format!("{PAIRS} --overwrite_output_dir"), &JUDGE);
    assert_eq!((&found["ties"], &found["inconsistent"], &found["win_rate"]), (&json!(8), &json!(differ), &json!(0.5)));
}

#[test]
fn a_judge_that_replies_nonsense_loses_only_its_rows_and_one_that_only_does_so_is_an_error() {
    let scratch = scratch();
    write_judge(&scratch, &format!("print('\\x1b[2Jno idea') if pair['prompt'] == 'human' else {LONGER}"));
    let ran = scratch.run_with(PAIRS, &JUDGE);
    assert_eq!((ran.code, ran.stderr.lines().count()), (0, 1), "{}", ran.stderr);
    for words in
        ["warning: no verdict for prompt 5 of the dataset: expected {\"winner\": \"a\"}", "no idea", "reported once"]
    {
        assert!(ran.stderr.contains(words), "{}", ran.stderr);
    }
    assert!(!ran.stderr.trim_end().contains(char::is_control), "{:?}", ran.stderr);
    let found = summary(&scratch, &ran);
    assert_eq!((&found["prompts"], &found["no_verdict"]), (&json!(8), &json!(1)));
    let rows = rows(&scratch);
    assert!(rows[4]["no_verdict"].as_str().unwrap().contains("no idea") && rows[4].get("winner").is_none());
    // A judge that was mended judges the rest, and nothing twice.
    std::fs::remove_file(scratch.path("calls")).unwrap();
    write_judge(&scratch, LONGER);
    let found = continues(&scratch, PAIRS);
    assert_eq!((calls(&scratch), &found["no_verdict"]), (2, &json!(0)));

    write_judge(&scratch, "print('\\x1b[2Jno idea ' * 99)");
    let line = format!("{PAIRS} --overwrite_output_dir");
    let ran = scratch.run_with(&line, &JUDGE);
    let error = ran.stderr.lines().last().unwrap();
    assert!(ran.code == 1 && error.starts_with("error: the judge failed for 5 rows in a row: "), "{error}");
    assert!(error.contains("no idea") && error.len() < 500 && !error.contains(char::is_control), "{error}");
    assert_eq!(json_lines(&scratch.read("out/responses.jsonl")).len(), 16, "the responses stay");
}

#[test]
fn the_first_retry_of_a_judge_is_a_warning() {
    let scratch = scratch();
    write_judge(&scratch, LONGER);
    let program = scratch.read("judge.py");
    let fails_twice = "n = len(open('starts').read()) if __import__('os').path.exists('starts') else 0\nopen('starts', 'a').write('.')\n\
                       if n < 2: sys.exit('no licence yet')\nfor line in";
    scratch.write("judge.py", &program.replace("for line in", fails_twice));
    let ran = scratch.run_with(PAIRS, &JUDGE);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let warnings: Vec<&str> = ran.stderr.lines().filter(|line| line.starts_with("warning: the judge: ")).collect();
    assert_eq!(warnings.len(), 1, "{}", ran.stderr);
    assert!(
        warnings[0].contains("no licence yet") && warnings[0].ends_with("; tried again (reported once)"),
        "{}",
        warnings[0]
    );
    assert_eq!(scratch.read("starts"), "...");
}

#[test]
fn fields_of_a_generation_config_without_effect_are_a_warning_of_each_model() {
    let scratch = scratch();
    for model in ["policy", "other"] {
        scratch.write(&format!("{model}/generation_config.json"), r#"{"do_sample": true, "num_beams": 4, "top_k": 5}"#);
    }
    let ran = scratch.run_with(&format!("{PAIRS} --reward_model_path reward"), &[]);
    let warning =
        |model: &str| format!("warning: {model}/generation_config.json: fields without effect here: num_beams\n");
    assert_eq!((ran.code, ran.stderr), (0, warning("policy") + &warning("other")));
}

#[test]
fn a_line_too_much_of_a_judge_gives_no_pair_the_verdict_of_another() {
    let scratch = scratch();
    write_judge(&scratch, LONGER);
    evaluates(&scratch, PAIRS, &JUDGE);
    let winners = |scratch: &Scratch| rows(scratch).iter().map(|row| row.get("winner").cloned()).collect::<Vec<_>>();
    let expected = winners(&scratch);
    // Each lost verdict is asked for once more, half a second later.
    let again = format!("{PAIRS} --overwrite_output_dir --judge_retries 1");
    // A line before the first verdict, in each process: nothing can be judged.
    write_judge(&scratch, LONGER);
    let program = scratch.read("judge.py");
    scratch.write("judge.py", &program.replace("for line in", "print('loading the model', flush=True)\nfor line in"));
    let ran = scratch.run_with(&again, &JUDGE);
    let error = ran.stderr.lines().last().unwrap();
    for words in ["error: the judge failed for 5 rows in a row: expected ", "\"loading the model\""] {
        assert!(ran.code == 1 && error.contains(words), "{}", ran.stderr);
    }
    // One after each verdict, late: pairs lose their verdict, and none gets that of another.
    write_judge(&scratch, &format!("time.sleep(0.02); {LONGER}; sys.stdout.flush(); time.sleep(0.02); print('done')"));
    let ran = scratch.run_with(&again, &JUDGE);
    assert!(ran.stderr.contains("no verdict for prompt"), "{}", ran.stderr);
    for (found, expected) in winners(&scratch).iter().zip(&expected) {
        assert!(found.is_none() || found == expected, "{found:?} {expected:?}");
    }
    // Two verdicts for each pair, of which the second is late.
    let verdict = LONGER.replace("{'winner'", "{'id': pair['id'], 'winner'");
    write_judge(&scratch, &format!("{verdict}; sys.stdout.flush(); time.sleep(0.03); {verdict}"));
    let ran = scratch.run_with(&again, &JUDGE);
    assert!(!rows(&scratch).is_empty(), "{}", ran.stderr);
    for (found, expected) in winners(&scratch).iter().zip(&expected) {
        assert!(found.is_none() || found == expected, "{found:?} {expected:?}");
    }
}

#[test]
fn a_verdict_twice_takes_back_those_that_it_may_have_shifted_and_the_evaluation_continues() {
    let scratch = scratch();
    write_judge(&scratch, LONGER);
    evaluates(&scratch, PAIRS, &JUDGE);
    let winners = |scratch: &Scratch| rows(scratch).iter().map(|row| row.get("winner").cloned()).collect::<Vec<_>>();
    let (expected, line) = (winners(&scratch), format!("{PAIRS} --judge_retries 0"));
    // The second verdict of the first pair comes while the judge is asked for the second one: each later pair has that of the one before.
    let count = "n = globals().get('n', 0) + 1; time.sleep(0.05)";
    write_judge(&scratch, &format!("{count}; {LONGER}; sys.stdout.flush(); n == 1 and (time.sleep(0.05), {LONGER})"));
    let ran = scratch.run_with(&format!("{line} --overwrite_output_dir"), &JUDGE);
    let error = ran.stderr.lines().last().unwrap();
    for words in [
        "error: the judge: expected one line per request",
        "the verdicts of this evaluation since its last start are taken back",
    ] {
        assert!(ran.code == 1 && error.contains(words), "no `{words}` in {}", ran.stderr);
    }
    assert!(rows(&scratch).is_empty());
    // The mended judge continues with the responses that are there.
    let responses = scratch.read("out/responses.jsonl");
    write_judge(&scratch, LONGER);
    evaluates(&scratch, &line, &JUDGE);
    assert_eq!((winners(&scratch), scratch.read("out/responses.jsonl")), (expected.clone(), responses));
    // Verdicts with the ids of their pairs are kept.
    let verdict = LONGER.replace("{'winner'", "{'id': pair['id'], 'winner'");
    write_judge(&scratch, &format!("{verdict}; sys.stdout.flush(); pair['id'] == 2 and (time.sleep(0.1), {verdict})"));
    scratch.run_with(&format!("{line} --overwrite_output_dir"), &JUDGE);
    let kept = winners(&scratch);
    assert!(!kept.is_empty());
    for (found, expected) in kept.iter().zip(&expected) {
        assert!(found.is_none() || found == expected, "{found:?} {expected:?}");
    }
}

#[test]
fn a_judge_that_stops_to_repeat_ids_loses_the_verdict() {
    let scratch = scratch();
    let verdict = LONGER.replace("{'winner'", "{**({'id': pair['id']} if pair['id'] != 3 else {}), 'winner'");
    write_judge(&scratch, &verdict);
    scratch.run_with(PAIRS, &JUDGE);
    let without: Vec<_> = rows(&scratch).into_iter().filter_map(|row| row.get("no_verdict").cloned()).collect();
    assert_eq!(without.len(), 1);
    assert!(
        without[0].as_str().unwrap().starts_with("expected the \"id\": 3 of the pair in the verdict"),
        "{without:?}"
    );
}

#[test]
fn an_evaluation_that_has_moved_continues_and_one_with_another_judge_says_so() {
    let scratch = scratch();
    write_judge(&scratch, LONGER);
    let line = format!("{PAIRS} --max_judgements 2");
    scratch.run_with(&line, &JUDGE);
    copy_dir(&scratch.path("policy"), &scratch.path("moved/policy"));
    scratch.write("moved/judge.py", &scratch.read("judge.py"));
    let moved = line.replace("--model policy", "--model moved/policy");
    let ran = scratch
        .run_with(&moved.replace("judgements 2", "judgements 4"), &["--judge_command", "python3 moved/judge.py"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    write_judge(&scratch, "print('tie')");
    continues(&scratch, &line.replace("judgements 2", "judgements 6"));
}

#[test]
fn a_judge_without_any_verdict_is_an_error_though_equal_responses_are_ties() {
    let scratch = scratch();
    write_judge(&scratch, "print('null')");
    // The models respond alike to the first prompt.
    let column = " --compare_column completion";
    let first = scratch.run(&format!("{EVAL}{column} --reward length:target=4"));
    assert_eq!(first.code, 0, "{}", first.stderr);
    let response = rows(&scratch)[0]["response_a"].clone();
    let prompts = scratch.read("prompts.jsonl");
    let lines = prompts.lines().enumerate().map(|(at, line)| {
        let mut row: Value = serde_json::from_str(line).unwrap();
        if at == 0 {
            row["completion"] = response.clone();
        }
        format!("{row}\n")
    });
    let lines: String = lines.collect();
    scratch.write("prompts.jsonl", &lines);
    let line = format!("{EVAL}{column} --overwrite_output_dir");
    let ran = scratch.run_with(&line, &JUDGE);
    let error = "error: the judge gave no verdict for any of 7 rows; the first: the judge gave none (null)";
    assert_eq!((ran.code, ran.stderr.lines().last().unwrap()), (1, error));
    // Most of a dataset is not judged for nothing.
    scratch.write("prompts.jsonl", &lines.repeat(3));
    std::fs::remove_file(scratch.path("calls")).unwrap();
    let ran = scratch.run_with(&line, &JUDGE);
    assert!(ran.code == 1 && ran.stderr.contains("gave no verdict for the first 10 rows: "), "{}", ran.stderr);
    assert_eq!(calls(&scratch), 20);
    // Many rows without a verdict are a warning at the end.
    write_judge(&scratch, &format!("print('null') if pair['prompt'] == 'do' else {LONGER}"));
    let ran = scratch.run_with(&line, &JUDGE);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.lines().last().unwrap().contains("3 of 23 rows have no verdict"), "{}", ran.stderr);
}

#[test]
fn responses_to_a_row_that_has_changed_are_not_judged() {
    let scratch = scratch();
    write_judge(&scratch, "sys.exit(1)");
    let ran = scratch.run_with(&format!("{PAIRS} --judge_retries 0"), &JUDGE);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let prompts = scratch.read("prompts.jsonl");
    let changed = ["row 2 of the dataset has changed since the responses of responses.jsonl were generated"];
    for (from, to) in [("A film", "A car"), ("\"id\":1", "\"id\":9")] {
        write_judge(&scratch, LONGER);
        scratch.write("prompts.jsonl", &prompts.replace(from, to));
        scratch.refuses_with(PAIRS, &JUDGE, 1, &changed);
    }
    scratch.write("prompts.jsonl", &prompts);
    evaluates(&scratch, PAIRS, &JUDGE);
}

#[test]
fn a_judge_that_times_out_or_cannot_be_started_ends_the_evaluation_which_continues_later() {
    let scratch = scratch();
    write_judge(&scratch, &format!("time.sleep(60) if pair['prompt'] == 'do' else {LONGER}"));
    let line = format!("{PAIRS} --judge_timeout 2 --judge_retries 0");
    let ran = scratch.run_with(&line, &JUDGE);
    assert_eq!((ran.code, ran.stderr.lines().count()), (0, 1), "{}", ran.stderr);
    assert!(ran.stderr.contains("prompt 4 of the dataset: no reply within 2 s"), "{}", ran.stderr);
    assert_eq!(summary(&scratch, &ran)["no_verdict"], 1);

    let line = format!("{PAIRS} --overwrite_output_dir --judge_retries 0");
    let ran = scratch.run_with(&line, &["--judge_command", "./no-such-judge --key secret"]);
    let error = ran.stderr.lines().last().unwrap();
    for words in ["error: the judge failed for 5 rows in a row", "exited without a reply", "the same command continues"]
    {
        assert!(ran.code == 1 && error.contains(words), "{}", ran.stderr);
    }
    assert!(!ran.stderr.contains("secret"), "{}", ran.stderr);
    assert_eq!(rows(&scratch).len(), 5);
}

#[test]
fn an_evaluation_that_was_cut_in_a_line_continues_and_judges_nothing_twice() {
    let scratch = scratch();
    write_judge(&scratch, LONGER);
    evaluates(&scratch, PAIRS, &JUDGE);
    let (whole, responses, made) =
        (scratch.read("out/results.jsonl"), scratch.read("out/responses.jsonl"), calls(&scratch));
    let judge_calls = |row: &Map<String, Value>| 2 * usize::from(row["response_a"] != row["response_b"]);
    let all = rows(&scratch);
    // Cut in the fourth row, and in the responses of the other model.
    let end = |text: &str, lines: usize| text.split_inclusive('\n').take(lines).map(str::len).sum::<usize>() + 20;
    scratch.write("out/results.jsonl", &whole[..end(&whole, 3)]);
    scratch.write("out/responses.jsonl", &responses[..end(&responses, 13)]);
    std::fs::remove_file(scratch.path("out/summary.json")).unwrap();
    std::fs::remove_file(scratch.path("calls")).unwrap();
    evaluates(&scratch, PAIRS, &JUDGE);
    assert_eq!(scratch.read("out/results.jsonl"), whole);
    assert_eq!(json_lines(&scratch.read("out/responses.jsonl")), json_lines(&responses));
    assert_eq!(calls(&scratch), all[3..].iter().map(judge_calls).sum::<usize>());
    // Nothing is left to do.
    std::fs::remove_file(scratch.path("calls")).unwrap();
    evaluates(&scratch, PAIRS, &JUDGE);
    assert_eq!((calls(&scratch), made), (0, all.iter().map(judge_calls).sum()));

    // Other settings are refused by name, and those that decide no result are not.
    let refuse = |line: &str, code: i32, words: &[&str]| scratch.refuses_with(line, &JUDGE, code, words);
    refuse(
        &format!("{PAIRS} --seed 7"),
        2,
        &["seed = 7: expected 42, as in out: an evaluation continues with the same"],
    );
    let files = ["out: inputs have changed since it was evaluated: compare = policy: model.safetensors has changed"];
    refuse(&PAIRS.replace("other", "policy"), 1, &files);
    evaluates(&scratch, &format!("{PAIRS} --batch_size 3 --judge_retries 1 --num_prompts 5"), &JUDGE);
    assert_eq!(calls(&scratch), 0);
    scratch.edit_config("other", "note", 1);
    refuse(PAIRS, 1, &["out: inputs have changed since it was evaluated: compare = ", "config.json has changed"]);
    evaluates(&scratch, &format!("{PAIRS} --overwrite_output_dir"), &JUDGE);
    let prompts = scratch.read("prompts.jsonl").replace("is it at", "is").replace("human", "a human");
    scratch.write("prompts.jsonl", &prompts);
    refuse(
        PAIRS,
        1,
        &["out: output_dir: row 5 of the dataset has changed since the responses of responses.jsonl were"],
    );
}

#[test]
fn ctrl_c_ends_an_evaluation_with_a_line_on_how_to_continue_it() {
    let scratch = scratch();
    write_judge(&scratch, &format!("time.sleep(3) if pair['prompt'] == 'do' else {LONGER}"));
    let mut command = scratch.command(PAIRS);
    command.args(JUDGE).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let file = scratch.path("out/results.jsonl");
    while !std::fs::read_to_string(&file).is_ok_and(|text| text.lines().count() == 3) {
        assert!(Instant::now() < until, "no results");
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        (output.status.code(), stderr.trim()),
        (Some(130), "stopped; the same command continues the evaluation")
    );
    write_judge(&scratch, LONGER);
    continues(&scratch, PAIRS);
}

#[test]
fn the_calls_of_the_judge_are_bounded_and_more_of_them_continue() {
    let scratch = scratch();
    write_judge(&scratch, LONGER);
    let found = evaluates(&scratch, &format!("{PAIRS} --max_judgements 7"), &JUDGE);
    assert_eq!((&found["prompts"], &found["left_out"]), (&json!(3), &json!(5)));
    let made = calls(&scratch);
    assert!(made > 0 && made <= 6, "{made}");
    let found = evaluates(&scratch, &format!("{PAIRS} --max_judgements 100"), &JUDGE);
    assert_eq!((&found["prompts"], &found["left_out"], rows(&scratch).len()), (&json!(8), &json!(0), 8));
    scratch.refuses_with(
        &format!("{PAIRS} --max_judgements 1"),
        &JUDGE,
        2,
        &["max_judgements = 1: expected at least 2"],
    );
}

#[test]
fn the_calls_of_runs_that_gave_no_verdict_count_against_the_bound() {
    let scratch = scratch();
    // The third prompt has no verdict.
    let undecided = format!("print('null') if pair['prompt'] == {:?} else {LONGER}", PROMPTS[2]);
    write_judge(&scratch, &undecided);
    let ran = scratch.run_with(&format!("{PAIRS} --max_judgements 8"), &JUDGE);
    let found = summary(&scratch, &ran);
    assert_eq!((&found["prompts"], &found["left_out"], &found["no_verdict"]), (&json!(4), &json!(4), &json!(1)));
    let made = calls(&scratch);
    write_judge(&scratch, LONGER);
    let found = continues(&scratch, &format!("{PAIRS} --max_judgements 8"));
    assert_eq!((&found["no_verdict"], calls(&scratch)), (&json!(1), made), "nothing is left for it");
    // New prompts first: of two more calls, none is left for the one without a verdict.
    let found = continues(&scratch, &format!("{PAIRS} --max_judgements 10"));
    assert_eq!((&found["prompts"], &found["no_verdict"]), (&json!(5), &json!(1)));
    let found = continues(&scratch, &format!("{PAIRS} --max_judgements 100"));
    assert_eq!((&found["prompts"], &found["no_verdict"]), (&json!(8), &json!(0)));
    let attempts: Vec<_> = rows(&scratch).iter().map(|row| row["attempts"].as_u64().unwrap()).collect();
    assert_eq!((attempts.iter().sum::<u64>(), attempts.iter().max()), (9, Some(&2)));
}

/// A reply of `/chat/completions` with this text.
fn reply(text: &str) -> (u16, String, String) {
    let body = json!({"id": "1", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]});
    (200, "Content-Type: application/json\r\n".into(), body.to_string())
}

#[test]
fn a_model_behind_an_api_judges_by_a_template_and_its_key_is_nowhere_but_in_the_request() {
    let scratch = scratch();
    scratch.write("template.txt", "Q: {prompt}\n1: {response_a}\n2: {response_b}\nWhich one has {more} words?");
    let busy = std::sync::atomic::AtomicBool::new(true);
    let service = Service::new(move |asked| {
        if busy.swap(false, std::sync::atomic::Ordering::SeqCst) {
            return (429, "Retry-After: 0\r\n".into(), String::new());
        }
        let text = asked.body["messages"][0]["content"].as_str().unwrap();
        let (first, second) = text.split_once("\n1: ").unwrap().1.rsplit_once("\n2: ").unwrap();
        let second = second.split_once("\nWhich").unwrap().0;
        match first.chars().count().cmp(&second.chars().count()) {
            std::cmp::Ordering::Greater => reply(" [[A]]"),
            std::cmp::Ordering::Less => reply("B."),
            std::cmp::Ordering::Equal => reply("tie"),
        }
    });
    let url = service.url.replace("/score?key=hidden", "/v1");
    let line =
        format!("{PAIRS} --judge_url {url} --judge_model wise --judge_template template.txt --judge_concurrency 3");
    let ran = Ran::from(output(scratch.command(&line).env("RLHF_JUDGE_API_KEY", "sk-secret")));
    assert_eq!((ran.code, ran.stderr.lines().count()), (0, 1), "{}", ran.stderr);
    let retried =
        ran.stderr.starts_with("warning: the judge: ") && ran.stderr.ends_with("tried again (reported once)\n");
    assert!(retried && !ran.stderr.contains("secret"), "{}", ran.stderr);
    let found = summary(&scratch, &ran);
    assert_eq!((&found["inconsistent"], &found["no_verdict"]), (&json!(0), &json!(0)));
    for row in rows(&scratch) {
        let (a, b) = (row["length_a"].as_u64(), row["length_b"].as_u64());
        assert_eq!(
            row["winner"],
            if a > b {
                "a"
            } else if a < b {
                "b"
            } else {
                "tie"
            },
            "{row:?}"
        );
    }
    let asked = service.asked();
    assert!(asked.len() > 8, "{}", asked.len());
    for request in &asked {
        assert_eq!(request.authorization.as_deref(), Some("Bearer sk-secret"));
        let body = &request.body;
        assert_eq!(
            (&body["model"], &body["temperature"], &body["max_tokens"]),
            (&json!("wise"), &json!(0.0), &json!(16))
        );
        assert!(body["messages"][0]["content"].as_str().unwrap().ends_with("Which one has {more} words?"));
    }
    for (path, bytes) in crate::cli::snapshot(&scratch.path("out")) {
        let text = String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned();
        assert!(!text.contains("secret"), "{}", path.display());
    }
    assert_eq!(found["judge"], format!("wise at {url}/chat/completions"));
}

#[test]
fn an_api_that_refuses_or_replies_nonsense_is_one_error_without_its_key() {
    let scratch = scratch();
    let run = |service: &Service, more: &str| {
        let url = service.url.replace("/score?key=hidden", "/v1/chat/completions");
        let line = format!("{PAIRS} --overwrite_output_dir --judge_url {url} --judge_model wise {more}");
        let ran = Ran::from(output(scratch.command(&line).env("RLHF_JUDGE_API_KEY", "sk-secret")));
        assert!(ran.code == 1 && !ran.stderr.contains("secret"), "{}", ran.stderr);
        ran.stderr.lines().last().unwrap().to_string()
    };
    let refusing = Service::new(|_| (401, String::new(), "sk-secret is wrong".into()));
    let error = run(&refusing, "");
    assert!(error.contains("failed for") && error.contains("HTTP status 401"), "{error}");
    assert!(error.contains("the token of RLHF_JUDGE_API_KEY is not accepted"), "{error}");
    let poet = Service::new(|_| reply("Roses are red, sk-secret"));
    let error = run(&poet, "--judge_max_tokens none --judge_temperature none");
    assert!(
        error.contains("for any of 8 rows; the first: expected A, B or tie, found \"Roses are red, ...\""),
        "{error}"
    );
    assert!(poet.asked().iter().all(|asked| asked.body.get("max_tokens").is_none()));
    let page = Service::new(|_| (200, String::new(), "<html>hello".into()));
    let error = run(&page, "");
    assert!(error.contains("expected `choices` with a message of text, found \"<html>hello\""), "{error}");
}

#[test]
fn an_evaluation_that_cannot_be_done_is_refused_and_changes_nothing() {
    let scratch = scratch();
    scratch.refuses(EVAL, 2, &["no judge: set reward_model_path, reward"]);
    let json = format!("{EVAL} --reward json");
    scratch.refuses(
        &format!("{json} --compare_column summary"),
        1,
        &["prompts.jsonl: line 1: compare_column = summary: expected a string in this column"],
    );
    scratch.refuses(&format!("{EVAL} --reward exact:solution"), 1, &["prompts.jsonl: line 1: ", "solution"]);
    scratch.refuses(&json.replace("policy", "nowhere"), 1, &["nowhere: ", "no such folder"]);
    scratch.refuses(&json.replace("prompts.jsonl", "none.jsonl"), 1, &["none.jsonl"]);
    scratch.refuses(&format!("launch --nproc_per_node 2 {json}"), 2, &["launch: eval is done by one process"]);
    scratch.write("template.txt", "{prompt}");
    let chat = format!("{PAIRS} --judge_url http://127.0.0.1:9/v1 --judge_model m");
    scratch.refuses(
        &format!("{chat} --judge_template template.txt"),
        1,
        &["template.txt: judge_template", "{response_a}"],
    );
    scratch.refuses(&chat.replace("http://", "ftp://"), 2, &["judge_url = ftp://"]);
    std::fs::create_dir(scratch.path("out")).unwrap();
    scratch.write("out/mine.txt", "");
    for flag in ["", "--overwrite_output_dir"] {
        let words = ["out: output_dir: expected an empty or new folder, or one with an evaluation", "`mine.txt`"];
        scratch.refuses(&format!("{json} {flag}"), 1, &words);
    }
}

// The recipe of TL;DR.

/// The commands of a page in its blocks of code, continued lines joined.
fn commands(page: &str) -> Vec<String> {
    let text = page.replace("\\\n", " ");
    let lines = text.lines().filter_map(|line| line.strip_prefix("    rlhf "));
    lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn the_tldr_recipe_runs_from_sft_to_the_win_rate_at_toy_size() {
    let scratch = scratch();
    let post = |at: usize| format!("SUBREDDIT: r/{at}\n\nPOST: {}\n\nTL;DR:", PROMPTS[at % 8]);
    let lines =
        |count: usize, row: &dyn Fn(usize) -> Value| (0..count).map(|at| format!("{}\n", row(at))).collect::<String>();
    for (name, split) in
        [("tldr", "train"), ("tldr", "test"), ("tldr-preference", "train"), ("tldr-preference", "validation")]
    {
        std::fs::create_dir_all(scratch.path(name)).unwrap();
        let text = match name {
            "tldr" => {
                lines(16, &|at| json!({"prompt": post(at), "completion": format!(" the {} case", PROMPTS[at % 8])}))
            }
            _ => {
                lines(12, &|at| json!({"prompt": post(at), "chosen": format!(" yes {at}"), "rejected": " no, no, no"}))
            }
        };
        scratch.write(&format!("{name}/{split}.jsonl"), &text);
    }
    let page = include_str!("../../../docs/guides/tldr.md");
    let mut file = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap().to_string();
    let mut evals: Vec<String> = commands(page).into_iter().filter(|line| line.starts_with("eval ")).collect();
    // Models, data and sizes are the test's, all else is the page's.
    let toy = [
        ("EleutherAI/pythia-1b-deduped", "policy"),
        ("trl-lib/tldr-preference", "tldr-preference"),
        ("trl-lib/tldr", "tldr"),
        ("runs/tldr", "out"),
        ("max_length: 640", "max_length: 60"),
        ("per_device_train_batch_size: 16", "per_device_train_batch_size: 2"),
        ("gradient_accumulation_steps: 4", "gradient_accumulation_steps: 2"),
        ("total_episodes: 1000000", "total_episodes: 8"),
        ("response_length: 53", "response_length: 6"),
        ("num_train_epochs: 1", "max_steps: 2"),
        ("max_prompt_length: 512", "max_prompt_length: 56"),
        ("local_rollout_forward_batch_size: 16", "local_rollout_forward_batch_size: 4"),
        ("bf16: true", "bf16: false"),
    ];
    for (original, replacement) in toy {
        assert!(file.contains(original), "no `{original}` in {file}");
        file = file.replace(original, replacement);
    }
    scratch.write("tldr.yaml", &file);
    let ran = scratch.run("pipeline --config tldr.yaml");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(evals.len() >= 3, "{evals:?}");
    write_judge(&scratch, LONGER);
    let service = Service::new(|_| reply("A"));
    for line in &mut evals {
        for (original, replacement) in
            [("trl-lib/tldr", "tldr"), ("runs/tldr", "out"), ("--num_prompts 1000", "--num_prompts 6")]
        {
            assert!(line.contains(original), "no `{original}` in {line}");
            *line = line.replace(original, replacement);
        }
        *line = line.replace("http://localhost:8000/v1", &service.url.replace("/score?key=hidden", "/v1"));
        *line = line.replace("--max_new_tokens 53", "--max_new_tokens 6").replace("--dtype bfloat16", "");
        let printed = scratch.succeeds(line);
        let found: Value = serde_json::from_str(&printed).unwrap();
        assert_eq!(found["prompts"], 6, "{line}");
        assert!(found["win_rate"].as_f64().is_some_and(|rate| (0.0..=1.0).contains(&rate)), "{line}: {found}");
    }
    assert!(!service.asked().is_empty(), "no command of the page has a judge at an address");
}
