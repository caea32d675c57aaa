"""Models by their folders or names: the program has their weights, and this process what describes them."""

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from rlhf._arrays import find_torch
from rlhf._errors import RunError, Unsupported
from rlhf._objects import is_text, place_model

# Arguments of from_pretrained that change nothing here: where and how transformers loads and computes.
PASSED = (
    "attn_implementation",
    "cache_dir",
    "device_map",
    "is_trainable",
    "local_files_only",
    "low_cpu_mem_usage",
    "summary_dropout_prob",
    "token",
    "use_auth_token",
    "use_cache",
    "use_safetensors",
)
# Fields of PEFT's LoraConfig that the program has.
OF_ADAPTER = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "use_rslora",
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "exclude_modules",
    "layers_to_transform",
)
BACKWARD = "write ppo_trainer.step(queries, responses, scores), or ppo_trainer.train_minibatch(...): the program has the gradients"


class PreTrainedModelWrapper:
    """A model with a value head, which the program loads when a trainer is made of it."""

    is_seq2seq = False

    def __init__(self, source: Any, peft_config: Any = None, **settings: Any) -> None:
        # A path or name, or a model of transformers or PEFT, which is saved for the program.
        self.source = source
        self.peft_config = peft_config
        self.settings = settings
        self.is_peft_model = peft_config is not None
        self.is_gradient_checkpointing = False
        self.trainer: Any = None
        self._parameter: Any = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> "PreTrainedModelWrapper":
        """A model by its path or name, or a model of transformers or PEFT.

        Args:
            peft_config (`peft.LoraConfig` or `dict`, *optional*): an adapter to train in place of all weights.
            torch_dtype, dtype (*optional*): the dtype in which the weights are held.
            load_in_8bit, load_in_4bit, quantization_config (*optional*): the format of frozen weights, beside an adapter.
            v_head_init_strategy (`str`, *optional*): `normal`: draws the head with the deviation `v_head_initializer_range` (0.2).
        """
        if model_args:
            raise Unsupported(f"from_pretrained: expected arguments by name, found {len(model_args)} more by place")
        peft_config = kwargs.pop("peft_config", None)
        settings = dict(model_settings(kwargs))
        return cls(pretrained_model_name_or_path, peft_config, **settings)

    def place(self, folder: str) -> str:
        """The path or name for the program; an object is saved into `folder`."""
        return place_model(self.source, folder, "model", keep=False)

    @property
    def config(self) -> SimpleNamespace:
        """The fields of the model's config.json."""
        if hasattr(self.source, "config"):
            found: SimpleNamespace = self.source.config
            return found
        path = os.path.join(str(self.source), "config.json")
        if not os.path.exists(path):
            raise RunError(
                f"{self.source}: config: expected a folder with a config.json, found none; a name on the hub has it in the program"
            )
        with open(path, encoding="utf-8") as file:
            return SimpleNamespace(**json.load(file), name_or_path=str(self.source))

    @property
    def pretrained_model(self) -> "PreTrainedModelWrapper":
        """The model without its head, which is in the program too."""
        return self

    def parameters(self) -> "Iterator[Any]":
        """A parameter in the place of all of them, for the constructor of an optimizer whose numbers the program takes over."""
        if self._parameter is None:
            torch = find_torch()
            if torch is None:
                raise Unsupported("parameters: expected torch to be there; without it pass optimizer={'optim': 'adamw_torch', ...}")
            self._parameter = torch.nn.Parameter(torch.zeros(1))
        yield self._parameter

    def named_parameters(self) -> "Iterator[tuple[str, Any]]":
        """As `parameters`."""
        for parameter in self.parameters():
            yield "all", parameter

    def _bound(self, what: str) -> Any:
        if self.trainer is None:
            raise RunError(f"{what}: expected a model that a PPOTrainer was made of: the trainer loads it")
        return self.trainer

    def generate(self, input_ids: Any = None, **kwargs: Any) -> Any:
        """Responses with their prompts, as transformers returns them; the model is that of a trainer."""
        return self._bound("generate")._generate_as_transformers(input_ids, reference=self is self.trainer.ref_model, **kwargs)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Writes the model of a trainer."""
        self._bound("save_pretrained").save_pretrained(save_directory)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Pushes the model of a trainer."""
        found: str = self._bound("push_to_hub").push_to_hub(repo_id, **kwargs)
        return found

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Has the program recompute activations."""
        self.is_gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Has the program keep activations."""
        self.is_gradient_checkpointing = False

    def eval(self) -> "PreTrainedModelWrapper":
        """Does nothing: the program applies no dropout."""
        return self

    def train(self, mode: bool = True) -> "PreTrainedModelWrapper":
        """Does nothing: the program applies no dropout."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> "PreTrainedModelWrapper":
        """Does nothing: `PPOConfig(device=...)` is the program's device."""
        return self

    cuda = cpu = to

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported(f"a call of the model: write ppo_trainer.batched_forward_pass(model, queries, responses); to train, {BACKWARD}")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The weights are in the program."""
        raise Unsupported("state_dict: write ppo_trainer.save_pretrained(folder), and load the weights from there")


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper):
    """A causal language model with a value head on its trunk."""


class AutoModelForSeq2SeqLMWithValueHead(PreTrainedModelWrapper):
    """An encoder-decoder with a value head on its decoder."""

    is_seq2seq = True


class ReferenceModel(PreTrainedModelWrapper):
    """The start of a policy as its reference, which may share lower layers with it."""

    def __init__(self, policy: Any, num_shared_layers: "int | None") -> None:
        super().__init__(policy.source if isinstance(policy, PreTrainedModelWrapper) else policy)
        self.num_shared_layers = num_shared_layers


def create_reference_model(model: Any, num_shared_layers: "int | None" = None, pattern: "str | None" = None) -> ReferenceModel:
    """A frozen copy of a model as it begins; with `num_shared_layers` the two share that many lower layers, which are then frozen.

    Args:
        pattern (`str`, *optional*): of names of layers in TRL; the program knows the layers of its families, and it has no effect.
    """
    return ReferenceModel(model, num_shared_layers)


def model_settings(kwargs: "dict[str, Any]") -> "Iterator[tuple[str, Any]]":
    """The program's parameters for arguments of from_pretrained."""
    std, strategy = kwargs.pop("v_head_initializer_range", 0.2), kwargs.pop("v_head_init_strategy", None)
    if strategy == "normal":
        yield "value_head_std", float(std)
    elif strategy is not None:
        raise Unsupported(f"from_pretrained: v_head_init_strategy = {strategy!r}: expected normal, or none for torch's own")
    for name, value in kwargs.items():
        if name in ("torch_dtype", "dtype"):
            kind = str(value).removeprefix("torch.")
            if value is not None:
                yield "dtype", kind
        elif name in ("load_in_8bit", "load_in_4bit"):
            yield name, bool(value)
        elif name == "quantization_config":
            yield "load_in_8bit", bool(getattr(value, "load_in_8bit", False))
            yield "load_in_4bit", bool(getattr(value, "load_in_4bit", False))
        elif name == "trust_remote_code" and value:
            raise Unsupported("from_pretrained: trust_remote_code: expected False: code that comes with a model is never run")
        elif name == "revision" and value not in (None, "main"):
            raise Unsupported(f"from_pretrained: revision = {value!r}: expected main; download that revision, and pass its folder")
        elif name not in (*PASSED, "trust_remote_code", "revision"):
            raise Unsupported(f"from_pretrained: `{name}`: the program loads the model, and has no such setting; leave it out")


def adapter_settings(peft_config: Any) -> "dict[str, Any] | None":
    """The program's parameters for an adapter of PEFT."""
    if peft_config is None:
        return None
    if isinstance(peft_config, dict):
        values = dict(peft_config)
    else:
        values = peft_config.to_dict() if hasattr(peft_config, "to_dict") else dict(vars(peft_config))
    found = {}
    for name in OF_ADAPTER:
        value = values.pop(name, None)
        if isinstance(value, (set, frozenset, tuple)):
            value = sorted(value)
        if name == "layers_to_transform" and isinstance(value, int):
            value = [value]
        if value not in (None, {}, []):
            found[name] = value
    refused = {"bias": ("none", None), "init_lora_weights": (True, None), "lora_bias": (False, None), "layer_replication": (None,)}
    for name, expected in refused.items():
        if values.get(name, expected[0]) not in expected:
            raise Unsupported(f"peft_config: {name} = {values[name]!r}: expected {expected[0]!r}")
    return found


def source_of(model: Any, what: str) -> Any:
    """A model argument as a wrapper."""
    if isinstance(model, PreTrainedModelWrapper):
        return model
    if is_text(model) or hasattr(model, "save_pretrained"):
        return PreTrainedModelWrapper(model)
    raise TypeError(f"{what}: expected a model of rlhf.legacy, a path, a name or a model of transformers, found {type(model).__name__}")
