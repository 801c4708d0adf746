"""What rounds with correlated noise, and with noise that clients add, spend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.privacy.accountant import NoisyRound, epsilon_after
from coordinator.privacy.correlated import CorrelatedSpending, find_correlated_noise
from coordinator.privacy.distributed import DistributedSpending
from strategies.privacy.noise.correlated import BandedNoise, CorrelatedNoise, Participation, TreeNoise
from strategies.privacy.noise.distributed import DistributedNoise, Kind


def gaussian(noise_multiplier: float, rounds: int = 1, accountant: str = "pld") -> float:
    kind = NoisyRound(noise_multiplier, "none", 1, 1)
    return epsilon_after(kind, rounds, 1e-5, accountant).epsilon  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [BandedNoise(4), TreeNoise()])
def test_all_rounds_of_correlated_noise_spend_what_one_gaussian_does(noise: CorrelatedNoise) -> None:
    spending = CorrelatedSpending(noise, 1.0, Participation(20, 4), 1e-5)
    assert spending.after(20).epsilon == pytest.approx(4.3772, abs=1e-3)
    assert spending.after(0).epsilon == 0
    spent = [spending.after(rounds).epsilon for rounds in range(21)]
    assert spent == sorted(spent)
    assert "4 rounds later at the earliest, so at most 5 times" in spending.after(20).in_words()


def test_one_band_spends_what_independent_noise_without_sampling_does() -> None:
    """Of twelve rounds a client is in three: with noise of √3 in each, that is a Gaussian mechanism of multiplier 1."""
    spending = CorrelatedSpending(BandedNoise(1), 1.0, Participation(12, 4), 1e-5)
    assert spending.after(12).epsilon == pytest.approx(gaussian(3**0.5, rounds=3))
    assert spending.after(4).epsilon == pytest.approx(gaussian(3**0.5))


def test_the_noise_for_an_epsilon_spends_it() -> None:
    found = find_correlated_noise(1e-5, 2.0)
    assert gaussian(found) <= 2.0 < gaussian(found - 0.002)


@pytest.mark.parametrize("kind", ["skellam", "discrete_gaussian"])
def test_rounds_of_distributed_noise_spend_little_more_than_gaussian_ones(kind: Kind) -> None:
    noise = DistributedNoise(kind, 1000, 0.5, 3.0, clients=16, fewest=11, bits=24)
    expected = gaussian(3.0, rounds=10, accountant="rdp")
    each_round = Participation(10, 1)
    spent = DistributedSpending([noise], each_round, 1e-5).after(10)
    assert spent.epsilon == pytest.approx(expected, rel=0.01)
    assert "one may take part in each of them" in spent.in_words()
    coarse = DistributedSpending([replace(noise, bits=12)], each_round, 1e-5)
    assert coarse.after(10).epsilon > spent.epsilon
    assert coarse.after(0).epsilon == 0
