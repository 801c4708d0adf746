"""Intake: what a round expects of a result, and the one pure check between a client's bytes and the aggregation.

The device API calls `check`, which is `edge_client.relay.intake`: a relay makes it in its place. A simulation calls `check_in_memory` where the
update was made: the same rules, without the bytes. A rejection never stops a round: it is counted by its reason and reported
with a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from edge_client.relay.expected import Expected
from edge_client.relay.intake import Reason as Reason
from edge_client.relay.intake import Rejection as Rejection
from edge_client.relay.intake import (
    check_result,
    delta_shapes,
    find_problem,
    reject,
    reject_size,
    without_code,
)
from edge_client.relay.intake import read_accepted as read_accepted
from edge_client.wire import arrays
from edge_client.wire.arrays import DELTA, DTYPES, Payload
from strategies.codes import known
from strategies.codes.code import Code, most_bytes
from strategies.params import Tensors, flatten, shape_of, unflatten
from strategies.update import Update

if TYPE_CHECKING:
    from coordinator.rounds.plan import Task

FOLDABLE = ("F64", "F32", "F16", "BF16", "I32", "I16", "I8", "U8")
"""Dtypes of numbers that float64, in which updates are summed, represents exactly."""

_HEADROOM_BYTES = 65_536


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
        return most_bytes(known.from_options(expected.code), delta_shapes(expected))
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
    """The update in `payload`, or the reason why it is rejected, as `check_result`; the fleet detects duplicates (`reject_duplicate`)."""
    return check_result(payload, task.message, expected)


def check_in_memory(update: Update, task: Task, expected: Expected, payload_bytes: int) -> Update | Rejection:
    """What `check` would answer to the `payload_bytes` bytes of an update that stays in the process that made it."""
    if payload_bytes > expected.payload_limit_bytes:
        return reject_size(task.message, payload_bytes, expected)
    if expected.code is not None and update.encoded is None:
        return _reject(task, *without_code("tensors", expected.code))
    streams = {DELTA: update.delta, **update.extras}
    tensors = flatten({name: dict(sorted(streams[name].items())) for name in sorted(streams)})
    result = arrays.header_of(task.message, update)
    problem = find_problem(result, arrays.describe(tensors), tensors, task.message, expected)
    if problem:
        return _reject(task, *problem)
    ordered = dict(unflatten(tensors))
    return replace(update, delta=ordered.pop(DELTA), extras=ordered)


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


def reject_stale(task: Task, staleness: int) -> Rejection:
    """The rejection of a client's work whose base is too old for an asynchronous run."""
    return _reject(
        task, "stale_base", f"the model that it trains is {staleness} versions old by now, which is too old"
    )


def _reject(task: Task, reason: Reason, problem: str) -> Rejection:
    return reject(task.message, reason, problem)
