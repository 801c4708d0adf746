"""SIGKILL of daemons, in the middle of training and in the middle of an upload.

Three devices, asked all in every round: one is never disturbed; one has so many rows that it is killed while it
trains; one reaches the coordinator by a line that stops half-way through its update, and is killed while it sends.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from sqlalchemy import select, update

from coordinator.db.tables import events, rounds, tasks, updates
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from coordinator.device_api.uploads import BLOCK_BYTES
from coordinator.operator.client import OperatorClient
from edge_client.daemon import status
from edge_client.outbox import Entry, Ledger
from edge_client.state import State
from tests.support import noop
from tests.support.arena import NO_LEASE_ENDS
from tests.support.processes import HANGS_SECONDS, Marked
from tests.support.proxies import Line
from tests.support.stored import change, rows, url_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

MODEL_BYTES = 8_000_000
OTHER_BYTES = 200_000
"""More than all that is sent besides an update: handshakes, check-ins, the frames of TLS."""

MANY_ROWS = 20_000
"""Minutes of training, of which nobody waits for the end."""

STARTED_SECONDS = 4.0
"""Processor time after which a training process is done with its imports."""

STEADY, TRAINS, SENDS = "steady", "trains", "sends"


@dataclass
class Trio:
    fleet: LocalFleet
    line: Line
    client: OperatorClient
    ids: dict[str, str]

    def start(self, rounds: int) -> str:
        """A run on all three, of which one update is enough at the deadline, but which waits long for absent ones; its id."""
        self.fleet.write_data(TRAINS, noop.rows(MANY_ROWS))
        self.line.stall_after(MODEL_BYTES // 2)
        for device in self.fleet.devices.values():
            if not device.is_running():
                device.start()
        document = noop.experiment(MODEL_BYTES, rounds, clients=3, min_updates=1, deadline_seconds=600)
        document["local"] = {"epochs": 1, "batch_size": 1, "lr": 0.001}
        document["devices"] = {"patience_seconds": 2 * HANGS_SECONDS}
        return noop.start(self.fleet, document)

    def kill_both(self) -> int:
        """Kills the one while it trains and the other while it sends; how much of its update had arrived."""
        until(lambda: self._is_sending() and self._is_training())
        assert self.held_bytes() < MODEL_BYTES
        for name in (TRAINS, SENDS):
            self.fleet.devices[name].kill()
            assert processes_of(self.fleet, name).all_gone()
        return self.held_bytes()

    def start_again(self, *names: str) -> None:
        """Of both by default, the one with little to train, the other by a good line."""
        self.fleet.write_data(TRAINS, noop.rows())
        self.line.mend()
        for name in names or (TRAINS, SENDS):
            self.fleet.devices[name].start()

    def rounds_asked(self, name: str, run: str) -> list[int]:
        """The rounds of which the device was given a task."""
        query = select(tasks.c.round).where(tasks.c.run == run, tasks.c.device == self.ids[name])
        return sorted(row.round for row in rows(url_of(self.fleet), query))

    def keeps_out(self, name: str, run: str, number: int) -> list[str]:
        """Why a run whose round waits does not ask the device, as all notices of the round have it."""
        query = select(events.c["values"]).where(events.c.run == run, events.c.event == "round_waiting")
        return [
            reason
            for row in rows(url_of(self.fleet), query)
            if row._mapping["values"]["round"] == number
            for each in row._mapping["values"]["blocked"]
            if each["device"] == self.ids[name]
            for reason in each["reasons"]
        ]

    def held_bytes(self) -> int:
        """Of updates that are not whole yet, how much the coordinator has on disk."""
        return sum(path.stat().st_size for path in (self.fleet.home / "uploads").glob("*.part"))

    def ledger(self, name: str, run: str) -> list[Entry]:
        with closing(State(self.fleet.device_folder(name) / "state")) as state:
            return [entry for entry in Ledger(state).entries() if entry.run == run]

    def results_waiting(self, name: str) -> int:
        """Of the device's outbox."""
        return int(status.read(self.fleet.device_folder(name) / "state")["results_waiting"])

    def _is_training(self) -> bool:
        """Its task is leased, and its training process has done more than to start."""
        assert self.fleet.devices[TRAINS].is_running(), self.fleet.devices[TRAINS].tail()
        if self._code(TRAINS) != "training":
            return False
        return any(
            sum(psutil.Process(pid).cpu_times()[:2]) > STARTED_SECONDS
            for pid in processes_of(self.fleet, TRAINS).pids_of("edge_client.train.child_process")
        )

    def _is_sending(self) -> bool:
        assert self.fleet.devices[SENDS].is_running(), self.fleet.devices[SENDS].tail()
        return self.line.is_stalled and self.held_bytes() >= MODEL_BYTES // 2 - BLOCK_BYTES - OTHER_BYTES

    def _code(self, name: str) -> str:
        """Where the coordinator says that the device stands in the newest run."""
        runs = self.client.get(f"/devices/{self.ids[name]}/why")["runs"]
        return str(runs[0]["reasons"][-1]["code"])

    def is_accepted(self, name: str) -> bool:
        return self._code(name) == "accepted"


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, module_served_on: Mapping[str, str]) -> Iterator[Trio]:
    marked = Marked("FEDLOOP_TEST_RUN", uuid.uuid4().hex)
    folder = tmp_path_factory.mktemp("killed")
    environment = {**marked.environment, **NO_LEASE_ENDS, **module_served_on}
    with local_fleet(folder, environment=environment) as fleet, line_to(fleet) as line:
        noop.add_device(fleet, STEADY)
        noop.add_device(fleet, TRAINS)
        noop.add_device(fleet, SENDS, url=line.url)
        yield Trio(fleet, line, fleet.client, fleet.ids())
        assert set(fleet.stop().values()) == {0}
    assert marked.all_gone(), marked.alive()


def test_a_killed_device_delivers_if_it_is_back_in_time_and_is_not_asked_again_before_it_is_back(
    trio: Trio,
) -> None:
    run = trio.start(rounds=2)
    trio.kill_both()
    trio.start_again(SENDS)
    until(lambda: trio.is_accepted(SENDS) and trio.is_accepted(STEADY))
    end_round(trio.fleet, run, 1)
    until(lambda: trio.client.get(f"/runs/{run}")["round"] == 1)
    until(lambda: trio.keeps_out(TRAINS, run, 2))
    for reason in trio.keeps_out(TRAINS, run, 2):
        assert (
            "it has not checked in since; it may be chosen once it does" in reason or "is overdue" in reason
        )
    assert trio.rounds_asked(TRAINS, run) == [1] and trio.client.get(f"/runs/{run}")["round"] == 1
    trio.start_again(TRAINS)
    first, second = noop.finish(trio.client, run)

    assert (first["selected"], first["accepted"], first["silent"]) == (3, 2, 1)
    assert (second["selected"], second["accepted"], second["silent"]) == (3, 3, 0)
    assert trio.rounds_asked(TRAINS, run) == [1, 2]
    until(lambda: not trio.results_waiting(TRAINS))
    (trained,) = trio.ledger(TRAINS, run)
    assert (trained.round, trained.outcome) == (2, "delivered"), "of the first round nothing ever left"


@pytest.mark.extended
def test_devices_that_come_back_in_time_deliver_and_count_once(trio: Trio) -> None:
    run = trio.start(rounds=1)
    held = trio.kill_both()
    sent = trio.line.bytes_up
    trio.start_again()
    (only,) = noop.finish(trio.client, run)

    assert (only["selected"], only["accepted"], only["silent"]) == (3, 3, 0)
    counted = [row.device for row in rows(url_of(trio.fleet), select(updates).where(updates.c.run == run))]
    assert sorted(counted) == sorted(trio.ids.values())
    for name in (TRAINS, SENDS):
        until(lambda name=name: not trio.results_waiting(name))  # type: ignore[misc]
        (entry,) = trio.ledger(name, run)
        assert entry.outcome == "delivered"
    one_update = only["bytes_up"] / 3
    assert trio.line.bytes_up - sent <= one_update - held + OTHER_BYTES, "what had arrived was sent again"
    assert trio.held_bytes() == 0


@pytest.mark.extended
def test_a_round_closes_without_dead_devices_which_are_there_for_the_next(trio: Trio) -> None:
    run = trio.start(rounds=2)
    trio.kill_both()
    sent = trio.line.bytes_up
    until(lambda: trio.is_accepted(STEADY))
    assert trio.client.get(f"/runs/{run}")["round"] == 0, "two may still answer"
    end_round(trio.fleet, run, 1)
    until(lambda: trio.client.get(f"/runs/{run}")["round"] == 1)
    trio.start_again()
    first, second = noop.finish(trio.client, run)

    assert (first["selected"], first["accepted"], first["silent"]) == (3, 1, 2)
    assert (second["selected"], second["accepted"], second["silent"]) == (3, 3, 0)
    for name in (TRAINS, SENDS):
        until(lambda name=name: not trio.results_waiting(name))  # type: ignore[misc]
    (trained,) = trio.ledger(TRAINS, run)
    assert (trained.round, trained.outcome) == (2, "delivered"), "of the first round nothing ever left"
    too_late, delivered = trio.ledger(SENDS, run)
    assert too_late.round == 1
    assert too_late.outcome.startswith("refused: ") and too_late.outcome.endswith("(round_closed)")
    assert (delivered.round, delivered.outcome) == (2, "delivered")
    assert trio.line.bytes_up - sent <= second["bytes_up"] / 3 + OTHER_BYTES, "it sent what nobody takes"
    assert trio.held_bytes() == 0


def processes_of(fleet: LocalFleet, name: str) -> Marked:
    """The device's daemon, and whatever that started."""
    return Marked("FEDLOOP_EDGE_CONFIG", fleet.devices[name].environment["FEDLOOP_EDGE_CONFIG"])


def end_round(fleet: LocalFleet, run: str, number: int) -> None:
    """Its deadline is now."""
    of_round = (rounds.c.run == run, rounds.c.number == number)
    change(url_of(fleet), update(rounds).where(*of_round).values(deadline_at=datetime.now(UTC)))


def line_to(fleet: LocalFleet) -> Line:
    parts = urlsplit(fleet.device_url)
    assert parts.hostname is not None and parts.port is not None
    return Line((parts.hostname, parts.port))


def until(holds: Callable[[], Any]) -> None:
    wait_until(holds, seconds=HANGS_SECONDS)
