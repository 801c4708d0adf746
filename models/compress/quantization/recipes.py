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
from typing import Any

import numpy.typing as npt

from models.compress.step import Precision
from models.conversion import flatbuffer
from models.conversion.flatbuffer import Operation

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


def layers(tflite: bytes) -> list[Operation]:
    """All operations with weights, in the order of execution."""
    return [each for each in flatbuffer.operations(tflite) if each.kind in KINDS and each.weights]


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
            calibrator.calibrate({SIGNATURE: [{"x": row[None]} for row in rows]}, _recipe("static-int8", {}))
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
    precision: Precision | None,
    ranges: Ranges | None = None,
    others: Mapping[str, Precision] | None = None,
) -> bytes:
    """The float32 model `tflite` in `precision`.

    Args:
        precision: None leaves all layers but `others` as they are.
        ranges: of activations; needed for static-int8.
        others: scopes of layers with another precision; float32 leaves a layer unquantized.
    """
    from ai_edge_quantizer.quantizer import Quantizer

    if precision == "float32" and not others:
        return tflite
    quantizer = Quantizer(tflite, _recipe(precision, others or {}).get_quantization_recipe())
    if quantizer.need_calibration and ranges is None:
        raise ValueError("static-int8 needs ranges of activations")
    result = quantizer.quantize(
        ranges if quantizer.need_calibration else None,
        enable_progress_bar=False,
        enable_progress_report=False,
    )
    return bytes(result.quantized_model)


def _recipe(precision: Precision | None, others: Mapping[str, Precision]) -> Any:
    """Rules for operations, by regular expressions over their scopes; of several matches the last one applies."""
    from ai_edge_quantizer.recipe_manager import RecipeManager

    rules = RecipeManager()
    if precision is not None:
        _add_rules(rules, ".*", precision)
    for scope, other in others.items():
        _add_rules(rules, f"^{re.escape(scope)}$", other)
    return rules


def _add_rules(rules: Any, regex: str, precision: Precision) -> None:
    from ai_edge_quantizer.algorithm_manager import AlgorithmName
    from ai_edge_quantizer.qtyping import TFLOperationName as Operator

    every = Operator.ALL_SUPPORTED
    match precision:
        case "float32":
            rules.add_quantization_config(regex, every, algorithm_key=AlgorithmName.NO_QUANTIZE)
        case "float16":
            rules.add_weight_only_config(regex, every, 16, algorithm_key=AlgorithmName.FLOAT_CASTING)
        case "weight-int8":
            rules.add_weight_only_config(regex, every, 8)
        case "dynamic-int8":
            rules.add_dynamic_config(regex, every, 8)
        case "static-int8":
            rules.add_static_config(regex, every, 8, 8)
            # the static recipe skips embedding tables, most of the weights of a text model; the
            # lookup returns float32, which the next operation quantizes
            rules.add_dynamic_config(regex, Operator.EMBEDDING_LOOKUP, 8)
        case "int4":
            rules.add_dynamic_config(regex, every, 8)
            for operator in FOUR_BITS:
                rules.add_dynamic_config(regex, Operator(operator), 4)
        case _:
            raise ValueError(f"{precision} is not a precision of a single layer")
