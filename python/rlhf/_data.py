"""Writes the rows of a dataset to a file for the program, one at a time."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rlhf._errors import Unsupported

Row = Mapping[str, Any]


def is_name(dataset: Any) -> bool:
    """Whether a dataset is a path or a name on the hub, which the program reads itself."""
    return isinstance(dataset, (str, os.PathLike))


def rows(dataset: Any, what: str) -> Iterator[Row]:
    """The rows of a dataset: of `datasets`, a list or other iterable of maps, a data frame of pandas or polars, or a map of columns."""
    if hasattr(dataset, "iter_rows"):  # polars
        return iter(dataset.iter_rows(named=True))
    if hasattr(dataset, "itertuples"):  # pandas
        names = [str(name) for name in dataset.columns]
        return (dict(zip(names, values, strict=True)) for values in dataset.itertuples(index=False, name=None))
    if isinstance(dataset, Mapping):
        if all(isinstance(column, (list, tuple)) for column in dataset.values()):
            names = [str(name) for name in dataset]
            return (dict(zip(names, values, strict=True)) for values in zip(*dataset.values(), strict=True))
        splits = ", ".join(map(str, dataset))
        raise Unsupported(
            f"{what}: expected one dataset, found a map of several ({splits}): choose one, as in dataset[{next(iter(dataset))!r}]"
        )
    if isinstance(dataset, Iterable):
        return iter(dataset)
    raise TypeError(f"{what}: expected a dataset, a list of maps, a data frame, a path or a name, found {type(dataset).__name__}")


def write(dataset: Any, path: str, what: str, convert: "Callable[[Row], Row] | None" = None) -> int:
    """Writes the rows of a dataset as lines of JSON, and returns their number."""
    number = 0
    with open(path, "w", encoding="utf-8") as file:
        for number, row in enumerate(rows(dataset, what), 1):
            if not isinstance(row, Mapping):
                raise TypeError(f"{what}: row {number}: expected a map of columns, found {type(row).__name__}")
            if convert is not None:
                row = convert(row)
            try:
                line = json.dumps(row, ensure_ascii=False, default=plain, allow_nan=False)
            except (TypeError, ValueError):
                raise cannot_write(row, number, what) from None
            file.write(line + "\n")
    if number == 0:
        raise ValueError(f"{what}: expected rows, found none")
    return number


def plain(value: Any) -> Any:
    """A value that JSON does not have, as one that it has: of NumPy, torch, pandas, datetime."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (os.PathLike,)):
        return os.fspath(value)
    raise TypeError


def cannot_write(row: Row, number: int, what: str) -> Exception:
    """The error of a row that is not plain data, by its column."""
    for name, value in row.items():
        try:
            json.dumps(value, default=plain, allow_nan=False)
        except (TypeError, ValueError):
            kind = type(value).__name__
            hint = "; leave the column out" if kind != "float" else "; a missing value is None"
            return TypeError(f"{what}: row {number}: column `{name}`: expected texts, numbers, lists and maps, found {kind}{hint}")
    return TypeError(f"{what}: row {number}: expected columns with texts as names")


class Data:
    """The datasets of a run, in the folder `data` of its inputs."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.join(folder, "data")

    def _place(self, dataset: Any, split: str, what: str, convert: "Callable[[Row], Row] | None") -> None:
        """Writes one split, or links to its file."""
        os.makedirs(self.folder, exist_ok=True)
        for name in os.listdir(self.folder):
            if name.startswith(f"{split}."):
                os.remove(os.path.join(self.folder, name))
        if not is_name(dataset):
            write(dataset, os.path.join(self.folder, f"{split}.jsonl"), what, convert)
            return
        path = os.path.abspath(os.fspath(dataset))
        if not os.path.isfile(path):
            raise Unsupported(
                f"{what} = {os.fspath(dataset)}: expected a file or a dataset object beside another dataset, found a folder or a name"
            )
        stem, ending = os.path.splitext(path)
        if ending in (".gz", ".zst"):
            ending = os.path.splitext(stem)[1] + ending
        os.symlink(path, os.path.join(self.folder, f"{split}{ending}"))

    def settings(self, train: Any, evaluation: Any, separate: bool, convert: "Callable[[Row], Row] | None" = None) -> dict[str, Any]:
        """Writes the datasets, and returns the settings that name them.

        Args:
            separate: whether the command has `eval_dataset_name`, and not splits of one folder alone.
        """
        if is_name(train) and convert is not None:
            raise Unsupported("formatting_func: expected a dataset object to format, found a path or a name; load it first")
        if is_name(train) and evaluation is None:
            return {"dataset_name": [path_or_name(train)]}
        if is_name(train) and separate and is_name(evaluation):
            return {"dataset_name": [path_or_name(train)], "eval_dataset_name": path_or_name(evaluation)}
        self._place(train, "train", "train_dataset", convert)
        settings: dict[str, Any] = {"dataset_name": [self.folder]}
        if evaluation is not None:
            self._place(evaluation, "test", "eval_dataset", convert)
        return settings


def path_or_name(value: Any) -> str:
    """An absolute path if there is one; else a name on the hub, as it is."""
    text = str(os.fspath(value))
    return os.path.abspath(text) if os.path.exists(text) or text.startswith((".", "/", "~")) else text
