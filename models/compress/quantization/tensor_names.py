"""Shortens the tensor names of a `.tflite`.

litert-torch names a tensor after the classes and attributes of all enclosing modules, joined for fused operations: in a small model
names are a quarter of the file. Signatures bind tensors by number, so only people and recipes use the names.
"""

from __future__ import annotations

import re
from typing import Any

from models.conversion import flatbuffer


def shorten(tflite: bytes) -> bytes:
    """The same model with tensors named like `stages.0.conv1`, unique in each subgraph; inputs and outputs keep their names."""
    model = flatbuffer.read(tflite)
    for subgraph in model.subgraphs:
        taken = {subgraph.tensors[index].name.decode() for index in (*subgraph.inputs, *subgraph.outputs)}
        layers = _layer_outputs(model, subgraph)
        # the outputs of layers come first, so that they get the plain module path
        for index in sorted(range(len(subgraph.tensors)), key=lambda index: index not in layers):
            if index in subgraph.inputs or index in subgraph.outputs:
                continue
            tensor = subgraph.tensors[index]
            path = module_path(tensor.name.decode()) or f"t{index}"
            name = path if path not in taken else f"{path}:{index}"
            taken.add(name)
            tensor.name = name.encode()
    return flatbuffer.write(model)


def _layer_outputs(model: Any, subgraph: Any) -> set[int]:
    outputs: set[int] = set()
    for node in subgraph.operators:
        inputs = (
            flatbuffer.stored_tensor(model, subgraph.tensors[index]) for index in node.inputs if index >= 0
        )
        if any(map(flatbuffer.is_weight, inputs)):
            outputs.update(int(index) for index in node.outputs)
    return outputs


def module_path(name: str) -> str:
    """`stages.0.conv1` from `….Residual_0/torch.nn.modules.conv.Conv2d_conv1;1`; empty if the name has none.

    A fused operation has several such names, joined by `;;`: the one of the module with weights counts, otherwise the deepest.
    """
    paths = [
        [part.rsplit(".", 1)[-1].partition("_")[::2] for part in path.split("/")[2:]]
        for path in re.split(r";;|;\d*;?", name)
    ]
    weighted = [path for path in paths if path and path[-1][0].startswith(("Conv", "Linear", "Embedding"))]
    return ".".join(attribute for _, attribute in max(weighted or paths, key=len))
