"""Models by their folders or names: the program has their weights, and this process what describes them."""

import contextlib
import json
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from rlhf._arrays import find_torch
from rlhf._errors import RunError, Unsupported, nearest
from rlhf._objects import is_text, place_model
from rlhf._translate import check_lora, of_quantization

# Arguments of from_pretrained that change nothing here: where and how transformers loads and computes.
PASSED = (
    "attn_implementation",
    "device_map",
    "is_trainable",
    "low_cpu_mem_usage",
    "summary_dropout_prob",
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
# Those that change nothing: they describe an adapter, or belong to another setting that is off.
ABOUT_ADAPTER = (
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
)
# Keys of a map in place of a BitsAndBytesConfig.
OF_QUANTIZATION = (
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "load_in_4bit",
    "load_in_8bit",
    "quant_method",
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
        # The token of the hub, which goes to the program in its environment.
        self.token: str | None = None
        # Weak, as the trainer has the model: `del trainer` ends the program.
        self._trainer: weakref.ref[Any] | None = None
        self._parameter: Any = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> "PreTrainedModelWrapper":
        """A model by its path or name, or a model of transformers or PEFT.

        Args:
            peft_config (`peft.LoraConfig` or `dict`, *optional*): an adapter to train in place of all weights.
            torch_dtype, dtype (*optional*): the dtype in which the weights are held.
            load_in_8bit, load_in_4bit, quantization_config (*optional*): the format of frozen weights, beside an adapter; 4 bits are NF4.
            token (`str`, *optional*): the token of the hub.
            v_head_init_strategy (`str`, *optional*): `normal`: draws the head with the deviation `v_head_initializer_range` (0.2).
        """
        if model_args:
            raise Unsupported(f"from_pretrained: expected arguments by name, found {len(model_args)} more by place")
        peft_config = kwargs.pop("peft_config", None)
        token = token_of(kwargs)
        settings = dict(model_settings(kwargs))
        made = cls(pretrained_model_name_or_path, peft_config, **settings)
        made.token = token
        return made

    @property
    def trainer(self) -> Any:
        """The trainer that was made of the model, or None."""
        return self._trainer() if self._trainer is not None else None

    def bind(self, trainer: Any) -> None:
        """Makes the model that of a trainer."""
        self._trainer = weakref.ref(trainer)

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
        trainer = self.trainer
        if trainer is None:
            raise RunError(f"{what}: expected a model that a PPOTrainer was made of, and that trainer: the program has the weights")
        return trainer

    def _trained(self, what: str) -> Any:
        trainer = self._bound(what)
        if self is trainer.ref_model and self is not trainer.model:
            raise Unsupported(f"ref_model.{what}: expected the model that is trained, found its reference, which is as it was loaded")
        return trainer

    def generate(self, input_ids: Any = None, **kwargs: Any) -> Any:
        """Responses with their prompts, as transformers returns them; the model is that of a trainer."""
        trainer = self._bound("generate")
        return trainer._generate_as_transformers(input_ids, reference=self is trainer.ref_model, **kwargs)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Writes the model of a trainer."""
        self._trained("save_pretrained").save_pretrained(save_directory, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Pushes the model of a trainer."""
        found: str = self._trained("push_to_hub").push_to_hub(repo_id, **kwargs)
        return found

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Has the program recompute activations."""
        self._set_checkpointing(True)

    def gradient_checkpointing_disable(self) -> None:
        """Has the program keep activations."""
        self._set_checkpointing(False)

    def _set_checkpointing(self, is_on: bool) -> None:
        if is_on != self.is_gradient_checkpointing and self.trainer is not None:
            name = f"gradient_checkpointing_{'enable' if is_on else 'disable'}"
            raise Unsupported(f"{name}: expected it before the PPOTrainer is made; PPOConfig(gradient_checkpointing={is_on}) does the same")
        self.is_gradient_checkpointing = is_on

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
        policy = policy if isinstance(policy, PreTrainedModelWrapper) else PreTrainedModelWrapper(policy)
        super().__init__(policy.source, None, **policy.settings)
        self.token = policy.token
        self.num_shared_layers = num_shared_layers


def create_reference_model(model: Any, num_shared_layers: "int | None" = None, pattern: "str | None" = None) -> ReferenceModel:
    """A frozen copy of a model as it begins; with `num_shared_layers` the two share that many lower layers, which are then frozen.

    Args:
        pattern (`str`, *optional*): of names of layers in TRL; the program knows the layers of its families, and it has no effect.
    """
    return ReferenceModel(model, num_shared_layers)


# Arguments of from_pretrained that are variables of the program.
OF_PROGRAM = {"cache_dir": "HF_HUB_CACHE", "local_files_only": "HF_HUB_OFFLINE=1"}


def token_of(kwargs: "dict[str, Any]") -> "str | None":
    """Takes the token of the hub out of the arguments of from_pretrained."""
    found = [kwargs.pop(name, None) for name in ("token", "use_auth_token")]
    given = next((token for token in found if token is not None), None)
    if given is False:
        raise Unsupported("from_pretrained: token = False: expected a token or none: unset HF_TOKEN in the environment")
    # True is the token that is saved, which the program reads itself.
    return None if given is None or given is True else str(given)


def quantization_settings(config: Any) -> "dict[str, Any]":
    """The program's parameters for a BitsAndBytesConfig, or a map in its place."""
    if isinstance(config, dict):
        for name in config:
            if name not in OF_QUANTIZATION and not name.startswith(("llm_int8_", "_")):
                hint = nearest(name, list(OF_QUANTIZATION))
                raise Unsupported(f"quantization_config: `{name}`: expected a setting of BitsAndBytesConfig{hint}")
    settings = of_quantization(config)
    kind = settings.pop("bnb_4bit_quant_type", "nf4")
    if kind != "nf4":
        raise Unsupported(f"quantization_config: bnb_4bit_quant_type = {kind!r}: expected 'nf4' in this loop; write it out")
    if settings.pop("use_bnb_nested_quant", False):
        raise Unsupported("quantization_config: bnb_4bit_use_double_quant = True: expected False in this loop")
    return settings


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
            yield from quantization_settings(value).items()
        elif name in OF_PROGRAM:
            if value:
                raise Unsupported(f"from_pretrained: {name} = {value!r}: expected none: set {OF_PROGRAM[name]} in the environment")
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
    check_lora(peft_config)
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
    for name, value in values.items():
        # PEFT's objects have all fields, most of them off.
        if name not in ABOUT_ADAPTER and value not in (None, False, {}, []):
            raise Unsupported(f"peft_config: {name} = {value!r}: expected some of {', '.join(OF_ADAPTER)}{nearest(name, list(OF_ADAPTER))}")
    return found


def check_reference(reference: PreTrainedModelWrapper, policy: PreTrainedModelWrapper, dtype: "str | None") -> None:
    """Refuses settings of a reference model that are not the policy's: the program loads both in one way."""
    if reference is policy:
        return
    if reference.peft_config is not None:
        raise Unsupported("ref_model: peft_config: expected none: a reference has no adapter to train; merge an adapter of its own into it")
    if reference.token and policy.token and reference.token != policy.token:
        raise Unsupported("ref_model: token: expected that of the model, found another one")
    own = {"dtype": dtype or ("float32" if policy.peft_config is None else None), **policy.settings}
    for name, value in reference.settings.items():
        if name != "value_head_std" and value and value != own.get(name):
            found = own.get(name)
            raise Unsupported(f"ref_model: {name} = {value!r}: expected that of the model ({found!r}): the program loads both in one way")


def decoder_start_of(model: PreTrainedModelWrapper, folder: str) -> "int | None":
    """The token with which a decoder starts, by the config of the model: an object, a folder, or a name whose files are in the cache."""
    config = getattr(model.source, "config", None)
    if config is None:
        path = next((path for path in configs_of(folder) if os.path.isfile(path)), None)
        if path is None:
            raise RunError(f"model: {folder}: expected its config.json, which has the decoder's start, found none; pass the folder of the model")
        with open(path, encoding="utf-8") as file:
            config = SimpleNamespace(**json.load(file))
    start = getattr(config, "decoder_start_token_id", None)
    if start is None and hasattr(config, "base_model_name_or_path"):
        return decoder_start_of(PreTrainedModelWrapper(None), str(config.base_model_name_or_path))
    return start


def configs_of(name: str) -> "Iterator[str]":
    """Where the config of a folder, or of a name on the hub, may be."""
    yield os.path.join(name, "config.json")
    yield os.path.join(name, "adapter_config.json")
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    folder = os.path.join(cache, "models--" + name.replace("/", "--"))
    with contextlib.suppress(OSError):
        for revision in sorted(os.listdir(os.path.join(folder, "snapshots"))):
            yield os.path.join(folder, "snapshots", revision, "config.json")


def source_of(model: Any, what: str) -> Any:
    """A model argument as a wrapper."""
    if isinstance(model, PreTrainedModelWrapper):
        return model
    if is_text(model) or hasattr(model, "save_pretrained"):
        return PreTrainedModelWrapper(model)
    raise TypeError(f"{what}: expected a model of rlhf.legacy, a path, a name or a model of transformers, found {type(model).__name__}")
