"""From rows as read to examples: labels to indices, held-out rows chosen, values scaled."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.connectors.connector import DataProblem, Preview
from edge_client.connectors.options import HELD_OUT, Options, beside
from edge_client.train.trainer import PADDING, Examples


@dataclass(frozen=True)
class Rows:
    """What one source holds. `x`: [N, …] float32 or int32; `y`: int32 [N] or [N, T].

    Attributes:
        test: bool [N], rows the source itself says are for evaluation; None where it does not say.
        schema: (name, kind) of what was found.
    """

    x: npt.NDArray[Any]
    y: npt.NDArray[np.int32]
    test: npt.NDArray[np.bool_] | None
    schema: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Loaded:
    train: Examples
    held_out: Examples
    schema: tuple[tuple[str, str], ...]


class RowsConnector:
    """A Connector over rows that are read whole, once, when the first method is called."""

    def __init__(self, options: Options, read: Callable[[], Rows]) -> None:
        self._options = options
        self._read = read

    def train(self) -> Examples:
        return self._loaded.train

    def held_out(self) -> Examples:
        return self._loaded.held_out

    def preview(self) -> Preview:
        train, test = self._loaded.train, self._loaded.held_out
        y = np.concatenate([train.y.reshape(-1), test.y.reshape(-1)])
        found, counts = np.unique(y[y != PADDING], return_counts=True)
        names = self._options.classes
        return Preview(
            schema=self._loaded.schema,
            rows=len(train),
            held_out=len(test),
            input_shape=tuple(int(n) for n in train.x.shape[1:]),
            input_dtype=str(train.x.dtype),
            label_shape=tuple(int(n) for n in train.y.shape[1:]),
            labels={
                names[index] if names else str(index): int(count)
                for index, count in zip(found.tolist(), counts, strict=True)
            },
        )

    @cached_property
    def _loaded(self) -> _Loaded:
        """The rows in their two parts. What was read is let go of, so that it is not in memory twice."""
        rows, options = self._read(), self._options
        share = HELD_OUT if options.held_out is None else options.held_out
        test = rows.test if rows.test is not None else chosen(rows.x, rows.y, share)
        train = Examples(np.ascontiguousarray(rows.x[~test]), np.ascontiguousarray(rows.y[~test]))
        kept = Examples(np.ascontiguousarray(rows.x[test]), np.ascontiguousarray(rows.y[test]))
        if options.standardise == "local":
            train, kept = standardised(train, kept)
        return _Loaded(train, kept, rows.schema)


def chosen(x: npt.NDArray[Any], y: npt.NDArray[np.int32], share: float) -> npt.NDArray[np.bool_]:
    """Which rows are held out, by a hash of each row's own bytes, before any scaling: about `share` of them.

    Never all of them: a device with a row or two trains on what it has.
    """
    test = np.zeros(len(x), np.bool_)
    if share:
        bound = int(share * 2**64)
        for index in range(len(x)):
            digest = hashlib.blake2b(x[index].tobytes(), digest_size=8)
            digest.update(y[index].tobytes())
            test[index] = int.from_bytes(digest.digest(), "little") < bound
    return np.zeros_like(test) if test.all() else test


def standardised(train: Examples, test: Examples) -> tuple[Examples, Examples]:
    """Mean 0 and deviation 1 over the training rows, value by value of an example; gaps (NaN) become 0.

    What is constant in the training rows becomes 0. One column at a time in float64, so it takes no second copy.
    """
    columns = math.prod(train.x.shape[1:])
    x, kept = train.x.reshape(-1, columns), test.x.reshape(-1, columns)
    for column in range(columns):
        values = x[:, column].astype(np.float64)
        present = values[~np.isnan(values)]
        mean = float(present.mean()) if present.size else 0.0
        deviation = float(present.std()) if present.size else 0.0
        # A constant's computed deviation is rounding error, not 0.
        factor = 1 / deviation if deviation > 1e-12 * abs(mean) else 0.0
        for part in (x, kept):
            part[:, column] = np.nan_to_num((part[:, column].astype(np.float64) - mean) * factor)
    return Examples(x.reshape(train.x.shape), train.y), Examples(kept.reshape(test.x.shape), test.y)


def class_index(value: object, classes: Sequence[str], place: str) -> int:
    """A label as the index of its class.

    Raises:
        DataProblem: it is no class, or text without `classes` to look it up in. `place` begins the message.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = "" if value is None else str(value).strip()
    if not text:
        raise DataProblem(f"{place}: no label there; fill it in or remove the row")
    if classes:
        if text not in classes:
            known = ", ".join(classes[:20])
            raise DataProblem(f"{place}: label {_short(text)} is none of the option classes: {known}")
        return classes.index(text)
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise DataProblem(
            f"{place}: label {_short(text)} is no class index 0, 1, …; for named classes give the option classes, a list "
            "of the names in the same order on every device"
        )
    return int(text)


def shaped(x: npt.NDArray[Any], shape: Sequence[int], place: str) -> npt.NDArray[Any]:
    """`x` with examples of `shape`, where one is asked for.

    Raises:
        DataProblem: the number of values differs.
    """
    if not shape:
        return x
    values = int(np.prod(x.shape[1:]))
    if int(np.prod(shape)) != values:
        raise DataProblem(f"{place}: an example has {values} values, option shape is {list(shape)}")
    return x.reshape(len(x), *shape)


def scaled(x: npt.NDArray[Any], factor: float | None) -> npt.NDArray[Any]:
    return x if factor is None else (x * np.float32(factor)).astype(np.float32, copy=False)


def all_rows(path: Path, test_path: str | None, read: Callable[[Path], Rows]) -> Rows:
    """The rows that `read` finds at `path`, and for evaluation those of the option `test_path`, where there is one."""
    rows = read(path)
    if test_path is None:
        return rows
    other = beside(path, test_path)
    return joined(rows, read(other), str(other))


def joined(train: Rows, test: Rows, place: str) -> Rows:
    """Rows of two sources, the second for evaluation.

    Raises:
        DataProblem: their examples differ in shape.
    """
    if train.x.shape[1:] != test.x.shape[1:] or train.y.shape[1:] != test.y.shape[1:]:
        raise DataProblem(
            f"{place}: examples are {list(test.x.shape[1:])}, those to train on {list(train.x.shape[1:])}"
        )
    told = np.concatenate([np.zeros(len(train.x), np.bool_), np.ones(len(test.x), np.bool_)])
    x, y = np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y])
    return Rows(x, y, told, train.schema)


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else repr(text[:37]) + "…"
