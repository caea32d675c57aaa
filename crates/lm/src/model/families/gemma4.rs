//! Gemma 4: heads of another width in layers without a window, keys and values that later layers share, inputs of each layer, and experts beside
//! its MLP.

use super::{Defaults, LLAMA, LLAMA_DEFAULTS, QK_NORM, llama_like};
use crate::model::shape::{
    ExpertNames, Experts, Family, Fields, LayerInputNames, LayerInputs, LayerShape, Names, Order, QkNorm, RopeScaling,
    Scoring, Shape, Stacking,
};
use rlhf_base::Result;
use serde_json::{Value, json};

pub(super) const GEMMA4: Family = Family {
    name: "gemma4_text",
    causal_lm_class: Some("Gemma4ForCausalLM"),
    // transformers 5.23 has no such class.
    classifier_class: "Gemma4ForSequenceClassification",
    shape,
    names: Names {
        qk_norm: Some(QkNorm::ByHead(QK_NORM)),
        mlp_norm: "pre_feedforward_layernorm",
        output_norms: Some(["post_attention_layernorm", "post_feedforward_layernorm"]),
        layer_inputs: Some(LayerInputNames {
            table: "model.embed_tokens_per_layer",
            projection: "model.per_layer_model_projection",
            norm: "model.per_layer_projection_norm",
            gate: "per_layer_input_gate",
            out: "per_layer_projection",
            out_norm: "post_per_layer_input_norm",
        }),
        layer_scalar: Some("layer_scalar"),
        experts: Some(ExpertNames {
            router: "router.proj",
            experts: "experts",
            inputs: ["gate_up_proj", ""],
            out: "down_proj",
            shared: None,
            bias: None,
            stacking: Some(Stacking::Parallel {
                scales: ["router.scale", "router.per_expert_scale"],
                norms: ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"],
            }),
        }),
        ..LLAMA
    },
};

/// Kinds of layers in `rope_parameters`.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// Maximum width of the inputs of all layers, as of any other table.
const MOST_WIDTH: i64 = 1 << 28;

fn shape(f: &Fields<'_>) -> Result<Shape> {
    if f.present("use_bidirectional_attention").is_some_and(|found| found != "vision") {
        return Err(f.wrong("use_bidirectional_attention", "null or vision"));
    }
    let defaults = Defaults {
        vocab_size: 262_144,
        hidden_size: 2304,
        intermediate_size: 9216,
        layers: 30,
        heads: 8,
        kv_heads: Some(4),
        head_dim: Some(256),
        positions: 131_072,
        ..LLAMA_DEFAULTS
    };
    // Its rotary settings are read by kind below.
    let mut raw = f.raw.clone();
    raw.remove("rope_parameters");
    let shape = llama_like(&Fields { raw: &raw, ..*f }, &defaults)?;
    let layers = shape.num_hidden_layers;
    let is_local = local_layers(f, layers)?;
    let layer_shapes = layer_shapes(f, &shape, &is_local)?;
    let first_layer = |local: bool| is_local.iter().position(|layer| *layer == local);
    let default = json!({
        KINDS[0]: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        KINDS[1]: {"rope_type": "default", "rope_theta": 10000.0},
    });
    let rope = |local: bool| {
        // A kind without layers has the settings of the other.
        let at = first_layer(local).or_else(|| first_layer(!local)).unwrap_or(0);
        f.rope_of_kind(KINDS[usize::from(is_local[at])], layer_shapes[at].head_dim, &default)
    };
    let ropes = vec![rope(false)?, rope(true)?];
    for (layer, rope) in layer_shapes.iter().zip(is_local.iter().map(|local| &ropes[usize::from(*local)])) {
        let widest = if matches!(rope.scaling, RopeScaling::Proportional { .. }) { rope.dim } else { layer.head_dim };
        if widest != layer.head_dim {
            return Err(f.wrong("per_layer_config", "the same head_dim in all layers of a kind"));
        }
    }
    let width = f.count("hidden_size_per_layer_input", 256)?;
    let layer_inputs = LayerInputs { width, vocab_size: f.size("vocab_size_per_layer_input", 262_144)? };
    if width.saturating_mul(layers) > MOST_WIDTH {
        return Err(f.wrong("hidden_size_per_layer_input", &format!("at most {MOST_WIDTH} in all layers")));
    }
    if width > 0 && layer_inputs.vocab_size < shape.vocab_size {
        let expected = format!("at least vocab_size = {}", shape.vocab_size);
        return Err(f.wrong("vocab_size_per_layer_input", &expected));
    }
    let bias = f.flag("attention_bias", false)?;
    let window = f.size("sliding_window", 512)?;
    Ok(Shape {
        order: Order::Sandwich,
        activation: f.activation("hidden_activation", "gelu_pytorch_tanh")?,
        embedding_scale: (shape.hidden_size as f64).sqrt(),
        attention_scale: 1.0,
        final_softcap: f
            .present("final_logit_softcapping")
            .map(|_| f.positive("final_logit_softcapping", None))
            .transpose()?,
        tie_word_embeddings: f.flag("tie_word_embeddings", true)?,
        windows: is_local.iter().map(|local| local.then_some(window)).collect(),
        layer_ropes: is_local.iter().map(|local| Some(usize::from(*local))).collect(),
        ropes,
        layer_shapes,
        layer_inputs: (width > 0).then_some(layer_inputs),
        experts: experts(f, &shape)?,
        has_layer_scalars: true,
        qkv_bias: bias,
        attention_out_bias: bias,
        ..shape
    })
}

/// The experts in addition to the MLP of every layer, if there are any.
fn experts(f: &Fields<'_>, shape: &Shape) -> Result<Option<Experts>> {
    if !f.flag("enable_moe_block", false)? {
        return Ok(None);
    }
    let required = |name: &str| match f.present(name) {
        None => Err(f.wrong(name, "an integer from 1, as enable_moe_block is true")),
        Some(_) => f.size(name, 1),
    };
    let (count, chosen) = (required("num_experts")?, required("top_k_experts")?);
    if chosen > count {
        return Err(f.wrong("top_k_experts", &format!("at most num_experts = {count}")));
    }
    Ok(Some(Experts {
        count,
        chosen,
        intermediate_size: required("moe_intermediate_size")?,
        scoring: Scoring::Softmax,
        normalized: true,
        shared: Some(shape.intermediate_size),
        layers: vec![true; shape.num_hidden_layers as usize],
        clamped: None,
    }))
}

/// Whether each layer has a window: as in transformers, the last one never has.
fn local_layers(f: &Fields<'_>, layers: i64) -> Result<Vec<bool>> {
    let windows = f.windows(Some(1), layers, |layer| (layer + 1) % 6 != 0)?;
    let mut local: Vec<bool> = windows.iter().map(Option::is_some).collect();
    if let Some(last) = local.last_mut() {
        *last = false;
    }
    Ok(local)
}

/// Heads of each layer, and the layers whose keys and values they have.
fn layer_shapes(f: &Fields<'_>, shape: &Shape, is_local: &[bool]) -> Result<Vec<LayerShape>> {
    let layers = is_local.len();
    let values_are_keys = f.flag("attention_k_eq_v", false)?;
    let wide = f.flag("use_double_wide_mlp", false)?;
    let shared = f.count("num_kv_shared_layers", 0)? as usize;
    let Some(first_shared) = layers.checked_sub(shared).filter(|first_shared| *first_shared > 0) else {
        return Err(f.wrong("num_kv_shared_layers", &format!("a number below the {layers} layers")));
    };
    let heads = layer_heads(f, shape, (is_local, values_are_keys))?;
    let layer = |i: usize| {
        let [head_dim, kv_heads] = heads[i];
        let source = is_local[..first_shared].iter().rposition(|local| *local == is_local[i]);
        let Some(source) = source else {
            return Err(f.wrong("num_kv_shared_layers", "a layer of each kind before those that share its keys"));
        };
        if i >= first_shared && heads[source] != heads[i] {
            return Err(f.wrong("per_layer_config", "the same heads in layers that share keys and values"));
        }
        if shape.num_attention_heads % kv_heads != 0 {
            let expected = format!("numbers of key heads that divide {}", shape.num_attention_heads);
            return Err(f.wrong("num_global_key_value_heads", &expected));
        }
        let factor = if wide && i >= first_shared { 2 } else { 1 };
        Ok(LayerShape {
            head_dim,
            kv_heads,
            keys_from: (i >= first_shared).then_some(source),
            values_are_keys: values_are_keys && !is_local[i],
            intermediate_size: shape.intermediate_size * factor,
        })
    };
    (0..layers).map(layer).collect()
}

/// Width and number of the key heads of each layer: by number of the layer in `per_layer_config`, or by the names for layers without a window.
fn layer_heads(f: &Fields<'_>, shape: &Shape, (is_local, is_gated): (&[bool], bool)) -> Result<Vec<[i64; 2]>> {
    let usual = [shape.head_dim, shape.num_key_value_heads];
    let Some(by_layer) = f.present("per_layer_config") else {
        let kv_heads = if is_gated { f.size("num_global_key_value_heads", usual[1])? } else { usual[1] };
        let full = [f.size("global_head_dim", 512)?, kv_heads];
        return Ok(is_local.iter().map(|local| if *local { usual } else { full }).collect());
    };
    let wrong = || f.wrong("per_layer_config", "an object of head_dim and num_key_value_heads by the layers' numbers");
    let mut heads = vec![usual; is_local.len()];
    for (number, settings) in by_layer.as_object().ok_or_else(wrong)? {
        let layer: usize = number.parse().ok().filter(|layer| *layer < heads.len()).ok_or_else(wrong)?;
        let settings: &serde_json::Map<String, Value> = settings.as_object().ok_or_else(wrong)?;
        if settings.keys().any(|key| !["head_dim", "num_key_value_heads"].contains(&key.as_str())) {
            return Err(wrong());
        }
        let fields = Fields { raw: settings, ..*f };
        heads[layer] = [fields.size("head_dim", usual[0])?, fields.size("num_key_value_heads", usual[1])?];
    }
    Ok(heads)
}
