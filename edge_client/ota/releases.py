"""The daemon's models over time: what it was told to run, what is tried when, and trials that end well or do not.

    begin     after every start: count it, have the active slots tested, go back where they fail or crash
    heard     the offers of a check-in's answer
    offers    those that are due, for `edge_client.steps` to decide on
    install   does one, and says when to try again where that failed
    tend      a version that ran long enough has proved itself; one that ends its services again and again goes

Everything durable is in the pointers (`edge_client.ota.slots`); what is here is forgotten with the process, and heard
again at the next check-in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from edge_client.backoff import Backoff
from edge_client.config import EdgeConfig
from edge_client.failpoints import reach
from edge_client.failures import CertificateExpired, ServerRefused, Unreachable
from edge_client.link import Link
from edge_client.ota import proof, served, slots
from edge_client.ota.slots import Pointer
from edge_client.ota.trouble import NotSigned, PutOff, Unfit
from edge_client.steps import Offered
from edge_client.wire import rollouts
from edge_client.wire.device import ReleaseOffer, ReleaseReport
from edge_client.wire.inference import MANIFEST_NAME
from edge_client.wire.strict import printable

TRIAL_SECONDS = 60.0
"""A daemon that runs so long with a version has not been ended by it."""

FIRST_AGAIN_SECONDS, LONGEST_AGAIN_SECONDS = 10.0, 3600.0
MOST_OFFERS = 100


class Releases:
    """Of one daemon. `now`: a clock that never jumps."""

    def __init__(
        self,
        config: EdgeConfig,
        now: Callable[[], float],
        rng: random.Random,
        prove: Callable[..., proof.Proof] = proof.prove,
    ) -> None:
        self._config = config
        self._now = now
        self._rng = rng
        self._prove = prove
        self._offers: dict[str, ReleaseOffer] = {}
        self._again: dict[str, tuple[Backoff, float]] = {}
        self._on_trial_since: dict[str, float] = {}

    def begin(self, going: Callable[[], None] = lambda: None) -> list[str]:
        """After a start. What happened, in words for a person."""
        notes: list[str] = []
        for model in slots.models(self._config.state_dir):
            try:
                for leftover in slots.folder_of(self._config.state_dir, model).glob(".*"):
                    leftover.unlink(missing_ok=True)  # of a write or a self-test that a crash ended
                notes += self._begin(model, going)
            except OSError as error:
                # A full disk must not keep the daemon from starting.
                notes.append(f"{model}: this device's disk: {error.strerror}")
                self._on_trial_since[model] = self._now()
        return notes

    def end(self) -> None:
        """The daemon ends because it was told to, so that this start says nothing against a version on trial."""
        for model in self._on_trial_since:
            with suppress(OSError):
                pointer = slots.read(self._config.state_dir, model)
                if (after := slots.ended(pointer)) != pointer:
                    slots.write(self._config.state_dir, after)

    def heard(self, offers: Iterable[ReleaseOffer]) -> list[str]:
        """Takes over the offers of an answer: those of before are no more. Notes."""
        notes = []
        self._offers = {}
        for offer in list(offers)[:MOST_OFFERS]:
            if not rollouts.is_told(offer.model, offer.version, offer.action):
                notes.append(
                    f"an offer of {printable(offer.model, 70)!r}, which is no model's name, is ignored"
                )
                continue
            pointer = slots.read(self._config.state_dir, offer.model)
            if slots.is_news(pointer, offer):
                self._offers[offer.model] = offer
            elif (told := slots.told_failed(pointer, offer)) != pointer:
                slots.write(self._config.state_dir, told)
        self._again = {model: self._again[model] for model in self._offers if model in self._again}
        return notes

    def offers(self) -> tuple[Offered, ...]:
        """What is to be installed, and not before when."""
        return tuple(
            Offered(offer, self._again[model][1] if model in self._again else 0.0)
            for model, offer in self._offers.items()
        )

    def install(self, device: str, link: Link, offer: ReleaseOffer, going: Callable[[], None]) -> str:
        """Does what an offer says. How it went, in words.

        Raises:
            Unreachable, ServerRefused, CertificateExpired: as the agent expects them. Cancelled: by `going`.
            OSError: the disk, but for a full one.
        """
        from edge_client.ota import install  # with tuf, which many a daemon never needs

        what = f"{offer.model}:{offer.version}"
        asked = install.Device(device, self._config, self._prove)
        try:
            words = install.install(asked, link, offer, going)
        except (Unreachable, ServerRefused, CertificateExpired, OSError):
            # Whatever is the matter with releases, the device goes on with its other work meanwhile.
            self._later(offer.model)
            raise
        except Unfit as unfit:
            self._done(offer)
            return f"{what} does not run here: {unfit.words} ({unfit.code})"
        except PutOff as trouble:
            seconds = self._later(offer.model)
            return f"{what} is not installed now: {trouble.words} ({trouble.code}); tries again in {seconds:.0f} s"
        except NotSigned as unsigned:
            self._later(offer.model)
            return f"{unsigned}; ignored"
        self._done(offer)
        self._on_trial_since[offer.model] = self._now()
        return words

    def tend(self, going: Callable[[], None] = lambda: None) -> list[str]:
        """Trials that lasted long enough are over, and models that end whoever predicts with them. Notes."""
        self._end_trials()
        notes: list[str] = []
        for model in served.models(self._config.state_dir):
            # What cannot be written now is seen again at the next look.
            with suppress(OSError):
                notes += self._heed_services(slots.read(self._config.state_dir, model), going)
        return notes

    def _heed_services(self, pointer: Pointer, going: Callable[[], None]) -> list[str]:
        starts = served.crash_loop(self._config.state_dir, pointer)
        trouble = None
        if starts is not None:
            trouble = "crash_loop", f"what predicts with it was started {starts} times without lasting"
        pointer, notes = self._gone_back(pointer, trouble, going)
        served.forget(self._config.state_dir, pointer)
        return notes

    def _end_trials(self) -> None:
        for model, since in list(self._on_trial_since.items()):
            if self._now() - since < TRIAL_SECONDS:
                continue
            pointer = slots.read(self._config.state_dir, model)
            if pointer.trial_starts is not None:
                try:
                    slots.write(self._config.state_dir, slots.proved(pointer))
                except OSError:
                    continue  # kept when the disk has room again
                reach("install.proved")
            del self._on_trial_since[model]

    def _begin(self, model: str, going: Callable[[], None]) -> list[str]:
        state_dir = self._config.state_dir
        pointer = slots.started(slots.read(state_dir, model))
        if pointer.trial_starts is not None:
            slots.write(state_dir, pointer)
            reach("install.proving")
        pointer, notes = self._gone_back(pointer, self._trouble(pointer, going), going)
        if pointer.trial_starts is not None:
            self._on_trial_since[model] = self._now()
        return notes

    def _gone_back(
        self, pointer: Pointer, trouble: tuple[str, str] | None, going: Callable[[], None]
    ) -> tuple[Pointer, list[str]]:
        """Where there is trouble with the active version, the other one runs, if that passes. How it stands then, notes."""
        notes = []
        while trouble is not None:
            bad = pointer.running
            assert bad is not None
            code, words = trouble
            reach("install.turning")
            pointer = slots.fallen_back(pointer, code, words)
            slots.write(self._config.state_dir, pointer)
            reach("install.turned")
            now = f"version {pointer.running.version} runs again" if pointer.running else "there is no other"
            notes.append(f"{pointer.model}:{bad.version} is not used any more: {words} ({code}); {now}")
            trouble = self._trouble(pointer, going)
        return pointer, notes

    def _trouble(self, pointer: Pointer, going: Callable[[], None]) -> tuple[str, str] | None:
        """Why the active version cannot go on; None: it can, or there is none."""
        if pointer.active is None:
            return None
        if slots.is_crash_loop(pointer):
            return "crash_loop", f"the daemon was started {pointer.trial_starts} times without lasting"
        folder = slots.slot_folder(self._config.state_dir, pointer.model, pointer.active)
        try:
            self._prove(proof.Question(folder, _memory_bytes(folder)), going)
        except Unfit as unfit:
            # Slowness and want of memory may be this hour's; a version that proved itself is not given up for them.
            passing = unfit.code in ("too_slow", "memory") and pointer.trial_starts is None
            return None if passing else (unfit.code, unfit.words)
        except (PutOff, OSError):
            return None  # this machine's trouble, not the model's
        return None

    def _done(self, offer: ReleaseOffer) -> None:
        self._offers.pop(offer.model, None)
        self._again.pop(offer.model, None)

    def _later(self, model: str) -> float:
        backoff = self._again[model][0] if model in self._again else self._backoff()
        seconds = FIRST_AGAIN_SECONDS / 2 + backoff.failed()
        self._again[model] = backoff, self._now() + seconds
        return seconds

    def _backoff(self) -> Backoff:
        return Backoff(self._rng, first_seconds=FIRST_AGAIN_SECONDS, longest_seconds=LONGEST_AGAIN_SECONDS)


def reports(state_dir: Path) -> tuple[ReleaseReport, ...]:
    """How every model stands, for a check-in."""
    told: list[ReleaseReport] = []
    for model in slots.models(state_dir):
        told += slots.reports(slots.read(state_dir, model))
    return tuple(told)


def shown(state_dir: Path) -> list[dict[str, Any]]:
    """Every model and its slots, for `fedloop-edge status`."""
    found = []
    for model in slots.models(state_dir):
        pointer = slots.read(state_dir, model)
        held = {name: slot.version for name in ("a", "b") if (slot := pointer.slot(name)) is not None}
        last = pointer.last
        found.append(
            {
                "model": model,
                "active": pointer.active,
                "version": pointer.running.version if pointer.running is not None else None,
                "slots": held,
                "on_trial": pointer.trial_starts is not None,
                "golden_accuracy": pointer.running.golden_accuracy if pointer.running is not None else None,
                "failed": {str(each.version): each.code for each in pointer.failed},
                "last": None
                if last is None
                else {
                    "version": last.version,
                    "standing": last.standing,
                    "code": last.code,
                    "words": last.words,
                },
            }
        )
    return found


def _memory_bytes(folder: Path) -> int:
    """As the manifest says; a manifest that cannot be read fails in the self-test."""
    from edge_client.wire import inference
    from edge_client.wire.manifest import ManifestError

    with suppress(OSError, ManifestError):
        return inference.from_json((folder / MANIFEST_NAME).read_bytes()).memory_bytes
    return 0
