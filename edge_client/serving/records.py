"""Rows in natural form from a program: mappings from the columns of a table to its cells, or texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edge_client.data.connector import DataProblem
from edge_client.data.contract import options_of
from edge_client.data.table import Table
from edge_client.data.table_reader import read_rows
from edge_client.serving.rows import Inputs, Reading, require_given_scale
from edge_client.serving.texts import encode
from edge_client.wire.schema import DataSchema

_AS_THE_SCHEMA_SAYS = Reading()


def read_records(
    records: Sequence[Any], schema: DataSchema, model: str, reading: Reading = _AS_THE_SCHEMA_SAYS
) -> Inputs:
    """Mappings by column name for a model of tables, texts for one of texts. A label is not read. `model`: its name in messages.

    Raises:
        DataProblem: there are none, they are of another kind, or they do not fit the model.
    """
    if not records:
        raise DataProblem("rows: there are none, expected at least one")
    if schema.text is not None:
        if not all(isinstance(record, str) and record for record in records):
            raise DataProblem(f"rows: {model} takes texts, a non-empty string each")
        ids, last = encode(records, schema.text, schema.input_shape[0], "rows")
        return Inputs(ids, None, last if schema.text.predicts == "next_token" else None)
    if schema.kind != "table":
        shape = list(schema.input_shape)
        raise DataProblem(f"rows: {model} has no columns; send arrays of {shape} as x")
    if reading.moments is None:
        require_given_scale(schema, model, "rows")
    known = replace(schema, ignored=(*schema.ignored, *reading.leave_out))
    rows = read_rows(_table(records, schema), options_of(known), labelled=False)
    moments = reading.moments or rows.moments
    x = rows.x if moments is None else moments.apply(rows.x)
    return Inputs(x.astype(np.float32, copy=False), None)


def _table(records: Sequence[Any], schema: DataSchema) -> Table:
    for number, record in enumerate(records, 1):
        if not isinstance(record, Mapping) or not all(isinstance(name, str) for name in record):
            raise DataProblem(f"rows, row {number}: expected a mapping from columns to values")
        if record.keys() != records[0].keys():
            name = sorted(record.keys() ^ records[0].keys())[0]
            raise DataProblem(
                f"rows, row {number}: column {name!r} is in this row or the first one, but not in both; None stands for no value"
            )
    columns = tuple(records[0])
    texts = {column.name for column in schema.columns if column.kind == "category"}
    cells = ([_cell(record[name], name in texts) for name in columns] for record in records)
    return Table("rows", columns, ("",) * len(columns), enumerate(cells, 1), "row")


def _cell(value: Any, text: bool) -> Any:
    """A cell as a file would hold it: pandas has NaN for a missing text, numbers of NumPy, and 1.0 for a code 1 beside gaps."""
    plain = value.item() if isinstance(value, np.generic) else value
    if type(plain).__name__ in ("NAType", "NaTType") or plain != plain:
        return None
    if isinstance(plain, Mapping | list | tuple | set):
        raise DataProblem(f"rows: a value is a {type(plain).__name__}, expected a number, a text or None")
    return int(plain) if text and isinstance(plain, float) and plain.is_integer() else plain
