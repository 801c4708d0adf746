"""Completion of a run: its model becomes final and, if the experiment has `model.register`, a version in the registry.

Both are one transaction. If the process dies before it, the next one resumes after the last round and completes the run. If
the model cannot be registered, the run still completes, with a notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import structlog
from sqlalchemy import Connection, Row

from coordinator import failpoints
from coordinator.context.services import Services
from coordinator.db import registry
from coordinator.db import runs as rows
from coordinator.db.registry import NewVersion
from coordinator.errors import UserError
from coordinator.model_references import RegisterAs
from coordinator.registry.registration import put, version_of_run
from coordinator.storage.errors import is_temporary

_log = structlog.get_logger("fedloop.runs")


def finish(services: Services, run: str, model_sha256: str, register_as: RegisterAs | None) -> None:
    """Completes a run after its last round, with the blob of its final model. `services.blobs.reference_lock` must be held.

    The event holds the version as `registered`, or the reason why there is none as `not_registered`; then the run gets a
    notice too.

    Raises:
        OSError, DBAPIError: the disk or the database failed; nothing was written.
    """
    row = services.database.read(partial(rows.find, run=run))
    assert row is not None
    end = partial(_end, services, row, model_sha256)
    if register_as is None:
        end(row.notices)
        return
    try:
        with ExitStack() as stack:
            # From the row as it will be, so that registering the run by hand gives the same files.
            ended = services.database.read(partial(rows.as_finished, run=run, model_sha256=model_sha256))
            version = version_of_run(services, stack, ended)
            failpoints.reach("registry.blobs_stored")
            end(row.notices, register_as, version)
    except Exception as error:
        if is_temporary(error) or services.signals.closed:
            raise  # a temporary failure: the completion is retried
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        reason = " ".join(message.split())[:500]
        _log.error("run_not_registered", run=run, model=str(register_as), reason=reason)
        notice = f"the model was not registered as {register_as}: {reason}; later: fedloop model add-run {run} --name {register_as.model}"
        end([*row.notices, notice], not_registered=reason)
    failpoints.reach("registry.committed")


def _end(
    services: Services,
    run: Row[Any],
    model_sha256: str,
    notices: Sequence[str],
    register_as: RegisterAs | None = None,
    version: NewVersion | None = None,
    **details: Any,
) -> None:
    now = services.clock()

    def work(connection: Connection) -> None:
        row = rows.find(connection, run.id)
        if row is None or row.state not in rows.LIVE:
            return  # the run was cancelled meanwhile
        more: dict[str, Any] = dict(details)
        if register_as is not None and version is not None:
            identity, _ = put(connection, register_as.model, version, now)
            if register_as.alias is not None:
                registry.move_alias(connection, identity, register_as.alias, now)
            more["registered"] = str(identity)
        rows.finish(connection, run.id, now, model_sha256, notices, **more)

    services.database.write(work).result()
