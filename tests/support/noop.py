"""Federations whose rounds do next to nothing but carry a model of a given size back and forth.

A multilayer perceptron on 512 inputs, so that one hidden layer sets the size: 523 numbers a hidden unit. A device
holds a few random rows and takes as many steps on them as it is told, of batch size 1.
"""

from __future__ import annotations

import time
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.demos.local_fleet import Daemon, LocalFleet
from coordinator.operator import run_follower
from coordinator.operator.client import OperatorClient
from edge_client.wire.device import CheckIn
from tests.support import device_client
from tests.support.waiting import wait_until

INPUTS, CLASSES, ROWS = 512, 10, 4
_PATIENCE_SECONDS = 600.0


def experiment(
    model_bytes: int, rounds: int, clients: int = 2, *, steps: int = 1, **federation: Any
) -> dict[str, Any]:
    """A run on `clients` devices, each of which must answer; `federation` replaces what it says of that."""
    return {
        "name": "noop",
        "data": {"dataset": "rows", "input_shape": [INPUTS], "classes": CLASSES},
        "model": {"name": "mlp", "hidden": [round(model_bytes / 4 / (INPUTS + CLASSES + 1))]},
        "federation": {
            "clients": clients,
            "clients_per_round": clients,
            "min_updates": clients,
            "rounds": rounds,
            "runtimes": {"torch": 1.0},
            **federation,
        },
        "local": {"steps": steps, "batch_size": 1, "lr": 0.001},
    }


def add_device(fleet: LocalFleet, name: str, *, url: str | None = None, **config: Any) -> Daemon:
    """An enrolled device that can take part, not yet started."""
    path = fleet.device_folder(name) / "data.npz"
    mine = {
        "runtimes": ["torch"],
        "data": {"rows": {"kind": "numpy", "path": str(path)}},
        **config,
    }
    return fleet.add(name, mine, rows(), url=url)


def rows(count: int = ROWS) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((count, INPUTS), np.float32),
        "y": np.arange(count, dtype=np.int64) % CLASSES,
    }


def checkin(*, wait_seconds: float = 0.0) -> CheckIn:
    """What a device says that could take part, for one that is no daemon."""
    return device_client.checkin("rows", wait_seconds=wait_seconds, models=("mlp",))


def start(fleet: LocalFleet, document: dict[str, Any]) -> str:
    """Begins a run; its id."""
    return str(fleet.client.post("/runs", {"experiment": document})["id"])


def finish(client: OperatorClient, run: str, seconds: float = _PATIENCE_SECONDS) -> list[dict[str, Any]]:
    """The rounds of a run, once it is over.

    Raises:
        AssertionError: it failed, or is not over in time.
    """
    shown: dict[str, Any] = {}

    def is_over() -> bool:
        shown.update(client.get(f"/runs/{run}"))
        return shown["state"] in ("finished", "failed", "cancelled")

    wait_until(is_over, lambda: f"not over in {seconds:.0f} s: {shown}", seconds)
    assert shown["state"] == "finished", shown["error"]
    lines: list[dict[str, Any]] = client.get(f"/runs/{run}/rounds")
    return lines


def seconds_between_commits(client: OperatorClient, run: str) -> list[float]:
    """From each commit of a finished run to the next: rounds with all that lies between them."""
    times = []
    for event in run_follower.events_of(client, run, time.sleep):
        if event["event"] == "round_committed":
            times.append(datetime.fromisoformat(event["time"]).timestamp())
        if event["event"] in run_follower.ENDS:
            break
    return [later - before for before, later in pairwise(times)]
