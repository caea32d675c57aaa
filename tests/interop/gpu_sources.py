"""Compiles the kernels in crates/tch-ext/csrc/gpu by NVRTC for the architectures that torch for CUDA 13 has, as the program does on a GPU.

    .venv-interop/bin/python tests/interop/gpu_sources.py

NVRTC needs no GPU. It is that of torch's wheels (nvidia-cuda-nvrtc). Each kernel of gpu.h must be in the binary of its source.
"""

import ctypes
import re
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent.parent.parent / "crates/tch-ext/csrc/gpu"
# A100, RTX 30, RTX 40, H100 and H200, B200.
ARCHITECTURES = (80, 86, 89, 90, 100)


def nvrtc():
    folders = sorted(Path(torch.__file__).parent.parent.glob("nvidia/*/lib/libnvrtc.so.*"))
    return ctypes.CDLL(str(folders[0]))


def options_of(arch):
    """The options of NVRTC that the program has in gpu.rs."""
    found = re.search(r"const OPTIONS: \[&str; (\d+)\] = \[(.*?)\];", (FOLDER.parent.parent / "src/gpu.rs").read_text())
    options = re.findall(r'"(\S+?)"', found[2])
    assert len(options) == int(found[1]), found[0]
    return [option.encode() for option in (f"--gpu-architecture=sm_{arch}", *options)]


def compiled(library, source, name, arch):
    """The binary of a source; exits with NVRTC's messages if it does not compile."""
    program = ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None) == 0
    options = options_of(arch)
    result = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    if result != 0 or "warning" in log.value.decode():
        sys.exit(f"{name} for sm_{arch}:\n{log.value.decode()}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, binary)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def main():
    library, kernels = nvrtc(), {}
    for source, name in re.findall(r"X\((\w+), (\w+)\)", (FOLDER / "gpu.h").read_text()):
        kernels.setdefault(source, []).append(name)
    assert kernels.keys() == {file.stem for file in FOLDER.glob("*.cu")}, f"gpu.h has {kernels.keys()}"
    common = (FOLDER / "device.cuh").read_text()
    for source, names in kernels.items():
        for arch in ARCHITECTURES:
            binary = compiled(library, common + (FOLDER / f"{source}.cu").read_text(), f"{source}.cu", arch)
            missing = [name for name in names if f".text.{name}\0".encode() not in binary]
            assert not missing, f"{source}.cu for sm_{arch}: no kernel {missing}"
        print(f"ok: {source}.cu, {len(names)} kernels, for sm_{', sm_'.join(map(str, ARCHITECTURES))}", flush=True)


if __name__ == "__main__":
    main()
