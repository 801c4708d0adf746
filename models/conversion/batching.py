"""Makes a file for one row accept any number of rows, by removing the batch size from the shapes it reshapes to.

A converted module has its example's batch of one in the shapes of its RESHAPE operations. If a row stays a row,

    reshape(h[1, 4, 4, 16], shape = [1, 256])  equals  reshape(h, shape = [-1, 256])

and the runtime then returns n rows for n rows. A file with the batch in other constants still accepts only one row.
The runtime tests whether rows can run together (`edge_client.infer.runtime`).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np

from models.conversion import flatbuffer


def make_resizable(tflite: bytes) -> bytes:
    """The file with -1 as the batch of its RESHAPE operations; unchanged if there are none."""
    model = flatbuffer.read(tflite)
    nodes = [(graph, node) for graph in model.subgraphs for node in graph.operators]
    # the converter stores equal constants once: do not change a shape that another operation uses too
    others = {
        graph.tensors[index].buffer
        for graph, node in nodes
        for index in (node.inputs if not _reshapes(model, node) else node.inputs[:1])
        if index >= 0
    }
    changed = sum(_clear_batch(model, graph, node, others) for graph, node in nodes if _reshapes(model, node))
    return flatbuffer.write(model) if changed else tflite


def _reshapes(model: Any, node: Any) -> bool:
    """Whether it is a RESHAPE with its shape as an input; older files have it among the options only."""
    kind = flatbuffer.builtin_name(model.operatorCodes[node.opcodeIndex])
    return kind == "RESHAPE" and len(node.inputs) > 1


def _clear_batch(model: Any, graph: Any, node: Any, others: Set[int]) -> bool:
    """Sets the batch of one RESHAPE to -1, unless its shape lies in a buffer of `others`. True if it did."""
    source, target = graph.tensors[node.inputs[0]], graph.tensors[node.inputs[1]]
    data = model.buffers[target.buffer].data
    if data is None or target.buffer in others or source.shape is None or len(source.shape) == 0:
        return False
    shape = np.frombuffer(bytes(data), np.int32).copy()
    # Only if both shapes start with the batch, and no other dimension is -1.
    if len(shape) == 0 or shape[0] != 1 or source.shape[0] != 1 or (shape < 1).any():
        return False
    shape[0] = -1
    model.buffers[target.buffer].data = np.frombuffer(shape.tobytes(), np.uint8)
    if node.builtinOptions is not None:
        node.builtinOptions.newShape = shape
    return True
