"""Peaks of memory of real runs, held against `rlhf plan`.

    python benchmarks/plan.py --model SmolLM2-135M-Instruct                # all runs: about ten minutes on two cores, 6 GB of memory
    python benchmarks/plan.py --model SmolLM2-135M-Instruct sft 'ppo/*'    # some of them

The model is a folder as examples/smollm2/get_model.sh makes it; data are those of the examples. Each run has two or three updates. The
peak is the largest resident memory of a rank, from its start to its end (`ru_maxrss`, Linux's VmHWM). Prints a table, and with
--output writes the numbers as JSON. Fails if an estimate is off by more than --bound.
"""

import argparse
import fnmatch
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / "examples/smollm2/data"
SENTIMENT = ROOT / "examples/sentiment/data"
LORA = "--use_peft --lora_target_modules all-linear"
PPO = (
    f"ppo --sft_model_path MODEL --dataset_name {SMOLLM2}/reviews.jsonl --train_batch_size 8 --total_episodes 16"
    " --num_ppo_epochs 1 --num_mini_batches 1 --response_length 32 --num_sample_generations 0"
)
RULE = "--reward length:target=20"
GRPO = (
    f"grpo --model_name_or_path MODEL --dataset_name {SMOLLM2}/extract.jsonl {RULE} --num_generations 8"
    " --train_batch_size 16 --max_steps 2 --max_completion_length 40 --min_new_tokens 40"
)
SFT = f"sft --model_name_or_path MODEL --dataset_name {SENTIMENT}/sft.jsonl --train_batch_size 16 --max_steps 3"
REWARD = (
    f"reward --model_name_or_path MODEL --new_reward_head --dataset_name {SENTIMENT}/preferences.jsonl"
    " --train_batch_size 16 --max_steps 3"
)
# Name, command line, number of ranks.
RUNS = [
    ("ppo/full f32", f"{PPO} {RULE}", 1),
    ("ppo/full f32, reward model", f"{PPO} --reward_model_path JUDGE --new_reward_head", 1),
    ("ppo/full f32, gradient checkpointing", f"{PPO} {RULE} --gradient_checkpointing", 1),
    ("ppo/lora bf16", f"{PPO} {RULE} {LORA} --bf16", 1),
    ("ppo/lora bf16, value head", f"{PPO} {RULE} {LORA} --bf16 --value_head", 1),
    ("ppo/full f32, 2 ranks, zero_stage 3", f"{PPO} {RULE} --zero_stage 3", 2),
    ("grpo/full f32", GRPO, 1),
    ("grpo/full bf16", f"{GRPO} --bf16", 1),
    ("grpo/lora f32", f"{GRPO} {LORA}", 1),
    ("grpo/lora bf16", f"{GRPO} {LORA} --bf16", 1),
    ("grpo/full f32, 2 ranks, zero_stage 2", f"{GRPO} --zero_stage 2", 2),
    ("sft/full f32", SFT, 1),
    ("sft/full bf16", f"{SFT} --bf16", 1),
    ("sft/full f32, gradient checkpointing", f"{SFT} --gradient_checkpointing", 1),
    ("sft/lora bf16, dropout", f"{SFT} {LORA} --bf16", 1),
    ("sft/full f32, 2 ranks, zero_stage 1", f"{SFT} --zero_stage 1", 2),
    ("reward/full f32", REWARD, 1),
]
MIB = 1 << 20


def processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(words, rank, ranks, port, log):
    env = dict(os.environ, OMP_WAIT_POLICY="passive")
    if ranks > 1:
        env.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)


def measure(words, ranks, log):
    """The largest peak of a rank in bytes, and the mean seconds of an update."""
    port, peaks = free_port(), []
    with open(log, "w") as out:
        for process in [start(words, rank, ranks, port, out) for rank in range(ranks)]:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode != 0:
                sys.exit(f"{' '.join(words)}\nended with {process.returncode}: {Path(log).read_text()[-2000:]}")
            peaks.append(usage.ru_maxrss * 1024)
    return max(peaks)


def seconds(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [line["time/update"] for line in lines if "time/update" in line]
    return times[-1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="*", default=["*"], help="names or patterns of runs")
    parser.add_argument("--model", type=Path, default=ROOT / "runs/smollm2/SmolLM2-135M-Instruct")
    parser.add_argument("--rlhf", default=str(ROOT / "target/release/rlhf"))
    parser.add_argument("--planner", help="program that plans, if it is another one")
    parser.add_argument("--bound", type=float, default=0.15)
    parser.add_argument("--measured", type=Path, help="file of --output: its peaks are used, and nothing runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    known = json.loads(args.measured.read_text())["runs"] if args.measured else {}
    results, worst = {}, 0.0
    with tempfile.TemporaryDirectory() as scratch:
        judge = Path(scratch) / "judge"
        judge.mkdir()
        for file in args.model.iterdir():
            (judge / file.name).symlink_to(file.resolve())
        print(f"| run | measured, MiB | plan, MiB | difference | seconds an update | plan |\n|---|---:|---:|---:|---:|---:|")
        for name, line, ranks in RUNS:
            if not any(fnmatch.fnmatch(name, pattern) for pattern in args.runs):
                continue
            out = Path(scratch) / "out"
            line = line.replace("MODEL", str(args.model)).replace("JUDGE", str(judge))
            line += f" --no_report --disable_tqdm --device cpu --seed 1 --output_dir {out}"
            planner = [args.planner or args.rlhf, "plan", "--json", "--nproc_per_node", str(ranks), *line.split()]
            plan = json.loads(subprocess.run(planner, check=True, capture_output=True, text=True).stdout)
            if name in known:
                peak, took = known[name]["peak"], known[name]["seconds"]
            else:
                peak = measure([args.rlhf, *line.split(), "--overwrite_output_dir"], ranks, Path(scratch) / "log")
                took = seconds(out)
                time.sleep(1)
            planned = plan["memory"]["peak"]
            off = planned / peak - 1
            worst = max(worst, abs(off))
            results[name] = {"peak": peak, "seconds": took, "planned": planned, "planned_seconds": plan["time"]["update"]}
            print(
                f"| {name} | {peak / MIB:.0f} | {planned / MIB:.0f} | {off:+.1%} | {took:.1f} | {plan['time']['update']:.1f} |",
                flush=True,
            )
    print(f"\n{processor()}, {os.cpu_count()} processors; largest difference {worst:.1%}")
    if args.output:
        args.output.write_text(json.dumps({"processor": processor(), "runs": results}, indent=1) + "\n")
    if worst > args.bound:
        sys.exit(f"an estimate is off by {worst:.1%}, and at most {args.bound:.0%} are allowed")


if __name__ == "__main__":
    main()
