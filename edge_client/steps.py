"""Decides the daemon's next steps from the current and the desired state alone.

    certificate runs out    renew
    finished results        deliver them
    a task in hand          if it is still ours and allowed, fetch its files and work; else give it back
    a model to run          install it, once no task is in hand
    nothing in hand         check in when due; wait in the request if the coordinator asked for that
    all done                sleep until the next of these

`next_steps` is pure. `edge_client.daemon.executor` does each step; `edge_client.daemon.agent` is the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from edge_client.wire.device import Decline, ReleaseOffer, TaskOffer

if TYPE_CHECKING:
    from edge_client.outbox import PendingResult

HELD_SECONDS = 45.0
"""How long the coordinator may hold a check-in; shorter than the timeouts of load balancers and proxies."""

LONGEST_SLEEP_SECONDS = 60.0
"""Conditions change without notice, so everything is observed again after this."""

HeldState = Literal["unconfirmed", "confirmed", "fetched"]


@dataclass(frozen=True)
class HeldTask:
    """The task in hand. Unconfirmed: the coordinator has not told this process yet that it is still ours.

    `refusal`: it was tried and cannot be done.
    """

    offer: TaskOffer
    state: HeldState = "unconfirmed"
    refusal: Decline | None = None


@dataclass(frozen=True)
class PendingRelease:
    """A release to run. `not_before`: after a failure, when it may be tried again (`now`)."""

    offer: ReleaseOffer
    not_before: float = 0.0


@dataclass(frozen=True)
class Current:
    """The current state. `now`: monotonic seconds; `wall`: seconds since 1970 by the best clock available.

    Attributes:
        renew_at: when to renew the certificate (`wall`).
        certificate_expired: the coordinator no longer accepts it.
        held: the task in hand.
        outbox: results to deliver.
        checkin_at: when to check in (`now`).
        hold: the coordinator asked for the next check-in at once.
        retry_at: after a failure, when to try the coordinator again (`now`).
        runtimes: those that work here. datasets, models: as in a check-in.
        offers: releases that this device was told to run and does not run.
    """

    now: float
    wall: float
    renew_at: float
    certificate_expired: bool = False
    held: HeldTask | None = None
    outbox: tuple[PendingResult, ...] = ()
    checkin_at: float = 0.0
    hold: bool = False
    retry_at: float = 0.0
    runtimes: tuple[str, ...] = ()
    datasets: Mapping[str, int] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    offers: tuple[PendingRelease, ...] = ()


@dataclass(frozen=True)
class Desired:
    """The desired state. `ineligible`: reasons why nothing may run now; `opted_out`: runs, by id or name.

    `reports_statistics`: whether the owner lets the device report statistics of its data. `masks_updates`: whether updates leave only masked.
    `requires_noise`: whether updates leave only with noise that this device adds.
    """

    paused: bool = False
    ineligible: tuple[str, ...] = ()
    opted_out: tuple[str, ...] = ()
    reports_statistics: bool = True
    masks_updates: bool = False
    requires_noise: bool = False


@dataclass(frozen=True)
class Renew:
    expired: bool


@dataclass(frozen=True)
class Deliver:
    waiting: PendingResult


@dataclass(frozen=True)
class Discard:
    """The owner opted out of its run after the result was made: it never leaves the device."""

    waiting: PendingResult


@dataclass(frozen=True)
class SendCheckIn:
    """Check in, willing to wait so long for a task."""

    wait_seconds: float = 0.0


@dataclass(frozen=True)
class Fetch:
    offer: TaskOffer


@dataclass(frozen=True)
class Work:
    """Train, evaluate or take statistics, and put the result into the outbox."""

    offer: TaskOffer


@dataclass(frozen=True)
class GiveBack:
    offer: TaskOffer
    decline: Decline


@dataclass(frozen=True)
class Install:
    """Fetch, test and switch to a release, or back to one."""

    offer: ReleaseOffer


@dataclass(frozen=True)
class Sleep:
    """Sleep until `until` (`now`), or until something wakes the daemon."""

    until: float


Step = Renew | Deliver | Discard | SendCheckIn | Fetch | Work | GiveBack | Install | Sleep


def next_steps(current: Current, desired: Desired) -> list[Step]:
    """Steps in order; each assumes that those before it succeeded. Never empty."""
    ready = _work(current, desired)
    if current.now < current.retry_at:
        # Without the coordinator only the task in hand can go on.
        return ready if ready and isinstance(ready[0], Work) else [_sleep(current)]
    steps: list[Step] = []
    if current.certificate_expired or current.wall >= current.renew_at:
        steps.append(Renew(current.certificate_expired))
    if not desired.paused:
        steps += [_send(waiting, desired) for waiting in current.outbox]
    steps += ready
    steps = steps or _due_installs(current, desired)
    if steps:
        return steps
    if current.held is not None or current.now >= current.checkin_at:
        return [SendCheckIn(_hold_seconds(current, desired))]
    return [_sleep(current)]


def blocking_reason(offer: TaskOffer, current: Current, desired: Desired) -> Decline | None:
    """Why this task cannot be done here, or None."""
    if is_opted_out(offer, desired.opted_out):
        return Decline("opted_out", "this device takes no part in this run")
    if offer.kind == "statistics" and not desired.reports_statistics:
        return Decline("opted_out", "the owner of this device does not let it report statistics")
    if desired.masks_updates and offer.kind == "train" and not is_masked(offer):
        return Decline(
            "opted_out", "the owner of this device lets updates leave it only in secure aggregation"
        )
    if desired.requires_noise and offer.kind == "train" and not is_noised(offer):
        return Decline(
            "opted_out", "the owner of this device lets updates leave it only with noise of its own"
        )
    if desired.ineligible:
        return Decline("ineligible", "; ".join(desired.ineligible))
    if offer.dataset not in current.datasets:
        known = ", ".join(sorted(current.datasets)) or "none"
        return Decline("no_data", f"no data set {offer.dataset!r} that can be read here; there are: {known}")
    if offer.kind == "statistics":
        return None
    if offer.runtime not in current.runtimes:
        return Decline(
            "wrong_runtime", f"{offer.runtime} does not run here; {', '.join(current.runtimes)} do"
        )
    if offer.runtime == "litert" and (offer.artifact is None or offer.manifest is None):
        return Decline("bad_artifact", "a litert task came without artifact or manifest")
    if offer.runtime != "litert" and offer.model.name not in current.models:
        return Decline("no_model", f"the model {offer.model.name!r} is not installed here")
    return None


def is_opted_out(work: TaskOffer | PendingResult, opted_out: tuple[str, ...]) -> bool:
    """Whether the owner opted out of this run."""
    return work.run in opted_out or work.run_name in opted_out


def is_masked(offer: TaskOffer) -> bool:
    """Whether the update of a task takes part in secure aggregation."""
    return offer.kind == "train" and offer.message.get("secure") is not None


def is_noised(offer: TaskOffer) -> bool:
    """Whether a task asks this device to add noise: to its update, to its rows' gradients, or inside secure aggregation."""
    secure = offer.message.get("secure")
    shares = isinstance(secure, Mapping) and secure.get("noise") is not None
    return offer.kind == "train" and (offer.message.get("noise") is not None or shares)


def _send(waiting: PendingResult, desired: Desired) -> Step:
    return Discard(waiting) if is_opted_out(waiting, desired.opted_out) else Deliver(waiting)


def _work(current: Current, desired: Desired) -> list[Step]:
    if current.held is None:
        return []
    reason = current.held.refusal or blocking_reason(current.held.offer, current, desired)
    if reason is not None:
        return [GiveBack(current.held.offer, reason)]
    if current.held.state == "unconfirmed":
        return []
    if current.held.state == "confirmed":
        return [Fetch(current.held.offer), Work(current.held.offer)]
    return [Work(current.held.offer)]


def _due_installs(current: Current, desired: Desired) -> list[Step]:
    """One release at a time: the answer to the next check-in may change the others."""
    if current.held is not None or desired.ineligible:
        return []
    due = [each.offer for each in current.offers if current.now >= each.not_before]
    return [Install(due[0])] if due else []


def _hold_seconds(current: Current, desired: Desired) -> float:
    """How long to wait in a check-in: only a device that may work at once waits for work."""
    if not current.hold or current.held is not None or desired.ineligible:
        return 0.0
    return HELD_SECONDS


def _sleep(current: Current) -> Sleep:
    due = current.retry_at if current.now < current.retry_at else current.checkin_at
    return Sleep(min(max(due, current.now + 0.05), current.now + LONGEST_SLEEP_SECONDS))
