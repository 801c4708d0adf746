"""A data set as the arrays of a datacenter job: `python -P -m models.datasets.worker JOB.json`.

The job file's `data` are keyword arguments of `models.datasets.load`, with `test_rows`: how many of the held-out
rows to keep, drawn by the seed; 0: all. A process of its own because a data set may be a user's code. Writes
`x_train`, `y_train`, `x_test`, `y_test` into the job's `arrays`, and what it found into `result.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edge_client import process
from models import datasets
from models import job as jobs


def load(path: Path, report: process.Report) -> None:
    """The whole job, from its file."""
    job = jobs.read(path)
    asked: dict[str, Any] = dict(job.value("data"))
    test_rows = asked.pop("test_rows", 0)
    report(stage="load")
    dataset = datasets.load(asked.pop("dataset"), seed=job.seed, **_paths(asked))
    train, test = np.flatnonzero(~dataset.test), np.flatnonzero(dataset.test)
    if not len(train) or not len(test):
        raise datasets.DataError(
            f"data set {dataset.name!r} has {len(train)} rows to train on and {len(test)} held out; both are needed"
        )
    if 0 < test_rows < len(test):
        test = np.sort(np.random.default_rng(job.seed).choice(test, test_rows, replace=False))
    folder = job.file("arrays", job.value("arrays"))
    for part, rows in (("train", train), ("test", test)):
        np.save(folder / f"x_{part}.npy", dataset.x[rows], allow_pickle=False)
        np.save(folder / f"y_{part}.npy", dataset.y[rows], allow_pickle=False)
    found = {
        "fingerprint": dataset.fingerprint(),
        "rows": {"train": len(train), "test": len(test)},
        "input_shape": list(dataset.input_shape),
        "classes": dataset.classes,
        "input_dtype": dataset.input_dtype,
        "task": dataset.task,
        "class_names": list(dataset.class_names),
        "preview": list(datasets.preview(dataset)),
    }
    jobs.write_result(job.out, found)


def _paths(asked: dict[str, Any]) -> dict[str, Any]:
    return {key: Path(value) if key in ("data_dir", "path") else value for key, value in asked.items()}


if __name__ == "__main__":
    process.serve(load)
