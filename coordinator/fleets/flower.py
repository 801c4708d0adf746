"""The Flower fleet: rounds on the nodes of any `flwr.serverapp.Grid`, Flower's simulation or a SuperLink with SuperNodes.

    clients   nodes that have named their client            DESCRIBE to every new node
    submit    sends the tasks                               TRAIN to the cohort's nodes
    results   updates as they arrive                        replies, pulled until the round closes
    cancel    forgets the others                            nothing: Flower cannot take a message back

A client is named by its part of the data, not by its node: a node gets a new id with each start. Updates lie in files of
`folder` while their round lasts. The state of client rules is kept here and goes with each task, because a node loses
its own with the Flower run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from coordinator.errors import UserError
from coordinator.fleets import flower_messages as messages
from coordinator.fleets.flower_messages import BadReply, TrainRequest
from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.rounds import intake
from coordinator.rounds.fleet import Answer, Model, OpenRound, Silence, Terms, encode_model
from coordinator.rounds.plan import Task
from edge_client.wire import arrays
from edge_client.wire.arrays import FilePayload
from strategies.params import Params, Tensors, flatten, unflatten
from strategies.update import Update

POLL_SECONDS = 0.2
"""How often replies are pulled. Flower's own `send_and_receive` waits 3 s, longer than a small round takes."""

_DESCRIBE_SECONDS = 3600.0
"""How long a node may take to describe itself: it loads the data first."""

_ASK_AGAIN_SECONDS = 30.0
"""Time after which a node is queried again if Flower got no answer from it."""


@dataclass(frozen=True)
class Federation:
    """What the nodes are to do, and how long to wait for them.

    Attributes:
        clients: all clients, in their canonical order, which is that of their parts of the data.
        fingerprint: of the data set, a node with another one is refused; empty if nodes train on rows of their own.
        schema: by which nodes read rows of their own, else None.
        model: description of the model, as workers take it.
        artifact: the files `tflite` and `manifest` for litert clients.
        quorum: clients with which a round may begin once patience has ended.
    """

    clients: Sequence[SimulatedClient]
    fingerprint: str
    schema: Mapping[str, Any] | None
    model: Mapping[str, Any]
    artifact: Mapping[str, bytes]
    quorum: int
    patience_seconds: float


@dataclass(frozen=True)
class Clock:
    """Time as the fleet sees it; a test has its own."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class FlowerFleet:
    """Implements `coordinator.rounds.fleet.Fleet` over a Grid. `folder`: for updates; it exists and is empty."""

    def __init__(
        self,
        grid: Grid,
        federation: Federation,
        folder: Path,
        *,
        note: Callable[[str], None] = lambda line: None,
        clock: Clock | None = None,
    ) -> None:
        self._grid = grid
        self._federation = federation
        self._clients = {client.name: client for client in federation.clients}
        self._folder = folder
        self._note = note
        self._clock = clock or Clock()
        self._nodes = _Nodes(grid, federation, note, self._clock)
        self._present: int | None = None
        self._terms: Terms | None = None
        self._began = 0.0
        self._waiting: dict[str, Task] = {}
        self._results: list[Answer | Silence] = []
        self._client_states: dict[str, dict[str, Params]] = {}
        self._renewed: dict[str, dict[str, Params]] = {}

    def find_open_round(self, round_number: int) -> OpenRound | None:
        return None  # an open round dies with the Flower run; the next run draws the same round again

    def clients(self, wanted: int) -> Sequence[str]:
        """Waits for all clients, because which ones a round draws depends on how many there are."""
        enough = self._present or len(self._clients)
        quorum = min(self._federation.quorum, enough)
        end = self._clock.monotonic() + self._federation.patience_seconds
        noted = False
        while True:
            self._nodes.look()
            present = [name for name in self._clients if name in self._nodes.by_client]
            left = end - self._clock.monotonic()
            if len(present) >= enough:
                return present
            if left <= 0 and len(present) >= quorum:
                # Later rounds do not wait again for clients that a round has waited for in vain.
                self._present = len(present)
                self._note(
                    f"begins with {len(present)} of {len(self._clients)} clients: the others are not there"
                )
                return present
            if not noted:
                self._note(f"waiting for nodes: {len(present)} of {enough} clients are there")
                noted = True
            self._clock.sleep(POLL_SECONDS)

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return {name: self._nodes.examples[name] for name in clients}

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        return encode_model(params, streams)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        if tasks and not self._nodes.by_client:  # nobody has requested the clients yet
            self.clients(len(tasks))
        for path in self._folder.iterdir():
            path.unlink()
        self._terms = terms
        self._results, self._waiting, self._renewed = [], {}, {}
        self._began = self._clock.monotonic()
        params, streams = arrays.encode(model.params), arrays.encode(flatten(model.streams))
        for task in tasks:
            client = self._clients[task.message.client]
            artifact = self._federation.artifact if client.runtime == "litert" else {}
            request = TrainRequest(
                task.message,
                client.runtime,
                self._federation.model,
                self._federation.schema,
                params,
                streams,
                arrays.encode(flatten(self._client_states.get(client.name, {}))),
                **artifact,
            )
            node = self._nodes.by_client.get(client.name)
            sent = None if node is None else self._send(node, request, terms.closing.deadline_seconds)
            if sent is None:
                self._results.append(Silence(task, "its node is gone", self._seconds()))
            else:
                self._waiting[sent] = task

    def results(self, excluded: Collection[int] = ()) -> Iterator[Answer | Silence]:
        assert self._terms is not None  # submitted
        closing, accepted, at = self._terms.closing, 0, 0
        while True:
            for result in self._results[at:]:
                at += 1
                yield result
                accepted += isinstance(result, Answer) and isinstance(result.verdict, Update)
                if closing.is_complete(accepted):
                    return
            if not self._waiting:
                return
            seconds = self._seconds()
            if not closing.is_past(seconds):
                self._pull(seconds)
            if len(self._results) == at and self._waiting:
                if seconds >= closing.deadline_seconds:
                    self._give_up(closing.deadline_seconds)
                else:
                    self._clock.sleep(min(POLL_SECONDS, closing.deadline_seconds - seconds))

    def simulated_seconds(self) -> None:
        return None

    def cancel(self, tasks: Sequence[Task]) -> None:
        gone = {task.position for task in tasks}
        self._waiting = {sent: task for sent, task in self._waiting.items() if task.position not in gone}

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        changed = {name: self._renewed[name] for name in accepted if self._renewed.get(name)}
        self._client_states |= changed
        return changed

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None:
        self._client_states = {client: dict(streams) for client, streams in states.items()}

    def _seconds(self) -> float:
        return self._clock.monotonic() - self._began

    def _send(self, node: int, request: TrainRequest, deadline_seconds: float) -> str | None:
        """Sends one message at a time: together the messages of a large cohort may exceed Flower's limit of a request."""
        message = Message(
            request.to_record(), node, messages.TRAIN, ttl=deadline_seconds, group_id=str(request.task.round)
        )
        return next(iter(self._grid.push_messages([message])), None)

    def _pull(self, seconds: float) -> None:
        """Takes what has arrived, by position."""
        arrived = [
            (self._waiting.pop(sent), reply)
            for reply in self._grid.pull_messages(list(self._waiting))
            if (sent := reply.metadata.reply_to_message_id) in self._waiting
        ]
        for task, reply in sorted(arrived, key=lambda each: each[0].position):
            self._results.append(self._take(task, reply, seconds))

    def _take(self, task: Task, reply: Message, seconds: float) -> Answer | Silence:
        assert self._terms is not None
        if (problem := messages.failure(reply)) is not None:
            return Silence(task, problem, seconds)
        try:
            upload, state = messages.read_upload(reply)
            renewed = unflatten(arrays.decode(state))
        except (BadReply, arrays.Malformed) as error:
            return Silence(task, str(error), seconds)
        path = self._folder / f"{task.message.round}-{task.position}.safetensors"
        path.write_bytes(upload)
        verdict = intake.check(FilePayload(path), task, self._terms.expected)
        self._renewed[task.message.client] = renewed
        return Answer(task, verdict, len(upload), seconds)

    def _give_up(self, seconds: float) -> None:
        for task in self._waiting.values():
            self._results.append(Silence(task, "not done by the deadline", seconds))
        self._waiting = {}


class _Nodes:
    """The nodes of a Grid, by the client that each is."""

    def __init__(self, grid: Grid, federation: Federation, note: Callable[[str], None], clock: Clock) -> None:
        self._grid, self._federation, self._note, self._clock = grid, federation, note, clock
        self._pending: dict[str, int] = {}
        self._failed: dict[int, float] = {}
        self._known: set[int] = set()
        self.by_client: dict[str, int] = {}
        self.examples: dict[str, int] = {}

    def look(self) -> None:
        """Queries new nodes, takes answers to earlier queries, and forgets nodes that are gone.

        Raises:
            UserError: a node is no client of this federation.
        """
        there = set(self._grid.get_node_ids())
        self.by_client = {name: node for name, node in self.by_client.items() if node in there}
        now = self._clock.monotonic()
        again = {node for node, since in self._failed.items() if now - since >= _ASK_AGAIN_SECONDS}
        self._failed = {node: since for node, since in self._failed.items() if node not in again}
        self._known = (self._known & there) - again
        for node in sorted(there - self._known):
            self._known.add(node)
            question = messages.question(node, self._federation.schema, _DESCRIBE_SECONDS)
            if (sent := next(iter(self._grid.push_messages([question])), None)) is not None:
                self._pending[sent] = node
        if self._pending:
            for reply in list(self._grid.pull_messages(list(self._pending))):
                self._take(self._pending.pop(reply.metadata.reply_to_message_id), reply)

    def _take(self, node: int, reply: Message) -> None:
        if (problem := messages.failure(reply)) is not None:
            self._note(f"node {node} cannot say which client it is: {problem}")
            self._failed[node] = self._clock.monotonic()
            return
        try:
            description = messages.read_description(reply)
        except BadReply as error:
            raise UserError(f"node {node} cannot take part: {error}") from None
        expected = len(self._federation.clients)
        if description.partitions != expected or not 0 <= description.partition < expected:
            raise UserError(
                f"node {node} holds part {description.partition} of {description.partitions}, but the experiment deals its rows "
                f"out to {expected} clients: give SuperNodes --node-config 'partition-id=… num-partitions={expected}', and Flower's "
                f"simulation --federation-config 'num-supernodes={expected}'"
            )
        if description.fingerprint != self._federation.fingerprint:
            raise UserError(
                f"node {node} has other data than the server (its fingerprint differs); are the files the same, and the versions?"
            )
        name = self._federation.clients[description.partition].name
        if (other := self.by_client.get(name)) is not None:
            self._note(
                f"nodes {other} and {node} both hold part {description.partition}; the later one counts"
            )
        self.by_client[name] = node
        self.examples[name] = description.examples
