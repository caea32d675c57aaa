#!/usr/bin/env bash
# Checks what rlhf writes with the programs that read it: transformers, peft and tensorboard, in an environment of their own.
# tests/interop/check.py exits with 0 only when every check ran and held; a check that was skipped is a failure.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
scripts/venv.sh .venv-interop scripts/interop-requirements.txt \
    "interop: installing transformers, peft and tensorboard into .venv-interop (once; with torch about 3 GB)"

cargo build --locked
HF_HUB_OFFLINE=1 .venv-interop/bin/python tests/interop/check.py "${CARGO_TARGET_DIR:-target}/debug/rlhf"
