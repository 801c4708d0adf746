"""A Unix socket of one's own: for its user alone, taken from nobody, gone in the end."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_client.errors import UserMistake

_ASKED_SECONDS = 5.0
"""Whoever has a connection wait so long is there, and busy."""


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket at `path` that its user alone can reach (mode 0600), and that is removed in the end.

    Raises:
        UserMistake: something else lies there, another service listens, or there can be none.
    """
    try:
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise UserMistake(f"--socket {path}: something else lies there")
            if _answered(path):
                raise UserMistake(f"--socket {path}: another service listens there")
            path.unlink()  # of one that was killed
    except OSError as error:
        raise UserMistake(f"--socket {path}: {error.strerror or error}") from None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise UserMistake(f"--socket {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    listener.listen()  # whoever comes before it is served waits
    ours = path.stat().st_ino
    try:
        yield listener
    finally:
        listener.close()
        with suppress(OSError):
            if path.stat().st_ino == ours:  # it may have been removed, and another service be there
                path.unlink()


def _answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_ASKED_SECONDS)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except TimeoutError:
            return True
    return True
