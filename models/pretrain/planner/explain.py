"""Explains a ranking: why the first plan is first, what limits it, and why others are not chosen."""

from __future__ import annotations

from collections import Counter
from typing import Any

from models.pretrain.planner.profile import Profile
from models.pretrain.planner.search import Candidate, SearchResult

_LIMITS = {
    "compute": "computation",
    "tp": "exchanging activations between tp ranks",
    "cp": "exchanging sequences for heads between cp ranks",
    "ep": "sending tokens to their experts and back",
    "bubble": "stages waiting for each other",
    "dp": "exchanging gradients and params between dp ranks",
    "optimizer": "the optimizer's step",
    "other": "framework overhead",
}


def rows(result: SearchResult) -> list[dict[str, Any]]:
    """The ranking as a table: plan and its processes; best known seconds, predicted, and measured or none; memory_bytes;
    parts of the prediction, memory."""
    return [
        {
            "plan": str(candidate.plan),
            "processes": candidate.plan.processes,
            "seconds": candidate.seconds,
            "predicted": candidate.prediction.seconds,
            "measured": candidate.measured,
            "memory_bytes": round(candidate.memory.bytes),
            "parts": candidate.prediction.parts,
            "memory": {name: round(size) for name, size in candidate.memory.parts.items()},
        }
        for candidate in result.ranking
    ]


def explain(result: SearchResult, profile: Profile, processes: int) -> list[str]:
    """One sentence a line, the choice first."""
    if not result.ranking:
        return [f"No plan fits {processes} processes.", *_refusals(result)]
    best = result.ranking[0]
    lines = [_choice(result), *_fewer(result, processes), _limit(best), _memory(best, profile)]
    return [*lines, *_uncounted(best), *_placement(best, profile), *_others(result), *_refusals(result)]


def _choice(result: SearchResult) -> str:
    best, fitting = result.ranking[0], len(result.ranking)
    predicted = f"{best.prediction.seconds * 1e3:.1f} ms a step predicted"
    if best.measured is None:
        claim = f"{predicted}, the least of {fitting} plans that fit"
    else:
        measured = sum(candidate.measured is not None for candidate in result.ranking)
        claim = (
            f"{best.measured * 1e3:.1f} ms a step measured, the least of the {measured} most promising of {fitting} plans "
            f"that fit, {predicted}"
        )
    return f"{best.plan}: {claim}; {len(result.refused)} do not."


def _fewer(result: SearchResult, processes: int) -> list[str]:
    """Whether the choice leaves processes unused, and what a plan for all of them would take."""
    best = result.ranking[0]
    if best.plan.processes == processes:
        return []
    known = "predicted" if best.measured is None else "measured"
    start = f"It uses {best.plan.processes} of the {processes} processes"
    for candidate in result.ranking:
        if candidate.plan.processes == processes:
            longer = candidate.seconds / best.seconds - 1
            return [
                f"{start}: the best plan for all of them, {candidate.plan}, is {known} to take {longer:.1%} longer."
            ]
    return [f"{start}: no plan for all of them fits."]


def _limit(best: Candidate) -> str:
    parts = best.prediction.parts
    name = max(parts, key=lambda part: parts[part])
    shares = ", ".join(
        f"{part} {parts[part] / best.prediction.seconds:.0%}"
        for part in sorted(parts, key=lambda p: -parts[p])
    )
    return f"The largest part of the prediction is {_LIMITS[name]} ({shares})."


def _memory(best: Candidate, profile: Profile) -> str:
    limit = profile.machine.memory_of(best.plan.processes)
    room = f" of {limit / 2**20:.0f}" if limit else ""
    return f"It needs {best.memory.bytes / 2**20:.1f}{room} MiB a process, most of it {best.memory.largest}."


def _uncounted(best: Candidate) -> list[str]:
    """What the prediction leaves out; measurements have it."""
    coding = best.plan.grad_compression
    if coding not in ("powersgd", "onebit") or best.plan.dp == 1:
        return []
    return [
        f"The seconds predicted are those of gradients that are exchanged uncompressed: what {coding} saves and costs is only "
        "in what is measured."
    ]


def _placement(best: Candidate, profile: Profile) -> list[str]:
    """Which axes stay inside a host."""
    plan, per_host = best.plan, profile.machine.per_host
    if plan.processes <= per_host:
        return []
    inner = 1
    inside: list[str] = []
    across: list[str] = []
    for name in ("tp", "cp", "dp", "pp"):
        size = getattr(plan, name)
        inner *= size
        if size > 1:
            (inside if inner <= per_host and per_host % inner == 0 else across).append(name)
    return [
        f"Inside a host of {per_host}: {', '.join(inside) or 'no axis'}; between hosts: {', '.join(across)}."
    ]


def _others(result: SearchResult) -> list[str]:
    """The next best plan of each other shape, and why it is slower."""
    by_shape: dict[tuple[Any, ...], Candidate] = {}
    for candidate in result.ranking:
        by_shape.setdefault(_shape(candidate), candidate)
    best, *others = by_shape.values()
    lines: list[str] = []
    for candidate in others[:4]:
        slower = candidate.seconds / best.seconds - 1
        parts, own = candidate.prediction.parts, best.prediction.parts
        more = max(parts, key=lambda name: parts[name] - own.get(name, 0.0))
        why = f", because more time goes to {_LIMITS[more]}" if parts[more] > own.get(more, 0.0) else ""
        lines.append(f"{'Next best' if not lines else 'Then'} {candidate.plan}: {slower:+.1%}{why}.")
    return lines


def _shape(candidate: Candidate) -> tuple[Any, ...]:
    return (*candidate.plan.degrees, candidate.plan.zero > 0)


def _refusals(result: SearchResult) -> list[str]:
    """The most frequent reasons."""
    reasons = Counter(refused.reason for refused in result.refused)
    first = {refused.reason: refused.plan for refused in reversed(result.refused)}
    more = {reason: f" and {count - 1} more" if count > 1 else "" for reason, count in reasons.items()}
    return [f"Refused {first[reason]}{more[reason]}: {reason}." for reason, _ in reasons.most_common(8)]
