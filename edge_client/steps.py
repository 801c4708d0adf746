"""What the daemon does next, decided from what is and what is wanted, and from nothing else.

    not enrolled            stop and say so
    certificate runs out    renew
    finished results        deliver them
    a task in hand          is it still ours? may we? then fetch its files, work; else give it back
    a model to run          install it, once no task is in hand
    nothing in hand         check in when it is time, holding the line where the coordinator asked for it
    all done                sleep until the next of these

`next_steps` is pure. `edge_client.execute` does each step; `edge_client.agent` goes round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from edge_client.outbox import Waiting
from edge_client.wire.device import Decline, ReleaseOffer, TaskOffer

HELD_SECONDS = 45.0
"""How long a check-in may be kept waiting; shorter than what balancers and proxies cut off."""

LONGEST_SLEEP_SECONDS = 60.0
"""Then everything is looked at again: conditions change without telling."""

HeldState = Literal["unconfirmed", "confirmed", "fetched"]


@dataclass(frozen=True)
class Held:
    """The task in hand. Unconfirmed: this process has not heard yet that it is still ours.

    `refusal`: it was tried and cannot be done.
    """

    offer: TaskOffer
    state: HeldState = "unconfirmed"
    refusal: Decline | None = None


@dataclass(frozen=True)
class Offered:
    """A release to run. `not_before`: after a failure, when it may be tried again (`now`)."""

    offer: ReleaseOffer
    not_before: float = 0.0


@dataclass(frozen=True)
class Current:
    """What is. `now` counts seconds on a clock that never jumps, `wall` seconds since 1970 by the best clock there is.

    Attributes:
        renew_at: when the certificate is to be renewed (`wall`); None: this device is not enrolled.
        certificate_expired: the coordinator takes it no more.
        held: the task in hand.
        outbox: results that wait.
        checkin_at: when to check in (`now`).
        hold: the coordinator asked to be asked again at once.
        retry_at: after a failure, when the coordinator may be asked again (`now`).
        runtimes: that work here. datasets, models: as in a check-in.
        offers: releases that this device is told to run, and does not.
    """

    now: float
    wall: float
    renew_at: float | None
    certificate_expired: bool = False
    held: Held | None = None
    outbox: tuple[Waiting, ...] = ()
    checkin_at: float = 0.0
    hold: bool = False
    retry_at: float = 0.0
    runtimes: tuple[str, ...] = ()
    datasets: Mapping[str, int] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    offers: tuple[Offered, ...] = ()


@dataclass(frozen=True)
class Desired:
    """What is wanted. `ineligible`: why nothing may run now, in words; `opted_out`: runs, by id or name."""

    paused: bool = False
    ineligible: tuple[str, ...] = ()
    opted_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Halt:
    words: str


@dataclass(frozen=True)
class Renew:
    expired: bool


@dataclass(frozen=True)
class Deliver:
    waiting: Waiting


@dataclass(frozen=True)
class Discard:
    """The person opted out of its run after it was made: it never leaves."""

    waiting: Waiting


@dataclass(frozen=True)
class AskIn:
    """Check in, ready to wait so long for a task."""

    wait_seconds: float = 0.0


@dataclass(frozen=True)
class Fetch:
    offer: TaskOffer


@dataclass(frozen=True)
class Work:
    """Train or evaluate, and put the result into the outbox."""

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
    """Until `until` (`now`), or until something wakes the daemon."""

    until: float


Step = Halt | Renew | Deliver | Discard | AskIn | Fetch | Work | GiveBack | Install | Sleep


def next_steps(current: Current, desired: Desired) -> list[Step]:
    """Steps in order; each supposes that those before it went well. Never empty."""
    if current.renew_at is None:
        return [Halt("this device is not enrolled; run `fedloop-edge enroll URL TOKEN`")]
    ready = _work(current, desired)
    if current.now < current.retry_at:
        # Without the coordinator only the work in hand can go on.
        return ready if ready and isinstance(ready[0], Work) else [_sleep(current)]
    steps: list[Step] = []
    if current.certificate_expired or current.wall >= current.renew_at:
        steps.append(Renew(current.certificate_expired))
    if not desired.paused:
        steps += [_send(waiting, desired) for waiting in current.outbox]
    steps += ready
    steps = steps or _due(current, desired)
    if steps:
        return steps
    if current.held is not None or current.now >= current.checkin_at:
        return [AskIn(_patience(current, desired))]
    return [_sleep(current)]


def may_not(offer: TaskOffer, current: Current, desired: Desired) -> Decline | None:
    """Why this task cannot be done here, or None."""
    if is_out(offer, desired.opted_out):
        return Decline("opted_out", "this device takes no part in this run")
    if desired.ineligible:
        return Decline("ineligible", "; ".join(desired.ineligible))
    if offer.dataset not in current.datasets:
        known = ", ".join(sorted(current.datasets)) or "none"
        return Decline("no_data", f"no data set {offer.dataset!r} that can be read here; there are: {known}")
    if offer.runtime not in current.runtimes:
        return Decline(
            "wrong_runtime", f"{offer.runtime} does not run here; {', '.join(current.runtimes)} do"
        )
    if offer.runtime == "litert" and (offer.artifact is None or offer.manifest is None):
        return Decline("bad_artifact", "a litert task came without artifact or manifest")
    if offer.runtime != "litert" and offer.model.name not in current.models:
        return Decline("no_model", f"the model {offer.model.name!r} is not installed here")
    return None


def is_out(work: TaskOffer | Waiting, opted_out: tuple[str, ...]) -> bool:
    """Whether the person wants no part in this run."""
    return work.run in opted_out or work.run_name in opted_out


def _send(waiting: Waiting, desired: Desired) -> Step:
    return Discard(waiting) if is_out(waiting, desired.opted_out) else Deliver(waiting)


def _work(current: Current, desired: Desired) -> list[Step]:
    if current.held is None:
        return []
    reason = current.held.refusal or may_not(current.held.offer, current, desired)
    if reason is not None:
        return [GiveBack(current.held.offer, reason)]
    if current.held.state == "unconfirmed":
        return []
    if current.held.state == "confirmed":
        return [Fetch(current.held.offer), Work(current.held.offer)]
    return [Work(current.held.offer)]


def _due(current: Current, desired: Desired) -> list[Step]:
    """One release at a time: the answer to the next check-in may change the others."""
    if current.held is not None or desired.ineligible:
        return []
    due = [each.offer for each in current.offers if current.now >= each.not_before]
    return [Install(due[0])] if due else []


def _patience(current: Current, desired: Desired) -> float:
    """Only who may work at once waits for work."""
    if not current.hold or current.held is not None or desired.ineligible:
        return 0.0
    return HELD_SECONDS


def _sleep(current: Current) -> Sleep:
    due = current.retry_at if current.now < current.retry_at else current.checkin_at
    return Sleep(min(max(due, current.now + 0.05), current.now + LONGEST_SLEEP_SECONDS))
