"""Memory of a small device in a real run: `fedloop-edge` beside its coordinator, training `cnn` in LiteRT on digits.

The daemon is looked at while it waits for work over an open connection, and then, with every process below it, while
the run goes on. A process of the tree counts with what is resident, shared pages twice if need be.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from coordinator.demos.local_fleet import (
    Daemon,
    LocalFleet,
    local_fleet,
)
from models import datasets

DAEMON_BYTES = 90_000_000
TOGETHER_BYTES = 150_000_000

_LOOK_SECONDS = 0.01
_SETTLED_SECONDS = 5.0
_RUN_SECONDS = 240.0
_EXPERIMENT: dict[str, Any] = {
    "name": "device-memory",
    "data": {"dataset": "digits"},
    "model": {"name": "cnn"},
    "federation": {"clients": 1, "clients_per_round": 1, "rounds": 3, "runtimes": {"litert": 1.0}},
    "local": {"epochs": 2, "batch_size": 16, "lr": 0.05},
}


def run() -> dict[str, int]:
    """Resident bytes: of the idle daemon, and the most of daemon and training together."""
    with tempfile.TemporaryDirectory() as folder, local_fleet(Path(folder)) as fleet:
        daemon = _device(fleet)
        daemon.start()
        _until_checked_in(fleet)
        time.sleep(_SETTLED_SECONDS)  # data counted, connection open, nothing to do
        idle = tree_bytes(daemon.pid)
        together = _peak_of_a_run(fleet, daemon)
        fleet.stop()
    print(f"daemon, idle with an open connection: {idle / 1e6:.0f} MB (limit {DAEMON_BYTES / 1e6:.0f})")
    print(
        f"daemon and training of cnn in LiteRT, peak: {together / 1e6:.0f} MB (limit {TOGETHER_BYTES / 1e6:.0f})"
    )
    return {"daemon_idle": idle, "together_peak": together}


def tree_bytes(pid: int) -> int:
    """Resident memory of a process and all below it."""
    found = psutil.Process(pid)
    total = 0
    for process in (found, *found.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # ended while it was looked at
    return total


def _device(fleet: LocalFleet) -> Daemon:
    digits = datasets.load("digits", seed=0)
    data = {"digits": {"kind": "numpy", "path": "data.npz"}}
    return fleet.add("meter", {"runtimes": ["litert"], "data": data}, {"x": digits.x, "y": digits.y})


def _until_checked_in(fleet: LocalFleet) -> None:
    end = time.monotonic() + _RUN_SECONDS
    while not all(each["last_seen_at"] for each in fleet.client.get("/devices")["devices"]):
        assert time.monotonic() < end, "the device does not check in"
        time.sleep(0.1)


def _peak_of_a_run(fleet: LocalFleet, daemon: Daemon) -> int:
    run = fleet.client.post("/runs", {"experiment": _EXPERIMENT})["id"]
    peak, read_at, end = 0, 0.0, time.monotonic() + _RUN_SECONDS
    while True:
        peak = max(peak, tree_bytes(daemon.pid))
        now = time.monotonic()
        if now - read_at > 1.0:
            read_at, state = now, fleet.client.get(f"/runs/{run}")["state"]
            if state == "finished":
                return peak
            assert state in ("queued", "running") and now < end, fleet.coordinator.tail()
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    run()
