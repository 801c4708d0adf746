"""Reconstructed rows in their natural form: the columns and units of a table, the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.wire.schema import ColumnSchema, DataSchema

_DATES = range(-719_162, 2_932_897)
"""Days from 1970-01-01 that a date can be: years 1 to 9999."""


def natural_row(row: npt.NDArray[np.float32], schema: DataSchema) -> dict[str, str]:
    """The cells of a row of a table [values], by column. Numbers that each site scales by its own rows stay in deviations."""
    cells, at = {}, 0
    flat = row.reshape(-1)
    for column in schema.columns:
        values = flat[at : at + column.width]
        at += column.width
        cells[column.name] = _cell(column, values)
    return cells


def _cell(column: ColumnSchema, values: npt.NDArray[np.float32]) -> str:
    if column.kind == "category":
        names = [*column.categories, *(["another text"] if column.other else [])]
        return names[int(np.argmax(values))] if len(values) and values.max() > 0.5 else ""
    if column.standardised or (column.mean is None and column.kind == "date"):
        return f"{float(values[0]):+.2f} deviations"
    number = float(values[0]) * ((column.deviation or 1.0) if column.mean is not None else 1.0) + (
        column.mean or 0.0
    )
    if column.kind == "date" and int(number) in _DATES:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=round(number))).date().isoformat()
    return f"{number:.4g}{f' {column.unit}' if column.unit else ''}"


def natural_tokens(ids: Sequence[int], schema: DataSchema | None) -> list[str]:
    """Tokens as text; their ids where the schema does not name them."""
    text = None if schema is None else schema.text
    if text is None:
        return [str(each) for each in ids]
    shown = []
    for each in ids:
        if each == text.padding and text.predicts == "class":
            continue
        at = each - text.first
        if text.vocabulary:
            token = text.vocabulary[at] if 0 <= at < len(text.vocabulary) else ""
            shown.append(
                (token if token.isprintable() and token.strip() == token else repr(token)) or f"#{each}"
            )
        else:
            shown.append(repr(chr(each)) if 32 <= each < 127 else f"#{each}")
    return shown


def read_schema(data_info: Any) -> DataSchema | None:
    """The schema in a description of data."""
    from edge_client.wire import schema as schemas

    document = data_info.get("schema")
    return None if document is None else schemas.from_document(document, "the data's schema")
