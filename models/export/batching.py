"""A file for one row at a time, made to run any number of rows: the batch taken out of the shapes it reshapes to.

A converted module has its example's batch of one in the shapes of its RESHAPE operations. Where a row stays a row,

    reshape(h[1, 4, 4, 16], shape = [1, 256])  is  reshape(h, shape = [-1, 256])

and a runtime that is asked for n rows then gives n. Other operations with the batch in a constant remain, and such a file
takes one row as before; whether rows may be run together is tried where it runs (`edge_client.infer.runtime`).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema


def resizable(tflite: bytes) -> bytes:
    """The file with -1 for the batch wherever it reshapes; itself where there is nothing to change."""
    model = schema.ModelT.InitFromPackedBuf(tflite, 0)
    nodes = [(graph, node) for graph in model.subgraphs for node in graph.operators]
    # the converter stores equal constants once: a shape that is also another operation's stays
    others = {
        graph.tensors[place].buffer
        for graph, node in nodes
        for place in (node.inputs if not _reshapes(model, node) else node.inputs[:1])
        if place >= 0
    }
    changed = sum(_opened(model, graph, node, others) for graph, node in nodes if _reshapes(model, node))
    if not changed:
        return tflite
    builder = flatbuffers.Builder(len(tflite))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _reshapes(model: Any, node: Any) -> bool:
    """Whether it is a RESHAPE to a shape that is an input; older files have it among the options only."""
    code = model.operatorCodes[node.opcodeIndex]
    kind = max(code.builtinCode, code.deprecatedBuiltinCode)
    return bool(kind == schema.BuiltinOperator.RESHAPE and len(node.inputs) > 1)


def _opened(model: Any, graph: Any, node: Any, others: Set[int]) -> bool:
    """Opens the batch of one RESHAPE, unless its shape lies in a buffer of `others`; whether it did."""
    source, wanted = graph.tensors[node.inputs[0]], graph.tensors[node.inputs[1]]
    data = model.buffers[wanted.buffer].data
    if data is None or wanted.buffer in others or source.shape is None or len(source.shape) == 0:
        return False
    shape = np.frombuffer(bytes(data), np.int32).copy()
    # Only where both sides begin with the batch, and nothing else is left open.
    if len(shape) == 0 or shape[0] != 1 or source.shape[0] != 1 or (shape < 1).any():
        return False
    shape[0] = -1
    model.buffers[wanted.buffer].data = np.frombuffer(shape.tobytes(), np.uint8)
    if node.builtinOptions is not None:
        node.builtinOptions.newShape = shape
    return True
