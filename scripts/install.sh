#!/usr/bin/env bash
# install.sh BINARY PREFIX: puts BINARY at PREFIX/bin/rlhf so that it runs without this checkout.
#
# Its first run path is PREFIX/lib/rlhf/torch/lib. A fetched libtorch is copied there, only the libraries in use;
# a libtorch of the user's own stays where it is and is linked to.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
binary=$1
prefix=${2/#\~/$HOME} # sh and zsh hand on the ~ of `PREFIX=~/.local` as it is
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
