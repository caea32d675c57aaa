#!/usr/bin/env bash
# Loads the files that rlhf writes with transformers, peft and tensorboard, in a Python environment for this test, uses `rlhf serve`
# with the client of OpenAI, reports runs to wandb, MLflow and trackio, uploads with `rlhf push` and huggingface_hub to one server, and
# opens reports and the live page in Chromium, where it is installed.
# tests/interop/check.py exits with 0 only if every check ran and passed; a skipped check is a failure.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
scripts/venv.sh .venv-interop scripts/interop-requirements.txt \
    "interop: installing transformers, peft, tensorboard and openai into .venv-interop (once; with torch about 3 GB)"

scripts/venv.sh .venv-trackers scripts/trackers-requirements.txt \
    "interop: installing wandb, mlflow and trackio into .venv-trackers (once, about 1 GB)"

cargo build --locked
HF_HUB_OFFLINE=1 .venv-interop/bin/python tests/interop/check.py "${CARGO_TARGET_DIR:-target}/debug/rlhf"
.venv-interop/bin/python tests/interop/torchrun.py "${CARGO_TARGET_DIR:-target}/debug/rlhf"
.venv-interop/bin/python tests/interop/serve.py "${CARGO_TARGET_DIR:-target}/debug/rlhf"
.venv-interop/bin/python tests/interop/push.py "${CARGO_TARGET_DIR:-target}/debug/rlhf"
.venv-interop/bin/python tests/interop/browser.py "${CARGO_TARGET_DIR:-target}/debug/rlhf"
.venv-trackers/bin/python tests/interop/trackers.py "${CARGO_TARGET_DIR:-target}/debug/rlhf"
