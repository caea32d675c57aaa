"""PPO by TRL. A JSON line per update, with the names that `rlhf ppo` has for the same times.

TRL is left as it is, but for three places where a clock is read: around the generation, at the first backward pass's
`accumulate` (the rollout is over), and at the end of the step.
"""

import argparse
import json
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

F32, BF16 = torch.float32, torch.bfloat16
# Dtype of the trained models, dtype of the frozen ones, TRL's `bf16`.
PRECISIONS = {
    "f32": (F32, F32, False),
    "bf16-weights": (BF16, BF16, False),
    "bf16-flag": (F32, F32, True),
    "autocast": (F32, BF16, True),
}


class Clock(TrainerCallback):
    """Times the phases of each update."""

    def __init__(self, device, eos):
        self.device, self.eos = device, eos
        self.times = {}

    def now(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def watch(self, trainer):
        generation, accumulate = ppo_trainer.batch_generation, trainer.accelerator.accumulate

        def timed_generation(model, queries, *args):
            began = self.now()
            output = generation(model, queries, *args)
            self.times["time/generate"] = self.now() - began
            stops = (output[0][:, queries.shape[1] :] == self.eos).long()
            self.times["val/response_length"] = (stops.cumsum(1) == stops).sum(1).float().mean().item()
            return output

        def timed_accumulate(*models):
            if "time/rollout" not in self.times:
                self.times["time/rollout"] = self.now() - self.began
            return accumulate(*models)

        ppo_trainer.batch_generation = timed_generation
        trainer.accelerator.accumulate = timed_accumulate

    def on_train_begin(self, *_, **__):
        self.began = self.now()

    def on_step_end(self, *_, **__):
        ended = self.now()
        times, self.times = self.times, {}
        times["time/update"] = ended - self.began
        times["time/optimise"] = times["time/update"] - times["time/rollout"]
        if self.device == "cuda":
            times["memory/allocated"] = torch.cuda.max_memory_allocated()
        print(json.dumps(times), flush=True)
        self.began = ended


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
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    trained, frozen, bf16 = PRECISIONS[args.precision]
    tokenizer = AutoTokenizer.from_pretrained(f"{args.models}/policy", padding_side="left")

    def policy(dtype):
        return AutoModelForCausalLM.from_pretrained(f"{args.models}/policy", dtype=dtype)

    def classifier(dtype):
        return AutoModelForSequenceClassification.from_pretrained(f"{args.models}/reward", dtype=dtype, num_labels=1)

    with open(args.prompts) as lines:
        prompts = Dataset.from_list([json.loads(line) for line in lines])
    clock = Clock(args.device, tokenizer.eos_token_id)
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
            gradient_checkpointing=False,
            use_cpu=args.device == "cpu",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        model=policy(trained),
        ref_model=policy(frozen),
        reward_model=classifier(frozen),
        value_model=classifier(trained),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(1)),
        callbacks=[clock],
    )
    clock.watch(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
