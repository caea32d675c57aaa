"""One PPO update of a model the size of Pythia-1b on a GPU: rlhf against TRL on the same card, in ten minutes at most.

    python3 gpu.py --rlhf BINARY [--wheels FOLDER] [--out FOLDER]
    python3 gpu.py --rlhf BINARY --device cpu --tiny              the same on a CPU with a tiny model, to try the script

Nothing is fetched. The Python it runs in has torch 2.11.0, whose libtorch rlhf is run with too, and transformers. What
it lacks for TRL comes from FOLDER, a folder of wheels. The table is printed, and written with the raw numbers to gpu.md
and gpu.json.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import runs
from models import SIZES, prompt_lengths, write_prompts
from runs import HERE, Failed, Job
from table import MODES, gigabytes, markdown

LIMIT_SECONDS = 570
TORCH = "2.11.0"
# Dense bf16 FLOP/s of the cards, from their data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
MODE_ORDER = [("rlhf", "bf16"), ("TRL", "autocast"), ("TRL", "bf16-weights")]


class CardMemory:
    """The most memory of the GPU in use while the block runs, less what was in use before; on a CPU nothing."""

    def __init__(self, device):
        self.command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        self.watching = device == "cuda"

    def __enter__(self):
        if self.watching:
            self.before = int(subprocess.run(self.command, capture_output=True, check=True).stdout.split()[0])
            self.log = tempfile.TemporaryFile()
            self.sampler = subprocess.Popen([*self.command, "-lms", "200"], stdout=self.log)
        return self

    def __exit__(self, *_):
        if self.watching:
            self.sampler.terminate()
            self.sampler.wait()
            self.log.seek(0)
            # The last line may be cut off.
            samples = [int(line) for line in self.log.read().split(b"\n")[:-1]]
            self.peak_bytes = (max(samples, default=self.before) - self.before) * 2**20


def install(wheels, folder):
    """Puts the packages of a folder of wheels before all others, here and in what is started from here."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise Failed(f"{wheels}: expected wheels (*.whl), found none")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    runs.watch([*pip, "--target", folder, *found])
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def use_libtorch_of_python():
    """Lets rlhf load the libtorch of this Python's torch, with its CUDA half."""
    found = version("torch").split("+")[0]
    if found != TORCH:
        raise Failed(f"this Python's torch: expected {TORCH}, which rlhf is built for, found {found}")
    lib = Path(find_spec("torch").submodule_search_locations[0]) / "lib"
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(lib), os.environ.get("LD_LIBRARY_PATH")]))


def card(device):
    """The GPU's name."""
    if device == "cpu":
        return runs.machine()["cpu"]
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise Failed("nvidia-smi names no GPU: is there one? (--device cpu --tiny tries the script without)") from None


def measure(args, folder, deadline):
    """A report of the runs; a run that fails is in it with its error, and does not keep the others from running."""
    size = SIZES["tiny" if args.tiny else "1b"]
    prompts = prompt_lengths(8, 8, 24) if args.tiny else prompt_lengths(64, 192, 512)
    batch = 2 if args.tiny else 8
    report = {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
        "card": card(args.device),
        "machine": runs.machine(),
        "versions": runs.versions(args.rlhf),
        "prompts": prompts,
        "optimise_flops": size.optimise_flops(prompts, 53, runs.EPOCHS),
        "runs": [],
    }
    say(f"making the models, {size}")
    name = "tiny" if args.tiny else "1b"
    runs.watch([sys.executable, HERE / "models.py", folder, name, "--device", args.device], deadline - time.monotonic())
    write_prompts(folder / "prompts.jsonl", prompts, size.vocab)
    job = Job(
        folder,
        folder / "prompts.jsonl",
        batch,
        len(prompts) // batch,
        args.updates,
        device=args.device,
        rollout_batch=2 * batch,
    )
    for number, (program, precision) in enumerate(MODE_ORDER):
        say(MODES[program, precision])
        run = {"program": program, "precision": precision}
        try:
            with CardMemory(args.device) as memory:
                # Each leaves the others their share of the time.
                timeout = max(1, deadline - time.monotonic()) / (len(MODE_ORDER) - number)
                if program == "rlhf":
                    run = job.rlhf(args.rlhf, precision, timeout=timeout)
                else:
                    run = job.trl(precision, timeout=timeout)
            if memory.watching:
                run["card_bytes"] = memory.peak_bytes
        except Failed as error:
            say(str(error))
            # Without the command, whose paths are those of one machine.
            killed = re.search(r"killed after (\d+) s", str(error))
            ended = re.search(r"exit code -?\d+: .*", str(error))
            if killed:
                run["error"] = f"stopped after {killed[1]} s, its share of the time, before its {args.updates} updates were done"
            else:
                run["error"] = ended[0] if ended else str(error)
        report["runs"].append(run)
    return report


def page(report):
    """The report as Markdown."""
    prompts, rows, failures, ours = report["prompts"], [], "", None
    peak = next((peak for name, peak in PEAKS.items() if name in report["card"]), None)
    for run in report["runs"]:
        name = MODES[run["program"], run["precision"]]
        if "error" in run:
            rows.append([name, run["error"].split()[0] if run["error"].startswith("stopped") else "failed"] + [""] * 9)
            failures += f"\n{name}: {run['error'].splitlines()[0]}.\n"
            continue
        phases = update, generate, _, optimise = [
            median(run[key]) for key in ("update", "generate", "rollout", "optimise")
        ]
        if run["program"] == "rlhf":
            ours = (update, generate)
        generated = len(prompts) * median(run["response_length"])
        rows.append(
            [name]
            + [f"{seconds:.2f}" for seconds in phases]
            + [f"{generated / generate:.0f}", f"{generated / update:.0f}"]
            + [f"{report['optimise_flops'] / optimise / peak:.1%}" if peak else "-"]
            + [gigabytes([run], key) if key in run else "-" for key in ("card_bytes", "allocated_bytes")]
            + [f"{update / ours[0]:.2f}, {generate / ours[1]:.2f}" if ours else "-"]
        )
    header = ["seconds", "update", "generation", "rest of rollout", "optimise"]
    header += ["tokens/s, generation", "tokens/s, update", "MFU, optimise"]
    header += ["GB of the card", "GB allocated", "times rlhf: update, generation"]
    versions = ", ".join(f"{name} {found}" for name, found in report["versions"].items())
    return (
        f"{report['card']}, {report['date']}. {versions}. {len(prompts)} episodes, prompts of {min(prompts)} to "
        f"{max(prompts)} tokens, responses of 53, {runs.EPOCHS} epochs. Tokens are response tokens.\n\n"
        + markdown(header, rows)
        + f"MFU: the {report['optimise_flops'] / 1e12:.1f} TFLOP that the optimise phase cannot do without, over its "
        "seconds and the card's dense bf16 peak. GB of the card: the most that nvidia-smi saw; GB allocated: torch's "
        "own count.\n" + failures
    )


def say(text):
    print(f"gpu: {text}", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rlhf", type=Path, required=True, help="the program")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that this Python lacks")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short prompts")
    parser.add_argument("--updates", type=int, default=4, help="updates of each run, the first not counted")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for gpu.md and gpu.json")
    args = parser.parse_args()
    args.rlhf = args.rlhf.resolve()
    folder = Path(tempfile.mkdtemp(prefix="rlhf-gpu-"))
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        if args.wheels:
            install(args.wheels, folder / "packages")
        use_libtorch_of_python()
        report = measure(args, folder, deadline)
    except Failed as error:
        sys.exit(f"error: {error}")
    finally:
        shutil.rmtree(folder)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "gpu.md").write_text(page(report))
    print(page(report), end="")


if __name__ == "__main__":
    main()
