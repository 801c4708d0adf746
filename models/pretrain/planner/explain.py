"""Why the first of a ranking is first, what limits it, and what became of the others, in words and rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from models.pretrain.planner.profile import Profile
from models.pretrain.planner.search import Candidate, Found

_LIMITS = {
    "compute": "computation",
    "tp": "exchanging activations between tp ranks",
    "cp": "exchanging sequences for heads between cp ranks",
    "ep": "sending tokens to their experts and back",
    "bubble": "stages waiting for each other",
    "dp": "exchanging gradients and params between dp ranks",
    "optimizer": "the optimizer's step",
    "other": "what frameworks do besides",
}
_AXES = ("dp", "tp", "pp", "cp", "ep")


def rows(found: Found) -> list[dict[str, Any]]:
    """The ranking as a table: plan; seconds as well as they are known, predicted, and measured or none; memory_bytes;
    parts of what is predicted, memory."""
    return [
        {
            "plan": str(candidate.plan),
            "seconds": candidate.seconds,
            "predicted": candidate.prediction.seconds,
            "measured": candidate.measured,
            "memory_bytes": round(candidate.memory.bytes),
            "parts": candidate.prediction.parts,
            "memory": {name: round(size) for name, size in candidate.memory.parts.items()},
        }
        for candidate in found.ranking
    ]


def explain(found: Found, profile: Profile, processes: int) -> list[str]:
    """Sentences, the choice first."""
    if not found.ranking:
        return [f"No plan fits {processes} processes.", *_refusals(found)]
    best = found.ranking[0]
    lines = [_choice(found), _limit(best), _memory(best, profile)]
    lines += _placed(best, profile)
    lines += _others(found)
    return [*lines, *_refusals(found)]


def _choice(found: Found) -> str:
    best, fitting = found.ranking[0], len(found.ranking)
    predicted = f"{best.prediction.seconds * 1e3:.1f} ms a step predicted"
    if best.measured is None:
        least = f"{predicted}, the least of {fitting} plans that fit"
    else:
        measured = sum(candidate.measured is not None for candidate in found.ranking)
        least = (
            f"{best.measured * 1e3:.1f} ms a step measured, the least of the {measured} most promising of {fitting} plans "
            f"that fit, {predicted}"
        )
    return f"{best.plan}: {least}; {len(found.refused)} do not."


def _limit(best: Candidate) -> str:
    parts = best.prediction.parts
    name = max(parts, key=lambda part: parts[part])
    shares = ", ".join(
        f"{part} {parts[part] / best.prediction.seconds:.0%}"
        for part in sorted(parts, key=lambda p: -parts[p])
    )
    return f"Most of what is predicted is {_LIMITS[name]} ({shares})."


def _memory(best: Candidate, profile: Profile) -> str:
    limit = profile.machine.memory_bytes
    most = max(best.memory.parts, key=lambda name: best.memory.parts[name])
    room = f" of {limit / 2**20:.0f}" if limit else ""
    return f"It needs {best.memory.bytes / 2**20:.1f}{room} MiB a process, most of it {most}."


def _placed(best: Candidate, profile: Profile) -> list[str]:
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


def _others(found: Found) -> list[str]:
    """The next best, and the best that leaves out or changes each way of splitting."""
    best = found.ranking[0]
    lines: list[str] = []
    shown = {_shape(best)}
    for candidate in found.ranking[1:]:
        shape = _shape(candidate)
        if shape in shown:
            continue
        shown.add(shape)
        slower = candidate.seconds / best.seconds - 1
        parts, own = candidate.prediction.parts, best.prediction.parts
        more = max(parts, key=lambda name: parts[name] - own.get(name, 0.0))
        why = f", for more goes to {_LIMITS[more]}" if parts[more] > own.get(more, 0.0) else ""
        lines.append(f"{'Next best' if not lines else 'Then'} {candidate.plan}: {slower:+.1%}{why}.")
        if len(lines) == 4:
            break
    return lines


def _shape(candidate: Candidate) -> tuple[Any, ...]:
    return (*(getattr(candidate.plan, name) for name in _AXES), candidate.plan.zero > 0)


def _refusals(found: Found) -> list[str]:
    """The most frequent reasons."""
    reasons = Counter(refused.reason for refused in found.refused)
    first = {refused.reason: refused.plan for refused in reversed(found.refused)}
    return [
        f"Refused {first[reason]}{_besides(count)}: {reason}." for reason, count in reasons.most_common(8)
    ]


def _besides(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""
