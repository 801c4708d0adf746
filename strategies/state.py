"""State of a strategy between rounds: named arrays plus JSON, so that it checkpoints like params."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strategies.params import FloatArray, Params

JsonValue = str | int | float | bool | None


@dataclass(frozen=True)
class State:
    """Arrays are named `<part>/<tensor>`, such as `momentum/fc.weight`; `values` are JSON scalars."""

    arrays: dict[str, FloatArray] = field(default_factory=dict)
    values: dict[str, JsonValue] = field(default_factory=dict)


def named(part: str, tensors: Mapping[str, FloatArray]) -> Params:
    """`{"w": a}` as `{"part/w": a}`."""
    return {f"{part}/{name}": value for name, value in tensors.items()}


def part_of(arrays: Mapping[str, FloatArray], part: str) -> Params:
    """The tensors of one part, without its prefix."""
    prefix = part + "/"
    return {name[len(prefix) :]: value for name, value in arrays.items() if name.startswith(prefix)}


def joined(parts: Mapping[str, Mapping[str, FloatArray]]) -> Params:
    """Several parts as one set of tensors, `{"part": {"w": a}}` as `{"part/w": a}`."""
    return {f"{part}/{name}": value for part, tensors in parts.items() for name, value in tensors.items()}


def parted(arrays: Mapping[str, FloatArray]) -> dict[str, Params]:
    """The inverse of `joined`, parts in sorted order."""
    return {part: part_of(arrays, part) for part in sorted({name.split("/", 1)[0] for name in arrays})}
