"""Draws tokens from logits.

A request draws with its own generator, one number a token, and by inverting the cumulative distribution: which requests
are computed together does not change its numbers, and rounding of the logits changes a token only where the number lies
next to the border of two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from models.serving.generation.request import Sampling

Numbers = npt.NDArray[np.float64]


@torch.no_grad()
def logprobs_of(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [N, V] in float32 of logits of any precision, in host memory."""
    return logits.float().log_softmax(-1).cpu()


def choose(
    logprobs: torch.Tensor, samplings: Sequence[Sampling], generators: Sequence[np.random.Generator]
) -> list[int]:
    """A token for each row of `logprobs` [N, V], by its own options and generator."""
    greedy = logprobs.argmax(-1).tolist()
    return [
        draw(row, sampling, generator) if sampling.temperature else token
        for row, sampling, generator, token in zip(
            logprobs.numpy(), samplings, generators, greedy, strict=True
        )
    ]


def draw(logprobs: npt.NDArray[np.float32], sampling: Sampling, generator: np.random.Generator) -> int:
    """A token drawn from log-probabilities [V]; the temperature is above 0. Takes one number from the generator."""
    number = generator.random()
    odds = distribution(logprobs, sampling)
    total = np.cumsum(odds)
    token = int(np.searchsorted(total, number * total[-1], side="right"))
    return min(token, int(np.flatnonzero(odds)[-1]))


def distribution(logprobs: npt.NDArray[np.float32], sampling: Sampling) -> Numbers:
    """Probabilities [V] after temperature, `top_k` and `top_p`, in this order; not normalised after the last."""
    with np.errstate(over="ignore"):
        scaled = (logprobs - logprobs.max()).astype(np.float64) / sampling.temperature
    odds: Numbers = np.exp(scaled)
    if 0 < sampling.top_k < len(odds):
        # ties are broken by the lower id, so that exactly `top_k` remain
        kept = np.argsort(-odds, kind="stable")[: sampling.top_k]
        odds = _only(odds, kept)
    if sampling.top_p < 1:
        order = np.argsort(-odds, kind="stable")
        total = np.cumsum(odds[order])
        enough = int(np.searchsorted(total, sampling.top_p * total[-1], side="left")) + 1
        odds = _only(odds, order[:enough])
    return odds


def top(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most probable tokens of log-probabilities [V], with theirs."""
    if not count:
        return ()
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))


def generator_of(sampling: Sampling) -> np.random.Generator:
    """The generator of a request."""
    return np.random.default_rng(sampling.seed)


def _only(odds: Numbers, kept: npt.NDArray[np.intp]) -> Numbers:
    restricted = np.zeros_like(odds)
    restricted[kept] = odds[kept]
    return restricted
