"""The daemon's models over time: offers, retries and trials.

    begin           after every start: counts it, tests the active slots, rolls back those that fail or crash
    update_offers   takes the offers of a check-in's answer
    offers          those to install and when, for `edge_client.steps` to decide on
    install         installs one, or schedules the next try
    maintain        ends the trial of a version that ran long enough; rolls back one that crashes its services

All durable state is in the pointers (`edge_client.ota.slots`); the state here ends with the process and is rebuilt by
the next check-in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.failpoints import reach
from edge_client.ota import crash_counter, self_test, slots, transitions
from edge_client.ota.errors import TRANSIENT_CODES, NotSigned, NotWithdrawn, Postponed, Rejected
from edge_client.ota.transitions import Pointer
from edge_client.steps import PendingRelease
from edge_client.transport.failures import Backoff, CertificateExpired, ServerRefused, Unreachable
from edge_client.transport.link import Link
from edge_client.wire import rollouts
from edge_client.wire.device import ReleaseOffer
from edge_client.wire.rollouts import MANIFEST_NAME
from edge_client.wire.strict import printable

if TYPE_CHECKING:
    from edge_client.config import EdgeConfig

FIRST_AGAIN_SECONDS, LONGEST_AGAIN_SECONDS = 10.0, 3600.0
CHECK_SECONDS = 3600.0
"""How often the files of the slots are verified against their hashes, besides at every start."""

MAX_OFFERS = 100


class Releases:
    """The releases of one daemon. `now`: monotonic seconds."""

    def __init__(
        self,
        config: EdgeConfig,
        now: Callable[[], float],
        rng: random.Random,
        run_self_test: Callable[..., self_test.SelfTestResult] = self_test.run,
    ) -> None:
        self._config = config
        self._state_dir = config.state_dir
        self._now = now
        self._rng = rng
        self._run_self_test = run_self_test
        self._offers: dict[str, ReleaseOffer] = {}
        self._retries: dict[str, tuple[Backoff, float]] = {}
        self._on_trial_since: dict[str, float] = {}
        self._checked_at = now()

    def begin(self, check_cancelled: Callable[[], None] = lambda: None) -> list[str]:
        """Checks all models after a start. Returns notes for people."""
        notes: list[str] = []
        for model in slots.models(self._state_dir):
            try:
                for leftover in slots.folder_of(self._state_dir, model).glob(".*"):
                    leftover.unlink(missing_ok=True)  # of a write or a self-test that a crash interrupted
                notes += self._begin(model, check_cancelled)
            except OSError as error:
                # A full disk must not keep the daemon from starting.
                notes.append(f"{model}: this device's disk: {error.strerror}")
                self._on_trial_since[model] = self._now()
        return notes

    def end(self) -> None:
        """Takes back this start from trials, because the daemon stops in order."""
        for model in self._on_trial_since:
            with suppress(OSError):
                pointer = slots.read(self._state_dir, model)
                if (after := transitions.uncount_start(pointer)) != pointer:
                    slots.write(self._state_dir, after)

    def update_offers(self, offers: Iterable[ReleaseOffer]) -> list[str]:
        """Replaces the offers by those of an answer. Returns notes."""
        notes = []
        self._offers = {}
        for offer in list(offers)[:MAX_OFFERS]:
            if not rollouts.is_valid_order(offer.model, offer.version, offer.action):
                notes.append(
                    f"an offer of {printable(offer.model, 70)!r}, which is not a model's name, is ignored"
                )
                continue
            pointer = slots.read(self._state_dir, offer.model)
            if transitions.needs_action(pointer, offer):
                self._offers[offer.model] = offer
            elif (reported := transitions.report_known_failure(pointer, offer)) != pointer:
                slots.write(self._state_dir, reported)
        self._retries = {model: self._retries[model] for model in self._offers if model in self._retries}
        return notes

    def offers(self) -> tuple[PendingRelease, ...]:
        """The releases to install, and the earliest time for each."""
        return tuple(
            PendingRelease(
                offer,
                max(self._retries[model][1] if model in self._retries else 0.0, self._trial_ends(offer)),
            )
            for model, offer in self._offers.items()
        )

    def _trial_ends(self, offer: ReleaseOffer) -> float:
        """When the trial that delays an offer ends; 0: no trial delays it."""
        since = self._on_trial_since.get(offer.model)
        if since is None or not transitions.must_wait(slots.read(self._state_dir, offer.model), offer):
            return 0.0
        return since + self._config.releases.trial_seconds

    def install(
        self, device: str, link: Link, offer: ReleaseOffer, check_cancelled: Callable[[], None]
    ) -> str:
        """Carries out an offer. Returns a description of the result.

        Raises:
            Unreachable, ServerRefused, CertificateExpired: the agent handles them. Cancelled: by `check_cancelled`.
            OSError: the disk failed, other than by being full.
        """
        from edge_client.ota import install  # imports tuf, which many daemons never need

        what = f"{offer.model}:{offer.version}"
        target = install.Device(device, self._config, self._run_self_test)
        before = slots.read(self._state_dir, offer.model)
        try:
            message = install.install(target, link, offer, check_cancelled)
        except (Unreachable, ServerRefused, CertificateExpired, OSError):
            # The device goes on with its other work in the meantime.
            self._schedule_retry(offer.model)
            raise
        except Rejected as rejected:
            self._done(offer)
            return f"{what} does not run here: {rejected.message} ({rejected.code})"
        except Postponed as postponed:
            seconds = self._schedule_retry(offer.model)
            return f"{what} is not installed now: {postponed.message} ({postponed.code}); tries again in {seconds:.0f} s"
        except (NotWithdrawn, NotSigned) as order:
            self._schedule_retry(offer.model)
            return str(order) if isinstance(order, NotWithdrawn) else f"{order}; ignored"
        self._done(offer)
        after = slots.read(self._state_dir, offer.model)
        if (after.active, after.trial_starts) != (before.active, before.trial_starts):
            self._on_trial_since[offer.model] = self._now()
        return message

    def maintain(self, check_cancelled: Callable[[], None] = lambda: None) -> list[str]:
        """Ends trials that lasted long enough, and rolls back models that crash their services. Returns notes."""
        self._end_trials()
        notes = self._verify_files(check_cancelled) if self._now() - self._checked_at >= CHECK_SECONDS else []
        for model in crash_counter.models(self._state_dir):
            # A write that fails now is tried again next time.
            with suppress(OSError):
                notes += self._check_services(slots.read(self._state_dir, model), check_cancelled)
        return notes

    def _check_services(self, pointer: Pointer, check_cancelled: Callable[[], None]) -> list[str]:
        starts = crash_counter.crash_loop(self._state_dir, pointer)
        failure = None
        if starts is not None:
            failure = "crash_loop", f"its service was started {starts} times without lasting"
        pointer, notes = self._roll_back(pointer, failure, check_cancelled)
        crash_counter.forget(self._state_dir, pointer)
        return notes

    def _verify_files(self, check_cancelled: Callable[[], None]) -> list[str]:
        self._checked_at = self._now()
        notes: list[str] = []
        for model in slots.models(self._state_dir):
            with suppress(OSError):
                if damage := slots.repair(self._state_dir, model):
                    notes.append(damage)
                notes += self._discard_damaged(slots.read(self._state_dir, model), check_cancelled)[1]
        return notes

    def _discard_damaged(
        self, pointer: Pointer, check_cancelled: Callable[[], None]
    ) -> tuple[Pointer, list[str]]:
        """Discards slots whose files the disk damaged. Returns the new pointer and notes."""
        notes = []
        order = (pointer.spare_name, pointer.active)  # the spare first: a damaged one must not take over
        for name in order:
            slot = pointer.slot(name) if name is not None else None
            if name is None or slot is None:
                continue
            if slots.is_intact(self._state_dir, pointer, name, check_cancelled):
                continue
            pointer = transitions.discard_damaged(pointer, name)
            slots.write(self._state_dir, pointer)
            self._begin_trial(pointer)
            result = f"version {pointer.running.version} runs" if pointer.running else "no version runs"
            notes.append(f"{pointer.model}:{slot.version} was damaged on this device's disk; {result}")
        return pointer, notes

    def _begin_trial(self, pointer: Pointer) -> None:
        if pointer.trial_starts is not None:
            self._on_trial_since[pointer.model] = self._now()

    def _end_trials(self) -> None:
        for model, since in list(self._on_trial_since.items()):
            if self._now() - since < self._config.releases.trial_seconds:
                continue
            pointer = slots.read(self._state_dir, model)
            if pointer.trial_starts is not None:
                try:
                    slots.write(self._state_dir, transitions.finish_trial(pointer))
                except OSError:
                    continue  # written once the disk has room again
                reach("install.proved")
            del self._on_trial_since[model]

    def _begin(self, model: str, check_cancelled: Callable[[], None]) -> list[str]:
        damage = slots.repair(self._state_dir, model)
        pointer = transitions.count_start(slots.read(self._state_dir, model))
        if pointer.trial_starts is not None:
            slots.write(self._state_dir, pointer)
            reach("install.proving")
        pointer, damaged = self._discard_damaged(pointer, check_cancelled)
        pointer, notes = self._roll_back(
            pointer, self._find_failure(pointer, check_cancelled), check_cancelled
        )
        self._begin_trial(pointer)
        return [*([damage] if damage else []), *damaged, *notes]

    def _roll_back(
        self, pointer: Pointer, failure: tuple[str, str] | None, check_cancelled: Callable[[], None]
    ) -> tuple[Pointer, list[str]]:
        """Rolls back as long as the active version fails. Returns the new pointer and notes."""
        notes = []
        while failure is not None:
            bad = pointer.running
            assert bad is not None
            pointer, damaged = self._discard_damaged(pointer, check_cancelled)
            notes += damaged
            if pointer.running != bad:
                failure = self._find_failure(pointer, check_cancelled)
                continue
            code, message = failure
            reach("install.turning")
            pointer = transitions.roll_back(pointer, code, message)
            slots.write(self._state_dir, pointer)
            reach("install.turned")
            self._begin_trial(pointer)
            result = (
                f"version {pointer.running.version} runs again" if pointer.running else "there is no other"
            )
            notes.append(f"{pointer.model}:{bad.version} is no longer used: {message} ({code}); {result}")
            failure = self._find_failure(pointer, check_cancelled)
        return pointer, notes

    def _find_failure(self, pointer: Pointer, check_cancelled: Callable[[], None]) -> tuple[str, str] | None:
        """Code and message why the active version cannot go on; None: it can, or there is none."""
        if pointer.active is None:
            return None
        if transitions.is_crash_loop(pointer):
            return "crash_loop", f"the daemon was started {pointer.trial_starts} times without lasting"
        folder = slots.slot_folder(self._state_dir, pointer.model, pointer.active)
        try:
            self._run_self_test(self_test.SelfTestJob(folder, _memory_bytes(folder)), check_cancelled)
        except Rejected as rejected:
            transient = rejected.code in TRANSIENT_CODES and pointer.trial_starts is None
            return None if transient else (rejected.code, rejected.message)
        except (Postponed, OSError):
            return None  # a problem of this machine, not of the model
        return None

    def _done(self, offer: ReleaseOffer) -> None:
        self._offers.pop(offer.model, None)
        self._retries.pop(offer.model, None)

    def _schedule_retry(self, model: str) -> float:
        new = Backoff(self._rng, first_seconds=FIRST_AGAIN_SECONDS, longest_seconds=LONGEST_AGAIN_SECONDS)
        backoff, _ = self._retries.get(model, (new, 0.0))
        seconds = FIRST_AGAIN_SECONDS / 2 + backoff.failed()
        self._retries[model] = backoff, self._now() + seconds
        return seconds


def _memory_bytes(folder: Path) -> int:
    """The manifest's `memory_bytes`; a manifest that cannot be read fails in the self-test."""
    from edge_client.wire import inference
    from edge_client.wire.manifest import ManifestError

    with suppress(OSError, ManifestError):
        return inference.from_json((folder / MANIFEST_NAME).read_bytes()).memory_bytes
    return 0
