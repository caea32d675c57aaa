"""GRPO by TRL. A JSON line per update, with the names that rlhf has for the same times.

TRL is left as it is, but for three places where a clock is read: around the generation, when responses are scored and
their advantages computed (the rollout is over), and at the end of the step.
"""

import argparse
import json

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_shared import Clock, adapters, add_memory_flags, base_options

# Dtype of the weights, TRL's `bf16`.
PRECISIONS = {
    "f32": (torch.float32, False),
    "bf16-weights": (torch.bfloat16, False),
    "bf16-flag": (torch.float32, True),
}


def length_reward(target):
    """rlhf's rule `length:target=TARGET,unit=chars`."""

    def length(completions, **_):
        texts = [completion[0]["content"] for completion in completions]
        return [-abs(len(text) - target) / target for text in texts]

    return length


def watch(trainer, clock):
    """Reads the clock around the generation and at the end of the rollout."""
    trainer._generate = clock.timed("time/generate", trainer._generate)
    rollout = trainer._generate_and_score_completions

    def watched_rollout(inputs):
        output = rollout(inputs)
        clock.end_rollout()
        clock.times["val/response_length"] = output["completion_mask"].sum(1).float().mean().item()
        return output

    trainer._generate_and_score_completions = watched_rollout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--generations", type=int, required=True)
    parser.add_argument("--response_length", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--target_chars", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    add_memory_flags(parser)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    dtype, bf16 = PRECISIONS[args.precision]
    with open(args.prompts) as lines:
        prompts = Dataset.from_list([json.loads(line) for line in lines])
    clock = Clock("cpu")
    trainer = GRPOTrainer(
        args=GRPOConfig(
            output_dir=args.output_dir,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulation,
            max_steps=args.updates,
            num_generations=args.generations,
            max_completion_length=args.response_length,
            generation_kwargs={"min_new_tokens": args.response_length},
            temperature=args.temperature,
            learning_rate=args.learning_rate,
            bf16=bf16,
            optim=args.optim,
            gradient_checkpointing=args.gradient_checkpointing == "true",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        processing_class=AutoTokenizer.from_pretrained(f"{args.models}/policy", padding_side="left"),
        model=AutoModelForCausalLM.from_pretrained(f"{args.models}/policy", **base_options(args, dtype)),
        reward_funcs=length_reward(args.target_chars),
        train_dataset=prompts,
        callbacks=[clock],
        peft_config=adapters(args.lora_r),
    )
    watch(trainer, clock)
    trainer.train()


if __name__ == "__main__":
    main()
