"""One budget of memory for all workers of a server, and the processes that they are forked from.

1. before a worker is started, room is made for it: workers of deployments without requests end, the least recently used first
2. a further worker of a deployment that has some already waits for none, and takes room only from those that have been idle for a while
3. what does not fit is not started, with the reason; a deployment without workers waits a few seconds for others to become idle, which
   then also give up workers beyond their first
4. what grows beyond the budget later makes idle deployments leave too; a deployment's last worker that computes is never ended

A worker is expected to take what the largest of its version was measured to take, or of the version before it; unless there is one,
its weights. While it opens the model it holds the file and a copy of it besides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from coordinator.errors import Refusal
from coordinator.serving.resources.processes import Memory, memory_of

IDLE_SECONDS = 2.0
"""Without a request for so long, a deployment makes room for further workers of others."""
HELD_SECONDS = 10.0
"""Requests wait so long for room for a deployment's first worker."""
_COPIES = 2
"""Of the weights, that a worker holds besides the model while it opens it."""
_POLL_SECONDS = 0.05
_DENIED_SECONDS = 1.0
"""After a further worker was denied, until room is looked for again."""


class NoRoom(Refusal):
    """There is no memory for a worker."""

    def __init__(self, message: str) -> None:
        super().__init__(503, "no_memory", message, retry_after_seconds=1)


class Tenant(Protocol):
    """A deployment, as the budget sees it."""

    name: str

    @property
    def idle_since(self) -> float | None:
        """On the loop's clock; None: it has requests, or may not leave now."""

    @property
    def number(self) -> str:
        """Of its version."""

    def pids(self) -> list[int]:
        """Of its workers that are ready."""

    def leave(self) -> bool:
        """Ends one worker that has nothing to do, if there is one; none is started until there is a request."""

    def shrink(self) -> bool:
        """Ends a worker once it has answered what it has, if another one stays."""


@dataclass(frozen=True)
class Needs:
    """What is started: a worker of this version of a deployment. `weights_bytes`: what it takes at the least."""

    name: str
    number: str
    weights_bytes: int = 0
    previous: str = ""
    """Number of the version before it."""


class MemoryBudget:
    """`limit_bytes`: 0 for none. `tenants`: all deployments; `processes`: ids of all workers and of what they are forked from."""

    def __init__(
        self,
        limit_bytes: int,
        tenants: Callable[[], Iterable[Tenant]] = tuple,
        processes: Callable[[], Iterable[int]] = tuple,
        measure: Callable[[int], Memory] = memory_of,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._opening = asyncio.Lock()
        self._tenants = tenants
        self._processes = processes
        self._measure = measure
        self._now = now
        self._reserved = 0
        self._pending = 0
        self._started = 0
        self._denied: dict[str, tuple[float, NoRoom]] = {}
        self._largest: dict[tuple[str, str], int] = {}

    def opening(self) -> AbstractAsyncContextManager[None]:
        """Held while a version is opened, so that its workers are measured before the next one is."""
        return self._opening if self.limit_bytes else nullcontext()

    @asynccontextmanager
    async def room_for(self, needs: Needs, *, further: bool, seconds: float = 0.0) -> AsyncIterator[None]:
        """Holds room for a worker while it is started.

        Args:
            further: it is not the first one.
            seconds: to wait for room.

        Raises:
            NoRoom: there is none.
        """
        if not self.limit_bytes:
            yield
            return
        expected = await self._make_room(needs, further, self._now() + seconds)
        self._pending += 1
        try:
            yield
        finally:
            self._pending -= 1
            self._started += 1
            self._reserved -= expected

    async def settle(self, needs: Needs, pids: Iterable[int]) -> None:
        """Measures workers that are not a tenant's yet, and makes room if they took more than was expected. Raises: NoRoom."""
        if not self.limit_bytes:
            return
        own = set(pids)
        while True:
            found = await self._look()
            self._remember(needs.name, needs.number, (found[pid] for pid in own if pid in found))
            over = self.used_bytes - self.limit_bytes
            if over <= 0:
                return
            if plan := self._plan(over, found, 0.0, but=needs.name):
                await self._leave(plan)
            elif self._pending:
                await asyncio.sleep(_POLL_SECONDS)
            else:
                raise NoRoom(self._reason(needs, 0, f"with {needs.name}, "))

    async def enforce(self) -> None:
        """Has idle deployments leave while what there is exceeds the limit."""
        if not self.limit_bytes:
            return
        found = await self._look()
        over = self.used_bytes - self.limit_bytes
        if over > 0:
            idle = self._plan(over, found, 0.0, enough=False)
            if idle:
                await self._leave(idle)
            else:
                self._shrink_one()

    def expected_bytes(self, needs: Needs) -> int:
        """What one more worker is expected to take."""
        for number in (needs.number, needs.previous):
            if (known := self._largest.get((needs.name, number))) is not None:
                return known if number == needs.number else max(known, needs.weights_bytes)
        return needs.weights_bytes

    async def _make_room(self, needs: Needs, further: bool, until: float) -> int:
        """Reserves what a worker is expected to take, and returns it."""
        denied = self._denied.get(needs.name)
        if further and denied is not None and self._now() < denied[0]:
            raise denied[1]
        while True:
            found = await self._look()
            expected = self.expected_bytes(needs) + _COPIES * needs.weights_bytes
            over = self.used_bytes + self._reserved + expected - self.limit_bytes
            if over <= 0:
                self._reserved += expected
                self._denied.pop(needs.name, None)
                return expected
            if plan := self._plan(over, found, IDLE_SECONDS if further else 0.0, but=needs.name):
                await self._leave(plan)
            elif self._is_hopeless(over, found, needs) or self._now() >= until:
                refusal = NoRoom(self._reason(needs, expected))
                self._denied[needs.name] = (self._now() + _DENIED_SECONDS, refusal)
                raise refusal
            else:
                if not further:
                    self._shrink_one()
                await asyncio.sleep(_POLL_SECONDS)

    def _is_hopeless(self, over: int, found: Mapping[int, Memory], needs: Needs) -> bool:
        """Whether there would not be enough room even if all others left."""
        others = (pid for each in self._tenants() if each.name != needs.name for pid in each.pids())
        return over > self._reserved + sum(found.get(pid, Memory()).own for pid in others)

    def _plan(
        self,
        over: int,
        found: Mapping[int, Memory],
        idle_seconds: float,
        *,
        but: str = "",
        enough: bool = True,
    ) -> list[tuple[Tenant, int]]:
        """Which deployments end how many workers, the least recently used first. Empty: that would not be enough.

        `enough`: false to take what there is.
        """
        now = asyncio.get_running_loop().time()
        idle = [
            (since, each)
            for each in self._tenants()
            if each.name != but
            and (since := each.idle_since) is not None
            and max(now - since, 0.0) >= idle_seconds
        ]
        plan: list[tuple[Tenant, int]] = []
        for _, tenant in sorted(idle, key=lambda pair: pair[0]):
            count = 0
            for pid in tenant.pids():
                if over <= 0:
                    break
                over -= found.get(pid, Memory()).own
                count += 1
            if count:
                plan.append((tenant, count))
        return plan if over <= 0 or not enough else []

    async def _leave(self, plan: list[tuple[Tenant, int]]) -> None:
        """Carries a plan out, and waits until the kernel has the memory back."""
        ended: set[int] = set()
        for tenant, count in plan:
            before = set(tenant.pids())
            for _ in range(count):
                tenant.leave()
            ended |= before - set(tenant.pids())
        for _ in range(100):
            if not any(each.pss for each in await asyncio.to_thread(self._measure_all, ended)):
                return
            await asyncio.sleep(_POLL_SECONDS / 5)

    def _shrink_one(self) -> None:
        """Has the deployment with the most workers give up one of them, in favour of one that has none."""
        most = max(self._tenants(), key=lambda each: len(each.pids()), default=None)
        if most is not None:
            most.shrink()

    async def _look(self) -> dict[int, Memory]:
        """The memory of all processes now; workers of tenants are remembered."""
        started = -1
        while (
            started != self._started
        ):  # a worker that is ready meanwhile is neither measured nor has it room reserved
            started, pids = self._started, list(self._processes())
            measured = await asyncio.to_thread(self._measure_all, pids)
        found = dict(zip(pids, measured, strict=True))
        self.used_bytes = sum(each.pss for each in measured)
        for tenant in self._tenants():
            self._remember(tenant.name, tenant.number, (found[pid] for pid in tenant.pids() if pid in found))
        return found

    def _measure_all(self, pids: Iterable[int]) -> list[Memory]:
        return [self._measure(pid) for pid in pids]

    def _remember(self, name: str, number: str, workers: Iterable[Memory]) -> None:
        largest = max((each.own for each in workers), default=0)
        if largest > self._largest.get((name, number), 0):
            self._largest[name, number] = largest

    def _reason(self, needs: Needs, expected: int, what: str = "") -> str:
        more = (
            f", and a worker of {needs.name} takes about {_megabytes(expected)} while it is started"
            if expected
            else ""
        )
        return (
            f"no memory: {what}all workers take {_megabytes(self.used_bytes + self._reserved)} of "
            f"{_megabytes(self.limit_bytes)} (--memory){more}; what could end now would not make enough room"
        )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
