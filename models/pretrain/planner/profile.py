"""The profile of a model and its machines: measured by `probe`, stored as JSON, editable by hand.

Everything that depends on a plan is a `Cost`: a fixed part and a part per row of a micro-batch, each of which tp divides
or not. So a handful of measurements determines the cost of any plan.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from edge_client.files import write_durably
from models import options
from models.job import read_json
from models.pretrain.plan import Sizes
from models.pretrain.planner.collective_cost import Link

FREE = Link(0.0, 0.0)


@dataclass(frozen=True)
class Cost:
    """Seconds or bytes of a piece of a model, as a function of rows and tp ranks.

    Attributes:
        fixed, per_row: the part every tp rank has.
        split_fixed, split_per_row: the part tp divides.
    """

    fixed: float = 0.0
    per_row: float = 0.0
    split_fixed: float = 0.0
    split_per_row: float = 0.0

    def at(self, rows: float, tp: int = 1) -> float:
        """The cost for `rows` rows, a fraction with cp, where a process has a part of every row."""
        return self.fixed + self.split_fixed / tp + rows * (self.per_row + self.split_per_row / tp)


def most(costs: Iterable[Cost], rows: float, tp: int = 1) -> float:
    """The largest of several costs."""
    return max(cost.at(rows, tp) for cost in costs)


@dataclass(frozen=True)
class Piece:
    """A layer, or everything before or after the layers.

    Attributes:
        values, split_values, expert_values: parameters that every tp rank has, that tp divides, that ep divides.
        forward: seconds of a forward pass.
        backward: seconds of a backward pass, by recomputation.
        kept: bytes kept from its forward to its backward pass, output included, by recomputation.
        forward_bytes, backward_bytes: peak bytes of a pass beyond those before it: the largest of these costs.
        output_bytes: bytes of its output, per row.
        columns, rows: matrices that tp splits by output and by input: exchanges of a gradient, of an output.
        tensors: number of its parameter tensors.
        largest: values of the largest of them.
        attentions, experts: number of exchanges of cp and ep ranks.
    """

    name: str
    values: int = 0
    split_values: int = 0
    expert_values: int = 0
    tensors: int = 0
    largest: int = 0
    forward: Cost = Cost()
    backward: dict[str, Cost] = field(default_factory=dict)
    kept: dict[str, Cost] = field(default_factory=dict)
    forward_bytes: dict[str, tuple[Cost, ...]] = field(default_factory=dict)
    backward_bytes: dict[str, tuple[Cost, ...]] = field(default_factory=dict)
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
    """The cost of the optimizer's step.

    Attributes:
        fixed, per_value: seconds per tensor and per value.
        state: values kept per parameter.
        working: bytes of temporary memory per value of the tensor that it steps.
    """

    fixed: float = 0.0
    per_value: float = 0.0
    state: float = 2.0
    working: float = 0.0


@dataclass(frozen=True)
class Machine:
    """A set of identical hosts.

    Attributes:
        device: cpu or cuda.
        cores: of a host; with GPUs, its number of GPUs.
        per_host: processes started on a host.
        memory_bytes: of a process; with `shared_memory` of one that has all of a host's `per_host` processes beside it, and
            more with fewer.
        process_bytes: resident memory of a process that trains nothing yet: Python, torch, and buffers of the group.
        slowdown: (processes computing on a host at once, slowdown of each), from 1 process up.
        inside, between: links inside a host and between hosts.
    """

    device: str = "cpu"
    cores: int = 1
    per_host: int = 1
    memory_bytes: float = 0.0
    shared_memory: bool = False
    process_bytes: float = 0.0
    slowdown: tuple[tuple[int, float], ...] = ((1, 1.0),)
    inside: Link = FREE
    between: Link = FREE

    def memory_of(self, processes: int) -> float:
        """Bytes that each of so many processes may have; 0: any number."""
        beside = min(self.per_host, processes)
        return self.memory_bytes * self.per_host / beside if self.shared_memory else self.memory_bytes

    def slower(self, active: float) -> float:
        """Slowdown of each of `active` processes against one alone: interpolated between measurements, and beyond
        them proportional to the load on the cores."""
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
    """The input of all predictions.

    Attributes:
        first, layers, last, loss: the pieces of the model in order. A model that cannot be split is all in `last`.
        step: seconds of a step that no plan changes.
        overhead: seconds per use of a way of splitting, beyond its computation and messages (see
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


def write(profile: Profile, path: Path) -> None:
    write_durably(path, (json.dumps(dataclasses.asdict(profile), indent=2) + "\n").encode())


def read(path: Path) -> Profile:
    """The profile in the file `path`.

    Raises:
        JobError: no such file, no JSON, or not what a profile has; says where and what was expected.
    """
    return options.read(Profile, read_json(path), str(path))
