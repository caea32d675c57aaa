"""The results as Markdown: for each cell and each kind of processor the newest of the files of raw numbers."""

import json
import re
from statistics import median

from models import SIZES

NAME = "README.md"

# Targets: (gate, stretch) of the median over the rounds.
UPDATE = {"f32": (2.0, 2.5), "bf16-weights": (2.5, 3.3), "bf16-flag": (4, 5)}
GENERATE, GENERATE_ONE = (2.5, 3.5), (1.3, 2)
MEMORY = {("s", "f32"): (0.5, 0.4), ("m", "f32"): (0.55, 0.4), ("s", "bf16"): (0.5, None), ("m", "bf16"): (0.9, 0.75)}
GEMM = (0.70, 0.85)
# Of SmolLM2-135M-Instruct, in each cell.
PRETRAINED_UPDATE, PRETRAINED_MEMORY = (2.0, 3.0), (0.6, None)
# Of updates from Python, in those of the command line.
FROM_PYTHON = (1.03, 1.01)

MODES = {
    ("TRL", "f32"): "TRL, f32",
    ("rlhf", "f32"): "rlhf, f32",
    ("Python", "f32"): "rlhf from Python, f32",
    ("TRL", "bf16-weights"): "TRL, bf16 weights, gradients and Adam states",
    ("rlhf", "bf16"): "rlhf, bf16 compute; f32 master weights, gradients and Adam states",
    ("rlhf", "bf16-weights"): "rlhf, bf16 weights, gradients and Adam states (`--optim adamw_bf16`)",
    ("TRL", "bf16-flag"): "TRL, `bf16=True`",
    ("TRL", "autocast"): "TRL, `bf16=True`; f32 weights, frozen models bf16",
}
# For adapters too, which are f32 in each mode.
SHORT_MODES = MODES | {
    ("TRL", "bf16-weights"): "TRL, bf16 weights",
    ("rlhf", "bf16"): "rlhf, bf16",
    ("rlhf", "bf16-weights"): "rlhf, bf16 weights (`--optim adamw_bf16`)",
}

# The comparisons of each precision of a cell: modes of rlhf and of TRL.
COMPARED = {
    "f32": [("f32", "f32")],
    "bf16": [("bf16", "bf16-weights"), ("bf16-weights", "bf16-weights"), ("bf16", "bf16-flag")],
}
# TRL's mode that each precision of rlhf is compared with first.
THEIRS = {precision: compared[0][1] for precision, compared in COMPARED.items()}

# What a processor multiplies with, the widest first: flags of Linux, and their name.
VECTORS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 bf16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve": "SVE",
    "asimd": "NEON",
}
# AMD's names of processors with AVX-512 do not tell the generations apart; families do. Zen 5 does twice as many products at once.
GENERATIONS = {25: "Zen 4", 26: "Zen 5"}


def processor(machine):
    """The kind of processor of a report's machine: its name, its generation where the name says nothing of it, and its widest vector
    instructions."""
    # Intel's virtual machines say "Intel(R) Xeon(R) Processor", its others "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz".
    name = re.sub(r"\((R|TM)\)| (CPU|Processor)\b| @.*", "", machine["cpu"])
    if "vectors" not in machine:
        return f"{name}, vector instructions unknown"
    if name.startswith("AMD") and "avx512f" in machine["vectors"] and machine.get("family") in GENERATIONS:
        name += f" ({GENERATIONS[machine['family']]})"
    return f"{name}, {next((words for flag, words in VECTORS.items() if flag in machine['vectors']), 'no vectors')}"


def newest(folder):
    """Returns the newest report of each cell on each kind of processor: {processor: {cell: (report, runs)}}."""
    reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    found = {}
    for report in sorted(reports, key=lambda report: report["date"]):
        cells = found.setdefault(processor(report["machine"]), {})
        cells |= {cell: (report, runs) for cell, runs in report["cells"].items()}
    return dict(sorted(found.items()))


def rounds(runs, *wanted):
    """Yields, for each round that has them, the first runs that match each of `wanted`."""
    for number in sorted({run["round"] for run in runs}):
        of_round = [run for run in runs if run["round"] == number]
        found = [next((run for run in of_round if want.items() <= run.items()), None) for want in wanted]
        if None not in found:
            yield found


def words(precision):
    """A precision in the names of comparisons."""
    return precision.replace("-", " ")


def gemm_fraction(run):
    """Share of the machine's rate of matrix products that an optimise phase reached."""
    return run["optimise_flops"] / median(run["optimise"]) / (run["gemm"]["gflops"] * 1e9)


def targets(cells):
    """Yields (name, (gate, stretch), lower is better, numbers of the rounds) for each target that was measured."""
    runs = {cell: runs for cell, (_, runs) in cells.items()}
    sizes = ("s", "m")
    for precision, compared in COMPARED.items():
        for ours, theirs in compared:
            for size in sizes:
                pairs = rounds(
                    runs.get(f"update/{size}/{precision}", []),
                    {"program": "TRL", "precision": theirs},
                    {"program": "rlhf", "precision": ours},
                )
                numbers = [median(trl["update"]) / median(rlhf["update"]) for trl, rlhf in pairs]
                yield f"update, {size}: {words(ours)} against TRL {words(theirs)}", UPDATE[theirs], False, numbers
    for size in sizes:
        for precision in ("f32", "bf16"):
            of_cell = runs.get(f"generate/{size}/{precision}", [])
            for batch in sorted({run["batch"] for run in of_cell}):
                aim = GENERATE if batch > 1 else GENERATE_ONE if size == "m" else (None, None)
                numbers = [run["rlhf"] / run["transformers"] for [run] in rounds(of_cell, {"batch": batch})]
                yield f"generation, {size}: {precision}, batch {batch}", aim, False, numbers
    for (size, precision), aim in MEMORY.items():
        pairs = rounds(
            runs.get(f"update/{size}/{precision}", []),
            {"program": "TRL", "precision": THEIRS[precision]},
            {"program": "rlhf", "precision": precision},
        )
        numbers = [rlhf["peak_bytes"] / trl["peak_bytes"] for trl, rlhf in pairs]
        yield f"peak memory, {size}: {precision} against TRL's", aim, True, numbers
    for size in sizes:
        for precision in ("f32", "bf16"):
            numbers = [
                gemm_fraction(run)
                for [run] in rounds(
                    runs.get(f"update/{size}/{precision}", []), {"program": "rlhf", "precision": precision}
                )
            ]
            aim = GEMM if (size, precision) == ("m", "f32") else (None, None)
            yield f"fraction of the GEMM rate while optimising, {size}: {precision}", aim, False, numbers


def pretrained_pairs(cells):
    """Yields (name of the comparison, TRL's run and rlhf's in each round) for the cells of the pretrained model."""
    for trainer in ("grpo", "ppo"):
        for precision, compared in COMPARED.items():
            for trained in ("full", "lora"):
                cell = f"{trainer}/smollm2/{precision}/{trained}"
                _, runs = cells.get(cell, (None, []))
                for ours, theirs in compared:
                    wanted = [{"program": "TRL", "precision": theirs}, {"program": "rlhf", "precision": ours}]
                    with_ours = "" if ours == precision else f" with {words(ours)}"
                    yield f"{cell}{with_ours} against TRL {words(theirs)}", list(rounds(runs, *wanted))


def pretrained_targets(cells):
    """Yields the targets of the pretrained model's cells, as `targets` does."""
    for name, pairs in pretrained_pairs(cells):
        numbers = [median(trl["update"]) / median(rlhf["update"]) for trl, rlhf in pairs]
        yield f"update, {name}", PRETRAINED_UPDATE, False, numbers
    for name, pairs in pretrained_pairs(cells):
        numbers = [rlhf["peak_bytes"] / trl["peak_bytes"] for trl, rlhf in pairs]
        yield f"peak memory, {name}", PRETRAINED_MEMORY, True, numbers


def python_targets(cells):
    """Yields the targets of runs from Python, as `targets` does."""
    names = [name for name in cells if name.startswith("python/") or "/smollm2/f32/" in name]
    for name in sorted(names):
        pairs = rounds(cells[name][1], {"program": "rlhf", "precision": "f32"}, {"program": "Python", "precision": "f32"})
        numbers = [median(ours["update"]) / median(line["update"]) for line, ours in pairs]
        yield f"update from Python against the command line, {name.removeprefix('python/')}", FROM_PYTHON, True, numbers


def verdict(number, aim, less):
    gate, stretch = aim
    if gate is None:
        return "no target"
    reached = [bar is not None and (number <= bar if less else number >= bar) for bar in (gate, stretch)]
    return "stretch" if reached[1] else "gate" if reached[0] else "**missed**"


def markdown(header, rows):
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines) + "\n"


def beside(found, header, rows):
    """The table of `rows(cells)` of each processor; rows of one name stand together, a row for each processor that has it."""
    of_each = {kind: rows(cells) for kind, cells in found.items()}
    names = dict.fromkeys(row[0] for of_kind in of_each.values() for row in of_kind)
    lines = [
        [name, kind, *row[1:]]
        for name in names
        for kind, of_kind in of_each.items()
        for row in of_kind
        if row[0] == name and row[1:]
    ]
    return markdown([header[0], "processor", *header[1:]], lines) if lines else ""


def target_rows(cells):
    rows = []
    for name, aim, less, numbers in (*targets(cells), *pretrained_targets(cells), *python_targets(cells)):
        if not numbers:
            # Its place among the names, in which another processor's stands.
            rows.append([name])
        else:
            middle = median(numbers)
            bars = ["" if bar is None else f"{'<=' if less else '>='} {bar:g}" for bar in aim]
            each = " ".join(f"{number:.2f}" for number in numbers)
            rows.append([name, *bars, each, f"**{middle:.2f}**", verdict(middle, aim, less)])
    return rows


def medians(runs, *keys):
    """The medians of the runs' medians, in seconds."""
    return [f"{median(median(run[key]) for run in runs):.2f}" for key in keys]


def gigabytes(runs, key="peak_bytes"):
    return f"{median(run[key] for run in runs) / 1e9:.2f}"


def update_rows(of_cells, modes):
    """One row per program and mode of the runs of these cells."""
    rows = []
    for runs in of_cells:
        for mode in dict.fromkeys((run["program"], run["precision"]) for run in runs):
            of_mode = [run for run in runs if (run["program"], run["precision"]) == mode]
            each = " ".join(medians([run], "update")[0] for run in of_mode)
            phases = medians(of_mode, "update", "generate", "rollout", "optimise")
            start_up = f"{median(run['start_up'] for run in of_mode):.1f}"
            rows.append([modes[mode], each, *phases, gigabytes(of_mode), start_up])
    return rows


def update_tables(found, wanted, modes=MODES):
    """The tables of `wanted`: titles, and patterns of the cells, in which {} is the precision."""
    text = ""
    for title, pattern in wanted:
        names = list(dict.fromkeys(pattern.format(precision) for precision in ("f32", "bf16")))
        header = [title, "update, rounds", "update", "generation", "rest of rollout", "optimise", "peak GB", "start-up"]
        text += beside(
            found, header, lambda cells: update_rows([cells[name][1] for name in names if name in cells], modes)
        )
    return text


def generation_rows(cells):
    rows = []
    for cell, (_, runs) in cells.items():
        experiment, size, *precision = cell.split("/")
        if experiment == "generate":
            for batch in sorted({run["batch"] for run in runs}):
                of_batch = [run for run in runs if run["batch"] == batch]
                rates = [f"{median(run[key] for run in of_batch):.0f}" for key in ("transformers", "rlhf")]
                each = " ".join(f"{run['rlhf'] / run['transformers']:.2f}" for run in of_batch)
                rows.append([f"{size}, {precision[0]}, batch {batch}", *rates, each])
    return sorted(rows)


def gemm_rows(cells):
    rows = []
    for cell, (_, of_cell) in sorted(cells.items()):
        runs = [run for run in of_cell if "gemm" in run]
        if runs:
            work = runs[0]["optimise_flops"] / 1e9
            rate = median(run["gemm"]["gflops"] for run in runs)
            reached = median(work / median(run["optimise"]) for run in runs)
            fraction = median(map(gemm_fraction, runs))
            numbers = [f"{number:.0f}" for number in (work, rate, reached)]
            rows.append([cell.removeprefix("update/"), *numbers, f"{fraction:.2f}", *gemm_ratios(of_cell)])
    return rows


def gemm_ratios(runs):
    """TRL's seconds of an update divided by rlhf's, and by what rlhf's would be if its optimise phase were matrix products alone."""
    precision = next(run["precision"] for run in runs if "gemm" in run)
    wanted = [{"program": "TRL", "precision": THEIRS[precision]}, {"program": "rlhf", "precision": precision}]
    pairs = list(rounds(runs, *wanted))

    def ratio(products_alone):
        each = []
        for trl, rlhf in pairs:
            seconds = median(rlhf["update"])
            if products_alone:
                seconds += rlhf["optimise_flops"] / (rlhf["gemm"]["gflops"] * 1e9) - median(rlhf["optimise"])
            each.append(median(trl["update"]) / seconds)
        return f"{median(each):.2f}"

    return [ratio(False), ratio(True)]


def growth_rows(cells):
    _, runs = cells.get("growth/s", (None, []))
    rows, first = [], None
    for episodes, limit in dict.fromkeys((run["episodes"], run["limit"]) for run in runs):
        of_row = [run for run in runs if (run["episodes"], run["limit"]) == (episodes, limit)]
        seconds = median(median(run["update"]) for run in of_row)
        first = first or seconds
        per_token = f"{1e3 * seconds / episodes / limit:.2f}"
        phases = medians(of_row, "update", "generate", "rollout", "optimise")
        growth = f"{seconds / first:.2f}"
        rows.append([f"{episodes} episodes of {limit} tokens", *phases, growth, per_token, gigabytes(of_row)])
    return rows


def early_rows(cells):
    _, runs = cells.get("early/s", (None, []))
    rows = []
    for program in ("TRL", "rlhf"):
        never = [run for run in runs if run["program"] == program and run["stops"] == "never"]
        for run_kind in ("never", "early"):
            of_row = [run for run in runs if run["program"] == program and run["stops"] == run_kind]
            if of_row:
                response = median(median(run["response_length"]) for run in of_row)
                full = median(median(run["response_length"]) for run in never)
                prompt = of_row[0]["prompt_length"]
                row = [f"{program}, {run_kind}", f"{response:.1f}"]
                row += [f"{response / full:.2f}", f"{(prompt + response) / (prompt + full):.2f}"]
                for key in ("update", "generate", "rollout", "optimise"):
                    seconds, whole = (median(median(run[key]) for run in some) for some in (of_row, never))
                    row.append(f"{seconds:.2f} ({seconds / whole:.2f})")
                rows.append(row)
    return rows


def ranks_rows(cells):
    _, runs = cells.get("ranks/s", (None, []))
    rows, first = [], None
    for ranks, threads, stage in dict.fromkeys((run["ranks"], run["threads"], run["stage"]) for run in runs):
        of_row = [run for run in runs if (run["ranks"], run["threads"], run["stage"]) == (ranks, threads, stage)]
        seconds = median(median(run["update"]) for run in of_row)
        first = first or seconds
        shares = [median(median(run[key]) for run in of_row) / seconds for key in ("collectives", "waiting")]
        peak = median(max(run["peaks"]) for run in of_row)
        name = f"{ranks} rank{'s' * (ranks > 1)}, {threads} thread{'s' * (threads > 1)} each, stage {stage}"
        numbers = [f"{seconds:.2f}", f"{seconds / first:.2f}", *(f"{share:.0%}" for share in shares), f"{peak / 1e9:.2f}"]
        rows.append([name, *numbers])
    return rows


def sources(found):
    text, all_cells = "", [each for cells in found.values() for each in cells.items()]
    for report in {id(report): report for _, (report, _) in all_cells}.values():
        machine, versions = report["machine"], report["versions"]
        names = ", ".join(f"`{cell}`" for cell, (of_cell, _) in all_cells if of_cell is report)
        vectors = " ".join(machine.get("vectors", ["vector instructions unknown"]))
        text += (
            f"- {report['date']}, commit `{report['commit']}`: {names}. {machine['cpu']}, {machine['cores']} cores, "
            f"{machine['memory_bytes'] / 2**30:.0f} GiB, {vectors}; {machine['threads']} threads. "
            f"{', '.join(f'{name} {version}' for name, version in versions.items())}.\n"
        )
    return text


def page(found):
    """The whole page."""
    sizes = "; ".join(
        f"{name}: hidden {size.hidden}, {size.layers} layers, vocabulary {size.vocab}"
        for name, size in SIZES.items()
        if name in ("s", "m")
    )
    sections = [
        (
            "Targets",
            "Seconds of TRL or transformers divided by those of rlhf; for memory, bytes of rlhf divided by those of "
            "TRL: each round, and the median.",
            beside(found, ["", "gate", "stretch", "rounds", "median", "reached"], target_rows),
        ),
        (
            "Seconds per update",
            "Medians over the rounds of each run's median update; the first update of a run is not counted. Start-up "
            "is the time from the program's start to its first rollout. TRL's `bf16=True` has no effect on a CPU: it "
            "computes in f32, with the time and memory of f32. The table therefore has both of TRL's bf16 modes.",
            update_tables(found, [(size, f"update/{size}/{{}}") for size in ("s", "m")]),
        ),
        (
            "A pretrained model",
            "Seconds per update of SmolLM2-135M-Instruct, responses of 40 tokens that never stop. GRPO: 4 prompts with 8 "
            "responses each, one optimizer step. PPO: 16 responses, 2 epochs. TRL's `bf16=True` computes in bf16 with f32 "
            "weights in `GRPOTrainer`; in `PPOTrainer` it has no effect on a CPU. In bf16 rlhf holds what it trains in f32, and "
            "frozen weights in bf16. TRL's bf16 weights have bf16 gradients and Adam states, as rlhf's have with `--optim "
            "adamw_bf16`; adapters are f32.",
            update_tables(
                found,
                [
                    (f"{trainer}, {trained}", f"{trainer}/smollm2/{{}}/{trained}")
                    for trainer in ("grpo", "ppo")
                    for trained in ("full", "lora")
                ],
                SHORT_MODES,
            ),
        ),
        (
            "From Python",
            "s, f32: the same runs by the command line and by the trainers of the Python package, which start the program and follow it over "
            "a socket. GRPO's reward is a rule of the program on the command line, and a function of the script from Python.",
            update_tables(found, [(f"{trainer}, s", f"python/{trainer}/s") for trainer in ("grpo", "ppo")]),
        ),
        (
            "Generated tokens per second",
            "53 new tokens, sampled, including prefill.",
            beside(found, ["", "transformers", "rlhf", "ratio, rounds"], generation_rows),
        ),
        (
            "GEMM rate",
            "The FLOPs that the optimise phase requires, divided by its seconds, compared with the rate of matrix "
            "products alone in the same shapes on this machine. The ratio is TRL's seconds of an update (in bf16 with bf16 "
            "weights) divided by rlhf's; the bound is that ratio if the optimise phase were those products alone.",
            beside(
                found,
                ["", "GFLOP of an update", "machine, GFLOP/s", "rlhf, GFLOP/s", "fraction", "ratio", "bound"],
                gemm_rows,
            ),
        ),
        (
            "Growth",
            "rlhf, s, f32. Twice the episodes are twice the tokens. Twice the response length is less than twice the "
            "tokens, because the prompts do not change.",
            beside(
                found,
                ["", "update", "generation", "rest of rollout", "optimise"]
                + ["times the first", "ms per response token", "peak GB"],
                growth_rows,
            ),
        ),
        (
            "Responses that stop early",
            "s, f32, the same model except for the logit of the end-of-text token. In brackets: the ratio to responses "
            "that never stop. Generation should be proportional to the response tokens, the rest to all tokens.",
            beside(
                found,
                ["stops", "response", "of response tokens", "of all tokens"]
                + ["update", "generation", "rest of rollout", "optimise"],
                early_rows,
            ),
        ),
        (
            "Ranks",
            "rlhf, s, f32: the rows of one update divided over the ranks of one machine, at each stage of ZeRO. Four ranks of "
            "one thread on two cores compete for them. Waiting is the time before a collective in which a rank waits for the "
            "others.",
            beside(
                found, ["", "update", "times the first", "in collectives", "waiting", "peak GB of a rank"], ranks_rows
            ),
        ),
    ]
    text = (
        "# Results\n\nWritten by `benchmarks/bench.py table` from the raw numbers in this folder: the newest of each cell on each "
        "kind of processor. Rows of an AMD EPYC with AVX-512 and no generation are from before it was recorded: by their rate of "
        "products they are of Zen 5. "
        f"[The benchmark's page](../README.md) describes what is compared. GPT-NeoX of random weights: {sizes}.\n\n"
    )
    for title, words, body in sections:
        if body:
            text += f"## {title}\n\n{words}\n\n{body}"
    return text + "## Where and when\n\n" + sources(found)


def write(folder):
    """Writes the page of the results in `folder` to that folder."""
    (folder / NAME).write_text(page(newest(folder)))


def one_line(run):
    """One line about a run, for the console."""
    if "transformers" in run:
        return f"batch {run['batch']}: transformers {run['transformers']:.0f}, rlhf {run['rlhf']:.0f} tokens/s"
    if "ranks" in run:
        seconds, peak = median(run["update"]), max(run["peaks"]) / 1e9
        return f"{run['ranks']} ranks, {run['threads']} threads, stage {run['stage']}: {seconds:.2f} s, {peak:.2f} GB"
    return f"{MODES[run['program'], run['precision']]}: {median(run['update']):.2f} s, {run['peak_bytes'] / 1e9:.2f} GB"
