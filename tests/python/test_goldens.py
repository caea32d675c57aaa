"""Goldens through the Python trainers: their runs, compared with TRL 1.11's own trainers on the same responses.

    PYTHON tests/python/test_goldens.py PROGRAM [unittest's arguments]

PYTHON is that of an environment with transformers, datasets and pyarrow, and PROGRAM the built `rlhf`; a debug build will do. TRL 1.11.0 is
taken from a package index, once.

The settings and the models are those of tests/golden. Its responses were drawn by TRL, and no setting of a run gives responses; so it is
TRL here that is given those of the run, by the recorders which make tests/golden. They and the golden tests in Rust compare the same
numbers. Where a golden run has a reference model of its own, it is the policy here: the trainers have no other.
"""

import json
import os
import shutil
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import support
from support import ROOT, Case

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_DATASETS_OFFLINE="1")
GOLDEN = ROOT / "tests/golden"
INIT = GOLDEN / "trl_new/init"
# As in the golden tests: five times what float32 changes in TRL's own runs.
TOLERANCE = 2e-5
# What the recorders set for every run.
PLAIN = {
    "save_strategy": "no",
    "no_report": True,
    "num_threads": 1,
    "num_sample_generations": 0,
    "log_rollouts": True,
    "logging_steps": 1,
    "disable_tqdm": True,
}
# Metrics of PPO but those that TRL averages over padding, or whose variance it takes of averages; with their tolerances.
OF_PPO = {
    **{f"objective/{name}": 5e-4 for name in ("kl", "entropy", "non_score_reward", "rlhf_reward", "scores")},
    **{name: 1e-4 for name in ("policy/clipfrac_avg", "loss/policy_avg", "loss/value_avg", "val/clipfrac_avg")},
    "lr": 1e-12,
}
# Counted by the trainer in its own way, or defined otherwise where the KL is part of the reward.
NOT_OF_GROUPS = ("num_tokens", "epoch", "frac_reward_zero_std")


def key_bias(name):
    """A bias whose gradient is 0 but for rounding, of which Adam makes steps."""
    return name.endswith("query_key_value.bias")


def difference(one, other):
    """The largest difference of two tensors."""
    return (one.double() - other.double()).abs().nan_to_num().max().item()


class Goldens(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = support.trl_of_the_goldens()
        if folder is None:
            raise unittest.SkipTest("SKIPPED: no package index has given trl 1.11.0")
        sys.path[:0] = [str(folder), str(GOLDEN)]
        import make_trl_grpo
        import make_trl_new
        import torch
        import transformers

        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        cls.of_ppo, cls.of_groups = make_trl_new, make_trl_grpo

    def setUp(self):
        super().setUp()
        # The models of the recorders, with the policy as the reference model.
        init = self.folder / "trl_new/init"
        init.mkdir(parents=True)
        for path in INIT.iterdir():
            source = path.with_name(path.name.replace("_ref", "_policy"))
            (init / path.name).symlink_to(source)
        self.of_ppo.HERE, self.of_groups.ROOT = self.folder / "trl_new", self.folder

    def rollouts(self, update):
        """The responses of an update, by the row of their prompt."""
        import pyarrow.parquet

        path = self.folder / f"run/rollouts/update-{update:06}.parquet"
        found = {}
        for row in pyarrow.parquet.read_table(path).to_pylist():
            found.setdefault(row["prompt_row"], []).append(row)
        return found

    def near(self, found, expected, tolerance, what):
        self.assertLessEqual(abs(found - expected), tolerance, f"{what}: {found} is not {expected}")

    def same_numbers(self, found, tensor, what, tolerance=TOLERANCE):
        expected = tensor.flatten().tolist()[: len(found)]
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            self.near(one, other, tolerance, f"{what}[{at}]")

    def same_weights(self, folder, final, prefix, noise=None):
        from safetensors.torch import load_file

        weights = {name.replace("embed_out", "lm_head"): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        expected = {name.removeprefix(prefix): tensor for name, tensor in final.items() if name.startswith(prefix)}
        self.assertEqual(weights.keys(), expected.keys())
        for name, tensor in expected.items():
            if not key_bias(name):
                tolerance = max(TOLERANCE, 5 * difference(noise[prefix + name], tensor)) if noise else TOLERANCE
                self.near(difference(weights[name], tensor), 0.0, tolerance, f"{prefix}{name}")

    # PPO

    def check_ppo(self, variant, seed):
        """A run of PPOTrainer with the settings and models of a golden run, on the first eight of its prompts."""
        import rlhf

        info = json.loads((GOLDEN / "trl_new" / variant / "info.json").read_text())
        family, iterations = info["family"], info["iterations"]
        args = {name: info["args"][name] for name in self.of_ppo.COMMON}
        prompts = info["dataset_input_ids"][:8]
        # TRL's trainer ignores `max_grad_norm`.
        own = {name: value for name, value in args.items() if name not in ("max_grad_norm", "seed", "optim")}
        trainer = rlhf.PPOTrainer(
            args=rlhf.PPOConfig(str(self.folder / "run"), total_episodes=8 * iterations, seed=seed, **own, **PLAIN),
            model=str(INIT / f"{family}_policy"),
            reward_model=str(INIT / f"{family}_reward"),
            value_model=str(INIT / f"{family}_value"),
            train_dataset=[{"input_ids": row} for row in prompts],
        )
        trainer.train()
        updates = [self.rollouts(update + 1) for update in range(iterations)]
        recorder = self.record_ppo(family, iterations, args, prompts, updates)
        for at, rows in enumerate(updates):
            self.compare_rollouts(recorder, at, rows, prompts)
            for name, tolerance in OF_PPO.items():
                found, expected = trainer.state.log_history[at][name], recorder.info["metrics"][at][name]
                self.near(found, expected, tolerance, f"update {at + 1}: {name}")
        self.same_weights(self.folder / "run", recorder.final, "policy.")
        self.same_weights(self.folder / "run/value_model", recorder.final, "value_model.")
        return [row for rows in updates for found in rows.values() for row in found]

    def record_ppo(self, family, iterations, args, prompts, updates):
        """TRL's trainer with the responses of the run; it has its own order of the prompts."""
        import torch

        of_ppo = self.of_ppo

        class Given(of_ppo.Recorder):
            def batch_generation(self, real):
                generate = super().batch_generation(real)

                def given(model, queries, *rest):
                    rows = updates[self.iteration + 1]
                    ids = [rows[prompts.index([i for i in query if i != of_ppo.PAD])][0]["token_ids"] for query in queries.tolist()]
                    padded = [row + [of_ppo.PAD] * (of_ppo.RESPONSE - len(row)) for row in ids]
                    self.given[self.iteration + 1] = torch.tensor(padded)
                    return generate(model, queries, *rest)

                return given

        return Given(family, iterations, args, prompts, [None] * iterations, torch.float32)

    def compare_rollouts(self, recorder, at, rows, prompts):
        data = {name: recorder.data[f"it{at}.{name}"] for name in ("queries", "logprobs", "ref_logprobs", "values", "advantages", "scores")}
        for place, query in enumerate(data["queries"].tolist()):
            row = rows[prompts.index([i for i in query if i != self.of_ppo.PAD])][0]
            count = len(row["token_ids"])
            for name in ("logprobs", "ref_logprobs", "values", "advantages"):
                self.same_numbers(row[name][:count], data[name][place], f"update {at + 1}, row {place}: {name}")
            self.near(row["score"], data["scores"][place].item(), TOLERANCE, f"update {at + 1}, row {place}: score")

    def test_ppo_has_trls_rollouts_metrics_and_weights(self):
        for variant, seed in OF_VARIANTS.items():
            with self.subTest(variant):
                self.again()
                rows = self.check_ppo(variant, seed)
                self.assertIn("stop", {row["finish_reason"] for row in rows})
                self.assertFalse(any(self.of_ppo.PAD in row["token_ids"] for row in rows))

    # GRPO and RLOO

    def check_groups(self, run, seed):
        """A run with the settings, models and reward functions of a golden run, on as many prompts as a generation has."""
        import rlhf
        from transformers import AutoTokenizer

        args, own = self.of_groups.settings(run)
        own["prompts"] = args["per_device_train_batch_size"] // args["num_generations"]
        texts = self.of_groups.PROMPTS[: own["prompts"]]
        trainer_of, config_of = {"grpo": (rlhf.GRPOTrainer, rlhf.GRPOConfig), "rloo": (rlhf.RLOOTrainer, rlhf.RLOOConfig)}[run[:4]]
        model = str(INIT / f"{own['family']}_policy")
        trainer = trainer_of(
            model,
            [self.of_groups.REWARDS[name] for name in own["rewards"]],
            config_of(str(self.folder / "run"), seed=seed, bf16=False, gradient_checkpointing=False, **args, **PLAIN),
            [{"prompt": text, "index": at, "flat": at in self.of_groups.FLAT} for at, text in enumerate(texts)],
        )
        trainer.train()
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts = [tokenizer(text)["input_ids"] for text in texts]
        updates = [self.rollouts(update + 1) for update in range(args["max_steps"])]
        rows = [row for found in updates for of_prompt in found.values() for row in of_prompt]
        self.assertFalse(any(own["pad"] in row["token_ids"] for row in rows))
        # As in the golden tests, the same run in float64 tells what rounding changes.
        recorder, precise = (self.record_groups(run, args, own, prompts, updates, dtype) for dtype in ("float32", "float64"))
        noise = self.of_groups.metric_noise(recorder, precise)
        for at, rows in enumerate(updates):
            self.compare_groups(recorder, precise, at, rows)
            for name, expected in recorder.metrics[at].items():
                if name not in NOT_OF_GROUPS and expected is not None:
                    found = trainer.state.log_history[at][name]
                    least = 1e-4 * max(abs(expected), 0.1) if name == "grad_norm" else TOLERANCE
                    self.near(found, expected, max(least, 5 * noise.get(name, 0.0)), f"{run}: update {at + 1}: {name}")
        self.same_weights(self.folder / "run", recorder.final, "policy.", precise.final)

    def record_groups(self, run, args, own, prompts, updates, dtype):
        """TRL's trainer with the responses of the run; it has its own order of the prompts."""
        import torch

        original, seen = self.of_groups.recorded, []

        def recorded(trainer):
            class Given(original(trainer)):
                def _generate_single_turn(self, prompt_ids, *rest):
                    rows, taken = updates[self.recorder.generation + 1], {}
                    found = []
                    for ids in prompt_ids:
                        at = prompts.index(list(ids))
                        taken[at] = taken.get(at, -1) + 1
                        found.append(rows[at][taken[at]])
                    seen.append(found)
                    self.recorder.given = [[row["token_ids"] for row in rows] for rows in seen]
                    return super()._generate_single_turn(prompt_ids, *rest)

            return Given

        with mock.patch.object(self.of_groups, "recorded", recorded):
            recorder = self.of_groups.Recorder(run, args, own, None, getattr(torch, dtype))
        recorder.rows = seen
        return recorder

    def compare_groups(self, recorder, precise, at, rows):
        self.assertEqual(len(recorder.rows[at]), sum(map(len, rows.values())))
        for place, row in enumerate(recorder.rows[at]):
            what = f"update {at + 1}, row {place}"
            for name, own in (("old_per_token_logps", "logprobs"), ("ref_per_token_logps", "ref_logprobs")):
                expected, of_precise = (which.data.get(f"it{at}.{name}") for which in (recorder, precise))
                if expected is not None:
                    tolerance = max(TOLERANCE, 5 * difference(expected, of_precise))
                    self.same_numbers(row[own], expected[place], f"{what}: {own}", tolerance)
            advantage = recorder.data[f"it{at}.advantages"][place].item()
            for found in row["advantages"]:
                self.near(found, advantage, TOLERANCE, f"{what}: advantage")
            for name, expected in zip(recorder.own["rewards"], recorder.data[f"it{at}.rewards"][place].tolist(), strict=True):
                found = row["components"][name]
                if found is None:
                    self.assertNotEqual(expected, expected, f"{what}: reward {name}: expected none")
                else:
                    self.near(found, expected, 1e-6, f"{what}: reward {name}")

    def test_grpo_and_rloo_have_trls_rollouts_metrics_and_weights(self):
        for run, seed in OF_GROUPS.items():
            with self.subTest(run):
                self.again()
                self.check_groups(run, seed)

    def again(self):
        for name in ("run", "run.inputs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


# Golden runs with a seed of ours whose responses have an end token and no pad, which TRL would take for an end.
OF_VARIANTS = {"neox_k1_1it": 3, "llama_gae_clip_3it": 1, "neox_k3_3it": 2}
# Golden runs whose updates have one micro-batch: TRL shuffles the rows of several. Their responses have no pad either, whose embedding gets no
# gradient in transformers.
OF_GROUPS = {"grpo_default": 42, "grpo_beta_default_loss": 42, "grpo_two_rewards": 42, "rloo_default": 8}

if __name__ == "__main__":
    support.main(__doc__)
