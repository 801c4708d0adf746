"""Rows to predict from a file: `.npy` (one array), `.npz` (its array `x`) or `.csv` (a header line and a number per column)."""

from __future__ import annotations

import csv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import DataProblem
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
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return content
        with content:
            if "x" not in content.files:
                raise DataProblem(f"{path}: has no array 'x'; it has {', '.join(content.files) or 'none'}")
            array: npt.NDArray[Any] = content["x"]
            return array
    except OSError as error:
        raise DataProblem(f"{path}: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, DataProblem):
            raise
        # NumPy calls every unknown file a pickle and suggests loading it unsafely: omit that.
        why = "" if "allow_pickle" in str(error) else f": {error}"
        raise DataProblem(f"{path}: is not a NumPy file of plain numbers{why}") from None


def _table(path: Path, leave_out: tuple[str, ...]) -> npt.NDArray[np.float32]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            names = [name.strip() for name in next(reader, [])]
            for name in leave_out:
                if name not in names:
                    raise DataProblem(f"{path}: has no column {name!r}; it has {', '.join(names)}")
            kept = [place for place, name in enumerate(names) if name not in leave_out]
            rows = [_row(path, reader.line_num, cells, names, kept) for cells in reader if cells]
    except OSError as error:
        raise DataProblem(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataProblem(f"{path}: is not a CSV file in UTF-8: {error}") from None
    return np.asarray(rows, np.float32).reshape(len(rows), len(kept))


def _row(path: Path, line: int, cells: list[str], names: list[str], kept: list[int]) -> list[float]:
    if len(cells) != len(names):
        raise DataProblem(f"{path}, line {line}: {len(cells)} values for {len(names)} columns")
    try:
        return [float(cells[place]) for place in kept]
    except ValueError as error:
        raise DataProblem(
            f"{path}, line {line}: {error}; exclude a column that is not an input with --leave-out NAME"
        ) from None
