"""Writes public.json: names and shapes of the tensors of published models, from their `config.json` by transformers' classes without weights.

    python make_public.py           # write it again
    python make_public.py --check   # compute it again and compare

Made with transformers 5.23.0 and torch 2.11.0. README.md says which public file each was compared with.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

PUBLIC = Path(__file__).resolve().parent / "public.json"


def layer_types(layers, every, last, others):
    return [last if (i + 1) % every == 0 else others for i in range(layers)]


def delta(layers):
    """Settings that Qwen3.5 and Qwen3-Next share."""
    return dict(
        attention_bias=False,
        attention_dropout=0.0,
        full_attention_interval=4,
        head_dim=256,
        hidden_act="silu",
        hidden_size=2048,
        initializer_range=0.02,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        mlp_only_layers=[],
        num_hidden_layers=layers,
        num_key_value_heads=2,
        partial_rotary_factor=0.25,
        rms_norm_eps=1e-06,
        use_cache=True,
    )


qwen3_5 = dict(
    attn_output_gate=True,
    bos_token_id=None,
    eos_token_id=248044,
    mamba_ssm_dtype="float32",
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    pad_token_id=None,
    rope_parameters={
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    vocab_size=248320,
)
gemma4 = dict(
    model_type="gemma4_text",
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=2,
    eos_token_id=1,
    final_logit_softcapping=30.0,
    global_head_dim=512,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    initializer_range=0.02,
    pad_token_id=0,
    rms_norm_eps=1e-06,
    rope_parameters={
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    tie_word_embeddings=True,
    use_bidirectional_attention=None,
    use_cache=True,
    vocab_size=262144,
    vocab_size_per_layer_input=262144,
)

CONFIGS = {
    "Qwen3.5-2B": dict(
        delta(24),
        **qwen3_5,
        model_type="qwen3_5_text",
        architectures=["Qwen3_5ForCausalLM"],
        intermediate_size=6144,
        layer_types=layer_types(24, 4, "full_attention", "linear_attention"),
        linear_num_value_heads=16,
        num_attention_heads=8,
        tie_word_embeddings=True,
    ),
    # Qwen3.5-35B-A3B with half of its experts.
    "Qwen3.5-18B-A3B": dict(
        delta(40),
        **qwen3_5,
        model_type="qwen3_5_moe_text",
        architectures=["Qwen3_5MoeForCausalLM"],
        layer_types=layer_types(40, 4, "full_attention", "linear_attention"),
        linear_num_value_heads=32,
        moe_intermediate_size=512,
        num_attention_heads=16,
        num_experts=128,
        num_experts_per_tok=8,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=False,
    ),
    "Qwen3-Next-80B-A3B": dict(
        delta(48),
        model_type="qwen3_next",
        architectures=["Qwen3NextForCausalLM"],
        bos_token_id=151643,
        decoder_sparse_step=1,
        eos_token_id=151645,
        intermediate_size=5120,
        linear_num_value_heads=32,
        moe_intermediate_size=512,
        norm_topk_prob=True,
        num_attention_heads=16,
        num_experts=512,
        num_experts_per_tok=10,
        output_router_logits=False,
        rope_scaling=None,
        rope_theta=10000000,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "LFM2-8B-A1B": dict(
        model_type="lfm2_moe",
        architectures=["Lfm2MoeForCausalLM"],
        bos_token_id=1,
        conv_L_cache=3,
        conv_bias=False,
        dtype="bfloat16",
        eos_token_id=7,
        hidden_size=2048,
        initializer_range=0.02,
        intermediate_size=7168,
        layer_types=["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        max_position_embeddings=128000,
        moe_intermediate_size=1792,
        norm_eps=1e-05,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_dense_layers=2,
        num_experts=32,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_key_value_heads=8,
        pad_token_id=0,
        rope_theta=1000000.0,
        routed_scaling_factor=1.0,
        use_cache=True,
        use_expert_bias=True,
        vocab_size=65536,
    ),
    "gemma-4-E2B": dict(
        gemma4,
        attention_k_eq_v=False,
        enable_moe_block=False,
        hidden_size=1536,
        hidden_size_per_layer_input=256,
        intermediate_size=6144,
        layer_types=layer_types(35, 5, "full_attention", "sliding_attention"),
        max_position_embeddings=131072,
        num_attention_heads=8,
        num_global_key_value_heads=None,
        num_hidden_layers=35,
        num_key_value_heads=1,
        num_kv_shared_layers=20,
        sliding_window=512,
        use_double_wide_mlp=True,
    ),
    "gemma-4-26B-A4B": dict(
        gemma4,
        attention_k_eq_v=True,
        enable_moe_block=True,
        hidden_size=2816,
        hidden_size_per_layer_input=0,
        intermediate_size=2112,
        layer_types=layer_types(30, 6, "full_attention", "sliding_attention"),
        max_position_embeddings=262144,
        moe_intermediate_size=704,
        num_attention_heads=16,
        num_experts=128,
        num_global_key_value_heads=2,
        num_hidden_layers=30,
        num_key_value_heads=8,
        num_kv_shared_layers=0,
        sliding_window=1024,
        top_k_experts=8,
        use_double_wide_mlp=False,
    ),
    # transformers' own default.
    "Ministral-3-8B": dict(model_type="ministral3", architectures=["Ministral3ForCausalLM"]),
    "granite-3.1-2b": dict(
        model_type="granite",
        architectures=["GraniteForCausalLM"],
        attention_bias=False,
        attention_dropout=0.1,
        attention_multiplier=0.015625,
        bos_token_id=0,
        embedding_multiplier=12.0,
        eos_token_id=0,
        hidden_act="silu",
        hidden_size=2048,
        initializer_range=0.02,
        intermediate_size=8192,
        logits_scaling=8.0,
        max_position_embeddings=131072,
        mlp_bias=False,
        num_attention_heads=32,
        num_hidden_layers=40,
        num_key_value_heads=8,
        pad_token_id=0,
        residual_multiplier=0.22,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=5000000.0,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        use_cache=True,
        vocab_size=49152,
    ),
    "gpt-oss-20b": dict(
        model_type="gpt_oss",
        architectures=["GptOssForCausalLM"],
        attention_bias=True,
        attention_dropout=0.0,
        eos_token_id=200002,
        experts_per_token=4,
        head_dim=64,
        hidden_act="silu",
        hidden_size=2880,
        initial_context_length=4096,
        initializer_range=0.02,
        intermediate_size=2880,
        layer_types=layer_types(24, 2, "full_attention", "sliding_attention"),
        max_position_embeddings=131072,
        num_attention_heads=64,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_key_value_heads=8,
        num_local_experts=32,
        output_router_logits=False,
        pad_token_id=199999,
        quantization_config={
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        rms_norm_eps=1e-05,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        sliding_window=128,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
        use_cache=True,
        vocab_size=201088,
    ),
}

# Names of the gate, up and down projection of one expert, where published files have experts one by one.
ONE_BY_ONE = {
    "qwen3_5_moe_text": ("gate_proj", "up_proj", "down_proj"),
    "qwen3_next": ("gate_proj", "up_proj", "down_proj"),
    "lfm2_moe": ("w1", "w3", "w2"),
}


def in_files(kind, name, shape):
    """Names and shapes in published files of a tensor of transformers' class."""
    fused = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    if fused and kind == "gpt_oss":
        experts, width_in, width_out = shape
        return {
            f"{name}_blocks": [experts, width_out, width_in // 32, 16],
            f"{name}_scales": [experts, width_out, width_in // 32],
        }
    if fused and kind in ONE_BY_ONE:
        base, gate_up = name.rsplit(".", 1)[0], name.endswith("gate_up_proj")
        parts = ONE_BY_ONE[kind][:2] if gate_up else ONE_BY_ONE[kind][2:]
        one = [shape[1] // len(parts), shape[2]]
        return {f"{base}.{i}.{part}.weight": one for i in range(shape[0]) for part in parts}
    return {name: shape}


def ranges(numbers):
    """`0-2,4` of 0, 1, 2 and 4."""
    parts = []
    for n in sorted(numbers):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in parts)


def collapsed(tensors):
    """Tensors by one name for all layers, and all experts, in which they have the same shape."""
    groups = defaultdict(list)
    for name, shape in tensors.items():
        numbers = [int(n) for n in re.findall(r"\.(\d+)(?=\.)", name)]
        groups[re.sub(r"\.\d+(?=\.)", ".{}", name), tuple(shape)].append(numbers)
    lines = {}
    for (name, shape), numbers in groups.items():
        places = [{row[i] for row in numbers} for i in range(len(numbers[0]))]
        count = 1
        for place in places:
            count *= len(place)
        assert count == len(numbers), name
        key = name.format(*("{" + ranges(place) + "}" for place in places))
        lines[key] = list(shape)
    return dict(sorted(lines.items()))


def tensors(config):
    settings = dict(config)
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    found = {}
    for name, tensor in model.state_dict().items():
        if name not in tied:
            found |= in_files(config["model_type"], name, list(tensor.shape))
    return found


def public():
    models = {}
    for name, config in CONFIGS.items():
        config = config if len(config) > 2 else {**AutoConfig.for_model(config["model_type"]).to_dict(), **config}
        models[name] = {"config": config, "tensors": collapsed(tensors(config))}
        print(f"{name}: {len(models[name]['tensors'])} names", file=sys.stderr)
    return models


def text(models):
    """A line for each tensor."""
    parts = []
    for name, model in models.items():
        lines = ",\n".join(f"   {json.dumps(key)}: {json.dumps(shape)}" for key, shape in model["tensors"].items())
        config = json.dumps(model["config"], sort_keys=True)
        parts.append(f' {json.dumps(name)}: {{\n  "config": {config},\n  "tensors": {{\n{lines}\n  }}\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main():
    found = text(public())
    if sys.argv[1:] == ["--check"]:
        sys.exit(found != PUBLIC.read_text())
    PUBLIC.write_text(found)


if __name__ == "__main__":
    main()
