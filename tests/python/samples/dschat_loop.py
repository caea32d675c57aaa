"""DeepSpeed-Chat's trainer as its reference page describes it: experience, mini-batches, steps; tensors in and out."""

import sys
from types import SimpleNamespace

import torch
from rlhf.dschat import DeepSpeedPPOTrainer, DeepSpeedRLHFEngine, MiniDataset, load_hf_tokenizer, save_hf_format

actor_path, critic_path, folder = sys.argv[1:]
args = SimpleNamespace(
    max_prompt_seq_len=8,
    max_answer_seq_len=6,
    end_of_conversation_token="<|endoftext|>",
    actor_zero_stage=0,
    critic_zero_stage=0,
    compute_fp32_loss=True,
    print_answers=False,
    align_overflow=False,
    actor_learning_rate=1e-3,
    critic_learning_rate=1e-3,
    lr_scheduler_type="cosine",
    num_warmup_steps=0,
    dtype="bf16",
    enable_ema=False,
    output_dir=folder,
)
tokenizer = load_hf_tokenizer(actor_path)
engine = DeepSpeedRLHFEngine(actor_path, critic_path, tokenizer, args, num_total_iters=8)
trainer = DeepSpeedPPOTrainer(engine, args)
tokenizer.padding_side = "left"
batch = tokenizer(["w1 it", "w2 is it", "w3", "w4 is"], padding=True, return_tensors="pt")
mini_dataset = MiniDataset(1, 2)
for step in range(2):
    exp = trainer.generate_experience(batch["input_ids"], batch["attention_mask"], step)
    assert set(exp) == {"prompts", "logprobs", "ref_logprobs", "value", "rewards", "input_ids", "attention_mask"}
    assert all(isinstance(value, torch.Tensor) for value in exp.values())
    for mini_batch in mini_dataset.add(exp):
        actor_loss, critic_loss = trainer.train_rlhf(mini_batch)
        assert torch.isfinite(actor_loss) and torch.isfinite(critic_loss)
prompts, mask = exp["prompts"], exp["attention_mask"][:, 1:]
start = prompts.shape[1] - 1
rewards = trainer.compute_rewards(prompts, exp["logprobs"], exp["ref_logprobs"], exp["rewards"], mask)
advantages, returns = trainer.get_advantages_and_returns(exp["value"], rewards, start)
loss = trainer.actor_loss_fn(exp["logprobs"][:, start:], exp["logprobs"][:, start:], advantages, mask[:, start:])
assert abs(loss.item() + (advantages * mask[:, start:]).sum().item() / mask[:, start:].sum().item()) < 1e-4
try:
    trainer.actor_model.backward(loss)
except NotImplementedError as error:
    assert "train_rlhf" in str(error)
save_hf_format(engine.actor, tokenizer, args, sub_folder="actor")
