"""The channel to the program: it connects to a socket of this process and tells what happens, one line of JSON for each event.

Its processes that call reward functions, tools and environments connect to the same socket. docs/internals/driver.md has the protocol.
"""

import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
# Seconds between two looks at the program where the system cannot tell when it ends.
TICK = 0.2


class Connection:
    """One connection: its lines so far, and what it is for once its first line is there."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.read = bytearray()
        self.reward: int | None = None
        # What serves its requests, where they are of tools and environments.
        self.service: Any = None

    def lines(self) -> "list[Message] | None":
        """The lines that have come; None at the end."""
        try:
            part = self.stream.recv(1 << 16)
        except ConnectionError:
            return None
        if not part:
            return None
        self.read += part
        if b"\n" not in part:
            return []
        *whole, rest = bytes(self.read).split(b"\n")
        self.read = bytearray(rest)
        return [json.loads(line) for line in whole]

    def reply(self, message: Message) -> None:
        """Sends a line; a program that is gone reads none."""
        # The other end closes its side while it dies: how it has ended is known soon.
        with contextlib.suppress(OSError):
            self.stream.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self.stream.close()
        if self.service is not None:
            self.service.stop()


class Channel:
    """A socket that one run of the program connects to."""

    def __init__(self) -> None:
        # The path of a socket has at most 107 bytes.
        base = tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="rlhf-", dir=base if len(base) < 60 else "/tmp")
        self.path = os.path.join(self.folder, "driver")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)

    def run(self, process: "subprocess.Popen[bytes]", receive: Callable[[Connection, Message], None]) -> int:
        """Passes all messages on until the program has ended, and returns its exit code."""
        ended = watch_end(process)
        if ended is not None:
            self.selector.register(ended, selectors.EVENT_READ)
        try:
            while process.poll() is None:
                self._turn(receive, ended, TICK if ended is None else None)
            # What it has written before its end.
            while self._turn(receive, ended, 0):
                pass
        finally:
            if ended is not None:
                self.selector.unregister(ended)
                os.close(ended)
        return process.wait()

    def _turn(self, receive: Callable[[Connection, Message], None], ended: "int | None", timeout: "float | None") -> bool:
        """Waits for messages and passes them on; returns whether there were some."""
        any_read = False
        for key, _ in self.selector.select(timeout):
            if key.fileobj is self.listener:
                stream, _ = self.listener.accept()
                self.selector.register(stream, selectors.EVENT_READ, Connection(stream))
                any_read = True
            elif key.fileobj == ended:
                continue
            else:
                any_read |= self._read(key.data, receive)
        return any_read

    def _read(self, connection: Connection, receive: Callable[[Connection, Message], None]) -> bool:
        lines = connection.lines()
        if lines is None:
            self.selector.unregister(connection.stream)
            connection.close()
            return False
        for line in lines:
            if "reward" in line:
                connection.reward = line["reward"]
            else:
                receive(connection, line)
        return True

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, Connection):
                key.data.close()
        self.selector.close()
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def watch_end(process: "subprocess.Popen[bytes]") -> "int | None":
    """A file that can be read when the process has ended, if the system has one."""
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return None
