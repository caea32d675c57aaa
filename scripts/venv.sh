#!/usr/bin/env bash
# venv.sh FOLDER REQUIREMENTS WHAT: makes the Python environment FOLDER with what REQUIREMENTS lists, unless it is there already;
# WHAT is said of it meanwhile.
set -euo pipefail
venv=$1 requirements=$2 what=$3

# The stamp is the list of what is installed, written when that is complete.
if cmp -s "$requirements" "$venv/installed" && [ -x "$venv/bin/python" ]; then
    exit
fi
echo "$what" >&2
rm -rf "$venv"
if python3 -m venv "$venv" >/dev/null 2>&1; then
    pip=("$venv/bin/python" -m pip)
else
    # Debian without python3-venv: an environment without pip, filled by the pip outside (22.3 or newer).
    rm -rf "$venv"
    python3 -m venv --without-pip "$venv"
    pip=(python3 -m pip --python "$venv/bin/python")
fi
"${pip[@]}" --disable-pip-version-check install --quiet --only-binary=:all: -r "$requirements" ||
    { echo "error: $venv: pip could not install $requirements; is there a network?" >&2; exit 1; }
cp "$requirements" "$venv/installed"
