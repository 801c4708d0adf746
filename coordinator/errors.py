"""Two families of errors: their input is wrong, or we failed."""

from __future__ import annotations

from typing import Any


class UserError(Exception):
    """Something a user gave is wrong. The message names the file, key and value, and what to do.

    The command line prints it and exits with 2; the API answers 4xx with `code`.
    """

    def __init__(self, message: str, code: str = "bad_input") -> None:
        super().__init__(message)
        self.code = code


class RunInterrupted(Exception):
    """A run stopped before its last round, for a reason outside the experiment. The message says how to resume."""


class Refusal(Exception):
    """A request that is refused: HTTP status, stable code, words for a person, and details a program can use.

    Both APIs answer `{"error": {"code": …, "message": …, **details}}`.
    """

    def __init__(self, status: int, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.details = details
