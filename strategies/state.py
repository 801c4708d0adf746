"""State of a strategy between rounds: named arrays plus JSON, so that it checkpoints like params."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import overload

from strategies.params import Params, Tensors, select

JsonValue = str | int | float | bool | None


@dataclass(frozen=True)
class State:
    """Arrays are named `<part>/<tensor>`, such as `momentum/fc.weight`; `values` are JSON scalars."""

    arrays: Tensors = field(default_factory=dict)
    values: Mapping[str, JsonValue] = field(default_factory=dict)


@overload
def subtree(arrays: Params, part: str) -> Params: ...
@overload
def subtree(arrays: Tensors, part: str) -> Tensors: ...
def subtree(arrays: Tensors, part: str) -> Tensors:
    """The tensors of one part, without its prefix."""
    prefix = part + "/"
    return select({name[len(prefix) :]: (arrays, name) for name in arrays if name.startswith(prefix)})


def flatten(parts: Mapping[str, Tensors]) -> Tensors:
    """Several parts as one set of tensors: `{"part": {"w": a}}` becomes `{"part/w": a}`."""
    return select({f"{part}/{name}": (tensors, name) for part, tensors in parts.items() for name in tensors})


@overload
def unflatten(arrays: Params) -> dict[str, Params]: ...
@overload
def unflatten(arrays: Tensors) -> dict[str, Tensors]: ...
def unflatten(arrays: Tensors) -> Mapping[str, Tensors]:
    """The inverse of `flatten`, parts in sorted order."""
    return {part: subtree(arrays, part) for part in sorted({name.split("/", 1)[0] for name in arrays})}
