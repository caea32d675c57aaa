"""Checks what `rlhf` writes with the readers that people will use: transformers, PEFT and TensorBoard.

    python tests/interop/check.py target/release/rlhf

Runs the four commands on tiny models that transformers itself made. Prints one line per check and a total; a check
never skips: what could not be tried has failed. Exit code 1 if any failed.

Needs torch, transformers, peft, tensorboard and safetensors; no network. Rollouts are read where datasets or pyarrow is
installed, which none of these needs.
"""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import bitsandbytes
import peft
import torch
import transformers
from runner import Failure, binary, expect, run_checks
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GenerationConfig,
    GPT2Config,
    GptOssConfig,
    GPTNeoXConfig,
    GraniteConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    MT5Config,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    T5Config,
    T5ForConditionalGeneration,
)

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(os.environ.get("RLHF_GOLDEN", ROOT / "tests/golden"))

# Both sides compute in f32 and differ in the order of their sums: up to 2.0e-5, of a merged adapter of Qwen3.5 with experts.
TOLERANCE = 3e-5
NEW_TOKENS = 8

PROMPTS = ["The movie was", "I", "What a waste of time! The actors", "It's 2024 and", "Once upon a time there was a"]
TEXTS = [
    "The movie was great!",
    " leading and  double  spaces",
    "I don't think it's 2024-12-31.",
    "naïve café, 日本語, emoji 🎬🍿",
    "line one\nline two\n\n\tindented",
    "",
    " ",
    "ALL CAPS AND lower",
    "https://example.org/a?b=c&d=%20",
    "<|endoftext|> and </s> inside a text",
]
PAIRS = [  # eight, so that a batch of eight holds them all and its loss does not depend on their order
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt in ("The movie was", "I thought that it")
    for chosen, rejected in (
        (" great", " bad"),
        (" a joy from start to end", " dull"),
        (" fine.", " a waste of two hours of my life"),
        (" wonderful! Truly", " not good"),
    )
]
DEMONSTRATIONS = {
    "text": [{"text": pair["prompt"] + pair["chosen"]} for pair in PAIRS],
    "prompt and completion": [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS],
}


# ---------------------------------------------------------------------------------------------------------------------
# Tiny models


def families():
    """Name -> (config, folder of the tokenizer). Every number that can have a default differs from it."""
    common = dict(bos_token_id=0, eos_token_id=0, pad_token_id=1)
    neox = dict(
        vocab_size=352,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        layer_norm_eps=2e-5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        classifier_dropout=0.0,
        tie_word_embeddings=False,
        **common,
    )
    llama = dict(
        vocab_size=400,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        rms_norm_eps=2e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )

    opt = dict(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=64,
        dropout=0.0,
        **common,
    )

    by_layer = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.0},
    }
    yarn = dict(rope_type="yarn", rope_theta=500000.0, factor=4.0, original_max_position_embeddings=32)
    longrope = dict(
        rope_type="longrope",
        rope_theta=500000.0,
        partial_rotary_factor=0.5,
        short_factor=[1.0, 1.5],
        long_factor=[2.0, 5.0],
    )

    def rope(share):
        return {"rope_type": "default", "rope_theta": 2000.0, "partial_rotary_factor": share}

    # Without the larger epsilon the norm of small outputs enlarges the rounding of both sides.
    delta = dict(
        rms_norm_eps=1e-2,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters=rope(0.5),
    )

    return {
        "gpt2": (
            GPT2Config(
                vocab_size=320,
                n_positions=64,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_inner=48,
                layer_norm_epsilon=2e-5,
                attn_pdrop=0.0,
                embd_pdrop=0.0,
                resid_pdrop=0.0,
                **common,
            ),
            "gpt2",
        ),
        "gpt_neox": (GPTNeoXConfig(use_parallel_residual=True, rope_parameters=rope(0.5), **neox), "gpt_neox"),
        "gpt_neox, sequential residual": (
            GPTNeoXConfig(use_parallel_residual=False, rope_parameters=rope(1.0), **neox),
            "gpt_neox",
        ),
        "llama": (LlamaConfig(tie_word_embeddings=False, **llama), "llama_untied"),
        "llama, tied": (LlamaConfig(tie_word_embeddings=True, **llama), "llama_untied"),
        "opt": (OPTConfig(**opt), "gpt2"),
        "opt, narrow embedding, norms behind": (
            OPTConfig(word_embed_proj_dim=16, do_layer_norm_before=False, **opt),
            "gpt2",
        ),
        "mistral": (MistralConfig(sliding_window=6, **llama), "llama_untied"),
        # For this `model_type` transformers makes a byte-level tokenizer of whatever file there is.
        "qwen2": (Qwen2Config(tie_word_embeddings=True, **(llama | common)), "../tokenizers/split"),
        "qwen3": (Qwen3Config(head_dim=16, **llama), "llama_untied"),
        "gemma2": (
            Gemma2Config(
                head_dim=16,
                query_pre_attn_scalar=24,
                sliding_window=6,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=3.0,
                attn_implementation="eager",
                **llama,
            ),
            "llama_untied",
        ),
        "phi3": (Phi3Config(sliding_window=6, **llama), "llama_untied"),
        # Of longer texts, log-probabilities of one pass are not those of decoding.
        "phi3, longrope": (
            Phi3Config(**(llama | dict(original_max_position_embeddings=48, rope_parameters=longrope))),
            "llama_untied",
        ),
        "llama, yarn": (LlamaConfig(**(llama | dict(rope_parameters=yarn))), "llama_untied"),
        "gemma3": (
            Gemma3TextConfig(
                head_dim=16,
                query_pre_attn_scalar=24,
                sliding_window=6,
                sliding_window_pattern=2,
                final_logit_softcapping=3.0,
                **(llama | dict(rope_parameters=by_layer)),
            ),
            "llama_untied",
        ),
        "smollm3": (SmolLM3Config(no_rope_layer_interval=2, **llama), "llama_untied"),
        "olmo2": (Olmo2Config(**llama), "llama_untied"),
        "olmo3": (
            Olmo3Config(sliding_window=6, layer_types=list(by_layer), **(llama | dict(rope_parameters=by_layer))),
            "llama_untied",
        ),
        "qwen3_moe": (
            Qwen3MoeConfig(
                head_dim=16,
                moe_intermediate_size=24,
                num_experts=4,
                num_experts_per_tok=2,
                norm_topk_prob=True,
                mlp_only_layers=[0],
                **llama,
            ),
            "llama_untied",
        ),
        "mixtral": (MixtralConfig(num_local_experts=3, **llama), "llama_untied"),
        "lfm2": (
            Lfm2Config(block_multiple_of=8, conv_L_cache=4, layer_types=["conv", "full_attention"], **llama),
            "llama_untied",
        ),
        "qwen3_5": (Qwen3_5TextConfig(**(llama | delta)), "llama_untied"),
        "qwen3_next": (
            Qwen3NextConfig(
                moe_intermediate_size=24,
                shared_expert_intermediate_size=20,
                num_experts=4,
                num_experts_per_tok=2,
                mlp_only_layers=[0],
                **(llama | delta),
            ),
            "llama_untied",
        ),
        "qwen3_5_moe": (
            Qwen3_5MoeTextConfig(
                moe_intermediate_size=24,
                shared_expert_intermediate_size=20,
                num_experts=4,
                num_experts_per_tok=2,
                **(llama | common | delta),
            ),
            "../tokenizers/split",  # transformers takes its class of byte-level tokenizers in any case
        ),
        "lfm2_moe": (
            Lfm2MoeConfig(
                conv_L_cache=4,
                layer_types=["conv", "full_attention"],
                num_dense_layers=1,
                moe_intermediate_size=24,
                num_experts=4,
                num_experts_per_tok=2,
                **llama,
            ),
            "llama_untied",
        ),
        "granite": (
            GraniteConfig(
                embedding_multiplier=3.0,
                attention_multiplier=0.2,
                residual_multiplier=0.6,
                logits_scaling=2.0,
                **llama,
            ),
            "llama_untied",
        ),
        "ministral3": (
            Ministral3Config(head_dim=16, **(llama | dict(rope_parameters=yarn | dict(llama_4_scaling_beta=0.3)))),
            "llama_untied",
        ),
        "gemma4": (
            Gemma4TextConfig(
                **(
                    llama
                    | dict(
                        num_hidden_layers=4,
                        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                        num_kv_shared_layers=2,
                        use_double_wide_mlp=True,
                        head_dim=16,
                        global_head_dim=32,
                        sliding_window=6,
                        vocab_size_per_layer_input=400,
                        hidden_size_per_layer_input=8,
                        rope_parameters={
                            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
                            "full_attention": {
                                "rope_type": "proportional",
                                "rope_theta": 500000.0,
                                "partial_rotary_factor": 0.25,
                            },
                        },
                    )
                ),
            ),
            "llama_untied",
        ),
        "gemma4_moe": (
            Gemma4TextConfig(
                **(
                    llama
                    | dict(
                        layer_types=["sliding_attention", "full_attention"],
                        attention_k_eq_v=True,
                        num_global_key_value_heads=1,
                        head_dim=16,
                        global_head_dim=32,
                        sliding_window=6,
                        hidden_size_per_layer_input=0,
                        enable_moe_block=True,
                        num_experts=4,
                        top_k_experts=2,
                        moe_intermediate_size=24,
                        rope_parameters={
                            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
                            "full_attention": {
                                "rope_type": "proportional",
                                "rope_theta": 500000.0,
                                "partial_rotary_factor": 0.25,
                            },
                        },
                    )
                ),
            ),
            "llama_untied",
        ),
        "gpt_oss": (
            GptOssConfig(
                head_dim=16,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=6,
                attn_implementation="eager",
                **(llama | dict(rope_parameters=yarn)),
            ),
            "llama_untied",
        ),
    }


LAYOUTS = {
    "f32": {},
    "f32 shards": {"shard": True},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 shards": {"dtype": torch.bfloat16, "shard": True},
    "config of transformers 4": {"old_config": True},
    "bf16 shards, config of transformers 4": {"dtype": torch.bfloat16, "shard": True, "old_config": True},
}


def build_t5(folder, gated):
    """Writes a random T5 (v1.0, or v1.1 with a gated MLP) with its tokenizer, and gives back the folder."""
    torch.manual_seed(0)
    form = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False) if gated else {}
    config = T5Config(vocab_size=80, d_model=32, d_kv=8, num_heads=2, d_ff=48, num_layers=2, decoder_start_token_id=0, **form)
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(1 + 0.1 * torch.randn(weight.shape) if weight.dim() == 1 else 0.2 * torch.randn(weight.shape))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "tokenizers/t5" / name, folder)
    return Path(folder)


def build(folder, family, auto=AutoModelForCausalLM, seed=0, dtype=torch.float32, shard=False, old_config=False):
    """Writes a random model with its tokenizer, as transformers would, and gives back the folder."""
    config, tokenizer = families()[family]
    if auto is AutoModelForSequenceClassification:
        config.num_labels = 1
    torch.manual_seed(seed)
    model = auto.from_config(config)
    with torch.no_grad():  # far from the usual small weights, so that logits are far apart and mistakes are large
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.3 if weight.dim() > 1 else 0.1)
            if "norm" in name and name.endswith("weight") or ".ln_" in name and name.endswith("weight"):
                weight.add_(1.0)
    model.to(dtype).save_pretrained(folder, max_shard_size="40KB" if shard else "5GB")
    if shard != (Path(folder) / "model.safetensors.index.json").exists():
        raise RuntimeError(f"{folder}: transformers wrote another number of shards than this check needs")
    if old_config:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config_of_transformers_4(json.loads(path.read_text()))))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "models" / tokenizer / name, folder)
    return Path(folder)


def config_of_transformers_4(config):
    """The same model in the keys of transformers before 5, without those that its first releases lacked."""
    if config["model_type"] == "gemma4_text":  # newer than transformers 5
        return config
    config = dict(config, transformers_version="4.45.2", torch_dtype=config["dtype"])
    newer = ["dtype", "is_decoder", "add_cross_attention"]
    # Families that are newer than the field have always written it.
    always = ("smollm3", "olmo3", "lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "gpt_oss")
    newer += ["layer_types"] if config["model_type"] not in always else []
    newer += {
        "gpt2": ["tie_word_embeddings"],
        "gpt_neox": ["attention_bias"],
        "llama": ["head_dim", "attention_bias", "mlp_bias", "pretraining_tp"],
    }.get(config["model_type"], [])
    for key in newer:
        config.pop(key, None)
    rope = config.pop("rope_parameters", None)
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    if rope and "full_attention" in rope:
        if config["model_type"] == "gemma3_text":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if config["model_type"] == "gpt_neox":
        config.update(rotary_emb_base=int(rope["rope_theta"]), rotary_pct=rope["partial_rotary_factor"])
    elif rope:
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        plain = rope["rope_type"] == "default"
        config.update(rope_theta=rope["rope_theta"], rope_scaling=None if plain else scaling)
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return config


# ---------------------------------------------------------------------------------------------------------------------
# The program


def rlhf(*arguments):
    """Runs the program to its end; an exit code other than 0 is a failure that shows the end of standard error."""
    command = [str(BINARY), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        error = " | ".join(done.stderr.strip().splitlines()[-3:]) or "nothing on standard error"
        raise Failure(f"`rlhf {' '.join(map(str, arguments))}`: exit code {done.returncode}: {error}")


def read_jsonl(path):
    expect(path.is_file(), f"{path.name}: not written")
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Once:
    """A step that several checks stand on: it runs once, and its failure fails each of them."""

    def __init__(self, step):
        self.step, self.outcome = step, None

    def __call__(self):
        if self.outcome is None:
            try:
                self.outcome = (self.step(), None)
            except Exception as error:
                self.outcome = (None, error)
        result, error = self.outcome
        if error:
            raise error
        return result


def generate(model, work):
    """Greedy answers of our program, one row per prompt."""
    output = work / "generated.jsonl"
    output.unlink(missing_ok=True)
    prompts = write_jsonl(work / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    rlhf(
        "generate",
        "--model_name_or_path",
        model,
        "--dataset_name",
        prompts,
        "--output_file",
        output,
        "--max_new_tokens",
        NEW_TOKENS,
        "--do_sample=false",
        "--dtype",
        "float32",
    )
    return read_jsonl(output)


# ---------------------------------------------------------------------------------------------------------------------
# Comparisons


def load(auto, folder):
    """The model in f32 by transformers, which must find exactly the tensors that it wants."""
    model, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        expect(not info[problem], f"transformers reports {problem}: {sorted(map(str, info[problem]))[:5]}")
    return model.eval()


def tensors(folder):
    """Name -> tensor over all safetensors files of a folder."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})
    expect(found, f"{folder}: no safetensors file")
    return found


def same_tensors_as_transformers_saves(auto, folder, work):
    """What we wrote, loaded and saved again by transformers, has the same names, types and bits, but for BART's bias of logits, which
    transformers takes as 0 where it is not there, and which is 0.
    """
    resaved = work / "resaved"
    shutil.rmtree(resaved, ignore_errors=True)
    auto.from_pretrained(folder, dtype="auto").save_pretrained(resaved)
    ours, theirs = tensors(folder), tensors(resaved)
    expect(not theirs.pop("final_logits_bias", torch.zeros(1)).any(), "final_logits_bias: not 0")
    difference = sorted(ours.keys() ^ theirs.keys())
    expect(not difference, f"tensors written by only one of us: {difference[:5]}")
    for name, tensor in ours.items():
        expect(tensor.dtype == theirs[name].dtype, f"{name}: ours is {tensor.dtype}, theirs is {theirs[name].dtype}")
        expect(torch.equal(tensor, theirs[name]), f"{name}: not the same values after a round trip")
        expect(tensor.isfinite().all(), f"{name}: holds numbers that are not finite")


def greedy_agrees(folder, rows, prompts=PROMPTS):
    """Tokens equal transformers' own greedy search, and log-probs of each token agree."""
    expect(len(rows) == len(prompts), f"{len(prompts)} prompts, {len(rows)} answers")
    model, tokenizer = load(AutoModelForCausalLM, folder), AutoTokenizer.from_pretrained(folder)
    worst = 0.0
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True), 1):
        expect(row["prompt"] == prompt, f"row {number}: prompt {row['prompt']!r}, expected {prompt!r}")
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        expected = whole[0, ids.shape[1] :].tolist()
        expect(row["completion_ids"] == expected, f"row {number}: tokens {row['completion_ids']}, transformers {expected}")
        stopped = expected[-1] == tokenizer.eos_token_id
        finish = {"stop", "eos", "stop_token"} if stopped else {"length", "max_new_tokens"}
        expect(row["finish_reason"] in finish, f"row {number}: finish_reason {row['finish_reason']!r}")
        decoded = [tokenizer.decode(part, skip_special_tokens=True) for part in (whole[0], ids[0])]
        text = decoded[0].removeprefix(decoded[1])
        expect(row["completion"] == text, f"row {number}: completion {row['completion']!r}, transformers {text!r}")
        with torch.no_grad():
            logits = model(whole).logits[0, ids.shape[1] - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(expected)[:, None])[:, 0]
        expect(len(row["logprobs"]) == len(expected), f"row {number}: {len(row['logprobs'])} logprobs")
        worst = max(worst, (torch.tensor(row["logprobs"]) - logprobs).abs().max().item())
    expect(worst <= TOLERANCE, f"log-probs differ by up to {worst:.2e}, expected at most {TOLERANCE:.0e}")


def tokenizer_agrees(folder, source):
    ours, theirs = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(source)
    for text in TEXTS:
        for special in (True, False):
            got, expected = (t(text, add_special_tokens=special).input_ids for t in (ours, theirs))
            expect(got == expected, f"{text!r}, add_special_tokens={special}: {got}, the source's {expected}")
    for role in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "padding_side"):
        got, expected = getattr(ours, role), getattr(theirs, role)
        expect(got == expected, f"{role}: {got}, the source's {expected}")
    expect(len(ours) == len(theirs), f"{len(ours)} tokens, the source has {len(theirs)}")


def config_agrees(folder, source):
    """The written config describes the source's architecture to transformers."""
    may_differ = {
        "_name_or_path",
        "architectures",
        "dtype",
        "transformers_version",
        "id2label",
        "label2id",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    }
    ours, theirs = (transformers.AutoConfig.from_pretrained(f).to_dict() for f in (folder, source))
    differ = {k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)} - may_differ
    expect(not differ, ", ".join(f"{k}: {ours.get(k)!r}, the source's {theirs.get(k)!r}" for k in sorted(differ)))


def weights_moved(folder, source):
    ours, theirs = tensors(folder), tensors(source)
    expect(
        any(not torch.equal(ours[k].float(), theirs[k].float()) for k in ours.keys() & theirs.keys()),
        "the weights are those of the source: nothing was trained",
    )


def files_present(folder, names):
    missing = [name for name in names if not (Path(folder) / name).is_file()]
    expect(not missing, f"missing: {', '.join(missing)}")


def generation_config_agrees(folder):
    tokenizer, config = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    for role in ("eos_token_id", "pad_token_id"):
        got, expected = getattr(config, role), getattr(tokenizer, role)
        expect(got in (expected, [expected]), f"{role}: {got}, the tokenizer's {expected}")


def first_loss_agrees(model, work):
    """The loss of the first update of `rlhf reward`, whose batch is the whole dataset, by transformers' scores.

    Each text is prompt + answer, closed by the end token, which is where its score is read.
    """
    output = work / "scored"
    shutil.rmtree(output, ignore_errors=True)
    rlhf(
        "reward",
        "--model_name_or_path",
        model,
        "--dataset_name",
        write_jsonl(work / "pairs.jsonl", PAIRS),
        "--output_dir",
        output,
        "--max_steps",
        1,
        "--per_device_train_batch_size",
        len(PAIRS),
    )
    scorer, tokenizer = load(AutoModelForSequenceClassification, model), AutoTokenizer.from_pretrained(model)
    scorer.config.pad_token_id = tokenizer.pad_token_id

    def score(text):
        ids = tokenizer(text + tokenizer.eos_token, return_tensors="pt").input_ids
        with torch.no_grad():
            return scorer(ids).logits[0, 0]

    margins = torch.stack([score(p["prompt"] + p["chosen"]) - score(p["prompt"] + p["rejected"]) for p in PAIRS])
    expected = -torch.nn.functional.logsigmoid(margins).mean().item()
    found = read_jsonl(output / "metrics.jsonl")[0]["loss"]
    expect(
        math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE),
        f"first loss {found}, by transformers' scores {expected}",
    )


def events_agree(output):
    """TensorBoard reads what metrics.jsonl holds: each number of each row, under its name, at the row's step."""
    rows = read_jsonl(output / "metrics.jsonl")
    expect(len(rows) == 2, f"metrics.jsonl: 2 updates, {len(rows)} rows")
    files = sorted(output.rglob("events.out.tfevents.*"))
    expect(len(files) == 1, f"one event file expected, found {[str(f.relative_to(output)) for f in files]}")
    reader = EventAccumulator(str(files[0].parent), size_guidance={"scalars": 0})
    reader.Reload()
    expected = {}
    for row in rows:
        for tag, value in row.items():
            if tag != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                expected.setdefault(tag, []).append((row["step"], torch.tensor(value, dtype=torch.float32).item()))
    found = {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    difference = sorted(found.keys() ^ expected.keys())
    expect(not difference, f"tags in only one of metrics.jsonl and the event file: {difference[:5]}")
    for tag, values in expected.items():
        expect(found[tag] == values, f"{tag}: events {found[tag]}, metrics.jsonl {values}")
    expect("objective/kl" in expected, "metrics.jsonl: no objective/kl")


PARQUET = next((name for name in ("datasets", "pyarrow") if importlib.util.find_spec(name)), None)


def read_parquet(files, work):
    """The rows of Parquet files, as people read them."""
    names = [str(file) for file in files]
    if PARQUET == "datasets":
        from datasets import load_dataset

        return list(load_dataset("parquet", data_files=names, split="train", cache_dir=str(work / "cache")))
    from pyarrow import parquet

    return [row for name in names for row in parquet.read_table(name).to_pylist()]


def rollouts_agree(output, source, work):
    """The rollouts hold the responses that metrics.jsonl counts, and the log-probs are transformers' at the temperature."""
    files = sorted((output / "rollouts").glob("*.parquet"))
    metrics = read_jsonl(output / "metrics.jsonl")
    expect(len(files) == len(metrics) == 2, f"2 updates, {len(files)} files, {len(metrics)} lines")
    rows = read_parquet(files, work)
    expect([row["step"] for row in rows] == [1] * 8 + [2] * 8, f"steps: {[row['step'] for row in rows]}")
    tokenizer, model = AutoTokenizer.from_pretrained(source), load(AutoModelForCausalLM, source)
    for line in metrics:
        of_step = [row for row in rows if row["step"] == line["step"]]
        for name, values in {
            "objective/scores": [row["score"] for row in of_step],
            "objective/scores/model": [row["components"]["model"] for row in of_step],
            "val/response_length": [len(row["token_ids"]) for row in of_step],
            "objective/entropy": [-sum(row["logprobs"]) for row in of_step],
            "objective/kl": [sum(row["logprobs"]) - sum(row["ref_logprobs"]) for row in of_step],
        }.items():
            found = sum(values) / 8
            expect(abs(found - line[name]) < 1e-4, f"{name}: {found}, metrics.jsonl {line[name]}")
    for row in rows:
        tokens, prompt = row["token_ids"], tokenizer(row["prompt"])["input_ids"]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        expect(text.strip() == row["response"].strip(), f"{text!r}, rlhf {row['response']!r}")
        expect(len(row["advantages"]) == len(tokens) <= len(row["values"]), "an advantage and a value for each token")
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1)[range(len(tokens)), tokens]
        # The first update's responses are the source's, and the reference stays the source.
        for name in ["ref_logprobs"] + ["logprobs"] * (row["step"] == 1):
            worst = (torch.tensor(row[name]) - expected).abs().max().item()
            expect(worst <= TOLERANCE / 0.7, f"{name} differ by up to {worst:.2e}")


def replay_agrees(output, work):
    """The first update, replayed, is that of the run, and safetensors reads its numbers, which make its metrics."""
    folder = work / "replay"
    rlhf("replay", output, "--update", 1, "--output_dir", folder)
    comparison = json.loads((folder / "comparison.json").read_text())
    expect(comparison["equal"] and len(comparison["metrics"]) > 15, f"differing: {comparison['differing']}")
    with safe_open(folder / "update.safetensors", "pt") as file:
        numbers = {name: file.get_tensor(name) for name in file.keys()}
    line = read_jsonl(output / "metrics.jsonl")[0]
    rows, slots = numbers["rollout.response_ids"].shape
    expect((rows, slots) == (8, 8), f"{rows} responses of at most {slots} tokens")
    mask = numbers["masks.loss"]
    expect(mask.dtype == torch.bool, f"masks of {mask.dtype}")
    ratios, advantages = numbers["epochs.ratios"].double(), numbers["targets.advantages"].double()
    losses = torch.maximum(-ratios * advantages, -ratios.clamp(0.8, 1.2) * advantages)[:, mask]
    for name, found in {
        "objective/entropy": -numbers["rollout.logprobs"].sum() / 8,
        "objective/kl": numbers["targets.kl"].sum() / 8,
        "objective/scores": numbers["rollout.scores"].mean(),
        "loss/policy_avg": numbers["steps.policy_loss"].sum() / numbers["steps.tokens"].sum(),
        "policy/grad_norm": numbers["steps.policy_grad_norm"].mean(),
    }.items():
        expect(abs(found.item() - line[name]) < 1e-4, f"{name}: {found.item()}, metrics.jsonl {line[name]}")
    found = losses.mean().item()
    expect(abs(found - line["loss/policy_avg"]) < 1e-4, f"clipped losses: {found}, metrics.jsonl {line['loss/policy_avg']}")


# ---------------------------------------------------------------------------------------------------------------------
# The checks

MODEL_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "README.md"]
PIPELINES = [  # family, layout of the first model, rows of its demonstrations
    ("gpt2", "f32", "text"),
    ("gpt_neox", "f32 shards", "prompt and completion"),
    ("llama", "config of transformers 4", "prompt and completion"),
    ("opt, narrow embedding, norms behind", "f32", "text"),
    ("qwen3", "bf16 shards", "prompt and completion"),
    ("gemma2", "config of transformers 4", "prompt and completion"),
    ("gemma3", "f32", "prompt and completion"),
    ("olmo2", "config of transformers 4", "text"),
    ("qwen3_moe", "bf16 shards", "prompt and completion"),
]


def reading_checks(work):
    """Models written by transformers, read by us."""
    for family in families():
        for layout, options in LAYOUTS.items():
            # The families differ in their layers and share the reading of files: for the later ones the ends are enough.
            if family not in list(families())[:5] and layout not in (list(LAYOUTS)[0], list(LAYOUTS)[-1]):
                continue

            def check(family=family, options=options):
                folder = work / "read"
                shutil.rmtree(folder, ignore_errors=True)
                build(folder, family, **options)
                greedy_agrees(folder, generate(folder, work))

            yield f"read {family}, {layout}: greedy tokens and log-probs", check
    # transformers has no classifiers of these.
    without = {"granite", "gemma4", "gemma4_moe", "lfm2", "lfm2_moe", "qwen3_5_moe"}
    for family in sorted(families().keys() - without):

        def check(family=family):
            folder = work / "read"
            shutil.rmtree(folder, ignore_errors=True)
            first_loss_agrees(build(folder, family, AutoModelForSequenceClassification), work)

        yield f"read {family}, reward model: loss by its scores", check


def saving_checks(work):
    """Families that no pipeline below trains: what `sft` saves, read by transformers."""
    for family in sorted(families().keys() - {family for family, _, _ in PIPELINES}):
        place = work / f"saved_{family.replace(', ', '_').replace(' ', '_')}"

        def train(place=place, family=family):
            place.mkdir()
            source = build(place / "source", family, old_config=True)
            rows = write_jsonl(place / "rows.jsonl", DEMONSTRATIONS["prompt and completion"])
            arguments = ["--dataset_name", rows, "--output_dir", place / "sft", "--max_steps", 2, "--learning_rate", 1e-3]
            rlhf("sft", "--model_name_or_path", source, *arguments)
            return place / "sft"

        def equal(trained, place=place):
            same_tensors_as_transformers_saves(AutoModelForCausalLM, trained, place)
            weights_moved(trained, place / "source")
            config_agrees(trained, place / "source")
            measures_agree(load(AutoModelForCausalLM, trained), trained, place, False)
            greedy_agrees(trained, generate(trained, place))

        trained = Once(train)
        what = f"{family}, trained by rlhf sft: tensors, config, log-probs and greedy tokens"
        yield what, lambda equal=equal, trained=trained: equal(trained())


def encoder_checks(work):
    """Encoders that `rlhf reward` trained and saved, read by transformers."""
    trained = [(name, False) for name in ("bert_cls1", "deberta_cls1", "modernbert_cls1")]
    headless = [(name, True) for name in ("bert_cls1", "deberta_cls1", "modernbert_cls1", "roberta_cls3", "distilbert_cls2")]
    for name, is_headless in trained + headless:

        def check(name=name, is_headless=is_headless):
            place, source = work / f"encoder_{name}_{is_headless}", GOLDEN / "models" / name
            place.mkdir()
            if is_headless:  # as people find it: the model that was pre-trained
                AutoModelForMaskedLM.from_pretrained(source).save_pretrained(place / "base")
                for file in ("tokenizer.json", "tokenizer_config.json"):
                    shutil.copy(source / file, place / "base")
                source = place / "base"
            pairs, output, folder = write_jsonl(place / "pairs.jsonl", PAIRS), place / "scored.jsonl", place / "trained"
            arguments = ["--dataset_name", pairs, "--num_train_epochs", 1, "--per_device_train_batch_size", 8]
            arguments += ["--new_reward_head"] if is_headless else []
            rlhf("reward", "--model_name_or_path", source, "--output_dir", folder, *arguments)
            texts = [pair["prompt"] + pair["chosen"] for pair in PAIRS]
            rows = write_jsonl(place / "texts.jsonl", [{"text": text} for text in texts])
            rlhf("score", "--model", folder, "--dataset_name", rows, "--output_file", output)
            tokenizer, model = AutoTokenizer.from_pretrained(folder), load(AutoModelForSequenceClassification, folder)
            expect(model.num_labels == 1, f"num_labels is {model.num_labels}")
            with torch.no_grad():
                ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
                expected = [model(input_ids=row).logits[0, 0].item() for row in ids]
            worst = max(abs(row["score"] - logit) for row, logit in zip(read_jsonl(output), expected, strict=True))
            expect(worst <= TOLERANCE, f"differ by up to {worst:.2e}, expected at most {TOLERANCE:.0e}")

        what = "masked language model" if is_headless else "encoder"
        yield f"{what} {name}, trained by rlhf reward: scores", check


def encoder_decoders():
    """Name -> config, and whether the head has weights of its own."""
    sizes = dict(vocab_size=72, d_model=32, d_kv=8, num_heads=2, d_ff=24, num_layers=2, num_decoder_layers=1)
    buckets = dict(relative_attention_num_buckets=8, relative_attention_max_distance=12, dropout_rate=0.0)
    tokens = dict(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    common = sizes | buckets | tokens
    gated = common | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    layers = dict(encoder_layers=1, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    limits = dict(vocab_size=72, d_model=32, max_position_embeddings=64, dropout=0.0, bos_token_id=None, forced_eos_token_id=None)
    bart = layers | heads | limits | tokens
    return {
        "t5": (T5Config(**common), False),
        "t5 v1.1, a head of its own": (T5Config(**gated), True),
        "mt5": (MT5Config(**gated), False),
        "bart": (BartConfig(**bart), False),
    }


def seq2seq_agrees(model, folder, work):
    """Greedy tokens of the model in `folder` by us are those of `model`, and so are their log-probs."""
    tokenizer, worst = AutoTokenizer.from_pretrained(folder), 0.0
    for number, row in enumerate(generate(folder, work), 1):
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        expect(ids[0, -1] == tokenizer.eos_token_id, f"row {number}: a prompt that does not end with </s>")
        with torch.no_grad():
            whole = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
            )
            logits = model(input_ids=ids, decoder_input_ids=whole).logits[0, :-1]
        expected = whole[0, 1:].tolist()
        expect(row["completion_ids"] == expected, f"row {number}: tokens {row['completion_ids']}, transformers {expected}")
        logprobs = logits.log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0]
        worst = max(worst, (torch.tensor(row["logprobs"]) - logprobs).abs().max().item())
    expect(worst <= TOLERANCE, f"log-probs differ by up to {worst:.2e}, expected at most {TOLERANCE:.0e}")


def texts_agree(model, folder, work):
    """Scores of whole texts by the classifier in `folder` are those of `model`."""
    texts = [pair["prompt"] + pair["chosen"] for pair in PAIRS]
    rows, output = write_jsonl(work / "texts.jsonl", [{"text": text} for text in texts]), work / "scored.jsonl"
    rlhf("score", "--model", folder, "--dataset_name", rows, "--output_file", output, "--overwrite_output_file")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        expected = [model(input_ids=tokenizer(text, return_tensors="pt").input_ids).logits[0, 0].item() for text in texts]
    worst = max(abs(row["score"] - logit) for row, logit in zip(read_jsonl(output), expected, strict=True))
    expect(worst <= TOLERANCE, f"scores differ by up to {worst:.2e}, expected at most {TOLERANCE:.0e}")


def encoder_decoder_checks(work):
    """Encoder-decoders, their value models and reward models, in both hands."""
    for number, (name, (config, own_head)) in enumerate(encoder_decoders().items()):
        place = work / f"encoder_decoder_{number}"

        def build_pair(place=place, config=config, own_head=own_head):
            (place / "base").mkdir(parents=True)
            torch.manual_seed(3)
            model = AutoModelForSeq2SeqLM.from_config(config)
            if own_head:
                model.lm_head.weight = torch.nn.Parameter(torch.empty(config.vocab_size, config.d_model))
            with torch.no_grad():
                for weight in model.parameters():
                    weight.normal_(0.0, 0.2) if weight.dim() > 1 else weight.normal_(1.0, 0.1)
            model.save_pretrained(place / "base")
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(GOLDEN / "tokenizers/t5" / file, place / "base")
            write_jsonl(place / "pairs.jsonl", PAIRS)
            rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
            return place / "base", write_jsonl(place / "rows.jsonl", rows)

        base = Once(build_pair)

        def train(out, command, model, rows, *flags, base=base, place=place):
            base()
            common = ["--max_steps", 2] if command != "ppo" else ["--total_episodes", 16, "--response_length", 8]
            model_flag = "--sft_model_path" if command == "ppo" else "--model_name_or_path"
            places = [model_flag, place / model, "--dataset_name", place / rows, "--output_dir", place / out]
            rlhf(command, *places, "--learning_rate", 1e-2, *common, *flags)
            return place / out

        def ran(out, *arguments, train=train):
            return Once(lambda: train(out, *arguments))

        sft, reward = ran("sft", "sft", "base", "rows.jsonl"), ran("reward", "reward", "base", "pairs.jsonl", "--new_reward_head")
        rule = ["--reward", "rouge_l:completion"]
        ppo = ran("ppo", "ppo", "base", "rows.jsonl", *rule)
        lora = ["--use_peft", "--lora_r", 4]
        adapter = ran("adapter", "sft", "base", "rows.jsonl", *lora)
        judge = ran("judge", "reward", "base", "pairs.jsonl", "--new_reward_head", *lora)
        value = Once(lambda ppo=ppo: ppo() / "value_model")
        auto, scorer = AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

        def by_peft(folder, place=place, auto=auto):
            return peft.PeftModel.from_pretrained(load(auto, place / "base"), folder).eval()

        def scorer_by_peft(folder, place=place):
            model = scorer.from_pretrained(place / "base", num_labels=1, dtype=torch.float32)
            return peft.PeftModel.from_pretrained(model, folder).eval()

        yield f"{name}: greedy tokens and log-probs", lambda b=base, p=place: seq2seq_agrees(load(auto, b()[0]), b()[0], p)
        for what, output in (("sft", sft), ("ppo", ppo)):
            yield f"{name} {what}: greedy tokens and log-probs", lambda o=output, p=place: seq2seq_agrees(load(auto, o()), o(), p)
            yield f"{name} {what}: holds the tensors that transformers saves", lambda o=output, p=place: same_tensors_as_transformers_saves(
                auto, o(), p
            )
            yield f"{name} {what}: was trained", lambda o=output, b=base: weights_moved(o(), b()[0])
            yield f"{name} {what}: config", lambda o=output, b=base: config_agrees(o(), b()[0])
            yield f"{name} {what}: log-probs of ids", lambda o=output, p=place: measures_agree(load(auto, o()), o(), p, False)
        for what, output in (("reward", reward), ("ppo, value model", value)):
            yield f"{name} {what}: scores of texts", lambda o=output, p=place: texts_agree(load(scorer, o()), o(), p)
            yield f"{name} {what}: holds the tensors that transformers saves", lambda o=output, p=place: same_tensors_as_transformers_saves(
                scorer, o(), p
            )
        yield f"LoRA, {name}, language model: PEFT opens what we trained", lambda o=adapter, p=place, f=by_peft: seq2seq_agrees(
            f(o()), o(), p
        )
        yield f"LoRA, {name}, reward model: PEFT opens what we trained", lambda o=judge, p=place, f=scorer_by_peft: texts_agree(
            f(o()), o(), p
        )


def gguf_checks(work):
    """Folders that `rlhf convert` made, read by transformers."""
    names = ("llama", "llama3", "qwen2", "qwen3", "smollm3", "olmo2", "k_quants", "qwen35", "gemma3", "gemma2", "mistral3", "qwen3moe")
    for name in names:

        def check(name=name):
            folder, golden = work / f"gguf_{name}", load_file(GOLDEN / "gguf" / f"{name}.safetensors")
            rlhf("convert", sorted((GOLDEN / "gguf").glob(f"{name}*.gguf"))[0], folder)
            with torch.no_grad():
                found = load(AutoModelForCausalLM, folder)(golden["input_ids"]).logits
            worst = (found - golden["logits"]).abs().max().item()
            expect(worst <= TOLERANCE, f"differ by up to {worst:.2e}, expected at most {TOLERANCE:.0e}")
            cases = json.loads((GOLDEN / "gguf" / "texts.json").read_text())[name]
            for case in cases or []:
                ids = AutoTokenizer.from_pretrained(folder)(case["text"])["input_ids"]
                expect(ids == case["ids"], f"ids of {case['text']!r}: {ids}, expected {case['ids']}")

        yield f"gguf {name}, converted: logits and ids", check


def pipeline_checks(work, family, layout, demonstrations):
    """A model that went through `sft`, `reward` and `ppo`, each output read by transformers."""
    source = Once(lambda: build(work / "source", family, **LAYOUTS[layout]))

    def run_sft():
        rlhf(
            "sft",
            "--model_name_or_path",
            source(),
            "--dataset_name",
            write_jsonl(work / "demonstrations.jsonl", DEMONSTRATIONS[demonstrations]),
            "--output_dir",
            work / "sft",
            "--max_steps",
            2,
            "--learning_rate",
            1e-3,
        )
        return work / "sft"

    def run_reward():
        rlhf(
            "reward",
            "--model_name_or_path",
            sft(),
            "--new_reward_head",
            "--dataset_name",
            write_jsonl(work / "pairs.jsonl", PAIRS),
            "--output_dir",
            work / "reward",
            "--max_steps",
            2,
            "--learning_rate",
            1e-3,
        )
        return work / "reward"

    def run_ppo():
        prompts = write_jsonl(work / "ppo-prompts.jsonl", [{"prompt": p} for p in 4 * PROMPTS])
        rlhf(
            "ppo",
            "--sft_model_path",
            sft(),
            "--reward_model_path",
            reward(),
            "--dataset_name",
            prompts,
            "--output_dir",
            work / "ppo",
            "--total_episodes",
            16,
            "--per_device_train_batch_size",
            8,
            "--response_length",
            8,
            "--stop_token",
            "eos",
            "--learning_rate",
            1e-3,
            "--report_to",
            "tensorboard",
            "--log_rollouts",
        )
        return work / "ppo"

    sft, reward, ppo = Once(run_sft), Once(run_reward), Once(run_ppo)
    value = Once(lambda: ppo() / "value_model")
    lm, scorer = AutoModelForCausalLM, AutoModelForSequenceClassification
    outputs = [
        ("sft", sft, source, lm),
        ("reward", reward, sft, scorer),
        ("ppo", ppo, sft, lm),
        ("ppo, value model", value, reward, scorer),
    ]
    for name, output, origin, auto in outputs:
        files = MODEL_FILES + (["generation_config.json"] if auto is lm else [])
        # The model card and the tokenizer belong to the folder that people publish: the value model's is inside it.
        files = files if output is not value else [f for f in files if f != "README.md"]
        checks = {
            "the files of a Hugging Face model": lambda o=output, f=files: files_present(o(), f),
            "loads with no key missing or unexpected": lambda o=output, a=auto: load(a, o()),
            "holds the tensors that transformers saves": lambda o=output, a=auto: same_tensors_as_transformers_saves(
                a, o(), work
            ),
            "config is the source's": lambda o=output: config_agrees(o(), source()),
            "tokenizer is the source's": lambda o=output: tokenizer_agrees(o(), source()),
            "was trained": lambda o=output, s=origin: weights_moved(o(), s()),
        }
        if auto is lm:
            checks["generation config has the tokenizer's special tokens"] = lambda o=output: generation_config_agrees(
                o()
            )
            checks["greedy tokens and log-probs"] = lambda o=output: greedy_agrees(o(), generate(o(), work))
        else:
            checks["one label"] = lambda o=output: expect(
                load(scorer, o()).num_labels == 1, f"num_labels is {load(scorer, o()).num_labels}"
            )
            checks["loss by its scores"] = lambda o=output: first_loss_agrees(o(), work)
        for claim, check in checks.items():
            yield f"{family} {name}: {claim}", check
    yield f"{family} ppo: TensorBoard reads what metrics.jsonl holds", lambda: events_agree(ppo())
    yield f"{family} ppo: safetensors reads the numbers of an update, again", lambda: replay_agrees(ppo(), work)
    if PARQUET:
        yield f"{family} ppo: {PARQUET} reads the rollouts", lambda: rollouts_agree(ppo(), sft(), work)


def auto_of(folder):
    """The class for the language model in a folder."""
    t5 = json.loads((Path(folder) / "config.json").read_text())["model_type"] == "t5"
    return T5ForConditionalGeneration if t5 else AutoModelForCausalLM


def adapted(base, folder, classifier):
    """The base with the adapter in `folder`, by PEFT, which must find exactly the tensors that it wants."""
    if classifier:
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    else:
        model = load(auto_of(base), base)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of keys that are missing
        # PEFT warns of untied heads too where a class could tie them.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        return peft.PeftModel.from_pretrained(model, folder).eval()


def measures_agree(model, folder, work, classifier):
    """`rlhf logprobs`, or `rlhf score`, of some ids by the model in `folder` are those of `model`."""
    ids = torch.arange(5, 17).view(1, -1)
    rows, output = work / "ids.jsonl", work / "measured.jsonl"
    write_jsonl(rows, [{"prompt_ids": ids[0, :4].tolist(), "completion_ids": ids[0, 4:].tolist()}])
    command = "score" if classifier else "logprobs"
    arguments = ["--model", folder, "--dataset_name", rows, "--output_file", output, "--overwrite_output_file"]
    rlhf(command, *arguments)
    with torch.no_grad():
        if model.config.is_encoder_decoder:  # its decoder begins with the token 0, of padding
            decoder_ids = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, 4:-1]], 1)
            logits = model(input_ids=ids[:, :4], decoder_input_ids=decoder_ids).logits[0]
        else:
            logits = model(ids).logits[0] if classifier else model(ids).logits[0, 3:-1]
    if classifier:
        found, expected = torch.tensor([read_jsonl(output)[0]["score"]]), logits
    else:
        found = torch.tensor(read_jsonl(output)[0]["logprobs"])
        expected = logits.log_softmax(-1).gather(1, ids[0, 4:, None])[:, 0]
    worst = (found - expected).abs().max().item()
    expect(worst <= TOLERANCE, f"differ by up to {worst:.2e}, expected at most {TOLERANCE:.0e}")


def lora_checks(work):
    """Adapters trained by us, opened by PEFT; adapters written by PEFT, opened by us."""
    settings = {  # flags of ours, settings of PEFT
        "the family's targets": ([], {}),
        "all-linear, rslora": (
            ["--lora_target_modules", "all-linear", "--use_rslora"],
            {"target_modules": "all-linear", "use_rslora": True},
        ),
        "DoRA, embedding in full": (["--use_dora", "--lora_modules_to_save"], {"use_dora": True}),
    }
    embeddings = {"gpt2": "wte", "gpt_neox": "embed_in", "llama": "embed_tokens", "mixtral": "embed_tokens"}
    common = ["--use_peft", "--lora_r", 4, "--learning_rate", 1e-2, "--max_steps", 3]
    cases = [(f, s, c) for f in embeddings for s in settings.items() for c in (False, True)]
    # Families with layers of other names, or none in PEFT's list of targets.
    later = {"gemma3": "q_proj", "smollm3": "q_proj", "olmo2": "q_proj", "phi3": "qkv_proj", "qwen3_moe": "q_proj"}
    later |= {"lfm2": "in_proj", "qwen3_5": "in_proj_qkv"}
    later |= {"granite": "q_proj", "gemma4": "q_proj", "ministral3": "q_proj", "gpt_oss": "q_proj"}
    later |= {"qwen3_5_moe": "in_proj_qkv", "lfm2_moe": "in_proj", "gemma4_moe": "q_proj"}
    for family, target in later.items():
        targets = [target, "out_proj" if family.startswith(("lfm2", "qwen3_5")) else "o_proj"]
        cases.append((family, ("own targets", (["--lora_target_modules", *targets], {"target_modules": targets})), False))
    head = (["--lora_modules_to_save", "lm_head"], {"modules_to_save": ["lm_head"]})  # `embed_out` in the files of its models
    cases.append(("gpt_neox", ("head in full", head), False))
    for family in ("t5", "t5, gated"):
        cases.append((family, ("the family's targets", ([], {})), False))
    dora = (["--lora_target_modules", "all-linear", "--use_dora"], {"target_modules": "all-linear", "use_dora": True})
    cases.append(("t5", ("all-linear, DoRA", dora), False))
    for number, (family, (name, (flags, options)), classifier) in enumerate(cases):
        folder = work / f"lora-{number}"
        if "use_dora" in options and family in embeddings:  # GPT-2's embedding is tied to the head, which keeps the base's weights
            flags, options = [*flags, embeddings[family]], options | {"modules_to_save": [embeddings[family]]}

        def make(folder=folder, family=family):
            t5 = family.startswith("t5")
            return build_t5(folder / "base", family == "t5, gated") if t5 else build(folder / "base", family)

        base = Once(make)

        def train(folder=folder, base=base, flags=flags, classifier=classifier):
            demonstrations = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
            base()
            data = write_jsonl(folder / "data.jsonl", PAIRS if classifier else demonstrations)
            command = ["reward", "--new_reward_head"] if classifier else ["sft"]
            places = ["--model_name_or_path", base(), "--dataset_name", data, "--output_dir", folder / "ours"]
            rlhf(*command, *places, *common, *flags)
            return folder / "ours"

        ours = Once(train)

        def opened(ours=ours, base=base, classifier=classifier):
            measures_agree(adapted(base(), ours(), classifier), ours(), work, classifier)

        def merged(ours=ours, folder=folder, classifier=classifier):
            rlhf("merge", "--model", ours(), "--output_dir", folder / "merged")
            auto = AutoModelForSequenceClassification if classifier else auto_of(folder / "merged")
            measures_agree(load(auto, folder / "merged"), ours(), work, classifier)

        def read(base=base, folder=folder, family=family, options=options, classifier=classifier):
            torch.manual_seed(7)
            auto = AutoModelForSequenceClassification if classifier else auto_of(base())
            task = peft.TaskType.SEQ_CLS if classifier else peft.TaskType.CAUSAL_LM
            task = peft.TaskType.SEQ_2_SEQ_LM if family.startswith("t5") else task
            extra = {"num_labels": 1} if classifier else {}
            config = peft.LoraConfig(task_type=task, r=4, lora_alpha=6, init_lora_weights=False, **options)
            config.fan_in_fan_out = family == "gpt2"
            model = peft.get_peft_model(auto.from_pretrained(base(), dtype=torch.float32, **extra), config).eval()
            model.save_pretrained(folder / "theirs")
            # The tokenizer is the base's: PEFT saves none.
            measures_agree(model, folder / "theirs", work, classifier)

        what = f"LoRA, {family}, {name}, {'reward model' if classifier else 'language model'}"
        yield f"{what}: PEFT opens what we trained", opened
        yield f"{what}: transformers opens what we merged", merged
        if family != "mixtral":  # PEFT adapts experts too, under names that differ between versions of transformers
            yield f"{what}: we open PEFT's", read


def values_of_codes(codes, absmax, blocksize, quant_type, shape, dtype):
    """bitsandbytes' own code for any device. Its AVX-512 kernel (0.50.2) takes wrong scales where a row is not a multiple of a block."""
    map = bitsandbytes.functional.get_4bit_type(quant_type, device="cpu")
    return bitsandbytes.backends.default.ops._dequantize_4bit_compute(codes.flatten(), absmax, map, blocksize, shape, dtype)


KERNELS = torch.library.Library("bitsandbytes", "IMPL")  # for as long as it exists
KERNELS.impl("dequantize_4bit", values_of_codes, "CPU", allow_override=True)


def exact(model):
    """Weights only, in f32: without bitsandbytes' kernel for bf16 instructions, and without quantized activations."""
    for module in model.eval().modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.training = True
    return model


def quantized_checks(work):
    """Models that transformers quantized with bitsandbytes, opened by us; adapters beside them and merges into them, opened by PEFT and
    transformers."""
    settings = {
        "NF4 with double quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "FP4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        "8 bits": {"load_in_8bit": True},
    }
    for number, (family, (name, options)) in enumerate((f, s) for f in ("gpt2", "llama") for s in settings.items()):
        folder = work / f"quantized-{number}"

        def quantize(folder=folder, family=family, options=options):
            base = build(folder / "base", family)
            config = transformers.BitsAndBytesConfig(**options)
            model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, device_map="cpu", dtype=torch.float32)
            model.save_pretrained(folder / "theirs")
            AutoTokenizer.from_pretrained(base).save_pretrained(folder / "theirs")
            return folder / "theirs"

        theirs = Once(quantize)

        def opened(folder):
            return exact(AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.float32))

        def train(folder=folder, theirs=theirs):
            rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
            places = ["--model_name_or_path", theirs(), "--dataset_name", write_jsonl(folder / "data.jsonl", rows)]
            rlhf("sft", *places, "--output_dir", folder / "ours", "--use_peft", "--learning_rate", 1e-2, "--max_steps", 3)
            return folder / "ours"

        ours = Once(train)

        def read(theirs=theirs, opened=opened):
            measures_agree(opened(theirs()), theirs(), work, False)

        def beside(theirs=theirs, ours=ours, opened=opened):
            measures_agree(exact(peft.PeftModel.from_pretrained(opened(theirs()), ours())), ours(), work, False)

        def merged(ours=ours, folder=folder, opened=opened):
            rlhf("merge", "--model", ours(), "--output_dir", folder / "merged")
            model = opened(folder / "merged")
            expect(model.config.quantization_config is not None, "not quantized")
            measures_agree(model, folder / "merged", work, False)

        def base_in_bf16(ours=ours, folder=folder):
            """The base that a run in bf16 writes, after it merged an adapter: in the dtypes of its files, as transformers takes it."""
            start = ours()
            prompts = write_jsonl(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
            places = ["--sft_model_path", start, "--dataset_name", prompts, "--output_dir", folder / "ppo", "--use_peft", "--bf16"]
            rlhf("ppo", *places, "--reward", "length:target=5", "--response_length", 4, "--total_episodes", 4, "--no_report")
            base = exact(AutoModelForCausalLM.from_pretrained(folder / "ppo/base_model", device_map="cpu"))
            adapted = peft.PeftModel.from_pretrained(base, folder / "ppo")
            with torch.no_grad():
                logits = adapted(torch.tensor([[5, 6, 7]])).logits
            expect(bool(logits.isfinite().all()), "logits are not finite")

        yield f"{name}, {family}: transformers computes with the base of a run in bf16", base_in_bf16
        yield f"{name}, {family}: we open what transformers quantized", read
        yield f"{name}, {family}: PEFT opens the adapter that we trained", beside
        yield f"{name}, {family}: transformers opens what we merged", merged


def example_checks(work):
    """The script of examples/gpt2-sentiment in small, and its classifier in both hands."""
    example = ROOT / "examples/gpt2-sentiment"

    def train():
        folder = work / "classifier"
        arguments = [
            "--output_dir",
            folder,
            "--results",
            work / "classifier.json",
            "--train_rows",
            640,
            "--test_rows",
            64,
        ]
        command = [sys.executable, example / "train_classifier.py", *arguments, "--epochs", 1]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600)
        expect(
            done.returncode == 0, f"exit code {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])}"
        )
        return folder

    trained = Once(train)

    def learned():
        trained()
        found = json.loads((work / "classifier.json").read_text())
        expect(found["train"]["rows"] == 640, f"{found['train']['rows']} rows trained on, expected 640")
        expect(found["train"]["last_loss"] < 0.75, f"loss {found['train']['last_loss']}, expected near ln 2 or below")

    def scores_agree(folder):
        rows = read_jsonl(example / "data/sentences_test.jsonl")[:64]
        texts, output = write_jsonl(work / "texts.jsonl", rows), work / "scored.jsonl"
        arguments = ["--dataset_name", texts, "--output_file", output, "--overwrite_output_file"]
        rlhf("score", "--model", folder, "--reward_label", "POSITIVE", *arguments)
        tokenizer, model = AutoTokenizer.from_pretrained(folder), load(AutoModelForSequenceClassification, folder)
        with torch.no_grad():
            expected = [model(**tokenizer(row["text"], return_tensors="pt")).logits[0, 1].item() for row in rows]
        worst = max(abs(row["score"] - logit) for row, logit in zip(read_jsonl(output), expected, strict=True))
        expect(worst <= TOLERANCE, f"differ by up to {worst:.2e}, expected at most {TOLERANCE:.0e}")

    what = "examples/gpt2-sentiment"
    yield f"{what}: train_classifier.py trains in small", learned
    yield f"{what}: scores of a classifier that it trained", lambda: scores_agree(trained())
    yield f"{what}: scores of the shipped classifier", lambda: scores_agree(example / "classifier")


def pipelines(work, part):
    """The checks of every second pipeline, from the one of number `part`."""
    for family, layout, demonstrations in PIPELINES[part::2]:
        place = work / family.replace(", ", "_").replace(" ", "_")
        place.mkdir()
        yield from pipeline_checks(place, family, layout, demonstrations)


# Each process does one of these, on one core. Checks of a group share the models that they made.
GROUPS = (
    (reading_checks, lora_checks, example_checks, lambda work: pipelines(work, 0)),
    (encoder_checks, gguf_checks, saving_checks, encoder_decoder_checks, quantized_checks, lambda work: pipelines(work, 1)),
)


def run_groups(groups):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    with tempfile.TemporaryDirectory(prefix="rlhf-interop-") as folder:
        return run_checks([check for group in groups for check in group(Path(folder))])


def main():
    # Forked before anything computes: libtorch's threads do not survive a fork.
    children = []
    for groups in GROUPS:
        child = os.fork()
        if child == 0:
            os._exit(run_groups(groups))
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    BINARY = binary(__doc__.split("\n")[0])
    sys.exit(main())
