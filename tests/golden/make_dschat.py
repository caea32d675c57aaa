"""Makes `dschat/steps/`: two steps of DeepSpeed-Chat's engine, and more cases of its functions, in plain torch.

    python make_dschat.py            # make the folder again
    python make_dschat.py --check    # recompute it from what is stored

The formulas are written here from their description, one row and one column at a time, so that nothing is shared with what
they test: the score lands on the first action that is masked out, rewards and values behind it are nothing, advantages are
not whitened, the losses are means over the actions that count, and each model has an Adam of its own.
`dschat/functions.safetensors` itself is from DeepSpeed-Chat's own functions.

Made with torch 2.11.0 and transformers 5.23.0 on a CPU, one thread, float32; models of `models/` and `value_heads/`.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import thin

GOLDEN = Path(__file__).resolve().parent
OUT = GOLDEN / "dschat" / "steps"
PAD = 2  # and the end token, as DeepSpeed-Chat has it
USUAL = dict(kl_ctl=0.1, clip_reward_value=5.0, cliprange=0.2, cliprange_value=0.2, gamma=1.0, lam=0.95)


def shaped(prompt_len, action_mask, logp, ref, score, values, h):
    """Rewards with the score, both zeroed behind it, and advantages and returns, `[B, A]`."""
    start = prompt_len - 1
    rewards = -h["kl_ctl"] * (logp - ref)
    rewards_zeroed, values_zeroed, ends = rewards.clone(), values.clone(), []
    width = logp.shape[1]
    for b in range(logp.shape[0]):
        end = start + int(action_mask[b, start:].sum()) + 1
        at = min(end, width) - 1
        rewards[b, at] += min(max(float(score[b]), -h["clip_reward_value"]), h["clip_reward_value"])
        rewards_zeroed[b] = rewards[b]
        rewards_zeroed[b, end:] = 0.0
        values_zeroed[b, end:] = 0.0
        ends.append(end)
    advantages = torch.zeros(logp.shape[0], width - start)
    for b in range(logp.shape[0]):
        last = 0.0
        for t in range(width - 1, start - 1, -1):
            after = float(values_zeroed[b, t + 1]) if t + 1 < width else 0.0
            delta = float(rewards_zeroed[b, t]) + h["gamma"] * after - float(values_zeroed[b, t])
            last = delta + h["gamma"] * h["lam"] * last
            advantages[b, t - start] = last
    return dict(
        rewards=rewards, ends=torch.tensor(ends), rewards_zeroed=rewards_zeroed, values_zeroed=values_zeroed,
        advantages=advantages, returns=advantages + values_zeroed[:, start:],
    )


def losses(new_logp, old_logp, advantages, new_values, old_values, returns, mask, h):
    ratio = ((new_logp - old_logp) * mask).exp()
    low, high = 1 - h["cliprange"], 1 + h["cliprange"]
    actor = (torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high)) * mask).sum() / mask.sum()
    near = torch.maximum(torch.minimum(new_values, old_values + h["cliprange_value"]), old_values - h["cliprange_value"])
    critic = 0.5 * (torch.maximum((new_values - returns) ** 2, (near - returns) ** 2) * mask).sum() / mask.sum()
    return actor, critic


def case(seed, prompt_len, answer_lens, answer_len, padding, h):
    g = torch.Generator().manual_seed(seed)
    rows, width = len(answer_lens), prompt_len + answer_len
    attention = torch.zeros(rows, width, dtype=torch.long)
    for b, n in enumerate(answer_lens):
        attention[b, padding[b] : prompt_len + n] = 1
    draw = lambda *shape: torch.randn(*shape, generator=g)
    logp, values = -1.5 + 0.5 * draw(rows, width - 1), draw(rows, width - 1)
    inputs = dict(
        prompts=torch.randint(3, 90, (rows, prompt_len), generator=g), attention_mask=attention,
        action_mask=attention[:, 1:].contiguous(), log_probs=logp, ref_log_probs=logp + 0.3 * draw(rows, width - 1),
        reward_score=4.0 * draw(rows), values=values, new_log_probs=logp + 0.3 * draw(rows, width - 1),
        new_values=values + 0.4 * draw(rows, width - 1),
    )
    found = shaped(prompt_len, inputs["action_mask"], logp, inputs["ref_log_probs"], inputs["reward_score"], values, h)
    new_logp, new_values = inputs["new_log_probs"].clone().requires_grad_(), inputs["new_values"].clone().requires_grad_()
    start = prompt_len - 1
    actor, critic = losses(
        new_logp[:, start:], logp[:, start:], found["advantages"], new_values[:, start:],
        found["values_zeroed"][:, start:], found["returns"], inputs["action_mask"][:, start:].float(), h,
    )
    (actor + critic).backward()
    found |= dict(actor_loss=actor.detach(), critic_loss=critic.detach(), grad_new_log_probs=new_logp.grad, grad_new_values=new_values.grad)
    return inputs | found


def functions():
    settings = {
        "case1": (1, 6, [5, 2, 0, 4, 1], 5, [0, 3, 5, 1, 2], {}),
        "case2": (2, 4, [6, 3, 6, 1], 6, [0, 0, 2, 1], dict(kl_ctl=0.3, clip_reward_value=0.7, cliprange=0.05, cliprange_value=0.1, gamma=0.9, lam=0.8)),
    }
    tensors, info = {}, {}
    for name, (seed, prompt, lens, answer, padding, overrides) in settings.items():
        of_case = case(seed, prompt, lens, answer, padding, USUAL | overrides)
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in of_case.items()}
        info[name] = {"overrides": overrides}
    return tensors, info


class Critic(torch.nn.Module):
    """DeepSpeed-Chat's reward model: a base model, and a head without bias; without a seed that of `value_heads/`."""

    def __init__(self, seed=None):
        super().__init__()
        self.rwtransformer = AutoModel.from_pretrained(GOLDEN / "models/opt")
        self.v_head = torch.nn.Linear(32, 1, bias=False)
        if seed is None:
            self.load_state_dict(load_file(GOLDEN / "value_heads/opt_dschat/model.safetensors"))
            return
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.v_head.weight.copy_(0.3 * torch.randn(1, 32, generator=g))
            for p in self.rwtransformer.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=g))

    def forward(self, ids, mask):
        return self.v_head(self.rwtransformer(ids, attention_mask=mask)[0]).squeeze(-1)


def actor(seed):
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "models/opt")
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=g))
    return model.eval()


def token_logprobs(model, ids, mask):
    logits = model(ids, attention_mask=mask).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def sequences(step):
    """Prompts padded on the left to 5; an answer of full width, and shorter ones with the end token behind them."""
    g = torch.Generator().manual_seed(100 + step)
    prompt_lens, answer_lens = [5, 3, 4, 5], [6, 2, 4, 5]
    ids = torch.full((4, 11), PAD)
    for b, (p, n) in enumerate(zip(prompt_lens, answer_lens)):
        ids[b, 5 - p : 5 + n] = torch.randint(3, 90, (p + n,), generator=g)
    return ids


def rounds(dtype):
    torch.manual_seed(0)
    ref = AutoModelForCausalLM.from_pretrained(GOLDEN / "models/opt").eval().to(dtype)
    policy, critic, reward = actor(1).to(dtype), Critic(3).to(dtype).eval(), Critic().to(dtype).eval()
    state = lambda **models: {
        f"{name}.{key}": value.detach().clone().contiguous()
        for name, model in models.items()
        for key, value in model.state_dict().items()
        if key != "lm_head.weight"
    }
    init = state(actor=policy, critic=critic)
    adam = [torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95)) for model in (policy, critic)]
    data = {}
    for step in range(2):
        ids = sequences(step)
        mask = (ids != PAD).long()
        with torch.no_grad():
            last = mask.flip(1).argmax(1)
            at = ids.shape[1] - 1 - last
            exp = dict(
                prompts=ids[:, :5], input_ids=ids, attention_mask=mask, logprobs=token_logprobs(policy, ids, mask),
                ref_logprobs=token_logprobs(ref, ids, mask), value=critic(ids, mask)[:, :-1],
                rewards=reward(ids, mask).gather(1, at[:, None]).squeeze(1),
            )
        data |= {f"step{step}.exp.{key}": value.clone().contiguous() for key, value in exp.items()}
        action_mask = mask[:, 1:]
        found = shaped(5, action_mask, exp["logprobs"], exp["ref_logprobs"], exp["rewards"], exp["value"], USUAL)
        told = []
        for _ in range(2):
            new_logp, new_values = token_logprobs(policy, ids, mask), critic(ids, mask)[:, :-1]
            pair = losses(
                new_logp[:, 4:], exp["logprobs"][:, 4:], found["advantages"].to(dtype), new_values[:, 4:],
                found["values_zeroed"][:, 4:], found["returns"].to(dtype), action_mask[:, 4:].to(dtype), USUAL,
            )
            for optimizer, loss in zip(adam, pair):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            told.append([loss.item() for loss in pair])
        data[f"step{step}.actor_loss"], data[f"step{step}.critic_loss"] = torch.tensor(told).T.contiguous().unbind(0)
    data = {key: value.contiguous().clone() for key, value in data.items()}
    return init, data, state(actor=policy, critic=critic)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    (init, data, final), (_, data64, final64) = rounds(torch.float32), rounds(torch.float64)
    gap = lambda a, b: max((a.double() - b.double()).abs().max().item(), 0.0) if a.is_floating_point() else 0.0
    noise = {"tensors": {k: gap(data[k], data64[k]) for k in data}, "final": {k: gap(final[k], final64[k]) for k in final}}
    cases, described = functions()
    final = {name: tensor.contiguous() for name, tensor in thin.rows(final).items()}
    made = {"functions": cases, "e2e/init": init, "e2e/data": data, "e2e/final": final}
    if "--check" in sys.argv:
        for name, tensors in made.items():
            stored = load_file(OUT / f"{name}.safetensors")
            assert stored.keys() == tensors.keys(), name
            worst = max(gap(stored[k].double(), tensors[k].double()) for k in stored)
            assert worst < 2e-5, (name, worst)
        print("dschat/steps: as stored")
        return
    (OUT / "e2e").mkdir(parents=True, exist_ok=True)
    for name, tensors in made.items():
        save_file(tensors, OUT / f"{name}.safetensors")
    (OUT / "info.json").write_text(json.dumps({"hyper": USUAL, "cases": described}, indent=1) + "\n")
    info = {"lr": 1e-3, "betas": [0.9, 0.95], "epochs": 2, "steps": 2, "pad": PAD, "noise_floor_f32_vs_f64": noise}
    (OUT / "e2e/info.json").write_text(json.dumps(info, indent=1) + "\n")
    config = json.loads((GOLDEN / "models/opt/config.json").read_text()) | {"pad_token_id": PAD}
    (OUT / "e2e/config.json").write_text(json.dumps(config, indent=1) + "\n")


main()
