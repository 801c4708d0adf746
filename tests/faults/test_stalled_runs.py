"""A disk or database that fails in the middle of a run: it waits, says for what, and goes on to the same model."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url

from coordinator.context.services import Services
from coordinator.db import events, rounds
from coordinator.db import runs as rows
from coordinator.db.rounds import RoundRow
from coordinator.rounds.fleet import (
    Answer,
    Model,
    Silence,
    Terms,
)
from coordinator.rounds.plan import Task
from coordinator.runs.service import RunService
from coordinator.scheduling.deployments import Deployment
from edge_client.wire import arrays
from tests.coordinator.test_runs import DIGITS, UNKNOWN
from tests.support.databases import database_url, postgres
from tests.support.fake_devices import FakeDevices
from tests.support.proxies import Line
from tests.support.services import services_in
from tests.support.small_disk import fill, mounted, read_only, small_disk, unmounted

__all__ = ["database_url"]

pytestmark = pytest.mark.slow

LONG_SECONDS = 600.0

Failure = AbstractContextManager[None]
"""While it is entered, the disk or the database fails."""


class Disturbance:
    """Begins once, in the run's thread, and is ended by the test."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure
        self.begun = threading.Event()

    def begin(self) -> None:
        if not self.begun.is_set():
            self._failure.__enter__()
            self.begun.set()

    def end(self) -> None:
        self._failure.__exit__(None, None, None)


class Disturbed(FakeDevices):
    """Devices whose answers to a round find a coordinator whose disk or database fails. A round is taken up again as it was."""

    def __init__(
        self, services: Services, deployment: Deployment, disturbances: Mapping[int, Disturbance]
    ) -> None:
        super().__init__(services, deployment)
        self._disturbances = disturbances

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        run, number = self.deployment.run, tasks[0].message.round
        found: RoundRow | None = self._services.database.read(lambda at: rounds.find_round(at, run, number))
        if found is None:
            super().submit(tasks, model, terms)
        self._tasks, self._terms = tasks, terms

    def results(self, excluded: Collection[int] = ()) -> Iterator[Answer | Silence]:
        yield from super().results(excluded)
        disturbance = self._disturbances.get(self._tasks[0].message.round)
        if disturbance is not None:
            disturbance.begin()


def document(failures: int) -> dict[str, Any]:
    """A run that meets one in each round after its first."""
    federation = {**UNKNOWN["federation"], "rounds": failures + 2}
    return {**UNKNOWN, "federation": federation, "strategy": {"name": "fedadam"}}


def row_of(services: Services, run: str) -> Any:
    return services.database.read(partial(rows.find, run=run))


def reasons(services: Services, run: str) -> list[str]:
    result = services.database.read(lambda at: events.since(at, 0, 1000, run))
    return [row.values["reason"] for row in result if row.event == "run_stalled"]


@contextmanager
def failing_writes(number: int) -> Iterator[None]:
    """Every blob that is written meets this error, as of a disk that answers no more."""
    with pytest.MonkeyPatch.context() as patch:

        def failed(path: Path, *given: Any) -> str:
            raise OSError(number, "as the disk says it", str(path))

        patch.setattr(arrays, "write", failed)
        yield


@contextmanager
def locked(url: str) -> Iterator[None]:
    """By another process, for longer than writes wait."""
    engine = create_engine(url, connect_args={"check_same_thread": False})
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield
        connection.rollback()
    engine.dispose()


@contextmanager
def cut(line: Line) -> Iterator[None]:
    line.cut()
    yield
    line.mend()


def test_a_run_waits_out_one_failure_after_another(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.runs.service._AGAIN_SECONDS", 0.05)
    monkeypatch.setattr("coordinator.db.store.PATIENCE_SECONDS", 0.2)
    with ExitStack() as stack:
        database: Failure = locked(database_url)
        if database_url.startswith("postgresql"):
            line = stack.enter_context(Line(("127.0.0.1", postgres().port)))
            database_url = make_url(database_url).set(port=line.address[1]).render_as_string()
            database = cut(line)
        home = tmp_path / "home"
        disk = stack.enter_context(small_disk(tmp_path / "disk", 16))
        blobs = home / "blobs"
        stack.enter_context(mounted(disk, blobs))
        failures: list[tuple[Failure, tuple[str, ...]]] = [
            (read_only(disk), (str(blobs), "EROFS", "mount it writable again")),
            (unmounted(disk, blobs), (str(blobs), "ENOENT", "mount it, or put it back")),
            (failing_writes(errno.EIO), (str(blobs), "EIO", "check the disk")),
            (failing_writes(errno.EACCES), (str(blobs), "EACCES", "access")),
            (database, ("the database: ", "; ")),
        ]
        services = stack.enter_context(services_in(home, database_url, patience_seconds=0.2))
        disturbances = {2 + at: Disturbance(failure) for at, (failure, _) in enumerate(failures)}
        service = RunService(services, lambda *given: Disturbed(given[0], given[1], disturbances))
        run = service.create(document(len(failures)))
        reported_before = 0
        for disturbance, (failure, words) in zip(disturbances.values(), failures, strict=True):
            assert disturbance.begun.wait(LONG_SECONDS), row_of(services, run).error
            try:
                if failure is not database:
                    until(
                        lambda reported_before=reported_before: len(reasons(services, run)) > reported_before
                    )  # type: ignore[misc]
                assert not service.join(run, 0.5)
            finally:
                disturbance.end()
            until(lambda reported_before=reported_before: len(reasons(services, run)) > reported_before)  # type: ignore[misc]
            assert all(word in reasons(services, run)[reported_before] for word in words), reasons(
                services, run
            )
            reported_before = len(reasons(services, run))
        assert service.join(run, LONG_SECONDS)
        row = row_of(services, run)
        assert (row.state, row.error) == ("finished", None)
        assert row.params == undisturbed(tmp_path / "undisturbed", len(failures))


def undisturbed(home: Path, failures: int) -> str:
    """The model of the run that met none of them."""
    with services_in(home) as services:
        service = RunService(services, lambda *given: FakeDevices(*given[:2]))
        run = service.create(document(failures))
        assert service.join(run, LONG_SECONDS)
        return str(row_of(services, run).params)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_SECONDS
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_worker_without_room_for_the_data_is_started_again(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.runs.service._AGAIN_SECONDS", 0.05)
    home = tmp_path / "home"
    with small_disk(home / "runs", 4) as disk, services_in(home, database_url) as services:
        fill(disk / "filler", leave_bytes=400_000)  # of the 460,000 that the images take
        service = RunService(services, lambda *given: FakeDevices(*given[:2]))
        run = service.create({**DIGITS, "federation": {**DIGITS["federation"], "rounds": 1}})
        until(lambda: bool(reasons(services, run)))
        (disk / "filler").unlink()
        assert service.join(run, LONG_SECONDS)
        row = row_of(services, run)
        assert (row.state, row.error) == ("finished", None)
        (reason,) = reasons(services, run)
        assert str(disk) in reason and "free some space there" in reason
