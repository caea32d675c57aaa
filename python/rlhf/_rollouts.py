"""`PPOTrainer`, `GRPOTrainer` and `RLOOTrainer`: training on responses of the model itself."""

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from rlhf import _configs, _program, _translate
from rlhf._config import Config
from rlhf._data import is_name, path_or_name, rows, write
from rlhf._environments import Environments
from rlhf._errors import Unsupported
from rlhf._objects import is_same, is_text, place_tokenizer
from rlhf._output import in_notebook
from rlhf._rewards import Rewards
from rlhf._trainer import Trainer, copy_tokenizer

# Seconds.
DAY = 86400


class Rollouts(Trainer):
    """What the three have in common."""

    _separate_eval = False
    _best_metric = "eval/score"

    def _rewards(self, given: Any, tokenizers: Any, resumes: bool) -> dict[str, Any]:
        """The settings of rewards, and the functions that this process calls."""
        several = tokenizers if isinstance(tokenizers, (list, tuple)) else [tokenizers]

        def own(at: int) -> Any:
            return several[at] if at < len(several) else None

        def place(model: Any, what: str) -> str:
            return self._place_model(model, what, resumes, own(int(what.rsplit("_", 1)[-1])))

        def tokenizer(at: int) -> Any:
            found = own(at)
            return found if found is not None else self.processing_class

        rewards = Rewards(given, place, tokenizer)
        self._functions = rewards.functions
        settings: dict[str, Any] = {"reward": rewards.written} if rewards.written else {}
        if rewards.functions and "reward_timeout" not in self._settings:
            # A function of this process takes as long as it takes, as in TRL.
            settings["reward_timeout"] = DAY
        return settings

    def _acts_in(self, tools: Any, environment_factory: Any) -> None:
        """Takes the tools and environments, once the arguments are there."""
        self._environments = Environments(tools, environment_factory)
        self._settings.update(self._environments.settings(self._settings, DAY))

    def _policy(self, resumes: bool) -> dict[str, Any]:
        """The policy, and the model or folder of its tokenizer."""
        settings = {"sft_model_path": self._place_model(self._model, "model", resumes, self.processing_class)}
        tokenizer = self._place_tokenizer()
        if tokenizer is not None and tokenizer != settings["sft_model_path"]:
            settings["model_name_or_path"] = tokenizer
        return settings

    def generate_completions(self, sampling: bool = False, max_new_tokens: "int | None" = None) -> list[dict[str, Any]]:
        """Responses of the trained model to the first prompts of the evaluation rows, or of the training rows; prints a table of them.

        Returns:
            A map for each, with `prompt` and `response` and what else the program says.
        """
        folder = self._trained("generate_completions")
        source = self.eval_dataset if self.eval_dataset is not None else self.train_dataset
        place = os.path.join(self.inputs, "prompts.jsonl")
        arguments = ["--dataset_name", path_or_name(source), "--dataset_split", "train"] if is_name(source) else ["--dataset_name", place]
        if not is_name(source):
            found = [row for row, _ in zip(rows(source, "dataset"), range(10), strict=False)]
            write(found, place, "dataset")
        limit = max_new_tokens or getattr(self.args, "response_length")  # noqa: B009 - GRPO has it under TRL's name
        output = _program.call(
            ["generate", "--model_name_or_path", folder, *arguments, "--max_new_tokens", str(limit), "--do_sample", str(sampling).lower()]
            + ["--output_format", "jsonl"],
            "generate_completions",
        )
        completions = [json.loads(line) for line in output.splitlines() if line.strip()][:10]
        print_table(completions)
        return completions


def refuse_legacy(args: Any, unknown: "dict[str, Any]") -> None:
    """Refuses what TRL 0.11's PPOTrainer is made of, with the place that takes it."""
    if type(args).__module__.startswith("rlhf.legacy"):
        raise TypeError("PPOTrainer: args: found a PPOConfig of rlhf.legacy, whose PPOTrainer has step(): from rlhf.legacy import PPOTrainer")
    if unknown:
        name = next(iter(unknown))
        of_legacy = name in ("dataset", "optimizer", "lr_scheduler", "num_shared_layers", "training_data_collator")
        hint = f"; `{name}` is one of TRL 0.11's, whose loop is yours: from rlhf.legacy import PPOTrainer" if of_legacy else ""
        raise TypeError(f"PPOTrainer: `{name}`: unknown argument{hint}")


def print_table(completions: list[dict[str, Any]]) -> None:
    """Prints prompts and responses; in a notebook as a table."""
    pairs = [[text_of(row.get("prompt")), text_of(row.get("response", row.get("completion")))] for row in completions]
    if in_notebook():
        from rlhf._notebook import show_texts

        show_texts(["prompt", "response"], pairs)
        return
    for prompt, response in pairs:
        print(f"{prompt!r} -> {response!r}")


def text_of(value: Any) -> str:
    """A prompt or response as one text."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        return str(value[-1].get("content"))
    return str(value)


class PPOTrainer(Rollouts):
    """Trains a language model with PPO and a critic, with the arguments of TRL's class of the same name, of versions 0.12 to 1.11.

    Args:
        args: the settings; `config` in older versions.
        processing_class: the tokenizer of policy, reward and value model; `tokenizer` in older versions.
        model: the policy; `policy` in older versions.
        ref_model: the reference model: it must be the policy itself, a copy of it or None, as the program takes the policy before its first
            update.
        reward_model: a sequence classifier: a path, a name or an object. Also a reward function, or a list of rewards as `reward_funcs` of
            [`GRPOTrainer`].
        value_model: the critic at the start; by default a copy of the reward model.
        reward_funcs: further rewards beside the model; only here.
        tools, environment_factory: as those of [`GRPOTrainer`]; only here.
    """

    _config: ClassVar[type[Config]] = _configs.PPOConfig

    def __init__(
        self,
        args: Any = None,
        processing_class: Any = None,
        model: Any = None,
        ref_model: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: Any = None,
        callbacks: Any = None,
        peft_config: Any = None,
        *,
        config: Any = None,
        tokenizer: Any = None,
        policy: Any = None,
        ref_policy: Any = None,
        reward_funcs: Any = None,
        quantization_config: Any = None,
        tools: Any = None,
        environment_factory: Any = None,
        **unknown: Any,
    ) -> None:
        args = args if args is not None else config
        refuse_legacy(args, unknown)
        model = model if model is not None else policy
        ref_model = ref_model if ref_model is not None else ref_policy
        processing_class = processing_class if processing_class is not None else tokenizer
        if model is None:
            raise ValueError("PPOTrainer: model: expected a path, a name or a model, found none")
        _translate.check_collator(data_collator)
        if ref_model is not None and not is_same(model, ref_model):
            raise Unsupported(
                "ref_model: expected a copy of model, or None, found another model; the reference is the policy before its first update"
            )
        self.ref_model = ref_model
        # A module of torch says in its error what to use instead.
        is_model = reward_model is None or is_text(reward_model) or hasattr(reward_model, "save_pretrained")
        self.reward_model = reward_model if is_model else None
        given = [] if is_model else list(reward_model) if isinstance(reward_model, (list, tuple)) else [reward_model]
        given += list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs] if reward_funcs is not None else []
        if self.reward_model is None and not given and environment_factory is None:
            raise ValueError("PPOTrainer: reward_model: expected a model or a reward function, found none")
        self.reward_funcs, self.value_model = given, value_model
        super().__init__(
            model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config, quantization_config, optimizers
        )
        self._acts_in(tools, environment_factory)

    @property
    def policy_model(self) -> Any:
        """The policy, as [`model`]."""
        return self.model

    def _inputs(self, resumes: bool) -> dict[str, Any]:
        settings = {**self._data(), **self._policy(resumes)}
        if self.reward_funcs:
            settings.update(self._rewards(self.reward_funcs, None, resumes))
        # As in TRL, one tokenizer is that of all models.
        for name, model in (("reward_model_path", self.reward_model), ("value_model_path", self.value_model)):
            if model is not None:
                what = name.removesuffix("_path")
                settings[name] = self._place_model(model, what, resumes, self.processing_class)
        return settings


class GRPOTrainer(Rollouts):
    """Trains a language model with GRPO, on groups of responses, with the arguments of TRL's class of the same name.

    Args:
        reward_funcs: a function, a model, a path or name of a model, a rule of [`rlhf.rewards`], or a list of these. A function gets
            `prompts`, `completions`, `completion_ids` and every column of the rows by name, and, where it takes them, `trainer_state`,
            `log_metric` and `log_extra`; it runs in this process. It may be a coroutine function.
        reward_processing_classes: tokenizers of reward models that are objects.
        tools: functions that the policy may call, with type hints and a docstring in Google's style. They run in this process, on the thread
            that called `train()`; coroutine functions are awaited. What one raises is a result that the policy sees.
        environment_factory: a class without arguments, or a map of names to classes, of which the column `environment` of a row chooses one:
            `reset(**row)` begins, the other public methods are tools, and `get_reward()`, if there is one, is a further reward.

    Example:

        from rlhf import GRPOConfig, GRPOTrainer

        def brief(completions, **kwargs):
            return [-float(len(text)) for text in completions]

        trainer = GRPOTrainer("models/sft", reward_funcs=brief, args=GRPOConfig("runs/grpo"), train_dataset=rows)
        trainer.train()
    """

    _config: ClassVar[type[Config]] = _configs.GRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: "Config | Mapping[str, Any] | None" = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        _translate.refuse({"rollout_func": rollout_func})
        reward_funcs = [] if reward_funcs is None else reward_funcs
        if reward_funcs == [] and environment_factory is None:
            raise ValueError(f"{type(self).__name__}: reward_funcs: expected a reward function or model, found none")
        self.reward_funcs, self._reward_tokenizers = reward_funcs, reward_processing_classes
        processing_class = processing_class if processing_class is not None else tokenizer
        super().__init__(
            model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config, quantization_config, optimizers
        )
        self._acts_in(tools, environment_factory)

    def _inputs(self, resumes: bool) -> dict[str, Any]:
        return {**self._data(), **self._policy(resumes), **self._rewards(self.reward_funcs, self._reward_tokenizers, resumes)}


class RLOOTrainer(GRPOTrainer):
    """Trains a language model with RLOO, on groups of responses, with the arguments of TRL's class of the same name.

    The arguments are those of [`GRPOTrainer`]: tools and environments too, which TRL's class does not have.
    """

    _config: ClassVar[type[Config]] = _configs.RLOOConfig


# Used by subclasses in scripts; kept importable from one place.
__all__ = ["GRPOTrainer", "PPOTrainer", "RLOOTrainer", "copy_tokenizer", "place_tokenizer"]
