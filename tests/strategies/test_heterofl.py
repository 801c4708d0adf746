"""HeteroFL's aggregation: the mean over those who hold a coordinate, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import presets
from strategies.params import FloatArray, LazyTensors, Params, State, Tensors
from strategies.slices import NotASlice, corner, place, require_slices, shapes_of, take
from strategies.strategy import Strategy
from strategies.update import Update

WHOLE = {"conv.weight": (4, 3, 2), "fc.bias": (5,), "fc.weight": (5, 8), "scale": ()}
CLASSES = (
    WHOLE,
    {"conv.weight": (2, 3, 2), "fc.bias": (5,), "fc.weight": (5, 4), "scale": ()},
    {"conv.weight": (1, 3, 2), "fc.bias": (5,), "fc.weight": (5, 2), "scale": ()},
)

cohorts = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 500)), min_size=1, max_size=20)
"""Class and number of examples of each client."""


def draw(shapes: dict[str, tuple[int, ...]], *seed: int) -> Params:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in shapes.items()}


def make(cohort: Sequence[tuple[int, int]]) -> list[Update]:
    return [
        Update(draw(CLASSES[which], index, 1), examples, 3, 0.5 + index)
        for index, (which, examples) in enumerate(cohort)
    ]


class Stored(LazyTensors):
    """Tensors that can be had by the piece only."""

    def __init__(self, tensors: Params) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        return self._tensors[name].reshape(-1)[start:stop]


def move(strategy: Strategy, params: Tensors, updates: Sequence[Update]) -> Params:
    fold = strategy.start(len(updates))
    for position, each in enumerate(updates):
        fold.add(position, strategy.transform(each))
    moved, _ = strategy.apply(params, State(), fold.finish(), num_clients=len(updates))
    return dict(moved)


def naive(
    params: Mapping[str, np.ndarray], updates: Sequence[Update], lr: float, weighting: str
) -> dict[str, np.ndarray]:
    """Algorithm 1 of the paper as it reads, one coordinate after the other."""
    result = {}
    for name, value in params.items():
        new = value.astype(np.float64)
        for at in np.ndindex(value.shape):
            held = [
                (each.num_examples if weighting == "examples" else 1, float(each.delta[name][at]))
                for each in updates
                if all(index < size for index, size in zip(at, each.delta[name].shape, strict=True))
            ]
            if held:
                new[at] += lr * sum(w * d for w, d in held) / sum(w for w, _ in held)
        result[name] = new
    return result


@given(cohorts, st.sampled_from(["examples", "uniform"]), st.floats(0.1, 2))
def test_each_coordinate_moves_by_the_mean_of_those_who_hold_it(
    cohort: list[tuple[int, int]], weighting: str, lr: float
) -> None:
    params, updates = draw(WHOLE, 99), make(cohort)
    strategy = presets.get("heterofl", weighting=weighting, server_lr=lr)
    fold = strategy.start(len(updates))
    for position, each in enumerate(updates):
        fold.add(position, each)
    aggregate = fold.finish()
    zeros = {name: np.zeros(shape) for name, shape in WHOLE.items()}
    expected = naive(zeros, updates, 1.0, weighting)
    for name, delta in aggregate.delta.items():
        np.testing.assert_allclose(delta, expected[name][corner(delta.shape)], rtol=0, atol=1e-12)
    moved = move(strategy, params, updates)
    for name, value in naive(params, updates, lr, weighting).items():
        np.testing.assert_allclose(moved[name], value, rtol=1e-6, atol=1e-7)
    assert aggregate.num_updates == len(updates)
    assert aggregate.num_examples == sum(each.num_examples for each in updates)
    losses = sum(each.train_loss * each.num_examples for each in updates)
    assert aggregate.train_loss == pytest.approx(losses / aggregate.num_examples, rel=1e-12)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.floats(0.1, 2), st.floats(0, 3))
def test_one_class_of_full_width_is_fedavg_to_the_bit(examples: list[int], lr: float, clip: float) -> None:
    params, updates = draw(WHOLE, 98), make([(0, each) for each in examples])
    ours, plain = (
        move(presets.get(name, server_lr=lr, clip_norm=clip), params, updates)
        for name in ("heterofl", "fedavg")
    )
    assert {n: v.tobytes() for n, v in ours.items()} == {n: v.tobytes() for n, v in plain.items()}


@given(cohorts, st.randoms(use_true_random=False))
def test_the_order_of_clients_does_not_matter(cohort: list[tuple[int, int]], random: object) -> None:
    params, updates = draw(WHOLE, 97), make(cohort)
    shuffled = list(updates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    strategy = presets.get("heterofl")
    first, second = (move(strategy, params, each) for each in (updates, shuffled))
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=1e-6, atol=1e-7)


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 500)), min_size=1, max_size=12))
def test_what_nobody_of_a_round_holds_keeps_its_bits(cohort: list[tuple[int, int]]) -> None:
    params = {name: np.full(shape, -0.0, np.float32) for name, shape in WHOLE.items()}
    moved = move(presets.get("heterofl"), params, make(cohort))
    largest = CLASSES[min(which for which, _ in cohort)]
    for name, value in moved.items():
        rest = np.ones(value.shape, bool)
        rest[corner(largest[name])] = False
        assert value[rest].tobytes() == params[name][rest].tobytes()


@given(cohorts, st.lists(st.booleans(), min_size=20, max_size=20), st.booleans())
def test_updates_on_disk_give_the_bits_of_updates_in_memory(
    cohort: list[tuple[int, int]], stored: list[bool], params_stored: bool
) -> None:
    params, updates = draw(WHOLE, 94), make(cohort)
    on_disk = [
        replace(each, delta=Stored(dict(each.delta))) if is_stored else each
        for each, is_stored in zip(updates, stored, strict=False)
    ]
    strategy = presets.get("heterofl", clip_norm=2.0)
    expected = move(strategy, params, updates)
    found = move(strategy, Stored(params) if params_stored else params, on_disk)
    assert {n: v.tobytes() for n, v in found.items()} == {n: v.tobytes() for n, v in expected.items()}


def test_a_position_counts_once_and_an_empty_cohort_has_no_mean() -> None:
    fold = presets.get("heterofl").start(2)
    with pytest.raises(ValueError, match="every position of the cohort was skipped"):
        fold.finish()
    fold.add(1, make([(0, 3)])[0])
    with pytest.raises(ValueError, match="position 1 was already folded"):
        fold.add(1, make([(1, 3)])[0])


def test_updates_that_are_no_slices_of_one_another_are_refused() -> None:
    fold = presets.get("heterofl").start(2)
    for position, shape in enumerate([(4, 2), (2, 4)]):
        fold.add(position, Update({"w": np.ones(shape, np.float32)}, 1, 1, 0.0))
    with pytest.raises(NotASlice, match=r"tensor 'w' is \(2, 4\), no leading part of \(4, 2\)"):
        fold.finish()


@given(st.integers(0, 2))
def test_a_slice_put_back_changes_nothing_else(which: int) -> None:
    params, part = draw(WHOLE, 96), draw(CLASSES[which], 95)
    placed = place(params, part)
    assert shapes_of(placed) == WHOLE
    for name, value in take(placed, CLASSES[which]).items():
        np.testing.assert_array_equal(value, part[name])
    again = place(placed, take(params, CLASSES[which]))
    for name, value in again.items():
        np.testing.assert_array_equal(value, params[name])


@pytest.mark.parametrize("shape", [(6,), (5, 1), ()])
def test_a_shape_that_is_no_leading_part_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(NotASlice, match=r"tensor 'fc.bias' is .* no leading part of \(5,\)"):
        require_slices({"fc.bias": shape}, WHOLE)
    with pytest.raises(NotASlice, match="no leading part of any tensor"):
        require_slices({"other": shape}, WHOLE)
