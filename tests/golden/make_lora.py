"""Makes the LoRA adapters of `lora/` and their reference values with PEFT, on models of `models/`.

    python make_lora.py            # make every adapter again
    python make_lora.py --check    # open every adapter with PEFT and recompute its values

Made with peft 0.21.2 and the versions of make_models.py, on a CPU, one thread, float32. README.md says what each
tensor is.
"""

import json
import os
import shutil
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import make_models
import make_t5
import thin
from make_models import MODELS

LORA = MODELS.parent / "lora"

# Name -> (the model below the adapter, its settings, spread of the weights, first seed to try).
ADAPTERS = {
    "gpt2": ("gpt2", dict(target_modules=["c_attn"], fan_in_fan_out=True), 0.2, 301),
    "gpt_neox": ("gpt_neox", dict(target_modules=["query_key_value"]), 0.2, 302),
    "llama_untied": ("llama_untied", {}, 0.2, 303),  # PEFT's own choice of targets
    "llama_untied_rslora_all": ("llama_untied", dict(target_modules="all-linear", use_rslora=True), 0.1, 304),
    "llama_untied_cls": ("llama_untied_cls", dict(task_type=TaskType.SEQ_CLS, modules_to_save=["score"]), 0.2, 305),
    "gpt2_dora": ("gpt2", dict(target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True), 0.2, 306),
    "llama_untied_dora_all": ("llama_untied", dict(target_modules="all-linear", use_dora=True), 0.1, 307),
    "gpt_neox_patterns": (
        "gpt_neox",
        dict(
            target_modules=["query_key_value", "dense", "dense_h_to_4h"],
            exclude_modules=["attention.dense"],
            rank_pattern={"layers.1.attention.query_key_value": 2, "dense.*": 3},
            alpha_pattern={"^gpt_neox.layers.0.*": 9, "query_key_value": 5},
            use_rslora=True,
        ),
        0.1,
        308,
    ),
    "llama_tied_saved": ("llama_tied", dict(modules_to_save=["embed_tokens", "norm"], layers_to_transform=[1]), 0.2, 309),
    "llama_untied_cls_saved": (
        "llama_untied_cls",
        dict(task_type=TaskType.SEQ_CLS, modules_to_save=["mlp"], target_modules="all-linear", use_dora=True),
        0.1,
        310,
    ),
    "gemma3": ("gemma3", {}, 0.2, 311),
    "smollm3": ("smollm3", dict(target_modules=["q_proj", "v_proj"]), 0.2, 312),  # PEFT has no choice of its own
    "olmo2": ("olmo2", dict(target_modules="all-linear"), 0.1, 313),
    "phi3": ("phi3", dict(target_modules="all-linear"), 0.1, 314),
    "mixtral": ("mixtral", dict(target_modules=["q_proj", "v_proj"]), 0.2, 315),
    "qwen3_moe_dora": (
        "qwen3_moe",
        dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], use_dora=True),
        0.1,
        316,
    ),
    "lfm2": ("lfm2", dict(target_modules="all-linear"), 0.1, 324),
    "qwen3_5": ("qwen3_5", dict(target_modules="all-linear"), 0.1, 325),
    "granite": ("granite", dict(target_modules=["q_proj", "v_proj"]), 0.2, 324),  # nor of this one
    "ministral3": ("ministral3", dict(target_modules="all-linear"), 0.1, 325),
    "gpt_oss": ("gpt_oss", dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), 0.1, 326),
    "gemma4": ("gemma4", dict(target_modules="all-linear"), 0.1, 327),
    "lfm2_moe": ("lfm2_moe", dict(target_modules=["q_proj", "v_proj", "in_proj", "out_proj"]), 0.1, 328),
    "gemma4_moe": ("gemma4_moe", dict(target_modules="all-linear"), 0.1, 329),  # with the MLPs and routers
    "gpt2_pissa": ("gpt2", dict(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights="pissa"), 0.2, 319),
    "llama_untied_olora": (
        "llama_untied",
        dict(target_modules="all-linear", init_lora_weights="olora", use_rslora=True, rank_pattern={"up_proj": 2}),
        0.1,
        320,
    ),
    "llama_untied_embeddings": ("llama_untied", dict(target_modules=["q_proj", "embed_tokens", "lm_head"]), 0.1, 321),
    "llama_tied_embedding": ("llama_tied", dict(target_modules=["q_proj", "embed_tokens"]), 0.1, 322),
    "llama_tied_tokens": ("llama_tied", dict(trainable_token_indices=[5, 9, 40]), 0.2, 323),
    "t5": ("t5", dict(task_type=TaskType.SEQ_2_SEQ_LM), 0.2, 317),
    "t5_dora_all": (
        "t5",
        dict(task_type=TaskType.SEQ_2_SEQ_LM, target_modules="all-linear", use_dora=True),
        0.05,
        318,
    ),
}
MERGED = ("gpt2", "llama_untied", "gpt2_dora")  # with the merged weights


def load(base):
    return make_t5.load(base) if base.startswith("t5") else make_models.load(base)


def outputs(model, base_values):
    """Logits of the base's texts, or a classifier's value at every position."""
    if hasattr(model, "encoder"):
        return {"logits": make_t5.forward(model, base_values).logits}
    ids = base_values["unpadded.input_ids"]
    if hasattr(model, "score"):
        return {"reward_logits": model.score(model.model(ids).last_hidden_state)}
    return {"logits": model(ids).logits}


def loss(model, base_values):
    if hasattr(model, "encoder"):
        return make_t5.loss(model, base_values)
    if hasattr(model, "score"):
        return model(base_values["unpadded.input_ids"]).logits.sum()
    return make_models.loss(model, base_values)


def values_of(model, base_values):
    """Logits, or a classifier's value at every position; and the gradient of all that is trained."""
    inner = model.get_base_model()
    values, total = outputs(inner, base_values), loss(inner, base_values)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    grads = dict(zip(trained, torch.autograd.grad(total, list(trained.values())), strict=True))
    named = get_peft_model_state_dict(model, state_dict=grads, save_embedding_layers=False)  # as in the saved adapter
    return {key: value.detach() for key, value in values.items()}, named


def merged_of(model, base):
    """Logits and the weights that differ from the base's after `merge_and_unload`."""
    before = {name: weight.clone() for name, weight in load(base).state_dict().items()}
    model = model.merge_and_unload()
    after = model.state_dict()
    return model, {name: after[name] for name in before if not torch.equal(after[name], before[name])}


def recompute(name, model, base):
    base_values = load_file(MODELS / base / "golden.safetensors")
    values, grads = values_of(model, base_values)
    merged, changed = merged_of(model, base)
    with torch.no_grad():
        values |= {f"merged.{key}": after for key, after in outputs(merged, base_values).items()}
    if name in MERGED:
        values |= {f"merged.{weight}": tensor for weight, tensor in changed.items()}
    return values, grads


def worst(found, expected):
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    return max((found[key] - expected[key]).abs().max().item() for key in expected)


def make(name, seed):
    base, settings, spread, _ = ADAPTERS[name]
    folder = LORA / name
    shutil.rmtree(folder, ignore_errors=True)
    settings = dict(task_type=TaskType.CAUSAL_LM) | settings
    torch.manual_seed(seed)
    model = get_peft_model(load(base), LoraConfig(r=4, lora_alpha=6, lora_dropout=0.0, **settings)).eval()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if "lora_magnitude_vector" in weight_name or ("modules_to_save" in weight_name and "score" not in weight_name):
                weight.mul_(1.0 + spread * torch.randn_like(weight))  # near the base's
            elif weight.requires_grad:
                weight.normal_(0.0, spread)
    model.peft_config["default"].base_model_name_or_path = f"models/{base}"
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    values, grads = recompute(name, PeftModel.from_pretrained(load(base), folder, is_trainable=True).eval(), base)
    exact_model = PeftModel.from_pretrained(load(base), folder, is_trainable=True).eval().double()
    exact, exact_grads = values_of(exact_model, load_file(MODELS / base / "golden.safetensors"))
    stored = load_file(folder / "adapter_model.safetensors").keys()
    assert {key for key in stored if "base_layer" not in key} == grads.keys()
    key = next(iter(exact))
    rounding = (values[key] - exact[key]).abs().max().item()
    merged_differs_by = (values[key] - values.pop(f"merged.{key}")).abs().max().item()
    if name == "llama_tied_embedding":  # PEFT merges the change into the head too, which does not have it before
        merged_differs_by = 0.0
    # Small outputs of Qwen3.5's delta rule are divided by their size, and their rounding with them.
    if max(rounding, merged_differs_by) > (1.5e-5 if base == "qwen3_5" else 8e-6):
        return make(name, seed + 100)
    info = {"base": f"models/{base}", "seed": seed, "rounding": rounding, "merged_differs_by": merged_differs_by}
    info["grads"] = {
        "max_abs": max(grad.abs().max().item() for grad in grads.values()),
        "rounding": worst(grads, exact_grads),
    }
    values = thin.columns(values, "logits")
    save_file({k: v.clone().contiguous() for k, v in sorted(values.items())}, folder / "golden.safetensors")
    save_file({k: v.clone().contiguous() for k, v in sorted(grads.items())}, folder / "grads.safetensors")
    (folder / "info.json").write_text(json.dumps(info, indent=1) + "\n")
    print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir())} bytes, {info}")


def check(name):
    base, folder = ADAPTERS[name][0], LORA / name
    model = PeftModel.from_pretrained(load(base), folder, is_trainable=True).eval()
    values, grads = recompute(name, model, base)
    stored = load_file(folder / "golden.safetensors")
    del values["merged.reward_logits" if "reward_logits" in values else "merged.logits"]
    gaps = worst(thin.columns(values, "logits"), stored), worst(grads, load_file(folder / "grads.safetensors"))
    print(f"{name}: largest difference {gaps[0]:.1e}, of gradients {gaps[1]:.1e}")
    info = json.loads((folder / "info.json").read_text())
    return max(gaps[0], gaps[1] / max(1.0, info["grads"]["max_abs"]))


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if sys.argv[1:] == ["--check"]:
        sys.exit(max(check(name) for name in ADAPTERS) > 2e-5)
    for name in sys.argv[1:] or ADAPTERS:
        make(name, ADAPTERS[name][3])


if __name__ == "__main__":
    main()
