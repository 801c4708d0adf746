"""A device whose network goes away in the middle of a round, in a network namespace of its own."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from coordinator.demos.local_fleet import LocalFleet, local_fleet
from tests.support import noop
from tests.support.long import LONG
from tests.support.namespaces import Cable, cable

pytestmark = pytest.mark.slow

MODEL_BYTES = 200_000
CUT_SECONDS = 60.0 if LONG else 10.0


@pytest.mark.extended
@pytest.mark.long
def test_after_a_while_without_network_the_device_delivers_to_the_same_round(
    tmp_path: Path, served_on: Mapping[str, str]
) -> None:
    with _two_devices(tmp_path, served_on) as (fleet, joined):
        run = noop.start(fleet, noop.experiment(MODEL_BYTES, rounds=2, steps=4000))
        _until(lambda: _state(fleet, "far") == "training")
        joined.pull()
        time.sleep(CUT_SECONDS)  # the cut itself lasts that long, there is nothing to wait for
        assert fleet.client.get(f"/runs/{run}")["round"] == 0, "the round waits for both"
        joined.plug()
        assert [line["accepted"] for line in noop.finish(fleet.client, run)] == [2, 2]


@pytest.mark.extended
def test_a_round_closes_at_its_quorum_without_a_device_that_lost_its_network(
    tmp_path: Path, served_on: Mapping[str, str]
) -> None:
    with _two_devices(tmp_path, served_on) as (fleet, joined):
        # Both are asked, one answer is enough.
        document = noop.experiment(MODEL_BYTES, rounds=1, steps=4000, min_updates=1)
        document["federation"] |= {"clients_per_round": 1, "over_select": 2.0}
        run, near = noop.start(fleet, document), fleet.devices["near"]
        _until(lambda: all(_state(fleet, name) == "training" for name in fleet.devices))
        near.send(signal.SIGSTOP)  # until the other is cut off it must not answer
        joined.pull()
        near.send(signal.SIGCONT)
        (only,) = noop.finish(fleet.client, run)
        assert (only["selected"], only["accepted"], only["silent"]) == (2, 1, 1)

        # The other comes back by itself, hears that the round is over, and takes part in what comes next.
        joined.plug()
        (again,) = noop.finish(fleet.client, noop.start(fleet, noop.experiment(MODEL_BYTES, rounds=1)))
        assert again["accepted"] == 2
        assert fleet.devices["far"].is_running()


@contextmanager
def _two_devices(folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[LocalFleet, Cable]]:
    """`near` on this machine, `far` at the end of a cable."""
    with cable() as joined:
        names = [flag for name in ("127.0.0.1", joined.here) for flag in ("--name", name)]
        with local_fleet(folder, ("--device", "0.0.0.0:0", *names), environment) as fleet:
            port = urlsplit(fleet.device_url).port
            noop.add_device(fleet, "near", url=f"https://127.0.0.1:{port}").start()
            far = noop.add_device(fleet, "far", url=f"https://{joined.here}:{port}")
            far.command = joined.inside(far.command)
            far.start()
            _until(lambda: _state(fleet, "far") == "idle")
            yield fleet, joined


def _state(fleet: LocalFleet, name: str) -> str:
    path = fleet.device_folder(name) / "state" / "status.json"
    try:
        return str(json.loads(path.read_bytes())["state"])
    except (FileNotFoundError, ValueError):
        return ""


def _until(holds: Callable[[], bool], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "what was waited for does not happen"
        time.sleep(0.02)
