"""Peak memory of PPO and GRPO by mode: of rlhf, of its plan, and of TRL where it has the mode.

    memory.py run [CELL ...] [--only rlhf|trl]    measures cells, all by default, into results/memory/DATE-COMMIT.json
    memory.py run --into FILE                     continues a file: what it has is not run again
    memory.py table                               prints the tables, of the newest run of each number

SmolLM2-135M-Instruct with the prompts and the scripts of the benchmark's cells `grpo/smollm2` and `ppo/smollm2`; two updates of 16 rows in
one micro-batch, responses of 16 tokens. The peak is the largest resident memory of the process, Python included (`ru_maxrss`). About a
minute for each run on two cores where nothing else runs. A CELL is TRAINER/MODE, or a pattern.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path

import runs
from runs import HERE, Failed, GrpoJob, Job

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent / "target"))
WORK = TARGET / "bench"
RESULTS = HERE / "results" / "memory"
ROWS, RESPONSE, UPDATES = 16, 16, 2
MIB = 1 << 20

LORA = {"use_peft": "true", "lora_r": runs.LORA_R, "lora_alpha": 2 * runs.LORA_R, "lora_target_modules": "all-linear"}
# Adapters of the value model too.
BOTH = LORA | {"value_use_peft": "true"}
WHOLE = LORA | {"value_use_peft": "false"}
HEAD = LORA | {"value_head": "true"}
FOUR, EIGHT = {"load_in_4bit": "true", "use_bnb_nested_quant": "true"}, {"load_in_8bit": "true"}
TRL_LORA = {"lora_r": runs.LORA_R}


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to hold a model: precision and flags of rlhf, and of TRL where it has the same."""

    precision: str
    flags: dict
    trl: tuple = None
    # Without and with `gradient_checkpointing`, of TRL.
    trl_checkpoints: tuple = (False, True)


SHARED = {
    "f32": Mode("f32", {}, ("f32", {})),
    "f32, adamw_8bit": Mode("f32", {"optim": "adamw_8bit"}, ("f32", {"optim": "adamw_8bit"}), (False,)),
    "f32, adafactor": Mode("f32", {"optim": "adafactor"}, ("f32", {"optim": "adafactor"}), (False,)),
    "bf16": Mode("bf16", {}, ("bf16-flag", {}), (False,)),
    "bf16, adamw_8bit": Mode("bf16", {"optim": "adamw_8bit"}),
    "bf16, adamw_bf16": Mode("bf16", {"optim": "adamw_bf16"}, ("bf16-weights", {}), (False,)),
}
MODES = {
    "grpo": SHARED
    | {
        "lora, f32": Mode("f32", LORA, ("f32", TRL_LORA)),
        "lora, bf16": Mode("bf16", LORA, ("bf16-weights", TRL_LORA), (False,)),
        "lora, 8 bits, f32": Mode("f32", LORA | EIGHT, ("f32", TRL_LORA | {"bits": 8}), (False,)),
        "lora, 8 bits, bf16": Mode("bf16", LORA | EIGHT, ("bf16-weights", TRL_LORA | {"bits": 8}), (False,)),
        "lora, 4 bits, f32": Mode("f32", LORA | FOUR, ("f32", TRL_LORA | {"bits": 4}), (False, True)),
        "lora, 4 bits, bf16": Mode("bf16", LORA | FOUR, ("bf16-weights", TRL_LORA | {"bits": 4}), (False,)),
    },
    # TRL's PPOTrainer has bf16 on a GPU only, and trains the value model whole.
    "ppo": SHARED
    | {
        "f32, adamw_8bit": Mode("f32", {"optim": "adamw_8bit"}),
        "f32, adafactor": Mode("f32", {"optim": "adafactor"}),
        "bf16": Mode("bf16", {}),
        "lora, whole value model, f32": Mode("f32", WHOLE, ("f32", TRL_LORA), (False,)),
        "lora, whole value model, bf16": Mode("bf16", WHOLE, ("bf16-weights", TRL_LORA), (False,)),
        "lora, f32": Mode("f32", BOTH),
        "lora, bf16": Mode("bf16", BOTH),
        "lora, 8 bits, bf16": Mode("bf16", BOTH | EIGHT),
        "lora, 4 bits, f32": Mode("f32", BOTH | FOUR),
        "lora, 4 bits, bf16": Mode("bf16", BOTH | FOUR),
        "lora, 4 bits, shared trunk, bf16": Mode("bf16", HEAD | FOUR),
    },
}
CELLS = {f"{trainer}/{name}": (trainer, mode) for trainer, modes in MODES.items() for name, mode in modes.items()}


def job(trainer, mode, checkpoints):
    """A run of `trainer`; each update uses each of its prompts once."""
    folder = WORK / "smollm2"
    kind, epochs, prompts = {"grpo": (GrpoJob, 1, 2), "ppo": (Job, 1, ROWS)}[trainer]
    file = WORK / f"memory-{trainer}.jsonl"
    file.write_text("".join((folder / f"{trainer}.jsonl").read_text().splitlines(keepends=True)[:prompts]))
    stored = {"gradient_checkpointing": str(checkpoints).lower()}
    trl = mode.trl[1] if mode.trl else {}
    return kind(
        folder, file, ROWS, 1, UPDATES, RESPONSE, epochs=epochs, never_stops=True, extra=mode.flags | stored, trl_extra=trl | stored
    )


def measured(args, trainer, mode, checkpoints, program):
    """One run: its peak, and for rlhf the plan's."""
    of = job(trainer, mode, checkpoints)
    # Its threads wait for each other without computing where other programs run; memory is the same.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    of_run = {"program": program, "checkpoints": checkpoints, "flags": of.extra if program == "rlhf" else of.trl_extra}
    if program == "TRL":
        ran = of.trl(mode.trl[0], timeout=args.timeout)
        return of_run | {"precision": mode.trl[0], "peak_bytes": ran["peak_bytes"], "update": ran["update"]}
    memory = of.plan(args.rlhf, mode.precision)["memory"]
    ran = of.rlhf(args.rlhf, mode.precision, timeout=args.timeout)
    numbers = {"peak_bytes": ran["peak_bytes"], "update": ran["update"]}
    return of_run | {"precision": mode.precision, "planned_bytes": memory["peak"], "phase": memory["peak_phase"]} | numbers


def run(args):
    chosen = [cell for cell in CELLS if any(fnmatch.fnmatch(cell, pattern) for pattern in args.cells or ["*"])]
    if not chosen:
        raise Failed(f"no such cell; the cells are {', '.join(CELLS)}")
    WORK.mkdir(parents=True, exist_ok=True)
    if not (WORK / "smollm2").exists():
        runs.watch([sys.executable, HERE / "smollm2.py", WORK / "smollm2"])
    now, commit = datetime.now(timezone.utc), runs.commit()
    path = args.into or RESULTS / f"{now:%Y-%m-%dT%H%M%S}-{commit}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        report = json.loads(path.read_text())
    else:
        report = {"date": f"{now:%Y-%m-%dT%H:%M:%SZ}", "commit": commit, "machine": runs.machine(), "cells": {}}
    if args.only != "trl":
        report["versions"] = runs.versions(args.rlhf)
    for cell in chosen:
        trainer, mode = CELLS[cell]
        known = report["cells"].setdefault(cell, [])
        wanted = [("rlhf", checkpoints) for checkpoints in (False, True)]
        wanted += [("TRL", checkpoints) for checkpoints in mode.trl_checkpoints if mode.trl]
        for program, checkpoints in wanted:
            of_other = args.only and args.only != program.lower()
            if of_other or any((known_run["program"], known_run["checkpoints"]) == (program, checkpoints) for known_run in known):
                continue
            try:
                found = measured(args, trainer, mode, checkpoints, program)
            except Failed as error:
                found = {"program": program, "checkpoints": checkpoints, "failed": str(error)}
            known.append(found)
            peak = f"{found['peak_bytes'] / MIB:.0f} MiB" if "peak_bytes" in found else found["failed"][-300:]
            planned = f", plan {found['planned_bytes'] / MIB:.0f}" if "planned_bytes" in found else ""
            print(f"memory: {cell}, {program}{', checkpointing' * checkpoints}: {peak}{planned}", file=sys.stderr, flush=True)
            # Written after each run, so that later failures lose no measurement.
            path.write_text(json.dumps(report, indent=1) + "\n")


def newest(folder):
    """The newest of each run, with its report: {cell: {(program, checkpoints): (report, run)}}."""
    reports = sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda report: report["date"])
    cells = {}
    for report in reports:
        for cell, of_cell in report["cells"].items():
            cells.setdefault(cell, {}).update({(one["program"], one["checkpoints"]): (report, one) for one in of_cell})
    return cells


def table(folder):
    """The tables as Markdown."""
    cells = newest(folder)
    text = ""
    for trainer, modes in MODES.items():
        header = [f"`{trainer}`", "peak, MiB", "plan", "difference", "peak, checkpointing", "plan", "difference", "TRL", "TRL, checkpointing"]
        text += "| " + " | ".join(header) + " |\n|---" + "|---:" * (len(header) - 1) + "|\n"
        for name in modes:
            of_cell = cells.get(f"{trainer}/{name}", {})
            row = [name]
            for program, checkpoints in (("rlhf", False), ("rlhf", True), ("TRL", False), ("TRL", True)):
                _, found = of_cell.get((program, checkpoints), (None, {}))
                peak, planned = found.get("peak_bytes"), found.get("planned_bytes")
                row.append(f"{peak / MIB:.0f}" if peak else "fails" if "failed" in found else "")
                if program == "rlhf":
                    row += [f"{planned / MIB:.0f}", f"{planned / peak - 1:+.1%}"] if planned else ["", ""]
            text += "| " + " | ".join(row) + " |\n"
        text += "\n"
    for report in {id(report): report for of_cell in cells.values() for report, _ in of_cell.values()}.values():
        machine = report["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items())
        vectors = " ".join(machine["vectors"])
        text += f"{report['date'][:10]}, commit `{report['commit']}`: {machine['cpu']}, {machine['cores']} cores, {vectors}. {versions}.\n"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    measure = commands.add_parser("run", help="measure cells")
    measure.add_argument("cells", nargs="*", metavar="CELL")
    measure.add_argument("--only", choices=["rlhf", "trl"])
    measure.add_argument("--into", type=Path, help="a file of results that is continued")
    measure.add_argument("--rlhf", type=Path, default=TARGET / "release" / "rlhf", help="the program")
    measure.add_argument("--timeout", type=float, default=300, help="seconds of a run (default 300)")
    commands.add_parser("table", help="print the tables")
    args = parser.parse_args()
    try:
        run(args) if args.command == "run" else print(table(RESULTS), end="")
    except Failed as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
