"""Deployments: the live runs, as the fleet and the device API see them.

A run is deployed from the moment its model is prepared until it ends. A deployment holds what decides which devices may
take part, and what is the same in every task of the run; rounds and tasks are rows of the database.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.project_names import DEFAULT_PROJECT
from edge_client.wire.device import BlobRef, ModelRef, RuntimeName, TaskKind

if TYPE_CHECKING:
    from strategies.privacy.noise.distributed import GroupNoise


@dataclass(frozen=True)
class Selection:
    """Which devices a run accepts. An empty field accepts all.

    Attributes:
        groups: accepted groups; the enrolment token sets a device's group.
        labels: all of these must match what the device reports.
        device_classes: accepted classes.
        memory_bytes: least memory of a training process.
    """

    groups: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    device_classes: tuple[str, ...] = ()
    memory_bytes: int = 0


@dataclass(frozen=True)
class ModelClass:
    """Devices of a run that train the same width of its model, by the memory that each offers (HeteroFL: Diao 2021).

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


def class_for(classes: Iterable[ModelClass], memory_bytes: int) -> ModelClass | None:
    """The widest class that a device with so much memory can be in, None if there is none. `classes`: the widest first."""
    return next((each for each in classes if memory_bytes >= each.memory_bytes), None)


@dataclass(frozen=True)
class Relaying:
    """How relays fold the updates of a run: with which strategy, and how many relays there are to be."""

    relays: int
    strategy: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class SecureSums:
    """How the updates of a run are added up by secure aggregation.

    Attributes:
        seed: of the run; the groups of each round follow from it.
        clip_norm: largest L2 norm of an update.
        group_size, threshold, value_bits: as in `[privacy]`.
        noise: that clients add inside the sums; None: none.
    """

    seed: int
    clip_norm: float
    group_size: int
    threshold: float
    value_bits: int
    noise: GroupNoise | None = None


@dataclass(frozen=True)
class Deployment:
    """One live run.

    Attributes:
        run: its id.
        dataset: logical name, which each device maps to its own data.
        artifact, manifest: for the litert runtime; None if it is not allowed.
        schema: how devices read a table, and what images and texts are compared with; None if nobody knows it.
        reads_by_schema: whether devices cannot read their data without the schema.
        changes_steps: whether local steps have momentum or clipped gradients, or are AdamW's, which older devices would leave out.
        has_code: whether devices write their updates by a code.
        changes_updates: whether devices scale down their updates or add noise to them before they send them.
        minimum_separation: rounds from one in which a device takes part to the next, at the earliest; 0 and 1: it may take part in all.
        runtimes: allowed runtimes, the preferred one first.
        personal_rule: the client rule of a strategy by which each device has a model of its own, which evaluation tasks score; else
            empty.
        classes: of devices that train models of different width, the widest first; empty: all train the run's own.
        quorum: least number of clients to start a round with.
        kind: of the tasks that a device must be able to do; `statistics` need no runtime and no model.
        project: whose devices may take part.
        relaying: None: devices send their updates to the coordinator.
        secure: None: devices send their updates in the open.
    """

    run: str
    run_name: str
    dataset: str
    model: ModelRef
    runtimes: tuple[RuntimeName, ...]
    artifact: BlobRef | None = None
    manifest: BlobRef | None = None
    schema: BlobRef | None = None
    reads_by_schema: bool = False
    changes_steps: bool = False
    has_code: bool = False
    changes_updates: bool = False
    minimum_separation: int = 0
    personal_rule: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[ModelClass, ...] = ()
    selection: Selection = field(default_factory=Selection)
    quorum: int = 1
    kind: TaskKind = "train"
    project: str = DEFAULT_PROJECT
    relaying: Relaying | None = None
    secure: SecureSums | None = None

    def require_class(self, name: str) -> ModelClass:
        """Its class of this name."""
        return next(each for each in self.classes if each.name == name)


class Deployments:
    """The live runs of this process, in the order they were added. Callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_run: dict[str, Deployment] = {}

    def add(self, deployment: Deployment) -> None:
        """Adds a run, or replaces its deployment."""
        with self._lock:
            self._by_run[deployment.run] = deployment

    def remove(self, run: str) -> None:
        """Removes a run if it is there."""
        with self._lock:
            self._by_run.pop(run, None)

    def active(self) -> tuple[Deployment, ...]:
        with self._lock:
            return tuple(self._by_run.values())
