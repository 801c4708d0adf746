"""Bytes this process has sent to the others, as the kernel counts them on its TCP connections.

Gloo uses TCP, also between processes of one host, so the difference of two counts is the cost of an exchange,
whatever collectives it consists of. NCCL within a host, and InfiniBand, bypass TCP and are not counted. Linux only.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

# `struct tcp_info` of linux/tcp.h: the 64-bit field `tcpi_bytes_sent`, available since Linux 4.19
_BYTES_SENT_AT = 200


def sent_bytes() -> int:
    """Bytes sent so far over all open TCP connections, headers not counted."""
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if stat.S_ISSOCK(descriptor.stat().st_mode):
                total += _sent_by(int(descriptor.name))
        except OSError:
            continue  # closed since it was listed, or a socket of another kind
    return total


def _sent_by(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in (
            socket.AF_INET,
            socket.AF_INET6,
        ):
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("Q", info, _BYTES_SENT_AT)[0]) if len(info) >= _BYTES_SENT_AT + 8 else 0
