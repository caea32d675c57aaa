"""What DeepSpeed-Chat's main loop calls beside its trainer."""

import os
from typing import Any

from rlhf._errors import RunError, Unsupported
from rlhf.dschat._engine import Module, arguments
from rlhf.legacy._utils import set_seed


class MiniDataset:
    """Collects `max_size` batches, and returns them in batches of `small_batch_size` rows, in order."""

    def __init__(self, max_size: int, small_batch_size: int) -> None:
        self.dataset: list[Any] = []
        self.max_size = max_size
        self.small_batch_size = small_batch_size

    def add(self, data: Any) -> "list[Any] | None":
        """Adds a batch: a map of tensors, a list or tuple of rows, or a tensor. Returns all batches where there are enough, else None."""
        self.dataset.append(data)
        if len(self.dataset) < self.max_size:
            return None
        found = self.seperate()
        self.free()
        return found

    def seperate(self) -> "list[Any]":
        """The collected batches in smaller ones; DeepSpeed-Chat's spelling."""
        found = []
        for batch in self.dataset:
            rows = len(batch["prompts"] if "prompts" in batch else next(iter(batch.values()))) if isinstance(batch, dict) else len(batch)
            for start in range(0, rows, self.small_batch_size):
                part = slice(start, start + self.small_batch_size)
                found.append({name: rows[part] for name, rows in batch.items()} if isinstance(batch, dict) else batch[part])
        return found

    def free(self) -> None:
        """Drops the collected batches."""
        self.dataset = []


class ExponentialMovingAverage:
    """A moving average of numbers, such as rewards."""

    def __init__(self, alpha: float = 0.9) -> None:
        self.alpha = alpha
        self.ema: float | None = None

    def update(self, number: float) -> "ExponentialMovingAverage":
        """Adds a number."""
        self.ema = number if self.ema is None else self.alpha * self.ema + (1 - self.alpha) * number
        return self

    def get(self) -> float:
        """The average."""
        return self.ema if self.ema is not None else 0.0


def moving_average(model: Module, model_ema: "Module | None", beta: float = 0.992, device: Any = None, zero_stage: int = 0) -> None:
    """Does nothing: the program updates the average in each step of the actor, by `ema_beta`, 0.992."""
    if model_ema is None:
        raise RunError("moving_average: expected an average, found none: set args.enable_ema before the engine is made")
    if beta != 0.992:
        raise Unsupported(f"moving_average: beta = {beta}: set args.ema_beta = {beta} before the engine is made")


def convert_lora_to_linear_layer(model: Any) -> Any:
    """Has the model merge its adapter when it is saved."""
    if isinstance(model, Module):
        model.merges = True
    return model


def save_hf_format(model: Module, tokenizer: Any, args: Any, sub_folder: str = "") -> None:
    """Writes a model with its tokenizer to `args.output_dir/sub_folder`, in the format of transformers."""
    output_dir = arguments(args).get("output_dir")
    if output_dir is None:
        raise ValueError("save_hf_format: args.output_dir: expected a folder, found none")
    model.save_pretrained(os.path.join(output_dir, sub_folder))


def save_zero_three_model(model_ema: Module, global_rank: int, save_dir: str, zero_stage: int = 0) -> None:
    """Writes a model to a folder; `save_hf_format` does the same."""
    model_ema.save_pretrained(save_dir)


def print_rank_0(msg: Any, rank: "int | None" = None) -> None:
    """Prints on rank 0."""
    if rank is None or rank <= 0:
        print(msg)


def to_device(batch: Any, device: Any) -> Any:
    """A batch with its tensors on a device of this process; the program has its own."""
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch


def set_random_seed(seed: "int | None") -> None:
    """Seeds this process; the program's draws follow from `args.seed`."""
    if seed is not None:
        set_seed(seed)


def get_all_reduce_mean(tensor: Any) -> Any:
    """The mean over all ranks, which the numbers of the program are already."""
    return tensor


def load_hf_tokenizer(model_name_or_path: str, fast_tokenizer: bool = True, add_special_tokens: Any = None) -> Any:
    """The tokenizer of transformers, which pads as DeepSpeed-Chat's: on the right, with eos, where it is not a Llama's with a pad token."""
    from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]

    tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, use_fast=fast_tokenizer)
    if add_special_tokens is not None:
        raise Unsupported("load_hf_tokenizer: add_special_tokens: expected none: give a model and a tokenizer that have the token")
    if tokenizer.pad_token is None or "llama" not in str(model_name_or_path):
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer
