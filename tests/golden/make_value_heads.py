"""Makes the checkpoints of `value_heads/`: a head on the trunk of a model of `models/`, in the names of the systems.

    python make_value_heads.py            # make every folder again
    python make_value_heads.py --check    # recompute the values of every folder

`gpt2_vhead` is saved by trl 0.11.4's AutoModelForCausalLMWithValueHead. The `*_dschat` folders have the names and the
values of DeepSpeed-Chat's reward model, which is this: the base model as `rwtransformer`, and `v_head`, a linear layer
without bias.

Made with torch 2.11.0, transformers 4.45.2, trl 0.11.4 and accelerate 1.0.1 on a CPU, one thread, float32.
"""

import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from trl import AutoModelForCausalLMWithValueHead

GOLDEN = Path(__file__).resolve().parent
MODELS, HEADS = GOLDEN / "models", GOLDEN / "value_heads"
DSCHAT = {"opt_dschat": "opt", "opt_proj_postln_dschat": "opt_proj_postln"}


class RewardModel(torch.nn.Module):
    def __init__(self, base, width):
        super().__init__()
        self.rwtransformer = base
        self.v_head = torch.nn.Linear(width, 1, bias=False)

    def forward(self, input_ids, attention_mask):
        return self.v_head(self.rwtransformer(input_ids, attention_mask=attention_mask)[0]).squeeze(-1)


def base_of(auto, base):
    config = AutoConfig.from_pretrained(MODELS / base / "config_v4.json")
    return auto.from_pretrained(MODELS / base, config=config)


@torch.no_grad()
def values_of(base, values_at):
    """Of the rows of the base's `unpadded`, and of them cut to 12, 7 and 3 and padded on the right."""
    ids = load_file(MODELS / base / "golden.safetensors")["unpadded.input_ids"]
    mask = (torch.arange(12)[None] < torch.tensor([[12], [7], [3]])).long()
    padded = ids.masked_fill(mask == 0, 1)
    return {
        "unpadded.input_ids": ids,
        "unpadded.values": values_at(ids, torch.ones_like(ids)),
        "right.input_ids": padded,
        "right.attention_mask": mask,
        "right.values": values_at(padded, mask) * mask,
    }


def draw(weights, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in weights:
            weight.normal_(0.0, 0.3)


def trl_values(folder):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(str(folder)).eval()
    return values_of("gpt2", lambda ids, mask: model(ids, attention_mask=mask)[2])


def make_trl(folder):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base_of(AutoModelForCausalLM, "gpt2"))
    draw(model.v_head.parameters(), 401)
    model.pretrained_model.config._name_or_path = "models/gpt2"
    model.save_pretrained(folder)
    return trl_values(folder)


def dschat_values(folder, base):
    trunk = base_of(AutoModel, base)
    model = RewardModel(trunk, trunk.config.word_embed_proj_dim)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return values_of(base, model.eval())


def make_dschat(folder, base):
    trunk = base_of(AutoModel, base)
    model = RewardModel(trunk, trunk.config.word_embed_proj_dim)
    draw(model.v_head.parameters(), 402)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(MODELS / base / "config_v4.json", folder / "config.json")
    return dschat_values(folder, base)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    checking, worst = sys.argv[1:] == ["--check"], 0.0
    for name in ["gpt2_vhead", *DSCHAT]:
        folder = HEADS / name
        if checking:
            found = dschat_values(folder, DSCHAT[name]) if name in DSCHAT else trl_values(folder)
            stored = load_file(folder / "golden.safetensors")
            assert found.keys() == stored.keys(), name
            gap = max((found[key] - stored[key]).abs().max().item() for key in stored)
            worst = max(worst, gap)
            print(f"{name}: largest difference {gap:.1e}")
            continue
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        values = make_dschat(folder, DSCHAT[name]) if name in DSCHAT else make_trl(folder)
        save_file({k: v.clone().contiguous() for k, v in sorted(values.items())}, folder / "golden.safetensors")
        print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir())} bytes")
    sys.exit(worst > 2e-5)


if __name__ == "__main__":
    main()
