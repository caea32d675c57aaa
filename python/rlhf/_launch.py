"""The command `rlhf`: finds libtorch and becomes the program. `setup` and `demo` are commands of this package.

This module and what it imports at its top take part in each start, so they import little.
"""

import os
import sys

from rlhf import __version__, _libtorch, _start
from rlhf._libtorch import Libtorch
from rlhf._places import PACKAGE, Failure

MORE_HELP = """
Commands of the Python package:
  setup  Fetch libtorch, or CUDA's libraries (--device cuda), or remove what was fetched (--remove)
  demo   Movie reviews learn to be positive: SFT, reward model and PPO in three minutes"""

# The program itself cannot start then, and nobody who asks for help wants a download.
WITHOUT_LIBTORCH = """\
RLHF with PPO for language models: supervised fine-tuning, a reward model, then PPO.

libtorch is not there yet: run 'rlhf setup' once. Then 'rlhf --help' lists all commands."""


def main() -> int:
    """The entry point. Returns an exit code, unless the process becomes the program."""
    try:
        return command(sys.argv[1:])
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return failure.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone. Python would complain again when it closes the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror or error}", file=sys.stderr)
        return 1


def command(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and arguments[1:2] in (["setup"], ["demo"]):
        arguments = [arguments[1], "--help"]
    first = arguments[0] if arguments else "help"
    if first == "setup":
        from rlhf import _setup

        return _setup.main(arguments[1:])
    if first == "demo":
        from rlhf import _demo

        return _demo.main(arguments[1:])
    if first == "doctor":
        note_other_distribution()
    is_help = arguments in ([], ["help"], ["-h"], ["--help"])
    libtorch = _libtorch.find()
    if libtorch is None:
        if arguments in (["--version"], ["-V"]):
            print(f"rlhf {__version__}")
            return 0
        if is_help:
            print(WITHOUT_LIBTORCH + MORE_HELP)
            return 0
        from rlhf import _setup

        libtorch = _setup.at_first_use()
    if is_help:
        return with_more_help(libtorch, arguments)
    _start.replace_by(libtorch, arguments)
    raise AssertionError("the process was replaced, or the program could not be started")


def with_more_help(libtorch: Libtorch, arguments: list[str]) -> int:
    """The program's help, and the commands that it does not know."""
    import subprocess

    program = _start.prepared(libtorch)
    status = subprocess.run(["rlhf", *arguments], executable=program, env=_start.environment(libtorch), check=False).returncode
    print(MORE_HELP, file=sys.stderr if status else sys.stdout)
    return status if status >= 0 else 128 - status


def note_other_distribution() -> None:
    """Says so where the distribution named rlhf is installed too, which has the same import name."""
    folder = os.path.dirname(PACKAGE)
    for name in os.listdir(folder):
        if name.startswith("rlhf-") and name.endswith((".dist-info", ".egg-info")):
            print(
                f"note: {os.path.join(folder, name)}: another distribution, named rlhf, shares the import name with rlhf-rs; "
                "uninstall both and install rlhf-rs again",
                file=sys.stderr,
            )
            return
