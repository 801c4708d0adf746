"""The pieces of a model, of which only the one in use has tensors.

A model is built without params; identical layers are found by what they consist of; and one piece at a time gets params
of its own, so that a model much larger than memory can be measured.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.pretrain.parallel.model.stage import Stage
from models.zoo.layout import Layout
from models.zoo.spec import ModelSpec

DEVIATION = 0.02
FEW_ROWS, LARGE_VALUES = 4, 1 << 22
"""Rows of an input for a layer of at most so many params; 1 for a larger one."""
_PLAIN = (bool, int, float, str, type(None))


def without_params(spec: ModelSpec) -> nn.Module:
    """The model with its parameters on the meta device; buffers are real."""
    with torch.random.fork_rng(devices=[]), _parameters_on_meta():
        torch.manual_seed(0)
        return spec.module()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Moves every parameter to the meta device when a module registers it, before it is initialised."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def parts_of(module: nn.Module, layout: Layout) -> list[nn.Module]:
    """Everything before the layers, the layers, everything after them."""
    if not layout.layers:
        return [nn.Identity(), module]
    order, layers = layout.sequence(module), layout.layer_names(module)
    before, after = order[: order.index(layers[0])], order[order.index(layers[-1]) + 1 :]
    return [Stage(module, before), *(module.get_submodule(name) for name in layers), Stage(module, after)]


def with_params(part: nn.Module, device: torch.device) -> nn.Module:
    """A copy of `part`, whose parameters are on the meta device, with params on `device`.

    Matrices are small and random, everything else is one: seconds and bytes do not depend on the values.
    """
    part = copy.deepcopy(part)
    numbers = torch.Generator(device).manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                values = torch.ones_like(parameter, device=device)
                if values.dim() > 1:
                    values.normal_(std=DEVIATION, generator=numbers)
                made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return part


def busiest(spec: ModelSpec, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """The first layer of a model, or all of a model without layers, and an input of it."""
    layout = spec.layout or Layout(order=())
    before, layer, *_ = parts_of(without_params(spec), layout)
    few = FEW_ROWS if sum(parameter.numel() for parameter in layer.parameters()) < LARGE_VALUES else 1
    with torch.no_grad():
        x = with_params(before, device)(spec.example_batch(few)[0].to(device))
    return with_params(layer, device), x.requires_grad_(x.is_floating_point())


def identity(part: nn.Module) -> str:
    """A hash that two pieces share only if they compute alike: the modules' classes and code, their plain attributes, and
    the shapes of their tensors."""
    return hashlib.sha256(json.dumps([*_described(part)]).encode()).hexdigest()


def _described(part: nn.Module) -> Iterator[list[Any]]:
    for path, module in part.named_modules():
        kind: Any = type(module)
        plain = {
            name: value
            for name, value in sorted(vars(module).items())
            if not name.startswith("_") and isinstance(value, _PLAIN)
        }
        tensors = {
            name: [str(tensor.dtype), *tensor.shape]
            for name, tensor in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            )
        }
        yield [path, kind.__module__, kind.__qualname__, code_of(kind), plain, tensors, module.extra_repr()]


@cache
def code_of(defined: Callable[..., object]) -> str:
    """A hash of the file that defines a class or function; torch's own belong to its version."""
    if defined.__module__.partition(".")[0] == "torch":
        return torch.__version__
    try:
        path = inspect.getsourcefile(defined)
    except TypeError:  # not written in Python
        path = None
    content = Path(path).read_bytes() if path and Path(path).is_file() else b""  # none if typed in
    return hashlib.sha256(content).hexdigest()
