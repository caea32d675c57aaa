"""Reward functions in the user's process, called as TRL calls them."""

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from rlhf._modules import function_of, is_module

# A class of rewards.py that the program computes by itself.
RULE = "__rlhf_rule__"


def name_of(function: Any) -> str:
    """The name of a function in the metrics, as in TRL: `__name__`, of what a partial calls, or the class of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", None) or type(function).__name__)


class Function:
    """A reward function of the user."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.name = name
        self.metrics: list[tuple[str, float]] = []
        self.extra: list[tuple[str, list[Any]]] = []

    def log_metric(self, name: str, value: float) -> None:
        """Logs a number: the mean of an update is the metric `reward/FUNCTION/NAME`."""
        self.metrics.append((str(name), float(value)))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Adds a column with one value per completion to the samples."""
        self.extra.append((str(column), [plain(value) for value in values]))

    def call(self, named: dict[str, Any], state: Any, loop: "Loop") -> dict[str, Any]:
        """Calls the function with the columns of a batch, and returns the reply for the program."""
        self.metrics, self.extra = [], []
        own = {"trainer_state": state, "log_metric": self.log_metric, "log_extra": self.log_extra}
        result = self.function(**named, **accepted(self.function, own))
        if inspect.isawaitable(result):
            result = loop.run(result)
        return {"scores": scores(result, len(named["completions"]), self.name), "metrics": self.metrics, "extra": self.extra}


def accepted(function: Callable[..., Any], named: dict[str, Any]) -> dict[str, Any]:
    """The part of the arguments that a function accepts: all, if it takes `**kwargs` or does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return named
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return named
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in named.items() if name in names}


def scores(result: Any, expected: int, name: str) -> list[float | None]:
    """The result of a function as numbers; None stays, and so does a number that is not finite, which the program refuses."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, (str, bytes, dict)) or not isinstance(result, Iterable):
        raise TypeError(f"reward `{name}`: expected a list with one score per completion, found {type(result).__name__}")
    found = [None if score is None else number(score, name) for score in result]
    if len(found) != expected:
        raise ValueError(f"reward `{name}`: expected {expected} scores, one per completion, found {len(found)}")
    return found


def number(score: Any, name: str) -> float | None:
    try:
        value = float(score)
    except (TypeError, ValueError):
        raise TypeError(f"reward `{name}`: expected a number or None, found {type(score).__name__}") from None
    if value != value:
        # TRL's word for no score.
        return None
    return value


def plain(value: Any) -> Any:
    """A value of a column as JSON has it, else its text."""
    if hasattr(value, "item"):
        value = value.item()
    return value if value is None or isinstance(value, (bool, int, float, str, list, dict)) else str(value)


class Loop:
    """An event loop in a thread of its own, started when the first coroutine needs it: that of a notebook's thread is at work."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    def run(self, awaitable: "Awaitable[Any]") -> Any:
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, name="rlhf-rewards", daemon=True).start()

        async def wait() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result()

    def close(self) -> None:
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)


class Rewards:
    """The rewards of a trainer: which of them are functions, and how the program names each."""

    def __init__(self, given: Any, place: Callable[[Any, str], str], tokenizer: Callable[[int], Any] = lambda at: None) -> None:
        """`place` saves a model and returns its folder; `tokenizer` has the tokenizer of a reward by its number."""
        self._tokenizer = tokenizer
        self.functions: list[Function] = []
        # Values of the setting `reward`.
        self.written: list[str] = []
        names: list[str] = []
        for number_, reward in enumerate(given if isinstance(given, (list, tuple)) else [given]):
            name, kind = self._written(reward, number_, place)
            base, more = name, 2
            while name in names:
                name, more = f"{base}-{more}", more + 1
            names.append(name)
            self.written.append(f"{name}={kind}" if name else kind)

    def _written(self, reward: Any, at: int, place: Callable[[Any, str], str]) -> tuple[str, str]:
        """The name of a reward and what the program computes it by."""
        if rule := getattr(reward, RULE, None):
            return name_of(reward), str(rule)
        if isinstance(reward, (str, os.PathLike)):
            return written_text(os.fspath(reward))
        if hasattr(reward, "save_pretrained"):
            path = str(getattr(getattr(reward, "config", None), "_name_or_path", "") or "model")
            return sound(path.rstrip("/").rsplit("/", 1)[-1]), f"model:{place(reward, f'reward_model_{at}')}"
        if not callable(reward) or inspect.isclass(reward):
            found = reward.__name__ if inspect.isclass(reward) else type(reward).__name__
            raise TypeError(f"reward_funcs: expected a function, a model, a path or a name, found {found}")
        if is_module(reward):
            reward = function_of(reward, self._tokenizer(at))
        name = sound(name_of(reward))
        self.functions.append(Function(reward, name))
        return name, f"python:rlhf_reward_bridge.reward_{len(self.functions) - 1}"


def sound(name: str) -> str:
    """A name as the program takes it."""
    return "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "_-.<>" else "_" for letter in name) or "reward"


def written_text(text: str) -> tuple[str, str]:
    """A reward that is a text: a model as in TRL, or a rule as the program writes it."""
    head = text.partition(":")[0]
    kind = head.rpartition("=")[2]
    if ":" in text or kind in RULES:
        name = head.rpartition("=")[0] if "=" in head else ""
        return name, text.partition("=")[2] if name else text
    path = os.path.abspath(text) if os.path.exists(text) else text
    return sound(text.rstrip("/").rsplit("/", 1)[-1]), f"model:{path}"


# Rules that are written without an argument.
RULES = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_soft_overlong_punishment",
    "get_repetition_penalty_reward",
    "get_cosine_scaled_reward",
    "json",
    "repetition",
)
