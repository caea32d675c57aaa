"""What scripts import from the module of this name in TRL."""

from rlhf._scripts import SIMPLE_CHAT_TEMPLATE, get_kbit_device_map, get_peft_config, get_quantization_config

__all__ = ["SIMPLE_CHAT_TEMPLATE", "get_kbit_device_map", "get_peft_config", "get_quantization_config"]
