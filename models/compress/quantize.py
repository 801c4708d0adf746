"""Quantization after training: torch params to `.tflite` in float32 or in fewer bits, behind a gate.

Every file has one signature `infer(x) -> logits` for one example at a time, weights inside. float32 is checked against torch.
The other precisions (`models.compress.recipes`) are made from it, and refused when they lose too much accuracy or when the
quantizer left their weights as they were. Static int8 has an int8 interface as well, so that a device without floating point
can run it: input and output carry scale and zero point (token inputs stay int32).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from edge_client.train.trainer import score
from models.compress import naming, recipes, report, stored
from models.compress.recipes import SIGNATURE
from models.compress.step import Context, Data, Model, Precision, StepRefused
from models.options import bounded
from models.zoo import ModelSpec

FLOAT_TOLERANCE = 1e-4
"""Largest difference from torch's logits that float32 may show, in units of the largest logit."""
COMPARED = 256
"""Rows on which float32 is compared with torch."""


class ExportRefused(StepRefused):
    """The exported model is not good enough to be handed on; the message says by how much."""


@dataclass(frozen=True)
class Options:
    """How to quantize.

    Attributes:
        precision: what becomes of weights and activations.
        calibration_rows: at most so many rows of `x_train` set the ranges of activations, where these are static.
        max_accuracy_drop: how far below float32 the accuracy on test rows may fall, as a fraction.
    """

    precision: Literal["float32", "float16", "weight-int8", "dynamic-int8", "static-int8", "int4"] = (
        "static-int8"
    )
    calibration_rows: int = bounded(256, 1, 100_000)
    max_accuracy_drop: float = bounded(0.02, 0.0, 1.0)


def step(model: Model, data: Data, options: Options, context: Context) -> Model:
    """`model` with a `.tflite` of `options.precision`, made from its module.

    Raises:
        StepRefused: the file differs from torch, keeps most weights as they were, or is too inaccurate.
    """
    context.tell({"step": "convert"})
    float32, error = faithful(model, data.x_test)
    context.tell({"step": "quantize", "precision": options.precision})
    rows = data.x_train[: options.calibration_rows]
    ranges = recipes.calibrate(float32, rows) if options.precision == "static-int8" else None
    tflite = recipes.quantize(float32, options.precision, ranges)
    require_weights(tflite, options.precision)
    facts = gated(float32, tflite, data, options.precision, options.max_accuracy_drop)
    calibrated = {} if ranges is None else {"calibration_rows": len(rows)}
    return Model(
        model.spec, model.module, tflite, options.precision, {**facts, **calibrated, "max_abs_error": error}
    )


def faithful(model: Model, x: npt.NDArray[Any]) -> tuple[bytes, float]:
    """The module as float32 `.tflite`, and its largest difference from torch's logits on some of the rows `x`.

    Raises:
        ExportRefused: the conversion is wrong.
    """
    float32 = converted(model.module, model.spec)
    rows = x[:COMPARED]
    return float32, require_same_logits(report.logits(float32, rows), report.logits(model.module, rows))


def gated(float32: bytes, tflite: bytes, data: Data, precision: Precision, max_drop: float) -> dict[str, Any]:
    """What there is to say of `tflite` beside the float32 it was made from, on test rows.

    Raises:
        ExportRefused: it is more than `max_drop` less accurate.
    """
    before, after = (report.logits(content, data.x_test) for content in (float32, tflite))
    accuracy = {"float32": score(before, data.y_test).accuracy, precision: score(after, data.y_test).accuracy}
    require_accuracy(accuracy["float32"], accuracy[precision], max_drop, precision)
    return {
        **stored.facts(tflite),
        "accuracy": accuracy[precision],
        "float32_bytes": len(float32),
        "float32_accuracy": accuracy["float32"],
        "agreement": float((before.argmax(-1) == after.argmax(-1)).mean()),
    }


def convert(module: nn.Module, spec: ModelSpec, path: Path) -> None:
    """Writes `module` as float32 `.tflite`, signature `infer(x[1, …]) -> logits[1, …]`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("LITERT_TORCH_SHOW_PROGRESS", "n")
    import litert_torch

    x, _ = spec.example_batch(1)
    edge = litert_torch.signature(SIGNATURE, Inference(module).eval(), (), {"x": x}).convert()
    edge.export(str(path))
    path.write_bytes(naming.shortened(path.read_bytes()))


def converted(module: nn.Module, spec: ModelSpec) -> bytes:
    """`convert`, as bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        convert(module, spec, path)
        return path.read_bytes()


def require_same_logits(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """The largest absolute difference between the exported float32 model and torch.

    Raises:
        ExportRefused: it is more than float rounding explains, so the conversion is wrong.
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
    """The share of weight values that are stored as `precision` wants them.

    Raises:
        ExportRefused: it is less than `least`.
    """
    wanted = recipes.WEIGHTS[precision]
    share = stored.weight_shares(tflite).get(wanted, 0.0)
    if share < least:
        others = [t.name for t in stored.tensors(tflite) if stored.is_weight(t) and t.dtype != wanted]
        why = f"; only {', '.join(recipes.FOUR_BITS)} have four bits" if precision == "int4" else ""
        raise ExportRefused(
            f"only {share:.0%} of the weight values became {wanted}{why}; others remain, among them "
            f"{', '.join(others)[:200] or 'no weights at all'}"
        )
    return share


def require_accuracy(fp32: float, quantized: float, max_drop: float, precision: str = "int8") -> None:
    """The gate of the export.

    Raises:
        ExportRefused: the quantized model is more than `max_drop` below float32.
    """
    # both are fractions of the same rows; the slack is for their rounding
    if fp32 - quantized > max_drop + 1e-9:
        raise ExportRefused(
            f"{precision} accuracy is {quantized:.4f}, {100 * (fp32 - quantized):.1f} points below float32 ({fp32:.4f}), allowed are "
            f"{100 * max_drop:.1f}; calibrate on more, or more typical, rows, or raise max_accuracy_drop"
        )


class Inference(nn.Module):
    """Gives the output of the signature its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.module(x)}
