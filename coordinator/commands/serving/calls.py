"""Calls of the commands to a server of this machine, which its home says how to reach."""

from __future__ import annotations

import json
import os
import ssl
from pathlib import Path
from typing import Annotated, Any

import typer
import urllib3

from coordinator.errors import UserError
from coordinator.serving.paths import ADDRESS_FILE, TOKEN_FILE
from edge_client.files import read_regular

_TIMEOUT = urllib3.Timeout(connect=5, read=600)

Home = Annotated[
    Path | None,
    typer.Option(
        "--home",
        envvar="FEDLOOP_SERVING_HOME",
        show_envvar=True,
        help="Folder of the server's state; one server at a time uses it. Default: fedloop-serving among the user's data.",
        metavar="DIR",
    ),
]
AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-code",
        help="A model of your own code that may be built here, package.module:build; may be repeated.",
        metavar="REF",
    ),
]


def home_of(home: Path | None) -> Path:
    """The folder of a server's state."""
    if home is not None:
        return home.expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "fedloop-serving"


def read_place(home: Path | None) -> dict[str, Any]:
    """What the server that uses this home has announced: `url`, `pid` and more. Raises: UserError: none has been started."""
    folder = home_of(home)
    try:
        place: dict[str, Any] = json.loads(read_regular(folder / ADDRESS_FILE))
        place["url"], place["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"--home {folder}: no server has been started here; start one: fedloop serving start --home {folder}"
        ) from None
    return place


def call(home: Path | None, method: str, path: str, body: Any = None) -> Any:
    """The answer of the server that uses this home.

    Raises:
        UserError: none runs, or it refuses, with its own message and code.
    """
    folder = home_of(home)
    url = read_place(home)["url"]
    try:
        token = read_regular(folder / TOKEN_FILE).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / TOKEN_FILE}: cannot be read: {error}") from None
    # Its certificate is for the names that others reach it by; this is the machine itself, and the token proves who asks.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    pool = urllib3.PoolManager(retries=False, timeout=_TIMEOUT, ssl_context=context)
    try:
        response = pool.request(
            method,
            f"{url}/fedloop/v1/{path}",
            headers={"Authorization": f"Bearer {token}"},
            json=body,
        )
    except (urllib3.exceptions.HTTPError, OSError):
        raise UserError(
            f"no server answers at {url}; start it: fedloop serving start --home {folder}"
        ) from None
    try:
        answer = json.loads(response.data)
    except ValueError:
        raise UserError(f"{url} answered {response.status}, but not as a server of Fedloop does") from None
    if response.status >= 300:
        raise UserError(str(answer["error"]), str(answer["code"]))
    return answer
