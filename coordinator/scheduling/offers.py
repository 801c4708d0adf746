"""Offers: the tasks of single devices, as rows of the tasks table.

An offer is stored once, when the round opens. A device that asks again, or asks after the coordinator has restarted,
gets the same offer. Only the remaining seconds are computed each time.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from coordinator.rounds.plan import Task
from coordinator.scheduling.deployments import Deployment
from edge_client.wire.device import BlobRef, RuntimeName, TaskKind, TaskOffer, to_json
from edge_client.wire.relays import FoldRequest
from edge_client.wire.statistics import StatisticsRequest
from edge_client.wire.strict import parse_message

DEADLINE = "deadline_at"
"""Key stored with the offer: the deadline of the task, ISO 8601."""
RELAY = "relay"
"""Key stored with the offer of a train task whose update a relay keeps: the relay."""
OUTLIVES_ROUND = "outlives_round"
"""Key stored with the offer of an asynchronous run: true."""


@dataclass(frozen=True)
class ModelBlobs:
    """A model as blobs that devices download."""

    params: BlobRef
    streams: BlobRef | None


@dataclass(frozen=True)
class Part:
    """What a round gives the devices of a narrower model class: its part of the params, and the largest result."""

    params: BlobRef
    result_limit_bytes: int


@dataclass(frozen=True)
class RoundOffer:
    """What all offers of one round have in common. `blobs`: None for statistics. `parts`: of narrower model classes, by name.

    `outlives_round`: whether they stay open when the round is over, as in an asynchronous run.
    """

    deployment: Deployment
    number: int
    blobs: ModelBlobs | None
    lease_seconds: float
    deadline_at: datetime
    result_limit_bytes: int
    outlives_round: bool = False
    parts: Mapping[str, Part] = field(default_factory=dict)


@dataclass(frozen=True)
class Invitation:
    """The runtime that a device would use, until when it may fetch its task, its model class, if the run has any, and the relay that it
    belongs to."""

    runtime: RuntimeName
    fetch_until: datetime
    model_class: str = ""
    relay: str | None = None


def train_rows(
    tasks: Sequence[Task], common: RoundOffer, invitations: Mapping[str, Invitation]
) -> list[dict[str, Any]]:
    """Rows for the tasks of a cohort. `invitations`: by device."""
    rows = []
    for task in tasks:
        invitation = invitations[task.message.client]
        message = task.message.to_json()
        row = _row("train", task.position, task.message.client, invitation, message, common)
        if common.deployment.relaying is not None:
            row["offer"][RELAY] = invitation.relay
        rows.append(row)
    return rows


def fold_row(
    relay: str, position: int, request: FoldRequest, common: RoundOffer, until: datetime
) -> dict[str, Any]:
    """The row of a relay's task to fold, which it may fetch until then."""
    invitation = Invitation(common.deployment.runtimes[0], until)
    return _row("fold", position, relay, invitation, to_json(request), common)


def evaluate_rows(
    devices: Sequence[str],
    common: RoundOffer,
    invitations: Mapping[str, Invitation],
    first: int,
    personal_rule: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Rows for evaluation tasks, from position `first` on: of the round's model, or by `personal_rule` of each device's own."""
    message = {"rule": dict(personal_rule)} if personal_rule else {}
    return [
        _row("evaluate", position, device, invitations[device], message, common)
        for position, device in enumerate(devices, first)
    ]


def statistics_rows(
    devices: Sequence[str],
    request: StatisticsRequest,
    common: RoundOffer,
    invitations: Mapping[str, Invitation],
    first: int,
) -> list[dict[str, Any]]:
    """Rows for tasks that ask for statistics, from position `first` on."""
    return [
        _row("statistics", position, device, invitations[device], to_json(request), common)
        for position, device in enumerate(devices, first)
    ]


def current_offer(stored: Mapping[str, Any], now: datetime) -> TaskOffer:
    """A stored offer with the seconds that remain at this moment."""
    left = (datetime.fromisoformat(stored[DEADLINE]) - now).total_seconds()
    return replace(parse_message(TaskOffer, stored, "offer"), deadline_seconds=max(0.0, left))


def _row(
    kind: TaskKind,
    position: int,
    device: str,
    invitation: Invitation,
    message: Mapping[str, Any],
    common: RoundOffer,
) -> dict[str, Any]:
    run = common.deployment
    runtime = invitation.runtime
    blobs = common.blobs
    for_litert = runtime == "litert" and blobs is not None
    model_class, part = invitation.model_class, common.parts.get(invitation.model_class)
    trained = run if part is None else run.require_class(model_class)
    task = str(uuid.uuid4())
    offer = TaskOffer(
        task=task,
        kind=kind,
        run=run.run,
        run_name=run.run_name,
        round=common.number,
        runtime=runtime,
        dataset=run.dataset,
        message=message,
        model=trained.model,
        params=part.params if part else blobs.params if blobs else None,
        streams=blobs.streams if blobs and kind == "train" else None,
        artifact=trained.artifact if for_litert else None,
        manifest=trained.manifest if for_litert else None,
        lease_seconds=common.lease_seconds,
        deadline_seconds=0.0,
        result_limit_bytes=part.result_limit_bytes if part else common.result_limit_bytes,
        schema=run.schema,
        model_class=model_class,
    )
    return {
        "id": task,
        "run": run.run,
        "round": common.number,
        "kind": kind,
        "position": position,
        "device": device,
        "runtime": runtime,
        "state": "waiting",
        "offer": to_json(offer)
        | {DEADLINE: common.deadline_at.isoformat()}
        | ({OUTLIVES_ROUND: True} if common.outlives_round else {}),
        "leased_until": invitation.fetch_until,
    }
