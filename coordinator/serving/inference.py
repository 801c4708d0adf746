"""What every protocol of the front speaks in: requests and answers of tensors, and the service that answers them.

Tensors are those of the Open Inference Protocol, version 2: a name, a datatype such as FP32, a shape whose first axis is
the rows of a batch, and the values.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from coordinator.errors import Refusal

DATATYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
"""Datatypes of the protocol and the arrays that hold them; BYTES is an array of `bytes`."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model. `shape`: -1 for the rows of a batch, then the shape of one row."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """`array`: of `DATATYPES[datatype]`, in its shape."""

    name: str
    datatype: str
    array: npt.NDArray[Any]


@dataclass(frozen=True)
class ModelDescription:
    """A model as its metadata says: `versions`, those that answer now; `version`: of the one that is described."""

    name: str
    version: str
    versions: Sequence[str]
    platform: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    max_batch_size: int
    is_ready: bool
    generates: bool = False


@dataclass(frozen=True)
class InferRequest:
    """A request for predictions.

    Attributes:
        version: number or alias; empty: the one that the deployment serves.
        outputs: names of the outputs that are wanted; empty: all.
        timeout_seconds: until an answer is of use; None: the deployment's own limit.
        priority: smaller numbers go first, 0: the lowest of all, as in Triton.
    """

    model: str
    inputs: Sequence[Tensor]
    version: str = ""
    id: str = ""
    outputs: Sequence[str] = ()
    timeout_seconds: float | None = None
    priority: int = 0


@dataclass(frozen=True)
class InferAnswer:
    """`version`: number of the version that has answered."""

    model: str
    version: str
    id: str
    outputs: Sequence[Tensor]


@dataclass(frozen=True)
class GenerationRequest:
    """A request to continue a text, as OpenAI's completions have it.

    Attributes:
        seed: of the sampling; None: any.
        logprobs: how many of the most probable tokens come with each token; None: none.
        stop: strings that end the text, which does not hold them.
    """

    model: str
    prompt: str | Sequence[int]
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    logprobs: int | None = None
    timeout_seconds: float | None = None
    priority: int = 0


@dataclass(frozen=True)
class GeneratedText:
    """A further piece of a text. `finish_reason`: "stop" or "length" with the last piece.

    `tokens`: as text; `top`: the most probable ones with their log-probabilities, if asked for.
    """

    text: str
    tokens: Sequence[str] = ()
    logprobs: Sequence[float] = ()
    top: Sequence[Mapping[str, float]] = ()
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Counters:
    """What has happened to the requests for a version since it was opened; times in seconds, summed.

    `executions`: batches; `rows`: rows that were answered.
    """

    success: int = 0
    failed: int = 0
    rows: int = 0
    executions: int = 0
    success_seconds: float = 0.0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    last_answered: float = 0.0
    batches: Mapping[int, tuple[int, float]] = field(default_factory=dict)

    def after(
        self, rows: int, seconds: float, queued: Sequence[float], totals: Sequence[float], answered: float
    ) -> Counters:
        """These and a batch that was computed in `seconds`. `queued`, `totals`: seconds of each request; `answered`: the time."""
        taken, total = self.batches.get(rows, (0, 0.0))
        return replace(
            self,
            success=self.success + len(queued),
            rows=self.rows + rows,
            executions=self.executions + 1,
            success_seconds=self.success_seconds + sum(totals),
            queue_seconds=self.queue_seconds + sum(queued),
            compute_seconds=self.compute_seconds + seconds * len(queued),
            last_answered=answered,
            batches={**self.batches, rows: (taken + 1, total + seconds)},
        )


class InferenceService(Protocol):
    """Answers the requests of all protocols. Every method refuses with a `Refusal`, whose status and code each protocol translates."""

    @property
    def is_ready(self) -> bool:
        """Whether all deployments answer."""

    def names(self) -> Sequence[str]:
        """Names of the deployments."""

    def describe(self, model: str, version: str = "") -> ModelDescription:
        """Raises: Refusal: 404 `unknown_model` or `unknown_version`; 503 `not_ready`: no version has been opened yet."""

    def counters(self, model: str, version: str = "") -> Counters: ...

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Raises: Refusal: 400 for a tensor that the model does not take, 404, 413, 429, 503, 504."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GeneratedText]:
        """The text piece by piece. Raises: Refusal: as `infer`, before the first piece."""


def invalid(code: str, message: str) -> Refusal:
    """A request that the model cannot take."""
    return Refusal(400, code, message)
