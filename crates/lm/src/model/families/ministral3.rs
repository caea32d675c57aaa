//! Ministral 3: Mistral with YaRN, and queries that grow with their positions.

use super::{Defaults, LLAMA, LLAMA_DEFAULTS, llama_like};
use crate::model::shape::{Family, Fields, QueryGrowth, Shape};
use rlhf_base::Result;
use serde_json::json;

pub(super) const MINISTRAL3: Family = Family {
    name: "ministral3",
    causal_lm_class: Some("Ministral3ForCausalLM"),
    classifier_class: "Ministral3ForSequenceClassification",
    shape,
    names: LLAMA,
};

fn shape(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 131_072,
        intermediate_size: 14336,
        layers: 34,
        kv_heads: Some(8),
        head_dim: Some(128),
        positions: 262_144,
        norm_eps: 1e-5,
        ..LLAMA_DEFAULTS
    };
    let mut raw = f.raw.clone();
    if f.rope_settings()?.is_empty() {
        // transformers' default.
        let default = json!({
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        });
        raw.insert("rope_parameters".into(), default);
    }
    let f = &Fields { raw: &raw, ..*f };
    let settings = f.rope_settings()?;
    let rope_fields = Fields { raw: &settings, ..*f };
    let query_growth = QueryGrowth {
        beta: rope_fields.required("llama_4_scaling_beta")?,
        original: rope_fields.positive("original_max_position_embeddings", None)?,
    };
    let shape = llama_like(f, &defaults)?;
    let windows = vec![f.window("sliding_window", None)?; shape.num_hidden_layers as usize];
    Ok(Shape { query_growth: Some(query_growth), windows, ..shape })
}
