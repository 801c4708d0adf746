"""SIGKILL of the coordinator, anywhere: no acknowledged update is lost, and the model comes out the same.

Three daemons train, all of them in every round, so that every round's accepted set is the same whatever
happens. One run goes undisturbed; then the same experiment goes over the same devices while the coordinator
is killed at every named failpoint of intake and commit, and at points drawn by a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from sqlalchemy import select

from coordinator import failpoints
from coordinator.db.tables import events, secure_messages, updates
from coordinator.demos.demo_fleet import client_data, device_config
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from coordinator.experiments.experiment import resolve
from coordinator.experiments.schema import Experiment
from edge_client.outbox import Ledger
from edge_client.state import State
from edge_client.wire import arrays
from tests.support import databases
from tests.support.cli import CACHE
from tests.support.long import extended
from tests.support.processes import HANGS_SECONDS
from tests.support.stored import rows
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUNTIMES = {"north": "litert", "south": "litert", "west": "torch"}

# Each failpoint at its first moment in a round or, by turns, at its last: of three uploads, or of one close.
POINTS = [
    f"{name}:{1 if place % 2 else 3 if name.startswith('intake') else 2}"
    for place, name in enumerate(failpoints.NAMES)
]
SOME_POINTS = ["intake.blob_stored:2", "commit.done:1"]
RANDOM_KILLS = 1
SECURE = {"secure_aggregation": True, "clip_norm": 0.05, "value_bits": 32, "threshold": 1.0}
SECURE_POINTS = [f"secure.{what}:{stage}" for stage in range(1, 6) for what in ("closed", "answered")]
"""Of one group, so each stage is closed once in a round."""


def experiment(
    rounds: int, strategy: str = "fedadam", privacy: Mapping[str, Any] | None = None, **federation: Any
) -> Experiment:
    document = {
        "name": "killed",
        "seed": 3,
        # A name the coordinator knows no data for: so that it starts quickly, with nothing to evaluate on.
        "data": {"dataset": "readings", "input_shape": [8, 8], "classes": 10},
        "model": {"name": "logreg"},
        "federation": {
            "clients": 3,
            "rounds": rounds,
            "min_updates": 3,
            "runtimes": {"litert": 2, "torch": 1},
            "deadline_seconds": 600,
            **federation,
        },
        "local": {"steps": 3, "lr": 0.1},
        "strategy": {"name": strategy},
        "devices": {"patience_seconds": 600},
        "privacy": privacy or {},
    }
    return resolve(document, "killed", "devices")


@contextmanager
def federation(folder: Path, environment: Mapping[str, str]) -> Iterator[LocalFleet]:
    """A coordinator and the three daemons, at work."""
    # A coordinator that starts again on a busy machine may be away for longer than a device's silence is borne by default.
    shared = {"FEDLOOP_CACHE_DIR": str(CACHE), "FEDLOOP_LEASE_SECONDS": str(HANGS_SECONDS)}
    with local_fleet(folder, environment={**shared, **environment}) as fleet:
        digits = resolve({"data": {"partition": "iid"}, "federation": {"clients": len(RUNTIMES)}}, "digits")
        for (name, runtime), share in zip(RUNTIMES.items(), client_data(digits), strict=True):
            fleet.add(name, device_config(runtime, "readings"), share).start()
        yield fleet


@pytest.fixture(scope="module")
def on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    with federation(tmp_path_factory.mktemp("killed"), {}) as fleet:
        yield fleet


@pytest.mark.parametrize(
    ("points", "random_kills", "rounds"),
    [
        (SOME_POINTS, 0, len(SOME_POINTS) + 1),
        *extended((POINTS, RANDOM_KILLS, len(POINTS) + RANDOM_KILLS + 4)),
    ],
    ids=["two points", "every point"],
)
def test_killed_at_failpoints_and_anywhere_the_model_is_the_same(
    on_sqlite: LocalFleet, points: list[str], random_kills: int, rounds: int
) -> None:
    expected = undisturbed(on_sqlite, experiment(rounds))
    disturbed(on_sqlite, expected, experiment(rounds), points, random_kills)


@pytest.mark.parametrize(
    "points",
    [["secure.closed:3", "secure.answered:3"], *extended(SECURE_POINTS)],
    ids=lambda points: f"{len(points)} points",
)
def test_secure_sums_survive_a_kill_at_any_stage(on_sqlite: LocalFleet, points: list[str]) -> None:
    """Devices round by chance, to 32 bits here: models are as close as that."""
    requested = experiment(len(points) + 1, "fedavg", privacy=SECURE)
    expected = undisturbed(on_sqlite, requested)
    disturbed(on_sqlite, expected, requested, points, 0, atol=1e-7)
    left = select(secure_messages.c.task).where(secure_messages.c.kind >= 0)
    assert rows(f"sqlite:///{on_sqlite.home / 'fedloop.db'}", left) == []


@pytest.mark.extended
def test_an_asynchronous_run_that_is_killed_ends_in_the_same_model(on_sqlite: LocalFleet) -> None:
    """The buffer has room for all three, so that it takes the same updates whatever happens."""
    requested = experiment(len(SOME_POINTS) + 2, mode="async", buffer=3, concurrency=3)
    expected = undisturbed(on_sqlite, requested)
    disturbed(on_sqlite, expected, requested, SOME_POINTS, 0)


def test_fedbuff_over_daemons_goes_on_without_the_slowest(on_sqlite: LocalFleet) -> None:
    requested = experiment(6, "fedbuff", min_updates=1, buffer=2, concurrency=3)
    run = on_sqlite.client.post("/runs", {"experiment": requested.to_toml()})["id"]
    until_finished(on_sqlite, run)
    records = on_sqlite.client.get(f"/runs/{run}/report")["rounds"]
    assert [row["accepted"] for row in records] == [2] * 6
    assert (records[0]["selected"], records[0]["staleness_max"]) == (3, 0)
    assert all(row["staleness_max"] < row["round"] for row in records)
    url = f"sqlite:///{on_sqlite.home / 'fedloop.db'}"
    mine = select(updates.c.round, updates.c.device).where(updates.c.run == run)
    assert len(rows(url, mine)) >= 12


@pytest.mark.extended
def test_an_update_that_was_damaged_while_the_coordinator_was_away_is_trained_once_more(
    on_sqlite: LocalFleet,
) -> None:
    """By the daemon as it is, which thinks that it is done with the task: the model comes out the same."""
    damaged_in_between(on_sqlite, f"sqlite:///{on_sqlite.home / 'fedloop.db'}")


def damaged_in_between(fleet: LocalFleet, url: str) -> None:
    expected = undisturbed(fleet, experiment(2))
    fleet.coordinator.stop()
    fleet.serve()
    run = fleet.client.post("/runs", {"experiment": experiment(2).to_toml()})["id"]
    fleet.coordinator.kill()
    fleet.serve({"FEDLOOP_FAILPOINT": "round.closed:2"}, wait=False)
    assert fleet.coordinator.wait(HANGS_SECONDS) == -9
    mine = select(updates).where(updates.c.run == run, updates.c.round == 2).order_by(updates.c.device)
    damaged, *sound = rows(url, mine)
    blob = fleet.home / "blobs" / damaged.blob
    content = bytearray(blob.read_bytes())
    content[-1] ^= 0x40
    blob.write_bytes(content)
    fleet.serve()
    until_finished(fleet, run)
    report = fleet.client.get(f"/runs/{run}/report")
    assert report["final"]["model_sha256"] == expected["final"]["model_sha256"]
    assert [row["accepted"] for row in report["rounds"]] == [3, 3]
    result = select(events.c.device).where(events.c.run == run, events.c.event == "update_damaged")
    assert [row.device for row in rows(url, result)] == [damaged.device]
    again = {row.device: row.accepted_at for row in rows(url, mine)}
    assert again == {row.device: row.accepted_at for row in sound} | {damaged.device: again[damaged.device]}
    assert again[damaged.device] > damaged.accepted_at


@pytest.mark.extended
def test_on_postgresql_too(tmp_path: Path) -> None:
    cluster = databases.postgres()
    url = cluster.create()
    with federation(tmp_path, {"FEDLOOP_DATABASE_URL": url}) as fleet:
        requested = experiment(len(SOME_POINTS) + 2)
        expected = undisturbed(fleet, requested)
        disturbed(fleet, expected, requested, SOME_POINTS, 0, url)
        damaged_in_between(fleet, url)


def undisturbed(fleet: LocalFleet, requested: Experiment) -> dict[str, Any]:
    """The report of a run that nobody disturbs."""
    run = fleet.client.post("/runs", {"experiment": requested.to_toml()})["id"]
    until_finished(fleet, run)
    report: dict[str, Any] = fleet.client.get(f"/runs/{run}/report")
    assert [row["accepted"] for row in report["rounds"]] == [3] * requested.federation.rounds
    return report


def disturbed(
    fleet: LocalFleet,
    expected: dict[str, Any],
    requested: Experiment,
    points: list[str],
    random_kills: int,
    url: str | None = None,
    atol: float = 0.0,
) -> None:
    """The same run again with kills in between; everything promised is looked for after each. `atol`: how far params may be from expected."""
    url = url or f"sqlite:///{fleet.home / 'fedloop.db'}"
    run = fleet.client.post("/runs", {"experiment": requested.to_toml()})["id"]
    fleet.coordinator.kill()
    for point in points:
        fleet.serve({"FEDLOOP_FAILPOINT": point}, wait=False)
        assert fleet.coordinator.wait(HANGS_SECONDS) == -9, f"{point} was never reached"
        nothing_acknowledged_is_lost(fleet, run, url)
    draw = random.Random(11)
    for _ in range(random_kills):
        fleet.serve()
        seen, wanted = count_of_events(url), draw.randint(1, 9)
        until(lambda seen=seen, wanted=wanted: count_of_events(url) >= seen + wanted)  # type: ignore[misc]
        fleet.coordinator.kill()
        nothing_acknowledged_is_lost(fleet, run, url)
    fleet.serve()
    until_finished(fleet, run)
    report = fleet.client.get(f"/runs/{run}/report")
    told = fleet.client.get(f"/runs/{run}/events")["events"]
    silent = [each for each in told if each["event"] in ("client_silent", "update_rejected")]
    assert [row["accepted"] for row in report["rounds"]] == [3] * requested.federation.rounds, silent
    if atol:
        params = [
            arrays.read(fleet.home / "blobs" / each["final"]["model_sha256"]) for each in (report, expected)
        ]
        for name, values in params[1].items():
            np.testing.assert_allclose(params[0][name], values, rtol=0, atol=atol)
    else:
        assert report["final"]["model_sha256"] == expected["final"]["model_sha256"]
    received = [each for each in events_of(url, run) if each == "round_committed"]
    assert len(received) == requested.federation.rounds, "a commit was told twice, or never"
    nothing_acknowledged_is_lost(fleet, run, url)
    no_worker_without_a_coordinator(fleet)


def nothing_acknowledged_is_lost(fleet: LocalFleet, run: str, url: str) -> None:
    """Every update that a device was told is accepted has its row, and the blob of the open round's."""
    kept = {(row.round, row.sent_sha256) for row in rows(url, select(updates).where(updates.c.run == run))}
    for name in RUNTIMES:
        with closing(State(fleet.device_folder(name) / "state")) as state:
            delivered = {
                (entry.round, entry.sha256)
                for entry in Ledger(state).entries()
                if entry.run == run and entry.outcome == "delivered"
            }
        assert delivered <= kept, (name, delivered - kept)


def no_worker_without_a_coordinator(fleet: LocalFleet) -> None:
    """Workers of every coordinator that was killed died with it."""
    for process in psutil.process_iter(["cmdline", "ppid", "environ"]):
        words = " ".join(process.info["cmdline"] or [])
        ours = (process.info["environ"] or {}).get("FEDLOOP_PARENT_PID") is not None
        if ours and "coordinator.workers.worker" in words and str(fleet.folder) in words:
            assert process.info["ppid"] == fleet.coordinator.pid, words


def until_finished(fleet: LocalFleet, run: str) -> None:
    def ended() -> bool:
        state = fleet.client.get(f"/runs/{run}")
        assert state["state"] not in ("failed", "cancelled"), state
        return bool(state["state"] == "finished")

    until(ended)


def until(holds: Any) -> None:
    wait_until(holds, seconds=HANGS_SECONDS)


def count_of_events(url: str) -> int:
    return len(rows(url, select(events.c.id)))


def events_of(url: str, run: str) -> list[str]:
    return [row.event for row in rows(url, select(events.c.event).where(events.c.run == run))]
