"""Queries of jobs: created, started, ended. Each function is one step of a transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, func, insert, or_, select, update

from coordinator.db.project_filter import working_for
from coordinator.db.tables import columns_of, find_row
from coordinator.errors import Refusal
from coordinator.jobs.tables import LIVE, STOPPED, JobRow, Kind, State, jobs

INTERRUPTED = "the coordinator stopped while the job ran"


def create(connection: Connection, job: JobRow) -> JobRow:
    """Stores a new job, with the next number."""
    with working_for(connection, None):  # numbers are those of the whole coordinator
        number = 1 + connection.execute(select(func.coalesce(func.max(jobs.c.number), 0))).scalar_one()
    connection.execute(insert(jobs).values({**vars(job), "number": number, "document": dict(job.document)}))
    return require(connection, job.id)


def require(connection: Connection, job: str) -> JobRow:
    """The job of this id. Raises: Refusal: 404 `unknown_job`."""
    row = find_row(connection, JobRow, jobs, jobs.c.id == job)
    if row is None:
        raise Refusal(404, "unknown_job", f"there is no job {job[:100]}")
    return row


def newest(
    connection: Connection,
    limit: int,
    state: State | None = None,
    kinds: Sequence[Kind] = (),
    called: str | None = None,
) -> list[JobRow]:
    """Jobs, newest first. `called`: a name, or the beginning of an id."""
    query = select(*columns_of(jobs, JobRow)).order_by(jobs.c.number.desc()).limit(limit)
    if state is not None:
        query = query.where(jobs.c.state == state)
    if kinds:
        query = query.where(jobs.c.kind.in_(kinds))
    if called is not None:
        has_prefix = jobs.c.id.startswith(called.lower(), autoescape=True)
        query = query.where(or_(jobs.c.name == called, has_prefix))
    return [JobRow(*row) for row in connection.execute(query)]


def live(connection: Connection) -> list[JobRow]:
    """Jobs that have not ended, oldest first."""
    query = select(*columns_of(jobs, JobRow)).where(jobs.c.state.in_(LIVE)).order_by(jobs.c.number)
    return [JobRow(*row) for row in connection.execute(query)]


def begin(connection: Connection, job: str, now: datetime) -> bool:
    """Marks a queued job as running; False if it was cancelled meanwhile."""
    done = connection.execute(
        update(jobs)
        .where(jobs.c.id == job, jobs.c.state == "queued")
        .values(state="running", started_at=now, finished_at=None, error=None, attempts=jobs.c.attempts + 1)
    )
    return bool(done.rowcount)


def end(connection: Connection, job: str, state: State, now: datetime, error: str | None = None) -> bool:
    """Ends a job that has not ended; False if it has."""
    done = connection.execute(
        update(jobs)
        .where(jobs.c.id == job, jobs.c.state.in_(LIVE))
        .values(state=state, finished_at=now, error=error)
    )
    return bool(done.rowcount)


def requeue(connection: Connection, job: str) -> bool:
    """Puts a stopped job into the queue again; False if it is in another state."""
    done = connection.execute(
        update(jobs)
        .where(jobs.c.id == job, jobs.c.state.in_(STOPPED))
        .values(state="queued", finished_at=None, error=None)
    )
    return bool(done.rowcount)


def interrupt(connection: Connection, now: datetime) -> int:
    """Marks every running job as interrupted, at the start of a process; returns their number."""
    done = connection.execute(
        update(jobs)
        .where(jobs.c.state == "running")
        .values(state="interrupted", finished_at=now, error=INTERRUPTED)
    )
    return int(done.rowcount)


def remove(connection: Connection, job: str) -> bool:
    """Removes a job that has ended; False if it has not."""
    done = connection.execute(delete(jobs).where(jobs.c.id == job, jobs.c.state.not_in(LIVE)))
    return bool(done.rowcount)
