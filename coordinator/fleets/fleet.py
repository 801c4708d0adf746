"""The Fleet protocol: whatever carries tasks to clients and their results back.

A fleet has a clock of its own, which starts at zero with each `submit`: virtual seconds in a simulation,
real ones with devices. It knows nothing of strategies. Every result goes through `rounds.intake.check`, which
the fleet calls where the result arrives: in a worker, or in the device API before the update is acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.rounds.intake import Expected, Rejection
from coordinator.rounds.plan import Task
from edge_client.wire import arrays
from strategies.params import Params, Tensors
from strategies.update import Update


class Stopped(Exception):
    """The run was cancelled, or the process is ending; the open round is left as it is."""


@dataclass(frozen=True)
class Model:
    """What all tasks of a round start from, ready to be sent.

    Attributes:
        params: all tensors, frozen ones too.
        streams: what the client rule broadcasts along with them.
        base: SHA-256 of the encoded params.
        payload_bytes: what one client downloads.
    """

    params: Tensors
    streams: Mapping[str, Tensors]
    base: str
    payload_bytes: int


@dataclass(frozen=True)
class Terms:
    """The rules of one round.

    Attributes:
        expected: what a result must hold.
        wanted: accepted results that end the round.
        deadline_seconds: on the fleet's clock.
        population: clients that could have been chosen.
    """

    expected: Expected
    wanted: int
    deadline_seconds: float
    population: int


@dataclass(frozen=True)
class Answer:
    """A client's result and what the check made of it. `seconds` on the fleet's clock.

    An accepted update may be stored: then its tensors are read from disk when they are asked for.
    """

    task: Task
    verdict: Update | Rejection
    payload_bytes: int
    seconds: float


@dataclass(frozen=True)
class Silence:
    """A client that could not answer, with the reason: it failed, left, or was never reached."""

    task: Task
    reason: str
    seconds: float


@dataclass(frozen=True)
class Reopened:
    """A round that was under way when the process died: the tasks as they were given out.

    `weight_limit`: as in `intake.Expected`, decided when the round was opened.
    """

    tasks: tuple[Task, ...]
    population: int
    weight_limit: int | None = None


class Fleet(Protocol):
    """Carries tasks to clients. Every method may raise `Stopped`."""

    def reopened(self, round_number: int) -> Reopened | None:
        """This round, if it was submitted before and is not committed; submitting it again goes on with it."""

    def clients(self, wanted: int) -> Sequence[str]:
        """Names of all clients that can take part, in a fixed order.

        A fleet of devices waits until there are `wanted`; after its patience fewer will do, if a quorum is there.
        """

    def declared(self, clients: Sequence[str]) -> Mapping[str, int]:
        """How many examples these clients say they have, as far as they say so."""

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        """Params made ready to be sent; what they were made ready for before is let go."""

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        """Sends tasks out; the fleet's clock starts at zero, or goes on where the round was reopened."""

    def results(self) -> Iterator[Answer | Silence]:
        """Answers in the order they arrive, up to the deadline; ends early when none is outstanding.

        After a reopened round, first the updates that were accepted already. Never more than `wanted` accepted ones;
        every accepted update that a client was told of is among them, unless a disk has damaged it since.

        Asked again before `cancel`, once it has ended, it tells the same again: a simulation trains once more.
        """

    def cancel(self, tasks: Sequence[Task]) -> None:
        """These are no longer wanted; whatever still arrives of them is dropped."""

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        """New state of accepted clients that lives with the coordinator and must be saved with the round.

        Clients that were not accepted keep the state they had. Empty for fleets whose clients keep their own.
        """

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None:
        """Gives back, on resume, what `client_state` handed out over all rounds."""


def model_of(params: Tensors, streams: Mapping[str, Tensors]) -> Model:
    """A model that travels as it is encoded here, and is named by its hash."""
    encoded = arrays.encode(params)
    extra = sum(value.nbytes for tensors in streams.values() for value in tensors.values())
    return Model(params, streams, arrays.sha256(encoded), len(encoded) + extra)
