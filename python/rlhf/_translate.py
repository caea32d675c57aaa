"""Objects of PEFT, transformers and TRL as settings of the program."""

from typing import Any

from rlhf._errors import Unsupported


def reader(config: Any) -> Any:
    """Reads an object, or a map, by name."""
    return config.get if isinstance(config, dict) else lambda name, default=None: getattr(config, name, default)


def check_lora(peft_config: Any) -> None:
    """Refuses configurations of PEFT that are not of LoRA, or ask of it what the program does not do."""
    get = reader(peft_config)
    kind = str(getattr(get("peft_type"), "value", get("peft_type")) or "LORA")
    if kind != "LORA":
        raise Unsupported(f"peft_config: expected a LoraConfig, found {kind}")
    for name, fine in (("bias", "none"), ("init_lora_weights", True)):
        if get(name, fine) not in (fine, None):
            raise Unsupported(f"peft_config: {name} = {get(name)}: expected {fine}")
    targets = get("target_modules")
    if isinstance(targets, str) and not targets.replace("-", "").replace("_", "").isalnum():
        raise Unsupported(f"peft_config: target_modules = {targets}: expected `all-linear` or a list of names, found a regular expression")


def of_peft(peft_config: Any) -> dict[str, Any]:
    """The settings of a `LoraConfig` of PEFT, or of this package."""
    if peft_config is None:
        return {}
    check_lora(peft_config)
    get = reader(peft_config)
    for name in (
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "target_parameters",
        "exclude_modules",
        "trainable_token_indices",
    ):
        if get(name):
            raise Unsupported(f"peft_config: {name}: expected none; the program chooses layers by target_modules")
    targets = get("target_modules")
    names = [targets] if isinstance(targets, str) else sorted(targets or ())
    saved = sorted(get("modules_to_save") or ())
    settings = {"use_peft": True, "lora_r": get("r", 8), "lora_alpha": get("lora_alpha", 8), "lora_dropout": get("lora_dropout", 0.0)}
    optional = {
        "lora_target_modules": names,
        "lora_modules_to_save": saved,
        "use_rslora": bool(get("use_rslora", False)),
        "use_dora": bool(get("use_dora", False)),
    }
    return {**settings, **{name: value for name, value in optional.items() if value}}


def of_quantization(config: Any, name: str = "quantization_config") -> dict[str, Any]:
    """The settings of a `BitsAndBytesConfig` of transformers, or of this package; `name` is its own in errors."""
    if config is None:
        return {}
    get = reader(config)
    if get("load_in_4bit"):
        settings: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": get("bnb_4bit_quant_type", "fp4")}
        if get("bnb_4bit_use_double_quant"):
            settings["use_bnb_nested_quant"] = True
        return settings
    if get("load_in_8bit"):
        return {"load_in_8bit": True}
    raise Unsupported(f"{name}: expected load_in_4bit or load_in_8bit, found {type(config).__name__} without them")


# Arguments of `from_pretrained` that change no number here.
WITHOUT_EFFECT = ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage", "use_kernels", "cache_dir", "torchscript")


def of_model_init(arguments: Any, argument: str = "model_init_kwargs") -> dict[str, Any]:
    """The settings of `model_init_kwargs`; `argument` is its name in errors."""
    settings: dict[str, Any] = {}
    for name, value in (arguments or {}).items():
        if value is None or name in WITHOUT_EFFECT or (name == "trust_remote_code" and not value):
            continue
        if name == "revision":
            settings["model_revision"] = value
        elif name in ("dtype", "torch_dtype"):
            settings["dtype"] = str(value).removeprefix("torch.")
        elif name == "quantization_config":
            settings.update(of_quantization(value, f"{argument}: {name}"))
        elif name in ("load_in_4bit", "load_in_8bit"):
            settings[name] = value
        else:
            hint = "code that comes with a model is never run" if name == "trust_remote_code" else "load the model and pass the object"
            raise Unsupported(f"{argument}: {name} = {value}: expected revision, dtype or quantization_config; {hint}")
    return settings


# Settings of weights in 4 or 8 bits.
QUANTIZATION = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")


def of_teacher_init(arguments: Any) -> dict[str, Any]:
    """The settings of `teacher_model_init_kwargs`."""
    settings = of_model_init(arguments, "teacher_model_init_kwargs")
    if settings.get("load_in_4bit"):
        # What is not said is not that of the student.
        settings = {"bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False, **settings}
    of_teacher = {"model_revision": "teacher_model_revision", **{name: f"teacher_{name}" for name in ("dtype", *QUANTIZATION)}}
    return {of_teacher.get(name, name): value for name, value in settings.items()}


def teacher_beside(settings: dict[str, Any], student: dict[str, Any]) -> dict[str, Any]:
    """Settings that keep a teacher without quantization arguments unquantized where the student is quantized.

    Args:
        settings: those of a run, with what the arguments of student and teacher say.
        student: the settings of the student's arguments, such as `quantization_config`.
    """
    if not any(student.get(name) for name in ("load_in_4bit", "load_in_8bit")):
        return {}
    if not settings.get("use_peft"):
        raise Unsupported("quantization_config: a student in 4 or 8 bits trains adapters: expected a peft_config")
    own = ("teacher_load_in_4bit", "teacher_load_in_8bit")
    return {} if any(settings.get(name) is not None for name in own) else {own[0]: False}


def of_report_to(report_to: Any) -> dict[str, Any]:
    """The trackers of a run."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [name for name in names if name not in ("none", "None")]
    return {"report_to": names} if names else {}


def check_optimizers(optimizers: Any) -> None:
    if optimizers is not None and any(part is not None for part in optimizers):
        raise Unsupported("optimizers: the program has the optimizer: set optim, learning_rate, lr_scheduler_type and weight_decay in args")


# Arguments that cannot be honoured, with what to use instead.
REFUSED = {
    "compute_loss_func": "the program computes the loss: loss_type and its settings in args choose it",
    "compute_metrics": "the metrics of an evaluation are in state.log_history; a callback's on_evaluate gets them",
    "preprocess_logits_for_metrics": "logits stay in the program; the metrics of an evaluation are in state.log_history",
    "optimizer_cls_and_kwargs": "the program has the optimizer: set optim, learning_rate and lr_scheduler_type in args",
    "model_init": "pass the model, or its path",
    "rollout_func": "the program samples the responses: temperature, top_p and top_k in args set how; tools and environment_factory add turns",
}


def refuse(named: dict[str, Any]) -> None:
    """Refuses arguments that are set and cannot be honoured."""
    for name, value in named.items():
        if value is not None and value != []:
            raise Unsupported(f"{name}: {REFUSED[name]}")


# Methods of transformers' trainer whose overriding would be without effect, with what to use instead.
OVERRIDDEN = {
    "compute_loss": "the program computes the loss: loss_type and its settings in args choose it; a score of your own is a reward function",
    "training_step": "the program trains; a callback's on_step_end runs after each update",
    "prediction_step": "the program evaluates; a callback's on_evaluate gets the metrics",
    "create_optimizer": "set optim and learning_rate in args",
    "create_scheduler": "set lr_scheduler_type and warmup_steps in args",
    "create_optimizer_and_scheduler": "set optim and lr_scheduler_type in args",
    "get_train_dataloader": "pass the rows as train_dataset",
    "get_eval_dataloader": "pass the rows as eval_dataset",
    "_generate_and_score_completions": "a score of your own is a reward function",
    "_prepare_inputs": "pass prepared rows as train_dataset",
    "_get_train_sampler": "pass the rows as train_dataset; seed sets their order",
    "log": "a callback's on_log gets the metrics",
}


def check_overridden(own: type, base: type) -> None:
    """Refuses a subclass that overrides what the program does."""
    for kind in own.__mro__:
        if kind is base:
            return
        for name, hint in OVERRIDDEN.items():
            if name in vars(kind):
                raise Unsupported(f"{kind.__name__}.{name}: it would not be called: {hint}")


# Collators that pad or mask as the program does without them.
COLLATORS = (
    "DataCollatorWithPadding",
    "DefaultDataCollator",
    "DataCollatorForLanguageModeling",
    "DataCollatorForPreference",
    "RewardDataCollatorWithPadding",
)


def check_collator(collator: Any) -> None:
    name = getattr(collator, "__name__", None) or type(collator).__name__
    if collator is None or name in (*COLLATORS, "default_data_collator"):
        return
    hint = "completion_only_loss or assistant_only_loss in args set what is trained on" if "Completion" in name else "pass prepared rows"
    raise Unsupported(f"data_collator: {name}: nothing is padded or collated in this process; {hint}")
