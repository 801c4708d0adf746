"""From a folder with a model to a release folder: `manifest.json` beside `model.tflite`.

    0. a finished run, a Keras model or an imported model with `--data` is quantized first: through torch
       (`coordinator.datacenter.compression`) or through TensorFlow (`coordinator.datacenter.keras_models`)
    1. the folder's contents: `model.json`, `model.safetensors`, test rows, and a `.tflite` if it is compressed
    2. export   in its own process: golden answers, a trial on every runtime, the manifest
    3. the report, which says for every runtime whether it may have the release, and why not

The release folder holds exactly what may be published: manifest, model, report. Everything else that the steps need,
including rows of data, lies in a private folder until they are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.datacenter import compression, jobs, keras_models
from coordinator.datacenter.compression_pipeline import PRECISIONS, Pipeline
from coordinator.datacenter.compression_request import CompressionRequest
from coordinator.datacenter.compression_sources import (
    SourceReader,
    is_imported,
    load_rows,
    model_for,
    params_in,
    require_data_options,
    run_in,
)
from coordinator.datacenter.documents import (
    EXPERIMENT,
    LINEAGE,
    MODEL,
    PARAMS,
    PUBLIC,
    REPORT,
    TFLITE,
    read_document,
    write_document,
)
from coordinator.datacenter.job_worker import JobFailed
from coordinator.datacenter.jobs import DatacenterJob, Environment
from coordinator.datacenter.training_data import DataOptions
from coordinator.errors import RunInterrupted, UserError
from coordinator.output_folders import require_new
from coordinator.storage.private_folders import private_folder
from edge_client.files import file_sha256, write_durably
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME
from edge_client.wire.schema import SCHEMA_NAME
from models import user_code
from models.tasks import MODEL_KEYS

_RELEASE = "release"
_ROWS = ("arrays", "data/arrays")
"""Folders with test rows: of a compression, of a pretraining."""


@dataclass(frozen=True)
class ReleaseRequest:
    """A requested release.

    Attributes:
        name, version: in the registry.
        tflite: file to release; None: `model.tflite` of the folder, or float32 made from its params.
        precision: of that file; None: as the folder says.
        device_classes: it is for; none: any.
        options: further ones of `models.release.inference.ReleaseOptions`.
        tflite_runtime: interpreter of an environment with tflite-runtime.
        data_options: data set to calibrate and score on instead of the model's own, and which model it is.
        max_accuracy_drop: from the float model, as a fraction; None: the default of each step.
    """

    name: str
    version: int = 1
    tflite: Path | None = None
    precision: str | None = None
    device_classes: Sequence[str] = ()
    options: Mapping[str, Any] | None = None
    tflite_runtime: Path | None = None
    data_options: DataOptions = field(default_factory=DataOptions)
    max_accuracy_drop: float | None = None

    @property
    def accuracy_limit(self) -> dict[str, float]:
        """`max_accuracy_drop` as an option of a step; empty for the step's default."""
        return {} if self.max_accuracy_drop is None else {"max_accuracy_drop": self.max_accuracy_drop}


def export(folder: Path, request: ReleaseRequest, out: Path, environment: Environment) -> dict[str, Any]:
    """Makes the release of the model in `folder` in the new folder `out`, and returns the report.

    `out` may also be empty, or left by an export that was killed.

    Raises:
        UserError: `folder` lacks something, `out` is something else, or real rows are requested of data not marked as public.
        RunInterrupted: the model cannot be released; the message says why.
    """
    require_new(out, may_continue=out.is_dir() and _is_unfinished(out))
    _require_public(folder, request)
    with private_folder() as private:
        if _needs_quantization(folder, request):
            source = private / "compressed"
            _quantize(folder, request, source, environment)
            request = replace(request, data_options=DataOptions())  # its rows are beside it now
            scored = read_document(source / REPORT, "scored")["scored"]
            run_result = _run_result(folder)
        else:
            source, scored, run_result = folder, "held-out rows", None
        report = _export(source, request, private, environment)
        report |= {"scored": scored, "run": run_result}
        _publish(private / _RELEASE, report, out)
    return report


def _is_unfinished(out: Path) -> bool:
    """Whether a folder holds only what an unfinished export leaves: it writes the report first and the manifest last."""
    names = {path.name for path in out.iterdir()}
    return not names or (REPORT in names and names <= {REPORT, TFLITE})


def _require_public(folder: Path, request: ReleaseRequest) -> None:
    """Refuses real rows in a manifest unless the data is marked as public."""
    count = (request.options or {}).get("real_rows", 0)
    if not count:
        return
    if request.data_options.data is not None:
        marked = request.data_options.data.is_public
        how = "for data named by --data, --set data.public=true marks it"
    elif folder.suffix == user_code.KERAS_FILE:
        marked, how = False, "for a .keras file, --data names the data"
    elif _is_run(folder):
        marked = run_in(folder).data.is_public
        how = f"public = true under [data] in {folder / EXPERIMENT} marks it"
    else:
        marked = read_document(folder / LINEAGE).get(PUBLIC) is True
        how = f"{folder / LINEAGE} has the mark if the model's pretraining or run had data.public = true"
    if not marked:
        raise UserError(
            f"--real-rows {count}: would put {count} rows of the data into the manifest, which every device and everyone "
            f"with the release can read, and the data is not marked as public ({how}); remove the option"
        )


def _is_run(folder: Path) -> bool:
    return (folder / EXPERIMENT).is_file() and not (folder / MODEL).is_file()


def _needs_quantization(folder: Path, request: ReleaseRequest) -> bool:
    return (
        _is_run(folder)
        or folder.suffix == user_code.KERAS_FILE
        or (is_imported(folder) and not request.tflite and _rows_folder(folder) is None)
    )


def _rows_folder(folder: Path) -> Path | None:
    return next((folder / each for each in _ROWS if (folder / each / "x_test.npy").is_file()), None)


def _quantize(path: Path, request: ReleaseRequest, out: Path, environment: Environment) -> None:
    """Quantizes the model of a run, of a `.keras` file or of an imported folder into the new folder `out`.

    Devices train float params; the integers that they run are made from these params again.
    """
    if request.tflite is not None:
        raise UserError(f"--tflite: the file for {path} is made from its params; remove the option")
    imported = is_imported(path)
    if not imported and keras_models.is_keras(path):
        precision = request.precision or _default_precision(path)
        if precision not in keras_models.PRECISIONS:
            known = ", ".join(keras_models.PRECISIONS)
            raise UserError(f"--precision {precision}: precisions of Keras models are: {known}")
        with private_folder() as scratch:
            reader = SourceReader(Pipeline.model_validate({}), scratch, environment, request.data_options)
            keras_models.quantize(reader.read(path), precision, request.accuracy_limit, out, environment)
        return
    precision = request.precision or ("float32" if imported else _default_precision(path))
    step = {"kind": "quantize", "precision": precision, **request.accuracy_limit}
    compression_request = CompressionRequest(
        Pipeline.model_validate({"step": [step]}), "export", data_options=request.data_options
    )
    report = compression.compress(path, compression_request, out, environment, keep_on_failure=False)
    for notice in report["notices"]:
        environment.progress.note(notice)


def _default_precision(run: Path) -> str:
    """Of the file made from a run: quantities stay float, as integers would be cut off at the range of the calibration rows."""
    data = read_document(run / REPORT).get("data", {}) if (run / REPORT).is_file() else {}
    return "dynamic-int8" if data.get("task") == "regression" else "static-int8"


def _run_result(run: Path) -> dict[str, Any] | None:
    """The final accuracy in a run's own report, and its number of rows; None without a report."""
    if not (run / REPORT).is_file():
        return None
    final = read_document(run / REPORT).get("final", {})
    result = {key: final.get(key) for key in ("test_accuracy", "test_rows")}
    return result if None not in result.values() else None


def _export(folder: Path, request: ReleaseRequest, private: Path, environment: Environment) -> dict[str, Any]:
    known = _known_model(folder, request, private)
    params, tflite = folder / PARAMS, request.tflite or folder / TFLITE
    precision = _precision(folder, request, (known or {}).get("precision"))
    model, arrays, lineage = _model_rows_lineage(folder, known, request, private / "given", environment)
    more: dict[str, Any] = {
        "release": str(private / _RELEASE),
        "device_classes": list(request.device_classes),
        "lineage": lineage,
    }
    if (schema := _schema(folder)) is not None:
        more["schema"] = schema
    if tflite.is_file():
        more |= {"tflite": str(tflite.absolute()), "precision": precision}
    if request.tflite_runtime is not None:
        more["tflite_runtime"] = str(request.tflite_runtime.absolute())
    environment.progress.stage(f"exporting {request.name}:{request.version}")
    job = DatacenterJob(
        "export",
        {key: model[key] for key in ("name", "options", *MODEL_KEYS) if key in model},
        arrays,
        options={
            "name": request.name,
            "version": request.version,
            **request.accuracy_limit,
            **(request.options or {}),
        },
        params=params if params.is_file() else None,
        more=more,
    )
    try:
        report = jobs.run(job, private / "export", environment.progress.trained, environment.clock)
    except JobFailed as error:
        raise RunInterrupted(error.summary) from None
    # The release's own file accepts any number of rows, so its hash differs.
    report["source"] = {"tflite_sha256": file_sha256(tflite) if tflite.is_file() else None}
    return report


def _schema(folder: Path) -> dict[str, Any] | None:
    """The data schema beside a model; None without one, as beside imported params."""
    path = folder / SCHEMA_NAME
    return read_document(path) if path.is_file() else None


def _known_model(folder: Path, request: ReleaseRequest, scratch: Path) -> dict[str, Any] | None:
    """The contents of `model.json`; None if it is missing and the command's options replace it."""
    if (folder / MODEL).is_file() or not folder.is_dir():
        return read_document(folder / MODEL)
    if not (request.tflite or folder / TFLITE).is_file():
        params_in(folder, scratch)  # its error says which files are expected
    require_data_options(folder, request.data_options)
    return None


def _precision(folder: Path, request: ReleaseRequest, known: str | None) -> str:
    """The precision of the released file; `known`: that of the folder's own file."""
    tflite = request.tflite or folder / TFLITE
    if request.precision not in (None, *PRECISIONS):
        raise UserError(f"--precision {request.precision}: is unknown; known: {', '.join(PRECISIONS)}")
    if request.tflite is not None and not tflite.is_file():
        raise UserError(f"--tflite {tflite}: there is no such file")
    if tflite.is_file():
        if precision := request.precision or known:
            return precision
        raise UserError(f"{tflite}: its precision is unknown; give --precision, static-int8 for example")
    if not (folder / PARAMS).is_file():
        raise UserError(f"{folder}: has neither {PARAMS} nor {TFLITE}, so there is nothing to release")
    if request.precision not in (None, "float32"):
        raise UserError(
            f"--precision {request.precision}: only float32 is made from params; compress the model first: "
            f"fedloop compress {folder}"
        )
    return "float32"


def _model_rows_lineage(
    folder: Path,
    known: dict[str, Any] | None,
    request: ReleaseRequest,
    scratch: Path,
    environment: Environment,
) -> tuple[Mapping[str, Any], dict[str, npt.NDArray[Any]], Mapping[str, Any]]:
    """The model, its test rows and the hashes of its origin: the folder's own, or from the command's data set."""
    options = request.data_options
    if options.data is None:
        return known or {}, _test_rows(folder), _lineage(folder)
    arrays, loaded = load_rows(options.data, 0, scratch, environment, folder)
    model = model_for(folder, known, options, loaded)
    test = {name: arrays[name] for name in ("x_test", "y_test")}
    return model, test, {**_lineage(folder), "data_fingerprint": loaded["fingerprint"]}


def _test_rows(folder: Path) -> dict[str, npt.NDArray[Any]]:
    rows = _rows_folder(folder)
    if rows is None:
        raise UserError(
            f"{folder}: has no test rows ({', '.join(f'{each}/x_test.npy' for each in _ROWS)}) to test the release on: "
            "name a data set with --data, such as digits, table.csv or package.module:load"
        )
    return {name: np.load(rows / f"{name}.npy", mmap_mode="r") for name in ("x_test", "y_test")}


def _lineage(folder: Path) -> dict[str, Any]:
    """The SHA-256 of the checkpoint that the model was made from, and of the data."""
    if not (folder / LINEAGE).is_file():
        return {}
    lineage = read_document(folder / LINEAGE)
    parent = lineage.get("parent")
    before = parent if isinstance(parent, dict) else {}
    return {
        "parent": before.get("model_sha256") or lineage.get("model_sha256"),
        "data_fingerprint": lineage.get("data_fingerprint") or before.get("data_fingerprint"),
    }


def _publish(release: Path, report: Mapping[str, Any], out: Path) -> None:
    """Writes the three files of a release, the manifest last: a folder without one is no release."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_document(out / REPORT, report)
        for name in (MODEL_NAME, MANIFEST_NAME):
            write_durably(out / name, (release / name).read_bytes())
    except OSError as error:
        raise RunInterrupted(f"--out {out}: cannot be written: {error.strerror}") from None
