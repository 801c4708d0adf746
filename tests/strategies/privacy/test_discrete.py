"""Noise on integers has the distribution of its name."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from strategies.privacy.noise.discrete import (
    Integers,
    add_gaussian,
    draw_discrete_gaussian,
    draw_poisson,
    draw_skellam,
    grid_step,
)
from strategies.privacy.noise.secure import SecureSource, SeededSource, Source

COUNT = 100_000


def seeded(seed: int = 11) -> SeededSource:
    return SeededSource(np.random.default_rng(seed))


def discrete_gaussian_pmf(values: np.ndarray, sigma: float) -> np.ndarray:
    support = np.arange(-int(12 * sigma) - 12, int(12 * sigma) + 13)
    return np.exp(-(values**2) / (2 * sigma**2)) / np.exp(-(support**2) / (2 * sigma**2)).sum()


def fit(drawn: Integers, pmf: Callable[[np.ndarray], np.ndarray]) -> float:
    """The p-value of a chi-square test, over the values that are expected at least ten times, and all others together."""
    support = np.arange(drawn.min() - 40, drawn.max() + 41)
    expected = pmf(support) * len(drawn)
    common = expected >= 10
    observed = np.array([(drawn == value).sum() for value in support[common]])
    rest = len(drawn) - expected[common].sum()
    return float(
        stats.chisquare(
            np.append(observed, len(drawn) - observed.sum()), np.append(expected[common], rest)
        ).pvalue
    )


@pytest.mark.parametrize("sigma", [0.3, 0.8, 1.0, 2.5, 10.0])
@pytest.mark.parametrize("source", [seeded(), SecureSource()], ids=["seeded", "secure"])
def test_a_discrete_gaussian_has_its_distribution(source: Source, sigma: float) -> None:
    drawn = draw_discrete_gaussian(source, sigma, COUNT)
    assert drawn.dtype == np.int64
    assert fit(drawn, lambda values: discrete_gaussian_pmf(values, sigma)) > 1e-6


@pytest.mark.parametrize("variance", [0.5, 6.0, 19.0, 21.0, 400.0])
def test_skellam_noise_has_its_distribution(variance: float) -> None:
    drawn = draw_skellam(seeded(), variance, COUNT)
    assert drawn.dtype == np.int64
    assert fit(drawn, lambda values: stats.skellam.pmf(values, variance / 2, variance / 2)) > 1e-4


@pytest.mark.parametrize("mean", [0.2, 9.9, 10.0, 35.0, 1e4])
def test_poisson_values_have_their_distribution(mean: float) -> None:
    assert fit(draw_poisson(seeded(), mean, COUNT), lambda values: stats.poisson.pmf(values, mean)) > 1e-4


@pytest.mark.parametrize(
    ("draw", "sigma"),
    [(draw_discrete_gaussian, sigma) for sigma in (1e3, 2.0**23, 2.0**40)]
    + [
        (lambda source, sigma, count: draw_skellam(source, sigma**2, count), sigma)
        for sigma in (1e3, 2.0**25)
    ],
)
def test_wide_noise_is_almost_normal_with_the_variance_asked_for(
    draw: Callable[[Source, float, int], Integers], sigma: float
) -> None:
    drawn = draw(seeded(), sigma, COUNT)
    assert abs(drawn.mean()) < 5 * sigma / np.sqrt(COUNT)
    assert drawn.var() == pytest.approx(sigma**2, rel=5 * np.sqrt(2 / COUNT))
    assert stats.kstest(drawn / sigma, "norm").pvalue > 1e-3


def test_noise_of_no_variance_is_zero() -> None:
    assert not draw_discrete_gaussian(seeded(), 0, 5).any()
    assert not draw_skellam(seeded(), 0, 5).any()


@pytest.mark.parametrize("sigma", [-1.0, np.nan, np.inf, 2.0**41])
def test_a_sigma_that_cannot_be_drawn_is_refused(sigma: float) -> None:
    with pytest.raises(ValueError, match="0 to 2\\^40"):
        draw_discrete_gaussian(seeded(), sigma, 1)
    with pytest.raises(ValueError, match="0 to 2\\^49"):
        draw_skellam(seeded(), sigma * abs(sigma) / 2, 1)


def test_every_value_of_the_tails_can_be_drawn() -> None:
    """Words of 0 let every coin succeed; the one word of ones ends the row of successes that makes the value large."""

    class Scripted:
        def __init__(self, successes: int) -> None:
            self.calls, self.end = 0, successes + 3

        def words(self, count: int) -> np.ndarray:
            self.calls += 1
            return np.full(count, 2**64 - 1 if self.calls == self.end else 0, np.uint64)

    for successes in (0, 5, 25, 100):  # 200 standard deviations: a probability of e^-20000
        assert draw_discrete_gaussian(Scripted(successes), 1.0, 1) == [2 * successes]


def test_noised_values_lie_on_the_grid_and_have_the_noise() -> None:
    values = np.random.default_rng(5).normal(size=COUNT)
    noised = add_gaussian(values, 0.37, seeded())
    step = grid_step(0.37)
    assert 2**23 <= 0.37 / step <= 2**24
    assert np.array_equal(np.rint(noised / step) * step, noised)
    assert stats.kstest((noised - values) / 0.37, "norm").pvalue > 0.01
    assert np.array_equal(add_gaussian(values, 0, seeded()), values)
