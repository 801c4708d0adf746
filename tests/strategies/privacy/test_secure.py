"""Where noise gets its randomness."""

import os

import numpy as np
import pytest
from scipy import stats

from strategies.privacy.noise.secure import SecureSource, SeededSource, Source, draw_gaussians, draw_uniforms


def seeded(seed: int = 3) -> SeededSource:
    return SeededSource(np.random.default_rng(seed))


@pytest.mark.parametrize("source", [SecureSource(), seeded()])
def test_every_bit_of_a_word_is_drawn(source: Source) -> None:
    words = source.words(20_000)
    ones = np.unpackbits(words.view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert words.dtype == np.uint64
    assert np.abs(ones - 0.5).max() < 6 * 0.5 / np.sqrt(20_000)


def test_secure_words_never_repeat() -> None:
    source = SecureSource()
    drawn = np.concatenate([source.words(1000), source.words(1000), SecureSource().words(1000)])
    assert len(np.unique(drawn)) == len(drawn)


def test_a_forked_process_draws_other_words_than_its_parent() -> None:
    source = SecureSource()
    source.words(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, source.words(4).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 32) != source.words(4).tobytes()
    os.close(reader)
    os.close(writer)


def test_the_same_seed_gives_the_same_words() -> None:
    assert np.array_equal(seeded().words(10), seeded().words(10))
    assert not np.array_equal(seeded().words(10), seeded(4).words(10))


def test_gaussians_are_standard_normal_and_uncorrelated() -> None:
    drawn = draw_gaussians(seeded(), 100_001)
    assert len(drawn) == 100_001
    assert stats.kstest(drawn, "norm").pvalue > 0.01
    assert abs(np.corrcoef(drawn[:50_000], drawn[50_001:])[0, 1]) < 0.02


def test_uniforms_are_uniform_below_one() -> None:
    drawn = draw_uniforms(seeded(), 50_000)
    assert drawn.max() < 1
    assert stats.kstest(drawn, "uniform").pvalue > 0.01


def test_the_extreme_words_give_finite_gaussians() -> None:
    class Fixed:
        def __init__(self, word: int) -> None:
            self.word = word

        def words(self, count: int) -> np.ndarray:
            return np.full(count, self.word, np.uint64)

    assert draw_gaussians(Fixed(0), 2)[0] == pytest.approx(np.sqrt(2 * 65 * np.log(2)))
    assert np.isfinite(draw_gaussians(Fixed(2**64 - 1), 2)).all()
