"""DeepSpeed-Chat's four models, in the program."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from typing import Any

from rlhf import _program
from rlhf._errors import RunError, Unsupported
from rlhf._objects import is_text, place_model, place_tokenizer
from rlhf._session import Session

# Arguments of main.py that are not about the models: data, folders, logs, and the loop itself.
OF_LOOP = (
    "actor_model_name_or_path",
    "critic_model_name_or_path",
    "data_output_path",
    "data_path",
    "data_split",
    "deepspeed",
    "deepspeed_config",
    "deepscale",
    "deepscale_config",
    "enable_tensorboard",
    "enable_test_mode",
    "end_of_conversation_token",
    "generation_batches",
    "global_rank",
    "local_rank",
    "num_processes",
    "num_train_epochs",
    "output_dir",
    "per_device_generation_batch_size",
    "per_device_training_batch_size",
    "ppo_epochs",
    "preprocessing_num_workers",
    "print_answers",
    "print_answers_interval",
    "tensorboard_path",
    "test_stop_step",
    "unsup_coef",
    "unsupervised_dataset_config_name",
    "unsupervised_dataset_name",
)
# Flags of main.py: false is a flag that was not given.
FLAGS = (
    "actor_gradient_checkpointing",
    "add_eot_token",
    "align_overflow",
    "compute_fp32_loss",
    "critic_gradient_checkpointing",
    "enable_ema",
    "enable_hybrid_engine",
    "enable_mixed_precision_lora",
    "offload",
    "offload_reference_model",
    "offload_reward_model",
    "only_optimize_lora",
    "release_inference_cache",
    "unpin_actor_parameters",
)
BACKWARD = "write actor_loss, critic_loss = trainer.train_rlhf(experience): the program has the gradients and takes the step"


class Module:
    """One of the models. The program has its weights."""

    def __init__(self, engine: "DeepSpeedRLHFEngine", name: str) -> None:
        # Weak, as the engine has the model: `del engine` ends the program.
        self._engine = weakref.ref(engine)
        self.name = name
        # Its adapter is merged when it is saved.
        self.merges = False

    @property
    def engine(self) -> "DeepSpeedRLHFEngine":
        """The engine of the model."""
        engine = self._engine()
        if engine is None:
            raise RunError(f"{self.name}: expected its engine, found it gone: keep the DeepSpeedRLHFEngine, which has the program")
        return engine

    @property
    def module(self) -> "Module":
        """The model itself, as DeepSpeed's engines wrap theirs."""
        return self

    def eval(self) -> "Module":
        """Does nothing: the program applies no dropout."""
        return self

    def train(self, mode: bool = True) -> "Module":
        """Does nothing: the program applies no dropout."""
        return self

    def gradient_checkpointing_enable(self) -> None:
        """Too late for a model that is loaded."""
        raise Unsupported("gradient_checkpointing_enable: set args.actor_gradient_checkpointing or args.critic_gradient_checkpointing")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported(f"a call of the {self.name}: write trainer.generate_experience(prompts, mask, step); to train, {BACKWARD}")

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """The program has the gradients."""
        raise Unsupported(f"{self.name}.backward: {BACKWARD}")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """The program takes the steps."""
        raise Unsupported(f"{self.name}.step: {BACKWARD}")

    def save_pretrained(self, folder: Any) -> None:
        """Writes the model and its tokenizer to a folder."""
        self.engine._save(self, os.path.abspath(folder))


class DeepSpeedRLHFEngine:
    """Actor, reference, critic and reward model, with the optimizers of two.

    Args:
        actor_model_name_or_path (`str`): the actor, and the start of the reference model.
        critic_model_name_or_path (`str`): the reward model, and the start of the critic.
        tokenizer: the tokenizer of transformers, or its path; that of the actor if it is None.
        args: the arguments of DeepSpeed-Chat's main.py, as a namespace or a map. Settings of `rlhf ppo` by their own names are taken too, and
            `num_processes`: ranks that are started for this one script, which passes the rows of all.
        num_total_iters (`int`, *optional*): steps of the whole run, for learning rates that fall.
    """

    def __init__(
        self,
        actor_model_name_or_path: Any,
        critic_model_name_or_path: Any,
        tokenizer: Any = None,
        args: Any = None,
        num_total_iters: "int | None" = None,
    ) -> None:
        self.args = args
        self.num_total_iters = num_total_iters
        self.tokenizer = tokenizer
        self._folder = tempfile.mkdtemp(prefix="rlhf-dschat-")
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        values = arguments(args)
        given = {name: value for name, value in values.items() if name not in OF_LOOP and not (name in FLAGS and value is False)}
        settings = {name: plain(name, value) for name, value in given.items() if value is not None}
        settings["actor_model_name_or_path"] = self._place(actor_model_name_or_path, "actor")
        settings["critic_model_name_or_path"] = self._place(critic_model_name_or_path, "critic")
        if tokenizer is not None:
            settings["model_name_or_path"] = place_tokenizer(tokenizer, os.path.join(self._folder, "tokenizer"))
        self.session = Session(int(values.get("num_processes") or 1))
        if self.session.capabilities["ranks"] > 1 and len(self.session.processes) == 1:
            raise Unsupported(
                "DeepSpeedRLHFEngine: expected one process of this script, found several; args.num_processes starts ranks for one script"
            )
        params = {"loop": "engine", "settings": settings, "mixes_texts": False}
        if num_total_iters is not None:
            params["num_total_iters"] = int(num_total_iters)
        opened = self.session.call("open", params)
        self.device = opened["device"]
        self.actor = Module(self, "actor")
        self.ref = Module(self, "ref")
        self.critic = Module(self, "critic")
        self.reward = Module(self, "reward")
        self.actor_ema = Module(self, "actor_ema") if opened["has_ema"] else None

    def _place(self, model: Any, name: str) -> str:
        return place_model(model, os.path.join(self._folder, name), name, keep=False) if not is_text(model) else os.fspath(model)

    def close(self) -> None:
        """Ends the program, and removes the files that were made for it."""
        self.session.close()
        self._remove()

    def _save(self, model: Module, folder: str) -> None:
        """Writes one of the trained models to a folder, in the format of transformers."""
        parts = {"actor": "", "critic": "value_model", "actor_ema": "ema"}
        if model.name not in parts:
            raise Unsupported(
                f"{model.name}.save_pretrained: expected actor, critic or actor_ema: it is not trained, and is where it was loaded from"
            )
        os.makedirs(os.path.dirname(folder) or ".", exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".rlhf-save-", dir=os.path.dirname(folder) or ".") as whole:
            self.session.call("save_model", {"dir": whole})
            part = os.path.join(whole, parts[model.name])
            if not os.path.isdir(part):
                raise RunError(f"{model.name}: expected args.enable_ema for an average, found none")
            if model.merges and os.path.exists(os.path.join(part, "adapter_config.json")):
                _program.call(["merge", part, "--output_dir", folder, "--overwrite_output_dir"], "save")
                return
            os.makedirs(folder, exist_ok=True)
            for name in os.listdir(part):
                if not os.path.isdir(os.path.join(part, name)) or name == "base_model":
                    shutil.move(os.path.join(part, name), os.path.join(folder, name))


def arguments(args: Any) -> "dict[str, Any]":
    """The arguments of main.py, which are a namespace or a map, by name."""
    if args is None:
        return {}
    return dict(args) if isinstance(args, Mapping) else dict(vars(args))


def plain(name: str, value: Any) -> Any:
    """An argument as a value of JSON."""
    if isinstance(value, (list, tuple)):
        return [plain(name, item) for item in value]
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # Choices of an enumeration.
    found = getattr(value, "value", None)
    if isinstance(found, (int, str)):
        return found
    raise TypeError(f"args: {name}: expected a number, a text or a truth value, found {type(value).__name__}")
