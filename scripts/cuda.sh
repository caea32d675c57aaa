#!/usr/bin/env bash
# Provides what `rlhf --device cuda` needs (`cuda.sh --help` prints this text):
#
# 1. The CUDA libraries of libtorch, downloaded into the libtorch that setup.sh downloaded: those of the torch wheel, and
#    NVIDIA's wheels that its metadata pins (cuBLAS, cuDNN, NCCL and others). Nothing is linked with them; they are loaded only
#    by `--device cuda`, and by `--device auto` on a machine with a GPU.
# 2. libtch_ext_cuda.so beside libtorch_cuda.so, compiled from crates/tch-ext/csrc/nccl.cpp, graph.cpp and gpu/nvrtc.cpp: ranks on
#    GPUs communicate by it, one GPU generates faster with it, and kernels are compiled and loaded by it. It is compiled again when its sources change.
#
# A machine with a GPU often has a torch built for CUDA already. To use that one, and to build this library into its lib
# folder, name its folder:
#
#     export LIBTORCH=/usr/lib/python3/dist-packages/torch
#     make cuda
#
# It must be torch 2.11.0 built for CUDA 13. The headers beside it are used; those that are missing are downloaded.
#
# cuda.sh --library FILE compiles the library alone into FILE, on any machine: `make wheel CUDA=1` puts it into the wheel.
#
# Each failure is one line on standard error and exit code 1.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."

TORCH=2.11.0
# Disk space for the wheels, pip's cache of them, and the unpacked files: of CUDA, and of the headers alone.
FETCH_NEEDS_MB=12000
HEADERS_NEED_MB=3000
# Headers that the library includes, and the wheels that have them, at the versions that torch's metadata pins
# (cuda-toolkit 13.0.2). The version of nccl.h determines the layout of torch's classes.
NCCL_VERSION_CODE=22809
HEADERS=(
    nccl/include/nccl.h nvidia-nccl-cu13==2.28.9
    cu13/include/cuda_runtime_api.h nvidia-cuda-runtime==13.0.96
    cu13/include/cublas_v2.h nvidia-cublas==13.1.0.3
    cu13/include/cusparse.h nvidia-cusparse==12.6.3.3
    cu13/include/cusolverDn.h nvidia-cusolver==12.0.4.66
)
# The same for headers that no other wheel of torch's needs.
COMPILER_HEADERS=(
    cu13/include/crt/host_defines.h nvidia-cuda-crt==13.0.88
    cu13/include/nv/target nvidia-cuda-cccl==13.0.85
)
SOURCES=(crates/tch-ext/csrc/{nccl,graph,gpu/nvrtc}.cpp)
INCLUDED=(crates/tch-ext/csrc/{groups,graph,common,kernels,gpu/gpu}.h)

say() { printf 'cuda: %s\n' "$*"; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

alone=
case ${1-} in
"") ;;
--library)
    [ $# = 2 ] && [ -n "$2" ] || fail "--library: expected one file to write, such as target/libtch_ext_cuda.so"
    alone=$(realpath -m "$2")
    ;;
-h | --help)
    awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' scripts/cuda.sh
    exit
    ;;
*) fail "unexpected argument '$1': cuda.sh takes --library FILE and --help" ;;
esac

torch=${LIBTORCH-$PWD/.libtorch/torch}
library=${alone:-$torch/lib/libtch_ext_cuda.so}
# The library contains this text, so that a change of its sources or of libtorch is noticed.
key="tch-ext cuda $(cat "${SOURCES[@]}" "${INCLUDED[@]}" <(echo $TORCH) | sha256sum | cut -c 1-64)"

has_cuda() { [ -e "$torch/lib/libtorch_cuda.so" ]; }
has_library() { [ -e "$library" ] && grep -aqF "$key" "$library"; }

# Fails unless CUDA can be fetched into $torch.
check_fetch() {
    [ -z "${LIBTORCH+set}" ] ||
        fail "LIBTORCH=$LIBTORCH: expected a libtorch built for CUDA, found one without; unset it to have $TORCH fetched"
    [ -e "$torch/lib/libtorch_cpu.so" ] || fail "$torch: expected libtorch $TORCH, found none; run 'make setup' first"
    [ ! -L .libtorch/torch ] ||
        fail "$(readlink .libtorch/torch): expected a torch built for CUDA, found one without; install torch==$TORCH from PyPI there"
}

# Fails unless the CUDA library can be built for $torch.
check_build() {
    command -v "${cxx%% *}" >/dev/null ||
        fail "no C++ compiler for the CUDA library: '${cxx%% *}' is not on PATH; install g++ (or name yours in CXX)"
    if [ -n "$alone" ]; then
        [ -e "$torch/include/ATen/cuda/CUDAConfig.h" ] ||
            fail "$torch: expected the headers of a torch built for CUDA, found none; set LIBTORCH to the folder of one"
        [ -d "${alone%/*}" ] && [ -w "${alone%/*}" ] || fail "${alone%/*}: expected a folder that can be written"
    elif [ ! -w "$torch/lib" ]; then
        fail "$torch/lib: no permission to write the CUDA library there; run 'make cuda' as the owner of that libtorch"
    fi
    local runtime
    runtime=$(grep -aoEm 1 'libcudart[-.0-9a-z]*\.so\.[0-9]+' "$torch/lib/libc10_cuda.so" 2>/dev/null | head -n 1 || true)
    case ${runtime:-libcudart.so.13} in
    *.so.13) ;;
    *) fail "$torch: the CUDA library needs a libtorch built for CUDA 13 (libcudart.so.13), found one for $runtime" ;;
    esac
}

# Fails unless pip is there and $1 MB are free.
check_download() {
    python3 -m pip --version >/dev/null 2>&1 || fail "no pip for $(command -v python3): install it (Debian: python3-pip)"
    local free_mb
    free_mb=$(df -Pm .libtorch | awk 'NR == 2 { print $4 }')
    [ "$free_mb" -ge "$1" ] ||
        fail "$PWD/.libtorch: too little disk space for CUDA: expected $1 MB free, found $free_mb MB"
}

# Downloads the packages given as arguments.
get() {
    local arch python platforms glibc reason
    arch=$(uname -m)
    python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    case $python in 3.1[0-4]) ;; *) python=3.12 ;; esac
    platforms=(--platform manylinux2014_"$arch")
    for glibc in {28..17}; do platforms+=(--platform manylinux_2_${glibc}_"$arch"); done
    TMPDIR=$partial PIP_REQUIRE_VIRTUALENV=0 python3 -m pip --disable-pip-version-check download \
        --only-binary=:all: --implementation cp --python-version "$python" "${platforms[@]}" \
        --dest "$partial" "$@" 2>"$partial/pip.log" && return
    reason=$(grep -oE "\[Errno[^'\")]*|timed out|certificate verify failed" "$partial/pip.log" | tail -n 1 || true)
    [ -n "$reason" ] || reason=$(grep -m 1 '^ERROR' "$partial/pip.log" || echo nothing)
    fail "pip could not download CUDA for libtorch $TORCH: is there a network? pip said: $reason"
}

# Unpacks from all downloaded wheels the files whose paths begin with a match of $1, and removes the wheels.
unpack() {
    local reason
    reason=$(python3 - "$partial" "$1" 2>&1 <<'PY'
import glob, os, re, sys, zipfile

keep = re.compile(sys.argv[2])
try:
    for wheel in sorted(glob.glob(sys.argv[1] + "/*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(sys.argv[1], [n for n in archive.namelist() if keep.match(n)])
        os.remove(wheel)
except (OSError, zipfile.BadZipFile) as e:
    sys.exit(f"{wheel}: {e}")
PY
    ) || fail "cannot unpack CUDA: $reason"
}

# Downloads the CUDA libraries and headers into .libtorch.
fetch_cuda() {
    check_download $FETCH_NEEDS_MB
    say "fetching the torch $TORCH wheel (from pip's cache where it is there, else 530 MB)"
    get --no-deps torch==$TORCH
    local requirements i
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
    for ((i = 1; i < ${#COMPILER_HEADERS[@]}; i += 2)); do requirements+=("${COMPILER_HEADERS[i]}"); done
    say "fetching ${requirements[*]} (once, about 2.5 GB)"
    get "${requirements[@]}"

    say "unpacking"
    unpack 'torch/lib/libtorch_(cuda|nvshmem)|nvidia/[^/]+/(lib/[^/]+\.so|include/)'
    [ -e "$partial/torch/lib/libtorch_cuda.so" ] || fail "the torch==$TORCH wheel: expected libtorch_cuda.so in it, found none"

    rm -rf .libtorch/nvidia
    mv "$partial/nvidia" .libtorch/nvidia
    # libtorch_cuda.so comes last: this script and the program look for it, and by then all that it needs is in place.
    mv -f "$partial"/torch/lib/libtorch_nvshmem*.so "$torch/lib/" 2>/dev/null || true
    local file
    for file in "$partial"/torch/lib/libtorch_cuda_*.so "$partial/torch/lib/libtorch_cuda.so"; do
        [ ! -e "$file" ] || mv -f "$file" "$torch/lib/"
    done
    say "libtorch's CUDA half is ready in .libtorch/torch/lib; --device cuda uses it"
}

# Whether folder $1 of NVIDIA's wheels has header $2, of NCCL in the version that torch was compiled with.
has_header() {
    case $2 in
    nccl/*) grep -Eqs "^#define NCCL_VERSION_CODE +$NCCL_VERSION_CODE\b" "$1/$2" ;;
    *) [ -e "$1/$2" ] ;;
    esac
}

# Downloads into .libtorch/headers the headers that are neither there nor beside $torch.
fetch_headers() {
    local all=("${HEADERS[@]}" "${COMPILER_HEADERS[@]}") missing=() i
    for ((i = 0; i < ${#all[@]}; i += 2)); do
        has_header "$beside" "${all[i]}" || has_header "$fetched" "${all[i]}" || missing+=("${all[i + 1]}")
    done
    [ ${#missing[@]} != 0 ] || return 0
    check_download $HEADERS_NEED_MB
    say "fetching ${missing[*]} for their headers (once, up to 1 GB)"
    get --no-deps "${missing[@]}"
    unpack 'nvidia/[^/]+/include/'
    mkdir -p .libtorch/headers/nvidia
    cp -R "$partial"/nvidia/. .libtorch/headers/nvidia/
}

# Compiles the CUDA library. It names no libraries: its symbols are those of libtorch_cuda.so, which is loaded before it.
build_library() {
    local beside fetched=$PWD/.libtorch/headers/nvidia folder folders=() nccl reason
    beside=$(realpath -m "$torch/../nvidia")
    fetch_headers
    nccl=$beside
    has_header "$beside" nccl/include/nccl.h || nccl=$fetched
    for folder in "$torch"/include{,/torch/csrc/api/include} "$nccl/nccl/include" {"$beside","$fetched"}/cu13/include; do
        folders+=(-isystem "$folder")
    done
    say "compiling the CUDA library"
    # shellcheck disable=SC2086 # CXX may have options
    $cxx -shared -fPIC -O2 -std=c++17 -D_GLIBCXX_USE_CXX11_ABI=1 -DTCH_EXT_CUDA_KEY="\"$key\"" "${folders[@]}" \
        -o "$partial/library.so" "${SOURCES[@]}" 2>"$partial/c++.log" || {
        reason=$(grep -m 1 -E 'error|cannot' "$partial/c++.log" || head -n 1 "$partial/c++.log")
        fail "'$cxx' could not compile ${SOURCES[*]}: ${reason:-it printed no reason}"
    }
    # A rename within the folder: a running program keeps the old library.
    cp "$partial/library.so" "$library.partial" && mv -f "$library.partial" "$library" || fail "cannot write $library"
    say "the CUDA library is ready: $library"
}

cxx=${CXX:-c++}
if [ -n "$alone" ]; then
    ! has_library || { say "the CUDA library is there: $library"; exit; }
elif has_cuda && has_library; then
    say "libtorch's CUDA half and the CUDA library are there: $torch/lib"
    exit
elif ! has_cuda; then
    check_fetch
fi
[ "$(uname -s)" = Linux ] || fail "no CUDA for $(uname -s): expected Linux"
check_build

mkdir -p .libtorch
exec 9>.libtorch/lock
flock -n 9 || { say "waiting for another set-up in $PWD"; flock 9; }

# As in setup.sh: all work is done in this folder, and the last steps rename its results.
partial=$PWD/.libtorch/partial
trap 'rm -rf "$partial" "$library.partial"' EXIT
trap 'exit 130' INT
rm -rf "$partial"
mkdir "$partial"
[ -n "$alone" ] || has_cuda || fetch_cuda
has_library || build_library
