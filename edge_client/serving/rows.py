"""Rows to predict from a file, by the model's data schema: a table with its columns, images, texts, or an array of its input's shape."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.cells import numbers
from edge_client.data.connector import DataProblem
from edge_client.data.contract import TABLE_SUFFIXES, table_at
from edge_client.data.csv_file import open_table
from edge_client.data.image_folder import SUFFIXES
from edge_client.data.labels import Labels
from edge_client.data.numpy_file import read_archive, read_array
from edge_client.data.options import TableOptions
from edge_client.data.quoting import quoted
from edge_client.data.rows import Rows
from edge_client.data.standardise import Moments, local_moments
from edge_client.data.table import Table
from edge_client.data.table_reader import read_rows_to_predict
from edge_client.data.tables import read_table
from edge_client.infer.runtime import Described, InvalidRows, check_rows
from edge_client.serving.images import from_pixels, image_files, read_images
from edge_client.serving.texts import SUFFIX, encode, read_lines
from edge_client.wire.schema import DataSchema

_ARRAYS = (".npy", ".npz", ".csv")


@dataclass(frozen=True)
class Reading:
    """What a file needs besides the schema.

    Attributes:
        leave_out: further columns of a table that are not inputs.
        encoding: of its text; None: as the schema says.
        moments: what numbers are scaled by, for a schema whose scale is each site's own.
    """

    leave_out: tuple[str, ...] = ()
    encoding: str | None = None
    moments: Moments | None = None


@dataclass(frozen=True)
class Inputs:
    """Rows to predict.

    Attributes:
        x: [N, …] in the model's form.
        y: their classes, or quantities in their own unit [N]; None where the file does not say.
        last: of texts to continue, the index [N] of the last token of each.
        sources: of images, the file of each.
    """

    x: npt.NDArray[Any]
    y: npt.NDArray[Any] | None
    last: npt.NDArray[np.int64] | None = None
    sources: tuple[str, ...] = ()


def read_rows(path: Path, manifest: Described, reading: Reading = Reading()) -> Inputs:
    """The checked rows of `path` for a model.

    Raises:
        DataProblem: the file cannot be read, has no rows, or its rows do not fit the model.
    """
    return _checked(path, read_inputs(path, manifest.data_schema, _name(manifest), reading), manifest)


def concatenate(parts: Sequence[Inputs]) -> Inputs:
    """The rows of several files, in their order; classes only if every file has them."""
    known = [part.y for part in parts if part.y is not None]
    last = [part.last for part in parts if part.last is not None]
    return Inputs(
        np.concatenate([part.x for part in parts]),
        np.concatenate(known) if len(known) == len(parts) else None,
        np.concatenate(last) if len(last) == len(parts) else None,
        tuple(source for part in parts for source in part.sources),
    )


def is_natural(path: Path, schema: DataSchema) -> bool:
    """Whether the schema alone says how the file is read: a table, images or texts, but no plain array."""
    if schema.kind in ("table", "array"):
        return schema.kind == "table"
    return path.suffix.lower() not in _ARRAYS


def checked_arrays(path: Path, inputs: Inputs, manifest: Described) -> Inputs:
    """Rows that were read from `path`, in the shape and dtype that a release takes.

    Raises:
        DataProblem: there are none, or they do not fit the model.
    """
    shaped = _shaped(path, inputs.x, inputs.y, manifest.data_schema, _name(manifest))
    return _checked(path, shaped, manifest)


def read_inputs(path: Path, schema: DataSchema, model: str, reading: Reading = Reading()) -> Inputs:
    """As `read_rows`, for any model with a schema; `model` is its name in messages. Never loads a pickle."""
    if not path.exists():
        raise DataProblem(f"{path}: No such file or directory")
    if schema.kind == "table":
        return _table(path, schema, model, reading)
    if is_natural(path, schema):
        if reading.leave_out:
            raise DataProblem(f"{path}: has no columns to leave out; --leave-out is for tables")
        return _images(path, schema, model) if schema.image else _texts(path, schema, model, reading)
    if schema.image is not None:
        return _image_arrays(path, schema, model, reading)
    return _shaped(path, *read_arrays(path, reading), schema, model)


def _images(path: Path, schema: DataSchema, model: str) -> Inputs:
    assert schema.image is not None, "of kind image"
    if not path.is_dir() and path.suffix.lower() not in SUFFIXES:
        expected = ", ".join((*SUFFIXES, *_ARRAYS))
        raise DataProblem(f"{path}: {model} takes images; expected a folder or a file named {expected}")
    files = image_files(path)
    x = read_images(files, schema.image, schema.input_shape)
    folders = [file.folder for file in files if file.folder is not None]
    y = Labels(schema.classes).indices(folders, lambda row: str(files[row].path.parent)) if folders else None
    return Inputs(x, y, sources=tuple(str(file.path) for file in files))


def _image_arrays(path: Path, schema: DataSchema, model: str, reading: Reading) -> Inputs:
    """Whole numbers are pixels; other numbers are taken as the model takes them."""
    assert schema.image is not None, "of kind image"
    x, y = read_arrays(path, reading)
    if x.dtype.kind in "iu":
        x = from_pixels(x, schema.image, schema.input_shape, str(path))
    return _shaped(path, x, y, schema, model)


def _texts(path: Path, schema: DataSchema, model: str, reading: Reading) -> Inputs:
    assert schema.text is not None, "of kind text"
    if path.suffix.lower() != SUFFIX:
        raise DataProblem(f"{path}: {model} takes texts; expected a file named {SUFFIX}, .npy or .npz")
    lines = read_lines(path, reading.encoding or schema.encoding or None)
    x, last = encode(lines, schema.text, schema.input_shape[0], str(path))
    return Inputs(x, None, last if schema.text.predicts == "next_token" else None)


def _name(manifest: Described) -> str:
    return f"{manifest.model}:{manifest.version}"


def _checked(path: Path, inputs: Inputs, manifest: Described) -> Inputs:
    try:
        return replace(inputs, x=check_rows(inputs.x, manifest))
    except InvalidRows as error:
        raise DataProblem(f"{path}: {error}") from None


def _shaped(
    path: Path, x: npt.NDArray[Any], y: npt.NDArray[Any] | None, schema: DataSchema, model: str
) -> Inputs:
    shape = schema.input_shape
    if x.ndim == 0 or int(np.prod(x.shape[1:])) != int(np.prod(shape)):
        raise DataProblem(f"{path}: rows are {list(x.shape[1:])}, {model} takes {list(shape)}")
    if not len(x):
        raise DataProblem(f"{path}: has no rows")
    y = None if y is None else _known(y, len(x), schema, path)
    if schema.input_dtype == "int32" and x.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            ids = x.astype(np.int32)
        if (ids != x).any():
            raise DataProblem(f"{path}: {model} takes ids, whole numbers")
        x = ids
    return Inputs(x.reshape(len(x), *shape), y)


def _known(y: npt.NDArray[Any], rows: int, schema: DataSchema, path: Path) -> npt.NDArray[Any]:
    """The array y of a file: classes, or quantities."""
    is_quantity = schema.label_scale is not None
    if (
        (y.ndim != 1 if is_quantity else False)
        or len(y) != rows
        or y.dtype.kind not in ("fiu" if is_quantity else "iu")
    ):
        what = "a number" if is_quantity else "a class index"
        raise DataProblem(f"{path}: y is {y.dtype} {list(y.shape)}, expected {what} for each of {rows} rows")
    return y.astype(np.float64 if is_quantity else np.int32)


def read_arrays(path: Path, reading: Reading) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """The numbers of a file as they are, [N, …], and the array `y` of a .npz that has one.

    Raises:
        DataProblem: the file cannot be read, or holds no rows of numbers.
    """
    leave_out = reading.leave_out
    if path.suffix not in _ARRAYS:
        raise DataProblem(f"{path}: expected a file named .npy, .npz or .csv")
    if leave_out and path.suffix != ".csv":
        raise DataProblem(f"{path}: has no columns to leave out; --leave-out is for .csv")
    return (_columns(path, leave_out), None) if path.suffix == ".csv" else _numpy(path)


def _table(path: Path, schema: DataSchema, model: str, reading: Reading) -> Inputs:
    if path.suffix.lower() not in TABLE_SUFFIXES:
        found = "this is a folder" if path.is_dir() else f"this is named {path.suffix or 'without an ending'}"
        raise DataProblem(f"{path}: {model} reads tables, .csv, .tsv, .txt or .parquet; {found}")
    if reading.moments is None:
        require_given_scale(schema, model, str(path))
    needed = [column.name for column in schema.columns if column.name in reading.leave_out]
    if needed:
        raise DataProblem(
            f"{path}: {model} needs column {needed[0]!r}; --leave-out is for columns that are not inputs"
        )
    rows = read_natural(path, schema, reading)
    scaling = reading.moments if schema.scale == "site" else rows.moments
    x = rows.x if scaling is None else scaling.apply(rows.x)
    return Inputs(x.astype(np.float32, copy=False), rows.labels)


def require_given_scale(schema: DataSchema, model: str, place: str) -> None:
    """Raises DataProblem: numbers are scaled by each site's own rows, which the model does not hold."""
    if schema.scale == "site" and any(column.kind != "category" for column in schema.columns):
        raise DataProblem(
            f'{place}: {model} scales numbers by each site\'s own mean and deviation (data.scale = "site"), which the model does not '
            "hold; name the training rows of the site too: --data NAME on its device, --site-rows TABLE elsewhere, site_rows in Python"
        )


def site_moments(path: Path, schema: DataSchema, encoding: str | None = None) -> Moments:
    """What numbers of a site are scaled by: its training rows' means and deviations, of the table in `path`.

    Raises:
        DataProblem: the table cannot be read, or the model scales numbers otherwise.
    """
    if schema.scale != "site":
        raise DataProblem(
            f'{path}: the site\'s rows are for models with data.scale = "site"; this one has "{schema.scale}"; leave --site-rows out'
        )
    site = read_natural(path, schema, Reading(encoding=encoding))
    training = np.ones(len(site.x), np.bool_) if site.test is None else ~site.test
    return local_moments(site.x, training, site.categories, site.standardised)


def read_natural(path: Path, schema: DataSchema, reading: Reading = Reading()) -> Rows:
    """The rows of a table as the schema's columns, not yet scaled; labels are `PADDING` where it has none."""
    leave_out = reading.leave_out
    known = replace(schema, ignored=(*schema.ignored, *leave_out))

    def all_rows(table: Table, options: TableOptions) -> Rows:
        for name in leave_out:
            table.index(name, "--leave-out")
        return read_rows_to_predict(table, options)

    return read_table(table_at(path, known, reading.encoding), all_rows)


def _numpy(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    if path.suffix == ".npy":
        return read_array(path), None
    arrays = read_archive(path)
    if "x" not in arrays:
        raise DataProblem(f"{path}: has no array 'x'; it has {', '.join(arrays) or 'none'}")
    return arrays["x"], arrays.get("y")


def _columns(path: Path, leave_out: tuple[str, ...]) -> npt.NDArray[np.float64]:
    """The numbers of a table by the places of its columns, for a model without a schema of columns."""
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
