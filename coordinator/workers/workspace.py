"""The workspace: a run's data as plain arrays in a folder, written once and memory-mapped by every worker
(`coordinator.workers.workspace_arrays`).

It is a subfolder of the run's folder and is removed when the run is finished. A killed run therefore leaves nothing in
shared memory, and a resumed run finds its data or loads it again.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.quoting import content_hidden
from edge_client.files import write_durably
from models import datasets

_FORMAT = 2


def prepare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Loads and partitions a data set into `request["folder"]` and returns its description.

    `request`: folder, seed, data (the experiment's table), clients (null: all sites), data_dir, and whether errors may
    quote the files (`quotes`).

    Raises:
        datasets.DataError: the data or its description is wrong.
    """
    with nullcontext() if request.get("quotes", True) else content_hidden():
        return _load_and_partition(request)


def _load_and_partition(request: Mapping[str, Any]) -> dict[str, Any]:
    folder, data, seed = Path(request["folder"]), request["data"], request["seed"]
    dataset = datasets.from_settings(
        data,
        data_dir=Path(request["data_dir"]) if request["data_dir"] else None,
        seed=seed,
        clients=request["clients"],
    )
    public = datasets.public_rows(dataset, data["public_samples"], seed)
    parts = datasets.partition(
        data["partition"], dataset, clients=request["clients"], seed=seed, exclude=public
    )
    description = {
        "format": _FORMAT,
        "fingerprint": dataset.fingerprint(),
        "clients": list(datasets.client_names(data["partition"], dataset, len(parts))),
        "examples": [len(part) for part in parts],
        "classes": dataset.classes,
        "class_names": list(dataset.class_names),
        "input_shape": list(dataset.input_shape),
        "input_dtype": dataset.input_dtype,
        "task": dataset.task,
        "label_scale": dataset.label_scale,
        "ids": int(dataset.x.max(initial=-1)) + 1 if dataset.input_dtype == "int32" else 0,
        "site_names": list(dataset.site_names),
        "schema": dataset.described.to_document(),
        "preview": datasets.preview(dataset),
        "shown": datasets.preview(dataset, private=True),
    }
    # The folder of a coordinator's run exists already; workers may not change permissions within the home.
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)  # only the owner may read rows of data
    arrays = {
        "x": np.ascontiguousarray(dataset.x),
        "y": np.ascontiguousarray(dataset.y),
        "test_rows": np.flatnonzero(dataset.test).astype(np.int64),
        "owners": datasets.owners(dataset, parts, seed),
        "parts": np.concatenate(parts).astype(np.int64),
        "ends": np.cumsum([len(part) for part in parts]).astype(np.int64),
        "public": np.asarray(public, np.int64),
        "sites": dataset.site if dataset.site is not None else np.zeros(0, np.int32),
    }
    for name, array in arrays.items():
        _save_durably(folder / f"{name}.npy", array)
    # Written last: a workspace with this file is complete.
    write_durably(folder / "found.json", json.dumps(description).encode())
    return description


def _save_durably(path: Path, array: npt.NDArray[Any]) -> None:
    try:
        with path.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # numpy's message names neither the file nor the reason
        failed = OSError(f"{path} cannot be written: {error.strerror or error}; is the disk full?")
        failed.errno = error.errno or errno.ENOSPC
        raise failed from error
