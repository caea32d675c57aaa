#!/bin/sh
# The whole example: SFT, PPO with ROUGE-L, summaries of held-out documents before and after. Takes about a minute on two cores.
#
#     examples/t5-summary/run.sh BINARY [SEED [FOLDER]]
#
# BINARY is the built `rlhf`. The run goes to FOLDER, by default runs/t5-summary of the checkout. Exit code 1 if a stage fails or
# the score did not rise.
set -eu

[ $# -ge 1 ] && [ $# -le 3 ] || { echo "usage: $0 BINARY [SEED [FOLDER]]" >&2; exit 2; }
binary=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
seed=${2:-1} out=${3:-runs/t5-summary} demo=examples/t5-summary
case $seed in '' | *[!0-9]*) echo "run.sh: SEED: expected a number, found $seed" >&2; exit 2 ;; esac
case $out in /*) ;; *) out=$(pwd)/$out ;; esac
cd "$(dirname "$0")/../.."

summaries() { # MODEL FILE
    "$binary" generate --model_name_or_path "$1" --dataset_name $demo/data/prompts_test.jsonl --output_file "$2" \
        --max_new_tokens 12 --temperature 0.7 --seed "$seed" --overwrite_output_file
}

"$binary" sft --config $demo/sft.yaml --output_dir "$out/sft" --seed "$seed" --overwrite_output_dir
"$binary" ppo --config $demo/ppo.yaml --sft_model_path "$out/sft" --output_dir "$out/ppo" --seed "$seed" --overwrite_output_dir
summaries "$out/sft" "$out/before.jsonl"
summaries "$out/ppo" "$out/after.jsonl"
"${PYTHON:-python3}" $demo/summary.py "$out"
