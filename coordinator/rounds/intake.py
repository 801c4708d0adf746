"""The coordinator accepts: one pure check between a client's bytes and the aggregation.

Whoever receives a result calls `check`, a worker of the simulation as much as the device API. The header
is judged before any array is built; the arrays are built once they are known to be what was asked for.
A rejection never stops a round: it is counted by its reason and told in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from coordinator.rounds.plan import Task
from edge_client.train import schedule
from edge_client.wire import arrays
from edge_client.wire.arrays import FilePayload, Payload, StoredArrays
from edge_client.wire.messages import DELTA, ResultHeader, result_header
from strategies.lazy import NotFinite, require_finite, shape_of
from strategies.params import Tensors
from strategies.state import joined, parted
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
]

_HEADROOM_BYTES = 65_536
_WORDS_LIMIT = 500


@dataclass(frozen=True)
class Rejection:
    """Why a result does not count: a stable code, and the words for the person who runs the client."""

    client: str
    reason: Reason
    words: str


@dataclass(frozen=True)
class Expected:
    """What a result of this round must hold: tensor name -> shape, all float32, and its largest size.

    Attributes:
        max_examples: the most examples it may claim; None: any.
        weight_limit: the most examples it counts for, however many it claims; None: any.
    """

    shapes: Mapping[str, tuple[int, ...]]
    payload_limit_bytes: int
    max_examples: int | None = None
    weight_limit: int | None = None


def expected_of(
    trainable: Tensors,
    streams: Mapping[str, Tensors],
    max_examples: int | None = None,
    weight_limit: int | None = None,
) -> Expected:
    """The expectation for updates of `trainable` with the client rule's `streams`."""
    tensors = joined({DELTA: trainable, **streams})
    shapes = {name: shape_of(tensors, name) for name in tensors}
    size = sum(4 * math.prod(shape) for shape in shapes.values())
    names = sum(len(name) + 128 for name in tensors)
    return Expected(shapes, size + names + _HEADROOM_BYTES, max_examples, weight_limit)


def check(payload: Payload, task: Task, expected: Expected) -> Update | Rejection:
    """The update in `payload`, or the reason it is refused. Tensors of a payload on disk stay there.

    Checked in this order: size, form, base version, task, examples, steps, names, dtypes, shapes, finiteness. Whether
    it came before is for the fleet to know (`duplicate`).
    """
    no = partial(_rejection, task)
    if payload.size_bytes > expected.payload_limit_bytes:
        return no(
            "oversized", f"{payload.size_bytes} bytes, at most {expected.payload_limit_bytes} are allowed"
        )
    try:
        header = arrays.read_header(payload)
        said = result_header(header.values)
    except arrays.Malformed as error:
        return no("malformed", str(error))
    refused = (
        _wrong_task(said, task)
        or _too_many(said, expected)
        or _wrong_steps(said, task)
        or _wrong_tensors(header.tensors, expected)
    )
    if refused:
        return no(*refused)
    tensors = StoredArrays(payload, header)
    try:
        require_finite(tensors, tensors)
    except NotFinite as error:
        return no("non_finite", f"{error}; lower the learning rate or check the data")
    return _update(tensors, said)


def stored(payload: Payload) -> Update:
    """The update in a payload that was checked before.

    Raises:
        arrays.Malformed: it is no longer what it was.
    """
    header = arrays.read_header(payload)
    return _update(StoredArrays(payload, header), result_header(header.values))


def _update(tensors: StoredArrays, said: ResultHeader) -> Update:
    on_disk = isinstance(tensors.payload, FilePayload)
    streams = dict(parted(tensors if on_disk else dict(tensors)))
    return Update(
        delta=streams.pop(DELTA),
        num_examples=said.num_examples,
        num_steps=said.num_steps,
        train_loss=said.train_loss,
        extras=streams,
    )


def reason_of(code: str | None) -> Reason:
    """The reason with this code.

    Raises:
        ValueError: there is none.
    """
    for reason in get_args(Reason):
        if reason == code:
            return reason  # type: ignore[no-any-return]
    raise ValueError(f"{code!r} is no reason; known: {', '.join(get_args(Reason))}")


def duplicate(task: Task) -> Rejection:
    """The answer to a good update where one of this client counts already."""
    return _rejection(task, "duplicate", "this client's update of this round was already accepted")


def _rejection(task: Task, reason: Reason, words: str) -> Rejection:
    # Words quote what the client sent, which may be a megabyte.
    short = words if len(words) <= _WORDS_LIMIT else words[:_WORDS_LIMIT] + "…"
    asked = task.message
    return Rejection(asked.client, reason, f"update from {asked.client}, round {asked.round}: {short}")


def _wrong_task(said: ResultHeader, task: Task) -> tuple[Reason, str] | None:
    asked = task.message
    if said.base != asked.base:
        return "stale_base", f"it trained model {said.base[:12]}, this round uses {asked.base[:12]}"
    if (said.round, said.client) != (asked.round, asked.client):
        return "wrong_task", f"it answers round {said.round} of client {said.client!r}"
    if said.num_examples < 1 or said.num_steps < 1:
        return (
            "no_examples",
            f"it says {said.num_examples} examples and {said.num_steps} steps, at least 1 is expected",
        )
    if not math.isfinite(said.train_loss):
        return (
            "non_finite",
            f"its training loss is {said.train_loss}; lower the learning rate or check the data",
        )
    return None


def _too_many(said: ResultHeader, expected: Expected) -> tuple[Reason, str] | None:
    if expected.max_examples is None or said.num_examples <= expected.max_examples:
        return None
    return (
        "too_many_examples",
        f"it says {said.num_examples} examples, this run takes at most {expected.max_examples} of a client",
    )


def _wrong_steps(said: ResultHeader, task: Task) -> tuple[Reason, str] | None:
    """Every runtime reports the steps that its schedule has: they are what an update's length is held against."""
    asked = task.message
    steps = schedule.count(said.num_examples, asked.batch_size, epochs=asked.epochs, steps=asked.steps)
    if said.num_steps == steps:
        return None
    return "wrong_steps", f"it says {said.num_steps} steps; {said.num_examples} examples make {steps} here"


def _wrong_tensors(sent: Mapping[str, arrays.Slot], expected: Expected) -> tuple[Reason, str] | None:
    missing = sorted(expected.shapes.keys() - sent.keys())
    extra = sorted(sent.keys() - expected.shapes.keys())
    if missing and extra:
        return "misnamed_tensor", f"has {extra[0]!r} where {missing[0]!r} is expected"
    if missing:
        return (
            "missing_tensor",
            f"{missing[0]!r} is missing, {len(sent)} of {len(expected.shapes)} tensors came",
        )
    if extra:
        return "extra_tensor", f"{extra[0]!r} is no tensor of this model"
    for name in sorted(sent):
        if sent[name].dtype != "F32":
            return "wrong_dtype", f"{name} is {sent[name].dtype}, expected F32"
        if sent[name].shape != expected.shapes[name]:
            return "wrong_shape", f"{name} is {sent[name].shape}, expected {expected.shapes[name]}"
    return None
