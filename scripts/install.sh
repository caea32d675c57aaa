#!/usr/bin/env bash
# install.sh BINARY PREFIX: installs BINARY as PREFIX/bin/rlhf, with the libraries it needs, independent of this checkout.
#
# The first run path of the binary is PREFIX/lib/rlhf/torch/lib. Of a downloaded libtorch the libraries in use are copied
# there, and those of `make cuda` if it has run (3 GB); any other libtorch is linked to where it is.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
binary=$1
prefix=${2/#\~/$HOME} # sh and zsh do not expand the ~ in `PREFIX=~/.local`
[[ $prefix == /* ]] || { echo "error: PREFIX='$prefix': expected an absolute path" >&2; exit 1; }
lib=$prefix/lib/rlhf

mkdir -p "$prefix/bin" "$lib"
rm -rf "$lib/torch" "$lib/nvidia"
if [ -z "${LIBTORCH:-}" ] && [ ! -L .libtorch/torch ]; then
    fetched=$(realpath .libtorch)
    env -u LD_LIBRARY_PATH ldd "$binary" | sed -n 's/.* => \(.*\) (0x.*/\1/p' | while read -r path; do
        path=$(realpath -m "$path")
        case $path in "$fetched"/*) install -D -m 644 "$path" "$lib/${path#"$fetched"/}" ;; esac
    done
    # The binary is not linked with CUDA: it loads libtorch_cuda.so and the CUDA library of scripts/cuda.sh from the folder of libtorch_cpu.so, and
    # they load NVIDIA's libraries by their place relative to it.
    if [ -e "$fetched/torch/lib/libtorch_cuda.so" ]; then
        (cd "$fetched" && find torch/lib nvidia/*/lib -maxdepth 1 -name '*.so*') |
            grep -E '^nvidia/|^torch/lib/lib(.*cuda|.*nvrtc|torch_nvshmem)' | while read -r path; do
            install -D -m 644 "$fetched/$path" "$lib/$path"
        done
    fi
else
    ln -s "$(realpath "${LIBTORCH:-.libtorch/torch}")" "$lib/torch"
fi
[ -e "$lib/torch/lib/libtorch_cpu.so" ] ||
    { echo "error: $lib/torch/lib: expected libtorch_cpu.so to be installed there, found none" >&2; exit 1; }
install -m 755 "$binary" "$prefix/bin/rlhf"

"$prefix/bin/rlhf" --version >/dev/null
echo "installed $prefix/bin/rlhf (libraries: $lib)"
case :$PATH: in *:"$prefix/bin":*) ;; *) echo "note: $prefix/bin is not on your PATH" ;; esac
