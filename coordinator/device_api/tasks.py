"""Whose a task is, and whether an answer to it is still wanted: asked by every route that names one."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection

from coordinator.db import rounds
from coordinator.db.rounds import TaskRow
from coordinator.errors import Refusal
from edge_client.wire.device import TaskKind


def own_task(connection: Connection, caller: str, task: str, kind: TaskKind | None = None) -> TaskRow:
    """The caller's task.

    Raises:
        Refusal: 404 `not_found`, 403 `not_yours`, 409 `wrong_kind`.
    """
    found = rounds.find_task(connection, task) if len(task) == 36 else None
    if found is None:
        raise Refusal(404, "not_found", "there is no such task")
    if found.device != caller:
        raise Refusal(403, "not_yours", "this task was given to another device")
    if kind is not None and found.kind != kind:
        raise Refusal(409, "wrong_kind", f"this task is to {found.kind}, not to {kind}")
    return found


def require_wanted(task: TaskRow, now: datetime) -> None:
    """Lets pass a task that is leased, before its deadline, and whose round takes results.

    Raises:
        Refusal: 409 with `not_leased`, `lease_expired`, `declined`, `rejected` or `round_closed`.
    """
    in_time = now <= task.deadline_at and (task.kind == "evaluate" or task.round_state == "open")
    if task.state == "leased" and in_time:
        return
    code, words = _UNWANTED.get((task.state, task.reason), _UNWANTED.get((task.state, None), _CLOSED))
    raise Refusal(
        409, code, f"round {task.round}: {words}" + (f": {task.words}" if code == "rejected" else "")
    )


_CLOSED = ("round_closed", "the round is over, nothing more is taken")
_UNWANTED: dict[tuple[str, str | None], tuple[str, str]] = {
    ("waiting", None): ("not_leased", "this task was not fetched by a check-in"),
    ("expired", "lease_expired"): ("lease_expired", "the device was silent for longer than its lease"),
    ("declined", None): ("declined", "the device gave this task back"),
    ("rejected", None): ("rejected", "its result was rejected"),
    ("accepted", None): ("duplicate", "another result of this task counts already"),
}
