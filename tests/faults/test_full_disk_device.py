"""A device whose disk is full: it says so, loses nothing it stored, and goes on by itself when there is room."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.edge_client.test_daemon import edge, enrolled, running
from tests.support import fake_coordinator
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.small_disk import fill, small_disk

pytestmark = pytest.mark.slow
MEGABYTES = 24


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", MEGABYTES) as folder:
        yield folder


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator(hold=True).running() as fake:
        yield fake


def test_a_task_that_does_not_fit_is_given_back_and_the_next_is_done(
    coordinator: FakeCoordinator, disk: Path
) -> None:
    state = disk / "state"
    enrolled(coordinator, state)
    large = coordinator.add_blob(bytes((MEGABYTES - 6) << 20))
    with running(state):
        first = coordinator.offer(params=large)
        coordinator.wait_for(lambda: first.task in coordinator.declined)
        assert coordinator.declined[first.task].code == "limits"
        assert "disk has" in coordinator.declined[first.task].words
        second = coordinator.offer()
        coordinator.wait_for(lambda: second.task in coordinator.accepted)
    assert any("disk has" in note for note in _status(state)["notes"])


def test_a_disk_that_fills_up_while_a_model_comes_gives_the_task_back(
    coordinator: FakeCoordinator, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, filler = disk / "state", disk / "filler"
    enrolled(coordinator, state)
    answer = fake_coordinator._Handler._blob

    def fills_first(handler: fake_coordinator._Handler, digest: str) -> tuple[int, bytes]:
        if digest == large.sha256:
            fill(filler, leave_bytes=1 << 20)
        return answer(handler, digest)

    monkeypatch.setattr(fake_coordinator._Handler, "_blob", fills_first)
    large = coordinator.add_blob(bytes(8 << 20))
    with running(state) as process:
        first = coordinator.offer(params=large, kind="evaluate")
        coordinator.wait_for(lambda: first.task in coordinator.declined)
        assert coordinator.declined[first.task].code == "limits"
        assert "No space left" in coordinator.declined[first.task].words
        assert not list((state / "blobs").glob("*.part"))
        filler.unlink()
        second = coordinator.offer()
        coordinator.wait_for(lambda: second.task in coordinator.accepted)
        assert process.poll() is None


def test_a_full_disk_stops_nothing_for_good(coordinator: FakeCoordinator, disk: Path) -> None:
    state, filler = disk / "state", disk / "filler"
    enrolled(coordinator, state)
    with running(state) as process:
        coordinator.wait_for(lambda: len(coordinator.checkins) > 0)
        fill(filler)
        # Small enough to be taken by somebody who does not look; nothing can be stored of it now.
        coordinator.offer()
        coordinator.wait_for(lambda: not coordinator.tasks)
        printed = edge(state, "status")
        assert "disk of the state folder is full" in printed.stdout, printed.stdout + printed.stderr
        assert process.poll() is None
        filler.unlink()
        found = coordinator.offer()
        coordinator.wait_for(lambda: found.task in coordinator.accepted, 120.0)
        assert process.poll() is None
    with sqlite3.connect(state / "state.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.extended
def test_a_finished_result_survives_a_disk_that_fills_up_before_it_is_delivered(
    coordinator: FakeCoordinator, disk: Path
) -> None:
    state, filler = disk / "state", disk / "filler"
    enrolled(coordinator, state)
    coordinator.refusals["/tasks/"] = (503, "busy")
    offer = coordinator.offer()
    with running(state) as process:
        coordinator.wait_for(lambda: _waiting(state) == 1)
        fill(filler)
        del coordinator.refusals["/tasks/"]
        assert process.poll() is None
        process.kill()
    filler.unlink()
    with running(state):
        coordinator.wait_for(lambda: offer.task in coordinator.accepted, 120.0)
    assert coordinator.acceptances == [offer.task]


def test_a_command_on_a_full_disk_says_so(coordinator: FakeCoordinator, disk: Path) -> None:
    state = disk / "state"
    enrolled(coordinator, state)
    fill(disk / "filler")
    done = edge(state, "pause")
    assert done.returncode == 1
    assert "its disk is full: free some space there" in done.stderr


def _waiting(state: Path) -> int:
    found: int = json.loads(edge(state, "status", "--json").stdout)["results_waiting"]
    return found


def _status(state: Path) -> dict[str, list[str]]:
    status: dict[str, list[str]] = json.loads((state / "status.json").read_text("utf-8"))
    return status
