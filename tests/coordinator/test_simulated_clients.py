"""Who the simulated clients are: their runtimes, their speeds, their faults, all drawn by the seed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.errors import UserError
from coordinator.experiments import experiment
from coordinator.experiments.schema import Fault
from coordinator.fleets.client_profiles import make_virtual_time, one_interval_each
from coordinator.fleets.simulated_clients import SimulatedClient, VirtualTime, Work
from coordinator.rounds import plan
from coordinator.runs.population.clients import deal_out
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
    dealt = Counter(deal_out(shares, count, seed, "runtimes"))
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
    assert deal_out(scaled, 21, 7, "runtimes") == deal_out(shares, 21, 7, "runtimes")


def test_runtimes_are_dealt_out_in_an_order_drawn_by_the_seed() -> None:
    half = {"torch": 0.5, "litert": 0.5}
    first = deal_out(half, 40, 7, "runtimes")
    assert first == deal_out(dict(reversed(half.items())), 40, 7, "runtimes")
    assert first != deal_out(half, 40, 8, "runtimes")
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


def clients(names: Sequence[str] = NAMES) -> list[SimulatedClient]:
    return [SimulatedClient(name, index, 10, "torch") for index, name in enumerate(names)]


def clock_of(names: Sequence[str] = NAMES, **simulation: Any) -> VirtualTime:
    document = {"simulation": simulation, "federation": {"clients": len(names)}}
    return make_virtual_time(experiment.resolve(document, "test"), clients(names))


def test_without_spread_all_clients_are_equally_fast() -> None:
    clock = clock_of(seconds_per_step=0.5)
    assert set(clock.duration_seconds(np.arange(40), Work(10)).tolist()) == {5.0}


def test_with_spread_speeds_are_log_normal_and_stay_the_same() -> None:
    """The logarithms of 2,000 factors: mean 0 and standard deviation 0.5, each within 5 standard errors."""
    many = [f"client-{i}" for i in range(2000)]
    clock = clock_of(many, seconds_per_step=1.0, speed_spread=0.5)
    logs = np.log([clock.duration_seconds(index, Work(1)) for index in range(2000)])
    assert abs(logs.mean()) < 5 * 0.5 / math.sqrt(2000)
    assert abs(logs.std() - 0.5) < 5 * 0.5 / math.sqrt(2 * 2000)
    assert np.array_equal(clock.factors, clock_of(many, seconds_per_step=1.0, speed_spread=0.5).factors)


@given(st.integers(1, 1000), st.floats(1e-3, 10))
def test_twice_the_steps_take_twice_as_long(steps: int, seconds_per_step: float) -> None:
    clock = VirtualTime(seconds_per_step, np.full(1, 1.3), np.zeros(1), 7)
    assert clock.duration_seconds(0, Work(2 * steps)) == 2 * clock.duration_seconds(0, Work(steps))


def test_a_client_drops_out_with_the_probability_given_anew_each_round() -> None:
    """4,000 draws at 0.25, within 5 standard deviations of a binomial."""
    clock = clock_of(dropout=0.25)
    silent = [clock.find_dropouts(clients(), number) for number in range(100)]
    draws = [[name in each for each in silent] for name in NAMES]
    assert abs(sum(map(sum, draws)) - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75)
    assert len(set(map(tuple, draws))) == len(NAMES)
    alone = plan.generator(7, "dropout client-3", 17).random() < 0.25
    assert alone == draws[3][17] == bool(clock.find_dropouts(clients()[3:4], 17))


def test_nobody_drops_out_by_default() -> None:
    assert not any(clock_of().find_dropouts(clients(), number) for number in range(50))


def test_a_transfer_takes_its_bytes_by_the_rate_of_the_client() -> None:
    clock = clock_of(seconds_per_step=2.0, download=1000, upload="uniform(100, 200)")
    assert clock.upload is not None
    assert clock.upload.min() >= 100 and clock.upload.max() < 200 and len(set(clock.upload)) == 40
    assert clock.duration_seconds(3, Work(1, 5000, 300)) == 2 + 5 + 300 / clock.upload[3]


def test_a_fast_client_takes_less_time() -> None:
    clock = clock_of(seconds_per_step=3.0, speed="constant(2)")
    assert clock.duration_seconds(0, Work(4)) == 6.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"upload": "unifrom(1, 2)"},
            "simulation.upload: 'unifrom(1, 2)' is unknown, did you mean 'uniform'?",
        ),
        ({"upload": "uniform(3, 2)"}, "the low end is above the high one"),
        ({"upload": "uniform(3)"}, "uniform takes low and high"),
        ({"download": 0}, "the first one more than 0"),
        ({"speed": "lognormal(1, 9)"}, "expected a sigma from 0 to 5"),
        ({"speed": 1, "speed_spread": 1.0}, "both say how fast clients are"),
        ({"availability": "uniform(0.5, 1.5)"}, "expected shares up to 1"),
        ({"availability_period_seconds": 60.0}, "there are none"),
    ],
)
def test_a_wrong_distribution_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        clock_of(**settings)


# Presence


@given(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=5),
    st.lists(st.floats(0, 0.999), min_size=5, max_size=5),
    st.floats(0, 1e4),
)
# Its interval begins after a moment that is too short to be added to now.
@example(shares=[0.5], phases=[3.5e-165, 0.0, 0.0, 0.0, 0.0], now=2500.0)
def test_a_client_stays_as_long_as_it_says(shares: list[float], phases: list[float], now: float) -> None:
    """Who is there stays for the rest of its interval and is gone after it; who is not there arrives."""
    presence = one_interval_each(100.0, np.array(shares), np.array(phases[: len(shares)]))
    present = presence.at(now)
    for index, share in enumerate(shares):
        remaining, away = presence.remaining_seconds(index, now), 100 * (1 - share)
        assert (remaining > 0) == present[index]
        assert remaining <= 100 * share + 1e-9 or (share > 0.99999 and remaining == math.inf)
        if present[index] and 1e-6 < remaining < math.inf and away > 1e-3:
            assert presence.at(now + remaining * 0.999)[index]
            assert not presence.at(now + remaining + away / 2)[index]
        if not present[index]:
            arrives = presence.next_arrival(now, np.arange(len(shares)) == index)
            assert now < arrives <= now + 100
            assert presence.at(arrives + 1e-6)[index]


def test_clients_are_there_for_their_share_of_the_time() -> None:
    """400 clients at 50 moments, a quarter of the time each: within 5 standard errors."""
    many = [f"client-{i}" for i in range(400)]
    clock = clock_of(many, availability="constant(0.25)", availability_period_seconds=100.0)
    assert clock.presence is not None
    shares = [clock.presence.at(moment).mean() for moment in np.linspace(0, 1000, 50)]
    assert abs(np.mean(shares) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 400)


def test_profiles_of_clients_come_from_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "clients.csv"
    path.write_text(
        "client,speed,download,dropout,available\nclient-1,0.5,100,1,0-10 90-100\nclient-0,2,1000,0,\n"
    )
    clock = clock_of(
        NAMES[:2], profiles=str(path), seconds_per_step=1.0, upload=10, availability_period_seconds=100.0
    )
    work = Work(4, 1000, 50)
    assert [clock.duration_seconds(at, work) for at in (0, 1)] == [1 + 2 + 5, 10 + 8 + 5]
    assert clock.find_dropouts(clients(NAMES[:2]), 1) == {"client-1"}
    assert clock.presence is not None
    assert [clock.presence.at(now).tolist() for now in (5, 50, 95)] == [
        [False, True], [False, False], [False, True],
    ]  # fmt: skip
    assert clock.presence.remaining_seconds(1, 195) == 15


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,sped\n", "line 1: the columns are client, sped; expected client, and one or more of speed"),
        ("client,speed\nclient-0,fast\n", "line 2: speed = 'fast': expected a finite number"),
        ("client,speed\nclient-0,0\n", "line 2: speed = '0': expected a number of more than 0"),
        ("client,speed\nclient-0,1\nclient-9,1\n", "line 3: client = 'client-9' is none of the 2 clients"),
        ("client,speed\nclient-0,1\nclient-0,1\n", "line 3: client = 'client-0' has a line already"),
        ("client,speed\nclient-0,1\n", "has no line for client 'client-1'"),
        ("client,speed\nclient-0\n", "line 2: 1 cells, expected 2"),
        ("client,dropout\nclient-0,1.5\n", "line 2: dropout = '1.5': expected a probability from 0 to 1"),
        ("client,available\nclient-0,9\n", "line 2: available = '9': '9' is not of the form begin-end"),
        ("client,available\nclient-0,5-9 8-12\n", "expected intervals in order that do not overlap"),
        ("client,available\nclient-0,5-90000\n", "from 0 to 86400 seconds"),
        ("client,available\nclient-0,\nclient-1,\n", "no client is ever available"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_clients_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "clients.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        clock_of(NAMES[:2], profiles=str(path))
