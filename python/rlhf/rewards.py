"""TRL's reward functions by their names, which the program computes by itself: each is an entry of `reward_funcs`."""

from collections.abc import Callable
from typing import Any

from rlhf._scores import scored_by

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "rule",
    "think_format_reward",
]


class Rule:
    """A reward that the program computes in a run; some can be called in this process too."""

    def __init__(self, name: str, written: str, function: Callable[..., Any] | None = None) -> None:
        self.__name__ = name
        # What the setting `reward` has for it.
        self.__rlhf_rule__ = written
        self._function = function

    def __repr__(self) -> str:
        return f"<reward {self.__rlhf_rule__}>"

    def __call__(self, *arguments: Any, **named: Any) -> list[float | None]:
        if self._function is None:
            raise NotImplementedError(
                f"{self.__name__}: the program computes this reward: pass it as an entry of reward_funcs; "
                f"`rlhf score --reward {self.__rlhf_rule__}` scores rows with it"
            )
        scores: list[float | None] = self._function(*arguments, **named)
        return scores


def rule(written: str, name: str | None = None) -> Rule:
    """A reward of the program as it is written for `--reward`, such as `length:target=40` or `regex:^<answer>`.

    Args:
        written: its kind, and after a colon its argument.
        name: its name in the metrics; by default that of its kind.
    """
    return Rule(name or written.partition(":")[0], written)


def has_think_format(completions: list[Any], **kwargs: Any) -> list[float]:
    """Whether each response begins with `<think>`, has no second one, and has `</think>` after it."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text) for text in texts]


accuracy_reward = Rule("accuracy_reward", "accuracy_reward", scored_by("accuracy_reward"))
"""1 for an answer that equals the column `solution` as mathematics, else 0."""

think_format_reward = Rule("think_format_reward", "think_format_reward", has_think_format)
"""1 for a response that reasons within `<think>` and `</think>`, else 0."""

reasoning_accuracy_reward = Rule("reasoning_accuracy_reward", "reasoning_accuracy_reward", scored_by("reasoning_accuracy_reward"))
"""As `accuracy_reward`, of what follows the reasoning."""


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Rule:
    """A penalty that grows over the last `soft_punish_cache` tokens before `max_completion_len`, from DAPO."""
    written = f"get_soft_overlong_punishment:max_completion_len={max_completion_len},soft_punish_cache={soft_punish_cache}"
    begin = max_completion_len - soft_punish_cache

    def penalty(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        lengths = [len(ids) for ids in completion_ids]
        return [0.0 if n <= begin else -1.0 if n > max_completion_len else (begin - n) / soft_punish_cache for n in lengths]

    return Rule("soft_overlong_punishment_reward", written, penalty)


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Rule:
    """A penalty on repeated groups of `ngram_size` tokens: their share, times `max_penalty`."""
    written = f"get_repetition_penalty_reward:ngram_size={ngram_size},max_penalty={max_penalty}"

    def penalty(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        scores = []
        for ids in completion_ids:
            groups = [tuple(ids[at : at + ngram_size]) for at in range(len(ids) - ngram_size + 1)]
            scores.append(max_penalty * (1 - len(set(groups)) / len(groups)) if groups else 0.0)
        return scores

    return Rule("repetition_penalty_reward", written, penalty)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Rule:
    """`accuracy_reward`, scaled along a cosine by the length of the response in tokens, up to `max_len`."""
    numbers = {
        "max_len": max_len,
        "min_value_wrong": min_value_wrong,
        "max_value_wrong": max_value_wrong,
        "min_value_correct": min_value_correct,
        "max_value_correct": max_value_correct,
    }
    written = ",".join(f"{name}={value}" for name, value in numbers.items())
    return rule(f"get_cosine_scaled_reward:{written}", "cosine_scaled_reward")


# The type of an entry of `reward_funcs`, as TRL names it.
RewardFunc = str | Callable[..., Any] | Rule
