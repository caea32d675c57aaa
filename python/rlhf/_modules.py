"""Modules of torch that the program cannot load, as reward functions in the user's process."""

import inspect
from typing import Any

from rlhf._errors import Unsupported


def is_module(value: Any) -> bool:
    """Whether a value is a module of torch; torch need not be imported."""
    return hasattr(value, "forward") and hasattr(value, "parameters")


def parameters_of(module: Any) -> list[str]:
    """The names that the module's `forward` takes."""
    return list(inspect.signature(module.forward).parameters)


class Scorer:
    """A module that scores token ids, called as TRL calls a reward model: with prompts and completions as its tokenizer encodes them.

    The score of a row is the first of its `logits`, or of what the module returns.
    """

    def __init__(self, module: Any, tokenizer: Any) -> None:
        self.module, self.tokenizer = module, tokenizer
        self.__name__ = type(module).__name__

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        import torch  # type: ignore[import-not-found,unused-ignore]

        texts = [self.text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        if getattr(self.tokenizer, "pad_token", "") is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        inputs = self.tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        first = next(iter(self.module.parameters()), None)
        if first is not None:
            inputs = {name: tensor.to(first.device) for name, tensor in inputs.items()}
        self.module.eval()
        with torch.inference_mode():
            found = self.module(**inputs)
        return self.scores(getattr(found, "logits", found))

    def text(self, prompt: Any, completion: Any) -> str:
        """The text that is scored: a conversation by its template."""
        if isinstance(prompt, str):
            return prompt + str(completion)
        return str(self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))

    def scores(self, found: Any) -> list[float]:
        shape = tuple(getattr(found, "shape", ()))
        if len(shape) not in (1, 2):
            raise TypeError(
                f"reward `{self.__name__}`: expected logits of shape [rows] or [rows, 1], found {list(shape) or type(found).__name__}"
            )
        return [float(score) for score in (found[:, 0] if len(shape) == 2 else found)]


def function_of(module: Any, tokenizer: Any) -> Any:
    """The reward function that a module is: of completions, if its `forward` takes them, else of token ids."""
    name, taken = type(module).__name__, parameters_of(module)
    if "completions" in taken:
        return module
    if "input_ids" not in taken:
        raise Unsupported(
            f"reward_funcs: a module of torch alone ({name}) cannot be moved to the program, and its forward takes neither input_ids nor "
            "completions: pass a function of the completions that calls it, which runs in this process"
        )
    if isinstance(tokenizer, (str, bytes)) or not callable(tokenizer):
        raise Unsupported(
            f"reward_funcs: {name} scores token ids in this process: pass its tokenizer, an object, as reward_processing_classes "
            "(of PPOTrainer: processing_class)"
        )
    return Scorer(module, tokenizer)
