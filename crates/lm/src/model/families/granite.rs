//! Granite (dense): Llama with factors of the embeddings, the scores, the branches and the logits.

use super::{LLAMA, llama};
use crate::model::shape::{Family, Fields, Shape};
use rlhf_base::Result;

pub(super) const GRANITE: Family = Family {
    name: "granite",
    causal_lm_class: Some("GraniteForCausalLM"),
    // transformers 5.23 has no such class.
    classifier_class: "GraniteForSequenceClassification",
    shape,
    names: LLAMA,
};

fn shape(f: &Fields<'_>) -> Result<Shape> {
    Ok(Shape {
        embedding_scale: f.number("embedding_multiplier", 1.0)?,
        attention_scale: f.number("attention_multiplier", 1.0)?,
        branch_scale: f.number("residual_multiplier", 1.0)?,
        lm_head_scale: 1.0 / f.positive("logits_scaling", Some(1.0))?,
        ..llama(f)?
    })
}
