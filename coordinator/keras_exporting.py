"""A Keras model on its way to a release: its file in the precision asked for, in a folder such as a compression leaves.

    1. the model: a `.keras` file with its own weights and a data set named beside it; or a finished run with its params
    2. keras   in a process of its own: converted, compared with Keras, quantized (`models.export.keras_inference`)
    3. `model.json` and `lineage.json` beside it, so that what makes releases (`coordinator.exporting`) takes it up

Whether a run's model is a Keras model only its code knows, so a worker that may run it is asked.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from coordinator import compressing, experiment, jobs
from coordinator.compressing import PARAMS, Pipeline, Source, fewer
from coordinator.errors import RunInterrupted, UserError
from coordinator.experiment import Experiment
from coordinator.jobs import Job, JobFailed
from coordinator.pretraining import LINEAGE, MODEL, MODEL_KEYS, REPORT, Surroundings, load_arrays, sha256_of
from coordinator.simulation.pool import WorkerPool
from edge_client.files import write_durably
from models import catalog, user_code

PRECISIONS = ("float32", "float16", "weight-int8", "dynamic-int8", "static-int8")
"""As `models.export.keras_inference.Options`."""


@dataclass(frozen=True)
class Asked:
    """What is asked for.

    Attributes:
        precision: one of `PRECISIONS`.
        data: the data set that a `.keras` file is calibrated and scored on.
        options: further ones of `models.export.keras_inference.Options`.
    """

    precision: str
    data: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def is_keras(path: Path) -> bool:
    """Whether there is a Keras model in `path`, a `.keras` file or the folder of a run.

    Raises:
        UserError: the run is not finished, or its model cannot be built.
    """
    if path.suffix == user_code.KERAS_FILE:
        return True
    file = path / "experiment.toml"
    run = experiment.resolve(experiment.read(file), str(file), "devices")
    name = run.model.name or ""
    if name in catalog.MODELS:
        return False
    return name.endswith(user_code.KERAS_FILE) or _framework(path, run) == "keras"


def frozen(path: Path, asked: Asked, out: Path, surroundings: Surroundings) -> Path:
    """The new folder `out`, with the model's file, its params, test rows and what they are.

    Raises:
        UserError: the model, its params or its data are wrong.
        RunInterrupted: it cannot be converted, or loses too much accuracy.
    """
    if asked.precision not in PRECISIONS:
        raise UserError(f"--precision {asked.precision}: Keras models are made in: {', '.join(PRECISIONS)}")
    with tempfile.TemporaryDirectory(prefix="fedloop-") as scratch:
        source = _source(path, asked.data, Path(scratch), surroundings)
        job = Job(
            "keras",
            source.model,
            source.arrays,
            {"precision": asked.precision, **asked.options},
            seed=source.seed,
            params=source.params if source.params.suffix == Path(PARAMS).suffix else None,
        )
        surroundings.watcher.stage(f"converting {source.model['name']} to {asked.precision}")
        try:
            jobs.run(job, out, surroundings.watcher.trained, surroundings.clock)
        except JobFailed as error:
            raise RunInterrupted(str(error)) from None
    digest = sha256_of(out / PARAMS)
    _write(out / MODEL, {**source.model, "precision": asked.precision, "sha256": digest})
    lineage = {
        "parent": source.lineage,
        "model_sha256": digest,
        "data_fingerprint": source.lineage["data_fingerprint"],
        "seed": source.seed,
        "code_version": version("fedloop"),
    }
    _write(out / LINEAGE, lineage)
    return out


def _source(path: Path, data: str | None, scratch: Path, surroundings: Surroundings) -> Source:
    if path.suffix != user_code.KERAS_FILE:
        return compressing.source_in(path, Pipeline.model_validate({}), scratch, surroundings)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    if data is None:
        raise UserError(
            f"{path}: --data is missing: the data set to calibrate and score it on, such as digits"
        )
    found = load_arrays({"dataset": data}, 0, scratch, surroundings)
    arrays = {
        f"{key}_{part}": np.load(scratch / "arrays" / f"{key}_{part}.npy", mmap_mode="r", allow_pickle=False)
        for part in ("train", "test")
        for key in "xy"
    }
    asked = Pipeline.model_validate({})
    arrays = fewer(arrays, {"train": asked.rows, "test": asked.test_rows}, np.random.default_rng(0))
    model = {"name": str(path), "options": {}, **{key: found[key] for key in MODEL_KEYS}}
    known = {"model_sha256": sha256_of(path), "data_fingerprint": found["fingerprint"]}
    return Source(model, path, arrays, 0, known)


def _framework(folder: Path, run: Experiment) -> str:
    """`torch` or `keras`, as a worker finds that builds the run's model."""
    data = compressing.document(folder / REPORT, "data")["data"]
    shape = {"input_dtype": "float32", **{key: data[key] for key in MODEL_KEYS if key in data}}
    model = {"name": run.model.name, "options": run.model.options, **shape}
    with (
        tempfile.TemporaryDirectory(prefix="fedloop-") as scratch,
        WorkerPool(1, Path(scratch) / "log") as pool,
    ):
        found: str = pool.one({"kind": "framework", "model": model}).values["framework"]
        return found


def _write(path: Path, document: Mapping[str, Any]) -> None:
    write_durably(path, (json.dumps(document, indent=2) + "\n").encode())
