"""A model's data schema applied to data: to a device's data set before it trains, and to rows to predict.

The schema says what the columns are. A device's configuration says where its rows lie, and may repeat what the schema says;
where the two contradict each other the data set is refused, because the model would be trained on something else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import DataConfig, DataProblem
from edge_client.data.csv_file import CsvOptions, open_table
from edge_client.data.examples import PADDING
from edge_client.data.numpy_file import read_archive, read_array
from edge_client.data.options import TableOptions, read_options
from edge_client.data.parquet_file import read_parquet
from edge_client.data.quoting import listed
from edge_client.data.rows import Rows
from edge_client.data.standardise import Moments
from edge_client.data.table import Table
from edge_client.data.table_reader import read_rows
from edge_client.wire.schema import DataSchema

TABLE_KINDS = ("csv", "parquet", "sqlite")

_NOT_FOR_A_SCHEMA = ("scale", "shape", "dtype")
"""Options of single values, which the schema's columns leave no room for."""


@dataclass(frozen=True)
class Inputs:
    """Rows to predict. `x` [N, …] in the model's form; `y` [N] their classes, None where the file does not say."""

    x: npt.NDArray[Any]
    y: npt.NDArray[np.int32] | None


def with_schema(config: DataConfig, schema: DataSchema) -> DataConfig:
    """The data set's configuration with everything that the schema says.

    Raises:
        DataProblem: an option contradicts the schema.
    """
    if schema.kind != "table" or config.kind not in TABLE_KINDS:
        return config
    given = dict(config.options)
    if surplus := [name for name in _NOT_FOR_A_SCHEMA if name in given]:
        raise DataProblem(
            f"{config.kind} data: option {surplus[0]} does not fit the model's schema, which says how every column is read; remove it"
        )
    said = _options(schema)
    if config.kind != "csv":
        said.pop("encoding", None)
    said["exclude"] = [*said["exclude"], *given.pop("exclude", ())]
    if "label" in given:
        del said["label"]  # a device's column may have another name
    for name, value in said.items():
        own = given.get(name, value)
        same = sorted(own) == sorted(value) if name == "features" else _plain(own) == _plain(value)
        if not same:
            raise DataProblem(
                f"{config.kind} data: option {name} says {_short(own)}, the model's schema {_short(value)}; remove the option, the "
                "schema comes with the task"
            )
    return replace(config, options=given | said)


def read_inputs(path: Path, schema: DataSchema, moments: Moments | None = None) -> Inputs:
    """The rows of a file in natural form: a table with the schema's columns in any order, or an array of the input's shape.

    Args:
        path: `.csv`, `.parquet`, `.npy`, or `.npz` with an array `x` and maybe `y`.
        moments: what numbers are scaled by, for a schema whose scale is each site's own.

    Raises:
        DataProblem: naming file, line, column and value, and what was expected.
    """
    if schema.kind == "array":
        return _array(path, schema)
    if path.suffix.lower() not in (".csv", ".tsv", ".txt", ".parquet"):
        raise DataProblem(f"{path}: the model reads tables; expected a file named .csv or .parquet")
    if schema.scale == "site" and moments is None and any(each.kind != "category" for each in schema.columns):
        raise DataProblem(
            f"{path}: the model's numbers are scaled by each site's own mean and deviation (data.scale = \"site\"), which the model "
            "does not hold; name the table of the site's training rows too"
        )
    rows = read_natural(path, schema)
    scaling = moments if schema.scale == "site" else rows.moments
    x = rows.x if scaling is None else scaling.apply(rows.x)
    known = bool((rows.y != PADDING).any())
    return Inputs(x.astype(np.float32, copy=False), rows.y if known else None)


def read_natural(path: Path, schema: DataSchema) -> Rows:
    """The rows of a table as the schema's columns, not yet scaled."""
    options = _options(schema)
    kind = "parquet" if path.suffix.lower() == ".parquet" else "csv"
    if kind == "csv":
        read, _ = read_options(CsvOptions, DataConfig("csv", path, options))
        with open_table(path, encoding=read.encoding, limit_bytes=sys.maxsize) as table:
            return _rows(table, read)
    options.pop("encoding", None)
    plain, _ = read_options(TableOptions, DataConfig(kind, path, options))
    return read_parquet(path, plain, _rows)


def _rows(table: Table, options: TableOptions) -> Rows:
    return read_rows(table, options, labelled=options.label in table.columns)


def _options(schema: DataSchema) -> dict[str, Any]:
    """The options of a data set that say the same as the schema."""
    texts = [column for column in schema.columns if column.kind == "category"]
    options: dict[str, Any] = {
        "label": schema.label,
        "features": [column.name for column in schema.columns],
        "exclude": list(schema.ignored),
        "classes": list(schema.classes),
        "categories": {column.name: list(column.categories) for column in texts},
        "other": [column.name for column in texts if column.other],
        "fold": [column.name for column in texts if column.fold],
        "dates": [column.name for column in schema.columns if column.kind == "date"],
        "standardised": [column.name for column in schema.columns if column.standardised],
        "scaling": {
            column.name: [column.mean, column.deviation]
            for column in schema.columns
            if column.mean is not None and column.deviation is not None
        },
        "standardise": "local" if schema.scale == "site" else "none",
        "closed": True,
    }
    return options | ({"encoding": schema.encoding} if schema.encoding else {})


def _array(path: Path, schema: DataSchema) -> Inputs:
    if path.suffix == ".npy":
        arrays: Mapping[str, npt.NDArray[Any]] = {"x": read_array(path)}
    elif path.suffix == ".npz":
        arrays = read_archive(path)
    else:
        raise DataProblem(f"{path}: the model reads arrays; expected a file named .npy or .npz")
    if "x" not in arrays:
        raise DataProblem(f"{path}: has no array 'x'; it has {', '.join(arrays) or 'none'}")
    x, y = arrays["x"], arrays.get("y")
    size = int(np.prod(schema.input_shape))
    if x.ndim == 0 or not len(x) or int(np.prod(x.shape[1:])) != size:
        raise DataProblem(
            f"{path}: rows are {list(x.shape)}, the model takes [N, {_short(schema.input_shape)}]"
        )
    if schema.input_dtype == "int32" and x.dtype.kind not in "iu":
        raise DataProblem(f"{path}: holds {x.dtype}, the model takes ids, whole numbers")
    if x.dtype.kind not in "fiub":
        raise DataProblem(f"{path}: holds {x.dtype}, expected numbers")
    if not np.isfinite(x).all():
        raise DataProblem(f"{path}: holds NaN or an infinity; fill or drop such rows")
    if y is not None and (len(y) != len(x) or y.dtype.kind not in "iu"):
        raise DataProblem(
            f"{path}: y is {y.dtype} {list(y.shape)}, expected a class index for each of {len(x)} rows"
        )
    shaped = x.reshape(len(x), *schema.input_shape)
    return Inputs(np.ascontiguousarray(shaped, schema.input_dtype), None if y is None else y.astype(np.int32))


def _plain(value: Any) -> Any:
    """Tuples as lists, so that values of a file and of Python compare."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    return listed(list(map(str, value))) if isinstance(value, list | tuple | Mapping) else repr(value)
