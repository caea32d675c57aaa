"""Bytes per parameter of each optimizer, measured and planned.

    python benchmarks/optimizers.py                   # about two minutes on two cores, 2 GB of memory
    python benchmarks/optimizers.py --rlhf target/debug/rlhf

Two steps of `rlhf sft` from random weights, of two models that differ in their number of layers only: 27 and 54 million parameters in
matrices of 512 x 512 and 512 x 1536. Bytes per parameter are the difference of the two peaks (the largest resident memory, Linux's VmHWM)
over the difference in parameters: what is the same in both runs, libtorch and its buffers above all, cancels out. Rows are short, so that
activations do not count. The plan's numbers are the same difference of its peaks. Fails if a peak is off by more than --bound.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from plan import ROOT, in_mib, peak_and_plan, processor

TOKENIZER = ROOT / "tests/golden/models/llama_tied"
LAYERS = (8, 16)
# Name, flags.
MODES = [
    ("adamw_torch", ""),
    ("adamw_8bit", ""),
    ("adafactor", ""),
    ("adamw_torch", "--bf16"),
    ("adamw_8bit", "--bf16"),
    ("adafactor", "--bf16"),
    ("adamw_bf16", "--bf16"),
]


def model(folder, layers):
    config = json.loads((TOKENIZER / "config.json").read_text())
    config.update(hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    config.update(num_hidden_layers=layers)
    folder.mkdir()
    for file in TOKENIZER.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens")):
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rlhf", default=str(ROOT / "target/release/rlhf"))
    parser.add_argument("--bound", type=float, default=0.15)
    args = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        rows = scratch / "rows.jsonl"
        rows.write_text('{"text": "The movie was great and long."}\n' * 8)
        models = [model(scratch / f"layers-{layers}", layers) for layers in LAYERS]
        print("| `--optim` | | measured, bytes per parameter | plan | peaks, MiB | plan's, MiB |\n|---|---|---:|---:|---:|---:|")
        for optim, flags in MODES:
            peaks, plans, sizes = [], [], []
            for folder in models:
                line = f"sft --config_name {folder} --tokenizer_name {folder} --dataset_name {rows} --train_batch_size 4"
                line += f" --max_steps 2 --max_length 32 --no_report --disable_tqdm --device cpu --optim {optim} {flags}"
                line += f" --output_dir {scratch / 'out'}"
                peak, plan = peak_and_plan(args.rlhf, line.split(), scratch / "log")
                peaks.append(peak)
                plans.append(plan["memory"]["peak"])
                sizes.append(plan["models"][0]["parameters"])
                worst = max(worst, abs(plans[-1] / peaks[-1] - 1))
            found, planned = [(b - a) / (sizes[1] - sizes[0]) for a, b in (peaks, plans)]
            print(f"| `{optim}` | `{flags}` | {found:.1f} | {planned:.1f} | {in_mib(peaks)} | {in_mib(plans)} |", flush=True)
    print(f"\n{processor()}; largest difference of a peak {worst:.1%}")
    if worst > args.bound:
        sys.exit(f"an estimate is off by {worst:.1%}, and at most {args.bound:.0%} are allowed")


if __name__ == "__main__":
    main()
