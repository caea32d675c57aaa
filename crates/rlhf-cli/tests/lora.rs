//! Low-rank adapters against PEFT's values (`tests/golden/lora`), and their files.

use crate::cli::{Scratch, json_lines};
use crate::support::{Tensors, assert_close, golden, output, read_json};
use rlhf::model::{CausalLm, Dtype, LoraConfig, ModelOptions, Param, Precision, SequenceClassifier};
use rlhf::settings::PpoConfig;
use rlhf::train::ppo::PpoTrainer;
use rlhf::weights::Checkpoint;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

pub(crate) const TOLERANCE: f64 = 2e-5;
const ADAPTERS: [&str; 22] = [
    "lfm2",
    "qwen3_5",
    "gpt2",
    "gpt_neox",
    "llama_untied",
    "llama_untied_rslora_all",
    "gpt2_dora",
    "llama_untied_dora_all",
    "gpt_neox_patterns",
    "llama_tied_saved",
    "gemma3",
    "smollm3",
    "olmo2",
    "phi3",
    "mixtral",
    "qwen3_moe_dora",
    "granite",
    "ministral3",
    "gpt_oss",
    "gemma4",
    "lfm2_moe",
    "gemma4_moe",
];
const ENCODER_DECODERS: [&str; 2] = ["t5", "t5_dora_all"];
const CLASSIFIERS: [&str; 2] = ["llama_untied_cls", "llama_untied_cls_saved"];
pub(crate) const IDS: [[i64; 6]; 1] = [[5, 6, 7, 8, 9, 10]];

pub(crate) fn adapter(name: &str) -> PathBuf {
    golden().join("lora").join(name)
}

pub(crate) fn base_model_dir(name: &str) -> PathBuf {
    golden().join(read_json(&adapter(name).join("info.json"))["base"].as_str().unwrap())
}

fn base_rows(name: &str) -> Vec<Vec<i64>> {
    Tensors::read(&base_model_dir(name).join("golden.safetensors")).rows("unpadded.input_ids")
}

pub(crate) fn lm(name: &str) -> CausalLm {
    let mut model = CausalLm::from_pretrained(&base_model_dir(name), ModelOptions::default()).unwrap();
    model.load_adapter(&adapter(name)).unwrap();
    model
}

pub(crate) fn model(name: &str) -> CausalLm {
    CausalLm::from_pretrained(&golden().join("models").join(name), ModelOptions::default()).unwrap()
}

fn classifier(name: &str) -> SequenceClassifier {
    let mut model = SequenceClassifier::from_pretrained(&base_model_dir(name), None, ModelOptions::default()).unwrap();
    model.load_adapter(&adapter(name)).unwrap();
    model
}

fn values_of(model: &SequenceClassifier, rows: &[Vec<i64>]) -> Tensor {
    let spans: Vec<_> = rows.iter().map(|row| 0..row.len()).collect();
    model.values_at(rows, &spans).unwrap()
}

pub(crate) fn assert_gradients<'a>(name: &str, params: impl Iterator<Item = &'a Param>) {
    let expected = Tensors::read(&adapter(name).join("grads.safetensors"));
    let info = &read_json(&adapter(name).join("info.json"))["grads"];
    let (rounding, most) = (info["rounding"].as_f64().unwrap(), info["max_abs"].as_f64().unwrap());
    let mut compared = 0;
    for param in params {
        let stored = format!("base_model.model.{}", param.name);
        let what = format!("{name}: gradient of {}", param.name);
        assert_close(&what, &param.tensor.grad(), expected.get(&stored), (5.0 * rounding).max(2e-5 * most));
        compared += 1;
    }
    assert_eq!(compared, expected.names().count(), "{name}: the parameters that PEFT trains, and no other");
}

/// The fresh adapter that most tests put on a model.
pub(crate) fn config() -> LoraConfig {
    LoraConfig { r: 4, alpha: 8.0, dropout: 0.0, ..LoraConfig::default() }
}

/// Makes the adapter do something: B is zeros at first.
pub(crate) fn stir(params: &[Param]) {
    for param in params.iter().filter(|param| param.name.ends_with("lora_B.weight")) {
        let numbers = Tensor::arange(param.tensor.numel() as i64, (Kind::Float, Device::Cpu)).sin() * 0.1;
        tch::no_grad(|| param.tensor.shallow_clone().copy_(&numbers.view_as(&param.tensor)));
    }
}

pub(crate) fn bits(params: &[Param]) -> Vec<(String, Tensor)> {
    params.iter().map(|param| (param.name.clone(), param.tensor.detach().copy())).collect()
}

#[test]
fn logits_with_an_adapter_equal_pefts() {
    for name in ADAPTERS {
        let golden = Tensors::read(&adapter(name).join("golden.safetensors"));
        let mut model = lm(name);
        let rows = base_rows(name);
        let check = |what: &str, model: &CausalLm| {
            for (i, logits) in model.logits(&rows).unwrap().iter().enumerate() {
                let part = golden.part("logits");
                let expected = part.tensor.get(i as i64);
                assert_close(&format!("{name}: {what}"), &part.select(logits), &expected, TOLERANCE);
            }
        };
        check("beside the weights", &model);
        model.merge_adapter();
        check("folded in", &model);
        let params = model.params();
        assert!(params.iter().all(|param| !param.name.contains("lora_")));
        for merged in golden.names().filter_map(|merged| merged.strip_prefix("merged.")) {
            let param = params.iter().find(|param| param.name == merged).unwrap();
            assert_close(merged, &param.tensor, golden.get(&format!("merged.{merged}")), 1e-6);
        }
    }
    for name in CLASSIFIERS {
        let golden = Tensors::read(&adapter(name).join("golden.safetensors"));
        let mut model = classifier(name);
        let expected = golden.get("reward_logits").view([-1]);
        assert_close(name, &values_of(&model, &base_rows(name)), &expected, TOLERANCE);
        model.merge_adapter();
        assert_close(name, &values_of(&model, &base_rows(name)), &expected, TOLERANCE);
    }
}

#[test]
fn gradients_reach_what_peft_trains_and_equal_its_own() {
    for name in ADAPTERS {
        let mut model = lm(name);
        model.set_trainable(true);
        let rows = base_rows(name);
        let spans: Vec<_> = rows.iter().map(|row| 1..row.len()).collect();
        (-model.token_logprobs(&rows, &spans, 1.0, false).unwrap().logprobs.sum(Kind::Float)).backward();
        assert_gradients(name, model.trainable_params());
        assert!(model.params().iter().all(|p| p.tensor.requires_grad() || !p.tensor.grad().defined()));
    }
    for name in CLASSIFIERS {
        let mut model = classifier(name);
        model.set_trainable(true);
        model.scores(&base_rows(name)).unwrap().sum(Kind::Float).backward();
        assert_gradients(name, model.trainable_params());
    }
}

#[test]
fn adapters_beside_a_remainder_of_the_base_equal_pefts_and_are_saved_as_plain_ones_of_twice_the_rank() {
    for name in ["gpt2_pissa", "llama_untied_olora"] {
        let golden = Tensors::read(&adapter(name).join("golden.safetensors"));
        let (part, rows) = (golden.part("logits"), base_rows(name));
        let check = |what: &str, model: &CausalLm| {
            let found = Tensor::stack(&model.logits(&rows).unwrap(), 0);
            // PiSSA's base lacks its largest singular values. LAPACK rounds an SVD otherwise on other processors, and vectors of singular
            // values that are close turn by that over their distance: 4.6e-5 on a Xeon with AMX.
            let tolerance = if name.ends_with("pissa") { 1e-4 } else { TOLERANCE };
            assert_close(&format!("{name}: {what}"), &part.select(&found), part.tensor, tolerance);
        };
        let mut model = lm(name);
        check("as read", &model);
        // The reference is the base of the folder, and no remainder of it.
        let base = CausalLm::from_pretrained(&base_model_dir(name), ModelOptions::default()).unwrap();
        assert_close(name, &model.base().unwrap().logits(&rows).unwrap()[0], &base.logits(&rows).unwrap()[0], 0.0);

        model.set_trainable(true);
        let spans: Vec<_> = rows.iter().map(|row| 1..row.len()).collect();
        (-model.token_logprobs(&rows, &spans, 1.0, false).unwrap().logprobs.sum(Kind::Float)).backward();
        let (grads, info) = (Tensors::read(&adapter(name).join("grads.safetensors")), adapter(name).join("info.json"));
        let info = &read_json(&info)["grads"];
        // As above: 2.4e-5 of the largest on a Xeon with AVX-512 alone.
        let share = if name.ends_with("pissa") { 5e-5 } else { 2e-5 };
        let tolerance = (5.0 * info["rounding"].as_f64().unwrap()).max(share * info["max_abs"].as_f64().unwrap());
        assert_eq!(model.trainable_params().count(), grads.names().count());
        for param in model.trainable_params() {
            let expected = grads.get(&format!("base_model.model.{}", param.name));
            // PEFT trains the first half of the rank.
            let dim = i64::from(param.name.ends_with("lora_B.weight"));
            let rank = expected.size()[dim as usize];
            assert_eq!(param.tensor.size()[dim as usize], 2 * rank, "{}", param.name);
            assert_close(&param.name, &param.tensor.grad().narrow(dim, 0, rank), expected, tolerance);
        }

        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
        let described = read_json(&out.path().join("adapter_config.json"));
        assert_eq!((&described["r"], &described["init_lora_weights"]), (&json!(8), &json!(true)));
        let mut saved = CausalLm::from_pretrained(&base_model_dir(name), ModelOptions::default()).unwrap();
        saved.load_adapter(out.path()).unwrap();
        check("saved", &saved);
        model.merge_adapter();
        check("merged", &model);
    }
}

#[test]
fn adapters_of_embeddings_heads_and_tokens_give_pefts_logits_and_are_saved_as_modules_in_full() {
    for (name, modules, changed) in [
        ("llama_untied_embeddings", json!(["lm_head", "model.embed_tokens"]), vec!["lm_head", "model.embed_tokens"]),
        ("llama_tied_embedding", json!(["model.embed_tokens"]), vec!["model.embed_tokens"]),
        ("llama_tied_tokens", json!(["model.embed_tokens"]), vec!["model.embed_tokens"]),
    ] {
        let golden = Tensors::read(&adapter(name).join("golden.safetensors"));
        let (part, rows) = (golden.part("logits"), base_rows(name));
        let check = |what: &str, model: &CausalLm| {
            let found = Tensor::stack(&model.logits(&rows).unwrap(), 0);
            assert_close(&format!("{name}: {what}"), &part.select(&found), part.tensor, TOLERANCE);
        };
        let mut model = lm(name);
        check("as read", &model);
        let base = CausalLm::from_pretrained(&base_model_dir(name), ModelOptions::default()).unwrap();
        assert_close(name, &model.base().unwrap().logits(&rows).unwrap()[0], &base.logits(&rows).unwrap()[0], 0.0);
        model.set_trainable(true);
        for module in changed {
            let weight = format!("{module}.weight");
            assert!(model.trainable_params().any(|param| param.name == weight), "{name}: {module}");
        }
        // Tokens of a tied embedding are those of the head too; a product for one of the two is not.
        assert_eq!(model.config().tie_word_embeddings, name == "llama_tied_tokens");
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
        let described = read_json(&out.path().join("adapter_config.json"));
        assert_eq!((&described["modules_to_save"], &described["trainable_token_indices"]), (&modules, &Value::Null));
        let mut saved = CausalLm::from_pretrained(&base_model_dir(name), ModelOptions::default()).unwrap();
        saved.load_adapter(out.path()).unwrap();
        check("saved", &saved);
        model.merge_adapter();
        check("merged", &model);
    }
}

#[test]
fn the_head_of_gpt_neox_is_saved_under_pefts_name_and_read_under_that_and_its_own() {
    let name = |module: &str, end: &str| format!("base_model.model.{module}.{end}");
    for module in ["lm_head", "embed_out"] {
        let mut trained = model("gpt_neox");
        trained.add_adapter(&LoraConfig { modules_to_save: vec![module.into()], ..config() }, 1).unwrap();
        trained.set_trainable(true);
        stir(trained.params());
        let head = trained.trainable_params().find(|param| param.name == "embed_out.weight").unwrap();
        let _ = tch::no_grad(|| head.tensor.shallow_clone().g_mul_scalar_(2.0));
        let expected = tch::no_grad(|| trained.logits(&IDS).unwrap().remove(0));
        let out = tempfile::tempdir().unwrap();
        trained.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
        let check = |dir: &Path| {
            let described = read_json(&dir.join("adapter_config.json"));
            assert_eq!(described["modules_to_save"], json!(["lm_head"]), "{module}");
            let file = Checkpoint::open_file(&dir.join("adapter_model.safetensors")).unwrap();
            let saved: Vec<&str> = file.names().filter(|name| !name.contains("lora_")).collect();
            assert_eq!(saved, [name("lm_head", "weight")], "{module}");
            let opened = CausalLm::from_pretrained(dir, ModelOptions::default()).unwrap();
            assert_close(module, &opened.logits(&IDS).unwrap()[0], &expected, 0.0);
        };
        check(out.path());
        // A folder of earlier versions has the name of the model's files.
        let (old, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut described = read_json(&out.path().join("adapter_config.json"));
        described["modules_to_save"] = json!(["embed_out"]);
        std::fs::write(old.path().join("adapter_config.json"), described.to_string()).unwrap();
        let file = Checkpoint::open_file(&out.path().join("adapter_model.safetensors")).unwrap();
        let read =
            |name: &str| (name.replace("lm_head", "embed_out"), file.read(name, Device::Cpu, Kind::Float).unwrap());
        let tensors: Vec<(String, Tensor)> = file.names().map(read).collect();
        Tensor::write_safetensors(&tensors, old.path().join("adapter_model.safetensors")).unwrap();
        let opened = CausalLm::from_pretrained(old.path(), ModelOptions::default()).unwrap();
        assert_close("the old name", &opened.logits(&IDS).unwrap()[0], &expected, 0.0);
        opened.save_pretrained(again.path(), &[0], None, usize::MAX).unwrap();
        check(again.path());
        // Classifiers have no such head.
        SequenceClassifier::from_pretrained(out.path(), Some(1), ModelOptions::default()).unwrap();
    }
    // So has a product of low rank for the head.
    let tied_model = model("gpt_neox");
    let base = tied_model.params().iter().find(|param| param.name == "embed_out.weight").unwrap().tensor.detach();
    let &[rows, width] = base.size().as_slice() else { panic!() };
    let plain = Checkpoint::open_file(&adapter("gpt_neox").join("adapter_model.safetensors")).unwrap();
    let mut described = read_json(&adapter("gpt_neox").join("adapter_config.json"));
    let (r, alpha) = (described["r"].as_i64().unwrap(), described["lora_alpha"].as_f64().unwrap());
    let waves = |sizes: [i64; 2]| Tensor::arange(sizes[0] * sizes[1], (Kind::Float, Device::Cpu)).sin().view(sizes);
    let (a, b) = (waves([r, width]), waves([rows, r]));
    for module in ["lm_head", "embed_out"] {
        let dir = tempfile::tempdir().unwrap();
        described["target_modules"] = json!(["query_key_value", module]);
        std::fs::write(dir.path().join("adapter_config.json"), described.to_string()).unwrap();
        let read = |name: &str| (name.to_string(), plain.read(name, Device::Cpu, Kind::Float).unwrap());
        let mut tensors: Vec<(String, Tensor)> = plain.names().map(read).collect();
        tensors.extend([(name(module, "lora_A.weight"), a.copy()), (name(module, "lora_B.weight"), b.copy())]);
        Tensor::write_safetensors(&tensors, dir.path().join("adapter_model.safetensors")).unwrap();
        let mut opened = model("gpt_neox");
        opened.load_adapter(dir.path()).unwrap();
        let head = opened.params().iter().find(|param| param.name == "embed_out.weight").unwrap();
        assert_close(module, &head.tensor, &(&base + b.matmul(&a) * (alpha / r as f64)), 1e-6);
    }
}

#[test]
fn changed_embeddings_that_do_not_fit_are_one_line() {
    let refused = |name: &str, changes: &[(&str, Value)], tensors: &dyn Fn(&str) -> bool| {
        let dir = tempfile::tempdir().unwrap();
        let stored = Checkpoint::open_file(&adapter(name).join("adapter_model.safetensors")).unwrap();
        let read = |name: &str| stored.read(name, Device::Cpu, Kind::Float).unwrap();
        let kept = stored.names().filter(|name| tensors(name));
        let kept: Vec<(String, Tensor)> = kept.map(|name| (name.to_string(), read(name))).collect();
        Tensor::write_safetensors(&kept, dir.path().join("adapter_model.safetensors")).unwrap();
        let mut described = read_json(&adapter(name).join("adapter_config.json"));
        described["base_model_name_or_path"] = json!(base_model_dir(name));
        changes.iter().for_each(|(key, value)| described[*key] = value.clone());
        std::fs::write(dir.path().join("adapter_config.json"), described.to_string()).unwrap();
        let opened = CausalLm::from_pretrained(dir.path(), ModelOptions::default());
        let error = opened.map_or_else(|error| error.to_string(), |_| "opened".into());
        assert!(!error.contains('\n'), "{error}");
        error
    };
    let (tokens, embedding) = ("llama_tied_tokens", "llama_tied_embedding");
    type Kept = Box<dyn Fn(&str) -> bool>;
    let cases: Vec<(_, _, Kept, _)> = vec![
        (tokens, vec![], Box::new(|_: &str| true), "opened"),
        (
            tokens,
            vec![],
            Box::new(|name: &str| !name.contains("tokens_delta")),
            "`trainable_token_indices`: expected ids",
        ),
        (
            tokens,
            vec![("trainable_token_indices", json!([5, 9]))],
            Box::new(|_: &str| true),
            "expected [2, 32], found [3, 32]",
        ),
        (
            tokens,
            vec![("trainable_token_indices", json!([5, 9, 400]))],
            Box::new(|_: &str| true),
            "`trainable_token_indices`: expected ids below 400, found 400",
        ),
        (
            tokens,
            vec![("trainable_token_indices", json!("all"))],
            Box::new(|_: &str| true),
            "`trainable_token_indices`: expected",
        ),
        (
            embedding,
            vec![],
            Box::new(|name: &str| !name.contains("embedding_B")),
            "missing `base_model.model.model.embed",
        ),
        (
            embedding,
            vec![("use_dora", json!(true))],
            Box::new(|_: &str| true),
            "`use_dora`: expected false beside an adapter of",
        ),
        (
            embedding,
            vec![("init_lora_weights", json!("pissa"))],
            Box::new(|_: &str| true),
            "`init_lora_weights`: expected false",
        ),
    ];
    for (name, changes, tensors, message) in cases {
        let error = refused(name, &changes, &*tensors);
        assert!(error.contains(message), "{error}");
    }
    // A whole embedding, as `save_embedding_layers` stores it, is that of the model; of another vocabulary it does not fit.
    let dir = tempfile::tempdir().unwrap();
    let source = adapter("llama_untied");
    let stored = Checkpoint::open_file(&source.join("adapter_model.safetensors")).unwrap();
    let read = |name: &str| (name.to_string(), stored.read(name, Device::Cpu, Kind::Float).unwrap());
    let name = "base_model.model.model.embed_tokens.weight";
    let write = |rows: i64| {
        let rows_tensor = Tensor::arange(rows * 32, (Kind::Float, Device::Cpu)).sin().view([rows, 32]);
        let tensors: Vec<_> = stored.names().map(read).chain([(name.to_string(), rows_tensor.copy())]).collect();
        Tensor::write_safetensors(&tensors, dir.path().join("adapter_model.safetensors")).unwrap();
        rows_tensor
    };
    std::fs::copy(source.join("adapter_config.json"), dir.path().join("adapter_config.json")).unwrap();
    let written = write(400);
    let mut opened = model("llama_untied");
    opened.load_adapter(dir.path()).unwrap();
    let found = opened.params().iter().find(|param| param.name == "model.embed_tokens.weight").unwrap();
    assert_eq!(found.tensor.detach(), written);
    let _ = write(402);
    let error = model("llama_untied").load_adapter(dir.path()).unwrap_err().to_string();
    assert!(error.contains(&format!("tensor `{name}`: expected [400, 32], found [402, 32]")), "{error}");
}

#[test]
fn an_adapter_of_peft_is_saved_as_it_was_read() {
    for name in ADAPTERS.into_iter().chain(ENCODER_DECODERS) {
        let out = tempfile::tempdir().unwrap();
        lm(name).save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
        assert_same_adapter(out.path(), &adapter(name));
    }
    for name in CLASSIFIERS {
        let out = tempfile::tempdir().unwrap();
        classifier(name).save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
        assert_same_adapter(out.path(), &adapter(name));
    }
}

/// The same bytes, but for the line end that closes the JSON.
fn assert_same_adapter(found: &Path, expected: &Path) {
    let read = |dir: &Path, file: &str| std::fs::read(dir.join(file)).unwrap();
    let what = expected.display();
    assert!(read(found, "adapter_model.safetensors") == read(expected, "adapter_model.safetensors"), "{what}");
    let text = |dir: &Path| String::from_utf8(read(dir, "adapter_config.json")).unwrap().trim_end().to_string();
    assert_eq!(text(found), text(expected), "{what}");
}

#[test]
fn a_saved_adapter_folder_opens_as_the_model_and_is_saved_again_byte_for_byte() {
    let (out, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut saved = model("gpt2");
    let all = LoraConfig { target_modules: Some(vec!["all-linear".into()]), use_rslora: true, ..config() };
    saved.add_adapter(&all, 1).unwrap();
    stir(saved.params());
    saved.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
    assert!(!out.path().join("base_model").exists(), "the base is in the folder that it was read from");
    let opened = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
    assert_close("logits", &opened.logits(&IDS).unwrap()[0], &saved.logits(&IDS).unwrap()[0], 0.0);
    assert_ne!(opened.logits(&IDS).unwrap()[0], opened.base().unwrap().logits(&IDS).unwrap()[0]);
    opened.save_pretrained(again.path(), &[0], None, usize::MAX).unwrap();
    assert_same_adapter(again.path(), out.path());

    let reward =
        SequenceClassifier::from_pretrained(out.path(), None, ModelOptions::default()).unwrap_err().to_string();
    assert!(reward.contains("`task_type`: expected SEQ_CLS, found \"CAUSAL_LM\""), "{reward}");
}

#[test]
fn a_reward_adapter_on_a_language_model_brings_its_head() {
    let out = tempfile::tempdir().unwrap();
    let dir = golden().join("models/gpt_neox");
    let options = ModelOptions { dtype: Dtype::BFloat16, ..ModelOptions::default() };
    let mut saved = SequenceClassifier::from_pretrained(&dir, Some(3), options).unwrap();
    saved.add_adapter(&config(), 1).unwrap();
    stir(saved.params());
    saved.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
    let opened = SequenceClassifier::from_pretrained(out.path(), None, options).unwrap();
    assert!(!opened.has_new_head());
    assert_close("scores", &opened.scores(&IDS).unwrap(), &saved.scores(&IDS).unwrap(), 0.0);
    // The base is bf16, what is trained is f32.
    for param in opened.params() {
        let trained = param.name.contains("lora_") || param.name == "score.weight";
        assert_eq!(param.tensor.kind(), if trained { Kind::Float } else { Kind::BFloat16 }, "{}", param.name);
    }
}

#[test]
fn a_base_that_no_folder_holds_is_saved_beside_the_adapter() {
    let out = tempfile::tempdir().unwrap();
    let mut saved = model("gpt2");
    for seed in [1, 2] {
        saved.merge_adapter();
        saved.add_adapter(&config(), seed).unwrap();
        stir(saved.params());
    }
    saved.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
    assert!(out.path().join("base_model/model.safetensors").is_file());
    let opened = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
    assert_close("logits", &opened.logits(&IDS).unwrap()[0], &saved.logits(&IDS).unwrap()[0], 0.0);
}

#[test]
fn a_fresh_adapter_changes_nothing_and_is_drawn_as_peft_draws_it() {
    for (name, targets) in [
        ("gpt2", 2),
        ("gpt_neox", 2),
        ("opt", 4),
        ("llama_untied", 4),
        ("mistral", 4),
        ("qwen2", 4),
        ("qwen3", 4),
        ("gemma2", 4),
        ("phi3", 2),
        ("lfm2", 0),
        ("qwen3_5", 0),
    ] {
        let mut model = model(name);
        let before = model.logits(&IDS).unwrap();
        let layers = model.config().num_hidden_layers;
        model.add_adapter(&config(), 1).unwrap();
        assert_close(name, &model.logits(&IDS).unwrap()[0], &before[0], 0.0);
        assert_eq!(model.trainable_params().count(), 0, "{name}: frozen until asked");
        model.set_trainable(true);
        // Of the last two, one layer has attention.
        let expected = if targets == 0 { 4 } else { 2 * targets / 2 * layers as usize };
        assert_eq!(model.trainable_params().count(), expected, "{name}");
        for param in model.trainable_params().filter(|param| param.name.ends_with("lora_A.weight")) {
            let bound = (param.tensor.size()[1] as f64).sqrt().recip();
            let std = param.tensor.std(true).double_value(&[]) / (bound / 3f64.sqrt());
            let most = param.tensor.abs().max().double_value(&[]) / bound;
            assert!((0.9..1.1).contains(&std) && (0.95..=1.0).contains(&most), "{name}: {std}, {most}");
        }
    }
    for (name, targets) in
        [("bert_cls2", 2), ("roberta_cls3", 2), ("distilbert_cls2", 2), ("deberta_cls1", 2), ("modernbert_cls2", 1)]
    {
        let dir = golden().join("models").join(name);
        let mut model = SequenceClassifier::from_pretrained(&dir, None, ModelOptions::default()).unwrap();
        let layers = model.config().num_hidden_layers;
        model.add_adapter(&config(), 1).unwrap();
        model.set_trainable(true);
        let (lora, head): (Vec<_>, Vec<_>) = model.trainable_params().partition(|param| param.name.contains("lora_"));
        assert_eq!(lora.len(), 2 * targets * layers as usize, "{name}");
        let is_head = |param: &&Param| ["classifier.", "pre_classifier."].iter().any(|at| param.name.starts_with(at));
        assert!(!head.is_empty() && head.iter().all(is_head), "{name}");
    }
}

#[test]
fn the_base_is_a_view_of_the_same_memory_and_does_not_see_the_adapter() {
    for (dtype, precision) in [
        (Dtype::Float32, Precision::Held),
        (Dtype::Float32, Precision::Bf16),
        (Dtype::BFloat16, Precision::Held),
        (Dtype::BFloat16, Precision::F32),
    ] {
        let options = ModelOptions { dtype, precision, ..ModelOptions::default() };
        let dir = golden().join("models/llama_tied");
        let plain = CausalLm::from_pretrained(&dir, options).unwrap();
        let mut model = CausalLm::from_pretrained(&dir, options).unwrap();
        model.add_adapter(&config(), 1).unwrap();
        stir(model.params());
        let base = model.base().unwrap();
        assert_close("logits", &base.logits(&IDS).unwrap()[0], &plain.logits(&IDS).unwrap()[0], 0.0);
        assert_ne!(model.logits(&IDS).unwrap()[0], plain.logits(&IDS).unwrap()[0]);
        for (ours, theirs) in base.params().iter().zip(model.params()) {
            assert_eq!((&ours.name, ours.tensor.data_ptr()), (&theirs.name, theirs.tensor.data_ptr()));
        }
    }
}

#[test]
fn training_an_adapter_leaves_the_base_as_it_was_to_the_bit() {
    let mut model = model("llama_untied");
    let before = bits(model.params());
    model.add_adapter(&config(), 1).unwrap();
    model.set_trainable(true);
    let optimizer = rlhf::settings::SftConfig::new("m", "d", "o").optimizer;
    let mut optimizer = rlhf::optim::Optimizer::new(model.trainable_params(), &optimizer);
    let spans = IDS.map(|ids| 1..ids.len());
    let loss = || -model.token_logprobs(&IDS, &spans, 1.0, false).unwrap().logprobs.sum(Kind::Float);
    let first = loss().double_value(&[]);
    let base = model.base().unwrap();
    let reference = base.logits(&IDS).unwrap();
    for _ in 0..5 {
        loss().backward();
        optimizer.step(1e-2).unwrap();
    }
    assert!(loss().double_value(&[]) < first - 0.1, "the adapter learns");
    assert_close("the reference", &base.logits(&IDS).unwrap()[0], &reference[0], 0.0);
    for ((name, before), after) in before.iter().zip(model.params()) {
        assert!(before == &after.tensor, "{name}");
    }
}

#[test]
fn a_target_that_matches_nothing_names_what_there_is() {
    let with = |targets: &[&str]| {
        let targets = targets.iter().map(ToString::to_string).collect();
        let config = LoraConfig { target_modules: Some(targets), ..config() };
        model("llama_untied").add_adapter(&config, 1).unwrap_err().to_string()
    };
    assert_eq!(
        with(&["q_proj", "c_attn"]),
        "lora_target_modules: expected linear layers of llama, found `c_attn`; there are down_proj, gate_proj, k_proj, \
         o_proj, q_proj, up_proj, v_proj, and all-linear"
    );
    assert!(with(&["proj"]).contains("found `proj`") && with(&["lm_head"]).contains("found `lm_head`"));
}

/// A copy of PEFT's adapter on `models/llama_untied` whose configuration has `key` changed, and the result of opening it.
fn refusal(key: &str, value: Value) -> String {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(
        adapter("llama_untied").join("adapter_model.safetensors"),
        dir.path().join("adapter_model.safetensors"),
    )
    .unwrap();
    let mut described = read_json(&adapter("llama_untied").join("adapter_config.json"));
    described["base_model_name_or_path"] = json!(base_model_dir("llama_untied"));
    described[key] = value;
    std::fs::write(dir.path().join("adapter_config.json"), described.to_string()).unwrap();
    match CausalLm::from_pretrained(dir.path(), ModelOptions::default()) {
        Ok(_) => "opened".into(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn adapters_of_other_kinds_are_refused_by_the_name_of_what_they_ask_for() {
    assert_eq!(refusal("revision", json!("main")), "opened");
    assert_eq!(refusal("target_modules", json!(".*(q|v)_proj")), "opened"); // the tensors' names determine the layers
    assert_eq!(refusal("exclude_modules", json!(".*up_proj")), "opened");
    assert_eq!(refusal("alpha_pattern", json!({"q_proj": 8})), "opened");
    assert_eq!(refusal("layers_pattern", json!("layers")), "opened");
    for (key, value) in [
        ("peft_type", json!("IA3")),
        ("bias", json!("all")),
        ("use_dora", json!("yes")),
        ("rank_pattern", json!({"q_proj": 0})),
        ("rank_pattern", json!([8])),
        ("alpha_pattern", json!({"q_proj": "8"})),
        ("modules_to_save", json!("lm_head")),
        ("layers_to_transform", json!([-1])),
        ("layers_pattern", json!("h")),
        ("exclude_modules", json!([0])),
        ("trainable_token_indices", json!([0])),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("init_lora_weights", json!("corda")),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
        ("a_setting_of_tomorrow", json!("on")),
        ("task_type", json!("SEQ_CLS")),
        ("r", json!(0)),
        ("lora_alpha", json!("x")),
        ("base_model_name_or_path", json!("no/such/model")),
        ("base_model_name_or_path", json!(null)),
    ] {
        let error = refusal(key, value);
        assert!(error.contains("adapter_config.json") && error.contains(&format!("`{key}`: expected ")), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
    for (key, value, message) in [
        ("use_dora", json!(true), "missing `base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector`"),
        ("rank_pattern", json!({"q_proj": 8}), "q_proj.lora_A.weight`: expected [8, 32], found [4, 32]"),
        (
            "rank_pattern",
            json!({"(q": 8}),
            "rank_pattern: expected regular expressions of names, without look-around, found `(q`",
        ),
        (
            "modules_to_save",
            json!(["norms"]),
            "json: modules_to_save: expected modules of llama, found `norms`; there are down_proj, ",
        ),
        ("modules_to_save", json!(["lm_head"]), "missing `base_model.model.lm_head.weight`"),
        (
            "layers_to_transform",
            json!([0]),
            "unexpected `base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight`",
        ),
        (
            "exclude_modules",
            json!(["v_proj"]),
            "unexpected `base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight`",
        ),
        ("r", json!(8), "lora_A.weight`: expected [8, 32], found [4, 32]"),
        (
            "target_modules",
            json!(["q_proj"]),
            "unexpected `base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight`",
        ),
        (
            "target_modules",
            json!(["q_proj", "v_proj", "k_proj"]),
            "missing `base_model.model.model.layers.0.self_attn.k_proj.",
        ),
    ] {
        let error = refusal(key, value);
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn layers_to_transform_counts_the_lists_that_peft_counts() {
    let stored = Checkpoint::open_file(&adapter("t5").join("adapter_model.safetensors")).unwrap();
    let read = |name: &str| (name.to_string(), stored.read(name, Device::Cpu, Kind::Float).unwrap());
    // In T5's names the last number is that of the part of a block: 0 is its own attention, 1 that to the encoder in the decoder.
    let is_own_attention = |name: &str| name.contains(".layer.0.");
    let first = |name: &str| name.contains(".block.0.");
    type Selects<'a> = &'a dyn Fn(&str) -> bool;
    let cases: [(Value, Value, Selects<'_>); 4] = [
        (json!([0]), json!(null), &is_own_attention),
        (json!(1), json!(null), &|name| name.contains(".layer.1.")),
        (json!([0]), json!("layer"), &is_own_attention),
        (json!([0]), json!(["layers", "block"]), &first),
    ];
    for (layers, pattern, selects) in cases {
        let (dir, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut described = read_json(&adapter("t5").join("adapter_config.json"));
        described["layers_to_transform"] = layers.clone();
        described["layers_pattern"] = pattern.clone();
        std::fs::write(dir.path().join("adapter_config.json"), described.to_string()).unwrap();
        let open = |keeps: Selects<'_>| {
            let kept: Vec<(String, Tensor)> = stored.names().filter(|name| keeps(name)).map(read).collect();
            assert!(!kept.is_empty() && kept.len() < stored.names().count(), "{layers}, {pattern}");
            Tensor::write_safetensors(&kept, dir.path().join("adapter_model.safetensors")).unwrap();
            let mut opened = CausalLm::from_pretrained(&base_model_dir("t5"), ModelOptions::default()).unwrap();
            opened.load_adapter(dir.path()).map(|()| (opened, kept.len()))
        };
        let (opened, count) = open(selects).unwrap();
        opened.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
        let saved = Checkpoint::open_file(&out.path().join("adapter_model.safetensors")).unwrap();
        assert_eq!(saved.names().count(), count, "{layers}, {pattern}");
        let error = open(&|name| !selects(name)).unwrap_err().to_string();
        assert!(error.contains("missing `base_model.model.") && !error.contains('\n'), "{error}");
    }
}

#[test]
fn a_second_adapter_is_refused_until_the_first_is_folded_in() {
    let mut model = lm("gpt2");
    for error in [model.add_adapter(&config(), 1).unwrap_err(), model.load_adapter(&adapter("gpt2")).unwrap_err()] {
        assert!(error.to_string().contains("the model has an adapter"), "{error}");
    }
}

#[test]
fn merging_into_bf16_keeps_the_f32_sum_until_it_is_rounded_once() {
    let options = ModelOptions { dtype: Dtype::BFloat16, ..ModelOptions::default() };
    let mut model = CausalLm::from_pretrained(&base_model_dir("gpt2"), options).unwrap();
    model.load_adapter(&adapter("gpt2")).unwrap();
    model.merge_adapter();
    let name = "transformer.h.0.attn.c_attn.weight";
    let base = Checkpoint::open(&base_model_dir("gpt2")).unwrap();
    let base = base.read(name, Device::Cpu, Kind::BFloat16).unwrap().to_kind(Kind::Float);
    let lora = Tensors::read(&adapter("gpt2").join("adapter_model.safetensors"));
    let matrix = |end: &str| lora.get(&format!("base_model.model.transformer.h.0.attn.c_attn.lora_{end}.weight"));
    let sum = base + (matrix("B").matmul(matrix("A")) * 1.5).tr();
    let found =
        |model: &CausalLm| model.params().iter().find(|param| param.name == name).unwrap().tensor.shallow_clone();
    assert_eq!(found(&model), sum);
    // A reader of the saved files finds f32, and gets the sum.
    let out = tempfile::tempdir().unwrap();
    model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
    let described = read_json(&out.path().join("config.json"));
    let dtype = described.get("dtype").or(described.get("torch_dtype"));
    assert_eq!(dtype, Some(&json!("float32")));
    assert_eq!(Checkpoint::open(out.path()).unwrap().read(name, Device::Cpu, Kind::Float).unwrap(), sum);
    model.hold_as_computed();
    assert_eq!(found(&model), sum.to_kind(Kind::BFloat16));
}

/// The tensors of a model folder in f32.
fn tensors(dir: &Path) -> Vec<(String, Tensor)> {
    let file = Checkpoint::open(dir).unwrap();
    file.names().map(|name| (name.to_string(), file.read(name, Device::Cpu, Kind::Float).unwrap())).collect()
}

#[test]
fn ppo_starts_at_the_exact_sum_of_an_adapter_and_a_bf16_base_and_so_does_its_reference() {
    let scratch = Scratch::new();
    let options = ModelOptions { dtype: Dtype::BFloat16, ..ModelOptions::default() };
    let base = CausalLm::from_pretrained(&scratch.path("policy"), options).unwrap();
    base.save_pretrained(&scratch.path("policy"), &[0], None, usize::MAX).unwrap();
    scratch.succeeds(&format!("{SFT} --output_dir sft"));
    let mut merged = CausalLm::from_pretrained(&scratch.path("sft"), ModelOptions::default()).unwrap();
    merged.merge_adapter();
    let adapted = "gpt_neox.layers.1.attention.query_key_value.weight";
    let sum: Vec<(String, Tensor)> = bits(merged.params());
    let rounded = |tensor: &Tensor| tensor.to_kind(Kind::BFloat16).to_kind(Kind::Float);
    assert!(sum.iter().any(|(name, tensor)| name == adapted && rounded(tensor) != *tensor), "bf16 cannot hold the sum");
    let compare = |dir: &str, expected: &dyn Fn(&str, &Tensor) -> Tensor| {
        let found = tensors(&scratch.path(dir));
        assert_eq!(found.len(), sum.len(), "{dir}");
        for (name, tensor) in &found {
            let (_, summed) = sum.iter().find(|(known, _)| known == name).unwrap();
            assert!(*tensor == expected(name, summed), "{dir}: {name}");
        }
    };
    for (bf16, use_peft) in [(false, false), (true, false), (false, true), (true, true)] {
        let path = |name: &str| scratch.path(name);
        let mut config = PpoConfig::new(path("sft"), path("reward"), path("prompts.jsonl"), path("never"));
        (config.response_length, config.total_episodes, config.learning_rate) = (6, Some(8), 0.0);
        (config.run.bf16, config.peft.use_peft) = (bf16, use_peft);
        let mut trainer = PpoTrainer::from_config(&config).unwrap();
        assert_eq!(trainer.check().unwrap().kl.distance(), Some(0.0), "bf16 {bf16}, peft {use_peft}");
        let out = format!("start-{bf16}-{use_peft}");
        trainer.save_model(&path(&out)).unwrap();
        match (bf16, use_peft) {
            (_, false) => compare(&out, &|_, sum| sum.shallow_clone()),
            (false, true) => compare(&format!("{out}/base_model"), &|_, sum| sum.shallow_clone()),
            // What is multiplied in bf16 is held so.
            (true, true) => compare(&format!("{out}/base_model"), &|_, sum| rounded(sum)),
        }
        let line = format!("{PPO} --learning_rate 0 --sft_model_path sft --output_dir out --overwrite_output_dir");
        let ran = scratch.run(&format!("{line} --bf16={bf16} --use_peft={use_peft}"));
        let says = "warning: sft: beside an adapter its weights are computed with in bfloat16, and base_model, which";
        assert_eq!((ran.code, ran.stderr.starts_with(says)), (0, bf16 && use_peft), "{}", ran.stderr);
        for row in scratch.metrics("out") {
            let kl = row["objective/kl"].as_f64().unwrap();
            assert!(kl.abs() <= if bf16 { 0.0 } else { 1e-5 }, "bf16 {bf16}, peft {use_peft}: {kl}");
        }
    }
    // `rlhf merge` writes the base's dtype, as documented.
    scratch.succeeds("merge --model sft --output_dir merged");
    compare("merged", &|_, sum| rounded(sum));
}

#[test]
fn the_base_of_an_adapter_never_changes_also_when_a_finished_run_is_resumed() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{SFT} --output_dir sft"));
    let reward =
        "reward --model_name_or_path sft --dataset_name pairs.jsonl --max_steps 2 --use_peft --new_reward_head";
    scratch.succeeds(&format!("{reward} --output_dir judge"));
    let line = format!("{PPO} --sft_model_path sft --reward_model_path judge --save_steps 1 --save_total_limit 1");
    scratch.succeeds(&format!("{line} --output_dir out"));
    let head = |file: &str, name: &str| {
        let file = Checkpoint::open_file(&scratch.path(file)).unwrap();
        file.read(name, Device::Cpu, Kind::Float).unwrap()
    };
    // The head of the value model's base is the one at its start, which is not the trained one.
    let began = head("judge/adapter_model.safetensors", "base_model.model.score.weight");
    let base = "out/value_model/base_model/model.safetensors";
    assert_eq!(head(base, "score.weight"), began);
    assert_ne!(head("out/value_model/adapter_model.safetensors", "base_model.model.score.weight"), began);
    let state = |file: &str| {
        let path = scratch.path(file);
        (std::fs::read(&path).unwrap(), std::fs::metadata(&path).unwrap().modified().unwrap())
    };
    let before = [state(base), state("out/base_model/model.safetensors")];
    let resumed = scratch.run(&format!("{line} --output_dir out --resume_from_checkpoint true"));
    assert_eq!(resumed.code, 0, "{}", resumed.stderr);
    assert!(before == [state(base), state("out/base_model/model.safetensors")], "a base was written again");
    // Nor where it continues in another folder, which gets its own base.
    let resumed = scratch.run(&format!("{line} --output_dir other --resume_from_checkpoint out/checkpoint-2"));
    assert_eq!(resumed.code, 0, "{}", resumed.stderr);
    assert!(state("other/value_model/base_model/model.safetensors").0 == before[0].0);
}

pub(crate) const SFT: &str = "sft --model_name_or_path policy --dataset_name demos.jsonl --max_steps 3 --logging_steps 1 --use_peft \
                   --learning_rate 0.01 --lora_r 4";
pub(crate) const PPO: &str = "ppo --reward_model_path reward --dataset_name prompts.jsonl --response_length 8 --total_episodes 8 \
                   --per_device_train_batch_size 4 --use_peft --learning_rate 0.01 --num_sample_generations 0";

/// The log-probabilities that `rlhf logprobs` gives for a few completions.
pub(crate) fn logprobs(scratch: &Scratch, model: &str) -> Vec<f64> {
    let rows = json_lines(&scratch.succeeds(&format!("logprobs --model {model} --dataset_name demos.jsonl")));
    rows.iter().flat_map(|row| row["logprobs"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap())).collect()
}

pub(crate) fn scores(scratch: &Scratch, model: &str) -> Vec<f64> {
    let rows = json_lines(&scratch.succeeds(&format!("score --model {model} --dataset_name demos.jsonl")));
    rows.iter().map(|row| row["score"].as_f64().unwrap()).collect()
}

pub(crate) fn gap(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn sft_with_lora_saves_an_adapter_that_the_other_commands_open_and_merge_folds() {
    let scratch = Scratch::new();
    let base = std::fs::read(scratch.path("policy/model.safetensors")).unwrap();
    scratch.succeeds(&format!("{SFT} --output_dir out --lora_target_modules query_key_value,dense"));
    for (file, there) in [
        ("adapter_config.json", true),
        ("adapter_model.safetensors", true),
        ("tokenizer.json", true),
        ("config.yaml", true),
        ("model.safetensors", false),
        ("config.json", false),
        ("base_model", false),
    ] {
        assert_eq!(scratch.path("out").join(file).exists(), there, "{file}");
    }
    assert!(std::fs::read(scratch.path("policy/model.safetensors")).unwrap() == base);
    // Two layers of (32 + 96) * 4 and (32 + 32) * 4 numbers, of the model's own and these.
    assert!(
        scratch.read("out/README.md").contains("| trained parameters | 1536 of "),
        "{}",
        scratch.read("out/README.md")
    );
    let metrics = scratch.metrics("out");
    assert!(metrics[2]["loss"].as_f64() < metrics[0]["loss"].as_f64());
    let adapted = logprobs(&scratch, "out");
    assert!(gap(&adapted, &logprobs(&scratch, "policy")) > 0.01);

    scratch.succeeds("merge --model_name_or_path out --output_dir merged");
    assert!(gap(&adapted, &logprobs(&scratch, "merged")) < TOLERANCE);
    assert!(scratch.path("merged/config.json").is_file() && !scratch.path("merged/adapter_config.json").exists());
    scratch.refuses("merge --model_name_or_path out --output_dir merged", 1, &["merged", "--overwrite_output_dir"]);
    scratch.succeeds("merge --model_name_or_path out --output_dir merged --overwrite_output_dir");
    scratch.refuses("merge --model_name_or_path policy --output_dir new", 1, &["policy", "expected an adapter"]);
    scratch.refuses("merge --model_name_or_path out --output_dir policy", 2, &["holds what the run reads", "policy"]);

    // An adapter without a tokenizer has its base's.
    std::fs::remove_file(scratch.path("out/tokenizer.json")).unwrap();
    assert!(gap(&adapted, &logprobs(&scratch, "out")) == 0.0);
}

#[test]
fn dropout_in_training_is_the_same_however_rows_are_batched() {
    let scratch = Scratch::new();
    let reward = "reward --model_name_or_path policy --new_reward_head --dataset_name pairs.jsonl --max_steps 3 \
                  --logging_steps 1 --use_peft --learning_rate 0.01";
    for (command, losses) in [(SFT, "loss"), (reward, "loss")] {
        let run = |name: &str, flags: &str| -> Vec<f64> {
            scratch.succeeds(&format!("{command} --output_dir {name} --overwrite_output_dir {flags}"));
            scratch.metrics(name).iter().map(|row| row[losses].as_f64().unwrap()).collect()
        };
        let whole = run("out", "--lora_dropout 0.3 --per_device_train_batch_size 4");
        let parts = run("out", "--lora_dropout 0.3 --per_device_train_batch_size 1 --gradient_accumulation_steps 4");
        let again = run("out", "--lora_dropout 0.3 --per_device_train_batch_size 4 --gradient_checkpointing");
        let without = run("out", "--lora_dropout 0 --per_device_train_batch_size 4");
        assert_eq!(whole, again, "a layer that is computed again leaves out the same");
        assert!(gap(&whole, &parts) < TOLERANCE, "{whole:?} {parts:?}");
        assert!(gap(&whole, &without) > 10.0 * TOLERANCE, "{whole:?} {without:?}");
    }
    assert!(scores(&scratch, "out").iter().all(|score| score.is_finite()));
}

#[test]
fn ppo_with_lora_starts_at_its_reference_and_saves_two_adapters() {
    let scratch = Scratch::new();
    let stored = |file: &str| std::fs::read(scratch.path(file)).unwrap();
    let before = [stored("policy/model.safetensors"), stored("reward/model.safetensors")];
    scratch.succeeds(&format!("{PPO} --sft_model_path policy --output_dir out"));
    let metrics = scratch.metrics("out");
    // The reference runs other batches than the sampling did: rounding.
    assert!(metrics[0]["objective/kl"].as_f64().unwrap().abs() < 1e-4, "{:?}", metrics[0]["objective/kl"]);
    assert!(metrics[1]["objective/kl"].as_f64().unwrap() > 1e-3, "{:?}", metrics[1]["objective/kl"]);
    assert!(before == [stored("policy/model.safetensors"), stored("reward/model.safetensors")]);
    let described = read_json(&scratch.path("out/adapter_config.json"));
    assert_eq!(described["lora_dropout"], 0.0, "what was done, and not what the flag says for SFT");
    assert_eq!(described["base_model_name_or_path"], scratch.path("policy").canonicalize().unwrap().to_str().unwrap());
    assert!(gap(&logprobs(&scratch, "out"), &logprobs(&scratch, "policy")) > 0.01);
    assert!(gap(&scores(&scratch, "out/value_model"), &scores(&scratch, "reward")) > 0.001);
    assert!(scratch.read("out/README.md").contains("trained parameters, value model"));
    scratch.succeeds("merge --model out/value_model --output_dir value");
    assert!(gap(&scores(&scratch, "out/value_model"), &scores(&scratch, "value")) < TOLERANCE);
    scratch.succeeds("generate --model out --dataset_name prompts.jsonl --max_new_tokens 4 --output_file a.jsonl");
}

#[test]
fn ppo_starts_from_an_adapter_by_folding_it_into_policy_and_reference() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{SFT} --output_dir sft"));
    for (flags, base) in [("", true), ("--use_peft=false", false)] {
        let line = format!("{PPO} --sft_model_path sft --output_dir out --overwrite_output_dir {flags}");
        scratch.succeeds(&line);
        let kl = scratch.metrics("out")[0]["objective/kl"].as_f64().unwrap();
        assert!(kl.abs() < 1e-4, "{flags}: {kl}");
        assert_eq!(scratch.path("out/base_model/model.safetensors").is_file(), base);
        assert_eq!(scratch.path("out/adapter_config.json").is_file(), base);
        assert!(!logprobs(&scratch, "out").is_empty());
    }
}

#[test]
fn a_reward_model_may_begin_at_a_language_models_adapter() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{SFT} --output_dir sft"));
    let reward = "reward --model_name_or_path sft --dataset_name pairs.jsonl --max_steps 2 --use_peft";
    let ran = scratch.run(&format!("{reward} --output_dir headless"));
    assert!(
        ran.code == 0 && ran.stderr.contains("sft: a model without a score head: it gets a new one"),
        "{}",
        ran.stderr
    );
    scratch.succeeds(&format!("{reward} --new_reward_head --output_dir judge"));
    assert!(scratch.path("judge/base_model/model.safetensors").is_file());
    assert_eq!(read_json(&scratch.path("judge/adapter_config.json"))["task_type"], "SEQ_CLS");
    scratch.succeeds(&format!("{PPO} --sft_model_path sft --reward_model_path judge --output_dir out"));
    let (value, before) = (scores(&scratch, "out/value_model"), scores(&scratch, "judge"));
    assert!(gap(&value, &before) > 1e-4, "the value model began at the reward model and went on");
}

#[test]
fn an_adapter_that_does_not_fit_leaves_the_model_as_it_was() {
    let mut model = model("llama_untied");
    let before = (model.logits(&IDS).unwrap(), model.params().len());
    let error = model.load_adapter(&adapter("gpt2")).unwrap_err().to_string();
    assert!(error.contains("lora/gpt2: ") && error.contains("unexpected") && !error.contains('\n'), "{error}");
    assert_eq!(model.params().len(), before.1);
    assert_close("logits", &model.logits(&IDS).unwrap()[0], &before.0[0], 0.0);
    model.add_adapter(&config(), 1).unwrap();
}

#[test]
fn an_adapter_on_a_model_of_the_hub_names_it_as_the_hub_does() {
    let scratch = Scratch::new();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let cached = format!("cache/models--me--base/snapshots/{commit}");
    std::fs::create_dir_all(scratch.path("cache/models--me--base/refs")).unwrap();
    std::fs::create_dir_all(scratch.path(&cached).parent().unwrap()).unwrap();
    scratch.write("cache/models--me--base/refs/main", commit);
    std::fs::rename(scratch.path("policy"), scratch.path(&cached)).unwrap();
    let run = |line: &str| {
        let mut command = scratch.command(line);
        let done = output(command.env("HF_HUB_CACHE", "cache").env("HF_HUB_OFFLINE", "1"));
        assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
    };
    run(&format!("{SFT} --model_name_or_path me/base --output_dir out"));
    let described = read_json(&scratch.path("out/adapter_config.json"));
    assert_eq!((&described["base_model_name_or_path"], &described["revision"]), (&json!("me/base"), &json!(commit)));
    run("logprobs --model out --dataset_name demos.jsonl");
    run("merge --model out --output_dir merged");
}

#[test]
fn settings_of_lora_that_cannot_be_are_refused_before_anything_is_written() {
    let scratch = Scratch::new();
    scratch.refuses(&format!("{SFT} --output_dir out --lora_target_modules c_attn"), 2, &["c_attn", "query_key_value"]);
    scratch.refuses(&format!("{SFT} --output_dir out --use_peft false"), 2, &["use_peft"]);
    scratch.refuses(&format!("{SFT} --output_dir out --lora_r 0"), 2, &["lora_r = 0"]);
}
