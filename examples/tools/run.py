"""The whole example: SFT, then GRPO and PPO side by side, with success on held-out tasks before and after, with and without tools.

    python3 examples/tools/run.py BINARY [--seeds 1] [--jobs 2] [--output_dir runs/tools]

BINARY is the built `rlhf`. Each run takes one core, and `--jobs` of them run at a time. Runs that have ended are not made again: remove their
folder for that. Prints a table and writes it to results.md and results.json of the output folder. Exit code 1 if a run fails or a number misses its
threshold.

Python 3.9 or newer, standard library only. Not for Windows.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import make_data

HERE = Path(__file__).resolve().parent
METHODS = ("grpo", "ppo")
# Shares of the held-out tasks that are solved: at most before training and ever without tools; at least after training.
MOST_BEFORE, LEAST_AFTER = 0.1, 0.6
SHOP, CLOSED = "eval/scores/Shop", "eval/scores/Closed"


class Failed(Exception):
    """A run that failed, or a file that is not as expected."""


def command(binary, stage, seed, data, folder):
    """The command line of a stage, to be run in this folder, where shop.py is."""
    line = [binary, stage, "--config", f"{stage}.yaml", "--seed", str(seed), "--output_dir", str(folder / stage), "--overwrite_output_dir"]
    if stage == "sft":
        model = ["--config_name", str(data / "model.json"), "--tokenizer_name", str(data / "tokenizer")]
        return line + model + ["--dataset_name", str(data / "demos.jsonl")]
    model = {"grpo": "--model_name_or_path", "ppo": "--sft_model_path"}[stage]
    return line + [model, str(folder / "sft"), "--dataset_name", str(data / "tasks")]


def run(binary, stage, seed, data, folder):
    """Runs a stage, unless it has ended before. Returns its seconds, and those of the processor."""
    times, log = folder / f"{stage}.times.json", folder / f"{stage}.log"
    if times.is_file() and (folder / stage).is_dir():
        return json.loads(times.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    times.unlink(missing_ok=True)
    began = time.time()
    with open(log, "w") as output:
        line = command(binary, stage, seed, data, folder)
        child = subprocess.Popen(line, cwd=HERE, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise Failed(f"seed {seed}, {stage}: exit code {child.returncode}: {''.join(last)} ({log})")
    found = {"seconds": round(time.time() - began, 1), "processor_seconds": round(used.ru_utime + used.ru_stime, 1)}
    times.write_text(json.dumps(found) + "\n")
    print(f"seed {seed}: {stage} took {found['seconds'] / 60:.1f} min", flush=True)
    return found


def evaluations(folder):
    """The evaluations of a run: solved shares of the held-out tasks with and without tools, first and last."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if SHOP in row and CLOSED in row]
    if len(rows) < 2:
        raise Failed(f"{path}: expected evaluations before and after training, found {len(rows)}")
    return [{"with": row[SHOP], "without": row[CLOSED]} for row in (rows[0], rows[-1])]


def misses(seed, method, before, after):
    """What does not reach its threshold, in words."""
    for when, found, key, holds, bound in [
        ("before training", before, "with", before["with"] <= MOST_BEFORE, f"at most {MOST_BEFORE:.0%}"),
        ("after training", after, "with", after["with"] >= LEAST_AFTER, f"at least {LEAST_AFTER:.0%}"),
        ("before training, without tools", before, "without", before["without"] <= MOST_BEFORE, f"at most {MOST_BEFORE:.0%}"),
        ("after training, without tools", after, "without", after["without"] <= MOST_BEFORE, f"at most {MOST_BEFORE:.0%}"),
    ]:
        if not holds:
            yield f"seed {seed}, {method}: solved {when}: expected {bound}, found {found[key]:.1%}"


def table(results):
    """The results in Markdown, a row for each seed."""
    head = "seed | before | GRPO | PPO | no tools, before | no tools, GRPO | no tools, PPO | minutes: SFT, GRPO, PPO | of the processor"
    lines = [f"| {head} |", "|" + "---:|" * (head.count("|") + 1)]
    for result in results:
        shares = [result["grpo"]["before"]["with"], *(result[method]["after"]["with"] for method in METHODS)]
        shares += [result["grpo"]["before"]["without"], *(result[method]["after"]["without"] for method in METHODS)]
        times = [
            ", ".join(f"{result['times'][stage][kind] / 60:.1f}" for stage in ("sft", *METHODS))
            for kind in ("seconds", "processor_seconds")
        ]
        lines.append("| " + " | ".join([str(result["seed"]), *(f"{share:.1%}" for share in shares), *times]) + " |")
    return "\n".join(lines) + "\n"


def train(binary, seeds, jobs, output):
    """Makes all runs. Returns their results by seed."""
    data = output / "data"
    make_data.write(data)
    folder = {seed: output / f"seed-{seed}" for seed in seeds}
    times = {seed: {} for seed in seeds}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for stages in [("sft",), METHODS]:
            waits = {(seed, stage): pool.submit(run, binary, stage, seed, data, folder[seed]) for seed in seeds for stage in stages}
            for (seed, stage), wait in waits.items():
                times[seed][stage] = wait.result()
    results = []
    for seed in seeds:
        found = {"seed": seed, "times": times[seed]}
        for method in METHODS:
            found[method] = dict(zip(("before", "after"), evaluations(folder[seed] / method)))
        results.append(found)
    return results


def arguments(given):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("binary", help="the built rlhf")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="the seeds [default: 1]")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each [default: 2]")
    parser.add_argument("--output_dir", type=Path, default=HERE.parents[1] / "runs" / "tools", help="folder of the runs [default: runs/tools]")
    found = parser.parse_args(given)
    found.binary = shutil.which(found.binary) or parser.error(f"{found.binary}: no such program; build it with: cargo build --release")
    found.binary = os.path.abspath(found.binary)
    if found.jobs < 1:
        parser.error(f"--jobs: expected at least 1, found {found.jobs}")
    return found


def main(given):
    asked = arguments(given)
    output = asked.output_dir.resolve()
    began = time.time()
    try:
        results = train(asked.binary, asked.seeds, asked.jobs, output)
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (output / "results.md").write_text(table(results))
    print(f"\nShare of the held-out tasks that are solved:\n\n{table(results)}")
    print(f"{(time.time() - began) / 60:.1f} minutes, {output / 'results.json'}")
    missed = [miss for result in results for method in METHODS for miss in misses(result["seed"], method, **result[method])]
    for miss in missed:
        print(f"error: {miss}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
