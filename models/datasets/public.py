"""Rows set aside for the server to pretrain or distil on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from models.datasets.dataset import DataError, Dataset
from models.datasets.randomness import stream


def public_rows(dataset: Dataset, count: int, seed: int) -> npt.NDArray[np.int64]:
    """`count` training rows, ascending, with classes as equal in number as the data allows.

    Sequences have no class and are drawn evenly. A site's last training row is never taken.

    Raises:
        DataError: `count` is more than can be spared.
    """
    rng = stream(seed, "public")
    rows = rng.permutation(np.flatnonzero(~dataset.test))
    spare = rows[_not_first(dataset.site[rows])] if dataset.site is not None else rows[1:]
    if not 0 <= count <= len(spare):
        raise DataError(
            f"{count:,} public rows are asked for; {dataset.name!r} can spare 0 to {len(spare):,} of its "
            f"{len(rows):,} training rows"
        )
    if dataset.y.ndim == 1:
        # First one of every class, then a second of every class, and so on; within a turn at random.
        spare = spare[np.lexsort((rng.random(len(spare)), _turn(dataset.y[spare])))]
    return np.sort(spare[:count])


def _turn(labels: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """[N]: how many earlier places hold the same label."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    starts = np.searchsorted(ordered, ordered, side="left")
    turn = np.empty(len(labels), np.int64)
    turn[order] = np.arange(len(labels)) - starts
    return turn


def _not_first(site: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """[N]: False where a site appears for the first time."""
    return _turn(site) > 0
