"""The check between a client's bytes and the aggregation, for whoever receives them: the coordinator, or a relay.

It validates the header before it reads any array. A rejection never stops a round: it is counted by its reason and reported with a
message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from edge_client.relay.expected import Expected
from edge_client.train import schedule
from edge_client.wire import arrays
from edge_client.wire.arrays import (
    DELTA,
    FilePayload,
    Payload,
    ResultHeader,
    StoredArrays,
    result_header,
)
from edge_client.wire.device import TaskMessage
from edge_client.wire.strict import printable
from strategies.codes import known
from strategies.codes.code import decode
from strategies.codes.packing import BadCode
from strategies.params import NotFinite, Tensors, require_finite, unflatten
from strategies.update import Update

Reason = Literal[
    "malformed",
    "oversized",
    "duplicate",
    "stale_base",
    "wrong_task",
    "no_examples",
    "too_many_examples",
    "wrong_steps",
    "missing_tensor",
    "extra_tensor",
    "misnamed_tensor",
    "wrong_dtype",
    "wrong_shape",
    "non_finite",
    "crashed",
]


@dataclass(frozen=True)
class Rejection:
    """Why a result does not count: a stable code, and a message for the person who runs the client."""

    client: str
    reason: Reason
    message: str


def check_result(payload: Payload, task: TaskMessage, expected: Expected) -> Update | Rejection:
    """The update in `payload`, or the reason why it is rejected. Tensors of a payload on disk stay there, unless a code wrote them.

    Checks, in this order: size, form, base version, task, examples, steps, names, dtypes, shapes, finiteness. Whoever
    stores updates detects duplicates.
    """
    refuse = partial(reject, task)
    if payload.size_bytes > expected.payload_limit_bytes:
        return reject_size(task, payload.size_bytes, expected)
    try:
        header = arrays.read_header(payload)
        result = result_header(header.values)
    except arrays.Malformed as error:
        return refuse("malformed", str(error))
    tensors = StoredArrays(payload, header)
    if expected.code is not None:
        return _decode(expected.code, tensors, result, task, expected)
    problem = find_problem(result, header.tensors, tensors, task, expected)
    return refuse(*problem) if problem else _update(tensors, result)


def _decode(
    options: Mapping[str, Any],
    stored: StoredArrays,
    result: ResultHeader,
    task: TaskMessage,
    expected: Expected,
) -> Update | Rejection:
    """The update that a code has written, in memory."""
    refuse = partial(reject, task)
    if problem := check_claims(result, task, expected):
        return refuse(*problem)
    headers = stored.header.tensors
    if list(headers) != [DELTA] or headers[DELTA].dtype != "U8" or len(headers[DELTA].shape) != 1:
        sent = ", ".join(f"{name} ({each.dtype})" for name, each in sorted(headers.items()))
        return refuse(*without_code(sent, options))
    try:
        delta = decode(known.from_options(options), stored[DELTA].tobytes(), delta_shapes(expected))
    except BadCode as error:
        return refuse("malformed", str(error))
    except NotFinite as error:
        return refuse("non_finite", f"{error}; lower the learning rate or check the data")
    return Update(delta, result.num_examples, result.num_steps, result.train_loss)


def without_code(sent: str, options: Mapping[str, Any]) -> tuple[Reason, str]:
    """The problem of a result that the run's code has not written."""
    expected = f"delta (U8), written by the code {options['name']}"
    return "malformed", f"it holds {sent or 'nothing'}; this run expects {expected}"


def delta_shapes(expected: Expected) -> dict[str, tuple[int, ...]]:
    """The shapes of the delta by the names of its tensors. With a code there is nothing else."""
    return {name.removeprefix(f"{DELTA}/"): shape for name, shape in expected.shapes.items()}


def find_problem(
    result: ResultHeader,
    headers: Mapping[str, arrays.TensorHeader],
    tensors: Tensors,
    task: TaskMessage,
    expected: Expected,
) -> tuple[Reason, str] | None:
    """Why tensors with these headers are rejected; None if they are accepted."""
    if problem := check_claims(result, task, expected) or _check_tensors(headers, expected):
        return problem
    try:
        require_finite(tensors, tensors)
    except NotFinite as error:
        return "non_finite", f"{error}; lower the learning rate or check the data"
    return None


def read_accepted(payload: Payload) -> Update:
    """The update in a payload that `check_result` has accepted before.

    Raises:
        arrays.Malformed: the payload has changed since.
    """
    header = arrays.read_header(payload)
    return _update(StoredArrays(payload, header), result_header(header.values))


def _update(tensors: StoredArrays, result: ResultHeader) -> Update:
    on_disk = isinstance(tensors.payload, FilePayload)
    streams = dict(unflatten(tensors if on_disk else dict(tensors)))
    return Update(
        delta=streams.pop(DELTA),
        num_examples=result.num_examples,
        num_steps=result.num_steps,
        train_loss=result.train_loss,
        extras=streams,
    )


def reject_size(task: TaskMessage, size: int, expected: Expected) -> Rejection:
    """The rejection of a result of so many bytes."""
    return reject(task, "oversized", f"{size} bytes, at most {expected.payload_limit_bytes} are allowed")


def reject(task: TaskMessage, reason: Reason, problem: str) -> Rejection:
    """The rejection of what answers this task."""
    # `printable` bounds the length: the problem quotes what the client sent, which may be a megabyte.
    return Rejection(
        task.client, reason, f"update from {task.client}, round {task.round}: {printable(problem)}"
    )


def check_claims(result: ResultHeader, task: TaskMessage, expected: Expected) -> tuple[Reason, str] | None:
    """Why what a client says of its update is rejected; None if it is accepted."""
    return _check_task(result, task) or _check_examples(result, expected) or _check_steps(result, task)


def _check_task(result: ResultHeader, task: TaskMessage) -> tuple[Reason, str] | None:
    if result.base != task.base:
        return "stale_base", f"it trained model {result.base[:12]}, this round uses {task.base[:12]}"
    if (result.round, result.client) != (task.round, task.client):
        return "wrong_task", f"it answers round {result.round} of client {result.client!r}"
    if result.num_examples < 1 or result.num_steps < 1:
        return (
            "no_examples",
            f"it claims {result.num_examples} examples and {result.num_steps} steps, at least 1 is expected",
        )
    if not math.isfinite(result.train_loss):
        return (
            "non_finite",
            f"its training loss is {result.train_loss}; lower the learning rate or check the data",
        )
    return None


def _check_examples(result: ResultHeader, expected: Expected) -> tuple[Reason, str] | None:
    if expected.max_examples is None or result.num_examples <= expected.max_examples:
        return None
    return (
        "too_many_examples",
        f"it claims {result.num_examples} examples, this run takes at most {expected.max_examples} per client",
    )


def _check_steps(result: ResultHeader, task: TaskMessage) -> tuple[Reason, str] | None:
    """All runtimes compute steps from the same schedule; outlier detection divides an update's length by them."""
    steps = schedule.count(result.num_examples, task.batch_size, epochs=task.epochs, steps=task.steps)
    if result.num_steps == steps:
        return None
    return (
        "wrong_steps",
        f"it claims {result.num_steps} steps; {result.num_examples} examples give {steps} steps",
    )


def _check_tensors(sent: Mapping[str, arrays.TensorHeader], expected: Expected) -> tuple[Reason, str] | None:
    missing = sorted(expected.shapes.keys() - sent.keys())
    extra = sorted(sent.keys() - expected.shapes.keys())
    if missing and extra:
        return "misnamed_tensor", f"has {extra[0]!r} where {missing[0]!r} is expected"
    if missing:
        return (
            "missing_tensor",
            f"{missing[0]!r} is missing, {len(sent)} of {len(expected.shapes)} tensors arrived",
        )
    if extra:
        return "extra_tensor", f"{extra[0]!r} is not a tensor of this model"
    for name in sorted(sent):
        if sent[name].dtype != expected.dtype(name):
            return "wrong_dtype", f"{name} is {sent[name].dtype}, expected {expected.dtype(name)}"
        if sent[name].shape != expected.shapes[name]:
            return "wrong_shape", f"{name} is {sent[name].shape}, expected {expected.shapes[name]}"
    return None
