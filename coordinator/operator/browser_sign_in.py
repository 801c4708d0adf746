"""Sign-in of a command at an OpenID provider, in the user's browser.

The browser comes back to a port of this machine, where the command listens (RFC 8252, section 7.3): the client at the provider must allow
`http://127.0.0.1/callback`, with any port or with the one of `--redirect-port`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from coordinator.errors import UserError
from coordinator.operator.client import OperatorClient

PATIENCE_SECONDS = 600.0
"""The coordinator forgets the sign-in after the same time."""
_PATH = "/callback"
_POLL_SECONDS = 1.0
_DONE = b"<!doctype html><title>Fedloop</title><p>Back to the terminal: fedloop goes on there. You can close this page."


def sign_in_in_browser(client: OperatorClient, port: int, show: Callable[[str], None]) -> None:
    """Begins a session of who signs in at the provider. `port`: where the browser comes back to; 0: any free one.

    `show` is called with the address to open.

    Raises:
        UserError: the port is in use, nobody signs in within ten minutes, or the coordinator refuses.
    """
    try:
        server = _Listener(("127.0.0.1", port), _Answer)
    except OSError as error:
        raise UserError(f"--redirect-port {port}: {error.strerror}") from None
    with server:
        url = client.begin_oidc(f"http://127.0.0.1:{server.server_port}{_PATH}")
        server.state = parse_qs(urlsplit(url).query).get("state", [""])[0]
        show(url)
        client.complete_oidc(server.wait())


def can_open_browser() -> bool:
    """Whether there is a desktop; elsewhere a text browser would take the terminal."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


class _Listener(HTTPServer):
    """Waits for the browser. What lacks the state of the sign-in is not from the provider, and changes nothing."""

    state = ""
    timeout = _POLL_SECONDS

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parameters: dict[str, str] | None = None

    def wait(self) -> dict[str, str]:
        """The parameters with which the browser came back."""
        until = time.monotonic() + PATIENCE_SECONDS
        while self.parameters is None:
            if time.monotonic() > until:
                raise UserError(
                    f"nobody signed in within {PATIENCE_SECONDS / 60:.0f} minutes; start again: fedloop login --oidc"
                )
            self.handle_request()
        return self.parameters


class _Answer(BaseHTTPRequestHandler):
    timeout = 5  # of a connection that sends nothing
    server: _Listener

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        is_answer = parts.path == _PATH and query.get("state") == self.server.state
        if is_answer:
            self.server.parameters = {
                key: query[key] for key in ("state", "code", "iss", "error") if key in query
            }
        self.send_response(200 if is_answer else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(_DONE if is_answer else b"")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class calls it so
        """Nothing: the request line has the code."""
