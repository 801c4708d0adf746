"""Rows of a table as arrays, a block at a time: whatever the file's size, little of it is held as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from edge_client.data.cells import kind_of
from edge_client.data.connector import DataProblem
from edge_client.data.examples import PADDING
from edge_client.data.labels import Labels, is_empty, quantities
from edge_client.data.options import TableOptions
from edge_client.data.quoting import MAX_NAMES, column_name, column_names, listed
from edge_client.data.rows import Rows, scaled, shaped
from edge_client.data.standardise import Moments
from edge_client.data.table import BLOCK_ROWS, Column, Record, Table, feature, held_out, suggest_column

T = TypeVar("T")

EXCLUDED = "excluded column"
"""The role of a column that is no input."""


class Problems:
    """Collects what is wrong with a file, so that it is mended at once."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def of(self, read: Callable[[], T]) -> T | None:
        """What `read` returns; None if the data is wrong, which `require_none` then says."""
        try:
            return read()
        except DataProblem as problem:
            self._found.append(str(problem))
            return None

    def require_none(self) -> None:
        """Raises DataProblem: with the problems found, a line each."""
        if self._found:
            raise DataProblem("\n".join(dict.fromkeys(self._found[:MAX_NAMES])))


def read_rows_to_predict(table: Table, options: TableOptions) -> Rows:
    """All rows of a table whose label may be missing: no such column, or no label in any row; labels are `PADDING` then.

    Raises:
        DataProblem: as `read_rows`; also if only some rows have a label.
    """
    labelled = options.label in table.columns and options.label not in options.exclude
    return read_rows(table, options, labelled=labelled, may_be_empty=True)


def read_rows(
    table: Table, options: TableOptions, *, labelled: bool = True, may_be_empty: bool = False
) -> Rows:
    """All rows of a table. `labelled`: whether it has the label's column; without it, labels are `PADDING`. `may_be_empty`:
    whether they are `PADDING` too if that column is empty in all rows.

    A cell is a number or text that reads as one; in Parquet it may be a list of numbers. A column of the option
    `categories` is one-hot. A gap is refused, unless columns are standardised: then it is NaN here.

    Raises:
        DataProblem: naming file, line or row, column, the value and what was expected.
    """
    parser = replace(_parser(table, options, labelled=labelled), may_be_empty=may_be_empty)
    records = iter(table.records)
    blocks_of_records = iter(lambda: list(islice(records, BLOCK_ROWS)), [])
    first = next(blocks_of_records, [])
    if not first:
        raise DataProblem(f"{table.name}: has column names but no rows")
    kinds = table.kinds or tuple(
        kind_of(column, table.decimal_comma) for column in zip(*(row for _, row in first), strict=True)
    )
    return parser.rows([parser.block(first), *map(parser.block, blocks_of_records)], kinds)


def feature_names(table: Table, roles: Mapping[str, str], features: Sequence[str] | None) -> tuple[str, ...]:
    """The columns of the input: `features`, or all that have no other role. `roles`: column -> what it is; excluded ones
    need not be there.

    Raises:
        DataProblem: a column is not there, has another role or is listed twice, or none is left.
    """
    for name, role in roles.items():
        if role != EXCLUDED:
            table.index(name, f"the {role}")
    names = (
        tuple(name for name in table.columns if name not in roles) if features is None else tuple(features)
    )
    missing = [name for name in names if name not in table.columns]
    if len(missing) > 1:
        raise DataProblem(
            f"{table.name}: no columns {listed(missing)} for features; {column_names(table.columns)}"
        )
    for name in names:
        table.index(name, "a feature")
        if name in roles:
            raise DataProblem(
                f"{table.name}: column {name!r} is the {roles[name]} and cannot be a feature too"
            )
        if names.count(name) > 1:
            raise DataProblem(f"{table.name}: feature {name!r} is listed twice")
    if not names:
        raise DataProblem(
            f"{table.name}: no column is left for features; {column_names(table.columns)} "
            "(expected columns separated by commas, semicolons, tabs or bars)"
        )
    return names


def _parser(table: Table, options: TableOptions, *, labelled: bool) -> _Parser:
    if labelled and not options.label:
        raise DataProblem(f"{table.name}: the option label is missing; {column_names(table.columns)}")
    roles = dict.fromkeys(options.exclude, EXCLUDED)
    roles |= {options.label: "label"} if labelled else {}
    roles |= {options.split: "split"} if options.split else {}
    problems = Problems()
    features = problems.of(partial(feature_names, table, roles, options.features or None)) or ()
    if options.closed:
        problems.of(
            partial(_require_no_more, table, {*roles, *(features or options.features), options.label})
        )
    problems.require_none()
    for option in ("categories", "standardised", "dates", "scaling"):
        for name in getattr(options, option):
            table.index(name, f"the option {option}")
            if name not in features:
                raise DataProblem(f"{table.name}: the option {option} names {name!r}, which is no feature")
    for option in ("other", "fold"):
        for name in getattr(options, option):
            if name not in options.categories:
                raise DataProblem(
                    f"{table.name}: the option {option} names {name!r}, which has no categories"
                )
    return _Parser(table, options, features, labelled)


def _require_no_more(table: Table, known: Collection[str]) -> None:
    unknown = [name for name in table.columns if name not in known]
    if unknown:
        raise DataProblem(
            f"{table.name}: the model's schema has no {', '.join(column_name(name, table.columns) for name in unknown[:MAX_NAMES])}"
            f"{suggest_column(unknown[0], sorted(set(known) - set(table.columns)))}; rename it, or leave it out (--leave-out of a prediction, the option exclude of a device)"
        )


@dataclass(frozen=True)
class _Block:
    """Parsed rows. `widths`: how many values of an example each feature makes. `is_labelled`: whether y holds labels."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    test: npt.NDArray[np.bool_] | None
    widths: tuple[int, ...]
    is_labelled: bool


@dataclass(frozen=True)
class _Parser:
    table: Table
    options: TableOptions
    features: tuple[str, ...]
    labelled: bool
    may_be_empty: bool = False

    def block(self, records: Sequence[Record]) -> _Block:
        """Parsed records. Raises: DataProblem: the first problem of every column, so that a file is mended at once."""
        options, problems = self.options, Problems()
        numbers, rows = zip(*records, strict=True)
        columns = {
            name: Column(self.table, name, cells, numbers)
            for name, cells in zip(self.table.columns, zip(*rows, strict=True), strict=True)
        }
        parts = [problems.of(partial(feature, columns[name], options)) for name in self.features]
        label = self._label(columns)
        y = problems.of(partial(self._labels, label, len(rows)))
        test = problems.of(partial(held_out, columns[options.split])) if options.split else None
        problems.require_none()
        values = [part for part in parts if part is not None]
        assert y is not None, "a problem was raised"
        return _Block(
            np.concatenate(values, axis=1).astype(self._dtype(), copy=False),
            y,
            test,
            tuple(part.shape[1] for part in values),
            label is not None,
        )

    def _label(self, columns: Mapping[str, Column]) -> Column | None:
        """The label's column, if there are labels in it."""
        if not self.labelled:
            return None
        label = columns[self.options.label]
        empty = [is_empty(cell) for cell in label.cells] if self.may_be_empty else [False]
        if any(empty) and not all(empty):
            raise self._partly_labelled(label.place(empty.index(True)))
        return None if all(empty) else label

    def _partly_labelled(self, place: str) -> DataProblem:
        return DataProblem(
            f"{place}: the label is empty, and other rows have one; fill it in, empty all of them, or leave the column out: "
            f"--leave-out {self.options.label!r}"
        )

    def _labels(self, label: Column | None, rows: int) -> npt.NDArray[Any]:
        if label is None:
            return np.full(rows, PADDING, np.int32)
        if self.options.label_scale:
            return quantities(label.cells, label.place, self.table.decimal_comma)
        return Labels(self.options.classes, self.table.decimal_comma).indices(label.cells, label.place)

    def rows(self, blocks: list[_Block], kinds: Sequence[str]) -> Rows:
        """All blocks as one. The list is emptied meanwhile, so that values are not in memory twice."""
        widths = blocks[0].widths
        for block in blocks:
            if block.widths != widths:
                raise DataProblem(
                    f"{self.table.name}: rows hold {sum(widths)} or {sum(block.widths)} values, expected one number"
                )
        if len({block.is_labelled for block in blocks}) > 1:
            raise self._partly_labelled(f"{self.table.name}, column {self.options.label!r}")
        y = np.concatenate([block.y for block in blocks])
        tests = [block.test for block in blocks if block.test is not None]
        x = np.empty((len(y), sum(widths)), self._dtype())
        end = len(x)
        while blocks:
            part = blocks.pop().x
            x[end - len(part) : end] = part
            end -= len(part)
        return Rows(
            x=scaled(shaped(x, self.options.shape, self.table.name), self.options.scale),
            y=y,
            test=np.concatenate(tests) if tests else None,
            schema=tuple(zip(self.table.columns, self._exact(x, widths, kinds), strict=True)),
            categories=self._places(self.options.categories, widths),
            standardised=self._places(self.options.standardised, widths),
            moments=self._moments(widths),
        )

    def _moments(self, widths: Sequence[int]) -> Moments | None:
        """The option `scaling` for the values of an example."""
        scaling = self.options.scaling
        if not scaling:
            return None
        given = [
            numbers
            for name, width in zip(self.features, widths, strict=True)
            for numbers in [scaling.get(name, (math.nan, math.nan))] * width
        ]
        means, deviations = np.array(given, np.float64).reshape(-1, 2).T
        return Moments(means, deviations, np.zeros(len(means), np.bool_))

    def _dtype(self) -> type[np.generic]:
        if self.options.dtype == "int32":
            return np.int32
        # Means are taken of what the file holds, not of what float32 leaves of it.
        scaled = self.options.standardise == "local" or bool(self.options.scaling)
        unrounded = scaled and self.options.scale is None
        return np.float64 if unrounded else np.float32

    def _places(self, names: Collection[str], widths: Sequence[int]) -> tuple[int, ...]:
        """The places in an example of the values that columns make."""
        ends = np.cumsum(widths).tolist()
        return tuple(
            place
            for name, end, width in zip(self.features, ends, widths, strict=True)
            if name in names
            for place in range(end - width, end)
        )

    def _exact(self, x: npt.NDArray[Any], widths: Sequence[int], kinds: Sequence[str]) -> Sequence[str]:
        """The kinds seen in the first block; of features that are numbers, by all rows."""
        if self.table.kinds:
            return kinds
        exact = dict(zip(self.table.columns, kinds, strict=True))
        for name, end in zip(self.features, np.cumsum(widths).tolist(), strict=True):
            if name not in self.options.categories:
                exact[name] = _kind(x[:, end - 1])
        return list(exact.values())


def _kind(values: npt.NDArray[Any]) -> str:
    gaps = np.isnan(values)
    present = values[~gaps]
    if not present.size:
        return "empty"
    kind = "whole numbers" if (present == np.floor(present)).all() else "numbers"
    return f"{kind}, with gaps" if gaps.any() else kind
