"""Answers the requests of every protocol with the deployments of a server (`InferenceService`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coordinator.errors import Refusal
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
from coordinator.serving.queue import Waiting

if TYPE_CHECKING:
    from coordinator.serving.companions import Companion
    from coordinator.serving.deployment import Deployment
    from coordinator.serving.manager import DeploymentManager
    from coordinator.serving.served import ServedVersion

_START_SECONDS = 120.0
_RETRY_AFTER_SECONDS = 1.0


class Serving:
    """`manager`: of the deployments."""

    def __init__(self, manager: DeploymentManager) -> None:
        self.manager = manager

    @property
    def is_ready(self) -> bool:
        return self.manager.is_ready

    def names(self) -> Sequence[str]:
        return self.manager.names()

    def describe(self, model: str, version: str = "") -> ModelDescription:
        deployment = self.manager.get(model)
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
        deployment = self.manager.get(model)
        self._require_version(deployment, version)
        return deployment.active.counters if deployment.active is not None else Counters()

    async def infer(self, request: InferRequest) -> InferAnswer:
        if self.manager.is_draining:
            raise _draining()
        deployment = self.manager.get(request.model)
        if deployment.active is None:
            await deployment.wait_opened(_START_SECONDS)
        if deployment.active is None or deployment.form is None:
            raise _not_ready(deployment)
        self._require_version(deployment, request.version)
        companion = self.manager.companion(request.model)
        if companion is not None and not request.version and companion.takes_next():
            return await self._infer_by_canary(companion, request)
        x = self._read_rows(deployment, request)
        active, form = deployment.active, deployment.form
        logits = await self._compute(deployment, active, x, request)
        if companion is not None:
            companion.compare(x, logits)
        return InferAnswer(request.model, active.number, request.id, form.write(logits, request.outputs))

    async def _infer_by_canary(self, companion: Companion, request: InferRequest) -> InferAnswer:
        deployment = companion.deployment
        active, form = deployment.active, deployment.form
        assert active is not None and form is not None, "it takes a request only while it answers"
        x = self._read_rows(deployment, request)
        loop = asyncio.get_running_loop()
        began, failed = loop.time(), True
        try:
            logits = await self._compute(deployment, active, x, request)
            outputs = form.write(logits, request.outputs)
            failed = False
        finally:
            companion.observe(loop.time() - began, len(x), failed)
        return InferAnswer(request.model, active.number, request.id, outputs)

    def _read_rows(self, deployment: Deployment, request: InferRequest) -> npt.NDArray[Any]:
        """The rows of a request, checked against what the model takes and the deployment's limits."""
        active, form, section = deployment.active, deployment.form, deployment.section
        assert active is not None and form is not None
        form.check_outputs(request.outputs)
        rows = max((each.array.shape[0] for each in request.inputs), default=0)
        if rows > section.max_rows:  # before texts and tables are read, row by row
            raise Refusal(
                413, "too_many_rows", f"{rows} rows, {request.model} takes up to {section.max_rows} at once"
            )
        x = form.read(request)
        if active.waiting_rows + len(x) > section.max_queue:
            raise Refusal(
                429,
                "queue_full",
                f"{active.waiting_rows} rows wait already; the limit is {section.max_queue}",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        return x

    async def _compute(
        self, deployment: Deployment, version: ServedVersion, x: npt.NDArray[Any], request: InferRequest
    ) -> npt.NDArray[np.float32]:
        """The logits of rows; more than a batch of them go in pieces."""
        loop = version.loop  # to ask asyncio for it costs a system call
        limit = request.timeout_seconds or deployment.section.slo_ms / 1000
        patience = 0.0 if request.timeout_seconds else limit
        most = deployment.section.max_batch
        if len(x) <= most:
            return await _submit(version.submit, x, loop, limit, patience, request.priority)
        parts = [
            _submit(version.submit, x[at : at + most], loop, limit, patience, request.priority)
            for at in range(0, len(x), most)
        ]
        return np.concatenate(await asyncio.gather(*parts))

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GeneratedText]:
        if self.manager.is_draining:
            raise _draining()
        deployment = self.manager.get(request.model)
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
