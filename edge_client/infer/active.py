"""The release that a device runs now, opened, for a service that outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from edge_client.errors import UserMistake
from edge_client.infer import selftest
from edge_client.infer.predict import NoRelease
from edge_client.infer.runtime import Loaded, load
from edge_client.ota.served import Starts
from edge_client.train.golden import SelfTestFailed
from edge_client.wire.inference import MANIFEST_NAME
from edge_client.wire.manifest import ManifestError

AGAIN_SECONDS = 10.0
"""After this a release that could not be opened is tried again: memory may have been short."""

_Stamp = tuple[str, int, int]


class ActiveModel:
    """Opened and tested at once; `renew` follows the device. While another release cannot be opened, the old one goes on.

    Args:
        find: the folder of the release to run now.
        say: one line for the log.
        starts: told when a release is opened, and when it lasted.
        now: seconds, never jumps.

    Raises:
        UserMistake, ManifestError, SelfTestFailed: there is no release, or it cannot be used here.
    """

    def __init__(
        self,
        find: Callable[[], Path],
        say: Callable[[str], None],
        starts: Starts | None,
        now: Callable[[], float],
    ) -> None:
        self._find, self._say, self._starts, self._now = find, say, starts, now
        self._tried: tuple[_Stamp, float] | None = None
        self._warned = ""
        folder = find()
        self._stamp, self.loaded = _stamp(folder), self._opened(folder)

    @property
    def name(self) -> str:
        """Such as `digits:3`."""
        return f"{self.loaded.manifest.model}:{self.loaded.manifest.version}"

    def renew(self) -> None:
        """Opens the release that is active now, when it is another one.

        Raises:
            NoRelease: none is: what was taken back answers nothing.
        """
        try:
            folder = self._find()
            stamp = _stamp(folder)
            if stamp == self._stamp:
                return
            if self._tried is not None and self._tried[0] == stamp and self._now() < self._tried[1]:
                return
            self._tried = stamp, self._now() + AGAIN_SECONDS
            self.loaded = self._opened(folder)
        except NoRelease:
            raise
        except (UserMistake, ManifestError, SelfTestFailed, OSError) as error:
            words = f"goes on with {self.name}: {error}"
            if words != self._warned:  # it is asked again with every batch
                self._say(words)
            self._warned = words
            return
        self._stamp, self._tried, self._warned = stamp, None, ""
        self._say(f"runs {self.name} now")

    def settled(self) -> None:
        """It lasted, or is closed in order."""
        if self._starts is not None:
            self._starts.settled()

    async def settle_when_it_lasted(self) -> None:
        """For as long as the service runs."""
        while self._starts is not None:
            left = self._starts.lasts_at - self._now()
            if left <= 0:
                self.settled()
            await asyncio.sleep(max(1.0, min(left, 60.0)))

    def _opened(self, folder: Path) -> Loaded:
        """Raises as `load` and `selftest.require`; a file that ends this process here does not get to raise."""
        if self._starts is not None:
            self._starts.opening(folder)
        try:
            loaded = load(folder)
            selftest.require(loaded)
        except BaseException:
            self.settled()
            raise
        return loaded


def _stamp(folder: Path) -> _Stamp:
    """Changes with every release that is installed. Raises ManifestError where there is none."""
    try:
        found = (folder / MANIFEST_NAME).stat()
    except OSError as error:
        raise ManifestError(f"{error.filename}: {error.strerror}") from None
    return str(folder), found.st_ino, found.st_mtime_ns
