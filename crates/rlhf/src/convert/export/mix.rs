//! The types of llama.cpp's mix `Q4_K_M`, as its `llama_tensor_get_type` chooses them.

use rlhf_lm::gguf::Stored;
use rlhf_lm::model::ModelConfig;

/// Parts of a layer with values: matrices of their own, or joint ones with queries and keys.
const VALUES: [&str; 2] = ["attn_v", "attn_qkv"];

/// The tables of embeddings, whose type is that of the head if they are the head.
const TABLES: [&str; 2] = ["token_embd.weight", "per_layer_token_embd.weight"];

/// A model as the rules of the mix see it.
#[derive(Debug)]
pub(super) struct Mix {
    /// The layers that have values, in their order.
    with_values: Vec<usize>,
    layers: usize,
    /// Whether it is one of the models of 70 billion parameters that llama.cpp recognizes.
    is_70b: bool,
    has_eight_experts: bool,
    is_tied: bool,
}

impl Mix {
    /// Reads the model with tensors of these names.
    pub(super) fn of(names: &[String], config: &ModelConfig) -> Self {
        let has_values =
            |name: &String| part_of(name).filter(|(_, part)| VALUES.contains(part)).map(|(layer, _)| layer);
        let mut with_values: Vec<usize> = names.iter().filter_map(has_values).collect();
        with_values.sort_unstable();
        let (heads, key_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let experts = config.experts.as_ref().map_or(0, |experts| experts.count);
        let is_70b = config.num_hidden_layers == 80
            && match config.family.name {
                "qwen2" => true,
                "llama" | "mistral" | "mixtral" => heads != key_heads && experts != 8,
                _ => false,
            };
        Self {
            with_values,
            layers: config.num_hidden_layers as usize,
            is_70b,
            has_eight_experts: experts == 8,
            is_tied: config.tie_word_embeddings,
        }
    }

    /// The type of the matrix `name`, whose rows are whole blocks.
    pub(super) fn stored(&self, name: &str) -> Stored {
        if name == "output.weight" || self.is_tied && TABLES.contains(&name) {
            return Stored::Q6K;
        }
        let Some((layer, part)) = part_of(name) else {
            // llama.cpp leaves it in the type of the file that it quantizes.
            return if name == "per_layer_model_proj.weight" { Stored::F16 } else { Stored::Q4K };
        };
        let more = |place: usize, all: usize| if gets_more(place, all) { Stored::Q6K } else { Stored::Q4K };
        match part {
            "attn_v" | "attn_qkv" | "attn_k" if self.has_eight_experts => Stored::Q8_0,
            "attn_output" if self.has_eight_experts => Stored::Q5K,
            _ if VALUES.contains(&part) => {
                let place = self.with_values.iter().filter(|other| **other < layer).count();
                match more(place, self.with_values.len()) {
                    Stored::Q4K if self.is_70b => Stored::Q5K,
                    stored => stored,
                }
            }
            _ if part.starts_with("ffn_down") => more(layer, self.layers),
            _ => Stored::Q4K,
        }
    }
}

/// The layer of a tensor, and its name there without the end.
fn part_of(name: &str) -> Option<(usize, &str)> {
    let (layer, rest) = super::super::forms::numbered("blk.", name)?;
    Some((layer, rest.rsplit_once('.')?.0))
}

/// Whether one of `all` matrices, of which `place` come before it, is among the half with more bits.
fn gets_more(place: usize, all: usize) -> bool {
    place < all / 8 || place >= 7 * all / 8 || (place - all / 8) % 3 == 2
}

#[cfg(test)]
mod tests {
    use super::super::{Form, groups, specs};
    use super::*;
    use crate::settings::GgufType;
    use rlhf_lm::gguf::GgufTensor;
    use rlhf_lm::model::ModelSizes;
    use serde_json::{Value, json};
    use std::path::Path;

    /// The tensors of a file of the mix for this configuration.
    fn tensors(config: &Value) -> Vec<GgufTensor> {
        let path = Path::new("config.json");
        let config = ModelConfig::from_json(path, config.as_object().unwrap().clone()).unwrap();
        let params = ModelSizes::shapes_of_causal_lm(&config, path).unwrap();
        let form = Form::of_model_type(config.family.name).unwrap();
        let groups = groups(params.iter().map(|(name, shape)| (name.as_str(), shape.clone())), form);
        specs(&groups, &config, GgufType::Q4KM).unwrap()
    }

    /// The types of the parts of layers whose names have this end, as text: `4`, `5` and `6` for Q4_K, Q5_K and Q6_K, `8` for Q8_0.
    fn types(tensors: &[GgufTensor], part: &str) -> String {
        let digit = |tensor: &GgufTensor| match tensor.stored {
            Stored::Q4K => '4',
            Stored::Q5K => '5',
            Stored::Q6K => '6',
            Stored::Q8_0 => '8',
            _ => '-',
        };
        tensors.iter().filter(|tensor| tensor.name.ends_with(&format!(".{part}.weight"))).map(digit).collect()
    }

    #[test]
    fn files_of_q4_k_m_have_as_many_bytes_as_llama_cpp_reports_of_its_own() {
        let common = |kind: &str, hidden: i64, layers: i64, vocab: i64| {
            json!({
                "model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocab, "num_key_value_heads": 8,
                "tie_word_embeddings": true, "rms_norm_eps": 1e-5,
            })
        };
        let kinds: Vec<&str> =
            (0..16).map(|i| if [2, 5, 8, 10, 12, 14].contains(&i) { "full_attention" } else { "conv" }).collect();
        for (mut config, rest, bytes) in [
            // Llama-3.2-1B, without the 128 bytes of the factors of its angles: 762.81 MiB with them.
            (
                common("llama", 2048, 16, 128_256),
                json!({"intermediate_size": 8192, "num_attention_heads": 32}),
                799_862_784,
            ),
            (
                common("qwen3", 1024, 28, 151_936),
                json!({"intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128}),
                390_753_280,
            ),
            // LFM2-1.2B: 694.76 MiB.
            (
                common("lfm2", 2048, 16, 65_536),
                json!({"intermediate_size": 8192, "block_auto_adjust_ff_dim": false, "num_attention_heads": 32, "layer_types": kinds}),
                728_509_440,
            ),
        ] {
            let Value::Object(rest) = rest else { unreachable!("an object") };
            config.as_object_mut().unwrap().extend(rest);
            let all = tensors(&config);
            assert_eq!(all.iter().map(GgufTensor::bytes).sum::<u64>(), bytes, "{}", config["model_type"]);
        }
    }

    #[test]
    fn types_of_experts_of_fused_matrices_and_of_models_of_70_billion_parameters_are_those_of_llama_quantize() {
        let common = json!({
            "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "vocab_size": 64, "moe_intermediate_size": 256, "tie_word_embeddings": false,
        });
        let with = |settings: Value| {
            let mut config = common.clone();
            config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
            tensors(&config)
        };
        // Of 16 layers the first two, the last two, and each third between (4, 7, 10 and 13) have more bits.
        let all = with(json!({"model_type": "llama", "num_hidden_layers": 16}));
        let more = "6644644644644666";
        for (part, expected) in [("attn_v", more), ("ffn_down", more), ("attn_k", "4444444444444444")] {
            assert_eq!(types(&all, part), expected, "{part}");
        }
        // 80 layers of Llama with fewer key heads than heads: Q5_K for values that would have Q4_K.
        let all = with(json!({"model_type": "llama", "num_hidden_layers": 80}));
        assert_eq!(types(&all, "attn_v"), types(&all, "ffn_down").replace('4', "5"));
        let all = with(json!({"model_type": "llama", "num_hidden_layers": 80, "num_key_value_heads": 4}));
        assert_eq!(types(&all, "attn_v"), types(&all, "ffn_down"));
        // Eight experts.
        let all = with(json!({"model_type": "mixtral", "num_hidden_layers": 4, "num_local_experts": 8}));
        for (part, expected) in [
            ("attn_q", "4444"),
            ("attn_k", "8888"),
            ("attn_v", "8888"),
            ("attn_output", "5555"),
            ("ffn_down_exps", "4466"),
            ("ffn_up_exps", "4444"),
            ("ffn_gate_inp", "----"),
        ] {
            assert_eq!(types(&all, part), expected, "{part}");
        }
        // Joint matrices count as values, among all layers.
        let delta = json!({"model_type": "qwen3_5_moe_text", "num_hidden_layers": 8, "num_experts": 16});
        let all = with(delta);
        for (part, expected) in [
            ("attn_qkv", "644446"),
            ("attn_v", "66"),
            ("ffn_down_exps", "64464466"),
            ("ffn_down_shexp", "64464466"),
            ("ffn_gate_inp_shexp", "--------"),
            ("ssm_out", "444444"),
        ] {
            assert_eq!(types(&all, part), expected, "{part}");
        }
        // Both tables of Gemma 4, whose values are keys in its last layer; the projection of the layers' inputs stays in f16.
        let all = with(json!({
            "model_type": "gemma4_text", "num_hidden_layers": 4, "tie_word_embeddings": true, "hidden_size_per_layer_input": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "attention_k_eq_v": true, "num_global_key_value_heads": 2, "global_head_dim": 64, "num_kv_shared_layers": 0,
        }));
        assert_eq!(types(&all, "attn_v"), "446");
        let stored = |name: &str| all.iter().find(|tensor| tensor.name == name).unwrap().stored;
        assert_eq!([stored("token_embd.weight"), stored("per_layer_token_embd.weight")], [Stored::Q6K; 2]);
        assert_eq!(stored("per_layer_model_proj.weight"), Stored::F16);
    }
}
