"""The tensors, operations and sizes of a `.tflite`, read from and written to its flatbuffer tables, without a runtime."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

_BUILTINS: dict[int, str] = {
    code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)
}
_DTYPES = {code: name.lower() for name, code in vars(schema.TensorType).items() if isinstance(code, int)}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor declared in the flatbuffer. `constant`: its values are stored in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    constant: bool

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Operation:
    """One operation of a graph.

    Attributes:
        kind: such as `CONV_2D`; of a custom operation its own name.
        version: of a builtin operation; 0: a custom one.
        scope: output names joined as in ai-edge-quantizer.
    """

    kind: str
    version: int
    scope: str
    inputs: tuple[StoredTensor, ...]

    @property
    def name(self) -> str:
        """Name of its output, which is the module's path (`models.compress.quantization.tensor_names`)."""
        return self.scope.rstrip(";")

    @property
    def weights(self) -> int:
        """Number of values in its constant matrices; index tables such as paddings are not weights."""
        return sum(t.size for t in self.inputs if is_weight(t))


def tensors(tflite: bytes) -> Sequence[StoredTensor]:
    """Every tensor of every subgraph."""
    model = read(tflite)
    return [stored_tensor(model, tensor) for subgraph in model.subgraphs for tensor in subgraph.tensors]


def operations(tflite: bytes) -> Sequence[Operation]:
    """Every operation of every subgraph, in the order of execution."""
    model = read(tflite)
    listed = []
    for subgraph in model.subgraphs:
        for node in subgraph.operators:
            code = model.operatorCodes[node.opcodeIndex]
            kind, version = builtin_name(code), max(code.version, 1)
            if kind == "CUSTOM":
                kind, version = (code.customCode or b"nameless").decode(), 0
            scope = "".join(_name(subgraph.tensors[index]) + ";" for index in node.outputs)
            inputs = tuple(
                stored_tensor(model, subgraph.tensors[index]) for index in node.inputs if index >= 0
            )
            listed.append(Operation(kind, version, scope, inputs))
    return listed


def operators(tflite: bytes) -> dict[str, int]:
    """Kind of an operation -> count."""
    return dict(sorted(Counter(operation.kind for operation in operations(tflite)).items()))


def facts(tflite: bytes) -> dict[str, Any]:
    """`bytes`, `zlib_bytes`, `operators` with their counts, `weights`: the share of each dtype in the weight values."""
    return {
        "bytes": len(tflite),
        "zlib_bytes": len(zlib.compress(tflite, 9)),
        "operators": operators(tflite),
        "weights": weight_shares(tflite),
    }


def weight_shares(tflite: bytes) -> dict[str, float]:
    """dtype -> share of the values of all weight matrices, without biases; empty if there are none."""
    values: Counter[str] = Counter()
    for tensor in tensors(tflite):
        if is_weight(tensor):
            values[tensor.dtype] += tensor.size
    total = sum(values.values())
    return {dtype: count / total for dtype, count in sorted(values.items())}


def is_weight(tensor: StoredTensor) -> bool:
    """Whether a tensor is constant, has two or more axes, and is not int32 or int64: those are paddings and ids."""
    return tensor.constant and len(tensor.shape) > 1 and tensor.dtype not in ("int32", "int64")


def read(tflite: bytes) -> Any:
    """The file parsed into objects of the schema."""
    return schema.ModelT.InitFromPackedBuf(tflite, 0)


def write(model: Any) -> bytes:
    """The file of a model in objects of the schema."""
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def builtin_name(code: Any) -> str:
    """The name of an operator code, such as `CONV_2D`; `CUSTOM` for all that are not builtin."""
    number = max(code.builtinCode, code.deprecatedBuiltinCode)
    return _BUILTINS.get(number, f"builtin {number}")


def minimum_runtime_buffer(model: Any) -> Any:
    """The buffer in which the converter notes the oldest runtime with all the file's operations; None without one."""
    for entry in model.metadata or []:
        if entry.name == b"min_runtime_version":
            return model.buffers[entry.buffer]
    return None


def stored_tensor(model: Any, tensor: Any) -> StoredTensor:
    """A tensor of the schema as a `StoredTensor`."""
    buffer = model.buffers[tensor.buffer]
    return StoredTensor(
        _name(tensor),
        _DTYPES[tensor.type],
        tuple(int(extent) for extent in tensor.shape) if tensor.shape is not None else (),
        buffer.data is not None or bool(buffer.offset),
    )


def _name(tensor: Any) -> str:
    return (tensor.name or b"").decode()  # names are optional
