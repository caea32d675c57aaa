"""Callbacks with transformers' hooks, and the state and control that they get."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# The hooks that are called, in the order of a step.
HOOKS = (
    "on_init_end",
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_save",
    "on_epoch_end",
    "on_train_end",
)


class TrainerCallback:
    """A callback that does nothing: derive from it, or from transformers' class of the same name."""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After the trainer is made."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Before the first update."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After the last update."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Before the first update of an epoch."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After the last update of an epoch."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Before an update."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After an update: `control.should_training_stop`, `should_save` and `should_evaluate` are read now."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After a line of metrics, `logs`."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After an evaluation with its `metrics`."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After a checkpoint."""


@dataclass
class TrainerState:
    """The state of a run, in the fields of transformers' class of the same name."""

    epoch: float | None = None
    global_step: int = 0
    max_steps: int = 0
    logging_steps: float = 1
    eval_steps: float | None = None
    save_steps: float | None = None
    train_batch_size: int | None = None
    num_train_epochs: float = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)
    # Responses trained on so far, as in TRL's PPO.
    episode: int = 0

    def save_to_json(self, json_path: str) -> None:
        """Writes the state to a file."""
        with open(json_path, "w", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True, default=str) + "\n")


@dataclass
class TrainerControl:
    """What callbacks ask for, in the fields of transformers' class of the same name."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class Handler:
    """Calls the hooks of callbacks."""

    def __init__(self, callbacks: "Iterable[Any] | None") -> None:
        self.callbacks: list[Any] = []
        for callback in callbacks or ():
            self.add(callback)

    def add(self, callback: Any) -> None:
        callback = callback() if isinstance(callback, type) else callback
        if not any(hasattr(callback, hook) for hook in HOOKS):
            raise TypeError(f"callbacks: expected an object with hooks such as `on_step_end`, found {type(callback).__name__}")
        self.callbacks.append(callback)

    def pop(self, callback: Any) -> Any:
        for at, own in enumerate(self.callbacks):
            if own is callback or (isinstance(callback, type) and isinstance(own, callback)):
                return self.callbacks.pop(at)
        return None

    def call(self, hook: str, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> TrainerControl:
        """Calls a hook of all callbacks, and returns the control that the last of them has returned or changed."""
        for callback in self.callbacks:
            method = getattr(callback, hook, None)
            result = method(args, state, control, **more) if method is not None else None
            control = control if result is None else result
        return control
