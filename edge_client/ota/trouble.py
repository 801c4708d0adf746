"""Why a release does not run here: it will not, or not yet. Codes are stable and listed in `docs/device-models.md`."""

from __future__ import annotations


class PutOff(Exception):
    """Not now: what was shown cannot be trusted, or there is no room. Says nothing about the version; tried again later."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code
        self.words = words


class Unfit(Exception):
    """The version does not run on this device: wrong answers, another class of device. Not tried again unless forced."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code
        self.words = words


class NotSigned(Exception):
    """An offer that the signed repository knows nothing of: ignored, and noted."""
