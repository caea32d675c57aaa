"""What the configuration classes of `_configs.py` have in common: other names of a setting, and the file for the program."""

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, TypeVar

from rlhf._errors import nearest

T = TypeVar("T", bound="type[Config]")

# Settings whose value None is one of the program's, and not the default.
NONE_IS_A_VALUE = ("max_length",)


@dataclass
class Config:
    """Settings of a trainer, as a dataclass: also for transformers' `HfArgumentParser`.

    Settings keep the names and the defaults of TRL's class; those that only rlhf has are beside them. Other names of a setting, of
    rlhf or of older versions of TRL, are accepted as arguments and as attributes.
    """

    # The command of the program.
    _command: ClassVar[str] = ""
    # Other names of fields.
    _names: ClassVar[dict[str, str]] = {}
    # What the program does by itself, where a field's default is something else.
    _usual: ClassVar[dict[str, Any]] = {}
    # The types of the fields: transformers' parser changes those of dataclasses.
    _types: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # transformers' parser passes maps as JSON, and numbers that may be a word as texts.
            if not isinstance(value, str):
                continue
            if "dict[" in type(self)._types[field.name] and value.lstrip().startswith("{"):
                setattr(self, field.name, json.loads(value))
            elif "float" in type(self)._types[field.name]:
                with contextlib.suppress(ValueError):
                    setattr(self, field.name, float(value))

    def __getattr__(self, name: str) -> Any:
        # Called only where there is no attribute of the name.
        field = type(self)._names.get(name)
        if name.startswith("_"):
            # Asked for by copy, pickle and others.
            raise AttributeError(name)
        if field is None:
            raise AttributeError(f"{type(self).__name__} has no setting `{name}`{nearest(name, known_names(type(self)))}")
        return getattr(self, field)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, type(self)._names.get(name, name), value)

    def to_dict(self) -> dict[str, Any]:
        """The settings by name, with tokens hidden, as transformers' `TrainingArguments.to_dict`."""
        hidden = {name: f"<{name.upper()}>" for name in SECRETS if getattr(self, name, None)}
        return {**dataclasses.asdict(self), **hidden}

    def to_json_string(self) -> str:
        """The settings as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The settings as texts and numbers, for trackers."""
        return {name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in self.to_dict().items()}

    # What scripts ask transformers' arguments for. The program has the ranks; this process is one.

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return int(os.environ.get("RANK", "0"))

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def should_save(self) -> bool:
        """Whether this process is the one that saves."""
        return self.process_index == 0


# Settings that are never written to a file nor to a command line; each has a variable of the environment.
SECRETS = {"hub_token": "HF_TOKEN"}


def known_names(config: type[Config]) -> list[str]:
    return [field.name for field in dataclasses.fields(config)] + list(config._names)


def with_names(config: T) -> T:
    """Lets a configuration be made with the other names of its settings; an unknown name is an error with the nearest one."""
    made = config.__init__
    config._types = {field.name: str(field.type) for field in dataclasses.fields(config)}
    fields = {field.name for field in dataclasses.fields(config)}

    @wraps(made)
    def init(self: Config, *args: Any, **named: Any) -> None:
        given: dict[str, Any] = {}
        for name, value in named.items():
            field = name if name in fields else config._names.get(name)
            if field is None:
                raise TypeError(f"{config.__name__}: unknown setting `{name}`{nearest(name, known_names(config))}" + HINTS.get(name, ""))
            if field in given:
                raise TypeError(f"{config.__name__}: `{name}` and `{field}` are the same setting: give one of them")
            given[field] = value
        made(self, *args, **given)

    setattr(config, "__init__", init)  # noqa: B010 - a type checker sees the names of the fields
    return config


HINTS = {
    name: f"; `{name}` is an argument of the trainer" for name in ("model", "reward_funcs", "train_dataset", "peft_config", "callbacks")
} | {
    name: f"; `{name}` is one of TRL 0.11's PPOConfig: from rlhf.legacy import PPOConfig"
    for name in ("exp_name", "forward_batch_size", "query_dataset", "reward_model", "tracker_project_name", "optimize_cuda_cache", "steps")
}


def settings_of(config: Config) -> dict[str, Any]:
    """The settings for the program's file: those that differ from what it does by itself."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.name in SECRETS or field.name in OF_THE_PACKAGE:
            continue
        value = getattr(config, field.name)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        usual = config._usual.get(field.name, default)
        if value is None and (usual is None or field.name not in NONE_IS_A_VALUE):
            continue
        if value == usual and isinstance(value, bool) == isinstance(usual, bool):
            continue
        settings[field.name] = plain(field.name, value)
    return settings


# Settings that the trainers translate themselves.
OF_THE_PACKAGE = (
    "output_dir",
    "model_init_kwargs",
    "num_processes",
    "sft_model_path",
    "reward_model_path",
    "max_steps",
    "report_to",
    "resume_from_checkpoint",
)


def plain(name: str, value: Any) -> Any:
    """A value as JSON has it: enumerations of transformers by their value, whole numbers as such."""
    value = getattr(value, "value", value) if type(value).__module__.startswith(("transformers", "accelerate")) else value
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, (list, tuple, set)):
        return [plain(name, item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(name, item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{name}: expected a text, a number, a list or a map, found {type(value).__name__}")


def write_settings(settings: dict[str, Any], path: str) -> None:
    """Writes settings to a YAML file: JSON is YAML too."""
    text = "".join(f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings.items())
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
