//! Settings of single families: their keys, and the refusal of those that llama.cpp's files cannot state.

use super::super::description::score_width;
use super::super::forms::{
    ANGLE_FACTOR, BETA_FAST, BETA_SLOW, DENSE_LAYERS, EXPERT_COUNT, EXPERT_WIDTH, EXPERTS_USED, Form, GATING, GROWTH,
    INTERVAL, Keys, LOCAL_BASE, LOG_MULTIPLIER, LOGIT_CAP, PATTERN, SCORE_CAP, SECTIONS, SHARED_WIDTH, SIGMOID,
    SSM_GROUPS, SSM_INNER, SSM_KERNEL, SSM_RANK, SSM_STATE, WINDOW, Wrong,
};
use super::shown;
use rlhf_base::weights::read_json;
use rlhf_base::{Error, Result};
use rlhf_lm::gguf::Value;
use rlhf_lm::model::{Mixing, ModelConfig, RopeScaling, Scoring};
use serde_json::Value as Json;
use std::path::Path;

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
    let has_biases = config.qkv_bias && config.attention_out_bias;
    if name == "gpt_oss" && !has_biases {
        return wrong("attention_bias", "true, as llama.cpp has it for this type", &false);
    }
    if WITHOUT_BIASES.contains(&name) && (config.qkv_bias || config.attention_out_bias) {
        return wrong("attention_bias", "false, as llama.cpp has no such biases for this type", &true);
    }
    check_experts(config, &wrong)?;
    match name {
        "qwen3_5_text" | "qwen3_5_moe_text" | "qwen3_next" => {
            let Some(Mixing::GatedDelta(delta)) = config.mixing else {
                return wrong("layer_types", "a layer of linear_attention", &"none");
            };
            if delta.value_dim != delta.key_dim {
                let expected = format!("linear_key_head_dim = {}, as llama.cpp has one width", delta.key_dim);
                return wrong("linear_value_head_dim", &expected, &delta.value_dim);
            }
            if interval(config).is_none() {
                let found = shown::full_attention(&config.mixes);
                return wrong("layer_types", "full_attention in each so many layers", &found);
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
        "gemma4_text" => super::gemma4::check(config, &wrong)?,
        "gpt_oss" => {
            check_windows(config, 2, &wrong)?;
            match &config.ropes[0].scaling {
                // All published models have no `truncate`.
                scaling @ RopeScaling::Yarn { truncate: false, .. } if has_usual_angle_factor(scaling) => {}
                _ => {
                    let expected = "yarn without truncate, and its usual attention_factor";
                    return wrong("rope_parameters", expected, &shown::ropes(&config.ropes));
                }
            }
            check_untied(config, &wrong)?;
        }
        "olmo3" => {
            check_windows(config, 4, &wrong)?;
            check_olmo3(config, &wrong)?;
            check_untied(config, &wrong)?;
        }
        "ministral3" => match &config.ropes[0].scaling {
            RopeScaling::Yarn { attention_factor, truncate: true, .. } if (attention_factor - 1.0).abs() < 1e-9 => {}
            _ => {
                let expected = "yarn with truncate, and equal mscale and mscale_all_dim, as llama.cpp computes it";
                return wrong("rope_parameters", expected, &shown::ropes(&config.ropes));
            }
        },
        _ => {}
    }
    Ok(())
}

/// Types whose attention has no biases in llama.cpp.
const WITHOUT_BIASES: [&str; 10] = [
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "ministral3",
    "qwen3_moe",
    "mixtral",
    "olmo3",
];

/// Whether cosines and sines have the factor that llama.cpp computes of YaRN's.
fn has_usual_angle_factor(scaling: &RopeScaling) -> bool {
    let RopeScaling::Yarn { factor, attention_factor, .. } = scaling else { return false };
    (attention_factor - super::usual_angle_factor(*factor)).abs() < 1e-6
}

fn check_olmo3(config: &ModelConfig, wrong: Wrong<'_>) -> Result<()> {
    let local = |layer: usize| usize::from(config.windows[layer].is_some());
    let by_window = config.layer_ropes.iter().enumerate().all(|(layer, rope)| *rope == Some(local(layer)));
    let fits = match config.ropes.as_slice() {
        [full, local] => {
            let is_known = match &full.scaling {
                RopeScaling::Default => true,
                scaling @ RopeScaling::Yarn { truncate: true, .. } => has_usual_angle_factor(scaling),
                _ => false,
            };
            is_known && local.scaling == RopeScaling::Default && local.theta == full.theta
        }
        _ => false,
    };
    if by_window && fits {
        return Ok(());
    }
    let expected =
        "yarn with its usual attention_factor or default, and default with the same base in layers with windows";
    wrong("rope_parameters", expected, &shown::ropes(&config.ropes))
}

fn check_untied(config: &ModelConfig, wrong: Wrong<'_>) -> Result<()> {
    if config.tie_word_embeddings {
        return wrong("tie_word_embeddings", "false, as llama.cpp needs a head for this type", &true);
    }
    Ok(())
}

/// Refuses windows elsewhere than in all layers but each `period`th, where llama.cpp has them.
fn check_windows(config: &ModelConfig, period: i64, wrong: Wrong<'_>) -> Result<()> {
    match pattern(config) {
        Some(found) if found == period => Ok(()),
        _ => {
            let expected = format!("no window in each {period} layers, and one width");
            wrong("layer_types", &expected, &shown::without_window(&config.windows))
        }
    }
}

/// Refuses experts that llama.cpp would compute otherwise.
fn check_experts(config: &ModelConfig, wrong: Wrong<'_>) -> Result<()> {
    let name = config.family.name;
    let Some(experts) = &config.experts else {
        let needs = ["qwen3_moe", "qwen3_next", "lfm2_moe"].contains(&name);
        return if needs { wrong("num_experts", "experts", &"none") } else { Ok(()) };
    };
    let dense = experts.layers.iter().take_while(|has_experts| !**has_experts).count();
    let first = if name == "lfm2_moe" { dense } else { 0 };
    if let Some(after) = experts.layers.iter().skip(first).position(|has_experts| !*has_experts) {
        let found = format!("none in layer {}", first + after);
        return wrong("mlp_only_layers", "experts in all layers, as llama.cpp has them", &found);
    }
    if !experts.normalized {
        return wrong("norm_topk_prob", "true, as llama.cpp computes it", &false);
    }
    match experts.scoring {
        Scoring::Sigmoid { is_biased: false, .. } => {
            return wrong("use_expert_bias", "true, as llama.cpp has it for this type", &false);
        }
        Scoring::Sigmoid { scale, .. } if scale != 1.0 => {
            return wrong("routed_scaling_factor", "1, as llama.cpp has no factor for this type", &scale);
        }
        _ => {}
    }
    if let Some(gate) = experts.clamped {
        for (key, expected, found) in [("swiglu_alpha", 1.702, gate.alpha), ("swiglu_limit", 7.0, gate.limit)] {
            if (found - expected).abs() > 1e-9 {
                return wrong(key, &format!("{expected}, which llama.cpp has for this type"), &found);
            }
        }
    }
    Ok(())
}

fn check_gemma(config: &ModelConfig, is_second: bool, wrong: Wrong<'_>) -> Result<()> {
    let pattern = pattern(config);
    if pattern.is_none() || is_second && pattern != Some(2) {
        let expected = if is_second { "windows in every other layer" } else { "no window in each so many layers" };
        return wrong("layer_types", &format!("{expected}, and one width"), &shown::without_window(&config.windows));
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
        return wrong("rope_parameters", expected, &shown::ropes(&config.ropes));
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
    let all = match form.architecture {
        "qwen35" | "qwen35moe" | "qwen3next" => delta(config, form, dir),
        "gemma2" | "gemma3" => Ok(gemma(config, form.architecture == "gemma2")),
        "gemma4" => Ok(super::gemma4::keys(config)),
        "mistral3" => growth(config, dir),
        "gpt-oss" => Ok([window(config), yarn(config)].concat()),
        "olmo2" if config.family.name == "olmo3" => Ok(olmo3(config)),
        _ => Ok(Vec::new()),
    };
    let mut all = all?;
    all.extend(experts(config, form));
    Ok(all)
}

/// The width of an MLP; a number for each layer if layers differ.
pub(super) fn widths(config: &ModelConfig) -> Value {
    let layers = &config.layer_shapes;
    if layers.iter().all(|layer| layer.intermediate_size == config.intermediate_size) {
        return Value::Integer(config.intermediate_size);
    }
    Value::Integers(layers.iter().map(|layer| layer.intermediate_size).collect())
}

/// The width of windows.
fn window(config: &ModelConfig) -> Keys {
    config.windows.iter().flatten().next().map(|width| (WINDOW, Value::Integer(*width))).into_iter().collect()
}

/// YaRN's bounds.
fn yarn(config: &ModelConfig) -> Keys {
    let RopeScaling::Yarn { beta_fast, beta_slow, .. } = config.ropes[0].scaling else { return Vec::new() };
    vec![(BETA_FAST, Value::Number(beta_fast)), (BETA_SLOW, Value::Number(beta_slow))]
}

fn olmo3(config: &ModelConfig) -> Keys {
    let mut all = [window(config), yarn(config)].concat();
    all.push((PATTERN, Value::Bools(config.windows.iter().map(Option::is_some).collect())));
    all.push((LOCAL_BASE, Value::Number(config.ropes[1].theta)));
    if let RopeScaling::Yarn { attention_factor, .. } = config.ropes[0].scaling {
        all.push((ANGLE_FACTOR, Value::Number(attention_factor)));
    }
    all
}

fn delta(config: &ModelConfig, form: &Form, dir: &Path) -> Result<Keys> {
    let Some(Mixing::GatedDelta(delta)) = config.mixing else { return Ok(Vec::new()) };
    let size = Value::Integer;
    let mut all = Vec::new();
    if form.keys.contains(&SECTIONS) {
        let sections = rope_field(dir, "mrope_section")?;
        let mut sections = match sections.as_ref().and_then(Json::as_array) {
            Some(list) => list.iter().filter_map(Json::as_i64).collect(),
            None => USUAL_SECTIONS.to_vec(),
        };
        sections.resize(USUAL_SECTIONS.len(), 0);
        all.push((SECTIONS, Value::Integers(sections)));
    }
    all.extend([
        (SSM_KERNEL, size(delta.kernel)),
        (SSM_STATE, size(delta.key_dim)),
        (SSM_GROUPS, size(delta.key_heads)),
        (SSM_RANK, size(delta.value_heads)),
        (SSM_INNER, size(delta.value_dim * delta.value_heads)),
        (INTERVAL, size(interval(config).unwrap_or(4))),
    ]);
    Ok(all)
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

fn experts(config: &ModelConfig, form: &Form) -> Keys {
    let Some(experts) = &config.experts else { return Vec::new() };
    let dense = experts.layers.iter().take_while(|has_experts| !**has_experts).count() as i64;
    let mut sizes = vec![(EXPERT_COUNT, experts.count), (EXPERTS_USED, experts.chosen)];
    let others = [
        (EXPERT_WIDTH, Some(experts.intermediate_size)),
        (SHARED_WIDTH, experts.shared),
        (DENSE_LAYERS, Some(dense)),
        (GATING, matches!(experts.scoring, Scoring::Sigmoid { .. }).then_some(SIGMOID)),
    ];
    let others = others.into_iter().filter(|(key, _)| form.keys.contains(key));
    sizes.extend(others.filter_map(|(key, size)| Some((key, size?))));
    sizes.into_iter().map(|(key, size)| (key, Value::Integer(size))).collect()
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
