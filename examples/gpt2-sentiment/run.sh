#!/bin/sh
# The whole example: SFT, PPO with the classifier as the reward, answers and their scores before and after, a summary.
#
#     examples/gpt2-sentiment/run.sh BINARY [--seed N] [--out FOLDER] [--classifier FOLDER]
#
# BINARY is the built `rlhf`. The run goes to runs/gpt2-sentiment of the checkout, or to FOLDER, and replaces the example's
# last run there; a FOLDER that holds anything else is left alone. The classifier is the one that is shipped here, or that
# of --classifier. Exit code 1 when a step fails or the score has not risen.
set -eu

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0"
}
fail() {
    echo "run.sh: $1" >&2
    exit "${2:-1}"
}

binary= seed=1 out= classifier=
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage; exit 0 ;;
    --seed) [ $# -ge 2 ] || fail "--seed needs a number" 2; seed=$2; shift ;;
    --seed=*) seed=${1#*=} ;;
    --out) [ $# -ge 2 ] || fail "--out needs a folder" 2; out=$2; shift ;;
    --out=*) out=${1#*=} ;;
    --classifier) [ $# -ge 2 ] || fail "--classifier needs a folder" 2; classifier=$2; shift ;;
    --classifier=*) classifier=${1#*=} ;;
    -*) fail "unknown option $1 (known: --seed, --out, --classifier)" 2 ;;
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
example=examples/gpt2-sentiment
if [ -n "$classifier" ]; then classifier=$(absolute "${classifier%/}"); else classifier=$example/classifier; fi
if [ -n "$out" ]; then
    out=$(absolute "${out%/}")
    if [ -d "$out" ] && [ -n "$(ls -A "$out")" ] && [ ! -f "$out/timings.tsv" ]; then
        fail "$out: holds something that is no run of this example; name an empty or new folder"
    fi
else
    out=runs/gpt2-sentiment
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
    "$binary" generate --model_name_or_path "$1" --dataset_name $example/data/prompts_test.jsonl --output_file "$2.ids" \
        --overwrite_output_file --max_new_tokens 24 --temperature 0.7 --seed "$seed" --batch_size 32 &&
        # The classifier has a tokenizer of its own, so it gets the text alone.
        "$python" $example/summary.py --text "$2.ids" "$2.text" &&
        "$binary" score --model_name_or_path "$classifier" --reward_label POSITIVE --dataset_name "$2.text" \
            --output_file "$2" &&
        rm "$2.ids" "$2.text"
}

echo "GPT-2 learns to go on positively: SFT, PPO with a DistilBERT as the reward (seed $seed), into $out"
step sft "a small GPT-2 learns 6000 reviews, from random weights" \
    "$binary" sft --config examples/sentiment/sft.yaml --config_name $example/model.json --output_dir "$out/sft" \
    --seed "$seed" --overwrite_output_dir
step ppo "it goes on from 2 to 8 tokens, and learns from the classifier's scores" \
    "$binary" ppo --config $example/ppo.yaml --sft_model_path "$out/sft" --reward_model_path "$classifier" \
    --output_dir "$out/ppo" --seed "$seed" --overwrite_output_dir
step before "128 held-out prompts, answered by the model before PPO, and scored" answers "$out/sft" "$out/before.jsonl"
step after "the same prompts, answered by the model after PPO, and scored" answers "$out/ppo" "$out/after.jsonl"
printf '\n'
exec "$python" $example/summary.py "$out"
