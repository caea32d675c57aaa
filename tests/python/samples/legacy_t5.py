"""The encoder-decoder example of TRL 0.11: a T5 whose responses are scored by their length."""

import sys

import torch
from rlhf.legacy import AutoModelForSeq2SeqLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model

model_path, tokenizer_path, folder = sys.argv[1:]
config = PPOConfig(model_name=model_path, learning_rate=5e-5, batch_size=4, mini_batch_size=2, ppo_epochs=2)
model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(config.model_name)
trainer = PPOTrainer(config, model, create_reference_model(model), tokenizer_path)
assert trainer.is_encoder_decoder
queries = [torch.tensor([5, 6, 7 + number]) for number in range(4)]
for _step in range(2):
    responses = trainer.generate(queries, do_sample=True, top_k=0, max_new_tokens=6)
    rewards = [torch.tensor(-float(len(response))) for response in responses]
    stats = trainer.step(queries, responses, rewards)
assert abs(stats["objective/kl"]) < 1.0
trainer.save_pretrained(f"{folder}/policy")
