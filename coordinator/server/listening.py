"""Sockets that servers listen on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.errors import UserError
from coordinator.option_parsers import Address


@contextmanager
def bound_socket(option: str, address: Address) -> Iterator[socket.socket]:
    """A socket bound to an address. `option`: which gave it, in messages.

    Raises:
        UserError: it cannot be bound.
    """
    try:
        family, _, _, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"{option} {address}: {error.strerror}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(resolved)
        except OSError as error:
            reason = "the port is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise UserError(
                f"{option} {address}: {reason}; give another one, or port 0 for any free one"
            ) from None
        yield listener
