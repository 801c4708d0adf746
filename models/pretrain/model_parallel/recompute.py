"""Activation recomputation: a block's activations are dropped after its forward pass and computed again when its
backward pass needs them (Chen 2016); `selective` keeps the results of matrix products (Korthikanti 2022, section 5).

What is kept, of a micro-batch of n tokens by a layer of width D with F hidden features (Korthikanti 2022, equations 1
to 5, for fused attention without dropout), in numbers per token:

    none        4 D   what the two norms take and give
                4 D   query, key, value and what attention gives
                2 F   before and after GELU
    selective   6 D + F   what the layer takes, and six matrix products
    full        D     what the layer takes

Of these tp divides what lies between the matrices of a pair, and `sequence` what the norms take.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from models.pretrain.plan import ParallelPlan, Recompute, Sizes
from models.zoo.layout import Layout

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
}


def wrap(module: nn.Module, layout: Layout, which: Recompute) -> None:
    """Has the layers of `module` recompute, in place."""
    if which == "none" or not layout.layers:
        return
    container = module.get_submodule(layout.layers)
    for name, layer in list(container.named_children()):
        contexts = (
            {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
            if which == "selective"
            else {}
        )
        wrapped = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT, **contexts)
        container.register_module(name, wrapped)


def _policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def layer_bytes(sizes: Sizes, plan: ParallelPlan, rows: int, recomputed: bool = True) -> float:
    """What one layer keeps of a micro-batch of `rows` rows on one process, from its forward pass to its backward pass.

    Experts' layers keep more. With `cp`, exchanges around attention keep ten further tensors of its width.

    Args:
        recomputed: whether by `plan.recompute`, or as if it were `none`: what a layer that recomputes keeps besides,
            while its own backward pass runs.
    """
    D, F, tp = sizes.width, sizes.hidden, plan.tp
    tokens = rows * sizes.length / plan.cp
    spread = tp if plan.sequence else 1
    number = 2 if plan.precision == "bf16" else 4  # bytes of what a matrix product takes or gives
    residual = (
        number if plan.zero >= 2 else 4
    )  # FSDP casts what lies between the layers too; autocast does not
    which = plan.recompute if recomputed else "none"
    if which == "full":
        return tokens * D / spread * residual
    if which == "selective":
        return tokens * (D / spread * residual + (2 * D + (3 * D + F) / tp) * number)
    # autocast makes three copies of what query, key and value take
    norms = 2 * D / spread * residual + (2 if residual == number else 4) * D * number
    statistics = 4 * (4 / spread + sizes.heads / tp / plan.cp)  # of two norms, and of every head's softmax
    exchanged = 10 * D / tp * number if plan.cp > 1 else 0
    return tokens * (norms + (4 * D + 2 * F) / tp * number + statistics + exchanged)
