"""A lower bound on epsilon from one run, as pure functions.

Each of m canaries takes part with probability 1/2, independently. From what the mechanism has released, the auditor guesses for r of them
whether they did, and v guesses are right. If the mechanism is (ε, δ)-differentially private for adding or removing one canary, then

    P[right >= v] <= β + 2 m δ max_i (P[v > X >= v - i] / i),   β = P[X >= v],   X ~ Binomial(r, e^ε / (1 + e^ε))

so an ε for which the right side is smaller than 1 - confidence is refuted. Steinke, Nasr and Jagielski 2023, theorem 5.2 and appendix D.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
_LARGEST = 64.0
"""No run refutes more."""
_SHARES = (1.0, 0.5, 0.25, 0.125)
"""Of the canaries, for which the auditor guesses; the bound is the best of all, each with its part of the error."""


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound on the probability of so many `right` guesses under an (`epsilon`, `delta`)-private mechanism."""
    pmf = _binomial(guesses, 1 / (1 + math.exp(-epsilon)))
    beta = float(pmf[right:].sum())
    below = np.cumsum(pmf[:right][::-1])  # P[v > X >= v - i] for i = 1, 2, …
    worst = float((below / np.arange(1, right + 1)).max(initial=0.0))
    return min(1.0, beta + 2 * canaries * delta * worst)


def lower_bound(
    canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The least epsilon that is not refuted, with so much confidence; 0 if the guesses refute none."""
    allowed = 1 - confidence
    if p_value(canaries, guesses, right, 0.0, delta) > allowed:
        return 0.0
    low, high = 0.0, _LARGEST
    if p_value(canaries, guesses, right, high, delta) <= allowed:
        return high
    for _ in range(50):
        middle = (low + high) / 2
        if p_value(canaries, guesses, right, middle, delta) <= allowed:
            low = middle
        else:
            high = middle
    return low


def bound_from_scores(
    scores: npt.NDArray[np.float64],
    took_part: npt.NDArray[np.bool_],
    delta: float,
    confidence: float = CONFIDENCE,
) -> float:
    """The lower bound of an auditor who says of canaries with a score above 0 that they took part, of the others that they did not.

    It guesses for those whose scores are farthest from 0. How many these are is chosen among four numbers after the fact; each is given a
    quarter of the error, so that the confidence holds for the best of them.
    """
    order = np.argsort(-np.abs(scores), kind="stable")
    is_right = ((scores > 0) == took_part)[order]
    each = 1 - (1 - confidence) / len(_SHARES)
    counts = [max(1, int(len(scores) * share)) for share in _SHARES]
    return max(lower_bound(len(scores), count, int(is_right[:count].sum()), delta, each) for count in counts)


def strongest_bound(canaries: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """The bound if every guess is right: an epsilon claimed above it cannot be refuted by so many canaries."""
    return bound_from_scores(np.ones(canaries), np.ones(canaries, np.bool_), delta, confidence)


def _binomial(trials: int, probability: float) -> npt.NDArray[np.float64]:
    """Probabilities of 0 to `trials` successes."""
    if probability >= 1:
        return np.asarray(np.eye(1, trials + 1, trials)[0], np.float64)
    steps = np.arange(1, trials + 1)
    choices = np.concatenate([[0.0], np.cumsum(np.log((trials - steps + 1) / steps))])
    successes = np.arange(trials + 1)
    logs = choices + successes * math.log(probability) + (trials - successes) * math.log1p(-probability)
    return np.asarray(np.exp(logs), np.float64)
