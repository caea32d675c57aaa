"""What scripts import from the module of this name in TRL."""

from rlhf._scripts import DatasetMixtureConfig, ScriptArguments, TrlParser, get_dataset, init_zero_verbose

__all__ = ["DatasetMixtureConfig", "ScriptArguments", "TrlParser", "get_dataset", "init_zero_verbose"]
