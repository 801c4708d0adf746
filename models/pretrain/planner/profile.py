"""What is known of a model and of the machines it is to train on: measured by `probe`, kept as JSON, edited by hand.

Everything that depends on a plan is a `Cost`: a fixed part and a part for every row of a micro-batch, each of which tp
divides or not. So a handful of measurements says what any plan costs.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.files import write_durably
from models.pretrain.collectives.cost import Link
from models.pretrain.plan import Sizes

FREE = Link(0.0, 0.0)


class ProfileError(ValueError):
    """Not a profile; the message says where and what was expected."""


@dataclass(frozen=True)
class Cost:
    """Seconds or bytes of a piece of a model, for so many rows and tp ranks.

    Attributes:
        fixed, per_row: what every tp rank has.
        split_fixed, split_per_row: what they share.
    """

    fixed: float = 0.0
    per_row: float = 0.0
    split_fixed: float = 0.0
    split_per_row: float = 0.0

    def at(self, rows: float, tp: int = 1) -> float:
        """Rows may be a fraction: with cp a process has a part of every row."""
        return self.fixed + self.split_fixed / tp + rows * (self.per_row + self.split_per_row / tp)


@dataclass(frozen=True)
class Piece:
    """A layer, or what comes before or after the layers.

    Attributes:
        values, split_values, expert_values: parameters that every tp rank has, that they share, that ep ranks share.
        forward: seconds of a forward pass.
        backward: of a backward pass, by what is recomputed in it.
        kept: bytes from its forward until its backward pass, output included, by what is recomputed.
        forward_bytes, backward_bytes: bytes at the worst moment of a pass beyond those before it.
        output_bytes: of what it gives, a row.
        columns, rows: matrices that tp splits by output and by input: how often tp ranks exchange a gradient, an output.
        tensors: its parameters are.
        attentions, experts: how often cp and ep ranks exchange what they hold.
    """

    name: str
    values: int = 0
    split_values: int = 0
    expert_values: int = 0
    tensors: int = 0
    forward: Cost = Cost()
    backward: dict[str, Cost] = field(default_factory=dict)
    kept: dict[str, Cost] = field(default_factory=dict)
    forward_bytes: dict[str, Cost] = field(default_factory=dict)
    backward_bytes: dict[str, Cost] = field(default_factory=dict)
    output_bytes: float = 0.0
    columns: int = 0
    rows: int = 0
    attentions: int = 0
    experts: int = 0

    def local_values(self, tp: int = 1, ep: int = 1) -> float:
        """Parameters of one process."""
        return self.values + self.split_values / tp + self.expert_values / ep


@dataclass(frozen=True)
class Optimizer:
    """What a step of the optimizer takes.

    Attributes:
        fixed, per_value: seconds for a tensor and for every value in it.
        state: values kept for every parameter.
        working_bytes: held for a moment, of its largest parameter.
    """

    fixed: float = 0.0
    per_value: float = 0.0
    state: float = 2.0
    working_bytes: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Hosts that are alike.

    Attributes:
        device: cpu or cuda.
        cores: of a host; with GPUs, GPUs of a host.
        per_host: processes that are started on a host.
        memory_bytes: of a process.
        slowdown: (processes that compute on a host at once, how much longer each then takes), from 1 process up.
        overlaps: whether communication runs beside computation: on GPUs, or while cores are idle.
        inside, between: links inside a host and between hosts.
    """

    device: str = "cpu"
    cores: int = 1
    per_host: int = 1
    memory_bytes: float = 0.0
    slowdown: tuple[tuple[int, float], ...] = ((1, 1.0),)
    inside: Link = FREE
    between: Link = FREE

    def slower(self, active: float) -> float:
        """How much longer each of `active` processes takes than one alone: between what was measured a line,
        beyond it as long as it takes to share what there is."""
        before = (0.0, 1.0)
        for count, factor in self.slowdown:
            if active <= count:
                part = (active - before[0]) / max(1e-9, count - before[0])
                return before[1] + part * (factor - before[1])
            before = (float(count), factor)
        if self.device != "cpu":
            return before[1]
        return before[1] * max(1.0, active / max(before[0], self.cores))


@dataclass(frozen=True)
class Profile:
    """Everything that predictions are made from.

    Attributes:
        first, layers, last, loss: the pieces of the model in order. One that cannot be taken apart is all in `last`.
        step: seconds of a step that no plan changes.
        overhead: seconds that a way of splitting costs beyond its computation and messages, each time it is used (see
            `models.pretrain.planner.predict.uses`).
        about: where and when it was measured.
    """

    sizes: Sizes
    first: Piece
    layers: tuple[Piece, ...]
    last: Piece
    loss: Piece
    optimizer: Optimizer
    machine: Machine
    step: float = 0.0
    overhead: dict[str, float] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (self.first, *self.layers, self.last, self.loss)

    @property
    def values(self) -> int:
        """Parameters of the whole model."""
        return sum(piece.values + piece.split_values + piece.expert_values for piece in self.pieces)


def write(profile: Profile, path: Path) -> None:
    write_durably(path, (json.dumps(table(profile), indent=2) + "\n").encode())


def table(profile: Profile) -> dict[str, Any]:
    """As JSON has it."""
    return dataclasses.asdict(profile)


def read(path: Path) -> Profile:
    """The profile in the file `path`.

    Raises:
        ProfileError: no such file, no JSON, or not what a profile has.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ProfileError(f"{path} is not JSON: {error}") from error
    return from_table(given, str(path))


def from_table(given: object, where: str = "profile") -> Profile:
    """The profile that `table` gave."""
    made: Profile = _made(Profile, given, where)
    return made


def _made(kind: Any, given: object, where: str) -> Any:
    """`given` as `kind`: a dataclass, a tuple, a dictionary by name, a number or text."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(given, Mapping):
            raise ProfileError(f"{where} is {given!r}, expected an object")
        hints = typing.get_type_hints(kind)
        for name in given:
            if name not in hints:
                raise ProfileError(f"{where} has the unknown key {name!r}; known: {', '.join(hints)}")
        required = [
            f.name
            for f in dataclasses.fields(kind)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        for name in required:
            if name not in given:
                raise ProfileError(f"{where}.{name} is missing")
        made: Any = kind
        return made(**{name: _made(hints[name], value, f"{where}.{name}") for name, value in given.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        if not isinstance(given, Mapping):
            raise ProfileError(f"{where} is {given!r}, expected an object")
        return {name: _made(arguments[1], value, f"{where}.{name}") for name, value in given.items()}
    if origin is tuple:
        if not isinstance(given, list | tuple):
            raise ProfileError(f"{where} is {given!r}, expected a list")
        kinds = [arguments[0]] * len(given) if arguments[-1] is ... else arguments
        return tuple(
            _made(each, value, f"{where}[{index}]")
            for index, (each, value) in enumerate(zip(kinds, given, strict=True))
        )
    if kind is str or kind is bool:
        if not isinstance(given, kind):
            raise ProfileError(f"{where} is {given!r}, expected {'text' if kind is str else 'true or false'}")
        return given
    if not isinstance(given, int | float) or isinstance(given, bool) or not given >= 0:
        raise ProfileError(f"{where} is {given!r}, expected a number >= 0")
    return int(given) if kind is int else float(given)
