#!/usr/bin/env python3
"""Makes a wheel of a built program: the program, the Python package in python/, the data of its demo, licences and notices.

    scripts/wheel.py PROGRAM [--cuda_library FILE] [--out FOLDER] [--notices FILE] [--max_mb N]

PROGRAM is the built `rlhf`. It is stripped, and looks for libtorch only where the package puts links to it. The same inputs give the
same bytes. The wheel's platform is the oldest manylinux that has the versions of libraries that the program needs. FILE is what
`scripts/cuda.sh --library FILE` has compiled: with it, GPUs communicate by NCCL and generate with CUDA graphs.

maturin is not used: for a program, rather than an extension module, it would compile everything again. Standard library only.
"""

import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NoReturn

import elf
import notices

ROOT = Path(__file__).resolve().parent.parent
# The name `rlhf` is taken by another project in the package index. The import and the command are `rlhf`.
DISTRIBUTION = "rlhf-rs"
SOURCES = ROOT / "python"
EXAMPLE = ROOT / "examples/sentiment"
# Files of the example that `rlhf demo` uses.
DEMO = (
    "data/*.jsonl",
    "tokenizer/*",
    "model.json",
    "sft.yaml",
    "reward.yaml",
    "ppo.yaml",
    "grammar.py",
    "judge.py",
    "shared.py",
    "summary.py",
)
CUDA_LIBRARY = "rlhf/cuda13/libtch_ext_cuda.so"
RPATH = "$ORIGIN/../lib/rlhf/torch/lib"
# The glibc 2.N that the wheels of torch 2.11 need, and the newest GLIBCXX and CXXABI that manylinux_2_N allows, for each N where they change.
OLDEST = 28
GLIBCXX = {28: (3, 4, 24), 31: (3, 4, 28), 34: (3, 4, 29), 35: (3, 4, 30), 39: (3, 4, 33)}
CXXABI = {28: (1, 3, 11), 31: (1, 3, 12), 34: (1, 3, 13), 39: (1, 3, 15)}
# Libraries that every such system has, and those of libtorch.
KNOWN = re.compile(r"lib(c|m|dl|pthread|rt|gcc_s|stdc\+\+)\.so\.\d|ld-linux.*|lib(torch_cpu|c10|gomp)[-.].*")


class Failure(Exception):
    """What a user is told in one line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failure(f"{message}; see {self.prog} --help")


def version() -> str:
    """The version of the workspace; the package must have the same."""
    of_crate = re.search(r'(?m)^version = "([^"]+)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    of_package = re.search(r'__version__ = "([^"]+)"', (SOURCES / "rlhf/__init__.py").read_text(encoding="utf-8"))
    if not of_crate or not of_package or of_crate[1] != of_package[1]:
        raise Failure(
            f"python/rlhf/__init__.py: expected version {of_crate and of_crate[1]} of Cargo.toml, found {of_package and of_package[1]}"
        )
    return of_crate[1]


def check_version(program: Path, expected: str) -> None:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = done.stdout.strip() or (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if found != f"rlhf {expected}":
        raise Failure(f"{program} --version: expected 'rlhf {expected}', found '{found}'; build it from this checkout")


def platform(program: elf.Program, *libraries: elf.Program) -> str:
    """The oldest manylinux on which the program and the libraries run."""
    needed: dict[str, tuple[int, ...]] = {}
    for file in (program, *libraries):
        if unknown := [name for name in file.needed() if not KNOWN.match(name)]:
            raise Failure(f"the program is linked with {unknown[0]}, which not every Linux has")
        for kind, newest in file.versions().items():
            needed[kind] = max(newest, needed.get(kind, ()))
    number = max(OLDEST, needed.get("GLIBC", (2, 0))[1])
    for kind, table in (("GLIBCXX", GLIBCXX), ("CXXABI", CXXABI)):
        enough = [at for at, newest in table.items() if newest >= needed.get(kind, ())]
        if not enough:
            raise Failure(
                f"the program needs {kind}_{'.'.join(map(str, needed[kind]))}, which no manylinux has; build it with an older compiler"
            )
        number = max(number, min(enough))
    return f"manylinux_2_{number}_{program.machine}"


def stripped(path: Path) -> elf.Program:
    """A program or a library without symbols."""
    if not shutil.which("strip"):
        raise Failure("no strip on PATH: install binutils")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rlhf"
        done = subprocess.run(["strip", "-o", target, path], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failure(f"{path}: strip failed: {done.stderr.strip().splitlines()[-1]}")
        return elf.Program.read(target)


def cuda_library(path: Path) -> elf.Program:
    """The library of NCCL and CUDA graphs, of this checkout's sources."""
    if not path.is_file():
        raise Failure(f"{path}: no such library; build it with: scripts/cuda.sh --library {path}")
    library = stripped(path)
    if b"tch-ext cuda " not in library.data:
        raise Failure(f"{path}: expected the library that scripts/cuda.sh builds, found another file")
    return library


def metadata(number: str) -> str:
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", DISTRIBUTION),
        ("Version", number),
        ("Summary", "RLHF for language models: SFT, reward model, PPO, GRPO; a program in Rust on libtorch"),
        ("Keywords", "rlhf,ppo,grpo,llm,reinforcement-learning"),
        ("License-Expression", "MIT OR Apache-2.0"),
        *(("License-File", name) for name in LICENCES),
        ("Classifier", "Environment :: Console"),
        ("Classifier", "Intended Audience :: Science/Research"),
        ("Classifier", "Operating System :: POSIX :: Linux"),
        ("Classifier", "Programming Language :: Python :: 3"),
        ("Classifier", "Programming Language :: Rust"),
        ("Classifier", "Topic :: Scientific/Engineering :: Artificial Intelligence"),
        ("Project-URL", "Source, https://github.com/rlhf-rs/rlhf"),
        ("Requires-Python", ">=3.10"),
        ("Provides-Extra", "torch"),
        ("Requires-Dist", 'torch==2.11.0; extra == "torch"'),
        # For objects of these packages, beside which no torch of a certain version is needed.
        ("Provides-Extra", "datasets"),
        ("Requires-Dist", 'datasets; extra == "datasets"'),
        ("Provides-Extra", "transformers"),
        ("Requires-Dist", 'transformers; extra == "transformers"'),
        ("Description-Content-Type", "text/markdown"),
    ]
    return "".join(f"{name}: {value}\n" for name, value in fields) + "\n" + (SOURCES / "README.md").read_text(encoding="utf-8")


LICENCES = ("LICENSE-APACHE", "LICENSE-MIT", "NOTICES.txt")


def contents(program: elf.Program, library: elf.Program | None, number: str, tag: str, notice: str) -> dict[str, bytes]:
    """Paths in the wheel, and their bytes."""
    info = f"{DISTRIBUTION.replace('-', '_')}-{number}.dist-info"
    files = {str(path.relative_to(SOURCES)): path.read_bytes() for path in SOURCES.glob("rlhf/**/*") if path.suffix in (".py", ".typed")}
    files["rlhf/bin/rlhf"] = bytes(program.data)
    if library:
        files[CUDA_LIBRARY] = bytes(library.data)
    for pattern in DEMO:
        for path in EXAMPLE.glob(pattern):
            files[f"rlhf/_sentiment/{path.relative_to(EXAMPLE)}"] = path.read_bytes()
    for name in LICENCES[:2]:
        files[f"{info}/licenses/{name}"] = (ROOT / name).read_bytes()
    files[f"{info}/licenses/{LICENCES[2]}"] = notice.encode()
    files[f"{info}/METADATA"] = metadata(number).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: rlhf\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n".encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nrlhf = rlhf._launch:main\n"
    files[f"{info}/RECORD"] = record(files, f"{info}/RECORD").encode()
    return files


def record(files: dict[str, bytes], own: str) -> str:
    lines = []
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(files[name])}\n")
    return "".join([*lines, f"{own},,\n"])


def write(path: Path, files: dict[str, bytes]) -> None:
    """Writes the wheel: sorted, with one date, the metadata at the end as the format wants it."""
    moment = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315532800))[:6]  # a zip has no dates before 1980
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as wheel:
        for name in sorted(files, key=lambda name: (".dist-info/" in name, name)):
            entry = zipfile.ZipInfo(name, moment)
            entry.create_system = 3
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name == "rlhf/bin/rlhf" else 0o100644) << 16
            wheel.writestr(entry, files[name])
    partial.replace(path)


def make(path: Path, library_path: Path | None, out: Path, notice: str, max_mb: float) -> Path:
    """Makes the wheel of the program at `path`, and of the library if there is one; returns where it is."""
    number = version()
    if not path.is_file():
        raise Failure(f"{path}: no such program; build it with: cargo build --release")
    if not any(EXAMPLE.glob(DEMO[0])):
        raise Failure(f"{EXAMPLE / DEMO[0]}: expected the data of the demo, found none")
    try:
        program = stripped(path)
        program.set_rpath(RPATH)
        library = cuda_library(library_path) if library_path else None
        check_version(path.resolve(), number)
        tag = platform(program, *([library] if library else []))
    except elf.Broken as error:
        raise Failure(f"{path}: {error}") from error
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{DISTRIBUTION.replace('-', '_')}-{number}-py3-none-{tag}.whl"
    write(wheel, contents(program, library, number, tag, notice))
    size = wheel.stat().st_size / 1e6
    if size > max_mb:
        wheel.unlink()
        raise Failure(f"{wheel.name}: expected at most {max_mb:g} MB, found {size:.1f} MB; is {path} a release build?")
    print(f"{wheel} ({size:.1f} MB; the program: {len(program.data) / 1e6:.1f} MB)")
    return wheel


def main(arguments: list[str]) -> int:
    try:
        parser = Parser(prog="wheel.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("program", type=Path, metavar="PROGRAM")
        parser.add_argument("--cuda_library", type=Path, metavar="FILE", help="what scripts/cuda.sh --library FILE has compiled")
        parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER", help="where the wheel goes (default: dist)")
        parser.add_argument("--notices", type=Path, metavar="FILE", help="what scripts/notices.py has written, in place of running it")
        parser.add_argument("--max_mb", type=float, default=15, metavar="N", help="fail where the wheel is larger (default: 15)")
        options = parser.parse_args(arguments)
        notice = options.notices.read_text(encoding="utf-8") if options.notices else notices.written(notices.parts())
        make(options.program, options.cuda_library, options.out, notice, options.max_mb)
    except (Failure, notices.Missing) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
