#!/usr/bin/env bash
# Provides libtorch for cargo: $LIBTORCH, else .libtorch/torch, which .cargo/config.toml points at. Every make target runs
# this script first; it prints nothing and returns at once if libtorch is there.
#
# In order of preference: $LIBTORCH, an importable Python torch (linked, not copied), what another checkout has fetched, the wheel from
# PyPI (unpacked here; nothing is installed into Python). All must have the version that tch binds. What is fetched is kept in
# ${RLHF_CACHE:-~/.cache/rlhf}, from where checkouts on the same file system have it as hard links, which take no space.
#
# Each failure is one line on standard error and exit code 1.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."

TORCH=2.11.0
# Libraries that libtorch_cpu.so of that wheel is linked with, at the versions that its metadata (cuda-toolkit 13.0.2) pins.
CUDA_WHEELS=(nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85)
# Disk space for the wheels, pip's cache of them, and the unpacked files.
FETCH_NEEDS_MB=2048

cache=${RLHF_CACHE:-${XDG_CACHE_HOME:-${HOME-}/.cache}/rlhf}/libtorch-$TORCH

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints the version of the libtorch in folder $1, nothing if there is none. Older versions of torch have it in the second file.
version_of() {
    local header
    [ -e "$1/lib/libtorch_cpu.so" ] || return 0
    for header in "$1"/include/torch/{headeronly,csrc/api/include/torch}/version.h; do
        if [ -f "$header" ] && [[ $(<"$header") =~ define\ TORCH_VERSION[[:space:]\\]+\"([^\"+]+) ]]; then
            echo "${BASH_REMATCH[1]}"
            return
        fi
    done
}

command -v cargo >/dev/null ||
    fail "no cargo on PATH: install Rust 1.89 or newer (rustup.rs)"
cxx=${CXX:-c++}
command -v "${cxx%% *}" >/dev/null ||
    fail "no C++ compiler: '${cxx%% *}' is not on PATH; install g++ (or name yours in CXX)"

if [ -n "${LIBTORCH+set}" ]; then
    [[ $LIBTORCH == /* ]] ||
        fail "LIBTORCH='$LIBTORCH': expected an absolute path; unset it to let this script find or fetch libtorch $TORCH"
    found=$(version_of "$LIBTORCH")
    [ "$found" = $TORCH ] ||
        fail "LIBTORCH=$LIBTORCH: expected libtorch $TORCH, found ${found:-no libtorch}; unset it to have $TORCH fetched"
    exit
fi

[ "$(version_of .libtorch/torch)" = $TORCH ] && exit

# One set-up at a time: a second one waits, then finds libtorch in place.
mkdir -p .libtorch
exec 9>.libtorch/lock
flock -n 9 || { say "waiting for another set-up in $PWD"; flock 9; }
[ "$(version_of .libtorch/torch)" = $TORCH ] && exit

command -v python3 >/dev/null ||
    fail "no python3 on PATH: install Python 3 with pip, or set LIBTORCH to a libtorch $TORCH folder"

# Replaces .libtorch/torch by $1. torch-sys links CUDA or not depending on the libtorch that it finds, and cargo does not
# notice that libtorch changed: the fingerprints are removed, so that torch-sys is built again.
put_in_place() {
    rm -rf .libtorch/torch "${CARGO_TARGET_DIR:-target}"/*/.fingerprint/torch-sys-*
    mv "$1" .libtorch/torch
}

# Finds torch without importing it, which would take seconds. The current folder ('') is left out of the search.
python_torch=$(python3 -c '
import sys
sys.path = [p for p in sys.path if p]
from importlib.util import find_spec
spec = find_spec("torch")
print((spec and spec.submodule_search_locations or [""])[0])
' 2>/dev/null) || python_torch=
if [ -n "$python_torch" ]; then
    found=$(version_of "$python_torch")
    if [ "$found" = $TORCH ]; then
        say "libtorch $TORCH: using Python's torch in $python_torch"
        # A CUDA build of torch works too: torch-sys adds -ltorch_cuda, and rustc's --as-needed drops it again because no
        # symbol of it is used. (GNU ld keeps libtorch.so, see below, and through it the program loads CUDA's libraries at
        # each start: slower, but correct.)
        rm -f .libtorch/link
        ln -s "$python_torch" .libtorch/link
        put_in_place .libtorch/link
        exit
    fi
    say "Python's torch in $python_torch is ${found:-without libtorch}, not $TORCH; leaving it alone"
fi

# All work is done in this folder, and the last step renames its result, so that an interrupted download leaves no
# incomplete libtorch. A killed script may leave the folder; the next one removes it.
partial=$PWD/.libtorch/partial
trap 'rm -rf "$partial"' EXIT
trap 'exit 130' INT
rm -rf "$partial"
mkdir "$partial"

# Puts the unpacked folders of $partial in place.
finish() {
    rm -rf .libtorch/nvidia
    mv "$partial/nvidia" .libtorch/nvidia
    put_in_place "$partial/torch"
}

# Copies the folder $1 to $2, as hard links where that is possible.
copy() { cp -al "$1" "$2" 2>/dev/null || { rm -rf "$2"; cp -a "$1" "$2"; }; }

if [ "$(version_of "$cache/torch")" = $TORCH ]; then
    copy "$cache/torch" "$partial/torch"
    copy "$cache/nvidia" "$partial/nvidia"
    finish
    say "libtorch $TORCH: from $cache"
    exit
fi

arch=$(uname -m)
case "$(uname -s) $arch" in
"Linux x86_64" | "Linux aarch64") ;;
*) fail "no libtorch to fetch for $(uname -s) on $arch: expected Linux on x86_64 or aarch64; set LIBTORCH to a libtorch $TORCH folder" ;;
esac
python3 -m pip --version >/dev/null 2>&1 ||
    fail "no pip for $(command -v python3): install it (Debian: python3-pip), or set LIBTORCH to a libtorch $TORCH folder"
free_mb=$(df -Pm .libtorch | awk 'NR == 2 { print $4 }')
[ "$free_mb" -ge $FETCH_NEEDS_MB ] ||
    fail "$PWD/.libtorch: too little disk space for libtorch: expected $FETCH_NEEDS_MB MB free, found $free_mb MB"

say "libtorch $TORCH: fetching the PyPI wheel (once, about 530 MB)"
# The wheels of all Python versions contain the same libtorch; with the user's version, the tests' environment reuses pip's cache.
python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $python in 3.1[0-4]) ;; *) python=3.12 ;; esac
# pip downloads to $TMPDIR first, and /tmp is often small.
TMPDIR=$partial PIP_REQUIRE_VIRTUALENV=0 python3 -m pip --disable-pip-version-check download \
    --no-deps --only-binary=:all: --implementation cp --python-version $python \
    --platform manylinux_2_28_"$arch" --platform manylinux_2_25_"$arch" \
    --platform manylinux_2_17_"$arch" --platform manylinux2014_"$arch" \
    --dest "$partial" torch==$TORCH "${CUDA_WHEELS[@]}" 2>"$partial/pip.log" || {
    # After a failed connection, pip's last message is that no such version exists; the cause is in its warnings.
    reason=$(grep -oE "\[Errno[^'\")]*|timed out|certificate verify failed" "$partial/pip.log" | tail -n 1 || true)
    [ -n "$reason" ] || reason=$(grep -m 1 '^ERROR' "$partial/pip.log" || echo nothing)
    fail "pip could not download libtorch $TORCH: is there a network? pip said: $reason"
}

say "unpacking"
# Without the CUDA libraries (1 GB; torch-sys would link libtorch_cuda.so if it were there) and the Python binding.
reason=$(python3 - "$partial" 2>&1 <<'PY'
import glob, re, sys, zipfile

keep = re.compile(r"torch/(include|lib)/|nvidia/cu13/lib/lib(cudart|cupti)\.so")
drop = re.compile(r"torch/lib/libtorch_(cuda|nvshmem|python)")
try:
    for wheel in glob.glob(sys.argv[1] + "/*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if keep.match(n) and not drop.match(n)]
            archive.extractall(sys.argv[1], names)
except (OSError, zipfile.BadZipFile) as e:
    sys.exit(f"{wheel}: {e}")
PY
) || fail "cannot unpack libtorch: $reason"
found=$(version_of "$partial/torch")
[ "$found" = $TORCH ] || fail "the torch==$TORCH wheel: expected libtorch $TORCH in it, found ${found:-no libtorch}"
# libtorch.so is nearly empty: it depends on libtorch_cuda.so and defines a few functions of a newer libstdc++. GNU ld would
# link it for those (lld, rustc's default on x86-64 since 1.90, would not), and the program would not start.
echo 'INPUT(-ltorch_cpu)' >"$partial/torch/lib/libtorch.so"

# For other checkouts. Where it cannot be kept, they fetch it themselves.
kept=$cache.$$
if mkdir -p "$kept" 2>/dev/null; then
    { copy "$partial/torch" "$kept/torch" && copy "$partial/nvidia" "$kept/nvidia" && rm -rf "$cache" && mv -T "$kept" "$cache"; } 2>/dev/null ||
        rm -rf "$kept"
fi
finish
say "libtorch $TORCH is ready in .libtorch/torch"
