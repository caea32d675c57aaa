#!/usr/bin/env bash
# A GPU for some minutes: `gpu_window.sh pack` before, `gpu_window.sh run` there, `gpu_window.sh show` after. See gpu_window.py.
exec python3 "${BASH_SOURCE[0]%/*}/gpu_window.py" "$@"
