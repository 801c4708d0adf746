"""The durable state of a run on devices: blobs and rows.

The commit of a round first makes params and strategy state durable blobs. Then one transaction refers to them, closes the
round and records its event. If the process dies before it, the next one resumes the round with the updates accepted so far;
after it, the next round starts.

The completion of a run makes its model final and, if the experiment has `model.register`, a version in the registry. Both are
one transaction. If the process dies before it, the next one resumes after the last round and completes the run. If the model
cannot be registered, the run still completes, with a notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
from sqlalchemy import Connection, Row

from coordinator import failpoints
from coordinator.context.services import Services
from coordinator.db import events, privacy, registry
from coordinator.db import runs as rows
from coordinator.db.project_filter import working_for
from coordinator.db.registry import NewVersion
from coordinator.errors import UserError
from coordinator.json_values import finite
from coordinator.model_references import RegisterAs
from coordinator.registry.registration import put, require_own_name, version_of_run
from coordinator.rounds.engine import materialize_in
from coordinator.rounds.fleet import Stopped
from coordinator.rounds.records import Best, RoundRecord, RunState, as_row
from coordinator.storage.errors import is_temporary
from strategies.params import Params, State

_log = structlog.get_logger("fedloop.runs")

_RECORDED_BY_THE_DEVICE_API = ("update_accepted", "update_rejected")
"""Events that are written in the transaction that decides on the update."""


class LiveStore:
    """Implements `engine.CommitStore` for one run.

    `more_figures`: returns what a round's record holds besides the engine's values.
    """

    def __init__(
        self, services: Services, run: str, more_figures: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self._services = services
        self._run = run
        self._more_figures = more_figures
        self._held_blobs = ExitStack()
        self._base_blobs: tuple[str, str] = ("", "")

    def load(self, row: Any) -> RunState:
        """The state after the last committed round of the run's row; its arrays are read from disk on access."""
        self._base_blobs = (row.params, row.strategy_state)
        params, strategy = (self._services.blobs.open_arrays(digest) for digest in self._base_blobs)
        best = Best(**row.best) if row.best else Best()
        if row.best and row.best["params"]:
            best = replace(best, params=self._services.blobs.open_arrays(row.best["params"]))
        return RunState(row.round, params, State(strategy, strategy.header.values), best)

    def put(self, state: RunState) -> tuple[str, str]:
        """Stores params and strategy state as durable blobs; blobs that exist cost nothing."""
        blobs, strategy = self._services.blobs, state.strategy
        return (
            blobs.put_arrays(state.params).sha256,
            blobs.put_arrays(strategy.arrays, strategy.values).sha256,
        )

    def materialize(self, state: RunState) -> RunState:
        """Computes the state piece by piece while it is written to disk, and holds its blobs until the commit.

        Raises:
            BlobDamaged: a blob of the previous state is damaged; nothing is computed from it.
        """
        blobs = self._services.blobs
        for digest in self._base_blobs:
            blobs.require_intact(digest)
        with blobs.reference_lock:
            stored = materialize_in(blobs, state)
            self._base_blobs = self.put(stored)
            self._held_blobs.enter_context(blobs.held(*self._base_blobs))
        return stored

    def commit(
        self, state: RunState, record: RoundRecord, clients: Mapping[str, Mapping[str, Params]]
    ) -> None:
        line = as_row(record) | finite(self._more_figures())
        with self._services.blobs.reference_lock:
            params, strategy = self.put(state)
            failpoints.reach("commit.blobs_stored")
            write = partial(self._write, state=state, params=params, strategy=strategy, line=line)
            is_committed, unneeded = self._services.database.write(write).result()
            self.release()
            if not is_committed:
                raise Stopped
            failpoints.reach("commit.done")
            self._services.blobs.remove(unneeded)
        self._services.signals.notify("events")

    def on_committed(self, record: RoundRecord) -> None:
        _log.info(
            "round",
            run=self._run,
            round=record.round,
            accepted=record.accepted,
            rejected=record.rejected,
            test_accuracy=record.test_accuracy,
            seconds=round(record.seconds, 3),
        )

    def emit(self, event: str, **values: Any) -> None:
        if event in _RECORDED_BY_THE_DEVICE_API:
            return
        device = values.pop("client", None)
        now, signals = self._services.clock(), self._services.signals
        written = self._services.database.write(
            lambda connection: events.record(connection, now, event, run=self._run, device=device, **values)
        )
        written.add_done_callback(lambda done: signals.notify("events"))

    def release(self) -> None:
        """Releases blobs of an uncommitted state."""
        self._held_blobs.close()

    def _write(
        self, connection: Connection, state: RunState, params: str, strategy: str, line: Mapping[str, Any]
    ) -> tuple[bool, set[str]]:
        """The transaction of a commit: whether the run is still live, and blobs that are no longer needed."""
        before = rows.find(connection, self._run)
        assert before is not None
        number, best, kept = state.round, state.best, (before.best or {}).get("params")
        digest = params if best.round == number else kept
        document = {**vars(best), "params": None if best.params is None else digest}
        now = self._services.clock()
        is_committed = rows.commit_round(connection, self._run, number, params, strategy, document, line, now)
        old = rows.blobs_of_round(connection, self._run, number)
        if is_committed:
            old |= privacy.drop_release(connection, self._run)
        old |= {before.params, before.strategy_state, *([kept] if kept else [])}
        return is_committed, old - rows.blobs_in_use(connection)


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
            require_own_name(services.for_project(row.project), register_as.model)
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
            with working_for(connection, row.project):
                identity, _ = put(connection, register_as.model, version, now)
                if register_as.alias is not None:
                    registry.move_alias(connection, identity, register_as.alias, now)
            more["registered"] = str(identity)
        rows.finish(connection, run.id, now, model_sha256, notices, **more)

    services.database.write(work).result()
