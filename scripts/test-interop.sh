#!/usr/bin/env bash
# Checks what rlhf writes with the programs that read it: transformers, peft and tensorboard, in an environment of their own.
# tests/interop/check.py exits with 0 only when every check ran and held; a check that was skipped is a failure.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
requirements=scripts/interop-requirements.txt
venv=.venv-interop

# The stamp is the list of what is installed, written when that is complete.
if ! cmp -s $requirements $venv/installed || [ ! -x $venv/bin/python ]; then
    echo "interop: installing transformers, peft and tensorboard into $venv (once; with torch about 3 GB)"
    rm -rf $venv
    if python3 -m venv $venv >/dev/null 2>&1; then
        pip=($venv/bin/python -m pip)
    else
        # Debian without python3-venv: an environment without pip, filled by the pip outside (22.3 or newer).
        rm -rf $venv
        python3 -m venv --without-pip $venv
        pip=(python3 -m pip --python $venv/bin/python)
    fi
    "${pip[@]}" --disable-pip-version-check install --quiet --only-binary=:all: -r $requirements ||
        { echo "error: $venv: pip could not install $requirements; is there a network?" >&2; exit 1; }
    cp $requirements $venv/installed
fi

cargo build --locked
HF_HUB_OFFLINE=1 $venv/bin/python tests/interop/check.py "${CARGO_TARGET_DIR:-target}/debug/rlhf"
