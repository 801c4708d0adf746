"""The layers of a torch model that an attacker looks at: those that its input meets first and that make its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.zoo import ModelSpec


@dataclass(frozen=True)
class Seen:
    """Names as in the params; None: the model has no such layer.

    Attributes:
        first_dense: the layer that the flattened input meets first, if it is dense and has a bias.
        embedding: weight of the layer that looks up tokens, [vocab, width].
        last_bias: bias of the last dense layer, [classes].
    """

    first_dense: str | None
    embedding: str | None
    last_bias: str | None


def inspect(spec: ModelSpec) -> Seen:
    """Sees the layers as a row passes them, whatever the model's code does between them."""
    module = spec.build(0)
    module.eval()
    met: list[tuple[str, nn.Module, Any]] = []
    hooks = [
        part.register_forward_hook(
            lambda part, inputs, output, name=name: met.append((name, part, inputs[0]))
        )
        for name, part in module.named_modules()
        if next(part.parameters(recurse=False), None) is not None
    ]
    x, _ = spec.example_batch(1)
    with torch.no_grad():
        module(x)
    for hook in hooks:
        hook.remove()
    first_dense = None
    if met and isinstance(met[0][1], nn.Linear) and met[0][1].bias is not None:
        taken = met[0][2]
        if taken.numel() == math.prod(spec.input_shape) and torch.equal(taken.flatten(), x.flatten()):
            first_dense = met[0][0]
    last = [
        name for name, part, _ in met if isinstance(part, nn.Linear) and part.out_features == spec.classes
    ]
    bias = f"{last[-1]}.bias" if last and module.get_submodule(last[-1]).bias is not None else None
    return Seen(first_dense, _embedding(met, spec), bias)


def _embedding(met: list[tuple[str, nn.Module, Any]], spec: ModelSpec) -> str | None:
    """The parameter with a row for each token, of the first layer that gets token ids."""
    for name, part, taken in met:
        if isinstance(taken, torch.Tensor) and not taken.is_floating_point():
            for own, value in part.named_parameters(recurse=False):
                if value.ndim == 2 and len(value) == spec.tokens:
                    return f"{name}.{own}" if name else own
    return None
