"""The operations of a `.tflite`, and those that an artifact may use.

An artifact must run on every runtime of a fleet, so it may only use builtin operations from the list below,
in versions that TensorFlow Lite 2.14 registers. A custom or Flex
operation needs a runtime built with it. REVERSE_V2 over several axes is refused although it is
builtin: `tflite-runtime` 2.14 returns wrong values for it without an error.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from edge_client.wire.manifest import Operator
from models.conversion import flatbuffer

_HIGHEST = {
    1: """ADD_N CEIL COS CUMSUM ELU EXPAND_DIMS FLOOR HARD_SWISH LOGICAL_AND LOGICAL_NOT LOGICAL_OR NEG ONE_HOT POW PRELU
        RELU_0_TO_1 RELU_N1_TO_1 RESHAPE ROUND SHAPE SIN SQRT SQUARE ZEROS_LIKE""",
    2: """DIV EXP GELU GREATER L2_NORMALIZATION LEAKY_RELU LESS_EQUAL LOG LOG_SOFTMAX RANGE REDUCE_PROD RSQRT
        SELECT_V2 SPLIT_V SQUARED_DIFFERENCE SQUEEZE SUM""",
    3: """ARG_MAX ARG_MIN AVERAGE_POOL_2D BROADCAST_TO EMBEDDING_LOOKUP GREATER_EQUAL LESS LOGISTIC MAX_POOL_2D
        MEAN MIRROR_PAD NOT_EQUAL QUANTIZE REDUCE_MAX REDUCE_MIN RELU RELU6 REVERSE_V2 SOFTMAX TANH TILE TOPK_V2""",
    4: """BATCH_MATMUL CONCATENATION EQUAL FILL GATHER_ND MAXIMUM MINIMUM PACK PAD PADV2 RESIZE_BILINEAR
        RESIZE_NEAREST_NEIGHBOR SELECT SPLIT TRANSPOSE_CONV UNPACK""",
    5: "ABS ADD CAST DEQUANTIZE SUB",
    6: "GATHER SLICE TRANSPOSE",
    7: "CONV_2D DEPTHWISE_CONV_2D MUL",
    8: "STRIDED_SLICE",
    10: "FULLY_CONNECTED",
}

ALLOWED: dict[str, int] = {name: highest for highest, names in _HIGHEST.items() for name in names.split()}
"""Name -> highest version."""

_UNKNOWN_RUNTIME = "unknown"


class ForeignOperator(ValueError):
    """The file uses an operation that some runtime lacks; the message names it."""


def operators(tflite: bytes) -> tuple[Operator, ...]:
    """All operations in the file, sorted by name. Requires that an artifact may use them.

    Raises:
        ForeignOperator: a custom or Flex operation, one not in `ALLOWED`, a newer version, or REVERSE_V2
            without exactly one constant axis.
    """
    model = flatbuffer.read(tflite)
    for graph in model.subgraphs:
        for node in graph.operators:
            if _allowed_name(model.operatorCodes[node.opcodeIndex]) == "REVERSE_V2":
                _require_one_axis(model, graph, node)
    return builtin_operators(tflite)


def builtin_operators(tflite: bytes) -> tuple[Operator, ...]:
    """All operations in the file, sorted by name, in any version: testing the file shows which runtimes support them.

    Raises:
        ForeignOperator: a custom or Flex operation.
    """
    model = flatbuffer.read(tflite)
    counts: Counter[str] = Counter()
    versions: Counter[str] = Counter()
    for graph in model.subgraphs:
        for node in graph.operators:
            code = model.operatorCodes[node.opcodeIndex]
            name = _builtin_name(code)
            counts[name] += 1
            versions[name] = max(versions[name], code.version, 1)
    return tuple(Operator(name, versions[name], counts[name]) for name in sorted(counts))


def minimum_runtime(tflite: bytes) -> str:
    """The oldest TensorFlow Lite release with all the file's operations, from the converter's metadata."""
    buffer = flatbuffer.minimum_runtime_buffer(flatbuffer.read(tflite))
    noted = "" if buffer is None else bytes(buffer.data).rstrip(b"\0").decode()
    return noted or _UNKNOWN_RUNTIME


def _builtin_name(code: Any) -> str:
    name = flatbuffer.builtin_name(code)
    if name == "CUSTOM":
        custom = (code.customCode or b"nameless").decode()
        kind = "a Flex operation" if custom.startswith("Flex") else "a custom operation"
        raise ForeignOperator(f"{custom} is {kind}, which only a runtime built with it has")
    return name


def _allowed_name(code: Any) -> str:
    """The operation's name. Requires that an artifact may use it."""
    name = _builtin_name(code)
    if name not in ALLOWED:
        raise ForeignOperator(f"{name} is not among the operations that every supported runtime has")
    if code.version > ALLOWED[name]:
        raise ForeignOperator(
            f"{name} version {code.version} is newer than {ALLOWED[name]}, which runtimes have"
        )
    return name


def _require_one_axis(model: Any, graph: Any, node: Any) -> None:
    axes = graph.tensors[node.inputs[1]]
    data = model.buffers[axes.buffer].data
    count = 0 if data is None else len(np.frombuffer(bytes(data), np.int32))
    if count != 1:
        what = f"{count} axes" if count else "axes known only at run time"
        raise ForeignOperator(
            f"REVERSE_V2 over {what} gives wrong values on old runtimes; one constant axis is right"
        )
