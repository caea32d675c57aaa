"""Runs trl's PPOTrainer on the models of `trl_new/init` with given responses and records what it computes.

    python make_trl_new.py            # make the variants of VARIANTS again, or those that are named
    python make_trl_new.py --check    # rerun every folder of `trl_new/` from its stored responses and compare

Made with torch 2.11.0, transformers 5.23.0, trl 1.11.0 and accelerate 1.15.0 on a CPU, one thread, float32. README.md
says what each tensor is. Nothing of the trainer is changed but the sampling: responses are drawn once by trl's own
`batch_generation`, edited so that they end where CUTS says, and from then on given.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", CUDA_VISIBLE_DEVICES="")

import accelerate
import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

import thin

HERE = Path(__file__).resolve().parent / "trl_new"
NUMPY_SEED = 1234
EOS, PAD, VOCAB, RESPONSE = 0, 1, 320, 10

COMMON = dict(
    per_device_train_batch_size=8,
    gradient_accumulation_steps=1,
    num_mini_batches=1,
    num_ppo_epochs=2,
    response_length=RESPONSE,
    stop_token="eos",
    stop_token_id=None,
    missing_eos_penalty=1.0,
    temperature=0.7,
    learning_rate=1e-3,
    kl_coef=0.05,
    kl_estimator="k1",
    cliprange=0.2,
    cliprange_value=0.2,
    vf_coef=0.1,
    gamma=1.0,
    lam=0.95,
    whiten_rewards=False,
    local_rollout_forward_batch_size=64,
    seed=42,
    weight_decay=0.0,
    adam_beta1=0.9,
    adam_beta2=0.999,
    adam_epsilon=1e-8,
    max_grad_norm=1.0,
    lr_scheduler_type="linear",
    warmup_steps=0,
    optim="adamw_torch_fused",
)

# Name -> (family, iterations, what differs from COMMON). Only runs in which one micro-batch makes one optimizer step.
VARIANTS = {
    "neox_wd_cosine_3it": (
        "neox",
        3,
        dict(weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=1, max_grad_norm=0.01),
    ),
    "neox_nmb2_ga1_2it": ("neox", 2, dict(num_mini_batches=2, per_device_train_batch_size=8)),
    "llama_gae_clip_3it": (
        "llama",
        3,
        dict(
            gamma=0.98,
            lam=0.9,
            kl_coef=0.2,
            vf_coef=0.5,
            cliprange=0.05,
            cliprange_value=0.05,
            num_ppo_epochs=4,
            local_rollout_forward_batch_size=3,
        ),
    ),
    "llama_no_stop_2it": ("llama", 2, dict(stop_token=None, missing_eos_penalty=None, temperature=1.0)),
    "llama_stop_id_2it": (
        "llama",
        2,
        dict(stop_token=None, stop_token_id=7, missing_eos_penalty=None, kl_estimator="k3", whiten_rewards=True),
    ),
    "llama_pad_inside_2it": ("llama", 2, dict(gamma=0.9, cliprange=0.1)),
    "neox_ragged_queries_2it": ("neox", 2, dict(lam=1.0, cliprange_value=0.1)),
}

# The runs that store every weight of both models after the last update; the others store `thin.rows` of them.
WHOLE = ("neox_k3_3it", "llama_gae_clip_3it")

# Lengths of the queries, where not 3 to 8.
QUERY_LENGTHS = {"neox_ragged_queries_2it": (1, 24)}

# Row and slot of pads that stand inside responses; trl takes the first for the end.
PADS = {"llama_pad_inside_2it": [(0, 1), (1, 4), (3, 2), (7, 9)]}

# Where each of the eight responses of an iteration ends; None: it never does.
CUTS = [
    [3, None, 0, 7, None, 9, 5, None],
    [None, 2, 8, None, 1, None, 6, 9],
    [4, None, None, 9, 0, 2, None, 7],
]


def edited(responses, iteration, stop, pads):
    """Ends responses by the token `stop` where CUTS says; an end token that is not `stop` stands inside the text."""
    special = (responses == EOS) | (responses == PAD)
    responses = responses.masked_fill(special if stop is None else special | (responses == stop), 300)
    for row, cut in enumerate(CUTS[iteration]):
        if cut is None:
            continue
        if stop is None:
            responses[row, cut] = EOS
            continue
        if stop != EOS and cut > 1:
            responses[row, cut - 1] = EOS
        responses[row, cut] = stop
        responses[row, cut + 1 :] = PAD
    for row, slot in pads:
        responses[row, slot] = PAD
    return responses


class Recorder:
    """One run of the trainer; the responses of an iteration are given or, where None, sampled and edited."""

    def __init__(self, family, iterations, args, rows, responses, dtype, pads=()):
        self.pads = pads
        self.data, self.info = {}, {"micro_batches": [], "optimizer_steps": [], "metrics": []}
        self.given, self.iteration, self.orders = responses, -1, {}
        self.real_generate = []

        def load(auto, role):
            return auto.from_pretrained(HERE / "init" / f"{family}_{role}", dtype=torch.float32).to(dtype)

        with tempfile.TemporaryDirectory() as output:
            config = PPOConfig(
                output_dir=output,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                num_sample_generations=0,
                save_strategy="no",
                disable_tqdm=True,
                total_episodes=8 * iterations,
                **args,
            )
            self.trainer = PPOTrainer(
                args=config,
                processing_class=AutoTokenizer.from_pretrained(HERE / "init" / f"{family}_policy"),
                model=load(AutoModelForCausalLM, "policy"),
                ref_model=load(AutoModelForCausalLM, "ref"),
                reward_model=load(AutoModelForSequenceClassification, "reward"),
                value_model=load(AutoModelForSequenceClassification, "value"),
                train_dataset=Dataset.from_dict({"input_ids": rows}),
            )
            self.run(config)

    def run(self, config):
        trainer = self.trainer
        trainer.optimizer.optimizer.register_step_pre_hook(self.before_step)
        trainer.accelerator.backward = self.backward(trainer.accelerator.backward)
        trainer.log = self.log
        real = {n: getattr(ppo_trainer, n) for n in ("batch_generation", "masked_whiten", "get_reward")}
        ppo_trainer.batch_generation = self.batch_generation(real["batch_generation"])
        ppo_trainer.masked_whiten = self.masked_whiten(real["masked_whiten"])
        ppo_trainer.get_reward = self.get_reward(real["get_reward"])
        try:
            np.random.seed(NUMPY_SEED)
            trainer.train()
        finally:
            for name, function in real.items():
                setattr(ppo_trainer, name, function)
        self.final = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        derived = (
            "total_episodes",
            "num_total_batches",
            "batch_size",
            "local_batch_size",
            "mini_batch_size",
            "local_mini_batch_size",
            "micro_batch_size",
        )
        self.info["args"] = {k: getattr(config, k) for k in (*COMMON, *derived)}
        for key in ("lr_scheduler_type", "optim"):
            self.info["args"][key] = str(getattr(self.info["args"][key], "value", self.info["args"][key]))

    def put(self, name, tensor):
        tensor = tensor.detach().clone()
        if tensor.dtype == torch.bool:
            tensor = tensor.to(torch.uint8)
        self.data[f"it{self.iteration}.{name}"] = tensor

    def batch_generation(self, real):
        def generate(model, queries, chunk, pad_token_id, generation_config):
            self.iteration += 1
            self.scored, self.orders = [], {}
            temperature = self.trainer.args.temperature + 1e-7

            def logits(query_responses):
                parts = [
                    ppo_trainer.forward(model, part, pad_token_id).logits[:, queries.shape[1] - 1 : -1] / temperature
                    for part in query_responses.split(chunk)
                ]
                return torch.cat(parts)

            responses = self.given[self.iteration]
            if responses is None:
                sampled, scores = real(model, queries, chunk, pad_token_id, generation_config)
                responses = sampled[:, queries.shape[1] :]
                ended = ((responses == EOS) | (responses == PAD)).cumsum(1) > 1
                ended |= (responses == PAD).cumsum(1) > 0
                difference = (scores - logits(sampled)).abs().amax(-1).masked_fill(ended, 0.0)
                self.real_generate.append(difference.max().item())
                responses = edited(responses, self.iteration, self.trainer.stop_token_id, self.pads)
            query_responses = torch.cat((queries, responses), 1)
            return query_responses, logits(query_responses)

        return generate

    def get_reward(self, real):
        def get_reward(model, *args):
            result = real(model, *args)
            if model is self.trainer.reward_model:
                self.scored.append(result[1].clone())
            return result

        return get_reward

    def masked_whiten(self, real):
        def masked_whiten(values, mask, shift_mean=True):
            if not shift_mean:
                return real(values, mask, shift_mean=False)
            whitened = real(values, mask)
            local = sys._getframe(1).f_locals
            for name in (
                "queries",
                "responses",
                "postprocessed_responses",
                "logprobs",
                "ref_logprobs",
                "values",
                "scores",
                "sequence_lengths",
                "contain_eos_token",
                "kl",
                "rewards",
                "returns",
            ):
                self.put(name, local[name])
            self.put("advantages", whitened.masked_fill(~mask, 0))
            self.put("score_raw", torch.cat(self.scored))
            return whitened

        return masked_whiten

    def backward(self, real):
        def backward(loss):
            local = sys._getframe(1).f_locals
            self.orders[local["ppo_epoch_idx"]] = torch.as_tensor(local["b_inds"])
            numbers = {name: local[name].item() for name in ("pg_loss", "vf_loss", "vf_clipfrac")}
            self.info["micro_batches"].append({"iteration": self.iteration} | numbers)
            real(loss)

        return backward

    def before_step(self, optimizer, args, kwargs):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.info["optimizer_steps"].append(
            {
                "iteration": self.iteration,
                "lr": [float(group["lr"]) for group in optimizer.param_groups],
                "global_grad_norm": torch.stack([g.double().norm() for g in grads]).norm().item(),
            }
        )

    def log(self, metrics):
        self.put("b_inds", torch.stack([self.orders[epoch] for epoch in sorted(self.orders)]))
        self.info["metrics"].append(dict(metrics))


def random_rows(seed, shortest=3, longest=8):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (32,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def largest_difference(a, b):
    return (a.double() - b.double()).abs().max().item()


def make(number, name):
    family, iterations, changes = VARIANTS[name]
    rows = random_rows(1000 + number, *QUERY_LENGTHS.get(name, ()))
    args = COMMON | changes
    run = Recorder(family, iterations, args, rows, [None] * iterations, torch.float32, PADS.get(name, ()))
    responses = [run.data[f"it{i}.responses"] for i in range(iterations)]
    # Once more with the responses given, so that sampling has moved no random state; and the same in float64.
    real_generate = run.real_generate
    run = Recorder(family, iterations, args, rows, responses, torch.float32)
    precise = Recorder(family, iterations, args, rows, responses, torch.float64)
    floats = [k for k, v in run.data.items() if v.is_floating_point()]
    assert all(torch.equal(run.data[k], precise.data[k]) for k in run.data.keys() - set(floats)), name
    noise = {
        "final": thin.noise({k: largest_difference(v, precise.final[k]) for k, v in run.final.items()}),
        "tensors": thin.noise({k: largest_difference(run.data[k], precise.data[k]) for k in floats}),
    }
    info = run.info | {
        "variant": name,
        "family": family,
        "iterations": iterations,
        "dataset_rows": len(rows),
        "numpy_seed": NUMPY_SEED,
        "dataset_input_ids": rows,
        "versions": {m.__name__: m.__version__ for m in (trl, transformers, torch, accelerate)},
        "noise_floor_f32_vs_f64": noise,
    }
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in run.data.items()}, folder / "data.safetensors")
    final = run.final if name in WHOLE else thin.rows(run.final)
    save_file({k: v.contiguous() for k, v in final.items()}, folder / "final.safetensors")
    thin.write_json(folder / "info.json", info)
    print(f"{name}: {len(info['optimizer_steps'])} steps, generate and forward differ by {max(real_generate):.1e}")


def is_key_bias(name):
    """Gradients of an unrotated key bias are 0 but for rounding, and Adam makes steps of the rounding."""
    return name.endswith(("query_key_value.bias", "c_attn.bias"))


def check(folder):
    """Reruns a stored variant and compares every tensor; gives back how many are further off than rounding explains."""
    info = json.loads((folder / "info.json").read_text())
    data, final = load_file(folder / "data.safetensors"), load_file(folder / "final.safetensors")
    responses = [data[f"it{i}.responses"] for i in range(info["iterations"])]
    args = {k: info["args"][k] for k in COMMON}
    run = Recorder(info["family"], info["iterations"], args, info["dataset_input_ids"], responses, torch.float32)
    noise = info["noise_floor_f32_vs_f64"]
    assert run.data.keys() == data.keys(), sorted(run.data.keys() ^ data.keys())
    run.final = thin.stored(run.final, final)
    assert run.final.keys() == final.keys(), sorted(run.final.keys() ^ final.keys())
    off, worst = [], 0.0
    pairs = [(k, run.data[k], v, noise["tensors"].get(k, 0)) for k, v in data.items()]
    pairs += [(k, run.final[k], v, noise["final"].get(k.split("[")[0], 0)) for k, v in final.items() if not is_key_bias(k)]
    for key, got, expected, floor in pairs:
        assert got.shape == expected.shape and got.dtype == expected.dtype, key
        difference = largest_difference(got, expected)
        worst = max(worst, difference)
        allowed = max(5 * floor, 2e-5) if got.is_floating_point() else 0
        off += [f"{key} {difference:.1e}"] if difference > allowed else []
    for got, expected in zip(run.info["metrics"], info["metrics"], strict=True):
        assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
        off += [f"metric {k}" for k in got if k != "eps" and abs(got[k] - expected[k]) > 1e-3 * max(1, abs(got[k]))]
    for got, expected in zip(run.info["optimizer_steps"], info["optimizer_steps"], strict=True):
        off += ["lr"] if not np.allclose(got["lr"], expected["lr"], rtol=1e-12, atol=0) else []
    print(f"{folder.name}: {len(pairs)} tensors, largest difference {worst:.1e}, off: {off or 'none'}")
    return len(off)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if sys.argv[1:] == ["--check"]:
        sys.exit(any([check(path.parent) for path in sorted(HERE.glob("*/info.json"))]))
    for number, name in enumerate(VARIANTS):
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(number, name)


if __name__ == "__main__":
    main()
