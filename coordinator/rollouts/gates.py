"""The gate at the end of a phase: may the release go on to more devices?

Three questions, asked of all devices that were given the release so far:

    installed?   how many of those that answered run it, after their own self-test
    right?       accuracy on the manifest's golden rows, on the devices' own runtimes
    better?      candidate against champion on the devices' own held-out rows: sums, pooled over labels

A gate fails early only where no answer to come could save it. What devices do not say holds the gate up until
the deadline; then it is judged by those that answered, if they are enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Literal

from coordinator.errors import UserError


@dataclass(frozen=True)
class Gates:
    """What a release has to show in every phase.

    Attributes:
        install: least share of the devices that answered which run it.
        answered: share of the phase's devices that must have answered, at least `min_answers` of them (or all, where it
            has fewer), before the deadline lets the rest be left behind.
        deadline_seconds: how long a phase waits for silent devices.
        soak_seconds: how long a phase that has devices lasts at least, so that crashes have time to show.
        golden_accuracy: least mean over devices that reported it, of which there must be one; None: not asked.
        max_accuracy_drop: most that the candidate's pooled accuracy may lie below the champion's; None: not asked.
        max_loss_increase: most that its mean loss a label may lie above the champion's; None: not asked.
        min_labels: pooled labels without which candidate and champion are not compared.
        confidence: one-sided; a drop counts where it is larger than allowed with this confidence, so that a few rows
            decide nothing. None: the pooled figures are compared as they are.
    """

    install: float = 0.95
    answered: float = 0.5
    min_answers: int = 1
    deadline_seconds: float = 3600.0
    soak_seconds: float = 0.0
    golden_accuracy: float | None = None
    max_accuracy_drop: float | None = 0.02
    max_loss_increase: float | None = None
    min_labels: int = 1
    confidence: float | None = None


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


def require_gates(gates: Gates) -> Gates:
    """The same gates.

    Raises:
        UserError: naming the first value out of its range.
    """
    for each in fields(gates):
        value, (low, high) = getattr(gates, each.name), _RANGES[each.name]
        if value is not None and not low <= value <= high:
            raise UserError(f"gate {each.name} = {value:g}: expected {low:g} to {high:g}")
    return gates


@dataclass(frozen=True)
class Tally:
    """What the devices of a phase have come to; sums over several phases add up.

    Attributes:
        devices: those that count: not barred, not shut out meanwhile.
        golden, golden_sum: devices that told a golden accuracy, and its sum.
        labels, correct, …: pooled over the devices that compared both models on rows of their own, none of which counts for
            more labels than the median one has.
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
        """Devices of which it is known how it went."""
        return self.active + self.failed + self.rolled_back

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        )


@dataclass(frozen=True)
class Verdict:
    """`reasons`: what it waits for, or why it failed, in words."""

    outcome: Literal["pass", "wait", "fail"]
    reasons: tuple[str, ...] = ()


def judge(gates: Gates, phases: Sequence[Tally], waited_seconds: float) -> Verdict:
    """The verdict over the phases opened so far, the last of which is `waited_seconds` old."""
    newest, seen = phases[-1], sum(phases, Tally())
    if reason := _hopeless(gates, seen):
        return Verdict("fail", (reason,))
    if waits := tuple(_waits(gates, newest, seen, waited_seconds)):
        return Verdict("wait", waits)
    failed = tuple(_failures(gates, seen))
    return Verdict("fail", failed) if failed else Verdict("pass")


def _waits(gates: Gates, newest: Tally, seen: Tally, waited_seconds: float) -> Iterator[str]:
    least = max(min(gates.min_answers, newest.devices), math.ceil(gates.answered * newest.devices - 1e-9))
    past = waited_seconds >= gates.deadline_seconds
    if newest.answers < (least if past else newest.devices):
        words = f"{newest.answers} of {newest.devices} devices have answered"
        yield words + (f", {least} are needed" if past else "")
    elif not seen.answers:
        yield "no device has answered"  # those of this phase were shut out meanwhile
    if newest.devices and waited_seconds < gates.soak_seconds:
        yield f"it lasts {gates.soak_seconds:g} s at least"


def _hopeless(gates: Gates, seen: Tally) -> str | None:
    """Whether too many failed, though all that are still silent should succeed."""
    lost = seen.answers - seen.active
    return (
        _install_words(gates, seen) if lost and (seen.devices - lost) / seen.devices < gates.install else None
    )


def _failures(gates: Gates, seen: Tally) -> Iterator[str]:
    if seen.answers and seen.active / seen.answers < gates.install:
        yield _install_words(gates, seen)
    if gates.golden_accuracy is not None:
        mean = seen.golden_sum / seen.golden if seen.golden else None
        if mean is None:
            yield "no device told a golden accuracy, which is asked for; has the manifest real rows?"
        elif mean < gates.golden_accuracy:
            yield f"golden accuracy is {mean:.4f} on {seen.golden} devices, expected {gates.golden_accuracy:g} at least"
    if seen.labels >= gates.min_labels:
        yield from _worse(gates, seen)


def _worse(gates: Gates, seen: Tally) -> Iterator[str]:
    """Where the candidate lies below the champion by more than is allowed."""
    candidate, champion = seen.correct / seen.labels, seen.champion_correct / seen.labels
    drop = champion - candidate
    if gates.max_accuracy_drop is not None and drop - _margin(gates, seen) > gates.max_accuracy_drop + 1e-12:
        yield (
            f"accuracy is {candidate:.4f}, the champion's {champion:.4f}, over {seen.labels:.0f} labels; "
            f"it may be {gates.max_accuracy_drop:g} lower at most"
        )
    worse = (seen.loss_sum - seen.champion_loss_sum) / seen.labels
    if gates.max_loss_increase is not None and worse > gates.max_loss_increase:
        yield (
            f"mean loss is {worse:.4f} above the champion's, over {seen.labels:.0f} labels; "
            f"{gates.max_loss_increase:g} is allowed"
        )


def _margin(gates: Gates, seen: Tally) -> float:
    """How far the measured drop may lie above the true one: z sqrt((p(1-p) + q(1-q)) / n).

    The two proportions are taken as independent. They are of the same rows, and two models mostly err on the same
    ones, so the margin is wide rather than narrow. One success and one failure more on each side keep it from being
    nothing where all rows agree (Agresti and Caffo 2000).
    """
    if gates.confidence is None:
        return 0.0
    n = seen.labels + 2
    shares = ((seen.correct + 1) / n, (seen.champion_correct + 1) / n)
    return NormalDist().inv_cdf(gates.confidence) * math.sqrt(
        sum(share * (1 - share) for share in shares) / n
    )


def _install_words(gates: Gates, seen: Tally) -> str:
    lost = seen.answers - seen.active
    return f"{lost} of {seen.answers} devices that answered could not run it; {gates.install:.0%} must"
