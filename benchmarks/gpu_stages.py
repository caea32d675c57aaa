"""The stages of gpu_window.py: what each runs, how long it may take, and how its output becomes numbers."""

import functools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Test programs that stages start, and the folder that cargo starts each in: the integration tests, and the tests of crates.
TEST_PROGRAMS = {"main": "crates/rlhf-cli", "rlhf_lm": "crates/lm", "groups": "crates/tch-ext", "gpu_kernels": "crates/tch-ext"}


@dataclass(frozen=True)
class Place:
    """Folders of a call: where results go, and where the programs and models are."""

    out: Path
    work: Path

    def environment(self):
        """The environment of all stages: the libtorch of this Python's torch, CUDA's libraries, and no downloads."""
        env = dict(os.environ, HF_HUB_OFFLINE="1", RLHF_WORK=str(self.work), RLHF_CACHE=str(self.work / "cache"))
        torch = find_spec("torch")
        if torch:
            lib = Path(torch.submodule_search_locations[0]) / "lib"
            nvidia = sorted((lib.parent.parent / "nvidia").glob("*/lib"))
            env["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, [lib, *nvidia, *filter(None, [env.get("LD_LIBRARY_PATH")])]))
        return env

    def file(self, name):
        return shlex.quote(str(self.work / name))


@dataclass(frozen=True)
class Stage:
    name: str
    about: str
    # Seconds after which it is stopped.
    limit: float
    # The shell command, by place.
    command: Callable
    # Numbers of its output, of which there must be some; `failures` among them, if it is not 0, makes the stage a failure. Without it the exit
    # code decides alone.
    parse: Callable | None = None
    # Files of the pack without which it cannot run.
    needs: tuple = ()
    variables: dict = field(default_factory=dict)
    # It is not started with fewer seconds left.
    least: float = 15


# --- Reading output --------------------------------------------------------------------------------------------------------------------------


def of_tests(text):
    """Counts and failed names of one or more runs of Rust's test programs."""
    counts = [tuple(map(int, m)) for m in re.findall(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", text, re.M)]
    if not counts:
        return {"failures": 1, "failed": ["no test program came to its end"]}
    passed, failures, _ = map(sum, zip(*counts))
    # A filter that no test has is no success.
    failures = failures if passed else max(failures, 1)
    return {"passed": passed, "failures": failures, "failed": sorted(set(re.findall(r"^test (\S+) \.\.\. FAILED", text, re.M)))}


def of_doctor(text):
    """Of `rlhf doctor --json`: the GPU that it found, and what is broken."""
    try:
        checks = json.loads(text[text.index("\n{") : text.rindex("}") + 1])["checks"]
    except (ValueError, KeyError):
        return {"failures": 1, "failed": ["no JSON of rlhf doctor"]}
    failed = [f"{check['name']}: {check['text']}"[:200] for check in checks if check["status"] == "failure"]
    gpu = next((check["text"] for check in checks if check["name"] == "gpu" and check["status"] == "ok"), "")
    failed += [] if re.match(r"\d+ GPU", gpu) else ["gpu: rlhf doctor found none"]
    return {"gpu": gpu[:120], "failures": len(failed), "failed": failed}


def of_json(text, names=()):
    """The last JSON line of each `stage` of gpu_speeds.py; a failure for each of `names` without a measured number."""
    found = {}
    for line in text.splitlines():
        if line.startswith('{"stage"'):
            numbers = json.loads(line)
            found[numbers.pop("stage")] = numbers
    wrong = [name for name in dict.fromkeys((*names, *found)) if not is_measured(found.get(name, {}))]
    return {**found, "failures": len(wrong), "failed": wrong} if found else {"failures": 1, "failed": list(names)}


def is_measured(numbers):
    """Whether a line of gpu_speeds.py has its time."""
    time = numbers.get("median", numbers.get("ms_per_step"))
    return "error" not in numbers and isinstance(time, (int, float)) and math.isfinite(time) and time > 0


def of_matrix(text):
    """Of gpu_matrix.py: kinds that failed or have wrong metrics, or did not end; the largest differences; resumes with other bits."""
    kinds = re.findall(r"^kind (.+): cpu (\S+), gpu (\S+), (\d+) numbers, largest difference (\S+) ([^\s,]+), (.+)$", text, re.M)
    failed = [name if said == "ok" else f"{name}: {said}" for name, cpu, gpu, *_, said in kinds if (cpu, gpu, said) != ("0", "0", "ok")]
    largest = sorted(((float(gap), f"{name}: {key}") for name, *_, key, gap, _ in kinds), reverse=True)[:8]
    resumes = re.findall(r"^resume (.+): twice (\S+), resumed (\S+)$", text, re.M)
    missing = {"kinds": len(kinds), "resumes": len(resumes)}
    missing = sum(int(expected) - missing[what] for expected, what in re.findall(r"^expected (\d+) (kinds|resumes)$", text, re.M))
    failed += [f"{missing} did not end"] if missing else []
    found = {"kinds": len(kinds), "failures": len(failed), "failed": failed, "largest": [[what, gap] for gap, what in largest]}
    other = [f"{kind}: twice {a}, resumed {b}" for kind, a, b in resumes if (a, b) != ("same", "same")]
    return found | {"resumes": len(resumes), "other_bits": other} if kinds or resumes else {"failures": 1}


def of_profile(text, names=()):
    """Of gpu_profile.cpp: span and busy time of each part, and its longest kernels; a failure where the run of `names` was not measured."""
    found, part = {}, None
    for line in text.splitlines():
        if m := re.match(r"== (.+): (\d+) kernels, span (\S+) ms, busy (\S+) ms", line):
            part = found.setdefault(m[1], {"kernels": int(m[2]), "span_ms": float(m[3]), "busy_ms": float(m[4]), "longest": []})
        elif part and len(part["longest"]) < 10 and (m := re.match(r" *(\S+) ms +(\d+) x +(\S+) us  (.+)", line)):
            part["longest"].append([float(m[1]), int(m[2]), m[4][:80]])
    failures = of_json(text, names)["failures"] if names else 0
    return {**found, "failures": failures} if found else {"failures": 1}


# --- Commands --------------------------------------------------------------------------------------------------------------------------------


def tests(program, *words):
    return lambda place: f"cd {TEST_PROGRAMS[program]} && {place.file('test-' + program)} {' '.join(map(shlex.quote, words))}"


def script(name, *words):
    return lambda place: " ".join([shlex.quote(sys.executable), str(HERE / name), place.file("rlhf"), place.file(""), *map(shlex.quote, words)])


def library(place):
    """Puts the CUDA library beside libtorch's, where it is looked for."""
    torch = find_spec("torch")
    lib = Path(torch.submodule_search_locations[0]) / "lib" if torch else Path("/no-torch-in-this-python")
    return f"nvidia-smi && cp {place.file('libtch_ext_cuda.so')} {shlex.quote(str(lib))}/ && {place.file('rlhf')} doctor --device cuda --json"


def profiled(*stages):
    def command(place):
        out = shlex.quote(str(place.out / "profile-kernels.txt"))
        run = script("gpu_speeds.py", *stages)(place)
        # A profile of an earlier call is none of this one.
        return f"rm -f {out}; CUDA_INJECTION64_PATH={place.file('libprofile.so')} PROFILE_OUT={out} PROFILE_LAST_MS=3000 {run} && cat {out}"

    return command


CUDA_TESTS = {"RLHF_TEST_CUDA": "1"}
GOLDEN = {"RLHF_TEST_DEVICE": "cuda"}
# Where they cannot be loaded, a stage fails.
KERNELS = {"RLHF_KERNELS": "cuda-only"}
ORDERED = {"RLHF_SUMS": "ordered"}
PROGRAM = ("rlhf", "libtch_ext_cuda.so")


def speeds(name, about, limit, *stages, **variables):
    return Stage(name, about, limit, script("gpu_speeds.py", *stages), functools.partial(of_json, names=stages), PROGRAM, variables, least=30)


def profile(name, about, limit, *stages):
    parse = functools.partial(of_profile, names=stages)
    return Stage(name, about, limit, profiled(*stages), parse, (*PROGRAM, "libprofile.so"), least=30)


STAGES = [
    Stage("doctor", "the card, the CUDA library in its place, rlhf doctor", 60, library, of_doctor, PROGRAM),
    Stage("graphs", "generation by CUDA graphs in twelve families", 60, tests("rlhf_lm", "--ignored", "a_gpu_that_records"), of_tests,
          ("test-rlhf_lm",), CUDA_TESTS),
    Stage("kernels", "each kernel of csrc/gpu against libtorch's operations", 90, tests("gpu_kernels", "--ignored"), of_tests,
          ("test-gpu_kernels",), CUDA_TESTS),
    Stage("nccl", "NCCL with one rank", 40, tests("groups", "--ignored", "every_collective_of_nccl"), of_tests, ("test-groups",), CUDA_TESTS),
    Stage("goldens", "reference values on the GPU", 150, tests("main", "golden", "models::"), of_tests, ("test-main",), GOLDEN),
    Stage("matrix", "64 kinds of run on the GPU and on the processor", 90, script("gpu_matrix.py", "kinds"), of_matrix, PROGRAM),
    Stage("resumes", "six kinds twice and resumed, bits compared", 60, script("gpu_matrix.py", "resumes"), of_matrix, PROGRAM),
    Stage("goldens, kernels", "the same with the kernels", 150, tests("main", "golden", "models::"), of_tests, ("test-main",), GOLDEN | KERNELS),
    Stage("matrix, kernels", "the same with the kernels", 90, script("gpu_matrix.py", "kinds"), of_matrix, PROGRAM, KERNELS),
    Stage("resumes, ordered", "the same with sums in a fixed order", 60, script("gpu_matrix.py", "resumes"), of_matrix, PROGRAM, ORDERED),
    speeds("speed sft", "SFT of 1.24B, 16 x 2048", 70, "sft rlhf bf16"),
    speeds("speed sft, kernels", "the same with the kernels", 70, "sft rlhf bf16", **KERNELS),
    speeds("speed grpo", "GRPO of 0.5B, 64 x (256 + 512)", 70, "grpo rlhf bf16"),
    speeds("speed grpo, kernels", "the same with the kernels", 70, "grpo rlhf bf16", **KERNELS),
    speeds("speed sft trl", "TRL's, bf16 weights", 70, "sft trl"),
    speeds("speed grpo trl", "TRL's, bf16 weights", 110, "grpo trl"),
    speeds("speed ppo", "PPO of 1.0B, 64 x 53", 80, "ppo rlhf bf16"),
    speeds("speed ppo, kernels", "the same with the kernels", 80, "ppo rlhf bf16", **KERNELS),
    speeds("speed decode", "decoding of 1.24B: 256, 1 and 64 rows", 80, "decode 256", "decode 1", "decode 64"),
    speeds("speed decode, kernels", "the same with the kernels", 80, "decode 1", "decode 64", **KERNELS),
    speeds("speed adamw_bf16", "SFT and GRPO with bf16 weights", 100, "sft rlhf adamw_bf16", "grpo rlhf adamw_bf16"),
    speeds("speed ordered", "SFT and GRPO with sums in a fixed order", 100, "sft rlhf bf16", "grpo rlhf bf16", **ORDERED),
    speeds("speed ppo trl", "TRL's, bf16 weights", 100, "ppo trl"),
    *[speeds(f"logits 2^{power}", "SFT with so many logits at once", 60, "sft rlhf bf16", RLHF_LOGITS_CHUNK=str(power)) for power in (25, 27, 29)],
    profile("profile sft", "kernels of three SFT steps", 60, "sft rlhf bf16"),
    profile("profile grpo", "kernels of an update of GRPO", 80, "grpo rlhf bf16"),
]
