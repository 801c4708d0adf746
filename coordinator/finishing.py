"""The end of a run: its model counts and, where the experiment has `model.register`, becomes a version in the registry.

Both are one transaction. Killed before it, the run is taken up again after its last round and ends once more; killed
after it, nothing is left to do. A model that cannot be registered ends its run all the same, which says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import structlog
from sqlalchemy import Connection, Row
from sqlalchemy.exc import OperationalError

from coordinator import failpoints
from coordinator.db import registry
from coordinator.db import runs as rows
from coordinator.db.registry import NewVersion
from coordinator.db.store import is_disk_full
from coordinator.errors import UserError
from coordinator.registry.references import RegisterAs
from coordinator.registry.register import put, version_of_run
from coordinator.services import Services

_log = structlog.get_logger("fedloop.runs")


def finish(services: Services, run: str, model_sha256: str, register_as: RegisterAs | None) -> None:
    """Ends a run that has done its rounds, with the blob of the model it came to. `services.blobs.naming` must be held.

    The event tells of the version as `registered`, or as `not_registered` why there is none; then a notice of the run
    says so too.

    Raises:
        OSError, OperationalError: the disk is full or the database away; nothing was written.
    """
    row = services.database.read(partial(rows.find, run=run))
    assert row is not None
    end = partial(_end, services, row, model_sha256)
    if register_as is None:
        end(row.notices)
        return
    try:
        with ExitStack() as stack:
            # Of the row as it is about to be, so that whoever registers the run by hand finds the very same files.
            ended = services.database.read(partial(rows.as_finished, run=run, model_sha256=model_sha256))
            version = version_of_run(services, stack, ended)
            failpoints.reach("registry.blobs_stored")
            end(row.notices, register_as, version)
    except Exception as error:
        if is_disk_full(error) or isinstance(error, OperationalError) or services.signals.closed:
            raise  # it passes, and the end of the run waits for that
        words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        reason = " ".join(words.split())[:500]
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
    **told: Any,
) -> None:
    now = services.clock()

    def work(connection: Connection) -> None:
        row = rows.find(connection, run.id)
        if row is None or row.state not in rows.LIVE:
            return  # it was cancelled meanwhile
        more: dict[str, Any] = dict(told)
        if register_as is not None and version is not None:
            identity, _ = put(connection, register_as.model, version, now)
            if register_as.alias is not None:
                registry.move_alias(connection, identity, register_as.alias, now)
            more["registered"] = str(identity)
        rows.finish(connection, run.id, now, model_sha256, notices, **more)

    services.database.write(work).result()
