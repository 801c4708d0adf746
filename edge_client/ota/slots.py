"""Two slots a model, and the pointer that says which one runs. A power cut anywhere leaves a device with a working model.

    releases/<model>/a/  b/          manifest.json and model.tflite each
    releases/<model>/pointer.json    which slot is active, on trial or not, what failed, how it all stands

A new version is written into the slot that is not active, and tested there; then one durable rename of `pointer.json`
makes it the active one, on trial. Until it has proved itself the way back is another such rename. What may follow on what
is decided here by pure functions from pointer to pointer; `read` and `write` are all that touches the disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from edge_client.files import make_folder, write_durably
from edge_client.wire.device import ReleaseEvaluation, ReleaseOffer, ReleaseReport
from edge_client.wire.rollouts import NO_MODEL, is_release
from edge_client.wire.strict import Unfit, loads, parse

SlotName = Literal["a", "b"]

TRIAL_STARTS = 3
"""Starts of the daemon that a version on trial may take to prove itself; one more is a crash loop."""

POINTER_NAME = "pointer.json"
_FORMAT = 1
_REMEMBERED = 50
_WORDS = 300


@dataclass(frozen=True)
class Slot:
    """A version that is whole and passed its self-test here. `rollout`: that told the device to take it."""

    version: int
    rollout: str
    golden_accuracy: float | None = None
    evaluation: ReleaseEvaluation | None = None


@dataclass(frozen=True)
class Failure:
    version: int
    code: str
    words: str


@dataclass(frozen=True)
class Pointer:
    """How one model stands on this device.

    Attributes:
        active: the slot that runs; None: there is no model yet.
        a, b: what they hold; None: nothing that could run.
        trial_starts: starts since the active version was made so; None: it has proved itself.
        failed: versions that are not tried again unless forced, oldest first.
        last: of the version told last, where that is not the active one.
    """

    model: str
    active: SlotName | None = None
    a: Slot | None = None
    b: Slot | None = None
    trial_starts: int | None = None
    failed: tuple[Failure, ...] = ()
    last: ReleaseReport | None = None
    format: int = _FORMAT

    @property
    def running(self) -> Slot | None:
        """What the active slot holds."""
        return self.slot(self.active) if self.active is not None else None

    @property
    def spare_name(self) -> SlotName:
        """The slot that is written next."""
        return "b" if self.active == "a" else "a"

    @property
    def spare(self) -> Slot | None:
        return self.slot(self.spare_name)

    def slot(self, name: SlotName) -> Slot | None:
        return self.a if name == "a" else self.b

    def failure(self, version: int) -> Failure | None:
        return next((each for each in self.failed if each.version == version), None)


def reports(pointer: Pointer) -> tuple[ReleaseReport, ...]:
    """What a check-in tells: the version that runs, and the one told last where that is another."""
    told = []
    running = pointer.running
    if running is not None:
        told.append(
            ReleaseReport(
                running.rollout,
                pointer.model,
                running.version,
                "active",
                golden_accuracy=running.golden_accuracy,
                evaluation=running.evaluation,
            )
        )
    return (*told, pointer.last) if pointer.last is not None else tuple(told)


def is_news(pointer: Pointer, offer: ReleaseOffer) -> bool:
    """Whether there is anything to do: not where it runs already for this rollout, or failed.

    Force is for one more try: not again by the same rollout.
    """
    running = pointer.running
    if offer.version == NO_MODEL:
        return running is not None or (pointer.last is not None and pointer.last.standing == "installing")
    if running is not None and running.version == offer.version:
        return running.rollout != offer.rollout
    if pointer.failure(offer.version) is None:
        return True
    return offer.force and not (pointer.last is not None and _is_about(pointer.last, offer))


def _is_about(report: ReleaseReport, offer: ReleaseOffer) -> bool:
    return (report.rollout, report.version) == (
        offer.rollout,
        offer.version,
    ) and report.standing != "installing"


def told_failed(pointer: Pointer, offer: ReleaseOffer) -> Pointer:
    """Another rollout offers a version that failed here: it hears so."""
    failure = pointer.failure(offer.version)
    if failure is None or (pointer.last is not None and _is_about(pointer.last, offer)):
        return pointer
    words = f"it failed here before: {failure.words}"
    return replace(pointer, last=_report(pointer, offer, "failed", failure.code, words))


def begun(pointer: Pointer, offer: ReleaseOffer) -> Pointer:
    """The spare slot is about to be written: it holds nothing any more."""
    emptied = replace(pointer, a=None) if pointer.spare_name == "a" else replace(pointer, b=None)
    return replace(emptied, last=_report(pointer, offer, "installing"))


def put_off(pointer: Pointer, offer: ReleaseOffer, code: str, words: str) -> Pointer:
    """It could not be fetched or trusted this time; that says nothing about the version."""
    return replace(pointer, last=_report(pointer, offer, "installing", code, words))


def failed(pointer: Pointer, offer: ReleaseOffer, code: str, words: str) -> Pointer:
    """The version cannot run here. What is active stays."""
    return replace(
        pointer,
        failed=_with(pointer.failed, Failure(offer.version, code, words[:_WORDS])),
        last=_report(pointer, offer, "failed", code, words),
    )


def committed(pointer: Pointer, slot: Slot) -> Pointer:
    """The spare slot holds this version, whole and tested, and is the active one from now on, on trial."""
    name = pointer.spare_name
    held = replace(pointer, a=slot) if name == "a" else replace(pointer, b=slot)
    return replace(
        held,
        active=name,
        trial_starts=0,
        failed=tuple(each for each in pointer.failed if each.version != slot.version),
        last=None,
    )


def renamed(pointer: Pointer, rollout: str) -> Pointer:
    """The version that runs is also what this rollout wants."""
    running = pointer.running
    assert running is not None and pointer.active is not None
    slot = replace(running, rollout=rollout)
    held = replace(pointer, a=slot) if pointer.active == "a" else replace(pointer, b=slot)
    last = pointer.last  # what was being installed is given up: this rollout wants what runs
    done = last is not None and (last.version == running.version or last.standing == "installing")
    return replace(held, last=None if done else last)


def turned_back(pointer: Pointer, slot: Slot) -> Pointer:
    """The spare slot, which holds `slot` and passed again, is the active one: told to, so that nothing failed."""
    left = pointer.running
    before = pointer.active
    turned = committed(pointer, slot)
    if left is None or before is None:
        return turned
    words = f"told to run version {slot.version}"
    last = ReleaseReport(left.rollout, pointer.model, left.version, "rolled_back", "told", words)
    return replace(turned, last=last)


def given_up(pointer: Pointer) -> Pointer:
    """No version runs any more: told to, since none did before this one."""
    left = pointer.running
    last = None
    if left is not None:
        words = "told to run no version"
        last = ReleaseReport(left.rollout, pointer.model, left.version, "rolled_back", "told", words)
    return replace(pointer, active=None, a=None, b=None, trial_starts=None, last=last)


def started(pointer: Pointer) -> Pointer:
    """The daemon starts: one start more on trial."""
    if pointer.active is None or pointer.trial_starts is None:
        return pointer
    return replace(pointer, trial_starts=pointer.trial_starts + 1)


def ended(pointer: Pointer) -> Pointer:
    """The daemon ends in order: its start does not count."""
    if not pointer.trial_starts:
        return pointer
    return replace(pointer, trial_starts=pointer.trial_starts - 1)


def is_crash_loop(pointer: Pointer) -> bool:
    """Whether the version on trial took more starts than it may."""
    return pointer.trial_starts is not None and pointer.trial_starts > TRIAL_STARTS


def proved(pointer: Pointer) -> Pointer:
    """The trial is over, well."""
    return replace(pointer, trial_starts=None)


def fallen_back(pointer: Pointer, code: str, words: str) -> Pointer:
    """The active version is not to run any more; the other slot takes over where it holds one, else nothing does."""
    bad, name = pointer.running, pointer.active
    assert bad is not None and name is not None
    emptied = replace(pointer, a=None) if name == "a" else replace(pointer, b=None)
    return replace(
        emptied,
        active=pointer.spare_name if pointer.spare is not None else None,
        trial_starts=None,
        failed=_with(pointer.failed, Failure(bad.version, code, words[:_WORDS])),
        last=ReleaseReport(
            bad.rollout,
            pointer.model,
            bad.version,
            "rolled_back",
            code,
            words[:_WORDS],
            bad.golden_accuracy,
            bad.evaluation,
        ),
    )


def _report(
    pointer: Pointer,
    offer: ReleaseOffer,
    standing: Literal["installing", "failed"],
    code: str = "",
    words: str = "",
) -> ReleaseReport:
    return ReleaseReport(offer.rollout, pointer.model, offer.version, standing, code, words[:_WORDS])


def _with(known: Iterable[Failure], failure: Failure) -> tuple[Failure, ...]:
    others = [each for each in known if each.version != failure.version]
    return (*others[-_REMEMBERED + 1 :], failure)


# -- on disk --


def folder_of(state_dir: Path, model: str) -> Path:
    return state_dir / "releases" / model


def slot_folder(state_dir: Path, model: str, name: SlotName) -> Path:
    return folder_of(state_dir, model) / name


def active_folder(state_dir: Path, model: str) -> Path | None:
    """The release folder that runs, for whoever predicts with it; None: there is none."""
    pointer = read(state_dir, model)
    return slot_folder(state_dir, model, pointer.active) if pointer.active is not None else None


def models(state_dir: Path) -> tuple[str, ...]:
    """Models this device was ever told to run."""
    folder = state_dir / "releases"
    if not folder.is_dir():
        return ()
    return tuple(sorted(each.parent.name for each in folder.glob(f"*/{POINTER_NAME}")))


def read(state_dir: Path, model: str) -> Pointer:
    """The model's pointer; an empty one where there is none, or none that this software can read."""
    path = folder_of(state_dir, model) / POINTER_NAME
    try:
        pointer = parse(Pointer, loads(path.read_bytes(), str(path)), str(path))
    except (FileNotFoundError, Unfit):
        return Pointer(model)
    if pointer.format != _FORMAT or pointer.model != model:
        return Pointer(model)
    return pointer if pointer.active is None or pointer.running is not None else replace(pointer, active=None)


def write(state_dir: Path, pointer: Pointer) -> None:
    """Makes the pointer durable.

    Raises:
        OSError: the disk is full; the pointer is as it was.
    """
    assert is_release(pointer.model, 1)
    folder = folder_of(state_dir, pointer.model)
    make_folder(folder)
    content = json.dumps(asdict(pointer), indent=1, sort_keys=True) + "\n"
    write_durably(folder / POINTER_NAME, content.encode(), mode=0o600)
