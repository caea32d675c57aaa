#!/bin/sh
# The whole demo: SFT, reward model, PPO, answers before and after, a summary. Takes about five minutes on two cores.
#
#     examples/sentiment/run.sh BINARY [--seed N] [--out FOLDER]
#
# BINARY is the built `rlhf`. The run goes to runs/sentiment of the checkout, or to FOLDER, and replaces the demo's last
# run there; a FOLDER that holds anything else is left alone. Exit code 1 when a step fails or a verdict is no.
set -eu

usage() {
    sed -n '2,7s/^# \{0,1\}//p' "$0"
}
fail() {
    echo "run.sh: $1" >&2
    exit "${2:-1}"
}

binary= seed=1 out=
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage; exit 0 ;;
    --seed) [ $# -ge 2 ] || fail "--seed needs a number" 2; seed=$2; shift ;;
    --seed=*) seed=${1#*=} ;;
    --out) [ $# -ge 2 ] || fail "--out needs a folder" 2; out=$2; shift ;;
    --out=*) out=${1#*=} ;;
    -*) fail "unknown option $1 (known: --seed, --out)" 2 ;;
    *) [ -z "$binary" ] || fail "two binaries given: $binary and $1" 2; binary=$1 ;;
    esac
    shift
done
[ -n "$binary" ] || { usage >&2; exit 2; }
case $seed in '' | *[!0-9]*) fail "--seed: expected a whole number, found '$seed'" 2 ;; esac
command -v "$binary" >/dev/null || fail "$binary: no such program; build it with: cargo build --release"
python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python: not found; the summary needs Python 3.9 or newer"

# Configurations name files from the checkout's root; what the caller named is relative to where the caller stands.
here=$(pwd)
cd "$(dirname "$0")/../.."
absolute() {
    case $1 in /*) echo "$1" ;; *) [ "$here" = "$(pwd)" ] && echo "$1" || echo "$here/$1" ;; esac
}
case $binary in */*) binary=$(absolute "$binary") ;; esac
demo=examples/sentiment
if [ -n "$out" ]; then
    out=$(absolute "${out%/}")
    if [ -d "$out" ] && [ -n "$(ls -A "$out")" ] && [ ! -f "$out/timings.tsv" ]; then
        fail "$out: holds something that is no run of this demo; name an empty or new folder"
    fi
else
    out=runs/sentiment
fi
mkdir -p "$out"
rm -f "$out/before.jsonl" "$out/after.jsonl" "$out/summary.json" "$out/summary.md"
: >"$out/timings.tsv"

step() { # NAME EXPLANATION COMMAND...
    name=$1
    printf '\n== %s: %s\n' "$name" "$2"
    shift 2
    started=$(date +%s)
    "$@" || fail "step '$name' failed"
    printf '%s\t%s\n' "$name" "$(($(date +%s) - started))" >>"$out/timings.tsv"
}
answers() { # MODEL FILE
    "$binary" generate --model_name_or_path "$1" --dataset_name $demo/data/prompts_test.jsonl --output_file "$2" \
        --max_new_tokens 48 --temperature 0.7 --seed "$seed" --batch_size 32
}

echo "Movie reviews learn to be positive: SFT, reward model, PPO (seed $seed), into $out"
step sft "a small GPT-NeoX learns 6000 reviews, from random weights" \
    "$binary" sft --config $demo/sft.yaml --output_dir "$out/sft" --seed "$seed" --overwrite_output_dir
step reward "a reward model learns from 1500 pairs that positive endings are preferred" \
    "$binary" reward --config $demo/reward.yaml --model_name_or_path "$out/sft" --output_dir "$out/reward" \
    --seed "$seed" --overwrite_output_dir
step ppo "the policy answers prompts and learns from the reward model's scores" \
    "$binary" ppo --config $demo/ppo.yaml --sft_model_path "$out/sft" --reward_model_path "$out/reward" \
    --output_dir "$out/ppo" --seed "$seed" --overwrite_output_dir
step before "96 held-out prompts, answered by the model before PPO" answers "$out/sft" "$out/before.jsonl"
step after "the same prompts, answered by the model after PPO" answers "$out/ppo" "$out/after.jsonl"
printf '\n'
exec "$python" $demo/summary.py "$out"
