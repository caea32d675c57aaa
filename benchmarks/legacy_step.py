"""Seconds of `step()` of TRL 0.11's PPOTrainer and of rlhf.legacy's, with the same models and rows.

    legacy_step.py run --rlhf PROGRAM --trl PYTHON [--size s|smollm2] [--rows 16] [--tokens 128] [--shortest 0]
                       [--epochs 4] [--steps 3] [--rounds 2] [--output FILE]

PYTHON is that of an environment with TRL 0.11.4, which needs transformers 4:

    scripts/venv.sh .venv-legacy benchmarks/legacy-requirements.txt "installing TRL 0.11"

`s` is a GPT-NeoX of a million parameters beside its vocabulary, `smollm2` a Llama of SmolLM2-135M's shape, both with random weights.
`--shortest N` draws the lengths of responses from N up, as TRL's `LengthSampler` does; without it all have the same
length, and nothing is padded. A round runs TRL, then
rlhf, each in a process of its own; the first step of a run is not counted. Of rlhf the time that the program itself takes for a step is shown too
(`time/ppo/total`): the rest is Python's and the pipe's. Without `--trl` rlhf runs alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Rows of a step, tokens of a row, the shortest response (0: all have the same length), epochs of a step, and steps that are counted.
NUMBERS = {"rows": 16, "tokens": 128, "shortest": 0, "epochs": 4, "steps": 3}
TOKENIZER = ROOT / "tests/golden/tools_policy"


def make(folder, size):
    """Saves a model of random weights with a tokenizer."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if size == "s":
        shape = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 1024}
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape, max_position_embeddings=512, bos_token_id=0, eos_token_id=0))
    else:
        shape = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
        shape |= {"vocab_size": 49152, "max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}
        model = LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer():
    """The tokenizer, in the same words for transformers 4 and 5."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>")


def steps(args):
    """Takes the steps of one run, with the trainer of this environment; prints the seconds of each."""
    import torch

    if args.side == "trl":
        from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
    else:
        sys.path.insert(0, str(ROOT / "python"))
        from rlhf.legacy import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
    torch.manual_seed(0)
    config = PPOConfig(batch_size=args.rows, mini_batch_size=min(args.rows, 16), ppo_epochs=args.epochs, learning_rate=1e-6, seed=1)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(args.folder)
    ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(args.folder)
    trainer = PPOTrainer(config, model, ref_model, tokenizer())
    # A quarter of a row is its query.
    query = args.tokens // 4
    for _ in range(args.steps + 1):
        rows = torch.randint(2, 400, (args.rows, args.tokens))
        lengths = torch.randint(args.shortest or args.tokens - query, args.tokens - query + 1, (args.rows,)).tolist()
        scores = [torch.tensor(score) for score in torch.randn(args.rows).tolist()]
        began = time.perf_counter()
        responses = [row[query : query + length] for row, length in zip(rows, lengths)]
        stats = trainer.step([row[:query] for row in rows], responses, scores)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "inside": float(stats["time/ppo/total"])}), flush=True)


def run(side, args, folder):
    """The steps of a run but the first one, and its peak memory."""
    python = args.trl if side == "trl" else sys.executable
    command = [python, __file__, "steps", "--side", side, "--folder", folder]
    for name in NUMBERS:
        command += [f"--{name}", getattr(args, name)]
    environment = os.environ | {"RLHF_PROGRAM": str(Path(args.rlhf).resolve()), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{side}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seconds"')][1:]


def measure(args):
    found = {name: getattr(args, name) for name in ("size", *NUMBERS)} | {"rounds": []}
    with tempfile.TemporaryDirectory() as folder:
        make(folder, args.size)
        for number in range(args.rounds):
            sides = (["trl"] if args.trl else []) + ["rlhf"]
            rows = {side: run(side, args, folder) for side in sides}
            found["rounds"].append(rows)
            middle = {side: statistics.median(row["seconds"] for row in rows[side]) for side in sides}
            beyond = statistics.median(row["seconds"] - row["inside"] for row in rows["rlhf"])
            line = f"round {number + 1}: rlhf {middle['rlhf']:.3f} s, of it beyond the program {1000 * beyond:.1f} ms"
            if args.trl:
                line += f"; TRL 0.11 {middle['trl']:.3f} s, {middle['trl'] / middle['rlhf']:.2f} times as long"
            print(line, flush=True)
    if args.output:
        Path(args.output).write_text(json.dumps(found, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "steps"))
    parser.add_argument("--rlhf", default="target/release/rlhf")
    parser.add_argument("--trl")
    parser.add_argument("--size", choices=("s", "smollm2"), default="s")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output")
    parser.add_argument("--side", choices=("trl", "rlhf"))
    parser.add_argument("--folder")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    steps(args) if args.action == "steps" else measure(args)


if __name__ == "__main__":
    main()
