//! A reward model measured on preference pairs, by `rlhf reward --eval_only` and by `rlhf score`; the sample files of a
//! run scored again.

use crate::cli::{PPO, REWARD, Scratch, json_lines};
use rlhf::run::Console;
use rlhf::settings::RewardConfig;
use rlhf::train::reward_model::evaluate;
use serde_json::{Map, Value, json};

fn number(row: &Map<String, Value>, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name}: {row:?}"))
}

/// Pairs of which some have margins.
fn pairs(scratch: &Scratch) {
    let rows = ["The movie", "A film", "do", "2024", "is it"].into_iter().enumerate().map(|(i, prompt)| {
        let mut row = json!({"question": prompt, "chosen": format!(" yes{}", "!".repeat(i)), "rejected": " no, no"});
        if i % 2 == 0 {
            row["margin"] = json!(0.25 * i as f64);
        }
        format!("{row}\n")
    });
    scratch.write("held.jsonl", &rows.collect::<String>());
}

#[test]
fn a_model_that_is_only_measured_has_the_numbers_that_its_training_ended_with_and_nothing_is_written() {
    let scratch = Scratch::new();
    pairs(&scratch);
    let eval = "--eval_dataset_name held.jsonl --dataset_columns prompt=question";
    let data = scratch.read("pairs.jsonl").replace("\"prompt\"", "\"question\"");
    scratch.write("pairs.jsonl", &data);
    scratch.succeeds(&format!("{REWARD} {eval} --eval_steps 1"));
    let last = scratch.metrics("out").pop().unwrap();
    let line = "reward --model_name_or_path out --eval_only --per_device_eval_batch_size 2";
    let names = ["eval_loss", "eval_accuracy", "eval_margin", "eval_mean_reward"];
    let files = || std::fs::read_dir(scratch.path("")).unwrap().count();
    let before = files();
    let from_split = json_lines(&scratch.succeeds(&format!("{line} --dataset_name pairs.jsonl {eval}"))).remove(0);
    let alone = format!("{line} --dataset_name held.jsonl --dataset_columns prompt=question");
    let from_all = json_lines(&scratch.succeeds(&alone)).remove(0);
    assert_eq!(before, files());
    for found in [&from_split, &from_all] {
        assert_eq!(found["pairs"], 5);
        assert!(found["dataset"].as_str().unwrap().ends_with("held.jsonl"), "{found:?}");
        for name in names {
            assert!((number(found, name) - number(&last, name)).abs() < 1e-5, "{name}: {found:?} {last:?}");
        }
    }
    // The margins are in the loss, by its definition, and in nothing else.
    let scored = scratch.run("score --model out --dataset_name held.jsonl --dataset_columns prompt=question");
    let rows = json_lines(&scored.stdout);
    let loss = rows.iter().map(|row| {
        let margin = row.get("margin").and_then(Value::as_f64).unwrap_or(0.0);
        (1.0 + (margin - number(row, "score_margin")).exp()).ln()
    });
    assert!((loss.sum::<f64>() / 5.0 - number(&from_all, "eval_loss")).abs() < 1e-5, "{rows:?}");
    // So for a file and in the library; training needs its folder.
    scratch.write("eval.yaml", "model_name_or_path: out\ndataset_name: held.jsonl\neval_only: true\n");
    let by_file = scratch.succeeds("reward --config eval.yaml --dataset_columns prompt=question");
    assert_eq!(json_lines(&by_file)[0]["pairs"], 5);
    let mut config = RewardConfig::new(scratch.path("out"), scratch.path("held.jsonl"), "");
    (config.eval_only, config.data.dataset_columns) = (true, vec!["prompt=question".into()]);
    let found = evaluate(&config, Console::Silent).unwrap();
    assert!((found.metrics.get("eval_margin").unwrap() - number(&from_all, "eval_margin")).abs() < 1e-5);
    let error = rlhf::train::reward_model::reward(&config, Console::Silent).unwrap_err().to_string();
    assert!(error.starts_with("eval_only = true: expected false"), "{error}");
}

#[test]
fn score_reports_both_sides_of_pairs_and_how_often_the_better_one_is_ahead() {
    let scratch = Scratch::new();
    pairs(&scratch);
    let columns = "--dataset_name held.jsonl --dataset_columns prompt=question";
    let measured = scratch.succeeds(&format!("reward --model_name_or_path reward --eval_only {columns}"));
    let measured = json_lines(&measured).remove(0);
    let ran = scratch.run(&format!("score --model reward --batch_size 3 {columns}"));
    let rows = json_lines(&ran.stdout);
    assert_eq!((ran.code, rows.len()), (0, 5), "{}", ran.stderr);
    let margins: Vec<f64> = rows.iter().map(|row| number(row, "score_margin")).collect();
    for row in &rows {
        let difference = number(row, "score_chosen") - number(row, "score_rejected");
        assert!((difference - number(row, "score_margin")).abs() < 1e-6);
        assert!(row.contains_key("question") && !row.contains_key("score"), "{row:?}");
    }
    let mean = margins.iter().sum::<f64>() / 5.0;
    let accuracy = margins.iter().filter(|margin| **margin > 0.0).count() as f64 / 5.0;
    assert!((mean - number(&measured, "eval_margin")).abs() < 1e-5);
    assert_eq!(accuracy, number(&measured, "eval_accuracy"));
    assert_eq!(ran.stderr, format!("accuracy {accuracy:.4}, mean margin {mean:.4} over 5 pairs\n"));
    assert_eq!(rows[2]["margin"], 0.5, "that of the data stays");
    // As responses to a prompt, the model beside another reward: the same scores, and both parts of each side.
    let ran = scratch.run(&format!("score --model reward --reward length:target=3 {columns}"));
    for (row, alone) in json_lines(&ran.stdout).iter().zip(&rows) {
        for side in ["chosen", "rejected"] {
            let parts = row["components"][side].as_object().unwrap();
            assert!((number(parts, "model") - number(alone, &format!("score_{side}"))).abs() < 1e-5, "{row:?}");
            let sum: f64 = parts.values().map(|part| part.as_f64().unwrap()).sum();
            assert!((sum - number(row, &format!("score_{side}"))).abs() < 1e-5);
        }
    }
    assert!(ran.stderr.ends_with(" over 5 pairs\n"), "{}", ran.stderr);
    // Rows of both kinds may be mixed; only pairs are counted.
    scratch.write("mixed.jsonl", "{\"text\": \"a film\"}\n{\"chosen\": \"a film\", \"rejected\": \"no\"}\n");
    let ran = scratch.run("score --model reward --dataset_name mixed.jsonl");
    let rows = json_lines(&ran.stdout);
    assert!(rows[0].contains_key("score") && rows[1].contains_key("score_margin"), "{rows:?}");
    assert!(ran.stderr.ends_with(" over 1 pairs\n"));
}

#[test]
fn a_pair_with_a_response_that_has_no_score_has_no_margin_and_is_not_counted() {
    let scratch = Scratch::new();
    let pair = |chosen: &str, rejected: &str| json!({"prompt": "1 + 1?", "chosen": chosen, "rejected": rejected});
    let pairs = [pair("long", "no"), pair("none", "no"), pair("none", "none")];
    scratch.write("unscored.jsonl", &pairs.map(|pair| format!("{pair}\n")).concat());
    // A score of 3 for `no`, 5 for `long`, and none for `none`.
    scratch.write(
        "judge.py",
        "import json, sys\nfor line in sys.stdin:\n    text = json.loads(line)['response']\n    \
         print(json.dumps(None if 'none' in text else 5.0 if 'long' in text else 3.0), flush=True)\n",
    );
    let line = "score --tokenizer_name policy --dataset_name unscored.jsonl";
    let ran = scratch.run_with(line, &["--reward_command", "python3 judge.py"]);
    let rows = json_lines(&ran.stdout);
    let fields =
        |row: &Map<String, Value>| ["score_chosen", "score_rejected", "score_margin"].map(|name| row[name].clone());
    assert_eq!(fields(&rows[0]), [json!(5.0), json!(3.0), json!(2.0)], "{}", ran.stderr);
    assert_eq!(fields(&rows[1]), [json!(null), json!(3.0), json!(null)]);
    assert_eq!(fields(&rows[2]), [json!(null), json!(null), json!(null)]);
    let counted = "accuracy 1.0000, mean margin 2.0000 over 1 pairs\n2 pairs with a response that no reward scored are left out\n";
    assert!(ran.stderr.ends_with(counted), "{}", ran.stderr);
}

#[test]
fn the_sample_files_of_a_run_are_scored_as_they_are() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{PPO} --num_sample_generations 1"));
    let file = "out/samples/update-000002.jsonl";
    let samples = json_lines(&scratch.read(file));
    let found = json_lines(&scratch.succeeds(&format!("score --model reward --dataset_name {file}")));
    assert_eq!(found.len(), samples.len());
    for (found, sample) in found.iter().zip(&samples) {
        assert_eq!((&found["prompt"], &found["response"]), (&sample["prompt"], &sample["response"]));
        assert!(found["score"].is_number(), "{found:?}");
    }
    let line = format!("score --model reward --reward length:target=3 --dataset_name {file}");
    let by_parts = json_lines(&scratch.succeeds(&line));
    assert!(by_parts.iter().all(|row| row["components"]["length"].is_number()), "{by_parts:?}");
    // A response that stopped lost its eos in the file, and is scored with it.
    let row = |reason: &str| json!({"prompt": "A film", "response": " no", "finish_reason": reason});
    let ended = json!({"prompt": "A film", "chosen": " no", "rejected": " yes"});
    let open = json!({"prompt": "A film", "completion": " no"});
    scratch.write("rows.jsonl", &format!("{}\n{}\n{ended}\n{open}\n", row("stop"), row("length")));
    let rows = json_lines(&scratch.run("score --model reward --dataset_name rows.jsonl").stdout);
    let near = |a: &Value, b: &Value| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-5;
    assert!(near(&rows[0]["score"], &rows[2]["score_chosen"]) && near(&rows[1]["score"], &rows[3]["score"]));
    assert!(!near(&rows[0]["score"], &rows[1]["score"]), "{rows:?}");
}
