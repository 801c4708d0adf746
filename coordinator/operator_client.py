"""The command line's side of the operator API: finds the coordinator, shows the admin token, asks.

`connect(url)` gives a client; its calls return parsed JSON or raise `UserError` in the coordinator's own
words. The address is `--coordinator`, `FEDLOOP_COORDINATOR` or the default of `fedloop serve`; the token is
`FEDLOOP_ADMIN_TOKEN` or the file that `fedloop serve` left in the default home.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

import typer
import urllib3

from coordinator.errors import UserError
from coordinator.settings import default_home

DEFAULT_URL = "http://127.0.0.1:8080"
PREFIX = "/api/v1"
_PATIENCE = urllib3.Timeout(connect=5, read=60)

Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        envvar="FEDLOOP_COORDINATOR",
        show_envvar=True,
        help=f"Address of the operator API. Default: {DEFAULT_URL}",
        metavar="URL",
    ),
]
"""Option of every command that talks to a coordinator."""


class Unreachable(UserError):
    """No coordinator answers; it may come back."""


class Refused(UserError):
    """The coordinator said no, in its own words; `code` is its stable code, `details` what else a program can use."""

    def __init__(
        self, status: int, code: str, message: str, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, code)
        self.status = status
        self.details = details or {}


class OperatorClient:
    """Calls to one coordinator. Paths are below `/api/v1`, such as `/devices`.

    Every call raises `Unreachable` where nobody answers and `Refused` where the answer is no.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}"}
        # A proxy of the environment is for the way out; the operator API is on this machine or tunnelled to it.
        self._pool = urllib3.PoolManager(retries=False, timeout=_PATIENCE)

    def get(self, path: str, **query: Any) -> Any:
        """The JSON at `path`; parameters that are None are left out."""
        return json.loads(self._call("GET", _with_query(path, query)).data)

    def post(self, path: str, body: Any = None) -> Any:
        """What the coordinator answers to `body`; None for an answer without one."""
        answer = self._call("POST", path, {} if body is None else body).data
        return json.loads(answer) if answer else None

    def put_bytes(self, path: str, piece: bytes, **query: Any) -> Any:
        """What the coordinator answers to these bytes."""
        headers = {"Content-Type": "application/octet-stream"}
        return json.loads(self._call("PUT", _with_query(path, query), content=piece, headers=headers).data)

    def put(self, path: str, body: Any) -> Any:
        """What the coordinator answers to `body`."""
        return json.loads(self._call("PUT", path, body).data)

    def delete(self, path: str) -> Any:
        """What the coordinator answers; None for an answer without a body."""
        answer = self._call("DELETE", path).data
        return json.loads(answer) if answer else None

    def download(self, path: str) -> bytes:
        """The bytes at `path`."""
        return self._call("GET", path).data

    def fetch(self, path: str, into: Path, got: Callable[[int], None]) -> None:
        """Writes the bytes at `path` into a file, piece by piece; `got` hears how many came.

        Raises:
            OSError: the file cannot be written.
        """
        response = self._call("GET", path, preload=False)
        try:
            with into.open("wb") as file:
                for piece in response.stream(2**20):
                    file.write(piece)
                    got(len(piece))
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"the coordinator at {self.url} went away: {_reason(error)}") from None
        finally:
            response.release_conn()
            response.close()

    def events(self, path: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """Server-Sent Events from `path` after the event `after`: each one's JSON, as they come.

        Ends when the coordinator ends the stream; the caller asks again, after the last id it saw.
        """
        response = self._call(
            "GET",
            path,
            headers={"Accept": "text/event-stream", "Last-Event-ID": str(after)},
            preload=False,
        )
        try:
            for data in _sse_data(response):
                yield json.loads(data)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"the coordinator at {self.url} went away: {_reason(error)}") from None
        finally:
            response.release_conn()
            response.close()

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        preload: bool = True,
    ) -> urllib3.BaseHTTPResponse:
        try:
            response = self._pool.request(
                method,
                self.url + PREFIX + path,
                headers={**self._headers, **(headers or {})},
                json=body,
                body=content,
                preload_content=preload,
                redirect=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(
                f"no coordinator answers at {self.url}: {_reason(error)}; start one with `fedloop serve`, or give its "
                "address with --coordinator or FEDLOOP_COORDINATOR"
            ) from None
        if response.status >= 300:
            raise _refused(response, self.url)
        return response


def connect(coordinator: str | None = None) -> OperatorClient:
    """A client for the coordinator at this address, by default the one of this machine.

    Raises:
        UserError: the address is none, or no admin token is at hand.
    """
    url = (coordinator or os.environ.get("FEDLOOP_COORDINATOR") or DEFAULT_URL).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--coordinator {url!r} is no address; expected one such as {DEFAULT_URL}")
    return OperatorClient(url, _token())


def _token() -> str:
    if given := os.environ.get("FEDLOOP_ADMIN_TOKEN", "").strip():
        return given
    path = default_home() / "admin.token"
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(
            f"no admin token: {path}: {why}; give the token in FEDLOOP_ADMIN_TOKEN, or the home of "
            "`fedloop serve` in FEDLOOP_HOME"
        ) from None


def _with_query(path: str, query: dict[str, Any]) -> str:
    given = {key: value for key, value in query.items() if value is not None}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def _refused(response: urllib3.BaseHTTPResponse, url: str) -> Refused:
    try:
        error = json.loads(response.data)["error"]
        code, message = str(error["code"]), str(error["message"])
        details = {key: value for key, value in error.items() if key not in ("code", "message")}
    except (ValueError, KeyError, TypeError):
        return Refused(
            response.status,
            "not_a_coordinator",
            f"{url} answered {response.status} in a form that is not a coordinator's; is the address right?",
        )
    if code in ("no_token", "bad_token"):
        message += f"; the one used is from {_where_from()}"
    return Refused(response.status, code, message, details)


def _where_from() -> str:
    if os.environ.get("FEDLOOP_ADMIN_TOKEN", "").strip():
        return "FEDLOOP_ADMIN_TOKEN"
    return str(Path(default_home(), "admin.token"))


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return "connection refused" if "refused" in str(error) else str(error).rpartition(": ")[2]
    return str(error) or type(error).__name__


def _sse_data(response: urllib3.BaseHTTPResponse) -> Iterator[str]:
    """The data of each event. Comments and the other fields are passed over."""
    rest = b""
    for piece in response.stream(65536):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
