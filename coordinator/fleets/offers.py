"""Offers: what the coordinator asks of one device, as rows of the tasks table.

The offer is written down once, when the round opens, so that a device that asks again, or asks after a restart
of the coordinator, is told the same. Only the seconds that are left are counted anew each time.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from coordinator.fleets.deployments import Deployment
from coordinator.rounds.plan import Task
from edge_client.wire.device import BlobRef, RuntimeName, TaskKind, TaskOffer, to_json
from edge_client.wire.strict import parse_message

DEADLINE = "deadline_at"
"""Stored beside the offer: the end of the whole task, ISO 8601."""


@dataclass(frozen=True)
class Sent:
    """A model as devices fetch it."""

    params: BlobRef
    streams: BlobRef | None


@dataclass(frozen=True)
class Round:
    """What all tasks of one round have in common."""

    deployment: Deployment
    number: int
    sent: Sent
    lease_seconds: float
    deadline_at: datetime
    result_limit_bytes: int


@dataclass(frozen=True)
class Asked:
    """How a device is asked: the runtime it would use, and until when it may come for its task."""

    runtime: RuntimeName
    fetch_until: datetime


def train_rows(tasks: Sequence[Task], common: Round, asked: Mapping[str, Asked]) -> list[dict[str, Any]]:
    """Rows for the tasks of a cohort. `asked`: by device."""
    return [
        _row(
            "train",
            task.position,
            task.message.client,
            asked[task.message.client],
            task.message.to_json(),
            common,
        )
        for task in tasks
    ]


def evaluate_rows(
    devices: Sequence[str], common: Round, asked: Mapping[str, Asked], first: int
) -> list[dict[str, Any]]:
    """Rows that ask these devices to evaluate the round's model, from position `first` on."""
    return [
        _row("evaluate", position, device, asked[device], {}, common)
        for position, device in enumerate(devices, first)
    ]


def offer_now(stored: Mapping[str, Any], now: datetime) -> TaskOffer:
    """A stored offer as it is handed out at this moment."""
    left = (datetime.fromisoformat(stored[DEADLINE]) - now).total_seconds()
    return replace(parse_message(TaskOffer, stored, "offer"), deadline_seconds=max(0.0, left))


def _row(
    kind: TaskKind,
    position: int,
    device: str,
    asked: Asked,
    message: Mapping[str, Any],
    common: Round,
) -> dict[str, Any]:
    run = common.deployment
    runtime = asked.runtime
    for_litert = runtime == "litert"
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
        model=run.model,
        params=common.sent.params,
        streams=common.sent.streams if kind == "train" else None,
        artifact=run.artifact if for_litert else None,
        manifest=run.manifest if for_litert else None,
        lease_seconds=common.lease_seconds,
        deadline_seconds=0.0,
        result_limit_bytes=common.result_limit_bytes,
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
        "offer": to_json(offer) | {DEADLINE: common.deadline_at.isoformat()},
        "leased_until": asked.fetch_until,
    }
