"""Rounds that only carry a model: a served coordinator and two daemons, beside Flower's SuperLink and SuperNodes.

Ours goes over mutual TLS, checks and stores every update durably and takes one training step of batch size 1;
Flower's goes in clear and sends back what it got. Both are measured in turns. Seconds are those from one commit to
the next, so that whatever lies between two rounds counts; the first round, which loads the runtimes, is left out.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from coordinator.demos.local_fleet import LocalFleet, local_fleet
from tests.bench import flower_rounds
from tests.support import noop
from tests.support.proxies import Line

SIZES = {"1 MB": 1_000_000, "25 MB": 25_000_000, "100 MB": 100_000_000}
REPEATS = 2
ROUNDS = 5
DELAY_SECONDS = 0.025
LIMITS = {"fedloop, 1 MB": 0.5, "fedloop through 25 ms, 1 MB": 1.0}
SHARE_OF_FLOWER = 1 / 3


def run() -> dict[str, Any]:
    """Seconds per round by way and size, all that was measured and medians, and whether the goals are met."""
    with tempfile.TemporaryDirectory(prefix="rounds-") as folder, ExitStack() as stack:
        near = stack.enter_context(_fleet(Path(folder, "near")))
        far = stack.enter_context(_fleet(Path(folder, "far"), DELAY_SECONDS))
        app = stack.enter_context(flower_rounds.federation(Path(folder, "flower")))
        seconds: dict[str, list[float]] = {}
        for size, model_bytes in SIZES.items():
            ways = _ways(near, far, app, size, model_bytes)
            for _ in range(REPEATS):
                for name, way in ways.items():
                    seconds.setdefault(name, []).extend(way())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    _print(medians)
    return {"seconds": seconds, "medians": medians, "goals": goals(medians)}


def goals(medians: dict[str, float]) -> dict[str, bool]:
    """Which goals are met."""
    kept = {f"{name} <= {limit} s": medians[name] <= limit for name, limit in LIMITS.items()}
    share = medians["fedloop, 100 MB"] / medians["flower, 100 MB"]
    return {**kept, "100 MB <= 1/3 of Flower": share <= SHARE_OF_FLOWER}


def _ways(
    near: LocalFleet, far: LocalFleet, app: Path, size: str, model_bytes: int
) -> dict[str, Callable[[], list[float]]]:
    ways = {f"fedloop, {size}": lambda: _ours(near, model_bytes)}
    if size == "1 MB":
        ways[f"fedloop through 25 ms, {size}"] = lambda: _ours(far, model_bytes)
    ways[f"flower, {size}"] = lambda: flower_rounds.seconds_per_round(app, model_bytes // 4, ROUNDS)[1:]
    return ways


@contextmanager
def _fleet(folder: Path, delay_seconds: float = 0.0) -> Iterator[LocalFleet]:
    """A coordinator with two running daemons; where there is a delay, every byte takes so long each way."""
    with local_fleet(folder) as fleet, ExitStack() as stack:
        url = None
        if delay_seconds:
            parts = urlsplit(fleet.device_url)
            assert parts.hostname is not None and parts.port is not None
            target = (parts.hostname, parts.port)
            url = stack.enter_context(Line(target, delay_seconds=delay_seconds)).url
        for name in ("a", "b"):
            noop.add_device(fleet, name, url=url).start()
        yield fleet
        fleet.stop()


def _ours(fleet: LocalFleet, model_bytes: int) -> list[float]:
    run = noop.start(fleet, noop.experiment(model_bytes, ROUNDS))
    noop.finish(fleet.client, run)
    return noop.seconds_between_commits(fleet.client, run)


def _print(medians: dict[str, float]) -> None:
    print("no-op rounds with 2 clients, median seconds a round")
    for name, value in medians.items():
        print(f"  {name:<28} {value:7.3f}")
    for goal, met in goals(medians).items():
        print(f"  {goal:<42} {'met' if met else 'MISSED'}")
