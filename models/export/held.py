"""Constants of an artifact stored in 8 bits, where that loses nothing.

The converter multiplies a quantized constant out and stores the product, four bytes a value. A float constant whose values are
whole multiples of one step for each index of one axis, at most 127 of them, is put back:

    float32 c[16, 3, 3, 8]      int8 q[16, 3, 3, 8] with 16 steps  ─ DEQUANTIZE ─►  float32 c

Runtimes multiply such a constant out once, when they load the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flatbuffers
import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

LEVELS = 127
SMALLEST = 128
"""Values in a constant, below which a further operation costs more than the bytes are worth."""

_OFF = 1e-3
"""How far, in steps, a value may lie from a whole number: rounding in float32 puts it 1e-5 off."""

_VERSION, _SINCE = 5, (2, 7, 0)
"""Of DEQUANTIZE: the first that knows a step for each index of an axis, and the release that brought it."""


@dataclass(frozen=True)
class _Coded:
    buffer: int
    steps: npt.NDArray[np.float32]
    axis: int


def in_eight_bits(tflite: bytes) -> bytes:
    """The same model with such constants as int8; itself where it has none."""
    model = schema.ModelT.InitFromPackedBuf(tflite, 0)
    coded: dict[tuple[int, tuple[int, ...]], _Coded | None] = {}
    for graph in model.subgraphs:
        added = []
        for tensor in list(graph.tensors):
            if tensor.type != schema.TensorType.FLOAT32 or tensor.shape is None or len(tensor.shape) < 2:
                continue
            shape = tuple(int(extent) for extent in tensor.shape)
            key = (tensor.buffer, shape)
            if key not in coded:
                coded[key] = _coded(model, tensor.buffer, shape)
            found = coded[key]
            if found is not None:
                added.append(_node(graph, tensor, found))
        for node in added:
            node.opcodeIndex = _dequantize(model)
        graph.operators = [*added, *graph.operators]
    if not any(coded.values()):
        return tflite
    used = {tensor.buffer for graph in model.subgraphs for tensor in graph.tensors}
    for number, _ in coded:
        if number not in used:
            model.buffers[number].data = None
    _require_runtime(model)
    builder = flatbuffers.Builder(len(tflite))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _coded(model: Any, number: int, shape: tuple[int, ...]) -> _Coded | None:
    """The constant as int8 in a buffer of its own; None where it is no constant, small, or not of whole steps."""
    data = model.buffers[number].data
    if data is None or np.prod(shape) < SMALLEST:
        return None
    values = np.frombuffer(bytes(data), np.float32).reshape(shape)
    for axis in range(len(shape)):
        others = tuple(other for other in range(len(shape)) if other != axis)
        largest = np.abs(values).max(axis=others, keepdims=True)
        steps = np.where(largest > 0, largest / LEVELS, 1).astype(np.float32)
        levels = values / steps
        whole = np.rint(levels)
        if np.isfinite(levels).all() and np.abs(levels - whole).max() < _OFF:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(whole.astype(np.int8).tobytes(), np.uint8)
            model.buffers.append(buffer)
            return _Coded(len(model.buffers) - 1, steps.reshape(-1), axis)
    return None


def _node(graph: Any, tensor: Any, coded: _Coded) -> Any:
    """The operation that makes `tensor`, a constant no more, of its int8 values."""
    source = schema.TensorT()
    source.name = tensor.name + b":int8"
    source.shape, source.type, source.buffer = tensor.shape, schema.TensorType.INT8, coded.buffer
    source.hasRank = tensor.hasRank
    source.quantization = schema.QuantizationParametersT()
    source.quantization.scale = coded.steps
    source.quantization.zeroPoint = np.zeros(len(coded.steps), np.int64)
    source.quantization.quantizedDimension = coded.axis
    graph.tensors.append(source)
    tensor.buffer = 0
    node = schema.OperatorT()
    node.inputs = np.asarray([len(graph.tensors) - 1], np.int32)
    node.outputs = np.asarray([_place(graph, tensor)], np.int32)
    node.builtinOptionsType = schema.BuiltinOptions.DequantizeOptions
    node.builtinOptions = schema.DequantizeOptionsT()
    return node


def _place(graph: Any, tensor: Any) -> int:
    return next(place for place, each in enumerate(graph.tensors) if each is tensor)


def _require_runtime(model: Any) -> None:
    """Has the file's own note of the oldest release that runs it say at least ours."""
    for entry in model.metadata or []:
        if entry.name == b"min_runtime_version":
            noted = bytes(model.buffers[entry.buffer].data).rstrip(b"\0").decode()
            if tuple(map(int, noted.split("."))) < _SINCE:
                ours = ".".join(map(str, _SINCE)).encode().ljust(16, b"\0")
                model.buffers[entry.buffer].data = np.frombuffer(ours, np.uint8)


def _dequantize(model: Any) -> int:
    """Where the file lists the operation, which it does from now on."""
    wanted = schema.BuiltinOperator.DEQUANTIZE
    for place, code in enumerate(model.operatorCodes):
        if max(code.builtinCode, code.deprecatedBuiltinCode) == wanted and code.version == _VERSION:
            return place
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = wanted
    code.version = _VERSION
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1
