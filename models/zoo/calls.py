"""The layers that a forward pass calls, and their inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from models.zoo.spec import ModelSpec


def called_layers(module: nn.Module, spec: ModelSpec) -> list[str]:
    """Names of the layers that a forward pass calls, in order of their first call."""
    order: list[str] = []
    everything = [name for name, _ in module.named_modules()]
    with torch.no_grad(), on_calls(module, everything, lambda name, layer, x: order.append(name)):
        module(spec.example_batch(1)[0])
    return order


@contextlib.contextmanager
def on_calls(
    module: nn.Module, names: Sequence[str], callback: Callable[[str, nn.Module, torch.Tensor], None]
) -> Iterator[None]:
    """Calls `callback(name, layer, first input)` whenever a layer of `names` is called with an input."""

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda layer, inputs: callback(name, layer, inputs[0]) if inputs else None

    hooks = [module.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
