"""One run of the program, as a trainer sees it: its events become the state, the calls of callbacks, of reward functions and of tools."""

import os
import re
from collections.abc import Callable
from typing import Any

from rlhf import _program, _signals
from rlhf._callbacks import Handler, TrainerControl, TrainerState
from rlhf._driver import Channel, Connection, Message
from rlhf._environments import Environments, begin
from rlhf._errors import RunError
from rlhf._output import Output
from rlhf._rewards import Function, Loop

# A flag of the program's command line.
FLAG = re.compile(r"(?<![\w-])--([a-z_0-9]+)")
# The line of `rlhf launch` about a rank, which has said why.
LAUNCHER = re.compile(r"rank \d+ (exited|was killed)")
# Phases in which the program is not at an update.
BETWEEN = ("saving", "evaluating", "samples", "checking", "")


class Run:
    """A training run."""

    def __init__(
        self,
        args: Any,
        state: TrainerState,
        handler: Handler,
        functions: list[Function],
        display: "Any | None",
        more: dict[str, Any],
        environments: "Environments | None" = None,
    ) -> None:
        self.args, self.state, self.handler, self.functions = args, state, handler, functions
        self.environments = environments
        self.control = TrainerControl()
        # Arguments of hooks, such as the model.
        self.more = more
        self.display = display
        self.warnings: list[str] = []
        self.samples: list[dict[str, Any]] = []
        # The line of an error, as the program reports it.
        self.error = ""
        self.outcome = ""
        # What code of the user has raised.
        self.raised: BaseException | None = None
        self.interrupts = _signals.Interrupts()
        self.loop = Loop()
        self.rows_per_update = self.rows = 0
        self.begun_step = 0
        self.process = os.getpid()
        self.has_begun = False

    def drive(self, arguments: list[str], environ: dict[str, str]) -> None:
        """Runs the program to its end. Raises what ended it early."""
        channel = Channel()
        output = Output(silent=self.display is not None)
        try:
            process = _program.start(arguments, {**environ, "RLHF_DRIVER": channel.path}, **output.arguments())
            output.read(process)
            try:
                with self.interrupts.watch(process):
                    code = channel.run(process, self.receive)
            finally:
                # An exception of this package's own: nobody would drive the program.
                _signals.end(process)
            output.join()
        finally:
            self.loop.close()
            channel.close()
            if self.display is not None:
                self.display.close()
        self.conclude(code, output.tail)

    def conclude(self, code: int, tail: list[str]) -> None:
        """Raises the reason for an end that is not that of a complete run, nor one that a callback asked for."""
        resume = f"trainer.train(resume_from_checkpoint=True) continues after update {self.state.global_step} of {self.state.max_steps}"
        if self.raised is not None:
            if self.state.global_step:
                _signals.say(f"stopped by {type(self.raised).__name__} in your code; {resume}")
            raise self.raised
        if self.interrupts.count and code != 0:
            raise KeyboardInterrupt(f"stopped as requested; {resume}" if self.state.max_steps else "stopped as requested")
        if code == 0 and not self.has_begun:
            raise RunError("the program ended without a run; RLHF_PROGRAM may name one of another version than this package")
        if code != 0:
            raise RunError(self.error or _program.last_line("\n".join(tail)) or _program.ended(code))

    # Events

    def receive(self, connection: Connection, message: Message) -> None:
        if "call" in message:
            connection.reply(self.score(connection.reward, message))
            return
        if "environments" in message or "id" in message:
            self.act(connection, message)
            return
        handle: Callable[[Connection, Message], None] | None = getattr(self, f"on_{message['event']}", None)
        if handle is not None:
            handle(connection, message)

    def score(self, number: "int | None", message: Message) -> Message:
        """The reply to a call of a reward function."""
        function = self.functions[number or 0]
        if self.raised is not None:
            return {"error": "the run ends because of an exception in code of the trainer's process"}
        try:
            with self.interrupts.user_code():
                reply = function.call(message["call"], self.state, self.loop)
        except BaseException as error:
            self.raised = error
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        if os.getpid() != self.process:
            # A child that the function has forked, and that has returned from it too.
            os._exit(0)
        return reply

    def act(self, connection: Connection, message: Message) -> None:
        """Serves a request to tools and environments, of which the first of a connection begins it; the reply may come later."""
        if self.raised is not None or self.environments is None:
            why = "the run ends because of an exception in code of the trainer's process"
            connection.reply({"id": message.get("id", 0), "error": why})
            return
        try:
            with self.interrupts.user_code():
                if "environments" not in message:
                    connection.service.take(message)
                else:
                    is_kept = getattr(self.args, "environment_failure_reward", None) is not None
                    limit = message["environments"]["limit"]
                    connection.service = begin(self.environments, limit, connection.reply, self.fail, is_kept)
        except BaseException as error:
            self.fail(error)
            connection.reply({"id": message.get("id", 0), "error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"})

    def fail(self, error: BaseException) -> None:
        """Ends the run by an exception of the user's code, on any thread."""
        self.raised = self.raised or error

    def call(self, hook: str, **more: Any) -> None:
        """Calls a hook; an exception in it ends the run after its update."""
        if self.raised is not None:
            return
        try:
            with self.interrupts.user_code():
                self.control = self.handler.call(hook, self.args, self.state, self.control, **self.more, **more)
        except BaseException as error:
            self.raised = error

    def on_begin(self, connection: Connection, message: Message) -> None:
        state = self.state
        self.has_begun = True
        state.max_steps, state.global_step = message["total"], message["done"]
        self.rows_per_update, self.rows = message["rows_per_update"], message["rows"]
        # The program has removed the lines after the checkpoint that it continues from.
        done = message["done"]
        state.log_history[:] = [logs for logs in state.log_history if done and logs.get("step", 0) <= done]
        state.num_train_epochs = self.epoch_at(state.max_steps)
        state.epoch = self.epoch_at(state.global_step)
        self.begun_step = state.global_step
        self.call("on_train_begin")
        self.call("on_epoch_begin")
        if self.display is not None:
            self.display.begin(state)
        connection.reply({"replies": bool(self.handler.callbacks) or bool(self.functions)})

    def epoch_at(self, step: int) -> float:
        return step * self.rows_per_update / self.rows if self.rows else 0.0

    def on_phase(self, connection: Connection, message: Message) -> None:
        if message["phase"] not in BETWEEN and self.begun_step <= self.state.global_step < self.state.max_steps:
            self.begun_step = self.state.global_step + 1
            self.call("on_step_begin")
        if self.display is not None:
            self.display.phase(message["phase"])

    def on_step(self, connection: Connection, message: Message) -> None:
        state, before = self.state, self.state.epoch or 0.0
        state.global_step = message["step"]
        state.epoch = self.epoch_at(state.global_step)
        self.call("on_step_end")
        if int(state.epoch + 1e-9) > int(before + 1e-9):
            self.call("on_epoch_end")
            if state.global_step < state.max_steps:
                self.call("on_epoch_begin")
        control = self.control
        asked = {
            "stop": bool(control.should_training_stop) or self.raised is not None,
            "save": bool(control.should_save),
            "evaluate": bool(control.should_evaluate),
        }
        control.should_save = control.should_evaluate = control.should_log = control.should_epoch_stop = False
        if self.display is not None:
            self.display.step(state)
        if self.handler.callbacks or self.functions:
            connection.reply(asked)

    def on_log(self, connection: Connection, message: Message) -> None:
        logs = message["metrics"]
        # Names of transformers' logs.
        if "lr" in logs:
            logs.setdefault("learning_rate", logs["lr"])
        logs.setdefault("epoch", self.epoch_at(message["step"]))
        self.state.log_history.append(logs)
        self.state.episode = int(logs.get("episode") or 0)
        self.state.num_input_tokens_seen = int(logs.get("num_tokens") or 0)
        self.call("on_log", logs=dict(logs))
        evaluation = {name: value for name, value in logs.items() if name.startswith(("eval_", "eval/"))}
        if evaluation:
            self.call("on_evaluate", metrics=evaluation)
            self.compare(evaluation)
        if self.display is not None:
            self.display.log(logs)

    def compare(self, evaluation: dict[str, float]) -> None:
        """Records the best value so far of the metric that chooses the best model, for callbacks that stop early."""
        metric = getattr(self.args, "metric_for_best_model", None)
        value = evaluation.get(metric) if metric else None
        if value is None or metric is None:
            return
        greater = getattr(self.args, "greater_is_better", None)
        greater = not metric.endswith(("loss", "kl")) if greater is None else greater
        best = self.state.best_metric
        if best is None or (value > best if greater else value < best):
            self.state.best_metric = value

    def on_samples(self, connection: Connection, message: Message) -> None:
        self.samples = message["samples"]
        if self.display is not None:
            self.display.samples(message["samples"])

    def on_warning(self, connection: Connection, message: Message) -> None:
        self.warnings.append(message["message"])

    def on_rolled_back(self, connection: Connection, message: Message) -> None:
        self.state.global_step = self.begun_step = message["to"]
        self.state.log_history[:] = [logs for logs in self.state.log_history if logs.get("step", 0) <= message["to"]]

    def on_saved(self, connection: Connection, message: Message) -> None:
        name = os.path.basename(message["dir"])
        if name.startswith("checkpoint-"):
            self.call("on_save")
        elif name == "best":
            self.state.best_model_checkpoint = message["dir"]
            self.state.best_global_step = self.state.global_step

    def on_end(self, connection: Connection, message: Message) -> None:
        self.outcome = message["outcome"]
        self.error = self.error or message["message"] or ""

    def on_error(self, connection: Connection, message: Message) -> None:
        line = in_python(message["message"])
        if self.error and LAUNCHER.match(line):
            return
        # The program reports one line for each setting that it refuses.
        self.error = f"{self.error}\n{line}" if self.error and not self.outcome else line


def in_python(line: str) -> str:
    """A line of the program with its flags as names of settings, unless it has a whole command line."""
    return line if "rlhf " in line else FLAG.sub(r"\1", line)
