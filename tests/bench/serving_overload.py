"""What becomes of requests when more of them come than can be computed: Poisson and bursty arrivals at .3 to 1.6 of the capacity.

Arrivals are an open loop: they do not wait for answers. The capacity is measured by a closed loop just before. Requests have 8 rows of
`resnet8`, about 3 ms of computation, so that neither the generator, a process of its own, nor the front is what limits them on two
cores. Beside it a server that waits up to 2 ms for a batch to fill.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from tests.bench.serving_rates import MODELS, SHAPE, run
from tests.support import serving_load as loads
from tests.support.serving import Server, rows, serving, torch_model

SLO_SECONDS = 0.1
LOADS = (0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.4, 1.6)
TURNS = 3
_SECONDS = 1.5
_ROWS = 8
_BURST = 8
"""Requests of a burst, on average."""
_CONNECTIONS = 512
_MODEL = "resnet8"
_WINDOW = (sys.executable, "-m", "tests.bench.serving_window")

Arrivals = Callable[[np.random.Generator, float], list[float]]


@dataclass
class Point:
    """What became of the requests at one load, over all turns. `capacity`: requests that could have been answered."""

    sent: list[loads.Sent] = field(default_factory=list)
    capacity: float = 0.0

    @property
    def in_time(self) -> float:
        """Share of the requests that were answered within the time limit."""
        return self._share(lambda each: each.status == 200 and each.seconds <= SLO_SECONDS)

    @property
    def late(self) -> float:
        """Share that was answered too late."""
        return self._share(lambda each: each.status == 200 and each.seconds > SLO_SECONDS)

    @property
    def refused_late(self) -> float:
        """Share that was refused, but only after the time limit."""
        return self._share(lambda each: each.status != 200 and each.seconds > SLO_SECONDS)

    @property
    def of_capacity(self) -> float:
        """Requests answered in time as a share of what could be answered."""
        return self.in_time * len(self.sent) / self.capacity

    def percentile(self, percent: float) -> float:
        """Of the seconds of answers."""
        return float(np.percentile([each.seconds for each in self.sent if each.status == 200], percent))

    def _share(self, what: Callable[[loads.Sent], bool]) -> float:
        return sum(map(what, self.sent)) / len(self.sent)


def poisson(rng: np.random.Generator, rate: float) -> list[float]:
    """Times of arrivals within `_SECONDS`."""
    return sorted(rng.uniform(0, _SECONDS, rng.poisson(rate * _SECONDS)).tolist())


def bursty(rng: np.random.Generator, rate: float) -> list[float]:
    """The same number in bursts that come together: a Poisson process of bursts, whose sizes are geometric."""
    times = rng.uniform(0, _SECONDS, rng.poisson(rate * _SECONDS / _BURST))
    return sorted(np.repeat(times, rng.geometric(1 / _BURST, len(times))).tolist())


Curves = dict[str, dict[float, Point]]


def overload(folder: Path, picture: Path) -> dict[str, float]:
    """Figures of the three ways; a plot of them goes to `picture`."""
    curves, capacity = _measure(folder)
    plot(curves, picture)
    figures = {"requests per second at capacity": capacity}
    for way, points in curves.items():
        for load, point in points.items():
            title = f"{way} at {load:g}"
            figures[f"{title}: in time"] = point.in_time
            figures[f"{title}: in time / capacity"] = point.of_capacity
            figures[f"{title}: late"] = point.late
            figures[f"{title}: refused late"] = point.refused_late
            figures[f"{title}: p50 ms"] = 1e3 * point.percentile(50)
            figures[f"{title}: p99 ms"] = 1e3 * point.percentile(99)
    lags = [each.lag for points in curves.values() for point in points.values() for each in point.sent]
    figures["p99 lag of the generator, ms"] = 1e3 * float(np.percentile(lags, 99))
    return figures


def _measure(folder: Path) -> tuple[Curves, float]:
    model = torch_model(folder / "overload", _MODEL, input_shape=list(SHAPE), options=MODELS[_MODEL])
    ways: Mapping[str, tuple[int, Arrivals]] = {
        "Poisson": (0, poisson),
        "bursty": (0, bursty),
        "Poisson, 2 ms window": (1, poisson),
    }
    curves: Curves = {way: {load: Point() for load in LOADS} for way in ways}
    capacities = []
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(folder / "overload-home")),
            stack.enter_context(serving(folder / "window-home", program=_WINDOW)),
        ]
        for server in servers:
            server.deployed("m", model, slo_ms=1000 * SLO_SECONDS)
            _capacity(server)
        for turn in range(TURNS):
            for number, (way, (place, arrivals)) in enumerate(ways.items()):
                capacity = _capacity(servers[place])
                capacities.append(capacity)
                for load in LOADS:
                    rng = np.random.default_rng([turn, number, round(100 * load)])
                    times = arrivals(rng, load * capacity)
                    point = curves[way][load]
                    point.sent += run(loads.open_loop(servers[place].port, _request(), times, _CONNECTIONS))
                    point.capacity += capacity * _SECONDS
    return curves, statistics.median(capacities)


def _capacity(server: Server) -> float:
    """Requests per second of a closed loop that keeps all batches full."""
    request = _request(timeout=60_000_000)
    run(loads.closed_loop(server.port, [request], 16, total=50))
    found = run(loads.closed_loop(server.port, [request], 32, total=400))
    assert not found.failed, found.statuses
    return float(400 / found.wall)


def _request(**parameters: Any) -> bytes:
    return loads.binary_request("/v2/models/m/infer", rows(_ROWS, SHAPE), **parameters)


def plot(curves: Curves, picture: Path) -> None:
    """Answers in time and their latency, by the load."""
    plt.switch_backend("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    styles: Sequence[tuple[str, str]] = (("C0", "-"), ("C1", "-"), ("C7", "--"))
    for (way, points), (color, line) in zip(curves.items(), styles, strict=True):
        left.plot(
            LOADS, [points[load].of_capacity for load in LOADS], line, color=color, marker="o", label=way
        )
        right.plot(
            LOADS,
            [1e3 * points[load].percentile(99) for load in LOADS],
            line,
            color=color,
            marker="o",
            label=f"{way}, p99",
        )
        right.plot(
            LOADS,
            [1e3 * points[load].percentile(50) for load in LOADS],
            line,
            color=color,
            marker=".",
            alpha=0.5,
            label=f"{way}, p50",
        )
    left.plot(LOADS, [min(load, 1.0) for load in LOADS], ":", color="black", label="all that is possible")
    left.set(
        xlabel="requests sent / capacity", ylabel="answered within the time limit / capacity", ylim=(0, 1.1)
    )
    right.axhline(1e3 * SLO_SECONDS, color="C3", linewidth=1, label="time limit")
    right.set(xlabel="requests sent / capacity", ylabel="latency of answers, ms", ylim=(0, 2e3 * SLO_SECONDS))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    right.legend(fontsize=8, ncol=2, loc="upper left")
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
