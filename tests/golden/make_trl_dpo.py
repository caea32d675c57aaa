"""Runs trl's DPOTrainer on the models of `trl_new/init` and `trl_tools/init` and records what it computes.

    python make_trl_dpo.py            # make everything again
    python make_trl_dpo.py RUN ...    # make these runs, beside those that are in the files
    python make_trl_dpo.py --check    # run everything again and compare with the files

Made with torch 2.11.0, transformers 5.23.0, trl 1.16.0 and peft 0.21.2 on a CPU, one thread, float32 but for the run in bf16. README.md
describes the files. A step takes all rows of its dataset, so the order of the rows does not matter; where it has several micro-batches, they are
of one size, and their losses are means over pairs.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", CUDA_VISIBLE_DEVICES="")

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import thin

ROOT = Path(__file__).resolve().parent
HERE = ROOT / "trl_dpo"
PLAIN, CHAT = "trl_new/init/llama_policy", "trl_tools/init/policy"

PAIRS = [
    ("the cat sat", " on the mat and slept", " under it"),
    ("once upon a time", " there was a king", " nothing at all happened to anyone"),
    ("a b c", " d e f", " x"),
    ("rain", " falls in may", " is dry"),
    ("what is it", "", " no one knows what it is"),
    ("red green blue", " black", " white and grey and black"),
    ("up and down", " the hill", " up"),
    ("zero one two three", " four five six", " nine eight"),
]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}

# Rows of datasets. Those of `edges_*` are only tokenized.
DATA = {
    "explicit": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS],
    "implicit": [{"chosen": p + c, "rejected": p + r} for p, c, r in PAIRS if c],
    "chat": [{"prompt": [user(p)], "chosen": [assistant(c)], "rejected": [assistant(r)]} for p, c, r in PAIRS],
    "chat_implicit": [{"chosen": [user(p), assistant(c)], "rejected": [user(p), assistant(r)]} for p, c, r in PAIRS],
    "chat_tools": [
        {"prompt": [user(p)], "chosen": [assistant(c)], "rejected": [assistant(r)], "tools": [TOOL]} for p, c, r in PAIRS[:4]
    ],
    # Equal sides, an end that is there already, tokens that merge across the end of the prompt, a space, an empty prompt, duplicates.
    "edges_explicit": [
        {"prompt": "the cat", "chosen": " sat", "rejected": " sat"},
        {"prompt": "the cat", "chosen": " sat<EOS>", "rejected": "<EOS>"},
        {"prompt": "the ca", "chosen": "t sat", "rejected": "r"},
        {"prompt": "the cat ", "chosen": "sat", "rejected": " sat"},
        {"prompt": "", "chosen": "the cat", "rejected": "a b c"},
        {"prompt": "the cat", "chosen": "", "rejected": ""},
        {"prompt": "the cat", "chosen": " sat", "rejected": " sat"},
    ],
    # A text that begins the other, equal texts, a difference in the middle of a word and after a space, nothing in common.
    "edges_implicit": [
        {"chosen": "the cat", "rejected": "the cat sat"},
        {"chosen": "the cat", "rejected": "the cat"},
        {"chosen": "the cat sat", "rejected": "the car"},
        {"chosen": "the cat sat", "rejected": "the cat ran"},
        {"chosen": "zero", "rejected": "one"},
    ],
    "edges_chat": [
        {"prompt": [user("a"), assistant("b")], "chosen": [assistant(" c")], "rejected": [user("d"), assistant("e")]},
        {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("b")]},
    ],
    "edges_chat_implicit": [
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("b"), user("c"), assistant("d")]},
        {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")], "rejected": [user("a"), assistant("b"), user("c"), assistant("e")]},
    ],
}

COMMON = dict(learning_rate=1e-3, max_steps=3, adam_epsilon=1e-6)
BASE = dict(data="explicit", ref=None, lora=False)
# Of few runs: rows of a micro-batch, where it is not all of them; those of an evaluation, after each step; mixed precision.
MORE = dict(batch=None, eval_batch=None, bf16=False)
FEW = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight")

# Name -> settings that differ from COMMON, of BASE (the dataset, another reference model, an adapter) and of MORE.
RUNS = {
    "sigmoid": dict(),
    "hinge": dict(loss_type="hinge"),
    "ipo": dict(loss_type="ipo"),
    "exo_pair": dict(loss_type="exo_pair", label_smoothing=1e-3),
    "nca_pair": dict(loss_type="nca_pair"),
    "robust": dict(loss_type="robust", label_smoothing=0.1),
    "bco_pair": dict(loss_type="bco_pair"),
    "sppo_hard": dict(loss_type="sppo_hard"),
    "aot": dict(loss_type="aot", label_smoothing=0.1),
    "aot_unpaired": dict(loss_type="aot_unpaired"),
    "apo_zero": dict(loss_type="apo_zero"),
    "apo_down": dict(loss_type="apo_down"),
    "discopop": dict(loss_type="discopop"),
    "sft": dict(loss_type="sft"),
    "sigmoid_norm": dict(loss_type="sigmoid_norm"),
    "mpo": dict(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0], beta=0.3),
    "aot_sft": dict(loss_type=["aot", "sft"], loss_weights=[1.0, 0.5]),
    "weighting": dict(use_weighting=True, beta=0.5),
    "ld_alpha": dict(ld_alpha=0.4),
    "ld_alpha_ipo_sft": dict(ld_alpha=0.4, loss_type=["ipo", "sft"]),
    "forward_kl": dict(f_divergence_type="forward_kl"),
    "js_divergence": dict(f_divergence_type="js_divergence", loss_type="sigmoid_norm"),
    "alpha_divergence": dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.3, loss_type=["hinge", "sft"]),
    "other_reference": dict(ref="trl_new/init/llama_ref", beta=0.5),
    "precomputed": dict(precompute_ref_log_probs=True, beta=0.5),
    "sync_ref": dict(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6, beta=0.5, max_steps=4),
    "keep_start": dict(max_length=10, beta=0.5),
    "keep_end_ipo": dict(max_length=6, truncation_mode="keep_end", loss_type="ipo"),
    "keep_end_sft": dict(max_length=3, truncation_mode="keep_end", loss_type=["sigmoid_norm", "sft"]),
    "implicit": dict(data="implicit"),
    "chat": dict(data="chat"),
    "lora": dict(lora=True, beta=0.5),
    "accumulated": dict(batch=2, gradient_accumulation_steps=4, beta=0.5),
    "accumulated_ipo": dict(batch=4, gradient_accumulation_steps=2, loss_type="ipo", ld_alpha=0.4),
    "evaluated": dict(eval_batch=4, beta=0.5),
    "evaluated_mpo": dict(eval_batch=2, loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0], beta=0.3),
    "bf16": dict(bf16=True, beta=0.5),
}


def rows_of(data, eos):
    return json.loads(json.dumps(DATA[data]).replace("<EOS>", eos))


def tokenizer_of(data):
    return AutoTokenizer.from_pretrained(ROOT / (CHAT if "chat" in data else PLAIN))


def trainer_of(output, data, ref, lora, batch=None, eval_batch=None, bf16=False, **settings):
    tokenizer = tokenizer_of(data)
    rows = rows_of(data, tokenizer.eos_token)
    if eval_batch:
        settings = settings | dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=eval_batch)
    args = DPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=bf16,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=batch or len(rows),
        **(COMMON | settings),
    )
    reference = AutoModelForCausalLM.from_pretrained(ROOT / ref, dtype=torch.float32) if ref else None
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    return DPOTrainer(
        model=str(ROOT / (CHAT if "chat" in data else PLAIN)),
        ref_model=reference,
        args=args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows) if eval_batch else None,
        processing_class=tokenizer,
        peft_config=adapter if lora else None,
    )


def run(name):
    own = BASE | {k: v for k, v in RUNS[name].items() if k in BASE}
    more = {k: v for k, v in RUNS[name].items() if k in MORE}
    settings = {k: v for k, v in RUNS[name].items() if k not in BASE | MORE}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as output:
        trainer = trainer_of(output, **own, **more, **settings)
        trainer.remove_callback(transformers.PrinterCallback)
        tensors = {}
        if own["lora"]:
            # An adapter that has an effect from the start.
            for n, p in trainer.model.named_parameters():
                if "lora_B" in n:
                    p.data.normal_(std=0.05)
            trainer.model.save_pretrained(HERE / "adapter")
            for extra in ("README.md",):
                (HERE / "adapter" / extra).unlink(missing_ok=True)
            config = json.loads((HERE / "adapter" / "adapter_config.json").read_text())
            config["base_model_name_or_path"] = PLAIN
            thin.write_json(HERE / "adapter" / "adapter_config.json", config)
        trainer.train()
        names = dict.fromkeys(n for line in trainer.state.log_history for n in line if "train_" not in n and "runtime" not in n)
        lines = [line for line in trainer.state.log_history if "loss" in line]
        metrics = {n: [line.get(n) for line in lines] for n in names if n in lines[0]}
        if more.get("batch"):
            # Means over the tokens of micro-batches: those of other micro-batches differ.
            metrics = {n: values for n, values in metrics.items() if not n.startswith(("logits/", "entropy", "mean_token"))}
        evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
        metrics |= {n: [line[n] for line in evaluations] for n in names if n.startswith("eval_") and "per_second" not in n and n != "eval_num_tokens"}
        final = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        kept = final if name in ("sigmoid", "lora") else {n: p for n, p in final.items() if n in FEW}
        tensors = {f"{name}.{n}": t.contiguous() for n, t in thin.rows(kept).items()}
    return {"settings": COMMON | settings, **own, **more, "rows": len(trainer.train_dataset), "metrics": metrics}, tensors


def tokenized(data):
    """The rows as trl tokenizes them."""
    with tempfile.TemporaryDirectory() as output:
        rows = trainer_of(output, data, None, False, max_length=None).train_dataset
    return [[row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]] for row in rows]


def main():
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    HERE.mkdir(exist_ok=True)
    chosen = [word for word in sys.argv[1:] if word != "--check"]
    runs, tensors = {}, {}
    for name in chosen or RUNS:
        runs[name], found = run(name)
        tensors |= found
        print(name, [round(x, 5) for x in runs[name]["metrics"]["loss"]], flush=True)
    if chosen:
        runs = json.loads((HERE / "runs.json").read_text()) | runs
        tensors = load_file(HERE / "final.safetensors") | tensors
        thin.write_json(HERE / "runs.json", runs)
        save_file(tensors, HERE / "final.safetensors")
        return
    rows = {data: tokenized(data) for data in DATA}
    if "--check" in sys.argv:
        old, stored = json.loads((HERE / "runs.json").read_text()), load_file(HERE / "final.safetensors")
        worst = max((tensors[n] - t).abs().max().item() for n, t in stored.items())
        assert set(stored) == set(tensors) and worst < 2e-5, worst
        assert set(old) == set(runs) and json.loads((HERE / "rows.json").read_text()) == rows
        print("the same within", worst)
        return
    thin.write_json(HERE / "runs.json", runs)
    thin.write_json(HERE / "rows.json", rows)
    for data in DATA:
        lines = [json.dumps(row) + "\n" for row in rows_of(data, tokenizer_of(data).eos_token)]
        (HERE / f"{data}.jsonl").write_text("".join(lines))
    save_file(tensors, HERE / "final.safetensors")


main()
