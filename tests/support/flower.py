"""Flower's own strategies run in this process, as the reference for ours.

The whole of `Strategy.start` runs, through the public API, over a `Grid` whose nodes are functions. One thing
is private: `flwr.app.Message()` stamps every message with the identity of the process's task, which only
Flower's own launcher sets (flwr 1.41, `flwr.supercore.task_identity`); without it no message can be made.
Delete `take_identity` when a Message can be built outside a run.
"""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore.task_identity import TaskIdentity

Tensors = dict[str, np.ndarray]
Client = Callable[[int, Tensors], tuple[Tensors, int]]
"""(round, received params) -> (trained params, number of examples)."""


class FunctionGrid(Grid):
    """Nodes 1, 2, … are functions called in the order of their ids."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = dict(enumerate(clients, start=1))

    def get_node_ids(self) -> Iterable[int]:
        return list(self._clients)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return [self._reply(message) for message in sorted(messages, key=lambda m: m.metadata.dst_node_id)]

    def _reply(self, message: Message) -> Message:
        server_round = message.content["config"]["server-round"]
        received = {name: array.numpy() for name, array in message.content["arrays"].items()}
        trained, num_examples = self._clients[message.metadata.dst_node_id](server_round, received)
        content = RecordDict(
            {"arrays": record(trained), "metrics": MetricRecord({"num-examples": num_examples})}
        )
        return Message(content, reply_to=message)

    def set_run(self, run: object) -> None:
        raise NotImplementedError("no run here")

    @property
    def run(self) -> object:
        raise NotImplementedError("no run here")

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError("strategies build Message themselves")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError("strategies use send_and_receive")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError("strategies use send_and_receive")


def params_after_each_round(
    strategy: Strategy, initial: Tensors, clients: Sequence[Client], num_rounds: int
) -> list[Tensors]:
    """Global params after round 1, 2, … of one Flower run over all clients."""
    take_identity()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    seen: list[Tensors] = []

    def keep(server_round: int, arrays: ArrayRecord) -> None:
        seen.append({name: array.numpy().copy() for name, array in arrays.items()})

    strategy.start(
        grid=FunctionGrid(clients),
        initial_arrays=record(initial),
        num_rounds=num_rounds,
        train_config=ConfigRecord(),
        evaluate_fn=keep,
    )
    return seen[1:]


def record(tensors: Tensors) -> ArrayRecord:
    return ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in tensors.items()})


def take_identity() -> None:
    """Lets this process make messages."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
