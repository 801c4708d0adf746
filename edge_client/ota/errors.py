"""Why a release does not run here: never, or not yet. Codes are stable and listed in `docs/device-models.md`."""

from __future__ import annotations


class _Coded(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Postponed(_Coded):
    """Not now: the metadata cannot be trusted, or there is no room. Says nothing about the version; tried again later."""


class Rejected(_Coded):
    """The version does not run on this device: wrong answers, another device class. Not tried again unless forced."""


TRANSIENT_CODES = ("too_slow", "memory")
"""Codes of possibly temporary rejections: a version that passed its trial is not given up for them."""


class NotWithdrawn(Exception):
    """An order to run no version, although a version that the device has is still released: the device keeps it."""


class NotSigned(Exception):
    """An offer that is not in the signed repository: ignored and noted."""
