"""An update as the file of a result holds it."""

from __future__ import annotations

from edge_client.wire import arrays
from edge_client.wire.arrays import (
    DELTA,
    FilePayload,
    Payload,
    ResultHeader,
    StoredArrays,
    result_header,
)
from strategies.params import unflatten
from strategies.update import Update


def read_accepted(payload: Payload) -> Update:
    """The update in a payload that was checked before.

    Raises:
        arrays.Malformed: the payload has changed since.
    """
    header = arrays.read_header(payload)
    return update_of(StoredArrays(payload, header), result_header(header.values))


def update_of(tensors: StoredArrays, result: ResultHeader) -> Update:
    """The update with these arrays. Of a file they are read on access."""
    on_disk = isinstance(tensors.payload, FilePayload)
    streams = dict(unflatten(tensors if on_disk else dict(tensors)))
    return Update(
        delta=streams.pop(DELTA),
        num_examples=result.num_examples,
        num_steps=result.num_steps,
        train_loss=result.train_loss,
        extras=streams,
    )
