"""Numbers of the caller as bytes for the program, and back: tensors where torch is there, else lists."""

import array
import sys
from typing import Any

# The types of a frame, by name: those of `array`, which has no truth values.
CODES = {"int64": "q", "int32": "i", "float32": "f", "float64": "d", "bool": "B"}


class Array:
    """Numbers of one type in a shape, as a frame has them."""

    def __init__(self, dtype: str, shape: "list[int]", data: bytes) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data

    def flat(self) -> "list[Any]":
        """All numbers in order."""
        numbers = array.array(CODES[self.dtype])
        numbers.frombytes(self.data)
        if sys.byteorder == "big":
            numbers.byteswap()
        return [bool(number) for number in numbers] if self.dtype == "bool" else numbers.tolist()

    def lists(self) -> Any:
        """The numbers as nested lists."""
        return nested(self.flat(), self.shape)

    def value(self) -> Any:
        """A tensor where torch is there, else nested lists."""
        torch = find_torch()
        if torch is None:
            return self.lists()
        kind = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "float64": torch.float64, "bool": torch.bool}
        if not self.data:
            return torch.zeros(self.shape, dtype=kind[self.dtype])
        return torch.frombuffer(bytearray(self.data), dtype=kind[self.dtype]).reshape(self.shape)


class Rows:
    """Rows of different lengths, whose numbers are one after another."""

    def __init__(self, numbers: Array, lengths: "list[int]") -> None:
        self.numbers = numbers
        self.lengths = lengths

    def lists(self) -> "list[list[Any]]":
        """The rows as lists."""
        flat, found, start = self.numbers.flat(), [], 0
        for length in self.lengths:
            found.append(flat[start : start + length])
            start += length
        return found


def nested(flat: "list[Any]", shape: "list[int]") -> Any:
    """A list as lists of this shape."""
    if not shape:
        return flat[0]
    if len(shape) == 1:
        return flat
    size = 1
    for number in shape[1:]:
        size *= number
    return [nested(flat[row * size : (row + 1) * size], shape[1:]) for row in range(shape[0])]


def packed(dtype: str, flat: "list[Any]", shape: "list[int]") -> Array:
    """A list of numbers as an array."""
    numbers = array.array(CODES[dtype], flat)
    if sys.byteorder == "big":
        numbers.byteswap()
    return Array(dtype, shape, numbers.tobytes())


def find_torch() -> Any:
    """torch, where it can be imported."""
    if "torch" in sys.modules:
        return sys.modules["torch"]
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return torch


def plain(value: Any) -> Any:
    """Tensors and arrays as lists, also within lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def ids(value: Any, what: str) -> "list[int]":
    """A row of token ids."""
    row = plain(value)
    # A batch of one row.
    while isinstance(row, list) and len(row) == 1 and isinstance(row[0], list):
        row = row[0]
    if not isinstance(row, list) or not all(isinstance(number, int) for number in row):
        raise TypeError(f"{what}: expected a row of token ids, found {type(value).__name__}")
    return row


def rows_of_ids(rows: "list[list[int]]", dtype: str = "int64") -> Rows:
    """Rows of token ids for the program."""
    flat = [number for row in rows for number in row]
    try:
        return Rows(packed(dtype, flat, [len(flat)]), [len(row) for row in rows])
    except OverflowError:
        raise ValueError(f"token ids: expected numbers of 64 bits, found {max(flat, key=abs)}") from None


def matrix(value: Any, what: str, dtype: str = "float32") -> Array:
    """A tensor, array or nested list of two dimensions for the program."""
    rows = plain(value)
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise TypeError(f"{what}: expected a tensor of two dimensions, or a list of rows, found {type(value).__name__}")
    width = len(rows[0]) if rows else 0
    if any(len(row) != width for row in rows):
        raise ValueError(f"{what}: expected rows of one length, found others")
    flat = [number for row in rows for number in row]
    if dtype == "bool":
        flat = [bool(number) for number in flat]
    return packed(dtype, flat, [len(rows), width])


def vector(value: Any, what: str, dtype: str = "float32") -> Array:
    """A tensor, array or list of numbers for the program; each may be a tensor of one number."""
    numbers = plain(value)
    if not isinstance(numbers, list):
        numbers = [numbers]
    found = []
    for number in numbers:
        while isinstance(number, list) and len(number) == 1:
            number = number[0]
        if not isinstance(number, (int, float)):
            raise TypeError(f"{what}: expected one number for each row, found {type(number).__name__}")
        found.append(number)
    return packed(dtype, found, [len(found)])
