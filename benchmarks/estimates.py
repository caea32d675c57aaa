"""Plans of PPO and GRPO for models of 1, 7 and 13 billion parameters on GPUs of 24, 80 and 141 GB, by mode.

    python benchmarks/estimates.py            # prints the table; half a minute, nothing is downloaded
    python benchmarks/estimates.py --write    # and puts it into docs/guides/plan.md

The models are configurations alone, of Llama-3.2-1B and of Llama-2's 7B and 13B. Each number is `rlhf plan`'s for one GPU of that size: arithmetic.
"""

import argparse
import json
import tempfile
from pathlib import Path

from plan import ROOT, planned

PAGE = ROOT / "docs/guides/plan.md"
MARKS = ("<!-- estimates -->\n", "<!-- end of estimates -->\n")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def sizes(hidden, inner, layers, heads, keys, vocab, tied):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return LLAMA | dict(zip(names, (hidden, inner, layers, heads, keys, vocab))) | {"tie_word_embeddings": tied}


MODELS = {
    "1B": sizes(2048, 8192, 16, 32, 8, 128256, True),
    "7B": sizes(4096, 11008, 32, 32, 32, 32000, False),
    "13B": sizes(5120, 13824, 40, 40, 40, 32000, False),
}
MEMORY = (24, 80, 141)
# 64 responses of 256 tokens an update, to prompts of 512.
COMMON = (
    "--dataset_name none.jsonl --max_prompt_length 512 --reward length:target=200 --train_batch_size 64"
    " --local_rollout_forward_batch_size 8 --num_sample_generations 0 --device cuda --bf16"
)
COMMANDS = {
    "ppo": f"ppo --sft_model_path MODEL --response_length 256 --total_episodes 640 {COMMON}",
    "grpo": f"grpo --model_name_or_path MODEL --max_completion_length 256 --num_generations 8 --max_steps 10 {COMMON}",
}
LORA = "--use_peft --lora_target_modules all-linear"
FOUR = f"{LORA} --load_in_4bit --use_bnb_nested_quant"
MODES = [
    ("all weights, `adamw_torch`", ""),
    ("all weights, `adamw_8bit`", "--optim adamw_8bit"),
    ("all weights, `adamw_bf16`", "--optim adamw_bf16"),
    ("LoRA", LORA),
    ("LoRA, base in 8 bits", f"{LORA} --load_in_8bit"),
    ("LoRA, base in 4 bits", FOUR),
]
# The critic is a head on the policy.
SHARED = [("LoRA, base in 4 bits, `--value_head`", f"{FOUR} --value_head")]


def table(rlhf, folder):
    text = "| | | " + " | ".join(f"{name}, {memory} GB" for name in MODELS for memory in MEMORY) + " |\n"
    text += "|---|---" + "|---:" * len(MODELS) * len(MEMORY) + "|\n"
    for trainer, line in COMMANDS.items():
        for mode, flags in MODES + (SHARED if trainer == "ppo" else []):
            row = [f"`{trainer}`", mode]
            for name in MODELS:
                for memory in MEMORY:
                    words = f"{line} --output_dir {folder / 'out'} --gradient_checkpointing {flags}".replace("MODEL", str(folder / name)).split()
                    found = planned(rlhf, words, "--calibrate=false", "--memory", f"{memory}GB")["memory"]
                    size = f"{found['peak'] / 1e9:.1f}"
                    row.append(f"**{size}**" if found["fits"] else size)
            text += "| " + " | ".join(row) + " |\n"
    return text


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rlhf", default=str(ROOT / "target/release/rlhf"))
    parser.add_argument("--write", action="store_true", help="put the table into docs/guides/plan.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name, config in MODELS.items():
            (Path(scratch) / name).mkdir()
            (Path(scratch) / name / "config.json").write_text(json.dumps(config))
        found = table(args.rlhf, Path(scratch))
    print(found)
    if args.write:
        before, rest = PAGE.read_text().split(MARKS[0])
        PAGE.write_text(before + MARKS[0] + "\n" + found + "\n" + MARKS[1] + rest.split(MARKS[1])[1])


if __name__ == "__main__":
    main()
