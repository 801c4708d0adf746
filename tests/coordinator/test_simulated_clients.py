"""Who the simulated clients are: their runtimes, their speeds, their faults, all drawn by the seed."""

from __future__ import annotations

import math
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.experiments.schema import Fault
from coordinator.fleets.simulated import virtual_time
from coordinator.rounds import plan
from coordinator.runs.simulation import assign_runtimes
from coordinator.workers import faults
from edge_client.wire.arrays import encode_result
from strategies.params import Params
from tests.support.federation import task, update

NAMES = [f"client-{i}" for i in range(40)]
seeds = st.integers(0, 2**63 - 1)
shares = st.dictionaries(
    st.sampled_from(["litert", "torch", "tensorflow"]), st.floats(1e-9, 1e9), min_size=1, max_size=3
)


@given(shares, st.integers(0, 300), seeds)
def test_runtimes_are_shared_out_by_largest_remainder(
    shares: dict[str, float], count: int, seed: int
) -> None:
    """Each gets its exact share rounded down or up, and those rounded up had no smaller remainder."""
    dealt = Counter(assign_runtimes(shares, count, seed))  # type: ignore[arg-type]
    exact = {name: share / sum(shares.values()) * count for name, share in shares.items()}
    assert dealt.total() == count
    assert dealt.keys() <= shares.keys()
    for name, value in exact.items():
        assert abs(dealt[name] - value) < 1 + 1e-6
    rounded_up = [value - math.floor(value) for name, value in exact.items() if dealt[name] > value + 1e-6]
    rounded_down = [value - math.floor(value) for name, value in exact.items() if dealt[name] < value - 1e-6]
    assert not rounded_up or not rounded_down or min(rounded_up) >= max(rounded_down) - 1e-6


@given(shares, st.floats(1e-6, 1e6))
def test_only_the_proportion_of_shares_matters(shares: dict[str, float], factor: float) -> None:
    """A power of two times every share: the same numbers but for their exponents."""
    scale = 2.0 ** round(math.log2(factor))
    scaled = {name: share * scale for name, share in shares.items()}
    assert assign_runtimes(scaled, 21, 7) == assign_runtimes(shares, 21, 7)  # type: ignore[arg-type]


def test_runtimes_are_dealt_out_in_an_order_drawn_by_the_seed() -> None:
    half = {"torch": 0.5, "litert": 0.5}
    first = assign_runtimes(half, 40, 7)  # type: ignore[arg-type]
    assert first == assign_runtimes(dict(reversed(half.items())), 40, 7)  # type: ignore[arg-type]
    assert first != assign_runtimes(half, 40, 8)  # type: ignore[arg-type]
    assert Counter(first[:20]) != Counter({"litert": 20})


@given(st.dictionaries(st.sampled_from(get_args(Fault)), st.integers(1, 6), max_size=5), seeds)
def test_the_requested_number_of_clients_is_faulty(counts: dict[Fault, int], seed: int) -> None:
    assigned = faults.assign(counts, NAMES, seed)
    assert Counter(assigned.values()) == Counter(counts)
    assert assigned.keys() <= set(NAMES)
    assert assigned == faults.assign(dict(reversed(counts.items())), NAMES, seed)


def test_who_is_faulty_is_drawn_by_the_seed() -> None:
    assert faults.assign({"nan": 5}, NAMES, 1).keys() != faults.assign({"nan": 5}, NAMES, 2).keys()


@pytest.mark.parametrize("kind", get_args(Fault))
def test_every_fault_is_something_else_than_the_honest_upload(kind: str) -> None:
    model: Params = {"bias": np.zeros(2, np.float32), "weight": np.zeros((2, 2), np.float32)}
    honest = encode_result(task().message, update(model))
    assert faults.encode_uploads(kind, task().message, update(model)) != [honest]


def test_an_unknown_fault_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="unknown fault 'sleepy'"):
        faults.encode_uploads("sleepy", task().message, update({"w": np.zeros(2, np.float32)}))


# Virtual time


def test_without_spread_all_clients_are_equally_fast() -> None:
    clock = virtual_time(NAMES, 7, seconds_per_step=0.5, spread=0.0, dropout=0.0)
    assert {clock.duration_seconds(name, 10) for name in NAMES} == {5.0}


def test_with_spread_speeds_are_log_normal_and_stay_the_same() -> None:
    """The logarithms of 2,000 factors: mean 0 and standard deviation 0.5, each within 5 standard errors."""
    many = [f"client-{i}" for i in range(2000)]
    clock = virtual_time(many, 7, seconds_per_step=1.0, spread=0.5, dropout=0.0)
    logs = np.log([clock.duration_seconds(name, 1) for name in many])
    assert abs(logs.mean()) < 5 * 0.5 / math.sqrt(2000)
    assert abs(logs.std() - 0.5) < 5 * 0.5 / math.sqrt(2 * 2000)
    assert clock == virtual_time(many, 7, seconds_per_step=1.0, spread=0.5, dropout=0.0)


@given(st.integers(1, 1000), st.floats(1e-3, 10))
def test_twice_the_steps_take_twice_as_long(steps: int, seconds_per_step: float) -> None:
    clock = virtual_time(NAMES, 7, seconds_per_step=seconds_per_step, spread=0.3, dropout=0.0)
    assert clock.duration_seconds("client-3", 2 * steps) == 2 * clock.duration_seconds("client-3", steps)


def test_a_client_drops_out_with_the_probability_given_anew_each_round() -> None:
    """4,000 draws at 0.25, within 5 standard deviations of a binomial."""
    clock = virtual_time(NAMES, 7, seconds_per_step=1.0, spread=0.0, dropout=0.25)
    silent = [clock.find_dropouts(NAMES, number) for number in range(100)]
    draws = [[name in each for each in silent] for name in NAMES]
    assert abs(sum(map(sum, draws)) - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75)
    assert len(set(map(tuple, draws))) == len(NAMES)
    alone = plan.generator(7, "dropout client-3", 17).random() < 0.25
    assert alone == draws[3][17] == bool(clock.find_dropouts(["client-3"], 17))


def test_nobody_drops_out_by_default() -> None:
    clock = virtual_time(NAMES, 7, seconds_per_step=1.0, spread=0.0, dropout=0.0)
    assert not any(clock.find_dropouts(NAMES, number) for number in range(50))
