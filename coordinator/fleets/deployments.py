"""Deployments: the live runs, as the fleet and the device API need to know them.

A run is deployed once its model is prepared, and until it ends. What is kept here is what decides who may
take part, and what every task of the run says; rounds and tasks themselves are rows of the database.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_client.wire.device import BlobRef, ModelRef, RuntimeName


@dataclass(frozen=True)
class Selection:
    """Which devices a run wants. What is left empty admits all.

    Attributes:
        groups: one of these, as given with the enrolment token.
        labels: all of these, as the device reports them.
        device_classes: one of these.
        memory_bytes: what a training process must have at least.
    """

    groups: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    device_classes: tuple[str, ...] = ()
    memory_bytes: int = 0


@dataclass(frozen=True)
class Deployment:
    """One live run.

    Attributes:
        run: its id.
        dataset: logical name, which each device maps to data of its own.
        artifact, manifest: for the litert runtime; None where it is not allowed.
        runtimes: allowed ones, the preferred first.
        quorum: clients without which a round is not worth beginning.
    """

    run: str
    run_name: str
    dataset: str
    model: ModelRef
    runtimes: tuple[RuntimeName, ...]
    artifact: BlobRef | None = None
    manifest: BlobRef | None = None
    selection: Selection = field(default_factory=Selection)
    quorum: int = 1


class Deployments:
    """The live runs of this process, in the order they were added. Callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_run: dict[str, Deployment] = {}

    def add(self, deployment: Deployment) -> None:
        """Makes a run known, or replaces what was known of it."""
        with self._lock:
            self._by_run[deployment.run] = deployment

    def remove(self, run: str) -> None:
        """Forgets a run; one that is not known is no matter."""
        with self._lock:
            self._by_run.pop(run, None)

    def get(self, run: str) -> Deployment | None:
        with self._lock:
            return self._by_run.get(run)

    def active(self) -> tuple[Deployment, ...]:
        with self._lock:
            return tuple(self._by_run.values())
