"""Newer families: an SFT step and a GRPO update of rlhf and of TRL, and the time that the matrix products of the step take.

    families.py run --rlhf PROGRAM [--families qwen3_5 lfm2] [--tasks sft grpo] [--vocab 8192] [--updates 5] [--rounds 3] [--output FILE]

Models of 4 layers with hidden size 512 and random weights, in f32. SFT: 8 rows of 256 tokens, all of which are learned. GRPO: 4 prompts of 64 tokens
with 8 responses of 64 tokens each, one optimizer step. Each round runs both programs once. Needs TRL 1.16.
"""

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from runs import Failed, watch

HIDDEN, LAYERS, ROWS, LENGTH = 512, 4, 8, 256
PROMPTS, GENERATIONS, PROMPT, RESPONSE = 4, 8, 64, 64
EOS, PAD = 0, 1


def config_of(family, vocab):
    """The proportions of Qwen3.5-0.8B and LFM2-350M at half their width."""
    common = dict(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    if family == "lfm2":
        from transformers import Lfm2Config

        return Lfm2Config(
            block_ff_dim=2304,
            block_auto_adjust_ff_dim=False,
            num_attention_heads=8,
            num_key_value_heads=4,
            layer_types=["conv", "conv", "full_attention", "conv"],
            **common,
        )
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        intermediate_size=1792,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        **common,
    )


def make(folder, family, vocab):
    """Saves a model and a tokenizer of whole words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = {"<|endoftext|>": EOS, "<pad>": PAD, **{f"w{i}": i for i in range(2, vocab)}}
    words = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>", pad_token="<pad>", padding_side="left")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family, vocab)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(path, task, vocab, updates):
    """Rows of random words, always the same ones; with the end token that both programs append, an SFT row has LENGTH tokens."""
    draw = random.Random(0)

    def text(words):
        return " ".join(f"w{draw.randrange(2, vocab)}" for _ in range(words))

    if task == "sft":
        rows = [{"prompt": text(1), "completion": " " + text(LENGTH - 2)} for _ in range(ROWS * updates)]
    else:
        rows = [{"prompt": text(PROMPT)} for _ in range(PROMPTS * updates)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def count_products(found):
    """The seconds of libtorch's products of matrices, by its profiler."""
    names = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_linear", "aten::linear_backward")
    rows = found.key_averages()
    return sum(row.self_cpu_time_total for row in rows if row.key in names) / 1e6


def by_trl(args):
    """Trains by TRL; prints the seconds of each update, and the peak memory."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
    from trl_shared import Steps

    torch.set_num_threads(args.threads)
    rows = [json.loads(line) for line in Path(args.data).read_text().splitlines()]
    steps = Steps()
    common = dict(
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=args.updates,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    with tempfile.TemporaryDirectory() as output:
        shared = dict(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            callbacks=[steps],
        )
        if args.task == "sft":
            options = SFTConfig(output_dir=output, per_device_train_batch_size=ROWS, completion_only_loss=False, **common)
            trainer = SFTTrainer(args=options, **shared)
        else:
            options = GRPOConfig(
                output_dir=output,
                per_device_train_batch_size=PROMPTS * GENERATIONS,
                num_generations=GENERATIONS,
                max_completion_length=RESPONSE,
                generation_kwargs={"min_new_tokens": RESPONSE},
                temperature=1.0,
                **common,
            )
            trainer = GRPOTrainer(args=options, reward_funcs=lambda completions, **_: [float(len(text)) for text in completions], **shared)
        products = None
        if args.profile:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CPU]) as found:
                trainer.train()
            products = count_products(found) / args.updates
        else:
            trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(json.dumps({"seconds": steps.seconds, "peak": peak << 10, "loss": losses, "products": products}))


def by_rlhf(args, task, model, data):
    """Trains by rlhf; returns the same as [`by_trl`] prints."""
    with tempfile.TemporaryDirectory() as output:
        words = [args.rlhf, task, "--model_name_or_path", model, "--dataset_name", data, "--output_dir", f"{output}/run", "--device", "cpu"]
        words += ["--max_steps", args.updates, "--logging_steps", 1, "--num_threads", args.threads, "--no_report"]
        if task == "sft":
            words += ["--per_device_train_batch_size", ROWS, "--completion_only_loss", "false"]
        else:
            words += ["--per_device_train_batch_size", PROMPTS * GENERATIONS, "--num_generations", GENERATIONS]
            words += ["--max_completion_length", RESPONSE, "--min_new_tokens", RESPONSE, "--temperature", 1, "--reward", "length:target=160,unit=chars"]
        peak = watch(words).peak_bytes
        lines = [json.loads(line) for line in Path(output, "run/metrics.jsonl").read_text().splitlines()]
    # The update's seconds have TRL's name in a run of `rlhf grpo`.
    seconds = [line[name] for line in lines for name in ("time/update", "step_time") if name in line]
    return {"seconds": seconds, "peak": peak, "loss": [line.get("loss") for line in lines]}


def products_of_step(family, vocab, threads):
    """FLOPs of the three matrix products of each linear layer in an SFT step, and the shortest time that libtorch takes for them."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family, vocab))
    shapes = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            shape = (module.in_features, module.out_features)
            shapes[shape] = shapes.get(shape, 0) + 1
    tokens, flops, seconds = ROWS * LENGTH, 0, 0.0
    for (n_in, n_out), count in shapes.items():
        x, y, w = torch.randn(tokens, n_in), torch.randn(tokens, n_out), torch.randn(n_out, n_in)
        out, dx, dw = torch.empty_like(y), torch.empty_like(x), torch.empty_like(w)
        for product in (
            lambda: torch.mm(x, w.t(), out=out),
            lambda: torch.mm(y, w, out=dx),
            lambda: torch.mm(y.t(), x, out=dw),
        ):
            product()
            times = []
            while len(times) < 5 or sum(times) < 0.2:
                began = time.perf_counter()
                product()
                times.append(time.perf_counter() - began)
            flops, seconds = flops + count * 2 * tokens * n_in * n_out, seconds + count * min(times)
    return {"flops": flops, "seconds": seconds}


def elsewhere(function, *arguments):
    """Calls `function` in a process of its own: a child's peak memory counts from what its parent held, and torch is large."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def run_task(args, family, task, folder):
    data = Path(folder, f"{task}.jsonl")
    write_rows(data, task, args.vocab, args.updates)

    def trl(*more):
        words = [sys.executable, __file__, "trl", "--task", task, "--model", f"{folder}/model", "--data", data]
        words += ["--updates", args.updates, "--threads", args.threads, *more]
        output = watch(words, variables={"OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": ""})
        return json.loads(output.lines[-1])

    found = {"trl": [], "rlhf": []}
    for _ in range(args.rounds):
        found["trl"].append(trl())
        found["rlhf"].append(by_rlhf(args, task, f"{folder}/model", data))
    products = trl("--profile")["products"] if args.profile else None
    # The first update of each run warms up.
    seconds = {name: statistics.median(s for one in found[name] for s in one["seconds"][1:]) for name in ("trl", "rlhf")}
    peaks = {name: statistics.median(one["peak"] for one in found[name]) for name in ("trl", "rlhf")}
    summary = {
        "family": family,
        "task": task,
        "seconds": seconds,
        "times_as_fast": seconds["trl"] / seconds["rlhf"],
        "peak_bytes": peaks,
        "memory": peaks["rlhf"] / peaks["trl"],
        "trl_products": products,
    }
    if task == "sft":
        summary["products"] = elsewhere(products_of_step, family, args.vocab, args.threads)
    print(json.dumps(summary), flush=True)
    return summary | {"runs": found}


def run(args):
    results = []
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            elsewhere(make, f"{folder}/model", family, args.vocab)
            results += [run_task(args, family, task, folder) for task in args.tasks]
    if args.output:
        described = {"vocab": args.vocab, "updates": args.updates, "threads": args.threads, "results": results}
        Path(args.output).write_text(json.dumps(described, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "trl"))
    parser.add_argument("--rlhf", default="rlhf")
    parser.add_argument("--families", nargs="+", choices=("qwen3_5", "lfm2"), default=["qwen3_5", "lfm2"])
    parser.add_argument("--tasks", nargs="+", choices=("sft", "grpo"), default=["sft", "grpo"])
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="run TRL once more, with libtorch's profiler, for the time of its products")
    parser.add_argument("--output")
    for name in ("--task", "--model", "--data"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        (run if args.command == "run" else by_trl)(args)
    except Failed as error:
        sys.exit(f"families: {error}")


if __name__ == "__main__":
    main()
