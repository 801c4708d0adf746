"""Intake: one pure check between a client's bytes and the aggregation.

The device API calls `check`. It validates the header before it reads any array. A simulation calls `check_in_memory` where the
update was made: the same rules, without the bytes. A rejection never stops a round: it is counted by its reason and reported
with a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from coordinator.rounds.records import Expected
from edge_client.train import schedule
from edge_client.wire import arrays
from edge_client.wire.arrays import (
    DELTA,
    DTYPES,
    FilePayload,
    Payload,
    ResultHeader,
    StoredArrays,
    result_header,
)
from edge_client.wire.strict import printable
from strategies.codes import known
from strategies.codes.code import Code, decode, most_bytes
from strategies.codes.packing import BadCode
from strategies.params import NotFinite, Tensors, flatten, require_finite, shape_of, unflatten
from strategies.update import Update

if TYPE_CHECKING:
    from coordinator.rounds.plan import Task

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

FOLDABLE = ("F64", "F32", "F16", "BF16", "I32", "I16", "I8", "U8")
"""Dtypes of numbers that float64, in which updates are summed, represents exactly."""

_HEADROOM_BYTES = 65_536


@dataclass(frozen=True)
class Rejection:
    """Why a result does not count: a stable code, and a message for the person who runs the client."""

    client: str
    reason: Reason
    message: str


def make_expected(
    trainable: Tensors,
    streams: Mapping[str, Tensors],
    max_examples: int | None = None,
    weight_limit: int | None = None,
    dtypes: Mapping[str, str] | None = None,
    code: Code | None = None,
) -> Expected:
    """What updates of `trainable` with the client rule's `streams` must contain. `dtypes`, `code`: as in `Expected`.

    Raises:
        ValueError: `dtypes` names an unknown tensor, or a dtype that cannot be folded.
    """
    tensors = flatten({DELTA: trainable, **streams})
    for name, dtype in (dtypes or {}).items():
        if name not in tensors:
            raise ValueError(f"{name} is to be {dtype}, but is no tensor of this task")
        if dtype not in FOLDABLE:
            raise ValueError(
                f"{name} is to be {dtype}, which cannot be folded: sums are float64, which represents exactly "
                f"{', '.join(FOLDABLE)}"
            )
    shapes = {name: shape_of(tensors, name) for name in tensors}
    options = None if code is None else known.to_options(code)
    return _with_limit(Expected(shapes, 0, max_examples, weight_limit, dtypes or {}, options))


def content_bytes(expected: Expected) -> int:
    """Bytes of a result without its header: of its tensors, or the most that its code takes."""
    if expected.code is not None:
        return most_bytes(known.from_options(expected.code), _delta_shapes(expected))
    return tensor_bytes(expected)


def narrow(expected: Expected, shapes: Mapping[str, tuple[int, ...]]) -> Expected:
    """What the updates of a narrower model must contain. `shapes`: of all its params, by their names."""
    own = {name: shapes[name.removeprefix(f"{DELTA}/")] for name in expected.shapes}
    narrower = replace(expected, shapes=own)
    saved = content_bytes(expected) - content_bytes(narrower)
    return replace(narrower, payload_limit_bytes=expected.payload_limit_bytes - saved)


def expected_of(expected: Expected, model_class: str) -> Expected:
    """What the updates of devices of a class must contain; empty: they train the whole model."""
    shapes = expected.narrower.get(model_class)
    return expected if shapes is None else narrow(expected, shapes)


def of_class(expected: Expected, shapes: Mapping[str, tuple[int, ...]]) -> Expected:
    """What the updates of another model must contain. `shapes`: of the tensors that its clients train."""
    return _with_limit(replace(expected, shapes={f"{DELTA}/{name}": shape for name, shape in shapes.items()}))


def _with_limit(expected: Expected) -> Expected:
    names = sum(len(name) + 128 for name in expected.shapes)
    return replace(expected, payload_limit_bytes=content_bytes(expected) + names + _HEADROOM_BYTES)


def tensor_bytes(expected: Expected) -> int:
    """Bytes of the tensors of a result, without a code."""
    shapes = expected.shapes.items()
    return sum(DTYPES[expected.dtype(name)].itemsize * math.prod(shape) for name, shape in shapes)


def check(payload: Payload, task: Task, expected: Expected) -> Update | Rejection:
    """The update in `payload`, or the reason why it is rejected. Tensors of a payload on disk stay there, unless a code wrote them.

    Checks, in this order: size, form, base version, task, examples, steps, names, dtypes, shapes, finiteness. The fleet
    detects duplicates (`reject_duplicate`).
    """
    reject = partial(_reject, task)
    if payload.size_bytes > expected.payload_limit_bytes:
        return _reject_size(task, payload.size_bytes, expected)
    try:
        header = arrays.read_header(payload)
        result = result_header(header.values)
    except arrays.Malformed as error:
        return reject("malformed", str(error))
    tensors = StoredArrays(payload, header)
    if expected.code is not None:
        return _decode(expected.code, tensors, result, task, expected)
    problem = _find_problem(result, header.tensors, tensors, task, expected)
    return reject(*problem) if problem else _update(tensors, result)


def _decode(
    options: Mapping[str, Any], stored: StoredArrays, result: ResultHeader, task: Task, expected: Expected
) -> Update | Rejection:
    """The update that a code has written, in memory."""
    reject = partial(_reject, task)
    if problem := _check_claims(result, task, expected):
        return reject(*problem)
    headers = stored.header.tensors
    if list(headers) != [DELTA] or headers[DELTA].dtype != "U8" or len(headers[DELTA].shape) != 1:
        sent = ", ".join(f"{name} ({each.dtype})" for name, each in sorted(headers.items()))
        return reject(*_without_code(sent, options))
    try:
        delta = decode(known.from_options(options), stored[DELTA].tobytes(), _delta_shapes(expected))
    except BadCode as error:
        return reject("malformed", str(error))
    except NotFinite as error:
        return reject("non_finite", f"{error}; lower the learning rate or check the data")
    return Update(delta, result.num_examples, result.num_steps, result.train_loss)


def _without_code(sent: str, options: Mapping[str, Any]) -> tuple[Reason, str]:
    expected = f"delta (U8), written by the code {options['name']}"
    return "malformed", f"it holds {sent or 'nothing'}; this run expects {expected}"


def _delta_shapes(expected: Expected) -> dict[str, tuple[int, ...]]:
    """The shapes of the delta by the names of its tensors. With a code there is nothing else."""
    return {name.removeprefix(f"{DELTA}/"): shape for name, shape in expected.shapes.items()}


def check_in_memory(update: Update, task: Task, expected: Expected, payload_bytes: int) -> Update | Rejection:
    """What `check` would answer to the `payload_bytes` bytes of an update that stays in the process that made it."""
    if payload_bytes > expected.payload_limit_bytes:
        return _reject_size(task, payload_bytes, expected)
    if expected.code is not None and update.encoded is None:
        return _reject(task, *_without_code("tensors", expected.code))
    streams = {DELTA: update.delta, **update.extras}
    tensors = flatten({name: dict(sorted(streams[name].items())) for name in sorted(streams)})
    result = arrays.header_of(task.message, update)
    problem = _find_problem(result, arrays.describe(tensors), tensors, task, expected)
    if problem:
        return _reject(task, *problem)
    ordered = dict(unflatten(tensors))
    return replace(update, delta=ordered.pop(DELTA), extras=ordered)


def _find_problem(
    result: ResultHeader,
    headers: Mapping[str, arrays.TensorHeader],
    tensors: Tensors,
    task: Task,
    expected: Expected,
) -> tuple[Reason, str] | None:
    if problem := _check_claims(result, task, expected) or _check_tensors(headers, expected):
        return problem
    try:
        require_finite(tensors, tensors)
    except NotFinite as error:
        return "non_finite", f"{error}; lower the learning rate or check the data"
    return None


def read_accepted(payload: Payload) -> Update:
    """The update in a payload that `check` has accepted before.

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


def parse_reason(code: str | None) -> Reason:
    """The reason with this code.

    Raises:
        ValueError: there is none.
    """
    for reason in get_args(Reason):
        if reason == code:
            return reason  # type: ignore[no-any-return]
    raise ValueError(f"{code!r} is no reason; known: {', '.join(get_args(Reason))}")


def reject_duplicate(task: Task) -> Rejection:
    """The rejection of a valid update of a client whose update was accepted before."""
    return _reject(task, "duplicate", "this client's update of this round was already accepted")


def reject_crashed(task: Task, attempts: int, how: str) -> Rejection:
    """The rejection of a simulated client whose training ended its worker process each time."""
    return _reject(
        task,
        "crashed",
        f"training it has ended {attempts} worker processes, the last with {how}; the end of work/workers.log may say why, "
        "and so may the kernel's log if memory was short",
    )


def _reject_size(task: Task, size: int, expected: Expected) -> Rejection:
    return _reject(task, "oversized", f"{size} bytes, at most {expected.payload_limit_bytes} are allowed")


def reject_stale(task: Task, staleness: int) -> Rejection:
    """The rejection of a client's work whose base is too old for an asynchronous run."""
    return _reject(
        task, "stale_base", f"the model that it trains is {staleness} versions old by now, which is too old"
    )


def _reject(task: Task, reason: Reason, problem: str) -> Rejection:
    # `printable` bounds the length: the problem quotes what the client sent, which may be a megabyte.
    sent = task.message
    return Rejection(
        sent.client, reason, f"update from {sent.client}, round {sent.round}: {printable(problem)}"
    )


def _check_claims(result: ResultHeader, task: Task, expected: Expected) -> tuple[Reason, str] | None:
    return _check_task(result, task) or _check_examples(result, expected) or _check_steps(result, task)


def _check_task(result: ResultHeader, task: Task) -> tuple[Reason, str] | None:
    message = task.message
    if result.base != message.base:
        return "stale_base", f"it trained model {result.base[:12]}, this round uses {message.base[:12]}"
    if (result.round, result.client) != (message.round, message.client):
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


def _check_steps(result: ResultHeader, task: Task) -> tuple[Reason, str] | None:
    """All runtimes compute steps from the same schedule; outlier detection divides an update's length by them."""
    message = task.message
    steps = schedule.count(
        result.num_examples, message.batch_size, epochs=message.epochs, steps=message.steps
    )
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
