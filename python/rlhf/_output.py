"""Where the output of the program goes: to the terminal or pipe of this process itself, or through Python's streams where these are
something else, as in a notebook, in tests and after a redirection."""

import contextlib
import subprocess
import sys
import threading
from typing import Any, BinaryIO


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    # Asking must not import IPython.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell is not None and hasattr(shell, "kernel")


def is_own(stream: Any, number: int) -> bool:
    """Whether a stream of Python is the process's own one."""
    try:
        return bool(stream is not None and stream.fileno() == number)
    except (AttributeError, OSError, ValueError):
        return False


def is_usable(stream: Any) -> bool:
    return stream is not None and not getattr(stream, "closed", False)


# The beginnings of lines that are no part of what a table shows.
TO_BE_SEEN = ("warning", "note", "error", "! ", "stopp")


class Output:
    """The streams of a program."""

    def __init__(self, silent: bool = False) -> None:
        self.tail: list[str] = []
        self._threads: list[threading.Thread] = []
        both = is_own(sys.stdout, 1) and is_own(sys.stderr, 2) and not silent
        self._inherits = both
        self._silent = silent

    def arguments(self) -> dict[str, Any]:
        """The arguments of `subprocess.Popen`."""
        if self._inherits:
            # What this process has printed comes before.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            return {}
        # Metrics on standard output would be beside the table of a notebook.
        out = subprocess.PIPE if is_usable(sys.stdout) and not self._silent else subprocess.DEVNULL
        return {"stdout": out, "stderr": subprocess.PIPE}

    def read(self, process: "subprocess.Popen[bytes]") -> None:
        """Passes on what the program writes."""
        for source, target, keeps in ((process.stdout, sys.stdout, False), (process.stderr, sys.stderr, True)):
            if source is not None:
                thread = threading.Thread(target=self._pass_on, args=(source, target, keeps), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _pass_on(self, source: BinaryIO, target: Any, keeps: bool) -> None:
        for line in source:
            text = line.decode("utf-8", "replace")
            if keeps and text.strip():
                self.tail = [*self.tail[-20:], text.rstrip()]
            # Beside the table of a notebook.
            if self._silent and not text.startswith(TO_BE_SEEN):
                continue
            # A stream may be closed while the program writes.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                target.write(text)
                target.flush()
        source.close()

    def join(self) -> None:
        """Waits for the last lines."""
        for thread in self._threads:
            thread.join(5)
