"""The admin token, the credential of the operator API that needs no account.

It is the content of `admin.token` in the coordinator's home, readable by its owner only. Replacing the file replaces the
token from the next request on. A guessable token is refused.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from coordinator.errors import Refusal, UserError
from edge_client.files import write_durably

TOKEN_FILE = "admin.token"
MIN_TOKEN_CHARACTERS = 32
"""Of a token that a person chose; a generated one has 43, from 256 random bits."""


def ensure_admin_token(home: Path) -> None:
    """Creates the token file if it is missing or empty; keeps an existing one and closes it to other users.

    Raises:
        UserError: the existing token could be guessed.
    """
    path = home / TOKEN_FILE
    if not path.exists() or not path.read_bytes().strip():
        write_durably(path, secrets.token_urlsafe(32).encode() + b"\n")  # home itself is closed to others
    path.chmod(0o600)
    try:
        length = len(read_admin_token(home))
    except UnicodeDecodeError:
        length = 0
    if length < MIN_TOKEN_CHARACTERS:
        raise UserError(
            f"{path}: a token of {length} characters, expected {MIN_TOKEN_CHARACTERS} random ones or more; remove the "
            "file, and `fedloop serve` creates one"
        )


def read_admin_token(home: Path) -> str:
    """The admin token of the coordinator with this home.

    Raises:
        OSError: the file is missing, or this user may not read it.
    """
    return (home / TOKEN_FILE).read_text("ascii").strip()


def require_admin_token(home: Path) -> str:
    """The token that is valid at this moment.

    Raises:
        Refusal: 503 `no_admin_token`: the file is missing, unreadable, or holds a guessable token.
    """
    try:
        token = read_admin_token(home)
        if len(token) >= MIN_TOKEN_CHARACTERS:
            return token
        reason = f"a token has at least {MIN_TOKEN_CHARACTERS} characters, this one has {len(token)}"
    except UnicodeDecodeError:
        reason = "it is not ASCII text"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    raise Refusal(
        503,
        "no_admin_token",
        f"the coordinator cannot read the file {TOKEN_FILE} in its home: {reason}; restore it, or restart the coordinator, "
        "which creates a new one",
    )
