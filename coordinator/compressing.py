"""From a trained model to one that a device can run: distil where need be, then quantize.

    1. the source: a folder of `fedloop pretrain`, or of a finished run, with its model and its data
    2. distil     a student, where one is asked for or devices cannot run the model itself
    3. quantize   to float32 and int8 `.tflite`
    4. the report, with the lineage of every file

A pretraining's own training rows teach and calibrate. Of a run only the held-out rows are the coordinator's: half of
them calibrate, the other half score.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tomlkit
from pydantic import Field, ValidationError

from coordinator import experiment, jobs, pretraining
from coordinator.errors import RunInterrupted, UserError
from coordinator.experiment import Section, changed
from coordinator.jobs import Job, JobFailed
from coordinator.pretrain_config import Model
from coordinator.pretraining import CONFIG, LINEAGE, MODEL, MODEL_KEYS, REPORT, Surroundings
from coordinator.sections import described, wrong
from edge_client.files import write_durably
from models import catalog

PARAMS = "model.safetensors"
_STUDENTS = {"token sequences": "charlm", "tokens": "textcls", "images": "cnn", "any": "mlp"}


class Compression(Section):
    """How to compress.

    Attributes:
        student: `name` and options of the model to distil into.
        rows: at most so many rows teach it.
        test_rows: at most so many rows score every stage.
        distil, quantize: options of those stages.
    """

    student: Model = Model()
    rows: int = Field(2000, ge=1)
    test_rows: int = Field(500, ge=1)
    distil: dict[str, Any] = Field(default_factory=dict)
    quantize: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A trained model.

    Attributes:
        model: as job files describe it.
        arrays: `x_train`, `y_train` to teach and calibrate with, `x_test`, `y_test` to score on.
        lineage: where its params come from.
    """

    model: Mapping[str, Any]
    params: Path
    arrays: Mapping[str, npt.NDArray[Any]]
    seed: int
    lineage: Mapping[str, Any]


def resolve(student: str | None, sets: Sequence[str]) -> Compression:
    """The compression that a command asks for.

    Raises:
        UserError: listing every problem at once.
    """
    document = changed({}, sets)
    if student is not None:
        given = document.get("student", {})
        document["student"] = {**(given if isinstance(given, dict) else {}), "name": student}
    try:
        return Compression.model_validate(document)
    except ValidationError as error:
        raise wrong("compress", [described(item, Compression) for item in error.errors()]) from None


def compress(folder: Path, asked: Compression, out: Path, surroundings: Surroundings) -> dict[str, Any]:
    """Compresses the model in `folder` into the empty or new folder `out` and returns the report.

    Raises:
        UserError: `folder` holds no trained model, or `out` is not empty.
        RunInterrupted: a stage failed; the message says which and where its log is.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: the folder is not empty; name another one")
    source = _source(folder, asked, out, surroundings)
    student = _student(asked, source.model)
    out.mkdir(parents=True, exist_ok=True)
    try:
        return _stages(source, student, asked, out, surroundings)
    except JobFailed as error:
        raise RunInterrupted(str(error)) from None


def _stages(
    source: Source,
    student: Mapping[str, Any] | None,
    asked: Compression,
    out: Path,
    surroundings: Surroundings,
) -> dict[str, Any]:
    watcher = surroundings.watcher
    write_durably(out / CONFIG, tomlkit.dumps(asked.model_dump(mode="json", exclude_none=True)).encode())
    model, params = student or source.model, source.params
    report: dict[str, Any] = {"source": {"model": source.model["name"], "bytes": params.stat().st_size}}
    if student is not None:
        watcher.stage(f"distilling {source.model['name']} into {student['name']}")
        distilled = jobs.run(
            Job(
                "distil",
                student,
                source.arrays,
                options={"epochs": 6, "lr": 4e-3, **asked.distil},
                seed=source.seed,
                teacher=(source.model, source.params),
            ),
            out / "student",
            watcher.trained,
            surroundings.clock,
        )
        params = out / "student" / PARAMS
        report["source"]["accuracy"] = distilled["teacher_accuracy"]
        report["student"] = {
            "model": student["name"],
            "bytes": distilled["bytes"],
            "parameters": distilled["parameters"],
            "accuracy": distilled["test_accuracy"],
        }
    watcher.stage(f"quantizing {model['name']}")
    quantized = jobs.run(
        Job("quantize", model, source.arrays, options=asked.quantize, seed=source.seed, params=params),
        out / "quantized",
        watcher.trained,
        surroundings.clock,
    )
    for kind in ("fp32", "int8"):
        report[kind] = {"file": f"quantized/model_{kind}.tflite", **quantized[kind]}
    report["test_rows"] = len(source.arrays["x_test"])
    report["lineage"] = {
        "parent": source.lineage,
        "model_sha256": pretraining.sha256_of(params),
        **{
            f"{kind}_sha256": pretraining.sha256_of(out / "quantized" / f"model_{kind}.tflite")
            for kind in ("fp32", "int8")
        },
        "seed": source.seed,
        "code_version": version("fedloop"),
    }
    _write(out / MODEL, {**model, "sha256": report["lineage"]["model_sha256"]})
    _write(out / LINEAGE, report["lineage"])
    _write(out / REPORT, report)
    return report


def _source(folder: Path, asked: Compression, out: Path, surroundings: Surroundings) -> Source:
    if not (folder / PARAMS).is_file():
        raise UserError(
            f"{folder}: there is no {PARAMS} here; expected a finished folder of `fedloop pretrain`, "
            "`fedloop simulate` or `fedloop run`"
        )
    if (folder / MODEL).is_file():
        return _pretrained(folder, asked)
    if (folder / "experiment.toml").is_file():
        return _of_run(folder, asked, out, surroundings)
    raise UserError(
        f"{folder}: has neither {MODEL} nor experiment.toml, so what model {PARAMS} belongs to is unknown"
    )


def _pretrained(folder: Path, asked: Compression) -> Source:
    described_model = json.loads((folder / MODEL).read_text("utf-8"))
    lineage = json.loads((folder / LINEAGE).read_text("utf-8"))
    if pretraining.sha256_of(folder / PARAMS) != lineage["model_sha256"]:
        raise UserError(f"{folder / PARAMS}: is not the file that {LINEAGE} tells of; it was replaced since")
    arrays = pretraining.read_arrays(folder)
    rng = np.random.default_rng(lineage["seed"])
    return Source(
        {key: described_model[key] for key in ("name", "options", *MODEL_KEYS)},
        folder / PARAMS,
        _fewer(arrays, {"train": asked.rows, "test": asked.test_rows}, rng),
        lineage["seed"],
        lineage,
    )


def _of_run(folder: Path, asked: Compression, out: Path, surroundings: Surroundings) -> Source:
    path = folder / "experiment.toml"
    run = experiment.resolve(experiment.read(path), str(path), "devices")
    data = run.data.model_dump(exclude_none=True)
    wanted = ("dataset", "path", "label", "site", "split", "features", "length", "vocab")
    found = pretraining.load_arrays(
        {key: data[key] for key in wanted if key in data}, run.seed, out / "data", surroundings
    )
    held_out = {key: np.load(out / "data" / "arrays" / f"{key}_test.npy", mmap_mode="r") for key in "xy"}
    rng = np.random.default_rng(run.seed)
    order = rng.permutation(len(held_out["x"]))
    parts = {"train": order[: len(order) // 2], "test": order[len(order) // 2 :]}
    arrays = {f"{key}_{part}": held_out[key][rows] for part, rows in parts.items() for key in "xy"}
    lineage = {
        "run": str(folder.absolute()),
        "model_sha256": pretraining.sha256_of(folder / PARAMS),
        "data_fingerprint": found["fingerprint"],
        "seed": run.seed,
    }
    return Source(
        {"name": run.model.name, "options": run.model.options, **{key: found[key] for key in MODEL_KEYS}},
        folder / PARAMS,
        _fewer(arrays, {"train": asked.rows, "test": asked.test_rows}, rng),
        run.seed,
        lineage,
    )


def _fewer(
    arrays: Mapping[str, npt.NDArray[Any]], most: Mapping[str, int], rng: np.random.Generator
) -> dict[str, npt.NDArray[Any]]:
    """At most so many rows of every part, drawn at random."""
    fewer: dict[str, npt.NDArray[Any]] = {}
    for part, count in most.items():
        rows = np.sort(rng.permutation(len(arrays[f"x_{part}"]))[:count])
        fewer |= {f"{key}_{part}": np.ascontiguousarray(arrays[f"{key}_{part}"][rows]) for key in "xy"}
    return fewer


def _student(asked: Compression, model: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model to distil into; None where the source itself goes to devices."""
    name = asked.student.name
    entry = catalog.MODELS.get(model["name"])
    if name is None:
        if not asked.student.options and (entry is None or "litert" in entry.runtimes):
            return None
        name = _STUDENTS[entry.inputs if entry else "any"]
    options = asked.student.options
    target = catalog.MODELS.get(name)
    if target is None and ":" not in name:
        raise UserError(f"student.name = {name!r} is unknown; known: {', '.join(catalog.MODELS)}")
    if target is not None:
        if "litert" not in target.runtimes:
            raise UserError(f"student.name = {name!r} cannot be exported for devices; take {_exportable()}")
        if "vocab" in target.options.model_fields and "vocab" in model["options"]:
            options = {"vocab": model["options"]["vocab"], **options}
        try:
            options = target.options.model_validate(options).model_dump()
        except ValidationError as error:
            raise wrong("student", [described(item, target.options) for item in error.errors()]) from None
    return {**model, "name": name, "options": options}


def _exportable() -> str:
    return ", ".join(name for name, entry in catalog.MODELS.items() if "litert" in entry.runtimes)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    write_durably(path, (json.dumps(document, indent=2) + "\n").encode())
