"""The settings of TRL 0.11's PPOTrainer."""

import dataclasses
import math
import os
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

from rlhf._errors import Unsupported

# Settings of TRL that change nothing here.
WITHOUT_EFFECT = ("remove_unused_columns", "optimize_cuda_cache", "optimize_device_cache", "dataset_num_proc")
# Settings that are not the program's: of this process, or derived.
OWN = (
    "accelerator_kwargs",
    "project_kwargs",
    "world_size",
    "forward_batch_size",
    "is_encoder_decoder",
    "is_peft_model",
    "backward_batch_size",
    "global_backward_batch_size",
    "global_batch_size",
    "total_ppo_epochs",
    "model_name",
    "device",
    "dtype",
    "bf16",
    "num_threads",
    "num_processes",
)
# Arguments of TRL 1.x's PPOConfig that are not among those of 0.11.
OF_NEW = (
    "num_ppo_epochs",
    "per_device_train_batch_size",
    "response_length",
    "total_episodes",
    "sft_model_path",
    "reward_model_path",
    "stop_token",
    "kl_coef",
    "kl_estimator",
    "num_mini_batches",
)


# Their names in 0.11.
RENAMED = {"num_ppo_epochs": "ppo_epochs", "kl_coef": "init_kl_coef", "kl_estimator": "kl_penalty", "sft_model_path": "model_name"}


def script_name() -> str:
    """The name of this script, without its ending."""
    return os.path.splitext(os.path.basename(sys.argv[0] or "rlhf"))[0] or "rlhf"


@dataclass
class PPOConfig:
    """The settings of `PPOTrainer`, with trl 0.11.4's names and defaults.

    Sizes are per process, as in TRL. Those after `dataset_num_proc` are rlhf's own:

    Args:
        output_dir (`str`, *optional*): folder of logs and of the best model; with `log_with` a new one in `runs/` by default.
        keep_best (`bool`, *optional*, defaults to `False`): whether the model with the best mean score is kept in `output_dir/best`.
        device (`str`, *optional*): `cpu`, `cuda`, `cuda:N`; a GPU if there is one by default.
        dtype (`str`, *optional*): dtype in which the weights are held; `float32` by default, and that of the files beside an adapter.
        bf16 (`bool`, *optional*, defaults to `False`): whether the models compute in bf16; `accelerator_kwargs` sets it too.
        num_threads (`int`, *optional*): threads of the program.
        num_processes (`int`, *optional*, defaults to 1): ranks that this script starts; under torchrun each process drives one.
    """

    exp_name: str = field(default_factory=script_name)
    seed: int = 0
    log_with: str | None = None
    task_name: str | None = None
    model_name: str | None = "gpt2"
    query_dataset: str | None = "stanfordnlp/imdb"
    reward_model: str | None = "sentiment-analysis:lvwerra/distilbert-imdb"
    remove_unused_columns: bool = True
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
    accelerator_kwargs: dict[str, Any] = field(default_factory=dict)
    project_kwargs: dict[str, Any] = field(default_factory=dict)
    tracker_project_name: str = "trl"
    push_to_hub_if_best_kwargs: dict[str, Any] = field(default_factory=dict)
    steps: int = 20000
    learning_rate: float = 1.41e-5
    adap_kl_ctrl: bool = True
    init_kl_coef: float = 0.2
    kl_penalty: str = "kl"
    target: float = 6.0
    horizon: float = 10000.0
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    batch_size: int = 128
    forward_batch_size: int | None = None
    mini_batch_size: int = 128
    gradient_accumulation_steps: int = 1
    world_size: int | None = None
    ppo_epochs: int = 4
    max_grad_norm: float | None = None
    optimize_cuda_cache: bool | None = None
    optimize_device_cache: bool = False
    early_stopping: bool = False
    target_kl: float = 1.0
    compare_steps: int = 1
    ratio_threshold: float = 10.0
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = None
    whiten_rewards: bool = False
    gradient_checkpointing: bool = False
    is_encoder_decoder: bool | None = None
    is_peft_model: bool | None = None
    backward_batch_size: int | None = None
    global_backward_batch_size: int | None = None
    global_batch_size: int | None = None
    dataset_num_proc: int | None = None
    output_dir: str | None = None
    keep_best: bool = False
    device: str | None = None
    dtype: str | None = None
    bf16: bool = False
    num_threads: int | None = None
    num_processes: int = 1

    def __new__(cls, *args: Any, **named: Any) -> "PPOConfig":
        """Says where an argument of TRL 1.x belongs; `__init__` would only say that it is unknown."""
        found = [name for name in named if name in OF_NEW]
        if found:
            hint = f"; here it is `{RENAMED[found[0]]}`" if found[0] in RENAMED else ""
            raise TypeError(f"PPOConfig: `{found[0]}`: expected a setting of TRL 0.11, found one of rlhf.PPOConfig (TRL 1.x){hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.forward_batch_size is not None:
            warnings.warn("PPOConfig: forward_batch_size is mini_batch_size by its older name", stacklevel=3)
            self.mini_batch_size = self.forward_batch_size
        ranks = self.num_processes if self.num_processes > 1 else int(os.environ.get("WORLD_SIZE", "1"))
        if self.world_size not in (None, ranks):
            raise ValueError(f"PPOConfig: world_size = {self.world_size}: expected {ranks}, the processes there are, or none")
        self.world_size = ranks
        for name in ("batch_size", "mini_batch_size", "gradient_accumulation_steps", "ppo_epochs", "num_processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"PPOConfig: {name} = {getattr(self, name)}: expected at least 1")
        self.backward_batch_size = self.mini_batch_size * self.gradient_accumulation_steps
        if self.batch_size % self.backward_batch_size:
            raise ValueError(
                f"PPOConfig: batch_size = {self.batch_size}: expected a multiple of mini_batch_size * gradient_accumulation_steps = "
                f"{self.backward_batch_size}"
            )
        self.global_backward_batch_size = self.backward_batch_size * ranks
        self.global_batch_size = self.batch_size * ranks
        self.total_ppo_epochs = math.ceil(self.steps / self.batch_size)
        self._read_accelerator()

    def _read_accelerator(self) -> None:
        """Takes over what accelerate's arguments ask for."""
        for name, value in self.accelerator_kwargs.items():
            if name == "mixed_precision" and value in ("no", "bf16", None):
                self.bf16 = self.bf16 or value == "bf16"
            elif name == "cpu":
                self.device = "cpu" if value else self.device
            else:
                raise Unsupported(f"PPOConfig: accelerator_kwargs: `{name}` = {value!r}: expected mixed_precision (no, bf16) or cpu")

    def to_dict(self) -> dict[str, Any]:
        """All settings."""
        return dict(self.__dict__)

    def settings(self) -> dict[str, Any]:
        """The program's settings."""
        names = [part.name for part in dataclasses.fields(self) if part.name not in (*WITHOUT_EFFECT, *OWN)]
        found = {name: getattr(self, name) for name in names if getattr(self, name) not in (None, {})}
        ranks = self.world_size or 1
        # Sizes of the program are those of all ranks.
        for name in ("batch_size", "mini_batch_size"):
            found[name] *= ranks
        if self.output_dir is None and (self.log_with or self.keep_best or self.push_to_hub_if_best_kwargs):
            found["output_dir"] = str(self.project_kwargs.get("logging_dir") or new_folder(self.exp_name))
        if self.push_to_hub_if_best_kwargs:
            found["keep_best"] = True
        return found


def new_folder(name: str) -> str:
    """A folder in `runs` that is not there yet."""
    number, folder = 1, os.path.join("runs", name)
    while os.path.exists(folder):
        number += 1
        folder = os.path.join("runs", f"{name}-{number}")
    return folder


def refuse_new(arguments: dict[str, Any]) -> None:
    """Refuses arguments of TRL 1.x, with the place that takes them."""
    found = [
        name for name in arguments if name in OF_NEW or name in ("args", "processing_class", "train_dataset", "reward_model", "value_model")
    ]
    if found:
        raise TypeError(
            f"rlhf.legacy has TRL 0.11's PPOTrainer, whose loop is yours; `{found[0]}` is one of TRL 1.x: from rlhf import PPOTrainer"
        )
