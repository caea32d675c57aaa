"""Arguments of transformers' generate as parameters of the program."""

import json
import os
from typing import Any

from rlhf._errors import Unsupported, nearest

# Arguments that change nothing here.
PASSED = ("attention_mask", "bos_token_id", "decoder_start_token_id", "pad_token_id", "remove_padding", "use_cache", "synced_gpus")
# Those that change nothing at these values.
NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "output_scores": False,
    "return_dict_in_generate": False,
}
READ = (
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "min_p",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)
# What None switches off; other arguments that are None are as if they were not given.
OFF: dict[str, Any] = {"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
# transformers' defaults.
USUAL: dict[str, Any] = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "max_length": 20}


class Generation:
    """How responses are drawn: the arguments of a call, else the model's generation_config.json, else transformers' defaults."""

    def __init__(self, given: "dict[str, Any]", model: str) -> None:
        config = of_object(given.pop("generation_config", None))
        check(given, "generate")
        check(config, "generate: generation_config")
        self.values = {**USUAL, **of_model(model), **without_none(config), **without_none(given)}
        values = self.values
        self.has_length = any(values.get(name) is not None for name in ("max_new_tokens",))

    def params(self, queries: "list[list[int]]", is_encoder_decoder: bool) -> "dict[str, Any]":
        """The parameters for these queries; a length that counts the query is that of the longest, as padding counts in transformers."""
        values = self.values
        longest = 1 if is_encoder_decoder else max(map(len, queries), default=0)
        most = values.get("max_new_tokens")
        if most is None:
            most = int(values["max_length"]) - longest
            if most < 1:
                raise ValueError(
                    f"generate: max_length = {values['max_length']}: expected more than the {longest} tokens of the longest query; "
                    "max_new_tokens counts those of the response alone"
                )
        least = values.get("min_new_tokens")
        if least is None:
            least = max(int(values.get("min_length", 0)) - longest, 0)
        found: dict[str, Any] = {"max_new_tokens": int(most), "min_new_tokens": min(int(least), int(most))}
        found["do_sample"] = bool(values["do_sample"])
        if found["do_sample"]:
            found["temperature"] = float(values["temperature"])
            found["top_k"] = max(int(values["top_k"]), 0)
            found["top_p"] = float(values["top_p"])
            found["min_p"] = float(values.get("min_p", 0.0))
        found["repetition_penalty"] = float(values.get("repetition_penalty", 1.0))
        return found

    def stop_token_ids(self) -> "list[int] | None":
        """The tokens that end a response, where the call names some: none of them for -1."""
        eos = self.values.get("eos_token_id")
        if eos is None:
            return None
        return [int(number) for number in (eos if isinstance(eos, (list, tuple)) else [eos]) if int(number) >= 0]


def of_model(model: str) -> "dict[str, Any]":
    """The defaults in a model's folder; its end tokens are the tokenizer's."""
    path = os.path.join(model, "generation_config.json")
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        values = json.load(file)
    return {name: values[name] for name in READ if values.get(name) is not None and name != "eos_token_id"}


def of_object(config: Any) -> "dict[str, Any]":
    """The values of a GenerationConfig of transformers, or of a map."""
    if config is None:
        return {}
    if isinstance(config, dict):
        return config
    values = config.to_diff_dict() if hasattr(config, "to_diff_dict") else dict(vars(config))
    # Unknown ones that are off, and what the object says about itself, ask for nothing.
    about = ("transformers_version", "generation_kwargs", "is_assistant", "cache_implementation")
    return {
        name: value
        for name, value in values.items()
        if name in READ or not (name.startswith("_") or name in about or value in (None, False, [], {}))
    }


def check(values: "dict[str, Any]", what: str) -> None:
    """Refuses what the program does not do."""
    for name, value in values.items():
        if name in NEUTRAL and value not in (None, NEUTRAL[name]):
            raise Unsupported(f"{what}: {name} = {value!r}: expected {NEUTRAL[name]!r}; the program samples token by token")
        if name not in (*PASSED, *NEUTRAL, *READ):
            raise Unsupported(f"{what}: `{name}`: expected some of {', '.join(READ)}{nearest(name, list(READ))}")


def without_none(values: "dict[str, Any]") -> "dict[str, Any]":
    """The values that are set; None is off, or not given."""
    found = {name: OFF.get(name) if value is None else value for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}
