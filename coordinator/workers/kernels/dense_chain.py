"""Recognises models that are a chain of dense layers, which is all that `coordinator.workers.kernels.stacked` can train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from coordinator.workers.kernels import layer_chain
from coordinator.workers.kernels.layer_chain import ACTIVATIONS, Kind, NotStackable, is_idle_dropout, name_of

if TYPE_CHECKING:
    from models.zoo import ModelSpec


@dataclass(frozen=True)
class Dense:
    """y = activation(x Wᵀ + b). `weight`, `bias`: names of its params; without an activation the name is empty."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    activation: str = ""


@dataclass(frozen=True)
class DenseChain:
    """Dense layers, each fed by the one before it; `regression`: trained with squared error instead of cross-entropy."""

    layers: tuple[Dense, ...]
    regression: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all params, in the order of the layers."""
        return tuple(name for layer in self.layers for name in (layer.weight, layer.bias) if name)


_EXPECTED = "expected only linear layers with relu, tanh or sigmoid between them"


def find_chain(spec: ModelSpec, module: nn.Module) -> DenseChain:
    """The dense chain that `module`, built from `spec`, computes.

    Raises:
        NotStackable: it computes anything else, is trained with another loss, or has frozen params.
    """
    _require_known_layers(module)
    chain = layer_chain.find_chain(spec, module)
    layers = []
    for each in chain.layers:
        if each.kind != Kind.DENSE:  # which a function may compute
            raise NotStackable(f"it has {each.kind.name.lower().replace('_', ' ')}; {_EXPECTED}")
        inputs, outputs = each.sizes
        layers.append(Dense(each.weight, each.bias or None, inputs, outputs, each.activation))
    return DenseChain(tuple(layers), chain.regression)


def _require_known_layers(module: nn.Module) -> None:
    """Names a layer that no dense chain has; what the layers are used for is seen in the graph."""
    for path, part in module.named_modules():
        is_layer = type(part).__module__.startswith("torch.nn.") and "container" not in type(part).__module__
        known = type(part) in (
            nn.Module,
            nn.Linear,
            nn.Flatten,
            nn.Identity,
            *ACTIVATIONS,
        ) or is_idle_dropout(part)
        if is_layer and not known:
            raise NotStackable(f"it has {name_of(part, path)}; {_EXPECTED}")
