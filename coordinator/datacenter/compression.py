"""From a trained model to one that a device can run, by a pipeline of steps.

1. the source: a trained model with its data (`coordinator.datacenter.compression_sources`)
2. the pipeline: from a TOML file; by default distillation into a student if needed, then quantization in the measured best precision
3. the steps, in a worker process, each stored as soon as it is done (`models.compress.pipeline`)
4. the report, with the lineage of every file
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coordinator.datacenter import jobs
from coordinator.datacenter.compression_pipeline import Pipeline
from coordinator.datacenter.compression_request import CompressionRequest
from coordinator.datacenter.compression_sources import Source, SourceReader, copy_schema, read_model
from coordinator.datacenter.documents import (
    LINEAGE,
    MODEL,
    PACKED,
    PARAMS,
    PIPELINE,
    PUBLIC,
    REPORT,
    TFLITE,
    write_document,
)
from coordinator.datacenter.job_worker import JobFailed
from coordinator.datacenter.jobs import DatacenterJob, Environment
from coordinator.datacenter.training_data import StartModel
from coordinator.document_checks import read_table, to_user_error
from coordinator.errors import RunInterrupted, UserError
from coordinator.output_folders import require_new, undone_if_refused
from coordinator.storage.private_folders import private_folder
from edge_client.files import file_sha256, write_durably
from models import catalog

_SLOWER = 1.1
"""Ratio of latencies above which a model counts as slower; repeated measurements vary by less."""

_STUDENTS = {"token sequences": "charlm", "tokens": "textcls", "images": "cnn", "any": "mlp"}


def compress(
    folder: Path,
    request: CompressionRequest,
    out: Path,
    environment: Environment,
    *,
    keep_on_failure: bool = True,
) -> dict[str, Any]:
    """Compresses the model in `folder` into `out` and returns the report.

    `out` is new, empty, or from an earlier compression: steps that it already holds are not run again.

    Args:
        keep_on_failure: whether `out` remains when a step fails, so that the message may offer to continue.

    Raises:
        UserError: `folder` holds no trained model, the pipeline is wrong, or `out` is something else.
        RunInterrupted: a step failed; the message says which and where its log is.
    """
    started = (out / PIPELINE).is_file()
    require_new(out, may_continue=started)
    with private_folder() as scratch:
        source = SourceReader(request.pipeline, scratch, environment, request.data_options).read(folder)
        pipeline = _complete(request, source)
        teachers = _teachers(pipeline, request.origin)
        with undone_if_refused(out, lambda: started):
            out.mkdir(parents=True, exist_ok=True)
            write_pipeline(out, pipeline)
            result = run_steps(
                source,
                pipeline.step,
                out,
                environment,
                origin=request.origin,
                teachers=teachers,
                keep_on_failure=keep_on_failure,
            )
    return write_report(source, result, out)


def write_pipeline(out: Path, pipeline: Pipeline) -> None:
    """Stores the complete pipeline in `out`."""
    write_durably(out / PIPELINE, pipeline.to_toml().encode())


def run_steps(
    source: Source,
    steps: Sequence[Mapping[str, Any]],
    out: Path,
    environment: Environment,
    *,
    origin: str,
    teachers: Mapping[str, Source] | None = None,
    keep_on_failure: bool = True,
) -> dict[str, Any]:
    """Runs `steps` on `source` in `out`, as a job, and returns its result.

    Raises:
        UserError: the worker rejected the request before it started.
        RunInterrupted: a step failed.
    """
    described_teachers = {
        name: {"model": dict(teacher.model), "params": str(teacher.params.absolute())}
        for name, teacher in (teachers or {}).items()
    }
    job = DatacenterJob(
        "compress",
        source.model,
        source.arrays,
        seed=source.seed,
        params=source.params,
        more={"steps": [dict(step) for step in steps], "pipeline": origin, "teachers": described_teachers},
    )

    def describe(line: Mapping[str, Any]) -> str | None:
        if line.get("stage") not in ("compress", "kept") or not line["pipeline_step"]:
            return None
        step = f"step {line['pipeline_step']} of {line['steps_in_all']}: {line['kind']}"
        return step + (", kept from before" if line["stage"] == "kept" else "")

    return run_job(job, out, environment, describe, resumable=keep_on_failure)


def run_job(
    job: DatacenterJob,
    out: Path,
    environment: Environment,
    describe: Callable[[Mapping[str, Any]], str | None],
    *,
    resumable: bool = True,
) -> dict[str, Any]:
    """The result of a job in `out`. `describe`: the stage that a line of its progress begins, if any.

    Raises:
        UserError: the worker rejected the request.
        RunInterrupted: it failed after it had checked the request.
    """
    progress, checked = environment.progress, False

    def on_progress(line: Mapping[str, Any]) -> None:
        nonlocal checked
        checked = checked or bool(line.get("checked"))
        if (stage := describe(line)) is not None:
            progress.stage(stage)
        progress.trained(line)

    try:
        return jobs.run(job, out, on_progress, environment.clock)
    except JobFailed as error:
        if not checked:
            raise UserError(error.reason) from None
        if not resumable:
            raise RunInterrupted(error.summary) from None
        raise RunInterrupted(f"{error}; the same command continues after the last finished step") from None


_FINAL = ("accuracy", "r2", "bytes", "latency_us", "precision")
"""Figures of the last step that are the compression's; `r2` of a model that predicts a quantity."""


def write_report(source: Source, result: Mapping[str, Any], out: Path, **more: Any) -> dict[str, Any]:
    """Writes the model's description, lineage and report into `out`; `more` are further keys of the report."""
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
            "packed": PACKED if last["packed_sha256"] else None,
            **{key: result["rows"][-1][key] for key in _FINAL if key in result["rows"][-1]},
        },
        "notices": notices(first, result["rows"][-1]),
        "test_rows": len(source.arrays["x_test"]),
        "scored": source.scored,
        "lineage": {
            "parent": source.lineage,
            "model_sha256": file_sha256(model),
            "tflite_sha256": last["tflite_sha256"],
            "packed_sha256": last["packed_sha256"],
            "data_fingerprint": result["data_fingerprint"],
            PUBLIC: source.lineage.get(PUBLIC) is True,
            "steps": result["lineage"],
            "seed": source.seed,
            "code_version": version("fedloop"),
        },
        **more,
    }
    copy_schema(source, out)
    about = {**result["model"], "precision": report["final"]["precision"]}
    write_document(out / MODEL, {**about, "sha256": report["lineage"]["model_sha256"]})
    write_document(out / LINEAGE, report["lineage"])
    write_document(out / REPORT, report)
    return report


def notices(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Warnings about a compressed model that is larger than its source, or slower by more than repeated measurements vary."""
    warnings = []
    if after["bytes"] > before["bytes"]:
        warnings.append(f"LARGER than the source: {after['bytes']:,} bytes, before {before['bytes']:,}")
    old, new = before["latency_us"], after["latency_us"]
    if old and new and new > _SLOWER * old:
        warnings.append(
            f"SLOWER than the source: {new:.1f} us a row, before {old:.1f} us ({new / old:.1f} times)"
        )
    if warnings and after["precision"] != "float32":
        warnings.append(
            f"{after['precision']} is a poor choice for this model on this machine; --set quantize.precision=auto measures and chooses"
            if "measured" not in after["facts"]
            else "it still has the lowest product of bytes and latency; --set quantize.precision=float32 keeps the speed"
        )
    return warnings


def _complete(request: CompressionRequest, source: Source) -> Pipeline:
    """The requested pipeline, or the default one, with every step and its options."""
    steps = [dict(step) for step in request.pipeline.step] or _default(request, source.model)
    kinds = [step.get("kind") for step in steps]
    problems = [
        f"{kind} is set, but the pipeline has no step of that kind; it has {', '.join(map(str, kinds))}"
        for kind in request.sets
        if kind not in kinds
    ]
    if problems:
        raise to_user_error(request.origin, problems)
    steps = [{**step, **request.sets.get(str(step.get("kind")), {})} for step in steps]
    return request.pipeline.model_copy(update={"step": steps, "seed": source.seed})


def _default(request: CompressionRequest, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    student = student_of(request.student, model)
    quantize = {"kind": "quantize", "precision": "auto"}
    if student is None:
        return [quantize]
    return [{"kind": "distil", "student": student, "epochs": 6, "lr": 4e-3}, quantize]


def _teachers(pipeline: Pipeline, origin: str) -> dict[str, Source]:
    names = [step["teachers"] for step in pipeline.step if isinstance(step.get("teachers"), str)]
    folders = {part.strip() for name in names for part in name.split(",") if part.strip()}
    teachers = {}
    for folder in sorted(folders):
        path = Path(folder)
        if not (path / PARAMS).is_file() or not (path / MODEL).is_file():
            raise UserError(
                f"{origin}: teachers: {folder} has no {PARAMS} with its {MODEL}; expected a folder of `fedloop pretrain`"
            )
        teachers[folder] = Source(read_model(path), path / PARAMS, {}, 0, {})
    return teachers


def student_of(student: StartModel, model: Mapping[str, Any]) -> str | None:
    """The model to distil into, as an option of that step; None if devices can run the source itself."""
    name, options = student.name, student.options
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
            exportable = (key for key, entry in catalog.MODELS.items() if "litert" in entry.runtimes)
            raise UserError(
                f"student.name = {name!r} cannot be exported for devices; choose {', '.join(exportable)}"
            )
        problems: list[str] = []
        if read_table(target.options, options, problems) is None:
            raise to_user_error("student", problems)
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else name
