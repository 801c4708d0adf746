"""A release folder from a compressed model: `manifest.json` beside `model.tflite`, as `edge_client.wire.inference` has it.

    1. let it take any number of rows where it can; list its operations, of which a custom one is refused
    2. ask the golden question of the float model, and of the file on each kernel of this runtime
    3. choose real rows and what a runtime must at least get right of them
    4. let every runtime we ship answer, each in a process of its own (`models.export.verify`)
    5. write the manifest, which claims those that passed; the report keeps the others' reasons

How far a runtime's answers may be off is measured. A quantized file errs, and another correct kernel rounds in other places:
its answers lie about as far from the float model's as those of the kernels at hand. `MARGIN` times the largest error seen
is tolerated, and never less than float sums in another order need. Where a file is off by so much that wrong answers could
pass too (four-bit weights, say), the question is not what the float model would answer but what the file's plainest kernels
do.

Run as `python -P -m models.export.inference JOB.json`, with arrays `x_test`, `y_test`, `params` or `tflite` or both, and
`out`, the release folder. `result.json` is the report.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from safetensors import SafetensorError
from torch import nn

from edge_client import process
from edge_client.files import write_durably
from edge_client.infer import selftest
from edge_client.infer.runtime import Model
from edge_client.train.trainer import score
from edge_client.wire.inference import MANIFEST_NAME, MODEL_NAME, GoldenRows, InferenceManifest
from edge_client.wire.manifest import FileSpec, Fill, InputSpec, Lineage, Tolerance
from models import job as jobs
from models.compress.quantize import converted
from models.compress.report import logits as logits_of
from models.compress.step import Precision
from models.compress.structure import rebuilt
from models.export.batching import resizable
from models.export.convert import TOLERANCE as FLOAT_TOLERANCE
from models.export.operators import builtin_operators, minimum_runtime
from models.export.verify import RUNTIMES, Verdict, verify
from models.job import JobError
from models.labels import PADDING
from models.options import bounded
from models.zoo import KerasSpec
from models.zoo.spec import ModelSpec

MARGIN = 2.0
"""Times the largest error seen; see above."""

TELLING = 0.5
"""Most of the span of a row's logits that the tolerance may be: beyond it, wrong answers could pass."""

_MOST_NUMBERS = 16_384
"""Of real rows in a manifest, which every device fetches."""

_KERNELS: Mapping[str, OpResolverType] = {
    "default": OpResolverType.AUTO,
    "builtin": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    "reference": OpResolverType.BUILTIN_REF,
}
"""This runtime's ways to compute the same file: XNNPACK, its own optimized kernels, its plain ones."""

Rows = npt.NDArray[Any]
Logits = npt.NDArray[np.float32]


class NotReleasable(ValueError):
    """The file must not go to devices; the message says what is wrong with it."""


@dataclass(frozen=True)
class Options:
    """What the manifest says besides.

    Attributes:
        name, version: in the registry.
        dataset: logical name of the data a device may evaluate it on.
        golden_rows: synthetic rows of the golden question.
        real_rows: at most so many test rows go along, which every device then holds. 0 where they must not leave.
        max_accuracy_drop: from the float model to the file, as a fraction.
    """

    name: str = "model"
    version: int = bounded(1, 1, 2**31)
    dataset: str = ""
    golden_rows: int = bounded(8, 1, 256)
    real_rows: int = bounded(64, 0, 1024)
    max_accuracy_drop: float = bounded(0.05, 0.0, 1.0)


@dataclass(frozen=True)
class Source:
    """A model to release.

    Attributes:
        module: the float model that the file was made from; None where only the file is known.
    """

    spec: ModelSpec | KerasSpec
    tflite: bytes
    precision: Precision
    module: nn.Module | None = None
    params_sha256: str = ""
    device_classes: Sequence[str] = ()
    lineage: Lineage = field(default_factory=Lineage)


@dataclass(frozen=True)
class Question:
    """How the golden rows are spread, the right answers, and how far off the kernels at hand are."""

    fill: Fill
    logits: Logits
    error: float
    asked: str

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(max(MARGIN * self.error, FLOAT_TOLERANCE.absolute), FLOAT_TOLERANCE.relative)

    @property
    def looseness(self) -> float:
        """The tolerance as a share of what a row's logits span."""
        spans = self.logits.max(-1) - self.logits.min(-1)
        return self.tolerance.absolute / max(float(np.median(spans)), 1e-30)


def run(path: Path, report: process.Report) -> None:
    """The whole job, from its file."""
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, options = job.any_spec(), job.options(Options)
    x = job.rows("x_test", spec)
    y = job.labels("y_test", spec, x)
    report(stage="export", step="open")
    source = _source(job, spec)
    python = job.settings.get("tflite_runtime")
    folder = job.file("release", job.value("release"))
    report(stage="export", step="verify")
    found = release(
        source, x, y, options, folder, job.seed, job.file("tflite_runtime", python) if python else None
    )
    jobs.write_result(job.out, found)


def release(
    source: Source,
    x: Rows,
    y: npt.NDArray[np.int32],
    options: Options,
    folder: Path,
    seed: int = 0,
    tflite_runtime: Path | None = None,
) -> dict[str, Any]:
    """Writes the release folder and gives the report.

    Args:
        x, y: test rows, never trained or calibrated on: [N, …] and their classes.
        tflite_runtime: as for `verify`.

    Raises:
        NotReleasable: this runtime itself does not get the file right, or it is worse than it may be.
        ForeignOperator: it uses an operation that no runtime has.
    """
    source = replace(source, tflite=resizable(source.tflite))
    draft = _draft(source, options)
    kernels = _kernels(source.tflite, draft)
    rng = np.random.default_rng(seed)
    accuracy = _require_accuracy(source, kernels["default"], x, y, options.max_accuracy_drop)
    posed = _question(source, draft, kernels, x, options.golden_rows)
    draft = replace(draft, golden=_golden(posed, draft, kernels["default"], x, y, options.real_rows, rng))
    verdicts = _verdicts(draft, source.tflite, tflite_runtime)
    by_runtime = {verdict.runtime: verdict for verdict in verdicts}
    if not by_runtime["litert"].passed:
        raise NotReleasable(f"the file does not pass on litert itself: {by_runtime['litert'].refused}")
    manifest = replace(
        draft,
        runtimes=tuple(verdict.runtime for verdict in verdicts if verdict.passed),
        memory_bytes=max(verdict.memory_bytes or 0 for verdict in verdicts),
        arena_bytes=by_runtime["tflite-micro"].arena_bytes if by_runtime["tflite-micro"].passed else None,
    )
    _write(folder, manifest, source.tflite)
    return {
        "model": manifest.model,
        "version": manifest.version,
        "precision": manifest.precision,
        "bytes": manifest.file.size_bytes,
        "sha256": manifest.file.sha256,
        "memory_bytes": manifest.memory_bytes,
        "arena_bytes": manifest.arena_bytes,
        "takes_batches": Model(source.tflite, manifest).batches,
        "test_rows": len(x),
        **accuracy,
        "runtimes": list(manifest.runtimes),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "golden": {
            "asked_of": posed.asked,
            "error": posed.error,
            "tolerance": asdict(posed.tolerance),
            "share_of_span": posed.looseness,
            "real_rows": len(manifest.golden.real_y),
            "least_accuracy": manifest.golden.least_accuracy,
        },
    }


def _source(job: jobs.Job, spec: ModelSpec | KerasSpec) -> Source:
    settings = job.settings
    module, digest = None, ""
    if "params" in settings:
        path = job.file("params", settings["params"])
        content = _read(path)
        module = _module(job, spec, path, content)
        digest = hashlib.sha256(content).hexdigest()
    precision = settings.get("precision", "float32")
    if precision not in get_args(Precision):
        raise JobError(
            f"{job.path}: precision is {precision!r}, expected one of {', '.join(get_args(Precision))}"
        )
    if "tflite" in settings:
        tflite = readable(job.file("tflite", settings["tflite"]))
    elif module is not None and precision == "float32" and isinstance(spec, ModelSpec):
        tflite = converted(module, spec)
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
    )


def _module(job: jobs.Job, spec: ModelSpec | KerasSpec, path: Path, content: bytes) -> nn.Module:
    """The float model with the params of the file `path`."""
    if isinstance(spec, KerasSpec):
        from models.export.keras_inference import FloatModel, opened

        return FloatModel(*opened(job, spec))
    try:
        return rebuilt(spec, safetensors.numpy.load(content))
    except SafetensorError as error:
        raise JobError(f"{path} is not a readable .safetensors file: {error}") from None


def _draft(source: Source, options: Options) -> InferenceManifest:
    """The manifest but for what runtimes answer. It claims all of them, so that all can be asked."""
    spec = source.spec
    vocab = spec.tokens if spec.input_dtype == "int32" else None
    return InferenceManifest(
        model=options.name,
        version=options.version,
        architecture=spec.name,
        options=dict(spec.options),
        task=spec.task,
        classes=spec.classes,
        input=InputSpec(tuple(spec.input_shape), spec.input_dtype, vocab),
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
    )


def _kernels(tflite: bytes, draft: InferenceManifest) -> dict[str, Callable[[Rows], Logits]]:
    return {
        name: Model(tflite, draft, experimental_op_resolver_type=resolver).predict
        for name, resolver in _KERNELS.items()
    }


def _require_accuracy(
    source: Source,
    predict: Callable[[Rows], Logits],
    x: Rows,
    y: npt.NDArray[np.int32],
    max_drop: float,
) -> dict[str, float]:
    """`accuracy` of the file on all test rows, and `float_accuracy` where there is a float model.

    Raises:
        NotReleasable: the file is too much worse, which a wrong conversion is, or one of other params.
    """
    accuracy = score(predict(x), y).accuracy
    if source.module is None:
        return {"accuracy": accuracy}
    whole = score(logits_of(source.module, x), y).accuracy
    if whole - accuracy > max_drop + 1e-9:
        raise NotReleasable(
            f"the {source.precision} file's accuracy is {accuracy:.4f}, its float model's {whole:.4f}; allowed are "
            f"{100 * max_drop:g} points (max_accuracy_drop)"
        )
    return {"accuracy": accuracy, "float_accuracy": whole}


def _question(
    source: Source,
    draft: InferenceManifest,
    kernels: Mapping[str, Callable[[Rows], Logits]],
    x: Rows,
    count: int,
) -> Question:
    """Of the ways to spread the golden rows the one where an error shows best.

    Raises:
        NotReleasable: kernels of one runtime differ by so much that no answer could be called right.
    """
    whole = source.module
    if whole is not None:
        best = _posed("float model", lambda rows: logits_of(whole, rows), draft, kernels, x, count)
        if best.looseness <= TELLING:
            return best
        if source.precision == "float32":
            raise NotReleasable(
                f"the float32 file's logits are off by {best.error:.3g} from the float model's; an operation was converted wrongly"
            )
    best = _posed("file", kernels["reference"], draft, kernels, x, count)
    if best.looseness > TELLING:
        raise NotReleasable(
            f"kernels of one runtime differ by {best.error:.3g} in the file's logits, which span "
            f"{float(np.median(np.ptp(best.logits, -1))):.3g}; no answer of it can be checked"
        )
    return best


def _posed(
    asked: str,
    reference: Callable[[Rows], Logits],
    draft: InferenceManifest,
    kernels: Mapping[str, Callable[[Rows], Logits]],
    x: Rows,
    count: int,
) -> Question:
    found = []
    for fill in _fills(x):
        manifest = replace(draft, golden=replace(draft.golden, x=fill))
        rows = selftest.synthetic_rows(manifest, count)
        right = selftest.last_place(reference(rows))
        answers = [selftest.last_place(predict(rows)) for predict in kernels.values()]
        error = max(float(np.abs(answer - right).max()) for answer in answers)
        if not np.isfinite(error):
            raise NotReleasable("the model's logits are not finite on ordinary rows")
        found.append(Question(fill, right, error, asked))
    return min(found, key=lambda question: question.looseness)


def _fills(x: Rows) -> list[Fill]:
    """Spreads about the data's mean: what the model was calibrated for, more or less of it. Ids need none."""
    if x.dtype != np.float32:
        return [Fill(0.0, 0.0)]
    mean, spread = float(x.mean()), float(x.std()) or 1.0
    return [Fill(round(mean, 3), round(spread * share, 3)) for share in (0.5, 1.0, 1.7)]


def _golden(
    posed: Question,
    draft: InferenceManifest,
    predict: Callable[[Rows], Logits],
    x: Rows,
    y: npt.NDArray[np.int32],
    most: int,
    rng: np.random.Generator,
) -> GoldenRows:
    """The question with real rows. A row may be told wrong where its two best classes are closer than rounding moves them."""
    right = tuple(_numbers(row) for row in posed.logits)
    classes = y if y.ndim == 1 else y[:, -1]
    usable = np.flatnonzero(classes != PADDING)
    count = min(most, len(usable), _MOST_NUMBERS // max(1, x[0].size))
    if not count:
        return GoldenRows(posed.fill, right, posed.tolerance)
    chosen = np.sort(rng.permutation(usable)[:count])
    logits = selftest.last_place(predict(x[chosen]))
    first, second = np.sort(logits, -1)[:, ::-1][:, :2].T if draft.classes > 1 else (logits[:, 0], -np.inf)
    safe = first - second > 2 * (posed.tolerance.absolute + posed.tolerance.relative * np.abs(first))
    sure = (logits.argmax(-1) == classes[chosen]) & safe
    return GoldenRows(
        posed.fill,
        right,
        posed.tolerance,
        tuple(_numbers(row) for row in x[chosen].reshape(count, -1)),
        tuple(int(label) for label in classes[chosen]),
        float(sure.mean()),
    )


def _numbers(row: npt.NDArray[Any]) -> tuple[float, ...]:
    """The shortest decimals that give these float32 numbers back."""
    return tuple(float(str(value)) for value in row)


def _verdicts(draft: InferenceManifest, tflite: bytes, tflite_runtime: Path | None) -> tuple[Verdict, ...]:
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), draft, tflite)
        return verify(Path(folder), tflite_runtime)


def _write(folder: Path, manifest: InferenceManifest, tflite: bytes) -> None:
    """The manifest last: a folder without one is no release."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    write_durably(folder / MODEL_NAME, tflite)
    write_durably(folder / MANIFEST_NAME, manifest.to_json().encode())


def readable(path: Path) -> bytes:
    """The content of a `.tflite`.

    Raises:
        JobError: there is none, or LiteRT cannot read it.
    """
    content = _read(path)
    try:
        Interpreter(model_content=content)
    except ValueError as error:
        raise JobError(f"{path} is no .tflite file: {' '.join(str(error).split())[:200]}") from None
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from None


if __name__ == "__main__":
    process.serve(run)
