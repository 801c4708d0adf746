"""All deployments of a server: answers the requests of every protocol (`InferenceService`), and follows the registry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from coordinator.errors import Refusal, UserError
from coordinator.serving.deployment import Deployment
from coordinator.serving.deployments import DeploymentSection, DeploymentStore
from coordinator.serving.generations import Prompt
from coordinator.serving.inference import (
    Counters,
    GeneratedText,
    GenerationRequest,
    InferAnswer,
    InferRequest,
    ModelDescription,
    invalid,
)
from coordinator.serving.paths import DEPLOYMENTS_FILE, PROFILES
from coordinator.serving.queue import Waiting
from coordinator.serving.versions import StoredVersion, Versions
from coordinator.serving.workers import WorkerHost, modules_for
from edge_client.files import read_regular

_log = structlog.get_logger("fedloop.serving")

SCALE_SECONDS = 0.1
_START_SECONDS = 120.0
_RETRY_AFTER_SECONDS = 1.0


class Serving:
    """Use `start` and `close`. `home`: versions, profiles and the list of deployments are kept there."""

    def __init__(self, home: Path, versions: Versions, follow_seconds: float) -> None:
        """`follow_seconds`: between two looks at what a reference means."""
        self._home = home
        self._follow_seconds = follow_seconds
        self._versions = versions
        self._store = DeploymentStore(home / DEPLOYMENTS_FILE)
        self._deployments: dict[str, Deployment] = {}
        self._hosts: dict[tuple[str, ...], WorkerHost] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False

    # Deployments

    async def start(self, given: Mapping[str, DeploymentSection]) -> None:
        """Serves what was served before and what is given, which replaces what has the same name.

        Raises:
            UserError: the list of deployments is damaged.
        """
        sections = {**self._store.read(), **given}
        self._store.write(sections)
        for name, section in sections.items():
            self._add(name, section)
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._scale())]
        await asyncio.gather(*(each.follow() for each in self._deployments.values()))

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
        return self._status_of(deployment)

    async def undeploy(self, name: str) -> None:
        """Removes a deployment after it has answered what it has. Raises: Refusal: 404 `unknown_model`."""
        deployment = self._deployment(name)
        self._write({name: None})
        del self._deployments[name]
        await deployment.drain()

    def scale(self, name: str, least: int | None, most: int | None) -> dict[str, Any]:
        """Changes how many workers a deployment has. Returns its status.

        Raises:
            Refusal: 404 `unknown_model`. UserError: the minimum is above the maximum.
        """
        deployment = self._deployment(name)
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
        await asyncio.gather(*(each.drain() for each in self._deployments.values()))
        for host in self._hosts.values():
            await asyncio.to_thread(host.close)

    # Requests

    @property
    def is_ready(self) -> bool:
        return not self._is_draining and all(each.is_ready for each in self._deployments.values())

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def names(self) -> Sequence[str]:
        return list(self._deployments)

    def describe(self, model: str, version: str = "") -> ModelDescription:
        deployment = self._deployment(model)
        active, form, stored = deployment.active, deployment.form, deployment.stored
        if active is None or form is None or stored is None:
            raise _not_ready(deployment)
        self._require_version(deployment, version)
        return ModelDescription(
            model,
            active.number,
            [active.number],
            stored.platform,
            form.inputs,
            form.outputs,
            deployment.section.max_batch,
            True,
            active.facts["generates"],
        )

    def counters(self, model: str, version: str = "") -> Counters:
        deployment = self._deployment(model)
        self._require_version(deployment, version)
        return deployment.active.counters if deployment.active is not None else Counters()

    async def infer(self, request: InferRequest) -> InferAnswer:
        if self._is_draining:
            raise _draining()
        deployment = self._deployment(request.model)
        if deployment.active is None:
            await deployment.wait_opened(_START_SECONDS)
        active, form = deployment.active, deployment.form
        if active is None or form is None:
            raise _not_ready(deployment)
        self._require_version(deployment, request.version)
        form.check_outputs(request.outputs)
        x = form.read(request)
        section = deployment.section
        if len(x) > section.max_rows:
            raise Refusal(
                413, "too_many_rows", f"{len(x)} rows, {request.model} takes up to {section.max_rows} at once"
            )
        if active.waiting_rows + len(x) > section.max_queue:
            raise Refusal(
                429,
                "queue_full",
                f"{active.waiting_rows} rows wait already; the limit is {section.max_queue}",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        loop = asyncio.get_running_loop()
        limit = request.timeout_seconds or section.slo_ms / 1000
        patience = 0.0 if request.timeout_seconds else limit
        parts = [
            _submit(active.submit, x[at : at + section.max_batch], loop, limit, patience, request.priority)
            for at in range(0, len(x), section.max_batch)
        ]
        if len(parts) == 1:
            logits = await parts[0]
        else:
            logits = np.concatenate(await asyncio.gather(*parts))
        return InferAnswer(request.model, active.number, request.id, form.write(logits, request.outputs))

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GeneratedText]:
        if self._is_draining:
            raise _draining()
        deployment = self._deployment(request.model)
        if deployment.active is None:
            await deployment.wait_opened(_START_SECONDS)
        active, form = deployment.active, deployment.form
        if active is None or form is None:
            raise _not_ready(deployment)
        if not active.facts["generates"]:
            why = active.facts.get("why") or "it predicts no next tokens"
            raise invalid("does_not_generate", f"{request.model} does not generate text: {why}")
        prompt = Prompt.of(request, form.read_prompt(request.prompt))
        async with aclosing(active.generations.generate(prompt)) as pieces:
            async for piece in pieces:
                yield piece

    # Within

    def _deployment(self, name: str) -> Deployment:
        deployment = self._deployments.get(name)
        if deployment is None:
            known = ", ".join(list(self._deployments)[:20]) or "none"
            raise Refusal(404, "unknown_model", f"there is no model {name[:100]!r}; deployed: {known}")
        return deployment

    def _require_version(self, deployment: Deployment, version: str) -> None:
        active, stored = deployment.active, deployment.stored
        if not version or active is None or stored is None:
            return
        if version not in (active.number, stored.alias):
            known = f"{active.number}{f' ({stored.alias})' if stored.alias else ''}"
            raise Refusal(
                404,
                "unknown_version",
                f"{deployment.name} has no version {version[:100]!r}; it serves {known}",
            )

    def _make(self, name: str, section: DeploymentSection) -> Deployment:
        return Deployment(name, section, self._versions, self._host_for, self._backend_for)

    def _add(self, name: str, section: DeploymentSection) -> None:
        self._deployments[name] = self._make(name, section)

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
            self._hosts[modules] = WorkerHost(modules, self._home / "workers.log")
        return self._hosts[modules]

    def _backend_for(self, stored: StoredVersion, section: DeploymentSection) -> str:
        """The backend of a version: the deployment's, or the fastest of its profile, or the first one of its kind."""
        if section.backend != "auto":
            return section.backend
        with suppress(OSError, ValueError, KeyError):
            table = json.loads(
                read_regular(profile_path(self._home, stored.identity, section.workers.threads))
            )
            return str(table["best"])
        if stored.model["release"]:
            return "litert"
        return "keras" if str(stored.model["description"]["name"]).endswith(".keras") else "torch"

    def _status_of(self, deployment: Deployment) -> dict[str, Any]:
        active = deployment.active
        status: dict[str, Any] = {
            "name": deployment.name,
            "model": deployment.section.model,
            "ready": active is not None,
            "reason": deployment.reason,
            "slo_ms": deployment.section.slo_ms,
            "min_workers": deployment.section.workers.min,
            "max_workers": deployment.section.workers.max,
        }
        if active is not None:
            counters = active.counters
            status |= {
                "version": active.number,
                "backend": active.facts["backend"],
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
            for deployment in list(self._deployments.values()):
                try:
                    await deployment.follow()
                except Exception:
                    _log.exception("cannot_follow", deployment=deployment.name)

    async def _scale(self) -> None:
        while True:
            await asyncio.sleep(SCALE_SECONDS)
            for deployment in list(self._deployments.values()):
                deployment.scale()

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)


def profile_path(home: Path, identity: str, threads: int) -> Path:
    """Where the profile of a version is kept, by its identity and the threads of a worker."""
    return home / PROFILES / f"{identity[:32]}-{threads}.json"


def _submit(
    submit: Callable[[Waiting], None],
    x: npt.NDArray[Any],
    loop: asyncio.AbstractEventLoop,
    limit: float,
    patience: float,
    priority: int,
) -> asyncio.Future[npt.NDArray[np.float32]]:
    """The logits of rows, as a future; cancelling it drops the rows from the queue."""
    future: asyncio.Future[npt.NDArray[np.float32]] = loop.create_future()

    def done(found: Any, queued: float, computed: float) -> None:
        if future.done():
            return
        if isinstance(found, Refusal):
            future.set_exception(found)
        else:
            future.set_result(found)

    now = loop.time()
    waiting = Waiting(x, now + limit, priority, now, done, patience=patience)

    def drop(ended: asyncio.Future[Any]) -> None:
        waiting.is_dropped = ended.cancelled()

    future.add_done_callback(drop)
    submit(waiting)
    return future


def _draining() -> Refusal:
    return Refusal(503, "draining", "the server ends now", retry_after_seconds=_RETRY_AFTER_SECONDS)


def _not_ready(deployment: Deployment) -> Refusal:
    reason = deployment.reason or "its version is being opened"
    return Refusal(
        503,
        "not_ready",
        f"{deployment.name} is not ready: {reason}",
        retry_after_seconds=_RETRY_AFTER_SECONDS,
    )
