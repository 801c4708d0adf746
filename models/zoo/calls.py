"""Which layers a forward pass calls, and with what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from models.zoo.spec import ModelSpec


def called(module: nn.Module, spec: ModelSpec) -> list[str]:
    """Names of the layers that a forward pass calls, in the order in which it begins them."""
    order: list[str] = []
    everything = [name for name, _ in module.named_modules()]
    with torch.no_grad(), watched(module, everything, lambda name, layer, x: order.append(name)):
        module(spec.example_batch(1)[0])
    return order


@contextlib.contextmanager
def watched(
    module: nn.Module, names: Sequence[str], note: Callable[[str, nn.Module, torch.Tensor], None]
) -> Iterator[None]:
    """`note(name, layer, first input)` whenever a layer of `names` is called with one."""

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda layer, given: note(name, layer, given[0]) if given else None

    hooks = [module.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
