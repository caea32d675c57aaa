"""The library of NCCL, CUDA graphs and kernels, compiled by scripts/cuda.sh, loads beside the libtorch of torch for CUDA 13 and goes into a wheel.

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
from gpu_sources import options_of

ROOT = Path(__file__).resolve().parent.parent.parent
TORCH = Path(torch.__file__).parent
NAME = "libtch_ext_cuda.so"


def run(*command, **more):
    print("+", *command, flush=True)
    return subprocess.run(command, check=True, cwd=ROOT, **more)


def compile_by(library):
    """Compiles a kernel by the library's function, which needs no GPU, and a text that is none."""
    # versions, compile, load, find, launch: `Functions` of gpu.h.
    compile_source = (ctypes.c_void_p * 5).in_dll(library, "tch_ext_gpu_functions_2")[1]
    kind = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int,
                            ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t))
    options = options_of(90)
    given = (ctypes.c_char_p * len(options))(*options)
    folder = ROOT / "crates/tch-ext/csrc/gpu"
    source = (folder / "device.cuh").read_text() + (folder / "norm.cu").read_text()
    binary, size = ctypes.c_void_p(), ctypes.c_size_t()
    message = kind(compile_source)(source.encode(), b"norm.cu", given, len(options), ctypes.byref(binary), ctypes.byref(size))
    assert message is None, message
    assert b".text.norm_bf16" in ctypes.string_at(binary, size.value)
    message = kind(compile_source)(b"no kernel", b"wrong.cu", given, len(options), ctypes.byref(binary), ctypes.byref(size))
    assert b"wrong.cu(1): error" in message, message
    print("ok: the library compiles kernels by NVRTC")


def main():
    program = sys.argv[1]
    assert torch.version.cuda and torch.version.cuda.startswith("13."), f"torch {torch.__version__}: expected a build for CUDA 13"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / NAME
        run("scripts/cuda.sh", "--library", library, env={**os.environ, "LIBTORCH": str(TORCH)})

        # As the program loads them: libtorch's symbols for all, then the library, each symbol at once.
        ctypes.CDLL(TORCH / "lib/libtorch_cuda.so", mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        loaded = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        for name in ("tch_ext_graph_functions", "tch_ext_gpu_functions_2", "tch_ext_cuda_key"):
            getattr(loaded, name)
        print("ok: the library loads beside libtorch's")
        compile_by(loaded)

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
