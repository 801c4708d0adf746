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
from coordinator.serving.served import Opening, ServedVersion
from coordinator.serving.versions import StoredVersion, Versions
from coordinator.serving.workers import WorkerDied, WorkerHost, is_torch

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
_PROFILED_SECONDS = 30.0


class Deployment:
    """`host_for`: the process that forks the workers of a model. `tables`: profiles by a version's identity."""

    def __init__(
        self,
        name: str,
        section: DeploymentSection,
        versions: Versions,
        host_for: Callable[[Mapping[str, Any]], WorkerHost],
        backend_for: Callable[[StoredVersion, DeploymentSection], str],
        make_form: type[Form],
    ) -> None:
        self.name = name
        self.section = section
        self.active: ServedVersion | None = None
        self.stored: StoredVersion | None = None
        self.form: Form | None = None
        self.reason = ""
        self.switches = 0
        self._versions = versions
        self._host_for = host_for
        self._backend_for = backend_for
        self._make_form = make_form
        self._loop = asyncio.get_running_loop()
        self._failed: tuple[str, float] | None = None
        self._switching = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._growing = False
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
            wait = math.inf if isinstance(error, Refusal) and self.active is not None else RETRY_SECONDS
            self._failed = (number or reference, self._loop.time() + wait)
            kept = f"; version {self.active.number} stays" if self.active else ""
            _log.error(
                "version_not_opened", deployment=self.name, reason=str(error)[:500], kept=bool(self.active)
            )
            raise UserError(f"{reference} cannot be served: {error}{kept}") from None
        self._failed, self.reason = None, ""

    async def _open(self, stored: StoredVersion) -> None:
        """Opens a version and lets it answer from now on. The number of workers is that of the present one."""
        section = self.section
        opening = opening_of(stored, section, self._backend_for(stored, section))
        following = ServedVersion(stored.number, opening, self._host_for(stored.model))
        now = self.active.workers if self.active is not None else section.workers.min
        try:
            await (
                following.add_worker()
            )  # also of a deployment without workers: its answers are checked first
            for _ in range(now - 1):
                await following.add_worker()
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
        now = self._loop.time()
        limit = _QUEUE_SHARE * section.slo_ms / 1000
        if active.workers < section.workers.min or (
            active.workers < section.workers.max and active.waiting_rows and active.queueing_seconds() > limit
        ):
            self._need()
        elif active.ready_workers > section.workers.max or (
            active.ready_workers > section.workers.min
            and active.is_idle
            and now - active.idle_since > section.idle_seconds
            and now - self._shrunk_at > min(_SHRINK_SECONDS, section.idle_seconds)
        ):
            self._shrunk_at = now
            active.remove_worker()

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
        try:
            await version.add_worker()
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
