"""An accepted update whose bytes the disk has changed, cut or lost: it never counts, and its device is asked again."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select

from coordinator.db import events
from coordinator.db.store import Database
from coordinator.db.tables import updates
from coordinator.fleets.device import DeviceFleet
from coordinator.rounds.fleet import Answer, Silence
from coordinator.storage import blobs
from edge_client.wire import arrays
from strategies.update import Update
from tests.coordinator.test_uploads import OpenRound, decoded_delta
from tests.support.databases import database, database_url
from tests.support.device_world import TestDevice, serving
from tests.support.listening import Listening

__all__ = ["database", "database_url"]


@pytest.fixture
def opened(tmp_path: Path, database: Database) -> Iterator[OpenRound]:
    with serving(tmp_path, database, lease_seconds=1e6) as world:
        yield OpenRound(world)


def flip(path: Path) -> None:
    """One bit of the last value."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def lose(path: Path) -> None:
    path.unlink()


DAMAGE: list[Callable[[Path], None]] = [flip, cut, lose]


def accepted(opened: OpenRound, name: str) -> tuple[TestDevice, bytes, Path]:
    """A device, the result that was accepted of it, and where that lies."""
    device, task, payload = opened.leased(name)
    assert device.upload(task, payload).accepted
    return device, payload, opened.world.services.settings.home / "blobs" / arrays.sha256(payload)


def reasons_of(opened: OpenRound) -> list[tuple[str, str | None]]:
    rows = opened.world.services.database.read(lambda at: events.since(at, 0, 100))
    return [(row.event, row.device) for row in rows]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_update_counts_as_never_received_and_its_device_gets_the_task_again(
    opened: OpenRound, damage: Callable[[Path], None]
) -> None:
    device, payload, blob = accepted(opened, "a")
    damage(blob)
    _, other, _ = accepted(opened, "b")  # which closes the round
    listening = Listening(opened.fleet)
    offer = device.check_in(wait_seconds=50).task
    assert offer is not None and offer.round == 1
    assert listening.reported == [] and not blob.exists()
    assert device.upload(offer.task, payload).accepted  # it trained once more, to the same bytes
    result = {each.task.message.client: each for each in listening.until_reported()}
    for name, sent in {"a": payload, "b": other}.items():
        each = result[name]
        assert isinstance(each, Answer) and isinstance(each.verdict, Update)
        assert np.array_equal(each.verdict.delta["w"], decoded_delta(sent))
    assert reasons_of(opened) == [
        ("update_accepted", "a"),
        ("update_accepted", "b"),
        ("update_damaged", "a"),
        ("update_accepted", "a"),
    ]


def test_one_with_noise_of_its_device_is_lost(tmp_path: Path, database: Database) -> None:
    """A second one would have other noise, so that both together would tell more than the account says."""
    noise = {"mechanism": "local", "clip_norm": 1.0, "noise_multiplier": 1.0}
    with serving(tmp_path, database, lease_seconds=1e6) as world:
        opened = OpenRound(world, noise=noise)
        flip(accepted(opened, "a")[2])
        accepted(opened, "b")
        lost, kept = opened.fleet.results()
        assert isinstance(lost, Silence) and "would spend more privacy" in lost.reason
        assert isinstance(kept, Answer) and opened.devices["a"].check_in().task is None


def test_one_that_cannot_be_read_is_damaged(opened: OpenRound, monkeypatch: pytest.MonkeyPatch) -> None:
    device, payload, blob = accepted(opened, "a")
    accepted(opened, "b")
    read, broken = blobs.file_sha256, [blob]

    def bad_sector(path: Path) -> str:
        if path in broken:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(blobs, "file_sha256", bad_sector)
    listening = Listening(opened.fleet)
    offer = device.check_in(wait_seconds=50).task
    assert offer is not None
    broken.clear()
    assert device.upload(offer.task, payload).accepted
    assert len(listening.until_reported()) == 2


def test_the_next_process_finds_what_was_damaged_before_it(tmp_path: Path, database: Database) -> None:
    """Also past the round's deadline: a device that is asked again has as long as one that is asked first."""
    with serving(tmp_path, database, lease_seconds=1e6) as world:
        opened = OpenRound(world)
        _, payload, blob = accepted(opened, "a")
        accepted(opened, "b")
        flip(blob)
    with serving(tmp_path, database, lease_seconds=1e6) as again:
        again.clock.pass_seconds(5000)
        opened.world = again
        fleet = DeviceFleet(again.services, opened.deployment, patience_seconds=0)
        for name in ("a", "b"):
            TestDevice(again.url, name).check_in()
        opened.submit(fleet)
        listening = Listening(fleet)
        device = TestDevice(again.url, "a")
        again.services.deployments.add(opened.deployment)
        offer = device.check_in(wait_seconds=50).task
        assert offer is not None and offer.deadline_seconds == 600
        again.clock.pass_seconds(599)
        assert device.upload(offer.task, payload).accepted
        assert [type(each) for each in listening.until_reported()] == [Answer, Answer]


def test_a_device_that_does_not_come_back_is_silent_and_the_round_goes_on(opened: OpenRound) -> None:
    _, _, blob = accepted(opened, "a")
    accepted(opened, "b")
    flip(blob)
    listening = Listening(opened.fleet)
    while ("update_damaged", "a") not in reasons_of(opened):
        threading.Event().wait(0.01)
    opened.world.clock.pass_seconds(601)
    opened.world.services.signals.notify("run:r")
    result = {each.task.message.client: type(each) for each in listening.until_reported()}
    assert result == {"a": Silence, "b": Answer}
    query = select(updates.c.device)
    assert opened.world.services.database.read(lambda at: at.execute(query).scalars().all()) == ["b"]


def test_its_device_may_send_something_else_and_it_counts_once(opened: OpenRound) -> None:
    """As one whose client rule keeps a state: it moved on when the first was accepted."""
    from tests.coordinator.test_uploads import result_of

    device, _, blob = accepted(opened, "a")
    accepted(opened, "b")
    flip(blob)
    listening = Listening(opened.fleet)
    offer = device.check_in(wait_seconds=50).task
    assert offer is not None
    another = result_of(offer, value=0.25)
    assert device.upload(offer.task, another).accepted
    assert device.upload(offer.task, another).accepted
    result = {each.task.message.client: each for each in listening.until_reported()}
    assert isinstance(result["a"], Answer) and isinstance(result["a"].verdict, Update)
    assert np.array_equal(result["a"].verdict.delta["w"], decoded_delta(another))
    assert opened.count(updates.c.run) == 2
