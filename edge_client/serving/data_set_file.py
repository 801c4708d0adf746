"""A file read as one of the device's data sets is: for models of plain arrays, whose schema says nothing of columns or scale.

A run on the data set trained the model on what its options make of the cells, so rows to predict need the same options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_client.data.connector import DataConfig, DataProblem
from edge_client.data.contract import TABLE_KINDS, TABLE_SUFFIXES, table_kind
from edge_client.data.numpy_file import NumpyOptions
from edge_client.data.options import TableOptions, read_options
from edge_client.data.rows import Rows, scaled
from edge_client.data.table import Table
from edge_client.data.table_reader import read_rows_to_predict
from edge_client.data.tables import read_table
from edge_client.serving.rows import Inputs, Reading, read_arrays

_OF_ITS_OWN_FILE = ("split", "test_path", "held_out", "query", "delimiter", "encoding", "schema_encoding")
"""Options that say how the data set's own file is written or divided, not what its columns mean."""


def read_as_data_set(path: Path, config: DataConfig, reading: Reading) -> Inputs:
    """The rows of `path` by the options of a data set: its features, label, shape and scale.

    Raises:
        DataProblem: the file cannot be read, or is not of the data set's kind.
    """
    table = path.suffix.lower() in TABLE_SUFFIXES
    if config.kind in TABLE_KINDS and table:
        return _table(path, config, reading)
    if config.kind == "numpy" and not table:
        options, _ = read_options(NumpyOptions, config)
        x, y = read_arrays(path, reading)
        x = scaled(x, options.scale)
        return Inputs(x if reading.moments is None else reading.moments.apply(x), y)
    raise DataProblem(
        f"{path}: the data set is of kind {config.kind!r}, expected a table for a data set that is a table, .npy or .npz for "
        "one of kind 'numpy'; leave --data out to read the file's numbers as they are"
    )


def _table(path: Path, config: DataConfig, reading: Reading) -> Inputs:
    if not path.exists():
        raise DataProblem(f"{path}: No such file or directory")
    given: Mapping[str, Any] = config.options
    options = {name: value for name, value in given.items() if name not in _OF_ITS_OWN_FILE}
    split = [given["split"]] if given.get("split") else []
    options["exclude"] = [*given.get("exclude", ()), *split, *reading.leave_out]
    kind = table_kind(path)
    if kind == "csv":
        known = {
            "encoding": reading.encoding or given.get("encoding"),
            "schema_encoding": given.get("schema_encoding"),
        }
        options |= {name: value for name, value in known.items() if value}

    def all_rows(table: Table, options: TableOptions) -> Rows:
        for name in reading.leave_out:
            table.index(name, "--leave-out")
        return read_rows_to_predict(table, options)

    rows = read_table(replace(config, kind=kind, path=path, options=options), all_rows)
    x = rows.x if reading.moments is None else reading.moments.apply(rows.x)
    return Inputs(x, rows.labels)
