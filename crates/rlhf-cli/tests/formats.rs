//! Files and dtypes: what is saved, how much memory loading takes, what a low-precision model computes.

use crate::cli::{PPO, REWARD, SFT, Scratch, timeless};
use crate::support::{Child, golden, say};
use rlhf::model::{
    Batch, CausalLm, CausalLmWithValueHead, Dtype, ModelConfig, ModelOptions, Param, Precision, SequenceClassifier,
    ValueHeadInit,
};
use rlhf::settings::PpoConfig;
use rlhf::train::ppo::PpoTrainer;
use rlhf::weights::{Checkpoint, save};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

const AUTO: ModelOptions = ModelOptions {
    dtype: Dtype::Auto,
    device: Device::Cpu,
    precision: rlhf::model::Precision::Held,
    quantization: None,
};

/// The golden models that open, but for `t5`, which is there to be refused.
fn models() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(golden().join("models")).unwrap().map(|entry| entry.unwrap().path());
    let mut dirs: Vec<_> = entries.filter(|dir| ModelConfig::from_dir(dir).is_ok()).collect();
    dirs.sort();
    assert!(dirs.len() >= 6, "{dirs:?}");
    dirs
}

/// Reads the model in `from` as what it is and writes it to `to`.
fn resave(from: &Path, to: &Path, max_shard_bytes: usize) {
    if ModelConfig::from_dir(from).unwrap().is_sequence_classifier() {
        let model = SequenceClassifier::from_pretrained(from, None, AUTO).unwrap();
        model.save_pretrained(to, &[0], Some(1), max_shard_bytes).unwrap();
    } else {
        CausalLm::from_pretrained(from, AUTO).unwrap().save_pretrained(to, &[0], Some(1), max_shard_bytes).unwrap();
    }
}

/// Every file of a folder with its bytes.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    entries.map(|path| (name(&path), std::fs::read(&path).unwrap())).collect()
}

fn tensors(dir: &Path) -> Vec<(String, Tensor)> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let read = |name: &str| (name.to_string(), checkpoint.read(name, Device::Cpu, checkpoint.kind()).unwrap());
    checkpoint.names().map(read).collect()
}

#[test]
fn a_model_saved_loaded_and_saved_again_is_equal_byte_for_byte_in_one_file_or_several() {
    for dir in models() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        resave(&dir, &at("one"), usize::MAX);
        resave(&at("one"), &at("two"), usize::MAX);
        assert!(files(&at("one")) == files(&at("two")), "{}: differs when saved again", dir.display());
        resave(&at("one"), &at("shards"), 20_000);
        resave(&at("shards"), &at("shards again"), 20_000);
        assert!(files(&at("shards")) == files(&at("shards again")), "{}: shards differ", dir.display());
        assert!(files(&at("shards")).len() > 4 && !at("shards/model.safetensors").exists(), "{}", dir.display());
        // Over the shards, one file again: the same as ever, and nothing of the shards left.
        resave(&at("one"), &at("shards"), usize::MAX);
        assert!(files(&at("shards")) == files(&at("one")), "{}: differs over shards", dir.display());
        assert_eq!(tensors(&at("shards again")), tensors(&at("one")), "{}", dir.display());
    }
}

#[test]
fn a_value_head_is_saved_loaded_and_saved_again_equal() {
    let scratch = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| scratch.path().join(name));
    let init = ValueHeadInit::Fresh(3);
    let model = CausalLmWithValueHead::from_pretrained(&golden().join("models/gpt2"), init, AUTO).unwrap();
    model.save_pretrained(&one, &[0], None, usize::MAX).unwrap();
    let model = CausalLmWithValueHead::from_pretrained(&one, ValueHeadInit::Checkpoint, AUTO).unwrap();
    model.save_pretrained(&two, &[0], None, usize::MAX).unwrap();
    assert!(files(&one) == files(&two));
}

#[test]
fn a_model_held_in_bf16_or_f16_stays_near_f32_and_returns_f32() {
    for dir in models() {
        let ids = [vec![5i64, 6, 7, 8, 9, 10], vec![11, 12]];
        // 8 and 11 bits of each weight and product: 0.4 % and 0.05 % of numbers up to about 8, added up over the layers.
        for (dtype, name, allowed) in [(Dtype::BFloat16, "bfloat16", 0.3), (Dtype::Float16, "float16", 0.04)] {
            let options = ModelOptions { dtype, ..AUTO };
            let out = tempfile::tempdir().unwrap();
            let (found, expected) = if ModelConfig::from_dir(&dir).unwrap().is_sequence_classifier() {
                let model = |options| SequenceClassifier::from_pretrained(&dir, None, options).unwrap();
                model(options).save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
                (model(options).logits(&ids).unwrap(), model(ModelOptions::default()).logits(&ids).unwrap())
            } else {
                let model = |options| CausalLm::from_pretrained(&dir, options).unwrap();
                model(options).save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
                let spans = [1..6, 1..2];
                // An encoder-decoder reads the first token of each row in its encoder.
                let batch = || Batch::new(&ids, &spans).with_prompts(Some(&[1, 1]));
                let logprobs = |options| model(options).logprobs_of(batch(), 1.0, false).unwrap().logprobs;
                (logprobs(options), logprobs(ModelOptions::default()))
            };
            let gap = (&found - expected).abs().max().double_value(&[]);
            assert!(found.kind() == Kind::Float && gap > 0.0 && gap < allowed, "{} {name}: {gap}", dir.display());
            // `auto` takes it back as it was saved.
            let config: Value = serde_json::from_slice(&files(out.path())["config.json"]).unwrap();
            let stored = config.get("torch_dtype").or(config.get("dtype"));
            assert_eq!(stored, Some(&json!(name)), "{}", dir.display());
            let again = tempfile::tempdir().unwrap();
            resave(out.path(), again.path(), usize::MAX);
            assert!(files(out.path())["model.safetensors"] == files(again.path())["model.safetensors"]);
        }
    }
}

#[test]
fn weights_of_16_bits_computed_in_f32_give_the_numbers_of_their_widened_copies() {
    for name in ["gpt_neox", "gemma2", "gpt2"] {
        let scratch = tempfile::tempdir().unwrap();
        let model = |dir: &Path, options| CausalLm::from_pretrained(dir, options).unwrap();
        let half = ModelOptions { dtype: Dtype::BFloat16, ..AUTO };
        model(&golden().join("models").join(name), half)
            .save_pretrained(scratch.path(), &[], None, usize::MAX)
            .unwrap();
        let ids = [vec![5i64, 6, 7, 8, 9, 10]];
        for precision in [rlhf::model::Precision::F32, rlhf::model::Precision::Bf16] {
            let logits = |dtype| {
                model(scratch.path(), ModelOptions { dtype, precision, ..AUTO }).logits(&ids).unwrap().remove(0)
            };
            assert_eq!(logits(Dtype::Auto), logits(Dtype::Float32), "{name} {precision:?}");
        }
    }
}

/// A GPT-NeoX folder of `bytes` in `kind`, nearly all of it in its two embeddings.
fn large_model(dir: &Path, bytes: u64, kind: Kind) {
    let from = golden().join("models/gpt_neox");
    let mut config: Value = serde_json::from_slice(&files(&from)["config.json"]).unwrap();
    let width = config["hidden_size"].as_i64().unwrap();
    let rows = (bytes / 2) as i64 / kind.elt_size_in_bytes() as i64 / width;
    config["vocab_size"] = json!(rows);
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let tensors: Vec<_> = tensors(&from)
        .into_iter()
        .map(|(name, tensor)| {
            if name.contains("embed") {
                (name, Tensor::zeros([rows, width], (kind, Device::Cpu)))
            } else {
                (name, tensor.to_kind(kind))
            }
        })
        .collect();
    save(dir, &tensors, usize::MAX).unwrap();
}

/// Loads models of `mib` MiB in processes of their own; checks the peak of each.
fn check_memory_of_loading(mib: u64) {
    for (kind, dtype, widened) in
        [(Kind::Float, "auto", 1), (Kind::BFloat16, "auto", 1), (Kind::BFloat16, "float32", 2)]
    {
        let dir = tempfile::tempdir().unwrap();
        large_model(dir.path(), mib << 20, kind);
        let vars = [("DIR", dir.path().to_string_lossy().into_owned()), ("DTYPE", dtype.to_string())];
        let found = Child { test: "formats::child_loads_a_model", address_space_gib: 16, vars: &vars }.run();
        let model_bytes = (mib << 20) * widened;
        let times = found["grew"].as_f64().unwrap() / model_bytes as f64;
        say(&format!("{kind:?} loaded as {dtype}: {mib} MiB, {times:.3} times what the model holds, {found}"));
        assert!(times > 0.9 && times < 1.15, "{kind:?} loaded as {dtype}: memory rose by {times} times the model");
    }
}

#[test]
fn loading_takes_little_more_memory_than_the_model_holds() {
    check_memory_of_loading(80);
}

#[test]
#[ignore = "writes a file of 1 GiB: `cargo test --test main -- --ignored a_model_of_one_gib`"]
fn a_model_of_one_gib_loads_in_little_more_memory() {
    check_memory_of_loading(1024);
}

#[test]
#[ignore = "a process of its own, started by check_memory_of_loading"]
fn child_loads_a_model() {
    let dir = Child::var("DIR");
    let dtype = if Child::var("DTYPE") == "auto" { Dtype::Auto } else { Dtype::Float32 };
    tch::set_num_threads(1);
    // What the first tensor operation sets up is no part of loading.
    CausalLm::from_pretrained(&golden().join("models/gpt_neox"), AUTO).unwrap();
    let before = Child::memory("VmRSS");
    let began = std::time::Instant::now();
    let model = CausalLm::from_pretrained(Path::new(&dir), ModelOptions { dtype, ..AUTO }).unwrap();
    let seconds = began.elapsed().as_secs_f64();
    let grew = Child::memory("VmHWM").saturating_sub(before);
    Child::reports(&json!({"grew": grew, "seconds": seconds}));
    drop(model);
}

#[test]
fn a_frozen_model_frees_the_memory_that_it_is_not_computed_with() {
    let dir = tempfile::tempdir().unwrap();
    large_model(dir.path(), 80 << 20, Kind::Float);
    let vars = [("DIR", dir.path().to_string_lossy().into_owned())];
    let found = Child { test: "formats::child_holds_a_model_as_computed", address_space_gib: 16, vars: &vars }.run();
    // Of two equal tables the embedding stays f32, and the head is held in bf16 alone.
    for at in ["held", "used"] {
        let times = found[at].as_f64().unwrap() / f64::from(80 << 20);
        assert!(times > 0.7 && times < 0.85, "{at}: {times} of the model in f32");
    }
}

#[test]
#[ignore = "a process of its own, started by a_frozen_model_frees_the_memory_that_it_is_not_computed_with"]
fn child_holds_a_model_as_computed() {
    let dir = Child::var("DIR");
    tch::set_num_threads(1);
    let options = ModelOptions { dtype: Dtype::Float32, precision: Precision::Bf16, ..AUTO };
    let load = |dir: &Path| {
        let mut model = CausalLm::from_pretrained(dir, options).unwrap();
        model.hold_as_computed();
        model
    };
    let ids = [vec![5i64, 6, 7]];
    let response = std::slice::from_ref(&(1..3));
    load(&golden().join("models/gpt_neox")).token_logprobs(&ids, response, 1.0, false).unwrap();
    let before = Child::memory("VmRSS");
    let model = load(Path::new(&dir));
    let loaded = Child::memory("VmRSS").saturating_sub(before);
    let hidden = model.hidden_states(&ids).unwrap();
    let used = Child::memory("VmRSS").saturating_sub(before);
    Child::reports(&json!({"held": loaded, "used": used}));
    drop((model, hidden));
}

#[test]
fn a_sharded_folder_is_the_single_one() {
    let [single, sharded] = ["gpt_neox", "gpt_neox_sharded"].map(|name| golden().join("models").join(name));
    assert_eq!(tensors(&single), tensors(&sharded));
}

/// Rewrites the model `name` in bf16.
fn narrow(scratch: &Scratch, name: &str) {
    let (dir, options) = (scratch.path(name), ModelOptions { dtype: Dtype::BFloat16, ..AUTO });
    if name == "reward" {
        let model = SequenceClassifier::from_pretrained(&dir, None, options).unwrap();
        model.save_pretrained(&dir, &[0], None, usize::MAX).unwrap();
    } else {
        CausalLm::from_pretrained(&dir, options).unwrap().save_pretrained(&dir, &[0], None, usize::MAX).unwrap();
    }
}

#[test]
fn a_reference_held_as_its_file_gives_ppo_the_numbers_of_one_held_in_f32() {
    let scratch = Scratch::new();
    narrow(&scratch, "policy");
    narrow(&scratch, "reward");
    for more in ["", "--bf16"] {
        scratch.succeeds(&format!("{PPO} {more} --overwrite_output_dir --output_dir auto"));
        scratch.succeeds(&format!("{PPO} {more} --overwrite_output_dir --output_dir f32 --dtype float32"));
        let metrics = |run: &str| timeless(scratch.metrics(run));
        assert_eq!(metrics("auto"), metrics("f32"), "{more}");
        // The policy has not moved away from what it is a copy of.
        let kl = metrics("auto")[0]["objective/kl"].as_f64().unwrap();
        assert!(kl.abs() < 1e-5, "{more}: {kl}");
    }
}

/// Gives the policy matrices of bf16, and norms that bf16 would round.
fn mix(scratch: &Scratch) {
    scratch.edit_tensors("policy", |tensors| {
        for (name, tensor) in tensors {
            *tensor = if name.contains("norm") { &*tensor * 1.001 + 0.0003 } else { tensor.to_kind(Kind::BFloat16) };
        }
    });
}

/// A run of the scratch folder's models that learns nothing, changed by a case.
fn frozen_run(scratch: &Scratch, change: impl FnOnce(&mut PpoConfig)) -> PpoConfig {
    let path = |name: &str| scratch.path(name);
    let mut config = PpoConfig::new(path("policy"), path("reward"), path("prompts.jsonl"), path("out"));
    (config.response_length, config.total_episodes) = (6, Some(8));
    config.learning_rate = 0.0;
    change(&mut config);
    config
}

#[test]
fn the_reference_is_the_policys_start_for_all_dtypes_of_files_and_flags() {
    golden(); // one thread
    type Write = fn(&Scratch);
    let folders: [(&str, Write); 3] =
        [("f32", |_| ()), ("bf16", |scratch| narrow(scratch, "policy")), ("bf16 with f32 norms", mix)];
    for (files, write) in folders {
        let scratch = Scratch::new();
        write(&scratch);
        for dtype in [Dtype::Auto, Dtype::Float32, Dtype::BFloat16, Dtype::Float16] {
            for (bf16, fp16) in [(false, false), (true, false), (false, true)] {
                for (use_peft, shared) in [(false, None), (true, None), (false, Some(1))] {
                    let config = frozen_run(&scratch, |config| {
                        (config.run.dtype, config.run.bf16, config.run.fp16) = (dtype, bf16, fp16);
                        (config.peft.use_peft, config.legacy.num_shared_layers) = (use_peft, shared);
                    });
                    let found = PpoTrainer::from_config(&config).unwrap().check().unwrap();
                    let case = format!("{files}, {dtype:?}, bf16 {bf16}, fp16 {fp16}, peft {use_peft}, {shared:?}");
                    assert_eq!(found.kl.distance(), Some(0.0), "{case}");
                }
            }
        }
    }
}

#[test]
fn a_run_at_rate_0_has_no_kl_and_logs_what_was_rounded() {
    let scratch = Scratch::new();
    mix(&scratch);
    narrow(&scratch, "reward");
    let line = format!("{PPO} --learning_rate 0 --overwrite_output_dir");
    for (flags, most) in [("", 1e-5), ("--use_peft", 1e-5), ("--bf16", 0.0), ("--bf16 --use_peft", 0.0)] {
        scratch.succeeds(&format!("{line} {flags}"));
        for row in scratch.metrics("out") {
            let kl = row["objective/kl"].as_f64().unwrap();
            assert!(kl.abs() <= most, "{flags}: {kl}");
        }
    }
    let ran = scratch.run(&format!("{line} --bf16 --dtype bfloat16"));
    let warned = "warning: policy: dtype = bfloat16 rounds weights that the files hold in another";
    assert!(ran.code == 0 && ran.stderr.starts_with(warned) && ran.stderr.lines().count() == 1, "{}", ran.stderr);
    assert!(scratch.metrics("out").iter().all(|row| row["objective/kl"] == 0.0));
    // In SFT and reward training too: loaded so, and trained in f32.
    for (line, dir) in [(SFT, "policy"), (REWARD, "reward")] {
        for peft in ["", "--use_peft"] {
            let line = format!("{line} --overwrite_output_dir --dtype float16 {peft}");
            let ran = scratch.run(&line);
            let warned = format!("warning: {dir}: dtype = float16 rounds weights");
            assert!(ran.code == 0 && ran.stderr.starts_with(&warned), "{line}: {}", ran.stderr);
        }
        scratch.succeeds(&format!("{line} --overwrite_output_dir"));
        let saved = Checkpoint::open(&scratch.path("out")).unwrap();
        assert!(saved.names().all(|name| saved.kind_of(name) == Some(Kind::Float)), "{dir}");
    }
}

#[test]
fn a_frozen_model_is_held_in_the_dtype_of_its_products_and_gives_the_same_numbers() {
    let dir = golden().join("models");
    let ids = [vec![5i64, 6, 7, 8, 9, 10]];
    let bf16 = ModelOptions { dtype: Dtype::Float32, precision: Precision::Bf16, ..AUTO };
    let kinds = |params: &[Param], names: &[&str]| -> Vec<Kind> {
        let named = params.iter().filter(|param| names.iter().any(|name| param.name.contains(name)));
        named.map(|param| param.tensor.kind()).collect()
    };
    let all = |kinds: Vec<Kind>, kind: Kind| !kinds.is_empty() && kinds.iter().all(|found| *found == kind);
    for (name, matrices) in [
        ("gpt2", ["c_attn", "c_fc"]),
        ("llama_untied", ["q_proj", "lm_head"]),
        ("llama_tied", ["q_proj", "down_proj"]),
        ("gemma2", ["q_proj", "down_proj"]),
    ] {
        let mut model = CausalLm::from_pretrained(&dir.join(name), bf16).unwrap();
        let before = model.logits(&ids).unwrap().remove(0);
        model.hold_as_computed();
        assert_eq!(model.logits(&ids).unwrap()[0], before, "{name}");
        assert!(all(kinds(model.params(), &matrices), Kind::BFloat16), "{name}");
        assert!(all(kinds(model.params(), &["norm", "ln_", "embed_tokens", "wte"]), Kind::Float), "{name}");
    }
    let mut reward = SequenceClassifier::from_pretrained(&dir.join("gpt_neox_cls"), None, bf16).unwrap();
    let before = reward.scores(&ids).unwrap();
    reward.hold_as_computed();
    assert_eq!(reward.scores(&ids).unwrap(), before);
    assert!(all(kinds(reward.params(), &["query_key_value"]), Kind::BFloat16));
    assert!(all(kinds(reward.params(), &["score"]), Kind::Float));
    // Neither what learns nor what lies in another model's memory changes.
    let mut policy = CausalLm::from_pretrained(&dir.join("llama_untied"), bf16).unwrap();
    let mut reference = policy.share_lower_layers(1).unwrap();
    policy.set_trainable(true);
    let before = reference.logits(&ids).unwrap().remove(0);
    policy.hold_as_computed();
    reference.hold_as_computed();
    assert_eq!(reference.logits(&ids).unwrap()[0], before);
    assert!(all(kinds(policy.params(), &["layers.1."]), Kind::Float));
    assert!(all(kinds(reference.params(), &["layers.1.mlp"]), Kind::BFloat16));
    policy.set_trainable(false);
    let mut base = policy.base().unwrap();
    base.hold_as_computed();
    assert!(all(kinds(base.params(), &["layers.1."]), Kind::Float), "a view of another model's memory");
}

#[test]
fn the_dtype_is_saved_under_each_name_that_the_configuration_has_for_it() {
    let golden = golden().join("models/gpt2");
    let config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
    let (new, old) = ("dtype", "torch_dtype");
    for names in [vec![new, old], vec![new], vec![old], vec![]] {
        let saved = if names.is_empty() { vec![new] } else { names.clone() };
        let (from, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::copy(golden.join("model.safetensors"), from.path().join("model.safetensors")).unwrap();
        let mut config = config.clone();
        for name in [new, old] {
            config.as_object_mut().unwrap().remove(name);
        }
        for name in &names {
            config[*name] = json!("float32");
        }
        std::fs::write(from.path().join("config.json"), config.to_string()).unwrap();
        let options = ModelOptions { dtype: Dtype::BFloat16, ..AUTO };
        let model = CausalLm::from_pretrained(from.path(), options).unwrap();
        model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
        let found: Value = serde_json::from_slice(&std::fs::read(out.path().join("config.json")).unwrap()).unwrap();
        for name in [new, old] {
            let expected = saved.contains(&name).then(|| json!("bfloat16"));
            assert_eq!(found.get(name), expected.as_ref(), "{names:?}: {name}");
        }
    }
}

#[test]
fn a_model_whose_numbers_are_not_finite_is_not_saved() {
    for dtype in [Dtype::Float32, Dtype::BFloat16, Dtype::Float16] {
        let out = tempfile::tempdir().unwrap();
        let options = ModelOptions { dtype, ..AUTO };
        let model = CausalLm::from_pretrained(&golden().join("models/gpt2"), options).unwrap();
        model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
        let before = files(out.path());
        let broken = model.params().iter().find(|param| param.name.contains("c_fc.weight")).unwrap();
        for (number, shown) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf"), (f64::NEG_INFINITY, "-inf")] {
            let _ = broken.tensor.get(1).narrow(0, 2, 1).fill_(number);
            let error = model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap_err().to_string();
            let expected = format!("tensor `{}`: expected finite numbers, found {shown}", broken.name);
            assert!(error.contains(&expected) && !error.contains(".saving"), "{error}");
            assert!(files(out.path()) == before, "{error}: the folder is as it was");
        }
    }
}

#[test]
fn a_run_that_diverged_keeps_its_last_sound_weights_and_names_their_folder() {
    let scratch = Scratch::new();
    let rate = "--learning_rate 1e38 --lr_scheduler_type constant_with_warmup --warmup_steps 1 --save_steps 1";
    for (line, optimizer) in [
        (SFT.replace("--max_steps 2", "--max_steps 4"), ""),
        (REWARD.replace("--max_steps 2", "--max_steps 4"), ""),
        (PPO.replace("--total_episodes 8", "--total_episodes 16"), "--num_ppo_epochs 1"),
        (SFT.replace("--max_steps 2", "--max_steps 4"), "--use_peft"),
    ] {
        let line = format!("{line} {rate} {optimizer} --overwrite_output_dir");
        let ran = scratch.run(&line);
        let error = ran.stderr.lines().last().unwrap_or_default();
        assert!(ran.code == 1 && error.contains("expected finite numbers, found"), "{line}: {}", ran.stderr);
        assert!(error.contains("--config out/config.yaml --resume_from_checkpoint true"), "{line}: {error}");
        assert!(!scratch.path("out/checkpoint-2").exists() && !scratch.path("out/checkpoint-3").exists(), "{line}");
        for file in ["model.safetensors", "adapter_model.safetensors"] {
            assert!(!scratch.path("out").join(file).exists(), "{line}: {file}");
        }
        assert!(scratch.path("out/checkpoint-1/trainer_state.json").is_file(), "{line}");
    }
}

#[test]
fn runs_save_in_shards_of_the_given_size() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{SFT} --max_shard_size 50KB --output_dir shards"));
    scratch.succeeds(&format!("{SFT} --output_dir single"));
    assert!(scratch.path("shards/model.safetensors.index.json").is_file());
    assert!(!scratch.path("shards/model.safetensors").exists() && !scratch.path("shards/.saving").exists());
    assert_eq!(tensors(&scratch.path("shards")), tensors(&scratch.path("single")));
    assert!(
        scratch.read("shards/config.yaml").contains("max_shard_size: 50KB"),
        "{}",
        scratch.read("shards/config.yaml")
    );
    let line = format!("{SFT} --output_dir other --max_shard_size");
    scratch.refuses(&format!("{line} much"), 2, &["'much'", "--max_shard_size <SIZE>", "5GB or 500MB"]);
}

/// The dtypes of the tensors in a model's folder, and that in its configuration.
fn saved_dtypes(dir: &Path) -> (Vec<Kind>, Value) {
    let file = Checkpoint::open(dir).unwrap();
    let mut kinds: Vec<Kind> = file.names().filter_map(|name| file.kind_of(name)).collect();
    kinds.dedup();
    let config = crate::support::read_json(&dir.join("config.json"));
    let named = config.get("dtype").or_else(|| config.get("torch_dtype"));
    (kinds, named.cloned().unwrap_or_default())
}

/// Checks that the weights in `found` are those in `exact`, rounded to `kind`.
#[track_caller]
fn assert_rounded(found: &Path, exact: &Path, kind: Kind, name: &str) {
    assert_eq!(saved_dtypes(found), (vec![kind], json!(name)), "{}", found.display());
    let (found, exact) = (Checkpoint::open(found).unwrap(), Checkpoint::open(exact).unwrap());
    assert_eq!(found.names().count(), exact.names().count());
    for name in exact.names() {
        let expected = exact.read_stored(name, Device::Cpu).unwrap().to_kind(kind);
        assert!(found.read_stored(name, Device::Cpu).unwrap().equal(&expected), "{name}");
    }
}

#[test]
fn final_and_best_models_have_the_given_dtype_and_checkpoints_the_bits_of_the_training() {
    let scratch = Scratch::new();
    for (name, line, metric, folders) in [
        ("sft", SFT, "loss", &[""][..]),
        ("reward", REWARD, "loss", &[""]),
        ("ppo", PPO, "objective/scores", &["", "value_model"]),
    ] {
        let line = format!("{line} --learning_rate 1e-3 --save_steps 1 --metric_for_best_model {metric}");
        let path = |out: &str, folder: &str| scratch.path(&format!("{name}-{out}")).join(folder);
        scratch.succeeds(&format!("{line} --output_dir {name}-exact"));
        scratch.succeeds(&format!("{line} --output_dir {name}-rounded --save_dtype bfloat16"));
        // A resumed run may save in another dtype.
        scratch.succeeds(&format!(
            "{line} --output_dir {name}-resumed --save_dtype float16 --resume_from_checkpoint {name}-rounded/checkpoint-1"
        ));
        for folder in folders {
            let exact = path("exact", folder);
            assert_eq!(saved_dtypes(&exact), (vec![Kind::Float], json!("float32")), "{name}");
            assert_rounded(&path("rounded", folder), &exact, Kind::BFloat16, "bfloat16");
            assert_rounded(&path("resumed", folder), &exact, Kind::Half, "float16");
            let (best, checkpoint) = (format!("best/{folder}"), format!("checkpoint-2/{folder}"));
            assert_rounded(&path("rounded", &best), &path("exact", &best), Kind::BFloat16, "bfloat16");
            for out in ["rounded", "resumed"] {
                assert_eq!(tensors(&path(out, &checkpoint)), tensors(&path("exact", &checkpoint)), "{name}");
            }
        }
    }
    let adapter = format!("{SFT} --use_peft --output_dir lora");
    scratch.refuses(
        &format!("{adapter} --save_dtype bfloat16"),
        2,
        &["save_dtype = bfloat16 has no effect with use_peft = true: adapters are saved in float32"],
    );
    scratch.succeeds(&adapter);
    let merge = "merge --model_name_or_path lora --output_dir";
    scratch.succeeds(&format!("{merge} merged"));
    scratch.succeeds(&format!("{merge} small --save_dtype bfloat16"));
    assert_rounded(&scratch.path("small"), &scratch.path("merged"), Kind::BFloat16, "bfloat16");
}

#[test]
fn numbers_that_float16_does_not_hold_are_not_saved_in_it() {
    let out = tempfile::tempdir().unwrap();
    let model = CausalLm::from_pretrained(&golden().join("models/gpt2"), AUTO).unwrap();
    let weight = model.params().iter().find(|param| param.name.contains("c_fc.weight")).unwrap();
    let _ = weight.tensor.get(1).narrow(0, 2, 1).fill_(1e5);
    let save = |dtype| model.save_pretrained_as(out.path(), &[0], None, usize::MAX, dtype);
    let error = save(Dtype::Float16).unwrap_err().to_string();
    assert!(error.contains(&format!("tensor `{}`: expected numbers up to 65504", weight.name)), "{error}");
    assert!(!out.path().join("config.json").exists());
    save(Dtype::BFloat16).unwrap();
    assert_eq!(saved_dtypes(out.path()), (vec![Kind::BFloat16], json!("bfloat16")));
}

#[test]
fn a_finished_run_whose_model_the_given_dtype_does_not_hold_is_saved_as_it_is_with_a_warning() {
    let scratch = Scratch::new();
    let model = CausalLm::from_pretrained(&scratch.path("policy"), AUTO).unwrap();
    let embedding = model.params().iter().find(|param| param.embedding).unwrap();
    let _ = embedding.tensor.get(-1).narrow(0, 0, 1).fill_(1e5);
    model.save_pretrained(&scratch.path("policy"), &[0], None, usize::MAX).unwrap();
    let ran = scratch.run(&format!("{SFT} --learning_rate 0 --save_dtype float16"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let warning = format!("save_dtype = float16: tensor `{}`: expected numbers up to 65504", embedding.name);
    assert!(ran.stderr.contains(&warning) && ran.stderr.contains("saved as with save_dtype = auto"), "{}", ran.stderr);
    assert_eq!(saved_dtypes(&scratch.path("out")), (vec![Kind::Float], json!("float32")));
}

#[test]
fn commands_hold_the_model_in_the_given_dtype() {
    let scratch = Scratch::new();
    narrow(&scratch, "policy");
    let line = "logprobs --model policy --dataset_name demos.jsonl";
    let rows = |dtype: &str| scratch.succeeds(&format!("{line} --dtype {dtype}"));
    assert_eq!(rows("auto"), rows("bfloat16"));
    assert_ne!(rows("auto"), rows("float32"));
    assert_ne!(rows("float16"), rows("float32"));
    let words = ["'int8'", "--dtype <NAME>", "auto, float32, bfloat16, float16"];
    scratch.refuses(&format!("{line} --dtype int8"), 2, &words);
}

#[test]
fn a_gpu_that_is_not_there_is_refused_with_what_is_missing_and_auto_does_without() {
    let scratch = Scratch::new();
    for line in [
        PPO.to_string(),
        SFT.to_string(),
        "score --model reward --dataset_name demos.jsonl".to_string(),
        "generate --model policy --dataset_name prompts.jsonl".to_string(),
    ] {
        // On a machine with a GPU the number is too large; without one a library, the driver or the GPU is missing.
        let ran = scratch.run(&format!("{line} --device cuda:99"));
        let one_line = ran.stderr.starts_with("error: device = cuda:99: ") && ran.stderr.lines().count() == 1;
        assert!(ran.code == 2 && one_line && !scratch.path("out").exists(), "{line}: {}", ran.stderr);
        scratch.refuses(
            &format!("{line} --device tpu"),
            2,
            &["'tpu'", "--device <DEVICE>", "auto, cpu, cuda or cuda:N"],
        );
    }
    let scores =
        |device: &str| scratch.succeeds(&format!("score --model reward --dataset_name demos.jsonl --device {device}"));
    if !Path::new("/dev/nvidiactl").exists() {
        assert_eq!(scores("auto"), scores("cpu"));
    }
}
