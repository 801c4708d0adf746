"""From rows as read to examples: held-out rows chosen, values scaled or standardised."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import DataProblem, Preview
from edge_client.data.examples import PADDING, Examples
from edge_client.data.labels import standardised
from edge_client.data.options import HELD_OUT, Options, beside
from edge_client.data.standardise import Moments, local_moments


@dataclass(frozen=True)
class Rows:
    """What one source holds.

    Attributes:
        x: [N, …] float32 or int32; float64 where it is to be standardised.
        y: int32 [N] or [N, T]; float64 [N] of quantities, in their own unit.
        test: bool [N], rows the source itself says are for evaluation; None where it does not.
        schema: (name, kind) of every column or array.
        categories: places in an example that belong to one-hot categories and are never standardised.
        standardised: places in an example whose numbers arrive standardised, so that only gaps are filled.
        moments: what the values are scaled by, where that is given.
    """

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    test: npt.NDArray[np.bool_] | None
    schema: tuple[tuple[str, str], ...]
    categories: tuple[int, ...] = ()
    standardised: tuple[int, ...] = ()
    moments: Moments | None = None

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """`y`, or None if no row has a label. A quantity of -1 is one, unlike a class of `PADDING`."""
        return self.y if self.y.dtype.kind == "f" or (self.y != PADDING).any() else None


@dataclass(frozen=True)
class _Loaded:
    train: Examples
    held_out: Examples
    schema: tuple[tuple[str, str], ...]
    moments: Moments | None


class RowsConnector:
    """A Connector over rows that are all read when the first method is called."""

    def __init__(self, options: Options, read: Callable[[], Rows]) -> None:
        self._options = options
        self._read = read

    def train(self) -> Examples:
        return self._loaded.train

    def held_out(self) -> Examples:
        return self._loaded.held_out

    @property
    def moments(self) -> Moments | None:
        """What its rows are scaled by, if they are."""
        return self._loaded.moments

    def preview(self) -> Preview:
        train, test = self._loaded.train, self._loaded.held_out
        y = np.concatenate([train.y.reshape(-1), test.y.reshape(-1)])
        return Preview(
            schema=self._loaded.schema,
            rows=len(train),
            held_out=len(test),
            input_shape=tuple(int(n) for n in train.x.shape[1:]),
            input_dtype=str(train.x.dtype),
            label_shape=tuple(int(n) for n in train.y.shape[1:]),
            labels=self._labels(y),
        )

    def _labels(self, y: npt.NDArray[Any]) -> dict[str, int]:
        """Rows by label; of quantities their range and number."""
        if scale := self._options.label_scale:
            own = y.astype(np.float64) * scale[1] + scale[0]
            return {f"{own.min():.6g} to {own.max():.6g}": len(own)} if len(own) else {}
        indices, counts = np.unique(y[y != PADDING], return_counts=True)
        names = self._options.classes
        return {
            names[index] if names else str(index): int(count)
            for index, count in zip(indices.tolist(), counts, strict=True)
        }

    @cached_property
    def _loaded(self) -> _Loaded:
        """The rows in their two parts. What was read is released, so that it is not in memory twice."""
        rows, options = self._read(), self._options
        share = HELD_OUT if options.held_out is None else options.held_out
        test = rows.test if rows.test is not None else held_out_rows(rows.x, rows.y, share)
        x, y, schema, moments = rows.x, rows.y, rows.schema, rows.moments
        if options.standardise == "local":
            moments = local_moments(x, ~test, rows.categories, rows.standardised)
        if moments is not None:
            x = moments.apply(x)
        if options.label_scale:
            y = standardised(y, options.label_scale)
        del rows
        return _Loaded(Examples(x[~test], y[~test]), Examples(x[test], y[test]), schema, moments)


def held_out_rows(x: npt.NDArray[Any], y: npt.NDArray[Any], share: float) -> npt.NDArray[np.bool_]:
    """Which rows are held out, by a hash of each row's own bytes before it is standardised: about `share` of them.

    Never all of them: a device with one or two rows trains on them.
    """
    test = np.zeros(len(x), np.bool_)
    if share:
        bound = int(share * 2**64)
        dtype = np.float32 if x.dtype == np.float64 else x.dtype
        for index in range(len(x)):
            digest = hashlib.blake2b(x[index].astype(dtype, copy=False).tobytes(), digest_size=8)
            digest.update(y[index].tobytes())
            test[index] = int.from_bytes(digest.digest(), "little") < bound
    return np.zeros_like(test) if test.all() else test


def shaped(x: npt.NDArray[Any], shape: Sequence[int], place: str) -> npt.NDArray[Any]:
    """`x` with examples of `shape`, where the options give one.

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


def files_connector(options: Options, path: Path, read: Callable[[Path], Rows]) -> RowsConnector:
    """A Connector to the rows that `read` returns for `path`, and for evaluation those of the option `test_path`."""

    def rows() -> Rows:
        if options.test_path is None:
            return read(path)
        other = beside(path, options.test_path)
        return combined(read(path), read(other), str(other))

    return RowsConnector(options, rows)


def combined(train: Rows, test: Rows, place: str) -> Rows:
    """Rows of two sources, the second for evaluation.

    Raises:
        DataProblem: their examples differ in shape.
    """
    if train.x.shape[1:] != test.x.shape[1:] or train.y.shape[1:] != test.y.shape[1:]:
        raise DataProblem(
            f"{place}: examples are {list(test.x.shape[1:])}, those to train on {list(train.x.shape[1:])}"
        )
    x, y = np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y])
    return replace(train, x=x, y=y, test=np.arange(len(x)) >= len(train.x))
