"""Optimizers and schedules as specifications: what an object says is taken over, and the program has the state."""

from typing import Any

from rlhf._errors import Unsupported

# Classes by the names of the program.
CLASSES = {
    "Adam": "adamw_torch",
    "AdamW": "adamw_torch",
    "Adam8bit": "adamw_8bit",
    "AdamW8bit": "adamw_8bit",
    "PagedAdam8bit": "adamw_8bit",
    "PagedAdamW8bit": "adamw_8bit",
    "PagedAdam": "adamw_torch",
    "PagedAdamW": "adamw_torch",
    "PagedAdamW32bit": "adamw_torch",
    "Adafactor": "adafactor",
}
KNOWN = "Adam, AdamW, Adafactor, or the 8-bit ones of bitsandbytes"
NAMES = ("optim", "learning_rate", "lr", "betas", "eps", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")
# Fields of a torch optimizer that must be off, as the program has no such thing.
OFF = ("amsgrad", "maximize", "centered", "nesterov")


class Optimizer:
    """The optimizer of a trainer: its learning rate is that of the object, where it is one."""

    def __init__(self, given: Any, learning_rate: float) -> None:
        self.given = given
        self.settings: dict[str, Any] = {}
        self._rate = learning_rate
        if isinstance(given, dict):
            self._read_map(given)
        elif given is not None:
            self._read_object(given)

    def _read_map(self, given: "dict[str, Any]") -> None:
        unknown = [name for name in given if name not in NAMES]
        if unknown:
            raise ValueError(f"optimizer: `{unknown[0]}`: expected some of {', '.join(NAMES)}")
        self._read_numbers(given)
        self._rate = float(given.get("lr", given.get("learning_rate", self._rate)))
        self.settings.update({name: given[name] for name in NAMES[5:9] if name in given})
        if "optim" in given:
            self.settings["optim"] = given["optim"]

    def _read_object(self, given: Any) -> None:
        name = type(given).__name__
        groups = getattr(given, "param_groups", None)
        if name not in CLASSES or not groups:
            raise Unsupported(f"optimizer: {name}: expected {KNOWN}: the program has the state and takes the steps")
        first = groups[0]
        numbers = ("lr", "betas", "eps", "weight_decay")
        if any(group.get(number) != first.get(number) for group in groups for number in numbers):
            raise Unsupported(
                "optimizer: expected one learning rate, betas, eps and weight_decay for all parameters, found groups with others"
            )
        for field in OFF:
            if first.get(field):
                raise Unsupported(f"optimizer: {name}: {field} = {first[field]!r}: expected {field} off")
        if name in ("Adam", "Adam8bit", "PagedAdam", "PagedAdam8bit") and first.get("weight_decay"):
            raise Unsupported(f"optimizer: {name}: weight_decay = {first['weight_decay']}: expected 0, or AdamW, whose decay is decoupled")
        if name == "Adafactor" and (first.get("scale_parameter") or first.get("relative_step")):
            raise Unsupported("optimizer: Adafactor: expected scale_parameter=False and relative_step=False, with a learning rate")
        self.settings["optim"] = CLASSES[name]
        if name != "Adafactor":
            self._read_numbers(first)
        elif first.get("weight_decay"):
            self.settings["weight_decay"] = float(first["weight_decay"])

    def _read_numbers(self, numbers: Any) -> None:
        betas = numbers.get("betas")
        if betas is not None:
            self.settings["adam_beta1"], self.settings["adam_beta2"] = float(betas[0]), float(betas[1])
        if numbers.get("eps") is not None:
            self.settings["adam_epsilon"] = float(numbers["eps"])
        if numbers.get("weight_decay") is not None:
            self.settings["weight_decay"] = float(numbers["weight_decay"])

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        groups = getattr(self.given, "param_groups", None)
        return float(groups[0]["lr"]) if groups else self._rate


class Schedule:
    """The schedule of a trainer: an object that changes the optimizer's learning rate, or numbers for the program."""

    def __init__(self, given: Any, optimizer: Optimizer) -> None:
        self.given = given
        self.settings: dict[str, Any] | None = None
        if isinstance(given, dict):
            self.settings = of_transformers(given)
        elif given is not None and not hasattr(given, "step"):
            raise TypeError(f"lr_scheduler: expected a scheduler of torch or transformers, or a map, found {type(given).__name__}")
        elif given is not None and getattr(given, "optimizer", optimizer.given) is not optimizer.given:
            raise ValueError("lr_scheduler: expected one of the optimizer that is passed, found one of another")
        self.optimizer = optimizer

    def step(self) -> None:
        """Takes a step of the object, after a step of the trainer."""
        if self.given is None or self.settings is not None:
            return
        # torch wants a step of the optimizer first: it has no gradients, and changes nothing.
        if self.optimizer.given is not None and type(self.optimizer.given).__name__ in CLASSES:
            self.optimizer.given.step()
        self.given.step()

    def state(self) -> Any:
        """The state of the object, for `save_state`."""
        found = self.given.state_dict() if hasattr(self.given, "state_dict") else None
        if found is None:
            return None
        return {name: value for name, value in found.items() if isinstance(value, (int, float, str, bool, list))}

    def load_state(self, state: Any) -> None:
        """Restores the state, and the learning rate of the optimizer."""
        if state is None or not hasattr(self.given, "load_state_dict"):
            return
        self.given.load_state_dict({**self.given.state_dict(), **state})
        for group, rate in zip(self.optimizer.given.param_groups, state.get("_last_lr") or [], strict=False):
            group["lr"] = rate


def of_transformers(given: "dict[str, Any]") -> "dict[str, Any]":
    """A schedule by the arguments of transformers' get_scheduler."""
    renamed = {"name": "lr_scheduler_type", "type": "lr_scheduler_type", "num_warmup_steps": "warmup_steps", "num_training_steps": "steps"}
    known = ("lr_scheduler_type", "warmup_steps", "steps", "num_cycles", "power", "lr_end", "num_decay_steps")
    found = {renamed.get(name, name): value for name, value in given.items()}
    unknown = [name for name in found if name not in known]
    if unknown:
        raise ValueError(
            f"lr_scheduler: `{unknown[0]}`: expected some of name, num_warmup_steps, num_training_steps, {', '.join(known[3:])}"
        )
    return found
