"""The exceptions of the package. Each has one line that says what is wrong, where, and what to do."""


class RunError(RuntimeError):
    """A run that has ended by an error of the program; the message is the program's line."""


class Unsupported(NotImplementedError):
    """An argument that cannot be honoured; the message says what to use instead."""


def nearest(name: str, known: "list[str]") -> str:
    """A hint with the known name that is most like `name`, or nothing."""
    import difflib

    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{found[0]}`?" if found else ""
