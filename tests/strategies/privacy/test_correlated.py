"""The noise of DP-FTRL is that of its matrices, and its sensitivity covers every pattern of participation."""

from collections.abc import Iterator
from itertools import islice

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from strategies.privacy.noise.correlated import (
    BandedNoise,
    CorrelatedNoise,
    Participation,
    TreeNoise,
    correlated_matrix,
)
from strategies.privacy.noise.rounds import CorrelatedRounds


def banded_strategy(noise: BandedNoise, rounds: int) -> np.ndarray:
    column = np.zeros(rounds)
    column[: noise.bands] = noise.coefficients()[:rounds]
    return toeplitz(column, np.zeros(rounds))


def tree_strategy(rounds: int) -> np.ndarray:
    """A row for each complete node, in the order in which they become complete."""
    rows = []
    for last in range(1, rounds + 1):
        size = 1
        while last % size == 0:
            row = np.zeros(rounds)
            row[last - size : last] = 1
            rows.append(row)
            size *= 2
    return np.array(rows)


def patterns(rounds: int, separation: int, start: int = 0) -> Iterator[list[int]]:
    """Every set of rounds in which a client may take part."""
    yield []
    for first in range(start, rounds):
        for rest in patterns(rounds, separation, first + separation):
            yield [first, *rest]


def brute_force_sensitivity(strategy: np.ndarray, participation: Participation) -> float:
    """Updates that all point one way are the worst where C^T C has no negative value."""
    return max(
        float(np.linalg.norm(strategy[:, pattern].sum(axis=1)))
        for pattern in patterns(participation.rounds, participation.separation)
    )


@pytest.mark.parametrize(("bands", "rounds"), [(1, 5), (2, 7), (5, 12), (12, 12), (20, 9)])
def test_banded_noise_is_that_of_the_inverse_matrix(bands: int, rounds: int) -> None:
    noise = BandedNoise(bands)
    matrix = correlated_matrix(noise, rounds)
    inverse = np.linalg.inv(banded_strategy(noise, rounds))
    np.testing.assert_allclose(matrix @ matrix.T, inverse @ inverse.T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(matrix[:, :rounds], inverse, rtol=0, atol=1e-12)


def test_all_bands_are_the_square_root_of_the_matrix_of_prefix_sums() -> None:
    strategy = banded_strategy(BandedNoise(30), 30)
    np.testing.assert_allclose(strategy @ strategy, np.tril(np.ones((30, 30))), atol=1e-12)


def test_one_band_is_independent_noise() -> None:
    assert np.array_equal(correlated_matrix(BandedNoise(1), 6), np.eye(6, 12))
    assert BandedNoise(1).sensitivity(Participation(6, 6)) == 1
    assert BandedNoise(1).sensitivity(Participation(6, 1)) == pytest.approx(np.sqrt(6))


@pytest.mark.parametrize("rounds", [1, 2, 7, 8, 21])
def test_tree_noise_is_unbiased_and_has_the_variance_of_the_closed_form(rounds: int) -> None:
    """The prefix sum of t rounds is estimated from the subtrees of the binary digits of t."""
    strategy = tree_strategy(rounds)
    prefix = np.cumsum(correlated_matrix(TreeNoise(), rounds), axis=0)[:, : len(strategy)]
    np.testing.assert_allclose(prefix @ strategy, np.tril(np.ones((rounds, rounds))), atol=1e-12)
    expected = [
        sum(1 / (2 - 2.0**-level) for level in range(10) if count >> level & 1)
        for count in range(1, rounds + 1)
    ]
    np.testing.assert_allclose((prefix**2).sum(axis=1), expected, rtol=1e-12)


def test_tree_noise_has_the_least_variance_among_estimates_of_a_full_tree() -> None:
    """At the end of a full tree every node lies below the root, and the pseudo-inverse is the best linear estimate."""
    prefix = np.cumsum(correlated_matrix(TreeNoise(), 16), axis=0)[-1, :31]
    best = np.ones(16) @ np.linalg.pinv(tree_strategy(16))
    np.testing.assert_allclose(prefix, best, atol=1e-12)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_the_sensitivity_of_banded_noise_is_that_of_the_worst_pattern(
    rounds: int, separation: int, bands: int
) -> None:
    participation, noise = Participation(rounds, separation), BandedNoise(min(bands, separation))
    assert noise.sensitivity(participation) == pytest.approx(
        brute_force_sensitivity(banded_strategy(noise, rounds), participation)
    )


@given(st.integers(1, 13), st.integers(1, 13))
def test_the_sensitivity_of_the_tree_covers_the_worst_pattern(rounds: int, separation: int) -> None:
    participation = Participation(rounds, separation)
    assert (
        TreeNoise().sensitivity(participation)
        >= brute_force_sensitivity(tree_strategy(rounds), participation) - 1e-9
    )


@pytest.mark.parametrize(("rounds", "separation"), [(8, 8), (8, 4), (8, 2), (16, 4), (11, 11), (8, 1)])
def test_the_sensitivity_of_the_tree_is_exact_in_regular_cases(rounds: int, separation: int) -> None:
    participation = Participation(rounds, separation)
    assert TreeNoise().sensitivity(participation) == pytest.approx(
        brute_force_sensitivity(tree_strategy(rounds), participation)
    )


def test_more_bands_than_the_separation_are_refused() -> None:
    with pytest.raises(ValueError, match="5 bands are more than the 4 rounds"):
        BandedNoise(5).sensitivity(Participation(8, 4))


def test_all_rounds_together_are_one_gaussian_mechanism() -> None:
    """The privacy loss between the mechanism with and without a client, from the covariance of what is released."""
    participation, noise, multiplier = Participation(12, 4), BandedNoise(4), 2.0
    matrix = correlated_matrix(noise, 12)
    covariance = (multiplier * noise.sensitivity(participation)) ** 2 * matrix @ matrix.T
    shift = np.zeros(12)
    shift[[0, 4, 8]] = 1  # a client of norm 1 in the rounds of the worst pattern
    distance = np.sqrt(shift @ np.linalg.solve(covariance, shift))
    assert distance == pytest.approx(1 / multiplier)

    def epsilon(noise_multiplier: float) -> float:
        accountant = PLDAccountant()
        accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier))
        return float(accountant.get_epsilon(1e-5))

    assert epsilon(1 / distance) == pytest.approx(epsilon(multiplier))
    assert epsilon(1.0) == pytest.approx(4.3772, abs=1e-3)


def test_banded_noise_errs_less_than_the_tree_and_that_less_than_independent_noise() -> None:
    for separation in (16, 32, 64):
        participation = Participation(64, separation)

        def errors(
            noise: CorrelatedNoise, participation: Participation = participation
        ) -> tuple[float, float]:
            variances = (np.cumsum(correlated_matrix(noise, 64), axis=0) ** 2).sum(axis=1)
            error = noise.sensitivity(participation) * np.sqrt(variances)
            return float(np.sqrt(np.mean(error**2))), float(error.max())

        banded, tree, independent = (
            errors(noise) for noise in (BandedNoise(separation), TreeNoise(), BandedNoise(1))
        )
        assert banded[0] < tree[0] < independent[0]
        assert banded[1] < tree[1] < independent[1]


@pytest.mark.parametrize("noise", [BandedNoise(3), TreeNoise()])
def test_noise_that_is_drawn_again_is_the_same(noise: CorrelatedNoise) -> None:
    def draw(number: int) -> np.ndarray:
        return np.random.default_rng([5, number]).standard_normal(4)

    first = list(islice(noise.stream(draw), 9))
    again = list(islice(noise.stream(draw), 9))
    assert np.array_equal(first, again)
    assert not np.array_equal(first[7], first[8])


@pytest.mark.parametrize("noise", [BandedNoise(3), TreeNoise()])
def test_a_run_that_goes_on_has_the_noise_that_it_would_have_had(noise: CorrelatedNoise) -> None:
    def generator(vector: int, tensor: int) -> np.random.Generator:
        return np.random.default_rng([5, vector, tensor])

    def draw(rounds: CorrelatedRounds, number: int) -> np.ndarray:
        source = rounds.round(number)
        return np.concatenate([source.standard_normal((2, 3)).ravel(), source.standard_normal((4,))])

    whole = CorrelatedRounds(noise, generator)
    first = [draw(whole, number) for number in range(1, 8)]
    resumed = CorrelatedRounds(noise, generator)
    assert np.array_equal(draw(resumed, 5), first[4])
    assert np.array_equal(draw(resumed, 5), first[4])  # a round that is played again
    assert np.array_equal(draw(resumed, 7), first[6])
    expected = correlated_matrix(noise, 7)[6] @ [generator(k, 1).standard_normal(4) for k in range(14)]
    np.testing.assert_allclose(first[6][6:], expected, atol=1e-12)
