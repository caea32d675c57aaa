//! `rlhf convert MODEL --output_file FILE.gguf`: makes a GGUF file of a model folder, as llama.cpp's converter does.

mod extras;
mod gemma4;
mod mix;
mod shown;
mod tokens;

use super::forms::{
    ATTENTION_SCALE, CONV_CACHE, EMBEDDING_SCALE, Form, LOGIT_SCALE, RESIDUAL_SCALE, ROUTER_PART, listed,
};
use super::order::{To, divided, file_shape, is_convolution, part_shapes, reordered};
use crate::settings::{ConvertConfig, GgufType};
use mix::Mix;
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
    let groups = groups(params.iter().map(|param| (param.name.as_str(), param.tensor.size())), form);
    let mut tensors = specs(&groups, model.config(), config.outtype)?;
    tensors.extend(factors.as_ref().map(|factors| GgufTensor {
        name: ROPE_FACTORS.into(),
        shape: factors.size(),
        stored: Stored::F32,
    }));
    let mut read = |i: usize| match groups.get(i) {
        Some(group) => group.read(params, model.config(), form.is_interleaved),
        None => Ok(factors.as_ref().expect("only they come after the parameters").shallow_clone()),
    };
    // An incomplete file is removed.
    write(out, &metadata, &tensors, &mut read).inspect_err(|_| drop(std::fs::remove_file(out)))?;
    Ok(tensors.len())
}

/// A tensor of the file, with the parameters that it holds.
#[derive(Debug)]
struct Group<'a> {
    name: Option<String>,
    /// The name and the shape of the first parameter.
    first: (&'a str, Vec<i64>),
    /// The numbers of all parameters.
    members: Vec<usize>,
    holds: Holds,
}

/// The parameters that a tensor of the file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    /// One.
    One,
    /// A matrix of each expert.
    Stack,
    /// One of the two parts of one.
    Part(usize),
}

/// The tensors of the file for parameters of these names and shapes, in the order of their first parameters.
fn groups<'a>(params: impl IntoIterator<Item = (&'a str, Vec<i64>)>, form: &Form) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    let mut stacks: HashMap<String, usize> = HashMap::new();
    for (i, (param, shape)) in params.into_iter().enumerate() {
        let group = |name, holds| Group { name, first: (param, shape.clone()), members: vec![i], holds };
        if let Some(name) = form.stack_name(param) {
            match stacks.get(&name) {
                Some(at) => groups[*at].members.push(i),
                None => {
                    stacks.insert(name.clone(), groups.len());
                    groups.push(group(Some(name), Holds::Stack));
                }
            }
        } else if let Some(parts) = form.parts_of(param) {
            let parts = parts.into_iter().enumerate();
            groups.extend(parts.map(|(at, name)| group(Some(name), Holds::Part(at))));
        } else {
            groups.push(group(form.gguf_name(param), Holds::One));
        }
    }
    groups
}

impl Group<'_> {
    fn read(&self, params: &[Param], config: &ModelConfig, is_interleaved: bool) -> Result<Tensor> {
        let float = |i: &usize| tch::no_grad(|| params[*i].tensor.detach().to_kind(Kind::Float));
        let first = || float(&self.members[0]);
        match self.holds {
            Holds::Stack => Ok(Tensor::f_stack(&self.members.iter().map(float).collect::<Vec<_>>(), 0)?),
            Holds::Part(at) => {
                let [one, other] = divided(&first(), config)?;
                Ok(if at == 0 { one } else { other })
            }
            Holds::One => reordered(self.first.0, first(), config, is_interleaved, To::File),
        }
    }

    /// Its shape in the file.
    fn shape(&self, config: &ModelConfig) -> Vec<i64> {
        let (name, shape) = &self.first;
        match self.holds {
            Holds::Stack => [&[self.members.len() as i64], shape.as_slice()].concat(),
            Holds::Part(at) => part_shapes(shape, config)[at].clone(),
            Holds::One => file_shape(name, shape, config),
        }
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
    let activation = match config.family.name {
        "gemma2" | "gemma3_text" | "gemma4_text" => Activation::GeluTanh,
        _ => Activation::Silu,
    };
    if config.activation != activation {
        let [expected, found] = [activation, config.activation].map(shown::activation);
        return Err(Error::invalid(dir, format!("expected the non-linearity {expected}, found {found}")));
    }
    let ropes = &config.layer_ropes;
    if let Some(layer) = (0..ropes.len()).find(|layer| ropes[*layer].is_some() != rotated(*layer)) {
        let found = if ropes[layer].is_some() { "with" } else { "without" };
        let expected = "expected layers without positions where llama.cpp has them";
        return Err(Error::invalid(dir, format!("{expected}, found layer {layer} {found} positions")));
    }
    if matches!(config.mixing, Some(Mixing::ShortConv { bias: true, .. })) {
        return Err(Error::invalid(dir, "expected convolutions without biases, which llama.cpp's files lack"));
    }
    let window = config.windows.iter().flatten().next();
    let may_have = ["gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "olmo3"].contains(&config.family.name);
    if let Some(window) = window.filter(|_| !may_have) {
        let expected = "expected attention without windows, which llama.cpp does not apply to this type";
        return Err(Error::invalid(dir, format!("{expected}, found windows of {window}")));
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
    let head_dim = if architecture == "gemma4" { rope.dim } else { config.head_dim };
    let mut model_keys = vec![
        ("block_count", size(config.num_hidden_layers)),
        ("context_length", size(config.max_position_embeddings as i64)),
        ("embedding_length", size(config.hidden_size)),
        ("attention.head_count", size(config.num_attention_heads)),
        ("attention.head_count_kv", key_heads(config)),
        ("attention.layer_norm_rms_epsilon", Value::Number(config.norm_eps)),
        ("attention.key_length", size(head_dim)),
        ("attention.value_length", size(head_dim)),
    ];
    if architecture != "qwen35moe" {
        model_keys.push(("feed_forward_length", extras::widths(config)));
    }
    // llama.cpp's converter leaves out some keys of some families.
    if architecture != "gemma2" || rope.theta != 10_000.0 {
        model_keys.push(("rope.freq_base", Value::Number(rope.theta)));
    }
    if !form.is_gemma() {
        if architecture != "qwen3moe" {
            model_keys.push(("rope.dimension_count", size(rope.dim)));
        }
        if !["qwen35", "qwen35moe", "qwen3next", "qwen3moe"].contains(&architecture) {
            model_keys.push(("vocab_size", size(config.vocab_size)));
        }
    }
    match &rope.scaling {
        // Llama 3.1's factors are a tensor.
        RopeScaling::Default | RopeScaling::Llama3 { .. } => {}
        // So are those of Gemma 4.
        RopeScaling::Proportional { factor, .. } if *factor == 1.0 => {}
        RopeScaling::Linear { factor } => model_keys.extend([
            ("rope.scaling.type", Value::Text("linear".into())),
            ("rope.scaling.factor", Value::Number(*factor)),
        ]),
        RopeScaling::Yarn { factor, original, .. }
            if ["mistral3", "gpt-oss"].contains(&architecture)
                || config.family.name == "olmo3"
                || is_usual_yarn(&rope.scaling) =>
        {
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

/// The number of key heads. If some layers have convolutions, a number for each layer, 0 for these layers; and if layers differ.
fn key_heads(config: &ModelConfig) -> Value {
    let heads = config.num_key_value_heads;
    match config.mixing {
        // Qwen3.5's layers without attention are stated by an interval.
        None if config.layer_shapes.iter().any(|layer| layer.kv_heads != heads) => {
            Value::Integers(config.layer_shapes.iter().map(|layer| layer.kv_heads).collect())
        }
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
    let usual = usual_angle_factor(*factor);
    (*beta_fast, *beta_slow, *truncate) == (32.0, 1.0, true) && (attention_factor - usual).abs() < 1e-9
}

/// YaRN's usual factor of cosines and sines, for texts that are `factor` times as long.
fn usual_angle_factor(factor: f64) -> f64 {
    if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 }
}

/// llama.cpp's names of the tensors of the file, their shapes, and the types that they are written in: all but matrices stay in f32.
fn specs(groups: &[Group<'_>], config: &ModelConfig, outtype: GgufType) -> Result<Vec<GgufTensor>> {
    let name = |group: &Group<'_>| {
        let unknown = || Error::Run(format!("tensor `{}`: llama.cpp has no name for it", group.first.0));
        group.name.clone().ok_or_else(unknown)
    };
    let names = groups.iter().map(name).collect::<Result<Vec<_>>>()?;
    let mix = Mix::of(&names, config);
    let specs = groups.iter().zip(names).map(|(group, name)| {
        let shape = group.shape(config);
        let wanted = if outtype == GgufType::Q4KM { mix.stored(&name) } else { outtype.stored() };
        let is_matrix = shape.len() > 1 && name.ends_with(".weight") && !name.contains(ROUTER_PART);
        let stored = match shape.last() {
            Some(width) if is_matrix && !is_convolution(group.first.0) => wanted.of_rows(*width),
            _ => Stored::F32,
        };
        GgufTensor { name, shape, stored }
    });
    Ok(specs.collect())
}

/// The divisors of the rotary angles that Llama 3.1's scaling makes, or that make some of Gemma 4's angles 0.
fn rope_factors(config: &ModelConfig) -> Option<Tensor> {
    let rope = &config.ropes[0];
    if let RopeScaling::Proportional { angles, .. } = rope.scaling {
        let divisor = |at: i64| if at < angles { 1.0f32 } else { 1e30 };
        return Some(Tensor::from_slice(&(0..rope.dim / 2).map(divisor).collect::<Vec<_>>()));
    }
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } = rope.scaling else { return None };
    let divisor = |at: i64| {
        let frequency = rope.theta.powf(-2.0 * at as f64 / rope.dim as f64);
        let turns = original * frequency / std::f64::consts::TAU;
        let fast = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
        (1.0 / (fast + (1.0 - fast) / factor)) as f32
    };
    Some(Tensor::from_slice(&(0..rope.dim / 2).map(divisor).collect::<Vec<_>>()))
}
