#!/usr/bin/env bash
# venv.sh FOLDER REQUIREMENTS MESSAGE: makes the Python environment FOLDER with the packages of the file REQUIREMENTS, and prints
# MESSAGE first. Does nothing if the environment is there with these packages.
set -euo pipefail
venv=$1 requirements=$2 message=$3

# `installed` is a copy of REQUIREMENTS, written when all packages are installed.
if cmp -s "$requirements" "$venv/installed" && [ -x "$venv/bin/python" ]; then
    exit
fi
echo "$message" >&2
rm -rf "$venv"
if python3 -m venv "$venv" >/dev/null 2>&1; then
    pip=("$venv/bin/python" -m pip)
else
    # Debian without python3-venv: an environment without pip, filled by the system's pip (22.3 or newer).
    rm -rf "$venv"
    python3 -m venv --without-pip "$venv"
    pip=(python3 -m pip --python "$venv/bin/python")
fi
# pip downloads to $TMPDIR first, and /tmp is often small.
mkdir "$venv/tmp"
TMPDIR=$venv/tmp "${pip[@]}" --disable-pip-version-check install --quiet --only-binary=:all: -r "$requirements" ||
    { echo "error: $venv: pip could not install $requirements, for the reason above; is there a network, and disk space?" >&2; exit 1; }
rm -rf "$venv/tmp"
cp "$requirements" "$venv/installed"
