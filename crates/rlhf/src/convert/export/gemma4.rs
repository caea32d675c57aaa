//! Settings of Gemma 4 in llama.cpp's files.

use super::super::forms::{
    Keys, LAYER_INPUT, LOCAL_BASE, LOCAL_KEY, LOCAL_ROTATED, LOCAL_VALUE, LOGIT_CAP, PATTERN, SHARED_KEYS, WINDOW,
    Wrong,
};
use super::shown;
use rlhf_base::Result;
use rlhf_lm::gguf::Value;
use rlhf_lm::model::{ModelConfig, RopeScaling};

/// The first layer that shares keys and values with an earlier one; the number of layers if none does.
fn first_shared(config: &ModelConfig) -> usize {
    let shares = |layer: &rlhf_lm::model::LayerShape| layer.keys_from.is_some();
    config.layer_shapes.iter().position(shares).unwrap_or(config.layer_shapes.len())
}

/// Checks the settings of a model.
///
/// # Errors
/// If llama.cpp would compute something else.
pub(super) fn check(config: &ModelConfig, wrong: Wrong<'_>) -> Result<()> {
    // Its rotary angles are those of layers without a window, then those of layers with one.
    let ropes = config.ropes.as_slice();
    let fits = matches!(ropes, [full, local] if local.scaling == RopeScaling::Default
        && matches!(full.scaling, RopeScaling::Proportional { factor: 1.0, .. }));
    if !fits {
        let expected = "proportional without a factor, and default in layers with windows";
        return wrong("rope_parameters", expected, &shown::ropes(ropes));
    }
    let first = first_shared(config);
    for (layer, shape) in config.layer_shapes.iter().enumerate().skip(first) {
        // llama.cpp takes the last layer before them, or the one before that if they have windows.
        let source = first.checked_sub(if config.windows[layer].is_some() { 2 } else { 1 });
        if shape.keys_from != source {
            let expected = "before the layers that share keys one with a window and then one without";
            return wrong("layer_types", expected, &shown::windows(&config.windows[first.saturating_sub(2)..first]));
        }
    }
    if let Some(inputs) = config.layer_inputs.filter(|inputs| inputs.vocab_size != config.vocab_size) {
        let expected = format!("vocab_size = {}, as llama.cpp has one size", config.vocab_size);
        return wrong("vocab_size_per_layer_input", &expected, &inputs.vocab_size);
    }
    Ok(())
}

/// The keys that other families lack, and those of windows.
pub(super) fn keys(config: &ModelConfig) -> Keys {
    let size = Value::Integer;
    let shared = config.layer_shapes.len() - first_shared(config);
    let local_width = config.ropes[1].dim;
    let mut all = vec![
        (LOCAL_BASE, Value::Number(config.ropes[1].theta)),
        (SHARED_KEYS, size(shared as i64)),
        (LAYER_INPUT, size(config.layer_inputs.map_or(0, |inputs| inputs.width))),
        (PATTERN, Value::Bools(config.windows.iter().map(Option::is_some).collect())),
        (LOCAL_KEY, size(local_width)),
        (LOCAL_VALUE, size(local_width)),
        ("rope.dimension_count", size(config.ropes[0].dim)),
        (LOCAL_ROTATED, size(local_width)),
    ];
    all.extend(config.windows.iter().flatten().next().map(|width| (WINDOW, size(*width))));
    all.extend(config.final_softcap.map(|cap| (LOGIT_CAP, Value::Number(cap))));
    all
}
