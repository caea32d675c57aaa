"""`rlhf setup`: fetches libtorch into the cache, once, or removes what was fetched."""

import argparse
import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NoReturn

from rlhf import _launch, _libtorch, _start, _wheels
from rlhf._fetch import Fetcher, locked, size_of
from rlhf._libtorch import Libtorch
from rlhf._places import TORCH, Failure, Usage, cache, fetched, short, starts

# Of the wheel of torch: its libraries without those of Python and CUDA, and the file with its version.
CPU_PART = (
    r"torch/lib/(?!libtorch_(?:python|cuda|nvshmem)|libc10_cuda|libcaffe2_nvrtc|libshm)lib[^/]*\.so[^/]*$|torch/version\.py$|torch\.libs/"
)
CUDA_PART = r"torch/lib/(?!libtorch_python|libshm)lib[^/]*\.so[^/]*$|torch/version\.py$|torch\.libs/|torch-[^/]*\.dist-info/METADATA$"
NVIDIA_CPU_PART = r"nvidia/cu13/lib/lib(?:cudart|cupti)\.so"
NVIDIA_PART = r"nvidia/[^/]+/lib/[^/]+\.so"


class Parser(argparse.ArgumentParser):
    """Reports what is wrong in one line, as the program does."""

    def error(self, message: str) -> NoReturn:
        raise Usage(f"{self.prog}: {message}; see '{self.prog} --help'")


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="rlhf setup",
        description=f"Fetches libtorch {TORCH} through the package index that pip or uv is configured for, unless it is there already: in "
        f"$LIBTORCH, as torch {TORCH} of this Python environment, or in {short(fetched())}.",
        allow_abbrev=False,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: with the libraries for NVIDIA GPUs (3 GB)")
    parser.add_argument("--remove", action="store_true", help="remove what was fetched, and the links to it")
    options = parser.parse_args(arguments)
    _launch.note_other_distribution()
    if options.remove:
        return remove()
    libtorch = provide(options.device)
    check(libtorch)
    say(f"libtorch {libtorch.version} is ready: {libtorch.why}")
    return 0


def say(text: str) -> None:
    """Progress goes to standard error: the output of the command that fetches at its first use is that of the program."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def at_first_use() -> Libtorch:
    """Fetches libtorch for another command, on a terminal; elsewhere, nothing is downloaded unasked."""
    if os.environ.get("CI") or not sys.stderr.isatty():
        raise Failure(f"{_libtorch.missing()}; run 'rlhf setup' once ({_wheels.SIZES['cpu']})")
    return provide("cpu")


def has_cuda(libtorch: Libtorch) -> bool:
    return os.path.exists(_start.with_cuda(libtorch))


def provide(device: str) -> Libtorch:
    """The libtorch that the program starts with; fetches it where there is none for the device."""
    found = _libtorch.find()
    if found and (device == "cpu" or has_cuda(found)):
        return found
    if found and found.hint:
        raise Failure(f"libtorch {found.version} ({found.why}): expected a build with CUDA, found one without; {found.hint}")
    fetch(device)
    found = _libtorch.find()
    if found is None:
        raise Failure(_libtorch.missing())
    return found


def fetch(device: str) -> None:
    """Fetches libtorch into the cache."""
    arch = platform.machine()
    if sys.platform != "linux" or arch not in _wheels.TORCH:
        raise Failure(f"no libtorch to fetch for {platform.system()} on {arch}: expected Linux on x86_64 or aarch64")
    target = fetched(device)
    try:
        os.makedirs(cache(), exist_ok=True)
        with lock(target):
            if _libtorch.has_library(os.path.join(target, "torch")):
                return
            check_space(device)
            say(f"fetching libtorch {TORCH} into {short(target)}, once ({_wheels.SIZES[device]})")
            with working_folder(f"{target}.partial") as work:
                Fetch(Fetcher(work, arch), os.path.join(work, "result")).get(device)
                shutil.rmtree(target, ignore_errors=True)
                os.rename(os.path.join(work, "result"), target)
    except OSError as error:
        hint = "free some" if error.errno == 28 else "set RLHF_CACHE to a folder that can be written"
        raise Failure(f"{short(target)}: libtorch cannot be put there: {error.strerror}; {hint}") from error


@contextlib.contextmanager
def lock(target: str) -> Iterator[None]:
    """One fetch at a time: a second one waits, then finds libtorch in place."""
    path = f"{target}.lock"
    file = locked(path, wait=False)
    if file is None:
        say("waiting for another set-up")
        file = locked(path, wait=True)
    assert file is not None
    with file:
        yield


@contextlib.contextmanager
def working_folder(path: str) -> Iterator[str]:
    """A folder that is gone in the end, and that of a fetch that was killed before."""
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def check_space(device: str) -> None:
    free = shutil.disk_usage(cache()).free // 1_000_000
    if free < _wheels.NEEDS[device]:
        raise Failure(
            f"{short(cache())}: too little disk space for libtorch: expected {_wheels.NEEDS[device]} MB free, found {free} MB; "
            "free some, or set RLHF_CACHE to a folder on another disk"
        )


class Fetch:
    """The downloads of one fetch, into a folder with the layout of scripts/setup.sh."""

    def __init__(self, fetcher: Fetcher, result: str) -> None:
        self.fetcher = fetcher
        self.result = result

    def get(self, device: str) -> None:
        arch = self.fetcher.arch
        if device == "cuda":
            self.fetcher.get({_wheels.NAME: _wheels.TORCH[arch]}, CUDA_PART, self.result)
            self.fetcher.get(dict.fromkeys(self.of_metadata(), ()), NVIDIA_PART, self.result, with_dependencies=True)
            if not os.path.exists(os.path.join(self.result, "torch", "lib", "libtorch_cuda.so")):
                raise Failure(f"{_wheels.NAME}: expected libtorch_cuda.so in its wheel, found none")
        else:
            self.fetcher.get({_wheels.NAME: _wheels.TORCH_CPU[arch] + _wheels.TORCH[arch]}, CPU_PART, self.result)
            if not self.version().endswith("+cpu"):
                self.fetcher.get({name: hashes[arch] for name, hashes in _wheels.BESIDE.items()}, NVIDIA_CPU_PART, self.result)
        found = self.version() or "no version"
        if _libtorch.plain(found) != TORCH or not _libtorch.has_library(os.path.join(self.result, "torch")):
            raise Failure(f"{_wheels.NAME}: expected libtorch {TORCH} in its wheel, found {found}")

    def version(self) -> str:
        return _libtorch.version_of(os.path.join(self.result, "torch"))

    def of_metadata(self) -> list[str]:
        """NVIDIA's packages that torch pins."""
        folder = next((name for name in os.listdir(self.result) if name.endswith(".dist-info")), "")
        with open(os.path.join(self.result, folder, "METADATA"), encoding="utf-8") as file:
            names = re.findall(r"(?m)^Requires-Dist: ((?:nvidia-|cuda-toolkit)[^;\n]*)", file.read())
        shutil.rmtree(os.path.join(self.result, folder))
        if not names:
            raise Failure(f"{_wheels.NAME}: expected NVIDIA's packages in its metadata, found none")
        return [name.replace(" ", "") for name in names]


def check(libtorch: Libtorch) -> None:
    """Starts the program once: a libtorch that was damaged is noticed here."""
    program = _start.prepared(libtorch)
    done = subprocess.run([program, "--version"], env=_start.environment(libtorch), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Failure(
            f"{libtorch.folder}: the program does not start with it: {lines[-1]}; 'rlhf setup --remove' and 'rlhf setup' fetch it again"
        )


def remove() -> int:
    """Removes from the cache what this package has put there, and the cache if that was all."""
    candidates = [fetched(device) + end for device in ("cpu", "cuda") for end in ("", ".partial", ".lock")] + starts()
    there = [path for path in candidates if os.path.lexists(path)]
    for device in ("cpu", "cuda"):
        path = f"{fetched(device)}.lock"
        if os.path.exists(path) and locked(path, wait=False) is None:
            raise Failure(f"{short(path)}: another set-up is at work; end it first")
    for path in there:
        size = size_of(path) if os.path.isdir(path) else 0
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
        if size:
            say(f"removed {short(path)} ({size / 1e6:.0f} MB)")
    with contextlib.suppress(OSError):
        # Other files of the cache are those of builds from source.
        os.rmdir(cache())
    if not there:
        say(f"nothing to remove in {short(cache())}")
    return 0
