"""Two families of errors on a device: the person's mistake, and ours."""

from __future__ import annotations


class UserMistake(Exception):
    """Something a person gave is wrong. The message says what arrived, what was expected, what to do; exit code 2."""


class Stopped(Exception):
    """The daemon cannot go on until a person acts, such as after a revocation; exit code 1, the message says why."""
