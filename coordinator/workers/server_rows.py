"""Rows of the server's own in a workspace: rows that no client gets, or those of another data set.

server_x.npy, server_y.npy      written once, when the workspace is
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.workers import workspace_arrays
from edge_client.data.connector import DataProblem
from edge_client.data.contract import require_inputs
from edge_client.data.examples import Examples
from models import datasets
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import stream
from models.labels import counting

_NAMES = ("server_x", "server_y")


def save(
    dataset: Dataset, public: npt.NDArray[np.int64], request: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Writes the server's rows into the workspace; returns what the data's description says of them.

    `dataset`, `public`: of the clients, and its rows that none of them gets. `request`: as `workspace.prepare`; `request["server"]` names
    another data set, or none.

    Raises:
        DataError: the other data set cannot be read, is not like the clients', has too few rows, or is the clients' own.
    """
    other, fingerprint = request["server"], ""
    x, y, ids = dataset.x[public], dataset.y[public], 0
    if other["dataset"] is not None:
        loaded = _load(other, dataset, request)
        rows = _draw(loaded, other["samples"], request["seed"])
        x, y, fingerprint = loaded.x[rows], loaded.y[rows], loaded.fingerprint()
        ids = int(x.max(initial=-1)) + 1 if loaded.input_dtype == "int32" else 0
    for name, array in zip(_NAMES, (x, y), strict=True):
        workspace_arrays.save(folder / f"{name}.npy", np.ascontiguousarray(array))
    labelled = int(np.count_nonzero(counting(y).reshape(len(y), -1).any(1)))
    return {"server": {"rows": len(x), "labelled": labelled, "fingerprint": fingerprint, "ids": ids}}


def open_rows(folder: Path) -> Examples:
    """The server's rows of a workspace."""
    return Examples(*(workspace_arrays.load(folder / f"{name}.npy") for name in _NAMES))


def _load(settings: Mapping[str, Any], dataset: Dataset, request: Mapping[str, Any]) -> Dataset:
    """The other data set, read as the rows of the clients' model."""
    data_dir = Path(request["data_dir"]) if request["data_dir"] else None
    schema = dataset.described
    try:
        loaded = datasets.from_settings(
            settings,
            data_dir=data_dir,
            seed=request["seed"],
            schema=schema if settings["with_labels"] or schema.kind == "table" else None,
        )
    except DataError as error:
        raise DataError(f"server_data: {error}") from error
    if why := _difference(loaded, dataset, settings["with_labels"]):
        raise DataError(
            f"server_data.dataset = {settings['dataset']!r}: {why}; expected data like that of the clients"
        )
    if loaded.fingerprint() == dataset.fingerprint():
        raise DataError(
            f"server_data.dataset = {settings['dataset']!r} holds the rows of the clients and of the test; for rows that no client gets "
            "set data.public_samples instead"
        )
    return loaded


def _difference(loaded: Dataset, dataset: Dataset, with_labels: bool) -> str:
    """Why the rows are not like the clients'; empty if they are."""
    if (loaded.input_shape, loaded.input_dtype) != (dataset.input_shape, dataset.input_dtype):
        return (
            f"a row is {loaded.input_dtype} of shape {list(loaded.input_shape)}, and that of a client is {dataset.input_dtype} of shape "
            f"{list(dataset.input_shape)}"
        )
    try:
        require_inputs(loaded.x, dataset.described)
    except DataProblem:
        ranges = [f"{each.x.min():g} to {each.x.max():g}" for each in (loaded, dataset)]
        return f"its values are {ranges[0]}, and those of the clients {ranges[1]}"
    if not with_labels:
        return ""
    if loaded.task != dataset.task:
        return f"it is for {loaded.task}, and the clients' data for {dataset.task}"
    if loaded.classes > dataset.classes:
        return f"it has {loaded.classes} classes, and the clients' data {dataset.classes}"
    return ""


def _draw(dataset: Dataset, count: int | None, seed: int) -> npt.NDArray[np.int64]:
    """So many rows of all, ascending; None: all."""
    rows = len(dataset.x)
    if count is None:
        return np.arange(rows)
    if count > rows:
        raise DataError(
            f"server_data.samples = {count:,}, but the data set has {rows:,} rows; expected 1 to {rows:,}"
        )
    return np.sort(stream(seed, "server").permutation(rows)[:count])
