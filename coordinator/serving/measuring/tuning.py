"""`fedloop serving tune`: how many workers with how many threads answer most rows a second on this machine.

Each combination that the cores have room for runs by itself under a closed loop of the same scheduler that serves, with two batches a
worker on their way, all of the size that the profile likes best within the time limit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.errors import Refusal, UserError
from coordinator.serving.deployment import opening_of, sizes
from coordinator.serving.deployments import DeploymentSection
from coordinator.serving.measuring.load import random_rows
from coordinator.serving.measuring.tables import backend_for
from coordinator.serving.queue import NEVER, Waiting
from coordinator.serving.served import ServedVersion
from coordinator.serving.versions import StoredVersion
from coordinator.serving.workers import Opening, WorkerDied, WorkerHost, modules_for

AT_ONCE = 2
"""Batches a worker: one that it computes, one on its way."""
_WARM_SECONDS = 0.1
_NEARLY = 0.8
"""Of the most rows a second by the profile, which is noisy; the largest batch that reaches this share is taken."""
_AS_GOOD = 0.95
"""Of the most rows a second; among combinations that reach this share, the one with the least memory is best."""


@dataclass(frozen=True)
class Trial:
    """What one combination did. `latency_ms`: the 95th percentile from a batch's submission to its answer."""

    workers: int
    threads: int
    backend: str
    batch: int
    rows_a_second: float
    latency_ms: float
    memory_bytes: int


def combinations(cores: int) -> list[tuple[int, list[int]]]:
    """Numbers of threads, each with numbers of workers that fit on the cores: powers of two, and all cores."""
    return [(threads, list(sizes(cores // threads))) for threads in sizes(cores)]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


async def tune(
    home: Path,
    stored: StoredVersion,
    section: DeploymentSection,
    seconds: float,
    note: Callable[[str], None],
) -> list[Trial]:
    """All combinations, each for so many seconds.

    Raises:
        UserError: the model cannot be served.
    """
    trials: list[Trial] = []
    with closing(WorkerHost(modules_for(stored.model), home / "workers.log", stored.allowed_code)) as host:
        for threads, counts in combinations(cores()):
            own = section.with_workers(None, None, threads)
            opening = opening_of(stored, own, backend_for(home, stored.model, stored.identity, own))
            try:
                trials += await _try(host, opening, counts, section.slo_ms / 1000, seconds, note)
            except (WorkerDied, Refusal) as error:
                raise UserError(f"{section.model} cannot be served: {error}") from None
    return trials


def best(trials: Sequence[Trial], slo_ms: float) -> Trial | None:
    """The one to use; None: no combination answers in time."""
    in_time = [each for each in trials if each.latency_ms <= slo_ms]
    most = max((each.rows_a_second for each in in_time), default=0.0)
    good = [each for each in in_time if each.rows_a_second >= _AS_GOOD * most]
    return min(good, key=lambda each: each.memory_bytes, default=None)


async def _try(
    host: WorkerHost,
    opening: Opening,
    counts: Sequence[int],
    limit: float,
    seconds: float,
    note: Callable[[str], None],
) -> list[Trial]:
    """Combinations with the same number of threads."""
    with closing(ServedVersion("", opening, host)) as probe:
        await probe.add_worker()
        assert probe.profile is not None
        profile, facts = probe.profile, probe.facts
    table = profile.table()
    in_time = [size for size in table if AT_ONCE * table[size] <= limit] or [1]
    most = max(size / table[size] for size in in_time)
    batch = max(size for size in in_time if size / table[size] >= _NEARLY * most)
    x = random_rows(np.random.default_rng(0), batch, facts)
    found = []
    with closing(ServedVersion("", replace(opening, max_batch=batch), host)) as version:
        version.profile = profile
        for count in counts:
            while version.workers < count:
                await version.add_worker()
            note(f"{count} workers with {opening.threads} threads, batches of {batch} rows")
            await _load(version, x, _WARM_SECONDS)
            latencies, wall = await _load(version, x, seconds)
            found.append(
                Trial(
                    count,
                    opening.threads,
                    opening.backend,
                    batch,
                    len(latencies) * batch / wall,
                    1000 * float(np.percentile(latencies, 95)),
                    version.memory_bytes(),
                )
            )
    return found


async def _load(version: ServedVersion, x: Any, seconds: float) -> tuple[list[float], float]:
    """Seconds of each batch, and of all together. Raises: Refusal: the model failed."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    start = loop.time()

    async def run() -> None:
        while (began := loop.time()) < start + seconds:
            answer: asyncio.Future[Any] = loop.create_future()
            version.submit(Waiting(x, NEVER, 0, began, lambda found, *_, to=answer: to.set_result(found)))
            found = await answer
            if isinstance(found, Refusal):
                raise found
            latencies.append(loop.time() - began)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE * version.ready_workers):
            group.create_task(run())
    return latencies, loop.time() - start
