"""The tools and environments of the runs in this folder: `--tools tools.add`, `--environment_factory tools.Counter`."""

import itertools

_ticks = itertools.count(1)


def restart():
    """Starts the count of `tick` and `later` again."""
    global _ticks
    _ticks = itertools.count(1)


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Two.
    """
    return a + b


def div(a: float, b: float) -> float:
    """Divides.

    Args:
        a: One.
        b: Two.
    """
    if b == 0:
        raise ValueError("b is 0")
    return a / b


def fill(n: int) -> str:
    """Fills.

    Args:
        n: Size.
    """
    return "~" * n


def shout(text: str, times: int = 1) -> str:
    """Shouts.

    Args:
        text: Words.
        times: Count.
    """
    return " ".join([str(text).upper()] * times)


def show(kind: str):
    """Shows.

    Args:
        kind: Type.
    """
    kinds = {"dict": {"a": 1, "b": None}, "float": 0.1, "none": None, "bool": True, "text": "é ✓\n"}
    return kinds[kind]


def tick() -> int:
    """Counts calls."""
    return next(_ticks)


async def later(n: int) -> str:
    """Counts later.

    Args:
        n: Size.
    """
    if n == 0:
        raise ValueError("n is 0")
    return f"later {n}: {next(_ticks)}"


class Named:
    """What environments share: a method that they inherit, and one that is not a tool."""

    def look(self) -> str:
        """Looks."""
        return f"{type(self).__name__} at {self.value}"

    def _hidden(self):
        return self.value


class Counter(Named):
    """Counts from the row's `start` to 10."""

    def __init__(self):
        self.value, self.resets = 0, 0

    def reset(self, prompt, start, **row) -> str:
        self.value, self.resets = start, self.resets + 1
        return f" Now {start}, {len(prompt)} messages."

    def step(self, by: int) -> str:
        """Steps.

        Args:
            by: Size.
        """
        if by < 0:
            raise ValueError(f"by is {by}")
        self.value += by
        return str(self.value)

    def get_reward(self) -> float:
        return self.value / 10


class Echo(Named):
    """Repeats, without a reward of its own."""

    value = "rest"

    def reset(self, **row) -> None:
        return None

    def again(self, text: str) -> str:
        """Repeats.

        Args:
            text: Words.
        """
        return f"{text} {text}"
