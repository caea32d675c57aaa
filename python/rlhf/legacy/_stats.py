"""Statistics of a step by trl 0.11.4's names."""

import math
from typing import Any

from rlhf._arrays import Array, Rows
from rlhf._arrays import plain as lists_of
from rlhf.legacy._layout import Layout

# Statistics that are rows of response tokens, which TRL has in columns of whole sequences.
MATRICES = ("objective/logprobs", "objective/ref_logprobs")


def is_number(value: Any) -> bool:
    """Whether a statistic is one number."""
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) or getattr(value, "shape", None) == ()


def numbers(values: Any) -> Any:
    """A list as an array of NumPy, where that is there, as in TRL."""
    try:
        import numpy  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return values
    return numpy.asarray(values, dtype=numpy.float32)


def plain(stats: "dict[str, Any]") -> "dict[str, Any]":
    """Statistics of the program with lists and numbers; a number that is not finite is NaN."""
    return of_step(stats, None)


def of_step(stats: "dict[str, Any]", layout: "Layout | None") -> "dict[str, Any]":
    """The same, with rows of tokens in the columns of whole sequences if their layout is given."""
    found: dict[str, Any] = {}
    for name, value in stats.items():
        if isinstance(value, Array):
            found[name] = numbers(value.flat())
        elif isinstance(value, Rows):
            rows = value.lists()
            found[name] = numbers(layout.whole(rows)) if layout is not None and name in MATRICES else rows
        else:
            found[name] = math.nan if value is None else value
    return found


def mean(values: "list[float]") -> float:
    """The mean."""
    return sum(values) / len(values) if values else math.nan


def std(values: "list[float]") -> float:
    """The unbiased standard deviation."""
    if len(values) < 2:
        return math.nan
    middle = mean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))


def masked(rows: Any, masks: Any) -> "list[list[float]]":
    """The numbers of each row that count."""
    pairs = zip(lists_of(rows), lists_of(masks), strict=True)
    return [[number for number, kept in zip(row, mask, strict=True) if kept] for row, mask in pairs]


def record(kl_coef: float, data: "dict[str, Any]") -> "dict[str, Any]":
    """All statistics of a step from its parts, as TRL's record_step_stats has them."""
    masks = data["masks"]
    kls = [sum(row) for row in masked(data["kls"], masks)]
    entropies = [-sum(row) for row in masked(data["logprobs"], masks)]
    non_score = [number for row in masked(data["non_score_reward"], masks) for number in row]
    scores = [float(score) for score in lists_of(data["scores"])]
    stats: dict[str, Any] = {
        "objective/kl": mean(kls),
        "objective/kl_dist": numbers(kls),
        "objective/logprobs": data["logprobs"],
        "objective/ref_logprobs": data["ref_logprobs"],
        "objective/kl_coef": kl_coef,
        "objective/entropy": mean(entropies),
        "ppo/mean_non_score_reward": mean(non_score),
        "ppo/mean_scores": mean(scores),
        "ppo/std_scores": std(scores),
    }
    for name in ("queries", "responses"):
        lengths = [float(len(row)) for row in data[name]]
        stats[f"tokens/{name}_len_mean"] = mean(lengths)
        stats[f"tokens/{name}_len_std"] = std(lengths)
        stats[f"tokens/{name}_dist"] = numbers(lengths)
    for name, value in data["train_stats"].items():
        value = lists_of(value)
        flat = [number for row in value for number in (row if isinstance(row, list) else [row])] if isinstance(value, list) else value
        stats[f"ppo/{name}"] = (
            numbers(flat) if name in ("policy/advantages", "policy/ratio") else mean(flat) if isinstance(flat, list) else flat
        )
    if stats.get("ppo/returns/var"):
        stats["ppo/val/var_explained"] = 1.0 - stats["ppo/val/error"] / stats["ppo/returns/var"]
    return stats
