"""A private Unix socket: accessible to its user only, never taken from another service, removed at the end."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_client.errors import UserError

_CONNECT_SECONDS = 5.0
"""A service that does not accept within this time exists and is busy."""


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A listening socket at `path` with mode 0600, removed at the end.

    Raises:
        UserError: another file is there, another service listens, or the socket cannot be created.
    """
    try:
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise UserError(f"--socket {path}: another file is there")
            if _accepts(path):
                raise UserError(f"--socket {path}: another service listens there")
            path.unlink()  # left by a killed service
    except OSError as error:
        raise UserError(f"--socket {path}: {error.strerror or error}") from None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise UserError(f"--socket {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    listener.listen()  # early clients wait until it is served
    ours = path.stat().st_ino
    try:
        yield listener
    finally:
        listener.close()
        with suppress(OSError):
            if path.stat().st_ino == ours:  # it may have been replaced by another service's
                path.unlink()


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_CONNECT_SECONDS)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except TimeoutError:
            return True
    return True
