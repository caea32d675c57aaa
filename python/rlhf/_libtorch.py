"""Finds the libtorch that the program is started with, without importing torch.

In order: $LIBTORCH; torch 2.11.0 of this Python environment, whichever build; what `rlhf setup` or scripts/setup.sh has put into
the cache. A torch of another version is never loaded into the program: its ABI differs.
"""

import os
import sys

from rlhf._places import TORCH, Failure, fetched, short

# Files with the version of torch: of its Python package, of its headers, and of the archive of libtorch.
VERSIONS = (("version.py", "__version__ = "), ("include/torch/headeronly/version.h", "#define TORCH_VERSION "), ("build-version", ""))


class Libtorch:
    """A libtorch on this machine."""

    __slots__ = ("folder", "hint", "version", "why")

    def __init__(self, folder: str, version: str, why: str, hint: str = "") -> None:
        # The folder with `lib` in it.
        self.folder = folder
        # With `+cpu` and the like, where the files have it.
        self.version = version
        # For `rlhf doctor`: where it is from, in words.
        self.why = why
        # How another one is used in its place; "" for that of the cache, which can be fetched again.
        self.hint = hint


def has_library(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "lib", "libtorch_cpu.so"))


def version_of(folder: str) -> str:
    """The version of the torch in a folder, "" where no file has it."""
    for name, start in VERSIONS:
        try:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        rest = text.partition(start)[2] if start else text
        # In the header, the text is on the line after its name.
        found = rest.replace("\\", " ").split(maxsplit=1)
        if found:
            return found[0].strip("\"'")
    return ""


def plain(version: str) -> str:
    return version.partition("+")[0]


def named() -> Libtorch | None:
    """That of $LIBTORCH. Fails where there is none, or another version."""
    folder = os.environ.get("LIBTORCH")
    if not folder:
        return None
    hint = f"unset it to let rlhf find or fetch libtorch {TORCH}"
    if not os.path.isabs(folder):
        raise Failure(f"LIBTORCH={folder}: expected an absolute path; {hint}")
    if not has_library(folder):
        raise Failure(f"LIBTORCH={folder}: expected libtorch {TORCH} (lib/libtorch_cpu.so), found none; {hint}")
    version = version_of(folder)
    if plain(version) != TORCH:
        raise Failure(f"LIBTORCH={folder}: expected libtorch {TORCH}, found {version or 'no file with its version'}; {hint}")
    return Libtorch(folder, version, f"from $LIBTORCH, {folder}", "unset LIBTORCH to have one with CUDA fetched")


def installed() -> tuple[str, str] | None:
    """Folder and version of the torch that `import torch` would find in this environment."""
    # The first folder is that of the script, or of the caller's files.
    for place in sys.path[1:]:
        folder = os.path.join(place, "torch")
        if place and os.path.exists(os.path.join(folder, "__init__.py")):
            return folder, version_of(folder)
    return None


def of_environment() -> Libtorch | None:
    """That of the torch of this Python environment, if it has the version."""
    found = installed()
    if found is None or plain(found[1]) != TORCH or not has_library(found[0]):
        return None
    folder, version = found
    return Libtorch(
        folder, version, f"torch {version} of this Python environment, {folder}", f"install torch=={TORCH} from PyPI there, which has CUDA"
    )


def of_cache() -> Libtorch | None:
    """That of the cache. The one with CUDA is complete too, and comes first."""
    for device in ("cuda", "cpu"):
        folder = os.path.join(fetched(device), "torch")
        if has_library(folder):
            return Libtorch(folder, version_of(folder) or TORCH, f"from the cache, {fetched(device)}")
    return None


def find() -> Libtorch | None:
    """The libtorch to start with, `None` where there is none yet."""
    return named() or of_environment() or of_cache()


def missing() -> str:
    """The places that were searched, for the message that there is none."""
    where = f"$LIBTORCH, this Python environment or {short(fetched())}"
    if (found := installed()) and plain(found[1]) != TORCH:
        where += f" (torch {found[1] or 'of an unknown version'} in {found[0]} is left alone)"
    return f"libtorch {TORCH}: expected in {where}, found none"
