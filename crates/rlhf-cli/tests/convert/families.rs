//! Families with experts, Gemma 4 and OLMo 3 in GGUF files.

use super::{changed, file, keys_of, rewritten};
use crate::support::read_json;
use rlhf::convert::convert;
use rlhf::gguf::{Gguf, TensorType, Value as GgufValue};
use rlhf::settings::{ConvertConfig, GgufType};
use rlhf::weights::Checkpoint;
use serde_json::json;
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

type Tensors = BTreeMap<String, Tensor>;
type Metadata = BTreeMap<String, GgufValue>;

/// The keys of a file that rlhf makes of the model in the file `name`.
fn written_keys(name: &str, architecture: &str) -> Vec<String> {
    let scratch = tempfile::tempdir().unwrap();
    let [folder, made] = ["folder", "made.gguf"].map(|name| scratch.path().join(name));
    convert(&ConvertConfig::new(file(name), &folder)).unwrap();
    convert(&ConvertConfig::export(&folder, &made)).unwrap();
    keys_of(&made, architecture).into_iter().map(|(key, _)| key).collect()
}

/// The names of keys; their values are compared with those of the files that the package wrote, in another test.
#[test]
fn families_with_experts_have_the_keys_of_llama_cpps_converter_and_no_others() {
    let common = [
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "rope.freq_base",
    ];
    let experts = ["expert_count", "expert_feed_forward_length", "expert_used_count"];
    let window = ["attention.sliding_window"];
    let yarn = [
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    ];
    let delta = [
        "expert_shared_feed_forward_length",
        "full_attention_interval",
        "rope.dimension_count",
        "ssm.conv_kernel",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
    ];
    let gemma4 = [
        "attention.key_length_swa",
        "attention.shared_kv_layers",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.value_length_swa",
        "embedding_length_per_layer_input",
        "rope.dimension_count",
        "rope.dimension_count_swa",
        "rope.freq_base_swa",
    ];
    let width = ["feed_forward_length"].as_slice();
    for (name, architecture, more) in [
        ("gpt-oss", "gpt-oss", vec![&experts[..], &window, &yarn, width]),
        ("gemma4", "gemma4", vec![&gemma4[..], width, &["final_logit_softcapping"]]),
        ("gemma4_moe", "gemma4", vec![&gemma4[..], &experts, width]),
        ("qwen35moe", "qwen35moe", vec![&experts[..], &delta, &["rope.dimension_sections"]]),
        ("qwen3next", "qwen3next", vec![&experts[..], &delta, width]),
        (
            "lfm2moe",
            "lfm2moe",
            vec![
                &experts[..],
                width,
                &[
                    "expert_gating_func",
                    "leading_dense_block_count",
                    "rope.dimension_count",
                    "shortconv.l_cache",
                    "vocab_size",
                ],
            ],
        ),
        (
            "olmo3",
            "olmo2",
            vec![
                &yarn[..],
                &window,
                width,
                &[
                    "attention.sliding_window_pattern",
                    "rope.dimension_count",
                    "rope.freq_base_swa",
                    "rope.scaling.yarn_attn_factor",
                    "vocab_size",
                ],
            ],
        ),
        ("mixtral", "llama", vec![width, &["expert_count", "expert_used_count", "rope.dimension_count", "vocab_size"]]),
    ] {
        let mut expected: Vec<&str> = common.iter().copied().chain(more.into_iter().flatten().copied()).collect();
        expected.sort_unstable();
        let found = written_keys(name, architecture);
        // llama.cpp's loader needs no width of rotated dimensions, and no size of the vocabulary.
        let found: Vec<&str> =
            found.iter().map(String::as_str).filter(|key| expected.contains(key) || !OPTIONAL.contains(key)).collect();
        assert_eq!(found, expected, "{name}");
    }
}

/// Keys that the converter does not write for all families, and that repeat what tensors or other keys say.
const OPTIONAL: [&str; 2] = ["rope.dimension_count", "vocab_size"];

#[test]
fn biases_routers_and_single_rows_stay_in_f32_in_quantized_files() {
    let scratch = tempfile::tempdir().unwrap();
    for (name, tensors) in [
        (
            "gpt-oss",
            &[
                ("blk.0.ffn_gate_exps.weight", TensorType::Q8_0),
                ("blk.0.ffn_gate_exps.bias", TensorType::F32),
                ("blk.1.ffn_down_exps.bias", TensorType::F32),
                ("blk.0.ffn_gate_inp.weight", TensorType::F32),
                ("blk.0.attn_sinks.weight", TensorType::F32),
            ][..],
        ),
        (
            "qwen35moe",
            &[
                ("blk.0.ffn_gate_inp_shexp.weight", TensorType::F32),
                ("blk.0.ffn_down_shexp.weight", TensorType::Q8_0),
                ("blk.0.ssm_conv1d.weight", TensorType::F32),
            ],
        ),
        (
            "gemma4_moe",
            &[
                ("rope_freqs.weight", TensorType::F32),
                ("blk.0.ffn_gate_up_exps.weight", TensorType::Q8_0),
                ("blk.0.ffn_down_exps.scale", TensorType::F32),
                ("blk.0.layer_output_scale.weight", TensorType::F32),
            ],
        ),
    ] {
        let [folder, made] = ["", ".gguf"].map(|end| scratch.path().join(format!("{name}{end}")));
        convert(&ConvertConfig::new(file(name), &folder)).unwrap();
        convert(&ConvertConfig { outtype: GgufType::Q8_0, ..ConvertConfig::export(&folder, &made) }).unwrap();
        let written = Gguf::open(&made).unwrap();
        for (tensor, kind) in tensors {
            assert_eq!(written.tensors()[*tensor].kind, *kind, "{name}: {tensor}");
        }
    }
}

/// Whether a changed file becomes the folder that the file `name` becomes.
#[track_caller]
fn becomes_the_same(name: &str, change: impl Fn(&mut Metadata, &mut Tensors)) {
    let scratch = tempfile::tempdir().unwrap();
    let [plain, from, out] = ["plain", "model.gguf", "out"].map(|name| scratch.path().join(name));
    rewritten(name, &from, change);
    convert(&ConvertConfig::new(file(name), &plain)).unwrap();
    convert(&ConvertConfig::new(&from, &out)).unwrap();
    let [expected, found] = [&plain, &out].map(|dir| read_json(&dir.join("config.json")));
    assert_eq!(found, expected, "{name}");
    let [expected, found] = [&plain, &out].map(|dir| Checkpoint::open(dir).unwrap());
    for tensor in expected.names() {
        let [expected, found] = [&expected, &found].map(|from| from.read(tensor, Device::Cpu, Kind::Float).unwrap());
        assert_eq!(found, expected, "{name}: {tensor}");
    }
}

#[test]
fn other_forms_that_llama_cpp_reads_are_read_too() {
    let size = GgufValue::Integer;
    // Projections of layers that share keys and values of earlier ones, which nothing uses.
    becomes_the_same("gemma4", |_, tensors| {
        for part in ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"] {
            let copy = tensors[&format!("blk.1.{part}")].shallow_clone();
            tensors.insert(format!("blk.3.{part}"), copy);
        }
    });
    // The gate of the shared MLP as a vector, as llama-quantize writes it.
    becomes_the_same("qwen35moe", |_, tensors| {
        let gate = tensors.get_mut("blk.0.ffn_gate_inp_shexp.weight").unwrap();
        *gate = gate.squeeze_dim(0);
    });
    // An interval in place of a list.
    becomes_the_same("olmo3", |metadata, _| {
        metadata.insert("olmo2.attention.sliding_window_pattern".into(), size(4));
    });
    becomes_the_same("olmo3", |metadata, _| {
        metadata.remove("olmo2.attention.sliding_window_pattern").unwrap();
        metadata.remove("olmo2.rope.freq_base_swa").unwrap();
    });
    becomes_the_same("gemma4_moe", |metadata, _| {
        metadata.insert("gemma4.attention.sliding_window_pattern".into(), size(3));
    });
    // Qwen3-Next's first files have the joint product of a folder: per key head 8 rows of queries, 8 of keys, 16 of values and 16 of gates.
    becomes_the_same("qwen3next", |_, tensors| {
        let [joint, gates] =
            ["blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"].map(|name| tensors.remove(name).unwrap());
        let [queries, keys, values]: [Tensor; 3] = joint.split_with_sizes([24, 24, 48], 0).try_into().unwrap();
        let by_head = [queries, keys, values, gates].map(|part| part.view([3, -1, 32]));
        tensors.insert("blk.0.ssm_in.weight".into(), Tensor::cat(&by_head, 1).view([-1, 32]));
    });
}

#[test]
fn settings_of_these_families_that_llama_cpp_would_compute_otherwise_are_refused_by_key() {
    let olmo3_rope = |factor: f64, local: f64| {
        json!({
            "full_attention": {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 64, "attention_factor": factor,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        })
    };
    for (name, settings, message) in [
        ("gpt_oss", json!({}), "`swiglu_limit`: expected 7, which llama.cpp has for this type, found 1.5"),
        (
            "gpt_oss",
            json!({"swiglu_limit": 7.0, "layer_types": ["full_attention", "sliding_attention"]}),
            "`layer_types`: expected no window in each 2 layers, and one width, found none in layers [0], and widths [5]",
        ),
        (
            "gpt_oss",
            json!({"swiglu_limit": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            "`rope_parameters`: expected yarn without truncate, and its usual attention_factor, found default (rope_theta = 10000.0)",
        ),
        (
            "gemma4",
            json!({}),
            "`layer_types`: expected before the layers that share keys one with a window and then one without, found [none, 5]",
        ),
        (
            "gemma4_full",
            json!({"rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }}),
            "`rope_parameters`: expected proportional without a factor, and default in layers with windows, found default \
             (rope_theta = 10000.0), and in layers with windows default (rope_theta = 500.0)",
        ),
        (
            "qwen3_5_moe",
            json!({}),
            "`linear_value_head_dim`: expected linear_key_head_dim = 8, as llama.cpp has one width, found 12",
        ),
        (
            "qwen3_next",
            json!({}),
            "`mlp_only_layers`: expected experts in all layers, as llama.cpp has them, found none in layer 0",
        ),
        (
            "lfm2_moe",
            json!({}),
            "`routed_scaling_factor`: expected 1, as llama.cpp has no factor for this type, found 1.5",
        ),
        (
            "olmo3",
            json!({}),
            "`layer_types`: expected no window in each 4 layers, and one width, found none in layers [1], and widths [5]",
        ),
        (
            "mistral",
            json!({}),
            "expected attention without windows, which llama.cpp does not apply to this type, found windows of 5",
        ),
    ] {
        let scratch = tempfile::tempdir().unwrap();
        let (folder, out) = (scratch.path().join("folder"), scratch.path().join("out.gguf"));
        changed(name, &folder, &settings);
        let error = convert(&ConvertConfig::export(&folder, &out)).unwrap_err().to_string();
        assert!(error.contains(message) && !error.contains('\n'), "{name}: {error}");
        assert!(!out.exists());
    }
    // Of a model with a layer without a window after three with one.
    for (settings, message) in [
        (
            json!({"rope_parameters": olmo3_rope(1.25, 5e5)}),
            "`rope_parameters`: expected yarn with its usual attention_factor or default, and default with the same base in \
             layers with windows, found yarn (truncate = true, attention_factor = 1.25, rope_theta = 500000.0), and in layers \
             with windows default (rope_theta = 500000.0)",
        ),
        (
            json!({"rope_parameters": olmo3_rope(1.138_629_436_111_989, 1e4)}),
            "rope_theta = 500000.0), and in layers with windows default (rope_theta = 10000.0)",
        ),
        (
            json!({"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
            "`layer_types`: expected no window in each 4 layers, and one width, found none in layers [1, 3], and widths [5]",
        ),
    ] {
        let scratch = tempfile::tempdir().unwrap();
        let (folder, out) = (scratch.path().join("folder"), scratch.path().join("out.gguf"));
        convert(&ConvertConfig::new(file("olmo3"), &folder)).unwrap();
        let mut config = read_json(&folder.join("config.json"));
        config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let error = convert(&ConvertConfig::export(&folder, &out)).unwrap_err().to_string();
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn damaged_settings_of_these_families_are_refused_by_key() {
    type Change = fn(&mut Metadata, &mut Tensors);
    let cases: [(&str, Change, &str); 19] = [
        (
            "gpt-oss",
            |metadata, _| {
                drop(metadata.insert("gpt-oss.attention.sliding_window_pattern".into(), GgufValue::Integer(3)));
            },
            "`gpt-oss.attention.sliding_window_pattern`: expected windows in all layers but each 2, found 3",
        ),
        (
            "gpt-oss",
            |metadata, _| drop(metadata.insert("gpt-oss.rope.scaling.yarn_attn_factor".into(), GgufValue::Number(2.0))),
            "`gpt-oss.rope.scaling.yarn_attn_factor`: expected 1.1386, as llama.cpp computes it, found 2",
        ),
        (
            "gpt-oss",
            |_, tensors| drop(tensors.remove("blk.0.ffn_up_exps.bias").unwrap()),
            "expected a tensor for `model.layers.0.mlp.experts.gate_up_proj_bias`, found none",
        ),
        (
            "gpt-oss",
            |_, tensors| {
                let gates = tensors.get_mut("blk.0.ffn_gate_exps.weight").unwrap();
                *gates = gates.narrow(1, 0, 31);
            },
            "tensor `blk.0.ffn_gate_exps.weight`: expected [11, 32, 32] for `model.layers.0.mlp.experts.gate_up_proj`, found [11, 31, 32]",
        ),
        (
            "gpt-oss",
            |metadata, _| drop(metadata.insert("gpt-oss.rope.freq_base_swa".into(), GgufValue::Number(5.0))),
            "`gpt-oss.rope.freq_base_swa`: expected 10000, that of other layers, found 5",
        ),
        (
            "gemma4",
            |metadata, _| drop(metadata.insert("gemma4.rope.scaling.type".into(), GgufValue::Text("linear".into()))),
            "`gemma4.rope.scaling.type`: expected none beside `rope_freqs.weight`, found \"linear\"",
        ),
        (
            "gemma4",
            |metadata, _| {
                drop(metadata.insert("gemma4.attention.sliding_window_pattern".into(), GgufValue::Integer(9)));
            },
            "`gemma4.attention.sliding_window_pattern`: expected no window in the last layer, as the model has none, found one",
        ),
        (
            "gemma4",
            |metadata, _| {
                let too_many = GgufValue::Bools(vec![false; 99]);
                metadata.insert("gemma4.attention.sliding_window_pattern".into(), too_many);
            },
            "`gemma4.attention.sliding_window_pattern`: expected a truth value for each of 5 layers, found 99",
        ),
        (
            "gemma4",
            |metadata, _| drop(metadata.remove("gemma4.attention.sliding_window_pattern").unwrap()),
            "expected the key `gemma4.attention.sliding_window_pattern`, found none",
        ),
        (
            "gemma4",
            |metadata, _| {
                let widths = GgufValue::Integers(vec![32, 32, 48, 64, 64]);
                metadata.insert("gemma4.feed_forward_length".into(), widths);
            },
            "`gemma4.feed_forward_length`: expected one width, or twice in layers that share keys, found 48 in layer 2",
        ),
        (
            "gemma4",
            |_, tensors| drop(tensors.get_mut("rope_freqs.weight").unwrap().fill_(2.0)),
            "tensor `rope_freqs.weight`: expected 16 divisors, 1 and then 1e30, found 2.0 at index 0",
        ),
        (
            "gemma4",
            |metadata, _| drop(metadata.insert("gemma4.attention.value_length_swa".into(), GgufValue::Integer(8))),
            "`gemma4.attention.value_length_swa`: expected 16, the width of a head in layers with windows, found 8",
        ),
        (
            "gemma4_moe",
            |metadata, _| {
                metadata.insert("gemma4.attention.head_count_kv".into(), GgufValue::Integers(vec![2, 1, 1]));
            },
            "`gemma4.attention.head_count_kv`: expected one number for all layers of a kind, found 2 and 1",
        ),
        (
            "gemma4_moe",
            |metadata, _| {
                metadata.insert("gemma4.attention.head_count_kv".into(), GgufValue::Integers(vec![2, 0, 1]));
            },
            "`gemma4.attention.head_count_kv`: expected an integer from 1 for each of 3 layers, found 0 in layer 1",
        ),
        (
            "gemma4_moe",
            |metadata, _| {
                metadata.insert("gemma4.attention.head_count_kv".into(), GgufValue::Integers(vec![2; 4]));
            },
            "`gemma4.attention.head_count_kv`: expected an integer from 1 for each of 3 layers, found 4",
        ),
        (
            "lfm2moe",
            |metadata, _| drop(metadata.insert("lfm2moe.expert_gating_func".into(), GgufValue::Integer(1))),
            "`lfm2moe.expert_gating_func`: expected 2, the sigmoid, found 1",
        ),
        (
            "olmo3",
            |metadata, _| {
                let windows = GgufValue::Bools(vec![true, false, true, false]);
                metadata.insert("olmo2.attention.sliding_window_pattern".into(), windows);
            },
            "`olmo2.attention.sliding_window_pattern`: expected windows in all layers but each 4, found none in layer 1",
        ),
        (
            "olmo3",
            |metadata, _| drop(metadata.insert("olmo2.rope.freq_base_swa".into(), GgufValue::Number(500.0))),
            "`olmo2.rope.freq_base_swa`: expected 10000, that of other layers, found 500",
        ),
        (
            "qwen3next",
            |metadata, _| drop(metadata.insert("qwen3next.nextn_predict_layers".into(), GgufValue::Integer(1))),
            "`qwen3next.nextn_predict_layers`: this setting is not supported",
        ),
    ];
    for (name, change, message) in cases {
        let scratch = tempfile::tempdir().unwrap();
        let (from, out) = (scratch.path().join("model.gguf"), scratch.path().join("out"));
        rewritten(name, &from, change);
        let error = convert(&ConvertConfig::new(&from, &out)).unwrap_err().to_string();
        assert!(error.contains(message) && !error.contains('\n'), "{name}: {error}");
        assert!(!out.join("config.json").exists());
    }
}
