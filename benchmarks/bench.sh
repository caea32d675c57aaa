#!/usr/bin/env bash
# bench.sh ARGUMENTS: bench.py in an environment of its own that has TRL, made once. See README.md.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
scripts/venv.sh .venv-bench benchmarks/requirements.txt \
    "bench: installing TRL and what it needs into .venv-bench (once; with torch about 6 GB)"

exec .venv-bench/bin/python benchmarks/bench.py "$@"
