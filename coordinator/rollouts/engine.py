"""The rules of a rollout: its next decision, what each device must run, and what a device's report changes. Pure.

    created ─► running phase 0 ─► 1 ─► … ─► finished          the gate of every phase passed
                  │   ▲   └──────────────► halted ─► rolled_back   a gate failed; its devices roll back; all have
                  ▼   │
                 paused                   aborted                 by an operator, except from halted and rolled_back

Every decision follows from stored rows, so a process that starts after a crash comes to the same one. One function
determines what a device must run, for the signed document and for the answer to its check-in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import itemgetter
from typing import Any, Literal

from coordinator.rollouts.gates import Tally, judge
from coordinator.rollouts.tables import Action, MemberRow, RolloutRow, Standing, State
from coordinator.rounds.pooling import bounded_loss
from edge_client.wire.device import ReleaseOffer, ReleaseReport
from edge_client.wire.rollouts import NO_MODEL
from edge_client.wire.strict import printable

AUTOMATIC_STATES = ("created", "running", "halted")
ROLLING_BACK_STATES = ("halted", "rolled_back", "aborted")

_LARGEST_VERSION = 10**9
_MAX_LABELS = 10**15


@dataclass(frozen=True)
class Decision:
    """A rollout's next state and phase."""

    state: State
    phase: int
    reason: str | None = None


def decide(rollout: RolloutRow, phases: Sequence[Tally], outstanding: int, now: datetime) -> Decision | None:
    """The next automatic change of a rollout; None while it waits.

    `phases`: the figures of all its phases. `outstanding`: devices that have yet to roll back.
    """
    if rollout.state == "created":
        return Decision("running", 0)
    if rollout.state == "halted" and not outstanding:
        return Decision("rolled_back", rollout.phase, rollout.reason)
    if rollout.state != "running":
        return None
    waited = (now - rollout.since).total_seconds()
    verdict = judge(rollout.gate_values, phases[: rollout.phase + 1], waited)
    if verdict.outcome == "wait":
        return None
    if verdict.outcome == "fail":
        return Decision("halted", rollout.phase, "; ".join(verdict.reasons))
    if rollout.phase + 1 < len(phases):
        return Decision("running", rollout.phase + 1)
    return Decision("finished", rollout.phase)


@dataclass(frozen=True)
class Direction:
    """What one rollout has a device run."""

    rollout: str
    model: str
    version: int
    action: Action
    force: bool


def direction(rollout: RolloutRow, member: MemberRow) -> Direction | None:
    """What this rollout has the device run; None if nothing."""
    if member.standing in ("failed", "barred"):
        return None
    if rollout.state in ROLLING_BACK_STATES:
        if rollout.keep or member.told is None:
            return None
        before = NO_MODEL if member.previous is None else member.previous
        return Direction(rollout.id, rollout.model, before, "roll_back", False)
    is_open = rollout.state in ("running", "finished") and member.phase <= rollout.phase
    if member.standing == "rolled_back" or not (is_open or member.told):
        return None
    return Direction(rollout.id, rollout.model, rollout.version, "install", member.force)


def directions(pairs: Iterable[tuple[RolloutRow, MemberRow]]) -> dict[tuple[str, str], Direction]:
    """(device, model) -> what the device must run. `pairs`: newest rollout first; the newest with a direction wins.

    A device that rolled back one rollout may have to roll back further, if an older rollout was rolled back too.
    """
    chosen: dict[tuple[str, str], Direction] = {}
    settled: set[tuple[str, str]] = set()
    for rollout, member in pairs:
        key = (member.device, rollout.model)
        directed = None if key in settled else direction(rollout, member)
        if directed is None:
            continue
        if key not in chosen or directed.action == "roll_back":
            chosen[key] = directed
        if directed.action == "install" or member.standing != "rolled_back":
            settled.add(key)
    return chosen


def document(
    model: str, by_device: Mapping[tuple[str, str], Direction], released: set[int]
) -> dict[str, Any]:
    """The content of `rollouts/<model>.json`: each device at most once, grouped by what it must run.

    Withdrawn releases are left out, so that no device installs them.
    """
    devices: dict[Direction, list[str]] = {}
    for (device, _), each in by_device.items():
        if each.action == "roll_back" or each.version in released:
            devices.setdefault(each, []).append(device)
    entries = [
        {
            "rollout": each.rollout,
            "version": each.version,
            "action": each.action,
            "force": each.force,
            "devices": sorted(members),
            "salt": "",
            "permille": 0,
        }
        for each, members in devices.items()
    ]
    return {"model": model, "rollouts": sorted(entries, key=itemgetter("rollout", "version", "force"))}


def offer(directed: Direction, member: MemberRow, runs_any: bool) -> ReleaseOffer | None:
    """The offer to the device; None if it already complies, as far as is known.

    A device that reports that it is installing gets the offer again, since it may have to retry. So does one that runs
    no version.
    """
    done: Standing = "active" if directed.action == "install" else "rolled_back"
    if member.standing == done and (runs_any or directed.version == NO_MODEL):
        return None
    return ReleaseOffer(directed.rollout, directed.model, directed.version, directed.action, directed.force)


def previous_version(
    rollout: RolloutRow, others: Sequence[tuple[RolloutRow, MemberRow]], reports: Sequence[ReleaseReport]
) -> int | None:
    """The other version of the model that the device runs; None if none is known.

    `others`: its other rollouts, newest first. The device's own report takes precedence.
    """
    for report in reports:
        if (
            report.model == rollout.model
            and report.standing == "active"
            and report.version != rollout.version
        ):
            return report.version
    for other, member in others:
        if other.model != rollout.model or other.version == rollout.version:
            continue
        if member.standing == "active":
            return other.version
        if member.told and member.standing in ("failed", "rolled_back") and member.previous is not None:
            return member.previous
    return None


def apply_reports(
    rollout: RolloutRow,
    member: MemberRow,
    reports: Sequence[ReleaseReport],
    now: datetime,
    others: Collection[str] = (),
) -> MemberRow:
    """The member after its device's reports; the same object if they change nothing.

    `others`: further rollouts of the same version that the device is in. Once this one rolls back, what those installed
    no longer concerns it.
    """
    of_model = [report for report in reports if report.model == rollout.model]
    if rollout.state in ROLLING_BACK_STATES:
        of_model = [report for report in of_model if report.rollout not in others]
    of_release = [report for report in of_model if report.version == rollout.version]
    own = [report for report in of_release if report.rollout == rollout.id]
    changed = member
    if rollout.state in ROLLING_BACK_STATES and member.told and _has_rolled_back(rollout, member, of_model):
        changed = replace(member, standing="rolled_back")
    elif own:
        changed = _apply_own_report(member, own[-1])
    elif of_release:  # by another rollout of the same release
        changed = _apply_other_report(rollout, member, of_release[-1])
    elif (back := _rollback_report(rollout, member, of_model)) is not None:
        changed = _with_reason(member, back)
    elif rollout.state in ROLLING_BACK_STATES and member.standing in ("waiting", "installing"):
        changed = replace(member, standing="waiting", told=None)  # it never installed the release
    return member if changed == member else replace(changed, changed_at=now)


def mark_lost(member: MemberRow, now: datetime) -> MemberRow:
    """The member after its device, which ran the release, reports no version and no reason."""
    message = "it no longer runs any version and gives no reason; the release is offered again"
    return replace(member, standing="installing", code="lost", words=message, changed_at=now)


def require_valid_reports(reports: Sequence[ReleaseReport]) -> None:
    """Checks the ranges of figures that a report's format does not constrain.

    Raises:
        ValueError: a figure is out of range.
    """
    for report in reports:
        accuracy, evaluation = report.golden_accuracy, report.evaluation
        if not 1 <= report.version < _LARGEST_VERSION:
            raise ValueError(f"version is {report.version}, expected 1 to {_LARGEST_VERSION - 1}")
        if accuracy is not None and not 0 <= accuracy <= 1:
            raise ValueError(f"golden_accuracy is {accuracy}, expected 0 to 1")
        if evaluation is None:
            continue
        counts = (evaluation.correct, evaluation.champion_correct)
        sums = (evaluation.loss_sum, evaluation.champion_loss_sum)
        if not 1 <= evaluation.labels <= _MAX_LABELS or any(
            each is not None and not 0 <= each <= evaluation.labels for each in counts
        ):
            raise ValueError(
                f"evaluation: expected 1 to {_MAX_LABELS} labels and at most as many correct answers"
            )
        if any(each is not None and each < 0 for each in sums):
            raise ValueError("evaluation: expected loss sums >= 0")


def _has_rolled_back(rollout: RolloutRow, member: MemberRow, of_model: Sequence[ReleaseReport]) -> bool:
    """Whether the device reports so, or runs another version (perhaps of a newer rollout), or none if it had none."""
    runs = {report.version: report.rollout for report in of_model if report.standing == "active"}
    if rollout.version in runs:
        return False
    if member.previous is not None and runs.get(member.previous) == rollout.id:
        return True  # it runs its previous version because of this rollout, whatever it was about to install
    if any(report.version == rollout.version and report.standing == "installing" for report in of_model):
        return False
    reported = any(report.rollout == rollout.id and report.standing == "rolled_back" for report in of_model)
    return reported or (member.standing == "active" and (bool(runs) or member.previous is None))


def _rollback_report(
    rollout: RolloutRow, member: MemberRow, of_model: Sequence[ReleaseReport]
) -> ReleaseReport | None:
    """The report of what keeps a device that has the release from returning to its previous version."""
    if rollout.state not in ROLLING_BACK_STATES or member.standing != "active":
        return None
    reports = (each for each in of_model if (each.rollout, each.version) == (rollout.id, member.previous))
    return next((each for each in reports if each.standing in ("failed", "installing")), None)


def _apply_own_report(member: MemberRow, report: ReleaseReport) -> MemberRow:
    """The member after a report on this rollout."""
    if report.standing in ("failed", "rolled_back"):
        if member.standing in ("barred", "rolled_back") or (member.force and member.told is None):
            return member  # reported before it was told to retry
        return _mark_failed(member, "failed", report)
    if report.standing == "installing":
        if member.standing not in ("waiting", "installing", "active"):
            return member
        return _with_reason(replace(member, standing="installing"), report)
    return _with_metrics(_with_reason(replace(member, standing="active", force=False), report), report)


def _apply_other_report(rollout: RolloutRow, member: MemberRow, report: ReleaseReport) -> MemberRow:
    """The member after a report on another rollout of the same release."""
    if (
        rollout.state in ROLLING_BACK_STATES
        and member.standing == "rolled_back"
        and report.standing == "active"
    ):
        return replace(member, standing="active")  # rolling back a newer rollout restored this release
    if member.standing != "waiting" or rollout.state in ROLLING_BACK_STATES:
        return member
    if report.standing == "active":
        return _with_metrics(replace(member, standing="active"), report)
    if report.standing == "failed" and not member.force:
        return _mark_failed(member, "barred", report)
    return member


def _mark_failed(
    member: MemberRow, standing: Literal["failed", "barred"], report: ReleaseReport
) -> MemberRow:
    failed = _with_reason(replace(member, standing=standing, force=False), report)
    return _with_metrics(replace(failed, code=failed.code or report.standing), report)


def _with_reason(member: MemberRow, report: ReleaseReport) -> MemberRow:
    return replace(member, code=printable(report.code, 40) or None, words=printable(report.words) or None)


def _with_metrics(member: MemberRow, report: ReleaseReport) -> MemberRow:
    if report.golden_accuracy is not None:
        member = replace(member, golden_accuracy=report.golden_accuracy)
    figures = report.evaluation
    if figures is None:
        return member
    compared = figures.champion_correct is not None and figures.champion_loss_sum is not None
    champion_loss = bounded_loss(figures.champion_loss_sum or 0.0, figures.labels) if compared else None
    return replace(
        member,
        labels=figures.labels,
        correct=figures.correct,
        loss_sum=bounded_loss(figures.loss_sum, figures.labels),
        champion_correct=figures.champion_correct if compared else None,
        champion_loss_sum=champion_loss,
    )
