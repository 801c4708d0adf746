"""A coordinator that means harm, or is broken: the device takes no damage, and what it is told stays plain words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_client.daemon.heartbeat import WakeupPipe
from edge_client.steps import LONGEST_SLEEP_SECONDS
from edge_client.train.process import TrainingFailed
from edge_client.transport.failures import LONGEST_WAIT_SECONDS, SOON_FOR_SECONDS, SOON_SECONDS, Unreachable
from edge_client.transport.link import Link, download, pinned_context
from edge_client.wire.device import BlobRef, to_json
from tests.support.edge import Daemon, daemon, enrolled
from tests.support.fake_coordinator import FakeCoordinator


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().running() as fake:
        yield fake


@pytest.fixture
def edge(coordinator: FakeCoordinator, tmp_path: Path) -> Daemon:
    enrolled(coordinator, tmp_path)
    return daemon(tmp_path)


def reported(folder: Path) -> str:
    return (folder / "status.json").read_text("utf-8")


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "../../identity"},
        {"task": ""},
        {"task": "a\n"},
        {"run": "/etc/passwd"},
        {"params": BlobRef("../state.db", 4)},
        {"params": BlobRef("A" * 64, 4)},
        {"params": BlobRef("a" * 64, -1)},
        {"params": BlobRef("a" * 64, 2**70)},
        {"round": 2**70},
        {"round": -1},
        {"lease_seconds": 0.0},
    ],
)
def test_an_offer_that_is_none_is_not_taken_and_does_no_harm(
    coordinator: FakeCoordinator, edge: Daemon, tmp_path: Path, changes: dict[str, Any]
) -> None:
    before = {path for path in tmp_path.rglob("*") if path.name != "status.json"}
    coordinator.offer(**changes)
    edge.ticks(
        lambda: "the coordinator offers" in reported(tmp_path) or "cannot be parsed" in reported(tmp_path)
    )
    assert edge.executor.state.task() is None
    assert {path for path in tmp_path.rglob("*") if path.name != "status.json"} <= before | {
        tmp_path / name for name in ("state.db-wal", "state.db-shm")
    }
    sound = coordinator.offer()
    edge.ticks(lambda: sound.task in coordinator.accepted)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"wire": ' * 5_000 + b"1" + b"}" * 5_000,
        b'{"wire": "1.2", "next_seconds": 1, "next_seconds": 2}',
        b'{"wire": "1.2", "next_seconds": 1' + b"0" * 5000 + b"}",
        b'{"wire": "1.2", "next_seconds": NaN}',
        b"\xff\xfe",
        b"{" + b" " * (1024 * 1024) + b"}",
    ],
)
def test_an_answer_that_is_none_is_a_failure_to_reach_it(
    edge: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr("tests.support.fake_coordinator._Handler._check_in", lambda *_: content)
    edge.agent.tick()
    assert json.loads(reported(tmp_path))["state"] == "unreachable"


def test_a_task_nested_too_deep_to_be_stored_is_not_taken(
    coordinator: FakeCoordinator, edge: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {**to_json(coordinator.offer()), "message": {"rule": "deep"}}
    answer = json.dumps({"wire": "1.2", "next_seconds": 1.0, "task": task})
    deep = answer.replace('"deep"', "[" * 400 + "]" * 400).encode()
    monkeypatch.setattr("tests.support.fake_coordinator._Handler._check_in", lambda *_: deep)
    edge.agent.tick()
    assert "nested too deep" in reported(tmp_path)
    assert edge.executor.state.task() is None


def test_downloads_are_weighed_before_the_first_byte(
    coordinator: FakeCoordinator, edge: Daemon, tmp_path: Path
) -> None:
    for size in (10**10, 2**52):
        offer = coordinator.offer(params=BlobRef("a" * 64, size))
        edge.ticks(lambda offer=offer: offer.task in coordinator.declined)
        assert coordinator.declined[offer.task].code == "limits"
    assert "download_bytes" in coordinator.declined[offer.task].words
    assert not any((tmp_path / "blobs").iterdir())


def test_more_than_the_disk_has_free_is_declined(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path, (f"download_bytes={2**52}",))
    offer = coordinator.offer(params=BlobRef("a" * 64, 2**51))
    edge.ticks(lambda: offer.task in coordinator.declined)
    assert coordinator.declined[offer.task].code == "limits"
    assert "disk has" in coordinator.declined[offer.task].words


def test_more_bytes_than_were_announced_are_not_stored(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    who = enrolled(coordinator, tmp_path)
    blob = coordinator.add_blob(b"x" * 5_000_000)
    link = Link(who.url, pinned_context(who.ca_pem, who.credentials))
    with pytest.raises(Unreachable, match="have another hash"):
        download(link, BlobRef(blob.sha256, 1000), tmp_path / "blob")
    assert not (tmp_path / "blob").exists() and not (tmp_path / "blob.part").exists()


def test_names_and_refusals_are_shown_as_plain_words(
    coordinator: FakeCoordinator, edge: Daemon, tmp_path: Path
) -> None:
    offer = coordinator.offer(run_name="demo\nMAINPID=1\x1b]0;owned\x07")
    edge.ticks(lambda: offer.task in coordinator.accepted)
    edge.ticks(lambda: bool(edge.executor.ledger.entries()))
    assert edge.executor.ledger.entries()[0].run_name == "demo MAINPID=1 ]0;owned "
    assert all("\n" not in each and "\x1b" not in each for each in edge.reported)


def test_a_coordinator_cannot_send_a_device_away_for_good(
    coordinator: FakeCoordinator, edge: Daemon, tmp_path: Path
) -> None:
    coordinator.next_seconds = 1e300
    begun = edge.clock.now()
    edge.ticks(lambda: len(coordinator.checkins) == 2, most=500)
    assert edge.clock.now() - begun <= LONGEST_WAIT_SECONDS + 1


def test_a_second_result_for_one_task_is_a_second_entry(
    coordinator: FakeCoordinator, edge: Daemon, tmp_path: Path
) -> None:
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.accepted)
    del coordinator.accepted[offer.task]
    coordinator.received.clear()
    coordinator.tasks.append(offer)
    edge.ticks(lambda: offer.task in coordinator.accepted)
    first, second = edge.executor.ledger.entries()
    assert first.sha256 != second.sha256
    assert {first.outcome, second.outcome} == {"delivered"}
    assert edge.executor.ledger.payload(second) == coordinator.accepted[offer.task]


def test_the_ledger_says_what_was_done_to_a_result(coordinator: FakeCoordinator, edge: Daemon) -> None:
    for treated in ((), ("clipped to norm 1", "noise of deviation 0.5")):
        edge.training.treated = treated
        offer = coordinator.offer()
        edge.ticks(lambda offer=offer: offer.task in coordinator.accepted)
    edge.ticks(lambda: len(edge.executor.ledger.entries()) == 2)
    assert [entry.treated for entry in edge.executor.ledger.entries()] == [
        "nothing clipped, nothing noised",
        "clipped to norm 1, noise of deviation 0.5",
    ]


def test_words_that_quote_data_stay_on_the_device(
    coordinator: FakeCoordinator, edge: Daemon, tmp_path: Path
) -> None:
    edge.training.failure = TrainingFailed("no_data", "/home/ann/salaries.csv: 81000 EUR", "unreadable")
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.declined)
    assert coordinator.declined[offer.task].words == "unreadable"
    edge.ticks(lambda: "81000 EUR" in reported(tmp_path))


def test_a_blob_damaged_by_a_power_cut_is_fetched_anew(
    coordinator: FakeCoordinator, edge: Daemon, tmp_path: Path
) -> None:
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.accepted)
    stored = tmp_path / "blobs" / offer.params.sha256
    stored.write_bytes(bytes(offer.params.size_bytes))
    again = daemon(tmp_path)
    further = coordinator.offer(round=2)
    again.ticks(lambda: further.task in coordinator.accepted)
    assert stored.read_bytes() == coordinator.blobs[offer.params.sha256]


@pytest.mark.slow
def test_a_coordinator_that_held_a_device_is_polled_again_within_seconds(
    coordinator: FakeCoordinator, edge: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    retries: list[tuple[float, float]] = []

    def wait(seconds: float) -> bool:
        if seconds == LONGEST_SLEEP_SECONDS and edge.clock.now() >= edge.agent.retry_at:
            return WakeupPipe.wait(edge.wake, 30.0)  # a check-in is held: its answer wakes
        retries.append((edge.clock.now(), seconds))
        edge.clock.seconds += seconds
        return False

    monkeypatch.setattr(edge.wake, "wait", wait)
    coordinator.hold = True
    edge.ticks(lambda: len(coordinator.checkins) > 1)
    coordinator.refusals["/checkin"] = (503, "restarting")
    begun = edge.clock.now()
    edge.ticks(lambda: edge.clock.now() - begun > 3600, most=2000)
    first = [seconds for at, seconds in retries if at - begun < SOON_FOR_SECONDS]
    assert len(first) >= SOON_FOR_SECONDS / SOON_SECONDS and max(first) <= SOON_SECONDS
    assert max(seconds for _, seconds in retries) > 4 * SOON_SECONDS  # a long outage is not hammered


def test_a_task_left_by_software_of_another_version_is_let_go(edge: Daemon, tmp_path: Path) -> None:
    with edge.executor.state.change() as write:
        write.execute("INSERT INTO task VALUES (1, '{\"task\": 1}')")
    again = daemon(tmp_path)
    again.agent.tick()
    assert again.executor.state.task() is None
