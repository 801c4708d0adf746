"""The order of examples: a permutation of any size, computed entry by entry."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.pretrain.data.batches import Batches, BatchRandom, Indices, Rows, Share
from models.pretrain.data.shuffle import Shuffle

SEEDS = st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 10_000))


@pytest.mark.parametrize("seed", [(0, 0), (7, 3), (2**63 - 1, 1)])
def test_every_small_size_is_a_permutation(seed: tuple[int, ...]) -> None:
    for size in range(260):
        assert sorted(Shuffle(size, seed)[np.arange(size)].tolist()) == list(range(size))


@given(size=st.integers(1, 50_000), seed=SEEDS)
def test_any_size_is_a_permutation(size: int, seed: tuple[int, int]) -> None:
    found = Shuffle(size, seed)[np.arange(size)]
    assert (np.bincount(found, minlength=size) == 1).all()


@given(size=st.integers(1, 2**62), seed=SEEDS, data=st.data())
def test_entries_are_in_range_and_do_not_depend_on_what_is_asked_with_them(
    size: int, seed: tuple[int, int], data: st.DataObject
) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    found = Shuffle(size, seed)[places]
    assert ((found >= 0) & (found < size)).all()
    assert len(set(found.tolist())) == len(places)
    assert [int(Shuffle(size, seed)[places[i : i + 1]][0]) for i in range(len(places))] == found.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5, 10, 97])
def test_every_example_is_equally_likely_in_every_place(size: int) -> None:
    """Chi-squared over many epochs: its mean is its degrees of freedom, its variance twice that."""
    epochs = 400 * size
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), Shuffle(size, (7, epoch))[np.arange(size)]] += 1
    expected = epochs / size
    freedom = (size - 1) ** 2
    assert abs((np.square(counts - expected) / expected).sum() - freedom) < 6 * (2 * freedom) ** 0.5


def test_epochs_and_seeds_differ_and_neighbours_are_scattered() -> None:
    size = 10_000
    orders = [Shuffle(size, seed)[np.arange(size)] for seed in ((7, 0), (7, 1), (8, 0))]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (orders[one] == orders[other]).mean() < 0.002
    distances = np.abs(np.diff(orders[0]))
    # of two independent uniform numbers below n: n / 3, with a deviation of n / 18 ** 0.5
    assert abs(distances.mean() - size / 3) < 5 * size / 18**0.5 / size**0.5
    assert np.abs(np.corrcoef(orders[0], np.arange(size))[0, 1]) < 5 / size**0.5


def test_the_order_is_pinned() -> None:
    """A resumed training continues in the order in which an earlier version began."""
    assert Shuffle(10, (7, 0))[np.arange(10)].tolist() == [6, 4, 9, 7, 3, 0, 5, 8, 1, 2]


def test_an_impossible_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"size is -1, expected 0 to"):
        Shuffle(-1, (0,))


class Endless:
    """A training set of 2**40 examples, each its own index."""

    def __len__(self) -> int:
        return 2**40

    def read(self, rows: Indices, random: BatchRandom) -> Rows:
        return rows[:, None], np.zeros(len(rows), np.int32)

    def counted(self, rows: Indices) -> int:
        return len(rows)


def test_memory_does_not_grow_with_the_examples() -> None:
    batches = Batches(Endless(), 64, 7, Share())
    batches[0]
    tracemalloc.start()
    for step in (1, 2**33, 2**34 + 5):
        batches[step]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


@given(
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**36),
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_every_way_to_share_a_batch_reads_the_same_examples(seed: int, step: int, parts: list[int]) -> None:
    whole = Batches(Endless(), 64, seed, Share())[step].rows
    shares = [Batches(Endless(), 64, seed, Share(tuple(parts), place))[step] for place in range(len(parts))]
    assert tuple(row for share in shares for row in share.rows) == whole
