"""Runs rlhf and its peers as separate processes, measured from outside; describes the machine.

Only the standard library, on purpose: Linux counts the memory of the process that starts a program into the program's
peak, so the one that measures must be smaller than all that it measures.
"""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from models import TEMPERATURE
from plan import planned

HERE = Path(__file__).resolve().parent
THREADS = len(os.sched_getaffinity(0))

# Settings that no cell of the benchmark varies.
EPOCHS = 4
LEARNING_RATE = 3e-6
LORA_R = 16
ROLLOUT_BATCH = 64


class Failed(Exception):
    """A program failed; the message is for the user."""


@dataclass(frozen=True)
class Output:
    """A program's output, and its time and memory."""

    lines: list  # of standard output
    arrivals: list  # of the lines, in seconds since the start of the program
    peak_bytes: int
    errors: str = ""  # standard error

    def json_lines(self):
        """The lines that are JSON objects, each with the time when it came."""
        return [(at, json.loads(line)) for at, line in zip(self.arrivals, self.lines) if line.startswith('{"')]


def watch(command, timeout=None, variables=None):
    """Runs `command` to its end; `Failed` with its last output if it fails or takes longer than `timeout` seconds."""
    command = [str(word) for word in command]
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"} | (variables or {})
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env)
        timer = threading.Timer(timeout or threading.TIMEOUT_MAX, child.kill)
        timer.daemon = True
        timer.start()
        lines, arrivals = [], []
        with child.stdout:
            for line in child.stdout:
                arrivals.append(time.perf_counter() - began)
                lines.append(line.decode())
        # The peak of this one child; getrusage would give the largest of all children so far.
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        timer.cancel()
        seconds = time.perf_counter() - began
        errors.seek(0)
        said = errors.read()
        if child.returncode != 0:
            end = " / ".join(said.strip().splitlines()[-3:])
            reason = f"killed after {seconds:.0f} s" if child.returncode == -9 else f"exit code {child.returncode}"
            raise Failed(f"{' '.join(command)}: {reason}: {end or 'nothing on standard error'}")
    return Output(lines, arrivals, usage.ru_maxrss * 1024, said)


def is_idle(errors):
    """Whether a run of rlhf with this standard error may compute by kernels only, and has started none."""
    return os.environ.get("RLHF_KERNELS") == "cuda-only" and not re.search(r"kernels: [1-9]\d* starts", errors)


def watch_ranks(command, ranks, timeout=None):
    """Runs `command` as several ranks of this machine; returns rank 0's output and the peak memory of each rank in bytes."""
    command = [str(word) for word in command]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    of_rank = [{key: str(value) for key, value in (common | {"RANK": r, "LOCAL_RANK": r}).items()} for r in range(ranks)]
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    others = [
        subprocess.Popen(command, env=env | variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for variables in of_rank[1:]
    ]
    try:
        output = watch(command, timeout, of_rank[0] if ranks > 1 else None)
    except Failed:
        for other in others:
            other.kill()
        raise
    peaks = [output.peak_bytes]
    for other in others:
        _, status, usage = os.wait4(other.pid, 0)
        other.returncode = os.waitstatus_to_exitcode(status)
        peaks.append(usage.ru_maxrss * 1024)
        if other.returncode != 0:
            raise Failed(f"{' '.join(command)}: a rank ended with exit code {other.returncode}")
    return output, peaks


def _value(value):
    """A flag's value as an argument of Python."""
    return {"true": True, "false": False}.get(value, value if isinstance(value, (int, float)) else str(value))


def _words(flags):
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


@dataclass(frozen=True)
class Job:
    """One PPO run, the same for rlhf and TRL; every update uses every prompt once."""

    TRL = "trl_ppo.py"

    models: Path
    prompts: Path
    batch: int
    accumulation: int
    updates: int
    response_length: int = 53
    device: str = "cpu"
    rollout_batch: int = ROLLOUT_BATCH
    epochs: int = EPOCHS
    # The end-of-text token is not sampled; otherwise a response ends with it.
    never_stops: bool = False
    # LoRA adapters of the policy; the value model is trained whole, as TRL's is.
    lora: bool = False
    # Further flags of rlhf and of TRL's scripts, above those of the other fields.
    extra: dict = field(default_factory=dict)
    trl_extra: dict = field(default_factory=dict)

    @property
    def episodes(self):
        return self.batch * self.accumulation

    def rlhf(self, binary, precision, **watching):
        """Precisions: `f32`; `bf16` computes in bf16 with f32 master weights, frozen models are held in bf16; with `bf16-weights` those
        that are trained, their gradients and Adam states are bf16 too."""
        flags = self._flags(precision) | self.extra
        return self._summary("rlhf", precision, watch(self._rlhf(binary, flags), **watching))

    def python(self, binary, precision, **watching):
        """The same run by the trainers of the Python package, which start the program."""
        _, command, *_ = self._rlhf(binary, {})
        settings = {name: _value(value) for name, value in (self._flags(precision) | self.extra).items()}
        words = [sys.executable, HERE / "from_python.py", binary, command, json.dumps(settings)]
        return self._summary("Python", precision, watch(words, **watching))

    def plan(self, binary, precision):
        """The plan of such a run, without times."""
        program, *line = self._rlhf(binary, self._flags(precision) | self.extra)
        return planned(str(program), list(map(str, line)), "--calibrate=false")

    def rlhf_ranks(self, binary, ranks, threads, stage):
        """One update's rows divided over `ranks` ranks of `threads` threads each, in f32, at this stage of ZeRO."""
        flags = self._flags("f32") | {
            "train_batch_size": self.episodes,
            "num_threads": threads,
            "zero_stage": stage,
        }
        del flags["per_device_train_batch_size"], flags["gradient_accumulation_steps"]
        output, peaks = watch_ranks(self._rlhf(binary, flags), ranks)
        summary = self._summary("rlhf", "f32", output)
        counted = [update for _, update in output.json_lines()[1:]]
        of_ranks = {key: [update.get(f"time/{key}", 0.0) for update in counted] for key in ("waiting", "collectives")}
        return summary | of_ranks | {"ranks": ranks, "threads": threads, "stage": stage, "peaks": peaks}

    def _rlhf(self, binary, flags):
        return [binary, "ppo", *_words(flags)]

    def _flags(self, precision):
        """The flags of `rlhf ppo`."""
        flags = {
            "sft_model_path": self.models / "policy",
            "reward_model_path": self.models / "reward",
            "num_mini_batches": 1,
            "total_episodes": self.episodes * self.updates,
            "local_rollout_forward_batch_size": self.rollout_batch,
            "response_length": self.response_length,
            "num_ppo_epochs": self.epochs,
            "temperature": TEMPERATURE,
            "stop_token": "eos",
        }
        flags |= {"min_new_tokens": self.response_length} if self.never_stops else {}
        return flags | self._common(precision) | ({"value_use_peft": "false"} if self.lora else {})

    def _common(self, precision):
        """The flags that `rlhf ppo` and `rlhf grpo` share."""
        flags = {
            "dataset_name": self.prompts,
            "output_dir": self.models / "output-rlhf",
            "overwrite_output_dir": "true",
            "per_device_train_batch_size": self.batch,
            "gradient_accumulation_steps": self.accumulation,
            "learning_rate": LEARNING_RATE,
            "num_sample_generations": 0,
            "disable_tqdm": "true",
            "num_threads": THREADS,
            "device": self.device,
            "bf16": str(precision != "f32").lower(),
            "dtype": "float32" if precision == "f32" else "bfloat16",
            "optim": "adamw_bf16" if precision == "bf16-weights" else "adamw_torch",
        }
        lora = {"use_peft": "true", "lora_r": LORA_R, "lora_alpha": 2 * LORA_R, "lora_target_modules": "all-linear"}
        return flags | (lora if self.lora else {})

    def trl(self, precision, **watching):
        """Precisions: those of trl_ppo.py or trl_grpo.py."""
        command = [sys.executable, HERE / self.TRL, *_words(self._trl_flags(precision) | self.trl_extra)]
        return self._summary("TRL", precision, watch(command, **watching))

    def _trl_flags(self, precision):
        flags = {
            "epochs": self.epochs,
            "temperature": TEMPERATURE,
            "rollout_batch": self.rollout_batch,
            "device": self.device,
            "never_stops": str(self.never_stops).lower(),
        }
        return flags | self._trl_common(precision)

    def _trl_common(self, precision):
        flags = {
            "models": self.models,
            "prompts": self.prompts,
            "output_dir": self.models / "output-trl",
            "precision": precision,
            "batch": self.batch,
            "accumulation": self.accumulation,
            "updates": self.updates,
            "response_length": self.response_length,
            "learning_rate": LEARNING_RATE,
            "threads": THREADS,
        }
        return flags | ({"lora_r": LORA_R} if self.lora else {})

    def _summary(self, program, precision, output):
        """Numbers of each update; the first is separate, because it is not counted.

        An update's seconds are from the end of the one before it to its own end, whatever the program does in between.
        """
        updates = output.json_lines()
        if len(updates) != self.updates or len(updates) < 2:
            raise Failed(f"{program}: expected {self.updates} updates, two at least, found {len(updates)}")
        ends = [at for at, _ in updates]
        counted = [update for _, update in updates[1:]]
        first = updates[0][1]
        summary = {
            "program": program,
            "precision": precision,
            "update": [after - before for before, after in zip(ends, ends[1:])],
            "generate": [update["time/generate"] for update in counted],
            "rollout": [update["time/rollout"] - update["time/generate"] for update in counted],
            "optimise": [update["time/optimise"] for update in counted],
            "response_length": [either(update, "val/response_length", "completions/mean_length") for update in counted],
            "first_update": either(first, "time/update", "step_time"),
            "start_up": ends[0] - either(first, "time/update", "step_time"),
            "peak_bytes": output.peak_bytes,
        }
        if "memory/allocated" in first:
            summary["allocated_bytes"] = max(update["memory/allocated"] for _, update in updates)
        return summary


def either(update, name, name_of_groups):
    """A metric of an update; rlhf's runs of groups have some by TRL's names for them."""
    return update[name] if name in update else update[name_of_groups]


@dataclass(frozen=True)
class GrpoJob(Job):
    """One GRPO run, the same for rlhf and TRL, in which responses never stop."""

    TRL = "trl_grpo.py"
    # The temperature of TRL's GRPOConfig, the responses to a prompt, the characters for which the reward is highest.
    TEMPERATURE, GENERATIONS, TARGET = 1.0, 8, 160

    def _rlhf(self, binary, flags):
        return [binary, "grpo", *_words(flags)]

    def _flags(self, precision):
        flags = {
            "model_name_or_path": self.models / "policy",
            "reward": f"length:target={self.TARGET},unit=chars",
            "num_generations": self.GENERATIONS,
            "max_steps": self.updates,
            "max_completion_length": self.response_length,
            "min_new_tokens": self.response_length,
            "temperature": self.TEMPERATURE,
            "gradient_checkpointing": "false",
        }
        return flags | self._common(precision)

    def _trl_flags(self, precision):
        flags = {"temperature": self.TEMPERATURE, "generations": self.GENERATIONS, "target_chars": self.TARGET}
        return flags | self._trl_common(precision)


def transformers_rates(model, prompts, dtype, batches, new_tokens):
    """Generated tokens per second by batch size, the median of the batches.

    `batches` is the number of batches of each size; the first is not counted.
    """
    flags = {
        "model": model,
        "prompts": prompts,
        "dtype": dtype,
        "max_new_tokens": new_tokens,
        "temperature": TEMPERATURE,
        "threads": THREADS,
        "batches": json.dumps(batches),
    }
    command = [sys.executable, HERE / "hf_generate.py"]
    output = watch(command + [word for name, value in flags.items() for word in (f"--{name}", value)])
    return {
        row["batch"]: median(tokens / seconds for tokens, seconds in row["batches"]) for _, row in output.json_lines()
    }


def rlhf_rate(binary, model, prompts, dtype, batch, count, new_tokens):
    """Generated tokens per second of `rlhf generate`, the median of its batches but the first.

    It writes each batch when it has it, so the time between the last rows of two batches is all that a batch takes:
    reading and decoding the rows is in it, starting and loading the model is not.
    """
    with open(prompts) as lines:
        rows = [line for line, _ in zip(lines, range(batch * count))]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as some:
        some.writelines(rows)
        some.flush()
        output = watch(
            [binary, "generate", "--model_name_or_path", model, "--dataset_name", some.name, "--device", "cpu"]
            + ["--dtype", dtype, "--batch_size", batch, "--max_new_tokens", new_tokens, "--temperature", TEMPERATURE]
            + ["--num_threads", THREADS]
        )
    responses = output.json_lines()
    if len(responses) != batch * count:
        raise Failed(f"rlhf generate: expected {batch * count} responses, found {len(responses)}")
    ends = [at for at, _ in responses[batch - 1 :: batch]]
    took = [after - before for before, after in zip(ends, ends[1:])]
    if min(took) < 0.2 * median(took):
        raise Failed(f"rlhf generate: expected responses to come batch by batch, found seconds between batches of {took}")
    tokens = [row["num_tokens"] for _, row in responses]
    return median(sum(tokens[i * batch : (i + 1) * batch]) / seconds for i, seconds in enumerate(took, start=1))


def gemm_rate(size, dtype, tokens, head_rows):
    """GFLOP/s of matrix products, see gemm.py."""
    # Otherwise each large result is in new memory, and the time in which the system clears it would count.
    kept = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    command = [sys.executable, HERE / "gemm.py", size, dtype, tokens, head_rows, THREADS]
    [(_, rate)] = watch(["env", *(f"{name}={value}" for name, value in kept.items()), *command]).json_lines()
    return rate


def machine():
    """The hardware of the measurement, without anything that names the machine."""
    cpu = dict(line.split(":", 1) for line in open("/proc/cpuinfo").read().split("\n\n")[0].splitlines() if ":" in line)
    cpu = {name.strip(): value.strip() for name, value in cpu.items()}
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "family": int(cpu.get("cpu family", 0)),
        "vectors": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve") if flag in flags],
        "cores": os.cpu_count(),
        "threads": THREADS,
        "memory_bytes": memory,
    }


def versions(binary):
    """The programs that were measured."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    # A machine with a GPU may have a part of them.
    for name in ("trl", "torch", "transformers", "accelerate", "peft", "bitsandbytes"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    rlhf = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    return {"rlhf": rlhf, "python": platform.python_version()} | found


def commit():
    """The checkout's commit, with `-dirty` where files other than results differ from it."""
    git = ["git", "-C", HERE.parent]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"]).returncode
    return (head or "unknown") + "-dirty" * (changed == 1)
