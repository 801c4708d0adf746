"""Rows given to calibrate and score a model on are read as the model's own, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.datacenter.compression_sources import require_schema_of
from coordinator.errors import UserError
from edge_client.wire.schema import SCHEMA_NAME, ColumnSchema, DataSchema

SCHEMA = DataSchema(
    kind="table",
    input_shape=(1,),
    input_dtype="float32",
    classes=("ill", "well"),
    label="outcome",
    columns=(ColumnSchema("age", "number", mean=50.0, deviation=10.0),),
    scale="federated",
)


def test_a_table_scaled_by_its_own_rows_is_refused(tmp_path: Path) -> None:
    require_schema_of(tmp_path, {"schema": json.loads(SCHEMA.to_json())})  # the model has none
    (tmp_path / SCHEMA_NAME).write_text(SCHEMA.to_json(), "utf-8")
    require_schema_of(tmp_path, {"schema": json.loads(SCHEMA.to_json())})
    shifted = replace(SCHEMA, columns=(ColumnSchema("age", "number", mean=150.0, deviation=10.0),))
    with pytest.raises(UserError, match="scaled and encoded otherwise"):
        require_schema_of(tmp_path, {"schema": json.loads(shifted.to_json())})
