"""`DistillationTrainer` and `GKDTrainer`: training on a teacher's distributions."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rlhf import _configs, _translate
from rlhf._config import Config
from rlhf._errors import Unsupported
from rlhf._objects import is_text
from rlhf._trainer import Trainer


class _Distillation(Trainer):
    """What both trainers have in common."""

    teacher_model: Any

    def _teach(self, teacher_model: Any, quantization_config: Any) -> None:
        """Takes the teacher, and the settings of its loading."""
        name = self._settings.pop("teacher_model_name_or_path", None)
        self.teacher_model = teacher_model if teacher_model is not None else name
        if self.teacher_model is None:
            raise ValueError(f"{type(self).__name__}: teacher_model: expected a model to learn from, found none")
        loading = self._settings.pop("teacher_model_init_kwargs", None)
        if is_text(self.teacher_model):
            loaded = _translate.of_teacher_init(loading)
        elif loading:
            raise ValueError("teacher_model_init_kwargs: expected none with a teacher_model that is loaded already")
        else:
            loaded = {}
        student = {**_translate.of_model_init(self.args.model_init_kwargs), **_translate.of_quantization(quantization_config)}
        self._settings.update(loaded)
        self._settings.update(_translate.teacher_beside(self._settings, student))

    def _inputs(self, resumes: bool) -> dict[str, Any]:
        teacher = self._place_model(self.teacher_model, "teacher_model", resumes, self.processing_class)
        return {**self._data(), "model_name_or_path": self._place_trained(resumes), "teacher_model_name_or_path": teacher}


class DistillationTrainer(_Distillation):
    """Trains a language model, the student, to have the distributions of a teacher on the student's own responses, with the arguments of TRL's
    class of the same name.

    Rows have a `prompt`, a text or a list of messages.

    Args:
        teacher_model: the model to learn from: a path, a name or an object; by default that of the settings.

    Example:

        from rlhf import DistillationConfig, DistillationTrainer

        settings = DistillationConfig("runs/distill")
        trainer = DistillationTrainer("models/student", "models/teacher", settings, train_dataset=prompts)
        trainer.train()
    """

    _config: ClassVar[type[Config]] = _configs.DistillationConfig

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: "_configs.DistillationConfig | Mapping[str, Any] | None" = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Any = None,
        optimizers: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        if tools:
            raise Unsupported("tools: responses have one turn here, without tools; TRL's DistillationTrainer has them")
        processing_class = processing_class if processing_class is not None else tokenizer
        super().__init__(
            model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config, quantization_config, optimizers
        )
        self._teach(teacher_model, quantization_config)


class GKDTrainer(_Distillation):
    """Trains a language model, the student, to have the distributions of a teacher on the responses of rows, its own or the teacher's, with
    the arguments of TRL's class of the same name.

    Rows have `messages`, of which the last is the response, or `prompt` and `completion`.

    Args:
        teacher_model: the model to learn from: a path, a name or an object; by default that of the settings.

    Example:

        from rlhf import GKDConfig, GKDTrainer

        trainer = GKDTrainer("models/student", "models/teacher", GKDConfig("runs/gkd"), train_dataset=rows)
        trainer.train()
    """

    _config: ClassVar[type[Config]] = _configs.GKDConfig

    def __init__(
        self,
        model: Any = None,
        teacher_model: Any = None,
        args: "_configs.GKDConfig | Mapping[str, Any] | None" = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: Any = None,
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
        *,
        quantization_config: Any = None,
        tokenizer: Any = None,
    ) -> None:
        _translate.refuse({"compute_metrics": compute_metrics, "preprocess_logits_for_metrics": preprocess_logits_for_metrics})
        _translate.check_collator(data_collator)
        if formatting_func is not None:
            raise Unsupported("formatting_func: a row has a prompt and a response here: write them into the columns of the dataset")
        processing_class = processing_class if processing_class is not None else tokenizer
        super().__init__(
            model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config, quantization_config, optimizers
        )
        self._teach(teacher_model, quantization_config)
