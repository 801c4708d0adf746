"""The deployments of a server: added, changed and removed, following the registry and the load, kept for the next start."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from coordinator.errors import Refusal, UserError
from coordinator.model_references import is_version, parse_reference
from coordinator.serving.companions import Companion
from coordinator.serving.deployment import Deployment
from coordinator.serving.deployments import DeploymentSection, DeploymentStore
from coordinator.serving.measuring.tables import backend_for
from coordinator.serving.paths import DEPLOYMENTS_FILE
from coordinator.serving.resources.memory import MemoryBudget
from coordinator.serving.versions import StoredVersion, Versions
from coordinator.serving.workers import WorkerHost, modules_for

if TYPE_CHECKING:
    from coordinator.serving.rows import Form

_log = structlog.get_logger("fedloop.serving")

SCALE_SECONDS = 0.1
MEMORY_SECONDS = 1.0
RECORD_SECONDS = 10.0
"""Between two transfers of a companion's figures to the registry."""


class DeploymentManager:
    """Use `start` and `close`. `home`: versions, profiles and the list of deployments are kept there."""

    def __init__(
        self,
        home: Path,
        versions: Versions,
        make_form: type[Form],
        follow_seconds: float,
        memory_bytes: int = 0,
    ) -> None:
        """`make_form`: `coordinator.serving.rows.Form`; `follow_seconds`: between two looks at what a reference means.

        `memory_bytes`: of all workers; 0: no limit.
        """
        self._make_form = make_form
        self._home = home
        self._follow_seconds = follow_seconds
        self._versions = versions
        self._store = DeploymentStore(home / DEPLOYMENTS_FILE)
        self._deployments: dict[str, Deployment] = {}
        self._companions: dict[str, Companion] = {}
        self._hosts: dict[tuple[str, ...], WorkerHost] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False
        self.memory = MemoryBudget(memory_bytes, self._all, self._worker_pids)

    async def start(self, given: Mapping[str, DeploymentSection]) -> None:
        """Serves what was served before and what is given, which replaces what has the same name.

        Raises:
            UserError: the list of deployments is damaged.
        """
        sections = {**self._store.read(), **given}
        self._store.write(sections)
        for name, section in sections.items():
            self._deployments[name] = self._make(name, section)
            self._set_companion(name, section)
        works = (self._follow(), self._scale(), self._record(), self._watch_memory())
        self._tasks = [asyncio.create_task(work) for work in works]
        await asyncio.gather(*(each.follow() for each in self._all()))

    async def deploy(self, name: str, section: DeploymentSection) -> dict[str, Any]:
        """Adds or changes a deployment, once its version has been opened. Returns its status.

        Raises:
            UserError: the version cannot be served; what was deployed under this name stays.
            Refusal: 507 `disk_full`: the list of deployments cannot be written.
        """
        before = self._deployments.get(name)
        deployment = self._make(name, section)
        await deployment.follow()
        if deployment.active is None:
            reason = deployment.reason
            deployment.close()
            raise UserError(reason)
        try:
            self._write({name: section})
        except Refusal:
            deployment.close()
            raise
        self._deployments[name] = deployment
        if before is not None:
            self._keep(before.drain())
        if (companion := self._set_companion(name, section)) is not None:
            await companion.deployment.follow()
        return self._status_of(deployment)

    async def undeploy(self, name: str) -> None:
        """Removes a deployment after it has answered what it has. Raises: Refusal: 404 `unknown_model`."""
        deployment = self.get(name)
        self._write({name: None})
        del self._deployments[name]
        if (companion := self._companions.pop(name, None)) is not None:
            companion.deployment.close()
        await deployment.drain()

    def scale(self, name: str, least: int | None, most: int | None) -> dict[str, Any]:
        """Changes how many workers a deployment has. Returns its status.

        Raises:
            Refusal: 404 `unknown_model`. UserError: the minimum is above the maximum.
        """
        deployment = self.get(name)
        section = deployment.section.with_workers(least, most, None)
        if section.workers.min > section.workers.max:
            raise UserError(f"min = {section.workers.min} is more than max = {section.workers.max}")
        self._write({name: section})
        deployment.section = section
        deployment.scale()
        return self._status_of(deployment)

    def status(self) -> list[dict[str, Any]]:
        """Of each deployment: its version, workers, memory and counters."""
        return [self._status_of(each) for each in self._deployments.values()]

    async def close(self) -> None:
        """Answers what there is, refuses new requests, and ends all processes."""
        self._is_draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(each.drain() for each in self._all()))
        for host in self._hosts.values():
            await asyncio.to_thread(host.close)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_ready(self) -> bool:
        """Whether all deployments answer."""
        return not self._is_draining and all(each.is_ready for each in self._deployments.values())

    def names(self) -> Sequence[str]:
        return list(self._deployments)

    def get(self, name: str) -> Deployment:
        """Raises: Refusal: 404 `unknown_model`."""
        deployment = self._deployments.get(name)
        if deployment is None:
            known = ", ".join(list(self._deployments)[:20]) or "none"
            raise Refusal(404, "unknown_model", f"there is no model {name[:100]!r}; deployed: {known}")
        return deployment

    def _make(self, name: str, section: DeploymentSection) -> Deployment:
        return Deployment(
            name, section, self._versions, self._host_for, self._backend_for, self._make_form, self.memory
        )

    def companion(self, name: str) -> Companion | None:
        """The shadow or the canary of a deployment."""
        return self._companions.get(name)

    def _all(self) -> list[Deployment]:
        return [*self._deployments.values(), *(each.deployment for each in self._companions.values())]

    def _worker_pids(self) -> list[int]:
        """All workers and the processes that they are forked from."""
        return [pid for host in self._hosts.values() for pid in host.pids()]

    def _set_companion(self, name: str, section: DeploymentSection) -> Companion | None:
        if (before := self._companions.pop(name, None)) is not None:
            before.deployment.close()
        if section.companion is None:
            return None
        kind, model, share = section.companion
        own = section.model_copy(update={"model": model, "shadow": "", "canary": None})
        self._companions[name] = Companion(kind, self._make(name, own), share)
        return self._companions[name]

    def _write(self, changed: Mapping[str, DeploymentSection | None]) -> None:
        """Stores the deployments with these changes; None: it goes. Raises: Refusal: 507 `disk_full`."""
        known: dict[str, DeploymentSection | None] = {
            name: each.section for name, each in self._deployments.items()
        }
        known.update(changed)
        try:
            self._store.write({name: section for name, section in known.items() if section is not None})
        except OSError as error:
            text = f"the list of deployments cannot be written: {error.strerror}; nothing has changed"
            raise Refusal(507, "disk_full", text) from None

    def _host_for(self, model: Mapping[str, Any]) -> WorkerHost:
        modules = modules_for(model)
        if modules not in self._hosts:
            self._hosts[modules] = WorkerHost(
                modules, self._home / "workers.log", self._versions.allowed_code
            )
        return self._hosts[modules]

    def _backend_for(self, stored: StoredVersion, section: DeploymentSection) -> str:
        return backend_for(self._home, stored.model, stored.identity, section)

    def _status_of(self, deployment: Deployment) -> dict[str, Any]:
        active = deployment.active
        companion = self._companions.get(deployment.name)
        status: dict[str, Any] = {
            "name": deployment.name,
            "model": deployment.section.model,
            "ready": active is not None,
            "reason": deployment.reason or deployment.held_back,
            "slo_ms": deployment.section.slo_ms,
            "min_workers": deployment.section.workers.min,
            "max_workers": deployment.section.workers.max,
        }
        if companion is not None:
            status[companion.kind] = companion.status()
        if active is not None:
            counters = active.counters
            status |= {
                "version": active.number,
                "backend": active.facts["backend"],
                "input_shape": active.facts["input_shape"],
                "input_dtype": active.facts["input_dtype"],
                "vocabulary": active.facts["vocabulary"],
                "workers": active.ready_workers,
                "pids": active.pids(),
                "memory_bytes": active.memory_bytes(),
                "waiting_rows": active.waiting_rows,
                "texts": len(active.generations),
                "switches": deployment.switches,
                "worker_restarts": active.restarts,
                "requests": counters.success,
                "failed": counters.failed,
                "rows": counters.rows,
                "batches": counters.executions,
                "opened_in_seconds": round(active.opened_in, 4),
                "profile_ms": {
                    str(size): round(1000 * seconds, 4)
                    for size, seconds in (active.profile.table() if active.profile else {}).items()
                },
            }
        return status

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._follow_seconds)
            for deployment in self._all():
                try:
                    await deployment.follow()
                except Exception:
                    _log.exception("cannot_follow", deployment=deployment.name)

    async def _scale(self) -> None:
        while True:
            await asyncio.sleep(SCALE_SECONDS)
            for deployment in self._all():
                deployment.scale()

    async def _watch_memory(self) -> None:
        while self.memory.limit_bytes:
            await asyncio.sleep(MEMORY_SECONDS)
            try:
                await self.memory.enforce()
            except Exception:
                _log.exception("cannot_enforce_memory")

    async def _record(self) -> None:
        """Stores the figures of companions of the registry as metrics of their version, when they have changed."""
        while True:
            await asyncio.sleep(RECORD_SECONDS)
            for companion in list(self._companions.values()):
                model = companion.deployment.section.model
                figures = companion.current().metrics(companion.kind)
                if not is_version(model) or figures == companion.recorded or not figures["requests"]:
                    continue
                reference = f"{parse_reference(model).model}:{companion.version}"
                try:
                    await asyncio.to_thread(self._versions.record_metrics, reference, companion.kind, figures)
                    companion.recorded = figures
                except UserError as error:
                    _log.warning("figures_not_recorded", version=reference, reason=str(error)[:300])

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
