"""How a rollout goes: what it decides, what each device is to run, and what a device's report means. Pure.

    created ─► running phase 0 ─► 1 ─► … ─► finished          the gate of every phase passed
                  │   ▲   └──────────────► halted ─► rolled_back   a gate failed; who has it goes back; all did
                  ▼   │
                 paused                   aborted                 by a person, from any state but the ends of a halt

Everything follows from stored rows, so a decision can be taken again by whoever starts after a crash, and comes out the
same. The same function says what a device is to run in the signed document and in the answer to its check-in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from coordinator.db.rollouts import Action, MemberRow, RolloutRow, Standing, State
from coordinator.pooling import bounded_loss
from coordinator.rollouts.gates import Tally, judge
from edge_client.wire.device import ReleaseOffer, ReleaseReport
from edge_client.wire.rollouts import NO_MODEL
from edge_client.wire.strict import printable

DECIDES_BY_ITSELF = ("created", "running", "halted")
GOES_BACK = ("halted", "rolled_back", "aborted")

_LARGEST_VERSION = 10**9
_MANY_LABELS = 10**15


@dataclass(frozen=True)
class Decision:
    """What a rollout is from now on."""

    state: State
    phase: int
    reason: str | None = None


def decide(rollout: RolloutRow, phases: Sequence[Tally], outstanding: int, now: datetime) -> Decision | None:
    """The next change of a rollout that nobody has to ask for; None: it waits.

    `phases`: figures of all of its phases. `outstanding`: devices that are yet to go back.
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
    """What a device is to run, by one rollout."""

    rollout: str
    model: str
    version: int
    action: Action
    force: bool


def direction(rollout: RolloutRow, member: MemberRow) -> Direction | None:
    """What the device is to run by this rollout; None: it has nothing to say."""
    if member.standing in ("failed", "barred"):
        return None
    if rollout.state in GOES_BACK:
        if rollout.keep or member.told is None:
            return None
        before = NO_MODEL if member.previous is None else member.previous
        return Direction(rollout.id, rollout.model, before, "roll_back", False)
    is_open = rollout.state in ("running", "finished") and member.phase <= rollout.phase
    if member.standing == "rolled_back" or not (is_open or member.told):
        return None
    return Direction(rollout.id, rollout.model, rollout.version, "install", member.force)


def directions(pairs: Iterable[tuple[RolloutRow, MemberRow]]) -> dict[tuple[str, str], Direction]:
    """(device, model) -> what it is to run. `pairs`: newest rollout first; the newest that has something to say counts.

    A device that is back from one rollout may have to go further back, from an older one that was taken back too.
    """
    found: dict[tuple[str, str], Direction] = {}
    settled: set[tuple[str, str]] = set()
    for rollout, member in pairs:
        key = (member.device, rollout.model)
        said = None if key in settled else direction(rollout, member)
        if said is None:
            continue
        if key not in found or said.action == "roll_back":
            found[key] = said
        if said.action == "install" or member.standing != "rolled_back":
            settled.add(key)
    return found


def document(model: str, told: Mapping[tuple[str, str], Direction], released: set[int]) -> dict[str, Any]:
    """`rollouts/<model>.json`: every device once at most, grouped by what it is to run.

    Versions to be installed that are no release any more are left out: nobody is to install them.
    """
    devices: dict[Direction, list[str]] = {}
    for (device, _), each in told.items():
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
    return {"model": model, "rollouts": sorted(entries, key=_entry_key)}


def offer(said: Direction, member: MemberRow) -> ReleaseOffer | None:
    """What the device is told of it; None where it does so already, as far as is known.

    A device that reports that it is installing hears it again: it may have to try anew.
    """
    done: Standing = "active" if said.action == "install" else "rolled_back"
    if member.standing == done:
        return None
    return ReleaseOffer(said.rollout, said.model, said.version, said.action, said.force)


def runs_before(
    rollout: RolloutRow, others: Sequence[tuple[RolloutRow, MemberRow]], reports: Sequence[ReleaseReport]
) -> int | None:
    """Which other version of the model the device runs; None: none that is known.

    `others`: its other rollouts, the newest first. What it says itself counts more.
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


def heard(
    rollout: RolloutRow, member: MemberRow, reports: Sequence[ReleaseReport], now: datetime
) -> MemberRow:
    """The member after what its device says; the same object where that changes nothing."""
    of_model = [report for report in reports if report.model == rollout.model]
    changed = member
    if rollout.state in GOES_BACK and member.told and _went_back(rollout, member, of_model):
        changed = replace(member, standing="rolled_back")
    elif (mine := _of_rollout(rollout, of_model)) is not None:
        changed = _answered(member, mine)
    elif (same := _of_version(rollout, of_model)) is not None:
        changed = _known_already(rollout, member, same)
    elif (back := _way_back(rollout, member, of_model)) is not None:
        changed = _said_why(member, back)
    elif rollout.state in GOES_BACK and member.standing in ("waiting", "installing"):
        changed = replace(member, standing="waiting", told=None)  # it never took it
    return member if changed == member else replace(changed, changed_at=now)


def require_sound(reports: Sequence[ReleaseReport]) -> None:
    """Checks figures that the form of a report leaves open.

    Raises:
        ValueError: they cannot be.
    """
    for report in reports:
        accuracy, figures = report.golden_accuracy, report.evaluation
        if not 1 <= report.version < _LARGEST_VERSION:
            raise ValueError(f"version is {report.version}, expected 1 to {_LARGEST_VERSION - 1}")
        if accuracy is not None and not 0 <= accuracy <= 1:
            raise ValueError(f"golden_accuracy is {accuracy}, expected 0 to 1")
        if figures is None:
            continue
        counts, sums = (
            (figures.correct, figures.champion_correct),
            (figures.loss_sum, figures.champion_loss_sum),
        )
        if not 1 <= figures.labels <= _MANY_LABELS or any(
            each is not None and not 0 <= each <= figures.labels for each in counts
        ):
            raise ValueError(f"evaluation: expected 1 to {_MANY_LABELS} labels and no more of them correct")
        if any(each is not None and each < 0 for each in sums):
            raise ValueError("evaluation: expected sums of losses >= 0")


def _went_back(rollout: RolloutRow, member: MemberRow, of_model: Sequence[ReleaseReport]) -> bool:
    """It says so, or it runs another version, be it by a newer rollout, or none where it had none."""
    runs = {report.version: report.rollout for report in of_model if report.standing == "active"}
    if rollout.version in runs:
        return False
    if member.previous is not None and runs.get(member.previous) == rollout.id:
        return True  # by this rollout it runs what it ran before, whatever it was about to install
    if any(report.version == rollout.version and report.standing == "installing" for report in of_model):
        return False
    said = any(report.rollout == rollout.id and report.standing == "rolled_back" for report in of_model)
    return said or (member.standing == "active" and (bool(runs) or member.previous is None))


def _way_back(
    rollout: RolloutRow, member: MemberRow, of_model: Sequence[ReleaseReport]
) -> ReleaseReport | None:
    """What keeps a device that has the release from going back to the version before."""
    found = [each for each in of_model if (each.rollout, each.version) == (rollout.id, member.previous)]
    back = rollout.state in GOES_BACK and member.standing == "active"
    return next((each for each in found if each.standing in ("failed", "installing")), None) if back else None


def _of_rollout(rollout: RolloutRow, of_model: Sequence[ReleaseReport]) -> ReleaseReport | None:
    found = [each for each in of_model if each.rollout == rollout.id and each.version == rollout.version]
    return found[-1] if found else None


def _of_version(rollout: RolloutRow, of_model: Sequence[ReleaseReport]) -> ReleaseReport | None:
    found = [each for each in of_model if each.rollout != rollout.id and each.version == rollout.version]
    return found[-1] if found else None


def _answered(member: MemberRow, report: ReleaseReport) -> MemberRow:
    """The member after a report on this very rollout."""
    if report.standing in ("failed", "rolled_back"):
        if member.standing in ("barred", "rolled_back") or (member.force and member.told is None):
            return member  # said before it was told to try again
        return _failed(member, "failed", report)
    if report.standing == "installing":
        if member.standing not in ("waiting", "installing", "active"):
            return member
        return _said_why(replace(member, standing="installing"), report)
    return _figures(replace(member, standing="active", force=False, code=None, words=None), report)


def _known_already(rollout: RolloutRow, member: MemberRow, report: ReleaseReport) -> MemberRow:
    """The member after a report on another rollout that has the device run the same release."""
    if rollout.state in GOES_BACK and member.standing == "rolled_back" and report.standing == "active":
        return replace(member, standing="active")  # a newer rollout that was taken back brought it here again
    if member.standing != "waiting":
        return member
    if report.standing == "active":
        return _figures(replace(member, standing="active"), report)
    if report.standing == "failed" and not member.force:
        return _failed(member, "barred", report)
    return member


def _failed(member: MemberRow, standing: Literal["failed", "barred"], report: ReleaseReport) -> MemberRow:
    failed = _said_why(replace(member, standing=standing, force=False), report)
    return _figures(replace(failed, code=failed.code or report.standing), report)


def _said_why(member: MemberRow, report: ReleaseReport) -> MemberRow:
    return replace(member, code=printable(report.code, 40) or None, words=printable(report.words) or None)


def _figures(member: MemberRow, report: ReleaseReport) -> MemberRow:
    if report.golden_accuracy is not None:
        member = replace(member, golden_accuracy=report.golden_accuracy)
    found = report.evaluation
    if found is None:
        return member
    compared = found.champion_correct is not None and found.champion_loss_sum is not None
    return replace(
        member,
        labels=found.labels,
        correct=found.correct,
        loss_sum=bounded_loss(found.loss_sum, found.labels),
        champion_correct=found.champion_correct if compared else None,
        champion_loss_sum=bounded_loss(found.champion_loss_sum or 0.0, found.labels) if compared else None,
    )


def _entry_key(entry: Mapping[str, Any]) -> tuple[str, int, bool]:
    return entry["rollout"], entry["version"], entry["force"]
