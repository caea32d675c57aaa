"""Compares rlhf with TRL and transformers on this machine; README.md describes the comparison.

    bench.py cells                  lists the cells of the benchmark
    bench.py run [CELL ...]         measures cells, all by default; writes results/DATE-COMMIT.json and the table
    bench.py table                  writes the table again from the files of results/, for each cell and kind
                                    of processor from the newest

A CELL may be a pattern: 'update/*' is every cell of updates.
"""

import argparse
import fnmatch
import json
import os
import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path

import runs
import table
from models import SIZES, prompt_lengths, write_prompts
from runs import HERE, Failed, GrpoJob, Job

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent / "target"))
WORK = TARGET / "bench"
RESPONSE = 53
# Rows of a micro-batch, and micro-batches of an update.
BATCHES = {"s": (16, 2), "m": (8, 2)}
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
# The same for the pretrained model, and its response length. GRPO's micro-batch is two groups.
PRETRAINED, PRETRAINED_RESPONSE = {"grpo": (16, 2), "ppo": (8, 2)}, 40
# Batch sizes of generation, and how many batches of each, the first not counted.
GENERATE = {1: 9, 16: 4, 32: 4}
# Mean response length of a tuned model if there were no limit.
EARLY = RESPONSE // 3


class Bench:
    """State shared by the cells: the binary, the number of repetitions, the models created so far."""

    def __init__(self, args):
        self.binary, self.rounds, self.updates = args.rlhf, args.rounds, args.updates
        self.made = set()

    def models(self, size, mean_length=None):
        """A folder with a policy and a reward model, created again in each invocation."""
        folder = WORK / (f"{size}-early" if mean_length else size)
        if folder not in self.made:
            say(f"making the models {folder}")
            shutil.rmtree(folder, ignore_errors=True)
            command = [sys.executable, HERE / "models.py", folder, size]
            runs.watch(command + (["--mean_length", mean_length] if mean_length else []))
            self.made.add(folder)
        return folder

    def pretrained(self):
        """A folder with SmolLM2-135M-Instruct, a reward model made from it, and prompts, created again in each invocation."""
        folder = WORK / "smollm2"
        if folder not in self.made:
            say(f"making the models {folder}")
            shutil.rmtree(folder, ignore_errors=True)
            runs.watch([sys.executable, HERE / "smollm2.py", folder])
            self.made.add(folder)
        return folder

    def pretrained_job(self, trainer, lora):
        """A run of `trainer` with the pretrained model; each update uses each of its prompts once."""
        folder, (batch, accumulation) = self.pretrained(), PRETRAINED[trainer]
        kind, epochs = {"grpo": (GrpoJob, 1), "ppo": (Job, 2)}[trainer]
        return kind(
            folder,
            folder / f"{trainer}.jsonl",
            batch,
            accumulation,
            self.updates or 4,
            PRETRAINED_RESPONSE,
            epochs=epochs,
            never_stops=True,
            lora=lora,
        )

    def prompts(self, size, count):
        path = WORK / f"prompts-{size}-{count}.jsonl"
        write_prompts(path, prompt_lengths(count), SIZES[size].vocab)
        return path

    def job(self, size, models=None, accumulation=None, updates=None, response_length=RESPONSE):
        batch, usual = BATCHES[size]
        accumulation = accumulation or usual
        updates = self.updates or updates or (4 if size == "s" else 3)
        models, prompts = models or self.models(size), self.prompts(size, batch * accumulation)
        return Job(models, prompts, batch, accumulation, updates, response_length)

    def repeated(self, measure):
        """The runs of every round."""
        found = []
        for number in range(1, self.rounds + 1):
            for run in measure():
                found.append({"round": number} | run)
                say(f"round {number}: {table.one_line(run)}")
        return found


def update(bench, size, precision):
    """Updates of both programs, alternating, so that a ratio compares runs that are close in time."""
    job = bench.job(size)
    lengths = prompt_lengths(job.episodes)
    tokens = round(sum(lengths) / job.accumulation) + job.batch * (RESPONSE - 1)
    flops = SIZES[size].optimise_flops(lengths, RESPONSE, runs.EPOCHS)

    def measure():
        yield job.trl(table.THEIRS[precision])
        rate = runs.gemm_rate(size, DTYPES[precision], tokens, job.batch * RESPONSE)
        yield job.rlhf(bench.binary, precision) | {"gemm": rate, "optimise_flops": flops}
        if precision == "bf16":
            yield job.rlhf(bench.binary, "bf16-weights")
            yield job.trl("bf16-flag")

    return bench.repeated(measure)


def from_python(bench, trainer):
    """Updates by the command line and by the Python package's trainers with a small model: the less an update takes, the more a second
    process would show. Their order changes from round to round."""
    job = bench.job("s", updates=6)
    if trainer == "grpo":
        # The function of the script scores texts, and so does the rule.
        prompts = WORK / "prompts-s-texts.jsonl"
        with open(job.prompts) as lines, open(prompts, "w") as file:
            for line in lines:
                print(json.dumps({"prompt": " ".join(f"w{token}" for token in json.loads(line)["input_ids"])}), file=file)
        job = GrpoJob(job.models, prompts, job.batch, job.accumulation, job.updates, job.response_length)
    ways = [job.rlhf, job.python]

    def measure():
        for way in ways:
            yield way(bench.binary, "f32")
        ways.reverse()

    return bench.repeated(measure)


def pretrained(bench, trainer, precision, trained):
    """Updates of both programs with SmolLM2-135M-Instruct, alternating."""
    job = bench.pretrained_job(trainer, trained == "lora")

    def measure():
        yield job.trl(table.THEIRS[precision])
        yield job.rlhf(bench.binary, precision)
        if precision == "f32":
            yield job.python(bench.binary, precision)
        if precision == "bf16":
            # Adapters are f32 in each mode.
            if trained == "full":
                yield job.rlhf(bench.binary, "bf16-weights")
            yield job.trl("bf16-flag")

    return bench.repeated(measure)


def generate(bench, size, precision):
    """Tokens per second of both programs, batch size by batch size."""
    most = max(batch * count for batch, count in GENERATE.items())
    model, prompts = bench.models(size) / "policy", bench.prompts(size, most)
    dtype = DTYPES[precision]

    def measure():
        theirs = runs.transformers_rates(model, prompts, dtype, GENERATE, RESPONSE)
        for batch, count in GENERATE.items():
            ours = runs.rlhf_rate(bench.binary, model, prompts, dtype, batch, count, RESPONSE)
            yield {"batch": batch, "transformers": theirs[batch], "rlhf": ours}

    return bench.repeated(measure)


def growth(bench, size):
    """rlhf with up to four times the episodes, then with up to four times the response length."""
    usual = BATCHES[size][1]

    def measure():
        for times in (1, 2, 4):
            job = bench.job(size, accumulation=usual * times, updates=3)
            yield job.rlhf(bench.binary, "f32") | {"episodes": job.episodes, "limit": RESPONSE}
        for times in (2, 4):
            job = bench.job(size, response_length=RESPONSE * times, updates=3)
            yield job.rlhf(bench.binary, "f32") | {"episodes": job.episodes, "limit": RESPONSE * times}

    return bench.repeated(measure)


def early(bench, size):
    """Both programs with responses that never stop, and with responses that stop on average after a third of the limit."""
    models = {"never": bench.models(size), "early": bench.models(size, EARLY)}
    lengths = prompt_lengths(BATCHES[size][0] * BATCHES[size][1])

    def measure():
        for stops, folder in models.items():
            job = bench.job(size, models=folder)
            for run in (job.trl("f32"), job.rlhf(bench.binary, "f32")):
                yield run | {"stops": stops, "prompt_length": sum(lengths) / len(lengths)}

    return bench.repeated(measure)


def ranks(bench, size):
    """rlhf with its rows divided over ranks, at each stage of ZeRO; one rank of two threads is the comparison."""
    job = bench.job(size)

    def measure():
        yield job.rlhf_ranks(bench.binary, 1, 2, 0)
        for number in (1, 2, 4):
            for stage in (0, 1, 2, 3) if number > 1 else (0,):
                yield job.rlhf_ranks(bench.binary, number, 1, stage)

    return bench.repeated(measure)


CELLS = {
    **{f"update/{size}/{precision}": (update, size, precision) for size in BATCHES for precision in DTYPES},
    **{f"generate/{size}/{precision}": (generate, size, precision) for size in BATCHES for precision in DTYPES},
    **{
        f"{trainer}/smollm2/{precision}/{trained}": (pretrained, trainer, precision, trained)
        for trainer in PRETRAINED
        for precision in DTYPES
        for trained in ("full", "lora")
    },
    **{f"python/{trainer}/s": (from_python, trainer) for trainer in PRETRAINED},
    "growth/s": (growth, "s"),
    "early/s": (early, "s"),
    "ranks/s": (ranks, "s"),
}


def chosen(patterns):
    """The cells that any of the patterns names, in their own order."""
    for pattern in patterns:
        if not fnmatch.filter(CELLS, pattern):
            raise Failed(f"no cell {pattern!r}; the cells are {', '.join(CELLS)}")
    return [cell for cell in CELLS if any(fnmatch.fnmatch(cell, pattern) for pattern in patterns or ["*"])]


def run(args):
    cells = chosen(args.cells)
    if args.rounds < 1 or (args.updates or 2) < 2:
        raise Failed("expected one round at least, and two updates, of which the first is not counted")
    if not os.access(args.rlhf, os.X_OK):
        raise Failed(f"{args.rlhf}: no such program; 'cargo build --release --locked' builds it, --rlhf names another")
    WORK.mkdir(parents=True, exist_ok=True)
    args.results.mkdir(parents=True, exist_ok=True)
    now, commit = datetime.now(timezone.utc), runs.commit()
    report = {
        "date": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "commit": commit,
        "machine": runs.machine(),
        "versions": runs.versions(args.rlhf),
        "cells": {},
    }
    path = args.results / f"{now:%Y-%m-%dT%H%M%S}-{commit}.json"
    bench, failed = Bench(args), []
    for cell in cells:
        say(f"{cell} (load {os.getloadavg()[0]:.1f})")
        experiment, *settings = CELLS[cell]
        try:
            report["cells"][cell] = experiment(bench, *settings)
        except Failed as error:
            failed.append(cell)
            say(f"{cell}: {error}")
            continue
        # Written after each cell, so that later failures lose no measurement.
        path.write_text(json.dumps(report, indent=1) + "\n")
        table.write(args.results)
        say(f"wrote {path} and {args.results / table.NAME}")
    if failed:
        raise Failed(f"{', '.join(failed)}: not measured, see above")


def say(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("cells", help="list the cells")
    measure = commands.add_parser("run", help="measure cells")
    measure.add_argument("cells", nargs="*", metavar="CELL")
    measure.add_argument("--rounds", type=int, default=3, help="repetitions of each cell (default 3)")
    measure.add_argument("--updates", type=int, help="updates of each run, the first not counted (default 4 or 3)")
    measure.add_argument("--rlhf", type=Path, default=TARGET / "release" / "rlhf", help="the program")
    write = commands.add_parser("table", help="write the table again")
    for command in (measure, write):
        command.add_argument("--results", type=Path, default=HERE / "results", help="folder of the results")
    args = parser.parse_args()
    try:
        if args.command == "cells":
            print("\n".join(CELLS))
        elif args.command == "table":
            table.write(args.results)
        else:
            run(args)
    except Failed as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
