#!/usr/bin/env bash
# venv.sh LINK REQUIREMENTS MESSAGE: makes the Python environment LINK with the packages of the file REQUIREMENTS, and prints MESSAGE
# first. Does nothing if the environment is there with these packages.
#
# LINK leads to a folder in ${RLHF_CACHE:-~/.cache/rlhf}/venvs, one for each list of packages and version of Python, so that all
# checkouts share it. Environments that nothing has used for 30 days are removed.
set -euo pipefail
link=$1 requirements=$2 message=$3
cache=${RLHF_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rlhf}/venvs
mkdir -p "$cache"
hash=$({ python3 --version; cat "$requirements"; } | sha256sum)
venv=$cache/${hash:0:16}

place() { [ "$(readlink "$link")" = "$venv" ] || { rm -rf "$link" && ln -s "$venv" "$link"; }; }

# One at a time: a second one waits, then finds the environment in place.
exec 9>"$venv.lock"
flock 9
# `installed` is written when all packages are installed, and its time is that of the last use.
if [ -e "$venv/installed" ] && [ -x "$venv/bin/python" ]; then
    touch "$venv/installed"
    place
    exit
fi
echo "$message" >&2
find "$cache" -mindepth 2 -maxdepth 2 -name installed -mtime +30 -printf '%h\n' | while read -r old; do rm -rf "$old"; done
rm -rf "$venv"
if python3 -m venv "$venv" >/dev/null 2>&1; then
    pip=("$venv/bin/python" -m pip)
else
    # Debian without python3-venv: an environment without pip, filled by the system's pip (22.3 or newer).
    rm -rf "$venv"
    python3 -m venv --without-pip "$venv"
    pip=(python3 -m pip --python "$venv/bin/python")
fi
# pip downloads to $TMPDIR first, and /tmp is often small. Compiling all modules now would take longer than those that are imported later.
mkdir "$venv/tmp"
TMPDIR=$venv/tmp "${pip[@]}" --disable-pip-version-check install --quiet --no-compile --only-binary=:all: -r "$requirements" ||
    { echo "error: $venv: pip could not install $requirements, for the reason above; is there a network, and disk space?" >&2; exit 1; }
rm -rf "$venv/tmp"
cp "$requirements" "$venv/installed"
place
