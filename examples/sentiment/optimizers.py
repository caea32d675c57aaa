"""The demo's PPO with each optimizer: does a small state cost score?

    python3 optimizers.py                              # after `make demo`; twelve runs, half an hour on two cores
    python3 optimizers.py --rlhf BINARY --from FOLDER --seeds 1 2

PPO from FOLDER/sft and FOLDER/reward (default: runs/sentiment), which the demo leaves, with each `--optim` and each seed. Prints the mean
score of the last tenth of the updates and writes results/optimizers.json. Exit code 1 if the mean over the seeds of one optimizer is
outside of what the seeds of `adamw_torch` span, by more than their standard deviation.

Python 3.9 or newer, standard library only.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results" / "optimizers.json"
# The first is what the others are compared with.
OPTIMIZERS = {"adamw_torch": [], "adamw_8bit": [], "adafactor": [], "adamw_bf16": ["--bf16"]}


def end(folder):
    """Mean score and mean KL of the last tenth of a run's updates."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "objective/scores" in row]
    last = rows[-max(1, round(len(rows) / 10)) :]
    return {name: statistics.mean(row[f"objective/{name}"] for row in last) for name in ("scores", "kl")}


def train(arguments, optim, seed, folder):
    """One run of PPO into `folder`."""
    start = pathlib.Path(arguments.start).resolve()
    places = ["--sft_model_path", start / "sft", "--reward_model_path", start / "reward", "--output_dir", folder]
    flags = ["--optim", optim, *OPTIMIZERS[optim], "--seed", seed, "--num_sample_generations", 0, "--no_report"]
    command = [pathlib.Path(arguments.rlhf).resolve(), "ppo", "--config", HERE / "ppo.yaml", *places, *flags]
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return end(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rlhf", default=ROOT / "target/release/rlhf")
    parser.add_argument("--from", dest="start", default=ROOT / "runs/sentiment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for optim in OPTIMIZERS:
            for seed in arguments.seeds:
                ended = train(arguments, optim, seed, pathlib.Path(scratch) / f"{optim}-{seed}")
                found.setdefault(optim, {})[seed] = ended
                print(f"{optim:12} seed {seed}: score {ended['scores']:+.2f}, KL {ended['kl']:.2f}", flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    means, usual = {}, [ended["scores"] for ended in found["adamw_torch"].values()]
    for optim, seeds in found.items():
        means[optim] = statistics.mean(ended["scores"] for ended in seeds.values())
        print(f"{optim:12} mean {means[optim]:+.2f}")
    spread = statistics.pstdev(usual)
    outside = [optim for optim, mean in means.items() if not min(usual) - spread <= mean <= max(usual) + spread]
    if outside:
        print(f"outside of the spread of adamw_torch's seeds: {', '.join(outside)}", file=sys.stderr)
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
