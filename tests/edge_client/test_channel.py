"""Frames arrive as they were sent, or the channel is closed."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.processes.channel import (
    Closed,
    Frame,
    FrameReader,
    encode_frame,
    read_frame,
    receive_frame,
    send_frame,
    send_frames,
    send_mapped,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@given(
    st.dictionaries(
        st.text(max_size=5), st.none() | st.integers() | st.text() | st.lists(st.booleans()), max_size=4
    ),
    st.lists(st.binary(max_size=300), max_size=4),
)
def test_a_frame_arrives_as_it_was_sent(values: dict[str, Any], blobs: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, values, blobs)
        frame = receive_frame(theirs)
    assert (frame.values, frame.blobs) == (values, tuple(blobs))


def test_a_frame_larger_than_any_buffer_arrives_complete(pair: tuple[socket.socket, socket.socket]) -> None:
    large = os.urandom(5_000_000)
    sender = threading.Thread(target=send_frame, args=(pair[0], {"n": 1}, [large, b"", large]))
    sender.start()
    frame = receive_frame(pair[1])
    sender.join()
    assert frame.blobs == (large, b"", large)


@pytest.mark.parametrize("large", [(), (b"", b"small"), (os.urandom(5_000_001), b"", os.urandom(70_000))])
def test_large_blobs_arrive_in_memory_without_the_receivers_help(
    pair: tuple[socket.socket, socket.socket], large: tuple[bytes, ...]
) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    send_mapped(pair[0], {"n": 1}, [b"first"], large)  # nobody reads yet
    send_frame(pair[0], {"n": 2})
    reader = FrameReader(pair[1])
    frame = reader.read()
    assert frame.values == {"n": 1}
    assert [*frame.blobs, *map(bytes, frame.mapped)] == [b"first", *large]
    assert reader.read() == Frame({"n": 2})
    del frame
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize("ahead", [0, 65_536])
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        bytes(11),
        bytes([0, 0, 0, 9]) + bytes(8),
        bytes([0, 0, 0, 22]) + bytes([0] * 7 + [9]) + b"[{}, [9], false, null]",
        bytes([0, 0, 0, 22]) + bytes([0] * 7 + [9]) + b"[{}, [9], false, null]1234",
    ],
)
def test_an_end_in_the_middle_of_a_frame_is_closed(
    pair: tuple[socket.socket, socket.socket], sent: bytes, ahead: int
) -> None:
    pair[0].sendall(sent)
    pair[0].close()
    reader = FrameReader(pair[1], ahead)
    assert not reader.has_frame
    with pytest.raises(Closed):
        reader.read()


def test_sending_to_nobody_is_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(Closed):
        send_frame(pair[0], {}, [b"x"])


def test_frames_that_arrive_together_are_read_one_by_one_with_their_files(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    numbers = range(6)
    with ExitStack() as stack:
        files: dict[int, int] = {}
        for number in (1, 2, 4):
            path = tmp_path / str(number)
            path.write_text(str(number))
            files[number] = stack.enter_context(path.open()).fileno()
        send_frames(
            pair[0],
            [encode_frame({"n": number}, [b"x" * number], files.get(number)) for number in numbers],
        )
    reader = FrameReader(pair[1])
    for number in numbers:
        frame = reader.read()
        assert (frame.values, frame.blobs) == ({"n": number}, (b"x" * number,))
        assert (frame.file is not None) == (number in files)
        if frame.file is not None:
            with os.fdopen(frame.file) as file:
                assert file.read() == str(number)


def test_a_frame_read_ahead_waits_for_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    send_frames(pair[0], [encode_frame({"n": number}, [b"abc"]) for number in range(2)])
    reader = FrameReader(pair[1])
    assert not reader.has_frame
    assert reader.read().values == {"n": 0}
    assert reader.has_frame
    assert reader.read().values == {"n": 1}
    assert not reader.has_frame


def test_one_frame_is_received_and_nothing_of_the_next(pair: tuple[socket.socket, socket.socket]) -> None:
    send_frames(pair[0], [encode_frame({"n": number}, [b"abc"]) for number in range(2)])
    assert [receive_frame(pair[1]).values for _ in range(2)] == [{"n": 0}, {"n": 1}]


def test_event_loop_reads_frames_as_they_were_sent() -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        for values, blobs in (({"n": 1}, [b"", b"blob"]), ({}, [])):
            reader.feed_data(b"".join(encode_frame(values, blobs).parts))
        first, second = await read_frame(reader), await read_frame(reader)
        assert (first.values, first.blobs) == ({"n": 1}, (b"", b"blob"))
        assert (second.values, second.blobs) == ({}, ())
        reader.feed_data(encode_frame({"n": 2}).parts[0])
        reader.feed_eof()
        with pytest.raises(Closed):
            await read_frame(reader)

    asyncio.run(read())
