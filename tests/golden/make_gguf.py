"""Makes the GGUF files of `gguf/` with the `gguf` package, and their reference values with it and transformers.

    python make_gguf.py            # make every file again
    python make_gguf.py NAME...    # make these files again
    python make_gguf.py --check    # recompute the values from the stored files
    python make_gguf.py --read RLHF    # compare the files that this binary makes of the stored ones

Made with gguf 0.19.0, torch 2.11.0 and transformers 5.23.0 on a CPU, one thread, float32. README.md says what each tensor is.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer, Qwen3_5Tokenizer

import gguf_families as families
import thin
from gguf_specs import SPECS

HERE = Path(__file__).resolve().parent
FILES = HERE / "gguf"
IDS = torch.tensor([[5, 60, 71, 9, 90, 33, 14, 7, 88, 21, 45, 6]])
TEXTS = [
    "The movie was great!",
    "I don't think it's 2024-12-31.",
    "na\u00efve caf\u00e9 \u2014 \u6771\u4eac \U0001f642",
    "a\n\nb\tc\r\n",
    "x",
    "Human: hi\n\nAssistant:",
    "price $1,234.56 and  two spaces",
]
# The rules of gpt-oss.
GPT4O = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
INTERLEAVED = ("llama", "smollm3", "granite", "ministral3")  # types with queries and keys in llama.cpp's order
ARCHITECTURES = {"qwen3_5_text": "qwen35", "gemma3_text": "gemma3", "ministral3": "mistral3", "qwen3_moe": "qwen3moe"}  # others have their type's name
PLUS_ONE = ("qwen3_5_text", "gemma2", "gemma3_text")  # types whose norms multiply by 1 + weight
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_exps": "ffn_gate_exps",
    "mlp.up_exps": "ffn_up_exps",
    "mlp.down_exps": "ffn_down_exps",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Names of other architectures that are not in NAMES.
NAMES_OF = {
    "gemma2": GEMMA_NAMES,
    "gemma3_text": GEMMA_NAMES,
    "qwen3_5_text": {
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
    },
    "olmo2": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "lfm2": {
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "self_attn.out_proj": "attn_output",
        "conv.in_proj": "shortconv.in_proj",
        "conv.conv": "shortconv.conv",
        "conv.out_proj": "shortconv.out_proj",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
    },
}


def stored_name(name, kind):
    """llama.cpp's name of a tensor."""
    base, end = name.rsplit(".", 1)
    if base in NAMES:
        return f"{NAMES[base]}.{end}"
    _, _, layer, part = base.split(".", 3)
    if end in ("A_log", "dt_bias"):
        return f"blk.{layer}.{'ssm_a' if end == 'A_log' else 'ssm_dt.bias'}"
    return f"blk.{layer}.{(NAMES | NAMES_OF.get(kind, {}))[part]}.{end}"


def interleaved(weight, heads):
    """Rows of a head in llama.cpp's order: dimensions that are rotated together are neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def halves(weight, heads):
    """The inverse of `interleaved`."""
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def by_projection(state):
    """transformers' tensors with those of experts apart: gates, up and down projections, as llama.cpp stacks them."""
    for name, weight in state.items():
        start, _, end = name.partition(".mlp.experts.")
        if not end:
            yield name, weight
        elif end == "down_proj":
            yield f"{start}.mlp.down_exps.weight", weight
        else:
            gates, ups = weight.chunk(2, dim=1)
            yield f"{start}.mlp.gate_exps.weight", gates
            yield f"{start}.mlp.up_exps.weight", ups


def joined(state):
    """The inverse of `by_projection`."""
    all = {name: weight for name, weight in state.items() if "_exps." not in name}
    for name, weight in state.items():
        start, _, end = name.partition(".mlp.")
        if end == "down_exps.weight":
            all[f"{start}.mlp.experts.down_proj"] = weight
        elif end == "gate_exps.weight":
            all[f"{start}.mlp.experts.gate_up_proj"] = torch.cat([weight, state[f"{start}.mlp.up_exps.weight"]], 1)
    return all


def is_plus_one(stored, kind):
    return kind in PLUS_ONE and stored.endswith("norm.weight") and "ssm_norm" not in stored


def in_file(stored, weight, config):
    """The numbers of a tensor of the newer families as llama.cpp's converter stores them."""
    part = stored.split(".")[2] if stored.startswith("blk.") else stored.split(".")[0]
    if config.model_type == "qwen3_5_text":
        weight = families.with_value_heads(part, weight.squeeze(1) if part == "ssm_conv1d" else weight, config, True)
        weight = -np.exp(weight) if part == "ssm_a" else weight
    return weight + np.float32(1) if is_plus_one(stored, config.model_type) else weight


def in_folder(stored, weight, config):
    """The inverse of `in_file`."""
    part = stored.split(".")[2] if stored.startswith("blk.") else stored.split(".")[0]
    if config.model_type == "qwen3_5_text":
        weight = families.with_value_heads(part, weight, config, False)
        weight = weight[:, None] if part == "ssm_conv1d" else weight
        weight = np.log(-weight) if part == "ssm_a" else weight
    return weight - np.float32(1) if is_plus_one(stored, config.model_type) else weight


def add_settings(writer, config):
    """The keys of the newer families."""
    kind = config.model_type
    rope = config.rope_parameters
    if kind == "qwen3_5_text":
        families.add_delta(writer, config)
    elif kind == "gemma3_text":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
    elif kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_sliding_window(config.sliding_window)
    elif kind == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    elif kind == "ministral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


# Where the f16 scales are in the blocks that the package reads and does not write, with values for weights of about 0.3.
SCALES = {
    Type.Q2_K: {80: 0.02, 82: 0.02},
    Type.Q3_K: {108: 0.005},
    Type.Q4_K: {0: 0.001, 2: 0.0075},
    Type.Q5_K: {0: 0.0005, 2: 0.0075},
    Type.Q6_K: {208: 0.0001},
    Type.IQ4_NL: {0: 0.005},
    Type.IQ4_XS: {0: 0.0003},
}


def random_blocks(shape, to, generator):
    """Random bits, but for the scales."""
    elements, size = gguf.GGML_QUANT_SIZES[to]
    blocks = torch.randint(0, 256, (shape[0] * shape[1] // elements, size), generator=generator).numpy().astype(np.uint8)
    for at, scale in SCALES[to].items():
        scales = scale * (0.5 + torch.rand(len(blocks), 1, generator=generator).numpy())
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def rope_factors(config):
    """llama.cpp's factors of Llama 3.1's angles, as its converter computes them."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / config.head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def add_tokenizer(writer, spec):
    """The tokens of a `tokenizer.json`; for SentencePiece the rank of the merge that makes a token is its score."""
    tokenizer = json.loads((HERE / spec.tokenizer / "tokenizer.json").read_text())
    model, added = tokenizer["model"], {token["content"]: token for token in tokenizer["added_tokens"]}
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    kinds = []
    for token in tokens:
        is_byte = len(token) == 6 and token.startswith("<0x")
        unknown = token == model.get("unk_token")
        kind = gguf.TokenType.UNKNOWN if unknown else gguf.TokenType.CONTROL if token in added else gguf.TokenType.NORMAL
        kinds.append(gguf.TokenType.BYTE if is_byte else kind)
    writer.add_tokenizer_model(spec.kind)
    if spec.pre:
        writer.add_tokenizer_pre(spec.pre)
    padding = range(len(tokens), spec.config.vocab_size)
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in padding)])
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in padding)])
    if spec.kind == "llama":
        rank = {"".join(merge): -float(i) for i, merge in enumerate(merges)}
        writer.add_token_scores([rank.get(token, -1000.0) for token in tokens])
        writer.add_add_bos_token(True)
    else:
        writer.add_token_merges([" ".join(merge) for merge in merges])
    if spec.kind == "gemma4":
        writer.add_token_scores([-1000.0 for _ in range(spec.config.vocab_size)])
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)
    config = spec.config
    for token, add in (
        (config.bos_token_id, writer.add_bos_token_id),
        (config.eos_token_id, writer.add_eos_token_id),
        (config.pad_token_id, writer.add_pad_token_id),
    ):
        if token is not None:
            add(token)
    if spec.kind == "gemma4":
        writer.add_unk_token_id(0)
    if spec.kind == "llama":
        writer.add_unk_token_id(0)
        writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def paths(name):
    """The file of a model, or its parts."""
    return sorted(FILES.glob(f"{name}-*-of-*.gguf")) if SPECS[name].split else [FILES / f"{name}.gguf"]


def random_weight(name, weight, generator):
    if weight.dim() > 1:
        return 0.3 * torch.randn(weight.shape, generator=generator).numpy()
    weight = (0.1 if name.endswith("bias") else 0.15) * torch.randn(weight.shape, generator=generator)
    return (weight if name.endswith("bias") else 1 + weight).numpy()


def finish(writer):
    """Writes the file of a writer that has all settings and tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_of_family(name):
    """A file of one of the families of gguf_families.py."""
    spec, config, path = SPECS[name], SPECS[name].config, FILES / f"{name}.gguf"
    generator = torch.Generator().manual_seed(spec.seed)
    state = AutoModelForCausalLM.from_config(config).state_dict()
    state = {own: random_weight(own, weight, generator) for own, weight in state.items()}
    writer = gguf.GGUFWriter(path, families.ARCHITECTURES[config.model_type])
    families.describe(writer, config)
    if spec.tokenizer:
        add_tokenizer(writer, spec)
    for stored, weight in (families.extra_tensors(config) | families.to_file(state, config)).items():
        is_matrix = weight.ndim > 1 and stored.endswith(".weight")
        to = spec.types.get(stored.split(".")[-2], Type.F32) if is_matrix else Type.F32
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(weight), to), raw_dtype=to)
    finish(writer)


@torch.no_grad()
def values_of_family(name):
    """As `values`, for one of the families of gguf_families.py."""
    config, samples = SPECS[name].config, {}
    model = AutoModelForCausalLM.from_config(config).eval()
    reader = gguf.GGUFReader(FILES / f"{name}.gguf")
    tensors = {tensor.name: np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32) for tensor in reader.tensors}
    state = families.to_folder(tensors, model.state_dict(), config)
    state = {own: torch.from_numpy(np.ascontiguousarray(weight)) for own, weight in state.items()}
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    for own, weight in state.items():
        # Only those that folders have as transformers does.
        if families.expert_part(own) and not own.endswith("experts.down_proj") or "qkvz" in own:
            continue
        if families.expert_part(own) and config.model_type not in ("gpt_oss", "gemma4_text"):
            continue
        part = families.expert_part(own)
        stored = f"{part[0]}ffn_down_exps.weight" if part else families.name_in_file(own, config.model_type)
        if not any(key.startswith(f"{types[stored]}.") for key in samples):
            samples |= thin.rows({f"{types[stored]}.{own}": weight.clone()})
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    if name in ("qwen35moe", "gemma4", "gemma4_moe"):
        # transformers' own reader. Of Gemma 4 it reads only tensors whose names end with weight.
        theirs = AutoModelForCausalLM.from_pretrained(FILES, gguf_file=f"{name}.gguf", dtype=torch.float32, config=config).state_dict()
        read = [own for own in state if own.endswith(".weight") or name == "qwen35moe"]
        # A rate of decay has been a logarithm.
        assert all(torch.allclose(theirs[own], state[own], rtol=1e-6, atol=0) for own in read), name
    found = {"input_ids": IDS, "logits": model(IDS).logits, **samples}
    return {key: tensor.contiguous() for key, tensor in found.items()}


def make(name):
    if SPECS[name].config.model_type in families.ARCHITECTURES:
        return make_of_family(name)
    spec, kind = SPECS[name], SPECS[name].config.model_type
    config, path = spec.config, FILES / f"{name}.gguf"
    for old in paths(name):
        old.unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(spec.seed)
    torch.manual_seed(spec.seed)
    model = AutoModelForCausalLM.from_config(config)
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(kind, kind), split_max_tensors=spec.split)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if kind == "lfm2":
        kv_heads = {"conv": 0, "full_attention": config.num_key_value_heads}
        writer.add_head_count_kv([kv_heads[layer] for layer in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_vocab_size(config.vocab_size)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps if kind == "lfm2" else config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if kind != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if kind in INTERLEAVED:
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads if kind == "smollm3" else config.head_dim)
        writer.add_vocab_size(config.vocab_size)
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    add_settings(writer, config)
    if spec.tokenizer:
        add_tokenizer(writer, spec)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for own, weight in by_projection(model.state_dict()):
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = stored_name(own, kind)
        part = stored.split(".")[-2]
        if weight.dim() == 1:
            weight = (0.1 if own.endswith("bias") else 0.15) * torch.randn(weight.shape, generator=generator)
            weight = (weight if own.endswith("bias") else 1 + weight).numpy()
        else:
            weight = 0.3 * torch.randn(weight.shape, generator=generator).numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
        if kind in INTERLEAVED and heads:
            weight = interleaved(weight, heads)
        if own.endswith("conv.conv.weight"):
            weight = weight.squeeze(1)
        if is_plus_one(stored, kind):
            weight = weight - np.float32(1)
        weight = in_file(stored, weight, config)
        types = spec.types.get(part, Type.F32) if weight.ndim > 1 else Type.F32
        to = types[int(stored.split(".")[1])] if isinstance(types, list) else types
        if to in SCALES:
            writer.add_tensor(stored, random_blocks(weight.shape, to, generator), raw_dtype=to)
        else:
            writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(weight), to), raw_dtype=to)
    finish(writer)


@torch.no_grad()
def values(name):
    """The logits of the model that the file describes, by transformers; one tensor of each type, by the package."""
    if SPECS[name].config.model_type in families.ARCHITECTURES:
        return values_of_family(name)
    spec, config = SPECS[name], SPECS[name].config
    readers, state, samples = [gguf.GGUFReader(path) for path in paths(name)], {}, {}
    model = AutoModelForCausalLM.from_config(config).eval()
    owns = {stored_name(own, config.model_type): own for own, _ in by_projection(model.state_dict())}
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name not in owns:
            continue
        part = tensor.name.split(".")[-2]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
        if config.model_type in INTERLEAVED and heads:
            weight = halves(weight, heads)
        weight = in_folder(tensor.name, weight, config)
        weight = torch.from_numpy(np.array(weight, np.float32))
        weight = weight[:, None] if tensor.name.endswith("shortconv.conv.weight") else weight
        state[owns[tensor.name]] = weight
        if not any(key.startswith(f"{tensor.tensor_type.name}.") for key in samples):
            samples |= thin.rows({f"{tensor.tensor_type.name}.{owns[tensor.name]}": weight.clone()})
    missing, unexpected = model.load_state_dict(joined(state), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    logits = model(IDS).logits
    # transformers reads neither rope_freqs nor the width of heads; with the configuration it reads the others' tensors.
    settings = {"llama": {}, "qwen2": {}, "qwen35": {}, "gemma2": {"config": config}, "gemma3": {"config": config}, "qwen3moe": {"config": config}}
    if name in settings:
        theirs = AutoModelForCausalLM.from_pretrained(
            FILES, gguf_file=f"{name}.gguf", dtype=torch.float32, **settings[name]
        ).eval()
        assert (theirs(IDS).logits - logits).abs().max() < 1e-5, name
    found = {"input_ids": IDS, "logits": logits, **samples}
    return {key: tensor.contiguous() for key, tensor in found.items()}


def texts(name):
    """The ids of the texts by the tokenizer that the file was made of."""
    if SPECS[name].tokenizer is None:
        return None
    tokenizer = AutoTokenizer.from_pretrained(HERE / SPECS[name].tokenizer)
    kinds = {"qwen2": Qwen2Tokenizer, "qwen35": Qwen3_5Tokenizer}
    if SPECS[name].pre in kinds:  # the same vocabulary with their rules
        model = json.loads((HERE / SPECS[name].tokenizer / "tokenizer.json").read_text())["model"]
        tokenizer = kinds[SPECS[name].pre](vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    if SPECS[name].pre == "gpt-4o":
        words = pre_tokenizers.Split(Regex(GPT4O), "isolated")
        rules = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rules)
    if SPECS[name].kind == "gemma4":  # no space before a text
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    return [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in TEXTS]


def read_back(rlhf):
    """Files that `rlhf convert` makes of folders, read by the package: their tensors, and their keys and values."""
    skipped = ("GGUF.", "split.", "general.", "tokenizer.ggml.scores", "tokenizer.ggml.add_")
    with tempfile.TemporaryDirectory() as work:
        for name in SPECS:
            folder, made = f"{work}/{name}", f"{work}/{name}.gguf"
            subprocess.run([rlhf, "convert", paths(name)[0], folder], check=True, stdout=subprocess.DEVNULL)
            subprocess.run([rlhf, "convert", folder, "--output_file", made, "--outtype", "f32"], check=True, stdout=subprocess.DEVNULL)
            source, found = [gguf.GGUFReader(path) for path in paths(name)], gguf.GGUFReader(made)
            tensors = {tensor.name: tensor for tensor in found.tensors}
            for tensor in (tensor for reader in source for tensor in reader.tensors):
                expected, other = (gguf.dequantize(t.data, t.tensor_type) for t in (tensor, tensors.pop(tensor.name)))
                # A rate of decay has been a logarithm, factors of angles are computed again.
                near = 1e-6 if tensor.name.endswith("ssm_a") or tensor.name == "rope_freqs.weight" else 0
                assert np.allclose(other, expected, rtol=near, atol=0), f"{name}: {tensor.name}"
            assert not tensors, f"{name}: {sorted(tensors)}"
            for key, field in source[0].fields.items():
                if not key.startswith(skipped):
                    assert found.fields[key].contents() == field.contents(), f"{name}: {key}"
            print(f"{name}: {len(found.tensors)} tensors")


def main():
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--read"]:
        return read_back(sys.argv[2])
    transformers.logging.set_verbosity_error()
    check = sys.argv[1:] == ["--check"]
    FILES.mkdir(exist_ok=True)
    found, chosen = {}, sys.argv[1:]
    for name in SPECS:
        if not check and (not chosen or name in chosen):
            make(name)
        elif not check:
            found[name] = texts(name)
            continue
        golden, path = values(name), FILES / f"{name}.safetensors"
        if check:
            stored = load_file(path)
            assert golden.keys() == stored.keys(), name
            worst = max((golden[key] - stored[key]).abs().max().item() for key in stored)
            assert worst < 2e-5, f"{name}: {worst}"
        else:
            save_file(golden, path)
        found[name] = texts(name)
    text = json.dumps(found, indent=1) + "\n"
    if check:
        assert (FILES / "texts.json").read_text() == text, "texts.json differs"
    else:
        (FILES / "texts.json").write_text(text)
    print({path.name: path.stat().st_size for path in sorted(FILES.iterdir())})


if __name__ == "__main__":
    main()
