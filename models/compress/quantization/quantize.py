"""Post-training quantization: torch params to `.tflite` in float32 or in fewer bits, with a bound on accuracy.

Every file has one signature `infer(x) -> logits` for one example at a time, with the weights inside. The float32 file is compared
with torch. The other precisions (`models.compress.quantization.recipes`) are made from it, and refused if they lose too much
accuracy or if the quantizer did not quantize their weights. Static int8 also has an int8 interface, so that a device without
floating point can run it: input and output carry scale and zero point (token inputs stay int32).

`auto` measures on this machine, because int8 is not always smaller and faster: a model of small matrices (attention, recurrence)
may be several times slower in int8 than in float32, and one of few weights may grow by the added operations. So the file is made
in each precision of `CANDIDATES`. Of those within the bound on accuracy, measured on training rows, the one with the lowest product
of bytes and latency wins: half the size is worth twice the time.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from edge_client.train.evaluation import score
from models.compress import report
from models.compress.quantization import recipes, tensor_names
from models.compress.quantization.recipes import SIGNATURE
from models.compress.step import Context, Data, OnProgress, Precision, StepModel, StepRefused
from models.conversion import flatbuffer
from models.options import bounded
from models.zoo import ModelSpec

FLOAT_TOLERANCE = 1e-4
"""Largest allowed difference of float32 from torch's logits, in units of the largest logit."""
COMPARED = 256
"""Rows on which float32 is compared with torch."""
CANDIDATES: tuple[Precision, ...] = ("float32", "dynamic-int8", "static-int8")
"""What `auto` chooses from."""
_SCORED_ROWS = 500
"""At most so many training rows score the candidates; test rows are reserved for the report."""


class ExportRefused(StepRefused):
    """The exported model misses a requirement; the message says by how much."""


@dataclass(frozen=True)
class QuantizeOptions:
    """Options of the quantization.

    Attributes:
        precision: of weights and activations; auto: the best by measured size and latency.
        calibration_rows: at most so many rows of `x_train` set the ranges of static activations.
        max_accuracy_drop: how far the accuracy on test rows may fall below float32, as a fraction.
    """

    precision: Literal["auto", "float32", "float16", "weight-int8", "dynamic-int8", "static-int8", "int4"] = (
        "static-int8"
    )
    calibration_rows: int = bounded(256, 1, 100_000)
    max_accuracy_drop: float = bounded(0.02, 0.0, 1.0)


def step(model: StepModel, data: Data, options: QuantizeOptions, context: Context) -> StepModel:
    """`model` with a `.tflite` of `options.precision`, made from its module.

    Raises:
        StepRefused: the file differs from torch, most of its weights are not quantized, or its accuracy is too low.
    """
    context.on_progress({"step": "convert"})
    float32, error = convert_checked(model, data.x_test)
    precision, tflite, facts = from_float32(float32, data, options, context.on_progress)
    return StepModel(model.spec, model.module, tflite, precision, {**facts, "max_abs_error": error})


def from_float32(
    float32: bytes, data: Data, options: QuantizeOptions, on_progress: OnProgress
) -> tuple[Precision, bytes, dict[str, Any]]:
    """The float32 file in `options.precision`: the precision, the file and its facts.

    Raises:
        StepRefused: most of its weights are not quantized, or its accuracy is too low.
    """
    if options.precision == "auto":
        precision, tflite, details = choose(float32, data, options, on_progress)
    else:
        precision, details = options.precision, {}
        on_progress({"step": "quantize", "precision": precision})
        tflite = quantize_file(float32, precision, data, options.calibration_rows)
    facts = evaluate(float32, tflite, data, precision, options.max_accuracy_drop)
    if precision == "static-int8":
        details = {**details, "calibration_rows": min(options.calibration_rows, len(data.x_train))}
    return precision, tflite, {**facts, **details}


@dataclass(frozen=True)
class Candidate:
    """A candidate of `auto`. `accuracy`: of quantities R2. `refused`: why it is excluded; empty if it is eligible."""

    precision: Precision
    bytes: int = 0
    latency_us: float = 0.0
    accuracy: float = 0.0
    refused: str = ""


def choose(
    float32: bytes, data: Data, options: QuantizeOptions, on_progress: OnProgress
) -> tuple[Precision, bytes, dict[str, Any]]:
    """The precision of the lowest cost, its file, and the figures of each candidate as facts."""
    files: dict[Precision, bytes] = {}
    candidates: list[Candidate] = []
    for precision in CANDIDATES:
        on_progress({"step": "quantize", "precision": precision})
        try:
            files[precision] = quantize_file(float32, precision, data, options.calibration_rows)
        except StepRefused as error:
            candidates.append(Candidate(precision, refused=str(error)))
        except OSError:  # a full disk is not the candidate's fault
            raise
        except Exception as error:  # the quantizer raises anything for an unknown operation
            reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
            candidates.append(Candidate(precision, refused=reason))
    x, y = data.x_train[-_SCORED_ROWS:], data.y_train[-_SCORED_ROWS:]
    latencies = report.latency({str(name): file for name, file in files.items()}, x)
    accuracies = {name: score(report.logits(file, x), y).quality for name, file in files.items()}
    for name, file in files.items():
        lost = accuracies["float32"] - accuracies[name]
        reason = (
            f"loses {100 * lost:.1f} points of {'R2' if y.dtype.kind == 'f' else 'accuracy'}"
            if lost > options.max_accuracy_drop + 1e-9
            else ""
        )
        candidates.append(Candidate(name, len(file), latencies[name], accuracies[name], reason))
    eligible = (each for each in candidates if not each.refused)
    chosen = min(eligible, key=lambda each: each.bytes * each.latency_us)
    named = "r2" if y.dtype.kind == "f" else "accuracy"
    tried = [{**asdict(each), named: each.accuracy} for each in candidates]
    if named == "r2":
        tried = [{**each, "accuracy": None} for each in tried]
    facts = {"rows": len(x), "tried": tried}
    return chosen.precision, files[chosen.precision], {"measured": facts}


def quantize_file(float32: bytes, precision: Precision, data: Data, calibration_rows: int) -> bytes:
    """The float32 file in another precision.

    Raises:
        StepRefused, NotCalibrated: the quantizer cannot do it, or left most weights unquantized.
    """
    static = precision == "static-int8"
    ranges = recipes.calibrate(float32, data.x_train[:calibration_rows]) if static else None
    tflite = recipes.quantize(float32, precision, ranges)
    require_weights(tflite, precision)
    return tflite


def convert_checked(model: StepModel, x: npt.NDArray[Any]) -> tuple[bytes, float]:
    """The module as float32 `.tflite`, and its largest difference from torch's logits on the first rows of `x`.

    Raises:
        ExportRefused: the conversion is wrong.
    """
    float32 = to_tflite(model.module, model.spec)
    rows = x[:COMPARED]
    return float32, require_same_logits(report.logits(float32, rows), report.logits(model.module, rows))


def evaluate(
    float32: bytes, tflite: bytes, data: Data, precision: Precision, max_drop: float
) -> dict[str, Any]:
    """The facts of `tflite`, compared on test rows with the float32 file that it was made from.

    Raises:
        ExportRefused: its accuracy is lower by more than `max_drop`.
    """
    before, after = (report.logits(content, data.x_test) for content in (float32, tflite))
    full, reduced = score(before, data.y_test), score(after, data.y_test)
    name = full.quality_name
    require_accuracy(full.quality, reduced.quality, max_drop, precision, name)
    classes = {"agreement": float((before.argmax(-1) == after.argmax(-1)).mean())}
    return {
        **flatbuffer.facts(tflite),
        name: reduced.quality,
        "float32_bytes": len(float32),
        f"float32_{name}": full.quality,
        **(classes if name == "accuracy" else {}),
    }


def to_tflite(module: nn.Module, spec: ModelSpec) -> bytes:
    """`module` as float32 `.tflite`, signature `infer(x[1, …]) -> logits[1, …]`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("LITERT_TORCH_SHOW_PROGRESS", "n")
    import litert_torch

    x, _ = spec.example_batch(1)
    edge = litert_torch.signature(SIGNATURE, Inference(module).eval(), (), {"x": x}).convert()
    return tensor_names.shorten(edge.model_content())


def require_same_logits(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """The largest absolute difference between the exported float32 model and torch.

    Raises:
        ExportRefused: it exceeds float rounding, so the conversion is wrong.
    """
    error = float(np.abs(actual - expected).max())
    allowed = FLOAT_TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if not error <= allowed:
        raise ExportRefused(
            f"the exported float32 model differs from the float model by {error:.3g} in a logit, expected at most {allowed:.3g}; "
            "the conversion of one of its operations is wrong"
        )
    return error


def require_weights(tflite: bytes, precision: Precision, least: float = 0.5) -> float:
    """The share of weight values that are stored in the dtype of `precision`.

    Raises:
        ExportRefused: it is less than `least`.
    """
    dtype = recipes.WEIGHTS[precision]
    share = flatbuffer.weight_shares(tflite).get(dtype, 0.0)
    if share < least:
        others = [t.name for t in flatbuffer.tensors(tflite) if flatbuffer.is_weight(t) and t.dtype != dtype]
        why = f"; only {', '.join(recipes.FOUR_BITS)} have four bits" if precision == "int4" else ""
        raise ExportRefused(
            f"only {share:.0%} of the weight values became {dtype}{why}; others remain, among them "
            f"{', '.join(others)[:200] or 'no weights at all'}"
        )
    return share


def require_accuracy(
    fp32: float, quantized: float, max_drop: float, precision: str = "int8", name: str = "accuracy"
) -> None:
    """Requires that quantization keeps the accuracy, or what else `name` says.

    Raises:
        ExportRefused: the quantized model is more than `max_drop` below float32.
    """
    # both are fractions of the same rows; 1e-9 allows for rounding
    if fp32 - quantized > max_drop + 1e-9:
        raise ExportRefused(
            f"{precision} {name} is {quantized:.4f}, {100 * (fp32 - quantized):.1f} points below float32 ({fp32:.4f}), the limit is "
            f"{100 * max_drop:.1f}; calibrate on more, or more typical, rows, or raise max_accuracy_drop"
        )


class Inference(nn.Module):
    """Names the output of the signature."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.module(x)}
