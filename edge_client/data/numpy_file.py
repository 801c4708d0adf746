"""NumPy files: a `.npz` with `x` and `y`, or two `.npy`. Never a pickle.

    .npz   arrays x, y; x_test and y_test where the file itself holds rows out
    .npy   `path` is x, the option `labels` names y; `test_path` and `test_labels` the held-out rows

`x` is [N, …]; `y` is [N], or [N, T] for sequences (-1 is ignored there). With the option
`label_scale` y [N] holds quantities.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import Connector, DataConfig, DataProblem
from edge_client.data.examples import PADDING
from edge_client.data.labels import Labels, quantities
from edge_client.data.options import Options, beside, read_only_problem, read_options
from edge_client.data.rows import Rows, RowsConnector, combined, scaled, shaped

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class NumpyOptions(Options):
    """Options of NumPy files.

    Attributes:
        labels: a `.npy` file; a relative path starts in the folder of `path`.
        test_labels: as `labels`, of the rows in `test_path`.
    """

    labels: str | None = None
    test_labels: str | None = None


def open_connector(config: DataConfig) -> Connector:
    """A Connector to NumPy files."""
    options, path = read_options(NumpyOptions, config)
    if path.suffix == ".npy" and options.labels is None:
        raise DataProblem(
            f"{path}: a .npy holds one array; name the one with the labels by the option labels"
        )
    if (options.test_labels is None) != (options.test_path is None or path.suffix != ".npy"):
        raise DataProblem(f"{path}: options test_path and test_labels belong together, for .npy files")
    return RowsConnector(options, lambda: _rows(path, options))


def _rows(path: Path, options: NumpyOptions) -> Rows:
    if path.suffix == ".npy":
        assert options.labels is not None
        train = _examples(read_array(path), read_array(beside(path, options.labels)), options, str(path))
        if options.test_path is None or options.test_labels is None:
            return train
        other = beside(path, options.test_path)
        labels = read_array(beside(path, options.test_labels))
        return combined(train, _examples(read_array(other), labels, options, str(other)), str(other))
    train, test = _archive(path, options)
    if options.test_path is not None:
        if test is not None:
            raise DataProblem(f"{path}: holds x_test already, which option test_path contradicts")
        other = beside(path, options.test_path)
        test = _archive(other, options)[0]
    return train if test is None else combined(train, test, str(path))


def _archive(path: Path, options: NumpyOptions) -> tuple[Rows, Rows | None]:
    """The rows of a `.npz` and, where it has them, those it holds out itself."""
    arrays = read_archive(path)
    for name in ("x", "y"):
        if name not in arrays:
            raise DataProblem(f"{path}: has no array {name!r}; it has {', '.join(sorted(arrays)) or 'none'}")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataProblem(f"{path}: x_test and y_test belong together, one of them is missing")
    train = _examples(arrays["x"], arrays["y"], options, str(path))
    if "x_test" not in arrays:
        return train, None
    if options.held_out is not None:
        raise DataProblem(f"{path}: holds x_test, which option held_out contradicts; leave the option out")
    return train, _examples(arrays["x_test"], arrays["y_test"], options, f"{path}, x_test")


def read_archive(path: Path) -> Mapping[str, Array]:
    """The arrays of a `.npz`, by name. Raises DataProblem: it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if isinstance(archive, np.ndarray):
                raise DataProblem(
                    f"{path}: is one array, expected a .npz; name it .npy and give the option labels"
                )
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise _unreadable(path, error) from None


def read_array(path: Path) -> Array:
    """The array of a `.npy`, mapped from the file. Raises DataProblem: it cannot be read."""
    try:
        array: Array = np.load(path, allow_pickle=False, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(array, np.ndarray):
        raise DataProblem(f"{path}: is an archive, expected one array")
    return array


def _unreadable(path: Path, error: Exception) -> DataProblem:
    if isinstance(error, DataProblem):
        return error
    if isinstance(error, OSError):
        return read_only_problem(path, error)
    if "Object arrays" in str(error) or "Python objects" in str(error):
        return DataProblem(f"{path}: holds Python objects, which are never loaded; save plain arrays")
    # NumPy calls every unknown file a pickle and suggests loading it unsafely: omit that.
    why = "" if "pickle" in str(error) else f": {error}"
    return DataProblem(f"{path}: is not a NumPy file of plain numbers{why}")


def _examples(x: Array, y: Array, options: NumpyOptions, place: str) -> Rows:
    if x.ndim < 2 or y.ndim not in (1, 2) or len(x) != len(y):
        raise DataProblem(
            f"{place}: x is {list(x.shape)} and y {list(y.shape)}, expected [N, …] and [N] (or [N, T]) with the same N"
        )
    values = shaped(scaled(_typed(x, options, place), options.scale), options.shape, place)
    schema = (("x", f"{x.dtype} {list(x.shape[1:])}"), ("y", f"{y.dtype} {list(y.shape[1:])}"))
    return Rows(values, _labels(y, options, place), None, schema)


def _typed(x: Array, options: NumpyOptions, place: str) -> Array:
    """Floats and small integers, such as pixels, are float32 by default; larger integers are ids."""
    if x.dtype.kind not in "fiub":
        raise DataProblem(f"{place}: x holds {x.dtype}, expected numbers")
    ids = x.dtype.kind in "iu" and x.dtype.itemsize > 1
    dtype = options.dtype or (
        "int32" if ids and options.standardise == "none" and options.scale is None else "float32"
    )
    gaps = np.isnan(x) if x.dtype.kind == "f" else np.zeros((), np.bool_)
    allowed = gaps if options.standardise == "local" else np.zeros((), np.bool_)
    with np.errstate(all="ignore"):
        values: Array = np.asarray(x).astype(dtype)
    wrong = ~allowed & (~np.isfinite(values) | ((values != x) if dtype == "int32" else False))
    if wrong.any():
        where = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise DataProblem(
            f"{place}: x[{', '.join(map(str, where))}] is {x[where]}, which is no finite {dtype}"
        )
    return values


def _labels(y: Array, options: NumpyOptions, place: str) -> Array:
    """Whole numbers are class indices, also where classes have names; anything else is looked up."""
    if options.label_scale:
        if y.ndim != 1 or y.dtype.kind not in "fiu":
            raise DataProblem(
                f"{place}: y is {y.dtype} {list(y.shape)}, expected one number a row to predict"
            )
        return quantities(y.tolist(), lambda row: f"{place}, y[{row}]")
    if y.dtype.kind not in "iu":
        cells = y.reshape(-1).tolist()
        return Labels(options.classes).indices(cells, lambda row: f"{place}, y[{row}]").reshape(y.shape)
    least, most = PADDING if y.ndim == 2 else 0, len(options.classes) - 1 if options.classes else 2**31 - 1
    wrong = (y < least) | (y > most)
    if wrong.any():
        where = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise DataProblem(
            f"{place}: y[{', '.join(map(str, where))}] is {y[where]}, expected {least} to {most}"
        )
    return y.astype(np.int32)
