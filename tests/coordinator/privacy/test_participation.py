"""Between two participations of a client there are as many rounds as its noise needs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.privacy.participation import make_turns


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 2**32))
def test_a_client_has_its_turn_once_in_as_many_rounds_as_the_separation(
    clients: int, separation: int, seed: int
) -> None:
    names = [f"client-{number}" for number in range(clients)]
    turns = make_turns(names, separation, np.random.default_rng(seed))
    for first in (1, 5):
        cycle = [turns.select(number, names) for number in range(first, first + separation)]
        assert sorted(name for cohort in cycle for name in cohort) == sorted(names)
        assert max(map(len, cycle)) - min(map(len, cycle)) <= 1
        assert min(map(len, cycle)) == clients // separation
    assert turns.select(3, names) == turns.select(3 + separation, names)


def test_clients_are_divided_by_chance() -> None:
    names = [f"client-{number}" for number in range(100)]
    one, other = (make_turns(names, 10, np.random.default_rng(seed)).select(1, names) for seed in (1, 2))
    assert one != other
    assert make_turns(names, 10, np.random.default_rng(1)).select(1, names) == one
