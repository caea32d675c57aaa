"""Peaks of memory of real runs, held against `rlhf plan`.

    python benchmarks/plan.py --model SmolLM2-135M-Instruct                # all runs: about ten minutes on two cores, 6 GB of memory
    python benchmarks/plan.py --model SmolLM2-135M-Instruct sft 'ppo/*'    # some of them

The model is a folder as examples/smollm2/get_model.sh makes it; data are those of the examples. The T5 of the runs `t5/*` has random weights and the
tokenizer of examples/t5-summary, and needs no download. Each run has two or three updates. The
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
DPO = f"dpo --model_name_or_path MODEL --dataset_name {SENTIMENT}/preferences.jsonl --train_batch_size 16 --max_steps 3"
DISTILL = (
    "distill --model_name_or_path MODEL --teacher_model_name_or_path MODEL --train_batch_size 8 --max_steps 3 --max_completion_length 32"
    f" --min_new_tokens 32 --dataset_name {SMOLLM2}/reviews.jsonl"
)
# Responses of rows are learned.
OFF_POLICY = (
    f"distill --model_name_or_path MODEL --teacher_model_name_or_path MODEL --train_batch_size 8 --max_steps 3 --lmbda 0 --dataset_name {SENTIMENT}/sft.jsonl"
)
SUMMARIES = ROOT / "examples/t5-summary"
T5_PPO = (
    f"ppo --sft_model_path PAIR --dataset_name {SUMMARIES}/data/prompts.jsonl --reward rouge_l:completion --train_batch_size 32"
    " --total_episodes 64 --num_ppo_epochs 1 --num_mini_batches 1 --response_length 48 --num_sample_generations 0"
)
T5_SFT = f"sft --model_name_or_path PAIR --dataset_name {SUMMARIES}/data/sft.jsonl --train_batch_size 64 --max_steps 3"
# The sizes of t5-small, with fewer words.
T5 = dict(d_model=512, d_kv=64, num_heads=8, d_ff=2048, num_layers=6, num_decoder_layers=6, n_positions=512)
# Name, command line, number of ranks.
RUNS = [
    ("ppo/full f32", f"{PPO} {RULE}", 1),
    ("ppo/full f32, reward model", f"{PPO} --reward_model_path JUDGE --new_reward_head", 1),
    ("ppo/full f32, reward model, offload", f"{PPO} --reward_model_path JUDGE --new_reward_head --offload all", 1),
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
    ("dpo/full f32", DPO, 1),
    ("dpo/full bf16", f"{DPO} --bf16", 1),
    ("dpo/full f32, gradient checkpointing", f"{DPO} --gradient_checkpointing", 1),
    ("dpo/full f32, precomputed", f"{DPO} --precompute_ref_log_probs", 1),
    ("dpo/lora bf16", f"{DPO} {LORA} --bf16", 1),
    ("dpo/full f32, 2 ranks, zero_stage 2", f"{DPO} --zero_stage 2", 2),
    ("distill/full f32", DISTILL, 1),
    ("distill/full bf16", f"{DISTILL} --bf16", 1),
    ("distill/full f32, teacher in 4 bits", f"{DISTILL} --teacher_load_in_4bit", 1),
    ("distill/full f32, beta 0.5, responses of rows", f"{OFF_POLICY} --beta 0.5", 1),
    ("distill/full f32, reverse_kl_advantage", f"{DISTILL} --loss_type reverse_kl_advantage", 1),
    ("distill/lora bf16, teacher in 4 bits, checkpointing", f"{DISTILL} {LORA} --bf16 --teacher_load_in_4bit --gradient_checkpointing", 1),
    ("distill/full f32, seq_kd, offload", f"{DISTILL} --lmbda 0 --seq_kd --offload all", 1),
    ("distill/full f32, 2 ranks, zero_stage 3", f"{DISTILL} --zero_stage 3", 2),
    ("t5/ppo f32, value model", T5_PPO, 1),
    ("t5/ppo f32, value head", f"{T5_PPO} --value_head", 1),
    ("t5/ppo f32, gradient checkpointing", f"{T5_PPO} --gradient_checkpointing", 1),
    ("t5/ppo lora bf16", f"{T5_PPO} {LORA} --bf16", 1),
    ("t5/sft f32", T5_SFT, 1),
    ("t5/sft lora f32", f"{T5_SFT} {LORA}", 1),
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


def planned(rlhf, words, *options):
    """What `rlhf plan` with these options says of a run."""
    command = [rlhf, "plan", "--json", *options, *words]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(f"{' '.join(command)}: {ran.stderr}")
    return json.loads(ran.stdout)


def peak_and_plan(rlhf, words, log):
    """The peak of a run of one rank in bytes, and its plan without times."""
    plan = planned(rlhf, words, "--calibrate=false")
    return measure([rlhf, *words, "--overwrite_output_dir"], 1, log), plan


def in_mib(sizes):
    return " and ".join(f"{size / MIB:.0f}" for size in sizes)


def make_t5(rlhf, folder):
    """A T5 with random weights in `folder`, made of a configuration by a training without a step to speak of."""
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads((SUMMARIES / "model.json").read_text()) | T5))
    places = f"--config_name {config} --tokenizer_name {SUMMARIES}/tokenizer --dataset_name {SUMMARIES}/data/sft.jsonl"
    line = f"sft {places} --output_dir {folder}/made --max_steps 1 --train_batch_size 1 --learning_rate 1e-9 --no_report"
    subprocess.run([rlhf, *line.split()], check=True, capture_output=True)
    return folder / "made"


def seconds(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # Runs of groups have TRL's name for it.
    times = [line[name] for line in lines for name in ("time/update", "step_time") if name in line]
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
        chosen = [run for run in RUNS if any(fnmatch.fnmatch(run[0], pattern) for pattern in args.runs)]
        judge, pair = Path(scratch) / "judge", None
        if any("MODEL" in line for _, line, _ in chosen):
            judge.mkdir()
            for file in args.model.iterdir():
                (judge / file.name).symlink_to(file.resolve())
        if any("PAIR" in line for _, line, _ in chosen):
            pair = make_t5(args.rlhf, Path(scratch) / "t5")
        print(f"| run | measured, MiB | plan, MiB | difference | seconds an update | plan |\n|---|---:|---:|---:|---:|---:|")
        for name, line, ranks in chosen:
            out = Path(scratch) / "out"
            line = line.replace("MODEL", str(args.model)).replace("JUDGE", str(judge)).replace("PAIR", str(pair))
            line += f" --no_report --disable_tqdm --device cpu --seed 1 --output_dir {out}"
            plan = planned(args.planner or args.rlhf, line.split(), "--nproc_per_node", str(ranks))
            if name in known:
                peak, took = known[name]["peak"], known[name]["seconds"]
            else:
                peak = measure([args.rlhf, *line.split(), "--overwrite_output_dir"], ranks, Path(scratch) / "log")
                took = seconds(out)
                time.sleep(1)
            estimate = plan["memory"]["peak"]
            off = estimate / peak - 1
            worst = max(worst, abs(off))
            results[name] = {"peak": peak, "seconds": took, "planned": estimate, "planned_seconds": plan["time"]["update"]}
            print(
                f"| {name} | {peak / MIB:.0f} | {estimate / MIB:.0f} | {off:+.1%} | {took:.1f} | {plan['time']['update']:.1f} |",
                flush=True,
            )
    print(f"\n{processor()}, {os.cpu_count()} processors; largest difference {worst:.1%}")
    if args.output:
        args.output.write_text(json.dumps({"processor": processor(), "runs": results}, indent=1) + "\n")
    if worst > args.bound:
        sys.exit(f"an estimate is off by {worst:.1%}, and at most {args.bound:.0%} are allowed")


if __name__ == "__main__":
    main()
