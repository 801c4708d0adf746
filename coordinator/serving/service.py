"""Answers the requests of every protocol with the deployments of a server (`InferenceService`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.errors import Refusal
from coordinator.serving.deployment import Deployment
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
from coordinator.serving.manager import DeploymentManager
from coordinator.serving.queue import Waiting

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
