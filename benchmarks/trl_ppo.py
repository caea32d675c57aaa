"""PPO by TRL. A JSON line per update, with the names that `rlhf ppo` has for the same times.

TRL is left as it is, but for three places where a clock is read: around the generation, at the first backward pass's
`accumulate` (the rollout is over), and at the end of the step. With `--never_stops true` the generation's settings also
suppress the end-of-text token, for which PPOConfig has no setting.
"""

import argparse
import json

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer
from trl_shared import Clock, adapters, add_memory_flags, base_options

F32, BF16 = torch.float32, torch.bfloat16
# Dtype of the trained models, dtype of the frozen ones, TRL's `bf16`.
PRECISIONS = {
    "f32": (F32, F32, False),
    "bf16-weights": (BF16, BF16, False),
    "bf16-flag": (F32, F32, True),
    "autocast": (F32, BF16, True),
}


def watch(trainer, clock, eos, banned):
    """Reads the clock around the generation and at the first backward pass; adds `banned` to the generation's settings."""
    generation, accumulate = ppo_trainer.batch_generation, trainer.accelerator.accumulate
    timed = clock.timed("time/generate", generation)

    def generate(model, queries, rows, pad, config):
        config.suppress_tokens = banned
        output = timed(model, queries, rows, pad, config)
        stops = (output[0][:, queries.shape[1] :] == eos).long()
        clock.times["val/response_length"] = (stops.cumsum(1) == stops).sum(1).float().mean().item()
        return output

    def watched_accumulate(*models):
        clock.end_rollout()
        return accumulate(*models)

    ppo_trainer.batch_generation = generate
    trainer.accelerator.accumulate = watched_accumulate


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--response_length", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--rollout_batch", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--never_stops", choices=["true", "false"], required=True, help="true: eos is not sampled")
    add_memory_flags(parser)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    trained, frozen, bf16 = PRECISIONS[args.precision]
    tokenizer = AutoTokenizer.from_pretrained(f"{args.models}/policy", padding_side="left")

    def policy(dtype):
        return AutoModelForCausalLM.from_pretrained(f"{args.models}/policy", **base_options(args, dtype))

    def classifier(dtype):
        return AutoModelForSequenceClassification.from_pretrained(f"{args.models}/reward", dtype=dtype, num_labels=1)

    with open(args.prompts) as lines:
        prompts = Dataset.from_list([json.loads(line) for line in lines])
    eos = tokenizer.eos_token_id
    clock = Clock(args.device)
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=args.output_dir,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulation,
            num_mini_batches=1,
            total_episodes=args.batch * args.accumulation * args.updates,
            local_rollout_forward_batch_size=args.rollout_batch,
            response_length=args.response_length,
            num_ppo_epochs=args.epochs,
            temperature=args.temperature,
            learning_rate=args.learning_rate,
            stop_token="eos",
            num_sample_generations=0,
            bf16=bf16,
            optim=args.optim,
            gradient_checkpointing=args.gradient_checkpointing == "true",
            use_cpu=args.device == "cpu",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        model=policy(trained),
        # With adapters, TRL's reference model is the policy without them.
        ref_model=None if args.lora_r else policy(frozen),
        reward_model=classifier(frozen),
        value_model=classifier(trained),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(1)),
        callbacks=[clock],
        peft_config=adapters(args.lora_r),
    )
    watch(trainer, clock, eos, [eos] if args.never_stops == "true" else None)
    trainer.train()


if __name__ == "__main__":
    main()
