//! DoRA, modules that are trained in full beside an adapter, and folders with several adapters. PEFT's values are compared in
//! `lora.rs`.

use crate::cli::Scratch;
use crate::lora::{
    IDS, PPO, SFT, TOLERANCE, adapter, base_model_dir, bits, config, gap, lm, logprobs, model, scores, stir,
};
use crate::support::{assert_close, golden, read_json};
use rlhf::model::{CausalLm, Dtype, LoraConfig, ModelOptions, Param, Precision, SequenceClassifier};
use rlhf::weights::Checkpoint;
use serde_json::{Value, json};
use std::path::Path;
use tch::{Device, Kind, Tensor};

fn dora() -> LoraConfig {
    LoraConfig { use_dora: true, target_modules: Some(vec!["all-linear".into()]), ..config() }
}

fn saving(modules: &[&str]) -> LoraConfig {
    LoraConfig { modules_to_save: modules.iter().map(ToString::to_string).collect(), ..dora() }
}

fn bf16() -> ModelOptions {
    ModelOptions { dtype: Dtype::BFloat16, ..ModelOptions::default() }
}

/// Five optimizer steps; returns the loss before and after them.
fn train(model: &mut CausalLm) -> [f64; 2] {
    model.set_trainable(true);
    let optimizer = rlhf::settings::SftConfig::new("m", "d", "o").optimizer;
    let mut optimizer = rlhf::optim::Optimizer::new(model.trainable_params(), &optimizer);
    let spans = IDS.map(|ids| 1..ids.len());
    let loss = || -model.token_logprobs(&IDS, &spans, 1.0, false).unwrap().logprobs.sum(Kind::Float);
    let first = loss().double_value(&[]);
    for _ in 0..5 {
        loss().backward();
        optimizer.step(1e-2).unwrap();
    }
    [first, loss().double_value(&[])]
}

fn logits(model: &CausalLm) -> Tensor {
    tch::no_grad(|| model.logits(&IDS).unwrap().remove(0))
}

fn most(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

fn names<'a>(params: impl Iterator<Item = &'a Param>) -> Vec<String> {
    params.filter(|param| !param.name.contains("lora_")).map(|param| param.name.clone()).collect()
}

#[test]
fn fresh_dora_changes_nothing_to_the_bit_in_any_dtype_and_learns_magnitudes() {
    for name in ["gpt2", "llama_untied", "opt", "gemma2"] {
        let dir = golden().join("models").join(name);
        for (dtype, precision) in
            [(Dtype::Float32, Precision::Held), (Dtype::Float32, Precision::Bf16), (Dtype::BFloat16, Precision::Held)]
        {
            let options = ModelOptions { dtype, precision, ..ModelOptions::default() };
            let mut model = CausalLm::from_pretrained(&dir, options).unwrap();
            let before = logits(&model);
            model.add_adapter(&dora(), 1).unwrap();
            assert_close(name, &logits(&model), &before, 0.0);
        }
        let mut model = model(name);
        model.add_adapter(&dora(), 1).unwrap();
        let is_magnitude = |param: &&Param| param.name.ends_with("lora_magnitude_vector");
        let before: Vec<Tensor> = model.params().iter().filter(is_magnitude).map(|p| p.tensor.copy()).collect();
        let [first, last] = train(&mut model);
        assert!(last < first - 0.1, "{name}: {first}, {last}");
        let after = model.params().iter().filter(is_magnitude);
        assert!(after.zip(&before).all(|(after, before)| after.tensor.detach() != *before), "{name}");
    }
}

#[test]
fn a_trained_dora_adapter_opens_merges_and_is_close_in_bf16() {
    let mut model = model("opt");
    model.add_adapter(&dora(), 1).unwrap();
    train(&mut model);
    let (out, expected) = (tempfile::tempdir().unwrap(), logits(&model));
    model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
    let mut opened = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
    assert_close("opened", &logits(&opened), &expected, 0.0);
    opened.merge_adapter();
    assert_close("merged", &logits(&opened), &expected, TOLERANCE);
    let (expected, base_logits) =
        (logits(&lm("llama_untied_dora_all")), logits(&lm("llama_untied_dora_all").base().unwrap()));
    let mut half = CausalLm::from_pretrained(&base_model_dir("llama_untied_dora_all"), bf16()).unwrap();
    half.load_adapter(&adapter("llama_untied_dora_all")).unwrap();
    let change = most(&base_logits, &expected);
    assert!(most(&logits(&half), &expected) < change / 10.0, "{change}");
    half.merge_adapter();
    assert!(most(&logits(&half), &expected) < change / 10.0, "{change}");
}

#[test]
fn saved_modules_are_trained_in_f32_beside_a_bf16_base_that_stays_as_it_was() {
    for (name, modules, expected) in [
        ("llama_tied", vec!["embed_tokens"], vec!["model.embed_tokens.weight"]),
        ("llama_tied", vec!["lm_head"], vec!["lm_head.weight"]),
        ("llama_tied", vec!["embed_tokens", "lm_head"], vec!["model.embed_tokens.weight", "lm_head.weight"]),
        ("llama_untied", vec!["model.norm", "lm_head"], vec!["model.norm.weight", "lm_head.weight"]),
        (
            "gpt2",
            vec!["wte", "ln_f"],
            vec!["transformer.wte.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"],
        ),
    ] {
        let dir = golden().join("models").join(name);
        let what = format!("{name}, {modules:?}");
        let mut model = CausalLm::from_pretrained(&dir, bf16()).unwrap();
        let (start, before) = (bits(model.params()), logits(&model));
        model.add_adapter(&saving(&modules), 1).unwrap();
        let base = model.base().unwrap();
        assert_close(&what, &logits(&model), &before, 0.0);
        let [first, last] = train(&mut model);
        assert!(last < first - 0.1, "{what}: {first}, {last}");
        let mut found = names(model.trainable_params());
        found.sort_by_key(|name| expected.iter().position(|known| known == name));
        assert_eq!(found, expected, "{what}");
        assert!(model.trainable_params().all(|param| param.tensor.kind() == Kind::Float), "{what}");
        assert_close(&what, &logits(&base), &before, 0.0);
        for (param, before) in &start {
            let now = &base.params().iter().find(|now| now.name == *param).unwrap().tensor;
            assert!(now == before && now.kind() == Kind::BFloat16, "{what}: {param}");
        }

        // The folder of the adapter, the base that is saved with it, and a merged model.
        let expected = logits(&model);
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
        let described = read_json(&out.path().join("adapter_config.json"));
        assert_eq!((&described["modules_to_save"], &described["use_dora"]), (&json!(modules), &json!(true)));
        let opened = CausalLm::from_pretrained(out.path(), bf16()).unwrap();
        assert_close(&what, &logits(&opened), &expected, 0.0);
        model.merge_adapter();
        let merged = tempfile::tempdir().unwrap();
        model.save_pretrained(merged.path(), &[0], None, usize::MAX).unwrap();
        let options = ModelOptions { dtype: Dtype::Auto, precision: Precision::Bf16, ..ModelOptions::default() };
        let merged = CausalLm::from_pretrained(merged.path(), options).unwrap();
        assert_close(&what, &logits(&merged), &logits(&model), 0.0);
        assert!(most(&logits(&merged), &expected) < most(&before, &expected) / 4.0, "{what}");
    }
}

#[test]
fn a_base_that_no_folder_holds_is_saved_without_the_changes_of_saved_modules() {
    let mut model = model("llama_tied");
    for seed in [1, 2] {
        model.merge_adapter();
        model.add_adapter(&saving(&["embed_tokens"]), seed).unwrap();
        train(&mut model);
    }
    let out = tempfile::tempdir().unwrap();
    model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
    let opened = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
    assert_close("opened", &logits(&opened), &logits(&model), 0.0);
    let base = CausalLm::from_pretrained(&out.path().join("base_model"), ModelOptions::default()).unwrap();
    assert_close("base", &logits(&base), &logits(&model.base().unwrap()), 0.0);
    assert_ne!(logits(&base), logits(&model));
}

#[test]
fn an_embedding_that_stays_tied_is_stored_under_both_names_as_in_peft() {
    let dir = tempfile::tempdir().unwrap();
    let source = adapter("llama_tied_saved");
    let mut described = read_json(&source.join("adapter_config.json"));
    described["ensure_weight_tying"] = json!(true);
    std::fs::write(dir.path().join("adapter_config.json"), described.to_string()).unwrap();
    let stored = Checkpoint::open_file(&source.join("adapter_model.safetensors")).unwrap();
    let read = |name: &str| stored.read(name, Device::Cpu, Kind::Float).unwrap();
    let embedding = read("base_model.model.model.embed_tokens.weight");
    let mut tensors: Vec<(String, Tensor)> = stored.names().map(|name| (name.to_string(), read(name))).collect();
    tensors.push(("base_model.model.lm_head.weight".into(), embedding.copy()));
    Tensor::write_safetensors(&tensors, dir.path().join("adapter_model.safetensors")).unwrap();

    let mut tied = model("llama_tied");
    tied.load_adapter(dir.path()).unwrap();
    assert!(tied.config().tie_word_embeddings);
    let untied = lm("llama_tied_saved");
    assert!(!untied.config().tie_word_embeddings);
    let hidden = untied.hidden_states(&IDS).unwrap().remove(0);
    assert_close("logits", &logits(&tied), &hidden.matmul(&embedding.tr()), TOLERANCE);
    let again = tempfile::tempdir().unwrap();
    tied.save_pretrained(again.path(), &[0], None, usize::MAX).unwrap();
    let saved = Checkpoint::open_file(&again.path().join("adapter_model.safetensors")).unwrap();
    assert_eq!(saved.names().count(), tensors.len());
    assert_eq!(saved.read("base_model.model.lm_head.weight", Device::Cpu, Kind::Float).unwrap(), embedding);
}

#[test]
fn settings_that_select_nothing_are_named_and_leave_the_model_as_it_was() {
    let patterns = |text: &str| LoraConfig { rank_pattern: vec![(text.into(), 8)], ..config() };
    let targets = |name: &str| Some(vec![name.to_string()]);
    for (lora, words) in [
        (
            saving(&["norms"]),
            "lora_modules_to_save: expected modules of llama, found `norms`; there are down_proj, embed_tokens, ",
        ),
        (saving(&["score"]), "found `score`"),
        (saving(&["embed_tokens", "up"]), "found `up`"),
        (
            saving(&["proj"]),
            "expected whole parts of the names of linear layers, found `proj`, which ends a part of model.layers.0.",
        ),
        (saving(&["self_attn", "mlp"]), "the settings of LoRA select no layer"),
        (
            patterns("up_proj"),
            "rank_pattern: expected layers with an adapter, found `up_proj`; there are q_proj, v_proj",
        ),
        (patterns("("), "rank_pattern: expected regular expressions of names, without look-around, found `(`"),
        (
            LoraConfig { rank_pattern: vec![("q_proj".into(), 0)], ..config() },
            "rank_pattern of `q_proj` = 0: expected at least 1",
        ),
        (LoraConfig { alpha_pattern: vec![("k_proj".into(), 2.0)], ..config() }, "alpha_pattern: expected layers"),
        (LoraConfig { layers_to_transform: vec![7], ..config() }, "the settings of LoRA select no layer"),
        (
            LoraConfig { target_modules: targets("q_proj"), exclude_modules: vec!["q_proj".into()], ..config() },
            "the settings of LoRA select no layer",
        ),
    ] {
        let mut model = model("llama_tied");
        let before = (names(model.params().iter()), logits(&model));
        let error = model.add_adapter(&lora, 1).unwrap_err().to_string();
        assert!(error.contains(words) && !error.contains('\n'), "{error}");
        assert!(model.config().tie_word_embeddings);
        assert_eq!(names(model.params().iter()), before.0);
        assert_close(words, &logits(&model), &before.1, 0.0);
        model.add_adapter(&config(), 1).unwrap();
    }
    let experts = LoraConfig { modules_to_save: vec!["block_sparse_moe".into()], ..config() };
    let error = model("mixtral").add_adapter(&experts, 1).unwrap_err().to_string();
    assert!(error.contains("outside its MLPs, found one with `model.layers.0.block_sparse_moe."), "{error}");
}

#[test]
fn layers_and_ranks_of_new_adapters_are_those_of_the_settings() {
    let mut model = model("llama_untied");
    let lora = LoraConfig {
        target_modules: Some(vec!["q_proj".into(), "mlp.up_proj".into(), "o_proj".into()]),
        rank_pattern: vec![("up_proj".into(), 2)],
        exclude_modules: vec!["o_proj".into()],
        layers_to_transform: vec![1],
        ..config()
    };
    model.add_adapter(&lora, 1).unwrap();
    let adapted = model.params().iter().filter(|param| param.name.ends_with("lora_A.weight"));
    let found: Vec<(&str, i64)> = adapted.map(|param| (param.name.as_str(), param.tensor.size()[0])).collect();
    let expected =
        [("model.layers.1.self_attn.q_proj.lora_A.weight", 4), ("model.layers.1.mlp.up_proj.lora_A.weight", 2)];
    assert_eq!(found, expected);
    stir(model.params());
    let out = tempfile::tempdir().unwrap();
    model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
    let opened = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
    assert_close("opened", &logits(&opened), &logits(&model), 0.0);
}

#[test]
fn one_of_several_adapters_in_a_folder_is_given_by_its_path() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{SFT} --output_dir several/first"));
    scratch.succeeds(&format!("{SFT} --output_dir several/second --use_dora"));
    let [first, second] = ["several/first", "several/second"].map(|name| logprobs(&scratch, name));
    assert!(gap(&first, &second) > 1e-4);
    let listed = "adapters in its subfolders: first, second; give the path of one of them, as several/first";
    for command in [
        "logprobs --dataset_name demos.jsonl --model several",
        "merge --output_dir merged --model several",
        "sft --dataset_name demos.jsonl --output_dir out --model_name_or_path several",
    ] {
        scratch.refuses(command, 1, &["several", listed]);
    }
}

#[test]
fn sft_reward_model_and_ppo_train_dora_and_modules_in_full_and_keep_the_reference() {
    let scratch = Scratch::new();
    let flags = "--use_dora --lora_modules_to_save embed_in final_layer_norm";
    scratch.succeeds(&format!("{SFT} {flags} --lora_dropout 0.1 --output_dir sft"));
    let losses: Vec<f64> = scratch.metrics("sft").iter().map(|row| row["loss"].as_f64().unwrap()).collect();
    assert!(losses[2] < losses[0], "{losses:?}");
    scratch.succeeds("merge --model sft --output_dir merged");
    let model_logits =
        |name: &str| logits(&CausalLm::from_pretrained(&scratch.path(name), ModelOptions::default()).unwrap());
    assert_close("merged", &model_logits("merged"), &model_logits("sft"), TOLERANCE);
    let reward =
        "reward --model_name_or_path sft --dataset_name pairs.jsonl --max_steps 2 --use_peft --new_reward_head";
    scratch.succeeds(&format!("{reward} {flags} --learning_rate 0.01 --output_dir judge"));
    let described = read_json(&scratch.path("judge/adapter_config.json"));
    assert_eq!(described["modules_to_save"], json!(["embed_in", "final_layer_norm", "classifier", "score"]));

    // From SFT's adapter, whose own saved modules are in the reference; the LM head is trained in the policy alone.
    let line = format!("{PPO} --sft_model_path sft --reward_model_path judge --use_dora --output_dir out");
    scratch.succeeds(&format!("{line} --lora_modules_to_save embed_out,embed_in"));
    let metrics = scratch.metrics("out");
    assert!(metrics[0]["objective/kl"].as_f64().unwrap().abs() < 1e-4, "{:?}", metrics[0]["objective/kl"]);
    assert!(metrics[1]["objective/kl"].as_f64().unwrap() > 1e-3, "{:?}", metrics[1]["objective/kl"]);
    assert_close("the reference", &model_logits("out/base_model"), &model_logits("sft"), TOLERANCE);
    let value = read_json(&scratch.path("out/value_model/adapter_config.json"));
    assert_eq!(value["modules_to_save"], json!(["embed_in", "classifier", "score"]));
    assert!(most(&model_logits("out"), &model_logits("sft")) > 0.01);
    let wrong = format!("{SFT} --lora_modules_to_save embed_tokens --output_dir never");
    scratch.refuses(&wrong, 2, &["lora_modules_to_save", "found `embed_tokens`; there are dense, ", "embed_in"]);
}

#[test]
fn a_value_model_may_start_at_a_language_models_adapter_with_saved_modules() {
    let out = tempfile::tempdir().unwrap();
    let mut policy = model("llama_untied");
    policy.add_adapter(&saving(&["lm_head", "embed_tokens"]), 1).unwrap();
    train(&mut policy);
    policy.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
    let value = SequenceClassifier::from_pretrained(out.path(), Some(3), ModelOptions::default()).unwrap();
    let embedding = |params: &[Param]| {
        params.iter().find(|param| param.name == "model.embed_tokens.weight").unwrap().tensor.detach()
    };
    assert_eq!(embedding(value.params()), embedding(policy.params()));
    let again = tempfile::tempdir().unwrap();
    value.save_pretrained(again.path(), &[0], None, usize::MAX).unwrap();
    let described = read_json(&again.path().join("adapter_config.json"));
    assert_eq!(described["modules_to_save"], json!(["embed_tokens", "classifier", "score"]));
    let opened = SequenceClassifier::from_pretrained(again.path(), None, ModelOptions::default()).unwrap();
    assert_close("scores", &opened.scores(&IDS).unwrap(), &value.scores(&IDS).unwrap(), 0.0);
}

/// The texts that encoders score.
const TEXTS: [[i64; 4]; 2] = [[2, 7, 8, 3], [2, 11, 9, 3]];

fn read_tensors(file: &Checkpoint, keeps: impl Fn(&str) -> bool) -> Vec<(String, Tensor)> {
    let names = file.names().filter(|name| keeps(name));
    names.map(|name| (name.to_string(), file.read(name, Device::Cpu, Kind::Float).unwrap())).collect()
}

/// Writes the golden model `name` without the tensors that start with one of `lacks` to `dir`, as one that is no classifier.
fn write_headless(dir: &Path, name: &str, lacks: &[&str]) {
    let from = golden().join("models").join(name);
    let keeps = |tensor: &str| !lacks.iter().any(|start| tensor.starts_with(start));
    rlhf::weights::save(dir, &read_tensors(&Checkpoint::open(&from).unwrap(), keeps), usize::MAX).unwrap();
    let mut config = read_json(&from.join("config.json"));
    for field in ["architectures", "id2label", "label2id"] {
        config.as_object_mut().unwrap().remove(field);
    }
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// Changes the adapter in `dir`: its settings, and which of its tensors are there.
fn change_adapter(dir: &Path, changes: &[(&str, Value)], keeps: impl Fn(&str) -> bool) {
    let weights = dir.join("adapter_model.safetensors");
    let kept = read_tensors(&Checkpoint::open_file(&weights).unwrap(), keeps);
    Tensor::write_safetensors(&kept, &weights).unwrap();
    let mut described = read_json(&dir.join("adapter_config.json"));
    changes.iter().for_each(|(key, value)| described[*key] = value.clone());
    std::fs::write(dir.join("adapter_config.json"), described.to_string()).unwrap();
}

fn open_classifier(dir: &Path, new_head: Option<u64>) -> rlhf::Result<SequenceClassifier> {
    SequenceClassifier::from_pretrained(dir, new_head, ModelOptions::default())
}

/// Moves all that is trained.
fn train_classifier(model: &mut SequenceClassifier) {
    stir(model.params());
    model.set_trainable(true);
    let optimizer = rlhf::settings::SftConfig::new("m", "d", "o").optimizer;
    let mut optimizer = rlhf::optim::Optimizer::new(model.trainable_params(), &optimizer);
    model.scores(&TEXTS).unwrap().square().sum(Kind::Float).backward();
    optimizer.step(1e-2).unwrap();
    model.set_trainable(false);
}

#[test]
fn a_reward_adapter_on_an_encoder_without_a_head_brings_all_layers_that_were_drawn() {
    for (name, lacks, modules) in [
        ("bert_cls1", vec!["classifier."], vec![]),
        ("bert_cls1", vec!["bert.pooler.", "classifier."], vec!["bert.pooler.dense"]),
        ("roberta_cls3", vec!["classifier."], vec![]),
        ("distilbert_cls2", vec!["pre_classifier.", "classifier."], vec![]),
        ("deberta_cls1", vec!["pooler.", "classifier."], vec!["pooler.dense"]),
        ("modernbert_cls1", vec!["classifier."], vec![]),
        ("modernbert_cls1", vec!["head.", "classifier."], vec!["head.dense", "head.norm"]),
    ] {
        for targets in [None, Some(vec!["all-linear".to_string()])] {
            let what = format!("{name}, {lacks:?}, {targets:?}");
            let (base, out, again) =
                (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            write_headless(base.path(), name, &lacks);
            let mut model = open_classifier(base.path(), Some(7)).unwrap();
            model.add_adapter(&LoraConfig { target_modules: targets, ..config() }, 1).unwrap();
            let before = model.scores(&TEXTS).unwrap();
            train_classifier(&mut model);
            assert!(most(&model.scores(&TEXTS).unwrap(), &before) > 1e-4, "{what}");
            model.save_pretrained(out.path(), &[3], None, usize::MAX).unwrap();
            assert!(!out.path().join("base_model").exists(), "{what}: the base is in the folder that it was read from");
            let saved = modules.iter().chain(&["classifier", "score"]).collect::<Vec<_>>();
            assert_eq!(read_json(&out.path().join("adapter_config.json"))["modules_to_save"], json!(saved), "{what}");
            let opened = open_classifier(out.path(), None).unwrap();
            assert!(!opened.has_new_head(), "{what}");
            assert_close(&what, &opened.scores(&TEXTS).unwrap(), &model.scores(&TEXTS).unwrap(), 0.0);
            opened.save_pretrained(again.path(), &[3], None, usize::MAX).unwrap();
            let opened = open_classifier(again.path(), None).unwrap();
            assert_close(&what, &opened.scores(&TEXTS).unwrap(), &model.scores(&TEXTS).unwrap(), 0.0);
        }
    }
}

#[test]
fn an_adapter_without_a_layer_of_a_head_that_its_base_lacks_too_is_refused() {
    for (name, lacks, inner) in [
        ("deberta_cls1", vec!["pooler.", "classifier."], "pooler.dense"),
        ("distilbert_cls2", vec!["pre_classifier.", "classifier."], "pre_classifier"),
    ] {
        let (base, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_headless(base.path(), name, &lacks);
        let mut model = open_classifier(base.path(), Some(7)).unwrap();
        model.add_adapter(&config(), 1).unwrap();
        model.save_pretrained(out.path(), &[3], None, usize::MAX).unwrap();
        // As PEFT writes it, which saves its own names of heads only.
        let changes = [("modules_to_save", json!(["classifier", "score"]))];
        change_adapter(out.path(), &changes, |name| !name.starts_with(&format!("base_model.model.{inner}.")));
        let error = open_classifier(out.path(), None).unwrap_err().to_string();
        let says = format!("missing `base_model.model.{inner}.weight`: its base has no such layer of a head either");
        assert!(error.contains(&says) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn the_layer_before_distilberts_last_one_is_part_of_the_head_as_in_peft() {
    let base = golden().join("models/distilbert_cls2");
    for targets in [None, Some(vec!["all-linear".to_string()])] {
        let out = tempfile::tempdir().unwrap();
        let mut model = open_classifier(&base, None).unwrap();
        model.choose_label(Some("0"), &base).unwrap();
        model.add_adapter(&LoraConfig { target_modules: targets, ..config() }, 1).unwrap();
        assert!(model.params().iter().all(|param| !param.name.starts_with("pre_classifier.lora_")));
        model.set_trainable(true);
        let trained = names(model.trainable_params());
        assert_eq!(trained, ["pre_classifier.weight", "pre_classifier.bias", "classifier.weight", "classifier.bias"]);
        train_classifier(&mut model);
        model.save_pretrained(out.path(), &[3], None, usize::MAX).unwrap();
        // PEFT's names of heads select both layers by their ends.
        assert_eq!(
            read_json(&out.path().join("adapter_config.json"))["modules_to_save"],
            json!(["classifier", "score"])
        );
        let stored = Checkpoint::open_file(&out.path().join("adapter_model.safetensors")).unwrap();
        for name in &trained {
            assert!(stored.shape(&format!("base_model.model.{name}")).is_some(), "{name}");
        }
        let opened = open_classifier(out.path(), None).unwrap();
        assert_close("opened", &opened.logits(&TEXTS).unwrap(), &model.logits(&TEXTS).unwrap(), 0.0);
        // One of an earlier version has the base's.
        change_adapter(out.path(), &[], |name| !name.contains(".pre_classifier."));
        let opened = open_classifier(out.path(), None).unwrap();
        assert!(most(&opened.logits(&TEXTS).unwrap(), &model.logits(&TEXTS).unwrap()) > 0.0);
    }
}

#[test]
fn an_adapter_without_a_task_is_a_classifiers_if_its_base_is_one() {
    let scratch = Scratch::new();
    let mut model = open_classifier(&scratch.path("reward"), None).unwrap();
    model.add_adapter(&config(), 1).unwrap();
    stir(model.params());
    model.save_pretrained(&scratch.path("judge"), &[0], None, usize::MAX).unwrap();
    let changes = [("task_type", json!(null)), ("modules_to_save", json!(null))];
    change_adapter(&scratch.path("judge"), &changes, |name| name.contains("lora_"));
    let expected = scores(&scratch, "judge");
    assert!(gap(&expected, &scores(&scratch, "reward")) > 1e-4);
    scratch.succeeds("merge --model judge --output_dir merged");
    assert!(gap(&scores(&scratch, "merged"), &expected) < TOLERANCE);
}
