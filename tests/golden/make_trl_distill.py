"""Runs trl's GKDTrainer and DistillationTrainer on the models of `trl_new/init` and `trl_tools/init` and records what they compute.

    python make_trl_distill.py            # make everything again
    python make_trl_distill.py --check    # run everything again and compare with the files

Made with torch 2.11.0, transformers 5.23.0, trl 1.16.0 and peft 0.21.2 on a CPU, one thread, float32. README.md describes the files. A step
takes all rows of its dataset, so the order of the rows does not matter; sampled responses are recorded.
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
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.server_distillation import server_distillation_trainer as server

import thin

ROOT = Path(__file__).resolve().parent
HERE = ROOT / "trl_distill"
PLAIN, CHAT = ("trl_new/init/llama_policy", "trl_new/init/llama_ref"), ("trl_tools/init/policy", "trl_tools/init/ref")

TEXTS = [
    ("the cat sat", " on the mat and slept"),
    ("once upon a time", " there was a king"),
    ("a b c", " d e f"),
    ("rain", " falls in may"),
    ("what is it", " no one knows"),
    ("red green blue", " black"),
    ("up and down", " the hill"),
    ("zero one two three", " four five six"),
]

COMMON = dict(learning_rate=1e-3, max_steps=3, adam_epsilon=1e-6)
BASE = dict(data="ids", lora=False, batch=8)
FEW = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight")

# Name -> settings that differ from COMMON, and of BASE: the dataset, an adapter, the rows of a micro-batch. GKDTrainer on the rows' responses.
GKD = {
    "beta_0": dict(beta=0.0),
    "beta_03": dict(beta=0.3),
    "beta_05": dict(),
    "beta_1": dict(beta=1.0),
    "temperature": dict(temperature=2.0),
    "accumulated": dict(batch=2, gradient_accumulation_steps=4),
    "chat": dict(data="chat", beta=1.0),
    "chat_cut": dict(data="chat", max_length=20),
    "lora": dict(lora=True, beta=0.0),
}
# DistillationTrainer on the student's responses.
DISTILLATION = {
    "on_policy": dict(),
    "on_policy_forward": dict(beta=0.0, temperature=0.7),
    "on_policy_jsd": dict(beta=0.4, temperature=1.5),
}


def rows_of(data, tokenizer):
    if data == "chat":
        return [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]} for p, c in TEXTS]
    if data == "prompts":
        return [{"prompt": p} for p, _ in TEXTS]
    rows = []
    for prompt, completion in TEXTS:
        ids = [tokenizer(text)["input_ids"] for text in (prompt, completion)]
        mask = [0] * len(ids[0]) + [1] * (len(ids[1]) + 1)
        rows.append({"prompt": prompt, "input_ids": ids[0] + ids[1] + [tokenizer.eos_token_id], "completion_mask": mask})
    return rows


def arguments(cls, output, **settings):
    return cls(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        **(COMMON | settings),
    )


def trained(name, trainer, lora):
    """The metrics and the parts of the final weights that are kept."""
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    names = [n for n in lines[0] if n not in ("epoch", "step", "step_time") and "runtime" not in n]
    metrics = {n: [line.get(n) for line in lines] for n in names}
    final = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    kept = final if lora else {n: p for n, p in final.items() if n in FEW}
    return metrics, {f"{name}.{n}": t.contiguous() for n, t in thin.rows(kept).items()}


def load(path):
    return AutoModelForCausalLM.from_pretrained(ROOT / path, dtype=torch.float32)


def gkd(name):
    own = BASE | {k: v for k, v in GKD[name].items() if k in BASE}
    settings = {k: v for k, v in GKD[name].items() if k not in BASE}
    student, teacher = CHAT if own["data"] == "chat" else PLAIN
    tokenizer = AutoTokenizer.from_pretrained(ROOT / student)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as output:
        trainer = GKDTrainer(
            model=load(student),
            teacher_model=load(teacher),
            args=arguments(GKDConfig, output, lmbda=0.0, per_device_train_batch_size=own["batch"], **settings),
            train_dataset=Dataset.from_list(rows_of(own["data"], tokenizer)),
            processing_class=tokenizer,
            peft_config=adapter if own["lora"] else None,
        )
        if own["lora"]:
            # An adapter that has an effect from the start.
            for n, p in trainer.model.named_parameters():
                if "lora_B" in n:
                    p.data.normal_(std=0.05)
            trainer.model.save_pretrained(HERE / "adapter")
            (HERE / "adapter" / "README.md").unlink(missing_ok=True)
            config = json.loads((HERE / "adapter" / "adapter_config.json").read_text())
            config["base_model_name_or_path"] = student
            thin.write_json(HERE / "adapter" / "adapter_config.json", config)
        metrics, tensors = trained(name, trainer, own["lora"])
    return {"settings": COMMON | dict(beta=0.5) | settings, **own, "metrics": metrics}, tensors


def gkd_labels(data, **settings):
    """The tokens and labels of the rows, without padding, as GKDTrainer's collator makes them."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / (CHAT if data == "chat" else PLAIN)[0])
    from trl.experimental.utils import DataCollatorForChatML

    found = DataCollatorForChatML(tokenizer=tokenizer, **settings)(rows_of(data, tokenizer))
    rows = zip(found["input_ids"], found["attention_mask"], found["labels"], strict=True)
    return [[ids[mask == 1].tolist(), labels[mask == 1].tolist()] for ids, mask, labels in rows]


def gkd_on_policy():
    """The first step of GKDTrainer on responses of the student and of the teacher: these, the loss, and what it is divided by."""
    found = {}
    student, teacher = PLAIN
    tokenizer = AutoTokenizer.from_pretrained(ROOT / student)
    for name, settings in {"student": dict(lmbda=1.0), "teacher": dict(lmbda=0.0, seq_kd=True)}.items():
        seen = []
        torch.manual_seed(1)
        with tempfile.TemporaryDirectory() as output:
            trainer = GKDTrainer(
                model=load(student),
                teacher_model=load(teacher),
                args=arguments(GKDConfig, output, per_device_train_batch_size=8, max_new_tokens=10, **(settings | dict(max_steps=1))),
                train_dataset=Dataset.from_list(rows_of("ids", tokenizer)),
                processing_class=tokenizer,
            )
            trainer.remove_callback(transformers.PrinterCallback)
            inner = trainer.generate_on_policy_outputs

            def generate(model, inputs, generation_config, inner=inner, seen=seen):
                ids, mask, labels = inner(model, inputs, generation_config)
                seen.append(int((inputs["labels"] != -100).sum()))
                seen.append([[row[m == 1].tolist(), label[m == 1].tolist()] for row, m, label in zip(ids, mask, labels, strict=True)])
                return ids, mask, labels

            trainer.generate_on_policy_outputs = generate
            trainer.train()
        found[name] = {"divided_by": seen[0], "rows": seen[1], "loss": trainer.state.log_history[0]["loss"], "beta": 0.5}
    return found


def distillation(name):
    settings = DISTILLATION[name]
    student, teacher = PLAIN
    tokenizer = AutoTokenizer.from_pretrained(ROOT / student)
    steps = []
    # transformers gives the input row of the pad token no gradient: it is not sampled.
    spared = {"suppress_tokens": [tokenizer.pad_token_id]}
    sizes = dict(per_device_train_batch_size=8, max_completion_length=12, generation_kwargs=spared)
    torch.manual_seed(2)
    with tempfile.TemporaryDirectory() as output:
        trainer = DistillationTrainer(
            model=load(student),
            teacher_model=load(teacher),
            args=arguments(DistillationConfig, output, **(sizes | settings)),
            train_dataset=Dataset.from_list(rows_of("prompts", tokenizer)),
            processing_class=tokenizer,
        )
        inner = trainer._generate_single_turn

        def generate(prompt_ids, *args, **kwargs):
            found = inner(prompt_ids, *args, **kwargs)
            steps.append([[list(prompt), list(completion)] for prompt, completion in zip(prompt_ids, found, strict=True)])
            return found

        trainer._generate_single_turn = generate
        metrics, tensors = trained(name, trainer, False)
    return {"settings": COMMON | dict(beta=1.0, temperature=1.0) | settings, "steps": steps, "metrics": metrics}, tensors


def losses():
    """Divergences of random logits, and their gradients, by trl's functions: over all tokens and over the teacher's likeliest."""
    generator = torch.Generator().manual_seed(3)
    logits = [torch.randn(6, 41, generator=generator) * scale for scale in (2.0, 3.0)]
    tensors, cases = {"losses.student": logits[0], "losses.teacher": logits[1]}, []
    for beta, temperature, top_k, tail in [
        *[(beta, temperature, 0, True) for beta in (0.0, 0.1, 0.5, 1.0) for temperature in (1.0, 0.6)],
        *[(beta, 1.7, top_k, tail) for beta in (0.0, 0.3, 1.0) for top_k in (1, 5) for tail in (True, False)],
    ]:
        own, other = logits[0].clone().requires_grad_(), logits[1]
        if top_k == 0:
            loss = GKDTrainer.generalized_jsd_loss(own, other, beta=beta, temperature=temperature, reduction="none").sum(-1)
        else:
            all_logps = [torch.log_softmax(x / temperature, -1) for x in (own, other)]
            teacher, ids = all_logps[1].topk(top_k, -1)
            mask = torch.ones_like(ids, dtype=torch.bool)
            pair = [all_logps[0].gather(-1, ids), teacher]
            if tail:
                (first, support), (second, _) = [server._add_tail_bucket(x, mask) for x in pair]
            else:
                first, second = [x - torch.logsumexp(x, -1, keepdim=True) for x in pair]
                support = mask
            loss = server._jsd_divergence(first, second, beta, support).sum(-1)
        loss.sum().backward()
        tensors[f"losses.{len(cases)}.loss"] = loss.detach().contiguous()
        tensors[f"losses.{len(cases)}.gradient"] = own.grad.contiguous()
        cases.append({"beta": beta, "temperature": temperature, "top_k": top_k, "tail": tail})
    return cases, tensors


def main():
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    HERE.mkdir(exist_ok=True)
    cases, tensors = losses()
    runs = {"losses": cases, "gkd": {}, "distillation": {}}
    for kind, names, run in (("gkd", GKD, gkd), ("distillation", DISTILLATION, distillation)):
        for name in names:
            runs[kind][name], found = run(name)
            tensors |= found
            print(name, [round(x, 5) for x in runs[kind][name]["metrics"]["loss"]], flush=True)
    runs["gkd_on_policy"] = gkd_on_policy()
    runs["rows"] = {"chat": gkd_labels("chat"), "chat_cut": gkd_labels("chat", max_length=20), "ids": gkd_labels("ids")}
    if "--check" in sys.argv:
        stored = load_file(HERE / "final.safetensors")
        worst = max((tensors[n] - t).abs().max().item() for n, t in stored.items())
        assert set(stored) == set(tensors) and worst < 2e-5, worst
        old = json.loads((HERE / "runs.json").read_text())
        assert all(old[f"rows.{name}"] == rows for name, rows in runs["rows"].items())
        print("the same within", worst)
        return
    kinds = ("gkd", "distillation", "gkd_on_policy", "rows")
    flat = {f"{kind}.{name}": run for kind in kinds for name, run in runs[kind].items()}
    thin.write_json(HERE / "runs.json", flat | {"losses": cases})
    for data in ("chat", "ids"):
        tokenizer = AutoTokenizer.from_pretrained(ROOT / PLAIN[0])
        (HERE / f"{data}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(data, tokenizer)))
    save_file(tensors, HERE / "final.safetensors")


main()
