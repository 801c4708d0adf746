"""Post-training quantization of a float32 `.tflite` with ai-edge-quantizer.

Weights are symmetric, with one scale for each channel. With `float16` and `weight-int8` they are widened before use, and arithmetic
stays float32. With `dynamic-int8` activations are quantized at run time, row by row. With `static-int8` their ranges come from
calibration rows, and all arithmetic is in integers. `int4` is dynamic, with four-bit weights where the converter supports them and
eight-bit weights elsewhere.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from models.compress.step import Precision
from models.conversion import flatbuffer

SIGNATURE = "infer"
WEIGHTS: Mapping[str, str] = {
    "float32": "float32",
    "float16": "float16",
    "weight-int8": "int8",
    "dynamic-int8": "int8",
    "static-int8": "int8",
    "int4": "int4",
}
"""Precision -> dtype of stored weights."""
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
"""Operations with four-bit weights in ai-edge-quantizer 0.10 and LiteRT 2.3."""

Ranges = dict[str, Any]
"""Tensor -> minimum and maximum seen."""


@dataclass(frozen=True)
class Layer:
    """An operation with weights. `scope` is its address in recipes, `name` that of its output: the module's path (`tensor_names`)."""

    name: str
    kind: str
    scope: str
    weights: int


def layers(tflite: bytes) -> list[Layer]:
    """All operations with weights, in the order of execution."""
    return [
        Layer(operation.scope.rstrip(";"), operation.kind, operation.scope, operation.weights)
        for operation in flatbuffer.operations(tflite)
        if operation.kind in KINDS and operation.weights
    ]


class NotCalibrated(ValueError):
    """The ranges of this model's activations cannot be measured."""


def calibrate(tflite: bytes, rows: npt.NDArray[Any]) -> Ranges:
    """Ranges of all activations of the float32 model over `rows`, [N, …], independent of their order.

    The quantizer's own `calibrate` takes moving averages of each row's minimum and maximum: values beyond them are clipped,
    logits too, which costs a confident model half a point.

    Raises:
        NotCalibrated: the quantizer cannot inspect parts of the model.
    """
    from ai_edge_quantizer.calibrator import Calibrator
    from ai_edge_quantizer.utils.qsv_utils import min_max_update

    calibrator = Calibrator(tflite, num_threads=1, qsv_update_func=min_max_update)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
            calibrator.calibrate(
                {SIGNATURE: [{"x": row[None]} for row in rows]}, _Recipe().add_all("static-int8").rules
            )
    except ValueError as error:
        if "Tensor data is null" not in str(error):
            raise
        raise NotCalibrated(
            "static-int8 needs the range of every activation, and the quantizer cannot inspect this model's loops "
            "(recurrent layers, such as LSTM and GRU); choose --precision dynamic-int8, weight-int8 or float32"
        ) from None
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
        kept: scopes of layers with another precision; float32 leaves a layer unquantized.
    """
    if precision == "float32" and not kept:
        return tflite
    recipe = _Recipe().add_all(precision)
    for scope, other in (kept or {}).items():
        recipe.add_layer(scope, other)
    return _quantize(tflite, recipe, ranges)


def quantize_one(tflite: bytes, layer: Layer, precision: Precision, ranges: Ranges | None = None) -> bytes:
    """The float32 model with only `layer` in `precision`."""
    return _quantize(tflite, _Recipe().add_layer(layer.scope, precision), ranges)


class _Recipe:
    """Rules for operations, by regular expressions over their scopes; of several matches the last one applies."""

    def __init__(self) -> None:
        from ai_edge_quantizer.recipe_manager import RecipeManager

        self.rules = RecipeManager()

    def add_all(self, precision: Precision) -> _Recipe:
        return self._add(".*", precision)

    def add_layer(self, scope: str, precision: Precision) -> _Recipe:
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
                # the static recipe skips embedding tables, most of the weights of a text model; the
                # lookup returns float32, which the next operation quantizes
                self.rules.add_dynamic_config(regex, Operator.EMBEDDING_LOOKUP, 8)
            case "int4":
                self.rules.add_dynamic_config(regex, every, 8)
                for operator in FOUR_BITS:
                    self.rules.add_dynamic_config(regex, Operator(operator), 4)
            case _:
                raise ValueError(f"{precision} is not a precision of a single layer")
        return self


def _quantize(tflite: bytes, recipe: _Recipe, ranges: Ranges | None) -> bytes:
    from ai_edge_quantizer.quantizer import Quantizer

    quantizer = Quantizer(tflite, recipe.rules.get_quantization_recipe())
    if quantizer.need_calibration and ranges is None:
        raise ValueError("static-int8 needs ranges of activations")
    result = quantizer.quantize(
        ranges if quantizer.need_calibration else None,
        enable_progress_bar=False,
        enable_progress_report=False,
    )
    return bytes(result.quantized_model)
