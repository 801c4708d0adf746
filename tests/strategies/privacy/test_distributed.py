"""Distributed noise: what clients encode sums up to their updates with the noise that was configured, in any ring."""

from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp

from strategies.codes.rotation import rotate
from strategies.privacy.noise import divergence
from strategies.privacy.noise.distributed import DistributedNoise, Kind
from strategies.privacy.noise.secure import SeededSource

NOISE = DistributedNoise("skellam", 1000, 0.5, 1.0, clients=20, fewest=15)
KINDS: list[Kind] = ["discrete_gaussian", "skellam"]


def source(seed: int = 1) -> SeededSource:
    return SeededSource(np.random.default_rng(seed))


def updates(noise: DistributedNoise, clients: int, seed: int = 2) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=(clients, noise.values))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True) * noise.clip_norm


def secure_sum(noise: DistributedNoise, sent: np.ndarray, seed: int = 3) -> np.ndarray:
    """What a secure sum reveals: the sum modulo 2^bits, and no more."""
    drawn = source(seed)
    residues = sum(noise.encode(update, 7, drawn).astype(object) for update in sent)
    return noise.decode((residues % noise.modulus).astype(np.uint64), 7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clients", [15, 20])
def test_a_sum_has_the_updates_and_the_noise_of_its_clients(kind: Kind, clients: int) -> None:
    noise = replace(NOISE, kind=kind, values=8192)
    sent = updates(noise, clients)
    rest = secure_sum(noise, sent) - sent.sum(axis=0)
    configured = noise.noise_multiplier * noise.clip_norm * np.sqrt(clients / noise.fewest)
    assert rest.std() == pytest.approx(configured, rel=0.05)
    assert abs(rest.mean()) < 5 * configured / np.sqrt(len(rest))
    assert stats.kstest(rest / rest.std(), "norm").pvalue > 1e-3


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 8), st.integers(14, 28), st.sampled_from(KINDS))
def test_without_much_noise_decoding_reverses_encoding(
    values: int, clients: int, bits: int, kind: Kind
) -> None:
    noise = DistributedNoise(kind, values, 2.0, 0.01, clients, clients, bits)
    sent = updates(noise, clients)
    error = np.abs(secure_sum(noise, sent) - sent.sum(axis=0)).max()
    rounding = noise.granularity * np.sqrt(clients / 4)
    assert error < 6 * np.hypot(rounding, noise.noise_multiplier * noise.clip_norm) + 1e-5


def test_equal_updates_of_one_value_do_not_wrap_around() -> None:
    """The worst case for a ring: all clients send the same, and all of it in one value."""
    noise = replace(NOISE, clients=200, fewest=200, noise_multiplier=0.05, bits=16)
    sent = np.zeros((200, noise.values))
    sent[:, 17] = noise.clip_norm
    assert np.abs(secure_sum(noise, sent) - sent.sum(axis=0)).max() < 0.5


def test_residues_lie_in_the_ring_and_reach_both_ends() -> None:
    noise = replace(NOISE, bits=8)
    residues = noise.encode(updates(noise, 1)[0], 7, source())
    assert residues.dtype == np.uint64
    assert len(residues) == noise.length == 1024
    assert residues.max() < 256
    assert residues.max() > 240
    assert residues.min() < 16


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), st.integers(6, 24), st.integers(0, 2**32), st.floats(0, 100))
def test_no_rounded_update_exceeds_the_norm_that_is_accounted_for(
    values: int, bits: int, seed: int, length: float
) -> None:
    noise = DistributedNoise("skellam", values, 1.0, 1.0, clients=1, fewest=1, bits=bits)
    update = updates(noise, 1, seed)[0] * length
    rounded = noise._round(noise._rotate(update, seed), source(seed))
    assert np.linalg.norm(rounded) <= noise.norm_bound


def test_rounding_is_unbiased_for_all_but_its_refusals() -> None:
    noise = replace(NOISE, bits=12, clients=1, fewest=1)
    update, drawn = updates(noise, 1)[0], source()
    steps = noise._rotate(update, 7)
    mean = np.mean([noise._round(steps, drawn) for _ in range(400)], axis=0)
    assert np.abs(mean - steps).max() < 6 * 0.5 / np.sqrt(400)


def test_a_longer_update_is_clipped() -> None:
    noise = replace(NOISE, noise_multiplier=0.01)
    sent = updates(noise, 20) * 30
    expected = sent.sum(axis=0) / 30
    assert np.abs(secure_sum(noise, sent) - expected).max() < 0.05


def test_an_update_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="1000 finite values; this one has 3"):
        NOISE.encode(np.zeros(3), 7, source())
    with pytest.raises(ValueError, match="finite"):
        NOISE.encode(np.full(1000, np.nan), 7, source())
    with pytest.raises(ValueError, match="expected 1 to 20"):
        replace(NOISE, fewest=21)
    with pytest.raises(ValueError, match="4 bits do not hold the rounding of 20 clients"):
        replace(NOISE, bits=4)


def test_the_rotation_is_that_of_update_codes() -> None:
    update = updates(NOISE, 1)[0]
    padded = np.zeros(1024, np.float32)
    padded[:1000] = update / NOISE.granularity
    np.testing.assert_allclose(
        NOISE._rotate(update, 7), np.concatenate([each.ravel() for each in rotate(padded, 7)]), rtol=1e-5
    )


ORDERS = [2, 3, 5, 8, 16]


def renyi(p: np.ndarray, shift: int, alpha: int) -> float:
    """The larger of the divergences between a distribution on integers and its shift."""
    q = np.roll(p, shift)
    both = (p > 1e-250) & (q > 1e-250)
    one, other = np.log(p[both]), np.log(q[both])
    largest = max(logsumexp(alpha * x + (1 - alpha) * y) for x, y in ((one, other), (other, one)))
    return float(largest) / (alpha - 1)


@pytest.mark.parametrize(("variance", "shift"), [(20.0, 1), (50.0, 3), (200.0, 10), (4.0, 1)])
def test_the_divergence_of_skellam_noise_is_below_its_bound(variance: float, shift: int) -> None:
    support = np.arange(-400, 401)
    p = stats.skellam.pmf(support, variance / 2, variance / 2)
    bounds = divergence.skellam(shift, 1, variance, ORDERS)
    exact = [renyi(p, shift, alpha) for alpha in ORDERS]
    assert all(one <= other for one, other in zip(exact, bounds, strict=True))
    assert exact[0] == pytest.approx(shift**2 / variance, rel=1 / variance)  # as of a Gaussian


@pytest.mark.parametrize(
    ("variance", "clients", "shift"), [(1.0, 2, 1), (1.0, 8, 3), (0.4, 5, 2), (6.0, 4, 5)]
)
def test_the_divergence_of_a_sum_of_discrete_gaussians_is_below_its_bound(
    variance: float, clients: int, shift: int
) -> None:
    support = np.arange(-256, 256)
    single = np.exp(-(support**2) / (2 * variance))
    single /= single.sum()
    together = single
    for _ in range(clients - 1):
        together = np.convolve(together, single)[256:768]
    bounds = divergence.discrete_gaussians(shift, 1, variance, clients, ORDERS[:4])
    exact = [renyi(together, shift, alpha) for alpha in ORDERS[:4]]
    assert all(one <= other + 1e-9 for one, other in zip(exact, bounds, strict=True))


def test_the_closed_forms_are_those_of_the_papers() -> None:
    assert divergence.skellam(3, 100, 10, [4])[0] == pytest.approx(
        4 * 9 / 20 + min((7 * 9 + 6 * 9) / 400, 27 / 20)
    )
    tau = 10 * (np.exp(-(np.pi**2)) + np.exp(-(np.pi**2) * 4 / 3))
    assert divergence.discrete_gaussians(2, 50, 1.0, 3, [6])[0] == pytest.approx(
        3 * min(4 / 3 + tau * 25, (2 / np.sqrt(3) + tau * np.sqrt(50)) ** 2)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_fine_grid_costs_what_gaussian_noise_costs(kind: Kind) -> None:
    """The more bits, the closer to a Gaussian of the same multiplier; never below it."""
    orders = list(range(2, 64))
    accountant = RdpAccountant(orders)
    accountant.compose(dp_accounting.GaussianDpEvent(1.0))
    gaussian = float(accountant.get_epsilon(1e-5))
    epsilons = [
        float(
            dp_accounting.rdp.compute_epsilon(
                orders, divergence.divergences(replace(NOISE, kind=kind, bits=bits), orders), 1e-5
            )[0]
        )
        for bits in (14, 18, 24)
    ]
    assert epsilons[0] > epsilons[1] > epsilons[2] > gaussian
    assert epsilons[2] == pytest.approx(gaussian, rel=1e-3)
