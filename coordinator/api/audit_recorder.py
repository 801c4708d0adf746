"""Records every change over the operator API in the audit log. The only place that does; new routes need nothing.

    1. `record_begin`   a dependency after the permission check: an entry `begun`, durable before the route runs
    2. the route        makes the change, in whatever transactions and files it needs
    3. `AuditMiddleware`  an entry `ended` with the status, durable before the answer is sent

A change that cannot be announced is not made (503). A crash between 1 and 3 leaves an entry without an end: the change may
have been made or not. Requests of strangers are not announced, so that guesses do not fill the disk: signing in and the first
account are recorded once they have succeeded, as `done`. Refusals (401, 403, 429) are recorded at a limited rate.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator import failpoints
from coordinator.api.cookies import SAFE_METHODS
from coordinator.api.permissions import OF_COORDINATOR, OF_USER, route_key
from coordinator.audit.entries import Entry, Stage, append
from coordinator.context.services import Services
from coordinator.identity.principals import Principal
from coordinator.limits.rates import TokenBuckets
from coordinator.project_names import DEFAULT_PROJECT

REFUSALS = frozenset({401, 403, 429})
RECORDED_VALUES: dict[tuple[str, str], tuple[str, ...]] = {
    ("POST", "/tokens"): ("id", "group", "uses", "ttl_seconds", "needs_approval", "listed_serials_only"),
    ("POST", "/devices/{device}/group"): ("group",),
    ("POST", "/devices/{device}/revoke"): ("reason",),
    ("POST", "/serials"): ("group", "added", "already_listed"),
    ("POST", "/runs"): ("id", "name"),
    ("POST", "/jobs"): ("id", "kind", "name", "source", "priority"),
    ("POST", "/statistics"): ("id", "name"),
    ("POST", "/models/{name}/versions"): ("kind", "run", "version"),
    ("PUT", "/models/{name}/aliases/{alias}"): ("version", "expected"),
    ("POST", "/releases"): ("targets", "version"),
    ("POST", "/rollouts"): ("id", "model", "version", "phases"),
    ("POST", "/rollouts/{rollout}/abort"): ("keep",),
    ("POST", "/rollouts/{rollout}/force"): ("device",),
    ("POST", "/users"): ("name", "role"),
    ("PATCH", "/users/{user}"): ("role", "disabled"),
    ("POST", "/access-tokens"): ("id", "user", "name", "role", "project", "days", "expires_at"),
    ("POST", "/projects"): ("name",),
    ("PATCH", "/projects/{project}"): ("archived",),
    ("PUT", "/projects/{project}/members/{user}"): ("role",),
}
"""Route -> keys of its request and its answer that entries hold. Nothing else of them is recorded: no secrets, no payloads."""

PIECEWISE = frozenset({("PUT", "/model-files/{sha256}"), ("PUT", "/releases/files/{sha256}")})
"""Uploads in pieces: recorded at the first piece that a process receives of a file from the same caller."""
UNRECORDED = frozenset(
    {("POST", "/experiments/check"), ("POST", "/experiments/privacy"), ("POST", "/session/oidc/begin")}
)
"""Requests that change nothing, or nothing yet, although their method may; only their refusals are recorded."""
_UPLOADS_REMEMBERED = 1000
_REFUSALS_OF_ONE = 60
"""Entries for refusals of one caller in a burst; then one a minute. Strangers count as one caller."""

_log = structlog.get_logger("fedloop.audit")


@dataclass
class _Recording:
    """What the middleware must know of a request at its end."""

    begun: int | None = None
    is_silent: bool = False
    upload: tuple[str, ...] | None = None
    route: tuple[str, str] | None = None
    entry: dict[str, Any] = field(default_factory=dict)


class AuditRecorder:
    """Writes the entries of one process. For one thread only, that of the event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._uploads: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._refusals = TokenBuckets(1 / 60, _REFUSALS_OF_ONE)
        self._not_recorded: Counter[str] = Counter()

    async def begin(self, request: Request, recording: _Recording) -> None:
        """Announces the change that a request is about to make; durable on return."""
        principal, route = _principal_of(request.scope), route_key(request)
        if principal is None or request.method in SAFE_METHODS or route in UNRECORDED:
            return
        if route in PIECEWISE:
            recording.upload = (principal.kind, principal.name, request.url.path)
            if recording.upload in self._uploads:
                recording.is_silent = True
                return
        entry = _entry("begun", request.scope, route, details=await _body_values(request, route))
        recording.route, recording.entry = route, vars(entry)
        recording.begun = await self._append(entry)
        failpoints.reach("audit.begun")

    async def end(self, scope: Scope, recording: _Recording, status: int, body: bytes) -> None:
        """Records the outcome of a request, if it is one to record. Failures are logged: the change is made already."""
        try:
            entry = self._ending(scope, recording, status, body)
            if entry is None:
                return
            if recording.begun is not None:
                failpoints.reach("audit.changed")
            await self._append(entry)
            if recording.begun is not None:
                failpoints.reach("audit.ended")
        except Exception:
            _log.exception("audit_outcome_not_recorded", begun=recording.begun, status=status)

    def _ending(self, scope: Scope, recording: _Recording, status: int, body: bytes) -> Entry | None:
        is_success = status < 400
        if recording.begun is not None and recording.route is not None:
            if recording.upload is not None and is_success:
                self._remember(recording.upload)
            details = _answer_values(body, recording.route, is_success=is_success)
            values = {
                **recording.entry,
                "stage": "ended",
                "begun": recording.begun,
                "status": status,
                "details": details,
            }
            return Entry(**values)
        if recording.is_silent and is_success:
            return None
        route = _route_of(scope)
        if status in REFUSALS:
            return self._refusal(scope, route, status, body)
        if is_success and scope["method"] not in SAFE_METHODS and route is not None:
            if route in UNRECORDED:
                return None
            return _entry("done", scope, route, status, _answer_values(body, route, is_success=True))
        return None

    def _refusal(self, scope: Scope, route: tuple[str, str] | None, status: int, body: bytes) -> Entry | None:
        principal = _principal_of(scope)
        if route is None or (principal is None and scope["method"] in SAFE_METHODS):
            return None
        caller = "" if principal is None else f"{principal.kind} {principal.name}"
        if self._refusals.take(caller):
            self._not_recorded[caller] += 1
            return None
        details = _answer_values(body, route, is_success=False)
        if skipped := self._not_recorded.pop(caller, 0):
            details["not_recorded_before"] = skipped
        return _entry("refused", scope, route, status, details)

    def _remember(self, upload: tuple[str, ...]) -> None:
        self._uploads[upload] = None
        if len(self._uploads) > _UPLOADS_REMEMBERED:
            self._uploads.popitem(last=False)

    async def _append(self, entry: Entry) -> int:
        now = self._services.clock()
        return await self._services.write(lambda at: append(at, entry, now))


class AuditMiddleware:
    """Records the outcome of each change before its answer is sent. The outermost one: it sees the final status."""

    def __init__(self, app: ASGIApp, *, recorder: AuditRecorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        recording = scope.setdefault("state", {})["audit"] = _Recording()
        start: Message | None = None

        async def record(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _may_be_recorded(scope, message["status"]):
                start = message  # held until its outcome is recorded; other answers may be streams
                return
            if start is not None:
                await self._recorder.end(scope, recording, start["status"], message.get("body", b""))
                await send(start)
                start = None
            await send(message)

        await self._app(scope, receive, record)


def _may_be_recorded(scope: Scope, status: int) -> bool:
    return scope["method"] not in SAFE_METHODS or status in REFUSALS


async def record_begin(request: Request) -> None:
    """A dependency of every route, after those that check the caller's permission."""
    recorder: AuditRecorder = request.app.state.audit_recorder
    await recorder.begin(request, request.state.audit)


def _entry(
    stage: Stage,
    scope: Scope,
    route: tuple[str, str],
    status: int | None = None,
    details: Mapping[str, Any] | None = None,
) -> Entry:
    principal, client = _principal_of(scope), scope.get("client")
    return Entry(
        stage,
        "anonymous" if principal is None else principal.kind,
        "" if principal is None else principal.name,
        " ".join(route),
        address=client[0] if client else "",
        resource=_resource(scope, route, principal),
        status=status,
        details=details or {},
    )


def _resource(scope: Scope, route: tuple[str, str], principal: Principal | None) -> dict[str, Any]:
    """The path parameters, and the project if the route is of one. Entries without a project concern `default`."""
    resource = dict(scope.get("path_params", {}))
    project = None if principal is None or route in OF_USER | OF_COORDINATOR else principal.project
    return resource if project in (None, DEFAULT_PROJECT) else {"project": project, **resource}


def _principal_of(scope: Scope) -> Principal | None:
    principal: Principal | None = scope.get("state", {}).get("principal")
    return principal


def _route_of(scope: Scope) -> tuple[str, str] | None:
    """Method and path template of the route that a request reached; None if it reached none."""
    path = getattr(scope.get("route"), "path_format", None)
    return None if path is None else (scope["method"], path)


async def _body_values(request: Request, route: tuple[str, str]) -> dict[str, Any]:
    if route not in RECORDED_VALUES:
        return {}
    return _values(await request.body(), RECORDED_VALUES[route])


def _answer_values(body: bytes, route: tuple[str, str], *, is_success: bool) -> dict[str, Any]:
    """Recorded values of an answer; of an error, its code."""
    if is_success:
        return _values(body, RECORDED_VALUES.get(route, ()))
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return {"code": str(json.loads(body)["error"]["code"])}
    return {}


def _values(body: bytes, keys: tuple[str, ...]) -> dict[str, Any]:
    """The values of these keys in a JSON object that are scalars, or short lists of them."""
    if not keys:
        return {}
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {key: document[key] for key in keys if key in document and _is_plain(document[key])}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 50 and all(isinstance(each, bool | int | float) for each in value)
    return isinstance(value, str | bool | int | float)
