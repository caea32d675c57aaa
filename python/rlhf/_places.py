"""The places of the program, of its libtorch and of the cache. Imported at each start: nothing slow is imported here."""

import os

TORCH = "2.11.0"
PACKAGE = os.path.dirname(os.path.abspath(__file__))
PROGRAM = os.path.join(PACKAGE, "bin", "rlhf")
# NCCL and CUDA graphs, for a libtorch with CUDA 13; not in every wheel.
CUDA_LIBRARY = os.path.join(PACKAGE, "cuda13", "libtch_ext_cuda.so")


class Failure(Exception):
    """What a user is told in one line."""

    code = 1


class Usage(Failure):
    """A command line that cannot be meant; the program ends with the same code."""

    code = 2


def cache() -> str:
    """The folder of the cache, the same as that of scripts/setup.sh; it need not exist."""
    if root := os.environ.get("RLHF_CACHE"):
        return os.path.abspath(root)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(os.path.abspath(base), "rlhf")


def fetched(device: str = "cpu") -> str:
    """The folder of the libtorch that `rlhf setup` fetches: the layout is that of scripts/setup.sh.

    That with CUDA is another one, as builds from source link with what they find in folders named libtorch-*.
    """
    return os.path.join(cache(), ("cuda-" if device == "cuda" else "") + f"libtorch-{TORCH}")


def starts() -> list[str]:
    """Folders for the program beside links to a libtorch, the first that can be written is taken.

    The other two are for a home that cannot be written.
    """
    folders = [os.path.join(cache(), "programs")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        folders.append(os.path.join(runtime, "rlhf"))
    folders.append(os.path.join(os.environ.get("TMPDIR") or "/tmp", f"rlhf-{os.geteuid()}"))
    return folders


def short(path: str) -> str:
    """A path as it is shown: with ~ for the user's home."""
    home = os.path.expanduser("~")
    return "~" + path[len(home) :] if home != "/" and path.startswith(home + "/") else path
