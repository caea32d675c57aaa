"""The module in which TRL has its trainers."""

from rlhf._callbacks import TrainerCallback
from rlhf._configs import DistillationConfig, DPOConfig, GRPOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf._distill import DistillationTrainer
from rlhf._dpo import DPOTrainer
from rlhf._rollouts import GRPOTrainer, PPOTrainer, RLOOTrainer
from rlhf._scripts import ModelConfig, get_kbit_device_map, get_peft_config, get_quantization_config
from rlhf._sft import RewardTrainer, SFTTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "PPOConfig",
    "PPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "TrainerCallback",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]
