"""What runs of TRL's trainers take: clocks, LoRA adapters, quantized bases, settings of memory."""

import json
import time

import torch
from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Collects the times of an update in `times`, and prints them at its end as a JSON line, with rlhf's names."""

    def __init__(self, device):
        self.device = device
        self.times = {}

    def now(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, key, function):
        """`function`, with its seconds in `times[key]`."""

        def wrapped(*args, **kwargs):
            began = self.now()
            output = function(*args, **kwargs)
            self.times[key] = self.now() - began
            return output

        return wrapped

    def end_rollout(self):
        """The rollout is over; only the first call in an update counts."""
        self.times.setdefault("time/rollout", self.now() - self.began)

    def on_train_begin(self, *_, **__):
        self.began = self.now()

    def on_step_end(self, *_, **__):
        ended = self.now()
        times, self.times = self.times, {}
        times["time/update"] = ended - self.began
        times["time/optimise"] = times["time/update"] - times["time/rollout"]
        if self.device == "cuda":
            times["memory/allocated"] = torch.cuda.max_memory_allocated()
        print(json.dumps(times), flush=True)
        self.began = ended


class Steps(TrainerCallback):
    """Collects the seconds of each step in `seconds`."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *_, **__):
        self.began = time.monotonic()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.monotonic() - self.began)


def adapters(rank):
    """LoRA adapters of this rank on all linear layers, as the benchmark's runs of rlhf have them; None for no rank."""
    if rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def add_memory_flags(parser):
    """The settings that change the memory of a run, with TRL's names."""
    parser.add_argument("--lora_r", type=int, help="train LoRA adapters of this rank, on all linear layers")
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--gradient_checkpointing", choices=["true", "false"], default="false")
    parser.add_argument("--bits", type=int, choices=[4, 8], help="hold the linear layers below adapters in this many bits")


def base_options(args, dtype):
    """The options of `from_pretrained` for the policy."""
    if args.bits is None:
        return {"dtype": dtype}
    from transformers import BitsAndBytesConfig

    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    format = four | {"bnb_4bit_compute_dtype": dtype} if args.bits == 4 else {"load_in_8bit": True}
    return {"dtype": dtype, "quantization_config": BitsAndBytesConfig(**format), "device_map": "cpu"}
