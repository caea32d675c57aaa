#!/usr/bin/env bash
# A crate outside the checkout, made by scripts/new-crate.sh, builds and runs without a word about libtorch.
#
# It is built into the checkout's target folder, with the checkout's profile, for which the dependencies are compiled already: the
# optimization levels that the crate's own profile has are read by cargo, and not tried.
set -uo pipefail
cd "$(dirname "$0")/../.."
checkout=$PWD
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$checkout/target}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. tests/setup/check.sh
says() { [[ $out == *"$1"* ]]; }

out=$(scripts/new-crate.sh "$work/my-trainer" 2>&1)
check "a crate is made" says "made $work/my-trainer"
out=$(scripts/new-crate.sh "$work/my-trainer" 2>&1)
check "a folder that exists is refused" says "error: $work/my-trainer: exists already"
out=$(scripts/new-crate.sh "$work/7 trainers" 2>&1)
check "a name that cargo does not take is refused" says "expected a folder name that cargo takes"

awk '/^\[/ { profile = /^\[profile\.dev/ } profile' "$checkout/Cargo.toml" >"$work/profile.toml"
# The checkout's own settings must not help: cargo reads them from the folders above the crate.
cd "$work/my-trainer" || exit 1
libtorch=$(awk -F'"' '/^\[/ { env = /^\[env\]/ } env && /^LIBTORCH = / { print $2 }' .cargo/config.toml)
check "its settings name the folder of libtorch" [ -e "$libtorch/lib/libtorch_cpu.so" ]
# Where LIBTORCH is set it stays, with the value of the crate's own settings: cargo compiles torch-sys again when it comes or goes.
out=$(env -u LIBTORCH -u LD_LIBRARY_PATH ${LIBTORCH:+"LIBTORCH=$libtorch"} \
    cargo build --offline --quiet --config "$work/profile.toml" 2>&1)
rc=$?
check "it builds" [ $rc = 0 ]
run() {
    out=$(cd / && env -u LIBTORCH -u LD_LIBRARY_PATH "$CARGO_TARGET_DIR/debug/my-trainer" "$@" 2>&1)
    rc=$?
}
run
check "it starts without a path to libtorch, and an error from main is one line" \
    [ "$rc:$out" = "1:Error: expected SFT_FOLDER PROMPTS.jsonl OUTPUT_FOLDER" ]
models=$checkout/tests/golden/trl_new/init/llama_policy
mkdir "$work/sft"
cp "$models"/* "$work/sft"
cp "$checkout"/tests/golden/models/gpt_neox/tokenizer*.json "$work/sft"
printf '{"prompt": "one two three"}\n{"prompt": "four five"}\n' >"$work/prompts.jsonl"
run "$work/sft" "$work/prompts.jsonl" "$work/out"
check "it trains" [ "$rc" = 0 -a -f "$work/out/model.safetensors" -a -f "$work/out/metrics.jsonl" ]

check_summary crate
