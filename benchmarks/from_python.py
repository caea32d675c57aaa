"""A run of the Python package's PPOTrainer or GRPOTrainer, with the settings of a command line. Its JSON lines are those of the program.

    from_python.py PROGRAM ppo|grpo SETTINGS    SETTINGS is a map in JSON, the flags of the command

GRPO is rewarded by a function of this process, the same as the rule of the command line.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))


def length(target):
    """The rule `length:target=TARGET,unit=chars`."""

    def length(completions, **_):
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [-abs(len(text) - target) / target for text in texts]

    return length


def main():
    program, command, settings = sys.argv[1:]
    os.environ["RLHF_PROGRAM"] = str(Path(program).resolve())
    import rlhf

    settings = json.loads(settings)
    rows, reward = settings.pop("dataset_name"), settings.pop("reward", None)
    # Settings of the model are arguments of the trainer, as in TRL.
    settings["model_init_kwargs"] = {"dtype": settings.pop("dtype")}
    more = {}
    if settings.pop("use_peft", False):
        names = ("lora_r", "lora_alpha", "lora_target_modules")
        rank, alpha, targets = (settings.pop(name) for name in names)
        more["peft_config"] = rlhf.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)
    if command == "grpo":
        model = settings.pop("model_name_or_path")
        target = int(reward.partition("target=")[2].partition(",")[0])
        trainer = rlhf.GRPOTrainer(model, length(target), rlhf.GRPOConfig(**settings), rows, **more)
    else:
        models = {"model": settings.pop("sft_model_path"), "reward_model": settings.pop("reward_model_path")}
        trainer = rlhf.PPOTrainer(rlhf.PPOConfig(**settings), train_dataset=rows, **models, **more)
    trainer.train()


if __name__ == "__main__":
    main()
