"""A tiny HTTP proxy that knows CONNECT and nothing else, and remembers where it was asked to connect to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class ConnectProxy:
    url: str = ""
    asked: list[str] = field(default_factory=list)


@contextmanager
def connect_proxy() -> Iterator[ConnectProxy]:
    proxy = ConnectProxy()
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy.url = f"http://127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=_accept, args=(server, proxy), daemon=True).start()
        yield proxy


def _accept(server: socket.socket, proxy: ConnectProxy) -> None:
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            threading.Thread(target=_tunnel, args=(client, proxy), daemon=True).start()


def _tunnel(client: socket.socket, proxy: ConnectProxy) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        head += client.recv(1)
    method, target, _ = head.split(b"\r\n")[0].decode().split()
    assert method == "CONNECT"
    proxy.asked.append(target)
    host, _, port = target.rpartition(":")
    upstream = socket.create_connection((host, int(port)))
    client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
    threading.Thread(target=_copy, args=(upstream, client), daemon=True).start()
    _copy(client, upstream)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
