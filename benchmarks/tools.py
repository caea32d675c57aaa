"""GRPO updates with tools: of rlhf and of TRL with the same tool, and of rlhf with as many tokens in one turn.

    tools.py run --rlhf PROGRAM [--size s] [--updates 5] [--rounds 3] [--wait 0.1] [--output FILE]

The policy has random weights, but for its embedding and its head, by which each token has one successor: it writes
some words, calls the tool, and does so again after each result. So every run has the same turns. With `--wait` the
tool is a method of an environment that takes so many seconds. Needs TRL 1.16.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "tests/golden/tools_policy"
# Hidden size, layers, heads.
SIZES = {"s": (256, 4, 4), "m": (512, 6, 8)}
# Words of the policy in a turn, and of a result.
SAID, FOUND = 30, 12
# Turns of the policy, rows of an update, rows of a group.
TURNS, ROWS, GROUP = 4, 32, 8
CALL = '\n{"name": "search", "arguments": {"query": "price"}}\n'
TOOL = f'''
import time

def search(query: str) -> str:
    """Searches.

    Args:
        query: The words that are searched.
    """
    return "found " * {FOUND}


class Search:
    wait = 0.0

    def reset(self, **row):
        pass

    def search(self, query: str) -> str:
        """Searches.

        Args:
            query: The words that are searched.
        """
        time.sleep(self.wait)
        return "found " * {FOUND}

    def get_reward(self) -> float:
        return 1.0
'''


def make(folder, size, ends):
    """Saves a policy that calls the tool after each `SAID` words, or one that says words without end."""
    import torch
    from tokenizers import AddedToken
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    hidden, layers, heads = SIZES[size]
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.add_tokens([AddedToken(CALL, normalized=False)])
    vocab = len(tokenizer)
    ids = tokenizer.convert_tokens_to_ids
    words = [id for id in range(vocab) if tokenizer.decode([id]).isalpha()][:SAID]
    begin = tokenizer("\n").input_ids[-1]
    end = [ids("<tool_call>"), ids(CALL), ids("</tool_call>"), tokenizer.eos_token_id] if ends else [words[0]]
    chain = [begin, *words, *end]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=4 * hidden,
        vocab_size=vocab,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embedding = torch.randn(vocab, hidden)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.normal_(0, 0.02)
        for token, successor in zip(chain, chain[1:]):
            model.lm_head.weight[successor] = 0.3 * embedding[token]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompts(path):
    with open(path, "w") as lines:
        for row in range(64):
            print(json.dumps({"prompt": [{"role": "user", "content": f"What does number {row} cost?"}]}), file=lines)


def rlhf(program, folder, policy, updates, length, more):
    """The metrics of each update of rlhf."""
    out = folder / "rlhf"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        program, "grpo", "--model_name_or_path", folder / policy, "--dataset_name", folder / "prompts.jsonl", "--output_dir", out,
        "--max_completion_length", length, "--num_generations", GROUP, "--per_device_train_batch_size", ROWS // 2,
        "--gradient_accumulation_steps", 2, "--max_steps", updates, "--learning_rate", "1e-6", "--bf16", "false",
        "--no_checks", "--num_sample_generations", 0, "--report_to", "none", *more,
    ]
    subprocess.run([str(word) for word in command], check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in open(out / "metrics.jsonl")]
    # Without a critic, updates have TRL's name for their time.
    return [{**line, "time/update": line["step_time"]} for line in lines if "step_time" in line]


def trl(folder, updates, length, wait):
    command = [sys.executable, __file__, "trl", "--folder", folder, "--updates", updates, "--length", length, "--wait", wait]
    done = subprocess.run([str(word) for word in command], check=True, cwd=folder, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"time')]


def run_trl(args):
    """One run of TRL; prints the times of its updates."""
    sys.path.insert(0, str(args.folder))
    import bench_tools
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template
    from trl_grpo import watch
    from trl_shared import Clock

    torch.set_num_threads(os.cpu_count())
    bench_tools.Search.wait = args.wait
    clock = Clock("cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "calls", padding_side="left")
    # TRL knows the forms of its own templates' calls alone.
    tokenizer.response_template = qwen3_template
    trainer = GRPOTrainer(
        args=GRPOConfig(
            output_dir=str(args.folder / "trl"),
            per_device_train_batch_size=ROWS // 2,
            gradient_accumulation_steps=2,
            max_steps=args.updates,
            num_generations=GROUP,
            max_completion_length=args.length,
            max_tool_calling_iterations=TURNS - 1,
            learning_rate=1e-6,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(args.folder / "calls", dtype=torch.float32),
        train_dataset=load_dataset("json", data_files=str(args.folder / "prompts.jsonl"), split="train"),
        callbacks=[clock],
        **({"environment_factory": bench_tools.Search} if args.wait else {"tools": [bench_tools.search]}),
        reward_funcs=lambda completions, **_: [float(len(completion)) for completion in completions],
    )
    watch(trainer, clock)
    trainer.train()


def median(rows, name):
    """The median of the updates but the first."""
    return statistics.median(row[name] for row in rows[1:])


def measure(args, folder):
    (folder / "bench_tools.py").write_text(TOOL.replace("wait = 0.0", f"wait = {args.wait}"))
    tool = ["--environment_factory", "bench_tools.Search"] if args.wait else ["--tools", "bench_tools.search"]
    with_tool = [*tool, "--max_tool_calling_iterations", TURNS - 1, "--reward", "length:target=100,unit=chars"]
    long = 1000
    command = [args.rlhf, "generate", "--model", "calls", *with_tool[:4], "--max_new_tokens", long, "What does it cost?"]
    row = json.loads(subprocess.run([str(word) for word in command], check=True, cwd=folder, capture_output=True, text=True).stdout)
    assert row["tool_calls"] == TURNS - 1, row
    args.total = total = len(row["completion_ids"])
    found = {"rlhf": [], "trl": [], "one turn": []}
    for _ in range(args.rounds):
        if not args.no_trl:
            found["trl"] += [trl(folder, args.updates, long, args.wait)]
        found["rlhf"] += [rlhf(args.rlhf, folder, "calls", args.updates, long, with_tool)]
        if not args.wait:
            found["one turn"] += [rlhf(args.rlhf, folder, "words", args.updates, total, ["--reward", "length:target=100,unit=chars"])]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--rlhf", required=True, type=Path)
    run.add_argument("--size", choices=SIZES, default="s")
    run.add_argument("--updates", type=int, default=5)
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--wait", type=float, default=0.0)
    run.add_argument("--no_trl", action="store_true")
    run.add_argument("--output", type=Path)
    one = commands.add_parser("trl")
    one.add_argument("--folder", type=Path, required=True)
    one.add_argument("--updates", type=int, required=True)
    one.add_argument("--length", type=int, required=True)
    one.add_argument("--wait", type=float, required=True)
    args = parser.parse_args()
    if args.command == "trl":
        return run_trl(args)
    args.rlhf = args.rlhf.resolve()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make(folder / "calls", args.size, True)
        make(folder / "words", args.size, False)
        prompts(folder / "prompts.jsonl")
        found = measure(args, folder)
    if args.output:
        args.output.write_text(json.dumps({"size": args.size, "wait": args.wait, "tokens": args.total, "rounds": found}, indent=1))
    print(f"size {args.size}, {ROWS} rows of {TURNS} turns, {args.total} tokens with results, tool of {args.wait} s")
    print(f"{'':10}{'update':>10}{'generate':>10}{'rest':>10}   seconds, median of the updates but the first, of each round")
    for name, rounds in found.items():
        for rows in rounds:
            update, generate = median(rows, "time/update"), median(rows, "time/generate")
            print(f"{name:10}{update:10.3f}{generate:10.3f}{update - generate:10.3f}")



if __name__ == "__main__":
    sys.exit(main())
