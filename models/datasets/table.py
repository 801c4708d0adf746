"""A user's own table: the roles of its columns, its labels, sites and split, as a Dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.datasets import delimited
from models.datasets.columns import Categories, Numbers, in_order, number, understood
from models.datasets.dataset import DataError, Dataset
from models.datasets.delimited import Table
from models.datasets.holdout import held_out
from models.datasets.notation import nearest
from models.datasets.quoting import column_names, quoted
from models.datasets.standardise import standardised

NO_LABEL = frozenset({"", "nan", "n/a", "null"})
ROW_NUMBERS = 10
"""Rows from which a column that counts 1, 2, 3 … is taken for a row number."""


@dataclass(frozen=True)
class Roles:
    """Which column is what."""

    label: str
    site: str | None
    split: str | None
    features: tuple[str, ...]
    notes: tuple[str, ...]


def load(
    path: Path,
    seed: int,
    *,
    label: str = "label",
    site: str | None = None,
    split: str | None = None,
    features: Sequence[str] | None = None,
) -> Dataset:
    """x float32 [N, F]: numbers standardised per site, texts one-hot, in the order of the columns.

    `site` and `split` left at None are the columns of those names, where the table has them; "" is none.

    Raises:
        DataError: naming the file and, where there is one, the line and the column.
    """
    table = delimited.read(path)
    roles = _roles(table, label, site, split, features)
    y, class_names = _labels(table, roles.label)
    sites, site_names = _sites(table, roles.site)
    test = _split(table, roles.split) if roles.split else held_out(y, seed, sites)
    if not test.any():
        raise DataError(
            f"{path}: {len(table)} rows are too few to hold any out for testing; "
            "add rows, or a column `split` that says train or test"
        )
    columns = [understood(table, name) for name in roles.features]
    x, scaling = _features(columns, ~test, sites)
    return Dataset(
        name="csv",
        x=x,
        y=y,
        test=test,
        classes=len(class_names),
        class_names=class_names,
        site=sites,
        site_names=site_names,
        notes=(
            f"Read from {path}, separated by {delimited.DELIMITERS[table.delimiter]}s; label: {roles.label!r}.",
            *roles.notes,
            _split_note(roles),
            *_column_notes(columns),
            *scaling,
            *_class_notes(y, test, class_names),
        ),
    )


def _roles(
    table: Table, label: str, site: str | None, split: str | None, features: Sequence[str] | None
) -> Roles:
    table.cells(label, "the label")
    notes = []
    if site is None and "site" in table.columns and "site" not in (label, *(features or ())):
        site = "site"
        notes.append("Each value of column 'site' is a natural client.")
    elif site:
        notes.append(f"Each value of column {site!r} is a natural client.")
    if split is None and "split" in table.columns and "split" not in (label, *(features or ())):
        split = "split"
    taken = {label: "label", **({site: "site"} if site else {}), **({split: "split"} if split else {})}
    if len(taken) < 1 + bool(site) + bool(split):
        raise DataError(
            f"{table.path}: label, site and split must be different columns, got {label!r}, {site!r}, {split!r}"
        )
    for name in features or ():
        if name in taken:
            raise DataError(f"{table.path}: column {name!r} is the {taken[name]} and cannot be a feature too")
        if list(features or ()).count(name) > 1:
            raise DataError(f"{table.path}: feature {name!r} is listed twice")
    chosen = (
        tuple(features)
        if features is not None
        else tuple(name for name in table.columns if name not in taken)
    )
    if not chosen:
        raise DataError(
            f"{table.path}: no column is left for features; {column_names(table.columns)} "
            "(expected columns separated by commas, semicolons or tabs)"
        )
    return Roles(label, site or None, split or None, chosen, tuple(notes))


def _labels(table: Table, column: str) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
    """Class of each row [N] and the names of the classes, in order."""
    cells = table.cells(column, "the label")
    for row, cell in enumerate(cells):
        if cell.casefold() in NO_LABEL:
            raise DataError(f"{table.at(row, column)}: the label is empty; fill it in or remove the row")
    decimal_comma = table.delimiter != ","
    values = [number(cell, decimal_comma) for cell in cells]
    if all(value is not None for value in values):
        cells = [f"{value:.12g}" for value in values]  # so that 1 and 1.0 are one class
    names = in_order(set(cells))
    if len(names) < 2:
        raise DataError(
            f"{table.path}: every label in column {column!r} is {quoted(names[0])}; expected two classes or more"
        )
    if len(cells) >= 10 and len(names) > len(cells) // 2:
        raise DataError(
            f"{table.path}: column {column!r} has {len(names):,} different values in {len(cells):,} rows, which is no "
            "class label; name the label's column, or turn the quantity into classes first"
        )
    code = {name: index for index, name in enumerate(names)}
    return np.array([code[cell] for cell in cells], np.int32), tuple(names)


def _sites(table: Table, column: str | None) -> tuple[npt.NDArray[np.int32] | None, tuple[str, ...]]:
    if column is None:
        return None, ()
    cells = table.cells(column, "the site")
    for row, cell in enumerate(cells):
        if not cell:
            raise DataError(f"{table.at(row, column)}: the site is empty; fill it in or remove the row")
    names = in_order(set(cells))
    code = {name: index for index, name in enumerate(names)}
    return np.array([code[cell] for cell in cells], np.int32), tuple(names)


def _split(table: Table, column: str) -> npt.NDArray[np.bool_]:
    """True for the test rows."""
    cells = [cell.casefold() for cell in table.cells(column, "the split")]
    for row, cell in enumerate(cells):
        if cell not in ("train", "test"):
            raise DataError(
                f"{table.at(row, column)}: {quoted(cell)} is neither train nor test{nearest(cell, ('train', 'test'))}; if the "
                'column is no split, name another one or set split = ""'
            )
    test = np.array([cell == "test" for cell in cells])
    if test.all() or not test.any():
        raise DataError(
            f"{table.path}: every row in column {column!r} says {cells[0]}; expected some train and some test"
        )
    return test


def _features(
    columns: Sequence[Numbers | Categories],
    training: npt.NDArray[np.bool_],
    sites: npt.NDArray[np.int32] | None,
) -> tuple[npt.NDArray[np.float32], list[str]]:
    """x [N, F] in the order of the columns, and what was done to the numbers."""
    numbers = [column for column in columns if isinstance(column, Numbers)]
    notes = []
    scaled: Iterator[npt.NDArray[np.float64]] = iter(())
    if numbers:
        result = standardised(np.column_stack([column.values for column in numbers]), training, sites)
        scaled = iter(result.values.T)
        per = "each site's training rows" if sites is not None else "the training rows"
        if not result.before.all():
            notes.append(f"Numbers are standardised to mean 0 and standard deviation 1 over {per}.")
        if result.before.any():
            kept = ", ".join(column.name for column, kept in zip(numbers, result.before, strict=True) if kept)
            notes.append(f"Numbers that arrive standardised are left as they are: {kept}.")
        gaps = {column.name: int(np.isnan(column.values).sum()) for column in numbers}
        holes = ", ".join(f"{name!r} ({count})" for name, count in gaps.items() if count)
        if holes:
            notes.append(f"Empty numbers are filled with the mean of {per}: {holes}.")
    parts = [
        next(scaled)[:, None].astype(np.float32) if isinstance(column, Numbers) else column.one_hot()
        for column in columns
    ]
    return np.ascontiguousarray(np.concatenate(parts, axis=1)), notes


def _split_note(roles: Roles) -> str:
    if roles.split:
        return f"Column {roles.split!r} says which rows are held out."
    return f"20 % of {'each site' if roles.site else 'the rows'} is held out, by the seed."


def _column_notes(columns: Sequence[Numbers | Categories]) -> Iterator[str]:
    """What a person should know about single columns."""
    for column in columns:
        if isinstance(column, Categories):
            names = ", ".join(" ".join(name.split()) for name in column.names[:8]) + (
                ", …" if len(column.names) > 8 else ""
            )
            yield f"Text column {column.name!r} is one-hot over {len(column.names)} categories: {names}."
            if (column.codes < 0).any():
                yield f"Empty cells of {column.name!r} ({int((column.codes < 0).sum())}) belong to no category."
            distinct, rows = len(column.names), int((column.codes >= 0).sum())
            if distinct == rows and rows >= ROW_NUMBERS:
                yield f"Column {column.name!r} has another text in every row; if it is an identifier, leave it out."
        else:
            present = column.values[~np.isnan(column.values)]
            if not len(present):
                yield f"Column {column.name!r} is empty and says nothing."
            elif len(present) >= ROW_NUMBERS and (np.diff(present) == 1).all():
                yield f"Column {column.name!r} counts the rows; if it is an identifier, leave it out."
        if _constant(column):
            yield f"Column {column.name!r} has the same value in every row and says nothing."


def _constant(column: Numbers | Categories) -> bool:
    if isinstance(column, Categories):
        return len(column.names) == 1 and bool((column.codes == 0).all())
    present = column.values[~np.isnan(column.values)]
    return len(present) > 0 and bool((present == present[0]).all())


def _class_notes(
    y: npt.NDArray[np.int32], test: npt.NDArray[np.bool_], names: tuple[str, ...]
) -> Iterator[str]:
    for index in np.flatnonzero(np.bincount(y[~test], minlength=len(names)) == 0):
        yield f"Class {names[index]!r} has no training row, so no model can learn it."
