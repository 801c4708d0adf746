"""What we need of Flower beyond its public API: the only module that imports private parts of `flwr`, written for 1.41.

Public are `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and `flwr.serverapp.strategy`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
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
        items[key] = array = object.__new__(_ReceivedArray)
        array.__dict__.update(dtype=dtype, shape=tuple(shape), stype=stype, data=data)
    return record


class _ReceivedArray(Array):  # type: ignore[misc]  # Flower's types are not followed
    """An `Array` that remembers what headers of `.npy` files say: for a small array numpy takes longer to read the header, which is
    Python source, than the values."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """`Array`, so that it equals one."""
        return Array

    def __reduce__(self) -> Any:
        return Array, (self.dtype, self.shape, self.stype, self.data)

    def numpy(self) -> npt.NDArray[Any]:
        end = 10 + int.from_bytes(self.data[8:10], "little")
        found = _read_header(bytes(self.data[:end])) if self.stype == "numpy.ndarray" else None
        if found is None or len(self.data) - end < found.size_bytes:
            values: npt.NDArray[Any] = super().numpy()  # which says what is wrong
            return values
        flat = np.frombuffer(self.data, found.dtype, math.prod(found.shape), end)
        return flat.reshape(found.shape, order="F" if found.is_fortran else "C").copy("K")


class _Header(NamedTuple):
    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@lru_cache(maxsize=4096)
def _read_header(header: bytes) -> _Header | None:
    """What the header of an `.npy` file of version 1 says; None if it is none, or the values are Python objects."""
    if not header.startswith(b"\x93NUMPY\x01\x00"):
        return None
    try:
        found = _Header(*np.lib.format.read_array_header_1_0(io.BytesIO(header[8:])))
    except ValueError:
        return None
    return None if found.dtype.hasobject or not found.dtype.itemsize else found
