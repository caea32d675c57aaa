"""Makes the GGUF files of `gguf/` with the `gguf` package, and their reference values with it and transformers.

    python make_gguf.py            # make every file again
    python make_gguf.py --check    # recompute the values from the stored files

Made with gguf 0.19.0, torch 2.11.0 and transformers 5.23.0 on a CPU, one thread, float32. README.md says what each tensor is.
"""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
    SmolLM3Config,
)

import thin

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
INTERLEAVED = ("llama", "smollm3", "granite")  # architectures with queries and keys in llama.cpp's order
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
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


# Names of other architectures that are not in NAMES.
NAMES_OF = {
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


class Spec(NamedTuple):
    """A file to make: the model that it holds, and the type of its matrices by name, or a list for its layers."""

    config: object
    seed: int
    types: dict
    tokenizer: str | None = None  # the folder whose tokenizer it holds
    kind: str = ""  # tokenizer.ggml.model
    pre: str = ""  # tokenizer.ggml.pre
    split: int = 0  # tensors in a part


common = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)
SPECS = {
    # Every type: 256 numbers for a row of Q6_K.
    "llama": Spec(
        LlamaConfig(
            vocab_size=400,
            intermediate_size=256,
            head_dim=8,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=3,
            **common,
        ),
        301,
        {
            "token_embd": Type.Q8_0,
            "output": Type.Q4_1,
            "attn_q": Type.Q4_0,
            "attn_k": Type.Q4_1,
            "attn_v": Type.BF16,
            "attn_output": Type.F16,
            "ffn_gate": Type.Q4_0,
            "ffn_up": Type.Q8_0,
            "ffn_down": Type.Q6_K,
        },
        "models/llama_untied",
        "llama",
        "default",
    ),
    # As Llama 3.1: scaled angles, whose factors are a tensor; the splitting of Llama 3; no output matrix.
    "llama3": Spec(
        LlamaConfig(
            vocab_size=320,
            intermediate_size=64,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            bos_token_id=0,
            eos_token_id=0,
            **dict(common, max_position_embeddings=512),
        ),
        302,
        dict.fromkeys(["token_embd", "ffn_gate", "ffn_up", "ffn_down"], Type.Q8_0),
        "tokenizers/split",
        "gpt2",
        "llama-bpe",
    ),
    "qwen2": Spec(
        Qwen2Config(
            vocab_size=328,  # eight more than there are tokens
            intermediate_size=64,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=1,
            **common,
        ),
        303,
        dict.fromkeys(["token_embd", "attn_q", "ffn_gate", "ffn_up", "ffn_down"], Type.Q8_0),
        "models/gpt2",
        "gpt2",
        "qwen2",
    ),
    "qwen3": Spec(
        Qwen3Config(
            vocab_size=96,
            intermediate_size=64,
            head_dim=16,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            **common,
        ),
        304,
        dict.fromkeys(["token_embd", "output", "attn_v", "attn_output"], Type.F16),
    ),
    # Its last layer has no positions.
    "smollm3": Spec(
        SmolLM3Config(
            vocab_size=96,
            intermediate_size=64,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 5000000.0},
            pad_token_id=None,
            **dict(common, num_hidden_layers=4),
        ),
        306,
        dict.fromkeys(["token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"], Type.Q8_0),
    ),
    "olmo2": Spec(
        Olmo2Config(
            vocab_size=96,
            intermediate_size=64,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            **common,
        ),
        307,
        dict.fromkeys(["token_embd", "output", "attn_q", "attn_k", "ffn_gate", "ffn_up", "ffn_down"], Type.Q8_0),
    ),
    "granite": Spec(
        GraniteConfig(
            vocab_size=96,
            intermediate_size=64,
            head_dim=8,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            embedding_multiplier=3.0,
            attention_multiplier=0.25,
            residual_multiplier=0.5,
            logits_scaling=4.0,
            **common,
        ),
        308,
        dict.fromkeys(["token_embd", "attn_q", "attn_k", "ffn_gate", "ffn_up", "ffn_down"], Type.Q8_0),
    ),
    # A layer with attention between two with convolutions.
    "lfm2": Spec(
        Lfm2Config(
            vocab_size=96,
            intermediate_size=64,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            norm_eps=1e-5,
            layer_types=["conv", "full_attention", "conv"],
            **{key: value for key, value in common.items() if key != "rms_norm_eps"} | {"num_hidden_layers": 3},
        ),
        309,
        dict.fromkeys(["token_embd", "attn_q", "attn_k", "ffn_gate", "ffn_up", "ffn_down"], Type.Q8_0),
    ),
    # The types that the others lack, in three parts.
    "k_quants": Spec(
        Qwen3Config(
            vocab_size=96,
            intermediate_size=256,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            **dict(common, num_hidden_layers=5),
        ),
        305,
        {
            "token_embd": Type.Q8_0,
            "attn_q": Type.Q5_0,
            "attn_k": Type.Q5_1,
            "attn_output": Type.Q8_0,
            "ffn_gate": Type.IQ4_NL,
            "ffn_up": Type.Q5_0,
            "ffn_down": [Type.Q4_K, Type.Q2_K, Type.Q3_K, Type.Q5_K, Type.IQ4_XS],
        },
        split=20,
    ),
}


def stored_name(name, kind):
    """llama.cpp's name of a tensor."""
    base, end = name.rsplit(".", 1)
    if base in NAMES:
        return f"{NAMES[base]}.{end}"
    _, _, layer, part = base.split(".", 3)
    return f"blk.{layer}.{(NAMES | NAMES_OF.get(kind, {}))[part]}.{end}"


def interleaved(weight, heads):
    """Rows of a head in llama.cpp's order: dimensions that are rotated together are neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def halves(weight, heads):
    """The inverse of `interleaved`."""
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


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
    if rope["rope_type"] != "llama3":
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
    config = spec.config
    for token, add in (
        (config.bos_token_id, writer.add_bos_token_id),
        (config.eos_token_id, writer.add_eos_token_id),
        (config.pad_token_id, writer.add_pad_token_id),
    ):
        if token is not None:
            add(token)
    if spec.kind == "llama":
        writer.add_unk_token_id(0)
        writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def paths(name):
    """The file of a model, or its parts."""
    return sorted(FILES.glob(f"{name}-*-of-*.gguf")) if SPECS[name].split else [FILES / f"{name}.gguf"]


def make(name):
    spec, kind = SPECS[name], SPECS[name].config.model_type
    config, path = spec.config, FILES / f"{name}.gguf"
    for old in paths(name):
        old.unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(spec.seed)
    torch.manual_seed(spec.seed)
    model = AutoModelForCausalLM.from_config(config)
    writer = gguf.GGUFWriter(path, kind, split_max_tensors=spec.split)
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
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
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
    if spec.tokenizer:
        add_tokenizer(writer, spec)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for own, weight in model.state_dict().items():
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
        types = spec.types.get(part, Type.F32) if weight.ndim > 1 else Type.F32
        to = types[int(stored.split(".")[1])] if isinstance(types, list) else types
        if to in SCALES:
            writer.add_tensor(stored, random_blocks(weight.shape, to, generator), raw_dtype=to)
        else:
            writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(weight), to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def values(name):
    """The logits of the model that the file describes, by transformers; one tensor of each type, by the package."""
    spec, config = SPECS[name], SPECS[name].config
    readers, state, samples = [gguf.GGUFReader(path) for path in paths(name)], {}, {}
    model = AutoModelForCausalLM.from_config(config).eval()
    owns = {stored_name(own, config.model_type): own for own in model.state_dict()}
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name not in owns:
            continue
        part = tensor.name.split(".")[-2]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
        if config.model_type in INTERLEAVED and heads:
            weight = halves(weight, heads)
        weight = torch.from_numpy(np.array(weight, np.float32))
        weight = weight[:, None] if tensor.name.endswith("shortconv.conv.weight") else weight
        state[owns[tensor.name]] = weight
        if not any(key.startswith(f"{tensor.tensor_type.name}.") for key in samples):
            samples |= thin.rows({f"{tensor.tensor_type.name}.{owns[tensor.name]}": weight.clone()})
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    logits = model(IDS).logits
    if name in ("llama", "qwen2"):  # transformers reads neither rope_freqs nor the width of Qwen3's heads
        theirs = AutoModelForCausalLM.from_pretrained(FILES, gguf_file=f"{name}.gguf", dtype=torch.float32).eval()
        assert (theirs(IDS).logits - logits).abs().max() < 1e-5, name
    found = {"input_ids": IDS, "logits": logits, **samples}
    return {key: tensor.contiguous() for key, tensor in found.items()}


def texts(name):
    """The ids of the texts by the tokenizer that the file was made of."""
    if SPECS[name].tokenizer is None:
        return None
    tokenizer = AutoTokenizer.from_pretrained(HERE / SPECS[name].tokenizer)
    if SPECS[name].pre == "qwen2":  # the same vocabulary with Qwen2's rules
        model = json.loads((HERE / SPECS[name].tokenizer / "tokenizer.json").read_text())["model"]
        tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    return [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in TEXTS]


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    check = sys.argv[1:] == ["--check"]
    FILES.mkdir(exist_ok=True)
    found = {}
    for name in SPECS:
        if not check:
            make(name)
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
