"""From a folder with a model to a release folder: `manifest.json` beside `model.tflite`.

    0. of a finished federated run: its params quantized as the shipped file was (`coordinator.compressing`), into `compressed/`;
       of a Keras model, also one that is a file, the same through TensorFlow (`coordinator.keras_exporting`)
    1. what the folder holds: `model.json`, `model.safetensors`, test rows, and a `.tflite` where it is compressed
    2. export   in a process of its own: golden answers, a trial on every runtime, the manifest
    3. the report, which says of every runtime whether it may have the release, and why not

The job's own files lie in `export/` below the release.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator import compressing, jobs, keras_exporting
from coordinator.compressing import PARAMS, TFLITE
from coordinator.errors import RunInterrupted, UserError
from coordinator.jobs import Job, JobFailed
from coordinator.pretraining import LINEAGE, MODEL, MODEL_KEYS, REPORT, Surroundings, sha256_of
from edge_client.files import write_durably
from models import user_code

PRECISIONS = (
    "float32",
    "float16",
    "weight-int8",
    "dynamic-int8",
    "static-int8",
    "mixed",
    "int4",
    "codebook",
)
"""As `models.compress.step.Precision`, which needs torch."""

EXPERIMENT = "experiment.toml"
_JOB, _COMPRESSED = "export", "compressed"

_ROWS = ("arrays", "data/arrays")
"""Where a folder has its test rows: a compression's, a pretraining's."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for.

    Attributes:
        name, version: in the registry.
        tflite: file to release; None: `model.tflite` of the folder, or float32 made from its params.
        precision: of that file; None: as the folder says.
        device_classes: it is for; none: any.
        options: further ones of `models.export.inference.Options`.
        tflite_runtime: interpreter of an environment that has it.
        data: set that a `.keras` file is calibrated and scored on.
        max_accuracy_drop: from the float model, as a fraction; None: what each step allows.
    """

    name: str
    version: int = 1
    tflite: Path | None = None
    precision: str | None = None
    device_classes: Sequence[str] = ()
    options: Mapping[str, Any] | None = None
    tflite_runtime: Path | None = None
    data: str | None = None
    max_accuracy_drop: float | None = None

    @property
    def gate(self) -> dict[str, float]:
        """The bound as an option of a step; none where it is the step's own."""
        return {} if self.max_accuracy_drop is None else {"max_accuracy_drop": self.max_accuracy_drop}


def export(folder: Path, wanted: Wanted, out: Path, surroundings: Surroundings) -> dict[str, Any]:
    """Makes the release of the model in `folder` in the new folder `out`, and returns the report.

    `out` may be empty too, or hold what an export left that failed: its steps are not run again.

    Raises:
        UserError: `folder` lacks something, or `out` is something else.
        RunInterrupted: the model cannot be released; the message says why.
    """
    if out.exists() and not (out.is_dir() and _is_begun(out)):
        raise UserError(f"--out {out}: the folder is not empty; name another one")
    is_run = (folder / EXPERIMENT).is_file() and not (folder / MODEL).is_file()
    if is_run or folder.suffix == user_code.KERAS_FILE:
        folder = _quantized(folder, wanted, out, surroundings)
    model = compressing.document(folder / MODEL)
    params, tflite = folder / PARAMS, wanted.tflite or folder / TFLITE
    precision = _precision(folder, wanted, model.get("precision"))
    more: dict[str, Any] = {
        "release": str(out.absolute()),
        "device_classes": list(wanted.device_classes),
        "lineage": _lineage(folder),
    }
    if tflite.is_file():
        more |= {"tflite": str(tflite.absolute()), "precision": precision}
    if wanted.tflite_runtime is not None:
        more["tflite_runtime"] = str(wanted.tflite_runtime.absolute())
    surroundings.watcher.stage(f"exporting {wanted.name}:{wanted.version}")
    job = Job(
        "export",
        {key: model[key] for key in ("name", "options", *MODEL_KEYS) if key in model},
        _test_rows(folder),
        options={"name": wanted.name, "version": wanted.version, **wanted.gate, **(wanted.options or {})},
        params=params if params.is_file() else None,
        more=more,
    )
    try:
        report = jobs.run(job, out / _JOB, surroundings.watcher.trained, surroundings.clock)
    except JobFailed as error:
        raise RunInterrupted(str(error)) from None
    # The release's own file takes any number of rows, so its hash is another one.
    report["source"] = {"tflite_sha256": sha256_of(tflite) if tflite.is_file() else None}
    write_durably(out / REPORT, (json.dumps(report, indent=2) + "\n").encode())
    return report


def _precision(folder: Path, wanted: Wanted, said: str | None) -> str:
    """The precision of what is released; `said`: by the folder, of its own file."""
    tflite = wanted.tflite or folder / TFLITE
    if wanted.precision not in (None, *PRECISIONS):
        raise UserError(f"--precision {wanted.precision}: is unknown; known: {', '.join(PRECISIONS)}")
    if wanted.tflite is not None and not tflite.is_file():
        raise UserError(f"--tflite {tflite}: there is no such file")
    if tflite.is_file():
        if precision := wanted.precision or said:
            return precision
        raise UserError(f"{tflite}: its precision is unknown; give --precision, static-int8 for example")
    if not (folder / PARAMS).is_file():
        raise UserError(f"{folder}: has neither {PARAMS} nor {TFLITE}, so there is nothing to release")
    if wanted.precision not in (None, "float32"):
        raise UserError(
            f"--precision {wanted.precision}: only float32 is made from params; compress the model first: "
            f"fedloop compress {folder}"
        )
    return "float32"


def _quantized(run: Path, wanted: Wanted, out: Path, surroundings: Surroundings) -> Path:
    """The folder of the run's model, quantized: devices trained float params, and run integers made of them anew."""
    if wanted.tflite is not None:
        raise UserError(
            f"--tflite: {run} is a run, whose file is made from its params; leave the option away"
        )
    if keras_exporting.is_keras(run):
        asked = keras_exporting.Asked(wanted.precision or "static-int8", wanted.data, wanted.gate)
        return keras_exporting.frozen(run, asked, out / _COMPRESSED, surroundings)
    step = {"kind": "quantize", "precision": wanted.precision or "static-int8", **wanted.gate}
    pipeline = compressing.Asked(compressing.Pipeline.model_validate({"step": [step]}), "export")
    compressing.compress(run, pipeline, out / _COMPRESSED, surroundings)
    return out / _COMPRESSED


def _is_begun(out: Path) -> bool:
    """Whether a folder holds nothing but what an export leaves before it is done: the manifest comes last."""
    found = {path.name for path in out.iterdir()}
    return found <= {_JOB, _COMPRESSED} or (_JOB in found and found <= {_JOB, _COMPRESSED, TFLITE})


def _test_rows(folder: Path) -> dict[str, npt.NDArray[Any]]:
    for place in _ROWS:
        if (folder / place / "x_test.npy").is_file():
            return {
                name: np.load(folder / place / f"{name}.npy", mmap_mode="r") for name in ("x_test", "y_test")
            }
    raise UserError(
        f"{folder}: has no test rows ({', '.join(f'{place}/x_test.npy' for place in _ROWS)}); a release is tried on some"
    )


def _lineage(folder: Path) -> dict[str, Any]:
    """The SHA-256 of the checkpoint it was made from, and of the data."""
    if not (folder / LINEAGE).is_file():
        return {}
    known = compressing.document(folder / LINEAGE)
    parent = known.get("parent")
    before = parent if isinstance(parent, dict) else {}
    return {
        "parent": before.get("model_sha256") or known.get("model_sha256"),
        "data_fingerprint": known.get("data_fingerprint") or before.get("data_fingerprint"),
    }
