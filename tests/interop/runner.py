"""Shared by the programs of this folder that compare rlhf with Python's libraries: a check is a claim and a function, which raises
`Failure` where the claim does not hold.
"""

import argparse
import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class Failure(Exception):
    """A check that did not hold; its text is the line that people read."""


def expect(condition, message):
    if not condition:
        raise Failure(message)


def binary(description):
    """The path of the rlhf program, from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("binary", type=Path, help="the rlhf program")
    path = parser.parse_args().binary.resolve()
    if not os.access(path, os.X_OK):
        parser.error(f"{path}: not a program")
    return path


def copy_model(folder, golden="gpt_neox"):
    """Copies a tiny model of the tests, with its tokenizer, into a new folder."""
    folder.mkdir()
    for name in MODEL_FILES:
        shutil.copy(ROOT / "tests/golden/models" / golden / name, folder / name)


def run_checks(checks):
    """Runs the checks and prints a line for each, and a total. Returns the exit code: 1 if any failed."""
    passed = failed = 0
    for claim, check in checks:
        try:
            check()
        except Exception as error:
            failed += 1
            kind = "" if isinstance(error, Failure) else f"{type(error).__name__}: "
            print(f"FAIL  {claim}: {kind}{' '.join(str(error).split())}", flush=True)
        else:
            passed += 1
            print(f"ok    {claim}", flush=True)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0
