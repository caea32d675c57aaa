//! LFM2 with experts, which are chosen by sigmoids and numbers of the experts that their weights leave out.

use super::{Defaults, EXPERTS, LFM2, LLAMA_DEFAULTS, lfm2_like};
use crate::model::rope::{ROPE, RopeKeys};
use crate::model::shape::{ExpertNames, Experts, Family, Fields, Names, Scoring, Shape};
use rlhf_base::Result;

pub(super) const LFM2_MOE: Family = Family {
    name: "lfm2_moe",
    causal_lm_class: Some("Lfm2MoeForCausalLM"),
    // transformers 5.23 has no such class.
    classifier_class: "Lfm2MoeForSequenceClassification",
    shape,
    names: Names {
        experts: Some(ExpertNames {
            router: "feed_forward.gate",
            experts: "feed_forward.experts",
            inputs: ["w1", "w3"],
            out: "w2",
            bias: Some("feed_forward.expert_bias"),
            ..EXPERTS
        }),
        ..LFM2
    },
};

fn shape(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 65536,
        hidden_size: 2048,
        intermediate_size: 7168,
        kv_heads: Some(8),
        positions: 128_000,
        rope: RopeKeys { default_theta: 1e6, ..ROPE },
        ..LLAMA_DEFAULTS
    };
    let shape = lfm2_like(f, &defaults)?;
    let dense = f.count("num_dense_layers", 2)?;
    let scoring = Scoring::Sigmoid {
        is_biased: f.flag("use_expert_bias", true)?,
        scale: f.number("routed_scaling_factor", 1.0)?,
    };
    let count_name = if f.present("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let experts = Experts {
        count: f.size(count_name, 32)?,
        chosen: f.size("num_experts_per_tok", 4)?,
        intermediate_size: f.size("moe_intermediate_size", 1792)?,
        scoring,
        normalized: f.flag("norm_topk_prob", true)?,
        shared: None,
        layers: (0..shape.num_hidden_layers).map(|i| i >= dense).collect(),
        clamped: None,
    };
    Ok(Shape { experts: experts.layers.contains(&true).then_some(experts), ..shape })
}
