"""The controller of rollouts: one thread that carries them on until the process ends.

    a report or an operator ─► signal "rollouts" ─► reconcile: decide ─► sign ─► wake the devices concerned

`reconcile` takes each decision in one transaction with its events, has the repository sign what each device must run,
then records that it is signed; devices hear only what is signed. After a crash at any point, the first pass of the next
process decides what is undecided and signs what is unsigned.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Protocol

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from coordinator.context.services import Services
from coordinator.db import events
from coordinator.errors import Refusal
from coordinator.releases.repository import Release
from coordinator.rollouts import engine, queries
from coordinator.rollouts.gates import Measured, Tally, judge, measured, undecided_comparison
from coordinator.rollouts.reports import TOPIC
from coordinator.rollouts.tables import RolloutRow

_log = structlog.get_logger("fedloop.rollouts")

_OPEN = ("created", "running")

_POLL_SECONDS = 5.0
"""Deadlines pass without a signal."""


class Releases(Protocol):
    """What rollouts need of the signed repository (`coordinator.releases.repository.Repository`)."""

    def releases(self) -> Sequence[Release]: ...

    def set_rollouts(self, model: str, document: Mapping[str, Any]) -> None: ...


def reconcile(services: Services, releases: Releases) -> bool:
    """Takes every decision that is due and has it signed; returns whether anything changed."""
    database, changed = services.database, _halt_withdrawn(services, releases)
    for rollout in database.read(partial(queries.in_states, states=engine.AUTOMATIC_STATES)):
        # The figures of a large fleet are read outside the single writer, which reads them again only to record a decision.
        while database.read(partial(_decision, rollout=rollout.id, now=services.clock())) is not None:
            changed |= database.write(partial(_decide, rollout=rollout.id, now=services.clock())).result()
    if changed:
        services.signals.notify("events")
    for model in database.read(queries.unsigned_revisions):
        changed |= _sign(services, releases, model)
    return changed


def waiting_reasons(connection: Connection, rollout: RolloutRow, now: datetime) -> Sequence[str]:
    """What the open phase of a rollout waits for, one sentence each."""
    if rollout.state != "running":
        return ()
    opened = _tallies(connection, rollout)[: rollout.phase + 1]
    return judge(rollout.gate_values, opened, (now - rollout.since).total_seconds()).reasons


def measured_gates(connection: Connection, rollout: RolloutRow, now: datetime) -> list[Measured]:
    """Each gate with what was measured of it over the phases opened so far."""
    opened = _tallies(connection, rollout)[: rollout.phase + 1]
    waited = (now - rollout.since).total_seconds() if rollout.state == "running" else None
    return measured(rollout.gate_values, opened, waited)


def undecided_reason(connection: Connection, rollout: RolloutRow) -> str | None:
    """Why the comparison of candidate and champion is undecided; None if it is decided, or there was none."""
    return undecided_comparison(rollout.gate_values, _tallies(connection, rollout)[: rollout.phase + 1])


class RolloutThread:
    """Reconciles until the signals are closed."""

    def __init__(self, services: Services, releases: Releases) -> None:
        self._services = services
        self._releases = releases
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Joins the thread, which ends because the signals are closed."""
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        signals = self._services.signals
        while not signals.closed:
            seen = signals.seen(TOPIC)
            try:
                reconcile(self._services, self._releases)
            except (OSError, OperationalError) as error:  # a full disk or an absent database is temporary
                _log.error("rollouts_wait", reason=str(error)[:300])
            except Exception:
                if self._services.signals.closed:
                    return
                _log.exception("rollouts_wait")
            signals.wait(TOPIC, seen, _POLL_SECONDS)


def _decision(connection: Connection, rollout: str, now: datetime) -> engine.Decision | None:
    row = queries.require(connection, rollout)
    if row.state not in engine.AUTOMATIC_STATES:
        return None
    if row.state == "halted":
        return engine.decide(row, (), queries.outstanding(connection, row.id), now)
    return engine.decide(row, _tallies(connection, row), 0, now)


def _decide(connection: Connection, rollout: str, now: datetime) -> bool:
    """Takes the rollout's next decision; returns whether there was one."""
    decision = _decision(connection, rollout, now)
    if decision is None:
        return False
    _apply(connection, queries.require(connection, rollout), decision, now)
    return True


def _halt_withdrawn(services: Services, releases: Releases) -> bool:
    """Halts rollouts of withdrawn releases: no device can install them any more, and those that did roll back."""

    def halt(connection: Connection, rollout: str, reason: str) -> bool:
        row = queries.require(connection, rollout)
        if row.state in _OPEN:
            _apply(connection, row, engine.Decision("halted", row.phase, reason), services.clock())
        return row.state in _OPEN

    open_now = services.database.read(partial(queries.in_states, states=_OPEN))
    released = {(each.name.model, each.name.version) for each in releases.releases()} if open_now else set()
    changed = False
    for row in open_now:
        if (row.model, row.version) not in released:
            reason = f"{row.release} was withdrawn"
            changed |= services.database.write(partial(halt, rollout=row.id, reason=reason)).result()
    return changed


def _tallies(connection: Connection, row: RolloutRow) -> list[Tally]:
    tallies = queries.tallies(connection, row.id)
    return [tallies.get(each.number, Tally()) for each in queries.phases_of(connection, row.id)]


def _apply(connection: Connection, row: RolloutRow, decision: engine.Decision, now: datetime) -> None:
    """Records a decision: the rollout, its phases, the event, and a new revision of the model's directions."""
    opens = decision.state == "running" and decision.phase > row.phase
    if opens:
        queries.open_phase(connection, row.id, decision.phase, now)
    elif decision.state == "finished":
        queries.open_phase(connection, row.id, decision.phase + 1, now)  # of no phase: all have passed
    event = "rollout_phase_opened" if opens else f"rollout_{decision.state}"
    queries.change(connection, row, now, state=decision.state, phase=decision.phase, reason=decision.reason)
    queries.bump_directions(connection, row.model)
    reason = {"reason": decision.reason} if decision.reason else {}
    values: dict[str, Any] = {"rollout": row.id, "release": row.release, "phase": decision.phase, **reason}
    events.record(connection, now, event, project=row.project, **values)


def _sign(services: Services, releases: Releases, model: str) -> bool:
    """Has the repository sign the newest directions of a model; False where it refuses."""

    def read(connection: Connection) -> tuple[int | None, dict[tuple[str, str], engine.Direction]]:
        revision = queries.unsigned_revisions(connection).get(model)
        return revision, engine.directions(queries.of_model(connection, model))

    revision, directions = services.database.read(read)
    if revision is None:
        return False
    released = {each.name.version for each in releases.releases() if each.name.model == model}
    try:
        releases.set_rollouts(model, engine.document(model, directions, released))
    except Refusal as refusal:
        _log.error("rollouts_not_signed", model=model, reason=str(refusal))
        return False
    services.database.write(partial(queries.mark_signed, model=model, revision=revision)).result()
    waiting = services.database.read(partial(queries.devices_to_wake, model=model))
    services.signals.notify(*(f"device:{device}" for device in waiting))
    return True
