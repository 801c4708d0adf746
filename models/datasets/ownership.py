"""The client of each held-out row, so that accuracy can be reported per client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from models.datasets.dataset import Dataset
from models.datasets.randomness import stream


def owners(dataset: Dataset, parts: Sequence[npt.NDArray[np.int64]], seed: int) -> npt.NDArray[np.int32]:
    """The client of each test row, in the order of `np.flatnonzero(dataset.test)`.

    Where clients are the sites, a row's site. Otherwise a row is assigned to a client at random, with probability
    proportional to how many training rows of its class the client holds, so that each client is tested on the
    mix it trains on; sequences, and classes that no client trains on, are assigned by the clients' sizes.

    `parts`: training rows of each client.
    """
    test = np.flatnonzero(dataset.test)
    if dataset.site is not None and _by_site(dataset.site, parts, len(dataset.site_names)):
        return dataset.site[test].astype(np.int32)
    rng = stream(seed, "owners")
    label = dataset.y if dataset.y.ndim == 1 else np.zeros(len(dataset.y), np.int32)
    held = np.stack([np.bincount(label[part], minlength=int(label.max()) + 1) for part in parts])
    held[:, held.sum(axis=0) == 0] = np.array([[len(part)] for part in parts])
    drawn = rng.random(len(test))
    owner = np.empty(len(test), np.int32)
    for one in np.unique(label[test]):
        rows = label[test] == one
        upto = np.cumsum(held[:, one])
        owner[rows] = np.searchsorted(upto, drawn[rows] * upto[-1], side="right")
    return owner


def _by_site(site: npt.NDArray[np.int32], parts: Sequence[npt.NDArray[np.int64]], sites: int) -> bool:
    return len(parts) == sites and all((site[part] == index).all() for index, part in enumerate(parts))
