"""Which token a command sends, and the file of tokens that `fedloop login` leaves.

In this order: `FEDLOOP_TOKEN`, `FEDLOOP_ADMIN_TOKEN`, the token of `fedloop login` for this coordinator, and the admin token in the
default home, which is sent to this machine only: a mistyped address must not learn it. No option takes a token: other users of a machine can
read the arguments of a command.

The file is `credentials.json` in `$XDG_CONFIG_HOME/fedloop` or `~/.config/fedloop`, for its user only (0600); a file that others can
read is refused.
"""

from __future__ import annotations

import ipaddress
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from coordinator.errors import UserError
from coordinator.settings import default_home
from edge_client.files import write_durably

VARIABLES = ("FEDLOOP_TOKEN", "FEDLOOP_ADMIN_TOKEN")


@dataclass(frozen=True)
class Credential:
    """A token, and where it is from, for messages."""

    token: str
    source: str


def find_credential(url: str) -> Credential:
    """The token for the coordinator at this address.

    Raises:
        UserError: there is none, or the file of tokens is damaged or readable by others.
    """
    for variable in VARIABLES:
        if token := os.environ.get(variable, "").strip():
            return Credential(token, variable)
    if token := _read().get(_origin(url), ""):
        return Credential(token, f"{credentials_file()}; to sign in again: fedloop login")
    path = default_home() / "admin.token"
    if not _is_this_machine(url):
        raise UserError(
            f"not signed in to {url}: sign in with `fedloop login`, or give a token in FEDLOOP_TOKEN. The admin token in {path} is "
            "sent to an address of this machine only"
        )
    try:
        return Credential(path.read_text("ascii").strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(
            f"not signed in to {url}: sign in with `fedloop login`, or give a token in FEDLOOP_TOKEN. There is no admin token "
            f"either: {path}: {reason}; FEDLOOP_HOME names the home of `fedloop serve`"
        ) from None


def find_saved(url: str) -> str | None:
    """The token that `fedloop login` left for the coordinator at this address. Raises: UserError: as above."""
    return _read().get(_origin(url))


def save_token(url: str, token: str | None) -> None:
    """Keeps a token for the coordinator at this address in place of an earlier one; None removes that.

    Raises:
        UserError: the file cannot be written, or is not usable as it is.
    """
    tokens = _read()
    tokens.pop(_origin(url), None)
    if token is not None:
        tokens[_origin(url)] = token
    path = credentials_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(path, json.dumps(tokens, indent=1).encode() + b"\n", mode=0o600)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the token was not kept") from None


def credentials_file() -> Path:
    """Where the user's tokens are kept."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder).expanduser().absolute() / "fedloop" / "credentials.json"


def _read() -> dict[str, str]:
    path = credentials_file()
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            tokens = json.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError:
        tokens, mode = None, 0
    if not isinstance(tokens, dict) or not all(isinstance(each, str) for each in tokens.values()):
        raise UserError(f"{path}: is not a file of tokens; remove it and sign in again: fedloop login")
    if mode & 0o077:
        raise UserError(
            f"{path}: other users can read it (mode {mode:o}, expected 600); revoke its tokens if somebody may have, then: "
            f"chmod 600 {path}"
        )
    return tokens


def _is_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"
