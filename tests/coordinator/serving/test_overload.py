"""The scheduler in virtual time: which requests are answered, late or refused when they come at a share of the capacity."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from coordinator.errors import Refusal
from coordinator.serving.queue import Waiting
from coordinator.serving.served import ServedVersion
from coordinator.serving.workers import Opening
from edge_client.processes.channel import Frame
from tests.support.virtual_loop import run_virtually

SECONDS = {size: 0.002 + 0.0004 * size for size in (1, 2, 4, 8, 16, 32, 64)}
CAPACITY = 64 / SECONDS[64]
LIMIT = 0.1


class SlowWorker:
    """A worker that computes one batch after the other, in the profile's time times a random factor."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.pid = 0
        self._seconds = seconds
        self._batches: deque[tuple[int, int]] = deque()
        self._loop = asyncio.get_running_loop()

    def begin(self, on_answer: Callable[..., None], on_end: Callable[..., None]) -> None:
        self._on_answer = on_answer
        self._on_end = on_end

    def end(self) -> None:
        """Ends by itself."""
        self._batches.clear()
        self._on_end(self)

    def infer(self, number: int, rows: int, content: Sequence[bytes]) -> None:
        self._batches.append((number, rows))
        if len(self._batches) == 1:
            self._compute()

    def close(self) -> None:
        self._batches.clear()

    def _compute(self) -> None:
        self._loop.call_later(self._seconds(self._batches[0][1]), self._finish)

    def _finish(self) -> None:
        number, rows = self._batches.popleft()
        if self._batches:
            self._compute()
        frame = Frame({"id": number, "seconds": 0.0}, (np.zeros(rows, np.float32).tobytes(),))
        self._on_answer(self, frame)


class SlowHost:
    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.workers: list[SlowWorker] = []
        self._seconds = seconds

    async def open(self, frame: Mapping[str, Any]) -> tuple[SlowWorker, dict[str, Any]]:
        facts = {"seconds": {str(size): value for size, value in SECONDS.items()}, "output_shape": [1]}
        self.workers.append(SlowWorker(self._seconds))
        return self.workers[-1], facts


async def outcomes(
    times: Sequence[float],
    seconds: Callable[[int], float],
    *,
    workers: int = 1,
    rows: int = 1,
    limit: float = LIMIT,
) -> Counter[str]:
    """Shares of the requests that were answered in time, answered late, refused in time and refused late."""
    version = ServedVersion("1", Opening({}, "torch", 1, 64, tuple(SECONDS)), SlowHost(seconds))  # type: ignore[arg-type]
    for _ in range(workers):
        await version.add_worker()
    loop = asyncio.get_running_loop()
    found: Counter[str] = Counter()

    def send(due: float) -> None:
        def done(answer: Any, queued: float, computed: float) -> None:
            what = "refused" if isinstance(answer, Refusal) else "answered"
            found[what if loop.time() <= due + limit else f"{what} late"] += 1

        version.submit(Waiting(np.zeros((rows, 1), np.float32), due + limit, 0, due, done))

    for due in times:
        loop.call_at(due, send, due)
    await asyncio.sleep(max(times) + 10)
    version.close()
    assert found.total() == len(times)
    return found


def poisson(rate: float, begins: float = 0.0, ends: float = 3.0) -> list[float]:
    rng = np.random.default_rng(0)
    return sorted(rng.uniform(begins, ends, rng.poisson(rate * (ends - begins))).tolist())


def noisy(deviation: float) -> Callable[[int], float]:
    """Seconds of a batch as in the profile, times a factor whose logarithm has this deviation."""
    rng = np.random.default_rng(1)
    return lambda rows: seconds_of(rows) * rng.lognormal(0, deviation)


def seconds_of(rows: int) -> float:
    return float(np.interp(rows, list(SECONDS), list(SECONDS.values())))


@pytest.mark.parametrize(("workers", "rows"), [(1, 1), (1, 8), (4, 1)])
def test_below_capacity_all_are_answered_in_time(workers: int, rows: int) -> None:
    times = poisson(0.7 * CAPACITY * workers / rows)
    found = run_virtually(outcomes(times, noisy(0.1), workers=workers, rows=rows))
    assert found["answered"] >= 0.999 * len(times), found


@pytest.mark.parametrize("load", [1.2, 5.0])
@pytest.mark.parametrize(("workers", "rows"), [(1, 1), (1, 8), (4, 1)])
def test_beyond_capacity_as_many_are_answered_and_the_rest_refused_in_time(
    load: float, workers: int, rows: int
) -> None:
    times = poisson(load * CAPACITY * workers / rows, ends=3.0 if load < 2 else 1.0)
    found = run_virtually(outcomes(times, noisy(0.1), workers=workers, rows=rows))
    assert found["answered"] * load >= 0.95 * len(times), found
    assert found["answered late"] <= 0.01 * len(times), found
    assert not found["refused late"], found


def test_batches_that_vary_much_leave_a_margin() -> None:
    times = poisson(1.2 * CAPACITY)
    found = run_virtually(outcomes(times, noisy(0.3)))
    assert found["answered"] * 1.2 >= 0.9 * len(times), found
    assert found["answered late"] + found["refused late"] <= 0.02 * len(times), found


def test_machine_that_becomes_three_times_slower_answers_a_third() -> None:
    times = poisson(CAPACITY)
    found = run_virtually(outcomes(times, lambda rows: 3 * seconds_of(rows)))
    assert found["answered"] >= 0.25 * len(times), found
    assert found["answered late"] <= 0.05 * len(times), found


def test_time_limit_below_a_full_batch_is_met_with_smaller_ones() -> None:
    times = poisson(2.0 * CAPACITY)
    found = run_virtually(outcomes(times, noisy(0.05), limit=0.02))
    most = 20 / seconds_of(20)  # half of the limit
    assert found["answered"] >= 0.8 * most * 3.0, found
    assert found["answered late"] <= 0.01 * len(times), found


def test_stall_is_forgotten_after_a_pause() -> None:
    """At first batches take longer than the limit, so that the profile lets no request pass; after a pause all are answered again."""
    stalled, later = poisson(CAPACITY / 4, ends=1.0), poisson(CAPACITY / 4, begins=4.0, ends=5.0)

    def seconds(rows: int) -> float:
        return seconds_of(rows) * (50 if asyncio.get_running_loop().time() < 2.0 else 1)

    found = run_virtually(outcomes([*stalled, *later], seconds))
    assert found["refused"] + found["refused late"] > 0.9 * len(stalled), found
    assert found["refused late"] < 0.2 * len(stalled), found  # the last ones, after which none arrives
    assert found["answered"] >= len(later), found


def test_worker_that_ends_is_replaced_by_one_alone() -> None:
    """Whatever looks at the workers before the replacement begins counts it, so the scaler starts no other and ends none later."""

    async def counts() -> tuple[list[int], int, int]:
        needed: list[None] = []
        host = SlowHost(seconds_of)
        version = ServedVersion(
            "1",
            Opening({}, "torch", 1, 64, tuple(SECONDS)),
            host,  # type: ignore[arg-type]
            lambda: needed.append(None),
        )
        for _ in range(2):
            await version.add_worker()
        found = [version.workers]
        for worker in tuple(host.workers):
            worker.end()
            found.append(version.workers)
        version.submit(Waiting(np.zeros((1, 1), np.float32), 1.0, 0, 0.0, lambda *_: None, patience=1.0))
        await asyncio.sleep(0.1)
        version.close()
        return found, len(host.workers), len(needed)

    assert run_virtually(counts()) == ([2, 2, 2], 4, 0)
