"""Numbers of response tokens in TRL's layout: of whole sequences, `[rows, longest sequence - 1]`.

Column t is about token t + 1, so a response to n tokens begins in column n - 1. The program has them from column 0 on.
"""

from typing import Any

from rlhf._arrays import Array, find_torch, plain


class Layout:
    """The places of responses in the columns of whole sequences; those of an encoder-decoder are its decoder's."""

    def __init__(self, queries: "list[list[int]]", responses: "list[list[int]]", is_encoder_decoder: bool) -> None:
        self.starts = [0 if is_encoder_decoder else len(query) - 1 for query in queries]
        self.lengths = [len(response) for response in responses]
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        self.width = max(ends, default=0)

    def whole(self, slots: "list[list[Any]]", zero: Any = 0.0) -> "list[list[Any]]":
        """Rows of slots as rows of columns, `zero` outside the responses."""
        rows = []
        for start, length, row in zip(self.starts, self.lengths, slots, strict=True):
            rows.append([zero] * start + list(row[:length]) + [zero] * (self.width - start - length))
        return rows

    def slots(self, rows: Any, what: str) -> "list[list[Any]]":
        """Rows of columns as rows of slots."""
        rows = plain(rows)
        longest = max(self.lengths, default=0)
        if len(rows) != len(self.lengths) or any(len(row) < self.width for row in rows):
            raise ValueError(f"{what}: expected {len(self.lengths)} rows of {self.width} columns, as batched_forward_pass returns them")
        found = []
        for start, length, row in zip(self.starts, self.lengths, rows, strict=True):
            found.append(list(row[start : start + length]) + [0.0] * (longest - length))
        return found


def tensor(rows: Any, kind: str = "float32") -> Any:
    """Nested lists as a tensor, where torch is there."""
    torch = find_torch()
    if torch is None:
        return rows
    return without_gradient(torch.tensor(rows, dtype=getattr(torch, kind)))


def value(found: Array) -> Any:
    """An array as a tensor, where torch is there."""
    made = found.value()
    return made if find_torch() is None else without_gradient(made)


def scalar(number: "float | None") -> Any:
    """A number as a tensor, where torch is there."""
    number = float("nan") if number is None else number
    torch = find_torch()
    return number if torch is None else without_gradient(torch.tensor(number))


_CLASSES: dict[str, Any] = {}


def without_gradient(found: Any) -> Any:
    """The tensor with a `backward` that says where the gradients are."""
    if "tensor" not in _CLASSES:
        from rlhf._errors import Unsupported
        from rlhf.legacy._models import BACKWARD

        class ProgramTensor(type(found.detach())):  # type: ignore[misc]
            """A tensor of the program's numbers, which has no graph."""

            def backward(self, *args: Any, **kwargs: Any) -> None:
                """Refuses, and says what to write."""
                if self.requires_grad:
                    super().backward(*args, **kwargs)
                    return
                raise Unsupported(f"backward: these numbers have no graph in this process: {BACKWARD}")

            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                """Makes parameters of the caller's own, such as `zeros_like(x, requires_grad=True)`, plain tensors."""
                if not (kwargs and kwargs.get("requires_grad")):
                    return super().__torch_function__(func, types, args, kwargs or {})
                with find_torch()._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)

        _CLASSES["tensor"] = ProgramTensor
    return found.as_subclass(_CLASSES["tensor"])
