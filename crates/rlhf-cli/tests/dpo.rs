//! `rlhf dpo`: runs of TRL 1.16's DPOTrainer (`tests/golden/trl_dpo`) to the final weights, and the whole course of the command.

use crate::cli::Scratch;
use crate::support::{Tensors, golden, note_difference, read_json};
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
fn dpo_config(run: &Value, out: &Path) -> DpoConfig {
    let dir = golden();
    let data = run["data"].as_str().unwrap();
    let model = if data.contains("chat") { "trl_tools/init/policy" } else { "trl_new/init/llama_policy" };
    let path = |name: &str| vec![dir.join(name).display().to_string()];
    DpoConfig::read(&|name| match name {
        "model_name_or_path" => Some(path(model)),
        "dataset_name" => Some(path(&format!("trl_dpo/{data}.jsonl"))),
        "output_dir" => Some(vec![out.display().to_string()]),
        "ref_model_name_or_path" => run["ref"].as_str().map(path),
        "per_device_train_batch_size" => {
            Some(vec![run.get("batch").filter(|batch| batch.is_u64()).unwrap_or(&run["rows"]).to_string()])
        }
        "eval_dataset_name" => run.get("eval_batch").map(|_| path(&format!("trl_dpo/{data}.jsonl"))),
        "per_device_eval_batch_size" => run.get("eval_batch").map(words),
        "eval_steps" => run.get("eval_batch").map(|_| vec!["1".into()]),
        "bf16" => run.get("bf16").map(words),
        "logging_steps" | "max_grad_norm" | "unsup_coef" | "num_threads" => Some(vec!["1".into()]),
        "no_report" => Some(vec!["true".into()]),
        _ => run["settings"].get(name).map(words),
    })
    .unwrap()
}

/// Runs what TRL has run, and compares metrics and final weights.
fn check(names: &[&str]) {
    check_within(names, [TOLERANCE; 2]);
}

/// [`check`] with other tolerances of metrics and of weights.
fn check_within(names: &[&str], [metric_tolerance, weight_tolerance]: [f64; 2]) {
    let dir = golden().join("trl_dpo");
    let (runs, tensors) = (read_json(&dir.join("runs.json")), Tensors::read(&dir.join("final.safetensors")));
    let mut wrong = Vec::new();
    for name in names {
        let (run, scratch) = (&runs[*name], Scratch::new());
        let out = scratch.path("run");
        dpo(&dpo_config(run, &out), Console::Silent).unwrap_or_else(|e| panic!("{name}: {e}"));
        let lines = scratch.metrics("run");
        for (metric, expected) in run["metrics"].as_object().unwrap() {
            for (at, expected) in expected.as_array().unwrap().iter().enumerate() {
                // A run with evaluations has a line before its first step.
                let line = lines.iter().find(|line| line["step"] == at + 1 && line.contains_key(metric));
                let line = line.unwrap_or_else(|| panic!("{name}: no {metric} of step {}", at + 1));
                let (found, expected) = (line[metric].as_f64().unwrap(), expected.as_f64().unwrap());
                let gap = (found - expected).abs() / expected.abs().max(1.0);
                note_difference(gap, metric_tolerance);
                if gap > metric_tolerance {
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
            let gap = (part.select(found.get(&whole[prefix.len()..])) - part.tensor).abs().max().double_value(&[]);
            note_difference(gap, weight_tolerance);
            if gap > weight_tolerance {
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

#[test]
fn micro_batches_have_trls_numbers_to_the_weights() {
    check(&["accumulated", "accumulated_ipo"]);
}

#[test]
fn evaluations_have_trls_numbers() {
    check(&["evaluated", "evaluated_mpo"]);
}

#[test]
fn mixed_precision_is_near_trls_numbers() {
    // Three steps of Adam move a weight by 3e-3 at most, in the direction of a gradient that is rounded.
    check_within(&["bf16"], [2e-2, 2e-3]);
}

const DPO: &str = "dpo --model_name_or_path policy --dataset_name pairs.jsonl --output_dir out \
                   --per_device_train_batch_size 4 --max_steps 2 --logging_steps 1";

#[test]
fn a_run_writes_a_model_with_metrics_and_a_report_and_is_repeated_from_its_own_settings() {
    let scratch = Scratch::new();
    let eval = "--eval_split_size 3 --eval_steps 1 --metric_for_best_model eval_rewards/margins --learning_rate 1e-3";
    scratch.succeeds(&format!("{DPO} {eval}"));
    let lines = scratch.metrics("out");
    assert_eq!(lines.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(lines[0]["eval_rewards/margins"] == 0.0 && lines[1]["rewards/accuracies"] == 0.0, "{lines:?}");
    assert!(lines[2]["eval_rewards/margins"].as_f64().unwrap() > 0.0, "{lines:?}");
    assert!(scratch.path("out/best").is_dir());
    let report = scratch.read("out/report.html");
    assert!(["Margin", "Log-probabilities", "rewards/margins"].iter().all(|title| report.contains(title)));
    scratch.succeeds("dpo --config out/config.yaml --output_dir again");
    assert_eq!(crate::cli::timeless(scratch.metrics("again")), crate::cli::timeless(lines));
    // An adapter is saved as one, and other commands open it.
    scratch.succeeds(&format!("{DPO} --use_peft --overwrite_output_dir"));
    assert!(scratch.path("out/adapter_model.safetensors").is_file());
    scratch.succeeds("generate --model_name_or_path out --dataset_name prompts.jsonl --max_new_tokens 4");
    scratch.succeeds(&format!("{DPO} --ref_model_name_or_path policy --offload all --overwrite_output_dir"));
}

#[test]
fn settings_that_cannot_be_are_refused_in_one_line_each() {
    let scratch = Scratch::new();
    for (flags, words) in [
        ("--loss_type exo_pair", "label_smoothing = 0: expected a number above 0 and below 1 for loss_type = exo_pair"),
        ("--loss_type robust --label_smoothing 0.5", "label_smoothing = 0.5: expected a number below 0.5"),
        (
            "--f_divergence_type forward_kl --loss_type bco_pair",
            "f_divergence_type = forward_kl with loss_type = bco_pair",
        ),
        ("--f_alpha_divergence_coef 0.3", "f_alpha_divergence_coef = 0.3 has no effect without"),
        (
            "--use_weighting --loss_type aot",
            "use_weighting = true with loss_type = aot: expected false, as the loss sorts",
        ),
        ("--use_weighting --loss_type sft", "use_weighting = true with loss_type = sft"),
        ("--sync_ref_model --use_peft", "sync_ref_model = true with use_peft"),
        ("--sync_ref_model --precompute_ref_log_probs", "sync_ref_model = true with precompute_ref_log_probs = true"),
        ("--precompute_ref_batch_size 4", "precompute_ref_batch_size = 4 has no effect without"),
        ("--precompute_ref_log_probs --offload models", "offload = models has no effect with use_peft or"),
        ("--loss_type sigmoid sft --loss_weights 1", "loss_weights: expected a number for each of 2 losses, found 1"),
        ("--ld_alpha 1.5", "ld_alpha = 1.5: expected a number from 0 to 1"),
        ("--beta 0", "beta = 0: expected a number above 0"),
        ("--discopop_tau 0.1", "discopop_tau = 0.1 has no effect without loss_type = discopop"),
        ("--unsup_coef 2", "unsup_coef = 2 has no effect without unsupervised_dataset_name"),
    ] {
        scratch.refuses(&format!("{DPO} {flags}"), 2, &[words]);
    }
    scratch.refuses(&format!("{DPO} --ref_model_name_or_path reward"), 1, &["reward"]);
    std::fs::create_dir(scratch.path("t5")).unwrap();
    for (from, file) in [("t5", "config.json"), ("t5", "model.safetensors"), ("gpt_neox", "tokenizer.json")] {
        let from = golden().join("models").join(from).join(file);
        std::fs::copy(from, scratch.path("t5").join(file)).unwrap();
    }
    let line = DPO.replace("policy", "t5");
    scratch.refuses(&line, 1, &["dpo: expected a model of one stack, found `t5`, an encoder-decoder"]);
}

#[test]
fn rows_that_are_cut_left_out_or_equal_and_settings_without_effect_are_counted_in_warnings() {
    let scratch = Scratch::new();
    let pairs = scratch.read("pairs.jsonl");
    let long = format!("{{\"prompt\": \"{}\", \"chosen\": \" a\", \"rejected\": \" b\"}}\n", "word ".repeat(40));
    let equal = "{\"prompt\": \"same\", \"chosen\": \" a\", \"rejected\": \" a\"}\n";
    let cut = format!("{{\"prompt\": \"cut\", \"chosen\": \"{}\", \"rejected\": \" b\"}}\n", " word".repeat(40));
    scratch.write("pairs.jsonl", &format!("{pairs}{long}{equal}{cut}"));
    let ran = scratch.run(&format!("{DPO} --max_length 24 --label_smoothing 0.1"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let rows = pairs.lines().count() + 3;
    for words in [
        format!("1 of {rows} pairs were left out: the prompt alone has max_length = 24 tokens or more"),
        format!("1 of {rows} pairs were cut at their end to max_length = 24 tokens"),
        format!("in 1 of {rows} pairs chosen and rejected are equal"),
        "label_smoothing = 0.1 has no effect with loss_type = sigmoid".into(),
    ] {
        assert!(ran.stderr.contains(&words), "{words}: {}", ran.stderr);
    }
}
