"""A Grid whose nodes are functions in this process that answer at their own virtual times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from coordinator.fleets import flower_messages as messages
from coordinator.fleets.flower_messages import Description, TrainRequest
from coordinator.on_flower.client import make_client_app
from edge_client.data.examples import Examples
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from strategies.params import flatten, unflatten
from tests.support.flower import take_identity
from tests.support.quadratic import QuadraticRuntime

Node = Callable[[Message], Message]


@dataclass
class VirtualTime:
    """A clock that goes forward when someone sleeps, to the next of `due` if that is later."""

    now: float = 0.0
    due: dict[str, float] = field(default_factory=dict)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        following = [moment for moment in self.due.values() if moment > self.now]
        self.now = max(self.now + seconds, min(following, default=0.0))


class NodeGrid(Grid):
    """Nodes by id. `seconds`: how long each takes to train; a message of another type is answered at once."""

    def __init__(self, nodes: Mapping[int, Node], seconds: Mapping[int, float] | None = None) -> None:
        take_identity()
        self.nodes = dict(nodes)
        self.time = VirtualTime()
        self.sent: list[Message] = []
        self._seconds = seconds or {}
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.sent.append(message)
            message_id = f"message {len(self.sent)}"
            message.metadata.__dict__["_message_id"] = message_id  # as Flower's own grids do
            takes = self._seconds.get(node, 0.0) if message.metadata.message_type == "train" else 0.0
            self.time.due[message_id] = self.time.now + takes
            self._replies[message_id] = self.nodes[node](message)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = [each for each in message_ids if self.time.due.get(each, self.time.now + 1) <= self.time.now]
        for each in ready:
            del self.time.due[each]
        return [self._replies.pop(each) for each in ready]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError("the fleet pushes and pulls")

    def set_run(self, run: object) -> None:
        raise NotImplementedError("no run here")

    @property
    def run(self) -> object:
        raise NotImplementedError("no run here")

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError("the fleet builds its messages itself")


def quadratic_node(partition: int, partitions: int, *, a: float, c: float) -> Node:
    """A node of our protocol that trains on the parabola a/2 · (w - c)², with 8 rows of nothing."""
    rows = Examples(np.zeros((8, 1), np.float32), np.zeros(8, np.int32))

    def answer(message: Message) -> Message:
        if message.metadata.message_type == messages.DESCRIBE:
            return messages.describe(Description(partition, partitions, 8, "data"), message)
        request = TrainRequest.of(message)
        result = Trainer(QuadraticRuntime(a, c)).train(
            arrays.decode(request.params),
            TrainTask.of(request.task, unflatten(arrays.decode(request.streams))),
            rows,
            unflatten(arrays.decode(request.state)),
        )
        upload = arrays.encode_result(request.task, result.update)
        return messages.upload(upload, arrays.encode(flatten(result.client_state)), message)

    return answer


def app_grid(
    app: Path, nodes: int, run_config: Mapping[str, Any] | None = None, **node_config: str
) -> NodeGrid:
    """A Grid on whose nodes the ClientApp of the Flower app in `app` runs, in this process."""
    return NodeGrid(
        {
            partition + 1: app_node(app, partition, nodes, run_config, **node_config)
            for partition in range(nodes)
        }
    )


def app_node(
    app: Path,
    partition: int,
    partitions: int,
    run_config: Mapping[str, Any] | None = None,
    **node_config: str,
) -> Node:
    """A node on which the ClientApp of the Flower app in `app` runs."""
    take_identity()
    client_app = make_client_app(app)
    context = Context(
        run_id=1,
        node_id=partition + 1,
        node_config={"partition-id": partition, "num-partitions": partitions, **node_config},
        state=RecordDict(),
        run_config=dict(run_config or {}),
    )
    return lambda message: client_app(message, context)
