#!/usr/bin/env bash
# install.sh BINARY PREFIX: installs BINARY as PREFIX/bin/rlhf, with the libraries it needs, independent of this checkout.
#
# The first run path of the binary is PREFIX/lib/rlhf/torch/lib. Of a downloaded libtorch the libraries in use are copied
# there; any other libtorch is linked to where it is.
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
    env -u LD_LIBRARY_PATH ldd "$binary" | awk '$2 == "=>" { print $3 }' | while read -r path; do
        path=$(realpath -m "$path")
        case $path in "$fetched"/*) install -D -m 644 "$path" "$lib/${path#"$fetched"/}" ;; esac
    done
else
    ln -s "$(realpath "${LIBTORCH:-.libtorch/torch}")" "$lib/torch"
fi
install -m 755 "$binary" "$prefix/bin/rlhf"

"$prefix/bin/rlhf" --version >/dev/null
echo "installed $prefix/bin/rlhf (libraries: $lib)"
case :$PATH: in *:"$prefix/bin":*) ;; *) echo "note: $prefix/bin is not on your PATH" ;; esac
