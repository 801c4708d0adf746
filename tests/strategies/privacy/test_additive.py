"""Noise as it is added: its deviation, its grid, and where its randomness comes from."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.privacy.central import CentralNoise, nothing
from strategies.privacy.noise.additive import GridNoise, NoiseSource, RoundedNoise, SourceNormals
from strategies.privacy.noise.discrete import grid_step
from strategies.privacy.noise.secure import KeyedSource, SecureSource


@pytest.mark.parametrize(
    "source",
    [GridNoise(SecureSource()), RoundedNoise(SourceNormals(KeyedSource(b"k" * 32, 1)))],
    ids=["discrete", "rounded"],
)
def test_secure_noise_on_a_sum_has_the_deviation_of_the_multiplier(source: NoiseSource) -> None:
    noise = CentralNoise(0.5, 2.0, cohort=4)
    noised = noise.add_noise(nothing({"w": np.zeros((500, 400), np.float32)}), 0.5, source).delta["w"]
    assert noised.shape == (500, 400)
    assert noised.std() * 4 == pytest.approx(1.0, rel=0.01) and abs(noised.mean()) < 0.01


@pytest.mark.parametrize(
    "source",
    [GridNoise(SecureSource()), RoundedNoise(SourceNormals(KeyedSource(b"k" * 32, 1)))],
    ids=["discrete", "rounded"],
)
def test_noised_values_betray_nothing_by_their_last_bits(source: NoiseSource) -> None:
    values = np.random.default_rng(1).normal(size=1000)
    noised = source.add(values, 0.3)
    steps = noised / grid_step(0.3)
    assert np.array_equal(steps, np.rint(steps))
    assert not np.array_equal(values / grid_step(0.3), np.rint(values / grid_step(0.3)))


def test_noise_covers_what_rounding_to_the_grid_adds_to_the_sensitivity() -> None:
    class Recording(GridNoise):
        def add(self, values: np.ndarray, deviation: float) -> np.ndarray:
            deviations.append(deviation)
            return values

    deviations: list[float] = []
    size = 1_000_000
    noise, source = CentralNoise(1.0, 8.0, cohort=1), Recording(SecureSource())
    noise.add_noise(nothing({"w": np.zeros(size, np.float32)}), 1.0, source)
    (deviation,) = deviations
    assert deviation >= 8.0 * (1.0 + grid_step(deviation) * size**0.5)
    with pytest.raises(ValueError, match="take less noise"):
        CentralNoise(1.0, 1e5, cohort=1).add_noise(nothing({"w": np.zeros(size, np.float32)}), 1.0, source)


def test_keyed_words_are_those_of_their_key_and_numbers_alone() -> None:
    words = {
        (key, *numbers): KeyedSource(key, *numbers).words(8).tobytes()
        for key in (b"a" * 32, b"b" * 32)
        for numbers in ((), (1,), (1, 2), (2, 1), (258,))
    }
    assert len(set(words.values())) == len(words)
    again = KeyedSource(b"a" * 32, 1, 2)
    assert b"".join(again.words(4).tobytes() for _ in range(2)) == words[(b"a" * 32, 1, 2)]
