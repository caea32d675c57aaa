"""The module in which TRL has `GKDTrainer`."""

from rlhf._configs import GKDConfig
from rlhf._distill import GKDTrainer

__all__ = ["GKDConfig", "GKDTrainer"]
