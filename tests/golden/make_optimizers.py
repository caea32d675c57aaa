"""Makes the reference values of `optimizers.safetensors`: some steps of optimizers with small states.

    python make_optimizers.py            # make the file again
    python make_optimizers.py --check    # recompute the values and compare

Made with torch 2.11.0, transformers 5.23.0 and bitsandbytes 0.50.2 (with triton, which its module imports) on a CPU, one thread, float32.
README.md says what each tensor is.
"""

import math
import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from bitsandbytes.backends.triton.kernels_optim import optimizer_update_8bit_blockwise_pytorch
from bitsandbytes.functional import create_dynamic_map
from safetensors.torch import load_file, save_file
from transformers.optimization import Adafactor

FILE = Path(__file__).resolve().parent / "optimizers.safetensors"
STEPS = 6
LR = 0.02
WEIGHT_DECAY = 0.1
# The first two have 8-bit states (at least 4096 elements), and no whole number of blocks of 256.
SHAPES = {"matrix": [67, 65], "expert": [2, 47, 51], "small": [7, 9], "vector": [33]}
DECAYING = ["matrix", "expert", "small"]


def start(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 0.3


def gradient(param, step):
    """A gradient that both sides compute: of magnitudes over six decades, which differ from step to step."""
    count = torch.arange(param.numel(), dtype=torch.float64).view(param.shape)
    scale = 10 ** (-3 + 3 * torch.sin(count * 0.37))
    return (scale * torch.sin(count * 0.11 + step * 1.7) + 0.01 * param.double()).float()


def decay_of(name):
    return WEIGHT_DECAY if name in DECAYING else 0.0


def adamw_8bit(params):
    states = {}
    maps = [create_dynamic_map(signed=signed) for signed in (True, False)]
    for name, param in params.items():
        if param.numel() >= 4096:
            blocks = math.ceil(param.numel() / 256)
            codes = [torch.zeros(param.shape, dtype=torch.uint8) for _ in range(2)]
            states[name] = codes + [torch.zeros(blocks) for _ in range(2)]
    others = {name: torch.nn.Parameter(param) for name, param in params.items() if name not in states}
    adamw = torch.optim.AdamW(
        [{"params": [param], "weight_decay": decay_of(name)} for name, param in others.items()], lr=LR, eps=1e-8
    )
    for step in range(1, STEPS + 1):
        for name, (m, v, absmax_m, absmax_v) in states.items():
            grad = gradient(params[name], step)
            # p, g, states, betas (two of them AdEMAMix's), eps, step, lr, maps, scales, decay, scale of the gradient
            optimizer_update_8bit_blockwise_pytorch(
                params[name], grad, m, v, 0.9, 0.999, 0.0, 0.0, 1e-8, step, LR, *maps, absmax_m, absmax_v,
                decay_of(name), 1.0, False, optimizer_name="adam",
            )  # fmt: skip
        for param in others.values():
            param.grad = gradient(param.detach(), step)
        adamw.step()
    found = {f"{name}.{key}": tensor for name, tensors in states.items() for key, tensor in zip(
        ("state1", "state2", "absmax1", "absmax2"), tensors
    )}  # fmt: skip
    for name, param in others.items():
        found |= {f"{name}.{key}": adamw.state[param][key] for key in ("exp_avg", "exp_avg_sq")}
    return found | {name: (others.get(name, param)).detach() for name, param in params.items()}


def adafactor(params):
    params = {name: torch.nn.Parameter(param) for name, param in params.items()}
    # The settings of transformers' Trainer.
    groups = [{"params": [param], "weight_decay": decay_of(name)} for name, param in params.items()]
    optimizer = Adafactor(groups, lr=LR, scale_parameter=False, relative_step=False)
    for step in range(1, STEPS + 1):
        for param in params.values():
            param.grad = gradient(param.detach(), step)
        optimizer.step()
    found = {name: param.detach() for name, param in params.items()}
    for name, param in params.items():
        state = optimizer.state[param]
        found |= {f"{name}.{key}": value for key, value in state.items() if key.startswith("exp_avg_sq")}
    return found


def computed():
    torch.set_num_threads(1)
    names = enumerate(SHAPES.items())
    params = {name: start(shape, seed) for seed, (name, shape) in names}
    values = {f"start.{name}": param.clone() for name, param in params.items()}
    for optimizer in (adamw_8bit, adafactor):
        fresh = {name: param.clone() for name, param in params.items()}
        values |= {f"{optimizer.__name__}.{name}": value for name, value in optimizer(fresh).items()}
    return {name: value.contiguous() for name, value in values.items()}


def main():
    values = computed()
    if "--check" not in sys.argv[1:]:
        save_file(values, FILE)
        print(f"{FILE.name}: {FILE.stat().st_size} bytes")
        return
    stored = load_file(FILE)
    if stored.keys() != values.keys():
        sys.exit(f"names differ: {stored.keys() ^ values.keys()}")
    for name, value in values.items():
        difference = (stored[name].double() - value.double()).abs().max().item()
        # Codes next to a middle may differ by one.
        if difference > (1 if value.dtype == torch.uint8 else 1e-6 * max(1.0, value.abs().max().item())):
            sys.exit(f"{name}: differs by {difference}")
    print(f"{len(values)} tensors are equal")


if __name__ == "__main__":
    main()
