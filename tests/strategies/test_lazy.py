"""Tensors on disk give what tensors in memory give, to the bit, and are never in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strategies import params as lazy
from strategies import presets
from strategies.params import (
    LazyTensors,
    Params,
    State,
    Tensors,
    add,
    elementwise,
    flatten,
    materialize,
    overlay,
    select,
    unflatten,
)
from strategies.strategy import Strategy
from strategies.update import Update

SHAPES = {"conv.weight": (2, 3), "fc.bias": (2,), "none": (0, 3), "scale": ()}
PIECE = 4


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tensor of six values has two pieces."""
    monkeypatch.setattr(lazy, "PIECE", PIECE)


class Stored(LazyTensors):
    """Tensors that can be had by the piece only; counts the values of each that were read."""

    def __init__(self, tensors: Params) -> None:
        self._tensors = tensors
        self.read = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def piece(self, name: str, start: int, stop: int) -> np.ndarray:
        assert stop - start <= PIECE
        self.read += stop - start
        values = self._tensors[name].reshape(-1)[start:stop].copy()
        values.flags.writeable = False
        return values


def bits(tensors: Tensors) -> dict[str, tuple[object, ...]]:
    return {name: (value.shape, value.dtype, value.tobytes()) for name, value in tensors.items()}


def tensors(seed: int) -> Params:
    """Of widely different magnitude, so that another order of summation would show."""
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-40, 20, shape), np.float32)
        for name, shape in SHAPES.items()
    }


def update(seed: int) -> Update:
    rng = np.random.default_rng([seed, 1])
    examples, loss = int(rng.integers(1, 9999)), float(rng.random())
    extras = {
        "control": tensors(seed + 1000),
        "received": {"loss": np.array([loss], np.float32)},
        "chosen": {"model": np.array([seed % 2], np.float32)},
    }
    return Update(tensors(seed), examples, 3, loss, extras)


def on_disk(given: Update) -> Update:
    """The update with its tensors stored together, as they come from a file."""
    parts = dict(unflatten(Stored(materialize(flatten({"delta": given.delta, **given.extras})))))
    return replace(given, delta=parts.pop("delta"), extras=parts)


def rounds(
    strategy: Strategy, cohorts: list[list[Update | None]], store: Callable[[Tensors], Tensors]
) -> tuple[Tensors, State]:
    params: Tensors = tensors(77) | {"frozen": np.ones(3, np.float32)}
    state = strategy.init(params, list(SHAPES))
    params, state = store(params), State(store(state.arrays), state.values)
    for cohort in cohorts:
        fold = strategy.start(len(cohort))
        for position, each in reversed(list(enumerate(cohort))):
            if each is not None:
                fold.add(position, strategy.transform(each))
        params, state = strategy.apply(params, state, fold.finish(), num_clients=40)
        params, state = store(params), State(store(state.arrays), state.values)
    return params, state


@given(
    name=st.sampled_from(sorted(name for name in presets.OPTIONS if not presets.uses_server_data(name))),
    clip=st.booleans(),
    present=st.lists(st.sampled_from(["memory", "disk", "absent"]), min_size=1, max_size=19).filter(
        lambda kinds: set(kinds) != {"absent"}
    ),
)
def test_rounds_of_stored_updates_give_the_bits_of_rounds_in_memory(
    name: str, clip: bool, present: list[str]
) -> None:
    """Two rounds of up to three blocks, some updates stored, some not; params and state stored in between."""
    key = "clip_norm" if "clip_norm" in presets.OPTIONS[name] else "norm_clip"
    strategy = presets.get(name, **{key: 1.0 if clip else 0.0})
    assume(len(present) - present.count("absent") >= strategy.aggregator.fewest_updates)
    in_ram: list[list[Update | None]] = []
    mixed: list[list[Update | None]] = []
    for turn in range(2):
        cohort = [None if kind == "absent" else update(100 * turn + i) for i, kind in enumerate(present)]
        in_ram.append(list(cohort))
        mixed.append(
            [on_disk(u) if u and kind == "disk" else u for u, kind in zip(cohort, present, strict=True)]
        )
    params, state = rounds(strategy, in_ram, materialize)
    stored_params, stored_state = rounds(strategy, mixed, lambda tensors: Stored(materialize(tensors)))
    assert bits(stored_params) == bits(params)
    assert bits(stored_state.arrays) == bits(state.arrays)
    assert stored_state.values == state.values


def test_nothing_is_read_before_the_result_is() -> None:
    stored = Stored(tensors(1))
    given_update = Update(stored, 3, 1, 0.5)
    strategy = presets.get("fedavg")
    fold = strategy.start(9)
    for position in range(9):
        fold.add(position, strategy.transform(given_update))
    params, _ = strategy.apply(tensors(2), State(), fold.finish(), 9)
    assert stored.read == 0
    assert params["conv.weight"].shape == (2, 3)
    assert stored.read == 9 * 6


def test_a_cohort_of_thousands_is_not_too_deep() -> None:
    strategy = presets.get("fedavg", weighting="uniform")
    fold = strategy.start(10_000)
    ones = {"w": np.ones(1, np.float32)}
    for position in range(10_000):
        fold.add(position, Update(Stored(ones), 1, 1, 0.0))
    assert fold.finish().delta["w"] == 1.0


def test_values_in_memory_are_computed_at_once() -> None:
    calls = []

    def double(values: np.ndarray) -> np.ndarray:
        calls.append(values.size)
        return values * 2

    doubled = elementwise(double, {"w": np.ones((2, 3), np.float32)})
    assert (type(doubled), calls) == (dict, [6])
    assert doubled["w"].tolist() == [[2, 2, 2], [2, 2, 2]]
    assert type(add(doubled, doubled)) is dict
    assert type(select({"v": (doubled, "w")})) is dict
    assert materialize(doubled) is doubled


def test_an_array_that_is_only_renamed_is_not_copied() -> None:
    values = np.ones(9, np.float32)
    assert select({"v": ({"w": values}, "w")})["v"] is values


def test_some_tensors_in_place_of_others() -> None:
    base, over = tensors(1), {"scale": np.array(9, np.float32)}
    expected = bits({**base, **over})
    assert bits(overlay(base, over)) == expected
    assert bits(overlay(Stored(base), over)) == expected
    assert bits(overlay(base, Stored(over))) == expected
    assert list(overlay(Stored(base), over)) == list(base)
