"""Code shared by the scripts of this example and those of gpt2-sentiment: committed files, and the summary of a run.

Python 3.9 or newer, standard library only.
"""

import json
import pathlib
import sys


class Missing(Exception):
    """A file that a run should have written is missing."""


def encoded(files):
    """File name -> rows, as file name -> bytes."""
    return {name: "".join(json.dumps(row) + "\n" for row in rows).encode() for name, rows in files.items()}


def differing(made, folder):
    """The names of the files in `folder` that differ from what was `made`."""
    different = [
        name
        for name, content in made.items()
        if not (folder / name).is_file() or (folder / name).read_bytes() != content
    ]
    return different + sorted(path.name for path in folder.iterdir() if path.name not in made)


def make(arguments, usage, folder, files):
    """A make_data.py: writes what `files` makes to `folder`, or with --check compares; returns the exit code."""
    if arguments == ["--check"]:
        different = differing(files(), folder)
        for name in different:
            print(
                f"{folder / name}: not what make_data.py makes; run make_data.py and look at the difference",
                file=sys.stderr,
            )
        return 1 if different else 0
    if arguments:
        print(usage)
        return 0 if arguments[0] in ("-h", "--help") else 2
    folder.mkdir(exist_ok=True)
    for name, content in files().items():
        (folder / name).write_bytes(content)
        print(f"{name:24} {content.count(10):6} rows {len(content) / 1000:8.0f} kB")
    return 0


def read_rows(path, example):
    """The rows of a JSON Lines file that the run.sh of `example` leaves."""
    if not path.is_file():
        raise Missing(f"{path}: not found; run examples/{example}/run.sh first")
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_answers(folder, example):
    """The responses before and after PPO, to the same prompts."""
    before, after = (read_rows(folder / name, example) for name in ("before.jsonl", "after.jsonl"))
    if not before or [row["prompt"] for row in before] != [row["prompt"] for row in after]:
        raise Missing(f"{folder}: expected before.jsonl and after.jsonl with the same prompts in the same order")
    return before, after


def read_timings(folder):
    """Step -> seconds."""
    path = folder / "timings.tsv"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {name: int(seconds) for name, seconds in (line.split("\t") for line in lines)}


def summary(arguments, usage, default, summarise, as_markdown, as_text, is_good):
    """A summary.py: writes the result of `summarise` to the run's folder and prints it; returns the exit code."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print(usage)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    folder = pathlib.Path(arguments[0] if arguments else default)
    try:
        found = summarise(folder)
    except Missing as missing:
        print(f"summary.py: {missing}", file=sys.stderr)
        return 1
    (folder / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (folder / "summary.md").write_text(as_markdown(found), encoding="utf-8")
    print(as_text(found), end="")
    print(f"Written to {folder / 'summary.md'} and {folder / 'summary.json'}.")
    return 0 if is_good(found) else 1
