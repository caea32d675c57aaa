"""The same runs as gpu_speeds.py's by TRL, with bf16 weights; a JSON line per update with rlhf's names.

    gpu_trl.py sft FOLDER UPDATES BATCH ACCUMULATION DEVICE
    gpu_trl.py grpo FOLDER UPDATES LENGTH ACCUMULATION DEVICE
"""

import json
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl_grpo import watch
from trl_shared import Clock


class StepClock(Clock):
    """For a trainer without a rollout."""

    def on_step_end(self, *arguments, **more):
        self.times.setdefault("time/rollout", 0.0)
        super().on_step_end(*arguments, **more)


def rows(path):
    with open(path) as file:
        return Dataset.from_list([json.loads(line) for line in file])


def main():
    kind, folder = sys.argv[1], sys.argv[2]
    updates, size, accumulation, device = int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
    common = {"output_dir": f"{folder}/out-trl", "max_steps": updates, "gradient_accumulation_steps": accumulation, "learning_rate": 1e-6, "bf16": False,
              "gradient_checkpointing": False, "use_cpu": device == "cpu", "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/policy", dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(f"{folder}/policy", padding_side="left")
    if kind == "sft":
        trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows(f"{folder}/sft.jsonl"), callbacks=[StepClock(device)],
                             args=SFTConfig(per_device_train_batch_size=size, max_length=2048, **common))
    else:
        clock = Clock(device)
        args = GRPOConfig(per_device_train_batch_size=8, num_generations=8, max_completion_length=size, generation_kwargs={"min_new_tokens": size},
                          temperature=1.0, **common)

        def reward(completions, **_):
            return [-abs(len(completion) - 160) / 160 for completion in completions]

        trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=reward, args=args, train_dataset=rows(f"{folder}/prompts.jsonl"),
                              callbacks=[clock])
        watch(trainer, clock)
    trainer.train()


if __name__ == "__main__":
    main()
