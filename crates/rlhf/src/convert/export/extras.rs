//! Settings of single families: their keys, and the refusal of those that llama.cpp's files cannot state.

use super::super::description::score_width;
use super::super::forms::{
    BETA_FAST, BETA_SLOW, EXPERT_COUNT, EXPERT_WIDTH, EXPERTS_USED, Form, GROWTH, INTERVAL, LOCAL_BASE, LOG_MULTIPLIER,
    LOGIT_CAP, PATTERN, SCORE_CAP, SECTIONS, SSM_GROUPS, SSM_INNER, SSM_KERNEL, SSM_RANK, SSM_STATE, WINDOW,
};
use rlhf_base::weights::read_json;
use rlhf_base::{Error, Result};
use rlhf_lm::gguf::Value;
use rlhf_lm::model::{Mixing, ModelConfig, RopeScaling};
use serde_json::Value as Json;
use std::path::Path;

type Keys = Vec<(&'static str, Value)>;

/// llama.cpp's parts of the rotated dimensions where a file states none: as its converter has them.
const USUAL_SECTIONS: [i64; 4] = [11, 11, 10, 0];

/// Checks the settings of the newer families.
///
/// # Errors
/// If llama.cpp would compute something else.
pub(super) fn check(config: &ModelConfig, dir: &Path) -> Result<()> {
    let wrong = |key: &str, expected: &str, found: &dyn std::fmt::Display| {
        let path = dir.join("config.json");
        Err(Error::invalid(path, format!("`{key}`: expected {expected}, found {found}")))
    };
    let name = config.family.name;
    let is_new = ["qwen3_5_text", "gemma2", "gemma3_text", "ministral3", "qwen3_moe"].contains(&name);
    if is_new && (config.qkv_bias || config.attention_out_bias) {
        return wrong("attention_bias", "false, as llama.cpp has no such biases for this type", &true);
    }
    match name {
        "qwen3_5_text" => {
            let Some(Mixing::GatedDelta(delta)) = config.mixing else {
                return wrong("layer_types", "a layer of linear_attention", &"none");
            };
            if delta.value_dim != delta.key_dim {
                let expected = format!("linear_key_head_dim = {}, as llama.cpp has one width", delta.key_dim);
                return wrong("linear_value_head_dim", &expected, &delta.value_dim);
            }
            if interval(config).is_none() {
                return wrong("layer_types", "full_attention in each so many layers", &"another order");
            }
        }
        "gemma2" | "gemma3_text" => {
            let architecture = if name == "gemma2" { "gemma2" } else { "gemma3" };
            let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
            let width = score_width(architecture, config.num_hidden_layers, hidden, heads, config.head_dim);
            let found = config.attention_scale.powi(-2);
            if (found - width as f64).abs() > 1e-6 * found {
                let expected = format!("{width}, which llama.cpp takes from the other sizes");
                return wrong("query_pre_attn_scalar", &expected, &found.round());
            }
            check_gemma(config, name == "gemma2", &wrong)?;
        }
        "qwen3_moe" => match &config.experts {
            Some(experts) if !experts.layers.iter().all(|has_experts| *has_experts) => {
                return wrong("mlp_only_layers", "experts in all layers, as llama.cpp has them", &"other layers");
            }
            Some(experts) if experts.normalized => {}
            Some(_) => return wrong("norm_topk_prob", "true, as llama.cpp computes it", &false),
            None => return wrong("num_experts", "experts", &"none"),
        },
        "ministral3" => match &config.ropes[0].scaling {
            RopeScaling::Yarn { attention_factor, truncate: true, .. } if (attention_factor - 1.0).abs() < 1e-9 => {}
            _ => {
                let expected = "yarn with truncate, and equal mscale and mscale_all_dim, as llama.cpp computes it";
                return wrong("rope_parameters", expected, &"others");
            }
        },
        _ => {}
    }
    Ok(())
}

/// Refuses a setting by its key, with the expected and the found value.
type Wrong<'a> = &'a dyn Fn(&str, &str, &dyn std::fmt::Display) -> Result<()>;

fn check_gemma(config: &ModelConfig, is_second: bool, wrong: Wrong<'_>) -> Result<()> {
    let pattern = pattern(config);
    if pattern.is_none() || is_second && pattern != Some(2) {
        let expected = if is_second { "windows in every other layer" } else { "no window in each so many layers" };
        return wrong("layer_types", &format!("{expected}, and one width"), &"others");
    }
    if is_second {
        for (key, cap) in
            [("attn_logit_softcapping", config.attention_softcap), ("final_logit_softcapping", config.final_softcap)]
        {
            if cap.is_none() {
                return wrong(key, "a number", &"null");
            }
        }
        if !config.tie_word_embeddings {
            return wrong("tie_word_embeddings", "true, as llama.cpp has no other head for this type", &false);
        }
    } else if let Some(cap) = config.final_softcap {
        return wrong("final_logit_softcapping", "null, as llama.cpp has no cap in models with windows", &cap);
    }
    let local = |layer: usize| usize::from(!is_second && config.windows[layer].is_some());
    let by_window = config.layer_ropes.iter().enumerate().all(|(layer, rope)| *rope == Some(local(layer)));
    let is_plain = config.ropes.get(1).is_none_or(|rope| rope.scaling == RopeScaling::Default);
    let is_known = matches!(config.ropes[0].scaling, RopeScaling::Default | RopeScaling::Linear { .. });
    if !by_window || !is_plain || !is_known {
        let expected = "a rope type of default or linear, and default in layers with windows";
        return wrong("rope_parameters", expected, &"others");
    }
    Ok(())
}

/// The number of layers of which the last has attention, if all layers keep to one.
fn interval(config: &ModelConfig) -> Option<i64> {
    regular(&config.mixes)
}

/// The number of layers of which the last has no window, if all layers keep to one and windows have one width.
fn pattern(config: &ModelConfig) -> Option<i64> {
    let mut widths = config.windows.iter().flatten();
    let first = widths.next()?;
    let has_window: Vec<bool> = config.windows.iter().map(Option::is_some).collect();
    regular(&has_window).filter(|_| widths.all(|width| width == first))
}

/// The number of layers of which only the last differs from `usual`.
fn regular(usual: &[bool]) -> Option<i64> {
    let first = usual.iter().position(|usual| !usual)?;
    let period = first + 1;
    let fits = |(layer, usual): (usize, &bool)| *usual != (layer + 1).is_multiple_of(period);
    usual.iter().enumerate().all(fits).then_some(period as i64)
}

/// The keys of one family.
pub(super) fn keys(config: &ModelConfig, form: &Form, dir: &Path) -> Result<Keys> {
    match form.architecture {
        "qwen35" => delta(config, dir),
        "gemma2" | "gemma3" => Ok(gemma(config, form.architecture == "gemma2")),
        "mistral3" => growth(config, dir),
        "qwen3moe" => Ok(experts(config)),
        _ => Ok(Vec::new()),
    }
}

fn delta(config: &ModelConfig, dir: &Path) -> Result<Keys> {
    let Some(Mixing::GatedDelta(delta)) = config.mixing else { return Ok(Vec::new()) };
    let sections = rope_field(dir, "mrope_section")?;
    let mut sections = match sections.as_ref().and_then(Json::as_array) {
        Some(list) => list.iter().filter_map(Json::as_i64).collect(),
        None => USUAL_SECTIONS.to_vec(),
    };
    sections.resize(USUAL_SECTIONS.len(), 0);
    let size = Value::Integer;
    Ok(vec![
        (SECTIONS, Value::Integers(sections)),
        (SSM_KERNEL, size(delta.kernel)),
        (SSM_STATE, size(delta.key_dim)),
        (SSM_GROUPS, size(delta.key_heads)),
        (SSM_RANK, size(delta.value_heads)),
        (SSM_INNER, size(delta.value_dim * delta.value_heads)),
        (INTERVAL, size(interval(config).unwrap_or(4))),
    ])
}

fn gemma(config: &ModelConfig, is_second: bool) -> Keys {
    let mut all = Vec::new();
    all.extend(config.windows.iter().flatten().next().map(|width| (WINDOW, Value::Integer(*width))));
    if is_second {
        let caps = [(SCORE_CAP, config.attention_softcap), (LOGIT_CAP, config.final_softcap)];
        all.extend(caps.into_iter().filter_map(|(key, cap)| Some((key, Value::Number(cap?)))));
        return all;
    }
    // llama.cpp has 6 where a file states none.
    all.extend(pattern(config).filter(|n| *n != 6).map(|n| (PATTERN, Value::Integer(n))));
    all.extend(config.ropes.get(1).map(|rope| (LOCAL_BASE, Value::Number(rope.theta))));
    all
}

fn experts(config: &ModelConfig) -> Keys {
    let Some(experts) = &config.experts else { return Vec::new() };
    let sizes =
        [(EXPERT_COUNT, experts.count), (EXPERTS_USED, experts.chosen), (EXPERT_WIDTH, experts.intermediate_size)];
    sizes.map(|(key, size)| (key, Value::Integer(size))).into()
}

fn growth(config: &ModelConfig, dir: &Path) -> Result<Keys> {
    let RopeScaling::Yarn { beta_fast, beta_slow, .. } = config.ropes[0].scaling else { return Ok(Vec::new()) };
    let multiplier = rope_field(dir, "mscale_all_dim")?.and_then(|value| value.as_f64()).unwrap_or(1.0);
    let beta = config.query_growth.map_or(0.0, |growth| growth.beta);
    Ok(vec![
        (BETA_FAST, Value::Number(beta_fast)),
        (BETA_SLOW, Value::Number(beta_slow)),
        (LOG_MULTIPLIER, Value::Number(multiplier)),
        (GROWTH, Value::Number(beta)),
    ])
}

/// A field of the rotary settings in `config.json`, which only llama.cpp uses.
fn rope_field(dir: &Path, name: &str) -> Result<Option<Json>> {
    let whole = read_json(&dir.join("config.json"))?;
    let text = whole.get("text_config").filter(|text| text.is_object()).unwrap_or(&whole);
    let field = |key: &str| text.get(key).and_then(|settings| settings.get(name)).filter(|value| !value.is_null());
    Ok(field("rope_parameters").or_else(|| field("rope_scaling")).cloned())
}
