"""Whatever bytes come: an answer or the end of the connection, no failure of the coordinator, nothing kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tests.support.arena import arena
from tests.support.long import LONG
from tests.support.raw_fuzz import fuzzed

CONNECTIONS = 600 if LONG else 200
SEED = 20
CLOSED_SECONDS = 30.0


@pytest.mark.slow
@pytest.mark.long
def test_a_coordinator_outlives_any_bytes(tmp_path: Path, served_on: Mapping[str, str]) -> None:
    with arena(tmp_path, environment=served_on) as made:
        (device,) = made.enrol(1)
        assert device.check_in(made.checkin()).status == 200
        rest, before = made.memory().resident, open_connections(made.fleet.coordinator.pid)
        found = fuzzed(made.fleet.device_url, made.fleet.operator_url, SEED, CONNECTIONS)
        assert found.statuses[400] and found.statuses[404] and found.statuses[431]
        assert not [status for status in found.statuses if status >= 500]
        assert not found.endings["never"]
        assert made.memory().resident - rest < 32e6
        assert device.check_in(made.checkin()).status == 200
        end = time.monotonic() + CLOSED_SECONDS
        while open_connections(made.fleet.coordinator.pid) > before:
            assert time.monotonic() < end
            time.sleep(0.2)
        assert not made.failures()


def open_connections(pid: int) -> int:
    """To the ports that a process listens at."""
    found = psutil.Process(pid).net_connections(kind="inet")
    ports = {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
    return sum(each.status != psutil.CONN_LISTEN and each.laddr.port in ports for each in found)
