"""The best predicted plans measured on this machine, and what that says of the others.

    best of each kind -> a few steps of each, in turns -> correct the predictions -> the same for the best not measured yet

A prediction adds up many small errors, so what is chosen is the fastest measured. Plans of a kind have the same degrees:
measuring several kinds finds a wrong prediction that measuring the variants of one would not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from models.pretrain.plan import ParallelPlan
from models.pretrain.planner.crew import Crew
from models.pretrain.planner.search import Candidate, Found

TURNS = 6
SECOND_SHARE = 0.5
"""How many plans a second round measures, relative to the first."""
WORTH = 1.5
"""Corrected predictions up to so many times the best measured are worth measuring."""
PRIOR = 1.0
"""Weight of "predictions are right" against one measured plan."""
MOST_CORRECTION = 4.0
MECHANISMS = ("tp", "pp", "cp", "ep", "dp", "zero")

Key = tuple[Any, ...]


def verify(found: Found, crew: Crew, count: int) -> Found:
    """`found` with up to `count` plans of different kinds and half as many more measured, and the fastest first.

    What is not measured keeps its prediction, corrected, and comes after what is.

    Raises:
        JobError: a measuring process failed.
    """
    first = of_kinds(found.ranking, count)
    measured = _measure(crew, first)
    ranking = ranked(found.ranking, measured)
    best = min(measured.values())
    second = [c for c in ranking if c.measured is None and c.seconds <= WORTH * best]
    second = second[: round(SECOND_SHARE * count)]
    if second:
        # the best so far runs with them, so that both rounds have a plan in common
        again = _measure(crew, [ranking[0], *second])
        pace = measured[ranking[0].plan] / again[ranking[0].plan]
        measured |= {c.plan: again[c.plan] * pace for c in second}
        ranking = ranked(found.ranking, measured)
    return replace(found, ranking=ranking)


def of_kinds(ranking: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best with each degrees, up to `count` of them; where there are fewer, the best that share params, or do not,
    unlike those; then the best others."""
    chosen: dict[ParallelPlan, Candidate] = {}
    keys: tuple[Callable[[ParallelPlan], object], ...] = (degrees, kind, str)
    for alike in keys:
        seen = {alike(plan) for plan in chosen}
        for candidate in ranking:
            if len(chosen) < count and alike(candidate.plan) not in seen:
                seen.add(alike(candidate.plan))
                chosen[candidate.plan] = candidate
    return list(chosen.values())


def degrees(plan: ParallelPlan) -> Key:
    return plan.dp, plan.tp, plan.pp, plan.cp, plan.ep


def kind(plan: ParallelPlan) -> Key:
    return *degrees(plan), plan.zero >= 2


def ranked(ranking: Sequence[Candidate], measured: Mapping[ParallelPlan, float]) -> list[Candidate]:
    """Candidates with what was measured of them, the fastest of these first, then the others by corrected prediction."""
    factors = corrections({c.plan: c.prediction.seconds for c in ranking}, measured)
    known = [
        replace(
            candidate,
            measured=measured.get(candidate.plan),
            correction=factors["all"]
            * float(np.prod([factors[name] for name in mechanisms(candidate.plan)])),
        )
        for candidate in ranking
    ]
    return sorted(known, key=lambda c: (c.measured is None, c.seconds, str(c.plan)))


def corrections(
    predicted: Mapping[ParallelPlan, float], measured: Mapping[ParallelPlan, float]
) -> dict[str, float]:
    """How many times longer plans take than predicted: all of them, and those with each way of splitting besides.

    The logarithms of measured / predicted, a sum of what each way adds, by least squares with a prior at 0 for each
    way, which what is measured has to outweigh (ridge regression, Hoerl 1970).
    """
    plans = list(measured)
    ratios = np.log([measured[plan] / predicted[plan] for plan in plans])
    common = statistics.median(ratios)
    uses = np.array([[name in mechanisms(plan) for name in MECHANISMS] for plan in plans], dtype=float)
    solved = np.linalg.solve(uses.T @ uses + PRIOR * np.eye(len(MECHANISMS)), uses.T @ (ratios - common))
    factors = np.clip(np.exp(solved), 1 / MOST_CORRECTION, MOST_CORRECTION)
    return {"all": float(np.exp(common)), **dict(zip(MECHANISMS, map(float, factors), strict=True))}


def mechanisms(plan: ParallelPlan) -> list[str]:
    """Ways of splitting that a plan has."""
    found = [name for name in ("tp", "pp", "cp", "ep", "dp") if getattr(plan, name) > 1]
    return [*found, "zero"] if plan.zero >= 2 else found


def _measure(crew: Crew, candidates: Sequence[Candidate]) -> dict[ParallelPlan, float]:
    """Median seconds of a step."""
    texts = {str(candidate.plan): candidate.plan for candidate in candidates}
    steps = crew.ask("steps", plans=list(texts), turns=TURNS, race=True)
    return {texts[text]: statistics.median(took for took, _ in of) for text, of in steps.items()}
