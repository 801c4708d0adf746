"""Relays: what they pass on gives the bits of the flat mean, and what the robust rules bear with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import own, presets
from strategies.cohort_fold import TooFewUpdates
from strategies.params import Params, Tensors
from strategies.relays import CannotRelay, RelayedRule, add_relays, parts
from strategies.robust import RobustPreset
from strategies.strategy import Strategy
from strategies.summation_tree import SummationTree
from strategies.update import Aggregate, Update

SHAPES = {"conv.weight": (2, 3), "fc.bias": (2,), "scale": ()}
ROBUST = [name for name, algorithm in presets.ALGORITHMS.items() if issubclass(algorithm, RobustPreset)]
MEANS = [
    name
    for name in presets.ALGORITHMS
    if name not in {*ROBUST, "heterofl", "ifca"}
    and "sync" in presets.modes(name)
    and not presets.uses_server_data(name)
]


def tensors(rng: np.random.Generator) -> Params:
    """Of widely different magnitude, so that another order of summation would show."""
    return {
        name: np.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-60, 20, shape), np.float32)
        for name, shape in SHAPES.items()
    }


def updates(seed: int, present: Sequence[bool]) -> list[Update | None]:
    rng = np.random.default_rng(seed)

    def update() -> Update:
        loss = float(rng.random())
        extras = {"control": tensors(rng), "received": {"loss": np.array([loss], np.float32)}}
        return Update(tensors(rng), int(rng.integers(1, 9999)), int(rng.integers(1, 99)), loss, extras)

    return [update() if is_present else None for is_present in present]


def fold(strategy: Strategy, cohort: Sequence[Update | None], order: Sequence[int]) -> Aggregate:
    folded = strategy.start(len(cohort))
    for position in order:
        if (update := cohort[position]) is not None:
            folded.add(position, strategy.transform(update))
    return folded.finish()


def bits(aggregate: Aggregate) -> object:
    streams = {"delta": aggregate.delta, **aggregate.extras}
    tensors = {
        (stream, name): (value.shape, np.asarray(value, np.float64).tobytes())
        for stream, each in streams.items()
        for name, value in each.items()
    }
    return tensors, aggregate.num_updates, aggregate.num_examples, aggregate.train_loss


cohorts = st.lists(st.booleans(), min_size=1, max_size=40).filter(any)


@settings(deadline=None)
@given(present=cohorts, bounds=st.sets(st.integers(1, 40), max_size=5))
def test_any_range_of_positions_is_summed_apart_without_changing_the_tree(
    present: list[bool], bounds: set[int]
) -> None:
    """Sums are written down as nested pairs, so that equal ones were made in the same way."""

    def tree(start: int = 0) -> SummationTree[Any]:
        return SummationTree(lambda left, right: (left, right), start)

    flat, joined = tree(), tree()
    ends = sorted({0, len(present), *(bound for bound in bounds if bound < len(present))})
    for start, stop in pairwise(ends):
        part = tree(start)
        for position in range(start, stop):
            if present[position]:
                flat.add(position, position)
                part.add(position, position)
        nodes = part.nodes(stop)
        assert len(nodes) <= 2 * max(1, math.ceil(math.log2(stop - start)))
        for position, value in nodes:
            joined.add(position, value)
    assert joined.total() == flat.total()


@settings(deadline=None)
@given(
    name=st.sampled_from(MEANS),
    present=cohorts,
    relays=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    clip=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_a_mean_with_relays_has_the_bits_of_the_flat_mean(
    name: str, present: list[bool], relays: int, seed: int, clip: bool, order: Any
) -> None:
    flat = presets.get(name, clip_norm=1.0 if clip else 0.0)
    cohort = updates(seed, present)
    positions = order.sample(range(len(cohort)), len(cohort))
    with_relays = fold(add_relays(flat, relays), cohort, positions)
    assert bits(with_relays) == bits(fold(flat, cohort, positions))
    members = [sum(present[start:stop]) for start, stop in parts(len(cohort), relays)]
    assert [each.num_updates for each in with_relays.relays] == members


def test_a_relay_of_an_aligned_range_passes_on_one_sum_whatever_the_number_of_its_clients() -> None:
    cohort = updates(7, [True] * 64)
    passed_on = fold(add_relays(presets.get("fedavg"), 4), cohort, range(64)).relays
    delta = control = 6 + 2 + 1
    values = delta + control + 1  # the loss that q-FedAvg's clients send
    assert [(each.num_sums, each.payload_bytes) for each in passed_on] == [(1, 8 * values)] * 4


@pytest.mark.parametrize("name", ROBUST)
def test_a_robust_rule_is_applied_to_the_updates_of_each_relay_and_to_their_results(name: str) -> None:
    rng = np.random.default_rng(3)
    cohort = [Update({"w": rng.normal(size=5).astype(np.float32)}, 3, 1, 0.5) for _ in range(21)]
    strategy = presets.get(name, malicious=1)
    aggregate = fold(add_relays(strategy, 3, 0), list(cohort), range(21))

    def apply(malicious: int, deltas: Sequence[Tensors]) -> Tensors:
        rule = replace(strategy.aggregator, malicious=malicious)  # type: ignore[type-var]
        return rule.aggregate([Update(delta, 1, 1, 0.0) for delta in deltas])  # type: ignore[attr-defined,no-any-return]

    results = [apply(1, [each.delta for each in cohort[start : start + 7]]) for start in (0, 7, 14)]
    np.testing.assert_array_equal(aggregate.delta["w"], apply(0, results)["w"])
    assert (aggregate.num_updates, aggregate.num_examples, aggregate.train_loss) == (21, 63, 0.5)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["median", "trimmed_mean", "krum"]),
    relays=st.integers(3, 5),
    each=st.integers(3, 7),
    data=st.data(),
)
def test_so_many_malicious_clients_as_stated_leave_the_result_among_the_honest_values_wherever_they_are(
    name: str, relays: int, each: int, data: st.DataObject
) -> None:
    within = data.draw(st.integers(0, (each - 1) // 2))
    across = data.draw(st.integers(0, (relays - 1) // 2))
    strategy = add_relays(presets.get(name, malicious=within, norm_clip=0.0), relays, across)
    assert isinstance(strategy.aggregator, RelayedRule)
    malicious = data.draw(
        st.permutations(range(relays * each)).map(lambda order: order[: (within + 1) * (across + 1) - 1])
    )
    assert len(malicious) == strategy.aggregator.malicious
    honest = np.random.default_rng(5).normal(size=(relays * each, 4)).astype(np.float32)
    cohort = [
        Update({"w": row * 0 + 1e6 if at in malicious else row}, 1, 1, 0.0) for at, row in enumerate(honest)
    ]
    delta = fold(strategy, list(cohort), range(len(cohort))).delta["w"]
    kept = np.delete(honest, malicious, axis=0).astype(np.float64)
    slack = 1e-12
    assert (kept.min(axis=0) - slack <= delta).all() and (delta <= kept.max(axis=0) + slack).all()


def test_one_malicious_client_more_is_too_many_if_they_choose_their_relays() -> None:
    strategy = add_relays(presets.get("median", malicious=1, norm_clip=0.0), 3, 1)
    assert isinstance(strategy.aggregator, RelayedRule) and strategy.aggregator.malicious == 3
    values = [9, 9, 0, 9, 9, 0, 0, 0, 0]  # two of three at each of two relays
    cohort = [Update({"w": np.array([value], np.float32)}, 1, 1, 0.0) for value in values]
    assert fold(strategy, list(cohort), range(9)).delta["w"] == 9


def test_a_relay_with_too_few_updates_passes_nothing_on_and_its_clients_do_not_count() -> None:
    strategy = add_relays(presets.get("median", malicious=1), 4, 1)
    cohort: list[Update | None] = [
        Update({"w": np.array([float(at)], np.float32)}, 1, 1, 0.0) for at in range(12)
    ]
    cohort[9] = None
    aggregate = fold(strategy, cohort, range(12))
    assert [(each.num_updates, each.num_sums) for each in aggregate.relays] == [(3, 1)] * 3 + [(0, 0)]
    assert aggregate.num_updates == 9 and aggregate.delta["w"] == 4.0
    cohort[0] = cohort[4] = None
    with pytest.raises(
        TooFewUpdates, match="1 of 4 relays have the 3 updates that the rule needs; expected 3"
    ):
        fold(strategy, cohort, range(12))


def test_no_position_counts_twice_and_none_outside_the_cohort_counts() -> None:
    for name in ("fedavg", "median"):
        folded = add_relays(presets.get(name), 2, 0).start(6)
        update = Update({"w": np.zeros(1, np.float32)}, 1, 1, 0.0)
        folded.add(2, update)
        with pytest.raises(ValueError, match="position 2 was already folded"):
            folded.add(2, update)
        for position in (-1, 6):
            with pytest.raises(ValueError, match=rf"position {position} is outside the cohort of 6"):
                folded.add(position, update)


def test_a_strategy_of_ones_own_has_no_relays() -> None:
    strategy = own.compose("mine", presets.get("fedavg"), lambda updates: updates[0].delta)
    with pytest.raises(CannotRelay, match="mine makes its aggregate of single updates"):
        add_relays(strategy, 2)
