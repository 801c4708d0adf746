"""Requests per CPU-second of whole servers: ours, LitServe and Ray Serve with the same models of PyTorch; ours with and without batches.

Requests are JSON with one row, over 32 connections, to one worker with one thread. The CPU time is that of all processes of a server.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from tests.bench.serving_peers import peer
from tests.support import serving_load as loads
from tests.support.cli import FEDLOOP
from tests.support.serving import Server, cpu_seconds, memory_bytes, rows, serving, torch_model

CONNECTIONS = 32
REPEATS = 5
MODELS: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"hidden": [256, 128]},
    "resnet8": {"norm": "batch", "width": 16},
}
CHOOSES = ("resnet8",)
"""Models that are also served by the backend that `fedloop serving profile` finds to be fastest."""
CHOICE = "choice"
SHAPE = (28, 28)
MEMORY_WORKERS = 4
_TOTALS = {
    "mlp": {"ours": 4000, "litserve": 500, "ray": 160},
    "resnet8": {"ours": 1200, "litserve": 400, "ray": 160},
}
"""Requests of one turn: about one CPU-second each."""
_SLO_MS = 60_000


@dataclass(frozen=True)
class Turn:
    """`rate`: requests per CPU-second; `wall`: per second; `median`: seconds of a request."""

    rate: float
    wall: float
    median: float


@dataclass(frozen=True)
class Load:
    """Requests to one server, in turns. `pid`: of the process above all its others."""

    pid: int
    port: int
    requests: Sequence[bytes]
    total: int
    connections: int = CONNECTIONS

    def turn(self) -> Turn:
        before, began = cpu_seconds(self.pid), time.perf_counter()
        found = run(loads.closed_loop(self.port, self.requests, self.connections, total=self.total))
        wall, used = time.perf_counter() - began, cpu_seconds(self.pid) - before
        assert not found.failed, found.statuses
        return Turn(self.total / used, self.total / wall, statistics.median(found.seconds))


def run(work: Any) -> Any:
    """What a coroutine returns, in the loop that costs the generator least."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def in_turns(ways: Mapping[str, Load], repeats: int = REPEATS) -> dict[str, list[Turn]]:
    """Each way once for warming up, then `repeats` times, one after the other, so that a busy machine slows all alike."""
    found: dict[str, list[Turn]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, load in ways.items():
            turn = load.turn()
            if number:
                found[name].append(turn)
    return found


def ratio(
    over: Sequence[Turn], under: Sequence[Turn], value: Callable[[Turn], float] = lambda turn: turn.rate
) -> float:
    """The median over the turns of how many times `over` is `under`."""
    return statistics.median(value(one) / value(other) for one, other in zip(over, under, strict=True))


def against_peers(folder: Path) -> dict[str, float]:
    """Rates and memory of each model in each server."""
    figures: dict[str, float] = {}
    for name, options in MODELS.items():
        figures |= _of_model(folder, name, options)
    return figures


def _of_model(folder: Path, name: str, options: Mapping[str, Any]) -> dict[str, float]:
    model = torch_model(folder / name, name, input_shape=list(SHAPE), options=options)
    totals = _TOTALS[name]
    home = folder / f"{name}-home"
    if name in CHOOSES:
        subprocess.run([FEDLOOP, "serving", "profile", model, "--home", home], check=True, stdout=sys.stderr)
    with ExitStack() as stack:
        server = stack.enter_context(serving(home))
        pid, port = server.process.pid, server.port
        _deploy(server, "torch", model)
        ways = {"torch": Load(pid, port, requests("torch"), totals["ours"])}
        ways["torch"].turn()
        memory = {"ours": memory_bytes(pid)}
        if name in CHOOSES:
            _deploy(server, CHOICE, model, backend="auto")
            print(f"{name}: its profile chooses {server.status(CHOICE)['backend']}")
            ways[CHOICE] = Load(pid, port, requests(CHOICE), totals["ours"])
        posts = [loads.json_request("/predict", _row(number)) for number in range(50)]
        for other in ("litserve", "ray"):
            example = posts[0].partition(b"\r\n\r\n")[2]
            started = stack.enter_context(peer(other, name, options, folder / f"{other}-{name}.log", example))
            ways[other] = Load(started.pid, started.port, posts, totals[other])
        turns = in_turns(ways)
        memory |= {other: memory_bytes(ways[other].pid) for other in ("litserve", "ray")}
    figures = {
        f"{name}, torch / LitServe": ratio(turns["torch"], turns["litserve"]),
        f"{name}, torch / Ray Serve": ratio(turns["torch"], turns["ray"]),
        f"{name}, memory / LitServe's": memory["ours"] / memory["litserve"],
    }
    if name in CHOOSES:
        figures[f"{name}, the profile's choice / LitServe"] = ratio(turns[CHOICE], turns["litserve"])
    for way, values in turns.items():
        figures[f"{name}, {way}: requests per CPU-second"] = statistics.median(each.rate for each in values)
        figures[f"{name}, {way}: requests per second"] = statistics.median(each.wall for each in values)
    return figures | {f"{name}, {way}: MB": value / 1e6 for way, value in memory.items()}


def memory_of_workers(folder: Path) -> dict[str, float]:
    """Memory of `MEMORY_WORKERS` workers of one `mlp`, in ours and in LitServe."""
    name, options = "mlp", MODELS["mlp"]
    model = torch_model(folder / "several", name, input_shape=list(SHAPE), options=options)
    with serving(folder / "several-home") as server:
        _deploy(server, "torch", model, workers={"min": MEMORY_WORKERS, "max": MEMORY_WORKERS})
        Load(server.process.pid, server.port, requests("torch"), 2000).turn()
        ours = memory_bytes(server.process.pid)
    posts = [loads.json_request("/predict", _row(0))]
    example = posts[0].partition(b"\r\n\r\n")[2]
    with peer("litserve", name, options, folder / "several.log", example, MEMORY_WORKERS) as other:
        Load(other.pid, other.port, posts, 500).turn()
        theirs = memory_bytes(other.pid)
    title = f"mlp, {MEMORY_WORKERS} workers"
    return {
        f"{title}: memory / LitServe's": ours / theirs,
        f"{title}, ours: MB": ours / 1e6,
        f"{title}, litserve: MB": theirs / 1e6,
    }


def batching(folder: Path) -> dict[str, float]:
    """`mlp` in batches of up to 64 rows against one row after the other."""
    model = torch_model(folder / "batched", "mlp", input_shape=list(SHAPE), options=MODELS["mlp"])
    with serving(folder / "batching-home") as server:
        sizes = {"batched": 64, "single": 1}
        for name, most in sizes.items():
            _deploy(server, name, model, max_batch=most)
        pid, port = server.process.pid, server.port
        crowded = in_turns({name: Load(pid, port, requests(name), 3000) for name in sizes})
        alone = in_turns({name: Load(pid, port, requests(name), 500, 1) for name in sizes})
    return {
        "mlp, 32 connections: batched / one by one": ratio(crowded["batched"], crowded["single"]),
        "mlp, one connection: p50 batched / one by one": ratio(
            alone["batched"], alone["single"], lambda turn: turn.median
        ),
        "mlp, one connection: p50 ms": 1e3 * statistics.median(each.median for each in alone["batched"]),
    }


def requests(name: str) -> list[bytes]:
    """Requests of one row to a deployment of ours."""
    return [loads.json_request(f"/v2/models/{name}/infer", _row(number)) for number in range(50)]


def _row(number: int) -> Any:
    return rows(1, SHAPE, number)


def _deploy(server: Server, name: str, model: Path, **settings: Any) -> None:
    server.deployed(name, model, **{"slo_ms": _SLO_MS, "backend": "torch", **settings})
