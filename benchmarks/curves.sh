#!/usr/bin/env bash
# curves.sh ARGUMENTS: curves.py, with an environment for each version of TRL, made once.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
scripts/venv.sh .venv-bench benchmarks/requirements.txt \
    "curves: installing TRL 1.11 and what it needs into .venv-bench (once; with torch about 6 GB)"
scripts/venv.sh .venv-interop scripts/interop-requirements.txt \
    "curves: installing TRL 1.16 and what it needs into .venv-interop (once; with torch about 6 GB)"

exec python3 benchmarks/curves.py "$@"
