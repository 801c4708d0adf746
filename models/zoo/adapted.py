"""A model of which few params are trained, on a backbone that is part of its code (see `models.adaptation`).

Frozen tensors are buffers outside the state dict, so whoever asks for params (trainers, the export, the wire) finds
those that are trained and no others. In a traced graph they are constants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import nn

from models import adaptation
from models.adaptation import Adaptation, AdaptationError, Arrays
from models.zoo.calls import called
from models.zoo.spec import ModelSpec


class LowRank(nn.Module):
    """A linear layer beside a trained product of rank r: x Wᵀ + b + scale · (x Aᵀ) Bᵀ. A: [r, in], B: [out, r]."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)
        return answer


def spec(base: ModelSpec, how: str, backbone: str) -> ModelSpec:
    """`base` with the frozen tensors of the safetensors file `backbone`, and params as `how` says.

    Raises:
        AdaptationError: the model has no layer that could be trained like this, or the file is not its backbone.
        OSError: there is no such file.
    """
    wanted = adaptation.parse(how)
    content = Path(backbone).read_bytes()
    try:
        whole = adaptation.restored(safetensors.numpy.load(content))
    except SafetensorError as error:
        raise AdaptationError(f"{backbone} is not a readable .safetensors file: {error}") from error
    order = called(base.build(0).eval(), base)

    def module() -> nn.Module:
        return adapted(base.module(), wanted, whole, order)

    module()  # says now what would be wrong later
    options = {
        "base": base.name,
        "base_options": dict(base.options),
        "adapt": how,
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


def adapted(module: nn.Module, wanted: Adaptation, whole: Arrays, order: Sequence[str]) -> nn.Module:
    """`module`, changed in place to hold the params `whole`, all frozen but for the head and the products of rank r.

    Args:
        order: names of its layers as a forward pass calls them; the last linear one is the head.
    """
    linear = {name: part for name in order if type(part := module.get_submodule(name)) is nn.Linear}
    if not linear:
        raise AdaptationError("the model has no linear layer, so it has no head to train")
    *others, head = linear
    if wanted.kind == "lora" and not others:
        raise AdaptationError(f"the model has no linear layer besides its head {head!r}; take adapt = 'head'")
    _require_whole(module, whole)
    for path, part in list(module.named_modules()):
        _fill(part, path, whole, frozen=path != head)
    if wanted.kind == "lora":
        for path in others:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, LowRank(linear[path], wanted.rank, wanted.scale))
    return module


def _require_whole(module: nn.Module, whole: Arrays) -> None:
    """Raises AdaptationError unless `whole` has every tensor of `module` but its counters, and no other."""
    own = module.state_dict()
    for name, tensor in own.items():
        if name not in whole and tensor.is_floating_point():
            raise AdaptationError(f"the backbone has no {name!r}, so it is not this model's")
        if name in whole and whole[name].shape != tuple(tensor.shape):
            raise AdaptationError(
                f"the backbone's {name!r} is {whole[name].shape}, the model's {tuple(tensor.shape)}"
            )
    if unknown := sorted(whole.keys() - own.keys()):
        raise AdaptationError(f"the backbone has {unknown[0]!r}, which the model has not")


def _fill(part: nn.Module, path: str, whole: Arrays, frozen: bool) -> None:
    """Gives one module its own tensors of `whole`; frozen ones as buffers outside the state dict."""
    own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    for name, tensor in own:
        key = f"{path}.{name}" if path else name
        if key not in whole:
            part._non_persistent_buffers_set.add(name)  # counters, which are no params
            continue
        value = torch.from_numpy(np.array(whole[key], np.float32))
        if frozen:
            delattr(part, name)
            part.register_buffer(name, value, persistent=False)
        else:
            tensor.data = value
