"""`from trl.experimental.ppo import PPOConfig, PPOTrainer`, for this package."""

from rlhf._configs import PPOConfig
from rlhf._rollouts import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer"]
