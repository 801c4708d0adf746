"""Post-training quantization of a float32 `.tflite` with ai-edge-quantizer: which layer becomes what.

Weights are symmetric, one scale a channel. What happens beside them is the precision's name: with `float16`
and `weight-int8` they are widened before use, and arithmetic stays float32; with `dynamic-int8` activations are quantized as they
come, row by row; with `static-int8` their ranges are known beforehand, from calibration rows, and everything is integers. `int4`
is dynamic with weights of four bits where the converter has them, of eight elsewhere.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from models.compress import stored
from models.compress.step import Precision

SIGNATURE = "infer"
WEIGHTS: Mapping[str, str] = {
    "float32": "float32",
    "float16": "float16",
    "weight-int8": "int8",
    "dynamic-int8": "int8",
    "static-int8": "int8",
    "int4": "int4",
}
"""Precision -> what weights are stored as."""
KINDS = (
    "BATCH_MATMUL",
    "CONV_2D",
    "DEPTHWISE_CONV_2D",
    "EMBEDDING_LOOKUP",
    "FULLY_CONNECTED",
    "TRANSPOSE_CONV",
)
"""Operations whose constants are weights."""
FOUR_BITS = ("FULLY_CONNECTED", "CONV_2D", "EMBEDDING_LOOKUP")
"""Operations whose weights ai-edge-quantizer 0.10 makes four bits wide and LiteRT 2.3 runs so."""

Ranges = dict[str, Any]
"""Tensor -> least and greatest value seen."""


@dataclass(frozen=True)
class Layer:
    """An operation with weights. `scope` is its address in recipes, `name` its output's, which `naming` made a module's path."""

    name: str
    kind: str
    scope: str
    weights: int


def layers(tflite: bytes) -> list[Layer]:
    """All operations with weights, in the order of execution."""
    return [
        Layer(operation.scope.rstrip(";"), operation.kind, operation.scope, operation.weights)
        for operation in stored.operations(tflite)
        if operation.kind in KINDS and operation.weights
    ]


def calibrate(tflite: bytes, rows: npt.NDArray[Any]) -> Ranges:
    """Ranges of all activations of the float32 model over `rows`, [N, …], whatever their order.

    The quantizer's own `calibrate` has moving averages of each row's least and greatest value: what lies beyond them is clipped,
    logits among it, which costs a confident model half a point.
    """
    from ai_edge_quantizer.calibrator import Calibrator
    from ai_edge_quantizer.utils.qsv_utils import min_max_update

    calibrator = Calibrator(tflite, num_threads=1, qsv_update_func=min_max_update)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        calibrator.calibrate(
            {SIGNATURE: [{"x": row[None]} for row in rows]}, _Recipe().all("static-int8").rules
        )
    ranges: Ranges = calibrator.get_model_qsvs()
    return ranges


def quantize(
    tflite: bytes,
    precision: Precision,
    ranges: Ranges | None = None,
    kept: Mapping[str, Precision] | None = None,
) -> bytes:
    """The float32 model `tflite` in `precision`.

    Args:
        ranges: of activations; needed for static-int8.
        kept: scopes of layers that become something else; float32 leaves one as it is.
    """
    if precision == "float32" and not kept:
        return tflite
    recipe = _Recipe().all(precision)
    for scope, other in (kept or {}).items():
        recipe.one(scope, other)
    return _made(tflite, recipe, ranges)


def quantize_one(tflite: bytes, layer: Layer, precision: Precision, ranges: Ranges | None = None) -> bytes:
    """The float32 model with nothing but `layer` in `precision`."""
    return _made(tflite, _Recipe().one(layer.scope, precision), ranges)


class _Recipe:
    """Rules for operations, by regular expressions over their scopes; of several that fit, the last one counts."""

    def __init__(self) -> None:
        from ai_edge_quantizer.recipe_manager import RecipeManager

        self.rules = RecipeManager()

    def all(self, precision: Precision) -> _Recipe:
        return self._add(".*", precision)

    def one(self, scope: str, precision: Precision) -> _Recipe:
        return self._add(f"^{re.escape(scope)}$", precision)

    def _add(self, regex: str, precision: Precision) -> _Recipe:
        from ai_edge_quantizer.algorithm_manager import AlgorithmName
        from ai_edge_quantizer.qtyping import TFLOperationName as Operator

        every = Operator.ALL_SUPPORTED
        match precision:
            case "float32":
                self.rules.add_quantization_config(regex, every, algorithm_key=AlgorithmName.NO_QUANTIZE)
            case "float16":
                self.rules.add_weight_only_config(regex, every, 16, algorithm_key=AlgorithmName.FLOAT_CASTING)
            case "weight-int8":
                self.rules.add_weight_only_config(regex, every, 8)
            case "dynamic-int8":
                self.rules.add_dynamic_config(regex, every, 8)
            case "static-int8":
                self.rules.add_static_config(regex, every, 8, 8)
                # the static recipe passes over embedding tables, most of the weights of a text model; the
                # lookup gives float32, which the next operation quantizes
                self.rules.add_dynamic_config(regex, Operator.EMBEDDING_LOOKUP, 8)
            case "int4":
                self.rules.add_dynamic_config(regex, every, 8)
                for operator in FOUR_BITS:
                    self.rules.add_dynamic_config(regex, Operator(operator), 4)
            case _:
                raise ValueError(f"{precision} is no precision of a single layer")
        return self


def _quantizer(tflite: bytes, recipe: _Recipe) -> Any:
    from ai_edge_quantizer.quantizer import Quantizer

    return Quantizer(tflite, recipe.rules.get_quantization_recipe())


def _made(tflite: bytes, recipe: _Recipe, ranges: Ranges | None) -> bytes:
    maker = _quantizer(tflite, recipe)
    if maker.need_calibration and ranges is None:
        raise ValueError("static-int8 needs ranges of activations")
    result = maker.quantize(
        ranges if maker.need_calibration else None, enable_progress_bar=False, enable_progress_report=False
    )
    return bytes(result.quantized_model)
