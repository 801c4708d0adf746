"""The workspace: a run's data as plain arrays in a folder, written once and mapped by every worker.

It lies under the run's folder and is removed when the run is finished, so that a killed run leaves nothing
in shared memory, and a resumed one finds its data or makes it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.files import write_durably
from models import datasets
from models.datasets.quoting import content_hidden

_FORMAT = 1


@dataclass(frozen=True)
class Opened:
    """Arrays of a prepared run, memory-mapped. `part(i)` gives the rows of client i."""

    x: npt.NDArray[Any]
    y: npt.NDArray[np.int32]
    test_rows: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int32]
    parts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def part(self, index: int) -> npt.NDArray[np.int64]:
        start = int(self.ends[index - 1]) if index else 0
        return self.parts[start : int(self.ends[index])]


def prepare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Loads and partitions a data set into `request["folder"]` and says what it found.

    `request`: folder, seed, data (the experiment's table), clients (or null: all sites), data_dir, and whether errors may
    show what is in the files (`quotes`).

    Raises:
        datasets.DataError: the data or its description is wrong.
    """
    with nullcontext() if request.get("quotes", True) else content_hidden():
        return _prepared(request)


def _prepared(request: Mapping[str, Any]) -> dict[str, Any]:
    folder, data, seed = Path(request["folder"]), request["data"], request["seed"]
    dataset = datasets.load(
        data["dataset"],
        path=data["path"],
        label=data["label"],
        site=data["site"],
        split=data["split"],
        features=data["features"],
        **{key: data[key] for key in ("length", "vocab") if data[key] is not None},
        data_dir=Path(request["data_dir"]) if request["data_dir"] else None,
        seed=seed,
        clients=request["clients"],
    )
    public = datasets.public_rows(dataset, data["public_samples"], seed)
    parts = datasets.partition(
        data["partition"], dataset, clients=request["clients"], seed=seed, exclude=public
    )
    found = {
        "format": _FORMAT,
        "fingerprint": dataset.fingerprint(),
        "clients": list(datasets.client_names(data["partition"], dataset, len(parts))),
        "examples": [len(part) for part in parts],
        "classes": dataset.classes,
        "class_names": list(dataset.class_names),
        "input_shape": list(dataset.input_shape),
        "input_dtype": dataset.input_dtype,
        "task": dataset.task,
        "site_names": list(dataset.site_names),
        "preview": list(datasets.preview(dataset)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        "x": np.ascontiguousarray(dataset.x),
        "y": np.ascontiguousarray(dataset.y),
        "test_rows": np.flatnonzero(dataset.test).astype(np.int64),
        "owners": datasets.owners(dataset, parts, seed),
        "parts": np.concatenate(parts).astype(np.int64),
        "ends": np.cumsum([len(part) for part in parts]).astype(np.int64),
        "public": np.asarray(public, np.int64),
        "sites": dataset.site if dataset.site is not None else np.zeros(0, np.int32),
    }
    for name, array in written.items():
        _save_durably(folder / f"{name}.npy", array)
    # Last and whole: where it is, the workspace is complete.
    write_durably(folder / "found.json", json.dumps(found).encode())
    return found


def _save_durably(path: Path, array: npt.NDArray[Any]) -> None:
    try:
        with path.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # numpy's own names neither the file nor the reason
        raise OSError(f"{path} cannot be written: {error.strerror or error}; is the disk full?") from error


def open_workspace(folder: Path) -> Opened:
    """The arrays of a prepared workspace."""

    def mapped(name: str) -> npt.NDArray[Any]:
        path = folder / f"{name}.npy"
        try:
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except ValueError:  # an empty array cannot be mapped
            empty: npt.NDArray[Any] = np.load(path, allow_pickle=False)
            return empty

    return Opened(*(mapped(name) for name in ("x", "y", "test_rows", "owners", "parts", "ends")))
