"""The library of NCCL and CUDA graphs, compiled by scripts/cuda.sh, loads beside the libtorch of torch for CUDA 13 and goes into a wheel.

    .venv-interop/bin/python tests/interop/cuda_library.py PROGRAM

No GPU is needed: that every symbol is found is checked, not what the functions do.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
TORCH = Path(torch.__file__).parent
NAME = "libtch_ext_cuda.so"


def run(*command, **more):
    print("+", *command, flush=True)
    return subprocess.run(command, check=True, cwd=ROOT, **more)


def main():
    program = sys.argv[1]
    assert torch.version.cuda and torch.version.cuda.startswith("13."), f"torch {torch.__version__}: expected a build for CUDA 13"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / NAME
        run("scripts/cuda.sh", "--library", library, env={**os.environ, "LIBTORCH": str(TORCH)})

        # As the program loads them: libtorch's symbols for all, then the library, each symbol at once.
        ctypes.CDLL(TORCH / "lib/libtorch_cuda.so", mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        loaded = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        for name in ("tch_ext_graph_functions", "tch_ext_cuda_key"):
            getattr(loaded, name)
        print("ok: the library loads beside libtorch's")

        out = Path(folder) / "dist"
        notices = Path(folder) / "notices"
        notices.write_text("notices")
        script = ["scripts/wheel.py", program, "--cuda_library", library, "--notices", notices, "--out", out, "--max_mb", "25"]
        run(sys.executable, *script)
        (wheel,) = out.glob("*.whl")
        entry = zipfile.ZipFile(wheel).getinfo(f"rlhf/cuda13/{NAME}")
        assert entry.compress_size < 100_000, entry
        print(f"ok: the wheel has it, in {entry.compress_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
