"""TRL's PPOTrainer until 0.11, whose loop is the caller's: `generate`, any scores, `step`.

    from rlhf.legacy import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

The names are those of trl 0.11.4. The models are in the program, which this process drives; tensors come out where torch is there, else
lists. The trainers of TRL 1.x are in `rlhf` itself.
"""

from rlhf.legacy._config import PPOConfig
from rlhf.legacy._models import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
    create_reference_model,
)
from rlhf.legacy._trainer import PPOTrainer
from rlhf.legacy._utils import AdaptiveKLController, FixedKLController, LengthSampler, set_seed

__all__ = [
    "AdaptiveKLController",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "FixedKLController",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "PreTrainedModelWrapper",
    "create_reference_model",
    "set_seed",
]

# Names of TRL 0.11 that are elsewhere.
_ELSEWHERE = {
    "SFTConfig": "; from rlhf import SFTConfig",
    "SFTTrainer": "; from rlhf import SFTTrainer",
    "RewardConfig": "; from rlhf import RewardConfig",
    "RewardTrainer": "; from rlhf import RewardTrainer",
    "PPOv2Config": "; from rlhf import PPOConfig has its settings",
    "PPOv2Trainer": "; from rlhf import PPOTrainer is that trainer",
    "DPOTrainer": "; from rlhf import DPOTrainer",
    "GKDTrainer": "; from rlhf import GKDTrainer",
    "BestOfNSampler": "; generate() with n queries each, and the best by your scores, is the same",
    "TextEnvironment": "; step(response_masks=...) leaves out what a tool wrote",
}


def __getattr__(name: str) -> object:
    from rlhf._errors import nearest

    if name in _ELSEWHERE:
        # `from rlhf.legacy import NAME` shows the text of no other exception.
        raise ImportError(f"module 'rlhf.legacy' has no {name}{_ELSEWHERE[name]}", name=__name__)
    hint = nearest(name, __all__)
    raise AttributeError(f"module 'rlhf.legacy' has no attribute {name!r}{hint}")
