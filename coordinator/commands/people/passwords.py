"""Secrets that commands read from a prompt, or from standard input where nobody types: never from the command line."""

from __future__ import annotations

import getpass
import sys

from coordinator.errors import UserError


def read_secret(prompt: str, *, confirm: bool = False) -> str:
    """A password or token: typed unseen on a terminal, twice with `confirm`, otherwise the next line of standard input.

    Raises:
        UserError: it is empty, or the two differ.
    """
    if not sys.stdin.isatty():
        secret = sys.stdin.readline().rstrip("\r\n")
    else:
        secret = getpass.getpass(f"{prompt}: ")
        if confirm and getpass.getpass(f"{prompt} again: ") != secret:
            raise UserError("the two differ; try again")
    if not secret:
        raise UserError(
            f"{prompt.lower()}: nothing was given; type it, or pass it on standard input, in a line"
        )
    return secret
