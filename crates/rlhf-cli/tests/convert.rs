//! `rlhf convert`: GGUF files that the `gguf` package wrote, against its numbers and transformers' logits.

mod families;

use crate::cli::Scratch;
use crate::support::{Tensors, assert_close, golden, read_json};
use rlhf::convert::convert;
use rlhf::gguf::{Gguf, GgufTensor, Stored, TensorType, Value as GgufValue, write};
use rlhf::model::{CausalLm, Dtype, ModelOptions};
use rlhf::settings::{ConvertConfig, GgufType};
use rlhf::tokenizer::Tokenizer;
use rlhf::weights::Checkpoint;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

/// The files, with the number of types that they have sampled tensors of.
const FILES: [(&str, usize); 22] = [
    ("llama", 7),
    ("llama3", 2),
    ("qwen2", 2),
    ("qwen3", 2),
    ("smollm3", 2),
    ("olmo2", 2),
    ("granite", 2),
    ("lfm2", 2),
    ("k_quants", 10),
    ("qwen35", 2),
    ("gemma3", 2),
    ("gemma2", 2),
    ("mistral3", 2),
    ("qwen3moe", 2),
    ("gpt-oss", 3),
    ("gemma4", 2),
    ("gemma4_moe", 2),
    ("qwen35moe", 2),
    ("qwen3next", 2),
    ("lfm2moe", 2),
    ("olmo3", 2),
    ("mixtral", 2),
];

/// The architectures, as errors list them.
const ARCHITECTURES: &str = "llama, qwen2, qwen3, qwen3moe, qwen3next, qwen35, qwen35moe, smollm3, olmo2, granite, \
                             lfm2, lfm2moe, gemma2, gemma3, gemma4, gpt-oss or mistral3";

/// The end of the name of a part of `k_quants`.
fn part(number: usize) -> String {
    format!("-{number:05}-of-00003.gguf")
}

fn file(name: &str) -> PathBuf {
    let end = if name == "k_quants" { part(1) } else { ".gguf".into() };
    golden().join("gguf").join(format!("{name}{end}"))
}

fn values(name: &str) -> Tensors {
    Tensors::read(&golden().join("gguf").join(format!("{name}.safetensors")))
}

/// The error of converting a file with these bytes; nothing is written.
#[track_caller]
fn refused(bytes: &[u8]) -> String {
    let scratch = tempfile::tempdir().unwrap();
    let (from, out) = (scratch.path().join("model.gguf"), scratch.path().join("out"));
    std::fs::write(&from, bytes).unwrap();
    let error = convert(&ConvertConfig::new(&from, &out)).unwrap_err().to_string();
    assert!(!out.exists(), "{error}");
    assert!(error.contains("model.gguf: ") && !error.contains('\n'), "{error}");
    error
}

/// The bytes of a file with `new`, of the same length, in place of the first `old`.
fn replaced(name: &str, old: &[u8], new: &[u8]) -> Vec<u8> {
    let mut bytes = std::fs::read(file(name)).unwrap();
    let at = bytes.windows(old.len()).position(|part| part == old).unwrap();
    bytes[at..at + old.len()].copy_from_slice(new);
    bytes
}

/// The bytes of `llama.gguf` with 4 bytes replaced at `offset` after the tensor's name.
fn with_tensor(tensor: &str, offset: usize, number: u32) -> Vec<u8> {
    let mut bytes = std::fs::read(file("llama")).unwrap();
    let name = tensor.as_bytes();
    let at = bytes.windows(name.len()).position(|part| part == name).unwrap() + name.len() + offset;
    bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
    bytes
}

#[test]
fn a_converted_model_has_the_numbers_of_the_gguf_package_and_the_logits_of_transformers() {
    for (name, types) in FILES {
        let scratch = tempfile::tempdir().unwrap();
        let out = scratch.path().join("out");
        let report = convert(&ConvertConfig::new(file(name), &out)).unwrap();
        let golden = values(name);
        let model = CausalLm::from_pretrained(&out, ModelOptions::default()).unwrap();
        assert_eq!(report.tensors, model.params().len(), "{name}");
        let checkpoint = Checkpoint::open(&out).unwrap();
        let mut kinds = 0;
        for stored in golden.names().filter(|stored| !["input_ids", "logits"].contains(stored)) {
            let stored = stored.strip_suffix("[::7]").unwrap_or(stored);
            let (kind, tensor) = stored.split_once('.').unwrap();
            let found = checkpoint.read(tensor, Device::Cpu, Kind::Float).unwrap();
            let part = golden.part(stored);
            // To the bit: products and a sum of f32.
            assert_eq!(part.select(&found), *part.tensor, "{name}: {kind}, {tensor}");
            kinds += 1;
        }
        assert_eq!(kinds, types, "{name}");
        let ids = golden.rows("input_ids");
        let logits = golden.get("logits").get(0);
        let scale = logits.abs().max().double_value(&[]).max(1.0);
        assert_close(name, &model.logits(&ids).unwrap()[0], &logits, 2e-5 * scale);
    }
}

#[test]
fn a_file_made_of_a_converted_folder_has_the_metadata_of_the_first_and_becomes_the_same_folder() {
    let texts = read_json(&golden().join("gguf/texts.json"));
    for (name, _) in FILES {
        let scratch = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| scratch.path().join(name));
        let made = scratch.path().join("made.gguf");
        convert(&ConvertConfig::new(file(name), &first)).unwrap();
        let outtype = GgufType::F32;
        let report = convert(&ConvertConfig { outtype, ..ConvertConfig::export(&first, &made) }).unwrap();
        let [source, written] = [file(name), made.clone()].map(|path| Gguf::open(&path).unwrap());
        assert_eq!(report.tensors, written.tensors().len(), "{name}");
        assert_eq!(written.tensors().keys().collect::<Vec<_>>(), source.tensors().keys().collect::<Vec<_>>(), "{name}");
        for (key, value) in source.metadata() {
            // The files of these tests are split, and have scores of SentencePiece.
            if !key.starts_with("split.") && !key.ends_with(".scores") && !key.ends_with(".file_type") {
                assert_eq!(written.metadata().get(key), Some(value), "{name}: {key}");
            }
        }
        convert(&ConvertConfig::new(&made, &second)).unwrap();
        let [config, again] = [&first, &second].map(|dir| std::fs::read(dir.join("config.json")).unwrap());
        assert!(config == again, "{name}: config.json");
        let [source, again] = [&first, &second].map(|dir| Checkpoint::open(dir).unwrap());
        for name in source.names() {
            let [expected, found] = [&source, &again].map(|from| from.read(name, Device::Cpu, Kind::Float).unwrap());
            // A logarithm and back is rounded.
            let allowed = if name.ends_with(".A_log") { 1e-6 } else { 0.0 };
            assert_close(name, &found, &expected, allowed);
        }
        for case in texts[name].as_array().into_iter().flatten() {
            let text = case["text"].as_str().unwrap();
            let [first, second] =
                [&first, &second].map(|dir| Tokenizer::from_pretrained(dir).unwrap().encode(text).unwrap());
            assert_eq!(first, second, "{name}: {text:?}");
        }
    }
}

#[test]
fn weights_of_a_file_are_within_the_rounding_of_its_type() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("folder");
    convert(&ConvertConfig::new(file("qwen3"), &folder)).unwrap();
    let model = CausalLm::from_pretrained(&folder, ModelOptions::default()).unwrap();
    for (outtype, name) in [(GgufType::F16, "f16"), (GgufType::Bf16, "bf16"), (GgufType::Q8_0, "q8_0")] {
        let [made, again] = [format!("{name}.gguf"), name.to_string()].map(|name| scratch.path().join(name));
        convert(&ConvertConfig { outtype, ..ConvertConfig::export(&folder, &made) }).unwrap();
        convert(&ConvertConfig::new(&made, &again)).unwrap();
        let found = CausalLm::from_pretrained(&again, ModelOptions::default()).unwrap();
        for (param, found) in model.params().iter().zip(found.params()) {
            let (exact, found) = (&param.tensor, &found.tensor);
            let rounded = match outtype {
                _ if exact.dim() == 1 => exact.shallow_clone(),
                GgufType::F16 => exact.to_kind(Kind::Half).to_kind(Kind::Float),
                GgufType::Bf16 => exact.to_kind(Kind::BFloat16).to_kind(Kind::Float),
                GgufType::F32 | GgufType::Q4KM => unreachable!("no type of the loop"),
                GgufType::Q8_0 => {
                    // Half a step of a block, and the rounding of its scale to f16.
                    let most = exact.reshape([-1, 32]).abs().amax([1i64].as_slice(), true);
                    let gap = (exact - found).abs().reshape([-1, 32]);
                    let allowed = most * (0.5 / 127.0 + 1.0 / 2048.0) + 1e-7;
                    assert!(bool::try_from(gap.le_tensor(&allowed).all()).unwrap(), "{name}: {}", param.name);
                    assert_ne!(exact, found, "{name}: {}", param.name);
                    continue;
                }
            };
            assert_eq!(&rounded, found, "{name}: {}", param.name);
        }
    }
}

#[test]
fn a_file_of_mostly_four_bits_mixes_types_as_llama_quantize_and_has_numbers_near_its_source() {
    let scratch = tempfile::tempdir().unwrap();
    let [folder, made, again] = ["folder", "made.gguf", "again"].map(|name| scratch.path().join(name));
    convert(&ConvertConfig::new(file("k_quants"), &folder)).unwrap();
    let outtype = GgufType::Q4KM;
    convert(&ConvertConfig { outtype, ..ConvertConfig::export(&folder, &made) }).unwrap();
    let written = Gguf::open(&made).unwrap();
    assert_eq!(written.integer("general.file_type").unwrap(), Some(15));
    // Of five layers the third and the last have more bits; rows of 32 numbers are no whole blocks of 256.
    for (name, kind) in [
        ("blk.0.ffn_down.weight", TensorType::Q4K),
        ("blk.2.ffn_down.weight", TensorType::Q6K),
        ("blk.3.ffn_down.weight", TensorType::Q4K),
        ("blk.4.ffn_down.weight", TensorType::Q6K),
        ("blk.1.attn_v.weight", TensorType::Q5_0),
        ("blk.2.attn_v.weight", TensorType::Q8_0),
        ("blk.2.ffn_up.weight", TensorType::Q5_0),
        ("token_embd.weight", TensorType::Q8_0),
        ("blk.0.attn_norm.weight", TensorType::F32),
    ] {
        assert_eq!(written.tensors()[name].kind, kind, "{name}");
    }
    convert(&ConvertConfig::new(&made, &again)).unwrap();
    let [source, found] = [&folder, &again].map(|dir| CausalLm::from_pretrained(dir, ModelOptions::default()).unwrap());
    for (param, found) in source.params().iter().zip(found.params()) {
        let (exact, found) = (&param.tensor, &found.tensor);
        let gap = f64::try_from((exact - found).norm() / exact.norm()).unwrap();
        assert!(gap < if exact.dim() == 1 { 1e-6 } else { 0.12 }, "{}: {gap}", param.name);
    }
}

#[test]
fn what_no_gguf_file_can_be_made_of_is_refused_and_no_file_is_left() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out.gguf");
    let models = golden().join("models");
    for (config, message) in [
        (
            ConvertConfig::export(models.join("gpt2"), &out),
            "expected a model of type mixtral, llama, mistral, qwen2, qwen3, qwen3_moe, qwen3_next, qwen3_5_text, qwen3_5_moe_text, smollm3, \
             olmo3, olmo2, granite, lfm2, lfm2_moe, gemma2, gemma3_text, gemma4_text, gpt_oss or ministral3, found `gpt2`",
        ),
        (ConvertConfig::export(golden().join("lora/llama_untied"), &out), "found an adapter; `rlhf merge`"),
        (
            ConvertConfig::export(models.join("llama_dynamic"), &out),
            "expected a rope type that llama.cpp's files can state",
        ),
        (
            ConvertConfig { output_file: Some(out.clone()), ..ConvertConfig::new("a.gguf", "b") },
            "output_file: expected no output folder beside it, found b",
        ),
        (ConvertConfig { output_dir: None, ..ConvertConfig::new("a.gguf", "b") }, "expected the output folder"),
    ] {
        let error = convert(&config).unwrap_err().to_string();
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
        assert!(!out.exists());
    }
    std::fs::write(&out, "a").unwrap();
    let error = convert(&ConvertConfig::export(models.join("llama_untied"), &out)).unwrap_err().to_string();
    assert!(error.ends_with("out.gguf: expected a new file, found one"), "{error}");
    assert_eq!(std::fs::read(&out).unwrap(), b"a");
}

/// The keys of `architecture` in the file at `path`, without the prefix.
fn keys_of(path: &Path, architecture: &str) -> Vec<(String, GgufValue)> {
    let prefix = format!("{architecture}.");
    let file = Gguf::open(path).unwrap();
    let keys = file.metadata().iter().filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?, value)));
    keys.map(|(key, value)| (key.to_string(), value.clone())).collect()
}

/// The keys by llama.cpp's converter (`set_gguf_parameters` of these families), in the order of their names.
#[test]
fn newer_families_have_the_keys_of_llama_cpps_converter_and_no_others() {
    let size = GgufValue::Integer;
    let number = GgufValue::Number;
    let text = |text: &str| GgufValue::Text(text.into());
    let common = |layers: i64| {
        vec![
            ("block_count", size(layers)),
            ("context_length", size(64)),
            ("embedding_length", size(32)),
            ("feed_forward_length", size(64)),
            ("attention.head_count", size(4)),
            ("attention.head_count_kv", size(2)),
            ("attention.key_length", size(16)),
            ("attention.value_length", size(16)),
        ]
    };
    let epsilon = ("attention.layer_norm_rms_epsilon", number(1e-5));
    for (name, model_type, layers, keys) in [
        (
            "qwen35",
            "qwen3_5_text",
            3,
            vec![
                epsilon.clone(),
                ("full_attention_interval", size(3)),
                ("rope.dimension_count", size(8)),
                ("rope.dimension_sections", GgufValue::Integers(vec![2, 1, 1, 0])),
                ("rope.freq_base", number(1e5)),
                ("ssm.conv_kernel", size(4)),
                ("ssm.group_count", size(3)),
                ("ssm.inner_size", size(48)),
                ("ssm.state_size", size(8)),
                ("ssm.time_step_rank", size(6)),
            ],
        ),
        (
            "gemma3",
            "gemma3_text",
            6,
            vec![
                epsilon.clone(),
                ("attention.sliding_window", size(5)),
                ("rope.freq_base", number(1e5)),
                ("rope.freq_base_swa", number(500.0)),
                ("rope.scaling.factor", number(4.0)),
                ("rope.scaling.type", text("linear")),
            ],
        ),
        (
            "gemma2",
            "gemma2",
            2,
            vec![
                epsilon.clone(),
                ("attention.sliding_window", size(5)),
                ("attn_logit_softcapping", number(5.0)),
                ("final_logit_softcapping", number(3.0)),
            ],
        ),
        (
            "qwen3moe",
            "qwen3_moe",
            2,
            vec![
                epsilon.clone(),
                ("expert_count", size(11)),
                ("expert_feed_forward_length", size(32)),
                ("expert_used_count", size(2)),
                ("rope.freq_base", number(1e4)),
            ],
        ),
        (
            "mistral3",
            "ministral3",
            2,
            vec![
                epsilon.clone(),
                ("attention.temperature_scale", number(0.25)),
                ("rope.dimension_count", size(16)),
                ("rope.freq_base", number(1e4)),
                ("rope.scaling.factor", number(8.0)),
                ("rope.scaling.original_context_length", size(8)),
                ("rope.scaling.type", text("yarn")),
                ("rope.scaling.yarn_beta_fast", number(8.0)),
                ("rope.scaling.yarn_beta_slow", number(0.5)),
                ("rope.scaling.yarn_log_multiplier", number(1.0)),
                ("vocab_size", size(96)),
            ],
        ),
    ] {
        let scratch = tempfile::tempdir().unwrap();
        let (folder, made) = (scratch.path().join("folder"), scratch.path().join("made.gguf"));
        convert(&ConvertConfig::new(file(name), &folder)).unwrap();
        assert_eq!(read_json(&folder.join("config.json"))["model_type"], model_type);
        convert(&ConvertConfig::export(&folder, &made)).unwrap();
        let mut expected: Vec<(String, GgufValue)> =
            common(layers).into_iter().chain(keys).map(|(key, value)| (key.to_string(), value)).collect();
        expected.sort_by(|(a, _), (b, _)| a.cmp(b));
        assert_eq!(keys_of(&made, name), expected, "{name}");
        assert_eq!(Gguf::open(&made).unwrap().text("general.architecture").unwrap(), Some(name));
    }
}

/// A copy of the golden model `name` with other settings; `null` removes one.
fn changed(name: &str, out: &Path, settings: &Value) {
    std::fs::create_dir_all(out).unwrap();
    let from = golden().join("models").join(name);
    std::fs::copy(from.join("model.safetensors"), out.join("model.safetensors")).unwrap();
    let mut config = read_json(&from.join("config.json"));
    for (key, value) in settings.as_object().unwrap() {
        config[key.as_str()] = value.clone();
    }
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn golden_models_of_newer_families_become_files_and_the_same_models_again() {
    for (name, settings) in [
        // Settings that llama.cpp's files have no place for.
        ("gemma3", json!({"final_logit_softcapping": null, "query_pre_attn_scalar": 16})),
        ("gemma2", json!({"query_pre_attn_scalar": 16})),
        ("ministral3", json!({})),
        ("gpt_oss", json!({"swiglu_limit": 7.0})),
        ("gemma4_full", json!({})),
        ("gemma4_moe", json!({})),
        ("lfm2_moe", json!({"routed_scaling_factor": 1.0})),
        ("mistral", json!({"sliding_window": null})),
        ("mixtral", json!({})),
    ] {
        let scratch = tempfile::tempdir().unwrap();
        let [folder, made, again] = ["folder", "made.gguf", "again"].map(|name| scratch.path().join(name));
        changed(name, &folder, &settings);
        let outtype = GgufType::F32;
        convert(&ConvertConfig { outtype, ..ConvertConfig::export(&folder, &made) }).unwrap();
        convert(&ConvertConfig::new(&made, &again)).unwrap();
        let [source, found] =
            [&folder, &again].map(|dir| CausalLm::from_pretrained(dir, ModelOptions::default()).unwrap());
        for (param, found) in source.params().iter().zip(found.params()) {
            // A norm loses the bits below those of 1.
            assert_close(&format!("{name}: {}", param.name), &found.tensor, &param.tensor, 1e-7);
        }
        let rows = vec![(3..20).collect::<Vec<i64>>()];
        let [expected, found] = [&source, &found].map(|model| model.logits(&rows).unwrap().remove(0));
        assert_close(name, &found, &expected, 1e-5);
        let sizes = |model: &CausalLm| {
            let config = model.config();
            (config.windows.clone(), config.ropes.clone(), config.layer_ropes.clone(), config.query_growth)
        };
        assert_eq!(sizes(&found_model(&again)), sizes(&source), "{name}");
    }
}

fn found_model(dir: &Path) -> CausalLm {
    CausalLm::from_pretrained(dir, ModelOptions::default()).unwrap()
}

#[test]
fn settings_that_llama_cpp_would_compute_otherwise_are_refused_by_key() {
    let layers = |kind: &str| json!([kind, "full_attention"]);
    for (name, settings, message) in [
        (
            "qwen3_5",
            json!({}),
            "`linear_value_head_dim`: expected linear_key_head_dim = 8, as llama.cpp has one width, found 12",
        ),
        (
            "gemma3",
            json!({"final_logit_softcapping": null}),
            "`query_pre_attn_scalar`: expected 16, which llama.cpp takes from the other sizes, found 24",
        ),
        (
            "gemma3",
            json!({"query_pre_attn_scalar": 16}),
            "`final_logit_softcapping`: expected null, as llama.cpp has no cap in models with windows, found 3",
        ),
        (
            "gemma2",
            json!({"query_pre_attn_scalar": 16, "attn_logit_softcapping": null}),
            "`attn_logit_softcapping`: expected a number, found null",
        ),
        (
            "gemma2",
            json!({"query_pre_attn_scalar": 16, "layer_types": ["full_attention", "sliding_attention"]}),
            "`layer_types`: expected windows in every other layer, and one width, found none in layers [0], and widths [5]",
        ),
        (
            "ministral3",
            json!({"rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.3,
            }}),
            "`rope_parameters`: expected yarn with truncate, and equal mscale and mscale_all_dim, as llama.cpp computes it, found \
             yarn (truncate = true, attention_factor = 1.2079",
        ),
        ("gemma2", json!({"layer_types": layers("full_attention")}), "`query_pre_attn_scalar`: expected 16"),
        (
            "qwen3_moe",
            json!({"norm_topk_prob": true}),
            "`mlp_only_layers`: expected experts in all layers, as llama.cpp has them, found none in layer 0",
        ),
    ] {
        let scratch = tempfile::tempdir().unwrap();
        let (folder, out) = (scratch.path().join("folder"), scratch.path().join("out.gguf"));
        changed(name, &folder, &settings);
        let error = convert(&ConvertConfig::export(&folder, &out)).unwrap_err().to_string();
        assert!(error.contains("config.json: ") && error.contains(message) && !error.contains('\n'), "{error}");
        assert!(!out.exists());
    }
    let scratch = tempfile::tempdir().unwrap();
    let (folder, out) = (scratch.path().join("folder"), scratch.path().join("out.gguf"));
    convert(&ConvertConfig::new(file("qwen3moe"), &folder)).unwrap();
    let mut config = read_json(&folder.join("config.json"));
    config["norm_topk_prob"] = json!(false);
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let error = convert(&ConvertConfig::export(&folder, &out)).unwrap_err().to_string();
    assert!(error.ends_with("`norm_topk_prob`: expected true, as llama.cpp computes it, found false"), "{error}");
}

/// Writes the file `name` again in f32, with changed metadata and tensors.
fn rewritten(name: &str, out: &Path, change: impl Fn(&mut BTreeMap<String, GgufValue>, &mut BTreeMap<String, Tensor>)) {
    let from = Gguf::open(&file(name)).unwrap();
    let mut metadata = from.metadata().clone();
    let tensors = from.tensors().keys().map(|name| (name.clone(), from.read(name, Kind::Float).unwrap()));
    let mut tensors: BTreeMap<String, Tensor> = tensors.collect();
    change(&mut metadata, &mut tensors);
    let stored = Stored::F32;
    let specs: Vec<GgufTensor> =
        tensors.iter().map(|(name, tensor)| GgufTensor { name: name.clone(), shape: tensor.size(), stored }).collect();
    let metadata: Vec<(String, GgufValue)> = metadata.into_iter().collect();
    let all: Vec<&Tensor> = tensors.values().collect();
    write(out, &metadata, &specs, &mut |i| Ok(all[i].shallow_clone())).unwrap();
}

#[test]
fn layers_that_predict_further_tokens_are_left_out_and_a_list_of_recurrent_layers_is_read() {
    let scratch = tempfile::tempdir().unwrap();
    let [plain, from, out] = ["plain", "model.gguf", "out"].map(|name| scratch.path().join(name));
    rewritten("qwen35", &from, |metadata, tensors| {
        metadata.insert("qwen35.block_count".into(), GgufValue::Integer(4));
        metadata.insert("qwen35.nextn_predict_layers".into(), GgufValue::Integer(1));
        metadata.remove("qwen35.full_attention_interval").unwrap();
        metadata.insert("qwen35.attention.recurrent_layers".into(), GgufValue::Integers(vec![1, 1, 0, 0]));
        tensors.insert("blk.3.nextn.eh_proj.weight".into(), Tensor::zeros([32, 64], (Kind::Float, Device::Cpu)));
        tensors.insert("blk.3.attn_norm.weight".into(), Tensor::zeros([32], (Kind::Float, Device::Cpu)));
    });
    convert(&ConvertConfig::new(file("qwen35"), &plain)).unwrap();
    convert(&ConvertConfig::new(&from, &out)).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        let [expected, found] = [&plain, &out].map(|dir| std::fs::read(dir.join(name)).unwrap());
        assert!(expected == found, "{name}");
    }
    let config = read_json(&out.join("config.json"));
    assert_eq!(config["layer_types"], json!(["linear_attention", "linear_attention", "full_attention"]));
}

#[test]
fn damaged_settings_of_newer_families_are_refused_by_key() {
    type Change = fn(&mut BTreeMap<String, GgufValue>, &mut BTreeMap<String, Tensor>);
    let cases: [(&str, Change, &str); 8] = [
        (
            "qwen35",
            |_, tensors| drop(tensors.get_mut("blk.0.ssm_a").unwrap().neg_()),
            "tensor `blk.0.ssm_a`: expected negative rates of decay, found ",
        ),
        (
            "qwen35",
            |metadata, _| drop(metadata.insert("qwen35.ssm.time_step_rank".into(), GgufValue::Integer(5))),
            "`qwen35.ssm.inner_size`: expected a multiple of 5 heads, found 48",
        ),
        (
            "qwen35",
            |metadata, _| drop(metadata.insert("qwen35.nextn_predict_layers".into(), GgufValue::Integer(3))),
            "`qwen35.nextn_predict_layers`: expected fewer than all 3 layers, found 3",
        ),
        (
            "qwen35",
            |metadata, _| {
                drop(metadata.insert("qwen35.attention.recurrent_layers".into(), GgufValue::Integers(vec![1, 0])));
            },
            "`qwen35.attention.recurrent_layers`: expected a truth value for each of 3 layers, found 2",
        ),
        (
            "qwen35",
            |metadata, _| drop(metadata.insert("qwen35.rope.dimension_count".into(), GgufValue::Integer(17))),
            "`qwen35.rope.dimension_count`: expected from 1 to 16, found 17",
        ),
        (
            "gemma3",
            |metadata, _| drop(metadata.remove("gemma3.attention.sliding_window")),
            "expected the key `gemma3.attention.sliding_window`, found none",
        ),
        (
            "gemma3",
            |metadata, _| drop(metadata.insert("gemma3.final_logit_softcapping".into(), GgufValue::Number(30.0))),
            "`gemma3.final_logit_softcapping`: this setting is not supported",
        ),
        (
            "mistral3",
            |metadata, _| drop(metadata.remove("mistral3.rope.scaling.type")),
            "`mistral3.rope.scaling.type`: expected yarn, found none",
        ),
    ];
    for (name, change, message) in cases {
        let scratch = tempfile::tempdir().unwrap();
        let from = scratch.path().join("made.gguf");
        rewritten(name, &from, change);
        let error = refused(&std::fs::read(&from).unwrap());
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn gemmas_added_tokens_are_written_as_llama_cpps_converter_has_them_and_read_back() {
    let scratch = tempfile::tempdir().unwrap();
    let [folder, made, again] = ["folder", "made.gguf", "again"].map(|name| scratch.path().join(name));
    convert(&ConvertConfig::new(file("llama"), &folder)).unwrap();
    let path = folder.join("tokenizer.json");
    let mut tokenizer = read_json(&path);
    for (id, text) in [(390, "\u{2581}\u{2581}\u{2581}"), (391, "<unused0>"), (392, "<table>")] {
        tokenizer["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false,
        }));
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        vocab.retain(|_, other| *other != json!(id));
        vocab.insert(text.into(), json!(id));
        let known: Vec<String> = vocab.keys().cloned().collect();
        let merges = tokenizer["model"]["merges"].as_array_mut().unwrap();
        let is_known = |part: &Value| known.iter().any(|text| part == text);
        merges.retain(|pair| {
            let whole = format!("{}{}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap());
            is_known(&pair[0]) && is_known(&pair[1]) && known.contains(&whole)
        });
    }
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    convert(&ConvertConfig::export(&folder, &made)).unwrap();
    let written = Gguf::open(&made).unwrap();
    let (texts, kinds) = (
        written.texts("tokenizer.ggml.tokens").unwrap().unwrap(),
        written.integers("tokenizer.ggml.token_type").unwrap().unwrap(),
    );
    // Three is a control token, four one that the user defined.
    for (id, text, kind) in [(390, "   ", 4), (391, "<unused0>", 3), (392, "<table>", 4)] {
        assert_eq!((texts[id].as_str(), kinds[id]), (text, kind));
    }
    convert(&ConvertConfig::new(&made, &again)).unwrap();
    let again = read_json(&again.join("tokenizer.json"));
    assert_eq!(again["model"]["vocab"]["\u{2581}\u{2581}\u{2581}"], 390);
    let found = again["added_tokens"].as_array().unwrap().iter().find(|token| token["id"] == 390).unwrap();
    assert_eq!(found["content"], "\u{2581}\u{2581}\u{2581}");
}

#[test]
fn weights_are_rounded_once_to_the_dtype_that_is_set() {
    for (dtype, kind) in [(Dtype::BFloat16, Kind::BFloat16), (Dtype::Float16, Kind::Half)] {
        let scratch = tempfile::tempdir().unwrap();
        let out = scratch.path().join("out");
        convert(&ConvertConfig { dtype, ..ConvertConfig::new(file("llama"), &out) }).unwrap();
        let (golden, checkpoint) = (values("llama"), Checkpoint::open(&out).unwrap());
        for stored in golden.names().filter(|stored| stored.contains("model.")) {
            let stored = stored.strip_suffix("[::7]").unwrap_or(stored);
            let (part, tensor) = (golden.part(stored), stored.split_once('.').unwrap().1);
            let found = checkpoint.read(tensor, Device::Cpu, kind).unwrap();
            assert_eq!(part.select(&found), part.tensor.to_kind(kind), "{stored}");
        }
        let name = if kind == Kind::Half { "float16" } else { "bfloat16" };
        assert_eq!(read_json(&out.join("config.json"))["torch_dtype"], name);
    }
}

#[test]
fn a_converted_tokenizer_gives_the_ids_of_the_one_that_the_file_was_made_of() {
    let texts = read_json(&golden().join("gguf/texts.json"));
    for (name, _) in FILES {
        let scratch = tempfile::tempdir().unwrap();
        let out = scratch.path().join("out");
        let report = convert(&ConvertConfig::new(file(name), &out)).unwrap();
        let Some(cases) = texts[name].as_array() else {
            let note = report.note.unwrap();
            assert!(
                note.starts_with("no tokenizer was written (the file has no vocabulary): copy tokenizer.json"),
                "{note}"
            );
            assert!(!out.join("tokenizer.json").exists());
            continue;
        };
        assert_eq!(report.note, None, "{name}");
        let tokenizer = Tokenizer::from_pretrained(&out).unwrap();
        for case in cases {
            let ids: Vec<i64> = case["ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
            assert_eq!(tokenizer.encode(case["text"].as_str().unwrap()).unwrap(), ids, "{name}: {case}");
        }
        let config = read_json(&out.join("config.json"));
        assert_eq!(config["eos_token_id"], json!(tokenizer.eos().unwrap()), "{name}");
        assert_eq!(tokenizer.has_chat_template(), name == "llama");
    }
    // GPT-2's rules, with the same vocabulary.
    let scratch = tempfile::tempdir().unwrap();
    let (from, out) = (scratch.path().join("model.gguf"), scratch.path().join("out"));
    let pre = |name: &str| [b"tokenizer.ggml.pre\x08\0\0\0\x05\0\0\0\0\0\0\0".as_slice(), name.as_bytes()].concat();
    std::fs::write(&from, replaced("qwen2", &pre("qwen2"), &pre("gpt-2"))).unwrap();
    convert(&ConvertConfig::new(&from, &out)).unwrap();
    let [found, expected] = [out, golden().join("models/gpt2")].map(|dir| Tokenizer::from_pretrained(&dir).unwrap());
    for case in texts["qwen2"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(found.encode(text).unwrap(), expected.encode(text).unwrap(), "{text}");
    }
    // Rules that are not known make no tokenizer: another one would give other ids.
    let scratch = tempfile::tempdir().unwrap();
    let (from, out) = (scratch.path().join("model.gguf"), scratch.path().join("out"));
    std::fs::write(&from, replaced("llama3", b"llama-bpe", b"viking-xx")).unwrap();
    let note = convert(&ConvertConfig::new(&from, &out)).unwrap().note.unwrap();
    assert!(note.contains("`tokenizer.ggml.pre` = \"viking-xx\": its rules are not known"), "{note}");
    assert!(!out.join("tokenizer.json").exists() && out.join("config.json").exists());
}

#[test]
fn a_chat_template_and_special_tokens_come_along() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    convert(&ConvertConfig::new(file("llama"), &out)).unwrap();
    let tokenizer = Tokenizer::from_pretrained(&out).unwrap();
    assert_eq!((tokenizer.eos(), tokenizer.pad()), (Some(2), Some(3)));
    let (text, _) = tokenizer.encode_chat(&[json!({"role": "user", "content": "hi"})], true, &Map::new()).unwrap();
    assert_eq!(text, "hi");
    let expected = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 400, "hidden_size": 32,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
        "tie_word_embeddings": false, "torch_dtype": "float32", "attention_bias": false, "mlp_bias": false,
        "bos_token_id": 1, "pad_token_id": 3, "eos_token_id": 2,
    });
    assert_eq!(read_json(&out.join("config.json")), expected);
    // Transformers has a default of its own for tokens that SmolLM3's file does not name.
    let nameless = scratch.path().join("nameless");
    convert(&ConvertConfig::new(file("smollm3"), &nameless)).unwrap();
    let config = read_json(&nameless.join("config.json"));
    for token in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        assert_eq!(config.get(token), Some(&Value::Null), "{token}");
    }
    let scaled = scratch.path().join("scaled");
    convert(&ConvertConfig::new(file("llama3"), &scaled)).unwrap();
    let expected = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    assert_eq!(read_json(&scaled.join("config.json"))["rope_scaling"], expected);
}

#[test]
fn the_end_of_a_turn_is_a_second_end_token() {
    let scratch = tempfile::tempdir().unwrap();
    let (from, out) = (scratch.path().join("model.gguf"), scratch.path().join("out"));
    convert(&ConvertConfig::new(file("llama"), scratch.path().join("plain"))).unwrap();
    let eos = read_json(&scratch.path().join("plain/config.json"))["eos_token_id"].clone();
    std::fs::write(&from, replaced("llama", b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eot_token_id")).unwrap();
    convert(&ConvertConfig::new(&from, &out)).unwrap();
    let config = read_json(&out.join("config.json"));
    let ids: Vec<i64> = serde_json::from_value(config["eos_token_id"].clone()).unwrap();
    assert_eq!((ids.len(), json!(ids[0])), (2, eos));
    assert_eq!(Tokenizer::from_pretrained(&out).unwrap().eos_ids(), ids);
}

#[test]
fn an_unsupported_part_is_refused_by_name_before_anything_is_written() {
    let whole = std::fs::read(file("llama")).unwrap();
    let error = refused(&with_tensor("blk.0.attn_q.weight", 20, 16));
    let message = "tensor `blk.0.attn_q.weight`: expected F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS \
                   or MXFP4, found IQ2_XXS: this quantization is not supported";
    assert!(error.ends_with(message), "{error}");
    for (bytes, message) in [
        (
            replaced("llama", b"llama", b"mamba"),
            format!("`general.architecture`: expected {ARCHITECTURES}, found \"mamba\"").as_str(),
        ),
        (
            replaced("llama", b"llama.rope.freq_base", b"llama.rope.freq_size"),
            "`llama.rope.freq_size`: this setting is not supported",
        ),
        (
            replaced("llama", b"llama.block_count", b"llama.vocab_sizes"),
            "`llama.vocab_sizes`: this setting is not supported",
        ),
        (
            replaced("llama", b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"),
            "tensor `blk.1.ffn_xx.weight`: a `llama` model has no such tensor",
        ),
        (
            replaced("llama", b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"),
            "expected a tensor for `model.layers.1.mlp.up_proj.weight`, found none",
        ),
        (
            replaced("llama", b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"),
            "the tensor `blk.0.ffn_up.weight` is there twice",
        ),
        (
            with_tensor("blk.0.attn_q.weight", 12, 31),
            "tensor `blk.0.attn_q.weight`: expected [32, 32] for `model.layers.0.self_attn.q_proj.weight`, found [31, 32]",
        ),
        (
            with_tensor("blk.0.attn_q.weight", 4, 48),
            "tensor `blk.0.attn_q.weight`: expected rows of a multiple of 32, found [48, 32]",
        ),
        ([&b"GGUF"[..], &1u32.to_le_bytes()[..], &whole[8..]].concat(), "expected GGUF version 2 or 3, found 1"),
        (
            [&b"GGUF"[..], &3u32.to_be_bytes()[..], &whole[8..]].concat(),
            "expected little-endian numbers, found a big-endian GGUF file",
        ),
        ([&b"GGML"[..], &whole[4..]].concat(), "expected a GGUF file, found another format"),
        (whole[..whole.len() - 1].to_vec(), "truncated or damaged"),
        (Vec::new(), "truncated or damaged: expected 4 bytes or more, found 0"),
        // A count of keys beyond the file takes no memory.
        ([&whole[..16], &u64::MAX.to_le_bytes(), &whole[24..]].concat(), "damaged: expected at most 1048576 keys"),
        ([&whole[..8], &(1u64 << 20).to_le_bytes(), &whole[16..]].concat(), "truncated or damaged"),
    ] {
        let error = refused(&bytes);
        assert!(error.contains(message), "{error}");
    }
    // Version 2 has the same layout.
    let scratch = tempfile::tempdir().unwrap();
    let from = scratch.path().join("two.gguf");
    std::fs::write(&from, [&b"GGUF"[..], &2u32.to_le_bytes()[..], &whole[8..]].concat()).unwrap();
    convert(&ConvertConfig::new(&from, scratch.path().join("out"))).unwrap();
}

#[test]
fn parts_of_a_split_model_that_do_not_belong_together_are_refused_by_name() {
    let original = |number: usize| golden().join("gguf").join(format!("k_quants{}", part(number)));
    // Converts the first part in a folder with the other parts as they are after `change`.
    let with = |first: &str, change: &dyn Fn(&Path)| {
        let dir = tempfile::tempdir().unwrap();
        for number in 1..=3 {
            std::fs::copy(original(number), dir.path().join(format!("m{}", part(number)))).unwrap();
        }
        change(dir.path());
        let error = convert(&ConvertConfig::new(dir.path().join(first), dir.path().join("out"))).map(|_| ());
        let error = error.map_or_else(|error| error.to_string(), |()| "converted".into());
        assert!(error == "converted" || !dir.path().join("out").exists());
        assert!(!error.contains('\n'), "{error}");
        error
    };
    let first = &format!("m{}", part(1));
    assert_eq!(with(first, &|_| {}), "converted");
    let error = with(first, &|dir| std::fs::remove_file(dir.join(format!("m{}", part(3)))).unwrap());
    assert!(error.contains("m-00003-of-00003.gguf: cannot read"), "{error}");
    let error = with(first, &|dir| assert!(std::fs::copy(original(2), dir.join(format!("m{}", part(3)))).is_ok()));
    assert!(error.contains("m-00003-of-00003.gguf: `split.no`: expected 2, found 1"), "{error}");
    let error = with(first, &|dir| assert!(std::fs::copy(file("qwen3"), dir.join(format!("m{}", part(2)))).is_ok()));
    assert!(error.contains("m-00002-of-00003.gguf: `split.no`: expected 1, found none"), "{error}");
    let error = with(&format!("m{}", part(2)), &|_| {});
    let expected = "expected the first of 3 parts, whose name ends with -00001-of-00003.gguf, found part 2";
    assert!(error.ends_with(expected), "{error}");
    let error = with("other.gguf", &|dir| std::fs::rename(dir.join(first), dir.join("other.gguf")).unwrap());
    assert!(error.contains("other.gguf: expected the first of 3 parts"), "{error}");
    let count = [b"split.tensors.count".as_slice(), &5u32.to_le_bytes(), &57u32.to_le_bytes()].concat();
    let error = with(first, &|dir| {
        let mut bytes = std::fs::read(dir.join(first)).unwrap();
        let at = bytes.windows(count.len()).position(|part| part == count).unwrap() + count.len() - 4;
        bytes[at] += 1;
        std::fs::write(dir.join(first), bytes).unwrap();
    });
    assert!(error.ends_with("`split.tensors.count`: expected 58 tensors in all parts, found 57"), "{error}");
}

#[test]
fn every_truncation_of_a_header_is_one_error() {
    let whole = std::fs::read(file("qwen3")).unwrap();
    for len in (0..2000).step_by(7) {
        let error = refused(&whole[..len]);
        assert!(error.contains("truncated or damaged"), "{len} bytes: {error}");
    }
}

#[test]
fn the_command_writes_a_folder_that_other_commands_read_and_overwrites_none() {
    let scratch = Scratch::new();
    std::fs::copy(file("llama"), scratch.path("model.gguf")).unwrap();
    let stdout = scratch.succeeds("convert model.gguf made --dtype bfloat16");
    assert_eq!(stdout, "21 tensors written to made\n");
    let lines = scratch.succeeds("generate --model_name_or_path made --dataset_name prompts.jsonl --max_new_tokens 3");
    assert!(!lines.is_empty());
    scratch.refuses("convert model.gguf made", 1, &["made: expected a new or an empty folder, found one with `"]);
    scratch.refuses("convert model.gguf policy", 1, &["policy: expected a new or an empty folder"]);
    // A conversion that was killed, and one that had the settings of another command.
    std::fs::create_dir_all(scratch.path("killed/.saving")).unwrap();
    std::fs::copy(scratch.path("made/config.yaml"), scratch.path("killed/config.yaml")).unwrap();
    for name in ["config.yaml.tmp", "model-00001-of-00002.safetensors", "tokenizer.json"] {
        scratch.write(&format!("killed/{name}"), "");
    }
    scratch.succeeds("convert model.gguf killed");
    for (name, is_there) in
        [("model.safetensors", true), ("config.json", true), ("model-00001-of-00002.safetensors", false)]
    {
        assert_eq!(scratch.path("killed").join(name).exists(), is_there, "{name}");
    }
    scratch.refuses("convert model.gguf killed", 1, &["killed: expected a new or an empty folder"]);
    std::fs::create_dir_all(scratch.path("other")).unwrap();
    let run = scratch.read("made/config.yaml") + "seed: 3\n";
    std::fs::write(scratch.path("other/config.yaml"), run).unwrap();
    scratch.refuses(
        "convert model.gguf other",
        1,
        &["other: expected a new or an empty folder, found one with `config"],
    );
    scratch.refuses("convert missing.gguf new", 1, &["missing.gguf: cannot read"]);
    scratch.refuses("convert model.gguf new --dtype auto", 2, &["'auto' for '--dtype", "float32, bfloat16, float16"]);
    scratch.refuses("convert prompts.jsonl new", 1, &["prompts.jsonl: expected a GGUF file, found another format"]);
    assert!(!scratch.path("new").exists());
    let ran = scratch.run(&format!("convert {} plain", file("qwen3").display()));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.starts_with("note: no tokenizer was written (the file has no vocabulary)"), "{}", ran.stderr);
    let config: Value = serde_json::from_str(&scratch.read("plain/config.json")).unwrap();
    assert_eq!(config["head_dim"], 16);
    assert!(Path::new(&scratch.path("plain/model.safetensors")).is_file());
}
