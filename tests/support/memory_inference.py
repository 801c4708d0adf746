"""An inference service in memory: a linear model of digits, a model for each datatype that returns its input, and a text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np

from coordinator.errors import Refusal
from coordinator.serving.inference import (
    DATATYPES,
    Counters,
    GeneratedText,
    GenerationRequest,
    InferAnswer,
    InferRequest,
    ModelDescription,
    Tensor,
    TensorSpec,
    invalid,
)

ROWS = 64
WEIGHTS = np.random.default_rng(0).standard_normal((64, 10)).astype(np.float32)
VERSIONS = ("2", "3")
VOCABULARY = 16


def logits(x: np.ndarray) -> np.ndarray:
    """What `digits` answers for rows of 8 × 8."""
    return x.reshape(len(x), 64) @ WEIGHTS


class MemoryInference:
    """Implements `InferenceService`. What is set from outside stands for the state of a server."""

    def __init__(self) -> None:
        self.is_ready = True
        self.refusal: Refusal | None = None  # of all predictions
        self.failure: Exception | None = None
        self.is_held = False  # predictions wait until they are cancelled
        self.held = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.asked: list[InferRequest | GenerationRequest] = []
        self._models = {
            "digits": (
                TensorSpec("x", "FP32", (-1, 8, 8)),
                TensorSpec("logits", "FP32", (-1, 10)),
            ),
            "plays": (TensorSpec("text", "BYTES", (-1,)), TensorSpec("text", "BYTES", (-1,))),
        } | {
            f"echo_{datatype}": (TensorSpec("x", datatype, (-1, 3)), TensorSpec("y", datatype, (-1, 3)))
            for datatype in DATATYPES
        }

    def names(self) -> Sequence[str]:
        return [*self._models, "opening"]

    def describe(self, model: str, version: str = "") -> ModelDescription:
        if model == "opening":
            raise Refusal(503, "not_ready", "opening has no version yet")
        if model not in self._models:
            raise Refusal(404, "unknown_model", f'there is no deployment "{model}"')
        number = {"": "3", "champion": "3"}.get(version, version)
        if number not in VERSIONS:
            raise Refusal(404, "unknown_version", f'"{model}" has no version "{version}"')
        x, y = self._models[model]
        return ModelDescription(
            name=model,
            version=number,
            versions=VERSIONS,
            platform="fedloop_memory",
            inputs=(x,),
            outputs=(y,),
            max_batch_size=ROWS,
            is_ready=True,
            generates=model == "plays",
        )

    def counters(self, model: str, version: str = "") -> Counters:
        self.describe(model, version)
        return Counters(
            success=3,
            failed=1,
            rows=5,
            executions=2,
            success_seconds=0.5,
            queue_seconds=0.125,
            compute_seconds=0.25,
            last_answered=1_700_000_000.5,
            batches={1: (1, 0.0625), 4: (1, 0.125)},
        )

    async def infer(self, request: InferRequest) -> InferAnswer:
        self.asked.append(request)
        described = self.describe(request.model, request.version)
        if self.refusal is not None:
            raise self.refusal
        if self.failure is not None:
            raise self.failure
        if self.is_held:
            await self._wait()
        x = _checked(request, described)
        array = logits(x.array) if request.model == "digits" else x.array
        output = described.outputs[0]
        return InferAnswer(
            request.model, described.version, request.id, [Tensor(output.name, output.datatype, array)]
        )

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GeneratedText]:
        """The next letters of the alphabet after the prompt's last one."""
        self.asked.append(request)
        if not self.describe(request.model).generates:
            raise invalid("not_generative", f'"{request.model}" generates no text')
        if self.refusal is not None:
            raise self.refusal
        last = request.prompt[-1] if request.prompt else "a"
        start = ord(last) if isinstance(last, str) else last
        written = ""
        for at in range(request.max_tokens):
            letter = chr(97 + (start - 96 + at) % 26)
            written += letter
            ended = any(each in written for each in request.stop)
            alternatives = {chr(97 + each): -1.0 - each for each in range(request.logprobs or 0)}
            yield GeneratedText(
                "" if ended else letter,
                tokens=() if ended else (letter,),
                logprobs=() if ended else (-0.5,),
                top=() if ended or not request.logprobs else (alternatives,),
                finish_reason="stop" if ended else "length" if at + 1 == request.max_tokens else None,
                prompt_tokens=len(request.prompt),
                completion_tokens=at + 1,
            )
            if ended:
                return

    async def _wait(self) -> None:
        self.held.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def _checked(request: InferRequest, described: ModelDescription) -> Tensor:
    if [each.name for each in request.inputs] != [each.name for each in described.inputs]:
        raise invalid("wrong_inputs", f"this model takes one input, {described.inputs[0].name}")
    x, spec = request.inputs[0], described.inputs[0]
    if x.datatype != spec.datatype:
        raise invalid("wrong_datatype", f"{x.name} is {x.datatype}, not {spec.datatype}")
    if x.array.ndim != len(spec.shape) or x.array.shape[1:] != spec.shape[1:] or not len(x.array):
        raise invalid("wrong_shape", f"{x.name} has the shape {x.array.shape}, not {spec.shape}")
    if len(x.array) > ROWS:
        raise Refusal(413, "too_many_rows", f"{len(x.array)} rows; at most {ROWS}")
    if any(each not in {output.name for output in described.outputs} for each in request.outputs):
        raise invalid("unknown_output", f"this model has one output, {described.outputs[0].name}")
    return x


class BreakingInference(MemoryInference):
    """Texts without an end. `breaks`: that of the prompt "a" is refused after its first piece.

    `begins`: whether a first piece comes. `left`: texts that are no longer generated.
    """

    def __init__(self, *, breaks: bool = False, begins: bool = True) -> None:
        super().__init__()
        self.breaks, self.begins = breaks, begins
        self.begun = asyncio.Event()
        self.left = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GeneratedText]:
        self.begun.set()
        try:
            if self.begins:
                yield GeneratedText("b", completion_tokens=1)
            if self.breaks and request.prompt == "a":
                raise Refusal(503, "draining", "the server ends now")
            await asyncio.Event().wait()
        finally:
            self.left += 1
