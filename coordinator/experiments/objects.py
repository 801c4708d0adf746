"""A model and data given as objects of the caller's process: written into a run's folder, named in its experiment.

model    `model.py`, and `start.safetensors` for a finished module; they stay, so that the result can be built again
data     `work/data.npz`, of a DataFrame `work/data.csv`, which only the user may read; removed with the other rows when the run is finished
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from datetime import datetime, time
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.errors import UserError
from coordinator.experiments.defaults import data_name
from coordinator.experiments.schema import Data, Experiment
from edge_client.files import write_durably
from models.datasets import own
from models.datasets.dataset import DataError

DATA = Path("work") / "data.npz"
FRAME = Path("work") / "data.csv"
SEED: int = Experiment().seed

Fill = Callable[[Path], None]
"""Writes files into a run's folder."""


def name_objects(
    document: Mapping[str, Any], out: Path, model: Any, data: Any, data_dir: Path | None
) -> tuple[dict[str, Any], Fill]:
    """The experiment with the objects named, and what writes them into the run's folder, `out`.

    `model`: a torch module, or a function or class that builds one, or a name. `data`: a mapping as `own.load` reads
    it, a function that returns one, a DataFrame, or a name. None: as the document says.

    Raises:
        UserError: an object cannot be written down, or the document names one too.
    """
    document, folder = dict(document), out.absolute()
    files: dict[str, bytes] = {}
    arrays: Mapping[str, Any] | None = None
    frame: bytes | None = None
    if model is not None:
        table = _table(document, "model", "name")
        if isinstance(model, str | Path):
            name = str(model)
        else:
            name, files = _model_files(model, table, folder)
        document["model"] = {**table, "name": name}
    if data is not None:
        table = _table(document, "data", "dataset", "path")
        if isinstance(data, str):
            document["data"] = {**table, "dataset": data}
        else:
            if is_frame(data):
                frame, kind, rows = _csv(data), "csv", FRAME
            else:
                arrays = _arrays(data, data_dir, table.get("seed", document.get("seed", SEED)))
                kind, rows = "npz", DATA
            document["data"] = {**table, "dataset": kind, "path": str(folder / rows)}

    def fill(run: Path) -> None:
        for name, content in files.items():
            write_durably(run / name, content)
        if arrays is not None:
            (run / DATA).parent.mkdir(mode=0o700, exist_ok=True)
            np.savez(run / DATA, **arrays)
        if frame is not None:
            (run / FRAME).parent.mkdir(mode=0o700, exist_ok=True)
            write_durably(run / FRAME, frame)

    return document, fill


def run_name(document: Mapping[str, Any], data: Any) -> str:
    """What a run is called that names its folder itself: as its experiment would be."""
    if isinstance(name := document.get("name"), str) and name:
        return name
    table = document.get("data", {})
    named = table if isinstance(table, Mapping) else {}
    dataset, path = named.get("dataset", Data().dataset), named.get("path")
    if data is not None:
        dataset, path = (data, None) if isinstance(data, str) else (DATA.stem, None)
    return data_name(str(dataset), path if isinstance(path, str) else None)


def _table(document: Mapping[str, Any], name: str, *taken: str) -> dict[str, Any]:
    """A table of the document, which must not hold the keys that the object stands for."""
    table = document.get(name, {})
    if not isinstance(table, Mapping):
        raise UserError(f"experiment: {name} = {table!r}: expected a table")
    for key in taken:
        if key in table:
            raise UserError(
                f"experiment: {name}.{key} = {table[key]!r} and the argument `{name}` are both given; keep one of them"
            )
    return dict(table)


def _model_files(model: Any, table: Mapping[str, Any], folder: Path) -> tuple[str, dict[str, bytes]]:
    from models.objects import torch_model
    from models.objects.source import NotWritable

    options = {key: value for key, value in table.items() if key not in ("init", "adapt", "register")}
    try:
        files = torch_model.write(model, options)
    except NotWritable as error:
        raise UserError(f"model: {error}") from error
    return f"{folder / torch_model.SOURCE}:{torch_model.BUILDER}", files


def is_frame(data: Any) -> bool:
    """Whether this is a DataFrame; pandas itself may be absent."""
    return callable(getattr(data, "to_dict", None)) and hasattr(data, "columns")


def _csv(frame: Any) -> bytes:
    """A DataFrame as the text of a table, so that its columns are read as those of a file."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(map(str, frame.columns))
    for record in frame.to_dict("records"):
        writer.writerow(_cell(value) for value in record.values())
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    if value is None or value != value or type(value).__name__ == "NAType":
        return ""
    if isinstance(value, datetime):  # pandas has no plain dates
        return value.date().isoformat() if value.time() == time() else value.isoformat()
    return repr(float(value)) if isinstance(value, float) else str(value)


def _arrays(data: Any, data_dir: Path | None, seed: int) -> dict[str, Any]:
    try:
        if callable(data):
            data = own.call(data, getattr(data, "__name__", "data"), data_dir, seed)
        if not isinstance(data, Mapping):
            raise DataError(
                f"it is a {type(data).__name__}, expected a mapping such as {{'x': …, 'y': …}}, a function that returns one, or a pandas DataFrame"
            )
        return own.archive(data, seed)
    except DataError as error:
        raise UserError(f"data: {error}") from error
