"""Helpers of TRL 0.11."""

import random
from typing import Any

from rlhf._arrays import find_torch
from rlhf._errors import Unsupported

KL_HINT = "expected no change: `step` adapts the weight in the program: set init_kl_coef, adap_kl_ctrl, target, horizon in PPOConfig"


class LengthSampler:
    """Draws lengths uniformly from `min_value` to below `max_value`."""

    def __init__(self, min_value: int, max_value: int) -> None:
        self.values = list(range(min_value, max_value))
        if not self.values:
            raise ValueError(f"LengthSampler: expected a min_value below max_value, found {min_value} and {max_value}")

    def __call__(self) -> int:
        return random.choice(self.values)


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seeds random, and NumPy and torch where they are there. The program's draws follow from `PPOConfig.seed`."""
    random.seed(seed)
    try:
        import numpy  # type: ignore[import-not-found,unused-ignore]

        numpy.random.seed(seed)
    except ImportError:
        pass
    torch = find_torch()
    if torch is not None:
        torch.manual_seed(seed)
        if deterministic:
            torch.use_deterministic_algorithms(True)


class FixedKLController:
    """The weight of the KL, which stays."""

    def __init__(self, kl_coef: float) -> None:
        self._value = kl_coef
        # The program has the weight of a trainer, and takes none from here.
        self._is_of_trainer = False

    @property
    def value(self) -> float:
        """The weight; that of a trainer is the weight of its next step."""
        return self._value

    @value.setter
    def value(self, value: float) -> None:
        self._own("value")
        self._value = value

    def update(self, current: float, n_steps: int) -> None:
        """Keeps the weight."""
        self._own("update")

    def _own(self, what: str) -> None:
        """Refuses a change of a trainer's weight."""
        if self._is_of_trainer:
            raise Unsupported(f"kl_ctl.{what}: {KL_HINT}")


class AdaptiveKLController(FixedKLController):
    """The weight of the KL, which follows a target. The program adapts that of a trainer in each step."""

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        super().__init__(init_kl_coef)
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Moves the weight by the KL of `n_steps` rows."""
        self._own("update")
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        self._value *= 1.0 + error * n_steps / self.horizon


def is_list_of_rows(value: Any) -> bool:
    """Whether a value is a list of rows rather than one row."""
    if not isinstance(value, (list, tuple)):
        return False
    return not value or not isinstance(value[0], int)
