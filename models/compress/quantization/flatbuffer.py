"""Reads the tensors, operations and sizes of a `.tflite` from its flatbuffer tables, without a runtime."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


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
    """One operation of a graph: its kind, its scope (output names joined as in ai-edge-quantizer), and its inputs."""

    kind: str
    scope: str
    inputs: tuple[StoredTensor, ...]

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
    from ai_edge_litert import schema_py_generated as schema

    model = read(tflite)
    kinds = {code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)}
    listed = []
    for subgraph in model.subgraphs:
        for node in subgraph.operators:
            code = model.operatorCodes[node.opcodeIndex]
            kind = kinds[max(code.builtinCode, code.deprecatedBuiltinCode)]
            if kind == "CUSTOM" and code.customCode:
                kind = code.customCode.decode()
            scope = "".join(subgraph.tensors[index].name.decode() + ";" for index in node.outputs)
            inputs = tuple(
                stored_tensor(model, subgraph.tensors[index]) for index in node.inputs if index >= 0
            )
            listed.append(Operation(kind, scope, inputs))
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
    from ai_edge_litert import schema_py_generated as schema

    return schema.ModelT.InitFromPackedBuf(tflite, 0)


def stored_tensor(model: Any, tensor: Any) -> StoredTensor:
    """A tensor of the schema as a `StoredTensor`."""
    from ai_edge_litert import schema_py_generated as schema

    buffer = model.buffers[tensor.buffer]
    return StoredTensor(
        tensor.name.decode(),
        _dtypes(schema)[tensor.type],
        tuple(int(extent) for extent in tensor.shape) if tensor.shape is not None else (),
        buffer.data is not None or bool(buffer.offset),
    )


def _dtypes(schema: Any) -> dict[int, str]:
    return {value: name.lower() for name, value in vars(schema.TensorType).items() if isinstance(value, int)}
