"""Stores constants of an artifact in 8 bits if that is lossless.

The converter dequantizes a quantized constant and stores float32. A float constant whose values are
multiples, up to 127, of one step for each index of one axis is quantized again:

    float32 c[16, 3, 3, 8]      int8 q[16, 3, 3, 8] with 16 steps  ─ DEQUANTIZE ─►  float32 c

Runtimes dequantize such a constant once, when they load the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

from models.conversion import flatbuffer

LEVELS = 127
SMALLEST = 128
"""Minimum number of values in a constant; below it, the additional operation costs more than the saved bytes."""

_OFF = 1e-3
"""Tolerance, in steps, of a value from an integer: float32 rounding changes it by 1e-5."""

_VERSION, _SINCE = 5, (2, 7, 0)
"""First version of DEQUANTIZE with a step for each index of an axis, and the release that introduced it."""


@dataclass(frozen=True)
class _Int8Constant:
    buffer: int
    steps: npt.NDArray[np.float32]
    axis: int


def store_as_int8(tflite: bytes) -> bytes:
    """The same model with such constants as int8; unchanged if it has none."""
    model = flatbuffer.read(tflite)
    encoded: dict[tuple[int, tuple[int, ...]], _Int8Constant | None] = {}
    for graph in model.subgraphs:
        added = []
        for index, tensor in enumerate(list(graph.tensors)):
            if tensor.type != schema.TensorType.FLOAT32 or tensor.shape is None or len(tensor.shape) < 2:
                continue
            shape = tuple(int(extent) for extent in tensor.shape)
            key = (tensor.buffer, shape)
            if key not in encoded:
                encoded[key] = _encode(model, tensor.buffer, shape)
            constant = encoded[key]
            if constant is not None:
                added.append(_node(graph, index, constant))
        for node in added:
            node.opcodeIndex = _dequantize(model)
        graph.operators = [*added, *graph.operators]
    if not any(encoded.values()):
        return tflite
    used = {tensor.buffer for graph in model.subgraphs for tensor in graph.tensors}
    for number, _ in encoded:
        if number not in used:
            model.buffers[number].data = None
    _require_runtime(model)
    return flatbuffer.write(model)


def _encode(model: Any, number: int, shape: tuple[int, ...]) -> _Int8Constant | None:
    """The constant as int8 in a new buffer; None if it is not constant, too small, or not of whole steps."""
    data = model.buffers[number].data
    if data is None or np.prod(shape) < SMALLEST:
        return None
    values = np.frombuffer(bytes(data), np.float32).reshape(shape)
    for axis in range(len(shape)):
        others = tuple(other for other in range(len(shape)) if other != axis)
        largest = np.abs(values).max(axis=others, keepdims=True)
        steps = np.where(largest > 0, largest / LEVELS, 1).astype(np.float32)
        levels = values / steps
        rounded = np.rint(levels)
        if np.isfinite(levels).all() and np.abs(levels - rounded).max() < _OFF:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(rounded.astype(np.int8).tobytes(), np.uint8)
            model.buffers.append(buffer)
            return _Int8Constant(len(model.buffers) - 1, steps.reshape(-1), axis)
    return None


def _node(graph: Any, index: int, constant: _Int8Constant) -> Any:
    tensor = graph.tensors[index]
    source = schema.TensorT()
    source.name = tensor.name + b":int8"
    source.shape, source.type, source.buffer = tensor.shape, schema.TensorType.INT8, constant.buffer
    source.hasRank = tensor.hasRank
    source.quantization = schema.QuantizationParametersT()
    source.quantization.scale = constant.steps
    source.quantization.zeroPoint = np.zeros(len(constant.steps), np.int64)
    source.quantization.quantizedDimension = constant.axis
    graph.tensors.append(source)
    tensor.buffer = 0
    node = schema.OperatorT()
    node.inputs = np.asarray([len(graph.tensors) - 1], np.int32)
    node.outputs = np.asarray([index], np.int32)
    node.builtinOptionsType = schema.BuiltinOptions.DequantizeOptions
    node.builtinOptions = schema.DequantizeOptionsT()
    return node


def _require_runtime(model: Any) -> None:
    """Raises the minimum runtime version in the file's metadata to `_SINCE`."""
    buffer = flatbuffer.minimum_runtime_buffer(model)
    if buffer is None:
        return
    noted = bytes(buffer.data).rstrip(b"\0").decode()
    if tuple(map(int, noted.split("."))) < _SINCE:
        ours = ".".join(map(str, _SINCE)).encode().ljust(16, b"\0")
        buffer.data = np.frombuffer(ours, np.uint8)


def _dequantize(model: Any) -> int:
    for index, code in enumerate(model.operatorCodes):
        if flatbuffer.builtin_name(code) == "DEQUANTIZE" and code.version == _VERSION:
            return index
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
    code.version = _VERSION
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1
