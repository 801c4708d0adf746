"""Messages of Flower apps between processes: nothing is lost, and a model that many clients get is sent once to each worker."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from coordinator.flower_apps import outbox, wire
from coordinator.flower_apps.dispatcher import NodeQueue, Task
from coordinator.flower_internals import make_array_record, take_identity
from edge_client.processes.channel import receive_frame

take_identity(1, 1)

_KEYS = st.text(max_size=8)
_SCALARS = {
    "metrics": [st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)],
    "config": [st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans(), st.text(), st.binary()],
}  # fmt: skip


def _values(kind: str) -> st.SearchStrategy[Any]:
    return st.one_of([each | st.lists(each, max_size=3) for each in _SCALARS[kind]])


_ARRAYS = st.dictionaries(
    _KEYS,
    arrays.arrays(st.sampled_from(["f4", "f8", "i8", "?", "f2"]), arrays.array_shapes(min_dims=0)),
    max_size=3,
)
_RECORDS = st.one_of(
    _ARRAYS.map(lambda each: ArrayRecord({key: Array(value) for key, value in each.items()})),
    st.dictionaries(_KEYS, _values("metrics"), max_size=3).map(MetricRecord),
    st.dictionaries(_KEYS, _values("config"), max_size=3).map(ConfigRecord),
)
records = st.dictionaries(_KEYS, _RECORDS, max_size=4).map(RecordDict)


def carry(values: Any) -> Any:
    """What JSON makes of it on the way."""
    return json.loads(json.dumps(values))


@given(records)
def test_records_survive(content: RecordDict) -> None:
    values, blobs = wire.encode_records(content)
    decoded = wire.decode_records(carry(values), blobs)
    assert list(decoded.items()) == list(content.items())
    assert decoded.object_id == content.object_id  # Flower's hash of all of it, types included


@given(records, st.floats(0.5, 1e6))
def test_messages_survive(content: RecordDict, ttl: float) -> None:
    message = Message(content, 7, "train.mine", ttl=ttl, group_id="3")
    values, blobs = wire.encode_message(message)
    decoded = wire.decode_message(carry(values), blobs)
    assert decoded.metadata == message.metadata
    assert decoded.content == message.content


@given(
    arrays.arrays(st.sampled_from(["f4", ">f8", "i8", "?", "f2", "U3"]), arrays.array_shapes(min_dims=0)),
    st.booleans(),
)
def test_a_received_array_is_what_flower_makes_of_its_bytes(values: np.ndarray, by_columns: bool) -> None:
    sent = Array(np.asfortranarray(values) if by_columns else values)
    (received,) = make_array_record([("w", sent.dtype, sent.shape, sent.stype, sent.data)]).values()
    expected, found = sent.numpy(), received.numpy()
    assert (found.dtype, found.shape, found.flags.writeable) == (expected.dtype, expected.shape, True)
    assert found.flags.f_contiguous == expected.flags.f_contiguous
    np.testing.assert_array_equal(found, expected)
    assert sent == received and received == sent
    assert type(copy.deepcopy(received)) is Array


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x00\x06\x00nonsense"])
def test_bytes_that_are_no_array_fail_as_in_flower(data: bytes) -> None:
    (received,) = make_array_record([("w", "float32", [2], "numpy.ndarray", data)]).values()
    with pytest.raises((ValueError, EOFError, OSError)) as ours:
        received.numpy()
    with pytest.raises(type(ours.value)):
        Array("float32", (2,), "numpy.ndarray", data).numpy()


def test_errors_survive() -> None:
    message = Message(Error(2, "why"), reply_to=Message(RecordDict(), 7, "query"))
    decoded = wire.decode_message(*wire.encode_message(message))
    assert (decoded.error, decoded.metadata) == (message.error, message.metadata)


def test_records_made_without_flowers_constructors_are_flowers() -> None:
    array = Array(np.arange(6, dtype=np.float32).reshape(2, 3))
    made = make_array_record([("w", array.dtype, [2, 3], array.stype, array.data)])
    expected = ArrayRecord({"w": array})
    assert (made, made.object_id) == (expected, expected.object_id)
    made["w"].data = b""
    assert made.object_id != expected.object_id  # it notices a change
    np.testing.assert_array_equal(expected["w"].numpy(), array.numpy())


@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=6))
def test_a_blob_of_the_last_frame_is_not_sent_again(frames: list[list[int]]) -> None:
    pool = [b"blob %d" % number for number in range(5)]
    sender, receiver = wire.SharedBlobs(), wire.SharedBlobs()
    before: list[int] = []
    for frame in frames:
        places, new = sender.reduce([pool[number] for number in frame])
        assert len(new) == sum(number not in before for number in frame)
        assert [*receiver.restore(places, new)] == [pool[number] for number in frame]
        before = frame


@given(
    st.lists(
        st.lists(st.integers(0, 90_000), max_size=3).map(lambda sizes: [os.urandom(size) for size in sizes])
    )
)
def test_replies_arrive_through_shared_memory(replies: list[list[bytes]]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer, reader = outbox.Outbox(theirs), outbox.Inbox()
        for number, blobs in enumerate(replies):
            if sum(map(len, blobs)) < outbox.MIN_BYTES:
                blobs = [b"small"]  # else the socket would fill up: nobody reads at the same time here
            writer.send({"number": number}, blobs)
            frame = reader.open(receive_frame(ours))
            assert (frame.values, frame.blobs) == ({"number": number}, tuple(blobs))


def test_two_replies_may_wait_at_a_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer, reader = outbox.Outbox(theirs), outbox.Inbox()
        blobs = [os.urandom(40_000) for _ in range(5)]
        writer.send({}, blobs[:1])
        for number in range(1, 5):
            writer.send({}, [blobs[number]])
            assert reader.open(receive_frame(ours)).blobs == (blobs[number - 1],)


def task(node: int) -> Task:
    return Task(Message(RecordDict(), node, "query"), {}, [])


def nodes_left(tasks: list[Task], finished: list[Task]) -> list[int]:
    return [each.node_id for each in tasks if each not in finished]


@pytest.mark.slow
@given(st.lists(st.integers(2, 5)), st.randoms(use_true_random=False))
def test_a_node_has_one_task_at_a_time_in_the_order_sent(nodes: list[int], random: Any) -> None:
    queue, tasks = NodeQueue(), [task(node) for node in nodes]
    for each in tasks:
        queue.add(each)
    running: list[Task] = []
    finished: list[Task] = []
    while len(finished) < len(tasks):
        assert len(queue) == len({*nodes_left(tasks, finished)} - {each.node_id for each in running})
        moves: list[Callable[[], None]] = []
        if (taken := queue.take()) is not None:
            assert taken.node_id not in [each.node_id for each in running]
            running.append(taken)
        if running:
            chosen = random.choice(running)
            running.remove(chosen)
            if random.random() < 0.3:
                moves.append(lambda chosen=chosen: queue.put_back(chosen))  # its worker died
            else:
                finished.append(chosen)
                moves.append(lambda chosen=chosen: queue.finish(chosen))
        for move in moves:
            move()
    assert queue.take() is None
    for node in set(nodes):
        sent = [each for each in tasks if each.node_id == node]
        assert [each for each in finished if each.node_id == node] == sent


def test_tasks_of_different_nodes_keep_their_order() -> None:
    queue, tasks = NodeQueue(), [task(node) for node in (4, 2, 3)]
    for each in tasks:
        queue.add(each)
    assert [queue.take() for _ in range(4)] == [*tasks, None]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**63, -1, True])
def test_special_values_survive(value: float) -> None:
    values, blobs = wire.encode_records(RecordDict({"c": ConfigRecord({"v": value, "l": [value]})}))
    got = wire.decode_records(carry(values), blobs)["c"]
    assert repr(got) == repr({"v": value, "l": [value]})
