"""How similar a reconstructed row is to a row of the client, and how similar a guess would be.

Images are compared by SSIM, rows of a table by the cosine of their standardised columns: the mean row of the data has the cosine 0 then, so
that knowing what rows look like on average counts for nothing. Both are 1 for equal rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_WINDOW = 7
"""Side of SSIM's window, or the image's if that is smaller."""
_NOTHING = 1e-4
"""Length of a vector in standard deviations, below which it is rounding."""
_GUESSES = 40
"""Times that other rows are drawn as guesses."""
_LUCK = 0.95
"""Share of these guesses that are no more similar than the figure that counts."""


@dataclass(frozen=True)
class Measure:
    """The measure of an experiment's rows.

    Attributes:
        is_image: whether rows are images, [height, width] or [channels, height, width].
        mean, deviation: of each value over rows of the data.
        span: greatest minus least value of the rows.
    """

    is_image: bool
    mean: Floats
    deviation: Floats
    span: float

    @staticmethod
    def of(rows: npt.NDArray[np.float32]) -> Measure:
        """The measure of data like these `rows` [N, …], N >= 1."""
        wide = rows.astype(np.float64)
        is_image = wide.ndim in (3, 4) and min(wide.shape[-2:]) > 2
        span = float(wide.max() - wide.min()) or 1.0
        return Measure(is_image, wide.mean(axis=0), wide.std(axis=0), span)

    @property
    def name(self) -> str:
        return "SSIM" if self.is_image else "cosine"

    def compare(self, one: npt.NDArray[np.float32], others: npt.NDArray[np.float32]) -> Floats:
        """Similarity of a row to each of `others` [N, …]; 1 where they are equal."""
        if self.is_image:
            return ssim(one, others, self.span)
        return cosines(self._standardised(one[None])[0], self._standardised(others))

    def _standardised(self, rows: npt.NDArray[np.float32]) -> Floats:
        varied = self.deviation > 1e-9
        scaled: Floats = (rows.astype(np.float64) - self.mean)[:, varied] / self.deviation[varied]
        return scaled.reshape(len(rows), -1)


@dataclass(frozen=True)
class Match:
    """The best of an attacker's reconstructions.

    Attributes:
        similarity: to the row that it is most similar to.
        guess: the same of guesses: of the mean row of the data, or of as many other rows as there are reconstructions, which in 19 of 20
            draws reach no more.
        psnr: in decibels; infinite for equal rows.
        closest: of each reconstruction the index of the row that it is most similar to, and the similarity.
    """

    similarity: float
    guess: float
    psnr: float
    closest: tuple[tuple[int, float], ...]

    def pairs(self, found: npt.NDArray[np.float32]) -> list[tuple[npt.NDArray[np.float32], int, float]]:
        """Each of the reconstructions with the index of its row and the similarity, the most similar first."""
        order = sorted(range(len(found)), key=lambda index: -self.closest[index][1])
        return [(found[index], *self.closest[index]) for index in order]


def match(
    measure: Measure,
    found: npt.NDArray[np.float32],
    rows: npt.NDArray[np.float32],
    others: npt.NDArray[np.float32],
    rng: np.random.Generator,
) -> Match:
    """The reconstruction that is most similar to one of the client's `rows`. `others`: rows that are not the client's, to guess with."""
    table = np.array([measure.compare(each, rows) for each in found])
    best, row = (int(index) for index in np.unravel_index(np.argmax(table), table.shape))
    mean_row = measure.compare(measure.mean.astype(np.float32), rows).max()
    reached = np.array([measure.compare(each, rows).max() for each in others])
    count = min(len(found), len(reached))
    draws = [reached[rng.choice(len(reached), count, replace=False)].max() for _ in range(_GUESSES)]
    guess = max(float(mean_row), float(np.quantile(draws, _LUCK)))
    closest = tuple((int(np.argmax(line)), float(line.max())) for line in table)
    return Match(float(table[best, row]), guess, psnr(found[best], rows[row], measure.span), closest)


def leaked(similarity: float, guess: float) -> float:
    """The share of the way from a guess to the row itself that the attack has gone, from 0 to 1."""
    return min(1.0, max(0.0, (similarity - guess) / max(1e-9, 1 - guess)))


def psnr(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32], span: float) -> float:
    """Peak signal-to-noise ratio in decibels."""
    error = float(np.mean(np.square(one.astype(np.float64) - other)))
    return math.inf if error == 0 else 10 * math.log10(span * span / error)


def ssim(one: npt.NDArray[np.float32], others: npt.NDArray[np.float32], span: float) -> Floats:
    """Structural similarity of an image [(C,) H, W] to each of `others` [N, (C,) H, W], mean over windows and channels.

    Wang 2004, equation 13, with uniform windows. `span`: range of the pixels.
    """
    a, b = one.astype(np.float64)[None], others.astype(np.float64)
    mean_a, mean_b = _window_means(a), _window_means(b)
    count = math.prod(_sides(a))
    unbiased = count / max(1, count - 1)
    var_a, var_b = (
        (_window_means(each * each) - mean * mean) * unbiased for each, mean in ((a, mean_a), (b, mean_b))
    )
    covariance = (_window_means(a * b) - mean_a * mean_b) * unbiased
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    values = ((2 * mean_a * mean_b + c1) * (2 * covariance + c2)) / (
        (mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)
    )
    return np.asarray(values.reshape(len(others), -1).mean(axis=1))


def _sides(images: Floats) -> tuple[int, int]:
    return min(_WINDOW, images.shape[-2]), min(_WINDOW, images.shape[-1])


def _window_means(images: Floats) -> Floats:
    """The mean of each window, from sums over all pixels above and left of each one."""
    high, wide = _sides(images)
    padding = [(0, 0)] * (images.ndim - 2) + [(1, 0), (1, 0)]
    sums = np.pad(images, padding).cumsum(-2).cumsum(-1)
    windows = (
        sums[..., high:, wide:]
        - sums[..., :-high, wide:]
        - sums[..., high:, :-wide]
        + sums[..., :-high, :-wide]
    )
    return np.asarray(windows / (high * wide))


def cosines(one: Floats, others: Floats) -> Floats:
    """Cosine of a vector [d] with each of [N, d]; 0 where one of them is as good as zero."""
    length, lengths = float(np.linalg.norm(one)), np.linalg.norm(others, axis=1)
    if length < _NOTHING:
        return np.zeros(len(others))
    return np.asarray(others @ one / (length * np.maximum(lengths, _NOTHING)))


def token_score(moved: npt.NDArray[np.float32], occurred: Sequence[int]) -> tuple[float, list[int]]:
    """How well the movement of embeddings tells which tokens occurred, and the tokens that moved.

    The score is the mean of two shares: of the tokens that occurred, those that moved; of the others, those that did not. 0.5 is a guess, 1
    is exact.
    """
    largest = float(moved.max(initial=0.0))
    is_moved = moved > 1e-6 * largest if largest > 0 else np.zeros(len(moved), np.bool_)
    did = np.zeros(len(moved), np.bool_)
    did[list(occurred)] = True
    hits = float(is_moved[did].mean()) if did.any() else 1.0
    rests = float((~is_moved[~did]).mean()) if not did.all() else 1.0
    return (hits + rests) / 2, np.flatnonzero(is_moved).tolist()
