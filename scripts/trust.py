#!/usr/bin/env python3
"""Repeats the quick half of docs/concepts/trust.md, in about ten minutes, and prints its table with today's numbers.

    scripts/trust.py            what `make trust` does
    scripts/trust.py --list     the promises and their tests, without running them

Each row is a promise and the tests that hold it. "Largest difference" is that of all numbers that a row's tests compare by a bound of their own, and
"of the bound" the largest share of such a bound that a difference reaches: above 100 % the test fails. A row without them compares bits. Exit code 1
if a test fails, or if a row has none.

Standard library only.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import check

ROOT = check.ROOT


@dataclass(frozen=True)
class Promise:
    """What is promised, and names of tests that hold it, or beginnings of their names."""

    text: str
    tests: tuple
    # What the numbers are compared with.
    against: str = ""
    # Parts of names of tests that are left out.
    without: tuple = ()


PROMISES = (
    Promise("PPO is that of TRL's PPOTrainer, to the weights", ("ppo::golden::every", "ppo::golden::the_golden"), "runs of trl 1.11"),
    Promise("GRPO and RLOO are those of TRL's trainers, to the weights", ("ppo::groups_golden::every", "ppo::groups_golden::updates"), "runs of trl 1.11"),
    Promise("Turns with tools are those of TRL's GRPOTrainer, to the weights", ("ppo::tools_golden::",), "runs of trl 1.11 and 1.16"),
    Promise("DPO is that of TRL's DPOTrainer, to the weights", ("dpo::",), "runs of trl 1.16"),
    Promise("Distillation is that of TRL's GKDTrainer, to the weights", ("distill::divergences", "distill::a_temperature"), "runs of trl 1.16"),
    Promise("`step()` is that of TRL 0.11, to the weights", ("step::golden::every", "step::golden::the_golden"), "runs of trl 0.11.4"),
    Promise("The engine is that of DeepSpeed-Chat, to the weights", ("deepspeed_chat::engine::",), "runs of its trainer"),
    Promise("Logits, gradients and greedy tokens are those of transformers", ("models::",), "transformers 5.23", ("16",)),
    Promise("Steps of optimizers are those of torch, transformers and bitsandbytes", ("optimizers::",), "their own steps"),
    Promise("A run that stops at any update resumes to the same bits", ("checkpoint::a_run_", "checkpoint::sft_and_a_reward_model_resume")),
    Promise("A run that is killed at any call that changes a file, or whose disk fails there, ends in the same bits", ("attack::faults::",)),
    Promise("A recorded update can be repeated, to the bits", ("replay::updates_",)),
    Promise("Ranks and stages of ZeRO change nothing but rounding",
            ("ppo::golden::golden_runs_are_reproduced", "distributed::ppo_trains_alike", "distributed::groups_of_responses")),
    Promise("Rows of a batch do not depend on their company", ("ppo::invariance::", "groups::the_size_of_a_micro_batch")),
    Promise("Damaged files and hostile rewards end in one line, in bounded time and memory", ("attack::files::no_damage", "attack::rewards::no_reward")),
    Promise("Sampling and training have the same log-probabilities", ("sampling::the_first_step_measures", "sampling::a_run_with_filters")),
)


def binary(environment):
    """Builds the tests, and returns the program with the integration tests."""
    build = subprocess.run([*check.BUILD.split(), "--no-run"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    found = re.search(r"tests/main\.rs \((.+)\)", build.stdout)
    if build.returncode or not found:
        sys.exit(build.stdout)
    return ROOT / found[1]


def run(promise, program, environment):
    """Runs a promise's tests: their number, whether all passed, the largest difference and share of a bound, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "differences"
        began = time.monotonic()
        words = [program, *promise.tests, *(word for name in promise.without for word in ("--skip", name))]
        done = subprocess.run(words, cwd=ROOT / "crates/rlhf-cli", env=environment | {"RLHF_DIFFERENCES": str(notes)},
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        seconds = time.monotonic() - began
        result = re.search(r"test result: \w+\. (\d+) passed; (\d+) failed", done.stdout)
        passed, failed = (int(number) for number in result.groups()) if result else (0, 1)
        if done.returncode or failed or not passed:
            print(done.stdout[-5000:], file=sys.stderr)
        gap, share = differences(notes)
        return passed, done.returncode == 0 and passed > 0, gap, share, seconds


def differences(notes):
    """The largest difference in the file, and the largest share of what was allowed."""
    gap = share = None
    for line in notes.read_text().splitlines() if notes.is_file() else []:
        difference, allowed = (float(number) for number in line.split("\t")[1:])
        gap = max(gap or 0.0, difference)
        if allowed > 0.0:
            share = max(share or 0.0, difference / allowed)
    return gap, share


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the promises and their tests")
    options = parser.parse_args()
    if options.list:
        for promise in PROMISES:
            print(f"{promise.text}: {' '.join(promise.tests)}")
        return 0
    check.settings()
    environment = dict(os.environ)
    if "LIBTORCH" not in environment:
        subprocess.run(["scripts/setup.sh"], cwd=ROOT, check=True)
    print("building the tests", file=sys.stderr, flush=True)
    program, holds = binary(environment), True
    print("| promise | compared with | tests | largest difference | of the bound | seconds |\n|---|---|---:|---:|---:|---:|", flush=True)
    for promise in PROMISES:
        passed, fine, gap, share, seconds = run(promise, program, environment)
        holds &= fine
        numbers = [f"{gap:.1e}" if gap is not None else "", f"{share:.0%}" if share is not None else ""]
        row = [promise.text, promise.against, f"{passed} passed" if fine else "**FAILED**", *numbers, f"{seconds:.0f}"]
        print(f"| {' | '.join(row)} |", flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
