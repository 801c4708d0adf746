"""A coordinator whose disk fills up while results come: 507, nothing half kept, and with room again it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator.db.tables import tasks, updates
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from strategies.update import Update
from tests.support import noop
from tests.support.device_client import RawDevice
from tests.support.federation import steps_of
from tests.support.long import extended
from tests.support.small_disk import fill, free_bytes, small_disk
from tests.support.stored import rows, url_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

MODEL_BYTES = 6_000_000


@pytest.fixture
def fleet(tmp_path: Path, served_on: Mapping[str, str]) -> Iterator[LocalFleet]:
    """A coordinator that has 64 MB."""
    with (
        small_disk(tmp_path / "coordinator", 64),
        local_fleet(tmp_path, environment=served_on) as served,
    ):
        yield served


@pytest.mark.extended
@pytest.mark.parametrize(
    "left_bytes", [0, *extended(2_000_000)], ids=["nothing at all", "too little for a result"]
)
def test_a_full_disk_refuses_results_until_there_is_room(fleet: LocalFleet, left_bytes: int) -> None:
    raw = RawDevice.enrol(fleet.device_url, fleet.client.post("/tokens")["token"], fleet.folder / "raw")
    daemon = noop.add_device(fleet, "a")
    daemon.start()
    raw.check_in(noop.checkin())
    # The daemon trains for a while, so that its result meets a disk that is full.
    run = noop.start(fleet, noop.experiment(MODEL_BYTES, rounds=2, steps=300))
    offer = raw.task(noop.checkin(wait_seconds=20))
    task, payload = offer["task"], _result(raw, offer)
    _until(lambda: _leased(fleet) == 2, "the daemon has its task before there is no room to lease one")
    filler = fleet.home / "filler"
    fill(filler, leave_bytes=left_bytes)

    for _ in range(3):
        refused = raw.upload(task, payload)
        assert (refused.status, refused.code) == (507, "disk_full")
        assert _updates(fleet) == 0
        assert _part_bytes(fleet, task) == 0
    _until(lambda: _refused_uploads(fleet) > _of_task(fleet, task), "the daemon's result is refused too")
    assert _updates(fleet) == 0

    filler.unlink()
    answer = raw.upload(task, payload)
    assert (answer.status, answer.document["accepted"]) == (200, True)
    # The daemon tries again by itself; the next round shows that all is well.
    next_offer = raw.task(noop.checkin(wait_seconds=20))
    assert raw.upload(next_offer["task"], _result(raw, next_offer)).status == 200
    assert [line["accepted"] for line in noop.finish(fleet.client, run)] == [2, 2]
    assert fleet.coordinator.is_running() and daemon.is_running()
    assert free_bytes(fleet.home) > left_bytes


def _result(raw: RawDevice, offer: dict[str, Any]) -> bytes:
    """An update that changes nothing."""
    params = arrays.decode(raw.get(f"/blobs/{offer['params']['sha256']}").body)
    task = TaskMessage.from_json(offer["message"])
    delta = {name: 0 * value for name, value in params.items()}
    return encode_result(task, Update(delta, 1, steps_of(task, 1), 0.0))


def _leased(fleet: LocalFleet) -> int:
    return len(rows(url_of(fleet), select(tasks.c.id).where(tasks.c.state == "leased")))


def _updates(fleet: LocalFleet) -> int:
    return len(rows(url_of(fleet), select(updates.c.run)))


def _part_bytes(fleet: LocalFleet, task: str) -> int:
    part = fleet.home / "uploads" / f"{task}.part"
    return part.stat().st_size if part.exists() else 0


def _refused_uploads(fleet: LocalFleet) -> int:
    """How many uploads of anybody got a 507."""
    return len(_refusals(fleet))


def _of_task(fleet: LocalFleet, task: str) -> int:
    return sum(task in line["path"] for line in _refusals(fleet))


def _refusals(fleet: LocalFleet) -> list[dict[str, Any]]:
    lines = [line for line in fleet.coordinator.log.read_text().splitlines() if '"event": "request"' in line]
    requests = [json.loads(line) for line in lines]
    return [each for each in requests if each["status"] == 507 and "/upload" in each["path"]]


def _until(holds: Callable[[], bool], what: str, seconds: float = 600) -> None:
    wait_until(holds, lambda: f"not in {seconds:.0f} s: {what}", seconds)
