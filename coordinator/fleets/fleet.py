"""The Fleet protocol: whatever carries tasks to clients and their results back.

A fleet has a clock of its own, which starts at zero with each `submit`: virtual seconds in a simulation,
real ones with devices. It knows nothing of strategies and judges nothing; the round engine does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.rounds.plan import Task
from strategies.params import Params


@dataclass(frozen=True)
class Model:
    """What all tasks of a round start from.

    Attributes:
        params: all tensors, frozen ones too.
        streams: what the client rule broadcasts along with them.
        base: SHA-256 of the encoded params.
        payload_bytes: what one client downloads.
    """

    params: Params
    streams: Mapping[str, Params]
    base: str
    payload_bytes: int


@dataclass(frozen=True)
class Delivery:
    """A client's answer, unjudged. `seconds` on the fleet's clock."""

    task: Task
    payload: bytes
    seconds: float


@dataclass(frozen=True)
class Silence:
    """A client that could not answer, with the reason: it failed, left, or was never reached."""

    task: Task
    reason: str
    seconds: float


class Fleet(Protocol):
    """Carries tasks to clients."""

    def clients(self) -> Sequence[str]:
        """Names of all clients, in a fixed order."""

    def submit(self, tasks: Sequence[Task], model: Model) -> None:
        """Sends tasks out; the fleet's clock starts at zero."""

    def results(self, until: float) -> Iterator[Delivery | Silence]:
        """Answers in the order they arrive, up to `until` seconds; ends early when none is outstanding."""

    def cancel(self, tasks: Sequence[Task]) -> None:
        """These are no longer wanted; whatever still arrives of them is dropped."""

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        """New state of accepted clients that lives with the coordinator and must be saved with the round.

        Clients that were not accepted keep the state they had. Empty for fleets whose clients keep their own.
        """

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None:
        """Gives back, on resume, what `client_state` handed out over all rounds."""
