//! Qwen3.5 with experts in every layer, and an additional MLP that every token goes through.

use super::{Defaults, EXPERTS_WITH_SHARED, LLAMA_DEFAULTS, QWEN3_5, qwen3_5_like};
use crate::model::rope::{ROPE, RopeKeys};
use crate::model::shape::{Experts, Family, Fields, Names, Scoring, Shape};
use rlhf_base::Result;

pub(super) const QWEN3_5_MOE: Family = Family {
    name: "qwen3_5_moe_text",
    causal_lm_class: Some("Qwen3_5MoeForCausalLM"),
    // transformers 5.23 has no such class.
    classifier_class: "Qwen3_5MoeForSequenceClassification",
    shape,
    names: Names { experts: Some(EXPERTS_WITH_SHARED), ..QWEN3_5 },
};

fn shape(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 248_320,
        hidden_size: 2048,
        layers: 40,
        heads: 16,
        kv_heads: Some(2),
        head_dim: Some(256),
        positions: 32768,
        rope: RopeKeys { default_fraction: 0.25, ..ROPE },
        ..LLAMA_DEFAULTS
    };
    let shape = qwen3_5_like(f, &defaults)?;
    // transformers always divides by the sum.
    f.must_be("norm_topk_prob", true)?;
    let count_name = if f.present("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let experts = Experts {
        count: f.size(count_name, 256)?,
        chosen: f.size("num_experts_per_tok", 8)?,
        intermediate_size: f.size("moe_intermediate_size", 512)?,
        scoring: Scoring::Softmax,
        normalized: true,
        shared: Some(f.size("shared_expert_intermediate_size", 512)?),
        layers: vec![true; shape.num_hidden_layers as usize],
        clamped: None,
    };
    Ok(Shape { experts: Some(experts), ..shape })
}
