"""All-reduce by every algorithm, seconds measured beside those predicted, at 1 KB and at 100 MB.

    python -m tests.bench.collectives [PROCESSES]        4 unless said

alpha and beta are fitted to exchanges of neighbours, all at once as in a ring, and gamma to additions in memory.
Algorithms and torch's own take turns, so that a busy machine slows all alike.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from models.pretrain.planner import collective_cost
from models.pretrain.planner.collective_cost import Link
from tests.support import ranks
from tests.support.collectives.cost import ALGORITHMS, all_reduce

SIZES = {"1 KB": 1024, "100 MB": 100_000_000}
REPEATS = {"1 KB": 30, "100 MB": 3}
LINK_BYTES = (1024, 16_384, 262_144, 4_194_304, 33_554_432)
PROCESSES = 4


def run(processes: int = PROCESSES) -> dict[str, Any]:
    """Prints and returns: the link, and of every payload and algorithm the seconds measured and predicted."""
    found = ranks.run(processes, f"{__name__}:measure")
    # a collective is over when its last process is
    seconds = {
        size: {name: max(one["seconds"][size][name] for one in found) for name in found[0]["seconds"][size]}
        for size in SIZES
    }
    samples = [(size, statistics.median(one["link"][size] for one in found), 1) for size in LINK_BYTES]
    fitted = collective_cost.fit(samples)
    link = Link(fitted.alpha, fitted.beta, statistics.median(one["gamma"] for one in found))
    sys.stdout.write(
        f"{processes} processes: alpha {link.alpha * 1e6:.0f} us, beta {link.beta * 1e9:.3f} ns/byte, "
        f"gamma {link.gamma * 1e9:.3f} ns/byte\n"
    )
    results: dict[str, Any] = {
        "processes": processes,
        "alpha": link.alpha,
        "beta": link.beta,
        "gamma": link.gamma,
    }
    for size, measured in seconds.items():
        predicted = {
            name: all_reduce(processes, SIZES[size], name, _per_host(name)).seconds(link)
            for name in ALGORITHMS
        }
        results[size] = {"measured": measured, "predicted": predicted}
        for name, took in sorted(measured.items(), key=lambda pair: pair[1]):
            beside = f"{predicted[name] * 1e3:10.3f}" if name in predicted else ""
            sys.stdout.write(f"{size:>8} {name:14}{took * 1e3:10.3f} ms, predicted {beside}\n")
    return results


def measure() -> dict[str, Any]:
    """In a rank: medians, of every algorithm, of exchanges with neighbours, and of adding up a byte."""
    import torch
    import torch.distributed as dist

    from tests.support.collectives import (
        doubling,
        hierarchical,
        mesh,
        ring,
        tree,
    )
    from tests.support.collectives.channel import Channel, default_channel

    dist.init_process_group("gloo")
    channel = default_channel()
    ways: dict[str, Callable[[Channel, torch.Tensor], object]] = {
        "ring": ring.all_reduce,
        "tree": tree.all_reduce,
        "mesh": mesh.all_reduce,
        "doubling": doubling.all_reduce,
        "halving": doubling.all_reduce_halving,
        "hierarchical": partial(hierarchical.all_reduce, per_host=_per_host("hierarchical")),
        "torch": lambda _, tensor: dist.all_reduce(tensor),
    }
    found: dict[str, Any] = {"seconds": {}, "link": {}}
    for size, length in SIZES.items():
        tensor = torch.zeros(length // 4)
        found["seconds"][size] = _medians(
            {name: partial(way, channel, tensor) for name, way in ways.items()}, REPEATS[size]
        )

    def neighbours(tensor: torch.Tensor) -> None:
        sent, received = tensor.tensor_split(2)
        channel.exchange(
            sent, (channel.place + 1) % channel.size, received, (channel.place - 1) % channel.size
        )

    for length in LINK_BYTES:
        tensor = torch.zeros(2 * length // 4)
        found["link"][length] = _medians({"link": partial(neighbours, tensor)}, 9)["link"]
    one, other = torch.zeros(2, 4_000_000)
    found["gamma"] = _medians({"add": partial(torch.add, one, other, out=one)}, 9)["add"] / one.nbytes
    return found


def _medians(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each way, all processes beginning together; the first turn does not count."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            dist.barrier()
            began = time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _per_host(name: str) -> int:
    return 2 if name == "hierarchical" else 0


if __name__ == "__main__":
    run(*map(int, sys.argv[1:]))
