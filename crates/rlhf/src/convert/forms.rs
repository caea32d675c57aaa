//! The families that llama.cpp's files hold, with the names of their tensors there and in a model folder.

/// Names: llama.cpp's, and the one in a model folder.
type Pair = (&'static str, &'static str);

/// A family's form in llama.cpp's files.
#[derive(Debug)]
pub(super) struct Form {
    /// llama.cpp's name of the architecture.
    pub(super) architecture: &'static str,
    /// The `model_type` in a model folder.
    pub(super) model_type: &'static str,
    /// transformers' class.
    pub(super) class: &'static str,
    /// The tensors outside the layers.
    roots: [Pair; 3],
    /// The parts of a layer, each with a weight, and a bias if the family has them.
    parts: &'static [&'static [Pair]],
    /// The tensors of a layer whose ends have other names too.
    tensors: &'static [Pair],
    /// The parts of a layer that stack the matrices of all experts, each with its name in an expert.
    experts: &'static [Pair],
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

/// The place of experts in a layer of a model folder.
const EXPERTS: &str = "mlp.experts";

const STACKS: &[Pair] = &[("ffn_gate_exps", "gate_proj"), ("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")];

const ROUTER: &[Pair] = &[(ROUTER_PART, "mlp.gate")];

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
/// Ministral 3: growth of queries, and YaRN's settings.
pub(super) const GROWTH: &str = "attention.temperature_scale";
pub(super) const BETA_FAST: &str = "rope.scaling.yarn_beta_fast";
pub(super) const BETA_SLOW: &str = "rope.scaling.yarn_beta_slow";
pub(super) const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";

const LLAMA: Form = Form {
    architecture: "llama",
    model_type: "llama",
    class: "LlamaForCausalLM",
    roots: ROOTS,
    parts: &[NORMS, ATTENTION, MLP],
    tensors: &[],
    experts: &[],
    is_interleaved: true,
    keys: &[],
};

/// The supported families.
pub(super) static FORMS: [Form; 12] = [
    LLAMA,
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
        architecture: "qwen35",
        model_type: "qwen3_5_text",
        class: "Qwen3_5ForCausalLM",
        parts: &[QWEN35_NORMS, ATTENTION, DELTA, MLP],
        tensors: DELTA_TENSORS,
        is_interleaved: false,
        keys: &[SSM_KERNEL, SSM_STATE, SSM_GROUPS, SSM_RANK, SSM_INNER, INTERVAL, RECURRENT, NEXTN, SECTIONS],
        ..LLAMA
    },
    Form { architecture: "smollm3", model_type: "smollm3", class: "SmolLM3ForCausalLM", ..LLAMA },
    Form {
        architecture: "olmo2",
        model_type: "olmo2",
        class: "Olmo2ForCausalLM",
        parts: &[OLMO2_NORMS, ATTENTION, MLP],
        is_interleaved: false,
        ..LLAMA
    },
    Form {
        architecture: "granite",
        model_type: "granite",
        class: "GraniteForCausalLM",
        keys: &[ATTENTION_SCALE, EMBEDDING_SCALE, RESIDUAL_SCALE, LOGIT_SCALE],
        ..LLAMA
    },
    Form {
        architecture: "lfm2",
        model_type: "lfm2",
        class: "Lfm2ForCausalLM",
        roots: LFM2_ROOTS,
        parts: &[LFM2],
        is_interleaved: false,
        keys: &[CONV_CACHE],
        ..LLAMA
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
        architecture: "mistral3",
        model_type: "ministral3",
        class: "Ministral3ForCausalLM",
        keys: &[GROWTH, BETA_FAST, BETA_SLOW, LOG_MULTIPLIER],
        ..LLAMA
    },
];

/// Names in one text: `a, b or c`.
pub(super) fn listed(name: impl Fn(&Form) -> &'static str) -> String {
    let names: Vec<&str> = FORMS.iter().map(name).collect();
    let (last, others) = names.split_last().expect("there are several");
    format!("{} or {last}", others.join(", "))
}

impl Form {
    /// The form of llama.cpp's `architecture`.
    pub(super) fn of_architecture(architecture: &str) -> Option<&'static Self> {
        FORMS.iter().find(|form| form.architecture == architecture)
    }

    /// The form of a folder's `model_type`.
    pub(super) fn of_model_type(model_type: &str) -> Option<&'static Self> {
        FORMS.iter().find(|form| form.model_type == model_type)
    }

    /// Whether this is Gemma 2 or 3.
    pub(super) fn is_gemma(&self) -> bool {
        self.architecture.starts_with("gemma")
    }

    /// The name in a model folder of a tensor of a GGUF file.
    pub(super) fn folder_name(&self, name: &str) -> Option<String> {
        if let Some((_, whole)) = self.roots.into_iter().find(|(gguf, _)| *gguf == name) {
            return Some(whole.into());
        }
        let (layer, rest) = numbered("blk.", name)?;
        if let Some((_, folder_rest)) = self.tensors.iter().find(|(gguf, _)| *gguf == rest) {
            return Some(format!("model.layers.{layer}.{folder_rest}"));
        }
        let (part, end) = rest.rsplit_once('.')?;
        let (_, folder_part) = self.parts.iter().copied().flatten().find(|(gguf, _)| *gguf == part)?;
        ["weight", "bias"].contains(&end).then(|| format!("model.layers.{layer}.{folder_part}.{end}"))
    }

    /// Whether its layers have experts.
    pub(super) fn has_experts(&self) -> bool {
        !self.experts.is_empty()
    }

    /// The names in a model folder of the `count` matrices that a tensor of a GGUF file stacks; `None` if it is no stack.
    pub(super) fn stacked_names(&self, name: &str, count: i64) -> Option<Vec<String>> {
        let (layer, rest) = numbered("blk.", name)?;
        let part = rest.strip_suffix(".weight")?;
        let (_, matrix) = self.experts.iter().find(|(gguf, _)| *gguf == part)?;
        Some((0..count).map(|expert| format!("model.layers.{layer}.{EXPERTS}.{expert}.{matrix}.weight")).collect())
    }

    /// The name in a GGUF file of the stack that this matrix of an expert is in.
    pub(super) fn stack_name(&self, name: &str) -> Option<String> {
        let (layer, rest) = numbered("model.layers.", name)?;
        let (_, matrix) = numbered("", rest.strip_prefix(EXPERTS)?.strip_prefix('.')?)?;
        let (gguf, _) = self.experts.iter().find(|(_, part)| matrix.strip_suffix(".weight") == Some(*part))?;
        Some(format!("blk.{layer}.{gguf}.weight"))
    }

    /// The name in a GGUF file of a tensor of a model folder.
    pub(super) fn gguf_name(&self, name: &str) -> Option<String> {
        if let Some((whole, _)) = self.roots.into_iter().find(|(_, folder_name)| *folder_name == name) {
            return Some(whole.into());
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
