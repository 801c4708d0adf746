"""Notes on a user's own table: what was found in its columns and decided for them, one sentence each, for a person."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from edge_client.data.cells import folded
from edge_client.data.contract import options_of
from edge_client.data.quoting import listed, quoted
from edge_client.wire.schema import ColumnSchema, DataSchema
from models.datasets.columns import TextRules, TextTable

ROW_NUMBERS = 10
"""Rows from which a column that counts 1, 2, 3 … is taken for a row number."""
LONGEST_OPTIONS = 200
"""Characters of options for a device that the notes spell out."""


def scaling_notes(
    numeric: Sequence[str], values: npt.NDArray[np.float64], before: Sequence[str], per: str
) -> list[str]:
    notes = []
    if len(before) < len(numeric):
        notes.append(f"Numbers are standardised to mean 0 and standard deviation 1 over {per}.")
    if before:
        notes.append(f"Numbers that arrive standardised are left as they are: {', '.join(before)}.")
    gaps = dict(zip(numeric, np.isnan(values).sum(axis=0).tolist(), strict=True))
    filled = ", ".join(f"{name!r} ({count})" for name, count in gaps.items() if count)
    if filled:
        notes.append(f"Empty numbers are filled with the mean of {per}: {filled}.")
    return notes


def split_note(split: str | None, site: str | None) -> str:
    if split:
        return f"Column {split!r} says which rows are held out."
    return f"20 % of {'each site' if site else 'the rows'} is held out, by the seed."


def left_out(found: Sequence[ColumnSchema], rules: TextRules) -> Iterator[str]:
    for column in found:
        if column.kind == "category" and not column.categories:
            yield (
                f"Text column {column.name!r} is left out: none of its texts is in {rules.minimum_count} training rows "
                "(data.categories.minimum_count); if it is an identifier, name it in data.exclude."
            )


def column_notes(
    table: TextTable,
    x: npt.NDArray[np.float64],
    found: Sequence[ColumnSchema],
    rules: TextRules,
) -> Iterator[str]:
    """What a person should know about single columns of x [N, F], not yet standardised."""
    place = 0
    for column in found:
        name, values = column.name, x[:, place : place + column.width]
        place += column.width
        present = values[~np.isnan(values)]
        if column.kind == "category":
            yield from category_notes(table, column, values, rules)
        elif not len(present):
            yield f"Column {name!r} is empty and says nothing."
        elif column.kind == "date":
            yield f"Column {name!r} is read as dates: days since 1970-01-01."
        elif len(present) >= ROW_NUMBERS and (np.diff(present) == 1).all():
            yield f"Column {name!r} counts the rows; if it is an identifier, leave it out (data.exclude)."
        if column.width == 1 and len(present) and (present == present[0]).all():
            yield f"Column {name!r} has the same value in every row and says nothing."


def category_notes(
    table: TextTable, column: ColumnSchema, values: npt.NDArray[np.float64], rules: TextRules
) -> Iterator[str]:
    name, texts = column.name, column.categories
    shown = ", ".join(" ".join(text.split()) for text in texts[:8]) + (", …" if len(texts) > 8 else "")
    if texts:
        noun = "category" if len(texts) == 1 else "categories"
        yield f"Text column {name!r} is one-hot over {len(texts)} {noun}: {shown}."
    present = int(values.sum())
    if column.other:
        yield (
            f'Rarer texts of {name!r} share one further value, "other" ({int(values[:, -1].sum())} rows): data.categories has '
            f"max = {rules.max}, minimum_count = {rules.minimum_count}."
        )
    if present < len(values):
        yield f"Empty cells of {name!r} ({len(values) - present}) belong to no category."
    if len(texts) == present >= ROW_NUMBERS:
        yield f"Column {name!r} has another text in every row; if it is an identifier, leave it out (data.exclude)."
    if not rules.fold and (twice := spelled_twice(table.cells(name, "a feature"))):
        yield (
            f"Column {name!r} spells {len(twice)} text{'s' * (len(twice) > 1)} in more than one way; data.categories.fold = true reads "
            "these as one."
        )


def spelled_twice(cells: Iterable[str]) -> list[list[str]]:
    """The spellings of each text that has several, which differ only in case and blanks."""
    alike = defaultdict(set)
    for cell in cells:
        alike[folded(cell)].add(cell)
    return [sorted(each) for each in alike.values() if len(each) > 1]


def spelling_notes(table: TextTable, found: Sequence[ColumnSchema], rules: TextRules) -> Iterator[str]:
    """The first such text of each column; as it may be in one row only, this note is for the owner of the table."""
    for column in found:
        if column.kind == "category" and not rules.fold:
            for first, second, *_ in spelled_twice(table.cells(column.name, "a feature"))[:1]:
                yield f"Column {column.name!r} has both {quoted(first)} and {quoted(second)}."


def class_notes(
    y: npt.NDArray[np.int32], test: npt.NDArray[np.bool_], names: tuple[str, ...], minimum_count: int
) -> Iterator[str]:
    """Notes on the classes, whose names are in the schema and so are as public as the model."""
    for each in spelled_twice(names):
        yield (
            f"The label's classes {listed(each)} differ only in case or blanks and are learnt as {len(each)} classes; write them alike in "
            "the table if they are one."
        )
    counts = np.bincount(y[~test], minlength=len(names))
    if rare := int((counts < minimum_count).sum()):
        yield (
            f"{rare} class{'es have' if rare > 1 else ' has'} fewer than {minimum_count} training rows. The model's schema names every "
            "class: merge rare ones in the table if their names may not be public."
        )
    for index in np.flatnonzero(np.bincount(y[~test], minlength=len(names)) == 0):
        yield f"Class {names[index]!r} has no training row, so no model can learn it."


def device_notes(schema: DataSchema) -> Iterator[str]:
    """How a device comes to the same rows, where it cannot know that from its own."""
    text = device_options(schema)
    if len(text) > LONGEST_OPTIONS:
        yield "Devices get the options of these columns with the run's schema.json."
    elif text:
        yield f"A device that gets no schema needs the options: {text}."


def device_options(schema: DataSchema) -> str:
    """What a device's configuration must say to read the same rows without the schema, as an inline table of TOML without braces."""
    options = options_of(schema)
    indices = tuple(map(str, range(len(schema.classes))))
    named = ("categories", "other", "fold", "dates", "standardised", "scaling")
    fixed = {
        "classes": schema.classes if schema.classes != indices else (),
        **{name: getattr(options, name) for name in named},
    }
    # With " = " between them, JSON's objects are the inline tables of TOML.
    found = [
        f"{option} = {json.dumps(value, ensure_ascii=False, separators=(', ', ' = '))}"
        for option, value in fixed.items()
        if value
    ]
    local = ['standardise = "local"'] if found and schema.scale == "site" else []
    return ", ".join([*local, *found])
