"""A trainer of objects that are there already: the sample of the page about `PPOTrainer.train`."""

import sys

from datasets import Dataset
from rlhf.experimental.ppo import PPOConfig, PPOTrainer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

model_path, reward_path, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
policy = AutoModelForCausalLM.from_pretrained(model_path)
ref_policy = AutoModelForCausalLM.from_pretrained(model_path)
reward_model = AutoModelForSequenceClassification.from_pretrained(reward_path, num_labels=1)
value_model = AutoModelForSequenceClassification.from_pretrained(reward_path, num_labels=1)
prompts = Dataset.from_dict({"prompt": [f"w{number} it" for number in range(8)]})
train_dataset, eval_dataset = prompts.select(range(6)), prompts.select(range(6, 8))
config = PPOConfig(output_dir=f"{folder}/run", total_episodes=8, per_device_train_batch_size=4, response_length=5, num_ppo_epochs=1)

trainer = PPOTrainer(
    args=config,
    processing_class=tokenizer,
    model=policy,
    ref_model=ref_policy,
    reward_model=reward_model,
    value_model=value_model,
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
)
# Run the whole loop of PPO
trainer.train()
# Save the trained policy
trainer.save_model(f"{folder}/ppo-trained-policy")
