# Code shared by grpo.sh and ppo.sh, which set `run`, the name of the command, `default_out` and the sampling of their responses.

kind=example options="--seed --out"
. "$(dirname "$0")/../sentiment/run_shared.sh"
example=examples/smollm2
model=runs/smollm2/SmolLM2-135M-Instruct
# OpenMP's threads would otherwise spin while a reward program works.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

generate() { # MODEL DATASET FILE FLAGS...
    from=$1 data=$2 file=$3
    shift 3
    "$binary" generate --model_name_or_path "$from" --dataset_name $example/data/"$data" --output_file "$file" \
        --overwrite_output_file --output_format jsonl --seed "$seed" "$@"
}

chat() { # MODEL FILE: replies to chat prompts, with their log-probabilities under the model before training
    generate "$1" chat_test.jsonl "$2.replies" --max_new_tokens 48 --temperature 0.7 --num_return_sequences 2 &&
        "$binary" logprobs --model_name_or_path $model --dataset_name "$2.replies" --output_file "$2" --overwrite_output_file &&
        rm "$2.replies"
}

get_model() {
    $example/get_model.sh $model
    [ -n "${PYTHON:-}" ] || python=.venv-smollm2/bin/python # which has vaderSentiment
}
