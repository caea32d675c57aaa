//! The families that llama.cpp's files hold, with the names of their tensors there and in a model folder.

use rlhf_base::Result;
use rlhf_lm::gguf::Value;

/// Settings of an architecture in a file.
pub(super) type Keys = Vec<(&'static str, Value)>;

/// Refuses a setting of a model folder by its key, with the expected and the found value.
pub(super) type Wrong<'a> = &'a dyn Fn(&str, &str, &dyn std::fmt::Display) -> Result<()>;

/// Names: llama.cpp's, and the one in a model folder.
type Pair = (&'static str, &'static str);

/// A family's form in llama.cpp's files.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    /// llama.cpp's name of the architecture.
    pub(super) architecture: &'static str,
    /// The key that a file has if it holds this family, among those of one architecture.
    told_by: Option<&'static str>,
    /// The `model_type` in a model folder.
    pub(super) model_type: &'static str,
    /// transformers' class.
    pub(super) class: &'static str,
    /// The tensors outside the layers.
    roots: &'static [Pair],
    /// The parts of a layer, each with a weight, and a bias if the family has them.
    parts: &'static [&'static [Pair]],
    /// The tensors of a layer whose ends have other names too.
    tensors: &'static [Pair],
    /// Tensors of a layer in a model folder that are two in a file.
    joined: &'static [(&'static str, [&'static str; 2])],
    /// The parts of a layer that stack the matrices of all experts, each with its name in an expert.
    experts: &'static [Pair],
    /// The place of experts in a layer of a model folder.
    place: &'static str,
    /// Whether neighbouring dimensions of queries and keys are rotated together.
    pub(super) is_interleaved: bool,
    /// Keys beyond those of all families.
    pub(super) keys: &'static [&'static str],
}

const ROOTS: [Pair; 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

const LFM2_ROOTS: [Pair; 3] = [ROOTS[0], ("token_embd_norm.weight", "model.embedding_norm.weight"), ROOTS[2]];

const ATTENTION: &[Pair] = &[
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
];

const MLP: &[Pair] = &[("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj")];

const STACKS: &[Pair] = &[("ffn_gate_exps", "gate_proj"), ("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")];

const ROUTER: &[Pair] = &[(ROUTER_PART, "mlp.gate")];

/// The MLP beside Qwen3.5's experts, and the gate of its output.
const SHARED: &[Pair] = &[
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

/// LFM2's and Mixtral's names of an expert's matrices.
const NUMBERED_STACKS: &[Pair] = &[("ffn_gate_exps", "w1"), ("ffn_up_exps", "w3"), ("ffn_down_exps", "w2")];

/// llama.cpp's name of the router of experts.
pub(super) const ROUTER_PART: &str = "ffn_gate_inp";

const NORMS: &[Pair] = &[("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")];

/// OLMo 2 normalizes the outputs of attention and MLP.
const OLMO2_NORMS: &[Pair] =
    &[("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")];

/// Gemma normalizes inputs and outputs.
const GEMMA_NORMS: &[Pair] = &[
    ("attn_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// Qwen3.5's norms are those of Llama; llama.cpp names the second after its place.
const QWEN35_NORMS: &[Pair] = &[("attn_norm", "input_layernorm"), ("post_attention_norm", "post_attention_layernorm")];

const DELTA: &[Pair] = &[
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
];

const DELTA_TENSORS: &[Pair] = &[("ssm_a", "linear_attn.A_log"), ("ssm_dt.bias", "linear_attn.dt_bias")];

/// Qwen3-Next's joint product of strengths and decays.
const NEXT_DELTA: &[Pair] = &[
    ("ssm_in", QKVZ),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
];

/// Qwen3-Next's product of queries, keys, values and gates. Old files have it as it is.
const QKVZ: &str = "linear_attn.in_proj_qkvz";

const GPT_OSS: &[Pair] = &[("attn_norm", "input_layernorm"), ("post_attention_norm", "post_attention_layernorm")];

const GPT_OSS_TENSORS: &[Pair] = &[
    ("attn_sinks.weight", "self_attn.sinks"),
    ("ffn_down_exps.weight", "mlp.experts.down_proj"),
    ("ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
];

const GEMMA4_ROOTS: &[Pair] = &[
    ROOTS[0],
    ROOTS[1],
    ROOTS[2],
    ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight"),
    ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight"),
    ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight"),
];

/// The inputs of Gemma 4's layers, and the norms around its experts.
const GEMMA4: &[Pair] = &[
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
    (ROUTER_PART, "router.proj"),
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
];

const GEMMA4_TENSORS: &[Pair] = &[
    ("layer_output_scale.weight", "layer_scalar"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    ("ffn_down_exps.weight", "experts.down_proj"),
];

const LFM2: &[Pair] = &[
    ("attn_norm", "operator_norm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_layernorm"),
    ("attn_k_norm", "self_attn.k_layernorm"),
    ("attn_output", "self_attn.out_proj"),
    ("shortconv.in_proj", "conv.in_proj"),
    ("shortconv.conv", "conv.conv"),
    ("shortconv.out_proj", "conv.out_proj"),
    ("ffn_norm", "ffn_norm"),
    ("ffn_gate", "feed_forward.w1"),
    ("ffn_up", "feed_forward.w3"),
    ("ffn_down", "feed_forward.w2"),
];

/// Factors of Granite's scores, embeddings, branches and logits.
pub(super) const ATTENTION_SCALE: &str = "attention.scale";
pub(super) const EMBEDDING_SCALE: &str = "embedding_scale";
pub(super) const RESIDUAL_SCALE: &str = "residual_scale";
pub(super) const LOGIT_SCALE: &str = "logit_scale";
/// Number of tokens that LFM2's convolutions read.
pub(super) const CONV_CACHE: &str = "shortconv.l_cache";
/// Sizes of Qwen3.5's delta rule: tokens of its convolution, width of a key or value, key heads, value heads, width of all values.
pub(super) const SSM_KERNEL: &str = "ssm.conv_kernel";
pub(super) const SSM_STATE: &str = "ssm.state_size";
pub(super) const SSM_GROUPS: &str = "ssm.group_count";
pub(super) const SSM_RANK: &str = "ssm.time_step_rank";
pub(super) const SSM_INNER: &str = "ssm.inner_size";
/// Qwen3.5's layers with attention: each so many layers, or a truth value for each layer that has none.
pub(super) const INTERVAL: &str = "full_attention_interval";
pub(super) const RECURRENT: &str = "attention.recurrent_layers";
/// Number of layers after the model that predict further tokens.
pub(super) const NEXTN: &str = "nextn_predict_layers";
/// Parts of the rotated dimensions for time, height and width.
pub(super) const SECTIONS: &str = "rope.dimension_sections";
/// Windows of Gemma: their size, and the number of layers of which one has none; the base of the angles in layers with windows.
pub(super) const WINDOW: &str = "attention.sliding_window";
pub(super) const PATTERN: &str = "attention.sliding_window_pattern";
pub(super) const LOCAL_BASE: &str = "rope.freq_base_swa";
/// Caps of Gemma 2's scores and logits.
pub(super) const SCORE_CAP: &str = "attn_logit_softcapping";
pub(super) const LOGIT_CAP: &str = "final_logit_softcapping";
/// Experts: their number, those of a token, and their width.
pub(super) const EXPERT_COUNT: &str = "expert_count";
pub(super) const EXPERTS_USED: &str = "expert_used_count";
pub(super) const EXPERT_WIDTH: &str = "expert_feed_forward_length";
/// Width of the MLP beside the experts; number of the first layers, which have none; the function of the router's results.
pub(super) const SHARED_WIDTH: &str = "expert_shared_feed_forward_length";
pub(super) const DENSE_LAYERS: &str = "leading_dense_block_count";
pub(super) const GATING: &str = "expert_gating_func";
/// llama.cpp's number of the sigmoid.
pub(super) const SIGMOID: i64 = 2;
/// Gemma 4: the last layers, which share earlier ones' keys and values; width of a layer's own input; heads and angles of layers with windows.
pub(super) const SHARED_KEYS: &str = "attention.shared_kv_layers";
pub(super) const LAYER_INPUT: &str = "embedding_length_per_layer_input";
pub(super) const LOCAL_KEY: &str = "attention.key_length_swa";
pub(super) const LOCAL_VALUE: &str = "attention.value_length_swa";
pub(super) const LOCAL_ROTATED: &str = "rope.dimension_count_swa";
/// Ministral 3: growth of queries, and YaRN's settings.
pub(super) const GROWTH: &str = "attention.temperature_scale";
pub(super) const BETA_FAST: &str = "rope.scaling.yarn_beta_fast";
pub(super) const BETA_SLOW: &str = "rope.scaling.yarn_beta_slow";
pub(super) const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";
/// Factor of cosines and sines, which llama.cpp computes itself.
pub(super) const ANGLE_FACTOR: &str = "rope.scaling.yarn_attn_factor";

const LLAMA: Form = Form {
    architecture: "llama",
    told_by: None,
    model_type: "llama",
    class: "LlamaForCausalLM",
    roots: &ROOTS,
    parts: &[NORMS, ATTENTION, MLP],
    tensors: &[],
    joined: &[],
    experts: &[],
    place: "mlp.experts",
    is_interleaved: true,
    keys: &[],
};

const QWEN35: Form = Form {
    architecture: "qwen35",
    model_type: "qwen3_5_text",
    class: "Qwen3_5ForCausalLM",
    parts: &[QWEN35_NORMS, ATTENTION, DELTA, MLP],
    tensors: DELTA_TENSORS,
    is_interleaved: false,
    keys: &[SSM_KERNEL, SSM_STATE, SSM_GROUPS, SSM_RANK, SSM_INNER, INTERVAL, RECURRENT, NEXTN, SECTIONS],
    ..LLAMA
};

const OLMO2: Form = Form {
    architecture: "olmo2",
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    parts: &[OLMO2_NORMS, ATTENTION, MLP],
    is_interleaved: false,
    ..LLAMA
};

const LFM2_FORM: Form = Form {
    architecture: "lfm2",
    model_type: "lfm2",
    class: "Lfm2ForCausalLM",
    roots: &LFM2_ROOTS,
    parts: &[LFM2],
    is_interleaved: false,
    keys: &[CONV_CACHE],
    ..LLAMA
};

/// The supported families. A family of an architecture comes after those that a key tells from it.
pub(super) static FORMS: [Form; 20] = [
    Form {
        told_by: Some(EXPERT_COUNT),
        model_type: "mixtral",
        class: "MixtralForCausalLM",
        parts: &[NORMS, ATTENTION, &[(ROUTER_PART, "block_sparse_moe.gate")]],
        experts: NUMBERED_STACKS,
        place: "block_sparse_moe.experts",
        ..LLAMA
    },
    LLAMA,
    // Files of Mistral say that they are Llama's.
    Form { model_type: "mistral", class: "MistralForCausalLM", ..LLAMA },
    Form { architecture: "qwen2", model_type: "qwen2", class: "Qwen2ForCausalLM", is_interleaved: false, ..LLAMA },
    Form { architecture: "qwen3", model_type: "qwen3", class: "Qwen3ForCausalLM", is_interleaved: false, ..LLAMA },
    Form {
        architecture: "qwen3moe",
        model_type: "qwen3_moe",
        class: "Qwen3MoeForCausalLM",
        parts: &[NORMS, ATTENTION, ROUTER],
        experts: STACKS,
        is_interleaved: false,
        keys: &[EXPERT_WIDTH],
        ..LLAMA
    },
    Form {
        architecture: "qwen3next",
        model_type: "qwen3_next",
        class: "Qwen3NextForCausalLM",
        parts: &[QWEN35_NORMS, ATTENTION, NEXT_DELTA, ROUTER, SHARED],
        joined: &[("linear_attn.in_proj_qkvz.weight", ["attn_qkv.weight", "attn_gate.weight"])],
        experts: STACKS,
        keys: &[
            SSM_KERNEL,
            SSM_STATE,
            SSM_GROUPS,
            SSM_RANK,
            SSM_INNER,
            INTERVAL,
            RECURRENT,
            EXPERT_WIDTH,
            SHARED_WIDTH,
        ],
        ..QWEN35
    },
    QWEN35,
    Form {
        architecture: "qwen35moe",
        model_type: "qwen3_5_moe_text",
        class: "Qwen3_5MoeForCausalLM",
        parts: &[QWEN35_NORMS, ATTENTION, DELTA, ROUTER, SHARED],
        experts: STACKS,
        keys: &[
            SSM_KERNEL,
            SSM_STATE,
            SSM_GROUPS,
            SSM_RANK,
            SSM_INNER,
            INTERVAL,
            RECURRENT,
            NEXTN,
            SECTIONS,
            EXPERT_WIDTH,
            SHARED_WIDTH,
        ],
        ..QWEN35
    },
    Form { architecture: "smollm3", model_type: "smollm3", class: "SmolLM3ForCausalLM", ..LLAMA },
    Form {
        told_by: Some(WINDOW),
        model_type: "olmo3",
        class: "Olmo3ForCausalLM",
        keys: &[WINDOW, PATTERN, LOCAL_BASE, BETA_FAST, BETA_SLOW, ANGLE_FACTOR],
        ..OLMO2
    },
    OLMO2,
    Form {
        architecture: "granite",
        model_type: "granite",
        class: "GraniteForCausalLM",
        keys: &[ATTENTION_SCALE, EMBEDDING_SCALE, RESIDUAL_SCALE, LOGIT_SCALE],
        ..LLAMA
    },
    LFM2_FORM,
    Form {
        architecture: "lfm2moe",
        model_type: "lfm2_moe",
        class: "Lfm2MoeForCausalLM",
        parts: &[LFM2, &[(ROUTER_PART, "feed_forward.gate")]],
        tensors: &[("exp_probs_b.bias", "feed_forward.expert_bias")],
        experts: NUMBERED_STACKS,
        place: "feed_forward.experts",
        keys: &[CONV_CACHE, EXPERT_WIDTH, DENSE_LAYERS, GATING],
        ..LFM2_FORM
    },
    Form {
        architecture: "gemma2",
        model_type: "gemma2",
        class: "Gemma2ForCausalLM",
        parts: &[GEMMA_NORMS, ATTENTION, MLP],
        is_interleaved: false,
        keys: &[WINDOW, SCORE_CAP, LOGIT_CAP],
        ..LLAMA
    },
    Form {
        architecture: "gemma3",
        model_type: "gemma3_text",
        class: "Gemma3ForCausalLM",
        parts: &[GEMMA_NORMS, ATTENTION, MLP],
        is_interleaved: false,
        keys: &[WINDOW, PATTERN, LOCAL_BASE],
        ..LLAMA
    },
    Form {
        architecture: "gemma4",
        model_type: "gemma4_text",
        class: "Gemma4ForCausalLM",
        roots: GEMMA4_ROOTS,
        parts: &[GEMMA_NORMS, ATTENTION, MLP, GEMMA4],
        tensors: GEMMA4_TENSORS,
        is_interleaved: false,
        keys: &[
            WINDOW,
            PATTERN,
            LOCAL_BASE,
            LOGIT_CAP,
            EXPERT_WIDTH,
            SHARED_KEYS,
            LAYER_INPUT,
            LOCAL_KEY,
            LOCAL_VALUE,
            LOCAL_ROTATED,
        ],
        ..LLAMA
    },
    Form {
        architecture: "gpt-oss",
        model_type: "gpt_oss",
        class: "GptOssForCausalLM",
        parts: &[GPT_OSS, ATTENTION, &[(ROUTER_PART, "mlp.router")]],
        tensors: GPT_OSS_TENSORS,
        joined: &[
            ("mlp.experts.gate_up_proj", ["ffn_gate_exps.weight", "ffn_up_exps.weight"]),
            ("mlp.experts.gate_up_proj_bias", ["ffn_gate_exps.bias", "ffn_up_exps.bias"]),
        ],
        is_interleaved: false,
        keys: &[WINDOW, PATTERN, LOCAL_BASE, EXPERT_WIDTH, BETA_FAST, BETA_SLOW, ANGLE_FACTOR],
        ..LLAMA
    },
    Form {
        architecture: "mistral3",
        model_type: "ministral3",
        class: "Ministral3ForCausalLM",
        keys: &[GROWTH, BETA_FAST, BETA_SLOW, LOG_MULTIPLIER],
        ..LLAMA
    },
];

/// Names in one text: `a, b or c`.
pub(super) fn listed(name: impl Fn(&Form) -> &'static str) -> String {
    let mut names: Vec<&str> = FORMS.iter().map(name).collect();
    // Families of one architecture are next to each other.
    names.dedup();
    let (last, others) = names.split_last().expect("there are several");
    format!("{} or {last}", others.join(", "))
}

impl Form {
    /// The form of llama.cpp's `architecture` in a file whose setting `has` a number above 0.
    pub(super) fn of_architecture(architecture: &str, has: impl Fn(&str) -> bool) -> Option<&'static Self> {
        FORMS.iter().find(|form| form.architecture == architecture && form.told_by.is_none_or(&has))
    }

    /// The form of a folder's `model_type`.
    pub(super) fn of_model_type(model_type: &str) -> Option<&'static Self> {
        FORMS.iter().find(|form| form.model_type == model_type)
    }

    /// Whether this is Gemma 2, 3 or 4.
    pub(super) fn is_gemma(&self) -> bool {
        self.architecture.starts_with("gemma")
    }

    /// The name in a model folder of a tensor of a GGUF file.
    pub(super) fn folder_name(&self, name: &str) -> Option<String> {
        if let Some((_, whole)) = self.roots.iter().find(|(gguf, _)| *gguf == name) {
            return Some((*whole).into());
        }
        let (layer, rest) = numbered("blk.", name)?;
        if let Some((_, folder_rest)) = self.tensors.iter().find(|(gguf, _)| *gguf == rest) {
            return Some(format!("model.layers.{layer}.{folder_rest}"));
        }
        let (part, end) = rest.rsplit_once('.')?;
        let (_, folder_part) = self.parts.iter().copied().flatten().find(|(gguf, _)| *gguf == part)?;
        ["weight", "bias"].contains(&end).then(|| format!("model.layers.{layer}.{folder_part}.{end}"))
    }

    /// Whether its layers may have experts.
    pub(super) fn has_experts(&self) -> bool {
        !self.experts.is_empty() || self.keys.contains(&EXPERT_WIDTH)
    }

    /// The tensor of a model folder of which a tensor of a GGUF file is one part of two, and the part's number.
    pub(super) fn whole_of(&self, name: &str) -> Option<(String, usize)> {
        let (layer, rest) = numbered("blk.", name)?;
        let part = |parts: &[&str; 2]| parts.iter().position(|part| *part == rest);
        let (whole, at) = self.joined.iter().find_map(|(whole, parts)| Some((whole, part(parts)?)))?;
        Some((format!("model.layers.{layer}.{whole}"), at))
    }

    /// The names in a GGUF file of the two parts of a tensor of a model folder, if it has parts.
    pub(super) fn parts_of(&self, name: &str) -> Option<[String; 2]> {
        let (layer, rest) = numbered("model.layers.", name)?;
        let (_, parts) = self.joined.iter().find(|(whole, _)| *whole == rest)?;
        Some(parts.map(|part| format!("blk.{layer}.{part}")))
    }

    /// The names in a model folder of the `count` matrices that a tensor of a GGUF file stacks; `None` if it is no stack.
    pub(super) fn stacked_names(&self, name: &str, count: i64) -> Option<Vec<String>> {
        let (layer, rest) = numbered("blk.", name)?;
        let part = rest.strip_suffix(".weight")?;
        let (_, matrix) = self.experts.iter().find(|(gguf, _)| *gguf == part)?;
        let place = self.place;
        Some((0..count).map(|expert| format!("model.layers.{layer}.{place}.{expert}.{matrix}.weight")).collect())
    }

    /// The name in a GGUF file of the stack that this matrix of an expert is in.
    pub(super) fn stack_name(&self, name: &str) -> Option<String> {
        let (layer, rest) = numbered("model.layers.", name)?;
        let (_, matrix) = numbered("", rest.strip_prefix(self.place)?.strip_prefix('.')?)?;
        let (gguf, _) = self.experts.iter().find(|(_, part)| matrix.strip_suffix(".weight") == Some(*part))?;
        Some(format!("blk.{layer}.{gguf}.weight"))
    }

    /// The name in a GGUF file of a tensor of a model folder.
    pub(super) fn gguf_name(&self, name: &str) -> Option<String> {
        if let Some((whole, _)) = self.roots.iter().find(|(_, folder_name)| *folder_name == name) {
            return Some((*whole).into());
        }
        let (layer, rest) = numbered("model.layers.", name)?;
        if let Some((gguf, _)) = self.tensors.iter().find(|(_, folder_rest)| *folder_rest == rest) {
            return Some(format!("blk.{layer}.{gguf}"));
        }
        let (part, end) = rest.rsplit_once('.')?;
        let (gguf, _) = self.parts.iter().copied().flatten().find(|(_, folder_part)| *folder_part == part)?;
        Some(format!("blk.{layer}.{gguf}.{end}"))
    }
}

/// The number of a layer after `start`, and the rest of the tensor's name.
pub(super) fn numbered<'a>(start: &str, name: &'a str) -> Option<(usize, &'a str)> {
    let (layer, rest) = name.strip_prefix(start)?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}
