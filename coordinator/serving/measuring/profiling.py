"""`fedloop serving profile`: what batches take in each backend of a version, by their size and the threads of a worker.

1. each backend is opened in a worker of its own, which checks its answers as for serving
2. size by size the backends are measured in turns, so that what else the machine does hits all alike
3. the medians are stored, and a server whose deployment says `backend = "auto"` takes the fastest at its next opening
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from coordinator.errors import Refusal
from coordinator.serving.deployment import opening_of, sizes
from coordinator.serving.deployments import DeploymentSection
from coordinator.serving.measuring.tables import BackendProfile, ProfileTable
from coordinator.serving.versions import StoredVersion
from coordinator.serving.workers import Worker, WorkerDied, WorkerHost, modules_for
from models.serving.backends import backends

TURNS = 5
REPEATS = 3
"""Batches of one turn, of which the median counts."""
MOST_SECONDS = 2.0
"""For all turns of one size of one backend; larger sizes are left out."""
HANGS_SECONDS = 120.0


async def profile(
    stored: StoredVersion,
    section: DeploymentSection,
    threads: Sequence[int],
    log: Path,
    note: Callable[[str], None],
) -> list[ProfileTable]:
    """A table for each number of threads. `log`: what libraries print; `note`: gets a line before each step."""
    tables = []
    with closing(WorkerHost(modules_for(stored.model), log, stored.allowed_code)) as host:
        for count in threads:
            own = section.with_workers(None, None, count)
            tables.append(ProfileTable.of(stored.identity, own, await _profile(host, stored, own, note)))
    return tables


async def _profile(
    host: WorkerHost, stored: StoredVersion, section: DeploymentSection, note: Callable[[str], None]
) -> dict[str, BackendProfile]:
    """All backends with one number of threads."""
    found: dict[str, BackendProfile] = {}
    workers: dict[str, Worker] = {}
    with ExitStack() as stack:
        for backend in backends(stored.model):
            note(f"opening {backend} with {section.workers.threads} threads")
            try:
                worker, _ = await host.open(opening_of(stored, section, backend).frame(measures=False))
            except (WorkerDied, Refusal) as error:
                found[backend] = BackendProfile(problem=str(error)[:1000])
                continue
            stack.callback(worker.close)
            workers[backend] = worker
            found[backend] = BackendProfile()
        for size in sizes(section.max_batch):
            note(f"measuring {size} rows with {section.workers.threads} threads")
            for backend, seconds in (await _measure_size(workers, found, size)).items():
                found[backend].seconds[str(size)] = seconds
        for backend, worker in workers.items():
            found[backend].memory_bytes = worker.memory_bytes()
    return found


async def _measure_size(
    workers: dict[str, Worker], found: Mapping[str, BackendProfile], size: int
) -> dict[str, float]:
    """Seconds of a batch by backend, the median of several turns; those that would take too long are left out."""
    due = {name: worker for name, worker in workers.items() if _predicted(found[name], size) <= MOST_SECONDS}
    turns: dict[str, list[float]] = {name: [] for name in due}
    for _ in range(TURNS):
        for name, worker in list(due.items()):
            try:
                frame = {"kind": "measure", "sizes": [size], "repeats": REPEATS}
                answer = await asyncio.wait_for(worker.ask(frame), HANGS_SECONDS)
            except (WorkerDied, TimeoutError) as error:
                found[name].problem = f"failed at {size} rows: {error or 'it hangs'}"
                del workers[name], due[name], turns[name]
                continue
            turns[name].append(answer["seconds"][str(size)])
    return {name: statistics.median(each) for name, each in turns.items()}


def _predicted(known: BackendProfile, size: int) -> float:
    """Seconds that all turns of a size would take, in proportion to the size before; 0 of the first one."""
    if not known.seconds:
        return 0.0
    rows, seconds = list(known.seconds.items())[-1]
    return seconds * size / int(rows) * TURNS * (REPEATS + 1)
