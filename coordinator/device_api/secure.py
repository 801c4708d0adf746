"""Secure aggregation: the device's messages of the stages, each answered once its group is through with the stage (`edge_client.wire.secure`).

This stores messages and hands out the answers. The thread of the run plays the server of each group (`fleets.secure.device`), which checks them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cryptography import x509
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection

from coordinator.context.services import Services, ServicesDep
from coordinator.db import rounds, secure
from coordinator.db.rounds import TaskRow
from coordinator.db.secure import GroupRow, Message
from coordinator.device_api.identity import CallerDep
from coordinator.device_api.tasks import own_task, require_open
from coordinator.errors import Refusal
from coordinator.limits.request_bodies import read_message
from edge_client.wire.device import TaskMessage, to_json
from edge_client.wire.secure import STAGES, SecureMessage, SecureReply, SecureTask
from strategies.secagg.messages import members_shown

router = APIRouter()


@dataclass(frozen=True)
class _Sent:
    """A message of the stage with this index. `certificate`: checked."""

    stage: int
    message: Message

    @property
    def kind(self) -> int:
        return 2 * self.stage


@router.post("/tasks/{task}/secure")
async def take_part(
    task: str, request: Request, caller: CallerDep, services: ServicesDep
) -> Mapping[str, Any]:
    """Idempotent. The answer is held for `wait_seconds` until the stage is over.

    409 `secure_ended`: the group has no sum; `secure_refused`: the coordinator has refused a message of this device, or the group went on without
    it; `secure_stage`: another stage is next; `duplicate`: another message of this stage is there.
    """
    message = await read_message(SecureMessage, request)
    sent = _parse(services, caller, message)
    topic = f"device:{caller}"
    seen, now = services.signals.seen(topic), services.clock()
    if await run_in_threadpool(services.database.read, lambda at: _is_new(at, caller, task, sent)):
        until = now + timedelta(seconds=services.settings.lease_seconds)
        run = await services.write(lambda at: _store(at, caller, task, sent, now, until))
        services.signals.notify(f"run:{run}")
    reply = await _reply(services, caller, task, sent)
    if reply.message is None and message.wait_seconds > 0:
        with services.pacing.poll_slot(services.settings.held, caller) as held:
            if held:
                await services.signals.wait_async(topic, seen, message.wait_seconds)
            else:
                await asyncio.sleep(min(1.0, message.wait_seconds))
        reply = await _reply(services, caller, task, sent)
    return to_json(reply)


def _parse(services: Services, caller: str, message: SecureMessage) -> _Sent:
    try:
        body = base64.b64decode(message.message, validate=True)
    except binascii.Error as error:
        raise Refusal(422, "malformed", f"SecureMessage.message is not base64: {error}") from None
    stage = STAGES.index(message.stage)
    if message.stage != "keys":
        return _Sent(stage, Message(body, None))
    try:
        certificate = x509.load_pem_x509_certificate(message.certificate.encode())
    except ValueError:
        raise Refusal(
            422, "malformed", "SecureMessage.certificate is needed with the keys: the device's own, in PEM"
        ) from None
    if services.authority.verify(certificate, services.clock()) != caller:
        raise Refusal(403, "foreign_identity", "the certificate with the keys is another device's")
    return _Sent(stage, Message(body, message.certificate))


def _is_new(connection: Connection, caller: str, task: str, sent: _Sent) -> bool:
    """Whether the message has to be stored."""
    if STAGES[sent.stage] == "input":
        return False
    own_task(connection, caller, task, "train")
    return secure.find(connection, task, sent.kind) != sent.message


def _store(
    connection: Connection, caller: str, task: str, sent: _Sent, now: datetime, until: datetime
) -> str:
    """Stores the message if its stage takes it, and leases the task until then; returns the run to wake."""
    row, _, group = _find(connection, caller, task)
    stage = 0 if group is None else group.stage
    if stage > sent.stage:
        raise Refusal(409, "secure_refused", f"round {row.round}: the group has gone on without this message")
    if stage < sent.stage:
        raise Refusal(409, "secure_stage", f"round {row.round}: {STAGES[stage]} come first")
    if sent.stage == 0:
        require_open(row, now)
    elif secure.find(connection, task, sent.kind) is not None:
        raise Refusal(409, "duplicate", f"round {row.round}: another message of this stage is there already")
    elif not _took_part(connection, row, sent.stage - 1):
        raise Refusal(409, "secure_refused", f"round {row.round}: this device has left the group")
    secure.put(connection, task, sent.kind, sent.message.body, sent.message.certificate)
    rounds.lease(connection, task, until)
    return row.run


async def _reply(services: Services, caller: str, task: str, sent: _Sent) -> SecureReply:
    return await run_in_threadpool(services.database.read, lambda at: _find_reply(at, caller, task, sent))


def _find_reply(connection: Connection, caller: str, task: str, sent: _Sent) -> SecureReply:
    row, told, group = _find(connection, caller, task)
    if STAGES[sent.stage] == "reveal":
        return SecureReply("")
    found = secure.find(connection, task, sent.kind + 1)
    if found is not None:
        encoded = base64.b64encode(found.body).decode("ascii")
        shown = members_shown(found.body, told.clients) if sent.stage == 0 else ()
        return SecureReply(encoded, secure.certificates(connection, row.run, row.round, shown))
    if not _took_part(connection, row, sent.stage):
        if group is not None and group.stage > sent.stage:
            raise Refusal(
                409, "secure_refused", f"round {row.round}: the group has gone on without this device"
            )
        raise Refusal(
            409, "secure_stage", f"round {row.round}: the {STAGES[sent.stage]} of this device are not there"
        )
    return SecureReply()


def _find(connection: Connection, caller: str, task: str) -> tuple[TaskRow, SecureTask, GroupRow | None]:
    """The caller's task and its group; without a row the group waits for keys.

    Raises:
        Refusal: 404, 403, 409 `wrong_kind`, `secure_ended`, `secure_refused`, or why the task is over.
    """
    row = own_task(connection, caller, task, "train")
    secure_task = _secure_task(row)
    if secure_task is None:
        raise Refusal(409, "wrong_kind", "the update of this task is sent in the open")
    if row.state not in ("leased", "accepted"):
        raise Refusal(
            409, "round_closed", f"round {row.round}: this task is {row.state}: {row.words or row.reason}"
        )
    group = secure.find_group(connection, row.run, row.round, secure_task.group)
    if group is not None and group.ended is not None:
        raise Refusal(409, "secure_ended", f"round {row.round}: the group has no sum: {group.ended}")
    refused = secure.find(connection, task, secure.REFUSED)
    if refused is not None:
        raise Refusal(409, "secure_refused", f"round {row.round}: {refused.body.decode()}")
    return row, secure_task, group


def _secure_task(row: TaskRow) -> SecureTask | None:
    return SecureTask.of(TaskMessage.from_json(row.offer["message"])) if row.kind == "train" else None


def _took_part(connection: Connection, row: TaskRow, stage: int) -> bool:
    """Whether the device has sent its message of a stage."""
    if STAGES[stage] == "input":
        return row.state == "accepted"
    return secure.find(connection, row.id, 2 * stage) is not None
