"""Errors of a person's input, everywhere, and of a device that cannot go on."""

from __future__ import annotations


class UserError(Exception):
    """A person's input is wrong. The message names the file, key and value, what was expected, and what to do.

    Commands print it and exit with 2; the APIs answer 4xx with `code`.
    """

    def __init__(self, message: str, code: str = "bad_input") -> None:
        super().__init__(message)
        self.code = code


class Stopped(Exception):
    """The daemon cannot go on until a person acts, such as after a revocation; the message says why."""
