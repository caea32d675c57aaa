"""Ctrl-C while the program trains: the first one lets it finish its update, the second one ends it."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any


class Interrupts:
    """The requests to stop, as they come."""

    def __init__(self) -> None:
        self.count = 0
        # Whether code of the user is running, which a second request interrupts.
        self.in_user_code = False
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def watch(self, process: "subprocess.Popen[bytes]") -> Iterator[None]:
        """Passes SIGINT on to the program; only the main thread gets it, and a handler of the user's own stays."""
        self._process = process
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        before = signal.signal(signal.SIGINT, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _receive(self, number: int, frame: Any) -> None:
        self.count += 1
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGINT)
        if self.count > 1 and self.in_user_code:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def user_code(self) -> Iterator[None]:
        self.in_user_code = True
        try:
            yield
        finally:
            self.in_user_code = False


def end(process: "subprocess.Popen[bytes]", wait: float = 30) -> None:
    """Ends a program that nobody drives any more: it saves, if it can in time."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def say(text: str) -> None:
    """A line for the user; a closed stream shows none."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)
