"""One deployment: the version that answers now, the one that takes its place, and the number of workers.

1. a new version is opened beside the old one: files checked by hash, golden rows asked, batches measured
2. from then on new requests go to it; the old one answers what it has and ends
3. a version that cannot be opened leaves the old one on, with the reason
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from coordinator.errors import Refusal, UserError
from coordinator.operator.client import Unreachable
from coordinator.serving.deployments import DeploymentSection
from coordinator.serving.resources.memory import HELD_SECONDS, MemoryBudget, Needs, NoRoom
from coordinator.serving.served import ServedVersion
from coordinator.serving.versions import StoredVersion, Versions
from coordinator.serving.workers import Opening, WorkerDied, WorkerHost, is_torch

if TYPE_CHECKING:
    from coordinator.serving.rows import Form

_log = structlog.get_logger("fedloop.serving")

DRAIN_SECONDS = 30.0
"""For an old version to answer what it has."""
RETRY_SECONDS = 10.0
"""Until an opening that failed for a reason that may pass is tried again."""
_QUEUE_SHARE = 0.25
"""Of the time limit that a request may wait before another worker is started."""
_SHRINK_SECONDS = 2.0
"""Between the ends of two idle workers."""
_SHOWN_SECONDS = 10.0
"""So long the status shows why a worker was not started."""


class Deployment:
    """`host_for`: the process that forks the workers of a model. `backend_for`: the backend of a version."""

    def __init__(
        self,
        name: str,
        section: DeploymentSection,
        versions: Versions,
        host_for: Callable[[Mapping[str, Any]], WorkerHost],
        backend_for: Callable[[StoredVersion, DeploymentSection], str],
        make_form: type[Form],
        memory: MemoryBudget,
    ) -> None:
        self.name = name
        self.section = section
        self.active: ServedVersion | None = None
        self.stored: StoredVersion | None = None
        self.form: Form | None = None
        self.reason = ""
        self.held_back = ""
        """Why there are fewer workers than there should be."""
        self.switches = 0
        self._versions = versions
        self._host_for = host_for
        self._backend_for = backend_for
        self._make_form = make_form
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._failed: tuple[str, float] | None = None
        self._switching = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._growing = False
        self._has_left = False
        self._held_back_at = 0.0
        self._shrunk_at = 0.0
        self._opened = asyncio.Event()
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        return self.active is not None

    async def follow(self) -> None:
        """Serves the version that the reference means now; keeps the present one if that is impossible, and says why.

        Raises:
            Nothing; the reason is in `reason`.
        """
        async with self._switching:
            try:
                await self._follow()
            except Unreachable as error:
                self.reason = str(error)
            except UserError as error:
                self.reason = str(error)
                if self.active is None:
                    self._opened.set()

    async def _follow(self) -> None:
        reference = self.section.model
        number = await asyncio.to_thread(self._versions.current_number, reference) if self.active else None
        if self.active is not None and (number is None or number == self.active.number):
            self.reason = ""
            return
        if (
            self._failed is not None
            and self._failed[0] == (number or reference)
            and self._loop.time() < self._failed[1]
        ):
            return
        try:
            stored = await asyncio.to_thread(self._versions.find, reference)
            if self.active is not None and stored.number == self.active.number:
                return
            await self._open(stored)
        except (UserError, Refusal, WorkerDied) as error:
            if isinstance(error, Unreachable):
                raise
            lasts = isinstance(error, Refusal) and not isinstance(error, NoRoom) and self.active is not None
            wait = math.inf if lasts else RETRY_SECONDS
            self._failed = (number or reference, self._loop.time() + wait)
            kept = f"; version {self.active.number} stays" if self.active else ""
            _log.error(
                "version_not_opened", deployment=self.name, reason=str(error)[:500], kept=bool(self.active)
            )
            raise UserError(f"{reference} cannot be served: {error}{kept}") from None
        self._failed, self.reason = None, ""

    async def _open(self, stored: StoredVersion) -> None:
        """Opens a version and lets it answer from now on. The number of workers is that of the present one."""
        async with self._memory.opening():
            await self._switch(stored)

    async def _switch(self, stored: StoredVersion) -> None:
        section = self.section
        opening = opening_of(stored, section, self._backend_for(stored, section))
        following = ServedVersion(stored.number, opening, self._host_for(stored.model))
        try:
            await self._start_workers(following, stored)
        except BaseException:
            following.close()
            raise
        if self._is_closed:
            following.close()
            return
        facts = following.facts
        form = self._make_form(
            self.name,
            stored.schema,
            tuple(facts["input_shape"]),
            facts["input_dtype"],
            tuple(facts["output_shape"]),
            facts["vocabulary"],
        )
        try:
            await asyncio.to_thread(self._versions.remember, section.model, stored)
        except OSError as error:  # it serves all the same, until the next start
            _log.error("version_not_remembered", deployment=self.name, reason=str(error))
        previous = self.active
        following.on_need = self._need
        self.active, self.stored, self.form = following, stored, form
        self.switches += previous is not None
        self._opened.set()
        _log.info("version_serves", deployment=self.name, version=stored.number, backend=facts["backend"])
        if previous is not None:
            self._start(previous.drain(DRAIN_SECONDS))

    async def _start_workers(self, following: ServedVersion, stored: StoredVersion) -> None:
        """As many as the present version has; one at least, also of a deployment without workers: its answers are checked first."""
        needs = Needs(self.name, stored.number, stored.weights_bytes, self.number)
        async with self._memory.room_for(needs, further=False, seconds=HELD_SECONDS):
            await following.add_worker()
        await self._memory.settle(needs, following.pids())
        try:
            for _ in range((self.active.workers if self.active else self.section.workers.min) - 1):
                async with self._memory.room_for(needs, further=True):
                    await following.add_worker()
        except NoRoom as error:
            self.held_back, self._held_back_at = str(error), self._loop.time()

    async def wait_opened(self, seconds: float) -> None:
        """Waits until a version answers, or the first attempt to open one has failed."""
        try:
            await asyncio.wait_for(self._opened.wait(), seconds)
        except TimeoutError:
            return

    def scale(self) -> None:
        """Starts a worker if requests wait too long, ends one that has been idle; ends those that hang."""
        active, section = self.active, self.section
        if active is None:
            return
        active.end_hung()
        active.dispatch()  # refuses what waits too long, also while no request arrives
        now = self._loop.time()
        limit = _QUEUE_SHARE * section.slo_ms / 1000
        self._has_left = self._has_left and (active.is_idle or not active.workers)
        least = 0 if self._has_left else section.workers.min
        waits = active.waiting_rows and active.queueing_seconds() > limit
        if (
            active.workers < least
            or (active.workers < section.workers.max and waits)
            or not (active.workers or active.is_idle)
        ):
            self._need()
            return
        if now - self._held_back_at > _SHOWN_SECONDS:
            self.held_back = ""
        if active.ready_workers > section.workers.max or (
            active.ready_workers > section.workers.min
            and active.is_idle
            and now - active.idle_since > section.idle_seconds
            and now - self._shrunk_at > min(_SHRINK_SECONDS, section.idle_seconds)
        ):
            self._shrunk_at = now
            active.remove_worker()

    # As the memory budget sees it

    @property
    def number(self) -> str:
        """Of the version that answers."""
        return self.active.number if self.active is not None else ""

    @property
    def idle_since(self) -> float | None:
        """Since when there are no requests; None: there are some, or workers are being started."""
        active = self.active
        if active is None or not active.is_idle or self._growing or self._switching.locked():
            return None
        return active.idle_since

    def pids(self) -> list[int]:
        return self.active.pids() if self.active is not None else []

    def leave(self) -> bool:
        """Ends one worker that has nothing to do, if there is one; without requests none is started in its place."""
        self._has_left = True
        return self.active is not None and self.active.remove_worker()

    def shrink(self) -> bool:
        """Ends a worker once it has answered what it has, if another one stays."""
        return self.active is not None and self.active.retire_worker()

    def close(self) -> None:
        """Ends all workers at once."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self.active is not None:
            self.active.close()
        self._opened.set()

    async def drain(self) -> None:
        """Answers what it has and ends."""
        active, self.active, self._is_closed = self.active, None, True
        if active is not None:
            await active.drain(DRAIN_SECONDS)
        self.close()

    def _need(self) -> None:
        """Starts one worker, unless one is being started."""
        if self._growing or self._is_closed or self.active is None:
            return
        self._growing = True
        self._start(self._grow(self.active))

    async def _grow(self, version: ServedVersion) -> None:
        assert self.stored is not None
        needs = Needs(self.name, version.number, self.stored.weights_bytes)
        further = version.workers > 0
        try:
            async with self._memory.room_for(
                needs, further=further, seconds=0.0 if further else HELD_SECONDS
            ):
                await version.add_worker()
            self._has_left, self.held_back = False, ""
        except NoRoom as error:
            self.held_back, self._held_back_at = str(error), self._loop.time()
            if not version.workers:
                self._has_left = True
                version.refuse_all(error)
        except (WorkerDied, Refusal) as error:
            self.reason = f"a worker cannot be started: {error}"
            _log.error("worker_not_started", deployment=self.name, reason=str(error)[:500])
            if not version.workers:
                version.refuse_all(Refusal(503, "not_ready", self.reason))
        finally:
            self._growing = False

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def opening_of(stored: StoredVersion, section: DeploymentSection, backend: str) -> Opening:
    """How the workers of a deployment open a version. Raises: UserError: it has no such device or dtype."""
    if not is_torch(stored.model) and (section.device, section.dtype) != ("cpu", "float32"):
        raise UserError("device and dtype are for models of PyTorch, and this is none; leave them out")
    return Opening(
        {**stored.model, "device": section.device, "dtype": section.dtype},
        backend,
        section.workers.threads,
        section.max_batch,
        sizes(section.max_batch),
        section.generation.options(),
        stored.schema.to_document(),
    )


def sizes(most: int) -> tuple[int, ...]:
    """The sizes of batches that are measured: powers of two, and the largest one."""
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    return (*powers, most)
