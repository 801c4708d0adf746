"""A torch model given as an object: as the source `model.py`, and its weights if it is a module that has some.

class or function    is called in each process that needs the model, as a builder of one's own is
module               its classes as source, its attributes as literals, its tensors as safetensors
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import safetensors.torch
import torch
from torch import nn

from models.objects.restore import fedloop_restore
from models.objects.source import NotWritable, Source, is_plain

SOURCE = "model.py"
WEIGHTS = "start.safetensors"
BUILDER = "fedloop_build"
"""The function in `SOURCE` that builds the model."""

_ARGUMENTS = ("input_shape", "classes")


def write(model: nn.Module | Callable[..., Any], options: Mapping[str, Any]) -> dict[str, bytes]:
    """The files, by name, from which `BUILDER` in `SOURCE` builds the model. `options`: those of the experiment.

    Raises:
        NotWritable: part of it cannot be written down; says which.
    """
    source = Source()
    if isinstance(model, nn.Module):
        if options:
            raise NotWritable(
                f"[model] has the options {', '.join(options)}, but the model is a finished module; give a function or "
                "class that takes them"
            )
        writer = _Writer(source)
        expression = writer.module(model, type(model).__name__)
        end = _RESTORING.format(weights=WEIGHTS, builder=BUILDER, expression=expression)
        return {SOURCE: source.text(end).encode(), WEIGHTS: safetensors.torch.save(writer.tensors)}
    if not isinstance(model, type | FunctionType):
        raise NotWritable(
            f"it is a {type(model).__name__}; expected a torch.nn.Module, or a function or class that builds one"
        )
    name = source.refer(model)
    parameters = inspect.signature(model).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    passed = ", ".join(f"{each}={each}" for each in _ARGUMENTS if takes_any or each in parameters)
    end = _BUILDING.format(builder=BUILDER, call=f"{name}({passed}{', ' if passed else ''}**options)")
    return {SOURCE: source.text(end).encode()}


_BUILDING = """
def {builder}(input_shape, classes, **options):
    return {call}
"""

_RESTORING = """
def {builder}(input_shape, classes):
    from pathlib import Path

    import safetensors.torch

    tensors = safetensors.torch.load_file(Path(__file__).with_name({weights!r}))
    made = {{}}

    def param(key, is_trained):
        if key not in made:
            made[key] = torch.nn.Parameter(tensors[key], is_trained)
        return made[key]

    def part(key, module=None):
        return made.setdefault(key, module)

    return {expression}
"""


class _Writer:
    """Writes modules as expressions; `tensors` holds their values by key, a shared one once."""

    def __init__(self, source: Source) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._source = source
        self._keys: dict[int, str] = {}
        self._internal = set(vars(nn.Module()))
        source.copy(fedloop_restore)

    def module(self, module: nn.Module, path: str) -> str:
        if id(module) in self._keys:
            return f"part({self._keys[id(module)]!r})"
        self._keys[id(module)] = path
        own = vars(module)
        if any(value for name, value in own.items() if name.endswith("hooks") and name in self._internal):
            raise NotWritable(f"{path} has hooks, which cannot be written down; remove them first")
        # Params first: attributes may refer to them.
        params = {name: self._param(value, f"{path}.{name}") for name, value in module._parameters.items()}
        buffers = {
            name: f"({self._buffer(value, f'{path}.{name}')}, {name not in module._non_persistent_buffers_set})"
            for name, value in module._buffers.items()
        }
        parts = {
            name: "None" if value is None else self.module(value, f"{path}.{name}")
            for name, value in module._modules.items()
        }
        kept = {
            name: value for name, value in own.items() if name not in self._internal or name == "training"
        }
        attributes = {name: self._value(value, f"{path}.{name}") for name, value in kept.items()}
        kind = self._source.refer(type(module))
        tables = ", ".join(map(_table, (attributes, params, buffers, parts)))
        return f"part({path!r}, {fedloop_restore.__name__}({kind}, {tables}))"

    def _param(self, param: nn.Parameter | None, path: str) -> str:
        return "None" if param is None else f"param({self._key(param, path)!r}, {param.requires_grad})"

    def _buffer(self, buffer: torch.Tensor | None, path: str) -> str:
        return "None" if buffer is None else f"tensors[{self._key(buffer, path)!r}]"

    def _key(self, tensor: torch.Tensor, path: str) -> str:
        if id(tensor) not in self._keys:
            self._keys[id(tensor)] = path
            self.tensors[path] = tensor.detach().cpu().clone().contiguous()
        return self._keys[id(tensor)]

    def _value(self, value: Any, path: str) -> str:
        """An attribute as an expression."""
        if is_plain(value):
            return repr(value)
        if isinstance(value, torch.dtype):
            return repr(value)
        if isinstance(value, nn.Parameter):
            return self._param(value, path)
        if isinstance(value, torch.Tensor):
            return self._buffer(value, path)
        if isinstance(value, list | tuple):  # torch.Size is a tuple
            items = "".join(f"{self._value(each, f'{path}[{index}]')}, " for index, each in enumerate(value))
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return _table({key: self._value(each, f"{path}[{key!r}]") for key, each in value.items()})
        if isinstance(value, type | FunctionType):
            return self._source.refer(value)
        raise NotWritable(
            f"{path} is a {type(value).__name__}, which cannot be written down; give a function or class that builds the "
            "module instead of the finished one"
        )


def _table(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key!r}: {value}" for key, value in values.items()) + "}"
