"""Puts the program beside links to a libtorch, where its run path `$ORIGIN/../lib/rlhf/torch/lib` finds it, and starts it there.

No variable such as LD_LIBRARY_PATH is set: reward functions and other children of the program, which may import another torch, would
inherit it. The folder is made once for each program and libtorch:

    bin/rlhf                  the program, as a hard link or a copy: $ORIGIN is the folder of the file itself
    lib/rlhf/torch/lib/*      links to the libraries of the libtorch
    lib/rlhf/nvidia           links to the folders beside it, where these look for other libraries

Beside a libtorch for CUDA 13, a link goes to this package's library of NCCL and CUDA graphs: nothing is written into the user's torch.
"""

import os
import sys
import time

from rlhf import __version__
from rlhf._libtorch import Libtorch
from rlhf._places import CUDA_LIBRARY, PROGRAM, Failure, short, starts

# Folders beside that of torch that its libraries name in their run paths.
BESIDE = ("nvidia", "cusparselt", "torch.libs")
# Seconds: a folder is marked as used once a day, and removed when it was not used for so long that no run in it goes on.
DAY = 86400
QUARTER = 90 * DAY
OTHERS = "others can write there"


def key_of(libtorch: Libtorch) -> str:
    """A name that changes with the program, the libtorch and their places."""
    import zlib

    library = os.stat(os.path.join(libtorch.folder, "lib", "libtorch_cpu.so"))
    program = os.stat(PROGRAM)
    numbers = (program.st_ino, program.st_mtime_ns, library.st_dev, library.st_ino, library.st_mtime_ns)
    text = f"{PROGRAM}\n{libtorch.folder}\n{libtorch.version}\n{os.path.exists(with_cuda(libtorch))}\n{numbers}".encode()
    # The modules with better hashes take 10 ms to import.
    return f"{__version__}-{zlib.crc32(text):08x}{zlib.crc32(text[::-1]):08x}"


def with_cuda(libtorch: Libtorch) -> str:
    return os.path.join(libtorch.folder, "lib", "libtorch_cuda.so")


def is_for_cuda_13(libtorch: Libtorch) -> bool:
    """Whether a libtorch has CUDA, and is linked with the runtime of CUDA 13."""
    if not os.path.exists(with_cuda(libtorch)):
        return False
    try:
        with open(os.path.join(libtorch.folder, "lib", "libc10_cuda.so"), "rb") as file:
            names = file.read()
    except OSError:
        return False
    start = names.find(b"libcudart")
    return b".so.13" in names[start : names.find(b"\0", start)]


def place_program(folder: str) -> None:
    """Puts the program into a folder: as a hard link, else as a copy."""
    path = os.path.join(folder, "bin", "rlhf")
    os.makedirs(os.path.dirname(path))
    try:
        os.link(PROGRAM, path)
    except OSError:
        import shutil

        shutil.copyfile(PROGRAM, path)
        os.chmod(path, 0o755)


def place_links(folder: str, libtorch: Libtorch) -> None:
    """Puts links to the libraries into a folder."""
    lib = os.path.join(folder, "lib", "rlhf", "torch", "lib")
    os.makedirs(lib)
    real = os.path.realpath(libtorch.folder)
    for name in os.listdir(os.path.join(real, "lib")):
        if ".so" in name:
            os.symlink(os.path.join(real, "lib", name), os.path.join(lib, name))
            # Some builds give libgomp a name of their own. The program asks for the common one; both must be one library.
            if name.startswith("libgomp-") and not os.path.exists(os.path.join(real, "lib", "libgomp.so.1")):
                os.symlink(os.path.join(real, "lib", name), os.path.join(lib, "libgomp.so.1"))
    if os.path.exists(CUDA_LIBRARY) and is_for_cuda_13(libtorch):
        link = os.path.join(lib, os.path.basename(CUDA_LIBRARY))
        if os.path.lexists(link):
            os.remove(link)
        os.symlink(CUDA_LIBRARY, link)
    for name in BESIDE:
        beside = os.path.join(os.path.dirname(real), name)
        if os.path.isdir(beside):
            os.symlink(beside, os.path.join(folder, "lib", "rlhf", name))
    # `rlhf doctor` reads the version beside the libraries.
    for name in ("version.py", "include"):
        if os.path.exists(os.path.join(real, name)):
            os.symlink(os.path.join(real, name), os.path.join(folder, "lib", "rlhf", "torch", name))


def remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def is_ours(folder: str) -> bool:
    """Whether nobody else can write into a folder: programs are started from it."""
    found = os.lstat(folder)
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022 and os.path.isdir(folder) and not os.path.islink(folder)


def make(base: str, key: str, libtorch: Libtorch) -> None:
    """Makes a folder for the program under `base`, and removes those that are no longer used."""
    os.makedirs(base, mode=0o700, exist_ok=True)
    if not is_ours(base):
        raise PermissionError(13, OTHERS, base)
    partial = os.path.join(base, f".{os.getpid()}.partial")
    try:
        place_program(partial)
        place_links(partial, libtorch)
        try:
            os.rename(partial, os.path.join(base, key))
        except OSError:
            # Another start was faster; what it made is the same.
            if not os.path.exists(os.path.join(base, key, "bin", "rlhf")):
                raise
    finally:
        remove(partial)
    remove_unused(base, key)


def remove_unused(base: str, key: str) -> None:
    """Removes the folders for programs that nobody has started for long, or whose libtorch is gone."""
    for name in os.listdir(base):
        old = os.path.join(base, name)
        try:
            unused = time.time() - os.lstat(old).st_mtime > (DAY if name.endswith(".partial") else QUARTER)
        except OSError:
            # Another start has removed it.
            continue
        if name != key and (unused or is_dangling(old)):
            remove(old)


def is_dangling(folder: str) -> bool:
    library = os.path.join(folder, "lib", "rlhf", "torch", "lib", "libtorch_cpu.so")
    return os.path.islink(library) and not os.path.exists(library)


def prepared(libtorch: Libtorch) -> str:
    """The place of the program beside links to the libtorch, in the first folder that can have it."""
    key, problems = key_of(libtorch), []
    for base in starts():
        try:
            return prepared_in(base, key, libtorch)
        except OSError as error:
            problems.append(f"{short(base)}: {error.strerror}")
    raise Failure(f"no folder to start the program in ({'; '.join(problems)}); set RLHF_CACHE to a folder that can be written")


def prepared_in(base: str, key: str, libtorch: Libtorch) -> str:
    """The same in one folder; fails with the system's error where the program cannot be there, or not be started."""
    folder = os.path.join(base, key)
    program = os.path.join(folder, "bin", "rlhf")
    if not os.path.exists(program):
        make(base, key, libtorch)
    elif not is_ours(base):
        raise PermissionError(13, OTHERS, base)
    elif time.time() - os.stat(folder).st_mtime > DAY:
        try:
            os.utime(folder)
        except OSError:
            # A file system that is read-only by now. What is there can be used.
            pass
    if not os.access(program, os.X_OK):
        raise PermissionError(13, "programs cannot be started there", base)
    return program


def environment(libtorch: Libtorch) -> dict[str, str]:
    """The environment of the program: that of the caller, and for `rlhf doctor` where libtorch is from."""
    return {**os.environ, "RLHF_LIBTORCH_FROM": libtorch.why}


def replace_by(libtorch: Libtorch, arguments: list[str]) -> None:
    """Replaces this process by the program."""
    import signal

    # Python ignores these, and what is ignored stays so in the program.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    os.execve(prepared(libtorch), ["rlhf", *arguments], environment(libtorch))
