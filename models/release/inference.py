"""A release folder from a compressed model: `manifest.json` beside `model.tflite`, as `edge_client.wire.inference` defines it.

    1. let the file accept any number of rows if possible; list its operations and refuse custom ones
    2. compute golden answers with the float model, and compare the file's on each kernel of this runtime (`models.release.golden`)
    3. if real rows are requested, choose them and the accuracy that a runtime must reach on them
    4. test the release on every supported runtime, each in its own process (`models.release.verify`)
    5. write the manifest, which claims the runtimes that passed; the report states why others did not

Run as `python -P -m models.release.inference JOB.json`, with arrays `x_test`, `y_test`, `params` or `tflite` or both, and
`release`, the release folder. `result.json` is the report.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from torch import nn

from edge_client.files import file_sha256, write_durably
from edge_client.infer.runtime import Model
from edge_client.processes import process
from edge_client.train.evaluation import score
from edge_client.wire import schema as schemas
from edge_client.wire.inference import GoldenRows, InferenceManifest
from edge_client.wire.manifest import FileSpec, Fill, InputSpec, Lineage
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME
from edge_client.wire.schema import DataSchema
from edge_client.wire.strict import InvalidDocument
from models import job as jobs
from models.compress.pruning.structure import rebuild
from models.compress.quantization.quantize import to_tflite
from models.compress.report import logits as logits_of
from models.compress.step import Precision
from models.conversion.batching import make_resizable
from models.conversion.convert import TOLERANCE as FLOAT_TOLERANCE
from models.conversion.operators import builtin_operators, minimum_runtime
from models.job import JobError
from models.options import bounded
from models.release import golden
from models.release.golden import GoldenAnswers, NotReleasable, Predict, Rows
from models.release.verify import RUNTIMES, verify
from models.zoo import KerasSpec
from models.zoo.spec import ModelSpec

_KERNELS: Mapping[str, OpResolverType] = {
    "default": OpResolverType.AUTO,
    "builtin": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    "reference": OpResolverType.BUILTIN_REF,
}
"""This runtime's implementations of the operations: XNNPACK, its own optimized kernels, its reference kernels."""


@dataclass(frozen=True)
class ReleaseOptions:
    """Further contents of the manifest, and the limits of a release.

    Attributes:
        name, version: in the registry.
        dataset: logical name of the data a device may evaluate it on.
        golden_rows: number of synthetic rows.
        real_rows: at most so many test rows are published in the manifest; fewer if they are large.
        max_accuracy_drop: from the float model to the file, as a fraction.
    """

    name: str = "model"
    version: int = bounded(1, 1, 2**31)
    dataset: str = ""
    golden_rows: int = bounded(8, 1, 256)
    real_rows: int = bounded(0, 0, 1024)
    max_accuracy_drop: float = bounded(0.05, 0.0, 1.0)


@dataclass(frozen=True)
class Source:
    """A model to release.

    Attributes:
        module: the float model that the file was made from; None if only the file is known.
    """

    spec: ModelSpec | KerasSpec
    tflite: bytes
    precision: Precision
    module: nn.Module | None = None
    params_sha256: str = ""
    device_classes: Sequence[str] = ()
    lineage: Lineage = field(default_factory=Lineage)
    schema: DataSchema | None = None


def run(path: Path, report: process.Report) -> None:
    """Runs the job in the file `path`."""
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, options = job.any_spec(), job.options(ReleaseOptions)
    x = job.rows("x_test", spec)
    y = job.labels("y_test", spec, x)
    _require_regression(job, spec, options)
    report(stage="export", step="open")
    source = _read_source(job, spec)
    python = job.settings.get("tflite_runtime")
    folder = job.file("release", job.value("release"))
    report(stage="export", step="verify")
    result = release(
        source, x, y, options, folder, job.seed, job.file("tflite_runtime", python) if python else None
    )
    jobs.write_result(job.out, result)


def _require_regression(job: jobs.JobFile, spec: ModelSpec | KerasSpec, options: ReleaseOptions) -> None:
    """Refuses a release of a model that predicts a quantity if it lacks the unit, or is to hold real rows."""
    if spec.task != "regression":
        return
    if options.real_rows:
        raise JobError(
            f"{job.path}: real_rows = {options.real_rows}: real rows are for models that predict classes; {spec.name!r} predicts "
            "a quantity"
        )
    if (job.settings.get("schema") or {}).get("label_scale") is None:
        raise JobError(
            f"{job.path}: model {spec.name!r} predicts a quantity, and there is no schema with its label_scale, without which its "
            "answers have no unit; release a model with its schema.json, such as the folder of a run"
        )


def release(
    source: Source,
    x: Rows,
    y: npt.NDArray[np.int32],
    options: ReleaseOptions,
    folder: Path,
    seed: int = 0,
    tflite_runtime: Path | None = None,
) -> dict[str, Any]:
    """Writes the release folder and returns the report.

    Args:
        x, y: test rows, never used to train or calibrate: [N, …] and their classes.
        tflite_runtime: as for `verify`.

    Raises:
        NotReleasable: this runtime itself computes wrong answers, or the accuracy is too low.
        ForeignOperator: the file uses an operation that no runtime has.
    """
    source = replace(source, tflite=make_resizable(source.tflite))
    draft = _draft(source, options)
    kernels = {
        name: Model(source.tflite, draft, experimental_op_resolver_type=resolver).predict
        for name, resolver in _KERNELS.items()
    }
    rng = np.random.default_rng(seed)
    accuracy = _require_accuracy(source, kernels["default"], x, y, options.max_accuracy_drop)
    answers = golden.compute_answers(source.module, draft, kernels, x, options.golden_rows)
    rows = golden.add_real_rows(answers, kernels["default"], x, y, options.real_rows, rng)
    draft = replace(draft, golden=rows)
    with tempfile.TemporaryDirectory() as scratch:
        _write(Path(scratch), draft, source.tflite)
        verdicts = {verdict.runtime: verdict for verdict in verify(Path(scratch), tflite_runtime)}
    if not verdicts["litert"].passed:
        raise NotReleasable(f"the file does not pass on litert itself: {verdicts['litert'].refused}")
    micro = verdicts["tflite-micro"]
    manifest = replace(
        draft,
        runtimes=tuple(runtime for runtime, verdict in verdicts.items() if verdict.passed),
        memory_bytes=max(verdict.memory_bytes or 0 for verdict in verdicts.values()),
        arena_bytes=micro.arena_bytes if micro.passed else None,
    )
    _write(folder, manifest, source.tflite)
    return {
        **_describe(manifest, answers),
        "takes_batches": Model(source.tflite, manifest).batches,
        "test_rows": len(x),
        **accuracy,
        "verdicts": [asdict(verdict) for verdict in verdicts.values()],
    }


def _describe(manifest: InferenceManifest, answers: GoldenAnswers) -> dict[str, Any]:
    return {
        "model": manifest.model,
        "version": manifest.version,
        "precision": manifest.precision,
        "bytes": manifest.file.size_bytes,
        "sha256": manifest.file.sha256,
        "memory_bytes": manifest.memory_bytes,
        "arena_bytes": manifest.arena_bytes,
        "runtimes": list(manifest.runtimes),
        "golden": {
            "asked_of": answers.reference,
            "error": answers.error,
            "tolerance": asdict(answers.tolerance),
            "share_of_span": answers.looseness,
            "rows": len(manifest.golden.logits),
            "real_rows": len(manifest.golden.real_y),
            "least_accuracy": manifest.golden.least_accuracy,
        },
    }


def _read_source(job: jobs.JobFile, spec: ModelSpec | KerasSpec) -> Source:
    settings = job.settings
    module: nn.Module | None = None
    digest = ""
    if "params" in settings:
        path = job.file("params", settings["params"])
        digest = file_sha256(path)
        if isinstance(spec, KerasSpec):
            from models.release.keras_inference import FloatModel, read_model

            module = FloatModel(*read_model(job, spec))
        else:
            module = rebuild(spec, jobs.read_params(path))
    precision = settings.get("precision", "float32")
    if precision not in get_args(Precision):
        raise JobError(
            f"{job.path}: precision is {precision!r}, expected one of {', '.join(get_args(Precision))}"
        )
    if "tflite" in settings:
        tflite = read_tflite(job.file("tflite", settings["tflite"]))
    elif module is not None and precision == "float32" and isinstance(spec, ModelSpec):
        tflite = to_tflite(module, spec)
    else:
        raise JobError(f"{job.path}: tflite is missing; only float32 is made from params alone")
    lineage = settings.get("lineage", {})
    return Source(
        spec,
        tflite,
        cast(Precision, precision),
        module,
        digest,
        tuple(settings.get("device_classes", ())),
        Lineage(
            lineage.get("parent"), "export", lineage.get("data_fingerprint"), f"fedloop {version('fedloop')}"
        ),
        _read_schema(job, spec),
    )


def _read_schema(job: jobs.JobFile, spec: ModelSpec | KerasSpec) -> DataSchema | None:
    """The data schema that the release carries. Raises: JobError: it is of another model."""
    document = job.settings.get("schema")
    if document is None:
        return None
    try:
        schema = schemas.from_document(document, f"{job.path}: schema")
    except InvalidDocument as error:
        raise JobError(str(error)) from None
    if (schema.input_shape, schema.input_dtype) != (tuple(spec.input_shape), spec.input_dtype):
        raise JobError(
            f"{job.path}: the schema is of {schema.input_dtype} rows {list(schema.input_shape)}, the model takes "
            f"{spec.input_dtype} {list(spec.input_shape)}"
        )
    # Without columns and names it says no more than the manifest itself, and daemons of before know no such key.
    return schema if schema.kind != "array" or schema.classes or schema.label_scale else None


def _draft(source: Source, options: ReleaseOptions) -> InferenceManifest:
    """The manifest before verification. It claims every runtime, so that every runtime is tested."""
    spec = source.spec
    return InferenceManifest(
        model=options.name,
        version=options.version,
        architecture=spec.name,
        options=dict(spec.options),
        task=spec.task,
        classes=spec.classes,
        input=InputSpec(tuple(spec.input_shape), spec.input_dtype, spec.described_vocab),
        precision=source.precision,
        operators=builtin_operators(source.tflite),
        minimum_runtime=minimum_runtime(source.tflite),
        runtimes=RUNTIMES,
        memory_bytes=0,
        file=FileSpec(hashlib.sha256(source.tflite).hexdigest(), len(source.tflite)),
        golden=GoldenRows(Fill(0.5, 0.5), (), FLOAT_TOLERANCE),
        device_classes=tuple(source.device_classes),
        dataset=options.dataset,
        params_sha256=source.params_sha256,
        lineage=source.lineage,
        schema=source.schema,
    )


def _require_accuracy(
    source: Source,
    predict: Predict,
    x: Rows,
    y: npt.NDArray[np.int32],
    max_drop: float,
) -> dict[str, float | None]:
    """`accuracy` of the file on all test rows, and `float_accuracy` if there is a float model; of quantities `r2` and `float_r2`.

    Raises:
        NotReleasable: the file is much worse, because of a wrong conversion or other params.
    """
    scored = score(predict(x), y)
    name, quality = scored.quality_name, scored.quality
    none = {} if name == "accuracy" else {"accuracy": None}
    if source.module is None:
        return {**none, name: quality}
    before = score(logits_of(source.module, x), y).quality
    if not before - quality <= max_drop + 1e-9:
        raise NotReleasable(
            f"the {source.precision} file's {name} is {quality:.4f}, its float model's {before:.4f}; the limit is a drop of "
            f"{100 * max_drop:g} points (max_accuracy_drop)"
        )
    return {**none, name: quality, f"float_{name}": before}


def _write(folder: Path, manifest: InferenceManifest, tflite: bytes) -> None:
    """Writes the manifest last: a folder without one is no release."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    write_durably(folder / MODEL_NAME, tflite)
    write_durably(folder / MANIFEST_NAME, manifest.to_json().encode())


def read_tflite(path: Path) -> bytes:
    """The content of a `.tflite`.

    Raises:
        JobError: it is missing, or LiteRT cannot read it.
    """
    try:
        content = path.read_bytes()
        Interpreter(model_content=content)
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise JobError(f"{path} is not a .tflite file: {' '.join(str(error).split())[:200]}") from None
    return content


if __name__ == "__main__":
    process.serve(run)
