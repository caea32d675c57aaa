#!/bin/sh
# The whole demo: SFT, reward model, PPO, responses before and after, a summary. Takes about five minutes on two cores.
#
#     examples/sentiment/run.sh BINARY [--seed N] [--out FOLDER]
#
# BINARY is the built `rlhf`. The run goes to runs/sentiment of the checkout, or to FOLDER, and replaces the demo's last
# run there; a FOLDER with other contents is left unchanged. Exit code 1 when a step fails or a verdict is no.
set -eu

demo=examples/sentiment default_out=runs/sentiment kind=demo options="--seed --out"
. "$(dirname "$0")/run_shared.sh"

responses() { # MODEL FILE
    "$binary" generate --model_name_or_path "$1" --dataset_name $demo/data/prompts_test.jsonl --output_file "$2" \
        --max_new_tokens 48 --temperature 0.7 --seed "$seed" --batch_size 32
}

echo "Movie reviews learn to be positive: SFT, reward model, PPO (seed $seed), into $out"
step sft "a small GPT-NeoX learns 6000 reviews, from random weights" \
    "$binary" sft --config $demo/sft.yaml --output_dir "$out/sft" --seed "$seed" --overwrite_output_dir
step reward "a reward model learns from 1500 pairs that positive endings are preferred" \
    "$binary" reward --config $demo/reward.yaml --model_name_or_path "$out/sft" --output_dir "$out/reward" \
    --seed "$seed" --overwrite_output_dir
step ppo "the policy responds to prompts and learns from the reward model's scores" \
    "$binary" ppo --config $demo/ppo.yaml --sft_model_path "$out/sft" --reward_model_path "$out/reward" \
    --output_dir "$out/ppo" --seed "$seed" --overwrite_output_dir
step before "96 held-out prompts, responses of the model before PPO" responses "$out/sft" "$out/before.jsonl"
step after "the same prompts, responses of the model after PPO" responses "$out/ppo" "$out/after.jsonl"
printf '\n'
conclude $demo/summary.py ppo
