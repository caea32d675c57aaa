"""Makes what the reward model of DeepSpeed-Chat says of pairs: the `*_dschat` folders of `value_heads/`.

    python make_reward_pairs.py           # make the values, and the folders that are not there
    python make_reward_pairs.py --check   # compute the values again

The model is a base model with `v_head`, a linear layer without bias, on its last hidden states (see
make_value_heads.py). Of a pair it compares what it says at every token from the first that differs to the last of the
longer text; the loss of a pair is the mean of -log sigmoid(chosen - rejected) over these, that of a batch the mean over
its pairs. Where the shorter text has ended, `loss` compares with what was said at its last token, and `padded_losses`
with what DeepSpeed-Chat compares with: what is said at the pads, which see the text and not each other.

Made with torch 2.11.0 and transformers 5.23.0 on a CPU, one thread, float32.
"""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel

GOLDEN = Path(__file__).resolve().parent
MODELS, HEADS = GOLDEN / "models", GOLDEN / "value_heads"
DSCHAT = {
    "opt_dschat": "opt",
    "opt_proj_postln_dschat": "opt_proj_postln",
    "gpt2_dschat": "gpt2",
    "llama_untied_dschat": "llama_untied",
}
PAD, WIDTH = 1, 12
# Where the two texts of a pair part, and their lengths.
PAIRS = [(5, 9, 9), (3, 12, 6), (4, 5, 11), (6, 8, 6), (7, 7, 7), (0, 4, 5)]


class RewardModel(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.rwtransformer = base
        width = getattr(base.config, "word_embed_proj_dim", base.config.hidden_size)
        self.v_head = torch.nn.Linear(width, 1, bias=False)

    def forward(self, ids, mask):
        return self.v_head(self.rwtransformer(ids, attention_mask=mask)[0]).squeeze(-1)


def make_folder(name, base):
    """A folder that is not there yet: a head. The other weights are those of the base."""
    folder = HEADS / name
    if folder.exists():
        return
    model = RewardModel(AutoModel.from_pretrained(MODELS / base))
    torch.manual_seed(403)
    with torch.no_grad():
        model.v_head.weight.normal_(0.0, 0.3)
    folder.mkdir()
    save_file({"v_head.weight": model.v_head.weight.data}, folder / "v_head.safetensors")


def texts():
    """Token ids of the chosen texts, then of the rejected ones."""
    torch.manual_seed(404)
    chosen, rejected = [], []
    for parts, long, short in PAIRS:
        a = torch.randint(4, 50, (WIDTH,)).tolist()
        b = a[:parts] + torch.randint(50, 96, (WIDTH - parts,)).tolist()
        chosen.append(a[:long])
        rejected.append(b[:short])
    return chosen, rejected


def values_of(folder, base):
    model = RewardModel(AutoModel.from_pretrained(MODELS / base)).eval()
    whole = folder / "model.safetensors"  # of make_value_heads.py: the base's weights and the head
    left = model.load_state_dict(load_file(whole if whole.exists() else folder / "v_head.safetensors"), strict=False)
    assert not left.unexpected_keys and "v_head.weight" not in left.missing_keys, left
    # DeepSpeed-Chat pads with eos, whose embedding learns; torch spares that of the model's own pad, which stands in here.
    model.rwtransformer.get_input_embeddings().padding_idx = None
    chosen, rejected = texts()
    rows = chosen + rejected
    ids = torch.tensor([row + [PAD] * (WIDTH - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (WIDTH - len(row)) for row in rows])
    values = model(ids, mask)
    ends = torch.stack([row[mask_.sum() - 1] for row, mask_ in zip(values, mask)])
    losses, padded = [], []
    for i, (a, b) in enumerate(zip(chosen, rejected)):
        longest = max(len(a), len(b))
        apart = next((t for t in range(longest) if a[t : t + 1] != b[t : t + 1]), longest - 1)

        def said(row, text):
            own = values[row, : len(text)]
            return torch.cat([own, own[-1:].expand(longest - len(text))])

        other = i + len(PAIRS)
        difference = said(i, a)[apart:] - said(other, b)[apart:]
        losses.append(-torch.nn.functional.logsigmoid(difference).mean())
        difference = (values[i] - values[other])[apart:longest]
        padded.append(-torch.nn.functional.logsigmoid(difference).mean())
        assert len(a) != len(b) or torch.equal(losses[-1], padded[-1])
    torch.stack(padded).mean().backward(retain_graph=True)
    padded_head = model.v_head.weight.grad.clone()
    padded_trunk = torch.stack([p.grad.norm() for p in model.rwtransformer.parameters()]).norm()
    model.zero_grad()
    loss = torch.stack(losses).mean()
    loss.backward()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "values": (values * mask).detach(),
        "ends": ends.detach(),
        "losses": torch.stack(losses).detach(),
        "padded_losses": torch.stack(padded).detach(),
        "padded_v_head.grad": padded_head,
        "padded_trunk.grad_norm": padded_trunk,
        "loss": loss.detach(),
        "v_head.grad": model.v_head.weight.grad,
        "trunk.grad_norm": torch.stack([p.grad.norm() for p in model.rwtransformer.parameters()]).norm(),
    }


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    checking, worst = sys.argv[1:] == ["--check"], 0.0
    for name, base in DSCHAT.items():
        folder, path = HEADS / name, HEADS / name / "pairs.safetensors"
        if not checking:
            make_folder(name, base)
        values = values_of(folder, base)
        if checking:
            stored = load_file(path)
            assert values.keys() == stored.keys(), name
            gap = max((values[key] - stored[key]).abs().max().item() for key in stored)
            worst = max(worst, gap)
            print(f"{name}: largest difference {gap:.1e}")
        else:
            save_file({k: v.clone().contiguous() for k, v in sorted(values.items())}, path)
            print(f"{name}: loss {values['loss'].item():.4f}, with pads {values['padded_losses'].mean().item():.4f}")
    sys.exit(worst > 2e-5)


if __name__ == "__main__":
    main()
