"""Models and tokenizers as objects: saved once into the folder of a run's inputs, and given their trained weights after it."""

import glob
import os
import shutil
import warnings
from typing import Any

from rlhf._data import path_or_name
from rlhf._errors import Unsupported


def is_text(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def place_model(value: Any, folder: str, what: str, keep: bool) -> str:
    """The path or name of a model; an object is saved into `folder`, unless it is there already and to be kept."""
    if is_text(value):
        return path_or_name(value)
    if not hasattr(value, "save_pretrained"):
        kind = type(value).__name__
        hint = "a function of the completions as a reward runs in this process" if "reward" in what else "save it and pass the folder"
        raise Unsupported(f"{what}: expected a path, a name or a model of transformers or PEFT, found {kind}; {hint}")
    if not (keep and any(os.path.exists(os.path.join(folder, name)) for name in ("config.json", "adapter_config.json"))):
        # What an earlier run has left there may have other shards.
        shutil.rmtree(folder, ignore_errors=True)
        value.save_pretrained(folder)
    return os.path.abspath(folder)


def place_tokenizer(value: Any, folder: str) -> str:
    """The folder of a tokenizer, or its path or name."""
    if is_text(value):
        return path_or_name(value)
    # A processor of several kinds of data has one.
    value = getattr(value, "tokenizer", value)
    if not hasattr(value, "save_pretrained"):
        raise TypeError(f"processing_class: expected a tokenizer of transformers or a path, found {type(value).__name__}")
    value.save_pretrained(folder)
    return os.path.abspath(folder)


def changed_since_loaded(tokenizer: Any) -> list[str]:
    """What decides how texts are encoded and has been changed in a tokenizer object since it was loaded from its name on the hub."""
    if is_text(tokenizer) or not hasattr(tokenizer, "from_pretrained"):
        return []
    try:
        loaded = type(tokenizer).from_pretrained(source_of(tokenizer), local_files_only=True)
    except (OSError, ValueError):
        return []
    names = ("chat_template", "eos_token")
    return [name for name in names if getattr(loaded, name, None) != getattr(tokenizer, name, None)]


def source_of(model: Any) -> str | None:
    """The path or name that a model object was loaded from."""
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "") or getattr(model, "name_or_path", "")
    return str(name) or None


def is_same(policy: Any, reference: Any) -> bool:
    """Whether a reference model has the policy's weights."""
    if is_text(policy) or is_text(reference):
        names = [str(value) if is_text(value) else source_of(value) for value in (policy, reference)]
        return names[0] is not None and (names[0] == names[1] or path_or_name(names[0]) == path_or_name(names[1] or ""))
    if policy is reference:
        return True
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]

        own, other = policy.state_dict(), reference.state_dict()
        return own.keys() == other.keys() and all(torch.equal(own[name].cpu(), other[name].cpu()) for name in own)
    except (ImportError, AttributeError):
        return source_of(policy) == source_of(reference)


def load_back(model: Any, folder: str) -> None:
    """Gives a model object the weights that training has left in `folder`; warns where that is not possible."""
    if model is None or is_text(model):
        return
    name = type(model).__name__
    try:
        problem = load_into(model, folder)
    except Exception as error:
        problem = " ".join(str(error).split())
    if problem:
        warnings.warn(
            f"{name}: the object that was passed does not have the trained weights ({problem}); they are in {folder}", stacklevel=4
        )


def is_fresh(model: Any) -> bool:
    """Whether the adapter of a PEFT model is as it is made: it adds nothing to the base."""
    return all(not bool(tensor.any()) for name, tensor in model.state_dict().items() if "lora_B." in name)


def load_into(model: Any, folder: str) -> str:
    """Does so; returns why not."""
    if not hasattr(model, "load_state_dict"):
        return "it has no load_state_dict"
    from safetensors.torch import load_file  # type: ignore[import-not-found,unused-ignore]

    adapter = os.path.join(folder, "adapter_model.safetensors")
    if os.path.exists(adapter):
        if not hasattr(model, "peft_config"):
            return "it is the base of the adapter that was trained"
        if not is_fresh(model):
            return "its adapter was merged into its base before a new one was trained"
        from peft import set_peft_model_state_dict  # type: ignore[import-not-found,unused-ignore]

        set_peft_model_state_dict(model, load_file(adapter))
        return ""
    if hasattr(model, "peft_config"):
        return "its adapter was merged"
    weights: dict[str, Any] = {}
    for path in sorted(glob.glob(os.path.join(folder, "model*.safetensors"))):
        weights.update(load_file(path))
    own = model.state_dict()
    if not weights.keys() <= own.keys():
        # Files have other names than modules in some families; transformers knows both.
        weights = type(model).from_pretrained(folder).state_dict()
    problems = model.load_state_dict(weights, strict=False)
    if problems.unexpected_keys:
        return f"no parameter `{problems.unexpected_keys[0]}`"
    # A parameter that is tied to another one is saved once.
    places = {tensor.data_ptr() for name, tensor in own.items() if name in weights}
    missing = [name for name in problems.missing_keys if own[name].data_ptr() not in places]
    return f"`{missing[0]}` is not saved" if missing else ""
