//! `rlhf dpo`: runs of TRL 1.16's DPOTrainer (`tests/golden/trl_dpo`) to the final weights, and the whole course of the command.

use crate::cli::Scratch;
use crate::support::{Tensors, golden, read_json};
use rlhf::run::Console;
use rlhf::schema::Settings as _;
use rlhf::settings::DpoConfig;
use rlhf::train::dpo::dpo;
use serde_json::Value;
use std::path::Path;

/// Tolerance of numbers and weights; of numbers above 1 relative to them.
const TOLERANCE: f64 = 3e-5;

/// A value as it is written in a file.
fn words(value: &Value) -> Vec<String> {
    match value {
        Value::Array(values) => values.iter().flat_map(words).collect(),
        Value::String(text) => vec![text.clone()],
        other => vec![other.to_string()],
    }
}

/// The settings of a run of TRL, which writes to `out`.
fn config_of(run: &Value, out: &Path) -> DpoConfig {
    let dir = golden();
    let data = run["data"].as_str().unwrap();
    let model = if data.contains("chat") { "trl_tools/init/policy" } else { "trl_new/init/llama_policy" };
    let path = |name: &str| vec![dir.join(name).display().to_string()];
    DpoConfig::read(&|name| match name {
        "model_name_or_path" => Some(path(model)),
        "dataset_name" => Some(path(&format!("trl_dpo/{data}.jsonl"))),
        "output_dir" => Some(vec![out.display().to_string()]),
        "ref_model_name_or_path" => run["ref"].as_str().map(path),
        "per_device_train_batch_size" => Some(vec![run["rows"].to_string()]),
        "logging_steps" | "max_grad_norm" | "num_threads" => Some(vec!["1".into()]),
        "no_report" => Some(vec!["true".into()]),
        _ => run["settings"].get(name).map(words),
    })
    .unwrap()
}

/// Runs what TRL has run, and compares metrics and final weights.
fn check(names: &[&str]) {
    let dir = golden().join("trl_dpo");
    let (runs, tensors) = (read_json(&dir.join("runs.json")), Tensors::read(&dir.join("final.safetensors")));
    let mut wrong = Vec::new();
    for name in names {
        let (run, scratch) = (&runs[*name], Scratch::new());
        let out = scratch.path("run");
        dpo(&config_of(run, &out), Console::Silent).unwrap_or_else(|e| panic!("{name}: {e}"));
        let lines = scratch.metrics("run");
        for (metric, expected) in run["metrics"].as_object().unwrap() {
            for (at, expected) in expected.as_array().unwrap().iter().enumerate() {
                let (found, expected) = (lines[at][metric].as_f64().unwrap(), expected.as_f64().unwrap());
                let gap = (found - expected).abs();
                if gap > TOLERANCE * expected.abs().max(1.0) {
                    wrong.push(format!("{name}: {metric} of step {}: {found} is not {expected}", at + 1));
                }
            }
        }
        let found = Tensors::read(&out.join("model.safetensors"));
        let prefix = format!("{name}.");
        let stored: Vec<&str> = tensors.names().filter(|stored| stored.starts_with(&prefix)).collect();
        assert!(!stored.is_empty(), "{name}");
        for whole in stored {
            let whole = whole.split('[').next().unwrap();
            let part = tensors.part(whole);
            let gap = (part.of(found.get(&whole[prefix.len()..])) - part.tensor).abs().max().double_value(&[]);
            if gap > TOLERANCE {
                wrong.push(format!("{whole}: {gap:e}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn losses_of_differences_have_trls_numbers_to_the_weights() {
    check(&["sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm"]);
}

#[test]
fn losses_of_single_sides_and_sorted_pairs_have_trls_numbers_to_the_weights() {
    check(&["nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "sft"]);
}

#[test]
fn combined_losses_weights_and_divergences_have_trls_numbers_to_the_weights() {
    check(&["mpo", "aot_sft", "weighting", "forward_kl", "js_divergence", "alpha_divergence"]);
}

#[test]
fn reference_models_have_trls_numbers_to_the_weights() {
    check(&["other_reference", "precomputed", "sync_ref"]);
}

#[test]
fn cut_texts_and_long_tails_have_trls_numbers_to_the_weights() {
    check(&["ld_alpha", "ld_alpha_ipo_sft", "keep_start", "keep_end_ipo", "keep_end_sft"]);
}

#[test]
fn prompts_in_both_sides_and_conversations_have_trls_numbers_to_the_weights() {
    check(&["implicit", "chat"]);
}
