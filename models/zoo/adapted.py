"""An adapted model: few params are trained, on a frozen backbone (see `models.adaptation`).

In federated runs the backbone is part of the model's code: frozen tensors are non-persistent buffers, so code that reads
params (trainers, the export, the wire) sees only the trained ones. In a traced graph they are constants. In the
datacenter frozen tensors are params without gradients, which plans split as those of any model (`freeze_params`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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


class LowRank(nn.Linear):
    """A linear layer plus a trained product of rank r: x Wᵀ + b + scale · (x Aᵀ) Bᵀ. A: [r, in], B: [out, r].

    Has the weight and the bias of `layer`, params or buffers, under their names.
    """

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = layer.in_features, layer.out_features, scale
        for name in ("weight", "bias"):
            tensor = getattr(layer, name)
            if tensor is None or isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor, persistent=False)
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)
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
    order = layer_order(base)

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
    others, head = _layers(module, adaptation_of, order)
    _require_all(module, params)
    first = _first_names(module)
    for path, part in list(module.named_modules()):
        _load(part, path, params, first, frozen=path != head)
    _add_products(module, others, adaptation_of)
    return module


def freeze_params(module: nn.Module, adaptation_of: Adaptation, order: Sequence[str]) -> nn.Module:
    """Freezes everything but the head and the low-rank products, which it adds, in place; params keep their names.

    Args:
        order: as for `adapt_module`.
    """
    others, head = _layers(module, adaptation_of, order)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(bool(head) and name.startswith(f"{head}."))
    _add_products(module, others, adaptation_of)
    return module


def merge(module: nn.Module) -> nn.Module:
    """Replaces every low-rank product of `module` by a linear layer with the sum of both weights, in place."""
    for path, part in list(module.named_modules()):
        if isinstance(part, LowRank):
            layer = nn.Linear(part.in_features, part.out_features, part.bias is not None, part.weight.device)
            with torch.no_grad():
                layer.weight.copy_(part.weight + part.scale * (part.lora_b @ part.lora_a))
                if part.bias is not None:
                    layer.bias.copy_(part.bias)
            module.set_submodule(path, layer)
    return module


def layer_order(base: ModelSpec) -> list[str]:
    """Names of the layers of a model in the order of a forward pass: by its layout, which needs no pass, or by a pass."""
    if base.layout is None or not base.layout.order:
        return called_layers(base.build(0).eval(), base)
    with torch.device("meta"):
        module = base.module()
    return [
        f"{part}.{name}" if name else part
        for part in base.layout.sequence(module)
        for name, _ in module.get_submodule(part).named_modules()
    ]


def _layers(
    module: nn.Module, adaptation_of: Adaptation, order: Sequence[str]
) -> tuple[dict[str, nn.Linear], str]:
    """The linear layers by name that get a product, and the name of the trained head; "" where the head shares its weight."""
    linear = {name: part for name in order if type(part := module.get_submodule(name)) is nn.Linear}
    if not linear:
        raise AdaptationError("the model has no linear layer, so it has no head to train")
    *others, head = linear
    if adaptation_of.kind == "lora" and not others:
        raise AdaptationError(f"the model has no linear layer besides its head {head!r}; take adapt = 'head'")
    owner = _first_names(module).get(f"{head}.weight", f"{head}.weight")
    if owner != f"{head}.weight":
        if adaptation_of.kind == "head":
            raise AdaptationError(
                f"its head {head!r} shares its weight with {owner!r}; take adapt = 'lora(r)'"
            )
        head = ""
    products = others if adaptation_of.kind == "lora" else []
    return {name: linear[name] for name in products}, head


def _add_products(module: nn.Module, layers: Mapping[str, nn.Linear], adaptation_of: Adaptation) -> None:
    for path, layer in layers.items():
        module.set_submodule(path, LowRank(layer, adaptation_of.rank, adaptation_of.scale))


def _first_names(module: nn.Module) -> dict[str, str]:
    """Name of every tensor -> the first name of the same tensor, under which a file of params has it."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name) for name, tensor in module.state_dict(keep_vars=True).items()
    }


def _require_all(module: nn.Module, params: Arrays) -> None:
    first = _first_names(module)
    own = {name: tensor for name, tensor in module.state_dict().items() if first[name] == name}
    for name, tensor in own.items():
        if name not in params and tensor.is_floating_point():
            raise AdaptationError(f"the backbone has no {name!r}, so it is not this model's")
        if name in params and params[name].shape != tuple(tensor.shape):
            raise AdaptationError(
                f"the backbone's {name!r} is {params[name].shape}, the model's {tuple(tensor.shape)}"
            )
    if unknown := sorted(params.keys() - own.keys()):
        raise AdaptationError(f"the backbone has {unknown[0]!r}, which the model has not")


def _load(part: nn.Module, path: str, params: Arrays, first: Mapping[str, str], frozen: bool) -> None:
    """Loads the tensors of one module; frozen ones become non-persistent buffers."""
    own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    for name, tensor in own:
        key = f"{path}.{name}" if path else name
        key = first.get(key, key)
        if key not in params:
            part._non_persistent_buffers_set.add(name)  # counters, which are no params
            continue
        value = torch.from_numpy(np.array(params[key], np.float32))
        if frozen:
            delattr(part, name)
            part.register_buffer(name, value, persistent=False)
        else:
            tensor.data = value
