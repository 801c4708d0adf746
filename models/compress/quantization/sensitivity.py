"""Mixed precision: quantizes all layers but the most sensitive ones.

1. Quantize every layer alone, and measure the mean KL divergence of the quantized model's probabilities from the float model's
   on held-out training rows: the layer's sensitivity (as Dong 2019, "HAWQ", and Cai 2020, "ZeroQ", section 3.2, rank
   layers).
2. Quantize all layers. While the accuracy on the same rows is too far below the float model's, keep one more layer, the most
   sensitive first.

Test rows are not used for the choice, so that the reported accuracy stays unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from edge_client.train.evaluation import score
from models.compress import report
from models.compress.quantization import quantize, recipes
from models.compress.quantization.recipes import Ranges
from models.compress.step import Context, Data, Precision, StepModel, StepRefused
from models.conversion.flatbuffer import Operation
from models.options import bounded

_MIN_QUANTIZED_SHARE = 0.01
"""Minimum share of quantized weights; a mixture with fewer is practically the float model."""


@dataclass(frozen=True)
class MixedOptions:
    """Options of mixed precision.

    Attributes:
        precision: of the insensitive layers.
        kept: precision of the sensitive ones.
        max_accuracy_drop: how far the accuracy on held-out training rows may fall below float32, as a fraction.
        calibration_rows: at most so many of the other training rows set the ranges of activations.
        held_out_rows: at most so many, and at most half of the training rows, measure sensitivity.
    """

    precision: Literal["float16", "weight-int8", "dynamic-int8", "static-int8", "int4"] = "static-int8"
    kept: Literal["float32", "dynamic-int8"] = "float32"
    max_accuracy_drop: float = bounded(0.005, 0.0, 1.0)
    calibration_rows: int = bounded(256, 1, 100_000)
    held_out_rows: int = bounded(500, 1, 100_000)


@dataclass(frozen=True)
class Sensitivity:
    """The effect of quantizing one layer alone. `divergence`: mean KL in nats; `accuracy_loss`: as a fraction."""

    layer: Operation
    divergence: float
    accuracy_loss: float


@dataclass(frozen=True)
class _HeldOut:
    """Rows to measure on, and the float model's logits for them."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    logits: npt.NDArray[np.float32]

    @property
    def quality(self) -> float:
        return score(self.logits, self.y).quality


def mixed(model: StepModel, data: Data, options: MixedOptions, context: Context) -> StepModel:
    """`model` with a `.tflite` that keeps as few layers as the bound on accuracy allows.

    Raises:
        StepRefused: the conversion is wrong, there are too few rows, or no mixture is within the bound.
    """
    context.on_progress({"step": "convert"})
    float32, _ = quantize.convert_checked(model, data.x_test)
    chosen = context.rng().permutation(len(data.x_train))
    held_out = chosen[: min(options.held_out_rows, len(chosen) // 2)]
    if not len(held_out):
        raise StepRefused(
            "mixed needs two or more training rows: some to measure sensitivity, others to calibrate on"
        )
    x = data.x_train[held_out]
    rows = _HeldOut(x, data.y_train[held_out], report.logits(float32, x))
    ranges = recipes.calibrate(float32, data.x_train[chosen[len(held_out) :][: options.calibration_rows]])

    ranking = sensitivities(float32, options.precision, ranges, rows, context)
    tflite, kept, accuracy = _mixture(float32, ranking, ranges, rows, options, context)
    quantize.require_weights(tflite, options.precision, least=_MIN_QUANTIZED_SHARE)
    facts = quantize.evaluate(float32, tflite, data, "mixed", max_drop=1.0)
    details = {
        "kept": [sensitivity.layer.name for sensitivity in kept],
        "held_out_accuracy": {"float32": rows.quality, "mixed": accuracy},
        "sensitivities": [
            {
                **{key: getattr(s.layer, key) for key in ("name", "kind", "scope", "weights")},
                "divergence": s.divergence,
                "accuracy_loss": s.accuracy_loss,
                "kept": s in kept,
            }
            for s in ranking
        ],
    }
    return StepModel(model.spec, model.module, tflite, "mixed", {**facts, **details})


def sensitivities(
    float32: bytes, precision: Precision, ranges: Ranges, rows: _HeldOut, context: Context
) -> list[Sensitivity]:
    """The sensitivity of all layers with weights, the most sensitive first."""
    ranking = []
    layers = recipes.layers(float32)
    for index, layer in enumerate(layers):
        context.on_progress(
            {"step": "sensitivity", "layer": layer.name, "number": index + 1, "of": len(layers)}
        )
        logits = report.logits(recipes.quantize(float32, None, ranges, {layer.scope: precision}), rows.x)
        loss = rows.quality - score(logits, rows.y).quality
        ranking.append(Sensitivity(layer, distance(rows.logits, logits), loss))
    return sorted(ranking, key=lambda s: -s.divergence)


def divergence(expected: npt.NDArray[np.float32], actual: npt.NDArray[np.float32]) -> float:
    """Mean KL(expected ‖ actual) of the softmaxes over the last axis, in nats."""
    p, q = (F.log_softmax(torch.from_numpy(logits).double(), -1) for logits in (expected, actual))
    return float(F.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean())


def distance(expected: npt.NDArray[np.float32], actual: npt.NDArray[np.float32]) -> float:
    """`divergence`; of quantities [N, 1], which have no softmax, the mean squared difference over the variance of `expected`."""
    if expected.shape[-1] > 1:
        return divergence(expected, actual)
    spread = float(np.var(expected.astype(np.float64))) or 1.0
    return float(np.square(actual.astype(np.float64) - expected).mean()) / spread


def _mixture(
    float32: bytes,
    ranking: Sequence[Sensitivity],
    ranges: Ranges,
    rows: _HeldOut,
    options: MixedOptions,
    context: Context,
) -> tuple[bytes, list[Sensitivity], float]:
    """The first mixture within the bound, the layers it keeps, and its accuracy on the held-out rows."""
    accuracies = []
    for count in range(len(ranking)):
        kept = list(ranking[:count])
        scopes = {s.layer.scope: options.kept for s in kept}
        tflite = recipes.quantize(float32, options.precision, ranges, scopes)
        accuracy = report.quality(tflite, rows.x, rows.y)
        context.on_progress({"step": "mix", "kept": count, "accuracy": accuracy})
        if rows.quality - accuracy <= options.max_accuracy_drop + 1e-9:
            return tflite, kept, accuracy
        accuracies.append(accuracy)
    best = f"{max(accuracies):.4f} at best" if accuracies else "the model has no layer that can be quantized"
    raise StepRefused(
        f"no mixture of {options.precision} and {options.kept} is within {100 * options.max_accuracy_drop:.1f} points of "
        f"float32 ({rows.quality:.4f} on {len(rows.x)} held-out rows): {best}; raise max_accuracy_drop, or choose "
        "dynamic-int8 or weight-int8, which leave activations in float32"
    )
