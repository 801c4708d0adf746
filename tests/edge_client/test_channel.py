"""Frames arrive as they were sent, or the channel is closed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.processes.channel import Closed, receive_frame, send_frame


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
    values.pop("blobs", None)
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


@pytest.mark.parametrize(
    "sent", [b"", b"\0\0", b"\0\0\0\x09", b'\0\0\0\x0e{"blobs": [9]}', b'\0\0\0\x0e{"blobs": [9]}1234']
)
def test_an_end_in_the_middle_of_a_frame_is_closed(
    pair: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    pair[0].sendall(sent)
    pair[0].close()
    with pytest.raises(Closed):
        receive_frame(pair[1])


def test_sending_to_nobody_is_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(Closed):
        send_frame(pair[0], {}, [b"x"])
