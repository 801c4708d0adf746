"""Measures the best predicted plans on this machine and corrects the predictions of the others.

    best of each kind -> a few steps of each, in turns -> correct the predictions -> the same for the best not measured yet

A prediction adds up many small errors, so the fastest measured plan is chosen. Plans of a kind have the same degrees:
measuring several kinds finds a wrong prediction that measuring variants of one would not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from models.pretrain.plan import ParallelPlan
from models.pretrain.planner.bench_workers import BenchWorkers
from models.pretrain.planner.search import Candidate, SearchResult

TURNS = 6
ENOUGH_SECONDS = 30.0
"""No further turn starts after this time."""
SECOND_SHARE = 0.5
"""Number of plans in the second round, relative to the first."""
WORTH = 1.5
"""Plans whose corrected prediction is at most this many times the best measurement are measured too."""
PRIOR = 1.0
"""Weight of "predictions are right" against one measured plan."""
MAX_CORRECTION = 4.0
MECHANISMS = ("tp", "pp", "cp", "ep", "dp", "zero")

Key = tuple[Any, ...]


def verify(result: SearchResult, workers: BenchWorkers, count: int) -> SearchResult:
    """`result` with up to `count` plans of different kinds and half as many more measured, the fastest first.

    Plans that are not measured have corrected predictions and follow the measured ones.

    Raises:
        JobError: a measuring process failed.
    """
    first = select_diverse(result.ranking, count)
    measured = _measure(workers, first)
    ranking = rank(result.ranking, measured)
    best = min(measured.values())
    second = [c for c in ranking if c.measured is None and c.seconds <= WORTH * best]
    second = second[: round(SECOND_SHARE * count)]
    if second:
        # the best so far runs with them, so that both rounds have a plan in common
        again = _measure(workers, [ranking[0], *second])
        pace = measured[ranking[0].plan] / again[ranking[0].plan]
        measured |= {c.plan: again[c.plan] * pace for c in second}
        ranking = rank(result.ranking, measured)
    return replace(result, ranking=ranking)


def select_diverse(ranking: Sequence[Candidate], count: int) -> list[Candidate]:
    """Up to `count` candidates: the best for all processes and the best for fewer; then the best of each combination of
    degrees; then the best that shard params, or do not, unlike those; then the best others."""
    everything = max((candidate.plan.processes for candidate in ranking), default=0)
    chosen: dict[ParallelPlan, Candidate] = {}
    keys: tuple[Callable[[ParallelPlan], object], ...] = (
        lambda plan: plan.processes == everything,
        lambda plan: plan.degrees,
        kind,
        str,
    )
    for alike in keys:
        seen = {alike(plan) for plan in chosen}
        for candidate in ranking:
            if len(chosen) < count and alike(candidate.plan) not in seen:
                seen.add(alike(candidate.plan))
                chosen[candidate.plan] = candidate
    return list(chosen.values())


def kind(plan: ParallelPlan) -> Key:
    return *plan.degrees, plan.zero >= 2


def rank(ranking: Sequence[Candidate], measured: Mapping[ParallelPlan, float]) -> list[Candidate]:
    """Candidates with their measurements: the measured ones by seconds, then the others by corrected prediction."""
    factors = corrections({c.plan: c.prediction.seconds for c in ranking}, measured)
    known = []
    for candidate in ranking:
        ways = [factors[name] for name in mechanisms(candidate.plan)]
        correction = factors["all"] * float(np.prod(ways))
        known.append(replace(candidate, measured=measured.get(candidate.plan), correction=correction))
    return sorted(known, key=lambda c: (c.measured is None, c.seconds, str(c.plan)))


def corrections(
    predicted: Mapping[ParallelPlan, float], measured: Mapping[ParallelPlan, float]
) -> dict[str, float]:
    """How many times longer than predicted plans take: all of them, and those with each way of splitting.

    Fits the logarithm of measured / predicted as a sum over ways of splitting, by least squares with a prior at 0 for
    each way, which the measurements have to outweigh (ridge regression, Hoerl 1970).
    """
    plans = list(measured)
    ratios = np.log([measured[plan] / predicted[plan] for plan in plans])
    common = statistics.median(ratios)
    uses = np.array([[name in mechanisms(plan) for name in MECHANISMS] for plan in plans], dtype=float)
    solved = np.linalg.solve(uses.T @ uses + PRIOR * np.eye(len(MECHANISMS)), uses.T @ (ratios - common))
    factors = np.clip(np.exp(solved), 1 / MAX_CORRECTION, MAX_CORRECTION)
    return {"all": float(np.exp(common)), **dict(zip(MECHANISMS, map(float, factors), strict=True))}


def mechanisms(plan: ParallelPlan) -> list[str]:
    """Ways of splitting that a plan uses."""
    names = [name for name in ("tp", "pp", "cp", "ep", "dp") if getattr(plan, name) > 1]
    return [*names, "zero"] if plan.zero >= 2 else names


def _measure(workers: BenchWorkers, candidates: Sequence[Candidate]) -> dict[ParallelPlan, float]:
    """Median seconds of a step of each."""
    texts = {str(candidate.plan): candidate.plan for candidate in candidates}
    steps = workers.steps(texts, turns=TURNS, race=True, enough_seconds=ENOUGH_SECONDS)
    return {texts[text]: statistics.median(took for took, _ in of) for text, of in steps.items()}
