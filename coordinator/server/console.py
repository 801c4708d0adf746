"""The web console: files that `make web` builds, served beside the operator API.

The page may load from its own origin only, and runs no inline script and no inline style element; what it shows comes from the API.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.responses import FileResponse, HTMLResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.oidc.configuration import CALLBACK_PATH

BUILT = Path(__file__).parents[1] / "console"
"""Where `make web` leaves the built files; the wheel has them too."""

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Of every response of the operator's port."""

_NOT_BUILT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Fedloop</title>
<h1>The console is not built</h1>
<p>Run <code>make web</code> in the checkout, or install the wheel, and restart <code>fedloop serve</code>.
The operator API is served at <code>/api/v1</code>.</p></html>
"""


def add_console(app: FastAPI, built: Path = BUILT) -> None:
    """Serves the console at `/`. Its files are the same for everybody; the API decides who sees what."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    @router.get(CALLBACK_PATH)
    def index() -> Response:
        page = built / "index.html"
        if not page.is_file():
            return HTMLResponse(_NOT_BUILT, 503)
        return FileResponse(page, headers={"cache-control": "no-cache"})

    app.include_router(router)
    app.mount("/assets", _HashedFiles(directory=built / "assets", check_dir=False))


class _HashedFiles(StaticFiles):
    """Files whose names hold a hash of their content, so that a browser never has to ask for one again."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
        return response


class SecurityHeadersMiddleware:
    """Sets the headers in `HEADERS` on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
