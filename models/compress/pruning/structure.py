"""Rebuilds a compressed module from its spec and its params.

A zoo spec builds the module as designed. Pruning narrows layers, factorisation replaces one layer by several, and
folding removes a BatchNorm. Names and shapes of the params describe these changes, so a compressed model is still just
a spec and a `.safetensors` file:

    fc.weight [10, 24], the spec has [10, 64]     a Linear from 24 features
    fc.0.weight, fc.1.weight, fc.1.bias           an nn.Sequential in place of the Linear `fc`
    no norm.weight, but stem.bias                 BatchNorm `norm` was folded: an nn.Identity, and `stem` has a bias
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from models.pretrain import params as tensors
from models.zoo.spec import ModelSpec

Params = Mapping[str, npt.NDArray[Any]]
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
AnyModule = TypeVar("AnyModule", bound=nn.Module)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NORMS = (*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm)


class StructureError(ValueError):
    """No module of this spec can have these params; the message names the first tensor and what was expected."""


def rebuild(spec: ModelSpec, params: Params) -> nn.Module:
    """The module that `params` were taken from, holding them, in evaluation mode.

    Sizes of Linear, Conv, BatchNorm, GroupNorm and LayerNorm follow from the tensors. Other layers must be as designed.

    Raises:
        StructureError: a tensor has a shape that no such layer has.
        JobError: a tensor is missing, too many, or of another shape than one that can be.
    """
    module = spec.build(0)
    for name, layer in list(module.named_modules()):
        fitted = fit(name, layer, params)
        if fitted is not layer:
            module.set_submodule(name, fitted)
    tensors.fill(module, params, f"params of model {spec.name!r}")
    return module.eval()


def fit(name: str, layer: nn.Module, params: Params) -> nn.Module:
    """`layer` with the sizes in `params`; itself if nothing changed or only its submodules did."""
    if isinstance(layer, _BATCH_NORMS) and f"{name}.running_mean" not in params:
        return nn.Identity()
    if isinstance(layer, nn.Linear | Convolution) and f"{name}.0.weight" in params:
        return nn.Sequential(*_factors(name, layer, params))
    if isinstance(layer, _BATCH_NORMS):
        mean = params[f"{name}.running_mean"]
        return _copy_with(layer, num_features=len(mean), weight=mean, bias=mean, running_mean=mean, running_var=mean)  # fmt: skip
    weight = params.get(f"{name}.weight")
    if weight is None:
        return layer
    bias = f"{name}.bias" in params
    if isinstance(layer, nn.Linear):
        return _linear(name, layer, weight, bias)
    if isinstance(layer, Convolution):
        return _convolution(name, layer, weight, bias)
    if isinstance(layer, nn.GroupNorm):
        if len(weight) % layer.num_groups:
            raise StructureError(
                f"{name}.weight has {len(weight)} channels, expected a multiple of its {layer.num_groups} groups"
            )
        return _copy_with(layer, num_channels=len(weight), weight=weight, bias=weight)
    if isinstance(layer, nn.LayerNorm):
        return _copy_with(layer, normalized_shape=weight.shape, weight=weight, bias=weight)
    return layer


def _factors(name: str, layer: nn.Linear | Convolution, params: Params) -> list[nn.Module]:
    """The layers that replace one. Along each axis of a convolution, the factor with the full kernel has the stride and padding."""
    weights: list[npt.NDArray[Any]] = []
    while (weight := params.get(f"{name}.{len(weights)}.weight")) is not None:
        weights.append(weight)
    names = [f"{name}.{index}" for index in range(len(weights))]
    if isinstance(layer, nn.Linear):
        return [
            _linear(factor, layer, weight, f"{factor}.bias" in params)
            for factor, weight in zip(names, weights, strict=True)
        ]
    if layer.groups != 1:
        raise StructureError(f"{name}.0.weight: {name} is a grouped convolution, which cannot have factors")
    full_indices = []
    for axis, extent in enumerate(layer.kernel_size):
        full = [index for index, weight in enumerate(weights) if weight.shape[2 + axis :][:1] == (extent,)]
        if not full:
            raise StructureError(
                f"{name}.*.weight: none of {len(weights)} factors has a kernel of {extent} along axis {axis}, as {name} has"
            )
        full_indices.append(full[0])
    factors: list[nn.Module] = []
    for index, weight in enumerate(weights):
        own = [at == index for at in full_indices]
        factor = _convolution(names[index], layer, weight, f"{names[index]}.bias" in params)
        factor.kernel_size = weight.shape[2:]
        factor.stride = tuple(s if full else 1 for s, full in zip(layer.stride, own, strict=True))
        factor.dilation = tuple(d if full else 1 for d, full in zip(layer.dilation, own, strict=True))
        if not isinstance(layer.padding, str):
            factor.padding = tuple(p if full else 0 for p, full in zip(layer.padding, own, strict=True))
            # torch uses this for other paddings than zeros, [last axis' two sides, …]
            factor._reversed_padding_repeated_twice = [p for p in reversed(factor.padding) for _ in range(2)]
        factors.append(factor)
    return factors


def _linear(name: str, layer: nn.Linear, weight: npt.NDArray[Any], bias: bool) -> nn.Linear:
    _require_rank(name, weight, 2)
    outputs, inputs = weight.shape
    biases = weight[:, 0] if bias else None
    return _copy_with(layer, out_features=outputs, in_features=inputs, weight=weight, bias=biases)


def _convolution(name: str, layer: Convolution, weight: npt.NDArray[Any], bias: bool) -> Convolution:
    _require_rank(name, weight, layer.weight.ndim)
    outputs, depth = weight.shape[:2]
    groups = layer.groups
    if groups > 1 and groups == layer.in_channels:  # a depthwise convolution keeps as many groups as channels
        groups = outputs // (layer.out_channels // layer.in_channels)
    sizes = {"out_channels": outputs, "in_channels": depth * groups, "groups": groups}
    biases = weight.reshape(outputs, -1)[:, 0] if bias else None
    return _copy_with(layer, **sizes, weight=weight, bias=biases)


def _copy_with(layer: AnyModule, **changed: Any) -> AnyModule:
    """A copy of `layer` with changed attributes; an array sets the shape of a parameter or buffer."""
    other = copy.deepcopy(layer)
    for name, value in changed.items():
        if not isinstance(value, np.ndarray):
            setattr(other, name, value)
        elif name in other._buffers:
            setattr(other, name, torch.zeros(value.shape))
        elif getattr(layer, name) is not None or not isinstance(layer, _NORMS):
            setattr(other, name, nn.Parameter(torch.zeros(value.shape)))
    return other


def _require_rank(name: str, weight: npt.NDArray[Any], rank: int) -> None:
    if weight.ndim != rank:
        raise StructureError(f"{name}.weight is {weight.shape}, expected {rank} axes")
