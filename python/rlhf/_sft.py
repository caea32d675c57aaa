"""`SFTTrainer` and `RewardTrainer`: training on given responses."""

import json
import os
from collections.abc import Mapping
from typing import Any

from rlhf import _configs, _program, _translate
from rlhf._data import is_name, path_or_name, write
from rlhf._errors import RunError, Unsupported
from rlhf._trainer import Trainer


class SFTTrainer(Trainer):
    """Fine-tunes a language model on texts or demonstrations, with the arguments of TRL's class of the same name.

    Example:

        from rlhf import SFTConfig, SFTTrainer

        trainer = SFTTrainer("models/base", args=SFTConfig("runs/sft"), train_dataset=rows)
        trainer.train()
    """

    _config = _configs.SFTConfig

    def __init__(
        self,
        model: Any,
        args: "_configs.SFTConfig | Mapping[str, Any] | None" = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: Any = None,
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
        *,
        tokenizer: Any = None,
        model_init: Any = None,
        config_name: "str | None" = None,
    ) -> None:
        """`config_name` starts from random weights of the shape in a `config.json`; `model` is None then."""
        _translate.refuse(
            {
                "compute_loss_func": compute_loss_func,
                "compute_metrics": compute_metrics,
                "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
                "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
                "model_init": model_init,
            }
        )
        _translate.check_collator(data_collator)
        self._formatting, self._config_name = formatting_func, config_name
        super().__init__(
            model,
            args,
            train_dataset,
            eval_dataset,
            processing_class if processing_class is not None else tokenizer,
            callbacks,
            peft_config,
            quantization_config,
            optimizers,
        )

    def _inputs(self, resumes: bool) -> dict[str, Any]:
        settings = self._data(self._format if self._formatting is not None else None)
        tokenizer = self._place_tokenizer()
        if tokenizer is not None:
            settings["tokenizer_name"] = tokenizer
        if self._config_name is not None:
            return {**settings, "config_name": path_or_name(self._config_name)}
        return {**settings, "model_name_or_path": self._place_model(self._model, "model", resumes, self.processing_class)}

    def _format(self, row: Any) -> Any:
        """A row as `formatting_func` writes it."""
        text = self._formatting(row)
        if isinstance(text, list):
            if len(text) != 1:
                raise Unsupported(f"formatting_func: expected one text for a row, found a list of {len(text)}")
            text = text[0]
        return {self.args.dataset_text_field: text} if isinstance(text, str) else text


class RewardTrainer(Trainer):
    """Trains a reward model on pairs of a chosen and a rejected response, with the arguments of TRL's class of the same name.

    A language model gets a new score head.
    """

    _config = _configs.RewardConfig

    def __init__(
        self,
        model: Any,
        args: "_configs.RewardConfig | Mapping[str, Any] | None" = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: Any = None,
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        tokenizer: Any = None,
        model_init: Any = None,
    ) -> None:
        _translate.refuse(
            {
                "compute_metrics": compute_metrics,
                "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
                "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
                "model_init": model_init,
            }
        )
        _translate.check_collator(data_collator)
        super().__init__(
            model,
            args,
            train_dataset,
            eval_dataset,
            processing_class if processing_class is not None else tokenizer,
            callbacks,
            peft_config,
            quantization_config,
            optimizers,
        )

    def _inputs(self, resumes: bool) -> dict[str, Any]:
        path = self._place_trained(resumes)
        settings = {**self._data(), "model_name_or_path": path}
        # A model on the hub that has a head keeps it.
        if not os.path.isdir(path) or not has_head(path):
            settings["new_reward_head"] = True
        return settings

    def _load(self) -> Any:
        from transformers import AutoModelForSequenceClassification  # type: ignore[import-not-found,unused-ignore]

        path = self._trained("model") if self._is_trained() else self._model
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)

    def _current(self) -> str:
        """The trained model, or before training the one that was passed."""
        return self._trained("model") if self._is_trained() else self._place_model(self._model, "model", False, self.processing_class)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss, accuracy and margin of the model on pairs: `eval_dataset`, or those of the trainer."""
        rows = eval_dataset if eval_dataset is not None else self.eval_dataset
        if rows is None:
            raise Unsupported("evaluate: expected eval_dataset here or in the trainer, found none")
        place = path_or_name(rows) if is_name(rows) else os.path.join(self.inputs, "evaluate.jsonl")
        if not is_name(rows):
            os.makedirs(self.inputs, exist_ok=True)
            write(rows, place, "eval_dataset")
        output = _program.call(
            [
                "reward",
                "--eval_only",
                "--model_name_or_path",
                self._current(),
                "--dataset_name",
                place,
                "--output_dir",
                f"{self.inputs}/evaluate",
            ],
            "evaluate",
        )
        found = json.loads(output)
        return {name if name.startswith(metric_key_prefix) else f"{metric_key_prefix}_{name}": value for name, value in found.items()}

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> list[float]:
        """The scores of rows with `text`, `messages`, or `prompt` and `completion`, by the model."""
        place = path_or_name(test_dataset) if is_name(test_dataset) else os.path.join(self.inputs, "predict.jsonl")
        if not is_name(test_dataset):
            os.makedirs(self.inputs, exist_ok=True)
            write(test_dataset, place, "test_dataset")
        output = _program.call(["score", "--model_name_or_path", self._current(), "--dataset_name", place], "predict")
        return [json.loads(line)["score"] for line in output.splitlines() if line.strip()]


def has_head(path: str) -> bool:
    """Whether the folder of a model has a classifier."""
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            names = json.load(file).get("architectures") or []
    except OSError:
        # An adapter.
        return True
    except ValueError as error:
        raise RunError(f"{path}/config.json: {error}") from None
    return not any("CausalLM" in name or "LMHead" in name for name in names)
