"""A user's own table: the roles of its columns, its labels, sites and split, as a Dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.contract import options_of
from edge_client.data.csv_file import DELIMITERS
from edge_client.data.labels import Labels
from edge_client.data.options import TableOptions
from edge_client.data.quoting import listed
from edge_client.data.rows import Rows
from edge_client.data.standardise import Moments, moments
from edge_client.data.table import Column
from edge_client.data.table import held_out as split_column
from edge_client.data.table_reader import EXCLUDED, Problems, feature_names, read_rows
from edge_client.wire.schema import ColumnSchema, DataSchema, Scale
from models.datasets import columns, table_notes
from models.datasets.columns import TextRules, TextTable
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import held_out, require_both_parts
from models.datasets.standardise import standardised, standardised_labels
from models.tasks import TaskKind


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


@dataclass(frozen=True)
class Columns:
    """The names of columns, as the user gives them.

    Attributes:
        site, split: None: the columns of those names, where the table has them; "": none.
        features: None: all others.
        exclude: no input.
    """

    label: str = "label"
    site: str | None = None
    split: str | None = None
    features: Sequence[str] | None = None
    exclude: Sequence[str] = ()


def load(
    path: Path, seed: int, named: Columns, reading: Reading, task: TaskKind = "classification"
) -> Dataset:
    """x float32 [N, F]: numbers scaled, texts one-hot, in the order of the columns; with the schema that says how.

    Raises:
        DataError: naming the file and, where there is one, the line and the column.
    """
    table = columns.read(path, reading.encoding)
    roles = _roles(table, named)
    is_quantity = task == "regression"
    classes, y, sites, site_names, test, found = _parse(table, roles, seed, reading.texts, is_quantity)
    label_scale = None
    if is_quantity:
        y, label_scale = standardised_labels(y, test)
    schema = replace(_describe(table, roles, classes, found, reading), label_scale=label_scale)
    _require_columns(table, schema, reading)
    rows = read_rows(table, _options(schema, roles.split), labelled=not is_quantity)
    x, schema, scaling = _scale(rows, schema, reading, ~test, sites)
    return Dataset(
        name="csv",
        x=x,
        y=y,
        test=test,
        classes=len(classes) or 1,
        task=task,
        label_scale=label_scale,
        class_names=classes,
        site=sites,
        site_names=site_names,
        schema=schema,
        notes=(
            f"Read from {path}{_separated(table)}; label: {roles.label!r}.",
            *roles.notes,
            table_notes.split_note(roles.split, roles.site),
            *table_notes.left_out(found, reading.texts),
            *table_notes.column_notes(table, rows.x, schema.columns, reading.texts),
            *scaling,
            *(() if is_quantity else table_notes.class_notes(y, test, classes, reading.texts.minimum_count)),
            *(() if is_quantity else table_notes.device_notes(schema)),
        ),
        private_notes=tuple(table_notes.spelling_notes(table, schema.columns, reading.texts)),
    )


def _separated(table: TextTable) -> str:
    return "" if table.delimiter is None else f", separated by {DELIMITERS[table.delimiter]}s"


def _parse(
    table: TextTable, roles: Roles, seed: int, texts: TextRules, is_quantity: bool
) -> tuple[
    tuple[str, ...],
    npt.NDArray[Any],
    columns.Sites | None,
    tuple[str, ...],
    npt.NDArray[np.bool_],
    list[ColumnSchema],
]:
    """Classes, labels, sites with their names, held-out rows, and what each column holds.

    Raises:
        DataError: with the first problem of every column.
    """
    problems = Problems()
    labels = problems.of(partial(_labels, table, roles, is_quantity))
    sites = problems.of(partial(_sites, table, roles.site))
    test = None
    if labels is not None and sites is not None:
        test = problems.of(partial(_test_rows, table, labels[1], roles, seed, sites[0]))
    training = np.ones(len(table), np.bool_) if test is None else ~test
    parts = [
        problems.of(partial(columns.column_schema, table, name, texts, training)) for name in roles.features
    ]
    problems.require_none()
    assert labels is not None and sites is not None and test is not None, "a problem was raised"
    return *labels, *sites, test, [part for part in parts if part is not None]


def _labels(table: TextTable, roles: Roles, is_quantity: bool) -> tuple[tuple[str, ...], npt.NDArray[Any]]:
    if is_quantity:
        return (), columns.quantities(table, roles.label)
    classes = columns.classes(table, roles.label)
    return classes, _class_indices(table, roles, classes)


def _class_indices(table: TextTable, roles: Roles, classes: tuple[str, ...]) -> npt.NDArray[Any]:
    return Labels(classes, table.decimal_comma).indices(
        table.cells(roles.label, "the label"), lambda row: table.at(row, roles.label)
    )


def _describe(
    table: TextTable,
    roles: Roles,
    classes: tuple[str, ...],
    found: Sequence[ColumnSchema],
    reading: Reading,
) -> DataSchema:
    """The schema, still without means and deviations. Columns that say nothing are left out."""
    used = [column for column in found if column.kind != "category" or column.categories]
    if not used:
        raise DataError(
            f"{table.name}: no column is left for features; {' '.join(table_notes.left_out(found, reading.texts))}"
        )
    known = {roles.label, *(column.name for column in used)}
    return DataSchema(
        kind="table",
        input_shape=(sum(column.width for column in used),),
        input_dtype="float32",
        classes=classes,
        columns=tuple(replace(column, unit=reading.units.get(column.name, "")) for column in used),
        label=roles.label,
        ignored=tuple(name for name in table.columns if name not in known),
        scale=reading.scale or "site",
        encoding=reading.encoding or "",
        minimum_count=reading.texts.minimum_count,
    )


def _options(schema: DataSchema, split: str | None) -> TableOptions:
    """How to read the columns, not yet scaled."""
    options = replace(options_of(schema), split=split)
    return options if schema.scale == "none" else replace(options, standardise="local")


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


def _roles(table: TextTable, named: Columns) -> Roles:
    label, site, split, features, exclude = (
        named.label,
        named.site,
        named.split,
        named.features,
        named.exclude,
    )
    problems = Problems()
    problems.of(partial(table.index, label, "the label"))
    for role, column in (("the site", site), ("the split", split)):
        if column:
            problems.of(partial(table.index, column, role))
    for name in exclude:
        problems.of(partial(table.index, name, "data.exclude"))
    for name in features or ():
        problems.of(partial(table.index, name, "a feature"))
    problems.require_none()
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
    y: npt.NDArray[Any],
    roles: Roles,
    seed: int,
    sites: npt.NDArray[np.int32] | None,
) -> npt.NDArray[np.bool_]:
    if roles.split is None:
        test = held_out(y, seed, sites)
        require_both_parts(table.name, None, test)
        return test
    cells = table.cells(roles.split, "the split")
    test = split_column(Column(table, roles.split, cells, [number for number, _ in table.records]))
    require_both_parts(table.name, roles.split, test)
    return test


def _sites(table: TextTable, column: str | None) -> tuple[columns.Sites | None, tuple[str, ...]]:
    if column is None:
        return None, ()
    return columns.sites_of(table.cells(column, "the site"), lambda row: table.at(row, column))


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
        return (
            x,
            replace(schema, columns=tuple(marked)),
            table_notes.scaling_notes(numeric, values, before, per),
        )
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
    return x, fitted, table_notes.scaling_notes(numeric, values, [], per)


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
    enough = (~np.isnan(values)).sum(axis=0) >= max(1, minimum_count)
    means, deviations = np.where(enough, means, 0.0), np.where(enough, deviations, 0.0)
    return {
        name: (float(mean), float(deviation))
        for name, mean, deviation in zip(names, means, deviations, strict=True)
    }
