"""From a trained model to one that a device can run, by a pipeline of steps.

    1. the source: a folder of `fedloop pretrain`, of a finished run, or of an earlier compression, with its model and its data
    2. the pipeline: a TOML file's; without one a student is distilled where need be, and quantized to int8
    3. the steps, in a worker process, each kept as soon as it is done (`models.compress.pipeline`)
    4. the report, with the lineage of every file

A pretraining's own training rows teach and calibrate. Of a run only the held-out rows are the coordinator's: half of
them calibrate, the other half score.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from coordinator.pretraining import LINEAGE, MODEL, MODEL_KEYS, REPORT, Surroundings
from coordinator.sections import described, wrong
from edge_client.files import write_durably
from models import catalog

PARAMS, TFLITE, PIPELINE = "model.safetensors", "model.tflite", "pipeline.toml"
_STUDENTS = {"token sequences": "charlm", "tokens": "textcls", "images": "cnn", "any": "mlp"}


class Pipeline(Section):
    """How to compress.

    Attributes:
        rows: at most so many rows teach and calibrate.
        test_rows: at most so many rows score every step.
        seed: of rows and steps; the source's own unless given.
        step: `kind` and the options of that kind, one table a step.
    """

    rows: int = Field(2000, ge=1)
    test_rows: int = Field(500, ge=1)
    seed: int | None = Field(None, ge=0)
    step: list[dict[str, Any]] = Field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """What a command asks for.

    Attributes:
        pipeline: without a step, the default one.
        source: what messages call it.
        student: of the default pipeline, as `name` and options.
        sets: kind of a step -> options for all steps of that kind.
    """

    pipeline: Pipeline
    source: str
    student: Model = field(default_factory=Model)
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


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


def resolve(file: Path | None, student: str | None, sets: Sequence[str]) -> Asked:
    """The compression that a command asks for.

    Raises:
        UserError: listing every problem at once.
    """
    source = "compress" if file is None else str(file)
    document = {} if file is None else experiment.read(file)
    if file is not None and not document.get("step"):
        raise UserError(f"{file}: has no step; expected tables [[step]], each with a kind and its options")
    given = changed({}, sets)
    own = {key: given.pop(key) for key in ("rows", "test_rows", "seed", "step") if key in given}
    wanted = given.pop("student", {})
    if student is not None:
        wanted = {**(wanted if isinstance(wanted, dict) else {}), "name": student}
    if wanted and file is not None:
        raise UserError(f"--student goes with the default pipeline; in {file} a step of kind distil names it")
    options = {kind: value for kind, value in given.items() if isinstance(value, dict)}
    problems = [
        f"{key} is not a known key; known: rows, test_rows, seed, student, and kinds of steps with an option, as quantize.precision"
        for key in given
        if key not in options
    ]
    try:
        pipeline = Pipeline.model_validate({**document, **own})
    except ValidationError as error:
        problems += [described(item, Pipeline) for item in error.errors()]
    try:
        model = Model.model_validate(wanted)
    except ValidationError as error:
        problems += [f"student.{described(item, Model)}" for item in error.errors()]
    if problems:
        raise wrong(source, problems)
    return Asked(pipeline, source, model, options)


def compress(folder: Path, asked: Asked, out: Path, surroundings: Surroundings) -> dict[str, Any]:
    """Compresses the model in `folder` into `out` and returns the report.

    `out` is new, empty, or what an earlier compression has left: steps that it holds already are not run again.

    Raises:
        UserError: `folder` holds no trained model, the pipeline is wrong, or `out` is something else.
        RunInterrupted: a step failed; the message says which and where its log is.
    """
    begun = (out / PIPELINE).is_file()
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not begun)):
        raise UserError(f"--out {out}: the folder is not empty; name another one")
    with tempfile.TemporaryDirectory(prefix="fedloop-") as scratch:
        source = source_in(folder, asked.pipeline, Path(scratch), surroundings)
        pipeline = _complete(asked, source)
        teachers = _teachers(pipeline, asked.source)
        out.mkdir(parents=True, exist_ok=True)
        write_durably(
            out / PIPELINE, tomlkit.dumps(pipeline.model_dump(mode="json", exclude_none=True)).encode()
        )
        try:
            result = run_steps(
                source, pipeline.step, out, surroundings, named=asked.source, teachers=teachers
            )
        except UserError:
            if not begun:
                shutil.rmtree(out)  # so that the command can be given again once the mistake is mended
            raise
    return write_report(source, result, out)


def run_steps(
    source: Source,
    steps: Sequence[Mapping[str, Any]],
    out: Path,
    surroundings: Surroundings,
    *,
    named: str = "pipeline",
    teachers: Mapping[str, Source] | None = None,
) -> dict[str, Any]:
    """Runs `steps` on `source` in `out`, as a job, and gives its result.

    Raises:
        UserError: the worker found fault with what it was asked for, before it began.
        RunInterrupted: a step failed.
    """
    checked = False

    def heard(line: Mapping[str, Any]) -> None:
        nonlocal checked
        checked = checked or bool(line.get("checked"))
        if line.get("stage") in ("compress", "kept") and line["pipeline_step"]:
            words = f"step {line['pipeline_step']} of {line['steps_in_all']}: {line['kind']}"
            watcher.stage(words + (", kept from before" if line["stage"] == "kept" else ""))
        watcher.trained(line)

    watcher = surroundings.watcher
    described_teachers = {
        name: {"model": dict(teacher.model), "params": str(teacher.params.absolute())}
        for name, teacher in (teachers or {}).items()
    }
    job = Job(
        "compress",
        source.model,
        source.arrays,
        seed=source.seed,
        params=source.params,
        more={"steps": [dict(step) for step in steps], "pipeline": named, "teachers": described_teachers},
    )
    try:
        return jobs.run(job, out, heard, surroundings.clock)
    except JobFailed as error:
        raise failed(error, checked) from None


def failed(error: JobFailed, checked: bool) -> UserError | RunInterrupted:
    """What a person is told of a worker that ended early: a mistake of theirs, unless it had `checked` what was asked for."""
    if not checked:
        return UserError(error.reason)
    return RunInterrupted(f"{error}; the same command goes on after the last step that was done")


def write_report(source: Source, result: Mapping[str, Any], out: Path, **more: Any) -> dict[str, Any]:
    """Says in `out` what its model is and came from; the report has the keys of `more` besides."""
    first, *steps = result["rows"]
    last = result["lineage"][-1]
    model = out / PARAMS
    report = {
        "source": first,
        "steps": steps,
        "final": {
            "model": result["model"]["name"],
            "params": PARAMS,
            "file": TFLITE if last["tflite_sha256"] else None,
            **{key: result["rows"][-1][key] for key in ("accuracy", "bytes", "latency_us", "precision")},
        },
        "test_rows": len(source.arrays["x_test"]),
        "lineage": {
            "parent": source.lineage,
            "model_sha256": pretraining.sha256_of(model),
            "tflite_sha256": last["tflite_sha256"],
            "data_fingerprint": result["data_fingerprint"],
            "steps": result["lineage"],
            "seed": source.seed,
            "code_version": version("fedloop"),
        },
        **more,
    }
    about = {**result["model"], "precision": report["final"]["precision"]}
    _write(out / MODEL, {**about, "sha256": report["lineage"]["model_sha256"]})
    _write(out / LINEAGE, report["lineage"])
    _write(out / REPORT, report)
    return report


def _complete(asked: Asked, source: Source) -> Pipeline:
    """The pipeline with every step and its options, the default one where none was given."""
    steps = [dict(step) for step in asked.pipeline.step] or _default(asked, source.model)
    kinds = [step.get("kind") for step in steps]
    problems = [
        f"{kind} is set, but the pipeline has no step of that kind; it has {', '.join(map(str, kinds))}"
        for kind in asked.sets
        if kind not in kinds
    ]
    if problems:
        raise wrong(asked.source, problems)
    steps = [{**step, **asked.sets.get(str(step.get("kind")), {})} for step in steps]
    return asked.pipeline.model_copy(update={"step": steps, "seed": source.seed})


def _default(asked: Asked, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    student = student_of(asked.student, model)
    quantize = {"kind": "quantize", "precision": "static-int8"}
    if student is None:
        return [quantize]
    return [{"kind": "distil", "student": student, "epochs": 6, "lr": 4e-3}, quantize]


def _teachers(pipeline: Pipeline, named: str) -> dict[str, Source]:
    """The models in the folders that steps name as teachers."""
    names = [step["teachers"] for step in pipeline.step if isinstance(step.get("teachers"), str)]
    folders = {part.strip() for name in names for part in name.split(",") if part.strip()}
    found = {}
    for folder in sorted(folders):
        path = Path(folder)
        if not (path / PARAMS).is_file() or not (path / MODEL).is_file():
            raise UserError(
                f"{named}: teachers: {folder} has no {PARAMS} with its {MODEL}; expected a folder of `fedloop pretrain`"
            )
        found[folder] = Source(_model_in(path), path / PARAMS, {}, 0, {})
    return found


def source_in(folder: Path, asked: Pipeline, scratch: Path, surroundings: Surroundings) -> Source:
    """The trained model in `folder`, with as many rows as asked for.

    Raises:
        UserError: there is none.
    """
    if not (folder / PARAMS).is_file():
        raise UserError(
            f"{folder}: there is no {PARAMS} here; expected a finished folder of `fedloop pretrain`, "
            "`fedloop simulate` or `fedloop run`"
        )
    if (folder / MODEL).is_file():
        return _pretrained(folder, asked)
    if (folder / "experiment.toml").is_file():
        return _of_run(folder, asked, scratch, surroundings)
    raise UserError(
        f"{folder}: has neither {MODEL} nor experiment.toml, so what model {PARAMS} belongs to is unknown"
    )


def _pretrained(folder: Path, asked: Pipeline) -> Source:
    model = _model_in(folder)
    lineage = document(folder / LINEAGE, "model_sha256", "seed")
    if pretraining.sha256_of(folder / PARAMS) != lineage["model_sha256"]:
        raise UserError(f"{folder / PARAMS}: is not the file that {LINEAGE} tells of; it was replaced since")
    # what was compressed before has its rows beside it, and can be compressed further
    again = (folder / PIPELINE).is_file()
    arrays = _rows(folder / "arrays") if again else pretraining.read_arrays(folder)
    seed = lineage["seed"] if asked.seed is None else asked.seed
    rng = np.random.default_rng(seed)
    return Source(
        model,
        folder / PARAMS,
        fewer(arrays, {"train": asked.rows, "test": asked.test_rows}, rng),
        seed,
        lineage,
    )


def _model_in(folder: Path) -> dict[str, Any]:
    """The model whose params are in a folder, as job files describe it."""
    wanted = ("name", "options", *MODEL_KEYS)
    found = document(folder / MODEL, *wanted)
    return {key: found[key] for key in wanted}


def document(path: Path, *keys: str) -> dict[str, Any]:
    """The JSON object in a file that a command left, with these keys.

    Raises:
        UserError: it is none, or one of the keys is not there.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path.parent}: there is no {path.name} here; expected one of `fedloop compress`, `fedloop pretrain` or a finished run"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds {type(found).__name__}, expected an object")
    if lacking := [key for key in keys if key not in found]:
        raise UserError(f"{path} lacks the key {lacking[0]!r}; expected the file as the command left it")
    return found


def _rows(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """The rows beside what was compressed before."""
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        return {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: the rows of that compression cannot be read: {error}") from None


def _of_run(folder: Path, asked: Pipeline, scratch: Path, surroundings: Surroundings) -> Source:
    path = folder / "experiment.toml"
    run = experiment.resolve(experiment.read(path), str(path), "devices")
    data = run.data.model_dump(exclude_none=True)
    wanted = ("dataset", "path", "label", "site", "split", "features", "length", "vocab")
    found = pretraining.load_arrays(
        {key: data[key] for key in wanted if key in data}, run.seed, scratch, surroundings
    )
    held_out = {key: np.load(scratch / "arrays" / f"{key}_test.npy", mmap_mode="r") for key in "xy"}
    seed = run.seed if asked.seed is None else asked.seed
    rng = np.random.default_rng(seed)
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
        fewer(arrays, {"train": asked.rows, "test": asked.test_rows}, rng),
        seed,
        lineage,
    )


def fewer(
    arrays: Mapping[str, npt.NDArray[Any]], most: Mapping[str, int], rng: np.random.Generator
) -> dict[str, npt.NDArray[Any]]:
    """At most so many rows of every part, drawn at random."""
    fewer: dict[str, npt.NDArray[Any]] = {}
    for part, count in most.items():
        rows = np.sort(rng.permutation(len(arrays[f"x_{part}"]))[:count])
        fewer |= {f"{key}_{part}": np.ascontiguousarray(arrays[f"{key}_{part}"][rows]) for key in "xy"}
    return fewer


def student_of(wanted: Model, model: Mapping[str, Any]) -> str | None:
    """The model to distil into, as an option of that step; None where the source itself goes to devices."""
    name, options = wanted.name, wanted.options
    entry = catalog.MODELS.get(model["name"])
    if name is None:
        if not options and (entry is None or "litert" in entry.runtimes):
            return None
        name = _STUDENTS[entry.inputs if entry else "any"]
    target = catalog.MODELS.get(name)
    if target is None and ":" not in name:
        raise UserError(f"student.name = {name!r} is unknown; known: {', '.join(catalog.MODELS)}")
    if target is not None:
        if "litert" not in target.runtimes:
            raise UserError(f"student.name = {name!r} cannot be exported for devices; take {_exportable()}")
        try:
            target.options.model_validate(options)
        except ValidationError as error:
            raise wrong("student", [described(item, target.options) for item in error.errors()]) from None
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else name


def _exportable() -> str:
    return ", ".join(name for name, entry in catalog.MODELS.items() if "litert" in entry.runtimes)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    write_durably(path, (json.dumps(document, indent=2) + "\n").encode())
