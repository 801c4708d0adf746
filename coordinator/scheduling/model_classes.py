"""Model classes: devices of a run that train the same width of its model, by the memory that each offers (HeteroFL: Diao 2021).

A narrower class gets its part of the params, which is cut once a round, and its own model and artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from coordinator.rounds import intake
from coordinator.rounds.records import Expected
from edge_client.wire.device import BlobRef, ModelRef
from strategies.params import Tensors
from strategies.slices import Shapes, take


@dataclass(frozen=True)
class ModelClass:
    """One class.

    Attributes:
        width: of its model; 1: it trains the run's own.
        memory_bytes: that a device needs to be in it.
        model: what it builds with torch.
        shapes: of all its params, leading parts of the whole model's.
        artifact, manifest: for LiteRT; None if it is not allowed.
    """

    name: str
    width: float
    memory_bytes: int
    model: ModelRef
    shapes: Mapping[str, tuple[int, ...]]
    artifact: BlobRef | None = None
    manifest: BlobRef | None = None

    @property
    def is_narrower(self) -> bool:
        """Whether its devices train a narrower model than the run's own."""
        return self.width < 1


@dataclass(frozen=True)
class Part:
    """What a round gives the devices of a narrower class: its part of the params, and the largest result."""

    params: BlobRef
    result_limit_bytes: int


def class_for(classes: Iterable[ModelClass], memory_bytes: int) -> ModelClass | None:
    """The widest class that a device with so much memory can be in, None if there is none. `classes`: the widest first."""
    return next((each for each in classes if memory_bytes >= each.memory_bytes), None)


def shapes_by_class(classes: Iterable[ModelClass]) -> dict[str, Shapes]:
    """The shapes of narrower params by class, for `Expected.narrower`."""
    return {each.name: each.shapes for each in classes if each.is_narrower}


def cut(
    classes: Iterable[ModelClass], params: Tensors, expected: Expected, store: Callable[[Tensors], BlobRef]
) -> dict[str, Part]:
    """The part of `params` for each narrower class. `expected`: what a round's results contain. `store`: makes a blob."""
    return {
        each.name: Part(
            store(take(params, each.shapes)), intake.expected_of(expected, each.name).payload_limit_bytes
        )
        for each in classes
        if each.is_narrower
    }
