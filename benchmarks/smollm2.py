"""The pretrained chat model of examples/smollm2 as models and prompts of the benchmark.

    smollm2.py FOLDER       makes FOLDER/policy, FOLDER/reward, FOLDER/grpo.jsonl and FOLDER/ppo.jsonl

The policy is the model itself; the reward model is its body with a random head. Weights are stored in bf16, as the
model's are. The model's pad token is its end token, which TRL's PPOTrainer would mask inside of prompts too, at the end
of each turn; the benchmark's copy pads with a token that occurs nowhere.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path("runs/smollm2/SmolLM2-135M-Instruct")
DATA = ROOT / "examples/smollm2/data"
PAD = "<repo_name>"
# Prompts of an update: of GRPO, where each has several responses, and of PPO.
PROMPTS = {"grpo": ("extract.jsonl", 4), "ppo": ("reviews.jsonl", 16)}


def main():
    folder = Path(sys.argv[1])
    if not (ROOT / SOURCE / "model.safetensors").exists():
        # The script tries the hub first.
        env = os.environ | {"HF_HUB_OFFLINE": "0"}
        subprocess.run([ROOT / "examples/smollm2/get_model.sh", SOURCE], check=True, stdout=sys.stderr, env=env)
    make(folder, ROOT / SOURCE)


def make(folder, source):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    tokenizer.pad_token = PAD
    torch.manual_seed(0)
    classes = {"policy": (AutoModelForCausalLM, {}), "reward": (AutoModelForSequenceClassification, {"num_labels": 1})}
    for name, (kind, options) in classes.items():
        model = kind.from_pretrained(source, dtype=torch.bfloat16, **options)
        model.config.pad_token_id = tokenizer.pad_token_id
        if name == "policy":
            model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, (file, count) in PROMPTS.items():
        with open(DATA / file) as lines:
            prompts = [json.loads(line)["prompt"] for line in itertools.islice(lines, count)]
        # GRPOTrainer takes conversations, PPOTrainer token ids.
        rows = prompts if name == "grpo" else [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False) for prompt in prompts
        ]
        key = "prompt" if name == "grpo" else "input_ids"
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({key: row}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
