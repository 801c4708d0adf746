"""The gate at the end of a phase: may the release reach more devices?

Three questions about all devices that were offered the release so far:

    installed?   the share of those that answered which run it, after their own self-test
    right?       accuracy on the manifest's golden rows, on the devices' own runtimes
    better?      candidate against champion on the devices' own held-out rows: sums, pooled over labels

A gate fails early only if no outstanding answer could make it pass. Silent devices hold the gate until the deadline;
then those that answered decide, if there are enough of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Literal

from coordinator.errors import UserError


@dataclass(frozen=True)
class Gates:
    """What a release must achieve in every phase.

    Attributes:
        install: minimum share of the devices that answered which run it.
        answered: share of the phase's devices that must have answered, and at least `min_answers` of them (or all, if it
            has fewer), before the deadline ends the wait for the rest.
        deadline_seconds: how long a phase waits for silent devices.
        soak_seconds: minimum duration of a phase that has devices, so that crashes have time to show.
        golden_accuracy: minimum mean over the devices that reported it, of which there must be one; None: not required.
        max_accuracy_drop: maximum by which the candidate's pooled accuracy may lie below the champion's; None: no limit.
        max_loss_increase: maximum by which its mean loss per label may lie above the champion's; None: no limit.
        min_labels: minimum number of pooled labels for comparing candidate and champion.
        confidence: one-sided; a drop in accuracy counts only if it exceeds the limit with this confidence, so that a few
            rows decide nothing (see `undecided_comparison`). None: the pooled figures are compared directly.
    """

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012 - for requests to the API

    install: float = 0.95
    answered: float = 0.5
    min_answers: int = 1
    deadline_seconds: float = 3600.0
    soak_seconds: float = 0.0
    golden_accuracy: float | None = None
    max_accuracy_drop: float | None = 0.02
    max_loss_increase: float | None = None
    min_labels: int = 1
    confidence: float | None = 0.95


_RANGES: dict[str, tuple[float, float]] = {
    "install": (0.0, 1.0),
    "answered": (0.0, 1.0),
    "min_answers": (1, 10**6),
    "deadline_seconds": (1.0, 366 * 86_400.0),
    "soak_seconds": (0.0, 366 * 86_400.0),
    "golden_accuracy": (0.0, 1.0),
    "max_accuracy_drop": (0.0, 1.0),
    "max_loss_increase": (0.0, 1e6),
    "min_labels": (1, 10**12),
    "confidence": (0.5, 0.9999),
}


def require_gates(gates: Gates, task: str | None = None) -> Gates:
    """The same gates. `task`: of the release; None: it predicts classes.

    Raises:
        UserError: names the first value that is out of range, or a gate of accuracy for a release that predicts a quantity.
    """
    for each in fields(gates):
        value, (low, high) = getattr(gates, each.name), _RANGES[each.name]
        if value is not None and not low <= value <= high:
            raise UserError(f"gate {each.name} = {value:g}: expected {low:g} to {high:g}")
    of_accuracy = [
        name for name in ("golden_accuracy", "max_accuracy_drop") if getattr(gates, name) is not None
    ]
    if task == "regression" and of_accuracy:
        raise UserError(
            f"gate {of_accuracy[0]} = {getattr(gates, of_accuracy[0]):g}: the release predicts a quantity, which has no accuracy; "
            f"disable it (--gate {of_accuracy[0]}=none), and compare squared errors with the gate max_loss_increase, "
            "in squares of the label's deviation (--gate max_loss_increase=0.05)"
        )
    return gates


@dataclass(frozen=True)
class Tally:
    """The figures of a phase's devices; the figures of several phases add up.

    Attributes:
        devices: those that count: neither barred nor revoked since.
        golden, golden_sum: devices that reported a golden accuracy, and the sum of these.
        labels, correct, …: pooled over the devices that compared both models on rows of their own; none counts for more
            labels than the median device has.
    """

    devices: int = 0
    installing: int = 0
    active: int = 0
    failed: int = 0
    rolled_back: int = 0
    golden: int = 0
    golden_sum: float = 0.0
    labels: float = 0.0
    correct: float = 0.0
    loss_sum: float = 0.0
    champion_correct: float = 0.0
    champion_loss_sum: float = 0.0

    @property
    def answers(self) -> int:
        """Devices whose outcome is known."""
        return self.active + self.failed + self.rolled_back

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        )


@dataclass(frozen=True)
class Verdict:
    """`reasons`: what the gate waits for, or why it failed, one sentence each."""

    outcome: Literal["pass", "wait", "fail"]
    reasons: tuple[str, ...] = ()


def judge(gates: Gates, phases: Sequence[Tally], waited_seconds: float) -> Verdict:
    """The verdict over the phases opened so far, the last of which is `waited_seconds` old."""
    newest, seen = phases[-1], sum(phases, Tally())
    if reason := _hopeless(gates, seen):
        return Verdict("fail", (reason,))
    if reasons := tuple(_waiting_reasons(gates, newest, seen, waited_seconds)):
        return Verdict("wait", reasons)
    failed = tuple(_failures(gates, seen))
    return Verdict("fail", failed) if failed else Verdict("pass")


@dataclass(frozen=True)
class Measured:
    """A gate beside what was measured of it, over the phases opened so far.

    Attributes:
        limit: the gate's value; None: it is off.
        value: None: nothing was measured.
        margin: at the gate's confidence the true drop in accuracy is at most this much smaller than the measured one.
        is_met: None: not known yet, or the gate only says how others are measured.
    """

    gate: str
    limit: float | None
    value: float | None = None
    margin: float | None = None
    is_met: bool | None = None


def measured(gates: Gates, phases: Sequence[Tally], waited_seconds: float | None) -> list[Measured]:
    """Every gate with what was measured of it. `waited_seconds`: as of `judge`; None: no phase is open."""
    newest, seen = (phases[-1] if phases else Tally()), sum(phases, Tally())
    compared = bool(seen.labels)
    answered = newest.answers / newest.devices if newest.devices else None
    drop, margin = (_drop(seen), _margin(gates, seen)) if compared else (None, None)
    is_decided = compared and seen.labels >= gates.min_labels
    keeps_accuracy = not _drops_too_far(gates, seen) if is_decided else None
    keeps_loss = not _loses_too_much(gates, seen) if is_decided else None
    found = [
        _at_least("install", gates.install, seen.active / seen.answers if seen.answers else None),
        _at_least("answered", gates.answered, answered),
        _at_least("min_answers", min(gates.min_answers, newest.devices or gates.min_answers), newest.answers),
        Measured("deadline_seconds", gates.deadline_seconds, waited_seconds),
        _at_least("soak_seconds", gates.soak_seconds, waited_seconds),
        _at_least(
            "golden_accuracy", gates.golden_accuracy, seen.golden_sum / seen.golden if seen.golden else None
        ),
        Measured("max_accuracy_drop", gates.max_accuracy_drop, drop, margin, keeps_accuracy),
        Measured(
            "max_loss_increase",
            gates.max_loss_increase,
            _increase(seen) if compared else None,
            None,
            keeps_loss,
        ),
        _at_least("min_labels", gates.min_labels, seen.labels if compared else None),
        Measured("confidence", gates.confidence),
    ]
    return [replace(each, is_met=None) if each.limit is None else each for each in found]


def _at_least(gate: str, limit: float | None, value: float | None) -> Measured:
    is_met = None if limit is None or value is None else value >= limit
    return Measured(gate, limit, value, is_met=is_met)


def undecided_comparison(gates: Gates, phases: Sequence[Tally]) -> str | None:
    """Why the comparison over the phases opened so far is inconclusive; None if it is conclusive, or nothing was
    compared."""
    seen = sum(phases, Tally())
    if gates.max_accuracy_drop is None or gates.confidence is None or not seen.labels:
        return None
    if seen.labels < gates.min_labels:
        return f"{seen.labels:.0f} labels were compared, {gates.min_labels} are needed"
    drop, margin = _drop(seen), _margin(gates, seen)
    if not drop - margin <= gates.max_accuracy_drop < drop + margin:
        return None
    return (
        f"over {seen.labels:.0f} labels accuracy lies {drop:+.4f} ± {margin:.4f} below the champion's at {gates.confidence:.0%} "
        f"confidence: that neither stays within the limit of {gates.max_accuracy_drop:g} nor exceeds it"
    )


def _waiting_reasons(gates: Gates, newest: Tally, seen: Tally, waited_seconds: float) -> Iterator[str]:
    least = max(min(gates.min_answers, newest.devices), math.ceil(gates.answered * newest.devices - 1e-9))
    past = waited_seconds >= gates.deadline_seconds
    if newest.answers < (least if past else newest.devices):
        message = f"{newest.answers} of {newest.devices} devices have answered"
        yield message + (f", {least} are needed" if past else "")
    elif not seen.answers:
        yield "no device has answered"  # those of this phase were revoked since
    if newest.devices and waited_seconds < gates.soak_seconds:
        yield f"it lasts at least {gates.soak_seconds:g} s"


def _hopeless(gates: Gates, seen: Tally) -> str | None:
    """Why the gate fails even if every silent device succeeds; None if it may still pass."""
    lost = seen.answers - seen.active
    if lost and (seen.devices - lost) / seen.devices < gates.install:
        return _install_message(gates, seen)
    return None


def _failures(gates: Gates, seen: Tally) -> Iterator[str]:
    if seen.answers and seen.active / seen.answers < gates.install:
        yield _install_message(gates, seen)
    if gates.golden_accuracy is not None:
        mean = seen.golden_sum / seen.golden if seen.golden else None
        if mean is None:
            yield "no device reported a golden accuracy, which this gate requires; has the manifest real rows?"
        elif mean < gates.golden_accuracy:
            yield f"golden accuracy is {mean:.4f} on {seen.golden} devices, expected at least {gates.golden_accuracy:g}"
    if seen.labels >= gates.min_labels:
        yield from _worse(gates, seen)


def _worse(gates: Gates, seen: Tally) -> Iterator[str]:
    """How the candidate is worse than the champion by more than the gates allow."""
    candidate, champion = seen.correct / seen.labels, seen.champion_correct / seen.labels
    if _drops_too_far(gates, seen):
        yield (
            f"accuracy is {candidate:.4f}, the champion's {champion:.4f}, over {seen.labels:.0f} labels; "
            f"it may be at most {gates.max_accuracy_drop:g} lower"
        )
    if _loses_too_much(gates, seen):
        yield (
            f"mean loss is {_increase(seen):.4f} above the champion's, over {seen.labels:.0f} labels; "
            f"{gates.max_loss_increase:g} is allowed"
        )


def _drops_too_far(gates: Gates, seen: Tally) -> bool:
    limit = gates.max_accuracy_drop
    return limit is not None and _drop(seen) - _margin(gates, seen) > limit + 1e-12


def _loses_too_much(gates: Gates, seen: Tally) -> bool:
    return gates.max_loss_increase is not None and _increase(seen) > gates.max_loss_increase


def _increase(seen: Tally) -> float:
    return (seen.loss_sum - seen.champion_loss_sum) / seen.labels


def _drop(seen: Tally) -> float:
    return (seen.champion_correct - seen.correct) / seen.labels


def _margin(gates: Gates, seen: Tally) -> float:
    """How far the measured drop may lie above the true one: z sqrt((p(1-p) + q(1-q)) / n).

    This treats the two proportions as independent. They come from the same rows, and two models mostly err on the same
    ones, so the margin is conservative. One added success and failure on each side keep it above zero where all rows
    agree (Agresti and Caffo 2000).
    """
    if gates.confidence is None:
        return 0.0
    n = seen.labels + 2
    shares = ((seen.correct + 1) / n, (seen.champion_correct + 1) / n)
    return NormalDist().inv_cdf(gates.confidence) * math.sqrt(
        sum(share * (1 - share) for share in shares) / n
    )


def _install_message(gates: Gates, seen: Tally) -> str:
    lost = seen.answers - seen.active
    return f"{lost} of {seen.answers} devices that answered could not run it; {gates.install:.0%} must"
