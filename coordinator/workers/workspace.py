"""The workspace: a run's data as plain arrays in a folder, written once and memory-mapped by every worker
(`coordinator.workers.workspace_arrays`).

It is a subfolder of the run's folder and is removed when the run is finished. A killed run therefore leaves nothing in
shared memory, and a resumed run finds its data or loads it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.workers import server_rows, workspace_arrays
from edge_client.data.quoting import content_hidden
from edge_client.files import write_durably
from models import datasets
from models.datasets.large_arrays import gather
from models.datasets.shipped.synthetic import DRAWN

_FORMAT = 2


def prepare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Loads and partitions a data set into `request["folder"]` and returns its description.

    `request`: folder, seed, data (the experiment's table), clients (null: all sites), data_dir, whether errors may quote the files
    (`quotes`), how many of the held-out rows are scored (`sample`; null: all), and where rows of the server's own are from (`server`;
    null: it has none).

    Raises:
        datasets.DataError: the data or its description is wrong.
    """
    with nullcontext() if request.get("quotes", True) else content_hidden():
        return _load_and_partition(request)


def _load_and_partition(request: Mapping[str, Any]) -> dict[str, Any]:
    folder, data, seed = Path(request["folder"]), request["data"], request["seed"]
    # The folder of a coordinator's run exists already; workers may not change permissions within the home.
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)  # only the owner may read rows of data
    dataset = datasets.from_settings(
        data,
        data_dir=Path(request["data_dir"]) if request["data_dir"] else None,
        seed=seed,
        clients=request["clients"],
        folder=folder,
    )
    public = datasets.public_rows(dataset, data["public_samples"], seed)
    parts = datasets.partition(
        data["partition"], dataset, clients=request["clients"], seed=seed, exclude=public
    )
    server: dict[str, Any] = {}
    if request.get("server") is not None:
        server = server_rows.save(dataset, public, request, folder)
    sizes = [len(part) for part in parts]
    description = {
        "format": _FORMAT,
        "fingerprint": dataset.fingerprint(),
        "clients": list(datasets.client_names(data["partition"], dataset, len(parts))),
        "examples": sizes,
        "classes": dataset.classes,
        "class_names": list(dataset.class_names),
        "input_shape": list(dataset.input_shape),
        "input_dtype": dataset.input_dtype,
        "task": dataset.task,
        "label_scale": dataset.label_scale,
        "ids": max(
            int(dataset.x.max(initial=-1)) + 1 if dataset.input_dtype == "int32" else 0,
            server.get("server", {}).get("ids", 0),
        ),
        "site_names": list(dataset.site_names),
        "schema": dataset.described.to_document(),
        "preview": datasets.preview(dataset),
        "shown": datasets.preview(dataset, private=True),
        **server,
    }
    test_rows, owners = np.flatnonzero(dataset.test), datasets.owners(dataset, parts, seed)
    description["held_out"] = len(test_rows)
    if (sample := request.get("sample")) is not None:
        kept = datasets.sample_of(len(test_rows), sample, seed)
        test_rows, owners = test_rows[kept], owners[kept]
    rows = {"parts": np.concatenate(parts), "test_rows": test_rows, "public": np.asarray(public, np.int64)}
    del parts  # of many clients they are large
    arrays = {
        **_lay_out(dataset, rows, folder),
        "owners": owners,
        "ends": np.cumsum(sizes).astype(np.int64),
    }
    for name, array in arrays.items():
        workspace_arrays.save(folder / f"{name}.npy", array)
    # Written last: a workspace with this file is complete.
    write_durably(folder / "found.json", json.dumps(description).encode())
    return description


def _lay_out(
    dataset: datasets.Dataset, rows: Mapping[str, npt.NDArray[np.int64]], folder: Path
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of all rows, and which `rows` each part has, by its name.

    Rows that are in a file are put in the order of their parts. So a client's rows lie together, and reading them touches few pages.
    """
    sites = dataset.site if dataset.site is not None else np.zeros(0, np.int32)
    if not isinstance(dataset.x, np.memmap):
        return {"x": dataset.x, "y": dataset.y, "sites": sites, **rows}
    used = np.concatenate(list(rows.values()))
    x = gather(dataset.x, used, folder / "x.npy")
    (folder / DRAWN).unlink()
    places = np.split(np.arange(len(used)), np.cumsum([len(each) for each in rows.values()])[:-1])
    return {
        "x": x,
        "y": dataset.y[used],
        "sites": sites[used] if len(sites) else sites,
        **dict(zip(rows, places, strict=True)),
    }
