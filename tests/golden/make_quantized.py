"""Makes `quantized/` with bitsandbytes on a CPU: codes and values of weights, and models of `models/` as transformers quantizes and
saves them, with logits, and with gradients and optimizer steps of the adapters of `lora/` beside them (PEFT).

    python make_quantized.py            # make everything again
    python make_quantized.py --check    # recompute every value and compare

Made with bitsandbytes 0.50.2 and the versions of make_lora.py, on a CPU, one thread. README.md says what each tensor is.
"""

import json
import os
import shutil
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import bitsandbytes as bnb
import bitsandbytes.functional as F
import torch
from bitsandbytes.backends.default import ops as default
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import thin
from make_models import MODELS, loss

QUANTIZED, LORA = MODELS.parent / "quantized", MODELS.parent / "lora"

# Name -> (model and adapter of this name, settings).
FOUR = dict(load_in_4bit=True)
SPECS = {
    "llama_nf4": ("llama_untied", dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True) | FOUR),
    "gpt2_fp4": ("gpt2", dict(bnb_4bit_quant_type="fp4") | FOUR),
    "llama_int8": ("llama_untied", dict(load_in_8bit=True)),
}
# Shapes of weights: blocks that end within rows, a last block with fewer values, an odd number of values, two blocks of scales.
SHAPES = {"rows": (24, 40), "rest": (6, 27), "odd": (5, 13), "nested": (96, 192)}
CASES = [
    ("rows", "float32", False),
    ("rows", "bfloat16", True),
    ("rest", "float16", False),
    ("odd", "float32", True),
    ("nested", "bfloat16", True),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEPS, RATE = 2, 1e-2


def weight(shape):
    """Numbers that any language computes alike: n = 7919 i + 13 mod 2003, (n - 1001) / 1001 / (1 + i mod 5)."""
    i = torch.arange(shape[0] * shape[1])
    n = ((7919 * i + 13) % 2003 - 1001).float()
    values = n / 1001.0 / (1 + i % 5).float()
    values[64:128] = 0.0  # a block of zeros
    return values.view(shape)


def functions():
    found = {f"{kind}.quant_map": F.get_4bit_type(kind, device="cpu") for kind in ("nf4", "fp4")}
    found["nested_quant_map"] = F.create_dynamic_map()
    for shape_name, dtype_name, nests in CASES:
        values = weight(SHAPES[shape_name]).to(DTYPES[dtype_name])
        name = f"{shape_name}.{dtype_name}"
        for kind in ("nf4", "fp4"):
            codes, state = F.quantize_4bit(values, quant_type=kind, compress_statistics=nests)
            parts = {"codes": codes} | state.as_dict(packed=True)
            found |= {f"{name}.{kind}.{part}": tensor for part, tensor in parts.items() if "map" not in part}
            # As bitsandbytes' product has them: rounded to the dtype of the input.
            for out in ("float32", "bfloat16"):
                state.dtype = DTYPES[out]
                found[f"{name}.{kind}.values.{out}"] = F.dequantize_4bit(codes, state)[..., :: thin.STEP]
        if shape_name != "nested":
            codes, scales, _ = F.int8_vectorwise_quant(values.to(torch.float16))
            found |= {f"{name}.int8.codes": codes, f"{name}.int8.SCB": scales}
    return found


def exact(model):
    """Weights only: without the kernel for bf16 instructions, and without quantized activations."""
    model.eval()
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
        if isinstance(module, bnb.nn.Linear8bitLt):
            module.training = True
    return model


def values_of_codes(codes, absmax, blocksize, quant_type, shape, dtype):
    """bitsandbytes' own code for any device. Its AVX-512 kernel takes wrong scales where a row is not a multiple of a block."""
    map = F.get_4bit_type(quant_type, device="cpu")
    return default._dequantize_4bit_compute(codes.view(torch.uint8).flatten(), absmax, map, blocksize, shape, dtype)


def open_model(folder, **settings):
    return exact(AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.float32, **settings))


def values_of(name):
    """Logits of the model; with the adapter: logits, gradients, and the adapter after optimizer steps, with their losses."""
    base, _ = SPECS[name]
    rows = load_file(MODELS / base / "golden.safetensors")
    model = open_model(QUANTIZED / name)
    values = {"logits": model(rows["unpadded.input_ids"]).logits.detach()}
    model = exact(PeftModel.from_pretrained(model, LORA / base, is_trainable=True))
    values["adapted.logits"] = model(rows["unpadded.input_ids"]).logits.detach()
    trained = {key: weight for key, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        total = loss(model.get_base_model(), rows)
        losses.append(total.item())
        optimizer.zero_grad()
        total.backward()
        if step == 0:
            values |= {f"grad.{key.replace('.default', '')}": weight.grad.clone() for key, weight in trained.items()}
        optimizer.step()
    values |= {f"after.{key.replace('.default', '')}": weight.detach().clone() for key, weight in trained.items()}
    values["losses"] = torch.tensor(losses)
    for dtype in ("float32", "bfloat16"):
        values |= {f"merged.{dtype}.{key}": codes for key, codes in merged(name, DTYPES[dtype]).items()}
    return thin.columns(thin.columns(values, "logits"), "adapted.logits")


def merged(name, dtype):
    """The codes of the first layer's weights after PEFT has merged the adapter into the model, which is quantized from `dtype`."""
    base, settings = SPECS[name]
    settings = BitsAndBytesConfig(**settings)
    model = AutoModelForCausalLM.from_pretrained(MODELS / base, device_map="cpu", dtype=dtype, quantization_config=settings)
    model = PeftModel.from_pretrained(exact(model), LORA / base).merge_and_unload()
    codes = {key: weight.detach() for key, weight in model.state_dict().items() if ".0." in key and key.endswith(".weight")}
    return {key: weight for key, weight in codes.items() if weight.dtype in (torch.uint8, torch.int8)}


def make(name):
    base, settings = SPECS[name]
    folder = QUANTIZED / name
    shutil.rmtree(folder, ignore_errors=True)
    open_model(MODELS / base, quantization_config=BitsAndBytesConfig(**settings)).save_pretrained(folder)
    (folder / "info.json").write_text(json.dumps({"base": f"models/{base}", "lora": f"lora/{base}"}, indent=1) + "\n")
    save_file({k: v.contiguous() for k, v in sorted(values_of(name).items())}, folder / "golden.safetensors")
    print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir())} bytes")


def worst(found, expected):
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    return max((found[key].double() - expected[key].double()).abs().max().item() for key in expected)


def main():
    torch.set_num_threads(1)
    found = functions()  # by the kernel
    library = torch.library.Library("bitsandbytes", "IMPL")
    library.impl("dequantize_4bit", values_of_codes, "CPU", allow_override=True)
    if "--check" in sys.argv[1:]:
        gaps = {"functions": worst(found, load_file(QUANTIZED / "functions.safetensors"))}
        gaps |= {name: worst(values_of(name), load_file(QUANTIZED / name / "golden.safetensors")) for name in SPECS}
        print(gaps)
        sys.exit(gaps["functions"] > 0.0 or max(gaps.values()) > 2e-5)
    QUANTIZED.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in sorted(found.items())}, QUANTIZED / "functions.safetensors")
    for name in SPECS:
        make(name)


if __name__ == "__main__":
    main()
