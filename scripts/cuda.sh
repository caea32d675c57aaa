#!/usr/bin/env bash
# Downloads the CUDA libraries of libtorch for `rlhf --device cuda`, into the libtorch that setup.sh downloaded: those of
# the torch wheel, and NVIDIA's wheels that its metadata pins (cuBLAS, cuDNN, NCCL and others). Nothing is linked with
# them; they are loaded only by `--device cuda`, and by `--device auto` on a machine with a GPU.
#
# Each failure is one line on standard error and exit code 1.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."

TORCH=2.11.0
# Disk space for the wheels, pip's cache of them, and the unpacked files.
FETCH_NEEDS_MB=12000

say() { printf 'cuda: %s\n' "$*"; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

torch=${LIBTORCH-$PWD/.libtorch/torch}
if [ -e "$torch/lib/libtorch_cuda.so" ]; then
    say "libtorch's CUDA half is there: $torch/lib/libtorch_cuda.so"
    exit
fi
[ -z "${LIBTORCH+set}" ] ||
    fail "LIBTORCH=$LIBTORCH: expected a libtorch built for CUDA, found one without; unset it to have $TORCH fetched"
[ -e "$torch/lib/libtorch_cpu.so" ] || fail "$torch: expected libtorch $TORCH, found none; run 'make setup' first"
[ ! -L .libtorch/torch ] ||
    fail "$(readlink .libtorch/torch): expected a torch built for CUDA, found one without; install torch==$TORCH from PyPI there"
[ "$(uname -s)" = Linux ] || fail "no CUDA for $(uname -s): expected Linux"
python3 -m pip --version >/dev/null 2>&1 || fail "no pip for $(command -v python3): install it (Debian: python3-pip)"

exec 9>.libtorch/lock
flock -n 9 || { say "waiting for another set-up in $PWD"; flock 9; }
[ ! -e "$torch/lib/libtorch_cuda.so" ] || exit 0
free_mb=$(df -Pm .libtorch | awk 'NR == 2 { print $4 }')
[ "$free_mb" -ge $FETCH_NEEDS_MB ] ||
    fail "$PWD/.libtorch: too little disk space for CUDA: expected $FETCH_NEEDS_MB MB free, found $free_mb MB"

# As in setup.sh: all work is done in this folder, and the last steps rename its results.
partial=$PWD/.libtorch/partial
trap 'rm -rf "$partial"' EXIT
trap 'exit 130' INT
rm -rf "$partial"
mkdir "$partial"

arch=$(uname -m)
python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $python in 3.1[0-4]) ;; *) python=3.12 ;; esac
platforms=(--platform manylinux2014_"$arch")
for glibc in {28..17}; do platforms+=(--platform manylinux_2_${glibc}_"$arch"); done

# Downloads the packages given as arguments.
get() {
    TMPDIR=$partial PIP_REQUIRE_VIRTUALENV=0 python3 -m pip --disable-pip-version-check download \
        --only-binary=:all: --implementation cp --python-version $python "${platforms[@]}" \
        --dest "$partial" "$@" 2>"$partial/pip.log" && return
    local reason
    reason=$(grep -oE "\[Errno[^'\")]*|timed out|certificate verify failed" "$partial/pip.log" | tail -n 1 || true)
    [ -n "$reason" ] || reason=$(grep -m 1 '^ERROR' "$partial/pip.log" || echo nothing)
    fail "pip could not download CUDA for libtorch $TORCH: is there a network? pip said: $reason"
}

say "fetching the torch $TORCH wheel (from pip's cache where it is there, else 530 MB)"
get --no-deps torch==$TORCH
requirements=$(python3 - "$partial" <<'PY'
import glob, re, sys, zipfile

with zipfile.ZipFile(glob.glob(sys.argv[1] + "/torch-*.whl")[0]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = wheel.read(name).decode()
# The libraries only, without the Python bindings and triton.
for line in re.findall(r"(?m)^Requires-Dist: ((?:nvidia-|cuda-toolkit)[^;\n]*)", metadata):
    print(line.strip().replace(" ", ""))
PY
) || fail "the torch==$TORCH wheel cannot be read"
[ -n "$requirements" ] || fail "the torch==$TORCH wheel: expected the CUDA wheels that it needs in its metadata, found none"
mapfile -t requirements <<<"$requirements"
say "fetching ${requirements[*]} (once, about 2.5 GB)"
get "${requirements[@]}"

say "unpacking"
reason=$(python3 - "$partial" 2>&1 <<'PY'
import glob, os, re, sys, zipfile

keep = re.compile(r"torch/lib/libtorch_(cuda|nvshmem)|nvidia/[^/]+/lib/[^/]+\.so")
try:
    for wheel in sorted(glob.glob(sys.argv[1] + "/*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(sys.argv[1], [n for n in archive.namelist() if keep.match(n)])
        os.remove(wheel)
except (OSError, zipfile.BadZipFile) as e:
    sys.exit(f"{wheel}: {e}")
PY
) || fail "cannot unpack CUDA: $reason"
[ -e "$partial/torch/lib/libtorch_cuda.so" ] || fail "the torch==$TORCH wheel: expected libtorch_cuda.so in it, found none"

rm -rf .libtorch/nvidia
mv "$partial/nvidia" .libtorch/nvidia
# libtorch_cuda.so comes last: this script and the program look for it, and by then all that it needs is in place.
mv -f "$partial"/torch/lib/libtorch_nvshmem*.so "$torch/lib/" 2>/dev/null || true
for library in "$partial"/torch/lib/libtorch_cuda_*.so "$partial/torch/lib/libtorch_cuda.so"; do
    [ ! -e "$library" ] || mv -f "$library" "$torch/lib/"
done
say "libtorch's CUDA half is ready in .libtorch/torch/lib; --device cuda uses it"
