"""Updates of PPO, GRPO and SFT, and decoding, of models of real shapes with random weights; a JSON line for each name in NAMES.

    gpu_speeds.py PROGRAM FOLDER NAME...     FOLDER keeps the models, which are made where they are missing

Each line has the seconds of each update, the median of those after the first, and what the card held. With RLHF_KERNELS=cuda-only a run of
rlhf in which no kernel was started has failed. gpu_window.py runs it.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import gpu
import runs
from models import SIZES, prompt_lengths, write_prompts

HERE = Path(__file__).resolve().parent
# Dense bf16 FLOP/s of an H100 or H200.
PEAK = 989e12
KEYS = ("time/generate", "time/rollout", "time/optimise", "memory/allocated")


def say(stage, **numbers):
    print(json.dumps({"stage": stage, **numbers}), flush=True)


def watch(command):
    """Runs a program. With RLHF_KERNELS=cuda-only, raises `Failed` if rlhf started no kernel."""
    output = runs.watch(command)
    if Path(command[0]).name == "rlhf" and runs.is_idle(output.errors):
        raise runs.Failed(f"{command[0]} {command[1]}: no kernel was started: {output.errors.strip()[-200:]}")
    return output


class Job(runs.Job):
    """A PPO run whose kernels are watched."""

    def rlhf(self, binary, precision):
        return self._summary("rlhf", precision, watch(self._rlhf(binary, self._flags(precision) | self.extra)))


class Speeds:
    def __init__(self, program, folder, device="cuda", tiny=False):
        self.program, self.folder, self.device, self.tiny = program, folder, device, tiny

    def made(self, kind):
        """The folder of a model, its prompts and its rows for SFT."""
        folder = self.folder / ("tiny" if self.tiny else kind)
        if not (folder / "done").exists():
            runs.watch([sys.executable, HERE / "gpu_models.py", folder, folder.name, self.device])
            (folder / "done").touch()
        return folder

    def updates(self, stage, command, **more):
        """The times between the JSON lines of a program."""
        with gpu.CardMemory(self.device) as memory:
            output = watch(command)
        lines = output.json_lines()
        seconds = [b - a for (a, _), (b, _) in zip(lines, lines[1:])]
        found = {key: [round(line[key], 3) for _, line in lines if key in line] for key in KEYS}
        say(stage, median=round(median(seconds), 3) if seconds else None, seconds=[round(x, 3) for x in seconds], **{k: v for k, v in found.items() if v},
            card_gb=self.gigabytes(memory), **more)

    def gigabytes(self, memory):
        return round(memory.peak_bytes / 1e9, 2) if memory.watching else None

    def precision(self, mode):
        if self.tiny:
            return ["--bf16", "false"]
        return ["--bf16", "true", *(["--optim", "adamw_bf16"] if mode == "adamw_bf16" else [])]

    def rlhf(self, command, folder, rows, mode, **flags):
        common = {"dataset_name": folder / rows, "learning_rate": "1e-6", "disable_tqdm": "true", "device": self.device,
                  "output_dir": folder / f"out-{command}", "overwrite_output_dir": "true"}
        words = [word for name, value in (common | flags).items() for word in (f"--{name}", value)]
        return [self.program, command, "--model_name_or_path", folder / "policy", *words, *self.precision(mode)]

    def sft(self, who, mode=None):
        folder = self.made("llama1b")
        batch, accumulation = (2, 2) if self.tiny else (4, 4)
        if who == "trl":
            command = [sys.executable, HERE / "gpu_trl.py", "sft", folder, 3, batch, accumulation, self.device]
        else:
            command = self.rlhf("sft", folder, "sft.jsonl", mode, max_steps=4, logging_steps=1, max_length=2048,
                                per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
        self.updates(f"sft {who} {mode or ''}".strip(), command)

    def grpo(self, who, mode=None):
        folder = self.made("qwen05")
        length, accumulation = (16, 1) if self.tiny else (512, 8)
        if who == "trl":
            command = [sys.executable, HERE / "gpu_trl.py", "grpo", folder, 3, length, accumulation, self.device]
        else:
            command = self.rlhf("grpo", folder, "prompts.jsonl", mode, reward="length:target=160,unit=chars", num_generations=8, max_steps=4,
                                max_completion_length=length, min_new_tokens=length, temperature="1.0", per_device_train_batch_size=8,
                                gradient_accumulation_steps=accumulation, num_sample_generations=0, gradient_checkpointing="false")
        self.updates(f"grpo {who} {mode or ''}".strip(), command)

    def ppo(self, who, mode=None):
        name = "tiny" if self.tiny else "1b"
        folder = self.folder / f"neox-{name}"
        prompts = prompt_lengths(8, 8, 24) if self.tiny else prompt_lengths(64, 192, 512)
        if not (folder / "done").exists():
            folder.mkdir(parents=True, exist_ok=True)
            runs.watch([sys.executable, HERE / "models.py", folder, name, "--device", self.device])
            write_prompts(folder / "prompts.jsonl", prompts, SIZES[name].vocab)
            (folder / "done").touch()
        batch = 2 if self.tiny else 8
        job = Job(folder, folder / "prompts.jsonl", batch, len(prompts) // batch, 3, device=self.device, rollout_batch=2 * batch)
        with gpu.CardMemory(self.device) as memory:
            result = job.trl("bf16-weights") if who == "trl" else job.rlhf(self.program, "bf16-weights" if mode == "adamw_bf16" else mode)
        flops = SIZES[name].optimise_flops(prompts, 53, runs.EPOCHS)
        times = {key: [round(x, 3) for x in result[key]] for key in ("update", "generate", "rollout", "optimise")}
        say(f"ppo {who} {mode or ''}".strip(), median=round(median(result["update"]), 3), **times, mfu=round(flops / median(result["optimise"]) / PEAK, 3),
            card_gb=self.gigabytes(memory))

    def decode(self, rows):
        """Seconds of the second of two batches; the first has the start in it."""
        folder, rows = self.made("llama1b"), int(rows)
        rows, new = (min(rows, 4), 16) if self.tiny else (rows, 512 if rows == 64 else 256)
        prompts, data = (folder / "prompts.jsonl").read_text().splitlines(), folder / f"rows-{rows}.jsonl"
        data.write_text("\n".join((prompts * (2 * rows // len(prompts) + 1))[: 2 * rows]) + "\n")
        words = {"dataset_name": data, "device": self.device, "dtype": "float32" if self.tiny else "bfloat16", "batch_size": rows,
                 "max_new_tokens": new, "min_new_tokens": new, "temperature": "1.0"}
        command = [self.program, "generate", "--model_name_or_path", folder / "policy"]
        output = watch(command + [word for name, value in words.items() for word in (f"--{name}", value)])
        at = [at for at, _ in output.json_lines()]
        seconds = at[2 * rows - 1] - at[rows - 1]
        say(f"decode {rows}", seconds=round(seconds, 3), tokens_per_s=round(rows * new / seconds), ms_per_step=round(1e3 * seconds / new, 3))


def main():
    program, folder, *names = sys.argv[1:]
    tiny = "--tiny" in names
    speeds = Speeds(Path(program), Path(folder), "cpu" if tiny else "cuda", tiny)
    for name in (name for name in names if name != "--tiny"):
        what, *words = name.split()
        began = time.monotonic()
        try:
            getattr(speeds, what)(*words)
        except (runs.Failed, IndexError) as error:
            say(name, error=str(error)[-500:], after=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    main()
