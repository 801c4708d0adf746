"""Generators made together draw what generators made one by one draw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.train import seeding

NUMBERS = st.integers(0, 2**70) | st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**64, 2**128])
ENTROPIES = st.lists(NUMBERS | st.lists(NUMBERS, min_size=1, max_size=6), max_size=8)


@given(ENTROPIES)
def test_states_are_those_of_separate_generators(entropies: list[int | list[int]]) -> None:
    expected = [np.random.default_rng(each).bit_generator.state["state"] for each in entropies]

    found = [{"state": each.state, "inc": each.increment} for each in seeding.states(entropies)]

    assert found == expected


@given(ENTROPIES)
def test_first_draws_are_those_of_separate_generators(entropies: list[int | list[int]]) -> None:
    for entropy, state in zip(entropies, seeding.states(entropies), strict=True):
        assert state.first_integer() == np.random.default_rng(entropy).integers(2**63)
        assert state.first_random() == np.random.default_rng(entropy).random()


def test_one_generator_set_in_turn_draws_as_separate_ones() -> None:
    seeds = [3, 2**40, 0, 2**63 - 1]
    for seed, generator in zip(seeds, seeding.generators(seeds), strict=True):
        alone = np.random.default_rng(seed)
        for size in (5, 60, 1):
            # 32-bit draws leave half a number behind, which the next generator must not see.
            np.testing.assert_array_equal(generator.permutation(size), alone.permutation(size))
        assert generator.integers(2**32, dtype=np.uint32) == alone.integers(2**32, dtype=np.uint32)


def test_negative_entropy_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        seeding.states([-1])
