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

    found = [{"state": state, "inc": increment} for state, increment in seeding.states(entropies)]

    assert found == expected


@given(ENTROPIES)
def test_first_draws_are_those_of_separate_generators(entropies: list[int | list[int]]) -> None:
    found = seeding.states(entropies)
    expected = [np.random.default_rng(entropy) for entropy in entropies]
    assert found.first_integers() == [rng.integers(2**63) for rng in expected]
    expected = [np.random.default_rng(entropy) for entropy in entropies]
    assert found.first_randoms().tolist() == [rng.random() for rng in expected]


@given(
    st.lists(NUMBERS, min_size=1, max_size=2),
    st.lists(st.integers(0, 2**32 - 1), max_size=5),
    st.lists(NUMBERS, max_size=2),
)
def test_states_for_a_word_each_are_those_of_the_whole_entropies(
    before: list[int], words: list[int], after: list[int]
) -> None:
    expected = seeding.states([[*before, word, *after] for word in words])
    assert list(seeding.states_for(before, words, after)) == list(expected)


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
