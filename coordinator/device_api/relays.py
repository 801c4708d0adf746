"""What relays need besides the device API: a certificate for their devices, what an update must contain, and to say what became of it.

A relay answers an upload of its device only after its words about it are stored here: so what a device hears is what counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection

from coordinator import certificates
from coordinator.accounts import relays
from coordinator.context.services import ServicesDep
from coordinator.db import answers, rounds
from coordinator.db.answers import AcceptedUpdate
from coordinator.db.rounds import TaskRow
from coordinator.device_api.identity import RelayDep, RelayedDep
from coordinator.device_api.tasks import own_task, record, require_open
from coordinator.errors import Refusal
from coordinator.limits.request_bodies import read_message
from coordinator.model_references import is_sha256
from coordinator.rounds import folded, intake
from coordinator.scheduling import offers
from edge_client.relay.expected import Expected
from edge_client.relay.intake import check_claims
from edge_client.wire.arrays import ResultHeader
from edge_client.wire.device import TaskMessage, to_json
from edge_client.wire.relays import Certificate, CertificateRequest, Figures, Refused, RelayedTask

router = APIRouter(prefix="/relay")


@router.post("/certificate")
async def certificate(request: Request, relay: RelayDep, services: ServicesDep) -> Mapping[str, Any]:
    """A certificate for the names that the relay's token was made for."""
    message = await read_message(CertificateRequest, request)
    signed = await run_in_threadpool(
        relays.issue_certificate, services.authority, relay, message.csr, services.clock()
    )
    return to_json(Certificate(certificates.pem_of(signed)))


@router.get("/tasks/{task}")
def describe_task(task: str, device: RelayedDep, services: ServicesDep) -> Mapping[str, Any]:
    """The device's task, and what its update must contain."""

    def read(connection: Connection) -> RelayedTask:
        row = own_task(connection, device, task, "train")
        expected = _expected(connection, row)
        kept = row.offer.get(offers.RELAY) is not None
        return RelayedTask(offers.current_offer(row.offer, services.clock()), kept, asdict(expected))

    return to_json(services.database.read(read))


@router.post("/tasks/{task}/accepted")
async def accepted(
    task: str, request: Request, device: RelayedDep, services: ServicesDep
) -> Mapping[str, Any]:
    """Counts an update that the relay has on its disk. Idempotent.

    409 `duplicate`: another update of this task was counted; as for an upload if the round or the task is over; 422 with the reason if
    the figures are wrong.
    """
    figures = await read_message(Figures, request)
    if not (is_sha256(figures.sha256) and is_sha256(figures.sent_sha256)):
        raise Refusal(422, "malformed", "Figures: sha256 is not a SHA-256 in lower-case hex")

    def work(connection: Connection) -> str | None:
        row = _kept_task(connection, device, task)
        if row.state == "accepted":
            before = answers.find_update(connection, row)
            if before is None or before.sent_sha256 != figures.sent_sha256:
                raise Refusal(409, "duplicate", f"another result of round {row.round} was already accepted")
            return None
        now = services.clock()
        require_open(row, now)
        _require_valid(figures, row, _expected(connection, row))
        update = AcceptedUpdate(figures.sha256, figures.sent_sha256, figures.sent_bytes, to_json(figures))
        answers.accept(connection, row, update, now)
        return row.run

    return await record(services, work)


@router.post("/tasks/{task}/rejected")
async def rejected(
    task: str, request: Request, device: RelayedDep, services: ServicesDep
) -> Mapping[str, Any]:
    """Records why the relay has rejected an update, for good. Idempotent; no effect on a task that is over."""
    message = await read_message(Refused, request)
    try:
        reason = intake.parse_reason(message.reason)
    except ValueError as error:
        raise Refusal(422, "malformed", f"Refused.reason: {error}"[:300]) from None

    def work(connection: Connection) -> str | None:
        row = _kept_task(connection, device, task)
        if row.state != "leased":
            return None
        answers.reject(connection, row, reason, message.words, services.clock())
        return row.run

    return await record(services, work)


def _kept_task(connection: Connection, device: str, task: str) -> TaskRow:
    row = own_task(connection, device, task, "train")
    if row.offer.get(offers.RELAY) is None:
        raise Refusal(409, "wrong_kind", "updates of this run go to the coordinator; forward them")
    return row


def _expected(connection: Connection, row: TaskRow) -> Expected:
    opened = rounds.find_round(connection, row.run, row.round)
    assert opened is not None  # train tasks are written together with their round
    return opened.expected


def _require_valid(figures: Figures, row: TaskRow, expected: Expected) -> None:
    """The figures obey what an update that comes here has to obey."""
    message = TaskMessage.from_json(row.offer["message"])
    claims = ResultHeader(
        message.round,
        message.client,
        message.base,
        figures.num_examples,
        figures.num_steps,
        figures.train_loss,
    )
    if problem := check_claims(claims, message, expected):
        raise Refusal(422, *problem)
    wanted = folded.streams_of(expected)
    if figures.streams.keys() != wanted or min(figures.streams.values(), default=0.0) < 0:
        raise Refusal(
            422, "malformed", f"Figures.streams: expected norms of {', '.join(sorted(wanted)) or 'none'}"
        )
