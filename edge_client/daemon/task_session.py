"""The task in hand: taken from a check-in's answer, fetched, done, interrupted or given back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from edge_client.daemon.executor import Executor
from edge_client.daemon.heartbeat import heartbeat
from edge_client.daemon.host_environment import HostEnvironment, checkin_message, read_desired
from edge_client.daemon.masked_work import MaskedWork, has_left_its_group
from edge_client.daemon.membership import Membership
from edge_client.daemon.status import Writer
from edge_client.steps import HeldTask, is_masked, is_opted_out
from edge_client.train.process import POLL_SECONDS, Interrupted, TrainingFailed
from edge_client.transport.failures import Cancelled, ServerRefused, Unreachable
from edge_client.wire.device import CheckIn, CheckInAnswer, Decline, TaskKind, TaskOffer

CONDITIONS_SECONDS = 5.0
"""How often conditions are read again during the work."""

_VERBS: Mapping[TaskKind, str] = {
    "train": "training",
    "evaluate": "evaluating",
    "statistics": "taking statistics",
}

Cause = Literal["ending", "paused", "unwanted", "ineligible", "opted_out", "deadline"]


class Cancellation:
    """Called by the training process; returns the reason to stop, or None. `cause`: the reason's kind."""

    def __init__(
        self, host: HostEnvironment, stop_reason: Callable[[bool], tuple[Cause, str] | None]
    ) -> None:
        """`stop_reason`: why the work must stop now, or None; reads conditions only if called with True."""
        self._host = host
        self._stop_reason = stop_reason
        self._read_conditions_at = host.now() + CONDITIONS_SECONDS
        self.cause: Cause | None = None

    def __call__(self) -> str | None:
        self._host.notify("WATCHDOG=1")
        read_conditions = self._host.now() >= self._read_conditions_at
        if read_conditions:
            self._read_conditions_at = self._host.now() + CONDITIONS_SECONDS
        reason = self._stop_reason(read_conditions)
        if reason is None:
            return None
        self.cause, message = reason
        return message


class TaskSession:
    """`held`: the task in hand, if any. `is_ending`: whether the daemon is to end."""

    def __init__(
        self,
        executor: Executor,
        host: HostEnvironment,
        membership: Membership,
        status: Writer,
        is_ending: Callable[[], bool],
    ) -> None:
        self._executor = executor
        self._host = host
        self._membership = membership
        self._status = status
        self._is_ending = is_ending
        self._ends_at = float("inf")
        self.held: HeldTask | None = None

    def restore(self) -> None:
        """Takes up the task of the process before."""
        offer = self._executor.state.task()
        self.held = HeldTask(offer) if offer is not None else None
        if offer is not None and has_left_its_group(self._executor, offer):
            words = "it was restarted, and its secrets for secure aggregation are gone"
            self.held = HeldTask(offer, refusal=Decline("failed", words))

    def update(self, answer: CheckInAnswer) -> None:
        """Drops, confirms or takes a task, as the coordinator answered."""
        if answer.stop and self.held is not None:
            self._executor.give_back(None, self.held.offer, None)
            self._clear()
        elif self.held is not None and self.held.state == "unconfirmed":
            self.held = replace(self.held, state="confirmed")
        if answer.task is not None and self.held is None:
            self._executor.take(answer.task, self._membership.date())
            self.held = HeldTask(answer.task, "confirmed")
            self._ends_at = self._host.now() + answer.task.deadline_seconds

    def checkin(self, wait_seconds: float = 0.0, working_on: str | None = None) -> CheckIn:
        """The check-in to send now."""
        held = self.held.offer.task if self.held is not None else None
        message = checkin_message(self._executor.config, self._executor.state, self._host)
        return replace(message, working_on=working_on or held, wait_seconds=wait_seconds)

    def fetch(self, offer: TaskOffer) -> None:
        """Raises Cancelled if the task must be given back or work must stop."""
        self._status.write("fetching", f"{offer.run_name}, round {offer.round}", offer)
        try:
            with heartbeat(self._membership.link, self.checkin(), offer.lease_seconds):
                self._executor.fetch(self._membership.link, offer, self.check_cancelled)
        except ServerRefused as refused:
            if refused.code not in ("not_found", "not_yours"):
                raise
            self._refuse(offer, Decline("failed", f"its files are gone: {refused.message}"))
            raise Cancelled from None
        except TrainingFailed as failure:
            self._refuse(offer, failure.decline)
            raise Cancelled from None
        except Unreachable:
            self.held = HeldTask(offer)  # by the next time it may have been given to another device
            raise
        self.held = HeldTask(offer, "fetched")

    def work(self, offer: TaskOffer) -> None:
        """Does the task and stores its result. Raises Cancelled as `fetch`."""
        self._status.write(
            _VERBS[offer.kind],
            f"{offer.run_name}, round {offer.round}, {offer.runtime}"
            + (f", model class {offer.model_class}" if offer.model_class else ""),
            offer,
        )
        with heartbeat(self._membership.link, self.checkin(), offer.lease_seconds) as unwanted:
            counted = threading.Event()
            # Once its masked update counts, the task is over for the coordinator, and the other stages are not.
            cancellation = Cancellation(
                self._host,
                lambda conditions: self.stop_reason(conditions, unwanted.is_set() and not counted.is_set()),
            )
            try:
                if is_masked(offer):
                    self._work_masked(offer, cancellation, counted)
                    dropped = []
                else:
                    dropped = self._executor.work(offer, cancellation, self._membership.date)
            except Interrupted as interrupted:
                self._interrupted(offer, cancellation.cause, str(interrupted))
                raise Cancelled from None
            except TrainingFailed as failure:
                self._refuse(offer, failure.decline, failure.message)
                raise Cancelled from None
            except OSError as error:
                self._refuse(
                    offer, Decline("limits", f"the result cannot be stored: {error.strerror or error}")
                )
                raise Cancelled from None
        for each in dropped:
            self._status.note(
                f"the outbox was full: the result of {each.run_name}, round {each.round} was dropped"
            )
        self._clear()

    def _work_masked(self, offer: TaskOffer, cancellation: Cancellation, counted: threading.Event) -> None:
        """Raises Interrupted and TrainingFailed as `Executor.work`."""

        def pause(seconds: float) -> None:
            until = self._host.now() + seconds
            while (reason := cancellation()) is None:
                if (left := until - self._host.now()) <= 0:
                    return
                time.sleep(min(left, POLL_SECONDS))
            raise Interrupted(reason)

        def on_counted() -> None:
            counted.set()
            self._status.write("aggregating", f"{offer.run_name}, round {offer.round}, with its group", offer)

        membership = self._membership
        MaskedWork(
            self._executor, membership.link, membership.identity, pause, on_counted, membership.date
        ).do(offer, cancellation)

    def give_back(self, offer: TaskOffer, decline: Decline) -> None:
        self._status.write("declining", f"{offer.run_name}, round {offer.round}: {decline.words}")
        self._executor.give_back(self._membership.link, offer, decline)
        self._clear()

    def stop_reason(self, conditions: bool, unwanted: bool = False) -> tuple[Cause, str] | None:
        """Why running work must stop now, or None; reads conditions only if asked to."""
        if self._is_ending():
            return "ending", "the daemon ends"
        if unwanted:
            return "unwanted", "the coordinator no longer wants the result"
        if self._host.now() > self._ends_at:
            return "deadline", "the round's deadline is over"
        if self._executor.state.paused():
            return "paused", "paused by hand"
        if not conditions:
            return None
        opted_out = read_desired(self._executor.config, self._executor.state, self._host).opted_out
        if self.held is not None and is_opted_out(self.held.offer, opted_out):
            return "opted_out", "this device no longer takes part in this run"
        reasons = self._host.ineligible()
        return ("ineligible", "; ".join(reasons)) if reasons else None

    def check_cancelled(self) -> None:
        """Called between the pieces of a transfer. Raises Cancelled if the daemon ends or is paused."""
        self._host.notify("WATCHDOG=1")
        if self._is_ending() or self._executor.state.paused():
            raise Cancelled

    def _interrupted(self, offer: TaskOffer, cause: Cause | None, message: str) -> None:
        if cause == "unwanted":
            self._executor.give_back(None, offer, None)
            self._clear()
        elif cause == "deadline":
            self._refuse(offer, Decline("limits", message))
        elif cause == "opted_out":
            self._refuse(offer, Decline("opted_out", message))
        elif cause != "ending":
            self._refuse(offer, Decline("ineligible", message))
        # When the daemon ends it keeps the task: after a quick restart the coordinator says whether it is still ours.

    def _refuse(self, offer: TaskOffer, decline: Decline, message: str | None = None) -> None:
        """`message`: for this device's owner, if it says more than the coordinator may know."""
        self._status.note(f"{offer.run_name}, round {offer.round} not done: {message or decline.words}")
        state = self.held.state if self.held is not None else "unconfirmed"
        self.held = HeldTask(offer, state, decline)

    def _clear(self) -> None:
        self.held = None
        self._ends_at = float("inf")
