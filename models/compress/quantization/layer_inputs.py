"""The inputs of a module's linear layers, layer by layer, each with the layers before it already changed.

`visit` runs the calibration rows up to a layer, hands over XᵀX of its inputs, and continues once the layer has been changed. Layers that take the
same tensor, such as query, key and value, are visited together, as none of them is before another. Where the module's layout names a chain
of parts, the rows pass through every part a few times only, however many parts there are.

Memory: the hidden states of all rows between two parts, and one matrix [columns, columns] in float64.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from models.zoo.calls import on_calls
from models.zoo.spec import ModelSpec

_VALUES_AT_ONCE = 8192
"""Numbers of an input, tokens for instance, that run together, at least a row of them."""

Change = Callable[[Sequence[str], torch.Tensor], None]
"""Called with the names of layers that share their input, and the sum of xᵀx over its rows, float64 [columns, columns]."""


@dataclass(frozen=True)
class _Stage:
    """Layers with the same input, and how often a forward pass calls the first one."""

    layers: tuple[str, ...]
    calls: int


class _Reached(Exception):
    """The layer has all of its inputs; the rest of the forward pass is not needed."""


def visit(
    module: nn.Module, spec: ModelSpec, x: npt.NDArray[Any], names: Collection[str], change: Change
) -> None:
    """Calls `change` for all layers of `names`, which must be linear and called, in the order of a forward pass.

    `x`: rows to calibrate on. `module` is in evaluation mode.
    """
    stages = _stages(module, spec, names)
    parts = _parts(module, spec, names)
    at_once = max(1, _VALUES_AT_ONCE // math.prod(spec.input_shape))
    states: list[Any] = [
        torch.from_numpy(np.ascontiguousarray(x[start : start + at_once]))
        for start in range(0, len(x), at_once)
    ]
    with torch.no_grad():
        for path in parts:
            part = module.get_submodule(path)
            for stage in [each for each in stages if not path or _is_within(each.layers[0], path)]:
                layer = module.get_submodule(stage.layers[0])
                change(stage.layers, _squares(part, layer, stage.calls, states))
            if path != parts[-1]:
                states = [part(state) for state in states]


def _parts(module: nn.Module, spec: ModelSpec, names: Collection[str]) -> list[str]:
    """Paths of modules whose composition is the forward pass and which have all of `names`; otherwise that of the whole module."""
    parts = spec.layout.sequence(module) if spec.layout else []
    return parts if all(any(_is_within(name, part) for part in parts) for name in names) else [""]


def _stages(module: nn.Module, spec: ModelSpec, names: Collection[str]) -> list[_Stage]:
    order: list[str] = []
    inputs: dict[str, torch.Tensor] = {}

    def note(name: str, layer: nn.Module, x: torch.Tensor) -> None:
        order.append(name)
        inputs[name] = x

    with torch.no_grad(), on_calls(module, list(names), note):
        module(spec.example_batch(1)[0])
    counts = Counter(order)
    stages: list[_Stage] = []
    for name in counts:
        together = stages[-1].layers if stages else ()
        if together and counts[name] == stages[-1].calls == 1 and inputs[name] is inputs[together[0]]:
            stages[-1] = _Stage((*together, name), 1)
        else:
            stages.append(_Stage((name,), counts[name]))
    return stages


def _squares(part: nn.Module, layer: nn.Module, calls: int, states: Sequence[Any]) -> torch.Tensor:
    """The sum of xᵀx over all inputs x of `layer`, a layer of `part`, when `part` runs on `states`."""
    sums: list[torch.Tensor] = []
    remaining = 0

    def add(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal remaining
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        squares = (rows.T @ rows).double()
        sums[:] = [sums[0].add_(squares) if sums else squares]
        remaining -= 1
        if not remaining:
            raise _Reached

    hook = layer.register_forward_pre_hook(add)
    try:
        for state in states:
            remaining = calls
            with contextlib.suppress(_Reached):
                part(state)
    finally:
        hook.remove()
    return sums[0]


def _is_within(layer: str, path: str) -> bool:
    return layer == path or layer.startswith(f"{path}.")
