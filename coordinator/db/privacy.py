"""Queries of the privacy ledger: what runs and devices have spent, and what a run has released of its open round.

Each function is one step of a transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, and_, func, insert, null, or_, select, update

from coordinator.db.tables import devices, privacy_ledgers, privacy_spending, runs


@dataclass(frozen=True)
class LedgerRow:
    """What a run has spent.

    Attributes:
        mechanism: `privacy.mechanism.Mechanism` as JSON.
        rounds: that are charged; epsilon: that they have spent.
        released: of the round behind the last committed one, once its noise is drawn: round, blob of its aggregate, figures.
    """

    run: str
    mechanism: Mapping[str, Any]
    rounds: int
    epsilon: float
    charged_at: datetime | None
    released: Mapping[str, Any] | None


def find(connection: Connection, run: str) -> LedgerRow | None:
    """The ledger of a run; None: it has none yet, or no differential privacy."""
    row = connection.execute(select(privacy_ledgers).where(privacy_ledgers.c.run == run)).one_or_none()
    return None if row is None else LedgerRow(**row._mapping)


def open_ledger(connection: Connection, run: str, mechanism: Mapping[str, Any]) -> LedgerRow:
    """The ledger of a run, made with this mechanism if it has none."""
    known = find(connection, run)
    if known is not None:
        return known
    made = LedgerRow(run, dict(mechanism), 0, 0.0, None, None)
    connection.execute(insert(privacy_ledgers).values(vars(made)))
    return made


def charge(connection: Connection, run: str, number: int, epsilon: float, now: datetime) -> None:
    """Charges the rounds up to this one; nothing if they are charged already."""
    connection.execute(
        update(privacy_ledgers)
        .where(privacy_ledgers.c.run == run, privacy_ledgers.c.rounds < number)
        .values(rounds=number, epsilon=epsilon, charged_at=now)
    )


def count_round(connection: Connection, run: str, number: int, names: Sequence[str]) -> None:
    """Counts a round for each of these devices, once."""
    known = set(
        connection.execute(select(privacy_spending.c.device).where(privacy_spending.c.run == run)).scalars()
    )
    added = [name for name in dict.fromkeys(names) if name not in known]
    if added:
        first = {"run": run, "rounds": 1, "first_round": number, "last_round": number}
        connection.execute(insert(privacy_spending), [{**first, "device": name} for name in added])
    again = [name for name in names if name in known]
    for at in range(0, len(again), _AT_ONCE):
        connection.execute(
            update(privacy_spending)
            .where(
                privacy_spending.c.run == run,
                privacy_spending.c.device.in_(again[at : at + _AT_ONCE]),
                privacy_spending.c.last_round < number,
            )
            .values(rounds=privacy_spending.c.rounds + 1, last_round=number)
        )


_AT_ONCE = 500
"""Names in a statement: databases limit their number."""


def keep_release(connection: Connection, run: str, released: Mapping[str, Any]) -> None:
    """Keeps what is released of the run's open round."""
    connection.execute(
        update(privacy_ledgers).where(privacy_ledgers.c.run == run).values(released=dict(released))
    )


def drop_release(connection: Connection, run: str) -> set[str]:
    """Forgets what was released of a round that is committed now; returns its blob."""
    row = find(connection, run)
    if row is None or row.released is None:
        return set()
    connection.execute(update(privacy_ledgers).where(privacy_ledgers.c.run == run).values(released=null()))
    return {row.released["blob"]}


def blobs_in_use(connection: Connection) -> set[str]:
    """Aggregates of rounds that are not committed."""
    query = select(privacy_ledgers.c.released).where(privacy_ledgers.c.released.is_not(None))
    return {released["blob"] for released in connection.execute(query).scalars()}


def resting(connection: Connection, run: str, number: int, separation: int) -> set[str]:
    """Devices that took part in one of the `separation` - 1 rounds before this one."""
    query = select(privacy_spending.c.device).where(
        privacy_spending.c.run == run,
        privacy_spending.c.last_round > number - separation,
        privacy_spending.c.last_round < number,
    )
    return set(connection.execute(query).scalars())


def count_devices(connection: Connection, run: str) -> int:
    """Devices that have spent something in a run."""
    query = select(func.count()).select_from(privacy_spending).where(privacy_spending.c.run == run)
    return int(connection.execute(query).scalar_one())


def enrolled(connection: Connection, project: str) -> int:
    """Active devices of a project."""
    active = select(func.count()).select_from(devices).where(devices.c.project == project)
    return int(connection.execute(active.where(devices.c.state == "active")).scalar_one())


def of_devices(connection: Connection, run: str, limit: int, after: str | None = None) -> list[str]:
    """At most `limit` devices that have spent something in a run, by id, after the id `after`."""
    query = select(privacy_spending.c.device).where(privacy_spending.c.run == run)
    if after is not None:
        query = query.where(privacy_spending.c.device > after)
    return list(connection.execute(query.order_by(privacy_spending.c.device).limit(limit)).scalars())


def spent_by(connection: Connection, names: Sequence[str]) -> list[Row[Any]]:
    """What these devices have spent in all runs, the newest run first: columns of both tables, and of the run and the device the name."""
    query = (
        select(
            privacy_spending,
            privacy_ledgers.c.mechanism,
            privacy_ledgers.c.rounds.label("run_rounds"),
            privacy_ledgers.c.epsilon.label("run_epsilon"),
            runs.c.name.label("run_name"),
            runs.c.experiment["data"]["dataset"].as_string().label("dataset"),
            devices.c.name.label("device_name"),
        )
        .select_from(
            privacy_spending.join(privacy_ledgers, privacy_ledgers.c.run == privacy_spending.c.run)
            .join(runs, runs.c.id == privacy_spending.c.run)
            .join(devices, devices.c.id == privacy_spending.c.device)
        )
        .where(privacy_spending.c.device.in_(names))
        .order_by(runs.c.created_at.desc(), privacy_spending.c.run)
    )
    return list(connection.execute(query))


def newest_runs(connection: Connection, limit: int, before: Row[Any] | None = None) -> Sequence[Row[Any]]:
    """At most `limit` runs that have a ledger, the newest first, with its columns. `before`: only those that come after this run."""
    columns = (runs.c.id, runs.c.name, runs.c.state, runs.c.experiment)
    ledger = (privacy_ledgers.c.mechanism, privacy_ledgers.c.rounds, privacy_ledgers.c.epsilon)
    query = (
        select(*columns, *ledger, privacy_ledgers.c.charged_at)
        .join(privacy_ledgers, privacy_ledgers.c.run == runs.c.id)
        .order_by(runs.c.created_at.desc(), runs.c.id)
        .limit(limit)
    )
    if before is not None:
        is_older = runs.c.created_at < before.created_at
        query = query.where(
            or_(is_older, and_(runs.c.created_at == before.created_at, runs.c.id > before.id))
        )
    return list(connection.execute(query))


def of_dataset(connection: Connection, project: str, dataset: str) -> list[Row[Any]]:
    """Ledgers with charged rounds of a project's runs on a data set, the oldest run first."""
    query = (
        select(privacy_ledgers, runs.c.name.label("run_name"))
        .join(runs, runs.c.id == privacy_ledgers.c.run)
        .where(runs.c.project == project, privacy_ledgers.c.rounds > 0)
        .where(runs.c.experiment["data"]["dataset"].as_string() == dataset)
        .order_by(runs.c.created_at, runs.c.id)
    )
    return list(connection.execute(query))
