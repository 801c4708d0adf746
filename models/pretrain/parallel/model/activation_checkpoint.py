"""Activation recomputation: a block's activations are dropped after its forward pass and recomputed when its backward
pass needs them (Chen 2016); `selective` keeps the results of matrix products (Korthikanti 2022, section 5).

Activations kept for a micro-batch, by a layer of width D with F hidden features (Korthikanti 2022, equations 1 to 5,
for fused attention without dropout), in numbers per token:

    none        4 D   inputs and outputs of the two norms
                4 D   query, key, value and the attention's output
                2 F   before and after GELU
    selective   6 D + F   the layer's input, and six matrix products
    full        D     the layer's input

tp divides the activations between the matrices of a pair, and `sequence` those around the norms.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from models.pretrain.plan import ActivationCheckpoint
from models.zoo.layout import Layout

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
}


def wrap(module: nn.Module, layout: Layout, which: ActivationCheckpoint) -> None:
    """Makes the layers of `module` recompute, in place."""
    if which == "none" or not layout.layers:
        return
    container = module.get_submodule(layout.layers)
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    options = selective if which == "selective" else {}
    for name, layer in list(container.named_children()):
        wrapped = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT, **options)
        container.register_module(name, wrapped)


def _policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
