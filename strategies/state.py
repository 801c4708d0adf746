"""State of a strategy between rounds: named arrays plus JSON, so that it checkpoints like params."""

from __future__ import annotations

from dataclasses import dataclass, field

from strategies.params import FloatArray

JsonValue = str | int | float | bool | None


@dataclass(frozen=True)
class State:
    """Arrays are named `<part>/<tensor>`, such as `momentum/fc.weight`; `values` are JSON scalars."""

    arrays: dict[str, FloatArray] = field(default_factory=dict)
    values: dict[str, JsonValue] = field(default_factory=dict)


def named(part: str, tensors: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """`{"w": a}` as `{"part/w": a}`."""
    return {f"{part}/{name}": value for name, value in tensors.items()}


def part_of(arrays: dict[str, FloatArray], part: str) -> dict[str, FloatArray]:
    """The tensors of one part, without its prefix."""
    prefix = part + "/"
    return {name[len(prefix) :]: value for name, value in arrays.items() if name.startswith(prefix)}
