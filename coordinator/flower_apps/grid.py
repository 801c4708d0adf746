"""Flower's `Grid` over clients of this machine, which worker processes run.

Replies come in the order of the messages, not of their arrival. An app that fixes its own seeds gives the same result, bit for bit,
with any number of workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid

from coordinator.flower_apps import wire
from coordinator.flower_apps.dispatcher import Dispatcher, Node, Task
from coordinator.flower_internals import (
    SUPERLINK_NODE_ID,
    SYSTEM_MESSAGE_TYPE,
    ErrorCode,
    make_run,
    set_message_id,
)

FIRST_NODE_ID = 1_000_000_000
"""Node id of partition 0; the others follow. Low numbers have a meaning in Flower."""


def make_nodes(clients: int) -> dict[int, Node]:
    """All clients by node id, with the `node_config` that Flower's simulation gives them."""
    return {
        FIRST_NODE_ID + partition: Node(partition, {"partition-id": partition, "num-partitions": clients})
        for partition in range(clients)
    }


class LocalGrid(Grid):  # type: ignore[misc]  # Flower's types are not followed
    """A grid that any thread may use, as Flower's own code for apps with a `server_fn` does. `clock`: Unix time."""

    def __init__(
        self,
        nodes: Iterable[int],
        dispatcher: Dispatcher,
        run_id: int,
        run_config: dict[str, Any],
        clock: Callable[[], float],
    ) -> None:
        self._nodes = list(nodes)
        self._known = frozenset(self._nodes)
        self._dispatcher = dispatcher
        self._run = make_run(run_id, run_config)
        self._clock = clock
        self._tasks: dict[str, Task] = {}
        self._numbers = count(1)

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Ids of the messages sent; as in Flower, one to an unknown node is logged and left out."""
        return [message_id for message_id, _ in self._push(messages)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are there. A reply is given once; unknown and expired ids are answered with an error."""
        self._dispatcher.check()
        pulled = (self._pull(message_id) for message_id in dict.fromkeys(message_ids))
        return [reply for reply in pulled if reply is not None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        pushed = self._push(messages)
        self._dispatcher.wait([task for _, task in pushed], timeout)
        return self.pull_messages([message_id for message_id, _ in pushed])

    def _push(self, messages: Iterable[Message]) -> list[tuple[str, Task]]:
        pushed = []
        for message in messages:
            metadata = message.metadata
            set_message_id(message, str(next(self._numbers)))
            if metadata.reply_to_message_id != "" or metadata.ttl <= 0:
                raise ValueError(f"Invalid message: {message}")
            if metadata.dst_node_id not in self._known:
                logging.getLogger("flwr").error(
                    "Invalid destination node ID for Message: %s", metadata.dst_node_id
                )
                continue
            # Encoded now: the app may go on to change the content for the next message.
            pushed.append((metadata.message_id, Task(message, *wire.encode_message(message))))
        self._tasks.update(pushed)
        self._dispatcher.submit([task for _, task in pushed])
        return pushed

    def _pull(self, message_id: str) -> Message | None:
        task = self._tasks.get(message_id)
        if task is None:
            return self._answer_unknown(message_id)
        if task.expires_at < self._clock():
            del self._tasks[message_id]
            return Message(self._dispatcher.expiry(), reply_to=task.message)
        if task.reply is not None:
            del self._tasks[message_id]
        return task.reply

    def _answer_unknown(self, message_id: str) -> Message:
        metadata = Metadata(
            run_id=self._run.run_id,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=SUPERLINK_NODE_ID,
            reply_to_message_id=message_id,
            group_id="",
            created_at=self._clock(),
            ttl=0,
            message_type=SYSTEM_MESSAGE_TYPE,
        )
        reason = "no message of this id was sent, or its reply was already pulled"
        return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, reason), metadata=metadata)
