"""Memory of a serving coordinator while eight devices send it a model of 100 MB, all at once.

The devices are connections of this process, which send back an update that changes nothing. What the kernel counted
as the most that was resident is read from it, for the coordinator and for its worker processes, which make the
initial params: they hold a framework and end when that is done.
"""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from coordinator.demos.local_fleet import LocalFleet, local_fleet
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from strategies.update import Update
from tests.support import noop
from tests.support.device_client import RawDevice
from tests.support.federation import steps_of

MODEL_BYTES, CLIENTS, ROUNDS = 100_000_000, 8, 2
PIECE_BYTES = 8 * 2**20
LIMIT_MODELS = 3.0
_LOOK_SECONDS = 0.05


def run() -> dict[str, Any]:
    """Bytes: the coordinator idle and at its peak, its workers at theirs; and the peak above idle in models."""
    with tempfile.TemporaryDirectory(prefix="memory-") as folder, local_fleet(Path(folder)) as fleet:
        devices = [_device(fleet, f"d{number}") for number in range(CLIENTS)]
        coordinator = psutil.Process(fleet.coordinator.pid)
        idle = _status_bytes(coordinator.pid, "VmRSS")
        Path(f"/proc/{coordinator.pid}/clear_refs").write_text("5")  # the peak is counted anew from here
        with _Workers(coordinator) as workers, ThreadPoolExecutor(CLIENTS) as at_once:
            started = noop.start(fleet, noop.experiment(MODEL_BYTES, ROUNDS, CLIENTS))
            list(at_once.map(_take_part, devices))
            lines = noop.finish(fleet.client, started)
        peak = _status_bytes(coordinator.pid, "VmHWM")
    assert [line["accepted"] for line in lines] == [CLIENTS] * ROUNDS
    models = (peak - idle) / MODEL_BYTES
    print(
        f"coordinator with {CLIENTS} clients and a model of {MODEL_BYTES / 1e6:.0f} MB: idle {idle / 1e6:.0f} MB, "
        f"peak {peak / 1e6:.0f} MB, {models:.2f} models above idle, at most {LIMIT_MODELS:g}: "
        f"{'met' if models <= LIMIT_MODELS else 'MISSED'}; its worker processes besides: {workers.peak / 1e6:.0f} MB"
    )
    return {
        "idle_bytes": idle,
        "peak_bytes": peak,
        "models_above_idle": models,
        "worker_peak_bytes": workers.peak,
        "goals": {f"<= {LIMIT_MODELS:g} models above idle": models <= LIMIT_MODELS},
    }


def _device(fleet: LocalFleet, name: str) -> RawDevice:
    token = fleet.client.post("/tokens")["token"]
    device = RawDevice.enrol(fleet.device_url, token, fleet.folder / name, name)
    device.check_in(noop.checkin())
    return device


def _take_part(device: RawDevice) -> None:
    """Every round: fetches the model and sends an update of its size, in pieces, as a daemon does."""
    for _ in range(ROUNDS):
        offer = device.task(noop.checkin(wait_seconds=45), seconds=300)
        payload = _result(offer, device.get(f"/blobs/{offer['params']['sha256']}").body)
        answer = device.announce(offer["task"], payload)
        for start in range(0, len(payload), PIECE_BYTES):
            assert answer.status == 200, answer
            answer = device.piece(offer["task"], payload[start : start + PIECE_BYTES], start)
        assert answer.document["accepted"], answer


def _result(offer: dict[str, Any], params: bytes) -> bytes:
    task = TaskMessage.from_json(offer["message"])
    delta = {name: 0 * value for name, value in arrays.decode(params).items()}
    return encode_result(task, Update(delta, 1, steps_of(task, 1), 0.0))


class _Workers:
    """Looks at the processes that another one starts. `peak`: the most that all of them together had, in bytes."""

    def __init__(self, parent: psutil.Process) -> None:
        self.peak = 0
        self._parent = parent
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Workers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        peaks: dict[int, int] = {}
        while not self._over.wait(_LOOK_SECONDS):
            for child in self._parent.children(recursive=True):
                with suppress(OSError, StopIteration):
                    peaks[child.pid] = _status_bytes(child.pid, "VmHWM")
        self.peak = sum(peaks.values())


def _status_bytes(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key + ":")).split()[1]) * 1024
