"""A Keras model prepared for release: quantized, in a folder like that of a compression.

    1. the source: a `.keras` file with its own weights and a named data set, or a finished run with its params
    2. keras   in its own process: converted, compared with Keras, quantized (`models.release.keras_inference`)
    3. `model.json` and `lineage.json` beside it, as `coordinator.datacenter.release_export` reads them

Only the user's code knows whether a run's model is a Keras model, so a worker that may execute it decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coordinator.datacenter import jobs
from coordinator.datacenter.compression_sources import Source, copy_schema, run_in
from coordinator.datacenter.documents import (
    LINEAGE,
    MODEL,
    PARAMS,
    PUBLIC,
    REPORT,
    read_document,
    write_document,
)
from coordinator.datacenter.job_worker import JobFailed
from coordinator.datacenter.jobs import DatacenterJob, Environment
from coordinator.errors import RunInterrupted
from coordinator.experiments.schema import Experiment
from coordinator.storage.private_folders import private_folder
from coordinator.workers.pool import WorkerPool
from edge_client.files import file_sha256
from models import catalog, user_code
from models.tasks import MODEL_KEYS

PRECISIONS = ("float32", "float16", "weight-int8", "dynamic-int8", "static-int8")
"""As `models.release.keras_inference.KerasOptions`."""


def is_keras(path: Path) -> bool:
    """Whether `path`, a `.keras` file or the folder of a run, holds a Keras model.

    Raises:
        UserError: the run is not finished, or its model cannot be built.
    """
    if path.suffix == user_code.KERAS_FILE:
        return True
    run = run_in(path)
    name = run.model.name or ""
    if name in catalog.MODELS:
        return False
    return name.endswith(user_code.KERAS_FILE) or _framework(path, run) == "keras"


def quantize(
    source: Source, precision: str, options: Mapping[str, Any], out: Path, environment: Environment
) -> None:
    """Writes the model's file in `precision`, its params, test rows and their documents into the new folder `out`.

    `options` are further ones of `models.release.keras_inference.KerasOptions`.

    Raises:
        RunInterrupted: the model cannot be converted, or loses too much accuracy.
    """
    job = DatacenterJob(
        "keras",
        source.model,
        source.arrays,
        {"precision": precision, **options},
        seed=source.seed,
        params=source.params if source.params.suffix == Path(PARAMS).suffix else None,
    )
    environment.progress.stage(f"converting {source.model['name']} to {precision}")
    try:
        jobs.run(job, out, environment.progress.trained, environment.clock)
    except JobFailed as error:
        raise RunInterrupted(error.summary) from None
    digest = file_sha256(out / PARAMS)
    write_document(out / MODEL, {**source.model, "precision": precision, "sha256": digest})
    lineage = {
        "parent": source.lineage,
        "model_sha256": digest,
        "data_fingerprint": source.lineage["data_fingerprint"],
        PUBLIC: source.lineage[PUBLIC],
        "seed": source.seed,
        "code_version": version("fedloop"),
    }
    copy_schema(source, out)
    write_document(out / LINEAGE, lineage)
    write_document(out / REPORT, {"scored": source.scored})


def _framework(folder: Path, run: Experiment) -> str:
    """`torch` or `keras`, from a worker that builds the run's model."""
    data = read_document(folder / REPORT, "data")["data"]
    shape = {"input_dtype": "float32", **{key: data[key] for key in MODEL_KEYS if key in data}}
    model = {"name": run.model.name, "options": run.model.options, **shape}
    with private_folder() as scratch, WorkerPool(1, scratch / "log") as pool:
        framework: str = pool.run_one({"kind": "framework", "model": model}).values["framework"]
        return framework
