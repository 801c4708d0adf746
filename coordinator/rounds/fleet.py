"""The Fleet protocol: carries tasks to clients and their results back.

A fleet has its own clock, which starts at zero with each `submit`: virtual seconds in a simulation, real ones with
devices. It knows nothing of strategies. The fleet passes every result through `rounds.intake.check` where the result
arrives: in the worker that trained a simulated client, or in the device API before the update is acknowledged.

A fleet that trains clients itself need not hand over each update. If the round's `Terms` say how updates are summed, it may
answer with the figures of an accepted update (`Measured`) and hand over one sum of a whole canonical block (`BlockSum`). So does a
fleet with relays on other machines, with what each of them has folded (`strategies.update.RelayPart`), and a fleet that knows the means of
groups only, with these (`strategies.update.GroupMean`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coordinator.rounds.closing import Closing
from coordinator.rounds.plan import Task
from edge_client.relay.expected import Expected
from edge_client.relay.intake import Rejection
from edge_client.wire import arrays
from strategies.params import Params, Tensors, l2_norm
from strategies.summation import Summation
from strategies.summation_tree import PartialSum
from strategies.update import GroupMean, RelayPart, Update


class Stopped(Exception):
    """The run was cancelled, or the process is ending; the open round stays open."""


@dataclass(frozen=True)
class Model:
    """The model that all tasks of a round start from, ready to send.

    Attributes:
        params: all tensors, including frozen ones.
        streams: further tensors that the client rule broadcasts.
        base: SHA-256 of the encoded params.
        payload_bytes: download size of one client.
        bytes_by_client: download size of each client of which it is another: it gets a narrower model (`strategies.slices`), another one,
            or what it lacks of this one (`rounds.downlink`).
        class_models: params of each device class whose model is another one.
    """

    params: Tensors
    streams: Mapping[str, Tensors]
    base: str
    payload_bytes: int
    bytes_by_client: Mapping[str, int] = field(default_factory=dict)
    class_models: Mapping[str, Tensors] = field(default_factory=dict)

    def download_bytes(self, client: str) -> int:
        """Download size of a client."""
        return self.bytes_by_client.get(client, self.payload_bytes)

    def total_download_bytes(self, tasks: Sequence[Task]) -> int:
        """Download size of all clients of a cohort."""
        if not self.bytes_by_client:
            return len(tasks) * self.payload_bytes
        return sum(self.download_bytes(task.message.client) for task in tasks)


@dataclass(frozen=True)
class Terms:
    """The rules of one round.

    Attributes:
        expected: what a result must contain.
        closing: when the round closes.
        population: clients that could have been chosen.
        summation: how a fleet may sum the updates of a block; None: each update is needed.
        in_blocks: whether a simulation trains the clients of a block together though it sums none, because the last bits of their
            updates may depend on each other.
    """

    expected: Expected
    closing: Closing
    population: int
    summation: Summation | None = None
    in_blocks: bool = False


@dataclass(frozen=True)
class Measured:
    """An accepted update whose tensors a `BlockSum` holds. Its values are those before the round's limits.

    Attributes:
        norm: L2 norm of the delta.
        streams: L2 norms of the other streams.
    """

    num_examples: int
    num_steps: int
    norm: float
    streams: Mapping[str, float]

    @staticmethod
    def of(update: Update) -> Measured:
        """The figures of an update that is at hand."""
        streams = {name: l2_norm(tensors) for name, tensors in update.extras.items()}
        return Measured(update.num_examples, update.num_steps, update.norm, streams)


@dataclass(frozen=True)
class Answer:
    """A client's result after the intake's check. `seconds` on the fleet's clock. `received_bytes`: what it got besides the model.

    The tensors of an accepted update may be on disk; then they are read on access.
    """

    task: Task
    verdict: Update | Measured | Rejection
    payload_bytes: int
    seconds: float
    received_bytes: int = 0


@dataclass(frozen=True)
class Accepted:
    """Accepted updates of several clients, in the order of their answers, whose tensors `BlockSum`s hold: so many `Answer`s, by column.

    Attributes:
        tasks: of the whole cohort by position; `positions`: those of the clients.
    """

    tasks: Sequence[Task]
    positions: Sequence[int]
    clients: Sequence[str]
    payload_bytes: Sequence[int]
    num_examples: Sequence[int]
    num_steps: Sequence[int]
    norms: Sequence[float]
    seconds: Sequence[float]

    def answers(self) -> Iterator[Answer]:
        """The answers one by one."""
        for index, position in enumerate(self.positions):
            measured = Measured(self.num_examples[index], self.num_steps[index], self.norms[index], {})
            yield Answer(self.tasks[position], measured, self.payload_bytes[index], self.seconds[index])


@dataclass(frozen=True)
class BlockSum:
    """The sum of all accepted updates of a block, or of those up to `last_block`, that are not excluded; follows their answers."""

    block: int
    partial: PartialSum
    last_block: int


@dataclass(frozen=True)
class Silence:
    """A client that did not answer, with the reason: it failed, left, or was never reached."""

    task: Task
    reason: str
    seconds: float


Result = Answer | Accepted | Silence | BlockSum | RelayPart | GroupMean
"""What a fleet yields."""


def singly(results: Iterable[Result]) -> Iterator[Answer | Silence | BlockSum | RelayPart | GroupMean]:
    """The same results with every answer for itself."""
    for result in results:
        if isinstance(result, Accepted):
            yield from result.answers()
        else:
            yield result


@dataclass(frozen=True)
class OpenRound:
    """A round with its tasks: a new one, or one that was open when the process died.

    `weight_limit`: as in `relay.expected.Expected`, fixed when the round is opened.
    """

    tasks: Sequence[Task]
    population: int
    weight_limit: int | None = None


class Fleet(Protocol):
    """Carries tasks to clients. Every method may raise `Stopped`."""

    def find_open_round(self, round_number: int) -> OpenRound | None:
        """This round if it was submitted but not committed; submitting it again continues it."""

    def clients(self, wanted: int) -> Sequence[str]:
        """Names of all clients that can take part, in a fixed order.

        A fleet of devices waits for `wanted` of them; when its patience ends, a quorum is enough.
        """

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        """Number of examples by client, for those clients that report one."""

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        """Prepares params for sending, and releases those prepared before."""

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        """Sends tasks; the fleet's clock starts at zero, or continues if the round was open before."""

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        """Answers in the order they arrive, up to the deadline; ends early when none is outstanding.

        `excluded`: positions whose updates are left out of sums of blocks.

        A round that was open before first yields the updates accepted so far. No answer is accepted after the one that closes the round. Every
        update that was acknowledged to its client is among them, unless a disk has damaged it since.

        A second call before `cancel` yields the same answers again; a simulation trains again for it.
        """

    def simulated_seconds(self) -> float | None:
        """Virtual time that the round took, waiting for clients included; None in real time."""

    def cancel(self, tasks: Sequence[Task]) -> None:
        """Cancels tasks; results that still arrive are dropped."""

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        """New state of accepted clients that the coordinator must save with the round.

        Clients that were not accepted keep their old state. Empty for fleets whose clients store their own state.
        """

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None:
        """On resume, restores what `client_state` returned over all rounds."""


class WrappedFleet:
    """A fleet that leaves everything to another one; a subclass changes what it needs to."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def find_open_round(self, round_number: int) -> OpenRound | None:
        return self._fleet.find_open_round(round_number)

    def clients(self, wanted: int) -> Sequence[str]:
        return self._fleet.clients(wanted)

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return self._fleet.declared_examples(clients)

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        return self._fleet.model(params, streams)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        self._fleet.submit(tasks, model, terms)

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        return self._fleet.results(excluded)

    def simulated_seconds(self) -> float | None:
        return self._fleet.simulated_seconds()

    def cancel(self, tasks: Sequence[Task]) -> None:
        self._fleet.cancel(tasks)

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        return self._fleet.client_state(accepted)

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None:
        self._fleet.restore(states)


def encode_model(params: Tensors, streams: Mapping[str, Tensors]) -> Model:
    """A model whose `base` is the hash of its params as encoded here."""
    encoded = arrays.encode(params)
    extra = sum(value.nbytes for tensors in streams.values() for value in tensors.values())
    return Model(params, streams, arrays.sha256(encoded), len(encoded) + extra)
