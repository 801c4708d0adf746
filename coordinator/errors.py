"""Two families of errors: their input is wrong, or we failed."""

from __future__ import annotations

import errno
from typing import Any

from edge_client.errors import UserError as UserError  # the one class for wrong input, also here
from edge_client.files import NO_ROOM

DISK_ERRNOS = (*NO_ROOM, errno.EROFS, errno.EIO)
"""Errors that a worker reports as the disk's. Missing files and permissions are not among them: a user's code causes these too."""


class StorageFailed(UserError):
    """A worker could not write or read a file for a reason that may be temporary; `errno` is one of `DISK_ERRNOS`."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.errno = number


class RunInterrupted(Exception):
    """A run stopped before its last round for a reason outside the experiment. The message says how to resume.

    Attributes:
        exit_status: of the command; 75 (EX_TEMPFAIL) where a signal asked it to save its work and stop.
    """

    exit_status = 1


class NothingLearnt(Exception):
    """A run completed, but no round changed the model. The message says what happened to the clients' updates."""


class Refusal(Exception):
    """A refused request: HTTP status, stable code, a message for people and details for programs.

    Both APIs answer `{"error": {"code": …, "message": …, **details}}`.

    Attributes:
        retry_after_seconds: when to repeat the request; sent as `Retry-After`.
        closes: whether the connection ends with this answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_seconds: float | None = None,
        closes: bool = False,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.closes = closes
        self.status = status
        self.code = code
        self.details = details
