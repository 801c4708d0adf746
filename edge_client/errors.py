"""Errors that end a command on a device."""

from __future__ import annotations


class UserMistake(Exception):
    """A person's input is wrong. The message says what arrived, what was expected, what to do; exit code 2."""


class Stopped(Exception):
    """The daemon cannot go on until a person acts, such as after a revocation; the message says why."""
