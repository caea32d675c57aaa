"""Modules by the names that TRL has for what its scripts share."""

from rlhf._scripts import DatasetMixtureConfig, ScriptArguments, TrlParser, get_dataset, init_zero_verbose

__all__ = ["DatasetMixtureConfig", "ScriptArguments", "TrlParser", "get_dataset", "init_zero_verbose"]
