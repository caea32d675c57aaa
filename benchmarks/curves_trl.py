"""One run of a learning curve by TRL: `PPOTrainer` of trl 1.11 or `GRPOTrainer` of trl 1.16. A JSON line per update.

curves.py starts it, and has the settings; TRL is left as it is.
"""

import argparse
import json

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback


class Scores(TrainerCallback):
    """Prints the mean score of each update, once it has been made."""

    def __init__(self, metric):
        self.metric = metric

    def on_log(self, args, state, control, logs=None, **_):
        if self.metric in logs:
            print(json.dumps({"score": logs[self.metric]}), flush=True)


def ppo(args, settings):
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(args.policy, padding_side="left")

    def policy():
        return AutoModelForCausalLM.from_pretrained(args.policy, dtype=torch.float32)

    def classifier():
        return AutoModelForSequenceClassification.from_pretrained(args.reward, dtype=torch.float32, num_labels=1)

    prompts = load_dataset("json", data_files=args.prompts, split="train")
    prompts = prompts.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns=prompts.column_names)
    # The sampled table that PPOTrainer prints would be in the time of TRL alone.
    config = PPOConfig(**settings, num_sample_generations=0)
    return PPOTrainer(
        args=config, processing_class=tokenizer, model=policy(), ref_model=policy(), reward_model=classifier(), value_model=classifier(),
        train_dataset=prompts, eval_dataset=prompts.select(range(1)), callbacks=[Scores("objective/scores")],
    )


def grpo(args, settings):
    from curves_reward import mood
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        args=GRPOConfig(**settings),
        processing_class=AutoTokenizer.from_pretrained(args.policy, padding_side="left"),
        model=AutoModelForCausalLM.from_pretrained(args.policy, dtype=torch.float32),
        reward_funcs=mood,
        train_dataset=load_dataset("json", data_files=args.prompts, split="train"),
        callbacks=[Scores("reward")],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", choices=["ppo", "grpo"])
    parser.add_argument("--policy", required=True)
    parser.add_argument("--reward", required=True, help="the reward model of PPO")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--settings", type=json.loads, required=True, help="of the trainer's configuration, as JSON")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    fixed = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    {"ppo": ppo, "grpo": grpo}[args.trainer](args, args.settings | fixed).train()


if __name__ == "__main__":
    main()
