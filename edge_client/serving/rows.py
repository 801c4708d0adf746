"""Rows to predict from a file: `.npy` (one array), `.npz` (its array `x`) or `.csv` (a header line and a number per column)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.cells import numbers
from edge_client.data.connector import DataProblem
from edge_client.data.csv_file import open_table
from edge_client.data.numpy_file import read_archive, read_array
from edge_client.data.quoting import quoted
from edge_client.infer.runtime import InvalidRows, check_rows
from edge_client.wire.inference import InferenceManifest


def read_rows(path: Path, manifest: InferenceManifest, leave_out: tuple[str, ...] = ()) -> npt.NDArray[Any]:
    """The checked rows of `path` in the model's shape [N, …]; flat rows are reshaped. Never loads a pickle.

    Args:
        leave_out: columns of a `.csv` that are not inputs, such as the label.

    Raises:
        DataProblem: the file cannot be read, has no rows, or its rows do not fit the model.
    """
    if path.suffix not in (".npy", ".npz", ".csv"):
        raise DataProblem(f"{path}: expected a file named .npy, .npz or .csv")
    if not path.exists():
        raise DataProblem(f"{path}: No such file or directory")
    if leave_out and path.suffix != ".csv":
        raise DataProblem(f"{path}: has no columns to leave out; --leave-out is for .csv")
    x: npt.NDArray[Any] = _table(path, leave_out) if path.suffix == ".csv" else _numpy(path)
    shape = manifest.input.shape
    if x.ndim == 0 or int(np.prod(x.shape[1:])) != int(np.prod(shape)):
        raise DataProblem(
            f"{path}: rows are {list(x.shape[1:])}, {manifest.model}:{manifest.version} takes {list(shape)}"
        )
    if not len(x):
        raise DataProblem(f"{path}: has no rows")
    if manifest.input.dtype == "int32" and x.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            ids = x.astype(np.int32)
        if (ids != x).any():
            raise DataProblem(f"{path}: {manifest.model}:{manifest.version} takes ids, whole numbers")
        x = ids
    try:
        return check_rows(x.reshape(len(x), *shape), manifest)
    except InvalidRows as error:
        raise DataProblem(f"{path}: {error}") from None


def _numpy(path: Path) -> npt.NDArray[Any]:
    if path.suffix == ".npy":
        return read_array(path)
    arrays = read_archive(path)
    if "x" not in arrays:
        raise DataProblem(f"{path}: has no array 'x'; it has {', '.join(arrays) or 'none'}")
    return arrays["x"]


def _table(path: Path, leave_out: tuple[str, ...]) -> npt.NDArray[np.float64]:
    with open_table(path, limit_bytes=sys.maxsize) as table:
        for name in leave_out:
            table.index(name, "--leave-out")
        records = list(table.records)
    kept = [place for place, name in enumerate(table.columns) if name not in leave_out]
    x = np.empty((len(records), len(kept)))
    for column, place in enumerate(kept):
        x[:, column] = numbers([cells[place] for _, cells in records], table.decimal_comma)
        if len(gaps := np.flatnonzero(np.isnan(x[:, column]))):
            line, cells = records[gaps[0]]
            raise DataProblem(
                f"{table.place(line, table.columns[place])}: {quoted(cells[place])} is not a number; exclude a column that "
                "is not an input with --leave-out NAME"
            )
    return x
