//! `examples/gpt2-sentiment`: what its files hold, and what the program makes of them. (`examples/sentiment` has its tests in
//! Python; those of `examples/rewards` are with the rewards.)

use crate::cli::{Scratch, json_lines};
use rlhf::model::{ModelOptions, SequenceClassifier};
use rlhf::tokenizer::Tokenizer;
use serde_json::Value;
use std::path::{Path, PathBuf};
use tch::Tensor;

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").canonicalize().unwrap()
}

fn read(name: &str) -> String {
    let path = examples().join("gpt2-sentiment").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn the_shipped_classifier_reproduces_what_its_script_measured_with_transformers() {
    let recorded: Value = serde_json::from_str(&read("results/classifier.json")).unwrap();
    let dir = examples().join("gpt2-sentiment/classifier");
    let model = SequenceClassifier::from_pretrained(&dir, None, ModelOptions::default()).unwrap();
    let tokenizer = Tokenizer::from_pretrained(&dir).unwrap();
    assert_eq!(model.labels(), ["NEGATIVE", "POSITIVE"]);
    let rows = json_lines(&read("data/sentences_test.jsonl"));
    let text = |key| move |row: &serde_json::Map<String, Value>| row[key].as_str().unwrap().to_string();
    let ids: Vec<Vec<i64>> = rows.iter().map(text("text")).map(|text| tokenizer.encode(&text).unwrap()).collect();
    let labels: Vec<String> = rows.iter().map(text("label")).collect();
    let logits = tch::no_grad(|| {
        let parts: Vec<Tensor> = ids.chunks(64).map(|rows| model.logits(rows).unwrap()).collect();
        Vec::<Vec<f32>>::try_from(Tensor::cat(&parts, 0)).unwrap()
    });

    for kind in ["sentence", "beginning", "plain"] {
        let part = &recorded["held_out"][kind];
        let of_kind: Vec<usize> = (0..rows.len()).filter(|&i| rows[i]["kind"] == kind).collect();
        assert_eq!(part["rows"], of_kind.len(), "{kind}");
        let right = of_kind.iter().filter(|&&i| (logits[i][1] > logits[i][0]) == (labels[i] == "POSITIVE")).count();
        let near = |found: f64, name: &str, tolerance: f64| {
            let expected = part[name].as_f64().unwrap();
            assert!((found - expected).abs() < tolerance, "{kind}: {name} is {found}, recorded {expected}");
        };
        near(right as f64 / of_kind.len() as f64, "accuracy", 1e-4); // recorded to four digits
        for label in ["NEGATIVE", "POSITIVE"] {
            let scores: Vec<f64> =
                of_kind.iter().filter(|&&i| labels[i] == label).map(|&i| f64::from(logits[i][1])).collect();
            let name = format!("mean_score_of_{label}");
            near(scores.iter().sum::<f64>() / scores.len() as f64, &name, 1e-3); // recorded to three
        }
    }
}

#[test]
fn prompts_are_2_to_8_tokens_of_the_demos_tokenizer() {
    let tokenizer = Tokenizer::from_pretrained(&examples().join("sentiment/tokenizer")).unwrap();
    let mut lengths = [0; 9];
    for name in ["data/prompts.jsonl", "data/prompts_test.jsonl"] {
        for row in json_lines(&read(name)) {
            let prompt = row["prompt"].as_str().unwrap();
            let length = tokenizer.encode(prompt).unwrap().len();
            assert!((2..=8).contains(&length), "{prompt}: {length} tokens");
            lengths[length] += 1;
        }
    }
    assert!(lengths[2..].iter().all(|&count| count > 50), "{lengths:?}");
}

#[test]
fn the_examples_settings_run_from_its_model_to_a_policy() {
    let scratch = Scratch::new();
    let path = |name: &str| examples().join(name).display().to_string();
    scratch.succeeds(&format!(
        "sft --config {} --config_name {} --tokenizer_name {} --dataset_name {} --output_dir sft --max_steps 1",
        path("sentiment/sft.yaml"),
        path("gpt2-sentiment/model.json"),
        path("sentiment/tokenizer"),
        path("sentiment/data/sft.jsonl"),
    ));
    let stdout = scratch.succeeds(&format!(
        "ppo --config {} --sft_model_path sft --reward_model_path {} --dataset_name {} --output_dir out \
         --train_batch_size 4 --total_episodes 8 --num_ppo_epochs 1",
        path("gpt2-sentiment/ppo.yaml"),
        path("gpt2-sentiment/classifier"),
        path("gpt2-sentiment/data/prompts.jsonl"),
    ));
    let metrics = scratch.metrics("out");
    assert_eq!(metrics.len(), 2, "{stdout}");
    assert!(metrics.iter().all(|line| line["objective/scores"].is_number()), "{metrics:?}");
    // The value model is the policy's body with a fresh head: the classifier does not read the policy's tokens.
    assert!(scratch.read("out/value_model/config.json").contains("GPT2ForSequenceClassification"));
}
