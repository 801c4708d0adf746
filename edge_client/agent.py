"""The daemon: looks at what is and what is wanted, does the next steps, sleeps, and again.

    look ─► steps.next_steps ─► Executor does them ─► a failure says when to try again ─► sleep or be woken

A signal, a person's command or the end of the certificate's life wakes it early. While it trains, a second
thread keeps the lease, and every half second it is asked whether to go on: not when the person paused it,
when the coordinator lost interest, when conditions changed, when the daemon is to end. Clocks: waiting and
leases go by one that never jumps; dates by the coordinator's clock once it was heard, for a device's own may
be wrong by weeks.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from dataclasses import replace

from edge_client import status
from edge_client.backoff import Backoff
from edge_client.errors import Stopped, UserMistake
from edge_client.execute import Executor, heartbeat
from edge_client.failures import (
    LONGEST_WAIT_SECONDS,
    Cancelled,
    CertificateExpired,
    ServerRefused,
    Unreachable,
    WrongClock,
)
from edge_client.link import SILENCE_SECONDS
from edge_client.membership import FINAL, Membership
from edge_client.ota.releases import Releases
from edge_client.poll import Poll
from edge_client.steps import (
    LONGEST_SLEEP_SECONDS,
    AskIn,
    Current,
    Deliver,
    Desired,
    Discard,
    Fetch,
    GiveBack,
    Halt,
    Held,
    Install,
    Renew,
    Sleep,
    Step,
    Work,
    is_out,
    next_steps,
)
from edge_client.surroundings import Surroundings, desired_by, message_of
from edge_client.train.process import Interrupted, TrainingFailed
from edge_client.wake import Ending, Wake
from edge_client.watch import Cause, Watch
from edge_client.wire.device import CheckIn, CheckInAnswer, Decline, ReleaseOffer, TaskOffer
from edge_client.wire.strict import printable

SOON_SECONDS, SOON_FOR_SECONDS = 5.0, 60.0
"""A coordinator that counted on this device and went away is most likely being started again: for the first minute
it is asked at least this often."""

_INSTALL_LEASE_SECONDS = 90.0
_HOLD_PAUSE_SECONDS = 0.02
"""Between two held check-ins: a coordinator that does not wait as asked is not to be asked in a tight loop."""


class Agent:
    """One daemon. `run` until told to end; `tick` is one round of it."""

    def __init__(self, executor: Executor, surroundings: Surroundings, wake: Wake) -> None:
        self._do = executor
        self._around = surroundings
        self._wake = wake
        self._backoff = Backoff(surroundings.rng)
        self._ending = False
        self._held: Held | None = None
        self._task_ends_at = float("inf")
        self._poll: Poll | None = None
        self._hold = False
        self._held_until: float | None = None
        self._checkin_at = 0.0
        self._retry_at = 0.0
        self._status = status.Writer(executor.config.state_dir, surroundings.wall)
        self._member = Membership(executor.config, surroundings, self._status.note)
        self._releases = Releases(executor.config, surroundings.now, surroundings.rng)

    def end(self) -> None:
        """Asks `run` to return soon; from a signal handler or another thread."""
        self._ending = True
        self._wake.set()

    @property
    def is_ending(self) -> bool:
        return self._ending

    @property
    def retry_at(self) -> float:
        """When the coordinator is asked again after a failure; 0: there was none."""
        return self._retry_at

    def run(self) -> None:
        """Works until `end`, or until a signal handler raises Ending.

        Raises:
            Stopped: it was revoked, or cannot go on for another reason a person must mend.
            UserMistake: it was never enrolled.
        """
        try:
            with suppress(Ending):
                self.begin()
                while not self._ending:
                    self.tick()
            self._releases.end()
            self._tell("stopped", "ended")
        except Stopped as error:
            self._tell("stopped", str(error))
            raise
        finally:
            self._around.notify("STOPPING=1")
            self._do.training.close()

    def tick(self) -> None:
        """Does the next steps, up to the first that fails."""
        self._around.notify("WATCHDOG=1")
        try:
            for step in next_steps(*self._look()):
                if self._ending:
                    return
                self._take(step)
        except Cancelled:
            return
        except (Unreachable, ServerRefused, CertificateExpired) as error:
            self._failed(error)
        except (OSError, sqlite3.Error) as error:
            self._failed(Unreachable(f"this device's disk: {error}"))
            # Looking may be what failed, so that the next tick would not sleep.
            self._wake.wait(self._retry_at - self._around.now())

    def begin(self) -> None:
        self._member.begin()
        for lost in self._do.sweep():
            self._do.ledger.outcome(lost, "lost on this device's disk", self._member.date())
        offer = self._do.state.task()
        self._held = Held(offer) if offer is not None else None
        self._around.notify("READY=1")
        for words in self._releases.begin(lambda: self._around.notify("WATCHDOG=1")):
            self._status.note(words)
        self._tell("starting", f"device {self._member.identity.device} of {self._member.identity.url}")

    def _look(self) -> tuple[Current, Desired]:
        if self._poll is not None and self._poll.done.is_set():
            self._heed_poll()
        for words in self._releases.tend(lambda: self._around.notify("WATCHDOG=1")):
            self._status.note(words)
        current = Current(
            now=self._around.now(),
            wall=self._member.date(),
            renew_at=self._member.renew_at,
            certificate_expired=self._member.expired,
            held=self._held,
            outbox=tuple(self._do.outbox.waiting()),
            checkin_at=self._checkin_at,
            hold=self._hold,
            retry_at=self._retry_at,
            runtimes=tuple(self._around.runtimes),
            datasets=self._around.datasets(),
            models=self._around.models,
            offers=self._releases.offers(),
        )
        return current, self._desired()

    def _desired(self) -> Desired:
        return desired_by(self._do.config, self._do.state, self._around)

    def _take(self, step: Step) -> None:
        match step:
            case Halt(words):
                raise UserMistake(words)
            case Renew(expired):
                self._member.renew(expired, lambda: self._tell("renewing", "asks for the next certificate"))
            case Deliver():
                self._deliver(step)
            case Discard(waiting):
                self._do.outbox.drop(waiting)
                self._status.note(f"{waiting.run_name}, round {waiting.round}: thrown away, opted out")
            case AskIn(wait_seconds):
                self._check_in(wait_seconds)
            case Fetch(offer):
                self._fetch(offer)
            case Work(offer):
                self._work(offer)
            case Install(release):
                self._install(release)
            case GiveBack(offer, decline):
                self._tell("declining", f"{offer.run_name}, round {offer.round}: {decline.words}")
                self._do.give_back(self._member.link, offer, decline)
                self._release()
            case Sleep(until):
                if self._wake.wait(until - self._around.now()):
                    self._checkin_at = self._around.now()  # a person changed something: tell it at once

    # -- checking in --

    def _check_in(self, wait_seconds: float) -> None:
        if wait_seconds == 0.0:
            self._heed(self._do.check_in(self._member.link, self._message(0.0)))
            return
        self._tell("holding", "waits for a task")
        if self._poll is None:
            self._poll = Poll(self._do, self._member.link, self._message(wait_seconds), self._wake)
        # Woken without an answer: a person or a signal wants something. The answer is heeded when it comes.
        self._wake.wait(min(wait_seconds + SILENCE_SECONDS, LONGEST_SLEEP_SECONDS))

    def _heed_poll(self) -> None:
        poll, self._poll = self._poll, None
        assert poll is not None
        self._heed(poll.answer())

    def _heed(self, answered: tuple[CheckInAnswer, float | None]) -> None:
        answer, date = answered
        self._succeeded()
        self._member.heard(date)
        self._hold = answer.hold and not self._desired().ineligible
        self._checkin_at = self._around.now() + (
            _HOLD_PAUSE_SECONDS if self._hold else min(max(1.0, answer.next_seconds), LONGEST_WAIT_SECONDS)
        )
        if answer.stop and self._held is not None:
            self._do.give_back(None, self._held.offer, None)
            self._release()
        elif self._held is not None and self._held.state == "unconfirmed":
            self._held = replace(self._held, state="confirmed")
        if answer.task is not None and self._held is None:
            self._do.take(answer.task, self._member.date())
            self._held = Held(answer.task, "confirmed")
            self._task_ends_at = self._around.now() + answer.task.deadline_seconds
        for words in self._releases.heard(answer.releases):
            self._status.note(words)
        self._do.forget(self._member.date(), held=answer.hold or self._held is not None)
        if self._held is None:
            self._tell_idle(answer)

    def _tell_idle(self, answer: CheckInAnswer) -> None:
        reasons = self._desired().ineligible
        words = "; ".join(reasons) if reasons else "no work now"
        self._tell("ineligible" if reasons else "idle", f"{words}; asks again in {answer.next_seconds:.0f} s")

    def _message(self, wait_seconds: float, working_on: str | None = None) -> CheckIn:
        held = self._held.offer.task if self._held is not None else None
        message = message_of(self._do.config, self._do.state, self._around)
        return replace(message, working_on=working_on or held, wait_seconds=wait_seconds)

    # -- work --

    def _fetch(self, offer: TaskOffer) -> None:
        self._tell("fetching", f"{offer.run_name}, round {offer.round}", offer)
        try:
            with heartbeat(self._member.link, self._message(0.0), offer.lease_seconds):
                self._do.fetch(self._member.link, offer, self._going)
        except ServerRefused as refused:
            if refused.code not in ("not_found", "not_yours"):
                raise
            self._refuse(offer, Decline("failed", f"its files are gone: {refused.words}"))
            raise Cancelled from None
        except TrainingFailed as failure:
            self._refuse(offer, failure.decline)
            raise Cancelled from None
        except Unreachable:
            self._held = Held(offer)  # by the next time it may have been given to others
            raise
        self._succeeded()
        self._held = Held(offer, "fetched")

    def _work(self, offer: TaskOffer) -> None:
        verb = "training" if offer.kind == "train" else "evaluating"
        self._tell(verb, f"{offer.run_name}, round {offer.round}, {offer.runtime}", offer)
        with heartbeat(self._member.link, self._message(0.0), offer.lease_seconds) as beats:
            watch = Watch(self._around, lambda look: self._why_not(look, beats.unwanted))
            try:
                gone = self._do.work(offer, watch, self._member.date)
            except Interrupted as interrupted:
                self._interrupted(offer, watch.cause, str(interrupted))
                raise Cancelled from None
            except TrainingFailed as failure:
                self._refuse(offer, failure.decline, failure.words)
                raise Cancelled from None
            except OSError as error:
                self._refuse(
                    offer, Decline("limits", f"the result cannot be stored: {error.strerror or error}")
                )
                raise Cancelled from None
        for lost in gone:
            self._status.note(
                f"the outbox was full: the result of {lost.run_name}, round {lost.round} had to go"
            )
        self._release()
        # A result is delivered before anything else is asked for.
        self._checkin_at = min(self._checkin_at, self._around.now())

    def _install(self, offer: ReleaseOffer) -> None:
        """Check-ins go on meanwhile, so that the coordinator knows where this device is, and gives it no task."""
        what = f"installs {offer.model}:{offer.version}"
        self._tell("installing", what)
        message = self._message(0.0)
        busy = replace(message, ineligible=(*message.ineligible, what))
        watch = Watch(self._around, self._why_not)

        def going() -> None:
            if watch() is not None:
                raise Cancelled

        with heartbeat(self._member.link, busy, _INSTALL_LEASE_SECONDS):
            words = self._releases.install(self._member.identity.device, self._member.link, offer, going)
        self._succeeded()
        self._status.note(words)
        self._tell("idle", words)
        self._checkin_at = self._around.now()  # how it went is told at once

    def _interrupted(self, offer: TaskOffer, cause: Cause | None, words: str) -> None:
        if cause == "unwanted":
            self._do.give_back(None, offer, None)
            self._release()
        elif cause == "deadline":
            self._refuse(offer, Decline("limits", words))
        elif cause == "opted_out":
            self._refuse(offer, Decline("opted_out", words))
        elif cause != "ending":
            self._refuse(offer, Decline("ineligible", words))
        # When the daemon ends the task stays in hand: after a quick restart the coordinator says if it is ours still.

    def _why_not(self, conditions: bool, unwanted: bool = False) -> tuple[Cause, str] | None:
        """Why the work in hand is to stop now, or None; reads conditions only where asked to."""
        if self._ending:
            return "ending", "the daemon ends"
        if unwanted:
            return "unwanted", "the coordinator wants the result no more"
        if self._around.now() > self._task_ends_at:
            return "deadline", "the round's deadline is over"
        if self._do.state.paused():
            return "paused", "paused by hand"
        opted_out = desired_by(self._do.config, self._do.state, self._around).opted_out if conditions else ()
        if self._held is not None and is_out(self._held.offer, opted_out):
            return "opted_out", "this device takes no part in this run any more"
        reasons = self._around.ineligible() if conditions else ()
        if reasons:
            return "ineligible", "; ".join(reasons)
        return None

    def _refuse(self, offer: TaskOffer, decline: Decline, words: str | None = None) -> None:
        """`words`: for this device's owner, where they say more than the coordinator is told."""
        self._status.note(f"{offer.run_name}, round {offer.round} not done: {words or decline.words}")
        state = self._held.state if self._held is not None else "unconfirmed"
        self._held = Held(offer, state, decline)

    def _release(self) -> None:
        self._held = None
        self._task_ends_at = float("inf")

    def _deliver(self, step: Deliver) -> None:
        waiting = step.waiting
        self._tell("delivering", f"{waiting.run_name}, round {waiting.round}, {waiting.size_bytes} bytes")
        seconds = 30.0  # the offer, which knew its lease, is gone; a lease is never shorter than a few beats
        with heartbeat(self._member.link, self._message(0.0, waiting.task), seconds):
            outcome = self._do.deliver(self._member.link, waiting, self._going, self._member.date)
        self._succeeded()
        self._status.note(f"{waiting.run_name}, round {waiting.round}: {outcome}")

    def _going(self) -> None:
        """Called between the pieces of a transfer."""
        self._around.notify("WATCHDOG=1")
        if self._ending or self._do.state.paused():
            raise Cancelled

    # -- failures --

    def _succeeded(self) -> None:
        self._backoff.succeeded()
        self._retry_at = 0.0
        self._held_until = None
        self._status.reached()

    def _failed(self, error: Exception) -> None:
        """Says when the coordinator is asked again, or that it makes no sense."""
        at_least = error.retry_after if isinstance(error, ServerRefused) else None
        if isinstance(error, ServerRefused) and error.code in FINAL:
            raise Stopped(
                f"the coordinator takes this device no more: {error.words} ({error.code})"
            ) from None
        if isinstance(error, CertificateExpired) or getattr(error, "code", "") in (
            "expired",
            "not_yet_valid",
        ):
            self._member.expired = True
        elif getattr(error, "code", "") == "wire_version":
            at_least = 600.0
        self._retry_at = self._around.now() + self._backoff.failed(at_least, at_most=self._soon())
        words = self._member.diagnosis(error) if isinstance(error, WrongClock) else str(error)
        self._tell("unreachable", f"{words}; tries again in {self._retry_at - self._around.now():.0f} s")

    def _soon(self) -> float | None:
        """The longest wait while the coordinator is expected back, None otherwise."""
        now = self._around.now()
        if self._hold and self._held_until is None:
            self._held_until = now
        near = self._held_until is not None and now - self._held_until < SOON_FOR_SECONDS
        return SOON_SECONDS if near else None

    def _tell(self, state: str, words: str, offer: TaskOffer | None = None) -> None:
        self._around.notify(f"STATUS={state}: {printable(words)}")
        self._status.write(state, words, offer)
