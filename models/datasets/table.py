"""A user's own table: the roles of its columns, its labels, sites and split, as a Dataset."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_client.data.cells import folded
from edge_client.data.csv_file import DELIMITERS
from edge_client.data.labels import Labels
from edge_client.data.options import TableOptions
from edge_client.data.quoting import listed, quoted
from edge_client.data.rows import Rows
from edge_client.data.standardise import Moments, moments
from edge_client.data.table import Column
from edge_client.data.table import held_out as split_column
from edge_client.data.table_reader import EXCLUDED, feature_names, read_rows
from edge_client.wire.schema import ColumnSchema, DataSchema, Scale
from models.datasets import columns
from models.datasets.columns import TextRules, TextTable
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


@dataclass(frozen=True)
class Reading:
    """How a table is read, besides the roles of its columns.

    Attributes:
        scale: None is `site`, as runs of before have it.
        fixed: column -> mean and deviation, for scale `fixed`.
        units: column -> unit, for people.
        encoding: of the text; None: UTF-8, or UTF-16 with a mark.
    """

    scale: Scale | None = None
    fixed: Mapping[str, Sequence[float]] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    texts: TextRules = TextRules()  # noqa: RUF009 - a frozen value
    encoding: str | None = None


def load(
    path: Path,
    seed: int,
    *,
    label: str = "label",
    site: str | None = None,
    split: str | None = None,
    features: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    reading: Reading = Reading(),
) -> Dataset:
    """x float32 [N, F]: numbers scaled, texts one-hot, in the order of the columns; with the schema that says how.

    `site` and `split` left at None are the columns of those names, where the table has them; "" is none.

    Raises:
        DataError: naming the file and, where there is one, the line and the column.
    """
    table = columns.read(path, reading.encoding)
    roles = _roles(table, label, site, split, features, exclude)
    classes = columns.classes(table, roles.label)
    sites, site_names = _sites(table, roles.site)
    y = Labels(classes, table.decimal_comma).indices(
        table.cells(roles.label, "the label"), lambda row: table.at(row, roles.label)
    )
    test = _test_rows(table, y, roles, seed, sites)
    found = [columns.column_schema(table, name, reading.texts, ~test) for name in roles.features]
    used = [column for column in found if column.width]
    if not used:
        raise DataError(
            f"{table.name}: no column is left for features; {'; '.join(_left_out(found, reading.texts))}"
        )
    schema = DataSchema(
        kind="table",
        input_shape=(sum(column.width for column in used),),
        input_dtype="float32",
        classes=classes,
        columns=tuple(replace(column, unit=reading.units.get(column.name, "")) for column in used),
        label=roles.label,
        ignored=tuple(name for name in table.columns if name not in _used_names(roles, used)),
        scale=reading.scale or "site",
        encoding=reading.encoding or "",
        minimum_count=reading.texts.minimum_count,
    )
    _require_columns(table, schema, reading)
    rows = read_rows(table, _options(schema, roles.split))
    x, schema, scaling = _scale(rows, schema, reading, ~test, sites)
    return Dataset(
        name="csv",
        x=x,
        y=rows.y,
        test=test,
        classes=len(classes),
        class_names=classes,
        site=sites,
        site_names=site_names,
        schema=schema,
        notes=(
            f"Read from {path}, separated by {DELIMITERS[table.delimiter or ',']}s; label: {roles.label!r}.",
            *roles.notes,
            _split_note(roles),
            *_left_out(found, reading.texts),
            *_column_notes(table, rows.x, schema.columns, reading.texts),
            *scaling,
            *_class_notes(rows.y, test, classes),
            *_device_notes(schema),
        ),
    )


def _used_names(roles: Roles, used: Sequence[ColumnSchema]) -> set[str]:
    return {roles.label, *(column.name for column in used)}


def _options(schema: DataSchema, split: str | None) -> TableOptions:
    """How to read the columns, not yet scaled."""
    texts = [column for column in schema.columns if column.kind == "category"]
    return TableOptions(
        label=schema.label,
        features=tuple(column.name for column in schema.columns),
        split=split,
        classes=schema.classes,
        categories={column.name: column.categories for column in texts},
        other=tuple(column.name for column in texts if column.other),
        fold=tuple(column.name for column in texts if column.fold),
        dates=tuple(column.name for column in schema.columns if column.kind == "date"),
        standardise="none" if schema.scale == "none" else "local",
    )


def _require_columns(table: TextTable, schema: DataSchema, reading: Reading) -> None:
    """Requires that `fixed` and `units` name columns of numbers, and `fixed` all of them where it is the scale."""
    numeric = {column.name for column in schema.columns if column.kind != "category"}
    for key, given in (("data.fixed", reading.fixed), ("data.units", reading.units)):
        for name in given:
            table.index(name, key)
            if name not in numeric:
                raise DataError(f"{table.name}: {key} names {name!r}, which is no input column of numbers")
    missing = sorted(numeric - set(reading.fixed))
    if schema.scale == "fixed" and missing:
        raise DataError(
            f'{table.name}: data.scale = "fixed" needs mean and deviation of every column of numbers in data.fixed; missing: '
            f"{listed(missing)}"
        )


def _roles(
    table: TextTable,
    label: str,
    site: str | None,
    split: str | None,
    features: Sequence[str] | None,
    exclude: Sequence[str],
) -> Roles:
    table.index(label, "the label")
    for name in exclude:
        table.index(name, "data.exclude")
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
    for name in exclude:
        if name in taken:
            raise DataError(
                f"{table.name}: column {name!r} is the {taken[name]}; data.exclude is for columns that are not used"
            )
    names = feature_names(table, taken | dict.fromkeys(exclude, EXCLUDED), features)
    return Roles(label, site or None, split or None, names, tuple(notes))


def _test_rows(
    table: TextTable,
    y: npt.NDArray[np.int32],
    roles: Roles,
    seed: int,
    sites: npt.NDArray[np.int32] | None,
) -> npt.NDArray[np.bool_]:
    if roles.split is None:
        test = held_out(y, seed, sites)
        if not test.any():
            raise DataError(
                f"{table.name}: {len(table)} rows are too few to hold any out for testing; "
                "add rows, or a column `split` that says train or test"
            )
        return test
    cells = table.cells(roles.split, "the split")
    test = split_column(Column(table, roles.split, cells, [number for number, _ in table.records]))
    if test.all() or not test.any():
        raise DataError(
            f"{table.name}: every row in column {roles.split!r} says {'test' if test.all() else 'train'}; "
            "expected some train and some test"
        )
    return test


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


def _scale(
    rows: Rows,
    schema: DataSchema,
    reading: Reading,
    training: npt.NDArray[np.bool_],
    sites: npt.NDArray[np.int32] | None,
) -> tuple[npt.NDArray[np.float32], DataSchema, list[str]]:
    """x [N, F], the schema with what its numbers are scaled by, and notes on what was done to them."""
    places = np.setdiff1d(np.arange(rows.x.shape[1]), rows.categories)
    x = rows.x.astype(np.float32)
    if not len(places) or schema.scale == "none":
        return x, schema, []
    numeric = [column.name for column in schema.columns if column.kind != "category"]
    values = np.ascontiguousarray(rows.x[:, places], np.float64)
    if schema.scale == "site":
        x[:, places], flags = standardised(values, training, sites)
        before = [name for name, kept in zip(numeric, flags, strict=True) if kept]
        marked = [replace(column, standardised=column.name in before) for column in schema.columns]
        per = "each site's training rows" if sites is not None else "the training rows"
        return x, replace(schema, columns=tuple(marked)), _scaling_notes(numeric, values, before, per)
    if schema.scale == "fixed":
        given = {name: (float(reading.fixed[name][0]), float(reading.fixed[name][1])) for name in numeric}
        per = "data.fixed"
    else:
        given = _pooled_moments(numeric, values[training], reading.texts.minimum_count)
        per = "all sites' training rows" if sites is not None else "the training rows"
    fitted = with_moments(schema, given)
    means, deviations = np.array([given[name] for name in numeric], np.float64).T
    scaling = Moments(means, deviations, np.zeros(len(means), np.bool_))
    x[:, places] = scaling.apply(values)
    return x, fitted, _scaling_notes(numeric, values, [], per)


def with_moments(schema: DataSchema, given: Mapping[str, tuple[float, float]]) -> DataSchema:
    """The schema whose numbers are scaled by these means and deviations."""
    fitted = [
        column
        if column.kind == "category"
        else replace(column, mean=given[column.name][0], deviation=given[column.name][1])
        for column in schema.columns
    ]
    return replace(schema, columns=tuple(fitted))


def _pooled_moments(
    names: Sequence[str], values: npt.NDArray[np.float64], minimum_count: int
) -> dict[str, tuple[float, float]]:
    """Mean and deviation of each column of `values` [N, F]; 0 and 0 of one with fewer numbers than `minimum_count`."""
    means, deviations = moments(values)
    told = (~np.isnan(values)).sum(axis=0) >= max(1, minimum_count)
    means, deviations = np.where(told, means, 0.0), np.where(told, deviations, 0.0)
    return {
        name: (float(mean), float(deviation))
        for name, mean, deviation in zip(names, means, deviations, strict=True)
    }


def _scaling_notes(
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


def _split_note(roles: Roles) -> str:
    if roles.split:
        return f"Column {roles.split!r} says which rows are held out."
    return f"20 % of {'each site' if roles.site else 'the rows'} is held out, by the seed."


def _left_out(found: Sequence[ColumnSchema], rules: TextRules) -> Iterator[str]:
    for column in found:
        if not column.width:
            yield f"Column {column.name!r} is empty and is left out."
        elif column.kind == "category" and not column.categories:
            yield (
                f"Text column {column.name!r} says nothing: none of its texts is in {rules.minimum_count} training rows "
                "(data.categories.minimum_count); if it is an identifier, name it in data.exclude."
            )


def _column_notes(
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
            yield from _category_notes(table, column, values, rules)
        elif not len(present):
            yield f"Column {name!r} is empty and says nothing."
        elif column.kind == "date":
            yield f"Column {name!r} is read as dates: days since 1970-01-01."
        elif len(present) >= ROW_NUMBERS and (np.diff(present) == 1).all():
            yield f"Column {name!r} counts the rows; if it is an identifier, leave it out (data.exclude)."
        if column.width == 1 and len(present) and (present == present[0]).all():
            yield f"Column {name!r} has the same value in every row and says nothing."


def _category_notes(
    table: TextTable, column: ColumnSchema, values: npt.NDArray[np.float64], rules: TextRules
) -> Iterator[str]:
    name, texts = column.name, column.categories
    shown = ", ".join(" ".join(text.split()) for text in texts[:8]) + (", …" if len(texts) > 8 else "")
    if texts:
        yield f"Text column {name!r} is one-hot over {len(texts)} categories: {shown}."
    present = int(values.sum())
    if column.other and texts:
        yield (
            f'Rarer texts of {name!r} share one further value, "other" ({int(values[:, -1].sum())} rows): data.categories has '
            f"max = {rules.max}, minimum_count = {rules.minimum_count}."
        )
    if present < len(values):
        yield f"Empty cells of {name!r} ({len(values) - present}) belong to no category."
    if len(texts) == present >= ROW_NUMBERS:
        yield f"Column {name!r} has another text in every row; if it is an identifier, leave it out (data.exclude)."
    alike = defaultdict(set)
    for cell in table.cells(name, "a feature"):
        alike[folded(cell)].add(cell)
    if not rules.fold and (twice := [sorted(each) for each in alike.values() if len(each) > 1]):
        yield (
            f"Column {name!r} spells {len(twice)} texts in more than one way, such as {quoted(twice[0][0])} and "
            f"{quoted(twice[0][1])}; data.categories.fold = true reads these as one."
        )


def _class_notes(
    y: npt.NDArray[np.int32], test: npt.NDArray[np.bool_], names: tuple[str, ...]
) -> Iterator[str]:
    for index in np.flatnonzero(np.bincount(y[~test], minlength=len(names)) == 0):
        yield f"Class {names[index]!r} has no training row, so no model can learn it."


def _device_notes(schema: DataSchema) -> Iterator[str]:
    """The options that give a device the same rows, where it cannot know them from its own."""
    texts = [column for column in schema.columns if column.kind == "category"]
    indices = tuple(map(str, range(len(schema.classes))))
    fixed = {
        "classes": schema.classes if schema.classes != indices else (),
        "categories": {column.name: column.categories for column in texts},
        "other": [column.name for column in texts if column.other],
        "fold": [column.name for column in texts if column.fold],
        "dates": [column.name for column in schema.columns if column.kind == "date"],
        "standardised": [column.name for column in schema.columns if column.standardised],
        "scaling": {
            column.name: [column.mean, column.deviation]
            for column in schema.columns
            if column.mean is not None
        },
    }
    # With " = " between them, JSON's objects are the inline tables of TOML.
    text = ", ".join(
        f"{option} = {json.dumps(value, ensure_ascii=False, separators=(', ', ' = '))}"
        for option, value in fixed.items()
        if value
    )
    local = 'standardise = "local", ' if schema.scale == "site" else ""
    if len(text) > LONGEST_NOTE:
        yield "A device reads such rows alike by the run's schema.json, whose options are too long to list here."
    elif text:
        yield f"A device reads such rows alike with: {local}{text}."
