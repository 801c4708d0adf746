"""Batches as frames between processes (`edge_client.processes.channel`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.serving.generation.batch import Batch, Group


def to_frame(batch: Batch) -> tuple[dict[str, Any], list[bytes]]:
    """Values and byte strings of a frame."""
    groups = [
        {"start": group.start, "tokens": group.tokens, "context": group.context, "sequences": group.sequences}
        for group in batch.groups
    ]
    arrays = [batch.tokens, batch.positions, batch.slots, batch.outputs]
    arrays += [group.tables for group in batch.groups]
    return {"groups": groups}, [array.tobytes() for array in arrays]


def from_frame(values: dict[str, Any], blobs: Sequence[bytes]) -> Batch:
    """The batch of `to_frame`."""
    # copies, because PyTorch warns of arrays that cannot be written to
    tokens, positions, slots, outputs, *tables = (np.frombuffer(bytearray(blob), np.int64) for blob in blobs)
    groups = tuple(
        Group(group["start"], group["tokens"], group["context"], table.reshape(group["sequences"], -1))
        for group, table in zip(values["groups"], tables, strict=True)
    )
    return Batch(tokens, positions, slots, groups, outputs)
