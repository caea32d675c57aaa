"""A session of the program `rlhf session`: requests and replies over its pipes. docs/internals/session.md has the protocol."""

import collections
import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from typing import Any

from rlhf import _program
from rlhf._arrays import Array, Rows
from rlhf._errors import RunError

PROTOCOL = 1
# Lines of the program's errors that are kept.
KEPT = 40
# Seconds that a program has to end after its last request.
END = 20.0


class RequestError(RunError):
    """A request that the program has refused; the session goes on.

    `kind` is the cause (`usage`, `order`, `run`, ...), `setting` the name of the wrong parameter or setting, or None.
    """

    def __init__(self, message: str, kind: str, setting: "str | None") -> None:
        super().__init__(message)
        self.kind = kind
        self.setting = setting


class Process:
    """One process of the program."""

    def __init__(self, environ: "dict[str, str]") -> None:
        program, base = _program.command()
        self.process = subprocess.Popen(
            [*program, "session"],
            env=_program.environment(base, environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.lines: collections.deque[str] = collections.deque(maxlen=KEPT)
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A line of its output that is no reply.
        self.foreign: str | None = None
        # Replies are read in a thread: an interrupt while one is waited for loses nothing.
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self._read, self._listen)]
        for thread in self.threads:
            thread.start()

    def _listen(self) -> None:
        """Shows what the program writes to its standard error."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip("\n")
            self.lines.append(text)
            if not text.startswith("error: "):
                with contextlib.suppress(OSError, ValueError):
                    print(text, file=sys.stderr, flush=True)

    def _read(self) -> None:
        """Reads replies with their frames until the program ends."""
        stream = self.process.stdout
        assert stream is not None
        try:
            for line in stream:
                reply = self._parsed(line)
                if reply is None:
                    break
                frames = [self._frame(stream, announced) for announced in reply.get("frames", ())]
                self.replies.put((reply, frames))
        except (OSError, ValueError):
            pass
        self.replies.put(None)

    def _parsed(self, line: bytes) -> "dict[str, Any] | None":
        """A reply; ends the program where the line is none, as nobody knows where the next reply begins."""
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if isinstance(reply, dict):
            return reply
        self.foreign = line.decode(errors="replace").strip()[:200]
        self.process.kill()
        return None

    @staticmethod
    def _frame(stream: Any, announced: "dict[str, Any]") -> Array:
        length = int.from_bytes(stream.read(8), "little")
        data = stream.read(length)
        if len(data) != length:
            raise OSError("the program ended within a frame")
        return Array(announced["dtype"], announced["shape"], data)

    def send(self, data: "list[bytes]") -> None:
        """Writes a request; a program that is gone reads none, and the reply tells."""
        stream = self.process.stdin
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            for part in data:
                stream.write(part)
            stream.flush()

    def receive(self, number: int) -> "tuple[dict[str, Any], list[Array]]":
        """The reply to a request; those to requests whose caller was interrupted are dropped."""
        while True:
            found = self.replies.get()
            if found is None:
                self.replies.put(None)
                raise RunError(self.last_line())
            reply, frames = found
            if reply.get("id") in (number, None):
                return reply, frames

    def last_line(self) -> str:
        """Why the program has ended; one that sends no more replies is ended."""
        try:
            code = self.process.wait(END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if self.foreign is not None:
            return (
                f"the program's output: expected a reply, found the line {self.foreign!r}: a library has written it there; "
                "where it is NCCL, unset NCCL_DEBUG or set NCCL_DEBUG_FILE"
            )
        self.threads[1].join(timeout=1.0)
        line = _program.last_line("\n".join(self.lines)) if code >= 0 else ""
        return line or _program.ended(code)

    def close(self) -> None:
        """Ends the program: it does so when it reads the end of its requests."""
        with contextlib.suppress(OSError, ValueError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Session:
    """The program with the models of one loop; several processes where it has several ranks, which get the same requests.

    Args:
        num_processes (`int`): ranks that are started. Under a launcher such as torchrun this process is one of its ranks, and drives one.
        environ (*optional*): variables of the program beside those of this process, such as a token.
    """

    def __init__(self, num_processes: int = 1, environ: "dict[str, str] | None" = None) -> None:
        self.number = 0
        self.processes = [Process({**of_rank, **(environ or {})}) for of_rank in environments(num_processes)]
        self._close = weakref.finalize(self, close_all, self.processes)
        self.capabilities = self.call("hello", {"protocol": PROTOCOL, "arrays": "frames"})

    def call(self, method: str, params: "dict[str, Any] | None" = None) -> "dict[str, Any]":
        """Sends a request and returns its result, with `Array` and `Rows` where it has them.

        Raises `RequestError` where it is refused, and `RunError` where the program has ended, with its last line.
        """
        self.number += 1
        if not self._close.alive:
            raise RunError(f"{method}: the session is closed")
        data = request(self.number, method, params or {})
        for process in self.processes:
            process.send(data)
        replies = [process.receive(self.number) for process in self.processes]
        for reply, _ in replies:
            if "error" in reply:
                error = reply["error"]
                raise RequestError(error["message"], error["kind"], error["setting"])
        reply, frames = replies[0]
        result: dict[str, Any] = decoded(reply["result"], frames)
        return result

    def close(self) -> None:
        """Ends the program."""
        self._close()


def close_all(processes: "list[Process]") -> None:
    """Ends all processes of a session."""
    for process in processes:
        process.close()


def environments(num_processes: int) -> "list[dict[str, str]]":
    """The variables of each rank that is started."""
    if num_processes == 1:
        return [{}]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"num_processes = {num_processes}: expected 1 under a launcher, each of whose processes drives one rank")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


def request(number: int, method: str, params: "dict[str, Any]") -> "list[bytes]":
    """A request as bytes: its line, and its frames."""
    frames: list[Array] = []

    def value(item: Any) -> Any:
        if isinstance(item, Rows):
            return {**value(item.numbers), "lengths": item.lengths}
        if isinstance(item, Array):
            frames.append(item)
            return {"frame": len(frames) - 1}
        return item

    line: dict[str, Any] = {"id": number, "method": method, "params": {name: value(item) for name, item in params.items()}}
    if frames:
        line["frames"] = [{"dtype": frame.dtype, "shape": frame.shape} for frame in frames]
    try:
        data = [json.dumps(line, allow_nan=False).encode() + b"\n"]
    except ValueError:
        raise ValueError(f"{method}: expected finite numbers, found one that is not") from None
    for frame in frames:
        data += [len(frame.data).to_bytes(8, "little"), frame.data]
    return data


def decoded(value: Any, frames: "list[Array]") -> Any:
    """A result with its arrays in place of their numbers."""
    if isinstance(value, list):
        return [decoded(item, frames) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"frame"}:
        return frames[value["frame"]]
    if value.keys() == {"frame", "lengths"}:
        return Rows(frames[value["frame"]], value["lengths"])
    return {name: decoded(item, frames) for name, item in value.items()}
