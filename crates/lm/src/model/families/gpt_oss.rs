//! gpt-oss: experts with a clamped gate, attention with sinks, windows in every other layer.

use super::{Defaults, LLAMA, llama_like};
use crate::model::rope::{ROPE, RopeKeys};
use crate::model::shape::{ClampedGate, ExpertNames, Experts, Family, Fields, Names, Scoring, Shape, Stacking};
use rlhf_base::Result;
use serde_json::json;

pub(super) const GPT_OSS: Family = Family {
    name: "gpt_oss",
    causal_lm_class: Some("GptOssForCausalLM"),
    classifier_class: "GptOssForSequenceClassification",
    shape,
    names: Names {
        sinks: Some("self_attn.sinks"),
        experts: Some(ExpertNames {
            router: "mlp.router",
            experts: "mlp.experts",
            inputs: ["gate_up_proj", ""],
            out: "down_proj",
            shared: None,
            bias: None,
            stacking: Some(Stacking::InOut),
        }),
        ..LLAMA
    },
};

fn shape(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 201_088,
        hidden_size: 2880,
        intermediate_size: 2880,
        layers: 36,
        heads: 64,
        kv_heads: Some(8),
        head_dim: Some(64),
        positions: 131_072,
        norm_eps: 1e-5,
        rope: RopeKeys { default_theta: 150_000.0, ..ROPE },
    };
    let mut raw = f.raw.clone();
    if f.rope_settings()?.is_empty() {
        // transformers' default.
        let default = json!({
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096,
        });
        raw.insert("rope_parameters".into(), default);
    }
    let f = &Fields { raw: &raw, ..*f };
    let shape = llama_like(f, &defaults)?;
    let layers = shape.num_hidden_layers;
    let count_name = if f.present("num_local_experts").is_some() { "num_local_experts" } else { "num_experts" };
    let experts = Experts {
        count: f.size(count_name, 128)?,
        chosen: f.size("num_experts_per_tok", 4)?,
        intermediate_size: shape.intermediate_size,
        scoring: Scoring::Softmax,
        normalized: true,
        shared: None,
        layers: vec![true; layers as usize],
        clamped: Some(ClampedGate {
            alpha: f.number("swiglu_alpha", 1.702)?,
            limit: f.positive("swiglu_limit", Some(7.0))?,
        }),
    };
    let bias = f.flag("attention_bias", true)?;
    let windows = f.windows(f.window("sliding_window", Some(128))?, layers, |layer| layer % 2 == 0)?;
    Ok(Shape { experts: Some(experts), has_sinks: true, qkv_bias: bias, attention_out_bias: bias, windows, ..shape })
}
