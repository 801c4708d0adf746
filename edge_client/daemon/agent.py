"""The daemon's loop: observes the current and the desired state, does the next steps, sleeps, and starts over.

    observe ─► steps.next_steps ─► Executor does them ─► a failure schedules the next try ─► sleep or be woken

A signal, a person's command or the end of the certificate's life wakes it early. During training a second thread
keeps the lease, and every half second the daemon decides whether the work must stop: the person paused it, the
coordinator no longer wants the result, conditions changed, or the daemon is to end. PendingResult and leases use a monotonic
clock; dates use the coordinator's clock once it is known, because a device's own clock may be wrong by weeks.
"""

from __future__ import annotations

import sqlite3
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from edge_client.daemon import status
from edge_client.daemon.executor import Executor
from edge_client.daemon.heartbeat import ShutdownRequested, WakeupPipe, heartbeat, long_poll
from edge_client.daemon.host_environment import HostEnvironment, read_desired
from edge_client.daemon.membership import FINAL, Membership
from edge_client.daemon.task_session import Cancellation, TaskSession
from edge_client.errors import Stopped
from edge_client.ota.releases import Releases
from edge_client.steps import (
    LONGEST_SLEEP_SECONDS,
    Current,
    Deliver,
    Desired,
    Discard,
    Fetch,
    GiveBack,
    Install,
    Renew,
    SendCheckIn,
    Sleep,
    Step,
    Work,
    next_steps,
)
from edge_client.transport.failures import (
    LONGEST_WAIT_SECONDS,
    Cancelled,
    CertificateExpired,
    RetrySchedule,
    ServerRefused,
    Unreachable,
    WrongClock,
)
from edge_client.transport.link import SILENCE_SECONDS
from edge_client.wire.device import CheckInAnswer, ReleaseOffer

_INSTALL_LEASE_SECONDS = 90.0
_DELIVERY_LEASE_SECONDS = 30.0
"""The offer, which had the lease, is gone; a lease is never shorter than a few beats."""

_HOLD_PAUSE_SECONDS = 0.02
"""Between two held check-ins: if the coordinator does not hold them, the device must not poll in a tight loop."""


class Agent:
    """One daemon. `run` works until told to end; `tick` is one iteration."""

    def __init__(self, executor: Executor, host: HostEnvironment, wakeup: WakeupPipe) -> None:
        self._executor = executor
        self._host = host
        self._wakeup = wakeup
        self._ending = False
        self._poll: Future[tuple[CheckInAnswer, float | None]] | None = None
        self._hold = False
        self._checkin_at = 0.0
        self._retry = RetrySchedule(host.now, host.rng)
        self._status = status.Writer(executor.config.state_dir, host.wall, host.notify, host.log)
        self._membership = Membership(executor.config, host, self._status.note)
        self._releases = Releases(executor.config, host.now, host.rng)
        self._task = TaskSession(executor, host, self._membership, self._status, lambda: self._ending)

    def end(self) -> None:
        """Makes `run` return soon; from a signal handler or another thread."""
        self._ending = True
        self._wakeup.set()

    @property
    def is_ending(self) -> bool:
        return self._ending

    @property
    def retry_at(self) -> float:
        """When the coordinator is tried again after a failure; 0: there was none."""
        return self._retry.at

    def run(self) -> None:
        """Works until `end`, or until a signal handler raises ShutdownRequested.

        Raises:
            Stopped: the device was revoked, or cannot go on until a person acts.
            UserError: the device was never enrolled.
        """
        try:
            with suppress(ShutdownRequested):
                self.begin()
                while not self._ending:
                    self.tick()
            self._releases.end()
            self._status.write("stopped", "ended")
        except Stopped as error:
            self._status.write("stopped", str(error))
            raise
        finally:
            self._host.notify("STOPPING=1")
            self._executor.training.close()

    def tick(self) -> None:
        """Does the next steps, up to the first that fails."""
        self._notify_watchdog()
        try:
            for step in next_steps(*self._observe()):
                if self._ending:
                    return
                self._do(step)
        except Cancelled:
            return
        except (Unreachable, ServerRefused, CertificateExpired) as error:
            self._failed(error)
        except (OSError, sqlite3.Error) as error:
            self._failed(Unreachable(f"this device's disk: {error}"))
            # Observing may have failed; the next tick would not sleep then.
            self._wakeup.wait(self._retry.at - self._host.now())

    def begin(self) -> None:
        self._membership.begin()
        for lost in self._executor.sweep():
            self._executor.ledger.record_outcome(lost, "lost on this device's disk", self._membership.date())
        self._task.restore()
        self._host.notify("READY=1")
        self._status.note(*self._releases.begin(self._notify_watchdog))
        identity = self._membership.identity
        self._status.write("starting", f"device {identity.device} of {identity.url}")

    def _observe(self) -> tuple[Current, Desired]:
        if self._poll is not None and self._poll.done():
            poll, self._poll = self._poll, None
            self._apply(*poll.result())
        self._status.note(*self._releases.maintain(self._notify_watchdog))
        current = Current(
            now=self._host.now(),
            wall=self._membership.date(),
            renew_at=self._membership.renew_at,
            certificate_expired=self._membership.expired,
            held=self._task.held,
            outbox=tuple(self._executor.outbox.pending()),
            checkin_at=self._checkin_at,
            hold=self._hold,
            retry_at=self._retry.at,
            runtimes=tuple(self._host.runtimes),
            datasets=self._host.datasets(),
            models=self._host.models,
            offers=self._releases.offers(),
        )
        return current, self._desired()

    def _desired(self) -> Desired:
        return read_desired(self._executor.config, self._executor.state, self._host)

    def _notify_watchdog(self) -> None:
        self._host.notify("WATCHDOG=1")

    def _do(self, step: Step) -> None:
        match step:
            case Renew(expired):
                self._membership.renew(
                    expired, lambda: self._status.write("renewing", "requests the next certificate")
                )
            case Deliver():
                self._deliver(step)
            case Discard(waiting):
                self._executor.outbox.drop(waiting)
                self._status.note(f"{waiting.run_name}, round {waiting.round}: discarded, opted out")
            case SendCheckIn(wait_seconds):
                self._check_in(wait_seconds)
            case Fetch(offer):
                self._task.fetch(offer)
                self._succeeded()
            case Work(offer):
                self._task.work(offer)
                # The result is delivered before the next request.
                self._checkin_at = min(self._checkin_at, self._host.now())
            case Install(release):
                self._install(release)
            case GiveBack(offer, decline):
                self._task.give_back(offer, decline)
            case Sleep(until):
                if self._wakeup.wait(until - self._host.now()):
                    self._checkin_at = self._host.now()  # a person changed something: report it at once

    def _check_in(self, wait_seconds: float) -> None:
        if wait_seconds == 0.0:
            self._apply(*self._executor.check_in(self._membership.link, self._task.checkin()))
            return
        self._status.write("holding", "waits for a task")
        if self._poll is None:
            message = self._task.checkin(wait_seconds)
            self._poll = long_poll(self._executor, self._membership.link, message, self._wakeup)
        # Woken without an answer: a person or a signal wants something. The answer is applied when it arrives.
        self._wakeup.wait(min(wait_seconds + SILENCE_SECONDS, LONGEST_SLEEP_SECONDS))

    def _apply(self, answer: CheckInAnswer, date: float | None) -> None:
        self._succeeded()
        self._membership.update_clock(date)
        self._hold = answer.hold and not self._desired().ineligible
        self._checkin_at = self._host.now() + (
            _HOLD_PAUSE_SECONDS if self._hold else min(max(1.0, answer.next_seconds), LONGEST_WAIT_SECONDS)
        )
        self._task.update(answer)
        self._status.note(*self._releases.update_offers(answer.releases))
        self._executor.forget(self._membership.date(), held=answer.hold or self._task.held is not None)
        if self._task.held is None:
            reasons = self._desired().ineligible
            message = "; ".join(reasons) if reasons else "no work now"
            message += f"; checks in again in {answer.next_seconds:.0f} s"
            self._status.write("ineligible" if reasons else "idle", message)

    def _install(self, offer: ReleaseOffer) -> None:
        """Checks in meanwhile, so that the coordinator knows where this device is and gives it no task."""
        activity = f"installs {offer.model}:{offer.version}"
        self._status.write("installing", activity)
        message = self._task.checkin()
        busy = replace(message, ineligible=(*message.ineligible, activity))
        stop_reason = Cancellation(self._host, self._task.stop_reason)

        def check_cancelled() -> None:
            if stop_reason() is not None:
                raise Cancelled

        link, device = self._membership.link, self._membership.identity.device
        with heartbeat(link, busy, _INSTALL_LEASE_SECONDS):
            result = self._releases.install(device, link, offer, check_cancelled)
        self._succeeded()
        self._status.note(result)
        self._status.write("idle", result)
        self._checkin_at = self._host.now()  # report the result at once

    def _deliver(self, step: Deliver) -> None:
        waiting = step.waiting
        self._status.write(
            "delivering", f"{waiting.run_name}, round {waiting.round}, {waiting.size_bytes} bytes"
        )
        message = self._task.checkin(working_on=waiting.task)
        with heartbeat(self._membership.link, message, _DELIVERY_LEASE_SECONDS):
            outcome = self._executor.deliver(
                self._membership.link, waiting, self._task.check_cancelled, self._membership.date
            )
        self._succeeded()
        self._status.note(f"{waiting.run_name}, round {waiting.round}: {outcome}")

    def _succeeded(self) -> None:
        self._retry.succeeded()
        self._status.reached()

    def _failed(self, error: Exception) -> None:
        """Schedules the next try. Raises Stopped if there is no point in one."""
        at_least = error.retry_after if isinstance(error, ServerRefused) else None
        code = getattr(error, "code", "")
        if isinstance(error, ServerRefused) and code in FINAL:
            raise Stopped(
                f"the coordinator no longer accepts this device: {error.message} ({code})"
            ) from None
        if isinstance(error, CertificateExpired) or code in ("expired", "not_yet_valid"):
            self._membership.expired = True
        elif code == "wire_version":
            at_least = 600.0
        self._retry.failed(at_least, expected_back=self._hold)
        message = self._membership.diagnosis(error) if isinstance(error, WrongClock) else str(error)
        self._status.write(
            "unreachable", f"{message}; tries again in {self._retry.at - self._host.now():.0f} s"
        )
