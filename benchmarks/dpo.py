"""DPO updates of rlhf and of TRL on the same pairs: seconds per update and peak memory.

    dpo.py run --rlhf PROGRAM [--precision f32|bf16] [--updates 4] [--rounds 3] [--rows 8] [--threads 2] [--output FILE]

The model has SmolLM2-135M's shape and random weights, and the tokenizer of `tests/golden/tools_policy` with a vocabulary as large as that of the
model. Both train all weights, without gradient checkpointing, with the reference model beside the policy; each round runs both once. Needs TRL
1.16.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
from pathlib import Path

from runs import Failed, watch

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "tests/golden/tools_policy"
# Tokens of a prompt, and of the two completions, about.
PROMPT, CHOSEN, REJECTED = 128, 96, 64


def make(folder):
    """Saves a model of SmolLM2-135M's shape with random weights."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_theta=100000.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def pairs(tokenizer, rows):
    """Pairs of about the same lengths, whose words are drawn from a fixed seed."""
    import random

    draw = random.Random(0)
    words = [word for word in (tokenizer.decode([id]) for id in range(len(tokenizer))) if word.isalpha() and word.islower()]

    def text(tokens):
        said = []
        while len(tokenizer(" ".join(said)).input_ids) < tokens:
            said.append(draw.choice(words))
        return " ".join(said)

    return [{"prompt": text(PROMPT), "chosen": " " + text(CHOSEN), "rejected": " " + text(REJECTED)} for _ in range(rows)]


def by_trl(args):
    """Trains by TRL; prints the seconds of each update, and the peak memory."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer
    from trl_shared import Steps

    torch.set_num_threads(args.threads)
    steps = Steps()
    rows = [json.loads(line) for line in Path(args.pairs).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as output:
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            args=DPOConfig(
                output_dir=output,
                use_cpu=True,
                bf16=args.precision == "bf16",
                gradient_checkpointing=False,
                per_device_train_batch_size=args.rows,
                max_steps=args.updates,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                logging_steps=1,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            callbacks=[steps],
        )
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": steps.seconds, "peak": peak << 10, "loss": [line["loss"] for line in trainer.state.log_history if "loss" in line]}))


def by_rlhf(args, model, data):
    """Trains by rlhf; returns the same as [`by_trl`] prints."""
    with tempfile.TemporaryDirectory() as output:
        words = [args.rlhf, "dpo", "--model_name_or_path", model, "--dataset_name", data, "--output_dir", f"{output}/run", "--device", "cpu"]
        words += ["--per_device_train_batch_size", args.rows, "--max_steps", args.updates, "--logging_steps", 1, "--num_threads", args.threads]
        words += ["--no_report", "--bf16", "true" if args.precision == "bf16" else "false"]
        peak = watch(words).peak_bytes
        lines = [json.loads(line) for line in Path(output, "run/metrics.jsonl").read_text().splitlines()]
    return {"seconds": [line["time/update"] for line in lines], "peak": peak, "loss": [line["loss"] for line in lines]}


def run(args):
    found = {"trl": [], "rlhf": []}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make(f"{folder}/model")
        data = Path(folder, "pairs.jsonl")
        data.write_text("".join(json.dumps(row) + "\n" for row in pairs(tokenizer, args.rows * args.updates)))
        common = ["--precision", args.precision, "--updates", args.updates, "--rows", args.rows, "--threads", args.threads]
        for _ in range(args.rounds):
            words = [sys.executable, __file__, "trl", "--model", f"{folder}/model", "--pairs", data, *common]
            output = watch(words, variables={"OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": ""})
            found["trl"].append(json.loads(output.lines[-1]))
            found["rlhf"].append(by_rlhf(args, f"{folder}/model", data))
    # The first update of each run warms up.
    seconds = {name: statistics.median(s for one in runs for s in one["seconds"][1:]) for name, runs in found.items()}
    peaks = {name: statistics.median(one["peak"] for one in runs) for name, runs in found.items()}
    result = {
        "precision": args.precision,
        "rows": args.rows,
        "threads": args.threads,
        "seconds": seconds,
        "times_as_fast": seconds["trl"] / seconds["rlhf"],
        "peak_bytes": peaks,
        "memory": peaks["rlhf"] / peaks["trl"],
        "runs": found,
    }
    text = json.dumps(result, indent=1)
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}, indent=1))
    if args.output:
        Path(args.output).write_text(text + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "trl"))
    parser.add_argument("--rlhf", default="rlhf")
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        (run if args.command == "run" else by_trl)(args)
    except Failed as error:
        sys.exit(f"dpo: {error}")


if __name__ == "__main__":
    main()
