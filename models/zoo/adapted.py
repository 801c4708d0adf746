"""An adapted model: few params are trained, on a frozen backbone that is part of its code (see `models.adaptation`).

Frozen tensors are non-persistent buffers, so code that reads params (trainers, the export, the wire) sees only the
trained ones. In a traced graph they are constants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import nn

from models import adaptation
from models.adaptation import Adaptation, AdaptationError, Arrays
from models.zoo.calls import called_layers

if TYPE_CHECKING:
    from models.zoo.spec import ModelSpec


class LowRank(nn.Module):
    """A linear layer plus a trained product of rank r: x Wᵀ + b + scale · (x Aᵀ) Bᵀ. A: [r, in], B: [out, r]."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)
        return output


def spec(base: ModelSpec, adapt: str, backbone: str) -> ModelSpec:
    """`base` with the frozen tensors of the safetensors file `backbone`, adapted as `adapt` says.

    Raises:
        AdaptationError: the model has no layer that can be adapted this way, or the file is not its backbone.
        OSError: the file cannot be read.
    """
    adaptation_of = adaptation.parse(adapt)
    content = Path(backbone).read_bytes()
    try:
        params = adaptation.dequantize_backbone(safetensors.numpy.load(content))
    except SafetensorError as error:
        raise AdaptationError(f"{backbone} is not a readable .safetensors file: {error}") from error
    order = called_layers(base.build(0).eval(), base)

    def module() -> nn.Module:
        return adapt_module(base.module(), adaptation_of, params, order)

    module()  # fails now rather than later
    options = {
        "base": base.name,
        "base_options": dict(base.options),
        "adapt": adapt,
        "backbone": hashlib.sha256(content).hexdigest(),
    }
    return replace(
        base,
        name=adaptation.MODEL,
        module=module,
        options=options,
        tensorflow_twin=None,
        layout=None,
    )


def adapt_module(
    module: nn.Module, adaptation_of: Adaptation, params: Arrays, order: Sequence[str]
) -> nn.Module:
    """Loads `params` into `module` and freezes everything but the head and the low-rank products, in place.

    Args:
        order: names of its layers in the order of a forward pass; the last linear one is the head.
    """
    linear = {name: part for name in order if type(part := module.get_submodule(name)) is nn.Linear}
    if not linear:
        raise AdaptationError("the model has no linear layer, so it has no head to train")
    *others, head = linear
    if adaptation_of.kind == "lora" and not others:
        raise AdaptationError(f"the model has no linear layer besides its head {head!r}; take adapt = 'head'")
    _require_all(module, params)
    for path, part in list(module.named_modules()):
        _load(part, path, params, frozen=path != head)
    if adaptation_of.kind == "lora":
        for path in others:
            parent, _, name = path.rpartition(".")
            layer = LowRank(linear[path], adaptation_of.rank, adaptation_of.scale)
            setattr(module.get_submodule(parent), name, layer)
    return module


def _require_all(module: nn.Module, params: Arrays) -> None:
    own = module.state_dict()
    for name, tensor in own.items():
        if name not in params and tensor.is_floating_point():
            raise AdaptationError(f"the backbone has no {name!r}, so it is not this model's")
        if name in params and params[name].shape != tuple(tensor.shape):
            raise AdaptationError(
                f"the backbone's {name!r} is {params[name].shape}, the model's {tuple(tensor.shape)}"
            )
    if unknown := sorted(params.keys() - own.keys()):
        raise AdaptationError(f"the backbone has {unknown[0]!r}, which the model has not")


def _load(part: nn.Module, path: str, params: Arrays, frozen: bool) -> None:
    """Loads the tensors of one module; frozen ones become non-persistent buffers."""
    own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    for name, tensor in own:
        key = f"{path}.{name}" if path else name
        if key not in params:
            part._non_persistent_buffers_set.add(name)  # counters, which are no params
            continue
        value = torch.from_numpy(np.array(params[key], np.float32))
        if frozen:
            delattr(part, name)
            part.register_buffer(name, value, persistent=False)
        else:
            tensor.data = value
