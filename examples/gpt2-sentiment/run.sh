#!/bin/sh
# The whole example: SFT, PPO with the classifier as the reward, responses and their scores before and after, a summary.
#
#     examples/gpt2-sentiment/run.sh BINARY [--seed N] [--out FOLDER] [--classifier FOLDER]
#
# BINARY is the built `rlhf`. The run goes to runs/gpt2-sentiment of the checkout, or to FOLDER, and replaces the example's
# last run there; a FOLDER with other contents is left unchanged. The classifier is the one in this folder, or that
# of --classifier. Exit code 1 when a step fails or the score has not risen.
set -eu

example=examples/gpt2-sentiment default_out=runs/gpt2-sentiment kind=example options="--seed --out --classifier"
classifier=
. "$(dirname "$0")/../sentiment/run_shared.sh"
if [ -n "$classifier" ]; then classifier=$(absolute "${classifier%/}"); else classifier=$example/classifier; fi

responses() { # MODEL FILE
    "$binary" generate --model_name_or_path "$1" --dataset_name $example/data/prompts_test.jsonl --output_file "$2.ids" \
        --overwrite_output_file --max_new_tokens 24 --temperature 0.7 --seed "$seed" --batch_size 32 &&
        # The classifier has its own tokenizer, so it reads text only.
        "$python" $example/summary.py --text "$2.ids" "$2.text" &&
        "$binary" score --model_name_or_path "$classifier" --reward_label POSITIVE --dataset_name "$2.text" \
            --output_file "$2" &&
        rm "$2.ids" "$2.text"
}

echo "GPT-2 learns positive continuations: SFT, PPO with a DistilBERT as the reward (seed $seed), into $out"
step sft "a small GPT-2 learns 6000 reviews, from random weights" \
    "$binary" sft --config examples/sentiment/sft.yaml --config_name $example/model.json --output_dir "$out/sft" \
    --seed "$seed" --overwrite_output_dir
step ppo "it continues prompts of 2 to 8 tokens, and learns from the classifier's scores" \
    "$binary" ppo --config $example/ppo.yaml --sft_model_path "$out/sft" --reward_model_path "$classifier" \
    --output_dir "$out/ppo" --seed "$seed" --overwrite_output_dir
step before "128 held-out prompts, responses of the model before PPO, and their scores" responses "$out/sft" "$out/before.jsonl"
step after "the same prompts, responses of the model after PPO, and their scores" responses "$out/ppo" "$out/after.jsonl"
printf '\n'
conclude $example/summary.py ppo
