"""The sentiment example of TRL 0.11: lengths of queries and responses are drawn, a classifier's logit is the reward."""

import sys

import torch
from datasets import Dataset
from rlhf.legacy import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer
from transformers import AutoTokenizer, pipeline

model_path, reward_path, folder = sys.argv[1:]
config = PPOConfig(model_name=model_path, learning_rate=1.41e-5, batch_size=4, mini_batch_size=2)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
tokenizer.pad_token = tokenizer.eos_token
input_size = LengthSampler(2, 5)


def shorten(sample):
    sample["input_ids"] = tokenizer.encode(sample["review"])[: input_size()]
    sample["query"] = tokenizer.decode(sample["input_ids"])
    return sample


reviews = Dataset.from_dict({"review": [f"w{number} it is one of the films" for number in range(8)]})
reviews = reviews.map(shorten, batched=False)
reviews.set_format(type="torch")


def collator(data):
    return {key: [row[key] for row in data] for key in data[0]}


model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=reviews, data_collator=collator)
device = trainer.accelerator.device
if trainer.accelerator.num_processes == 1:
    device = 0 if torch.cuda.is_available() else "cpu"
sentiment = pipeline("sentiment-analysis", model=reward_path, device=device)
arguments = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": tokenizer.eos_token_id}
output_size = LengthSampler(4, 8)
for _epoch, batch in enumerate(trainer.dataloader):
    queries, responses = batch["input_ids"], []
    for query in queries:
        length = output_size()
        whole = trainer.generate(query, max_new_tokens=length, **arguments).squeeze()
        responses.append(whole[-(len(whole) - len(query)) :])
    batch["response"] = [tokenizer.decode(row.squeeze()) for row in responses]
    texts = [query + response for query, response in zip(batch["query"], batch["response"])]
    found = sentiment(texts, top_k=None, function_to_apply="none", batch_size=16)
    rewards = [torch.tensor(output[1]["score"]) for output in found]
    stats = trainer.step(queries, responses, rewards)
    trainer.log_stats(stats, batch, rewards)

# Continuations before and after.
whole = model.generate(queries[0].unsqueeze(0), max_new_tokens=4, do_sample=False)
before = ref_model.generate(queries[0].unsqueeze(0), max_new_tokens=4, do_sample=False)
assert whole.shape[0] == before.shape[0] == 1
model.save_pretrained(f"{folder}/policy")
tokenizer.save_pretrained(f"{folder}/policy")
