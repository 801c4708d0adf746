"""Predictions of a trained model on rows in natural form, on the machine of whoever has the model.

They are computed in a worker process, because a model may be a user's code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.datacenter.documents import EXPERIMENT, MODEL, PARAMS, REPORT, read_document
from coordinator.errors import UserError
from edge_client.files import open_regular, read_regular
from edge_client.wire import arrays, inference
from edge_client.wire import schema as schemas
from edge_client.wire.manifest import ManifestError
from edge_client.wire.rollouts import MANIFEST_NAME
from edge_client.wire.schema import SCHEMA_NAME, DataSchema
from edge_client.wire.strict import InvalidDocument
from models.tasks import MODEL_KEYS

PARAMS_LIMIT_BYTES = 64 * 1024**3
"""Largest file of params accepted."""


@dataclass(frozen=True)
class Model:
    """A trained model. `description`: of one that is no release, as job files have it; then `params` is the file of its params."""

    folder: Path
    name: str
    schema: DataSchema
    description: Mapping[str, Any] | None = None
    params: Path | None = None


def open_model(folder: Path, device_class: str | None = None) -> Model:
    """The model in the folder of a run, a pretraining, a compression or a release; of a simulation that of a device class, if one is named.

    Raises:
        UserError: there is none, or it is damaged.
    """
    try:
        if (folder / MANIFEST_NAME).is_file():
            path = folder / MANIFEST_NAME
            if device_class is not None:
                raise UserError(
                    f"{folder}: --device-class is for the folder of a simulation, and this is a release"
                )
            manifest = inference.from_json(read_regular(path), str(path))
            return Model(folder, f"{manifest.model}:{manifest.version}", manifest.data_schema)
        open_regular(folder / PARAMS, PARAMS_LIMIT_BYTES).close()
        description = describe(folder)
        model = Model(folder, str(folder), _schema(folder, description), description, folder / PARAMS)
        return model if device_class is None else _of_class(folder, model, device_class)
    except (ManifestError, InvalidDocument) as error:
        raise UserError(str(error)) from None
    except FileNotFoundError:
        raise UserError(
            f"{folder}: has neither {PARAMS} with its description nor {MANIFEST_NAME}; expected the folder of a finished run, a "
            "pretraining, a compression or a release"
        ) from None
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None


@dataclass(frozen=True)
class Reading:
    """The rows to predict.

    Attributes:
        site_rows: table of a site's training rows, whose means and deviations scale the numbers.
        leave_out: further columns that are not inputs.
        encoding: of the files' text, where it differs from that of the training table.
    """

    files: tuple[Path, ...]
    site_rows: Path | None = None
    leave_out: tuple[str, ...] = ()
    encoding: str | None = None

    def options(self) -> dict[str, Any]:
        """What the files are read by, by the command's options."""
        return {
            "--site-rows": self.site_rows,
            "--leave-out": self.leave_out,
            "--encoding": self.encoding,
        }


def predict(model: Model, reading: Reading, out: Path | None = None) -> dict[str, Any]:
    """`predictions`, one for each row of the files, `lines` for people, and the `accuracy`, None where the files do not have the classes.

    `out`: `.csv`, `.json` or `.parquet` to write class and probabilities to.

    Raises:
        UserError: the rows do not fit the model, or `out` is one of the files that are read.
    """
    if out is not None and out.resolve() in {
        path.resolve() for path in (*reading.files, reading.site_rows) if path
    }:
        raise UserError(f"--out {out}: is a file that is read; name another one")
    return _run(model, reading, out, only_count=False)


def count_rows(model: Model, reading: Reading) -> int:
    """How many rows of the files could be predicted; reads them all.

    Raises:
        UserError: the rows do not fit the model.
    """
    return int(_run(model, reading, None, only_count=True)["rows"])


def _run(model: Model, reading: Reading, out: Path | None, *, only_count: bool) -> dict[str, Any]:
    site_rows = reading.site_rows
    request = {
        "kind": "predict",
        "files": [str(file) for file in reading.files],
        "model": model.name,
        "schema": model.schema.to_document(),
        "release": str(model.folder) if model.description is None else None,
        "description": None if model.description is None else dict(model.description),
        "site_rows": None if site_rows is None else str(site_rows),
        "leave_out": list(reading.leave_out),
        "encoding": reading.encoding,
        "out": None if out is None else str(out),
        "only_count": only_count,
    }
    from coordinator.workers.pool import TORCH, WorkerPool

    with tempfile.TemporaryDirectory() as scratch:
        modules = TORCH if model.description is not None and not only_count else ()
        with WorkerPool(1, Path(scratch) / "worker.log", modules) as pool:
            if model.params is not None and not only_count:
                pool.publish(arrays.decode(read_regular(model.params, PARAMS_LIMIT_BYTES)))
            return dict(pool.run_one(request).values)


def describe(folder: Path) -> dict[str, Any]:
    """The model of a folder as job files describe it.

    Raises:
        UserError: a document is damaged. FileNotFoundError: there is none.
    """
    if (folder / MODEL).is_file():
        known = read_document(folder / MODEL, "name", "options", *MODEL_KEYS)
        return {key: known[key] for key in ("name", "options", *MODEL_KEYS)}
    if not (folder / EXPERIMENT).is_file():
        raise FileNotFoundError(folder / EXPERIMENT)
    # With all strategies; whoever serves models of other folders does without them.
    from coordinator.experiments.experiment import read_finished

    data = read_document(folder / REPORT, "data")["data"]
    schema = _read_schema(folder)
    dtype = schema.input_dtype if schema is not None else "float32"
    experiment = read_finished(folder / EXPERIMENT)
    return experiment.model.describe({"input_dtype": dtype, **data})


def _of_class(folder: Path, model: Model, name: str) -> Model:
    """The model of a device class of the simulation in `folder`. `model`: its own."""
    path = folder / REPORT
    classes = read_document(path).get("device_classes", {}) if path.is_file() else {}
    if model.description is None or name not in classes:
        known = f"; it has {', '.join(classes)}" if classes else ", and no classes"
        raise UserError(f"{folder}: has no model of a device class {name!r}{known}; leave --device-class out")
    found = classes[name]
    description = {
        **model.description,
        "name": found.get("model", model.description["name"]),
        "options": found["options"],
    }
    params = folder / found["file"]
    open_regular(params, PARAMS_LIMIT_BYTES).close()
    return replace(model, name=f"{model.name}, class {name}", description=description, params=params)


def _schema(folder: Path, description: Mapping[str, Any]) -> DataSchema:
    known = _read_schema(folder)
    return known or DataSchema("array", tuple(description["input_shape"]), description["input_dtype"])


def _read_schema(folder: Path) -> DataSchema | None:
    path = folder / SCHEMA_NAME
    return schemas.from_json(read_regular(path), str(path)) if path.is_file() else None
