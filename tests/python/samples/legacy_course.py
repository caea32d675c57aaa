"""The loop of a course on RLHF with TRL 0.11: reference model, trackers, a reward function of its own, the parts of a step."""

import sys

import torch
from rlhf import Unsupported
from rlhf.legacy import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed
from transformers import AutoTokenizer, get_linear_schedule_with_warmup

model_path, folder = sys.argv[1:]

config = PPOConfig(
    model_name=model_path,
    learning_rate=1.41e-5,
    log_with="tensorboard",
    project_kwargs={"logging_dir": f"{folder}/logs"},
    batch_size=2,
    mini_batch_size=1,
    gradient_accumulation_steps=1,
    optimize_cuda_cache=True,
    early_stopping=False,
    target_kl=0.1,
    ppo_epochs=2,
    seed=0,
    init_kl_coef=0.2,
    adap_kl_ctrl=True,
)
set_seed(config.seed)
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=config.learning_rate, weight_decay=0.01)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=5)
ppo_trainer = PPOTrainer(config, model, ref_model, tokenizer, optimizer=optimizer, lr_scheduler=scheduler)

dataset = [{"query": "w1 it"}, {"query": "w2 is"}]


def tokenize(element):
    return tokenizer(element["query"], return_tensors="pt")["input_ids"]


def get_rewards_from_rm(prompts, texts):
    return [torch.tensor(float(len(text))) for text in texts]


prompt_tensors = [tokenize(d).squeeze(0) for d in dataset]
rates = []
for epoch in range(3):
    response_tensors = ppo_trainer.generate(prompt_tensors, return_prompt=False, do_sample=True, max_new_tokens=6)
    texts = [tokenizer.decode(r.squeeze()) for r in response_tensors]
    prompts = [tokenizer.decode(p.squeeze()) for p in prompt_tensors]
    rewards = get_rewards_from_rm(prompts, texts)
    stats = ppo_trainer.step(prompt_tensors, response_tensors, rewards)
    ppo_trainer.log_stats(stats, {"query": prompts, "response": texts}, rewards)
    rates.append(stats["ppo/learning_rate"])
assert rates[0] == 0.0 and abs(rates[1] - 1.41e-5) < 1e-12 and 0 < rates[2] < rates[1], rates

# A loss of their own has no graph here, and says what to write.
logprobs, logits, values, masks = ppo_trainer.batched_forward_pass(model, prompt_tensors, response_tensors)
reference = ppo_trainer.batched_forward_pass(ppo_trainer.ref_model, prompt_tensors, response_tensors)[0]
token_rewards, non_score, kls = ppo_trainer.compute_rewards(rewards, logprobs, reference, masks)
values, advantages, returns = ppo_trainer.compute_advantages(values, token_rewards, masks)
pg_loss, v_loss, _ = ppo_trainer.loss(logprobs, values, logits, values, logprobs, masks, advantages, returns)
try:
    (pg_loss + v_loss).backward()
except Unsupported as error:
    assert "train_minibatch" in str(error)
else:
    raise AssertionError("expected an error")
ppo_trainer.train_minibatch(logprobs, values, logprobs, logits, values, masks, advantages, returns)
try:
    PPOTrainer(config, model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
except Unsupported as error:
    assert "SGD" in str(error)
else:
    raise AssertionError("expected an error")
