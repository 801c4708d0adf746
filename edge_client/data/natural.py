"""Rows to predict, in natural form: a table with the columns of a model's data schema, or an array of its input's shape."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import DataConfig, DataProblem
from edge_client.data.contract import options_of, shortened
from edge_client.data.csv_file import CsvOptions, open_table
from edge_client.data.examples import PADDING
from edge_client.data.numpy_file import read_archive, read_array
from edge_client.data.options import TableOptions, read_options
from edge_client.data.parquet_file import read_parquet
from edge_client.data.rows import Rows
from edge_client.data.standardise import Moments
from edge_client.data.table import Table
from edge_client.data.table_reader import read_rows
from edge_client.wire.schema import DataSchema


@dataclass(frozen=True)
class Inputs:
    """Rows to predict. `x` [N, …] in the model's form; `y` [N] their classes, None where the file does not say."""

    x: npt.NDArray[Any]
    y: npt.NDArray[np.int32] | None


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
    options = options_of(schema)
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
            f"{path}: rows are {list(x.shape)}, the model takes [N, {shortened(schema.input_shape)}]"
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
