"""How a relay speaks for its devices: it forwards their requests, says what became of their updates, and fetches their blobs once."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import urllib3

from edge_client.files import make_folder
from edge_client.transport.failures import CertificateExpired, Unreachable
from edge_client.transport.link import SILENCE_SECONDS, Answer, Link, download, parse_answer
from edge_client.transport.piece import Piece
from edge_client.wire.device import BlobRef
from edge_client.wire.relays import ON_BEHALF, Figures, Refused, RelayedTask
from edge_client.wire.strict import InvalidDocument, loads

CONNECTIONS = 256
"""Connections to the coordinator that are kept open; one is in use for each device that waits for a task."""

UNUSED_SECONDS = 86_400.0
"""A blob that no device has fetched for so long is deleted."""


class Body(Piece):
    """The body of a device's request, read while it is forwarded."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._file = file
        self._left = size_bytes
        self._check_cancelled = lambda: None


class Intermediary:
    """Speaks for devices. `link`: returns the relay's connection to the coordinator, which a renewed certificate replaces."""

    def __init__(self, link: Callable[[], Link], blobs: Path) -> None:
        self._link = link
        self._blobs = blobs
        self._fetching: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        make_folder(blobs)
        self._sweep()

    @contextmanager
    def forward(
        self,
        method: str,
        path: str,
        device: str | None,
        body: bytes | Piece | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        wait_seconds: float = 0.0,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """The coordinator's answer, unread. `device`: whose request it is; None: of one that is not enrolled yet.

        Raises:
            Unreachable: it gives none, or none for a reason that is the relay's own; within the block too.
        """
        link = self._link() if device is None else self._link().naming(ON_BEHALF, device)
        try:
            response = link.forward(method, path, body, SILENCE_SECONDS + wait_seconds, headers or {})
        except CertificateExpired as error:
            raise Unreachable(str(error)) from None
        try:
            if device is not None and response.status == 401:
                raise Unreachable("the coordinator does not accept the relay's certificate")
            yield response
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"the connection to the coordinator broke: {error}") from None
        finally:
            response.close() if response.length_remaining != 0 else response.release_conn()

    def task(self, task: str, device: str) -> RelayedTask:
        """What the device's task asks for. Raises: ServerRefused, Unreachable."""
        content = self._link().naming(ON_BEHALF, device).content(f"/relay/tasks/{task}")
        try:
            document = loads(content, "answer")
        except InvalidDocument as error:
            raise Unreachable(f"the coordinator's answer cannot be parsed: {error}") from None
        return parse_answer(RelayedTask, Answer(document if isinstance(document, dict) else {}, None))

    def accepted(self, task: str, device: str, figures: Figures) -> None:
        """Says that the device's update is on this disk; it counts once this returns. Raises: ServerRefused, Unreachable."""
        self._link().naming(ON_BEHALF, device).post(f"/relay/tasks/{task}/accepted", figures)

    def rejected(self, task: str, device: str, why: Refused) -> None:
        """Says why the device's update is rejected. Raises: ServerRefused, Unreachable."""
        self._link().naming(ON_BEHALF, device).post(f"/relay/tasks/{task}/rejected", why)

    def fetch(self, blob: BlobRef, device: str) -> Path:
        """A blob that this device was offered, from the disk if it is there. Raises: ServerRefused, Unreachable."""
        path = self._blobs / blob.sha256
        with self._lock:
            lock = self._fetching.setdefault(blob.sha256, threading.Lock())
        with lock:
            download(self._link().naming(ON_BEHALF, device), blob, path)
            os.utime(path)
        return path

    def _sweep(self) -> None:
        for path in self._blobs.iterdir():
            if time.time() - path.stat().st_mtime > UNUSED_SECONDS:
                path.unlink(missing_ok=True)


def error_body(code: str, message: str, **details: object) -> bytes:
    """The body of a refusal, in the form of the device API."""
    return json.dumps({"error": {"code": code, "message": message, **details}}).encode()
