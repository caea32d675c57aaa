#!/usr/bin/env bash
# Tests of scripts/setup.sh and scripts/cuda.sh in a checkout of its own with a PATH of its own: no network, no real libtorch.
set -uo pipefail

# A shell that was started in the background ignores SIGINT, and so would everything below; here it has to arrive.
if [ -z "${SIGINT_ARRIVES-}" ]; then
    SIGINT_ARRIVES=1 exec python3 -c '
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp("bash", ["bash"] + sys.argv[1:])' "${BASH_SOURCE[0]}" "$@"
fi
cd "$(dirname "$0")/../.."
unset LIBTORCH CXX CARGO_TARGET_DIR PYTHONPATH

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
repo=$work/repo
bin=$work/bin
export RLHF_CACHE=$work/cache
python=$(python3 -c 'import sys; print(sys.executable)')
tools="bash env awk cat cp cut head readlink realpath flock grep ln mkdir mv rm sha256sum sleep tail uname"
. tests/setup/check.sh

# A new checkout and a PATH with what set-up needs. The fake python3 sees no site-packages; its pip is the file pip.
fresh() {
    rm -rf "$repo" "$bin" "$RLHF_CACHE"
    mkdir -p "$repo/scripts" "$repo/crates/tch-ext/csrc/gpu" "$bin"
    cp scripts/setup.sh scripts/cuda.sh "$repo/scripts/"
    echo 'source' | tee "$repo/crates/tch-ext/csrc/"{nccl.cpp,graph.cpp,gpu/nvrtc.cpp,groups.h,graph.h,common.h,kernels.h,gpu/gpu.h} >/dev/null
    local tool
    for tool in $tools; do ln -s "$(command -v "$tool")" "$bin/$tool"; done
    fake cargo 'exit 0'
    fake c++ 'exit 0'
    fake pip 'exit 1'
    # The wheels here are empty: how much room this machine has decides nothing.
    disk 50000
    fake_python
}

# A disk with $1 MB free.
disk() {
    fake df "[ \"\$1\" = -Pm ] && echo head && echo 'fs 99999 1 $1 1% /'"
}

fake_python() {
    fake python3 "[ \"\$1 \$2\" != '-m pip' ] || { shift 2; exec $bin/pip \"\$@\"; }; exec '$python' -S \"\$@\""
}

fake() {
    printf '#!%s\n%s\n' "$(command -v bash)" "$2" >"$bin/$1"
    chmod +x "$bin/$1"
}

# A fake pip that delivers wheels with the libtorch of version $1.
fake_wheels() {
    fake pip "[ \"\$1\" = --version ] && exit
    while [ \"\$1\" != --dest ]; do shift; done
    echo fetched >>$work/fetches
    exec $python - \"\$2\" $1 <<'PY'
import sys, zipfile
where, version = sys.argv[1:]
with zipfile.ZipFile(where + '/torch-any.whl', 'w') as wheel:
    wheel.writestr('torch/include/torch/headeronly/version.h', '#define TORCH_VERSION \\\\\n  \"' + version + '\"\n')
    for name in ('lib/libtorch.so', 'lib/libtorch_cpu.so', 'lib/libtorch_cuda.so', 'lib/libtorch_cuda_linalg.so', 'lib/libtorch_python.so', '__init__.py'):
        wheel.writestr('torch/' + name, name)
with zipfile.ZipFile(where + '/nvidia-any.whl', 'w') as wheel:
    for name in ('libcudart.so.13', 'libcupti.so.13', 'libnvperf_host.so'):
        wheel.writestr('nvidia/cu13/lib/' + name, name)
PY"
}

# The folder $1 holds libtorch of version $2.
libtorch() {
    mkdir -p "$1/include/torch/headeronly" "$1/lib"
    printf '#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION \\\n  "%s"\n' "$2" >"$1/include/torch/headeronly/version.h"
    : >"$1/lib/libtorch_cpu.so"
}

# A fake compiler that writes its arguments into the library.
fake_compiler() {
    fake c++ 'echo compiled >>'"$work"'/compiled
    arguments="$*"
    while [ "$1" != -o ]; do shift; done
    echo "$arguments" >"$2"'
}

# The folder $1 holds the libraries of a libtorch built for CUDA, and beside it NVIDIA's headers, those of NCCL of version $2.
cuda_libtorch() {
    libtorch "$1" 2.11.0
    : >"$1/lib/libtorch_cuda.so"
    local beside=$1/../nvidia header
    mkdir -p "$beside/nccl/include" "$beside/cu13/include/crt" "$beside/cu13/include/nv"
    echo "#define NCCL_VERSION_CODE $2" >"$beside/nccl/include/nccl.h"
    for header in cuda_runtime_api.h cublas_v2.h cusparse.h cusolverDn.h crt/host_defines.h nv/target; do
        : >"$beside/cu13/include/$header"
    done
}

# A fake pip that delivers the torch wheel with its metadata, or, asked for what that names, wheels of NVIDIA's.
fake_cuda_wheels() {
    fake pip "[ \"\$1\" = --version ] && exit
    while [ \"\$1\" != --dest ]; do shift; done
    echo \"\${*:3}\" >>$work/asked
    exec $python - \"\$2\" \"\${*:3}\" <<'PY'
import sys, zipfile
where, asked = sys.argv[1:]
def wheel(name, files):
    with zipfile.ZipFile(where + '/' + name + '.whl', 'w') as archive:
        for path, text in files.items():
            archive.writestr(path, text)
if 'torch==' in asked:
    metadata = 'Requires-Dist: sympy>=1.13.3\nRequires-Dist: cuda-toolkit[cublas,cudart]==13.0.2; platform_system == \"Linux\"\n'
    metadata += 'Requires-Dist: nvidia-nccl-cu13==2.28.9; platform_system == \"Linux\"\nRequires-Dist: triton==3.6.0; x\n'
    libraries = ('libtorch_cpu', 'libtorch_cuda', 'libtorch_cuda_linalg', 'libtorch_nvshmem', 'libtorch_python')
    files = {'torch/lib/' + name + '.so': name for name in libraries}
    wheel('torch-2.11.0-any', {**files, 'torch-2.11.0.dist-info/METADATA': metadata})
else:
    headers = {'nvidia/cu13/include/' + name + '.h': '' for name in ('cublas_v2', 'cusparse', 'cusolverDn', 'crt/host_defines')}
    wheel('nvidia_cublas-any', {'nvidia/cu13/lib/libcublas.so.13': '', 'nvidia/cu13/include/nv/target': '', **headers})
    nccl = {'nvidia/nccl/include/nccl.h': '#define NCCL_VERSION_CODE 22809\n'}
    wheel('nvidia_nccl_cu13-any', {'nvidia/nccl/lib/libnccl.so.2': '', 'nvidia/__init__.py': '', **nccl})
    wheel('nvidia_cuda_runtime-any', {'nvidia/cu13/lib/libcudart.so.13': '', 'nvidia/cu13/include/cuda_runtime_api.h': ''})
    wheel('cuda_toolkit-any', {'cuda_toolkit-13.0.2.dist-info/METADATA': ''})
PY"
}

# Runs set-up; leaves its exit code in $rc, its output in $out and $err.
setup() { run_script setup.sh; }
cuda() { run_script cuda.sh; }
run_script() {
    PATH=$bin "$repo/scripts/$1" </dev/null >"$work/out" 2>"$work/err"
    rc=$?
    out=$(<"$work/out")
    err=$(<"$work/err")
}

# Set-up failed with one line on standard error that starts with "error: " and contains each of the arguments.
one_error() {
    [ "$rc" = 1 ] && [[ $err == "error: "* && $err != *$'\n'* ]] || return 1
    local part
    for part; do [[ $err == *"$part"* ]] || return 1; done
}
contains() { [[ $1 == *"$2"* ]]; }
silent_success() { [ "$rc$out$err" = 0 ]; }
nothing_in_place() { [ -z "$(ls "$repo/.libtorch" | grep -v '^lock$')" ]; }
fetched_times() { [ "$(cat "$work/fetches" 2>/dev/null | wc -l)" = "$1" ]; }

fresh; rm "$bin/cargo"; setup
check "no cargo" one_error "cargo" "rustup"

fresh; rm "$bin/c++"; setup
check "no C++ compiler" one_error "C++ compiler" "'c++'" "g++"

fresh; rm "$bin/c++"; fake clang++ 'exit 0'; rm "$bin/python3"; CXX="clang++ -O2" setup
check "CXX names the compiler" one_error "python3"

fresh; rm "$bin/python3"; setup
check "no python3" one_error "python3"

fresh; fake pip 'echo "No module named pip" >&2; exit 1'; setup
check "no pip" one_error "no pip for $bin/python3"

fresh; fake pip '[ "$1" = --version ] || {
    for _ in 1 2; do echo "WARNING: broken by '"'"'NewConnectionError('"'"'a: [Errno -2] Name not known'"'"')'"'"'"; done
    echo "ERROR: No matching distribution"; exit 1; } >&2'; setup
check "no network" one_error "is there a network? pip said: [Errno -2] Name not known"
check "a failed fetch leaves nothing" nothing_in_place

fresh; fake pip 'exit 0'; disk 999; setup
check "too little disk" one_error "$repo/.libtorch" "expected 2048 MB free" "found 999 MB"

fresh; rm "$bin/uname"; fake uname '[ "$1" = -m ] && echo riscv64 || echo Linux'; setup
check "no wheel for this machine" one_error "riscv64" "LIBTORCH"

fresh; libtorch "$work/mine" 2.11.0; rm "$bin/python3"; LIBTORCH=$work/mine setup
check "the user's LIBTORCH wins" silent_success
check "the user's LIBTORCH needs no folder here" [ ! -e "$repo/.libtorch" ]

fresh; libtorch "$work/old" 2.10.1; LIBTORCH=$work/old setup
check "LIBTORCH of another version" one_error "LIBTORCH=$work/old" "expected libtorch 2.11.0" "found 2.10.1"

fresh; LIBTORCH=$work/nowhere setup
check "LIBTORCH without libtorch" one_error "$work/nowhere" "found no libtorch"

fresh; libtorch "$repo/torch" 2.11.0; (cd "$repo" && setup; [ ! -e .libtorch/torch ]); rc=$?
check "a folder named torch is no Python package" [ $rc = 0 ]

for value in "" torch; do
    fresh; LIBTORCH=$value setup
    check "LIBTORCH='$value'" one_error "LIBTORCH='$value'" "absolute path"
done

# The package fails when imported: it is to be found, not run.
mkdir -p "$work/site/torch"; echo 'raise SystemExit("imported")' >"$work/site/torch/__init__.py"
libtorch "$work/site/torch" 2.11.0
fresh; PYTHONPATH=$work/site setup
check "Python's torch wins" [ "$rc:$(readlink "$repo/.libtorch/torch")" = "0:$work/site/torch" ]
check "Python's torch is named" contains "$out" "$work/site/torch"
rm "$bin/python3"; setup
check "Python is not asked again" silent_success

# The same checkout after that torch was upgraded, with what cargo remembers of it.
mkdir -p "$repo/target/debug/.fingerprint/torch-sys-1"
libtorch "$work/site/torch" 2.12.0
fake_python; fake_wheels 2.11.0; PYTHONPATH=$work/site setup
check "Python's torch of another version is left alone" contains "$rc: $out" "0: setup: Python's torch in $work/site/torch is 2.12.0"
check "a stale link is replaced" [ -f "$repo/.libtorch/torch/lib/libtorch_cpu.so" -a ! -L "$repo/.libtorch/torch" ]
check "the linked torch survives" [ -f "$work/site/torch/lib/libtorch_cpu.so" ]
check "cargo asks torch-sys again" [ ! -e "$repo/target/debug/.fingerprint/torch-sys-1" ]

rm "$work/fetches"; fresh; fake_wheels 2.11.0; setup
files=$(cd "$repo/.libtorch" && find . -type f | LC_ALL=C sort | tr '\n' ' ')
check "a fetch unpacks the CPU's part only" [ "$rc:$files" = "0:./lock ./nvidia/cu13/lib/libcudart.so.13 \
./nvidia/cu13/lib/libcupti.so.13 ./torch/include/torch/headeronly/version.h ./torch/lib/libtorch.so ./torch/lib/libtorch_cpu.so " ]
check "GNU ld does not meet libtorch_cuda.so" [ "$(<"$repo/.libtorch/torch/lib/libtorch.so")" = "INPUT(-ltorch_cpu)" ]
setup
check "a second run is silent" silent_success
check "a second run fetches nothing" fetched_times 1

rm -rf "$repo/.libtorch"; setup
check "another checkout has what this one fetched" [ "$rc:$out" = "0:setup: libtorch 2.11.0: from $RLHF_CACHE/libtorch-2.11.0" ]
check "it is not fetched again" fetched_times 1
check "it takes no space" [ "$(stat -c %h "$repo/.libtorch/torch/lib/libtorch_cpu.so")" = 2 ]

fresh; fake_wheels 2.11.0; touch "$RLHF_CACHE"; setup
check "a cache that cannot be written is done without" [ "$rc" = 0 -a -f "$repo/.libtorch/torch/lib/libtorch_cpu.so" ]
rm "$RLHF_CACHE"

fresh; fake_wheels 2.12.0; setup
check "a wheel of another version" one_error "expected libtorch 2.11.0" "found 2.12.0"
check "a wheel of another version leaves nothing" nothing_in_place

fresh; fake pip '[ "$1" = --version ] && exit; while [ "$1" != --dest ]; do shift; done; echo half >$2/torch.whl'; setup
check "a broken wheel" one_error "cannot unpack" "torch.whl" "not a zip file"
check "a broken wheel leaves nothing" nothing_in_place

for signal in INT TERM; do
    fresh; fake pip "[ \"\$1\" = --version ] && exit; kill -$signal \$PPID; sleep 0.1; exit 1"; setup 2>/dev/null
    check "SIG$signal while fetching fails without an excuse" [ "$rc" -gt 128 -a -z "$err" ]
    check "SIG$signal while fetching leaves nothing" nothing_in_place
done

fresh; fake pip '[ "$1" = --version ] && exit; kill -KILL $PPID; exit 1'; setup 2>/dev/null
fake_wheels 2.11.0; setup
check "a killed fetch is cleaned up by the next" [ "$rc$(ls "$repo/.libtorch" | tr '\n' ' ')" = "0lock nvidia torch " ]

rm "$work/fetches"; fresh; fake_wheels 2.11.0
PATH=$bin "$repo/scripts/setup.sh" >/dev/null 2>&1 & setup; wait $!
check "two at once fetch once" fetched_times 1

# scripts/cuda.sh

fresh; cuda
check "CUDA without libtorch" one_error "expected libtorch 2.11.0, found none" "make setup"

fresh; libtorch "$work/mine" 2.11.0; LIBTORCH=$work/mine cuda
check "no CUDA is written into the user's LIBTORCH" one_error "LIBTORCH=$work/mine" "unset it"

fresh; mkdir -p "$repo/.libtorch"; libtorch "$work/site/torch" 2.11.0; ln -s "$work/site/torch" "$repo/.libtorch/torch"; cuda
check "no CUDA is written into Python's torch" one_error "$work/site/torch" "built for CUDA"

fresh; libtorch "$repo/.libtorch/torch" 2.11.0; fake_cuda_wheels; fake_compiler; cuda
files=$(cd "$repo/.libtorch" && find . -name '*.so*' | LC_ALL=C sort | tr '\n' ' ')
check "CUDA is unpacked where libtorch looks for it" [ "$rc:$files" = "0:./nvidia/cu13/lib/libcublas.so.13 \
./nvidia/cu13/lib/libcudart.so.13 ./nvidia/nccl/lib/libnccl.so.2 ./torch/lib/libtch_ext_cuda.so ./torch/lib/libtorch_cpu.so \
./torch/lib/libtorch_cuda.so ./torch/lib/libtorch_cuda_linalg.so ./torch/lib/libtorch_nvshmem.so " ]
check "libtorch stays as it is" [ ! -s "$repo/.libtorch/torch/lib/libtorch_cpu.so" ]
check "the wheels are those that torch's metadata pins, and the compiler's headers" [ "$(<"$work/asked")" = \
"--no-deps torch==2.11.0
cuda-toolkit[cublas,cudart]==13.0.2 nvidia-nccl-cu13==2.28.9 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85" ]
library=$repo/.libtorch/torch/lib/libtch_ext_cuda.so
for part in "-shared -fPIC" "-D_GLIBCXX_USE_CXX11_ABI=1" "-isystem $repo/.libtorch/torch/include " \
    "-isystem $repo/.libtorch/nvidia/nccl/include " "-isystem $repo/.libtorch/nvidia/cu13/include " " crates/tch-ext/csrc/nccl.cpp crates/tch-ext/csrc/graph.cpp crates/tch-ext/csrc/gpu/nvrtc.cpp"; do
    check "the CUDA library is compiled with $part" contains "$(<"$library")" "$part"
done
check "no partial folder is left" [ ! -e "$repo/.libtorch/partial" -a ! -e "$library.partial" ]
rm "$work/asked" "$work/compiled"; cuda
check "a second run fetches and compiles nothing" [ "$rc" = 0 -a ! -e "$work/asked" -a ! -e "$work/compiled" ]
for source in nccl.cpp graph.cpp gpu/nvrtc.cpp gpu/gpu.h common.h; do
    rm -f "$work/compiled"; echo changed >>"$repo/crates/tch-ext/csrc/$source"; cuda
    check "a change of $source compiles the library again, and fetches nothing" \
        [ "$rc" = 0 -a -e "$work/compiled" -a ! -e "$work/asked" ]
done

# The library of before is in use: a failure leaves it as it is.
echo changed >>"$repo/crates/tch-ext/csrc/nccl.cpp"; before=$(<"$library")
fake c++ 'echo "In file included from x:" >&2; echo "nccl.cpp:3:10: fatal error: nccl.h: No such file" >&2; exit 1'; cuda
check "an error of the compiler" one_error "'c++' could not compile crates/tch-ext/csrc/nccl.cpp crates/tch-ext/csrc/graph.cpp crates/tch-ext/csrc/gpu/nvrtc.cpp: nccl.cpp:3:10: fatal error: nccl.h"
check "an error of the compiler leaves the library of before" [ "$(<"$library")" = "$before" -a ! -e "$repo/.libtorch/partial" ]
fake c++ 'exit 1'; cuda
check "a compiler that fails without a reason" one_error "it printed no reason"
rm "$bin/c++"; cuda
check "no compiler for the CUDA library" one_error "no C++ compiler for the CUDA library: 'c++' is not on PATH; install g++"

fresh; libtorch "$repo/.libtorch/torch" 2.11.0; fake_cuda_wheels; rm "$bin/c++"; rm -f "$work/asked"; cuda
check "no compiler is noticed before a download" [ "$rc" = 1 -a ! -e "$work/asked" ]

fresh; libtorch "$repo/.libtorch/torch" 2.11.0; fake pip '[ "$1" = --version ] || { echo "ERROR: No matching distribution" >&2; exit 1; }'; cuda
check "CUDA without a network" one_error "is there a network? pip said: ERROR: No matching distribution"
check "a failed fetch of CUDA leaves nothing" [ "$(ls "$repo/.libtorch" | tr '\n' ' ')" = "lock torch " ]

fresh; libtorch "$repo/.libtorch/torch" 2.11.0; fake pip 'exit 0'; disk 999; cuda
check "too little disk for CUDA" one_error "expected 12000 MB free" "found 999 MB"

# The user's own torch: only the CUDA library is added to it.
mine=$work/gpu/torch
cuda_libtorch "$mine" 22809
fresh; fake_compiler; rm "$bin/python3"; LIBTORCH=$mine cuda
check "the CUDA library is built for the user's LIBTORCH, with the headers beside it" \
    [ "$rc:$(ls "$mine/lib" | tr '\n' ' ')" = "0:libtch_ext_cuda.so libtorch_cpu.so libtorch_cuda.so " ]
check "its headers are used" contains "$(<"$mine/lib/libtch_ext_cuda.so")" "-isystem $work/gpu/nvidia/nccl/include "
LIBTORCH=$mine cuda
check "a libtorch that has all needs nothing" contains "$rc: $out" "0: cuda: libtorch's CUDA half and the CUDA library are there"

fresh; fake_compiler; mkdir -p "$repo/.libtorch"; ln -s "$mine" "$repo/.libtorch/torch"; rm "$mine/lib/libtch_ext_cuda.so"; cuda
check "the CUDA library is built for Python's torch" [ "$rc" = 0 -a -s "$mine/lib/libtch_ext_cuda.so" ]

# Another version of NCCL beside it, and no crt: these are fetched, and nothing else.
cuda_libtorch "$mine" 23007; rm "$mine/../nvidia/cu13/include/crt/host_defines.h" "$mine/lib/libtch_ext_cuda.so"
fresh; fake_compiler; fake_cuda_wheels; rm -f "$work/asked"; LIBTORCH=$mine cuda
check "missing headers are fetched" [ "$rc:$(<"$work/asked")" = "0:--no-deps nvidia-nccl-cu13==2.28.9 nvidia-cuda-crt==13.0.88" ]
check "nccl.h of another version is not used" contains "$(<"$mine/lib/libtch_ext_cuda.so")" \
    "torch/include/torch/csrc/api/include -isystem $repo/.libtorch/headers/nvidia/nccl/include "
check "headers are fetched into the checkout" [ -f "$repo/.libtorch/headers/nvidia/cu13/include/crt/host_defines.h" ]

rm "$mine/lib/libtch_ext_cuda.so"
fresh; fake_compiler; fake pip '[ "$1" = --version ] || { echo "ERROR: No matching distribution" >&2; exit 1; }'; LIBTORCH=$mine cuda
check "headers without a network" one_error "is there a network? pip said: ERROR: No matching distribution"
check "a failed fetch of headers leaves nothing" [ ! -e "$mine/lib/libtch_ext_cuda.so" -a ! -e "$repo/.libtorch/headers" ]

fresh; fake_compiler; fake pip 'exit 0'; disk 999; LIBTORCH=$mine cuda
check "too little disk for headers" one_error "expected 3000 MB free" "found 999 MB"

fresh; fake_compiler; printf 'ELF\0libcudart.so.12\0' >"$mine/lib/libc10_cuda.so"; LIBTORCH=$mine cuda
check "a libtorch of another CUDA" one_error "$mine" "built for CUDA 13" "found one for libcudart.so.12"

fresh; "$repo/scripts/cuda.sh" --help >"$work/out"; rc=$?; out=$(<"$work/out")
check "--help explains how to use the user's own torch" contains "$rc: $out" "export LIBTORCH="
check "--help is all of the script's header" contains "$out" "Each failure is one line"

check_summary setup
