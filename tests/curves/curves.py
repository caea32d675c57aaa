#!/usr/bin/env python3
"""Pinned learning curves: short runs of the sentiment example, whose course no change may bend unnoticed.

    curves.py BINARY                one seed: exit code 1 where a curve leaves the band of reference.json
    curves.py BINARY --bends        runs each change of BENDS, which bends a curve: exit code 1 where one is not found
    curves.py BINARY --write        the reference: means and deviations of three seeds, into reference.json

SFT, a reward model, PPO, GRPO and DPO with the data and settings of examples/sentiment and a model of 0.8 million parameters, in about a minute
on one core. A curve is the mean of a metric over each of WINDOWS equal parts of a run. Its band is the mean of the seeds, give or take WIDTH of
their deviations: other rounding (`RLHF_KERNELS=plain`) stays inside, and a change of what is learned, or how fast, does not.

A change that is meant to bend a curve writes the reference again, and says in its commit message why.

Standard library only.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, variance

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SENTIMENT = Path("examples/sentiment")
REFERENCE = HERE / "reference.json"
SEEDS = (1, 2, 3)
WINDOWS = 5
WIDTH = 5.0


@dataclass(frozen=True)
class Stage:
    """A run, by the name of its command, and the metrics whose curves are pinned."""

    metrics: tuple
    # The example's settings, if it has some for this stage.
    config: str = ""
    flags: dict = field(default_factory=dict)
    # Settings that name the folder of an earlier stage.
    models: dict = field(default_factory=dict)


# One thread: threads of models as small as this one wait for each other most of the time.
PLAIN = {"num_threads": 1, "no_report": "true"}
STAGES = {
    "sft": Stage(("loss",), "sft.yaml", PLAIN | {"config_name": HERE / "model.json", "num_train_epochs": 1}),
    "reward": Stage(("loss", "accuracy"), "reward.yaml", PLAIN, {"model_name_or_path": "sft"}),
    "ppo": Stage(
        ("objective/scores", "objective/kl"),
        "ppo.yaml",
        PLAIN | {"total_episodes": 1920, "learning_rate": 3e-4, "kl_coef": 0.2, "num_sample_generations": 0},
        {"sft_model_path": "sft", "reward_model_path": "reward"},
    ),
    "grpo": Stage(
        ("reward", "kl"),
        "",
        PLAIN
        | {
            "dataset_name": SENTIMENT / "data/prompts.jsonl",
            "per_device_train_batch_size": 64,
            "num_generations": 8,
            "max_steps": 30,
            "max_completion_length": 48,
            "temperature": 0.7,
            "beta": 0.05,
            "learning_rate": 3e-4,
            "logging_steps": 1,
        },
        {"model_name_or_path": "sft", "reward_model_name_or_path": "reward"},
    ),
    "dpo": Stage(
        ("loss", "rewards/margins"),
        "",
        PLAIN
        | {
            "dataset_name": SENTIMENT / "data/preferences.jsonl",
            "train_batch_size": 16,
            "max_steps": 60,
            "logging_steps": 1,
            "learning_rate": 1e-4,
        },
        {"model_name_or_path": "sft"},
    ),
}
# All seeds start from the models of the first.
STARTS = ("sft", "reward")

# Changes that each bend a curve: a stage, and settings in the place of its own, as a defect would change them.
BENDS = {
    "SFT at 0.3 of the learning rate": ("sft", {"learning_rate": 6e-4}),
    "a reward model at 0.2 of the learning rate": ("reward", {"learning_rate": 2e-5}),
    "PPO at 0.3 of the learning rate": ("ppo", {"learning_rate": 9e-5}),
    "PPO with a critic that does not learn": ("ppo", {"vf_coef": 0}),
    "PPO whose advantages have no later reward (lam 0, gamma 0.5)": ("ppo", {"lam": 0, "gamma": 0.5}),
    "PPO with the score's sign reversed": ("ppo", {"reward_weights": -1}),
    "PPO with ten times the KL penalty": ("ppo", {"kl_coef": 2}),
    "PPO without a KL penalty": ("ppo", {"kl_coef": 0}),
    "PPO with one epoch in the place of four": ("ppo", {"num_ppo_epochs": 1}),
    "GRPO at 0.3 of the learning rate": ("grpo", {"learning_rate": 9e-5}),
    "GRPO with twenty times the KL penalty": ("grpo", {"beta": 1}),
    "GRPO with the score's sign reversed": ("grpo", {"reward_weights": -1}),
    "DPO at 0.3 of the learning rate": ("dpo", {"learning_rate": 3e-5}),
    "DPO with three times the beta": ("dpo", {"beta": 0.3}),
}


def command(binary, stage, folder, out, seed, changes):
    """The command line of a run in `folder`, which has the runs of earlier stages."""
    about = STAGES[stage]
    settings = about.flags | {name: folder / of for name, of in about.models.items()} | changes | {"seed": seed}
    config = ["--config", SENTIMENT / about.config] if about.config else []
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    return [str(word) for word in [binary, stage, *config, "--output_dir", out, "--overwrite_output_dir", *flags]]


def run(binary, stage, folder, seed=SEEDS[0], changes=None):
    """Runs a stage; its curves by metric."""
    # Later stages start from the first seed's runs; others are beside them.
    out = folder / (stage if seed == SEEDS[0] and not changes else "other")
    began = time.monotonic()
    # Settings of the machine that change numbers are left out.
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(command(binary, stage, folder, out, seed, changes or {}), cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        sys.exit(f"{done.stdout[-3000:]}\ncurves: {stage} ended with exit code {done.returncode}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {metric: curve([row[metric] for row in rows if metric in row], f"{stage}: {metric}") for metric in STAGES[stage].metrics}
    print(f"curves: {stage}, seed {seed}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def curve(values, name):
    """The means of WINDOWS equal parts of a run's values; the last values of an uneven division are in no part."""
    if len(values) < WINDOWS or not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        sys.exit(f"curves: {name}: expected {WINDOWS} finite values or more, found {values}")
    size = len(values) // WINDOWS
    return [mean(values[at * size : (at + 1) * size]) for at in range(WINDOWS)]


def pinned(curves):
    """The reference of one metric, of the curves of all seeds: mean and deviation at each point.

    Three seeds know a deviation badly, so no point has less than the whole curve has in the mean.
    """
    points = list(zip(*curves))
    common = math.sqrt(mean(variance(point) for point in points))
    return {
        "mean": [round(mean(point), 5) for point in points],
        "deviation": [round(max(math.sqrt(variance(point)), common), 5) for point in points],
    }


def departures(found, reference):
    """The points of a curve that are outside its band, in words."""
    outside = []
    for at, (value, middle, deviation) in enumerate(zip(found, reference["mean"], reference["deviation"], strict=True), 1):
        low, high = middle - WIDTH * deviation, middle + WIDTH * deviation
        if not low <= value <= high:
            outside.append(f"part {at} of {WINDOWS}: expected {low:.3f} to {high:.3f}, found {value:.3f} ({(value - middle) / deviation:+.1f} deviations)")
    return outside


def compare(stage, found, reference):
    """Prints the curves of a stage with their bands; the points outside of them, in words."""
    outside = []
    for metric, values in found.items():
        pin = reference.get(stage, {}).get(metric)
        if pin is None:
            outside.append(f"{stage}: {metric}: not in {REFERENCE.name}")
            continue
        points = [f"{value:.3f} ({middle:.3f} ± {WIDTH * deviation:.3f})" for value, middle, deviation in zip(values, pin["mean"], pin["deviation"])]
        print(f"{stage:6} {metric:17} {'  '.join(points)}", flush=True)
        outside += [f"{stage}: {metric}: {words}" for words in departures(values, pin)]
    return outside


def check(binary, folder, reference):
    """One seed of each stage against the reference; the points outside of a band, in words."""
    return [words for stage in STAGES for words in compare(stage, run(binary, stage, folder), reference)]


def bends(binary, folder, reference):
    """Runs each of BENDS; those that no curve shows, in words."""
    missed = []
    for stage in STARTS:
        run(binary, stage, folder)
    for name, (stage, changes) in BENDS.items():
        outside = compare(stage, run(binary, stage, folder, changes=changes), reference)
        print(f"{name}: {len(outside)} points are outside{': ' + outside[-1] if outside else ''}", flush=True)
        missed += [] if outside else [f"{name}: no curve leaves its band"]
    return missed


def write(binary, folder):
    """Writes the reference."""
    found = {}
    for stage, about in STAGES.items():
        runs = [run(binary, stage, folder, seed) for seed in SEEDS]
        found[stage] = {metric: pinned([of_seed[metric] for of_seed in runs]) for metric in about.metrics}
    REFERENCE.write_text(json.dumps(found, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path, help="the program rlhf; a debug build will do")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--bends", action="store_true", help="show that each change of BENDS is found")
    kind.add_argument("--write", action="store_true", help="write reference.json")
    options = parser.parse_args()
    binary = options.binary.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        if options.write:
            write(binary, Path(scratch))
            return 0
        reference = json.loads(REFERENCE.read_text())
        wrong = (bends if options.bends else check)(binary, Path(scratch), reference)
    for words in wrong:
        print(f"error: {words}", file=sys.stderr)
    if not wrong:
        print(f"{len(BENDS)} changes, each found" if options.bends else "all curves are in their bands")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
