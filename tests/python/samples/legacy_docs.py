"""The loop of TRL 0.11's documentation of PPOTrainer, on local models: dataset, tokenizer, reward pipeline, `step`."""

import sys

import torch
from datasets import Dataset
from rlhf.legacy import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from tqdm import tqdm
from transformers import AutoTokenizer, pipeline

model_path, reward_path, folder = sys.argv[1:]

dataset = Dataset.from_dict({"prompt": [f"w{number} it" for number in range(8)], "meta": list(range(8)), "completion": ["x"] * 8})
dataset = dataset.rename_column("prompt", "query")
dataset = dataset.remove_columns(["meta", "completion"])

config = PPOConfig(model_name=model_path, learning_rate=1.41e-5, batch_size=4, mini_batch_size=4, num_threads=1)
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
tokenizer.pad_token = tokenizer.eos_token

reward_model = pipeline("text-classification", model=reward_path, top_k=None)


def tokenize(sample):
    sample["input_ids"] = tokenizer.encode(sample["query"])
    return sample


dataset = dataset.map(tokenize, batched=False)
ppo_trainer = PPOTrainer(model=model, config=config, dataset=dataset, tokenizer=tokenizer)

generation_kwargs = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": tokenizer.eos_token_id}

epochs = 2
for epoch in tqdm(range(epochs), "epoch: "):
    for batch in tqdm(ppo_trainer.dataloader):
        query_tensors = batch["input_ids"]

        # Get responses from the policy
        response_tensors = ppo_trainer.generate(query_tensors, **generation_kwargs)
        assert all(isinstance(response, torch.Tensor) and response.dim() == 1 for response in response_tensors)
        batch["response"] = [tokenizer.decode(r.squeeze()) for r in response_tensors]

        # Compute rewards
        texts = [q + r for q, r in zip(batch["query"], batch["response"])]
        pipe_outputs = reward_model(texts)
        rewards = [torch.tensor(output[1]["score"]) for output in pipe_outputs]

        # Run a step of PPO
        stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)

ppo_trainer.save_pretrained(f"{folder}/my_ppo_model")
assert ppo_trainer.current_step == 4
print(sorted(stats))
