"""A served coordinator with an honest daemon and any number of raw devices, and one small model for all of them.

The honest device is in a group of its own, so that a run can be had with it alone, and then again with
everybody: whatever the others do, the model must come out the same.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select

from coordinator.db.tables import metadata
from coordinator.demos.local_fleet import (
    Daemon,
    LocalFleet,
    local_fleet,
)
from edge_client.wire.device import CheckIn, TaskMessage
from tests.support.device_client import RawDevice, checkin
from tests.support.hostile import Target, canary
from tests.support.hostile_results import sound_result
from tests.support.stored import rows, url_of
from tests.support.waiting import wait_until

DATASET = "readings"
RUN_SECONDS = 900.0
HONEST_GROUP, RAW_GROUP = "honest", "raw"
NO_LEASE_ENDS = {"FEDLOOP_LEASE_SECONDS": "3600"}
"""For a coordinator whose devices may be slow, because the machine is."""


@dataclass
class Arena:
    """Raw devices are enrolled by `enrol`, and take part once they checked in."""

    fleet: LocalFleet
    raw: list[RawDevice] = field(default_factory=list)

    def enrol(self, count: int) -> list[RawDevice]:
        """More raw devices, by one token."""
        terms = {"uses": count, "group": RAW_GROUP}
        self.token: str = self.fleet.client.post("/tokens", terms)["token"]
        first = len(self.raw)
        folder = self.fleet.folder / "raw"
        made = [
            RawDevice.enrol(self.fleet.device_url, self.token, folder / str(at), f"raw-{at}")
            for at in range(first, first + count)
        ]
        self.raw += made
        return made

    def start_run(self, cohort: int, **devices: Any) -> str:
        """A run of one round for so many devices; `devices` as in an experiment's [devices]. Its id."""
        run = self.fleet.client.post("/runs", {"experiment": experiment(cohort, **devices)})
        return str(run["id"])

    def finished(self, run: str) -> dict[str, Any]:
        """Its report, once it ended well."""

        def is_finished() -> bool:
            state = self.fleet.client.get(f"/runs/{run}")
            assert state["state"] in ("queued", "running", "finished"), state
            return bool(state["state"] == "finished")

        wait_until(is_finished, lambda: f"the run does not end\n{self.fleet.coordinator.tail()}", RUN_SECONDS)
        report: dict[str, Any] = self.fleet.client.get(f"/runs/{run}/report")
        return report

    def checkin(self, **changed: Any) -> CheckIn:
        return checkin(DATASET, **changed)

    def target(
        self, device: RawDevice, offer: Mapping[str, Any], other: RawDevice, other_task: str
    ) -> Target:
        """What `device` knows, with a good result of its task."""
        message = TaskMessage.from_json(offer["message"])
        return Target(
            device=device.id,
            task=offer["task"],
            sound=sound_result(message, other.id, canary(self.fleet.folder)),
            limit_bytes=offer["result_limit_bytes"],
            dataset=DATASET,
            other_task=other_task,
            other_device=other.id,
            foreign_blob=next(name for name in sorted(self.blobs()) if name != offer["params"]["sha256"]),
            certificate=device.certificate,
            key=device.key,
            other_certificate=other.certificate,
            token=self.token,
        )

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        """All rows of a table of the coordinator's database."""
        table_of_name = metadata.tables[table]
        found = rows(url_of(self.fleet), select(table_of_name).order_by(*list(table_of_name.columns)[:3]))
        return [tuple(row) for row in found]

    def blobs(self) -> set[str]:
        """Names of all stored blobs."""
        folder = self.fleet.home / "blobs"
        return {path.name for path in folder.rglob("*") if path.is_file()}

    def part_files(self) -> dict[str, int]:
        """Size by name of uploads on their way."""
        return {path.name: path.stat().st_size for path in (self.fleet.home / "uploads").glob("*")}

    def memory(self) -> Memory:
        return memory_of(self.fleet.coordinator.pid)

    def metrics(self) -> str:
        """What Prometheus would get."""
        with urllib.request.urlopen(f"{self.fleet.operator_url}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def failures(self) -> list[str]:
        """Lines of the coordinator's log that tell of a failure of its own."""
        log = self.fleet.coordinator.log.read_text("utf-8", "replace")
        pattern = re.compile(
            r"Traceback|request_failed|\"status\": ?5\d\d|status=5\d\d|\"level\": ?\"(error|critical)\""
        )
        return [line for line in log.splitlines() if pattern.search(line)]


@dataclass(frozen=True)
class Memory:
    """Of one process, in bytes: now, and the most it ever had."""

    resident: int
    peak: int


def memory_of(pid: int) -> Memory:
    found = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return Memory(*(int(found[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")))


def experiment(cohort: int, rounds: int = 1, **devices: Any) -> dict[str, Any]:
    """Logreg of four features, described, so that the coordinator needs no data."""
    return {
        "name": "arena",
        "seed": 7,
        "data": {
            "dataset": DATASET,
            "input_shape": [4],
            "classes": 3,
            "input_dtype": "float32",
            "task": "classification",
        },
        "model": {"name": "logreg"},
        "federation": {
            "clients": cohort,
            "clients_per_round": cohort,
            "rounds": rounds,
            "runtimes": {"torch": 1.0},
            "deadline_seconds": 600.0,
        },
        "local": {"epochs": 2, "batch_size": 8, "lr": 0.1},
        "devices": {"patience_seconds": 120.0, **devices},
    }


def honest_config() -> dict[str, Any]:
    return {"runtimes": ["torch"], "data": {DATASET: {"kind": "numpy", "path": "data.npz"}}}


def readings(seed: int = 3, rows: int = 40) -> dict[str, Any]:
    """Three classes that four numbers tell apart."""
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % 3
    x = rng.normal(0, 0.3, (rows, 4)) + np.eye(4)[y]
    return {"x": x.astype(np.float32), "y": y.astype(np.int64)}


def add_honest(arena: Arena, name: str = "honest") -> Daemon:
    """A daemon that does what it is asked, started."""
    daemon = arena.fleet.add(name, honest_config(), group=HONEST_GROUP)
    arena.fleet.write_data(name, readings())
    daemon.start()
    return daemon


@contextmanager
def arena(
    folder: Path, flags: tuple[str, ...] = (), *, environment: Mapping[str, str] | None = None
) -> Iterator[Arena]:
    with local_fleet(folder, flags, environment) as fleet:
        made = Arena(fleet)
        try:
            yield made
        finally:
            for device in made.raw:
                device.close()
