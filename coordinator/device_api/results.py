"""The results that tasks are answered with by an upload: the update of a device, or what a relay has folded."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection

from coordinator.context.services import Services
from coordinator.db import answers, relays, rounds, secure
from coordinator.db.answers import AcceptedUpdate
from coordinator.db.rounds import TaskRow
from coordinator.errors import Refusal
from coordinator.rounds import folded, intake
from coordinator.rounds.folded import BadFold
from coordinator.rounds.plan import Task
from edge_client.relay.expected import Expected
from edge_client.relay.intake import Rejection
from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage
from edge_client.wire.relays import FoldRequest
from edge_client.wire.secure import STAGES
from edge_client.wire.strict import parse_message
from strategies.secagg.messages import HEADER_BYTES, SESSION_BYTES, Kind, header


def check(services: Services, row: TaskRow, file: Path, decoded: Path) -> Rejection | tuple[Path, str] | None:
    """Why the result in `file` is rejected. Of a good one that a code has written, `decoded` with its tensors, and its SHA-256."""
    opened = services.database.read(lambda at: rounds.find_round(at, row.run, row.round))
    assert opened is not None  # such tasks are written together with their round, or later
    if row.kind == "fold":
        return _check_fold(services, row, file, opened.expected)
    if row.offer["message"].get("secure") is not None:
        return _check_masked(row, file)
    task = Task(row.position, TaskMessage.from_json(row.offer["message"]))
    expected = intake.expected_of(opened.expected, row.offer.get("model_class", ""))
    verdict = intake.check(arrays.FilePayload(file), task, expected)
    if isinstance(verdict, Rejection):
        return verdict
    if opened.expected.code is None:
        return None
    return decoded, arrays.write_result(decoded, task.message, verdict)


def _check_masked(row: TaskRow, file: Path) -> Rejection | None:
    """The thread of the run checks the rest when it adds it up: what is masked cannot be looked at here."""
    with file.open("rb") as masked:
        head = masked.read(HEADER_BYTES)
    if head[:-SESSION_BYTES] == header(Kind.MASKED_INPUT, b""):
        return None
    return Rejection(row.device, "malformed", "the update of this task is to be masked, and this one is not")


def _check_fold(services: Services, row: TaskRow, file: Path, expected: Expected) -> Rejection | None:
    request = parse_message(FoldRequest, row.offer["message"], "request")
    figures = services.database.read(lambda at: relays.figures_of(at, row.run, row.round))
    try:
        folded.read_part(arrays.FilePayload(file), row.id, request, figures, expected)
    except BadFold as error:
        return Rejection(row.device, "malformed", f"what the relay has folded is rejected: {error}")
    return None


def accept(connection: Connection, row: TaskRow, accepted: AcceptedUpdate, now: datetime) -> None:
    """Counts a result that passed its check and is stored. The task must be leased."""
    if row.kind == "fold":
        relays.accept_fold(connection, row.id, accepted.blob, now)
        return
    if (told := row.offer["message"].get("secure")) is not None:
        group = secure.find_group(connection, row.run, row.round, told["group"])
        if group is None or STAGES.index("input") != group.stage or not secure.has_shared(connection, row.id):
            raise Refusal(
                409,
                "secure_refused",
                f"round {row.round}: the group takes no masked update of this device now",
            )
    answers.accept(connection, row, accepted, now)


def is_kept(connection: Connection, blob: str) -> bool:
    """Whether any accepted result consists of this blob."""
    return answers.is_update(connection, blob) or relays.is_result(connection, blob)


def accepted_before(connection: Connection, row: TaskRow) -> AcceptedUpdate | None:
    """The accepted result of a task; None if it was lost since."""
    if row.kind != "fold":
        return answers.find_update(connection, row)
    announced, result = answers.find_upload(connection, row.id), relays.result_of(connection, row.id)
    if announced is None or result is None:
        return None
    return AcceptedUpdate(result, announced.sha256, announced.size_bytes)
