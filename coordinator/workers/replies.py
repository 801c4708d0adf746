"""Reads what the reply of a job says (`coordinator.workers.block.BlockReply`): the figures of answers, sums and updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.rounds import intake
from coordinator.rounds.fleet import BlockSum, Measured
from coordinator.rounds.intake import Rejection
from edge_client.relay.expected import Expected
from edge_client.wire import arrays
from edge_client.wire.arrays import DELTA
from strategies.params import Params, unflatten
from strategies.summation_tree import PartialSum
from strategies.update import Update


def is_accepted(figures: Sequence[Any]) -> bool:
    """Whether these are the figures of an accepted update."""
    return len(figures) > 2


def parse_figures(client: str, figures: Sequence[Any]) -> Measured | Rejection:
    """The verdict of one answer; of an accepted update that was summed."""
    if not is_accepted(figures):
        return Rejection(client, intake.parse_reason(figures[0]), figures[1])
    examples, steps, _, norm, streams = figures
    return Measured(examples, steps, norm, streams)


def parse_accepted(blob: bytes) -> npt.NDArray[np.float64]:
    """Figures of accepted updates that were summed: a line each of position, bytes, examples, steps and norm."""
    return np.frombuffer(blob, np.float64).reshape(-1, 5)


def parse_update(figures: Sequence[Any], blob: bytes) -> Update:
    """The accepted update that a job hands over singly."""
    examples, steps, loss, *_ = figures
    streams = unflatten(arrays.decode(blob))
    return Update(streams.pop(DELTA), examples, steps, loss, streams)


def parse_sum(figures: Sequence[Any], blob: bytes | memoryview, expected: Expected) -> BlockSum:
    """The sum in a worker's reply. `figures`: first and last block, weight, updates, examples and sum of the losses."""
    values = np.frombuffer(blob, np.float64)
    streams: dict[str, Params] = {}
    start = 0
    for name, shape in sorted(expected.shapes.items()):
        stop = start + math.prod(shape)
        stream, tensor = name.split("/", 1)
        streams.setdefault(stream, {})[tensor] = values[start:stop].reshape(shape)
        start = stop
    block, last_block, *sums = figures
    return BlockSum(block, PartialSum(streams.pop(DELTA), streams, *sums), last_block)
