"""A user's own table: the roles of its columns, its labels, sites and split, as a Dataset."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_client.data.csv_file import DELIMITERS
from edge_client.data.options import TableOptions
from edge_client.data.rows import Rows
from edge_client.data.table_reader import feature_names, read_rows
from models.datasets import columns
from models.datasets.columns import TextTable
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import held_out
from models.datasets.standardise import standardised

ROW_NUMBERS = 10
"""Rows from which a column that counts 1, 2, 3 … is taken for a row number."""
LONGEST_NOTE = 2000
"""Characters of options for a device that the notes spell out."""


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
    table = columns.read(path)
    roles = _roles(table, label, site, split, features)
    texts = {name: names for name in roles.features if (names := columns.categories(table, name))}
    options = TableOptions(
        label=roles.label,
        features=roles.features,
        split=roles.split,
        classes=columns.classes(table, roles.label),
        categories=texts,
        standardise="local",
    )
    rows = read_rows(table, options)
    sites, site_names = _sites(table, roles.site)
    test = _test_rows(table, rows, roles, seed, sites)
    x, before, scaling = _features(rows, roles.features, texts, ~test, sites)
    return Dataset(
        name="csv",
        x=x,
        y=rows.y,
        test=test,
        classes=len(options.classes),
        class_names=options.classes,
        site=sites,
        site_names=site_names,
        notes=(
            f"Read from {path}, separated by {DELIMITERS[table.delimiter or ',']}s; label: {roles.label!r}.",
            *roles.notes,
            _split_note(roles),
            *_column_notes(rows.x, roles.features, texts),
            *scaling,
            *_class_notes(rows.y, test, options.classes),
            *_device_notes(options, before),
        ),
    )


def _roles(
    table: TextTable, label: str, site: str | None, split: str | None, features: Sequence[str] | None
) -> Roles:
    table.index(label, "the label")
    notes = []
    if site is None and "site" in table.columns and "site" not in (label, *(features or ())):
        site = "site"
        notes.append("Each value of column 'site' is a site.")
    elif site:
        notes.append(f"Each value of column {site!r} is a site.")
    if split is None and "split" in table.columns and "split" not in (label, *(features or ())):
        split = "split"
    taken = {label: "label", **({site: "site"} if site else {}), **({split: "split"} if split else {})}
    if len(taken) < 1 + bool(site) + bool(split):
        raise DataError(
            f"{table.name}: label, site and split must be different columns, got {label!r}, {site!r}, {split!r}"
        )
    return Roles(label, site or None, split or None, feature_names(table, taken, features), tuple(notes))


def _test_rows(
    table: TextTable, rows: Rows, roles: Roles, seed: int, sites: npt.NDArray[np.int32] | None
) -> npt.NDArray[np.bool_]:
    if rows.test is None:
        test = held_out(rows.y, seed, sites)
        if not test.any():
            raise DataError(
                f"{table.name}: {len(table)} rows are too few to hold any out for testing; "
                "add rows, or a column `split` that says train or test"
            )
        return test
    if rows.test.all() or not rows.test.any():
        raise DataError(
            f"{table.name}: every row in column {roles.split!r} says {'test' if rows.test.all() else 'train'}; "
            "expected some train and some test"
        )
    return rows.test


def _sites(table: TextTable, column: str | None) -> tuple[npt.NDArray[np.int32] | None, tuple[str, ...]]:
    if column is None:
        return None, ()
    cells = table.cells(column, "the site")
    for row, cell in enumerate(cells):
        if not cell:
            raise DataError(f"{table.at(row, column)}: the site is empty; fill it in or remove the row")
    names = columns.in_order(set(cells))
    code = {name: index for index, name in enumerate(names)}
    return np.array([code[cell] for cell in cells], np.int32), tuple(names)


def _features(
    rows: Rows,
    names: Sequence[str],
    texts: Mapping[str, Sequence[str]],
    training: npt.NDArray[np.bool_],
    sites: npt.NDArray[np.int32] | None,
) -> tuple[npt.NDArray[np.float32], list[str], list[str]]:
    """x [N, F], which columns arrive standardised, and notes on what was done to the numbers."""
    numbers = [name for name in names if name not in texts]
    x = rows.x.astype(np.float32)
    if not numbers:
        return x, [], []
    places = np.setdiff1d(np.arange(x.shape[1]), rows.categories)
    values = np.ascontiguousarray(rows.x[:, places])
    x[:, places], arrived = standardised(values, training, sites)
    before = [name for name, kept in zip(numbers, arrived, strict=True) if kept]
    per = "each site's training rows" if sites is not None else "the training rows"
    notes = []
    if len(before) < len(numbers):
        notes.append(f"Numbers are standardised to mean 0 and standard deviation 1 over {per}.")
    if before:
        notes.append(f"Numbers that arrive standardised are left as they are: {', '.join(before)}.")
    gaps = dict(zip(numbers, np.isnan(values).sum(axis=0).tolist(), strict=True))
    filled = ", ".join(f"{name!r} ({count})" for name, count in gaps.items() if count)
    if filled:
        notes.append(f"Empty numbers are filled with the mean of {per}: {filled}.")
    return x, before, notes


def _split_note(roles: Roles) -> str:
    if roles.split:
        return f"Column {roles.split!r} says which rows are held out."
    return f"20 % of {'each site' if roles.site else 'the rows'} is held out, by the seed."


def _column_notes(
    x: npt.NDArray[np.float64], names: Sequence[str], texts: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """What a person should know about single columns of x [N, F], not yet standardised."""
    place = 0
    for name in names:
        width = len(texts[name]) if name in texts else 1
        values = x[:, place : place + width]
        place += width
        present = values[~np.isnan(values)]
        if name in texts:
            yield from _category_notes(name, values, texts[name])
        elif not len(present):
            yield f"Column {name!r} is empty and says nothing."
        elif len(present) >= ROW_NUMBERS and (np.diff(present) == 1).all():
            yield f"Column {name!r} counts the rows; if it is an identifier, leave it out."
        if width == 1 and len(present) and (present == present[0]).all():
            yield f"Column {name!r} has the same value in every row and says nothing."


def _category_notes(name: str, values: npt.NDArray[np.float64], texts: Sequence[str]) -> Iterator[str]:
    shown = ", ".join(" ".join(text.split()) for text in texts[:8]) + (", …" if len(texts) > 8 else "")
    yield f"Text column {name!r} is one-hot over {len(texts)} categories: {shown}."
    present = int(values.sum())
    if present < len(values):
        yield f"Empty cells of {name!r} ({len(values) - present}) belong to no category."
    if len(texts) == present >= ROW_NUMBERS:
        yield f"Column {name!r} has another text in every row; if it is an identifier, leave it out."


def _class_notes(
    y: npt.NDArray[np.int32], test: npt.NDArray[np.bool_], names: tuple[str, ...]
) -> Iterator[str]:
    for index in np.flatnonzero(np.bincount(y[~test], minlength=len(names)) == 0):
        yield f"Class {names[index]!r} has no training row, so no model can learn it."


def _device_notes(options: TableOptions, before: Sequence[str]) -> Iterator[str]:
    """The options that give a device the same rows, where it cannot know them from its own."""
    indices = tuple(map(str, range(len(options.classes))))
    fixed = {
        "classes": options.classes if options.classes != indices else (),
        "categories": options.categories,
        "standardised": before,
    }
    # With " = " between them, JSON's objects are the inline tables of TOML.
    text = ", ".join(
        f"{option} = {json.dumps(value, ensure_ascii=False, separators=(', ', ' = '))}"
        for option, value in fixed.items()
        if value
    )
    if len(text) > LONGEST_NOTE:
        yield "A device reads such rows alike with the options classes, categories and standardised, too long to list here."
    elif text:
        yield f'A device reads such rows alike with: standardise = "local", {text}.'
