"""Checks of every route that names a task: the caller owns it, and an answer to it is still accepted."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection

from coordinator.db import rounds
from coordinator.db.rounds import TaskRow
from coordinator.errors import Refusal
from edge_client.wire.device import TaskKind


def own_task(connection: Connection, caller: str, task: str, kind: TaskKind | None = None) -> TaskRow:
    """The caller's task. Raises: Refusal: 404 `not_found`, 403 `not_yours`, 409 `wrong_kind`."""
    # PostgreSQL rejects NUL in text, even in a comparison.
    row = rounds.find_task(connection, task) if len(task) == 36 and "\0" not in task else None
    if row is None:
        raise Refusal(404, "not_found", "there is no such task")
    if row.device != caller:
        raise Refusal(403, "not_yours", "this task belongs to another device")
    if kind is not None and row.kind != kind:
        raise Refusal(409, "wrong_kind", f"this task is to {row.kind}, not to {kind}")
    return row


def require_open(task: TaskRow, now: datetime) -> None:
    """Requires that the task is leased, before its deadline, and its round accepts results.

    Raises:
        Refusal: 409 with `not_leased`, `lease_expired`, `declined`, `rejected` or `round_closed`.
    """
    in_time = now <= task.deadline_at and (task.kind == "evaluate" or task.round_state == "open")
    if task.state == "leased" and in_time:
        return
    code, message = _REFUSALS.get((task.state, task.reason), _REFUSALS.get((task.state, None), _CLOSED))
    raise Refusal(
        409, code, f"round {task.round}: {message}" + (f": {task.words}" if code == "rejected" else "")
    )


_CLOSED = ("round_closed", "the round is over and accepts no more results")
_REFUSALS: dict[tuple[str, str | None], tuple[str, str]] = {
    ("waiting", None): ("not_leased", "the device has not fetched this task by a check-in"),
    ("expired", "lease_expired"): ("lease_expired", "the device was silent for longer than its lease"),
    ("declined", None): ("declined", "the device declined this task"),
    ("rejected", None): ("rejected", "its result was rejected"),
    ("accepted", None): ("duplicate", "another result of this task was already accepted"),
}
