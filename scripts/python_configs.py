#!/usr/bin/env python3
"""Writes the configuration classes of the Python package, by what the program knows about its settings.

    python3 scripts/python_configs.py PROGRAM           # writes python/rlhf/_configs.py
    python3 scripts/python_configs.py PROGRAM --check   # exit code 1 if that file is not what would be written

PROGRAM is the built `rlhf`. Names are TRL's where TRL has the setting, and defaults are those of TRL's class. Standard library only.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "python" / "rlhf" / "_configs.py"

# Class, command, its description.
CLASSES = (
    ("SFTConfig", "sft", "Settings of [`SFTTrainer`]."),
    ("RewardConfig", "reward", "Settings of [`RewardTrainer`]."),
    ("DPOConfig", "dpo", "Settings of [`DPOTrainer`]."),
    ("DistillationConfig", "distill", "Settings of [`DistillationTrainer`]."),
    ("GKDConfig", "gkd", "Settings of [`GKDTrainer`]."),
    ("PPOConfig", "ppo", "Settings of [`PPOTrainer`]."),
    ("GRPOConfig", "grpo", "Settings of [`GRPOTrainer`]."),
    ("RLOOConfig", "rloo", "Settings of [`RLOOTrainer`]."),
)
# Classes with the settings of another command than their name here.
COMMAND_OF = {"gkd": "distill"}
# Bases for what several classes have alike: the file would be three times as long without them.
BASES = (
    ("_Training", ("sft", "reward", "dpo", "distill", "gkd", "ppo", "grpo", "rloo"), "_Config", "What all trainers have."),
    ("_Supervised", ("sft", "reward", "dpo", "distill", "gkd"), "_Training", "What trainers without rewards have."),
    ("_Distillation", ("distill", "gkd"), "_Supervised", "What trainers with a teacher have."),
    ("_Rollouts", ("ppo", "grpo", "rloo"), "_Training", "What trainers on sampled responses have."),
    ("_Groups", ("grpo", "rloo"), "_Rollouts", "What trainers on groups of responses have."),
)
BASE_OF = {"sft": "_Supervised", "reward": "_Supervised", "dpo": "_Supervised", "distill": "_Distillation", "gkd": "_Distillation", "ppo": "_Rollouts", "grpo": "_Groups", "rloo": "_Groups"}

# Names that TRL's classes have for settings whose own name is another one.
RENAMED = {
    "grpo": {
        "response_length": "max_completion_length",
        "kl_coef": "beta",
        "cliprange": "epsilon",
        "cliprange_high": "epsilon_high",
        "dual_clip": "delta",
        "num_ppo_epochs": "num_iterations",
    }
}
RENAMED["rloo"] = RENAMED["grpo"]
RENAMED["gkd"] = {"max_completion_length": "max_new_tokens"}

# Settings that are arguments of trainers, fields of `ModelConfig` and `ScriptArguments`, or the package's
# own; and those of TRL's step(), which the package does not have.
ELSEWHERE = set(
    """
    accelerator_kwargs attn_implementation backward_batch_size bnb_4bit_quant_storage bnb_4bit_quant_type compare_steps
    config_name dataset_config dataset_name dataset_streaming dataset_test_split dataset_train_split datasets device_map dtype
    environment_factory eval_dataset_name eval_only exp_name forward_batch_size global_backward_batch_size global_batch_size ignore_bias_buffers
    is_encoder_decoder is_peft_model load_in_4bit load_in_8bit lora_alpha lora_dropout lora_modules_to_save lora_r
    ref_model_name_or_path lora_target_modules lora_target_parameters lora_task_type model_name model_name_or_path model_revision optimize_cuda_cache
    optimize_device_cache project_kwargs push_to_hub_if_best_kwargs query_dataset resume_from_checkpoint reward reward_command
    reward_funcs reward_model reward_model_name_or_path reward_model_path reward_url sft_model_path steps streaming task_name test_split_size tokenizer_name
    tools torch_dtype total_ppo_epochs use_bnb_nested_quant use_dora use_peft use_rslora value_model_path
    """.split()
)

# TRL's defaults for settings of the program, where they differ. A pair: the class's default, and the one that is not passed on, as it
# asks for what the program does anyway.
SAME, DIFFERENT = object(), object()
DEFAULTS = {
    "per_device_train_batch_size": (8, SAME),
    "max_steps": (-1, SAME),
    "save_steps": (500, DIFFERENT),
    "disable_tqdm": (None, SAME),
    "report_to": ("none", SAME),
    "reward_weights": (None, SAME),
    "output_dir": (None, SAME),
    "eval_steps": (None, SAME),
    "min_p": (None, SAME),
}
DEFAULTS_OF = {
    "sft": {"max_grad_norm": (1.0, DIFFERENT), "completion_only_loss": (None, SAME)},
    "reward": {"max_grad_norm": (1.0, DIFFERENT)},
    "dpo": {"loss_type": (["sigmoid"], SAME)},
    # The defaults of TRL's SFTConfig and GKDConfig; its temperature is that of sampling alone.
    "gkd": {
        "learning_rate": (2e-5, DIFFERENT),
        "lmbda": (0.5, DIFFERENT),
        "beta": (0.5, DIFFERENT),
        "temperature": (0.9, DIFFERENT),
        "loss_temperature": (1.0, DIFFERENT),
        "max_completion_length": (128, DIFFERENT),
        "disable_dropout": (True, DIFFERENT),
    },
    "ppo": {"sft_model_path": ("EleutherAI/pythia-160m", SAME), "reward_model_path": ("EleutherAI/pythia-160m", SAME)},
}
KEPT = {"ppo": {"sft_model_path", "reward_model_path"}}

# Types that transformers' parser of command lines can read, where the program's type says less.
TYPES = {
    "save_steps": "float | str | None",
    "eval_steps": "float | str | None",
    "report_to": "None | str | list[str]",
    "reward_weights": "list[float] | None",
    "tracker_kwargs": "dict[str, Any] | str | None",
    "chat_template_kwargs": "dict[str, Any] | str | None",
    "max_steps": "int",
    "per_device_train_batch_size": "int",
    "warmup_steps": "float",
    "scale_rewards": "str",
}

# Names of TRL and transformers that are no settings of the program, with their types and defaults. Those that are not here may be None,
# and are None by default.
OF_OTHERS = {
    "accelerator_config": ("dict[str, Any] | str | None", None),
    "activation_checkpointing_kwargs": ("dict[str, Any] | str | None", None),
    "activation_offloading": ("bool", False),
    "adafactor": ("bool", False),
    "auto_find_batch_size": ("bool", False),
    "average_tokens_across_devices": ("bool", True),
    "batch_eval_metrics": ("bool", False),
    "bf16_full_eval": ("bool", False),
    "cast_lm_head_to_fp32": ("bool", False),
    "data_seed": ("int | None", None),
    "dataloader_drop_last": ("bool", False),
    "dataloader_in_order": ("bool", True),
    "dataloader_num_workers": ("int", 0),
    "dataloader_persistent_workers": ("bool", False),
    "dataloader_pin_memory": ("bool", True),
    "dataloader_prefetch_factor": ("int | None", None),
    "dataset_batch_size": ("int | None", None),
    "dataset_kwargs": ("dict[str, Any] | str | None", None),
    "dataset_num_proc": ("int | None", None),
    "ddp_broadcast_buffers": ("bool | None", None),
    "ddp_bucket_cap_mb": ("int | None", None),
    "ddp_find_unused_parameters": ("bool | None", None),
    "ddp_static_graph": ("bool | None", None),
    "debug": ("None | str | list[str]", ""),
    "deepspeed": ("dict[str, Any] | str | None", None),
    "disable_dropout": ("bool", False),
    "do_eval": ("bool", False),
    "do_predict": ("bool", False),
    "do_train": ("bool", False),
    "enable_jit_checkpoint": ("bool", False),
    "eval_accumulation_steps": ("int | None", None),
    "eval_delay": ("float", 0),
    "eval_do_concat_batches": ("bool", True),
    "eval_on_start": ("bool", False),
    "eval_packing": ("bool | None", None),
    "eval_strategy": ("str", "no"),
    "eval_use_gather_object": ("bool", False),
    "fp16_full_eval": ("bool", False),
    "fsdp": ("None | str | list[str]", ""),
    "fsdp_config": ("dict[str, Any] | str | None", None),
    "full_determinism": ("bool", False),
    "generation_kwargs": ("dict[str, Any] | str | None", None),
    "gradient_checkpointing_kwargs": ("dict[str, Any] | str | None", None),
    "group_by_length": ("bool", False),
    "ignore_data_skip": ("bool", False),
    "include_for_metrics": ("list[str] | None", None),
    "include_inputs_for_metrics": ("bool", False),
    "include_num_input_tokens_seen": ("str", "no"),
    "include_tokens_per_second": ("bool", False),
    "label_names": ("list[str] | None", None),
    "label_smoothing_factor": ("float", 0.0),
    "length_column_name": ("str", "length"),
    "liger_kernel_config": ("dict[str, Any] | str | None", None),
    "load_best_model_at_end": ("bool", False),
    "local_rank": ("int", -1),
    "log_completions": ("bool", False),
    "log_level": ("str", "passive"),
    "log_level_replica": ("str", "warning"),
    "log_multimodal": ("bool", True),
    "log_on_each_node": ("bool", True),
    "log_unique_prompts": ("bool", False),
    "logging_first_step": ("bool", False),
    "logging_nan_inf_filter": ("bool", True),
    "logging_steps": ("float", 10),
    "logging_strategy": ("str", "steps"),
    "low_cpu_mem_usage": ("bool | None", None),
    "lr_scheduler_kwargs": ("dict[str, Any] | str | None", None),
    "model_init_kwargs": ("dict[str, Any] | str | None", None),
    "neftune_noise_alpha": ("float | None", None),
    "num_completions_to_print": ("int | None", None),
    "num_generations_eval": ("int | None", None),
    "optim_target_modules": ("None | str | list[str]", None),
    "packing_strategy": ("str", "bfd"),
    "pad_to_multiple_of": ("int | None", None),
    "padding_free": ("bool", False),
    "past_index": ("int", -1),
    "per_device_eval_batch_size": ("int", 8),
    "prediction_loss_only": ("bool", False),
    "remove_unused_columns": ("bool | None", None),
    "restore_callback_states_from_checkpoint": ("bool", False),
    "router_aux_loss_coef": ("float | None", None),
    "save_on_each_node": ("bool", False),
    "save_only_model": ("bool", False),
    "save_safetensors": ("bool | None", True),
    "save_strategy": ("str", "steps"),
    "shuffle_dataset": ("bool | None", None),
    "skip_memory_metrics": ("bool", True),
    "teacher_model_init_kwargs": ("dict[str, Any] | str | None", None),
    "tf32": ("bool | None", None),
    "token_level_kl": ("bool", False),
    "torch_compile": ("bool", False),
    "torch_empty_cache_steps": ("int | None", None),
    "torchdynamo": ("str | None", None),
    "train_sampling_strategy": ("str", "random"),
    "transformers_continuous_batching_config": ("dict[str, Any] | str | None", None),
    "truncation_mode": ("str", "keep_start"),
    "trust_remote_code": ("bool", False),
    "use_cache": ("bool", False),
    "use_cpu": ("bool", False),
    "use_liger_kernel": ("bool", False),
    "use_liger_loss": ("bool | None", None),
    "use_mps_device": ("bool", False),
    "use_transformers_continuous_batching": ("bool", False),
    "use_transformers_paged": ("bool", False),
    "use_vllm": ("bool", False),
    "vllm_enable_sleep_mode": ("bool", False),
    "vllm_gpu_memory_utilization": ("float", 0.3),
    "vllm_group_port": ("int", 51216),
    "vllm_importance_sampling_cap": ("float | None", None),
    "vllm_importance_sampling_clip_max": ("float | None", 3.0),
    "vllm_importance_sampling_clip_min": ("float | None", None),
    "vllm_importance_sampling_correction": ("bool", True),
    "vllm_importance_sampling_mode": ("str", "sequence_mask"),
    "vllm_max_model_len": ("int | None", None),
    "vllm_max_model_length": ("int | None", None),
    "vllm_mode": ("str", "colocate"),
    "vllm_model_impl": ("str", "vllm"),
    "vllm_server_host": ("str", "0.0.0.0"),
    "vllm_server_port": ("int", 8000),
    "vllm_server_timeout": ("float", 240.0),
    "vllm_tensor_parallel_size": ("int", 1),
    "wandb_log_unique_prompts": ("bool | None", None),
    "world_size": ("int | None", None),
}
OF_OTHERS_OF = {"sft": {"loss_type": ("str", "nll")}}

PYTHON = {"integer": "int", "number": "float", "boolean": "bool", "path": "str", "text": "str", "json": "dict[str, Any]"}

HEADER = '''\
"""The configuration classes, written by scripts/python_configs.py from what the program knows about its settings: do not edit."""

# ruff: noqa: E501

from dataclasses import dataclass, field
from typing import Any

from rlhf._config import Config as _Config
from rlhf._config import with_names as _with_names
'''


class Field:
    """A field of a class."""

    def __init__(self, name, annotation, default, help, passed, aliases=()):
        self.name, self.annotation, self.default, self.help = name, annotation, default, help
        # The value that need not be passed on.
        self.passed = passed
        self.aliases = tuple(sorted(set(aliases) - {name}))

    def key(self):
        return (self.name, self.annotation, repr(self.default), self.help, repr(self.passed), self.aliases)

    def differs(self):
        """Whether the class's default is to be passed on."""
        return self.passed != self.default or type(self.passed) is not type(self.default)

    def lines(self):
        flags = [f"--{alias}" for alias in self.aliases]
        # transformers' parser takes these.
        more = f', "aliases": {json.dumps(flags)}' if flags else ""
        # argparse formats help texts.
        help = json.dumps(self.help.replace("%", "%%"), ensure_ascii=False)
        # Each configuration has a list of its own.
        default = f"default_factory=lambda: {self.default!r}" if isinstance(self.default, list) else f"default={self.default!r}"
        return f'    {self.name}: {self.annotation} = field({default}, metadata={{"help": {help}{more}}})\n'

    def described(self):
        default = f", defaults to `{self.default!r}`" if self.default is not None else ""
        first = f"{self.name} (`{self.annotation.removesuffix(' | None')}`, *optional*{default}):"
        return first + "\n" + textwrap.indent(textwrap.fill(self.help.replace("\\", "\\\\") + ".", 110, break_on_hyphens=False), "    ")


def of_setting(command, setting):
    """The field of a setting of the program."""
    own = setting["name"]
    name = RENAMED.get(command, {}).get(own, own)
    table = {**DEFAULTS, **DEFAULTS_OF.get(command, {})}
    default = None if setting["list"] else setting["default"]
    passed = default
    if own in table:
        default, how = table[own]
        if how is SAME:
            passed = default
    kind = PYTHON[setting["type"]]
    annotation = f"list[{kind}]" if setting["list"] else kind
    if isinstance(default, int) and not isinstance(default, bool) and kind == "float":
        default = passed = float(default)
    if default is None or setting["optional"]:
        annotation += " | None"
    if setting["optional"] and passed is not None and own not in table:
        # None is a value of its own.
        pass
    annotation = TYPES.get(own, annotation)
    help = " ".join(setting["help"].split()).removesuffix(".")
    if setting["choices"]:
        help += ": " + ", ".join(choice["name"] for choice in setting["choices"])
    return Field(name, annotation, default, help, passed, [own, *setting["aliases"]])


def of_other(command, setting):
    """The field of a name that the program accepts for TRL's sake."""
    name = setting["name"]
    annotation, default = {**OF_OTHERS, **OF_OTHERS_OF.get(command, {})}.get(name, ("str | None", None))
    if setting["list"] and name not in OF_OTHERS:
        annotation = "list[str] | None"
    why = setting["help"]
    if not setting["has_effect"]:
        help = f"Of TRL or transformers; it has no effect here: {why}"
    elif setting["values"]:
        values = " or ".join(value for value in setting["values"] if value)
        help = f"Of TRL or transformers; expected {values}: {why}"
    else:
        help = "Of TRL or transformers"
    return Field(name, annotation, default, help, default, setting["aliases"])


def fields(command, described):
    """The fields of a class: `output_dir` is first, as in transformers."""
    kept = KEPT.get(command, set())
    found = {}
    for setting in described["settings"]:
        if (setting["name"] in ELSEWHERE and setting["name"] not in kept) or (setting["hidden"] and setting["name"] != "offload_optimizer"):
            continue
        field = of_setting(command, setting)
        found[field.name] = field
    for setting in described["of_other_systems"]:
        if setting["name"] not in ELSEWHERE and setting["name"] not in found:
            found[setting["name"]] = of_other(command, setting)
    # These are of transformers, and the program has settings of its own for them.
    if "model_init_kwargs" not in found:
        found["model_init_kwargs"] = Field(
            "model_init_kwargs", *OF_OTHERS["model_init_kwargs"], "Of TRL: `revision`, `dtype` and a quantization", None
        )
    help = (
        "Number of ranks on this machine, which the program starts [default: those of the launcher that has started this process, else one]"
    )
    found["num_processes"] = Field("num_processes", "int | None", None, help, None)
    help = "For scripts that pass it on to `train()`: `True`, or the folder of a checkpoint"
    found["resume_from_checkpoint"] = Field("resume_from_checkpoint", "str | None", None, help, None)
    taken = set(found)
    for field in found.values():
        field.aliases = tuple(name for name in field.aliases if name not in taken and name not in ELSEWHERE)
    first = found.pop("output_dir")
    return {"output_dir": first, **found}


def written(schema):
    """The text of the file."""
    commands = {command["name"]: command for command in schema["commands"]}
    of = {command: fields(command, commands[COMMAND_OF.get(command, command)]) for _, command, _ in CLASSES}
    parts, done = [HEADER], {command: set() for command in of}
    for name, members, base, about in BASES:
        first = of[members[0]]
        alike = [
            field
            for key, field in first.items()
            if all(key in of[command] and of[command][key].key() == field.key() and key not in done[command] for command in members)
        ]
        parts.append(klass(name, base, about, alike, decorated=False))
        for command in members:
            done[command].update(field.name for field in alike)
    for name, command, about in CLASSES:
        own = [field for key, field in of[command].items() if key not in done[command]]
        parts.append(klass(name, BASE_OF[command], about, own, decorated=True, command=command, listed=list(of[command].values())))
    return "\n\n".join(parts)


def klass(name, base, about, own, decorated, command=None, listed=None):
    """The text of a class; its docstring describes `listed`."""
    lines = []
    if decorated:
        lines.append("@_with_names\n")
    lines.append(f"@dataclass\nclass {name}({base}):\n")
    if listed:
        described = "\n".join(field.described() for field in listed)
        text = f"{about}\n\nAn unknown name is a `TypeError`; [`Config`] has what all configurations can do.\n\nArgs:\n"
        text += textwrap.indent(described, "    ")
        lines.append('    """' + textwrap.indent(text, "    ").lstrip() + '\n    """\n\n')
        lines.append(f"    _command = {COMMAND_OF.get(command, command)!r}\n")
        aliases = {alias: field.name for field in listed for alias in field.aliases}
        lines.append(f"    _names = {aliases!r}\n")
        usual = {field.name: field.passed for field in listed if field.differs()}
        lines.append(f"    _usual = {usual!r}\n\n")
    else:
        lines.append(f'    """{about}"""\n\n')
    lines += [field.lines() for field in own]
    return "".join(lines)


def main():
    arguments = [word for word in sys.argv[1:] if word != "--check"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    done = subprocess.run([arguments[0], "schema", *(command for _, command, _ in CLASSES if command not in COMMAND_OF)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {arguments[0]} schema: {done.stderr.strip()}")
    text = written(json.loads(done.stdout))
    if "--check" not in sys.argv:
        TARGET.write_text(text)
    elif not TARGET.exists() or TARGET.read_text() != text:
        sys.exit(f"error: {TARGET.relative_to(ROOT)}: expected what scripts/python_configs.py writes, found something else; run it")


if __name__ == "__main__":
    main()
