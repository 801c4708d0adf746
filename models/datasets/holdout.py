"""Which rows are held out for testing where the data itself does not say, and the random streams of a seed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import DataProblem

SHARE = Fraction(1, 5)


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The generator of `seed` for one purpose; streams of different purposes share nothing.

    So drawing more numbers for one (a larger partition, say) never changes another (which rows are held out).
    `seed`: not negative.
    """
    return np.random.default_rng([seed, *purpose.encode()])


def held_out(
    y: npt.NDArray[Any], seed: int, site: npt.NDArray[np.int32] | None = None
) -> npt.NDArray[np.bool_]:
    """A fifth of each site's rows (of all rows without sites), spread evenly over its classes.

    Systematic sampling: the rows of a site are ordered by class, at random within one, and every fifth is
    taken from a random start. So the number is the rounded share exactly, classes are represented to
    within one row, a site never loses its last training row, and without sites neither does any class that
    has two.

    `y`: [N] class indices, or quantities, over which it is spread alike. Returns bool [N].
    """
    rng = stream(seed, "held-out")
    group = np.zeros(len(y), np.int32) if site is None else site
    order = np.lexsort((rng.random(len(y)), y, group))
    sizes = np.bincount(group) if len(y) else np.zeros(0, np.int64)
    counts = np.array([take(int(size)) for size in sizes], np.int64)
    starts = np.cumsum(sizes) - sizes
    ordered = group[order]
    place = np.arange(len(y)) - starts[ordered] + rng.integers(0, np.maximum(sizes, 1))[ordered]
    size, count = sizes[ordered], counts[ordered]
    test = np.zeros(len(y), np.bool_)
    # The place advances by one, its share by count/size: where its integer part advances, a row is taken.
    test[order] = (place + 1) * count // size > place * count // size
    return test


def take(size: int) -> int:
    """How many of `size` rows are held out: the rounded share, and never all of them."""
    return max(0, min(round(size * SHARE), size - 1))


def sample_of(held_out: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """`count` of so many held-out rows, drawn by `seed`, ascending.

    Raises:
        DataProblem: there are fewer.
    """
    if count > held_out:
        raise DataProblem(
            f"evaluation.sample = {count:,}, but the data holds out {held_out:,} rows; expected at most that many, or leave it out"
        )
    return np.sort(stream(seed, "evaluation").permutation(held_out)[:count])


def require_both_parts(name: str, split: str | None, test: npt.NDArray[np.bool_]) -> None:
    """Requires rows to train on and rows to test on. `split`: the column that says which; None: they were drawn.

    Raises:
        DataProblem: one part is empty.
    """
    if test.any() and not test.all():
        return
    if split is None:
        raise DataProblem(
            f"{name}: {len(test)} rows are too few to hold any out for testing; "
            "add rows, or a column `split` that says train or test"
        )
    raise DataProblem(
        f"{name}: every row in column {split!r} says {'test' if test.all() else 'train'}; "
        "expected some train and some test"
    )
