"""Requests to an OpenID provider: bounded in time and size, encrypted, and never redirected.

An answer that is slow, large, or leads elsewhere is a failure: what the provider says decides who gets in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import urllib3

MAX_BYTES = 256 * 1024
"""Of an answer; discovery documents and key sets have a few kilobytes."""
DEADLINE_SECONDS = 10.0
"""For a whole answer."""
_TIMEOUT = urllib3.Timeout(connect=5, read=5)
_PIECE_BYTES = 16 * 1024
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Unavailable(Exception):
    """The provider cannot be reached, or answers otherwise than a provider does. The message says how."""


@dataclass(frozen=True)
class Answer:
    """An answer, with the methods that Authlib uses."""

    status_code: int
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)

    def raise_for_status(self) -> None:
        if self.status_code >= 400:
            raise Unavailable(f"it answered {self.status_code}")


class Fetcher:
    """Sends requests to addresses that the provider's own address allows. Safe to use from several threads."""

    def __init__(self, issuer: str) -> None:
        self._is_local = is_loopback(issuer)
        self._pool = urllib3.PoolManager(retries=False, timeout=_TIMEOUT)

    def get_json(self, url: str) -> dict[str, Any]:
        """The JSON object at an address.

        Raises:
            Unavailable
        """
        answer = self.request("GET", url)
        try:
            document = answer.json() if answer.status_code == 200 else None
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise Unavailable(f"{url} answered {answer.status_code}, expected 200 with a JSON object")
        return document

    def post(self, url: str, data: Mapping[str, str], headers: Mapping[str, str], auth: Any) -> Answer:
        """Posts a form with the client's credentials; Authlib calls it. Raises: Unavailable."""
        url, prepared, body = auth.prepare("POST", url, dict(headers), urlencode(data))
        return self.request("POST", url, body, prepared)

    def request(
        self, method: str, url: str, body: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """The answer to one request. Raises: Unavailable."""
        self.require_protected(url)
        until = time.monotonic() + DEADLINE_SECONDS
        try:
            response = self._pool.request(
                method,
                url,
                body=body,
                headers={**(headers or {}), "Accept": "application/json", "Accept-Encoding": "identity"},
                redirect=False,
                preload_content=False,
            )
            try:
                return Answer(response.status, _read(response, url, until))
            finally:
                response.close()
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise Unavailable(f"{url}: {type(error).__name__}") from None

    def require_protected(self, url: str) -> None:
        """Requires TLS, except on loopback if the provider itself is there. Raises: Unavailable."""
        if urlsplit(url).scheme == "https" or (self._is_local and is_loopback(url)):
            return
        raise Unavailable(f"{url[:200]}: expected an address with https")


def is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in _LOOPBACK


def _read(response: urllib3.BaseHTTPResponse, url: str, until: float) -> bytes:
    content = b""
    while piece := response.read(_PIECE_BYTES, decode_content=False):
        content += piece
        if len(content) > MAX_BYTES:
            raise Unavailable(f"{url} answers with more than {MAX_BYTES} bytes")
        if time.monotonic() > until:
            raise Unavailable(f"{url} takes longer than {DEADLINE_SECONDS:.0f} s to answer")
    return content
