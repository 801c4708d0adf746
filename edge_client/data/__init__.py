"""Local files, tables and folders as training examples, read-only.

    [data.digits]                  # what an experiment calls `digits`
    kind = "csv"                   # csv, parquet, sqlite, numpy, images, or an installed plug-in
    path = "/data/digits.csv"
    label = "digit"

`open_data` finds the connector of a kind. An installed package adds kinds by the entry-point group
`fedloop.connectors`: an entry is called with the `DataConfig` and returns a `Connector`.

Options that several kinds share:

    label        column of the label (tables)
    features     columns of the input (tables); default: all others
    categories   column of texts -> its texts, in the order of their places (tables): the column is one-hot, an empty
                 cell is all zeros. Like `classes` the order must be the same on every device
    classes      names of the classes in the order of their indices. Text labels need it, because the order must be
                 the same on every device; without it labels are the indices 0, 1, … themselves
    label_scale  mean and deviation of a label that is a quantity (tables, NumPy), the same on every device; a task to
                 predict a quantity brings it
    dtype        "float32" or "int32" (token ids)
    shape        of one example, such as [8, 8]
    scale        each value is multiplied by it
    exclude      columns that are no input, such as a patient's number (tables)
    other        columns of `categories` with a further value for every text that is not listed (tables)
    fold         columns of `categories` in which upper case and blanks make no difference (tables)
    dates        columns of dates, which become days since 1970-01-01 (tables)
    scaling      column -> its mean and deviation, which numbers are scaled by (tables); gaps become 0
    closed       whether a column without a role is refused (tables); else all others are features
    encoding     of a CSV file, such as "latin-1"; default: UTF-8, or UTF-16 with a byte order mark
    standardise  "none", or "local": mean 0 and deviation 1 over this device's training rows; gaps become 0
    standardised columns whose numbers arrive standardised (tables): "local" only fills their gaps, with the mean
    held_out     share of the rows that is kept for evaluation; default: 0.2
    split        column that says `train` or `test` (tables); it alone decides
    test_path    file or folder whose rows are held out; it alone decides

A hash of a row's own input and label, as read, decides whether it is held out. The choice is therefore the same after
every start, in any order and when rows are added, and equal rows are on the same side.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from edge_client.data.connector import Connector, DataConfig, DataProblem, Preview
from edge_client.wire.schema import DataSchema
from strategies.suggestions import suggest

__all__ = ["GROUP", "Connector", "DataConfig", "DataProblem", "Preview", "open_data"]

GROUP = "fedloop.connectors"

# Imported on use: the libraries behind some of them are large, or not installed.
_BUILT_IN = {
    "csv": "csv_file",
    "parquet": "parquet_file",
    "sqlite": "sqlite_query",
    "numpy": "numpy_file",
    "images": "image_folder",
}


def open_data(config: DataConfig, schema: DataSchema | None = None) -> Connector:
    """The connector for a data set; the data itself is read by its methods. `schema`: of the model, which says how a table is read.

    Raises:
        DataProblem: the kind is unknown, an option does not fit, or a library that the kind needs is missing.
    """
    if schema is not None:
        from edge_client.data.contract import with_schema

        config = with_schema(config, schema)
    if config.kind in _BUILT_IN:
        opener: Callable[[DataConfig], Connector] = import_module(
            f"{__name__}.{_BUILT_IN[config.kind]}"
        ).open_connector
        return opener(config)
    return _from_plug_in(config, _plug_ins())


def problem_of(config: DataConfig) -> str | None:
    """Why a data set cannot be opened, judged by its kind and options alone; None for plug-ins, which are not loaded."""
    if config.kind in _plug_ins():
        return None
    try:
        open_data(config)
    except DataProblem as error:
        return str(error)
    return None


def _plug_ins() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in _BUILT_IN}


def _from_plug_in(config: DataConfig, installed: dict[str, EntryPoint]) -> Connector:
    if config.kind not in installed:
        known = (*_BUILT_IN, *sorted(installed))
        raise DataProblem(
            f"kind {config.kind!r} of data is unknown{suggest(config.kind, known)}; known here: {', '.join(known)}"
        )
    from edge_client.data.plug_in import open_plug_in

    return open_plug_in(config, installed[config.kind])
