"""Measured profiles of versions, which a server chooses backends by: one file for each version and number of threads.

A table counts only where it was measured: on this kind of machine, with these versions of the libraries.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from coordinator.document_checks import Section
from coordinator.serving.deployments import DeploymentSection
from coordinator.serving.paths import PROFILES
from edge_client.files import make_folder, read_regular, write_durably
from models.serving.backends import backends

_LIBRARIES = ("fedloop", "torch", "ai-edge-litert", "tensorflow")


class BackendProfile(Section):
    """What was measured of one backend; or the `problem` for which it cannot be opened."""

    seconds: dict[str, float] = Field(default_factory=dict)
    """Of a batch, by its rows."""
    memory_bytes: int = 0
    """Of its worker, what it shares with others in part (PSS)."""
    problem: str = ""

    def rows_a_second(self, limit: float) -> tuple[float, int]:
        """The most rows a second among the sizes whose batch takes at most `limit` seconds, and that size; (0, 0): there is none."""
        return max(
            ((int(rows) / taken, int(rows)) for rows, taken in self.seconds.items() if 0 < taken <= limit),
            default=(0.0, 0),
        )


class ProfileTable(Section):
    """The profile of a version with workers of so many threads. `environment`: where it was measured."""

    identity: str
    threads: int
    device: str
    dtype: str
    slo_ms: float
    best: str
    """The backend with the most rows a second among the sizes whose batch takes at most `slo_ms`; empty: none has one."""
    environment: dict[str, str]
    backends: dict[str, BackendProfile]

    @staticmethod
    def of(identity: str, section: DeploymentSection, measured: Mapping[str, BackendProfile]) -> ProfileTable:
        limit = section.slo_ms / 1000
        fastest = {name: each.rows_a_second(limit)[0] for name, each in measured.items() if not each.problem}
        best = max(fastest, key=lambda name: fastest[name], default="")
        return ProfileTable(
            identity=identity,
            threads=section.workers.threads,
            device=section.device,
            dtype=section.dtype,
            slo_ms=section.slo_ms,
            best=best if best and fastest[best] else "",
            environment=environment(),
            backends=dict(measured),
        )


def profile_path(home: Path, identity: str, threads: int, device: str, dtype: str) -> Path:
    """Where the profile of a version is kept, by its identity and how its workers compute."""
    return home / PROFILES / f"{identity[:32]}-{threads}-{device}-{dtype}.json"


def write_table(home: Path, table: ProfileTable) -> Path:
    """Stores a table in place of an earlier one. Raises: OSError: it cannot be written."""
    path = profile_path(home, table.identity, table.threads, table.device, table.dtype)
    make_folder(path.parent)
    write_durably(path, table.model_dump_json(indent=1).encode() + b"\n")
    return path


def read_table(home: Path, identity: str, section: DeploymentSection) -> ProfileTable | None:
    """The table of a version; None: there is none, it is damaged, or was measured elsewhere or with other libraries."""
    threads, device, dtype = section.workers.threads, section.device, section.dtype
    try:
        table = ProfileTable.model_validate_json(
            read_regular(profile_path(home, identity, threads, device, dtype))
        )
    except (OSError, ValidationError):
        return None
    known = (table.identity, table.threads, table.device, table.dtype)
    is_same = known == (identity, threads, device, dtype) and table.environment == environment()
    return table if is_same and (not table.best or table.best in table.backends) else None


def backend_for(home: Path, model: Mapping[str, Any], identity: str, section: DeploymentSection) -> str:
    """The backend of a version: the deployment's, packed weights where there are some, the fastest of its profile, or the first one of its kind."""
    if section.backend != "auto":
        return section.backend
    known = backends(model)
    if known[0] == "packed":  # whoever packs the weights wants their memory, not their speed
        return known[0]
    table = read_table(home, identity, section)
    return table.best if table is not None and table.best in known else known[0]


def environment() -> dict[str, str]:
    """What a measurement depends on: the processor, its cores, and the versions of the libraries."""
    found = {
        "processor": _processor(),
        "cores": str(os.cpu_count() or 1),
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _processor() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
