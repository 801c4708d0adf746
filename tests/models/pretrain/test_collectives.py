"""Collectives on send and receive do what torch's do, and send what the cost model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from models.pretrain.planner import collective_cost
from models.pretrain.planner.collective_cost import Link
from tests.support import ranks
from tests.support.collectives import cost
from tests.support.collectives.cost import Cost, of_all
from tests.support.long import extended

LINK = Link(alpha=1e-4, beta=1e-9, gamma=1e-10)
EVEN, ODD = 7 * 2 * 3 * 4 * 5 * 8, 99_991
"""Elements that split evenly, halves of halves too, and that do not."""

Sent = dict[str, tuple[int, int]]
"""By collective: messages and bytes."""


@dataclass(frozen=True)
class Outcome:
    """In one process: how many results were compared with torch's, and what payloads of `EVEN` and `ODD` sent."""

    compared: int
    even: Sent
    odd: Sent


@pytest.fixture(scope="module", params=[5, *extended(2, 3, 8)])
def world(request: pytest.FixtureRequest) -> list[Outcome]:
    """What every process of a world found, by rank."""
    return ranks.run(request.param, f"{__name__}:compare_and_measure")


@pytest.mark.slow
def test_collectives_do_what_torchs_do(world: list[Outcome]) -> None:
    assert all(found.compared > 200 for found in world)


@pytest.mark.slow
def test_bytes_and_messages_are_those_predicted(world: list[Outcome]) -> None:
    for name, predicted in predictions(len(world), 4 * EVEN).items():
        messages, sent_bytes = (sum(found.even[name][i] for found in world) for i in (0, 1))
        assert (messages, sent_bytes) == pytest.approx((predicted.all_messages, predicted.all_bytes)), name


@pytest.mark.slow
def test_each_process_of_a_ring_sends_2_n_minus_1_nths_of_the_payload(world: list[Outcome]) -> None:
    others = len(world) - 1
    for found in world:
        messages, sent_bytes = found.odd["ring"]
        assert messages == 2 * others
        assert sent_bytes == pytest.approx(2 * others / len(world) * 4 * ODD, rel=0.01)


@pytest.mark.parametrize("processes", [4, 5, 8, 64, 100])
def test_short_payloads_go_by_few_messages_and_long_ones_by_few_bytes(processes: int) -> None:
    short, long = (cost.order(LINK, processes, size) for size in (1024, 100 << 20))
    assert short.index("tree") < short.index("ring")
    assert long.index("ring") < long.index("tree")
    assert short[0] in ("doubling", "tree", "hierarchical")
    assert long[0] in ("ring", "mesh", "halving")
    by_messages = sorted(short, key=lambda name: cost.all_reduce(processes, 1024, name).messages)
    by_bytes = sorted(long, key=lambda name: cost.all_reduce(processes, 100 << 20, name).sent_bytes)
    assert (
        cost.all_reduce(processes, 1, short[0]).messages
        == cost.all_reduce(processes, 1, by_messages[0]).messages
    )
    assert cost.all_reduce(processes, 1, long[0]).sent_bytes == pytest.approx(
        cost.all_reduce(processes, 1, by_bytes[0]).sent_bytes
    )


@pytest.mark.parametrize("algorithm", cost.ALGORITHMS)
def test_no_algorithm_sends_less_than_the_least(algorithm: cost.Algorithm) -> None:
    for processes in range(2, 65):
        found = cost.all_reduce(processes, 1.0, algorithm)
        assert found.all_bytes >= 2 * (processes - 1) - 1e-9
        assert found.sent_bytes >= 2 * (processes - 1) / processes - 1e-9
        assert found.messages >= (processes - 1).bit_length()


def test_one_process_sends_nothing() -> None:
    for algorithm in cost.ALGORITHMS:
        assert cost.all_reduce(1, 1e6, algorithm) == Cost(0, 0, 0, 0, 0)


def test_fit_finds_the_link_that_made_the_samples() -> None:
    samples = [(size, 3e-5 + 2e-9 * size, 1) for size in (1, 1e3, 1e5, 1e7)]
    ring = cost.all_reduce(4, 1e6)
    samples.append((ring.sent_bytes, ring.seconds(Link(3e-5, 2e-9)), ring.messages))
    found = collective_cost.fit(samples)
    assert (found.alpha, found.beta) == pytest.approx((3e-5, 2e-9))


def test_fit_is_never_negative() -> None:
    assert collective_cost.fit([(1e3, 1e-6, 1), (1e6, 1.0, 1)]).alpha == 0
    assert collective_cost.fit([(1e3, 1.0, 1), (1e6, 1e-3, 1)]).beta == 0


def test_fit_needs_two_lengths() -> None:
    with pytest.raises(ValueError, match="two lengths"):
        collective_cost.fit([(1e3, 1e-6, 1), (1e3, 2e-6, 1)])


def test_a_slow_link_between_hosts_favours_the_hierarchy() -> None:
    slow = Link(1e-3, 1e-7)
    inside, between = cost.hierarchical(8, 1e6, per_host=4)
    seconds = inside.seconds(LINK) + between.seconds(slow)
    assert seconds < cost.all_reduce(8, 1e6).seconds(slow)


def predictions(processes: int, size: int) -> dict[str, Cost]:
    names: dict[str, Callable[[int, float], Cost]] = {
        "broadcast": cost.broadcast,
        "reduce": cost.reduce,
        "gather": lambda n, size: cost.gather(n, n * size),
        "scatter": lambda n, size: cost.scatter(n, n * size),
        "all_gather": lambda n, size: of_all(n, collective_cost.all_gather(n, size)),
        "reduce_scatter": lambda n, size: of_all(n, collective_cost.reduce_scatter(n, size)),
        "all_to_all": lambda n, size: of_all(n, collective_cost.all_to_all(n, n * size)),
    }
    found = {name: of(processes, size) for name, of in names.items()}
    for algorithm in cost.ALGORITHMS:
        per_host = 3 if algorithm == "hierarchical" else 0
        found[algorithm] = cost.all_reduce(processes, size, algorithm, min(per_host, processes))
    return found


def compare_and_measure() -> Outcome:
    """In a rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return Outcome(compare_with_torch(), measure(EVEN), measure(ODD))


def measure(elements: int) -> Sent:
    """In a rank: what every collective of `elements` float32 sent."""
    import torch
    import torch.distributed as dist

    from tests.support.collectives import (
        pairwise,
        ring,
        tree,
    )
    from tests.support.collectives.channel import Channel, default_channel

    size = dist.get_world_size()
    rows = torch.zeros(size, elements)
    ways: dict[str, Callable[[Channel, torch.Tensor], object]] = {
        "broadcast": tree.broadcast,
        "reduce": tree.reduce,
        "gather": tree.gather,
        "scatter": lambda channel, tensor: tree.scatter(channel, rows, tensor),
        "all_gather": ring.all_gather,
        "reduce_scatter": ring.reduce_scatter,
        "all_to_all": lambda channel, tensor: pairwise.all_to_all(channel, rows, rows.clone()),
        **all_reductions(),
    }
    found = {}
    for name, way in ways.items():
        channel = default_channel()
        way(channel, torch.zeros(elements))
        found[name] = (channel.traffic.messages, channel.traffic.sent_bytes)
    return found


def compare_with_torch() -> int:
    """In a rank: all against torch's, any length, several dtypes, any root. How many were compared."""
    import torch
    import torch.distributed as dist

    from tests.support.collectives import (
        pairwise,
        ring,
        tree,
    )
    from tests.support.collectives.channel import default_channel

    rank, size, checked = dist.get_rank(), dist.get_world_size(), 0
    channel = default_channel()
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.05, torch.int64: 0}

    for dtype, within in tolerance.items():
        for length in (1, 37, 1001):
            generator = torch.Generator().manual_seed(length * 100 + rank)
            mine = (torch.randn(length, generator=generator) * 8).to(dtype)

            def alike(found: torch.Tensor, expected: torch.Tensor, within: float = within) -> None:
                nonlocal checked
                torch.testing.assert_close(found, expected, rtol=within, atol=within * 8)
                checked += 1

            total, largest = mine.clone(), mine.clone()
            dist.all_reduce(total)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            everyones = torch.empty(size, length, dtype=dtype)
            dist.all_gather(list(everyones), mine)
            for way in all_reductions().values():
                found = mine.clone()
                way(channel, found)
                alike(found, total)
                found = mine.clone()
                way(channel, found, torch.maximum)
                alike(found, largest, 0)

            own = torch.zeros(size * length, dtype=dtype)
            own.view(size, length)[rank] = mine
            ring.all_gather(channel, own)
            alike(own.view(size, length), everyones, 0)
            summed = mine.clone()
            ring.reduce_scatter(channel, summed)
            alike(summed.tensor_split(size)[rank], total.tensor_split(size)[rank])

            for root in range(size):
                found, expected = mine.clone(), mine.clone()
                tree.broadcast(channel, found, root)
                dist.broadcast(expected, root)
                alike(found, expected, 0)
                found = mine.clone()
                tree.reduce(channel, found, root)
                if rank == root:
                    alike(found, total)
                gathered = tree.gather(channel, mine, root)
                assert (gathered is None) == (rank != root)
                if gathered is not None:
                    alike(gathered, everyones, 0)
                tree.scatter(channel, everyones + root if rank == root else None, found, root)
                alike(found, mine + root, 0)

            sent = everyones * (rank + 1)
            received, expected = torch.empty_like(sent), torch.empty_like(sent)
            pairwise.all_to_all(channel, sent, received)
            dist.all_to_all_single(expected, sent)
            alike(received, expected, 0)
    return checked


def all_reductions() -> dict[str, Any]:
    import torch.distributed as dist

    from tests.support.collectives import (
        doubling,
        hierarchical,
        mesh,
        ring,
        tree,
    )

    def by_hosts(channel: Any, tensor: Any, *operation: Any) -> None:
        hierarchical.all_reduce(channel, tensor, min(3, dist.get_world_size()), *operation)

    return {
        "ring": ring.all_reduce,
        "tree": tree.all_reduce,
        "mesh": mesh.all_reduce,
        "doubling": doubling.all_reduce,
        "halving": doubling.all_reduce_halving,
        "hierarchical": by_hosts,
    }
