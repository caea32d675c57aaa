//! Rows, an adapter and passes against TRL's numbers (`tests/golden/trl_dpo`) and against each other.

use super::super::supervised::{Supervised, UpdateRows};
use super::pairs::PairRow;
use super::totals::Totals;
use super::{Gathered, PreferenceTask};
use crate::data::{Dataset, Preference};
use crate::settings::{DpoConfig, DpoLoss, TruncationMode};
use rlhf_base::dist::World;
use rlhf_lm::model::{CausalLm, ModelOptions};
use rlhf_lm::optim::Optimizer;
use rlhf_lm::tokenizer::Tokenizer;
use serde_json::Value;
use std::path::{Path, PathBuf};
use tch::Tensor;

fn golden() -> PathBuf {
    tch::set_num_threads(1);
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The preferences of a dataset of TRL's runs.
fn preferences(data: &str) -> (Vec<Preference>, Option<String>) {
    let model = if data.contains("chat") { "trl_tools/init/policy" } else { "trl_new/init/llama_policy" };
    let tokenizer = Tokenizer::from_pretrained(&golden().join(model)).unwrap();
    let dataset = Dataset::read(&golden().join(format!("trl_dpo/{data}.jsonl")), "train").unwrap();
    dataset.preferences(&tokenizer).unwrap()
}

#[test]
fn rows_of_every_form_and_at_every_edge_have_the_tokens_of_trl() {
    let all = json(&golden().join("trl_dpo/rows.json"));
    for (data, expected) in all.as_object().unwrap() {
        let (rows, note) = preferences(data);
        let found: Vec<[Vec<i64>; 3]> = rows.into_iter().map(|row| [row.prompt, row.chosen, row.rejected]).collect();
        let expected: Vec<[Vec<i64>; 3]> = serde_json::from_value(expected.clone()).unwrap();
        assert_eq!(found, expected, "{data}");
        let loses = ["edges_explicit", "edges_implicit", "edges_chat"].contains(&data.as_str());
        assert_eq!(note.is_some(), loses, "{data}: {note:?}");
    }
    let note = preferences("edges_explicit").1.unwrap();
    let words = "in 2 of 7 rows the end of the prompt is left out, first \"a\" in line 3: tokens merge across it";
    assert!(note.contains(words), "{note}");
}

#[test]
fn rows_that_are_no_pairs_are_refused_in_one_line() {
    let tokenizer = Tokenizer::from_pretrained(&golden().join("trl_tools/init/policy")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    for (row, words) in [
        (r#"{"prompt": "a", "chosen": "b"}"#, "`rejected`"),
        (r#"{"chosen": "", "rejected": "b"}"#, "found an empty one"),
        (
            r#"{"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": [{"role": "user", "content": "c"}]}"#,
            "--dataset_columns prompt=none",
        ),
        (
            r#"{"chosen": [{"role": "user", "content": "b"}], "rejected": [{"role": "user", "content": "c"}]}"#,
            "messages that begin as those of `rejected`",
        ),
        (r#"{"prompt": "a", "chosen": "b", "rejected": 3}"#, "field `rejected`: expected a string, found 3"),
    ] {
        std::fs::write(&path, format!("{row}\n")).unwrap();
        let error = Dataset::read(&path, "train").unwrap().preferences(&tokenizer).unwrap_err().to_string();
        assert!(error.contains("line 1: ") && error.contains(words) && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn texts_are_cut_at_their_end_or_start_and_a_prompt_that_fills_them_leaves_no_pair() {
    let row = Preference { prompt: vec![1, 2, 3], chosen: vec![4, 5], rejected: vec![6] };
    let cut = |most: usize, mode| {
        let row = PairRow::new(&row, most, mode)?;
        Some((row.sides.clone(), [0, 1].map(|side| (row.span(side), row.completion_len(side)))))
    };
    let start = TruncationMode::KeepStart;
    assert_eq!(cut(9, start), Some(([vec![1, 2, 3, 4, 5], vec![1, 2, 3, 6]], [(3..5, 2), (3..4, 1)])));
    assert_eq!(cut(4, start), Some(([vec![1, 2, 3, 4], vec![1, 2, 3, 6]], [(3..4, 1), (3..4, 1)])));
    assert_eq!(cut(3, start), None);
    let end = TruncationMode::KeepEnd;
    assert_eq!(cut(4, end), Some(([vec![2, 3, 4, 5], vec![1, 2, 3, 6]], [(2..4, 2), (3..4, 1)])));
    // The first token of a text has no log-probability, but is counted.
    assert_eq!(cut(2, end), Some(([vec![4, 5], vec![3, 6]], [(1..2, 2), (1..2, 1)])));
    assert_eq!(cut(1, end), Some(([vec![5], vec![6]], [(1..1, 1), (1..1, 1)])));
    let shared = PairRow::new(&row, 9, start).unwrap();
    assert_eq!((shared.tokens(), shared.computed(true), shared.computed(false)), (9, 6, 9));
}

/// A run over these pairs.
fn task<'a>(config: &'a DpoConfig, rows: &[Preference], reference: CausalLm) -> PreferenceTask<'a> {
    let rows: Vec<PairRow> =
        rows.iter().filter_map(|row| PairRow::new(row, usize::MAX, TruncationMode::KeepStart)).collect();
    let train = Gathered { lens: vec![rows.len()], rows, warnings: Vec::new() };
    PreferenceTask { config, reference: Some(reference), train, eval: Vec::new(), texts: None }
}

/// One update's gradients, of all pairs.
fn backward(task: &mut PreferenceTask<'_>, model: &CausalLm, max_tokens: usize) -> Totals {
    let rows: Vec<usize> = (0..task.train.rows.len()).collect();
    let world = World::single();
    let batch = UpdateRows { rows: &rows, update: 0, loss_scale: 1.0, max_tokens, world: &world };
    let mut sums = Totals::default();
    task.backward(model, &batch, &mut sums).unwrap();
    super::super::supervised::Sums::sum_over(&mut sums, &world).unwrap();
    sums
}

#[test]
fn an_adapter_that_has_an_effect_is_trained_against_the_model_without_it_as_in_trl() {
    let dir = golden().join("trl_dpo");
    let run = &json(&dir.join("runs.json"))["lora"];
    let mut config = DpoConfig::new("m", "d", "o");
    (config.per_device_train_batch_size, config.loss.beta) = (Some(8), run["settings"]["beta"].as_f64().unwrap());
    config.optimizer.adam_epsilon = 1e-6;
    let mut model =
        CausalLm::from_pretrained(&golden().join("trl_new/init/llama_policy"), ModelOptions::default()).unwrap();
    model.load_adapter(&dir.join("adapter")).unwrap();
    model.set_trainable(true);
    let mut task = task(&config, &preferences("explicit").0, model.base().unwrap());
    let mut optimizer = Optimizer::of_model(&model, &config.optimizer, None).unwrap();
    for step in 0..3 {
        let sums = backward(&mut task, &model, 4096);
        let mut metrics = rlhf_base::metrics::Metrics::default();
        sums.push_as(&mut metrics, "");
        for (name, found) in metrics.iter() {
            let expected = run["metrics"][name][step].as_f64().unwrap();
            assert!((found - expected).abs() < 3e-5 * expected.abs().max(1.0), "{step}: {name}: {found} {expected}");
        }
        optimizer.step(run["metrics"]["learning_rate"][step].as_f64().unwrap()).unwrap();
    }
    let stored = Tensor::read_safetensors(dir.join("final.safetensors")).unwrap();
    let mut compared = 0;
    for (name, expected) in stored.iter().filter_map(|(name, tensor)| Some((name.strip_prefix("lora.")?, tensor))) {
        let (whole, thinned) = name.split_once('[').map_or((name, false), |(whole, _)| (whole, true));
        let param_name = whole.trim_start_matches("base_model.model.").replace(".default", "");
        let found = model.params().iter().find(|param| param.name.replace("base_model.model.", "") == param_name);
        let found = found.unwrap_or_else(|| {
            panic!("{param_name}: {:?}", model.params().iter().map(|param| &param.name).collect::<Vec<_>>())
        });
        let found = found.tensor.detach();
        let found = if thinned { found.slice(0, None, None, 7) } else { found };
        let gap = (found - expected).abs().max().double_value(&[]);
        assert!(gap < 3e-5, "{name}: {gap:e}");
        compared += 1;
    }
    assert_eq!(compared, 8);
}

#[test]
fn small_passes_have_the_gradients_of_large_ones_for_losses_of_any_kind() {
    let dir = golden().join("trl_new/init");
    let rows = preferences("explicit").0;
    let load = |name: &str| CausalLm::from_pretrained(&dir.join(name), ModelOptions::default()).unwrap();
    for losses in [&[DpoLoss::Sigmoid][..], &[DpoLoss::Aot, DpoLoss::Sft], &[DpoLoss::AotUnpaired], &[DpoLoss::Sft]] {
        let mut config = DpoConfig::new("m", "d", "o");
        (config.loss.loss_type, config.loss.beta) = (losses.to_vec(), 0.5);
        (config.train_batch_size, config.per_device_train_batch_size) = (Some(8), Some(4));
        let mut found = Vec::new();
        for max_tokens in [4096, 24] {
            let mut model = load("llama_policy");
            model.set_trainable(true);
            let mut task = task(&config, &rows, load("llama_ref"));
            let sums = backward(&mut task, &model, max_tokens);
            let gradients: Vec<Tensor> = model.trainable_params().map(|param| param.tensor.grad().view([-1])).collect();
            let mut metrics = rlhf_base::metrics::Metrics::default();
            sums.push_as(&mut metrics, "");
            found.push((Tensor::cat(&gradients, 0), metrics));
        }
        let [(large, large_metrics), (small, small_metrics)] = &found[..] else { panic!() };
        let gap = (large - small).abs().max().double_value(&[]);
        let size = large.abs().max().double_value(&[]);
        assert!(gap < 1e-5 * size.max(1.0), "{losses:?}: {gap:e} of {size}");
        for ((name, large), (_, small)) in large_metrics.iter().zip(small_metrics.iter()) {
            assert!((large - small).abs() < 2e-5 * large.abs().max(1.0), "{losses:?}: {name}: {large} {small}");
        }
    }
}
