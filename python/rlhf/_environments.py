"""Tools and environments of the user's process, called as TRL calls them: rlhf/_worker.py has how."""

import inspect
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rlhf import _worker
from rlhf._errors import Unsupported
from rlhf._rewards import name_of

# Limits of processes, which the user's own is not put under.
OF_PROCESSES = ("tool_memory", "tool_processes", "tool_env")


class Environments:
    """The tools and environments of a trainer.

    Args:
        tools: functions, or texts as the program writes them, `module.function`.
        factory: a class, or several by name; or texts as the program writes them: `openenv:ws://host:port`, `command:line`, `module.Class`.
    """

    def __init__(self, tools: Any, factory: Any) -> None:
        given = list(tools) if isinstance(tools, (list, tuple)) else [] if tools is None else [tools]
        if isinstance(factory, (list, tuple)):
            raise TypeError("environment_factory: expected a class, or a map of names to classes, found a list")
        named = list(factory.items()) if isinstance(factory, Mapping) else [] if factory is None else [(None, factory)]
        values = [*given, *(value for _, value in named)]
        self.tools: list[Callable[..., Any]] = []
        # Name or None, what messages call it, and the class.
        self.classes: list[tuple[str | None, str, Callable[..., Any]]] = []
        # Settings of the program.
        self.written: dict[str, Any] = {}
        # Whether they are of this process.
        self.are_here = bool(values) and not all(isinstance(value, str) for value in values)
        self.has_environment = bool(named)
        if not self.are_here:
            self._write(given, named)
            return
        if text := next((value for value in values if isinstance(value, str)), None):
            raise Unsupported(f"`{text}`: expected functions and classes beside others, found a text; write all as texts, or import it")
        self.tools = [checked_tool(tool) for tool in given]
        names = [tool.__name__ for tool in self.tools]
        if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
            raise ValueError(f"tools: `{twice}`: expected names that differ")
        for name, factory_ in named:
            if not callable(factory_):
                raise TypeError(f"environment_factory: expected a class without arguments, found {type(factory_).__name__}")
            self.classes.append((None if name is None else str(name), name_of(factory_), factory_))
        self.written = {"environment_factory": ["driver:tools" if self.tools else "driver:"]}

    def _write(self, tools: list[str], named: "list[tuple[str | None, str]]") -> None:
        if tools:
            self.written["tools"] = tools
        if named:
            self.written["environment_factory"] = [text if name is None else f"{name}={text}" for name, text in named]

    def settings(self, own: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """The settings of the program; `own` are those of the user. A call takes as long as it takes, as in TRL, unless the user says less."""
        if not self.are_here:
            return dict(self.written)
        for name in OF_PROCESSES:
            if own.get(name):
                raise Unsupported(
                    f"{name} = {own[name]}: expected none, as tools and environments run in this process; name them as texts, "
                    "`module.function`, for a process of their own"
                )
        return {**self.written, **{name: limit for name in ("tool_timeout", "reset_timeout") if name not in own}}


def checked_tool(tool: Any) -> Callable[..., Any]:
    """Refuses what the model cannot call."""
    if inspect.isclass(tool) or not callable(tool):
        found = tool.__name__ if inspect.isclass(tool) else type(tool).__name__
        raise TypeError(f"tools: expected functions, found {found}")
    if not hasattr(tool, "__name__"):
        raise TypeError(f"tools: expected functions with a name, found {type(tool).__name__}; write a function that calls it")
    try:
        _worker.schema_of(tool)
    except _worker.Failure as failure:
        raise ValueError(f"tools: {failure}") from None
    return tool  # type: ignore[no-any-return]


class Service(_worker.Worker):  # type: ignore[misc,unused-ignore]
    """Serves one process of the program: each rank has one, with instances of its own.

    Args:
        send: sends a reply.
        fail: is told of each exception that fails a request.
        is_kept: whether such an exception ends the row alone, and not the run.
    """

    def __init__(self, of: Environments, limit: int, send: Callable[[Any], None], fail: Callable[[BaseException], None], is_kept: bool):
        self._send, self._fail, self._is_kept = send, fail, is_kept
        self._lock, self._process = threading.Lock(), os.getpid()
        super().__init__(of.tools, of.classes, limit, self._reply)

    def _reply(self, reply: Any) -> None:
        if os.getpid() != self._process:
            # A child that a tool has forked, and that has returned from it too.
            os._exit(0)
        with self._lock:
            self._send(reply)

    def report(self, error: BaseException) -> None:
        """Prints nothing: the model sees what a tool raises, as in TRL, and `train()` raises the rest."""

    def failed(self, error: BaseException) -> None:
        """Notes an exception that `train()` is to raise."""
        if self._is_kept and isinstance(error, Exception):
            _worker.print_traceback(error)
            return
        self._fail(ValueError(str(error)) if isinstance(error, _worker.Failure) else error)


def begin(
    of: Environments, limit: int, send: Callable[[Any], None], fail: Callable[[BaseException], None], is_kept: bool
) -> "Service | None":
    """Makes the environments and tells the program of them; None, and the reason to it, if that fails."""
    try:
        service = Service(of, limit, send, fail, is_kept)
    except _worker.Failure as failure:
        send({"id": 0, "error": str(failure)})
        fail(failure.__cause__ or ValueError(f"environment_factory: {failure}"))
        return None
    send(service.known([]))
    return service
