"""What we need of Flower beyond its public API: the only module that imports private parts of `flwr`, written for 1.41.

Public are `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and `flwr.serverapp.strategy`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, Message

# Codes of `flwr.app.Error`, which is public while its codes are not.
from flwr.common.constant import SUPERLINK_NODE_ID as SUPERLINK_NODE_ID  # the node id of a ServerApp
from flwr.common.constant import ErrorCode as ErrorCode
from flwr.supercore.constant import (
    SYSTEM_MESSAGE_TYPE as SYSTEM_MESSAGE_TYPE,
)  # of an answer to an unknown id

# `Grid.run` returns one, and Flower's own code for apps with a `server_fn` reads its `run_id`.
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity


def take_identity(run_id: int, node_id: int) -> None:
    """Says who this process is. `Message()` stamps it on every message, and refuses to work without it."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, node_id, 1


def make_run(run_id: int, config: dict[str, Any]) -> Any:
    """What `Grid.run` returns."""
    run = Run.create_empty(run_id)
    run.override_config = config
    return run


def set_message_id(message: Message, message_id: str) -> None:
    """Gives a message the id under which it was sent, as Flower's grids do. `Metadata` has no setter for it."""
    message.metadata.__dict__["_message_id"] = message_id


def make_array_record(arrays: Iterable[tuple[str, str, Iterable[int], str, bytes]]) -> ArrayRecord:
    """A record of arrays: (key, dtype, shape, stype, data) each. Equal to what the public constructors make, in a fifth of the time.

    They check every key and every field by itself, which takes longer than to move a small model between processes.
    """
    record = ArrayRecord()
    items = record.__dict__["_data"]
    for key, dtype, shape, stype, data in arrays:
        items[key] = array = object.__new__(Array)
        array.__dict__.update(dtype=dtype, shape=tuple(shape), stype=stype, data=data)
    return record
