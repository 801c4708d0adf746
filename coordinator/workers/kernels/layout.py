"""The batches of many clients side by side: which rows each client of a stack sees in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_client.train import schedule, seeding
from edge_client.train.trainer import TrainTask
from strategies.client_rules import Correction

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """The local training of every client of a stack; exactly one of `epochs` and `steps` is set.

    `mu`, `momentum`, `clip_grad_norm`: as `strategies.client_rules.Correction` has them.
    """

    batch_size: int
    lr: float
    epochs: int | None
    steps: int | None
    mu: float = 0.0
    momentum: float = 0.0
    clip_grad_norm: float = 0.0

    @staticmethod
    def of(task: TrainTask, correction: Correction) -> Work:
        """The work of clients with this task. `correction`: of any of them."""
        return Work(
            task.batch_size,
            task.lr,
            task.epochs,
            task.steps,
            correction.mu,
            task.momentum,
            task.clip_grad_norm,
        )


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
    equals: dict[int, list[int]] = {}
    for slot, client in enumerate(order.tolist()):
        equals.setdefault(lengths[client], []).append(slot)
    by_length = [order[slots].tolist() for slots in equals.values()]
    generators = seeding.generators([seeds[client] for clients in by_length for client in clients])
    for (length, slots), clients in zip(equals.items(), by_length, strict=True):
        count, per_epoch = counts[clients[0]], -(-length // width)
        epochs = _shuffle([parts[client] for client in clients], generators, -(-count // per_epoch))
        rows[:count, slots] = _cut(epochs, width)[:count]
        sizes[:count, slots] = width
        sizes[per_epoch - 1 : count : per_epoch, slots] = length - (per_epoch - 1) * width
    return Layout(order, rows, sizes, np.asarray(counts)[order])


def _shuffle(parts: Sequence[Rows], generators: Iterator[np.random.Generator], epochs: int) -> Rows:
    """The rows of clients that have equally many, in the order of each epoch, [epochs, clients, rows]."""
    shuffled = np.repeat(np.array(parts)[:, None], epochs, 1)
    # The clients end first, so that the generators of others stay.
    for orders, generator in zip(shuffled, generators, strict=False):
        for order in orders:
            generator.shuffle(order)  # as `permutation` shuffles its copy
    return shuffled.swapaxes(0, 1)


def _cut(epochs: Rows, width: int) -> Rows:
    """Batches [steps, clients, width] of epochs [epochs, clients, rows]."""
    passes, clients, length = epochs.shape
    per_epoch = -(-length // width)
    padded = np.empty((passes, clients, per_epoch * width), np.int64)
    padded[..., :length] = epochs
    padded[..., length:] = epochs[..., (per_epoch - 1) * width, None]
    cut = padded.reshape(passes, clients, per_epoch, width).transpose(0, 2, 1, 3)
    return cut.reshape(passes * per_epoch, clients, width)
