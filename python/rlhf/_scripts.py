"""What TRL's own scripts import beside trainers: the arguments of scripts, their parser, and settings of adapters and quantization."""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from rlhf._errors import Unsupported

# A template of roles and texts: "User: ...", a blank line, "Assistant:".
SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@dataclass
class ScriptArguments:
    """The dataset of a script.

    Args:
        dataset_name (`str`, *optional*): path or name of the dataset.
        dataset_config (`str`, *optional*): its configuration.
        dataset_train_split (`str`, *optional*, defaults to `"train"`): the split to train on.
        dataset_test_split (`str`, *optional*, defaults to `"test"`): the split to evaluate on.
        dataset_streaming (`bool`, *optional*, defaults to `False`): whether `datasets` streams it.
        ignore_bias_buffers (`bool`, *optional*, defaults to `False`): of torch's DDP; it has no effect here.
    """

    dataset_name: str | None = field(default=None, metadata={"help": "Path or name of the dataset"})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset"})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on"})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on"})
    dataset_streaming: bool = field(default=False, metadata={"help": "Whether `datasets` streams it"})
    ignore_bias_buffers: bool = field(default=False, metadata={"help": "Of torch's DDP; it has no effect here"})


@dataclass
class ModelConfig:
    """The model of a script, its adapters and its quantization.

    Args:
        model_name_or_path (`str`, *optional*): path or name of the model.
        model_revision (`str`, *optional*, defaults to `"main"`): branch, tag or commit on the hub.
        dtype (`str`, *optional*, defaults to `"float32"`): dtype in which transformers loads it.
        attn_implementation (`str`, *optional*): of transformers; the program has its own attention.
        trust_remote_code (`bool`, *optional*, defaults to `False`): must be false; code that comes with a model is never run.
        use_peft (`bool`, *optional*, defaults to `False`): whether to train adapters; the other `lora_` settings are those of PEFT.
        load_in_8bit (`bool`, *optional*, defaults to `False`): whether frozen weights have 8 bits.
        load_in_4bit (`bool`, *optional*, defaults to `False`): whether frozen weights have 4 bits.
    """

    model_name_or_path: str | None = field(default=None, metadata={"help": "Path or name of the model"})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the hub"})
    dtype: str | None = field(default="float32", metadata={"help": "Dtype in which transformers loads the model"})
    attn_implementation: str | None = field(default=None, metadata={"help": "Of transformers; the program has its own attention"})
    use_peft: bool = field(default=False, metadata={"help": "Whether to train adapters"})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters"})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapters, before the division by their rank"})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout before the adapters"})
    lora_target_modules: list[str] | None = field(default=None, metadata={"help": "Names of the adapted layers"})
    lora_target_parameters: list[str] | None = field(default=None, metadata={"help": "Of PEFT; adapters are for linear layers"})
    lora_modules_to_save: list[str] | None = field(default=None, metadata={"help": "Modules that are trained in full"})
    lora_task_type: str = field(default="CAUSAL_LM", metadata={"help": "Of PEFT; the trainer decides the task"})
    use_rslora: bool = field(default=False, metadata={"help": "Whether the scale is divided by the root of the rank"})
    use_dora: bool = field(default=False, metadata={"help": "Whether the norms of weights are trained apart"})
    load_in_8bit: bool = field(default=False, metadata={"help": "Whether frozen weights have 8 bits"})
    load_in_4bit: bool = field(default=False, metadata={"help": "Whether frozen weights have 4 bits"})
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"help": "Data type of 4 bits: nf4 or fp4"})
    use_bnb_nested_quant: bool = field(default=False, metadata={"help": "Whether the scales of 4-bit weights are quantized too"})
    bnb_4bit_quant_storage: str | None = field(default=None, metadata={"help": "Of bitsandbytes; 4-bit weights are stored as bytes"})
    # Newer versions of TRL have it among a trainer's settings, whose parser may not have it twice.
    trust_remote_code: InitVar[bool] = False

    def __post_init__(self, trust_remote_code: bool) -> None:
        if trust_remote_code:
            raise Unsupported("trust_remote_code: expected False: code that comes with a model is never run")
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit exclude each other: set one of them")
        # A parser of command lines gives one name as a list.
        if (
            isinstance(self.lora_target_modules, list)
            and len(self.lora_target_modules) == 1
            and self.lora_target_modules[0] == "all-linear"
        ):
            self.lora_target_modules = "all-linear"  # type: ignore[assignment]


@dataclass
class DatasetMixtureConfig:
    """Several datasets of a script.

    Args:
        datasets (`list[dict]`, *optional*): a map for each: `path`, and what `datasets.load_dataset` takes (`name`, `data_dir`,
            `data_files`, `split`); `columns` are those that are kept.
        streaming (`bool`, *optional*, defaults to `False`): whether `datasets` streams them.
        test_split_size (`float`, *optional*): rows to hold out, or their share.
    """

    datasets: list[Any] = field(default_factory=list, metadata={"help": "Datasets, a map for each"})
    streaming: bool = field(default=False, metadata={"help": "Whether `datasets` streams them"})
    test_split_size: float | None = field(default=None, metadata={"help": "Rows to hold out, or their share"})


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """The rows of several datasets, as a `DatasetDict` of `datasets`."""
    import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]

    parts = []
    for named in mixture_config.datasets:
        named = dict(named if isinstance(named, dict) else dataclasses.asdict(named))
        columns = named.pop("columns", None)
        if named.pop("fraction", None) is not None:
            raise Unsupported("datasets: fraction: expected none; dataset_weights in args sets the shares of several paths")
        part = datasets.load_dataset(**{"split": "train", **named}, streaming=mixture_config.streaming)
        parts.append(part.select_columns(columns) if columns else part)
    if not parts:
        raise ValueError("datasets: expected at least one, found none")
    whole = datasets.concatenate_datasets(parts)
    if mixture_config.test_split_size is not None:
        return whole.train_test_split(test_size=mixture_config.test_split_size)
    return datasets.DatasetDict({"train": whole})


@dataclass
class LoraConfig:
    """The adapters to train, for scripts without PEFT; PEFT's own class of this name is accepted wherever this one is."""

    r: int = 8
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    target_modules: "Sequence[str] | str | None" = None
    modules_to_save: "Sequence[str] | None" = None
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    task_type: str | None = None


@dataclass
class BitsAndBytesConfig:
    """The quantization of frozen weights, for scripts without transformers; its class of this name is accepted wherever this one is."""

    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_compute_dtype: Any = None
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: Any = None


def get_peft_config(model_args: ModelConfig) -> Any:
    """The adapters that a script's arguments ask for: a `LoraConfig` of PEFT where it is installed; None without `use_peft`."""
    if not model_args.use_peft:
        return None
    named = {
        "r": model_args.lora_r,
        "lora_alpha": model_args.lora_alpha,
        "lora_dropout": model_args.lora_dropout,
        "target_modules": model_args.lora_target_modules,
        "modules_to_save": model_args.lora_modules_to_save,
        "bias": "none",
        "use_rslora": model_args.use_rslora,
        "use_dora": model_args.use_dora,
        "task_type": model_args.lora_task_type,
    }
    if model_args.lora_target_parameters:
        raise Unsupported("lora_target_parameters: adapters are for linear layers only: set lora_target_modules")
    try:
        from peft import LoraConfig as OfPeft  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return LoraConfig(**named)  # type: ignore[arg-type]
    return OfPeft(**named)


def get_quantization_config(model_args: ModelConfig) -> Any:
    """The quantization that a script's arguments ask for, or None. It is this package's class: transformers must not quantize the model
    that it loads, as the program does so."""
    if model_args.load_in_4bit:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=model_args.dtype,
            bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        )
    return BitsAndBytesConfig(load_in_8bit=True) if model_args.load_in_8bit else None


def get_kbit_device_map() -> None:
    """None: the program has the devices."""


def init_zero_verbose() -> None:
    """Does nothing: DeepSpeed takes no part."""


class TrlParser:
    """Parses a command line, and a YAML file of `--config`, into dataclasses; transformers is not needed.

    Args:
        dataclass_types: a dataclass or several.
    """

    def __init__(self, dataclass_types: Any = None, **named: Any) -> None:
        import argparse

        types = dataclass_types if isinstance(dataclass_types, Iterable) else [dataclass_types]
        self.dataclass_types: list[Any] = [kind for kind in types if kind is not None]
        self.parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False, **named)
        self.parser.add_argument("--config", metavar="FILE", help="YAML file with defaults of the arguments")
        self._of: dict[str, Any] = {}
        for kind in self.dataclass_types:
            for part in dataclasses.fields(kind):
                if not part.init:
                    continue
                if part.name in self._of:
                    raise ValueError(
                        f"{kind.__name__} and {self._of[part.name].__name__} both have `{part.name}`: expected different names"
                    )
                self._of[part.name] = kind
                self._add(kind, part)

    def _add(self, kind: Any, part: Any) -> None:
        from rlhf._words import reader

        names = [part.name, *(name for name, own in getattr(kind, "_names", {}).items() if own == part.name)]
        flags = [f"--{name}" for name in names] + [f"--{name.replace('_', '-')}" for name in names if "_" in name]
        arguments = reader(kind, part)
        help = part.metadata.get("help") or " "
        self.parser.add_argument(*flags, dest=part.name, default=None, help=help, **arguments)

    def parse_args_and_config(
        self,
        args: "Sequence[str] | None" = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """The dataclasses in their order; flags win over the file, and the file over defaults. The file may have `env`, a map of variables
        of the environment."""
        found, rest = self.parser.parse_known_args(args)
        given = {name: value for name, value in vars(found).items() if value is not None and name != "config"}
        unknown: dict[str, Any] = {}
        if found.config:
            of_file = read_yaml(found.config)
            for name, value in (of_file.pop("env", None) or {}).items():
                os.environ[str(name)] = str(value)
            names = {alias: own for kind in self.dataclass_types for alias, own in getattr(kind, "_names", {}).items()}
            for key, value in of_file.items():
                name = names.get(key, key)
                if name in self._of:
                    given.setdefault(name, value)
                else:
                    unknown[key] = value
        if fail_with_unknown_args and not return_remaining_strings and (rest or unknown):
            from rlhf._errors import nearest

            name = next(iter(unknown), "") or rest[0].lstrip("-").partition("=")[0]
            self.parser.error(f"unknown argument `{name}`{nearest(name.replace('-', '_'), list(self._of))}")
        made = tuple(kind(**{name: value for name, value in given.items() if self._of[name] is kind}) for kind in self.dataclass_types)
        if not return_remaining_strings:
            return made
        return (*made, rest + [word for key, value in unknown.items() for word in (f"--{key}", str(value))])

    def parse_args_into_dataclasses(self, args: "Sequence[str] | None" = None, **named: Any) -> tuple[Any, ...]:
        """The same, by the name that transformers' parser has for it."""
        return self.parse_args_and_config(args, return_remaining_strings=bool(named.get("return_remaining_strings")))

    def set_defaults_with_config(self, **named: Any) -> list[str]:
        """Sets defaults of arguments; returns those that are unknown, as words of a command line."""
        known = {name: value for name, value in named.items() if name in self._of}
        self.parser.set_defaults(**known)
        return [word for name, value in named.items() if name not in known for word in (f"--{name}", str(value))]


def read_yaml(path: str) -> dict[str, Any]:
    """The map of a YAML file; JSON can be read without PyYAML."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        try:
            found = json.loads(text)
        except ValueError:
            raise Unsupported(f"{path}: YAML is read by the package PyYAML, which is not installed; write JSON, or install it") from None
    else:
        found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a map of settings, found {type(found).__name__}")
    return found
