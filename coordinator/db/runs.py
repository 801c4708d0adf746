"""Queries of runs: created, prepared, advanced round by round, ended; and their state, to explain why a device takes part.

Each function is one step of a transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Row, and_, func, insert, literal, or_, select, update

from coordinator.db import events, privacy, registry, rounds, secure
from coordinator.db import tables as t
from coordinator.errors import Refusal

LIVE = t.LIVE_RUNS

RESUMABLE = ("failed", "cancelled")
"""States of a run that can be taken up behind its last committed round."""

RunKind = Literal["train", "statistics"]
"""What a run does: rounds of training, or a statistics round."""


def set_running(connection: Connection, run: str) -> None:
    """Marks a queued run that needs no preparation as running."""
    queued = (t.runs.c.id == run, t.runs.c.state == "queued")
    connection.execute(update(t.runs).where(*queued).values(state="running"))


def create(
    connection: Connection,
    run: str,
    name: str,
    experiment: Mapping[str, Any],
    notices: Sequence[str],
    now: datetime,
    kind: RunKind = "train",
    own_model: Mapping[str, Any] | None = None,
) -> None:
    """`own_model`: hash and size of each file of the user's own model, by name, if it came with the experiment."""
    connection.execute(
        insert(t.runs).values(
            id=run,
            name=name,
            state="queued",
            experiment=dict(experiment),
            notices=list(notices),
            kind=kind,
            created_at=now,
            round=0,
            own_model=own_model,
        )
    )
    events.record(connection, now, "run_created", run=run, name=name, notices=list(notices))


def count_live(connection: Connection, project: str) -> int:
    """Number of runs of a project that have not ended."""
    which = and_(t.runs.c.project == project, t.runs.c.state.in_(LIVE))
    return int(connection.execute(select(func.count()).select_from(t.runs).where(which)).scalar_one())


def find(connection: Connection, run: str) -> Row[Any] | None:
    return connection.execute(select(t.runs).where(t.runs.c.id == run)).one_or_none()


def require(connection: Connection, run: str) -> Row[Any]:
    """The run of this id. Raises: Refusal: 404 `unknown_run`."""
    row = find(connection, run)
    if row is None:
        raise Refusal(404, "unknown_run", f"there is no run {run[:100]}")
    return row


def as_finished(connection: Connection, run: str, model_sha256: str) -> Row[Any]:
    """The run as `finish` will leave it, except for the time."""
    known = [column for column in t.runs.c if column.name not in ("state", "params")]
    written = [literal("finished").label("state"), literal(model_sha256).label("params")]
    return connection.execute(select(*known, *written).where(t.runs.c.id == run)).one()


def newest(
    connection: Connection, limit: int, state: str | None = None, called: str | None = None
) -> Sequence[Row[Any]]:
    """Runs that train, newest first; in a state, called so. `called` is a name, or the beginning of an id."""
    query = (
        select(t.runs)
        .where(t.runs.c.kind == "train")
        .order_by(t.runs.c.created_at.desc(), t.runs.c.id)
        .limit(limit)
    )
    if state is not None:
        query = query.where(t.runs.c.state == state)
    if called is not None:
        has_prefix = t.runs.c.id.startswith(called.lower(), autoescape=True)
        query = query.where(or_(t.runs.c.name == called, has_prefix))
    return connection.execute(query).all()


def live(connection: Connection) -> list[str]:
    """Runs that have not ended, oldest first."""
    query = select(t.runs.c.id).where(t.runs.c.state.in_(LIVE)).order_by(t.runs.c.created_at, t.runs.c.id)
    return list(connection.execute(query).scalars())


def begin(
    connection: Connection,
    run: str,
    prepared: Mapping[str, Any],
    params: str,
    strategy_state: str,
    notices: Sequence[str],
    now: datetime,
    **details: Any,
) -> bool:
    """Starts a prepared run; False if it was cancelled meanwhile. `details` go into the event."""
    done = connection.execute(
        update(t.runs)
        .where(t.runs.c.id == run, t.runs.c.state == "queued")
        .values(
            state="running",
            prepared=dict(prepared),
            params=params,
            strategy_state=strategy_state,
            notices=list(notices),
        )
    )
    if done.rowcount:
        events.record(connection, now, "run_started", run=run, **details)
    return bool(done.rowcount)


def commit_round(
    connection: Connection,
    run: str,
    number: int,
    params: str,
    strategy_state: str,
    best: Mapping[str, Any],
    record: Mapping[str, Any],
    now: datetime,
) -> bool:
    """Commits a round with its results; False if the run was cancelled meanwhile."""
    done = connection.execute(
        update(t.runs)
        .where(t.runs.c.id == run, t.runs.c.state == "running", t.runs.c.round == number - 1)
        .values(round=number, params=params, strategy_state=strategy_state, best=dict(best))
    )
    if not done.rowcount:
        return False
    connection.execute(
        update(t.rounds)
        .where(t.rounds.c.run == run, t.rounds.c.number == number)
        .values(state="committed", record=dict(record))
    )
    events.record(connection, now, "round_committed", run=run, **record)
    return True


def end(
    connection: Connection, run: str, state: str, now: datetime, error: str | None = None, **details: Any
) -> list[str] | None:
    """Ends a live run and its live tasks; returns their devices, or None if the run had already ended."""
    done = connection.execute(
        update(t.runs)
        .where(t.runs.c.id == run, t.runs.c.state.in_(LIVE))
        .values(state=state, finished_at=now, error=error)
    )
    if not done.rowcount:
        return None
    live_tasks = and_(t.tasks.c.run == run, t.tasks.c.state.in_(rounds.LIVE))
    devices = list(connection.execute(select(t.tasks.c.device).where(live_tasks).distinct()).scalars())
    message = f"the run was {state}" if state == "cancelled" else f"the run has {state}"
    connection.execute(
        update(t.tasks)
        .where(live_tasks)
        .values(state="cancelled", reason=f"run_{state}", words=message, answered_at=now, leased_until=None)
    )
    if error is not None:
        details["error"] = error
    events.record(connection, now, f"run_{state}", run=run, **details)
    return devices


def resume(connection: Connection, run: str, now: datetime) -> bool:
    """Takes up a failed or cancelled run behind its last committed round; False if it is in another state.

    The round that was open when it ended is forgotten, with its tasks and their updates: its cohort is drawn anew. A round whose noise is
    drawn goes on with that instead.
    """
    row = find(connection, run)
    assert row is not None, "checked by the caller"
    state = "queued" if row.prepared is None else "running"
    done = connection.execute(
        update(t.runs)
        .where(t.runs.c.id == run, t.runs.c.state.in_(RESUMABLE))
        .values(state=state, finished_at=None, error=None)
    )
    if done.rowcount:
        secure.forget(connection, run)
        ledger = privacy.find(connection, run)
        if ledger is None or ledger.released is None:
            rounds.forget_round(connection, run, row.round + 1)
        events.record(connection, now, "run_taken_up", run=run, round=row.round)
    return bool(done.rowcount)


def judge(connection: Connection, run: str, figures: Mapping[str, Any]) -> None:
    """Stores figures of the final model, before the run ends."""
    connection.execute(update(t.runs).where(t.runs.c.id == run).values(figures=dict(figures)))


def finish(
    connection: Connection,
    run: str,
    now: datetime,
    model_sha256: str,
    notices: Sequence[str],
    **details: Any,
) -> list[str] | None:
    """Ends a run after its last round with its final model; otherwise as `end`.

    If the run keeps the best round's params, its final model takes their place.
    """
    values: dict[str, Any] = {"params": model_sha256, "notices": list(notices)}
    before = find(connection, run)
    if before is not None and before.best and before.best["params"]:
        values["best"] = {**before.best, "params": model_sha256}
    connection.execute(update(t.runs).where(t.runs.c.id == run, t.runs.c.state.in_(LIVE)).values(**values))
    return end(connection, run, "finished", now, model_sha256=model_sha256, **details)


def records(connection: Connection, run: str) -> list[dict[str, Any]]:
    """The records of committed rounds, in order: the lines of the report."""
    query = (
        select(t.rounds.c.record)
        .where(t.rounds.c.run == run, t.rounds.c.state == "committed")
        .order_by(t.rounds.c.number)
    )
    return list(connection.execute(query).scalars())


def scores(connection: Connection, runs: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Run -> `test_accuracy` after its last committed round, and `r2` of the model then; runs with such a round only.

    Of a run that learns quantities R2 is what the coordinator's own rows gave the final model, else what devices reported.
    """
    latest = and_(t.runs.c.id == t.rounds.c.run, t.runs.c.round == t.rounds.c.number)
    of_final = t.runs.c.figures[("final", "metrics", "r2")].as_float()
    of_devices = t.rounds.c.record[("on_devices", "metrics", "r2")].as_float()
    query = (
        select(
            t.rounds.c.run,
            t.rounds.c.record["test_accuracy"].as_float().label("test_accuracy"),
            func.coalesce(of_final, of_devices).label("r2"),
        )
        .join(t.runs, latest)
        .where(t.rounds.c.run.in_(runs))
    )
    return {row.run: {"test_accuracy": row.test_accuracy, "r2": row.r2} for row in connection.execute(query)}


def runtimes_used(connection: Connection, run: str) -> dict[str, int]:
    """Runtime -> number of devices that trained with it."""
    query = (
        select(t.tasks.c.runtime, func.count(t.tasks.c.device.distinct()))
        .where(t.tasks.c.run == run, t.tasks.c.kind == "train", t.tasks.c.state == "accepted")
        .group_by(t.tasks.c.runtime)
        .order_by(t.tasks.c.runtime)
    )
    return {str(name): int(count) for name, count in connection.execute(query).all()}


def model_classes_used(connection: Connection, run: str) -> dict[str, list[str]]:
    """Model class -> the devices whose last accepted update was of it, by id; empty if the run has no classes."""
    trained = and_(t.tasks.c.run == run, t.tasks.c.kind == "train", t.tasks.c.state == "accepted")
    last = func.max(t.tasks.c.round)
    name = rounds.MODEL_CLASS.label("model_class")
    query = select(t.tasks.c.device, name, last.label("last")).where(trained)
    latest = {
        row.device: row.model_class
        for row in connection.execute(query.group_by(t.tasks.c.device, "model_class").order_by(last))
        if row.model_class
    }
    found: dict[str, list[str]] = {}
    for device, name in sorted(latest.items()):
        found.setdefault(name, []).append(device)
    return found


def devices_used(connection: Connection, run: str) -> int:
    """Number of devices with an accepted update."""
    query = select(func.count(t.updates.c.device.distinct())).where(t.updates.c.run == run)
    return int(connection.execute(query).scalar_one())


def blobs_of_round(connection: Connection, run: str, number: int) -> set[str]:
    """The blobs of a round: its updates, those that its tasks refer to, and those of tasks whose answers it took."""
    counted = and_(t.tasks.c.run == run, t.tasks.c.counted_in == number, t.tasks.c.round != number)
    blobs = _blobs_of_tasks(connection, counted)
    blobs |= set(
        connection.execute(
            select(t.updates.c.blob).where(t.updates.c.run == run, t.updates.c.round == number)
        ).scalars()
    )
    return blobs | _blobs_offered(connection, and_(t.tasks.c.run == run, t.tasks.c.round == number))


def blobs_left(connection: Connection, run: str) -> set[str]:
    """The blobs of tasks that a run left open when it ended, or whose updates no round took."""
    ended_with_run = t.tasks.c.reason.startswith("run_", autoescape=True)
    untaken = and_(t.tasks.c.state == "accepted", t.tasks.c.counted_in.is_(None))
    return _blobs_of_tasks(connection, and_(t.tasks.c.run == run, or_(ended_with_run, untaken)))


def _blobs_of_tasks(connection: Connection, where: ColumnElement[bool]) -> set[str]:
    """The blobs that these train tasks refer to, and their updates."""
    answered = and_(
        t.tasks.c.run == t.updates.c.run,
        t.tasks.c.round == t.updates.c.round,
        t.tasks.c.device == t.updates.c.device,
        t.tasks.c.kind == "train",
    )
    blobs = select(t.updates.c.blob).join(t.tasks, answered).where(where)
    return set(connection.execute(blobs).scalars()) | _blobs_offered(connection, where)


def _blobs_offered(connection: Connection, where: ColumnElement[bool]) -> set[str]:
    """The blobs that these tasks refer to."""
    blobs: set[str] = set()
    for offer in connection.execute(select(t.tasks.c.offer).where(where)).scalars():
        blobs |= rounds.blobs_of(offer)
    return blobs


def blobs_in_use(connection: Connection) -> set[str]:
    """Every blob that a row refers to: of runs, open work and registered models."""
    used = rounds.blobs_in_use(connection) | registry.blobs_in_use(connection)
    used |= privacy.blobs_in_use(connection)
    columns = (
        t.runs.c.params, t.runs.c.strategy_state, t.runs.c.best, t.runs.c.prepared, t.runs.c.own_model,
    )  # fmt: skip
    for row in connection.execute(select(*columns)):
        prepared = row.prepared or {}
        refs = [prepared.get(key) for key in ("artifact", "manifest", "schema")]
        refs += [each[key] for each in prepared.get("classes", ()) for key in ("artifact", "manifest")]
        if row.prepared is None:
            refs += (row.own_model or {}).values()
        best = (row.best or {}).get("params")
        used |= {digest for digest in (row.params, row.strategy_state, best) if digest}
        used |= {ref["sha256"] for ref in refs if ref}
    return used


@dataclass(frozen=True)
class LastRound:
    """The latest round of a run: the size of its cohort, and of the population it was drawn from."""

    number: int
    state: str
    cohort: int
    population: int


def last_round(connection: Connection, run: str) -> LastRound | None:
    row = connection.execute(
        select(t.rounds.c.number, t.rounds.c.state, t.rounds.c.population)
        .where(t.rounds.c.run == run)
        .order_by(t.rounds.c.number.desc())
        .limit(1)
    ).one_or_none()
    if row is None:
        return None
    cohort = select(func.count()).select_from(t.tasks).where(rounds.of_round(run, row.number, "train"))
    return LastRound(row.number, row.state, int(connection.execute(cohort).scalar_one()), row.population)


def recent_runs(connection: Connection, ended_runs: int, only: str | None = None) -> list[Row[Any]]:
    """Live runs that train, then the last `ended_runs` ended ones, each newest first; or only the run with this id."""
    newest = select(t.runs).where(t.runs.c.kind == "train").order_by(t.runs.c.created_at.desc())
    if only is not None:
        return list(connection.execute(newest.where(t.runs.c.id == only)))
    live = connection.execute(newest.where(t.runs.c.state.in_(LIVE)))
    ended = connection.execute(newest.where(t.runs.c.state.not_in(LIVE)).limit(ended_runs))
    return [*live, *ended]
