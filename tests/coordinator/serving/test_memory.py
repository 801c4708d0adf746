"""The budget of memory: by virtual sizes who leaves and who waits, and in a server that four models do not fit into at once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.serving.resources.memory import IDLE_SECONDS, MemoryBudget, Needs, NoRoom
from coordinator.serving.resources.processes import Memory, memory_of, tree
from tests.support import serving_load as loads
from tests.support.cli import assert_refused, run_here
from tests.support.serving import Background, logits_of, rows, serving, torch_model

pytestmark = pytest.mark.slow

BYTES = 100
"""Of each virtual worker."""


@dataclass(eq=False)
class Tenant:
    """A virtual deployment. `used`: seconds ago; None: it has requests."""

    world: World
    name: str
    used: float | None = 10.0
    number: str = "1"
    workers: list[int] = field(default_factory=list)

    @property
    def idle_since(self) -> float | None:
        return None if self.used is None else asyncio.get_running_loop().time() - self.used

    def pids(self) -> list[int]:
        return list(self.workers)

    def leave(self) -> bool:
        assert self.used is not None, "it has requests"
        self.world.end(self.workers.pop())
        return True

    def shrink(self) -> bool:
        if len(self.workers) < 2:
            return False
        self.world.end(self.workers.pop())
        return True


class World:
    """Virtual workers of virtual deployments under a real budget."""

    def __init__(self, limit: int, *names: str) -> None:
        self.sizes: dict[int, int] = {}
        self.tenants = {name: Tenant(self, name) for name in names}
        self.budget = MemoryBudget(
            limit,
            self.tenants.values,
            lambda: list(self.sizes),
            lambda pid: Memory(self.sizes.get(pid, 0), self.sizes.get(pid, 0)),
        )
        self._next = 0
        for name in names:
            self.budget._remember(name, "1", [Memory(BYTES, BYTES)])

    def begin(self, name: str, size: int = BYTES) -> int:
        self._next += 1
        self.sizes[self._next] = size
        self.tenants[name].workers.append(self._next)
        return self._next

    def end(self, pid: int) -> None:
        del self.sizes[pid]

    async def start(
        self,
        name: str,
        *,
        further: bool = False,
        seconds: float = 0.0,
        size: int = BYTES,
        weights: int = 0,
    ) -> None:
        async with self.budget.room_for(Needs(name, "1", weights), further=further, seconds=seconds):
            await asyncio.sleep(0)
            self.begin(name, size)

    def counts(self) -> list[int]:
        return [len(each.workers) for each in self.tenants.values()]


def run(work: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(work)


def test_the_least_recently_used_leaves_first() -> None:
    async def check() -> None:
        world = World(3 * BYTES, "a", "b", "c", "d")
        for name, used in zip("abc", (5, 20, 10), strict=True):
            await world.start(name)
            world.tenants[name].used = used
        await world.start("d")
        assert world.counts() == [1, 0, 1, 1]

    run(check())


def test_nobody_leaves_in_vain() -> None:
    async def check() -> None:
        world = World(3 * BYTES, "a", "b", "c")
        await world.start("a")
        await world.start("b")
        world.tenants["b"].used = None
        with pytest.raises(NoRoom, match="what could end now would not make enough room"):
            await world.start("c", weights=BYTES)  # and two copies while it is opened
        assert world.counts() == [1, 1, 0]

    run(check())


def test_a_further_worker_takes_no_room_from_what_was_used_just_now() -> None:
    async def check() -> None:
        world = World(2 * BYTES, "a", "b")
        await world.start("a")
        await world.start("b")
        world.tenants["a"].used = None
        world.tenants["b"].used = IDLE_SECONDS / 2
        with pytest.raises(NoRoom):
            await world.start("a", further=True)
        assert world.counts() == [1, 1]
        world.tenants["b"].used = 2 * IDLE_SECONDS
        with pytest.raises(NoRoom):  # looked for only once a second
            await world.start("a", further=True)
        world.budget._denied.clear()
        await world.start("a", further=True)
        assert world.counts() == [2, 0]

    run(check())


def test_a_first_worker_gets_one_that_a_busy_deployment_has_besides_its_first() -> None:
    async def check() -> None:
        world = World(3 * BYTES, "a", "b")
        for further in (False, True, True):
            await world.start("a", further=further)
        world.tenants["a"].used = None
        await world.start("b", seconds=5)
        assert world.counts() == [2, 1]

    run(check())


def test_a_first_worker_waits_for_a_deployment_to_become_idle() -> None:
    async def check() -> None:
        world = World(BYTES, "a", "b")
        await world.start("a")
        world.tenants["a"].used = None
        with pytest.raises(NoRoom) as refused:
            await world.start("b")
        assert (refused.value.status, refused.value.retry_after_seconds) == (503, 1)
        waiting = asyncio.create_task(world.start("b", seconds=30))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        world.tenants["a"].used = 0.0
        await waiting
        assert world.counts() == [0, 1]

    run(check())


def test_what_was_measured_is_expected_of_the_next_version_too() -> None:
    async def check() -> None:
        world = World(10 * BYTES, "a")
        assert world.budget.expected_bytes(Needs("b", "1", BYTES // 2)) == BYTES // 2
        await world.start("a", size=4 * BYTES)
        await world.budget.settle(Needs("a", "1"), world.tenants["a"].pids())
        assert world.budget.expected_bytes(Needs("a", "1")) == 4 * BYTES
        assert world.budget.expected_bytes(Needs("a", "2", BYTES, previous="1")) == 4 * BYTES
        assert world.budget.expected_bytes(Needs("a", "2", 5 * BYTES, previous="1")) == 5 * BYTES

    run(check())


def test_a_version_that_takes_more_than_expected_makes_room_or_is_refused() -> None:
    async def check() -> None:
        world = World(3 * BYTES, "a", "b")
        await world.start("a")
        pid = world.begin("b", 3 * BYTES)
        world.tenants["b"].used = None  # it is being opened
        await world.budget.settle(Needs("b", "1"), [pid])
        assert world.counts() == [0, 1]
        world.sizes[pid] = 4 * BYTES
        with pytest.raises(NoRoom, match="with b, all workers take"):
            await world.budget.settle(Needs("b", "1"), [pid])

    run(check())


def test_idle_deployments_leave_when_others_grow() -> None:
    async def check() -> None:
        world = World(3 * BYTES, "a", "b", "c")
        for name, used in zip("abc", (None, 5.0, 9.0), strict=True):
            await world.start(name)
            world.tenants[name].used = used
        world.sizes[world.tenants["a"].workers[0]] += BYTES // 2
        await world.budget.enforce()
        assert world.counts() == [1, 1, 0]
        world.sizes[world.tenants["a"].workers[0]] = 5 * BYTES
        await world.budget.enforce()
        assert world.counts() == [1, 0, 0]  # what computes stays

    run(check())


@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_requests_exceeds_the_limit(seed: int) -> None:
    """Deployments become busy and idle at random and start workers at the same time."""
    draw = random.Random(seed)
    most = 0

    async def check() -> None:
        nonlocal most
        world = World(5 * BYTES, *"abcdefgh")

        async def want(name: str) -> None:
            nonlocal most
            tenant = world.tenants[name]
            try:
                await world.start(name, further=bool(tenant.workers), seconds=0.05)
            except NoRoom:
                return
            tenant.used = draw.choice((None, 0.0, 3.0, 9.0))
            most = max(most, sum(world.sizes.values()))

        for _ in range(60):
            await asyncio.gather(*(want(name) for name in draw.sample("abcdefgh", 3)))
            for each in world.tenants.values():
                if draw.random() < 0.5:
                    each.used = draw.choice((None, 1.0, 5.0))
        assert most == 5 * BYTES

    run(check())


def test_memory_of_a_process_that_has_ended_is_nothing() -> None:
    assert memory_of(2**22 + 1) == Memory(0, 0)
    own = memory_of(os.getpid())
    assert own.pss >= own.own > 0


def test_a_bad_limit_is_refused(tmp_path: Path) -> None:
    done = run_here("serving", "start", "--home", tmp_path / "home", "--memory", "4 parsecs")
    assert_refused(done, "--memory '4 parsecs'", "expected a number above 0 and a unit (B, KB, MB, GB, KiB")


@pytest.mark.slow
def test_four_models_share_memory_for_three(tmp_path: Path) -> None:
    """All answer under changing load, as they did alone; the workers stay below the limit; what cannot fit is refused."""
    names = ("a", "b", "c", "d")
    options = {"hidden": [2000, 2000]}  # 16 MB
    models = {
        name: torch_model(tmp_path / name, "mlp", seed, options=options) for seed, name in enumerate(names)
    }
    x = rows(2)
    with serving(tmp_path / "free") as server:
        one = memory_of(server.deployed("a", models["a"])["pids"][0]).own
        limit = _total(tree(server.process.pid)[1:]) + 2 * one + one // 2
    answers: dict[str, list[Any]] = {name: [] for name in names}
    with serving(tmp_path / "home", "--memory", f"{limit}B") as server:
        peak = Background(lambda: _peak(server.process.pid, 3.0))
        for name, model in models.items():
            server.deployed(name, model, workers={"min": 1, "max": 2})
        assert 1 <= sum(server.status(name)["workers"] for name in names) <= 3
        assert server.call("GET", "/v2/health/ready")[0] == 200
        for name in (*names, *names):
            request = loads.json_request(f"/v2/models/{name}/infer", x)
            found = asyncio.run(loads.closed_loop(server.port, [request], 4, total=20, keeps=True))
            assert found.failed == 0
            answers[name] += [logits_of(json.loads(body)) for _, body in found.bodies]
        assert all(np.allclose(each, answers[name][0], atol=1e-4) for name in names for each in answers[name])
        assert not np.allclose(answers["a"][0], answers["b"][0], atol=1e-2)
        assert peak.result() <= limit + one // 2  # what strangers map of the same libraries changes too
        memory = server.call("GET", "/fedloop/v1/deployments")[1]["memory"]
        assert memory["limit_bytes"] == limit
        assert 0 < memory["used_bytes"] <= limit


def _peak(pid: int, seconds: float) -> int:
    """The most that the workers of a server take together within so many seconds."""
    most, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        most = max(most, _total(tree(pid)[1:]))
        time.sleep(0.05)
    return most


def _total(pids: Sequence[int]) -> int:
    return sum(memory_of(pid).pss for pid in pids)
