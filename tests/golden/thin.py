"""The part of a tensor that the reference files store, so that they stay small.

A name without brackets is a whole tensor. `NAME[::7]` has every seventh row, `NAME[..., ::7]` every seventh column: no
width of these models is a multiple of 7, so the sample meets every position inside an attention head. The tests read
these names (`Tensors::part` in `tests/support.rs`) and compare the same part of what they compute.
"""

import json

STEP = 7
WHOLE = 512  # tensors of at most this many numbers are stored whole


def rows(tensors):
    """Tensors by name, with every seventh row of those that have more than `WHOLE` numbers."""
    return {
        (name if tensor.numel() <= WHOLE else f"{name}[::{STEP}]"): (tensor if tensor.numel() <= WHOLE else tensor[::STEP])
        for name, tensor in tensors.items()
    }


def columns(tensors, *names):
    """Tensors by name, with every seventh column (the last dimension) of those that are named."""
    return {
        (f"{name}[..., ::{STEP}]" if name in names else name): (tensor[..., ::STEP] if name in names else tensor)
        for name, tensor in tensors.items()
    }


def stored(tensors, *files):
    """The parts of `tensors` that `files`, tensors by stored name, have: for a check of files, whole or thinned."""
    wanted = {name for file in files for name in file}
    found = {}
    for name, tensor in tensors.items():
        found |= {name: tensor, f"{name}[::{STEP}]": tensor[::STEP] if tensor.dim() else tensor}
        found |= {f"{name}[..., ::{STEP}]": tensor[..., ::STEP]}
    return {name: tensor for name, tensor in found.items() if name in wanted}


def noise(floors):
    """Floors of float32 that widen the tolerance max(5 * floor, 2e-5); smaller ones are not stored."""
    return {name: floor for name, floor in floors.items() if 5 * floor > 2e-5}


def write_json(path, value):
    """One line per key of `value`."""
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
    path.write_text("{\n" + lines + "\n}\n")
