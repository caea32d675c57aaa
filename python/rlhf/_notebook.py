"""A run in a notebook: one bar with its phase and the time left, a table of the metrics that matter, and samples."""

import html
import importlib
import json
import re
import time
from typing import Any

from rlhf._callbacks import TrainerState

# The metrics that matter, by command: the first of each row that a run has, and its name for people.
METRICS = {
    "sft": (("loss",), ("mean_token_accuracy",), ("eval_loss",), ("grad_norm",), ("learning_rate",)),
    "reward": (("loss",), ("accuracy",), ("margin",), ("eval_loss",), ("eval_accuracy",)),
    "ppo": (("objective/scores", "reward"), ("objective/kl",), ("objective/entropy", "entropy"), ("val/num_eos_tokens",), ("tools/call_frequency",), ("eval/score",)),
    "grpo": (("reward", "objective/scores"), ("reward_std",), ("kl", "objective/kl"), ("completions/mean_length",), ("tools/call_frequency",), ("eval/score",)),
}
METRICS["rloo"] = METRICS["grpo"]
# Metrics of reward functions: the mean of each, where there are several, and what `log_metric` gets.
OF_FUNCTIONS = re.compile(r"rewards/(?P<name>.+)/mean|reward/(?P<logged>.+)")
# Columns of the table at most.
COLUMNS = 12
# Rows of the table: the first and the last ones.
ROWS = 10
# Seconds between two drawings.
LEAST = 0.3


class Display:
    """What a notebook shows of a run; redrawn in place."""

    def __init__(self, command: str, hides_bar: bool = False) -> None:
        self.metrics = METRICS[command]
        self.hides_bar = hides_bar
        self.lines: list[dict[str, Any]] = []
        self.shown_samples: list[dict[str, Any]] = []
        self.state = TrainerState()
        self.now = "starting"
        self.first: tuple[float, int] | None = None
        self.drawn = 0.0
        self.display = importlib.import_module("IPython.display")
        self.handle = self.display.display(self.display.HTML(self.page()), display_id=True)

    def begin(self, state: TrainerState) -> None:
        self.state, self.first = state, (time.monotonic(), state.global_step)
        self.draw(force=True)

    def phase(self, phase: str) -> None:
        self.now = phase
        self.draw()

    def step(self, state: TrainerState) -> None:
        self.state = state
        self.draw()

    def log(self, logs: dict[str, Any]) -> None:
        self.lines.append(logs)
        self.draw()

    def samples(self, samples: list[dict[str, Any]]) -> None:
        self.shown_samples = samples[:3]
        self.draw()

    def close(self) -> None:
        """Shows the end."""
        self.now = "done" if self.state.global_step == self.state.max_steps > 0 else "stopped"
        self.draw(force=True)

    def draw(self, force: bool = False) -> None:
        if self.handle is not None and (force or time.monotonic() - self.drawn > LEAST):
            self.drawn = time.monotonic()
            self.handle.update(self.display.HTML(self.page()))

    def page(self) -> str:
        """The whole as HTML."""
        return "".join([self.bar(), self.table(), self.sample_table()])

    def bar(self) -> str:
        if self.hides_bar:
            return ""
        done, total = self.state.global_step, self.state.max_steps
        bar = f'<progress value="{done}" max="{max(total, 1)}" style="width: 300px"></progress>'
        return f"<div>{bar} {done}/{total} {html.escape(self.now)}{self.left()}</div>"

    def left(self) -> str:
        """The time that is left."""
        if self.first is None or self.state.global_step <= self.first[1] or self.now == "done":
            return ""
        began, at = self.first
        seconds = (time.monotonic() - began) / (self.state.global_step - at) * (self.state.max_steps - self.state.global_step)
        return f", {duration(int(seconds))} left"

    def columns(self) -> list[str]:
        """The metrics of the table: those that matter, and those of reward functions."""
        known = list(dict.fromkeys(name for logs in self.lines for name in logs))
        columns = [next((name for name in names if name in known), None) for names in self.metrics]
        found = [name for name in known if OF_FUNCTIONS.fullmatch(name)]
        means = [name for name in found if name.startswith("rewards/")]
        # The mean of the only reward is the reward.
        own = [name for name in found if name not in means or len(means) > 1]
        return ["step", *(name for name in columns if name is not None), *own][:COLUMNS]

    def table(self) -> str:
        names = self.columns()
        lines = self.lines if len(self.lines) <= ROWS else [self.lines[0], *self.lines[1 - ROWS :]]
        if not lines:
            return ""
        cells = [[number(logs.get(name)) for name in names] for logs in lines]
        return table(names, cells)

    def sample_table(self) -> str:
        if not self.shown_samples:
            return ""
        cells = [[text(row.get("prompt")), response(row), number(row.get("score"))] for row in self.shown_samples]
        return table(["prompt", "response", "score"], cells, texts=2)


def show_texts(names: list[str], cells: list[list[str]]) -> None:
    """Shows a table of texts."""
    display = importlib.import_module("IPython.display")
    display.display(display.HTML(table(names, cells, texts=len(names))))


def table(names: list[str], cells: list[list[str]], texts: int = 0) -> str:
    """A table whose first `texts` columns are texts: a notebook aligns all to the right, without their lines."""
    styles = [' style="text-align: left; white-space: pre-wrap"' if at < texts else "" for at in range(len(names))]
    head = "".join(f"<th{style}>{html.escape(name)}</th>" for name, style in zip(names, styles, strict=True))
    lines = [[f"<td{style}>{html.escape(cell)}</td>" for cell, style in zip(row, styles, strict=True)] for row in cells]
    rows = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def number(value: Any) -> str:
    """A number of a table; nothing for one that is missing."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration(seconds: int) -> str:
    """Minutes and seconds, and hours where there are some."""
    minutes, hours = seconds // 60 % 60, seconds // 3600
    return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"


def text(value: Any) -> str:
    """A text of a table, cut; of a conversation its last message."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    found = str(value if value is not None else "")
    return found if len(found) <= 200 else f"{found[:200]}..."


def response(row: dict[str, Any]) -> str:
    """The response of a row; of one with tools its turns, each part cut."""
    parts = []
    for message in row.get("messages") or []:
        said = text(message.get("content"))
        if message.get("role") != "assistant":
            parts.append(f"<- {said}")
            continue
        parts.extend([said] if said else [])
        for call in message.get("tool_calls") or []:
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            parts.append(text(f"-> {call['function']['name']}({arguments})"))
    return "\n".join(parts) if parts else text(row.get("response"))
