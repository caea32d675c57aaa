"""RLHF for language models: TRL's trainers, which train with the program `rlhf`, and the command that starts it.

    from rlhf import GRPOConfig, GRPOTrainer

The loops that are the caller's are in `rlhf.legacy` (TRL's step()) and `rlhf.dschat` (DeepSpeed-Chat's engine).

No torch is needed: the program trains in a process of its own. The command is `rlhf`; `python -m rlhf` is the same.
"""

# As that of typing, whose import takes longer than the rest of a start of the command.
TYPE_CHECKING = False

__version__ = "0.1.0"

# The modules of the names, which are imported when they are used: each start of the command imports this one.
_NAMES = {
    "_configs": ("DPOConfig", "DistillationConfig", "GKDConfig", "GRPOConfig", "PPOConfig", "RLOOConfig", "RewardConfig", "SFTConfig"),
    "_rollouts": ("GRPOTrainer", "PPOTrainer", "RLOOTrainer"),
    "_distill": ("DistillationTrainer", "GKDTrainer"),
    "_dpo": ("DPOTrainer",),
    "_sft": ("RewardTrainer", "SFTTrainer"),
    "_callbacks": ("TrainerCallback", "TrainerControl", "TrainerState"),
    "_errors": ("RunError", "Unsupported"),
    "_scripts": (
        "BitsAndBytesConfig",
        "DatasetMixtureConfig",
        "LoraConfig",
        "ModelConfig",
        "SIMPLE_CHAT_TEMPLATE",
        "ScriptArguments",
        "TrlParser",
        "get_dataset",
        "get_kbit_device_map",
        "get_peft_config",
        "get_quantization_config",
        "init_zero_verbose",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
# Names of TRL that are not here, with what there is instead.
_ABSENT = {
    "AutoModelForCausalLMWithValueHead": "; from rlhf.legacy import it for step(); the PPOTrainer of TRL 1.x takes the language model itself",
    "AutoModelForSeq2SeqLMWithValueHead": "; from rlhf.legacy import it for step(); the PPOTrainer of TRL 1.x takes the language model itself",
    "DeepSpeedPPOTrainer": "; from rlhf.dschat import DeepSpeedPPOTrainer",
    "DeepSpeedRLHFEngine": "; from rlhf.dschat import DeepSpeedRLHFEngine",
    "LengthSampler": "; from rlhf.legacy import LengthSampler",
    "DataCollatorForCompletionOnlyLM": "; SFTConfig(completion_only_loss=True) trains on completions",
    "KTOConfig": "; rlhf has no KTO: TRL has it",
    "KTOTrainer": "; rlhf has no KTO: TRL has it",
    "LogCompletionsCallback": "; samples are in output_dir/samples, and each run shows some",
    "RichProgressCallback": "; each run shows its progress",
    "create_reference_model": "; from rlhf.legacy import it for step(); the PPOTrainer of TRL 1.x makes the reference model: pass ref_model=None",
}
__all__ = ["__version__", "rewards", *sorted(_MODULES)]

if TYPE_CHECKING:
    from rlhf import rewards as rewards
    from rlhf._callbacks import TrainerCallback as TrainerCallback
    from rlhf._callbacks import TrainerControl as TrainerControl
    from rlhf._callbacks import TrainerState as TrainerState
    from rlhf._configs import DistillationConfig as DistillationConfig
    from rlhf._configs import DPOConfig as DPOConfig
    from rlhf._configs import GKDConfig as GKDConfig
    from rlhf._configs import GRPOConfig as GRPOConfig
    from rlhf._configs import PPOConfig as PPOConfig
    from rlhf._configs import RewardConfig as RewardConfig
    from rlhf._configs import RLOOConfig as RLOOConfig
    from rlhf._configs import SFTConfig as SFTConfig
    from rlhf._distill import DistillationTrainer as DistillationTrainer
    from rlhf._distill import GKDTrainer as GKDTrainer
    from rlhf._dpo import DPOTrainer as DPOTrainer
    from rlhf._errors import RunError as RunError
    from rlhf._errors import Unsupported as Unsupported
    from rlhf._rollouts import GRPOTrainer as GRPOTrainer
    from rlhf._rollouts import PPOTrainer as PPOTrainer
    from rlhf._rollouts import RLOOTrainer as RLOOTrainer
    from rlhf._scripts import SIMPLE_CHAT_TEMPLATE as SIMPLE_CHAT_TEMPLATE
    from rlhf._scripts import BitsAndBytesConfig as BitsAndBytesConfig
    from rlhf._scripts import DatasetMixtureConfig as DatasetMixtureConfig
    from rlhf._scripts import LoraConfig as LoraConfig
    from rlhf._scripts import ModelConfig as ModelConfig
    from rlhf._scripts import ScriptArguments as ScriptArguments
    from rlhf._scripts import TrlParser as TrlParser
    from rlhf._scripts import get_dataset as get_dataset
    from rlhf._scripts import get_kbit_device_map as get_kbit_device_map
    from rlhf._scripts import get_peft_config as get_peft_config
    from rlhf._scripts import get_quantization_config as get_quantization_config
    from rlhf._scripts import init_zero_verbose as init_zero_verbose
    from rlhf._sft import RewardTrainer as RewardTrainer
    from rlhf._sft import SFTTrainer as SFTTrainer


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        # A module of the package, which each start of the command asks for; its import follows.
        raise AttributeError(f"module 'rlhf' has no attribute {name!r}")
    import importlib

    if name in ("rewards", "experimental", "trainer", "scripts", "legacy", "dschat"):
        return importlib.import_module(f"rlhf.{name}")
    module = _MODULES.get(name)
    if module is None:
        from rlhf._errors import nearest

        if name in _ABSENT:
            # `from rlhf import NAME` shows the text of no other exception.
            raise ImportError(f"module 'rlhf' has no {name}{_ABSENT[name]}", name=__name__)
        hint = nearest(name, list(_MODULES))
        raise AttributeError(f"module 'rlhf' has no attribute {name!r}{hint}")
    found = getattr(importlib.import_module(f"rlhf.{module}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
