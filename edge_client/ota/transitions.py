"""The pointer of one model, which names its active slot, and its transitions: pure functions from one pointer to the next.

    install    begin_install ─► activate, record_failure or postpone
    trial      count_start at each start of the daemon ─► finish_trial, or roll_back after too many
    order      switch_back to the other slot, deactivate, or keep_active
    damage     discard_damaged

While a version is on trial the other slot is not written: it holds the version to go back to. Field names are the keys
of `pointer.json`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from edge_client.wire.device import ReleaseEvaluation, ReleaseOffer, ReleaseReport, ReleaseStanding
from edge_client.wire.rollouts import NO_MODEL

SlotName = Literal["a", "b"]

FORMAT = 2

TRIAL_STARTS = 3
"""Starts of the daemon that a version on trial may take to finish it; one more is a crash loop."""

_MAX_FAILURES = 50
_MAX_CHARACTERS = 300


@dataclass(frozen=True)
class Slot:
    """A complete version that passed its self-test here.

    Attributes:
        rollout: the rollout that installed it.
        proved: it passed its trial and needs no other.
        manifest_sha256: as signed; the manifest holds the hash of the model file. Empty: installed by older software.
    """

    version: int
    rollout: str
    golden_accuracy: float | None = None
    evaluation: ReleaseEvaluation | None = None
    proved: bool = False
    manifest_sha256: str = ""


@dataclass(frozen=True)
class Failure:
    version: int
    code: str
    words: str


@dataclass(frozen=True)
class Pointer:
    """The state of one model on this device.

    Attributes:
        active: the slot that runs; None: no version runs.
        a, b: the versions they hold; None: nothing that can run.
        trial_starts: daemon starts since the active version was activated; None: it is not on trial.
        failed: versions that are not tried again unless forced, oldest first.
        last: the last report about a version other than the active one, or why the active one is kept against an order.
    """

    model: str
    active: SlotName | None = None
    a: Slot | None = None
    b: Slot | None = None
    trial_starts: int | None = None
    failed: tuple[Failure, ...] = ()
    last: ReleaseReport | None = None
    format: int = FORMAT

    @property
    def running(self) -> Slot | None:
        """The version in the active slot."""
        return self.slot(self.active) if self.active is not None else None

    @property
    def spare_name(self) -> SlotName:
        """The slot that the next installation writes."""
        return "b" if self.active == "a" else "a"

    @property
    def spare(self) -> Slot | None:
        return self.slot(self.spare_name)

    def slot(self, name: SlotName) -> Slot | None:
        return self.a if name == "a" else self.b

    def with_slot(self, name: SlotName, slot: Slot | None) -> Pointer:
        return replace(self, a=slot) if name == "a" else replace(self, b=slot)

    def failure(self, version: int) -> Failure | None:
        return next((each for each in self.failed if each.version == version), None)


def reports(pointer: Pointer) -> tuple[ReleaseReport, ...]:
    """The reports of a check-in: the version that runs, and the last one reported if that is another."""
    reported = []
    running = pointer.running
    if running is not None:
        reported.append(
            replace(
                _report(pointer, running, "active"),
                golden_accuracy=running.golden_accuracy,
                evaluation=running.evaluation,
            )
        )
    if pointer.last is None:
        return tuple(reported)
    if reported and pointer.last.standing == "active":
        return (replace(reported[0], code=pointer.last.code, words=pointer.last.words),)
    return (*reported, pointer.last)


def needs_action(pointer: Pointer, offer: ReleaseOffer) -> bool:
    """Whether the offer needs action: not if it already runs for this rollout, or failed.

    Force allows one more try, not a second one by the same rollout.
    """
    running = pointer.running
    if offer.version == NO_MODEL:
        return running is not None or (pointer.last is not None and pointer.last.standing == "installing")
    if running is not None and running.version == offer.version:
        return running.rollout != offer.rollout
    if pointer.failure(offer.version) is None:
        return True
    return offer.force and not (pointer.last is not None and _concludes(pointer.last, offer))


def must_wait(pointer: Pointer, offer: ReleaseOffer) -> bool:
    """Whether the offer has to wait for the end of the active version's trial.

    The slot that it would be written to holds the version to go back to.
    """
    if pointer.trial_starts is None or offer.version == NO_MODEL:
        return False
    return all(each is None or each.version != offer.version for each in (pointer.a, pointer.b))


def _concludes(report: ReleaseReport, offer: ReleaseOffer) -> bool:
    return (report.rollout, report.version) == (
        offer.rollout,
        offer.version,
    ) and report.standing != "installing"


def report_known_failure(pointer: Pointer, offer: ReleaseOffer) -> Pointer:
    """Reports the failure to another rollout that offers a version which failed here before."""
    failure = pointer.failure(offer.version)
    if failure is None or (pointer.last is not None and _concludes(pointer.last, offer)):
        return pointer
    message = f"it failed here before: {failure.words}"
    return replace(pointer, last=_report(pointer, offer, "failed", failure.code, message))


def begin_install(pointer: Pointer, offer: ReleaseOffer) -> Pointer:
    """Marks the spare slot empty, before it is written."""
    assert not must_wait(pointer, offer)
    emptied = pointer.with_slot(pointer.spare_name, None)
    return replace(emptied, last=_report(pointer, offer, "installing"))


def postpone(pointer: Pointer, offer: ReleaseOffer, code: str, message: str) -> Pointer:
    """Records that the version could not be fetched or trusted this time, which says nothing about the version."""
    if offer.version == NO_MODEL:  # not a version that could be reported
        return keep_active(pointer, offer, code, message)
    return replace(pointer, last=_report(pointer, offer, "installing", code, message))


def record_failure(pointer: Pointer, offer: ReleaseOffer, code: str, message: str) -> Pointer:
    """Records that the version cannot run here. The active version stays."""
    return replace(
        pointer,
        failed=_add_failure(pointer.failed, Failure(offer.version, code, message[:_MAX_CHARACTERS])),
        last=_report(pointer, offer, "failed", code, message),
    )


def activate(pointer: Pointer, slot: Slot) -> Pointer:
    """Makes the spare slot, which holds this complete and tested version, active; on trial unless it passed one before."""
    name = pointer.spare_name
    held = pointer.with_slot(name, slot)
    return replace(
        held,
        active=name,
        trial_starts=_first_starts(slot),
        failed=tuple(each for each in pointer.failed if each.version != slot.version),
        last=None,
    )


def assign_rollout(pointer: Pointer, rollout: str) -> Pointer:
    """Assigns the running version to a rollout that asks for the same version."""
    running = pointer.running
    assert running is not None and pointer.active is not None
    slot = replace(running, rollout=rollout)
    held = pointer.with_slot(pointer.active, slot)
    last = pointer.last  # an installation in progress is abandoned: this rollout wants what runs
    done = last is not None and (last.version == running.version or last.standing == "installing")
    return replace(held, last=None if done else last)


def switch_back(pointer: Pointer, slot: Slot) -> Pointer:
    """Activates the spare slot, which holds `slot` and passed again. It was ordered, so nothing failed."""
    previous = pointer.running
    switched = activate(pointer, slot)
    if previous is None:
        return switched
    message = f"told to run version {slot.version}"
    return replace(switched, last=_report(pointer, previous, "rolled_back", "told", message))


def keep_active(pointer: Pointer, offer: ReleaseOffer, code: str, message: str) -> Pointer:
    """Keeps the active version against an order, and reports why."""
    running = pointer.running
    if running is None:
        return pointer
    kept = replace(running, rollout=offer.rollout)
    return replace(pointer, last=_report(pointer, kept, "active", code, message))


def deactivate(pointer: Pointer) -> Pointer:
    """Stops running any version, as ordered: none ran before this one."""
    previous = pointer.running
    last = None
    if previous is not None:
        last = _report(pointer, previous, "rolled_back", "told", "told to run no version")
    return replace(pointer, active=None, a=None, b=None, trial_starts=None, last=last)


def count_start(pointer: Pointer) -> Pointer:
    """Counts a start of the daemon, if the active version is on trial."""
    if pointer.active is None or pointer.trial_starts is None:
        return pointer
    return replace(pointer, trial_starts=pointer.trial_starts + 1)


def uncount_start(pointer: Pointer) -> Pointer:
    """Takes back the last start, because the daemon stopped in order."""
    if not pointer.trial_starts:
        return pointer
    return replace(pointer, trial_starts=pointer.trial_starts - 1)


def is_crash_loop(pointer: Pointer) -> bool:
    """Whether the version on trial took more starts than allowed."""
    return pointer.trial_starts is not None and pointer.trial_starts > TRIAL_STARTS


def finish_trial(pointer: Pointer) -> Pointer:
    """Ends the trial of the active version successfully."""
    running = pointer.running
    if running is None or pointer.active is None:
        return pointer
    slot = replace(running, proved=True)
    held = pointer.with_slot(pointer.active, slot)
    return replace(held, trial_starts=None)


def _first_starts(slot: Slot | None) -> int | None:
    return None if slot is None or slot.proved else 0


def roll_back(pointer: Pointer, code: str, message: str) -> Pointer:
    """Stops the failed active version; the other slot takes over if it holds one."""
    bad, name = pointer.running, pointer.active
    assert bad is not None and name is not None
    emptied = pointer.with_slot(name, None)
    return replace(
        emptied,
        active=pointer.spare_name if pointer.spare is not None else None,
        trial_starts=_first_starts(pointer.spare),
        failed=_add_failure(pointer.failed, Failure(bad.version, code, message[:_MAX_CHARACTERS])),
        last=replace(
            _report(pointer, bad, "rolled_back", code, message),
            golden_accuracy=bad.golden_accuracy,
            evaluation=bad.evaluation,
        ),
    )


def discard_damaged(pointer: Pointer, name: SlotName) -> Pointer:
    """Discards a slot whose files the disk damaged, which says nothing about the version.

    If it was active the other slot takes over. The lost version is to be installed again.
    """
    bad = pointer.slot(name)
    assert bad is not None
    emptied = pointer.with_slot(name, None)
    if name != pointer.active:
        return emptied
    message = "its files were damaged on this device's disk"
    return replace(
        emptied,
        active=pointer.spare_name if pointer.spare is not None else None,
        trial_starts=_first_starts(pointer.spare),
        last=_report(pointer, bad, "installing", "damaged", message),
    )


def _report(
    pointer: Pointer, about: ReleaseOffer | Slot, standing: ReleaseStanding, code: str = "", message: str = ""
) -> ReleaseReport:
    text = message[:_MAX_CHARACTERS]
    return ReleaseReport(about.rollout, pointer.model, about.version, standing, code, text)


def _add_failure(known: Iterable[Failure], failure: Failure) -> tuple[Failure, ...]:
    others = [each for each in known if each.version != failure.version]
    return (*others[-_MAX_FAILURES + 1 :], failure)
