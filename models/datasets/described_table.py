"""A table read by the data schema of a trained model instead of its own columns: as the model's training and devices read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.contract import table_at
from edge_client.data.labels import standardised
from edge_client.data.options import TableOptions
from edge_client.data.rows import Rows
from edge_client.data.standardise import local_moments
from edge_client.data.table import Table
from edge_client.data.table_reader import read_rows
from edge_client.data.tables import read_table
from edge_client.wire.schema import DataSchema
from models.datasets.columns import Sites, sites_of
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import held_out, require_both_parts

_DECIDED = ("features", "scale", "fixed", "units", "categories")
"""Keys of `[data]` that the schema leaves no room for."""

_ROLES = ("site", "split")


def load(path: Path, seed: int, schema: DataSchema, settings: Mapping[str, Any]) -> Dataset:
    """The rows of the table in `path` as the inputs and labels of the schema's model.

    Numbers of a schema with `scale = "site"` are scaled by the training rows of each site of this table.

    Args:
        schema: of kind `table`, with a label.
        settings: of `[data]`; those that say where the rows are (`label`, `site`, `split`, `exclude`, `encoding`) count.

    Raises:
        DataError: naming the file and, where there is one, the line and the column; or a key that contradicts the schema.
    """
    if given := [key for key in _DECIDED if settings.get(key) is not None]:
        raise DataError(
            f"data.{given[0]}: the model's schema says how the columns of {path} are read; leave data.{given[0]} out"
        )
    encoding = settings.get("encoding")
    schema = replace(schema, label=settings.get("label") or schema.label)

    def use(table: Table, options: TableOptions) -> Dataset:
        described = replace(schema, encoding=encoding or schema.encoding)
        return _dataset(table, options, described, seed, settings)

    return read_table(table_at(path, schema, encoding), use)


def _dataset(
    table: Table, options: TableOptions, schema: DataSchema, seed: int, settings: Mapping[str, Any]
) -> Dataset:
    records = list(table.records)
    table = replace(table, records=records)
    table.index(schema.label, "the label")
    roles = {role: _role(table, role, settings.get(role), schema) for role in _ROLES}
    others = [name for name in (roles["site"], *settings.get("exclude", ())) if name]
    for name in others:
        table.index(name, "data.exclude")
    rows = read_rows(
        table, replace(options, split=roles["split"], exclude=(*options.exclude, *others)), labelled=True
    )
    sites: Sites | None = None
    site_names: tuple[str, ...] = ()
    if (column := roles["site"]) is not None:
        place = table.index(column, "the site")
        cells = ["" if row[place] is None else str(row[place]).strip() for _, row in records]
        sites, site_names = sites_of(cells, lambda row: table.place(records[row][0], column))
    test = held_out(rows.y, seed, sites) if rows.test is None else rows.test
    require_both_parts(table.name, roles["split"], test)
    scale = schema.label_scale
    return Dataset(
        name="csv",
        x=_scaled(rows, schema, ~test, sites),
        y=rows.y if scale is None else standardised(rows.y, scale),
        test=test,
        classes=len(schema.classes) or 1,
        task="classification" if scale is None else "regression",
        label_scale=None if scale is None else (scale[0], scale[1]),
        class_names=schema.classes,
        site=sites,
        site_names=site_names,
        schema=schema,
    )


def _role(table: Table, role: str, given: str | None, schema: DataSchema) -> str | None:
    """The column of a role: the given one ("" is none), or one of that name that is no input."""
    taken = {schema.label, *(column.name for column in schema.columns)}
    if given is None:
        return role if role in table.columns and role not in taken else None
    if given in taken:
        raise DataError(
            f"{table.name}: data.{role} = {given!r}, which the model's schema has as an input or label; name another column"
        )
    return given or None


def _scaled(
    rows: Rows, schema: DataSchema, training: npt.NDArray[np.bool_], sites: Sites | None
) -> npt.NDArray[np.float32]:
    if schema.scale != "site":
        moments = rows.moments
        return rows.x.astype(np.float32, copy=False) if moments is None else moments.apply(rows.x)
    x = np.empty(rows.x.shape, np.float32)
    groups = [np.ones(len(x), np.bool_)] if sites is None else [sites == site for site in np.unique(sites)]
    for group in groups:
        own = local_moments(rows.x[group], training[group], rows.categories, rows.standardised)
        x[group] = own.apply(rows.x[group])
    return x
