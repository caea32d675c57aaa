"""Uses a machine with a GPU that is lent for some minutes: stages in order of worth, each with its own time limit.

    gpu_window.sh pack                      packs what was built (below 64 MB) into target/gpu-window
    gpu_window.sh run --out FOLDER          on the machine: runs the stages, results line by line in FOLDER/results.jsonl
    gpu_window.sh run --out FOLDER --then 'COMMAND'     also that command, after the others
    gpu_window.sh show FOLDER               a table of the results

A later call continues. A stage that is done in FOLDER, or in a file of --continue, runs again only if its command, variables, programs, scripts,
reference values or kind of card have changed. The command of --then always runs. `run --list` prints the stages; `run --only STAGE...` runs some.
Exit code 0: all stages are done; 1: one failed; 2: wrong arguments; 3: there is no GPU and nothing ran; 4: the time was over before all stages ran.

Needs Python's standard library alone; the stages beside TRL need torch, transformers and trl there. docs/internals/gpu.md has more.
"""

import argparse
import hashlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path

import gpu_stages
from gpu_stages import STAGES, Place

ROOT = Path(__file__).resolve().parent.parent
PACK = ROOT / "target/gpu-window"
MOST_BYTES = 64 << 20
# Seconds that remain after a stage: to write, and to end.
RESERVE = 5
NO_GPU, NO_TIME = 3, 4
# The stage of --then.
THEN = "then"


def say(text):
    print(f"window: {text}", flush=True)


# --- Packing ---------------------------------------------------------------------------------------------------------------------------------


def newest(folder, name):
    """The program that cargo built last under `name`, which has a hash in its file's name."""
    found = [f for f in Path(folder).glob(f"{name}-*") if f.is_file() and "." not in f.name and os.access(f, os.X_OK)]
    return max(found, key=lambda f: f.stat().st_mtime, default=None)


def pack(args):
    """Strips and packs the program, the test programs and the CUDA library."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    deps = target / "debug/deps"
    files = {"rlhf": args.program or target / "release/rlhf", "libtch_ext_cuda.so": args.library}
    files |= {f"test-{name}": newest(deps, name) for name in gpu_stages.TEST_PROGRAMS}
    files["libprofile.so"] = args.profile
    missing = [name for name, file in files.items() if file is None or not Path(file).is_file()]
    for name in missing:
        say(f"not packed: {name}; the stages that need it will be skipped")
    PACK.mkdir(parents=True, exist_ok=True)
    for old in PACK.glob("*.xz"):
        old.unlink()
    hashes = {}
    for name, file in files.items():
        if name in missing:
            continue
        stripped = PACK / name
        subprocess.run(["strip", "-o", stripped, file], check=True)
        hashes[name] = hash_of([stripped])
        (PACK / f"{name}.xz").write_bytes(lzma.compress(stripped.read_bytes(), preset=6))
        stripped.unlink()
    # A test program has the folders in it where it was compiled.
    about = {"commit": commit(), "files": hashes, "root": str(ROOT), "tested_program": str(target / "debug/rlhf")}
    (PACK / "about.json").write_text(json.dumps(about) + "\n")
    total = sum(f.stat().st_size for f in PACK.iterdir())
    for f in sorted(PACK.iterdir()):
        say(f"{f.stat().st_size / 2**20:6.1f} MiB {f.name}")
    say(f"{total / 2**20:.1f} MiB of {MOST_BYTES >> 20} in {PACK}")
    return 0 if total <= MOST_BYTES else 1


def hash_of(files):
    """SHA-256 of files, with their names."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{Path(file).name} {Path(file).stat().st_size}\n".encode() + Path(file).read_bytes())
    return digest.hexdigest()


def commit():
    """The commit of the checkout, with `-dirty` if files differ from it."""
    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


# --- Running ---------------------------------------------------------------------------------------------------------------------------------


def unpack(work):
    """Unpacks the programs into `work`, and makes the paths that test programs look for. Returns what pack wrote about them."""
    about = json.loads((PACK / "about.json").read_text())
    work.mkdir(parents=True, exist_ok=True)
    for packed in PACK.glob("*.xz"):
        file = work / packed.stem
        if not file.exists() or hash_of([file]) != about.get("files", {}).get(packed.stem):
            file.write_bytes(lzma.decompress(packed.read_bytes()))
            file.chmod(0o755)
    for path, real in ((about["root"], ROOT), (about["tested_program"], work / "rlhf")):
        if not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(real, path)
    return about


def card():
    """Name and memory of the first GPU as nvidia-smi has them; None without one."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0].strip() if lines else None


def hashes_of(stages, about, gpu):
    """For each stage a hash of all that its result depends on, which is the same on another machine with the same kind of card."""
    torch = find_spec("torch")
    places = {str(gpu_stages.HERE): "benchmarks", sys.executable: "python"}
    places |= {str(Path(torch.submodule_search_locations[0])): "torch"} if torch else {}
    scripts = hash_of(sorted(f for f in gpu_stages.HERE.glob("*.py") if not f.name.startswith(("test_", "gpu_window"))))
    golden = hash_of(sorted(f for f in (ROOT / "tests/golden").rglob("*") if f.is_file()))
    hashes = {}
    for stage in stages:
        command = stage.command(Place(Path("out"), Path("work")))
        for place, name in places.items():
            command = command.replace(place, name)
        programs = {name: about.get("files", {}).get(name) for name in stage.needs}
        parts = json.dumps([stage.name, command, stage.variables, programs, scripts, golden, gpu.split(",")[0]], sort_keys=True)
        hashes[stage.name] = hashlib.sha256(parts.encode()).hexdigest()[:16]
    return hashes


def done_before(files, hashes):
    """Names of the stages that ended well in the files of results, where the same ran by `hashes`; lines cut off by the end of a machine are
    skipped."""
    names = set()
    for file in files:
        for line in Path(file).read_text().splitlines() if Path(file).is_file() else []:
            try:
                result = json.loads(line)
            except ValueError:
                continue
            if result.get("state") == "done" and hashes.get(result.get("stage"), "none") == result.get("ran"):
                names.add(result["stage"])
    return names


def run_command(command, log, limit, env):
    """Runs a shell command with its output in `log`; returns its exit code, or None if it was stopped after `limit` seconds."""
    with open(log, "ab") as out:
        child = subprocess.Popen(["bash", "-c", command], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                 env=env, cwd=ROOT, start_new_session=True)
        try:
            return child.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return None


def run_stage(stage, place, limit):
    """Runs a stage; returns its state, its numbers and the end of its output."""
    missing = [name for name in stage.needs if not (place.work / name).exists()]
    if missing:
        return {"state": "skipped", "reason": f"not packed: {', '.join(missing)}"}
    log = place.out / f"{stage.name}.txt"
    log.write_text("")
    code = run_command(stage.command(place), log, limit, place.environment() | stage.variables)
    text = log.read_text(errors="replace")
    try:
        numbers = stage.parse(text) if stage.parse else {}
        if stage.parse and not numbers:
            numbers = {"failures": 1, "failed": ["no result in its output"]}
    except (ValueError, KeyError, IndexError, TypeError) as e:
        numbers = {"failures": 1, "unreadable": repr(e)}
    state = "timeout" if code is None else "done" if code == 0 and not numbers.get("failures") else "failed"
    return {"state": state, "code": code, "numbers": numbers, "end": text[-600:] if state != "done" else ""}


def run(args):
    stages = [s for s in STAGES if not args.only or s.name in args.only]
    if args.then:
        stages.append(gpu_stages.Stage(THEN, "the command of --then", 600, lambda place: args.then))
    if args.list:
        for s in stages:
            print(f"{s.limit:5} s  {s.name:<28} {s.about}")
        return 0
    began = time.monotonic()
    gpu = card()
    if gpu is None:
        for s in stages:
            say(f"SKIPPED {s.name}: no GPU (nvidia-smi names none)")
        say(f"there is no GPU here: {len(stages)} stages were skipped, none ran")
        return NO_GPU
    args.out.mkdir(parents=True, exist_ok=True)
    if not (PACK / "about.json").is_file():
        say(f"{PACK}: expected what `gpu_window.sh pack` packs, found nothing")
        return 2
    place = Place(args.out.resolve(), args.work.resolve())
    about = unpack(place.work)
    results = args.out / "results.jsonl"
    hashes = hashes_of(stages, about, gpu)
    before = done_before([results, *args.continues], hashes) - {THEN}
    states = []
    for s in stages:
        left = args.seconds - (time.monotonic() - began) - RESERVE
        if s.name in before and s.name not in args.again:
            say(f"{s.name}: done before")
            continue
        if left < min(s.limit, s.least):
            say(f"NO TIME for {s.name}: {left:.0f} s are left, it needs {s.least}")
            states.append("no time")
            continue
        start = time.monotonic()
        result = run_stage(s, place, min(s.limit, left))
        result = {"stage": s.name, "commit": about["commit"], "ran": hashes[s.name], "card": gpu, "at": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
                  "seconds": round(time.monotonic() - start, 1), **result}
        with open(results, "a") as file:
            print(json.dumps(result), file=file, flush=True)
        states.append(result["state"])
        say(f"{s.name}: {result['state']} in {result['seconds']} s {json.dumps(result.get('numbers') or result.get('reason', ''))[:400]}")
    return exit_code(states)


def exit_code(states):
    if any(state in ("failed", "timeout", "skipped") for state in states):
        return 1
    return NO_TIME if "no time" in states else 0


# --- Showing ---------------------------------------------------------------------------------------------------------------------------------


def table(lines):
    """The last result of each stage, as Markdown."""
    last = {}
    for line in lines:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        last[result["stage"]] = result
    rows = ["| stage | state | seconds | card, commit | numbers |", "|---|---|---:|---|---|"]
    for name, r in last.items():
        numbers = ", ".join(f"{key} {value}" for key, value in (r.get("numbers") or {}).items())
        where = f"{r.get('card', '').split(',')[0]}, {r.get('commit')}"
        rows.append(f"| {name} | {r['state']} | {r['seconds']} | {where} | {numbers or r.get('reason', '')} |".replace("\n", " "))
    return "\n".join(rows) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="what", required=True)
    packing = sub.add_parser("pack")
    packing.add_argument("--program", type=Path, help="the release program (target/release/rlhf)")
    packing.add_argument("--library", type=Path, default=PACK.parent / "libtch_ext_cuda.so", help="built by `scripts/cuda.sh --library FILE`")
    packing.add_argument("--profile", type=Path, default=PACK.parent / "libprofile.so", help="built from benchmarks/gpu_profile.cpp")
    running = sub.add_parser("run")
    running.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-window")))
    running.add_argument("--work", type=Path, default=PACK.parent / "gpu-window-work", help="folder of unpacked programs and models")
    running.add_argument("--seconds", type=float, default=570, help="time of this call")
    running.add_argument("--continue", dest="continues", type=Path, nargs="*", default=[], help="results.jsonl of earlier calls")
    running.add_argument("--only", nargs="*", default=[], help="stages to run")
    running.add_argument("--again", nargs="*", default=[], help="stages to run though they are done")
    running.add_argument("--then", help="a command to run after the stages")
    running.add_argument("--list", action="store_true")
    showing = sub.add_parser("show")
    showing.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.what == "pack":
        return pack(args)
    if args.what == "run":
        unknown = set(args.only + args.again) - {s.name for s in STAGES}
        if unknown:
            parser.error(f"no stage {', '.join(sorted(unknown))}; `run --list` prints them")
        return run(args)
    print(table((args.folder / "results.jsonl").read_text().splitlines()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
