//! `examples/gpt2-sentiment`: what its files hold, and what the program makes of them. (`examples/sentiment` has its tests in
//! Python; those of `examples/rewards` are with the rewards.)

use crate::cli::{Scratch, json_lines};
use rlhf::model::{ModelOptions, SequenceClassifier};
use rlhf::tokenizer::Tokenizer;
use serde_json::{Value, json};
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
        let kind_rows: Vec<usize> = (0..rows.len()).filter(|&i| rows[i]["kind"] == kind).collect();
        assert_eq!(part["rows"], kind_rows.len(), "{kind}");
        let right = kind_rows.iter().filter(|&&i| (logits[i][1] > logits[i][0]) == (labels[i] == "POSITIVE")).count();
        let near = |found: f64, name: &str, tolerance: f64| {
            let expected = part[name].as_f64().unwrap();
            assert!((found - expected).abs() < tolerance, "{kind}: {name} is {found}, recorded {expected}");
        };
        near(right as f64 / kind_rows.len() as f64, "accuracy", 1e-4); // recorded to four digits
        for label in ["NEGATIVE", "POSITIVE"] {
            let scores: Vec<f64> =
                kind_rows.iter().filter(|&&i| labels[i] == label).map(|&i| f64::from(logits[i][1])).collect();
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

/// The files of examples/configs: their folders, the command that each is for, and their paths.
fn recipes() -> Vec<(String, PathBuf)> {
    let folders = std::fs::read_dir(examples().join("configs")).unwrap().map(|entry| entry.unwrap().path());
    let files = folders.filter(|path| path.is_dir()).flat_map(|path| std::fs::read_dir(path).unwrap());
    let mut recipes: Vec<(String, PathBuf)> = files
        .map(|entry| {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_str().unwrap();
            (stem.split('-').next().unwrap().to_string(), path)
        })
        .collect();
    recipes.sort();
    recipes
}

#[test]
fn every_recipe_trains_a_small_model_on_rows_of_its_datasets_form() {
    let scratch = Scratch::new();
    let template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}\n{% endfor %}\
                    {% if add_generation_prompt %}a:{% endif %}";
    for model in ["policy", "reward"] {
        scratch.write(&format!("{model}/chat_template.jinja"), template);
    }
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let conversation = |answer: &str| json!([turn("user", "Hi"), turn("assistant", answer)]);
    let rows = [
        ("sft", json!({"messages": conversation("so")})),
        ("reward", json!({"chosen": conversation("so"), "rejected": conversation("no")})),
        ("prompts", json!({"prompt": [turn("user", "Hi")], "solution": "51"})),
    ];
    for (name, row) in rows {
        scratch.write(&format!("{name}.jsonl"), &format!("{row}\n").repeat(64));
    }
    let found = recipes();
    assert_eq!(found.len(), 9, "{found:?}");
    for (at, (command, path)) in found.iter().enumerate() {
        let text = std::fs::read_to_string(path).unwrap();
        // What depends on the model's size, and on its tokenizer.
        let flags = match command.as_str() {
            "sft" => {
                let eos = if text.contains("\neos_token:") { "--eos_token <|endoftext|>" } else { "" };
                format!("--model_name_or_path policy --dataset_name sft.jsonl --max_length 32 --max_steps 2 {eos}")
            }
            "reward" => "--model_name_or_path policy --dataset_name reward.jsonl --max_length 32 --max_steps 2".into(),
            "ppo" => {
                "--sft_model_path policy --reward_model_path reward --dataset_name prompts.jsonl --train_batch_size 4 \
                      --total_episodes 8 --max_prompt_length 24 --response_length 4"
                    .into()
            }
            _ => {
                let reward = if text.contains("\nreward_model") { "--reward_model_name_or_path reward" } else { "" };
                format!(
                    "--model_name_or_path policy --dataset_name prompts.jsonl --per_device_train_batch_size 8 --max_steps 2 \
                     --max_prompt_length 24 --max_completion_length 4 {reward}"
                )
            }
        };
        let line = format!("{command} --config {} --output_dir out{at} {flags} --save_steps none", path.display());
        scratch.succeeds(&line);
        let metrics = json_lines(&scratch.read(&format!("out{at}/metrics.jsonl")));
        assert_eq!(metrics.last().unwrap()["step"], 2, "{line}");
    }
}

#[test]
fn the_page_of_the_recipes_has_a_row_for_each_and_each_says_its_own_command() {
    let page = std::fs::read_to_string(examples().join("configs/README.md")).unwrap();
    for (command, path) in recipes() {
        let name = path.strip_prefix(examples().join("configs")).unwrap().display().to_string();
        assert!(page.contains(&format!("| [{name}]({name}) |")), "README.md: no row for {name}");
        let text = std::fs::read_to_string(&path).unwrap();
        let line = format!("rlhf {command} --config examples/configs/{name}\n");
        assert!(text.lines().next().is_some_and(|first| format!("{first}\n").contains(&line)), "{name}: no {line}");
    }
}
