"""`DPOTrainer`: training on preference pairs against a reference model."""

from collections.abc import Mapping
from typing import Any

from rlhf import _configs, _translate
from rlhf._objects import is_same
from rlhf._trainer import Trainer


class DPOTrainer(Trainer):
    """Trains a language model by direct preference optimization, with the arguments of TRL's class of the same name.

    Rows have `prompt`, `chosen` and `rejected`, texts or lists of messages; without `prompt` both sides begin with it.

    Args:
        ref_model: the reference model: a path, a name or an object; by default the model as it starts.

    Example:

        from rlhf import DPOConfig, DPOTrainer

        trainer = DPOTrainer("models/sft", args=DPOConfig("runs/dpo"), train_dataset=pairs)
        trainer.train()
    """

    _config = _configs.DPOConfig

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: "_configs.DPOConfig | Mapping[str, Any] | None" = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        tokenizer: Any = None,
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
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
        if ref_model is not None and ref_model is model and not isinstance(model, str):
            raise ValueError("DPOTrainer: ref_model: expected another object than model, or None for the model as it starts, found the same")
        self.ref_model = ref_model
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
        settings = {**self._data(), "model_name_or_path": self._place_trained(resumes)}
        # A copy of the model is what the program takes by itself.
        if self.ref_model is not None and not is_same(self._model, self.ref_model):
            settings["ref_model_name_or_path"] = self._place_model(self.ref_model, "ref_model", resumes, self.processing_class)
        return settings
