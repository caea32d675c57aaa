#!/usr/bin/env python3
"""Runs the checks of this repository: those of every change, and the parts that are due.

    scripts/check.py change        what .ci/run does: the checks of every change, and each part that is due
    scripts/check.py always        the checks of every change (`make test`)
    scripts/check.py all           everything (`make test-all`); notes the commit in .ci/checked
    scripts/check.py PART...       the named parts (`make test-part PART=...`); notes the commit likewise
    scripts/check.py --list        the table of CONTRIBUTING.md

A part is due if a file of its paths has changed since the commit that .ci/checked names for it, if that commit is unknown, or if
it is its turn: a fifth of the parts takes a turn with each commit. A part that is not due is printed as skipped, with its command.
The last checks of every change, and then the commands of parts, those of the longest part first, run two at a time: the output of each comes
when it ends, and a failure does not stop the others. In the end comes a table with the minutes of each step, then the closing lines of the
test programs, with each command that failed.

All tests are built once, by clippy, which compiles as rustc does and reports its lints on the way.
"""

import argparse
import fcntl
import functools
import hashlib
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ROOT / ".ci/checked"
CACHE = Path(os.environ.get("RLHF_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlhf")

# One profile and one set of features: `-p rlhf` in place of `--workspace` would compile the dependencies a second time.
BUILD = "cargo test --workspace --locked"
# The target `program` starts `rlhf` for the tests without loading libtorch for each command.
MAIN = f"{BUILD} --test program --test main --"
PROGRAM = '"${CARGO_TARGET_DIR:-target}/debug/rlhf"'
# Python environments, with what is printed while they are made.
PYTHON = {
    "interop": "transformers, trl, peft, tensorboard and openai (once; with torch 5 GB)",
    "trackers": "wandb, mlflow and trackio (once, 1 GB)",
}


# Steps that run at the same time: many of them wait for programs that start, end or are silent on purpose.
LANES = 2

# With more of them a turn is shorter, and a part is longer not run where its paths do not change.
TURNS = 5


@dataclass(frozen=True)
class Part:
    """Checks that run where they are due."""

    name: str
    about: str
    # Files and folders (ending in /) of the repository, or beginnings of their names (ending in *).
    paths: tuple
    # In which of TURNS turns it runs though no file of its paths has changed. All turns take about as long.
    turn: int
    # How long it takes beside another part, on two cores.
    minutes: float
    # Names of integration tests, or parts of names.
    tests: tuple = ()
    # Names of `#[ignore]`d integration tests.
    ignored: tuple = ()
    # In any order, two at a time.
    commands: tuple = ()
    # Python environments that the commands need: names of PYTHON.
    python: tuple = ()

    def steps(self):
        steps = [f"{MAIN} {' '.join(self.tests)}"] if self.tests else []
        steps += [f"{MAIN} --ignored {' '.join(self.ignored)}"] if self.ignored else []
        return steps + list(self.commands)


SRC = "crates/rlhf/src/"
CLI = "crates/rlhf-cli/src/"
BASE = "crates/base/src/"
LM = "crates/lm/src/"
TESTS = "crates/rlhf-cli/tests/"

# Tests that stay among those of every change, though a part has the others of their kind.
KEPT = (
    "adapters::saved_modules_are_trained_in_f32_beside_a_bf16_base_that_stays_as_it_was",
    "checkpoint::a_run_stopped_after_any_update_resumes_to_the_same_bits",
    "distributed::ppo_trains_alike_on_any_number_of_ranks_and_a_repeated_run_has_the_same_bits",
    "distributed::values_of_ranks_arrive_in_order_with_the_bits_of_their_numbers",
    "data::every_format_gives_the_same_run",
    "doctor::the_lines_are_one_for_each_check_and_the_exit_code_is_that_of_the_worst",
    "encoder_decoder_training::sft_lowers_the_loss_of_the_completions_given_the_encoded_prompts",
    "eval::one_model_and_a_rule_give_the_share_right_and_pass_at_k",
    "formats::the_reference_is_the_policys_start_for_all_dtypes_of_files_and_flags",
    "fp16::every_command_trains_in_f16_from_a_scale_of_65536_and_keeps_f32_weights",
    "launch::a_rank_that_is_killed_ends_the_others_and_is_named",
    "lora::sft_with_lora_saves_an_adapter_that_the_other_commands_open_and_merge_folds",
    "offload::a_run_is_the_same_to_the_bit_whichever_part_of_it_is_offloaded",
    "optimizers::every_optimizer_resumes_from_its_saved_state_to_the_bit_and_refuses_that_of_another",
    "pipeline::one_dataset_trains_all_three_as_the_single_commands_do_and_the_settings_left_repeat_it",
    "plan::a_plan_needs_the_configuration_and_the_tokenizer_alone",
    "push::a_folder_is_pushed_once_and_comes_back_with_the_same_bytes",
    "rank_rows::an_error_of_one_rank_ends_all_and_merge_runs_once",
    "replay::updates_of_ppo_are_those_of_the_run",
    "sharding::every_stage_trains_every_kind_of_model_alike",
    "watch::new_lines_samples_and_alarms_are_in_the_next_parts_and_all_text_is_escaped",
)

PARTS = (
    Part(
        "ranks",
        "training and resuming on 2 and 4 ranks, at every stage of sharding, and their golden runs",
        paths=(f"{BASE}dist*", f"{LM}model/shard*", f"{LM}model/body.rs", f"{LM}optim*", f"{SRC}rl/learner.rs", f"{SRC}train/*",
               f"{TESTS}distributed*", f"{TESTS}sharding.rs", f"{TESTS}rank_rows.rs", "crates/tch-ext/"),
        turn=3,
        minutes=3,
        tests=("distributed::", "sharding::", "rank_rows::", "by_2_ranks", "by_2_and_4_ranks",
               "replay::an_update_of_two_ranks", "push::of_several_ranks"),
    ),
    Part(
        "launch",
        "`rlhf launch`: restarts, signals, ranks that fail or hang",
        paths=(f"{CLI}cli/launch*", f"{BASE}dist*", f"{BASE}signals*", f"{BASE}process*", f"{TESTS}launch.rs", f"{TESTS}distributed/"),
        turn=3,
        minutes=0.5,
        tests=("launch::",),
    ),
    Part(
        "resume",
        "runs of every kind, stopped after each update or offloaded, end in the same bits",
        paths=(f"{SRC}run/*", f"{SRC}run.rs", f"{BASE}offload*", f"{LM}optim*", f"{SRC}train/*", f"{SRC}data/*", f"{TESTS}checkpoint.rs",
               f"{TESTS}offload.rs"),
        turn=4,
        minutes=0.7,
        tests=("checkpoint::a_run_of_", "checkpoint::a_run_with_", "checkpoint::a_run_whose_kl", "checkpoint::a_run_whose_entropy",
               "checkpoint::a_run_over_", "checkpoint::a_run_in_f16", "checkpoint::a_run_whose_weights", "checkpoint::sft_and_a_reward_model_resume",
               "checkpoint::an_adapter_on", "checkpoint::each_input_of_", "offload::"),
    ),
    Part(
        "kills",
        "a run or a rank killed at random moments, ten and fifty times; failures of disks at every call; strangers at the port of the ranks",
        paths=(f"{SRC}run/checkpoint*", f"{SRC}run/session.rs", f"{BASE}files*", f"{BASE}weights*", f"{BASE}dist/*", f"{TESTS}attack/faults*",
               f"{TESTS}attack/ranks*"),
        turn=4,
        minutes=2,
        tests=("checkpoint::a_run_killed_at_random_moments", "attack::faults::", "attack::ranks::"),
        ignored=("a_run_killed_fifty_times",),
    ),
    Part(
        "attacks",
        "damaged files, folders, templates, rewards, checkpoints and hubs, from fixed seeds",
        paths=(f"{LM}model/config*", f"{LM}tokenizer*", f"{SRC}reward*", f"{SRC}data/*", f"{BASE}weights*", f"{LM}gguf*", f"{BASE}safe_text*",
               f"{SRC}run/checkpoint*", f"{CLI}serve*", "crates/hub/", f"{TESTS}attack*", f"{CLI}cli/yaml.rs"),
        turn=0,
        minutes=1.5,
        tests=("attack::files::", "attack::folders::", "attack::memory::", "attack::rewards::", "hub::hostile"),
        commands=(f"{BUILD} --lib -- attack::",),
    ),
    Part(
        "families",
        "whole courses of other families than GPT-NeoX, encoder-decoders, quantized bases, f16",
        paths=(f"{LM}model/*", f"{TESTS}encoder_decoder_training.rs", f"{TESTS}quantized.rs", f"{TESTS}fp16.rs"),
        turn=4,
        minutes=0.6,
        tests=("cli::gpt2_goes", "cli::llama_goes", "cli::lfm2_and", "cli::gpt_oss_and", "cli::ministral_3_and", "encoder_decoder_training::", "quantized::runs_and", "quantized::adapters_on", "fp16::",
               "commands::token_ids_need_no_tokenizer"),
    ),
    Part(
        "formats",
        "dtypes of files and of runs, from loading to the final model; data in every file format",
        paths=(f"{BASE}weights*", f"{BASE}device*", f"{LM}model/*", f"{LM}optim*", f"{SRC}data/*", f"{SRC}run/ends.rs", f"{TESTS}formats.rs", f"{TESTS}data.rs",
               f"{TESTS}optimizers.rs"),
        turn=3,
        minutes=0.4,
        tests=("formats::", "data::", "optimizers::"),
    ),
    Part(
        "adapters",
        "LoRA and DoRA in every command, PEFT's folders, merging",
        paths=(f"{LM}model/*", f"{SRC}merge.rs", f"{SRC}run/ends.rs", f"{TESTS}adapters.rs", f"{TESTS}lora.rs"),
        turn=4,
        minutes=0.1,
        tests=("lora::", "adapters::"),
    ),
    Part(
        "pipeline",
        "`rlhf pipeline`, `rlhf doctor`, `rlhf watch`",
        paths=(f"{SRC}train/pipeline.rs", f"{CLI}cli/pipeline*", f"{SRC}settings/pipeline*", f"{CLI}doctor*", f"{CLI}watch*", f"{SRC}report*", f"{TESTS}pipeline.rs"),
        turn=0,
        minutes=0.4,
        tests=("pipeline::", "doctor::", "watch::"),
    ),
    Part(
        "programs",
        "reward programs and functions of Python that fail in every way",
        paths=(f"{SRC}reward/*", f"{BASE}process*", f"{TESTS}rewards.rs", "examples/rewards/"),
        turn=0,
        minutes=0.3,
        tests=("rewards::a_function_of_python_that_", "rewards::no_pipe_that_is_full", "rewards::a_program_that_"),
    ),
    Part(
        "plan",
        "plans against the measured peaks of runs",
        paths=(f"{SRC}plan*", f"{SRC}settings/plan*", f"{LM}model/described.rs", f"{LM}optim*", f"{TESTS}plan.rs"),
        turn=1,
        minutes=2.9,
        tests=("plan::",),
    ),
    Part(
        "eval",
        "`rlhf eval` and its judges",
        paths=(f"{SRC}eval*", f"{CLI}cli/eval*", f"{SRC}settings/evaluate*", f"{SRC}reward/*", f"{TESTS}eval.rs"),
        turn=0,
        minutes=0.3,
        tests=("eval::",),
    ),
    Part(
        "hub",
        "uploads to a hub, whole, cut and refused",
        paths=("crates/hub/", f"{SRC}push*", f"{SRC}run/push*", f"{TESTS}push.rs", "tests/hub/"),
        turn=0,
        minutes=0.4,
        tests=("push::",),
    ),
    Part(
        "replay",
        "`rlhf replay`: each kind of update is computed again to the bit",
        paths=(f"{SRC}train/ppo*", f"{SRC}rl/*", f"{TESTS}replay.rs"),
        turn=4,
        minutes=0.2,
        tests=("replay::",),
    ),
    Part(
        "curves",
        "learning curves of short runs of SFT, a reward model, PPO, GRPO and DPO stay in the committed bands",
        paths=(f"{SRC}rl/*", f"{SRC}train/*", f"{LM}optim*", f"{LM}generate*", f"{LM}model/logprobs*", "examples/sentiment/", "tests/curves/"),
        turn=2,
        minutes=0.8,
        commands=("python3 tests/curves/test_curves.py", f"python3 tests/curves/curves.py {PROGRAM}"),
    ),
    Part(
        "large",
        "a model file of 1 GiB is loaded within its size in memory",
        paths=(f"{BASE}weights*", f"{LM}model/body.rs", f"{LM}model/pretrained.rs"),
        turn=0,
        minutes=0.2,
        ignored=("a_model_of_one_gib",),
    ),
    Part(
        "kernels",
        "models, adapters and PPO again with libtorch's operators in place of the kernels",
        paths=("crates/tch-ext/", f"{LM}model/layout.rs", f"{LM}model/logprobs.rs", f"{LM}model/mlp.rs", f"{LM}model/decoder.rs"),
        turn=4,
        minutes=0.7,
        commands=(f"RLHF_KERNELS=plain {MAIN} golden models:: lora:: ppo:: ppo_ --skip ranks --skip plan::",),
    ),
    Part(
        "cuda",
        "the library of NCCL, CUDA graphs and kernels compiles, loads beside torch for CUDA 13, and goes into a wheel; NVRTC compiles the "
        "kernels (no GPU is needed)",
        paths=("crates/tch-ext/csrc/nccl.cpp", "crates/tch-ext/csrc/graph.cpp", "crates/tch-ext/csrc/groups.h", "crates/tch-ext/csrc/graph.h",
               "crates/tch-ext/csrc/common.h", "crates/tch-ext/csrc/kernels.h", "crates/tch-ext/csrc/gpu/", "scripts/cuda.sh",
               "tests/interop/cuda_library.py", "tests/interop/gpu_sources.py"),
        turn=2,
        minutes=1.1,
        commands=(
            ".venv-interop/bin/python tests/interop/gpu_sources.py",
            f".venv-interop/bin/python tests/interop/cuda_library.py {PROGRAM}",
        ),
        python=("interop",),
    ),
    Part(
        "examples",
        "the library's examples compile without warnings",
        paths=("crates/rlhf/examples/", f"{SRC}lib.rs", f"{SRC}compat*", f"{SRC}train/*"),
        turn=4,
        minutes=0.1,
        commands=(f"{BUILD} --examples",),
    ),
    Part(
        "set-up",
        "scripts/setup.sh and cuda.sh, the scripts and data of examples/ and benchmarks/",
        paths=("scripts/", "examples/", "benchmarks/", "tests/setup/", "Makefile"),
        turn=4,
        minutes=0.5,
        commands=(
            "tests/setup/test_setup.sh",
            "python3 examples/sentiment/test_example.py",
            "python3 examples/gpt2-sentiment/test_example.py",
            "python3 examples/code_reward/test_example.py",
            "python3 examples/t5-summary/test_example.py",
            "python3 examples/smollm2/test_example.py",
            "python3 examples/tools/test_example.py",
            "python3 benchmarks/test_table.py",
            "python3 benchmarks/curves.py draw --check",
            "python3 benchmarks/test_gpu_window.py",
        ),
    ),
    Part(
        "packages",
        "the crates as crates.io would get them",
        paths=("Cargo.toml", "Cargo.lock", "crates/base/Cargo.toml", "crates/derive/Cargo.toml", "crates/hub/Cargo.toml", "crates/lm/Cargo.toml",
               "crates/math-verify/Cargo.toml", "crates/rlhf/Cargo.toml", "crates/rlhf-cli/Cargo.toml", "crates/tch-ext/Cargo.toml"),
        turn=3,
        minutes=0.1,
        commands=("make --no-print-directory package PACKAGE_FLAGS=--no-verify",),
    ),
    Part(
        "crate",
        "a crate outside the checkout builds, starts and trains",
        paths=("scripts/new-crate.sh", "tests/setup/test_crate.sh", "crates/rlhf/build.rs", "crates/tch-ext/build.rs", "crates/rlhf/Cargo.toml",
               "crates/tch-ext/Cargo.toml", "crates/base/build.rs", "crates/hub/build.rs", "crates/lm/build.rs", "crates/base/Cargo.toml",
               "crates/derive/", "crates/hub/Cargo.toml", "crates/lm/Cargo.toml", "crates/math-verify/Cargo.toml", "Cargo.toml"),
        turn=4,
        minutes=2.1,
        commands=("env -u RUSTC_WORKSPACE_WRAPPER tests/setup/test_crate.sh",),
    ),
    Part(
        "wheel",
        "the Python package: what is in its wheel, which libtorch it takes and how it fetches one, from a package index of its own",
        paths=("python/", "scripts/wheel.py", "scripts/elf.py", "scripts/notices*", "tests/wheel/", "examples/sentiment/"),
        turn=4,
        minutes=0.7,
        commands=(f"python3 tests/wheel/test_wheel.py {PROGRAM}",),
    ),
    Part(
        "python",
        "the trainers of the Python package: the code of the pages, with datasets, transformers and PEFT, TRL's own scripts, its numbers, notebooks",
        paths=("python/", "docs/python/", "docs/migrate/", "docs/guides/reward*", "examples/notebooks/", "tests/python/", "scripts/python_configs.py", f"{SRC}run/sinks/driver.rs",
               f"{SRC}environment/worker.py",
               f"{SRC}compat*", f"{CLI}session*", f"{SRC}reward/function.py", "scripts/interop-requirements.txt"),
        turn=1,
        minutes=5.1,
        commands=(
            f"python3 tests/python/test_snippets.py {PROGRAM}",
            *(f"HF_HUB_OFFLINE=1 .venv-interop/bin/python tests/python/{name}.py {PROGRAM}" for name in ("test_beside", "test_goldens", "test_notebooks")),
        ),
        python=("interop",),
    ),
    Part(
        "rustdoc",
        "documentation of the crates, without warnings",
        paths=(f"{SRC}lib.rs", f"{BASE}lib.rs", f"{LM}lib.rs", f"{CLI}lib.rs", "crates/hub/src/lib.rs", "crates/derive/src/lib.rs",
               "crates/tch-ext/src/lib.rs", "crates/math-verify/src/lib.rs"),
        turn=0,
        minutes=0.7,
        commands=('RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked',),
    ),
    Part(
        "transformers",
        "what rlhf writes, read with transformers, PEFT and TensorBoard",
        paths=(f"{LM}model/save*", f"{LM}model/families.rs", f"{LM}model/config*", f"{LM}model/adapter_folder.rs", f"{SRC}run/tensorboard.rs",
               "tests/interop/check.py", "tests/interop/runner.py", "scripts/interop-requirements.txt"),
        turn=0,
        minutes=3.5,
        commands=(f'HF_HUB_OFFLINE=1 .venv-interop/bin/python tests/interop/check.py {PROGRAM}',),
        python=("interop",),
    ),
    Part(
        "readings",
        "generated templates, rows and folders, read as by transformers and trl",
        paths=(f"{LM}tokenizer*", f"{SRC}data/*", f"{LM}model/config*", f"{LM}model/rope.rs", f"{LM}model/families.rs", f"{SRC}settings/generate.rs",
               "crates/lm/examples/tool_turns.rs", "tests/interop/templates.py", "tests/interop/tools.py", "tests/interop/formats.py",
               "tests/interop/folders.py", "tests/interop/runner.py", "scripts/interop-requirements.txt"),
        turn=2,
        minutes=3.3,
        commands=(
            *(f'.venv-interop/bin/python tests/interop/{name}.py {PROGRAM}' for name in ("templates", "formats", "folders")),
            "cargo build --workspace --locked --example tool_turns && "
            '.venv-interop/bin/python tests/interop/tools.py "${CARGO_TARGET_DIR:-target}/debug/examples/tool_turns"',
        ),
        python=("interop",),
    ),
    Part(
        "clients",
        "torchrun, OpenAI's client, huggingface_hub and a browser",
        paths=(f"{CLI}serve*", f"{CLI}http_server*", f"{CLI}watch*", f"{SRC}report*", f"{SRC}push*", f"{BASE}dist/launch*", "tests/interop/", "tests/hub/",
               "scripts/interop-requirements.txt"),
        turn=2,
        minutes=1.7,
        commands=tuple(f'.venv-interop/bin/python tests/interop/{name}.py {PROGRAM}' for name in ("torchrun", "serve", "push", "browser")),
        python=("interop",),
    ),
    Part(
        "environments",
        "tools and environments of Python, as transformers and trl have them",
        paths=(f"{SRC}environment*", "tests/interop/environments.py",
               "scripts/interop-requirements.txt"),
        turn=2,
        minutes=0.3,
        commands=(
            # tests/interop/openenv_server.py is for a test by hand: the package openenv takes 0.5 GB.
            ".venv-interop/bin/python tests/interop/environments.py  # not tests/interop/openenv_server.py",
        ),
        python=("interop",),
    ),
    Part(
        "trackers",
        "wandb, MLflow and trackio read what runs report",
        paths=(f"{SRC}run/sinks*", "tests/interop/trackers.py", "scripts/trackers-requirements.txt"),
        turn=3,
        minutes=3.2,
        commands=(f'.venv-trackers/bin/python tests/interop/trackers.py {PROGRAM}',),
        python=("trackers",),
    ),
)


def in_parts():
    """Filters of the integration tests that parts have."""
    return [name for part in PARTS for name in part.tests]


# The checks of every change: the name of a step, and its command. The cheapest come first.
ALWAYS = (
    ("libtorch", "scripts/setup.sh"),
    ("formatting", "cargo fmt --all --check"),
    ("parts", "python3 scripts/test_check.py"),
    ("documents", "python3 scripts/check_docs.py"),
    ("licences, unused dependencies", "make --no-print-directory deny"),
    ("build, clippy", f"{BUILD} --lib --bins --tests --no-run"),
    ("every test has a part", "python3 scripts/test_check.py --built"),
    ("unit tests", f"{BUILD} --lib --bins"),
    ("tensor operations", f"{BUILD} --test kernels --test mixing --test gpu_kernels --test groups --test spin"),
    ("integration tests", f"{MAIN} {' '.join(f'--skip {name}' for name in in_parts())}"),
)

# Those of them that wait for much of their time: they run LANES at a time, and the commands of parts after them.
ALWAYS_BESIDE = (
    ("one of each kind", f"{MAIN} --exact {' '.join(KEPT)}"),
    ("goldens, plain kernels", f"RLHF_KERNELS=plain {MAIN} models::logits ppo::golden::every ppo::groups_golden::every ppo::tools_golden::every step::golden::every"),
    ("examples in the docs", f"{BUILD} --doc"),
    ("reference pages", f"python3 scripts/reference.py {PROGRAM} --check"),
    ("Python", f"python3 tests/python/test_trainers.py {PROGRAM}"),
    ("Python, tools", f"python3 tests/python/test_tools.py {PROGRAM}"),
    ("Python, loops", f"python3 tests/python/test_session.py {PROGRAM}"),
)


# What is due


def git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def read_checked(text):
    """Part -> commit, from the lines of .ci/checked."""
    lines = (line.split() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return {name: commit for name, commit in lines}


def touches(paths, changed):
    """The first changed file that is one of `paths`, or in a folder of them; None if there is none."""
    for path in paths:
        for file in changed:
            if file == path or (path.endswith(("/", "*")) and file.startswith(path.rstrip("*"))):
                return file
    return None


@functools.cache  # Most parts have the same commit.
def changed_since(commit):
    """Files that differ from `commit`, in commits and in the working tree; None where the commit is unknown."""
    if commit is None or git("cat-file", "-e", f"{commit}^{{commit}}") is None:
        return None
    names = git("diff", "--name-only", commit)
    new = git("ls-files", "--others", "--exclude-standard")
    return None if names is None or new is None else names.split("\n") + new.split("\n")


def reason(part, checked, turn, changed_since=changed_since):
    """Why a part is due, in words; None where it is not."""
    changed = changed_since(checked.get(part.name))
    if changed is None:
        return "the commit that it last passed at is unknown"
    if file := touches(part.paths, changed):
        return f"{file} has changed"
    return "its turn" if part.turn == turn else None


def turn_of_head():
    """Turns follow the number of commits."""
    return int(git("rev-list", "--count", "HEAD") or 0) % TURNS


# Running


class Row(NamedTuple):
    """A step in the table; without seconds it did not run."""

    name: str
    seconds: float | None
    note: str


def core_ticks():
    """Ticks for which the machine's cores were idle, and all ticks; zeros where the system does not say."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except OSError:
        return 0, 0
    return ticks[3] + ticks[4], sum(ticks)


class Run:
    """Steps with their times, and the closing lines of the test programs."""

    def __init__(self):
        self.rows = []
        self.closing = []
        self.failed = False
        self.lock = threading.Lock()
        self.begin, self.begin_ticks = time.monotonic(), core_ticks()

    def step(self, name, command, at_once=True):
        """Runs a command with its output on ours, as it comes or in the end; returns whether it passed."""
        print(f"\n=== {name}: {command}" if at_once else f"\n--- {name} begins: {command}", flush=True)
        begin, output, closing = time.monotonic(), [], []
        process = subprocess.Popen(["bash", "-c", command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, errors="replace")
        for line in process.stdout:
            if at_once:
                sys.stdout.write(line)
                sys.stdout.flush()
            else:
                output.append(line)
            if re.match(r"test result: |\d+ passed, \d+ failed", line):
                closing.append((name, line.strip()))
        code, seconds = process.wait(), time.monotonic() - begin
        with self.lock:
            if not at_once:
                sys.stdout.write(f"\n=== {name}: {command}\n{''.join(output)}")
            if code:
                closing.append((name, f"FAILED, exit code {code}: {command}"))
                print(closing[-1][1])
            sys.stdout.flush()
            self.rows.append(Row(name, seconds, "FAILED" if code else ""))
            self.closing += closing
            self.failed |= code != 0
        return code == 0

    def beside(self, steps):
        """Runs pairs of a name and a command, LANES at a time."""
        with ThreadPoolExecutor(LANES) as lanes:
            # The values are asked for, as an exception of a lane comes with its value.
            list(lanes.map(lambda step: self.step(*step, at_once=LANES == 1), steps))
        self.join_rows()

    def join_rows(self):
        """One row for each step, though steps of several lanes ended in turns."""
        joined = {}
        for row in self.rows:
            if before := joined.get(row.name):
                row = Row(row.name, row.seconds + before.seconds, before.note or row.note)
            joined[row.name] = row
        self.rows = list(joined.values())

    def summary(self):
        width = max(len(row.name) for row in self.rows)
        print(f"\nminutes, step (load average {' '.join(f'{load:.1f}' for load in os.getloadavg())})")
        for name, seconds, note in self.rows:
            minutes = f"{seconds / 60:7.1f}" if seconds is not None else f"{'-':>7}"
            print(f"{minutes}  {name:{width}}  {note}".rstrip())
        idle, total = (now - then for now, then in zip(core_ticks(), self.begin_ticks))
        share = f", with the cores idle for {idle / total:.0%} of the time" if total else ""
        print(f"{(time.monotonic() - self.begin) / 60:7.1f}  in all{share}\n")
        for name, line in self.closing:
            print(f"{name}: {line}" if not line.startswith("test result") else line)
        sys.stdout.flush()


def environments(parts):
    """Makes the Python environments of `parts` while the tests are built; returns a function that waits for them."""
    names = sorted({name for part in parts for name in part.python})
    failures = []

    def make(name):
        arguments = [f".venv-{name}", f"scripts/{name}-requirements.txt", f"installing {PYTHON[name]}"]
        if subprocess.run(["scripts/venv.sh", *arguments], cwd=ROOT, stdin=subprocess.DEVNULL).returncode:
            failures.append(name)

    thread = threading.Thread(target=lambda: [make(name) for name in names])
    thread.start()

    def wait():
        begin = time.monotonic()
        thread.join()
        return time.monotonic() - begin, failures

    return wait


def settings():
    """Clippy compiles the workspace's own crates; dependencies are compiled by rustc, once for clippy's builds and all others."""
    os.environ.update(RUSTC_WORKSPACE_WRAPPER="clippy-driver", CLIPPY_ARGS="-Dwarnings")
    os.environ.setdefault("CARGO_TERM_COLOR", "never" if not sys.stdout.isatty() else "auto")
    if os.environ.get("CI") == "true":
        # Everything is compiled and installed once: files for the next time would only take gigabytes of disk.
        os.environ.update(CARGO_INCREMENTAL="0", PIP_NO_CACHE_DIR="1")


def shared_target():
    """On CI, compiled dependencies are kept beside the other caches, one folder for each Cargo.lock and compiler.

    Called after scripts/setup.sh, which removes torch-sys from the target folder when it puts a libtorch into a checkout: all checkouts
    have the same one.

    Returns the lock that keeps others from replacing the programs while they are tested; where another run has it, the checkout's
    own folder is used.
    """
    if os.environ.get("CI") != "true" or "CARGO_TARGET_DIR" in os.environ:
        return None
    version = subprocess.run(["rustc", "-vV"], capture_output=True, cwd=ROOT).stdout
    key = hashlib.sha256(version + b"".join((ROOT / name).read_bytes() for name in ("Cargo.lock", "Cargo.toml", "scripts/setup.sh")))
    folder = CACHE / f"target-{key.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(CACHE / "target.lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print("another run uses the shared target folder: this one uses its own", flush=True)
        return None
    for other in CACHE.glob("target-*"):
        if other != folder:
            subprocess.run(["rm", "-rf", str(other)])
    os.environ["CARGO_TARGET_DIR"] = str(folder)
    os.environ.setdefault("LIBTORCH", str(common_libtorch(ROOT, CACHE)))
    return lock


def common_libtorch(checkout, cache):
    """The path of the checkout's libtorch that other checkouts have too, if there is one: torch-sys is built again where it changes."""
    libtorch = (checkout / ".libtorch/torch").resolve()
    version = re.search(r"^TORCH=(.*)$", (ROOT / "scripts/setup.sh").read_text(), re.MULTILINE).group(1)
    kept = cache / f"libtorch-{version}/torch"
    # It is either the torch of a Python, which .libtorch/torch is a link to, or a copy of the one in the cache.
    is_copy = checkout in libtorch.parents and (kept / "lib/libtorch_cpu.so").exists()
    return kept if is_copy else libtorch


def note(parts, commit):
    """Writes the commit at which `parts` have passed, unless files differ from it."""
    if git("status", "--porcelain"):
        print(".ci/checked stays as it is: the working tree has changes that no commit has")
        return
    checked = read_checked(CHECKED.read_text()) | {part.name: commit for part in parts}
    head = [line for line in CHECKED.read_text().splitlines() if line.startswith("#")]
    lines = [f"{part.name} {checked[part.name]}" for part in PARTS if part.name in checked]
    CHECKED.write_text("\n".join(head + lines) + "\n")
    print(f".ci/checked: {', '.join(part.name for part in parts)} passed at {commit[:9]}; commit the file")


def table():
    """The rows of CONTRIBUTING.md."""
    rows = ["| part | checks | runs on its own where these change | turn |", "|---|---|---|---|"]
    for part in PARTS:
        paths = ", ".join(f"`{path.removeprefix('crates/')}`" for path in part.paths)
        rows.append(f"| `{part.name}` | {part.about} | {paths} | {part.turn} |")
    return "\n".join(rows)


def chosen(words):
    """The checks that the command line names: whether those of every change run, the parts with the reasons, the parts left out."""
    if words in (["always"], ["change"]):
        if words == ["always"]:
            return True, [], [(part, "not a check of every change") for part in PARTS]
        checked, turn = read_checked(CHECKED.read_text()), turn_of_head()
        reasons = [(part, reason(part, checked, turn)) for part in PARTS]
        return True, [(part, why) for part, why in reasons if why], [(part, "not due") for part, why in reasons if not why]
    if words == ["all"]:
        return True, [(part, "all") for part in PARTS], []
    known = {part.name: part for part in PARTS}
    if unknown := [word for word in words if word not in known]:
        sys.exit(f"error: part `{unknown[0]}`: expected change, always, all or some of {', '.join(known)}")
    return False, [(known[word], "named") for word in words], []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the table of parts")
    parser.add_argument("what", nargs="*", metavar="WHAT", help="change, always, all, or names of parts")
    options = parser.parse_args()
    if options.list:
        print(table())
        return 0
    if not options.what:
        parser.error("expected change, always, all, or names of parts")
    always, parts, skipped = chosen(options.what)
    commit = git("rev-parse", "HEAD")
    settings()
    run = Run()
    for part, why in parts:
        print(f"due: {part.name} ({why})")
    lock = None
    if run.step(*ALWAYS[0]):
        lock = shared_target()  # held until this process ends
        wait = environments([part for part, _ in parts])
        for name, command in ALWAYS[1:] if always else ():
            if not run.step(name, command):
                break
    if not run.failed:
        seconds, failures = wait()
        if seconds > 1:
            run.rows.append(Row("Python environments", seconds, "beyond the build"))
        steps = list(ALWAYS_BESIDE) if always else []
        for part, _ in sorted(parts, key=lambda pair: -pair[0].minutes):
            if missing := [name for name in part.python if name in failures]:
                run.rows.append(Row(part.name, None, f"FAILED: no Python environment {missing[0]}"))
                run.failed = True
            else:
                steps += [(part.name, command) for command in part.steps()]
        run.beside(steps)
    for part, why in skipped:
        run.rows.append(Row(part.name, None, f"skipped, {why}: make test-part PART={part.name}"))
    run.summary()
    if not run.failed and parts and options.what != ["change"] and commit:
        note([part for part, _ in parts], commit)
    del lock
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
