"""The parts of the peak of PPO with a base in 4 bits, LoRA and a shared trunk, one by one: measured and planned.

    python benchmarks/addends.py --model SmolLM2-135M-Instruct               # half an hour on two cores, 2.5 GB of memory
    python benchmarks/addends.py --model SmolLM2-135M-Instruct adapters      # a part of it

The run of docs/guides/plan.md's table for 7B, at a size that runs anywhere. Each row changes one flag and compares two differences: that of the peaks of two
real runs (the largest resident memory, Linux's VmHWM), and that of their plans. What both runs have, libtorch above all, cancels out. Fails if a
difference is off by more than --bound of the larger plan. Beside other work a peak can be a tenth higher.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from plan import ROOT, SMOLLM2, in_mib, peak_and_plan, processor

FLAGS = {
    "dataset_name": SMOLLM2 / "reviews.jsonl",
    "reward": "length:target=20",
    "num_ppo_epochs": 1,
    "num_mini_batches": 1,
    "num_sample_generations": 0,
    "use_peft": "true",
    "lora_target_modules": "all-linear",
    "load_in_4bit": "true",
    "use_bnb_nested_quant": "true",
    "value_head": "true",
    "gradient_checkpointing": "true",
    "bf16": "true",
    "no_report": "true",
    "device": "cpu",
    "seed": 1,
    # 32 rows of about 80 tokens in one micro-batch.
    "train_batch_size": 32,
    "total_episodes": 64,
    "response_length": 32,
    "local_rollout_forward_batch_size": 8,
    "max_tokens_per_micro_batch": 4096,
}
LONG = {"train_batch_size": 64, "response_length": 192, "max_tokens_per_micro_batch": 512}
# Name of the part, flags of the run that takes less, and flags of the one that takes more.
PARTS = {
    "base": ("matrices of the base in bf16 instead of 4 bits", {}, {"load_in_4bit": "false", "use_bnb_nested_quant": "false"}),
    "adapters": ("adapters, their gradients and moments: rank 128 instead of 16", {}, {"lora_r": 128}),
    "trunk": ("a value model of its own instead of a head, rank 128", {"lora_r": 128}, {"lora_r": 128, "value_head": "false"}),
    "activations": ("what each layer keeps instead of its input alone", {}, {"gradient_checkpointing": "false"}),
    "tokens": ("a micro-batch of at most 4096 tokens instead of 768", {"max_tokens_per_micro_batch": 768}, {}),
    "cache": ("keys and values of 64 rows instead of 8", LONG, LONG | {"local_rollout_forward_batch_size": 64}),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--model", type=Path, default=ROOT / "runs/smollm2/SmolLM2-135M-Instruct")
    parser.add_argument("--rlhf", default=str(ROOT / "target/release/rlhf"))
    parser.add_argument("--bound", type=float, default=0.15)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        sys.exit(f"no such part: {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        print("| one flag changed | measured, MiB | plan | peaks, MiB | plans, MiB | phase |\n|---|---:|---:|---:|---:|---|")
        for part in args.parts or PARTS:
            name, *sides = PARTS[part]
            peaks, plans, phases = [], [], []
            for changed in sides:
                flags = {"sft_model_path": args.model} | FLAGS | changed | {"output_dir": scratch / "out"}
                line = ["ppo", *(f"--{flag}={value}" for flag, value in flags.items())]
                peak, plan = peak_and_plan(args.rlhf, line, scratch / "log")
                peaks.append(peak)
                plans.append(plan["memory"]["peak"])
                phases.append(plan["memory"]["peak_phase"])
            found, planned = (of[1] - of[0] for of in (peaks, plans))
            worst = max(worst, abs(planned - found) / plans[1])
            row = [name, in_mib([found]), in_mib([planned]), in_mib(peaks), in_mib(plans), " and ".join(dict.fromkeys(phases))]
            print(f"| {' | '.join(row)} |", flush=True)
    print(f"\n{processor()}; largest difference {worst:.1%} of the larger plan")
    if worst > args.bound:
        sys.exit(f"a part is off by {worst:.1%} of the plan, and at most {args.bound:.0%} are allowed")


if __name__ == "__main__":
    main()
