//! Settings of single families.

use super::super::forms::{
    ANGLE_FACTOR, BETA_FAST, BETA_SLOW, CONV_CACHE, DENSE_LAYERS, EXPERT_COUNT, EXPERT_WIDTH, EXPERTS_USED, GATING,
    GROWTH, INTERVAL, LOCAL_BASE, LOG_MULTIPLIER, LOGIT_CAP, PATTERN, RECURRENT, SCORE_CAP, SECTIONS, SHARED_WIDTH,
    SIGMOID, SSM_GROUPS, SSM_INNER, SSM_KERNEL, SSM_RANK, SSM_STATE, WINDOW,
};
use super::{ROPE_FACTORS, Settings};
use rlhf_base::Result;
use rlhf_base::safe_text::beginning;
use rlhf_lm::gguf::Value as Meta;
use serde_json::{Map, Value, json};

/// Sizes that the settings of a family depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) hidden: i64,
    pub(super) heads: i64,
    pub(super) head_dim: i64,
    pub(super) layers: i64,
}

/// The number of layers by which llama.cpp recognizes the 27B models of Gemma 2 and Gemma 3, which scale scores by another width.
pub(in crate::convert) fn score_width(architecture: &str, layers: i64, hidden: i64, heads: i64, head_dim: i64) -> i64 {
    let is_largest = layers == if architecture == "gemma2" { 46 } else { 62 };
    if is_largest { hidden / heads } else { head_dim }
}

/// Rotary settings without scaling.
fn plain(theta: f64) -> Value {
    json!({"rope_type": "default", "rope_theta": theta})
}

impl Settings<'_> {
    /// LFM2's convolutions.
    pub(super) fn convolutions(&self, eps: f64, layer_types: Option<Value>) -> Result<Map<String, Value>> {
        let mut all = Map::from_iter([
            ("norm_eps".into(), json!(eps)),
            ("conv_L_cache".into(), json!(self.size(CONV_CACHE)?)),
            ("conv_bias".into(), json!(false)),
        ]);
        if self.form.model_type == "lfm2" {
            all.insert("block_auto_adjust_ff_dim".into(), json!(false));
        }
        all.extend(layer_types.map(|types| ("layer_types".to_string(), types)));
        Ok(all)
    }

    /// Qwen3.5's delta rule, and the layers that have it.
    pub(super) fn delta(&self, sizes: Sizes) -> Result<Map<String, Value>> {
        let (inner, values, keys) = (self.size(SSM_INNER)?, self.size(SSM_RANK)?, self.size(SSM_GROUPS)?);
        for (name, number, divisor) in [(SSM_INNER, inner, values), (SSM_RANK, values, keys)] {
            if number % divisor != 0 {
                let key = self.key(name);
                return Err(self
                    .file
                    .error(format!("`{key}`: expected a multiple of {divisor} heads, found {number}")));
            }
        }
        let layer_types = self.layers_with_attention(sizes.layers)?.into_iter();
        let kind = |attends: bool| if attends { "full_attention" } else { "linear_attention" };
        Ok(Map::from_iter([
            ("layer_types".into(), json!(layer_types.map(kind).collect::<Vec<_>>())),
            ("linear_conv_kernel_dim".into(), json!(self.size(SSM_KERNEL)?)),
            ("linear_key_head_dim".into(), json!(self.size(SSM_STATE)?)),
            ("linear_value_head_dim".into(), json!(inner / values)),
            ("linear_num_key_heads".into(), json!(keys)),
            ("linear_num_value_heads".into(), json!(values)),
        ]))
    }

    /// Whether each layer has attention: the file says for each layer that it has none, or each so many layers have it.
    fn layers_with_attention(&self, layers: i64) -> Result<Vec<bool>> {
        // Later layers are in the list too.
        if let Some(recurrent) = self.by_layer(RECURRENT, layers)? {
            return Ok(recurrent.into_iter().map(|recurrent| !recurrent).collect());
        }
        let interval = if self.optional(INTERVAL)?.is_some() { self.size(INTERVAL)? } else { 4 };
        Ok((1..=layers).map(|number| number % interval == 0).collect())
    }

    /// A truth value for each of the layers, if the key is set.
    pub(super) fn by_layer(&self, name: &str, layers: i64) -> Result<Option<Vec<bool>>> {
        let key = self.key(name);
        let Some(mut all) = self.file.flags(&key)? else { return Ok(None) };
        let [_, later] = self.layers()?;
        if ![layers, layers + later].contains(&(all.len() as i64)) {
            let message = format!("`{key}`: expected a truth value for each of {layers} layers, found {}", all.len());
            return Err(self.file.error(message));
        }
        all.truncate(layers as usize);
        Ok(Some(all))
    }

    /// The experts of the families that have them. llama.cpp divides their weights by their sum.
    pub(super) fn experts(&self) -> Result<Map<String, Value>> {
        let family = self.form.model_type;
        let has_none = family == "gemma4_text" && self.optional(EXPERT_COUNT)?.unwrap_or(0) == 0;
        if !self.form.has_experts() || has_none {
            return Ok(Map::new());
        }
        let (count, chosen) = (json!(self.size(EXPERT_COUNT)?), json!(self.size(EXPERTS_USED)?));
        let count_name = if ["mixtral", "gpt_oss"].contains(&family) { "num_local_experts" } else { "num_experts" };
        let chosen_name = if family == "gemma4_text" { "top_k_experts" } else { "num_experts_per_tok" };
        let mut all = Map::from_iter([(count_name.into(), count), (chosen_name.into(), chosen)]);
        let mut set = |name: &str, value: Value| drop(all.insert(name.into(), value));
        match family {
            // Experts are as wide as the MLP that the file names.
            "mixtral" => {}
            "gpt_oss" => set("intermediate_size", json!(self.size(EXPERT_WIDTH)?)),
            _ => set("moe_intermediate_size", json!(self.size(EXPERT_WIDTH)?)),
        }
        match family {
            "gemma4_text" => set("enable_moe_block", json!(true)),
            "qwen3_moe" | "qwen3_next" => {
                set("norm_topk_prob", json!(true));
                set("decoder_sparse_step", json!(1));
                set("mlp_only_layers", json!([]));
            }
            "lfm2_moe" => {
                let key = self.key(GATING);
                if let Some(found) = self.file.integer(&key)?.filter(|found| *found != SIGMOID) {
                    return Err(self.file.error(format!("`{key}`: expected {SIGMOID}, the sigmoid, found {found}")));
                }
                set("num_dense_layers", json!(self.optional(DENSE_LAYERS)?.unwrap_or(0)));
                for (name, value) in [("norm_topk_prob", json!(true)), ("use_expert_bias", json!(true))] {
                    set(name, value);
                }
                set("routed_scaling_factor", json!(1.0));
            }
            _ => {}
        }
        if self.form.keys.contains(&SHARED_WIDTH) {
            set("shared_expert_intermediate_size", json!(self.size(SHARED_WIDTH)?));
        }
        Ok(all)
    }

    /// Windows of gpt-oss and OLMo 3: in all layers but each second or fourth, as llama.cpp has them.
    pub(super) fn windows(&self, layers: i64) -> Result<Map<String, Value>> {
        let period = if self.form.model_type == "gpt_oss" { 2 } else { 4 };
        let usual: Vec<bool> = (1..=layers).map(|number| number % period != 0).collect();
        let key = self.key(PATTERN);
        let other = match self.file.metadata().get(&key) {
            None => None,
            Some(Meta::Integer(found)) => (*found != period).then(|| found.to_string()),
            Some(_) => {
                let found = self.by_layer(PATTERN, layers)?.unwrap_or_default();
                let layer = found.iter().zip(&usual).position(|(found, usual)| found != usual);
                layer.map(|layer| format!("{} in layer {layer}", if found[layer] { "one" } else { "none" }))
            }
        };
        if let Some(found) = other {
            let message = format!("`{key}`: expected windows in all layers but each {period}, found {found}");
            return Err(self.file.error(message));
        }
        let kind = |local: &bool| if *local { "sliding_attention" } else { "full_attention" };
        Ok(Map::from_iter([
            ("sliding_window".into(), json!(self.size(WINDOW)?)),
            ("layer_types".into(), json!(usual.iter().map(kind).collect::<Vec<_>>())),
        ]))
    }

    /// Gemma's windows, caps and factor of scores.
    pub(super) fn gemma(&self, sizes: Sizes) -> Result<Map<String, Value>> {
        let Sizes { hidden, heads, head_dim, layers } = sizes;
        let is_second = self.architecture == "gemma2";
        let window = if is_second { self.optional(WINDOW)?.unwrap_or(4096) } else { self.size(WINDOW)? };
        let known = if is_second { 2 } else { 6 };
        let pattern = if is_second || self.optional(PATTERN)?.is_none() { known } else { self.size(PATTERN)? };
        let kind = |layer: i64| if (layer + 1) % pattern == 0 { "full_attention" } else { "sliding_attention" };
        let cap = |name: &str, default: f64| -> Result<Value> {
            if is_second { Ok(json!(self.file.number(&self.key(name))?.unwrap_or(default))) } else { Ok(Value::Null) }
        };
        let mut all = Map::from_iter([
            ("hidden_activation".into(), json!("gelu_pytorch_tanh")),
            ("query_pre_attn_scalar".into(), json!(score_width(self.architecture, layers, hidden, heads, head_dim))),
            ("sliding_window".into(), json!(window)),
            ("layer_types".into(), json!((0..layers).map(kind).collect::<Vec<_>>())),
            ("attn_logit_softcapping".into(), cap(SCORE_CAP, 50.0)?),
            ("final_logit_softcapping".into(), cap(LOGIT_CAP, 30.0)?),
        ]);
        if !is_second {
            all.insert("sliding_window_pattern".into(), json!(pattern));
        }
        Ok(all)
    }

    /// The fields of rotary positions.
    pub(super) fn ropes(&self, theta: f64, scaling: Option<Value>, head_dim: i64) -> Result<Map<String, Value>> {
        let mut all = Map::from_iter([("rope_theta".to_string(), json!(theta))]);
        match self.architecture {
            "qwen35" | "qwen35moe" | "qwen3next" => {
                all = Map::from_iter([("rope_parameters".into(), self.sections(theta, scaling.as_ref(), head_dim)?)]);
            }
            "gpt-oss" => {
                self.check_same_base(theta)?;
                all = Map::from_iter([("rope_parameters".into(), self.whole_yarn(theta, scaling)?)]);
            }
            "olmo2" if self.form.model_type == "olmo3" => {
                self.check_same_base(theta)?;
                let full = if scaling.is_some() { self.whole_yarn(theta, scaling)? } else { plain(theta) };
                let by_kind = json!({"full_attention": full, "sliding_attention": plain(theta)});
                all = Map::from_iter([("rope_parameters".into(), by_kind)]);
            }
            "mistral3" => all = Map::from_iter([("rope_parameters".into(), self.growth(theta, scaling)?)]),
            architecture => {
                all.extend(scaling.map(|scaling| ("rope_scaling".to_string(), scaling)));
                if architecture == "gemma3" {
                    let local = self.file.number(&self.key(LOCAL_BASE))?.unwrap_or(10_000.0);
                    all.insert("rope_local_base_freq".into(), json!(local));
                }
            }
        }
        Ok(all)
    }

    /// Qwen3.5's rotary positions. The parts for time, height and width differ in images only.
    fn sections(&self, theta: f64, scaling: Option<&Value>, head_dim: i64) -> Result<Value> {
        let rotated = self.optional("rope.dimension_count")?.unwrap_or(head_dim);
        if !(1..=head_dim).contains(&rotated) {
            let key = self.key("rope.dimension_count");
            return Err(self.file.error(format!("`{key}`: expected from 1 to {head_dim}, found {rotated}")));
        }
        let mut share = rotated as f64 / head_dim as f64;
        if ((head_dim as f64 * share) as i64) < rotated {
            // transformers truncates the product.
            share *= 1.0 + f64::EPSILON;
        }
        let mut all = json!({"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share});
        if let Some(sections) = self.file.integers(&self.key(SECTIONS))? {
            all["mrope_interleaved"] = json!(true);
            all["mrope_section"] = json!(&sections[..sections.len().min(3)]);
        }
        for (name, value) in scaling.and_then(Value::as_object).into_iter().flatten() {
            all[name.as_str()] = value.clone();
        }
        Ok(all)
    }

    /// The settings of YaRN; refuses another scaling.
    fn only_yarn(&self, scaling: Option<Value>) -> Result<Value> {
        match scaling {
            Some(scaling) if scaling["rope_type"] == "yarn" => Ok(scaling),
            _ if self.file.tensors().contains_key(ROPE_FACTORS) => {
                Err(self.file.error(format!("expected yarn, found the tensor `{ROPE_FACTORS}` of another scaling")))
            }
            _ => {
                let key = self.key("rope.scaling.type");
                let found = self.file.text(&key)?.unwrap_or("none");
                Err(self.file.error(format!("`{key}`: expected yarn, found {}", beginning(found, 120))))
            }
        }
    }

    /// YaRN with all its settings, of gpt-oss and OLMo 3.
    fn whole_yarn(&self, theta: f64, scaling: Option<Value>) -> Result<Value> {
        let mut all = self.only_yarn(scaling)?;
        let factor = self.required("rope.scaling.factor")?;
        let usual = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
        let key = self.key(ANGLE_FACTOR);
        if let Some(found) = self.file.number(&key)?.filter(|found| (found - usual).abs() > 1e-4) {
            return Err(self
                .file
                .error(format!("`{key}`: expected {usual:.4}, as llama.cpp computes it, found {found}")));
        }
        all["rope_theta"] = json!(theta);
        all["beta_fast"] = json!(self.file.number(&self.key(BETA_FAST))?.unwrap_or(32.0));
        all["beta_slow"] = json!(self.file.number(&self.key(BETA_SLOW))?.unwrap_or(1.0));
        // Files cannot state it. All published gpt-oss models have false.
        all["truncate"] = json!(self.form.model_type != "gpt_oss");
        Ok(all)
    }

    /// Refuses another base of the angles in layers with windows, which llama.cpp does not use.
    fn check_same_base(&self, theta: f64) -> Result<()> {
        let key = self.key(LOCAL_BASE);
        match self.file.number(&key)?.filter(|local| *local != theta) {
            None => Ok(()),
            Some(local) => {
                Err(self.file.error(format!("`{key}`: expected {theta}, that of other layers, found {local}")))
            }
        }
    }

    /// Ministral 3's YaRN, and the growth of its queries.
    fn growth(&self, theta: f64, scaling: Option<Value>) -> Result<Value> {
        let mut all = self.only_yarn(scaling)?;
        let number =
            |name: &str, default: f64| -> Result<f64> { Ok(self.file.number(&self.key(name))?.unwrap_or(default)) };
        let multiplier = number(LOG_MULTIPLIER, 1.0)?;
        if multiplier <= 0.0 {
            let key = self.key(LOG_MULTIPLIER);
            return Err(self.file.error(format!("`{key}`: expected a number above 0, found {multiplier}")));
        }
        let more = [
            ("rope_theta", theta),
            ("beta_fast", number(BETA_FAST, 32.0)?),
            ("beta_slow", number(BETA_SLOW, 1.0)?),
            // Equal, so that cosines and sines keep their size.
            ("mscale", multiplier),
            ("mscale_all_dim", multiplier),
            ("llama_4_scaling_beta", number(GROWTH, 0.0)?),
        ];
        for (name, value) in more {
            all[name] = json!(value);
        }
        Ok(all)
    }
}
