//! Quantized weights against bitsandbytes, transformers and PEFT (`tests/golden/quantized`), and their files.

use crate::attack::folders::{Dice, mutate_text};
use crate::cli::{PPO, REWARD, SFT, Scratch};
use crate::lora::{TOLERANCE, bits, config, stir};
use crate::support::{Tensors, assert_close, golden, near, read_json};
use rlhf::model::{CausalLm, Dtype, ModelOptions, Param, Precision, QuantType, Quantization, SequenceClassifier};
use rlhf::optim::{Optimizer, OptimizerConfig};
use rlhf::settings::SftConfig;
use rlhf::weights::{Checkpoint, save};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

const NF4: Quantization = Quantization::FourBit { quant_type: QuantType::Nf4, nested: true };
const FP4: Quantization = Quantization::FourBit { quant_type: QuantType::Fp4, nested: false };
const MODELS: [(&str, Quantization); 3] =
    [("llama_nf4", NF4), ("gpt2_fp4", FP4), ("llama_int8", Quantization::EightBit)];

fn folder(name: &str) -> PathBuf {
    golden().join("quantized").join(name)
}

/// The folder that `key` of a golden model's `info.json` names.
fn named(name: &str, key: &str) -> PathBuf {
    golden().join(read_json(&folder(name).join("info.json"))[key].as_str().unwrap())
}

fn open(name: &str) -> CausalLm {
    CausalLm::from_pretrained(&folder(name), ModelOptions::default()).unwrap()
}

/// The model of `name` in full precision, quantized while it is loaded.
fn quantized(name: &str, format: Quantization) -> CausalLm {
    let options = ModelOptions { quantization: Some(format), ..ModelOptions::default() };
    CausalLm::from_pretrained(&named(name, "base"), options).unwrap()
}

fn rows(name: &str) -> Vec<Vec<i64>> {
    Tensors::read(&named(name, "base").join("golden.safetensors")).rows("unpadded.input_ids")
}

fn assert_logits(name: &str, what: &str, model: &CausalLm) {
    let golden = Tensors::read(&folder(name).join("golden.safetensors"));
    let part = golden.part(what);
    for (i, logits) in model.logits(&rows(name)).unwrap().iter().enumerate() {
        assert_close(&format!("{name}: {what}"), &part.select(logits), &part.tensor.get(i as i64), TOLERANCE);
    }
}

fn assert_same(name: &str, found: &[Param], expected: &[Param]) {
    let (found, expected) = (bits(found), bits(expected));
    let names = |params: &[(String, Tensor)]| params.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected), "{name}");
    for ((param, found), (_, expected)) in found.iter().zip(&expected) {
        assert!(found.kind() == expected.kind() && found.equal(expected), "{name}: {param}");
    }
}

#[test]
fn checkpoints_of_bitsandbytes_open_with_transformers_logits_and_are_what_rlhf_makes_of_the_weights() {
    for (name, format) in MODELS {
        let opened = open(name);
        assert_eq!(opened.quantization(), Some(format));
        assert_logits(name, "logits", &opened);
        let made = quantized(name, format);
        assert_same(name, made.params(), opened.params());
        assert_logits(name, "logits", &made);
    }
}

#[test]
fn qloras_logits_gradients_and_optimizer_steps_are_pefts() {
    for (name, _) in MODELS {
        let golden = Tensors::read(&folder(name).join("golden.safetensors"));
        let mut model = open(name);
        model.load_adapter(&named(name, "lora")).unwrap();
        assert_logits(name, "adapted.logits", &model);
        model.set_trainable(true);
        let usual = SftConfig::new("m", "d", "o").optimizer;
        let settings = OptimizerConfig { weight_decay: 0.0, max_grad_norm: None, ..usual };
        let mut optimizer = Optimizer::new(model.trainable_params(), &settings);
        let rows = rows(name);
        let spans: Vec<_> = rows.iter().map(|row| 1..row.len()).collect();
        let stored =
            |param: &Param, what: &str| golden.get(&format!("{what}.base_model.model.{}", param.name)).shallow_clone();
        for step in 0..2 {
            let loss = -model.token_logprobs(&rows, &spans, 1.0, false).unwrap().logprobs.sum(Kind::Float);
            let expected = golden.get("losses").double_value(&[step]);
            near(&format!("{name}: loss {step}"), loss.double_value(&[]), expected, 1e-4);
            loss.backward();
            for param in model.trainable_params().filter(|_| step == 0) {
                let expected = stored(param, "grad");
                let most = expected.abs().max().double_value(&[]);
                assert_close(&format!("{name}: {}", param.name), &param.tensor.grad(), &expected, 2e-5 * most.max(1.0));
            }
            assert!(model.params().iter().all(|p| p.tensor.requires_grad() || !p.tensor.grad().defined()));
            optimizer.step(1e-2).unwrap();
            optimizer.zero_grad();
        }
        for param in model.trainable_params() {
            assert_close(&format!("{name}: {}", param.name), &param.tensor, &stored(param, "after"), 1e-4);
        }
    }
}

#[test]
fn a_quantized_model_is_saved_as_it_was_read() {
    for (name, format) in MODELS {
        for model in [open(name), quantized(name, format)] {
            let out = tempfile::tempdir().unwrap();
            model.save_pretrained(out.path(), &[], None, usize::MAX).unwrap();
            let saved = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
            assert_same(name, saved.params(), model.params());
            let described = |dir: &Path| read_json(&dir.join("config.json"))["quantization_config"].clone();
            assert_eq!(described(out.path()), described(&folder(name)), "{name}");
        }
    }
}

#[test]
fn the_mlp_of_a_layer_without_experts_is_quantized_and_experts_and_routers_are_not() {
    for format in [NF4, Quantization::EightBit] {
        let options = ModelOptions { quantization: Some(format), ..ModelOptions::default() };
        let model = CausalLm::from_pretrained(&golden().join("models/qwen3_moe"), options).unwrap();
        let is_quantized = |name: &str| {
            let param = model.params().iter().find(|param| param.name == format!("model.layers.{name}.weight"));
            matches!(param.unwrap().tensor.kind(), Kind::Uint8 | Kind::Int8)
        };
        for name in ["0.mlp.gate_proj", "0.mlp.up_proj", "0.mlp.down_proj", "1.self_attn.q_proj"] {
            assert!(is_quantized(name), "{format:?}: {name}");
        }
        for name in ["1.mlp.gate", "1.mlp.experts.0.gate_proj", "1.mlp.experts.3.down_proj"] {
            assert!(!is_quantized(name), "{format:?}: {name}");
        }
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[], None, usize::MAX).unwrap();
        let saved = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
        assert_same("qwen3_moe", saved.params(), model.params());
    }
}

#[test]
fn a_merged_adapter_is_quantized_again_as_peft_does() {
    for (name, format) in MODELS {
        let mut model = open(name);
        let before = bits(model.params());
        model.add_adapter(&config(), 1).unwrap();
        stir(model.params());
        let adapted = model.logits(&rows(name)).unwrap();
        model.merge_adapter();
        assert_eq!(model.quantization(), Some(format));
        let changed = bits(model.params()).iter().zip(&before).filter(|((_, a), (_, b))| !a.equal(b)).count();
        assert!(changed > 0, "{name}");
        // Quantized again, so it is near and not the same.
        for (merged, adapted) in model.logits(&rows(name)).unwrap().iter().zip(&adapted) {
            let gap = (merged - adapted).abs().mean(Kind::Float).double_value(&[]);
            assert!(gap > 0.0 && gap < adapted.abs().mean(Kind::Float).double_value(&[]), "{name}: {gap}");
        }
    }
}

#[test]
fn codes_of_a_merged_adapter_are_pefts() {
    for (name, format) in MODELS {
        let golden = Tensors::read(&folder(name).join("golden.safetensors"));
        for (dtype, prefix) in [(Dtype::Float32, "merged.float32."), (Dtype::BFloat16, "merged.bfloat16.")] {
            let options = ModelOptions { quantization: Some(format), dtype, ..ModelOptions::default() };
            let mut model = CausalLm::from_pretrained(&named(name, "base"), options).unwrap();
            model.load_adapter(&named(name, "lora")).unwrap();
            model.merge_adapter();
            let mut compared = 0;
            for (param, found) in bits(model.params()) {
                if let Some(expected) = golden.find(&format!("{prefix}{param}")) {
                    let found = found.view_dtype(Kind::Uint8).view([-1]);
                    assert!(found.equal(&expected.view_dtype(Kind::Uint8).view([-1])), "{name}: {prefix}{param}");
                    compared += 1;
                }
            }
            assert!(compared >= 4, "{name}: {prefix}: {compared} weights");
        }
    }
}

#[test]
fn plain_tensors_beside_quantized_weights_are_saved_in_one_dtype() {
    for (name, _) in MODELS {
        let mut model = CausalLm::from_pretrained(
            &folder(name),
            ModelOptions { precision: Precision::Bf16, ..ModelOptions::default() },
        )
        .unwrap();
        model.hold_as_computed();
        let kinds_in = |dir: &Path| -> BTreeSet<String> {
            let saved = Checkpoint::open(dir).unwrap();
            let is_plain = |name: &&str| !name.contains("quant") && !name.contains("absmax") && !name.ends_with("SCB");
            // Codes have no dtype of weights.
            let kinds = saved.names().filter(is_plain).filter_map(|name| saved.kind_of(name));
            kinds.map(|kind| format!("{kind:?}")).collect()
        };
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[], None, usize::MAX).unwrap();
        assert_eq!(kinds_in(out.path()).len(), 1, "{name}: {:?}", kinds_in(out.path()));
        let saved = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
        let [found, expected] = [&saved, &model].map(|model| model.logits(&rows(name)).unwrap());
        // Computed in f32 from the saved numbers, and in bf16.
        for (found, expected) in found.iter().zip(&expected) {
            let gap = (found - expected).abs().mean(Kind::Float).double_value(&[]);
            assert!(gap < 0.05 * expected.abs().mean(Kind::Float).double_value(&[]), "{name}: {gap}");
        }
    }
}

#[test]
fn a_head_that_a_list_of_spared_layers_leaves_out_is_read() {
    for name in ["llama_nf4", "llama_int8"] {
        let (dir, plain) = (tempfile::tempdir().unwrap(), open(name));
        let source = Checkpoint::open(&folder(name)).unwrap();
        let mut tensors: Vec<(String, Tensor)> = source
            .names()
            .map(|tensor| (tensor.to_string(), source.read_stored(tensor, Device::Cpu).unwrap()))
            .collect();
        let head = tensors.iter().position(|(tensor, _)| tensor == "lm_head.weight").unwrap();
        let (_, weight) = tensors.remove(head);
        // Codes of 8 bits by hand: rows of whole numbers, whose greatest is 127 times the scale.
        let tops = weight.abs().amax([1i64].as_slice(), true);
        let codes = (&weight / &tops * 127.0).round();
        let read = &codes * &tops / 127.0;
        tensors.push(("lm_head.weight".into(), codes.to_kind(Kind::Int8)));
        tensors.push(("lm_head.SCB".into(), tops.squeeze_dim(1)));
        tensors.push(("lm_head.weight_format".into(), Tensor::from(0u8)));
        save(dir.path(), &tensors, usize::MAX).unwrap();
        std::fs::copy(folder(name).join("config.json"), dir.path().join("config.json")).unwrap();
        let found = CausalLm::from_pretrained(dir.path(), ModelOptions::default()).unwrap();
        let head = found.params().iter().find(|param| param.name == "lm_head.weight").unwrap();
        assert_close(name, &head.tensor.detach(), &read, 1e-6);
        for (found, plain) in found.logits(&rows(name)).unwrap().iter().zip(plain.logits(&rows(name)).unwrap()) {
            let gap = (found - &plain).abs().max().double_value(&[]);
            assert!(gap > 0.0 && gap < 0.05 * plain.abs().max().double_value(&[]), "{name}: {gap}");
        }
        // A classifier of this body ignores it.
        SequenceClassifier::from_pretrained(dir.path(), Some(3), ModelOptions::default()).unwrap();
    }
}

#[test]
fn a_mask_in_bytes_does_not_pass_for_a_quantized_weight() {
    let dir = tempfile::tempdir().unwrap();
    let base = named("gpt2_fp4", "base");
    std::fs::copy(base.join("config.json"), dir.path().join("config.json")).unwrap();
    let source = Checkpoint::open(&base).unwrap();
    let mut tensors: Vec<(String, Tensor)> =
        source.names().map(|name| (name.to_string(), source.read_stored(name, Device::Cpu).unwrap())).collect();
    tensors.push(("transformer.h.0.attn.bias".into(), Tensor::ones([1, 1, 8, 8], (Kind::Uint8, Device::Cpu))));
    save(dir.path(), &tensors, usize::MAX).unwrap();
    let options = ModelOptions { quantization: Some(FP4), ..ModelOptions::default() };
    let model = CausalLm::from_pretrained(dir.path(), options).unwrap();
    assert_same("gpt2_fp4", model.params(), quantized("gpt2_fp4", FP4).params());
}

#[test]
fn a_model_without_quantized_weights_is_not_described_as_quantized() {
    let dir = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "config.json"] {
        std::fs::copy(named("llama_nf4", "base").join(file), dir.path().join(file)).unwrap();
    }
    let mut config = read_json(&dir.path().join("config.json"));
    config["quantization_config"] = read_json(&folder("llama_nf4").join("config.json"))["quantization_config"].clone();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let (model, out) =
        (CausalLm::from_pretrained(dir.path(), ModelOptions::default()).unwrap(), tempfile::tempdir().unwrap());
    assert_eq!(model.quantization(), None);
    model.save_pretrained(out.path(), &[], None, usize::MAX).unwrap();
    assert!(read_json(&out.path().join("config.json")).get("quantization_config").is_none());
}

#[test]
fn a_view_and_a_bf16_pass_of_a_quantized_model_have_its_numbers() {
    for (name, _) in MODELS {
        let mut model = open(name);
        let expected = model.logits(&rows(name)).unwrap();
        model.add_adapter(&config(), 1).unwrap();
        stir(model.params());
        for (found, expected) in model.base().unwrap().logits(&rows(name)).unwrap().iter().zip(&expected) {
            assert!(found.equal(expected), "{name}");
        }
        // A pass in bf16 is as far from one in f32 as that of the model in full precision.
        let off = |dir: &Path| {
            let logits = |precision| {
                let options = ModelOptions { precision, ..ModelOptions::default() };
                Tensor::cat(&CausalLm::from_pretrained(dir, options).unwrap().logits(&rows(name)).unwrap(), 0)
            };
            (logits(Precision::Bf16) - logits(Precision::F32)).norm().double_value(&[])
        };
        let (found, expected) = (off(&folder(name)), off(&named(name, "base")));
        assert!(found < 1.5 * expected, "{name}: off by {found}, in full precision by {expected}");
    }
}

#[test]
fn damaged_quantized_files_are_one_line_and_no_panic() {
    let (mut dice, mut refused) = (Dice(20), 0);
    for (name, _) in MODELS {
        let whole = std::fs::read(folder(name).join("model.safetensors")).unwrap();
        let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let text = std::fs::read(folder(name).join("config.json")).unwrap();
        for round in 0..60 {
            let scratch = tempfile::tempdir().unwrap();
            let (mut bytes, mut config) = (whole.clone(), text.clone());
            match round % 3 {
                // The header keeps its length, so that more than the length is checked.
                0 => {
                    let mut changed = bytes[8..header].to_vec();
                    mutate_text(&mut changed, &mut dice);
                    changed.resize(header - 8, b' ');
                    bytes[8..header].copy_from_slice(&changed);
                }
                1 => (0..40).for_each(|_| {
                    let at = header + dice.roll(whole.len() - header);
                    bytes[at] = dice.roll(256) as u8;
                }),
                _ => mutate_text(&mut config, &mut dice),
            }
            std::fs::write(scratch.path().join("model.safetensors"), bytes).unwrap();
            std::fs::write(scratch.path().join("config.json"), config).unwrap();
            if let Err(error) = CausalLm::from_pretrained(scratch.path(), ModelOptions::default()) {
                let error = error.to_string();
                assert!(!error.contains('\n') && error.len() < 1000, "{name}: {error}");
                refused += 1;
            }
        }
    }
    assert!(refused > 60, "{refused} of 180");
}

#[test]
fn each_part_of_a_quantized_weight_is_checked() {
    let state = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4";
    let weight = "model.layers.0.mlp.up_proj.weight";
    let text = |text: &str| Some(Tensor::from_slice(text.as_bytes()));
    let cases = [
        (format!("{weight}.absmax"), None, "up_proj.weight.absmax`: expected a part of a quantized weight, found none"),
        (
            format!("{weight}.absmax"),
            Some(Tensor::zeros([3], (Kind::Uint8, Device::Cpu))),
            "expected Uint8 [32], found Uint8 [3]",
        ),
        (state.into(), None, "expected that of a weight in 4 bits, found none"),
        (state.into(), text("{"), "expected JSON"),
        (
            state.into(),
            text(r#"{"quant_type": "nf4", "blocksize": 63, "dtype": "float32", "shape": [64, 32]}"#),
            "`blocksize`: expected a power of two from 32 to 4096, found 63",
        ),
        (
            state.into(),
            text(r#"{"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [32, 64]}"#),
            "expected nf4 of [64, 32], found nf4 of [32, 64]",
        ),
        (
            state.into(),
            text(
                r#"{"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [64, 32], "nested_blocksize": 256,
                "nested_offset": 1e39}"#,
            ),
            "`nested_offset`: expected a number of f32, found 1e+39",
        ),
        (
            format!("{weight}.nested_absmax"),
            Some(Tensor::from_slice(&[f32::INFINITY])),
            "model.safetensors: tensor `model.layers.0.mlp.up_proj.weight.nested_absmax`: expected finite numbers, found inf",
        ),
        (
            format!("{weight}.quant_map"),
            Some(Tensor::zeros([16], (Kind::Float, Device::Cpu))),
            "expected the values of nf4",
        ),
    ];
    for (name, new, says) in cases {
        let whole = Checkpoint::open(&folder("llama_nf4")).unwrap();
        let stored = |name: &str| (name.to_string(), whole.read_stored(name, Device::Cpu).unwrap());
        let kept = whole.names().filter(|known| *known != name).map(stored);
        let tensors: Vec<_> = kept.chain(new.map(|new| (name.clone(), new))).collect();
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(folder("llama_nf4").join("config.json"), dir.path().join("config.json")).unwrap();
        save(dir.path(), &tensors, usize::MAX).unwrap();
        let error = CausalLm::from_pretrained(dir.path(), ModelOptions::default()).unwrap_err().to_string();
        assert!(error.contains(says) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn a_scale_that_is_not_a_number_is_refused_in_every_format() {
    let scales = ["nested_absmax", "absmax", "SCB"];
    for ((name, _), scale) in MODELS.into_iter().zip(scales) {
        let whole = Checkpoint::open(&folder(name)).unwrap();
        let damaged = whole.names().find(|name| name.ends_with(&format!(".{scale}"))).unwrap();
        let tensors: Vec<_> =
            whole.names().map(|name| (name.to_string(), whole.read_stored(name, Device::Cpu).unwrap())).collect();
        let (_, tensor) = tensors.iter().find(|(name, _)| name == damaged).unwrap();
        let _ = tensor.get(0).fill_(f64::NAN);
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(folder(name).join("config.json"), dir.path().join("config.json")).unwrap();
        save(dir.path(), &tensors, usize::MAX).unwrap();
        let error = CausalLm::from_pretrained(dir.path(), ModelOptions::default()).unwrap_err().to_string();
        let says = format!("model.safetensors: tensor `{damaged}`: expected finite numbers, found NaN");
        assert!(error.contains(&says) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn runs_and_generation_take_quantized_bases_and_refuse_to_train_them() {
    let scratch = Scratch::new();
    for bits in ["--load_in_4bit --use_bnb_nested_quant", "--load_in_8bit"] {
        scratch.succeeds(&format!("{SFT} --use_peft {bits} --output_dir sft --overwrite_output_dir"));
        scratch.succeeds(&format!("{PPO} --use_peft {bits} --bf16 --output_dir ppo --overwrite_output_dir"));
        scratch.succeeds(&format!("{REWARD} --use_peft {bits} --output_dir judge --overwrite_output_dir"));
        scratch.succeeds(&format!(
            "generate --model_name_or_path sft --dataset_name prompts.jsonl --max_new_tokens 4 {bits}"
        ));
        for command in [SFT, REWARD, PPO] {
            let line = command.replace("--output_dir out", "--output_dir never");
            scratch.refuses(&format!("{line} {bits}"), 2, &["needs use_peft: quantized weights are frozen"]);
        }
    }
    let sft = SFT.replace("--output_dir out", "--output_dir never");
    scratch.refuses(&format!("{sft} --load_in_4bit --load_in_8bit --use_peft"), 2, &["exclude each other"]);
    scratch.refuses(&format!("{sft} --use_bnb_nested_quant"), 2, &["without load_in_4bit"]);
}

#[test]
fn adapters_on_a_quantized_base_train_with_recomputed_layers_a_value_head_and_dora() {
    let scratch = Scratch::new();
    for bits in ["--load_in_4bit --use_bnb_nested_quant", "--load_in_8bit"] {
        let train = |line: &str, flags: &str| {
            scratch.succeeds(&format!("{line} --use_peft {bits} {flags} --overwrite_output_dir"));
            std::fs::read(scratch.path("out/adapter_model.safetensors")).unwrap()
        };
        for flags in ["--lora_dropout 0.2", "--use_dora"] {
            assert!(train(SFT, flags) == train(SFT, &format!("{flags} --gradient_checkpointing")), "{bits} {flags}");
        }
        for flags in ["--value_head", "--value_head --use_dora", "--value_head --gradient_checkpointing"] {
            // A run in f32 that does not start with a ratio of 1 and a KL of 0 ends with an error.
            train(PPO, flags);
        }
    }
}

#[test]
fn a_quantized_folder_is_the_base_of_an_adapter_and_is_not_trained() {
    let scratch = Scratch::new();
    let options = ModelOptions { quantization: Some(NF4), ..ModelOptions::default() };
    let model = CausalLm::from_pretrained(&scratch.path("policy"), options).unwrap();
    model.save_pretrained(&scratch.path("policy"), &[0], None, usize::MAX).unwrap();
    let sft = SFT.replace("--output_dir out", "--output_dir sft");
    scratch.refuses(&sft, 2, &["the weights are quantized", "use_peft"]);
    scratch.succeeds(&format!("{sft} --use_peft"));
    // Merged into the quantized base, and the base of the next adapter.
    scratch.succeeds("merge --model sft --output_dir merged");
    let merged = CausalLm::from_pretrained(&scratch.path("merged"), ModelOptions::default()).unwrap();
    assert_eq!(merged.quantization(), Some(NF4));
    let ran = scratch.run(&format!("{PPO} --sft_model_path sft --use_peft"));
    assert_eq!((ran.code, ran.stderr.lines().count()), (0, 1), "{}", ran.stderr);
    let warning = "warning: sft: its adapter was merged into weights that the files of its base hold quantized";
    assert!(ran.stderr.starts_with(warning), "{}", ran.stderr);
    let found = CausalLm::from_pretrained(&scratch.path("out"), ModelOptions::default()).unwrap();
    assert_eq!((found.quantization(), found.has_adapter()), (Some(NF4), true));
}
