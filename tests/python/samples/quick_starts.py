"""The first lines of TRL's pages about SFT, reward models, GRPO and RLOO, with local models and rows in place of names on the hub."""

import sys

from datasets import Dataset
from rlhf import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from rlhf.rewards import accuracy_reward

model, folder = sys.argv[1:]
small = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3}

texts = Dataset.from_dict({"text": [f"w{number} it is {number}" for number in range(12)]})
trainer = SFTTrainer(model=model, args=SFTConfig(f"{folder}/sft", **small), train_dataset=texts)
trainer.train()

pairs = Dataset.from_list([{"chosen": f"w{number} it is", "rejected": f"w{number} is"} for number in range(12)])
trainer = RewardTrainer(model=model, args=RewardConfig(f"{folder}/reward", **small), train_dataset=pairs)
trainer.train()

problems = Dataset.from_dict({"prompt": [f"w{number} it" for number in range(8)], "solution": [f"${number}$" for number in range(8)]})
trainer = GRPOTrainer(
    model=model,
    args=GRPOConfig(f"{folder}/grpo", num_generations=2, max_completion_length=5, **small),
    reward_funcs=accuracy_reward,
    train_dataset=problems,
)
trainer.train()


def reward_num_unique_letters(completions, **kwargs):
    """The number of different letters."""
    return [float(len(set(completion))) for completion in completions]


trainer = RLOOTrainer(
    model=model,
    args=RLOOConfig(f"{folder}/rloo", num_generations=2, max_completion_length=5, **small),
    reward_funcs=reward_num_unique_letters,
    train_dataset=problems,
)
trainer.train()
print([round(logs["reward"], 1) for logs in trainer.state.log_history])
