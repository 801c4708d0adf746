"""Invitations of devices to a round: the runtime that each would use, and until when it may fetch its task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection

from coordinator.db import participants
from coordinator.scheduling import matching
from coordinator.scheduling.deployments import Deployment
from coordinator.scheduling.matching import Candidate
from coordinator.scheduling.offers import Invitation
from edge_client.wire.device import TaskKind


def invite_eligible(
    candidates: Iterable[Candidate], deployment: Deployment, kind: TaskKind, now: datetime, lease: timedelta
) -> dict[str, Invitation]:
    """Invitations of those candidates that may get a task of this run now, by device."""
    invitations: dict[str, Invitation] = {}
    for device in candidates:
        if device.report is None or matching.blocking_reasons(device, deployment, now, kind):
            continue
        runtime = matching.runtime_for(device.report, deployment)
        if runtime is not None:
            invitations[device.id] = Invitation(runtime, _fetch_until(device, now, lease))
    return invitations


def invite(
    connection: Connection, deployment: Deployment, devices: Sequence[str], now: datetime, lease: timedelta
) -> dict[str, Invitation]:
    """Invitations of these devices. One that is no longer eligible is invited too, and declines."""
    invitations: dict[str, Invitation] = {}
    for device in devices:
        candidate = participants.candidate(connection, device)
        runtime = candidate and candidate.report and matching.runtime_for(candidate.report, deployment)
        until = _fetch_until(candidate, now, lease) if candidate else now + lease
        invitations[device] = Invitation(runtime or deployment.runtimes[0], until)
    return invitations


def _fetch_until(device: Candidate, now: datetime, lease: timedelta) -> datetime:
    """At least a lease from now; later if the device's next check-in is due later."""
    return max(now + lease, (device.expected_at or now) + matching.OVERDUE_AFTER)
