"""Laws of the weighted mean: what may vary (arrival, workers, who is absent) and what must not (the bits)."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.strategy import BLOCK, MeanFold, WeightedMean, Weighting
from strategies.update import Aggregate, Update

SHAPES = {"conv.weight": (2, 3), "fc.bias": (2,), "scale": ()}

weightings = st.sampled_from(["examples", "uniform"])


@st.composite
def updates(draw: st.DrawFn) -> Update:
    """Values of widely different magnitude: sums of like float32 values are exact in float64 in any order."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def tensors() -> dict[str, np.ndarray]:
        return {
            name: np.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-60, 20, shape), np.float32)
            for name, shape in SHAPES.items()
        }

    return Update(
        delta=tensors(),
        num_examples=draw(st.integers(1, 10_000)),
        num_steps=draw(st.integers(1, 100)),
        train_loss=draw(st.floats(0, 100)),
        extras={"control": tensors()},
    )


cohorts = st.lists(st.none() | updates(), min_size=1, max_size=2 * BLOCK + 3).filter(
    lambda cohort: any(update is not None for update in cohort)
)
"""An update or nothing for every position, across up to three blocks, not nothing throughout."""


def fold_one_by_one(cohort: list[Update | None], weighting: Weighting, order: list[int]) -> Aggregate:
    fold = WeightedMean(weighting).start(len(cohort))
    for position in order:
        update = cohort[position]
        if update is not None:
            fold.add(position, update)
    return fold.finish()


def naive_mean(cohort: list[Update | None], weighting: Weighting) -> dict[str, dict[str, np.ndarray]]:
    """The definition, one Python float at a time: neighbours are added in pairs until one number is left."""

    def tree_sum(terms: list[float | None]) -> float:
        while len(terms) > 1:
            pairs = itertools.zip_longest(terms[::2], terms[1::2])
            terms = [a if b is None else b if a is None else a + b for a, b in pairs]
        assert terms[0] is not None
        return terms[0]

    def weight(update: Update) -> float:
        return float(update.num_examples) if weighting == "examples" else 1.0

    def mean(pick, weigh) -> dict[str, np.ndarray]:
        divisor = tree_sum([None if u is None else weigh(u) for u in cohort])
        answer = {}
        for name, shape in SHAPES.items():
            flat = [
                tree_sum(
                    [None if u is None else float(pick(u)[name].reshape(-1)[i]) * weigh(u) for u in cohort]
                )
                / divisor
                for i in range(int(np.prod(shape)))
            ]
            answer[name] = np.array(flat, np.float64).reshape(shape)
        return answer

    return {
        "delta": mean(lambda u: u.delta, weight),
        "control": mean(lambda u: u.extras["control"], lambda u: 1.0),
    }


def bits(tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: np.asarray(value, np.float64).tobytes() for name, value in tensors.items()}


@settings(deadline=None)
@given(cohort=cohorts, weighting=weightings, arrival=st.randoms(use_true_random=False))
def test_the_mean_equals_its_definition_bit_for_bit_whatever_the_arrival_order(
    cohort: list[Update | None], weighting: Weighting, arrival: random.Random
) -> None:
    order = list(range(len(cohort)))
    arrival.shuffle(order)
    aggregate = fold_one_by_one(cohort, weighting, order)
    expected = naive_mean(cohort, weighting)
    present = [update for update in cohort if update is not None]
    assert bits(aggregate.delta) == bits(expected["delta"])
    assert bits(aggregate.extras["control"]) == bits(expected["control"])
    assert all(isinstance(v, np.ndarray) and v.dtype == np.float64 for v in aggregate.delta.values())
    assert (aggregate.num_updates, aggregate.num_examples) == (
        len(present),
        sum(u.num_examples for u in present),
    )
    weights = [update.num_examples for update in present]
    assert aggregate.train_loss == pytest.approx(
        np.average([u.train_loss for u in present], weights=weights), rel=1e-12
    )


@settings(deadline=None)
@given(
    update=updates(), weights=st.lists(st.integers(1, 10_000), min_size=1, max_size=20), weighting=weightings
)
def test_equal_updates_average_to_themselves(
    update: Update, weights: list[int], weighting: Weighting
) -> None:
    cohort: list[Update | None] = [replace(update, num_examples=weight) for weight in weights]
    aggregate = fold_one_by_one(cohort, weighting, list(range(len(cohort))))
    # Float64 sums of equal float32 values are off by 1e-14 at most, so the nearest float32 is the value itself.
    assert {n: v.astype(np.float32).tobytes() for n, v in aggregate.delta.items()} == {
        n: v.tobytes() for n, v in update.delta.items()
    }


@settings(deadline=None)
@given(cohort=st.lists(updates(), min_size=1, max_size=20), order=st.randoms(use_true_random=False))
def test_who_stands_at_which_position_does_not_matter(cohort: list[Update], order: random.Random) -> None:
    shuffled = order.sample(cohort, len(cohort))
    first, second = (fold_one_by_one(list(c), "examples", list(range(len(c)))) for c in (cohort, shuffled))
    for name, value in first.delta.items():
        largest = max(np.abs(update.delta[name]).max() for update in cohort)
        np.testing.assert_allclose(second.delta[name], value, rtol=0, atol=1e-13 * max(largest, 1e-300))


@settings(deadline=None)
@given(cohort=st.lists(updates(), min_size=1, max_size=12), factor=st.integers(2, 50))
def test_only_the_ratio_of_example_counts_matters(cohort: list[Update], factor: int) -> None:
    scaled = [replace(update, num_examples=update.num_examples * factor) for update in cohort]
    first, second = (fold_one_by_one(list(c), "examples", list(range(len(c)))) for c in (cohort, scaled))
    for name, value in first.delta.items():
        largest = max(np.abs(update.delta[name]).max() for update in cohort)
        np.testing.assert_allclose(second.delta[name], value, rtol=0, atol=1e-13 * max(largest, 1e-300))


def some_update(value: float = 1.0) -> Update:
    return Update(delta={"w": np.array([value], np.float32)}, num_examples=3, num_steps=1, train_loss=0.5)


def a_fold(size: int = 2 * BLOCK) -> MeanFold:
    return WeightedMean().start(size)


def test_a_cohort_with_every_position_skipped_has_no_mean() -> None:
    fold = a_fold()
    with pytest.raises(ValueError, match="every position of the cohort was skipped"):
        fold.finish()


def test_no_position_counts_twice() -> None:
    fold = a_fold()
    fold.add(3, some_update())
    with pytest.raises(ValueError, match="position 3 was already folded"):
        fold.add(3, some_update())


def test_no_position_of_a_folded_block_counts_twice() -> None:
    fold = a_fold()
    for position in range(BLOCK, 2 * BLOCK):  # a block ahead of its turn
        fold.add(position, some_update(5.0))
    with pytest.raises(ValueError, match="position 9 was already folded"):
        fold.add(9, some_update())
    for position in range(BLOCK):
        fold.add(position, some_update(5.0))
    with pytest.raises(ValueError, match="position 7 was already folded"):
        fold.add(7, some_update())
    assert fold.finish().delta["w"] == 5.0


def test_positions_outside_the_cohort_are_refused() -> None:
    fold = a_fold(size=BLOCK + 1)
    for position in (-1, BLOCK + 1):
        with pytest.raises(ValueError, match="outside the cohort of 9"):
            fold.add(position, some_update())


def test_a_refused_update_leaves_the_fold_as_it_was() -> None:
    fold = a_fold()
    fold.add(0, some_update(1.0))
    with pytest.raises(ValueError):
        fold.add(0, some_update(100.0))
    fold.add(1, some_update(3.0))
    assert fold.finish().delta["w"] == 2.0


def test_results_in_canonical_order_are_folded_away_block_by_block() -> None:
    held = []

    class Watched(dict):
        """A delta that says when it is gone."""

        def __del__(self) -> None:
            held.remove(id(self))

    fold = a_fold(size=10 * BLOCK)
    peak = 0
    for position in range(10 * BLOCK):
        delta = Watched(w=np.ones(1, np.float32))
        held.append(id(delta))
        fold.add(position, Update(delta=delta, num_examples=1, num_steps=1, train_loss=0.0))
        del delta
        peak = max(peak, len(held))
    assert peak <= BLOCK
    assert fold.finish().num_updates == 10 * BLOCK
