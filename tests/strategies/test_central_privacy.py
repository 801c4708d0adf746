"""Central differential privacy: no client moves a sum by more than the norm, noise is as configured, the norm finds its quantile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import presets
from strategies.params import l2_norm
from strategies.privacy.central import Adaptive, CentralNoise, nothing
from strategies.privacy.noise.additive import FloatNoise
from strategies.update import Aggregate, Update

NORMS = st.lists(st.floats(0, 100), min_size=1, max_size=20)


def update(norm: float, examples: int = 1) -> Update:
    values = np.array([3.0, 4.0], np.float32) * np.float32(norm / 5)
    return Update({"w": values}, examples, 1, 0.5)


def fold(noise: CentralNoise, updates: list[Update], clip_norm: float) -> Aggregate:
    strategy = noise.limit(presets.get("fedavg"), clip_norm)
    folding = strategy.start(len(updates))
    for position, each in enumerate(updates):
        folding.add(position, strategy.transform(each))
    return folding.finish()


@given(NORMS, st.floats(0.01, 10), st.integers(1, 10_000))
def test_one_client_more_moves_the_sum_by_the_clipping_norm_at_most(
    norms: list[float], clip_norm: float, examples: int
) -> None:
    noise = CentralNoise(clip_norm, 1.0, cohort=7)
    others = [update(norm) for norm in norms]
    without = fold(noise, others, clip_norm).delta["w"]
    moved = fold(noise, [*others, update(1e6, examples)], clip_norm).delta["w"] - without
    assert l2_norm({"w": moved}) <= clip_norm / 7 * (1 + 1e-6)


def test_the_sum_is_divided_by_the_expected_cohort_whoever_came() -> None:
    noise = CentralNoise(1.0, 1.0, cohort=10)
    assert fold(noise, [update(0.5)] * 4, 1.0).delta["w"] == pytest.approx([0.12, 0.16])


def test_noise_on_the_sum_has_the_deviation_of_the_multiplier() -> None:
    noise = CentralNoise(0.5, 2.0, cohort=4)
    zero = nothing({"w": np.zeros(200_000, np.float32)})
    noised = noise.add_noise(zero, 0.5, FloatNoise(np.random.default_rng(1))).delta["w"] * 4  # the sum
    assert noised.std() == pytest.approx(1.0, rel=0.01) and abs(noised.mean()) < 0.01
    assert np.array_equal(
        noised, noise.add_noise(zero, 0.5, FloatNoise(np.random.default_rng(1))).delta["w"] * 4
    )


@given(st.floats(0.1, 20), st.integers(1, 1000))
def test_sum_and_count_together_are_as_private_as_the_multiplier_says(multiplier: float, cohort: int) -> None:
    noise = CentralNoise(1.0, multiplier, cohort, Adaptive())
    # Gaussians of sensitivities 1 and 1/2 compose to one whose squared sensitivity over noise is the sum.
    together = noise.sum_multiplier**-2 + (0.5 / noise.count_deviation) ** 2
    assert together == pytest.approx(multiplier**-2)


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_adaptive_clipping_converges_to_the_quantile(quantile: float) -> None:
    noise = CentralNoise(0.01, 1.0, cohort=200, adaptive=Adaptive(quantile))
    rng, clip_norm = np.random.default_rng(3), 0.01
    found = []
    for _ in range(120):
        clip_norm = noise.next_clip_norm(clip_norm, rng.lognormal(1, 0.5, 200).tolist(), FloatNoise(rng))
        found.append(clip_norm)
    wanted = np.quantile(np.random.default_rng(4).lognormal(1, 0.5, 100_000), quantile)
    assert np.exp(np.mean(np.log(found[60:]))) == pytest.approx(wanted, rel=0.1)


def test_fixed_clipping_keeps_its_norm() -> None:
    assert CentralNoise(0.5, 1.0, 10).next_clip_norm(0.5, [9.0], FloatNoise(np.random.default_rng(1))) == 0.5
