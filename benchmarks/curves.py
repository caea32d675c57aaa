"""Learning curves of rlhf and of TRL on the same task: mean score against samples, seconds and processor-seconds.

    benchmarks/curves.sh run --rlhf target/release/rlhf [--trainers ppo grpo] [--seeds 1 2 3]
    benchmarks/curves.sh draw               writes docs/images/curves.svg and results/curves/README.md
    benchmarks/curves.sh draw --check       compares them; exit code 1 if one differs

The task is that of examples/sentiment: its model of 4 million parameters after SFT continues film reviews. PPO is that of trl 1.11
(`PPOTrainer`), with the example's reward model; GRPO that of trl 1.16 (`GRPOTrainer`), with the balance of positive and negative words
(curves_reward.py). Each has TRL's defaults but for the settings below, which both programs get under the same names. Each run writes results/curves/TRAINER-SYSTEM-SEED.jsonl when it ends; a later call does only
what is missing, so delete a file to repeat its run. A seed of PPO takes both about 4 minutes on two cores; nothing else may run meanwhile.

Standard library only: TRL runs as another process (curves_trl.py).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results/curves"
IMAGE, PAGE = ROOT / "docs/images/curves.svg", RESULTS / "README.md"
SENTIMENT = ROOT / "examples/sentiment"
WORK = ROOT / "runs/curves"
THREADS = len(os.sched_getaffinity(0))

# Settings by the names that both programs have for them.
SETTINGS = {
    "ppo": {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
        "total_episodes": 1536,
        "response_length": 48,
        "stop_token": "eos",
        "missing_eos_penalty": 1.0,
        "temperature": 0.7,
        "kl_coef": 0.5,
        "learning_rate": 7e-5,
        "lr_scheduler_type": "linear",
    },
    "grpo": {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_steps": 48,
        "max_completion_length": 48,
        "temperature": 0.7,
        "beta": 0.05,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "linear",
        "bf16": False,
        "gradient_checkpointing": False,
    },
}
# Responses of an update, in all settings above.
SAMPLES = 64
PYTHON = {"ppo": ROOT / ".venv-bench/bin/python", "grpo": ROOT / ".venv-interop/bin/python"}
SCORE = {"ppo": "objective/scores", "grpo": "reward"}
TITLES = {"ppo": "PPO", "grpo": "GRPO"}
NAMES = {"trl": {"ppo": "TRL 1.11", "grpo": "TRL 1.16"}, "rlhf": {"ppo": "rlhf", "grpo": "rlhf"}}


def prepare(rlhf):
    """The folders of the SFT model and of the reward model, which the first call trains as the demo does, with seed 1."""
    policy, reward = WORK / "sft", WORK / "reward"
    stages = [
        ("sft", policy, []),
        ("reward", reward, ["--model_name_or_path", policy]),
    ]
    for stage, folder, more in stages:
        if not (folder / "model.safetensors").is_file():
            print(f"curves: {stage}, as the demo trains it, into {folder}", flush=True)
            command = [rlhf, stage, "--config", SENTIMENT / f"{stage}.yaml", "--output_dir", folder, "--overwrite_output_dir", *more]
            subprocess.run(list(map(str, command)), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return policy, reward


def command(trainer, system, seed, rlhf, policy, reward):
    """The command line of one run."""
    settings = SETTINGS[trainer] | {"seed": seed}
    prompts = SENTIMENT / "data/prompts.jsonl"
    output = WORK / f"{trainer}-{system}-{seed}"
    if system == "trl":
        settings["output_dir"] = str(output)
        return [
            PYTHON[trainer], HERE / "curves_trl.py", trainer, "--policy", policy, "--reward", reward, "--prompts", prompts,
            "--settings", json.dumps(settings), "--threads", THREADS,
        ]
    models = {
        "ppo": ["--sft_model_path", policy, "--reward_model_path", reward, "--num_sample_generations", 0],
        "grpo": ["--model_name_or_path", policy, "--reward_funcs", "curves_reward.mood"],
    }[trainer]
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value).lower() if isinstance(value, bool) else value)]
    return [
        rlhf, trainer, *models, "--dataset_name", prompts, "--output_dir", output, "--overwrite_output_dir", "--save_strategy", "no", *flags,
    ]


def processor_seconds(process):
    """The processor time of a running process and of its threads, in user and system mode."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run(trainer, system, line):
    """Runs a command line; returns a row for each update: samples, score, seconds and processor-seconds since the start of the program."""
    began, rows = time.perf_counter(), []
    log = (WORK / f"{trainer}-{system}.log").open("w")
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    with subprocess.Popen(list(map(str, line)), cwd=HERE, stdout=subprocess.PIPE, stderr=log, text=True, env=env) as process:
        for text in process.stdout:
            values = json.loads(text) if text.startswith('{"') else {}
            score = values.get("score" if system == "trl" else SCORE[trainer])
            if score is None:
                continue
            seconds, busy = time.perf_counter() - began, processor_seconds(process)
            rows.append({"samples": SAMPLES * (len(rows) + 1), "score": score, "seconds": round(seconds, 3), "cpu_seconds": round(busy, 2)})
    if process.returncode:
        sys.exit(f"curves: {trainer} of {system} ended with exit code {process.returncode}: see {log.name}")
    return rows


def processor():
    """The name of the processor, and its number of cores here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "an unknown processor")
    return f"{THREADS} cores of {name.replace('(R)', '').replace(' Processor', '')}"


def run_all(args):
    WORK.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    models = prepare(args.rlhf)
    for trainer in args.trainers:
        for seed in args.seeds:
            for system in NAMES:
                file = RESULTS / f"{trainer}-{system}-{seed}.jsonl"
                if file.is_file():
                    continue
                rows = run(trainer, system, command(trainer, system, seed, args.rlhf, *models))
                rows[0] |= {"processor": processor(), "load": round(os.getloadavg()[0], 1)}
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))
                print(
                    f"curves: {trainer} of {NAMES[system][trainer]}, seed {seed}: {len(rows)} updates, score {rows[0]['score']:.2f} to "
                    f"{rows[-1]['score']:.2f} in {rows[-1]['seconds']:.0f} s", flush=True,
                )


def curves(trainer, system):
    """The rows of each seed that has run, by seed."""
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(RESULTS.glob(f"{trainer}-{system}-*.jsonl"))]


def ran():
    """The trainers of which both systems have runs."""
    return [trainer for trainer in SETTINGS if all(curves(trainer, system) for system in NAMES)]


def ends(rows):
    """The mean scores of the first and of the last tenth of the updates."""
    count = max(1, len(rows) // 10)
    return mean(row["score"] for row in rows[:count]), mean(row["score"] for row in rows[-count:])


def table():
    """The lines of the table: gain in deviations of the seeds, seconds, processor-seconds."""
    lines = ["| | score at the start | at the end | gain, in deviations of the seeds | seconds | processor-seconds |", "|---|---:|---:|---:|---:|---:|"]
    for trainer in ran():
        for system, names in NAMES.items():
            runs = curves(trainer, system)
            if len(runs) < 2:
                continue
            starts, finals = zip(*map(ends, runs))
            spread = max(stdev(starts), stdev(finals))
            gain = (mean(finals) - mean(starts)) / spread
            seconds, busy = (mean(rows[-1][key] for rows in runs) for key in ("seconds", "cpu_seconds"))
            lines.append(
                f"| {TITLES[trainer]}, {names[trainer]} | {mean(starts):.2f} ± {stdev(starts):.2f} | {mean(finals):.2f} ± {stdev(finals):.2f} | "
                f"{gain:.1f} | {seconds:.0f} | {busy:.0f} |"
            )
    return lines


def page():
    """The page of the results."""
    seeds = ", ".join(f"{len(curves(trainer, 'trl'))} of {TITLES[trainer]}" for trainer in ran())
    missing = "".join(f"Those of {TITLES[trainer]} have not run yet. " for trainer in SETTINGS if trainer not in ran()).strip()
    machines = {}
    for trainer in ran():
        for seed, rows in enumerate(curves(trainer, "rlhf"), 1):
            machines.setdefault(rows[0]["processor"], []).append(f"{TITLES[trainer]} {seed}")
    machines = "; ".join(f"{name}: {', '.join(runs)}" for name, runs in machines.items())
    return "\n".join([
        "# The same curve, less time",
        "",
        "Mean scores by rlhf and by TRL on one task, with the same model, prompts and settings, written by",
        "[curves.py](../../curves.py), which says what is compared. The scores of both systems are from samples of their own, so single runs differ as",
        "their seeds do.",
        "",
        "![Mean score against samples, seconds and processor-seconds](../../../docs/images/curves.svg)",
        "",
        *table(),
        "",
        f"Seeds: {seeds}. {missing}".strip(),
        "",
        "Start and end are the means of the first and of the last tenth of the updates, with the standard deviation of the seeds. Seconds are those of the",
        "whole command, the start of Python and the loading of models included. Both programs ran each seed on one machine:",
        f"{machines}.",
        "",
        "    benchmarks/curves.sh run --rlhf target/release/rlhf && benchmarks/curves.sh draw",
        "",
    ])


WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 880, 236, 170
LEFTS, TOPS = (52, 340, 628), (72, 312)
AXES = (("samples", "samples"), ("seconds", "seconds"), ("cpu_seconds", "processor-seconds"))
STYLE = """
  .background { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 12px }
  .grid { stroke: #d0d7de }
  .rlhf { stroke: #0969da } .trl { stroke: #bc4c00; stroke-dasharray: 6 3 }
  .curve { fill: none; stroke-width: 2 } .seed { fill: none; stroke-width: 1; opacity: .35 }
  @media (prefers-color-scheme: dark) {
    .background { fill: #0d1117; stroke: #3d444d }
    text { fill: #f0f6fc }
    .grid { stroke: #3d444d }
    .rlhf { stroke: #4493f8 } .trl { stroke: #f0883e }
  }
"""


def smooth(values, window=5):
    """Means over at most `window` values that end at each."""
    return [mean(values[max(0, at - window + 1) : at + 1]) for at in range(len(values))]


def ticks(low, high, count=4):
    """Round numbers between two values."""
    raw = (high - low) / count
    unit = 10 ** len(str(int(raw))) / 10 if raw >= 1 else 0.1
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10, 20) if unit * factor >= raw)
    first = -(-low // step)
    return [step * at for at in range(int(first), int(high // step) + 1)]


def text(x, y, words, anchor="middle", kind=""):
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def panel(trainer, key, title, left, top):
    """One plot: each seed thin, their mean thick, of both systems."""
    runs = {system: curves(trainer, system) for system in NAMES}
    scores = [value for rows in sum(runs.values(), []) for value in smooth([row["score"] for row in rows])]
    low, high = min(scores), max(scores)
    last = max(rows[-1][key] for rows in sum(runs.values(), []))

    def point(x, y):
        return f"{left + PANEL_WIDTH * x / last:.1f},{top + PANEL_HEIGHT * (high - y) / (high - low):.1f}"

    lines = [text(left, top - 12, f"{TITLES[trainer]} score by {title}", "start", "title")]
    for value in ticks(low, high):
        y = round(top + PANEL_HEIGHT * (high - value) / (high - low), 1)
        lines += [f'<line class="grid" x1="{left}" y1="{y}" x2="{left + PANEL_WIDTH}" y2="{y}"/>', text(left - 7, y + 4, f"{value:g}", "end")]
    for value in ticks(0, last):
        lines.append(text(round(left + PANEL_WIDTH * value / last, 1), top + PANEL_HEIGHT + 20, f"{value:g}"))
    for system, seeds in runs.items():
        drawn = [(rows, smooth([row["score"] for row in rows])) for rows in seeds]
        for rows, values in drawn:
            points = " ".join(point(row[key], value) for row, value in zip(rows, values))
            lines.append(f'<polyline class="seed {system}" points="{points}"/>')
        means = zip(*(([row[key] for row in rows], values) for rows, values in drawn))
        across, along = (list(map(mean, zip(*each))) for each in means)
        points = " ".join(point(x, y) for x, y in zip(across, along))
        lines.append(f'<polyline class="curve {system}" points="{points}"/>')
    return lines


def draw():
    height = TOPS[len(ran()) - 1] + PANEL_HEIGHT + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        "<title>The same task by rlhf and by TRL: mean score against samples, seconds and processor-seconds, for each seed and their mean</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="background" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
    ]
    for at, (system, words) in enumerate((("rlhf", "rlhf"), ("trl", "TRL (1.11 for PPO, 1.16 for GRPO)"))):
        x = LEFTS[0] + 100 * at
        lines += [f'<line class="curve {system}" x1="{x}" y1="24" x2="{x + 24}" y2="24"/>', text(x + 30, 28, words, "start")]
    for trainer, top in zip(ran(), TOPS):
        for (key, title), left in zip(AXES, LEFTS):
            lines += panel(trainer, key, title, left, top)
    return "\n".join(lines + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="do the runs that are missing")
    runs.add_argument("--rlhf", required=True, type=lambda path: str(Path(path).resolve()), help="the built program")
    runs.add_argument("--trainers", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    runs.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    drawing = commands.add_parser("draw", help="draw what has run, with a table")
    drawing.add_argument("--check", action="store_true", help="compare them instead")
    args = parser.parse_args()
    if args.command == "run":
        run_all(args)
    elif args.check:
        for file, text in ((IMAGE, draw()), (PAGE, page())):
            if not file.is_file() or file.read_text() != text:
                sys.exit(f"{file}: differs from the results; run benchmarks/curves.sh draw and look at the difference")
    else:
        IMAGE.write_text(draw())
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
