//! `rlhf convert MODEL --output_file FILE.gguf`: makes a GGUF file of a model folder, as llama.cpp's converter does.

mod extras;
mod tokens;

use super::forms::{
    ATTENTION_SCALE, CONV_CACHE, EMBEDDING_SCALE, Form, LOGIT_SCALE, RESIDUAL_SCALE, ROUTER_PART, listed,
};
use super::order::{To, is_convolution, reordered};
use crate::settings::{ConvertConfig, GgufType};
use rlhf_base::safe_text::beginning;
use rlhf_base::{Error, Result};
use rlhf_lm::gguf::{GgufTensor, Stored, Value, write};
use rlhf_lm::model::{Activation, CausalLm, Mixing, ModelConfig, ModelOptions, Param, RopeScaling};
use std::collections::HashMap;
use std::path::Path;
use tch::{Kind, Tensor};

/// Name of the tensor with the factors of Llama 3.1's rotary angles.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Writes the model in the folder `config.file` to `out`. Returns the number of tensors.
///
/// # Errors
/// If the folder holds no model of a supported family, or a tokenizer whose rules have no name in llama.cpp; if the file exists. No incomplete
/// file is left then.
pub(super) fn export(config: &ConvertConfig, out: &Path) -> Result<usize> {
    let dir = config.file.as_path();
    if out.exists() {
        return Err(Error::invalid(out, "expected a new file, found one"));
    }
    if dir.join("adapter_config.json").is_file() && !dir.join("config.json").is_file() {
        return Err(Error::invalid(dir, "expected a model, found an adapter; `rlhf merge` makes a model of it"));
    }
    let model = CausalLm::from_pretrained(dir, ModelOptions::default())?;
    let form = form(&model, dir)?;
    check(&model, dir)?;
    let mut metadata = describe(model.config(), form, dir, config.outtype)?;
    metadata.extend(tokens::describe(dir, model.config())?);
    let factors = rope_factors(model.config());
    let params = model.params();
    let groups = groups(params, form);
    let tensor_spec = |group: &Group<'_>| {
        let Group { name, members } = group;
        let (first, count) = (members[0], members.len() as i64);
        let mut shape = first.tensor.size();
        if form.stack_name(&first.name).is_some() {
            shape.insert(0, count);
        }
        spec((&first.name, name), shape, model.config(), config.outtype)
    };
    let mut tensors: Vec<GgufTensor> = groups.iter().map(tensor_spec).collect::<Result<_>>()?;
    tensors.extend(factors.as_ref().map(|factors| GgufTensor {
        name: ROPE_FACTORS.into(),
        shape: factors.size(),
        stored: Stored::F32,
    }));
    let mut read = |i: usize| match groups.get(i) {
        Some(group) => group.read(model.config(), form),
        None => Ok(factors.as_ref().expect("only they come after the parameters").shallow_clone()),
    };
    // An incomplete file is removed.
    write(out, &metadata, &tensors, &mut read).inspect_err(|_| drop(std::fs::remove_file(out)))?;
    Ok(tensors.len())
}

/// A tensor of the file, with the parameters that it holds: one, or a matrix of each expert.
#[derive(Debug)]
struct Group<'a> {
    name: Option<String>,
    members: Vec<&'a Param>,
}

/// The tensors of the file, in the order of their first parameters.
fn groups<'a>(params: impl IntoIterator<Item = &'a Param>, form: &Form) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    let mut stacks: HashMap<String, usize> = HashMap::new();
    for param in params {
        match form.stack_name(&param.name) {
            Some(name) => match stacks.get(&name) {
                Some(at) => groups[*at].members.push(param),
                None => {
                    stacks.insert(name.clone(), groups.len());
                    groups.push(Group { name: Some(name), members: vec![param] });
                }
            },
            None => groups.push(Group { name: form.gguf_name(&param.name), members: vec![param] }),
        }
    }
    groups
}

impl Group<'_> {
    fn read(&self, config: &ModelConfig, form: &Form) -> Result<Tensor> {
        let float = |param: &Param| tch::no_grad(|| param.tensor.detach().to_kind(Kind::Float));
        if form.stack_name(&self.members[0].name).is_some() {
            return Ok(Tensor::f_stack(&self.members.iter().map(|param| float(param)).collect::<Vec<_>>(), 0)?);
        }
        let param = self.members[0];
        reordered(&param.name, float(param), config, form.is_interleaved, To::File)
    }
}

/// The form of the model in the folder `dir`.
fn form(model: &CausalLm, dir: &Path) -> Result<&'static Form> {
    let found = model.config().family.name;
    Form::of_model_type(found).ok_or_else(|| {
        let expected = listed(|form| form.model_type);
        Error::invalid(dir, format!("expected a model of type {expected}, found `{found}`"))
    })
}

fn check(model: &CausalLm, dir: &Path) -> Result<()> {
    let config = model.config();
    if model.quantization().is_some() {
        return Err(Error::invalid(dir, "expected plain weights, found those of bitsandbytes"));
    }
    let rotated = |layer: usize| config.family.name != "smollm3" || !(layer + 1).is_multiple_of(4);
    let usual = config.layer_ropes.iter().enumerate().all(|(layer, rope)| rope.is_some() == rotated(layer));
    let (activation, expected) = match config.family.name {
        "gemma2" | "gemma3_text" => (Activation::GeluTanh, "gelu_pytorch_tanh"),
        _ => (Activation::Silu, "silu"),
    };
    if !usual || config.activation != activation {
        let message = format!(
            "expected the non-linearity {expected}, and layers without positions where llama.cpp has them, found others"
        );
        return Err(Error::invalid(dir, message));
    }
    if matches!(config.mixing, Some(Mixing::ShortConv { bias: true, .. })) {
        return Err(Error::invalid(dir, "expected convolutions without biases, which llama.cpp's files lack"));
    }
    let has_windows = config.windows.iter().any(Option::is_some);
    if has_windows && !["gemma2", "gemma3_text"].contains(&config.family.name) {
        return Err(Error::invalid(
            dir,
            "expected attention without windows, which llama.cpp does not apply to this type",
        ));
    }
    extras::check(config, dir)
}

/// The metadata of the model, without that of its tokenizer, in the order of llama.cpp's converter.
fn describe(config: &ModelConfig, form: &Form, dir: &Path, outtype: GgufType) -> Result<Vec<(String, Value)>> {
    let architecture = form.architecture;
    let size = |n: i64| Value::Integer(n);
    let mut all = vec![
        ("general.architecture".to_string(), Value::Text(architecture.into())),
        ("general.type".into(), Value::Text("model".into())),
    ];
    let name = dir.canonicalize().ok().and_then(|dir| Some(dir.file_name()?.to_str()?.to_string()));
    all.extend(name.map(|name| ("general.name".to_string(), Value::Text(name))));
    let rope = &config.ropes[0];
    let mut model_keys = vec![
        ("block_count", size(config.num_hidden_layers)),
        ("context_length", size(config.max_position_embeddings as i64)),
        ("embedding_length", size(config.hidden_size)),
        ("feed_forward_length", size(config.intermediate_size)),
        ("attention.head_count", size(config.num_attention_heads)),
        ("attention.head_count_kv", key_heads(config)),
        ("attention.layer_norm_rms_epsilon", Value::Number(config.norm_eps)),
        ("attention.key_length", size(config.head_dim)),
        ("attention.value_length", size(config.head_dim)),
    ];
    // llama.cpp's converter leaves out some keys of some families.
    if architecture != "gemma2" || rope.theta != 10_000.0 {
        model_keys.push(("rope.freq_base", Value::Number(rope.theta)));
    }
    if !form.is_gemma() {
        if architecture != "qwen3moe" {
            model_keys.push(("rope.dimension_count", size(rope.dim)));
        }
        if !["qwen35", "qwen3moe"].contains(&architecture) {
            model_keys.push(("vocab_size", size(config.vocab_size)));
        }
    }
    match &rope.scaling {
        // Llama 3.1's factors are a tensor.
        RopeScaling::Default | RopeScaling::Llama3 { .. } => {}
        RopeScaling::Linear { factor } => model_keys.extend([
            ("rope.scaling.type", Value::Text("linear".into())),
            ("rope.scaling.factor", Value::Number(*factor)),
        ]),
        RopeScaling::Yarn { factor, original, .. } if architecture == "mistral3" || is_usual_yarn(&rope.scaling) => {
            model_keys.extend([
                ("rope.scaling.type", Value::Text("yarn".into())),
                ("rope.scaling.factor", Value::Number(*factor)),
                ("rope.scaling.original_context_length", size(*original as i64)),
            ]);
        }
        other => {
            let message = format!("expected a rope type that llama.cpp's files can state, found {other:?}");
            return Err(Error::invalid(dir.join("config.json"), beginning(&message, 200)));
        }
    }
    if let Some(Mixing::ShortConv { kernel, .. }) = config.mixing {
        model_keys.push((CONV_CACHE, size(kernel)));
    }
    if architecture == "granite" {
        model_keys.extend([
            (ATTENTION_SCALE, Value::Number(config.attention_scale)),
            (EMBEDDING_SCALE, Value::Number(config.embedding_scale)),
            (RESIDUAL_SCALE, Value::Number(config.branch_scale)),
            // llama.cpp divides the logits by this scale.
            (LOGIT_SCALE, Value::Number(1.0 / config.lm_head_scale)),
        ]);
    }
    model_keys.extend(extras::keys(config, form, dir)?);
    all.extend(model_keys.into_iter().map(|(name, value)| (format!("{architecture}.{name}"), value)));
    all.push(("general.file_type".into(), size(outtype.file_type())));
    if outtype.is_quantized() {
        all.push(("general.quantization_version".into(), size(2)));
    }
    Ok(all)
}

/// The number of key heads. If some layers have convolutions, a number for each layer, 0 for these layers.
fn key_heads(config: &ModelConfig) -> Value {
    let heads = config.num_key_value_heads;
    match config.mixing {
        // Qwen3.5's layers without attention are stated by an interval.
        None | Some(Mixing::GatedDelta(_)) => Value::Integer(heads),
        Some(Mixing::ShortConv { .. }) => {
            Value::Integers(config.mixes.iter().map(|mixes| if *mixes { 0 } else { heads }).collect())
        }
    }
}

/// Whether all settings of YaRN that the metadata lacks have their usual values.
fn is_usual_yarn(scaling: &RopeScaling) -> bool {
    let RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, attention_factor, .. } = scaling else {
        return false;
    };
    let usual = if *factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
    (*beta_fast, *beta_slow, *truncate) == (32.0, 1.0, true) && (attention_factor - usual).abs() < 1e-9
}

/// llama.cpp's name of a parameter, its shape, and the type that it is written in: vectors stay in f32.
fn spec(
    (param_name, name): (&str, &Option<String>),
    mut shape: Vec<i64>,
    config: &ModelConfig,
    outtype: GgufType,
) -> Result<GgufTensor> {
    let is_convolution = is_convolution(param_name);
    if is_convolution {
        shape.remove(1);
    }
    let name =
        name.clone().ok_or_else(|| Error::Run(format!("tensor `{param_name}`: llama.cpp has no name for it")))?;
    let wanted = if outtype == GgufType::Q4KM { in_mix(&name, config) } else { outtype.stored() };
    let is_router = name.contains(ROUTER_PART);
    let stored = match shape.as_slice() {
        [.., width] if shape.len() > 1 && !is_convolution && !is_router => wanted.of_rows(*width),
        _ => Stored::F32,
    };
    Ok(GgufTensor { name, shape, stored })
}

/// The type of a matrix in a file of llama.cpp's mix `Q4_K_M`: six bits for the LM head, and in half of the layers for values and the
/// outputs of the MLP; else four.
fn in_mix(name: &str, config: &ModelConfig) -> Stored {
    let is_head = name == "output.weight" || (config.tie_word_embeddings && name == "token_embd.weight");
    let part = name.split('.').nth(2).unwrap_or_default();
    let layer = name.split('.').nth(1).and_then(|layer| layer.parse::<usize>().ok());
    // Values count among the layers with attention.
    let counted = |i: &usize| part != "attn_v" || config.mixing_of(*i).is_none();
    let gets_more = |layer: usize| {
        let place = (0..layer).filter(counted).count();
        let all = (0..config.num_hidden_layers as usize).filter(counted).count();
        place < all / 8 || place >= 7 * all / 8 || (place - all / 8) % 3 == 2
    };
    // The queries, keys and values of the delta rule are one matrix.
    if part == "attn_qkv" {
        return Stored::Q6K;
    }
    let matters = ["attn_v", "ffn_down", "ffn_down_exps"].contains(&part) && layer.is_some_and(gets_more);
    if is_head || matters { Stored::Q6K } else { Stored::Q4K }
}

/// The divisors of the rotary angles that Llama 3.1's scaling makes.
fn rope_factors(config: &ModelConfig) -> Option<Tensor> {
    let rope = &config.ropes[0];
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } = rope.scaling else { return None };
    let divisor = |at: i64| {
        let frequency = rope.theta.powf(-2.0 * at as f64 / rope.dim as f64);
        let turns = original * frequency / std::f64::consts::TAU;
        let fast = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
        (1.0 / (fast + (1.0 - fast) / factor)) as f32
    };
    Some(Tensor::from_slice(&(0..rope.dim / 2).map(divisor).collect::<Vec<_>>()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_lm::model::ModelSizes;
    use serde_json::{Value, json};

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
            let path = Path::new("config.json");
            let config = ModelConfig::from_json(path, config.as_object().unwrap().clone()).unwrap();
            let tensors = ModelSizes::shapes_of_causal_lm(&config, path).unwrap();
            let form = Form::of_model_type(config.family.name).unwrap();
            let tensor_bytes = |(name, shape)| {
                let name: String = name;
                spec((&name, &form.gguf_name(&name)), shape, &config, GgufType::Q4KM).unwrap().bytes()
            };
            assert_eq!(tensors.into_iter().map(tensor_bytes).sum::<u64>(), bytes, "{}", config.family.name);
        }
    }
}
