"""llama.cpp's form of the families with experts, of Gemma 4 and of OLMo 3: names of tensors, their numbers, and keys.

By the rules of llama.cpp's converter; `make_gguf.py` writes and reads the files.
"""

import gguf
import numpy as np

ARCHITECTURES = {
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2_moe": "lfm2moe",
    "olmo3": "olmo2",
    "mixtral": "llama",
}
ROOTS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
# Parts of a layer, with a weight or a bias.
PARTS = {
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "ffn_norm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
# Tensors of a layer whose ends differ.
TENSORS = {
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
EXPERTS = ("mlp.experts.", "feed_forward.experts.", "experts.")


def name_in_file(name, kind):
    """The name of a tensor that has one of its own there."""
    if name in ROOTS:
        return ROOTS[name]
    _, _, layer, rest = name.split(".", 3)
    if rest in TENSORS:
        return f"blk.{layer}.{TENSORS[rest]}"
    part, end = rest.rsplit(".", 1)
    if kind == "mixtral" and part == "post_attention_layernorm":
        return f"blk.{layer}.ffn_norm.{end}"
    return f"blk.{layer}.{PARTS[part]}.{end}"


def expert_part(name):
    """The start of the name of an expert's tensor in a file, and the rest of its name in a folder; None for any other."""
    if ".layers." not in name:
        return None
    _, _, layer, rest = name.split(".", 3)
    for place in EXPERTS:
        if rest.startswith(place):
            return f"blk.{layer}.", rest[len(place) :]
    return None


def value_heads(config):
    """Of the delta rule: the order of value heads in a file, and the width of one."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    return np.arange(heads).reshape(keys, heads // keys).T.reshape(-1), config.linear_value_head_dim


def reordered(name, weight, config, to_file):
    """The value heads of Qwen3.5's tensors, of each key head's first ones first in files."""
    part = name.rpartition("linear_attn.")[2]
    if config.model_type != "qwen3_5_moe_text" or part == name:
        return weight
    return with_value_heads(part.removesuffix(".weight"), weight, config, to_file)


def with_value_heads(part, weight, config, to_file):
    """A tensor of the delta rule, by its name in a folder or in a file, with the value heads in the order of a file, or back."""
    order, width = value_heads(config)
    order = order if to_file else np.argsort(order)
    wide = (order[:, None] * width + np.arange(width)).reshape(-1)
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if part in ("in_proj_qkv", "conv1d", "attn_qkv", "ssm_conv1d"):
        return weight[np.concatenate([np.arange(before), before + wide])]
    if part in ("in_proj_z", "attn_gate"):
        return weight[wide]
    if part in ("in_proj_b", "in_proj_a", "A_log", "dt_bias", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
        return weight[order]
    return weight[:, wide] if part in ("out_proj", "ssm_out") else weight


def is_plus_one(name, kind):
    return kind in ("qwen3_5_moe_text", "qwen3_next") and name.endswith("norm.weight") and "linear_attn.norm" not in name


def interleaved(name, weight, config, to_file):
    """Mixtral's queries and keys, with dimensions that are rotated together next to each other in files."""
    if config.model_type != "mixtral" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    half = weight.shape[0] // heads // 2
    shape = (heads, 2, half, -1) if to_file else (heads, half, 2, -1)
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def qkvz_rows(config):
    """Rows of Qwen3-Next's joint product: for queries, keys, values and gates, in the order of the folder."""
    groups, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [ratio * config.linear_value_head_dim] * 2
    rows = np.arange(groups * sum(sizes)).reshape(groups, -1)
    starts = np.cumsum([0, *sizes])
    return [rows[:, start : start + size].reshape(-1) for start, size in zip(starts, sizes)]


def to_file(state, config):
    """The tensors of a file, by name, of transformers' (numpy)."""
    kind, found = config.model_type, {}
    for name, weight in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        expert = expert_part(name)
        if expert:
            start, part = expert
            if kind == "gemma4_text":
                found[f"{start}ffn_{part.removesuffix('_proj')}_exps.weight"] = weight
            elif part in ("down_proj", "down_proj_bias"):
                is_bias = part.endswith("_bias")
                turned = weight.swapaxes(1, 2) if kind == "gpt_oss" and not is_bias else weight
                found[f"{start}ffn_down_exps.{'bias' if is_bias else 'weight'}"] = turned
            elif kind == "gpt_oss":
                end = "bias" if part.endswith("_bias") else "weight"
                both = weight if end == "bias" else weight.swapaxes(1, 2)
                found[f"{start}ffn_gate_exps.{end}"], found[f"{start}ffn_up_exps.{end}"] = both[:, ::2], both[:, 1::2]
            else:
                gates, ups = np.split(weight, 2, axis=1)
                found[f"{start}ffn_gate_exps.weight"], found[f"{start}ffn_up_exps.weight"] = gates, ups
        elif name.endswith("in_proj_qkvz.weight"):
            layer, rows = name.split(".")[2], qkvz_rows(config)
            found[f"blk.{layer}.attn_qkv.weight"] = weight[np.concatenate(rows[:3])]
            found[f"blk.{layer}.attn_gate.weight"] = weight[rows[3]]
        else:
            weight = weight.squeeze(1) if name.endswith(("conv1d.weight", "conv.conv.weight")) else weight
            weight = interleaved(name, reordered(name, weight, config, True), config, True)
            weight = -np.exp(weight) if name.endswith(".A_log") else weight
            weight = weight + np.float32(1) if is_plus_one(name, kind) else weight
            found[name_in_file(name, kind)] = weight
    return found


def to_folder(tensors, names, config):
    """transformers' tensors with these names, of those of a file."""
    kind, found = config.model_type, {}
    for name in names:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        expert = expert_part(name)
        if expert:
            start, part = expert
            exps = {key: tensors.get(f"{start}ffn_{key}_exps.{'bias' if '_bias' in part else 'weight'}") for key in ("gate", "up", "down", "gate_up")}
            if kind == "gemma4_text":
                found[name] = exps[part.removesuffix("_proj")]
            elif part.startswith("down_proj"):
                found[name] = exps["down"].swapaxes(1, 2) if kind == "gpt_oss" and part == "down_proj" else exps["down"]
            elif kind == "gpt_oss":
                both = np.stack([exps["gate"], exps["up"]], 2)
                both = both.reshape(both.shape[0], -1, *both.shape[3:])
                found[name] = both.swapaxes(1, 2) if part == "gate_up_proj" else both
            else:
                found[name] = np.concatenate([exps["gate"], exps["up"]], 1)
        elif name.endswith("in_proj_qkvz.weight"):
            layer, rows = name.split(".")[2], np.concatenate(qkvz_rows(config))
            both = np.concatenate([tensors[f"blk.{layer}.attn_qkv.weight"], tensors[f"blk.{layer}.attn_gate.weight"]])
            found[name] = both[np.argsort(rows)]
        else:
            weight = tensors[name_in_file(name, kind)]
            weight = weight - np.float32(1) if is_plus_one(name, kind) else weight
            weight = np.log(-weight) if name.endswith(".A_log") else weight
            weight = interleaved(name, reordered(name, weight, config, False), config, False)
            found[name] = weight[:, None] if name.endswith(("conv1d.weight", "conv.conv.weight")) else weight
    return found


def extra_tensors(config):
    """Tensors that no parameter has: the divisors of Gemma 4's angles."""
    if config.model_type != "gemma4_text":
        return {}
    width = full_width(config)
    angles = int(width * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    return {"rope_freqs.weight": np.array([1.0] * angles + [1e30] * (width // 2 - angles), np.float32)}


def of_kind(config, kind, name):
    """A setting of Gemma 4's layers of a kind."""
    return getattr(config.per_layer_config[config.layer_types.index(kind)], name)


def full_width(config):
    return of_kind(config, "full_attention", "head_dim")


def key_heads(config):
    """The number of key heads; a list, if layers differ."""
    kind = config.model_type
    if kind == "lfm2_moe":
        return [config.num_key_value_heads if layer == "full_attention" else 0 for layer in config.layer_types]
    if kind != "gemma4_text":
        return config.num_key_value_heads
    counts = [of_kind(config, layer, "num_key_value_heads") for layer in config.layer_types]
    return counts if len(set(counts)) > 1 else counts[0]


def add_rope(writer, rope):
    """Rotary settings, as the converter writes those of all families."""
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_freq_base(rope["rope_theta"])


def describe(writer, config):
    """The keys of a family."""
    kind, rope = config.model_type, config.rope_parameters
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    add_rope(writer, rope.get("full_attention", rope))
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config.norm_eps if kind == "lfm2_moe" else config.rms_norm_eps)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.top_k_experts if kind == "gemma4_text" else config.num_experts_per_tok)
        if kind != "mixtral":
            writer.add_expert_feed_forward_length(config.intermediate_size if kind == "gpt_oss" else config.moe_intermediate_size)
    writer.add_head_count_kv(key_heads(config))
    if getattr(config, "use_double_wide_mlp", False):
        own, width = config.num_hidden_layers - config.num_kv_shared_layers, config.intermediate_size
        writer.add_feed_forward_length([width * (1 if layer < own else 2) for layer in range(config.num_hidden_layers)])
    elif kind != "qwen3_5_moe_text":
        writer.add_feed_forward_length(config.intermediate_size)
    if kind == "gemma4_text":
        add_gemma4(writer, config)
    elif getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if kind in ("qwen3_5_moe_text", "qwen3_next"):
        add_delta(writer, config)
    if kind == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if kind in ("lfm2_moe", "mixtral"):
        writer.add_vocab_size(config.vocab_size)
    if kind == "mixtral":
        writer.add_rope_dimension_count(config.head_dim)
    if kind in ("gpt_oss", "olmo3"):
        writer.add_sliding_window(config.sliding_window)
    if kind == "olmo3":
        writer.add_sliding_window_pattern([layer == "sliding_attention" for layer in config.layer_types])


def add_gemma4(writer, config):
    full, local = full_width(config), of_kind(config, "sliding_attention", "head_dim")
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([layer == "sliding_attention" for layer in config.layer_types])
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(local)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def add_delta(writer, config):
    rope = config.rope_parameters
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
