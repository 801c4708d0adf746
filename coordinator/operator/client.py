"""The command line's client of the operator API.

`connect(url)` returns a client; its calls return parsed JSON or raise `UserError` with the coordinator's own
message. The address is `--coordinator`, `FEDLOOP_COORDINATOR` or the default of `fedloop serve`;
`coordinator.operator.credentials` finds the token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import urlencode, urlsplit

import click
import typer
import urllib3

from coordinator.errors import UserError
from coordinator.operator.credentials import find_credential
from coordinator.project_names import is_project_name
from coordinator.settings import DEFAULT_OPERATOR
from coordinator.short_ids import distinct_ids
from edge_client.wire.strict import printable

DEFAULT_URL = f"http://{DEFAULT_OPERATOR}"
PREFIX = "/api/v1"
PIECE_BYTES = 2**20
_PAGE_ITEMS = 1000
_MAX_LISTED = 5
_TIMEOUT = urllib3.Timeout(connect=5, read=60)

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
"""The option of every command that calls a coordinator."""


OnBytes = Callable[[int], None]
"""Called with the number of bytes transferred since the last call."""


class Unreachable(UserError):
    """No coordinator answers, for now."""


class Refused(UserError):
    """The coordinator refused, with its own message; `code` is stable, `details` holds further keys for programs."""

    def __init__(
        self, status: int, code: str, message: str, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, code)
        self.status = status
        self.details = details or {}


class OperatorClient:
    """Calls to one coordinator. Paths are below `/api/v1`, such as `/devices`.

    Every call raises `Unreachable` if nobody answers and `Refused` if the coordinator refuses.
    """

    def __init__(
        self, url: str, token: str | None, token_source: str = "", project: str | None = None
    ) -> None:
        """`token`: None to sign in. `token_source`: where it is from, for messages about a wrong one.

        `project`: None for the one that the coordinator takes for this user.
        """
        self.url = url
        self._token_source = token_source
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if project is not None:
            self._headers["X-Fedloop-Project"] = project
        # Ignores proxies of the environment: the operator API is on this machine or tunnelled to it.
        # Beside a stream of events there are other calls; urllib3 warns of connections that it cannot keep.
        self._pool = urllib3.PoolManager(maxsize=4, retries=False, timeout=_TIMEOUT)

    def get(self, path: str, **query: Any) -> Any:
        """The JSON at `path`; omits parameters that are None."""
        present = {key: value for key, value in query.items() if value is not None}
        return json.loads(
            self._call("GET", f"{path}?{urlencode(present, doseq=True)}" if present else path).data
        )

    def post(self, path: str, body: Any = None) -> Any:
        """The response to `body`; None if it is empty."""
        response = self._call("POST", path, {} if body is None else body).data
        return json.loads(response) if response else None

    def pages(
        self, path: str, key: str, cursor: str = "after", after: Any = None, **query: Any
    ) -> Iterator[dict[str, Any]]:
        """The items `key` of all pages at `path`, behind the position `after`; `cursor` is the parameter that asks for the next one."""
        position = after
        while True:
            page = self.get(path, limit=_PAGE_ITEMS, **query, **{cursor: position})
            yield from page[key]
            position = page["next"]
            if position is None:
                return

    def upload(self, path: str, source: BinaryIO, size_bytes: int, on_bytes: OnBytes) -> None:
        """Sends a file to `path` in pieces, from where an earlier upload stopped, even of another process.

        Raises:
            UserError: the file became shorter meanwhile.
            OSError: it cannot be read.
        """
        headers = {"Content-Type": "application/octet-stream"}
        offset = int(self.get(path)["offset"])
        on_bytes(min(offset, size_bytes))
        while offset < size_bytes:
            source.seek(offset)
            piece = source.read(min(PIECE_BYTES, size_bytes - offset))
            if not piece:
                raise UserError(f"{getattr(source, 'name', path)}: became shorter during the upload")
            response = self._call("PUT", f"{path}?offset={offset}", content=piece, headers=headers)
            reached = int(json.loads(response.data)["offset"])
            on_bytes(reached - offset)
            offset = reached

    def put(self, path: str, body: Any) -> Any:
        """The response to `body`; None if it is empty."""
        response = self._call("PUT", path, body).data
        return json.loads(response) if response else None

    def patch(self, path: str, body: Any) -> Any:
        """The response to `body`."""
        return json.loads(self._call("PATCH", path, body).data)

    def sign_in(self, name: str, password: str) -> None:
        """Begins a session, for the calls from then on in place of a token. It acts as a page of the coordinator does."""
        self._begin_session(self._call("POST", "/session", {"name": name, "password": password}))

    def set_up(self, secret: str, name: str, password: str) -> None:
        """Creates the first account with the secret of the setup link, and begins a session of it."""
        body = {"secret": secret, "name": name, "password": password}
        self._begin_session(self._call("POST", "/setup", body))

    def begin_oidc(self, redirect_uri: str) -> str:
        """Begins a sign-in at the OpenID provider, by this client only; the address to open in a browser."""
        response = self._call("POST", "/session/oidc/begin", {"redirect_uri": redirect_uri})
        self._headers = {"Cookie": response.headers["set-cookie"].partition(";")[0]}
        return str(json.loads(response.data)["authorization_url"])

    def complete_oidc(self, parameters: Mapping[str, str]) -> None:
        """Begins a session of who signed in there. `parameters`: with which the provider sent the browser back."""
        self._begin_session(self._call("POST", "/session/oidc", dict(parameters)))

    def _begin_session(self, response: urllib3.BaseHTTPResponse) -> None:
        parts = urlsplit(self.url)
        self._headers = {
            "Cookie": response.headers["set-cookie"].partition(";")[0],
            "Origin": f"{parts.scheme}://{parts.netloc}",
            "X-CSRF-Token": json.loads(response.data)["csrf_token"],
        }

    def delete(self, path: str) -> Any:
        """The response; None if it is empty."""
        response = self._call("DELETE", path).data
        return json.loads(response) if response else None

    def download(self, path: str) -> bytes:
        """The bytes at `path`."""
        return self._call("GET", path).data

    def fetch(self, path: str, into: Path, on_bytes: OnBytes) -> None:
        """Writes the bytes at `path` into a file, piece by piece; calls `on_bytes` with the size of each.

        Raises:
            OSError: the file cannot be written.
        """
        with self._stream(path) as response, into.open("wb") as file:
            for piece in response.stream(2**20):
                file.write(piece)
                on_bytes(len(piece))

    def events(self, path: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """Server-Sent Events from `path` after the event `after`: the JSON of each, as they arrive.

        Ends when the coordinator ends the stream; the caller reconnects after the last id it received.
        """
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        with self._stream(path, headers) as response:
            for data in _sse_data(response):
                yield json.loads(data)

    @contextmanager
    def _stream(self, path: str, headers: dict[str, str] | None = None) -> Iterator[urllib3.BaseHTTPResponse]:
        response = self._call("GET", path, headers=headers, preload=False)
        try:
            yield response
        except (urllib3.exceptions.HTTPError, ConnectionError, TimeoutError) as error:
            raise Unreachable(
                f"the coordinator at {self.url} ended the connection: {_reason(error)}"
            ) from None
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
            raise _refusal(response, self.url, self._token_source)
        return response


def connect(coordinator: str | None = None) -> OperatorClient:
    """A client for the coordinator at this address, by default the one of this machine.

    Raises:
        UserError: the address is invalid, or there is no token for it.
    """
    url = coordinator_url(coordinator)
    credential = find_credential(url)
    return OperatorClient(url, credential.token, credential.source, _project())


def _project() -> str | None:
    """The project that the command line names: `fedloop --project`, or `FEDLOOP_PROJECT`.

    Raises:
        UserError: it is no name of a project.
    """
    context = click.get_current_context(silent=True)
    project = None if context is None else context.find_root().params.get("project")
    if project and not is_project_name(project):
        raise UserError(f"--project {project!r}: expected lower-case letters, digits and inner hyphens")
    return project or None


def coordinator_url(coordinator: str | None = None) -> str:
    """The address that commands use: the option, `FEDLOOP_COORDINATOR`, or the default of `fedloop serve`.

    Raises:
        UserError: it is invalid.
    """
    url = (coordinator or os.environ.get("FEDLOOP_COORDINATOR") or DEFAULT_URL).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--coordinator {url!r} is not an address; expected one such as {DEFAULT_URL}")
    return url


def _refusal(response: urllib3.BaseHTTPResponse, url: str, token_source: str) -> Refused:
    try:
        error = json.loads(response.data)["error"]
        code, message = str(error["code"]), str(error["message"])
        details = {key: value for key, value in error.items() if key not in ("code", "message")}
    except (ValueError, KeyError, TypeError):
        return Refused(
            response.status,
            "not_a_coordinator",
            f"{url} answered {response.status}, but not as a coordinator does; is the address right?",
        )
    if token_source and code in ("no_token", "bad_token", "too_many_guesses"):
        message += f"; the one used is from {token_source}"
    return Refused(response.status, code, message, details)


def _reason(error: BaseException) -> str:
    if "RemoteDisconnected" in repr(error) or "WRONG_VERSION_NUMBER" in repr(error):
        return (
            "something else answers there, such as the port for devices; the operator's port (8080 unless set) speaks plain "
            "HTTP, behind a proxy HTTPS"
        )
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return "connection refused" if "refused" in str(error) else str(error).rpartition(": ")[2]
    return str(error) or type(error).__name__


def _sse_data(response: urllib3.BaseHTTPResponse) -> Iterator[str]:
    """The data of each event. Skips comments and other fields."""
    rest = b""
    for piece in response.stream(65536):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def device_id(client: OperatorClient, reference: str) -> str:
    """The id of the device that `reference` means. Raises: UserError: it matches no device, or several."""
    matches = client.get("/devices", called=reference, limit=100)["devices"]
    match = _unique(reference, matches, "devices")
    if match is None:
        raise UserError(f"no device matches {reference!r}; see them all: fedloop device list")
    return match


def run_id(client: OperatorClient, reference: str) -> str:
    """The id of the run that `reference` means. Raises: UserError: it matches no run, or several."""
    match = find_run_id(client, reference)
    if match is None:
        newest = client.get("/runs", limit=_MAX_LISTED)
        hint = f"the newest: {_list(newest)}" if newest else "there are no runs"
        raise UserError(f"no run matches {reference!r}; {hint}")
    return match


def find_run_id(client: OperatorClient, reference: str) -> str | None:
    """The id of the run that `reference` means, None if there is none. Raises: UserError: it matches several."""
    return _unique(reference, client.get("/runs", called=reference, limit=100), "runs")


def job_id(client: OperatorClient, reference: str) -> str:
    """The id of the job that `reference` means. Raises: UserError: it matches no job, or several."""
    match = _unique(reference, client.get("/jobs", called=reference, limit=100), "jobs")
    if match is None:
        raise UserError(f"no job matches {reference!r}; see them all: fedloop jobs list")
    return match


def token_id(client: OperatorClient, reference: str) -> str:
    """The id of the enrolment token that begins with `reference`; of no usable token, `reference` itself.

    Raises:
        UserError: it matches several.
    """
    ids = [each["id"] for each in client.get("/tokens") if each["id"].startswith(reference.lower())]
    if len(ids) > 1 and reference.lower() not in ids:
        raise UserError(
            f"{reference!r} matches {len(ids)} tokens: {', '.join(distinct_ids(ids[:_MAX_LISTED]))}; give more of the id"
        )
    return ids[0] if len(ids) == 1 else reference


def _unique(reference: str, matches: Sequence[dict[str, Any]], kind: str) -> str | None:
    """The id of the only match. A full id wins over a name, a name over the beginning of an id."""
    for candidates in (
        [each for each in matches if each["id"] == reference.lower()],
        [each for each in matches if each["name"] == reference],
        matches,
    ):
        if len(candidates) == 1:
            return str(candidates[0]["id"])
        if candidates:
            raise UserError(
                f"{reference!r} matches {len(candidates)} {kind}: {_list(candidates)}; give more of the id"
            )
    return None


def _list(items: Sequence[dict[str, Any]]) -> str:
    listed = items[:_MAX_LISTED]
    ids = distinct_ids([each["id"] for each in listed])
    return ", ".join(f"{printable(each['name'])} ({start}…)" for each, start in zip(listed, ids, strict=True))
