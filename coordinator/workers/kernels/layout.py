"""The batches of many clients side by side: which rows each client of a stack sees in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_client.train import schedule, seeding

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """The local training of every client of a stack; exactly one of `epochs` and `steps` is set."""

    batch_size: int
    lr: float
    epochs: int | None
    steps: int | None
    mu: float = 0.0


@dataclass(frozen=True)
class Layout:
    """A stack's batches, clients in order of falling numbers of steps, so that those still training come first.

    Attributes:
        order: index of the client in each slot.
        rows: int64 [steps, slots, width], rows of the data; a short batch is filled up with its own first row.
        sizes: int64 [steps, slots], examples of each batch; 0 once a client is done.
        steps: int64 [slots].
    """

    order: Rows
    rows: Rows
    sizes: Rows
    steps: Rows

    def active(self, step: int) -> int:
        """How many slots take this step."""
        return int(np.count_nonzero(self.sizes[step]))


def lay_out(parts: Sequence[Rows], seeds: Sequence[int], work: Work) -> Layout:
    """The batches that `schedule.batches` gives each client. `parts`: rows of each client, none empty."""
    lengths = [len(part) for part in parts]
    counts = [
        schedule.count(length, work.batch_size, epochs=work.epochs, steps=work.steps) for length in lengths
    ]
    order = np.argsort(-np.asarray(counts), kind="stable")
    width = min(work.batch_size, max(lengths))
    rows = np.zeros((max(counts), len(parts), width), np.int64)
    sizes = np.zeros(rows.shape[:2], np.int64)
    slots = {int(client): slot for slot, client in enumerate(order)}
    for client, generator in enumerate(seeding.generators(seeds)):
        slot, count = slots[client], counts[client]
        _fill(rows[:count, slot], sizes[:count, slot], parts[client], generator)
    return Layout(order, rows, sizes, np.asarray(counts)[order])


def _fill(rows: Rows, sizes: Rows, part: Rows, generator: np.random.Generator) -> None:
    """Writes one client's batches. `rows`: [its steps, width]."""
    count, width = rows.shape
    per_epoch = -(-len(part) // width)
    last = (per_epoch - 1) * width
    padded = np.empty(per_epoch * width, np.int64)
    for start in range(0, count, per_epoch):
        shuffled = generator.permutation(part)
        padded[: len(part)] = shuffled
        padded[len(part) :] = shuffled[last]
        rows[start : start + per_epoch] = padded.reshape(per_epoch, width)[: count - start]
    sizes[:] = width
    sizes[per_epoch - 1 :: per_epoch] = len(part) - last
