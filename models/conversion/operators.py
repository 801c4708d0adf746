"""The operations of a `.tflite`, and those that an artifact may use.

An artifact must run on every runtime of a fleet, so it may only use builtin operations from the list below,
in versions that TensorFlow Lite 2.14 registers. A custom or Flex
operation needs a runtime built with it. REVERSE_V2 over several axes is refused although it is
builtin: `tflite-runtime` 2.14 returns wrong values for it without an error.
"""

from __future__ import annotations

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
    listed = builtin_operators(tflite)
    for operation in flatbuffer.operations(tflite):
        _require_allowed(operation)
    return listed


def builtin_operators(tflite: bytes) -> tuple[Operator, ...]:
    """All operations in the file, sorted by name, in any version: testing the file shows which runtimes support them.

    Raises:
        ForeignOperator: a custom or Flex operation.
    """
    versions: dict[str, list[int]] = {}
    for operation in flatbuffer.operations(tflite):
        if not operation.version:
            kind = "a Flex operation" if operation.kind.startswith("Flex") else "a custom operation"
            raise ForeignOperator(f"{operation.kind} is {kind}, which only a runtime built with it has")
        versions.setdefault(operation.kind, []).append(operation.version)
    return tuple(Operator(name, max(found), len(found)) for name, found in sorted(versions.items()))


def minimum_runtime(tflite: bytes) -> str:
    """The oldest TensorFlow Lite release with all the file's operations, from the converter's metadata."""
    buffer = flatbuffer.minimum_runtime_buffer(flatbuffer.read(tflite))
    noted = "" if buffer is None else bytes(buffer.data).rstrip(b"\0").decode()
    return noted or _UNKNOWN_RUNTIME


def _require_allowed(operation: flatbuffer.Operation) -> None:
    name, version = operation.kind, operation.version
    if name not in ALLOWED:
        raise ForeignOperator(f"{name} is not among the operations that every supported runtime has")
    if version > ALLOWED[name]:
        raise ForeignOperator(f"{name} version {version} is newer than {ALLOWED[name]}, which runtimes have")
    if name == "REVERSE_V2" and (axes := operation.inputs[1]) and not (axes.constant and axes.size == 1):
        what = f"{axes.size} axes" if axes.constant else "axes known only at run time"
        raise ForeignOperator(
            f"REVERSE_V2 over {what} gives wrong values on old runtimes; one constant axis is right"
        )
