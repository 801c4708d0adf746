"""A fleet with relays as real processes: a coordinator, two relays and eight daemons, which train with LiteRT."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from coordinator.db.tables import updates
from coordinator.demos.demo_fleet import client_data, device_config
from coordinator.experiments.experiment import resolve
from edge_client import failpoints
from edge_client.outbox import Ledger
from edge_client.state import State
from edge_client.wire import arrays
from tests.support.cli import CACHE
from tests.support.long import extended
from tests.support.processes import HANGS_SECONDS
from tests.support.relays import RelayedFleet, relayed_fleet
from tests.support.stored import rows, url_of
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BEHIND = {"north": 5, "south": 3}
"""Devices of each relay: two ranges of the cohort that are no single nodes of the tree."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayedFleet]:
    # A relay that is killed renews no lease for its devices.
    environment = {"FEDLOOP_CACHE_DIR": str(CACHE), "FEDLOOP_LEASE_SECONDS": str(HANGS_SECONDS)}
    with relayed_fleet(tmp_path_factory.mktemp("relays"), environment=environment) as made:
        names = [f"{relay}-{number}" for relay, count in BEHIND.items() for number in range(count)]
        digits = resolve({"data": {"partition": "iid"}, "federation": {"clients": len(names)}}, "digits")
        shares = dict(zip(names, client_data(digits), strict=True))
        relays = {relay: made.add_relay(relay) for relay in BEHIND}

        def add(name: str) -> None:
            relay = name.partition("-")[0]
            config = device_config("litert", "readings")
            made.add(name, config, shares[name], url=made.url(relay), relay=relays[relay])

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(add, names))
        for name in names:  # by this thread, which they do not outlive
            made.devices[name].start()
        # A test may stop one of them, which runs wait for if it has never checked in.
        wait_until(lambda: all(each["last_seen_at"] for each in listed_devices(made)))
        yield made


def listed_devices(fleet: RelayedFleet) -> list[dict[str, Any]]:
    """The coordinator's rows of all devices and relays."""
    return list(fleet.client.get("/devices", limit=1000)["devices"])


def start(
    fleet: RelayedFleet, strategy: str = "fedavg", more: Mapping[str, Any] | None = None, **federation: Any
) -> str:
    """A run of two rounds, in which every device takes part. `more`: tables of the experiment."""
    document: dict[str, Any] = {
        "name": "relayed",
        "seed": 3,
        "data": {"dataset": "readings", "input_shape": [8, 8], "classes": 10},
        "model": {"name": "logreg"},
        "federation": {"clients": 8, "rounds": 2, "min_updates": 8, "runtimes": {"litert": 1}, **federation},
        "local": {"steps": 3, "lr": 0.1},
        "strategy": {"name": strategy},
        "devices": {"patience_seconds": HANGS_SECONDS},
        **(more or {}),
    }
    experiment = resolve(document, "relayed", "devices")
    return str(fleet.client.post("/runs", {"experiment": experiment.to_toml()})["id"])


def start_secure(fleet: RelayedFleet, **privacy: Any) -> str:
    """A run of one round, in which the devices add up their updates by secure aggregation."""
    secure = {"secure_aggregation": True, "clip_norm": 0.05, "group_size": 8, "value_bits": 32, **privacy}
    return start(fleet, "fedavg", {"privacy": secure}, rounds=1, min_updates=5)


def report_of(fleet: RelayedFleet, run: str) -> dict[str, Any]:
    """The report of a run, once it has finished."""
    wait_until(lambda: fleet.client.get(f"/runs/{run}")["state"] not in ("queued", "running"))
    report: dict[str, Any] = fleet.client.get(f"/runs/{run}/report")
    assert report["state"] == "finished"
    return report


def events_of(fleet: RelayedFleet, run: str, event: str) -> list[dict[str, Any]]:
    told = fleet.client.get(f"/runs/{run}/events", limit=1000)["events"]
    return [each for each in told if each["event"] == event]


def accepted(fleet: RelayedFleet, run: str) -> int:
    """Updates of the first round that the coordinator counts."""
    return len(rows(url_of(fleet), select(updates.c.device).where(updates.c.run == run)))


@pytest.fixture(scope="module")
def flat(fleet: RelayedFleet) -> dict[str, Any]:
    """The report of a run whose updates the relays only forward."""
    return report_of(fleet, start(fleet))


@pytest.mark.parametrize("strategy", ["fedavg", *extended("scaffold")])
def test_a_run_through_two_relays_ends_in_the_bits_of_one_without(
    fleet: RelayedFleet, flat: dict[str, Any], strategy: str
) -> None:
    without = flat if strategy == "fedavg" else report_of(fleet, start(fleet, strategy))
    run = start(fleet, strategy, relays=2)
    report = report_of(fleet, run)
    assert report["final"]["model_sha256"] == without["final"]["model_sha256"]
    assert [row["accepted"] for row in report["rounds"]] == [8, 8]
    folded = events_of(fleet, run, "relay_folded")
    assert sorted((each["updates"], each["sums"]) for each in folded) == [(3, 2), (3, 2), (5, 2), (5, 2)]
    assert not events_of(fleet, run, "relay_absent") and "relays_absent" not in report


def test_a_relay_that_is_killed_in_mid_round_loses_no_update_that_it_has_acknowledged(
    fleet: RelayedFleet, flat: dict[str, Any]
) -> None:
    fleet.devices["south-2"].send(signal.SIGSTOP)  # so that the round stays open
    try:
        run = start(fleet, relays=2)
        wait_until(lambda: accepted(fleet, run) == 7)
        fleet.relays["south"].kill()
        fleet.relays["south"].start()
    finally:
        fleet.devices["south-2"].send(signal.SIGCONT)
    report = report_of(fleet, run)
    assert [row["accepted"] for row in report["rounds"]] == [8, 8]
    assert report["final"]["model_sha256"] == flat["final"]["model_sha256"]


@pytest.mark.extended
def test_a_round_goes_on_at_its_deadline_without_the_devices_of_a_relay_that_stays_away(
    fleet: RelayedFleet,
) -> None:
    fleet.devices["south-2"].send(signal.SIGSTOP)
    try:
        run = start(fleet, relays=2, rounds=1, min_updates=1, deadline_seconds=30)
        wait_until(lambda: accepted(fleet, run) == 7)
        fleet.relays["south"].kill()
        report = report_of(fleet, run)
    finally:
        fleet.devices["south-2"].send(signal.SIGCONT)
        fleet.relays["south"].start()
    (row,) = report["rounds"]
    assert (row["accepted"], row["silent"]) == (5, 3)
    (absent,) = events_of(fleet, run, "relay_absent")
    words = "relay south did not pass it on: it gave no answer in time"
    assert (absent["updates"], absent["words"]) == (2, words)
    assert [(each["round"], each["words"]) for each in report["relays_absent"]] == [(1, words)]
    silent = [each["reason"] for each in events_of(fleet, run, "client_silent")]
    assert sorted(silent) == ["no result by the deadline", words, words]


def test_secure_sums_of_devices_are_exact_whoever_dies_on_the_way(fleet: RelayedFleet) -> None:
    """Two of eight are killed: one whose masks are shared and whose update is not there, one whose masked update counts."""
    doomed = {"north-1": "secure.shared", "south-0": "secure.counted"}
    for name, failpoint in doomed.items():
        fleet.devices[name].stop()
        fleet.devices[name].start({failpoints.VARIABLE: failpoint})
    run = start_secure(fleet)
    for name in doomed:
        assert fleet.devices[name].wait(HANGS_SECONDS) == -signal.SIGKILL
        fleet.devices[name].start({"FEDLOOP_EDGE_OPT_OUT": '["in the open"]'} if name == "north-1" else {})
    (row,) = report_of(fleet, run)["rounds"]
    assert (row["accepted"], row["silent"]) == (7, 1)
    (silent,) = events_of(fleet, run, "client_silent")
    assert silent["device"] == fleet.ids()["north-1"] and "secrets" in silent["reason"]
    # The same seven in the open, clipped as devices clip.
    clipped = {"name": "in the open", "strategy": {"name": "fedavg", "clip_norm": 0.05}}
    opened = start(fleet, "fedavg", clipped, rounds=1, min_updates=7, clients=7)
    assert report_of(fleet, opened)["rounds"][0]["accepted"] == 7
    secure, plain = model_of(fleet, run), model_of(fleet, opened)
    for name, values in plain.items():
        np.testing.assert_allclose(secure[name], values, rtol=0, atol=1e-8)


def test_devices_add_shares_of_noise_inside_their_secure_sum(fleet: RelayedFleet) -> None:
    noise = {"mechanism": "distributed", "noise_multiplier": 1.0, "value_bits": 20}
    run = start_secure(fleet, **noise)
    report = report_of(fleet, run)
    (row,) = report["rounds"]
    assert (row["accepted"], row["train_loss"]) == (8, None)
    clipped = {"name": "clipped", "strategy": {"name": "fedavg", "clip_norm": 0.05, "weighting": "uniform"}}
    opened = start(fleet, "fedavg", clipped, rounds=1)
    assert report_of(fleet, opened)["rounds"][0]["accepted"] == 8
    noised, plain = model_of(fleet, run), model_of(fleet, opened)
    added = np.concatenate([(noised[name] - plain[name]).ravel() for name in plain])
    # Six of eight bring all of the noise, so eight bring more.
    assert float(np.std(added)) == pytest.approx(0.05 * (8 / 6) ** 0.5 / 8, rel=0.15) and len(added) == 650
    said = report["privacy"]
    assert (said["mechanism"], said["rounds"], said["accountant"]) == ("distributed", 1, "rdp")
    assert said["epsilon"] == row["epsilon"] > 4
    with closing(State(fleet.device_folder("north-0") / "state")) as state:
        (sent,) = [each.treated for each in Ledger(state).entries() if each.run == run]
    assert sent.startswith("clipped, with a share of noise of 1 times the norm in the sum, and masked")


@pytest.mark.extended
def test_relays_add_updates_with_noise_of_their_devices(fleet: RelayedFleet) -> None:
    table = {"mechanism": "local", "clip_norm": 0.05, "noise_multiplier": 2.0}
    run = start(fleet, "fedavg", {"privacy": table}, relays=2, rounds=1)
    report = report_of(fleet, run)
    (row,) = report["rounds"]
    assert (row["accepted"], row["train_loss"]) == (8, None) and row["epsilon"] > 0
    assert {each["updates"] for each in events_of(fleet, run, "relay_folded")} == {3, 5}
    values = np.concatenate([value.ravel() for value in model_of(fleet, run).values()])
    plain = {"name": "clipped", "strategy": {"name": "fedavg", "clip_norm": 0.05, "weighting": "uniform"}}
    opened = start(fleet, "fedavg", plain, rounds=1)
    report_of(fleet, opened)
    added = values - np.concatenate([value.ravel() for value in model_of(fleet, opened).values()])
    assert float(np.std(added)) == pytest.approx(2.0 * 0.05 / 8**0.5, rel=0.15)


def model_of(fleet: RelayedFleet, run: str) -> dict[str, Any]:
    """The final params of a run."""
    sha256 = fleet.client.get(f"/runs/{run}/report")["final"]["model_sha256"]
    return arrays.read(fleet.home / "blobs" / sha256)
