"""A TCPStore that listens at one address. Torch's own listens at all of a machine's."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def listen(
    host: str, port: int = 0, processes: int | None = None, timeout: timedelta | None = None
) -> TCPStore:
    """A store at this IPv4 address and port, 0 for any free one; its `port` says which.

    Whoever can connect can read and change it, and processes unpickle what they find in some: it belongs in a private network.

    Args:
        processes: how many will connect, this one included, where all are waited for.
        timeout: of that and of waiting for keys; torch's default is five minutes.
    """
    with socket.create_server((host, port), backlog=1024) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            processes,
            True,
            timeout or timedelta(minutes=5),
            wait_for_workers=processes is not None,
            master_listen_fd=listener.detach(),
        )
