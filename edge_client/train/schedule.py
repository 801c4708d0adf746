"""The batches of a client's local training: the same examples in the same order in every runtime."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class Order(Protocol):
    """Which rows each step takes, such as `batches`."""

    def __call__(
        self,
        num_examples: int,
        batch_size: int,
        *,
        epochs: int | None,
        steps: int | None,
        rng: np.random.Generator,
    ) -> Iterator[Indices]: ...


class Uniforms(Protocol):
    """A source of uniform values in [0, 1), such as `numpy.random.Generator`."""

    def random(self, size: int) -> npt.NDArray[np.float64]: ...


def batches(
    num_examples: int, batch_size: int, *, epochs: int | None, steps: int | None, rng: np.random.Generator
) -> Iterator[Indices]:
    """Index arrays of the local steps, each at most `batch_size` long.

    Every epoch is a fresh permutation of all examples; the last batch of an epoch may be shorter. With
    `steps` epochs repeat until that many batches were yielded. Exactly one of `epochs`, `steps` is set.
    """
    if (epochs is None) == (steps is None):
        raise ValueError("exactly one of epochs and steps must be set")
    for name, value in (
        ("num_examples", num_examples),
        ("batch_size", batch_size),
        ("epochs or steps", epochs or steps),
    ):
        if not value or value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    yielded = 0
    epoch = 0
    while epoch < epochs if epochs is not None else yielded < (steps or 0):
        order = rng.permutation(num_examples)
        for start in range(0, num_examples, batch_size):
            if steps is not None and yielded == steps:
                return
            yield order[start : start + batch_size]
            yielded += 1
        epoch += 1


def poisson_batches(
    num_examples: int, batch_size: int, *, epochs: int | None, steps: int | None, rng: Uniforms
) -> Iterator[Indices]:
    """As many index arrays as `batches` yields, each of which has each example by itself with probability batch_size / num_examples.

    So they have `batch_size` examples on average, and may have none.
    """
    share = min(1.0, batch_size / num_examples)
    for _ in range(count(num_examples, batch_size, epochs=epochs, steps=steps)):
        yield np.flatnonzero(rng.random(num_examples) < share)


def count(num_examples: int, batch_size: int, *, epochs: int | None, steps: int | None) -> int:
    """The number of batches that `batches` yields."""
    return steps if steps is not None else (epochs or 0) * -(-num_examples // batch_size)
