"""The state of runs and their latest rounds, to explain why a device does or does not take part."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from coordinator.db.rounds import of_round
from coordinator.db.tables import LIVE_RUNS, rounds, runs, tasks


@dataclass(frozen=True)
class LastRound:
    """The latest round of a run: the size of its cohort, and of the population it was drawn from."""

    number: int
    state: str
    cohort: int
    population: int


def last_round(connection: Connection, run: str) -> LastRound | None:
    row = connection.execute(
        select(rounds.c.number, rounds.c.state, rounds.c.population)
        .where(rounds.c.run == run)
        .order_by(rounds.c.number.desc())
        .limit(1)
    ).one_or_none()
    if row is None:
        return None
    cohort = select(func.count()).select_from(tasks).where(of_round(run, row.number, "train"))
    return LastRound(row.number, row.state, int(connection.execute(cohort).scalar_one()), row.population)


@dataclass(frozen=True)
class RunRow:
    """A run's name and state; `error` says why it failed."""

    id: str
    name: str
    state: str
    error: str | None


def recent_runs(connection: Connection, ended_runs: int, only: str | None = None) -> list[RunRow]:
    """Live runs, then the last `ended_runs` ended ones, each newest first; or only the run with this id."""
    newest = select(runs.c.id, runs.c.name, runs.c.state, runs.c.error).order_by(runs.c.created_at.desc())
    if only is not None:
        return [RunRow(**row._mapping) for row in connection.execute(newest.where(runs.c.id == only))]
    live = connection.execute(newest.where(runs.c.state.in_(LIVE_RUNS)))
    ended = connection.execute(newest.where(runs.c.state.not_in(LIVE_RUNS)).limit(ended_runs))
    return [RunRow(**row._mapping) for row in (*live, *ended)]
