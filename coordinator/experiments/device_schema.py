"""`data.schema`: the data schema of a table that only devices hold, read with the experiment file and checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import UserError
from edge_client.files import read_regular
from edge_client.wire import schema as schemas
from edge_client.wire.schema import DataSchema
from edge_client.wire.strict import InvalidDocument
from models.datasets import names
from models.datasets.dataset import DataError

if TYPE_CHECKING:
    from coordinator.experiments.schema import Data, FleetKind


def inline(document: dict[str, Any]) -> dict[str, Any]:
    """The document, in which the contents replace the file that `data.schema` names. Changes it in place.

    Raises:
        UserError: the file cannot be read, or is no data schema.
    """
    data = document.get("data")
    if not isinstance(data, dict) or not isinstance(name := data.get("schema"), str):
        return document
    place = f"data.schema = {name!r}"
    try:
        schema = schemas.from_json(read_regular(Path(name).expanduser()), place)
    except OSError as error:
        raise UserError(f"{place}: cannot be read: {error.strerror or error}") from None
    except InvalidDocument as error:
        raise UserError(str(error)) from None
    data["schema"] = as_table(schema)
    return document


def as_table(schema: DataSchema) -> dict[str, Any]:
    """The schema as a table of an experiment file; TOML has no null, so keys without a value are left out."""

    def given(values: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if value is not None}

    table: dict[str, Any] = json.loads(schema.to_json(), object_hook=given)
    return table


def find_problems(data: Data, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each reason why the experiment cannot use its `data.schema`."""
    try:
        names.check_name(data.loaded_as)
    except DataError:
        pass
    else:
        given = f"data.dataset = {data.dataset!r}" if data.path is None else f"data.path = {data.path!r}"
        yield (
            f"data.schema is for a table that only devices hold, but the coordinator loads {given} itself, and with it the "
            "schema; leave data.schema or data.path out; data.dataset is the name that the devices' configurations use"
        )
        return
    if fleet != "devices":
        yield (
            f"data.schema describes a table that only devices hold, data.dataset = {data.dataset!r}; train on it with "
            "`fedloop run`"
        )
        return
    try:
        schema = data.read_schema()
    except InvalidDocument as error:
        yield str(error)
        return
    assert schema is not None, "the caller checks"
    if schema.kind != "table":
        yield (
            f"data.schema describes data of kind {schema.kind!r}, expected a table; describe other data with "
            "data.input_shape and data.classes"
        )
    elif not schema.label:
        yield "data.schema names no label; add the column that the model predicts, as label"
    elif schema.label_scale is None and len(schema.classes) < 2:
        yield (
            f"data.schema names {len(schema.classes)} classes of the label {schema.label!r}, expected two or more; to predict "
            "a quantity it needs label_scale, the label's mean and deviation"
        )
    elif schema.label_scale is not None and data.task != "regression":
        yield 'data.schema has label_scale, so its label is a quantity; set data.task = "regression"'
    elif data.label != schema.label:
        yield f"data.label = {data.label!r}, but data.schema says {schema.label!r}; leave data.label out"
    else:
        described = data.described_shape
        says = data.model_copy(update=dict.fromkeys(described)).described_shape
        for key, value in described.items():
            if value != says[key]:
                yield f"data.{key} = {value!r}, but data.schema says {says[key]!r}; leave data.{key} out"
