"""Runs trl's GRPOTrainer and RLOOTrainer on the models of `trl_new/init` with given responses and records what they compute.

    python make_trl_grpo.py [NAME ...]    # make the runs of RUNS again, or those that are named
    python make_trl_grpo.py --check       # rerun every folder of `trl_grpo/` from its stored responses and compare

Made with torch 2.11.0, transformers 5.23.0, trl 1.11.0 and accelerate 1.15.0 on a CPU, one thread, float32. README.md
describes the tensors. Only the sampling of the trainers is replaced: responses are drawn once by trl's own generation,
cut to the lengths of `cuts`, and given from then on.
"""

import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", CUDA_VISIBLE_DEVICES="")

import accelerate
import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import grpo_trainer, rloo_trainer

import thin

ROOT = Path(__file__).resolve().parent
HERE = ROOT / "trl_grpo"
EOS, PAD, VOCAB, RESPONSE = 0, 1, 320, 10
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig, grpo_trainer), "rloo": (RLOOTrainer, RLOOConfig, rloo_trainer)}

PROMPTS = (
    "the cat sat",
    "once upon a time",
    "a b c",
    "rain",
    "what is it",
    "red green blue",
    "up and down",
    "zero one two three",
    "hello there",
    "no",
    "far away",
    "my last word",
)
FLAT = (3, 6, 10)  # prompts whose responses all have the same `even` reward


def even(completion_ids, flat, **_):
    """The share of even ids; 0.5 for every response to a flat prompt."""
    return [0.5 if f else sum(i % 2 == 0 for i in ids) / len(ids) for ids, f in zip(completion_ids, flat, strict=True)]


def brief(completion_ids, **_):
    """More for shorter responses; none for those of one or two tokens."""
    return [None if len(ids) < 3 else 1.0 - len(ids) / 8 for ids in completion_ids]


def picky(completion_ids, **_):
    """The share of ids below 100; none for responses of one to four tokens."""
    return [None if len(ids) < 5 else sum(i < 100 for i in ids) / len(ids) for ids in completion_ids]


REWARDS = {f.__name__: f for f in (even, brief, picky)}

# Settings of every run; all others are trl's defaults.
COMMON = dict(
    learning_rate=1e-3,
    max_completion_length=RESPONSE,
    num_generations=4,
    per_device_train_batch_size=8,
    max_steps=3,
)
# 16 responses to four prompts, four micro-batches of four, an optimizer step for every two, two passes: two generations.
REUSED = dict(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    steps_per_generation=4,
    num_iterations=2,
    max_steps=8,
    learning_rate=5e-4,
)
ROWS = REUSED | dict(learning_rate=2e-4)  # for ratios of whole rows, which move faster
RAGGED = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=1)
SMOOTH = dict(weight_decay=0.1, max_grad_norm=0.1, lr_scheduler_type="cosine", warmup_steps=1, disable_dropout=True)

# Name -> settings that differ from COMMON, and under other names of a run: `family`, `rewards`, `prompts` (their number),
# `short` (the share of responses of one or two tokens), `pad` (the pad token's id).
RUNS = {
    "grpo_default": dict(),
    "grpo_neox_cosine": REUSED | SMOOTH | dict(loss_type="grpo", temperature=0.7, family="neox"),
    "grpo_loss_grpo": REUSED | dict(loss_type="grpo"),
    "grpo_loss_bnpo": REUSED | dict(loss_type="bnpo"),
    "grpo_loss_dr_grpo": REUSED | dict(loss_type="dr_grpo", scale_rewards="none"),
    "grpo_loss_dapo": REUSED | dict(loss_type="dapo", epsilon_high=0.28),
    "grpo_loss_cispo": REUSED | dict(loss_type="cispo", epsilon_high=1.1),
    "grpo_loss_cispo_default": REUSED | dict(loss_type="cispo"),
    "grpo_loss_sapo": REUSED | dict(loss_type="sapo"),
    "grpo_loss_vespo": REUSED | dict(loss_type="vespo"),
    "grpo_loss_luspo": ROWS | dict(loss_type="luspo", importance_sampling_level="sequence", epsilon=0.06),
    "grpo_loss_luspo_token": REUSED | dict(loss_type="luspo"),
    "grpo_one_iteration": REUSED | dict(num_iterations=1, max_steps=4),
    "grpo_several_generations_per_step": RAGGED | dict(num_train_epochs=2, max_steps=-1, prompts=5),
    "grpo_scale_batch": dict(scale_rewards="batch"),
    "grpo_scale_none": dict(scale_rewards="none"),
    "grpo_sequence": ROWS | dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.06, epsilon_high=0.08),
    "grpo_sequence_dapo_beta": ROWS | dict(importance_sampling_level="sequence", epsilon=0.06, beta=0.04),
    "grpo_beta": REUSED | dict(loss_type="grpo", beta=0.04),
    "grpo_beta_uncorrected": REUSED | dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False),
    "grpo_beta_default_loss": dict(beta=0.04),
    "grpo_sync_ref": REUSED | dict(beta=0.2, sync_ref_model=True, ref_model_mixup_alpha=0.6, ref_model_sync_steps=3),
    "grpo_truncated_masked": REUSED | dict(loss_type="grpo", mask_truncated_completions=True, beta=0.04),
    "grpo_truncated_masked_dapo": REUSED | dict(mask_truncated_completions=True),
    "grpo_truncated_masked_bnpo": REUSED | dict(loss_type="bnpo", mask_truncated_completions=True),
    "grpo_delta": REUSED | dict(delta=1.3, learning_rate=2e-3, beta=0.04),
    "grpo_top_entropy": REUSED | dict(top_entropy_quantile=0.5, beta=0.04),
    "grpo_two_rewards": dict(rewards=("even", "brief"), reward_weights=[1.0, 0.5], short=0.4),
    "grpo_unscorable": dict(rewards=("brief", "picky"), short=0.45),
    "grpo_unscorable_none": dict(rewards=("brief", "picky"), short=0.35, scale_rewards="none"),
    "grpo_normalize_then_sum": dict(
        rewards=("even", "brief"), reward_weights=[1.0, 0.5], short=0.4, multi_objective_aggregation="normalize_then_sum"
    ),
    "grpo_eos_is_pad": REUSED | dict(loss_type="grpo", mask_truncated_completions=True, pad=EOS),
    "grpo_entropy_bonus": REUSED | dict(entropy_coef=0.05),
    "grpo_adaptive_entropy": REUSED
    | dict(use_adaptive_entropy=True, entropy_coef=0.01, entropy_target=5.2, top_entropy_quantile=0.8),
    "grpo_off_policy_mask": REUSED | dict(off_policy_mask_threshold=0.01),
    "rloo_default": dict(num_generations=2),
    "rloo_no_kl": dict(beta=0.0),
    "rloo_normalized": ROWS | dict(normalize_advantages=True),
    "rloo_reward_clip": ROWS | dict(reward_clip_range=(0.25, 0.6)),
    "rloo_truncated_masked": ROWS | dict(mask_truncated_completions=True, num_iterations=1, max_steps=4),
    "rloo_two_rewards": dict(rewards=("even", "brief"), reward_weights=[1.0, 0.5], short=0.4),
    "rloo_unscorable": dict(rewards=("brief", "picky"), short=0.35, normalize_advantages=True),
    "rloo_sync_ref": ROWS | dict(beta=0.2, sync_ref_model=True, ref_model_mixup_alpha=0.6, ref_model_sync_steps=3),
    "grpo_loss_vespo_beta": REUSED | dict(loss_type="vespo", beta=0.04),
    "grpo_loss_vespo_beta_one_iteration": REUSED | dict(loss_type="vespo", beta=0.04, num_iterations=1, max_steps=4),
}
OWN = dict(family="llama", rewards=("even",), prompts=len(PROMPTS), short=0.15, pad=PAD, draw=0)
DRAWS, STEADY = 40, 4e-6

# The runs that store `thin.rows` of the final weights; the others only tensors of at most `thin.WHOLE` numbers.
WEIGHTS = ("grpo_default", "grpo_neox_cosine", "grpo_loss_dapo", "grpo_beta", "rloo_default", "rloo_normalized")


def cuts(own, generation, rows):
    """The slot of each row's end token; None: truncated."""
    generator = torch.Generator().manual_seed(1000 * own["draw"] + generation)
    found = []
    for _ in range(rows):
        kind, slot = torch.rand(2, generator=generator).tolist()
        found.append(int(slot * 2) if kind < own["short"] else None if kind > 0.75 else 2 + int(slot * (RESPONSE - 2)))
    return found


def edited(responses, ends):
    """Ends each response by the end token at its slot, and replaces special tokens before it."""
    rows = []
    for ids, end in zip(responses, ends, strict=True):
        ids = [300 if i in (EOS, PAD) else i for i in ids] + [300] * (RESPONSE - len(ids))
        rows.append(ids if end is None else ids[:end] + [EOS])
    return rows


def settings(name):
    """The trainer's settings of a run, and the others of it."""
    changes = {k: v for k, v in RUNS[name].items() if k not in OWN}
    return COMMON | changes, OWN | {k: v for k, v in RUNS[name].items() if k in OWN}


class Recorder:
    """One run of a trainer; the responses of a generation are given or, where None, sampled and edited."""

    def __init__(self, name, args, own, responses, dtype):
        self.own, self.given, self.generation = own, responses, -1
        self.data = {}
        self.micro = {"generation": [], "optimizer_step": [], "rows": [], "loss": []}
        self.steps = {"learning_rate": [], "clipped_grad_norm": []}
        self.metrics = []
        trainer, config, self.module = TRAINERS[name.split("_")[0]]
        init = ROOT / "trl_new" / "init"
        tokenizer = AutoTokenizer.from_pretrained(init / f"{own['family']}_policy")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(own["pad"])
        policy = AutoModelForCausalLM.from_pretrained(init / f"{own['family']}_policy", dtype=dtype)
        # trl loads the reference model from the name in the policy's config.
        policy.config._name_or_path = str(init / f"{own['family']}_ref")
        with tempfile.TemporaryDirectory() as output:
            self.args = config(
                output_dir=output,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_steps=1,
                model_init_kwargs={"dtype": dtype},
                **args,
            )
            texts = PROMPTS[: own["prompts"]]
            self.trainer = recorded(trainer)(
                model=policy,
                reward_funcs=[REWARDS[n] for n in own["rewards"]],
                args=self.args,
                train_dataset=Dataset.from_dict(
                    {"prompt": texts, "index": range(len(texts)), "flat": [i in FLAT for i in range(len(texts))]}
                ),
                processing_class=tokenizer,
            )
            self.trainer.recorder = self
            self.run()

    def run(self):
        trainer, module = self.trainer, self.module
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.create_optimizer()
        trainer.optimizer.register_step_pre_hook(self.before_step)
        real_backward, real_shuffle = trainer.accelerator.backward, module.shuffle_sequence_dict

        def backward(loss, **kwargs):
            self.micro["loss"].append(loss.item())
            real_backward(loss, **kwargs)

        trainer.accelerator.backward = backward
        # The rows' numbers are shuffled and split with the rows.
        module.shuffle_sequence_dict = lambda rows: real_shuffle(rows | {"row": torch.arange(len(rows["prompt_ids"]))})
        try:
            trainer.train()
        finally:
            module.shuffle_sequence_dict = real_shuffle
        self.final = {f"policy.{n}": p.detach().clone() for n, p in trainer.model.named_parameters()}
        if self.args.sync_ref_model:
            self.final |= {f"ref.{n}": p.detach().clone() for n, p in trainer.ref_model.named_parameters()}

    def put(self, name, tensor):
        tensor = torch.as_tensor(tensor).detach().clone()
        self.data[name] = tensor.to({torch.bool: torch.uint8, torch.int64: torch.int32}.get(tensor.dtype, tensor.dtype))

    def before_step(self, optimizer, args, kwargs):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.steps["learning_rate"].append(float(optimizer.param_groups[0]["lr"]))
        self.steps["clipped_grad_norm"].append(torch.stack([g.double().norm() for g in grads]).norm().item())

    def info(self):
        names = dict.fromkeys(name for metrics in self.metrics for name in metrics)
        return {
            "steps_per_generation": self.args.steps_per_generation,
            "generation_batch_size": self.args.generation_batch_size,
            "generations": self.generation + 1,
            "optimizer_steps": self.steps,
            "micro_batches": self.micro,
            "metrics": {name: [metrics.get(name) for metrics in self.metrics] for name in names},
        }


def recorded(trainer):
    """The trainer with its sampling replaced, and with the results of its methods recorded."""

    class Recorded(trainer):
        def _generate_single_turn(self, prompt_ids, *rest):
            recorder = self.recorder
            recorder.generation += 1
            given = recorder.given
            if given is None:
                sampled = super()._generate_single_turn(prompt_ids, *rest)
                sampled = sampled[0] if isinstance(sampled, tuple) else sampled
                ends = cuts(recorder.own, recorder.generation, len(prompt_ids))
                responses = edited(sampled, ends)
            else:
                responses = [list(ids) for ids in given[recorder.generation]]
            recorder.put(f"it{recorder.generation}.lengths", [len(ids) for ids in responses])
            return (responses, None) if trainer is GRPOTrainer else responses

        def _calculate_rewards(self, *args):
            rewards = super()._calculate_rewards(*args)
            self.recorder.put(f"it{self.recorder.generation}.rewards", rewards)
            return rewards

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            recorder, at = self.recorder, f"it{self.recorder.generation}"
            recorder.put(f"{at}.prompt_index", [row["index"] for row in inputs])
            recorder.put(f"{at}.completion_mask", output["completion_mask"].bool())
            for name in ("prompt_ids", "completion_ids", "advantages"):
                recorder.put(f"{at}.{name}", output[name])
            for name in ("old_per_token_logps", "ref_per_token_logps", "old_logps", "num_items_in_batch"):
                if name in output:
                    recorder.put(f"{at}.{name}", output[name])
            return output

        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            recorder = self.recorder
            if torch.is_grad_enabled():
                at = f"micro{len(recorder.micro['loss'])}"
                recorder.put(f"{at}.logps", output[0])
                recorder.put(f"{at}.entropies", output[1])
            elif model is self.ref_model and trainer is RLOOTrainer:
                recorder.put(f"it{recorder.generation}.ref_per_token_logps", output[0])
            elif trainer is RLOOTrainer:
                recorder.put(f"it{recorder.generation}.old_per_token_logps", output[0])
            return output

        def _compute_loss(self, model, inputs):
            micro = self.recorder.micro
            micro["generation"].append(self.recorder.generation)
            micro["optimizer_step"].append(self.state.global_step)
            micro["rows"].append(inputs["row"].tolist())
            return super()._compute_loss(model, inputs)

        def log(self, logs, *args):
            super().log(logs, *args)
            if "train_loss" not in logs:
                self.recorder.metrics.append({k: v for k, v in logs.items() if k != "step_time"})

    return Recorded


def given_responses(data):
    """The responses of each generation in recorded tensors."""
    found = []
    while f"it{len(found)}.lengths" in data:
        at = f"it{len(found)}"
        rows = zip(data[f"{at}.completion_ids"].tolist(), data[f"{at}.lengths"].tolist(), strict=True)
        found.append([ids[:length] for ids, length in rows])
    return found


def largest_difference(a, b):
    a, b = a.double(), b.double()
    assert torch.equal(a.isnan(), b.isnan())
    return (a.nan_to_num() - b.nan_to_num()).abs().max().item()


def stored_weights(name, final):
    small = {k: v for k, v in final.items() if v.numel() <= thin.WHOLE}
    return thin.rows(final) if name in WEIGHTS else small


def draw(name, args, own):
    """The run with the responses of one draw, the same in float64, and the distance of their final weights."""
    sampled = Recorder(name, args, own, None, torch.float32)
    responses = given_responses(sampled.data)
    # Once more with the responses given, so that sampling has moved no random state.
    run = Recorder(name, args, own, responses, torch.float32)
    precise = Recorder(name, args, own, responses, torch.float64)
    distances = {k: largest_difference(v, precise.final[k]) for k, v in run.final.items() if not unstable(k)}
    return run, precise, max(distances.values())


def make(number, name):
    """Makes a run with the first draw of responses that rounding hardly moves, or the best of DRAWS.

    Rounding moves a run where two rows of a prompt tie at a quantile of the entropies, or where Adam divides a gradient
    of about its epsilon.
    """
    args, own = settings(name)
    tried = []
    for attempt in range(DRAWS):
        own = own | {"draw": DRAWS * number + attempt}
        tried.append((*draw(name, args, own), own))
        if tried[-1][2] < STEADY:
            break
    run, precise, distance, own = min(tried, key=lambda t: t[2])
    floats = [k for k, v in run.data.items() if v.is_floating_point()]
    assert all(torch.equal(run.data[k], precise.data[k]) for k in run.data.keys() - set(floats)), name
    info = {
        "run": name,
        "trainer": name.split("_")[0],
        **own,
        "args": args,
        "prompt_texts": PROMPTS[: own["prompts"]],
        **run.info(),
        "versions": {m.__name__: m.__version__ for m in (trl, transformers, torch, accelerate)},
        "noise_floor_f32_vs_f64": {
            "final": thin.noise({k: largest_difference(v, precise.final[k]) for k, v in run.final.items()}),
            "tensors": thin.noise({k: largest_difference(run.data[k], precise.data[k]) for k in floats}),
            "metrics": metric_noise(run, precise),
        },
    }
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in run.data.items()}, folder / "data.safetensors")
    save_file({k: v.contiguous() for k, v in stored_weights(name, run.final).items()}, folder / "final.safetensors")
    thin.write_json(folder / "info.json", info)
    print(f"{name}: {len(run.metrics)} steps, {run.generation + 1} generations, {distance:.1e} from float64", flush=True)


def metric_noise(run, precise):
    """The largest distance of each metric from the same run in float64, where that widens a tolerance."""
    found = {}
    for a, b in zip(run.metrics, precise.metrics, strict=True):
        for k in a:
            if isinstance(a[k], float) and isinstance(b[k], float):
                found[k] = max(found.get(k, 0.0), abs(a[k] - b[k]))
    return thin.noise(found)


def unstable(name):
    """Gradients of an unrotated key bias are 0 but for rounding, and Adam makes steps of the rounding."""
    return name.endswith("query_key_value.bias")


def check(folder):
    """Reruns a stored run and compares every tensor; returns how many differ by more than rounding explains."""
    info = json.loads((folder / "info.json").read_text())
    data, final = load_file(folder / "data.safetensors"), load_file(folder / "final.safetensors")
    own = {k: info[k] for k in OWN}
    run = Recorder(info["run"], info["args"], own, given_responses(data), torch.float32)
    noise = info["noise_floor_f32_vs_f64"]
    assert run.data.keys() == data.keys(), sorted(run.data.keys() ^ data.keys())
    found = thin.stored(run.final, final)
    assert found.keys() == final.keys(), sorted(found.keys() ^ final.keys())
    pairs = [(k, run.data[k], v, noise["tensors"].get(k, 0)) for k, v in data.items()]
    pairs += [(k, found[k], v, noise["final"].get(k.split("[")[0], 0)) for k, v in final.items()]
    off, worst = [], 0.0
    for key, got, expected, floor in pairs:
        assert got.shape == expected.shape and got.dtype == expected.dtype, key
        if unstable(key):
            continue
        difference = largest_difference(got, expected)
        worst = max(worst, difference)
        allowed = max(5 * floor, 2e-5) if got.is_floating_point() else 0
        off += [f"{key} {difference:.1e}"] if difference > allowed else []
    stored, again = info["metrics"], run.info()["metrics"]
    assert stored.keys() == again.keys(), sorted(stored.keys() ^ again.keys())
    for key, values in stored.items():
        for a, b in zip(values, again[key], strict=True):
            same = a == b or (a is not None and b is not None and abs(a - b) <= 1e-3 * max(1, abs(a)))
            off += [] if same else [f"metric {key}"]
    off += [] if run.micro["rows"] == info["micro_batches"]["rows"] else ["rows"]
    print(f"{folder.name}: {len(pairs)} tensors, largest difference {worst:.1e}, off: {off or 'none'}", flush=True)
    return len(off)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    logging.disable(logging.WARNING)
    if sys.argv[1:] == ["--check"]:
        sys.exit(any([check(path.parent) for path in sorted(HERE.glob("*/info.json"))]))
    for number, name in enumerate(RUNS):
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(number, name)


if __name__ == "__main__":
    main()
