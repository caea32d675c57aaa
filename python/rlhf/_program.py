"""Finds and starts the program for a trainer."""

import os
import subprocess
import sys
from typing import Any

from rlhf._errors import RunError


def command() -> tuple[list[str], dict[str, str]]:
    """The program with its environment: that of `RLHF_PROGRAM`, or that of this package beside its libtorch."""
    if program := os.environ.get("RLHF_PROGRAM"):
        return [program], dict(os.environ)
    from rlhf import _libtorch, _start
    from rlhf._places import PROGRAM, Failure

    if not os.path.exists(PROGRAM):
        raise RunError(f"{PROGRAM}: expected the program of this package, found none; install the wheel rlhf-rs, or set RLHF_PROGRAM")
    try:
        libtorch = _libtorch.find()
        if libtorch is None:
            raise RunError(f"{_libtorch.missing()}; run 'rlhf setup' once")
        return [_start.prepared(libtorch)], _start.environment(libtorch)
    except Failure as failure:
        raise RunError(str(failure)) from None


def environment(base: dict[str, str], more: dict[str, str]) -> dict[str, str]:
    """The environment of the program: rewards and trackers are imported by this Python."""
    return {**base, "RLHF_PYTHON": sys.executable or "python3", **more}


def without_ranks(environ: dict[str, str]) -> dict[str, str]:
    """The environment without a launcher's variables: the program starts its ranks itself."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK")
    slurm = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID")
    return {name: value for name, value in environ.items() if name not in ranks + slurm and not name.startswith("TORCHELASTIC")}


def call(arguments: list[str], what: str, more: "dict[str, str] | None" = None) -> str:
    """Runs a command of the program to its end, and returns its output."""
    program, environ = command()
    environ = environment(without_ranks(environ), more or {})
    done = subprocess.run([*program, *arguments], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{what}: {last_line(done.stderr) or ended(done.returncode)}")
    return done.stdout


def last_line(text: str) -> str:
    """The last line of an error, without the word before it."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")] or lines[-1:]
    return errors[-1].removeprefix("error: ") if errors else ""


def ended(code: int) -> str:
    """How a process has ended, in words."""
    if code >= 0:
        return f"the program ended with exit code {code}"
    import signal

    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; the system does so where memory runs out" if name == "SIGKILL" else ""
    return f"the program was killed by {name}{hint}"


def start(arguments: list[str], more: dict[str, str], **streams: Any) -> "subprocess.Popen[bytes]":
    """Starts a command of the program, in a session of its own: Ctrl-C reaches this process alone, which passes it on."""
    program, environ = command()
    environ = environment(without_ranks(environ), more)
    return subprocess.Popen([*program, *arguments], env=environ, stdin=subprocess.DEVNULL, start_new_session=True, **streams)
