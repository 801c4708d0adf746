"""Rows of a table as arrays, a block at a time: whatever the file's size, little of it is held as text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.cells import kind_of
from edge_client.data.connector import DataProblem
from edge_client.data.labels import Labels
from edge_client.data.options import TableOptions
from edge_client.data.quoting import column_names
from edge_client.data.rows import Rows, scaled, shaped
from edge_client.data.table import BLOCK_ROWS, Column, Record, Table, feature, held_out


def read_rows(table: Table, options: TableOptions) -> Rows:
    """All rows of a table.

    A cell is a number or text that reads as one; in Parquet it may be a list of numbers. A column of the option
    `categories` is one-hot. A gap is refused, unless columns are standardised: then it is NaN here.

    Raises:
        DataProblem: naming file, line or row, column, the value and what was expected.
    """
    parser = _parser(table, options)
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
    """The columns of the input: `features`, or all that have no other role. `roles`: column -> what it is.

    Raises:
        DataProblem: a column is not there, has another role or is listed twice, or none is left.
    """
    for name, role in roles.items():
        table.index(name, f"the {role}")
    names = (
        tuple(name for name in table.columns if name not in roles) if features is None else tuple(features)
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
            "(expected columns separated by commas, semicolons or tabs)"
        )
    return names


def _parser(table: Table, options: TableOptions) -> _Parser:
    if not options.label:
        raise DataProblem(f"{table.name}: the option label is missing; {column_names(table.columns)}")
    roles = {options.label: "label"} | ({options.split: "split"} if options.split else {})
    features = feature_names(table, roles, options.features or None)
    for option in ("categories", "standardised"):
        for name in getattr(options, option):
            table.index(name, f"the option {option}")
            if name not in features:
                raise DataProblem(f"{table.name}: the option {option} names {name!r}, which is no feature")
    return _Parser(table, options, features)


@dataclass(frozen=True)
class _Block:
    """Parsed rows. `widths`: how many values of an example each feature makes."""

    x: npt.NDArray[Any]
    y: npt.NDArray[np.int32]
    test: npt.NDArray[np.bool_] | None
    widths: tuple[int, ...]


@dataclass(frozen=True)
class _Parser:
    table: Table
    options: TableOptions
    features: tuple[str, ...]

    def block(self, records: Sequence[Record]) -> _Block:
        options = self.options
        numbers, rows = zip(*records, strict=True)
        columns = {
            name: Column(self.table, name, cells, numbers)
            for name, cells in zip(self.table.columns, zip(*rows, strict=True), strict=True)
        }
        parts = [feature(columns[name], options) for name in self.features]
        label = columns[options.label]
        return _Block(
            np.concatenate(parts, axis=1).astype(self._dtype(), copy=False),
            Labels(options.classes, self.table.decimal_comma).indices(label.cells, label.place),
            held_out(columns[options.split]) if options.split else None,
            tuple(part.shape[1] for part in parts),
        )

    def rows(self, blocks: list[_Block], kinds: Sequence[str]) -> Rows:
        """All blocks as one. The list is emptied meanwhile, so that values are not in memory twice."""
        widths = blocks[0].widths
        for block in blocks:
            if block.widths != widths:
                raise DataProblem(
                    f"{self.table.name}: rows hold {sum(widths)} or {sum(block.widths)} values, expected one number"
                )
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
        )

    def _dtype(self) -> type[np.generic]:
        if self.options.dtype == "int32":
            return np.int32
        # Means are taken of what the file holds, not of what float32 leaves of it.
        unrounded = self.options.standardise == "local" and self.options.scale is None
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
