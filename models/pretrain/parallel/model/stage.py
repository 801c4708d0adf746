"""Modules that run one after the other: stages of a pipeline, and models that are such a chain by construction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from models.zoo.layout import Chain, Layout


class Stage(nn.Module):
    """Some of a model's modules, in order, under the names they have in the whole model.

    Each takes the output of the previous one, a tensor or a tuple; between processes a tuple is sent as its tensors.
    """

    def __init__(self, whole: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        for name in names:
            _add_module(self, name, whole.get_submodule(name))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.through(self.names, inputs if len(inputs) > 1 else inputs[0])

    def through(self, names: Sequence[str], x: Any) -> Any:
        """The output of these modules, one after the other."""
        for name in names:
            x = self.get_submodule(name)(x)
        return x


def modules_in_order(module: nn.Module, layout: Layout) -> list[str]:
    """Paths of the modules that `module` calls one after the other; empty unless its class makes that certain."""
    if isinstance(module, Stage):
        return list(module.names)
    if isinstance(module, Chain) and type(module).forward is Chain.forward:
        return layout.sequence(module)
    return []


def _add_module(root: nn.Module, path: str, module: nn.Module) -> None:
    *above, name = path.split(".")
    for part in above:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(name, module)
