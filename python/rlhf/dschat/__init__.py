"""DeepSpeed-Chat's engine and trainer, whose loop is the caller's: `generate_experience`, `train_rlhf`, `train_unsupervised`.

    from rlhf.dschat import DeepSpeedPPOTrainer, DeepSpeedRLHFEngine, MiniDataset

The four models are in the program, which this process drives; no DeepSpeed is needed. Tensors come out where torch is there, else lists.
"""

from rlhf.dschat._engine import DeepSpeedRLHFEngine
from rlhf.dschat._trainer import DeepSpeedPPOTrainer, DeepSpeedPPOTrainerUnsupervised
from rlhf.dschat._utils import (
    ExponentialMovingAverage,
    MiniDataset,
    convert_lora_to_linear_layer,
    get_all_reduce_mean,
    load_hf_tokenizer,
    moving_average,
    print_rank_0,
    save_hf_format,
    save_zero_three_model,
    set_random_seed,
    to_device,
)

__all__ = [
    "DeepSpeedPPOTrainer",
    "DeepSpeedPPOTrainerUnsupervised",
    "DeepSpeedRLHFEngine",
    "ExponentialMovingAverage",
    "MiniDataset",
    "convert_lora_to_linear_layer",
    "get_all_reduce_mean",
    "load_hf_tokenizer",
    "moving_average",
    "print_rank_0",
    "save_hf_format",
    "save_zero_three_model",
    "set_random_seed",
    "to_device",
]

# Names of DeepSpeed-Chat that are not here.
_ABSENT = {
    "create_prompt_dataset": "; prompts are rows of token ids, padded on the left, from any dataset",
    "get_unsupervised_data": "; texts are rows of token ids, from any dataset",
    "DataCollatorRLHF": "; pad prompts on the left: tokenizer(texts, padding=True, padding_side='left', return_tensors='pt')",
    "PPOConfig": "; from rlhf.legacy import PPOConfig is TRL 0.11's, from rlhf import PPOConfig that of TRL 1.x",
    "PPOTrainer": "; from rlhf.legacy import PPOTrainer is TRL 0.11's, from rlhf import PPOTrainer that of TRL 1.x",
}


def __getattr__(name: str) -> object:
    from rlhf._errors import nearest

    if name in _ABSENT:
        # `from rlhf.dschat import NAME` shows the text of no other exception.
        raise ImportError(f"module 'rlhf.dschat' has no {name}{_ABSENT[name]}", name=__name__)
    hint = nearest(name, __all__)
    raise AttributeError(f"module 'rlhf.dschat' has no attribute {name!r}{hint}")
