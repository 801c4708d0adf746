"""Short names for the tensors of a `.tflite`.

litert-torch names a tensor after the classes and attributes of all modules around it, joined over what was fused: in a small model
names are a quarter of the file. Signatures bind tensors by number, so names are for people and for recipes only.
"""

from __future__ import annotations

import re
from typing import Any

from models.compress import stored


def shortened(tflite: bytes) -> bytes:
    """The same model, its tensors named `stages.0.conv1`, unique in each subgraph; inputs and outputs keep theirs."""
    from ai_edge_litert.tools.flatbuffer_utils import convert_object_to_bytearray

    model = stored.read(tflite)
    for subgraph in model.subgraphs:
        given = {subgraph.tensors[place].name.decode() for place in (*subgraph.inputs, *subgraph.outputs)}
        layers = _outputs_of_layers(model, subgraph)
        # a layer's output comes first, so that it has the module's path to itself
        for place in sorted(range(len(subgraph.tensors)), key=lambda place: place not in layers):
            if place in subgraph.inputs or place in subgraph.outputs:
                continue
            tensor = subgraph.tensors[place]
            path = module_path(tensor.name.decode()) or f"t{place}"
            name = path if path not in given else f"{path}:{place}"
            given.add(name)
            tensor.name = name.encode()
    return bytes(convert_object_to_bytearray(model))


def _outputs_of_layers(model: Any, subgraph: Any) -> set[int]:
    """Places of what operations with weights give."""
    found: set[int] = set()
    for node in subgraph.operators:
        read = (stored.declared(model, subgraph.tensors[place]) for place in node.inputs if place >= 0)
        if any(map(stored.is_weight, read)):
            found.update(int(place) for place in node.outputs)
    return found


def module_path(name: str) -> str:
    """`stages.0.conv1` from `….Residual_0/torch.nn.modules.conv.Conv2d_conv1;1`; empty where no module is told.

    What was fused has several such names, joined by `;;`: that of the module with weights counts, or the deepest.
    """
    paths = [
        [part.rsplit(".", 1)[-1].partition("_")[::2] for part in path.split("/")[2:]]
        for path in re.split(r";;|;\d*;?", name)
    ]
    weighty = [path for path in paths if path and path[-1][0].startswith(("Conv", "Linear", "Embedding"))]
    return ".".join(attribute for _, attribute in max(weighty or paths, key=len))
